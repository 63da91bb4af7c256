"""Quantised weights: the bits of mlx, stored and live; the promises of a round trip; products that do not move."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.ops.dispatch import using
from halfbyte.ops.formats import AFFINE_BITS, AFFINE_GROUPS, pack, unpack
from halfbyte.ops.quant import Packed, dequantize, embed, qmm, quantize

STORED = json.loads((Path(__file__).parent / "data/quant/mlx_goldens.json").read_text())
LANGUAGES = ("torch", "numba")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MODES = [("affine", b, g) for b in AFFINE_BITS for g in AFFINE_GROUPS] + [
    ("mxfp4", 4, 32),
    ("nvfp4", 4, 16),
    ("mxfp8", 8, 32),
]


def floats_of_bits(bits, shape):
    return torch.from_numpy(np.array(bits, np.uint32).view(np.float32)).reshape(shape)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("case", STORED["affine"], ids=lambda c: f"{c['bits']}bit-g{c['group_size']}-{c['dtype']}")
def test_stored_affine_bits(case, language):
    bits, group, dtype = case["bits"], case["group_size"], DTYPES[case["dtype"]]
    words = torch.from_numpy(np.array(case["weight"], np.uint32))
    scales = floats_of_bits(case["scales_f32_bits"], (2, -1)).to(dtype)
    biases = floats_of_bits(case["biases_f32_bits"], (2, -1)).to(dtype)
    expected = floats_of_bits(case["dequant_f32_bits"], (2, 128))
    with using(language):
        assert torch.equal(dequantize(Packed(words, scales, biases, bits, group), dtype).float(), expected)
        if bits == 1:  # one bit is read, not written
            with pytest.raises(ValueError, match="quantize: bits"):
                quantize(torch.zeros(2, 128), 1, group)
            return
        made = quantize(floats_of_bits(STORED["x_f32_bits"], (2, 128)).to(dtype), bits, group)
    assert torch.equal(made.words, words)
    assert torch.equal(made.scales, scales) and torch.equal(made.biases, biases)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("case", STORED["fp"], ids=lambda c: c["mode"])
def test_stored_fp_bits(case, language):
    mode = case["mode"].removesuffix("+global_scale")
    bits, group = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}[mode]
    words = torch.from_numpy(np.array(case["weight"], np.uint32))
    scales = torch.tensor(case["scales"], dtype=torch.uint8)
    factor = torch.tensor(case["global_scale"]) if "global_scale" in case else None
    with using(language):
        read = dequantize(Packed(words, scales, None, bits, group, mode, factor))
        made = quantize(
            floats_of_bits(STORED["x_f32_bits"], (2, 128)), mode=mode, global_scale=case.get("global_scale")
        )
    assert torch.equal(read, floats_of_bits(case["dequant_f32_bits"], (2, 128)))
    assert torch.equal(made.words, words) and torch.equal(made.scales, scales)


def mlx_of(t):
    kinds = {torch.float32: mx.float32, torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}
    return mx.array(t.float().numpy()).astype(kinds[t.dtype])


def weights(kind, dtype):
    torch.manual_seed(len(kind))
    values = {
        "normal": lambda: torch.randn(24, 256),
        "tiny": lambda: torch.randn(8, 256) * 1e-30,
        "huge": lambda: torch.randn(8, 256) * 1e4,
        "beyond": lambda: torch.randn(8, 256) * (1e4 if dtype == torch.float16 else 1e6),
        "zero": lambda: torch.zeros(4, 256),
        "constant": lambda: torch.full((4, 256), 0.37),
        "whole": lambda: torch.randint(-8, 8, (16, 256)).float(),
        "heavy": lambda: torch.randn(24, 256) ** 5,
        "small": lambda: torch.randn(8, 256) * 1e-6,
        "negative": lambda: -torch.rand(8, 256),
    }
    return values[kind]().to(dtype)


KINDS = ("normal", "tiny", "huge", "beyond", "zero", "constant", "whole", "heavy", "small", "negative")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
def test_live_mlx_bits(mode, bits, group, dtype, language):
    """Codes, scales, biases and what they are read as: all equal, on weights of every temper."""
    for kind in KINDS:
        w = weights(kind, dtype)
        for factor in (None, 3.28) if mode == "nvfp4" else (None,):
            given_scale = {} if factor is None else {"global_scale": mx.array(factor)}
            theirs = mx.quantize(mlx_of(w), group_size=group, bits=bits, mode=mode, **given_scale)
            with using(language):
                ours = quantize(w, bits, group, mode, factor)
                read = dequantize(ours, torch.float32 if factor else dtype)
            assert np.array_equal(np.array(theirs[0]), ours.words.numpy()), kind
            for part, mine in zip(theirs[1:], (ours.scales, ours.biases), strict=False):
                same = np.array(part if mode != "affine" else part.astype(mx.float32))
                assert np.array_equal(same, (mine if mode != "affine" else mine.float()).numpy()), kind
            kept = mx.float32 if factor else mlx_of(w).dtype
            expected = mx.dequantize(*theirs, group_size=group, bits=bits, mode=mode, dtype=kept, **given_scale)
            assert np.array_equal(np.array(expected.astype(mx.float32)), read.float().numpy(), equal_nan=True), kind


@pytest.mark.parametrize("language", LANGUAGES)
def test_live_mlx_bits_where_a_global_scale_is_rounded_once(language):
    """2688 / 2128 by a reciprocal is one unit off, and these scales with it."""
    w = torch.zeros(4, 32, dtype=torch.bfloat16)
    w[0, 0], w[0, 16], w[1, 0], w[1, 16] = 2.0, 25.0, 24.875, 1.5625
    theirs = mx.quantize(mlx_of(w), group_size=16, bits=4, mode="nvfp4", global_scale=mx.array(2128.0))
    with using(language):
        ours = quantize(w, 4, 16, "nvfp4", 2128.0)
    assert np.array_equal(np.array(theirs[1]), ours.scales.numpy())
    assert np.array_equal(np.array(theirs[0]), ours.words.numpy())


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_a_weight_may_lie_column_by_column(mode, language):
    w, group = torch.linspace(-3, 5, 7 * 32).view(32, 7).t(), 16 if mode == "nvfp4" else 32  # one or two groups a row
    with using(language):
        turned, whole = (quantize(each, group=group, mode=mode) for each in (w, w.contiguous()))
    assert torch.equal(turned.words, whole.words) and torch.equal(turned.scales, whole.scales)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from(AFFINE_BITS),
    group=st.sampled_from(AFFINE_GROUPS),
    groups=st.integers(1, 3),
    rows=st.integers(1, 5),
    scale=st.sampled_from([0.0, 1e-37, 1e-6, 1.0, 1e4, 1e37]),
    offset=st.sampled_from([0.0, -3.0, 3.0]),
    seed=st.integers(0, 2**16),
)
def test_a_round_trip_stays_within_one_step(bits, group, groups, rows, scale, offset, seed):
    """|w - dequantize(quantize(w))| <= |scale|, and exact where a group is constant."""
    w = (torch.randn(rows, group * groups, generator=torch.Generator().manual_seed(seed)) + offset) * scale
    p = quantize(w, bits, group)
    step = p.scales.double().abs().repeat_interleave(group, -1)
    rounding = 4 * torch.finfo(torch.float32).eps * w.double().abs().max()
    assert ((dequantize(p, torch.float64) - w.double()).abs() <= step + rounding).all()
    constant = torch.full((1, group), float(w[0, 0]))
    assert torch.allclose(dequantize(quantize(constant, bits, group)), constant, rtol=0, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(bits=st.sampled_from((1, *AFFINE_BITS)), words=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_codes_survive_packing(bits, words, seed):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (3, 32 * words), generator=random)
    assert torch.equal(unpack(pack(codes, bits), bits), codes)


@pytest.mark.parametrize(("N", "K"), [(29, 64), (29, 320), (229, 320)], ids=["narrow", "small", "large"])
@pytest.mark.parametrize(("mode", "bits", "group"), [m for m in MODES if m[2] != 128])
def test_one_row_and_many_give_the_same_bits(mode, bits, group, N, K):
    torch.manual_seed(1)
    w = quantize(torch.randn(3, N, K).to(torch.bfloat16), bits, group, mode)
    x = torch.randn(11, 3, K)
    whole = qmm(x, w)
    assert torch.equal(torch.stack([qmm(row, w) for row in x]), whole)
    assert torch.equal(torch.cat([qmm(part, w) for part in x.split((5, 6))]), whole)
    alone = Packed(w.words[1], w.scales[1], None if w.biases is None else w.biases[1], bits, group, mode)
    assert torch.equal(qmm(x[:, 1], alone), whole[:, 1])
    turned = torch.randn(7, 3, N)
    rows = qmm(turned, w, transpose=False)
    assert torch.equal(torch.stack([qmm(row, w, transpose=False) for row in turned]), rows)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dense_rows_do_not_depend_on_their_batch(dtype):
    torch.manual_seed(2)
    w, x = torch.randn(265, 333).to(dtype), torch.randn(70, 333)
    whole = qmm(x, w)
    assert torch.equal(torch.stack([qmm(row, w) for row in x]), whole)


def test_a_row_longer_than_the_originals_allow():
    """The Metal kernels keep x in 4096 floats and write past them; ours has no such limit."""
    torch.manual_seed(3)
    for bits in AFFINE_BITS:
        w, x = quantize(torch.randn(9, 8192), bits, 64), torch.randn(2, 8192)
        exact = qmm(x.double(), w)
        assert (qmm(x, w) - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("N", [9, 600], ids=["small", "large"])
def test_nan_and_infinity_stay_in_their_rows(N):
    w = quantize(torch.randn(N, 128))
    x = torch.randn(5, 128)
    x[1, 7], x[3, 100] = float("nan"), float("inf")
    y = qmm(x, w)
    with using("torch"):
        body = qmm(x, w)
    assert torch.isfinite(y[[0, 2, 4]]).all() and y[1].isnan().all()
    weighs = dequantize(w)[:, 100] != 0  # a weight that float32 rounds to zero makes NaN of an infinity
    assert torch.equal(y[3, weighs], body[3, weighs])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value):
    w = torch.randn(2, 64)
    w[1, 3] = value
    with pytest.raises(ValueError, match="quantize: w must be finite"):
        quantize(w)


def test_embedding_rows_are_the_dequantised_rows():
    w = quantize(torch.randn(13, 128), 6, 32)
    ids = torch.tensor([[12, 0], [5, 5]])
    assert torch.equal(embed(ids, w), dequantize(w)[ids])
    assert embed(ids, w, torch.bfloat16).dtype == torch.bfloat16
    for bad in (13, -1):
        with pytest.raises(ValueError, match=r"embed: ids must be in \[0, 13\)"):
            embed(torch.tensor([bad]), w)
