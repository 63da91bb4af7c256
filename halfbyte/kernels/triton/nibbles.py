"""Four-bit matrices times one to a few rows of bfloat16 or float16, on tensor cores.

One row leaves most of a tensor core idle, but two codes are decoded by one or two instructions where float32 takes
three for each, and decoding is what these products wait for. The weights are the left operand [R, 16] of a product of
16 codes: eight words, of which each gives codes i and i + 4, 16 bits apart, as one pair of 16-bit floats. The
columns of the right operand are not rows of activations but groups: a column has the activations of its own group
and zeros elsewhere, so one tile of sums [R, 8] has every group's sum apart, to be multiplied by its scale afterwards.

The order of codes inside a product is free. It is chosen such that a thread uses what its 16-byte loads brought, and
that the compiler moves nothing between threads.
"""

import triton
import triton.language as tl

from .codes import e4m3_value, power_value

COLUMNS = tl.constexpr(8)
BLOCK = tl.constexpr(128)  # codes of four threads with four words each


@triton.jit
def pairs(words, one, I: tl.constexpr, MODE: tl.constexpr, TYPE: tl.constexpr):
    """Codes I and I + 4 of words, as numbers of a 16-bit float type along a new last axis.

    affine: 128 + q or, in float16, 1024 + q. e2m1: its value times 2^-126 or 2^-14, its bits where the type has them.
    """
    if MODE == "affine":
        both = ((words >> (4 * I)) & 0x000F000F) | one
    else:
        AT: tl.constexpr = (6 if TYPE == tl.bfloat16 else 9) - 4 * I
        moved = words << AT if AT > 0 else words >> -AT
        both = (moved & (0x01C001C0 if TYPE == tl.bfloat16 else 0x0E000E00)) | ((words << (12 - 4 * I)) & 0x80008000)
    low = (both & 0xFFFF).to(tl.uint16).to(TYPE, bitcast=True)
    return tl.join(low, (both >> 16).to(tl.uint16).to(TYPE, bitcast=True))


@triton.jit
def operands(x, at, live, S: tl.constexpr, MODE: tl.constexpr):
    """Right operands, for I = 0 to 3, of the 16 activations from `at` [4, 1, S, 1] on: [S, 16, COLUMNS], zero where not
    live [4, COLUMNS, S, 1]."""
    eight = tl.arange(0, 8)[None, None, None, :] + tl.zeros([1, COLUMNS, 1, 1], tl.int32)
    first = tl.load(x + (at + eight), mask=live, other=0.0)
    second = tl.load(x + (at + 8 + eight), mask=live, other=0.0)
    if MODE != "affine" and x.dtype.element_ty == tl.bfloat16:
        first *= tl.full([], 2.0**64, tl.bfloat16)  # or their products with tiny weights would be none
        second *= tl.full([], 2.0**64, tl.bfloat16)
    both = tl.reshape(tl.join(first, second), [4, COLUMNS, S, 2, 2, 2, 2])  # thread, column, S, codes 4 2 1, word
    even, odd = tl.split(tl.permute(both, [2, 0, 6, 3, 1, 4, 5]))  # S, thread, word, code 4, column, codes 2 1
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return (
        tl.reshape(x0, [S, 16, COLUMNS]), tl.reshape(x1, [S, 16, COLUMNS]),
        tl.reshape(x2, [S, 16, COLUMNS]), tl.reshape(x3, [S, 16, COLUMNS]),
    )  # fmt: skip


