"""The command line: instant help, clear refusals, quiet exits."""

import json
import os
import signal
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from test_start import cpu_seconds_of_children

from halfbyte import __version__, listing
from halfbyte.cli import COMMANDS, main
from halfbyte.ops import dispatch

COMMAND = [sys.executable, "-m", "halfbyte"]
TO_STDIN = ["generate", "tiny", "-m", "2", "--device", "cpu"]


def run(*args):
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True)


def test_what_the_system_refuses_is_one_line(capsys):
    """No traceback, whatever a path is: a name that is too long stands for a folder that is locked, and the like."""
    long = "a" * 5000
    for arguments in (["info", long], ["generate", "-p", "x", "--prompt-cache-file", long]):
        assert main(arguments) == 5
        assert capsys.readouterr().err == f"halfbyte: {long}: File name too long.\n"


@pytest.mark.quiet
def test_help_is_instant_and_loads_nothing_heavy(tmp_path):
    """0.3 s. Best of three, in time of the CPU, so that other processes do not count; Python's own cache is there."""
    cached = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    code = (
        "import sys; from halfbyte.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print([m for m in ('torch', 'numpy', 'numba', 'triton', 'halfbyte.server') if m in sys.modules])"
    )
    times = []
    for _ in range(3):
        begin = cpu_seconds_of_children()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=cached)
        times.append(cpu_seconds_of_children() - begin)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("[]\n")
    assert min(times) < 0.3


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, halfbyte; print([m for m in ('torch', 'numpy', 'numba') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_whole_sentences(name):
    module = import_module(f"halfbyte.commands.{name.replace(' ', '_')}")
    assert module.run.__doc__.split("\n")[0].endswith((".", "?"))


def test_help_names_every_command():
    """The first line of a command's docstring is its help."""
    text = " ".join(run("--help").stdout.split())
    assert "ops Print which op has a kernel in which language" in text
    assert "bench Measure a model on this machine" in text
    assert "WRONG, not timed" in " ".join(run("bench", "ops", "--help").stdout.split())


def test_version():
    assert run("--version").stdout == f"halfbyte {__version__}\n"


def test_ops_prints_the_matrix(capsys):
    assert main(["ops"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["torch", "numba", "triton", "metal", "cases", "serving"]
    assert {line for line in lines if not line.startswith(" ")} == {op.family for op in listing.ops()}
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(" ")}
    assert rows.keys() == {op.name for op in listing.ops()}
    assert rows["rms_norm"][:4] == ["yes", "yes", "yes", "yes"]
    assert all(int(row[4]) > int(row[5]) > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "the following arguments are required: command"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["bench", "ops", "--op", "nothing"], "no serving case of 'nothing'; ops are"),
        (["bench", "ops", "--device", "toaster"], "invalid choice: 'toaster'"),
        (["bench", "ops", "--device", "cuda"], "torch finds no CUDA GPU here; --device cpu runs anywhere"),
        (["bench", "ops", "--seconds", "0"], "must be above 0, got 0"),
        (["bench", "ops", "--seconds", "nan"], "must be above 0, got nan"),
        (["bench", "ops", "--seconds", "soon"], "invalid positive value: 'soon'"),
        (["plan", "tiny", "--context", "0"], "argument --context: must be 1 or more, got 0"),
        (["serve", "--threads", "99999"], "argument --threads: must be from 1 to "),
        (["serve", "--max-body-mb", "1e305"], "argument --max-body-mb: must be at most 1000000000, got 1e+305"),
        (["serve", "--template-mb", str(10**15)], "argument --template-mb: must be at most 4398046511104"),
        (["bench", "tiny", "--delay", "1e300"], "argument --delay: must be at most 1000000000, got 1e+300"),
        (["bench", "load", "--gb", "1e300"], "argument --gb: must be at most 1000000000, got 1e+300"),
        (["serve", "--api-key-file", "/"], "--api-key-file: /: Is a directory. Name a file with a key in each line"),
        (["serve", "--api-key-file", sys.executable], "it is no text in UTF-8. Name a file"),
        (["generate", "-p", "x", "--gpu-memory", "1GB"], "argument --gpu-memory: it runs on the CPU; --ram"),
        (["plan", "tiny", "--gpu-memory", "1GB"], "argument --gpu-memory: it runs on the CPU"),
        (["convert", "tiny", "x", "--q-mode", "mxfp4"], "q_mode counts only with quantize"),
        (["generate", "-p", "x", "--chat-template-args", "["], "argument --chat-template-args: it is not JSON: "),
        (["generate", "-p", "x", "--chat-template-args", '{"messages": 1}'], "messages cannot be set with it"),
        (["chat", "--chat-template-args", '{"add_generation_prompt": true}'], "cannot be set with it"),
    ],
    ids=" ".join,
)
def test_bad_usage_exits_2_and_says_why(args, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert said in first and second.endswith("--help` lists what it takes.")


def test_bench_of_one_case_prints_json():
    done = run("bench", "ops", "--device", "cpu", "--op", "softcap", "--seconds", "0.02", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert {"cpu", "threads", "vectors", "threading_layer", "read_bytes_per_second"} <= result["machine"].keys()
    (row,) = result["rows"]
    assert row["op"] == "softcap"
    assert row["language"] == "numba"
    assert row["wrong"] is False


def test_check_counts_what_it_checked(capsys):
    assert main(["bench", "ops", "--check", "--op", "softcap"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("cpu: ") and "cases in float32 and bfloat16, 0 wrong" in said


def test_check_of_a_wrong_kernel_fails(capsys, monkeypatch):
    from halfbyte.kernels.numba import rowwise

    monkeypatch.setattr(rowwise, "softcap", lambda x, cap, *, out=None: x * 1.01)
    dispatch.find.cache_clear()
    try:
        assert main(["bench", "ops", "--check", "--op", "softcap", "--json"]) == 1
    finally:
        monkeypatch.undo()
        dispatch.find.cache_clear()
    said = capsys.readouterr()
    assert "softcap[" in said.err and "WRONG: error ratio float32" in said.err
    assert json.loads(said.out)["results"][0]["wrong"] > 0


def test_interrupt_exits_130_quietly():
    """Also where the tests run in the background, whose shell has interrupts ignored."""
    process = subprocess.Popen(
        [*COMMAND, "bench", "ops", "--op", "rms_norm", "--seconds", "3"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while not process.stdout.readline().startswith("rms_norm"):
        pass
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""


@pytest.mark.parametrize("command", [["bench", "tiny"], ["perplexity", "tiny", __file__]], ids=["bench", "perplexity"])
def test_compiling_is_shown_and_can_be_interrupted(command, tmp_path):
    """A kernel is compiled to its end first; those that are done are kept."""
    process = subprocess.Popen(
        [*COMMAND, *command, "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr.readline().startswith("compiling CPU kernels, once: ")
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    assert all(line.startswith("compiling CPU kernels, once: ") for line in errors.splitlines())
    assert list(tmp_path.rglob("*.kernel"))


def test_a_closed_reader_ends_it_quietly():
    reader, writer = os.pipe()
    process = subprocess.Popen([*COMMAND, "ops"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    os.close(reader)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 141
    assert errors == ""


@pytest.mark.parametrize(
    ("closed", "status"), [((), 0), ((0,), 2), ((1,), 0), ((2,), 0), ((0, 1, 2), 2)], ids=lambda value: str(value)
)
def test_a_closed_stream_is_an_empty_one(closed, status):
    """`<&-`, `>&-`, `2>&-`: nothing comes from there, and what goes there is lost."""
    code = f"import os; [os.close(one) for one in {closed}]; os.execv({COMMAND[0]!r}, {[*COMMAND, *TO_STDIN]!r})"
    done = subprocess.run([sys.executable, "-c", code], input="Hi", capture_output=True, text=True)
    assert done.returncode == status and "Traceback" not in done.stderr
    assert bool(done.stdout) == (not {0, 1} & {*closed})
    assert ("it is empty" in done.stderr) == (closed == (0,))


@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("command", ["--help", "ops"])
def test_a_full_disk_is_one_line(command, buffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, command], stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (5, "halfbyte: No space left on device.\n")
