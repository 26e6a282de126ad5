"""ModelConfig: what a DeepSeek model is, read from the config.json of any supported family member.

The field names of config.json are explained in the DeepSeek papers and in transformers' configuration classes;
here they are grouped by the part of the model that uses them. Nothing in this module needs JAX.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from dsjax.errors import ConfigError

SUPPORTED = {
    "DeepseekV2ForCausalLM": "DeepSeek-V2, V2-Lite, V2.5",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, R1, V3.1, Moonlight",
}
RECOGNISED = {
    "DeepseekV32ForCausalLM": "DeepSeek-V3.2 (sparse attention)",
    "DeepseekV4ForCausalLM": "DeepSeek-V4 (compressed attention)",
}


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (Peng et al. 2023), as DeepSeek parametrises it."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @property
    def rotation_scale(self) -> float:
        """Multiplier of cos and sin; 1 in every published checkpoint, where both mscales are equal."""
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_factor(self) -> float:
        """m^2, by which YaRN raises the softmax scale."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _mscale(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding over `dim` channels. `interleaved`: the checkpoint rotates pairs (2i, 2i+1)."""

    dim: int
    theta: float
    interleaved: bool = True
    yarn: YarnConfig | None = None


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2 paper, section 2.1).

    `q_lora_rank` None: queries are not compressed. The norms of the query and key-value latents use
    `latent_norm_eps` whatever rms_norm_eps says.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig
    latent_norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Cached values per token and layer: the latent and the shared rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        yarn = self.rope.yarn
        return self.qk_head_dim**-0.5 * (yarn.softmax_factor if yarn else 1.0)


@dataclass(frozen=True)
class RouterConfig:
    """How a token chooses its experts.

    `scoring` is "softmax" (V2) or "sigmoid" (V3). With `num_groups` > 1 only experts of the `groups_kept` best groups
    may be chosen; a group is worth its best score ("max") or the sum of its two best ("top2_sum").
    """

    num_experts: int
    experts_per_token: int
    scoring: str
    scaling_factor: float
    normalize: bool
    has_bias: bool
    num_groups: int = 1
    groups_kept: int = 1
    group_score: str = "max"


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts of `expert_width` each, and shared experts that together are one MLP of `shared_width`."""

    router: RouterConfig
    expert_width: int
    shared_width: int


@dataclass(frozen=True)
class Fp8Config:
    """Projections are float8 e4m3 with a float32 scale per block of 128 x 128, except in `excluded` modules."""

    excluded: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        """Whether `module` is none of the excluded ones and in none; an entry may leave out the path before it."""
        return not any(f".{entry}." in f".{module}." for entry in self.excluded)


@dataclass(frozen=True)
class ModelConfig:
    """One model of the family. `num_dense_layers` leading layers have a dense MLP, the others experts.

    `fp8` None: no weight is quantised.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_dense_layers: int
    dense_width: int
    norm_eps: float
    max_position: int
    attention: MLAConfig
    moe: MoEConfig
    num_mtp_layers: int
    eos_token_ids: tuple[int, ...]
    fp8: Fp8Config | None = None

    @classmethod
    def load(cls, folder: str | Path) -> "ModelConfig":
        """Read `folder`/config.json, with the end-of-text ids of generation_config.json where that file exists.

        Raises ConfigError that names the file and the field at fault.
        """
        folder = Path(folder)
        fields = read_json(folder / "config.json")
        config = cls.from_fields(fields, where=str(folder / "config.json"))
        generation = folder / "generation_config.json"
        if not generation.exists():
            return config
        return replace(config, eos_token_ids=_Reader(read_json(generation), str(generation)).eos(config.eos_token_ids))

    @classmethod
    def from_fields(cls, fields: dict[str, Any], where: str = "config.json") -> "ModelConfig":
        """Build from the decoded config.json `fields`; `where` names their origin in errors (ConfigError)."""
        return _Reader(fields, where).model()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ConfigError if it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: a model folder needs it beside its *.safetensors files.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, expected a JSON object.")
    return value


