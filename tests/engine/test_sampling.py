"""Sampling options through the whole engine, replayed with teacher-forced logits and the sampler in float64."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from dsjax import LLM, SamplingParams
from dsjax.aot.planner import ProgramKey
from dsjax.engine.llm import Completion
from dsjax.engine.logprobs import TokenLogprobs
from dsjax.engine.request import Request
from dsjax.errors import RequestError
from dsjax.telemetry import counters
from tests.step.rows import distribution
from tests.test_golden import golden

PROMPT = [*golden("v3")["prompt_0"].tolist(), *golden("v3")["greedy_0"][:50].tolist()]  # soon comes the end of text, 1
LONG = [golden("v3")["tokens"][i : i + 100].tolist() for i in (0, 20, 40)]
PENALTIES: dict[str, Any] = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3}


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True} | options)


def replayed(llm: LLM, answer: Completion, params: SamplingParams) -> list[int]:
    """The tokens that the float64 model chooses, each after the tokens of `answer` before it."""
    prompt, tokens = answer.prompt_token_ids, answer.token_ids
    logits = llm.logits([*prompt, *tokens])[len(prompt) - 1 :]
    histories = [Request("r", prompt, params, 100, 0, outputs=tokens[:place]) for place in range(len(tokens))]
    return [int(distribution(logits[place], history).argmax()) for place, history in enumerate(histories)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    "options",
    [
        PENALTIES,
        {"repetition_penalty": 0.5, "max_tokens": 8},
        {"min_tokens": 25, "ignore_eos": False},
        {"min_tokens": 25, "stop_token_ids": range(100, 164)},
        {"allowed_token_ids": range(3, 200, 7)},
        {"logit_bias": dict.fromkeys(range(0, 256, 2), -100)},
        {"allowed_token_ids": range(2, 200), "logit_bias": {5: 3.0, 9: 2.0}, **PENALTIES},
    ],
    ids=str,
)
def test_answers_are_those_of_the_float64_model(make_llm: Callable[..., LLM], options: dict[str, Any]):
    llm, params = make_llm(), greedy(**options)
    plain, answer = llm.generate([PROMPT] * 2, [greedy(), params])
    assert answer.token_ids == replayed(llm, answer, params)
    assert plain.token_ids == replayed(llm, plain, greedy())
    assert answer.token_ids != plain.token_ids[: len(answer.token_ids)], "the options make a difference"


def test_min_tokens_puts_the_end_off(make_llm: Callable[..., LLM]):
    llm = make_llm()
    ended, put_off = llm.generate([PROMPT] * 2, [greedy(ignore_eos=False), greedy(ignore_eos=False, min_tokens=25)])
    assert ended.finish_reason == "stop"
    assert len(ended.token_ids) < 25 <= len(put_off.token_ids)
    assert 1 not in put_off.token_ids[:25]


def test_stop_ids_end_an_answer(make_llm: Callable[..., LLM]):
    llm = make_llm()
    whole = llm.generate(PROMPT, greedy())[0].token_ids
    stopped = llm.generate(PROMPT, greedy(stop_token_ids=[whole[4]]))[0]
    assert stopped.token_ids == whole[: whole.index(whole[4]) + 1]
    assert stopped.finish_reason == "stop"


def test_a_bias_forces_and_a_list_of_2000_allows(make_llm: Callable[..., LLM]):
    llm = make_llm()
    forced = SamplingParams(logit_bias={77: 100}, max_tokens=5, seed=1)
    assert llm.generate(PROMPT, forced)[0].token_ids == [77] * 5
    allowed = SamplingParams(allowed_token_ids=[*range(30, 35)] * 400, max_tokens=40, temperature=5, seed=1)
    assert set(llm.generate(PROMPT, allowed)[0].token_ids) == set(range(30, 35))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": range(200)}, "stop_token_ids has 200 ids; at most 64"),
        ({"allowed_token_ids": range(2000)}, "Token 256 in allowed_token_ids is outside the vocabulary 0..255"),
        ({"logit_bias": {256: 1}}, "Token 256 in logit_bias is outside the vocabulary"),
        ({"max_tokens": None, "min_tokens": 5000}, "min_tokens is 5000"),
    ],
)
def test_what_is_refused_leaves_the_engine_alive(make_llm: Callable[..., LLM], options: dict[str, Any], message: str):
    llm = make_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT], greedy(**options))
    assert len(llm.generate([PROMPT], greedy())[0].token_ids) == 30


def test_preempted_requests_remember_what_they_said(make_llm: Callable[..., LLM]):
    """Three requests that need 660 tokens of a cache of 448, with options that depend on all of their history."""
    llm, prompts = make_llm(), [prompt[:20] for prompt in LONG]
    options = [{}, {"min_tokens": 200, "ignore_eos": False}, {"seed": 3, "temperature": 0.8}]
    common = PENALTIES | {"max_tokens": 200, "logprobs": 2}
    params = [greedy(**common, **one) for one in options]
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    before = llm.engine.scheduler.preemptions
    together = llm.generate(prompts, params)
    assert llm.engine.scheduler.preemptions > before
    for apart, beside in zip(alone, together, strict=True):
        assert beside.token_ids == apart.token_ids
        check_close(beside.logprobs, apart.logprobs)


Logprobs = Sequence[TokenLogprobs | None] | None


def check_close(found: Logprobs, expected: Logprobs) -> None:
    """Equal but for float32 noise: other chunks, other sums."""
    assert (found is None) == (expected is None)
    for one, other in zip(found or (), expected or (), strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert [id for id, _ in one.top] == [id for id, _ in other.top]
        np.testing.assert_allclose([p for _, p in one.top], [p for _, p in other.top], atol=1e-4)
        np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_of_prompt_and_answer(make_llm: Callable[..., LLM], temperature: float):
    """They are of the model's own distribution, whatever the options, and each request gets what it asks for."""
    llm = make_llm()
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=12, ignore_eos=True, top_k=50, **PENALTIES)
    asked = [{"logprobs": 20, "prompt_logprobs": 3}, {}, {"logprobs": 0, "prompt_logprobs": 0}]
    answers = llm.generate([LONG[0][:40]] * 3, [SamplingParams(**vars(params) | one) for one in asked])
    assert answers[1].logprobs is None
    assert answers[1].prompt_logprobs is None
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    tokens = [*answers[0].prompt_token_ids, *answers[0].token_ids]
    exact = log_softmax(llm.logits(tokens))[:-1]
    for answer, (of_answer, of_prompt) in ((answers[0], (20, 3)), (answers[2], (0, 0))):
        assert answer.logprobs is not None
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        found = [*answer.prompt_logprobs[1:], *answer.logprobs]
        for place, one in enumerate(found):
            assert one is not None
            np.testing.assert_allclose(one.logprob, exact[place][tokens[place + 1]], atol=1e-4)
            assert len(one.top) == (of_prompt if place < 39 else of_answer)
            np.testing.assert_allclose([p for _, p in one.top], np.sort(exact[place])[::-1][: len(one.top)], atol=1e-4)
            np.testing.assert_allclose([exact[place][id] for id, _ in one.top], [p for _, p in one.top], atol=1e-4)


