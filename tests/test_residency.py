"""Experts on disk: the same bits as with all of them in memory, within the budget."""

import gc
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checkpoint_files as made
import pytest
import torch
from model_goldens import FOLDER as GOLDENS
from model_goldens import NAMES
from safetensors.torch import load_file, save_file
from streaming import PROMPT, TINY, budget_of, mixtures_of, shard, tokens

from halfbyte import expert_reader
from halfbyte.accounting import skeleton
from halfbyte.engine import logits
from halfbyte.errors import CheckpointError, NotEnoughMemory, UsageError
from halfbyte.expert_cache import POLICIES
from halfbyte.expert_ranges import Range, runs
from halfbyte.expert_shares import expert_bytes, plan
from halfbyte.loading import load_model
from halfbyte.ops.quant import Packed, dequantize, quantize
from halfbyte.residency import Residency


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [4, 5, 16, 40, 128, 1000])
def test_the_embedded_model_says_the_same(resident, policy, slots):
    """From the experts of one token (4) to all (128): prompt, then token by token."""
    budget = budget_of(TINY, slots)
    model = load_model(TINY, expert_cache=budget, expert_policy=policy)
    assert model.residency.nbytes == budget_of(TINY, min(slots, 128)) <= budget
    assert torch.equal(logits(model, PROMPT)[0], logits(resident, PROMPT)[0])
    assert tokens(model) == tokens(resident)
    (shelf,) = model.residency.shelves
    read = shelf.cache.misses.total() + shelf.cache.read_ahead.total()
    assert model.residency.reader.bytes == read * shelf.share.expert_bytes and shelf.cache.hits
    if slots >= 128:
        assert read == len(shelf.cache.places), "nothing is read twice"


def test_an_unknown_policy_is_refused_where_there_is_no_use_for_it_too(tmp_path):
    for folder in (TINY, tmp_path):
        with pytest.raises(UsageError, match="expert_policy: 'mru' is none; there are lru, lfu"):
            load_model(folder, expert_policy="mru")


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_of_one_program_take_turns(resident, policy):
    """Slots are lent to one step: another thread's would fill them with other experts meanwhile."""
    model, wanted = load_model(TINY, expert_cache=budget_of(TINY, 24), expert_policy=policy), tokens(resident, 24)
    with ThreadPoolExecutor(3) as pool:
        replies = [pool.submit(tokens, model, 24) for _ in range(9)]
    assert [one.result() for one in replies] == [wanted] * 9


@pytest.mark.parametrize("name", NAMES)
def test_every_family_and_format_says_the_same(name):
    """mlx-lm's tiny models, with the fewest slots there may be."""
    folder = GOLDENS / name
    mixtures = mixtures_of(folder)
    if not mixtures:
        assert load_model(folder, expert_cache=1).residency is None, "without experts there is nothing to stream"
        return
    whole = load_model(folder)
    with pytest.raises(NotEnoughMemory) as refused:
        load_model(folder, expert_cache=1)
    least = int(str(refused.value).split("(")[1].split(" bytes")[0])
    model = load_model(folder, expert_cache=least)
    assert model.residency.nbytes == least
    ids = [id % whole.vocabulary for id in PROMPT]
    expected, cache = logits(whole, ids)
    found, kept = logits(model, ids)
    assert torch.equal(found, expected)
    assert torch.equal(logits(model, ids[:1], kept)[0], logits(whole, ids[:1], cache)[0])


def test_experts_stored_one_by_one_are_read_in_one_call_each(resident, copied, monkeypatch):
    """As Hugging Face stores them: an expert's parts touch if the file has them so."""
    stored = load_file(shard(copied))
    apart = {}
    for name, tensor in stored.items():
        before, found, part = name.partition(".switch_mlp.")
        if found:
            apart |= {f"{before}.experts.{e}.{part}": one.clone() for e, one in enumerate(tensor)}
        else:
            apart[name] = tensor
    save_file(apart, shard(copied), metadata={"format": "mlx"})
    config = json.loads((copied / "config.json").read_text())
    for section in ("quantization", "quantization_config"):
        config[section] = {k: v for k, v in config.get(section, {}).items() if "switch_mlp" not in k}
    (copied / "config.json").write_text(json.dumps(config))
    model = load_model(copied, expert_cache=budget_of(TINY, 40))
    monkeypatch.setattr(expert_reader, "NOWAIT", 0)  # as if the system had nothing in memory
    assert tokens(model) == tokens(resident)
    misses = model.residency.shelves[0].cache.misses.total()
    assert model.residency.reader.calls < 9 * misses, "some of the nine ranges touch"


