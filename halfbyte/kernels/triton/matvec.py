"""Matrices times one to four rows, at the speed of reading the weights: decoding, and few tokens' chosen experts.

A tile is R outputs by C chunks of 32 codes (codes.py); a thread owns whole chunks of each output, keeps their
activations in registers as float32, and decodes and multiplies in three instructions a weight. That is as fast as
memory from 5 bits up. Two- and four-bit codes come too fast for it, and go through tensor cores instead (nibbles.py).

Large matrices: as many programs as fit, each going over many blocks of outputs with the same activations. Small ones
wait for memory once: every program asks for all its weights first, and a row of weights is spread over several warps.
"""

# ruff: noqa: RUF005 - Triton knows no starred tuples

from math import prod
from typing import NamedTuple

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
from .nibbles import nibbles_kernel
from .rowwise import glu
from .stacks import job_of, matrix, stack

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
        return tl.where(inside, gathered(source, at, FORMAT.kind), 0)
    else:
        return tl.load(source + at, mask=inside, other=0.0)


@triton.jit
def tile_of(w, first, rows, chunks, K, FORMAT: tl.constexpr):
    """Chunks of the weight rows `first + rows` as they lie in memory: words, scales, and biases or second scales.

    Chunks past the end are the last one again, with a scale of 0.
    """
    words, scales, biases, _ = w
    last = tl.cdiv(K, 32) - 1
    inside = (chunks <= last)[:, None]
    chunks = tl.minimum(chunks, last)
    parts = chunk_words(words + first * row_words(K, FORMAT), rows, chunks, K, FORMAT)
    pitch = K // FORMAT.group
    groups = rows[None, :] * pitch + (chunks * 32 // FORMAT.group)[:, None]
    scale = scale_at(scales + first * pitch, groups, inside, FORMAT)
    other = scale
    if FORMAT.mode == "affine":
        other = scale_at(biases + first * pitch, groups, inside, FORMAT)
    elif FORMAT.mode == "nvfp4":
        groups = rows[None, :] * pitch + tl.minimum(chunks * 2 + 1, pitch - 1)[:, None]
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
def added_up(sums, factor, M: tl.constexpr):
    results = ()
    for m in tl.static_range(M):
        results = results + (tl.sum(sums[m], 0) * factor,)
    return results


@triton.jit
def outputs_in_pieces(
    w, x, x_row, ROWS, one, first, rows, K,
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
    return added_up(sums, w[3], M)


@triton.jit
def store_rows(y, y_row, ROWS, at, results, M: tl.constexpr):
    for m in tl.static_range(M):
        tl.store(y + tl.minimum(m, ROWS - 1) * y_row + at, results[m])


@triton.jit
def matvec_kernel(
    x, ids, w, up, y, N, K, ROWS, x_row, x_head, y_row, y_head,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, SCHEDULE: tl.constexpr, JOBS: tl.constexpr, OVERLAP: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """y[row, head] = w[head] x[row, head], or w[ids[row, head]]; with an ACTIVATION, activation(w x) . (up x).

    A program takes M rows of one head and R outputs. In SCHEDULE "loop" it takes every so many blocks of R outputs, for
    which the activations stay in registers; in "pieces" a row of weights is longer than a tile.
    """
    index, x, y, left = job_of(
        x, ids, w, up, y, K, ROWS, x_row, x_head, y_row, y_head, FORMAT, ACTIVATION is not None, M, JOBS, OVERLAP,
        AHEAD, EARLY,
    )  # fmt: skip
    w = matrix(w, index, FORMAT)
    if ACTIVATION is not None:
        up = matrix(up, index, FORMAT)
    one = (0x3F800000 + tl.minimum(N, 0)).to(tl.uint32)  # see affine_value
    chunks = tl.arange(0, C)
    first = tl.program_id(0).to(tl.int64) * R
    rows = tl.minimum(tl.arange(0, R), tl.cast(N - 1 - first, tl.int32))
    if SCHEDULE == "loop":
        if OVERLAP:
            gdc_wait()
        xs = row_activations(x, x_row, left, chunks, K, FORMAT, PRECISE, M)
        for block in range(tl.program_id(0), tl.cdiv(N, R), tl.num_programs(0)):
            first = tl.cast(block, tl.int64) * R
            rows = tl.minimum(tl.arange(0, R), tl.cast(N - 1 - first, tl.int32))
            tile = tile_of(w, first, rows, chunks, K, FORMAT)
            results = added_up(products(xs, one, tile, FORMAT, PRECISE, M), w[3], M)
            store_rows(y, y_row, left, first + rows, results, M)
    else:
        if SCHEDULE == "once":
            tile = tile_of(w, first, rows, chunks, K, FORMAT)
            if ACTIVATION is not None:
                other = tile_of(up, first, rows, chunks, K, FORMAT)
            tl.debug_barrier()  # all is asked for before any is waited for; to spare registers, ptxas would not
            if OVERLAP:
                gdc_wait()
            xs = row_activations(x, x_row, left, chunks, K, FORMAT, PRECISE, M)
            results = added_up(products(xs, one, tile, FORMAT, PRECISE, M), w[3], M)
            if ACTIVATION is not None:
                others = added_up(products(xs, one, other, FORMAT, PRECISE, M), up[3], M)
        else:
            if OVERLAP:
                gdc_wait()
            results = outputs_in_pieces(w, x, x_row, left, one, first, rows, K, FORMAT, PRECISE, M, R, C)
            if ACTIVATION is not None:
                others = outputs_in_pieces(up, x, x_row, left, one, first, rows, K, FORMAT, PRECISE, M, R, C)
        if ACTIVATION is not None:
            results = (activated(results[0], ACTIVATION, PRECISE) * others[0],)
        store_rows(y, y_row, left, first + rows, results, M)


@triton.jit
def dense_kernel(
    x, ids, w, y, N, K, ROWS, x_row, x_head, y_row, y_head, w_matrix, w_row,
    M: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As matvec_kernel, for weights in a float format: R outputs a program."""
    index, x, y, left = job_of(
        x, ids, w, w, y, K, ROWS, x_row, x_head, y_row, y_head, None, False, M, True, False, False, False
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
    for m in tl.static_range(M):
        target = y + tl.minimum(m, left - 1) * y_row + outputs
        tl.store(target, tl.sum(sums[m], 1), mask=outputs < N)


class Chunks(NamedTuple):
    """Launch sizes of matvec_kernel."""

    rows: int  # and chunks of a tile
    chunks: int
    warps: int
    programs: int  # for one job; where these are fewer than the blocks of outputs, a program takes several

    def tile(self, bits, gated):
        """Outputs, and codes of a row."""
        return self.rows, 32 * self.chunks


class Nibbles(NamedTuple):
    """Launch sizes of nibbles_kernel."""

    rows: int  # of a tile: 16 or 32
    blocks: int  # of a span, each what four threads load of a row
    parts: int  # warps, each with its own spans
    programs: int = 1 << 30  # as in Chunks
    spread: bool = False  # blocks of a span take turns

    def tile(self, bits, gated):
        return self.rows // (2 if gated else 1), 512 // bits * self.blocks * self.parts


LONG = 256  # inputs of a sum that hides that they were rounded to bfloat16
MANY = 64  # outputs for each processor, from which a matrix is large; 2026-11-15, H200


def nibble_sizes(N, K, M, jobs, form, gated, processors):
    """2026-11-15, H200, one row of bfloat16. 248320 x 2048 in 73 to 79 us, 91 to 84 % of what a sum reads; in 2 bits in
    48, 76 %; in mxfp4 in 84 to 86, 73 %. 12288 x 4096 in 9.2, with a program for every block in 10 to 11; two rows in
    12.3, in tiles of 32 in 14.3. 2048 x 4096 in 3.1, 1024 x 4096 in 2.5.

    Nine of 257 experts of 512 x 2048 in 8.7. Spread, gate and up alone take 6.1 instead of 7.5, but with down 9.9, and
    9.1 where that is spread too: both are on the chip at once, and equal numbers of registers may fit better.
    """
    block = 512 // form.bits
    blocks = min(4, 8 * form.group // block)
    parts = triton.next_power_of_2(triton.cdiv(K, block * blocks))
    tiles = triton.cdiv(N * (2 if gated else 1), 16) * jobs
    if INTERPRETED:  # which takes as long for a small tile
        return Nibbles(32, blocks, min(4, parts), 2)
    if M > 1:
        return Nibbles(16, blocks, min(4, parts))
    if tiles >= 32 * processors:
        if form.bits == 2:  # words come so fast that preparing activations for each block would take longer
            return Nibbles(32, blocks, min(4, parts), max(1, 4 * processors // jobs))
        return Nibbles(32, blocks, min(8 if blocks == 2 else 4, parts))
    if tiles > 4 * processors and jobs == 1:
        return Nibbles(16, blocks, min(8, parts), 2 * processors)
    while blocks > 1 and tiles * parts <= 4 * processors and parts < 16:  # a warp or less for each scheduler
        blocks, parts = blocks // 2, parts * 2
    return Nibbles(16, blocks, min(16, parts), spread=jobs == 1)


def chunk_sizes(N, K, M, jobs, bits, gated, processors):
    """2026-11-15, H200: 2048 x 4096 in 3.5 us, 1024 x 4096 in 3.0; 8 bits 248320 x 2048 at 98 % of what a sum reads."""
    chunks = triton.next_power_of_2(triton.cdiv(K, 32))
    if INTERPRETED:  # which takes as long for a small tile
        return Chunks(min(256, triton.next_power_of_2(N)), min(chunks, 64), 1, 1 << 30)
    if N * jobs >= MANY * processors and chunks > 16:
        warps = min(8, max(1, chunks * M // 64))
        rows, resident = (8, 24) if bits <= 4 and M == 1 else (4, 32)
        programs = 1 << 30 if gated else max(1, resident // warps * processors // jobs)
        return Chunks(rows, min(chunks, 64 * warps // M), warps, programs)
    warps = min(8, max(1, chunks * M // 32))
    rows = 2 if N * jobs <= 8 * processors else 4 if gated or M > 1 else 8
    return Chunks(rows, min(chunks, 32 * warps // M), warps, 1 << 30)


def dense_sizes(K):
    """R, BLOCK and warps. 2026-11-15, H200."""
    return 2, min(triton.next_power_of_2(K), 1024), 4


def multiply(x, ids, w, y, up=None, activation=None, precise=False, early=False, launch=None):
    """y [M, H, N] = w[h] x[m, h], or w[ids[m, h]] x[m, h] where ids [M, H] are given.

    With `up`, of the same format as w, activation(w x) . (up x). x [M, H, K]; the last axes of x and y lie whole.
    `early`: the launch before this one was of this function with the same ids (job_of). `launch` is for trying other
    sizes than the table's.
    """
    if small(x, w) and y.dtype == torch.float32 and up is None:
        return multiply_exactly(x, ids, w, y)
    rows, heads, N = y.shape
    M = 1 if ids is not None else min(4, triton.next_power_of_2(rows))
    jobs = (heads, triton.cdiv(rows, M))
    shared = (y, N, x.shape[-1], rows, x.stride(0), x.stride(1), y.stride(0), y.stride(1))
    if isinstance(w, torch.Tensor):
        multiply_dense(x, ids, w, shared, M, jobs, launch)
    else:
        multiply_codes(x, ids, w, up, shared, activation, precise, early, M, jobs, launch)
    return y


def multiply_dense(x, ids, w, shared, M, jobs, launch):
    N, K = w.shape[-2:]
    R, block, warps = launch or dense_sizes(K)
    w = w.reshape(-1, N, K)
    w = w if w.stride(-1) == 1 else w.contiguous()
    dense_kernel[(triton.cdiv(N, R), *jobs)](
        x, ids, w, *shared, w.stride(0), w.stride(1), M=M, R=R, BLOCK=block, num_warps=warps
    )


def multiply_codes(x, ids, w, up, shared, activation, precise, early, M, jobs, launch):
    N, K = w.shape[-2:]
    capability, processors, _ = facts(x.device)
    (source, form), other = stack(w), None if up is None else stack(up)[0]
    precise = precise or (shared[0].dtype == torch.float32 and up is None)
    # Tensor cores flush tiny floats to zero on some other makers' GPUs, and small float codes are such.
    nibbles = form.bits in (2, 4) and form.wide == 4 and x.dtype != torch.float32 and not precise
    nibbles = nibbles and (form.mode == "affine" or capability > 0)
    if launch is None and nibbles:
        launch = nibble_sizes(N, K, M, prod(jobs), form, up is not None, processors)
    launch = launch or chunk_sizes(N, K, M, prod(jobs), form.bits, up is not None, processors)
    outputs, codes = launch.tile(form.bits, up is not None)
    blocks = triton.cdiv(N, outputs)
    schedule = "pieces" if codes < K else "loop" if launch.programs < blocks else "once"
    given = {"FORMAT": form, "ACTIVATION": None if activation is None else ACTIVATIONS[activation].value, "M": M}
    given |= {"R": launch.rows, "SCHEDULE": schedule, "JOBS": prod(jobs) > 1, "EARLY": early}
    given["AHEAD"] = not early and N * prod(jobs) <= 2 * MANY * processors  # others take long, and need registers
    given |= overlap(x.device)
    grid = (launch.programs if schedule == "loop" else blocks, *jobs)
    if isinstance(launch, Nibbles):
        nibbles_kernel[grid](
            x, ids, source, other, *shared, **given, BLOCKS=launch.blocks, PARTS=launch.parts,
            SPREAD=launch.spread, EVEN=K % (2 * form.group) == 0, num_warps=launch.parts, num_stages=1,
        )  # fmt: skip
    else:
        matvec_kernel[grid](
            x, ids, source, other, *shared, **given, PRECISE=precise, C=launch.chunks, num_warps=launch.warps
        )


def chosen(x, ids, w, out, early=False):
    """out[t, a] = w[ids[t, a]] x[t], or x[t, a], for few tokens: each choice reads its expert's weights."""
    if ids.numel():
        y = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        multiply(of_choices(x, ids), ids.contiguous(), w, y, early=early)
        if y is not out:
            out.copy_(y)
    return out


def chosen_mlp(x, ids, experts, activation, out):
    """out[t, a] = down[e] (activation(gate[e] x) . (up[e] x)) where e = ids[t, a], for few tokens.

    What lies between is kept in float32; sums over many bfloat16 of it do not show that these were rounded.
    """
    gate, up, down = experts.gate, experts.up, experts.down
    kept = torch.bfloat16 if x.dtype == torch.bfloat16 and gate.shape[1] >= LONG else torch.float32
    between = torch.empty(*ids.shape, gate.shape[1], dtype=kept, device=x.device)
    x, ids = of_choices(x, ids), ids.contiguous()
    apart = isinstance(gate, torch.Tensor) or isinstance(up, torch.Tensor) or stack(gate)[1] != stack(up)[1]
    if apart or small(x, gate):
        halves = torch.empty((2, *between.shape), dtype=torch.float32, device=x.device)
        glu(multiply(x, ids, gate, halves[0]), multiply(x, ids, up, halves[1]), activation, out=halves[0])
        return chosen(halves[0], ids, down, out)
    multiply(x, ids, gate, between, up, activation, precise=x.dtype == torch.float32)
    return chosen(between, ids, down, out, early=True)


def of_choices(x, ids):
    """x [T, A, K] of x [T, K] or [T, A, K], its last axis whole."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.ndim == 3 else x[:, None].expand(-1, ids.shape[1], -1)
