"""Quantised weights as numbers: decoding for every kernel that wants tiles of weights, and `dequantize` itself.

A row is a stream of codes. It is read in units that begin and end at a word: one word of 32 / b codes where b divides
32, else three words (3 and 6 bits) or five (5 bits). A unit is cut in halves with shifts, and the halves are joined
along a new last axis, until a code is left: no code ever moves to another thread. A unit never crosses a group.

Both of `dequantize`'s streams are flat, since K is a whole number of groups: it is one pass over memory, at whose speed
it runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .codes import e4m3_value, power_value
from .device import INTERPRETED
from .stacks import on_device

NV_RANGE = 448.0 * 6.0
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def unit_of(bits):
    """Codes and words of the smallest whole number of words that holds whole codes (2 units of 3 words for 6 bits)."""
    return {3: (32, 3), 5: (32, 5), 6: (16, 3)}.get(bits, (32 // bits, 1))


@triton.jit
def halves(t, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """The codes in the low WIDTH bits of t, along as many new axes of two as it takes, the first code first."""
    for level in tl.static_range(1, 6):
        if WIDTH >> level >= BITS:
            t = tl.join(t, t >> (WIDTH >> level))
    return t & ((1 << BITS) - 1)


@triton.jit
def word(words, at, inside, ALIGNED: tl.constexpr):
    """Word `at` of a stream, as uint32; from four bytes where words may begin anywhere."""
    if ALIGNED:
        w = tl.load(words + at, inside, other=0)
    else:
        w = tl.load(words + 4 * at, inside, other=0).to(tl.uint32)
        for byte in tl.static_range(1, 4):
            w |= tl.load(words + 4 * at + byte, inside, other=0).to(tl.uint32) << (8 * byte)
    return w.to(tl.uint32, bitcast=True)


@triton.jit
def codes(words, at, inside, FORMAT: tl.constexpr):
    """The codes, uint32 [..., 2, 2, ...], of the units whose first words are `at`."""
    BITS: tl.constexpr = FORMAT.bits
    ALIGNED: tl.constexpr = FORMAT.aligned
    w0 = word(words, at, inside, ALIGNED)
    if FORMAT.words == 1:
        found = halves(w0, 32, BITS)
    else:
        w1 = word(words, at + 1, inside, ALIGNED)
        w2 = word(words, at + 2, inside, ALIGNED)
        if FORMAT.words == 3:
            first = tl.join(w0, w1 >> 16 | w2 << 16)
            second = tl.join(w0 >> 24 | w1 << 8, w2 >> 8)
            found = halves(tl.join(first, second), 24, BITS)
        else:
            w3 = word(words, at + 3, inside, ALIGNED)
            w4 = word(words, at + 4, inside, ALIGNED)
            even = tl.join(tl.join(w0, w2 >> 16 | w3 << 16), tl.join(w1 >> 8, w3 >> 24 | w4 << 8))
            odd = tl.join(tl.join(w0 >> 20 | w1 << 12, w3 >> 4), tl.join(w1 >> 28 | w2 << 4, w4 >> 12))
            found = halves(tl.join(even, odd), 20, BITS)
    return found


@triton.jit
def values(q, FORMAT: tl.constexpr):
    """What codes stand for before scaling, exactly, in float32."""
    if FORMAT.mode == "affine":  # q in the low bits of 2^23, less 2^23: cheaper than a conversion
        v = (q | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif FORMAT.bits == 4:  # e2m1: sign, two bits of exponent, one of mantissa, where a float32 has them
        v = ((q & 8) << 28 | (q & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    else:
        v = e4m3_value(q)
    return v


@triton.jit
def group_values(scales, at, inside, FORMAT: tl.constexpr):
    """Scales or biases `at`, as the float32 they stand for."""
    if FORMAT.mode == "affine":
        if FORMAT.aligned:
            s = tl.load(scales + at, inside, other=0)
        elif FORMAT.scale_type == tl.float32:
            s = word(scales, at, inside, False).to(tl.float32, bitcast=True)
        else:
            s = tl.load(scales + 2 * at, inside, other=0).to(tl.uint16)
            s |= tl.load(scales + 2 * at + 1, inside, other=0).to(tl.uint16) << 8
            s = s.to(FORMAT.scale_type, bitcast=True)
        s = s.to(tl.float32)
    else:
        q = tl.load(scales + at, inside, other=0)
        s = e4m3_value(q) if FORMAT.mode == "nvfp4" else power_value(q)
    return s


@triton.jit
def matrix_of(operand, e, FORMAT: tl.constexpr):
    """Matrix e of an operand: where its words, scales and biases begin, and the steps from row to row."""
    words, scales, biases, _, matrix_words, row_words, matrix_scales, row_scales, _ = operand
    if FORMAT.apart:
        word_type: tl.constexpr = tl.int32 if FORMAT.aligned else tl.uint8
        scale_type: tl.constexpr = FORMAT.scale_type if FORMAT.aligned else tl.uint8
        words = tl.load(words + e).to(tl.pointer_type(word_type))
        scales = tl.load(scales + e).to(tl.pointer_type(scale_type))
        biases = tl.load(biases + e).to(tl.pointer_type(scale_type))
        if FORMAT.wide:
            words = tl.multiple_of(words, 16)
            scales = tl.multiple_of(scales, 16)
            biases = tl.multiple_of(biases, 16)
    else:
        words += e * matrix_words
        scales += e * matrix_scales
        biases += e * matrix_scales
    return words, scales, biases, row_words, row_scales


@triton.jit
def factor_of(operand, e, FORMAT: tl.constexpr):
    """What nvfp4's global scale multiplies all of matrix e by."""
    return tl.div_rn(tl.load(operand[3] + e * operand[8]), FORMAT.factor)


