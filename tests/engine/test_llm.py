"""The offline API: answers, streams, seeds, bad input, and what the step loop may and may not do."""

import gc
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax import LLM, SamplingParams
from dsjax.engine.request import Request
from dsjax.errors import ConcurrentUseError, EngineDeadError, OptionError, RequestError
from dsjax.telemetry import counters
from tests.conftest import GOLDEN, SMALL
from tests.test_golden import golden

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def random_prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 256, rng.integers(1, longest)).tolist() for _ in range(count)]


def test_same_seed_same_tokens_alone_and_among_31_others(make_llm: Callable[..., LLM]):
    llm = make_llm(max_num_seqs=32, kv_tokens=4096)
    prompts = random_prompts(32)
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=12, ignore_eos=True) for i in range(32)]
    order = np.random.default_rng(1).permutation(32)
    together = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    by_prompt = {int(i): answer.token_ids for i, answer in zip(order, together, strict=True)}
    for i in range(32):
        assert llm.generate([prompts[i]], params[i])[0].token_ids == by_prompt[i]


def test_negative_and_64_bit_seeds(make_llm: Callable[..., LLM]):
    llm = make_llm()
    seeds = (-1, -(2**63), 2**63 - 1, 2**32, 0)
    params = [SamplingParams(seed=seed, max_tokens=10, ignore_eos=True) for seed in seeds]
    answers = [llm.generate([[7, 8]], one)[0].token_ids for one in params]
    assert len({tuple(answer) for answer in answers}) == len(seeds)
    assert [answer.token_ids for answer in llm.generate([[7, 8]] * 5, params)] == answers


def test_stream_gives_what_generate_gives(make_llm: Callable[..., LLM]):
    llm, prompt = make_llm(), random_prompts(1)[0]
    deltas = list(llm.stream(prompt, GREEDY))
    assert [token for delta in deltas for token in delta.token_ids] == llm.generate(prompt, GREEDY)[0].token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * 5 + ["length"]


def test_a_stream_left_early_is_aborted(make_llm: Callable[..., LLM]):
    llm = make_llm()
    stream = llm.stream([5, 6], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.scheduler.has_work


def test_two_streams_and_a_batch_interleave(make_llm: Callable[..., LLM]):
    llm, (a, b, c) = make_llm(), random_prompts(3, seed=5)
    expected = [answer.token_ids for answer in llm.generate([a, b, c], GREEDY)]
    first, second = llm.stream(a, GREEDY), llm.stream(b, GREEDY)
    taken: list[list[int]] = [[], []]
    taken[0] += next(first).token_ids
    taken[1] += next(second).token_ids
    assert llm.generate(c, GREEDY)[0].token_ids == expected[2]
    for place, stream in enumerate((first, second)):
        taken[place] += [token for delta in stream for token in delta.token_ids]
    assert taken == expected[:2]


def test_stops_at_the_end_of_text_token(make_llm: Callable[..., LLM]):
    """greedy_0 of the golden v3 case produces token 1, its end of text."""
    llm, expected = make_llm(), golden("v3")
    tokens = expected["greedy_0"].tolist()
    assert 1 in tokens
    [answer] = llm.generate(expected["prompt_0"].tolist(), SamplingParams(temperature=0, max_tokens=64))
    assert answer.token_ids == tokens[: tokens.index(1) + 1]
    assert answer.finish_reason == "stop"


def test_numpy_prompts_and_one_prompt(make_llm: Callable[..., LLM]):
    llm = make_llm()
    plain = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    assert llm.generate(np.array([5, 6, 7]), GREEDY)[0].token_ids == plain
    assert llm.generate([5, 6, 7], GREEDY)[0].token_ids == plain
    assert llm.generate(range(5, 8), GREEDY)[0].token_ids == plain
    assert llm.generate([], GREEDY) == []


def test_jax_prompts(make_llm: Callable[..., LLM]):
    llm = make_llm()
    plain = llm.generate([5, 6, 7], GREEDY)[0].token_ids
    row = jnp.array([5, 6, 7])
    for prompts in (row, [row], row[None], list(row), row.astype(jnp.uint8), np.array([[5, 6, 7]], np.int8)):
        assert llm.generate(prompts, GREEDY)[0].token_ids == plain
    assert [delta.token_ids[0] for delta in llm.stream(row, GREEDY)] == plain
    np.testing.assert_array_equal(llm.logits(row), llm.logits([5, 6, 7]))


def test_more_requests_than_rows_and_cache(make_llm: Callable[..., LLM]):
    """20 requests that together need several times the cache all end, with the tokens they get alone."""
    llm = make_llm()
    prompts = random_prompts(20, seed=9, longest=250)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    together = [answer.token_ids for answer in llm.generate(prompts, params)]
    assert together == [llm.generate(prompt, params)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "Prompt 1: The prompt is empty"),
        ([5, 256], "Prompt 1: Token 256 at place 1 of the prompt is outside the vocabulary 0..255"),
        ([-1], "Token -1 at place 0"),
        ([5, 1.5], "Token 1.5 at place 1 of the prompt is no integer"),
        ([True], "Token True at place 0 of the prompt is no integer"),
        ([5] * 512, "The prompt has 512 tokens and leaves no room"),
        ("text", "Prompt 1: This model has no tokenizer.json"),
    ],
    ids=str,
)
def test_a_bad_prompt_among_good_ones_stops_nothing(make_llm: Callable[..., LLM], prompt, message: str):
    llm = make_llm()
    with pytest.raises(RequestError) as error:
        llm.generate([[5, 6], prompt, [7]], GREEDY)
    assert message in str(error.value)
    assert not llm.engine.scheduler.has_work
    assert len(llm.generate([[5, 6]], GREEDY)[0].token_ids) == 6


