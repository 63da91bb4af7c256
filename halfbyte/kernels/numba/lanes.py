"""Sixteen float32 at a time inside @njit code: a small vocabulary of LLVM vector values.

A value of type `f32x16` or `i32x16` lives in registers (one on AVX-512, two on AVX2, four on NEON; LLVM splits it).
The width is the same on every machine, so results do not depend on the machine's vector width.

Arrays are given as arrays or, cheaper for Python to pass, as the address of float32 elements. They are addressed flat:
`load(a, i)` reads the sixteen elements from `i` of a C-contiguous array, whatever its shape, and widens them: float32
as they are, uint16 as bfloat16, int16 as IEEE half (Numba has no float16 arrays; torch views give both). No bounds are
checked. `load_n(a, i, n)` touches only the first n elements and gives zeros after them.
"""

import operator
import platform
from functools import cache

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_jitable, register_model
from numba.np.arrayobj import populate_array

WIDTH = 16
LINE = 64  # bytes


@register_jitable
def floats_in_lines(count):
    """So many float32, from the start of a cache line on: a vector that straddles two takes two loads."""
    room = np.empty(count + LINE // 4, np.float32)
    start = (LINE - room.ctypes.data % LINE) % LINE // 4
    return room[start : start + count]


@intrinsic
def threads(typing):
    """How many threads share a loop of this thread's. (Numba's own function is an address in this process: code that is
    kept on disk would call it in another.)"""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(I64, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "get_num_threads"), [])

    return types.intp(), generate


@intrinsic(prefer_literal=True)
def stack_floats(typing, count):
    """So many float32 (a constant), in a cache line of their own, on the stack: only until the function returns.

    Nobody counts who holds them, as for arrays, and they cost nothing to get.
    """
    kind, size = types.Array(types.float32, 1, "C"), count.literal_value

    def generate(context, builder, signature, args):
        place = cgutils.alloca_once(builder, ir.ArrayType(F32, size))
        place.align = LINE
        array = context.make_array(kind)(context, builder)
        data = builder.bitcast(place, F32.as_pointer())
        populate_array(array, data, (I64(size),), (I64(4),), I64(4), None)
        return array._getvalue()

    return kind(count), generate


class Lanes(types.Type):
    def __init__(self, name, element):
        self.element = element
        super().__init__(name=name)


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        super().__init__(manager, lanes, ir.VectorType(lanes.element, WIDTH))


F32, I32, I16, I8, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8), ir.IntType(64)
f32x16 = Lanes("f32x16", F32)
i32x16 = Lanes("i32x16", I32)
FVEC, IVEC = ir.VectorType(F32, WIDTH), ir.VectorType(I32, WIDTH)


# What follows builds IR; the intrinsics after it expose it to @njit code.


def constant(kind, value):
    return ir.Constant(kind, [value] * kind.count)


def splatted(builder, kind, scalar):
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, constant(ir.VectorType(I32, kind.count), 0))


def call(builder, name, result, *args):
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def suffix(kind):
    letter = {F32: "f32", I32: "i32", I16: "i16", I8: "i8", ir.HalfType(): "f16", ir.DoubleType(): "f64"}[kind.element]
    return f"v{kind.count}{letter}"


def first_lanes(builder, n, count=WIDTH):
    """The mask of the lanes below n."""
    kind = ir.VectorType(I32, count)
    iota = ir.Constant(kind, list(range(count)))
    return builder.icmp_signed("<", iota, splatted(builder, kind, builder.trunc(n, I32)))


def element_pointer(context, builder, array_type, array, index, kind):
    if isinstance(array_type, types.Integer):
        flat = builder.inttoptr(array, kind.as_pointer())
    else:
        data = context.make_array(array_type)(context, builder, array).data
        flat = builder.bitcast(data, kind.as_pointer())
    return builder.gep(flat, [index])


def read(builder, pointer, kind, n=None):
    """`kind` (a vector type) from `pointer`, at any alignment; with n, only the first n elements are touched."""
    pointer = builder.bitcast(pointer, kind.as_pointer())
    if n is None:
        return builder.load(pointer, align=1)
    mask = first_lanes(builder, n, kind.count)
    return call(
        builder, f"llvm.masked.load.{suffix(kind)}.p0", kind, pointer, ir.Constant(I32, 1), mask, constant(kind, 0)
    )


