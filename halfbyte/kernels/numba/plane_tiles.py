"""Tiles of 32 rows of weights for planes.py: unpacked, turned so that lanes are rows, and multiplied."""

from functools import reduce

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .dots import Layout
from .lanes import F32, FVEC, I8, I32, I64, IVEC, WIDTH, constant, read, splatted, widened
from .planes import Planes, summed_products

ROWS = 4  # of activations that a tile of weights is multiplied with at a time
TILE = 2 * WIDTH  # weight rows of a tile
FEW_GROUPS, SHORT = (1, 2, 4), 8  # groups and words of rows that are so short that sixteen are read as they lie


def turned(builder, vectors):
    """Sixteen vectors of sixteen as a matrix, transposed: lane i of vector j becomes lane j of vector i."""
    half = WIDTH // 2
    while half:
        made = list(vectors)
        for i in range(WIDTH):
            if i & half:
                continue
            low, high = vectors[i], vectors[i + half]
            lanes = range(WIDTH)
            left = [lane if not lane & half else lane - half + WIDTH for lane in lanes]
            right = [lane + half if not lane & half else lane + WIDTH for lane in lanes]
            made[i] = builder.shuffle_vector(low, high, ir.Constant(IVEC, left))
            made[i + half] = builder.shuffle_vector(low, high, ir.Constant(IVEC, right))
        vectors, half = made, half // 2
    return vectors


def rows_from(builder, row, last):
    """Sixteen rows; those after `last` repeat it."""
    each = [builder.add(row, I64(lane)) for lane in range(WIDTH)]
    return [builder.select(builder.icmp_signed(">", one, last), last, one) for one in each]


def in_a_row(builder, place, kind, G, left):
    """Sixteen rows of G numbers, one after another, transposed; `left` of them are there, of others nothing is read."""
    vectors = []
    for index in range(G):
        here = builder.gep(builder.bitcast(place, kind.as_pointer()), [I64(index)])
        vectors.append(read(builder, here, kind, builder.sub(left, I64(WIDTH * index))))
    return strided(builder, vectors)


def strided(builder, vectors):
    """Of G vectors in a row every G-th number: lane i of vector g is number i G + g. G is a power of two."""
    if len(vectors) == 1:
        return vectors
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    sides = [ir.Constant(IVEC, list(range(odd, 2 * WIDTH, 2))) for odd in (0, 1)]
    even, odd = (strided(builder, [builder.shuffle_vector(a, b, side) for a, b in pairs]) for side in sides)
    return [one for both in zip(even, odd, strict=True) for one in both]


@intrinsic
def plane_codes(typing, form, grouping, planes, K, words, row, last, block, lanes, codes, to):
    """Unpack one block of sixteen weight rows from `row` on (those after `last` repeat it), lanes being rows.

    Word w's pass j goes to codes[to + (w passes + j) TILE / 16 vectors]; `lanes` words lie inside the rows.
    """
    layout = Planes(form, grouping, planes)

    def generate(context, builder, signature, args):
        K, words, row, last, block, n = args[3:9]
        data = context.make_array(signature.args[9])(context, builder, args[9]).data
        target = builder.bitcast(builder.gep(data, [args[10]]), I8.as_pointer())
        width = builder.udiv(builder.mul(K, I64(layout.bits)), I64(8))

        def place_of(row):
            start = builder.add(builder.mul(row, width), builder.mul(block, I64(layout.row_bytes(layout.block))))
            return builder.inttoptr(builder.add(words, start), I8.as_pointer())

        def keep(found):
            for w, vector in enumerate(found):
                for j, one in enumerate(layout.unpacked(builder, vector) if layout.in_words else [vector]):
                    pointer = builder.gep(target, [I64((w * layout.passes + j) * 4 * TILE)])
                    builder.store(one, builder.bitcast(pointer, IVEC.as_pointer()), align=4)

        short = builder.icmp_signed("==", width, I64(4 * SHORT if layout.in_words else -1))
        with builder.if_else(short) as (few, many):
            with few:
                rows = builder.add(builder.sub(last, row), I64(1))
                keep(in_a_row(builder, place_of(row), IVEC, SHORT, builder.mul(rows, I64(SHORT))))
            with many:
                found = [layout.words(builder, place_of(one), n) for one in rows_from(builder, row, last)]
                if not layout.in_words:
                    found = [layout.unpacked(builder, one)[0] for one in found]
                keep(turned(builder, found))
        return context.get_dummy_value()

    intp = types.intp
    return types.void(form, grouping, planes, intp, intp, intp, intp, intp, intp, codes, intp), generate


@intrinsic
def plane_scales(typing, form, grouping, K, scales, row, last, first, groups, table, to):
    """Scales (or biases) of sixteen weight rows and up to sixteen groups, lanes being rows: table[to + group TILE]."""
    layout = Layout(form, grouping)

    def generate(context, builder, signature, args):
        K, scales, row, last, first, groups = args[2:8]
        data = context.make_array(signature.args[8])(context, builder, args[8]).data
        G, kind = builder.udiv(K, I64(layout.group)), ir.VectorType(layout.stored, WIDTH)

        def place_of(row):
            start = builder.mul(builder.add(builder.mul(row, G), first), I64(layout.stored_bytes))
            return builder.inttoptr(builder.add(scales, start), I8.as_pointer())

        def keep(found):
            for g, vector in enumerate(found):
                pointer = builder.gep(data, [builder.add(args[9], I64(g * TILE))])
                builder.store(vector, builder.bitcast(pointer, FVEC.as_pointer()), align=4)

        rows = builder.add(builder.sub(last, row), I64(1))
        few = [(count, builder.icmp_signed("==", G, I64(count))) for count in FEW_GROUPS]
        for count, alike in few:
            with builder.if_then(alike):
                found = in_a_row(builder, place_of(row), kind, count, builder.mul(rows, G))
                keep([widened(builder, one) for one in found])
        with builder.if_then(builder.not_(reduce(builder.or_, [alike for _, alike in few]))):
            found = [read(builder, place_of(one), kind, groups) for one in rows_from(builder, row, last)]
            keep(turned(builder, [widened(builder, one) for one in found]))
        return context.get_dummy_value()

    intp = types.intp
    return types.void(form, grouping, intp, intp, intp, intp, intp, intp, table, intp), generate


