"""Experts: the one that all tokens take beside those that are chosen, and what is done with their results."""

from __future__ import annotations

from collections.abc import Sequence
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


class Weighted(NamedTuple):
    """Experts whose results are added up, and the norm that adds the sum to the stream, if nothing else reads it."""

    chosen: Call
    summed: Call
    norm: Call | None


def down_and_add(calls: list[Call]) -> list[Call]:
    """combine(expert_mlp(x, ids)), and the stream that a norm adds it to: results never leave the down projection.

    expert_mlp and combine become gate_and_up and down_and_add, one behind the other: the second reads early what was
    there before the first (kernels/triton/fused_experts.py). The norm is left with the new stream.
    """
    book = Book(calls)
    replaced: dict[Call, list[Call]] = {}
    for end in calls:
        found = find_weighted(end, book, calls) if end.name == "combine" else None
        if found is None:
            continue
        chosen, summed, norm = found
        first, second, kept = (
            find(language(chosen), "fused_experts", name) for name in ("gate_and_up", "down_and_add", "between_type")
        )
        if first is None or second is None or kept is None:
            continue
        (x, ids, experts, *more), (_, weights) = chosen.args, summed.args
        between = torch.empty((*ids.shape, experts.gate.shape[1]), dtype=kept(x, experts), device=x.device)
        up = call("gate_and_up", first, (x, ids, experts, *more), {"out": between}, between, (), (chosen,))
        h, total = (None, summed.result) if norm is None else (norm.args[0], norm.result[1])
        args = (between, ids, weights, summed.kwargs["shared_gate"], experts.down, h)
        down = call("down_and_add", second, args, {"out": total}, total, (), (summed,))
        replaced |= {chosen: [], summed: [up, down]}
        if norm is not None:
            normed, _, *copy = norm.result
            out = (normed, *copy) if copy else normed
            settings = {**norm.kwargs, "add": None, "return_sum": False, "out": out}
            replaced[norm] = [call("rms_norm", norm.run, (total, *norm.args[1:]), settings, out, (), (norm,))]
    return [made for one in calls for made in replaced.get(one, [one])]


def find_weighted(summed: Call, book: Book, calls: Sequence[Call]) -> Weighted | None:
    (y, weights), given = summed.args, summed.kwargs
    chosen, shared = book.maker(y, "expert_mlp"), given["shared"]
    if chosen is None or y.ndim != 3 or given["residual"] is not None or given["tokens"] is not None:
        return None
    x, ids, experts = chosen.args[:3]
    takes = find(language(chosen), "fused_experts", "takes")
    beside = book.maker(shared, "expert_mlp") is chosen
    if takes is None or beside is not (shared is not None) or ids.shape[1] != y.shape[1] + beside or x.ndim != 2:
        return None
    between = calls[book.place[chosen] : book.place[summed]]
    moves = not any(addresses((x, ids)) & one.writes for one in between)
    if not moves or not weights.is_contiguous() or not book.read_once(chosen) or not takes(x, ids, experts):
        return None
    norms = (one for one in calls if one.name == "rms_norm" and book.maker(one.kwargs.get("add"), "combine") is summed)
    norm = next(norms, None)
    if norm is not None and (
        options(norm) - {"extra_dtype"} != {"add", "return_sum"} or not book.read_once(summed)
        or norm.args[0].ndim != 2 or not all(t.stride(-1) == 1 for t in (norm.args[0], norm.result[1]))
    ):  # fmt: skip
        norm = None
    return Weighted(chosen, summed, norm)


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