def widened(builder, narrow):
    """float32 lanes of float32, bfloat16 (as int16) or half lanes."""
    if narrow.type.element == I16:
        wide = builder.zext(narrow, ir.VectorType(I32, narrow.type.count))
        shifted = builder.shl(wide, constant(wide.type, 16))
        return builder.bitcast(shifted, ir.VectorType(F32, narrow.type.count))
    return narrow if narrow.type.element == F32 else from_halves(builder, narrow)


@cache
def has(feature):
    """Whether the CPU that is compiled for has this, by LLVM's name. Numba lets users name another than this one."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES.split(",")
    return config.CPU_NAME is None and bool(binding.get_host_cpu_features().get(feature))


@cache
def converts_halves():
    """Whether the CPU that is compiled for widens float16. For others LLVM calls a function that no process has."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return has("f16c")


def from_halves(builder, halves):
    """float32 lanes of half lanes; without F16C by moving their bits, as numbers 2^112 too small."""
    floats, ints = (ir.VectorType(kind, halves.type.count) for kind in (F32, I32))
    if converts_halves():
        return builder.fpext(halves, floats)
    bits = builder.zext(builder.bitcast(halves, ir.VectorType(I16, halves.type.count)), ints)
    size = builder.shl(builder.and_(bits, constant(ints, 0x7FFF)), constant(ints, 13))
    finite = builder.bitcast(builder.fmul(builder.bitcast(size, floats), constant(floats, 2.0**112)), ints)
    endless = builder.icmp_unsigned(">=", size, constant(ints, 0x0F800000))  # infinities and NaN
    size = builder.select(endless, builder.or_(size, constant(ints, 0x7F800000)), finite)
    sign = builder.shl(builder.and_(bits, constant(ints, 0x8000)), constant(ints, 16))
    return builder.bitcast(builder.or_(size, sign), floats)


def stored_as(array_type):
    """The LLVM element type that an array's dtype stands for."""
    if isinstance(array_type, types.Integer):
        return F32
    return {types.float32: F32, types.uint16: I16, types.int16: ir.HalfType()}[array_type.dtype]


def folded(builder, v, join):
    """One lane of many: the upper half joined to the lower, and again."""
    count = v.type.count
    while count > 1:
        count //= 2
        picks = ir.VectorType(I32, count)
        low = builder.shuffle_vector(v, v, ir.Constant(picks, list(range(count))))
        high = builder.shuffle_vector(v, v, ir.Constant(picks, list(range(count, 2 * count))))
        v = join(low, high)
    return builder.extract_element(v, ir.Constant(I32, 0))


def fused(builder, x, y, z):
    return call(builder, f"llvm.fma.{suffix(x.type)}", x.type, x, y, z)


@intrinsic
def load(typing, a, i):
    def generate(context, builder, signature, args):
        kind = ir.VectorType(stored_as(signature.args[0]), WIDTH)
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], kind.element)
        return widened(builder, read(builder, pointer, kind))

    return f32x16(a, types.intp), generate


@intrinsic
def load_n(typing, a, i, n):
    def generate(context, builder, signature, args):
        # Masked loads of 16-bit elements need AVX-512BW; elements one by one serve every machine, and tails are rare.
        element = stored_as(signature.args[0])
        kind = ir.VectorType(element, WIDTH)
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], element)
        if element == F32:
            return read(builder, pointer, kind, args[2])
        whole = cgutils.alloca_once_value(builder, constant(kind, 0))
        spot = builder.bitcast(whole, element.as_pointer())
        builder.store(constant(kind, 0), whole)
        with cgutils.for_range(builder, args[2]) as loop:
            builder.store(builder.load(builder.gep(pointer, [loop.index]), align=1), builder.gep(spot, [loop.index]))
        return widened(builder, builder.load(whole))

    return f32x16(a, types.intp, types.intp), generate


