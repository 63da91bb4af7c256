"""Whole models against mlx-lm's own logits; a token's logits are the same bits however it is computed."""

from functools import cache

import numpy as np
import pytest
import torch
from model_goldens import CLOSE, FOLDER, NAMES, golden, problem

from halfbyte.engine import logits
from halfbyte.loading import load_model
from halfbyte.ops.dispatch import trace, using

every_model = pytest.mark.parametrize("name", NAMES)


@cache
def model_of(name):
    return load_model(FOLDER / name)


def error(got, wanted):
    return float((got - wanted).abs().max() / wanted.std())


@pytest.mark.parametrize("language", ["torch", "numba"])
@every_model
def test_logits_are_those_of_mlx_lm(name, language):
    """On a GPU: `python tests/model_goldens.py --device cuda`. Triton's interpreter would take minutes a model."""
    model, wanted = model_of(name), golden(name)
    with using(language), trace() as entries:
        got, kept = logits(model, wanted["prompt"])
        tail = wanted["prefill_logits_tail"]
        assert error(got[-len(tail) :], tail) < CLOSE
        for token, row in zip(wanted["decode_tokens"], wanted["decode_logits"], strict=True):
            assert int(got[-1].argmax()) == token
            got, kept = logits(model, [int(token)], kept)
            assert error(got[-1], row) < CLOSE
    assert {entry.language for entry in entries} == {language}


@every_model
def test_steps_of_several_texts_give_them_too(name):
    """On a GPU, where they are fused: `python tests/model_goldens.py --device cuda --streams 1 8`."""
    assert problem(name, "cpu", "float32", streams=3) == ""


@every_model
def test_16_bits_keep_what_is_clear(name):
    assert problem(name, "cpu", "bfloat16") == ""


@every_model
@pytest.mark.parametrize("cuts", [[1] * 40, [7, 1, 16], [32]], ids=["one by one", "odd", "32"])
def test_chunks_do_not_change_a_bit(name, cuts):
    model = model_of(name)
    ids = golden(name)["prompt"].tolist()[:40]
    whole, _ = logits(model, ids)
    kept, parts, start = model.new_cache(chunk=32), [], 0
    for cut in [*cuts, len(ids)]:
        if ids[start : start + cut]:
            part, kept = logits(model, ids[start : start + cut], kept)
            parts.append(part)
        start += cut
    assert torch.equal(torch.cat(parts), whole)


@every_model
def test_a_row_in_a_ragged_batch_is_the_row_alone(name):
    """Seven prompts of seven lengths in other slots than their order, prefilled and decoded together."""
    model, random = model_of(name), torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(0, model.vocabulary, (size,), generator=random).tolist() for size in (1, 40, 3, 17, 1, 28, 9)
    ]
    slots = [4, 0, 6, 2, 1, 5, 3]
    shared = model.new_cache(slots=7, capacity=64)
    rows = []
    for turn in range(4):
        new = prompts if turn == 0 else [[int(row.argmax())] for row in rows[-1]]
        work = list(zip(slots, new, strict=True))
        rows.append(model(shared.plan(work), shared))
        shared.advance(work)
    for index, prompt in enumerate(prompts):
        got, kept = logits(model, prompt)
        for turn in range(4):
            assert torch.equal(got[-1], rows[turn][index])
            got, kept = logits(model, [int(got[-1].argmax())], kept)


@every_model
def test_a_snapshot_goes_on_where_it_was_taken(name):
    model = model_of(name)
    ids = golden(name)["prompt"].tolist()
    straight, _ = logits(model, ids)
    _, kept = logits(model, ids[:-5])
    saved = kept.snapshot(0)
    logits(model, ids[:3], kept)  # the original goes elsewhere
    other = model.new_cache(slots=3, capacity=7, chunk=19)
    other.restore(2, saved)
    got = model(other.plan([(2, ids[-5:])], wanted="all"), other)
    assert torch.equal(got, straight[-5:])


def test_a_slot_that_was_reset_has_no_past():
    model = model_of("qwen3_5_moe-4bit")
    ids = golden("qwen3_5_moe-4bit")["prompt"].tolist()
    fresh, kept = logits(model, ids)
    kept.reset(0)
    assert torch.equal(logits(model, ids, kept)[0], fresh)


@every_model
def test_the_memory_of_a_cache_is_known_before_it_is_made(name):
    kept = model_of(name).new_cache(slots=3, capacity=100, chunk=8)
    assert kept.nbytes == sum(tensor.nbytes for layer in kept.layers for tensor in layer.values())


@pytest.mark.parametrize(
    ("ids", "said"), [([512], "from 0 to 511, got 512"), ([-1], "got -1"), ([1.5], "got 1.5"), (["a"], "got 'a'")]
)
def test_ids_outside_the_vocabulary_are_refused(ids, said):
    with pytest.raises(ValueError, match=said):
        logits(model_of("qwen3_moe-4bit"), ids)


def test_ids_may_be_numpy_s():
    model = model_of("qwen3_moe-4bit")
    assert torch.equal(logits(model, np.array([1, 2, 3], dtype=np.int32))[0], logits(model, [1, 2, 3])[0])


def test_no_ids_give_no_rows():
    got, kept = logits(model_of("qwen3_moe-4bit"), [])
    assert got.shape == (0, 512) and kept.lengths == [0]


def test_a_full_cache_says_so():
    model = model_of("qwen3_moe-4bit")
    kept = model.new_cache(slots=1, capacity=4, chunk=8)
    with pytest.raises(ValueError, match="room for 4"):
        kept.plan([(0, [1, 2, 3, 4, 5])])
    with pytest.raises(ValueError, match="1 to 8"):
        kept.plan([(0, list(range(9)))])
