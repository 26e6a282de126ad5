"""What mistakes would change: each makes one in a golden model, and `effect` says how far its logits move."""

import copy

import numpy as np
import torch


def routers(model):
    """The routers of the MoE layers, in order."""
    mlps = [layer.mlp for layer in model.model.layers]
    return [mlp.gate for mlp in mlps if hasattr(mlp, "gate")]


def router_biases(model):
    """The e_score_correction_bias buffers, in order; none for V2."""
    return [gate.e_score_correction_bias for gate in routers(model) if hasattr(gate, "e_score_correction_bias")]


@torch.no_grad()
def full_logits(model, tokens):
    """Logits [len(tokens), vocab] of one uncached pass."""
    return model(torch.tensor(tokens)[None].long(), use_cache=False).logits[0]


def plain_frequencies(model):
    """RoPE frequencies without YaRN; the softmax scale keeps its factor."""
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.compute_default_rope_parameters(model.config)[0]


def plain_scale(model):
    """Softmax scale without YaRN's mscale^2."""
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5


def no_yarn(model):
    """Neither YaRN's frequencies nor its softmax scale."""
    plain_frequencies(model)
    plain_scale(model)


def set_eps(model, latent, eps):
    """Set eps of the q_a/kv_a norms (``latent``) or of all the other norms."""
    for name, module in model.named_modules():
        if hasattr(module, "variance_epsilon") and ("_a_layernorm" in name) == latent:
            module.variance_epsilon = eps


def latent_eps(model):
    """eps 1e-5 in q_a_layernorm and kv_a_layernorm instead of 1e-6."""
    set_eps(model, True, 1e-5)


def main_eps(model):
    """The other norms' eps changed tenfold: 1e-6 to 1e-5, or back for moonlight."""
    set_eps(model, False, 1e-5 if model.config.rms_norm_eps == 1e-6 else 1e-6)


def zero_bias(model):
    """e_score_correction_bias left out."""
    for bias in router_biases(model):
        bias.zero_()


def no_routed_scaling(model):
    """routed_scaling_factor left out."""
    for gate in routers(model):
        gate.routed_scaling_factor = 1.0


def double_precision(model):
    """No mistake: the same model in float64, for the float32 noise floor."""
    model.double()


def mistakes(case):
    """The changes that apply to a case."""
    changes = [double_precision, latent_eps, main_eps]
    if case.kwargs["rope_parameters"]["rope_type"] == "yarn":
        changes += [no_yarn, plain_frequencies, plain_scale]
    if case.family == "v3":
        changes += [zero_bias]
    if case.kwargs["routed_scaling_factor"] != 1.0:
        changes += [no_routed_scaling]
    return changes


def effect(model, change, arrays):
    """Largest logit difference a change makes, relative to the largest logit."""
    changed = copy.deepcopy(model)
    change(changed)
    logits = full_logits(changed, arrays["tokens"]).numpy()
    largest = np.abs(arrays["logits"]).max()
    return float(np.abs(logits - arrays["logits"]).max() / largest)
