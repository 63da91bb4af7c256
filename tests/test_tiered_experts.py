"""Experts on disk, in host memory and on a device: the same bits as with all of them there. CPU tensors stand in for
all memories, and Triton's interpreter for the GPU where kernels are meant."""

import errno
import gc
import logging
import os
import threading

import pytest
import torch
from model_goldens import FOLDER as GOLDENS
from model_goldens import NAMES
from streaming import (
    CPU,
    PROMPT,
    TINY,
    assert_the_same_logits,
    budget_of,
    failing_after,
    lent,
    mixtures_of,
    shard,
    share_a_scale,
    tiered,
    tokens,
)

from halfbyte import expert_reader
from halfbyte.chat import Tokenizer
from halfbyte.commands.bench import reads_since
from halfbyte.commands.chat_commands import stats
from halfbyte.compilation import compile_kernels
from halfbyte.conversation import Conversation
from halfbyte.engine import Engine, logits
from halfbyte.errors import CheckpointError, NotEnoughMemory, StorageError
from halfbyte.expert_cache import POLICIES
from halfbyte.expert_shares import expert_bytes
from halfbyte.foresight import blocks_of
from halfbyte.host_experts import own
from halfbyte.loading import load_model
from halfbyte.model_proof import prove
from halfbyte.ops.dispatch import using
from halfbyte.tiered_experts import TieredResidency

E, LAYERS = 16, 8


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("slots", "held"), [(4, 4), (4, 128), (7, 5), (5, 40), (12, 16), (16, 4)])
def test_the_embedded_model_says_the_same(resident, policy, slots, held):
    """A prompt chooses nearly all of sixteen experts, and most have fewer slots; then token by token, four."""
    model = tiered(TINY, slots, held, policy)
    assert torch.equal(logits(model, PROMPT)[0], logits(resident, PROMPT)[0])
    assert tokens(model) == tokens(resident)
    residency = model.residency
    (shelf,) = residency.below.shelves
    read = shelf.cache.misses.total() + shelf.cache.read_ahead.total()
    assert residency.reads.bytes == read * shelf.share.expert_bytes
    assert residency.reads.missing == shelf.cache.misses.total() <= residency.copied <= residency.reads.needed
    if held == 128:
        assert read == len(shelf.cache.places), "nothing is read twice"
    if slots == 16:
        assert residency.copied == len([key for one in residency.lenders.values() for key in one.cache.places])


@pytest.mark.parametrize("name", [name for name in NAMES if "moe" in name or "deepseek" in name])
def test_every_family_and_format_says_the_same(name):
    folder = GOLDENS / name
    whole = load_model(folder)
    if not mixtures_of(folder):
        return
    model = tiered(folder, whole.experts_per_token, max(whole.experts_per_token, 2))
    assert_the_same_logits(model, whole)


def test_layers_alike_share_a_buffer_but_not_what_is_their_own(copied):
    """Layers 3 and 4 differ in a number that all experts of a layer share."""
    share_a_scale(copied, {3: 2.0, 4: 3.0})
    whole, model = load_model(copied), tiered(copied, 4, 20)
    assert len(model.residency.buffers) == 2
    assert torch.equal(logits(model, PROMPT)[0], logits(whole, PROMPT)[0])
    assert tokens(model) == tokens(whole)


def test_kernels_for_a_gpu_get_the_same_from_slots_and_buffer():
    """One loan whatever was chosen, so the launches are those of the whole model, and so are the bits."""
    name, found = "qwen3_5_moe-4bit", []
    for model in (load_model(GOLDENS / name), tiered(GOLDENS / name, 4, 6)):
        with using("triton"):
            model.layers = model.layers[-1:]  # the interpreter takes long
            rows, cache = logits(model, [5, 9, 100])
            found.append([rows, logits(model, [33], cache)[0]])
    assert all(map(torch.equal, *found)) and model.residency.copied > model.residency.lenders.popitem()[1].count


def test_what_is_on_the_device_is_not_asked_for_below(resident):
    """The same token again and again: what it chooses stays where it is."""
    model = tiered(TINY, 4, 8)
    for _ in range(3):
        before = model.residency.reads.bytes, model.residency.copied
        assert torch.equal(logits(model, [5])[0], logits(resident, [5])[0])
    assert (model.residency.reads.bytes, model.residency.copied) == before
    assert model.residency.reads.needed == 3 * LAYERS * 4 and model.residency.reads.missing == LAYERS * 4
    assert set(model.residency.hit_rates.values()) == {1 - 4 / 12}


