"""Recurrent layers. A channel, or a row of the state, depends on no other: they go in lanes and tasks, tokens in order.

Sixteen rows of a gated delta state at a time: their dot products with a key make one vector, which meets the values
and the outputs where these lie. The rows stay in L1 over all tokens of the call, and each is summed in one fixed order,
so a token's bits do not depend on how many tokens a call has.
"""

import numpy as np
import torch
from numba import prange

from . import lanes
from .cache import indices
from .compiled import allocating, inlined, inner, kernel
from .views import SERIAL, destination, finish, floats, raw

CHUNK = 32
PIECE, TOGETHER = 256, 8  # channels of a task of the convolution, and requests that bring one token each
SMALL = 1 << 17  # elements of states times tokens: below this a call stays on its thread


@inlined
def silu(v):
    return v / (lanes.splat(np.float32(1)) + lanes.exp(lanes.zeros() - v))


@inner
def conv_channels(x, taps, tap, state, slot, silent, y, b, c, n, L, C, W, before):
    """n channels from c of one request, their taps from taps[tap] on: new state first, then the tokens from last to
    first, so y may be x."""
    at = (slot * (W - 1)) * C + c
    for j in range(W - 1):
        lanes.store(before, j * 16, lanes.load_n(state, at + j * C, n))
    for j in range(W - 1):
        # Row j of the new state is row L + j of [state; x].
        if L + j < W - 1:
            row = lanes.load(before, (L + j) * 16)
        else:
            row = lanes.load_n(x, (b * L + L + j - (W - 1)) * C + c, n)
        lanes.store_n(state, at + j * C, row, n)
    for t in range(L - 1, -1, -1):
        total = lanes.zeros()
        for j in range(W):
            if t + j < W - 1:
                row = lanes.load(before, (t + j) * 16)
            else:
                row = lanes.load_n(x, (b * L + t + j - (W - 1)) * C + c, n)
            total = lanes.fma(lanes.load(taps, tap + j * PIECE), row, total)
        lanes.store_n(y, (b * L + t) * C + c, total if silent else silu(total), n)


@inner
def conv_token(x, taps, state, slot, silent, y, b, first, end, C, W):
    """Channels first .. end, whole sixteens, of one request's only token: as `conv_channels`, each row read once."""
    for c in range(first, end, 16):
        at, total = slot * (W - 1) * C + c, lanes.zeros()
        for j in range(W):
            row = lanes.load(state, at + j * C) if j < W - 1 else lanes.load(x, b * C + c)
            if j > 0:
                lanes.store(state, at + (j - 1) * C, row)
            total = lanes.fma(lanes.load(taps, j * PIECE + c - first), row, total)
        lanes.store(y, b * C + c, total if silent else silu(total))


@allocating
def conv_piece(x, weight, state, slots, silent, y, task, together, L, C, W):
    """Some channels of `together` requests; their taps are read once."""
    lanes.compiled_once()
    pieces = (C + PIECE - 1) // PIECE
    requests, first = task // pieces * together, task % pieces * PIECE
    end = min(C, first + PIECE)
    taps, before = np.empty(W * PIECE, np.float32), np.empty(W * 16, np.float32)
    for c in range(first, end, 16):
        for j in range(W):
            lanes.store(taps, j * PIECE + c - first, lanes.load_spread(weight, c * W + j, W, min(16, C - c)))
    for b in range(requests, min(slots.size, requests + together)):
        whole = first
        if L == 1:
            whole = end - (end - first) % 16
            conv_token(x, taps, state, slots[b], silent, y, b, first, whole, C, W)
        for c in range(whole, end, 16):
            conv_channels(x, taps, c - first, state, slots[b], silent, y, b, c, min(16, C - c), L, C, W, before)


@kernel
def causal_conv_kernel(x, weight, state, slots, silent, y, L, C, W):
    together = TOGETHER if L == 1 else 1
    tasks = (slots.size + together - 1) // together * ((C + PIECE - 1) // PIECE)
    if x.size < SERIAL:
        for task in range(tasks):
            conv_piece(x, weight, state, slots, silent, y, task, together, L, C, W)
    else:
        for task in prange(tasks):
            conv_piece(x, weight, state, slots, silent, y, np.int64(task), together, L, C, W)


