"""Products with many rows of x: qmm's prefill, for one matrix or a stack of them (heads).

A tensor-core kernel decodes tiles of weights in registers and multiplies them at once, which reads the weights once
from memory; it serves up to a few hundred rows. With more rows every tile of weights would be decoded many times: then
a slab of the matrix is dequantised and multiplied by the vendor's library, slab after slab, each small enough to be
still in the L2 when it is read.

The kernel is exact where it can be. Codes are small integers that x's own dtype holds, so the tensor cores multiply x
with bare codes; a group's scale multiplies the group's sum, in float32. What biases add is one more product, of the
biases with x summed over groups. The weights are the left operand, y' = w x': the instruction's left side is 64 tall
and comes from registers, and few rows of x make its right side narrow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .dequant import (
    TYPES,
    code_tile,
    dequantized,
    factor_of,
    group_values,
    matrix_of,
    operand,
    scale_pairs,
    shuffled,
    shuffled_weights,
    two_code_tiles,
    two_groups,
    two_scales,
    weight_tile,
)
from .device import INTERPRETED, facts, overlap, steady
from .elementary import begin_early


@triton.jit
def rounded(w, STYLE: tl.constexpr):
    """float32 numbers as an operand of a product in this style."""
    if STYLE == "bf16":
        w = w.to(tl.bfloat16)
    elif STYLE == "tf32":  # to nearest: the hardware would cut the low bits off
        bits = w.to(tl.uint32, bitcast=True)
        w = tl.where((bits & 0x7F800000) == 0x7F800000, w, (bits + 0x1000 & 0xFFFFE000).to(tl.float32, bitcast=True))
    return w


@triton.jit
def multiplied(w, x, sums, STYLE: tl.constexpr):
    """sums + w x'; x [rows, STEP] comes as it is stored.

    A chain of float32 sums over all of K would round more often than torch does: they are short, and summed in float64.
    (As float32, the compiler would make one chain of them again.)
    """
    if STYLE != "bf16":
        x = x.to(tl.float32)
    if STYLE == "ieee":
        sums += tl.dot(w, x.T, input_precision="ieee").to(tl.float64)
    else:
        sums = tl.dot(w, x.T, sums, input_precision="tf32" if STYLE == "tf32" else "ieee")
    return sums


@triton.jit
def biased(sums, matrix, n, inside, group_rows, groups, has, begin, end, FORMAT: tl.constexpr):
    """sums + biases x', with x already summed over the groups [begin, end): as two bfloat16 numbers, high and low."""
    STEP: tl.constexpr = 32
    for at in range(begin, end, STEP):
        g = at + tl.arange(0, STEP)[None, :]
        b = group_values(matrix[2], n * matrix[4] + g, inside & (g < end), FORMAT)
        high = tl.load(group_rows + g, has & (g < end), other=0.0)
        low = tl.load(group_rows + groups + g, has & (g < end), other=0.0)
        first = b.to(high.dtype)
        sums = tl.dot(first, low.T, sums, input_precision="ieee")
        sums = tl.dot(first, high.T, sums, input_precision="ieee")
        if FORMAT.scale_type != tl.bfloat16:
            sums = tl.dot((b - first.to(tl.float32)).to(high.dtype), high.T, sums, input_precision="ieee")
    return sums


