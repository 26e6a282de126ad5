"""The operations that have kernels of their own, and the choice of an implementation for each.

An operation is a folder: `reference.py` says in plain JAX what it means and runs everywhere, `shapes.py` names the
shapes that real models give it. The folder's IMPLEMENTATIONS maps "reference" and targets ("hopper", ...) to
implementations of one signature: a function, or a record of functions where something is prepared once a step
(MLADecode). One that does not serve every model runs the reference for the others, which it counts as
reference_op.<name> and says once; the folder's SERVES tells which it does serve. "deterministic" is one in which a
row's result depends neither on other rows nor on its place, where the reference is too slow for that mode. Models call
operations through an Ops record, so swapping one is `dataclasses.replace(ops, experts=...)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dsjax.aot.targets import num_sms_of, target_of
from dsjax.pallas_kernels import experts, mla_decode, mla_prefill, router
from dsjax.pallas_kernels.mla_decode import MLADecode
from dsjax.telemetry import count, warn_once

REFERENCE, DETERMINISTIC = "reference", "deterministic"


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation; see the reference of the same name for its meaning.

    `num_sms`: of each device, for implementations that divide their work over SMs.
    """

    mla_prefill: Callable
    mla_decode: MLADecode
    router: Callable
    experts: Callable
    num_sms: int = 0

    @classmethod
    def references(cls) -> "Ops":
        """The plain JAX meaning of each operation."""
        return cls._chosen(implementations(REFERENCE))

    @classmethod
    def for_device(cls, device: Any) -> "Ops":
        """The fastest implementations that dsjax has for `device`, a jax.Device, present or only compiled for.

        Operations without a kernel run their reference: that is counted as reference_op.<name> and said once.
        """
        target = target_of(device)
        chosen = implementations(target)
        if missing := [name for name, choice in chosen.items() if choice == REFERENCE]:
            for name in missing:
                count(f"reference_op.{name}")
            warn_once(
                f"dsjax has no kernels for {', '.join(missing)} on {target}: their plain JAX references run, "
                "which give the same results more slowly."
            )
        return cls._chosen(chosen, num_sms_of(device))

    @classmethod
    def deterministic(cls) -> "Ops":
        """Implementations in which a row's result depends neither on other rows nor on its place."""
        return cls._chosen(implementations(DETERMINISTIC))

    @classmethod
    def _chosen(cls, keys: dict[str, str], num_sms: int = 0) -> "Ops":
        return cls(**{name: _MODULES[name].IMPLEMENTATIONS[key] for name, key in keys.items()}, num_sms=num_sms)


def implementations(target: str) -> dict[str, str]:
    """Per operation the key of the implementation that runs on `target`: the target itself, or "reference"."""
    return {name: target if target in module.IMPLEMENTATIONS else REFERENCE for name, module in _MODULES.items()}


def served_models(target: str) -> dict[str, str]:
    """Which models the kernels for `target` serve, by operation; for all others the reference runs."""
    kernels = {name: module for name, module in _MODULES.items() if target in module.IMPLEMENTATIONS}
    return {name: module.SERVES[target] for name, module in kernels.items()}


_MODULES: dict[str, ModuleType] = {
    "mla_prefill": mla_prefill,
    "mla_decode": mla_decode,
    "router": router,
    "experts": experts,
}
