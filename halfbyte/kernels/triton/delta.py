"""The gated delta rule: S = g S;  S = S + beta (v - S k) k^T;  o = S q, for float32 states [slots, Hv, Dv, Dk].

Few tokens go one by one. A program keeps a few rows of one head's state in registers over all tokens of the call: one
read and one write of the state, every load of the first token issued before anything waits, and those of token t + 1
issued before token t is computed. A row is summed by one warp in one order, whatever the launch, so its bits do not
depend on the batch or on how tokens are cut into calls.

Many tokens go 64 at a time. With decay[t, i] = g[i + 1] ... g[t] and since[t] = g[0] ... g[t], the deltas U of a chunk
solve (I + A) U = beta (v - since K S^T), where A[t, i] = beta[t] decay[t, i] k[t] . k[i] for i < t.

    chunk_matrices_kernel   all chunks at once: (I + A)^-1 beta, the masked decay q . k, the decays, keys and queries
    chunk_scan_kernel       chunk after chunk, S in registers: U, o and the next S, five products of matrices

The scan is a chain, so all that does not depend on S is taken out of it; what is left is divided over heads and over
columns of values. Outputs are formed in the scan: a launch of their own would have to write and read a state for each
chunk, more bytes than everything else together.

The state is float32, and so must be all that flows into it. For bfloat16 activations a float32 factor of the scan is
the sum of two float16 terms, 22 bits and their signs: two products on tensor cores, or three where both factors are
float32, are as good as float32 ones. float16 has few exponents, so factors are first divided by a power of two, their
unit; the terms then reach 2^-39 of the largest number, so that a bound is as good as the largest. Sums are formed
apart from S, because tensor cores cut digits off where they add. Outputs are rounded to bfloat16, for which one term
will do. Other dtypes multiply in IEEE float32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .elementary import rounded


@triton.jit
def row_of(slots, b, NAMED: tl.constexpr):
    """Where request b lives in a state."""
    return tl.load(slots + b).to(tl.int64) if NAMED else b


@triton.jit
def load_token(q, k, v, g, beta, t, L, q_step, k_step, v_step, g_step, beta_step, key_mask, value_mask):
    """A token's query, key, values, decay and rate, from pointers to token 0. Past the last comes the last again."""
    t = tl.minimum(t, L - 1).to(tl.int64)
    query = tl.load(q + t * q_step, mask=key_mask, other=0.0)
    key = tl.load(k + t * k_step, mask=key_mask, other=0.0)
    value = tl.load(v + t * v_step, mask=value_mask, other=0.0)
    return query, key, value, tl.load(g + t * g_step), tl.load(beta + t * beta_step)


