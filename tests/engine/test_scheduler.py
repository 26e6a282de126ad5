"""The scheduler without a device: order, budgets, admission, and random histories in which nothing may be lost."""

import itertools
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.cache.kinds import PageKind
from dsjax.engine.logprobs import Picked
from dsjax.engine.request import Limits, Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduled import Step
from dsjax.engine.scheduler import Scheduler, Update
from dsjax.errors import RequestError
from tests.engine.fake_device import Loop, answer

EOS = 1


def make_scheduler(pages: int = 8, rows: int = 4, step_tokens: int = 16) -> Scheduler:
    return Scheduler([PageKind("latent", ())], {"latent": pages}, rows, step_tokens, {EOS})


def make_request(
    id: str,
    length: int,
    max_tokens: int,
    pages: int = 8,
    token: int = 5,
    prompt=None,
    priority: int = 0,
    ignore_eos: bool = True,
    **params,
) -> Request:
    """A request whose prompt is `token`, `length` times over, unless `prompt` is given."""
    limits = Limits(vocab_size=100, max_model_len=10_000, cache_tokens=64 * pages)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **params)
    return Request.create(id, prompt or [token] * length, sampling, limits, priority)


def picked(*tokens: int) -> list[Picked]:
    return [Picked(token, None) for token in tokens]


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
    assert scheduler.collect(first, picked(7))[0].finish_reason is None
    assert scheduler.collect(second, picked(8))[0].finish_reason == "length"
    assert not scheduler.has_work


def test_end_of_text_drops_the_token_already_in_flight():
    scheduler = make_scheduler()
    request = make_request("a", 2, 10, ignore_eos=False)
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert scheduler.collect(first, picked(EOS)) == [Update(request, [EOS], "stop")]
    assert scheduler.collect(second, picked(7)) == []
    assert request.outputs == [EOS]
    assert scheduler.pools["latent"].available == 8


def test_ignore_eos():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2, 2))
    step = scheduler.schedule()
    assert step is not None
    assert scheduler.collect(step, picked(EOS))[0].finish_reason is None


def test_admission_waits_for_rows_and_for_pages():
    scheduler = make_scheduler(pages=4, rows=2, step_tokens=128)
    scheduler.add(make_request("a", 64, 65))  # stores 128 tokens: 2 pages
    scheduler.add(make_request("b", 64, 66))  # stores 129 tokens, of which it gets room for 128 at first
    scheduler.add(make_request("c", 3, 2))
    loop = Loop(scheduler)
    loop.step()
    assert [request.id for request in scheduler.running] == ["a", "b"]
    loop.step()
    assert [request.id for request in scheduler.waiting] == ["c"], "there is no row"
    scheduler.abort("a")
    loop.step()
    assert [request.id for request in scheduler.running] == ["b", "c"]


def test_nobody_overtakes_the_first_in_line():
    scheduler = make_scheduler(pages=4, rows=3, step_tokens=256)
    for id, prompt in (("a", 150), ("b", 100), ("c", 3)):
        scheduler.add(make_request(id, prompt, 65, pages=4))
    scheduler.schedule()
    assert [request.id for request in scheduler.running] == ["a"]
    assert [request.id for request in scheduler.waiting] == ["b", "c"]


def test_the_lowest_rank_makes_way_and_comes_back_to_its_cached_pages():
    scheduler = make_scheduler(pages=4, rows=2, step_tokens=256)
    first, second = make_request("first", 30, 220, pages=4), make_request("second", 30, 140, pages=4, token=6)
    loop = Loop(scheduler)
    for request in (first, second):
        scheduler.add(request)
    for _ in range(110):
        loop.step()
    assert first.row is not None
    assert scheduler.waiting == [second]
    assert scheduler.preemptions == 1
    loop.run_dry(500)
    assert first.outputs == answer(first.prompt, 220)
    assert second.outputs == answer(second.prompt, 140)
    assert second.cached_tokens == 0, "usage tells what was cached when it came"


def test_higher_priority_goes_first_and_is_preempted_last():
    scheduler = make_scheduler(pages=4, rows=2, step_tokens=256)
    requests = {name: make_request(name, 64, 66, pages=4, priority=level) for name, level in PRIORITIES.items()}
    for request in requests.values():
        scheduler.add(request)
    assert [request.id for request in scheduler.waiting] == ["high", "middle", "low", "low too"]
    loop = Loop(scheduler)
    loop.run_dry(500)
    assert list(loop.finished) == ["high", "middle", "low", "low too"]


PRIORITIES = {"low": 0, "middle": 1, "low too": 0, "high": 5}


