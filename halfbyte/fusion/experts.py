"""Experts: the one that all tokens take beside those that are chosen, and what is done with their results."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..graph import Book, Call, addresses, call
from ..ops.dispatch import find
from ..ops.experts import Experts
from .matching import language, options
from .together import Views, form, joinable, laid_together


class Shared(NamedTuple):
    """The calls of a shared expert beside chosen ones."""

    chosen: Call
    gate: Call
    up: Call
    glu: Call
    down: Call


def shared_expert(calls: list[Call]) -> list[Call]:
    """An expert that every token takes becomes one more of those that are chosen, where it is of their size and form.

    expert_mlp(x, ids) and down(glu(gate x, up x)), which combine adds up, become one expert_mlp of k + 1 experts.
    """
    book, views = Book(calls), Views(calls)
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    passing = frozenset[int]().union(
        *(one.writes for one in calls if one.name == "copy_layer")
    )  # experts of many layers
    for end in calls:
        found = find_shared(end, book) if end.name == "combine" else None
        if found is None or addresses(found.chosen.args[2]) & passing:
            continue
        chosen, gate, up, glu, down = found
        x, ids, experts, *more = chosen.args
        B, k = ids.shape
        all_ids = torch.full((B, k + 1), experts.gate.shape[0], dtype=ids.dtype, device=ids.device)
        y = torch.empty((B, k + 1, experts.gate.shape[2]), dtype=x.dtype, device=x.device)
        if not views.point([(ids, all_ids[:, :k]), (chosen.result, y[:, :k]), (down.result, y[:, k])]):
            continue
        parts = [(experts.gate, gate.args[1]), (experts.up, up.args[1]), (experts.down, down.args[1])]
        stacks = (laid_together(pair, (pair[0].shape[0] + 1, *pair[0].shape[1:])) for pair in parts)
        joined = Experts(*stacks, among=experts.count + 1)
        replaced[chosen] = call("expert_mlp", chosen.run, (x, all_ids, joined, *more), {"out": y}, y, (), found)
        dropped |= {gate, up, glu, down}
    return [replaced.get(one, one) for one in calls if one not in dropped]


def find_shared(end: Call, book: Book) -> Shared | None:
    """The calls whose results a combine adds up, if a shared expert's are among them and nobody else reads these."""
    chosen, down = book.maker(end.args[0], "expert_mlp"), book.maker(end.kwargs.get("shared"), "qmm")
    if chosen is None or down is None or chosen.args[0].ndim != 2:
        return None
    if all(book.maker(chosen.args[1], name) is None for name in ("route", "assign_slots")):
        return None
    glu = book.maker(down.args[0], "glu")
    if glu is None or glu.args[2] != (*chosen.args, "silu")[3]:
        return None
    gate, up = book.maker(glu.args[0], "qmm"), book.maker(glu.args[1], "qmm")
    if gate is None or up is None:
        return None
    experts = chosen.args[2]
    pairs = [(experts.gate, gate.args[1]), (experts.up, up.args[1]), (experts.down, down.args[1])]
    alike = all(joinable(w) and joinable(one) and form(w) == form(one) and w.shape[1:] == one.shape for w, one in pairs)
    same_x = all(one.args[0].data_ptr() == chosen.args[0].data_ptr() for one in (gate, up))
    found = Shared(chosen, gate, up, glu, down)
    return found if alike and same_x and book.read_once(*found) else None


def combine_and_norm(calls: list[Call]) -> list[Call]:
    """rms_norm(h, add=combine(...)): what the experts of a layer leave to the norm of the next one."""
    book = Book(calls)
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    for end in calls:
        summed = book.maker(end.kwargs.get("add"), "combine") if end.name == "rms_norm" else None
        if summed is None or options(end) - {"extra_dtype"} != {"add", "return_sum"} or not book.read_once(summed):
            continue
        kernel = find(language(end), "fused", "combine_and_norm")
        (y, weights), (h, weight, eps), given = summed.args, end.args, summed.kwargs
        flat = y.ndim == 3 and h.ndim == 2 and h.is_contiguous() and weights.is_contiguous() and y.stride(-1) == 1
        alone = given["residual"] is None and given["tokens"] is None
        if kernel is None or weight is None or not flat or not alone:
            continue
        normed, total, *copy = end.result
        read = book.readers[normed.untyped_storage().data_ptr()] > 0
        out = (normed if read or not copy else None, total, copy[0] if copy else None)
        args = (y, weights, given["shared"], given["shared_gate"], h, weight, eps)
        replaced[end] = call("combine_and_norm", kernel, args, {"out": out}, end.result, (), (summed, end))
        dropped.add(summed)
    return [replaced.get(one, one) for one in calls if one not in dropped]