def test_what_is_on_the_device_is_not_read_ahead(resident):
    """Prompts have the next layer's experts read ahead: not those that it has already, but what it never chose."""
    model, read = tiered(TINY, 16, 40), [0]
    for _ in range(2):
        assert torch.equal(logits(model, PROMPT)[0], logits(resident, PROMPT)[0])
        read.append(model.residency.reads.bytes)
    assert model.residency.below.shelves[0].cache.read_ahead.total() > 0
    assert read[2] - read[1] < read[1] // 8


def test_a_prompt_leaves_the_slots_alone_and_takes_from_them(resident):
    model = tiered(TINY, 8, 4)
    logits(model, [5])
    places = [dict(one.cache.places) for one in model.residency.lenders.values()]
    before = model.residency.copied
    assert torch.equal(logits(model, PROMPT)[0], logits(resident, PROMPT)[0])
    assert places == [one.cache.places for one in model.residency.lenders.values()]
    chosen = model.residency.reads.needed - 4 * LAYERS
    assert model.residency.copied - before == chosen - 4 * LAYERS, "those four came from the slots"


def test_memory_is_what_was_planned():
    model = tiered(TINY, 5, 20)
    residency, each = model.residency, expert_bytes(mixtures_of(TINY)[0])
    assert residency.device_bytes == (LAYERS * 5 + E) * each
    assert residency.nbytes == residency.device_bytes + budget_of(TINY, 20)
    assert residency.source == "disk" and not residency.replayable and residency.stalls == 0
    with pytest.raises(NotEnoughMemory, match=f"{4 * each} bytes") as refused:
        tiered(TINY, 5, 3)
    assert refused.value.exit_code == 4


def test_host_memory_is_pinned_and_given_back(monkeypatch):
    from halfbyte import tiered_experts

    held = []
    monkeypatch.setattr(tiered_experts, "pin", lambda area, device: held.append(area.data_ptr()))
    monkeypatch.setattr(tiered_experts, "unpin", lambda areas, device: [held.remove(a.data_ptr()) for a in areas])
    model = tiered(TINY, 5, 20)
    assert len(held) == 9 and all(address % 4096 == 0 for address in held), "an area a part, with pages of its own"
    reader = model.residency.below.reader
    del model
    gc.collect()
    assert not held and not any(thread.is_alive() for thread in reader.threads)


def test_an_engine_does_not_record_it_and_kernels_are_compiled_without_reading(resident):
    model = tiered(TINY, 5, 20)
    lenders = [block.experts for block in blocks_of(model.layers)]
    lenders[0].below.likely = [10**9]
    compile_kernels(model)
    assert [block.experts for block in blocks_of(model.layers)] == lenders == list(model.residency.lenders.values())
    assert model.residency.reads.needed == 0 and not lenders[0].below.likely
    assert not Engine(model, model.new_cache(1, 16)).replays
    assert tokens(model) == tokens(resident)


def test_a_model_is_proved_with_its_experts_elsewhere():
    model = tiered(GOLDENS / "qwen3_moe-4bit", 4, 6)
    model.layers = model.layers[:1]  # the bodies take long
    proof = prove(model)
    assert not proof.wrong and proof.calls["expert_mlp"] and model.residency.reads.needed > 0


def test_people_are_told_what_was_read():
    model = tiered(TINY, 5, 20)
    before = model.residency.reads
    conversation = Conversation(model, Tokenizer.open(TINY, model.vocabulary), max_tokens=4, temperature=0.0)
    assert list(conversation.say("Who are you?"))
    shown = stats("", conversation, "tiny")
    assert "% were in memory (2.1 MB)" in shown and "from disk, read at" in shown
    told = reads_since(before, model)
    assert 0 < told["expert_hit_rate"] < 1 and told["disk_bytes_read"] > 0 < told["disk_gbps"]


def known(model):
    """Experts that count as being somewhere, on the device and in host memory."""
    lenders = model.residency.lenders.values()
    return [key for one in lenders for key in one.cache.places], list(model.residency.below.shelves[0].cache.places)


