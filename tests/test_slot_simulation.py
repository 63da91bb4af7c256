"""Slots on a GPU, foretold: the plain rule is the kernel's, a simulation is the run, and `plan --trace` says so."""

import argparse
import json
import math
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from model_goldens import FOLDER as GOLDENS
from streaming import GREEDY, PROMPT, TINY, beside, mixtures_of, tiered, tokens

from halfbyte import cli, expert_shares, fitting
from halfbyte.accounting import skeleton
from halfbyte.cache import bytes_of
from halfbyte.commands.plan import known_gpu, slots_beside
from halfbyte.commands.plan_trace import Gpu, beside_gpu
from halfbyte.device_experts import AHEAD
from halfbyte.engine import Engine, Request, logits
from halfbyte.errors import NotEnoughMemory
from halfbyte.expert_cache import POLICIES
from halfbyte.expert_reader import ExpertReader
from halfbyte.expert_shares import expert_bytes
from halfbyte.fitting import TEXT, Allowed
from halfbyte.loading import load_model
from halfbyte.ops.dispatch import using
from halfbyte.routes import Routes, Step
from halfbyte.simulation import simulate
from halfbyte.slot_simulation import Slots, simulate_slots
from halfbyte.slots import CHOICE, State, assign_slots

LANGUAGES = ("torch", "triton") if find_spec("triton") else ("torch",)
EACH = expert_bytes(mixtures_of(TINY)[0])


def choices(steps, T, A, E, seed):
    """Some experts are chosen more often than others, as in a model; tokens of a step may choose the same."""
    random = torch.Generator().manual_seed(seed)
    likely = torch.rand(E, generator=random) ** 3
    for _ in range(steps):
        yield torch.stack([torch.multinomial(likely, A, generator=random) for _ in range(T)]).int()


def loaded(pairs):
    return [(expert, slot) for expert, slot in pairs.tolist() if expert >= 0]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    ("T", "A", "E", "slots"),
    [(1, 1, 2, 1), (1, 4, 16, 4), (1, 3, 37, 9), (1, 8, 64, 64), (3, 2, 20, 6), (2, 8, 40, 17), (5, 4, 24, 23)],
)
def test_the_rule_is_that_of_the_slots(language, T, A, E, slots):
    """What is copied where, every score and every count, after each choice and each guess of a limit of 0 to 3."""
    plain, real = Slots(E, slots), State.new(E, slots, torch.device("cpu"))
    guesses = choices(40, T, A, E, seed=1)
    with using(language):
        for turn, (ids, guess) in enumerate(zip(choices(40, T, A, E, seed=0), guesses, strict=True)):
            if limit := turn % 4:
                _, loads = assign_slots(guess, real, limit=limit)
                assert plain.guess(guess.flatten().tolist(), limit) == loaded(loads)
                assert {*real.table[2].nonzero().flatten().tolist()} == plain.early
            lie, loads = assign_slots(ids, real)
            assert plain.choose(ids.flatten().tolist()) == loaded(loads)
            assert [plain.place[id] for id in ids.flatten().tolist()] == lie.flatten().tolist()
            assert [plain.place.get(expert, -1) for expert in range(E)] == real.table[0].tolist()
            assert plain.scores == real.table[1].tolist() and plain.counts == real.counts.tolist()


def test_who_leaves():
    """By hand: the least score, then the lower id; scores fade; who is asked for stays."""
    slots = Slots(experts=6, slots=3)
    assert slots.choose([0, 1]) == [] and slots.scores == [CHOICE, CHOICE, 0, 0, 0, 0]
    assert slots.choose([3, 0]) == [(3, 2)], "2 was never chosen"
    faded = CHOICE - (CHOICE * 11 >> 10)
    assert slots.scores == [faded + CHOICE, faded, 0, CHOICE, 0, 0]
    assert slots.choose([4]) == [(4, 1)], "1 was chosen once, and earlier than 3"
    assert slots.choose([5, 2]) == [(2, 2), (5, 1)], "by expert: the slot of 3, then of 4; 0 was chosen twice"
    assert slots.place == {0: 0, 2: 2, 5: 1} and slots.counts == [7, 4, 0, 0]


def test_what_is_guessed():
    """By hand: the first that are missing come, whoever else is guessed stays, and scores are not touched."""
    slots = Slots(experts=8, slots=4)
    assert slots.guess([7, 0, 6], limit=1) == [(7, 1)], "0 is guessed too, so 1 is the first that leaves"
    assert slots.scores == [0] * 8 and slots.counts == [0, 0, 0, 1]
    assert slots.choose([7, 5]) == [(5, 0)] and slots.counts == [2, 1, 1, 1]
    assert slots.guess([6, 6, 4], limit=2) == [(6, 2)], "two tokens that want the same are two of the limit"
    slots.choose([5])
    assert slots.counts == [3, 1, 1, 2] and not slots.early, "a guess that was wrong"


