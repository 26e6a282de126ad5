"""The golden comparison must be able to fail: one mistake at a time, each clearly above the tolerance."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from dsjax.config import MLAConfig, ModelConfig
from tests.conftest import GOLDEN
from tests.forward import forward, zero_router_bias
from tests.test_golden import TOLERANCE, golden, logit_error

Change = Callable[[ModelConfig], ModelConfig]


def attention(**changes) -> Change:
    return lambda config: replace(config, attention=replace(config.attention, **changes))


def rope(**changes) -> Change:
    return lambda config: attention(rope=replace(config.attention.rope, **changes))(config)


def router(**changes) -> Change:
    return lambda config: replace(config, moe=replace(config.moe, router=replace(config.moe.router, **changes)))


def error_of(case: str, **changes) -> float:
    expected = golden(case)
    return logit_error(forward(case, expected["tokens"].tolist(), **changes), expected["logits"])


def test_without_a_mistake_it_passes():
    assert error_of("v3") < TOLERANCE


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        pytest.param("v2_lite", rope(yarn=None), id="no YaRN"),
        pytest.param("v3", rope(interleaved=False), id="rope not interleaved"),
        pytest.param("v3", attention(latent_norm_eps=1e-5), id="q_a and kv_a norm eps, with q_lora"),
        pytest.param("moonlight", attention(latent_norm_eps=1e-5), id="kv_a norm eps taken from rms_norm_eps"),
        pytest.param("v2", lambda config: replace(config, norm_eps=1e-5), id="layer norm eps"),
        pytest.param("v2", router(scaling_factor=1.0), id="routed scaling factor, V2"),
        pytest.param("v3", router(scaling_factor=1.0), id="routed scaling factor, V3"),
        pytest.param("v3", router(normalize=False), id="expert weights not renormalised"),
        pytest.param("v2", router(num_groups=1, groups_kept=1), id="groups not limited"),
        pytest.param("v3", router(group_score="max"), id="group score of V2 in V3"),
    ],
)
def test_a_mistake_in_the_config_shows(case: str, mistake: Change):
    config = mistake(ModelConfig.load(GOLDEN / case))
    assert error_of(case, config=config) > 2 * TOLERANCE


@pytest.mark.parametrize("case", ["v3", "moonlight"])
def test_a_missing_router_bias_shows(case: str):
    assert error_of(case, edit=zero_router_bias) > 2 * TOLERANCE


def test_a_softmax_scale_without_yarn_shows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MLAConfig, "softmax_scale", property(lambda mla: mla.qk_head_dim**-0.5))
    assert error_of("v3") > 2 * TOLERANCE
