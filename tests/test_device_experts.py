"""Experts in host memory, some of them in slots: the same bits as with all of them on the device. CPU tensors stand in
for both memories, and Triton's interpreter for the GPU where kernels are meant."""

from functools import partial

import pytest
import torch
from model_goldens import FOLDER as GOLDENS
from model_goldens import NAMES
from streaming import PROMPT, TINY, assert_the_same_logits, beside, mixtures_of, share_a_scale, tokens

from halfbyte import checkpoint as checkpoints
from halfbyte import explain as explaining
from halfbyte.accounting import skeleton
from halfbyte.commands.explaining import how
from halfbyte.commands.plan import beside_device, described_beside, slots_beside
from halfbyte.decoding import DecodeStep
from halfbyte.device_experts import plan
from halfbyte.engine import Engine, Request, logits
from halfbyte.errors import NotEnoughMemory
from halfbyte.expert_shares import expert_bytes
from halfbyte.fitting import Allowed, device_room
from halfbyte.host_experts import own
from halfbyte.loading import load_model
from halfbyte.model_proof import prove
from halfbyte.models import MODELS
from halfbyte.ops.dispatch import using
from halfbyte.sampling import SamplingParams


@pytest.mark.parametrize("slots", [4, 7, 16])
def test_the_embedded_model_says_the_same(resident, slots):
    """A prompt, whose layers go through buffers, then tokens, whose experts go through slots."""
    model = beside(TINY, slots)
    assert torch.equal(logits(model, PROMPT)[0], logits(resident, PROMPT)[0])
    assert tokens(model) == tokens(resident)
    reads = model.residency.reads
    assert reads.needed == 11 * 8 * 4 and (reads.missing > 0) == (slots < 16)
    assert reads.bytes >= reads.missing * expert_bytes(mixtures_of(TINY)[0])


def test_slots_that_a_failed_step_has_not_filled_are_filled_anew(resident):
    model = beside(TINY, 12)
    tokens(model)
    for lender in model.residency.lenders.values():
        for part in own(lender.slots):
            part.zero_()
    assert tokens(model) != tokens(resident)
    model.residency.mend()
    assert tokens(model) == tokens(resident)


@pytest.mark.parametrize("name", [name for name in NAMES if "moe" in name or "deepseek" in name])
def test_every_family_and_format_says_the_same(name):
    folder = GOLDENS / name
    whole = load_model(folder)
    if not mixtures_of(folder):
        return
    model = beside(folder, whole.experts_per_token)
    assert_the_same_logits(model, whole)
    assert model.residency.reads.needed > 0


def test_a_recorded_step_chooses_and_copies_anew():
    """What is replayed is the choice of slots, not the slots; and fusions join the same calls as without slots."""
    name, found, B = "qwen3_5_moe-4bit", [], 1
    whole = load_model(GOLDENS / name)
    model = beside(GOLDENS / name, max(whole.experts_per_token * B, 6))
    with using("triton"):
        for one in (whole, model):
            one.layers = one.layers[-2:]  # the interpreter takes long
            cache = one.new_cache(B, 16)
            for slot in range(B):
                cache.reset(slot)
            step = DecodeStep(one, cache, B, fused=True)
            step.bind(range(B), list(range(1, B + 1)))
            found.append([(step.launch().tolist(), step.logits.clone()) for _ in range(3)])
            found[-1].append([call.name for call in step.calls])
    for (ids, expected), (others, given) in zip(found[0][:-1], found[1][:-1], strict=True):
        assert ids == others and torch.equal(expected, given)
    added = {"foresee", "copy_ahead", "join", "assign_slots", "fill_slots"}
    assert [call for call in found[1][-1] if call not in added] == found[0][-1]
    assert model.residency.reads.needed > 0


def test_a_recorded_step_of_many_streams_copies_whole_layers():
    """More choices than slots. Where layers take turns in a buffer, a shared expert is not laid beside it."""
    name, found = "qwen3_5_moe-4bit", []
    for model in (load_model(GOLDENS / name), beside(GOLDENS / name, 4)):
        model.layers = model.layers[-2:]
        with using("triton"):
            cache = model.new_cache(2, 16)
            for slot in range(2):
                cache.reset(slot)
            step = DecodeStep(model, cache, 2, fused=True)
            step.bind(range(2), [1, 2])
            found.append([(step.launch().tolist(), step.logits.clone()) for _ in range(3)])
    assert "copy_layer" in [call.name for call in step.calls]
    for (ids, expected), (others, given) in zip(*found, strict=True):
        assert ids == others and torch.allclose(expected, given, rtol=1e-4, atol=1e-5)


def test_an_engine_replays_it():
    made = []
    for model in (load_model(GOLDENS / "qwen3_5_moe-4bit"), beside(GOLDENS / "qwen3_5_moe-4bit", 5)):
        model.layers = model.layers[-2:]  # the interpreter takes long
        with using("triton"):
            engine = Engine(model, model.new_cache(1, 16), replays=True)
            assert engine.replays
            request = Request([5], 3, SamplingParams(temperature=0.0))
            engine.submit(request)
            while engine.busy:
                engine.step()
        made.append(request.made)
    assert made[0] == made[1]


