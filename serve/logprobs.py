"""Log-probabilities in the shapes that the API has for them. All numbers are finite: dsjax/engine/logprobs.py."""

from collections.abc import Sequence

from dsjax.engine.logprobs import TokenLogprobs
from dsjax.serve.answers import Token
from dsjax.serve.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    PromptToken,
    TokenLogprob,
)
from dsjax.serve.token_names import TokenNames


def completion_logprobs(tokens: Sequence[Token], alternatives: int, names: TokenNames) -> CompletionLogprobs:
    """The legacy shape: lists with an entry per token. Each token's own log-probability is among its alternatives."""
    return CompletionLogprobs(
        tokens=[names.text(token.id) for token in tokens],
        token_logprobs=[None if token.logprobs is None else token.logprobs.logprob for token in tokens],
        top_logprobs=[_alternatives(token, alternatives, names) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def chat_logprobs(tokens: Sequence[Token], alternatives: int, names: TokenNames) -> ChatLogprobs:
    """The shape of chat answers."""
    content = []
    for token in tokens:
        assert token.logprobs is not None, "asked for with the request"
        top = [_named(one, logprob, names) for one, logprob in token.logprobs.top[:alternatives]]
        own = _named(token.id, token.logprobs.logprob, names)
        content.append(ChatTokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
    return ChatLogprobs(content=content)


def prompt_logprobs(tokens: Sequence[Token], alternatives: int, names: TokenNames) -> PromptLogprobs:
    """vLLM's shape: for each token of the prompt the likeliest ones at its place and itself, by id."""
    return [None if t.logprobs is None else _by_id(t.id, t.logprobs, alternatives, names) for t in tokens]


def _alternatives(token: Token, count: int, names: TokenNames) -> dict[str, float] | None:
    if token.logprobs is None:
        return None
    found: dict[str, float] = {}
    for one, logprob in [*token.logprobs.top[:count], (token.id, token.logprobs.logprob)]:
        found.setdefault(names.text(one), logprob)
    return found


def _named(token: int, logprob: float, names: TokenNames) -> TokenLogprob:
    return TokenLogprob(token=names.text(token), logprob=logprob, bytes=names.bytes(token))


def _by_id(token: int, logprobs: TokenLogprobs, count: int, names: TokenNames) -> dict[int, PromptToken]:
    ranked = {
        one: PromptToken(logprob=logprob, rank=rank, decoded_token=names.text(one))
        for rank, (one, logprob) in enumerate(logprobs.top[:count], start=1)
    }
    return {token: PromptToken(logprob=logprobs.logprob, decoded_token=names.text(token))} | ranked
