"""A draw from a list of tokens: those that top-k and top-p leave, the cut, and of these the largest s + g.

A token's score and id make one integer, its order: larger scores first, then lower ids. A list holds orders, in any
order. Where it is short all pairs are compared, else it is bisected.
"""

import triton
import triton.language as tl

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
def share(s, top, total):
    """A token's probability in units of 2^-62."""
    return (tl.div_rn(tl.exp(s - top), total) * MASS).to(tl.int64)


@triton.jit
def weigh_between(list, many, low, middle, high, top, total, ONES: tl.constexpr, LIST: tl.constexpr):
    """(weight, count, least) of the listed tokens from `middle` up to below `high`, and one past the largest of those
    from `low` up to below `middle`."""
    weights, counts = tl.zeros([LIST], tl.int64), tl.zeros([LIST], tl.int32)
    least, past = tl.zeros([LIST], tl.int64) + high, tl.zeros([LIST], tl.int64) + low
    for first in range(0, many, LIST):
        at = first + tl.arange(0, LIST)
        order = tl.load(list + at, mask=at < many, other=NOTHING)
        between = (order >= middle) & (order < high)
        if not ONES:
            weights += tl.where(between, share(value_of(order), top, total), 0)
        counts += between.to(tl.int32)
        least = tl.minimum(least, tl.where(between, order, high))
        past = tl.maximum(past, tl.where((order >= low) & (order < middle), order + 1, low))
    count = tl.sum(counts, 0)
    weight = count.to(tl.int64) if ONES else tl.sum(weights, 0)
    return weight, count, tl.min(least, 0), tl.max(past, 0)


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
def noisy_listed(seeds, positions, row, order, left):
    """The largest order of s + g of some listed tokens."""
    ids = id_of(order)
    a, b, c, d = words(seeds, positions, row, ids // 4)
    lane = ids % 4
    bits = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
    return tl.max(tl.where(left, ordered(value_of(order) + gumbel(bits), ids), NOTHING), 0)


@triton.jit
def terms(order, left, top):
    """The sum of exp(s - largest) in units of 2^-40."""
    return tl.sum(tl.where(left, (tl.exp(value_of(order) - top) * TERM).to(tl.int64), 0), 0)


@triton.jit
def draw_few(list, many, seeds, positions, row, limits, FEW: tl.constexpr, PAIRED: tl.constexpr):
    """The draw from a short list: a token is left if fewer than k, and less than the target, are above it."""
    k, p, bar, target, top, total = limits
    at = tl.arange(0, FEW)
    order = tl.load(list + at, mask=at < many, other=NOTHING)
    left = at < many
    if k > 0:
        above = tl.zeros([FEW], tl.int32)
        for first in range(0, many, PAIRED):
            near = first + tl.arange(0, PAIRED)
            other = tl.load(list + near, mask=near < many, other=NOTHING)
            above += tl.sum((other[None, :] > order[:, None]).to(tl.int32), 1)
        left = left & (above < k)
        total = (terms(order, left, top).to(tl.float64) / TERM).to(tl.float32)
    if p < 1:
        # All above a token that top-k left were left too.
        mass = tl.zeros([FEW], tl.int64)
        for first in range(0, many, PAIRED):
            near = first + tl.arange(0, PAIRED)
            other = tl.load(list + near, mask=near < many, other=NOTHING)
            weight = tl.where(near < many, share(value_of(other), top, total), 0)
            mass += tl.sum(tl.where(other[None, :] > order[:, None], weight[None, :], 0), 1)
        left = left & (mass < target)
    return noisy_listed(seeds, positions, row, order, left & (value_of(order) >= bar))


@triton.jit
def draw_many(list, spare, many, seeds, positions, row, limits, LIST: tl.constexpr):
    """The draw from a long list."""
    k, p, bar, target, top, total = limits
    low = tl.full([], NOTHING + 1, tl.int64)  # below every token, above what is past the end of the list
    if k > 0:
        low = cut(list, spare, many, low, k.to(tl.int64), top, total, True, LIST)
        sums = tl.full([], 0, tl.int64)
        for first in range(0, many, LIST):
            at = first + tl.arange(0, LIST)
            order = tl.load(list + at, mask=at < many, other=NOTHING)
            sums += terms(order, order >= low, top)
        total = (sums.to(tl.float64) / TERM).to(tl.float32)
    if p < 1:
        low = cut(list, spare, many, low, target, top, total, False, LIST)
    chosen = tl.full([], NOTHING, tl.int64)
    for first in range(0, many, LIST):
        at = first + tl.arange(0, LIST)
        order = tl.load(list + at, mask=at < many, other=NOTHING)
        left = (order >= low) & (value_of(order) >= bar)
        chosen = tl.maximum(chosen, noisy_listed(seeds, positions, row, order, left))
    return chosen
