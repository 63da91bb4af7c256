"""Row ops in lanes of sixteen: one pass for a row's statistic, one for its results; rows in parallel.

Rows are read twice, the second time from L1 or L2, so a norm costs about one read and one write of its rows.
"""

import numpy as np
import torch
from numba import prange

from . import lanes
from .compiled import allocating, inlined, inner, kernel
from .views import SERIAL, address, destination, finish, floats, widened

ACTIVATION = {"silu": 0, "gelu_tanh": 1, "sigmoid": 2}


@inlined
def sum_input(x, add, i, n):
    """n lanes of x + add at i; the address of what is absent is 0."""
    s = lanes.load_n(x, i, n)
    if add:
        s = s + lanes.load_n(add, i, n)
    return s


@inlined
def inverse_rms(x, add, base, D, eps):
    """1 / sqrt(mean((x + add)^2) + eps) of the row at `base`, in four independent sums."""
    a, b, c, d = lanes.zeros(), lanes.zeros(), lanes.zeros(), lanes.zeros()
    i, n = 0, np.intp(16)
    while i + 64 <= D:
        s, t = sum_input(x, add, base + i, n), sum_input(x, add, base + i + 16, n)
        u, v = sum_input(x, add, base + i + 32, n), sum_input(x, add, base + i + 48, n)
        a, b, c, d = lanes.fma(s, s, a), lanes.fma(t, t, b), lanes.fma(u, u, c), lanes.fma(v, v, d)
        i += 64
    while i < D:
        s = sum_input(x, add, base + i, min(16, D - i))
        a = lanes.fma(s, s, a)
        i += 16
    mean = np.float64(lanes.total((a + b) + (c + d))) / D
    return 1.0 / np.sqrt(mean + eps)


@inlined
def activated(v, activation):
    """silu, gelu_tanh or sigmoid of the lanes; gelu's (1 + tanh u) / 2 is 1 / (1 + e^-2u)."""
    one = lanes.splat(np.float32(1))
    if activation == 0:
        return v / (one + lanes.exp(lanes.zeros() - v))
    if activation == 1:
        cubic = lanes.fma(lanes.splat(np.float32(0.044715)) * v * v, v, v)
        return v / (one + lanes.exp(cubic * lanes.splat(np.float32(-1.5957691216057308))))
    return one / (one + lanes.exp(lanes.zeros() - v))


@inlined
def times_scale(y, scale, scales, i, n):
    """y times the scale: none, one number or one a column."""
    if scales == 1:
        y = y * lanes.splat(lanes.element(scale, 0))
    elif scales > 1:
        y = y * lanes.load_n(scale, i, n)
    return y


@inlined
def norm_piece(x, weight, add, mul, gate, residual, scale, scales, y, s_out, base, i, n, factor):
    s = sum_input(x, add, base + i, n)
    if s_out:
        lanes.store_n(s_out, base + i, s, n)
    by = lanes.load_n(weight, i, n) if weight else lanes.splat(np.float32(1))
    if mul:
        by = by * lanes.load_n(mul, base + i, n)
    if gate:
        by = by * activated(lanes.load_n(gate, base + i, n), 0)
    if residual:
        v = lanes.product_sum(s, factor, by, lanes.load_n(residual, base + i, n))
    else:
        v = s * lanes.splat(np.float32(factor)) * by
    lanes.store_n(y, base + i, times_scale(v, scale, scales, i, n), n)


@inner
def norm_row(x, weight, eps, add, mul, gate, residual, scale, scales, y, s_out, base, D):
    lanes.compiled_once()
    factor = inverse_rms(x, add, base, D, eps)
    whole = D - D % 16
    for i in range(0, whole, 16):
        norm_piece(x, weight, add, mul, gate, residual, scale, scales, y, s_out, base, i, np.intp(16), factor)
    if whole < D:
        norm_piece(x, weight, add, mul, gate, residual, scale, scales, y, s_out, base, whole, D - whole, factor)


@kernel
def rms_norm_kernel(x, weight, eps, add, mul, gate, residual, scale, scales, y, s_out, rows, D):
    if rows * D < SERIAL:
        for row in range(rows):
            norm_row(x, weight, eps, add, mul, gate, residual, scale, scales, y, s_out, row * D, D)
    else:
        for row in prange(rows):
            base = np.intp(row) * D
            norm_row(x, weight, eps, add, mul, gate, residual, scale, scales, y, s_out, base, D)


