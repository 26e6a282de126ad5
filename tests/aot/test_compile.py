"""Compiling: executables are kept between processes, and a cache folder that cannot be used is no obstacle."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dsjax import LLM, SamplingParams
from dsjax.aot.compile import keep_executables
from dsjax.errors import OptionError
from dsjax.telemetry import counters
from tests.conftest import GOLDEN, SMALL
from tests.serve.commands import run_command
from tests.test_golden import golden

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROGRAM = """
import json
from dsjax import LLM, SamplingParams
from dsjax.telemetry import counters
with LLM({folder!r}, cache_dir={cache!r}, **{options!r}) as llm:
    tokens = llm.generate({prompt!r}, {params!r})[0].token_ids
print(json.dumps([counters["compiles"], counters["compiles_from_cache"], tokens]))
"""


def warm_up(model: Path, cache: Path, *flags: str) -> str:
    """What `dsjax warmup` says, for the options of SMALL and one row."""
    small = "--dtype float32 --max-num-seqs 1 --token-buckets 32 --max-model-len 512 --kv-tokens 448"
    return run_command("warmup", str(model), *small.split(), "--cache-dir", str(cache), *flags)


def test_after_a_warmup_another_process_compiles_nothing(tmp_path: Path):
    model, options, expected = GOLDEN / "v3", SMALL | {"max_num_seqs": 1}, golden("v3")
    assert "6 executables are ready, 0 of them from the cache" in warm_up(model, tmp_path)
    prompt = expected["prompt_0"].tolist()
    program = PROGRAM.format(folder=str(model), cache=str(tmp_path), options=options, prompt=prompt, params=GREEDY)
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True, timeout=200)
    compiles, from_cache, tokens = json.loads(result.stdout.splitlines()[-1])
    assert compiles == from_cache >= 6
    assert tokens == expected["greedy_0"][:5].tolist()
    assert "6 executables are ready, 6 of them from the cache" in warm_up(model, tmp_path)


def test_after_a_warmup_random_weights_on_two_devices_compile_nothing(tmp_path: Path):
    """What JAX has compiled is forgotten before and after the warmup, as if it ran in a process of its own."""
    config = json.loads((GOLDEN / "v3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    jax.clear_caches()
    warm_up(tmp_path, tmp_path / "cache", "--tp", "2", "--load-format", "dummy")
    jax.clear_caches()
    before = counters["compiles"], counters["compiles_from_cache"]
    options = SMALL | {"max_num_seqs": 1, "tp": 2, "load_format": "dummy", "cache_dir": str(tmp_path / "cache")}
    with LLM(tmp_path, **options):
        compiles, from_cache = counters["compiles"] - before[0], counters["compiles_from_cache"] - before[1]
    assert compiles == from_cache >= 6


def test_warmup_refuses_what_keeps_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OptionError, match="nothing to warm up"):
        warm_up(GOLDEN / "v3", tmp_path, "--plan", "off")
    with pytest.raises(OptionError, match="choose another cache_dir"):
        warm_up(GOLDEN / "v3", tmp_path / "file")


def test_a_cache_folder_that_cannot_be_made(tmp_path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("in the way")
    keep_executables(tmp_path / "file" / "executables")
    assert "Compiled executables are not kept" in caplog.text
