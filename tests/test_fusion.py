"""Fusions, each by name: as near to the truth as what they replace, and never at the cost of a tensor that is read.

A fused call is held against the torch bodies of the calls that it was made from, on what it finds in memory: in the
working dtype, and in float64, which is exact. Numba has the fusions that need no kernel of their own, Triton has all.
"""

import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from model_goldens import FOLDER

from halfbyte.check import LIMIT, ratio, tensors
from halfbyte.decoding import DecodeStep
from halfbyte.fusion import FUSIONS, fuse
from halfbyte.graph import CHANGED, Book, addresses, call, record, run_all
from halfbyte.loading import load_model
from halfbyte.ops import attention, experts, quant, recurrent, routing, rowwise
from halfbyte.ops import cache as cache_ops
from halfbyte.ops.dispatch import find, reference, using

FAMILIES = ["qwen3_5_moe-4bit", "qwen3_moe-4bit", "gemma4_moe-4bit", "deepseek_v3-4bit"]
NARROW = {"numba": torch.bfloat16, "triton": torch.float16}  # Triton's interpreter cannot multiply bfloat16
APPLIES = {
    "shared_expert": "qwen3_5_moe-4bit", "dense_mlp": "gemma4_moe-4bit", "side_by_side": "qwen3_moe-4bit",
    "rotate_and_append": "gemma4_moe-4bit", "recurrent_step": "qwen3_5_moe-4bit", "choose_experts": "qwen3_moe-4bit",
    "routed_experts": "qwen3_moe-4bit", "combine_and_norm": "qwen3_moe-4bit", "norm_chain": "gemma4_moe-4bit",
    "add_to_stream": "qwen3_moe-4bit", "norm_first": "qwen3_moe-4bit",
    "rotate_and_append_latent": "deepseek_v3-4bit", "rotate_and_attend": "gemma4_moe-4bit",
}  # fmt: skip
BUILDS_ON = {"norm_first": ("add_to_stream",), "rotate_and_attend": ("rotate_and_append",)}
# Lengths: the weights of four experts alone are near or far by luck, so there are more of them.
TEXTS = {"qwen3_moe-4bit": [[12], [14], [17], [23], [27], [30]]}
MODULES = (attention, cache_ops, experts, quant, recurrent, routing, rowwise)


def memory(x):
    return x.untyped_storage().data_ptr()


class Shadows:
    """The memory of tensors once more, in another dtype for floats: what is written there, the tensors do not see."""

    def __init__(self, floats=None):
        self.floats, self.copies = floats, {}

    def keep(self, hidden):
        """Forget all but this memory, which fused calls leave alone: a call further on may norm the same once more."""
        self.copies = {address: copy for address, copy in self.copies.items() if address in hidden}

    def of(self, value):
        """What tensors show, in the shadow of their memory. Quantised weights stay: their bodies are exact anyway."""
        if isinstance(value, torch.Tensor):
            if memory(value) not in self.copies:
                whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).clone()
                self.copies[memory(value)] = whole.to(self.floats) if self.widened(value.dtype) else whole
            return self.copies[memory(value)].as_strided(value.shape, value.stride(), value.storage_offset())
        if isinstance(value, tuple | list):
            return type(value)(map(self.of, value))
        return self.floats if isinstance(value, torch.dtype) and self.widened(value) else value

    def widened(self, dtype):
        return self.floats is not None and dtype.is_floating_point

    def run(self, one):
        """A recorded call, as its torch body does it."""
        args = self.of(one.args)
        if one.name == "_to_copy":
            self.of(one.result).copy_(args[0])
            return
        given = {name: self.of(value) for name, value in one.kwargs.items() if name != "out"}
        op = getattr(import_module(f"halfbyte.ops.{family(one.name)}"), one.name)
        with reference():
            made = op(*args, **given)
        for old, new in zip(tensors(self.of(one.result)), tensors(made), strict=True):
            old.copy_(new)