def causal_conv(x, weight, state, *, slots=None, activation="silu", out=None):
    B, L, C = x.shape
    y = destination(x.shape, out)
    if y.numel() == 0:
        return finish(y, x.dtype, out)
    direct = state.dtype == torch.float32 and state.is_contiguous()
    named = None if direct else slice(0, B) if slots is None else slots.long()
    rows = state if direct else state[named].float().contiguous()
    which = indices(slots, B) if direct else np.arange(B)
    taps = raw(weight if weight.dtype != torch.float64 else weight.float())
    causal_conv_kernel(floats(x), taps, floats(rows), which, activation is None, floats(y), L, C, weight.shape[1])
    if not direct:
        state[named] = rows.to(state.dtype)
    return finish(y, x.dtype, out)


@inlined
def softplus(x):
    """max(x, 0) + log(1 + y) with y = e^-|x| at most 1: log(1 + y) = 2 atanh(y / (2 + y)), by its series."""
    y = lanes.exp(lanes.zeros() - lanes.larger(x, lanes.zeros() - x))
    s = y / (lanes.splat(np.float32(2)) + y)
    square, series = s * s, lanes.splat(np.float32(2 / 15))
    series = lanes.fma(series, square, lanes.splat(np.float32(2 / 13)))
    series = lanes.fma(series, square, lanes.splat(np.float32(2 / 11)))
    series = lanes.fma(series, square, lanes.splat(np.float32(2 / 9)))
    series = lanes.fma(series, square, lanes.splat(np.float32(2 / 7)))
    series = lanes.fma(series, square, lanes.splat(np.float32(2 / 5)))
    series = lanes.fma(series, square, lanes.splat(np.float32(2 / 3)))
    series = lanes.fma(series, square, lanes.splat(np.float32(2)))
    return lanes.fma(series, s, lanes.larger(x, lanes.zeros()))


@inner
def gates_row(a, b, a_log, dt_bias, g, beta, row, Hv):
    lanes.compiled_once()
    one = lanes.splat(np.float32(1))
    for c in range(0, Hv, 16):
        n, i = min(16, Hv - c), row * Hv + c
        rate = lanes.zeros() - lanes.exp(lanes.load_n(a_log, c, n))
        x, y = lanes.load_n(a, i, n) + lanes.load_n(dt_bias, c, n), lanes.load_n(b, i, n)
        lanes.store_n(g, i, lanes.exp(rate * softplus(x)), n)
        lanes.store_n(beta, i, one / (one + lanes.exp(lanes.zeros() - y)), n)


