"""What stands around a projection in a step: the norm of what it reads, and the stream that its result is added to.

w (h / sqrt(mean h^2 + eps) . weight) is f (w (h . weight)) with one number f a row, so a norm can be shared out. Who
makes the stream h stores h . weight beside it, and the squares of each block of outputs added up. Who reads these
multiplies them as they are, and its results by f. Neither norm nor sum costs a launch then.

Tried before, 2026-11-15, H200: readers that make h . weight and the squares themselves. Nine experts' gate and up,
576 programs, took 1.1 us longer for it, nearly as long as the launch that it saved.
"""

# ruff: noqa: RUF005 - Triton knows no starred tuples

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .elementary import rounded


class Norm(NamedTuple):
    """What is left to do of the norm of a projection's input, which is weighted already."""

    squares: torch.Tensor  # float32 [rows, blocks of outputs of who made it]
    eps: float


class Stream(NamedTuple):
    """What a projection's result is added to, and what else to keep of the sum."""

    h: torch.Tensor  # [rows, N]
    weight: torch.Tensor | None = None  # [N], of the norm that follows
    weighted: torch.Tensor | None = None  # [rows, N]
    squares: torch.Tensor | None = None


def norm_arguments(norm):
    """What a kernel gets: (squares, their step between rows, how many, eps), or None; and how many it loads."""
    if norm is None:
        return None, 1
    count = norm.squares.shape[1]
    return (norm.squares, norm.squares.stride(0), count, norm.eps), triton.next_power_of_2(count)


def stream_arguments(stream):
    """(h, step between rows, weight, weighted, its step, squares, their step), the first two, or None."""
    if stream is None:
        return None
    if stream.weight is None:  # Triton 3.6 cannot ask whether a tuple with None inside is None
        return (stream.h, stream.h.stride(0))
    h, weight, weighted, squares = stream
    return (h, h.stride(0), weight, weighted, weighted.stride(0), squares, squares.stride(0))


@triton.jit
def squares_of(norm, first_row, ROWS, M: tl.constexpr, SQUARES: tl.constexpr):
    """Those of M rows, () without a norm. To be asked for with the rows themselves."""
    tiles = ()
    if norm is not None:
        at = tl.arange(0, SQUARES)
        for m in tl.static_range(M):
            row = first_row + tl.minimum(m, ROWS - 1)
            tiles = tiles + (tl.load(norm[0] + row * norm[1] + at, mask=at < norm[2], other=0.0),)
    return tiles


@triton.jit
def row_factors(squares, norm, K, PRECISE: tl.constexpr, M: tl.constexpr):
    """What the results of M rows are multiplied by; 1 without a norm."""
    factors = ()
    for m in tl.static_range(M):
        if norm is None:
            factors = factors + (1.0,)
        elif PRECISE:
            mean = tl.sum(squares[m].to(tl.float64)) / K
            factors = factors + ((1.0 / tl.sqrt(mean + norm[3])).to(tl.float32),)
        else:
            factors = factors + (tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares[m]) / K + norm[3])),)
    return factors


@triton.jit
def stream_rows(stream, first_row, ROWS, at, M: tl.constexpr):
    """The stream at columns `at` of M rows, the last one again where there are fewer, then the weights there; () where
    there is no stream. To be asked for early, so that it is there when the results are."""
    rows = ()
    if stream is not None:
        for m in tl.static_range(M):
            row = first_row + tl.minimum(m, ROWS - 1)
            rows = rows + (tl.load(stream[0] + row * stream[1] + at),)
        if len(stream) > 2:
            rows = rows + (tl.load(stream[2] + at),)
    return rows


@triton.jit
def store_row(y, result, stream, old, row, block, at, inside, m: tl.constexpr, M: tl.constexpr, TYPE: tl.constexpr):
    """A result of row m at y + at; with a stream, added to it, rounded before as if it had been stored in between, and
    what is to be kept of that. Where it is not `inside`, `at` repeats another."""
    if stream is not None:
        result = old[m].to(tl.float32) + rounded(result, TYPE).to(tl.float32)
        if len(stream) > 2:
            weighted = rounded(result * old[M].to(tl.float32), stream[3].dtype.element_ty)
            tl.store(stream[3] + row * stream[4] + at, weighted)
            tl.store(stream[5] + row * stream[6] + block, tl.sum(tl.where(inside, result * result, 0.0), 0))
    tl.store(y + at, rounded(result, y.dtype.element_ty))
