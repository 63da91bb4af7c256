"""Matrices times one to four rows, at the speed of reading the weights: decoding, and few tokens' chosen experts.

A tile is R outputs by C chunks of 32 codes (codes.py); a thread owns whole chunks of each output, keeps their
activations in registers as float32, and decodes and multiplies in three instructions a weight. That is as fast as
memory from 5 bits up. Two- and four-bit codes come too fast for it, and go through tensor cores instead (nibbles.py).

Large matrices: as many programs as fit, each going over many blocks of outputs with the same activations. Small ones
wait for memory once: every program asks for all its weights first, and a row of weights is spread over several warps.
"""

# ruff: noqa: RUF005 - Triton knows no starred tuples

from math import prod

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .codes import (
    affine_value,
    any_nan,
    chunk_words,
    e4m3_value,
    eighths,
    gathered,
    place,
    power_value,
    row_words,
    small_float_value,
)
from .device import INTERPRETED, facts, overlap
from .elementary import ACTIVATIONS, activated
from .exact import multiply_exactly, small
from .jobs import choice_arguments, job_of
from .laid import along, turned
from .matvec_sizes import MANY, Nibbles, choosing_sizes, chunk_sizes, dense_sizes, nibble_sizes
from .nibbles import nibbles_kernel
from .rowwise import glu
from .stacks import matrix, stack
from .stream import norm_arguments, row_factors, squares_of, store_row, stream_arguments, stream_rows

LONG = 256  # inputs of a sum that hides that they were rounded to bfloat16
UP = tl.constexpr(2.0**64)  # multiplied into activations, so that their products with tiny floats are none


@triton.jit
def activations(x, chunks, K, FORMAT: tl.constexpr, PRECISE: tl.constexpr):
    """The activations of chunks [C] as 32 tiles scaled for their codes; the sum of them, and the sum of the scaled."""
    BITS: tl.constexpr = FORMAT.bits
    values = ()
    for i in tl.static_range(4):
        at = (chunks * 32 + 8 * i)[:, None] + tl.arange(0, 8)
        values = values + eighths(tl.load(x + at, mask=at < K, other=0.0).to(tl.float32))
    scaled, total, lifted = (), tl.zeros_like(values[0]), tl.zeros_like(values[0])
    if FORMAT.mode == "affine":
        for shift in tl.static_range(8):  # codes of one power of two at a time: their sum serves both
            some = tl.zeros_like(values[0])
            for j in tl.static_range(32):
                if 23 - BITS - place(j, BITS, PRECISE) == shift * BITS:
                    some += values[j]
            if shift * BITS <= 23 - BITS - place(0, BITS, PRECISE):
                total += some
                if not PRECISE:
                    lifted += some * (1 << (shift * BITS))
        for j in tl.static_range(32):
            scaled = scaled + (values[j] * (1 << (23 - BITS - place(j, BITS, PRECISE))),)
    else:
        for j in tl.static_range(32):
            scaled = scaled + (values[j] * UP,)
    return scaled + (total, lifted)


@triton.jit
def row_activations(x, x_row, ROWS, chunks, K, FORMAT: tl.constexpr, PRECISE: tl.constexpr, M: tl.constexpr):
    """The activations of M rows, one after another; the last row again where there are fewer."""
    xs = ()
    for m in tl.static_range(M):
        xs = xs + activations(x + tl.minimum(m, ROWS - 1) * x_row, chunks, K, FORMAT, PRECISE)
    return xs


@triton.jit
def scale_at(source, at, inside, FORMAT: tl.constexpr):
    if FORMAT.wide == 0:
        return turned(tl.where(inside, gathered(source, at, FORMAT.kind), 0), 2)
    else:
        return turned(tl.load(source + at, mask=inside, other=0.0), 2)


