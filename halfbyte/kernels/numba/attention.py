"""Attention in tiles of 128 positions: one algorithm for one query and for many, so that their bits are the same.

The tiles lie on absolute positions. A tile gives each query its largest score, its sum of exp and its weighted values,
from nothing but that query and that tile (tiles.py); tiles are merged in the order of positions. The queries of a kv
head form blocks, and blocks that read the same rows of a cache form sets: the kv heads of a request where each has one
block, else neighbours of one head. A set walks the tiles and merges as it goes; a call with few sets spreads its (set,
tile) pairs over the threads and merges after. Head sizes are multiples of 16 here: other caches are copied with zeros
added.
"""

import numpy as np
import torch
from numba import get_num_threads, prange

from . import lanes
from .cache import indices, strided
from .compiled import allocating, inlined, inner, kernel
from .lanes import compiled_once
from .tiles import MINUS_INF, TILE, begin_query, finish_query, merge_tile, tile_scores, tile_values, tile_weights
from .views import SERIAL, destination, finish, floats

BLOCK = 64  # queries that share each load of a tile: a block's queries, scores and sums stay in a core's L2
TOGETHER = 128  # queries of a set, at most
SMALL = 1 << 17  # multiply-adds below which a call stays on its thread
MOST = 1 << 24  # numbers of results of single tiles, which are kept until they are merged


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


