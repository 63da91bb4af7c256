"""Chains of ops in one launch, for steps of one token a request. fusion/ says which calls each of them replaces."""

# ruff: noqa: RUF005 - Triton knows no starred tuples

import triton
import triton.language as tl

from .device import overlap
from .elementary import begin_early, cos_sin, rounded
from .recurrent import softplus


@triton.jit
def load_parts(at, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr):
    """A row as float32: the first and the second of each pair that rotates, and the channels that do not."""
    pair, rest = tl.arange(0, PAIRS), tl.arange(0, BLOCK)
    a = tl.load(at + pair, pair < HALF, 0).to(tl.float32)
    b = tl.load(at + HALF + pair, pair < HALF, 0).to(tl.float32)
    return a, b, tl.load(at + 2 * HALF + rest, rest < REST, 0).to(tl.float32)


@triton.jit
def store_parts(at, parts, HALF: tl.constexpr, REST: tl.constexpr):
    a, b, c = parts
    pair, rest = tl.arange(0, a.shape[0]), tl.arange(0, c.shape[0])
    tl.store(at + pair, rounded(a, at.dtype.element_ty), pair < HALF)
    tl.store(at + HALF + pair, rounded(b, at.dtype.element_ty), pair < HALF)
    tl.store(at + 2 * HALF + rest, rounded(c, at.dtype.element_ty), rest < REST)


@triton.jit
def normed_parts(parts, weight, eps, HALF: tl.constexpr, REST: tl.constexpr):
    """Of the whole row; `weight`, in parts too, may be None."""
    a, b, c = parts
    squares = tl.sum(a * a, 0) + tl.sum(b * b, 0) + tl.sum(c * c, 0)
    factor = 1.0 / tl.sqrt(squares / (2 * HALF + REST) + eps)
    if weight is not None:
        u, v, w = weight
        a, b, c = a * u, b * v, c * w
    return a * factor, b * factor, c * factor


