"""Where each model weight comes from: checkpoint names, shapes and arrangement of DeepSeek-V2 and V3 files.

`weight_sources` is the table. A weight is rows of one or more checkpoint tensors in an order of its own: what shares an
input is joined (gate|up, q_a|kv_a), per-expert matrices are stacked, kv_b is split into its key and value halves, and
interleaved rope rows are permuted to half-split. Arrangements are functions of row numbers, so that they serve reading,
splitting over devices and the scales of FP8 weights alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dsjax.config import MLAConfig, ModelConfig
from dsjax.errors import ConfigError
from dsjax.quantization import LARGEST_BLOCK
from dsjax.rope import half_split_order

Shape = tuple[int, ...]
# Names of the dtypes that checkpoints store weights, quantised weights and their scales in.
PLAIN, VALUES, SCALES = ("bfloat16", "float32"), ("float8_e4m3fn",), ("float32",)
PROJECTIONS = ("_proj", "_proj_with_mqa")


class Tensor(NamedTuple):
    """A tensor that a checkpoint must hold: its shape, and the names of the dtypes that it may have."""

    shape: Shape
    dtypes: tuple[str, ...]


def _only(rows: list[np.ndarray]) -> np.ndarray:
    return rows[0]


@dataclass(frozen=True)
class Source:
    """Checkpoint tensors by name and shape, and the order in which their rows make one model weight.

    `arrange` takes the row numbers of each tensor, counted over all of them, and returns those of the weight: integers
    in the weight's shape without its last axis. A tensor of one axis has rows of one number. `quantized`: the tensors
    are FP8, each with scales.
    """

    tensors: tuple[tuple[str, Shape], ...]
    arrange: Callable[[list[np.ndarray]], np.ndarray] = _only
    quantized: bool = False

    @property
    def scales(self) -> tuple[tuple[str, Shape], ...]:
        """Names and shapes of the tensors' scales: one per 128 x 128 block, the last ones partial."""
        return tuple(
            (f"{name}_scale_inv", tuple(-(-size // LARGEST_BLOCK) for size in shape)) for name, shape in self.tensors
        )

    def rows(self) -> np.ndarray:
        """For each row of the weight, which row of the tensors it is, counted over all of them."""
        return self._arranged([np.arange(shape[0]) for _, shape in self.tensors])

    def scale_rows(self) -> np.ndarray:
        """For each row of the weight, which row of the `scales` it has, counted over all of them."""
        return self._arranged([np.arange(shape[0]) // LARGEST_BLOCK for _, shape in self.tensors])

    def _arranged(self, numbers: list[np.ndarray]) -> np.ndarray:
        """Arrange `numbers`, which count from 0 in each tensor, counted on from tensor to tensor."""
        starts = accumulate((int(one[-1]) + 1 for one in numbers[:-1]), initial=0)
        return self.arrange([one + start for one, start in zip(numbers, starts, strict=True)])


def weight_sources(config: ModelConfig) -> dict[str, Source]:
    """Source of every weight, keyed by its path in the model, such as "layers.3.attn_in.q_b.weight".

    Raises ConfigError if the config quantises only some of the tensors that make one weight.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size
    sources = {
        "embed.embedding": Source((("model.embed_tokens.weight", (vocabulary, hidden)),)),
        "head.norm.weight": Source((("model.norm.weight", (hidden,)),)),
        "head.lm_head.weight": Source((("lm_head.weight", (vocabulary, hidden)),)),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        ffn = _dense(config, prefix) if index < config.num_dense_layers else _moe(config, prefix)
        layer = _norms(config, prefix) | _attention(config, prefix + "self_attn.") | ffn
        sources |= {f"layers.{index}.{path}": _quantized(config, source) for path, source in layer.items()}
    return sources


def checkpoint_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor that a complete checkpoint holds, by name."""
    tensors = {}
    for source in weight_sources(config).values():
        dtypes = VALUES if source.quantized else PLAIN
        tensors |= {name: Tensor(shape, dtypes) for name, shape in source.tensors}
        if source.quantized:
            tensors |= {name: Tensor(shape, SCALES) for name, shape in source.scales}
    return tensors


def is_ignored(config: ModelConfig, name: str) -> bool:
    """Tensors that checkpoints may carry and the model does not use: MTP layers, stored rotary tables."""
    mtp = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return name.endswith("rotary_emb.inv_freq") or any(name.startswith(f"model.layers.{i}.") for i in mtp)


def _quantized(config: ModelConfig, source: Source) -> Source:
    """`source` as this checkpoint stores it: if FP8, all projections are, which routers and norms are not."""
    if config.fp8 is None:
        return source
    modules = [name.removesuffix(".weight") for name, _ in source.tensors]
    are_quantized = {module.endswith(PROJECTIONS) and config.fp8.covers(module) for module in modules}
    if len(are_quantized) > 1:
        raise ConfigError(
            f"quantization_config.modules_to_not_convert names some, but not all, of {modules[0]}, {modules[1]} ..., "
            "which dsjax joins into one weight; name all or none."
        )
    return replace(source, quantized=are_quantized.pop())


def _norms(config: ModelConfig, prefix: str) -> dict[str, Source]:
    shape = (config.hidden_size,)
    return {
        "attn_in.residual.norm.weight": Source(((f"{prefix}input_layernorm.weight", shape),)),
        "attn_out.residual.norm.weight": Source(((f"{prefix}post_attention_layernorm.weight", shape),)),
    }


def _attention(config: ModelConfig, prefix: str) -> dict[str, Source]:
    mla, hidden = config.attention, config.hidden_size
    kv_a = (f"{prefix}kv_a_proj_with_mqa.weight", (mla.latent_width, hidden))
    per_head = mla.qk_nope_head_dim + mla.v_head_dim
    kv_b = (f"{prefix}kv_b_proj.weight", (mla.num_heads * per_head, mla.kv_lora_rank))
    keys, values = slice(0, mla.qk_nope_head_dim), slice(mla.qk_nope_head_dim, None)
    return _queries(config, prefix, kv_a) | {
        "attn_in.kv_a_norm.weight": Source(((f"{prefix}kv_a_layernorm.weight", (mla.kv_lora_rank,)),)),
        "attention.w_uk": Source((kv_b,), partial(_head_rows, mla, keys)),
        "attention.w_uv": Source((kv_b,), partial(_head_rows, mla, values)),
        "attn_out.o_proj.weight": Source(((f"{prefix}o_proj.weight", (hidden, mla.num_heads * mla.v_head_dim)),)),
    }


def _queries(config: ModelConfig, prefix: str, kv_a: tuple[str, Shape]) -> dict[str, Source]:
    mla, hidden, rank = config.attention, config.hidden_size, config.attention.q_lora_rank
    rows = mla.num_heads * mla.qk_head_dim
    if rank is None:
        return {
            "attn_in.q_proj.weight": Source(((f"{prefix}q_proj.weight", (rows, hidden)),), partial(_query_rows, mla)),
            "attn_in.kv_a.weight": Source((kv_a,), partial(_latent_rows, mla)),
        }
    q_a = (f"{prefix}q_a_proj.weight", (rank, hidden))
    return {
        "attn_in.qkv_a.weight": Source((q_a, kv_a), partial(_joined_latent_rows, mla)),
        "attn_in.q_a_norm.weight": Source(((f"{prefix}q_a_layernorm.weight", (rank,)),)),
        "attn_in.q_b.weight": Source(((f"{prefix}q_b_proj.weight", (rows, rank)),), partial(_query_rows, mla)),
    }


def _dense(config: ModelConfig, prefix: str) -> dict[str, Source]:
    return _swiglu("ffn.mlp.", f"{prefix}mlp.", config.dense_width, config.hidden_size)


def _moe(config: ModelConfig, prefix: str) -> dict[str, Source]:
    hidden, moe, router = config.hidden_size, config.moe, config.moe.router
    gate = f"{prefix}mlp.gate."
    experts = [f"{prefix}mlp.experts.{expert}." for expert in range(router.num_experts)]
    into, out = (moe.expert_width, hidden), (hidden, moe.expert_width)
    gate_up = tuple((f"{expert}{name}_proj.weight", into) for expert in experts for name in ("gate", "up"))
    down = tuple((f"{expert}down_proj.weight", out) for expert in experts)
    sources = {
        "attn_out.router.weight": Source(((f"{gate}weight", (router.num_experts, hidden)),)),
        "ffn.experts_gate_up": Source(gate_up, _stack_pairs),
        "ffn.experts_down": Source(down, _stack),
    }
    if router.has_bias:
        sources["attn_out.router.bias"] = Source(((f"{gate}e_score_correction_bias", (router.num_experts,)),))
    if moe.shared_width:
        sources |= _swiglu("ffn.shared.", f"{prefix}mlp.shared_experts.", moe.shared_width, hidden)
    return sources


def _swiglu(path: str, prefix: str, width: int, hidden: int) -> dict[str, Source]:
    gate_up = tuple((f"{prefix}{name}_proj.weight", (width, hidden)) for name in ("gate", "up"))
    return {
        f"{path}gate_up.weight": Source(gate_up, _stack),
        f"{path}down.weight": Source(((f"{prefix}down_proj.weight", (hidden, width)),)),
    }


def _stack(rows: list[np.ndarray]) -> np.ndarray:
    return np.stack(rows)


def _stack_pairs(rows: list[np.ndarray]) -> np.ndarray:
    """[E, 2, rows] from the rows of expert 0, 0, 1, 1, ..."""
    return np.stack(rows).reshape(-1, 2, len(rows[0]))


def _query_rows(mla: MLAConfig, rows: list[np.ndarray]) -> np.ndarray:
    """Rows of each head as [nope | rope half-split]."""
    heads = rows[0].reshape(mla.num_heads, mla.qk_head_dim)
    return heads[:, _rope_last(mla, mla.qk_nope_head_dim)].reshape(-1)


def _latent_rows(mla: MLAConfig, rows: list[np.ndarray]) -> np.ndarray:
    """Rows as [latent | rope key half-split]."""
    return rows[0][_rope_last(mla, mla.kv_lora_rank)]


def _joined_latent_rows(mla: MLAConfig, rows: list[np.ndarray]) -> np.ndarray:
    """Rows as [query latent | latent | rope key half-split]."""
    q_a, kv_a = rows
    return np.concatenate([q_a, _latent_rows(mla, [kv_a])])


def _head_rows(mla: MLAConfig, part: slice, rows: list[np.ndarray]) -> np.ndarray:
    """The key or value rows of each head: [H, rows]."""
    return rows[0].reshape(mla.num_heads, -1)[:, part]


def _rope_last(mla: MLAConfig, before: int) -> np.ndarray:
    """Order that leaves `before` channels alone and makes the rope channels behind them half-split."""
    dim = mla.qk_rope_head_dim
    rope = half_split_order(dim) if mla.rope.interleaved else np.arange(dim)
    return np.concatenate([np.arange(before), before + rope])