def test_steps_of_many_tokens_pass_slots_by():
    """A prompt changes nothing; a guess is made where both layers have room for the step."""
    prompt = Step([[4, 5, 4, 5, 0, 5], [4, 5, 4, 5, 0, 5]], [[0] * 6], [[4, 5, 4, 5, 0, 5]])
    reply = Step([[0, 1], [0, 4]], [[0, 4]], [[4, 0]])
    trace = Routes("", 2, 6, 2, [prompt, reply, reply])
    found = simulate_slots(trace, [3, 4], [10, 1000], ahead=1)
    assert (found.tokens, found.needed, found.read) == (2, 8, 1)
    assert (found.bytes_read, found.bytes_ahead, found.by_layer) == (0, 1000, (1.0, 0.75))
    assert simulate_slots(trace, [3, 4], [10, 1000], ahead=0).bytes_read == 1000
    pair = Step([[0, 1, 2, 3], [1, 2, 1, 2]], [[0] * 4], [[4, 5, 4, 5]])
    trace = Routes("", 2, 6, 2, [pair, Step([[0, 1], [0, 3]], [[0, 3]], [[0, 3]])])
    assert simulate_slots(trace, [4, 4], [10, 1000], ahead=1).read == 1, "4 came in the place of 0"
    assert simulate_slots(trace, [3, 4], [10, 1000], ahead=1).read == 0, "the first layer passes slots by"


def of(model):
    return Routes(skeleton(TINY)[0].fingerprint, 8, model.expert_count, model.experts_per_token)


def reads_of(predicted):
    return predicted.needed, predicted.read, predicted.bytes_read + predicted.bytes_ahead


@pytest.fixture(scope="module")
def recorded():
    """A prompt of 12 tokens and a reply of 30, computed with all experts in memory."""
    model = load_model(TINY)
    found = of(model)
    with found.recording(model.layers):
        tokens(model, 30)
    return found


@pytest.mark.parametrize("slots", [4, 7, 13])
def test_a_simulation_is_the_run(recorded, slots):
    """The same choices and guesses, so every layer's hits and copies are the run's."""
    model = beside(TINY, slots)
    own = of(model)
    with own.recording(model.layers):
        tokens(model, 30)
    assert own.steps == recorded.steps, "slots change neither a choice nor a guess"
    found, reads = simulate_slots(recorded, [slots] * 8, [EACH] * 8, ahead=1), model.residency.reads
    assert reads_of(found) == (reads.needed, reads.missing, reads.bytes) and found.bytes_ahead > 0
    rates = [1 - (absent + foreseen) / asked for asked, absent, foreseen, _ in model.residency.counts]
    assert list(found.by_layer) == rates and found.hit_rate == reads.hit_rate


@pytest.mark.parametrize("name", ["qwen3_moe-4bit", "qwen3_5_moe-4bit", "deepseek_v3-4bit", "gemma4_moe-4bit"])
def test_every_family_is_foretold(name):
    """Layers without experts come first in one, and layers of another guess nothing."""
    mixtures, whole = mixtures_of(GOLDENS / name), skeleton(GOLDENS / name)[2]
    slots = [whole.experts_per_token] * len(mixtures)
    model = beside(GOLDENS / name, slots[0])
    trace, cache = Routes("", len(mixtures), whole.expert_count, slots[0]), None
    with trace.recording(model.layers):
        for id in PROMPT:
            cache = logits(model, [id % model.vocabulary], cache)[1]
    found = simulate_slots(trace, slots, [expert_bytes(mixture) for mixture in mixtures], ahead=1)
    reads = model.residency.reads
    assert reads_of(found) == (reads.needed, reads.missing, reads.bytes) and found.read > 0
    assert (found.bytes_ahead > 0) == (name != "gemma4_moe-4bit")


@pytest.mark.parametrize("slots", [9, 12])
def test_several_texts_at_a_time_are_foretold_too(slots):
    """Steps of three tokens, 12 choices, go through slots or by them; then comes one text alone, which is counted."""
    model = beside(TINY, slots)
    trace, reads, lengths = of(model), [], []
    with trace.recording(model.layers):
        for texts, made in ((3, 6), (1, 8)):
            engine = Engine(model, model.new_cache(texts, len(PROMPT) + made))
            for start in range(texts):
                engine.submit(Request(PROMPT[start:] if texts > 1 else PROMPT[:1], made, GREEDY))
            while engine.busy:
                engine.step()
            reads.append(model.residency.reads)
            lengths.append(len(trace.steps))
    assert any(trace.tokens(step) == 3 for step in trace.steps)
    before = Routes(trace.fingerprint, 8, 16, 4, trace.steps[: lengths[0]])
    first, both = (reads_of(simulate_slots(one, [slots] * 8, [EACH] * 8, ahead=1)) for one in (before, trace))
    run = reads[1] - reads[0]
    assert [less - more for less, more in zip(both, first, strict=True)] == [run.needed, run.missing, run.bytes]


