"""Dot products of packed codes with activations as whole numbers, as LLVM IR.

Each group of activations is divided by one number, its step, rounded, and cut into planes of bytes, highest first:
x = step p, p = 65536 a + 256 b + c, or two planes (`--cpu-activations i16`) or one (`i8`). Codes are unpacked to bytes,
and one instruction multiplies four of them with four of a plane and adds up (VNNI's vpdpbusd). As in dots.py codes
count from the middle c = 2^(bits - 1):

    sum w x = sum_g step_g (scale_g sum (q - c) p  +  (bias_g + c scale_g) sum p)

Three planes are what float32 activations are by default, where there is VNNI: 23 bits and a sign. Steps are powers of
two then, so what has no more bits than that is exact, and no number is off by more than a unit in the last place of its
group's largest (two, where that is just below a power of two). Sums of a group are rounded once, where a chain of
float32 additions rounds each time. The errors of a product are alike (1.2e-7 and 1.5e-7 with 2048 random activations)
unless a group's largest number, far above the others, meets a weight of zero. It takes half of the instructions.

Sums are exact in 32 bits: a group is summed in as many parts as that needs, which are added as float32. Adding may wrap
around on the way, for c sum p is taken off again before a sum is read.

Sixteen groups are a span. It begins with c sum p of its parts, sum p and the step of its groups; then its activations
lie as [block, plane, pass, 64 bytes], as far as the row goes. A block is sixteen words; pass j has the j-th code of
every byte of words. Codes of 3, 5 and 6 bits straddle words: there a block is 64 codes, and VBMI's vpmultishiftqb picks
them out of their bytes.

There are two ways through a matrix. `plane_dots`, for a row or two: rows of weights far apart, lanes are words; sums of
neighbouring lanes are added until a lane is a part of a group. `plane_tile` (plane_tiles.py), for more: 32 rows of
weights are first unpacked and turned, so that lanes are rows of weights and every sum of a group stays in its lane. As
sums of parts are exact and both have sixteen running sums (group g in number g mod 16), both give the same bits.
"""

from functools import cache

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .dots import STREAMS, Layout, fetch_ahead
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
    fused,
    has,
    read,
    splatted,
    widened,
)

BYTES, SHORTS = ir.VectorType(I8, 4 * WIDTH), ir.VectorType(I16, 2 * WIDTH)


def token(planes):
    """The empty array that stands for so many planes in a kernel's signature; 0 are activations as they are."""
    return np.empty((0,) * planes, np.uint8)


@cache
def multiplies_bytes():
    """Whether the CPU that is compiled for has vpdpbusd on 512 bits. Others take multiplications of 16-bit pairs."""
    return has("avx512vnni")


@cache
def picks_fields():
    """Whether the CPU that is compiled for has vpmultishiftqb, which picks eight bits at any place of a quadword."""
    return has("avx512vbmi")


def offers(form, planes):
    """Whether so many planes are a way for a format. Three are not for 8 bits: two such products fill 32 bits."""
    if form in ("affine3", "affine5", "affine6"):
        return picks_fields()
    return form in ("affine1", "affine2", "affine4") or (form == "affine8" and planes < 3)


def summed_products(builder, sums, codes, plane):
    """sums + codes * plane over each lane's four bytes: codes unsigned, plane signed, exact."""
    if multiplies_bytes():
        if binding.llvm_version_info[0] >= 22:  # its arguments have been bytes since then
            codes, plane = builder.bitcast(codes, BYTES), builder.bitcast(plane, BYTES)
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", IVEC, sums, codes, plane)
    codes, plane = builder.bitcast(codes, SHORTS), builder.bitcast(plane, SHORTS)
    eight = constant(SHORTS, 8)
    pairs = (
        (builder.and_(codes, constant(SHORTS, 255)), builder.ashr(builder.shl(plane, eight), eight)),
        (builder.lshr(codes, eight), builder.ashr(plane, eight)),
    )
    for a, b in pairs:
        products = builder.mul(*(builder.sext(v, ir.VectorType(I32, 2 * WIDTH)) for v in (a, b)))
        for odd in (0, 1):
            picks = ir.Constant(IVEC, list(range(odd, 2 * WIDTH, 2)))
            sums = builder.add(sums, builder.shuffle_vector(products, products, picks))
    return sums