@intrinsic
def plane_tile(typing, form, grouping, planes, G, codes, scales, biases, x, places, running):
    """A turned tile times four rows of planes at x[places]: adds to running [16 sums, 4 rows, 32], float32."""
    layout = Planes(form, grouping, planes)
    both = range(TILE // WIDTH)

    def generate(context, builder, signature, args):
        G = args[3]
        code_data, scale_data, bias_data, x_data, sum_data = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (4, 5, 6, 7, 9)
        )
        codes, scales, biases, sums_at = (
            builder.bitcast(data, I8.as_pointer()) for data in (code_data, scale_data, bias_data, sum_data)
        )
        offsets = cgutils.unpack_tuple(builder, args[8], ROWS)
        xs = [builder.bitcast(builder.gep(x_data, [at]), I8.as_pointer()) for at in offsets]

        def vector_at(base, offset, index, kind=FVEC):
            return read(builder, builder.gep(base, [builder.add(offset, I64(4 * WIDTH * index))]), kind)

        with cgutils.for_range(builder, G) as loop:
            span, number = builder.udiv(loop.index, I64(WIDTH)), builder.urem(loop.index, I64(WIDTH))
            starts = [builder.gep(one, [builder.mul(span, I64(layout.span_bytes))]) for one in xs]
            first = builder.mul(number, I64(layout.blocks))  # word of the span
            within = builder.add(
                builder.mul(builder.udiv(first, I64(WIDTH)), I64(layout.block_bytes)),
                builder.mul(builder.urem(first, I64(WIDTH)), I64(4)),
            )
            within = builder.add(within, I64(layout.head_bytes))
            group_codes = builder.mul(loop.index, I64(layout.blocks * layout.passes * 4 * TILE))

            parts = [[[] for _ in both] for _ in xs]
            words = layout.part // layout.values
            for part in range(layout.parts):
                found = [[constant(IVEC, 0) for _ in both] for _ in xs]
                for p in range(layout.planes):
                    if p:
                        found = [[builder.shl(sums, constant(IVEC, 8)) for sums in line] for line in found]
                    for word in range(part * words, (part + 1) * words):
                        for j in range(layout.passes):
                            at = (word * layout.passes + j) * len(both)
                            tile = [vector_at(codes, group_codes, at + t, IVEC) for t in both]
                            block, lane = divmod(word, WIDTH)
                            at = block * layout.block_bytes + (p * layout.passes + j) * 4 * WIDTH + 4 * lane
                            for line, start in zip(found, starts, strict=True):
                                pointer = builder.gep(start, [builder.add(within, I64(at))])
                                four = builder.load(builder.bitcast(pointer, I32.as_pointer()), align=1)
                                four = splatted(builder, IVEC, four)
                                for t in both:
                                    line[t] = summed_products(builder, line[t], tile[t], four)
                index = builder.add(builder.mul(number, I64(layout.parts)), I64(part))
                for line, start, kept in zip(found, starts, parts, strict=True):
                    place = builder.gep(start, [builder.mul(index, I64(4))])
                    centre = splatted(builder, IVEC, builder.load(builder.bitcast(place, I32.as_pointer()), align=1))
                    for t in both:
                        kept[t].append(builder.sitofp(builder.sub(line[t], centre), FVEC))
            row = builder.mul(loop.index, I64(4 * TILE))
            scale = [vector_at(scales, row, t) for t in both]
            bias = [vector_at(biases, row, t) for t in both]
            slot = builder.mul(number, I64(4 * ROWS * TILE))
            sums_of_x = I64(layout.parts * 4 * WIDTH)
            for m, start in enumerate(starts):
                place = builder.gep(start, [builder.add(sums_of_x, builder.mul(number, I64(4)))])
                x_sum, step = (
                    splatted(builder, FVEC, builder.load(builder.bitcast(one, F32.as_pointer()), align=1))
                    for one in (place, builder.gep(place, [I64(4 * WIDTH)]))
                )
                for t in both:
                    sums = parts[m][t]
                    while len(sums) > 1:
                        sums = [builder.fadd(low, high) for low, high in zip(sums[::2], sums[1::2], strict=True)]
                    before = vector_at(sums_at, slot, 2 * m + t)
                    after = layout.scaled(builder, sums[0], scale[t], bias[t], x_sum, step, before)
                    pointer = builder.gep(sums_at, [builder.add(slot, I64(4 * WIDTH * (2 * m + t)))])
                    builder.store(after, builder.bitcast(pointer, FVEC.as_pointer()), align=4)
        return context.get_dummy_value()

    intp = types.intp
    four = types.UniTuple(intp, ROWS)
    return types.void(form, grouping, planes, intp, codes, scales, biases, x, four, running), generate
