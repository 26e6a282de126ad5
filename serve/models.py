"""GET /v1/models."""

from fastapi import APIRouter

from dsjax.serve.context import Context, FromApp
from dsjax.serve.responses import ModelCard, ModelList

router = APIRouter()


@router.get("/v1/models")
async def list_models(context: FromApp) -> ModelList:
    """The served model, under each of its names."""
    return ModelList(data=[_card(name, context) for name in context.names])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, context: FromApp) -> ModelCard:
    """One model."""
    return _card(context.check_model(name), context)


def _card(name: str, context: Context) -> ModelCard:
    return ModelCard(id=name, created=context.created, max_model_len=context.engine.limits.max_model_len)
