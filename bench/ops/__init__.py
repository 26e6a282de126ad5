"""What bench.kernels can measure: a module per operation, with a class that makes its cases, inputs and anchor."""

from typing import NamedTuple


class Work(NamedTuple):
    """The least that a call must do: floating-point operations, and bytes read or written once."""

    flops: float
    bytes: float
