"""The `dsjax` command: flags, errors at start, what it imports."""

import json
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dsjax
from dsjax.demo import CHECKPOINT
from dsjax.engine.options import EngineOptions
from dsjax.serve import cli
from dsjax.serve.commands.flags import ENGINE_FLAGS
from tests.serve.server_process import run_dsjax


def check_one_line(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    """One line of error, no traceback, exit code 1."""
    assert result.returncode == 1, result.stderr
    lines = [line for line in result.stderr.splitlines() if " WARNING " not in line and " INFO " not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("dsjax: error: ")
    for part in parts:
        assert part in lines[0]


def test_version_and_help():
    assert run_dsjax("--version").stdout == f"dsjax {dsjax.__version__}\n"
    listing = run_dsjax("serve", "--help")
    assert listing.returncode == 0
    for flag in ("--max-model-len", "--context-length", "--token-buckets", "--drain-timeout"):
        assert flag in listing.stdout


def test_wrong_path():
    check_one_line(run_dsjax("serve", "/nowhere/model"), "/nowhere/model", "'demo'")


def test_wrong_options(tmp_path: Path):
    check_one_line(run_dsjax("serve", "demo", "--plan", "best"), "plan is 'best'", "step, layer")
    check_one_line(run_dsjax("serve", "demo", "--max-num-seqs", "0"), "max_num_seqs")
    check_one_line(run_dsjax("serve", "demo", "--max-batched-tokens", "100000000"), "at most 65536")
    check_one_line(run_dsjax("serve", "demo", "--served-model-name", "a", "--served-model-name", " "), "is empty")
    check_one_line(run_dsjax("serve", "demo", TMPDIR=_long_folder(tmp_path)), "TMPDIR")
    for flags in (["--port", "x"], ["--port", "70000"], ["--token-buckets", "16,x"], ["--nonsense"]):
        assert run_dsjax("serve", "demo", *flags).returncode == 2


def test_taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check_one_line(run_dsjax("serve", "demo", "--port", port), f"127.0.0.1:{port}", "--port")


def test_checkpoint_that_the_engine_refuses(tmp_path: Path):
    """Found in the engine process, told like everything else."""
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    check_one_line(run_dsjax("serve", str(tmp_path), "--port", "0"), str(tmp_path), "safetensors")


def test_flags_are_engine_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[Any] = []
    monkeypatch.setattr("dsjax.serve.commands.serve.run_server", lambda *arguments: asked.append(arguments) or 0)
    flags = "--max-model-len 512 --max-batched-tokens 64 --token-buckets 16,64 --max-num-seqs 4 --row-buckets 1,4 "
    flags += "--plan layer --load-format dummy --dtype float32 --tp 2 --kv-tokens 1000 --gpu-memory-fraction 0.5 "
    flags += "--cache-dir /c --no-prefix-cache "
    flags += "--host 0.0.0.0 --port 0 --served-model-name a --served-model-name b --drain-timeout 1.5"
    assert CliRunner().invoke(cli.app, ["serve", "m", *flags.split()]).exit_code == 0
    options = EngineOptions(512, 64, (16, 64), 4, (1, 4), "layer", "dummy", "float32", 2, 1000, 0.5, "/c", False)
    assert asked.pop() == ("m", options, "0.0.0.0", 0, ["a", "b"], 1.5)

    assert CliRunner().invoke(cli.app, ["serve", "m", "--context-length", "99"]).exit_code == 0
    assert asked.pop() == ("m", EngineOptions(max_model_len=99), "127.0.0.1", 8000, None, 30.0)


def test_every_engine_option_has_a_flag():
    assert list(ENGINE_FLAGS) == [field.name for field in fields(EngineOptions)]


def test_the_http_side_imports_no_jax():
    heavy = ("jax", "jaxlib", "flax")
    assert not _imported("import dsjax.serve.cli", *heavy, "fastapi", "zmq", "tokenizers")
    assert not _imported("import dsjax.serve.cli, dsjax.serve.server, dsjax.serve.engine_process", *heavy)


def _imported(code: str, *names: str) -> list[str]:
    code += f"; import sys, json; print(json.dumps([name for name in {names!r} if name in sys.modules]))"
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def _long_folder(parent: Path) -> str:
    folder = parent / ("x" * 100)
    folder.mkdir()
    return str(folder)
