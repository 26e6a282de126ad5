"""How many pages the cache gets."""

import logging
from collections.abc import Sequence

from jax.sharding import Mesh

from dsjax.cache.kinds import PageKind
from dsjax.errors import OptionError

logger = logging.getLogger("dsjax")

CPU_CACHE_BYTES = 1 << 30
GPU_RESERVE_BYTES = 2 << 30  # for scratch of executables, logits, loaded code and CUDA graphs


def cache_pages(
    kinds: Sequence[PageKind], rows: int, max_model_len: int, kv_tokens: int | None, available_bytes: int
) -> dict[str, int]:
    """Pages per kind: for `kv_tokens` if given, else for `rows` requests of full length as far as memory allows.

    Raises OptionError, with the numbers, if `available_bytes` (per device) do not hold them.
    """
    if kv_tokens is None:
        wanted = {kind.name: rows * kind.pages_for(max_model_len) for kind in kinds}
    else:
        wanted = {kind.name: kind.pages_for(kv_tokens) for kind in kinds}
    wanted_bytes = sum(wanted[kind.name] * kind.page_bytes for kind in kinds)
    if wanted_bytes > available_bytes:
        if kv_tokens is not None:
            raise OptionError(
                f"A cache of kv_tokens={kv_tokens} needs {wanted_bytes / 1e9:.1f} GB on each device, but only "
                f"{available_bytes / 1e9:.1f} GB are left for it. Ask for fewer tokens, or leave kv_tokens out."
            )
        wanted = {name: _rounded(count * available_bytes // wanted_bytes) for name, count in wanted.items()}
    if min(wanted.values()) < 1:
        raise OptionError(
            f"Only {available_bytes / 1e9:.1f} GB are left for the cache beside the weights, too little for one page. "
            "Raise gpu_memory_fraction, or split the model over more devices with tp."
        )
    tokens = min(wanted[kind.name] * kind.page_tokens for kind in kinds)
    logger.info("The cache holds %d tokens: %.1f requests of full length", tokens, tokens / max_model_len)
    return wanted


def available_bytes(mesh: Mesh, gpu_memory_fraction: float, taken_bytes: int) -> int:
    """Bytes for the cache on each device, on which weights and row state will take `taken_bytes`.

    On GPUs: `gpu_memory_fraction` of the memory that JAX may use, less what is in use, those bytes and a reserve.
    """
    stats = [device.memory_stats() for device in mesh.devices.flat]
    if any(one is None for one in stats):
        return CPU_CACHE_BYTES
    free = [int(one["bytes_limit"] * gpu_memory_fraction) - one["bytes_in_use"] for one in stats]
    return max(min(free) - taken_bytes - GPU_RESERVE_BYTES, 0)


def _rounded(pages: int) -> int:
    """`pages` rounded down to seven significant bits.

    The number is a shape in every executable: small changes in free memory must not make all of them new.
    """
    grid = 1 << max(pages.bit_length() - 7, 0)
    return pages // grid * grid
