"""Softmax over tiles of cached positions, and the joining of its parts: the device code of attention.

A row is one (token, query head) pair; the rows of all query heads that share a kv head stand together, heads first, so
every tile of keys and values is read once for all of them. Tiles walk the positions upward with a running peak and sum
(online softmax), in powers of two: scores are q . k times `scale`, which is positive and has log2(e) in it; a soft cap
is tanh(q . k inner) times a scale. Sixteen-bit inputs of one dtype go to the tensor cores; all others are widened to
float32 and multiplied as IEEE says.

Many rows stand on the wide side of the products. Few rows (decoding) leave it to the keys and values, whose reading
bounds them: then nothing is padded to 64 rows, and both go from shared memory straight into the tensor cores.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .device import overlap
from .stacks import prefetch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(float("-inf"))
# 2026-11-15, H200: elements that a warp of `merge_splits` reads, all at once. 64 splits of 16 rows of 256: 1.6 us.
MERGED = 2048


@triton.jit
def tanh(u):
    """An odd polynomial below 0.625 (Cephes), 1 - 2 / (1 + e^2u) above: both to about a unit in the last place."""
    square = u * u
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    small = series * square * u + u
    return tl.where(tl.abs(u) < 0.625, small, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * u)))


@triton.jit
def request_of(b, lengths, slots, S, RING: tl.constexpr):
    """(length, slot) of request b. A length beyond the cache is a ring's; a line has no rows there to read."""
    length = S if lengths is None else tl.load(lengths + b).to(tl.int32)
    slot = b if slots is None else tl.load(slots + b).to(tl.int64)
    return length if RING else tl.minimum(length, S), slot


@triton.jit
def seen_by(token, length, L, S, window, CAUSAL: tl.constexpr, RING: tl.constexpr):
    """The positions low .. high that a query token sees. With a window, the cache may be a ring of its last S."""
    place = length - L + token
    low = tl.maximum(tl.maximum(length - S, place - window + 1), 0) if RING else 0 * place
    high = place + 1 if CAUSAL else length + 0 * place
    return low, tl.where(place < 0, 0, high)


