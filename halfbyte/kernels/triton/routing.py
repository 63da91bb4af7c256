"""Routing and combining on a GPU.

route: a warp owns a token, its experts' values in registers as integers that compare as the values do. Each of the k
rounds finds the largest value, then the lowest id that has it, and marks the winner as taken; the chosen logits are
read again for their weights. Logits of 16 bits leave room for the id beside them: there a round is one reduction, and
its result has all that weights need. A few tokens may share a program. Launch sizes depend on the experts alone, so a
token's bits do not depend on its batch.

combine: a program owns some columns of a token and adds up its experts in order, eight rows in flight. With buckets it
looks for its token in the list, so that rows are added in the list's order without atomics.
"""

import torch
import triton
import triton.language as tl

from .device import overlap
from .elementary import begin_early, precise_exp, rounded
from .rowwise import delivered
from .stacks import prefetch_columns

NOTHING = tl.constexpr(-0x80000000)  # below the order of every value
MINUS_INFINITY = tl.constexpr(-0x7F800001)  # the order of -inf
NOT_A_NUMBER = tl.constexpr(0x7FFFFFFF)  # above the order of every number
NO_INDEX = tl.constexpr(0x7FFFFFFF)
EMPTY_SLOT = tl.constexpr(-1e30)
IDS = tl.constexpr(0x1FFF)  # where a key has an id: the bits of a float32 that one widened from 16 bits leaves empty

# 2026-11-15, H200, 2048 tokens, medians in a graph. Tokens (each with a warp) of a program: with 128 experts 4 take
# 3.3 us and 1 takes 3.8, with 256 it is 5.0 either way; with 512 experts (8.4 against 11.1 us) or groups (5.5 against
# 8.6 us) Triton gives a token's values to several warps unless there is but one.
TOKENS, FEW_EXPERTS, WARP_EXPERTS = 4, 256, 1024
# A token of 8 x 2048 and 2048 of them: 1.44 and 24.3 us; 1.45 and 24.3 with 1024 columns and 4 warps.
COLUMNS, COLUMN_WARPS = 512, 2
# 2048 rows to 2048 tokens: 11.2 us.
BUCKET_COLUMNS, BUCKET_IDS, BUCKET_WARPS = 2048, 1024, 4


