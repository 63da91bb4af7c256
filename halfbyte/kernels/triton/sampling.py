"""Sampling without sorting the vocabulary: at most five launches, whatever the filters.

A token's score and id make one integer that orders tokens as the op does: larger scores first, then lower ids. A draw
is then the largest integer of s + g, and what top-k and top-p leave is everything from one integer up: the cut.

1. `score_kernel`, many programs a row: each chunk's largest s, and of rows without filters its largest s + g or logit.
   Rows with top-k get the peak of each small block, rows with top-p alone each chunk's sum of exp.
2. `plan_kernel`, one program a row: what kind of row it is, and a floor that the cut is not below: for top-k a rank
   that k peaks reach, for top-p what leaves a tail of 1 - p even if all tokens were there.
3. `sift_kernel`, many: top-k lists what is above the floor, few more than k tokens; top-p alone adds what tokens weigh
   into bins between the floor and the largest.
4. `draw_kernel`, many: rows with top-p alone draw from the bins above the one with the cut and list that one's tokens;
   rows with min-p alone draw from what is above the floor.
5. `choose_kernel`, one program a row: finds the cut in the list, by comparing all pairs where it is short, else by
   bisection, draws from what is above it, and takes the largest of all draws.

Counts and masses are integers (a mass in units of 2^-62 of the row), so sums do not depend on their order; neither
does anything depend on the order of a list, whose places come from a counter.
"""

import torch
import triton
import triton.language as tl

from .device import overlap
from .elementary import begin_early
from .lists import MASS, NOTHING, draw_few, draw_many, gumbel, id_of, ordered, rank, ranked, share, words

# 2026-11-15, H200, 248320 bfloat16 logits, medians in a graph. One row: greedy 4.4 us, a plain draw 5.1, top-k 20 with
# top-p 0.8 13.5 (score 2.6, plan 3.8, sift 3.1, draw 0.7, choose 3.4), top-k 1000 44, top-p 0.95 19.6 of peaked logits
# and 33 of flat ones. 64 rows: a plain draw 76 us, mixed filters 173.
CHUNK = 2048  # tokens of a program; 4096: 1 to 6 us more for one row, 1024 with 4 warps: 10 more for flat top-p
PEAK = 128  # tokens of a block, at least
PEAKS = 2048  # blocks of a row, at most
BINS, COPIES = 1024, 4  # one copy: top-p of flat logits 8 us more; 64 such rows 804 us instead of 577
FEW = 64  # listed tokens that are compared with each other; another variant takes four times as many
PAIRED = 32  # of them at a time; 64 spill
LIST = 512  # tokens of a longer list that are looked at together; 2048: 7 to 9 us more
WARPS = 8
MINUS_INF = tl.constexpr(float("-inf"))
LEAST = tl.constexpr(-3.4028234663852886e38)  # of the finite numbers
# What a row needs after its scores: nothing, a list for top-k, bins for top-p alone, a draw above the bar of min-p.
DECIDED, LISTED, BINNED, BARRED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def finite(top):
    """What to subtract before exp; a row of nothing but -inf has no largest."""
    return tl.where(top == MINUS_INF, 0.0, top)


@triton.jit
def field(values, row, off: tl.constexpr):
    """A row's parameter, or what it is when it is off."""
    return tl.full([], off, tl.float32) if values is None else tl.load(values + row).to(tl.float32)


@triton.jit
def filters(given, row, V):
    """(k, p, least) of a row, each 0, 1 and 0 where off."""
    top_k, top_p, min_p = given
    k = tl.full([], 0, tl.int32) if top_k is None else tl.load(top_k + row)
    p = tl.full([], 1.0, tl.float64) if top_p is None else tl.load(top_p + row).to(tl.float64)
    return tl.where(k >= V, 0, k), p, field(min_p, row, 0.0)


@triton.jit
def is_sure(top, temperature, row):
    """Whether the largest logit is taken without a draw, by what its largest s is."""
    return (top == float("inf")) | (top == MINUS_INF) | (field(temperature, row, 1.0) == 0)


