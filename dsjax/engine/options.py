"""Engine options: what a user may set, and the deployment that they come to for a model and a target."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsjax.aot.ladders import Buckets, row_ladder, sparse, tail_ladder, token_ladder
from dsjax.aot.targets import CPU
from dsjax.config import ModelConfig
from dsjax.errors import OptionError

PLANS = ("auto", "step", "layer", "piece", "off")
LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True)
class EngineOptions:
    """Options of LLM and of `dsjax serve`; None means "choose for me".

    `max_model_len`: context in tokens. `max_batched_tokens`: tokens per step. `token_buckets`: the ladder itself
    (its last bucket is then max_batched_tokens). `max_num_seqs`: requests that run at once. `plan`: how much goes into
    one executable. `load_format` "dummy": random weights. `dtype` "auto": bfloat16 on GPUs, float32 on CPUs. `tp`:
    devices to split the model over. `kv_tokens`: size of the cache; without it, on a GPU the cache gets what is left of
    `gpu_memory_fraction` of the memory that JAX may use. `cache_dir`: where compiled executables are kept.
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

    @classmethod
    def create(cls, **options: Any) -> "EngineOptions":
        """The options by name. Raises OptionError that names an unknown one."""
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise OptionError(f"Unknown option {unknown[0]!r}; the options are {', '.join(known)}.")
        return cls(**options)

    def __post_init__(self):
        for name, allowed in (("plan", PLANS), ("load_format", LOAD_FORMATS), ("dtype", DTYPES)):
            if (value := getattr(self, name)) not in allowed:
                raise OptionError(f"{name} is {value!r}, expected one of {', '.join(allowed)}.")
        for name in ("max_model_len", "max_batched_tokens", "max_num_seqs", "kv_tokens", "tp"):
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise OptionError(f"{name} is {value!r}, expected a positive integer.")
        fraction = self.gpu_memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise OptionError(f"gpu_memory_fraction is {fraction!r}, expected a number in (0, 1].")
        if self.plan == "off" and self.tp > 1:
            raise OptionError("plan 'off' runs op by op on one device only; use it with tp=1.")


@dataclass(frozen=True)
class Deployment:
    """What options come to: all that decides what is compiled, beside the model and the size of its cache."""

    target: str
    dtype: str
    tp: int
    plan: str
    buckets: Buckets
    max_model_len: int


def resolve(options: EngineOptions, config: ModelConfig, target: str) -> Deployment:
    """The deployment of a model on `target`. Raises OptionError if options contradict it or each other.

    Plan "auto" is "step", which measures fastest; for a deep model on a CPU, "layer" compiles in less time.
    """
    on_cpu = target == CPU
    return Deployment(
        target=target,
        dtype=options.dtype if options.dtype != "auto" else "float32" if on_cpu else "bfloat16",
        tp=options.tp,
        plan="step" if options.plan == "auto" else options.plan,
        buckets=resolve_buckets(options, on_cpu),
        max_model_len=_max_model_len(options, config),
    )


def resolve_buckets(options: EngineOptions, on_cpu: bool) -> Buckets:
    """The ladders. On CPUs they are sparse, since compiling there costs more than padding."""
    rows = options.max_num_seqs or (16 if on_cpu else 128)
    tokens = _token_buckets(options, on_cpu)
    if tokens[-1] < rows:
        raise OptionError(
            f"The largest token bucket ({tokens[-1]}) is below max_num_seqs ({rows}), so that not every running "
            "request could get a token in a step. Raise max_batched_tokens or lower max_num_seqs."
        )
    thin = sparse if on_cpu else tuple
    chosen = options.token_buckets is not None
    return Buckets(tokens if chosen else thin(tokens), thin(row_ladder(rows)), thin(tail_ladder(rows)))


def cache_folder(options: EngineOptions) -> Path:
    """cache_dir, else $DSJAX_CACHE_DIR, else dsjax in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsjax"
    return Path(options.cache_dir or os.environ.get("DSJAX_CACHE_DIR") or default)


def _max_model_len(options: EngineOptions, config: ModelConfig) -> int:
    length = options.max_model_len or config.max_position
    if length > config.max_position:
        raise OptionError(f"max_model_len is {length}, but the model was made for {config.max_position} positions.")
    if length < 2:
        raise OptionError(f"max_model_len is {length}; a request needs room for one prompt token and one answer token.")
    return length


def _token_buckets(options: EngineOptions, on_cpu: bool) -> tuple[int, ...]:
    if options.token_buckets is None:
        return token_ladder(options.max_batched_tokens or (512 if on_cpu else 8192))
    buckets = tuple(options.token_buckets)
    if not buckets or not all(map(_is_positive, buckets)) or list(buckets) != sorted(set(buckets)):
        raise OptionError(f"token_buckets is {list(buckets)}, expected rising positive integers such as 16,64,256.")
    if options.max_batched_tokens not in (None, buckets[-1]):
        asked = options.max_batched_tokens
        raise OptionError(f"max_batched_tokens is {asked}, but the last of token_buckets is {buckets[-1]}; give one.")
    return buckets


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
