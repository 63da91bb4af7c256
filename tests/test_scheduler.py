"""Many jobs on one engine: order, cancellation, prefixes, failures. On a CPU a reply's bits are those it has alone."""

import random
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from model_goldens import NAMES
from test_models import model_of

from halfbyte.cache import Kept
from halfbyte.engine import Request, logits
from halfbyte.grammar import Constraint
from halfbyte.jobs import Job
from halfbyte.metrics import Histogram, text
from halfbyte.prefixes import Prefixes, shared
from halfbyte.recordings import Recordings
from halfbyte.replaying import shelf
from halfbyte.sampling import SamplingParams
from halfbyte.scheduler import QueueFull, Scheduler, Unwell
from halfbyte.text.decoder import Decoder
from halfbyte.text.reply import Reply, Syntax

NAME = "qwen3_5_moe-4bit"


class Spelled:
    """Ids as text, so that every model of any vocabulary has some."""

    def push(self, id):
        return f"{id} "

    def finish(self):
        return ""


class Desk:
    """Collects what a scheduler delivers."""

    def __init__(self):
        self.pieces, self.ended, self.news = {}, set(), threading.Condition()

    def deliver(self, pieces):
        with self.news:
            for job, piece in pieces:
                self.pieces.setdefault(job, []).append(piece)
                if piece.finish_reason is not None or piece.error is not None:
                    self.ended.add(job)
            self.news.notify_all()

    def wait(self, *jobs, seconds=120):  # kernels may have to be compiled
        with self.news:
            assert self.news.wait_for(lambda: self.ended >= set(jobs), seconds), "it does not end"

    def text(self, job):
        return "".join(event.text for piece in self.pieces[job] for event in piece.events)

    def ids(self, job):
        return [int(word) for word in self.text(job).split()]


def job(prompt, max_tokens=4, owner=b"", stop=(), **params):
    return Job(
        Request(list(prompt), max_tokens, SamplingParams(**params)),
        owner,
        Decoder(Spelled(), stop),
        prompt=list(prompt),
    )


@pytest.fixture
def start():
    started = []

    def start(name=NAME, slots=4, capacity=512, chunk=32, records=False, **options):
        model, desk = model_of(name), Desk()
        scheduler = Scheduler(model, model.new_cache(slots, capacity, chunk), frozenset(), desk.deliver, **options)
        if not records:
            scheduler.recordings.left = 0
        scheduler.start()
        started.append(scheduler)
        return scheduler, desk

    yield start
    for scheduler in started:
        scheduler.close()
        scheduler.thread.join(10)


def alone(prompt, count, name=NAME):
    """Greedy, without an engine."""
    row, kept = logits(model_of(name), list(prompt))
    made = []
    for _ in range(count):
        made.append(int(row[-1].argmax()))
        row, kept = logits(model_of(name), made[-1:], kept)
    return made


def prompt_of(length, seed=0, name=NAME):
    return random.Random(seed).choices(range(model_of(name).vocabulary), k=length)


def gauges(scheduler):
    deadline = time.monotonic() + 1
    while (scheduler.running or scheduler.waiting) and time.monotonic() < deadline:
        time.sleep(0.01)
    return scheduler.running, len(scheduler.waiting), sorted(scheduler.engine.free)


def test_many_jobs_are_each_as_alone(start):
    scheduler, desk = start(prefix_bytes=1 << 26)
    jobs = [job(prompt_of(1 + 17 * i % 90, i), 1 + i % 6) for i in range(20)]
    for one in jobs:
        scheduler.submit(one)
    desk.wait(*jobs)
    for one in jobs:
        assert desk.ids(one) == alone(one.prompt, one.request.max_tokens)
        assert desk.pieces[one][-1].finish_reason == "length" and one.made == one.request.max_tokens
    assert gauges(scheduler) == (0, 0, [0, 1, 2, 3])
    assert scheduler.first_token.counts and sum(scheduler.first_token.counts) == 20
    assert scheduler.counts["generation_tokens"] == sum(one.made for one in jobs)


@pytest.mark.parametrize("name", NAMES)
def test_a_known_beginning_is_not_computed_again_and_changes_no_bit(start, name):
    scheduler, desk = start(name, prefix_bytes=1 << 26)
    begin = prompt_of(200, 1, name)
    for tail in ([3, 4, 5], [6, 7], prompt_of(70, 2, name)):
        one = job([*begin, *tail], 5)
        scheduler.submit(one)
        desk.wait(one)
        assert desk.ids(one) == alone(one.prompt, 5, name)
    assert one.reused >= 192 and scheduler.counts["prefix_cache_hit_tokens"] >= 2 * 192


