"""Chosen experts: each pair (token, choice) wants the projections of one expert.

A few pairs read their experts' weights each for itself (matvec.py). Many pairs are first put in the order of their
experts, on the device: a counting sort in two launches, in whose second x is prepared too. Then tiles of pairs of the
same expert go through the tensor cores as in gemm.py, so that an expert's weights are decoded once for all the tokens
of a tile. How many pairs an expert has is never known to the host: the grid has room for every split of the pairs, and
tiles without pairs, which come last, return at once. In large tiles an expert may have a few pairs more than a tile
holds: a second tile would decode its weights again.

Gate and up share one pass over x, and what they make is kept in float32, or as bfloat16 where the next product would
round it to that anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import eights, matvec
from .dequant import factor_of, matrix_of, operand, row_starts
from .device import INTERPRETED, facts, overlap, steady
from .elementary import ACTIVATIONS, activated, begin_early
from .gemm import in_assembly, preparation, prepare, style_of, sums_of, weight_sums
from .rowwise import glu


@triton.jit
def count_kernel(ids, counts, pairs, share, BINS: tl.constexpr, LINE: tl.constexpr, OVERLAP: tl.constexpr):
    """counts [shares, BINS]: how many of a share of the pairs are each expert's."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    begin = tl.program_id(0) * share
    count = tl.zeros((BINS,), tl.int32)
    for at in range(begin, min(begin + share, pairs), LINE):
        pair = at + tl.arange(0, LINE)
        inside = pair < pairs
        count += tl.histogram(tl.load(ids + pair, inside, other=0).to(tl.int32), BINS, mask=inside)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), count)


@triton.jit
def counted(counts, shares, program, BINS: tl.constexpr, ROWS: tl.constexpr):
    """int32 [BINS] twice: how many pairs of all shares are each expert's, and of the shares before this program's."""
    all_of = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for first in range(0, shares, ROWS):
        share = first + tl.arange(0, ROWS)[:, None]
        some = tl.load(counts + share * BINS + tl.arange(0, BINS)[None, :], share < shares, other=0)
        all_of += tl.sum(some, 0)
        before += tl.sum(tl.where(share < program, some, 0), 0)
    return all_of, before


@triton.jit
def make_tiles(tiles, room, first, count, BINS: tl.constexpr, BLOCK: tl.constexpr, MORE: tl.constexpr):
    """Each expert's tiles (expert, begin, end): BLOCK pairs, in its last one up to MORE beyond; then empty tiles."""
    expert = tl.arange(0, BINS)
    needed = tl.where(count > 0, tl.maximum(tl.cdiv(count - MORE, BLOCK), 1), 0)
    place = tl.cumsum(needed, 0) - needed
    for tile in range(tl.max(needed, 0)):
        at, begin = tiles + 3 * (place + tile), first + tile * BLOCK
        tl.store(at, expert, tile < needed)
        tl.store(at + 1, begin, tile < needed)
        tl.store(at + 2, tl.where(tile + 1 < needed, begin + BLOCK, first + count), tile < needed)
    for start in range(tl.sum(needed, 0), room, BINS):
        at = start + expert
        tl.store(tiles + 3 * at + 1, 0, at < room)
        tl.store(tiles + 3 * at + 2, 0, at < room)


@triton.jit
def place_pairs(ids, order, place, begin, end, BINS: tl.constexpr, LINE: tl.constexpr):
    """Pairs [begin, end) into `order`: each to the next place of its expert."""
    line = tl.arange(0, LINE)
    for at in range(begin, end, LINE):
        pair = at + line
        inside = pair < end
        mine = tl.load(ids + pair, inside, other=0).to(tl.int32)
        earlier = (mine[:, None] == mine[None, :]) & (line[:, None] < line[None, :])
        tl.store(order + tl.gather(place, mine, 0) + tl.sum(earlier.to(tl.int32), 0), pair, inside)
        if at + LINE < end:
            place += tl.histogram(mine, BINS, mask=inside)


