"""Requests join and leave steps that are launched ahead, with the tokens and states of steps that wait for the host."""

import random
from functools import partial

import pytest
import torch
from model_goldens import FOLDER
from test_decoding import RECURRENT, RINGS, ROWS, WISHES, same_state
from test_models import model_of
from test_scheduler import Desk, alone, gauges, job, prompt_of

from halfbyte import flights
from halfbyte import scheduler as scheduling
from halfbyte.decoding import DecodeStep, Drawn
from halfbyte.engine import Engine, Request
from halfbyte.flights import wants_more
from halfbyte.loading import load_model
from halfbyte.ops.dispatch import make_deterministic
from halfbyte.prefilling import prefill
from halfbyte.recordings import recordings
from halfbyte.sampling import SamplingParams
from halfbyte.scheduler import Scheduler

SLOTS, SIZES = 4, [1, 2, 4]


@pytest.fixture
def deterministic(request):
    make_deterministic(request.param)
    yield
    make_deterministic(False)


class Script:
    """Requests of all kinds, when they come and after how many tokens they are cancelled; the same each time."""

    def __init__(self, model, seed, count=24, odd=False, **more):
        rng = random.Random(seed)
        self.model, self.odd = model, odd
        self.come = sorted(rng.randrange(40) for _ in range(count))
        self.requests = [self._request(rng, i, more) for i in range(count)]
        self.cancelled = {one: rng.randint(1, 6) for one in rng.sample(self.requests, 3)}
        self.left = {}  # of each request, a cache of its own with what it left in its slot

    def _request(self, rng, i, more):
        V = self.model.vocabulary
        params = rng.choice([*WISHES, SamplingParams(temperature=1.5, top_p=0.9, seed=i)])
        prompt = rng.choices(range(V), k=rng.randint(1, 11))
        stops = frozenset(rng.sample(range(V), V // 4)) if i % 2 else frozenset()
        request = Request(prompt, rng.choice([1, 2, 3, 7, 12, 20]), params, stops, **more)
        if self.odd and i % 5 == 3:
            request.params = SamplingParams(frequency_penalty=0.5)
        if self.odd and i % 5 == 4:
            request.processors = [lambda ids, logits: logits.roll(1, -1)]
        return request

    def run(self, engine):
        """All of them to their ends, with one more new one in the free slots whenever its time has come."""
        steps, waiting = 0, list(zip(self.come, self.requests, strict=True))
        while engine.busy or waiting:
            while waiting and waiting[0][0] <= steps:
                engine.submit(waiting.pop(0)[1])
            made = engine.step()
            for request, count in self.cancelled.items():
                if len(request.made) >= count and request.finish_reason is None:
                    engine.cancel(request)
            for request in {one.request for one in made if one.request.finish_reason is not None}:
                self._check(engine, request)
            steps += 1
        assert sorted(engine.free) == list(range(engine.cache.slots)) and not engine.running
        return self

    def _check(self, engine, request):
        assert engine.cache.lengths[request.slot] == len(request.prompt) + len(request.made) - 1
        if request.keeps:
            self.left[request] = self.model.new_cache(1, 40, chunk=4)
            self.left[request].restore(0, engine.cache.snapshot(request.slot))


def engine_of(model, ahead, recorded=True):
    cache = model.new_cache(SLOTS, 40, chunk=4, padding=1)
    engine = Engine(model, cache, replays=ahead, ahead=ahead)
    if ahead:
        engine.flights.sizes = SIZES
        if recorded:
            list(recordings(engine))
    return engine


def same(one, other):
    for mine, theirs in zip(one.requests, other.requests, strict=True):
        assert (mine.made, mine.finish_reason) == (theirs.made, theirs.finish_reason)
        assert (mine in one.left) == (theirs in other.left)
        if mine in one.left:
            same_state(one.left[mine], other.left[theirs])


@pytest.fixture
def launched(monkeypatch):
    """Of every step that was launched ahead: its requests, who has left them, and who has joined them."""
    seen, real = [], flights.Flights._launch

    def noted(self, step, requests, ahead):
        if ahead:
            before = [] if self.last is None else [one for one in self.last.requests if one.finish_reason is None]
            assert all(len(one.made) + 1 < one.max_tokens for one in requests), "it takes a token that nobody wants"
            seen.append((list(requests), set(before) - set(requests), [one for one in requests if not one.made]))
        real(self, step, requests, ahead)

    monkeypatch.setattr(flights.Flights, "_launch", noted)
    return seen


@pytest.mark.parametrize("name", [RECURRENT, ROWS, RINGS])
@pytest.mark.parametrize("seed", range(2))
def test_every_request_gets_its_tokens_and_leaves_its_state(name, seed, launched):
    model = load_model(FOLDER / name)
    expected = Script(model, seed).run(engine_of(model, False))
    assert {one.finish_reason for one in expected.requests} == {"stop", "length", "cancelled"}
    same(Script(model, seed).run(engine_of(model, True)), expected)
    assert any(left for _, left, _ in launched) and any(joined for _, _, joined in launched)


@pytest.mark.parametrize("more", [{"keeps": False, "wants_logits": False}, {"odd": True}], ids=["plain", "odd"])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "unrecorded"])
def test_whatever_they_ask_for(more, recorded, launched):
    model = load_model(FOLDER / RECURRENT)
    expected = Script(model, 5, **more).run(engine_of(model, False))
    same(Script(model, 5, **more).run(engine_of(model, True, recorded)), expected)
    assert launched
    assert all(not one.processors and not one.params.penalised for requests, _, _ in launched for one in requests)


