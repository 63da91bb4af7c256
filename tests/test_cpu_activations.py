"""Activations as whole numbers on a CPU: how far from exact, and the same bits whatever is beside a row."""

import os
import platform
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from numba.core import config

from halfbyte import cache_file
from halfbyte.cases.case import Random
from halfbyte.cases.experts import in_separate_buffers
from halfbyte.cases.quant import affine, random_packed
from halfbyte.engine import Engine, Request, logits
from halfbyte.errors import CheckpointError
from halfbyte.kernels.numba import lanes, planes
from halfbyte.loading import load
from halfbyte.model_proof import prove
from halfbyte.ops.dispatch import CPU_ACTIVATIONS, cpu_activations, reference, use_cpu_activations, with_cpu_activations
from halfbyte.ops.experts import Experts, expert_mlp, expert_qmm
from halfbyte.ops.quant import Packed, pack, qmm, quantize
from halfbyte.quality import quality

TOP = {"i16": 127 * 256, "i8": 127}  # the largest whole number
ERROR = {"f32": (0, 4e-7), "i16": (1e-6, 1e-4), "i8": (1e-3, 2e-2)}  # of a result, at least and at most
EVERY = bool(os.environ.get("EVERY_TARGET"))  # .ci/full: kernels of a format take seconds to compile
SIZES = [  # whole spans of sixteen groups and parts of them, rows that no tile divides, groups of many words and of one
    ("f32", 4, 64, 100, 1856), ("i16", 4, 64, 96, 2048), ("i16", 4, 64, 100, 768), ("i8", 4, 32, 67, 1056),
    ("i16", 8, 64, 40, 2048), ("f32", 6, 128, 33, 2176), ("i8", 3, 64, 65, 1088),
    # rows so short that sixteen are read as they lie: of eight words; of one, two and four groups
    ("f32", 4, 64, 521, 64), ("i16", 2, 64, 269, 128), ("f32", 4, 64, 265, 128), ("i8", 4, 64, 139, 256),
]  # fmt: skip
if EVERY:
    SIZES += [
        ("i8", 4, 64, 65, 1856), ("i16", 4, 128, 33, 2816), ("i8", 8, 128, 41, 2176), ("i16", 2, 64, 48, 1088),
        ("i8", 1, 32, 39, 1024), ("f32", 4, 128, 41, 2816), ("f32", 2, 64, 48, 1088), ("f32", 1, 128, 40, 2176),
        ("f32", 3, 64, 65, 1088), ("f32", 5, 32, 67, 1056), ("i16", 6, 64, 65, 1088), ("i8", 5, 64, 39, 1856),
        ("i8", 3, 128, 41, 2176),
    ]  # fmt: skip
LARGEST = [(4, 64), (6, 128)] + EVERY * [(1, 128), (2, 128), (3, 64), (4, 32), (4, 128), (5, 64), (6, 64)]


@pytest.fixture(params=["i16", "i8"])
def kind(request):
    with with_cpu_activations(request.param):
        yield request.param


def rounded(x, group, kind):
    """The activations that stand for x: whole multiples of a step a group, in float64."""
    groups = x.unflatten(-1, (-1, group))
    most = groups.abs().amax(-1, keepdim=True)
    if kind == "f32":  # by powers of two: fixed point, with the largest's precision or half of it
        step = 2.0 ** (most.double().clamp(1e-30).log2().floor() - 22)
        return ((groups / step).round() * step).flatten(-2)
    top = torch.tensor(float(TOP[kind]))  # a number / a tensor is rounded twice
    some = most > 1e-30
    whole = torch.where(some, (groups * (top / most)).round(), 0)
    return (whole.double() * torch.where(some, most / top, 0).double()).flatten(-2)


def relative_error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind, bits, group, N, K", SIZES)
def test_products_are_those_of_rounded_activations(kind, bits, group, N, K):
    random = Random(bits * K + group)
    w, x = random_packed(random, (N, K), bits, group), random.normal(7, K)
    some = group if group < K else 0
    x[0, 5], x[1, :some], x[2], x[3, K - some :] = 30, 0, x[2] * 1e-25, x[3, K - some :] * 1e-33
    with reference():
        exact, expected = qmm(x.double(), w), qmm(rounded(x, group, kind), w)
    with with_cpu_activations(kind):
        together = qmm(x, w)
        for count in (1, 2, 3, 4, 6):
            assert torch.equal(qmm(x[:count], w), together[:count]), f"{count} rows give other bits than seven"
    for row in range(7):
        assert relative_error(together[row], expected[row]) < 1e-6, f"row {row}: more was lost than by rounding"
    least, most = ERROR[kind] if planes.offers(f"affine{bits}", 1) else ERROR["f32"]
    assert least < relative_error(together[4:], exact[4:]) < most