def test_plans_keep_to_the_budget_and_say_the_least():
    mixtures = mixtures_of(TINY)
    each, E = expert_bytes(mixtures[0]), 16
    buffers = 2 * E * each
    for budget, slots in ((0, 4), (8 * 4 * each, 4), (8 * 9 * each + each, 9), (1 << 40, 16)):
        assert plan(mixtures, buffers + budget, buffers + max(budget, 32 * each), 4) == [slots] * 8
    with pytest.raises(NotEnoughMemory, match=f"--gpu-memory {buffers + 32 * each + 1000} at least") as refused:
        plan(mixtures, 0, buffers + 32 * each - 1, 4, 1000)
    assert refused.value.exit_code == 4


def test_dense_weights_and_a_text_come_before_experts():
    checkpoint = checkpoints.open(TINY, set(MODELS))
    skeleton = checkpoint.weights("meta")
    MODELS[checkpoint.config.model_type](checkpoint.config, skeleton)
    experts = sum(skeleton.ledger.wanted[name].size for name in skeleton.ledger.stacks)
    need = device_room(0, skeleton.ledger, 1 << 20).beside
    assert device_room(need + experts, skeleton.ledger, 1 << 20).all_fit
    room = device_room(need + experts - 1, skeleton.ledger, 1 << 20)
    assert not room.all_fit and room.experts <= room.most == experts - 1


def test_explain_says_what_is_copied(monkeypatch):
    monkeypatch.setattr(explaining, "STEPS", 1)
    model = beside(GOLDENS / "qwen3_moe-4bit", 4)
    with using("triton"):
        found = explaining.explain(model, model.new_cache(1, explaining.ROOM), 1e9, fused=False)
    assert (
        found.copies in found.lines
        and found.copies.bytes % expert_bytes(mixtures_of(GOLDENS / "qwen3_moe-4bit")[0]) == 0
    )
    assert {"assign_slots", "fill_slots", "foresee", "copy_ahead", "join"} <= {line.op for line in found.lines}
    assert "experts from host memory: " in how(found, "cpu") and 0 <= found.beside <= found.copies.seconds


def test_layers_alike_share_buffers_but_not_what_is_their_own(copied):
    """Layers 3 and 4 differ in a number that all experts of a layer share."""
    share_a_scale(copied, {3: 2.0, 4: 3.0})
    whole, model = load_model(copied), beside(copied, 4)
    assert len(model.residency.whole) == 2
    assert torch.equal(logits(model, PROMPT)[0], logits(whole, PROMPT)[0])


def test_a_model_is_proved_with_its_experts_elsewhere():
    """Copies into slots are no ops; what is computed with them is held against its body."""
    model = beside(GOLDENS / "qwen3_moe-4bit", 4)
    model.layers = model.layers[:1]  # the bodies take long
    proof = prove(model)
    assert not proof.wrong and proof.calls["expert_mlp"] and model.residency.reads.needed > 0


def test_a_plan_says_what_comes_over_the_bus():
    _, ledger, account = skeleton(TINY)
    need, foretold = device_room(0, ledger, account.cache(8192)).beside, partial(beside_device, Allowed())
    assert foretold(ledger, account, need + account.experts, 1e12, 1e9) == {"experts_in_host_memory_bytes": 0}
    refused = foretold(ledger, account, need, 1e12, 1e9)
    assert "--gpu-memory" in described_beside(refused)[0][1]
    least = int(refused["even_so"].split("--gpu-memory ")[1].split()[0])
    tight = foretold(ledger, account, least, 1e12, 1e9)
    assert tight["expert_slots_per_layer"] == [4] * 8 and tight["experts_in_host_memory_bytes"] == account.experts
    assert tight["expert_slot_bytes"] == account.experts / 4 and "experts_on_disk_bytes" not in tight
    assert tight["copied_bytes_per_token"] == 0.75 * 32 * expert_bytes(mixtures_of(TINY)[0])
    assert tight["tokens_per_second_beside"] == 1e9 / tight["copied_bytes_per_token"]
    assert "copies 24 experts" in described_beside(tight)[2][1]


def test_a_plan_says_what_comes_from_the_disk():
    """A buffer of one layer is enough there, so a GPU that is too small beside host memory alone may do."""
    (_, ledger, account), each = skeleton(TINY), expert_bytes(mixtures_of(TINY)[0])
    few = Allowed(expert_cache=64 * each)
    need = device_room(0, ledger, account.cache(8192)).beside
    least = need + (16 + 32) * each
    with pytest.raises(NotEnoughMemory, match="two whole layers"):
        slots_beside(ledger, account, least)
    found = beside_device(few, ledger, account, least, 1e12, 1e9)
    assert found["expert_slots_per_layer"] == [4] * 8 and found["expert_slot_bytes"] == 32 * each
    assert found["host_bytes"] == found["experts_in_host_memory_bytes"] == found["experts_on_disk_bytes"] == 64 * each
    assert (found["experts_copied_per_token"], found["experts_read_per_token"]) == (24, 16)
    assert found["disk_bytes_per_token"] == 16 * each and found["disk_bytes_per_second"] > 0
    said = dict(described_beside(found))
    assert list(said) == ["on the GPU", "in host memory", "on disk", "a token"] and "and reads 16, " in said["a token"]
    refused = beside_device(few, ledger, account, least - 1, 1e12, 1e9)
    assert "a whole layer" in refused["even_so"] and f"--gpu-memory {least} at least" in refused["even_so"]
    too_few = beside_device(Allowed(expert_cache=each), ledger, account, least, 1e12, 1e9)
    assert "too small" in too_few["even_so"]
