"""Engine options: what a user may set, and what that comes to for a model on a platform."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsjax.aot.ladders import row_ladder, sparse, tail_ladder, token_ladder
from dsjax.config import ModelConfig
from dsjax.errors import OptionError

PLANS = ("auto", "step", "layer", "piece", "off")
LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True)
class EngineOptions:
    """Options of LLM and of `dsjax serve`; None means "choose for me".

    `max_model_len`: context in tokens. `max_batched_tokens`: tokens per step. `token_buckets`: the ladder itself
    (its last bucket is then max_batched_tokens). `max_num_seqs`: requests that run at once. `plan`: granularity of
    compilation. `load_format` "dummy": random weights. `dtype` "auto": bfloat16 on GPUs, float32 on CPUs. `tp`:
    devices to split the model over. `kv_tokens`: size of the cache; without it, on a GPU the cache gets what is left of
    `gpu_memory_fraction` of the memory. `cache_dir`: where compiled executables are kept.
    """

    max_model_len: int | None = None
    max_batched_tokens: int | None = None
    token_buckets: Sequence[int] | None = None
    max_num_seqs: int | None = None
    plan: str = "auto"
    load_format: str = "auto"
    dtype: str = "auto"
    tp: int = 1
    kv_tokens: int | None = None
    gpu_memory_fraction: float = 0.85
    cache_dir: str | None = None

    def __post_init__(self):
        for name, allowed in (("plan", PLANS), ("load_format", LOAD_FORMATS), ("dtype", DTYPES)):
            if (value := getattr(self, name)) not in allowed:
                raise OptionError(f"{name} is {value!r}, expected one of {', '.join(allowed)}.")
        for name in ("max_model_len", "max_batched_tokens", "max_num_seqs", "kv_tokens", "tp"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{name} is {value!r}, expected a positive integer.")
        if not 0 < self.gpu_memory_fraction <= 1:
            raise OptionError(f"gpu_memory_fraction is {self.gpu_memory_fraction}, expected a number in (0, 1].")
        if self.plan == "off" and self.tp > 1:
            raise OptionError("plan 'off' runs op by op on one device only; use it with tp=1.")


@dataclass(frozen=True)
class Buckets:
    """The buckets of a deployment: tokens of mixed bodies, rows of decode bodies, rows of tails."""

    tokens: tuple[int, ...]
    decode: tuple[int, ...]
    tails: tuple[int, ...]


def resolve_max_model_len(options: EngineOptions, config: ModelConfig) -> int:
    """The context in tokens. OptionError if more is asked for than the model has positions."""
    length = options.max_model_len or config.max_position
    if length > config.max_position:
        raise OptionError(f"max_model_len is {length}, but the model was made for {config.max_position} positions.")
    if length < 2:
        raise OptionError(f"max_model_len is {length}; a request needs room for one prompt token and one answer token.")
    return length


def resolve_buckets(options: EngineOptions, on_gpu: bool) -> Buckets:
    """The ladders. On CPUs they are sparse, since compiling there costs more than padding."""
    rows = options.max_num_seqs or (128 if on_gpu else 16)
    tokens = _token_buckets(options, on_gpu)
    if tokens[-1] < rows:
        raise OptionError(
            f"The largest token bucket ({tokens[-1]}) is below max_num_seqs ({rows}), so that not every running "
            "request could get a token in a step. Raise max_batched_tokens or lower max_num_seqs."
        )
    thin = tuple if on_gpu else sparse
    chosen = options.token_buckets is not None
    return Buckets(tokens if chosen else thin(tokens), thin(row_ladder(rows)), thin(tail_ladder(rows)))


def _token_buckets(options: EngineOptions, on_gpu: bool) -> tuple[int, ...]:
    if options.token_buckets is None:
        return token_ladder(options.max_batched_tokens or (8192 if on_gpu else 512))
    buckets = tuple(options.token_buckets)
    if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
        raise OptionError(f"token_buckets is {list(buckets)}, expected rising positive integers such as 16,64,256.")
    if options.max_batched_tokens not in (None, buckets[-1]):
        raise OptionError(
            f"max_batched_tokens is {options.max_batched_tokens}, but the last of token_buckets is {buckets[-1]}; give one."
        )
    return buckets


def resolve_granularity(options: EngineOptions, on_gpu: bool) -> str:
    """ "auto" is one executable per step on GPUs, where launching counts, per layer on CPUs, where compiling does."""
    return options.plan if options.plan != "auto" else "step" if on_gpu else "layer"


def resolve_cache_dir(options: EngineOptions) -> Path:
    """cache_dir, else $DSJAX_CACHE_DIR, else dsjax in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsjax"
    return Path(options.cache_dir or os.environ.get("DSJAX_CACHE_DIR") or default)
