"""Recorded steps: replays give the bits of the step itself, whatever the model, and read nothing back on the way."""

from collections import Counter
from inspect import signature

import pytest
import torch
from model_goldens import CLOSE, FOLDER, NAMES
from test_decoding import all_of, different_lengths

from halfbyte.cache import Cache
from halfbyte.cases import CASES
from halfbyte.decoding import DecodeStep
from halfbyte.engine import Engine
from halfbyte.fusion import FUSIONS, fuse
from halfbyte.graph import CHANGED, bound, record, run_all
from halfbyte.loading import load_model
from halfbyte.ops.attention import attention
from halfbyte.ops.cache import append
from halfbyte.ops.dispatch import using
from halfbyte.ops.quant import qmm, quantize
from halfbyte.ops.rowwise import rms_norm
from halfbyte.ops.sampling import Sampling, sample
from halfbyte.sampling import Sampler, SamplingParams
from halfbyte.step import Run, Step


def test_recording_knows_what_ops_change_in_place():
    """By hand, since a wrapper sees only positions; a case says it by name."""
    told = {(case.op.__name__, name) for case in CASES for name in case.mutates}
    assert told and told == {
        (op, list(signature(case.op).parameters)[at])
        for op, at in CHANGED.items()
        for case in CASES
        if case.op.__name__ == op and case.mutates
    }


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


PROMPTS = [(2, [1, 2, 3]), (0, [4, 5, 6, 7, 8])]


def begun(model, capacity=40, chunk=5):
    """A cache that holds the prompts."""
    cache = model.new_cache(3, capacity, chunk)
    model(cache.plan(PROMPTS), cache)
    cache.advance(PROMPTS)
    return cache


def eager(model, cache, ids, choose=lambda logits: logits.argmax(-1).tolist()):
    work = [(slot, [id]) for (slot, _), id in zip(PROMPTS, ids, strict=True)]
    logits = model(cache.plan(work), cache)
    cache.advance(work)
    return logits, choose(logits)


def decoding(model, cache, **more):
    step = DecodeStep(model, cache, len(PROMPTS), **more)
    step.bind([slot for slot, _ in PROMPTS], [9, 10])
    return step


def same_caches(one, other):
    return one.lengths == other.lengths and all(
        torch.equal(a[name], b[name]) for a, b in zip(one.layers, other.layers, strict=True) for name in a
    )


def assert_same(model, steps):
    expected, cache = begun(model), begun(model)
    step, ids = decoding(model, cache), [9, 10]
    for _ in range(steps):
        logits, ids = eager(model, expected, ids)
        assert step.launch().tolist() == ids
        assert torch.equal(step.logits, logits)
    assert same_caches(cache, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_gives_the_bits_of_the_step(name):
    assert_same(load_model(FOLDER / name), steps=4)


def test_a_ring_turns_in_replays():
    model = load_model(FOLDER / "gemma4_moe-4bit")
    rings = [layer["k"].shape[1] for layer in begun(model).layers]
    assert min(rings) < 30
    assert_same(model, steps=26)


def test_triton_kernels_are_recorded_as_all_others():
    """The interpreter is slow: a few ops rather than a model."""
    x, w, cache = torch.randn(2, 32), torch.randn(32, 32), torch.zeros(2, 4, 1, 32)
    lengths, ids = torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)

    def step():
        q = qmm(rms_norm(x), w).view(2, 1, 1, 32)
        append(cache, q, lengths=lengths)
        o = attention(q, cache, cache, scale=1.0, lengths=lengths).view(2, 32)
        sample(o, Sampling(), lengths.long(), lengths, out=ids)
        lengths.add_(1)
        return o

    with using("triton"):
        o, calls = record(step)
        bound(calls, x.device)()
        replayed = [t.clone() for t in (o, cache, ids)]
        cache.zero_()
        lengths.fill_(1)
        step()
        expected = [step(), cache, ids]
    assert [call.name for call in calls] == ["rms_norm", "qmm", "append", "attention", "_to_copy", "sample", "add_"]
    assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))


def test_tokens_may_be_read_long_after():
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    at_once, late = decoding(model, begun(model)), decoding(model, begun(model))
    read = [at_once.launch().tolist() for _ in range(6)]
    pending = [late.launch() for _ in range(6)]
    assert [one.tolist() for one in pending] == read


def test_other_requests_may_take_the_places_of_a_recorded_step():
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    expected, cache = begun(model), begun(model)
    step = decoding(model, cache)
    for _ in range(2):
        step.launch()
    eager(model, expected, eager(model, expected, [9, 10])[1])
    for one in (expected, cache):
        work = [(1, [11, 12])]
        model(one.plan(work), one)
        one.advance(work)
    step.bind([1, 0], [3, 5])
    got = step.launch().tolist()
    work = [(1, [3]), (0, [5])]
    assert got == model(expected.plan(work), expected).argmax(-1).tolist()


