"""Recorded steps on a CPU: bound calls give the bits of the step as it is written, whatever the model, in one call."""

from concurrent.futures import ThreadPoolExecutor

import numba
import pytest
import torch
from model_goldens import FOLDER, NAMES
from test_decoding import WISHES, all_of, different_lengths

from halfbyte import decoding, prefilling, replaying
from halfbyte.cases import CASES
from halfbyte.check import tensors
from halfbyte.decoding import OFTEN, DecodeStep
from halfbyte.engine import Engine, Request
from halfbyte.fusion.reuse import arranged, share_memory
from halfbyte.graph import addresses, bound, record, run_all
from halfbyte.kernels.numba import OWN_THREADS, binding
from halfbyte.kernels.numba.compiled import Unsteady, looks_at_values, tracing
from halfbyte.loading import load_model
from halfbyte.ops.dispatch import reference
from halfbyte.ops.quant import qmm, quantize
from halfbyte.ops.rowwise import rms_norm
from halfbyte.replaying import MOST, shelf
from halfbyte.sampling import Sampler, SamplingParams

LAUNCHERS = {name.partition(".")[2] for name in binding.STEADY}
TWO_THREADS = OWN_THREADS and numba.get_num_threads() > 1
UNBOUND = {"gemma4_e-4bit", "gemma4_moe-4bit", "qwen3_moe-bf16"}  # whose steps are several calls
needs_two_threads = pytest.mark.skipif(not TWO_THREADS, reason="one thread, or Numba's own: steps have no parts")
BOUND = [case for case in CASES if case.op.__name__ in LAUNCHERS and case.only is None and not case.serving]


def texts(model, **more):
    cache = model.new_cache(3, 60, chunk=4)
    requests = different_lengths()
    made = all_of(Engine(model, cache, **more), requests)
    return [request.made for request in requests], [(one.id, one.logits) for one in made], cache


@pytest.mark.parametrize("name", NAMES)
def test_a_text_has_the_same_bits_as_written(name, monkeypatch):
    """One text, and several that begin and end at different times; greedy, drawn, and drawn from a few."""
    monkeypatch.setattr(decoding, "OFTEN", 1)  # every step is recorded
    model = load_model(FOLDER / name)
    expected, written, _ = texts(model, replays=False)
    got, made, cache = texts(model)
    assert got == expected
    assert all(torch.equal(mine[1], theirs[1]) for mine, theirs in zip(made, written, strict=True))
    assert shelf(model, cache).kept


@needs_two_threads
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_parts_are_computed_beside_each_other_or_not_at_all(name, filtered):
    """A step that cannot be bound as one call is recorded anew, in one part."""
    model = load_model(FOLDER / name)
    step = DecodeStep(model, model.new_cache(3, 20), 3, filtered=filtered)
    step.bind([0, 1, 2], [5, 6, 7])
    assert len(step.tape.parts) == 2
    for _ in range(4):
        step.launch()
    assert len(step.tape.parts) == (1 if name in UNBOUND else 2)


@needs_two_threads
def test_parts_without_memory_to_be_bound_are_recorded_once(monkeypatch):
    def full(*args):
        raise MemoryError

    recordings = []
    monkeypatch.setattr(replaying, "bound", full)
    monkeypatch.setattr(decoding, "record", lambda run: recordings.append(run) or record(run))
    model = load_model(FOLDER / sorted(UNBOUND)[0])
    step = DecodeStep(model, model.new_cache(3, 20), 3)
    step.bind([0, 1, 2], [5, 6, 7])
    for _ in range(6):
        step.launch()
    assert len(step.tape.parts) == len(recordings) == 2


@needs_two_threads
def test_threads_compute_steps_in_parts_beside_each_other():
    """One has the helpers; the others compute their parts one after the other."""
    model = load_model(FOLDER / "qwen3_5_moe-4bit")

    def replies(_):
        engine = Engine(model, model.new_cache(4, 60, chunk=8))
        requests = [Request([5 + i] * (2 + i), 40, params) for i, params in enumerate(WISHES)]
        all_of(engine, requests)
        assert {len(tape.parts) for tape in shelf(model, engine.cache).kept.values()} == {2}
        return [request.made for request in requests]

    expected = replies(0)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(replies, range(6))) == [expected] * 6


@needs_two_threads
def test_a_part_in_which_something_is_unusual_is_run_by_its_launchers():
    """An infinite activation in one part; the other is done as always."""
    w = quantize(torch.randn(256, 512), 4, 64)
    x = [torch.randn(2, 512) for _ in range(3)]
    recorded = [record(lambda one=one: rms_norm(qmm(one, w))) for one in x]
    run = binding.bind_beside([calls for _, calls in recorded])
    for unusual in (0, 1, 2, None):
        for part, one in enumerate(x):
            one.copy_(torch.randn(2, 512))
            if part == unusual:
                one[1, 3] = torch.inf
        run()
        for (y, _), one in zip(recorded, x, strict=True):
            torch.testing.assert_close(y, rms_norm(qmm(one, w)), rtol=0, atol=0, equal_nan=True)