@triton.jit(do_not_specialize=["L"])
def gated_delta_kernel(
    q, k, v, g, beta, state, into, slots, o,
    q_steps, k_steps, v_steps, g_steps, beta_steps, o_steps, L,
    state_steps: tl.constexpr, into_steps: tl.constexpr,
    GROUP: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, NAMED: tl.constexpr, IN_PLACE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_V rows of one head's state over all tokens. With OVERLAP it is launched while the kernel before it ends."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, BLOCK_K).to(tl.int64)
    key_mask, value_mask = column < Dk, row < Dv
    tile_mask = value_mask[:, None] & key_mask[None, :]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    source = row_of(slots, b, NAMED)
    state += source * state_steps[0] + h * state_steps[1]
    tile = row[:, None] * state_steps[2] + column[None, :] * state_steps[3]
    S = tl.load(state + tile, mask=tile_mask, other=0.0).to(tl.float32)
    q += b * q_steps[0] + h // GROUP * q_steps[2] + column * q_steps[3]
    k += b * k_steps[0] + h // GROUP * k_steps[2] + column * k_steps[3]
    v += b * v_steps[0] + h * v_steps[2] + row * v_steps[3]
    o += b * o_steps[0] + h * o_steps[2] + row * o_steps[3]
    g += b * g_steps[0] + h * g_steps[2]
    beta += b * beta_steps[0] + h * beta_steps[2]
    query, key, value, decay, rate = load_token(
        q, k, v, g, beta, 0, L,
        q_steps[1], k_steps[1], v_steps[1], g_steps[1], beta_steps[1], key_mask, value_mask,
    )  # fmt: skip
    for t in range(L):
        next_query, next_key, next_value, next_decay, next_rate = load_token(
            q, k, v, g, beta, t + 1, L,
            q_steps[1], k_steps[1], v_steps[1], g_steps[1], beta_steps[1], key_mask, value_mask,
        )  # fmt: skip
        S *= decay.to(tl.float32)
        wide = key.to(tl.float32)[None, :]
        delta = (value.to(tl.float32) - tl.sum(S * wide, 1)) * rate.to(tl.float32)
        S = tl.fma(tl.broadcast_to(delta[:, None], S.shape), tl.broadcast_to(wide, S.shape), S)
        y = tl.sum(S * query.to(tl.float32)[None, :], 1)
        tl.store(o + tl.cast(t, tl.int64) * o_steps[1], rounded(y, o.dtype.element_ty), mask=value_mask)
        query, key, value, decay, rate = next_query, next_key, next_value, next_decay, next_rate
    target = source if IN_PLACE else b
    into += target * into_steps[0] + h * into_steps[1]
    tile = row[:, None] * into_steps[2] + column[None, :] * into_steps[3]
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
def quarters(x, HALF: tl.constexpr):
    """The four blocks of a square matrix: upper left, lower left, upper right, lower right."""
    left, right = tl.split(tl.permute(tl.reshape(x, [2, HALF, 2, HALF]), [1, 3, 0, 2]))
    upper_left, lower_left = tl.split(left)
    upper_right, lower_right = tl.split(right)
    return upper_left, lower_left, upper_right, lower_right


@triton.jit
def lower_triangle(upper_left, lower_left, lower_right, HALF: tl.constexpr):
    """The square matrix of three blocks, with zeros in its upper right."""
    left = tl.join(upper_left, lower_left)
    right = tl.join(tl.zeros_like(upper_left), lower_right)
    return tl.reshape(tl.permute(tl.join(left, right), [2, 0, 3, 1]), [2 * HALF, 2 * HALF])


@triton.jit
def merge_inverses(upper_left, lower_left, lower_right, HALF: tl.constexpr):
    """The inverse of a lower triangle, from the inverses of its two diagonal blocks and the block between them."""
    between = tl.dot(lower_right, lower_left, input_precision="ieee")
    between = tl.dot(between, upper_left, input_precision="ieee")
    return lower_triangle(upper_left, -between, lower_right, HALF)


@triton.jit
def inverse(A, CHUNK: tl.constexpr):
    """(I + A)^-1 for A [64, 64] below its diagonal: four blocks of 16 by substitution, side by side, then merged.

    Substitution is stable where powers of A are not: equal keys make their entries binomial coefficients.
    """
    tl.static_assert(CHUNK == 64)
    blocks = tl.reshape(A, [4, 16, 4, 16])
    mine = tl.arange(0, 4)[:, None, None, None] == tl.arange(0, 4)[None, None, :, None]
    D = tl.sum(tl.where(mine, blocks, 0.0), 2)
    row = tl.arange(0, 16)[None, :, None]
    X = tl.where(row == tl.arange(0, 16)[None, None, :], 1.0, tl.zeros_like(D))
    for i in range(1, 16):
        factors = tl.sum(tl.where(row == i, D, 0.0), 1)
        X = tl.where(row == i, X - tl.sum(factors[:, :, None] * X, 1)[:, None, :], X)
    even, odd = tl.split(tl.reshape(tl.permute(X, [1, 2, 0]), [16, 16, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    upper, between, _, lower = quarters(A, 32)
    _, upper_between, _, _ = quarters(upper, 16)
    _, lower_between, _, _ = quarters(lower, 16)
    upper = merge_inverses(first, upper_between, second, 16)
    lower = merge_inverses(third, lower_between, fourth, 16)
    return merge_inverses(upper, between, lower, 32)


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
def one_term(x, SPLIT: tl.constexpr):
    """x as one float16 term and its unit, or as it is and 1."""
    if SPLIT:
        shrink, unit = unit_of(largest_of(x))
        return (x * shrink).to(tl.float16), unit
    else:
        return x, 1.0


@triton.jit
def chunk_matrices_kernel(
    q, k, g, beta, queries, keys, solve, mix, decays, scalars,
    q_steps, k_steps, g_steps, beta_steps,
    L, Hk,
    GROUP: tl.constexpr, Dk: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of one chunk and one key head, for each of its value heads: what the scan needs and S does not change.

    queries, keys: the chunk's, as one term      solve = (I + A)^-1 beta, as two terms      mix: decay q . k on and
    below the diagonal, as one (all of them float32 where products are not split)      decays: since the start of the
    chunk times the unit of the keys, then of the queries, and until its end      scalars: see load_scalars
    """
    chunk, kh, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start, at = chunk * CHUNK, (b * tl.num_programs(0) + chunk) * Hk + kh
    Q = load_rows(q + b * q_steps[0] + kh * q_steps[2], start, L, q_steps[1], q_steps[3], Dk, CHUNK, BLOCK_K)
    K = load_rows(k + b * k_steps[0] + kh * k_steps[2], start, L, k_steps[1], k_steps[3], Dk, CHUNK, BLOCK_K)
    key_sums = tl.sum(tl.abs(K.to(tl.float32)), 1)
    Q, query_unit = one_term(Q.to(tl.float32), SPLIT)
    K, key_unit = one_term(K.to(tl.float32), SPLIT)
    KK = tl.dot(K, tl.trans(K), input_precision="ieee") * (key_unit * key_unit)
    QK = tl.dot(Q, tl.trans(K), input_precision="ieee") * (query_unit * key_unit)
    i = tl.arange(0, CHUNK)
    t = start + i
    tile = at * (CHUNK * BLOCK_K) + i[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tl.store(queries + tile, Q)
    tl.store(keys + tile, K)
    square = i[:, None] * CHUNK + i[None, :]
    for j in range(GROUP):
        h = kh * GROUP + j
        gate = tl.load(g + b * g_steps[0] + t * g_steps[1] + h * g_steps[2], mask=t < L, other=1.0).to(tl.float32)
        rate = tl.load(beta + b * beta_steps[0] + t * beta_steps[1] + h * beta_steps[2], mask=t < L, other=0.0)
        rate = rate.to(tl.float32)
        below = i[:, None] > i[None, :]
        # Products over spans, never quotients of running products: those of tiny decays leave the range of a float.
        decay = tl.associative_scan(tl.where(below, gate[:, None], 1.0), 0, multiply)
        since = tl.associative_scan(gate, 0, multiply)
        head = at * GROUP + j
        mixed, mix_unit = one_term(tl.where(below | (i[:, None] == i[None, :]), decay * QK, 0.0), SPLIT)
        tl.store(mix + head * (CHUNK * CHUNK) + square, mixed)
        place = decays + head * (3 * CHUNK) + i
        tl.store(place, since * key_unit)
        tl.store(place + CHUNK, since * query_unit)
        tl.store(place + 2 * CHUNK, tl.sum(tl.where(i[:, None] == CHUNK - 1, decay, 0.0), 0))
        inverted = inverse(tl.where(below, rate[:, None] * decay * KK, 0.0), CHUNK) * rate[None, :]
        solve_reach = tl.max(tl.sum(tl.abs(inverted), 1), 0)
        if SPLIT:
            shrink, _ = unit_of(solve_reach)
            high, low = halves(inverted * shrink)
            tl.store(solve + head * (2 * CHUNK * CHUNK) + square, high)
            tl.store(solve + head * (2 * CHUNK * CHUNK) + CHUNK * CHUNK + square, low)
        else:
            tl.store(solve + head * (CHUNK * CHUNK) + square, inverted)
        place = scalars + head * 8
        tl.store(place, tl.sum(tl.where(i == CHUNK - 1, since, 0.0), 0))
        tl.store(place + 1, key_unit)
        tl.store(place + 2, mix_unit)
        tl.store(place + 3, tl.max(since * key_sums, 0))
        tl.store(place + 4, solve_reach)


@triton.jit
def load_scalars(scalars, head):
    """Of a chunk and value head: its whole decay; the units of its keys and its mix; how much larger than S and than
    the right hand sides the products with its keys, and with its inverse, may be."""
    place = scalars + head * 8
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3), tl.load(place + 4)


@triton.jit
def chunk_scan_kernel(
    v, state, into, slots, o, queries, keys, solve, mix, decays, scalars,
    v_steps, state_steps, into_steps, o_steps,
    L, Hv,
    GROUP: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, NAMED: tl.constexpr, IN_PLACE: tl.constexpr,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
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
        whole, key_unit, mix_unit, key_reach, solve_reach = ahead
        ahead = load_scalars(scalars, (b * chunks + tl.minimum(chunk + 1, chunks - 1)) * Hv + h)
        K = tl.load(keys + head // GROUP * (CHUNK * BLOCK_K) + tile)
        V = load_rows(v, start, L, v_steps[1], v_steps[3], width, CHUNK, BLOCK_V).to(tl.float32)
        since_key = tl.load(decays + head * (3 * CHUNK) + i)
        since_query = tl.load(decays + head * (3 * CHUNK) + CHUNK + i)
        until = tl.load(decays + head * (3 * CHUNK) + 2 * CHUNK + i)
        if SPLIT:
            T_high = tl.load(solve + head * (2 * CHUNK * CHUNK) + square)
            T_low = tl.load(solve + head * (2 * CHUNK * CHUNK) + CHUNK * CHUNK + square)
            Q = tl.load(queries + head // GROUP * (CHUNK * BLOCK_K) + tile)
            M = tl.load(mix + head * (CHUNK * CHUNK) + square)
            largest = largest_of(S)
            shrink, unit = unit_of(largest)
            high, low = halves(S * shrink)
            R = V - (since_key * unit)[:, None] * tl.dot(K, high, tl.dot(K, low))
            y = (since_query * unit)[:, None] * tl.dot(Q, high)
            reach = largest_of(V) + key_reach * largest
            shrink, unit = unit_of(reach)
            _, solve_unit = unit_of(solve_reach)
            high, low = halves(R * shrink)
            U = tl.dot(T_high, high, tl.dot(T_low, high, tl.dot(T_high, low))) * (solve_unit * unit)
            shrink, unit = unit_of(solve_reach * reach)
            U *= shrink
            y += (mix_unit * unit) * tl.dot(M, U.to(tl.float16))
            high, low = halves(until[:, None] * U)
            S = whole * S + (key_unit * unit) * tl.dot(tl.trans(K), high, tl.dot(tl.trans(K), low))
        else:
            R = V - since_key[:, None] * tl.dot(K, S, input_precision="ieee")
            T = tl.load(solve + head * (CHUNK * CHUNK) + square)
            U = tl.dot(T, R, input_precision="ieee")
            Q = tl.load(queries + head // GROUP * (CHUNK * BLOCK_K) + tile)
            y = since_query[:, None] * tl.dot(Q, S, input_precision="ieee")
            M = tl.load(mix + head * (CHUNK * CHUNK) + square)
            y += tl.dot(M, U, input_precision="ieee")
            S = whole * S + tl.dot(tl.trans(K), until[:, None] * U, input_precision="ieee")
        t = (start + i).to(tl.int64)
        mask = (t < L)[:, None] & (value < width)[None, :]
        tl.store(o + t[:, None] * o_steps[1], rounded(y, o.dtype.element_ty), mask=mask)
    target = source if IN_PLACE else b
    into += target * into_steps[0] + h * into_steps[1] + first * into_steps[2]
    places = column[:, None] * into_steps[3] + value[None, :] * into_steps[2]
    tl.store(into + places, S.to(into.dtype.element_ty), mask=tile_mask)
