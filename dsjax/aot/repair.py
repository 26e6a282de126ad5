"""Repair of JAX's persistent compilation cache.

JAX writes entries in place and never replaces one, so what a full disk or a kill cuts short would stay, and every later
start would compile that executable again.
"""

import logging

from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

from dsjax.telemetry import count

logger = logging.getLogger("dsjax")

_SUFFIX = "-cache"


class RepairingCache(LRUCache):
    """Removes a damaged entry when it is asked for; what is compiled in its place is then kept.

    Safe beside other processes: an entry that one of them is just writing looks damaged too, and is then written anew.
    """

    def get(self, key: str) -> bytes | None:
        """The entry of `key`, None if there is none or it is damaged."""
        entry = super().get(key)
        if entry is None or _is_whole(entry):
            return entry
        (self.path / f"{key}{_SUFFIX}").unlink(missing_ok=True)
        count("damaged_executables_removed")
        logger.warning("A damaged executable is removed from %s and compiled again: %s", self.path, key)
        return None


def repair_compilation_cache() -> None:
    """From now on, caches that JAX opens are repaired. There is no setting for it, so this replaces JAX's class."""
    compilation_cache.LRUCache = RepairingCache  # pyright: ignore[reportPrivateImportUsage]


def _is_whole(entry: bytes) -> bool:
    """Entries are compressed, with a checksum: damage shows when they are decompressed."""
    try:
        compilation_cache.decompress_executable(entry)
    except Exception:  # noqa: BLE001 (zlib and zstandard each have their own)
        return False
    return True
