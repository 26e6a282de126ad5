"""The scheduler without a device: order, budgets, admission, and random histories in which nothing may be lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.cache.kinds import PageKind
from dsjax.engine.request import Limits, Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler import Scheduler, Step, Update
from dsjax.errors import RequestError

EOS = 1


def make_scheduler(pages: int = 8, rows: int = 4, step_tokens: int = 16) -> Scheduler:
    return Scheduler([PageKind("latent", ())], {"latent": pages}, rows, step_tokens, {EOS})


def make_request(id: str, prompt: int, max_tokens: int, pages: int = 8, ignore_eos: bool = False) -> Request:
    limits = Limits(vocab_size=100, max_model_len=10_000, cache_tokens=64 * pages)
    return Request.create(id, [5] * prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos), limits)


def shape(step: Step | None) -> list[tuple[str, int, int, bool]]:
    return [(c.request.id, c.start, c.length, c.samples) for c in step.chunks] if step else []


def test_chunked_prefill_mixes_with_decode_tokens_first():
    scheduler = make_scheduler()
    scheduler.add(make_request("long", 20, 3))
    scheduler.add(make_request("short", 3, 3))
    assert shape(scheduler.schedule()) == [("long", 0, 16, False)]
    assert shape(scheduler.schedule()) == [("long", 16, 4, True), ("short", 0, 3, True)]
    scheduler.add(make_request("late", 30, 2))
    step = scheduler.schedule()
    assert shape(step) == [("long", 20, 1, True), ("short", 3, 1, True), ("late", 0, 14, False)]
    assert step is not None
    assert (step.num_decode, step.is_decode) == (2, False)


def test_a_last_chunk_of_one_token_is_a_decode_token():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 17, 2))
    scheduler.schedule()
    scheduler.add(make_request("b", 5, 2))
    assert shape(scheduler.schedule()) == [("a", 16, 1, True), ("b", 0, 5, True)]


def test_no_more_is_scheduled_than_may_be_produced():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2, 2))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.schedule() is None
    assert first is not None
    assert second is not None
    assert scheduler.collect(first, [7])[0].finish_reason is None
    assert scheduler.collect(second, [8])[0].finish_reason == "length"
    assert not scheduler.has_work


def test_end_of_text_drops_the_token_already_in_flight():
    scheduler = make_scheduler()
    request = make_request("a", 2, 10)
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert scheduler.collect(first, [EOS]) == [Update(request, [EOS], "stop")]
    assert scheduler.collect(second, [7]) == []
    assert request.outputs == [EOS]
    assert scheduler.pools["latent"].unreserved == 8


def test_ignore_eos():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2, 2, ignore_eos=True))
    step = scheduler.schedule()
    assert step is not None
    assert scheduler.collect(step, [EOS])[0].finish_reason is None


def test_admission_waits_for_rows_and_for_pages():
    scheduler = make_scheduler(pages=4, rows=2, step_tokens=128)
    scheduler.add(make_request("a", 64, 65))  # stores 128 tokens: 2 pages
    scheduler.add(make_request("b", 64, 66))  # stores 129 tokens: 3 pages
    scheduler.add(make_request("c", 3, 2))
    scheduler.schedule()
    assert [request.id for request in scheduler.running] == ["a"]
    assert [request.id for request in scheduler.waiting] == ["b", "c"], "nobody overtakes the first in line"
    scheduler.abort("a")
    scheduler.schedule()
    assert [request.id for request in scheduler.running] == ["b", "c"]


def test_open_ids_are_unique():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2, 2))
    with pytest.raises(RequestError, match="'a' is still open"):
        scheduler.add(make_request("a", 2, 2))
    scheduler.abort("a")
    scheduler.add(make_request("a", 2, 2))


def test_abort_while_waiting_prefilling_and_decoding():
    scheduler = make_scheduler()
    for id, prompt in (("decoding", 2), ("prefilling", 40), ("waiting", 300)):
        scheduler.add(make_request(id, prompt, 5))
    step = scheduler.schedule()
    assert step is not None
    for id in ("decoding", "prefilling", "waiting"):
        update = scheduler.abort(id)
        assert update is not None
        assert update.finish_reason == "abort"
        assert scheduler.abort(id) is None
    assert scheduler.collect(step, [9]) == []
    assert not scheduler.has_work
    assert scheduler.pools["latent"].unreserved == 8


REQUESTS = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=12)
EVENTS = st.lists(st.tuples(st.sampled_from(["step", "step", "step", "abort"]), st.integers(0, 11)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(REQUESTS, EVENTS, st.integers(7, 40), st.integers(0, 2**32))
def test_random_histories(sizes: list[tuple[int, int]], events: list[tuple[str, int]], step_tokens: int, seed: int):
    """Every request ends once; tokens come in order without gaps; pages never overlap; all is free in the end."""
    scheduler = make_scheduler(pages=7, rows=3, step_tokens=step_tokens)
    requests = [make_request(str(i), *size, pages=7) for i, size in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
    finished: dict[str, str] = {}
    computed = dict.fromkeys(range(len(requests)), 0)
    pending: Step | None = None

    def note(updates: list[Update]) -> None:
        for update in updates:
            if update.finish_reason is not None:
                assert update.request.id not in finished
                finished[update.request.id] = update.finish_reason

    def step() -> None:
        nonlocal pending
        scheduled = scheduler.schedule()
        if pending is not None:
            note(scheduler.collect(pending, [seed % 3 for _ in pending.sampling]))
        pending = scheduled
        if scheduled is None:
            return
        assert scheduled.num_tokens <= step_tokens
        for chunk in scheduled.chunks:
            assert chunk.start == computed[int(chunk.request.id)]
            computed[int(chunk.request.id)] += chunk.length
        rows = [request.row for request in scheduler.running]
        assert len(set(rows)) == len(rows)
        pages = [page for request in scheduler.running for page in request.pages["latent"]]
        assert len(set(pages)) == len(pages)
        for request in scheduler.running:
            assert len(request.pages["latent"]) * 64 >= request.computed

    for event, number in events:
        if event == "step":
            step()
        elif (update := scheduler.abort(str(number))) is not None:
            note([update])
    for _ in range(2000):
        if not scheduler.has_work:
            break
        step()
    assert set(finished) == {request.id for request in requests}
    for request in requests:
        if finished[request.id] == "length":
            assert len(request.outputs) == request.max_tokens
    assert scheduler.pools["latent"].unreserved == 7
    assert sorted(scheduler._free_rows) == [0, 1, 2]
