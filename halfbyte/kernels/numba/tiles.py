"""One tile of attention: scores, weights and values of 128 positions for blocks of queries, and how tiles merge.

Queries go by fours against four keys, so each key is loaded once for four queries. Scores of four queries and four
positions make one vector: lane 4 query + position. Each sum has one order, whatever stands beside the query: over the
channels of a key in lanes, over the positions of a tile in an order of their own.

That order is made for memory. The four keys are 8 positions apart, and eight values are added up that are 16 apart;
where blocks are the heads of one request they take turns at these rows. The heads of a position lie side by side, so
that what is read are a few streams, far apart and each without a gap: what a CPU fetches ahead by itself. Asking for
the next 512 bytes of each helps by a tenth, asking for more hurts (2026-11-16, Zen 4).
"""

import numpy as np

from . import lanes
from .compiled import inlined, inner

TILE = 128
CHUNK, KEYS = 32, 8  # positions whose scores fill vectors together; how far apart those of one vector are
VALUES = 16  # how far apart positions are whose values are added up together
AHEAD = 512  # bytes that streams are fetched ahead
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
def store4(o, at, x):
    lanes.store(o, at, x[0])
    lanes.store(o, at + 16, x[1])
    lanes.store(o, at + 32, x[2])
    lanes.store(o, at + 48, x[3])


@inlined
def queries_times4(q, at, width, x, sums):
    a, b, c, d = sums
    a = times4(lanes.load(q, at), x, a)
    b = times4(lanes.load(q, at + width), x, b)
    c = times4(lanes.load(q, at + 2 * width), x, c)
    d = times4(lanes.load(q, at + 3 * width), x, d)
    return a, b, c, d


@inlined
def place_of(position, start_row, S):
    """The cache row of a position of a tile that starts in row `start_row`."""
    row = start_row + position
    return row if row < S else row % S