class Planes(Layout):
    """A format that has an integer way, and activations of one, two or three planes."""

    def __init__(self, form, grouping, planes):
        super().__init__(form, grouping)
        self.planes = planes.ndim
        if not self.in_words:  # a lane has what fills its bytes
            self.values, self.block = 4, 4 * WIDTH
        self.passes = self.values // 4
        self.blocks = self.group // self.values  # of a span, and words of a group
        self.block_bytes = self.planes * self.passes * 4 * WIDTH  # of a block's activations
        self.middle = 1 << (self.bits - 1)
        # So many codes, counted from the middle, times activations surely add up to less than 2^31.
        self.part = min(self.group, 1 << (33 - self.bits - 8 * self.planes))
        self.parts = self.group // self.part
        self.head_bytes = (self.parts + 2) * 4 * WIDTH  # a span's centres, its sums and its steps
        self.span_bytes = self.head_bytes + self.blocks * self.block_bytes

    def prepared_row(self, K):
        """Bytes of a row of K activations."""
        spans, rest = divmod(K, WIDTH * self.group)
        last = self.head_bytes + -(-rest // self.block) * self.block_bytes if rest else 0
        return spans * self.span_bytes + last

    def words(self, builder, place, lanes=None):
        """The words of a block; of the first lanes, where not all lie inside."""
        if self.in_words:
            return read(builder, place, IVEC, lanes)
        count = I64(2 * self.bits) if lanes is None else builder.udiv(builder.mul(lanes, I64(self.bits)), I64(8))
        return read(builder, place, IVEC, count)

    def unpacked(self, builder, words):
        """The codes of a block's words, one a byte: `passes` vectors."""
        if self.bits == 8:
            return [words]
        mask = constant(IVEC, 0x01010101 * ((1 << self.bits) - 1))
        if not self.in_words:  # the bytes of eight codes into each quadword, from which fields are picked
            start = [byte // 8 * self.bits + byte % 8 for byte in range(4 * WIDTH)]
            picks = ir.Constant(ir.VectorType(I32, 4 * WIDTH), [min(at, 4 * WIDTH - 1) for at in start])
            data = builder.bitcast(words, BYTES)
            fields = ir.Constant(BYTES, [byte % 8 * self.bits for byte in range(4 * WIDTH)])
            data = builder.shuffle_vector(data, data, picks)
            picked = call(builder, "llvm.x86.avx512.pmultishift.qb.512", BYTES, fields, data)
            return [builder.and_(builder.bitcast(picked, IVEC), mask)]
        moved = [builder.lshr(words, constant(IVEC, self.bits * j)) if j else words for j in range(self.passes)]
        return [builder.and_(one, mask) for one in moved]

    def block_sums(self, builder, codes, x):
        """Each lane's codes times its activations at x."""
        sums = constant(IVEC, 0)
        for plane in range(self.planes):
            if plane:
                sums = builder.shl(sums, constant(IVEC, 8))
            for j, one in enumerate(codes):
                at = builder.gep(x, [I64((plane * self.passes + j) * 4 * WIDTH)])
                sums = summed_products(builder, sums, one, read(builder, at, IVEC))
        return sums

    def join(self, builder, found, sums):
        """Note a block's sums; whenever two stand for as many words each, add neighbouring lanes, up to a part's.

        Where a part has more words than there are lanes, two blocks' are added as they lie first.
        """
        words = self.part // self.values
        found.append((1 if words <= WIDTH else 0, sums))
        while len(found) > 1 and found[-1][0] == found[-2][0] < words.bit_length():
            (level, high), (_, low) = found.pop(), found.pop()
            joined = builder.add(low, high) if level == 0 else neighbours(builder, low, high, builder.add)
            found.append((level + 1, joined))

    def group_sums(self, builder, found, centres):
        """Sums of groups, a group a lane, from what `join` has left: parts less their centres, as float32, added up."""
        sums = []
        for i, (_, part) in enumerate(found):
            centre = read(builder, builder.gep(centres, [I64(4 * WIDTH * i)]), IVEC)
            sums.append(builder.sitofp(builder.sub(part, centre), FVEC))
        while len(sums) > 1:
            pairs = zip(sums[::2], sums[1::2], strict=True)
            sums = [neighbours(builder, low, high, builder.fadd) for low, high in pairs]
        return sums[0]

    def scaled(self, builder, sums, scale, bias, x_sum, step, running):
        """running + step (scale sums + (bias + c scale) x_sum): the one way in which sums of groups are added up."""
        bias = fused(builder, scale, constant(FVEC, float(self.middle)), bias)
        inner = fused(builder, bias, x_sum, builder.fmul(scale, sums))
        return fused(builder, inner, step, running)


def at_most(builder, n, most):
    return builder.select(builder.icmp_signed("<", n, I64(most)), n, I64(most))


def neighbours(builder, low, high, add):
    """Sums of neighbouring lanes of two vectors."""
    halves = (ir.Constant(IVEC, list(range(odd, 2 * WIDTH, 2))) for odd in (0, 1))
    return add(*(builder.shuffle_vector(low, high, picks) for picks in halves))


def _emit_span(builder, layout, rows, x, span, lanes, running):
    """Add a span of each weight row times x; `lanes` of it lie inside the row, None where all do."""
    width = layout.row_bytes(layout.block)
    start = builder.mul(span, I64(layout.blocks * width))
    x = builder.gep(x, [builder.mul(span, I64(layout.span_bytes))])
    found = [[] for _ in rows]
    for block in range(layout.blocks):
        here = builder.gep(x, [I64(layout.head_bytes + block * layout.block_bytes)])
        for r, (words, _, _) in enumerate(rows):
            place = builder.gep(words, [builder.add(start, I64(block * width))])
            if lanes is None:
                fetch_ahead(builder, place)
                codes = layout.unpacked(builder, layout.words(builder, place))
                layout.join(builder, found[r], layout.block_sums(builder, codes, here))
                continue
            kept = cgutils.alloca_once_value(builder, constant(IVEC, 0))
            builder.store(constant(IVEC, 0), kept)
            inside = builder.sub(lanes, I64(WIDTH * block))
            with builder.if_then(builder.icmp_signed(">", inside, I64(0))):
                codes = layout.unpacked(builder, layout.words(builder, place, at_most(builder, inside, WIDTH)))
                builder.store(layout.block_sums(builder, codes, here), kept)
            layout.join(builder, found[r], builder.load(kept))
    groups = None if lanes is None else builder.udiv(lanes, I64(layout.blocks))
    x_sum, step = (read(builder, builder.gep(x, [I64((layout.parts + at) * 4 * WIDTH)]), FVEC) for at in (0, 1))
    offset, kind = builder.mul(span, I64(WIDTH * layout.stored_bytes)), ir.VectorType(layout.stored, WIDTH)
    for (_, scales, biases), sums, place in zip(rows, found, running, strict=True):
        scale, bias = (
            widened(builder, read(builder, builder.gep(one, [offset]), kind, groups)) for one in (scales, biases)
        )
        total = layout.group_sums(builder, sums, x)
        builder.store(layout.scaled(builder, total, scale, bias, x_sum, step, builder.load(place)), place)


@intrinsic
def plane_dots(typing, form, grouping, planes, K, words, scales, biases, rows, x, at):
    """Rows of a packed matrix (addresses; which rows) times the row of planes at x[at:]: a float32 each."""
    layout = Planes(form, grouping, planes)

    def generate(context, builder, signature, args):
        K, words, scales, biases = args[3:7]
        data = context.make_array(signature.args[8])(context, builder, args[8]).data
        x = builder.bitcast(builder.gep(data, [args[9]]), I8.as_pointer())
        picked = [
            layout.row_pointers(builder, K, words, scales, biases, row)
            for row in cgutils.unpack_tuple(builder, args[7], STREAMS)
        ]
        running = [cgutils.alloca_once_value(builder, constant(FVEC, 0.0)) for _ in range(STREAMS)]
        for place in running:
            builder.store(constant(FVEC, 0.0), place)
        size = I64(WIDTH * layout.group)
        spans, rest = builder.udiv(K, size), builder.urem(K, size)
        with cgutils.for_range(builder, spans) as loop:
            _emit_span(builder, layout, picked, x, loop.index, None, running)
        with builder.if_then(builder.icmp_unsigned("!=", rest, I64(0))):
            _emit_span(builder, layout, picked, x, spans, builder.udiv(rest, I64(layout.values)), running)
        totals = [folded(builder, builder.load(place), builder.fadd) for place in running]
        return context.make_tuple(builder, signature.return_type, totals)

    intp, result = types.intp, types.UniTuple(types.float32, STREAMS)
    signature = result(form, grouping, planes, intp, intp, intp, intp, types.UniTuple(intp, STREAMS), x, intp)
    return signature, generate


@intrinsic
def plane_block(typing, form, grouping, planes, x, at, inverses, first, prepared, to):
    """Round and cut one block: x[at:] times inverses[first + its group], into the planes at prepared[to:]."""
    layout = Planes(form, grouping, planes)

    def generate(context, builder, signature, args):
        source, factors, target = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (3, 5, 7)
        )
        cut = [[] for _ in range(layout.planes)]
        for i in range(layout.values):
            group = builder.add(args[6], I64(WIDTH * i // layout.group))
            factor = splatted(builder, FVEC, builder.load(builder.gep(factors, [group])))
            v = builder.fmul(read(builder, builder.gep(source, [builder.add(args[4], I64(WIDTH * i))]), FVEC), factor)
            code = builder.fptosi(call(builder, "llvm.roundeven.v16f32", FVEC, v), IVEC)
            for plane in reversed(cut):  # the lowest eight bits last
                low = builder.ashr(builder.shl(code, constant(IVEC, 24)), constant(IVEC, 24))
                plane.append(builder.trunc(low, ir.VectorType(I8, WIDTH)))
                code = builder.ashr(builder.sub(code, low), constant(IVEC, 8))
        target = builder.bitcast(builder.gep(target, [args[8]]), I8.as_pointer())
        for p, plane in enumerate(cut):
            for j in range(layout.passes):
                picks = [layout.passes * byte + j for byte in range(4 * WIDTH)]
                pointer = builder.gep(target, [I64((p * layout.passes + j) * 4 * WIDTH)])
                builder.store(
                    picked_bytes(builder, plane, picks), builder.bitcast(pointer, BYTES.as_pointer()), align=1
                )
        return context.get_dummy_value()

    intp = types.intp
    return types.void(form, grouping, planes, x, intp, inverses, intp, prepared, intp), generate


@intrinsic
def plane_sizes(typing, form, grouping, planes):
    """Codes of a lane, lanes of a group and parts of a group, see Planes."""
    layout = Planes(form, grouping, planes)

    def generate(context, builder, signature, args):
        sizes = [I64(size) for size in (layout.values, layout.blocks, layout.parts)]
        return context.make_tuple(builder, signature.return_type, sizes)

    return types.UniTuple(types.intp, 3)(form, grouping, planes), generate


@intrinsic
def plane_sums(typing, form, grouping, planes, x, at, inverse, prepared, to):
    """Round the group at x[at:]: c times the sums of its parts go to prepared[to:], as int32. Returns the whole sum."""
    layout = Planes(form, grouping, planes)

    def generate(context, builder, signature, args):
        source, target = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (3, 6))
        target = builder.bitcast(builder.gep(target, [args[7]]), I32.as_pointer())
        factor = splatted(builder, FVEC, args[5])
        vectors = []
        for i in range(layout.group // WIDTH):
            v = read(builder, builder.gep(source, [builder.add(args[4], I64(WIDTH * i))]), FVEC)
            rounded = call(builder, "llvm.roundeven.v16f32", FVEC, builder.fmul(v, factor))
            vectors.append(builder.fptosi(rounded, IVEC))
        while len(vectors) > layout.parts:
            vectors = [builder.add(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        lanes = WIDTH * len(vectors) // layout.parts  # of a part
        whole = I32(0)
        for part in range(layout.parts):
            vector, start = vectors[part * lanes // WIDTH], part * lanes % WIDTH
            picks = ir.Constant(ir.VectorType(I32, lanes), list(range(start, start + lanes)))
            one = folded(builder, builder.shuffle_vector(vector, vector, picks), builder.add)
            builder.store(builder.mul(one, I32(layout.middle)), builder.gep(target, [I64(part)]))
            whole = builder.add(whole, one)
        return builder.sitofp(whole, F32)

    intp = types.intp
    return types.float32(form, grouping, planes, x, intp, types.float32, prepared, intp), generate


def picked_bytes(builder, vectors, picks):
    """Bytes of vectors of sixteen that lie one after the other."""
    while len(vectors) > 1:
        count = 2 * vectors[0].type.count
        all_of_both = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        vectors = [builder.shuffle_vector(a, b, all_of_both) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    kind = ir.VectorType(I32, len(picks))
    return builder.shuffle_vector(vectors[0], vectors[0], ir.Constant(kind, picks))
