"""Recorded routes: what was chosen, whole or refused; and a simulation that says what a run then does, to the read."""

import argparse
import json
import os
from unittest.mock import Mock

import pytest
from streaming import GREEDY, PROMPT, TINY, budget_of, mixtures_of, tokens

from halfbyte import cli, disk, expert_reader, fitting, machine, routes
from halfbyte.accounting import skeleton
from halfbyte.checkpoint.descriptors import DIRECT
from halfbyte.commands.numbers import byte_count
from halfbyte.engine import Engine, Request
from halfbyte.errors import CheckpointError, StorageError
from halfbyte.expert_cache import POLICIES
from halfbyte.expert_shares import plan
from halfbyte.fitting import Placed
from halfbyte.foresight import blocks_of, neighbours
from halfbyte.loading import load_model
from halfbyte.ops.dispatch import reference
from halfbyte.routes import Routes
from halfbyte.simulation import simulate

GUESSES = [[0, 1, 2, 3]] * 7


def of(model):
    return Routes(model.fingerprint, len(mixtures_of(TINY)), model.expert_count, model.experts_per_token)


def recording(routes, model):
    return routes.recording(model.layers)


@pytest.fixture(scope="module")
def recorded():
    """A prompt of 12 tokens and a reply of 30, computed with all experts in memory."""
    model = load_model(TINY)
    found = of(model)
    with recording(found, model):
        made = tokens(model, 30)
    return found, made


def test_every_step_and_layer_is_written_down(recorded):
    found, made = recorded
    assert [found.tokens(step) for step in found.steps] == [12] + [1] * (len(made) - 1)
    assert all([len(part) for part in step] == [8, 7, 7] for step in found.steps)
    assert all(len(set(ids)) == 4 for step in found.steps[1:] for part in step for ids in part)


def test_the_next_layers_choices_are_foreseen(recorded):
    """Of four experts of sixteen, one would be right by chance; the stream says more than another layer's input."""

    def right(part):
        pairs = [
            pair for step in recorded[0].steps[1:] for pair in zip(step.chosen[1:], getattr(step, part), strict=True)
        ]
        return sum(len({*ids} & {*guess}) for ids, guess in pairs) / len(pairs)

    assert right("from_stream") > right("guessed") > 1.5


def test_routers_are_as_they_were_after_a_recording():
    model = load_model(TINY, expert_cache=budget_of(TINY, 5), expert_policy="lfu-ahead")
    before = [block.router for block in blocks_of(model.layers)]
    with recording(of(model), model):
        assert all(block.router not in before for block in blocks_of(model.layers)[:-1])
        assert all(layer.foresee is not None for layer, _ in neighbours(model.layers))
    assert [block.router for block in blocks_of(model.layers)] == before
    assert all(layer.foresee is None for layer, _ in neighbours(model.layers))


def test_the_torch_body_is_recorded_too():
    model = load_model(TINY)
    found, again = of(model), of(model)
    with recording(found, model), reference():
        expected = tokens(model, 2)
    with reference(), recording(again, model):
        assert tokens(model, 2) == expected
    assert found.steps == again.steps and len(found.steps) == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [4, 13, 40, 128])
