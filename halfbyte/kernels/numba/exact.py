"""Products of small matrices, exactly: every weight and every sum in float64.

Alone, a row of activations meets weights that are unpacked in registers (`dot_exact`). Where several rows wait for the
same matrix, a tile of its rows is unpacked once, to memory, and what multiplies it then knows no format. Both add in
the same order, lane by lane, so the bits are the same.
"""

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiled import allocating, inner, kernel
from .dots import Layout, powers
from .lanes import (
    F32,
    FVEC,
    I8,
    I32,
    I64,
    WIDTH,
    compiled_once,
    constant,
    floats_in_lines,
    folded,
    fused,
    has,
    read,
    threads,
)
from .plane_products import SMALL, SMALL_TILES

DVEC = ir.VectorType(ir.DoubleType(), WIDTH)
HALF_FVEC, HALF_DVEC = (ir.VectorType(kind, WIDTH // 2) for kind in (F32, ir.DoubleType()))
ROWS, COLUMNS = (4, 4) if has("avx512f") else (2, 2)  # of weights and of activations that are multiplied together


def each_block(builder, layout, K, body):
    """body(block, lanes that lie inside; None where all do) for every block of a row."""
    blocks = builder.udiv(K, I64(layout.block))
    with cgutils.for_range(builder, blocks) as loop:
        body(loop.index, None)
    rest = builder.urem(K, I64(layout.block))
    with builder.if_then(builder.icmp_unsigned("!=", rest, I64(0))):
        body(blocks, builder.udiv(rest, I64(layout.values)))


@intrinsic
def dot_exact(typing, form, grouping, K, words, scales, biases, row, x, at):
    """One row of weights times one row of prepared activations."""
    layout = Layout(form, grouping)

    def generate(context, builder, signature, args):
        places = layout.row_pointers(builder, *args[2:7])
        data = context.make_array(signature.args[7])(context, builder, args[7]).data
        x = builder.bitcast(builder.gep(data, [args[8]]), I8.as_pointer())
        running = cgutils.alloca_once_value(builder, constant(DVEC, 0.0))
        builder.store(constant(DVEC, 0.0), running)

        def add_block(block, n):
            weights = layout.exact_weights(builder, places, block, n, DVEC)
            for j, (weight, power) in enumerate(zip(weights, powers(layout.name), strict=True)):
                offset = builder.add(builder.mul(block, I64(layout.prepared_bytes)), I64(4 * WIDTH * j))
                activation = read(builder, builder.gep(x, [offset]), FVEC)
                plain = builder.fmul(activation, constant(FVEC, 1.0 / float(power)))
                builder.store(fused(builder, weight, builder.fpext(plain, DVEC), builder.load(running)), running)

        each_block(builder, layout, args[2], add_block)
        return builder.fptrunc(folded(builder, builder.load(running), builder.fadd), F32)

    intp = types.intp
    return types.float32(form, grouping, intp, intp, intp, intp, intp, x, intp), generate


@intrinsic
def unpack_exact(typing, form, grouping, K, words, scales, biases, row, buffer, at):
    """Write a row of weights to buffer[at:], block by block as lanes have them, [blocks, V, 16]; zeros after it.

    Each is divided by the power of two that its activations were multiplied with: the product stays what it is.
    """
    layout = Layout(form, grouping)

    def generate(context, builder, signature, args):
        places = layout.row_pointers(builder, *args[2:7])
        data = builder.gep(context.make_array(signature.args[7])(context, builder, args[7]).data, [args[8]])

        def write_block(block, n):
            first = builder.mul(block, I64(layout.block))
            weights = layout.exact_weights(builder, places, block, n, DVEC)
            for j, (weight, power) in enumerate(zip(weights, powers(layout.name), strict=True)):
                weight = builder.fmul(weight, constant(DVEC, 1.0 / float(power)))
                pointer = builder.gep(data, [builder.add(first, I64(WIDTH * j))])
                builder.store(weight, builder.bitcast(pointer, DVEC.as_pointer()), align=8)

        each_block(builder, layout, args[2], write_block)
        return context.get_dummy_value()

    intp = types.intp
    return types.void(form, grouping, intp, intp, intp, intp, intp, buffer, intp), generate


@intrinsic
def tile_exact(typing, weights, length, x, x_rows, i, last, stride, blocks, pitch, V, narrow):
    """ROWS rows of unpacked weights, `length` apart, times the COLUMNS rows of prepared activations that x_rows lists
    from i on, at most as far as `last`.

    pitch: floats of a prepared block, V x 16 of which are activations; narrow: only the lower half of the lanes holds
    anything. Half of the lanes at a time, so that the sums of a tile stay in registers.
    """

    def generate(context, builder, signature, args):
        weights, x, x_rows = (
            context.make_array(signature.args[place])(context, builder, args[place]).data for place in (0, 2, 3)
        )
        length, (i, last, stride, blocks, pitch, V, narrow) = args[1], args[4:]
        rows = [builder.gep(weights, [builder.mul(length, I64(r))]) for r in range(ROWS)]
        columns = []
        for c in range(COLUMNS):
            place = builder.add(i, I64(c))
            place = builder.select(builder.icmp_signed("<", place, last), place, last)
            columns.append(builder.gep(x, [builder.mul(builder.load(builder.gep(x_rows, [place])), stride)]))

        def add(running, shift):
            with cgutils.for_range(builder, blocks) as block, cgutils.for_range(builder, V) as j:
                here = builder.add(builder.mul(block.index, pitch), builder.mul(j.index, I64(WIDTH)))
                here = builder.add(here, I64(shift))
                wide = [builder.fpext(read(builder, builder.gep(one, [here]), HALF_FVEC), HALF_DVEC) for one in columns]
                here = builder.mul(builder.add(builder.mul(block.index, V), j.index), I64(WIDTH))
                here = builder.add(here, I64(shift))
                for r, row in enumerate(rows):
                    weight = read(builder, builder.gep(row, [here]), HALF_DVEC)
                    for c, one in enumerate(wide):
                        place = running[r * COLUMNS + c]
                        builder.store(fused(builder, weight, one, builder.load(place)), place)

        halves = []
        for _ in range(2):
            halves.append([cgutils.alloca_once(builder, HALF_DVEC) for _ in range(ROWS * COLUMNS)])
            for place in halves[-1]:
                builder.store(constant(HALF_DVEC, 0.0), place)
        add(halves[0], 0)
        with builder.if_then(builder.not_(narrow)):
            add(halves[1], WIDTH // 2)
        pairs = zip(*halves, strict=True)
        sums = [builder.fadd(builder.load(low), builder.load(high)) for low, high in pairs]
        return context.make_tuple(builder, signature.return_type, folded_together(builder, sums))

    intp, result = types.intp, types.UniTuple(types.float32, ROWS * COLUMNS)
    return result(weights, intp, x, x_rows, intp, intp, intp, intp, intp, intp, types.boolean), generate


def folded_together(builder, vectors):
    """The sums of each vector's lanes, in float32; each adds as `folded` does, two vectors in one."""
    sums, width = 1, vectors[0].type.count  # that a vector is on the way to, and the lanes of each
    while width > 1:
        paired = len(vectors) > 1
        sums, half = 2 * sums if paired else sums, width // 2
        low = [one * width + lane for one in range(sums) for lane in range(half)]
        sides = [ir.Constant(ir.VectorType(I32, len(low)), [pick + shift for pick in low]) for shift in (0, half)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True) if paired else zip(vectors, vectors, strict=True)
        vectors = [builder.fadd(*(builder.shuffle_vector(a, b, side) for side in sides)) for a, b in pairs]
        width = half
    singles = [builder.fptrunc(one, ir.VectorType(F32, sums)) for one in vectors]
    return [builder.extract_element(one, I32(lane)) for one in singles for lane in range(sums)]


@inner
def tile_of_rows(weights, length, N, row, i, end, x_rows, y_rows, x, stride, blocks, pitch, V, narrow, y):
    """Unpacked rows of weights, those from `row` on, times the listed rows i .. end of activations."""
    compiled_once()
    last = end - 1
    while i < end:
        dots = tile_exact(weights, length, x, x_rows, i, last, stride, blocks, pitch, V, narrow)
        for c in range(COLUMNS):
            to = y_rows[min(i + c, last)] * N
            for r in range(ROWS):
                y[to + min(row + r, N - 1)] = dots[r * COLUMNS + c]
        i += COLUMNS


@inner
def exact_tiles(
    form, grouping, powers, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y, low, high, room
):  # fmt: skip
    """As `exact_products`, with room for a tile of unpacked weights."""
    V, tiles, j = powers.size, (N + ROWS - 1) // ROWS, 0
    blocks = (K + WIDTH * V - 1) // (WIDTH * V)
    length = blocks * WIDTH * V
    while first[j + 1] * tiles <= low:
        j += 1
    while j < words.size and first[j] * tiles < high:
        begin, end = first[j], first[j + 1]
        rows = end - begin
        if rows:
            done, left = max(low - begin * tiles, 0), min(high - begin * tiles, rows * tiles)
            for tile in range((done + rows - 1) // rows, (left + rows - 1) // rows):
                row = tile * ROWS
                if rows == 1:
                    for n in range(row, min(row + ROWS, N)):
                        dot = dot_exact(form, grouping, K, words[j], scales[j], biases[j], n, x, x_rows[begin] * stride)
                        y[y_rows[begin] * N + n] = dot
                    continue
                for r in range(ROWS):
                    n = min(row + r, N - 1)
                    unpack_exact(form, grouping, K, words[j], scales[j], biases[j], n, room, r * length)
                tile_of_rows(
                    room, length, N, row, begin, end, x_rows, y_rows, x, stride, blocks, stride // blocks, np.intp(V),
                    2 * K <= WIDTH * V, y,
                )  # fmt: skip
        j += 1


@allocating
def exact_products(form, grouping, powers, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y, low, high):
    """Tiles whose work, in rows of activations, begins at low .. high, where all tiles of a job come before the next.

    A job's work is rows x tiles; whole tiles are done, so that their weights are unpacked once.
    """
    compiled_once()
    V = powers.size
    length = (K + WIDTH * V - 1) // (WIDTH * V) * WIDTH * V
    room = floats_in_lines(2 * ROWS * length).view(np.float64)
    exact_tiles(
        form, grouping, powers, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y, low, high, room
    )  # fmt: skip


@kernel
def exact_kernel(form, grouping, powers, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y):
    """As products_kernel, with the weights and sums of `dot_exact`."""
    work = x_rows.size * ((N + ROWS - 1) // ROWS)
    if work == 0:
        return
    runs = min(work, threads())
    if x_rows.size * N * K < (SMALL_TILES if x_rows.size > words.size else SMALL):
        exact_products(
            form, grouping, powers, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y, np.intp(0), work
        )
    else:
        for index in prange(runs):
            run = np.intp(index)
            exact_products(
                form, grouping, powers, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y,
                work * run // runs, work * (run + 1) // runs,
            )  # fmt: skip
