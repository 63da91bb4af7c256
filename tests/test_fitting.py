"""Budgets of memory: what goes in, what stays on disk, what is refused; and that a process keeps to them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from streaming import TINY, budget_of, lent, shard, tokens

from halfbyte import cli, fitting, memory
from halfbyte.accounting import skeleton
from halfbyte.cache import bytes_of
from halfbyte.device_experts import DeviceResidency
from halfbyte.errors import CheckpointError, NotEnoughMemory, UsageError
from halfbyte.fitting import Allowed, place, place_beside
from halfbyte.loading import experts_beside, load_model
from halfbyte.tiered_experts import TieredResidency

CPU, GPU = torch.device("cpu"), torch.device("cpu", 0)
WORKS = fitting.GPU_WORKING


@pytest.fixture(autouse=True)
def unlimited():
    """Limits are those of a process: each test begins without."""
    memory.LIMITS.clear()
    yield
    memory.LIMITS.clear()


@pytest.fixture
def free(monkeypatch):
    """Says how much is free beside the working memory."""
    return lambda count: monkeypatch.setattr(memory, "available", lambda device: fitting.WORKING + count)


def placed(allowed, model):
    allowed.restrict(CPU)
    return place(allowed, skeleton(TINY)[1], needs(model)[2], model.experts_per_token)


def needs(model):
    """(dense weights, experts, room for the texts)"""
    account = skeleton(TINY)[2]
    text = bytes_of(model.kept, 1, min(model.context, fitting.TEXT), 1, torch.float32)
    return account.weights - account.experts, account.experts, text


def test_what_fits_is_resident_and_what_does_not_is_cut(resident, free):
    dense, experts, text = needs(resident)
    enough = 8 * max(text, (dense + experts) // 7 + 1)
    free(enough)
    assert placed(Allowed(), resident) == (None, False)
    free(dense + experts // 2 + text)
    cache, direct = placed(Allowed(), resident)
    assert budget_of(TINY, 4) <= cache < experts // 2 + text and direct
    with pytest.raises(NotEnoughMemory, match=f"--ram {dense + experts + text} or"):
        placed(Allowed(fit=False), resident)
    assert placed(Allowed(expert_cache=budget_of(TINY, 4)), resident).cache == budget_of(TINY, 4)


def test_what_is_read_of_files_may_stay_in_memory_that_nobody_needs(resident):
    """Without a limit the system has room for the tiny model's files; with one, nobody promised it any."""
    few = budget_of(TINY, 5)
    assert placed(Allowed(expert_cache=few), resident) == (few, False)
    assert placed(Allowed(expert_cache=few, memory_limit=memory.held(CPU) + (1 << 30)), resident) == (few, True)


def test_too_little_names_the_least(resident, free, capsys):
    dense, _, text = needs(resident)
    least = dense + text + budget_of(TINY, 4)
    free(least - 1)
    with pytest.raises(NotEnoughMemory, match=f"--ram {least} or --memory-limit") as refused:
        placed(Allowed(), resident)
    assert refused.value.exit_code == 4
    free(least)
    assert placed(Allowed(), resident).cache >= budget_of(TINY, 4)


def test_the_least_that_is_named_is_enough_next_time(resident):
    """A process that is asked for so much may be a little larger when it starts again."""
    with pytest.raises(NotEnoughMemory) as refused:
        placed(Allowed(memory_limit=1 << 20), resident)
    named = int(str(refused.value).split("--memory-limit ")[1].split()[0])
    larger = torch.ones(8 << 20, dtype=torch.uint8)
    placed(Allowed(memory_limit=named), resident)
    assert larger.all()


