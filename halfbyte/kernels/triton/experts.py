"""Chosen experts: each pair (token, choice) wants the projections of one expert.

A few pairs read their experts' weights each for itself (matvec.py). Many pairs are first put in the order of their
experts, on the device; then tiles of pairs of the same expert go through the tensor cores as in gemm.py, so that an
expert's weights are decoded once for all the tokens of a tile. How many pairs an expert has is never known to the host:
the grid has room for every split of the pairs, and tiles without pairs return at once.

An expert's tiles have their places in the list of tiles without counting those before it: with s pairs before expert e,
place s // BLOCK + e is free, whatever the tiles of the experts before.

Gate and up share one pass over x, and what they make is kept in float32, or as bfloat16 where the next product would
round it to that anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import matvec
from .dequant import factor_of, matrix_of, operand
from .elementary import ACTIVATIONS, activated
from .gemm import in_assembly, preparation, prepare, style_of, sums_of
from .rowwise import glu


@triton.jit
def ids_at(ids, pair, pairs, WHOLE: tl.constexpr):
    if WHOLE:
        found = tl.load(ids + pair)
    else:
        found = tl.load(ids + pair, pair < pairs, other=0x7FFFFFFF)
    return found


@triton.jit
def group_pairs(expert, ids, order, tiles, pairs, CHUNK: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """The pairs of one expert, in order, into `order`; its tiles (expert, first, end) into `tiles`.

    A pair's rank among its expert's is counted in lines of 32: one long scan would cost several times as much. WHOLE
    promises that pairs come in whole chunks.
    """
    LINES: tl.constexpr = CHUNK // 32
    inside = tl.arange(0, LINES)[:, None] * 32 + tl.arange(0, 32)[None, :]
    before = tl.zeros((LINES, 32), tl.int32)
    equal = tl.zeros((LINES, 32), tl.int32)
    for at in range(0, pairs, CHUNK):
        mine = ids_at(ids, at + inside, pairs, WHOLE)
        before += (mine < expert).to(tl.int32)
        equal += (mine == expert).to(tl.int32)
    first = tl.sum(tl.sum(before, 1), 0)
    end = first + tl.sum(tl.sum(equal, 1), 0)
    room = first // BLOCK + expert
    for tile in range(room, end // BLOCK + expert + 1):
        begin = first + (tile - room) * BLOCK
        tl.store(tiles + 3 * tile, expert)
        tl.store(tiles + 3 * tile + 1, begin)
        tl.store(tiles + 3 * tile + 2, tl.minimum(end, begin + BLOCK))
    for at in range(0, pairs, CHUNK):
        mine = (ids_at(ids, at + inside, pairs, WHOLE) == expert).to(tl.int32)
        lines = tl.sum(mine, 1)
        rank = (tl.cumsum(lines, 0) - lines)[:, None] + tl.cumsum(mine, 1) - 1
        tl.store(order + first + rank, at + inside, mine == 1)
        first += tl.sum(lines, 0)


@triton.jit
def arrange_kernel(
    ids, order, tiles, pairs, experts, work, CHUNK: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
    SUMS: tl.constexpr, SHUFFLED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What can be done before the first product, in one launch: a program an expert, then programs that prepare x."""
    program = tl.program_id(0)
    if program < experts:
        group_pairs(program, ids, order, tiles, pairs, CHUNK, WHOLE, TILE)
    else:
        prepare(program - experts, work, SUMS, SHUFFLED, GROUP, BLOCK)


