"""Four-bit matrices times rows of bfloat16 or float16, eight at a time, on tensor cores: batches of a few streams.

As in nibbles.py weights are the left operand [16, 16] of products over 16 codes, and the order of codes inside a
product is chosen such that a thread uses what its own loads brought: here eight bytes, so that four threads hold a
group of 64 codes of a row. The eight columns of the right operand are rows of activations, any of them: neighbours, or
the rows of the tokens that chose one expert. A group's sum is multiplied by its scale at once. What the leading 1 of
each code adds, and the bias, are multiples of the activations' sum, which a product with ones gives.

A program keeps its activations in registers and walks over pieces of 16 rows of weights, of which the next is on its
way while the last is being added up. Its warps share the inputs (PARTS), and their sums are added at the end of a
piece, always in the same order: a row's bits depend neither on how many others there are nor on which. Nothing is
prepared before, and nothing joined after.
"""

# ruff: noqa: RUF005, SIM300 - Triton knows no starred tuples

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .codes import quarters
from .device import INTERPRETED, facts, overlap
from .elementary import ACTIVATIONS, activated, begin_early
from .laid import all_of, along, turned
from .nibbles import pairs
from .stacks import prefetch, stack

COLUMNS, ROWS = tl.constexpr(8), tl.constexpr(16)  # of a tile of sums
GROUP = 64  # codes of a group; a block, what four threads load of a row, is one
RECORD = tl.constexpr(16)  # numbers of a tile of pairs: its expert, how many pairs it has; from the middle on, which


