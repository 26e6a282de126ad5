"""How many pages the cache gets."""

import logging
from collections.abc import Sequence

from jax.sharding import Mesh

from dsjax.cache.kinds import PageKind
from dsjax.engine.options import EngineOptions
from dsjax.errors import OptionError

logger = logging.getLogger("dsjax")

CPU_CACHE_BYTES = 1 << 30
GPU_RESERVE_BYTES = 2 << 30  # for scratch of executables, their code and CUDA graphs


def cache_pages(
    kinds: Sequence[PageKind], options: EngineOptions, rows: int, max_model_len: int, mesh: Mesh
) -> dict[str, int]:
    """Pages per kind: for kv_tokens if given, else for `rows` requests of full length as far as memory allows.

    Raises OptionError if no memory is left.
    """
    if options.kv_tokens is not None:
        return {kind.name: kind.pages_for(options.kv_tokens) for kind in kinds}
    wanted = {kind.name: rows * kind.pages_for(max_model_len) for kind in kinds}
    wanted_bytes = sum(wanted[kind.name] * kind.page_bytes for kind in kinds)
    available = _available_bytes(options, mesh)
    if available < wanted_bytes:
        wanted = {name: _rounded(count * available // wanted_bytes) for name, count in wanted.items()}
    if min(wanted.values()) < 1:
        raise OptionError(
            "No memory is left for the cache after loading the weights. Raise gpu_memory_fraction "
            f"({options.gpu_memory_fraction}), split the model over more devices, or set kv_tokens."
        )
    tokens = min(wanted[kind.name] * kind.page_tokens for kind in kinds)
    logger.info("The cache holds %d tokens: %.1f requests of full length", tokens, tokens / max_model_len)
    return wanted


def _available_bytes(options: EngineOptions, mesh: Mesh) -> int:
    """Bytes for the cache on each device: on GPUs what the memory fraction leaves beside weights and a reserve."""
    stats = [device.memory_stats() for device in mesh.devices.flat]
    if any(one is None for one in stats):
        return CPU_CACHE_BYTES
    free = [int(one["bytes_limit"] * options.gpu_memory_fraction) - one["bytes_in_use"] for one in stats]
    return max(min(free) - GPU_RESERVE_BYTES, 0)


def _rounded(pages: int) -> int:
    """`pages` rounded down to seven significant bits.

    The number is a shape in every executable: small changes in free memory must not make all of them new.
    """
    grid = 1 << max(pages.bit_length() - 7, 0)
    return pages // grid * grid
