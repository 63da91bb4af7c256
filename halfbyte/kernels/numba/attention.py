"""Attention in tiles of 128 positions: one algorithm for one query and for many, so that their bits are the same.

The tiles lie on absolute positions. A tile gives each query its largest score, its sum of exp and its weighted values,
from nothing but that query and that tile; tiles are merged in the order of positions. A prompt runs in blocks of
queries that walk the tiles; a step with few queries spreads its (block, tile) pairs over the threads and merges after.

Queries go by fours against four keys, so each key is loaded once for four queries, and query heads that share a kv
head sit in the same block. Scores of four queries and four positions make one vector: lane 4 query + position.
Head sizes are multiples of 16 here: other caches are copied with zeros added.
"""

import numpy as np
import torch
from numba import get_num_threads, njit, prange, set_num_threads

from . import lanes
from .cache import indices, strided
from .views import SERIAL, destination, finish, floats

TILE = 128
BLOCK = 64  # queries that share each load of a tile: a block's queries, scores and sums stay in a core's L2
SMALL = 1 << 17  # multiply-adds below which a call stays on its thread
MINUS_INF = np.float32(-np.inf)

# Helpers are called from kernels only: without wrappers for Python, which take half of the time to compile.
inner = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
inlined = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


@inlined
def times4(y, x, sums):
    a, b, c, d = sums
    return lanes.fma(y, x[0], a), lanes.fma(y, x[1], b), lanes.fma(y, x[2], c), lanes.fma(y, x[3], d)


@inlined
def load4(rows, at, i):
    a, b, c, d = at
    return lanes.load(rows, a + i), lanes.load(rows, b + i), lanes.load(rows, c + i), lanes.load(rows, d + i)


@inlined
def queries_times4(q, at, width, x, sums):
    a, b, c, d = sums
    a = times4(lanes.load(q, at), x, a)
    b = times4(lanes.load(q, at + width), x, b)
    c = times4(lanes.load(q, at + 2 * width), x, c)
    d = times4(lanes.load(q, at + 3 * width), x, d)
    return a, b, c, d


@inlined
def dot_part(q, at, width, rows, places, D, sums):
    """Add four queries . four rows to the sixteen sums."""
    for i in range(0, D, 16):
        sums = queries_times4(q, at + i, width, load4(rows, places, i), sums)
    return sums


@inlined
def tanh(u):
    """An odd polynomial below 0.625 (Cephes), 1 - 2 / (1 + e^2u) above: both to about a unit in the last place."""
    one, two, square = lanes.splat(np.float32(1)), lanes.splat(np.float32(2)), u * u
    series = lanes.splat(np.float32(-5.70498872745e-3))
    series = lanes.fma(series, square, lanes.splat(np.float32(2.06390887954e-2)))
    series = lanes.fma(series, square, lanes.splat(np.float32(-5.37397155531e-2)))
    series = lanes.fma(series, square, lanes.splat(np.float32(1.33314422036e-1)))
    series = lanes.fma(series, square, lanes.splat(np.float32(-3.33332819422e-1)))
    small = lanes.fma(series * square, u, u)
    size = lanes.larger(u, lanes.zeros() - u)
    return lanes.choose(size, lanes.splat(np.float32(0.625)), small, one - two / (one + lanes.exp(two * u)))


@inlined
def place_of(position, start_row, S):
    """The cache row of a position of a tile that starts in row `start_row`."""
    row = start_row + position
    return row if row < S else row % S


@inlined
def score_four(q, at, width, keys, more, j, start_row, S, last):
    """q . k of four queries and the positions j .. j + 3 of a tile (the last one repeated at its end)."""
    k, k_base, k_step, D = keys
    e, e_base, e_step, P = more
    r0, r1 = place_of(j, start_row, S), place_of(min(j + 1, last), start_row, S)
    r2, r3 = place_of(min(j + 2, last), start_row, S), place_of(min(j + 3, last), start_row, S)
    z = lanes.zeros()
    sums = ((z, z, z, z), (z, z, z, z), (z, z, z, z), (z, z, z, z))
    places = (k_base + r0 * k_step, k_base + r1 * k_step, k_base + r2 * k_step, k_base + r3 * k_step)
    sums = dot_part(q, at, width, k, places, D, sums)
    if P:
        places = (e_base + r0 * e_step, e_base + r1 * e_step, e_base + r2 * e_step, e_base + r3 * e_step)
        sums = dot_part(q, at + D, width, e, places, P, sums)
    a, b, c, d = sums
    return lanes.totals(a + b + c + d)