def test_tokens_are_drawn_as_the_sampler_draws_them():
    model = load_model(FOLDER / "qwen3_moe-4bit")
    sampler = Sampler(3, model.vocabulary)
    sampler.start(2, SamplingParams(temperature=1.3, top_k=20, top_p=0.9, seed=5))
    sampler.start(0, SamplingParams(seed=6))
    slots = [slot for slot, _ in PROMPTS]
    expected, cache = begun(model), begun(model)
    step, ids = DecodeStep(model, cache, 2, filtered=True), [9, 10]
    step.bind(slots, ids, sampler)
    for _ in range(5):
        lengths = torch.tensor([expected.lengths[slot] + 1 for slot in slots])
        _, ids = eager(model, expected, ids, lambda logits, at=lengths: sampler(logits, slots, at).tolist())
        assert step.launch().tolist() == ids


def test_an_engine_gives_the_same_tokens_by_replay():
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    texts, rows = [], []
    for replays in (False, True):
        engine = Engine(model, model.new_cache(2, 40, chunk=4), replays=replays, ahead=replays)
        requests = different_lengths()
        made = all_of(engine, requests)
        texts.append([request.made for request in requests])
        # Read after the last step, text by text: which texts' tokens a step makes may differ.
        rows.append(torch.stack([one.logits for request in requests for one in made if one.request is request]))
        assert (engine.flights.last is not None) == replays
    assert texts[0] == texts[1]
    assert torch.equal(*rows)


def test_a_cache_that_has_grown_is_recorded_again():
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    expected, cache = begun(model, capacity=8), begun(model, capacity=8)
    step, ids = decoding(model, cache), [9, 10]
    for length in (8, 8, 8, 300, 300):
        for one in (expected, cache):
            one.reserve(length)
        logits, ids = eager(model, expected, ids)
        assert step.launch().tolist() == ids
        assert torch.equal(step.logits, logits)


def test_a_full_cache_is_said():
    model = load_model(FOLDER / "qwen3_moe-4bit")
    step = decoding(model, begun(model, capacity=7))
    step.launch()
    step.launch()
    with pytest.raises(ValueError, match="would hold 8 tokens: this cache has room for 7"):
        step.launch()


@pytest.mark.parametrize("slots", [[2], [0, 2]])
@pytest.mark.parametrize("name", NAMES)
def test_fusions_change_the_last_bits_alone(name, slots):
    model = load_model(FOLDER / name)
    expected, cache = begun(model), begun(model)
    step, ids = DecodeStep(model, cache, len(slots), fused=True), [9, 10][: len(slots)]
    step.bind(slots, ids)
    step.launch()
    before = len(step.calls)
    for launched in range(3):
        work = [(slot, [id]) for slot, id in zip(slots, ids, strict=True)]
        logits = model(expected.plan(work), expected)
        expected.advance(work)
        ids = logits.argmax(-1).tolist()
        got = step.launch().tolist() if launched else step.ids.tolist()
        assert got == ids
        assert float((step.logits - logits).abs().max() / logits.std()) < CLOSE
    assert len(step.calls) < before or name.endswith("bf16")  # dense weights stay apart


def test_a_shared_expert_is_chosen_and_projections_of_one_input_are_one():
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    step = decoding(model, begun(model), fused=True)
    step.launch()
    counts = [Counter(one.name for one in calls) for calls in (step.calls, fuse(step.calls))]
    layers = len(model.layers)
    assert counts[0]["glu"] == layers + 1 and counts[1]["glu"] == 1  # a gated attention's is left
    assert counts[1]["qmm"] == 3 * layers + 1  # into the mixer, out of it, the router; the head
    assert fuse(step.calls, without=FUSIONS) == step.calls


@pytest.mark.parametrize(
    ("name", "layer", "calls"),
    [
        ("qwen3_5_moe-4bit", 0, ["qmm", "convolve_and_norm", "delta_and_norm", "qmm"]),
        ("qwen3_5_moe-4bit", -1, ["qmm", "rotate_and_append", "attention", "glu", "qmm"]),
        ("gemma4_moe-4bit", 0, ["qmm", "rotate_and_append", "attention", "qmm"]),  # a ring, and values normed
    ],
)
def test_mixers_are_fused_in_triton(name, layer, calls):
    model = load_model(FOLDER / name)
    mixer = getattr(model.layers[layer], "mixer", None) or model.layers[layer].attention
    x, slots, lengths = torch.randn(2, model.norm.weight.shape[0]), int32([2, 0]), int32([30, 7])
    step = Step(slots, lengths - 1, (Run(0, 2, 1, slots, lengths),), torch.float32)
    caches = []
    for _ in range(2):
        torch.manual_seed(1)
        caches.append(Cache([mixer.kept], 3, 40, chunk=4).layers[0])
        for tensor in caches[-1].values():
            tensor.normal_()
    kept, before = caches[0], {key: tensor.clone() for key, tensor in caches[0].items()}
    expected = mixer(x, step, caches[1])
    with using("triton"):
        got, recorded = record(lambda: mixer(x, step, kept))
        fused = fuse(recorded)
        for key, tensor in before.items():
            kept[key].copy_(tensor)
        got.fill_(torch.nan)
        run_all(fused)
    assert [one.name for one in fused] == calls
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for key, tensor in caches[1].items():
        torch.testing.assert_close(kept[key], tensor, rtol=1e-4, atol=1e-5)


