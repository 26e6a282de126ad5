"""Compiling for the H200 (sm_90a) on a machine without a GPU, and what the compilers say of each Mosaic kernel."""

import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from dsjax.aot.xla_options import CompilerOptions, compiler_options

SM_REGISTERS = 1 << 16  # of 32 bits
WARPGROUP = 128  # threads


class Kernel(NamedTuple):
    """One Mosaic kernel. `registers`: of a thread, at launch. `spill_bytes`: stores and loads together.

    `moved_registers`: what each setmaxnreg instruction sets those of a thread of its warpgroup to. `losses`: ptxas'
    warnings of lost speed, such as products that were serialised, or registers that setmaxnreg could not move.
    """

    name: str
    threads: int
    registers: int
    moved_registers: list[int]
    spill_bytes: int
    smem_bytes: int
    ptx: str
    losses: list[str]

    def assert_registers_fit(self) -> None:
        """A block has no more registers than an SM, neither at launch nor after its warpgroups moved theirs."""
        assert 0 < self.registers * self.threads <= SM_REGISTERS, self.name
        if self.moved_registers:
            assert len(self.moved_registers) * WARPGROUP == self.threads, "one setmaxnreg for each warpgroup"
            assert sum(self.moved_registers) * WARPGROUP <= SM_REGISTERS, self.name


class Compiled(NamedTuple):
    """An executable (its HLO and memory use can be read, it cannot run), its distinct kernels, its launches.

    `thunks`: a line per launch as XLA lists them; those under a kCommandBuffer are one CUDA graph.
    """

    executable: jax.stages.Compiled
    kernels: list[Kernel]
    thunks: str


def compile_for_h200(function: Callable, *args: Any, **jit_options: Any) -> Compiled:
    """Compile `function` for one H200; `args`: ShapeDtypeStructs, also in pytrees; `jit_options`: jax.jit's."""
    on_h200 = SingleDeviceSharding(h200())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_h200), args)
    renewed = jax.jit(lambda *args: function(*args), **jit_options)  # lowering that JAX has kept would dump nothing
    with tempfile.TemporaryDirectory() as scratch, mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_TO": scratch}):
        executable = renewed.lower(*placed).compile(compiler_options=dumping_to(scratch))
        kernels = [_read_kernel(ptx) for ptx in sorted(Path(scratch).glob("*.ptx"))]
        return Compiled(executable, kernels, read_thunks(Path(scratch)))


def dumping_to(folder: str | Path) -> CompilerOptions:
    """The XLA options of every executable, and such that `read_thunks(folder)` finds its launches afterwards."""
    return compiler_options(deterministic=False) | {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


@cache
def h200() -> Any:
    """A device to compile for. Skips the test off Linux, where JAX has no CUDA plugin.

    Raises:
      RuntimeError: the plugin is not installed.
    """
    if sys.platform != "linux":
        pytest.skip("JAX compiles for NVIDIA GPUs on Linux only.")
    if find_spec("jax_cuda13_plugin") is None:
        raise RuntimeError("Compiling for GPUs needs JAX's CUDA plugin: pip install -e '.[build-cuda]'.")
    config = resources.files("dsjax.aot").joinpath("h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    return topology.devices[0]


def _read_kernel(ptx: Path) -> Kernel:
    log = ptx.with_suffix(".ptxas").read_text()
    scratch = ptx.with_suffix(".resources.txt").read_text()
    code = ptx.read_text()
    return Kernel(
        name=ptx.stem,
        threads=_number(r"\.maxntid (\d+), 1, 1", code),
        moved_registers=[int(value) for value in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32 (\d+)", code)],
        registers=_number(r"Used (\d+) registers", log),
        spill_bytes=_number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        smem_bytes=_number(r"smem_scratch_bytes=(\d+)", scratch),
        ptx=code,
        losses=[line for line in log.splitlines() if "Potential Performance Loss" in line],
    )


def _number(pattern: str, text: str) -> int:
    return sum(map(int, re.findall(pattern, text)))


def read_thunks(folder: Path) -> str:
    """The launches of the executable whose dump is in `folder`."""
    grouped = list(folder.glob("*thunk_sequence_after_thunk_passes.txt"))
    return (grouped or list(folder.glob("*thunk_sequence.txt")))[0].read_text()