def test_prompt_larger_than_the_cache(make_llm: Callable[..., LLM]):
    llm = make_llm()
    with pytest.raises(RequestError, match="has 450 tokens, but the cache holds 448"):
        llm.generate([[5] * 450], GREEDY)
    with pytest.raises(RequestError, match="max_tokens is 40, but after the prompt of 420 tokens only 28 fit"):
        llm.generate([[5] * 420], SamplingParams(max_tokens=40))
    assert llm.generate([[5] * 420], SamplingParams(max_tokens=28, ignore_eos=True))[0].finish_reason == "length"


def test_what_is_not_done_in_time_ends_with_what_there_is(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
):
    llm, now = make_llm(), itertools.count(1000.0, 0.1)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    [answer] = llm.generate([5, 6], SamplingParams(max_tokens=400, ignore_eos=True), timeout_s=2.0)
    assert answer.finish_reason == "timeout"
    assert 1 <= len(answer.token_ids) < 30
    for timeout in (0, -1, float("nan"), "soon"):
        with pytest.raises(RequestError, match="timeout_s is"):
            llm.generate([5, 6], GREEDY, timeout_s=timeout)  # type: ignore[arg-type]


def test_higher_priority_overtakes_who_waits(make_llm: Callable[..., LLM]):
    llm = make_llm()
    low = [llm.stream([5 + i], SamplingParams(max_tokens=60, ignore_eos=True)) for i in range(4)]
    for stream in low[:3]:
        next(stream)
    llm.engine.add(Request.create("waits", [9], SamplingParams(max_tokens=5, ignore_eos=True), llm.engine.limits))
    high = llm.stream([7, 8], SamplingParams(max_tokens=5, ignore_eos=True), priority=1)
    next(high)
    assert llm.engine.scheduler.waiting[-1].id == "waits", "behind the request that gave up its row"
    assert [request.priority for request in llm.engine.scheduler.running] == [1, 0, 0]
    for stream in (*low, high):
        stream.close()
    llm.engine.abort("waits")
    with pytest.raises(RequestError, match="priority is 'first'"):
        llm.generate([5, 6], GREEDY, priority="first")  # type: ignore[arg-type]


