"""Attention of one token each, with the norms and rotations before it and the new row of the cache: one launch.

A program has one chunk of a request's positions, and norms and turns the queries for itself. The newest position does
not come from the cache: the program that has the last chunk makes its key and value, leaves them there for later steps,
and adds them to its sums by hand.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention import CHUNK, DOTS, LOG2E, SHORT, chunks_of, split_sizes
from .device import facts, overlap
from .elementary import cos_sin, rounded
from .flash import (
    NOTHING,
    attend_turned,
    chunk_of,
    finished_turned,
    merge_splits,
    no_turned,
    prefetch_tile,
    store_split,
    tanh,
)


@triton.jit
def turns_of(position, inv_freq, scale, HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    """For each channel: its partner in a pair, by what it is multiplied, and by what its partner is.

    Channels from 2 HALF on have none.
    """
    column = tl.arange(0, BLOCK_D)
    first, paired = column < HALF, column < 2 * HALF
    partner = tl.where(first, column + HALF, tl.where(paired, column - HALF, column))
    frequency = tl.load(inv_freq + tl.where(first, column, partner), paired, 0).to(tl.float64)
    cos, sin = cos_sin(position.to(tl.float64) * frequency * 0.6366197723675814)
    return partner, tl.where(paired, cos * scale, 1.0), tl.where(paired, tl.where(first, -sin, sin) * scale, 0.0)


@triton.jit
def weighed(turns, weight, D: tl.constexpr):
    """Turns of rows that a norm's weight multiplies before."""
    partner, cos, sin = turns
    column = tl.arange(0, partner.shape[0])
    own = tl.load(weight + column, column < D, 0).to(tl.float32)
    return partner, cos * own, sin * tl.load(weight + partner, column < D, 0).to(tl.float32)


@triton.jit
def load_pairs(at, mask, turns):
    """float32 rows [rows, BLOCK_D], and the same with the partner of each channel in its place."""
    partner, _, _ = turns
    column = tl.arange(0, partner.shape[0])
    return tl.load(at + column[None, :], mask, 0).to(tl.float32), tl.load(at + partner[None, :], mask, 0).to(tl.float32)


@triton.jit
def normed_and_turned(pairs, turns, eps, D: tl.constexpr):
    own, other = pairs
    _, cos, sin = turns
    factor = 1.0 / tl.sqrt(tl.sum(own * own, 1) / D + eps)
    return (own * cos[None, :] + other * sin[None, :]) * factor[:, None]