@inlined
def score_at(position):
    """Where a position's score of the first of four queries stands in a tile; those of the others 4 further each."""
    return (position // CHUNK * KEYS + position % KEYS) * 16 + position % CHUNK // KEYS


@inlined
def places4(rows, head, j, last, start_row, S):
    """Where the rows of four positions from j on begin, `KEYS` apart; the last one's in place of those after it."""
    base, step, head_step = rows
    base += head * head_step
    return (
        base + place_of(min(j, last), start_row, S) * step,
        base + place_of(min(j + KEYS, last), start_row, S) * step,
        base + place_of(min(j + 2 * KEYS, last), start_row, S) * step,
        base + place_of(min(j + 3 * KEYS, last), start_row, S) * step,
    )


@inlined
def prefetch4(array, at, i):
    a, b, c, d = at
    lanes.prefetch(array, a + i)
    lanes.prefetch(array, b + i)
    lanes.prefetch(array, c + i)
    lanes.prefetch(array, d + i)


@inlined
def ahead_of(array, rows, n, count):
    """How far from what is read of head n of `count` that is which will be read AHEAD later: beyond the last of them
    it is in the next row."""
    _, step, head_step = rows
    ahead = AHEAD // array.itemsize
    return ahead if (n * head_step + ahead) < count * head_step else ahead + step - count * head_step


@inlined
def dot_part(q, at, width, array, places, D, sums, ahead):
    """Add four queries . four rows to the sixteen sums."""
    for i in range(0, D, 16):
        if ahead:
            prefetch4(array, places, i + ahead)
        sums = queries_times4(q, at + i, width, load4(array, places, i), sums)
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


@inner
def block_scores(q, first, end, arrays, rows, head, sizes, options, begin, stop, last, row, S, ahead, scores):
    """Scores of the queries first .. end (whole fours) with the vectors of positions that begin .. stop start."""
    D, P, _ = sizes
    scale, _, _, softcap = options
    width = D + P
    for query in range(first, end, 4):
        for j in range(begin, stop):
            z = lanes.zeros()
            sums = ((z, z, z, z), (z, z, z, z), (z, z, z, z), (z, z, z, z))
            places = places4(rows[0], head, j, last, row, S)
            sums = dot_part(q, query * width, width, arrays[0], places, D, sums, ahead)
            if P:
                places = places4(rows[1], head, j, last, row, S)
                sums = dot_part(q, query * width + D, width, arrays[1], places, P, sums, ahead)
            a, b, c, d = sums
            s = lanes.totals(a + b + c + d) * lanes.splat(scale)
            if softcap > 0:
                s = lanes.splat(softcap) * tanh(s / lanes.splat(softcap))
            lanes.store(scores, query * TILE + score_at(j), s)


@inner
def tile_scores(q, counts, heads, spans, arrays, rows, sizes, options, row, S, streams, scores):
    """Scores of the blocks' queries at the positions of each block's span, by whole vectors."""
    low, high, room, step = spans[0, 0], spans[0, 1], sizes[2], 1 if streams else KEYS
    for n in range(1, len(heads)):
        low, high = min(low, spans[n, 0]), max(high, spans[n, 1])
    for chunk in range(low - low % CHUNK, high, CHUNK):
        for j in range(chunk, chunk + KEYS, step):
            for n in range(len(heads)):
                first, last = spans[n, 0], spans[n, 1] - 1
                stop = min(j + step, last + 1) if chunk >= first - first % CHUNK else j
                ahead = ahead_of(arrays[0], rows[0], n, len(heads)) if streams else 0
                block_scores(
                    q, n * room, n * room + counts[n], arrays, rows, heads[n], sizes, options, j, stop, last, row, S,
                    ahead, scores,
                )  # fmt: skip


@inner
def weights_of_four(scores, query, lows, highs, first, last, spare, peaks, sums, at):
    """Of four queries: the largest score, exp(score - largest) in place of the scores, and its sum.

    Positions that a query does not see weigh exactly 0. `spare` has sixteen places.
    """
    base = query * TILE
    begin, end = first - first % CHUNK, last - last % CHUNK + CHUNK
    for r in range(4):
        if begin < lows[query + r] or highs[query + r] < end:
            for j in range(begin, end):
                if j < lows[query + r] or j >= highs[query + r]:
                    scores[base + score_at(j) + 4 * r] = MINUS_INF
    begin, end = base + score_at(begin), base + score_at(min(last, end - CHUNK + KEYS - 1)) + 16
    peak = lanes.splat(MINUS_INF)
    for i in range(begin, end, 16):
        peak = lanes.larger(peak, lanes.load(scores, i))
    lanes.store(spare, 0, peak)
    for r in range(4):
        p = 4 * r
        largest = max(max(spare[p], spare[p + 1]), max(spare[p + 2], spare[p + 3]))
        peaks[at + r] = largest
        shift = largest if largest > MINUS_INF else np.float32(0)
        spare[p] = spare[p + 1] = spare[p + 2] = spare[p + 3] = shift
    shift, total = lanes.load(spare, 0), lanes.zeros()
    for i in range(begin, end, 16):
        weight = lanes.exp(lanes.load(scores, i) - shift)
        lanes.store(scores, i, weight)
        total = total + weight
    lanes.store(spare, 0, total)
    for r in range(4):
        p = 4 * r
        sums[at + r] = (spare[p] + spare[p + 1]) + (spare[p + 2] + spare[p + 3])


@inner
def tile_weights(scores, counts, lows, highs, spans, peaks, sums, at):
    """The weights of all blocks' queries in place of their scores; peaks and sums from `at` on."""
    room, spare = len(lows) // len(counts), lanes.stack_floats(16)
    for n in range(len(counts)):
        for query in range(n * room, n * room + counts[n], 4):
            weights_of_four(scores, query, lows, highs, spans[n, 0], spans[n, 1] - 1, spare, peaks, sums, at + query)


@inlined
def weights_of(scores, at):
    return (
        lanes.splat(scores[at]), lanes.splat(scores[at + 4]), lanes.splat(scores[at + 8]), lanes.splat(scores[at + 12])
    )  # fmt: skip


@inlined
def from_low(low, j):
    """The first position at or after `low` of those that are whole steps from j."""
    return j + (max(low - j, 0) + VALUES - 1) // VALUES * VALUES


@inlined
def values_for_four(scores, base, v, rows, head, row, S, begin, end, low, high, ahead, o, at, Dv):
    """o += weight . value of four queries over the positions low .. high of a tile, by 64 columns: the positions that
    are whole steps from `begin`, then those from begin + 1, up to `end`."""
    v_base, v_step, v_head = rows
    for d in range(0, Dv - Dv % 64, 64):
        places = (at + d, at + d + 16, at + d + 32, at + d + 48)
        sums = load4(o, places, 0), load4(o, places, Dv), load4(o, places, 2 * Dv), load4(o, places, 3 * Dv)
        for j in range(begin, end):
            for position in range(from_low(low, j), high, VALUES):
                i = v_base + head * v_head + place_of(position, row, S) * v_step + d
                x = load4(v, (i, i + 16, i + 32, i + 48), 0)
                if ahead:
                    prefetch4(v, (i, i + 16, i + 32, i + 48), ahead)
                w = weights_of(scores, base + score_at(position))
                a, b, c, e = sums
                sums = times4(w[0], x, a), times4(w[1], x, b), times4(w[2], x, c), times4(w[3], x, e)
        for r in range(4):
            store4(o, at + r * Dv + d, sums[r])


@inner
def values_for_one(scores, base, v, rows, head, row, S, j, low, high, o, at, column, Dv):
    """As `values_for_four`, for the query whose weights start at `base`, from a column on; for one j."""
    v_base, v_step, v_head = rows
    for position in range(from_low(low, j), high, VALUES):
        weight = lanes.splat(scores[base + score_at(position)])
        i = v_base + head * v_head + place_of(position, row, S) * v_step
        for d in range(column, Dv, 16):
            lanes.store(o, at + d, lanes.fma(weight, lanes.load(v, i + d), lanes.load(o, at + d)))


@inner
def block_values(scores, query, lows, highs, begin, end, v, rows, head, row, S, ahead, o, at, Dv):
    """o [4, Dv] at `at` += weights . values of four queries, for some j; each query's over the positions it sees."""
    base, low, high, least, most = query * TILE, lows[query], highs[query], lows[query], highs[query]
    for r in range(1, 4):
        low, high = max(low, lows[query + r]), min(high, highs[query + r])
        least, most = min(least, lows[query + r]), max(most, highs[query + r])
    same = low == least and high == most and Dv % 64 == 0
    high, step = max(low, high), end - begin if same else 1
    for j in range(begin, end, step):
        if not same:
            for r in range(4):  # before what all four see
                near, far, to = lows[query + r], min(low, highs[query + r]), at + r * Dv
                values_for_one(scores, base + 4 * r, v, rows, head, row, S, j, near, far, o, to, np.intp(0), Dv)
        values_for_four(scores, base, v, rows, head, row, S, j, j + step, low, high, ahead, o, at, Dv)
        if not same:
            for r in range(4):  # the last columns, and after what all four see
                near, far, to = max(high, lows[query + r]), highs[query + r], at + r * Dv
                values_for_one(scores, base + 4 * r, v, rows, head, row, S, j, low, high, o, to, Dv - Dv % 64, Dv)
                values_for_one(scores, base + 4 * r, v, rows, head, row, S, j, near, far, o, to, np.intp(0), Dv)


@inner
def tile_values(scores, counts, heads, lows, highs, arrays, rows, row, S, streams, o, at, Dv):
    """o [queries, Dv] from row `at` on = weights . values: each query's over the positions that it sees."""
    room, step = len(lows) // len(counts), 1 if streams else VALUES
    for d in range(at * Dv, (at + len(lows)) * Dv, 16):
        lanes.store(o, d, lanes.zeros())
    for j in range(0, VALUES, step):
        for n in range(len(heads)):
            ahead = ahead_of(arrays[2], rows[2], n, len(heads)) if streams else 0
            for query in range(n * room, n * room + counts[n], 4):
                block_values(
                    scores, query, lows, highs, j, j + step, arrays[2], rows[2], heads[n], row, S, ahead,
                    o, (at + query) * Dv, Dv,
                )  # fmt: skip


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
def begin_query(running, row, Dv):
    """The state of a query that has seen nothing."""
    peaks, sums, y = running
    peaks[row], sums[row] = MINUS_INF, np.float32(0)
    for d in range(row * Dv, row * Dv + Dv, 16):
        lanes.store(y, d, lanes.zeros())


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