@pytest.mark.parametrize("bits, group", LARGEST)
def test_the_largest_sums_do_not_overflow(bits, group):
    """All codes 0 or all at their highest, times activations that fill three planes, of one sign."""
    top = (1 << bits) - 1
    rows = torch.stack([torch.zeros(1024), torch.full((1024,), top), torch.arange(1024) % 2 * top])
    words = pack(rows.repeat(16, 1).to(torch.uint8), bits)
    w = Packed(words, torch.ones(48, 1024 // group), torch.full((48, 1024 // group), -(top / 2)), bits, group)
    x = torch.tensor([127 * 65793, 127 * 65793 + 1, 2**23 - 1, -(2**23 - 1), -127 * 65793])[:, None].repeat(1, 1024)
    with reference():
        exact = qmm(x.double(), w)
    for some in (x[:1], x):
        found = qmm(some.float(), w)
        assert relative_error(found, exact[: len(some)]) < 4e-7


def test_float32_keeps_what_is_small_beside_what_is_large():
    """A group's largest number sets how exact the others are, as in a float32 sum."""
    random = Random(8)
    w, x = random_packed(random, (64, 1024), 4, 64), random.normal(5, 1024)
    x[:, ::64] *= torch.tensor([1.0, 1e2, 1e4, 1e6, 1e-6])[:, None]
    with reference():
        exact, plain = qmm(x.double(), w), qmm(x, w)
    found = qmm(x, w)
    for row in range(5):
        assert relative_error(found[row], exact[row]) < 3 * relative_error(plain[row], exact[row])


def test_what_an_outlier_hides_has_a_bound():
    """It meets weights of zero, so all that is left is what its neighbours, rounded as it is, give."""
    random = Random(9)
    codes = random.integers(0, 16, 64, 1024)
    codes[:, ::64] = 8
    w = Packed(pack(codes, 4), torch.ones(64, 16), torch.full((64, 16), -8.0), 4, 64)
    x = random.normal(1, 1024)
    x[:, ::64] = 1e4
    with reference():
        exact = qmm(x.double(), w)
    weights = (codes - 8).abs().sum(1)
    assert ((qmm(x, w).double() - exact).abs() <= 1e4 * 2.0**-22 * weights).all()


def test_what_a_cpu_has_is_what_numba_was_told(monkeypatch):
    """Code for what the target lacks would end the process."""
    has = lanes.has.__wrapped__
    monkeypatch.setattr(config, "CPU_NAME", None)
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx2,+fma,-avx512vnni")
    assert has("avx2") and not has("avx512vnni") and not has("avx")
    monkeypatch.setattr(config, "CPU_FEATURES", None)
    monkeypatch.setattr(config, "CPU_NAME", "haswell")
    assert not has("avx512vnni")


def test_a_matrix_times_many_rows_gives_the_bits_of_each_row(kind):
    random = Random(3)
    w, x = random_packed(random, (301, 1024), 4, 64), random.normal(70, 1024)
    together = qmm(x, w)
    assert all(torch.equal(qmm(x[i : i + 1], w)[0], together[i]) for i in range(70))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="NUMBA_CPU_NAME names x86 CPUs")
@pytest.mark.parametrize("cpu", ["haswell", "nehalem"] if EVERY else ["haswell"])
def test_a_cpu_without_vnni_multiplies_as_exactly(cpu):
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "i16-4-64-100"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def stacks(random, E, inner, hidden, make=random_packed):
    return Experts(*(make(random, size, 4, 64) for size in ((E, inner, hidden),) * 2 + ((E, hidden, inner),)))


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_are_as_exact_as_their_activations(kind, tokens):
    random = Random(tokens)
    experts, x = stacks(random, 6, 192, 320), random.normal(tokens, 320)
    ids = torch.stack([torch.randperm(6, generator=random.generator)[:3] for _ in range(tokens)])
    with reference():
        exact, exact_rows = expert_mlp(x.double(), ids, experts), expert_qmm(x.double(), ids, experts.gate)
    found = expert_mlp(x, ids, experts)
    assert relative_error(found, exact) < 4 * ERROR[kind][1]
    assert ERROR[kind][0] < relative_error(expert_qmm(x, ids, experts.gate), exact_rows) < ERROR[kind][1]
    for i in range(min(tokens, 8)):
        assert torch.equal(expert_mlp(x[i : i + 1], ids[i : i + 1], experts)[0], found[i])


def test_experts_that_lie_apart_are_as_exact(kind):
    random = Random(9)
    apart, x = in_separate_buffers(random, affine(), 4, 192, 320), random.normal(5, 320)
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [3, 0], [3, 2]])
    with reference():
        exact = expert_qmm(x.double(), ids, apart)
    assert ERROR[kind][0] < relative_error(expert_qmm(x, ids, apart), exact) < ERROR[kind][1]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_computed_as_it_is(kind, bad):
    random = Random(5)
    w, x = random_packed(random, (64, 1024), 4, 64), random.normal(4, 1024)
    x[2, 100] = bad
    found, alone = qmm(x, w), qmm(x[:2], w)
    with reference():
        right = qmm(x.double(), w)
    assert torch.equal(found[:2], alone) and not found[2].isfinite().any()
    assert torch.equal(found[2].isnan(), right[2].isnan()), "an infinity is not made NaN"