def test_max_tokens_of_one_and_without_limit(make_llm: Callable[..., LLM]):
    llm = make_llm()
    assert len(llm.generate([5, 6], SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids) == 1
    whole = llm.generate([5] * 440, SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(whole.token_ids) == 448 - 440


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts is None, expected text, token ids, or a list of either"),
        (5, "prompts is 5"),
        (b"abc", "prompts is b'abc'"),
        (np.array(3), r"prompts is array\(3\)"),
        (jnp.int32(3), "prompts is Array"),
        ({5: 6}, "prompts is {5: 6}"),
        ([1.5, 2], "Prompt 0: Token 1.5 at place 0 of the prompt is no integer"),
        ([[5], 7], "Prompt 1: the prompt is 7, expected text or token ids"),
        ([None], "Token None at place 0"),
        ([[5], bytearray(b"abc")], "Prompt 1: the prompt is bytearray"),
        ([["5"]], "Token '5' at place 0 of the prompt is no integer"),
        (np.array([1.0, 2.0]), r"an array of shape \(2,\) and dtype float64, expected integers in one dimension"),
        (np.array([True]), "dtype bool"),
        (np.zeros((1, 2, 2), int), r"an array of shape \(2, 2\)"),
        (jnp.array([1.0]), "dtype float32"),
        ([np.array([5]), np.array(5)], r"Prompt 1: the prompt is array\(5\)"),
    ],
    ids=str,
)
def test_what_is_no_prompt_at_all(make_llm: Callable[..., LLM], prompts: Any, message: str):
    with pytest.raises(RequestError, match=message):
        make_llm().generate(prompts, GREEDY)


def test_what_is_no_row_of_ids(make_llm: Callable[..., LLM]):
    llm = make_llm()
    with pytest.raises(RequestError, match=r"logits takes token ids; llm\.tokenizer\.encode makes them of text"):
        llm.logits("abc")  # type: ignore[arg-type]
    for tokens in (5, None, b"abc", [[5]], [5.0], np.array([[5]])):
        with pytest.raises(RequestError, match=r"expected|no integer"):
            llm.logits(tokens)  # type: ignore[arg-type]


def test_params_of_another_kind(make_llm: Callable[..., LLM]):
    for params in ({"temperature": 0}, [GREEDY], [GREEDY, {}]):
        with pytest.raises(RequestError, match="params must be SamplingParams, one for all or 2"):
            make_llm().generate([[5], [6]], params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"params is {}, expected SamplingParams"):
        make_llm().stream([5], {})  # type: ignore[arg-type]


def test_a_second_thread_is_refused_at_once_and_spoils_nothing(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
):
    """Whatever it calls while the first is at work; and streams that it leaves meanwhile are aborted later."""
    llm, prompts = make_llm(), random_prompts(2, seed=11)
    expected = [answer.token_ids for answer in llm.generate(prompts, GREEDY)]
    left, refused, kept = (llm.stream(prompts[0], SamplingParams(max_tokens=300, ignore_eos=True)) for _ in range(3))
    for stream in (left, refused, kept):
        next(stream)
    at_work, go_on = threading.Event(), threading.Event()
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: at_work.set() or (go_on.wait(60) and step()))
    with ThreadPoolExecutor(1) as first:
        answers = first.submit(llm.generate, prompts, GREEDY)
        assert at_work.wait(60)
        left.close()
        for call in (
            lambda: llm.generate(prompts, GREEDY),
            lambda: next(llm.stream(prompts[0], GREEDY)),
            lambda: next(refused),
            lambda: llm.logits([5, 6]),
            llm.close,
        ):
            with pytest.raises(ConcurrentUseError, match="at work in another thread"):
                call()
        go_on.set()
        assert [answer.token_ids for answer in answers.result()] == expected
    assert next(kept).token_ids
    kept.close()
    assert not llm.engine.scheduler.has_work
    assert [answer.token_ids for answer in llm.generate(prompts, GREEDY)] == expected


