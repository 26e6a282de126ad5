"""Reading config.json: published files, both spellings of the rotary fields, and errors that name the field."""

import json

import pytest

from dsjax.config import Fp8Config, ModelConfig
from dsjax.errors import ConfigError
from dsjax.published import FOLDER, MODELS, published

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def published_fields(name: str = "v3") -> dict:
    return json.loads((FOLDER / MODELS[name]).read_text())


@pytest.mark.parametrize(
    ("name", "scale"), [("v2_lite", 0.11472139), ("v2_5", 0.13523378), ("v3", 0.13523378), ("moonlight", 192**-0.5)]
)
def test_softmax_scale_of_published_models(name: str, scale: float):
    assert published(name).attention.softmax_scale == pytest.approx(scale, rel=1e-7)


def test_v3():
    config = published("v3")
    assert (config.num_layers, config.num_dense_layers, config.vocab_size) == (61, 3, 129280)
    assert (config.attention.q_lora_rank, config.attention.latent_width) == (1536, 576)
    router = config.moe.router
    assert (router.scoring, router.group_score, router.num_groups, router.groups_kept) == ("sigmoid", "top2_sum", 8, 4)
    assert router.normalize
    assert router.has_bias
    assert config.attention.rope.yarn is not None
    assert config.attention.rope.yarn.rotation_scale == 1.0


def test_v2_lite_has_plain_queries_and_a_greedy_softmax_router():
    config = published("v2_lite")
    assert config.attention.q_lora_rank is None
    router = config.moe.router
    assert (router.scoring, router.num_groups, router.normalize, router.has_bias) == ("softmax", 1, False, False)
    assert config.moe.shared_width == 2 * 1408


def test_v2_limits_groups_by_their_best_expert():
    router = published("v2_5").moe.router
    assert (router.group_score, router.num_groups, router.groups_kept) == ("max", 8, 3)
    assert router.scaling_factor == 16.0


def test_latent_norms_keep_their_own_eps():
    config = published("moonlight")
    assert (config.norm_eps, config.attention.latent_norm_eps) == (1e-5, 1e-6)


def test_published_fp8():
    assert published("v3").fp8 == Fp8Config()
    assert published("v2_lite").fp8 is None


def test_modules_that_stay_unquantised():
    fields = published_fields() | {
        "quantization_config": FP8 | {"modules_to_not_convert": ["kv_b_proj", "layers.1.mlp"]}
    }
    fp8 = ModelConfig.from_fields(fields).fp8
    assert fp8 is not None
    modules = ("layers.0.self_attn.kv_b_proj", "layers.1.mlp.down_proj", "layers.11.mlp.down_proj", "layers.0.mlp.kv_b")
    assert [fp8.covers(f"model.{module}") for module in modules] == [False, False, True, True]


def test_nested_rope_parameters_mean_the_same_as_rope_scaling():
    fields = published_fields()
    nested = {key: value for key, value in fields.items() if key not in ("rope_scaling", "rope_theta")}
    rope = {"rope_type" if k == "type" else k: v for k, v in fields["rope_scaling"].items()}
    nested["rope_parameters"] = rope | {"rope_theta": fields["rope_theta"]}
    assert ModelConfig.from_fields(nested) == ModelConfig.from_fields(fields)


def test_generation_config_overrides_the_end_of_text_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published_fields()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (1, 7)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures names 'LlamaForCausalLM'"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepSeek-V3.2 (sparse attention) is not supported"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "DeepSeek-V4 (compressed attention) is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"first_k_dense_replace": 99}, "first_k_dense_replace is 99"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_theta": 1}, "rope_theta is 1"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"architectures": [["x"]]}, "architectures"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "rope_scaling.factor is 0"),
        ({"quantization_config": [1]}, "quantization_config is [1]"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "rope_scaling.type is 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, "rope_scaling.original_max_position_embeddings is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": -1}}, "rope_scaling.factor is -1"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"n_group": 7}, "n_group is 7"),
        ({"topk_group": 9}, "topk_group is 9"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok is 200"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method is 'awq'"),
        ({"quantization_config": FP8 | {"weight_block_size": [32, 32]}}, "weight_block_size is [32, 32]"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "quantization_config.fmt is 'e5m2'"),
        ({"quantization_config": FP8 | {"modules_to_not_convert": "gate"}}, "modules_to_not_convert is 'gate'"),
    ],
)
def test_bad_field_is_named(changes: dict, field: str):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_fields(published_fields() | changes, where="somewhere/config.json")
    assert field in str(error.value)
    assert str(error.value).startswith("somewhere/config.json: ")


def test_renormalised_v2_weights_are_refused():
    with pytest.raises(ConfigError, match="norm_topk_prob is true"):
        ModelConfig.from_fields(published_fields("v2_lite") | {"norm_topk_prob": True})


def test_a_bad_id_in_generation_config_is_blamed_on_that_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published_fields()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "no"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is 'no'"):
        ModelConfig.load(tmp_path)


def test_null_means_missing():
    assert ModelConfig.from_fields(published_fields() | {"rms_norm_eps": None}).norm_eps == 1e-6


@pytest.mark.parametrize("content", [None, "{", "[1]", b"\xff\xfe"])
def test_unreadable_file(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)
