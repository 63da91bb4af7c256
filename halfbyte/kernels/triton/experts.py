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
from .gemm import in_assembly, prepared, style_of, sums_of
from .rowwise import ACTIVATIONS, activated, glu


@triton.jit
def group_pairs_kernel(ids, order, tiles, pairs, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """One program an expert: its pairs, in order, into `order`; its tiles (expert, first, end) into `tiles`."""
    expert = tl.program_id(0)
    before = tl.zeros((CHUNK,), tl.int32)
    equal = tl.zeros((CHUNK,), tl.int32)
    for at in range(0, pairs, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        mine = tl.load(ids + pair, pair < pairs, other=0x7FFFFFFF)
        before += (mine < expert).to(tl.int32)
        equal += (mine == expert).to(tl.int32)
    first = tl.sum(before)
    end = first + tl.sum(equal)
    room = first // BLOCK + expert
    for tile in range(room, end // BLOCK + expert + 1):
        begin = first + (tile - room) * BLOCK
        tl.store(tiles + 3 * tile, expert)
        tl.store(tiles + 3 * tile + 1, begin)
        tl.store(tiles + 3 * tile + 2, tl.minimum(end, begin + BLOCK))
    for at in range(0, pairs, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        mine = (tl.load(ids + pair, pair < pairs, other=0x7FFFFFFF) == expert).to(tl.int32)
        tl.store(order + first + tl.cumsum(mine, 0) - 1, pair, mine == 1)
        first += tl.sum(mine)


@triton.jit
def grouped_kernel(
    x, group_sums, operand, second_operand, y, order, tiles, N, K, choices, x_token, x_choice,
    FORMAT: tl.constexpr, FACTOR: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, OWN: tl.constexpr,
    STYLE: tl.constexpr, EVEN: tl.constexpr, SHUFFLED: tl.constexpr, NVIDIA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[pair] = w[expert] x[pair], or activation(gate x) . up x, for a tile of pairs of one expert."""
    tile = tl.program_id(0)
    expert = tl.load(tiles + 3 * tile).to(tl.int64)
    begin, end = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if begin >= end:
        return
    slot = begin + tl.arange(0, BLOCK_M)
    has = slot < end
    pair = tl.load(order + slot, has, other=0).to(tl.int64)
    rows = x + (pair // choices * x_token + pair % choices * x_choice)[:, None]
    group_rows = group_sums
    if STYLE == "codes":
        group_rows = group_sums + (pair if OWN else pair // choices)[:, None] * (2 * (K // BLOCK_K))
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


BLOCK_M = 64  # pairs of a tile
SMALL = 1 << 15  # weights of a matrix that float32 activations are multiplied with in float64
LONG = 256  # sums over fewer inputs show that these were rounded

# Pairs up to which each reads its weights alone. 2026-11-15, H200.
ALONE = 32


class Groups:
    """Pairs in the order of their experts, and the tiles they make."""

    def __init__(self, ids, experts, block=BLOCK_M):
        self.pairs, self.choices, self.block = ids.numel(), ids.shape[1], block
        self.count = self.pairs // block + experts
        self.order = torch.empty(self.pairs, dtype=torch.int32, device=ids.device)
        self.tiles = torch.empty((self.count, 3), dtype=torch.int32, device=ids.device)
        chunk = min(4096, max(128, triton.next_power_of_2(self.pairs)))
        group_pairs_kernel[(experts,)](
            ids.contiguous(),
            self.order,
            self.tiles,
            self.pairs,
            CHUNK=chunk,
            BLOCK=block,
            num_warps=max(1, chunk // 256),
        )


def sizes(style, group, gated):
    """BLOCK_N, BLOCK_K, warps, stages. 2026-11-15, H200."""
    if style == "codes":
        return (128, group, 8, 4) if not gated else (64, group, 4, 4)
    if style == "bf16":
        return (64, 64, 4, 3)
    return (32, 32, 4, 2)


def grouped(x, groups, w, up, activation, y, launch=None):
    """Fill y [T, A, N] from x [T, K] or [T, A, K]."""
    _, N, K = w.shape
    one, other = operand(w), operand(w if up is None else up)
    style = style_of(x, one.format)
    block_n, block_k, warps, stages = launch or sizes(style, one.format.group, up is not None)
    own = x.ndim == 3
    steps, rows = (x.stride(0), x.stride(1) if own else 0), groups.pairs if own else x.shape[0]
    ready = prepared(x, steps, rows, groups.choices if own else 1, one.format, style)
    grouped_kernel[(groups.count, triton.cdiv(N, block_n))](
        ready.x, ready.sums, one.operand, other.operand, y, groups.order, groups.tiles, N, K, groups.choices,
        ready.steps[0], ready.steps[1] if own else 0,
        FORMAT=one.format, FACTOR=one.scaled, GATED=up is not None, ACTIVATION=activation, OWN=own,
        STYLE=style, EVEN=K % block_k == 0, SHUFFLED=ready.shuffled, NVIDIA=in_assembly(x, one.format),
        BLOCK_M=groups.block, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def alone(x, ids, w):
    """Whether each pair reads its expert's weights itself: a few pairs, or small matrices, which are summed exactly."""
    return ids.numel() <= ALONE or (x.dtype == torch.float32 and w.shape[1] * w.shape[2] <= SMALL)


def expert_qmm(x, ids, w, *, out=None):
    y = torch.empty((*ids.shape, w.shape[1]), dtype=x.dtype, device=x.device) if out is None else out
    if ids.numel() == 0:
        return y
    if alone(x, ids, w):
        return matvec.chosen(x, ids, w, y)
    if not y.is_contiguous():
        return y.copy_(expert_qmm(x, ids, w))
    x = x if x.stride(-1) == 1 else x.contiguous()
    return grouped(x, Groups(ids, w.shape[0]), w, None, 0, y)


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
    groups = Groups(ids, count)
    kept = torch.bfloat16 if x.dtype == torch.bfloat16 and inner >= LONG else torch.float32
    between = torch.empty((*ids.shape, inner), dtype=kept, device=x.device)
    gate, up = operand(experts.gate).format, operand(experts.up).format
    if gate == up:
        grouped(x, groups, experts.gate, experts.up, ACTIVATIONS[activation], between)
    else:
        apart = torch.empty((2, *between.shape), dtype=torch.float32, device=x.device)
        grouped(x, groups, experts.gate, None, 0, apart[0])
        grouped(x, groups, experts.up, None, 0, apart[1])
        between.copy_(glu(apart[0], apart[1], activation))
    return grouped(between, groups, experts.down, None, 0, y)
