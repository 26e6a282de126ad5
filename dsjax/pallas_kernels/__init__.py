"""The operations that have kernels of their own, and the choice of an implementation for each.

An operation is a folder: `reference.py` says in plain JAX what it means and runs everywhere, `shapes.py` names the
shapes that real models give it. The folder's IMPLEMENTATIONS maps platforms ("hopper", ...) to functions of one
signature. Models call operations through an Ops record, so swapping one is `dataclasses.replace(ops, experts=...)`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType

from dsjax.pallas_kernels import experts, mla_decode, mla_prefill, router
from dsjax.telemetry import count, warn_once


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation; see the reference of the same name for its meaning."""

    mla_prefill: Callable
    mla_decode: Callable
    router: Callable
    experts: Callable

    @classmethod
    def for_target(cls, target: str) -> "Ops":
        """The fastest implementations that dsjax has for `target` ("hopper", or the name of another platform).

        Operations without a kernel run their reference: that is counted as reference_op.<name> and said once.
        """
        modules = {field.name: _MODULES[field.name] for field in fields(cls)}
        missing = [name for name, module in modules.items() if target not in module.IMPLEMENTATIONS]
        for name in missing:
            count(f"reference_op.{name}")
        if missing:
            warn_once(
                f"reference_ops.{target}",
                f"dsjax has no kernels for {', '.join(missing)} on {target}: their plain JAX references run, "
                "which give the same results more slowly.",
            )
        return cls(
            **{name: m.IMPLEMENTATIONS.get(target, m.IMPLEMENTATIONS["reference"]) for name, m in modules.items()}
        )


_MODULES: dict[str, ModuleType] = {
    "mla_prefill": mla_prefill,
    "mla_decode": mla_decode,
    "router": router,
    "experts": experts,
}
