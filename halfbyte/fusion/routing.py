"""Routers: what scores a token's experts, and the choice among them."""

from __future__ import annotations

import torch

from ..graph import Book, Call, addresses, call
from ..ops.dispatch import find
from .matching import language

WEIGHED_BY = ("kind", "renormalise", "per_expert_scale", "scaling")  # of route's arguments, what else there may be


def choose_experts(calls: list[Call]) -> list[Call]:
    """route(qmm(x, w)): one launch. Other results of the same projection may lie behind the logits."""
    book = Book(calls)
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    for end in calls:
        scores = book.maker(end.args[0], "qmm") if end.name == "route" else None
        if scores is None:
            continue
        kernel, takes = (find(language(end), "fused_router", name) for name in ("choose_experts", "takes"))
        (x, w), (logits, k), (ids, weights) = scores.args, end.args, end.result
        if kernel is None or takes is None or not scores.kwargs.get("transpose", True) or x.ndim != 2:
            continue
        whole = scores.result.is_contiguous() and weights.is_contiguous() and ids.stride(-1) == 1
        first = logits.ndim == 2 and logits.data_ptr() == scores.result.data_ptr() and logits.stride(-1) == 1
        if not whole or not first or not takes(x, w):
            continue
        board = torch.full(logits.shape, -1, dtype=torch.int32, device=x.device)
        settings = {**end.kwargs, "experts": logits.shape[1], "board": board}
        made = (scores.result, ids, weights)
        replaced[scores] = call(
            "choose_experts", kernel, (x, w, k), {**settings, "out": made}, made, board, (scores, end)
        )
        dropped.add(end)
    return [replaced.get(one, one) for one in calls if one not in dropped]


def routed_experts(calls: list[Call]) -> list[Call]:
    """expert_mlp(x, route(logits)): experts that choose themselves. Who else reads ids or weights does so later."""
    book = Book(calls)
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    for chosen in calls:
        route = book.maker(chosen.args[1], "route") if chosen.name == "expert_mlp" else None
        if route is None:
            continue
        names = ("routed_experts", "chooses", "takes")
        kernel, chooses, takes = (find(language(chosen), "fused_experts", name) for name in names)
        (x, ids, experts, *more), (logits, k), (_, weights) = chosen.args, route.args, route.result
        if kernel is None or chooses is None or takes is None or logits.ndim != 2:
            continue
        between = calls[book.place[route] + 1 : book.place[chosen]]
        made = addresses(route.result)
        if any(made & addresses((one.args, one.kwargs)) or addresses(logits) & one.writes for one in between):
            continue
        if not takes(x, ids, experts) or not chooses(logits, weights, route.kwargs):
            continue
        out = (chosen.result, weights)
        settings = {name: route.kwargs[name] for name in WEIGHED_BY if name in route.kwargs} | {"ids": ids, "out": out}
        args = (x, logits, k, experts, *more)
        replaced[chosen] = call("routed_experts", kernel, args, settings, out, ids, (route, chosen))
        dropped.add(route)
    return [replaced.get(one, one) for one in calls if one not in dropped]
