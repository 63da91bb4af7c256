"""Recurrent layers: the short causal convolution, the gates of the delta rule, and the launches of that rule.

The convolution moves bytes only. A program takes a tile of tokens and channels; the taps read the tile shifted by one
token each, from the L1 after the first. The program of a request's first tokens reads the old state and writes the new
one, so no two programs meet there. The gates are one pass over small rows. The kernels of the rule are in delta.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .delta import chunk_matrices_kernel, chunk_scan_kernel, gated_delta_kernel, row_of
from .device import facts, overlap
from .elementary import begin_early, rounded

CHUNK = 64

# 2026-11-15, H200, 16 key heads and 32 value heads of 128.
# Steps, us for one token: (4, 1) 2.8, (2, 1) 3.3; without overlap (4, 1) 3.4, (4, 2) and (8, 4) 3.6. 16 tokens: 11.
# Matrices of 16384 tokens, by registers of a thread: 223 295 us, 168 263, 128 279.
# Scan of 16384 tokens: 660 us; each term a product of its own 673, 64 rows of S^T in registers 1280.
OVERLAPPING = 4096  # programs; one token of one request then takes 2.8 us instead of 3.4, but of 32 requests 41, not 36
CHUNKED_FROM = 64  # tokens of a call
STEPS = 4, 1  # rows of a program, warps
MATRICES_REGISTERS = 168
CHUNKS_AT_ONCE = 16384  # of all heads; each takes 57 KB with 128 by 128 states


def scan_launch(shared, block_k, Dv):
    """Value columns of a program, warps, and stages of the loads: as many as fit."""
    block_v = min(32 if block_k <= 128 else 16, max(16, triton.next_power_of_2(Dv)))
    stage = 2 * CHUNK * (2 * block_k + 3 * CHUNK + block_v) + 8 * CHUNK
    room = shared - 4 * block_k * block_v - 4096
    return block_v, 4, max(1, min(3, room // stage))


@triton.jit
def load_seen(x, state, row, channels, mask, L, x_steps, state_steps, WIDTH: tl.constexpr, FIRST: tl.constexpr):
    """Rows of [state; x]: row 0 is the oldest of the state's WIDTH - 1."""
    t = row - (WIDTH - 1)
    places = t.to(tl.int64)[:, None] * x_steps[1] + channels[None, :] * x_steps[2]
    seen = tl.load(x + places, mask=((t >= 0) & (t < L))[:, None] & mask[None, :], other=0.0).to(tl.float32)
    if FIRST:
        places = row.to(tl.int64)[:, None] * state_steps[1] + channels[None, :] * state_steps[2]
        before = tl.load(state + places, mask=(t < 0)[:, None] & mask[None, :], other=0.0).to(tl.float32)
        seen = tl.where((t < 0)[:, None], before, seen)
    return seen