def test_a_higher_priority_takes_rows_and_pages_from_lower_ones():
    scheduler = make_scheduler(pages=6, rows=2, step_tokens=512)
    loop = Loop(scheduler)
    low = [make_request(f"low {i}", 100, 80, pages=6, token=i) for i in range(2)]
    for request in low:
        scheduler.add(request)
    for _ in range(5):
        loop.step()
    same = make_request("same", 10, 3, pages=6)
    high = make_request("high", 200, 3, pages=6, token=9, priority=1)
    for request in (same, high):
        scheduler.add(request)
    for _ in range(6):
        loop.step()
    assert loop.finished == {"high": "length"}, "both had to leave: one for its row, the other for its pages"
    assert scheduler.preemptions == 2
    loop.run_dry(300)
    assert list(loop.finished) == ["high", "low 0", "low 1", "same"], "an equal priority takes nothing"
    for request in (*low, same, high):
        assert request.outputs == answer(request.prompt, request.max_tokens)


def test_prompts_are_scored_at_full_speed_while_others_wait():
    scheduler = make_scheduler(pages=12, rows=4, step_tokens=100)
    loop = Loop(scheduler)
    scored = make_request("scored", 30, 1, pages=12, prompt_logprobs=0)
    scheduler.add(scored)
    for i in range(20):
        scheduler.add(make_request(f"other {i}", 5, 30, pages=12, token=i))
    for _ in range(10):
        loop.step()
        assert loop.last is not None
        assert len(loop.last.picks) <= 4
    assert loop.finished == {"scored": "length"}, "30 places at 4 a step, and one step until the last is collected"


def test_deadlines_end_requests_wherever_they_are():
    scheduler = make_scheduler(rows=1)
    running, waiting, patient = (make_request(id, 3, 20) for id in ("running", "waiting", "patient"))
    running.deadline, waiting.deadline = 10.0, 20.0
    for request in (running, waiting, patient):
        scheduler.add(request)
    loop = Loop(scheduler)
    loop.step()
    assert scheduler.expire(now=9.9) == []
    assert [(u.request.id, u.finish_reason) for u in scheduler.expire(now=10.0)] == [("running", "timeout")]
    loop.step()
    assert [request.id for request in scheduler.running] == ["waiting"]
    assert [u.request.id for u in scheduler.expire(now=99.0)] == ["waiting"]
    early = make_request("early", 3, 2)
    early.deadline = 1e9
    scheduler.add(early)
    loop.run_dry(100)
    assert loop.finished == {"patient": "length", "early": "length"}
    assert not scheduler._with_deadline, "who ends before the deadline is not kept until then"


def test_eight_requests_that_each_want_half_the_pool_all_finish():
    """Endless retraction in a public bug report: short prompts, max_tokens of half the pool."""
    scheduler = make_scheduler(pages=8, rows=8, step_tokens=64)
    requests = [make_request(str(i), 10, 256, token=i) for i in range(8)]
    for request in requests:
        scheduler.add(request)
    loop = Loop(scheduler)
    loop.run_dry(4000)
    for request in requests:
        assert request.outputs == answer(request.prompt, 256)


def test_a_request_that_just_fills_the_pool_ends():
    """Looped for ever in a public bug report: a pool of 4096 tokens, 10 tokens of prompt, max_tokens 4084."""
    scheduler = make_scheduler(pages=64, rows=4, step_tokens=64)
    scheduler.add(make_request("a", 10, 4084, pages=64))
    loop = Loop(scheduler)
    loop.run_dry(4200)
    assert loop.finished == {"a": "length"}


@pytest.mark.parametrize("length", [63, 64, 65, 4 * 64 + 1])
def test_a_prompt_that_comes_again_is_computed_from_its_last_page_on(length: int):
    scheduler = make_scheduler(pages=12, step_tokens=300)
    loop = Loop(scheduler)
    for id in ("cold", "warm"):
        request = make_request(id, length, 3, pages=12)
        scheduler.add(request)
        loop.run_dry(20)
        assert request.outputs == answer(request.prompt, 3)
    assert request.cached_tokens == (length - 1) // 64 * 64, "the last token is always computed"


