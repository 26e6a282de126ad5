"""The Hopper kernel of MLA decode on a real GPU: every named shape on random inputs against float64."""

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.aot.targets import num_sms_of
from dsjax.pallas_kernels.mla_decode import DecodeRows
from dsjax.pallas_kernels.mla_decode.hopper import mla_decode, plan
from dsjax.pallas_kernels.mla_decode.shapes import SHAPES, DecodeShape
from dsjax.published import published
from tests.pallas_kernels.latents import PAGE, attend_latents

pytestmark = pytest.mark.gpu
LAYERS, PAGES, PAGES_OF_ROW = 2, 1024, 512
SPARE_ROWS = 3  # of the tables, which belong to no entry
SCALES = [192**-0.5, *(published(model).attention.softmax_scale for model in ("v3", "v2_lite"))]
TOLERANCE = 5e-3
REPEATS = 20


class Case(NamedTuple):
    """What an executable is compiled for: the scale comes with the number of query tokens."""

    shape: DecodeShape
    batch: int
    tokens: int

    @property
    def scale(self) -> float:
        return SCALES[self.tokens % len(SCALES)]


RAGGED = [0, 1, 2, 63, 64, 65, 127, 129, 500, 0, 1024, 2000, 1, 128, 3, 700]
RAGGED_CASES = [
    Case(shape, len(RAGGED), tokens)
    for shape in dict.fromkeys(SHAPES.values())
    for tokens in ((1, 2, 3, 4) if shape.heads in (4, 8, 16, 128) else (1, 4))
]
UNEVEN = {
    "one": [30_000],
    "short": [1] * 128,
    "long_and_short": [64, 20_000, 64] + [0] * 125,
    "random": np.random.default_rng(0).integers(8 * PAGE, size=128).tolist(),
}
UNEVEN_CASES = [Case(SHAPES[name], batch, tokens=1) for batch in (1, 128) for name in ("v3_tp8", "v3_tp1")]
Executables = dict[Case, Future[jax.stages.Compiled]]


@partial(jax.jit, static_argnames="scale", donate_argnums=0, keep_unused=True)
def plan_and_attend(before, latent, rope, pool, tables, rows, lengths, *, scale: float) -> jax.Array:
    """Attention in layer 1, with a plan made in the same run; `before` only gives its memory to the output."""
    queries, num_sms = latent.shape[1] * latent.shape[2], num_sms_of(jax.devices()[0])
    made = plan(tables, rows, lengths, queries=queries, num_sms=num_sms)
    return mla_decode(latent, rope, pool, jnp.int32(1), tables, DecodeRows(rows, lengths, made), scale=scale)


def compile_case(case: Case) -> jax.stages.Compiled:
    (heads, rank, width), batch, tokens = case.shape, case.batch, case.tokens
    per_entry = jax.ShapeDtypeStruct((batch,), jnp.int32)
    latent, rope, pool = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in (
            (batch, tokens, heads, rank),
            (batch, tokens, heads, width),
            (LAYERS, PAGES, PAGE, rank + width),
        )
    )
    tables = jax.ShapeDtypeStruct((batch + SPARE_ROWS, PAGES_OF_ROW), jnp.int32)
    arguments = latent, latent, rope, pool, tables, per_entry, per_entry
    return plan_and_attend.lower(*arguments, scale=case.scale).compile()


@pytest.fixture(scope="module")
def executables() -> Iterator[Executables]:
    """Of all cases: threads compile them while tests run those that are ready."""
    threads = ThreadPoolExecutor()
    yield {case: threads.submit(compile_case, case) for case in (*RAGGED_CASES, *UNEVEN_CASES)}
    threads.shutdown(cancel_futures=True)


