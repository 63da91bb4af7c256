"""The gated delta rule: S = g S;  S = S + beta (v - S k) k^T;  o = S q, for float32 states [slots, Hv, Dv, Dk].

Few tokens go one by one. A program keeps a few rows of one head's state in registers over all tokens of the call: one
read and one write of the state, every load of the first token issued before anything waits, and those of token t + 1
issued before token t is computed. A row is summed by one warp in one order, whatever the launch, so its bits do not
depend on the batch or on how tokens are cut into calls.

Many tokens go 64 at a time, in two launches. With decay[t, i] = g[i + 1] ... g[t] and since[t] = g[0] ... g[t], the
deltas U of a chunk solve (I + A) U = beta (v - since K S^T), where A[t, i] = beta[t] decay[t, i] k[t] . k[i] for i < t.

    chunk_matrices_kernel   all chunks at once: (I + A)^-1 beta, the masked decay q . k, and the decays
    chunk_scan_kernel       chunk after chunk, S in registers: U, o and the next S, five products of matrices

The scan is a chain, so all that does not depend on S is taken out of it; what is left is divided over heads and over
columns of values. Outputs are formed in the scan: a third launch would have to write and read a state for each chunk,
more bytes than everything else together.

The state is float32, and so must be all that flows into it. For bfloat16 activations a float32 factor is the sum of two float16
terms, 22 bits and their signs: two products on tensor cores, or three where both factors are float32, are as good as float32
ones. float16 has few exponents, so factors are first divided by a power of two; the terms reach 2^-39 of the largest number, and a
bound is as good as the largest. Terms are summed from the smallest up, and sums are added to S apart, because tensor cores cut
digits off where they add. Outputs are rounded to bfloat16, for which one term will do. Other dtypes multiply in IEEE float32.
"""

import triton
import triton.language as tl

from .device import INTERPRETED

EMULATED = tl.constexpr(INTERPRETED)  # the interpreter cannot multiply bfloat16 matrices


@triton.jit
def row_of(slots, b, NAMED: tl.constexpr):
    """Where request b lives in a state."""
    return tl.load(slots + b).to(tl.int64) if NAMED else b


@triton.jit
def load_token(q, k, v, g, beta, t, L, q_step, k_step, v_step, g_step, beta_step, key_mask, value_mask):
    """A token's query, key, values, decay and rate, from pointers to token 0. Past the last comes the last again."""
    t = tl.minimum(t, L - 1).to(tl.int64)
    query = tl.load(q + t * q_step, mask=key_mask, other=0.0).to(tl.float32)
    key = tl.load(k + t * k_step, mask=key_mask, other=0.0).to(tl.float32)
    value = tl.load(v + t * v_step, mask=value_mask, other=0.0).to(tl.float32)
    decay = tl.load(g + t * g_step).to(tl.float32)
    rate = tl.load(beta + t * beta_step).to(tl.float32)
    return query, key, value, decay, rate


