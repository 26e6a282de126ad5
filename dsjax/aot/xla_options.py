"""XLA compiler options, in one table."""

from dsjax.aot.targets import CPU, CUDA, HOPPER

# xla_allow_excess_precision would let XLA skip the rounding to bf16 between fused operations, so that plans differ.
_COMMON = {"xla_allow_excess_precision": False}
_BY_TARGET: dict[str, dict[str, bool | int | str]] = {CPU: {}, CUDA: {}, HOPPER: {}}


def compiler_options(target: str) -> dict[str, bool | int | str]:
    """Options for every executable on `target`."""
    return _COMMON | _BY_TARGET[target]
