"""Elementary functions of float32 values in registers: exponentials, activations, cos and sin, rounding.

PRECISE is for float32 results; 16-bit ones round away what the quick exponential loses.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import device

INTERPRETED = tl.constexpr(device.INTERPRETED)
ACTIVATIONS = {"silu": tl.constexpr(0), "gelu_tanh": tl.constexpr(1), "sigmoid": tl.constexpr(2)}


@triton.jit
def begin_early(OVERLAP: tl.constexpr):
    """How a kernel launched with device.overlap begins that needs the one before it whole; then the next may start.

    2026-11-15, H200, a step of Qwen3.5-35B-A3B in a graph, fused: 1845 us without overlap, 1640 us when the next is let
    start before the wait, 1501 us so.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """float32 to dtype, to nearest; Triton's interpreter would truncate to bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        value = tl.where(value == value, nearest, bits).to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def precise_exp(x):
    """e^x to the last place or two, as 2^whole e^rest: the product with log2(e) alone would lose what |x| is long."""
    x = tl.where(x < -104.0, -104.0, tl.where(x > 89.0, 89.0, x))
    whole = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - whole * 0.693359375) + whole * 2.12194440e-4
    return tl.exp2(rest * 1.4426950408889634) * tl.exp2(whole)


@triton.jit
def exp(x, PRECISE: tl.constexpr):
    return precise_exp(x) if PRECISE else tl.exp(x)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """1 - 2 / (1 + e^2x), and near 0, where that would cancel, a polynomial: that of Cephes' tanhf, or a short one."""
    square = x * x
    if PRECISE:
        near = -5.70498872745e-3 * square + 2.06390887954e-2
        near = near * square - 5.37397155531e-2
        near = near * square + 1.33314422036e-1
        near = near * square - 3.33332819422e-1
        return tl.where(square < 0.390625, near * square * x + x, 1.0 - 2.0 / (1.0 + precise_exp(2.0 * x)))
    else:
        near = 0.13333333 * square - 0.33333333
        return tl.where(square < 0.04, near * square * x + x, 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr):
    """silu, gelu_tanh or sigmoid of float32 x; gelu's (1 + tanh u) / 2 is 1 / (1 + e^-2u)."""
    if ACTIVATION == 0:
        return x / (1.0 + exp(-x, PRECISE))
    elif ACTIVATION == 1:
        return x / (1.0 + exp(-1.5957691216057308 * (x + 0.044715 * x * x * x), PRECISE))
    else:
        return 1.0 / (1.0 + exp(-x, PRECISE))


@triton.jit
def cos_sin(turns):
    """cos and sin of `turns` (float64) quarter turns: reduced in float64 to an eighth of a turn about the nearest
    quarter, then Cephes' float32 polynomials, good to the last place there."""
    quarter = tl.floor(turns + 0.5)
    r = ((turns - quarter) * 1.5707963267948966).to(tl.float32)
    quadrant = (quarter - 4.0 * tl.floor(quarter * 0.25)).to(tl.int32)
    z = r * r
    sin = r + r * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    cos = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    odd = quadrant % 2 == 1
    c, s = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where((quadrant == 1) | (quadrant == 2), -c, c), tl.where(quadrant >= 2, -s, s)
