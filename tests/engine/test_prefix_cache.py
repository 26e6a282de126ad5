"""Answers over cached prefixes are those of a cold start."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dsjax import LLM, SamplingParams
from dsjax.engine.request import Request

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PAGE = 64


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> Iterator[LLM]:
    llm = make_llm()
    llm.engine.forget_prefixes()
    yield llm
    llm.engine.forget_prefixes()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 256, length).tolist()


def computed(llm: LLM, action: Callable[[], list[list[int]]]) -> tuple[list[list[int]], int]:
    """The tokens that `action` gives, and how many places of steps it took to compute them."""
    before = llm.engine.counts.tokens
    return action(), llm.engine.counts.tokens - before


def generate(llm: LLM, *prompts: list[int]) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 4 * PAGE + 1])
def test_the_same_prompt_twice(llm: LLM, length: int):
    cold, cold_work = computed(llm, lambda: generate(llm, prompt(length)))
    warm, warm_work = computed(llm, lambda: generate(llm, prompt(length)))
    assert warm == cold
    assert cold_work - warm_work == (length - 1) // PAGE * PAGE


def test_logits_over_a_cached_prefix(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """A long prompt once, then with one token more: the logits that it samples from, against a cold start."""
    tokens = prompt(4 * PAGE + 1)
    cold = llm.logits(tokens)[-1]
    llm.engine.forget_prefixes()
    generate(llm, tokens[:-1])
    results, dispatch = [], llm.engine.runner.dispatch
    monkeypatch.setattr(llm.engine.runner, "dispatch", lambda step: results.append(dispatch(step)) or results[-1])
    request = Request.create("warm", tokens, SamplingParams(temperature=0, max_tokens=1), llm.engine.limits)
    llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    assert request.cached_tokens == 4 * PAGE
    assert np.abs(llm.engine.runner.logits(results[-1], 1)[0] - cold).max() < 1e-5 * np.abs(cold).max()


def test_in_another_order_and_after_eviction(llm: LLM):
    """Prompts that share beginnings and together fill the pool of 7 pages several times."""
    prompts = [prompt(150, seed) for seed in range(4)]
    prompts += [p[:64] + q[64:140] for p, q in zip(prompts, reversed(prompts), strict=True)]
    cold = {}
    for number, one in enumerate(prompts):
        llm.engine.forget_prefixes()
        cold[number] = generate(llm, one)[0]
    for order in (range(8), reversed(range(8)), [5, 1, 4, 0, 7, 3, 6, 2]):
        for number in order:
            assert generate(llm, prompts[number])[0] == cold[number]
    assert llm.engine.scheduler.pools["latent"].evicted > 0


def test_answers_tell_what_was_cached(llm: LLM):
    found = [answer.cached_tokens for answer in llm.generate([prompt(100, 1), prompt(200), prompt(200)], GREEDY)]
    assert found[0] + found[1] == 0
    assert found[2] > 0
    assert llm.generate(prompt(200), GREEDY)[0].cached_tokens == 3 * PAGE


@pytest.mark.parametrize("options", [{"plan": "piece"}, {"plan": "layer"}, {"plan": "step"}, {"tp": 2}], ids=str)
def test_identical_prompts_at_once(make_llm: Callable[..., LLM], options: dict):
    """Garbled in a public bug report: copies of one prompt. Pages are shared in the very step that fills them."""
    llm = make_llm(**options)
    llm.engine.forget_prefixes()
    [cold] = generate(llm, prompt(130))
    llm.engine.forget_prefixes()
    together, work = computed(llm, lambda: generate(llm, *[prompt(130)] * 6))
    assert together == [cold] * 6
    assert work < 2 * 130 + 6 * 6, "most of it was shared"


def test_preempted_requests_give_the_tokens_that_they_give_alone(llm: LLM):
    """Three requests of 30 + 200 tokens want 12 pages of 7."""
    params = [SamplingParams(temperature=0.9, seed=seed, max_tokens=200, ignore_eos=True) for seed in range(3)]
    prompts = [prompt(30, seed) for seed in range(3)]
    preemptions = llm.engine.scheduler.preemptions
    together = [answer.token_ids for answer in llm.generate(prompts, params)]
    assert llm.engine.scheduler.preemptions > preemptions
    llm.engine.forget_prefixes()
    assert together == [llm.generate(*pair)[0].token_ids for pair in zip(prompts, params, strict=True)]


def test_without_prefix_cache(make_llm: Callable[..., LLM]):
    llm = make_llm(prefix_cache=False)
    cold, cold_work = computed(llm, lambda: generate(llm, prompt(130)))
    warm, warm_work = computed(llm, lambda: generate(llm, prompt(130)))
    assert (warm, warm_work) == (cold, cold_work)


def test_a_conversation_reuses_its_own_answers(llm: LLM):
    first = prompt(60)
    [answer] = llm.generate([first], SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
    turn = [*first, *answer.token_ids, 9, 9]
    warm, work = computed(llm, lambda: generate(llm, turn))
    assert work < len(turn) - 2 * PAGE + len(warm[0])
    llm.engine.forget_prefixes()
    assert generate(llm, turn) == warm