@inner
def tile_scores(q, width, count, keys, more, start_row, S, first, last, scale, softcap, scores):
    """Scores of `count` queries (whole fours) at the positions first .. last of a tile."""
    for group in range(first - first % 16, last + 1, 16):
        for query in range(0, count, 4):
            for j in range(max(group, first - first % 4), min(group + 16, last + 1), 4):
                dots = score_four(q, query * width, width, keys, more, j, start_row, S, last)
                s = dots * lanes.splat(scale)
                if softcap > 0:
                    s = lanes.splat(softcap) * tanh(s / lanes.splat(softcap))
                lanes.store(scores, query * TILE + 4 * j, s)


@inner
def tile_weights(scores, query, lows, highs, first, last, peaks, sums, at):
    """Of four queries: the largest score, exp(score - largest) in place of the scores, and its sum.

    Positions that a query does not see weigh exactly 0. `scores` has sixteen spare places at its end.
    """
    spare, base = scores.size - 16, query * TILE
    begin, end = first - first % 4, last - last % 4 + 4
    for r in range(4):
        for j in range(begin, end):
            if j < lows[query + r] or j >= highs[query + r]:
                scores[base + j // 4 * 16 + 4 * r + j % 4] = MINUS_INF
    peak = lanes.splat(MINUS_INF)
    for j in range(begin, end, 4):
        peak = lanes.larger(peak, lanes.load(scores, base + 4 * j))
    lanes.store(scores, spare, peak)
    for r in range(4):
        p = spare + 4 * r
        largest = max(max(scores[p], scores[p + 1]), max(scores[p + 2], scores[p + 3]))
        peaks[at + query + r] = largest
        shift = largest if largest > MINUS_INF else np.float32(0)
        scores[p] = scores[p + 1] = scores[p + 2] = scores[p + 3] = shift
    shift, total = lanes.load(scores, spare), lanes.zeros()
    for j in range(begin, end, 4):
        weight = lanes.exp(lanes.load(scores, base + 4 * j) - shift)
        lanes.store(scores, base + 4 * j, weight)
        total = total + weight
    lanes.store(scores, spare, total)
    for r in range(4):
        p = spare + 4 * r
        sums[at + query + r] = (scores[p] + scores[p + 1]) + (scores[p + 2] + scores[p + 3])


@inlined
def weights_of(scores, base, j):
    at = base + j // 4 * 16 + j % 4
    return (
        lanes.splat(scores[at]), lanes.splat(scores[at + 4]), lanes.splat(scores[at + 8]), lanes.splat(scores[at + 12])
    )  # fmt: skip


@inlined
def values_for_four(scores, base, values, start_row, S, low, high, o, at, Dv):
    """o += weight . value of four queries over the positions low .. high of a tile, in their order, by 64 columns."""
    v, v_base, v_step = values
    for d in range(0, Dv - Dv % 64, 64):
        places = (at + d, at + d + 16, at + d + 32, at + d + 48)
        sums = load4(o, places, 0), load4(o, places, Dv), load4(o, places, 2 * Dv), load4(o, places, 3 * Dv)
        for j in range(low, high):
            row = v_base + place_of(j, start_row, S) * v_step + d
            x = load4(v, (row, row + 16, row + 32, row + 48), 0)
            w = weights_of(scores, base, j)
            a, b, c, e = sums
            sums = times4(w[0], x, a), times4(w[1], x, b), times4(w[2], x, c), times4(w[3], x, e)
        for r in range(4):
            store4(o, at + r * Dv + d, sums[r])


@inlined
def store4(o, at, x):
    lanes.store(o, at, x[0])
    lanes.store(o, at + 16, x[1])
    lanes.store(o, at + 32, x[2])
    lanes.store(o, at + 48, x[3])


@inner
def values_for_one(scores, base, values, start_row, S, low, high, o, at, column, Dv):
    """As `values_for_four`, for the query whose weights start at `base`, from a column on."""
    v, v_base, v_step = values
    for j in range(low, high):
        weight, row = lanes.splat(scores[base + j // 4 * 16 + j % 4]), v_base + place_of(j, start_row, S) * v_step
        for d in range(column, Dv, 16):
            lanes.store(o, at + d, lanes.fma(weight, lanes.load(v, row + d), lanes.load(o, at + d)))


@inner
def tile_values(scores, query, lows, highs, values, start_row, S, o, at, Dv):
    """o [4, Dv] at `at` = weights . values of four queries, each over the positions that it sees and no other."""
    for d in range(at, at + 4 * Dv, 16):
        lanes.store(o, d, lanes.zeros())
    low, high = lows[query], highs[query]
    for r in range(1, 4):
        low, high = max(low, lows[query + r]), min(high, highs[query + r])
    high = max(low, high)
    base = query * TILE
    for part in range(3):  # before what all four see, that, after it
        if part == 1:
            values_for_four(scores, base, values, start_row, S, low, high, o, at, Dv)
        for r in range(4):
            begin, end, column = lows[query + r], min(low, highs[query + r]), 0
            if part == 1:
                begin, end, column = low, high, Dv - Dv % 64
            elif part == 2:
                begin, end = max(high, begin), highs[query + r]
            if column < Dv:
                values_for_one(scores, base + 4 * r, values, start_row, S, begin, end, o, at + r * Dv, column, Dv)


@njit(inline="always", error_model="numpy")
def attend_tile(
    packed, width, count, lows, highs, tile, keys, more, values, S, scale, softcap, scores, peaks, sums, at, o, Dv
):
    """One tile for one block of queries: peaks, sums at `at` and o [count, Dv] at `at Dv`."""
    start = tile * TILE
    near, far = np.empty(count, np.int64), np.empty(count, np.int64)
    first, last = np.int64(TILE), np.int64(0)
    for query in range(count):
        near[query] = min(TILE, max(0, lows[query] - start))
        far[query] = max(near[query], min(TILE, highs[query] - start))
        if near[query] < far[query]:
            first, last = min(first, near[query]), max(last, far[query])
    start_row = start % S
    tile_scores(packed, width, count, keys, more, start_row, S, first, last - 1, scale, softcap, scores)
    for query in range(0, count, 4):
        tile_weights(scores, query, near, far, first, last - 1, peaks, sums, at)
        tile_values(scores, query, near, far, values, start_row, S, o, (at + query) * Dv, Dv)


@inner
def merge_tile(running, to, tile_peak, tile_sum, tile_o, at, Dv):
    """Fold a tile's state (at `at`) into a query's running state (at `to`)."""
    peaks, sums, o = running
    peak = max(peaks[to], tile_peak[at])
    shift = peak if peak > MINUS_INF else np.float32(0)
    old, new = np.exp(peaks[to] - shift), np.exp(tile_peak[at] - shift)
    peaks[to] = peak
    sums[to] = sums[to] * old + tile_sum[at] * new
    for d in range(0, Dv, 16):
        kept = lanes.load(o, to * Dv + d) * lanes.splat(old)
        lanes.store(o, to * Dv + d, lanes.fma(lanes.load(tile_o, at * Dv + d), lanes.splat(new), kept))


@inner
def finish_query(running, row, Dv):
    """y / sum in place, and lse = peak + log sum in place of the peak; zeros and -inf where nothing was seen."""
    peaks, sums, y = running
    total = sums[row]
    weight = total if total != np.float32(0) else np.float32(1)
    for d in range(row * Dv, row * Dv + Dv, 16):
        lanes.store(y, d, lanes.load(y, d) / lanes.splat(weight))
    shift = peaks[row] if peaks[row] > MINUS_INF else np.float32(0)
    peaks[row] = shift + np.log(total)


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
def block_tiles(block, L, H, G, lengths, causal, window, S):
    """The tiles that some query of a block sees."""
    b, _, first, real = block_at(block, L, H, G)
    low, high = np.int64(-1), np.int64(0)
    for i in range(first // (H // G), (first + real - 1) // (H // G) + 1):
        near, far = seen_by(lengths[b], L, i, causal, window, S)
        if near < far:
            low, high = near if low < 0 else min(low, near), max(high, far)
    return max(low, 0) // TILE, (high + TILE - 1) // TILE


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


@njit(inline="always", error_model="numpy")
def run_task(q, q_pe, k, e, v, strides, slots, lengths, sizes, options, tiles, starts, parts, running, turn, count):
    """Task `turn`: a (block, tile) pair where there are parts, else a block with all its tiles."""
    if parts[0].size:
        block = np.searchsorted(starts, turn, side="right") - 1
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
    L, H, G, _, _, Dv, _ = sizes
    peaks, sums, o = parts
    b, g, first, real = block_at(query // count, L, H, G)
    if query % count < real:
        row = row_of(first + query % count, b, g, L, H, G)
        if peaks.size:
            for task in range(starts[query // count], starts[query // count + 1]):
                merge_tile(running, row, peaks, sums, o, task * count + query % count, Dv)
        finish_query(running, row, Dv)


@njit(parallel=True, cache=True, error_model="numpy")
def attention_kernel(
    q, q_pe, k, e, v, strides, slots, lengths, sizes, options, tiles, starts, count, part_peaks, part_sums, part_o,
    peaks, sums, y,
):  # fmt: skip
    """The tiles of every query, merged into the running states or, in a split call, left in parts for merge_kernel."""
    parts, running = (part_peaks, part_sums, part_o), (peaks, sums, y)
    tasks = starts[-1] if part_peaks.size else len(tiles)
    for turn in prange(tasks):
        run_task(
            q,
            q_pe,
            k,
            e,
            v,
            strides,
            slots,
            lengths,
            sizes,
            options,
            tiles,
            starts,
            parts,
            running,
            np.int64(turn),
            count,
        )


@njit(parallel=True, cache=True, error_model="numpy")
def merge_kernel(sizes, starts, count, part_peaks, part_sums, part_o, peaks, sums, y):
    """The results of all queries from their parts, or from what is merged already; lse in place of `peaks`."""
    parts, running = (part_peaks, part_sums, part_o), (peaks, sums, y)
    for query in prange((len(starts) - 1) * count):
        merge_query(sizes, starts, count, parts, running, np.int64(query))


@njit(cache=True, error_model="numpy")
def plan(blocks, L, H, G, lengths, causal, window, S):
    """Each block's tiles, first and end, and where its first (block, tile) pair stands among all."""
    tiles, starts = np.empty((blocks, 2), np.int64), np.zeros(blocks + 1, np.int64)
    for block in range(blocks):
        tiles[block, 0], tiles[block, 1] = block_tiles(block, L, H, G, lengths, causal, window, S)
        starts[block + 1] = starts[block] + tiles[block, 1] - tiles[block, 0]
    return tiles, starts


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
        lengths = indices(lengths, np.full(B, S))
        shared, threads = L * (H // G), get_num_threads()
        blocks, count = B * G * ((shared + BLOCK - 1) // BLOCK), (min(BLOCK, shared) + 3) // 4 * 4
        tiles, starts = plan(blocks, L, H, G, lengths, options[1], options[2], S)
        pairs = int(starts[-1])
        serial = pairs * count * TILE * (D + P + wide) < SMALL
        spots = pairs * count if not serial and blocks < 4 * threads else 0
        set_num_threads(1 if serial else threads)
        parts = np.empty(spots, np.float32), np.empty(spots, np.float32), np.empty(spots * wide, np.float32)
        running = floats(lse), np.zeros(lse.numel(), np.float32), floats(y)
        attention_kernel(
            floats(q), floats(q_pe), keys[0], more[0], values[0], (*keys[1][:3], *more[1][:3], *values[1][:3]),
            indices(slots, np.arange(B)), lengths, sizes, options, tiles, starts, count, *parts, *running,
        )  # fmt: skip
        merge_kernel(sizes, starts, count, *parts, *running)
        set_num_threads(threads)
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


@njit(parallel=True, cache=True, error_model="numpy")
def merge_states_kernel(o1, lse1, o2, lse2, o, lse, D):
    if o.size < SERIAL:
        for row in range(lse.size):
            merge_states_row(o1, lse1, o2, lse2, o, lse, row, D)
    else:
        for row in prange(lse.size):
            merge_states_row(o1, lse1, o2, lse2, o, lse, row, D)


def merge_states(o1, lse1, o2, lse2, *, out=None):
    outs = out or (None, None)
    o, lse = destination(o1.shape, outs[0]), destination(lse1.shape, outs[1])
    merge_states_kernel(floats(o1), floats(lse1), floats(o2), floats(lse2), floats(o), floats(lse), o1.shape[-1])
    return finish(o, o1.dtype, outs[0]), finish(lse, torch.float32, outs[1])