@triton.jit
def chunk_of(chunks, CHUNK: tl.constexpr):
    """The row of a program, and its tokens' ids: eight a thread are 16 bytes of bfloat16, and two random counters."""
    row, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    octet = chunk * (CHUNK // 8) + tl.arange(0, CHUNK // 8)
    return row.to(tl.int64), octet[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def scores(given, row, ids, V):
    """(x, s): logits after the penalties, and divided by the temperature; -inf for NaN and past the end.

    Every operation rounds as in the torch body, so that both compare the same numbers.
    """
    logits, counts, temperature, repetition, presence, frequency, logit_strides, count_strides = given
    inside, at = ids < V, ids.to(tl.int64)
    x = tl.load(logits + row * logit_strides[0] + at * logit_strides[1], mask=inside, other=MINUS_INF).to(tl.float32)
    if counts is not None:
        count = tl.load(counts + row * count_strides[0] + at * count_strides[1], mask=inside, other=0)
        if repetition is not None:
            by = field(repetition, row, 1.0)
            x = tl.where(count > 0, tl.where(x > 0, tl.div_rn(x, by), x * by), x)
        if presence is not None:
            x = tl.where(count > 0, x - field(presence, row, 0.0), x)
        if frequency is not None:
            x = x - field(frequency, row, 0.0) * count.to(tl.float32)
    x = tl.where((x == x) & inside, x, MINUS_INF)
    s = x
    if temperature is not None:
        s = tl.div_rn(x, tl.zeros_like(x) + field(temperature, row, 1.0))
        s = tl.where((s == s) & inside, s, MINUS_INF)
    return x, s


@triton.jit
def noisy(seeds, positions, row, ids, s, CHUNK: tl.constexpr):
    """The orders of s + g of a program's tokens."""
    a, b, c, d = words(seeds, positions, row, tl.min(ids, 1)[:, None] // 4 + tl.arange(0, 2)[None, :])
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (CHUNK // 8, 8))
    return ordered(s + gumbel(bits), ids)


@triton.jit
def largest(order):
    return tl.max(tl.max(order, 1), 0)


@triton.jit
def score_kernel(
    given, given_filters, seeds, positions, tops, best, peaks, masses, V, chunks, blocks,
    CHUNK: tl.constexpr, PEAK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What one chunk says of its row's largest s, of its draw if it has no filters, of its floor if it has."""
    begin_early(OVERLAP)
    row, ids = chunk_of(chunks, CHUNK)
    x, s = scores(given, row, ids, V)
    k, p, least = filters(given_filters, row, V)
    peak = tl.max(tl.reshape(tl.max(s, 1), (CHUNK // PEAK, PEAK // 8)), 1)
    top = tl.max(peak, 0)
    tl.store(tops + tl.program_id(0), top)
    if is_sure(top, given[2], row):
        tl.store(best + tl.program_id(0), largest(ordered(x, ids)))
    elif (k == 0) & (p == 1) & (least == 0):
        tl.store(best + tl.program_id(0), largest(noisy(seeds, positions, row, ids, s, CHUNK)))
    if peaks is not None:
        if k > 0:
            block = (tl.program_id(0) % chunks) * (CHUNK // PEAK) + tl.arange(0, CHUNK // PEAK)
            tl.store(peaks + row * blocks + block, peak, mask=block < blocks)
        elif p < 1:
            tl.store(masses + tl.program_id(0), tl.sum(tl.sum(tl.exp(s - finite(top)), 1), 0))


@triton.jit
def reach(each, k, many):
    """A rank that at least k of the `many` largest of `each` reach, and few more than k."""
    low, high = tl.min(each, 0), tl.max(each, 0)
    many += tl.zeros_like(low)  # an argument of 1 is a constant, which a loop cannot change
    while (many > k + k // 8 + 16) & (low < high):
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # their difference may overflow
        above = tl.sum((each >= middle).to(tl.int32), 0)
        low, high = tl.where(above >= k, middle, low), tl.where(above >= k, high, middle - 1)
        many = tl.where(above >= k, above, many)
    return low


@triton.jit
def plan_kernel(
    temperature, given_filters, tops, peaks, masses, kinds, plans, targets, listed, bins, V, chunks, blocks,
    CHUNKS: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr, COPIES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row's kind and its (largest s, floor, bins in one unit of s, sum of exp(s - largest))."""
    begin_early(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk, block = tl.arange(0, CHUNKS), tl.arange(0, BLOCKS)
    # All loads first, also of what only some kinds have.
    each = tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=MINUS_INF)
    mass = tl.load(masses + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    peak = tl.load(peaks + row * blocks + block, mask=block < blocks, other=MINUS_INF)
    k, p, least = filters(given_filters, row, V)
    top = tl.max(each, 0)
    kind = tl.where(k > 0, LISTED, tl.where(p < 1, BINNED, tl.where(least > 0, BARRED, DECIDED)))
    kind = tl.where(is_sure(top, temperature, row), DECIDED, kind)
    total, floor, scale = 1.0, MINUS_INF, 0.0
    if kind == LISTED:
        if k <= blocks:
            # k blocks have a token above the k-th largest peak.
            floor = ranked(reach(rank(peak), k, blocks))
        tl.store(listed + row, 0)
    elif kind == BINNED:
        total = tl.sum(mass * tl.exp(each - top), 0)
        # All below the floor together weigh at most V exp(floor - top), here a little less than (1 - p) total.
        below = tl.log(((1 - p) * total / V).to(tl.float32)) - 0.01
        floor, scale = top + below, BINS / -below
        tl.store(listed + row, 0)
        tl.store(bins + row * COPIES * BINS + tl.arange(0, COPIES * BINS), tl.zeros([COPIES * BINS], tl.int64))
    elif kind == BARRED:
        floor = top + tl.log(least)
    tl.store(kinds + row, kind)
    tl.store(targets + row, (p * MASS).to(tl.int64))
    tl.store(plans + row * 4, top)
    tl.store(plans + row * 4 + 1, floor)
    tl.store(plans + row * 4 + 2, scale)
    tl.store(plans + row * 4 + 3, total)


@triton.jit
def plan_of(plans, row):
    at = plans + row * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def bin_of(s, above, top, scale, BINS: tl.constexpr):
    """Falls as s grows, the same for equal s; only for what is above the floor."""
    return tl.minimum((tl.where(above, top - s, 0.0) * scale).to(tl.int32), BINS - 1)


@triton.jit
def cut_bin(bins, row, target, BINS: tl.constexpr, COPIES: tl.constexpr):
    """The bin in which the target is reached, and what those above it weigh."""
    weights = tl.zeros([BINS], tl.int64)
    for copy in tl.static_range(COPIES):
        weights += tl.load(bins + (row * COPIES + copy) * BINS + tl.arange(0, BINS))
    sums = tl.cumsum(weights, 0)
    return tl.sum((sums < target).to(tl.int32), 0), tl.max(tl.where(sums < target, sums, 0), 0)


@triton.jit
def append(lists, listed, row, V, order, chosen):
    """Adds the chosen ones of a program's orders to the row's list."""
    ones = chosen.to(tl.int32)
    each = tl.sum(ones, 1)
    first = tl.atomic_add(listed + row, tl.sum(each, 0), sem="relaxed")
    place = (first + tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(ones, 1) - ones
    tl.store(lists + row * V + place, order, mask=chosen)


@triton.jit
def sift_kernel(
    given, tops, kinds, plans, listed, lists, bins, V, chunks,
    CHUNK: tl.constexpr, BINS: tl.constexpr, COPIES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What one chunk adds to its row's list or bins."""
    begin_early(OVERLAP)
    row, ids = chunk_of(chunks, CHUNK)
    kind = tl.load(kinds + row)
    top, floor, scale, total = plan_of(plans, row)
    if ((kind == LISTED) | (kind == BINNED)) & (tl.load(tops + tl.program_id(0)) >= floor):
        s = scores(given, row, ids, V)[1]
        above = (s >= floor) & (s > MINUS_INF)  # -inf is never drawn where anything else is
        if kind == LISTED:
            append(lists, listed, row, V, ordered(s, ids), above)
        else:
            copy = row * COPIES + tl.program_id(0) % COPIES  # of the bins: programs seldom wait for each other
            place = bins + copy * BINS + bin_of(s, above, top, scale, BINS)
            tl.atomic_add(place, share(s, top, total), mask=above, sem="relaxed")


@triton.jit
def draw_kernel(
    given, given_filters, seeds, positions, tops, best, kinds, plans, targets, listed, lists, bins, V, chunks,
    CHUNK: tl.constexpr, BINS: tl.constexpr, COPIES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The draw from what is surely left of one chunk; what may be left is listed."""
    begin_early(OVERLAP)
    row, ids = chunk_of(chunks, CHUNK)
    kind = tl.load(kinds + row)
    if (kind == BINNED) | (kind == BARRED):
        top, floor, scale, _ = plan_of(plans, row)
        drawn = tl.full([], NOTHING, tl.int64)
        if tl.load(tops + tl.program_id(0)) >= floor:
            p, least = filters(given_filters, row, V)[1:]
            s = scores(given, row, ids, V)[1]
            left = s >= floor
            if kind == BINNED:
                target = (p * MASS).to(tl.int64)
                last, beyond = cut_bin(bins, row, target, BINS, COPIES)
                tl.store(targets + row, target - beyond)  # the same from every program
                place = bin_of(s, left, top, scale, BINS)
                append(lists, listed, row, V, ordered(s, ids), left & (place == last))
                left = left & (place < last) & (s >= top + tl.log(least))
            drawn = largest(tl.where(left, noisy(seeds, positions, row, ids, s, CHUNK), NOTHING))
        tl.store(best + tl.program_id(0), drawn)


@triton.jit
def choose_kernel(
    temperature, given_filters, seeds, positions, tops, best, kinds, plans, targets, listed, lists, spares, out, V,
    chunks, out_stride, CHUNKS: tl.constexpr, FEW: tl.constexpr, PAIRED: tl.constexpr, LIST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The token of one row."""
    begin_early(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    kind = DECIDED if kinds is None else tl.load(kinds + row)
    chosen = tl.full([], NOTHING, tl.int64)
    if kind != LISTED:
        chunk = tl.arange(0, CHUNKS)
        each = tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=MINUS_INF)
        top = tl.max(each, 0)
        # Of a finite row, chunks of nothing but -inf do not count; of an infinite one, only chunks that are like it.
        least = tl.where((top == float("inf")) | (top == MINUS_INF), top, LEAST)
        least = tl.where(field(temperature, row, 1.0) == 0, MINUS_INF, least)
        counts = (each >= least) & (chunk < chunks)
        chosen = tl.max(tl.load(best + row * chunks + chunk, mask=counts, other=NOTHING), 0)
    if kinds is not None:
        k, p, least = filters(given_filters, row, V)
        if (kind == LISTED) | (kind == BINNED):
            top, total = tl.load(plans + row * 4), tl.load(plans + row * 4 + 3)
            bar = top + tl.log(least)
            many, target = tl.load(listed + row), tl.load(targets + row)
            lists += row * V
            limits = k, p, bar, target, top, total
            if many <= FEW:
                drawn = draw_few(lists, many, seeds, positions, row, limits, FEW, PAIRED)
            elif many <= 4 * FEW:
                drawn = draw_few(lists, many, seeds, positions, row, limits, 4 * FEW, PAIRED)
            else:
                drawn = draw_many(lists, spares + row * V, many, seeds, positions, row, limits, LIST)
            chosen = tl.maximum(chosen, drawn)
    tl.store(out + row * out_stride, id_of(chosen))


def sample(logits, params, seeds, positions, *, out=None):
    B, V = logits.shape
    ids = torch.empty(B, dtype=torch.int32, device=logits.device) if out is None else out
    if not B:
        return ids

    def scratch(dtype, *shape):
        return torch.empty(shape, dtype=dtype, device=logits.device)

    each = [None if values is None else values.contiguous() for values in params[:-1]]
    temperature, top_k, top_p, min_p, *penalties = each
    counts = params.counts if any(values is not None for values in penalties) else None
    strides = logits.stride(), (0, 0) if counts is None else counts.stride()
    given, filters = (logits, counts, temperature, *penalties, *strides), (top_k, top_p, min_p)
    draws = seeds.contiguous(), positions.contiguous()
    peak = max(PEAK, triton.next_power_of_2(triton.cdiv(V, PEAKS)))
    chunk = max(CHUNK, peak)
    chunks, blocks = triton.cdiv(V, chunk), triton.cdiv(V, peak)
    tops, best = scratch(torch.float32, B, chunks), scratch(torch.int64, B, chunks)
    peaks = masses = kinds = plans = targets = listed = lists = spares = bins = None
    if filtered := any(values is not None for values in filters):
        peaks, masses = scratch(torch.float32, B, blocks), scratch(torch.float32, B, chunks)
        kinds, plans, targets = scratch(torch.int32, B), scratch(torch.float32, B, 4), scratch(torch.int64, B)
        listed, bins = scratch(torch.int32, B), scratch(torch.int64, B, COPIES, BINS)
        lists, spares = scratch(torch.int64, B, V), scratch(torch.int64, B, V)
    options = {"num_warps": WARPS, "enable_fp_fusion": False, **overlap(logits.device)}
    wide, binned = triton.next_power_of_2(chunks), {"BINS": BINS, "COPIES": COPIES}
    score_kernel[(B * chunks,)](
        given, filters, *draws, tops, best, peaks, masses, V, chunks, blocks, CHUNK=chunk, PEAK=peak, **options
    )  # fmt: skip
    if filtered:
        plan_kernel[(B,)](
            temperature, filters, tops, peaks, masses, kinds, plans, targets, listed, bins, V, chunks, blocks,
            CHUNKS=wide, BLOCKS=triton.next_power_of_2(blocks), **binned, **options,
        )  # fmt: skip
    if top_k is not None or top_p is not None:
        sift_kernel[(B * chunks,)](
            given, tops, kinds, plans, listed, lists, bins, V, chunks, CHUNK=chunk, **binned, **options
        )  # fmt: skip
    if top_p is not None or min_p is not None:
        draw_kernel[(B * chunks,)](
            given, filters, *draws, tops, best, kinds, plans, targets, listed, lists, bins, V, chunks,
            CHUNK=chunk, **binned, **options,
        )  # fmt: skip
    choose_kernel[(B,)](
        temperature, filters, *draws, tops, best, kinds, plans, targets, listed, lists, spares, ids, V, chunks,
        ids.stride(0), CHUNKS=wide, FEW=FEW, PAIRED=PAIRED, LIST=LIST, **options,
    )  # fmt: skip
    return ids
