"""Sampling on the CPU without sorting or copying the vocabulary.

Every filter becomes one cut of a row: what is above a value stays, and of what equals it the ids up to some last one.
Blocks of 64 tokens carry their largest value, so blocks under the cut, or too far below to win with the largest
possible noise, are never drawn. Maxima do not depend on how a row was shared between threads, and sums run in order.
"""

import numpy as np
import torch
from numba import prange
from numba.extending import intrinsic

from . import lanes
from .compiled import allocating, alone, inlined, inner, kernel
from .views import NOTHING, SERIAL, finish, floats, raw

BLOCK = 64  # tokens; sixteen Philox counters
SPAN = 64  # blocks a task
WORD = np.uint64(0xFFFFFFFF)
MINUS_INF = np.float32(-np.inf)
NO_IDS = np.empty(0, np.int32)
# The noise of the smallest and of the largest uniform, 2^-24 and 1 - 2^-24, with room for the logarithm's rounding.
LEAST_NOISE, MOST_NOISE = np.float32(-2.82), np.float32(16.64)


@intrinsic
def log(typing, x):
    """The natural logarithm of positive normal lanes, to about one unit in the last place.

    x = 2^n (1 + r) with 1 + r in [sqrt 1/2, sqrt 2), then n ln 2 + r - r^2/2 + r^3 P(r), P as in Cephes' logf.
    """

    def generate(context, builder, signature, args):
        floating, integer, fused = lanes.FVEC, lanes.IVEC, lanes.fused
        bits = builder.bitcast(args[0], integer)
        offset = builder.sub(bits, lanes.constant(integer, 0x3F3504F3))
        n = builder.sitofp(builder.ashr(offset, lanes.constant(integer, 23)), floating)
        mantissa = builder.sub(bits, builder.and_(offset, lanes.constant(integer, 0xFF800000)))
        r = builder.fsub(builder.bitcast(mantissa, floating), lanes.constant(floating, 1.0))
        series = lanes.constant(floating, 7.0376836292e-2)
        for coefficient in (
            -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
            -2.4999993993e-1, 3.3333331174e-1,
        ):  # fmt: skip
            series = fused(builder, series, r, lanes.constant(floating, coefficient))
        square = builder.fmul(r, r)
        tail = builder.fmul(builder.fmul(square, r), series)
        tail = fused(builder, n, lanes.constant(floating, -2.12194440e-4), tail)
        tail = fused(builder, square, lanes.constant(floating, -0.5), tail)
        return fused(builder, n, lanes.constant(floating, 0.693359375), builder.fadd(r, tail))

    return lanes.f32x16(lanes.f32x16), generate


@inlined
def philox(a, b, c, d, low, high):
    """Philox4x32-10 on words held in uint64."""
    for _ in range(10):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (right >> np.uint64(32)) ^ b ^ low, right & WORD, (left >> np.uint64(32)) ^ d ^ high, left & WORD
        low, high = (low + np.uint64(0x9E3779B9)) & WORD, (high + np.uint64(0xBB67AE85)) & WORD
    return a, b, c, d


@inner
def uniforms(seed, position, block, uniform):
    """The 64 uniforms of a block's tokens. The loop has no branches: LLVM runs its iterations side by side."""
    low, high = np.uint64(seed) & WORD, np.uint64(seed) >> np.uint64(32)
    near, far = np.uint64(position) & WORD, np.uint64(position) >> np.uint64(32)
    half, unit = np.float32(0.5), np.float32(2.0**-23)
    for i in range(16):
        a, b, c, d = philox(np.uint64(block * 16 + i), near, far, np.uint64(0), low, high)
        uniform[4 * i] = (np.float32(np.int32(a >> np.uint64(9))) + half) * unit
        uniform[4 * i + 1] = (np.float32(np.int32(b >> np.uint64(9))) + half) * unit
        uniform[4 * i + 2] = (np.float32(np.int32(c >> np.uint64(9))) + half) * unit
        uniform[4 * i + 3] = (np.float32(np.int32(d >> np.uint64(9))) + half) * unit


@inlined
def scaled(x, at, n, temperature):
    """n lanes of x / temperature, -inf for NaN and after them."""
    v = lanes.load(x, at) if n == 16 else lanes.load_n(x, at, n)
    if temperature != np.float32(1):
        v = v / lanes.splat(temperature)
    return lanes.keep(lanes.larger(lanes.splat(MINUS_INF), v), n, MINUS_INF)


