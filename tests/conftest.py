"""Shared fixtures. Tests run on four virtual CPU devices, unless `pytest -m gpu` asks for a GPU."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dsjax import LLM

GOLDEN = Path(__file__).parent / "golden"
# One mixed body of 32 tokens, one decode body and one tail of 3 rows; the cache is smaller than the context.
SMALL = {"dtype": "float32", "max_num_seqs": 3, "token_buckets": [32], "max_model_len": 512, "kv_tokens": 448}


def pytest_configure(config: pytest.Config) -> None:
    """Choose the platform before anything imports JAX; keep executables in a folder of this run alone."""
    os.environ["DSJAX_CACHE_DIR"] = tempfile.mkdtemp(prefix="dsjax-tests-")
    if config.getoption("markexpr") != "gpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["DSJAX_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="session")
def make_llm() -> Iterator[Callable[..., "LLM"]]:
    """make_llm(case, **options): an LLM on a golden checkpoint, small buckets, one per distinct set of options."""
    from dsjax import LLM

    made: dict[tuple, LLM] = {}

    def make(case: str = "v3", **options) -> LLM:
        options = SMALL | options
        key = (case, *sorted((name, str(value)) for name, value in options.items()))
        if key not in made:
            made[key] = LLM(GOLDEN / case, **options)
        return made[key]

    yield make
    for llm in made.values():
        llm.close()