@intrinsic
def store(typing, a, i, v):
    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], F32)
        builder.store(args[2], builder.bitcast(pointer, FVEC.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(a, types.intp, f32x16), generate


@intrinsic
def store_n(typing, a, i, v, n):
    """Store the first n lanes."""

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], F32)
        pointer = builder.bitcast(pointer, FVEC.as_pointer())
        mask = first_lanes(builder, args[3])
        call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), args[2], pointer, ir.Constant(I32, 4), mask)
        return context.get_dummy_value()

    return types.void(a, types.intp, f32x16, types.intp), generate


@intrinsic
def element(typing, a, i):
    """Element i alone, widened."""

    def generate(context, builder, signature, args):
        kind = ir.VectorType(stored_as(signature.args[0]), 1)
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], kind.element)
        return builder.extract_element(widened(builder, read(builder, pointer, kind)), I32(0))

    return types.float32(a, types.intp), generate


@intrinsic
def splat(typing, x):
    def generate(context, builder, signature, args):
        return splatted(builder, FVEC, args[0])

    return f32x16(types.float32), generate


@intrinsic
def zeros(typing):
    def generate(context, builder, signature, args):
        return constant(FVEC, 0.0)

    return f32x16(), generate


@intrinsic
def fma(typing, x, y, z):
    """x y + z, rounded once."""

    def generate(context, builder, signature, args):
        return fused(builder, *args)

    return f32x16(f32x16, f32x16, f32x16), generate


def _binary(symbol, emit):
    """An operator between lanes. (`overload` would compile a function for each.)"""

    @infer_global(symbol)
    class Typed(ConcreteTemplate):
        cases = (f32x16(f32x16, f32x16),)

    @lower_builtin(symbol, f32x16, f32x16)
    def generate(context, builder, signature, args):
        return emit(builder, *args)


_binary(operator.add, ir.IRBuilder.fadd)
_binary(operator.sub, ir.IRBuilder.fsub)
_binary(operator.mul, ir.IRBuilder.fmul)
_binary(operator.truediv, ir.IRBuilder.fdiv)


@intrinsic
def compiled_once(typing):
    """Said in a function that a kernel calls both in a loop and in a prange: LLVM shall not copy it into both."""

    def generate(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def larger(typing, x, y):
    """The larger of each pair of lanes; a NaN in x wins."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[1], args[0])

    return f32x16(f32x16, f32x16), generate


@intrinsic
def keep(typing, v, n, other):
    """The first n lanes of v, `other` after them."""

    def generate(context, builder, signature, args):
        return builder.select(first_lanes(builder, args[1]), args[0], splatted(builder, FVEC, args[2]))

    return f32x16(f32x16, types.intp, types.float32), generate


@intrinsic
def total(typing, v):
    """The sum of the lanes, by halves."""

    def generate(context, builder, signature, args):
        return folded(builder, args[0], builder.fadd)

    return types.float32(f32x16), generate


@intrinsic
def largest(typing, v):
    """The largest lane; NaN if the first lane of a compared pair is NaN (callers that care add their lanes' sum)."""

    def generate(context, builder, signature, args):
        def larger_of(low, high):
            return builder.select(builder.fcmp_ordered("<", low, high), high, low)

        return folded(builder, args[0], larger_of)

    return types.float32(f32x16), generate


@intrinsic
def nearest(typing, v):
    """The nearest whole numbers, the even one of two as near."""

    def generate(context, builder, signature, args):
        return call(builder, "llvm.roundeven.v16f32", FVEC, args[0])

    return f32x16(f32x16), generate


@intrinsic
def exp(typing, x):
    """e^x to about one unit in the last place; 0 and inf where float32 ends, NaN for NaN.

    x = n ln 2 + r with |r| <= ln 2 / 2, then 2^n (1 + r + r^2 (1/2 + ...)). n is read from the low bits of
    x / ln 2 + 1.5 2^23, which rounds it, and 2^n is applied in two halves so that results below the smallest normal
    number come out right.
    """

    def generate(context, builder, signature, args):
        low, high = constant(FVEC, -104.0), constant(FVEC, 89.0)
        x = builder.select(builder.fcmp_ordered("<", args[0], low), low, args[0])
        x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
        rounder = constant(FVEC, 12582912.0)
        shifted = fused(builder, x, constant(FVEC, 1.4426950408889634), rounder)
        n = builder.sub(builder.bitcast(shifted, IVEC), constant(IVEC, 0x4B400000))
        whole = builder.fsub(shifted, rounder)
        r = fused(builder, whole, constant(FVEC, -0.693145751953125), x)
        r = fused(builder, whole, constant(FVEC, -1.428606765330187e-06), r)
        series = constant(FVEC, 1.0 / 5040)
        for factorial in (720, 120, 24, 6, 2, 1, 1):
            series = fused(builder, series, r, constant(FVEC, 1.0 / factorial))
        half = builder.ashr(n, constant(IVEC, 1))
        for part in (half, builder.sub(n, half)):
            power = builder.shl(builder.add(part, constant(IVEC, 127)), constant(IVEC, 23))
            series = builder.fmul(series, builder.bitcast(power, FVEC))
        return series

    return f32x16(f32x16), generate


@intrinsic
def prefetch(typing, a, i):
    """Ask for the cache line of element i; an address outside the array is harmless."""

    def generate(context, builder, signature, args):
        width = context.get_value_type(signature.args[0].dtype)
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], width)
        pointer = builder.bitcast(pointer, I8.as_pointer())
        call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))
        return context.get_dummy_value()

    return types.void(a, types.intp), generate


