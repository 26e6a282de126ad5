"""The Hopper kernel of MLA decode on a real GPU: every named shape on random inputs against float64."""

import secrets
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.aot.targets import num_sms_of
from dsjax.pallas_kernels.mla_decode import DecodeRows
from dsjax.pallas_kernels.mla_decode.hopper import mla_decode, plan
from dsjax.pallas_kernels.mla_decode.shapes import SHAPES, DecodeShape
from tests.pallas_kernels.latents import PAGE, attend_latents

pytestmark = pytest.mark.gpu
LAYERS = 2
SCALE = 0.08
TOLERANCE = 5e-3
REPEATS = 20
RAGGED = [0, 1, 2, 63, 64, 65, 127, 129, 500, 0, 1024, 2000, 1, 128, 3, 700]
DISTINCT = dict.fromkeys(SHAPES.values())


@pytest.fixture
def rng() -> np.random.Generator:
    """Other inputs in each run; a failure shows the seed."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


class Inputs:
    """Random entries of `lengths` keys; NaN in pages without an owner, behind each row's end, and in pads' queries."""

    def __init__(self, rng: np.random.Generator, shape: DecodeShape, lengths: Sequence[int], tokens: int):
        pages = [-(-length // PAGE) for length in lengths]
        width, total = shape.rank + shape.rope, sum(pages) + 8
        pool = np.full((LAYERS, total, PAGE, width), np.nan, jnp.bfloat16)
        q = rng.normal(size=(len(lengths), tokens, shape.heads, width)).astype(jnp.bfloat16)
        self.tables = np.full((len(lengths), max(pages) + 1), total - 1, np.int32)
        self.latents, free = [], list(rng.permutation(total - 1))
        for row, length in enumerate(lengths):
            own = [free.pop() for _ in range(pages[row])]
            self.tables[row, : pages[row]] = own
            latents = rng.normal(size=(length, width)).astype(jnp.bfloat16)
            for i, page in enumerate(own):
                part = latents[i * PAGE : (i + 1) * PAGE]
                pool[1, page, : len(part)] = part
            self.latents.append(latents.astype(np.float64))
            if length == 0:
                q[row] = np.nan
        self.q, self.pool, self.lengths, self.shape = q, jnp.asarray(pool), lengths, shape

    def kernel(self) -> Callable[[], jax.Array]:
        """The kernel on these inputs."""
        rows, lengths = jnp.arange(len(self.lengths)), jnp.asarray(self.lengths, jnp.int32)
        tables = jnp.asarray(self.tables)
        queries, num_sms = self.q.shape[1] * self.q.shape[2], num_sms_of(jax.devices()[0])
        made = jax.jit(partial(plan, queries=queries, num_sms=num_sms))(tables, rows, lengths)
        latent, rope = jnp.split(jnp.asarray(self.q), [self.shape.rank], axis=-1)
        decode = DecodeRows(rows, lengths, made)
        return partial(mla_decode, latent, rope, self.pool, jnp.int32(1), tables, decode, scale=SCALE)

    def check(self, out: np.ndarray) -> None:
        """Every value was written; those of each query token are near float64's, zero where it sees no key."""
        tokens = self.q.shape[1]
        for entry, latents in enumerate(self.latents):
            for token in range(tokens):
                seen = len(latents) - tokens + 1 + token
                if seen <= 0:
                    assert not out[entry, token].any()
                    continue
                wanted = attend_latents(self.q[entry, token], latents[:seen], self.shape.rank, SCALE)
                error = np.linalg.norm(out[entry, token] - wanted) / np.linalg.norm(wanted)
                assert error < TOLERANCE, f"entry {entry} of {len(latents)} keys, token {token}"


def fill_free_memory_with_nan() -> None:
    """What is allocated next lies in memory that holds NaN."""
    for size in (1 << 16, 1 << 20, 1 << 24, 1 << 28):
        jnp.full(size, jnp.nan).block_until_ready().delete()


@jax.jit
def same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.array_equal(jax.lax.bitcast_convert_type(a, jnp.uint16), jax.lax.bitcast_convert_type(b, jnp.uint16))


def run(rng: np.random.Generator, shape: DecodeShape, lengths: Sequence[int], tokens: int) -> None:
    """Right, and the same bits in each of REPEATS runs."""
    inputs = Inputs(rng, shape, lengths, tokens)
    attend = inputs.kernel()
    fill_free_memory_with_nan()
    first = attend()
    inputs.check(np.asarray(first, np.float64))
    assert all(jax.device_get([same_bits(attend(), first) for _ in range(REPEATS)]))


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("shape", DISTINCT, ids=lambda shape: f"heads{shape.heads}")
def test_ragged_rows(rng: np.random.Generator, shape: DecodeShape, tokens: int):
    """Lengths at page edges, below the number of tokens, and none; rows longer and shorter than an SM's share."""
    run(rng, shape, RAGGED, tokens)


@pytest.mark.parametrize("lengths", [[30_000], [1] * 200, [64, 20_000, 64]], ids=["one", "short", "long_and_short"])
@pytest.mark.parametrize("name", ["v3_tp8", "v3_tp1"])
def test_one_long_row_and_many_short_ones(rng: np.random.Generator, name: str, lengths: list[int]):
    run(rng, SHAPES[name], lengths, tokens=1)
