"""Mosaic kernels on CPUs: JAX simulates blocks, warpgroups, shared memory, barriers and copies, and finds races."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels that are traced and run within are simulated; a race between them fails.

    Shared memory that nothing wrote is NaN, an access out of bounds raises. JAX simulates a copy at once, so a wait for
    one that is missing in the very warpgroup that began it is not found; in another warpgroup it is a race.
    """
    said = io.StringIO()  # JAX prints races, and keeps those of the last kernel only
    try:
        with redirect_stdout(said), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            yield
    finally:
        reset_gpu_interpret_mode_state()
    if "RACE DETECTED" in said.getvalue():
        raise AssertionError(said.getvalue())