@triton.jit
def turn_of(positions, request, inv_freq, scale, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """By what the pairs of a request's token turn: cos and sin."""
    pair = tl.arange(0, PAIRS)
    position = tl.load(positions + request).to(tl.float64)
    frequency = tl.load(inv_freq + pair, pair < HALF, 0).to(tl.float64)
    cos, sin = cos_sin(position * frequency * 0.6366197723675814)
    return cos * scale, sin * scale


@triton.jit
def turned_parts(parts, turn):
    a, b, c = parts
    cos, sin = turn
    return a * cos - b * sin, a * sin + b * cos, c


@triton.jit(do_not_specialize=["S"])
def rotate_and_append_kernel(
    q, k, v, q_weight, k_weight, eps, positions, inv_freq, scale, slots, lengths, S, y, k_cache, v_cache,
    q_steps, k_steps, v_steps, y_steps, k_cache_steps, v_cache_steps,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    NORM_V: tl.constexpr, RING: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of one request: of its queries, of its keys, or of its values.

    Positions, slots and lengths change between steps alone, so they may be read early, as weights may.
    """
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    turn = turn_of(positions, request, inv_freq, scale, HALF, PAIRS)
    weight = load_parts(q_weight if head < H else k_weight, HALF, PAIRS, REST, BLOCK)
    slot, place = tl.load(slots + request).to(tl.int64), tl.load(lengths + request).to(tl.int64) - 1
    begin_early(OVERLAP)
    if head < H:
        parts = load_parts(q + request * q_steps[0] + head * q_steps[1], HALF, PAIRS, REST, BLOCK)
        parts = turned_parts(normed_parts(parts, weight, eps, HALF, REST), turn)
        store_parts(y + request * y_steps[0] + head * y_steps[1], parts, HALF, REST)
    else:
        place = place % S if RING else place
        if head < H + G:
            head -= H
            parts = load_parts(k + request * k_steps[0] + head * k_steps[1], HALF, PAIRS, REST, BLOCK)
            parts = turned_parts(normed_parts(parts, weight, eps, HALF, REST), turn)
            at = k_cache + slot * k_cache_steps[0] + place * k_cache_steps[1] + head * k_cache_steps[2]
            if place < S:
                store_parts(at, parts, HALF, REST)
        else:
            head -= H + G
            parts = load_parts(v + request * v_steps[0] + head * v_steps[1], HALF, PAIRS, REST, BLOCK)
            if NORM_V:
                parts = normed_parts(parts, None, eps, HALF, REST)
            at = v_cache + slot * v_cache_steps[0] + place * v_cache_steps[1] + head * v_cache_steps[2]
            if place < S:
                store_parts(at, parts, HALF, REST)


def rotate_and_append(
    q, k, v, q_weight, k_weight, eps, positions, inv_freq, k_cache, v_cache, *, slots, lengths, rotary, scale, norm_v,
    ring, out,
):  # fmt: skip
    """out = rope(rms_norm(q));  rope(rms_norm(k)) and v, normed or not, go into their caches.

    q [B, H, D]   k, v [B, G, D]   k_cache, v_cache [slots, S, G, D]   positions, slots, lengths [B]   out [B, H, D]
    """
    (B, H, D), G = q.shape, k.shape[1]
    rest = D - rotary
    rotate_and_append_kernel[(B, H + 2 * G)](
        q, k, v, q_weight, k_weight, eps, positions, inv_freq, float(scale), slots, lengths, k_cache.shape[1],
        out, k_cache, v_cache, q.stride()[:2], k.stride()[:2], v.stride()[:2], out.stride()[:2],
        k_cache.stride()[:3], v_cache.stride()[:3],
        H, G, rotary // 2, rest, triton.next_power_of_2(rotary // 2), triton.next_power_of_2(max(rest, 1)), norm_v,
        ring, num_warps=1, **overlap(q.device),
    )  # fmt: skip
    return out


@triton.jit
def convolve_and_norm_kernel(
    x, weight, state, slots, q, k, y, eps, q_scale, k_scale,
    x_step, weight_steps, state_steps, q_step, k_step, y_step,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """D channels of one request: a query head, a key head, or as many values.

    The state is of the step before, so it may be read early, as weights may.
    """
    part, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, channel = column < D, part.to(tl.int64) * D + column
    state += tl.load(slots + request).to(tl.int64) * state_steps[0] + channel * state_steps[2]
    weight += channel * weight_steps[0]
    rows = ()
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(WIDTH - 1):
        rows = rows + (tl.load(state + j * state_steps[1], inside, 0),)
        total += tl.load(weight + j * weight_steps[1], inside, 0).to(tl.float32) * rows[j].to(tl.float32)
    last = tl.load(weight + (WIDTH - 1) * weight_steps[1], inside, 0).to(tl.float32)
    begin_early(OVERLAP)
    new = tl.load(x + request * x_step + channel, inside, 0).to(tl.float32)
    total += last * new
    tl.debug_barrier()  # every thread has read the rows that are written over
    for j in tl.static_range(1, WIDTH - 1):
        tl.store(state + (j - 1) * state_steps[1], rows[j], inside)
    tl.store(state + (WIDTH - 2) * state_steps[1], rounded(new, state.dtype.element_ty), inside)
    total = tl.where(inside, total / (1.0 + tl.exp(-total)), 0.0)
    if part < 2 * HEADS:
        factor = 1.0 / tl.sqrt(tl.sum(total * total, 0) / D + eps)
        if part < HEADS:
            at = q + request * q_step + channel
            tl.store(at, rounded(total * factor * q_scale, q.dtype.element_ty), inside)
        else:
            at = k + request * k_step + channel - HEADS * D
            tl.store(at, rounded(total * factor * k_scale, k.dtype.element_ty), inside)
    else:
        tl.store(y + request * y_step + channel, rounded(total, y.dtype.element_ty), inside)


def convolve_and_norm(x, weight, state, slots, q, k, eps, q_scale, k_scale, *, out):
    """y = silu(causal_conv(x)), whose first heads are queries, then keys: these go to q and k, normed and scaled.

    x, out [B, 1, C]   weight [C, W(, 1)]   state [slots, W - 1, C]   q, k [B, Hk, D]
    """
    (B, _, C), (_, heads, D), width = x.shape, q.shape, weight.shape[1]
    convolve_and_norm_kernel[(C // D, B)](
        x, weight, state, slots, q, k, out, eps, q_scale, k_scale, x.stride(0), weight.stride()[:2], state.stride(),
        q.stride(0), k.stride(0), out.stride(0), heads, D, width, triton.next_power_of_2(D), num_warps=1,
        **overlap(x.device),
    )  # fmt: skip
    return out


@triton.jit
def delta_and_norm_kernel(
    q, k, v, a, b, a_log, dt_bias, state, slots, gate, weight, eps, o,
    q_steps, k_steps, v_steps, a_step, b_step, state_steps, gate_steps, o_steps,
    GROUP: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of one request: its gates, its state, its result, and that normed and gated."""
    h, request = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    rows, columns = row < Dv, column < Dk
    # Slots change between steps alone and the state is of the step before, so they may be read early, as weights may.
    state += tl.load(slots + request).to(tl.int64) * state_steps[0] + h * state_steps[1]
    place = row[:, None] * state_steps[2] + column[None, :] * state_steps[3]
    mask = rows[:, None] & columns[None, :]
    S = tl.load(state + place, mask, 0)
    bias, speed = tl.load(dt_bias + h).to(tl.float32), tl.exp(tl.load(a_log + h).to(tl.float32))
    weight = tl.load(weight + row, rows, 0).to(tl.float32)
    tl.debug_barrier()  # all is asked for before the wait
    begin_early(OVERLAP)
    head = h // GROUP
    key = tl.load(k + request * k_steps[0] + head * k_steps[1] + column, columns, 0).to(tl.float32)[None, :]
    query = tl.load(q + request * q_steps[0] + head * q_steps[1] + column, columns, 0).to(tl.float32)[None, :]
    value = tl.load(v + request * v_steps[0] + h * v_steps[1] + row, rows, 0).to(tl.float32)
    z = tl.load(gate + request * gate_steps[0] + h * gate_steps[1] + row, rows, 0).to(tl.float32)
    decay = tl.exp(-speed * softplus(tl.load(a + request * a_step + h).to(tl.float32) + bias))
    rate = 1.0 / (1.0 + tl.exp(-tl.load(b + request * b_step + h).to(tl.float32)))
    S *= decay
    change = (value - tl.sum(S * key, 1)) * rate
    S += change[:, None] * key
    y = tl.sum(S * query, 1)
    tl.store(state + place, S, mask)
    factor = 1.0 / tl.sqrt(tl.sum(y * y, 0) / Dv + eps)
    y = y * factor * weight * (z / (1.0 + tl.exp(-z)))
    tl.store(o + request * o_steps[0] + h * o_steps[1] + row, rounded(y, o.dtype.element_ty), rows)


# Requests from which few warps hold a state, so that one is read while another is written; fewer requests leave
# processors idle, and more warps ask for a state sooner. 2026-11-16, H200, us a step of Qwen3.5-35B-A3B by 4, 8 and 16
# warps: 1 stream 1284, 1276, 1262; 4 streams 2308, 2302, 2293; 8 streams 3129, 3152, 3154; 32 streams 7909, 7985, 8019.
MANY_STATES = 8


def delta_and_norm(q, k, v, a, b, a_log, dt_bias, state, slots, gate, weight, eps, *, out):
    """out = rms_norm(gated_delta(q, k, v, *delta_gates(a, b, a_log, dt_bias), state), weight, eps, gate=gate)

    q, k [B, Hk, Dk]   v, gate, out [B, Hv, Dv]   a, b [B, Hv]   state [slots, Hv, Dv, Dk] float32, in place
    """
    (B, Hv, Dv), (Hk, Dk) = v.shape, q.shape[1:]
    delta_and_norm_kernel[(Hv, B)](
        q, k, v, a, b, a_log, dt_bias, state, slots, gate, weight, eps, out,
        q.stride()[:2], k.stride()[:2], v.stride()[:2], a.stride(0), b.stride(0), state.stride(), gate.stride()[:2],
        out.stride()[:2], Hv // Hk, Dk, Dv, triton.next_power_of_2(Dk), triton.next_power_of_2(Dv),
        num_warps=16 if B < MANY_STATES else 4, **overlap(q.device),
    )  # fmt: skip
    return out


@triton.jit
def combine_and_norm_kernel(
    y, weights, shared, shared_gate, h, weight, eps, wide, total_out, narrow,
    y_steps, shared_step, gate_step,
    A: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token: its experts' results added up and to the stream, and that normed."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < D
    by = tl.load(weight + column, inside, 0).to(tl.float32)
    begin_early(OVERLAP)
    y += token * y_steps[0] + column
    total = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(A):
        share = tl.load(weights + token * A + a).to(tl.float32)
        total += share * tl.load(y + a * y_steps[1], inside, 0).to(tl.float32)
    if shared is not None:
        extra = tl.load(shared + token * shared_step + column, inside, 0).to(tl.float32)
        if shared_gate is not None:
            extra *= 1.0 / (1.0 + tl.exp(-tl.load(shared_gate + token * gate_step).to(tl.float32)))
        total += extra
    s = tl.load(h + token * D + column, inside, 0).to(tl.float32) + rounded(total, y.dtype.element_ty).to(tl.float32)
    tl.store(total_out + token * D + column, rounded(s, total_out.dtype.element_ty), inside)
    factor = 1.0 / tl.sqrt(tl.sum(s * s, 0) / D + eps)
    s = s * by * factor
    if wide is not None:
        tl.store(wide + token * D + column, rounded(s, wide.dtype.element_ty), inside)
    if narrow is not None:
        tl.store(narrow + token * D + column, rounded(s, narrow.dtype.element_ty), inside)


def combine_and_norm(y, weights, shared, shared_gate, h, weight, eps, *, out):
    """rms_norm(h, weight, eps, add=combine(y, weights, shared=shared, shared_gate=shared_gate), return_sum=True).

    y [B, A, D]   weights [B, A]   shared, h [B, D]   shared_gate [B]
    out (normed or None, the sum, normed again in another dtype or None)
    """
    (B, A, D), (wide, total, narrow) = y.shape, out
    block = triton.next_power_of_2(D)
    combine_and_norm_kernel[(B,)](
        y, weights, shared, shared_gate, h, weight, eps, wide, total, narrow, y.stride()[:2],
        0 if shared is None else shared.stride(0), 0 if shared_gate is None else shared_gate.stride(0), A, D, block,
        num_warps=max(4, min(16, block // 128)), **overlap(y.device),
    )  # fmt: skip
    return out
