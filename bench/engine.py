"""The engine end to end: time to first token and time per output token for every plan.

    python -m bench.engine                                        # the demo model
    python -m bench.engine --plans step --deterministic           # the price of deterministic mode
    python -m bench.engine --model v2_lite --plans step --prompts 128 1024 4096 --batches 1 16 64 128 \
        --contexts 1024 8192 --max-model-len 8448 --token-buckets 128 1024 4096 --row-buckets 1 16 64 128

The last one runs a published shape with random weights; only the buckets that it needs are compiled. A case names its
plan, and the operations that run as kernels.

Prompts are random token ids. TTFT: one request with max_tokens 1 on an idle engine, host to host. TPOT: a batch that
decodes; wall time of some steps over their number. Its contexts are not computed: the whole cache is filled with random
numbers, and the pages of each request, all different, are declared to hold its prompt.

The floor of TPOT is (weights + cache) / bandwidth: the bytes of all weights but the embedding, counting of E routed
experts of which a token chooses K those that B tokens are expected to choose, E (1 - (1 - K / E) ** B); B x context x
bytes per cached token; and the card's rate in bench/records.py.
"""

import argparse
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax, random

from bench.records import above, against, floor_s, record, save
from dsjax import LLM, SamplingParams
from dsjax.cache.pages import page_keys
from dsjax.engine.request import Request
from dsjax.model import Model
from dsjax.pallas_kernels import REFERENCE, implementations
from dsjax.published import FOLDER, MODELS
from dsjax.segments import weight_leaves
from dsjax.telemetry import counters

SUITE = "engine"
STEPS = 30  # of one sample of TPOT


def make_llm(model: str, plan: str, options: dict[str, Any], scratch: Path) -> LLM:
    """An LLM on a checkpoint, or on a published shape with random weights."""
    if model not in MODELS:
        return LLM(model, plan=plan, **options)
    shutil.copy(FOLDER / MODELS[model], scratch / "config.json")
    return LLM(scratch, plan=plan, load_format="dummy", **options)


def random_prompt(llm: LLM, length: int, number: int = 0) -> list[int]:
    return np.random.default_rng([length, number]).integers(20, llm.engine.limits.vocab_size, length).tolist()


def fill_cache(llm: LLM) -> None:
    """Random numbers in every page."""

    def filled(pool: jax.Array) -> jax.Array:
        def fill_layer(layer, pool):
            numbers = random.normal(random.fold_in(random.key(0), layer), pool.shape[1:], pool.dtype)
            return pool.at[layer].set(numbers)

        return lax.fori_loop(0, pool.shape[0], fill_layer, pool)

    pools = llm.engine.runner.executor.state["pools"]
    for name, pool in pools.items():
        pools[name] = jax.jit(filled, donate_argnums=0, out_shardings=pool.sharding)(pool)


def declare_cached(llm: LLM, prompt: list[int]) -> None:
    """From now on, the prefix cache finds pages for `prompt`, whatever they hold."""
    for kind in llm.engine.runner.kinds:
        pool, keys = llm.engine.scheduler.pools[kind.name], page_keys(prompt, kind.page_tokens)
        pages = pool.take(len(keys))
        for page, key in zip(pages, keys, strict=True):
            pool.remember(page, key)
        pool.release(pages)


def step_bytes(model: Model, batch: int, context: int) -> float:
    """Bytes that a decode step has to read at least; see the top of this file."""
    router = model.config.moe.router
    chosen = 1 - (1 - router.experts_per_token / router.num_experts) ** batch
    weights = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize * (chosen if name.startswith("experts_") else 1)
        for path, piece in model.pieces()
        for name, leaf in weight_leaves(nnx.state(piece))
        if path != "embed"
    )
    return weights + batch * context * sum(kind.page_bytes / kind.page_tokens for kind in model.page_kinds)


def ttft_ms(llm: LLM, length: int, repeats: int) -> list[float]:
    prompt, params = random_prompt(llm, length), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for _ in range(2):  # the second run makes CUDA graphs
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
    engine.forget_prefixes()
    requests = []
    for i in range(batch):
        prompt = random_prompt(llm, context, i)
        declare_cached(llm, prompt)
        requests.append(Request.create(f"tpot-{i}", prompt, params, engine.limits))
        engine.add(requests[-1])
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
    contexts = args.contexts[:1] if quick else args.contexts
    repeats, steps = (2, 3) if quick else (args.repeats, STEPS)
    records = [
        record(SUITE, "ttft", f"{case} prompt {length}", "time", ttft_ms(llm, length, repeats), "ms")
        for length in lengths
    ]
    fill_cache(llm)
    for context in contexts:
        for batch in batches:
            samples = tpot_ms(llm, batch, context, steps, repeats)
            entry = record(SUITE, "tpot", f"{case} batch {batch} ctx {context}", "time", samples, "ms")
            floor = floor_s(0, step_bytes(llm.engine.runner.blueprint.model, batch, context))
            records.append(entry if floor is None else above(entry, floor * 1e3))
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
    with tempfile.TemporaryDirectory() as scratch:  # a compilation cache of its own, so that compiling is timed
        options["cache_dir"] = f"{scratch}/cache"
        begin = time.perf_counter()
        llm = make_llm(args.model, plan, options, Path(scratch))
        print(f"{plan}: ready in {time.perf_counter() - begin:.0f} s; {llm.engine.runner.compile_report}", flush=True)
        records = measure(llm, name_of(llm, args.model, plan), args, quick=plan == "off")
        llm.close()
    return records


def name_of(llm: LLM, model: str, plan: str) -> str:
    """What the cases of one engine are called: model, plan, and the operations that run as kernels.

    Not those whose kernels do not serve this model. Another engine of the process may have counted them, when it traced
    the same shapes.
    """
    deployment = llm.engine.runner.blueprint.deployment
    if deployment.deterministic:
        return f"{Path(model).name} {plan} deterministic"
    chosen = implementations(deployment.target)
    kernels = [op for op in chosen if chosen[op] != REFERENCE and not counters[f"reference_op.{op}"]]
    return " ".join([Path(model).name, plan, *(["with kernels", "+".join(kernels)] if kernels else [])])


def table(records: Sequence[dict[str, Any]]) -> str:
    rows = [
        f"{r['op']:6} {r['case']:72} {r['metric']:20} {r['value']:>10} {r['unit']:6} ±{r['spread']:<8} "
        + (f"floor {r['floor']} ({r['floor_ratio']}) " if r["floor"] else "")
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
    parser.add_argument("--contexts", nargs="+", type=int, default=[128], help="prompt lengths of the TPOT batches")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-batched-tokens", type=int)
    parser.add_argument("--token-buckets", nargs="+", type=int, help="all that is compiled for prompts")
    parser.add_argument("--row-buckets", nargs="+", type=int, help="all that is compiled for decoding")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--deterministic", action="store_true", help="each plan also in deterministic mode, compared")
    parser.add_argument("--deterministic-tokens", type=int, help="its max_batched_tokens")
    args = parser.parse_args()
    records = []
    for plan in args.plans:
        buckets = {"token_buckets": args.token_buckets, "row_buckets": args.row_buckets}
        records += (plain := run(plan, args, max_batched_tokens=args.max_batched_tokens, **buckets))
        if args.deterministic and plan != "off":
            slow = run(plan, args, max_batched_tokens=args.deterministic_tokens, deterministic=True)
            records += [against(one, other) for one, other in zip(slow, plain, strict=True)]
        path = save(records)
    print(table(records))
    print(f"saved to {path}")


if __name__ == "__main__":
    main()
