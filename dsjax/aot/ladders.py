"""Bucket ladders: the sizes that executables are compiled for. A step is padded up to the next one."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# (largest bucket of the stretch, distance between its buckets). Cost is flat below 128 tokens, and sizes that are no
# multiple of 8 add padding kernels around every cuBLAS call.
_TOKEN_STRETCHES = ((16, 8), (32, 16), (128, 32), (256, 16), (512, 32), (1024, 64), (4096, 256))
_LAST_DISTANCE = 512
_FIRST_ROWS = (1, 2, 4, 8, 16)
_TAIL_ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
# Products compute this many rows alike wherever they stand; rows left over are added up in another order.
ROW_GROUP = 16


@dataclass(frozen=True)
class Buckets:
    """The buckets of a deployment: tokens of mixed bodies, rows of decode bodies, rows of tails.

    Without mixed bodies, prompts too run as decode tokens.
    """

    tokens: tuple[int, ...]
    decode: tuple[int, ...]
    tails: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The size of all row-side arrays: max_num_seqs, or more in deterministic mode."""
        return self.tails[-1]

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return (self.tokens or self.decode)[-1]


def one_shape(tokens: int) -> Buckets:
    """The buckets of deterministic mode: one body and one tail serve every step, so no result depends on a bucket.

    `tokens`, a multiple of 2 * ROW_GROUP, is the size of the body. Rows are half of it: prompts go on while all decode.
    """
    return Buckets((), (tokens,), (tokens // 2,))


def token_ladder(largest: int) -> tuple[int, ...]:
    """Token buckets of mixed bodies up to `largest`, which is the last one."""
    ladder, bucket = [], 0
    while bucket < largest:
        distance = next((step for end, step in _TOKEN_STRETCHES if bucket < end), _LAST_DISTANCE)
        bucket = min(bucket + distance, largest)
        ladder.append(bucket)
    return tuple(ladder)


def row_ladder(largest: int) -> tuple[int, ...]:
    """Row buckets of decode bodies up to `largest`, which is the last one."""
    ladder = [rows for rows in _FIRST_ROWS if rows < largest]
    ladder += range(24, largest, 8)
    return (*ladder, largest)


def tail_ladder(largest: int) -> tuple[int, ...]:
    """Row buckets of tails up to `largest`, which is the last one."""
    return (*(rows for rows in _TAIL_ROWS if rows < largest), largest)


def sparse(ladder: Sequence[int], ratio: int = 4) -> tuple[int, ...]:
    """Every bucket that is `ratio` times the one before, counted down from the last: few compiles, more padding."""
    kept = [ladder[-1]]
    for bucket in reversed(ladder):
        if bucket * ratio <= kept[-1]:
            kept.append(bucket)
    return tuple(reversed(kept))


def pick(ladder: Sequence[int], size: int) -> int:
    """The smallest bucket that holds `size`. The caller keeps `size` within the ladder."""
    return ladder[bisect_left(ladder, size)]
