"""Engine options: what a user may set, and the deployment that they come to for a model and a target."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from dsjax.aot.ladders import ROW_GROUP, Buckets, one_shape, row_ladder, sparse, tail_ladder, token_ladder
from dsjax.aot.targets import CPU
from dsjax.config import ModelConfig
from dsjax.errors import OptionError

# Defaults by kind of device: rows (max_num_seqs) and tokens of a step (max_batched_tokens).
CPU_ROWS, CPU_TOKENS = 16, 512
GPU_ROWS, GPU_TOKENS = 128, 8192
MAX_STEP_TOKENS = 65536  # larger bodies take ever longer to compile, and prompts are cut into steps anyway
# In deterministic mode every step costs as much as a full one.
CPU_FIXED_TOKENS, GPU_FIXED_TOKENS = 32, 256

PLANS = ("auto", "step", "layer", "piece", "off")
LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True)
class EngineOptions:
    """Options of LLM and of `dsjax serve`; None means "choose for me".

    `max_model_len`: context in tokens, by default the model's. `max_batched_tokens`: tokens per step (8192 on GPUs, 512
    on CPUs). `token_buckets`: the ladder itself; its last bucket is then max_batched_tokens. `max_num_seqs`: requests
    that run at once (128 on GPUs, 16 on CPUs). `row_buckets`: the ladder of steps in which each request computes one
    token, and of samplers; its last bucket is then max_num_seqs. `plan`: how much goes into one executable; "auto" is
    "step". `load_format` "dummy": random weights. `dtype` "auto": bfloat16 on GPUs, float32 on CPUs. `tp`: devices to
    split the model over. `kv_tokens`: size of the cache in tokens; by default it is enough for max_num_seqs requests of
    full length, or what memory allows: on GPUs `gpu_memory_fraction` of what JAX may use, less the weights and 2 GiB,
    on CPUs 1 GiB. `cache_dir`: where compiled executables are kept. `prefix_cache`: requests whose tokens begin equally
    share the cache of that beginning. `deterministic`: a request's tokens do not depend on what else runs;
    max_batched_tokens is then the size of every step (256 on GPUs, 32 on CPUs), at least twice max_num_seqs.
    """

    max_model_len: int | None = None
    max_batched_tokens: int | None = None
    token_buckets: Sequence[int] | None = None
    max_num_seqs: int | None = None
    row_buckets: Sequence[int] | None = None
    plan: str = "auto"
    load_format: str = "auto"
    dtype: str = "auto"
    tp: int = 1
    kv_tokens: int | None = None
    gpu_memory_fraction: float = 0.85
    cache_dir: str | None = None
    prefix_cache: bool = True
    deterministic: bool = False

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
        for name in ("prefix_cache", "deterministic"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"{name} is {value!r}, expected True or False.")
        fraction = self.gpu_memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise OptionError(f"gpu_memory_fraction is {fraction!r}, expected a number in (0, 1].")
        self._check_buckets("token_buckets", "max_batched_tokens")
        self._check_buckets("row_buckets", "max_num_seqs")
        self._check_step_tokens()
        if self.plan == "off" and self.tp > 1:
            raise OptionError("plan 'off' runs op by op on one device only; use it with tp=1.")
        if self.deterministic:
            self._check_deterministic()

    @property
    def step_tokens(self) -> int | None:
        """Most tokens of a step, if the user set it."""
        return self.max_batched_tokens if self.token_buckets is None else self.token_buckets[-1]

    @property
    def rows(self) -> int | None:
        """Most requests at once, if the user set it."""
        return self.max_num_seqs if self.row_buckets is None else self.row_buckets[-1]

    def _check_buckets(self, name: str, limit: str) -> None:
        """Raise OptionError unless the ladder `name` is one and ends with the option `limit`, if both are given."""
        buckets, asked = getattr(self, name), getattr(self, limit)
        if buckets is None:
            return
        is_list = isinstance(buckets, Sequence) and not isinstance(buckets, str)
        if not is_list or not buckets or not all(map(_is_positive, buckets)) or list(buckets) != sorted(set(buckets)):
            raise OptionError(f"{name} is {buckets!r}, expected rising positive integers such as [16, 64, 256].")
        if asked not in (None, buckets[-1]):
            raise OptionError(f"{limit} is {asked}, but the last of {name} is {buckets[-1]}; give one.")

    def _check_step_tokens(self) -> None:
        name, largest = "max_batched_tokens" if self.token_buckets is None else "token_buckets", self.step_tokens
        if largest is not None and largest > MAX_STEP_TOKENS:
            raise OptionError(
                f"{name} asks for steps of {largest} tokens; at most {MAX_STEP_TOKENS}. Longer prompts are computed in "
                "several steps."
            )

    def _check_deterministic(self) -> None:
        if self.plan == "off":
            raise OptionError("plan 'off' computes other bits than compiled plans; deterministic needs one of those.")
        for name in ("token_buckets", "row_buckets"):
            if len(buckets := getattr(self, name) or ()) > 1:
                raise OptionError(f"{name} is {buckets!r}, but deterministic runs all steps in one bucket.")
        if self.step_tokens is not None and self.step_tokens % (2 * ROW_GROUP):
            raise OptionError(
                f"Steps of {self.step_tokens} tokens were asked for; deterministic needs a multiple of {2 * ROW_GROUP}."
            )


@dataclass(frozen=True)
class Deployment:
    """What options come to: all that decides what is compiled, beside the model and the size of its cache.

    `max_num_seqs`: requests that run at once; `buckets.rows`, the size of their arrays, may be larger.
    """

    target: str
    dtype: str
    plan: str
    buckets: Buckets
    max_model_len: int
    max_num_seqs: int
    deterministic: bool


def resolve(options: EngineOptions, config: ModelConfig, target: str) -> Deployment:
    """The deployment of a model on `target`. Raises OptionError if options contradict it or each other.

    Plan "auto" is "step", which measures fastest; for a deep model on a CPU, "layer" compiles in less time.
    """
    on_cpu = target == CPU
    return Deployment(
        target=target,
        dtype=options.dtype if options.dtype != "auto" else "float32" if on_cpu else "bfloat16",
        plan="step" if options.plan == "auto" else options.plan,
        buckets=resolve_buckets(options, on_cpu),
        max_model_len=_max_model_len(options, config),
        max_num_seqs=_max_num_seqs(options, on_cpu),
        deterministic=options.deterministic,
    )


def resolve_buckets(options: EngineOptions, on_cpu: bool) -> Buckets:
    """The ladders. On CPUs they are sparse, since compiling there costs more than padding."""
    rows = _max_num_seqs(options, on_cpu)
    if options.deterministic:
        return _one_shape(options.step_tokens or (CPU_FIXED_TOKENS if on_cpu else GPU_FIXED_TOKENS), rows)
    thin = sparse if on_cpu else tuple
    if options.token_buckets is None:
        tokens = thin(token_ladder(options.max_batched_tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS)))
    else:
        tokens = tuple(options.token_buckets)
    if tokens[-1] < rows:
        raise OptionError(
            f"The largest token bucket ({tokens[-1]}) is below max_num_seqs ({rows}), so that not every running "
            "request could get a token in a step. Raise max_batched_tokens or lower max_num_seqs."
        )
    if options.row_buckets is not None:
        return Buckets(tokens, tuple(options.row_buckets), tuple(options.row_buckets))
    return Buckets(tokens, thin(row_ladder(rows)), thin(tail_ladder(rows)))


def cache_folder(options: EngineOptions) -> Path:
    """cache_dir, else $DSJAX_CACHE_DIR, else dsjax in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsjax"
    return Path(options.cache_dir or os.environ.get("DSJAX_CACHE_DIR") or default)


def executables_folder(options: EngineOptions) -> Path:
    """Where compiled executables are kept."""
    return cache_folder(options) / "executables"


def _one_shape(tokens: int, rows: int) -> Buckets:
    buckets = one_shape(tokens)
    if buckets.rows < rows:
        raise OptionError(
            f"deterministic runs at most {buckets.rows} requests at once with max_batched_tokens {tokens}, but "
            f"max_num_seqs is {rows}. Lower it, or set max_batched_tokens to twice as much."
        )
    return buckets


def _max_num_seqs(options: EngineOptions, on_cpu: bool) -> int:
    return options.rows or (CPU_ROWS if on_cpu else GPU_ROWS)


def _max_model_len(options: EngineOptions, config: ModelConfig) -> int:
    length = options.max_model_len or config.max_position
    if length > config.max_position:
        raise OptionError(f"max_model_len is {length}, but the model was made for {config.max_position} positions.")
    if length < 2:
        raise OptionError(f"max_model_len is {length}; a request needs room for one prompt token and one answer token.")
    return length


def _is_positive(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0
