"""MLA decode in bf16, beside FlashMLA (PyPI sgl-flash-mla, which needs torch)."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.ops import Work
from bench.timing import JaxChain, TorchGraph
from dsjax.pallas_kernels.mla_decode import IMPLEMENTATIONS, DecodeRows
from dsjax.pallas_kernels.mla_decode.shapes import CASES, DecodeCase, DecodeShape
from dsjax.published import published

PAGE = 64
CALLS = 10  # calls of one executable
NEVER = 1e30  # no output is larger
SCALE = published("v3").attention.softmax_scale


class Sizes(NamedTuple):
    """Rows of the page tables, entries of a row, pages of the cache.

    Calls go through the rows in turn, so a call finds nothing of its pages in the L2 cache: all rows of 1024 keys are
    151 MB. Rows longer than the cache divided by their number share pages.
    """

    rows: int
    width: int
    pages: int


class MLADecodeBench:
    """Random queries and latents; the page tables name random pages. One executable serves all contexts of a batch."""

    op = "mla_decode"
    anchor_packages = ("torch", "flash_mla")
    cases: dict[str, DecodeCase] = CASES
    sizes = Sizes(rows=128, width=1024, pages=16384)

    def __init__(self, implementation: str, quick: bool):
        self.implementation = IMPLEMENTATIONS[implementation]
        self.name = implementation
        if quick:
            shape = DecodeShape(heads=4, rank=512, rope=64)
            self.cases = {f"quick batch {batch} context 100": DecodeCase(shape, batch, 100) for batch in (1, 2)}
            self.sizes = Sizes(rows=4, width=4, pages=8)

    def work(self, case: DecodeCase) -> Work:
        heads, rank, rope = case.shape
        keys = case.batch * case.context
        values = keys * (rank + rope) + case.batch * heads * (2 * rank + rope)
        return Work(flops=2.0 * keys * heads * (2 * rank + rope), bytes=2.0 * values)

    @cached_property
    def pool(self) -> jax.Array:
        """The latent cache of all cases, [1, P, S, C + R]: their ranks are the same."""
        shape = next(iter(self.cases.values())).shape
        return jax.random.normal(jax.random.key(0), (1, self.sizes.pages, PAGE, shape.rank + shape.rope), jnp.bfloat16)

    def tables(self, case: DecodeCase) -> jax.Array:
        rows, width, pages = self.sizes
        used = -(-case.context // PAGE)
        order = np.random.default_rng(0).permutation(pages)
        tables = np.zeros((rows, width), np.int32)
        tables[:, :used] = np.resize(order, (rows, used))
        return jnp.asarray(tables)

    def queries(self, case: DecodeCase) -> jax.Array:
        heads, rank, rope = case.shape
        return jax.random.normal(jax.random.key(1), (case.batch, 1, heads, rank + rope), jnp.bfloat16)

    def lengths(self, case: DecodeCase) -> jax.Array:
        return jnp.full(case.batch, case.context, jnp.int32)

    def subject(self, case: DecodeCase) -> JaxChain:
        """The implementation of dsjax, with its plan made beforehand, as in all layers of a step."""
        heads, rank, _ = case.shape
        lengths = self.lengths(case)
        plan = jax.jit(self.implementation.plan, static_argnames="queries")(lengths, queries=heads)
        inputs = self.queries(case), self.pool, self.tables(case), lengths, plan
        step = partial(_attend_in_chain, inputs=inputs, attend=self.implementation.attend, rank=rank)
        out = jnp.full((case.batch, 1, heads, rank), jnp.nan, jnp.bfloat16)
        return JaxChain(self.name, CALLS, step, (jnp.arange(case.batch, dtype=jnp.int32), out))

    def planning(self, case: DecodeCase) -> JaxChain | None:
        """The plan, which a step makes once; None where there is none."""
        lengths, heads = self.lengths(case), case.shape.heads
        if not jax.tree.leaves(self.implementation.plan(lengths, queries=heads)):
            return None
        step = partial(_plan_in_chain, plan=self.implementation.plan, queries=heads)
        return JaxChain(self.name, CALLS, step, (lengths,))

    def anchor(self, case: DecodeCase) -> TorchGraph:
        """FlashMLA in a CUDA graph, its schedule made beforehand."""
        attend = self._flash_mla(case)
        calls = max(CALLS, self.sizes.rows // case.batch)
        firsts = [i * case.batch % self.sizes.rows for i in range(calls)]
        return TorchGraph("FlashMLA", [partial(attend, range(first, first + case.batch)) for first in firsts])

    def difference(self, case: DecodeCase, subject: JaxChain) -> float:
        """Relative distance (Frobenius) of the subject's last output from FlashMLA's for the same rows."""
        following, out = subject.state
        first = int(following[0]) - case.batch
        first %= self.sizes.rows
        wanted = self._flash_mla(case)(range(first, first + case.batch)).float().cpu().numpy()
        return float(np.linalg.norm(np.asarray(out, np.float32) - wanted) / np.linalg.norm(wanted))

    def _flash_mla(self, case: DecodeCase) -> Callable[[range], Any]:
        """attend(rows) -> [B, 1, H, C], on the arrays of the subject."""
        import torch  # pyright: ignore
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata  # pyright: ignore

        arrays = self.queries(case), self.pool, self.tables(case), self.lengths(case)
        q, pool, tables, lengths = map(torch.from_dlpack, jax.block_until_ready(arrays))
        pool = pool[0].unsqueeze(2)
        schedule, _ = get_mla_metadata()

        def attend(rows: range):
            return flash_mla_with_kvcache(
                q,
                pool,
                tables[rows.start : rows.stop],
                lengths,
                case.shape.rank,
                schedule,
                softmax_scale=SCALE,
                use_legacy=True,
            )[0]

        return attend


@partial(jax.jit, static_argnames=("attend", "rank"), donate_argnums=(0, 1), keep_unused=True)
def _attend_in_chain(rows, out, *, inputs, attend: Callable, rank: int):
    """CALLS calls, each on the rows after those of the one before; `out` only gives its memory to the last output."""
    q, pool, tables, lengths, plan = inputs
    for _ in range(CALLS):
        decode = DecodeRows(rows, lengths, plan)
        out = attend(q, pool, jnp.int32(0), tables, decode, rank=rank, scale=SCALE)
        waits = (out[0, 0, 0, 0] > NEVER).astype(jnp.int32)
        rows = (rows + len(rows) + waits) % len(tables)
    return rows, out


@partial(jax.jit, static_argnames=("plan", "queries"), donate_argnums=0)
def _plan_in_chain(lengths, *, plan: Callable, queries: int):
    """CALLS plans. The search for their largest values is timed too: without it XLA would not make all of them."""
    for _ in range(CALLS):
        made = jax.tree.leaves(plan(lengths, queries=queries))
        largest = jnp.stack([leaf.max().astype(jnp.float32) for leaf in made]).max()
        lengths = lengths + (largest > NEVER).astype(jnp.int32)
    return (lengths,)
