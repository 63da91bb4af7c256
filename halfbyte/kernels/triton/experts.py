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
from .dequant import factor_of, matrix_of, operand, weight_tile
from .device import facts
from .gemm import multiplied, precision_of, rounded

from .rowwise import ACTIVATIONS, activated


@triton.jit
def group_pairs_kernel(
    ids, order, tiles, pairs, choices, id_row, id_choice, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program an expert: its pairs, in order, into `order`; its tiles (expert, first, end) into `tiles`."""
    expert = tl.program_id(0)
    before = tl.zeros((CHUNK,), tl.int32)
    equal = tl.zeros((CHUNK,), tl.int32)
    for at in range(0, pairs, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        place = pair.to(tl.int64) // choices * id_row + pair % choices * id_choice
        chosen_id = tl.load(ids + place, pair < pairs, other=0x7FFFFFFF)
        before += (chosen_id < expert).to(tl.int32)
        equal += (chosen_id == expert).to(tl.int32)
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
        place = pair.to(tl.int64) // choices * id_row + pair % choices * id_choice
        mine = (tl.load(ids + place, pair < pairs, other=0x7FFFFFFF) == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0)
        tl.store(order + first + rank - 1, pair, mine == 1)
        first += tl.sum(mine)


@triton.jit
def grouped_kernel(
    x, first_operand, second_operand, y, order, tiles, N, K, choices, x_token, x_choice,
    FORMAT: tl.constexpr, FACTOR: tl.constexpr, GATED: tl.constexpr, SECOND_FORMAT: tl.constexpr,
    SECOND_FACTOR: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
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
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    matrix = matrix_of(first_operand, expert, FORMAT)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GATED:
        second = matrix_of(second_operand, expert, SECOND_FORMAT)
        others = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(0, K, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)[None, :]
        piece = tl.load(rows + k, has[:, None] if EVEN else has[:, None] & (k < K), other=0.0)
        w = weight_tile(matrix, n, n < N, at, K, FORMAT, BLOCK_K, EVEN)
        sums = multiplied(rounded(w, PRECISION), piece, sums, PRECISION)
        if GATED:
            w = weight_tile(second, n, n < N, at, K, SECOND_FORMAT, BLOCK_K, EVEN)
            others = multiplied(rounded(w, PRECISION), piece, others, PRECISION)
    if FACTOR:
        sums *= factor_of(first_operand, expert, FORMAT)
    if GATED:
        if SECOND_FACTOR:
            others *= factor_of(second_operand, expert, SECOND_FORMAT)
        sums = activated(sums, ACTIVATION, PRECISION == "ieee") * others
        if PRECISION == "tf32":
            sums = rounded(sums, PRECISION)
    tl.store(y + pair[None, :] * N + n, sums.to(y.dtype.element_ty), (n < N) & has[None, :])


# Pairs up to which each reads its weights alone. 2026-11-15, H200.
ALONE = 32


class Groups:
    """Pairs in the order of their experts, and the tiles they make."""

    def __init__(self, ids, experts, block):
        self.pairs, self.choices, self.block = ids.numel(), ids.shape[1], block
        self.count = self.pairs // block + experts
        self.order = torch.empty(self.pairs, dtype=torch.int32, device=ids.device)
        self.tiles = torch.empty((self.count, 3), dtype=torch.int32, device=ids.device)
        chunk = min(4096, max(128, triton.next_power_of_2(self.pairs)))
        group_pairs_kernel[(experts,)](
            ids, self.order, self.tiles, self.pairs, self.choices, *ids.stride(),
            CHUNK=chunk, BLOCK=block, num_warps=max(1, chunk // 256),
        )  # fmt: skip


def sizes(precision, gated):
    """BLOCK_M, BLOCK_N, BLOCK_K, warps, stages. 2026-11-15, H200."""
    if precision == "bf16":
        return (64, 64, 128, 4, 3)
    return (32, 32, 32, 4, 2)


def grouped(x, steps, groups, first, second, activation, y, precision, launch):
    """Fill y [pairs, N] from x, whose row for a pair lies at (token, choice) . steps."""
    _, N, K = first.shape
    block_m, block_n, block_k, warps, stages = launch
    one, other = operand(first), operand(second if second is not None else first)
    grouped_kernel[(groups.count, triton.cdiv(N, block_n))](
        x, one.operand, other.operand, y, groups.order, groups.tiles, N, K, groups.choices, *steps,
        FORMAT=one.format, FACTOR=one.scaled, GATED=second is not None, SECOND_FORMAT=other.format,
        SECOND_FACTOR=other.scaled, ACTIVATION=activation, EVEN=K % block_k == 0, PRECISION=precision,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def pair_steps(x):
    """x with whole rows, and its steps from token to token and from choice to choice."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, (x.stride(0), x.stride(1) if x.ndim == 3 else 0)


def expert_qmm(x, ids, w, *, out=None):
    y = torch.empty((*ids.shape, w.shape[1]), dtype=x.dtype, device=x.device) if out is None else out
    if ids.numel() == 0:
        return y
    if ids.numel() <= ALONE:
        return matvec.chosen(x, ids, w, y)
    if not y.is_contiguous():
        return y.copy_(expert_qmm(x, ids, w))
    precision = precision_of(x)
    x, steps = pair_steps(x)
    launch = sizes(precision, False)
    groups = Groups(ids, w.shape[0], launch[0])
    return grouped(x, steps, groups, w, None, 0, y, precision, launch)


def expert_mlp(x, ids, experts, activation="silu", *, out=None):
    _, hidden, inner = experts.down.shape
    y = torch.empty((*ids.shape, hidden), dtype=x.dtype, device=x.device) if out is None else out
    if ids.numel() == 0:
        return y
    if ids.numel() <= ALONE:
        between = matvec.chosen_gate_up(x, ids, experts.gate, experts.up, activation, precise=x.dtype == torch.float32)
        return matvec.chosen(between, ids, experts.down, y)
    if not y.is_contiguous():
        return y.copy_(expert_mlp(x, ids, experts, activation))
    precision = precision_of(x)
    x, steps = pair_steps(x)
    launch = sizes(precision, True)
    groups = Groups(ids, experts.down.shape[0], launch[0])
    kept = torch.bfloat16 if precision == "bf16" else torch.float32
    between = torch.empty((*ids.shape, inner), dtype=kept, device=x.device)
    grouped(x, steps, groups, experts.gate, experts.up, ACTIVATIONS[activation], between, precision, launch)
    own = (between.stride(0), between.stride(1))
    return grouped(between, own, groups, experts.down, None, 0, y, precision, sizes(precision, False))
