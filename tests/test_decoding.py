"""Steps that are launched before the last tokens are read: the same tokens and the same state as without."""

import weakref
from functools import partial
from itertools import accumulate

import pytest
import torch
from model_goldens import FOLDER, NAMES

from halfbyte import conversation, generation, replaying
from halfbyte.conversation import Conversation
from halfbyte.decoding import DecodeStep
from halfbyte.engine import Engine, Request, logits
from halfbyte.generation import generate, stream_generate
from halfbyte.graph import call
from halfbyte.loading import load, load_model
from halfbyte.prefilling import Chunk, prefill
from halfbyte.recordings import recordings
from halfbyte.replaying import Replay, Shelf, shelf
from halfbyte.sampling import SamplingParams

TINY = FOLDER.parents[2] / "halfbyte/tiny"
RECURRENT, ROWS, RINGS = "qwen3_5_moe-4bit", "qwen3_moe-4bit", "gemma4_moe-4bit"
WISHES = [SamplingParams(), SamplingParams(temperature=0.8, top_k=9, seed=3), SamplingParams(temperature=1, seed=4)]


def all_of(engine, requests, until=lambda made: False):
    for request in requests:
        engine.submit(request)
    made = []
    while engine.busy and not until(made):
        made += engine.step()
    return made


def different_lengths(**more):
    return [Request([5 + i] * (3 + 4 * i), 6 + 5 * i, params, **more) for i, params in enumerate(WISHES)]


def texts(model, replays, slots=3, sizes=None, **more):
    """Three texts of different lengths, of which one waits for a slot; and the state they leave."""
    cache = model.new_cache(slots, 60, chunk=4, padding=2 if sizes else 0)
    engine = Engine(model, cache, replays=replays, ahead=replays)
    engine.flights.sizes = sizes or engine.flights.sizes
    requests = different_lengths(**more)
    made = all_of(engine, requests)
    return [request.made for request in requests], made, cache


def rows(made):
    """The logits of each text, read after the last step."""
    return [torch.stack([one.logits for one in made if one.request.params is params]) for params in WISHES]