@needs_two_threads
def test_parts_are_for_models_that_lie_in_caches(monkeypatch):
    monkeypatch.setattr(binding.numba, "get_num_threads", lambda: 16)
    assert [binding.shares(rows, binding.CACHED) for rows in (1, 2, 3, 32)] == [1, 2, 3, binding.MOST]
    assert binding.shares(32, binding.CACHED + 1) == 1
    monkeypatch.setattr(binding.numba, "get_num_threads", lambda: 1)
    assert binding.shares(32, binding.CACHED) == 1


@needs_two_threads
def test_a_step_in_parts_goes_on_when_its_numbers_change():
    """Each part draws for its own rows, by their own settings, and logits are those of all."""
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    found = []
    for parts in (1, 2, 3):
        cache = model.new_cache(5, 40)
        sampler = Sampler(5, model.vocabulary, model.device)
        for slot in range(5):
            sampler.start(slot, SamplingParams(temperature=slot / 4, top_k=20, seed=slot), [])
        step = DecodeStep(model, cache, 5, filtered=True, parts=parts)
        step.bind([3, 1, 4, 0, 2], [7, 8, 9, 10, 11], sampler)
        found.append([(step.launch().tolist(), step.logits.clone(), step.places.clone()) for _ in range(6)])
        assert [len(range(5)[rows]) for rows in step.tape.parts] == {1: [5], 2: [2, 3], 3: [1, 2, 2]}[parts]
    for other in found[1:]:
        for (ids, logits, places), (expected, *more) in zip(other, found[0], strict=True):
            assert ids == expected and torch.equal(logits, more[0]) and torch.equal(places, more[1])


def test_a_step_of_one_text_is_one_call(folder):
    model = load_model(folder)
    step = DecodeStep(model, model.new_cache(1, 20), 1)
    step.bind([0], [7])
    step.launch()
    kernels = binding.traced(step.calls)
    left = [one.name for one, found in zip(step.calls, kernels, strict=True) if found is None]
    assert left == []


def changed_values(call):
    """Other values where a step has other values: in what is no weight."""
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, torch.Tensor) and value.is_contiguous():
            turned = value.flatten().roll(1).view(value.shape)
            value.copy_(turned * 0.5 if value.is_floating_point() else turned)


@pytest.mark.parametrize("case", BOUND, ids=str)
def test_a_bound_call_sees_the_values_of_its_turn(case):
    """What a launcher makes of values would be that of the first turn."""
    args, kwargs = case.inputs(torch.float32)
    _, calls = record(lambda: case.op(*args, **kwargs))
    run = bound(calls, torch.device("cpu"))
    for one in calls:
        changed_values(one)
    state = [t.clone() for one in calls for t in tensors((one.args, one.kwargs))]
    run_all(calls)
    after = [t.clone() for one in calls for t in tensors((one.args, one.kwargs, one.result))]
    for t, before in zip((t for one in calls for t in tensors((one.args, one.kwargs))), state, strict=True):
        t.copy_(before)
    run()
    for t, expected in zip(
        (t for one in calls for t in tensors((one.args, one.kwargs, one.result))), after, strict=True
    ):
        torch.testing.assert_close(t, expected, rtol=0, atol=0, equal_nan=True)


def test_an_infinite_activation_takes_the_launcher():
    x, w = torch.randn(1, 512), quantize(torch.randn(256, 512), 4, 64)
    y, calls = record(lambda: rms_norm(qmm(x, w)))
    run = bound(calls, x.device)
    x[0, 3] = torch.inf
    run()
    torch.testing.assert_close(y, rms_norm(qmm(x, w)), rtol=0, atol=0, equal_nan=True)
    x.fill_(0.5)
    run()
    assert torch.equal(y, rms_norm(qmm(x, w)))


def test_a_launcher_that_looks_at_values_says_so():
    looks_at_values()
    with tracing(), pytest.raises(Unsteady):
        looks_at_values()


def test_results_take_each_others_places():
    x = torch.randn(2, 64)
    y, calls = record(lambda: rms_norm(rms_norm(rms_norm(rms_norm(x)) + 1) * 2))
    expected, apart = y.clone(), sum(t.nbytes for one in calls for t in tensors(one.result)) - y.nbytes
    size = share_memory(calls, addresses(y))
    y.zero_()
    run_all(calls)
    assert torch.equal(y, expected) and size == 2 * x.nbytes < apart


