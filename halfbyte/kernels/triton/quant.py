"""Quantised weights on a GPU: qmm with few rows through matvec.py, with several through eights.py and with many through
gemm.py, embed, quantize.

embed and quantize follow mlx operation by operation, since their bits are promised: divisions are IEEE's, and products
and sums are not fused (`enable_fp_fusion=False`).
"""

from math import prod

import torch
import triton
import triton.language as tl

from . import eights
from .codes import e4m3_value, power_value
from .dequant import NV_RANGE, TYPES, codes, dequantize, group_values, narrowed, operand, unit_of, values
from .device import INTERPRETED, steady
from .exact import multiply_exactly, small
from .gemm import product
from .matvec import multiply

__all__ = ["dequantize", "embed", "qmm", "quantize"]

FEW = 4  # rows of x that matvec.py takes where eights.py is not quicker
SEVERAL = 8  # that it takes of others, of a matrix of up to so many weights
LITTLE = 1 << 20  # 2026-11-15, H200, 8 rows by 257 x 2048 in 8 bits: 4.9 us, 7.5 by gemm.py


def qmm(x, w, *, transpose=True, out=None):
    N, K = w.shape[-2:]
    lead, width = tuple(w.shape[:-2]), N if transpose else K
    heads = prod(lead)
    rows = x.numel() // (heads * x.shape[-1])
    shape = (*x.shape[:-1], width)
    y = out if out is not None and out.is_contiguous() else torch.empty(shape, dtype=x.dtype, device=x.device)
    if y.numel():
        x = x.reshape(rows, heads, x.shape[-1])
        x = x if x.stride(-1) == 1 else x.contiguous()
        target = y.view(rows, heads, width)
        if small(x, w):
            multiply_exactly(x, None, w, target, transpose)
        elif transpose and (steady(rows) or eights.quick(rows, heads * N * K)) and eights.fits(x, w):
            eights.multiply_rows(x, w, target)
        elif transpose and rows <= (SEVERAL if N * K <= LITTLE else FEW) and not steady(rows):
            multiply(x, None, w, target)
        else:
            product(x, w, transpose=transpose, out=target)
    return y if out is None or y is out else out.copy_(y)


@triton.jit
def embed_kernel(
    ids, w, factor, y, units, FORMAT: tl.constexpr, TYPE: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr
):
    """A piece of one row, as `dequantize` would give it: rounded to TYPE after every step."""
    UNIT: tl.constexpr = FORMAT.unit
    words, scales, biases, row_words, row_scales = w
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < units
    q = codes(words + row * row_words, unit * FORMAT.words, inside, FORMAT)
    group = row * row_scales + unit // (FORMAT.group // UNIT)
    s = group_values(scales, group, inside, FORMAT)
    if factor is not None:
        s *= tl.div_rn(tl.load(factor), FORMAT.factor)
    else:
        s = narrowed(s, TYPE, INTERPRETED).to(tl.float32)
    v = values(q, FORMAT).reshape(BLOCK, UNIT) * s[:, None]
    if FORMAT.mode == "affine":
        b = narrowed(group_values(biases, group, inside, FORMAT), TYPE, INTERPRETED).to(tl.float32)
        v = narrowed(v, TYPE, INTERPRETED).to(tl.float32) + b[:, None]
    at = tl.program_id(1) * (BLOCK * UNIT) + tl.arange(0, BLOCK * UNIT)
    tl.store(y + place * units * UNIT + at, narrowed(v, TYPE, INTERPRETED).reshape(BLOCK * UNIT), at < units * UNIT)


@triton.jit
def copy_rows_kernel(ids, w, y, K, row_step, column_step, BLOCK: tl.constexpr):
    """A piece of one row of a dense table."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.load(w + row * row_step + k.to(tl.int64) * column_step, k < K)
    tl.store(y + place * K + k, piece.to(y.dtype.element_ty), k < K)


ROW_PIECE = 2048  # weights of one program of embed; 2026-11-15, H200


def embed(ids, w, dtype=torch.float32, *, out=None):
    K, shape = w.shape[-1], (*ids.shape, w.shape[-1])
    y = out if out is not None and out.is_contiguous() else torch.empty(shape, dtype=dtype, device=ids.device)
    if ids.numel():
        ids, pieces = ids.reshape(-1).contiguous(), triton.cdiv(K, ROW_PIECE)
        if isinstance(w, torch.Tensor):
            copy_rows_kernel[(ids.numel(), pieces)](ids, w, y, K, *w.stride(), BLOCK=ROW_PIECE, num_warps=4)
        else:
            given, form = operand(w)[:2]
            words, scales, biases, _, _, row_words, _, row_scales, _ = given
            embed_kernel[(ids.numel(), pieces)](
                ids, (words, scales, biases, row_words, row_scales), w.global_scale, y, K // form.unit,
                FORMAT=form, TYPE=TYPES[dtype], INTERPRETED=INTERPRETED, BLOCK=ROW_PIECE // form.unit,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return y if out is None or y is out else out.copy_(y)


@triton.jit
def nearest(x):
    """x to the nearest whole number, the even one of two."""
    return tl.where(tl.abs(x) < 8388608.0, (x + 12582912.0) - 12582912.0, x)


@triton.jit
def affine_group(w, BITS: tl.constexpr):
    """Codes int32 [G, GROUP], scales and biases [G] of groups."""
    TOP: tl.constexpr = (1 << BITS) - 1
    low, high = tl.min(w, 1), tl.max(w, 1)
    from_low = tl.abs(low) > tl.abs(high)
    scale = tl.maximum(tl.div_rn(high - low, tl.full(low.shape, TOP, tl.float32)), 1e-7)
    scale = tl.where(from_low, scale, -scale)
    edge = tl.where(from_low, low, high)
    steps = nearest(tl.div_rn(edge, scale))
    scale = tl.where(steps != 0, tl.div_rn(edge, tl.where(steps != 0, steps, 1.0)), scale)
    bias = tl.where(steps != 0, edge, 0.0)
    code = nearest(tl.div_rn(w - bias[:, None], tl.broadcast_to(scale[:, None], w.shape)))
    # A constant huge group has scale 0 and NaN codes, which count as 0.
    return tl.where(code > 0, tl.minimum(code, TOP), 0.0).to(tl.int32), scale, bias


@triton.jit
def e4m3_codes(x):
    """The nearest e4m3 code, uint8 in int32, of x cut to the format's range."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (nearest(tl.abs(x) * 512.0)).to(tl.int32)
    code = tl.where(tl.abs(x) < 0.015625, small, normal)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.constexpr_function