@pytest.mark.parametrize("deterministic", [True], indirect=True)
def test_where_bits_may_not_depend_on_the_batch(deterministic, launched):
    model = load_model(FOLDER / RECURRENT)
    expected = Script(model, 6).run(engine_of(model, False))
    same(Script(model, 6).run(engine_of(model, True)), expected)
    assert launched


def test_no_token_is_read_while_nothing_is_under_way(monkeypatch):
    """With a prompt after every other end, the device always has something to do."""
    model, reads = load_model(FOLDER / RECURRENT), []
    engine, real = engine_of(model, True), Drawn.tolist

    def read(drawn):
        answering = [one for one in engine.running if one.computed == len(one.prompt)]
        reads.append((engine.flights.under_way is not None, any(map(wants_more, answering))))
        return real(drawn)

    monkeypatch.setattr(Drawn, "tolist", read)
    Script(model, 7).run(engine)
    assert all(under_way for under_way, wanted in reads if wanted)
    assert sum(wanted for _, wanted in reads) > 50


def test_a_first_token_that_ends_its_request_leaves_the_prompt():
    """The step that was launched with it was for nothing."""
    model = load_model(FOLDER / RECURRENT)
    engine, cache = engine_of(model, True), model.new_cache(1, 40, chunk=4)
    prefill(model, cache, (0, [1, 2, 3]))
    (first,) = run(engine, Request([1, 2, 3], 1))
    request = Request([1, 2, 3], 9, stop_ids=frozenset([first]))
    assert run(engine, request) == [first] and request.finish_reason == "stop"
    assert engine.flights.under_way is not None and engine.flights.under_way.requests == [request]
    held = model.new_cache(1, 40, chunk=4)
    held.restore(0, engine.cache.snapshot(request.slot))
    same_state(held, cache)
    list(recordings(engine))  # as a server does now, on the same tapes
    engine.submit(Request([1, 2, 3], 9))
    assert [one.id for one in engine.step()] == [first]
    assert engine.flights.under_way is not None, "what was for nothing holds up nobody"


def run(engine, request):
    engine.submit(request)
    while engine.busy:
        engine.step()
    return request.made


def test_who_takes_a_slot_is_not_counted_for_who_left_it():
    model = load_model(FOLDER / RECURRENT)
    engine = engine_of(model, True)
    engine.free = [0]
    left, new = Request([1, 2, 3], 9), Request([4, 5, 6, 7, 8, 9], 5)
    expected = run(engine_of(model, False), Request(list(new.prompt), 5))
    engine.submit(left)
    engine.step()
    assert engine.flights.under_way is not None and engine.cache.lengths[0] == 3
    engine.cancel(left)
    engine.submit(new)
    engine.step()
    assert new.slot == left.slot and engine.cache.lengths[0] == 4
    assert run(engine, Request([1], 1)) and new.made == expected


def test_a_first_token_does_not_wait_until_a_step_is_recorded():
    model = load_model(FOLDER / ROWS)
    engine = engine_of(model, True, recorded=False)
    request = Request([1, 2, 3], 5)
    engine.submit(request)
    assert len(engine.step()) == 1 and engine.flights.under_way is None
    engine.step()
    assert engine.flights.under_way is not None


def test_nobody_is_left_behind():
    """Benchmarks put requests among those that run, with a state that they have made."""
    model = load_model(FOLDER / ROWS)
    engine = engine_of(model, True)
    engine.submit(Request([1, 2, 3], 30))
    engine.step()
    assert engine.flights.under_way is not None
    prefill(model, engine.cache, (engine.free[-1], [4, 5]))
    late = Request([4, 5], 3, slot=engine.free.pop(), computed=2, made=[6])
    engine.running.append(late)
    for _ in range(3):
        engine.step()
    assert len(late.made) == 3 and late.finish_reason == "length"


