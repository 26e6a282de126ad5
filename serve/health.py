"""GET /health."""

from fastapi import APIRouter
from pydantic import BaseModel

from dsjax.errors import EngineDeadError
from dsjax.serve.context import FromApp

router = APIRouter()


class Health(BaseModel):
    """The engine is alive, and has this many requests running and waiting."""

    status: str = "ok"
    running: int
    waiting: int


@router.get("/health")
async def health(context: FromApp) -> Health:
    """200 while the engine process is alive, 503 after that."""
    if not context.engine.alive:
        raise context.engine.error or EngineDeadError("The engine has not started.")
    stats = context.engine.stats
    return Health(running=stats.running if stats else 0, waiting=stats.waiting if stats else 0)