@triton.jit
def sums_of(
    rows, group_rows, has, matrix, second, n, N, begin, end, K,
    FORMAT: tl.constexpr, GATED: tl.constexpr, STYLE: tl.constexpr, EVEN: tl.constexpr,
    SHUFFLED: tl.constexpr, NVIDIA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_M]: sums over columns [begin, end) of rows n of a matrix, or of two, times rows of x.

    Scales are loaded one step ahead: nothing else would hide how long that takes.
    """
    wide = n[:, None]
    inside, exists = wide < N, n < N
    KIND: tl.constexpr = tl.float64 if STYLE == "ieee" else tl.float32
    sums = tl.zeros((BLOCK_N, BLOCK_M), KIND)
    others = tl.zeros((BLOCK_N, BLOCK_M), KIND)
    if STYLE == "pairs":
        last = end // BLOCK_K - 1
        scale = scale_pairs(matrix, n, begin // BLOCK_K, exists, FORMAT)
        if GATED:
            other_scale = scale_pairs(second, n, begin // BLOCK_K, exists, FORMAT)
        for at in range(begin, end, BLOCK_K):
            ahead = tl.minimum(at // BLOCK_K + 1, last)
            k = at + tl.arange(0, BLOCK_K // 2)[None, :]
            left = tl.load(rows + k, has, other=0.0)
            right = tl.load(rows + BLOCK_K // 2 + k, has, other=0.0)
            a, b = two_code_tiles(matrix, wide, inside, at, FORMAT, left.dtype, BLOCK_K // 2, NVIDIA)
            u, v = two_scales(scale, FORMAT)
            scale = scale_pairs(matrix, n, ahead, exists, FORMAT)
            sums += tl.dot(a, left.T) * u[:, None]
            sums += tl.dot(b, right.T) * v[:, None]
            if GATED:
                a, b = two_code_tiles(second, wide, inside, at, FORMAT, left.dtype, BLOCK_K // 2, NVIDIA)
                u, v = two_scales(other_scale, FORMAT)
                other_scale = scale_pairs(second, n, ahead, exists, FORMAT)
                others += tl.dot(a, left.T) * u[:, None]
                others += tl.dot(b, right.T) * v[:, None]
    elif STYLE == "codes":
        last = end // BLOCK_K - 1
        scale = group_values(matrix[1], n * matrix[4] + begin // BLOCK_K, exists, FORMAT)
        if GATED:
            other_scale = group_values(second[1], n * second[4] + begin // BLOCK_K, exists, FORMAT)
        for at in range(begin, end, BLOCK_K):
            ahead = tl.minimum(at // BLOCK_K + 1, last)
            piece = tl.load(rows + at + tl.arange(0, BLOCK_K)[None, :], has, other=0.0)
            next_scale = group_values(matrix[1], n * matrix[4] + ahead, exists, FORMAT)
            a = code_tile(matrix, wide, inside, at, FORMAT, piece.dtype, BLOCK_K, SHUFFLED, NVIDIA)
            sums += tl.dot(a, piece.T) * scale[:, None]
            scale = next_scale
            if GATED:
                next_scale = group_values(second[1], n * second[4] + ahead, exists, FORMAT)
                a = code_tile(second, wide, inside, at, FORMAT, piece.dtype, BLOCK_K, SHUFFLED, NVIDIA)
                others += tl.dot(a, piece.T) * other_scale[:, None]
                other_scale = next_scale
    else:
        for at in range(begin, end, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)[None, :]
            piece = tl.load(rows + k, has if EVEN else has & (k < K), other=0.0)
            w = rounded(weight_tile(matrix, wide, inside, at, K, FORMAT, BLOCK_K, EVEN), STYLE)
            sums = multiplied(w, piece, sums, STYLE)
            if GATED:
                w = rounded(weight_tile(second, wide, inside, at, K, FORMAT, BLOCK_K, EVEN), STYLE)
                others = multiplied(w, piece, others, STYLE)
    if (STYLE == "pairs" or STYLE == "codes") and FORMAT.mode == "affine":
        first, stop, groups = begin // FORMAT.group, end // FORMAT.group, K // FORMAT.group
        sums = biased(sums, matrix, wide, inside, group_rows, groups, has, first, stop, FORMAT)
        if GATED:
            others = biased(others, second, wide, inside, group_rows, groups, has, first, stop, FORMAT)
    return sums.to(tl.float32), others.to(tl.float32)


@triton.jit
def weight_sums(
    x, has, more_x, has_more, weights, exists, K, FORMAT: tl.constexpr, MORE: tl.constexpr, NVIDIA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_M] and [BLOCK_N, MORE]: rows of 4-bit weights times rows of x, and MORE of these or none.

    Weights are rounded to x's type. A step is two groups: while the tensor cores multiply with one, the next is being
    decoded. Only where the loop is known to be entered will the compiler leave products under way.
    """
    tl.assume(K >= BLOCK_K)
    TYPE: tl.constexpr = x.dtype.element_ty
    HALF: tl.constexpr = BLOCK_K // 2
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    more = tl.zeros((BLOCK_N, max(MORE, 16)), tl.float32)
    for at in range(0, K, BLOCK_K):
        k = at + tl.arange(0, HALF)[None, :]
        left, right = tl.load(x + k, has, other=0.0), tl.load(x + HALF + k, has, other=0.0)
        if MORE:
            more_left = tl.load(more_x + k, has_more, other=0.0)
            more_right = tl.load(more_x + HALF + k, has_more, other=0.0)
        a, b, scales, biases = two_groups(weights, exists, at // BLOCK_K, HALF)
        w = shuffled_weights(a, scales, biases, FORMAT, False, TYPE, NVIDIA)
        if MORE:
            more = tl.dot(w, more_left.T, more)
        sums = tl.dot(w, left.T, sums)
        w = shuffled_weights(b, scales, biases, FORMAT, True, TYPE, NVIDIA)
        if MORE:
            more = tl.dot(w, more_right.T, more)
        sums = tl.dot(w, right.T, sums)
    return sums, more


@triton.jit
def product_kernel(
    x, group_sums, operand, y, M, H, N, K, x_row, x_head, y_split, y_row, y_head,
    FORMAT: tl.constexpr, FACTOR: tl.constexpr, TRANSPOSE: tl.constexpr, STYLE: tl.constexpr, EVEN: tl.constexpr,
    SHUFFLED: tl.constexpr, NVIDIA: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A tile of y [M, H, width], or of one of the SPLITS parts of its sum."""
    begin_early(OVERLAP)
    width, inner = (N, K) if TRANSPOSE else (K, N)
    OUT: tl.constexpr = BLOCK_N if TRANSPOSE else BLOCK_K
    STEP: tl.constexpr = BLOCK_K if TRANSPOSE else BLOCK_N
    part, head = tl.program_id(2) % SPLITS, (tl.program_id(2) // SPLITS).to(tl.int64)
    matrix = matrix_of(operand, head, FORMAT)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    has = (m < M)[:, None]
    rows = x + head * x_head + m[:, None] * x_row
    first = tl.program_id(1) * OUT
    length = tl.cdiv(tl.cdiv(inner, STEP), SPLITS) * STEP
    begin = part * length
    end = min(inner, begin + length)
    if TRANSPOSE:
        group_rows = group_sums
        if STYLE == "codes":
            group_rows = group_sums + (m[:, None] * H + head) * (2 * (K // FORMAT.group))
        n = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        sums, _ = sums_of(
            rows, group_rows, has, matrix, matrix, n, N, begin, end, K,
            FORMAT, False, STYLE, EVEN, SHUFFLED, NVIDIA, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        sums = tl.zeros((BLOCK_K, BLOCK_M), tl.float64 if STYLE == "ieee" else tl.float32)
        for at in range(begin, end, STEP):
            n = at + tl.arange(0, BLOCK_N)
            wide = n.to(tl.int64)[:, None]
            w = rounded(weight_tile(matrix, wide, wide < N, first, K, FORMAT, BLOCK_K, EVEN), STYLE)
            piece = tl.load(rows + n[None, :], has & (n < N)[None, :], other=0.0)
            sums = multiplied(w.T, piece, sums, STYLE)
        sums = sums.to(tl.float32)
    if FACTOR:
        sums *= factor_of(operand, head, FORMAT)
    column = first + tl.arange(0, OUT)[:, None]
    target = y + part.to(tl.int64) * y_split + head * y_head + m[None, :] * y_row + column
    tl.store(target, sums.to(y.dtype.element_ty), (column < width) & (m < M)[None, :])


@triton.jit
def prepare(program, work, SUMS: tl.constexpr, SHUFFLED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Groups of columns of rows of x: their sums as two numbers, [rows, 2, groups], and x itself, in another order."""
    x, sums, moved, count, groups, choices, x_row, x_choice = work
    at = program * BLOCK + tl.arange(0, BLOCK)
    row, group, inside = at // groups, at % groups, (at < count)[:, None]
    place = (row // choices).to(tl.int64) * x_row + (row % choices).to(tl.int64) * x_choice + group * GROUP
    column = tl.arange(0, GROUP)[None, :]
    piece = tl.load(x + place[:, None] + column, inside, other=0.0)
    if SUMS:
        total = tl.sum(piece.to(tl.float32), 1)
        high = total.to(sums.dtype.element_ty)
        target = sums + at.to(tl.int64) + row.to(tl.int64) * groups
        tl.store(target, high, at < count)
        tl.store(target + groups, (total - high.to(tl.float32)).to(sums.dtype.element_ty), at < count)
    if SHUFFLED:
        tl.store(moved + at.to(tl.int64)[:, None] * GROUP + column, shuffled(piece, GROUP), inside)


@triton.jit
def prepare_kernel(
    work, SUMS: tl.constexpr, SHUFFLED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    begin_early(OVERLAP)
    prepare(tl.program_id(0), work, SUMS, SHUFFLED, GROUP, BLOCK)


@triton.jit
def join_splits_kernel(
    parts, y, size, H, width, y_row, y_head, SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """y [M, H, width] from the parts of its sums, float32 [SPLITS, M, H, width], always added in the same order."""
    begin_early(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts + at, inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * size + at, inside, other=0.0)
    row, column = at // width, at % width
    tl.store(y + row // H * y_row + row % H * y_head + column, total.to(y.dtype.element_ty), inside)


def style_of(x, given, K, transpose=True, gated=False):
    """How products of these activations with these weights are formed.

    codes   exact codes in x's dtype times x; the scale of a group multiplies its sum
    pairs   the same, of 4-bit codes, two groups a step: faster where two matrices share x
    bf16    weights rounded once to bfloat16, which small floats and dense bfloat16 survive unchanged
    tf32    weights rounded to 11 bits, with the range of float32; 16-bit activations lose nothing
    ieee    float32
    """
    form = given.format
    if x.dtype == torch.float32 or (facts(x.device).capability == 0 and x.dtype == torch.float16 and not transpose):
        return "ieee"
    if form.mode == "dense":
        return "bf16" if TYPES[x.dtype] == form.scale_type == tl.bfloat16 else "tf32"
    if transpose and (form.mode == "affine" or x.dtype == torch.float16):
        by_pairs = gated and form.bits == 4 and form.mode == "affine" and form.scale_type != tl.float32
        return "pairs" if by_pairs and form.wide and K % (2 * form.group) == 0 else "codes"
    return "bf16" if x.dtype == torch.bfloat16 else "tf32"


class Prepared(NamedTuple):
    """Activations as sums_of takes them, and what `prepare` must do before."""

    x: torch.Tensor
    steps: tuple[int, int]  # row r lies at (r // choices, r % choices) . steps
    sums: torch.Tensor  # of each group of columns, where weights have biases
    shuffled: bool
    own: bool  # each choice has a row
    work: tuple
    count: int  # groups of columns, of all rows
    options: dict[str, object]

    def launch(self):
        if self.count:
            block = 4096 // self.options["GROUP"]
            prepare_kernel[(triton.cdiv(self.count, block),)](
                self.work, **self.options, BLOCK=block, num_warps=4, **overlap(self.x.device)
            )
        return self


def preparation(x, steps, rows, choices, form, style, own=True):
    """For weights of this format; row r of x lies at (r // choices, r % choices) . steps."""
    K, sums = x.shape[-1], form.mode == "affine" and style != "weights"
    move = form.bits == 4 and form.aligned and form.group >= 32
    if style not in ("codes", "pairs", "weights") or not (sums or move):
        none = (x, x, x, 0, 1, 1, 0, 0)
        return Prepared(x, steps, x, False, own, none, 0, {"SUMS": False, "SHUFFLED": False, "GROUP": 32})
    groups = K // form.group
    kind = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter has no products of bfloat16
    summed = torch.empty((rows, 2, groups), dtype=kind, device=x.device) if sums else x
    moved = torch.empty((rows, K), dtype=x.dtype, device=x.device) if move else x
    work = (x, summed, moved, rows * groups, groups, choices, *steps)
    options = {"SUMS": sums, "SHUFFLED": move, "GROUP": form.group}
    steps = (choices * K, K * own) if move else steps
    return Prepared(moved, steps, summed, move, own, work, rows * groups, options)


def in_assembly(x, form):
    """Whether shuffled codes are decoded by NVIDIA's instructions."""
    return form.mode == "affine" and x.dtype == torch.bfloat16 and not INTERPRETED and facts(x.device).capability >= 80


MANY = 1 << 16  # outputs, as a vocabulary's


def few(M, N, style, group):
    """BLOCK_M, BLOCK_N, BLOCK_K, warps, stages for this many rows by N outputs.

    2026-11-15, H200, 12288 x 4096 in 4 bits: 16 rows take 20 us (two splits; one 27), 64 rows 35, 128 rows 44 to 49.
    2026-11-16, 248320 x 2048, 32 rows: 132 us; 150 with 64 outputs a program.
    """
    tall = min(128, max(16, triton.next_power_of_2(M)))
    if style == "codes":
        return (tall, 128 if N >= MANY and tall < 128 else 64, group, 4, 4)
    if style == "bf16":
        return (min(tall, 64), 64, 64, 4, 3)
    return (min(tall, 32), 64, 32, 4, 2)


def parts_of(programs, steps, block_m, processors):
    """Into how many parts the sums are split: few rows need more programs to wait for memory, and cost less to join.

    2026-11-16, H200, routers of 257 x 2048 for 32 streams of Qwen3.5-35B-A3B, 5 programs: a step takes 7985 us in 4
    parts, 7940 in 8, 7920 in 16.
    """
    wanted, splits, least = processors * (2 if block_m <= 32 else 1), 1, 4 if programs <= 8 else 16
    while programs * splits < wanted and steps >= least * splits:
        splits *= 2
    return splits


def fused(x, w, transpose, y, sizes=None, splits=None):
    """y [M, H, width] by the tensor-core kernel."""
    M, H, inner = x.shape
    N, K = w.shape[-2:]
    given = operand(w)
    style = style_of(x, given, K, transpose)
    rows = 1 if steady(M) else M  # for which sizes are chosen
    block_m, block_n, block_k, warps, stages = sizes or few(rows, y.shape[-1], style, given.format.group)
    out, step = (block_n, block_k) if transpose else (block_k, block_n)
    grid = (triton.cdiv(M, block_m), triton.cdiv(y.shape[-1], out), H)
    if splits is None:
        programs = triton.cdiv(rows, block_m) * grid[1] * H
        splits = parts_of(programs, triton.cdiv(inner, step), block_m, facts(x.device).processors)
    parts = torch.empty((splits, *y.shape), dtype=torch.float32, device=x.device) if splits > 1 else y[None]
    ready = preparation(x, x.stride()[:2], M * H, H, given.format, style).launch()
    product_kernel[(grid[0], grid[1], H * splits)](
        ready.x, ready.sums, given.operand, parts, M, H, N, K, *ready.steps, *parts.stride()[:3],
        FORMAT=given.format, FACTOR=given.scaled, TRANSPOSE=transpose, STYLE=style, EVEN=K % block_k == 0,
        SHUFFLED=ready.shuffled, NVIDIA=in_assembly(x, given.format), SPLITS=splits,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages, **overlap(y.device),
    )  # fmt: skip
    if splits > 1:
        join_splits_kernel[(triton.cdiv(y.numel(), 1024),)](
            parts, y, y.numel(), H, y.shape[-1], y.stride(0), y.stride(1), SPLITS=splits, BLOCK=1024,
            **overlap(y.device),
        )  # fmt: skip
    return y


# 2026-11-15, H200, 12288 x 4096 in 4 bits: up to 128 rows the kernel above is faster (128: 44 to 49 us, library 67;
# 256: 96 and 72). Slabs of 20 MB stay in an L2 of 50 MB: 2048 rows take 306 us instead of 311, but 512 rows take 112
# instead of 104, as smaller products fill the chip less well. Codes of other widths take more instructions.
# 2026-11-16: 128 rows by 9216 x 2048 26 us, library 23; by 5120 x 2048 22 and 14; by 512 x 2048 11 and 7.5; 64 as fast.
ROWS_FUSED, ROWS_OTHERS, LARGE = 128, 64, 20 << 20  # the most rows: of large matrices, of others
SLAB, ROWS_IN_SLABS = 20 << 20, 1024


def rows_of(w, first, count):
    """Rows of the one matrix of a Packed, as a dense tensor or what `dequantized` takes."""
    return type(w)(
        w.words.reshape(-1, w.words.shape[-1])[first : first + count],
        w.scales.reshape(-1, w.scales.shape[-1])[first : first + count],
        None if w.biases is None else w.biases.reshape(-1, w.scales.shape[-1])[first : first + count],
        w.bits, w.group, w.mode, w.global_scale,
    )  # fmt: skip


def by_library(x, w, transpose, y, slab=None):
    """y by dequantising and the vendor's product: slabs of output columns, or of the sum's terms kept whole."""
    H = x.shape[1]
    N, K = w.shape[-2:]
    packed = hasattr(w, "bits")
    if H > 1 or not transpose or not packed:
        dense = w.reshape(H, N, K).to(x.dtype) if not packed else weights(w, x.dtype).reshape(H, N, K)
        right = dense.mT if transpose else dense
        if H == 1:
            torch.mm(x[:, 0], right[0], out=y[:, 0])
        else:
            torch.bmm(x.transpose(0, 1), right, out=y.transpose(0, 1))
        return y
    count = N
    if slab or x.shape[0] >= ROWS_IN_SLABS:
        count = max(256, (slab or SLAB) // (K * x.element_size()) // 256 * 256)
    for first in range(0, N, count):
        part = rows_of(w, first, min(count, N - first))
        torch.mm(x[:, 0], weights(part, x.dtype).T, out=y[:, 0, first : first + count])
    return y


def weights(w, dtype):
    return dequantized(w, dtype, torch.empty(w.shape, dtype=dtype, device=w.device), once=True)


def product(x, w, *, transpose=True, out=None):
    """x [M, H, inner] times each of H matrices, as qmm: y [M, H, width]."""
    M, H, _ = x.shape
    width = w.shape[-2 if transpose else -1]
    y = torch.empty((M, H, width), dtype=x.dtype, device=x.device) if out is None else out
    if y.numel() == 0:
        return y
    if y.stride(-1) != 1:
        return y.copy_(product(x, w, transpose=transpose))
    if x.stride(-1) != 1:
        x = x.contiguous()
    exact = x.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    same = getattr(w, "dtype", None) == x.dtype
    large = getattr(w, "bits", 0) == 4 and w.shape[-2] * w.shape[-1] >= LARGE
    limit = ROWS_FUSED if large else ROWS_OTHERS
    if exact and not steady(M) and (same or (limit < M and x.dtype != torch.float16)):
        return by_library(x, w, transpose, y)
    return fused(x, w, transpose, y)
