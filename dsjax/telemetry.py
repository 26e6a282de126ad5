"""Process-wide counters, and warnings that are said once.

Whenever dsjax chooses a slower way than it could, it warns once and counts each such choice.
"""

import logging
from collections import Counter

logger = logging.getLogger("dsjax")
counters: Counter[str] = Counter()
_warned: set[str] = set()


def count(name: str, amount: int = 1) -> None:
    """Add `amount` to the counter `name`."""
    counters[name] += amount


def warn_once(name: str, message: str) -> None:
    """Count `name`, and log `message` the first time that it happens in this process."""
    count(name)
    if name not in _warned:
        _warned.add(name)
        logger.warning(message)
