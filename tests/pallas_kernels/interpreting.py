"""Mosaic kernels on CPUs: JAX simulates blocks, warpgroups, shared memory, barriers and copies, and finds races."""

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.core import WGMMAAbstractAccumulatorRef
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret import JaxprInterpreter
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import Barrier, GPULoggingInfo, HostAllocationKey
from jax._src.state.primitives import swap_p
from jax.experimental import io_callback


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels that are traced and run within are simulated; a race between them fails.

    Shared memory that nothing wrote is NaN, an access out of bounds raises. JAX simulates a copy at once, so a wait for
    one that is missing in the very warpgroup that began it is not found; in another warpgroup it is a race.
    """
    said = io.StringIO()  # JAX prints races, and keeps those of the last kernel only
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    try:
        with redirect_stdout(said), plgpu.force_gpu_interpret_mode(parameters), _all_of_wgmma():
            yield
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
    if "RACE DETECTED" in said.getvalue():
        raise AssertionError(said.getvalue())


@contextmanager
def late(warpgroup: int, seconds: float = 0.3) -> Iterator[None]:
    """In simulated kernels, a warpgroup comes to each barrier late.

    A barrier that opens twice before a warpgroup has seen it open once is an error; on a GPU that would wait forever.
    """
    wait = Barrier.wait

    def wait_late(self, thread, *args, **kwargs):
        if thread.warpgroup_id == warpgroup:
            time.sleep(seconds)
        wait(self, thread, *args, **kwargs)

    with mock.patch.object(Barrier, "wait", wait_late):
        yield


@contextmanager
def _all_of_wgmma() -> Iterator[None]:
    """What JAX 0.11.2 cannot simulate: `accumulator[...] = value`, and left operands of wgmma that are values.

    It makes a swap of the former, and adds in swaps of accumulators; of the latter it expects the key of a buffer.
    """
    of_accumulators = {"interpret": _interpret, "_interpret_swap_p": _interpret_swap}
    with mock.patch.multiple(JaxprInterpreter, **of_accumulators), mock.patch.object(gpu_callbacks, "wgmma", _wgmma):
        yield


_jax_interpret, _jax_interpret_swap = JaxprInterpreter.interpret, JaxprInterpreter._interpret_swap_p
_jax_wgmma = gpu_callbacks.wgmma


def _interpret(self, jaxpr, token, *args):
    return _jax_interpret(self, jaxpr.replace(eqns=[_store_as_swap(equation) for equation in jaxpr.eqns]), token, *args)


def _store_as_swap(equation):
    if equation.primitive is not primitives.wgmma_accumulator_store_p:
        return equation
    return equation.replace(primitive=swap_p, params={"tree": jax.tree.structure(())})


def _interpret_swap(self, equation, token, get_values):
    if not isinstance(equation.invars[0].aval, WGMMAAbstractAccumulatorRef):
        return _jax_interpret_swap(self, equation, token, get_values)
    accumulator, value = get_values()
    store = partial(_store, source_info=equation.source_info)
    where = {"mesh_location": self.mesh_location, "thread": self.thread}
    token = io_callback(store, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token, **where, key=accumulator, value=value)
    return token, [value]


@gpu_callbacks.fail_on_exception
def _store(*, token, mesh_location, thread, key, value, source_info):
    """Registers belong to one warpgroup, so there is no race to look for."""
    key = HostAllocationKey.from_array(key)
    memory = gpu_callbacks._get_shared_memory()
    info = GPULoggingInfo(mesh_location, thread, source_info)
    memory.store_buffer_content(key, memory.access(key, ()), np.asarray(value), thread, logging_info=info)
    return token


@gpu_callbacks.fail_on_exception
def _wgmma(*, a_allocation_key_as_array, **others):
    """`a_allocation_key_as_array`: the left operand itself, or the key of its buffer."""
    a = np.asarray(a_allocation_key_as_array)
    if a.ndim == 1:
        return _jax_wgmma(a_allocation_key_as_array=a_allocation_key_as_array, **others)
    memory, thread = gpu_callbacks._get_shared_memory(), others["thread"]
    info = GPULoggingInfo(others["mesh_location"], thread, others["source_info"])

    def read(name: str):
        key = HostAllocationKey.from_array(others[f"{name}_allocation_key_as_array"])
        transforms = gpu_callbacks._remove_noop_transforms(others[f"{name}_transforms"])
        access = memory.access(key, jax.tree.map(int, transforms))
        content, _, _ = memory.get_buffer_content(key, access, thread, logging_info=info)
        return key, access, np.asarray(content)

    key, access, accumulator = read("acc")
    result = accumulator + np.matmul(a, read("b")[2], dtype=accumulator.dtype)
    memory.store_buffer_content(key, access, result, thread, logging_info=info)
    return others["token"]
