"""The engine on a real GPU: run with `pytest -m gpu` on a machine that has one.

The golden checkpoints in float32 are too small for the kernels of Hopper GPUs, so the references run. The kernels run
in two layers of DeepSeek-V2-Lite in bf16, with random weights.
"""

from collections.abc import Callable, Iterator
from functools import cache

import jax
import numpy as np
import pytest

from dsjax import LLM, SamplingParams
from dsjax.aot.targets import HOPPER
from dsjax.engine.request import Request
from dsjax.telemetry import counters
from tests.conftest import GOLDEN, SMALL
from tests.test_golden import TOLERANCE, golden, logit_error
from tests.wide import write_v2_lite

pytestmark = pytest.mark.gpu
PLANS = ("piece", "layer", "step")
KERNELS = ("mla_decode", "experts")
WIDE = {"dtype": "bfloat16", "load_format": "dummy", "row_buckets": [3], "max_model_len": 1280, "kv_tokens": 2560}
POSITIONS = 1024
LARGEST_DIFFERENCE = 0.02  # of the largest logit, between plans in bf16

MakeLLM = Callable[[str], LLM]


@pytest.fixture(scope="module")
def make_wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeLLM]:
    """make_wide(plan): DeepSeek-V2-Lite at its real width with a dense layer and one of experts, one LLM per plan.

    On Hopper GPUs, no operation that has a kernel runs its reference.
    """
    folder, made = write_v2_lite(tmp_path_factory.mktemp("wide"), layers=2), []

    @cache
    def make(plan: str) -> LLM:
        before = [counters[f"reference_op.{op}"] for op in KERNELS]
        made.append(llm := LLM(folder, plan=plan, **SMALL | WIDE))
        if llm.engine.runner.blueprint.deployment.target == HOPPER:
            assert [counters[f"reference_op.{op}"] for op in KERNELS] == before
        return llm

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(params=["references", "kernels"])
def make(request: pytest.FixtureRequest, make_llm: Callable[..., LLM], make_wide: MakeLLM) -> MakeLLM:
    """make(plan): an LLM in which the references run, and one with the kernels."""
    return make_wide if request.param == "kernels" else lambda plan: make_llm(plan=plan)


def bytes_in_use() -> int:
    return jax.devices()[0].memory_stats()["bytes_in_use"]


@pytest.mark.parametrize("plan", PLANS)
def test_100_steps_never_wait_for_the_device(make: MakeLLM, monkeypatch: pytest.MonkeyPatch, plan: str):
    """Under a guard against implicit transfers to the host; of explicit ones there is one a step, the engine's read.

    And they compile nothing.
    """
    engine = make(plan).engine
    device_get, reads, compiles = jax.device_get, [], counters["compiles"]
    monkeypatch.setattr(jax, "device_get", lambda tokens: reads.append(tokens.shape) or device_get(tokens))
    params = SamplingParams(temperature=0.7, max_tokens=120, ignore_eos=True)
    for i in range(4):
        engine.add(Request.create(f"guarded-{i}", [5 + i] * (10 * i + 1), params, engine.limits))
    with jax.transfer_guard_device_to_host("disallow"):
        for _ in range(100):
            engine.step()
    assert 95 <= len(reads) <= 99, "one read a step, of the step before"
    assert counters["compiles"] == compiles
    for i in range(4):
        engine.abort(f"guarded-{i}")
    engine.step()


@pytest.mark.parametrize("plan", PLANS)
def test_pools_keep_their_address(make: MakeLLM, plan: str):
    llm = make(plan)
    pool = llm.engine.runner.executor.state["pools"]["latent"]
    before = pool.unsafe_buffer_pointer()
    llm.generate([[5, 6, 7]] * 4, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert llm.engine.runner.executor.state["pools"]["latent"].unsafe_buffer_pointer() == before
    assert pool.is_deleted()


@pytest.mark.parametrize("plan", ["piece", "layer"])
def test_plans_agree_in_bfloat16(make_wide: MakeLLM, plan: str):
    """Teacher-forced, token by token through the decode kernel: logits are near those of plan "step".

    So the likeliest token is the same wherever it leads by more than that difference can make up.
    """
    tokens = np.random.default_rng(0).integers(2, 100_000, POSITIONS).tolist()
    expected, logits = (make_wide(one).logits(tokens, chunk_tokens=1) for one in ("step", plan))
    allowed = LARGEST_DIFFERENCE * np.abs(expected).max()
    assert np.abs(logits - expected).max() <= allowed
    second, first = np.partition(expected, -2)[:, -2:].T
    clear = first - second > 2 * allowed
    assert clear.mean() > 0.1
    np.testing.assert_array_equal(logits[clear].argmax(axis=1), expected[clear].argmax(axis=1))


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
