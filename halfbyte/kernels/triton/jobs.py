"""What a program of a kernel for few rows multiplies: which matrix, and which rows.

The matrix is that of a head, that of an expert whose id is known, or one that the program chooses by the router's
logits: a launch less between the router and its experts. Every warp chooses for itself, from registers, so nothing is
shared until the id is found.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .routing import IDS, NOTHING, choose, experts_of, key_of
from .stacks import prefetch, prefetch_table


class Rule(NamedTuple):
    """What a kernel that chooses is compiled for."""

    k: int
    experts: int
    beside: int  # the matrix of an expert that all tokens take, the job behind the chosen ones
    sigmoid: bool
    renormalise: bool
    warps: int


class Choice(NamedTuple):
    """How one token's experts are chosen, as route's arguments say it, and where their weights go. Ids go to `ids`."""

    logits: torch.Tensor  # [1, experts], of 16 bits, its last axis whole
    k: int
    weights: torch.Tensor  # [1, k], whole
    kind: str = "softmax"
    renormalise: bool = True
    per_expert_scale: torch.Tensor | None = None
    scaling: float = 1.0


def choice_arguments(choice, matrices, warps):
    """What a kernel gets, and its Rule; nothing without a choice."""
    if choice is None:
        return None, None
    scale, experts = choice.per_expert_scale, choice.logits.shape[-1]
    rule = Rule(choice.k, experts, matrices - 1, choice.kind == "sigmoid", choice.renormalise, warps)
    return (choice.logits, scale, float(choice.scaling), choice.weights), rule


@triton.jit
def chosen_expert(choice, ids, job, EARLY: tl.constexpr, RULE: tl.constexpr):
    """The expert with the job-th largest logit; they are read past the L1, which nothing may have refreshed.

    One EARLY program leaves ids and weights for the launches that follow.
    """
    PADDED: tl.constexpr = triton.next_power_of_2(RULE.experts)
    logits, expert_scale, scaling, weights = choice
    expert, valid = experts_of(1, RULE.experts, 1, PADDED)
    warp = tl.arange(0, RULE.warps)[:, None]
    inside = valid & (warp >= 0)
    x = tl.load(logits + (expert + 0 * warp), inside, 0, cache_modifier=".cg").to(tl.float32)
    key = key_of(x, expert, inside)
    for _ in range(tl.minimum(job, RULE.k - 1)):
        key = tl.where(key == tl.max(key, 1, keep_dims=True), NOTHING, key)
    if EARLY and (tl.program_id(0) == 0) & (job == 0):
        SLOTS: tl.constexpr = triton.next_power_of_2(RULE.k)
        choose(
            x, logits, 0 * warp, warp == 0, None, expert_scale, scaling, ids, tl.num_programs(1), weights,
            True, RULE.k, 1, 1, RULE.experts, RULE.sigmoid, RULE.renormalise, False, RULE.warps, 1, PADDED, SLOTS,
        )  # fmt: skip
    best = tl.max(tl.max(key, 1), 0)
    return tl.where(job < RULE.k, (best & IDS) ^ IDS, RULE.beside).to(tl.int64)


@triton.jit
def job_of(
    x, ids, choice, w, up, y, K, ROWS, x_row, x_head, y_row, y_head,
    FORMAT: tl.constexpr, GATED: tl.constexpr, M: tl.constexpr, RULE: tl.constexpr, JOBS: tl.constexpr,
    OVERLAP: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What program_id 1, a head, and 2, M rows, are for: the index of their matrix, x and y of the first row there, and
    the rows left from it on.

    A launch that overlaps the one before it (device.overlap) may read weights before it waits, and ids only after: they
    may be as new as x. It lets the next launch start once all its programs have asked for that or ended. Those with ids
    ask after they waited. So whatever came before them is complete when a program of the next launch runs, which may
    read the same ids, or logits, EARLY, before it waits for what they make; past the L1, which nothing may have
    refreshed. AHEAD: x, ids and addresses come to the L2 during the wait, from wherever they are.
    """
    index, row = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if JOBS:
        index, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64) * M
    x += row * x_row + index * x_head
    y += row * y_row + index * y_head
    if OVERLAP:
        if AHEAD and tl.program_id(0) < 4:
            prefetch(x + tl.minimum(64 * tl.arange(0, 64), K - 1))
            if ids is not None:
                prefetch(ids + (row * tl.num_programs(1) + index) + tl.arange(0, 1))
                if FORMAT.apart:
                    prefetch_table(w)
                    if GATED:
                        prefetch_table(up)
        if ids is not None and not EARLY:
            gdc_wait()
        gdc_launch_dependents()
    if RULE is not None:
        index = chosen_expert(choice, ids, tl.program_id(1), EARLY, RULE)
    elif ids is not None:
        at = ids + (row * tl.num_programs(1) + index)
        index = tl.load(at, cache_modifier=".cg" if EARLY else "").to(tl.int64)
    return index, x, y, ROWS - row
