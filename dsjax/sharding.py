"""The device mesh, and the tables that say how weights and activations are laid out on it.

One axis exists today, `tp` (tensor and expert parallel): attention heads, MLP width, experts and the vocabulary are
split over it; latent caches, norms and routers are replicated. Segments run under `jax.shard_map`, so layers see local
shards and call the collectives of TensorParallel themselves. With one device these are the identity.
"""

import re
from dataclasses import dataclass
from functools import reduce
from operator import add

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from dsjax.config import ModelConfig
from dsjax.errors import OptionError

TP = "tp"
REPLICATED = PartitionSpec()

# Path of a weight inside its piece -> its partition. The first match counts.
WEIGHT_PARTITIONS = [
    (r"experts_(gate_up|down)", PartitionSpec(TP)),
    (r"(.*\.)?(gate_up|down)\.weight", PartitionSpec(None, TP)),
    (r"(q_b|q_proj)\.weight", PartitionSpec(TP)),
    (r"(w_uk|w_uv)", PartitionSpec(TP)),
    (r"o_proj\.weight", PartitionSpec(None, TP)),
    (r"(embedding|lm_head\.weight)", PartitionSpec(TP)),
    (r"(qkv_a|kv_a|router)\.weight", REPLICATED),
    (r"(residual\.|.*_)?norm\.weight|router\.bias", REPLICATED),
]

# Values that travel between pieces, by name; what is not listed is replicated.
VALUE_PARTITIONS = {"q": PartitionSpec(None, TP), "o": PartitionSpec(None, TP)}


@dataclass(frozen=True)
class TensorParallel:
    """Collectives over the tp axis of the mesh, for use inside a segment. `size` is the number of devices.

    `in_order`: sums add in mesh order. Otherwise the order depends on an element's place, as in a ring of devices.
    """

    size: int = 1
    in_order: bool = False

    def sum(self, x: jax.Array) -> jax.Array:
        """Add up each device's partial `x`; every device gets the sum."""
        if self.size == 1:
            return x
        return reduce(add, lax.all_gather(x, TP)) if self.in_order else lax.psum(x, TP)

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """Join each device's `x` along `axis`, in mesh order."""
        return x if self.size == 1 else lax.all_gather(x, TP, axis=axis, tiled=True)

    def offset(self, local_size: int) -> jax.Array | int:
        """Global index of the first of the `local_size` items that this device holds."""
        return 0 if self.size == 1 else lax.axis_index(TP) * local_size

    def check(self, config: ModelConfig) -> None:
        """Raise OptionError if some dimension of the model cannot be split over `size` devices."""
        sizes = {
            "num_attention_heads": config.attention.num_heads,
            "intermediate_size": config.dense_width,
            "n_routed_experts": config.moe.router.num_experts,
            "moe_intermediate_size x n_shared_experts": config.moe.shared_width,
            "vocab_size": config.vocab_size,
        }
        wrong = [f"{name} ({size})" for name, size in sizes.items() if size % self.size]
        if wrong:
            raise OptionError(f"tp={self.size} does not divide {', '.join(wrong)} of this model; choose another tp.")


ONE_DEVICE = TensorParallel()


def make_mesh(tp: int) -> Mesh:
    """A mesh of the first `tp` devices. Raises OptionError if there are fewer."""
    devices = jax.devices()
    if not 1 <= tp <= len(devices):
        raise OptionError(
            f"tp={tp} needs {tp} devices, but JAX sees {len(devices)} ({devices[0].platform}). Choose tp up to "
            f"{len(devices)}, or check CUDA_VISIBLE_DEVICES."
        )
    return jax.make_mesh((tp,), (TP,), devices=devices[:tp], axis_types=(AxisType.Auto,))


def weight_partition(path: str) -> PartitionSpec:
    """Partition of the weight at `path` (such as "router.bias") inside its piece. KeyError if no rule covers it."""
    for pattern, partition in WEIGHT_PARTITIONS:
        if re.fullmatch(pattern, path):
            return partition
    raise KeyError(f"no partition rule in dsjax.sharding covers the weight {path!r}")


def value_partition(name: str) -> PartitionSpec:
    """Partition of the value `name` that pieces hand to each other."""
    return VALUE_PARTITIONS.get(name, REPLICATED)
