"""Two- and four-bit matrices times a few rows of bfloat16 or float16, on tensor cores.

Few rows leave most of a tensor core idle, but one or two instructions decode two codes where float32 takes three for
each, and decoding is what these products wait for. Weights are the left operand [R, 16] of products over 16 codes:
eight words, of which each gives two codes, 16 bits apart, as a pair of 16-bit floats. The eight columns of the right
operand are not rows of activations but groups: a column has activations of one group and zeros elsewhere. So one tile
of sums [R, 8] keeps every group's sum apart, to be multiplied by its scale at the end of a span of eight groups.

The order of codes inside a product is free. It is chosen such that a thread uses what its own 16-byte loads brought,
and nothing moves between threads: four threads load one block of a row. The blocks of a span take the same right
operands, in which a column has its own group's activations whichever block that is in; each has sums of its own, of
which only the columns of its groups are kept. Where there are too few outputs to fill the chip, the warps of a program
take turns with the spans of its rows (PARTS).
"""

# ruff: noqa: RUF005, SIM300 - Triton knows no starred tuples

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .codes import e4m3_value, eighths, power_value, quarters
from .elementary import activated
from .jobs import job_of
from .laid import all_of, along, turned
from .stacks import matrix
from .stream import row_factors, squares_of, store_row, stream_rows

COLUMNS = tl.constexpr(8)


@triton.constexpr_function
def codes_loaded(bits):
    """Codes in the 16 bytes that a thread loads; four times as many are a block."""
    return 128 // bits


@triton.constexpr_function
def place_of(code, bits, kind):
    """The bit of a 16-bit float at which code `code` of half a word is read.

    In float16 the highest bits of the mantissa, so that little is lost when what the leading 1 adds is subtracted;
    bfloat16 results do not see it, and there codes stay where a word has them: of 2 bits, three share a shift.
    """
    if kind == tl.float16:
        return 10 - bits
    return bits * (code % 3) if bits == 2 else 0


@triton.constexpr_function
def power_of(code, bits, kind):
    """What activations are divided by for code `code`."""
    return 1 if kind == tl.float16 else 1 << place_of(code, bits, kind)


@triton.jit
def pairs(words, one, CODE: tl.constexpr, FORMAT: tl.constexpr, TYPE: tl.constexpr):
    """Code CODE of each half of the words, as numbers of a 16-bit float type along a new last axis.

    affine: 128 + q power_of(CODE) or, in float16, 1 + q / 2^bits. e2m1: its value times 2^-126 or 2^-14, its bits where
    the type has them: for bfloat16 one product moves both the sign and the rest there.
    """
    if FORMAT.mode == "affine":
        PLACE: tl.constexpr = place_of(CODE, FORMAT.bits, TYPE)
        DOWN: tl.constexpr = FORMAT.bits * CODE - PLACE
        moved = words >> DOWN if DOWN >= 0 else words << -DOWN
        both = (moved & (((1 << FORMAT.bits) - 1) * 0x00010001 << PLACE)) | one
    elif TYPE == tl.bfloat16:
        AT: tl.constexpr = 4 * (CODE % 2)
        both = (((words >> (4 * CODE - AT)) & (0x000F000F << AT)) * (0x1040 >> AT)) & 0x81C081C0
    else:
        UP: tl.constexpr = 9 - 4 * CODE
        moved = words << UP if UP > 0 else words >> -UP
        both = (moved & 0x0E000E00) | ((words << (12 - 4 * CODE)) & 0x80008000)
    low = (both & 0xFFFF).to(tl.uint16).to(TYPE, bitcast=True)
    return tl.join(low, (both >> 16).to(tl.uint16).to(TYPE, bitcast=True))


