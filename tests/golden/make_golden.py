"""Make the golden checkpoints and outputs that dsjax's tests compare with.

Re-run (from the repository root; overwrites the four case folders beside this
file and prints the tables of README.md):

    python tests/golden/make_golden.py [CASE ...]

Written with python 3.11, torch 2.13.0+cpu, transformers 5.24.0, numpy 2.4.6 and
safetensors 0.8.0. The tests need none of these, only the files.

Each case is a tiny random model of the transformers class, computed in float32
with eager attention from weights that bfloat16 holds exactly. Its folder has:

``config.json``
    v2 and v3: the keys of a published config (rope_scaling, torch_dtype,
    scoring_func, ...). v2_lite and moonlight: what transformers 5 writes.
``model.safetensors``
    The weights under their published names, BF16, the router bias F32.
``golden.npz``
    tokens int32 [150], logits float32 [150, 256] for every position, and for
    i = 0, 1, 2 prompt_i int32 [5 | 37 | 100] with greedy_i int32 [64], its
    greedy continuation (eos does not stop it). bf16_error float32: relative error
    (Frobenius norm) of the same logits when transformers runs in bfloat16.
"""

import copy
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from mistakes import effect, full_logits, mistakes, router_biases, routers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).resolve().parent
NUM_TOKENS = 150
PROMPT_LENGTHS = (5, 37, 100)
GREEDY_STEPS = 64
MIN_MARGIN = 1e-2  # top-1 minus top-2 logit, at every greedy step
MIN_ROUTING_GAP = 1e-4  # last chosen minus first rejected score, at every token
MIN_DISTINCT = 12  # different tokens in a continuation: no bare loop
LATENT_SCALE = 0.25  # keeps latents small enough for a wrong eps to show

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 2560,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,
}


def yarn(mscale):
    """YaRN parameters with a 64-token original context, so short inputs show it."""
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """One model: its family ("v2" or "v3"), config kwargs and weight seed.

    ``published`` holds the extra keys of a config.json in the published style;
    None leaves the file as transformers writes it.
    """

    family: str
    seed: int
    kwargs: dict
    published: dict | None = None

    def build(self):
        """A freshly initialised float32 model."""
        family = f"Deepseek{self.family.upper()}"
        config = getattr(transformers, f"{family}Config")(
            **SHAPE,
            **self.kwargs,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        torch.manual_seed(self.seed)
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()


V2_LITE = {
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "rope_parameters": yarn(0.707),
}
V2 = V2_LITE | {
    "routed_scaling_factor": 16.0,
    "q_lora_rank": 24,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
}
V3 = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 24,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "rope_parameters": yarn(1.0),
    "num_nextn_predict_layers": 1,
}
MOONLIGHT = V3 | {
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.446,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "num_nextn_predict_layers": 0,
}

CASES = {
    "v2_lite": Case("v2", 0, V2_LITE),
    "v2": Case("v2", 1, V2, {"scoring_func": "softmax", "seq_aux": True}),
    "v3": Case("v3", 2, V3, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}),
    "moonlight": Case("v3", 3, MOONLIGHT),
}


# ---- the model ----------------------------------------------------------------


def make_model(case):
    """Build a case's model and make every weight matter, exactly in bfloat16."""
    model = case.build()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
        for layer in model.model.layers:
            shrink_latents(layer.self_attn)
        for bias in router_biases(model):
            bias.copy_(0.1 * torch.randn_like(bias))
        for weight in itertools.chain(model.parameters(), router_biases(model)):
            weight.copy_(weight.to(torch.bfloat16))
    return model


def shrink_latents(attention):
    """Scale the rows that feed q_a_layernorm and kv_a_layernorm."""
    attention.kv_a_proj_with_mqa.weight[: attention.kv_lora_rank] *= LATENT_SCALE
    if attention.q_a_proj is not None:
        attention.q_a_proj.weight *= LATENT_SCALE