def e2m1(code):
    """What a code stands for."""
    size = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code % 8]
    return -size if code >= 8 else size


@triton.jit
def e2m1_codes(x, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The nearest e2m1 code, the lower of two as near; distances are rounded to TYPE, as mlx forms them."""
    best = tl.abs(x)
    code = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(1, 16):
        distance = x - e2m1(i)
        distance = tl.abs(narrowed(distance, TYPE, INTERPRETED).to(tl.float32))
        code = tl.where(distance < best, i, code)
        best = tl.minimum(distance, best)
    return code


@triton.jit
def small_float_group(w, factor, MODE: tl.constexpr, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Codes int32 [G, GROUP] and scales [G] as codes. Every step is rounded to TYPE, the type of the weights."""
    largest = tl.max(tl.abs(w), 1)
    ideal = tl.div_rn(largest, tl.full(largest.shape, 448.0 if MODE == "mxfp8" else 6.0, tl.float32))
    ideal = narrowed(ideal, TYPE, INTERPRETED).to(tl.float32)
    if MODE == "nvfp4":
        if factor is not None:
            ideal *= factor
        scale = e4m3_codes(ideal)
        step = e4m3_value(scale)
    else:
        power = tl.ceil(tl.log2(tl.where(ideal == 0, 1.0, ideal).to(tl.float64)).to(tl.float32))
        power = tl.minimum(tl.maximum(power, -127.0), 127.0)
        scale = power.to(tl.int32) + 127
        step = power_value(scale)
    step = tl.broadcast_to(narrowed(step, TYPE, INTERPRETED).to(tl.float32)[:, None], w.shape)
    scaled = tl.where(step == 0, 0.0, tl.div_rn(w, tl.where(step == 0, 1.0, step)))
    scaled = narrowed(scaled, TYPE, INTERPRETED).to(tl.float32)
    if factor is not None:
        scaled *= factor[:, None]
    if MODE == "mxfp8":
        code = e4m3_codes(scaled)
    elif factor is not None:
        code = e2m1_codes(scaled, tl.float32, INTERPRETED)
    else:
        code = e2m1_codes(scaled, TYPE, INTERPRETED)
    return code, scale


@triton.jit
def quantize_kernel(
    w, global_scale, words, scales, biases, groups, groups_per_matrix,
    MODE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, WORDS: tl.constexpr,
    NV: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK groups of a flat stream of weights, and the words that their codes fill."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    given = tl.load(w + at, inside[:, None], other=0.0).to(tl.float32)
    if MODE == "affine":
        code, scale, bias = affine_group(given, BITS)
        scale = narrowed(scale, scales.dtype.element_ty, INTERPRETED)
        tl.store(biases + group, narrowed(bias, biases.dtype.element_ty, INTERPRETED), inside)
    else:
        factor = None
        if global_scale is not None:
            whole = tl.load(global_scale + group // groups_per_matrix, inside, other=1.0)
            factor = tl.div_rn(tl.full(whole.shape, NV, tl.float32), whole)
        code, scale = small_float_group(given, factor, MODE, w.dtype.element_ty, INTERPRETED)
        scale = scale.to(tl.uint8)
    tl.store(scales + group, scale, inside)
    code = code.reshape(BLOCK, GROUP // UNIT, UNIT)
    for i in tl.static_range(WORDS):
        shift = tl.arange(0, UNIT) * BITS - 32 * i  # where in word i a code begins; it may begin before or end after
        moved = tl.where(shift < 0, code >> tl.maximum(-shift, 0), code << tl.minimum(tl.maximum(shift, 0), 31))
        word = tl.sum(tl.where((shift > -BITS) & (shift < 32), moved, 0), 2)
        unit = group[:, None] * (GROUP // UNIT) + tl.arange(0, GROUP // UNIT)[None, :]
        tl.store(words + unit * WORDS + i, word, tl.broadcast_to(inside[:, None], word.shape))


def quantize(w, bits=None, group=None, mode="affine", global_scale=None):
    K = w.shape[-1]
    w = w.contiguous()
    words = torch.empty((*w.shape[:-1], K * bits // 32), dtype=torch.int32, device=w.device)
    shape = (*w.shape[:-1], K // group)
    scales = torch.empty(shape, dtype=w.dtype if mode == "affine" else torch.uint8, device=w.device)
    biases = torch.empty_like(scales) if mode == "affine" else None
    if w.numel():
        unit, count = unit_of(bits)
        groups, block = scales.numel(), 1024 // group
        matrices = 1 if global_scale is None else global_scale.numel()
        quantize_kernel[(triton.cdiv(groups, block),)](
            w, global_scale, words, scales, biases, groups, groups // matrices, MODE=mode, BITS=bits, GROUP=group,
            UNIT=unit, WORDS=count, NV=NV_RANGE, INTERPRETED=INTERPRETED, BLOCK=block,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return words.view(torch.uint32), scales, biases