def test_places_of_what_lives_at_a_time_are_apart():
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(1, 40, (200, 3), generator=generator).tolist()
    wanted = {at: (first, first + many, length) for at, (first, many, length) in enumerate(numbers)}
    places, size = arranged(wanted)
    for at, (first, last, length) in wanted.items():
        assert places[at] + length <= size
        for other, (begin, end, many) in wanted.items():
            if other != at and begin <= last and first <= end:
                assert places[other] + many <= places[at] or places[at] + length <= places[other]


def test_only_the_steps_used_last_are_kept():
    model = load_model(FOLDER / "qwen3_moe-4bit")
    cache = model.new_cache(MOST + 2, 20)
    for B in range(1, MOST + 3):
        DecodeStep(model, cache, B)
    shelf(model, cache).get(("prefill", 8), list)  # of another kind: it takes nobody's place
    DecodeStep(model, cache, 3)
    kept = [key[1] for key in shelf(model, cache).kept]
    assert kept == [*range(4, MOST + 3), 8, 3]


def test_a_number_of_answers_that_comes_seldom_is_not_recorded():
    model = load_model(FOLDER / "qwen3_moe-4bit")
    cache = model.new_cache(2, 40)
    engine = Engine(model, cache)
    first, second = (Request([1, 2, 3], OFTEN + more) for more in (0, 20))
    engine.submit(first)
    engine.submit(second)
    alone = 0
    while engine.busy:
        engine.step()
        alone += first.finish_reason is not None and len(second.made) > len(first.made)
        kept = [key[1] for key in shelf(model, cache).kept]
        assert kept == ([1] if alone >= OFTEN else [])
    assert alone == 20


@pytest.mark.parametrize("name", ["qwen3_5_moe-4bit", "gemma4_moe-4bit", "deepseek_v3-kv_b-4bit"])
def test_a_free_slot_fills_a_step_up_until_somebody_takes_it(name, monkeypatch):
    """Three answers in a step of four: the fourth row computes nobody's tokens, and never a newcomer's."""
    for one in (decoding, prefilling):
        monkeypatch.setattr(one, "OFTEN", 1)
    model = load_model(FOLDER / name)

    def answers(replays):
        cache = model.new_cache(4, 60)
        engine = Engine(model, cache, replays=replays)
        requests = [Request([5 + i, 6, 7], 20) for i in range(3)]
        late = Request([9, 8, 7, 6, 5], 12)
        for one in requests:
            engine.submit(one)
        sizes = []
        while engine.busy:
            if len(requests[0].made) == 6:
                engine.submit(late)
            engine.step()
            if engine.flights.last is not None:
                sizes.append((engine.flights.last.step.B, len(engine.flights.last.step.lent)))
        return [one.made for one in (*requests, late)], set(sizes)

    expected, _ = answers(False)
    found, sizes = answers(True)
    assert found == expected
    assert {(4, 1), (4, 0)} <= sizes and {size for size, _ in sizes} <= {1, 2, 4}


def test_a_request_with_a_processor_is_computed_as_written():
    model = load_model(FOLDER / "qwen3_moe-4bit")
    cache = model.new_cache(1, 20)
    engine = Engine(model, cache)
    engine.submit(Request([1, 2, 3], 5, processors=[lambda ids, row: row]))
    while engine.busy:
        engine.step()
    assert not shelf(model, cache).kept


def test_prompts_share_a_step():
    """As they do where nothing is replayed: weights are read once for all of them."""
    model = load_model(FOLDER / "qwen3_moe-4bit")
    engine = Engine(model, model.new_cache(3, 20, chunk=16))
    for _ in range(3):
        engine.submit(Request([1, 2, 3], 4))
    assert len(engine.step()) == 3


def test_threads_record_beside_each_other():
    """Each on a cache of its own: what one thread notes, the other must not run instead."""
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    prompts = [[5, 6, 7], [8, 9], [4, 4, 4, 4], [3]]

    def text(prompt):
        engine, request = Engine(model, model.new_cache(1, 40)), Request(prompt, 24)
        engine.submit(request)
        while engine.busy:
            engine.step()
        return request.made

    alone = [text(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, prompts)) == alone


def test_inference_mode_leaves_nothing_that_cannot_be_used_outside():
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    with torch.inference_mode():
        cache = model.new_cache(1, 40)
        engines = [Engine(model, cache)]
        engines[0].submit(Request([5, 6, 7], 6))
        while engines[0].busy:
            engines[0].step()
    engine, request = Engine(model, cache), Request([5, 6, 7], 6)
    engine.submit(request)
    while engine.busy:
        engine.step()
    assert len(request.made) == 6


def test_a_language_that_is_asked_for_is_not_replayed():
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    with reference():
        assert not Engine(model, model.new_cache(1, 40)).replays
    assert Engine(model, model.new_cache(1, 40)).replays
