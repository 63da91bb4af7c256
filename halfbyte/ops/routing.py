"""Mixture of experts: which experts a token goes to, and how their results come back together."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import INTEGERS, deliver, kernel, refuse, require, require_floats, require_out, wide

KINDS = ("softmax", "sigmoid")
ORDERS = ("score", "slot")
NAMED_KINDS, NAMED_ORDERS = f"one of {', '.join(KINDS)}", f"one of {', '.join(ORDERS)}"
MOST_EXPERTS = 4096
EMPTY_SLOT = -1e30


def route(
    logits: Tensor,
    k: int,
    *,
    kind: str = "softmax",
    bias: Tensor | None = None,
    groups: int | None = None,
    keep_groups: int | None = None,
    renormalise: bool = True,
    per_expert_scale: Tensor | None = None,
    scaling: float = 1.0,
    order: str = "score",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best experts of each token and their weights.

    score = softmax(logits) or sigmoid(logits);  choice = score + bias;  ids = the k largest choices, descending;
    weights = score[ids];  weights /= sum(weights) where that is above 0;  weights *= per_expert_scale[ids] scaling

    logits [..., E]   bias, per_expert_scale [E]   ->   ids int32 [..., k], weights float32 [..., k]

    Ties go to the lower id, NaN comes first. Without bias the experts are compared by their logits, which rank as the
    scores do but never collapse by rounding. With `groups`, the experts are that many equal runs; a run's value is the
    sum of its two largest score + bias (or its only one), the `keep_groups` best runs stay (ties to the lower), and the
    others' choices count as -inf. A row of nothing but -inf has NaN weights, as its softmax. float64 gives float64.

    order="slot" is another rule, for plain softmax: k slots begin as id 0 with value -1e30, each expert in turn takes
    the first smallest slot when its float32 probability is strictly larger, and the result stays in slot order. NaN is
    never chosen there: such a row keeps id 0 and weight -1e30. `out` = (ids, weights) must not overlap the inputs.
    """
    _require_route(logits, k, kind, bias, groups, keep_groups, per_expert_scale, order)
    shape = (*logits.shape[:-1], k)
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    require(out is None or (isinstance(out, tuple) and len(out) == 2), "route", "out", "a pair (ids, weights)", out)
    ids_out, weights_out = out or (None, None)
    require_out("route", ids_out, shape, torch.int32, logits.device)
    require_out("route", weights_out, shape, exact, logits.device)
    if found := kernel("routing", "route", logits):
        return found(  # type: ignore[no-any-return]
            logits, k, kind=kind, bias=bias, groups=groups, keep_groups=keep_groups, renormalise=renormalise,
            per_expert_scale=per_expert_scale, scaling=scaling, order=order, out=out,
        )  # fmt: skip
    x = wide(logits)
    score = torch.softmax(x, -1) if kind == "softmax" else torch.sigmoid(x)
    if order == "slot":
        ids, weights = _slots(score, k)
    else:
        biased = score if bias is None else score + wide(bias).to(score.dtype)
        choice = x if bias is None else biased
        if groups is not None and keep_groups is not None:
            choice = choice.masked_fill(~_in_best_groups(biased, groups, keep_groups), float("-inf"))
        ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        weights = score.gather(-1, ids)
    if renormalise:
        total = weights.sum(-1, keepdim=True)
        weights = torch.where(total > 0, weights / total, weights)
    if per_expert_scale is not None:
        weights = weights * wide(per_expert_scale).to(weights.dtype)[ids]
    return deliver(ids, torch.int32, ids_out), deliver(weights * scaling, exact, weights_out)


def _in_best_groups(choice: Tensor, groups: int, keep: int) -> Tensor:
    """Which experts [..., E] lie in the `keep` groups whose two largest choices have the largest sums."""
    grouped = choice.unflatten(-1, (groups, -1))
    value = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    best = value.sort(dim=-1, descending=True, stable=True).indices[..., :keep]
    kept = torch.zeros_like(value, dtype=torch.bool).scatter_(-1, best, True)
    return kept[..., None].expand(grouped.shape).flatten(-2)


