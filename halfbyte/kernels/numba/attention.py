"""Attention in tiles of 128 positions: one algorithm for one query and for many, so that their bits are the same.

The tiles lie on absolute positions. A tile gives each query its largest score, its sum of exp and its weighted values,
from nothing but that query and that tile (tiles.py); tiles are merged in the order of positions. A prompt runs in
blocks of queries that walk the tiles; a step with few queries spreads its (block, tile) pairs over the threads and
merges after. Query heads that share a kv head sit in the same block. Head sizes are multiples of 16 here: other caches
are copied with zeros added.
"""

import numpy as np
import torch
from numba import get_num_threads, prange

from . import lanes
from .cache import indices, strided
from .compiled import alone, inlined, inner, kernel
from .lanes import compiled_once
from .tiles import MINUS_INF, TILE, attend_tile, finish_query, merge_tile
from .views import SERIAL, destination, finish, floats

BLOCK = 64  # queries that share each load of a tile: a block's queries, scores and sums stay in a core's L2
SMALL = 1 << 20  # multiply-adds below which a call stays on its thread


@inlined
def seen_by(length, L, i, causal, window, S):
    """The positions low .. high that query i of a request sees."""
    place = length - L + i
    if place < 0:
        return 0, 0
    high = place + 1 if causal else length
    low = max(0, length - S)
    if window > 0:
        low = max(low, place - window + 1)
    return min(low, high), high


