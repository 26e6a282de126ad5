"""The engine end to end: time to first token and time per output token for every plan.

    python -m bench.engine                                        # the demo model
    python -m bench.engine --model v2_lite --plans step           # a published shape with random weights
    python -m bench.engine --plans step --deterministic           # the price of deterministic mode

Prompts are random token ids. TTFT: one request with max_tokens 1 on an idle engine, host to host. TPOT: a batch whose
prompts are already prefilled, decoding; wall time of the steps in between over their number.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.records import against, record, save
from dsjax import LLM, SamplingParams
from dsjax.engine.request import Request
from dsjax.published import FOLDER, MODELS

SUITE = "engine"


def make_llm(model: str, plan: str, options: dict[str, Any], scratch: Path) -> LLM:
    """An LLM on a checkpoint, or on a published shape with random weights."""
    if model not in MODELS:
        return LLM(model, plan=plan, **options)
    shutil.copy(FOLDER / MODELS[model], scratch / "config.json")
    return LLM(scratch, plan=plan, load_format="dummy", **options)


def random_prompt(llm: LLM, length: int) -> list[int]:
    return np.random.default_rng(length).integers(20, llm.engine.limits.vocab_size, length).tolist()


def ttft_ms(llm: LLM, length: int, repeats: int) -> list[float]:
    prompt, params = random_prompt(llm, length), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate([prompt], params)
    times = []
    for _ in range(repeats):
        llm.engine.forget_prefixes()
        begin = time.perf_counter()
        llm.generate([prompt], params)
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def tpot_ms(llm: LLM, batch: int, context: int, steps: int, repeats: int) -> list[float]:
    """Milliseconds per decode step, one figure per repeat of `steps` steps."""
    engine = llm.engine
    if batch > engine.scheduler.rows:
        raise SystemExit(f"batch {batch} needs --max-num-seqs of at least {batch}")
    params = SamplingParams(temperature=0, max_tokens=steps * (repeats + 1) + 8, ignore_eos=True)
    prompt = random_prompt(llm, context)
    requests = [Request.create(f"tpot-{i}", prompt, params, engine.limits) for i in range(batch)]
    for request in requests:
        engine.add(request)
    while any(len(request.outputs) < 4 for request in requests):
        engine.step()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(steps):
            engine.step()
        times.append((time.perf_counter() - begin) / steps * 1e3)
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
    return times


def dispatches_per_step(llm: LLM) -> int:
    """Executable calls of one decode step of one request, tail included."""
    executor = llm.engine.runner.executor
    steps, admission = 3, 1
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    llm.generate([[20]], params)
    before = executor.dispatched
    llm.generate([[20]], params)
    return (executor.dispatched - before - admission) // steps


def measure(llm: LLM, case: str, args: argparse.Namespace, quick: bool) -> list[dict[str, Any]]:
    """All records of one engine."""
    lengths, batches = (args.prompts[:1], args.batches[:1]) if quick else (args.prompts, args.batches)
    repeats, steps = (2, 3) if quick else (args.repeats, 30)
    records = [
        record(SUITE, "ttft", f"{case} prompt {length}", "time", ttft_ms(llm, length, repeats), "ms")
        for length in lengths
    ]
    records += [
        record(SUITE, "tpot", f"{case} batch {batch} ctx {args.context}", "time", samples, "ms")
        for batch in batches
        for samples in [tpot_ms(llm, batch, args.context, steps, repeats)]
    ]
    records.append(record(SUITE, "tpot", case, "dispatches per step", [dispatches_per_step(llm)], "calls"))
    report = llm.engine.runner.compile_report
    if report is not None:
        records.append(record(SUITE, "build", case, "executables", [report.executables], "files"))
        records.append(record(SUITE, "build", case, "lower", [report.lower_s], "s"))
        records.append(record(SUITE, "build", case, "compile", [report.compile_s], "s"))
    return records


def run(plan: str, args: argparse.Namespace, **options: Any) -> list[dict[str, Any]]:
    """All records of one plan."""
    options = {"max_num_seqs": args.max_num_seqs, "max_model_len": args.max_model_len} | options
    case = f"{Path(args.model).name} {plan}" + (" deterministic" if options.get("deterministic") else "")
    with tempfile.TemporaryDirectory() as scratch:  # a compilation cache of its own, so that compiling is timed
        options["cache_dir"] = f"{scratch}/cache"
        llm = make_llm(args.model, plan, options, Path(scratch))
        records = measure(llm, case, args, quick=plan == "off")
        llm.close()
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    rows = [
        f"{r['op']:6} {r['case']:48} {r['metric']:20} {r['value']:>10} {r['unit']:6} ±{r['spread']:<8} "
        + (f"ratio {r['ratio']} to {r['anchor']['name']}" if r["anchor"] else "")
        for r in records
    ]
    return "\n".join(map(str.rstrip, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a checkpoint folder, or one of " + ", ".join(MODELS))
    parser.add_argument("--plans", nargs="+", default=["off", "piece", "layer", "step"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[16, 128, 512, 1024], help="prompt lengths for TTFT")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16], help="batch sizes for TPOT")
    parser.add_argument("--context", type=int, default=128, help="prompt length of the TPOT batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-batched-tokens", type=int)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--deterministic", action="store_true", help="each plan also in deterministic mode, compared")
    parser.add_argument("--deterministic-tokens", type=int, help="its max_batched_tokens")
    args = parser.parse_args()
    records = []
    for plan in args.plans:
        records += (plain := run(plan, args, max_batched_tokens=args.max_batched_tokens))
        if args.deterministic and plan != "off":
            slow = run(plan, args, max_batched_tokens=args.deterministic_tokens, deterministic=True)
            records += [against(one, other) for one, other in zip(slow, plain, strict=True)]
    print(table(records))
    print(f"saved to {save(records)}")


if __name__ == "__main__":
    main()