@inlined
def divisor(temperature, row):
    """What a row's logits are divided by; greedy rows are not."""
    if not temperature.size or temperature[row] == np.float32(0):
        return np.float32(1)
    return temperature[row]


@inner
def find_peaks(x, V, temperature, row, start, stop, peaks):
    """The largest value of each block from `start` to `stop`."""
    lanes.compiled_once()
    for block in range(start, stop):
        first, top = block * BLOCK, lanes.splat(MINUS_INF)
        for i in range(first, min(V, first + BLOCK), 16):
            top = lanes.larger(top, scaled(x, row * V + i, min(16, V - i), temperature))
        peaks[row, block] = lanes.largest(top)


@inlined
def rank(value):
    """An integer that grows with the value; -0 equals 0."""
    bits = np.int64(np.float32(value).view(np.int32))
    return np.int64(0x80000000) + (bits if bits >= 0 else -(bits & 0x7FFFFFFF))


@allocating
def cut(values, weights, target):
    """(bar, last): the fewest largest values whose weights reach the target are those above the bar, and those
    equal to it up to the index `last`. Without weights each counts 1. A radix descent: four passes, no sorting."""
    prefix, above = np.int64(0), 0.0
    sums = np.empty(256, np.float64)
    for shift in (24, 16, 8, 0):
        sums[:] = 0.0
        for i in range(values.size):
            key = rank(values[i])
            if key >> (shift + 8) == prefix:
                sums[(key >> shift) & 255] += weights[i] if weights.size else 1.0
        digit = 255
        while digit > 0 and above + sums[digit] < target:
            above += sums[digit]
            digit -= 1
        # Rounding may leave the target out of reach: then the lowest digit that occurs.
        while digit < 255 and sums[digit] == 0.0:
            digit += 1
            above -= sums[digit]
        prefix = prefix * 256 + digit
    bar, last = MINUS_INF, -1
    for i in range(values.size):
        if rank(values[i]) == prefix and (last < 0 or above < target):
            bar, last = values[i], i
            above += weights[i] if weights.size else 1.0
    return bar, last


@allocating
def gather(x, V, row, temperature, floor, peaks):
    """The values of at least `floor`, and their ids in order."""
    blocks = 0
    for block in range(peaks.shape[1]):
        blocks += peaks[row, block] >= floor
    values, ids = np.empty(blocks * BLOCK, np.float32), np.empty(blocks * BLOCK, np.int32)
    piece, n = np.empty(16, np.float32), 0
    for block in range(peaks.shape[1]):
        if peaks[row, block] >= floor:
            for first in range(block * BLOCK, min(V, block * BLOCK + BLOCK), 16):
                count = min(16, V - first)
                lanes.store(piece, 0, scaled(x, row * V + first, count, temperature))
                for i in range(count):
                    values[n], ids[n] = piece[i], first + i
                    n += piece[i] >= floor
    return values[:n], ids[:n]


@allocating
def exponentials(values, top):
    """e^(value - top) and their sum."""
    weights, total = np.empty(values.size, np.float32), 0.0
    for i in range(0, values.size, 16):
        n = min(16, values.size - i)
        e = lanes.keep(lanes.exp(lanes.load_n(values, i, n) - lanes.splat(top)), n, np.float32(0))
        lanes.store_n(weights, i, e, n)
        total += lanes.total(e)
    return weights, total


@inner
def mass(x, V, row, temperature, top):
    """The sum of e^(value - top) over a row."""
    total = 0.0
    for i in range(0, V, 16):
        total += lanes.total(lanes.exp(scaled(x, row * V + i, min(16, V - i), temperature) - lanes.splat(top)))
    return total


@allocating
def keep_above(values, ids, bar, last):
    """Only what is above the bar, or equals it with an id up to `last`."""
    n = 0
    for i in range(values.size):
        values[n], ids[n] = values[i], ids[i]
        n += values[i] > bar or (values[i] == bar and ids[i] <= last)
    return values[:n], ids[:n]