def test_n_answers_have_seeds_in_a_row(make_llm: Callable[..., LLM]):
    llm = make_llm()
    answers = llm.generate([PROMPT, [9]], SamplingParams(n=4, seed=2**63 - 2, max_tokens=8, ignore_eos=True))
    seeds = [2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1]
    apart = [
        llm.generate([prompt], SamplingParams(seed=seed, max_tokens=8, ignore_eos=True))[0]
        for prompt in (PROMPT, [9])
        for seed in seeds
    ]
    assert answers == apart
    assert len({tuple(answer.token_ids) for answer in answers}) == 8


def test_a_stream_of_n_answers(make_llm: Callable[..., LLM]):
    llm = make_llm()
    params = SamplingParams(n=4, seed=5, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    deltas = list(llm.stream(PROMPT, params))
    scored = next(delta for delta in deltas if delta.index == 0)
    for index, answer in enumerate(llm.generate(PROMPT, params)):
        own = [delta for delta in deltas if delta.index == index]
        assert [token for delta in own for token in delta.token_ids] == answer.token_ids
        assert [delta.finish_reason for delta in own] == [None] * 5 + ["length"]
        check_close([one for delta in own for one in delta.logprobs or ()], answer.logprobs)
        check_close(scored.prompt_logprobs, answer.prompt_logprobs)
        assert all(delta.prompt_logprobs is None for delta in own if delta is not scored)
    unfinished = llm.stream(PROMPT, params)
    next(unfinished)
    unfinished.close()
    assert not llm.engine.scheduler.has_work


def test_random_answers_without_seed_differ(make_llm: Callable[..., LLM]):
    answers = make_llm().generate(PROMPT, SamplingParams(n=3, max_tokens=10, ignore_eos=True))
    assert len({tuple(answer.token_ids) for answer in answers}) == 3


def test_no_mixture_of_options_compiles_anything(make_llm: Callable[..., LLM]):
    llm = make_llm()
    llm.generate(PROMPT, greedy())
    before = counters["compiles"]
    everything = {"logit_bias": {5: 1}, "allowed_token_ids": range(200), "min_tokens": 9, "logprobs": 3, **PENALTIES}
    cuts = {"temperature": 0.9, "min_p": 0.01, "top_k": 30, "top_p": 0.9, "seed": 1, "prompt_logprobs": 1}
    llm.generate([PROMPT] * 4, [greedy(**one) for one in ({}, everything, cuts, everything | cuts)])
    assert counters["compiles"] == before


def test_a_tail_counts_in_place_and_copies_no_logits_for_plain_requests(make_llm: Callable[..., LLM]):
    """The optimised program: no copy of the counts anywhere, none of the logits outside the branches of options."""
    [tail] = make_llm(plan="step").engine.runner.programs[ProgramKey("tail", 3)].dispatches
    program = tail.executable.as_text()
    assert "s32[3,256]" in program
    assert not re.search(r"= s32\[3,256\]\S* copy\(", program)
    entry = program[program.index("\nENTRY ") :]
    assert " conditional(" in entry
    assert not re.search(r"= f32\[3,256\]\S* copy\(", entry)