def test_a_plan_counts_slots_as_a_run_does():
    """The room that loading leaves for a text is the account's."""
    model, account = load_model(TINY), skeleton(TINY)[2]
    length = min(model.context, TEXT)
    assert bytes_of(model.kept, 1, length, 1, torch.bfloat16) == account.cache(length)


@pytest.fixture
def trace(recorded, tmp_path):
    recorded.save(tmp_path / "routes")
    return str(tmp_path / "routes")


@pytest.fixture
def six(monkeypatch):
    """Bytes of a GPU on which each layer of the tiny model gets 6 slots.

    Beside what a step computes with, its experts are so small that there is nothing between the least and all: here
    a step takes nothing.
    """
    monkeypatch.setattr(fitting, "GPU_WORKING", 0)
    _, ledger, account = skeleton(TINY)
    for free in range(account.weights, 2 * account.weights + account.cache(TEXT), EACH):
        with suppress(NotEnoughMemory):
            if slots_beside(ledger, account, free) == [6] * 8:
                return free
    raise AssertionError("no size gives 6 slots")


def plan(capsys, trace, *more, json_=True):
    code = cli.main(["plan", "tiny", "--device", "cpu", "--trace", trace, *more, *(["--json"] if json_ else [])])
    out, err = capsys.readouterr()
    return code, (json.loads(out) if json_ and out else out), err


def test_the_command(recorded, trace, six, capsys):
    budget = str(six)
    code, said, _ = plan(capsys, trace, "--gpu-memory", budget)
    found, expected = said["expert_slots"], simulate_slots(recorded, [6] * 8, [EACH] * 8, AHEAD)
    assert code == 0 and "expert_caches" not in said and found["slots_per_layer"] == [6] * 8
    assert found["slot_bytes"] == 48 * EACH and found["gpu_memory_bytes"] == int(budget)
    assert found["hit_rate"] == expected.hit_rate and found["hit_rate_by_layer"] == list(expected.by_layer)
    assert found["copied_bytes_per_token"] == expected.bytes_per_token
    assert found["bus_bytes_per_second"] is found["tokens_per_second_at_most"] is None, "nothing here can be measured"
    _, said, _ = plan(capsys, trace, "--gpu-memory", budget, "--copy-gbps", "0.5")
    assert said["expert_slots"]["tokens_per_second_at_most"] == expected.tokens_per_second(math.inf, 5e8)
    _, text, _ = plan(capsys, trace, "--gpu-memory", budget, json_=False)
    assert "slots for 6 of 16 experts a layer" in text and f"{expected.hit_rate:.1%} found there" in text
    assert "no CUDA GPU here" in text and "--copy-gbps" in text and "layers 0 to 7" in text
    _, text, _ = plan(capsys, trace, "--gpu-memory", budget, "--copy-gbps", "0.5", json_=False)
    assert "at 500.0 MB/s" in text and "if computing took no time" in text


def test_a_gpu_with_room_for_all(trace, capsys):
    _, text, _ = plan(capsys, trace, "--gpu-memory", "80GB", json_=False)
    assert "room for all experts, nothing is copied" in text
    _, said, _ = plan(capsys, trace, "--gpu-memory", "80GB")
    assert said["expert_slots"]["hit_rate"] == 1 and said["expert_slots"]["copied_bytes_per_token"] == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("slots", "held"), [(4, 4), (7, 5), (5, 40), (12, 16), (16, 4), (4, 128)])
def test_a_simulation_of_three_tiers_is_the_run(recorded, policy, slots, held, monkeypatch):
    """What slots on a device miss is asked of the cache in host memory, and what that misses is read from a disk of
    which the system holds nothing."""
    nothing = lambda self, where, experts, slots, memory: np.zeros((len(experts), len(where.sizes)), bool)  # noqa: E731
    monkeypatch.setattr(ExpertReader, "take", nothing)
    model = tiered(TINY, slots, held, policy)
    tokens(model, 30)
    residency, (shelf,) = model.residency, model.residency.below.shelves
    monkeypatch.setattr(Routes, "tokens", lambda self, step: 1)  # what a run has read for a prompt counts
    found = simulate(recorded, [shelf.share], policy, [slots] * 8)
    assert (found.needed, found.read) == (residency.reads.needed, residency.reads.missing)
    assert found.bytes_copied == residency.copied * EACH
    assert found.bytes_read + found.bytes_ahead == residency.reads.bytes
    assert list(found.by_layer) == list(residency.hit_rates.values())