@inlined
def room_of(L, H, G):
    """Queries of a full block, in whole fours: what each block has room for."""
    return (min(BLOCK, L * (H // G)) + 3) // 4 * 4


@inlined
def row_at(place, L, H, G):
    """The row of a place in a block's room, -1 where no query stands there."""
    room = room_of(L, H, G)
    b, g, first, real = block_at(place // room, L, H, G)
    return row_of(first + place % room, b, g, L, H, G) if place % room < real else -1


@inlined
def line_of(L, H, G):
    """How many blocks may go together: a request's kv heads where each has one block, else the blocks of a kv head."""
    blocks = (L * (H // G) + BLOCK - 1) // BLOCK
    return G if blocks == 1 else blocks


@inlined
def blocks_at(turn, line, together):
    """The blocks of a set, first and end."""
    sets = (line + together - 1) // together
    first = turn % sets * together
    block = turn // sets * line + first
    return block, block + min(together, line - first)


@allocating
def plan(B, sizes, options, lengths, threads):
    """(blocks of a set, each set's tiles, where its first tile stands among those of all sets, multiply-adds).

    Sets are as large as they may be, unless threads would be left with less than two (set, tile) pairs each.
    """
    L, H, G, D, P, Dv, S = sizes
    room, line = room_of(L, H, G), line_of(L, H, G)
    lines = B * G * ((L * (H // G) + BLOCK - 1) // BLOCK) // line
    together = max(1, min(line, TOGETHER // room))
    while True:
        sets, positions = lines * ((line + together - 1) // together), 0
        tiles, starts = np.empty((sets, 2), np.int64), np.zeros(sets + 1, np.int64)
        for turn in range(sets):
            begin, end = np.int64(-1), np.int64(0)
            blocks = blocks_at(turn, line, together)
            for block in range(blocks[0], blocks[1]):
                low, high = block_span(block, L, H, G, lengths, options[1], options[2], S)
                if low < high:
                    begin, end = low if begin < 0 else min(begin, low), max(end, high)
                    positions += high - low
            tiles[turn, 0], tiles[turn, 1] = max(begin, 0) // TILE, (end + TILE - 1) // TILE
            starts[turn + 1] = starts[turn] + tiles[turn, 1] - tiles[turn, 0]
        if together == 1 or starts[sets] >= 2 * threads:
            return together, tiles, starts, positions * room * (D + P + Dv)
        together = (together + 1) // 2


@inner
def pack_block(q, q_pe, sizes, options, lengths, block, packed, at, lows, highs):
    """A block's queries in whole fours, and what each sees; those that make up a four see what the last does."""
    L, H, G, D, P, _, S = sizes
    b, g, first, real = block_at(block, L, H, G)
    count = (real + 3) // 4 * 4
    for query in range(count):
        row, to = row_of(first + min(query, real - 1), b, g, L, H, G), (at + query) * (D + P)
        lows[at + query], highs[at + query] = seen_by(lengths[b], L, row // H - b * L, options[1], options[2], S)
        for d in range(0, D, 16):
            lanes.store(packed, to + d, lanes.load(q, row * D + d))
        for d in range(0, P, 16):
            lanes.store(packed, to + D + d, lanes.load(q_pe, row * P + d))
    return count


@inner
def see_tile(tile, counts, lows, highs, near, far, spans):
    """What each query sees of a tile; and each block, from the first position of any query to the end of the last."""
    room = len(lows) // len(counts)
    for n in range(len(counts)):
        first, end = np.int64(TILE), np.int64(0)
        for query in range(n * room, n * room + counts[n]):
            near[query] = min(TILE, max(0, lows[query] - tile * TILE))
            far[query] = max(near[query], min(TILE, highs[query] - tile * TILE))
            if near[query] < far[query]:
                first, end = min(first, near[query]), max(end, far[query])
        spans[n, 0], spans[n, 1] = first, end


@allocating
def attend(q, q_pe, k, e, v, strides, slots, lengths, sizes, options, blocks, tiles, parts, at, running):
    """Some tiles of a set. Where there are `parts`, they take its states from `at` on; else tiles are merged."""
    compiled_once()
    L, H, G, D, P, Dv, S = sizes
    (first, end), room = blocks, room_of(L, H, G)
    count, b = end - first, block_at(first, L, H, G)[0]
    packed, scores = np.empty(count * room * (D + P), np.float32), np.empty(count * room * TILE, np.float32)
    lows, highs = np.empty(count * room, np.int64), np.empty(count * room, np.int64)
    near, far = np.empty(count * room, np.int64), np.empty(count * room, np.int64)
    counts, heads, spans = np.empty(count, np.int64), np.empty(count, np.int64), np.empty((count, 2), np.int64)
    for n in range(count):
        heads[n] = block_at(first + n, L, H, G)[1]
        counts[n] = pack_block(q, q_pe, sizes, options, lengths, first + n, packed, n * room, lows, highs)
    slot, s, arrays = slots[b], strides, (k, e, v)
    rows = (slot * s[0], s[1], s[2]), (slot * s[3], s[4], s[5]), (slot * s[6], s[7], s[8])
    peaks, sums, o = parts
    merged, streams = peaks.size == 0, count > 1 and heads[0] != heads[count - 1]
    if merged:
        spots = count * room
        peaks, sums, o = np.empty(spots, np.float32), np.empty(spots, np.float32), np.empty(spots * Dv, np.float32)
    for tile in range(tiles[0], tiles[1]):
        see_tile(tile, counts, lows, highs, near, far, spans)
        row = tile * TILE % S
        tile_scores(packed, counts, heads, spans, arrays, rows, (D, P, room), options, row, S, streams, scores)
        tile_weights(scores, counts, near, far, spans, peaks, sums, at)
        tile_values(scores, counts, heads, near, far, arrays, rows, row, S, streams, o, at, Dv)
        if merged:
            for place in range(first * room, end * room):
                to = row_at(place, L, H, G)
                if to >= 0:
                    merge_tile(running, to, peaks, sums, o, place - first * room, Dv)


@allocating
def walk(q, q_pe, k, e, v, strides, slots, lengths, sizes, options, together, tiles, turn, running):
    """All tiles of set `turn`, merged as they come."""
    compiled_once()
    L, H, G, Dv = sizes[0], sizes[1], sizes[2], sizes[5]
    blocks, seen, none = blocks_at(turn, line_of(L, H, G), together), tiles[turn], np.empty(0, np.float32)
    places = range(blocks[0] * room_of(L, H, G), blocks[1] * room_of(L, H, G))
    for place in places:
        row = row_at(place, L, H, G)
        if row >= 0:
            begin_query(running, row, Dv)
    attend(
        q, q_pe, k, e, v, strides, slots, lengths, sizes, options, blocks, (seen[0], seen[1]), (none, none, none),
        np.intp(0), running,
    )  # fmt: skip
    for place in places:
        row = row_at(place, L, H, G)
        if row >= 0:
            finish_query(running, row, Dv)


@inner
def walk_pair(
    q, q_pe, k, e, v, strides, slots, lengths, sizes, options, together, tiles, starts, turn, parts, running
):  # fmt: skip
    """Pair `turn`: one tile of a set, left in `parts`."""
    compiled_once()
    L, H, G = sizes[0], sizes[1], sizes[2]
    found = np.searchsorted(starts, turn, side="right") - 1
    blocks, tile = blocks_at(found, line_of(L, H, G), together), tiles[found, 0] + turn - starts[found]
    at = turn * together * room_of(L, H, G)
    attend(
        q, q_pe, k, e, v, strides, slots, lengths, sizes, options, blocks, (tile, tile + 1), parts, at, running
    )  # fmt: skip


@inner
def join(sizes, together, starts, place, parts, running):
    """The parts of one query, in order, and its result."""
    compiled_once()
    L, H, G, Dv = sizes[0], sizes[1], sizes[2], sizes[5]
    room, line, row = room_of(L, H, G), line_of(L, H, G), row_at(place, L, H, G)
    if row < 0:
        return
    begin_query(running, row, Dv)
    block = place // room
    turn = block // line * ((line + together - 1) // together) + block % line // together
    for pair in range(starts[turn], starts[turn + 1]):
        at = (pair * together + block % line % together) * room + place % room
        merge_tile(running, row, parts[0], parts[1], parts[2], at, Dv)
    finish_query(running, row, Dv)


@kernel
def attention_kernel(q, q_pe, k, e, v, strides, slots, lengths, sizes, options, threads, lse, y):
    """o in y and lse; how the work is shared out depends on lengths and threads, what is computed does not."""
    running = lse, np.empty(lse.size, np.float32), y
    line, room = line_of(sizes[0], sizes[1], sizes[2]), room_of(sizes[0], sizes[1], sizes[2])
    together, tiles, starts, work = plan(len(slots), sizes, options, lengths, threads)
    sets, pairs = len(tiles), starts[-1]
    if work < SMALL:
        for turn in range(sets):
            walk(q, q_pe, k, e, v, strides, slots, lengths, sizes, options, together, tiles, turn, running)
    elif sets >= 4 * threads or pairs * together * room * sizes[5] > MOST:
        for index in prange(sets):
            # Later blocks of a prompt see more: from both ends, so that threads have equal shares.
            turn = np.int64(index) // 2 if index % 2 == 0 else sets - 1 - np.int64(index) // 2
            walk(q, q_pe, k, e, v, strides, slots, lengths, sizes, options, together, tiles, turn, running)
    else:
        spots = pairs * together * room
        parts = np.empty(spots, np.float32), np.empty(spots, np.float32), np.empty(spots * sizes[5], np.float32)
        for turn in prange(pairs):
            walk_pair(
                q, q_pe, k, e, v, strides, slots, lengths, sizes, options, together, tiles, starts, np.int64(turn),
                parts, running,
            )  # fmt: skip
        places = sets // ((line + together - 1) // together) * line * room
        if spots * sizes[5] < SERIAL:
            for place in range(places):
                join(sizes, together, starts, place, parts, running)
        else:
            for place in prange(places):
                join(sizes, together, starts, np.int64(place), parts, running)


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
    B, wide, S = q.shape[0], sizes[5], sizes[6]
    outs = (out if return_lse else (out, None)) if out is not None else (None, None)
    y = destination((*q.shape[:3], wide), outs[0] if wide == Dv else None)
    lse = destination(q.shape[:3], outs[1])
    if y.numel():
        lengths = np.full(B, S) if lengths is None else indices(lengths, B)
        strides = (*keys[1][:3], *more[1][:3], *values[1][:3])
        attention_kernel(
            floats(q), floats(q_pe), keys[0], more[0], values[0], strides, indices(slots, B), lengths, sizes, options,
            get_num_threads(), floats(lse), floats(y),
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