@triton.jit
def weights_of(
    w, up, start, first, inside, N,
    GATED: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What a program reads of the rows from `first` on of the matrix whose words begin at `start`: tiles of words, then
    of pairs of scales, then of biases.

    GATED: eight rows are w's, the other eight up's. `inside` is 1, or 0: then nothing is read. EVEN promises that
    neither the rows nor the columns of a program reach past the matrix.
    """
    start += first * (K // 8)
    thread, eight = along(tl.arange(0, 4), 0, 3, 1), along(tl.arange(0, 8), 1, 3, 1)
    part = along(tl.arange(0, PARTS), 2, 3, 1)
    at = (part * (4 * BLOCKS) + thread) * 2
    tiles = ()
    for block in tl.static_range(BLOCKS):
        has = 0 * at < inside if EVEN else at + 8 * block < inside * (K // 8)
        for tile in tl.static_range(2):
            row = eight if GATED else eight + 8 * tile
            row = row if EVEN else tl.minimum(row, (N - 1 - first).to(tl.int32))
            words = (up if GATED and tile == 1 else w)[0] + start
            place = row * (K // 8) + at + tl.arange(0, 2)
            tiles = tiles + (turned(tl.load(words + place + 8 * block, mask=has, other=0), 3),)
    for which in tl.static_range(1, 3):
        if EVEN and BLOCKS == 8 and K % 512 == 0:  # all pairs of a row in one load
            at = part * 4 + 0 * thread + tl.arange(0, 4)
            both = ()
            for tile in tl.static_range(2):
                row = eight if GATED else eight + 8 * tile
                values = (up if GATED and tile == 1 else w)[which].to(tl.pointer_type(tl.uint32))
                values += tl.multiple_of(start // 16, 4)
                loaded = tl.load(values + (row * (K // 128) + at), mask=0 * at < inside, other=0)
                both = both + (quarters(turned(loaded, 3)),)
            for pair in tl.static_range(4):
                tiles = tiles + (both[0][pair], both[1][pair])
        else:
            at = along(tl.arange(0, PARTS), 2, 3) * (BLOCKS // 2) + 0 * along(tl.arange(0, 4), 0, 3)
            for pair in tl.static_range(BLOCKS // 2):
                has = 0 * at < inside if EVEN else at + pair < inside * (K // 128)
                for tile in tl.static_range(2):
                    row = along(tl.arange(0, 8), 1, 3) + (0 if GATED else 8 * tile)
                    row = row if EVEN else tl.minimum(row, (N - 1 - first).to(tl.int32))
                    values = (up if GATED and tile == 1 else w)[which].to(tl.pointer_type(tl.uint32)) + start // 16
                    loaded = tl.load(values + (row * (K // 128) + at) + pair, mask=has, other=0)
                    tiles = tiles + (turned(loaded, 3),)
    return tiles


@triton.jit
def left_words(tiles, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The words of a block [PARTS, ROWS, thread, word]."""
    rows = tl.join(tiles[2 * BLOCK], tiles[2 * BLOCK + 1]).to(tl.uint32, bitcast=True)
    return tl.reshape(tl.permute(rows, [2, 4, 1, 0, 3]), [PARTS, ROWS, 4, 2])


@triton.jit
def group_values(tiles, FIRST: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PARTS: tl.constexpr):
    """The scales or biases of a block's group, float32 [PARTS, ROWS, COLUMNS], each in every column."""
    rows = tl.join(tiles[FIRST + BLOCK // 2 * 2], tiles[FIRST + BLOCK // 2 * 2 + 1])
    if FORMAT.kind == tl.bfloat16:
        value = (rows & 0xFFFF0000 if BLOCK % 2 else rows << 16).to(tl.float32, bitcast=True)
    else:
        value = (rows >> (16 * (BLOCK % 2))).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    twice = tl.join(value, value)  # [thread, eight, part, tile, 2]
    return tl.reshape(tl.permute(twice, [2, 3, 1, 0, 4]), [PARTS, ROWS, COLUMNS])


@triton.jit
def right_operands(x, has, K: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr):
    """For each block four tiles [PARTS, 16, COLUMNS]: for each code of half a word, its activations.

    x, has [COLUMNS]: where each column's row begins, and whether there is one.
    """
    has = along(has, 1, 3, 1)
    at = along(tl.arange(0, PARTS), 2, 3, 1) * (64 * BLOCKS) + along(tl.arange(0, 4), 0, 3, 1) * 16
    x = along(x, 1, 3, 1) + (at + tl.arange(0, 8))
    loaded, right = (), ()
    for block in tl.static_range(BLOCKS):
        inside = has if K == BLOCKS * PARTS * 64 else has & (at + 64 * block < K)
        for eight in tl.static_range(2):
            loaded = loaded + (turned(tl.load(x + (64 * block + 8 * eight), mask=inside, other=0.0), 3),)
    for block in tl.static_range(BLOCKS):
        both = tl.join(loaded[2 * block], loaded[2 * block + 1])
        both = tl.reshape(both, [4, COLUMNS, PARTS, 2, 4, 2])  # thread column part half code word
        tiles = quarters(tl.permute(both, [2, 0, 5, 3, 1, 4]))  # part thread word half column code
        for code in tl.static_range(4):
            right = right + (tl.reshape(tiles[code], [PARTS, 16, COLUMNS]),)
    return right


@triton.jit
def group_sums(right, tiles, TYPE: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr):
    """The sums of each group of activations [PARTS, ROWS / 2, COLUMNS], all rows the same. Of the tiles only how they
    lie among threads matters."""
    words = left_words(tiles, 0, PARTS)
    sums = ()
    for block in tl.static_range(BLOCKS):
        plain = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
        for code in tl.static_range(4):
            plain = tl.dot(all_of(1, words, TYPE), right[4 * block + code], plain)
        front, _ = tl.split(tl.permute(tl.reshape(plain, [PARTS, 2, ROWS // 2, COLUMNS]), [0, 2, 3, 1]))
        sums = sums + (front,)
    return sums


@triton.jit
def products(
    tiles, right, sums, one, FORMAT: tl.constexpr, TYPE: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr
):
    """float32 [PARTS, ROWS, COLUMNS]: a piece of the weights times the activations."""
    total = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    for block in tl.static_range(BLOCKS):
        words = left_words(tiles, block, PARTS)
        codes = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
        for code in tl.static_range(4):
            a = tl.reshape(pairs(words, one, code, FORMAT, TYPE), [PARTS, ROWS, 16])
            codes = tl.dot(a, right[4 * block + code], codes)
        plain = tl.permute(tl.join(sums[block], sums[block]), [0, 3, 1, 2])
        plain = tl.reshape(plain, [PARTS, ROWS, COLUMNS])
        scale = group_values(tiles, 2 * BLOCKS, block, FORMAT, PARTS)
        bias = group_values(tiles, 3 * BLOCKS, block, FORMAT, PARTS)
        if TYPE == tl.bfloat16:  # codes are 128 + q
            total += scale * codes + (bias - 128.0 * scale) * plain
        else:  # 1 + q / 16
            total += (16.0 * scale) * (codes - plain) + bias * plain
    return total


@triton.jit
def put(total, y, has, first, N, ACTIVATION: tl.constexpr, EVEN: tl.constexpr):
    """Results of the rows from `first` on; y, has [1, COLUMNS]: where each column's go, and whether there are any."""
    sums = tl.sum(total, 0)
    if ACTIVATION is not None:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [2, ROWS // 2, COLUMNS]), [1, 2, 0]))
        sums = activated(gate, ACTIVATION, False) * up
    rows = first + tl.arange(0, sums.shape[0])[:, None]
    tl.store(y + rows, sums.to(y.dtype.element_ty), mask=has if EVEN else has & (rows < N))


@triton.jit
def prefetch_piece(w, up, start, inside, K: tl.constexpr, GATED: tl.constexpr):
    """Ask for the words of a piece, whose rows lie behind each other, to come to the L2."""
    LINES: tl.constexpr = (ROWS // 2 if GATED else ROWS) * K // 256  # of 128 bytes
    at = start + 32 * tl.minimum(tl.arange(0, triton.next_power_of_2(LINES)), LINES - 1)
    if inside:
        prefetch(w[0] + at)
        if GATED:
            prefetch(up[0] + at)


@triton.jit
def walk(
    loaded, w, up, here, then, more, x, y, has, begin, end, N,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Pieces [begin, end) of the matrix at `here` times the rows at x [COLUMNS], of which some are there, to y.

    The first piece is `loaded`, and so is, when all is done, the first of the matrix at `then`, if there is `more`.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    TYPE: tl.constexpr = x.dtype.element_ty
    # The exponent under which codes are read; an instruction holds one constant only, and the mask is another.
    one = ((0x43004300 if TYPE == tl.bfloat16 else 0x3C003C00) + tl.minimum(N, 0)).to(tl.uint32)
    right = right_operands(x, has, K, BLOCKS, PARTS)
    sums = group_sums(right, loaded, TYPE, BLOCKS, PARTS)
    for piece in range(begin, end):
        if AHEAD:
            beyond = piece + AHEAD - end
            soon = tl.where(beyond < 0, here + (piece + AHEAD).to(tl.int64) * (OUTPUTS * K // 8), then)
            soon += tl.maximum(beyond, 0).to(tl.int64) * (OUTPUTS * K // 8)
            prefetch_piece(w, up, soon, tl.where(beyond < 0, 1, more) > 0, K, GATED)
        total = products(loaded, right, sums, one, FORMAT, TYPE, BLOCKS, PARTS)
        last = piece + 1 == end
        first = tl.where(last, 0, (piece + 1) * OUTPUTS).to(tl.int64)
        inside = tl.where(last, more, 1)
        loaded = weights_of(w, up, tl.where(last, then, here), first, inside, N, GATED, K, EVEN, BLOCKS, PARTS)
        tl.debug_barrier()  # all is asked for before any is waited for; to spare registers, ptxas would not
        put(total, y[None, :], has[None, :], piece * OUTPUTS, N, ACTIVATION, EVEN)
    return loaded


@triton.jit(do_not_specialize=["M"])
def rows_kernel(
    x, w, y, step, N, M, x_row, x_head, y_row, y_head,
    FORMAT: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[row, head] = w[head] x[row, head]: eight rows of one head, and some pieces of its matrix; those are `step`
    words apart."""
    head, pieces = tl.program_id(2).to(tl.int64), tl.cdiv(N, ROWS)
    begin = tl.program_id(0) * pieces // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * pieces // tl.num_programs(0)
    here = head * step
    loaded = weights_of(w, w, here, begin.to(tl.int64) * ROWS, 1, N, False, K, EVEN, BLOCKS, PARTS)
    tl.debug_barrier()
    begin_early(OVERLAP)
    row = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    walk(
        loaded, w, w, here, here, 0, x + head * x_head + row * x_row, y + head * y_head + row * y_row,
        row < M, begin, end, N, FORMAT, None, K, EVEN, BLOCKS, PARTS, AHEAD,
    )  # fmt: skip


@triton.jit
def pairs_kernel(
    x, w, up, y, tiles, count, step, N, choices, x_token, x_choice,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[pair] = w[expert] x[pair], or activation(w x) . (up x), for `count` tiles of up to eight pairs of one expert.

    Every program takes as many pieces as any other, or one less, of tiles that follow each other.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    begin_early(OVERLAP)
    pieces = tl.cdiv(N, OUTPUTS)
    total = tl.load(count).to(tl.int64) * pieces
    start = (total * tl.program_id(0) // tl.num_programs(0)).to(tl.int32)
    stop = (total * (tl.program_id(0) + 1) // tl.num_programs(0)).to(tl.int32)
    if start >= stop:
        return
    here = tl.load(tiles + start // pieces * RECORD).to(tl.int64) * step
    first = (start % pieces).to(tl.int64) * OUTPUTS
    loaded = weights_of(w, up, here, first, 1, N, GATED, K, EVEN, BLOCKS, PARTS)
    for tile in range(start // pieces, tl.cdiv(stop, pieces)):
        record = tiles + tile * RECORD
        column = tl.arange(0, COLUMNS)
        has = column < tl.load(record + 1)
        pair = tl.load(record + 8 + column, has, other=0)
        token = pair // choices
        more = ((tile + 1) * pieces < stop).to(tl.int32)
        then = tl.load(record + RECORD * more).to(tl.int64) * step
        rows = x + token.to(tl.int64) * x_token + (pair - token * choices).to(tl.int64) * x_choice
        begin, end = tl.maximum(start - tile * pieces, 0), tl.minimum(stop - tile * pieces, pieces)
        loaded = walk(
            loaded, w, up, here, then, more, rows, y + pair.to(tl.int64) * N, has, begin, end, N,
            FORMAT, ACTIVATION, K, EVEN, BLOCKS, PARTS, AHEAD,
        )  # fmt: skip
        here = then


class Sizes(NamedTuple):
    """Of a launch."""

    blocks: int  # groups that a warp has of each row; even
    parts: int  # warps
    resident: int  # programs for each processor
    registers: int | None = None  # of a thread, at most
    ahead: int = 0  # pieces that come to the L2 before they are loaded


LONGEST = 8 * 8 * GROUP  # inputs; more warps would have too few registers


def fits(x, w):
    """Whether this file multiplies x with these matrices."""
    if not hasattr(w, "bits") or hasattr(w, "addresses"):
        return False
    floats = (torch.bfloat16, torch.float16)
    usual = w.mode == "affine" and w.bits == 4 and w.group == GROUP and w.scale_dtype in floats and x.dtype in floats
    return usual and w.shape[-1] % (2 * GROUP) == 0 and w.shape[-1] <= LONGEST


# 2026-11-16, H200, us, here and by the better of matvec.py and gemm.py: 12352 x 2048, 2 rows 8.1 and 7.7, 4 rows 7.8
# and 11.5, 16 rows 13.0 and 12.4; 5120 x 2048, 16 rows 7.7 and 9.1, 32 rows 11.2 and 10.5; 512 x 2048, 32 rows 2.9,
# 6.5.
TWO, MOST, WEIGHTS = 2, 32, 24 << 20  # rows that matvec.py does as well, the most, and weights times eights of rows


def quick(rows, weights):
    """Whether so many rows by a matrix of so many weights take less time here than in matvec.py and gemm.py."""
    return TWO < rows <= 8 or (8 < rows <= MOST and triton.cdiv(rows, 8) * weights <= WEIGHTS)


def sizes(K):
    """2026-11-15, H200, 8 rows: 248320 x 2048 in 100 us (half the blocks, twice the warps 174; gemm.py 120), 12352 x
    2048 in 7.1 (10.2; 12.0), 2048 x 4096 in 5.1 (6.7; 8.0)."""
    groups = K // GROUP
    parts = triton.next_power_of_2(triton.cdiv(groups, 8))
    blocks = groups // parts if groups % (2 * parts) == 0 else 8
    return Sizes(blocks, parts, max(1, 8 // parts))


def launch_options(form, N, K, outputs, size, device):
    even = N % outputs == 0 and K == GROUP * size.blocks * size.parts
    given = {"FORMAT": form, "K": K, "EVEN": even, "BLOCKS": size.blocks, "PARTS": size.parts}
    given["AHEAD"] = size.ahead if even and facts(device).capability > 0 and not INTERPRETED else 0
    if size.registers and facts(device).capability > 0 and not INTERPRETED:
        given["maxnreg"] = size.registers
    return given | {"num_warps": size.parts, "num_stages": 1} | overlap(device)


def multiply_rows(x, w, y, launch=None):
    """y [M, H, N] = w[h] x[m, h]. The last axes of x and y lie whole."""
    (M, heads, N), K = y.shape, x.shape[-1]
    source, form = stack(w)
    size, jobs = launch or sizes(K), triton.cdiv(M, 8)
    programs = max(1, size.resident * facts(x.device).processors // (jobs * heads))
    rows_kernel[(min(triton.cdiv(N, 16), programs), jobs, heads)](
        x, source[:3], y, source[4], N, M, x.stride(0), x.stride(1), y.stride(0), y.stride(1),
        **launch_options(form, N, K, 16, size, x.device),
    )  # fmt: skip
    return y


def multiply_pairs(x, steps, choices, w, up, activation, tiles, count, y, launch=None):
    """y [pairs, N] = w[expert] x[pair], or activation(w x) . (up x), of pairs in tiles (experts.Tiles).

    Row r of x lies at (r // choices, r % choices) . steps.
    """
    _, N, K = w.shape
    source, form = stack(w)
    other = source if up is None else stack(up)[0]
    size = launch or sizes(K)
    programs = 3 if INTERPRETED else size.resident * facts(x.device).processors
    pairs_kernel[(programs,)](
        x, source[:3], other[:3], y, tiles, count, source[4], N, choices, *steps,
        ACTIVATION=None if up is None else ACTIVATIONS[activation].value,
        **launch_options(form, N, K, 16 if up is None else 8, size, x.device),
    )  # fmt: skip
    return y
