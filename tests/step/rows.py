"""Rows set up as the engine does it, and the sampler in float64 NumPy to compare with.

There is one shape for all tests, so that the sampler is compiled once: ROWS rows, and PLACES places per step.
"""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsjax import SamplingParams
from dsjax.cache.kinds import PageKind
from dsjax.engine.packing import pack_constraints, pack_rows
from dsjax.engine.request import Request
from dsjax.engine.scheduled import Admission
from dsjax.step.inputs import SampleInputs
from dsjax.step.layout import NONE, ConstraintShape
from dsjax.step.logprobs import Logprobs
from dsjax.step.sampler import Sample
from dsjax.step.sampling_state import Constraints, SamplingState, SetConstraints, SetRows

ROWS, PLACES, VOCABULARY = 20, 20_000, 40
EOS = (1,)
SHAPE = ConstraintShape(VOCABULARY, stop_ids=4, biased_ids=8, history=3)
KIND = PageKind("latent", ())


@cache
def jitted(piece_type: type, *arguments):
    piece = piece_type(*arguments)
    return jax.jit(lambda *values: piece(*values))


class Places(NamedTuple):
    """What a step samples, [n] each: rows, positions, and known tokens that are scored (NONE: sampled)."""

    rows: np.ndarray
    positions: np.ndarray
    targets: np.ndarray

    @classmethod
    def next_of(cls, requests: list[Request]) -> "Places":
        """The next token of every request."""
        positions = [len(request.prompt) + len(request.outputs) for request in requests]
        return cls(np.array([r.row for r in requests]), np.array(positions), np.full(len(requests), NONE))


class Rows:
    """Device state, in which earlier requests have left nonsense, with the rows of `requests` set as at admission."""

    def __init__(self, requests: list[Request]):
        avals = SamplingState.abstract(ROWS), Constraints.abstract(ROWS, SHAPE)
        self.sampling, self.constraints = jax.tree.map(lambda aval: jnp.full(aval.shape, 3, aval.dtype), avals)
        self.output_counts = jnp.full((ROWS, VOCABULARY), 3, jnp.int32)
        self.last_tokens = jnp.full(ROWS, 7, jnp.int32)
        self.page_tables = {"latent": jnp.zeros((ROWS, 1200), jnp.int32)}
        for row, request in enumerate(requests):
            request.row = row
        self.admit([Admission(request, {"latent": []}) for request in requests])

    def admit(self, admitted: list[Admission]) -> None:
        for packed in pack_rows(admitted, ROWS, [KIND]):
            self.sampling, self.page_tables = jitted(SetRows, ROWS, (KIND,))(packed, self.sampling, self.page_tables)
        for request, _ in admitted:
            if request.params.has_constraints:
                for packed in pack_constraints(request, SHAPE, EOS):
                    self.constraints, self.output_counts = jitted(SetConstraints, SHAPE)(
                        packed, self.constraints, self.output_counts
                    )

    def sample(self, logits: np.ndarray, places: Places) -> tuple[np.ndarray, Logprobs]:
        """Tokens and logprobs of one step; logits [V] for all places, or [n, V]."""
        count = len(places.rows)
        rows, positions, targets = (
            np.pad(values, (0, PLACES - count), constant_values=unused)
            for values, unused in zip(places, (ROWS, 5, NONE), strict=True)
        )
        followed = np.append(rows[1:], ROWS) == rows
        last = np.where(followed | (targets != NONE), ROWS, rows)
        padded = np.zeros((PLACES, VOCABULARY), np.float32)
        padded[:count] = logits
        samples = SampleInputs(*map(jnp.asarray, (np.zeros_like(rows), rows, last, positions, targets)))
        state = self.sampling, self.constraints, self.output_counts, self.last_tokens
        self.last_tokens, self.output_counts, tokens, logprobs = jitted(Sample)(padded, samples, *state)
        return np.asarray(tokens)[:count], jax.tree.map(lambda values: np.asarray(values)[:count], logprobs)


def request(params: SamplingParams, prompt: list[int], outputs: list[int] | None = None) -> Request:
    return Request("r", prompt, params, max_tokens=50, seed=params.seed or 0, outputs=outputs or [])


def softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max())
    return exp / exp.sum()


def adjusted(logits: np.ndarray, request: Request) -> np.ndarray:
    """The logits [V] from which the next token is chosen, float64, token by token as SamplingParams has it."""
    params = request.params
    result = logits.astype(np.float64)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    for token in range(len(logits)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            result[token] = -np.inf
        if len(request.outputs) < params.min_tokens and token in ends:
            result[token] = -np.inf
        result[token] += (params.logit_bias or {}).get(token, 0)
        if token in request.prompt or token in request.outputs:
            scale = params.repetition_penalty
            result[token] = result[token] / scale if result[token] > 0 else result[token] * scale
        result[token] -= params.frequency_penalty * request.outputs.count(token)
        result[token] -= params.presence_penalty * (token in request.outputs)
    return result


def distribution(logits: np.ndarray, request: Request) -> np.ndarray:
    """The probability of every token to come next, float64 [V], for logits without ties."""
    params, changed = request.params, adjusted(logits, request)
    if params.temperature == 0:
        return np.eye(len(logits))[changed.argmax()]
    probabilities = softmax(changed / params.temperature)
    order = np.argsort(-probabilities)
    order = order[probabilities[order] >= params.min_p * probabilities.max()]
    order = order[: params.top_k] if params.top_k > 0 else order
    within = probabilities[order] / probabilities[order].sum()
    if params.top_p < 1:
        order = order[: np.searchsorted(np.cumsum(within), params.top_p) + 1]
    result = np.zeros(len(logits))
    result[order] = probabilities[order] / probabilities[order].sum()
    return result
