"""Kernels beside those of other libraries: time of a call, rates, distance from what the card can do.

    python -m bench.kernels --op mla_decode
    python -m bench.kernels --op mla_decode --cases "v3_tp8 batch 1 "    # only cases with this in their name
    python -m bench.kernels --op mla_decode --tune --cases "context 4096"    # the kernel's candidate settings
    python -m bench.kernels --op mla_decode --implementation reference --quick    # on any machine

Contenders take turns on one card in one process. JAX: 10 calls or more in one executable, each on the
output of the one before. Anchors: as many calls in a CUDA graph. Data are random, and calls go through more of them
than the L2 cache holds. Plans and schedules are made beforehand, as for all layers of a step.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from statistics import median
from typing import Any

import jax

from bench.ops.mla_decode import MLADecodeBench
from bench.records import above, against, floor_s, record, save
from bench.timing import time_in_turns
from dsjax.aot.targets import target_of
from dsjax.pallas_kernels import DETERMINISTIC, REFERENCE, implementations

SUITE = "kernels"
OPS = {"mla_decode": MLADecodeBench}
LARGEST_DIFFERENCE = 5e-3  # roundings to bf16 on both sides make some 3e-3


def measure(bench: Any, name: str, with_anchor: bool, timing: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of one case: the time of a call, and the rates that follow from it."""
    case, work = bench.cases[name], bench.work(bench.cases[name])
    subject = bench.subject(case)
    contenders = [subject, *([bench.anchor(case, subject)] if with_anchor else [])]
    samples, *of_anchor = time_in_turns(contenders, **timing)
    entry = record(SUITE, bench.op, name, "time", samples, "us")
    if of_anchor:
        entry = against(entry, record(SUITE, bench.op, contenders[1].name, "time", of_anchor[0], "us"))
        difference = bench.difference(case)
        print(f"{name}: relative difference to {contenders[1].name} {difference:.1e}", flush=True)
        if not difference < LARGEST_DIFFERENCE:
            raise SystemExit(f"{name}: the results differ, so there is nothing to compare.")
    if (floor := floor_s(*work)) is not None:
        entry = above(entry, floor * 1e6)
    return [
        entry,
        record(SUITE, bench.op, name, "rate", [work.flops / us / 1e6 for us in samples], "TFLOP/s"),
        record(SUITE, bench.op, name, "bandwidth", [work.bytes / us / 1e3 for us in samples], "GB/s"),
    ]


def measure_planning(bench: Any, name: str, timing: dict[str, Any]) -> list[dict[str, Any]]:
    """A record of what is made once a step for this case, if there is anything."""
    if (chain := bench.planning(bench.cases[name])) is None:
        return []
    [samples] = time_in_turns([chain], **timing)
    return [record(SUITE, bench.op, name, "plan", samples, "us")]


def tune(bench: Any, name: str, timing: dict[str, Any]) -> str:
    """A line per candidate, the fastest first."""
    candidates = bench.candidates(bench.cases[name])
    with ThreadPoolExecutor() as threads:  # which compile
        subjects = list(threads.map(lambda settings: bench.subject(bench.cases[name], **settings), candidates))
    times = time_in_turns(subjects, **timing)
    fastest_first = sorted(zip(map(median, times), map(str, candidates), strict=True))
    return "\n".join(f"{name:32}{us:10.2f} us  {settings}" for us, settings in fastest_first)


def table(records: Sequence[dict[str, Any]]) -> str:
    """A line per case."""
    found = {(entry["case"], entry["metric"]): entry for entry in records}
    names = list(dict.fromkeys(entry["case"] for entry in records))
    titles = ("us", "spread", "TFLOP/s", "GB/s", "anchor us", "ratio", "floor us", "of floor", "plan us")
    lines = [f"{'':32}" + "".join(f"{title:>10}" for title in titles)]
    for name in names:
        time, rate, bandwidth = (found[name, metric] for metric in ("time", "rate", "bandwidth"))
        cells = [time["value"], time["spread"], rate["value"], bandwidth["value"]]
        cells += [(time["anchor"] or {}).get("value"), time["ratio"], time["floor"], time["floor_ratio"]]
        cells += [found.get((name, "plan"), {}).get("value")]
        lines.append(f"{name:32}" + "".join(f"{'-' if cell is None else cell:>10}" for cell in cells))
    return "\n".join(lines)


def measure_all(bench: Any, names: Sequence[str], timing: dict[str, Any], saves: bool) -> list[dict[str, Any]]:
    """The records of all cases, each saved as soon as it is measured."""
    if missing := [package for package in bench.anchor_packages if find_spec(package) is None]:
        print(f"No anchor: {', '.join(missing)} cannot be imported.")
    bench.compile_all(names)
    records = []
    for name in names:
        found = measure(bench, name, not missing, timing) + measure_planning(bench, name, timing)
        if saves:
            save(found)
        records += found
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=list(OPS), required=True)
    parser.add_argument("--cases", default="", help="a part of the names of the cases to measure")
    parser.add_argument("--implementation", help="by default the one that serves on this device")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, default=20, help="time of each contender in each round")
    parser.add_argument("--quick", action="store_true", help="tiny cases, to try the benchmark itself; saves nothing")
    parser.add_argument("--tune", action="store_true", help="time the kernel's candidate settings; saves nothing")
    args = parser.parse_args()
    target = target_of(jax.devices()[0])
    runnable = [name for name in OPS[args.op].implementations if name in (REFERENCE, DETERMINISTIC, target)]
    implementation = args.implementation or implementations(target)[args.op]
    if implementation not in runnable:
        parser.error(f"--implementation: {args.op} has no {implementation} on this device, but {', '.join(runnable)}.")
    if args.rounds < 1:
        parser.error("--rounds: must be at least 1.")
    bench = OPS[args.op](implementation, args.quick)
    timing = {"rounds": args.rounds, "round_s": args.round_ms / 1e3}
    names = [name for name in bench.cases if args.cases in name]
    if not names:
        parser.error(f"--cases: none has {args.cases!r} in its name. There are:\n" + "\n".join(bench.cases))
    if args.tune and not bench.candidates(bench.cases[names[0]]):
        parser.error(f"--tune: the {implementation} implementation of {args.op} has no settings to try.")
    if args.tune:
        for name in names:
            print(tune(bench, name, timing), flush=True)
    else:
        print(table(measure_all(bench, names, timing, saves=not args.quick)))


if __name__ == "__main__":
    main()