def _slots(score: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values = torch.full((*score.shape[:-1], k), EMPTY_SLOT, dtype=score.dtype, device=score.device)
    ids = torch.zeros(values.shape, dtype=torch.int64, device=score.device)
    for expert in range(score.shape[-1]):
        value, slot = score[..., expert, None], values.argmin(-1, keepdim=True)
        larger = value > values.gather(-1, slot)
        values.scatter_(-1, slot, torch.where(larger, value, values.gather(-1, slot)))
        ids.scatter_(-1, slot, torch.where(larger, expert, ids.gather(-1, slot)))
    return ids, values


def _require_route(
    logits: Tensor,
    k: int,
    kind: str,
    bias: Tensor | None,
    groups: int | None,
    keep_groups: int | None,
    per_expert_scale: Tensor | None,
    order: str,
) -> None:
    require(isinstance(logits, Tensor), "route", "logits", "a tensor", logits)
    require_floats("route", logits.device, logits=logits, bias=bias, per_expert_scale=per_expert_scale)
    E = logits.shape[-1] if logits.ndim else 0
    if not 1 <= E <= MOST_EXPERTS:
        refuse("route", "logits", f"[..., E] with 1 <= E <= {MOST_EXPERTS}", logits)
    require(isinstance(k, int) and 1 <= k <= E, "route", "k", "an integer from 1 to E", k, logits)
    require(kind in KINDS, "route", "kind", NAMED_KINDS, kind)
    require(order in ORDERS, "route", "order", NAMED_ORDERS, order)
    for name, each in (("bias", bias), ("per_expert_scale", per_expert_scale)):
        require(each is None or each.shape == (E,), "route", name, "[E], the last axis of logits", each, logits)
    both = (groups is None) == (keep_groups is None)
    require(both, "route", "groups and keep_groups", "given together", groups, keep_groups)
    if groups is not None and keep_groups is not None:
        require(
            isinstance(groups, int) and groups >= 1 and E % groups == 0, "route", "groups", "a divisor of E", groups
        )
        fits = isinstance(keep_groups, int) and 1 <= keep_groups <= groups
        require(fits, "route", "keep_groups", "an integer from 1 to groups", keep_groups, groups)
        require(k <= keep_groups * (E // groups), "route", "k", "at most the experts of the groups that stay", k)
    plain = kind == "softmax" and bias is None and groups is None
    require(order == "score" or plain, "route", 'order="slot"', "used with softmax, without bias and groups", kind)


def combine(
    y: Tensor,
    weights: Tensor,
    *,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(residual + sum_a weights_a y_a) + sigmoid(shared_gate) shared, summed in float32 in the order a = 0, 1, ...

    y [..., A, D]   weights [..., A]   residual, shared [..., D]   shared_gate [...] or [..., 1]   ->   [..., D]

    shared_gate is a logit; without it shared counts once. The result has y's dtype, and is rounded once.

    With `tokens` (int32 or int64 [M]), y is [M, D], weights [M] and residual [T, D]: the result is residual with
    weights[m] y[m] added to row tokens[m], in the order m = 0, 1, ...; a token may occur many times. shared and
    shared_gate have no place there. `out` may be residual or shared (the very same tensor), but not y.
    """
    require(isinstance(y, Tensor), "combine", "y", "a tensor", y)
    require_floats("combine", y.device, y=y, weights=weights, residual=residual, shared=shared, shared_gate=shared_gate)
    if tokens is None:
        shape = _require_combine(y, weights, residual, shared, shared_gate)
    else:
        shape = _require_bucket(y, weights, residual, shared, shared_gate, tokens)
    require_out("combine", out, shape, y.dtype, y.device)
    require(out is not y, "combine", "out", "another tensor than y")
    if found := kernel("routing", "combine", y):
        return found(  # type: ignore[no-any-return]
            y, weights, residual=residual, shared=shared, shared_gate=shared_gate, tokens=tokens, out=out
        )
    expert = wide(y)
    exact = expert.dtype
    w = wide(weights).to(exact)
    if tokens is not None and residual is not None:
        rows = wide(residual).to(exact, copy=True)
        return deliver(rows.index_add_(0, tokens.long(), w[:, None] * expert), y.dtype, out)
    result = w[..., 0, None] * expert[..., 0, :]
    for a in range(1, y.shape[-2]):
        result = result + w[..., a, None] * expert[..., a, :]
    result = result if residual is None else wide(residual).to(exact) + result
    if shared is not None:
        extra = wide(shared).to(exact)
        if shared_gate is not None:
            extra = torch.sigmoid(wide(shared_gate).to(exact)).reshape(*shape[:-1], 1) * extra
        result = result + extra
    return deliver(result, y.dtype, out)


def _require_combine(
    y: Tensor, weights: Tensor, residual: Tensor | None, shared: Tensor | None, shared_gate: Tensor | None
) -> tuple[int, ...]:
    fits = y.ndim >= 2 and y.shape[-2] > 0 and y.shape[-1] > 0
    require(fits, "combine", "y", "[..., A, D] with A > 0 and D > 0", y)
    require(weights.shape == y.shape[:-1], "combine", "weights", "[..., A] of y [..., A, D]", weights, y)
    shape = (*y.shape[:-2], y.shape[-1])
    for name, each in (("residual", residual), ("shared", shared)):
        if each is not None and each.shape != shape:
            refuse("combine", name, f"of shape {list(shape)}", each)
    if shared_gate is not None:
        require(shared is not None, "combine", "shared_gate", "given only with shared")
        one_each = shared_gate.shape in (shape[:-1], (*shape[:-1], 1))
        require(one_each, "combine", "shared_gate", "[...] or [..., 1] of y [..., A, D]", shared_gate, y)
    return shape


def _require_bucket(
    y: Tensor,
    weights: Tensor,
    residual: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    tokens: Tensor,
) -> tuple[int, ...]:
    require(isinstance(tokens, Tensor), "combine", "tokens", "a tensor", tokens)
    require(tokens.dtype in INTEGERS and tokens.ndim == 1, "combine", "tokens", "int32 or int64 [M]", tokens)
    require(tokens.device == y.device, "combine", "tokens", "on y's device", tokens, y)
    require(y.ndim == 2 and y.shape[1] > 0, "combine", "y", "[M, D] with D > 0 beside tokens", y)
    require(y.shape[0] == tokens.shape[0], "combine", "y", "[M, D] with one row a token", y, tokens)
    require(weights.shape == tokens.shape, "combine", "weights", "[M] beside tokens", weights, tokens)
    require(shared is None and shared_gate is None, "combine", "shared and shared_gate", "absent beside tokens")
    if residual is None:
        raise ValueError("combine: residual must be given beside tokens")
    fits = residual.ndim == 2 and residual.shape[1] == y.shape[1]
    require(fits, "combine", "residual", "[T, D] beside tokens", residual, y)
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = tokens.aminmax()
        inside = int(low) >= 0 and int(high) < residual.shape[0]
        require(inside, "combine", "tokens", f"from 0 to {residual.shape[0] - 1}", int(low), int(high))
    return tuple(residual.shape)