@allocating
def find_cut(x, V, row, temperature, k, p, log_least, top, peaks):
    """(bar, last): what is above the bar stays, and what equals it with an id up to `last`."""
    bar, last = MINUS_INF, V
    if 0 < k < V or p < 1:
        floor = MINUS_INF
        if 0 < k <= peaks.shape[1]:
            # k blocks reach the k-th largest peak, so k values do.
            floor, _ = cut(peaks[row], peaks[row, :0], np.float64(k))
        elif p < 1 and not 0 < k < V:
            floor = top - np.float32(12)  # most rows have their top_p far above this
        values, ids = gather(x, V, row, temperature, floor, peaks)
        if 0 < k < V:
            bar, at = cut(values, values[:0], np.float64(k))
            last = ids[at]
        if p < 1:
            values, ids = keep_above(values, ids, bar, last)
            weights, total = exponentials(values, top)
            if not 0 < k < V:
                inside, total = total, mass(x, V, row, temperature, top)
                if inside < p * total:
                    values, ids = gather(x, V, row, temperature, MINUS_INF, peaks)
                    weights, total = exponentials(values, top)
            bar, at = cut(values, weights, p * total)
            last = ids[at]
    if top + log_least > bar:
        bar, last = top + log_least, V
    return bar, last


@allocating
def first_of(x, V, row, top, peaks):
    """The lowest id whose logit is `top`."""
    piece = np.empty(16, np.float32)
    for block in range(peaks.shape[1]):
        if peaks[row, block] == top:
            for first in range(block * BLOCK, min(V, block * BLOCK + BLOCK), 16):
                lanes.store(piece, 0, scaled(x, row * V + first, min(16, V - first), np.float32(1)))
                for i in range(min(16, V - first)):
                    if piece[i] == top:
                        return first + i
    return 0


@inner
def largest_peak(peaks, row):
    top = peaks[row, 0]
    for block in range(1, peaks.shape[1]):
        top = max(top, peaks[row, block])
    return top


@inner
def settle(x, V, temperature, top_k, top_p, log_least, row, peaks, tops, bars, lasts, ids):
    """A row's largest value; its id where that is the answer, else its cut (and -1 as id)."""
    by, top = divisor(temperature, row), largest_peak(peaks, row)
    if np.isinf(top) and by != np.float32(1):
        find_peaks(x, V, np.float32(1), row, np.intp(0), peaks.shape[1], peaks)
        ids[row] = first_of(x, V, row, largest_peak(peaks, row), peaks)
    elif np.isinf(top) or (temperature.size and temperature[row] == np.float32(0)):
        ids[row] = first_of(x, V, row, top, peaks)
    else:
        k = top_k[row] if top_k.size else 0
        p = np.float64(top_p[row]) if top_p.size else 1.0
        least = log_least[row] if log_least.size else MINUS_INF
        bars[row], lasts[row] = find_cut(x, V, row, by, k, p, least, top, peaks)
        tops[row], ids[row] = top, -1


@allocating
def draw(x, V, temperature, row, top, bar, last, seed, position, peaks, start, stop):
    """The best s + g of the blocks from `start` to `stop`, and its id."""
    lanes.compiled_once()
    best, chosen = MINUS_INF, -1
    uniform, piece, noisy = np.empty(BLOCK, np.float32), np.empty(16, np.float32), np.empty(16, np.float32)
    for block in range(start, stop):
        peak = peaks[row, block]
        if peak < bar or peak + MOST_NOISE < max(best, top + LEAST_NOISE):
            continue
        uniforms(seed, position, block, uniform)
        for first in range(block * BLOCK, min(V, block * BLOCK + BLOCK), 16):
            s = scaled(x, row * V + first, min(16, V - first), temperature)
            t = s - log(lanes.zeros() - log(lanes.load(uniform, first - block * BLOCK)))
            if lanes.largest(t) > best:
                lanes.store(piece, 0, s)
                lanes.store(noisy, 0, t)
                for i in range(16):
                    kept = piece[i] > bar or (piece[i] == bar and first + i <= last)
                    if kept and noisy[i] > best:
                        best, chosen = noisy[i], first + i
    return best, chosen


@kernel
def peaks_kernel(x, V, temperature, peaks):
    blocks = peaks.shape[1]
    if x.size < SERIAL:
        for row in range(peaks.shape[0]):
            find_peaks(x, V, divisor(temperature, row), row, np.intp(0), blocks, peaks)
    else:
        spans = (blocks + SPAN - 1) // SPAN
        for task in prange(peaks.shape[0] * spans):
            row, start = np.int64(task) // spans, np.int64(task) % spans * SPAN
            find_peaks(x, V, divisor(temperature, row), row, start, min(blocks, start + SPAN), peaks)


@kernel
def settle_kernel(x, V, temperature, top_k, top_p, log_least, peaks, tops, bars, lasts, ids):
    for row in prange(ids.size):
        settle(x, V, temperature, top_k, top_p, log_least, np.int64(row), peaks, tops, bars, lasts, ids)


