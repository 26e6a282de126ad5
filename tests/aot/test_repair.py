"""Damaged entries of the compilation cache are removed and written anew."""

from pathlib import Path

import jax
import numpy as np
import pytest

from dsjax.aot.compile import keep_executables
from dsjax.telemetry import counters

DAMAGE = {
    "empty": lambda entry: b"",
    "cut": lambda entry: entry[: len(entry) // 2],
    "last byte": lambda entry: entry[:-1],
    "flipped": lambda entry: entry[:40] + bytes([entry[40] ^ 4]) + entry[41:],
    "something else": lambda entry: b"no executable at all",
}


def entries(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*-cache")}


def compile_anew() -> jax.stages.Compiled:
    jax.clear_caches()
    return jax.jit(lambda x: 3 * x + 1).lower(np.zeros(7, np.float32)).compile()


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_executable_is_compiled_and_kept_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str):
    keep_executables(tmp_path)
    compile_anew()
    whole = entries(tmp_path)
    assert whole
    for name, entry in whole.items():
        (tmp_path / name).write_bytes(DAMAGE[kind](entry))
    damaged, before = entries(tmp_path), counters["damaged_executables_removed"]

    assert compile_anew()(np.arange(7, dtype=np.float32)).tolist() == [1, 4, 7, 10, 13, 16, 19]
    assert counters["damaged_executables_removed"] == before + len(damaged)
    assert caplog.text.count("A damaged executable is removed") == len(damaged)
    repaired = entries(tmp_path)
    assert repaired.keys() == damaged.keys()
    assert all(repaired[name] != damaged[name] for name in damaged)

    compile_anew()
    assert counters["damaged_executables_removed"] == before + len(damaged)
    assert entries(tmp_path) == repaired
