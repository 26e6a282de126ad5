"""Process-wide counters, and warnings that are said once.

Whenever dsjax chooses a slower way than it could, it warns once and counts each such choice.
"""

import logging
import threading
from collections import Counter

logger = logging.getLogger("dsjax")
counters: Counter[str] = Counter()
_said: set[str] = set()
_counting = threading.Lock()


def count(name: str, amount: int = 1) -> None:
    """Add `amount` to the counter `name`. Any thread may count."""
    with _counting:
        counters[name] += amount


def warn_once(message: str) -> None:
    """Log `message` the first time that it is given in this process."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)
