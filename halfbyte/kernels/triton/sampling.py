"""Sampling without sorting the vocabulary: at most three launches, whatever the filters.

A token's score and id make one integer that orders tokens as the op does: larger scores first, then lower ids. A draw
is then the largest integer of s + g, and what top-k and top-p leave is everything from one integer up: the cut.

1. `score_kernel`: many programs a row. Each chunk's largest logit, largest s + g and sum of exp, and the peak of
   each block. Rows without filters are then decided but for the last maximum.
2. `gather_kernel`: the peaks, or the mass that a tail can have at most, bound the cut from below; what is above the
   bound is copied to a list. The places in it come from a counter, so their order is chance, but nothing depends on it.
3. `choose_kernel`: one program a row bisects the list to the cut, for top-k, then for top-p, and draws from the rest.

Counts and masses are integers (a mass in units of 2^-62 of the row), so sums do not depend on their order.
"""

import torch
import triton
import triton.language as tl

# 2026-11-15, chosen for an H200 and 248320 tokens.
CHUNK = 2048  # tokens a program of the first two kernels has
PEAK = 256  # tokens of a block, at least
PEAKS = 1024  # blocks of a row, at most: every gathering program looks at all of them
LIST = 2048  # listed tokens that are looked at together
WARPS = 8
MINUS_INF = tl.constexpr(float("-inf"))
LAST_ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-(2**63))  # below every token
MASS = tl.constexpr(2.0**62)  # of a whole row
TERM = tl.constexpr(2.0**40)  # of the largest exp in a sum of up to 2^22


@triton.jit
def rank(value):
    """An integer that grows with the value; -0 equals 0."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ranked(bits):
    """The value of a rank."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ordered(value, ids):
    """An integer that grows with the value and, among equal values, falls with the id."""
    return (rank(value).to(tl.int64) << 32) | (ids ^ LAST_ID).to(tl.int64)


@triton.jit
def value_of(order):
    return ranked((order >> 32).to(tl.int32))


@triton.jit
def id_of(order):
    return (order & LAST_ID).to(tl.int32) ^ LAST_ID


@triton.jit
def finite(top):
    """What to subtract before exp; a row of nothing but -inf has no largest."""
    return tl.where(top == MINUS_INF, 0.0, top)


@triton.jit
def field(values, row, off: tl.constexpr):
    """A row's parameter, or what it is when it is off."""
    return off if values is None else tl.load(values + row).to(tl.float32)


@triton.jit
def scores(logits, counts, temperature, repetition, presence, frequency, row, ids, V, logit_strides, count_strides):
    """(x, s): logits after the penalties, and divided by the temperature; -inf for NaN and past the end.

    Every operation rounds as in the torch body, so that both compare the same numbers.
    """
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
def gumbel(bits):
    """-log(-log(u)) of a uniform u inside (0, 1) that is exact in float32."""
    u = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(u))


@triton.jit
def words(seeds, positions, row, block):
    """Four random words for the tokens 4 block .. 4 block + 3."""
    position = tl.load(positions + row).to(tl.int64)
    near = (position & 0xFFFFFFFF).to(tl.uint32) + tl.zeros_like(block).to(tl.uint32)
    far = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + tl.zeros_like(near)
    return tl.philox(tl.load(seeds + row), block.to(tl.uint32), near, far, tl.zeros_like(near), 10)