@triton.jit
def tile_product(
    x, group_sums, operand, second_operand, y, order, expert, begin, end, N, K, choices, x_token, x_choice,
    FORMAT: tl.constexpr, FACTOR: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, OWN: tl.constexpr,
    STYLE: tl.constexpr, EVEN: tl.constexpr, SHUFFLED: tl.constexpr, NVIDIA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[pair] = w[expert] x[pair], or activation(gate x) . up x, for the pairs [begin, end) of one expert."""
    slot = begin + tl.arange(0, BLOCK_M)
    has = slot < end
    pair = tl.load(order + slot, has, other=0)
    token, pair = (pair // choices).to(tl.int64), pair.to(tl.int64)
    rows = x + (token * x_token + (pair - token * choices) * x_choice)[:, None]
    group_rows = group_sums
    if STYLE == "pairs" or STYLE == "codes":
        group_rows = group_sums + (pair if OWN else token)[:, None] * (2 * (K // FORMAT.group))
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
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
    tl.store(y + pair[None, :] * N + n[:, None], sums.to(y.dtype.element_ty), (n < N)[:, None] & has[None, :])


@triton.jit
def grouped_kernel(
    x, group_sums, operand, second_operand, y, order, tiles, N, K, choices, x_token, x_choice,
    FORMAT: tl.constexpr, FACTOR: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, OWN: tl.constexpr,
    STYLE: tl.constexpr, EVEN: tl.constexpr, SHUFFLED: tl.constexpr, NVIDIA: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of pairs of one expert. An expert's last pairs are often few: up to SHORT they get a lower tile."""
    tile = tl.program_id(0)
    expert = tl.load(tiles + 3 * tile).to(tl.int64)
    begin, end = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if begin >= end:
        return
    if end - begin <= SHORT:
        tile_product(
            x, group_sums, operand, second_operand, y, order, expert, begin, end, N, K, choices, x_token, x_choice,
            FORMAT, FACTOR, GATED, ACTIVATION, OWN, STYLE, EVEN, SHUFFLED, NVIDIA, 16, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        tile_product(
            x, group_sums, operand, second_operand, y, order, expert, begin, end, N, K, choices, x_token, x_choice,
            FORMAT, FACTOR, GATED, ACTIVATION, OWN, STYLE, EVEN, SHUFFLED, NVIDIA, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


BLOCK_M, SHORT = 64, 16  # pairs of a tile, and of a lower one
CHUNK, ARRANGERS = 4096, 8  # ids that a program of arrange_kernel looks at at once, and its warps: 15 us for 16384
SMALL = 1 << 15  # weights of a matrix that float32 activations are multiplied with in float64
LONG = 256  # sums over fewer inputs show that these were rounded

# Pairs up to which each reads its weights alone, or half as many as there are experts: then most want another one.
# 2026-11-15, H200, expert_mlp of 256 experts: 64 pairs take 47 us, grouped 72; 512 pairs 295, grouped 217.
ALONE = 32


class Groups:
    """Pairs in the order of their experts, and the tiles they make; x is prepared by the same launch."""

    def __init__(self, ids, experts, ready, block=BLOCK_M):
        self.pairs, self.choices, self.block = ids.numel(), ids.shape[1], block
        self.count = self.pairs // block + experts
        self.order = torch.empty(self.pairs, dtype=torch.int32, device=ids.device)
        self.tiles = torch.empty((self.count, 3), dtype=torch.int32, device=ids.device)
        chunk, warps = min(CHUNK, max(128, triton.next_power_of_2(self.pairs))), ARRANGERS
        groups = 1024 * warps // ready.options["GROUP"]
        arrange_kernel[(experts + triton.cdiv(ready.count, groups),)](
            ids.contiguous(), self.order, self.tiles, self.pairs, experts, ready.work,
            CHUNK=chunk, WHOLE=self.pairs % chunk == 0, TILE=block, **ready.options, BLOCK=groups, num_warps=warps,
        )  # fmt: skip


def ready_for(x, ids, w, gated=False):
    """How x [T, K] or [T, A, K] is multiplied with w, and x as that takes it."""
    given = operand(w)
    style = style_of(x, given, w.shape[2], gated=gated)
    if x.ndim == 2:
        return style, preparation(x, (x.stride(0), 0), x.shape[0], 1, given.format, style, own=False)
    return style, preparation(x, x.stride()[:2], ids.numel(), ids.shape[1], given.format, style)


def sizes(style, group):
    """BLOCK_N, BLOCK_K, warps, stages.

    2026-11-15, H200, 2048 tokens, 8 of 256 experts of 512 x 2048 in 4 bits: one projection takes 147 us (8 warps 156,
    64 rows of weights 166), 138 with SHORT tiles; gate and up together 301 us before those.
    """
    if style == "pairs":
        return (64, 2 * group, 4, 3)
    if style == "codes":
        return (128, group, 4, 4)
    if style == "bf16":
        return (64, 64, 4, 3)
    return (32, 32, 4, 2)


def grouped(style, ready, groups, w, up, activation, y, launch=None):
    """Fill y [T, A, N] from x [T, K] or [T, A, K], which is ready."""
    _, N, K = w.shape
    one, other = operand(w), operand(w if up is None else up)
    block_n, block_k, warps, stages = launch or sizes(style, one.format.group)
    grouped_kernel[(groups.count, triton.cdiv(N, block_n))](
        ready.x, ready.sums, one.operand, other.operand, y, groups.order, groups.tiles, N, K, groups.choices,
        *ready.steps,
        FORMAT=one.format, FACTOR=one.scaled, GATED=up is not None, ACTIVATION=activation, OWN=ready.own,
        STYLE=style, EVEN=K % block_k == 0, SHUFFLED=ready.shuffled, NVIDIA=in_assembly(ready.x, one.format),
        SHORT=SHORT, BLOCK_M=groups.block, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def alone(x, ids, w):
    """Whether each pair reads its expert's weights itself: a few pairs, or small matrices, which are summed exactly."""
    few = ids.numel() <= max(ALONE, w.shape[0] // 2)
    return few or (x.dtype == torch.float32 and w.shape[1] * w.shape[2] <= SMALL)


def expert_qmm(x, ids, w, *, out=None):
    y = torch.empty((*ids.shape, w.shape[1]), dtype=x.dtype, device=x.device) if out is None else out
    if ids.numel() == 0:
        return y
    if alone(x, ids, w):
        return matvec.chosen(x, ids, w, y)
    if not y.is_contiguous():
        return y.copy_(expert_qmm(x, ids, w))
    x = x if x.stride(-1) == 1 else x.contiguous()
    style, ready = ready_for(x, ids, w)
    return grouped(style, ready, Groups(ids, w.shape[0], ready), w, None, 0, y)


def expert_mlp(x, ids, experts, activation="silu", *, out=None):
    count, hidden, inner = experts.down.shape
    y = torch.empty((*ids.shape, hidden), dtype=x.dtype, device=x.device) if out is None else out
    if ids.numel() == 0:
        return y
    if alone(x, ids, experts.down):
        between = matvec.chosen_gate_up(x, ids, experts.gate, experts.up, activation, precise=x.dtype == torch.float32)
        return matvec.chosen(between, ids, experts.down, y)
    if not y.is_contiguous():
        return y.copy_(expert_mlp(x, ids, experts, activation))
    x = x if x.stride(-1) == 1 else x.contiguous()
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
        style, ready = ready_for(x, ids, experts.up)
        grouped(style, ready.launch(), groups, experts.up, None, 0, apart[1])
        between.copy_(glu(apart[0], apart[1], activation))
    style, ready = ready_for(between, ids, experts.down)
    return grouped(style, ready.launch(), groups, experts.down, None, 0, y)
