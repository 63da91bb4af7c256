"""Four-bit matrices times a few rows of bfloat16 or float16, on tensor cores.

Few rows leave most of a tensor core idle, but one or two instructions decode two codes where float32 takes three for
each, and decoding is what these products wait for. Weights are the left operand [R, 16] of products over 16 codes:
eight words, of which each gives codes i and i + 4, 16 bits apart, as a pair of 16-bit floats. The eight columns of the
right operand are not rows of activations but groups: a column has the activations of one group and zeros elsewhere. So
one tile of sums [R, 8] keeps every group's sum apart, to be multiplied by its scale at the end of a span of groups.

The order of codes inside a product is free. It is chosen such that a thread uses what its own 16-byte loads brought,
and nothing moves between threads. Where there are too few outputs to fill the chip, the warps of a program take turns
with the spans of its rows (PARTS).
"""

# ruff: noqa: RUF005, SIM300 - Triton knows no starred tuples

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .codes import e4m3_value, power_value
from .elementary import activated
from .stacks import matrix

COLUMNS = tl.constexpr(8)
BLOCK = tl.constexpr(128)  # codes of a row that four threads load with one instruction


@triton.jit
def pairs(words, one, CODE: tl.constexpr, MODE: tl.constexpr, TYPE: tl.constexpr):
    """Codes CODE and CODE + 4 of words, as numbers of a 16-bit float type along a new last axis.

    affine: 128 + q or, in float16, 1024 + q. e2m1: its value times 2^-126 or 2^-14, its bits where the type has them.
    """
    if MODE == "affine":
        both = ((words >> (4 * CODE)) & 0x000F000F) | one
    else:
        AT: tl.constexpr = (6 if TYPE == tl.bfloat16 else 9) - 4 * CODE
        moved = words << AT if AT > 0 else words >> -AT
        sign = (words << (12 - 4 * CODE)) & 0x80008000
        both = (moved & (0x01C001C0 if TYPE == tl.bfloat16 else 0x0E000E00)) | sign
    low = (both & 0xFFFF).to(tl.uint16).to(TYPE, bitcast=True)
    return tl.join(low, (both >> 16).to(tl.uint16).to(TYPE, bitcast=True))


@triton.jit
def operands(x, at, live, PARTS: tl.constexpr, MODE: tl.constexpr):
    """Right operands [PARTS, 16, COLUMNS] for CODE = 0 to 3, of the 16 activations from `at` [4, 1, PARTS, 1] on.

    live [4, COLUMNS, PARTS, 1] says which column an activation belongs to.
    """
    eight = tl.arange(0, 8)[None, None, None, :] + tl.zeros([1, COLUMNS, 1, 1], tl.int32)
    first = tl.load(x + (at + eight), mask=live, other=0.0)
    second = tl.load(x + (at + 8 + eight), mask=live, other=0.0)
    if MODE != "affine" and x.dtype.element_ty == tl.bfloat16:  # or products with tiny weights would be none
        first *= tl.full([], 2.0**64, tl.bfloat16)
        second *= tl.full([], 2.0**64, tl.bfloat16)
    both = tl.reshape(tl.join(first, second), [4, COLUMNS, PARTS, 2, 2, 2, 2])  # thread column part code-4-2-1 word
    even, odd = tl.split(tl.permute(both, [2, 0, 6, 3, 1, 4, 5]))  # part thread word code-4 column code-2-1
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return (
        tl.reshape(x0, [PARTS, 16, COLUMNS]), tl.reshape(x1, [PARTS, 16, COLUMNS]),
        tl.reshape(x2, [PARTS, 16, COLUMNS]), tl.reshape(x3, [PARTS, 16, COLUMNS]),
    )  # fmt: skip