def test_a_simulation_is_the_run(recorded, policy, slots):
    """The same routes, so the same hits and reads, whatever has room."""
    found, made = recorded
    budget = budget_of(TINY, slots)
    model = load_model(TINY, expert_cache=budget, expert_policy=policy)
    own = of(model)
    with recording(own, model):
        assert tokens(model, 30) == made
    assert own.steps == found.steps, "ids are the model's, not those of slots"
    predicted = simulate(found, plan(mixtures_of(TINY), budget, 4), policy)
    (shelf,) = model.residency.shelves
    prompt = Routes(found.fingerprint, 8, 16, 4, found.steps[:1])
    assert simulate(prompt, model.residency.shares, policy).needed == 0
    of_prompt = sum(len(set(ids)) for ids in found.steps[0].chosen)
    assert predicted.needed == model.residency.reads.needed - of_prompt == 8 * 4 * (len(made) - 1)
    assert 0 <= model.residency.reads.missing - predicted.read <= of_prompt
    assert predicted.bytes_read == predicted.read * shelf.share.expert_bytes
    assert predicted.bytes_ahead == 0 or policy == "lfu-ahead"
    ahead = shelf.cache.read_ahead.total() * shelf.share.expert_bytes
    assert 0 <= ahead - predicted.bytes_ahead <= 7 * (slots // 2) * shelf.share.expert_bytes
    if slots == 128:
        read = model.residency.reads.missing + shelf.cache.read_ahead.total()
        assert predicted.hit_rate > 0.9 and read == len(shelf.cache.places)


@pytest.mark.parametrize("flags", sorted({expert_reader.NOWAIT, 0}), ids=lambda flags: "warm" if flags else "cold")
@pytest.mark.parametrize("slots", [5, 6, 13, 40])
def test_what_is_read_ahead_does_not_depend_on_what_the_system_has_in_memory(monkeypatch, flags, slots):
    """Steps of one token each, so that every read is one that was foretold."""
    monkeypatch.setattr(expert_reader, "NOWAIT", flags)
    model = load_model(TINY, expert_cache=budget_of(TINY, slots), expert_policy="lfu-ahead")
    found = of(model)
    with recording(found, model):
        engine = Engine(model, model.new_cache(1, 24))
        engine.submit(Request(PROMPT[:1], 20, GREEDY))
        while engine.busy:
            engine.step()
    predicted, (shelf,) = simulate(found, model.residency.shares, "lfu-ahead"), model.residency.shelves
    ahead = shelf.cache.read_ahead.total() * shelf.share.expert_bytes
    assert (predicted.read, predicted.bytes_ahead) == (model.residency.reads.missing, ahead) and ahead


def test_speed_is_that_of_memory_and_disk_together(recorded):
    found, _ = recorded
    one = simulate(found, plan(mixtures_of(TINY), budget_of(TINY, 4), 4), "lru")
    assert one.tokens_per_second(100.0, 1e30) == pytest.approx(100)
    assert one.tokens_per_second(1e30, 1e6) == pytest.approx(1e6 / one.bytes_per_token)


def test_saved_and_read(recorded, tmp_path):
    found, _ = recorded
    found.save(tmp_path / "routes")
    assert routes.read(tmp_path / "routes") == found


def test_what_is_no_file_is_not_read(tmp_path):
    """A pipe might never end; each refusal says what makes such a file."""
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("absent", "there is no such file"), ("pipe", "it is no file"), (".", "it is no file")):
        with pytest.raises(StorageError, match=f"{said}. `halfbyte bench MODEL --record-routes FILE`"):
            routes.read(tmp_path / name)


def test_what_is_no_file_is_not_replaced_by_one(recorded, tmp_path):
    """A pipe here; for whoever is root it might be /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(StorageError, match="pipe: the recorded routes could not be written: it is no file"):
            recorded[0].save(tmp_path / name)
    assert (tmp_path / "pipe").is_fifo() and len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: [],
        lambda lines: lines[1:],
        lambda lines: ["[]", *lines[1:]],
        lambda lines: [lines[0].replace('"layers": 8', '"layers": 7'), *lines[1:]],
        lambda lines: [lines[0].replace('"layers": 8', '"layers": 1e9'), *lines[1:]],
        lambda lines: [lines[0].replace('"per_token": 4', '"per_token": 0'), *lines[1:]],
        lambda lines: [lines[0].replace('"routes": 3', '"routes": 2'), *lines[1:]],
        lambda lines: [*lines, "[[16,1,2,3]]"],
        lambda lines: [*lines, json.dumps([[[0, 1, 2, 16]] * 8, GUESSES, GUESSES])],
        lambda lines: [*lines, json.dumps([[[0, 1, 2, True]] * 8, GUESSES, GUESSES])],
        lambda lines: [*lines, json.dumps([[[0, 1, 2]] * 8, [[0, 1, 2]] * 7, [[]] * 7])],
        lambda lines: [*lines, json.dumps([[[0, 1, 2, 3]] * 7 + [[]], GUESSES, GUESSES])],
        lambda lines: [*lines, json.dumps([[[0, 1, 2, 3]] * 8, [[0, 1, 2, 3]] * 8, GUESSES])],
        lambda lines: [*lines, json.dumps([[[0, 1, 2, 3]] * 8, GUESSES])],
        lambda lines: [*lines, json.dumps([[[0, 1, 2, 3]] * 8, GUESSES, 7])],
        lambda lines: [*lines, json.dumps([[[0, 1, 2, 3]] * 8, GUESSES, [0] * 7])],
        lambda lines: [*lines, json.dumps([[[0, 1, 2, 3]] * 8, GUESSES, [[0, 1, 2]] * 7])],
        lambda lines: [*lines, json.dumps([[[0, 1, 2, 3]] * 8, GUESSES, [[]] * 6])],
        lambda lines: [*lines[:-1], lines[-1][:20]],
    ],
)
def test_damaged_recordings_are_refused(recorded, tmp_path, spoil):
    path = tmp_path / "routes"
    recorded[0].save(path)
    path.write_text("\n".join(spoil(path.read_text().splitlines())))
    with pytest.raises(CheckpointError, match="Record it again"):
        routes.read(path)


def test_experts_come_from_the_disk_at_some_speed(monkeypatch):
    monkeypatch.setattr(disk, "TOGETHER", 3)
    ledger = skeleton(TINY)[1]
    assert disk.expert_bandwidth(ledger) > 1e5
    assert disk.expert_bandwidth(ledger, most=100_000) > 1e5


def test_what_is_measured_are_the_reads_of_a_run(monkeypatch, copied):
    """Of the sidecar, where there is one, and past the system's memory of files, where a run reads so."""
    read, start = [], disk.ExpertReader.start

    def noted(reader, ranges):
        read.append((not reader.files.buffered, *{one.path.suffix for one in ranges}))
        start(reader, ranges)

    monkeypatch.setattr(disk.ExpertReader, "start", noted)
    disk.expert_bandwidth(skeleton(copied)[1])
    assert cli.main(["convert", str(copied), "--repack"]) == 0
    disk.expert_bandwidth(skeleton(copied)[1], direct=True)
    assert set(read) == {(False, ".safetensors"), (bool(DIRECT), ".bin")}


