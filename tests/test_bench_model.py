"""bench MODEL: what is wrong is not timed; tests are what they are called; every form of the table parses."""

import csv
import io
import itertools
import json
from functools import partial

import pytest
import torch

from halfbyte import bench_model, machine, model_proof, replaying
from halfbyte.accounting import skeleton
from halfbyte.bench_model import Result, Trial, Turn, measure, step_bytes
from halfbyte.cli import main
from halfbyte.engine import Engine
from halfbyte.graph import run_all
from halfbyte.loading import load_model
from halfbyte.model_proof import prove
from halfbyte.ops import dispatch

QUICK = ("-t", "1", "--device", "cpu", "-r", "2")
LLAMA_BENCH = {
    "build_commit", "backend", "device", "cpu", "gpu", "model", "model_type", "model_bytes", "n_params", "bits",
    "group_size", "n_prompt", "n_gen", "n_depth", "n_batch", "n_threads", "ram_limit", "gpu_limit", "test", "avg_ts",
    "stddev_ts", "samples_ts", "ttft_ms", "peak_ram", "peak_vram", "expert_hit_rate", "disk_bytes_read", "disk_gbps",
    "time_iso",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def account(folder):
    return skeleton(folder)[2]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads of other tests do not wait for each other here, and those after find what they had."""
    from halfbyte.machine import use_threads

    before = torch.get_num_threads()
    use_threads(1)
    yield
    use_threads(before)


def bench(folder, *options):
    return main(["bench", str(folder), *QUICK, *options])


@pytest.fixture
def plant(monkeypatch):
    """A kernel of this test's own in the place of one of ours."""

    def planted(family, op, wrong):
        module = __import__(f"halfbyte.kernels.numba.{family}", fromlist=[op])
        monkeypatch.setattr(module, op, wrong(getattr(module, op)))
        dispatch.find.cache_clear()

    yield planted
    monkeypatch.undo()
    dispatch.find.cache_clear()


@pytest.mark.parametrize(("prompt", "depth"), [(8, 0), (0, 0), (0, 4)])
def test_streams_have_texts_of_their_own(model, account, monkeypatch, prompt, depth):
    """Alike, they would choose the same experts: a step would read fewer than it does for people."""
    asked, real = {}, Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda self, one: asked.setdefault(id(one), one) and real(self, one))
    measure(model, account, Trial(prompt, 4, depth, 6), 1, warm_up=False)
    begins = [tuple(one.prompt) for one in asked.values()][-6:]
    assert len(set(begins)) == 6 and {len(one) for one in begins} == {prompt or 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_model_is_proved_right(model, dtype):
    model.dtype = dtype
    try:
        with dispatch.trace() as entries:
            proof = prove(model, [1, 3])
    finally:
        model.dtype = torch.float32
    assert not proof.wrong
    assert proof.ratios.keys() == {entry.op for entry in entries if entry.kernel}
    assert all(ratio <= 2 for ratio in proof.ratios.values()) and max(proof.ratios.values()) > 0


def scaled(kernel):
    """Every routed expert's weight, a little off."""

    def wrong(*args, **kwargs):
        ids, weights = kernel(*args, **kwargs)
        return ids, weights * 1.001

    return wrong


def test_a_wrong_kernel_is_refused_and_not_timed(folder, plant, capsys, monkeypatch):
    monkeypatch.setattr(bench_model, "measure", lambda *_: pytest.fail("timed"))
    plant("routing", "route", scaled)
    assert bench(folder, "-p", "8", "-n", "4", "-o", "jsonl") == 1
    said = capsys.readouterr()
    assert "WRONG: route: error ratio" in said.err and "not timed" in said.err
    assert said.out == ""


def wrong_alone(kernel):
    def wrong(x, *args, **kwargs):
        y = kernel(x, *args, **kwargs)
        return y * 1.001 if x.shape[0] == 1 else y

    return wrong


def test_a_kernel_that_is_wrong_for_single_tokens_is_wrong(model, plant):
    plant("experts", "expert_mlp", wrong_alone)
    assert prove(model).wrong.startswith("expert_mlp: error ratio")


def test_what_memory_has_no_room_to_check_is_said(model, monkeypatch):
    """The body of a product takes a whole matrix apart, which may be more than all that is in memory."""
    monkeypatch.setattr(model_proof, "UNPACKED", 1 << 40)
    proof = prove(model)
    assert proof.unchecked.keys() == {"qmm"} and not proof.wrong and {"embed", "expert_mlp"} <= proof.calls.keys()
    monkeypatch.setattr(model_proof, "UNPACKED", 24)
    assert not prove(model).unchecked


def test_rows_have_the_limits_that_were_set(folder, capsys):
    assert bench(folder, "-p", "0", "-n", "2", "-o", "json", "--memory-limit", "60GB") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["ram_limit"] == 60 * 10**9 and row["gpu_limit"] is None


def test_without_room_to_measure_the_floor_there_is_none(folder, monkeypatch, capsys):
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 50)
    assert bench(folder, "-p", "0", "-n", "2", "-o", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["floor_gbps"] is row["of_floor"] is None and row["gbps"] > 0


def test_a_kernel_that_spoils_what_it_keeps_is_wrong(model, plant):
    def careless(kernel):
        def wrong(*args, **kwargs):
            y = kernel(*args, **kwargs)
            args[5].mul_(1.001)
            return y

        return wrong

    plant("recurrent", "gated_delta", careless)
    assert prove(model).wrong.startswith("gated_delta: error ratio")


def test_a_kernel_that_is_wrong_for_several_texts_is_wrong(model, plant):
    def wrong_for_three(kernel):
        return lambda x, *args, **kwargs: kernel(x, *args, **kwargs) * (1.001 if x.shape[0] == 3 else 1)

    plant("experts", "expert_mlp", wrong_for_three)
    assert not prove(model).wrong
    assert prove(model, [1, 3]).wrong.startswith("expert_mlp: error ratio")


def test_bits_that_move_are_wrong(model, plant):
    little = itertools.cycle([1, 1, 1 + 2e-7])
    plant("rowwise", "glu", lambda kernel: lambda *args, **kwargs: kernel(*args, **kwargs) * next(little))
    assert prove(model).wrong == "two identical runs gave different bits"


def test_numbers_that_are_none_are_wrong(model, plant):
    plant("rowwise", "glu", lambda kernel: lambda *args, **kwargs: kernel(*args, **kwargs).fill_(float("nan")))
    assert prove(model).wrong == "glu: error ratio inf (limit 2)"


def test_names_are_those_of_llama_bench():
    names = [Trial(512, 0), Trial(0, 128), Trial(512, 128), Trial(0, 128, 4096), Trial(0, 32, 16, 4)]
    assert [test.name for test in names] == ["pp512", "tg128", "pp512+tg128", "tg128 @ d4096", "tg32 @ d16 x4"]


@pytest.mark.parametrize(
    ("test", "steps"),
    [
        (Trial(10, 0), [10]),
        (Trial(0, 3), [1, 1, 1, 1]),
        (Trial(10, 3), [10, 1, 1]),
        (Trial(0, 2, streams=3), [3, 3, 3]),
        (Trial(6, 0, depth=5, streams=2), [12]),
    ],
    ids=lambda value: value.name if isinstance(value, Trial) else "",
)
def test_a_test_computes_what_it_says(model, account, test, steps, monkeypatch):
    """Tokens of every step, of one turn; the text before it is in the cache already."""
    ran, positions, call = [], [], type(model).__call__

    def counting(self, step, cache):
        ran.append(len(step.ids))
        positions.append(int(step.positions.min()))
        return call(self, step, cache)

    monkeypatch.setattr(type(model), "__call__", counting)
    monkeypatch.setattr(bench_model, "Engine", partial(Engine, replays=False))  # a replay calls no model
    result = measure(model, account, test, repetitions=1, warm_up=False)
    assert ran[bool(test.depth) :] == steps
    assert min(positions[bool(test.depth) :]) == test.depth
    assert len(result.turns) == 1 and result.mean > 0 and result.peak > 1e7
    assert (result.first is not None) == bool(test.prompt)


def test_every_turn_starts_from_the_same_text(model, account, monkeypatch):
    """A recurrent state that went on from the last turn would be another text."""
    seen, run = [], bench_model.run

    def looking(model, cache, test, report):
        seen.append(next(iter(cache.layers[0].values())).clone())
        assert cache.lengths == [7, 7]
        return run(model, cache, test, report)

    monkeypatch.setattr(bench_model, "run", looking)
    measure(model, account, Trial(0, 2, depth=7, streams=2), repetitions=3)
    assert len(seen) == 4
    assert all(torch.equal(seen[0], later) for later in seen[1:])
    assert torch.equal(seen[0][0], seen[0][1]), "every stream has it"


@pytest.mark.parametrize("test", [Trial(32, 0), Trial(0, 3), Trial(32, 2, streams=2)], ids=lambda test: test.name)
def test_no_graph_is_captured_while_the_time_is_taken(model, account, test, monkeypatch):
    """As on a GPU, where a step's second run, which may be in a later turn, takes many times as long as the others."""
    happened, run, new_cache = [], bench_model.run, model.new_cache

    def bound(calls, device, pool):
        happened.append("captured")
        return lambda: run_all(calls)

    def turn(*args):
        happened.append("turn")
        return run(*args)

    monkeypatch.setattr(replaying, "captures", lambda device: True)
    monkeypatch.setattr(replaying, "bound", bound)
    monkeypatch.setattr(bench_model, "run", turn)
    monkeypatch.setattr(bench_model, "Engine", partial(Engine, replays=True, ahead=True))
    monkeypatch.setattr(model, "new_cache", lambda slots, room: new_cache(slots, room, 32), raising=False)
    result = measure(model, account, test, repetitions=3)
    assert len(result.turns) == 3
    assert happened[-3:] == ["turn"] * 3 and "captured" in happened
    assert happened.count("turn") <= 3 + bench_model.WARM_UPS


def test_rates_and_deviation():
    result = Result(Trial(0, 10, streams=2), (Turn(1.0, None), Turn(2.0, None)), 0, False, 50.0)
    assert result.rates == [20.0, 10.0] and result.mean == 15.0
    assert result.deviation == pytest.approx(7.0710678)
    assert result.bytes_per_second == 50.0 * 15 / 2
    assert Result(Trial(8, 0), (Turn(2.0, 0.5),), 0, False, None).bytes_per_second is None


def test_bytes_of_a_step(model, account):
    """Of a token in the middle of the reply: weights, state twice, and the rows of its text."""
    fixed = bench_model.bytes_of(model.kept, 1, 0, 1, torch.float32)
    assert fixed > account.cache_fixed, "float32 here, bfloat16 there"
    short, long = (step_bytes(model, account, Trial(0, 10, depth)) for depth in (0, 100))
    assert short == account.read_per_token + 2 * fixed + 6 * 2 * account.cache_per_token
    assert long - short == 100 * 2 * account.cache_per_token
    assert step_bytes(model, account, Trial(8, 0)) is None
    assert step_bytes(model, account, Trial(0, 8, streams=2)) is None, "streams share experts"


def test_the_table_is_markdown(folder, capsys):
    assert bench(folder, "-p", "8", "-n", "4", "-pg", "4,2", "-d", "0,5") == 0
    header, rule, *rows = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()]
    names = [name.strip() for name in header]
    assert names == [
        "model",
        "size",
        "params",
        "backend",
        "test",
        "t/s",
        "first token",
        "GB/s",
        "of floor",
        "peak memory",
    ]
    assert all(set(cell.strip()) == {"-"} for cell in rule)
    assert {len(row) for row in rows} == {len(names)}
    cells = [dict(zip(names, map(str.strip, row), strict=True)) for row in rows]
    assert [row["test"] for row in cells] == ["pp8", "tg4", "pp4+tg2", "pp8 @ d5", "tg4 @ d5", "pp4+tg2 @ d5"]
    assert all(" ± " in row["t/s"] and row["model"] == "café" and row["size"] == "888.2 kB" for row in cells)
    assert [bool(row["GB/s"]) for row in cells] == [bool(row["of floor"]) for row in cells] == [False, True, False] * 2
    assert [bool(row["first token"]) for row in cells] == [True, False, True] * 2


