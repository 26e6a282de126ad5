"""What interrupts, failures and idle moments may and may not do to the engine."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from dsjax import LLM, SamplingParams
from dsjax.aot.compile import _check_in_place
from dsjax.engine.request import Request
from dsjax.errors import EngineDeadError
from dsjax.segments import Chain
from dsjax.telemetry import counters
from tests.conftest import GOLDEN, SMALL
from tests.test_golden import golden

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 6, 7]


@pytest.fixture
def own_llm():
    """An engine that the test may break; its executables come from the cache of the run."""
    with LLM(GOLDEN / "v3", **SMALL) as llm:
        yield llm


def test_an_interrupt_while_waiting_loses_no_token(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch):
    llm = make_llm()
    expected = llm.generate(PROMPT, PARAMS)[0].token_ids
    stream = llm.stream(PROMPT, PARAMS)
    tokens = next(stream).token_ids
    runner = llm.engine.runner

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([9, 9], PARAMS)
    tokens += [token for delta in stream for token in delta.token_ids]
    assert tokens == expected


def test_a_failure_while_enqueuing_ends_the_engine_loudly(own_llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def fail(*_):
        raise OverflowError("too large")

    monkeypatch.setattr(own_llm.engine.runner, "dispatch", fail)
    with pytest.raises(OverflowError):
        own_llm.generate(PROMPT, PARAMS)
    with pytest.raises(EngineDeadError, match=r"enqueuing a step failed \(OverflowError: too large\)"):
        own_llm.generate(PROMPT, PARAMS)


@pytest.mark.parametrize("method", ["read", "dispatch"])
def test_after_a_device_failure_open_requests_are_computed_again(
    own_llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str
):
    """Several steps fail, while one request decodes, one prefills and one waits; the caches are lost each time."""
    prompts = [PROMPT, [7] * 90, [8] * 40, [9] * 5]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=12, ignore_eos=True) for i in range(4)]
    expected = [answer.token_ids for answer in own_llm.generate(prompts, params)]
    own_llm.engine.forget_prefixes()
    original, calls = getattr(own_llm.engine.runner, method), itertools.count()

    def sometimes(*arguments):
        if next(calls) in (2, 5, 6, 11):
            for pool in own_llm.engine.runner.executor.state["pools"].values():
                pool.delete()
            raise jax.errors.JaxRuntimeError("out of memory")
        return original(*arguments)

    failures = counters["device_failures"]
    monkeypatch.setattr(own_llm.engine.runner, method, sometimes)
    assert [answer.token_ids for answer in own_llm.generate(prompts, params)] == expected
    assert counters["device_failures"] == failures + 4


def test_a_device_that_fails_again_and_again_ends_the_engine_loudly(own_llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("out of memory")

    monkeypatch.setattr(own_llm.engine.runner, "read", fail)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="the device failed 3 times in a row: out of memory"):
            own_llm.generate(PROMPT, PARAMS)


def test_steps_that_a_restart_only_repeats_are_no_progress(own_llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """A prompt in chunks of 32 tokens, of which the fourth always fails; the three before it succeed each time."""
    dispatch = own_llm.engine.runner.dispatch

    def fail_later(step):
        if step.chunks[0].start >= 96:
            raise jax.errors.JaxRuntimeError("out of memory")
        return dispatch(step)

    monkeypatch.setattr(own_llm.engine.runner, "dispatch", fail_later)
    with pytest.raises(EngineDeadError, match="failed 3 times in a row"):
        own_llm.generate([7] * 320, PARAMS)


@pytest.mark.parametrize("method", ["schedule", "collect"])
def test_an_interrupt_half_way_through_a_step_ends_the_engine(
    own_llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str
):
    """Host and device would not agree on the tokens any more."""
    original = getattr(own_llm.engine.scheduler, method)

    def interrupted(*arguments):
        original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(own_llm.engine.scheduler, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        own_llm.generate(PROMPT, PARAMS)
    with pytest.raises(EngineDeadError, match=r"a step failed \(KeyboardInterrupt"):
        own_llm.generate(PROMPT, PARAMS)


def test_a_device_on_which_no_cache_can_be_made_anew(own_llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("out of memory")

    for method in ("read", "renew_state"):
        monkeypatch.setattr(own_llm.engine.runner, method, fail)
    with pytest.raises(EngineDeadError, match="the device failed and does not recover"):
        own_llm.generate(PROMPT, PARAMS)


def test_lost_pages_are_found_at_rest_and_given_back(own_llm: LLM):
    pool = own_llm.engine.scheduler.pools["latent"]
    pool.take(2)
    lost = counters["lost_pages"]
    own_llm.generate(PROMPT, PARAMS)
    assert counters["lost_pages"] == lost + 2
    assert pool.free == pool.num_pages


def test_a_device_failure_in_logits_ends_the_engine(own_llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(own_llm.engine.runner, "dispatch", fail)
        with pytest.raises(EngineDeadError, match="the device failed: out of memory"):
            own_llm.logits([5, 6])
    with pytest.raises(EngineDeadError, match="make a new engine"):
        own_llm.generate(PROMPT, PARAMS)


def test_an_answer_lost_between_engine_and_caller_is_not_waited_for_in_vain(own_llm: LLM):
    stream = own_llm.stream(PROMPT, PARAMS)
    next(stream)
    while own_llm.engine.has_work:
        own_llm.engine.step()  # as if an interrupt had come between the step and the note of its tokens
    with pytest.raises(EngineDeadError, match="An answer was lost"):
        list(stream)


def test_requests_that_can_never_run_are_not_waited_for(own_llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own_llm.engine.scheduler, "schedule", lambda *_: None)
    with pytest.raises(EngineDeadError, match="none of them can run"):
        own_llm.generate(PROMPT, PARAMS)


def test_a_long_prefill_is_enqueued_one_step_ahead(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch):
    """Steps that sample nothing are waited for too: 320 tokens in chunks of 32."""
    engine = make_llm().engine
    runner = engine.runner
    log: list[str] = []
    dispatch, read = runner.dispatch, runner.read
    monkeypatch.setattr(runner, "dispatch", lambda *a: log.append("dispatch") or dispatch(*a))
    monkeypatch.setattr(runner, "read", lambda *a: log.append("wait") or read(*a))
    engine.add(Request.create("long", [5] * 320, SamplingParams(temperature=0, max_tokens=1), engine.limits))
    while engine.has_work:
        engine.step()
    assert log == ["dispatch"] + ["dispatch", "wait"] * 9 + ["wait"]


def test_logits_right_after_an_answer_that_ended_by_itself(make_llm: Callable[..., LLM]):
    """The superfluous step behind an end-of-text token, or behind a stream left early, is no open request."""
    llm, expected = make_llm(), golden("v3")
    llm.generate(expected["prompt_0"].tolist(), SamplingParams(temperature=0, max_tokens=64))
    assert llm.logits([5, 6]).shape == (2, 256)
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    stream.close()
    assert llm.logits([5, 6]).shape == (2, 256)


@pytest.mark.parametrize(
    "params", [{"temperature": 1e-40}, {"temperature": 1e-7}, {"temperature": 1.0, "top_p": 1e-40}]
)
def test_values_below_float32_mean_greedy(make_llm: Callable[..., LLM], params: dict):
    llm = make_llm()
    expected = llm.generate(PROMPT, PARAMS)[0].token_ids
    tiny = SamplingParams(max_tokens=12, ignore_eos=True, seed=1, **params)
    assert llm.generate(PROMPT, tiny)[0].token_ids == expected


def test_an_executable_that_copies_a_cache_is_refused():
    """The pool is read after it was written through another name, so XLA has to keep both."""

    def copies(pool):
        return pool.at[0].set(1.0), pool.sum(axis=0)

    compiled = jax.jit(copies, donate_argnums=0).lower(jax.ShapeDtypeStruct((4, 8, 16, 32), jnp.float32)).compile()
    chain = Chain(segments=(), places=(), takes=("pools",), gives=("pools",))
    with pytest.raises(RuntimeError, match="copies a cache"):
        _check_in_place(chain, compiled)
