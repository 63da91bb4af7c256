"""Codes of quantised weights as floats in registers, for kernels that multiply few rows.

The unit is a chunk: 32 codes of a row, which are as many words as a code has bits. One thread owns whole chunks, so no
format needs another thread's words, and a chunk lies in one group (nvfp4: in two).

Integer to float conversions run at a quarter of the rate of an FMA, so none is used. An affine code is masked out of
its word where it stands and put under the exponent of 1.0, which reads as 1 + q 2^(p - 23) for a code at bit p of the
mantissa. Neighbouring codes share a shift: they come out at different p, and the powers of two between them are
multiplied into the activations, once. What the 1 adds is the sum of those activations, subtracted once a chunk.
"""

# ruff: noqa: RUF005 - Triton knows no starred tuples

import triton
import triton.language as tl

from .laid import along, turned


@triton.jit
def quarters(t):
    """The last axis of a tile, of length 4, apart: in registers, where a thread holds all of it."""
    even, odd = tl.split(tl.reshape(t, t.shape[:-1] + [2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return (a, b, c, d)


@triton.jit
def eighths(t):
    even, odd = tl.split(tl.reshape(t, t.shape[:-1] + [4, 2]))
    a, c, e, g = quarters(even)
    b, d, f, h = quarters(odd)
    return (a, b, c, d, e, f, g, h)


@triton.jit
def gathered(source, at, KIND: tl.constexpr):
    """Elements of any alignment, byte by byte."""
    SIZE: tl.constexpr = KIND.primitive_bitwidth // 8
    UNSIGNED: tl.constexpr = tl.uint32 if SIZE == 4 else (tl.uint16 if SIZE == 2 else tl.uint8)
    source = source.to(tl.pointer_type(tl.uint8))
    value = tl.load(source + at * SIZE).to(UNSIGNED)
    for byte in tl.static_range(1, SIZE):
        value |= tl.load(source + (at * SIZE + byte)).to(UNSIGNED) << (8 * byte)
    return value.to(KIND, bitcast=True)


@triton.jit
def row_words(K, FORMAT: tl.constexpr):
    """The words of a row, such that the compiler sees what they are a multiple of."""
    if FORMAT.wide == 0:
        return K * FORMAT.bits // 32
    else:
        return K // 32 * FORMAT.bits


@triton.jit
def chunk_words(words, rows, chunks, K, FORMAT: tl.constexpr):
    """The words of chunks as a tuple of tiles [C, R], as many as a code has bits.

    Read byte by byte, a row whose last chunk is half a one is not read past its end.
    """
    BITS: tl.constexpr = FORMAT.bits
    pitch = row_words(K, FORMAT)
    rows, chunks = along(rows, 1, 2), along(chunks, 0, 2)
    at = rows * pitch + chunks * BITS
    parts = ()
    if FORMAT.wide == 4 and BITS % 4 == 0:
        for i in tl.static_range(BITS // 4):
            parts = parts + quarters(turned(tl.load(words + (at[:, :, None] + (4 * i + tl.arange(0, 4)))), 2))
    elif FORMAT.wide >= 2:
        for i in tl.static_range(BITS // 2):
            parts = parts + tl.split(turned(tl.load(words + (at[:, :, None] + (2 * i + tl.arange(0, 2)))), 2))
    elif FORMAT.wide == 1:
        for i in tl.static_range(BITS):
            parts = parts + (turned(tl.load(words + (at + i)), 2),)
    else:
        for i in tl.static_range(BITS):
            at = rows * pitch + tl.minimum(chunks * BITS + i, pitch - 1)
            parts = parts + (turned(gathered(words, at, tl.int32), 2),)
    return parts


@triton.jit
def code_bits(parts, J: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr):
    """Code J of a chunk moved to bit P of a word, among its neighbours."""
    START: tl.constexpr = J * BITS % 32
    word = parts[J * BITS // 32].to(tl.uint32, bitcast=True)
    if START <= P:
        moved = word << (P - START)
    else:
        moved = word >> (START - P)
    if START + BITS > 32:
        moved |= parts[J * BITS // 32 + 1].to(tl.uint32, bitcast=True) << (P + 32 - START)
    return moved


@triton.constexpr_function
def place(j, bits, precise):
    """The bit of the mantissa at which code j is read: the highest there is, or one that lets neighbours share a shift.

    Each bit further down costs a bit of accuracy in the sum; the lowest used costs about four, which bfloat16 and
    float16 results do not see.
    """
    shared = 1 if precise or bits == 8 else {1: 8, 2: 4}.get(bits, 2)
    return 23 - bits - bits * (shared - 1 - j % shared)


@triton.jit
def affine_value(parts, one, J: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr):
    """1 + q 2^(P - 23), in one instruction after the shift where `one`, the bits of 1.0, is not known when compiling.

    An instruction holds one constant; knowing both, the compiler would make two of it.
    """
    MASK: tl.constexpr = ((1 << BITS) - 1) << P
    return ((code_bits(parts, J, BITS, P) & MASK) | one).to(tl.float32, bitcast=True)


@triton.jit
def small_float_value(parts, J: tl.constexpr, BITS: tl.constexpr):
    """e2m1 times 2^-126, or e4m3 times 2^-120: the code's exponent and mantissa where a float32 has them."""
    MASK: tl.constexpr = -0x7E400000 if BITS == 4 else -0x78100000
    DOWN: tl.constexpr = 6 if BITS == 4 else 4
    top = code_bits(parts, J, BITS, 32 - BITS).to(tl.int32, bitcast=True)
    return ((top >> DOWN) & MASK).to(tl.float32, bitcast=True)


@triton.jit
def any_nan(parts, BITS: tl.constexpr):
    """Whether one of the e4m3 codes in these words is NaN: seven ones after the sign."""
    odd = parts[0] * 0
    for i in tl.static_range(BITS):
        odd |= (parts[i] & 0x7F7F7F7F) + 0x01010101
    return (odd & -0x7F7F7F80) != 0


@triton.jit
def e4m3_value(code):
    """Of codes uint8, as float32."""
    wide = code.to(tl.int32)
    value = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def power_value(code):
    """2^(code - 127) of codes uint8; 255 is infinite."""
    wide = code.to(tl.int32)
    return tl.where(wide == 0, 0x00400000, wide << 23).to(tl.float32, bitcast=True)