@triton.jit
def order_of(value):
    """An integer for each float32 that is larger for what comes first: NaN, then larger values; -0 equals 0."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, NOT_A_NUMBER, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def value_of(order):
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def first_of(order, index, axis: tl.constexpr):
    """The index of the largest order, the lowest where it occurs again."""
    best = tl.max(order, axis, keep_dims=True)
    return tl.min(tl.where(order == best, index, NO_INDEX), axis, keep_dims=True)


@triton.jit
def score_of(x, top, total, SIGMOID: tl.constexpr):
    if SIGMOID:
        return tl.div_rn(1.0, 1.0 + precise_exp(-x))
    else:
        return tl.div_rn(precise_exp(x - top), total)


@triton.jit
def in_best_groups(order, TOKENS: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, SIZE: tl.constexpr,
                   PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr):  # fmt: skip
    """Which experts lie in the KEEP groups whose two largest values have the largest sums."""
    order = tl.reshape(order, [TOKENS, PADDED_GROUPS, PADDED_SIZE])
    member = tl.arange(0, PADDED_SIZE)[None, None, :]
    value = value_of(tl.max(order, 2))
    if SIZE > 1:
        value += value_of(tl.max(tl.where(member == first_of(order, member, 2), NOTHING, order), 2))
    group = tl.arange(0, PADDED_GROUPS)[None, :]
    rank = tl.where(group < GROUPS, order_of(value), NOTHING)
    kept = tl.zeros([TOKENS, PADDED_GROUPS], tl.int32)
    for _ in range(KEEP):
        best = group == first_of(rank, group, 1)
        kept = tl.where(best, 1, kept)
        rank = tl.where(best, NOTHING, rank)
    kept = tl.broadcast_to(kept[:, :, None], [TOKENS, PADDED_GROUPS, PADDED_SIZE])
    return tl.reshape(kept, [TOKENS, PADDED_GROUPS * PADDED_SIZE]) > 0


@triton.jit
def best_experts(order, expert, K: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr):
    """The ids of the K largest orders, descending, ties to the lower id."""
    slot = tl.arange(0, SLOTS)[None, :]
    ids = tl.zeros([TOKENS, SLOTS], tl.int32)
    for i in range(K):
        winner = first_of(order, expert, 1)
        ids = tl.where(slot == i, winner, ids)
        order = tl.where(expert == winner, NOTHING, order)
    return ids


@triton.jit
def key_of(x, expert, valid):
    """An integer for each value x widened from 16 bits and its id: no two are equal, and the first is the largest."""
    return tl.where(valid, (order_of(x) & ~IDS) | (expert ^ IDS), NOTHING)


@triton.jit
def best_by_key(x, expert, valid, K: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr):
    """As best_experts, for values x widened from 16 bits; and the values of those chosen. Past K, ids are IDS."""
    key = key_of(x, expert, valid)
    slot = tl.arange(0, SLOTS)[None, :]
    chosen = tl.full([TOKENS, SLOTS], NOTHING, tl.int32)
    for i in range(K):
        best = tl.max(key, 1, keep_dims=True)
        chosen = tl.where(slot == i, best, chosen)
        key = tl.where(key == best, NOTHING, key)
    return (chosen & IDS) ^ IDS, value_of(tl.where(chosen < 0, chosen | IDS, chosen & ~IDS))


@triton.jit
def fill_slots(score, expert, valid, K: tl.constexpr, SLOTS: tl.constexpr):
    """The rule of order="slot" for one token: from each expert that enters, straight to the next that can."""
    slot = tl.arange(0, SLOTS)[None, :]
    # Slots beyond K are never the smallest.
    values = tl.where(slot < K, EMPTY_SLOT, float("inf"))
    ids = tl.zeros([1, SLOTS], tl.int32)
    last, lowest = -1, EMPTY_SLOT
    entering = tl.min(tl.where(valid & (score > lowest), expert, NO_INDEX))
    while entering != NO_INDEX:
        value = tl.max(tl.where(expert == entering, score, EMPTY_SLOT))
        # values hold no NaN here: one is never larger than a slot.
        spot = slot == tl.min(tl.where(values == lowest, slot, NO_INDEX))
        values, ids = tl.where(spot, value, values), tl.where(spot, entering, ids)
        last, lowest = entering, tl.min(values)
        entering = tl.min(tl.where(valid & (score > lowest) & (expert > last), expert, NO_INDEX))
    return ids, values


@triton.jit
def experts_of(GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr):
    """Ids [1, E] of GROUPS runs of SIZE experts (one run where there are no groups), each padded to a power of two; and
    which of them are there."""
    place = tl.arange(0, PADDED_GROUPS * PADDED_SIZE)[None, :]
    if SIZE == PADDED_SIZE:
        expert, valid = place, place < GROUPS * SIZE
    else:
        expert = place // PADDED_SIZE * SIZE + place % PADDED_SIZE
        valid = (place // PADDED_SIZE < GROUPS) & (place % PADDED_SIZE < SIZE)
    return expert, valid


@triton.jit
def best_and_weights(
    x, logits, present, bias, NARROW: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
    SIZE: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, SLOT_ORDER: tl.constexpr,
    TOKENS: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The ids of the experts chosen by logits x [TOKENS, E], and their scores [TOKENS, SLOTS].

    `logits` [TOKENS, 1] is where they lie in memory; NARROW: they were widened from 16 bits.
    """
    expert, valid = experts_of(GROUPS, SIZE, PADDED_GROUPS, PADDED_SIZE)
    KEYS: tl.constexpr = NARROW and bias is None and KEEP == GROUPS and not SLOT_ORDER
    top, total = 0.0, 1.0
    if not SIGMOID and not (KEYS and RENORMALISE):
        top = tl.max(tl.where(valid, x, float("-inf")), 1, keep_dims=True)
        total = tl.sum(tl.where(valid, precise_exp(x - top), 0.0), 1, keep_dims=True)
    if SLOT_ORDER:
        tl.static_assert(TOKENS == 1)
        return fill_slots(score_of(x, top, total, SIGMOID), expert, valid, K, SLOTS)
    elif KEYS:
        ids, chosen = best_by_key(x, expert, valid, K, TOKENS, SLOTS)
        if not SIGMOID and RENORMALISE:  # which divides the total of all out again
            first = tl.arange(0, SLOTS)[None, :] == 0
            top = tl.sum(tl.where(first, chosen, 0.0), 1, keep_dims=True)
        return ids, score_of(chosen, top, total, SIGMOID)
    else:
        order = tl.where(valid, order_of(x), NOTHING)
        if bias is not None or KEEP < GROUPS:
            biased = score_of(x, top, total, SIGMOID)
            if bias is not None:
                biased += tl.load(bias + expert, valid, 0).to(tl.float32)
            by_score = tl.where(valid, order_of(biased), NOTHING)
            if bias is not None:
                order = by_score
            if KEEP < GROUPS:
                stays = in_best_groups(by_score, TOKENS, GROUPS, KEEP, SIZE, PADDED_GROUPS, PADDED_SIZE)
                order = tl.where(valid & ~stays, MINUS_INFINITY, order)
        ids = best_experts(order, expert, K, TOKENS, SLOTS)
        chosen = tl.load(logits + ids, present, 0, cache_modifier=".cg").to(tl.float32)  # past the L1: they are new
        return ids, score_of(chosen, top, total, SIGMOID)