@triton.jit
def activations_of(x, start, K, FORMAT: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr):
    """What each thread loads of x for its column, eight at a time: tiles [thread, COLUMNS, PARTS, 8], or zeros."""
    LOADED: tl.constexpr = codes_loaded(FORMAT.bits)
    GROUPS: tl.constexpr = 4 * LOADED // FORMAT.group  # of a block
    thread, column = along(tl.arange(0, 4), 0, 3, 1), along(tl.arange(0, COLUMNS), 1, 3, 1)
    part = along(tl.arange(0, PARTS), 2, 3, 1)
    loaded = ()
    for i in tl.static_range(LOADED // 8):
        code = thread * LOADED + 8 * i  # of a block
        at = start + (part * BLOCKS + column // GROUPS) * (4 * LOADED) + code
        live = (code // FORMAT.group == column % GROUPS) & (column < BLOCKS * GROUPS) & (at < K)
        loaded = loaded + (turned(tl.load(x + (at + tl.arange(0, 8)), mask=live, other=0.0), 3),)
    return loaded


@triton.jit
def operands(loaded, FORMAT: tl.constexpr, PARTS: tl.constexpr):
    """Right operands [PARTS, 16, COLUMNS] of a span: for the first two words of a load the codes of half a word in
    order, then for the other two."""
    TYPE: tl.constexpr = loaded[0].dtype
    right = ()
    for half in tl.static_range(2):
        if FORMAT.bits == 4:
            both = tl.join(loaded[2 * half], loaded[2 * half + 1])
            both = tl.reshape(both, [4, COLUMNS, PARTS, 2, 4, 2])  # thread column part half code word
            tiles = quarters(tl.permute(both, [2, 0, 5, 3, 1, 4]))  # part thread word half column code
        else:
            front = tl.join(loaded[4 * half], loaded[4 * half + 2])
            both = tl.join(front, tl.join(loaded[4 * half + 1], loaded[4 * half + 3]))
            tiles = eighths(tl.permute(both, [2, 0, 4, 5, 1, 3]))  # from thread column part code word half
        for i in tl.static_range(16 // FORMAT.bits):
            tile = tl.reshape(tiles[i], [PARTS, 16, COLUMNS])
            if FORMAT.mode == "affine":
                if power_of(i, FORMAT.bits, TYPE) != 1:
                    tile *= tl.full([], 1.0 / power_of(i, FORMAT.bits, TYPE), TYPE)
            elif TYPE == tl.bfloat16:  # or products with tiny weights would be none
                tile *= tl.full([], 2.0**64, TYPE)
            right = right + (tile,)
    return right


@triton.jit
def add_to_sums(sums, right, words, CODE: tl.constexpr, FORMAT: tl.constexpr, TYPE: tl.constexpr):
    """[PARTS, R, COLUMNS], all rows the same: sums of each column's activations, and of what they were scaled to."""
    plain, scaled = sums
    scaled = tl.dot(all_of(1, words, TYPE), right, scaled)
    if power_of(1, FORMAT.bits, TYPE) == 1:
        plain = scaled
    else:
        plain = tl.dot(all_of(power_of(CODE, FORMAT.bits, TYPE), words, TYPE), right, plain)
    return plain, scaled


@triton.jit
def row_operands(
    x, x_row, ROWS, start, K, FORMAT: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr
):
    """The right operands of M rows; the last row again where there are fewer."""
    loaded, right = (), ()
    for m in tl.static_range(M):
        loaded = loaded + (activations_of(x + tl.minimum(m, ROWS - 1) * x_row, start, K, FORMAT, BLOCKS, PARTS),)
    tl.debug_barrier()  # as for the weights
    for m in tl.static_range(M):
        right = right + (operands(loaded[m], FORMAT, PARTS),)
    return right


@triton.jit
def row_sums(
    right, tiles, FORMAT: tl.constexpr, TYPE: tl.constexpr, M: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr
):
    """The sums of M rows, for affine codes. Of the tiles only how they lie among threads matters."""
    CODES: tl.constexpr = 16 // FORMAT.bits
    words, _ = halves_of_words(tiles, 0, R, PARTS)
    sums = ()
    for m in tl.static_range(M):
        some = zeros(2, PARTS, R)
        if FORMAT.mode == "affine":
            for i in tl.static_range(2 * CODES):
                some = add_to_sums(some, right[m][i], words, i % CODES, FORMAT, TYPE)
        sums = sums + (some,)
    return sums


@triton.jit
def span_of(
    w, up, first, start, N, K,
    FORMAT: tl.constexpr, GATED: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """A span of the rows from `first` on for each part, as it lies in memory: tiles of eight rows and what each of four
    threads loads of them. BLOCKS times R / 8 tiles of words, then as many of scales and of biases.

    GATED: one half of the rows is w's, the other up's. Past the end nothing is read, and words are undefined.
    """
    LOADED: tl.constexpr = codes_loaded(FORMAT.bits)
    GROUPS: tl.constexpr = 4 * LOADED * BLOCKS // FORMAT.group
    HALF: tl.constexpr = R // 16 if GATED else R // 8  # tiles of w's
    inside = (first < N).to(tl.int32)
    last = tl.cast(N - 1 - first, tl.int32)
    thread, eight = along(tl.arange(0, 4), 0, 3, 1), along(tl.arange(0, 8), 1, 3, 1)
    part = along(tl.arange(0, PARTS), 2, 3, 1)
    tiles = ()
    for block in tl.static_range(BLOCKS):
        load = start // LOADED + (part * BLOCKS + block) * 4 + thread
        for tile in tl.static_range(R // 8):
            words = (w if tile < HALF else up)[0] + first * (K // LOADED * 4)
            rows = tl.minimum(8 * (tile % HALF) + eight, last)
            at = rows * (K // LOADED * 4) + load * 4 + tl.arange(0, 4)
            tiles = tiles + (turned(tl.load(words + at, mask=load < inside * (K // LOADED)), 3),)
    pitch = K // (2 * FORMAT.group) * 2 if EVEN else K // FORMAT.group
    column = thread * 2 + tl.arange(0, 2)
    group = start // FORMAT.group + part * GROUPS + column
    has = (column < GROUPS) & (group < inside * pitch)
    for which in tl.static_range(1, 3 if FORMAT.mode == "affine" else 2):
        for tile in tl.static_range(R // 8):
            scales = (w if tile < HALF else up)[which] + first * pitch
            rows = tl.minimum(8 * (tile % HALF) + eight, last)
            tiles = tiles + (turned(tl.load(scales + (rows * pitch + group), mask=has, other=0.0), 3),)
    return tiles


@triton.jit
def rows_of(tiles, FIRST: tl.constexpr, R: tl.constexpr):
    """R / 8 tiles of a span from FIRST on, as one with their rows on a new last axis."""
    if R == 16:
        return tl.join(tiles[FIRST], tiles[FIRST + 1])
    else:
        front, back = tl.join(tiles[FIRST], tiles[FIRST + 2]), tl.join(tiles[FIRST + 1], tiles[FIRST + 3])
        return tl.reshape(tl.join(front, back), front.shape[:-1] + [4])


@triton.jit
def halves_of_words(tiles, FIRST: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr):
    """Of one block of a span: the first two words of every thread, and the other two [PARTS, R, thread, word]."""
    four = tl.reshape(rows_of(tiles, FIRST, R).to(tl.uint32, bitcast=True), [4, 8, PARTS, 2, 2, R // 8])
    front, back = tl.split(tl.permute(four, [2, 5, 1, 0, 4, 3]))
    return tl.reshape(front, [PARTS, R, 4, 2]), tl.reshape(back, [PARTS, R, 4, 2])


@triton.jit
def scales_of(tiles, FIRST: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr):
    return tl.reshape(tl.permute(rows_of(tiles, FIRST, R), [2, 4, 1, 0, 3]), [PARTS, R, COLUMNS])


@triton.jit
def zeros(COUNT: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([PARTS, R, COLUMNS], tl.float32),)
    return tiles


@triton.jit
def add_products(
    sums, row_sums, words, right, one, BLOCK: tl.constexpr, STEP: tl.constexpr, SUMS: tl.constexpr,
    FORMAT: tl.constexpr, TYPE: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Add the products of one STEP of a block to its sums and, with the first block, to the SUMS of activations."""
    CODES: tl.constexpr = 16 // FORMAT.bits
    more = ()
    for m in tl.static_range(M):
        if SUMS and BLOCK == 0 and FORMAT.mode == "affine":
            more = more + (add_to_sums(row_sums[m], right[m][STEP], words[0], STEP % CODES, FORMAT, TYPE),)
        else:
            more = more + (row_sums[m],)
    row_sums, more = more, ()
    pair = pairs(words[2 * BLOCK + STEP // CODES], one, STEP % CODES, FORMAT, TYPE)
    a = tl.reshape(pair, [pair.shape[0], pair.shape[1], 16])
    for other in tl.static_range(len(sums)):
        if other // M == BLOCK:
            more = more + (tl.dot(a, right[other % M][STEP], sums[other]),)
        else:
            more = more + (sums[other],)
    return more, row_sums


@triton.jit
def add_span(
    totals, tiles, right, row_sums, one,
    FORMAT: tl.constexpr, TYPE: tl.constexpr, M: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """M totals [PARTS, R, COLUMNS], and what a span adds to them. Where row_sums are not given, they are made here.

    SPREAD: blocks take turns, so that products need not wait for the one before, which takes more registers.
    """
    CODES: tl.constexpr = 16 // FORMAT.bits
    GROUPS: tl.constexpr = 4 * codes_loaded(FORMAT.bits) // FORMAT.group  # of a block
    words, sums = (), zeros(BLOCKS * M, PARTS, R)
    for block in tl.static_range(BLOCKS):
        words = words + halves_of_words(tiles, R // 8 * block, R, PARTS)
    given = row_sums
    if given is None:
        row_sums = ()
        for _ in tl.static_range(M):
            row_sums = row_sums + (zeros(2, PARTS, R),)
    for outer in tl.static_range(2 * CODES if SPREAD else BLOCKS):
        for inner in tl.static_range(BLOCKS if SPREAD else 2 * CODES):
            sums, row_sums = add_products(
                sums, row_sums, words, right, one, inner if SPREAD else outer, outer if SPREAD else inner,
                given is None, FORMAT, TYPE, M,
            )  # fmt: skip
    scale = scales_of(tiles, R // 8 * BLOCKS, R, PARTS)
    if FORMAT.mode == "affine":
        scale, bias = scale.to(tl.float32), scales_of(tiles, R // 8 * (BLOCKS + 1), R, PARTS).to(tl.float32)
    elif FORMAT.mode == "nvfp4":
        scale = e4m3_value(scale)
    else:
        scale = power_value(scale)
    column = tl.arange(0, COLUMNS)[None, None, :]
    more = ()
    for m in tl.static_range(M):
        kept = sums[m]
        for block in tl.static_range(1, BLOCKS):
            kept = tl.where(column // GROUPS == block, sums[block * M + m], kept)
        if FORMAT.mode == "affine":
            plain, scaled = row_sums[m]
            codes = kept - scaled * 128.0 if TYPE == tl.bfloat16 else (kept - scaled) * (1 << FORMAT.bits)
            kept = scale * codes + bias * plain
        else:
            kept = kept * (2.0**62 if TYPE == tl.bfloat16 else 2.0**14) * scale
        more = more + (totals[m] + kept,)
    return more


@triton.jit
def outputs_at(first, N, OUTPUTS: tl.constexpr):
    """A block of outputs; those past the end are the last one again."""
    return first + tl.minimum(tl.arange(0, OUTPUTS), tl.cast(N - 1 - first, tl.int32))


@triton.jit
def store_outputs(
    totals, y, y_row, first_row, ROWS, first, N, factor, up_factor, factors, stream, old,
    ACTIVATION: tl.constexpr, TYPE: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Totals of M rows times the factors of their matrix and of each row, activated or added to a stream."""
    OUTPUTS: tl.constexpr = R if ACTIVATION is None else R // 2
    at, inside = outputs_at(first, N, OUTPUTS), first + tl.arange(0, OUTPUTS) < N
    for m in tl.static_range(M):
        result = tl.sum(tl.sum(totals[m], 2), 0)
        if ACTIVATION is None:
            result *= factor * factors[m]
        else:
            gate, up = tl.split(tl.permute(tl.reshape(result, [2, R // 2]), [1, 0]))
            result = activated(gate * (factor * factors[m]), ACTIVATION, False) * (up * (up_factor * factors[m]))
        row = tl.minimum(m, ROWS - 1)
        store_row(y + row * y_row, result, stream, old, first_row + row, first // OUTPUTS, at, inside, m, M, TYPE)


@triton.jit
def nibbles_kernel(
    x, ids, choice, w, up, norm, stream, y, N, K, ROWS, x_row, x_head, y_row, y_head,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, M: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, SPREAD: tl.constexpr, SCHEDULE: tl.constexpr, EVEN: tl.constexpr, SQUARES: tl.constexpr,
    RULE: tl.constexpr, JOBS: tl.constexpr, OVERLAP: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[row, head] = w[head] x[row, head], or w[ids[row, head]]; with an ACTIVATION, activation(w x) . (up x).

    A program takes M rows of one head and R outputs, 16 or 32; half as many with an ACTIVATION. In SCHEDULE "once" all
    parts together are whole rows; so they are in "loop", where a program takes every so many blocks of outputs; in
    "pieces" rows are longer. EVEN promises that rows have an even number of groups. For `norm` and `stream` see
    stream.py.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    GATED: tl.constexpr = ACTIVATION is not None
    OUTPUTS: tl.constexpr = R // 2 if GATED else R
    SPANS: tl.constexpr = 4 * codes_loaded(FORMAT.bits) * BLOCKS * PARTS
    index, x, y, left = job_of(
        x, ids, choice, w, up, y, K, ROWS, x_row, x_head, y_row, y_head, FORMAT, ACTIVATION is not None, M, RULE, JOBS,
        OVERLAP, AHEAD, EARLY,
    )  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * OUTPUTS
    w = matrix(w, index, FORMAT)
    up = matrix(up, index, FORMAT) if GATED else w
    # The exponent under which codes are read; an instruction holds one constant only, and the mask is another.
    one = ((0x43004300 if TYPE == tl.bfloat16 else 0x3C003C00) + tl.minimum(N, 0)).to(tl.uint32)
    totals = zeros(M, PARTS, R)
    tiles = span_of(w, up, first, 0, N, K, FORMAT, GATED, R, BLOCKS, PARTS, EVEN)
    tl.debug_barrier()  # all is asked for before any is waited for; to spare registers, ptxas would not
    if OVERLAP:
        gdc_wait()
    row = ROWS - left
    squares = squares_of(norm, row, left, M, SQUARES)
    old = stream_rows(stream if SCHEDULE != "loop" else None, row, left, outputs_at(first, N, OUTPUTS), M)
    if SCHEDULE == "pieces":
        for start in range(0, K, SPANS):
            right = row_operands(x, x_row, left, start, K, FORMAT, M, BLOCKS, PARTS)
            totals = add_span(totals, tiles, right, None, one, FORMAT, TYPE, M, R, BLOCKS, PARTS, SPREAD)
            tiles = span_of(w, up, first, start + SPANS, N, K, FORMAT, GATED, R, BLOCKS, PARTS, EVEN)
            tl.debug_barrier()
        factors = row_factors(squares, norm, K, False, M)
        store_outputs(
            totals, y, y_row, row, left, first, N, w[3], up[3], factors, stream, old, ACTIVATION, TYPE, M, R
        )  # fmt: skip
    else:
        right = row_operands(x, x_row, left, 0, K, FORMAT, M, BLOCKS, PARTS)
        factors = row_factors(squares, norm, K, False, M)
        if SCHEDULE == "once":
            totals = add_span(totals, tiles, right, None, one, FORMAT, TYPE, M, R, BLOCKS, PARTS, SPREAD)
            store_outputs(
                totals, y, y_row, row, left, first, N, w[3], up[3], factors, stream, old, ACTIVATION, TYPE, M, R
            )  # fmt: skip
        else:
            sums = row_sums(right, tiles, FORMAT, TYPE, M, R, PARTS)
            for block in range(tl.program_id(0), tl.cdiv(N, OUTPUTS), tl.num_programs(0)):
                first = tl.cast(block, tl.int64) * OUTPUTS
                here = stream_rows(stream, row, left, outputs_at(first, N, OUTPUTS), M)
                more = add_span(totals, tiles, right, sums, one, FORMAT, TYPE, M, R, BLOCKS, PARTS, SPREAD)
                next = tl.cast(block + tl.num_programs(0), tl.int64) * OUTPUTS
                tiles = span_of(w, up, next, 0, N, K, FORMAT, GATED, R, BLOCKS, PARTS, EVEN)
                tl.debug_barrier()
                store_outputs(
                    more, y, y_row, row, left, first, N, w[3], up[3], factors, stream, here, ACTIVATION, TYPE, M, R
                )  # fmt: skip