@triton.jit
def tile_of(w, first, rows, chunks, K, FORMAT: tl.constexpr):
    """Chunks of the weight rows `first + rows` as they lie in memory: words, scales, and biases or second scales.

    Chunks past the end are the last one again, with a scale of 0.
    """
    words, scales, biases, _ = w
    last = tl.cdiv(K, 32) - 1
    inside = along(chunks <= last, 0, 2)
    chunks = tl.minimum(chunks, last)
    parts = chunk_words(words + first * row_words(K, FORMAT), rows, chunks, K, FORMAT)
    pitch = K // FORMAT.group
    rows, chunks = along(rows, 1, 2), along(chunks, 0, 2)
    groups = rows * pitch + chunks * 32 // FORMAT.group
    scale = scale_at(scales + first * pitch, groups, inside, FORMAT)
    other = scale
    if FORMAT.mode == "affine":
        other = scale_at(biases + first * pitch, groups, inside, FORMAT)
    elif FORMAT.mode == "nvfp4":
        groups = rows * pitch + tl.minimum(chunks * 2 + 1, pitch - 1)
        other = scale_at(scales + first * pitch, groups, inside, FORMAT)
    return parts + (scale, other)


@triton.jit
def add_products(sums, value, xs, J: tl.constexpr, M: tl.constexpr):
    """sums + value x for code J of chunks and M rows of activations."""
    more = ()
    for m in tl.static_range(M):
        more = more + (sums[m] + value * xs[34 * m + J][:, None],)
    return more


@triton.jit
def affine_products(xs, one, tile, BITS: tl.constexpr, PRECISE: tl.constexpr, M: tl.constexpr):
    scale, bias = tile[BITS].to(tl.float32) * (1 << BITS), tile[BITS + 1].to(tl.float32)
    sums = ()
    for m in tl.static_range(M):
        sums = sums + (-xs[34 * m + 33][:, None],)
    for j in tl.static_range(32):
        value = affine_value(tile, one, j, BITS, place(j, BITS, PRECISE))
        if PRECISE:  # the weight itself: scale q and bias cancel before they are summed
            value = (value - 1.0) * scale + bias
        sums = add_products(sums, value, xs, j, M)
    if not PRECISE:
        whole = ()
        for m in tl.static_range(M):
            whole = whole + (sums[m] * scale + bias * xs[34 * m + 32][:, None],)
        sums = whole
    return sums


@triton.jit
def small_float_products(xs, tile, FIRST: tl.constexpr, LAST: tl.constexpr, BITS: tl.constexpr, M: tl.constexpr):
    """Sums of M rows over codes FIRST to LAST of chunks, before their scale."""
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros(tile[0].shape, tl.float32),)
    for j in tl.static_range(FIRST, LAST):
        sums = add_products(sums, small_float_value(tile, j, BITS), xs, j, M)
    whole = ()
    for m in tl.static_range(M):
        whole = whole + (sums[m] * (2.0**62 if BITS == 4 else 2.0**56),)
    return whole


@triton.jit
def products(xs, one, tile, FORMAT: tl.constexpr, PRECISE: tl.constexpr, M: tl.constexpr):
    """What a tile of chunks adds to the results of M rows of activations: M tiles [C, R]."""
    BITS: tl.constexpr = FORMAT.bits
    if FORMAT.mode == "affine":
        sums = affine_products(xs, one, tile, BITS, PRECISE, M)
    else:
        sums = ()
        if FORMAT.mode == "nvfp4":
            front = small_float_products(xs, tile, 0, 16, BITS, M)
            back = small_float_products(xs, tile, 16, 32, BITS, M)
            for m in tl.static_range(M):
                sums = sums + (front[m] * e4m3_value(tile[BITS]) + back[m] * e4m3_value(tile[BITS + 1]),)
        else:
            some = small_float_products(xs, tile, 0, 32, BITS, M)
            power = power_value(tile[BITS])
            if BITS == 8:
                power = tl.where(any_nan(tile, BITS), float("nan"), power)
            for m in tl.static_range(M):
                sums = sums + (some[m] * power,)
    return sums


@triton.jit
def added_up(sums, factor, factors, M: tl.constexpr):
    """Results of M rows: sums times the factors of their matrix and of each row."""
    results = ()
    for m in tl.static_range(M):
        results = results + (tl.sum(sums[m], 0) * (factor * factors[m]),)
    return results


@triton.jit
def outputs_in_pieces(
    w, x, x_row, ROWS, factors, one, first, rows, K,
    FORMAT: tl.constexpr, PRECISE: tl.constexpr, M: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """M results [R] of rows too long for their activations to stay in registers: those are read piece by piece."""
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros([C, R], tl.float32),)
    for start in range(0, tl.cdiv(K, 32), C):
        chunks = start + tl.arange(0, C)
        tile = tile_of(w, first, rows, chunks, K, FORMAT)
        xs = row_activations(x, x_row, ROWS, chunks, K, FORMAT, PRECISE, M)
        more = products(xs, one, tile, FORMAT, PRECISE, M)
        joined = ()
        for m in tl.static_range(M):
            joined = joined + (sums[m] + more[m],)
        sums = joined
    return added_up(sums, w[3], factors, M)


