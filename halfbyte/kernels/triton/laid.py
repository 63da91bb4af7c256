"""Tiles whose loads lie among threads as a kernel counts on, whichever release of Triton compiles it.

A load's threads are laid along the axis that lies whole in memory, then along the others: by Triton up to 3.6 from the
first to the last of these, since 3.7 from the last to the first. Kernels that multiply what their own loads brought
are written for the former, where one warp's threads are the first axes and its neighbours' the last. Where the latter
holds, they load their tiles with those axes the other way round and turn them back, which moves nothing; without that,
every product of a tensor core would fetch its operands through shared memory.
"""

import triton
import triton.language as tl

RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
BACKWARDS = tl.constexpr(RELEASE >= (3, 7))
# In which order the threads of a product take its inputs follows from how its operands were loaded: since 3.8 the left
# one, if the right one was taken apart since.
BY_LEFT = tl.constexpr(RELEASE >= (3, 8))


@triton.constexpr_function
def all_but(axis, axes, whole):
    """The axes that a vector does not have, in the order in which a tile is loaded."""
    own = axes - 1 - axis if BACKWARDS else axis
    return tuple(i for i in range(axes + whole) if i != own)


@triton.jit
def along(values, AXIS: tl.constexpr, AXES: tl.constexpr, WHOLE: tl.constexpr = 0):
    """A vector along one of a tile's AXES, which are followed by as many (0 or 1) that lie whole in memory."""
    return tl.expand_dims(values, all_but(AXIS, AXES, WHOLE))


@triton.jit
def turned(tile, AXES: tl.constexpr):
    """What was loaded where `along` says, its axes in the order of their numbers."""
    if not BACKWARDS:
        return tile
    elif AXES == 3:  # Triton 3.7 takes the order of axes as a list only
        return tl.permute(tile, [2, 1, 0] if len(tile.shape) == 3 else [2, 1, 0, 3])
    else:
        return tl.permute(tile, [1, 0] if len(tile.shape) == 2 else [1, 0, 2])


@triton.constexpr_function
def bits_of(power, kind):
    """A power of two from 1 on as a float of 16 bits, in both halves of a word."""
    exponent = power.bit_length() - 1
    return ((127 + exponent) << 7 if kind == tl.bfloat16 else (15 + exponent) << 10) * 0x00010001


@triton.jit
def all_of(POWER: tl.constexpr, words, TYPE: tl.constexpr):
    """A left operand [PARTS, R, 16] of a power of two, beside others that are made of words [PARTS, R, 4, 2].

    It takes its inputs in their order because it is made of them, as far as that is decided; what comes of them, a bit
    that is shifted away, is 0 to the compiler afterwards. Otherwise the right operand would have to move.
    """
    if BY_LEFT:
        both = ((words & 1) >> 1) | bits_of(POWER, TYPE)
        low = (both & 0xFFFF).to(tl.uint16).to(TYPE, bitcast=True)
        high = (both >> 16).to(tl.uint16).to(TYPE, bitcast=True)
        return tl.reshape(tl.join(low, high), [words.shape[0], words.shape[1], 16])
    else:
        return tl.full([words.shape[0], words.shape[1], 16], POWER, TYPE)