@alone
def settle_alone(x, V, temperature, top_k, top_p, log_least, peaks, tops, bars, lasts, ids):
    for row in range(ids.size):
        settle(x, V, temperature, top_k, top_p, log_least, row, peaks, tops, bars, lasts, ids)


@kernel
def draw_kernel(x, V, temperature, seeds, positions, peaks, tops, bars, lasts, ids):
    rows, blocks = peaks.shape
    if x.size < SERIAL:
        for row in range(rows):
            if ids[row] < 0:
                by = divisor(temperature, row)
                _, ids[row] = draw(
                    x,
                    V,
                    by,
                    row,
                    tops[row],
                    bars[row],
                    lasts[row],
                    seeds[row],
                    positions[row],
                    peaks,
                    np.intp(0),
                    blocks,
                )
        return
    spans = (blocks + SPAN - 1) // SPAN
    best, chosen = np.empty((rows, spans), np.float32), np.empty((rows, spans), np.int64)
    for task in prange(rows * spans):
        row, span = np.int64(task) // spans, np.int64(task) % spans
        if ids[row] < 0:
            by, start = divisor(temperature, row), span * SPAN
            best[row, span], chosen[row, span] = draw(
                x, V, by, row, tops[row], bars[row], lasts[row], seeds[row], positions[row], peaks,
                start, min(blocks, start + SPAN),
            )  # fmt: skip
    for row in range(rows):
        if ids[row] < 0:
            span = 0
            for other in range(1, spans):
                span = other if best[row, other] > best[row, span] else span
            ids[row] = chosen[row, span]


@inner
def penalise(x, counts, repetition, presence, frequency, y, start, stop):
    lanes.compiled_once()
    for i in range(start, stop):
        v, count = x[i], counts[i]
        if count > 0:
            v = (v / repetition if v > np.float32(0) else v * repetition) - presence
        y[i] = v - frequency * np.float32(count)


@kernel
def penalise_kernel(x, V, counts, repetition, presence, frequency, y):
    rows, run = repetition.size, BLOCK * SPAN
    if x.size < SERIAL:
        for row in range(rows):
            penalise(x, counts, repetition[row], presence[row], frequency[row], y, row * V, row * V + V)
    else:
        runs = (V + run - 1) // run
        for task in prange(rows * runs):
            row, start = np.int64(task) // runs, np.int64(task) % runs * run
            stop = row * V + min(V, start + run)
            penalise(x, counts, repetition[row], presence[row], frequency[row], y, row * V + start, stop)


def penalised(logits, params):
    """The logits after the three penalties, as a flat float32 array."""
    B, V = logits.shape
    neutral = (params.repetition, 1.0), (params.presence, 0.0), (params.frequency, 0.0)
    fields = [floats(torch.full((B,), off) if field is None else field) for field, off in neutral]
    y = torch.empty(logits.shape, dtype=torch.float32)
    penalise_kernel(floats(logits), V, raw(params.counts), *fields, floats(y))
    return floats(y)


@alone
def logarithms_kernel(x, y):
    """Of each number; of 0, minus infinity."""
    for i in range(x.size):
        y[i] = np.float32(np.log(np.float64(x[i])))


def logarithms(numbers):
    y = np.empty(numbers.numel(), np.float32)
    logarithms_kernel(floats(numbers), y)
    return y


def sample(logits, params, seeds, positions, *, out=None):
    B, V = logits.shape
    free = all(penalty is None for penalty in (params.repetition, params.presence, params.frequency))
    x, temperature = floats(logits) if free else penalised(logits, params), floats(params.temperature)
    top_k = NO_IDS if params.top_k is None else raw(params.top_k.to(torch.int32))
    log_least = NOTHING if params.min_p is None else logarithms(params.min_p)
    ids = torch.empty(B, dtype=torch.int32)
    rows = np.empty(B, np.float32), np.empty(B, np.float32), np.empty(B, np.int64), raw(ids)
    peaks = np.empty((B, -(-V // BLOCK)), np.float32)
    peaks_kernel(x, V, temperature, peaks)
    settled = settle_alone if B == 1 or x.size < SERIAL else settle_kernel
    settled(x, V, temperature, top_k, floats(params.top_p), log_least, peaks, *rows)
    draw_kernel(x, V, temperature, raw(seeds), raw(positions.long()), peaks, *rows)
    return finish(ids, torch.int32, out)
