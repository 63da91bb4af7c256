"""Projections of one input, by weights that lie together."""

from __future__ import annotations

import torch

from ..graph import Call, addresses, call
from .together import form, joinable, laid_together, point


def side_by_side(calls: list[Call]) -> list[Call]:
    """Projections of one input by weights of one format become one, of which each result is a part."""
    groups: dict[tuple[object, ...], list[Call]] = {}
    for one in calls:
        if one.name == "qmm" and joinable(one.args[1]) and len(one.args[1].shape) == 2:
            x = one.args[0]
            if one.kwargs.get("transpose", True) and x.ndim == 2:
                key = (x.data_ptr(), x.shape, x.stride(), x.dtype, *form(one.args[1]))
                groups.setdefault(key, []).append(one)
    place = {one: index for index, one in enumerate(calls)}
    replaced: dict[Call, Call] = {}
    dropped: set[Call] = set()
    for group in groups.values():
        x, between = group[0].args[0], calls[place[group[0]] : place[group[-1]]]
        if len(group) == 1 or any(addresses(x) & one.writes for one in between):
            continue
        widths = [one.result.shape[1] for one in group]
        y = torch.empty((x.shape[0], sum(widths)), dtype=x.dtype, device=x.device)
        if not point(calls, zip((one.result for one in group), y.split(widths, 1), strict=True)):
            continue
        joined = laid_together([one.args[1] for one in group], (sum(widths), x.shape[1]))
        replaced[group[0]] = call("qmm", group[0].run, (x, joined), {"transpose": True, "out": y}, y)
        dropped |= set(group[1:])
    return [replaced.get(one, one) for one in calls if one not in dropped]