@triton.jit
def weight_tile(matrix, n, inside, first, K, FORMAT: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """float32 [rows, COLUMNS]: the weights of rows n [rows, 1] from column `first` on, each scale q + bias; 0 outside.

    inside [rows, 1] says which rows exist. `first` is a multiple of COLUMNS; COLUMNS divides the group or is divided by
    it. EVEN promises that K is a multiple of COLUMNS.
    """
    words, scales, biases, row_words, row_scales = matrix
    if FORMAT.mode == "dense":
        column = first + tl.arange(0, COLUMNS)[None, :]
        has = inside if EVEN else inside & (column < K)
        w = tl.load(words + n * row_words + column, has, other=0.0).to(tl.float32)
    else:
        rows: tl.constexpr = n.shape[0]
        units: tl.constexpr = COLUMNS // FORMAT.unit
        groups: tl.constexpr = (COLUMNS + FORMAT.group - 1) // FORMAT.group
        unit = first // FORMAT.unit + tl.arange(0, units)[None, :]
        group = first // FORMAT.group + tl.arange(0, groups)[None, :]
        has_unit, has_group = inside, inside
        if not EVEN:
            has_unit, has_group = inside & (unit * FORMAT.unit < K), inside & (group * FORMAT.group < K)
        q = codes(words, n * row_words + unit * FORMAT.words, has_unit, FORMAT)
        at = n * row_scales + group
        s = group_values(scales, at, has_group, FORMAT)
        w = values(q, FORMAT).reshape(rows, groups, COLUMNS // groups) * s[:, :, None]
        if FORMAT.mode == "affine":
            w += group_values(biases, at, has_group, FORMAT)[:, :, None]
        w = w.reshape(rows, COLUMNS)
    return w


# A word of eight 4-bit codes as four pairs of bfloat16: codes i and i + 4 in the low bits of two numbers 128, less 128.
NIBBLES = tl.constexpr("""{
    .reg .b32 shifted, mask, magic, one, less;
    mov.b32 mask, 0x000F000F;
    mov.b32 magic, 0x43004300;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xC300C300;
    lop3.b32 $0, $4, mask, magic, 0xEA;
    fma.rn.bf16x2 $0, $0, one, less;
    shr.u32 shifted, $4, 4;
    lop3.b32 $1, shifted, mask, magic, 0xEA;
    fma.rn.bf16x2 $1, $1, one, less;
    shr.u32 shifted, $4, 8;
    lop3.b32 $2, shifted, mask, magic, 0xEA;
    fma.rn.bf16x2 $2, $2, one, less;
    shr.u32 shifted, $4, 12;
    lop3.b32 $3, shifted, mask, magic, 0xEA;
    fma.rn.bf16x2 $3, $3, one, less;
}""")
# Those times a scale and plus a bias, both given twice in a word, rounded once.
SCALED = tl.constexpr("""
    fma.rn.bf16x2 $0, $0, $5, $6;
    fma.rn.bf16x2 $1, $1, $5, $6;
    fma.rn.bf16x2 $2, $2, $5, $6;
    fma.rn.bf16x2 $3, $3, $5, $6;
""")


@triton.jit
def both_halves(pair):
    """Two bfloat16 numbers of each word, along a new axis; where both go into one register, this is no instruction."""
    low = pair.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def codes_apart(w, CODE: tl.constexpr, FORMAT: tl.constexpr, TYPE: tl.constexpr):
    """Codes CODE and CODE + 4 of each word, along a new axis."""
    first, second = w >> (4 * CODE) & 15, w >> (4 * CODE + 16) & 15
    return tl.join(values(first, FORMAT).to(TYPE), values(second, FORMAT).to(TYPE))


@triton.jit
def shuffled_codes(w, FORMAT: tl.constexpr, TYPE: tl.constexpr, NVIDIA: tl.constexpr):
    """TYPE [rows, 8 WORDS]: what the 4-bit codes of words w [rows, WORDS] stand for before scaling, exactly.

    They come in the order in which the tensor cores want them in registers, so that a thread loads whole words and
    keeps all of their codes: see `shuffled`. NVIDIA's instructions are 11 a word.
    """
    ROWS: tl.constexpr = w.shape[0]
    WORDS: tl.constexpr = w.shape[1]
    if NVIDIA:
        a, b, c, d = tl.inline_asm_elementwise(
            NIBBLES,
            "=&r,=&r,=&r,=&r,r",
            [w],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        v = tl.join(tl.join(both_halves(a), both_halves(b)), tl.join(both_halves(c), both_halves(d)))
    else:
        a, b = codes_apart(w, 0, FORMAT, TYPE), codes_apart(w, 1, FORMAT, TYPE)
        c, d = codes_apart(w, 2, FORMAT, TYPE), codes_apart(w, 3, FORMAT, TYPE)
        v = tl.join(tl.join(a, b), tl.join(c, d))
    # [rows, word, half, i % 2, i // 2]; a quarter of the words is of one thread
    return v.reshape(ROWS, 4, WORDS // 4, 2, 2, 2).permute(0, 2, 5, 4, 1, 3).reshape(ROWS, 8 * WORDS)


@triton.jit
def code_tile(
    matrix, n, inside, first, FORMAT: tl.constexpr, TYPE: tl.constexpr, COLUMNS: tl.constexpr,
    SHUFFLED: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """TYPE [rows, COLUMNS]: what codes stand for before scaling, exactly; `first` is a multiple of COLUMNS."""
    words, row_words = matrix[0], matrix[3]
    ROWS: tl.constexpr = n.shape[0]
    if SHUFFLED:
        w = word(words, n * row_words + first // 8 + tl.arange(0, COLUMNS // 8)[None, :], inside, True)
        v = shuffled_codes(w, FORMAT, TYPE, NVIDIA)
    else:
        unit = first // FORMAT.unit + tl.arange(0, COLUMNS // FORMAT.unit)[None, :]
        q = codes(words, n * row_words + unit * FORMAT.words, inside, FORMAT)
        v = values(q, FORMAT).to(TYPE).reshape(ROWS, COLUMNS)
    return v


@triton.jit
def two_code_tiles(
    matrix, n, inside, first, FORMAT: tl.constexpr, TYPE: tl.constexpr, COLUMNS: tl.constexpr, NVIDIA: tl.constexpr
):
    """Two neighbouring shuffled tiles, from words loaded as one."""
    ROWS: tl.constexpr = n.shape[0]
    w = word(matrix[0], n * matrix[3] + first // 8 + tl.arange(0, COLUMNS // 4)[None, :], inside, True)
    a, b = tl.split(w.reshape(ROWS, 2, COLUMNS // 8).permute(0, 2, 1))
    return shuffled_codes(a, FORMAT, TYPE, NVIDIA), shuffled_codes(b, FORMAT, TYPE, NVIDIA)


@triton.jit
def twice(pair, SECOND: tl.constexpr):
    """One of the two 16-bit numbers in a word, in both halves of it."""
    return pair & 0xFFFF0000 | pair >> 16 if SECOND else pair << 16 | pair & 0xFFFF


@triton.jit
def weights_apart(w, scale, bias, CODE: tl.constexpr, FORMAT: tl.constexpr, TYPE: tl.constexpr):
    """Weights CODE and CODE + 4 of each word, along a new axis."""
    first, second = values(w >> (4 * CODE) & 15, FORMAT), values(w >> (4 * CODE + 16) & 15, FORMAT)
    return tl.join((first * scale + bias).to(TYPE), (second * scale + bias).to(TYPE))


@triton.jit
def shuffled_weights(
    w, scales, biases, FORMAT: tl.constexpr, SECOND: tl.constexpr, TYPE: tl.constexpr, NVIDIA: tl.constexpr
):
    """TYPE [rows, 8 WORDS]: as shuffled_codes, but scale q + bias rounded once, with those of one of two groups."""
    ROWS: tl.constexpr = w.shape[0]
    WORDS: tl.constexpr = w.shape[1]
    if NVIDIA:
        a, b, c, d = tl.inline_asm_elementwise(
            NIBBLES + SCALED,
            "=&r,=&r,=&r,=&r,r,r,r",
            [w, twice(scales, SECOND)[:, None], twice(biases, SECOND)[:, None]],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        v = tl.join(tl.join(both_halves(a), both_halves(b)), tl.join(both_halves(c), both_halves(d)))
    else:
        s, t = two_scales(scales, FORMAT), two_scales(biases, FORMAT)
        scale, bias = s[1 if SECOND else 0][:, None], t[1 if SECOND else 0][:, None]
        a, b = weights_apart(w, scale, bias, 0, FORMAT, TYPE), weights_apart(w, scale, bias, 1, FORMAT, TYPE)
        c, d = weights_apart(w, scale, bias, 2, FORMAT, TYPE), weights_apart(w, scale, bias, 3, FORMAT, TYPE)
        v = tl.join(tl.join(a, b), tl.join(c, d))
    return v.reshape(ROWS, 4, WORDS // 4, 2, 2, 2).permute(0, 2, 5, 4, 1, 3).reshape(ROWS, 8 * WORDS)


@triton.jit
def row_starts(matrix, n):
    """Where the words, scales and biases of rows n [rows] begin; two scales and two biases to a word."""
    words, scales, biases, row_words, row_scales = matrix
    pairs: tl.constexpr = tl.pointer_type(tl.uint32)
    return words + n * row_words, scales.to(pairs) + n * row_scales // 2, biases.to(pairs) + n * row_scales // 2


@triton.jit
def two_groups(starts, exists, pair, COLUMNS: tl.constexpr):
    """Groups 2 pair and 2 pair + 1 of rows: the words of each, and both groups' scales and biases, a word a row."""
    ROWS: tl.constexpr = exists.shape[0]
    words, scales, biases = starts
    w = word(words[:, None], pair * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)[None, :], exists[:, None], True)
    a, b = tl.split(w.reshape(ROWS, 2, COLUMNS // 8).permute(0, 2, 1))
    return a, b, tl.load(scales + pair, exists, other=0), tl.load(biases + pair, exists, other=0)


@triton.jit
def scale_pairs(matrix, n, pair, inside, FORMAT: tl.constexpr):
    """The scales of groups 2 pair and 2 pair + 1 in one word, to be carried from step to step as it was loaded."""
    return tl.load(matrix[1].to(tl.pointer_type(tl.uint32)) + (n * matrix[4] // 2 + pair), inside, other=0)


@triton.jit
def two_scales(pair, FORMAT: tl.constexpr):
    if FORMAT.scale_type == tl.bfloat16:
        first, second = (pair << 16).to(tl.float32, bitcast=True), (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        first = pair.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def shuffled(x, COLUMNS: tl.constexpr):
    """Activations [rows, COLUMNS] in the order of a shuffled code_tile's columns."""
    ROWS: tl.constexpr = x.shape[0]
    words = x.reshape(ROWS, 4, COLUMNS // 32, 2, 2, 2)  # thread, its words, half, i // 2, i % 2
    return words.permute(0, 2, 4, 5, 1, 3).reshape(ROWS, COLUMNS)


@triton.jit
def narrowed(w, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 rounded to TYPE, to even. The interpreter would cut a bfloat16 off."""
    if INTERPRETED and TYPE == tl.bfloat16:  # noqa: SIM300
        bits = w.to(tl.uint32, bitcast=True)
        even = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        w = tl.where(w == w, even, w)
    return w.to(TYPE)


@triton.jit
def dequantize_kernel(
    words, scales, biases, factors, out, units: tl.int64, units_per_matrix: tl.int64,
    FORMAT: tl.constexpr, TYPE: tl.constexpr, FACTOR: tl.constexpr, ONCE: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Units of a flat stream. Rounded to TYPE after every step, as mlx does, or at the end only (ONCE)."""
    UNIT: tl.constexpr = FORMAT.unit
    unit = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < units
    q = codes(words, unit * FORMAT.words, inside, FORMAT)
    group = unit // (FORMAT.group // UNIT)
    s = group_values(scales, group, inside, FORMAT)
    if FACTOR:
        s *= tl.div_rn(tl.load(factors + unit // units_per_matrix, inside, other=0.0), FORMAT.factor)
    elif not ONCE:
        s = narrowed(s, TYPE, INTERPRETED).to(tl.float32)
    w = values(q, FORMAT).reshape(BLOCK, UNIT) * s[:, None]
    if FORMAT.mode == "affine":
        b = group_values(biases, group, inside, FORMAT)
        if not ONCE:
            w, b = narrowed(w, TYPE, INTERPRETED).to(tl.float32), narrowed(b, TYPE, INTERPRETED).to(tl.float32)
        w += b[:, None]
    at = tl.program_id(0).to(tl.int64) * (BLOCK * UNIT) + tl.arange(0, BLOCK * UNIT)
    tl.store(out + at, narrowed(w, TYPE, INTERPRETED).reshape(BLOCK * UNIT), at < units * UNIT)


# 2026-11-15, H200, 12288 x 4096 to bfloat16, units of a thread and warps of a program. One word a unit: (4, 4) moves
# 3650 GB/s in 4 bits and 3710 in 8 (one unit, 8 warps: 3480 and 2960). Three or five words: (1, 8), 3620 to 3750.
SINGLE_WORDS, LONGER_UNITS = (4, 4), (1, 8)


def dequantized(p, dtype, out, once):
    """Fill the contiguous `out` with p's weights, rounded once or as the op promises."""
    given = operand(p)
    form, factor = given.format, p.global_scale
    words, scales, biases = (t.contiguous() for t in given.operand[:3])
    each, warps = SINGLE_WORDS if form.words == 1 else LONGER_UNITS
    units, block = out.numel() // form.unit, 32 * warps * each
    units_each = units if factor is None or factor.numel() == 1 else units // factor.numel()
    dequantize_kernel[(triton.cdiv(units, block),)](
        words, scales, biases, given.operand[3], out, units, units_each,
        FORMAT=form, TYPE=TYPES[dtype], FACTOR=factor is not None, ONCE=once,
        INTERPRETED=INTERPRETED, BLOCK=block, num_warps=warps, enable_fp_fusion=once,
    )  # fmt: skip
    return out


def dequantize(p, dtype=torch.float32, *, out=None):
    whole = out if out is not None and out.is_contiguous() else torch.empty(p.shape, dtype=dtype, device=p.device)
    if whole.numel():
        dequantized(p, dtype, whole, once=False)
    return whole if out is None or whole is out else out.copy_(whole)


class Format(NamedTuple):
    """What a kernel is compiled for: how a matrix is coded and where it lies."""

    mode: str  # dense, or a Packed's
    bits: int = 16
    group: int = 1
    unit: int = 1  # codes of a unit, and its words
    words: int = 1
    scale_type: tl.dtype = tl.uint8  # of dense weights, their own
    apart: bool = False  # matrices that lie apart: addresses stand for pointers
    aligned: bool = True  # words and scales can be loaded whole
    wide: bool = True  # every row of scales and biases begins at a word; matrices that lie apart begin at 16 bytes
    factor: float = NV_RANGE


class Operand(NamedTuple):
    """A stack of matrices [E, N, K] for a kernel."""

    operand: tuple  # words, scales, biases, global scales; the steps of words, of scales and of global scales
    format: Format
    scaled: bool  # by a global scale


def operand(w):
    """Any projection: a Packed or a dense stack with any leading axes, or matrices that lie apart. Nothing is copied
    unless the inside of its rows is strided."""
    N, K = w.shape[-2:]
    if not hasattr(w, "bits"):
        dense = w.reshape(-1, N, K)
        dense = dense if dense.stride(-1) == 1 else dense.contiguous()
        form = Format("dense", scale_type=TYPES.get(w.dtype, tl.float64))
        return Operand((dense, dense, dense, dense, dense.stride(0), dense.stride(1), 0, 0, 0), form, False)
    unit, count = unit_of(w.bits)
    form = Format(w.mode, w.bits, w.group, unit, count, TYPES.get(w.scale_dtype, tl.uint8))
    if hasattr(w, "addresses"):
        places, _ = on_device(w)
        aligned, wide = alignment(w)
        wide = wide and K // w.group % 2 == 0
        form = form._replace(apart=True, aligned=aligned, wide=wide)
        return Operand((*places, places, 0, K * w.bits // 32, 0, K // w.group, 0), form, False)
    words = w.words.view(torch.int32).reshape(-1, N, K * w.bits // 32)
    scales = w.scales.reshape(-1, N, K // w.group)
    biases = scales if w.biases is None else w.biases.reshape(scales.shape)
    if words.stride(2) != 1:
        words = words.contiguous()
    if scales.stride(2) != 1 or biases.stride() != scales.stride():
        scales, biases = scales.contiguous(), biases.contiguous()
    factors = scales if w.global_scale is None else w.global_scale.reshape(-1).contiguous()
    steps = (*words.stride()[:2], *scales.stride()[:2], int(w.global_scale is not None and factors.numel() > 1))
    even = not any(step % 2 for step in scales.stride()[:2])
    form = form._replace(wide=even and (scales.data_ptr() | biases.data_ptr()) % 4 == 0)
    return Operand((words, scales, biases, factors, *steps), form, w.global_scale is not None)


def alignment(w):
    """Of matrices that lie apart: can words and scales be loaded whole, and do all begin at 16 bytes?"""
    if not hasattr(w.addresses, "alignment"):
        words = scales = 0
        for t in w.words:
            words |= t.data_ptr()
        for t in (*w.scales, *w.biases):
            scales |= t.data_ptr()
        whole = words % 4 == 0 and scales % w.scale_dtype.itemsize == 0
        w.addresses.alignment = whole, (words | scales) % 16 == 0
    return w.addresses.alignment