def test_a_reply_is_known_to_the_next_prompt(start):
    scheduler, desk = start(prefix_bytes=1 << 26)
    first = job(prompt_of(100), 8)
    scheduler.submit(first)
    desk.wait(first)
    second = job([*first.prompt, *desk.ids(first), 1, 2], 3)
    scheduler.submit(second)
    desk.wait(second)
    assert second.reused == 107 and desk.ids(second) == alone(second.prompt, 3)  # the last token was never computed


@pytest.mark.parametrize(("room", "found"), [(1 << 26, 0), (1 << 30, 64)])
def test_a_fork_is_learned(start, room, found):
    """Two prompts part in the middle of a chunk; what they share is saved, for the third. Where there is much room,
    some of it is for the second too."""
    scheduler, desk = start(chunk=128, prefix_bytes=room)
    begin = prompt_of(100)
    jobs = [job([*begin, *prompt_of(20, seed)], 2) for seed in (1, 2, 3)]
    for one in jobs:
        scheduler.submit(one)
        desk.wait(one)
    assert [one.reused for one in jobs] == [0, found, 100]


def test_another_owner_shares_nothing(start):
    scheduler, desk = start(prefix_bytes=1 << 26)
    jobs = [job(prompt_of(150), 3, owner) for owner in (b"a", b"b", b"a")]
    for one in jobs:
        scheduler.submit(one)
        desk.wait(one)
    assert [one.reused > 0 for one in jobs] == [False, False, True]
    assert desk.ids(jobs[0]) == desk.ids(jobs[1]) == desk.ids(jobs[2])


@pytest.mark.parametrize(
    ("state_rows", "budget", "stride", "alone"),
    [
        (20, 1 << 16, 128, 128),  # states have no room
        (20, 1 << 26, 128, 64),  # a thousand of them do: twice as many for a prompt alone
        (1100, 1 << 40, 1024, 1024),  # large ones lie so far apart that they take no more than the rows between
    ],
)
def test_how_far_states_of_a_prompt_lie_apart(state_rows, budget, stride, alone):
    kept = [Kept(rows={"k": (1, 8)}), Kept(fixed={"state": ((state_rows, 8), torch.float32)})]
    cache = Mock(kept=kept, chunk=2048, capacity=4096, dtype=torch.float32)
    made = Prefixes(cache, budget)
    assert (made.stride, made.fine) == (stride, alone)


def test_an_engine_that_was_just_started_is_well():
    """However long ago it was made, and before anything is recorded."""
    model = model_of(NAME)
    scheduler = Scheduler(model, model.new_cache(1, 64), frozenset(), lambda pieces: None, step_seconds=60)
    scheduler.beat, seen = -1e9, []
    scheduler.recordings = Recordings(scheduler.engine)
    scheduler.recordings.left = 1

    def record():
        seen.append(scheduler.trouble)
        scheduler.recordings.left = 0

    scheduler.recordings.record = record
    scheduler.close()
    scheduler.start()
    scheduler.thread.join(10)
    assert seen == [None]


def test_what_was_not_used_longest_is_forgotten():
    """Row 48's part: bounded by bytes, whatever comes."""
    model = model_of(NAME)
    cache = model.new_cache(1, 256, chunk=32)
    probe = Prefixes(cache, 1 << 30)
    kept = Prefixes(cache, 0)
    texts = [prompt_of(100, seed) for seed in range(6)]

    def fill(ids):
        cache.reset(0)
        for at in range(0, len(ids), 32):
            work = [(0, ids[at : at + 32])]
            model(cache.plan(work), cache)
            cache.advance(work)

    fill(texts[0])
    probe.save(b"", texts[0], 0)
    kept.budget = 3 * probe.held
    for ids in texts:
        fill(ids)
        kept.save(b"", ids, 0)
        assert kept.held <= kept.budget and kept.held == sum(node.nbytes for node in kept.order)
    assert [kept.find(b"", [*ids, 1]).length for ids in texts] == [0, 0, 0, 100, 100, 100]
    kept.restore(kept.find(b"", [*texts[3], 1]), 0)
    fill(prompt_of(100, 9))
    kept.save(b"", prompt_of(100, 9), 0)
    assert [kept.find(b"", [*ids, 1]).length for ids in texts[3:]] == [100, 0, 100]
    kept.clear()
    assert kept.held == 0 and not kept.roots