@triton.jit
def choose(
    x, logits, token, present, bias, expert_scale, scaling, ids_out, ids_row, weights_out, NARROW: tl.constexpr,
    K: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, SIZE: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr, SLOT_ORDER: tl.constexpr, TOKENS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """What route does for tokens [TOKENS, 1], those that are `present`; x and logits are as in best_and_weights."""
    ids, weights = best_and_weights(
        x, logits, present, bias, NARROW, K, GROUPS, KEEP, SIZE, SIGMOID, RENORMALISE, SLOT_ORDER, TOKENS,
        PADDED_GROUPS, PADDED_SIZE, SLOTS,
    )  # fmt: skip
    slot = tl.arange(0, SLOTS)[None, :]
    if RENORMALISE:
        whole = tl.sum(tl.where(slot < K, weights, 0.0), 1, keep_dims=True)
        weights = tl.where(whole > 0, tl.div_rn(weights, whole), weights)
    if expert_scale is not None:
        weights *= tl.load(expert_scale + ids, slot < K, 0).to(tl.float32)
    written = present & (slot < K)
    tl.store(ids_out + token * ids_row + slot, ids, written)
    tl.store(weights_out + token * K + slot, weights * scaling, written)


@triton.jit
def route_kernel(
    logits, row_stride, bias, expert_scale, scaling, ids_out, ids_row, weights_out, rows, K: tl.constexpr,
    GROUPS: tl.constexpr, KEEP: tl.constexpr, SIZE: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    SLOT_ORDER: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr, SLOTS: tl.constexpr,
    TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP and bias is not None:
        prefetch_columns(bias, GROUPS * SIZE, PADDED_GROUPS * PADDED_SIZE)
    if OVERLAP and expert_scale is not None:
        prefetch_columns(expert_scale, GROUPS * SIZE, PADDED_GROUPS * PADDED_SIZE)
    begin_early(OVERLAP)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    present = token < rows
    NARROW: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 16
    logits += token * row_stride
    expert, valid = experts_of(GROUPS, SIZE, PADDED_GROUPS, PADDED_SIZE)
    x = tl.load(logits + expert, present & valid, 0).to(tl.float32)
    choose(
        x, logits, token, present, bias, expert_scale, scaling, ids_out, ids_row, weights_out, NARROW, K, GROUPS, KEEP,
        SIZE, SIGMOID, RENORMALISE, SLOT_ORDER, TOKENS, PADDED_GROUPS, PADDED_SIZE, SLOTS,
    )  # fmt: skip


def contiguous_rows(t):
    """[..., D] as [rows, D] of whole rows."""
    flat = t.reshape(-1, t.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def destination(shape, dtype, device, out):
    """The given tensor where its rows are whole, and one behind the other or in two axes; else a new one."""
    fits = out is not None and (out.is_contiguous() or (out.ndim == 2 and out.stride(1) == 1))
    return out if fits else torch.empty(shape, dtype=dtype, device=device)


def contiguous_destination(shape, dtype, device, out):
    return out if out is not None and out.is_contiguous() else torch.empty(shape, dtype=dtype, device=device)


def route_launch(padded, plain):
    """Tokens and warps of a program: a warp a token, until a token's experts are too many for one."""
    if padded > WARP_EXPERTS:
        return 1, min(16, padded // 512)
    return (TOKENS, TOKENS) if plain and padded <= FEW_EXPERTS else (1, 1)


def route_options(E, k, kind, groups, keep_groups, renormalise, order):
    """What a kernel that chooses is compiled for."""
    runs, size = groups or 1, E // (groups or 1)
    return {
        "K": k, "GROUPS": runs, "KEEP": keep_groups or 1, "SIZE": size, "SIGMOID": kind == "sigmoid",
        "RENORMALISE": renormalise, "SLOT_ORDER": order == "slot", "PADDED_GROUPS": triton.next_power_of_2(runs),
        "PADDED_SIZE": triton.next_power_of_2(size), "SLOTS": triton.next_power_of_2(k),
    }  # fmt: skip


def route(
    logits, k, *, kind="softmax", bias=None, groups=None, keep_groups=None, renormalise=True, per_expert_scale=None,
    scaling=1.0, order="score", out=None,
):  # fmt: skip
    shape = (*logits.shape[:-1], k)
    ids_out, weights_out = out or (None, None)
    ids = destination(shape, torch.int32, logits.device, ids_out)
    weights = contiguous_destination(shape, torch.float32, logits.device, weights_out)
    if ids.numel():
        x = contiguous_rows(logits)
        rows, E = x.shape
        options = route_options(E, k, kind, groups, keep_groups, renormalise, order)
        padded = options["PADDED_GROUPS"] * options["PADDED_SIZE"]
        tokens, warps = route_launch(padded, groups is None and order == "score")
        route_kernel[(triton.cdiv(rows, tokens),)](
            x, x.stride(0), None if bias is None else bias.contiguous(),
            None if per_expert_scale is None else per_expert_scale.contiguous(), float(scaling), ids,
            ids.stride(0) if ids.ndim == 2 else k, weights, rows, **options, TOKENS=tokens, num_warps=warps,
            **overlap(x.device),
        )  # fmt: skip
    return delivered(ids, ids_out), delivered(weights, weights_out)


@triton.jit
def weighted(y, y_row, y_expert, weights, row, expert, A: tl.constexpr, columns, mask):
    value = tl.load(y + row * y_row + expert * tl.cast(y_expert, tl.int64) + columns, mask, 0).to(tl.float32)
    return tl.load(weights + row * A + expert).to(tl.float32) * value


@triton.jit
def combine_kernel(
    y, y_row, y_expert, weights, residual, residual_row, shared, shared_row, shared_gate, result, result_row, blocks,
    A: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_early(OVERLAP)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < D
    total = tl.zeros([BLOCK], tl.float32)
    whole: tl.constexpr = A // TOGETHER * TOGETHER
    for first in range(0, whole, TOGETHER):
        for a in tl.static_range(TOGETHER):
            total += weighted(y, y_row, y_expert, weights, row, first + a, A, columns, mask)
    for a in tl.static_range(whole, A):
        total += weighted(y, y_row, y_expert, weights, row, a, A, columns, mask)
    if residual is not None:
        total = tl.load(residual + row * residual_row + columns, mask, 0).to(tl.float32) + total
    if shared is not None:
        extra = tl.load(shared + row * shared_row + columns, mask, 0).to(tl.float32)
        if shared_gate is not None:
            extra *= score_of(tl.load(shared_gate + row).to(tl.float32), 0.0, 1.0, True)
        total += extra
    tl.store(result + row * result_row + columns, rounded(total, result.dtype.element_ty), mask)


@triton.jit
def bucket_kernel(
    y, y_row, weights, tokens, M, residual, residual_row, result, result_row, blocks, D: tl.constexpr,
    IN_PLACE: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Some columns of one token: the list is searched in runs of IDS, and what it says of this token is added."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < D
    total = tl.load(residual + token * residual_row + columns, mask, 0).to(tl.float32)
    changed = 0
    for start in range(0, M, IDS):
        m = start + tl.arange(0, IDS)
        m = tl.where(tl.load(tokens + m, m < M, -1) == token, m, NO_INDEX)
        next = tl.min(m)
        while next != NO_INDEX:
            weight = tl.load(weights + next).to(tl.float32)
            value = tl.load(y + next.to(tl.int64) * y_row + columns, mask, 0).to(tl.float32)
            total += weight * value
            changed = 1
            next = tl.min(tl.where(m > next, m, NO_INDEX))
    if changed == 1 or not IN_PLACE:
        tl.store(result + token * result_row + columns, rounded(total, result.dtype.element_ty), mask)


def combine(y, weights, *, residual=None, shared=None, shared_gate=None, tokens=None, out=None):
    D = y.shape[-1]
    shape = (*y.shape[:-2], D) if tokens is None else residual.shape
    result = contiguous_destination(shape, y.dtype, y.device, out)
    if not result.numel():
        return delivered(result, out)
    rows = result.numel() // D
    if tokens is not None:
        source, first = contiguous_rows(y), contiguous_rows(residual)
        block = min(triton.next_power_of_2(D), BUCKET_COLUMNS)
        blocks = triton.cdiv(D, block)
        bucket_kernel[(rows * blocks,)](
            source, source.stride(0), weights.contiguous(), tokens.contiguous(), tokens.numel(), first, first.stride(0),
            result, D, blocks, D, result is residual, block,
            min(triton.next_power_of_2(max(tokens.numel(), 16)), BUCKET_IDS), num_warps=BUCKET_WARPS,
        )  # fmt: skip
        return delivered(result, out)
    A = y.shape[-2]
    source = y.reshape(rows, A, D)
    source = source if source.stride(-1) == 1 else source.contiguous()
    first, second = (None if t is None else contiguous_rows(t) for t in (residual, shared))
    block = min(triton.next_power_of_2(D), COLUMNS)
    blocks = triton.cdiv(D, block)
    combine_kernel[(rows * blocks,)](
        source, source.stride(0), source.stride(1), weights.contiguous(), first,
        0 if first is None else first.stride(0), second, 0 if second is None else second.stride(0),
        None if shared_gate is None else shared_gate.reshape(-1).contiguous(), result, D, blocks, A, D, block,
        TOGETHER=min(8, A), num_warps=COLUMN_WARPS, **overlap(y.device),
    )  # fmt: skip
    return delivered(result, out)
