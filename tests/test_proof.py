"""proof: what fails, what no kernel ran and what is wrong are all said, and nothing hides what comes after it."""

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext

import golden_vectors
import pytest
import torch

from halfbyte import proof
from halfbyte.cases import CASES, Case
from halfbyte.cli import main
from halfbyte.ops.dispatch import kernel

SOFTCAP = next(case for case in CASES if case.op.__name__ == "softcap")


def quiet(text):
    pass


def build(random, dtype):
    return (random.normal(3, 5, dtype=dtype),), {}


def bodiless(x):
    kernel("nowhere", "bodiless", x)
    return x * 2


def broken(x):
    raise RuntimeError("it broke")


def problems(jobs, processes=1):
    return [problem for _, problem in proof.prove(jobs, "cpu", processes, quiet)]


def test_each_case_says_what_is_wrong():
    said = problems([Case(broken, "a", build), Case(bodiless, "b", build), SOFTCAP])
    assert said == ["broken[a]  FAILED: RuntimeError: it broke", "bodiless[b]  NO KERNEL: the torch body ran", ""]


def test_goldens_are_checked_in_a_language(monkeypatch):
    few = ["rms_norm_f32", "swiglu_fused"]
    assert set(few) <= set(proof.goldens())
    assert problems(few) == ["", ""]
    monkeypatch.setattr(golden_vectors.Vector, "tolerance", lambda self, name: -1.0)
    assert all(line.startswith("golden ") and "WRONG" in line for line in problems(few))


def test_an_installed_package_has_no_goldens(monkeypatch, tmp_path):
    monkeypatch.setattr(proof, "TESTS", tmp_path)
    assert proof.goldens() == []


def test_processes_share_the_jobs():
    """They find cases by name, so a case that is not listed is an unknown golden file there."""
    jobs = [SOFTCAP, "swiglu_fused", Case(broken, "a", build)]
    said = dict(proof.prove(jobs, "cpu", 2, quiet))
    assert said.keys() == set(jobs)
    assert said[SOFTCAP] == said["swiglu_fused"] == ""
    assert said[jobs[2]].startswith("golden broken[a]  WRONG: FileNotFoundError")


def test_rows_come_by_name():
    (found,) = proof.rows([SOFTCAP], "cpu", 2, quiet).items()
    assert found[0] == found[1].case == str(SOFTCAP)
    assert found[1].language == "numba" and not found[1].wrong
    assert proof.rows([SOFTCAP], "cpu", 1, quiet) == {}


def test_a_process_that_dies_is_said(monkeypatch):
    class Dying(nullcontext):
        def submit(self, *work):
            future = Future()
            future.set_exception(BrokenProcessPool())
            return future

    monkeypatch.setattr(proof, "workers", lambda count: Dying(enter_result=Dying()))
    assert problems([SOFTCAP], 2) == [f"{SOFTCAP}  FAILED: a process died, on this or beside it"]


def test_ops_take_turns():
    other = next(case for case in CASES if case.op.__name__ == "glu")
    assert proof.spread([SOFTCAP, SOFTCAP, "a", "b", other]) == [SOFTCAP, "a", other, SOFTCAP, "b"]


def test_a_part_of_the_goldens(capsys):
    files = proof.goldens()
    assert main(["bench", "ops", "--check", "--only", "goldens", "--part", f"3/{len(files)}"]) == 0
    assert "0 cases in float32 and bfloat16, 0 wrong, 1 golden files, 0 wrong; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--part", "1/2"], "--only and --part: go with --check"),
        (["--check", "--part", "3/2"], "must be one part of several, as 2/8, got 3/2"),
        (["--check", "--processes", "0"], "must be 1 or more, got 0"),
        (["--check", "--only", "goldens", "--op", "qmm"], "golden vectors belong to no single op"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_shared_is_refused(args, said, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "ops", *args])
    assert said in capsys.readouterr().err


def test_moving_bits_are_found():
    from halfbyte.check import same_bits

    drawn = torch.Generator().manual_seed(1)
    assert same_bits(lambda x: x * 2, (torch.ones(3),), {})
    assert not same_bits(lambda x: x + torch.rand(3, generator=drawn), (torch.ones(3),), {})
