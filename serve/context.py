"""What the endpoints work with: the engine, the tokenizer, and the names under which the model is served."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Protocol

from fastapi import Depends, Request

from dsjax.engine.request import Limits
from dsjax.engine.request import Request as EngineRequest
from dsjax.errors import EngineDeadError
from dsjax.serve.errors import ModelNotFoundError
from dsjax.serve.messages import Stats
from dsjax.serve.request_group import RequestGroup
from dsjax.serve.token_names import TokenNames
from dsjax.tokenizer import Tokenizer


class EngineConnection(Protocol):
    """What the endpoints need of an engine."""

    stats: Stats | None
    error: EngineDeadError | None

    @property
    def alive(self) -> bool: ...
    @property
    def limits(self) -> Limits: ...
    def open(self, requests: Sequence[EngineRequest]) -> RequestGroup: ...


@dataclass(frozen=True)
class Context:
    """One served model. `names`: what clients may call it, the first being the one in answers to requests without."""

    engine: EngineConnection
    tokenizer: Tokenizer | None
    names: tuple[str, ...]
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def token_names(self) -> TokenNames:
        """What the tokens are called."""
        return TokenNames(self.tokenizer)

    def check_model(self, name: str | None) -> str:
        """The model's name for the answer. Raises ModelNotFoundError if `name` is not served."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(name, self.names)
        return name or self.names[0]


def _context(http: Request) -> Context:
    return http.app.state.context


FromApp = Annotated[Context, Depends(_context)]  # the type of an endpoint's context parameter
