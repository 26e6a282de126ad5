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

    def queries(self, case: DecodeCase) -> tuple[jax.Array, jax.Array]:
        """q_latent and q_rope. The former is an output of attention, as in all calls of a chain but its first."""
        heads, rank, rope = case.shape
        latent, rotated = (
            jax.random.normal(jax.random.key(i), (case.batch, 1, heads, width), jnp.bfloat16)
            for i, width in enumerate((rank, rope))
        )
        return self._attend(case, latent, rotated, *self.calls(case)[0]), rotated

    def calls(self, case: DecodeCase) -> list[tuple[jax.Array, DecodeRows]]:
        """Page tables and entries of each call of a chain: the rows after those of the call before."""
        lengths, tables = jnp.full(case.batch, case.context, jnp.int32), self.tables(case)
        plan = jax.jit(partial(self.implementation.plan, queries=case.shape.heads))
        rows = [(jnp.arange(case.batch, dtype=jnp.int32) + i * case.batch) % len(tables) for i in range(CALLS)]
        return [(tables, DecodeRows(entries, lengths, plan(tables, entries, lengths))) for entries in rows]

    def subject(self, case: DecodeCase) -> JaxChain:
        """The implementation of dsjax, with its plans made beforehand, as in all layers of a step."""
        latent, rotated = self.queries(case)
        inputs = rotated, self.pool, self.calls(case)
        step = partial(_attend_in_chain, inputs=inputs, attend=self.implementation.attend)
        return JaxChain(self.name, CALLS, step, (latent,))

    def planning(self, case: DecodeCase) -> JaxChain | None:
        """The plan, which a step makes once; None where there is none."""
        tables, decode = self.calls(case)[0]
        if not jax.tree.leaves(decode.plan):
            return None
        plan = partial(self.implementation.plan, queries=case.shape.heads)
        step = partial(_plan_in_chain, plan=plan, tables=tables, rows=decode.rows)
        return JaxChain(self.name, CALLS, step, (decode.lengths,))

    def anchor(self, case: DecodeCase) -> TorchGraph:
        """FlashMLA in a CUDA graph, its schedule made beforehand, on the same rows and queries."""
        attend = self._flash_mla(case)
        return TorchGraph("FlashMLA", [partial(attend, call) for call in range(CALLS)])

    def difference(self, case: DecodeCase) -> float:
        """Relative distance (Frobenius) of the implementation's output from FlashMLA's."""
        ours = np.asarray(self._attend(case, *self.queries(case), *self.calls(case)[1]), np.float32)
        theirs = self._flash_mla(case)(1).float().cpu().numpy()
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))

    def _attend(self, case: DecodeCase, latent, rotated, tables, decode: DecodeRows) -> jax.Array:
        return self.implementation.attend(latent, rotated, self.pool, jnp.int32(0), tables, decode, scale=SCALE)

    def _flash_mla(self, case: DecodeCase) -> Callable[[int], Any]:
        """attend(call) -> [B, 1, H, C], on the arrays of the subject."""
        import torch  # pyright: ignore
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata  # pyright: ignore

        def shared(array: jax.Array):
            return torch.from_dlpack(jax.block_until_ready(array))

        q = shared(jnp.concatenate(self.queries(case), axis=-1))
        pool = shared(self.pool)[0].unsqueeze(2)
        calls = [(shared(tables[decode.rows]), shared(decode.lengths)) for tables, decode in self.calls(case)]
        schedule, _ = get_mla_metadata()

        def attend(call: int):
            tables, lengths = calls[call]
            return flash_mla_with_kvcache(
                q, pool, tables, lengths, case.shape.rank, schedule, softmax_scale=SCALE, use_legacy=True
            )[0]

        return attend


@partial(jax.jit, static_argnames="attend", donate_argnums=0)
def _attend_in_chain(latent, *, inputs, attend: Callable):
    """CALLS calls, each with the output of the one before as its latent query."""
    rotated, pool, calls = inputs
    for tables, decode in calls:
        latent = attend(latent, rotated, pool, jnp.int32(0), tables, decode, scale=SCALE)
    return (latent,)


@partial(jax.jit, static_argnames="plan", donate_argnums=0)
def _plan_in_chain(lengths, *, plan: Callable, tables, rows):
    """CALLS plans. The search for their largest values is timed too: without it XLA would not make all of them."""
    for _ in range(CALLS):
        made = jax.tree.leaves(plan(tables, rows, lengths))
        largest = jnp.stack([leaf.max().astype(jnp.float32) for leaf in made]).max()
        lengths = lengths + (largest > NEVER).astype(jnp.int32)
    return (lengths,)
