"""Projections with the norm before them and the sum behind them: fused, they are as near to the truth as unfused."""

import pytest
import torch

from halfbyte.check import EPS, LIMIT
from halfbyte.fusion.projections import add_to_stream, norm_first
from halfbyte.graph import record, run_all
from halfbyte.kernels.triton import fused_projections
from halfbyte.kernels.triton.stream import Norm
from halfbyte.ops.dispatch import reference, using
from halfbyte.ops.experts import Experts, expert_mlp
from halfbyte.ops.quant import qmm, quantize
from halfbyte.ops.rowwise import glu, rms_norm

F16, F32, K = torch.float16, torch.float32, 256  # bfloat16 is for a GPU: the interpreter multiplies it wrongly
FUSED = (add_to_stream, norm_first)


def weights(seed, *shape, bits=4, mode="affine"):
    torch.manual_seed(seed)
    w = torch.randn(*shape) / shape[-1] ** 0.5
    return w.to(F16) if bits is None else quantize(w, bits, 64 if mode == "affine" else 32, mode)


def stream(rows, K=K):
    torch.manual_seed(rows)
    return 5 * torch.randn(rows, K), 0.5 + torch.rand(K).to(F16)


def check(step, names, fusions=FUSED):
    """A step fused, against itself in float64 and as it is written; the names of the calls that are left."""
    with reference():
        exact, plain = step(torch.float64), step(None)
    with using("triton"):
        got, calls = record(lambda: step(None))
        for fusion in fusions:
            calls = fusion(calls)
        for y in got:
            y.fill_(torch.nan)
        run_all(calls)
        first = [y.clone() for y in got]
        run_all(calls)
    assert [one.name for one in calls] == names
    for y, again, truth, body in zip(got, first, exact, plain, strict=True):
        assert torch.equal(y, again)
        near = (body.double() - truth).abs().max() + 4 * EPS * truth.abs().max()
        assert float((y.double() - truth).abs().max() / near) <= LIMIT


def as_in(exact, *tensors):
    return tensors if exact is None else [t.to(exact) for t in tensors]


def widened(exact, w):
    """Dense weights in float64; codes mean the same in every dtype."""
    return w.to(exact) if exact is not None and isinstance(w, torch.Tensor) else w


def chain(rows, dtype, out, readers):
    """h + qmm(x, out), and what reads its norm."""
    N, inner = out.shape
    (h, weight), x = stream(rows, N), torch.randn(rows, inner).to(dtype)

    def step(exact):
        h_, weight_, x_ = as_in(exact, h, weight, x)
        narrow, r = None if exact or dtype == F32 else dtype, qmm(x_, widened(exact, out))
        y, total, *copy = rms_norm(h_, weight_, 1e-6, add=r, return_sum=True, extra_dtype=narrow)
        return [total, *readers(exact, copy[0] if copy else y)]

    return step


@pytest.mark.parametrize(
    ("out_bits", "bits", "mode", "rows", "dtype"),
    [
        (4, 4, "affine", 1, F16),
        (4, 4, "affine", 3, F16),
        (4, 2, "affine", 2, F16),
        (8, 8, "affine", 1, F16),
        (8, 4, "affine", 2, F32),
        (4, 4, "mxfp4", 1, F16),
        (6, 6, "affine", 1, F32),
        (None, None, None, 2, F16),
    ],
)
def test_a_norm_between_projections_is_shared_out(out_bits, bits, mode, rows, dtype):
    w = weights(1, 144 if dtype == F32 else 40, K, bits=bits, mode=mode)
    step = chain(rows, dtype, weights(2, K, 192, bits=out_bits), lambda exact, y: [qmm(y, widened(exact, w))])
    check(step, ["qmm_onto_stream", "normed_qmm"])


def test_rows_too_long_for_registers_are_read_in_pieces():
    (h, weight), w, out = stream(1, 2240), weights(1, 16, 2240), torch.empty(1, 16, dtype=F16)
    norm = Norm(h.square().view(1, 35, 64).sum(2), 1e-6)  # as who makes h leaves it
    fused_projections.normed_qmm((h * weight).half(), w, norm=norm, out=out)
    with reference():
        body = qmm(rms_norm(h, weight, 1e-6).half(), w)
        exact = qmm(rms_norm(h.double(), weight.double(), 1e-6), w)
    assert (out - exact).abs().max() <= LIMIT * (body - exact).abs().max()


@pytest.mark.parametrize("rows", [1, 2])
def test_all_readers_do_the_rest_of_a_norm(rows):
    w, experts = weights(4, 40, K), Experts(*(weights(5, 2, *shape) for shape in ((64, K), (64, K), (K, 64))))
    ids = torch.tensor([[1, 0]] * rows, dtype=torch.int32)
    step = chain(rows, F16, weights(2, K, 64), lambda _, y: [qmm(y, w), expert_mlp(y, ids, experts)])
    check(step, ["qmm_onto_stream", "normed_qmm", "normed_expert_mlp"])


@pytest.mark.parametrize(
    ("readers", "names"),
    [
        (lambda y, w: [qmm(y, w), y * 2], ["rms_norm", "qmm", "mul"]),  # not a projection
        (lambda y, w: [qmm(y, w), qmm(y[:1], w)], ["rms_norm", "qmm", "qmm"]),  # of a part
        (lambda y, w: [qmm(glu(y, y), w)], ["rms_norm", "glu", "qmm"]),
    ],
)
def test_a_norm_stays_that_others_read(readers, names):
    w = weights(6, 144, K)
    step = chain(2, F32, weights(8, K, 192), lambda _, y: readers(y, w))
    with using("triton"):
        _, calls = record(lambda: step(None))
    assert [one.name for one in norm_first(add_to_stream(calls))] == ["qmm_onto_stream", *names]


def test_a_norm_stays_whose_stream_another_call_makes():
    (h, weight), w = stream(1), weights(9, 144, K)
    with using("triton"):
        _, calls = record(lambda: qmm(rms_norm(h, weight, 1e-6), w))
    assert norm_first(calls) == calls


def test_a_stream_is_added_to_only_where_nobody_reads_what_is_added():
    (h, weight), w = stream(1), weights(8, K, 192)
    x = torch.randn(1, 192)

    def step(seen):
        r = qmm(x, w)
        y, total = rms_norm(h, weight, 1e-6, add=r, return_sum=True)
        return [y, total, *([r * 2] if seen else [])]

    with using("triton"):
        for seen, first in ((True, "qmm"), (False, "qmm_onto_stream")):
            _, calls = record(lambda seen=seen: step(seen))
            assert [one.name for one in add_to_stream(calls)][:2] == [first, "rms_norm"]


@pytest.mark.parametrize(("rows", "inner"), [(5, 192), (1, 64)])
def test_more_rows_and_small_matrices_stay_as_they_are(rows, inner):
    (h, weight), w, x = stream(rows), weights(9, K, inner), torch.randn(rows, inner)
    with using("triton"):
        _, calls = record(lambda: rms_norm(h, weight, 1e-6, add=qmm(x, w), return_sum=True))
    assert add_to_stream(calls) == calls
