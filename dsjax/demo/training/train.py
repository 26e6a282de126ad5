"""Trains the demo model with dsjax's own Flax model and writes its checkpoint.

    python -m dsjax.demo.training.data SDIST --out tokens.npz        # token streams, see dsjax.demo.training.data
    python -m dsjax.demo.training.train tokens.npz --out dsjax/demo/checkpoint

Takes a few minutes on one H200. Parameters are trained under their checkpoint names (float32) and arranged into model
weights inside the training step, so saving them is all it takes to make a checkpoint.
Needs optax: `pip install -e .[training]`.
"""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from jax import lax

from dsjax.activation import swiglu
from dsjax.checkpoint.names import checkpoint_tensors, weight_sources
from dsjax.checkpoint.safetensors import write_file
from dsjax.config import ModelConfig
from dsjax.layers.mla import ROPE, MLAAttention
from dsjax.model import Model, abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.rope import cos_sin
from dsjax.segments import weight_leaves

BIAS = "e_score_correction_bias"
BIAS_STEP = 0.002  # how far a step moves the router's correction towards an even load (DeepSeek-V3 paper, 2.1.2)

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 4096,
    "hidden_size": 160,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 384,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "rope_theta": 10000,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


class TrainState(NamedTuple):
    """Parameters by checkpoint name (float32), the optimiser's state, and the step."""

    params: dict[str, jax.Array]
    optimizer: Any
    step: jax.Array


def dense_experts(x: jax.Array, gate_up: jax.Array, down: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """The experts operation computed for all experts and tokens: wasteful, and differentiable."""
    both = jnp.einsum("td,egid->tegi", x, gate_up)
    out = jnp.einsum("tei,edi->ted", swiglu(both[:, :, 0], both[:, :, 1]), down)
    chosen = jax.nn.one_hot(ids, gate_up.shape[0], dtype=weights.dtype) * weights[..., None]
    return jnp.einsum("ted,tke->td", out, chosen)


def causal_attention(attention: MLAAttention, q: jax.Array, latent: jax.Array, batch: int) -> jax.Array:
    """MLA in per-head form over whole sequences, without a cache: q [B*S, H, N + R], latent [B*S, C + R] -> o."""
    mla = attention.mla
    compressed, k_rope = jnp.split(latent, [mla.kv_lora_rank], axis=-1)
    keys = jnp.einsum("tc,hnc->thn", compressed, attention.w_uk[...])
    values = jnp.einsum("tc,hvc->thv", compressed, attention.w_uv[...])
    k_rope = jnp.broadcast_to(k_rope[:, None], (*keys.shape[:2], k_rope.shape[-1]))
    keys = jnp.concatenate([keys, k_rope], axis=-1)
    q, keys, values = (a.reshape(batch, -1, *a.shape[1:]) for a in (q, keys, values))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys) * mla.softmax_scale
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
    o = jnp.einsum("bhqk,bkhv->bqhv", jax.nn.softmax(scores), values)
    return o.reshape(-1, *o.shape[2:])


def bind(model: Model, params: dict[str, jax.Array]) -> dict[str, Any]:
    """The pieces of `model`, by path, holding `params`."""
    sources = weight_sources(model.config)
    pieces = {}
    for path, piece in model.pieces():
        graph, state = nnx.split(piece)
        chosen = [sources[f"{path}.{name}"] for name, _ in weight_leaves(state)]
        leaves = [jnp.concatenate([params[name] for name, _ in one.tensors])[one.rows()] for one in chosen]
        pieces[path] = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))
    return pieces


def forward(model: Model, params: dict, tokens: jax.Array, drop) -> tuple[jax.Array, list[jax.Array]]:
    """tokens int32 [B, S] -> logits [B * S, V] and, per MoE layer, how many tokens chose each expert [E]."""
    batch, length = tokens.shape
    pieces, config = bind(model, params), model.config
    inputs = SimpleNamespace(token_ids=tokens.reshape(-1), valid=jnp.ones(tokens.size, bool))
    cos, sin = cos_sin(dict(model.ropes)[ROPE], jnp.tile(jnp.arange(length), batch))
    x, loads = drop(pieces["embed"](inputs)[0]), []
    for index in range(config.num_layers):
        layer = {name: pieces[f"layers.{index}.{name}"] for name in model.layers[index].PIECES}
        h, mix = layer["attn_in"].residual.enter(x)
        q, latent = layer["attn_in"].project(h, cos, sin)
        o = causal_attention(layer["attention"], q, latent, batch)
        after, *ffn_inputs = layer["attn_out"](x, drop(o), mix, inputs)
        if len(ffn_inputs) > 2:
            loads.append(jnp.bincount(ffn_inputs[2].reshape(-1), length=config.moe.router.num_experts))
        (with_ffn,) = layer["ffn"](after, *ffn_inputs)
        x = after + drop(with_ffn - after)
    return pieces["head"](x)[0], loads