def test_json_has_the_keys_of_llama_bench(folder, capsys):
    assert bench(folder, "-p", "0", "-n", "3", "-b", "1,2", "--no-warmup", "-o", "jsonl") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["test"] for row in rows] == ["tg3", "tg3 x2"]
    for row in rows:
        assert row.keys() >= LLAMA_BENCH
        assert len(row["samples_ts"]) == 2 and row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
        assert row["n_threads"] == 1 and row["group_size"] == 64 and row["model_type"] == "qwen3_5_moe"
    assert rows[0]["of_floor"] == pytest.approx(rows[0]["gbps"] / rows[0]["floor_gbps"])
    assert rows[0]["gbps"] == pytest.approx(rows[0]["avg_ts"] * rows[0]["bytes_per_step"] / 1e9)
    assert rows[1]["gbps"] is None
    assert bench(folder, "-p", "4", "-n", "0", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["test"] == "pp4" and row["ttft_ms"] > 0 and row["n_gen"] == 0


def test_csv_has_one_line_a_test(folder, capsys):
    assert bench(folder, "-p", "4", "-p", "6", "-n", "2", "-o", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["test"] for row in rows] == ["pp4", "pp6", "tg2"]
    assert rows[0].keys() >= LLAMA_BENCH and all(None not in row and None not in row.values() for row in rows)
    assert len(json.loads(rows[0]["samples_ts"])) == 2 and float(rows[2]["gbps"]) > 0 and rows[0]["gbps"] == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-p", "0", "-n", "0"], "nothing is left to measure"),
        (["-n", "many"], "must be whole numbers with commas between, as 128,512, got many"),
        (["-pg", "512"], "must be two numbers, as 512,128, got 512"),
        (["-b", "0"], "must be 1 or more, got 0"),
        (["-r", "0"], "must be 1 or more, got 0"),
        (["-d", "1000000"], "pp512 @ d1000000 makes a text of"),
        (["-t", "4096"], "argument --threads: must be from 1 to"),
        (["--delay", "nan"], "must be 0 or more, got nan"),
        (["-o", "sql"], "invalid choice: 'sql'"),
    ],
    ids=" ".join,
)
def test_bad_usage_exits_2(folder, options, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", str(folder), "--device", "cpu", *options])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_each_form_has_its_help(capsys):
    for words, said in ((["bench"], "--n-depth"), (["bench", "ops"], "--only"), (["bench", "load"], "--rounds")):
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--help"])
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: halfbyte {' '.join(words)} [-h]") and said in text
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "`halfbyte bench ops` times single ops" in " ".join(capsys.readouterr().out.split())


def test_a_folder_may_be_called_as_a_form(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ops").symlink_to(folder)
    assert main(["bench", "./ops", *QUICK, "-p", "0", "-n", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["test"] == "tg2"
