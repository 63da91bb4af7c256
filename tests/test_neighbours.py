"""Weights that are read together get memory together: which, in what order, and that nothing of it can be seen."""

import pytest
import torch
from model_goldens import FOLDER, NAMES

from halfbyte.accounting import skeleton
from halfbyte.checkpoint.neighbours import neighbours
from halfbyte.checkpoint.spans import Span
from halfbyte.decoding import DecodeStep
from halfbyte.fusion import fuse_in_place
from halfbyte.loading import load_model


def spans(*names, kind="U32", shape=(4, 2)):
    return [Span(name, kind, shape, ()) for name in names]


def grouped(*given):
    return [[span.name for span in group] for group in neighbours(given)]


def test_projections_of_one_input_stand_in_the_order_of_their_calls():
    given = spans(*(f"layers.{i}.self_attn.{name}_proj.weight" for i in (0, 1) for name in "vokq"))
    first, alone, second, _ = grouped(*given)
    assert first == [f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"] and alone[0].endswith("o_proj.weight")
    assert second == [name.replace(".0.", ".1.") for name in first]


def test_experts_stand_before_the_one_that_all_tokens_take():
    stacks = spans("mlp.switch_mlp.gate_proj.scales", "mlp.switch_mlp.up_proj.scales", shape=(8, 4, 2))
    shared = spans("mlp.shared_expert.gate_proj.scales", "mlp.shared_expert.up_proj.scales")
    assert grouped(*shared, *stacks) == [[two.name, one.name] for one, two in zip(shared, stacks, strict=True)]
    assert grouped(*stacks) == [[one.name] for one in stacks], "stacks alone stay apart: each is large"
    assert grouped(*shared) == [[one.name for one in shared]]


def test_what_is_stored_in_another_way_is_no_neighbour():
    given = [*spans("q_proj.scales", kind="BF16"), *spans("k_proj.scales", kind="F32"), *spans("norm.weight")]
    assert grouped(*given) == [[span.name] for span in given]


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_in_one_group(name):
    wanted = list(skeleton(FOLDER / name)[1].wanted.values())
    groups = neighbours(wanted)
    assert sorted(span.name for group in groups for span in group) == sorted(span.name for span in wanted)
    assert any(len(group) > 1 for group in groups)


@pytest.mark.parametrize("name", NAMES)
def test_mapped_weights_lie_elsewhere_and_give_the_same_bits(name):
    """A map shows weights where the file has them; so steps differ in what is one product, and in nothing else."""
    found = []
    for load in ("read", "map"):
        model = load_model(FOLDER / name, load=load)
        step = DecodeStep(model, model.new_cache(1, 24), 1)
        step.bind([0], [7])
        tokens = [step.launch().tolist() for _ in range(6)]
        found.append((tokens, step.logits.clone()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_only_what_keeps_its_bits_is_one_product_on_a_cpu():
    """Small matrices are multiplied in another way than what they would be part of."""
    model = load_model(FOLDER / "qwen3_5_moe-4bit")
    step = DecodeStep(model, model.new_cache(1, 24), 1, fused=False)
    step.bind([0], [7])
    step.launch()
    joined = [one.args[1].shape for one in fuse_in_place(step.calls) if len(one.parts) > 1]
    assert (9, 128) in joined, "a router and a shared expert's gate, both small"
    assert all(N < 776 for N, _ in joined), "the gates of a recurrent layer are small, its other projections are not"
