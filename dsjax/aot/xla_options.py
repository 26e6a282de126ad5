"""XLA compiler options, in one table."""

# xla_allow_excess_precision would let XLA skip the rounding to bf16 between fused operations, so that plans differ.
COMMON = {"xla_allow_excess_precision": False}
BY_PLATFORM: dict[str, dict[str, bool | int | str]] = {"cpu": {}, "cuda": {}}


def compiler_options(platform: str) -> dict[str, bool | int | str]:
    """Options for every executable on `platform` ("cpu" or "cuda")."""
    return COMMON | BY_PLATFORM[platform]
