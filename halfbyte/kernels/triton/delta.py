"""The gated delta rule: S = g S;  S = S + beta (v - S k) k^T;  o = S q, for float32 states [slots, Hv, Dv, Dk].

Few tokens, and float32 ones, go one by one. A program keeps a few rows of one head's state in registers over all tokens
of the call: one read and one write of the state, every load of the first token issued before anything waits, and those
of token t + 1 issued before token t is computed. A row is summed by one warp in one order, whatever the launch, so its
bits do not depend on the batch or on how tokens are cut into calls.

Many tokens go 64 at a time. With decay[t, i] = g[i + 1] ... g[t] and since[t] = g[0] ... g[t], the deltas U of a chunk
solve (I + A) U = beta (v - since K S^T), where A[t, i] = beta[t] decay[t, i] k[t] . k[i] for i < t.

    chunk_matrices_kernel   all chunks at once: (I + A)^-1 beta, the masked decay q . k, the decays, keys and queries
    chunk_scan_kernel       chunk after chunk, S in registers: U, o and the next S, five products of matrices

The scan is a chain, so all that does not depend on S is taken out of it; what is left is divided over heads and over
columns of values. A chunk takes its instructions and its waits, not its arithmetic: hence few, wide products. Outputs
are formed in the scan: a launch of their own would have to write and read a state for each chunk, more bytes than
everything else together.

The state is float32, and so must be all that flows into it. A float32 factor of the scan is the sum of two float16
terms, 22 bits and their signs, that lie side by side as neighbouring columns: one product on tensor cores has the
products of both, and their sums are as good as float32 ones. (The inverse lies as 64 rows above 64 rows.) float16 has
few exponents, so factors are first divided by a power of two, their unit; the terms then reach 2^-39 of the largest
number, so that a bound is as good as the largest. Sums are formed apart from S, because tensor cores cut digits off
where they add.
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
def pairs(x):
    """x [M, N] as two float16 terms side by side: [M, 2 N], each number rounded and then what that lacks."""
    high, low = halves(x)
    return tl.reshape(tl.join(high, low), [x.shape[0], 2 * x.shape[1]])


@triton.jit
def pair_sums(x):
    """[M, 2 N] to [M, N]: the sums of neighbours."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)


@triton.jit
def largest_of(x):
    return tl.max(tl.abs(x))


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
def one_term(x):
    """x as one float16 term, and its unit."""
    shrink, unit = unit_of(largest_of(x))
    return (x * shrink).to(tl.float16), unit


@triton.jit
def load_each(x, STEP: tl.constexpr, COUNT: tl.constexpr):
    """What lies at x, x + STEP ...: COUNT tensors."""
    loaded = ()
    for n in tl.static_range(COUNT):
        loaded += (tl.load(x + n * STEP),)
    return loaded


@triton.jit
def invert_blocks(A, column, CHUNK: tl.constexpr):
    """In place of each block of 16 on the diagonal of A its (I + A)^-1, by substitution. A lane has a column.

    Substitution is stable where powers of A are not: equal keys make their entries binomial coefficients.
    """
    corner = A + column // 16 * (16 * CHUNK + 16)
    place = column % 16
    X = (tl.where(place == 0, 1.0, 0.0),)
    for r in tl.static_range(1, 16):
        x = tl.where(place == r, 1.0, 0.0)
        for m in tl.static_range(r):
            x -= tl.load(corner + (r * CHUNK + m)) * X[m]
        X += (x,)
    tl.debug_barrier()
    for r in tl.static_range(16):
        tl.store(corner + place + r * CHUNK, X[r])
    tl.debug_barrier()


@triton.jit
def digits(x):
    """float32 x as the sum of two numbers that tensor cores take as they are, of 11 digits; the larger first."""
    high = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def multiply_exactly(a, b, IEEE: tl.constexpr):
    """The product of float32 matrices, as good as in float32: summed from three, the smallest first."""
    if IEEE:
        return tl.dot(a, b, input_precision="ieee")
    else:
        a_high, a_low = digits(a)
        b_high, b_low = digits(b)
        total = tl.dot(a_high, b_low, tl.dot(a_low, b_high, input_precision="tf32"), input_precision="tf32")
        return tl.dot(a_high, b_high, total, input_precision="tf32")


