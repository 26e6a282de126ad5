"""The HTTP application: endpoints, errors, request ids and the limit on bodies put together."""

from fastapi import FastAPI
from starlette.types import ASGIApp

import dsjax
from dsjax.serve import completions, health, models
from dsjax.serve.body_limit import BodyLimitMiddleware
from dsjax.serve.chat import completions as chat_completions
from dsjax.serve.context import Context
from dsjax.serve.errors import install_error_handlers
from dsjax.serve.request_id import RequestIdMiddleware


def build_app(context: Context) -> ASGIApp:
    """The application that serves `context`."""
    app = FastAPI(title="dsjax", version=dsjax.__version__, strict_content_type=False)
    app.state.context = context
    install_error_handlers(app)
    for module in (health, models, completions, chat_completions):
        app.include_router(module.router)
    return RequestIdMiddleware(BodyLimitMiddleware(app))
