"""The engine on a real GPU: run with `pytest -m gpu` on a machine that has one."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from dsjax import LLM, SamplingParams
from dsjax.engine.request import Request
from tests.conftest import GOLDEN, SMALL
from tests.test_golden import TOLERANCE, golden, logit_error

pytestmark = pytest.mark.gpu


def bytes_in_use() -> int:
    return jax.devices()[0].memory_stats()["bytes_in_use"]


@pytest.mark.parametrize("plan", ["piece", "layer", "step"])
def test_100_steps_never_wait_for_the_device(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, plan: str):
    """Under a guard against implicit transfers to the host; of explicit ones there is one a step, the engine's read."""
    engine = make_llm(plan=plan).engine
    device_get, reads = jax.device_get, []
    monkeypatch.setattr(jax, "device_get", lambda tokens: reads.append(tokens.shape) or device_get(tokens))
    params = SamplingParams(temperature=0.7, max_tokens=120, ignore_eos=True)
    for i in range(4):
        engine.add(Request.create(f"guarded-{i}", [5 + i] * (10 * i + 1), params, engine.limits))
    with jax.transfer_guard_device_to_host("disallow"):
        for _ in range(100):
            engine.step()
    assert 95 <= len(reads) <= 99, "one read a step, of the step before"
    for i in range(4):
        engine.abort(f"guarded-{i}")
    engine.step()


def test_pools_keep_their_address(make_llm: Callable[..., LLM]):
    llm = make_llm()
    pool = llm.engine.runner.executor.state["pools"]["latent"]
    before = pool.unsafe_buffer_pointer()
    llm.generate([[5, 6, 7]] * 4, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert llm.engine.runner.executor.state["pools"]["latent"].unsafe_buffer_pointer() == before
    assert pool.is_deleted()


def test_close_gives_the_memory_back():
    before = bytes_in_use()
    with LLM(GOLDEN / "v3", **SMALL | {"kv_tokens": 1 << 20, "plan": "step"}) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8))
        assert bytes_in_use() > before + (1 << 28)
    assert abs(bytes_in_use() - before) < 1 << 20


def test_bfloat16_is_close_to_float32(make_llm: Callable[..., LLM]):
    """A bf16 run is at most 1.5 times as far from float32 as transformers' own bf16 run."""
    expected = golden("v3")
    logits = make_llm(dtype="bfloat16").logits(expected["tokens"].tolist())
    error = np.linalg.norm(logits - expected["logits"]) / np.linalg.norm(expected["logits"])
    assert TOLERANCE < error < 1.5 * expected["bf16_error"]


def test_float32_keeps_full_precision(make_llm: Callable[..., LLM]):
    expected = golden("v3")
    assert logit_error(make_llm().logits(expected["tokens"].tolist()), expected["logits"]) < TOLERANCE