@kernel
def delta_gates_kernel(a, b, a_log, dt_bias, g, beta, Hv):
    if a.size < SERIAL:
        for row in range(a.size // Hv):
            gates_row(a, b, a_log, dt_bias, g, beta, row, Hv)
    else:
        for row in prange(a.size // Hv):
            gates_row(a, b, a_log, dt_bias, g, beta, np.int64(row), Hv)


def delta_gates(a, b, a_log, dt_bias, *, out=None):
    outs = out or (None, None)
    g, beta = destination(a.shape, outs[0]), destination(a.shape, outs[1])
    delta_gates_kernel(floats(a), floats(b), floats(a_log), floats(dt_bias), floats(g), floats(beta), a.shape[-1])
    return finish(g, torch.float32, outs[0]), finish(beta, torch.float32, outs[1])


@inlined
def dots4(state, at, Dk, x, i):
    """Four rows of the state times one vector, lane by lane."""
    a, b, c, d = lanes.zeros(), lanes.zeros(), lanes.zeros(), lanes.zeros()
    for j in range(0, Dk, 16):
        y = lanes.load(x, i + j)
        a, b = lanes.fma(lanes.load(state, at + j), y, a), lanes.fma(lanes.load(state, at + Dk + j), y, b)
        c = lanes.fma(lanes.load(state, at + 2 * Dk + j), y, c)
        d = lanes.fma(lanes.load(state, at + 3 * Dk + j), y, d)
    return a, b, c, d


@inlined
def dots16(state, at, Dk, x, i):
    """Sixteen rows of the state . one vector, one a lane."""
    low = dots4(state, at, Dk, x, i) + dots4(state, at + 4 * Dk, Dk, x, i)
    return lanes.totals(low + dots4(state, at + 8 * Dk, Dk, x, i) + dots4(state, at + 12 * Dk, Dk, x, i))


@inlined
def row_step(state, at, decay, delta, key, query, total):
    s = lanes.fma(delta, key, lanes.load(state, at) * decay)
    lanes.store(state, at, s)
    return lanes.fma(s, query, total)


@inlined
def step4(state, at, Dk, decay, deltas, r, k, q, i):
    """S = decay S + delta k^T of four rows, and their S q, lane by lane."""
    w, x = lanes.splat(deltas[r]), lanes.splat(deltas[r + 1])
    y, z = lanes.splat(deltas[r + 2]), lanes.splat(deltas[r + 3])
    a, b, c, d = lanes.zeros(), lanes.zeros(), lanes.zeros(), lanes.zeros()
    for j in range(0, Dk, 16):
        key, query = lanes.load(k, i + j), lanes.load(q, i + j)
        a = row_step(state, at + j, decay, w, key, query, a)
        b = row_step(state, at + Dk + j, decay, x, key, query, b)
        c = row_step(state, at + 2 * Dk + j, decay, y, key, query, c)
        d = row_step(state, at + 3 * Dk + j, decay, z, key, query, d)
    return a, b, c, d


@inner
def delta_rows(q, k, v, g, beta, state, slot, o, b, h, row, L, Hk, Hv, Dk, Dv):
    """Sixteen rows of the state of one head over all tokens."""
    lanes.compiled_once()
    at, deltas = ((slot * Hv + h) * Dv + row) * Dk, lanes.stack_floats(16)
    for t in range(L):
        i, gate = ((b * L + t) * Hk + h // (Hv // Hk)) * Dk, (b * L + t) * Hv + h
        decay = lanes.splat(g[gate])
        delta = (lanes.load(v, gate * Dv + row) - dots16(state, at, Dk, k, i) * decay) * lanes.splat(beta[gate])
        lanes.store(deltas, 0, delta)
        low = step4(state, at, Dk, decay, deltas, np.intp(0), k, q, i) + step4(
            state, at + 4 * Dk, Dk, decay, deltas, np.intp(4), k, q, i
        )
        high = step4(state, at + 8 * Dk, Dk, decay, deltas, np.intp(8), k, q, i)
        high = high + step4(state, at + 12 * Dk, Dk, decay, deltas, np.intp(12), k, q, i)
        lanes.store(o, gate * Dv + row, lanes.totals(low + high))


@kernel
def gated_delta_kernel(q, k, v, g, beta, state, slots, o, L, Hk, Hv, Dk, Dv):
    blocks = Dv // 16
    tasks = slots.size * Hv * blocks
    if tasks * 16 * Dk * L < SMALL:
        for task in range(tasks):
            b, h, row = task // (Hv * blocks), task // blocks % Hv, task % blocks * 16
            delta_rows(q, k, v, g, beta, state, slots[b], o, b, h, row, L, Hk, Hv, Dk, Dv)
    else:
        for index in prange(tasks):
            task = np.int64(index)
            b, h, row = task // (Hv * blocks), task // blocks % Hv, task % blocks * 16
            delta_rows(q, k, v, g, beta, state, slots[b], o, b, h, row, L, Hk, Hv, Dk, Dv)


@inlined
def dot(x, i, y, j, D):
    total = lanes.zeros()
    for d in range(0, D, 16):
        total = lanes.fma(lanes.load(x, i + d), lanes.load(y, j + d), total)
    return lanes.total(total)


@inner
def chunk_matrices(q, k, g, beta, first, n, kh, h, Hk, Hv, Dk, decay, solve, mix):
    """Of n tokens from `first`: decay[t, i] = g[i + 1] ... g[t], A = beta decay k.k below its diagonal, decay q.k."""
    for t in range(n):
        gate = (first + t) * Hv + h
        for i in range(t):
            decay[t, i] = decay[t - 1, i] * g[gate]
        decay[t, t] = np.float32(1)
        at = ((first + t) * Hk + kh) * Dk
        for i in range(t + 1):
            other = ((first + i) * Hk + kh) * Dk
            solve[t, i] = beta[gate] * decay[t, i] * dot(k, other, k, at, Dk)
            mix[t, i] = decay[t, i] * dot(k, other, q, at, Dk)


@inner
def chunk_rows(q, k, v, g, beta, state, at, o, first, n, row, kh, h, Hk, Hv, Dk, Dv, decay, solve, mix, U):
    """Sixteen rows over a chunk: their deltas U by substitution, outputs, and the state at the chunk's end."""
    since = np.float32(1)
    for t in range(n):
        gate, i = (first + t) * Hv + h, ((first + t) * Hk + kh) * Dk
        since = since * g[gate]
        u = lanes.load(v, gate * Dv + row) - dots16(state, at, Dk, k, i) * lanes.splat(since)
        u = u * lanes.splat(beta[gate])
        y = dots16(state, at, Dk, q, i) * lanes.splat(since)
        for j in range(t):
            u = u - lanes.splat(solve[t, j]) * lanes.load(U, j * 16)
            y = lanes.fma(lanes.splat(mix[t, j]), lanes.load(U, j * 16), y)
        lanes.store(U, t * 16, u)
        lanes.store(o, gate * Dv + row, lanes.fma(lanes.splat(mix[t, t]), u, y))
    for j in range(n):
        lanes.store(U, j * 16, lanes.load(U, j * 16) * lanes.splat(decay[n - 1, j]))
    for r in range(0, 16, 4):
        for d in range(at + r * Dk, at + r * Dk + Dk, 16):
            w, x = lanes.load(state, d) * lanes.splat(since), lanes.load(state, d + Dk) * lanes.splat(since)
            y, z = (
                lanes.load(state, d + 2 * Dk) * lanes.splat(since),
                lanes.load(state, d + 3 * Dk) * lanes.splat(since),
            )
            for j in range(n):
                key, u = lanes.load(k, ((first + j) * Hk + kh) * Dk + d - at - r * Dk), j * 16 + r
                w, x = lanes.fma(lanes.splat(U[u]), key, w), lanes.fma(lanes.splat(U[u + 1]), key, x)
                y, z = lanes.fma(lanes.splat(U[u + 2]), key, y), lanes.fma(lanes.splat(U[u + 3]), key, z)
            lanes.store(state, d, w)
            lanes.store(state, d + Dk, x)
            lanes.store(state, d + 2 * Dk, y)
            lanes.store(state, d + 3 * Dk, z)


@allocating
def chunked_head(q, k, v, g, beta, state, slot, o, b, h, L, Hk, Hv, Dk, Dv):
    decay, solve = np.empty((CHUNK, CHUNK), np.float32), np.empty((CHUNK, CHUNK), np.float32)
    mix, U, kh = np.empty((CHUNK, CHUNK), np.float32), np.empty(CHUNK * 16, np.float32), h // (Hv // Hk)
    for start in range(0, L, CHUNK):
        first, n = b * L + start, min(CHUNK, L - start)
        chunk_matrices(q, k, g, beta, first, n, kh, h, Hk, Hv, Dk, decay, solve, mix)
        for row in range(0, Dv, 16):
            at = ((slot * Hv + h) * Dv + row) * Dk
            chunk_rows(q, k, v, g, beta, state, at, o, first, n, row, kh, h, Hk, Hv, Dk, Dv, decay, solve, mix, U)


@kernel
def chunked_delta_kernel(q, k, v, g, beta, state, slots, o, L, Hk, Hv, Dk, Dv):
    for task in prange(slots.size * Hv):
        b, h = np.int64(task) // Hv, np.int64(task) % Hv
        chunked_head(q, k, v, g, beta, state, slots[b], o, b, h, L, Hk, Hv, Dk, Dv)


def gated_delta(q, k, v, g, beta, state, *, slots=None, form=None, in_place=True, out=None):
    (B, L, Hk, Dk), (Hv, Dv) = q.shape, v.shape[2:]
    into = (None, None) if out is None else (out, None) if in_place else out
    direct = in_place and Dk % 16 == 0 and Dv % 16 == 0 and state.is_contiguous() and state.dtype == torch.float32
    named = None if direct else slice(0, B) if slots is None else slots.long()
    # Other sizes run in a copy with rows and columns of zeros added, which stay zero.
    rows = state if direct else padded(state[named].to(torch.float32, copy=True), 2).contiguous()
    which = indices(slots, B) if direct else np.arange(B)
    values = padded(v, 1)
    o = destination(values.shape, into[0] if values is v else None)
    launched = chunked_delta_kernel if form == "chunked" else gated_delta_kernel
    if o.numel():
        launched(
            floats(padded(q, 1)), floats(padded(k, 1)), floats(values), floats(g), floats(beta), floats(rows), which,
            floats(o), L, Hk, Hv, rows.shape[-1], rows.shape[-2],
        )  # fmt: skip
    o = finish(o if values is v else o[..., :Dv].contiguous(), v.dtype, into[0])
    rows = rows if direct else rows[..., :Dv, :Dk]
    if not in_place:
        return o, finish(rows.contiguous(), state.dtype, into[1])
    if not direct:
        state[named] = rows.to(state.dtype)
    return o


def padded(t, axes):
    """The tensor with zeros added to its last axes, to multiples of 16; itself where they are."""
    if t.shape[-1] % 16 == 0 and (axes == 1 or t.shape[-2] % 16 == 0):
        return t
    return torch.nn.functional.pad(t, [side for axis in range(1, axes + 1) for side in (0, -t.shape[-axis] % 16)])