class _Reader:
    """Turns the fields of one config.json into a ModelConfig and names each field that does not fit."""

    def __init__(self, fields: dict[str, Any], where: str):
        self.fields, self.where = fields, where

    def model(self) -> ModelConfig:
        architecture = self._architecture()
        self._refuse_unsupported()
        num_layers = self._positive("num_hidden_layers")
        num_dense = self._int("first_k_dense_replace", default=0)
        if not 0 <= num_dense <= num_layers:
            self._fail("first_k_dense_replace", f"is {num_dense}, outside 0..num_hidden_layers ({num_layers})")
        return ModelConfig(
            vocab_size=self._positive("vocab_size"),
            hidden_size=self._positive("hidden_size"),
            num_layers=num_layers,
            num_dense_layers=num_dense,
            dense_width=self._positive("intermediate_size"),
            norm_eps=self._number("rms_norm_eps", default=1e-6),
            max_position=self._positive("max_position_embeddings"),
            attention=self._attention(),
            moe=self._moe(is_v2=architecture == "DeepseekV2ForCausalLM"),
            num_mtp_layers=self._int("num_nextn_predict_layers", default=0),
            eos_token_ids=self.eos(()),
            fp8=self._fp8(),
        )

    def _architecture(self) -> str:
        names = self.fields.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            self._fail("architectures", "is missing; expected a list such as ['DeepseekV3ForCausalLM']")
        name = names[0]
        if name in RECOGNISED:
            self._fail("architectures", f"names {name}: {RECOGNISED[name]} is not supported by this version of dsjax")
        if name not in SUPPORTED:
            known = ", ".join(f"{arch} ({models})" for arch, models in SUPPORTED.items())
            self._fail("architectures", f"names {name!r}, which dsjax does not know; it runs {known}")
        return name

    def _refuse_unsupported(self) -> None:
        """Fields that all published models agree on, so that dsjax implements one value only."""
        only = {
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "moe_layer_freq": 1,
        }
        for name, value in only.items():
            if self.fields.get(name, value) != value:
                self._fail(name, f"is {self.fields[name]!r}; dsjax implements {value!r} only")

    def _fp8(self) -> Fp8Config | None:
        """DeepSeek's own quantisation; what transformers adds to it is which modules were left out."""
        fields = self._object("quantization_config")
        if not fields:
            return None
        required = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        defaults = {"fmt": "e4m3", "activation_scheme": "dynamic"}
        for name, value in (required | defaults).items():
            found = fields.get(name, defaults.get(name))
            if found != value:
                self._fail(f"quantization_config.{name}", f"is {found!r}; dsjax reads {value!r} only")
        excluded = fields.get("modules_to_not_convert") or []
        if not isinstance(excluded, list) or not all(isinstance(entry, str) and entry for entry in excluded):
            self._fail("quantization_config.modules_to_not_convert", f"is {excluded!r}, expected module names")
        return Fp8Config(tuple(excluded))

    def _attention(self) -> MLAConfig:
        heads = self._positive("num_attention_heads")
        kv_heads = self._int("num_key_value_heads", default=heads)
        if kv_heads != heads:
            self._fail(
                "num_key_value_heads",
                f"is {kv_heads} but num_attention_heads is {heads}; MLA needs them equal",
            )
        rank = self.fields.get("q_lora_rank")
        return MLAConfig(
            num_heads=heads,
            q_lora_rank=None if rank is None else self._positive("q_lora_rank"),
            kv_lora_rank=self._positive("kv_lora_rank"),
            qk_nope_head_dim=self._positive("qk_nope_head_dim"),
            qk_rope_head_dim=self._positive("qk_rope_head_dim"),
            v_head_dim=self._positive("v_head_dim"),
            rope=self._rope(),
        )

    def _rope(self) -> RopeConfig:
        """transformers 5 nests everything in rope_parameters; published files use rope_theta beside rope_scaling."""
        name = "rope_parameters" if self.fields.get("rope_parameters") else "rope_scaling"
        scaling = self._object(name)
        theta = scaling.get("rope_theta", self.fields.get("rope_theta"))
        if not _is_number(theta) or theta <= 1:
            self._fail("rope_theta", f"is {theta!r}, expected a number above 1")
        dim = self._positive("qk_rope_head_dim")
        if dim % 2:
            self._fail("qk_rope_head_dim", f"is {dim}, but rotary channels come in pairs")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "yarn"):
            self._fail(f"{name}.type", f"is {kind!r}; dsjax implements 'yarn' and 'default'")
        yarn = self._yarn(name, scaling) if kind == "yarn" else None
        return RopeConfig(dim, float(theta), bool(self.fields.get("rope_interleave", True)), yarn)

    def _yarn(self, name: str, scaling: dict[str, Any]) -> YarnConfig:
        names = {"factor": "factor", "original_max_position_embeddings": "original_max_position"}
        names |= {key: key for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
        values = {}
        for key, attribute in names.items():
            value, may_be_zero = scaling.get(key), key.startswith("mscale")
            if value is None and key in ("factor", "original_max_position_embeddings"):
                self._fail(f"{name}.{key}", "is missing, but rope type yarn needs it")
            if value is None:
                continue
            if not _is_number(value) or value < 0 or (value == 0 and not may_be_zero):
                self._fail(f"{name}.{key}", f"is {value!r}, expected a positive number")
            values[attribute] = value
        return YarnConfig(**values)

    def _moe(self, is_v2: bool) -> MoEConfig:
        expert_width = self._positive("moe_intermediate_size")
        shared = self._int("n_shared_experts", default=0)
        return MoEConfig(self._router(is_v2), expert_width, expert_width * shared)

    def _router(self, is_v2: bool) -> RouterConfig:
        method = self._choice("topk_method", ("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",))
        scoring = self._choice("scoring_func", ("softmax",) if is_v2 else ("sigmoid",))
        normalize = bool(self.fields.get("norm_topk_prob", not is_v2))
        if is_v2 and normalize:
            self._fail("norm_topk_prob", "is true, which no DeepSeek-V2 model defines; expected false")
        grouped = method != "greedy"
        router = RouterConfig(
            num_experts=self._positive("n_routed_experts"),
            experts_per_token=self._positive("num_experts_per_tok"),
            scoring=scoring,
            scaling_factor=self._number("routed_scaling_factor", default=1.0),
            normalize=normalize,
            has_bias=not is_v2,
            num_groups=self._int("n_group", default=1) if grouped else 1,
            groups_kept=self._int("topk_group", default=1) if grouped else 1,
            group_score="max" if is_v2 else "top2_sum",
        )
        self._check_groups(router)
        return router

    def _check_groups(self, router: RouterConfig) -> None:
        groups, kept, experts = router.num_groups, router.groups_kept, router.num_experts
        if groups < 1 or experts % groups:
            self._fail("n_group", f"is {groups}, which does not divide n_routed_experts ({experts})")
        if not 1 <= kept <= groups:
            self._fail("topk_group", f"is {kept}, outside 1..n_group ({groups})")
        if router.group_score == "top2_sum" and groups > 1 and experts // groups < 2:
            self._fail("n_group", f"is {groups}, which leaves fewer than two of {experts} experts in a group")
        reachable = experts // groups * kept
        if router.experts_per_token > reachable:
            self._fail("num_experts_per_tok", f"is {router.experts_per_token}, but only {reachable} can be chosen")

    def eos(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """The end-of-text ids, `default` if the file names none."""
        value = self.fields.get("eos_token_id")
        if value is None:
            return default
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            self._fail("eos_token_id", f"is {value!r}, expected a token id or a list of them")
        return tuple(ids)

    def _choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """transformers 5 leaves out what its class fixes, so a missing field means the first allowed value."""
        value = self.fields.get(name, allowed[0])
        if value not in allowed:
            self._fail(name, f"is {value!r}; {self.fields['architectures'][0]} allows {' or '.join(allowed)}")
        return value

    def _positive(self, name: str) -> int:
        value = self._int(name)
        if value < 1:
            self._fail(name, f"is {value}, expected at least 1")
        return value

    def _int(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self._fail(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            self._fail(name, f"is {value!r}, expected an integer")
        return value

    def _object(self, name: str) -> dict[str, Any]:
        """The object in field `name`, empty if the field is missing or null."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            self._fail(name, f"is {value!r}, expected an object or null")
        return value or {}

    def _number(self, name: str, default: float) -> float:
        value = self.fields.get(name)
        value = default if value is None else value
        if not _is_number(value) or value <= 0:
            self._fail(name, f"is {value!r}, expected a positive number")
        return float(value)

    def _fail(self, name: str, problem: str):
        raise ConfigError(f"{self.where}: {name} {problem}.")


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite number (JSON readers accept NaN and Infinity, and Python takes bools for ints)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
