"""One tile of attention: scores, weights and values of 128 positions for a block of queries, and how tiles merge.

Queries go by fours against four keys, so each key is loaded once for four queries. Scores of four queries and four
positions make one vector: lane 4 query + position. Each sum has one order, whatever stands beside the query: over the
channels of a key in lanes, over the positions of a tile one after the other.
"""

import numpy as np

from . import lanes
from .compiled import inlined, inner, unfolded

TILE = 128
MINUS_INF = np.float32(-np.inf)


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
def prefetch4(rows, at, i):
    a, b, c, d = at
    lanes.prefetch(rows, a + i)
    lanes.prefetch(rows, b + i)
    lanes.prefetch(rows, c + i)
    lanes.prefetch(rows, d + i)


@inlined
def dot_part(q, at, width, rows, places, D, sums, v, ahead):
    """Add four queries . four rows to the sixteen sums, while the values of these positions are fetched."""
    for i in range(0, D, 16):
        prefetch4(v, ahead, i)
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
def score_four(q, at, width, keys, more, values, j, start_row, S, last):
    """q . k of four queries and the positions j .. j + 3 of a tile (the last one repeated at its end)."""
    k, k_base, k_step, D = keys
    e, e_base, e_step, P = more
    v, v_base, v_step = values
    r0, r1 = place_of(j, start_row, S), place_of(min(j + 1, last), start_row, S)
    r2, r3 = place_of(min(j + 2, last), start_row, S), place_of(min(j + 3, last), start_row, S)
    z = lanes.zeros()
    sums = ((z, z, z, z), (z, z, z, z), (z, z, z, z), (z, z, z, z))
    places = (k_base + r0 * k_step, k_base + r1 * k_step, k_base + r2 * k_step, k_base + r3 * k_step)
    ahead = (v_base + r0 * v_step, v_base + r1 * v_step, v_base + r2 * v_step, v_base + r3 * v_step)
    sums = dot_part(q, at, width, k, places, D, sums, v, ahead)
    if P:
        places = (e_base + r0 * e_step, e_base + r1 * e_step, e_base + r2 * e_step, e_base + r3 * e_step)
        sums = dot_part(q, at + D, width, e, places, P, sums, v, ahead)
    a, b, c, d = sums
    return lanes.totals(a + b + c + d)


@inner
def tile_scores(q, width, count, keys, more, values, start_row, S, first, last, scale, softcap, scores):
    """Scores of `count` queries (whole fours) at the positions first .. last of a tile."""
    for group in range(first - first % 16, last + 1, 16):
        for query in range(0, count, 4):
            for j in range(max(group, first - first % 4), min(group + 16, last + 1), 4):
                dots = score_four(q, query * width, width, keys, more, values, j, start_row, S, last)
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
        if begin < lows[query + r] or highs[query + r] < end:
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
def values_for_four(scores, base, keys, values, start_row, S, low, high, o, at, Dv):
    """o += weight . value of four queries over the positions low .. high of a tile, in their order, by 64 columns."""
    v, v_base, v_step = values
    k, k_base, k_step, _ = keys
    for d in range(0, Dv - Dv % 64, 64):
        places = (at + d, at + d + 16, at + d + 32, at + d + 48)
        sums = load4(o, places, 0), load4(o, places, Dv), load4(o, places, 2 * Dv), load4(o, places, 3 * Dv)
        for j in range(low, high):
            row = v_base + place_of(j, start_row, S) * v_step + d
            x = load4(v, (row, row + 16, row + 32, row + 48), 0)
            # The next tile's keys, while there is only arithmetic to do.
            row = k_base + place_of(j + TILE, start_row, S) * k_step + d
            prefetch4(k, (row, row + 16, row + 32, row + 48), 0)
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
def tile_values(scores, query, lows, highs, keys, values, start_row, S, o, at, Dv):
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
            values_for_four(scores, base, keys, values, start_row, S, low, high, o, at, Dv)
        for r in range(4):
            begin, end, column = lows[query + r], min(low, highs[query + r]), 0
            if part == 1:
                begin, end, column = low, high, Dv - Dv % 64
            elif part == 2:
                begin, end = max(high, begin), highs[query + r]
            if column < Dv:
                values_for_one(scores, base + 4 * r, values, start_row, S, begin, end, o, at + r * Dv, column, Dv)


@unfolded
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
    tile_scores(packed, width, count, keys, more, values, start_row, S, first, last - 1, scale, softcap, scores)
    for query in range(0, count, 4):
        tile_weights(scores, query, near, far, first, last - 1, peaks, sums, at)
        tile_values(scores, query, near, far, keys, values, start_row, S, o, (at + query) * Dv, Dv)


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