def shown(one):
    """What a recorded call makes or changes."""
    return tensors((one.result, [one.args[CHANGED[one.name]]] if one.name in CHANGED else []))


def read_by(one):
    """The tensors that a call reads; those that it writes into are given to it, too."""
    written = addresses(one.result)
    return [t for t in tensors((one.args, one.kwargs)) if memory(t) not in written]


def groups(fused, recorded, wanted):
    """Fused calls, as few at a time as do all the work of some recorded calls; these; and what is read later."""
    pending = []
    for index, one in enumerate(fused):
        pending.append(one)
        parts = [recorded[part] for part in recorded if any(part in each.parts for each in pending)]
        later = [*tensors(wanted), *(t for each in fused[index + 1 :] for t in read_by(each))]
        made = {memory(t) for part in parts for t in shown(part)}
        written = addresses(results(pending)).union(*(each.writes for each in pending))
        if written & addresses(later) <= made:
            yield pending, parts, [t for t in later if memory(t) in made]
            pending = []
    assert not pending


def held(calls, fused, wanted):
    """Run the calls; the error ratios, by name, of those that were not recorded as they are: the first of a kind each.

    All others run as they were recorded.
    """
    recorded, found, seen = {one.parts[0]: one for one in calls}, {}, []
    exact, body, hidden = Shadows(torch.float64), Shadows(), set()
    for group, parts, later in groups(fused, recorded, wanted):
        kind = [(one.name, [t.shape for t in tensors((one.args, one.kwargs))]) for one in group]
        if kind in seen or (len(group) == len(parts) == 1 and group[0].args is parts[0].args):
            run_all(parts)
            continue
        seen.append(kind)
        for shadows in (exact, body):
            shadows.keep(hidden)
            for part in parts:
                shadows.run(part)
        hidden |= addresses([part.result for part in parts]) - addresses([one.result for one in group])
        run_all(group)
        later += [part.args[CHANGED[part.name]] for part in parts if part.name in CHANGED]
        ratios = [ratio(t, body.of(t), exact.of(t)) for t in later]
        found.setdefault(" ".join(one.name for one in group), []).append(max(ratios))
    return found


def assert_held(*traces):
    """As model_proof.py: of each kind of call the root mean square, since plain torch may be lucky in one of them."""
    found = {}
    for trace in traces:
        for name, ratios in held(*trace).items():
            found.setdefault(name, []).extend(ratios)
    for name, ratios in found.items():
        assert math.sqrt(sum(one * one for one in ratios) / len(ratios)) <= LIMIT, f"{name}: {ratios}"


def of_few_layers(model):
    """The model with one layer of each kind."""
    kinds = {}
    for layer in model.layers:
        mixer = getattr(layer, "mixer", None) or layer.attention
        kinds.setdefault((type(mixer), type(layer.mlp), getattr(mixer, "window", None)), layer)
    model.layers = list(kinds.values())
    if hasattr(model, "owner"):
        model.owner = list(range(len(model.layers)))
    return model


def recorded_step(name, dtype, lengths):
    """The step after texts of these lengths, whose keys, values and states are random."""
    model = of_few_layers(load_model(FOLDER / name, dtype=dtype))
    cache = model.new_cache(len(lengths), 40, chunk=4)
    torch.manual_seed(1)
    for tensor in (tensor for layer in cache.layers for tensor in layer.values()):
        tensor.normal_()
    cache.lengths = list(lengths)
    step = DecodeStep(model, cache, len(lengths), fused=False)
    step.bind(range(len(lengths)), range(5, 5 + len(lengths)))
    step.launch()
    return step


def in_language(language, calls):
    """Recorded calls with the kernels of another language. Only fused calls run so: the interpreter is slow."""
    return [replace(one, run=find(language, family(one.name), one.name) or one.run) for one in calls]


def family(op):
    return next((module.__name__.rpartition(".")[2] for module in MODULES if hasattr(module, op)), "none")


