"""Deterministic mode: a request's logits and tokens are the same bits whatever else runs, and whatever the plan."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from dsjax import LLM, SamplingParams
from dsjax.engine.logprobs import TokenLogprobs
from dsjax.engine.options import EngineOptions
from dsjax.engine.request import Request
from dsjax.errors import OptionError
from dsjax.segments import Call, Segment, cut
from dsjax.sharding import make_mesh
from tests.conftest import GOLDEN
from tests.test_golden import TOLERANCE, golden, logit_error

# 32 requests at once, in steps of 64 tokens.
OPTIONS = {"deterministic": True, "token_buckets": [64], "max_num_seqs": 32, "kv_tokens": 4096}
DEPLOYMENTS = [
    ("v3", {"plan": "step"}),
    ("v3", {"plan": "step", "dtype": "bfloat16"}),
    ("v3", {"plan": "layer", "dtype": "bfloat16"}),
    ("v2_lite", {"plan": "step"}),
    ("v2_lite", {"plan": "piece"}),
]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.2, top_k=50, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True, logprobs=3)
COMPANY = [
    GREEDY,
    RANDOM,
    replace(RANDOM, top_k=0, min_p=0.1, presence_penalty=0.5, logit_bias={7: 3.0}),
    replace(GREEDY, repetition_penalty=1.3, allowed_token_ids=list(range(2, 100)), prompt_logprobs=2),
]


class Answer(NamedTuple):
    """What a request got: its tokens, the logits that each was chosen from, and how much of its prompt was cached."""

    tokens: list[int]
    logits: np.ndarray
    logprobs: list[TokenLogprobs]
    cached_tokens: int | None

    def assert_same(self, other: "Answer") -> None:
        assert self.tokens == other.tokens
        assert self.logprobs == other.logprobs
        np.testing.assert_array_equal(self.logits, other.logits)


@pytest.fixture(params=DEPLOYMENTS, ids=lambda deployment: "-".join([deployment[0], *deployment[1].values()]))
def llm(request: pytest.FixtureRequest, make_llm: Callable[..., LLM]) -> LLM:
    case, options = request.param
    llm = make_llm(case, **OPTIONS, **options)
    llm.engine.forget_prefixes()
    return llm


@pytest.fixture(scope="session")
def first_answers() -> dict[tuple, Answer]:
    """The first answer seen per checkpoint, dtype and parameters: those of all other plans must be the same."""
    return {}


def prompt(number: int, length: int = 70) -> list[int]:
    """Random tokens: by default more than a page of them, so that a prefix can be cached."""
    return np.random.default_rng(number).integers(2, 256, length).tolist()


def ask(llm: LLM, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Answer]:
    """The answers to requests that are added in the given order."""
    engine, logits, logprobs = llm.engine, defaultdict(list), defaultdict(list)
    dispatch = engine.runner.dispatch

    def keep_logits(step):
        result = dispatch(step)
        for pick, row in zip(step.picks, engine.runner.logits(result, len(step.picks)), strict=True):
            if pick.target is None:
                logits[pick.request.id].append(row)
        return result

    open_requests = [Request.create(str(i), *request, engine.limits) for i, request in enumerate(requests)]
    engine.runner.dispatch = keep_logits
    try:
        for request in open_requests:
            engine.add(request)
        while engine.has_work:
            for update in engine.step():
                logprobs[update.request.id] += update.logprobs or []
    finally:
        engine.runner.dispatch = dispatch
    return [Answer(r.outputs, np.stack(logits[r.id]), logprobs[r.id], r.cached_tokens) for r in open_requests]


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_alone_and_in_company(llm: LLM, params: SamplingParams, first_answers: dict[tuple, Answer]):
    """Alone, then at a random place among 1, 3 and 31 others; in every plan; from a cold cache and a warm one."""
    [alone] = ask(llm, [(prompt(0), params)])
    model = llm.engine.runner.blueprint.model
    first_answers.setdefault((model.config, model.dtype, params), alone).assert_same(alone)
    rng = np.random.default_rng(5)
    for others in (1, 3, 31):
        crowd = [(prompt(i, int(rng.integers(1, 90))), COMPANY[i % len(COMPANY)]) for i in range(1, others + 1)]
        place = rng.integers(others + 1)
        answer = ask(llm, [*crowd[:place], (prompt(0), params), *crowd[place:]])[place]
        answer.assert_same(alone)
        assert answer.cached_tokens == 64


def test_generated_tokens_as_prompt(llm: LLM):
    """Teacher-forced in one chunk, in odd ones, and token by token: the logits that the tokens were chosen from."""
    [answer] = ask(llm, [(prompt(0), GREEDY)])
    tokens = prompt(0) + answer.tokens[:-1]
    for chunk_tokens in (32, 7, 1):
        logits = llm.logits(tokens, chunk_tokens)
        np.testing.assert_array_equal(logits[len(prompt(0)) - 1 :], answer.logits)


def test_preempted_requests(make_llm: Callable[..., LLM]):
    """More than the cache holds: the last ones are preempted, and their tokens computed again as prompt."""
    llm = make_llm("v3", plan="step", **OPTIONS)
    requests = [(prompt(i, 60), replace(RANDOM, seed=i, max_tokens=140)) for i in range(20)]
    alone = [ask(llm, [request])[0] for request in requests[-2:]]
    llm.engine.forget_prefixes()
    before = llm.engine.scheduler.preemptions
    together = ask(llm, requests)[-2:]
    assert llm.engine.scheduler.preemptions > before
    for answer, expected in zip(together, alone, strict=True):
        answer.assert_same(expected)


def test_one_body_and_one_tail_serve_all(make_llm: Callable[..., LLM]):
    runner = make_llm("v3", plan="step", **OPTIONS).engine.runner
    assert {key.kind for key in runner.programs} >= {"decode", "tail"}
    assert [key.bucket for key in runner.programs if key.kind in ("decode", "mixed", "tail")] == [64, 32]


def test_max_num_seqs_changes_no_bit(make_llm: Callable[..., LLM]):
    many, few = (make_llm("v3", plan="step", **OPTIONS | {"max_num_seqs": rows}) for rows in (32, 3))
    assert few.engine.runner.rows > few.engine.scheduler.rows
    np.testing.assert_array_equal(few.logits(prompt(0)), many.logits(prompt(0)))
    together = ask(few, [(prompt(i), GREEDY) for i in range(5)])
    for answer, expected in zip(together, ask(many, [(prompt(i), GREEDY) for i in range(5)]), strict=True):
        answer.assert_same(expected)


@pytest.mark.parametrize("case", ["v3", "v2_lite"])
def test_golden_logits(make_llm: Callable[..., LLM], case: str):
    expected = golden(case)
    logits = make_llm(case, plan="step", **OPTIONS).logits(expected["tokens"].tolist())
    assert logit_error(logits, expected["logits"]) < TOLERANCE


def test_other_modes_differ(make_llm: Callable[..., LLM]):
    """So that the tests above can fail: without the option, a chunk and single tokens give other bits."""
    llm = make_llm("v3", plan="step")
    chunked, single = (llm.logits(prompt(0), chunk_tokens) for chunk_tokens in (3, 1))
    assert not np.array_equal(chunked, single)


class Square(nnx.Module):
    gives = ("y",)

    def __call__(self, x: jax.Array):
        return (x * x,)


class Subtract(nnx.Module):
    gives = ("z",)

    def __call__(self, x: jax.Array, y: jax.Array):
        return (y - x,)


def square_less_x(plan: str, deterministic: bool) -> np.ndarray:
    """x * x - x, by two segments that a compiler would make one fused multiply-add of."""
    calls = [Call(Segment.of("square", Square())), Call(Segment.of("subtract", Subtract()))]
    named = {"x": jax.device_put(np.random.default_rng(0).normal(size=1000).astype(np.float32))}
    for link in cut(calls, plan, ["z"]):
        run = replace(link.chain, deterministic=deterministic).sharded(make_mesh(1), "test")
        results = run(((),) * len(link.chain.segments), None, *(named[name] for name in link.chain.takes))
        named.update(zip(link.chain.gives, results, strict=True))
    return np.asarray(named["z"])


def test_segments_compute_the_same_bits_in_every_chain():
    apart = square_less_x("piece", deterministic=True)
    np.testing.assert_array_equal(square_less_x("step", deterministic=True), apart)
    assert not np.array_equal(square_less_x("step", deterministic=False), apart)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"plan": "off"}, "plan 'off'"),
        ({"token_buckets": [32, 64]}, "one bucket"),
        ({"row_buckets": [8, 16]}, "one bucket"),
        ({"token_buckets": [16]}, "multiple of 32"),
        ({"max_batched_tokens": 48}, "multiple of 32"),
    ],
)
def test_options_that_contradict_it(options: dict, says: str):
    with pytest.raises(OptionError, match=says):
        EngineOptions(deterministic=True, **options)


def test_more_requests_than_a_step_has_room_for():
    with pytest.raises(OptionError, match="at most 16 requests"):
        LLM(GOLDEN / "v3", deterministic=True, max_num_seqs=17)