def rms_norm(
    x, weight=None, eps=1e-6, *, add=None, mul=None, gate=None, residual=None, scale=None, return_sum=False,
    extra_dtype=None, head_major=False, out=None,
):  # fmt: skip
    outs = out if isinstance(out, tuple) else (out,)
    y = destination(x.shape, None if head_major else outs[0])
    s = destination(x.shape, outs[1] if out is not None else None) if return_sum else None
    held = [widened(t) for t in (x, weight, add, mul, gate, residual, scale_tensor(scale))]
    source, w, a, m, g, r, factor = map(address, held)
    D = x.shape[-1]
    rms_norm_kernel(
        source, w, eps, a, m, g, r, factor, 0 if scale is None else held[6].numel(), y.data_ptr(), address(s),
        x.numel() // D, D,
    )  # fmt: skip
    if not head_major and extra_dtype is None and not return_sum:
        return finish(y, x.dtype, out)
    outs = outs if out is not None else (None,) * 3
    turned = y.transpose(-3, -2).contiguous() if head_major else y
    results = [finish(y if extra_dtype else turned, x.dtype, outs[0])]
    if return_sum:
        results.append(finish(s, x.dtype, outs[1]))
    if extra_dtype:
        results.append(finish(turned, extra_dtype, outs[-1]))
    return tuple(results) if len(results) > 1 else results[0]


def scale_tensor(scale):
    return scale if scale is None or isinstance(scale, torch.Tensor) else torch.tensor([scale], dtype=torch.float32)


@inner
def chain_row(x, weight, residual, eps, r, weights, residual2, scale, scales, ys, base, D):
    """r = residual + rms(x) weight (no weight: r is x), then y_i from weights_i for each of the addresses `ys`."""
    lanes.compiled_once()
    if weight:
        factor = inverse_rms(x, 0, base, D, eps)
        for i in range(0, D, 16):
            n = min(16, D - i)
            v, w = lanes.load_n(x, base + i, n), lanes.load_n(weight, i, n)
            lanes.store_n(r, base + i, lanes.product_sum(v, factor, w, lanes.load_n(residual, base + i, n)), n)
    factor = inverse_rms(r, 0, base, D, eps)
    for which in range(ys.size):
        for i in range(0, D, 16):
            n = min(16, D - i)
            v, w = lanes.load_n(r, base + i, n), lanes.load_n(weights[which], i, n)
            if residual2:
                v = lanes.product_sum(v, factor, w, lanes.load_n(residual2, base + i, n))
            else:
                v = v * lanes.splat(np.float32(factor)) * w
            lanes.store_n(ys[which], base + i, times_scale(v, scale, scales, i, n), n)


@kernel
def rms_norm_chain_kernel(x, weight, residual, eps, r, weights, residual2, scale, scales, ys, rows, D):
    if rows * D < SERIAL:
        for row in range(rows):
            chain_row(x, weight, residual, eps, r, weights, residual2, scale, scales, ys, row * D, D)
    else:
        for row in prange(rows):
            chain_row(x, weight, residual, eps, r, weights, residual2, scale, scales, ys, np.intp(row) * D, D)


def addresses(tensors):
    return np.array([t.data_ptr() for t in tensors])


