"""MLA decode in bf16, beside FlashMLA (PyPI sgl-flash-mla, which needs torch)."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ops import Work
from bench.timing import JaxChain, TorchGraph
from dsjax.aot.targets import HOPPER, num_sms_of
from dsjax.pallas_kernels.mla_decode import IMPLEMENTATIONS, DecodeRows
from dsjax.pallas_kernels.mla_decode.shapes import CASES, DecodeCase, DecodeShape
from dsjax.pallas_kernels.mla_decode.work import PAGE
from dsjax.published import published

LEAST_CALLS, LEAST_ROWS = 10, 128  # of one executable: calls, and rows of all its calls
NEVER = 1e30  # no output is larger
SCALE = published("v3").attention.softmax_scale
SPLIT_COST_PAGES = (0, 1, 2, 4, 8)  # that are tried


class MLADecodeBench:
    """Random queries and latents; rows own random pages. One executable serves all contexts of a batch.

    Calls go through the layers of a cache in turn, 10 and more of them and 128 rows and more in all, so a call finds
    nothing of its pages in L2: the smallest case reads 151 MB.
    """

    op = "mla_decode"
    anchor_packages = ("torch", "flash_mla")
    implementations = IMPLEMENTATIONS
    cases: dict[str, DecodeCase] = CASES
    cache_pages = 1 << 17  # of all layers

    def __init__(self, implementation: str, quick: bool):
        self.implementation = IMPLEMENTATIONS[implementation]
        self.name = implementation
        self._executables: dict[tuple, Any] = {}
        if quick:
            shape = DecodeShape(heads=4, rank=512, rope=64)
            self.cases = {f"quick batch {batch} context 100": DecodeCase(shape, batch, 100) for batch in (1, 2)}
            self.cache_pages = 12

    def work(self, case: DecodeCase) -> Work:
        heads, rank, rope = case.shape
        keys = case.batch * case.context
        values = keys * (rank + rope) + case.batch * heads * (2 * rank + rope)
        return Work(flops=2.0 * keys * heads * (2 * rank + rope), bytes=2.0 * values)

    def pages_of_row(self, case: DecodeCase) -> int:
        """Room in the page tables: for the longest context of the batch."""
        return -(-max(other.context for other in self.cases.values() if other.batch == case.batch) // PAGE)

    def pool(self, case: DecodeCase) -> jax.Array:
        """The latent cache [L, P, S, C + R], with as many pages a layer as the longest context of the batch needs."""
        pages = case.batch * self.pages_of_row(case)
        return _random_pool(self.cache_pages // pages, pages, case.shape.rank + case.shape.rope)

    def tables(self, case: DecodeCase) -> jax.Array:
        shape = case.batch, self.pages_of_row(case)
        return jnp.asarray(np.random.default_rng(0).permutation(shape[0] * shape[1]).reshape(shape), jnp.int32)

    def queries(self, case: DecodeCase) -> tuple[jax.Array, jax.Array]:
        """Latent and rope queries."""
        heads, rank, rope = case.shape
        latent, rotated = jax.random.split(jax.random.key(1))
        return _random_queries(latent, case.batch, heads, rank), _random_queries(rotated, case.batch, heads, rope)

    def entries(self, case: DecodeCase, **settings: Any) -> DecodeRows:
        """A row of each table, with the plan that a step makes once for all layers."""
        rows, lengths = jnp.arange(case.batch), jnp.full(case.batch, case.context, jnp.int32)
        plan = jax.jit(self._plan(case, **settings))
        return DecodeRows(rows, lengths, plan(self.tables(case), rows, lengths))

    def candidates(self, case: DecodeCase) -> list[dict[str, Any]]:
        """Settings of the Hopper kernel's plan, for `subject`. Other implementations have none."""
        return [{"split_cost_pages": pages} for pages in SPLIT_COST_PAGES] if self.name == HOPPER else []

    def calls(self, case: DecodeCase) -> int:
        """Calls of one executable."""
        return max(LEAST_CALLS, -(-LEAST_ROWS // case.batch))

    def subject(self, case: DecodeCase, **settings: Any) -> JaxChain:
        """The implementation of dsjax, with its plan, which `settings` are for, made beforehand."""
        latent, rotated = self.queries(case)
        inputs = rotated, self.pool(case), self.tables(case), self.entries(case, **settings)
        options = {"attend": self.implementation.attend, "calls": self.calls(case)}
        key = case.batch, case.shape.heads  # an executable serves all contexts
        if key not in self._executables:
            self._executables[key] = _attend_in_chain.lower(latent, latent, inputs=inputs, **options).compile()
        step = partial(self._executables[key], inputs=inputs)
        return JaxChain(self.name, self.calls(case), step, (latent, jnp.full_like(latent, jnp.nan)))

    def compile_all(self, names: Sequence[str]) -> None:
        """Compile the executables of all cases in parallel."""
        cases = {(case.batch, case.shape.heads): case for case in map(self.cases.__getitem__, names)}
        with ThreadPoolExecutor() as threads:
            list(threads.map(self.subject, cases.values()))

    def planning(self, case: DecodeCase) -> JaxChain | None:
        """The plan, which a step makes once; None where there is none."""
        entries = self.entries(case)
        if not jax.tree.leaves(entries.plan):
            return None
        step = partial(_plan_in_chain, plan=self._plan(case), tables=self.tables(case), rows=entries.rows)
        return JaxChain(self.name, LEAST_CALLS, step, (entries.lengths,))

    def anchor(self, case: DecodeCase, subject: JaxChain) -> TorchGraph:
        """FlashMLA in a CUDA graph, its schedule made beforehand, on queries of the subject."""
        subject.run()
        attend, layers = self._flash_mla(case, subject.state[1]), len(self.pool(case))
        return TorchGraph("FlashMLA", [partial(attend, call % layers) for call in range(self.calls(case))])

    def difference(self, case: DecodeCase) -> float:
        """Relative distance (Frobenius) of a call's output from FlashMLA's: random queries, the last layer."""
        latent, rotated = self.queries(case)
        pool, tables, entries = self.pool(case), self.tables(case), self.entries(case)
        layer = len(pool) - 1
        out = self.implementation.attend(latent, rotated, pool, jnp.int32(layer), tables, entries, scale=SCALE)
        wanted = self._flash_mla(case, latent)(layer).float().cpu().numpy()
        return float(np.linalg.norm(np.asarray(out, np.float32) - wanted) / np.linalg.norm(wanted))

    def _plan(self, case: DecodeCase, **settings: Any) -> Callable[[jax.Array, jax.Array, jax.Array], Any]:
        """plan(tables, rows, lengths) of the implementation, for this case and device."""
        num_sms = num_sms_of(jax.devices()[0])
        return partial(self.implementation.plan, queries=case.shape.heads, num_sms=num_sms, **settings)

    def _flash_mla(self, case: DecodeCase, latent: jax.Array) -> Callable[[int], Any]:
        """attend(layer) -> [B, 1, H, C], on the arrays of the subject and the latent query `latent`."""
        import torch  # pyright: ignore
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata  # pyright: ignore

        query = jnp.concatenate([latent, self.queries(case)[1]], axis=-1)
        arrays = query, self.pool(case), self.tables(case), self.entries(case).lengths
        q, pool, tables, lengths = map(torch.from_dlpack, jax.block_until_ready(arrays))
        schedule, _ = get_mla_metadata()  # the first call fills it
        rank, options = case.shape.rank, {"softmax_scale": SCALE, "use_legacy": True}

        def attend(layer: int):
            cache = pool[layer].unsqueeze(2)
            return flash_mla_with_kvcache(q, cache, tables, lengths, rank, schedule, **options)[0]

        return attend


def _random_queries(key: jax.Array, batch: int, heads: int, width: int) -> jax.Array:
    return jax.random.normal(key, (batch, 1, heads, width), jnp.bfloat16)


@lru_cache(maxsize=1)
@partial(jax.jit, static_argnums=(0, 1, 2))
def _random_pool(layers: int, pages: int, width: int) -> jax.Array:
    """Layer by layer, so that random bits take no more memory than those of one."""
    layer = partial(jax.random.normal, shape=(pages, PAGE, width), dtype=jnp.bfloat16)
    return jax.lax.map(layer, jax.random.split(jax.random.key(0), layers))


@partial(jax.jit, static_argnames=("attend", "calls"), donate_argnums=(0, 1), keep_unused=True)
def _attend_in_chain(latent, before, *, inputs, attend: Callable, calls: int):
    """`calls` calls, each on another layer, with the output of the one before as its latent query.

    Returns the last output and its query; `before` only gives its memory.
    """
    rotated, pool, tables, entries = inputs
    for call in range(calls):
        layer = jnp.int32(call % len(pool))
        before = latent
        latent = attend(before, rotated, pool, layer, tables, entries, scale=SCALE)
    return latent, before


@partial(jax.jit, static_argnames="plan", donate_argnums=0)
def _plan_in_chain(lengths, *, plan: Callable, tables, rows):
    """LEAST_CALLS plans, with a search for their largest values, without which XLA would not make all of them."""
    for _ in range(LEAST_CALLS):
        made = jax.tree.leaves(plan(tables, rows, lengths))
        largest = jnp.stack([leaf.max().astype(jnp.float32) for leaf in made]).max()
        lengths = lengths + (largest > NEVER).astype(jnp.int32)
    return (lengths,)