@torch.no_grad()
def greedy(model, prompt, use_cache):
    """Greedy continuation [GREEDY_STEPS] and its smallest top-1/top-2 margin."""
    sequence = torch.tensor(prompt)[None].long()
    cache = transformers.DynamicCache(config=model.config) if use_cache else None
    margins = []
    pending = sequence
    for _ in range(GREEDY_STEPS):
        logits = model(pending, cache=cache, use_cache=use_cache).logits[0, -1]
        top = logits.topk(2)
        margins.append(float(top.values[0] - top.values[1]))
        new = top.indices[:1][None]
        sequence = torch.cat([sequence, new], dim=1)
        pending = new if use_cache else sequence
    return sequence[0, len(prompt) :].numpy().astype(np.int32), min(margins)


def routing_gap(model, tokens):
    """Smallest distance of any router decision over ``tokens`` from a tie."""
    gaps = []

    def record(gate, _, output):
        gaps.append(decision_gap(gate, output[0]))

    handles = [gate.register_forward_hook(record) for gate in routers(model)]
    full_logits(model, tokens)
    for handle in handles:
        handle.remove()
    return min(gaps)


def decision_gap(gate, router_logits):
    """Smallest gap of one router call, in the scores that choose groups and experts."""
    if hasattr(gate, "e_score_correction_bias"):
        scores = router_logits.sigmoid() + gate.e_score_correction_bias
        members_scored = 2  # a group's score is the sum of its two best
        grouped = True
    else:
        scores = router_logits.softmax(-1)
        members_scored = 1  # a group's score is its best
        grouped = gate.topk_method == "group_limited_greedy"
    gap = float("inf")
    if grouped and gate.topk_group < gate.num_group:
        groups = scores.view(len(scores), gate.num_group, -1)
        group_scores = groups.topk(members_scored).values.sum(-1)
        ranked = group_scores.sort(descending=True)
        gap = cut_gap(ranked.values, gate.topk_group)
        kept = ranked.indices[:, : gate.topk_group, None]
        scores = groups.gather(1, kept.expand(-1, -1, groups.shape[-1])).flatten(1)
    return min(gap, cut_gap(scores.sort(descending=True).values, gate.top_k))


def cut_gap(ranked, count):
    """Smallest difference between the last kept and the first dropped value."""
    return float((ranked[:, count - 1] - ranked[:, count]).min())


# ---- the golden outputs -------------------------------------------------------


def random_ids(seed, length):
    """Token ids in [2, 256): neither bos nor eos."""
    return np.random.default_rng(seed).integers(2, 256, length, dtype=np.int32)


def pick_tokens(model, first_seed):
    """The first 150 tokens, by seed, whose routing is clear of ties."""
    for seed in itertools.count(first_seed):
        tokens = random_ids(seed, NUM_TOKENS)
        gap = routing_gap(model, tokens)
        if gap > MIN_ROUTING_GAP:
            return tokens, {"seed": seed, "routing_gap": gap}


def pick_prompt(model, length, first_seed):
    """The first prompt, by seed, whose continuation is clear of ties and loops."""
    for seed in itertools.count(first_seed):
        prompt = random_ids(seed, length)
        new, margin = greedy(model, prompt, use_cache=True)
        if margin <= MIN_MARGIN or len(set(new)) < MIN_DISTINCT:
            continue
        gap = routing_gap(model, np.concatenate([prompt, new]))
        if gap <= MIN_ROUTING_GAP:
            continue
        recomputed, recomputed_margin = greedy(model, prompt, use_cache=False)
        if not np.array_equal(new, recomputed):
            raise AssertionError(f"cached and recomputed tokens differ, seed {seed}")
        facts = {
            "seed": seed,
            "margin": min(margin, recomputed_margin),
            "routing_gap": gap,
            "distinct": len(set(new)),
        }
        return prompt, new, facts