def rms_norm_many(x, weights, eps=1e-6, *, out=None):
    held, source, D = [widened(w) for w in weights], widened(x), x.shape[-1]
    # Never into x itself, which every output is made of.
    ys, at = [torch.empty(x.shape, dtype=torch.float32) for _ in weights], source.data_ptr()
    rms_norm_chain_kernel(at, 0, 0, eps, at, addresses(held), 0, 0, 0, addresses(ys), x.numel() // D, D)
    outs = out or [None] * len(weights)
    return tuple(finish(y, x.dtype, o) for y, o in zip(ys, outs, strict=True))


def rms_norm_chain(x, weight, residual, weights, eps=1e-6, *, residual2=None, scale=None, out=None):
    r, *ys = (torch.empty(x.shape, dtype=torch.float32) for _ in range(len(weights) + 1))
    held, D = [widened(t) for t in (x, weight, residual, residual2, scale_tensor(scale), *weights)], x.shape[-1]
    source, w, first, second, factor = map(address, held[:5])
    rms_norm_chain_kernel(
        source, w, first, eps, r.data_ptr(), addresses(held[5:]), second, factor,
        0 if scale is None else held[4].numel(), addresses(ys), x.numel() // D, D,
    )  # fmt: skip
    outs = out or [None] * (len(weights) + 1)
    return tuple(finish(y, x.dtype, o) for y, o in zip((r, *ys), outs, strict=True))


@inner
def glu_span(gate, up, activation, y, start, stop):
    lanes.compiled_once()
    for i in range(start, stop, 16):
        n = min(16, stop - i)
        lanes.store_n(y, i, activated(lanes.load_n(gate, i, n), activation) * lanes.load_n(up, i, n), n)


@inner
def softcap_span(x, cap, y, start, stop):
    """cap tanh(x / cap), with tanh u = 1 - 2 / (1 + e^2u)."""
    lanes.compiled_once()
    two, one = lanes.splat(np.float32(2)), lanes.splat(np.float32(1))
    for i in range(start, stop, 16):
        n = min(16, stop - i)
        u = lanes.load_n(x, i, n) / lanes.splat(cap)
        lanes.store_n(y, i, lanes.splat(cap) * (one - two / (one + lanes.exp(two * u))), n)


SPAN = 1 << 12  # elements a task: enough to outweigh its scheduling, few enough to share between threads


@kernel
def glu_kernel(gate, up, activation, y, size):
    if size < SERIAL:
        glu_span(gate, up, activation, y, np.intp(0), size)
    else:
        for task in prange((size + SPAN - 1) // SPAN):
            start = np.intp(task) * SPAN
            glu_span(gate, up, activation, y, start, min(size, start + SPAN))


def glu(gate, up, activation="silu", *, out=None):
    y, g, u = destination(up.shape, out), widened(gate), widened(up)
    glu_kernel(g.data_ptr(), u.data_ptr(), ACTIVATION[activation], y.data_ptr(), y.numel())
    return finish(y, up.dtype, out)


@kernel
def softcap_kernel(x, cap, y, size):
    if size < SERIAL:
        softcap_span(x, cap, y, np.intp(0), size)
    else:
        for task in prange((size + SPAN - 1) // SPAN):
            start = np.intp(task) * SPAN
            softcap_span(x, cap, y, start, min(size, start + SPAN))


def softcap(x, cap, *, out=None):
    y, source = destination(x.shape, out), widened(x)
    softcap_kernel(source.data_ptr(), np.float32(cap), y.data_ptr(), y.numel())
    return finish(y, x.dtype, out)


@allocating
def rope_token(x, position, inv_freq, rotary, interleaved, scale, y, token, H, D):
    """All heads of one token: cos and sin once, of the angle in float64, then the rotations."""
    lanes.compiled_once()
    half = rotary // 2
    cos, sin = np.empty(half, np.float32), np.empty(half, np.float32)
    for i in range(half):
        angle = np.float64(position) * inv_freq[i]
        cos[i], sin[i] = np.float32(np.cos(angle)) * scale, np.float32(np.sin(angle)) * scale
    for base in range(token * H * D, (token + 1) * H * D, D):
        if interleaved:
            for i in range(half):
                a, b = x[base + 2 * i], x[base + 2 * i + 1]
                y[base + 2 * i], y[base + 2 * i + 1] = a * cos[i] - b * sin[i], a * sin[i] + b * cos[i]
        else:
            for i in range(0, half, 16):
                n = min(16, half - i)
                a, b = lanes.load_n(x, base + i, n), lanes.load_n(x, base + half + i, n)
                c, s = lanes.load_n(cos, i, n), lanes.load_n(sin, i, n)
                lanes.store_n(y, base + i, a * c - b * s, n)
                lanes.store_n(y, base + half + i, a * s + b * c, n)
        for i in range(rotary, D, 16):
            n = min(16, D - i)
            lanes.store_n(y, base + i, lanes.load_n(x, base + i, n), n)


@kernel
def rope_kernel(x, positions, inv_freq, rotary, interleaved, scale, y, H, D):
    tokens = x.size // max(1, H * D)
    if x.size < SERIAL:
        for token in range(tokens):
            place = positions[token % positions.size]
            rope_token(x, place, inv_freq, rotary, interleaved, scale, y, token, H, D)
    else:
        for index in prange(tokens):
            token = np.intp(index)
            place = positions[token % positions.size]
            rope_token(x, place, inv_freq, rotary, interleaved, scale, y, token, H, D)


def rope(x, positions, inv_freq, *, rotary=None, interleaved=False, scale=1.0, out=None):
    y = destination(x.shape, out)
    rope_kernel(
        floats(x), positions.long().contiguous().numpy().reshape(-1), inv_freq.double().numpy(), rotary or x.shape[-1],
        interleaved, np.float32(scale), floats(y), x.shape[-2], x.shape[-1],
    )  # fmt: skip
    return finish(y, x.dtype, out)
