"""Loading a checkpoint: seconds, rate beside what the disk gives, and host memory beyond the weights.

    python -m bench.load                        # V3's shapes in FP8: a dense and an MoE layer, fewer experts and words
    python -m bench.load --experts 256 --vocabulary 129280 --folder /fast/disk

Files of random bytes are written first. Before every run their pages are dropped from the page cache. The disk's rate
is measured in between the runs: the same files read with `pread` by as many threads. Host memory is RssAnon, sampled:
its peak less what is left at the end, when on CPUs the weights are in it and on GPUs they are not.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from bench.engine import table
from bench.records import record, save
from dsjax.checkpoint.arranged import CHUNK_BYTES
from dsjax.checkpoint.load import load_weights
from dsjax.checkpoint.names import checkpoint_tensors
from dsjax.checkpoint.placing import READERS
from dsjax.checkpoint.safetensors import write_file
from dsjax.config import ModelConfig
from dsjax.model import abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.published import FOLDER, MODELS
from dsjax.sharding import TensorParallel, make_mesh

SUITE = "load"
TENSORS_PER_SHARD = 64
NOISE = np.random.default_rng(0).integers(0, 64, 1 << 26, np.uint8)


def write_checkpoint(folder: Path, experts: int, vocabulary: int) -> None:
    """A dense and an MoE layer of V3 in FP8 with random values, in shards of TENSORS_PER_SHARD tensors."""
    fields = json.loads((FOLDER / MODELS["v3"]).read_text())
    fields |= {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    fields |= {"n_routed_experts": experts, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = checkpoint_tensors(ModelConfig.from_fields(fields))
    for number, batch in enumerate(batched(tensors.items(), TENSORS_PER_SHARD)):
        write_file(folder / f"model-{number:05}.safetensors", {name: noise(*tensor) for name, tensor in batch})


def noise(shape: tuple[int, ...], dtypes: tuple[str, ...]) -> np.ndarray:
    """Random bytes that are finite numbers in every dtype."""
    dtype = np.dtype(getattr(ml_dtypes, dtypes[0], dtypes[0]))
    count = math.prod(shape) * dtype.itemsize
    return np.resize(NOISE, count).view(dtype).reshape(shape)


def drop_pages(folder: Path) -> None:
    """Drop the files of `folder` from the page cache."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(folder: Path) -> float:
    """Seconds to read all files with `pread` and forget what was read."""

    def read(stretch: tuple[int, int]) -> None:
        os.pread(stretch[0], CHUNK_BYTES, stretch[1])

    drop_pages(folder)
    with ExitStack() as files, ThreadPoolExecutor(READERS) as threads:
        opened = [files.enter_context(open(path, "rb")).fileno() for path in sorted(folder.glob("*.safetensors"))]
        stretches = [(file, begin) for file in opened for begin in range(0, os.fstat(file).st_size, CHUNK_BYTES)]
        begin = time.perf_counter()
        for _ in threads.map(read, stretches):
            pass
        return time.perf_counter() - begin


@dataclass
class Load:
    """One load: seconds, bytes of all arrays and of the largest, peak of host memory beyond what stayed in use."""

    seconds: float
    weight_bytes: int
    largest_bytes: int
    extra_bytes: int


def load(folder: Path, tp: int) -> Load:
    """Load the checkpoint in `folder`, in bf16 where it is not FP8, and free it again."""
    mesh = make_mesh(tp)
    model = abstract_model(ModelConfig.load(folder), "bfloat16", Ops.references(), TensorParallel(tp))
    drop_pages(folder)
    with peak_of(anonymous_bytes) as peak:
        begin = time.perf_counter()
        leaves = jax.block_until_ready(jax.tree.leaves(load_weights(model, folder, mesh)))
        seconds = time.perf_counter() - begin
    extra, sizes = peak[0] - anonymous_bytes(), [leaf.nbytes for leaf in leaves]
    for leaf in leaves:
        leaf.delete()
    return Load(seconds, sum(sizes), max(sizes), extra)


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@contextmanager
def peak_of(measure: Callable[[], int]) -> Iterator[list[int]]:
    """A list whose one item is the largest value that `measure` has had, sampled every 2 ms."""
    peak, ended = [measure()], threading.Event()

    def sample() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], measure())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def measure(folder: Path, case: str, tp: int, repeats: int) -> list[dict[str, Any]]:
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    load(folder, tp)  # what JAX sets up at first use is no part of loading
    plain, loads = [], []
    for _ in range(repeats):
        plain.append(read_plainly(folder))
        loads.append(load(folder, tp))
    disk = [file_bytes / seconds / 1e9 for seconds in plain]
    rate = record(SUITE, "load", case, "rate", [file_bytes / one.seconds / 1e9 for one in loads], "GB/s")
    anchor = statistics.median(disk)
    rate |= {"anchor": {"name": f"pread of the same files, {READERS} threads", "value": float(f"{anchor:.4g}")}}
    rate |= {"ratio": float(f"{rate['value'] / anchor:.3g}")}
    sized = {
        "weights": [one.weight_bytes for one in loads],
        "largest weight": [one.largest_bytes for one in loads],
        "host memory at its peak beyond the end": [one.extra_bytes for one in loads],
    }
    return [
        record(SUITE, "load", case, "time", [one.seconds for one in loads], "s"),
        rate,
        *(record(SUITE, "load", case, name, [size / 1e9 for size in sizes], "GB") for name, sizes in sized.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32, help="routed experts of the MoE layer; V3 has 256")
    parser.add_argument("--vocabulary", type=int, default=16160, help="V3 has 129280")
    parser.add_argument("--tp", type=int, default=1, help="devices to split the model over")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files are written and left; by default a temporary one")
    args = parser.parse_args()
    case = f"v3 fp8, 2 layers, {args.experts} experts, vocabulary {args.vocabulary}, tp {args.tp}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, args.experts, args.vocabulary)
        records = measure(folder, case, args.tp, args.repeats)
    print(table(records))
    print(f"saved to {save(records)}")


if __name__ == "__main__":
    main()
