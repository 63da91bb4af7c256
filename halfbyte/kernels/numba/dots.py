"""Dot products of packed weight rows with prepared activations: the inner loop of every product, as LLVM IR.

Weights are never unpacked to memory. A block is what sixteen lanes hold of a row: lane l has V consecutive weights, so
activations are prepared once, permuted to match: prepared[block, j, l] = x[block, l V + j]. Biases need only the sums
of x over each group, which the rows share. Codes count from the middle c = 2^(bits - 1), for biases are about -c scale:
from zero, both terms would be large and cancel, and what rounding took from them would stay.

    sum w x = sum_g scale_g sum (q - c) x  +  sum_g (bias_g + c scale_g) sum x

Where codes fill words (1, 2, 4, 8 bits), a mask leaves q 2^(b j) of the j-th weight of all lanes and a conversion makes
it float; the power of two is taken from the prepared activations. That is three instructions for sixteen weights. A
block's sums begin with its - c sum x, one more vector that is prepared. Codes of 3, 5 and 6 bits are shifted under the
exponent of 1.0, and 1.5 is subtracted.

exact.py is the other way: every weight and every sum in float64, for matrices too small to be worth more.

A tile is four rows of weights. Against four rows of activations they are done together; against one, STREAMS at a time,
which lie far apart, for that keeps the memory busy. Zen 4 fetches two such streams ahead by itself, best if it is not
asked to (2026-11-16, bytes of activations, of a plain read: 1.03 so, four streams 0.69, asked for 0.56); others are
given four and asked. Every output element has the same order of operations in every variant, so the bits are the same.

Numba specialises on types, so a format travels as the type of an empty array: `form` says by its rank which of FORMATS
and by its dtype how scales are stored, `grouping` by its rank which of GROUPS.
"""

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from .compiled import inlined
from .lanes import (
    F32,
    FVEC,
    I8,
    I16,
    I32,
    I64,
    IVEC,
    WIDTH,
    call,
    constant,
    folded,
    from_halves,
    fused,
    read,
    splatted,
    widened,
)

FORMATS = ("dense", "affine1", "affine2", "affine3", "affine4", "affine5", "affine6", "affine8", "fp4", "fp8")
GROUPS = (16, 32, 64, 128)
VALUES = {"dense": 1, "affine1": 32, "affine2": 16, "affine3": 32, "affine4": 8, "affine5": 32, "affine6": 16,
          "affine8": 4, "fp4": 4, "fp8": 2}  # fmt: skip
WIDEST = WIDTH * max(VALUES.values())  # weights of a block, in any format
KINDS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16, "e8m0": np.uint8, "e4m3": np.int8}
HALF = ir.HalfType()
FETCHES_AHEAD = (config.CPU_NAME or binding.get_host_cpu_name()).startswith("znver")
STREAMS, PREFETCH = (2, 0) if FETCHES_AHEAD else (4, 1024)  # rows of weights at a time; bytes ahead in each


def token(form, kind, group):
    """The two empty arrays that stand for a format in a kernel's signature."""
    return np.empty((0,) * (1 + FORMATS.index(form)), KINDS[kind]), np.empty((0,) * (1 + GROUPS.index(group)), np.uint8)


def in_words(form):
    """Whether codes never straddle words, so that a mask finds them."""
    return form in ("affine1", "affine2", "affine4", "affine8")


def powers(form):
    """What the j-th activation of each lane is multiplied with: powers of two around 1."""
    V = VALUES[form]
    if not in_words(form):
        return np.ones(V, np.float32)
    b = 32 // V
    middle = b * (V - 2) // 2
    return np.array([*(2.0 ** (middle - b * j) for j in range(V - 1)), 2.0**middle], np.float32)


def begun(form):
    """Whether a block's sums begin with what its activations times - c add up to: one more prepared vector."""
    return in_words(form)