def test_what_lies_somewhere_is_what_the_files_have(resident, preadv):
    """After a step that failed, and its mending: every slot that counts as an expert is that expert."""
    model, real, left = tiered(TINY, 6, 24), os.preadv, iter(range(30))
    tokens(model, 4)

    def fail(fd, views, at):
        if next(left, None) is not None:
            return real(fd, views, at)
        views[0][:] = bytes(len(views[0]))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    preadv(fail)
    with pytest.raises(StorageError, match="Input/output error"):
        for id in range(100):
            logits(model, [id])
    model.residency.mend()
    whole = [own(block.experts) for block in blocks_of(resident.layers)]
    on_device, in_host = known(model)
    assert on_device and in_host
    for lender, sources in zip(model.residency.lenders.values(), whole, strict=True):
        levels = [(lender.cache.places, own(lender.slots)), (lender.below.shelf.cache.places, own(lender.below.slots))]
        for places, held in levels:
            for (layer, expert), slot in places.items():
                if layer == lender.layer:
                    assert all(torch.equal(a[slot], b[expert]) for a, b in zip(held, sources, strict=True))


def test_a_disk_that_fails_once(resident, monkeypatch, preadv):
    """The request gets the error; the next one gets the right tokens."""
    model, expected = tiered(TINY, 6, 40), tokens(resident)
    for good in (0, 70, 300, 1000):
        preadv(failing_after(good))
        with pytest.raises(StorageError, match=r"reading at byte \d+: Input/output error"):
            tokens(model)
        monkeypatch.undo()
        assert tokens(model) == expected


def test_a_shard_that_is_cut_while_it_runs(resident, copied):
    model = tiered(copied, 5, 5)
    assert tokens(model, 2) == tokens(resident, 2)
    os.truncate(shard(copied), 2000)
    with pytest.raises(CheckpointError, match=r"it ends at byte \d+; tensor '.*switch_mlp.*' needs"):
        tokens(model)


def test_a_copy_that_fails_is_forgotten_at_both_levels(resident, monkeypatch):
    """An interrupt while experts are copied up, then while they are computed with."""
    from halfbyte import tiered_experts

    model, expected, real = tiered(TINY, 6, 40), tokens(resident), tiered_experts.fill_slots
    for count in (0, 5, 20, 60):
        left = iter(range(count))

        def interrupted(loads, sources, targets, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            real(loads, sources, targets)

        with monkeypatch.context() as patch:
            patch.setattr(tiered_experts, "fill_slots", interrupted)
            with pytest.raises(KeyboardInterrupt):
                tokens(model)
        assert tokens(model) == expected
    lender = next(iter(model.residency.lenders.values()))
    loans = lender.lend(torch.tensor([[1, 2, 3, 4]]))
    next(loans)
    assert {(0, 1), (0, 2), (0, 3), (0, 4)} <= lender.cache.places.keys()
    loans.close()
    next(lender.lend(torch.tensor([[5]])))
    assert lender.cache.places.keys() == {(0, 5)}
    assert tokens(model) == expected


def test_a_disk_that_stalls_is_counted(resident, monkeypatch, preadv, caplog):
    model, real, once = tiered(TINY, 6, 128), os.preadv, iter([0.3])

    def stall(fd, views, at):
        threading.Event().wait(next(once, 0))
        return real(fd, views, at)

    preadv(stall)
    monkeypatch.setattr(expert_reader, "STALLED", 0.1)
    with caplog.at_level(logging.WARNING):
        assert tokens(model, 3) == tokens(resident, 3)
    assert model.residency.stalls >= 1


def test_reads_past_the_system_say_the_same(resident):
    assert tokens(tiered(TINY, 5, 6, direct=True)) == tokens(resident)


def test_nothing_runs_after_it_was_closed():
    model = tiered(TINY, 5, 6)
    model.residency.close()
    with pytest.raises(RuntimeError):
        logits(model, PROMPT)


def test_slots_must_be_said_for_every_layer():
    with pytest.raises(ValueError, match="shorter"):
        lent(TINY, lambda ledger, made: TieredResidency(ledger, budget_of(TINY, 8), [4] * 7, CPU, 4))