@pytest.fixture
def rng() -> np.random.Generator:
    """Other inputs in each run; a failure shows the seed."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


class Inputs:
    """Random entries of `lengths` keys, in another order than their rows of the tables.

    NaN stands in the other layer, in pages without an owner, behind each row's end, and in pads' queries. Unused table
    entries name pages that do not exist.
    """

    def __init__(self, rng: np.random.Generator, case: Case, lengths: Sequence[int]):
        width = case.shape.rank + case.shape.rope
        self.case, self.latents = case, []
        self.rows = rng.permutation(case.batch + SPARE_ROWS)[: case.batch].astype(np.int32)
        self.lengths = np.array(lengths, np.int32)
        self.tables = rng.integers(-(1 << 31), 1 << 31, size=(case.batch + SPARE_ROWS, PAGES_OF_ROW), dtype=np.int32)
        self.q = rng.normal(size=(case.batch, case.tokens, case.shape.heads, width)).astype(jnp.bfloat16)
        self.q[self.lengths == 0] = np.nan
        pool, free = np.full((LAYERS, PAGES, PAGE, width), np.nan, jnp.bfloat16), iter(rng.permutation(PAGES))
        for row, length in zip(self.rows, lengths, strict=True):
            latents = rng.normal(size=(length, width)).astype(jnp.bfloat16)
            own = list(islice(free, -(-length // PAGE)))
            self.tables[row, : len(own)] = own
            for i, page in enumerate(own):
                part = latents[i * PAGE : (i + 1) * PAGE]
                pool[1, page, : len(part)] = part
            self.latents.append(latents.astype(np.float64))
        self.pool = jnp.asarray(pool)

    def without_nan(self) -> None:
        """Numbers take the place of NaN."""
        self.q[np.isnan(self.q)] = 2
        self.pool = jnp.where(jnp.isnan(self.pool), 3, self.pool)

    def run(self, executable: jax.stages.Compiled) -> np.ndarray:
        """The output of a call whose output and intermediate arrays lie in memory that held NaN."""
        latent, rope = np.split(self.q, [self.case.shape.rank], axis=-1)
        arguments = jax.device_put((latent, rope, self.pool, self.tables, self.rows, self.lengths))
        before = jnp.full(latent.shape, jnp.nan, jnp.bfloat16)
        place = before.unsafe_buffer_pointer()
        fill_free_memory_with_nan(executable)
        out = executable(before, *arguments)
        assert out.unsafe_buffer_pointer() == place
        return np.asarray(out)

    def check(self, out: np.ndarray) -> None:
        """Values of each query token are near float64's, and zero where it sees no key."""
        tokens = self.case.tokens
        for entry, latents in enumerate(self.latents):
            for token in range(tokens):
                seen = len(latents) - tokens + 1 + token
                if seen <= 0:
                    assert not out[entry, token].any()
                    continue
                wanted = attend_latents(self.q[entry, token], latents[:seen], self.case.shape.rank, self.case.scale)
                error = np.linalg.norm(out[entry, token].astype(np.float64) - wanted) / np.linalg.norm(wanted)
                assert error < TOLERANCE, f"entry {entry} of {len(latents)} keys, token {token}"


def fill_free_memory_with_nan(executable: jax.stages.Compiled) -> None:
    """As much as the executable's intermediate arrays take, which then get the same place, and more."""
    analysis = executable.memory_analysis()
    assert analysis is not None
    sizes = analysis.temp_size_in_bytes, 1 << 28
    held = [jnp.full(size, 0xFF, jnp.uint8).block_until_ready() for size in sizes]  # NaN in bf16 and in float32
    for array in held:
        array.delete()


def run(rng: np.random.Generator, executables: Executables, case: Case, lengths: Sequence[int]) -> None:
    """Right; the same bits in each of REPEATS runs, and where numbers take the place of NaN."""
    executable, inputs = executables[case].result(), Inputs(rng, case, lengths)
    out = inputs.run(executable)
    inputs.check(out)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(inputs.run(executable).view(np.uint16), out.view(np.uint16))
    inputs.without_nan()
    np.testing.assert_array_equal(inputs.run(executable).view(np.uint16), out.view(np.uint16))


@pytest.mark.parametrize("case", RAGGED_CASES, ids=lambda case: f"heads{case.shape.heads}-tokens{case.tokens}")
def test_ragged_rows(rng: np.random.Generator, executables: Executables, case: Case):
    """Lengths at page edges, below the number of tokens, and none; rows longer and shorter than an SM's share."""
    run(rng, executables, case, RAGGED)


@pytest.mark.parametrize("lengths", UNEVEN.values(), ids=UNEVEN)
@pytest.mark.parametrize("name", ["v3_tp8", "v3_tp1"])
def test_few_long_rows_and_many_short_ones(
    rng: np.random.Generator, executables: Executables, name: str, lengths: list[int]
):
    run(rng, executables, Case(SHAPES[name], len(lengths), tokens=1), lengths)