@triton.jit
def load_tile(
    base, strides, S, seen, first, SIZE: tl.constexpr, RING: tl.constexpr, MASKED: tl.constexpr, STEADY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows from `first` of one kv head; of a MASKED tile those that some query sees.

    What no query sees may hold anything, and 0 times NaN is NaN: it is not read. STEADY spends registers on addresses
    relative to `first`, which saves arithmetic in the loop over tiles.
    """
    near, far, _, _ = seen
    step, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK)
    if STEADY and not RING:
        at = base + tl.cast(first, tl.int64) * strides[1]
        at += step.to(tl.int64)[:, None] * strides[1] + column[None, :] * strides[3]
    else:
        rows = ((first + step) % S if RING else first + step).to(tl.int64)
        at = base + rows[:, None] * strides[1] + column[None, :] * strides[3]
    if MASKED:
        inside = (first + step >= near) & (first + step < far)
        tile = tl.load(at, mask=inside[:, None] & (column < SIZE)[None, :], other=0.0)
    elif BLOCK != SIZE:
        tile = tl.load(at, mask=(column < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile.to(DOT)


@triton.jit
def prefetch_tile(base, strides, S, first, far, SIZE: tl.constexpr, RING: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ask for the rows of a tile to come to the L2."""
    EACH: tl.constexpr = 1024 // base.dtype.element_ty.primitive_bitwidth  # of a line of 128 bytes
    LINES: tl.constexpr = triton.next_power_of_2((SIZE + EACH - 1) // EACH)
    position = tl.minimum(first + tl.arange(0, BLOCK_N), far - 1)
    rows = (position % S if RING else position).to(tl.int64)
    line = tl.minimum(EACH * tl.arange(0, LINES), SIZE - 1)
    prefetch(base + rows[:, None] * strides[1] + line[None, :] * strides[3])


@triton.jit
def products(x, y, inner):
    """x . y transposed, of queries and keys or the other way around, and its tanh where there is a cap.

    float32 is summed in runs of channels: one long chain of sums rounds most.
    """
    RUN: tl.constexpr = 32
    if x.dtype == tl.float32 and x.shape[1] > RUN:
        x = tl.permute(x.reshape(x.shape[0], x.shape[1] // RUN, RUN), 1, 0, 2)
        y = tl.permute(y.reshape(y.shape[0], y.shape[1] // RUN, RUN), 1, 2, 0)
        scores = tl.sum(tl.dot(x, y, input_precision="ieee"), 0)
    else:
        scores = tl.dot(x, tl.trans(y), input_precision="ieee")
    if inner is not None:
        scores = tanh(scores * inner)
    return scores


@triton.jit
def hidden(scores, seen, first, AXIS: tl.constexpr):
    """Scores of a tile with positions on AXIS, -inf where a row does not see them."""
    _, _, low, high = seen
    position = tl.expand_dims(first + tl.arange(0, scores.shape[AXIS]), 1 - AXIS)
    visible = (position >= tl.expand_dims(low, AXIS)) & (position < tl.expand_dims(high, AXIS))
    return tl.where(visible, scores, NOTHING)


@triton.jit
def soften(scores, peak, scale, AXIS: tl.constexpr):
    """exp2(scores - peak) of a tile with positions on AXIS, the new peak, and by what sums at the old one shrink."""
    top = tl.maximum(peak, tl.max(scores, AXIS) * scale)
    shift = tl.where(top == NOTHING, 0.0, top)
    return tl.exp2(scores * scale - tl.expand_dims(shift, AXIS)), top, tl.exp2(peak - shift)


@triton.jit
def attend_tile(
    q, state, cache, seen, first, scale, inner,
    D: tl.constexpr, DV: tl.constexpr, RING: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The running state (peak, weight, sums) of many rows after one more tile of positions.

    `seen` is (near, far, low, high): of a MASKED tile the positions near .. far are read, and row r sees low[r] ..
    high[r]; all rows see all of another. `cache` is (k, v, their strides, S), at the head and slot that is read.
    """
    peak, weight, sums = state
    k, v, k_strides, v_strides, S = cache
    keys = load_tile(k, k_strides, S, seen, first, D, RING, MASKED, False, BLOCK_N, q.shape[1], q.dtype)
    scores = products(q, keys, inner)
    if MASKED:
        scores = hidden(scores, seen, first, 1)
    weights, top, shrink = soften(scores, peak, scale, 1)
    weight = weight * shrink + tl.sum(weights, 1)
    values = load_tile(v, v_strides, S, seen, first, DV, RING, MASKED, False, BLOCK_N, sums.shape[1], q.dtype)
    sums = tl.dot(weights.to(q.dtype), values, sums * shrink[:, None], input_precision="ieee")
    return top, weight, sums


@triton.jit
def attend_turned(
    q, state, cache, seen, first, scale, inner,
    D: tl.constexpr, DV: tl.constexpr, RING: tl.constexpr, TWICE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As a masked `attend_tile`, of few rows: keys and values stand on the wide side of the products, [positions, rows]
    and [DV, rows], and are read from shared memory by the tensor cores themselves.

    Weights are added up across positions at the end only. What their rounding drops is added as a second term: by the
    second half of the rows, where those are the first TWICE, else by another product.
    """
    peak, weight, sums = state
    k, v, k_strides, v_strides, S = cache
    keys = load_tile(k, k_strides, S, seen, first, D, RING, True, True, BLOCK_N, q.shape[1], q.dtype)
    weights, top, shrink = soften(hidden(products(keys, q, inner), seen, first, 0), peak, scale, 0)
    weight = weight * shrink[None, :] + weights
    values = load_tile(v, v_strides, S, seen, first, DV, RING, True, True, BLOCK_N, sums.shape[0], q.dtype)
    rounded = weights.to(q.dtype)
    dropped = (weights - rounded.to(tl.float32)).to(q.dtype)
    if TWICE:
        rounded = tl.where((tl.arange(0, q.shape[0]) < q.shape[0] // 2)[None, :], rounded, dropped)
    sums = tl.dot(tl.trans(values), rounded, sums * shrink[None, :], input_precision="ieee")
    if not TWICE and q.dtype != tl.float32:
        sums = tl.dot(tl.trans(values), dropped, sums)
    return top, weight, sums


@triton.jit
def no_state(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """The state before the first tile."""
    peak = tl.full([BLOCK_M], NOTHING, tl.float32)
    return peak, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)


@triton.jit
def no_turned(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr):
    peak = tl.full([BLOCK_M], NOTHING, tl.float32)
    return peak, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_DV, BLOCK_M], tl.float32)


@triton.jit
def finished(state):
    """The weighted mean of a state and the base-2 logarithm of its sum of weights; zeros and -inf of nothing."""
    peak, weight, sums = state
    return sums / tl.where(weight == 0.0, 1.0, weight)[:, None], peak + tl.log2(weight)


@triton.jit
def finished_turned(state, TWICE: tl.constexpr):
    peak, weight, sums = state
    if TWICE:
        DV: tl.constexpr = sums.shape[0]
        HALF: tl.constexpr = sums.shape[1] // 2
        both = tl.sum(sums.reshape(DV, 2, HALF), 1)
        sums = tl.broadcast_to(both[:, None, :], [DV, 2, HALF]).reshape(DV, 2 * HALF)
    return finished((peak, tl.sum(weight, 0), tl.trans(sums)))


@triton.jit
def rows_of(x, strides, b, token, head):
    """Pointers to the rows of x [B, L, H, ...]."""
    return x + b * strides[0] + token.to(tl.int64) * strides[1] + head * strides[2]


@triton.jit
def store_rows(o, strides, b, token, head, mean, is_row, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    column = tl.arange(0, BLOCK_DV)
    at = rows_of(o, strides, b, token, head)
    mask = is_row[:, None] & (column < DV)[None, :]
    tl.store(at[:, None] + column[None, :] * strides[3], mean.to(o.dtype.element_ty), mask=mask)


@triton.jit
def store_split(means, logs, line, mean, log, is_row, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """What `merge_splits` joins."""
    column = tl.arange(0, BLOCK_DV)
    tl.store(means + line[:, None] * DV + column[None, :], mean, mask=is_row[:, None] & (column < DV)[None, :])
    tl.store(logs + line, log, mask=is_row)


@triton.jit
def load_queries(q, strides, b, token, head, is_row, D, BLOCK_D: tl.constexpr, DOT: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    at = rows_of(q, strides, b, token, head)
    mask = is_row[:, None] & (column < D)[None, :]
    return tl.load(at[:, None] + column[None, :] * strides[3], mask=mask, other=0.0).to(DOT)


@triton.jit
def chunk_of(span, CHUNK: tl.constexpr, SHORT: tl.constexpr, MOST: tl.constexpr):
    """How many of so many positions make a chunk: CHUNK, twice that where more than SHORT of them would be needed, or
    as many times as make MOST chunks."""
    return tl.where(span <= CHUNK * SHORT, CHUNK, CHUNK * tl.maximum(2, tl.cdiv(span, CHUNK * MOST)))


@triton.jit(do_not_specialize=["L", "S", "window", "splits"])
def attend_splits_kernel(
    q, k, v, lengths, slots, means, logs, L, G, S, scale, inner, window, splits, q_strides, k_strides, v_strides,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, RING: tl.constexpr,
    CHUNK: tl.constexpr, SHORT: tl.constexpr, MOST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DOT: tl.constexpr, TWICE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Few rows, many positions: one tile of rows against a run of chunks, each of which leaves its own mean and log.

    The chunks follow from the request's length alone: how many workers share them does not change a bit.
    """
    worker, workers = tl.program_id(0), tl.num_programs(0)
    b, g = (tl.program_id(2) // G).to(tl.int64), (tl.program_id(2) % G).to(tl.int64)
    place = tl.arange(0, BLOCK_M)
    row = place % (BLOCK_M // 2) if TWICE else tl.program_id(1) * BLOCK_M + place
    token, head = row // GROUP, g * GROUP + row % GROUP
    is_row = token < L
    if OVERLAP:
        gdc_launch_dependents()
    length, slot = request_of(b, lengths, slots, S, RING)
    low, high = seen_by(token, length, L, S, window, CAUSAL, RING)
    near, _ = seen_by(0, length, L, S, window, False, RING)
    span = tl.maximum(length - near, 0)
    chunk = chunk_of(span, CHUNK, SHORT, MOST)
    chunks = tl.cdiv(span, chunk)
    chunk_from, chunk_to = worker * chunks // workers, (worker + 1) * chunks // workers
    k += slot * k_strides[0] + g * k_strides[2]
    v += slot * v_strides[0] + g * v_strides[2]
    line = ((b * L + token) * (G * GROUP) + head) * splits
    if OVERLAP:  # lengths and slots change between steps alone, so they may be read early
        if length > 0:
            prefetch_tile(k, k_strides, S, near + chunk_from * chunk, length, D, RING, BLOCK_N)
            prefetch_tile(v, v_strides, S, near + chunk_from * chunk, length, DV, RING, BLOCK_N)
        gdc_wait()
    queries = load_queries(q, q_strides, b, token, head, is_row, D, BLOCK_D, DOT)
    seen, cache = (near, length, low, high), (k, v, k_strides, v_strides, S)
    is_row &= (place < BLOCK_M // 2) | (not TWICE)
    state = no_turned(BLOCK_M, BLOCK_N, BLOCK_DV)
    stop = tl.minimum(near + chunk_to * chunk, length)
    for first in tl.range(near + chunk_from * chunk, stop, BLOCK_N):
        state = attend_turned(queries, state, cache, seen, first, scale, inner, D, DV, RING, TWICE, BLOCK_N)
        done = first + BLOCK_N - near
        if (done % chunk == 0) | (first + BLOCK_N >= stop):
            mean, log = finished_turned(state, TWICE)
            store_split(means, logs, line + (done - 1) // chunk, mean, log, is_row, DV, BLOCK_DV)
            state = no_turned(BLOCK_M, BLOCK_N, BLOCK_DV)
    if worker == workers - 1:
        absent = tl.arange(0, triton.next_power_of_2(MOST))[None, :]
        mask = is_row[:, None] & (absent >= chunks) & (absent < splits)
        tl.store(logs + line[:, None] + absent, tl.full([BLOCK_M, absent.shape[1]], NOTHING, tl.float32), mask=mask)


@triton.jit(do_not_specialize=["L", "splits"])
def merge_splits_kernel(
    means, logs, o, lse, L, H, DV, splits, o_strides, lse_strides,
    BLOCK_SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some columns of one row: the splits' means, each weighted by its sum of weights. Always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    b, token, head = row // H // L, row // H % L, row % H
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, BLOCK_SPLITS)
    line = row * splits + split
    is_split = split < splits
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    log = tl.load(logs + line, mask=is_split, other=NOTHING)
    mask = is_split[:, None] & (column < DV)[None, :]
    mean = tl.load(means + line[:, None] * DV + column[None, :], mask=mask, other=0.0)
    top = tl.max(log, 0)
    shift = tl.where(top == NOTHING, 0.0, top)
    weights = tl.exp2(log - shift)
    weight = tl.sum(weights, 0)
    # The means of absent splits were never written.
    sums = tl.sum(tl.where((log == NOTHING)[:, None], 0.0, weights[:, None] * mean), 0)
    joined = sums / tl.where(weight == 0.0, 1.0, weight)
    o = rows_of(o, o_strides, b, token, head)
    tl.store(o + column * o_strides[3], joined.to(o.dtype.element_ty), mask=column < DV)
    if lse is not None and tl.program_id(1) == 0:
        tl.store(rows_of(lse, lse_strides, b, token, head), (shift + tl.log2(weight)) * LN2)


def merge_splits(means, logs, o, lse):
    """o [B, L, H, DV] and lse [B, L, H] (or None) from means [B L H, splits, DV] and base-2 logs [B L H, splits].

    A split whose log is -inf holds nothing: its mean does not matter.
    """
    (_, L, H, DV), splits = o.shape, logs.shape[1]
    block_splits = triton.next_power_of_2(splits)
    block = min(max(8, MERGED // block_splits), triton.next_power_of_2(DV))
    merge_splits_kernel[(logs.shape[0], triton.cdiv(DV, block))](
        means, logs, o, lse, L, H, DV, splits, o.stride(), None if lse is None else lse.stride(),
        BLOCK_SPLITS=block_splits, BLOCK=block, num_warps=1, **overlap(o.device),
    )  # fmt: skip


@triton.jit
def attend_range(
    q, state, cache, seen, start, stop, scale, inner,
    D: tl.constexpr, DV: tl.constexpr, RING: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    for first in tl.range(start, stop, BLOCK_N):
        state = attend_tile(q, state, cache, seen, first, scale, inner, D, DV, RING, MASKED, BLOCK_N)
    return state


@triton.jit(do_not_specialize=["L", "S", "window", "tiles", "splits"])
def attend_rows_kernel(
    q, k, v, lengths, slots, o, lse, means, logs, L, G, S, scale, inner, window, tiles, splits,
    q_strides, k_strides, v_strides, o_strides, lse_strides,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, RING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Many rows: one tile of them against the positions that they see, or one of `splits` equal parts of those.

    Only the ends of what they see are masked.
    """
    # Late tokens see most: their tiles start first.
    shared = tl.num_programs(0) // tiles
    tile = tiles - 1 - tl.program_id(0) // shared
    b, g = (tl.program_id(0) % shared // G).to(tl.int64), (tl.program_id(0) % shared % G).to(tl.int64)
    length, slot = request_of(b, lengths, slots, S, RING)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, g * GROUP + row % GROUP
    is_row = token < L
    low, high = seen_by(token, length, L, S, window, CAUSAL, RING)
    near, all_to = seen_by(tile * BLOCK_M // GROUP, length, L, S, window, CAUSAL, RING)
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, L - 1)
    all_from, far = seen_by(last_token, length, L, S, window, CAUSAL, RING)
    queries = load_queries(q, q_strides, b, token, head, is_row, D, BLOCK_D, DOT)
    k += slot * k_strides[0] + g * k_strides[2]
    v += slot * v_strides[0] + g * v_strides[2]
    # Tiles lie on absolute positions, so a row's sums do not depend on the rows beside it.
    start = near // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(far - start, BLOCK_N), splits) * BLOCK_N
    start += tl.program_id(1) * share
    stop = tl.maximum(tl.minimum(start + share, far), start)
    whole_from = tl.minimum(tl.maximum(tl.cdiv(all_from, BLOCK_N) * BLOCK_N, start), stop)
    whole_to = tl.maximum(tl.minimum(all_to // BLOCK_N * BLOCK_N, stop), whole_from)
    state = no_state(BLOCK_M, BLOCK_DV)
    seen, cache = (near, far, low, high), (k, v, k_strides, v_strides, S)
    if RING:
        state = attend_range(queries, state, cache, seen, start, whole_from, scale, inner, D, DV, RING, True, BLOCK_N)
    state = attend_range(queries, state, cache, seen, whole_from, whole_to, scale, inner, D, DV, RING, False, BLOCK_N)
    state = attend_range(queries, state, cache, seen, whole_to, stop, scale, inner, D, DV, RING, True, BLOCK_N)
    mean, log = finished(state)
    if means is None:
        store_rows(o, o_strides, b, token, head, mean, is_row, DV, BLOCK_DV)
        if lse is not None:
            tl.store(rows_of(lse, lse_strides, b, token, head), log * LN2, mask=is_row)
    else:
        line = ((b * L + token) * (G * GROUP) + head) * splits + tl.program_id(1)
        store_split(means, logs, line, mean, log, is_row, DV, BLOCK_DV)
