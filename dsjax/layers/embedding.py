"""The two ends of the model: token embedding and language-model head, both split over the vocabulary."""

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.config import ModelConfig
from dsjax.layers.linear import Linear, contract_last, param
from dsjax.layers.norm import RMSNorm
from dsjax.sharding import TensorParallel
from dsjax.step.inputs import StepInputs


class Embedding(nnx.Module):
    """Token ids [T] -> residual stream x [T, D]; zero rows for pad tokens."""

    gives = ("x",)

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, tp: TensorParallel):
        self.embedding = param((config.vocab_size, config.hidden_size), dtype)
        self.tp = tp

    def __call__(self, inputs: StepInputs):
        table = self.embedding[...]
        local = inputs.token_ids - self.tp.offset(table.shape[0])
        here = inputs.valid & (local >= 0) & (local < table.shape[0])
        rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
        return (self.tp.sum(jnp.where(here[:, None], rows, 0)),)


class Head(nnx.Module):
    """Final norm and output matrix: last_hidden [R, D] -> logits float32 [R, V]."""

    gives = ("logits",)

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, tp: TensorParallel):
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, dtype)
        self.tp = tp

    def __call__(self, last_hidden: jax.Array):
        logits = contract_last(self.norm(last_hidden), self.lm_head.weight[...], jnp.float32)
        return (self.tp.gather(logits, axis=1),)