def loss(model: Model, dropout: float, params: dict, tokens: jax.Array, key: jax.Array):
    """Mean next-token loss in nats over tokens int32 [B, S + 1], and the expert loads."""
    keys = iter(jax.random.split(key, 2 * model.config.num_layers + 1))

    def drop(x: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(next(keys), 1 - dropout, x.shape)
        return jnp.where(kept, x / (1 - dropout), 0)

    logits, loads = forward(model, params, tokens[:, :-1], drop)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].reshape(-1))
    return losses.mean(), loads


def init_params(config: ModelConfig, key: jax.Array) -> dict[str, jax.Array]:
    """Normal weights of standard deviation 0.02 (projections into the residual stream smaller), unit norms."""

    def init(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        if len(shape) == 1:
            return jnp.zeros(shape) if name.endswith(BIAS) else jnp.ones(shape)
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return jax.random.normal(key, shape) * 0.02 / ((2 * config.num_layers) ** 0.5 if into_residual else 1)

    tensors = checkpoint_tensors(config)
    keys = jax.random.split(key, len(tensors))
    return {name: init(name, tensor.shape, key) for (name, tensor), key in zip(tensors.items(), keys, strict=True)}


def make_optimizer(steps: int, peak: float) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 20, steps, peak / 50)
    decayed = partial(jax.tree.map, lambda p: p.ndim > 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1, mask=decayed))


def balance(params: dict, loads: list[jax.Array], config: ModelConfig) -> dict:
    """Move each router's correction bias against its experts' load."""
    names = [f"model.layers.{i}.mlp.gate.{BIAS}" for i in range(config.num_dense_layers, config.num_layers)]
    moved = {n: params[n] + BIAS_STEP * jnp.sign(load.mean() - load) for n, load in zip(names, loads, strict=True)}
    return params | moved


def train(model: Model, stream: np.ndarray, args: argparse.Namespace) -> dict[str, jax.Array]:
    """Train on random windows of `stream`; all steps between two log lines are one compiled loop."""
    optimizer = make_optimizer(args.steps, args.learning_rate)
    data = jnp.asarray(stream.astype(np.int32))
    grad = jax.value_and_grad(partial(loss, model, args.dropout), has_aux=True)

    def step(state: TrainState, _):
        window_key, drop_key = jax.random.split(jax.random.fold_in(jax.random.key(1), state.step))
        starts = jax.random.randint(window_key, (args.batch,), 0, len(data) - args.length)
        tokens = jax.vmap(lambda start: lax.dynamic_slice(data, (start,), (args.length + 1,)))(starts)
        (value, loads), gradient = grad(state.params, tokens, drop_key)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        params = balance(params, loads, model.config)
        return TrainState(params, optimizer_state, state.step + 1), (value, loads[0].max() / loads[0].mean())

    params = init_params(model.config, jax.random.key(0))
    state = TrainState(params, optimizer.init(params), jnp.int32(0))
    run = jax.jit(lambda state: lax.scan(step, state, length=args.log_every), donate_argnums=0)
    begin = time.perf_counter()
    for done in range(args.log_every, args.steps + 1, args.log_every):
        state, (losses, imbalance) = run(state)
        line = f"step {done}: loss {losses.mean():.3f} nats, fullest expert {imbalance.mean():.2f} x mean"
        print(f"{line}, {time.perf_counter() - begin:.0f} s", flush=True)
    return state.params


def bits_per_byte(model: Model, params: dict, heldout: np.ndarray, num_bytes: int, length: int) -> float:
    """Loss on held-out text, in windows of `length` tokens, per byte of the text."""
    windows = np.resize(heldout[:-1], (-(-len(heldout) // length), length))
    targets = np.resize(heldout[1:], windows.shape)
    real = np.arange(windows.size).reshape(windows.shape) < len(heldout) - 1

    @jax.jit
    def nats(tokens, labels, real):
        logits, _ = forward(model, params, tokens[None], lambda x: x)
        return jnp.sum(jnp.where(real, optax.softmax_cross_entropy_with_integer_labels(logits, labels), 0))

    total = sum(
        float(nats(*map(jnp.asarray, row)))
        for row in zip(windows.astype(np.int32), targets.astype(np.int32), real, strict=True)
    )
    return total / np.log(2) / num_bytes


def save(params: dict[str, jax.Array], folder: Path) -> dict[str, np.ndarray]:
    """Write model.safetensors (bf16, router biases float32) and config.json; returns what was saved."""
    saved = {
        name: np.asarray(value, np.float32 if name.endswith(BIAS) else ml_dtypes.bfloat16)
        for name, value in params.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "model.safetensors", saved)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    return saved


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("tokens", type=Path, help="token streams made by dsjax.demo.training.data")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--log-every", type=int, default=200)
    args = parser.parse_args()
    data = np.load(args.tokens)
    ops = replace(Ops.references(), experts=dense_experts)
    model = abstract_model(ModelConfig.from_fields(CONFIG), jnp.float32, ops)
    saved = save(train(model, data["train"], args), args.out)
    rounded = {name: jnp.asarray(value, jnp.float32) for name, value in saved.items()}
    result = bits_per_byte(model, rounded, data["heldout"], int(data["heldout_bytes"]), args.length)
    print(f"{sum(v.nbytes for v in saved.values()) / 1e6:.2f} MB, held-out loss {result:.3f} bits per byte")


if __name__ == "__main__":
    main()