def test_ranges_that_touch_are_joined_and_long_ones_cut():
    a, b, view = Path("a"), Path("b"), memoryview(bytearray(100))
    ranges = [Range(b, 5, "w", view[:3]), Range(a, 8, "s", view[10:13]), Range(a, 0, "w", view[20:28])]
    ranges += [Range(a, 20, "long", view[30:53])]
    found = [[(one.path.name, one.start, len(one.view)) for one in run] for run in runs(ranges, 10)]
    assert found == [
        [("a", 0, 8)], [("a", 8, 3)], [("a", 20, 10)], [("a", 30, 10)], [("a", 40, 3)], [("b", 5, 3)],
    ]  # fmt: skip
    assert [len(run) for run in runs(ranges, 11)] == [2, 1, 1, 1, 1]


def test_prompts_are_read_ahead(resident):
    """As many choices as there are experts: the next layer's are read while this one's are computed."""
    model = load_model(TINY, expert_cache=budget_of(TINY, 40))
    assert torch.equal(logits(model, PROMPT)[0], logits(resident, PROMPT)[0])
    (shelf,) = model.residency.shelves
    assert sorted(shelf.cache.read_ahead) == [1, 2, 3, 4, 5, 6, 7] and shelf.cache.misses.total() < 16 * 8 // 2
    before = shelf.cache.read_ahead.total()
    logits(model, PROMPT[:3])  # twelve choices of sixteen experts
    assert shelf.cache.read_ahead.total() == before


def test_plans_keep_to_the_budget_and_share_it_by_form():
    mixtures = mixtures_of(TINY)
    each = expert_bytes(mixtures[0])
    for budget in (4 * each, 4 * each + 1, 50 * each - 1, 127 * each, 10**9):
        (share,) = plan(mixtures, budget, 4)
        assert share.slots == min(budget // each, 128) and share.nbytes <= budget
    with pytest.raises(NotEnoughMemory, match=f"one token take .* \\({4 * each} bytes") as refused:
        plan(mixtures, 4 * each - 1, 4)
    assert refused.value.exit_code == 4


def test_forms_that_differ_have_slots_of_their_own(copied):
    """Layers in 4 and 8 bits, dense, and nvfp4 with a scale an expert and one for all: all are served from disk."""
    stored = load_file(shard(copied))
    kinds = {0: {"bits": 8, "group": 64}, 1: None, 2: {"mode": "nvfp4"}, 3: {"mode": "nvfp4"}, 4: {"mode": "nvfp4"}}
    scales = {2: torch.linspace(1, 3, 16), 3: torch.tensor(2.0), 4: torch.tensor(3.0)}
    for layer, kind in kinds.items():
        name = f"language_model.model.layers.{layer}.mlp.switch_mlp.down_proj"
        words, old, biases = (stored.pop(f"{name}.{part}") for part in ("weight", "scales", "biases"))
        weight = dequantize(Packed(words, old, biases, 4, 64), torch.bfloat16)
        if kind is None:
            stored[f"{name}.weight"] = weight
        else:
            packed = quantize(weight, **kind, **({"global_scale": scales[layer]} if layer in scales else {}))
            stored |= made.parts(name, packed)
    save_file(stored, shard(copied), metadata={"format": "mlx"})
    whole = load_model(copied)
    least = sum(4 * share.expert_bytes for share in plan(mixtures_of(copied), 1 << 40, 4))
    model = load_model(copied, expert_cache=3 * least)
    shares = model.residency.shares
    assert sorted(share.layers for share in shares) == [(0,), (1,), (2,), (3, 4), (5, 6, 7)]
    assert 2.5 * least < model.residency.nbytes <= 3 * least and all(
        4 <= share.slots <= share.experts for share in shares
    )
    assert torch.equal(logits(model, PROMPT)[0], logits(whole, PROMPT)[0])
    assert tokens(model) == tokens(whole)


def test_scales_that_must_be_widened_are_refused(copied):
    stored = load_file(shard(copied))
    name = "language_model.model.layers.5.mlp.switch_mlp.up_proj.biases"
    stored[name] = stored[name].half()
    save_file(stored, shard(copied), metadata={"format": "mlx"})
    with pytest.raises(CheckpointError, match=r"layers\.5\.mlp\.switch_mlp: scales and biases .* differ in dtype"):
        load_model(copied, expert_cache=1 << 30)


def test_threads_and_descriptors_end_with_the_model():
    gc.collect()
    before, open_before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    model = load_model(TINY, expert_cache=budget_of(TINY, 5))
    tokens(model, 2)
    assert threading.active_count() > before
    del model
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (before, open_before)


def test_only_what_is_needed_is_in_memory(monkeypatch):
    """Dense weights are read when a model is loaded, experts are not."""
    read, real, budget = [], os.preadv, budget_of(TINY, 5)
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read.append(n := real(fd, views, at)) or n)
    account = skeleton(TINY)[2]
    for_fingerprint = sum(read)
    read.clear()
    model = load_model(TINY, expert_cache=budget)
    assert isinstance(model.residency, Residency)
    assert sum(read) == account.weights - account.experts + for_fingerprint
