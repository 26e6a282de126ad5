"""Compiling: tracing each chain once, compiling in parallel, keeping results on disk, counting every compile."""

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding

from dsjax.aot.planner import PlannedProgram, ProgramKey
from dsjax.aot.repair import repair_compilation_cache
from dsjax.aot.xla_options import compiler_options
from dsjax.segments import Chain, Link
from dsjax.sharding import REPLICATED, value_partition, weight_partition
from dsjax.telemetry import count, counters, warn_once

logger = logging.getLogger("dsjax")

Executables = dict[ProgramKey, dict[Chain, Any]]

Progress = Callable[[str, int, int], None]  # called with "traced" or "compiled", how many are done, and of how many

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody is told of."""


def count_compiles() -> None:
    """From now on, count as "compiles" whatever this process compiles, or loads from the compilation cache instead.

    The latter are counted as "compiles_from_cache" too.
    """
    if "compiles" not in counters:
        counters["compiles"] = 0
        jax.monitoring.register_event_duration_secs_listener(_count_compile)
        jax.monitoring.register_event_listener(_count_cache_hit)


def _count_compile(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _COMPILE_EVENT:
        count("compiles")


def _count_cache_hit(event: str, **_: str | int) -> None:
    if event == _CACHE_HIT_EVENT:
        count("compiles_from_cache")


def keep_executables(folder: Path) -> bool:
    """Keep compiled executables in `folder` (JAX's persistent compilation cache), small and quick ones too.

    Entries that turn out to be damaged are removed and compiled again. Returns whether the folder can be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        count("executables_not_kept")
        warn_once(f"Compiled executables are not kept: {error}. Choose another cache_dir.")
        return False
    repair_compilation_cache()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX remembers the folder of its first compile otherwise
    return True


def kept_executables(folder: Path) -> tuple[int, int]:
    """Number of executables kept in `folder`, and their size in bytes; (0, 0) if there is no such folder."""
    sizes = [entry.stat().st_size for entry in folder.glob("*-cache")]
    return len(sizes), sum(sizes)


@dataclass(frozen=True)
class CompileReport:
    """What compiling took.

    `executables`: how many in all, `from_cache`: how many of them were loaded instead; wall seconds of tracing with
    lowering, and of compiling.
    """

    executables: int
    from_cache: int
    lower_s: float
    compile_s: float


def dot_precision(dtype: Any) -> AbstractContextManager:
    """Float32 models multiply in full float32: GPUs would otherwise round products to TF32."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else None)


def compile_programs(
    planned: Sequence[PlannedProgram],
    state: Mapping[str, Any],
    mesh: Mesh,
    dtype: Any,
    progress: Progress = silent,
) -> tuple[Executables, CompileReport]:
    """Compile each distinct chain of each program for `mesh`, given the abstract `state` and the model's `dtype`.

    Raises RuntimeError if an executable would copy a cache instead of updating it in place.
    """
    begin, hits_before = time.perf_counter(), counters["compiles_from_cache"]
    lowered = {}
    with dot_precision(dtype):
        for program in _told(progress, "traced", planned, len(planned)):
            lowered[program.key] = _lower(program, state, mesh)
    middle, number = time.perf_counter(), sum(map(len, lowered.values()))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        futures = {
            key: {chain: threads.submit(_compile, chain, one) for chain, one in chains.items()}
            for key, chains in lowered.items()
        }
        waiting = [future for chains in futures.values() for future in chains.values()]
        for future in _told(progress, "compiled", as_completed(waiting), number):
            future.result()
        compiled = {key: {chain: f.result() for chain, f in chains.items()} for key, chains in futures.items()}
    hits = counters["compiles_from_cache"] - hits_before
    report = CompileReport(number, hits, middle - begin, time.perf_counter() - middle)
    logger.info(
        "%d executables (%d from the cache): lowered in %.1f s, compiled in %.1f s",
        number,
        hits,
        report.lower_s,
        report.compile_s,
    )
    return compiled, report


def _told[T](progress: Progress, stage: str, items: Iterable[T], total: int) -> Iterator[T]:
    """`items`; `progress` is called before the first one and after each."""
    progress(stage, 0, total)
    for done, item in enumerate(items, start=1):
        yield item
        progress(stage, done, total)


def eager_programs(planned: Sequence[PlannedProgram], dtype: Any) -> Executables:
    """Programs that run op by op, nothing compiled as a whole: for comparison, on one device only."""

    def op_by_op(chain: Chain):
        def run(weights, places, *values):
            with dot_precision(dtype):
                return chain.run(weights, places, *values, jit=False)

        return run

    return {p.key: {link.chain: op_by_op(link.chain) for link in p.links} for p in planned}


def weight_bytes(planned: Sequence[PlannedProgram], mesh: Mesh) -> int:
    """Bytes of all weights that the programs take, on each device of `mesh`."""
    weights: dict[str, Any] = {}
    for link in (link for program in planned for link in program.links):
        weights.update(zip(link.paths, _weight_avals(link.chain, mesh), strict=True))
    return sum(
        math.prod(aval.sharding.shard_shape(aval.shape)) * aval.dtype.itemsize for aval in jax.tree.leaves(weights)
    )


def donated_arguments(executable: Any) -> list[Any]:
    """Shape and dtype of the arguments that `executable` may overwrite. All of them are replicated values."""
    return [info for info in jax.tree.leaves(executable.args_info) if info.donated]


def donated_bytes(executable: Any) -> int:
    """Bytes of the arguments that `executable` may overwrite."""
    return sum(math.prod(info.shape) * info.dtype.itemsize for info in donated_arguments(executable))


def _compile(chain: Chain, lowered: Any) -> Any:
    executable = lowered.compile(compiler_options=compiler_options(chain.deterministic))
    _check_in_place(chain, executable)
    return executable


def _check_in_place(chain: Chain, executable: Any) -> None:
    """Raise RuntimeError unless every donated argument is updated in place and no cache is copied on the way."""
    aliased = executable.memory_analysis().alias_size_in_bytes
    if aliased < donated_bytes(executable):
        raise RuntimeError(f"{chain.name} updates {aliased} of {donated_bytes(executable)} donated bytes in place.")
    if "pools" in chain.gives:
        pools = {",".join(map(str, info.shape)) for info in donated_arguments(executable) if len(info.shape) == 4}
        copies = re.findall(rf"= \w+\[(?:{'|'.join(pools)})\]\S* copy\(", executable.as_text())
        if copies:
            raise RuntimeError(f"{chain.name} copies a cache: {copies[0]}.")


def _lower(program: PlannedProgram, state: Mapping[str, Any], mesh: Mesh) -> dict[Chain, Any]:
    """The lowered chains of one program; the abstract results of each chain are the arguments of later ones."""
    named = {name: _placed(value, name, mesh) for name, value in (dict(state) | program.arguments).items()}
    lowered: dict[Chain, Any] = {}
    for link in program.links:
        chain = link.chain
        if chain in lowered:
            continue
        name = re.sub(r"\W+", "_", f"{program.key}_{chain.name}")
        arguments = _weight_avals(chain, mesh), _place_avals(link, mesh), *(named[name] for name in chain.takes)
        traced = chain.sharded(mesh, name).trace(*arguments)
        lowered[chain] = traced.lower()
        given = traced.out_info[: len(chain.gives)]  # a tapped chain returns more, which no other takes
        named |= {name: _placed(out, name, mesh) for name, out in zip(chain.gives, given, strict=True)}
    return lowered


def _weight_avals(chain: Chain, mesh: Mesh) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
    return tuple(
        tuple(_aval(shape, dtype, mesh, weight_partition(path)) for path, shape, dtype in segment.weights)
        for segment in chain.segments
    )


def _place_avals(link: Link, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct] | None:
    if link.places is None:
        return None
    return {kind: _aval((), jnp.int32, mesh, REPLICATED) for kind, _ in link.places}


def _placed(value: Any, name: str, mesh: Mesh) -> Any:
    """The abstract value `name` with its place on the mesh."""
    return jax.tree.map(lambda leaf: _aval(leaf.shape, leaf.dtype, mesh, value_partition(name)), value)


def _aval(shape: tuple[int, ...], dtype: Any, mesh: Mesh, partition: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, partition))
