"""The padding contract: real rows are bit-identical whatever stands in pad places and unused pages."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax import LLM, SamplingParams
from dsjax.aot.planner import ProgramKey, body_shape
from dsjax.engine.logprobs import Picked
from dsjax.engine.packing import pack_step
from dsjax.engine.request import Request
from dsjax.engine.scheduled import Step
from dsjax.step.layout import StepShape, step_layout

BUCKET = 32
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@dataclass
class Harness:
    """Runs single steps of an LLM's programs on a cache that the test may poison."""

    llm: LLM

    def scheduled(self, prompts: list[list[int]]) -> Step:
        engine = self.llm.engine
        for number, prompt in enumerate(prompts):
            engine.add(Request.create(f"padding-{number}", prompt, GREEDY, engine.limits))
        step = engine.scheduler.schedule()
        assert step is not None
        return step

    def run(self, step: Step, poison: bool) -> np.ndarray:
        """Logits of the step's samples. `poison`: garbage in every pad place and NaN in every page."""
        runner = self.llm.engine.runner
        key = ProgramKey("decode", runner.rows) if step.is_decode else ProgramKey("mixed", BUCKET)
        shape = body_shape(key, runner.rows)
        packed = pack_step(step, shape, runner.kinds)
        if poison:
            packed = self.with_garbage(packed, shape, step.num_tokens)
            fill(runner.executor.state["pools"], np.nan)
        results = runner.executor.run(runner.programs[key], {"packed": packed})
        head = runner.programs[ProgramKey("logits", runner.rows)]
        logits = runner.executor.run(head, {"hidden": results["hidden"]})["logits"]
        return np.asarray(logits)[: len(step.picks)]

    def with_garbage(self, packed: np.ndarray, shape: StepShape, used: int) -> np.ndarray:
        """Token ids and positions of pad places replaced by nonsense; their rows stay none."""
        packed = packed.copy()
        fields = step_layout(shape, self.llm.engine.runner.kinds).unpack(packed)
        fields["token_ids"][used:] = 2**31 - 1
        fields["token_positions"][used:] = 10**9
        return packed

    def forget(self, count: int) -> None:
        for number in range(count):
            self.llm.engine.abort(f"padding-{number}")
        self.llm.engine.forget_prefixes()
        fill(self.llm.engine.runner.executor.state["pools"], 0.0)


def fill(pools: dict[str, jax.Array], value: float) -> None:
    """Fill every pool, keeping its place on the device."""
    for name, pool in pools.items():
        pools[name] = jax.device_put(jnp.full(pool.shape, value, pool.dtype), pool.sharding)


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(2, 256, length).tolist() for length in lengths]


@pytest.fixture(scope="module", params=["piece", "layer", "step"])
def harness(request: pytest.FixtureRequest, make_llm) -> Harness:
    return Harness(make_llm(plan=request.param))


@pytest.mark.parametrize("lengths", [[1], [1, 1], [2], [1, 2], [1, 1, 3], [BUCKET - 1], [17, 14]], ids=str)
def test_garbage_in_pads_and_nan_in_unused_pages(harness: Harness, lengths: list[int]):
    """1, 2 and bucket - 1 real tokens, in decode bodies (all prompts of one token) and in mixed ones."""
    step = harness.scheduled(prompts(lengths))
    clean, poisoned = harness.run(step, poison=False), harness.run(step, poison=True)
    harness.forget(len(lengths))
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(clean, poisoned)


def test_after_a_long_request_in_the_same_buckets(harness: Harness):
    [prompt] = prompts([5])
    step = harness.scheduled([prompt])
    before = harness.run(step, poison=False)
    harness.forget(1)
    harness.llm.generate(prompts([200, 13, 90]), GREEDY)
    step = harness.scheduled([prompt])
    after = harness.run(step, poison=False)
    harness.forget(1)
    np.testing.assert_array_equal(before, after)


def test_decode_tokens_over_cached_context_beside_nan_pages(make_llm):
    """Second step: two requests with context decode; everything that neither of them has stored is NaN."""
    harness = Harness(make_llm())
    step = harness.scheduled(prompts([20, 3]))
    harness.run(step, poison=False)
    engine = harness.llm.engine
    engine.scheduler.collect(
        step, [Picked(7, None), Picked(8, None)]
    )  # known to the host, so that the step may be run twice
    second = engine.scheduler.schedule()
    assert second is not None
    assert second.is_decode
    clean = harness.run(second, poison=False)
    keep_only_stored(engine.runner.executor.state["pools"], engine.scheduler.running)
    poisoned = harness.run(second, poison=False)
    harness.forget(2)
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(clean, poisoned)


def keep_only_stored(pools: dict[str, jax.Array], requests: list[Request]) -> None:
    """NaN wherever no request has stored a token."""
    pool = np.asarray(pools["latent"])
    kept = np.full_like(pool, np.nan)
    for request in requests:
        for position in range(request.computed):
            place = request.pages["latent"][position // 64], position % 64
            kept[:, *place] = pool[:, *place]
    pools["latent"] = jax.device_put(jnp.asarray(kept), pools["latent"].sharding)


def test_nan_hidden_rows_stay_in_their_places(make_llm):
    """Pad rows of the residual stream set to NaN after the embedding, through every piece of every layer."""
    llm = make_llm(plan="piece")
    harness = Harness(llm)
    step = harness.scheduled(prompts([3, 6]))
    clean = harness.run(step, poison=False)
    program = llm.engine.runner.programs[ProgramKey("mixed", BUCKET)]
    embed = next(i for i, dispatch in enumerate(program.dispatches) if dispatch.gives == ("x",))
    original = program.dispatches[embed]

    def embed_with_nan(*arguments: Any) -> tuple:
        (x,) = original.executable(*arguments)
        return (x.at[step.num_tokens :].set(jnp.nan),)

    program.dispatches[embed] = original._replace(executable=embed_with_nan)
    try:
        poisoned = harness.run(step, poison=False)
    finally:
        program.dispatches[embed] = original
        harness.forget(2)
    np.testing.assert_array_equal(clean, poisoned)