def test_equal_prompts_that_arrive_together_share_pages():
    scheduler = make_scheduler(pages=16, step_tokens=400)
    requests = [make_request(str(i), 130, 2, pages=16) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    loop = Loop(scheduler)
    loop.step()
    assert scheduler.pools["latent"].used == 3 + 1 + 1, "two full pages are shared; the third page is everyone's own"
    loop.run_dry(10)
    assert [request.cached_tokens for request in requests] == [0, 128, 128]
    assert all(request.outputs == answer(request.prompt, 2) for request in requests)


def test_answers_are_part_of_the_next_turn():
    scheduler = make_scheduler(pages=12, step_tokens=300)
    loop = Loop(scheduler)
    first = make_request("first", 60, 70, pages=12)
    scheduler.add(first)
    loop.run_dry(100)
    turn = make_request("turn", 0, 2, pages=12, prompt=[*first.prompt, *first.outputs, 9, 9])
    scheduler.add(turn)
    loop.run_dry(100)
    assert turn.cached_tokens == 128
    assert turn.outputs == answer(turn.prompt, 2)


def test_prompts_that_are_scored_are_computed_whole_within_the_rows():
    """With 4 rows and nobody else, 4 places a step are scored or sampled; nothing of it may come from the cache."""
    scheduler = make_scheduler(pages=12, rows=4, step_tokens=100)
    loop = Loop(scheduler)
    for id in ("first", "second"):
        request = make_request(id, 10, 2, pages=12, prompt_logprobs=0)
        scheduler.add(request)
        loop.step()
        assert loop.last is not None
        assert [pick.target for pick in loop.last.picks] == request.prompt[1:5]
        loop.run_dry(20)
        assert request.cached_tokens == 0
        assert len(request.prompt_logprobs) == 9
        expected = [crc32(bytes(str((request.prompt[: i + 1], request.prompt[i + 1])), "ascii")) for i in range(9)]
        assert [-entry.logprob for entry in request.prompt_logprobs] == expected


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
    assert scheduler.collect(step, picked(9)) == []
    assert not scheduler.has_work
    assert scheduler.pools["latent"].available == 8


@st.composite
def arrivals(draw):
    """Requests that share beginnings: (prompt, max_tokens, priority, deadline, whether its prompt is scored)."""
    length = draw(st.integers(1, 200))
    family = draw(st.integers(0, 2))
    end = draw(st.integers(0, 3))
    prompt = [family] * max(length - end, 0) + [40] * min(end, length)
    deadline = draw(st.sampled_from([None, None, None, 1.0, 2.0, 3.0]))
    return prompt, draw(st.integers(1, 200)), draw(st.integers(0, 2)), deadline, draw(st.integers(0, 9)) == 0


ACTIONS = st.sampled_from(["step"] * 12 + ["abort", "expire", "fail", "add", "add", "add"])
EVENTS = st.lists(st.tuples(ACTIONS, st.integers(0, 11)), max_size=80)


@settings(max_examples=150, deadline=None)
@given(st.lists(arrivals(), min_size=1, max_size=12), EVENTS, st.integers(7, 40), st.sampled_from([7, 9]))
def test_random_histories(sizes, events, step_tokens: int, pages: int):
    """Arrivals, aborts, deadlines, preemptions and device failures in a tiny pool: every request ends exactly once,
    with the tokens that it gets alone; rows and pages are conserved; all is given back."""
    scheduler = make_scheduler(pages, rows=3, step_tokens=step_tokens)
    loop, pool, clock = Loop(scheduler), scheduler.pools["latent"], itertools.count(1.0)
    requests = [
        make_request(
            str(i),
            0,
            size,
            pages,
            prompt=prompt,
            priority=priority,
            ignore_eos=False,
            prompt_logprobs=0 if scored else None,
        )
        for i, (prompt, size, priority, _, scored) in enumerate(sizes)
        if len(prompt) + size <= 64 * pages
    ]
    for request in requests:
        request.deadline = sizes[int(request.id)][3]
    to_come = list(reversed(requests))

    def add() -> None:
        if to_come:
            scheduler.add(to_come.pop())

    def act(action: str, number: int) -> None:
        if action == "step":
            loop.step()
        elif action == "add":
            add()
        elif action == "abort":
            loop.abort(str(number))
        elif action == "fail":
            loop.fail()
        else:
            loop.note(scheduler.expire(now=next(clock)))

    add()
    for action, number in events:
        act(action, number)
        pool.check()
        assert loop.last is None or loop.last.num_tokens <= step_tokens
        assert loop.last is None or len(loop.last.picks) <= scheduler.rows
        rows = [request.row for request in scheduler.running]
        assert len({*rows, *scheduler._free_rows}) == len(rows) + len(scheduler._free_rows) == 3
        assert scheduler.running == sorted(scheduler.running, key=lambda request: request.rank)
        assert scheduler.waiting == sorted(scheduler.waiting, key=lambda request: request.rank)
    while to_come:
        add()
    loop.run_dry(8000)
    assert set(loop.finished) == {request.id for request in requests}
    for request in requests:
        alone = answer(request.prompt, request.max_tokens, stop=[EOS])
        if loop.finished[request.id] in ("length", "stop"):
            assert request.outputs == alone
            assert request.params.prompt_logprobs is None or len(request.prompt_logprobs) == len(request.prompt) - 1
        else:
            assert request.outputs == alone[: len(request.outputs)]
    pool.check()
    assert pool.used == scheduler.lost_pages() == 0
