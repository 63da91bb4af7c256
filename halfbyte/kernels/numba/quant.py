"""Quantised weights on a CPU: qmm through products.py, and the plain loops that make and read packed rows.

The loops of quantize, dequantize and embed follow mlx operation by operation, since their bits are promised.
"""

from functools import lru_cache
from math import prod

import numpy as np
import torch
from numba import prange

from .compiled import allocating, inlined, inner, kernel
from .dots import row_values
from .lanes import WIDTH, compiled_once, fma, load, splat, store, zeros
from .products import Activations, format_of, multiply
from .views import SERIAL, address, destination, finish, floats

NV_RANGE = 448.0 * 6.0


@lru_cache(maxsize=64)
def row_lists(rows, jobs):
    """Which rows of x [rows, jobs, K] each job takes, in order, and where each job's begin."""
    order = np.ascontiguousarray(np.arange(rows * jobs).reshape(rows, jobs).T).reshape(-1)
    return order, np.arange(jobs + 1) * rows


class Matrices:
    """One matrix or a stack of them, as kernels take it: where its parts begin.

    Parts that are not contiguous are copied; the copies live as long as this does.
    """

    def __init__(self, w, parts):
        self.kept = [None if t is None else t.contiguous() for t in parts]
        bases = np.array([0 if t is None else t.data_ptr() for t in self.kept])
        self.jobs, (self.N, self.K) = prod(w.shape[:-2]), w.shape[-2:]
        steps = [0 if t is None or t.ndim < 3 else t.stride(-3) * t.element_size() for t in self.kept]
        self.addresses = bases[:, None] + np.array(steps)[:, None] * np.arange(self.jobs)  # int64 [3, jobs]
        self.starts = tuple(self.addresses)
        self.lasting = all(t is given for t, given in zip(self.kept, parts, strict=True))


def matrices(w):
    """The Matrices of a weight; a quantised one keeps its own, for as long as its parts lie where they do."""
    if not hasattr(w, "bits"):
        return Matrices(w, (w, None, None))
    words, scales, biases = w.words, w.scales, w.biases
    here = words.data_ptr(), scales.data_ptr(), address(biases)
    place, found = w.__dict__.get("_matrices", (None, None))
    if place != here:
        found = Matrices(w, (words, scales, biases))
        if found.lasting:
            w.__dict__["_matrices"] = here, found
    return found


def qmm(x, w, *, transpose=True, out=None):
    m, form = matrices(w), format_of(w)
    N, K, jobs = m.N, m.K, m.jobs
    width = N if transpose else K
    y = destination((*x.shape[:-1], width), out)
    target = y.numpy().reshape(-1)
    if target.size == 0:
        return finish(y, x.dtype, out)
    rows, source = target.size // (jobs * width), floats(x)
    if transpose:
        order, first = row_lists(rows, jobs)
        multiply(Activations(form, source, K), m.starts, first, order, order, target, N)
    else:
        contract_kernel(form.form, form.grouping, form.values, N, K, *m.starts, source, rows, target)
    if getattr(w, "global_scale", None) is not None:
        y.mul_((w.global_scale / NV_RANGE).reshape(-1, 1) if jobs > 1 else float(w.global_scale / NV_RANGE))
    return finish(y, x.dtype, out)


SPAN = 256  # columns a task contracts: long enough streams, few enough sums to stay in L1


@allocating
def contract_span(form, grouping, values, N, K, words, scales, biases, x, rows, jobs, job, first, count, y):
    """Columns of `count` blocks from block `first`: y[row, job] += x[row, job, n] w[n], one weight row at a time.

    Sixteen rows of weights are summed apart before they join the others: long sums stay exact that way.
    """
    wide = WIDTH * values
    size = wide * count
    buffer = np.empty(size, np.float32)
    sums, some = np.zeros(rows * size, np.float32), np.zeros(rows * size, np.float32)
    for n in range(N):
        for block in range(count):
            inside = min(wide, K - (first + block) * wide) // values
            row_values(form, grouping, K, words, scales, biases, n, first + block, inside, buffer, block * wide)
        for row in range(rows):
            factor = splat(x[(row * jobs + job) * N + n])
            for i in range(0, size, WIDTH):
                at = row * size + i
                store(some, at, fma(factor, load(buffer, i), load(some, at)))
        if n % 16 == 15 or n == N - 1:
            for at in range(0, rows * size, WIDTH):
                store(sums, at, load(sums, at) + load(some, at))
                store(some, at, zeros())
    for row in range(rows):
        for i in range(size):
            block, rest = i // wide, i % wide
            column = (first + block) * wide + (rest % WIDTH) * values + rest // WIDTH
            if column < K:
                y[(row * jobs + job) * K + column] = sums[row * size + i]


