"""Targets: the kinds of device that executables are made for."""

from typing import Any

CPU, CUDA, HOPPER = "cpu", "cuda", "hopper"


def num_sms_of(device: Any) -> int:
    """Streaming multiprocessors of a jax.Device, present or only compiled for; 0 if it is no GPU."""
    return device.core_count if device.platform == "gpu" else 0


def target_of(device: Any) -> str:
    """The target that fits a jax.Device: "hopper" for NVIDIA GPUs of compute capability 9, "cuda" for others."""
    if device.platform != "gpu":
        return CPU
    return HOPPER if str(device.compute_capability).startswith("9.") else CUDA