def test_formats_without_an_integer_way_stay_exact(kind):
    random = Random(4)
    w, x = random_packed(random, (64, 1024), 4, 32, "mxfp4"), random.normal(3, 1024)
    found = qmm(x, w)
    with with_cpu_activations("f32"):
        assert torch.equal(found, qmm(x, w))


def test_small_matrices_stay_exact(kind):
    random = Random(6)
    w, x = quantize(random.normal(32, 1024), 4, 64), random.normal(3, 1024)
    found = qmm(x, w)
    with with_cpu_activations("f32"):
        assert torch.equal(found, qmm(x, w))


def test_the_setting_is_checked_and_given_back():
    with pytest.raises(ValueError, match="one of f32, i16, i8, got 'i4'"):
        use_cpu_activations("i4")
    with pytest.raises(KeyError), with_cpu_activations("i8"):
        raise KeyError
    assert cpu_activations() == "f32"


def test_a_recorded_step_is_the_step_itself(kind):
    model, tokenizer = load("tiny", "cpu")
    made = []
    for replays in (False, True):
        engine = Engine(model, model.new_cache(1, 64, chunk=16), replays=replays, ahead=replays)
        engine.submit(request := Request(tokenizer.encode("the small fox"), 12))
        while engine.busy:
            engine.step()
        made.append(request.made)
    assert made[0] == made[1] and len(made[0]) == 12


def test_the_cost_of_whole_numbers_is_told():
    model, tokenizer = load("tiny", "cpu")
    ids = tokenizer.encode("The fox ran over the hill, and the dog ran after it. " * 4)
    exact, i16, i8 = (quality(model, ids, model, context=64, cpu_activations=kind) for kind in CPU_ACTIVATIONS)
    assert exact.kl == 0 and exact.agreement == 1
    assert 0 < abs(i16.kl) < 1e-5 and i16.kl < i8.kl < 0.05
    assert prove_under("i16", model) == prove_under("i8", model) == ""
    assert cpu_activations() == "f32"


def prove_under(kind, model):
    with with_cpu_activations(kind):
        return prove(model).wrong


def test_states_that_were_rounded_otherwise_are_refused(tmp_path):
    model, _ = load("tiny", device="cpu")
    made = {kind: tmp_path / kind for kind in CPU_ACTIVATIONS}
    for kind, path in made.items():
        with with_cpu_activations(kind):
            cache_file.save(path, model, logits(model, [5, 6, 7])[1], [5, 6, 7])
    for kind in CPU_ACTIVATIONS:
        with with_cpu_activations(kind):
            for other, path in made.items():
                with nullcontext() if other == kind else pytest.raises(CheckpointError, match="--cpu-activations"):
                    cache_file.load(path, model)
