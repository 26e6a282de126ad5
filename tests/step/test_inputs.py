"""What the host packs is what the device unpacks, over random steps."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.cache.kinds import PageKind
from dsjax.config import RopeConfig
from dsjax.engine.logprobs import Picked
from dsjax.engine.packing import pack_step
from dsjax.engine.request import Limits, Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler import Scheduler
from dsjax.step.inputs import NO_SLOT, Prepare
from dsjax.step.layout import NONE, StepShape

ROWS, TOKENS = 4, 48
KIND = PageKind("latent", ())
SHAPE = StepShape(TOKENS, ROWS, has_prefill=True)


@cache
def prepare():
    piece = Prepare(
        SHAPE, (KIND,), (("main", RopeConfig(4, 100.0)),), plan_decode=lambda _, __, lengths: jnp.sort(lengths)
    )
    return jax.jit(lambda *arguments: piece(*arguments))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=6), st.integers(5, TOKENS))
def test_slots_lengths_chunks_and_picks(lengths: list[int], step_tokens: int):
    """Every token gets the slot of its place in the row's pages; decode and prefill cover all tokens once.

    Short prompts are scored. The plan of decode rows is made of their lengths.
    """
    scheduler = Scheduler([KIND], {"latent": 30}, ROWS, step_tokens, ())
    limits = Limits(vocab_size=1000, max_model_len=400, cache_tokens=1920)
    for i, length in enumerate(lengths):
        params = SamplingParams(max_tokens=3, prompt_logprobs=0 if length < 20 else None)
        scheduler.add(Request.create(str(i), [10 + i] * length, params, limits))
    tables, last = {"latent": jnp.zeros((ROWS, 7), jnp.int32)}, jnp.arange(900, 900 + ROWS)
    while (step := scheduler.schedule()) is not None:
        packed = pack_step(step, SHAPE, (KIND,))
        tables, inputs, samples = prepare()(packed, tables, last)
        inputs, samples = jax.tree.map(np.asarray, (inputs, samples))
        check_tokens(step, inputs)
        check_samples(step, samples)
        scheduler.collect(step, [Picked(5, None)] * len(step.picks))


def check_tokens(step, inputs) -> None:
    place, covered = 0, np.zeros(TOKENS, int)
    for chunk in step.chunks:
        pages = chunk.request.pages["latent"]
        for position in range(chunk.start, chunk.start + chunk.length):
            assert inputs.slots["latent"][place] == pages[position // 64] * 64 + position % 64
            known = position < len(chunk.request.prompt) + len(chunk.request.outputs)
            ids = [*chunk.request.prompt, *chunk.request.outputs]
            assert inputs.token_ids[place] == (ids[position] if known else 900 + chunk.request.row)
            place += 1
    covered[:ROWS] += np.asarray(inputs.decode.lengths) > 0
    np.testing.assert_array_equal(inputs.decode.plan, np.sort(inputs.decode.lengths))
    for start, length in zip(inputs.prefill.starts, inputs.prefill.lengths, strict=True):
        covered[int(start) : int(start) + int(length)] += 1
    np.testing.assert_array_equal(covered, np.arange(TOKENS) < place)
    np.testing.assert_array_equal(inputs.valid, np.arange(TOKENS) < place)
    assert (np.asarray(inputs.slots["latent"][place:]) == NO_SLOT).all()


def check_samples(step, samples) -> None:
    """Each pick stands behind its token; only sampled tokens become the last one of their row."""
    rows = [chunk.request.row for chunk in step.chunks for _ in range(chunk.length)]
    positions = [chunk.start + i for chunk in step.chunks for i in range(chunk.length)]
    count = len(step.picks)
    for place, pick in enumerate(step.picks):
        assert samples.tokens[place] == pick.token
        assert samples.rows[place] == rows[pick.token] == pick.request.row
        assert samples.positions[place] == positions[pick.token] + 1
        assert samples.targets[place] == (NONE if pick.target is None else pick.target)
        assert samples.last_rows[place] == (pick.request.row if pick.target is None else ROWS)
    assert (np.asarray(samples.rows[count:]) == ROWS).all()
    assert (np.asarray(samples.last_rows[count:]) == ROWS).all()
