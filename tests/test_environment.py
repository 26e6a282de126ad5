"""What `dsjax env` finds, and the advice it gives."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import dsjax
from dsjax.engine.options import EngineOptions
from dsjax.environment import Environment, look_around, problems
from tests.serve.commands import run_command

GPU = {"name": "NVIDIA H200", "total_mib": 143771, "used_mib": 4, "driver": "580.159.03"}
DEVICE = {"id": 0, "kind": "NVIDIA H200", "platform": "gpu", "target": "hopper"}
SOUND = Environment(
    versions={"jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2", "nvidia-cublas": "13.1"},
    driver="580.159.03",
    gpus=[GPU],
    devices=[DEVICE],
    target="hopper",
    tools={"ptxas": "/usr/local/cuda/bin/ptxas", "nvlink": None},
    executables={"folder": "/x", "writable": True},
)
CPU: dict[str, Any] = {"devices": [DEVICE | {"platform": "cpu"}]}


def test_a_sound_machine_has_no_problems():
    assert problems(SOUND) == []
    assert problems(Environment(versions={"jaxlib": "0.11.2"}, **CPU)) == []


@pytest.mark.parametrize(
    ("change", "what", "advice"),
    [
        ({"jax_error": "no cuda", "devices": []}, "JAX finds no device: no cuda", "JAX_PLATFORMS"),
        ({**CPU, "variables": {"JAX_PLATFORMS": "cpu"}}, "does not use the 1 NVIDIA GPU", "unset it"),
        ({**CPU, "versions": {"jaxlib": "0.11.2"}}, "does not use", "dsjax[cuda13]"),
        (CPU, "does not use", "See what stops the plugin"),
        ({"gpus": [GPU | {"used_mib": 70000}]}, "other processes use 70000 of 143771 MiB", "nvidia-smi"),
        ({"versions": {"jaxlib": "0.11.1", "jax-cuda13-plugin": "0.11.2"}}, "jaxlib is 0.11.1", "jax[cuda13]==0.11.1"),
        ({"driver": "570.10"}, "driver is 570.10, but CUDA 13 needs 580", "dsjax[cuda12]"),
        ({"versions": SOUND.versions | {"jax-cuda12-plugin": "0.11.2"}}, "Several CUDA plugins", "Keep one"),
        ({"variables": {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}}, "LD_LIBRARY_PATH", "Unset it"),
        ({"tools": {"ptxas": None, "nvlink": None}}, "no ptxas", "nvidia-cuda-nvcc"),
        ({"variables": {"JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "all"}}, "needs nvlink", "28247"),
        ({"executables": {"folder": "/x", "writable": False}}, "/x cannot be written to", "--cache-dir"),
        ({"variables": {"JAX_ENABLE_COMPILATION_CACHE": "0"}}, "compiles anew", "Unset it"),
    ],
)
def test_each_problem_is_named_with_advice(change: dict, what: str, advice: str):
    [problem] = problems(replace(SOUND, **change))
    assert what in problem.what
    assert advice in problem.advice


def test_what_the_driver_does_not_tell_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    listed = [
        "NVIDIA GB10, [N/A], [N/A], [N/A]",
        "NVIDIA H200 MIG 1g, 143771, [Insufficient Permissions], 580.159.03",
        "NVIDIA H200, 143771, 70000, 580.159.03",
        "Unable to determine the device handle for GPU0000:01:00.0: Unknown Error",
    ]
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\nprint({chr(10).join(listed)!r})\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    env = look_around(EngineOptions(cache_dir=str(tmp_path)))
    assert [tuple(gpu.values()) for gpu in env.gpus] == [
        ("NVIDIA GB10", None, None, None),
        ("NVIDIA H200 MIG 1g", 143771, None, "580.159.03"),
        ("NVIDIA H200", 143771, 70000, "580.159.03"),
        (listed[-1], None, None, None),
    ]
    assert env.driver == "580.159.03"
    assert [problem.what for problem in problems(env) if "MiB" in problem.what] == [
        "NVIDIA H200: other processes use 70000 of 143771 MiB."
    ]


def test_damaged_packages_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, text in {"nothing": None, "no_name": "Version: 1\n", "nvidia_x": "Name: nvidia-x\n"}.items():
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        if text is not None:
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\n{text}")
    monkeypatch.syspath_prepend(str(tmp_path))
    versions = look_around(EngineOptions(cache_dir=str(tmp_path))).versions
    assert versions["jax"] == jax.__version__
    assert versions["nvidia-x"] == "unknown"


def test_a_cuda_plugin_is_quiet_without_a_gpu():
    """It is part of the dev extra, to compile for GPUs; JAX would log a traceback over CUDA's missing libraries."""
    if any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))):
        pytest.skip("this machine has a GPU")
    unset = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    code = "import dsjax, jax; print(jax.default_backend())"
    done = subprocess.run([sys.executable, "-c", code], env=unset, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("cpu\n", "")


def test_kernels_are_named_with_the_models_that_they_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dsjax.aot.targets.target_of", lambda device: "hopper")
    kernels = look_around(EngineOptions(cache_dir=str(tmp_path))).kernels
    assert kernels["mla_decode"] == "hopper for bf16 with rank 512, rope 64 and pages of 64 tokens, else reference"
    assert kernels["experts"].startswith("hopper for bf16 weights with hidden sizes that 128 divides")
    assert kernels["router"] == "reference"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    (tmp_path / "executables").mkdir()
    (tmp_path / "executables" / "jit_x-cache").write_bytes(b"123")
    found = json.loads(run_command("env", "--json", "--cache-dir", str(tmp_path)))
    assert found["versions"]["dsjax"] == dsjax.__version__
    assert found["versions"]["jax"] == jax.__version__
    assert [device["id"] for device in found["devices"]] == [0, 1, 2, 3]
    assert found["target"] == "cpu"
    assert found["kernels"]["mla_decode"] == "reference"
    assert found["executables"]["entries"] == 1
    assert found["executables"]["bytes"] == 3
    assert any("compiles anew" in problem["what"] for problem in found["problems"])
    text = run_command("env", "--cache-dir", str(tmp_path))
    assert "compiles anew.\n    Unset it." in text
    assert f"{tmp_path}/executables: 1 executables" in text