def test_the_last_place_of_a_cache_may_hold_a_stop():
    """Nothing is launched for the token after it, which there would be no room for."""
    model, hot = load_model(FOLDER / ROWS), SamplingParams(temperature=1.5, seed=2)
    text = run(Engine(model, model.new_cache(1, 30)), Request([1, 2, 3], 20, hot))
    last = next(i for i in range(6, 20) if text[i] not in text[:i])
    engine = Engine(model, model.new_cache(1, 3 + last), replays=True, ahead=True)
    request = Request([1, 2, 3], 20, hot, frozenset([text[last]]))
    assert run(engine, request) == text[: last + 1] and request.finish_reason == "stop"
    with pytest.raises(ValueError, match="this cache has room for"):
        run(engine, Request([1, 2, 3], 20, hot))


def test_states_that_are_too_large_to_keep_let_no_step_run_ahead(monkeypatch, launched):
    model = load_model(FOLDER / RECURRENT)
    expected = Script(model, 8).run(engine_of(model, False))
    engine = engine_of(model, True)
    monkeypatch.setattr(flights, "SAVED", 2 * engine.flights.state_bytes)
    assert engine.flights.saves(2) and not engine.flights.saves(3)
    same(Script(model, 8).run(engine), expected)
    assert max(len(requests) for requests, _, _ in launched) == 2


def test_only_the_states_of_who_keeps_them_are_saved():
    model = load_model(FOLDER / RECURRENT)
    engine = engine_of(model, True)
    requests = [Request([1, 2], 9, keeps=False), Request([3, 4], 9), Request([5, 6], 9)]
    for request in requests:
        engine.submit(request)
    saved = engine.flights.saved
    while not requests[2].made:
        engine.step()
    assert set(saved.pairs) == {requests[1].slot, requests[2].slot}
    kept = saved.pairs[requests[2].slot]
    engine.cancel(requests[1])
    engine.step()
    assert set(saved.pairs) == {requests[2].slot} and saved.pairs[requests[2].slot] is kept, "it is made once"


@pytest.mark.parametrize("name", [RECURRENT, ROWS])
def test_ids_are_gathered_from_what_steps_and_prompts_have_drawn(name):
    """Of steps of other sizes, in another order, before the host has read any."""
    model = load_model(FOLDER / name)
    tokens = []
    for reads in (True, False):
        cache = model.new_cache(3, 20, chunk=4, padding=1)
        for slot in range(3):
            prefill(model, cache, (slot, [4 + slot, 5, 6]))
        one, other, all = (DecodeStep(model, cache, B) for B in (2, 1, 4))
        one.bind([2, 0], [7, 8])
        drawn = [one.launch()]
        other.bind([1], [9])
        drawn.append(other.launch())
        if reads:
            (second, first), (middle,) = (each.tolist() for each in drawn)
            all.bind([0, 1, 2], [first, middle, second])
        else:
            all.bind([0, 1, 2], [1, 2, 0], drawn=torch.cat([one.ids, other.ids]))
        tokens.append([all.launch().tolist()[:3] for _ in range(4)])
        assert cache.lengths == [8, 8, 8, 0]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("prefix_bytes", [0, 1 << 26], ids=["forgets", "keeps"])
def test_a_scheduler_whose_engine_runs_ahead(monkeypatch, prefix_bytes, launched):
    monkeypatch.setattr(scheduling, "Engine", partial(Engine, replays=True, ahead=True))
    model, desk = model_of(RECURRENT), Desk()
    cache = model.new_cache(SLOTS, 512, 32)
    scheduler = Scheduler(model, cache, frozenset(), desk.deliver, prefix_bytes=prefix_bytes)
    begin = prompt_of(80, 1)
    jobs = [job([*begin[: 80 * (i % 3 > 0)], *prompt_of(1 + 17 * i % 60, i)], 1 + i % 9) for i in range(16)]
    expected = [alone(one.prompt, one.request.max_tokens) for one in jobs]
    scheduler.start()
    with scheduler.changed:  # the engine waits until all are there
        for one in jobs:
            scheduler.submit(one)
    desk.wait(*jobs)
    follow = [job([*one.prompt, *desk.ids(one), 3, 4], 6) for one in jobs[:6]]
    for one in follow:
        scheduler.submit(one)
    desk.wait(*follow)
    try:
        assert [desk.ids(one) for one in jobs] == expected
        assert [desk.ids(one) for one in follow] == [alone(one.prompt, 6) for one in follow]
        assert gauges(scheduler) == (0, 0, list(range(SLOTS))) and launched
        assert any(one.reused for one in follow) == (prefix_bytes > 0)
    finally:
        scheduler.close()
        scheduler.thread.join(10)