@kernel
def contract_kernel(form, grouping, values, N, K, words, scales, biases, x, rows, y):
    """y[row, job, k] = sum_n x[row, job, n] w[job, n, k]."""
    jobs, wide = words.size, WIDTH * values
    blocks = (K + wide - 1) // wide
    count = max(1, SPAN // wide)
    spans = (blocks + count - 1) // count
    for task in prange(jobs * spans):
        job, first = np.intp(task) // spans, np.intp(task) % spans * count
        contract_span(
            form, grouping, values, N, K, words[job], scales[job], biases[job], x, rows, jobs, job, first,
            min(count, blocks - first), y,
        )  # fmt: skip


@inlined
def code_at(words, row, i, bits):
    """Code i of the row of words that begins at `row`; it may straddle two words."""
    bit = i * bits
    at, start = row + (bit >> 5), bit & 31
    pair = np.uint64(words[at])
    if start + bits > 32:
        pair |= np.uint64(words[at + 1]) << np.uint64(32)
    return np.int64((pair >> np.uint64(start)) & np.uint64((1 << bits) - 1))


@inlined
def as_bfloat16(x):
    """x rounded to bfloat16, to even; infinities and NaN as they are."""
    bits = np.uint32(np.float32(x).view(np.uint32))
    if (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000):
        return x
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(bits & np.uint32(0xFFFF0000)).view(np.float32)


@inner
def dequantize_row(words, scales, biases, table, row, K, bits, group, narrow, y):
    """One row: table[q] scale + bias, with the product and the sum rounded to bfloat16 where `narrow`."""
    compiled_once()
    base, G = row * (K * bits // 32), K // group
    for g in range(G):
        scale = scales[row * G + g]
        for i in range(g * group, g * group + group):
            v = np.float32(table[code_at(words, base, i, bits)] * scale)
            if narrow:
                v = as_bfloat16(v)
            if biases.size:
                v = np.float32(v + biases[row * G + g])
                if narrow:
                    v = as_bfloat16(v)
            y[row * K + i] = v


@kernel
def dequantize_kernel(words, scales, biases, table, K, bits, group, narrow, y):
    rows = y.size // K
    if y.size < SERIAL:
        for row in range(rows):
            dequantize_row(words, scales, biases, table, row, K, bits, group, narrow, y)
    else:
        for row in prange(rows):
            dequantize_row(words, scales, biases, table, np.intp(row), K, bits, group, narrow, y)


@lru_cache(maxsize=8)
def value_table(mode, bits):
    """What each code stands for, as float32."""
    codes = torch.arange(1 << bits)
    if mode == "affine":
        return codes.float().numpy()
    if bits == 8:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([magnitudes, -magnitudes])


def decoded_scales(p, scales, dtype):
    """Scales as float32 values that dtype can hold, the global scale of nvfp4 (kept in float32) included."""
    if p.mode == "affine":
        return scales.to(dtype).float()
    if p.mode == "nvfp4":
        decoded = scales.view(torch.float8_e4m3fn).float()
    else:
        powers = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        decoded = torch.where(scales == 255, torch.inf, powers)
    if p.global_scale is None:
        return decoded.to(dtype).float()
    factor = p.global_scale / NV_RANGE
    return decoded * (factor.reshape(()) if factor.numel() == 1 else factor[..., None, None])


def dequantized(p, words, scales, biases, dtype, y):
    """Fill the float32 tensor y with what rows of p stand for, as if computed in dtype.

    float16 steps are torch's own: codes come out as float32, then product and sum round in float16.
    """
    K, half = p.shape[-1], dtype == torch.float16
    affine = p.mode == "affine"
    scale = decoded_scales(p, scales, dtype)
    bias = biases.to(dtype).float() if affine else None
    narrow = dtype == torch.bfloat16 and p.global_scale is None
    if half and p.global_scale is None:
        one = torch.ones(scales.shape)
        _run_dequantize(p, words, one, None, K, False, y)
        grouped = y.to(dtype).reshape(*scales.shape, p.group) * scale.to(dtype)[..., None]
        grouped = grouped + biases.to(dtype)[..., None] if affine else grouped
        return y.copy_(grouped.reshape(y.shape))
    _run_dequantize(p, words, scale, bias, K, narrow, y)
    return y


def _run_dequantize(p, words, scale, bias, K, narrow, y):
    codes = words.view(torch.int32).contiguous().numpy().view(np.uint32).reshape(-1)
    table = value_table(p.mode, p.bits)
    dequantize_kernel(codes, floats(scale), floats(bias), table, K, p.bits, p.group, narrow, y.numpy().reshape(-1))


def dequantize(p, dtype=torch.float32, *, out=None):
    y = destination(p.shape, out)
    if y.numel():
        dequantized(p, p.words, p.scales, p.biases, dtype, y)
    return finish(y, dtype, out)


def embed(ids, w, dtype=torch.float32, *, out=None):
    chosen = ids.long().reshape(-1)
    if not hasattr(w, "bits"):
        return finish(w[chosen].reshape(*ids.shape, w.shape[-1]), dtype, out)
    y = destination((*ids.shape, w.shape[-1]), out)
    if y.numel():
        biases = None if w.biases is None else w.biases[chosen]
        dequantized(w, w.words.view(torch.int32)[chosen], w.scales[chosen], biases, dtype, y)
    return finish(y, dtype, out)


@inner
def quantize_group(w, base, group, bits, codes):
    """mlx's affine rule for one group: its scale and bias in float32, its codes in `codes`."""
    low, high = w[base], w[base]
    for i in range(base + 1, base + group):
        low, high = min(low, w[i]), max(high, w[i])
    top = np.float32((1 << bits) - 1)
    from_low = abs(low) > abs(high)
    scale = max(np.float32((high - low) / top), np.float32(1e-7))
    scale = scale if from_low else -scale
    edge = low if from_low else high
    steps = np.rint(np.float32(edge / scale))
    bias = np.float32(0)
    if steps != 0:
        scale, bias = np.float32(edge / steps), edge
    for i in range(group):
        code = np.rint(np.float32(np.float32(w[base + i] - bias) / scale))
        codes[i] = np.int64(min(code, top)) if code > 0 else 0  # a constant huge group has scale 0: NaN counts as 0
    return scale, bias


@inner
def pack_codes(codes, bits, words, bit):
    """Write codes into the bit stream `words` from position `bit`, which begins a word."""
    held, count, at = np.uint64(0), 0, bit >> 5
    for code in codes:
        held |= np.uint64(code) << np.uint64(count)
        count += bits
        if count >= 32:
            words[at] = np.uint32(held & np.uint64(0xFFFFFFFF))
            held >>= np.uint64(32)
            count -= 32
            at += 1


@kernel
def quantize_kernel(w, rows, K, bits, group, words, scales, biases):
    for index in prange(rows):
        row, codes = np.intp(index), np.empty(group, np.int64)
        for g in range(K // group):
            at = row * (K // group) + g
            scales[at], biases[at] = quantize_group(w, row * K + g * group, group, bits, codes)
            pack_codes(codes, bits, words, (row * K + g * group) * bits)


@kernel
def e2m1_kernel(scaled, words):
    """The nearest e2m1 code of each value, the lower code where two are as near, packed eight to a word."""
    for at in prange(words.size):
        word = np.uint32(0)
        for i in range(8):
            v = scaled[at * 8 + i]
            size = abs(v)
            code = (size > 0.25) + (size > 0.75) + (size > 1.25) + (size > 1.75)
            code += (size > 2.5) + (size > 3.5) + (size > 5.0)
            if v < 0 and code:
                code += 8
            word |= np.uint32(code) << np.uint32(4 * i)
        words[at] = word


def quantize(w, bits=None, group=None, mode="affine", global_scale=None):
    K, rows = w.shape[-1], w.numel() // w.shape[-1]
    words = torch.empty((*w.shape[:-1], K * bits // 32), dtype=torch.int32)
    flat = words.numpy().view(np.uint32).reshape(-1)
    if mode == "affine":
        scales = torch.empty((*w.shape[:-1], K // group), dtype=torch.float32)
        biases = torch.empty(scales.shape, dtype=torch.float32)
        quantize_kernel(floats(w), rows, K, bits, group, flat, floats(scales), floats(biases))
        return words.view(torch.uint32), scales.to(w.dtype), biases.to(w.dtype)
    grouped, factor = w.reshape(*w.shape[:-1], K // group, group), None
    ideal = grouped.abs().amax(-1) / (448.0 if mode == "mxfp8" else 6.0)
    if mode == "nvfp4":
        if global_scale is not None:
            each = global_scale.reshape(()) if global_scale.numel() == 1 else global_scale[..., None, None]
            factor = torch.full_like(each, NV_RANGE) / each  # of a plain number torch would take the reciprocal
        scales = e4m3(ideal if factor is None else ideal.float() * factor)
        step = scales.view(torch.float8_e4m3fn).to(w.dtype)
    else:
        exponent = torch.where(ideal == 0, 0.0, torch.ceil(torch.log2(ideal.double()).float())).clamp(-127, 127)
        scales = (exponent + 127).to(torch.uint8)
        step = torch.ldexp(torch.ones_like(exponent), exponent.int()).to(w.dtype)
    scaled = torch.where(step[..., None] == 0, 0.0, grouped / step[..., None])
    scaled = scaled if factor is None else scaled.float() * factor[..., None]
    if mode == "mxfp8":
        return e4m3(scaled).reshape(w.shape).contiguous().view(torch.int32).view(torch.uint32), scales, None
    e2m1_kernel(floats(scaled), flat)
    return words.view(torch.uint32), scales, None


def e4m3(x):
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