@triton.jit(do_not_specialize=["L"])
def gated_delta_kernel(
    q, k, v, g, beta, state, into, slots, o,
    q_steps, k_steps, v_steps, g_steps, beta_steps, o_steps, L,
    state_steps: tl.constexpr, into_steps: tl.constexpr,
    GROUP: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, NAMED: tl.constexpr, IN_PLACE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """BLOCK_V rows of one head's state over all tokens."""
    row = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    key_mask, value_mask = column < Dk, row < Dv
    tile_mask = value_mask[:, None] & key_mask[None, :]
    wide_row, wide_column = row.to(tl.int64), column.to(tl.int64)
    q += b * q_steps[0] + h // GROUP * q_steps[2] + wide_column * q_steps[3]
    k += b * k_steps[0] + h // GROUP * k_steps[2] + wide_column * k_steps[3]
    v += b * v_steps[0] + h * v_steps[2] + wide_row * v_steps[3]
    o += b * o_steps[0] + h * o_steps[2] + wide_row * o_steps[3]
    g += b * g_steps[0] + h * g_steps[2]
    beta += b * beta_steps[0] + h * beta_steps[2]
    query, key, value, decay, rate = load_token(
        q, k, v, g, beta, 0, L,
        q_steps[1], k_steps[1], v_steps[1], g_steps[1], beta_steps[1], key_mask, value_mask,
    )  # fmt: skip
    source = row_of(slots, b, NAMED)
    state += source * state_steps[0] + h * state_steps[1]
    tile = wide_row[:, None] * state_steps[2] + wide_column[None, :] * state_steps[3]
    S = tl.load(state + tile, mask=tile_mask, other=0.0).to(tl.float32)
    for t in range(L):
        next_query, next_key, next_value, next_decay, next_rate = load_token(
            q, k, v, g, beta, t + 1, L,
            q_steps[1], k_steps[1], v_steps[1], g_steps[1], beta_steps[1], key_mask, value_mask,
        )  # fmt: skip
        S *= decay
        delta = (value - tl.sum(S * key[None, :], 1)) * rate
        S = tl.fma(tl.broadcast_to(delta[:, None], S.shape), tl.broadcast_to(key[None, :], S.shape), S)
        y = tl.sum(S * query[None, :], 1)
        tl.store(o + tl.cast(t, tl.int64) * o_steps[1], y.to(o.dtype.element_ty), mask=value_mask)
        query, key, value, decay, rate = next_query, next_key, next_value, next_decay, next_rate
    target = source if IN_PLACE else b
    into += target * into_steps[0] + h * into_steps[1]
    tile = wide_row[:, None] * into_steps[2] + wide_column[None, :] * into_steps[3]
    tl.store(into + tile, S.to(into.dtype.element_ty), mask=tile_mask)


@triton.jit
def unit_of(largest):
    """1 / u and u, a power of two by which numbers up to `largest` are divided to lie below 2^14."""
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 14)
    return ((267 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """x as the sum of two float16 tensors, the larger first."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def largest_of(x):
    return tl.max(tl.max(tl.abs(x), 1), 0)


@triton.jit
def upper_half(x):
    """float32 x cut to eight digits, in bfloat16, and what was cut off."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def terms(x, SPLIT: tl.constexpr):
    """float32 x as the sum of three bfloat16 tensors, the largest first: the range of float32, and all its digits."""
    if SPLIT:
        high, rest = upper_half(x)
        middle, rest = upper_half(rest)
        low, _ = upper_half(rest)
        return high, middle, low
    else:
        return x, x, x


@triton.jit
def times(a, b, SPLIT: tl.constexpr):
    """The product of two matrices given as terms, summed from the smallest up."""
    if SPLIT:
        total = tl.dot(a[1], b[1], tl.dot(a[0], b[2], tl.dot(a[2], b[0])))
        return tl.dot(a[0], b[0], tl.dot(a[0], b[1], tl.dot(a[1], b[0], total)))
    else:
        return tl.dot(a[0], b[0], input_precision="ieee")


@triton.jit
def inverse(A, row, column, SPLIT: tl.constexpr):
    """(I + A)^-1 for A [16, 16] below its diagonal. Inverses of blocks of 1, 2, 4 and 8 are merged two by two:

    (I + A)^-1 of two blocks = T - T A' T, where T has the inverse of each and A' is the part of A between them.
    This is substitution by blocks, stable where sums of powers of A are not: equal keys make those binomial coefficients.
    """
    T = tl.where(row == column, 1.0, 0.0) - tl.where((row == column + 1) & (row % 2 == 1), A, 0.0)
    for level in tl.static_range(1, 4):
        between = (row >> level == (column >> level) + 1) & ((row >> level) % 2 == 1)
        parts = terms(T, SPLIT)
        T -= times(terms(times(parts, terms(tl.where(between, A, 0.0), SPLIT), SPLIT), SPLIT), parts, SPLIT)
    return T


@triton.jit
def multiply(x, y):
    return x * y


@triton.jit
def load_rows(x, start, L, step, column_step, size, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens start, start + 1 ... of one head: [CHUNK, BLOCK], zeros where there are none."""
    t, column = start + tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    places = t.to(tl.int64)[:, None] * step + column.to(tl.int64)[None, :] * column_step
    return tl.load(x + places, mask=(t < L)[:, None] & (column < size)[None, :], other=0.0)


@triton.jit
def store_term(place, x, SPLIT: tl.constexpr):
    """x as one float16 term, or as it is; returns the unit of what was stored."""
    if SPLIT:
        shrink, unit = unit_of(largest_of(x))
        tl.store(place, (x * shrink).to(tl.float16))
        return unit
    else:
        tl.store(place, x)
        return 1.0


@triton.jit
def chunk_rows_kernel(
    q, k, queries, keys, units, q_steps, k_steps, L,
    Dk: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The keys and queries of one chunk and one key head as one term each and their units, padded with zeros."""
    chunk, kh, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    at = (b * tl.num_programs(0) + chunk) * tl.num_programs(1) + kh
    K = load_rows(k + b * k_steps[0] + kh * k_steps[2], chunk * CHUNK, L, k_steps[1], k_steps[3], Dk, CHUNK, BLOCK_K)
    Q = load_rows(q + b * q_steps[0] + kh * q_steps[2], chunk * CHUNK, L, q_steps[1], q_steps[3], Dk, CHUNK, BLOCK_K)
    tile = at * (CHUNK * BLOCK_K) + tl.arange(0, CHUNK)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tl.store(units + at * 2, store_term(keys + tile, K.to(tl.float32), SPLIT))
    tl.store(units + at * 2 + 1, store_term(queries + tile, Q.to(tl.float32), SPLIT))


@triton.jit
def decays_within(gate, i):
    """Of 16 tokens: decay[t, i] = g[i + 1] ... g[t]; from before the first to each token; from each to the last; of all.

    Products over spans, never quotients of running products: those of tiny decays leave the range of a float.
    """
    decay = tl.associative_scan(tl.where(i[:, None] > i[None, :], gate[:, None], 1.0), 0, multiply)
    since, until = tl.associative_scan(gate, 0, multiply), tl.sum(tl.where(i[:, None] == 15, decay, 0.0), 0)
    return decay, since, until, tl.sum(tl.where(i == 15, since, 0.0), 0)


@triton.jit
def outer(x, y):
    return x[:, None] * y[None, :]


@triton.jit
def block_of(K, Q, others, decay, rate, mix, unit, SHRINK: tl.constexpr):
    """The block of A for 16 tokens and 16 others, whose keys lie at `others`; that of decay q . k goes to `mix`."""
    turned = tl.trans(tl.load(others))
    mixed = decay * tl.dot(Q, turned, input_precision="ieee")
    tl.store(mix, (mixed * SHRINK).to(mix.dtype.element_ty))
    return rate[:, None] * decay * (tl.dot(K, turned, input_precision="ieee") * unit)


@triton.jit
def store_solve(place, x, shrink, SPLIT: tl.constexpr, CHUNK: tl.constexpr):
    if SPLIT:
        high, low = halves(x * shrink)
        tl.store(place, high)
        tl.store(place + CHUNK * CHUNK, low)
    else:
        tl.store(place, x)


@triton.jit
def chunk_matrices_kernel(
    g, beta, queries, keys, units, solve, mix, decays, scalars, g_steps, beta_steps, L,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, SHRINK: tl.constexpr,
):  # fmt: skip
    """Of one chunk and one value head, in blocks of 16 tokens: all that the scan needs and S does not change.

    solve = (I + A)^-1 beta, as two terms; mix = decay q . k on and below the diagonal, as one (both float32 where products are
    not split); decays since the start of the chunk and until its end; scalars: see load_scalars.
    """
    tl.static_assert(CHUNK == 64)
    TERMS: tl.constexpr = SPLIT and not EMULATED
    chunk, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = (b * tl.num_programs(0) + chunk) * tl.num_programs(1) + h
    key_unit, query_unit = tl.load(units + head // GROUP * 2), tl.load(units + head // GROUP * 2 + 1)
    i = tl.arange(0, 16)
    row, column = i[:, None], i[None, :]
    t = chunk * CHUNK + i
    g += b * g_steps[0] + t * g_steps[1] + h * g_steps[2]
    beta += b * beta_steps[0] + t * beta_steps[1] + h * beta_steps[2]
    gate0 = tl.load(g, mask=t < L, other=1.0).to(tl.float32)
    gate1 = tl.load(g + 16 * g_steps[1], mask=t + 16 < L, other=1.0).to(tl.float32)
    gate2 = tl.load(g + 32 * g_steps[1], mask=t + 32 < L, other=1.0).to(tl.float32)
    gate3 = tl.load(g + 48 * g_steps[1], mask=t + 48 < L, other=1.0).to(tl.float32)
    rate0 = tl.load(beta, mask=t < L, other=0.0).to(tl.float32)
    rate1 = tl.load(beta + 16 * beta_steps[1], mask=t + 16 < L, other=0.0).to(tl.float32)
    rate2 = tl.load(beta + 32 * beta_steps[1], mask=t + 32 < L, other=0.0).to(tl.float32)
    rate3 = tl.load(beta + 48 * beta_steps[1], mask=t + 48 < L, other=0.0).to(tl.float32)
    decay0, since0, until0, whole0 = decays_within(gate0, i)
    decay1, since1, until1, whole1 = decays_within(gate1, i)
    decay2, since2, until2, whole2 = decays_within(gate2, i)
    decay3, since3, until3, whole3 = decays_within(gate3, i)

    rows = head // GROUP * (CHUNK * BLOCK_K) + row * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    STEP: tl.constexpr = 16 * BLOCK_K
    DOWN: tl.constexpr = 16 * CHUNK
    keys, queries, unit, square = keys + rows, queries + rows, key_unit * key_unit, row * CHUNK + column
    mix += head * (CHUNK * CHUNK) + square
    on, below = row >= column, row > column
    K, Q = tl.load(keys), tl.load(queries)
    A00 = block_of(K, Q, keys, tl.where(on, decay0, 0.0), rate0, mix, unit, SHRINK)
    K, Q = tl.load(keys + STEP), tl.load(queries + STEP)
    A10 = block_of(K, Q, keys, outer(since1, until0), rate1, mix + DOWN, unit, SHRINK)
    A11 = block_of(K, Q, keys + STEP, tl.where(on, decay1, 0.0), rate1, mix + DOWN + 16, unit, SHRINK)
    K, Q = tl.load(keys + 2 * STEP), tl.load(queries + 2 * STEP)
    A20 = block_of(K, Q, keys, outer(since2 * whole1, until0), rate2, mix + 2 * DOWN, unit, SHRINK)
    A21 = block_of(K, Q, keys + STEP, outer(since2, until1), rate2, mix + 2 * DOWN + 16, unit, SHRINK)
    A22 = block_of(K, Q, keys + 2 * STEP, tl.where(on, decay2, 0.0), rate2, mix + 2 * DOWN + 32, unit, SHRINK)
    K, Q = tl.load(keys + 3 * STEP), tl.load(queries + 3 * STEP)
    A30 = block_of(K, Q, keys, outer(since3 * (whole1 * whole2), until0), rate3, mix + 3 * DOWN, unit, SHRINK)
    A31 = block_of(K, Q, keys + STEP, outer(since3 * whole2, until1), rate3, mix + 3 * DOWN + 16, unit, SHRINK)
    A32 = block_of(K, Q, keys + 2 * STEP, outer(since3, until2), rate3, mix + 3 * DOWN + 32, unit, SHRINK)
    A33 = block_of(K, Q, keys + 3 * STEP, tl.where(on, decay3, 0.0), rate3, mix + 3 * DOWN + 48, unit, SHRINK)

    T00 = inverse(tl.where(below, A00, 0.0), row, column, TERMS)
    T11 = inverse(tl.where(below, A11, 0.0), row, column, TERMS)
    T22 = inverse(tl.where(below, A22, 0.0), row, column, TERMS)
    T33 = inverse(tl.where(below, A33, 0.0), row, column, TERMS)
    # Substitution by blocks; the second letter of a name is for its terms.
    T00s, T11s, T22s, T33s = terms(T00, TERMS), terms(T11, TERMS), terms(T22, TERMS), terms(T33, TERMS)
    A21s, A31s, A32s = terms(A21, TERMS), terms(A31, TERMS), terms(A32, TERMS)
    T10 = -times(T11s, terms(times(terms(A10, TERMS), T00s, TERMS), TERMS), TERMS)
    T21 = -times(T22s, terms(times(A21s, T11s, TERMS), TERMS), TERMS)
    T32 = -times(T33s, terms(times(A32s, T22s, TERMS), TERMS), TERMS)
    T10s = terms(T10, TERMS)
    T20 = times(terms(A20, TERMS), T00s, TERMS) + times(A21s, T10s, TERMS)
    T20 = -times(T22s, terms(T20, TERMS), TERMS)
    T31 = times(A31s, T11s, TERMS) + times(A32s, terms(T21, TERMS), TERMS)
    T31 = -times(T33s, terms(T31, TERMS), TERMS)
    T30 = times(terms(A30, TERMS), T00s, TERMS) + times(A31s, T10s, TERMS) + times(A32s, terms(T20, TERMS), TERMS)
    T30 = -times(T33s, terms(T30, TERMS), TERMS)
    rate0, rate1, rate2, rate3 = rate0[None, :], rate1[None, :], rate2[None, :], rate3[None, :]
    T00, T10, T20, T30 = T00 * rate0, T10 * rate0, T20 * rate0, T30 * rate0
    T11, T21, T31, T22, T32, T33 = T11 * rate1, T21 * rate1, T31 * rate1, T22 * rate2, T32 * rate2, T33 * rate3
    largest = tl.maximum(tl.maximum(tl.abs(T00), tl.abs(T10)), tl.maximum(tl.abs(T20), tl.abs(T30)))
    largest = tl.maximum(largest, tl.maximum(tl.maximum(tl.abs(T11), tl.abs(T21)), tl.abs(T31)))
    largest = tl.maximum(largest, tl.maximum(tl.maximum(tl.abs(T22), tl.abs(T32)), tl.abs(T33)))
    solve_reach = largest_of(largest) * CHUNK
    shrink, _ = unit_of(solve_reach)
    solve += head * ((2 if SPLIT else 1) * CHUNK * CHUNK) + square
    store_solve(solve, T00, shrink, SPLIT, CHUNK)
    store_solve(solve + DOWN, T10, shrink, SPLIT, CHUNK)
    store_solve(solve + DOWN + 16, T11, shrink, SPLIT, CHUNK)
    store_solve(solve + 2 * DOWN, T20, shrink, SPLIT, CHUNK)
    store_solve(solve + 2 * DOWN + 16, T21, shrink, SPLIT, CHUNK)
    store_solve(solve + 2 * DOWN + 32, T22, shrink, SPLIT, CHUNK)
    store_solve(solve + 3 * DOWN, T30, shrink, SPLIT, CHUNK)
    store_solve(solve + 3 * DOWN + 16, T31, shrink, SPLIT, CHUNK)
    store_solve(solve + 3 * DOWN + 32, T32, shrink, SPLIT, CHUNK)
    store_solve(solve + 3 * DOWN + 48, T33, shrink, SPLIT, CHUNK)
    nothing = tl.zeros([16, 16], tl.float32)
    for r in tl.static_range(3):
        for c in tl.static_range(r + 1, 4):
            store_solve(solve + r * DOWN + c * 16, nothing, shrink, SPLIT, CHUNK)
            tl.store(mix + r * DOWN + c * 16, nothing.to(mix.dtype.element_ty))

    place = decays + head * (2 * CHUNK) + i
    tl.store(place, since0)
    tl.store(place + 16, since1 * whole0)
    tl.store(place + 32, since2 * (whole0 * whole1))
    tl.store(place + 48, since3 * (whole0 * whole1 * whole2))
    tl.store(place + CHUNK, until0 * (whole1 * whole2 * whole3))
    tl.store(place + CHUNK + 16, until1 * (whole2 * whole3))
    tl.store(place + CHUNK + 32, until2 * whole3)
    tl.store(place + CHUNK + 48, until3)
    place = scalars + head * 4
    tl.store(place, whole0 * whole1 * whole2 * whole3)
    tl.store(place + 1, key_unit)
    tl.store(place + 2, query_unit)
    tl.store(place + 3, solve_reach)


@triton.jit
def load_scalars(scalars, head):
    """Of a chunk and value head: its whole decay, the units of its keys and queries, and a bound on the sums of
    rows of its inverse."""
    place = scalars + head * 4
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)


@triton.jit
def chunk_scan_kernel(
    v, state, into, slots, o, queries, keys, solve, mix, decays, scalars,
    v_steps, state_steps, into_steps, o_steps,
    L, Hv,
    GROUP: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, NAMED: tl.constexpr, IN_PLACE: tl.constexpr,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, SHRINK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's values, chunk after chunk. S lies here as [Dk, values]."""
    first, h, b = tl.program_id(0).to(tl.int64) * BLOCK_V, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column, width = tl.arange(0, BLOCK_K).to(tl.int64), Dv - first
    value = tl.arange(0, BLOCK_V).to(tl.int64)
    tile_mask = (column < Dk)[:, None] & (value < width)[None, :]
    v += b * v_steps[0] + h * v_steps[2] + first * v_steps[3]
    o += b * o_steps[0] + h * o_steps[2] + first * o_steps[3] + value[None, :] * o_steps[3]
    source = row_of(slots, b, NAMED)
    state += source * state_steps[0] + h * state_steps[1] + first * state_steps[2]
    S = tl.load(state + column[:, None] * state_steps[3] + value[None, :] * state_steps[2], mask=tile_mask, other=0.0)
    S = S.to(tl.float32)
    i = tl.arange(0, CHUNK)
    tile = i[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    square = i[:, None] * CHUNK + i[None, :]
    chunks = tl.cdiv(L, CHUNK)
    ahead = load_scalars(scalars, b * chunks * Hv + h)
    for chunk in range(chunks):
        start = chunk * CHUNK
        head = (b * chunks + chunk) * Hv + h
        whole, key_unit, query_unit, solve_reach = ahead
        ahead = load_scalars(scalars, (b * chunks + tl.minimum(chunk + 1, chunks - 1)) * Hv + h)
        K = tl.load(keys + head // GROUP * (CHUNK * BLOCK_K) + tile)
        V = load_rows(v, start, L, v_steps[1], v_steps[3], width, CHUNK, BLOCK_V).to(tl.float32)
        since = tl.load(decays + head * (2 * CHUNK) + i)
        until = tl.load(decays + head * (2 * CHUNK) + CHUNK + i)
        if SPLIT:
            T_high = tl.load(solve + head * (2 * CHUNK * CHUNK) + square)
            T_low = tl.load(solve + head * (2 * CHUNK * CHUNK) + CHUNK * CHUNK + square)
            Q = tl.load(queries + head // GROUP * (CHUNK * BLOCK_K) + tile)
            M = tl.load(mix + head * (CHUNK * CHUNK) + square)
            largest = largest_of(S)
            shrink, unit = unit_of(largest)
            high, low = halves(S * shrink)
            R = V - (since * (key_unit * unit))[:, None] * tl.dot(K, high, tl.dot(K, low))
            y = (since * (query_unit * unit))[:, None] * tl.dot(Q, high)
            reach = largest_of(V) + key_unit * (16384.0 * BLOCK_K) * largest
            shrink, unit = unit_of(reach)
            _, solve_unit = unit_of(solve_reach)
            high, low = halves(R * shrink)
            U = tl.dot(T_high, high, tl.dot(T_low, high, tl.dot(T_high, low))) * (solve_unit * unit)
            shrink, unit = unit_of(solve_reach * reach)
            U *= shrink
            y += (key_unit * query_unit / SHRINK * unit) * tl.dot(M, U.to(tl.float16))
            high, low = halves(until[:, None] * U)
            S = whole * S + (key_unit * unit) * tl.dot(tl.trans(K), high, tl.dot(tl.trans(K), low))
        else:
            R = V - since[:, None] * tl.dot(K, S, input_precision="ieee")
            T = tl.load(solve + head * (CHUNK * CHUNK) + square)
            U = tl.dot(T, R, input_precision="ieee")
            Q = tl.load(queries + head // GROUP * (CHUNK * BLOCK_K) + tile)
            y = since[:, None] * tl.dot(Q, S, input_precision="ieee")
            M = tl.load(mix + head * (CHUNK * CHUNK) + square)
            y += tl.dot(M, U, input_precision="ieee")
            S = whole * S + tl.dot(tl.trans(K), until[:, None] * U, input_precision="ieee")
        t = (start + i).to(tl.int64)
        mask = (t < L)[:, None] & (value < width)[None, :]
        tl.store(o + t[:, None] * o_steps[1], y.to(o.dtype.element_ty), mask=mask)
    target = source if IN_PLACE else b
    into += target * into_steps[0] + h * into_steps[1] + first * into_steps[2]
    places = column[:, None] * into_steps[3] + value[None, :] * into_steps[2]
    tl.store(into + places, S.to(into.dtype.element_ty), mask=tile_mask)