@triton.jit
def store_rows(
    y, y_row, first_row, ROWS, first, N, results, stream, old, TYPE: tl.constexpr, M: tl.constexpr, R: tl.constexpr
):
    """Results of M rows, added to a stream if there is one; outputs past the end are the last one again."""
    output = tl.arange(0, R)
    at, inside = first + tl.minimum(output, tl.cast(N - 1 - first, tl.int32)), first + output < N
    for m in tl.static_range(M):
        row = tl.minimum(m, ROWS - 1)
        store_row(y + row * y_row, results[m], stream, old, first_row + row, first // R, at, inside, m, M, TYPE)


@triton.jit
def matvec_kernel(
    x, ids, choice, w, up, norm, stream, y, N, K, ROWS, x_row, x_head, y_row, y_head,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, SCHEDULE: tl.constexpr, SQUARES: tl.constexpr, RULE: tl.constexpr, JOBS: tl.constexpr,
    OVERLAP: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[row, head] = w[head] x[row, head], or w[ids[row, head]]; with an ACTIVATION, activation(w x) . (up x).

    A program takes M rows of one head and R outputs. In SCHEDULE "loop" it takes every so many blocks of R outputs, for
    which the activations stay in registers; in "pieces" a row of weights is longer than a tile. For `norm` and
    `stream` see stream.py.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    index, x, y, left = job_of(
        x, ids, choice, w, up, y, K, ROWS, x_row, x_head, y_row, y_head, FORMAT, ACTIVATION is not None, M, RULE, JOBS,
        OVERLAP, AHEAD, EARLY,
    )  # fmt: skip
    w = matrix(w, index, FORMAT)
    if ACTIVATION is not None:
        up = matrix(up, index, FORMAT)
    one = (0x3F800000 + tl.minimum(N, 0)).to(tl.uint32)  # see affine_value
    chunks = tl.arange(0, C)
    first = tl.program_id(0).to(tl.int64) * R
    rows = tl.minimum(tl.arange(0, R), tl.cast(N - 1 - first, tl.int32))
    row = ROWS - left
    if SCHEDULE == "loop":
        if OVERLAP:
            gdc_wait()
        squares = squares_of(norm, row, left, M, SQUARES)
        xs = row_activations(x, x_row, left, chunks, K, FORMAT, PRECISE, M)
        factors = row_factors(squares, norm, K, PRECISE, M)
        for block in range(tl.program_id(0), tl.cdiv(N, R), tl.num_programs(0)):
            first = tl.cast(block, tl.int64) * R
            rows = tl.minimum(tl.arange(0, R), tl.cast(N - 1 - first, tl.int32))
            tile = tile_of(w, first, rows, chunks, K, FORMAT)
            old = stream_rows(stream, row, left, first + rows, M)
            results = added_up(products(xs, one, tile, FORMAT, PRECISE, M), w[3], factors, M)
            store_rows(y, y_row, row, left, first, N, results, stream, old, TYPE, M, R)
    else:
        if SCHEDULE == "once":
            tile = tile_of(w, first, rows, chunks, K, FORMAT)
            if ACTIVATION is not None:
                other = tile_of(up, first, rows, chunks, K, FORMAT)
            tl.debug_barrier()  # all is asked for before any is waited for; to spare registers, ptxas would not
        if OVERLAP:
            gdc_wait()
        old = stream_rows(stream, row, left, first + rows, M)
        squares = squares_of(norm, row, left, M, SQUARES)
        if SCHEDULE == "once":
            xs = row_activations(x, x_row, left, chunks, K, FORMAT, PRECISE, M)
            factors = row_factors(squares, norm, K, PRECISE, M)
            results = added_up(products(xs, one, tile, FORMAT, PRECISE, M), w[3], factors, M)
            if ACTIVATION is not None:
                others = added_up(products(xs, one, other, FORMAT, PRECISE, M), up[3], factors, M)
        else:
            factors = row_factors(squares, norm, K, PRECISE, M)
            results = outputs_in_pieces(w, x, x_row, left, factors, one, first, rows, K, FORMAT, PRECISE, M, R, C)
            if ACTIVATION is not None:
                others = outputs_in_pieces(up, x, x_row, left, factors, one, first, rows, K, FORMAT, PRECISE, M, R, C)
        if ACTIVATION is not None:
            results = (activated(results[0], ACTIVATION, PRECISE) * others[0],)
        store_rows(y, y_row, row, left, first, N, results, stream, old, TYPE, M, R)


@triton.jit
def dense_kernel(
    x, ids, w, norm, stream, y, N, K, ROWS, x_row, x_head, y_row, y_head, w_matrix, w_row,
    M: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """As matvec_kernel, for weights in a float format: R outputs a program."""
    TYPE: tl.constexpr = x.dtype.element_ty
    index, x, y, left = job_of(
        x, ids, None, w, w, y, K, ROWS, x_row, x_head, y_row, y_head, None, False, M, None, True, False, False, False
    )
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
    row, first = ROWS - left, tl.program_id(0).to(tl.int64) * R
    factors = row_factors(squares_of(norm, row, left, M, SQUARES), norm, K, False, M)
    results = ()
    for m in tl.static_range(M):
        results = results + (tl.sum(sums[m], 1) * factors[m],)
    old = stream_rows(stream, row, left, tl.minimum(outputs, N - 1), M)
    store_rows(y, y_row, row, left, first, N, results, stream, old, TYPE, M, R)


def multiply(
    x, ids, w, y, up=None, activation=None, precise=False, early=False, norm=None, stream=None, choice=None,
    launch=None,
):  # fmt: skip
    """y [M, H, N] = w[h] x[m, h], or w[ids[m, h]] x[m, h] where ids [M, H] are given.

    With `up`, of the same format as w, activation(w x) . (up x). x [M, H, K]; the last axes of x and y lie whole.
    `early`: the launch before this one was of this function with the same ids (job_of). `norm` (stream.Norm): what is
    left to do of the norm of x; not for small matrices. `stream` (stream.Stream), for one head: y is that plus the
    result. `choice` (jobs.Choice), not for small matrices: ids are not known yet, and are made here if `early`.
    `launch` is for trying other sizes than the table's.
    """
    around = norm is not None or stream is not None
    if not around and small(x, w) and y.dtype == torch.float32 and up is None:
        return multiply_exactly(x, ids, w, y)
    rows, heads, N = y.shape
    M = 1 if ids is not None else min(4, triton.next_power_of_2(rows))
    jobs = (heads, triton.cdiv(rows, M))
    before, squares = norm_arguments(norm)
    shared = (before, stream_arguments(stream), y, N, x.shape[-1], rows)
    shared += (x.stride(0), x.stride(1), y.stride(0), y.stride(1))
    if isinstance(w, torch.Tensor):
        multiply_dense(x, ids, w, shared, squares, M, jobs, launch)
    else:
        precise = precise or (up is None and (y if stream is None else x).dtype == torch.float32)
        launch = launch or sizes(x, w, up, precise, M, prod(jobs))
        launch = choosing_sizes(launch) if choice is not None and up is not None else launch
        multiply_codes(x, ids, choice, w, up, shared, squares, activation, precise, early, M, jobs, launch)
    return y


def multiply_dense(x, ids, w, shared, squares, M, jobs, launch):
    N, K = w.shape[-2:]
    R, block, warps = launch or dense_sizes(K)
    w = w.reshape(-1, N, K)
    w = w if w.stride(-1) == 1 else w.contiguous()
    dense_kernel[(triton.cdiv(N, R), *jobs)](
        x, ids, w, *shared, w.stride(0), w.stride(1), M=M, R=R, BLOCK=block, SQUARES=squares, num_warps=warps
    )


def sizes(x, w, up, precise, M, jobs):
    """Launch sizes, and with them the kernel."""
    N, K = w.shape[-2:]
    capability, processors, _ = facts(x.device)
    form = stack(w)[1]
    # Tensor cores flush tiny floats to zero on some other makers' GPUs, and small float codes are such.
    nibbles = form.bits in (2, 4) and form.wide == 4 and x.dtype != torch.float32 and not precise
    if nibbles and (form.mode == "affine" or capability > 0):
        return nibble_sizes(N, K, M, jobs, form, up is not None, processors)
    return chunk_sizes(N, K, M, jobs, form.bits, up is not None, processors)


def outputs_together(x, w):
    """How many outputs of a projection of rows x [M, K] one program makes at a time: it adds up their squares."""
    if isinstance(w, torch.Tensor):
        return dense_sizes(w.shape[-1])[0]
    M = min(4, triton.next_power_of_2(x.shape[0]))
    return sizes(x, w, None, x.dtype == torch.float32, M, 1).tile(w.bits, False)[0]


def multiply_codes(x, ids, choice, w, up, shared, squares, activation, precise, early, M, jobs, launch):
    N, K = w.shape[-2:]
    (source, form), other = stack(w), None if up is None else stack(up)[0]
    outputs, codes = launch.tile(form.bits, up is not None)
    blocks = triton.cdiv(N, outputs)
    schedule = "pieces" if codes < K else "loop" if launch.programs < blocks else "once"
    given = {"FORMAT": form, "ACTIVATION": None if activation is None else ACTIVATIONS[activation].value, "M": M}
    given |= {"R": launch.rows, "SCHEDULE": schedule, "SQUARES": squares, "JOBS": prod(jobs) > 1, "EARLY": early}
    # Others take long, and need registers.
    given["AHEAD"] = not early and N * prod(jobs) <= 2 * MANY * facts(x.device).processors
    given |= overlap(x.device)
    grid = (launch.programs if schedule == "loop" else blocks, *jobs)
    nibbles = isinstance(launch, Nibbles)
    chosen_by, given["RULE"] = choice_arguments(choice, w.shape[0], launch.parts if nibbles else launch.warps)
    if nibbles:
        if launch.registers and facts(x.device).capability > 0 and not INTERPRETED:
            given["maxnreg"] = launch.registers
        nibbles_kernel[grid](
            x, ids, chosen_by, source, other, *shared, **given, BLOCKS=launch.blocks, PARTS=launch.parts,
            SPREAD=launch.spread, EVEN=K % (2 * form.group) == 0, num_warps=launch.parts, num_stages=1,
        )  # fmt: skip
    else:
        matvec_kernel[grid](
            x, ids, chosen_by, source, other, *shared, **given, PRECISE=precise, C=launch.chunks, num_warps=launch.warps
        )


def chosen(x, ids, w, out, early=False, choice=None):
    """out[t, a] = w[ids[t, a]] x[t], or x[t, a], for few tokens: each choice reads its expert's weights.

    `early` and `choice`: as in multiply.
    """
    if ids.numel():
        y = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        multiply(of_choices(x, ids), ids.contiguous(), w, y, early=early, choice=choice)
        if y is not out:
            out.copy_(y)
    return out


def chosen_mlp(x, ids, experts, activation, out, norm=None, choice=None):
    """out[t, a] = down[e] (activation(gate[e] x) . (up[e] x)) where e = ids[t, a], for few tokens; or of the norm of x.

    `choice`: as in multiply, where gate and up have one format.

    What lies between is kept in float32; sums over many bfloat16 of it do not show that these were rounded.
    """
    gate, up, down = experts.gate, experts.up, experts.down
    kept = torch.bfloat16 if x.dtype == torch.bfloat16 and gate.shape[1] >= LONG else torch.float32
    between = torch.empty(*ids.shape, gate.shape[1], dtype=kept, device=x.device)
    x, ids = of_choices(x, ids), ids.contiguous()
    apart = isinstance(gate, torch.Tensor) or isinstance(up, torch.Tensor) or stack(gate)[1] != stack(up)[1]
    if apart or (norm is None and small(x, gate)):
        halves = torch.empty((2, *between.shape), dtype=torch.float32, device=x.device)
        for half, w in zip(halves, (gate, up), strict=True):
            multiply(x, ids, w, half, norm=norm)
        return chosen(glu(*halves, activation, out=halves[0]), ids, down, out)
    multiply(x, ids, gate, between, up, activation, precise=x.dtype == torch.float32, norm=norm, choice=choice)
    return chosen(between, ids, down, out, early=True, choice=choice)


def of_choices(x, ids):
    """x [T, A, K] of x [T, K] or [T, A, K], its last axis whole."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.ndim == 3 else x[:, None].expand(-1, ids.shape[1], -1)