@triton.jit
def score_kernel(
    logits, counts, temperature, repetition, presence, frequency, seeds, positions, peaks, tops, masses, largest, drawn,
    listed, V, chunks, blocks, logit_strides, count_strides,
    CHUNK: tl.constexpr, PEAK: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """One chunk of a row: what it says of the row's maximum, draw and mass."""
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    # Eight tokens a thread: 16 bytes of bfloat16, and two counters.
    octet = chunk * (CHUNK // 8) + tl.arange(0, CHUNK // 8)
    ids = octet[:, None] * 8 + tl.arange(0, 8)
    x, s = scores(
        logits, counts, temperature, repetition, presence, frequency, row, ids, V, logit_strides, count_strides
    )
    if field(temperature, row, 1.0) != 0:
        a, b, c, d = words(seeds, positions, row, octet[:, None] * 2 + tl.arange(0, 2))
        bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (CHUNK // 8, 8))
        tl.store(drawn + tl.program_id(0), tl.max(tl.reshape(ordered(s + gumbel(bits), ids), (CHUNK,)), 0))
    tl.store(largest + tl.program_id(0), tl.max(tl.reshape(ordered(x, ids), (CHUNK,)), 0))
    peak = tl.max(tl.reshape(s, (CHUNK // PEAK, PEAK)), 1)
    top = tl.max(peak, 0)
    tl.store(tops + tl.program_id(0), top)
    if FILTERED:
        block = chunk * (CHUNK // PEAK) + tl.arange(0, CHUNK // PEAK)
        tl.store(peaks + row * blocks + block, peak, mask=block < blocks)
        mass = tl.sum(tl.reshape(tl.exp(s - finite(top)), (CHUNK,)), 0)
        tl.store(masses + tl.program_id(0), mass)
        tl.store(listed + row, 0, mask=chunk == 0)


@triton.jit
def row_state(tops, masses, temperature, top_k, top_p, min_p, row, chunks, V, CHUNKS: tl.constexpr):
    """A row's largest s, its sum of exp(s - largest), and its filters (k, p, least), each 0, 1 and 0 where off."""
    chunk = tl.arange(0, CHUNKS)
    each = tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=MINUS_INF)
    mass = tl.load(masses + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    top = tl.max(each, 0)
    total = tl.sum(mass * tl.exp(each - finite(top)), 0)
    sure = (top == float("inf")) | (top == MINUS_INF) | (field(temperature, row, 1.0) == 0)
    k = 0 if top_k is None else tl.load(top_k + row)
    k = tl.where((k >= V) | sure, 0, k)
    p = tl.full([], 1.0, tl.float64) if top_p is None else tl.load(top_p + row).to(tl.float64)
    p = tl.where(sure, 1.0, p)
    least = tl.where(sure, 0.0, field(min_p, row, 0.0))
    return top, total, k, p, least


@triton.jit
def reach(each, k, many):
    """A rank that at least k of the `many` largest of `each` reach, and few more than k."""
    low, high = tl.min(each, 0), tl.max(each, 0)
    many += tl.zeros_like(low)  # an argument of 1 is a constant, which a loop cannot change
    while (many > 2 * k) & (low < high):
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # their difference may overflow
        above = tl.sum((each >= middle).to(tl.int32), 0)
        low, high = tl.where(above >= k, middle, low), tl.where(above >= k, high, middle - 1)
        many = tl.where(above >= k, above, many)
    return low


@triton.jit
def gather_kernel(
    logits, counts, temperature, repetition, presence, frequency, top_k, top_p, min_p, peaks, tops, masses, listed,
    lists, V, chunks, blocks, logit_strides, count_strides,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Lists the tokens of a chunk that the cut may leave."""
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    top, total, k, p, least = row_state(tops, masses, temperature, top_k, top_p, min_p, row, chunks, V, CHUNKS)
    if (k > 0) | (p < 1) | (least > 0):
        floor = MINUS_INF
        if k > 0:
            if k <= blocks:
                # k blocks have a token above the k-th largest peak.
                block = tl.arange(0, BLOCKS)
                peak = tl.load(peaks + row * blocks + block, mask=block < blocks, other=MINUS_INF)
                floor = ranked(reach(rank(peak), k, blocks))
        elif p < 1:
            # All below the floor together weigh at most V exp(floor - top), here a little less than (1 - p) total.
            floor = top + tl.log(((1 - p) * total / V).to(tl.float32)) - 0.01
        else:
            floor = top + tl.log(least)
        if tl.load(tops + tl.program_id(0)) >= floor:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            _, s = scores(
                logits, counts, temperature, repetition, presence, frequency, row, ids, V, logit_strides, count_strides
            )
            above = (s >= floor) & (s > MINUS_INF)  # -inf is never drawn where anything else is
            inside = above.to(tl.int32)
            first = tl.atomic_add(listed + row, tl.sum(inside, 0), sem="relaxed")
            place = first + tl.cumsum(inside, 0) - inside
            tl.store(lists + row * V + place, ordered(s, ids), mask=above)


@triton.jit
def weigh(order, top, total, ONES: tl.constexpr):
    """What a token counts towards its cut: one, or its probability in units of 2^-62."""
    if ONES:
        return tl.full(order.shape, 1, tl.int64)
    else:
        return (tl.div_rn(tl.exp(value_of(order) - top), total) * MASS).to(tl.int64)


@triton.jit
def weigh_between(list, many, low, middle, high, top, total, ONES: tl.constexpr, LIST: tl.constexpr):
    """(weight, count, least) of the listed tokens from `middle` up to below `high`, and one past the largest of those
    from `low` up to below `middle`."""
    weight, count = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    least, past = high, low
    for first in range(0, many, LIST):
        at = first + tl.arange(0, LIST)
        order = tl.load(list + at, mask=at < many, other=NOTHING)
        between = (order >= middle) & (order < high)
        weight += tl.sum(tl.where(between, weigh(order, top, total, ONES), 0), 0)
        count += tl.sum(between.to(tl.int32), 0)
        least = tl.minimum(least, tl.min(tl.where(between, order, high), 0))
        past = tl.maximum(past, tl.max(tl.where((order >= low) & (order < middle), order + 1, low), 0))
    return weight, count, least, past


@triton.jit
def keep_between(list, many, low, high, kept, LIST: tl.constexpr):
    """Copies the tokens from `low` up to below `high` to `kept`, which may be `list`: a chunk is read, then written."""
    count = tl.full([], 0, tl.int32)
    for first in range(0, many, LIST):
        at = first + tl.arange(0, LIST)
        order = tl.load(list + at, mask=at < many, other=NOTHING)
        between = (order >= low) & (order < high)
        ones = between.to(tl.int32)
        tl.store(kept + count + tl.cumsum(ones, 0) - ones, order, mask=between)
        count += tl.sum(ones, 0)
        tl.debug_barrier()


@triton.jit
def cut(list, spare, many, low, target, top, total, ONES: tl.constexpr, LIST: tl.constexpr):
    """The least token of the fewest largest, from `low` up, that weigh the target together; `low` if all do not."""
    high = ordered(top, tl.zeros_like(many)) + 1
    weight, between, low, _ = weigh_between(list, many, low, low, high, top, total, ONES, LIST)
    between = tl.where(weight < target, 0, between)
    beyond = tl.zeros_like(target)
    # Tokens from `low` up weigh the target, those from `high` up do not: until only one is between. Both ends move on
    # to the next token, so that equal values, whose orders are close together, cost no more halvings than others.
    while between > 1:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        weight, above, least, past = weigh_between(list, many, low, middle, high, top, total, ONES, LIST)
        enough = beyond + weight >= target
        low, high = tl.where(enough, least, low), tl.where(enough, high, past)
        beyond, between = tl.where(enough, beyond, beyond + weight), tl.where(enough, above, between - above)
        if (many > LIST) & (2 * between <= many):
            keep_between(list, many, low, high, spare, LIST)
            list, many = spare, between
    return low


@triton.jit
def choose_kernel(
    temperature, top_k, top_p, min_p, seeds, positions, tops, masses, largest, drawn, listed, lists, spares,
    out, V, chunks, out_stride, CHUNKS: tl.constexpr, LIST: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """The token of one row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    top = tl.max(tl.load(tops + row * chunks + chunk, mask=inside, other=MINUS_INF), 0)
    sure = (top == float("inf")) | (top == MINUS_INF) | (field(temperature, row, 1.0) == 0)
    best = tl.where(sure, largest, drawn)
    chosen = tl.max(tl.load(best + row * chunks + chunk, mask=inside, other=NOTHING), 0)
    if FILTERED:
        top, total, k, p, least = row_state(tops, masses, temperature, top_k, top_p, min_p, row, chunks, V, CHUNKS)
        if (k > 0) | (p < 1) | (least > 0):
            many = tl.load(listed + row)
            lists += row * V
            spares += row * V
            low = tl.full([], NOTHING + 1, tl.int64)  # below every token, above what is past the end of the list
            if k > 0:
                low = cut(lists, spares, many, low, k.to(tl.int64), top, total, True, LIST)
            if p < 1:
                if k > 0:
                    terms = tl.full([], 0, tl.int64)
                    for first in range(0, many, LIST):
                        at = first + tl.arange(0, LIST)
                        order = tl.load(lists + at, mask=at < many, other=NOTHING)
                        kept = (order >= low) & (at < many)
                        terms += tl.sum(tl.where(kept, (tl.exp(value_of(order) - top) * TERM).to(tl.int64), 0), 0)
                    total = (terms.to(tl.float64) / TERM).to(tl.float32)
                low = cut(lists, spares, many, low, (p * MASS).to(tl.int64), top, total, False, LIST)
            bar = top + tl.log(least)
            chosen = tl.full([], NOTHING, tl.int64)
            for first in range(0, many, LIST):
                at = first + tl.arange(0, LIST)
                order = tl.load(lists + at, mask=at < many, other=NOTHING)
                s, ids = value_of(order), id_of(order)
                a, b, c, d = words(seeds, positions, row, ids // 4)
                lane = ids % 4
                bits = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
                kept = (order >= low) & (s >= bar) & (at < many)
                noisy = tl.where(kept, ordered(s + gumbel(bits), ids), NOTHING)
                chosen = tl.maximum(chosen, tl.max(noisy, 0))
    tl.store(out + row * out_stride, id_of(chosen))


def sample(logits, params, seeds, positions, *, out=None):
    B, V = logits.shape
    ids = torch.empty(B, dtype=torch.int32, device=logits.device) if out is None else out
    if not B:
        return ids

    def scratch(dtype, *shape):
        return torch.empty(shape, dtype=dtype, device=logits.device)

    each = [None if values is None else values.contiguous() for values in params[:-1]]
    temperature, top_k, top_p, min_p, repetition, presence, frequency = each
    penalised = repetition is not None or presence is not None or frequency is not None
    counts = params.counts if penalised else None
    peak = max(PEAK, triton.next_power_of_2(triton.cdiv(V, PEAKS)))
    chunk = max(CHUNK, peak)
    chunks, blocks = triton.cdiv(V, chunk), triton.cdiv(V, peak)
    filtered = top_k is not None or top_p is not None or min_p is not None
    tops, largest, drawn = (scratch(d, B, chunks) for d in (torch.float32, torch.int64, torch.int64))
    peaks = masses = listed = lists = spares = None
    if filtered:
        peaks, masses = scratch(torch.float32, B, blocks), scratch(torch.float32, B, chunks)
        listed, lists, spares = (scratch(torch.int32, B), *(scratch(torch.int64, B, V) for _ in range(2)))
    given = logits, counts, temperature, repetition, presence, frequency
    strides = logits.stride(), (0, 0) if counts is None else counts.stride()
    seeds, positions = seeds.contiguous(), positions.contiguous()
    score_kernel[(B * chunks,)](
        *given, seeds, positions, peaks, tops, masses, largest, drawn, listed, V, chunks, blocks, *strides,
        CHUNK=chunk, PEAK=peak, FILTERED=filtered, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    wide = {"CHUNKS": triton.next_power_of_2(chunks), "enable_fp_fusion": False}
    if filtered:
        gather_kernel[(B * chunks,)](
            *given, top_k, top_p, min_p, peaks, tops, masses, listed, lists, V, chunks, blocks, *strides,
            CHUNK=chunk, BLOCKS=triton.next_power_of_2(blocks), num_warps=WARPS, **wide,
        )  # fmt: skip
    choose_kernel[(B,)](
        temperature, top_k, top_p, min_p, seeds, positions, tops, masses, largest, drawn, listed, lists, spares,
        ids, V, chunks, ids.stride(0),
        LIST=LIST, FILTERED=filtered, num_warps=WARPS, **wide,
    )  # fmt: skip
    return ids