def test_shared():
    assert [shared([1, 2], [1, 2, 3]), shared([1, 2, 4], [1, 2, 3]), shared([], [1]), shared([2], [1])] == [2, 2, 0, 0]


def test_cancelled_jobs_leave_within_a_step(start):
    scheduler, desk = start(slots=2)
    jobs = [job(prompt_of(5, seed), 400) for seed in range(4)]
    for one in jobs:
        scheduler.submit(one)
    while len(desk.pieces) < 2:
        time.sleep(0.001)
    for one in jobs:
        scheduler.cancel(one, "disconnect")
    assert gauges(scheduler) == (0, 0, [0, 1]) and scheduler.aborts == {"disconnect": 4}
    counts = {one: len(desk.pieces.get(one, [])) for one in jobs}
    time.sleep(0.1)
    assert counts == {one: len(desk.pieces.get(one, [])) for one in jobs} and not desk.ended


def test_a_stop_string_ends_a_job(start):
    scheduler, desk = start()
    wanted = alone([5, 6, 7], 8)
    one = job([5, 6, 7], 8, stop=[f"{wanted[3]} "])
    scheduler.submit(one)
    desk.wait(one)
    assert desk.ids(one) == wanted[: wanted.index(wanted[3])] and desk.pieces[one][-1].finish_reason == "stop"


