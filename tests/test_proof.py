"""proof: what fails, what no kernel ran and what is wrong are all said, and nothing hides what comes after it."""

import golden_vectors
import torch

from halfbyte import proof
from halfbyte.cases import CASES, Case
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


def test_each_case_says_what_is_wrong():
    said = list(proof.cases([Case(broken, "a", build), Case(bodiless, "b", build), SOFTCAP], "cpu", quiet))
    assert said == ["broken[a]  FAILED: RuntimeError: it broke", "bodiless[b]  NO KERNEL: the torch body ran", ""]


def test_goldens_are_checked_in_a_language(monkeypatch):
    few = [path for path in golden_vectors.files() if path.stem in ("rms_norm_f32", "swiglu_fused")]
    monkeypatch.setattr(golden_vectors, "files", lambda: few)
    assert list(proof.goldens("cpu", quiet)) == ["", ""]
    monkeypatch.setattr(golden_vectors.Vector, "tolerance", lambda self, name: -1.0)
    assert all(line.startswith("golden ") and "WRONG" in line for line in proof.goldens("cpu", quiet))


def test_an_installed_package_has_no_goldens(monkeypatch, tmp_path):
    monkeypatch.setattr(proof, "TESTS", tmp_path)
    assert list(proof.goldens("cpu", quiet)) == []


def test_moving_bits_are_found():
    from halfbyte.check import same_bits

    drawn = torch.Generator().manual_seed(1)
    assert same_bits(lambda x: x * 2, (torch.ones(3),), {})
    assert not same_bits(lambda x: x + torch.rand(3, generator=drawn), (torch.ones(3),), {})