@triton.jit
def arrange_kernel(
    ids, counts, order, tiles, pairs, room, shares, share, work,
    BINS: tl.constexpr, ROWS: tl.constexpr, LINE: tl.constexpr, TILE: tl.constexpr, MORE: tl.constexpr,
    SUMS: tl.constexpr, SHUFFLED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What is left to do before the first product: a program makes tiles, some order pairs, some prepare x.

    `order` has pairs by expert, and each expert's in the order in which they came.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program <= shares:
        count, before = counted(counts, shares, program, BINS, ROWS)
        first = tl.cumsum(count, 0) - count
        if program < shares:
            begin = program * share
            place_pairs(ids, order, first + before, begin, min(begin + share, pairs), BINS, LINE)
        else:
            make_tiles(tiles, room, first, count, BINS, TILE, MORE)
    else:
        prepare(program - shares - 1, work, SUMS, SHUFFLED, GROUP, BLOCK)


@triton.jit
def tiles_kernel(
    ids, tiles, count, pairs, BINS: tl.constexpr, LINE: tl.constexpr, MINE: tl.constexpr, OVERLAP: tl.constexpr
):
    """Records of up to eight pairs of one expert (eights.RECORD), and how many there are.

    Every program counts all pairs and places MINE of them; those of an expert are in the order in which they came.
    """
    begin_early(OVERLAP)
    expert, line = tl.arange(0, BINS), tl.arange(0, LINE)
    own = tl.program_id(0) * MINE + tl.arange(0, MINE)
    mine = tl.load(ids + own, own < pairs, other=0).to(tl.int32)
    found, rank = tl.zeros((BINS,), tl.int32), tl.zeros((MINE,), tl.int32)
    for at in range(0, pairs, LINE):
        pair = at + line
        other = tl.load(ids + pair, pair < pairs, other=0).to(tl.int32)
        found += tl.histogram(other, BINS, mask=pair < pairs)
        earlier = (mine[:, None] == other[None, :]) & (pair[None, :] < own[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    needed = tl.cdiv(found, 8)
    place = tl.cumsum(needed, 0) - needed
    record = tiles + (tl.gather(place, mine, 0) + rank // 8) * eights.RECORD
    tl.store(record + 8 + rank % 8, own, own < pairs)
    if tl.program_id(0) == 0:
        tl.store(count, tl.sum(needed, 0))
        for tile in range(tl.max(needed, 0)):
            head = tiles + (place + tile) * eights.RECORD
            tl.store(head, expert, tile < needed)
            tl.store(head + 1, tl.minimum(found - 8 * tile, 8), tile < needed)


@triton.jit
def rows_of(source, slot, end):
    """The pairs at slots of the order, their tokens, where their rows of x begin, and which slots have one."""
    x, order, choices, x_token, x_choice = source
    has = slot < end
    pair = tl.load(order + slot, has, other=0)
    token, pair = (pair // choices).to(tl.int64), pair.to(tl.int64)
    return pair, token, x + (token * x_token + (pair - token * choices) * x_choice)[:, None], has


@triton.jit
def put(y, sums, pair, has, n, N):
    """y[pair, n] = sums [n, pair]."""
    tl.store(y + pair[None, :] * N + n[:, None], sums.to(y.dtype.element_ty), (n < N)[:, None] & has[None, :])


@triton.jit
def weights_product(
    source, operand, y, tile, N, K, FORMAT: tl.constexpr, NVIDIA: tl.constexpr, MORE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As tile_product, in the style "weights"; the tile may have MORE pairs than BLOCK_M."""
    expert, begin, end, column = tile
    n = (column * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    weights = row_starts(matrix_of(operand, expert, FORMAT), n)
    pair, _, rows, has = rows_of(source, begin + tl.arange(0, BLOCK_M), end)
    more_pair, _, more_rows, has_more = rows_of(source, begin + BLOCK_M + tl.arange(0, max(MORE, 16)), end)
    sums, more = weight_sums(
        rows, has[:, None], more_rows, has_more[:, None], weights, n < N, K,
        FORMAT, MORE, NVIDIA, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    put(y, sums, pair, has, n, N)
    if MORE:
        put(y, more, more_pair, has_more, n, N)


@triton.jit
def tile_product(
    source, group_sums, operand, second_operand, y, tile, N, K,
    FORMAT: tl.constexpr, FACTOR: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, OWN: tl.constexpr,
    STYLE: tl.constexpr, EVEN: tl.constexpr, SHUFFLED: tl.constexpr, NVIDIA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[pair] = w[expert] x[pair], or activation(gate x) . up x, for the pairs [begin, end) of one expert."""
    expert, begin, end, column = tile
    pair, token, rows, has = rows_of(source, begin + tl.arange(0, BLOCK_M), end)
    group_rows = group_sums
    if STYLE == "pairs" or STYLE == "codes":
        group_rows = group_sums + (pair if OWN else token)[:, None] * (2 * (K // FORMAT.group))
    n = (column * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    matrix = matrix_of(operand, expert, FORMAT)
    second = matrix_of(second_operand, expert, FORMAT) if GATED else matrix
    sums, others = sums_of(
        rows, group_rows, has[:, None], matrix, second, n, N, 0, K, K,
        FORMAT, GATED, STYLE, EVEN, SHUFFLED, NVIDIA, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if FACTOR:
        sums *= factor_of(operand, expert, FORMAT)
    if GATED:
        if FACTOR:
            others *= factor_of(second_operand, expert, FORMAT)
        sums = activated(sums, ACTIVATION, STYLE == "ieee") * others
    put(y, sums, pair, has, n, N)


@triton.jit
def grouped_kernel(
    x, group_sums, operand, second_operand, y, order, tiles, columns, N, K, choices, x_token, x_choice,
    FORMAT: tl.constexpr, FACTOR: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, OWN: tl.constexpr,
    STYLE: tl.constexpr, EVEN: tl.constexpr, SHUFFLED: tl.constexpr, NVIDIA: tl.constexpr, SHORT: tl.constexpr,
    MORE: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of pairs of one expert: of at most SHORT, of BLOCK_M, or of up to MORE beyond these."""
    if OVERLAP:
        gdc_wait()
    place, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    begin, end = tl.load(tiles + 3 * place + 1), tl.load(tiles + 3 * place + 2)
    if begin >= end:
        return
    tile = (tl.load(tiles + 3 * place).to(tl.int64), begin, end, column)
    source = (x, order, choices, x_token, x_choice)
    if STYLE == "weights":
        if end - begin <= SHORT:
            weights_product(source, operand, y, tile, N, K, FORMAT, NVIDIA, 0, SHORT, BLOCK_N, BLOCK_K)
        elif end - begin <= BLOCK_M:
            weights_product(source, operand, y, tile, N, K, FORMAT, NVIDIA, 0, BLOCK_M, BLOCK_N, BLOCK_K)
        else:
            weights_product(source, operand, y, tile, N, K, FORMAT, NVIDIA, MORE, BLOCK_M, BLOCK_N, BLOCK_K)
    elif end - begin <= SHORT:
        tile_product(
            source, group_sums, operand, second_operand, y, tile, N, K,
            FORMAT, FACTOR, GATED, ACTIVATION, OWN, STYLE, EVEN, SHUFFLED, NVIDIA, SHORT, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        tile_product(
            source, group_sums, operand, second_operand, y, tile, N, K,
            FORMAT, FACTOR, GATED, ACTIVATION, OWN, STYLE, EVEN, SHUFFLED, NVIDIA, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


BLOCK_M, SHORT, MORE = 64, 16, 16  # pairs of a tile, of a lower one, and beyond a tile in the style "weights"
# Pairs an expert has on average up to which all tiles are lower ones, which leaves room for more programs.
# 2026-11-15, H200, expert_mlp of 256 experts in the style "weights": 64 tokens 157 us instead of 192, 256 182 and 222.
SPARSE = 8
# Pairs ranked at once, programs that order pairs, counts that each sums at once, and its warps.
# 2026-11-15, H200, 16384 pairs of 256 experts: 8.4 us for both launches, 10.6 with x.
LINE, SHARES, AT_ONCE, ARRANGERS = 128, 128, 1 << 15, 8
WIDE, WARPS, STAGES = 128, 4, 3  # rows of weights of a program in the style "weights"
SMALL = 1 << 15  # weights of a matrix that float32 activations are multiplied with in float64
LARGE = 1 << 19  # weights of a matrix that may be rounded
LONG = 256  # sums over fewer inputs show that these were rounded

# Pairs up to which each reads its weights alone, or half as many as there are experts: then most want another one.
# 2026-11-15, H200, expert_mlp of 256 experts: 64 pairs take 47 us, grouped 72; 512 pairs 295, grouped 217.
ALONE = 32
# Pairs an expert has on average up to which eights.py multiplies. 2026-11-15, H200, nine of 257 experts of 512 x 2048,
# sums of its launches: 16 tokens 79 us instead of 102, 32 117 and 146, 64 162 and 191; 8 tokens 49, each pair alone 40.
SEVERAL = 4
MINE = 32  # pairs that a program puts into tiles


class Groups:
    """Pairs in the order of their experts, and the tiles they make; x is prepared by the same launch."""

    def __init__(self, ids, experts, ready, more=0):
        self.pairs, self.choices, self.more = ids.numel(), ids.shape[1], more
        self.block = BLOCK_M if self.pairs > SPARSE * experts and not steady(len(ids)) else SHORT
        self.count = self.pairs // self.block + experts
        self.order = torch.empty(self.pairs, dtype=torch.int32, device=ids.device)
        self.tiles = torch.empty((self.count, 3), dtype=torch.int32, device=ids.device)
        share = triton.cdiv(triton.cdiv(self.pairs, SHARES), LINE) * LINE
        shares, bins = triton.cdiv(self.pairs, share), max(32, triton.next_power_of_2(experts))
        counts = torch.empty((shares, bins), dtype=torch.int32, device=ids.device)
        ids, overlapping = ids.contiguous(), overlap(ids.device)
        count_kernel[(shares,)](ids, counts, self.pairs, share, BINS=bins, LINE=LINE, num_warps=4, **overlapping)
        groups = 1024 * ARRANGERS // ready.options["GROUP"]
        arrange_kernel[(shares + 1 + triton.cdiv(ready.count, groups),)](
            ids, counts, self.order, self.tiles, self.pairs, self.count, shares, share, ready.work,
            BINS=bins, ROWS=min(triton.next_power_of_2(shares), max(1, AT_ONCE // bins)), LINE=LINE,
            TILE=self.block, MORE=more,
            **ready.options, BLOCK=groups, num_warps=ARRANGERS, **overlapping,
        )  # fmt: skip


class Tiles:
    """Pairs of the same expert, up to eight to a tile, as eights.py takes them."""

    def __init__(self, ids, experts):
        pairs, bins = ids.numel(), max(32, triton.next_power_of_2(experts))
        self.tiles = torch.empty((pairs // 8 + min(pairs, experts), 16), dtype=torch.int32, device=ids.device)
        self.count = torch.empty(1, dtype=torch.int32, device=ids.device)
        tiles_kernel[(triton.cdiv(pairs, MINE),)](
            ids.contiguous(), self.tiles, self.count, pairs, BINS=bins, MINE=MINE,
            LINE=min(512, triton.next_power_of_2(pairs)), num_warps=ARRANGERS, **overlap(ids.device),
        )  # fmt: skip


def style_for(x, w, given, gated=None):
    """As gemm.style_of, and one more: "weights", 4-bit weights rounded to bfloat16, two groups a step.

    It is for large matrices whose results are final: `gated` is None. Rounded weights show in sums of few terms, and in
    what is multiplied again. The interpreter, which cannot multiply bfloat16, takes float16 for it.
    """
    form, (_, N, K) = given.format, w.shape
    fits = form.mode == "affine" and form.bits == 4 and form.scale_type == tl.bfloat16 and form.aligned and form.wide
    able = in_assembly(x, form) or (INTERPRETED and x.dtype == torch.float16)
    if gated is None and able and fits and form.group >= 32 and K % (2 * form.group) == 0 and N * K >= LARGE:
        return "weights"
    return style_of(x, given, K, gated=bool(gated))


def ready_for(x, ids, w, gated=None):
    """How x [T, K] or [T, A, K] is multiplied with w, and x as that takes it."""
    given = operand(w)
    style = style_for(x, w, given, gated)
    if x.ndim == 2:
        return style, preparation(x, (x.stride(0), 0), x.shape[0], 1, given.format, style, own=False)
    return style, preparation(x, x.stride()[:2], ids.numel(), ids.shape[1], given.format, style)


def sizes(style, group, gated, device):
    """Rows of weights, BLOCK_K, warps, stages.

    2026-11-15, H200, 2048 tokens, 8 of 256 experts of 512 x 2048 in 4 bits: one projection takes 104 us in the style
    "weights" (four stages 107; 256 rows and 8 warps 121; 8 warps 131; 64 rows 139), 138 in "codes" (8 warps 156, 64
    rows 166); gate and up together 301 us in "pairs", before lower tiles.
    """
    if style == "weights":
        stage = (WIDE // 2 + (BLOCK_M + MORE) * 2 + WIDE // 8) * 2 * group  # bytes: words, x, scales and biases
        return (WIDE, 2 * group, WARPS, max(2, min(STAGES, facts(device).shared // stage)))
    if style == "pairs":
        return (64, 2 * group, 4, 3)
    if style == "codes":
        return (64 if gated else 128, group, 4, 4)
    if style == "bf16":
        return (64, 64, 4, 3)
    return (32, 32, 4, 2)


def grouped(style, ready, groups, w, up, activation, y):
    """Fill y [T, A, N] from x [T, K] or [T, A, K], which is ready."""
    _, N, K = w.shape
    gated = up is not None
    one, other = operand(w), operand(up if gated else w)
    block_n, block_k, warps, stages = sizes(style, one.format.group, gated, y.device)
    columns = triton.cdiv(N, block_n)
    grouped_kernel[(groups.count * columns,)](
        ready.x, ready.sums, one.operand, other.operand, y, groups.order, groups.tiles, columns, N, K,
        groups.choices, *ready.steps,
        FORMAT=one.format, FACTOR=one.scaled, GATED=gated, ACTIVATION=activation, OWN=ready.own, STYLE=style,
        EVEN=K % block_k == 0, SHUFFLED=ready.shuffled, NVIDIA=in_assembly(ready.x, one.format), SHORT=SHORT,
        MORE=groups.more, BLOCK_M=groups.block, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages, **overlap(y.device),
    )  # fmt: skip
    return y


def alone(x, ids, w, count):
    """Whether each pair reads its expert's weights itself: a few pairs, or small matrices, which are summed exactly."""
    few = ids.numel() <= max(ALONE, count // 2) and not steady(len(ids))
    return few or (x.dtype == torch.float32 and w.shape[1] * w.shape[2] <= SMALL)


def by_eights(x, ids, experts):
    """Whether tiles of eight pairs of one expert are multiplied straight from the codes (eights.py).

    What lies between is rounded to x's type, which sums over many of it do not show.
    """
    count, inner = experts.count, experts.down.shape[2]
    able = x.dtype == torch.bfloat16 or (INTERPRETED and x.dtype == torch.float16)
    several = not alone(x, ids, experts.down, count) and ids.numel() <= SEVERAL * count
    able = able and inner >= LONG and (several or steady(len(ids)))
    return able and all(eights.fits(x, w) for w in (experts.gate, experts.up, experts.down))


def mlp_by_eights(x, ids, experts, activation, y):
    count, _, inner = experts.down.shape
    tiles, choices = Tiles(ids, count), ids.shape[1]
    between = torch.empty((ids.numel(), inner), dtype=x.dtype, device=x.device)
    steps = (x.stride(0), 0 if x.ndim == 2 else x.stride(1))
    eights.multiply_pairs(x, steps, choices, experts.gate, experts.up, activation, tiles.tiles, tiles.count, between)
    steps = (choices * inner, inner)
    eights.multiply_pairs(between, steps, choices, experts.down, None, None, tiles.tiles, tiles.count, y)
    return y


def expert_qmm(x, ids, w, *, out=None):
    y = torch.empty((*ids.shape, w.shape[1]), dtype=x.dtype, device=x.device) if out is None else out
    if ids.numel() == 0:
        return y
    if alone(x, ids, w, w.shape[0]):
        return matvec.chosen(x, ids, w, y)
    if not y.is_contiguous():
        return y.copy_(expert_qmm(x, ids, w))
    x = x if x.stride(-1) == 1 else x.contiguous()
    style, ready = ready_for(x, ids, w)
    groups = Groups(ids, w.shape[0], ready, MORE if style == "weights" else 0)
    return grouped(style, ready, groups, w, None, 0, y)


def expert_mlp(x, ids, experts, activation="silu", *, out=None):
    count, (_, hidden, inner) = experts.count, experts.down.shape
    y = torch.empty((*ids.shape, hidden), dtype=x.dtype, device=x.device) if out is None else out
    if ids.numel() == 0:
        return y
    eight = by_eights(x, ids, experts)
    if not eight and alone(x, ids, experts.down, count):
        return matvec.chosen_mlp(x, ids, experts, activation, y)
    if not y.is_contiguous():
        return y.copy_(expert_mlp(x, ids, experts, activation))
    x = x if x.stride(-1) == 1 else x.contiguous()
    if eight:
        return mlp_by_eights(x, ids, experts, activation, y)
    together = operand(experts.gate)[1:] == operand(experts.up)[1:]  # the same format
    style, ready = ready_for(x, ids, experts.gate, together)
    groups = Groups(ids, count, ready)
    kept = torch.bfloat16 if x.dtype == torch.bfloat16 and inner >= LONG else torch.float32
    between = torch.empty((*ids.shape, inner), dtype=kept, device=x.device)
    if together:
        grouped(style, ready, groups, experts.gate, experts.up, ACTIVATIONS[activation], between)
    else:
        apart = torch.empty((2, *between.shape), dtype=torch.float32, device=x.device)
        grouped(style, ready, groups, experts.gate, None, 0, apart[0])
        style, ready = ready_for(x, ids, experts.up, False)
        grouped(style, ready.launch(), groups, experts.up, None, 0, apart[1])
        between.copy_(glu(apart[0], apart[1], activation))
    style, ready = ready_for(between, ids, experts.down, False)
    return grouped(style, ready.launch(), groups, experts.down, None, 0, y)