@triton.jit
def conv_tile(
    x, weight, state, start, channels, mask, L, x_steps, weight_steps, state_steps,
    SILU: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = start + tl.arange(0, BLOCK_T)
    y = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for j in tl.static_range(WIDTH):
        tap = tl.load(weight + channels * weight_steps[0] + j * weight_steps[1], mask=mask, other=0.0).to(tl.float32)
        y += tap[None, :] * load_seen(x, state, row + j, channels, mask, L, x_steps, state_steps, WIDTH, FIRST)
    return y / (1.0 + tl.exp(-y)) if SILU else y


@triton.jit(do_not_specialize=["L"])
def causal_conv_kernel(
    x, weight, state, slots, y,
    x_steps, weight_steps, state_steps, y_steps,
    L, C,
    NAMED: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens of BLOCK_C channels of one request; ROWS is WIDTH - 1, rounded up to a power of two."""
    begin_early(OVERLAP)
    channels = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    start, b = tl.program_id(1) * BLOCK_T, tl.program_id(2).to(tl.int64)
    mask = channels < C
    x += b * x_steps[0]
    state += row_of(slots, b, NAMED) * state_steps[0]
    if start == 0:
        tile = conv_tile(
            x, weight, state, start, channels, mask, L, x_steps, weight_steps, state_steps,
            SILU, WIDTH, True, BLOCK_T, BLOCK_C,
        )  # fmt: skip
        kept = tl.arange(0, ROWS)
        last = load_seen(x, state, L + kept, channels, mask, L, x_steps, state_steps, WIDTH, True)
        tl.debug_barrier()  # every thread has read the old state, and x where y lies on it
        places = kept.to(tl.int64)[:, None] * state_steps[1] + channels[None, :] * state_steps[2]
        tl.store(
            state + places, rounded(last, state.dtype.element_ty), mask=(kept < WIDTH - 1)[:, None] & mask[None, :]
        )
    else:
        tile = conv_tile(
            x, weight, state, start, channels, mask, L, x_steps, weight_steps, state_steps,
            SILU, WIDTH, False, BLOCK_T, BLOCK_C,
        )  # fmt: skip
    t = start + tl.arange(0, BLOCK_T)
    places = t.to(tl.int64)[:, None] * y_steps[1] + channels[None, :] * y_steps[2]
    tl.store(y + b * y_steps[0] + places, rounded(tile, y.dtype.element_ty), mask=(t < L)[:, None] & mask[None, :])


def causal_conv(x, weight, state, *, slots=None, activation="silu", out=None):
    (B, L, C), width = x.shape, weight.shape[1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if y.numel() == 0:
        return y
    # A program may read tokens that another one writes, unless there is only one token.
    apart = L == 1 or out is None or out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    target = y if apart else torch.empty_like(x)
    block_t, block_c, warps = conv_launch(L)
    grid = (triton.cdiv(C, block_c), triton.cdiv(L, block_t), B)
    causal_conv_kernel[grid](
        x, weight, state, slots, target,
        x.stride(), weight.stride(), state.stride(), target.stride(),
        L, C,
        slots is not None, activation is not None, width, triton.next_power_of_2(width - 1),
        block_t, block_c, num_warps=warps, **overlap(x.device),
    )  # fmt: skip
    return y if apart else y.copy_(target)


def conv_launch(L):
    """Tokens and channels of a program, and its warps."""
    return (1, 256, 2) if L == 1 else (16, 256, 4)


@triton.jit
def softplus(x):
    """max(x, 0) + log(1 + y) with y = e^-|x| at most 1: log(1 + y) = 2 atanh(y / (2 + y)), by its series."""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    series = square * (2 / 15) + 2 / 13
    series = series * square + 2 / 11
    series = series * square + 2 / 9
    series = series * square + 2 / 7
    series = series * square + 2 / 5
    series = series * square + 2 / 3
    series = series * square + 2.0
    return series * s + tl.maximum(x, 0.0)


@triton.jit
def delta_gates_kernel(
    a, b, a_log, dt_bias, g, beta,
    a_steps, b_steps, g_steps, beta_steps, a_log_step, dt_bias_step,
    rows, Hv,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_early(OVERLAP)
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[None, :]
    heads, mask = h < Hv, (row < rows) & (h < Hv)
    x = tl.load(a + row * a_steps[0] + h * a_steps[1], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(b + row * b_steps[0] + h * b_steps[1], mask=mask, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + h * a_log_step, mask=heads, other=0.0).to(tl.float32))
    x += tl.load(dt_bias + h * dt_bias_step, mask=heads, other=0.0).to(tl.float32)
    decay = tl.exp(rate * softplus(x))
    y = 1.0 / (1.0 + tl.exp(-y))
    tl.debug_barrier()  # g and beta may lie where a and b do
    tl.store(g + row * g_steps[0] + h * g_steps[1], decay, mask=mask)
    tl.store(beta + row * beta_steps[0] + h * beta_steps[1], y, mask=mask)


def delta_gates(a, b, a_log, dt_bias, *, out=None):
    Hv = a.shape[-1]
    outs = out or tuple(torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if a.numel() == 0:
        return outs
    a, b = a.reshape(-1, Hv), b.reshape(-1, Hv)
    # An `out` whose leading axes do not fold into one gets a copy of the result.
    g, beta = (one.reshape(-1, Hv) for one in outs)
    block_r, block_h = 16, min(64, triton.next_power_of_2(Hv))
    delta_gates_kernel[(triton.cdiv(len(a), block_r), triton.cdiv(Hv, block_h))](
        a, b, a_log, dt_bias, g, beta,
        a.stride(), b.stride(), g.stride(), beta.stride(), a_log.stride(0), dt_bias.stride(0),
        len(a), Hv, block_r, block_h, num_warps=4, **overlap(a.device),
    )  # fmt: skip
    for one, flat in zip(outs, (g, beta), strict=True):
        if one.data_ptr() != flat.data_ptr():
            one.copy_(flat.view(one.shape))
    return outs


def gated_delta(q, k, v, g, beta, state, *, slots=None, form=None, in_place=True, out=None):
    (B, L), (Hv, Dv, Dk) = v.shape[:2], state.shape[1:]
    o, new = (out, None) if in_place else out or (None, None)
    o = torch.empty_like(v, memory_format=torch.contiguous_format) if o is None else o
    into = state if in_place else torch.empty(B, Hv, Dv, Dk, dtype=state.dtype, device=v.device) if new is None else new
    if B and L:
        narrow = all(x.dtype in (torch.bfloat16, torch.float16) for x in (q, k, v))
        chunked = narrow and (form == "chunked" or (form is None and L >= CHUNKED_FROM))
        chunked = chunked and (Dk <= 128 or facts(v.device).shared >= 200_000)  # what the chunks of larger keys need
        (launch_chunks if chunked else launch_steps)(q, k, v, g, beta, state, into, slots, o, in_place)
    elif not in_place:
        into.copy_(state[:B] if slots is None else state[slots.long()])
    return o if in_place else (o, into)


def launch_steps(q, k, v, g, beta, state, into, slots, o, in_place):
    (B, L, Hk, Dk), (Hv, Dv) = q.shape, v.shape[2:]
    block_v, warps = STEPS
    programs = triton.cdiv(Dv, block_v) * Hv * B
    gated_delta_kernel[(triton.cdiv(Dv, block_v), Hv, B)](
        q, k, v, g, beta, state, into, slots, o,
        q.stride(), k.stride(), v.stride(), g.stride(), beta.stride(), o.stride(), L, state.stride(), into.stride(),
        Hv // Hk, Dk, Dv, slots is not None, in_place, triton.next_power_of_2(Dk), block_v, num_warps=warps,
        **(overlap(v.device) if programs <= OVERLAPPING else {"OVERLAP": False}),
    )  # fmt: skip


class Matrices(NamedTuple):
    """What the scan of some chunks needs and the state does not change, in memory: see chunk_matrices_kernel."""

    queries: torch.Tensor
    keys: torch.Tensor
    products: torch.Tensor
    triangles: torch.Tensor
    mix: torch.Tensor
    decays: torch.Tensor
    scalars: torch.Tensor


def launch_chunks(q, k, v, g, beta, state, into, slots, o, in_place):
    """In pieces, so that a long prompt or a large batch does not need memory without bounds. They change no bits.

    The matrices of a piece need nothing of the one before. They are made while that is scanned, in other memory.
    """
    (B, L, Hk, Dk), Hv = q.shape, v.shape[2]
    chunks, heads = triton.cdiv(L, CHUNK), 2 if Hv // Hk % 2 == 0 else 1
    chunks = min(chunks, max(1, CHUNKS_AT_ONCE // (B * Hv)))
    block_k = max(16, triton.next_power_of_2(Dk))

    def scratch(*shape, dtype=torch.float32):
        return torch.empty(B, chunks, *shape, dtype=dtype, device=v.device)

    def matrices():
        return Matrices(
            queries=scratch(Hk, CHUNK, block_k, dtype=torch.float16),
            keys=scratch(Hk, CHUNK, block_k, dtype=torch.float16),
            products=scratch(Hv // heads, 2, CHUNK, CHUNK),
            triangles=scratch(Hv, CHUNK, CHUNK),
            mix=scratch(Hv, CHUNK, CHUNK, dtype=torch.float16),
            decays=scratch(Hv, 2, CHUNK),
            scalars=scratch(Hv, 8),
        )

    size = chunks * CHUNK
    memory = [matrices() for _ in range(min(2, triton.cdiv(L, size)))]
    for start in range(0, L, size):
        Q, K, V, G, rates, y = (x[:, start : start + size] for x in (q, k, v, g, beta, o))
        made = memory[start // size % 2]
        launch_matrices(Q, K, G, rates, made, heads, early=start > 0)
        launch_scan(V, state, into, slots, y, made, in_place, Dk, more=start + size < L)
        if not in_place:
            state, slots = into, None


def launch_matrices(q, k, g, beta, made, heads, early):
    (B, L, Hk, Dk), Hv = q.shape, g.shape[2]
    nvidia = facts(q.device).capability > 0
    chunk_matrices_kernel[(triton.cdiv(L, CHUNK), Hv // heads, B)](
        q, k, g, beta, made.queries, made.keys, made.products, made.triangles, made.triangles.view(torch.float16),
        made.mix, made.decays, made.scalars,
        q.stride(), k.stride(), g.stride(), beta.stride(),
        L, Hk, int(early), Hv // Hk, heads, Dk, CHUNK, made.keys.shape[-1], not nvidia,
        num_warps=4, num_stages=1, **({"maxnreg": MATRICES_REGISTERS} if nvidia else {}), **overlap(q.device),
    )  # fmt: skip


def launch_scan(v, state, into, slots, o, made, in_place, Dk, more):
    (B, L, Hv, Dv), (Hk, block_k) = v.shape, (made.keys.shape[2], made.keys.shape[-1])
    block_v, warps, stages = scan_launch(facts(v.device).shared, block_k, Dv)
    chunk_scan_kernel[(triton.cdiv(Dv, block_v), Hv, B)](
        v, state, into, slots, o, made.queries, made.keys, made.triangles.view(torch.float16),
        made.mix, made.decays, made.scalars,
        v.stride(), state.stride(), into.stride(), o.stride(),
        L, Hv, int(more), Hv // Hk, Dk, Dv, slots is not None, in_place,
        CHUNK, block_k, block_v, num_warps=warps, num_stages=stages, **overlap(v.device),
    )  # fmt: skip
