"""bench --explain: what a step's calls cost is counted once, whatever they were fused into, and every form parses."""

import csv
import io
import json
import os
import subprocess
import sys

import pytest
import torch

from halfbyte import fusion
from halfbyte.accounting import skeleton
from halfbyte.bench import moved
from halfbyte.bench_model import Trial, step_bytes
from halfbyte.cases import CASES
from halfbyte.cli import main
from halfbyte.costs import SPECIAL, cost, together
from halfbyte.explain import ROOM, explain
from halfbyte.loading import load_model
from halfbyte.machine import use_threads

COUNTED = [case for case in CASES if case.serving and case.only is None and case.op.__name__ in SPECIAL]
QUICK = ("-t", "1", "--device", "cpu", "--explain")
FIELDS = {
    "model", "backend", "dtype", "n_depth", "n_batch", "calls", "op", "fused_from", "result", "bytes", "flops", "us",
    "total_us", "of_step", "of_floor",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    use_threads(1)
    yield
    use_threads(before)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def explained(model, streams=1, **more):
    return explain(model, model.new_cache(streams, ROOM + 2), 10e9, **more)


@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_costs_are_those_of_the_cases(case):
    """But for the few bytes of ids and lengths, which cases leave out."""
    args, kwargs = case.inputs(torch.float32)
    counted, made = moved(case, (args, kwargs)), case.op(*args, **kwargs)
    found = cost(case.op.__name__, args, kwargs, made, [kwargs[name] for name in case.mutates])
    assert 0 <= found.bytes - counted <= 0.01 * counted + 8 * sum(args[0].shape[:2])
    if case.flops is not None:
        assert found.flops == case.flops(args, kwargs)


def test_what_passes_between_calls_done_as_one_costs_nothing():
    x, between, y, w = (torch.zeros(size) for size in (8, 64, 16, 512))
    first, second = cost("first", (x, w), {}, between), cost("second", (between, x), {}, y)
    assert first.bytes == 4 * (8 + 512 + 64) and second.bytes == 4 * (64 + 8 + 16)
    outside = {y.untyped_storage().data_ptr()}
    assert together([first, second], outside).bytes == 4 * (8 + 512 + 16)
    outside.add(between.untyped_storage().data_ptr())
    assert together([first, second], outside).bytes == 4 * (8 + 512 + 16 + 64)


@pytest.mark.parametrize("streams", [1, 3])
def test_fusing_saves_bytes_and_no_arithmetic(model, streams):
    plain, fused = (explained(model, streams, fused=one) for one in (False, True))
    assert fused.calls.count < plain.calls.count
    assert fused.calls.flops == plain.calls.flops
    assert 0.9 * plain.calls.bytes < fused.calls.bytes < plain.calls.bytes
    assert all(line.parts == (line.op,) for line in plain.lines)
    parts = sorted(name for line in fused.lines for name in line.parts * line.count)
    assert parts == sorted(name for line in plain.lines for name in line.parts * line.count)


def test_bytes_are_those_that_a_reply_must_read(model, folder):
    """Weights once, but for the table's other rows and the experts that are not chosen; states twice; little else."""
    floor = step_bytes(model, skeleton(folder)[2], Trial(0, 2))
    assert floor < explained(model).calls.bytes < 1.2 * floor


def test_each_call_may_stand_alone(model):
    together, apart = explained(model), explained(model, each=True)
    assert all(line.count == 1 for line in apart.lines)
    assert len(apart.lines) == together.calls.count > len(together.lines)
    assert apart.calls.bytes == pytest.approx(together.calls.bytes)


def test_the_sum_stands_beside_the_step(model):
    found = explained(model)
    assert found.calls.seconds == pytest.approx(sum(line.count * line.seconds for line in found.lines))
    assert found.step.seconds == found.seconds > 0
    assert found.step.bytes == found.calls.bytes


@pytest.mark.parametrize("form", ["json", "jsonl", "csv"])
def test_rows_for_programs(folder, form, capsys):
    assert main(["bench", str(folder), *QUICK, "-o", form, "-d", "0,5", "-b", "2"]) == 0
    out = capsys.readouterr().out
    rows = {
        "json": json.loads,
        "jsonl": lambda text: list(map(json.loads, text.splitlines())),
        "csv": lambda text: list(csv.DictReader(io.StringIO(text))),
    }[form](out)
    assert all(set(row) == FIELDS for row in rows)
    assert [row["op"] for row in rows].count("whole step") == 2
    assert {int(row["n_depth"]) for row in rows} == {0, 5}


def test_a_table_for_people(folder, capsys):
    assert main(["bench", str(folder), *QUICK, "-v"]) == 0
    said = capsys.readouterr()
    title, _, names, *lines = said.out.splitlines()
    assert "a token for one stream at 0" in title
    assert [name.strip() for name in names.strip("|").split("|")][:3] == ["calls", "op", "fused from"]
    assert "all calls" in lines[-2] and "whole step" in lines[-1]
    assert "us added up; the step, measured whole, takes" in said.err and "Python around a step: " in said.err


@pytest.mark.parametrize("command", [["doctor"], ["ops"], ["bench", "tiny", "--explain"], ["list"]], ids=" ".join)
def test_a_fusion_to_leave_out_must_exist_whatever_the_command(command):
    given = {**os.environ, "HALFBYTE_WITHOUT": "norm_chain,norm_chian"}
    done = subprocess.run([sys.executable, "-m", "halfbyte", *command], env=given, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("halfbyte: HALFBYTE_WITHOUT: no fusion is called 'norm_chian'; there are ")
    assert done.stdout == ""


def test_doctor_shows_what_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(fusion, "WITHOUT", frozenset(["norm_chain"]))
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fusions"] == list(fusion.FUSIONS) and told["fusions_left_out"] == ["norm_chain"]
    assert main(["doctor"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("fusions"))
    assert line.endswith("HALFBYTE_WITHOUT leaves out norm_chain") and line.count("norm_chain") == 1