def test_from_bench_to_plan(tmp_path, capsys, folder):
    """Recorded by one command, foretold by the other, measured by the first again."""
    path, name = str(tmp_path / "routes"), str(folder)
    tests = ["bench", name, "-p", "0", "-n", "16", "-r", "1", "--no-warmup"]
    assert cli.main([*tests, "--record-routes", path]) == 0
    capsys.readouterr()
    cache = str(budget_of(folder, 24))
    assert cli.main(["plan", name, "--trace", path, "--expert-cache", cache, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["expert_caches"]
    assert [one["policy"] for one in found] == list(POLICIES) and all(0 < one["hit_rate"] < 1 for one in found)
    assert cli.main([*tests, "--expert-cache", cache, "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert 0 < row["expert_hit_rate"] < 1 and row["disk_bytes_read"] > 0 and row["disk_gbps"] > 0
    assert cli.main(["plan", name, "--trace", path]) == 0
    assert "found in memory" in capsys.readouterr().out


def test_a_plan_under_a_limit_is_the_run_under_it(recorded, tmp_path, capsys, monkeypatch):
    """The cache that a limit leaves is the one that routes go through; what measures memory takes none of it before."""
    recorded[0].save(tmp_path / "routes")
    order = []
    monkeypatch.setattr(fitting, "place", lambda *args: order.append("place") or Placed(budget_of(TINY, 40), True))
    monkeypatch.setattr(machine, "ReadProbe", lambda: order.append("probe") or Mock(bandwidth=lambda: 1e9))
    assert cli.main(["plan", "tiny", "--trace", str(tmp_path / "routes"), "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (
        {one["cache_bytes"] for one in said["expert_caches"]} == {said["expert_cache_bytes"]} == {budget_of(TINY, 40)}
    )
    assert order == ["place", "probe"]


@pytest.mark.parametrize(
    ("text", "count"),
    [("4GB", 4 * 10**9), ("1.5GiB", 3 << 29), ("512 mb", 512 * 10**6), ("7", 7), ("2k", 2000), ("1t", 10**12)],
)
def test_sizes(text, count):
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "0.0GB", "-1", "4XB", "GB", "1e9", "4 G B", "inf", "9" * 20, "1.GB"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a size"):
        byte_count(text)


def test_a_recording_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    for wrong in (tmp_path, tmp_path / "none" / "routes"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", "tiny", "-p", "0", "-n", "2", "-r", "1", "--record-routes", str(wrong)])
        assert ended.value.code == 2 and f"{wrong} cannot be written" in capsys.readouterr().err


def test_refusals(tmp_path, capsys):
    """A cache that is too small names the least; routes of another model are refused."""
    found = Routes("another", 8, 16, 4, [routes.Step([[0, 1, 2, 3]] * 8, GUESSES, GUESSES)])
    found.save(tmp_path / "routes")
    assert cli.main(["plan", "tiny", "--trace", str(tmp_path / "routes")]) == 2
    assert "another model" in capsys.readouterr().err
    assert cli.main(["generate", "tiny", "--prompt", "x", "--expert-cache", "1kB"]) == 4
    assert f"({budget_of(TINY, 4)} bytes)" in capsys.readouterr().err
