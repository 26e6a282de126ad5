"""Failures that users of other engines reported in public, replayed here. Each test is named after what it protects.

Compared are greedy tokens, and logits where a wrong token might be luck; what is right comes from runs of the same
prompts one at a time in the largest bucket, or op by op, each from an empty cache.
"""

from collections.abc import Callable

import numpy as np
import pytest

from dsjax import LLM, SamplingParams
from dsjax.engine.request import Request
from tests.test_golden import TOLERANCE, golden, logit_error

BUCKETS = (16, 64, 256)
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(max_num_seqs=8, token_buckets=list(BUCKETS), max_model_len=1024, kv_tokens=4096)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(2, 256, length).tolist()


def answers(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    llm.engine.forget_prefixes()
    return [answer.token_ids for answer in llm.generate(prompts, params)]


def alone(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [answers(llm, one, params=params)[0] for one in prompts]


def last_logits(llm: LLM, tokens: list[int], step_tokens: int) -> np.ndarray:
    """The logits that a prompt's first token is sampled from, prefilled in chunks of `step_tokens`."""
    llm.engine.forget_prefixes()
    scheduler, runner = llm.engine.scheduler, llm.engine.runner
    request = Request.create("probe", tokens, SamplingParams(max_tokens=1), llm.engine.limits)
    llm.engine.add(request)
    while (step := scheduler.schedule(step_tokens)) is not None:
        result = runner.dispatch(step)
    llm.engine.abort("probe")
    return runner.logits(result, 1)[0]


def test_a_large_bucket_after_every_smaller_one(llm: LLM):
    """Later buckets reused memory of earlier ones (sglang 37606): 193 tokens go to the bucket of 256."""
    tokens = prompt(193)
    expected = last_logits(llm, tokens, 256)
    for smaller in (3, 16, 40, 64):
        answers(llm, prompt(smaller))
        assert np.array_equal(last_logits(llm, tokens, 256), expected), f"after {smaller} tokens"


@pytest.mark.parametrize("bucket", BUCKETS)
def test_one_token_more_than_a_bucket_over_three_requests(llm: LLM, bucket: int):
    """The last query offset was not the padded total (sglang 21452)."""
    total = bucket + 1
    prompts = [prompt(total // 3, 1), prompt(total // 3, 2), prompt(total - 2 * (total // 3), 3)]
    assert answers(llm, *prompts) == alone(llm, *prompts)


def test_copies_of_one_prompt_run_together(llm: LLM):
    """Garbled when identical prompts ran together (vllm 41331)."""
    assert answers(llm, *[prompt(75)] * 32) == alone(llm, prompt(75)) * 32


def test_a_prompt_between_buckets_while_another_decodes(llm: LLM):
    """342 tokens aborted while others decoded (ATOM 1595)."""
    [expected] = alone(llm, prompt(342))
    [decoded] = alone(llm, prompt(5), params=SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    llm.engine.forget_prefixes()
    stream = llm.stream(prompt(5), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    first = next(stream).token_ids
    assert llm.generate(prompt(342), GREEDY)[0].token_ids == expected
    assert first + [token for delta in stream for token in delta.token_ids] == decoded


def test_two_prompts_replay_one_bucket_in_turn(llm: LLM):
    """Metadata was rebuilt elsewhere, so that every request read slot 0 (sglang 26019)."""
    expected = alone(llm, prompt(30, 1), prompt(30, 2))
    assert expected[0] != expected[1]
    for _ in range(3):
        assert alone(llm, prompt(30, 1), prompt(30, 2)) == expected


def test_batches_of_changing_size_with_long_then_short_requests(llm: LLM):
    """Stale positions (sglang 24401) and pad rows in the sampler (TensorRT-LLM 5058): 8, 3, 8, 1 and 4, 1, 4, 1."""
    for round_, size in enumerate((8, 3, 8, 1, 4, 1, 4, 1)):
        prompts = [prompt(200 // (1 + round_), i) for i in range(size)]
        assert answers(llm, *prompts) == alone(llm, *prompts)


@pytest.mark.parametrize("step_tokens", [256, 64, 50, 17])
def test_a_prompt_in_chunks_and_in_one(llm: LLM, step_tokens: int):
    """Split prompts repeated one token (llama.cpp 26471); here against transformers."""
    expected = golden("v3")
    tokens = expected["tokens"].tolist()
    found = last_logits(llm, tokens, step_tokens)
    assert logit_error(found, expected["logits"][len(tokens) - 1]) < TOLERANCE


def test_the_first_request_and_the_two_hundredth(llm: LLM):
    """Answers drifted after a hundred requests (vllm 57064)."""
    first = answers(llm, prompt(70))
    rng = np.random.default_rng(0)
    for start in range(0, 198, 33):
        llm.generate([prompt(int(rng.integers(1, 120)), start + i) for i in range(33)], GREEDY)
    assert answers(llm, prompt(70)) == first
    scheduler = llm.engine.scheduler
    assert (scheduler.running, scheduler.waiting, scheduler._requests) == ([], [], {}), "nothing is kept of a request"


def test_one_token_is_one_token(llm: LLM):
    """max_tokens 1 gave two tokens (sglang 6017); the first chunk of a long prompt gives none."""
    for length in (1, 16, 17, 300):
        [answer] = llm.generate(prompt(length), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        assert (len(answer.token_ids), answer.finish_reason) == (1, "length")


def test_greedy_answers_alone_and_with_seven_others(llm: LLM):
    """Temperature 0 differed under concurrency (vllm 23138)."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [prompt(20 + 9 * i, i) for i in range(8)]
    assert answers(llm, *prompts, params=params) == alone(llm, *prompts, params=params)


def test_the_largest_prompt_on_a_cache_filled_to_the_brim(make_llm: Callable[..., LLM]):
    """Scratch of a long prompt ran out of memory and took the engine along (vllm-backport 94)."""
    llm = make_llm()
    limits = llm.engine.limits
    room = min(limits.cache_tokens, limits.max_model_len)
    assert len(llm.generate(prompt(room - 1), SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids) == 1