def make_golden(model, case):
    """The arrays of golden.npz, and how far each input is from a near-tie."""
    tokens, facts = pick_tokens(model, 1000 * case.seed)
    arrays = {"tokens": tokens, "logits": full_logits(model, tokens).numpy()}
    all_facts = [facts]
    for i, length in enumerate(PROMPT_LENGTHS):
        first_seed = 1000 * case.seed + 200 * (i + 1)
        prompt, new, facts = pick_prompt(model, length, first_seed)
        arrays |= {f"prompt_{i}": prompt, f"greedy_{i}": new}
        all_facts.append(facts)
    return arrays, all_facts


# ---- the checkpoint -----------------------------------------------------------


def published_config(case, written):
    """config.json in the style of the published files, for a YaRN model."""
    rope = dict(case.kwargs["rope_parameters"])
    theta = rope.pop("rope_theta")
    scaling = {"type": rope.pop("rope_type")}
    for key, value in rope.items():
        scaling[key] = value if key.startswith("mscale") else int(value)
    kept = {k: v for k, v in case.kwargs.items() if k != "rope_parameters"}
    common = {
        key: written[key]
        for key in (
            "architectures",
            "model_type",
            "attention_bias",
            "attention_dropout",
            "hidden_act",
            "rms_norm_eps",
            "tie_word_embeddings",
        )
    }
    rest = {
        "moe_layer_freq": 1,
        "rope_scaling": scaling,
        "rope_theta": int(theta),
        "torch_dtype": "bfloat16",
    }
    return common | SHAPE | kept | case.published | rest


def save_checkpoint(model, case, folder):
    """Write config.json and model.safetensors under the published names."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(scratch)
        tensors = load_file(scratch / "model.safetensors")
        shutil.copy(scratch / "config.json", folder / "config.json")
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensors[name].float()
    if "model.layers.1.mlp.experts.7.gate_proj.weight" not in tensors:
        raise AssertionError("the experts were saved fused")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if case.published is not None:
        path = folder / "config.json"
        config = published_config(case, json.loads(path.read_text()))
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def reloaded_logits(folder, tokens, dtype):
    """Logits of the saved folder, loaded as a user would, in ``dtype``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return full_logits(model, tokens).float().numpy()


def check_checkpoint(folder, arrays):
    """The saved folder must give the golden logits."""
    logits = reloaded_logits(folder, arrays["tokens"], torch.float32)
    if not np.array_equal(logits, arrays["logits"]):
        raise AssertionError(f"{folder}: the saved checkpoint gives other logits")


def bf16_error(folder, arrays):
    """Relative error (Frobenius norm) of transformers' own bfloat16 run."""
    logits = reloaded_logits(folder, arrays["tokens"], torch.bfloat16)
    return np.float32(np.linalg.norm(logits - arrays["logits"]) / np.linalg.norm(arrays["logits"]))


def report(name, case, model, arrays, facts):
    """Print a case's figures."""
    largest = np.abs(arrays["logits"]).max()
    print(f"{name}: weight seed {case.seed}, largest logit {largest:.3f}")
    for label, fact in zip(("tokens", "prompt_0", "prompt_1", "prompt_2"), facts, strict=False):
        print(f"  {label}: " + ", ".join(f"{k} {v:.4g}" for k, v in fact.items()))
    for mistake in mistakes(case):
        print(f"  {mistake.__name__}: {effect(model, mistake, arrays):.1e}")


def main(names):
    """Make the named cases, or all."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in names or CASES:
        case = CASES[name]
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        model = make_model(case)
        arrays, facts = make_golden(model, case)
        save_checkpoint(model, case, folder)
        check_checkpoint(folder, arrays)
        arrays["bf16_error"] = bf16_error(folder, arrays)
        np.savez_compressed(folder / "golden.npz", **arrays)
        report(name, case, model, arrays, facts)


if __name__ == "__main__":
    main(sys.argv[1:])
