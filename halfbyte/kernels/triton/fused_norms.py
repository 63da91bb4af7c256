"""Norms that follow each other, in one launch: of what experts leave, then of that joined to the stream.

One program owns a row, so that nothing between two norms leaves its registers.
"""

import torch
import triton
import triton.language as tl

from .device import overlap
from .elementary import begin_early
from .rowwise import inverse_rms, load_columns, load_rows, normed, scale_arguments, scaled, store_rows, weighted
from .stacks import prefetch_columns

PER_THREAD = 16  # channels of a row


@triton.jit
def load_sum(y, shares, A: tl.constexpr, at, columns, mask):
    """A row, or the sum of A rows by their shares."""
    if shares is None:
        return load_rows(y, at, columns, mask)
    else:
        shares += at[0] * A
        total = load_rows(y, at, columns, mask) * tl.load(shares).to(tl.float32)[:, None]
        for a in tl.static_range(1, A):
            row = load_rows(y, (at[0], at[1] + a, at[2]), columns, mask)
            total += row * tl.load(shares + a).to(tl.float32)[:, None]
        return total


@triton.jit
def row_normed(x, weight, eps, D: tl.constexpr, PRECISE: tl.constexpr):
    return normed(x * weight, inverse_rms(tl.sum(x * x, 1), D, eps, PRECISE), None)


@triton.jit
def norm_chain_kernel(
    x, shares, x_weight, add, add_weight, weight, residual, number, scale, SCALE_STEP: tl.constexpr, weights, eps,
    r_out, narrow, ys,
    A: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PRECISE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row. Weights are loaded, or come to the L2, while the launch before this one still runs: a step reads too
    much for them to be there still from the last."""
    columns, zero = tl.arange(0, BLOCK), tl.zeros([1], tl.int64)
    mask = (columns < D)[None, :]
    if x_weight is not None:
        x_by = load_columns(x_weight, columns, D)
    if add_weight is not None:
        add_by = load_columns(add_weight, columns, D)
    by = load_columns(weight, columns, D)
    if OVERLAP:
        for i in tl.static_range(len(weights)):
            prefetch_columns(weights[i], D, BLOCK)
        if scale is not None:
            prefetch_columns(scale, D if SCALE_STEP else 1, BLOCK)
    begin_early(OVERLAP)
    at = (tl.program_id(0).to(tl.int64) + zero, zero, zero)
    joined = load_rows(residual, at, columns, mask)
    s = load_sum(x, shares, A, at, columns, mask)
    if x_weight is not None:
        s = row_normed(s, x_by, eps, D, PRECISE)
    if add is not None:
        more = load_rows(add, at, columns, mask)
        if add_weight is not None:
            more = row_normed(more, add_by, eps, D, PRECISE)
        s += more
    r = normed(weighted(s, by, joined, PRECISE), inverse_rms(tl.sum(s * s, 1), D, eps, PRECISE), joined)
    r = scaled(r, number, scale, SCALE_STEP, columns, D)
    store_rows(r_out, at, columns, mask, r)
    if narrow is not None:
        store_rows(narrow, at, columns, mask, r)
    if len(weights) > 0:
        factor = inverse_rms(tl.sum(r * r, 1), D, eps, PRECISE)
        for i in tl.static_range(len(weights)):
            store_rows(ys[i], at, columns, mask, normed(r * load_columns(weights[i], columns, D), factor, None))


def in_slots(t):
    """What the kernel gets of [B, D] or [B, A, D]: the pointer, and what lies between two rows of each axis."""
    if t is None:
        return None
    return (t, t.stride(0), t.stride(1) if t.ndim == 3 else 0, 0)


def norm_chain(x, shares, x_weight, add, add_weight, weight, residual, scale, weights, eps, *, out):
    """s = x + add, where each may first be normed;  r = (residual + norm(s)) scale;  y_i = norm(r) weights_i.

    x [B, D], or [B, A, D] with shares [B, A], whose sum it then is   add, residual [B, D]   weights [D] each or None
    out (r, r once more in another dtype or None, y_0, y_1, ...)
    """
    r, narrow, *ys = out
    (B, D), A = r.shape, 0 if shares is None else x.shape[1]
    block = triton.next_power_of_2(D)
    norm_chain_kernel[(B,)](
        in_slots(x), shares, x_weight, in_slots(add), add_weight, weight, in_slots(residual), *scale_arguments(scale),
        tuple(weights), eps, in_slots(r), in_slots(narrow), tuple(map(in_slots, ys)), A, D, block,
        x.dtype == torch.float32, num_warps=max(1, min(16, block // (32 * PER_THREAD))), **overlap(x.device),
    )  # fmt: skip
    return out