@inlined
def block_at(block, L, H, G):
    """(request, kv head, first query, queries) of a block. A (request, kv head) has L H / G queries, heads first."""
    queries = L * (H // G)
    blocks = (queries + BLOCK - 1) // BLOCK
    first = block % blocks * BLOCK
    return block // (blocks * G), block // blocks % G, first, min(BLOCK, queries - first)


@inner
def block_span(block, L, H, G, lengths, causal, window, S):
    """The positions that some query of a block sees."""
    b, _, first, real = block_at(block, L, H, G)
    low, high = np.int64(-1), np.int64(0)
    for i in range(first // (H // G), (first + real - 1) // (H // G) + 1):
        near, far = seen_by(lengths[b], L, i, causal, window, S)
        if near < far:
            low, high = near if low < 0 else min(low, near), max(high, far)
    return max(low, 0), high


@inlined
def row_of(n, b, g, L, H, G):
    """The row [b, i, h] of query n of a (request, kv head)."""
    shared = H // G
    return (b * L + n // shared) * H + g * shared + n % shared


@inner
def pack_block(q, q_pe, D, P, b, g, first, real, L, H, G, lengths, causal, window, S, packed, width, lows, highs):
    """A block's queries in whole fours, and what each sees; those that make up a four see what the last does."""
    for query in range((real + 3) // 4 * 4):
        row = row_of(first + min(query, real - 1), b, g, L, H, G)
        lows[query], highs[query] = seen_by(lengths[b], L, row // H - b * L, causal, window, S)
        for d in range(0, D, 16):
            lanes.store(packed, query * width + d, lanes.load(q, row * D + d))
        for d in range(0, P, 16):
            lanes.store(packed, query * width + D + d, lanes.load(q_pe, row * P + d))


@inner
def attend_block(
    q, q_pe, k, e, v, strides, slots, lengths, sizes, options, block, tile_from, tile_to, parts, at, running
):  # fmt: skip
    """Some tiles of one block. One of several tasks leaves its states in `parts`; the only one merges as it goes."""
    L, H, G, D, P, Dv, S = sizes
    scale, causal, window, softcap = options
    k_slot, k_step, k_head, e_slot, e_step, _, v_slot, v_step, v_head = strides
    b, g, first, real = block_at(block, L, H, G)
    count, width = (real + 3) // 4 * 4, D + P
    packed, scores = np.empty(count * width, np.float32), np.empty(count * TILE + 16, np.float32)
    lows, highs = np.empty(count, np.int64), np.empty(count, np.int64)
    pack_block(q, q_pe, D, P, b, g, first, real, L, H, G, lengths, causal, window, S, packed, width, lows, highs)
    k_rows = (k, slots[b] * k_slot + g * k_head, k_step, D)
    e_rows = (e, slots[b] * e_slot, e_step, P)
    v_rows = (v, slots[b] * v_slot + g * v_head, v_step)
    peaks, sums, o = parts
    merged = peaks.size == 0
    if merged:
        at, peaks, sums, o = (
            0,
            np.empty(count, np.float32),
            np.empty(count, np.float32),
            np.empty(count * Dv, np.float32),
        )
    for tile in range(tile_from, tile_to):
        attend_tile(
            packed, width, count, lows, highs, tile, k_rows, e_rows, v_rows, S, scale, softcap, scores, peaks, sums, at,
            o, Dv,
        )  # fmt: skip
        if merged:
            for query in range(real):
                merge_tile(running, row_of(first + query, b, g, L, H, G), peaks, sums, o, query, Dv)


@inner
def run_task(q, q_pe, k, e, v, strides, slots, lengths, sizes, options, tiles, starts, parts, running, turn, count):
    """Task `turn`: a (block, tile) pair where there are parts, else a block with all its tiles."""
    compiled_once()
    if parts[0].size:
        block = 0
        while starts[block + 1] <= turn:
            block += 1
        tile_from = tiles[block, 0] + turn - starts[block]
        tile_to = tile_from + 1
    else:
        # Later blocks of a prompt see more: from both ends, so that threads have equal shares.
        block = turn // 2 if turn % 2 == 0 else len(tiles) - 1 - turn // 2
        tile_from, tile_to = tiles[block, 0], tiles[block, 1]
    attend_block(
        q, q_pe, k, e, v, strides, slots, lengths, sizes, options, block, tile_from, tile_to, parts, turn * count,
        running,
    )  # fmt: skip


@inner
def merge_query(sizes, starts, count, parts, running, query):
    """The parts of one query of one block, in order, and its result."""
    compiled_once()
    L, H, G, _, _, Dv, _ = sizes
    peaks, sums, o = parts
    b, g, first, real = block_at(query // count, L, H, G)
    if query % count < real:
        row = row_of(first + query % count, b, g, L, H, G)
        if peaks.size:
            for task in range(starts[query // count], starts[query // count + 1]):
                merge_tile(running, row, peaks, sums, o, task * count + query % count, Dv)
        finish_query(running, row, Dv)


@kernel
def attention_kernel(
    q, q_pe, k, e, v, strides, slots, lengths, sizes, options, tiles, starts, count, part_peaks, part_sums, part_o,
    peaks, sums, y, serial,
):  # fmt: skip
    """The tiles of every query, merged as they come or, in a split call, from parts; lse in place of `peaks`."""
    parts, running = (part_peaks, part_sums, part_o), (peaks, sums, y)
    queries = len(tiles) * count
    if serial:
        for turn in range(len(tiles)):
            run_task(
                q, q_pe, k, e, v, strides, slots, lengths, sizes, options, tiles, starts, parts, running, turn, count
            )
    else:
        tasks = starts[-1] if part_peaks.size else len(tiles)
        for turn in prange(tasks):
            run_task(
                q, q_pe, k, e, v, strides, slots, lengths, sizes, options, tiles, starts, parts, running,
                np.int64(turn), count,
            )  # fmt: skip
    if part_o.size < SERIAL and y.size < SERIAL:
        for query in range(queries):
            merge_query(sizes, starts, count, parts, running, query)
    else:
        for query in prange(queries):
            merge_query(sizes, starts, count, parts, running, np.int64(query))


@alone
def plan(L, H, G, lengths, causal, window, S, tiles, starts):
    """Each block's tiles, first and end; where its first (block, tile) pair stands among all; returns the positions of
    all blocks together."""
    positions = 0
    for block in range(len(tiles)):
        low, high = block_span(block, L, H, G, lengths, causal, window, S)
        tiles[block, 0], tiles[block, 1] = low // TILE, (high + TILE - 1) // TILE
        starts[block + 1] = starts[block] + tiles[block, 1] - tiles[block, 0]
        positions += high - low
    return positions


def attention(
    q, k, v, *, scale, causal=True, window=None, softcap=None, lengths=None, slots=None, return_lse=False, out=None
):  # fmt: skip
    q, k, v, Dv = whole_lanes(q), whole_lanes(k), whole_lanes(v), v.shape[-1]
    (_, L, H, D), (S, G, wide) = q.shape, v.shape[1:]
    sizes, options = (L, H, G, D, 0, wide, S), (np.float32(scale), causal, window or 0, np.float32(softcap or 0))
    keys = strided(k)
    none = keys[0], (0, 0, 0)  # of the keys' type, so that attention and latent_attention share what is compiled
    return launch(q, None, keys, none, strided(v), slots, lengths, sizes, options, Dv, return_lse, out)


def latent_attention(
    q, q_pe, latent, k_pe, *, scale, causal=True, lengths=None, slots=None, return_lse=False, out=None
):  # fmt: skip
    q, q_pe, k_pe, rows, R = whole_lanes(q), whole_lanes(q_pe), whole_lanes(k_pe), whole_lanes(latent), q.shape[-1]
    (_, L, H, wide), (S, P) = q.shape, k_pe.shape[1:]
    sizes, options = (L, H, 1, wide, P, wide, S), (np.float32(scale), causal, 0, np.float32(0))
    rows, more = strided(rows[:, :, None]), strided(k_pe[:, :, None])
    return launch(q, q_pe, rows, more, rows, slots, lengths, sizes, options, R, return_lse, out)


def whole_lanes(t):
    """The tensor with zeros added to its last axis, to a multiple of 16; itself where that is one."""
    return t if t.shape[-1] % 16 == 0 else torch.nn.functional.pad(t, (0, -t.shape[-1] % 16))


def launch(q, q_pe, keys, more, values, slots, lengths, sizes, options, Dv, return_lse, out):
    """The one kernel of both: latents are one kv head whose values are its keys, with a second part to each key."""
    (L, H, G, D, P, wide, S), B = sizes, q.shape[0]
    outs = (out if return_lse else (out, None)) if out is not None else (None, None)
    y = destination((*q.shape[:3], wide), outs[0] if wide == Dv else None).zero_()
    lse = torch.full(q.shape[:3], -torch.inf)
    if y.numel():
        lengths = np.full(B, S) if lengths is None else indices(lengths, B)
        shared, threads = L * (H // G), get_num_threads()
        blocks, count = B * G * ((shared + BLOCK - 1) // BLOCK), (min(BLOCK, shared) + 3) // 4 * 4
        tiles, starts = np.zeros((blocks, 2), np.int64), np.zeros(blocks + 1, np.int64)
        positions = plan(L, H, G, lengths, options[1], options[2], S, tiles, starts)
        serial = positions * count * (D + P + wide) < SMALL
        spots = int(starts[-1]) * count if not serial and blocks < 4 * threads else 0
        parts = np.empty(spots, np.float32), np.empty(spots, np.float32), np.empty(spots * wide, np.float32)
        running = floats(lse), np.zeros(lse.numel(), np.float32), floats(y)
        attention_kernel(
            floats(q), floats(q_pe), keys[0], more[0], values[0], (*keys[1][:3], *more[1][:3], *values[1][:3]),
            indices(slots, B), lengths, sizes, options, tiles, starts, count, *parts, *running, serial,
        )  # fmt: skip
    y = finish(y if wide == Dv else y[..., :Dv].contiguous(), q.dtype, outs[0])
    return (y, finish(lse, torch.float32, outs[1])) if return_lse else y


@inner
def merge_states_row(o1, lse1, o2, lse2, o, lse, row, D):
    peak = max(lse1[row], lse2[row])
    shift = peak if peak > MINUS_INF else np.float32(0)
    w1, w2 = np.exp(lse1[row] - shift), np.exp(lse2[row] - shift)
    total = w1 + w2
    weight = total if total != np.float32(0) else np.float32(1)
    for d in range(row * D, row * D + D, 16):
        n = min(16, row * D + D - d)
        both = lanes.fma(lanes.load_n(o2, d, n), lanes.splat(w2), lanes.load_n(o1, d, n) * lanes.splat(w1))
        lanes.store_n(o, d, both / lanes.splat(weight), n)
    lse[row] = shift + np.log(total)


@kernel
def merge_states_kernel(o1, lse1, o2, lse2, o, lse, D):
    if o.size < SERIAL:
        for row in range(lse.size):
            merge_states_row(o1, lse1, o2, lse2, o, lse, row, D)
    else:
        for row in prange(lse.size):
            merge_states_row(o1, lse1, o2, lse2, o, lse, np.intp(row), D)


def merge_states(o1, lse1, o2, lse2, *, out=None):
    outs = out or (None, None)
    o, lse = destination(o1.shape, outs[0]), destination(lse1.shape, outs[1])
    merge_states_kernel(floats(o1), floats(lse1), floats(o2), floats(lse2), floats(o), floats(lse), o1.shape[-1])
    return finish(o, o1.dtype, outs[0]), finish(lse, torch.float32, outs[1])
