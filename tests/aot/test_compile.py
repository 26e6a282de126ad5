"""Compiling: executables are kept between processes, and a cache folder that cannot be used is no obstacle."""

import json
import os
import subprocess
import sys

import pytest

from dsjax.aot.compile import keep_executables
from tests.conftest import GOLDEN, SMALL

PROGRAM = """
import json, sys
import jax
from dsjax import LLM, SamplingParams
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
with LLM({folder!r}, cache_dir={cache!r}, **{options!r}) as llm:
    tokens = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0].token_ids
    print(json.dumps([len(hits), llm.engine.runner.compile_report.executables, tokens]))
"""


def run(cache: str) -> tuple[int, int, list[int]]:
    """Start an LLM in a process of its own: cache hits, executables, and the tokens of an answer."""
    options = SMALL | {"max_num_seqs": 1, "plan": "step"}
    program = PROGRAM.format(folder=str(GOLDEN / "v3"), cache=cache, options=options)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True, timeout=200
    )
    hits, executables, tokens = json.loads(result.stdout.splitlines()[-1])
    return hits, executables, tokens


def test_a_second_process_compiles_nothing(tmp_path):
    cold_hits, executables, cold_tokens = run(str(tmp_path))
    warm_hits, _, warm_tokens = run(str(tmp_path))
    assert cold_hits == 0
    assert warm_hits >= executables
    assert warm_tokens == cold_tokens


def test_a_cache_folder_that_cannot_be_made(tmp_path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("in the way")
    keep_executables(tmp_path / "file" / "executables")
    assert "Compiled executables are not kept" in caplog.text