class Only:
    """A matcher of a form that is one token, again and again."""

    def __init__(self, id, vocabulary):
        self.id, self.vocabulary, self.taken = id, vocabulary, []

    def compute_bitmask(self):
        bits = bytearray(-(-self.vocabulary // 8))
        bits[self.id // 8] = 1 << self.id % 8
        return bytes(bits)

    def consume_token(self, id):
        self.taken.append(id)

    def is_stopped(self):
        return False

    def is_error(self):
        return False


def test_a_form_begins_with_the_first_token_after_the_reasoning(start):
    scheduler, desk = start()
    prompt, vocabulary = prompt_of(20), model_of(NAME).vocabulary
    thoughts = alone(prompt, 3)
    one, matcher = job(prompt, 6), Only(5, vocabulary)
    assert 5 not in thoughts and len(set(thoughts)) == 3
    one.reply = Reply(Syntax(think=("<think>", f"{thoughts[-1]} ")), thinking=True)
    one.constraint = Constraint(matcher, vocabulary)
    one.constraint.active = False
    one.request.processors = [lambda ids, logits: one.constraint.mask(logits)]
    scheduler.submit(one)
    desk.wait(one)
    assert matcher.taken == one.request.made[3:] == [5, 5, 5]
    said = [(event.kind, event.text) for piece in desk.pieces[one] for event in piece.events]
    assert [kind for kind, _ in said] == ["reasoning", "reasoning", "text", "text", "text"]


def test_draws_depend_on_the_seed_alone(start):
    """Row 77: batch of one or of eight, with a known beginning or without."""
    scheduler, desk = start(slots=8, prefix_bytes=1 << 26)
    wish = {"temperature": 1.0, "top_p": 0.9}
    single = [job(prompt_of(80, seed), 12, seed=seed, **wish) for seed in range(8)]
    for one in single:
        scheduler.submit(one)
        desk.wait(one)
    together = [job(one.prompt, 12, seed=seed, **wish) for seed, one in enumerate(single)]
    for one in together:
        scheduler.submit(one)
    desk.wait(*together)
    assert [desk.ids(one) for one in together] == [desk.ids(one) for one in single]
    assert len({tuple(desk.ids(one)) for one in together}) > 1


@pytest.mark.quiet
def test_the_queue_is_bounded(start):
    scheduler, desk = start(slots=1, max_queue=2)
    jobs = [job(prompt_of(5, seed), 300) for seed in range(3)]
    for one in jobs:
        scheduler.submit(one)
    with pytest.raises(QueueFull):
        scheduler.submit(job([1], 1))
    for one in jobs:
        scheduler.cancel(one, "disconnect")
    last = job([5, 6, 7], 2)
    scheduler.submit(last)
    desk.wait(last)


@pytest.mark.quiet
def test_a_short_prompt_passes_a_long_one(start):
    scheduler, desk = start(slots=3, capacity=1024, chunk=16)
    long, short = job(prompt_of(900), 1), job([1, 2, 3], 1)
    scheduler.submit(long)
    while not long.request.computed:
        time.sleep(0.0005)
    scheduler.submit(short)
    desk.wait(short)
    assert long not in desk.ended and long.request.computed < 900
    desk.wait(long)
    assert desk.ids(long) == alone(long.prompt, 1)


def noted(monkeypatch):
    """The steps that the model is asked for from now on, as it is written."""
    from halfbyte.models.decoder import Decoder as Model

    real, steps = Model.__call__, []
    monkeypatch.setattr(Model, "__call__", lambda self, step, cache: steps.append(step) or real(self, step, cache))
    return steps


def test_short_prompts_share_a_step(start, monkeypatch):
    """As many as a piece of a long one has tokens; each is answered as it is alone."""
    steps = noted(monkeypatch)
    scheduler, desk = start(slots=8, chunk=32)
    jobs = [job(prompt_of(10, seed), 2) for seed in range(6)]
    with scheduler.changed:  # the engine waits until all are there
        for one in jobs:
            scheduler.submit(one)
    for one in jobs:
        desk.wait(one)
    shapes = [[(run.B, run.L) for run in step.runs] for step in steps[:2]]
    assert shapes == [[(3, 10)], [(3, 1), (3, 10)]]  # three prompts; their first tokens and the next three
    monkeypatch.undo()
    assert [desk.ids(one) for one in jobs] == [alone(one.prompt, 2) for one in jobs]


def test_pieces_of_prompts_are_recorded_before_the_first_request(start, monkeypatch):
    """From then on the model, as it is written, is asked for no prompt that comes alone."""
    scheduler, desk = start(chunk=32, records=True, prefix_bytes=1 << 26)
    while scheduler.recordings.left:
        time.sleep(0.001)
    kept = shelf(scheduler.model, scheduler.cache).kept
    assert [size for _, size, *_ in kept] == [16, 32] and not any(scheduler.cache.lengths)
    steps = noted(monkeypatch)
    jobs = [job(prompt_of(length, length), 3) for length in (2, 20, 70)]
    for one in jobs:
        scheduler.submit(one)
        desk.wait(one)
    assert {run.L for step in steps for run in step.runs} <= {1}  # answers
    monkeypatch.undo()
    assert [desk.ids(one) for one in jobs] == [alone(one.prompt, 3) for one in jobs]


def test_a_long_prompt_is_not_starved(start):
    """Short ones keep coming; every other step is the long one's."""
    scheduler, desk = start(slots=3, capacity=1024, chunk=16)
    long = job(prompt_of(600), 1)
    scheduler.submit(long)
    count = 0
    while long not in desk.ended and count < 300:
        one = job(prompt_of(30, count), 1)
        scheduler.submit(one)
        desk.wait(one)
        count += 1
    assert long in desk.ended


def failing(monkeypatch, error, when=lambda ids: True, times=1):
    """Make the model raise in the middle of a step, so often."""
    from halfbyte.models.decoder import Decoder as Model

    real, left = Model.__call__, [times]

    def broken(self, step, cache):
        result = real(self, step, cache)
        if left[0] and when(step.ids.tolist()):
            left[0] -= 1
            raise error
        return result

    monkeypatch.setattr(Model, "__call__", broken)


def test_row_50_a_failing_step_ends_its_requests_and_no_others(start, monkeypatch):
    scheduler, desk = start()
    failing(monkeypatch, RuntimeError("secret"), when=lambda ids: 77 in ids)
    bad = job([77, 5], 4)
    scheduler.submit(bad)
    desk.wait(bad)
    assert "engine failed" in desk.pieces[bad][-1].error and "secret" not in desk.pieces[bad][-1].error
    good = job([5, 6, 7], 4)
    scheduler.submit(good)
    desk.wait(good)
    assert desk.ids(good) == alone([5, 6, 7], 4) and gauges(scheduler) == (0, 0, [0, 1, 2, 3])


def test_row_50_a_reply_that_cannot_be_decoded_ends_alone(start):
    class Broken(Spelled):
        def push(self, id):
            raise ValueError("secret")

    scheduler, desk = start()
    bad, good = job([1, 2], 5), job([5, 6, 7], 5)
    bad.decoder = Decoder(Broken())
    scheduler.submit(bad)
    scheduler.submit(good)
    desk.wait(bad, good)
    assert desk.pieces[bad][-1].error == "the reply could not be decoded" and desk.ids(good) == alone([5, 6, 7], 5)


@pytest.mark.quiet
def test_row_54_out_of_memory_is_tried_again_smaller(start, monkeypatch):
    scheduler, desk = start(chunk=128, prefix_bytes=1 << 26)
    jobs = [job([5, 6, 7], 6), job(prompt_of(90), 6, temperature=1.0, seed=3)]
    wanted = [alone([5, 6, 7], 6), None]
    for one in jobs:
        scheduler.submit(one)
    while len(desk.pieces.get(jobs[0], [])) < 2:
        time.sleep(0.001)
    failing(monkeypatch, torch.OutOfMemoryError("no memory"))
    desk.wait(*jobs)
    monkeypatch.undo()
    assert desk.ids(jobs[0]) == wanted[0] and scheduler.piece == 64
    again = job(prompt_of(90), 6, temperature=1.0, seed=3)
    scheduler.submit(again)
    desk.wait(again)
    assert desk.ids(jobs[1]) == desk.ids(again)


@pytest.mark.parametrize(("penalty", "ends"), [("repetition_penalty", False), ("presence_penalty", True)])
def test_row_54_what_penalties_count_is_counted_again(start, monkeypatch, penalty, ends):
    """Or the request ends: what was made is prompt to the second try, and presence is of what was made alone."""
    scheduler, desk = start()
    first, second = (job(prompt_of(9), 12, **{penalty: 1.7}) for _ in range(2))
    scheduler.submit(first)
    desk.wait(first)
    failing(monkeypatch, torch.OutOfMemoryError("no memory"), when=lambda ids: ids == [desk.ids(first)[7]])
    scheduler.submit(second)
    desk.wait(second)
    assert desk.ids(second) == desk.ids(first)[: 8 if ends else 12]
    assert (desk.pieces[second][-1].error is not None) == ends


def test_row_54_out_of_memory_twice_is_said(start, monkeypatch):
    scheduler, desk = start()
    failing(monkeypatch, torch.OutOfMemoryError("no memory"), times=2)
    one = job([5, 6, 7], 4)
    scheduler.submit(one)
    desk.wait(one)
    assert "no memory" in desk.pieces[one][-1].error and scheduler.trouble is None


def not_fitting(monkeypatch, id):
    """There is no memory for a step that reads this id in a prompt. The prompts of such steps, as they come."""
    from halfbyte.engine import Engine

    real, steps = Engine._computed, []

    def computed(self):
        before = [(one, one.computed) for one in self.running]
        made = real(self)
        read = [one for one, computed in before if one.computed > computed]
        if any(id in one.prompt[computed : one.computed] for one, computed in before):
            steps.append([one.prompt for one in read])
            raise torch.OutOfMemoryError("no memory")
        return made

    monkeypatch.setattr(Engine, "_computed", computed)
    return steps


def test_row_54_a_prompt_whose_later_pieces_do_not_fit_is_tried_once_more(start, monkeypatch):
    """However many pieces fit before; and counted once."""
    failed = not_fitting(monkeypatch, 77)
    scheduler, desk = start(prefix_bytes=1 << 26)
    one = job([*[5] * 100, 77, *[5] * 60], 4)
    scheduler.submit(one)
    desk.wait(one, seconds=20)
    assert "no memory" in desk.pieces[one][-1].error and len(failed) == 2 and scheduler.trouble is None
    assert scheduler.counts["prompt_tokens"] == 161 and scheduler.aborts == {"error": 1}
    assert gauges(scheduler) == (0, 0, [0, 1, 2, 3])


@pytest.mark.quiet
def test_row_54_others_go_on_where_some_prompts_do_not_fit(start, monkeypatch):
    """Those answered meanwhile, those read in the same step, and those in line: each as alone, and nobody twice."""
    prompts = [[5, 6, 7], *(prompt_of(9, seed) for seed in range(3)), prompt_of(70, 4)]
    wanted = [alone(prompt, 40 if prompt[:2] == [5, 6] else 6) for prompt in prompts]
    assert not any(77 in prompt for prompt in prompts)
    failed = not_fitting(monkeypatch, 77)
    scheduler, desk = start(slots=6, chunk=32)
    answering, *others = [job(prompt, len(ids)) for prompt, ids in zip(prompts, wanted, strict=True)]
    scheduler.submit(answering)
    while len(desk.pieces.get(answering, [])) < 2:
        time.sleep(0.001)
    large = [job([*[5] * before, 77], 4) for before in (3, 40, 5, 6)]
    with scheduler.changed:  # the engine waits until all are there
        for one in [others[0], large[0], others[1], large[1], others[2], large[2], others[3], large[3]]:
            scheduler.submit(one)
    desk.wait(answering, *others, *large, seconds=60)
    assert all("no memory" in desk.pieces[one][-1].error for one in large)
    assert [desk.ids(one) for one in (answering, *others)] == wanted
    assert len(failed) <= 8 and scheduler.trouble is None and scheduler.aborts == {"error": 4}
    asked = [answering, *others, *large]
    assert scheduler.counts["prompt_tokens"] == sum(len(one.prompt) for one in asked)


def test_row_54_pieces_of_prompts_grow_again(start, monkeypatch):
    """They are never small for ever, nor ever too small to be worth a step."""
    monkeypatch.setattr("halfbyte.scheduler.GOOD", 3)
    scheduler, desk = start(chunk=128)
    with monkeypatch.context() as patched:
        not_fitting(patched, 77)
        for _ in range(2):
            scheduler.submit(one := job([77, 5], 2))
            desk.wait(one)
        assert scheduler.piece == scheduler.engine.room == 64
    sizes = []
    for length in (65, 65):
        scheduler.submit(one := job(prompt_of(length, length), 2))
        desk.wait(one)
        sizes.append(scheduler.piece)
        assert desk.ids(one) == alone(one.prompt, 2)
    assert sizes == [64, 128] and scheduler.engine.room == 128


def test_row_51_a_device_that_is_lost_ends_the_thread(start, monkeypatch):
    scheduler, desk = start()
    failing(monkeypatch, RuntimeError("lost"), times=3)
    for seed in range(3):
        one = job([seed, 1], 2)
        scheduler.submit(one)
        desk.wait(one)
    scheduler.thread.join(5)
    assert scheduler.trouble == "the engine has stopped"
    with pytest.raises(Unwell):
        scheduler.submit(job([1], 1))


@pytest.mark.quiet
def test_row_51_a_step_that_hangs_is_seen(start, monkeypatch):
    from halfbyte.engine import Engine

    scheduler, desk = start(step_seconds=0.2)
    release = threading.Event()
    real = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (release.wait(10), real(self))[1])
    one = job([5, 6, 7], 2)
    scheduler.submit(one)
    assert scheduler.trouble is None
    time.sleep(0.4)
    assert scheduler.trouble == "the engine does not answer"
    release.set()
    desk.wait(one)
    assert scheduler.trouble is None


@pytest.mark.quiet
def test_row_51_a_recording_that_hangs_is_seen(start):
    """Steps are recorded while there is nothing to do, but whoever comes then waits for it."""
    scheduler, desk = start(step_seconds=0.2)
    release = threading.Event()

    class Hanging:
        left = 1

        def brief(self):  # the thread may just begin
            return ()

        def record(self):
            release.wait(10)
            self.left = 0

    scheduler.recordings = Hanging()
    with scheduler.changed:
        scheduler.changed.notify()
    time.sleep(0.4)
    assert scheduler.trouble == "the engine does not answer"
    with pytest.raises(Unwell):
        scheduler.submit(job([5, 6, 7], 2))
    release.set()
    time.sleep(0.1)
    assert scheduler.trouble is None
    scheduler.submit(one := job([5, 6, 7], 2))
    desk.wait(one)


def test_an_idle_engine_is_well(start):
    scheduler, _ = start(step_seconds=0.05)
    time.sleep(0.2)
    assert scheduler.trouble is None


def test_metrics_are_in_the_format():
    seen = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7):
        seen.observe(value)
    said = text({"waits_seconds": ("Waits.", seen), "hits_total": ("Hits.", {(("route", "/a"),): 2}), "up": ("Up.", 1)})
    assert said.splitlines() == [
        "# HELP halfbyte_waits_seconds Waits.", "# TYPE halfbyte_waits_seconds histogram",
        'halfbyte_waits_seconds_bucket{le="0.1"} 2', 'halfbyte_waits_seconds_bucket{le="1.0"} 3',
        'halfbyte_waits_seconds_bucket{le="+Inf"} 4', "halfbyte_waits_seconds_sum 7.65",
        "halfbyte_waits_seconds_count 4", "# HELP halfbyte_hits_total Hits.", "# TYPE halfbyte_hits_total counter",
        'halfbyte_hits_total{route="/a"} 2', "# HELP halfbyte_up Up.", "# TYPE halfbyte_up gauge", "halfbyte_up 1",
    ]  # fmt: skip