def test_numpy_numbers_are_welcome(make_llm: Callable[..., LLM]):
    numbers: Any = {"temperature": np.float32(0), "max_tokens": np.int64(3), "seed": np.int32(1)}
    params = SamplingParams(ignore_eos=True, **numbers)
    assert len(make_llm().generate([np.int64(5)], params)[0].token_ids) == 3
    assert make_llm().logits(np.array([5, 6])).shape == (2, 256)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "fast"}, "plan is 'fast', expected one of auto, step"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 80, "token_buckets": [64]}, r"largest token bucket \(64\) is below max_num_seqs \(80\)"),
        ({"token_buckets": [64, 16]}, "token_buckets is"),
        ({"token_buckets": [16], "max_batched_tokens": 32}, "the last of token_buckets is 16"),
        ({"row_buckets": [8, 1]}, r"row_buckets is \[8, 1\]"),
        ({"row_buckets": [1, 8], "max_num_seqs": 16}, "max_num_seqs is 16, but the last of row_buckets is 8"),
        ({"max_model_len": 5000}, "max_model_len is 5000, but the model was made for 2560"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"tp": 3}, "tp=3 does not divide num_attention_heads"),
        ({"tp": 64}, "tp=64 needs 64 devices"),
        ({"tp": 2, "plan": "off"}, "plan 'off' runs op by op on one device only"),
        ({"gpu_memory_fraction": 1.5}, "gpu_memory_fraction is 1.5"),
        ({"gpu_memory_fraction": "most"}, "gpu_memory_fraction is 'most'"),
        ({"max_batched_tokens": 10**8}, "max_batched_tokens asks for steps of 100000000 tokens; at most 65536"),
        ({"token_buckets": [16, 10**8]}, "token_buckets asks for steps of 100000000 tokens; at most 65536"),
        ({"token_buckets": [16.0]}, r"token_buckets is \[16.0\]"),
        ({"token_buckets": 5}, "token_buckets is 5"),
        ({"token_buckets": "16,64"}, "token_buckets is '16,64'"),
        ({"kv_tokens": 10**12}, "needs .* GB on each device, but only 1.1 GB are left"),
        ({"load_format": "gguf"}, "load_format is 'gguf'"),
        ({"num_gpus": 2}, "Unknown option 'num_gpus'; the options are max_model_len"),
    ],
)
def test_bad_options(options: dict, message: str):
    with pytest.raises(OptionError, match=message):
        LLM(GOLDEN / "v3", **options)


def test_logits_need_an_idle_engine(make_llm: Callable[..., LLM]):
    llm = make_llm()
    stream = llm.stream([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    with pytest.raises(OptionError, match="idle engine"):
        llm.logits([5, 6])
    stream.close()
    assert llm.logits([5, 6]).shape == (2, 256)
    for size in (0, -1, 4):
        with pytest.raises(OptionError, match=r"expected 1 to max_num_seqs \(3\)"):
            llm.logits([5, 6], chunk_tokens=size)
    with pytest.raises(OptionError, match="add up to 3, but there are 2 tokens"):
        llm.logits([5, 6], chunk_tokens=[1, 2])


@pytest.mark.parametrize("plan", ["piece", "layer", "step"])
def test_100_steps_read_once_each_one_behind_and_keep_the_pools_in_place(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, plan: str
):
    """Every way in which a device array reaches the host is counted: there is one read a step, of the step before."""
    engine = make_llm(plan=plan).engine
    runner = engine.runner
    log: list[str] = []
    array_type = type(runner.executor.state["last_tokens"])
    fetch, dispatch = array_type.__array__, runner.dispatch
    monkeypatch.setattr(array_type, "__array__", lambda self, *a, **k: log.append("read") or fetch(self, *a, **k))
    for name in ("block_until_ready", "__int__", "__float__", "__bool__", "__index__", "tolist", "item"):
        monkeypatch.setattr(array_type, name, lambda self, *_, name=name: pytest.fail(f"the loop called {name}"))
    monkeypatch.setattr(runner, "dispatch", lambda *a: log.append("dispatch") or dispatch(*a))
    address = runner.executor.state["pools"]["latent"].unsafe_buffer_pointer()
    compiles = counters["compiles"]
    assert runner.compile_report is not None
    assert compiles >= runner.compile_report.executables, "the counter counts"
    params = SamplingParams(temperature=0.7, max_tokens=120, ignore_eos=True)
    for i in range(4):
        engine.add(Request.create(f"counted-{i}", [5 + i] * (1 + 10 * i), params, engine.limits))
    for _ in range(100):
        engine.step()
    monkeypatch.undo()
    assert log == ["dispatch"] + ["dispatch", "read"] * 99
    assert runner.executor.state["pools"]["latent"].unsafe_buffer_pointer() == address
    assert counters["compiles"] == compiles
    for i in range(4):
        engine.abort(f"counted-{i}")
    engine.step()


def test_close_frees_the_device_memory():
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    with LLM(GOLDEN / "v3", **SMALL) as llm:
        llm.generate([5, 6], GREEDY)
        assert sum(array.nbytes for array in jax.live_arrays()) > before + 1_000_000
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) <= before + 10_000
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate([5, 6], GREEDY)