@triton.jit
def span_of(w, start, last, K, FORMAT: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr):
    """A span of R rows for each part, as it lies in memory: R / 8 times BLOCKS tiles of words, then scales and biases.

    Past the end of the rows nothing is read, and words are undefined.
    """
    words, scales, biases, _ = w
    GROUP: tl.constexpr = FORMAT.group
    GROUPS: tl.constexpr = BLOCK * BLOCKS // GROUP  # of a span
    loaded = ()
    for block in tl.static_range(BLOCKS):
        quad = start // 32 + 4 * block + tl.arange(0, 4)[:, None, None, None]
        quad += tl.arange(0, PARTS)[None, None, :, None] * (BLOCK * BLOCKS // 32)
        for eighth in tl.static_range(R // 8):
            rows = tl.minimum(8 * eighth + tl.arange(0, 8), last)[None, :, None, None]
            at = quad * 4 + rows * (K // 32 * 4) + tl.arange(0, 4)[None, None, None, :]
            loaded = loaded + (tl.load(words + at, mask=quad < K // 32),)
    rows, column = tl.minimum(tl.arange(0, R), last)[None, :, None], tl.arange(0, COLUMNS)[None, None, :]
    group = start // GROUP + tl.arange(0, PARTS)[:, None, None] * GROUPS + column
    inside = (column < GROUPS) & (group < K // GROUP)
    scale = tl.load(scales + (rows * (K // GROUP) + group), mask=inside, other=0.0)
    bias = scale
    if FORMAT.mode == "affine":
        bias = tl.load(biases + (rows * (K // GROUP) + group), mask=inside, other=0.0)
    return loaded + (scale, bias)


@triton.jit
def spans_of(
    matrices, start, last, K,
    FORMAT: tl.constexpr, MATRICES: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    spans = ()
    for u in tl.static_range(MATRICES):
        spans = spans + (span_of(matrices[u], start, last, K, FORMAT, R, BLOCKS, PARTS),)
    return spans


@triton.jit
def halves_of_words(span, BLOCK_OF: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr):
    """Of one block of a span: the first two words of every thread, and the other two [PARTS, R, thread, word]."""
    four = tl.join(span[R // 8 * BLOCK_OF], span[R // 8 * BLOCK_OF + 1])
    if R == 32:
        four = tl.join(
            tl.join(span[4 * BLOCK_OF], span[4 * BLOCK_OF + 2]), tl.join(span[4 * BLOCK_OF + 1], span[4 * BLOCK_OF + 3])
        )
    four = tl.reshape(four.to(tl.uint32, bitcast=True), [4, 8, PARTS, 2, 2, R // 8])
    front, back = tl.split(tl.permute(four, [2, 5, 1, 0, 4, 3]))
    return tl.reshape(front, [PARTS, R, 4, 2]), tl.reshape(back, [PARTS, R, 4, 2])


@triton.jit
def plain_sums(x, start, K, GROUP: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """The sum of the activations of each group of a span, [PARTS, 1, COLUMNS]."""
    code = tl.arange(0, COLUMNS)[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    at = start + tl.arange(0, PARTS)[:, None, None] * SPAN + code
    values = tl.load(x + at, mask=(code < SPAN) & (at < K), other=0.0)
    return tl.sum(values.to(tl.float32), 2)[:, None, :]


@triton.jit
def rows_from(matrix, first, K, GROUP: tl.constexpr):
    words, scales, biases, factor = matrix
    return words + first * (K // 32 * 4), scales + first * (K // GROUP), biases + first * (K // GROUP), factor


@triton.jit
def zeros(COUNT: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([PARTS, R, COLUMNS], tl.float32),)
    return tiles


@triton.jit
def add_spans(
    totals, spans, x, x_row, ROWS, one, start, K,
    FORMAT: tl.constexpr, MATRICES: tl.constexpr, M: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """totals [PARTS, R, COLUMNS], M for each matrix, and what its span adds to them."""
    TYPE: tl.constexpr = x.dtype.element_ty
    MODE: tl.constexpr = FORMAT.mode
    GROUP: tl.constexpr = FORMAT.group
    SPAN: tl.constexpr = BLOCK * BLOCKS
    sums = zeros(MATRICES * M, PARTS, R)
    for block in tl.static_range(BLOCKS):
        words = ()
        for u in tl.static_range(MATRICES):
            words = words + halves_of_words(spans[u], block, R, PARTS)
        for half in tl.static_range(2):
            code = (4 * block + tl.arange(0, 4)[:, None, None, None]) * 32 + 16 * half
            at = start + tl.arange(0, PARTS)[None, None, :, None] * SPAN + code
            live = (code // GROUP == tl.arange(0, COLUMNS)[None, :, None, None]) & (at < K)
            right = ()
            for m in tl.static_range(M):
                right = right + operands(x + tl.minimum(m, ROWS - 1) * x_row, at, live, PARTS, MODE)
            for i in tl.static_range(4):
                more = ()
                for u in tl.static_range(MATRICES):
                    a = tl.reshape(pairs(words[2 * u + half], one, i, MODE, TYPE), [PARTS, R, 16])
                    for m in tl.static_range(M):
                        more = more + (tl.dot(a, right[4 * m + i], sums[u * M + m]),)
                sums = more
    more = ()
    for u in tl.static_range(MATRICES):
        scale = spans[u][R // 8 * BLOCKS]
        if MODE == "affine":
            scale, bias = scale.to(tl.float32), spans[u][R // 8 * BLOCKS + 1].to(tl.float32)
            for m in tl.static_range(M):
                plain = plain_sums(x + tl.minimum(m, ROWS - 1) * x_row, start, K, GROUP, SPAN, PARTS)
                codes = sums[u * M + m] - plain * (128.0 if TYPE == tl.bfloat16 else 1024.0)
                more = more + (totals[u * M + m] + (scale * codes + bias * plain),)
        else:
            step = e4m3_value(scale) if MODE == "nvfp4" else power_value(scale)
            for m in tl.static_range(M):
                value = sums[u * M + m] * (2.0**62 if TYPE == tl.bfloat16 else 2.0**14)
                more = more + (totals[u * M + m] + value * step,)
    return more


@triton.jit
def nibbles_kernel(
    x, ids, w, up, y, N, K, ROWS, HEADS, x_row, x_head, y_row, y_head,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, M: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[row, head] = w[head] x[row, head], or w[ids[row, head]]; with an ACTIVATION, activation(w x) . (up x).

    A program takes M rows of one head and R outputs, 16 or 32. ONCE promises that all parts together are whole rows.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    GROUP: tl.constexpr = FORMAT.group
    SPAN: tl.constexpr = BLOCK * BLOCKS
    MATRICES: tl.constexpr = 1 if ACTIVATION is None else 2
    head = tl.program_id(1) % HEADS
    row = (tl.program_id(1) // HEADS).to(tl.int64) * M
    index = head.to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        if ids is not None:
            gdc_wait()  # ids may be as new as x; only weights are older than every kernel in flight
    if ids is not None:
        index = tl.load(ids + row * HEADS + head).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * R
    last = tl.cast(N - 1 - first, tl.int32)
    matrices = (rows_from(matrix(w, index, FORMAT), first, K, GROUP),)
    if ACTIVATION is not None:
        matrices = matrices + (rows_from(matrix(up, index, FORMAT), first, K, GROUP),)
    x += row * x_row + head.to(tl.int64) * x_head
    y += row * y_row + head.to(tl.int64) * y_head
    left = ROWS - row
    # The exponent under which codes are read; an instruction holds one constant only, and the mask is another.
    one = ((0x43004300 if TYPE == tl.bfloat16 else 0x64006400) + tl.minimum(N, 0)).to(tl.uint32)
    totals = zeros(MATRICES * M, PARTS, R)
    if ONCE:
        spans = spans_of(matrices, 0, last, K, FORMAT, MATRICES, R, BLOCKS, PARTS)
        tl.debug_barrier()  # all is asked for before any is waited for; to spare registers, ptxas would not
        if OVERLAP:
            gdc_wait()
        totals = add_spans(totals, spans, x, x_row, left, one, 0, K, FORMAT, MATRICES, M, R, BLOCKS, PARTS)
    else:
        if OVERLAP:
            gdc_wait()
        for start in range(0, K, SPAN * PARTS):
            spans = spans_of(matrices, start, last, K, FORMAT, MATRICES, R, BLOCKS, PARTS)
            tl.debug_barrier()
            totals = add_spans(totals, spans, x, x_row, left, one, start, K, FORMAT, MATRICES, M, R, BLOCKS, PARTS)
    rows = tl.minimum(tl.arange(0, R), last)
    for m in tl.static_range(M):
        result = tl.sum(tl.sum(totals[m], 2), 0) * matrices[0][3]
        if ACTIVATION is not None:
            result = activated(result, ACTIVATION, False) * (tl.sum(tl.sum(totals[M + m], 2), 0) * matrices[1][3])
        tl.store(y + tl.minimum(m, left - 1) * y_row + (first + rows), result)