@intrinsic
def totals(typing, vectors):
    """The sums of the lanes of sixteen vectors (a tuple), one a lane; each adds as `total` does, wherever it stands."""

    def generate(context, builder, signature, args):
        vectors, half = cgutils.unpack_tuple(builder, args[0], WIDTH), WIDTH // 2
        while half:
            folded = []
            for low, high in zip(vectors[:half], vectors[half:], strict=True):
                starts = [at + side for at in range(0, WIDTH, 2 * half) for side in (0, WIDTH)]
                picks = [start + lane for start in starts for lane in range(half)]
                left, right = ([pick + shift for pick in picks] for shift in (0, half))
                left, right = (
                    builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, WIDTH), side))
                    for side in (left, right)
                )
                folded.append(builder.fadd(left, right))
            vectors, half = folded, half // 2
        return vectors[0]

    return f32x16(vectors), generate


@intrinsic
def choose(typing, x, y, below, otherwise):
    """Lane by lane: `below` where x < y, else `otherwise` (also where either is NaN)."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return f32x16(f32x16, f32x16, f32x16, f32x16), generate


@intrinsic
def load_spread(typing, a, i, step, n):
    """The n elements i, i + step, i + 2 step, ...; lanes from n on repeat the last of them."""

    def generate(context, builder, signature, args):
        _, i, step, n = args
        element = stored_as(signature.args[0])
        pointer = element_pointer(context, builder, signature.args[0], args[0], i, element)
        v, last = ir.Constant(ir.VectorType(element, WIDTH), ir.Undefined), builder.sub(n, I64(1))
        for lane in range(WIDTH):
            place = builder.select(builder.icmp_signed("<", I64(lane), n), I64(lane), last)
            one = builder.load(builder.gep(pointer, [builder.mul(place, step)]), align=1)
            v = builder.insert_element(v, one, I32(lane))
        return widened(builder, v)

    return f32x16(a, types.intp, types.intp, types.intp), generate


@intrinsic
def copy_bytes(typing, to, source, size):
    """Copy `size` bytes between two addresses that do not overlap."""

    def generate(context, builder, signature, args):
        places = [builder.inttoptr(a, I8.as_pointer()) for a in args[:2]]
        call(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), *places, args[2], ir.Constant(ir.IntType(1), 0))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def product_sum(typing, x, factor, y, z):
    """x factor y + z, in float64 and rounded once: the sum may cancel. `factor` is one float64."""

    def generate(context, builder, signature, args):
        kind = ir.VectorType(ir.DoubleType(), WIDTH)
        x, y, z = (builder.fpext(args[i], kind) for i in (0, 2, 3))
        scaled = builder.fmul(builder.fmul(x, splatted(builder, kind, args[1])), y)
        return builder.fptrunc(builder.fadd(scaled, z), FVEC)

    return f32x16(f32x16, types.float64, f32x16, f32x16), generate
