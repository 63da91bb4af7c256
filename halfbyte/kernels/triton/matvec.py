"""Quantised and dense matrices times few rows, at the speed of reading the weights."""

import torch
import triton
import triton.language as tl

from .codes import (
    affine_value,
    any_nan,
    chunk_words,
    e4m3_value,
    eighths,
    gathered,
    place,
    power_value,
    small_float_value,
)
from .device import INTERPRETED, facts
from .elementary import ACTIVATIONS, activated
from .exact import multiply_exactly, small
from .rowwise import glu

NV_RANGE = tl.constexpr(448.0 * 6.0)
UP = tl.constexpr(2.0**64)  # multiplied into activations, so that their products with tiny floats are none


@triton.jit
def activations(x, chunks, K, BITS: tl.constexpr, MODE: tl.constexpr, PRECISE: tl.constexpr):
    """The activations of chunks [C] as 32 tiles scaled for their codes, the sum of them, and the sum of the scaled."""
    values = ()
    for i in tl.static_range(4):
        at = (chunks * 32 + 8 * i)[:, None] + tl.arange(0, 8)
        values = values + eighths(tl.load(x + at, mask=at < K, other=0.0).to(tl.float32))
    scaled, total, lifted = (), tl.zeros_like(values[0]), tl.zeros_like(values[0])
    for j in tl.static_range(32):
        total += values[j]
        if MODE == "affine":
            scaled = scaled + (values[j] * (1 << (23 - BITS - place(j, BITS, PRECISE))),)
            if not PRECISE:
                lifted += scaled[j]
        else:
            scaled = scaled + (values[j] * UP,)
    return scaled + (total * (1.0 / (1 << BITS)), lifted)


@triton.jit
def row_activations(
    x, x_row, ROWS, chunks, K, BITS: tl.constexpr, MODE: tl.constexpr, PRECISE: tl.constexpr, M: tl.constexpr
):
    """The activations of M rows, one after another; the last row again where there are fewer."""
    xs = ()
    for m in tl.static_range(M):
        xs = xs + activations(x + tl.minimum(m, ROWS - 1) * x_row, chunks, K, BITS, MODE, PRECISE)
    return xs


@triton.jit
def scale_at(source, at, inside, WIDE: tl.constexpr, KIND: tl.constexpr):
    if WIDE == 0:
        return tl.where(inside, gathered(source, at, KIND), 0)
    else:
        return tl.load(source.to(tl.pointer_type(KIND)) + at, mask=inside, other=0.0)


@triton.jit
def row_words(K, BITS: tl.constexpr, WIDE: tl.constexpr):
    """The words of a row, such that the compiler sees what they are a multiple of."""
    if WIDE == 0:
        return K * BITS // 32
    else:
        return K // 32 * BITS


@triton.jit
def affine_products(xs, one, parts, scale, bias, BITS: tl.constexpr, PRECISE: tl.constexpr, M: tl.constexpr):
    """As `products`, over 2^BITS."""
    sums = ()
    for m in tl.static_range(M):
        sums = sums + (-xs[34 * m + 33][:, None],)
    for j in tl.static_range(32):
        value = affine_value(parts, one, j, BITS, place(j, BITS, PRECISE))
        if PRECISE:  # the weight itself: scale q and bias cancel before they are summed
            value = (value - 1.0) * scale + bias * (1.0 / (1 << BITS))
        sums = add_products(sums, value, xs, j, M)
    if not PRECISE:
        whole = ()
        for m in tl.static_range(M):
            whole = whole + (sums[m] * scale + bias * xs[34 * m + 32][:, None],)
        sums = whole
    return sums


@triton.jit
def add_products(sums, value, xs, J: tl.constexpr, M: tl.constexpr):
    more = ()
    for m in tl.static_range(M):
        more = more + (sums[m] + value * xs[34 * m + J][:, None],)
    return more


