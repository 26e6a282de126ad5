"""Sampling parameters: what a request may ask of the sampler. No JAX here: the HTTP process uses this module too."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from dsjax.errors import RequestError

LARGEST_FLOAT32 = 3.4028234e38
SMALLEST_NORMAL_FLOAT32 = 1.1754944e-38
MAX_INT32 = 2**31 - 1

MAX_ALTERNATIVES = 20  # likeliest tokens that the device reports per place
MAX_BIASED_IDS = 512  # places of a row's logit_bias on the device
MAX_STOP_IDS = 64  # places of a row's stop_token_ids on the device
MAX_ANSWERS = 128


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Raises RequestError on bad values.

    The options apply in this order: allowed_token_ids and min_tokens, logit_bias, penalties, temperature, min_p, top_k,
    top_p.

    `temperature` 0, or anything below 1e-5, is greedy. `top_k` 0 or -1 is off, `top_p` 1 is off, `min_p` 0 is off:
    it drops tokens less likely than min_p times the likeliest. `seed` None: a random one. `max_tokens` None: as many as
    the context holds. `ignore_eos`: go on past the end-of-text token. `stop_token_ids` end an answer as well; before
    `min_tokens` tokens, neither these nor the end of text can be sampled.

    `presence_penalty` is taken once from the logit of each token in the answer so far, `frequency_penalty` once per
    occurrence; `repetition_penalty` divides positive logits, and multiplies negative ones, of all tokens in prompt and
    answer (1 is off). `logit_bias` adds to the logits of token ids; `allowed_token_ids` excludes all others.

    `n` answers to the same prompt; the i-th has the seed `seed` + i. `logprobs` asks for the log-probability of each
    sampled token, and for that many of the likeliest tokens (0: none) at its place; `prompt_logprobs` for the same of
    the prompt's tokens. Both are of the model's own distribution, before any of the above.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int | None = 16
    seed: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        self._check_numbers()
        self._check_ids()
        if self.max_tokens is not None:
            self._check_min_tokens(self.max_tokens)

    def answers(self) -> list["SamplingParams"]:
        """The parameters of each of the n answers, as requests of their own; a given seed is counted up.

        The first alone asks for the prompt's log-probabilities, which are those of all.
        """
        first = replace(self, n=1)
        seeds = [None if self.seed is None else _wrapped(self.seed + index) for index in range(1, self.n)]
        return [first, *(replace(first, seed=seed, prompt_logprobs=None) for seed in seeds)]

    @property
    def has_constraints(self) -> bool:
        """Whether logits are changed by more than the numbers of temperature and cuts."""
        additive = self.presence_penalty or self.frequency_penalty or self.logit_bias or self.min_tokens
        return bool(additive) or self.repetition_penalty != 1 or self.allowed_token_ids is not None

    def end_ids(self, eos_token_ids: Iterable[int]) -> list[int]:
        """The tokens that end an answer, given those of the model."""
        return [*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)]

    def check_fits(self, vocab_size: int, max_tokens: int) -> None:
        """Raise RequestError unless all ids are in the vocabulary and min_tokens is within the resolved max_tokens."""
        self._check_min_tokens(max_tokens)
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"Token {token} in {name} is outside the vocabulary 0..{vocab_size - 1}.", param=name
                    )

    def _check_numbers(self) -> None:
        self._check("temperature", Real, lambda v: 0 <= v <= LARGEST_FLOAT32, f"a number from 0 to {LARGEST_FLOAT32}")
        self._check("top_p", Real, lambda v: 0 < v <= 1, "a number above 0 and at most 1")
        self._check("top_k", Integral, lambda v: -1 <= v <= MAX_INT32, f"an integer from -1 to {MAX_INT32} (-1: off)")
        self._check("min_p", Real, lambda v: 0 <= v < 1, "a number of at least 0 and below 1")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, Real, lambda v: -2 <= v <= 2, "a number from -2 to 2")
        self._check(
            "repetition_penalty",
            Real,
            lambda v: SMALLEST_NORMAL_FLOAT32 <= v <= LARGEST_FLOAT32,
            f"a number from {SMALLEST_NORMAL_FLOAT32} to {LARGEST_FLOAT32}",
        )
        self._check("min_tokens", Integral, lambda v: v >= 0, "an integer of at least 0")
        self._check("n", Integral, lambda v: 1 <= v <= MAX_ANSWERS, f"an integer from 1 to {MAX_ANSWERS}")
        if self.max_tokens is not None:
            self._check("max_tokens", Integral, lambda v: v >= 1, "an integer of at least 1")
        if self.seed is not None:
            self._check("seed", Integral, lambda v: -(2**63) <= v < 2**63, "an integer from -2**63 to 2**63 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                expected = f"an integer from 0 to {MAX_ALTERNATIVES}"
                self._check(name, Integral, lambda v: 0 <= v <= MAX_ALTERNATIVES, expected)

    def _check(self, name: str, kind: type, accepts: Callable[[Any], bool], expected: str) -> None:
        """Check the field `name`, and keep it as a plain int or float (NumPy numbers are welcome)."""
        value = getattr(self, name)
        if not _is_number(value, kind) or not accepts(value):
            raise RequestError(f"{name} is {value!r}, expected {expected}.", param=name)
        object.__setattr__(self, name, int(value) if kind is Integral else float(value))

    def _check_ids(self) -> None:
        """Check the fields that hold token ids, and keep them as plain tuples and dicts."""
        stop = _token_ids("stop_token_ids", self.stop_token_ids)
        if len(stop) > MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids has {len(stop)} ids; at most {MAX_STOP_IDS}.", param="stop_token_ids")
        object.__setattr__(self, "stop_token_ids", stop)
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError("allowed_token_ids is empty; allow at least one token.", param="allowed_token_ids")
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def _check_min_tokens(self, max_tokens: int) -> None:
        if self.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but the answer may have {max_tokens} tokens at most.",
                param="min_tokens",
            )


def _wrapped(seed: int) -> int:
    """`seed` as a signed 64-bit integer, counting on from the smallest after the largest."""
    return (seed + 2**63) % 2**64 - 2**63


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    """Distinct ids in ascending order. Raises RequestError if `ids` is no list of integers."""
    if isinstance(ids, str | Mapping) or not isinstance(ids, Iterable):
        raise RequestError(f"{name} is {ids!r}, expected a list of token ids.", param=name)
    ids = list(ids)
    for token in ids:
        if not _is_number(token, Integral):
            raise RequestError(f"{name} holds {token!r}, expected token ids only.", param=name)
    return tuple(sorted({int(token) for token in ids}))


def _biases(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias is {biases!r}, expected a mapping of token ids to numbers.", param="logit_bias")
    if len(biases) > MAX_BIASED_IDS:
        raise RequestError(f"logit_bias has {len(biases)} ids; at most {MAX_BIASED_IDS}.", param="logit_bias")
    for token, bias in biases.items():
        if not _is_number(token, Integral) or not _is_number(bias, Real) or not -100 <= bias <= 100:
            raise RequestError(
                f"logit_bias has {token!r}: {bias!r}, expected a token id and a number from -100 to 100.",
                param="logit_bias",
            )
    return {int(token): float(bias) for token, bias in biases.items()}