def test_the_command_with_a_disk_below(recorded, trace, six, capsys):
    """A GPU, a cache in host memory and a disk in one: the same slots, fewer for the buffer that a run needs."""
    budget, cache = str(six), str(30 * EACH)
    _, said, _ = plan(capsys, trace, "--gpu-memory", budget, "--expert-cache", cache, "--copy-gbps", "0.5")
    assert "expert_slots" not in said and [one["policy"] for one in said["expert_caches"]] == list(POLICIES)
    slots = slots_beside(*skeleton(TINY)[1:], six, on_disk=True)
    for one in said["expert_caches"]:
        shares = expert_shares.plan(mixtures_of(TINY), 30 * EACH, 4)
        expected = simulate(recorded, shares, one["policy"], slots)
        assert one["slots_per_layer"] == slots and one["hit_rate"] == expected.hit_rate
        assert one["copied_bytes_per_token"] == expected.bytes_copied / expected.tokens > 0
        assert one["disk_bytes_per_token"] == expected.bytes_per_token > 0
        speed = expected.tokens_per_second(math.inf, one["disk_bytes_per_second"], 5e8)
        assert one["tokens_per_second_at_most"] == speed
    _, text, _ = plan(capsys, trace, "--gpu-memory", budget, "--expert-cache", cache, json_=False)
    assert f"slots for {slots[0]} of 16 experts a layer" in text and "copied and" in text
    assert "if computing and copies took no time" in text
    _, said, _ = plan(capsys, trace, "--gpu-memory", "80GB", "--expert-cache", cache)
    assert said["expert_caches"][0]["slots_per_layer"] == [16] * 8


def test_a_gpu_that_is_here(recorded, six):
    """What is measured there counts: copies that are needed come on top of computing, those ahead beside it."""
    args = argparse.Namespace(copy_gbps=2.0, trace=None)
    gpu = known_gpu(args, Allowed(), torch.device("cuda"), six, 1000.0, True)
    assert gpu == Gpu(six, 2e9, 1000.0)
    none = argparse.Namespace(copy_gbps=None, trace=None)
    assert known_gpu(none, Allowed(), torch.device("cpu"), 1, 1.0, True) is None
    assert known_gpu(none, Allowed(), torch.device("cuda"), 1, 1.0, False) is None
    _, ledger, account = skeleton(TINY)
    found, rows = beside_gpu(recorded, ledger, account, gpu, [6] * 8)
    one = simulate_slots(recorded, [6] * 8, [EACH] * 8, AHEAD)
    seconds = max(1 / 1000, one.bytes_ahead / one.tokens / 2e9) + one.bytes_read / one.tokens / 2e9
    assert found["expert_slots"]["tokens_per_second_at_most"] == pytest.approx(1 / seconds)
    assert rows[1][1].endswith("tok/s at most")
    found, _ = beside_gpu(recorded, ledger, account, gpu, None)
    assert found["expert_slots"]["tokens_per_second_at_most"] == 1000.0


def test_refusals(recorded, trace, tmp_path, capsys):
    """Too little memory names the least, which is enough; another model's routes, and none, are refused."""
    code, _, err = plan(capsys, trace, "--gpu-memory", "1MB")
    assert code == 4 and "two whole layers and the experts of one token" in err
    least = err.split("--gpu-memory ")[1].split()[0]
    assert plan(capsys, trace, "--gpu-memory", str(int(least) - 1))[0] == 4
    assert plan(capsys, trace, "--gpu-memory", least)[1]["expert_slots"]["slots_per_layer"] == [4] * 8
    other, steps = str(tmp_path / "other"), recorded.steps
    for routes, said in (
        (Routes("another", 8, 16, 4, steps), "another model"),
        (Routes(recorded.fingerprint, 8, 32, 4, steps), "another model"),
        (Routes(recorded.fingerprint, 8, 16, 4, []), "it holds no step"),
        (Routes(recorded.fingerprint, 8, 16, 4, steps[:1]), "it holds no reply, only prompts"),
    ):
        routes.save(tmp_path / "other")
        code, _, err = plan(capsys, other, "--gpu-memory", "1GB")
        assert code == 2 and said in err and "--record-routes" in err
    for more in (["--copy-gbps", "0", "--gpu-memory", "1GB"], ["--copy-gbps", "25"]):
        with pytest.raises(SystemExit, match="2"):
            plan(capsys, trace, *more)
        assert "--copy-gbps" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):  # nothing would be said of it
        cli.main(["plan", "tiny", "--device", "cpu", "--gpu-memory", "1GB", "--copy-gbps", "25"])
