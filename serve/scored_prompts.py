"""Log-probabilities of prompts with several answers: only the first of a prompt's requests asks the engine for them."""

from collections.abc import Sequence

import msgspec

from dsjax.engine.logprobs import TokenLogprobs
from dsjax.engine.request import Request
from dsjax.serve.messages import TokenBatch

IndexedBatch = tuple[int, TokenBatch]


class ScoredPrompts:
    """Hands a prompt's log-probabilities, once they are there, to all of its answers, which begin with them.

    Each prompt has `per_prompt` of `requests` in a row.
    """

    def __init__(self, requests: Sequence[Request], per_prompt: int):
        self._requests, self._per_prompt = requests, per_prompt
        self._scores: dict[int, list[TokenLogprobs] | None] = {}
        self._held: dict[int, list[IndexedBatch]] = {}

    def take(self, index: int, batch: TokenBatch) -> list[IndexedBatch]:
        """What can be handed on after `batch` of request `index`: nothing while its prompt is being scored."""
        first = index - index % self._per_prompt
        if self._requests[first].params.prompt_logprobs is None:
            return [(index, batch)]
        if index == first and first not in self._scores:
            self._scores[first] = None if batch.prompt is None else batch.prompt.logprobs
            return [(index, batch), *(self._scored(first, *held) for held in self._held.pop(first, []))]
        if first not in self._scores:
            self._held.setdefault(first, []).append((index, batch))
            return []
        return [self._scored(first, index, batch)]

    def _scored(self, first: int, index: int, batch: TokenBatch) -> IndexedBatch:
        if batch.prompt is None:
            return index, batch
        prompt = msgspec.structs.replace(batch.prompt, logprobs=self._scores[first])
        return index, msgspec.structs.replace(batch, prompt=prompt)
