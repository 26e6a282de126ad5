"""XLA compiler options, in one table."""

COMPILER_OPTIONS: dict[str, bool | int | str] = {
    # XLA may otherwise skip the rounding to bf16 between operations that it fuses, so that plans would differ.
    "xla_allow_excess_precision": False,
}
