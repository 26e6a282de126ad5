"""Benchmark records: one figure with its unit, spread, anchor, floor and origin, kept as JSON per card and suite."""

import importlib.metadata
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import jax

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "dsjax", "torch", "sgl-flash-mla")


class Ceiling(NamedTuple):
    """What a card reaches at most: a large bf16 matrix product, and a device copy with bytes read and written."""

    flops_per_s: float
    bytes_per_s: float


CEILINGS = {"h200": Ceiling(790e12, 4.3e12)}


def card() -> str:
    """The kind of device that is measured: "cpu", "h200", ..."""
    device = jax.devices()[0]
    return "cpu" if device.platform == "cpu" else device.device_kind.removeprefix("NVIDIA ").lower().replace(" ", "_")


def record(suite: str, op: str, case: str, metric: str, samples: Sequence[float], unit: str) -> dict[str, Any]:
    """A record of the median of `samples`; `spread` is the distance between their quartiles."""
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [0.0, 0.0, 0.0]
    return {
        "suite": suite,
        "op": op,
        "case": case,
        "metric": metric,
        "value": float(f"{statistics.median(samples):.4g}"),
        "unit": unit,
        "spread": float(f"{quartiles[2] - quartiles[0]:.2g}"),
        "anchor": None,
        "ratio": None,
        "floor": None,
        "floor_ratio": None,
        "card": card(),
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version()} | _versions(),
        "command": " ".join(["python", "-m", f"bench.{suite}", *sys.argv[1:]]),
    }


def against(entry: dict[str, Any], anchor: dict[str, Any]) -> dict[str, Any]:
    """`entry` compared with `anchor`, a record of the same run of which less is better: `ratio` above 1 is faster."""
    compared = {"name": anchor["case"], "value": anchor["value"]}
    return entry | {"anchor": compared, "ratio": float(f"{anchor['value'] / entry['value']:.3g}")}


def above(entry: dict[str, Any], floor: float) -> dict[str, Any]:
    """`entry`, a time, beside the shortest that is possible in the same unit: `floor_ratio` 1 is at that limit."""
    return entry | {"floor": float(f"{floor:.4g}"), "floor_ratio": float(f"{floor / entry['value']:.3g}")}


def floor_s(flops: float, moved_bytes: float) -> float | None:
    """Seconds that this card needs at least, from the rates that it was seen to reach; None for a card without any."""
    if (seen := CEILINGS.get(card())) is None:
        return None
    return max(flops / seen.flops_per_s, moved_bytes / seen.bytes_per_s)


def save(records: Sequence[dict[str, Any]]) -> Path:
    """Add `records` of one suite to its file; records of the same op, case and metric are replaced."""
    path = RESULTS / records[0]["card"] / f"{records[0]['suite']}.json"
    kept = json.loads(path.read_text()) if path.exists() else []
    new = {_key(entry): entry for entry in records}
    merged = [entry for entry in kept if _key(entry) not in new] + list(new.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(merged, indent=1) + "\n")
    return path


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    return entry["op"], entry["case"], entry["metric"]


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