@pytest.mark.parametrize("language", ["numba", "triton"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fused_calls_are_as_accurate_as_their_parts(name, language):
    narrow = str(NARROW[language]).removeprefix("torch.")
    for dtype, texts in (("float32", [[9, 30]]), (narrow, TEXTS.get(name, [[17], [12]]))):
        traces = []
        for lengths in texts:
            step = recorded_step(name, dtype, lengths)
            fused = fuse(in_language(language, step.calls))
            assert len(fused) < len(step.calls)
            traces.append((step.calls, fused, step.logits))
        assert_held(*traces)


def rewritten(name, calls):
    """What one fusion alone makes of a trace."""
    return fuse(calls, without=FUSIONS.keys() - {name, *BUILDS_ON.get(name, ())})


def trace(name):
    """A fresh one, since fusing moves its tensors, of a family that this fusion is for; as if recorded in Triton."""
    return in_language("triton", recorded_step(APPLIES[name], "float16", [9]).calls)


def names(calls):
    return [one.name for one in calls]


def made_of(calls):
    return {(one.name, *(part.name for part in one.parts)) for one in calls}


def test_every_fusion_is_tested_here():
    assert APPLIES.keys() == FUSIONS.keys()


@pytest.mark.parametrize("name", APPLIES)
def test_each_fusion_can_be_had_alone_and_left_out(name):
    calls = trace(name)
    alone = rewritten(name, calls)
    assert {part for one in alone for part in one.parts} == {part for one in calls for part in one.parts}
    kinds = made_of(alone) - made_of(fuse(calls, without=FUSIONS.keys() - {*BUILDS_ON.get(name, ())}))
    assert kinds
    assert not kinds & made_of(fuse(trace(name), without=[name])), "another fusion does it"


def test_some_fusions_are_for_several_rows_and_some_for_one():
    assert "choose_experts" not in names(fuse(trace("choose_experts"), rows=1))
    assert "choose_experts" in names(fuse(trace("choose_experts"), rows=2))
    assert "routed_experts" in names(fuse(trace("routed_experts"), rows=1))
    assert "routed_experts" not in names(fuse(trace("routed_experts"), rows=2))
    assert "rotate_and_attend" in names(fuse(trace("rotate_and_attend"), rows=1))
    assert "rotate_and_attend" not in names(fuse(trace("rotate_and_attend"), rows=2))


@pytest.mark.parametrize("name", APPLIES)
def test_what_somebody_reads_is_not_fused_away(name):
    """Each tensor that a fusion does away with gets a reader, at the end of the step."""
    calls = trace(name)
    read, before = Book(calls).readers, {part: one for one in calls for part in one.parts}
    hidden = [
        (calls.index(before[part]), index)
        for one in rewritten(name, calls)[: len(calls)]
        if one not in calls
        for part in one.parts
        for index, tensor in enumerate(tensors(before[part].result))
        if read[memory(tensor)]
    ]
    for place, index in hidden[:8]:
        calls = trace(name)
        tensor = list(tensors(calls[place].result))[index]
        reader = call("mul", torch.mul, (tensor, 2.0), {}, tensor * 2)
        planted = rewritten(name, [*calls, reader])
        there = addresses(results(planted)) | {address for one in planted for address in one.writes}
        assert memory(tensor) in there, calls[place].name


def weights_of(calls):
    made = {address for one in calls for address in one.writes}
    return [t for one in calls for t in tensors(one.args) if memory(t) not in made]


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_loaded_to_where_fusions_want_them(name):
    calls = in_language("triton", recorded_step(name, "float16", [9]).calls)
    before = [(t, t.data_ptr()) for t in weights_of(calls)]
    assert len(fuse(calls)) < len(calls)
    assert all(t.data_ptr() == address for t, address in before)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_that_are_moved_leave_no_memory_behind(name):
    calls = in_language("triton", recorded_step(name, "float16", [9]).calls)
    weights = weights_of(calls)
    for t in {id(t): t for t in weights}.values():
        t.data = t.clone()  # apart from each other
    before = [t.untyped_storage() for t in weights]
    fuse(calls)
    moved = [old for t, old in zip(weights, before, strict=True) if memory(t) != old.data_ptr()]
    assert moved
    addresses = [old.data_ptr() for old in moved]
    del before
    left = {address for address, old in zip(addresses, moved, strict=True) if users(old) > addresses.count(address)}
    assert not left, f"{len(left)} of {len(moved)} are still held"


def users(storage):
    return torch._C._storage_Use_Count(storage._cdata)


def results(calls):
    return [one.result for one in calls]


def gemma_layer(y, shares, dense, h, o, weights, scale, narrow):
    """What stands between the projections of a Gemma layer."""
    wide = None if h.dtype == narrow else h.dtype

    def norm(x, weight, into, **more):
        made = rowwise.rms_norm(x, weight, 1e-5, extra_dtype=into, **more)
        return made[-1] if isinstance(made, tuple) else made

    r = norm(o, weights[0], wide, residual=h)
    ys = rowwise.rms_norm_many(r.to(narrow), weights[1:4], 1e-5)
    dense = norm(dense, weights[4], None)
    h = norm(norm(routing.combine(y, shares), weights[5], None), weights[6], wide, add=dense, residual=r, scale=scale)
    return *ys, h, norm(h, weights[7], wide and narrow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("B", "A", "D"), [(1, 8, 96), (3, 1, 133), (2, 3, 7)])
def test_a_chain_of_norms_is_one_call(B, A, D, dtype):
    def normal(*shape, dtype=dtype):
        return torch.randn(shape).to(dtype)

    torch.manual_seed(D)
    given = (
        normal(B, A, D), torch.rand(B, A), normal(B, D), normal(B, D, dtype=torch.float32), normal(B, D),
        [normal(D) for _ in range(8)], normal(1), dtype,
    )  # fmt: skip
    with using("triton"):
        made, calls = record(lambda: gemma_layer(*given))
    fused = fuse(calls)
    assert names(fused) == ["norm_chain", "norm_chain"]
    assert_held((calls, fused, made))
    first = [t.clone() for t in made]
    run_all(fused)
    assert all(map(torch.equal, made, first)), "the same bits twice"


def test_a_norm_that_another_reads_stays():
    x, h, w = torch.randn(2, 24), torch.randn(2, 24), torch.randn(24)

    def step():
        inner = rowwise.rms_norm(x, w)
        return rowwise.rms_norm(inner, w, residual=h), inner + 1

    with using("triton"):
        made, calls = record(step)
    fused = fuse(calls)
    assert names(fused) == names(calls) == ["rms_norm", "rms_norm", "add"]
    expected = [t.clone() for t in made]
    run_all(fused)
    assert all(map(torch.equal, made, expected))


def attended(q, k, v, weight, positions, inv_freq, k_cache, v_cache, slots, lengths):
    """What stands between the projections of an attention of one token."""
    q, k = (rowwise.rope(rowwise.rms_norm(x, weight), positions, inv_freq) for x in (q, k))
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache_ops.append(cache, new[:, None], slots=slots, lengths=lengths)
    return attention.attention(q[:, None], k_cache, v_cache, scale=1.0, slots=slots, lengths=lengths)


@pytest.mark.parametrize(("D", "launches"), [(8, ["rotate_and_append", "attention"]), (16, ["rotate_and_attend"])])
def test_heads_that_a_tensor_core_is_too_large_for_are_attended_apart(D, launches):
    heads = [torch.randn(1, H, D).half() for H in (4, 2, 2)]
    slots, positions, lengths = (torch.tensor([number], dtype=torch.int32) for number in (0, 2, 3))
    given = (
        torch.ones(D).half(), positions, torch.rand(D // 2), torch.zeros(1, 24, 2, D).half(),
        torch.zeros(1, 24, 2, D).half(), slots, lengths,
    )  # fmt: skip
    with using("triton"):
        _, calls = record(lambda: attended(*heads, *given))
    assert names(fuse(calls, rows=1)) == launches
