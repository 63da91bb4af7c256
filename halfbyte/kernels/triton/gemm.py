"""Products with many rows of x: qmm's prefill, for one matrix or a stack of them (heads).

A tensor-core kernel decodes tiles of weights in registers and multiplies them at once, which reads the weights once
from memory; it serves up to a few hundred rows. With more rows every tile of weights would be decoded many times:
then a slab of the matrix is dequantised and multiplied by the vendor's library, slab after slab, each small enough to be
still in the L2 when it is read.

The weights are the left operand: y' = w x', so that few rows of x make narrow tiles of an instruction whose left side is
64 tall. bfloat16 activations meet weights rounded once to bfloat16. float16 ones, whose weights may lie outside
float16's range, meet weights rounded to tf32, which has as many bits and the range of float32. float32 stays exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dequant import dequantized, factor_of, matrix_of, operand, weight_tile
from .device import facts


@triton.jit
def rounded(w, PRECISION: tl.constexpr):
    """float32 numbers as one operand of a product in this precision."""
    if PRECISION == "bf16":
        w = w.to(tl.bfloat16)
    elif PRECISION == "tf32":  # to nearest: the hardware would cut the low bits off
        bits = w.to(tl.uint32, bitcast=True)
        w = tl.where((bits & 0x7F800000) == 0x7F800000, w, (bits + 0x1000 & 0xFFFFE000).to(tl.float32, bitcast=True))
    return w


@triton.jit
def multiplied(w, x, sums, PRECISION: tl.constexpr):
    """sums + w x', with float32 sums; x [rows, STEP] comes as it is stored."""
    if PRECISION != "bf16":
        x = x.to(tl.float32)
    return tl.dot(w, x.T, sums, input_precision="tf32" if PRECISION == "tf32" else "ieee")


@triton.jit
def product_kernel(
    x, operand, y, M, N, K, x_row, x_head, y_split, y_row, y_head,
    FORMAT: tl.constexpr, FACTOR: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of y [M, H, width], or of one of the SPLITS parts of its sum."""
    width, inner = (N, K) if TRANSPOSE else (K, N)
    OUT: tl.constexpr = BLOCK_N if TRANSPOSE else BLOCK_K
    STEP: tl.constexpr = BLOCK_K if TRANSPOSE else BLOCK_N
    split, head = (tl.program_id(2) % SPLITS).to(tl.int64), (tl.program_id(2) // SPLITS).to(tl.int64)
    matrix = matrix_of(operand, head, FORMAT)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    has_m = (m < M)[:, None]
    rows = x + head * x_head + m[:, None] * x_row
    first = tl.program_id(1) * OUT
    length = tl.cdiv(tl.cdiv(inner, STEP), SPLITS) * STEP
    begin = tl.program_id(2) % SPLITS * length
    sums = tl.zeros((OUT, BLOCK_M), tl.float32)
    for at in range(begin, min(inner, begin + length), STEP):
        if TRANSPOSE:
            n = (first + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
            k = at + tl.arange(0, BLOCK_K)[None, :]
            w = rounded(weight_tile(matrix, n, n < N, at, K, FORMAT, BLOCK_K, EVEN), PRECISION)
            piece = tl.load(rows + k, has_m if EVEN else has_m & (k < K), other=0.0)
        else:
            n = at + tl.arange(0, BLOCK_N)
            wide = n.to(tl.int64)[:, None]
            w = rounded(weight_tile(matrix, wide, wide < N, first, K, FORMAT, BLOCK_K, EVEN), PRECISION).T
            piece = tl.load(rows + n[None, :], has_m & (n < N)[None, :], other=0.0)
        sums = multiplied(w, piece, sums, PRECISION)
    if FACTOR:
        sums *= factor_of(operand, head, FORMAT)
    column = first + tl.arange(0, OUT)[:, None]
    target = y + split * y_split + head * y_head + m[None, :] * y_row + column
    tl.store(target, sums.to(y.dtype.element_ty), (column < width) & (m < M)[None, :])


@triton.jit
def join_splits_kernel(parts, y, size, H, width, y_row, y_head, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """y [M, H, width] from the parts of its sums, float32 [SPLITS, M, H, width], always added in the same order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts + at, inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * size + at, inside, other=0.0)
    row, column = at // width, at % width
    tl.store(y + row // H * y_row + row % H * y_head + column, total.to(y.dtype.element_ty), inside)


PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "ieee"}


def precision_of(x):
    """How products with these activations are formed."""
    return "ieee" if facts(x.device).capability == 0 and x.dtype == torch.float16 else PRECISIONS[x.dtype]


def few(M, precision):
    """BLOCK_M, BLOCK_N, BLOCK_K, warps, stages for this many rows. 2026-11-15, H200: measured."""
    tall = min(128, max(16, triton.next_power_of_2(M)))
    if precision == "bf16":
        return (tall, 128 if tall >= 128 else 64, 128, 8 if tall >= 128 else 4, 3)
    return (min(tall, 32), 64, 32 if precision == "ieee" else 64, 4, 2)


def fused(x, w, transpose, y, sizes=None, splits=None):
    """y [M, H, width] by the tensor-core kernel."""
    M, H, inner = x.shape
    N, K = w.shape[-2:]
    precision, given = precision_of(x), operand(w)
    block_m, block_n, block_k, warps, stages = sizes or few(M, precision)
    out, step = (block_n, block_k) if transpose else (block_k, block_n)
    grid = (triton.cdiv(M, block_m), triton.cdiv(y.shape[-1], out), H)
    if splits is None:
        busy, steps = grid[0] * grid[1] * H, triton.cdiv(inner, step)
        splits = 1
        while busy * splits * 2 <= facts(x.device).processors * 2 and steps >= splits * 2 * 4:
            splits *= 2
    parts = torch.empty((splits, *y.shape), dtype=torch.float32, device=x.device) if splits > 1 else y[None]
    product_kernel[(grid[0], grid[1], H * splits)](
        x, given.operand, parts, M, N, K, x.stride(0), x.stride(1), *parts.stride()[:3],
        FORMAT=given.format, FACTOR=given.scaled, TRANSPOSE=transpose, EVEN=K % block_k == 0, PRECISION=precision,
        SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        join_splits_kernel[(triton.cdiv(y.numel(), 1024),)](
            parts, y, y.numel(), H, y.shape[-1], y.stride(0), y.stride(1), SPLITS=splits, BLOCK=1024
        )
    return y


SLAB = 24 << 20  # bytes of dequantised weights, well inside an L2 of 50 MB
ROWS_FUSED = 256  # up to here the fused kernel is faster; 2026-11-15, H200


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
    M, H, inner = x.shape
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
    if exact and (same or (M > ROWS_FUSED and x.dtype != torch.float16)):
        return by_library(x, w, transpose, y)
    return fused(x, w, transpose, y)
