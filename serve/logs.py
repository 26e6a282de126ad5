"""Logging of the server's processes: one line per event on stderr, with the process that wrote it."""

import logging


def set_up_logging(process: str) -> None:
    """Log dsjax's INFO and everybody else's warnings; `process` ("http", "engine") says where a line comes from."""
    logging.basicConfig(format=f"%(asctime)s %(levelname)s {process}: %(message)s", level=logging.WARNING)
    logging.getLogger("dsjax").setLevel(logging.INFO)
