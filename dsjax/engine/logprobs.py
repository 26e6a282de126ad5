"""Log-probabilities of tokens as the host handles them. No JAX here: the HTTP process uses this module too."""

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Log-probability of a token in the model's own distribution, and the likeliest tokens at its place, best first.

    `top` holds (token id, log-probability), as many as were asked for. All numbers are finite: -9999.0 stands for
    whatever is not.
    """

    logprob: float
    top: list[tuple[int, float]]


class Picked(NamedTuple):
    """What the device gives for one place of a step: the token sampled there, or the known one that was scored.

    `logprobs` is None unless the request asked for them.
    """

    token: int
    logprobs: TokenLogprobs | None