@triton.jit
def with_newest(state, score, value, scale, TWICE: tl.constexpr):
    """A state after the newest position, whose value [DV] has a score for each row."""
    peak, weight, sums = state
    top = tl.maximum(peak, score * scale)
    shift = tl.where(top == NOTHING, 0.0, top)
    shrink, mine = tl.exp2(peak - shift), tl.exp2(score * scale - shift)
    weight = weight * shrink[None, :] + tl.where((tl.arange(0, weight.shape[0]) == 0)[:, None], mine[None, :], 0.0)
    if TWICE:  # the other rows hold what rounding drops of weights: of this one nothing
        mine = tl.where(tl.arange(0, mine.shape[0]) < mine.shape[0] // 2, mine, 0.0)
    return top, weight, sums * shrink[None, :] + value[:, None] * mine[None, :]


@triton.jit(do_not_specialize=["S", "window", "splits"])
def rotate_and_attend_kernel(
    q, k, v, q_weight, k_weight, eps, positions, inv_freq, turn_scale, k_cache, v_cache, slots, lengths, means, logs,
    G, S, scale, inner, window, splits, q_steps, k_steps, v_steps, k_strides, v_strides,
    GROUP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, NORM_V: tl.constexpr, RING: tl.constexpr,
    CHUNK: tl.constexpr, SHORT: tl.constexpr, MOST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, DOT: tl.constexpr, TWICE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The query heads of one kv head of one request against one chunk of its positions: see attend_splits_kernel.

    Lengths, slots, positions and the rows of earlier steps change between steps alone, so they may be read early.
    """
    b, g = (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    place, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row = place % (BLOCK_M // 2) if TWICE else place
    is_row = (row < GROUP) & ((place < BLOCK_M // 2) | (not TWICE))
    if OVERLAP:
        gdc_launch_dependents()
    asked, slot = tl.load(lengths + b).to(tl.int32), tl.load(slots + b).to(tl.int64)
    length = asked if RING else tl.minimum(asked, S)
    known = length - 1 if RING else tl.minimum(asked - 1, S)  # a cache that is full keeps no row of this step
    near = tl.maximum(tl.maximum(length - S, length - window), 0) if RING else 0
    span = tl.maximum(length - near, 0)
    chunk = chunk_of(span, CHUNK, SHORT, MOST)
    start = near + tl.program_id(0) * chunk
    stop = tl.minimum(start + chunk, known)
    newest = (start < length) & (start + chunk >= length) & (known < length)
    k_cache += slot * k_strides[0] + g * k_strides[2]
    v_cache += slot * v_strides[0] + g * v_strides[2]
    if OVERLAP and stop > start:
        prefetch_tile(k_cache, k_strides, S, start, stop, D, RING, BLOCK_N)
        prefetch_tile(v_cache, v_strides, S, start, stop, D, RING, BLOCK_N)
    turns = turns_of(tl.load(positions + b), inv_freq, turn_scale, HALF, BLOCK_D)
    q_turns, k_turns = weighed(turns, q_weight, D), weighed(turns, k_weight, D)
    if OVERLAP:
        gdc_wait()
    heads = q + b * q_steps[0] + (g * GROUP + row) * q_steps[1]
    pairs = load_pairs(heads[:, None], (row < GROUP)[:, None] & (column < D)[None, :], q_turns)
    is_new = column < tl.where(newest, D, 0)
    new_pairs = load_pairs(k + b * k_steps[0] + g * k_steps[1], is_new[None, :], k_turns)
    value = tl.load(v + b * v_steps[0] + g * v_steps[1] + column, is_new, 0).to(tl.float32)
    queries = rounded(normed_and_turned(pairs, q_turns, eps, D), q.dtype.element_ty).to(DOT)
    line = (b * (G * GROUP) + g * GROUP + row) * splits + tl.program_id(0)
    low = tl.zeros([BLOCK_M], tl.int32)
    seen, cache = (near, stop, low + near, low + stop), (k_cache, v_cache, k_strides, v_strides, S)
    state = no_turned(BLOCK_M, BLOCK_N, BLOCK_D)
    for first in tl.range(start, stop, BLOCK_N):
        state = attend_turned(queries, state, cache, seen, first, scale, inner, D, D, RING, TWICE, BLOCK_N)
    if newest:
        key = rounded(normed_and_turned(new_pairs, k_turns, eps, D), k_cache.dtype.element_ty)
        if NORM_V:
            value = value / tl.sqrt(tl.sum(value * value, 0) / D + eps)
        kept = rounded(value, v_cache.dtype.element_ty)
        at = (length - 1).to(tl.int64) % S
        tl.store(k_cache + at * k_strides[1] + column[None, :], key, is_new[None, :])
        tl.store(v_cache + at * v_strides[1] + column, kept, is_new)
        score = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1)
        if inner is not None:
            score = tanh(score * inner)
        state = with_newest(state, score, kept.to(tl.float32), scale, TWICE)
    mean, log = finished_turned(state, TWICE)
    store_split(means, logs, line, mean, log, is_row, D, BLOCK_D)


def rotate_and_attend(
    q, k, v, q_weight, k_weight, eps, positions, inv_freq, k_cache, v_cache, *, slots, lengths, rotary, turn_scale,
    norm_v, ring, scale, window, softcap, out,
):  # fmt: skip
    """rotate_and_append, then out = attention of its queries on the caches.

    q [B, H, D]   k, v [B, G, D]   k_cache, v_cache [slots, S, G, D]   positions, slots, lengths [B]   out [B, 1, H, D]
    """
    (B, H, D), (S, G) = q.shape, k_cache.shape[1:3]
    if softcap is not None:
        scale, inner = softcap * LOG2E, scale / softcap
    else:
        scale, inner = scale * LOG2E, None
    rows = H // G
    splits, most = chunks_of(S if window is None else min(S, window), B, G)
    narrow, block_d = q.dtype.itemsize == 2 and q.dtype == k_cache.dtype == v_cache.dtype, triton.next_power_of_2(D)
    block_m, block_n, warps, stages, _ = split_sizes(rows, block_d, narrow, facts(q.device))
    means = torch.empty((B * H, splits, D), dtype=torch.float32, device=q.device)
    logs = torch.empty((B * H, splits), dtype=torch.float32, device=q.device)
    rotate_and_attend_kernel[(splits, B * G)](
        q, k, v, q_weight, k_weight, eps, positions, inv_freq, float(turn_scale), k_cache, v_cache, slots, lengths,
        means, logs, G, S, scale, inner, window, splits, q.stride()[:2], k.stride()[:2], v.stride()[:2],
        k_cache.stride(), v_cache.stride(), GROUP=rows, D=D, HALF=rotary // 2, NORM_V=norm_v, RING=ring,
        CHUNK=CHUNK, SHORT=SHORT, MOST=most, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        DOT=DOTS[q.dtype if narrow else torch.float32], TWICE=narrow and 2 * rows <= block_m,
        num_warps=warps, num_stages=stages, **overlap(q.device),
    )  # fmt: skip
    merge_splits(means, logs, out, None)
    return out