def test_rows_are_there_for_every_layer_that_reads_them():
    """A layer without keys of its own reads those of another, which must be appended before that one's attention."""
    model = load_model(FOLDER / "gemma4_e-4bit")
    reader = next(index for index, owner in enumerate(model.owner) if owner != index)
    owner, reader = (model.layers[index].attention for index in (model.owner[reader], reader))
    x, slots, lengths = torch.randn(1, model.norm.weight.shape[0]), int32([0]), int32([1])
    step = Step(slots, lengths - 1, (Run(0, 1, 1, slots, lengths),), torch.float32)
    kept = Cache([owner.kept], 1, 8, chunk=4).layers[0]
    with using("triton"):
        got, recorded = record(lambda: [owner(x, step, kept), reader(x, step, kept)])
        expected, fused = [y.clone() for y in got], fuse(recorded)
        for tensor in kept.values():
            tensor.fill_(torch.nan)
        run_all(fused)
    names = [one.name for one in fused]
    assert names == ["qmm", "rotate_and_append", "attention", "qmm", "rms_norm", "rope", "attention", "qmm"]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("B", [1, 2])
def test_experts_and_the_norm_behind_them_are_fused_in_triton(B):
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    x, h = (torch.randn(B, model.norm.weight.shape[0]) for _ in range(2))

    def block():
        return model.norm.after(h, model.layers[-1].mlp(x), torch.float16)

    expected = block()
    with using("triton"):
        got, recorded = record(block)
        fused = fuse(recorded)
        run_all(fused)
    assert [one.name for one in fused] == ["qmm", "route", "expert_mlp", "combine_and_norm"]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
def test_weights_with_a_scale_of_their_own_stay_apart(scaled):
    x, scales = torch.randn(2, 64), [torch.tensor(value) if scaled else None for value in (3.0, 5.0)]
    weights = [quantize(torch.randn(32, 64), 4, 16, "nvfp4", scale) for scale in scales]
    got, calls = record(lambda: [qmm(x, w) for w in weights])
    expected, fused = [y.clone() for y in got], fuse(calls)
    run_all(fused)
    assert len(fused) == (2 if scaled else 1)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_fusion_to_leave_out_must_exist():
    with pytest.raises(ValueError, match="no fusion is called 'side_by_sde'; there are shared_expert, "):
        fuse([], without=["side_by_sde"])


def test_fused_weights_take_no_more_memory():
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    step = decoding(model, begun(model), fused=True)
    step.launch()
    layer = model.layers[0]
    apart = [layer.mixer.qkv.words, layer.mixer.z.words, layer.mlp.shared.up.weight.words, layer.mlp.experts.up.words]
    values = [t.clone() for t in apart]
    fuse(step.calls)
    together = [t.untyped_storage().data_ptr() for t in apart]
    assert together[0] == together[1] and together[2] == together[3]
    assert all(torch.equal(a, b) for a, b in zip(apart, values, strict=True))


def test_what_nobody_reads_falls_out():
    x, y = torch.ones(4, 8), torch.zeros(4)

    def step():
        normed = rms_norm(x)
        normed.abs().max()
        y.add_(normed.view(8, 4).sum(0))
        return normed * 2

    result, calls = record(step)
    assert sorted(call.name for call in calls) == ["add_", "mul", "rms_norm", "sum"]
    x[1:] = 3 * torch.rand(3, 8)
    replay, before = bound(calls, torch.device("cpu")), y.clone()
    replay()
    assert torch.equal(result, rms_norm(x) * 2)
    assert torch.equal(y, before + rms_norm(x).view(8, 4).sum(0))


def test_a_step_whose_shapes_depend_on_values_is_refused():
    with pytest.raises(ValueError, match="cannot be recorded"):
        record(lambda: torch.ones(3).nonzero())
    rows = torch.rand(4, 2)
    with pytest.raises(ValueError, match="cannot be recorded"):
        record(lambda: rows[torch.tensor([True, False, True, True])])


def test_rows_picked_by_number_are_recorded():
    rows, places = torch.rand(4, 2), torch.tensor([3, 0, 3])
    result, calls = record(lambda: rows[places] + rows[places.view(3, 1), 1])
    places.copy_(torch.tensor([1, 1, 2]))
    bound(calls, torch.device("cpu"))()
    assert torch.equal(result, rows[places] + rows[places, 1].view(3, 1))