@triton.jit
def nibbles_kernel(
    x, ids, w, y, N, K, COUNT, ROWS, HEADS, x_row, x_head, y_row, y_head,
    GROUP: tl.constexpr, MODE: tl.constexpr, M: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr,
    EARLY: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = x.dtype.element_ty
    SPAN: tl.constexpr = BLOCK * BLOCKS  # codes whose groups are the columns of one tile of sums
    J: tl.constexpr = R // 8
    words, scales, biases, global_scale, word_step, scale_step, global_step = w
    head = tl.program_id(1) % HEADS
    row = (tl.program_id(1) // HEADS).to(tl.int64) * M
    index = head.to(tl.int64)
    if ids is not None:
        index = tl.load(ids + row * HEADS + head).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * R
    last = tl.cast(N - 1 - first, tl.int32)
    rows = tl.minimum(tl.arange(0, R), last)
    words += index * word_step + first * (K // 32 * 4)
    scales += index * scale_step + first * (K // GROUP)
    if MODE == "affine":
        biases += index * scale_step + first * (K // GROUP)
    x += row * x_row + head.to(tl.int64) * x_head
    y += row * y_row + head.to(tl.int64) * y_head
    left = ROWS - row
    # Not known when compiling: an instruction that masks and sets bits holds one constant only.
    one = ((0x43004300 if TYPE == tl.bfloat16 else 0x64006400) + tl.minimum(N, 0)).to(tl.uint32)
    thread, column = tl.arange(0, 4)[:, None, None, None], tl.arange(0, COLUMNS)
    part = tl.arange(0, S)[None, None, :, None]
    total = ()
    for _ in tl.static_range(M):
        total = total + (tl.zeros([S, R, COLUMNS], tl.float32),)
    for start in range(0, K, SPAN * S):
        sums = ()
        for _ in tl.static_range(M):
            sums = sums + (tl.zeros([S, R, COLUMNS], tl.float32),)
        fours = ()
        for block in tl.static_range(BLOCKS):
            quad = start // 32 + part * (SPAN // 32) + (4 * block + thread)
            for j in tl.static_range(J):
                eight = tl.minimum(8 * j + tl.arange(0, 8), last)[None, :, None, None]
                at = tl.minimum(quad, K // 32 - 1) * 4 + eight * (K // 32 * 4) + tl.arange(0, 4)[None, None, None, :]
                fours = fours + (tl.load(words + at),)
        group = (start // GROUP) + (tl.arange(0, S) * (SPAN // GROUP))[:, None] + column[None, :]
        inside = ((column < SPAN // GROUP)[None, :] & (group < K // GROUP))[:, None, :]
        at = rows[None, :, None] * (K // GROUP) + group[:, None, :]
        scale = tl.load(scales + at, mask=inside, other=0.0)
        if MODE == "affine":
            bias = tl.load(biases + at, mask=inside, other=0.0)
        if EARLY:
            tl.debug_barrier()
        for block in tl.static_range(BLOCKS):
            if J == 2:
                four = tl.join(fours[2 * block], fours[2 * block + 1])  # t 8 S 4 j
            else:
                four = tl.join(tl.join(fours[4 * block], fours[4 * block + 2]), tl.join(fours[4 * block + 1], fours[4 * block + 3])) # t 8 S 4 j1 j0
            four = tl.reshape(four.to(tl.uint32, bitcast=True), [4, 8, S, 2, 2, J])
            front, back = tl.split(tl.permute(four, [2, 5, 1, 0, 4, 3]))  # S J 8 t b0 | b1
            front, back = tl.reshape(front, [S, R, 4, 2]), tl.reshape(back, [S, R, 4, 2])
            for half in tl.static_range(2):
                code = (4 * block + thread) * 32 + 16 * half
                k = start + part * SPAN + code
                live = (code // GROUP == column[None, :, None, None]) & (k < K)
                right = ()
                for m in tl.static_range(M):
                    right = right + operands(x + tl.minimum(m, left - 1) * x_row, k, live, S, MODE)
                for i in tl.static_range(4):
                    a = tl.reshape(pairs(back if half else front, one, i, MODE, TYPE), [S, R, 16])
                    more = ()
                    for m in tl.static_range(M):
                        more = more + (tl.dot(a, right[4 * m + i], sums[m]),)
                    sums = more
        more = ()
        if MODE == "affine":
            code = column[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            code, lives = code + (tl.arange(0, S) * SPAN)[:, None, None], (code < SPAN)[None, :, :]
            for m in tl.static_range(M):
                values = tl.load(x + tl.minimum(m, left - 1) * x_row + (start + code), mask=lives & (start + code < K), other=0.0)
                plain = tl.sum(values.to(tl.float32), 2)[:, None, :]
                without = sums[m] - plain * (128.0 if TYPE == tl.bfloat16 else 1024.0)
                more = more + (total[m] + (scale.to(tl.float32) * without + bias.to(tl.float32) * plain),)
        else:
            step = e4m3_value(scale) if MODE == "nvfp4" else power_value(scale)
            for m in tl.static_range(M):
                more = more + (total[m] + sums[m] * (2.0**62 if TYPE == tl.bfloat16 else 2.0**14) * step,)
        total = more
    factor = tl.full((), 1.0, tl.float32)
    if global_scale is not None:
        factor = tl.load(global_scale + index * global_step) / 2688.0
    for m in tl.static_range(M):
        tl.store(y + tl.minimum(m, left - 1) * y_row + (first + rows), tl.sum(tl.sum(total[m], 2), 0) * factor)
