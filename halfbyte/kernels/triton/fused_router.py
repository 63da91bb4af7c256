"""A router and the choice by its results in one launch, for few tokens.

A program makes one logit of a token: one warp, if a row is not too long, which asks for all its weights at once. It
posts its logit on a board. One program more looks there until all are posted, chooses, and clears the board for the
next time. A logit is its own sign that it is there, so nobody counts, and nothing waits for a fence.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .device import overlap
from .elementary import begin_early, rounded
from .exact import small
from .matvec import activations, products, tile_of
from .routing import choose, experts_of, route_options
from .stacks import matrix, stack
from .stream import norm_arguments, row_factors, squares_of

EMPTY = tl.constexpr(-1)  # the bits of a NaN that is no result


@triton.jit
def all_posted(board, at, inside):
    """The logits of a token, once all are there. Other programs write them, so each look goes past the caches."""
    bits = tl.load(board + at, inside, 0, volatile=True)
    while tl.max((bits == EMPTY).to(tl.int32)) > 0:
        bits = tl.load(board + at, inside, 0, volatile=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def post(board, logit):
    """A NaN is posted as another one than EMPTY."""
    bits = logit.to(tl.int32, bitcast=True)
    tl.store(board, tl.where(logit != logit, 0x7FC00000, bits))


@triton.jit
def logit_of(
    x, w, norm, token, output, K,
    FORMAT: tl.constexpr, PRECISE: tl.constexpr, C: tl.constexpr, SQUARES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Row `output` of w times x, or its norm. The row is C chunks of codes or, without a FORMAT, C floats."""
    inner = tl.arange(0, C)
    if FORMAT is None:
        tile = tl.load(w + output * K + inner, inner < K, 0.0)
    else:
        w = matrix(w, 0, FORMAT)
        tile = tile_of(w, output, tl.arange(0, 1), inner, K, FORMAT)
    tl.debug_barrier()  # all is asked for before any is waited for; to spare registers, ptxas would not
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    squares = squares_of(norm, token, 1, 1, SQUARES)
    if FORMAT is None:
        logit = tl.sum(tile.to(tl.float32) * tl.load(x + inner, inner < K, 0.0).to(tl.float32), 0)
    else:
        one = (0x3F800000 + tl.minimum(K, 0)).to(tl.uint32)  # see affine_value
        xs = activations(x, inner, K, FORMAT, PRECISE)
        logit = tl.sum(products(xs, one, tile, FORMAT, PRECISE, 1)[0]) * w[3]
    return logit * row_factors(squares, norm, K, PRECISE, 1)[0]


@triton.jit
def router_kernel(
    x, w, norm, logits, bias, expert_scale, scaling, ids, weights, board, N, K, x_row, logits_row, ids_row,
    FORMAT: tl.constexpr, PRECISE: tl.constexpr, C: tl.constexpr, CHOICES: tl.constexpr, GROUPS: tl.constexpr,
    KEEP: tl.constexpr, SIZE: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    SLOT_ORDER: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr, SLOTS: tl.constexpr,
    SQUARES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Logit program_id 0 of token program_id 1; for the one behind the last, the choice.

    That one is launched after those it waits for, so they run or have run.
    """
    output, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    board += token * (GROUPS * SIZE)
    if output < N:
        logit = logit_of(x + token * x_row, w, norm, token, output, K, FORMAT, PRECISE, C, SQUARES, OVERLAP)
        logit = rounded(logit, logits.dtype.element_ty)
        if output < GROUPS * SIZE:
            post(board + output, logit.to(tl.float32))
        tl.store(logits + token * logits_row + output, logit)
    else:
        begin_early(OVERLAP)
        expert, valid = experts_of(GROUPS, SIZE, PADDED_GROUPS, PADDED_SIZE)
        values = all_posted(board, expert, valid)
        tokens = token + tl.zeros([1, 1], tl.int64)
        where = board.to(tl.pointer_type(tl.float32)) + tl.zeros([1, 1], tl.int32)
        NARROW: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 16
        choose(
            values, where, tokens, tokens >= 0, bias, expert_scale, scaling, ids, ids_row, weights, NARROW, CHOICES,
            GROUPS, KEEP, SIZE, SIGMOID, RENORMALISE, SLOT_ORDER, 1, PADDED_GROUPS, PADDED_SIZE, SLOTS,
        )  # fmt: skip
        tl.debug_barrier()  # choosing may read the board again
        tl.store(board + expert, EMPTY, valid)


# Tokens: each reads the router's weights, from the L2. 2026-11-15, H200, mixtures of Qwen3.5-35B-A3B with a counter in
# the place of the board: 2 tokens took 20.7 us instead of 22.0, 4 47.1 instead of 49.8; one took 14.5 instead of 13.8.
# The board was seen in whole models alone, one run each: no gain for one token, and differences within their noise.
FEW = 8
LONGEST = 128  # chunks of a row that a warp holds
FLOATS = 2048  # of a row, the same


def takes(x, w):
    """Whether this router is for this file: a few tokens, and floats or codes in whole chunks.

    Small matrices are not: products with float32 are exact there (exact.py).
    """
    if not 1 <= x.shape[0] <= FEW or x.stride(-1) != 1 or small(x, w):
        return False
    return w.is_contiguous() if isinstance(w, torch.Tensor) else stack(w)[1].wide > 0


def choose_experts(
    x, w, k, *, board, out, kind="softmax", bias=None, groups=None, keep_groups=None, renormalise=True,
    per_expert_scale=None, scaling=1.0, order="score", experts=None, norm=None, warps=None,
):  # fmt: skip
    """route(x wT) of the first `experts` outputs, all without a number.   out = (logits, ids, weights)

    x [T, K]   w [N, K]   logits [T, N]   ids, weights [T, k]   board int32 [T, experts], -1, which it leaves so

    `norm` (stream.Norm): what is left to do of the norm of x.
    """
    logits, ids, weights = out
    N, K = w.shape
    dense = isinstance(w, torch.Tensor)
    source, form = (w, None) if dense else stack(w)
    inner = triton.next_power_of_2(K if dense else triton.cdiv(K, 32))
    options = route_options(experts or N, k, kind, groups, keep_groups, renormalise, order)
    options["CHOICES"] = options.pop("K")
    before, options["SQUARES"] = norm_arguments(norm)
    router_kernel[(N + 1, x.shape[0])](
        x, source, before, logits, bias, per_expert_scale, float(scaling), ids, weights,
        board, N, K, x.stride(0), logits.stride(0), ids.stride(0), FORMAT=form, PRECISE=logits.dtype == torch.float32,
        C=inner, **options, num_warps=warps or max(1, inner // (FLOATS if dense else LONGEST)), **overlap(x.device),
    )  # fmt: skip
    return out
