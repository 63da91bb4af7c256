"""Small matrices times float32 rows, with every weight and sum in float64.

Results of small matrices may cancel to far below their terms, and float64 costs them nothing. Which matrices are small
depends on the matrix alone, never on the rows, so that a row's bits are its own.
"""

import torch
import triton
import triton.language as tl

from .dequant import codes, factor_of, group_values, matrix_of, operand, values

WEIGHTS = 1 << 15
ROWS, COLUMNS = 16, 128  # of a tile of weights; a multiple of every unit and group
MOST = 65535  # rows of all heads that a launch takes: CUDA counts no further along a grid's second axis


def small(x, w):
    """Whether these products are for this file."""
    return x.dtype == torch.float32 and w.shape[-2] * w.shape[-1] <= WEIGHTS


@triton.jit
def exact_tile(matrix, n, inside, first, K, FORMAT: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """float64 [R, C]: the weights of rows n [R, 1] from column `first` on; 0 outside."""
    words, scales, biases, row_words, row_scales = matrix
    if FORMAT.mode == "dense":
        column = first + tl.arange(0, C)[None, :]
        w = tl.load(words + n * row_words + column, inside & (column < K), other=0.0).to(tl.float64)
    else:
        unit = first // FORMAT.unit + tl.arange(0, C // FORMAT.unit)[None, :]
        group = first // FORMAT.group + tl.arange(0, C // FORMAT.group)[None, :]
        has_group = inside & (group * FORMAT.group < K)
        q = codes(words, n * row_words + unit * FORMAT.words, inside & (unit * FORMAT.unit < K), FORMAT)
        at = n * row_scales + group
        s = group_values(scales, at, has_group, FORMAT).to(tl.float64)
        w = values(q, FORMAT).to(tl.float64).reshape(R, C // FORMAT.group, FORMAT.group) * s[:, :, None]
        if FORMAT.mode == "affine":
            w += group_values(biases, at, has_group, FORMAT).to(tl.float64)[:, :, None]
        w = w.reshape(R, C)
    return w


@triton.jit
def exact_kernel(
    x, ids, w, y, N, K, HEADS, x_row, x_head, y_row, y_head,
    FORMAT: tl.constexpr, SCALED: tl.constexpr, TRANSPOSE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile of outputs of one row and head: y = w[head] x, or w[ids[row, head]] x; without TRANSPOSE x w."""
    row, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    index = head.to(tl.int64)
    if ids is not None:
        index = tl.load(ids + row * HEADS + head).to(tl.int64)
    matrix = matrix_of(w, index, FORMAT)
    x += row * x_row + head.to(tl.int64) * x_head
    y += row * y_row + head.to(tl.int64) * y_head
    if TRANSPOSE:
        n = tl.program_id(0) * R + tl.arange(0, R)
        sums = tl.zeros([R], tl.float64)
        for first in range(0, K, C):
            k = first + tl.arange(0, C)
            values = tl.load(x + k, k < K, other=0.0).to(tl.float64)
            sums += tl.sum(
                exact_tile(matrix, n[:, None], (n < N)[:, None], first, K, FORMAT, R, C) * values[None, :], 1
            )
        at, width = n, N
    else:
        k = tl.program_id(0) * C + tl.arange(0, C)
        sums = tl.zeros([C], tl.float64)
        for start in range(0, N, R):
            n = start + tl.arange(0, R)
            values = tl.load(x + n, n < N, other=0.0).to(tl.float64)
            tile = exact_tile(matrix, n[:, None], (n < N)[:, None], tl.program_id(0) * C, K, FORMAT, R, C)
            sums += tl.sum(tile * values[:, None], 0)
        at, width = k, K
    if SCALED:
        sums *= factor_of(w, index, FORMAT).to(tl.float64)
    tl.store(y + at, sums.to(y.dtype.element_ty), at < width)


def multiply_exactly(x, ids, w, y, transpose=True):
    """y [M, H, width] = w[h] x[m, h], or w[ids[m, h]] x[m, h]. The last axes of x and y lie whole."""
    rows, heads, width = y.shape
    N, K = w.shape[-2:]
    given, form, scaled = operand(w)
    tiles, together = triton.cdiv(width, ROWS if transpose else COLUMNS), max(MOST // heads, 1)
    for first in range(0, rows, together):
        part = slice(first, first + together)
        exact_kernel[(tiles, min(together, rows - first) * heads)](
            x[part], None if ids is None else ids[part], given, y[part], N, K, heads,
            x.stride(0), x.stride(1), y.stride(0), y.stride(1),
            FORMAT=form, SCALED=scaled, TRANSPOSE=transpose, R=ROWS, C=COLUMNS, num_warps=4,
        )  # fmt: skip
    return y