def test_what_stays_on_disk_is_said(resident, free, caplog):
    dense, experts, text = needs(resident)
    free(dense + experts // 2 + text)
    model = load_model(TINY)
    assert 0 < model.residency.nbytes < experts and "the others stay on disk" in caplog.text
    assert tokens(model, 3) == tokens(resident, 3)


@pytest.fixture
def memories(monkeypatch):
    """`memories(gpu, host)` says how much is free beside the working memory; a second CPU stands in for the GPU."""

    def put(gpu, host):
        free = {GPU: gpu + fitting.GPU_WORKING, CPU: host + fitting.WORKING}
        monkeypatch.setattr(memory, "available", lambda device: free[device])

    return put


def on_gpu(model):
    """Dense weights and the room for a text."""
    return needs(model)[0] + bytes_of(model.kept, 1, min(model.context, fitting.TEXT), 1, torch.bfloat16)


def beside_gpu(allowed=None):
    """The embedded model as it is loaded beside a GPU; None where all of it is on the GPU."""
    found = []

    def residency(ledger, made):
        found.append(experts_beside(made, ledger, GPU, allowed or Allowed(), "lfu"))
        return found[0] or Mock(lenders={})

    model = lent(TINY, residency)
    return model if found[0] else None


def test_beside_a_gpu_experts_go_where_there_is_room(resident, memories, caplog):
    """All on the GPU, else all in host memory, else on disk: each as long as the one before has no room."""
    dense, (_, experts, _), each = on_gpu(resident), needs(resident), budget_of(TINY, 1)
    memories(dense + experts, 0)
    assert beside_gpu() is None and not caplog.text
    memories(dense + experts - 1, experts)
    model = beside_gpu()
    assert isinstance(model.residency, DeviceResidency) and "the others come from host memory" in caplog.text
    assert tokens(model, 3) == tokens(resident, 3)
    memories(dense + experts - 1, experts - 1)
    model = beside_gpu()
    assert isinstance(model.residency, TieredResidency) and "the others stay on disk" in caplog.text
    assert model.residency.below.nbytes == 112 * each, "an eighth of what is free is left to the system"
    assert tokens(model, 3) == tokens(resident, 3)
    memories(dense + 48 * each, 4 * each)
    least = beside_gpu()
    assert (least.residency.device_bytes, least.residency.below.nbytes) == (48 * each, 4 * each)
    assert tokens(least, 3) == tokens(resident, 3)


def test_beside_a_gpu_an_expert_cache_leaves_experts_on_disk(resident, memories):
    """Also where all would have room, as on a CPU; and more than the host has is what it has."""
    for host, cache, held in ((1 << 30, 20, 20), (80 * budget_of(TINY, 1), 1000, 70)):
        memories(1 << 30, host)
        model = beside_gpu(Allowed(expert_cache=budget_of(TINY, cache)))
        assert model.residency.below.nbytes == budget_of(TINY, held)
        assert {one.count for one in model.residency.lenders.values()} == {16}
        assert tokens(model, 3) == tokens(resident, 3)


def test_beside_a_gpu_too_little_names_the_least(resident, memories):
    dense, each = on_gpu(resident), budget_of(TINY, 1)
    memories(dense + 48 * each, 4 * each - 1)
    with pytest.raises(NotEnoughMemory, match=rf"--ram {4 * each} or --memory-limit \d+ at least") as refused:
        beside_gpu()
    assert refused.value.exit_code == 4
    memories(dense + 48 * each - 1, 4 * each)
    with pytest.raises(NotEnoughMemory, match=f"a whole layer .* --gpu-memory {dense + 48 * each + WORKS} at least"):
        beside_gpu()
    with pytest.raises(NotEnoughMemory, match=r"an expert cache of .* is too small"):
        beside_gpu(Allowed(expert_cache=4 * each - 1))
    assert beside_gpu(Allowed(fit=False)) is None, "and loading what has no room is refused"


def test_beside_a_gpu_files_are_kept_in_memory_that_nobody_needs(resident, memories):
    _, experts, _ = needs(resident)
    few, ledger = budget_of(TINY, 20), skeleton(TINY)[1]
    memories(0, experts + few)
    assert place_beside(Allowed(expert_cache=few), ledger, 4) == (few, False)
    assert place_beside(Allowed(expert_cache=few, ram=1 << 30), ledger, 4) == (few, True)
    memories(0, experts + few - 1)
    assert place_beside(Allowed(expert_cache=few), ledger, 4) == (few, True)


def test_flags_reach_the_loading(capsys):
    assert cli.main(["generate", "tiny", "--prompt", "x", "-n", "1", "--memory-limit", "1MB"]) == 4
    assert "--memory-limit" in capsys.readouterr().err
    memory.LIMITS.clear()
    assert cli.main(["generate", "tiny", "--prompt", "x", "-n", "1", "--ram", "1MB", "--fit", "off"]) == 4
    assert "may take 1.0 MB; they need" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--expert-cache", "--ram", "--memory-limit"])
def test_a_map_keeps_to_no_limit_and_says_so(flag, capsys):
    """What is mapped is in memory as the system likes: nobody may think that a limit holds."""
    assert cli.main(["generate", "tiny", "--prompt", "x", "-n", "1", "--load", "map", flag, "1GB"]) == 2
    assert "limits on memory are for weights that are read" in capsys.readouterr().err


def test_reads_past_the_system_say_the_same(resident, copied):
    """Also at the end of a file that is no multiple of a page; and a file that is cut is found out."""
    assert shard(copied).stat().st_size % 4096
    allowed = Allowed(expert_cache=budget_of(TINY, 6), memory_limit=memory.held(CPU) + (2 << 30))
    model = load_model(copied, allowed=allowed)
    assert not model.residency.reader.files.buffered, "this file system has direct reads"
    assert tokens(model) == tokens(resident)
    with shard(copied).open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(CheckpointError, match=r"it ends at byte \d+; tensor"):
        tokens(model)


def test_fewer_experts_are_another_model_and_its_cost_can_be_asked(resident, tmp_path, caplog, capsys):
    model = load_model(TINY, top_k_experts=2)
    assert (model.experts_per_token, resident.experts_per_token) == (2, 4)
    assert model.fingerprint == f"{resident.fingerprint}-2-of-4-experts" and "replies get worse" in caplog.text
    assert load_model(TINY, top_k_experts=4).fingerprint == resident.fingerprint
    with pytest.raises(UsageError, match="a token has 4 experts; 5 of them"):
        load_model(TINY, top_k_experts=5)
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a fox who had a lantern, and every night he lit it.")
    assert cli.main(["perplexity", "tiny", str(text), "--top-k-experts", "2", "--kl", "tiny", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["kl"] > 1e-4
    few = ["--expert-cache", str(budget_of(TINY, 4))]  # for two models, where one takes what memory there is
    assert cli.main(["perplexity", "tiny", str(text), "--top-k-experts", "2", "--kl", "tiny", "--json", *few]) == 0
    assert json.loads(capsys.readouterr().out) == whole


def test_plan_says_what_lies_where(capsys):
    assert cli.main(["plan", "tiny", "--expert-cache", str(budget_of(TINY, 32)), "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["expert_cache_bytes"] == said["experts_on_disk_bytes"] / 3 == budget_of(TINY, 32)
    assert said["experts_read_per_token"] == 0.75 * 8 * 4 and said["disk_bytes_per_token"] == 24 * budget_of(TINY, 1)
    assert said["dense_bytes"] + 4 * said["expert_cache_bytes"] == skeleton(TINY)[2].weights
    assert 0 < said["tokens_per_second_streamed"] < said["tokens_per_second_at_most"]
    assert cli.main(["plan", "tiny", "--expert-cache", str(budget_of(TINY, 32)), "--device", "cpu"]) == 0
    assert "reads 24 experts" in capsys.readouterr().out
    assert cli.main(["plan", "tiny", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expert_cache_bytes"] is None


@pytest.mark.parametrize("limit", [("--ram", "1MB"), ("--memory-limit", "1MB")])
def test_plan_says_no_where_loading_would_refuse(capsys, limit):
    """And names the same least; it is an answer all the same, so it exits 0."""
    assert cli.main(["generate", "tiny", "-p", "x", "-n", "1", "--device", "cpu", *limit]) == 4
    named = re.search(r"they need (.*?) with all .* --ram (\d+) or", capsys.readouterr().err)
    assert cli.main(["plan", "tiny", "--device", "cpu", "--json", *limit]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] is False and said["available_bytes"] <= 1_000_000 and named[0] in said["even_so"]
    assert cli.main(["plan", "tiny", "--device", "cpu", *limit]) == 0
    text = capsys.readouterr().out
    assert "it fits" not in text and "too little" in text and named[0] in text
    assert cli.main(["plan", "tiny", "--device", "cpu", "--json", "--ram", named[2]]) == 0
    assert "even_so" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("context", ["100", "8192"])
def test_plan_says_it_fits_where_all_is_loaded(resident, capsys, context):
    """By the least that has room for all; what is between that and the least of all leaves experts on disk."""
    for off, fits in ((0, True), (-2_000_000, False)):
        dense, experts, text = needs(resident)
        given = ["--context", context, "--ram", str(dense + experts + text + 1_000_000 + off)]
        assert cli.main(["plan", "tiny", "--device", "cpu", "--json", *given]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["fits"], "experts_on_disk_bytes" in said) == (fits, not fits)
        assert cli.main(["plan", "tiny", "--device", "cpu", *given]) == 0
        shown = capsys.readouterr().out
        assert ("it fits" in shown, "too little" in shown) == (fits, not fits)


RUN = """
import json, os, sys, threading, time
from pathlib import Path
sys.path[:0] = [str(Path({tests!r})), str(Path({tests!r}).parent)]
import torch
from halfbyte import memory
from halfbyte.cli import main
most = 0
def look():
    global most
    while True:
        most = max(most, memory.held(torch.device("cpu")))
        time.sleep(0.05)
threading.Thread(target=look, daemon=True).start()
limit = memory.held(torch.device("cpu")) + {more}
code = main(["generate", "tiny", "--prompt", "Once", "-n", "8", "--temp", "0", "--memory-limit", str(limit)])
print(json.dumps([code, most, limit]), file=sys.stderr)
"""


def test_a_process_keeps_to_its_limit():
    """Sampled every 50 ms, from the start to the end: at most 5 % more than was allowed."""
    code = RUN.format(tests=str(Path(__file__).parent), more=440 << 20)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    status, most, limit = json.loads(ran.stderr.strip().splitlines()[-1])
    assert status == 0, ran.stderr
    assert most <= 1.05 * limit