@triton.jit
def merge_inverses(A, HEADS: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, IEEE: tl.constexpr):
    """In place: the inverses of pairs of blocks of SIZE on the diagonal, from the inverses of the two.

    What lies between the two goes from B to -lower B upper; 16 columns of it are one product of a batch.
    """
    PAIRS: tl.constexpr = CHUNK // (2 * SIZE)
    PARTS: tl.constexpr = SIZE // 16
    part = tl.arange(0, HEADS * PAIRS * PARTS)[:, None, None]
    row, column = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    A += part // (PAIRS * PARTS) * (CHUNK * CHUNK) + part // PARTS % PAIRS * (2 * SIZE * (CHUNK + 1)) + row * CHUNK
    wide, narrow = A + column, A + part % PARTS * 16 + tl.arange(0, 16)[None, None, :]
    between = multiply_exactly(tl.load(wide + SIZE * CHUNK), tl.load(narrow), IEEE)
    between = -multiply_exactly(tl.load(wide + SIZE * (CHUNK + 1)), between, IEEE)
    tl.debug_barrier()
    tl.store(narrow + SIZE * CHUNK, between)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["L", "early"])
def chunk_matrices_kernel(
    q, k, g, beta, queries, keys, products, triangles, solve, mix, decays, scalars,
    q_steps, k_steps, g_steps, beta_steps,
    L, Hk, early,
    GROUP: tl.constexpr, HEADS: tl.constexpr, Dk: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    IEEE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Of one chunk and HEADS value heads of one key head: what the scan needs and S does not change.

    queries, keys: the chunk's, as one term      solve = (I + A)^-1 beta, as two terms      mix: decay q . k on and
    below the diagonal, as one      decays: since the start of the chunk, and until its end      scalars: the whole
    decay; the units of keys, queries and mix; how much larger than S and the values the products with keys may be, and
    how much larger than these the products with the inverse

    Matrices go through memory where the next step wants them in another order: `products` has k . k and q . k,
    `triangles` is the memory of `solve` as float32, for A and then its inverse.
    """
    chunk, part, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    chunks, start, kh = tl.num_programs(0), tl.program_id(0) * CHUNK, part * HEADS // GROUP
    if OVERLAP and early == 0:
        gdc_wait()
    Q = load_rows(q + b * q_steps[0] + kh * q_steps[2], start, L, q_steps[1], q_steps[3], Dk, CHUNK, BLOCK_K)
    K = load_rows(k + b * k_steps[0] + kh * k_steps[2], start, L, k_steps[1], k_steps[3], Dk, CHUNK, BLOCK_K)
    K, key_unit = one_term(K.to(tl.float32))
    KK = tl.dot(K, tl.trans(K)) * (key_unit * key_unit)
    Q, query_unit = one_term(Q.to(tl.float32))
    QK = tl.dot(Q, tl.trans(K))
    i = tl.arange(0, CHUNK)
    square = i[:, None] * CHUNK + i[None, :]
    if part * HEADS % GROUP == 0:
        tile = ((b * chunks + chunk) * Hk + kh) * (CHUNK * BLOCK_K) + i[:, None] * BLOCK_K
        tile += tl.arange(0, BLOCK_K)[None, :]
        tl.store(queries + tile, Q)
        tl.store(keys + tile, K)

    # Gates and rates, one to a lane, go where each lane can read all of its head.
    lane = tl.arange(0, HEADS * CHUNK)
    column, h = lane % CHUNK, part * HEADS + lane // CHUNK
    head = (b * chunks + chunk) * (Hk * GROUP) + h
    t = start + column
    gate = tl.load(g + b * g_steps[0] + t.to(tl.int64) * g_steps[1] + h * g_steps[2], mask=t < L, other=1.0)
    rate = tl.load(beta + b * beta_steps[0] + t.to(tl.int64) * beta_steps[1] + h * beta_steps[2], mask=t < L, other=0.0)
    gate, rate = gate.to(tl.float32), rate.to(tl.float32)
    decays += head * (2 * CHUNK)
    tl.store(decays + column, gate)
    tl.store(decays + CHUNK + column, rate)
    shrink, mix_unit = unit_of(largest_of(QK) * tl.reduce(tl.maximum(gate, 1.0), 0, multiply))
    products += ((b * chunks + chunk) * tl.num_programs(1) + part) * (2 * CHUNK * CHUNK)
    tl.store(products + square, KK)
    tl.store(products + CHUNK * CHUNK + square, QK * shrink)
    since = tl.associative_scan(tl.reshape(gate, [HEADS, CHUNK]), 1, multiply)
    whole = tl.sum(tl.where(tl.arange(0, CHUNK)[None, :] == CHUNK - 1, since, 0.0), 1)
    heads = (b * chunks + chunk) * (Hk * GROUP) + part * HEADS + tl.arange(0, HEADS)
    place = scalars + heads * 8
    tl.store(place, whole)
    tl.store(place + 1, key_unit + tl.zeros_like(whole))
    tl.store(place + 2, query_unit + tl.zeros_like(whole))
    tl.store(place + 3, mix_unit * (query_unit * key_unit) + tl.zeros_like(whole))
    tl.store(place + 4, tl.max(since, 1) * (key_unit * (16384.0 * BLOCK_K)))
    tl.debug_barrier()

    # A lane has a column of A and of the mix, and goes down its rows.
    A, M = triangles + head * (CHUNK * CHUNK), mix + head * (CHUNK * CHUNK) + column
    decay = tl.zeros([HEADS * CHUNK], tl.float32)
    AT_ONCE: tl.constexpr = 16
    for first in range(0, CHUNK, AT_ONCE):
        gates, rates = load_each(decays + first, 1, AT_ONCE), load_each(decays + CHUNK + first, 1, AT_ONCE)
        rows = products + first * CHUNK + column
        KKs, QKs = load_each(rows, CHUNK, AT_ONCE), load_each(rows + CHUNK * CHUNK, CHUNK, AT_ONCE)
        for n in tl.static_range(AT_ONCE):
            # Products over spans, never quotients of running products: those of tiny decays leave the range of a float.
            decay *= gates[n]
            tl.store(A + first * CHUNK + column + n * CHUNK, rates[n] * decay * KKs[n])
            decay = tl.where(column == first + n, 1.0, decay)
            tl.store(M + first * CHUNK + n * CHUNK, (decay * QKs[n]).to(tl.float16))
    tl.debug_barrier()
    tl.store(decays + column, tl.reshape(since, [HEADS * CHUNK]))
    tl.store(decays + CHUNK + column, decay)
    invert_blocks(A, column, CHUNK)

    first = (b * chunks + chunk) * (Hk * GROUP) + part * HEADS
    triangles += first * (CHUNK * CHUNK)
    merge_inverses(triangles, HEADS, CHUNK, 16, IEEE)
    merge_inverses(triangles, HEADS, CHUNK, 32, IEEE)
    t = start + i
    for j in tl.static_range(HEADS):
        place = beta + b * beta_steps[0] + t.to(tl.int64) * beta_steps[1] + (part * HEADS + j) * beta_steps[2]
        rate = tl.load(place, mask=t < L, other=0.0).to(tl.float32)
        inverted = tl.load(triangles + j * (CHUNK * CHUNK) + square) * rate[None, :]
        solve_reach = tl.max(tl.sum(tl.abs(inverted), 1), 0)
        tl.store(scalars + (first + j) * 8 + 5, solve_reach)
        shrink, _ = unit_of(solve_reach)
        high, low = halves(inverted * shrink)
        tl.debug_barrier()
        tl.store(solve + (first + j) * (2 * CHUNK * CHUNK) + square, high)
        tl.store(solve + (first + j) * (2 * CHUNK * CHUNK) + CHUNK * CHUNK + square, low)
    if OVERLAP:
        last = (chunk == chunks - 1) & (part == tl.num_programs(1) - 1) & (b == tl.num_programs(2) - 1)
        if early != 0 and last:
            gdc_wait()


@triton.jit(do_not_specialize=["L", "more"])
def chunk_scan_kernel(
    v, state, into, slots, o, queries, keys, solve, mix, decays, scalars,
    v_steps, state_steps, into_steps, o_steps,
    L, Hv, more,
    GROUP: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, NAMED: tl.constexpr, IN_PLACE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's values, chunk after chunk. S lies here as [Dk, values]."""
    first, h, b = tl.program_id(0).to(tl.int64) * BLOCK_V, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column, width = tl.arange(0, BLOCK_K).to(tl.int64), Dv - first
    value = tl.arange(0, BLOCK_V).to(tl.int64)
    tile_mask = (column < Dk)[:, None] & (value < width)[None, :]
    v += b * v_steps[0] + h * v_steps[2] + first * v_steps[3]
    o += b * o_steps[0] + h * o_steps[2] + first * o_steps[3] + value[None, :] * o_steps[3]
    if OVERLAP:
        gdc_wait()
        if more != 0:
            gdc_launch_dependents()
    source = row_of(slots, b, NAMED)
    state += source * state_steps[0] + h * state_steps[1] + first * state_steps[2]
    S = tl.load(state + column[:, None] * state_steps[3] + value[None, :] * state_steps[2], mask=tile_mask, other=0.0)
    S = S.to(tl.float32)
    i = tl.arange(0, CHUNK)
    tile = i[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    square = i[:, None] * CHUNK + i[None, :]
    both = tl.arange(0, 2 * CHUNK)[:, None] * CHUNK + i[None, :]
    chunks = tl.cdiv(L, CHUNK)
    ahead = load_each(scalars + (b * chunks * Hv + h) * 8, 1, 6)
    for chunk in range(chunks):
        start = chunk * CHUNK
        head = (b * chunks + chunk) * Hv + h
        whole, key_unit, query_unit, mix_unit, key_reach, solve_reach = ahead
        following = (b * chunks + tl.minimum(chunk + 1, chunks - 1)) * Hv + h
        ahead = load_each(scalars + following * 8, 1, 6)
        K = tl.load(keys + head // GROUP * (CHUNK * BLOCK_K) + tile)
        V = load_rows(v, start, L, v_steps[1], v_steps[3], width, CHUNK, BLOCK_V).to(tl.float32)
        since = tl.load(decays + head * (2 * CHUNK) + i)[:, None]
        until = tl.load(decays + head * (2 * CHUNK) + CHUNK + i)[:, None]
        T = tl.load(solve + head * (2 * CHUNK * CHUNK) + both)
        Q = tl.load(queries + head // GROUP * (CHUNK * BLOCK_K) + tile)
        M = tl.load(mix + head * (CHUNK * CHUNK) + square)
        if BLOCK_K >= CHUNK:
            largest = tl.max(tl.abs(tl.reshape(S, [BLOCK_K // CHUNK, CHUNK, BLOCK_V])), 0)
            largest = largest_of(tl.maximum(largest, tl.abs(V)))
        else:
            largest = tl.maximum(largest_of(S), largest_of(V))
        shrink, unit = unit_of(largest)
        terms = pairs(S * shrink)
        R = V - (key_unit * unit) * since * pair_sums(tl.dot(K, terms))
        y = (query_unit * unit) * since * pair_sums(tl.dot(Q, terms))
        reach = (1.0 + key_reach) * largest
        shrink, unit = unit_of(reach)
        _, solve_unit = unit_of(solve_reach)
        U = pair_sums(tl.sum(tl.reshape(tl.dot(T, pairs(R * shrink)), [2, CHUNK, 2 * BLOCK_V]), 0))
        factor = solve_unit * unit
        shrink, unit = unit_of(solve_reach * reach)
        U *= factor * shrink
        y += (mix_unit * unit) * pair_sums(tl.dot(M, pairs(U)))
        S = whole * S + (key_unit * unit) * pair_sums(tl.dot(tl.trans(K), pairs(until * U)))
        t = (start + i).to(tl.int64)
        mask = (t < L)[:, None] & (value < width)[None, :]
        tl.store(o + t[:, None] * o_steps[1], rounded(y, o.dtype.element_ty), mask=mask)
    target = source if IN_PLACE else b
    into += target * into_steps[0] + h * into_steps[1] + first * into_steps[2]
    places = column[:, None] * into_steps[3] + value[None, :] * into_steps[2]
    tl.store(into + places, S.to(into.dtype.element_ty), mask=tile_mask)
