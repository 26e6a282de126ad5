"""MLA decode: absorbed attention of the last query tokens of each row over the paged latent cache."""

from collections.abc import Callable
from typing import NamedTuple

from dsjax.pallas_kernels.mla_decode import hopper
from dsjax.pallas_kernels.mla_decode.reference import DecodeRows, mla_decode, mla_decode_in_tiles, no_plan

__all__ = ["IMPLEMENTATIONS", "DecodeRows", "MLADecode"]


class MLADecode(NamedTuple):
    """One implementation: what all layers have in common is made once a step.

    `plan`: plan(tables, rows, lengths, queries=Q * H, num_sms=...) -> DecodeRows.plan, a pytree of arrays, for devices
    of so many SMs. `attend`: see reference.mla_decode.
    """

    plan: Callable
    attend: Callable


IMPLEMENTATIONS = {
    "reference": MLADecode(no_plan, mla_decode),
    "deterministic": MLADecode(no_plan, mla_decode_in_tiles),
    "hopper": MLADecode(hopper.plan, hopper.mla_decode),
}
SERVES = {"hopper": hopper.SERVES}