def same_state(one, other):
    """What a later step can read of every slot."""
    assert one.lengths[: one.slots] == other.lengths[: other.slots]
    for slot in range(one.slots):
        for a, b in zip(one.snapshot(slot).layers, other.snapshot(slot).layers, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", [RECURRENT, ROWS, RINGS])
@pytest.mark.parametrize("sizes", [None, [1, 3], [3]])
def test_steps_ahead_give_the_same_tokens_and_the_same_state(name, sizes):
    model = load_model(FOLDER / name)
    expected, written, cache = texts(model, False)
    got, made, ahead = texts(model, True, sizes=sizes)
    assert got == expected
    for mine, theirs in zip(rows(made), rows(written), strict=True):
        assert torch.equal(mine, theirs)
    if sizes is None:  # else the tokens of nobody's are in the slots that became free
        same_state(ahead, cache)


def test_a_request_that_waits_takes_the_slot_of_one_that_ends():
    model = load_model(FOLDER / RECURRENT)
    expected, _, cache = texts(model, False, slots=2)
    got, _, ahead = texts(model, True, slots=2)
    assert got == expected
    same_state(ahead, cache)


@pytest.mark.parametrize("name", [RECURRENT, RINGS])
def test_a_stop_token_leaves_the_state_before_it(name):
    model, hot = load_model(FOLDER / name), SamplingParams(temperature=2, seed=1)
    text = all_of(Engine(model, model.new_cache(1, 40)), [Request([1, 2, 3], 12, hot)])[0].request.made
    stop = next(id for id in text[4:] if id not in text[:4])
    caches = []
    for replays in (False, True):
        caches.append(model.new_cache(1, 40, chunk=4))
        engine, request = (
            Engine(model, caches[-1], replays=replays, ahead=replays),
            Request([1, 2, 3], 30, hot, frozenset([stop])),
        )
        all_of(engine, [request])
        assert request.finish_reason == "stop" and request.made[-1] == stop
        assert (engine.flights.under_way is not None) == replays  # one that was for nothing
    same_state(*caches)
    assert torch.equal(*(prefill(model, cache, (0, [7])) for cache in caches))


def test_a_request_that_is_cancelled_leaves_the_state_of_the_tokens_it_gave():
    model = load_model(FOLDER / RECURRENT)
    caches = []
    for replays in (False, True):
        caches.append(model.new_cache(2, 40, chunk=4))
        engine = Engine(model, caches[-1], replays=replays, ahead=replays)
        requests = [Request([1, 2, 3], 30), Request([4, 5], 12)]
        all_of(engine, requests, until=lambda made: len(made) >= 10)
        assert (engine.flights.under_way is not None) == replays
        engine.cancel(requests[0])
        lengths = list(engine.cache.lengths)
        assert lengths[requests[0].slot] == 3 + len(requests[0].made) - 1
        all_of(engine, [])
    same_state(*caches)


def test_nothing_is_saved_for_who_keeps_nothing_and_no_logits_are_copied_for_who_wants_none():
    model = load_model(FOLDER / RECURRENT)
    expected = texts(model, False)[0]
    got, made, _ = texts(model, True, keeps=False, wants_logits=False)
    assert got == expected
    first = {id(request): None for request, _, row in made if len(row)}
    assert len(first) == 3 and sum(len(one.logits) == 0 for one in made) == len(made) - 3  # those of prompts are there


def test_a_second_engine_goes_on_with_what_the_first_has_recorded():
    model, seen = load_model(FOLDER / ROWS), []
    cache = model.new_cache(1, 60, chunk=16)
    for _ in range(2):
        all_of(Engine(model, cache, replays=True, ahead=True), [Request([1, 2, 3, 4, 5], 6)])
        seen.append({key: getattr(one, "calls", one) for key, one in shelf(model, cache).kept.items()})
    keys = {("prefill", 16, 1, "f32", False), ("decode", 1, False, False, True, 1, "f32", False)}
    assert seen[0].keys() == seen[1].keys() == keys
    assert all(seen[0][key] is seen[1][key] for key in seen[0])


def test_two_engines_on_one_cache_take_turns():
    """Each says again whose tokens come next where the other has stepped in between."""
    model, expected, got = load_model(FOLDER / ROWS), [], []
    for prompt in ([1, 2, 3], [9, 8]):
        request = Request(prompt, 8)
        all_of(Engine(model, model.new_cache(1, 20)), [request])
        expected.append(request.made)
    cache = model.new_cache(2, 20)
    engines = [Engine(model, cache, replays=True, ahead=True) for _ in range(2)]
    engines[0].free, engines[1].free = [0], [1]
    requests = [Request([1, 2, 3], 8), Request([9, 8], 8)]
    for engine, request in zip(engines, requests, strict=True):
        engine.submit(request)
    while any(engine.busy for engine in engines):
        for engine in engines:
            engine.step()
    got = [request.made for request in requests]
    assert got == expected


def test_a_prompt_does_not_hold_up_answers():
    model = load_model(FOLDER / ROWS)
    engine = Engine(model, model.new_cache(2, 80, chunk=4), replays=True, ahead=True)
    first, second = Request([1, 2], 40), Request([3] * 20, 4)
    all_of(engine, [first], until=lambda made: len(made) == 5)
    engine.submit(second)
    while not second.made:
        before = len(first.made)
        engine.step()
        assert len(first.made) == before + 1


def test_recorded_steps_go_with_the_cache():
    model = load_model(FOLDER / RECURRENT)
    cache = model.new_cache(1, 60, chunk=32)
    engine = Engine(model, cache, replays=True, ahead=True)
    for _ in range(3):
        all_of(engine, [Request([1, 2, 3, 4, 5, 6, 7, 8, 9], 6)])
    assert {kind for kind, *_ in shelf(model, cache).kept} == {"decode", "prefill"}
    gone = weakref.ref(cache)
    del cache, engine
    assert gone() is None


@pytest.mark.parametrize("name", NAMES)
def test_a_bound_piece_gives_the_bits_of_the_prompt(name):
    """Whatever fills it up, also where the cache grows between two of them."""
    model = load_model(FOLDER / name)
    expected, cache = (model.new_cache(2, 60, chunk=32) for _ in range(2))
    ids, steps = [(7 * i) % 50 for i in range(60)], [5, 17, 3, 18, 2, 6, 4]
    for slot in (1, 0):
        for count, start in zip(steps, accumulate(steps, initial=0), strict=False):
            if (slot, start) == (0, 25):
                for one in (expected, cache):
                    one.reserve(200)
            work = [(slot, ids[start : start + count])]
            logits = model(expected.plan(work), expected)
            expected.advance(work)
            assert torch.equal(prefill(model, cache, work[0]), logits)
    same_state(cache, expected)
    pieces = shelf(model, cache).kept
    assert {size for _, size, *_ in pieces} == {16, 32}
    assert all(one.replay._graph is not None for one in pieces.values())


@pytest.mark.parametrize("name", [RECURRENT, ROWS, RINGS])
@pytest.mark.parametrize("binds", [False, True])
def test_a_piece_may_be_shorter_than_its_graph(name, binds):
    """What fills it up is seen by no token, and kept by no state."""
    model = load_model(FOLDER / name)
    expected, cache = (model.new_cache(2, 40, chunk=8) for _ in range(2))
    chunk, ids = Chunk(model, cache, 8, binds=binds), [(7 * i) % 50 for i in range(40)]
    for slot in (1, 0):
        for count in (2, 8, 1, 5, 7, 8, 1):
            work = [(slot, ids[:count])]
            logits = model(expected.plan(work), expected)
            expected.advance(work)
            assert torch.equal(chunk.run(model, cache, work), logits)
            cache.advance(work)
    same_state(cache, expected)


def test_a_graph_without_memory_is_said_and_done_without(monkeypatch, caplog):
    """As on a GPU whose memory is full: the capture fails, the step does not."""

    def full(*args):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(replaying, "bound", full)
    model, ran, replay = load_model(FOLDER / ROWS), [], Replay()
    model.device = torch.device("cuda")
    for _ in range(3):
        replay.run([call("noted", ran.append, (1,), {}, ())], model, None)
    assert ran == [1, 1, 1]
    assert [record.message for record in caplog.records] == [
        "cuda has no memory left for the graph of a step: its kernels run one by one"
    ]


def test_weights_that_move_are_noticed():
    """Graphs keep addresses: one that was captured before is captured anew."""
    model = load_model(FOLDER / RECURRENT)
    router = model.layers[0].mlp.router.gate.weight
    router.words.data = router.words.clone()  # no longer beside the shared expert's gate
    step = DecodeStep(model, model.new_cache(1, 20), 1, fused=True)
    step.bind([0], [7])
    before = replaying.moves(model)
    step.launch()
    assert replaying.moves(model) == before
    step.launch()
    assert replaying.moves(model) == before + 1  # laid together
    other = DecodeStep(model, model.new_cache(2, 20), 2, fused=True)
    other.bind([0, 1], [7, 8])
    for _ in range(3):
        other.launch()
    assert replaying.moves(model) == before + 1  # and found so


def test_the_step_that_was_replayed_last_is_kept_longest(monkeypatch):
    """Also where it went on with the same requests, for which it is not looked up again."""
    monkeypatch.setattr(replaying, "MOST", 2)
    model = load_model(FOLDER / ROWS)
    engine = Engine(model, model.new_cache(3, 60, chunk=4), replays=True, ahead=True)
    engine.submit(Request([5, 6], 30))
    for _ in range(4):
        engine.step()
    tape = engine.flights.last.step.tape
    DecodeStep(model, engine.cache, 3)  # somebody else's
    for _ in range(4):
        engine.step()
    all_of(engine, [Request([7, 8], 3)])  # beside the first, which then goes on alone
    assert tape in shelf(model, engine.cache).kept.values()


def test_a_step_of_fewer_requests_than_it_has_rows():
    model = load_model(FOLDER / RECURRENT)
    caches = []
    for B in (1, 3):
        cache = model.new_cache(3, 20, chunk=4, padding=2)
        prefill(model, cache, (1, [4, 5, 6]))
        step = DecodeStep(model, cache, B)
        step.bind([1], [7])
        tokens = [step.launch().tolist()[0] for _ in range(12)]
        caches.append((cache, tokens, step.places.tolist()))
    (one, first, _), (other, second, places) = caches
    assert first == second and one.lengths == other.lengths == [0, 15, 0, 0, 0]
    assert places == [[15, 0, 0], [16, 1, 1]]  # nobody's tokens stay where they are
    for a, b in zip(one.snapshot(1).layers, other.snapshot(1).layers, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", [RECURRENT, RINGS])
def test_what_is_prepared_is_all_that_is_recorded(name):
    """Also while prompts wait in every other slot: then no slot is free for rows that are nobody's."""
    model = load_model(FOLDER / name)

    def answers(prepared):
        cache = model.new_cache(5, 40, chunk=16, padding=2)
        engine = Engine(model, cache, replays=prepared, ahead=prepared)
        if prepared:
            engine.flights.sizes = [1, 2, 5]
            assert list(recordings(engine)) == [7, 6, 5, 4, 3, 2, 1]
        known = set(shelf(model, cache).kept)
        requests = [Request([7 + i] * 12, 5 + i, WISHES[i % 3]) for i in range(7)]
        all_of(engine, requests)
        assert not prepared or set(shelf(model, cache).kept) == known
        return [request.made for request in requests]

    assert answers(True) == answers(False)


def test_two_prompts_share_a_piece():
    """Of different lengths, after different beginnings; states do not take in what fills the shorter one up."""
    model = load_model(FOLDER / RECURRENT)
    caches = [model.new_cache(3, 40, chunk=8) for _ in range(2)]
    work = [(2, [5, 6, 7, 8, 9]), (0, [4, 3])]
    for cache in caches:
        prefill(model, cache, (0, [9, 8, 7]))
    alone = torch.cat([prefill(model, caches[0], one).clone() for one in work])
    chunk = Chunk(model, caches[1], 8, 2)
    for _ in range(2):  # as written, then replayed
        for cache in caches[1:]:
            cache.reset(2)
            cache.reset(0)
            prefill(model, cache, (0, [9, 8, 7]))
        logits = chunk.run(model, caches[1], work)
        caches[1].advance(work)
        assert torch.equal(logits, alone)
        same_state(*caches)


def test_a_step_whose_tape_another_has_taken_is_bound_again():
    model = load_model(FOLDER / ROWS)
    cache = model.new_cache(2, 20)
    one, other = (DecodeStep(model, cache, 1) for _ in range(2))
    with pytest.raises(RuntimeError, match="whose tokens come next"):
        one.launch()
    one.bind([0], [3])
    other.bind([1], [4])
    with pytest.raises(RuntimeError, match="whose tokens come next"):
        one.launch()
    other.launch()
    assert cache.lengths == [0, 1]


def test_shelves_of_different_caches_are_apart():
    model = load_model(FOLDER / ROWS)
    caches = [model.new_cache(1, 8) for _ in range(2)]
    assert isinstance(shelf(model, caches[0]), Shelf)
    assert shelf(model, caches[0]) is shelf(model, caches[0]) is not shelf(model, caches[1])


@pytest.fixture
def replaying_conversation(monkeypatch):
    """A conversation with the embedded model whose engine replays, as on a GPU."""
    monkeypatch.setattr(conversation, "Engine", partial(Engine, replays=True, ahead=True))
    model, tokenizer = load(TINY)
    return Conversation(model, tokenizer, max_tokens=12, temperature=0)


def test_a_conversation_goes_on_from_a_reply_that_was_left(replaying_conversation):
    """The step that was under way is taken back, whether its loop ends or is only forgotten."""
    talk = replaying_conversation
    fresh = Conversation(talk.model, talk.tokenizer, max_tokens=12, temperature=0)
    left = talk.say("Why is the sky blue?")
    for _ in range(4):
        next(left)
    assert talk._engine.flights.under_way is not None
    shown = [dict(message) for message in talk.messages]
    text = "".join(event.text for event in talk.say("And at night?"))
    fresh.messages = shown
    assert text == "".join(event.text for event in fresh.say("And at night?"))
    assert talk._cache.lengths[0] == talk.held
    with pytest.raises(RuntimeError, match="left for another"):
        list(left)
    assert "".join(event.text for event in talk.say("Why?")) == "".join(event.text for event in fresh.say("Why?"))


def test_a_prompt_cache_holds_what_its_loop_was_given(monkeypatch):
    monkeypatch.setattr(generation, "Engine", partial(Engine, replays=True, ahead=True))
    model, tokenizer = load(TINY)
    caches = [model.new_cache(1, 64) for _ in range(2)]
    pieces = stream_generate(model, tokenizer, "Once", 30, prompt_cache=caches[0], temperature=0)
    given = [next(pieces).token for _ in range(5)]
    pieces.close()
    ids = tokenizer.prompt_ids("Once") + given
    logits(model, ids, caches[1])
    assert caches[0].lengths == [len(ids)]
    same_state(*caches)


def test_a_reply_takes_the_cache_that_the_last_one_left(monkeypatch):
    monkeypatch.setattr(generation, "Engine", partial(Engine, replays=True, ahead=True))
    model, tokenizer = load(TINY)
    texts = [generate(model, tokenizer, "Once upon", max_tokens=8, temperature=0) for _ in range(2)]
    (cache,) = [generation._left[model]]
    generate(model, tokenizer, "A longer one, then: " * 30, max_tokens=8, temperature=0)
    assert generation._left[model] is cache and texts[0] == texts[1]
    assert generate(model, tokenizer, "Once upon", max_tokens=8, temperature=0) == texts[0]