@triton.jit
def small_float_products(xs, parts, FIRST: tl.constexpr, LAST: tl.constexpr, BITS: tl.constexpr, M: tl.constexpr):
    """Sums of M rows over codes FIRST to LAST of chunks, before their scale."""
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros(parts[0].shape, tl.float32),)
    for j in tl.static_range(FIRST, LAST):
        sums = add_products(sums, small_float_value(parts, j, BITS), xs, j, M)
    whole = ()
    for m in tl.static_range(M):
        whole = whole + (sums[m] * (2.0**62 if BITS == 4 else 2.0**56),)
    return whole


@triton.jit
def tile_of(
    w, first, rows, chunks, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, MODE: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Chunks of the weight rows `first + rows` as they lie in memory: words, scales, and biases or second scales.

    Chunks past the end are the last one again, with a scale of 0.
    """
    words, scales, biases, _ = w
    last = tl.cdiv(K, 32) - 1
    inside = (chunks <= last)[:, None]
    chunks = tl.minimum(chunks, last)
    pitch = row_words(K, BITS, WIDE)
    parts = chunk_words(words + first * pitch, rows, chunks, pitch, BITS, WIDE)
    groups = rows[None, :] * (K // GROUP) + (chunks * 32 // GROUP)[:, None]
    scales += first * (K // GROUP)
    scale = scale_at(scales, groups, inside, WIDE, KIND)
    other = scale
    if MODE == "affine":
        other = scale_at(biases + first * (K // GROUP), groups, inside, WIDE, KIND)
    elif MODE == "nvfp4":
        groups = rows[None, :] * (K // GROUP) + tl.minimum(chunks * 2 + 1, K // GROUP - 1)[:, None]
        other = scale_at(scales, groups, inside, WIDE, KIND)
    return parts + (scale, other)


@triton.jit
def products(xs, one, tile, BITS: tl.constexpr, MODE: tl.constexpr, PRECISE: tl.constexpr, M: tl.constexpr):
    """What chunks [C] of weight rows [R] add to the results of M rows of activations: M tiles [C, R]."""
    scale, other = tile[BITS], tile[BITS + 1]
    if MODE == "affine":
        sums = affine_products(xs, one, tile, scale.to(tl.float32), other.to(tl.float32), BITS, PRECISE, M)
    else:
        sums = ()
        if MODE == "nvfp4":
            front = small_float_products(xs, tile, 0, 16, BITS, M)
            back = small_float_products(xs, tile, 16, 32, BITS, M)
            for m in tl.static_range(M):
                sums = sums + (front[m] * e4m3_value(scale) + back[m] * e4m3_value(other),)
        else:
            some = small_float_products(xs, tile, 0, 32, BITS, M)
            power = power_value(scale)
            if BITS == 8:
                power = tl.where(any_nan(tile, BITS), float("nan"), power)
            for m in tl.static_range(M):
                sums = sums + (some[m] * power,)
    return sums


@triton.jit
def added_up(sums, factor, M: tl.constexpr):
    results = ()
    for m in tl.static_range(M):
        results = results + (tl.sum(sums[m], 0) * factor,)
    return results


@triton.jit
def matrix(
    w, index, COUNT, BITS: tl.constexpr, MODE: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr,
    SCATTERED: tl.constexpr,
):  # fmt: skip
    """Where the words, scales and biases of matrix `index` begin, and what multiplies its results."""
    words, scales, biases, global_scale, word_step, scale_step, global_step = w
    if SCATTERED:  # words is a table of addresses [3, COUNT]
        scales = tl.load(words + COUNT + index).to(tl.pointer_type(KIND))
        biases = tl.load(words + 2 * COUNT + index).to(tl.pointer_type(KIND))
        words = tl.load(words + index).to(tl.pointer_type(tl.int32))
        if WIDE > 1:
            words = tl.multiple_of(words, [4 * WIDE])
    else:
        words += index * word_step
        scales += index * scale_step
        biases += index * scale_step
    if MODE == "affine":
        factor = tl.full((), 1 << BITS, tl.float32)
    elif global_scale is None:
        factor = tl.full((), 1, tl.float32)
    else:
        factor = tl.load(global_scale + index * global_step) / NV_RANGE
    return words, scales, biases, factor


@triton.jit
def outputs_in_pieces(
    w, x, x_row, ROWS, one, first, rows, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, MODE: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr,
    PRECISE: tl.constexpr, M: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """M results [R] of rows too long for their activations to stay in registers: those are read piece by piece."""
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros([C, R], tl.float32),)
    for start in range(0, tl.cdiv(K, 32), C):
        chunks = start + tl.arange(0, C)
        tile = tile_of(w, first, rows, chunks, K, BITS, GROUP, MODE, KIND, WIDE)
        xs = row_activations(x, x_row, ROWS, chunks, K, BITS, MODE, PRECISE, M)
        more = products(xs, one, tile, BITS, MODE, PRECISE, M)
        joined = ()
        for m in tl.static_range(M):
            joined = joined + (sums[m] + more[m],)
        sums = joined
    return added_up(sums, w[3], M)


@triton.jit
def store_rows(y, y_row, ROWS, at, results, M: tl.constexpr):
    for m in tl.static_range(M):
        tl.store(y + tl.minimum(m, ROWS - 1) * y_row + at, results[m])


@triton.jit
def matvec_kernel(
    x, ids, w, up, y, N, K, COUNT, ROWS, HEADS, x_row, x_head, y_row, y_head,
    BITS: tl.constexpr, GROUP: tl.constexpr, MODE: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr,
    SCATTERED: tl.constexpr, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """y[row, head] = w[head] x[row, head], or w[ids[row, head]]; with `up`, activation(w x) . (up x).

    A program takes M rows of one head and R outputs; in FORM "loop" every so many blocks of R outputs, for which the
    activations stay in registers; in FORM "pieces" rows are longer than a tile.
    """
    head = tl.program_id(1) % HEADS
    row = (tl.program_id(1) // HEADS).to(tl.int64) * M
    index = head.to(tl.int64)
    if ids is not None:
        index = tl.load(ids + row * HEADS + head).to(tl.int64)
    w = matrix(w, index, COUNT, BITS, MODE, KIND, WIDE, SCATTERED)
    if ACTIVATION is not None:
        up = matrix(up, index, COUNT, BITS, MODE, KIND, WIDE, SCATTERED)
    one = (0x3F800000 + tl.minimum(N, 0)).to(tl.uint32)
    x += row * x_row + head.to(tl.int64) * x_head
    y += row * y_row + head.to(tl.int64) * y_head
    left = ROWS - row
    chunks = tl.arange(0, C)
    first = tl.program_id(0).to(tl.int64) * R
    rows = tl.minimum(tl.arange(0, R), tl.cast(N - 1 - first, tl.int32))
    if FORM == "once":  # weights are asked for before anything is waited for
        tile = tile_of(w, first, rows, chunks, K, BITS, GROUP, MODE, KIND, WIDE)
        if ACTIVATION is not None:
            other = tile_of(up, first, rows, chunks, K, BITS, GROUP, MODE, KIND, WIDE)
        tl.debug_barrier()  # or the compiler would ask for most of them later, to spare registers
        xs = row_activations(x, x_row, left, chunks, K, BITS, MODE, PRECISE, M)
        results = added_up(products(xs, one, tile, BITS, MODE, PRECISE, M), w[3], M)
        if ACTIVATION is not None:
            others = added_up(products(xs, one, other, BITS, MODE, PRECISE, M), up[3], M)
            results = (activated(results[0], ACTIVATION, PRECISE) * others[0],)
        store_rows(y, y_row, left, first + rows, results, M)
    elif FORM == "loop":
        xs = row_activations(x, x_row, left, chunks, K, BITS, MODE, PRECISE, M)
        for block in range(tl.program_id(0), tl.cdiv(N, R), tl.num_programs(0)):
            first = tl.cast(block, tl.int64) * R
            rows = tl.minimum(tl.arange(0, R), tl.cast(N - 1 - first, tl.int32))
            tile = tile_of(w, first, rows, chunks, K, BITS, GROUP, MODE, KIND, WIDE)
            results = added_up(products(xs, one, tile, BITS, MODE, PRECISE, M), w[3], M)
            store_rows(y, y_row, left, first + rows, results, M)
    else:
        results = outputs_in_pieces(
            w, x, x_row, left, one, first, rows, K, BITS, GROUP, MODE, KIND, WIDE, PRECISE, M, R, C
        )
        if ACTIVATION is not None:
            others = outputs_in_pieces(
                up, x, x_row, left, one, first, rows, K, BITS, GROUP, MODE, KIND, WIDE, PRECISE, M, R, C
            )
            results = (activated(results[0], ACTIVATION, PRECISE) * others[0],)
        store_rows(y, y_row, left, first + rows, results, M)


@triton.jit
def dense_kernel(
    x, ids, w, y, N, K, ROWS, HEADS, x_row, x_head, y_row, y_head, w_matrix, w_row,
    M: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As matvec_kernel, for weights in a float format: R outputs a program."""
    head = tl.program_id(1) % HEADS
    row = (tl.program_id(1) // HEADS).to(tl.int64) * M
    index = head.to(tl.int64)
    if ids is not None:
        index = tl.load(ids + row * HEADS + head).to(tl.int64)
    x += row * x_row + head.to(tl.int64) * x_head
    y += row * y_row + head.to(tl.int64) * y_head
    left = ROWS - row
    outputs = tl.program_id(0) * R + tl.arange(0, R)
    source = w + index * w_matrix + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * w_row
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros([R, BLOCK], tl.float32),)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        tile = tl.load(source + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
        joined = ()
        for m in tl.static_range(M):
            values = tl.load(x + tl.minimum(m, left - 1) * x_row + k, mask=k < K, other=0.0).to(tl.float32)
            joined = joined + (sums[m] + tile * values[None, :],)
        sums = joined
    for m in tl.static_range(M):
        target = y + tl.minimum(m, left - 1) * y_row + outputs
        tl.store(target, tl.sum(sums[m], 1), mask=outputs < N)


KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8}


def weights(w):
    """A Packed with any leading axes, or experts that lie apart, as kernels take them: what is read, and its format."""
    N, K = w.shape[-2:]
    wide = {2: 2, 4: 4, 6: 2, 8: 4}.get(w.bits, 1) if K % 32 == 0 else 0
    form = {"BITS": w.bits, "GROUP": w.group, "MODE": w.mode, "KIND": KINDS[w.scale_dtype]}
    if hasattr(w, "addresses"):
        table, alignment = on_device(w)
        return (table, table, table, None, 0, 0, 0), form | {"WIDE": min(wide, alignment), "SCATTERED": True}
    words, scales = w.words.view(torch.int32).contiguous(), w.scales.contiguous()
    biases = scales if w.biases is None else w.biases.contiguous()
    each = 0 if w.global_scale is None or w.global_scale.numel() == 1 else 1
    steps = (N * K * w.bits // 32, N * (K // w.group), each)
    return (words, scales, biases, w.global_scale, *steps), form | {"WIDE": wide, "SCATTERED": False}


def on_device(w):
    """The addresses of experts that lie apart on their device, and the words that a load may take at once.

    Kept with the addresses themselves: a copy waits for the device, and must not happen in a captured graph.
    """
    addresses = w.addresses
    if not hasattr(addresses, "on_device"):
        least = int((addresses[0] | 16).bitwise_and(-(addresses[0] | 16)).min())  # the lowest bit set, up to 16
        whole = not (addresses[1:] % w.scale_dtype.itemsize).any()
        addresses.on_device = (addresses.to(w.device), least // 4 if whole else 0)
    return addresses.on_device


def sizes(N, K, M, jobs, device):
    """R, C, warps and programs: rows and chunks of a tile."""
    chunks = triton.next_power_of_2(triton.cdiv(K, 32))
    warps = min(8, max(1, chunks * M // 64))
    C = min(chunks, 64 * warps // M)
    R = 64 if INTERPRETED else 4  # the interpreter takes as long for a small tile
    blocks = triton.cdiv(N, R)
    return R, C, warps, min(blocks, max(1, 16 // warps * facts(device).processors // jobs))


def dense_sizes(N, K, M, jobs, device):
    """R, BLOCK and warps."""
    return 2, min(triton.next_power_of_2(K), 1024), 4


def multiply(x, ids, w, y, up=None, activation=None, precise=False, launch=None):
    """y [M, H, N] = w[h] x[m, h], or w[ids[m, h]] x[m, h] where ids [M, H] are given.

    With `up`, of the same format as w, activation(w x) . (up x). x [M, H, K]; the last axes of x and y lie whole.
    """
    rows, heads, N = y.shape
    K = x.shape[-1]
    M = 1 if ids is not None else min(4, triton.next_power_of_2(rows))
    jobs = triton.cdiv(rows, M) * heads
    strides = (x.stride(0), x.stride(1), y.stride(0), y.stride(1))
    if small(x, w) and y.dtype == torch.float32 and up is None:
        return multiply_exactly(x, ids, w, y)
    if isinstance(w, torch.Tensor):
        R, block, warps = launch or dense_sizes(N, K, M, jobs, x.device)
        w = w.reshape(-1, N, K)
        w = w if w.stride(-1) == 1 else w.contiguous()
        dense_kernel[(triton.cdiv(N, R), jobs)](
            x, ids, w, y, N, K, rows, heads, *strides, w.stride(0), w.stride(1),
            M=M, R=R, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return y
    source, form = weights(w)
    R, C, warps, programs = launch or sizes(N, K, M, jobs, x.device)
    blocks = triton.cdiv(N, R)
    form_of = "pieces" if C * 32 < K else "loop" if programs < blocks and up is None else "once"
    programs = programs if form_of == "loop" else blocks
    matvec_kernel[(programs, jobs)](
        x, ids, source, None if up is None else weights(up)[0], y, N, K, w.shape[0], rows, heads, *strides, **form,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation].value,
        PRECISE=precise or (y.dtype == torch.float32 and up is None),
        M=M, R=R, C=C, FORM=form_of, num_warps=warps,
    )  # fmt: skip
    return y


def chosen(x, ids, w, out):
    """out[t, a] = w[ids[t, a]] x[t], or x[t, a], for few tokens: each choice reads its expert's weights."""
    if ids.numel():
        y = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        multiply(of_choices(x, ids), ids.contiguous(), w, y)
        if y is not out:
            out.copy_(y)
    return out


def chosen_gate_up(x, ids, gate, up, activation, precise=False):
    """float32 [T, A, I] = activation(gate[ids[t, a]] x) . (up[ids[t, a]] x)."""
    y = torch.empty(*ids.shape, gate.shape[1], dtype=torch.float32, device=x.device)
    if not ids.numel():
        return y
    x, ids = of_choices(x, ids), ids.contiguous()
    apart = isinstance(gate, torch.Tensor) or isinstance(up, torch.Tensor) or weights(gate)[1] != weights(up)[1]
    if apart or small(x, gate):
        other = torch.empty_like(y)
        return glu(multiply(x, ids, gate, y), multiply(x, ids, up, other), activation, out=y)
    return multiply(x, ids, gate, y, up, activation, precise)


def of_choices(x, ids):
    """x [T, A, K] of x [T, K] or [T, A, K], its last axis whole."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.ndim == 3 else x[:, None].expand(-1, ids.shape[1], -1)