class Layout:
    """What the codes of one format look like to the code generator."""

    def __init__(self, form, grouping):
        self.name = FORMATS[form.ndim - 1]
        self.group = GROUPS[grouping.ndim - 1]
        self.values = VALUES[self.name]
        self.block = WIDTH * self.values
        self.begun = begun(self.name)
        self.prepared_bytes = 4 * WIDTH * (self.values + self.begun)  # of a block's activations
        self.affine = self.name.startswith("affine")
        self.in_words = in_words(self.name)
        self.bits = {"fp4": 4, "fp8": 8}.get(self.name) or (int(self.name[6:]) if self.affine else 0)
        self.kind = {v: k for k, v in KINDS.items()}[np.dtype(form.dtype.name).type]
        self.stored = {"float32": F32, "bfloat16": I16, "float16": HALF, "e8m0": I8, "e4m3": I8}[self.kind]
        self.stored_bytes = {F32: 4, I16: 2, HALF: 2, I8: 1}[self.stored]
        # What sums of the values below must be multiplied with, once, at the end of a row.
        self.factor = {"fp4": 2.0**14, "fp8": 2.0**8}.get(self.name, 1.0)
        if self.affine:
            self.factor = 1.0 / float(powers(self.name)[-1]) if self.in_words else float(1 << self.bits)

    @property
    def lane_bytes(self):
        return self.stored_bytes if self.name == "dense" else self.values * self.bits // 8

    def row_bytes(self, K):
        return K * self.stored_bytes if self.name == "dense" else K * self.bits // 8

    def lane_values(self, builder, pointer, n):
        """The V vectors of a block: all lanes, or the first n."""
        if self.name == "dense":
            return [widened(builder, read(builder, pointer, ir.VectorType(self.stored, WIDTH), n))]
        if self.affine:
            return self._affine_values(builder, pointer, n)
        codes = read(builder, pointer, ir.VectorType(I16, WIDTH), n)
        return [self._small_float(builder, codes, j) for j in range(self.values)]

    def _affine_values(self, builder, pointer, n):
        b, count = self.bits, self.values * self.bits // 32
        loaded = read(builder, pointer, ir.VectorType(I32, WIDTH * count), n and builder.mul(n, I64(count)))
        if self.in_words:
            masks = [constant(IVEC, ((1 << b) - 1) << (b * j)) for j in range(self.values - 1)]
            codes = [builder.and_(loaded, mask) for mask in masks]
            codes.append(builder.lshr(loaded, constant(IVEC, 32 - b)))  # its sign bit must not count
            return [builder.sitofp(code, FVEC) for code in codes]
        words = [
            builder.shuffle_vector(loaded, loaded, ir.Constant(IVEC, [lane * count + word for lane in range(WIDTH)]))
            for word in range(count)
        ]
        values = []
        for j in range(self.values):
            word, start = divmod(j * b, 32)
            code = shifted(builder, words[word], 23 - b - start)
            if start + b > 32:  # the code goes on in the next word
                code = builder.or_(code, shifted(builder, words[word + 1], 32 - start + 23 - b))
            code = builder.and_(code, constant(IVEC, ((1 << b) - 1) << (23 - b)))
            value = builder.bitcast(builder.or_(code, constant(IVEC, 0x3F800000)), FVEC)
            values.append(builder.fsub(value, constant(FVEC, 1.5)))
        return values

    def _small_float(self, builder, codes, j):
        """e2m1 and e4m3 codes moved to where half floats have their fields: the value times 2^-14 or 2^-8."""
        kind = codes.type
        exponent = {"fp4": 0x0E00, "fp8": 0x3F80}[self.name]
        sign = builder.and_(shifted(builder, codes, 16 - self.bits * (j + 1)), constant(kind, 0x8000))
        low = builder.and_(
            shifted(builder, codes, {"fp4": 9, "fp8": 7}[self.name] - self.bits * j), constant(kind, exponent)
        )
        if self.name == "fp8":  # all ones is NaN
            low = builder.select(
                builder.icmp_unsigned("==", low, constant(kind, exponent)), constant(kind, 0x7E00), low
            )
        half = builder.bitcast(builder.or_(sign, low), ir.VectorType(HALF, WIDTH))
        return from_halves(builder, half)

    def codes(self, builder, values):
        """The plain codes q that affine `lane_values` stand for, exactly."""
        if self.in_words:
            downs = [2.0 ** -(self.bits * j) for j in range(self.values - 1)] + [1.0]
            return [builder.fmul(v, constant(FVEC, down)) for v, down in zip(values, downs, strict=True)]
        up = constant(FVEC, float(1 << self.bits))
        return [builder.fmul(builder.fadd(v, constant(FVEC, 0.5)), up) for v in values]

    def row_pointers(self, builder, K, words, scales, biases, row):
        """Where a row's words, scales and biases begin, from the addresses of its matrix."""
        width = builder.mul(K, I64(8 * self.stored_bytes if self.name == "dense" else self.bits))
        G = builder.udiv(K, I64(self.group))
        steps = builder.udiv(width, I64(8)), builder.mul(G, I64(self.stored_bytes))
        pairs = zip((words, scales, biases), (steps[0], steps[1], steps[1]), strict=True)
        return [builder.inttoptr(builder.add(b, builder.mul(row, step)), I8.as_pointer()) for b, step in pairs]

    def exact_weights(self, builder, places, block, n, kind):
        """The weights of a block, V vectors of float32 (rounded once) or float64 (exact)."""

        def wide(v):
            return v if kind == FVEC else builder.fpext(v, kind)

        words, scales, biases = places
        start = builder.gep(words, [builder.mul(block, I64(self.row_bytes(self.block)))])
        values = self.lane_values(builder, start, n)
        if self.name == "dense":
            return [wide(v) for v in values]
        scale = wide(self.scale_lanes(builder, scales, block, n))
        if self.affine:
            bias = wide(self.scale_lanes(builder, biases, block, n))
            return [fused(builder, wide(q), scale, bias) for q in self.codes(builder, values)]
        scale = builder.fmul(scale, constant(kind, self.factor))
        return [builder.fmul(wide(v), scale) for v in values]

    def scale_lanes(self, builder, scales, block, n):
        """Each lane's scale. `scales` points to the row's scales; n counts the lanes in use, None for all."""
        lanes_a_group = self.group // self.values
        if lanes_a_group >= WIDTH:
            index = builder.udiv(block, I64(lanes_a_group // WIDTH))
            pointer = builder.gep(scales, [builder.mul(index, I64(self.stored_bytes))])
            scalar = read(builder, pointer, ir.VectorType(self.stored, 1))
            return splatted(builder, FVEC, builder.extract_element(self.decoded_scales(builder, scalar), I32(0)))
        count = WIDTH // lanes_a_group
        pointer = builder.gep(scales, [builder.mul(block, I64(count * self.stored_bytes))])
        some = None if n is None else builder.udiv(n, I64(lanes_a_group))
        few = self.decoded_scales(builder, read(builder, pointer, ir.VectorType(self.stored, count), some))
        return builder.shuffle_vector(few, few, ir.Constant(IVEC, [lane // lanes_a_group for lane in range(WIDTH)]))

    def decoded_scales(self, builder, raw):
        if self.kind not in ("e8m0", "e4m3"):
            return widened(builder, raw)
        count = raw.type.count
        ints, floats = ir.VectorType(I32, count), ir.VectorType(F32, count)
        code = builder.zext(raw, ints)
        if self.kind == "e8m0":  # an exponent; 0 is 2^-127, which float32 has only below its normal numbers
            power = builder.shl(code, constant(ints, 23))
            zero = builder.icmp_unsigned("==", code, constant(ints, 0))
            return builder.bitcast(builder.select(zero, constant(ints, 0x00400000), power), floats)
        shorts = ir.VectorType(I16, count)
        code = builder.zext(raw, shorts)
        sign = builder.and_(builder.shl(code, constant(shorts, 8)), constant(shorts, 0x8000))
        low = builder.and_(builder.shl(code, constant(shorts, 7)), constant(shorts, 0x3F80))
        low = builder.select(builder.icmp_unsigned("==", low, constant(shorts, 0x3F80)), constant(shorts, 0x7E00), low)
        half = builder.bitcast(builder.or_(sign, low), ir.VectorType(HALF, count))
        return builder.fmul(from_halves(builder, half), constant(floats, 256.0))


def shifted(builder, v, left):
    """v << left, or v >> -left."""
    if left >= 0:
        return builder.shl(v, constant(v.type, left))
    return builder.lshr(v, constant(v.type, -left))


def fetch_ahead(builder, pointer):
    if PREFETCH:
        ahead = builder.gep(pointer, [I64(PREFETCH)])
        call(builder, "llvm.prefetch.p0", ir.VoidType(), ahead, I32(0), I32(3), I32(1))


def _emit_block(builder, layout, rows, xs, block, n, sums):
    """Add one block of each weight row times each activation row to the running sums."""
    width = layout.row_bytes(layout.block)
    starts = [builder.gep(words, [builder.mul(block, I64(width))]) for words, _, _ in rows]
    if n is None:
        for start in starts:
            fetch_ahead(builder, start)
    values = [layout.lane_values(builder, start, n) for start in starts]
    offset = builder.mul(block, I64(layout.prepared_bytes))
    inner = [[None] * len(xs) for _ in rows]
    if layout.begun:
        place = builder.add(offset, I64(4 * WIDTH * layout.values))
        first = [read(builder, builder.gep(x, [place]), FVEC) for x in xs]
        inner = [list(first) for _ in rows]
    for j in range(layout.values):
        place = builder.add(offset, I64(4 * WIDTH * j))
        activations = [read(builder, builder.gep(x, [place]), FVEC) for x in xs]
        for r in range(len(rows)):
            for m, activation in enumerate(activations):
                if layout.name == "dense":
                    builder.store(fused(builder, values[r][j], activation, builder.load(sums[r][m])), sums[r][m])
                elif inner[r][m] is None:
                    inner[r][m] = builder.fmul(values[r][j], activation)
                else:
                    inner[r][m] = fused(builder, values[r][j], activation, inner[r][m])
    if layout.name != "dense":
        for r, (_, scales, _) in enumerate(rows):
            scale = layout.scale_lanes(builder, scales, block, n)
            for m in range(len(xs)):
                builder.store(fused(builder, inner[r][m], scale, builder.load(sums[r][m])), sums[r][m])


def _emit_biases(builder, layout, rows, group_sums, first, n, sums):
    """Add sixteen groups' (bias + c scale) sum x to the running sums."""
    kind = ir.VectorType(layout.stored, WIDTH)
    offset = builder.mul(first, I64(layout.stored_bytes))
    xsums = [read(builder, builder.gep(g, [builder.mul(first, I64(4))]), FVEC, n) for g in group_sums]
    middle = constant(FVEC, float(1 << (layout.bits - 1)))
    for r, (_, scales, biases) in enumerate(rows):
        scale, bias = (widened(builder, read(builder, builder.gep(one, [offset]), kind, n)) for one in (scales, biases))
        bias = fused(builder, scale, middle, bias)
        for m, xsum in enumerate(xsums):
            builder.store(fused(builder, bias, xsum, builder.load(sums[r][m])), sums[r][m])


def _make_dot(R, M):
    """dot(form, grouping, K, words, scales, biases, rows, x, x_offsets, sums, sum_offsets) -> R M float32.

    words, scales, biases: addresses of a packed matrix; rows: which R of its rows. x: prepared activations;
    x_offsets, sum_offsets: where each of the M rows begins in x and in the group sums.
    """

    @intrinsic
    def dot(typing, form, grouping, K, words, scales, biases, rows, x, x_offsets, sums, sum_offsets):
        layout = Layout(form, grouping)
        result = types.UniTuple(types.float32, R * M)

        def generate(context, builder, signature, args):
            K, base_words, base_scales, base_biases = args[2:6]
            x_data = context.make_array(signature.args[7])(context, builder, args[7]).data
            g_data = context.make_array(signature.args[9])(context, builder, args[9]).data
            byte = I8.as_pointer()
            G = builder.udiv(K, I64(layout.group))
            picked = [
                layout.row_pointers(builder, K, base_words, base_scales, base_biases, row)
                for row in cgutils.unpack_tuple(builder, args[6], R)
            ]
            offsets = cgutils.unpack_tuple(builder, args[8], M)
            xs = [builder.bitcast(builder.gep(x_data, [o]), byte) for o in offsets]
            offsets = cgutils.unpack_tuple(builder, args[10], M)
            group_sums = [builder.bitcast(builder.gep(g_data, [o]), byte) for o in offsets]
            running = [[cgutils.alloca_once_value(builder, constant(FVEC, 0.0)) for _ in range(M)] for _ in range(R)]
            for line in running:
                for place in line:
                    builder.store(constant(FVEC, 0.0), place)

            blocks = builder.udiv(K, I64(layout.block))
            with cgutils.for_range(builder, blocks) as loop:
                _emit_block(builder, layout, picked, xs, loop.index, None, running)
            rest = builder.urem(K, I64(layout.block))
            with builder.if_then(builder.icmp_unsigned("!=", rest, I64(0))):
                _emit_block(builder, layout, picked, xs, blocks, builder.udiv(rest, I64(layout.values)), running)
            if layout.factor != 1.0:
                for line in running:
                    for place in line:
                        builder.store(builder.fmul(builder.load(place), constant(FVEC, layout.factor)), place)
            if layout.affine:
                whole = builder.udiv(G, I64(WIDTH))
                with cgutils.for_range(builder, whole) as loop:
                    first = builder.mul(loop.index, I64(WIDTH))
                    _emit_biases(builder, layout, picked, group_sums, first, None, running)
                some = builder.urem(G, I64(WIDTH))
                with builder.if_then(builder.icmp_unsigned("!=", some, I64(0))):
                    first = builder.mul(whole, I64(WIDTH))
                    _emit_biases(builder, layout, picked, group_sums, first, some, running)
            totals = [folded(builder, builder.load(place), builder.fadd) for line in running for place in line]
            return context.make_tuple(builder, signature.return_type, totals)

        intp = types.intp
        picks, several = types.UniTuple(intp, R), types.UniTuple(intp, M)
        return result(form, grouping, intp, intp, intp, intp, picks, x, several, sums, several), generate

    return dot


one_row_dots = _make_dot(STREAMS, 1)
tile_dots = _make_dot(4, 4)


if STREAMS == 2:

    @inlined
    def tile_rows(first, tile, tiles, last):
        """The rows of a tile, STREAMS at a time, where `tiles` tiles take the rows from `first` to `last`."""
        low, high = first + 2 * tile, first + 2 * (tiles + tile)
        return (low, min(high, last)), (min(low + 1, last), min(high + 1, last))

    @inlined
    def four_rows(streams):
        return streams[0] + streams[1]

else:

    @inlined
    def tile_rows(first, tile, tiles, last):
        """The rows of a tile, STREAMS at a time, where `tiles` tiles take the rows from `first` to `last`."""
        low = first + tile
        return ((low, min(low + tiles, last), min(low + 2 * tiles, last), min(low + 3 * tiles, last)),)

    @inlined
    def four_rows(streams):
        return streams[0]


@intrinsic
def row_values(typing, form, grouping, K, words, scales, biases, row, block, lanes, buffer, at):
    """Write one block of one row, as weights in lane order [V, 16], to buffer[at:]; `lanes` of it lie inside."""
    layout = Layout(form, grouping)

    def generate(context, builder, signature, args):
        K, words, scales, biases, row, block, n = args[2:9]
        places = layout.row_pointers(builder, K, words, scales, biases, row)
        data = context.make_array(signature.args[9])(context, builder, args[9]).data
        for j, v in enumerate(layout.exact_weights(builder, places, block, n, FVEC)):
            pointer = builder.gep(data, [builder.add(args[10], I64(WIDTH * j))])
            builder.store(v, builder.bitcast(pointer, FVEC.as_pointer()), align=4)
        return context.get_dummy_value()

    intp = types.intp
    return types.void(form, grouping, intp, intp, intp, intp, intp, intp, intp, buffer, intp), generate


@intrinsic
def permute_block(typing, lane_values, x, at, powers, centre, prepared, to):
    """prepared[to + 16 j + l] = x[at + l V + j] powers[j] for a whole block; V = 2^(rank of lane_values - 1).

    Where centre is not 0, one more vector follows: centre times the sums of x over j. Even and odd elements are told
    apart log2 V times: the lowest bit of an element's place is the lowest bit of its j.
    """
    V = 1 << (lane_values.ndim - 1)

    def generate(context, builder, signature, args):
        source, factors, target = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (1, 3, 5)
        )
        byte = I8.as_pointer()
        first = builder.bitcast(builder.gep(source, [args[2]]), byte)
        groups = {0: [read(builder, builder.gep(first, [I64(4 * WIDTH * i)]), FVEC) for i in range(V)]}
        step = 1
        while step < V:
            split = {}
            for j, vectors in groups.items():
                for odd in (0, 1):
                    picks = ir.Constant(IVEC, list(range(odd, 2 * WIDTH, 2)))
                    pairs = zip(vectors[::2], vectors[1::2], strict=True)
                    split[j + odd * step] = [builder.shuffle_vector(a, b, picks) for a, b in pairs]
            groups, step = split, 2 * step

        def store(j, v):
            pointer = builder.gep(target, [builder.add(args[6], I64(WIDTH * j))])
            builder.store(v, builder.bitcast(pointer, FVEC.as_pointer()), align=4)

        for j, (v,) in groups.items():
            store(j, builder.fmul(v, splatted(builder, FVEC, builder.load(builder.gep(factors, [I64(j)])))))
        with builder.if_then(builder.fcmp_ordered("!=", args[4], F32(0.0))):
            vectors = [v for (v,) in groups.values()]
            while len(vectors) > 1:
                vectors = [builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
            store(V, builder.fmul(vectors[0], splatted(builder, FVEC, args[4])))
        return context.get_dummy_value()

    intp = types.intp
    return types.void(lane_values, x, intp, powers, types.float32, prepared, intp), generate
