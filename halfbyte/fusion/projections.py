"""Projections: of one input by weights that lie together, with the norm before them, and the sum behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..graph import Book, Call, addresses, call
from ..ops.dispatch import find
from ..ops.formats import Packed
from .matching import language, options
from .together import Views, form, joinable, laid_together


def side_by_side(calls: list[Call], may: Callable[[Sequence[Packed]], bool] | None = None) -> list[Call]:
    """Projections of one input by weights of one format, which `may` be joined, become one, of which each result is a
    part."""
    groups: dict[tuple[object, ...], list[Call]] = {}
    for one in calls:
        if one.name == "qmm" and joinable(one.args[1]) and len(one.args[1].shape) == 2:
            x = one.args[0]
            if one.kwargs.get("transpose", True) and x.ndim == 2:
                key = (x.data_ptr(), x.shape, x.stride(), x.dtype, *form(one.args[1]))
                groups.setdefault(key, []).append(one)
    place, views = {one: index for index, one in enumerate(calls)}, Views(calls)
    replaced: dict[Call, Call] = {}
    dropped: set[Call] = set()
    for group in groups.values():
        x, between = group[0].args[0], calls[place[group[0]] : place[group[-1]]]
        if len(group) == 1 or any(addresses(x) & one.writes for one in between):
            continue
        if may is not None and not may([one.args[1] for one in group]):
            continue
        widths = [one.result.shape[1] for one in group]
        y = torch.empty((x.shape[0], sum(widths)), dtype=x.dtype, device=x.device)
        if not views.point(zip((one.result for one in group), y.split(widths, 1), strict=True)):
            continue
        joined = laid_together([one.args[1] for one in group], (sum(widths), x.shape[1]))
        replaced[group[0]] = call("qmm", group[0].run, (x, joined), {"transpose": True, "out": y}, y, (), group)
        dropped |= set(group[1:])
    return [replaced.get(one, one) for one in calls if one not in dropped]


def add_to_stream(calls: list[Call]) -> list[Call]:
    """rms_norm(h, add=qmm(x, w)): the projection adds to the stream itself, and the norm is left with the new one."""
    book = Book(calls)
    replaced: dict[Call, Call] = {}
    for norm in calls:
        made = book.maker(norm.kwargs.get("add"), "qmm") if norm.name == "rms_norm" else None
        if made is None or options(norm) - {"extra_dtype"} != {"add", "return_sum"} or made in replaced:
            continue
        kernel, takes = (find(language(made), "fused_projections", name) for name in ("qmm_onto_stream", "takes"))
        (x, w), h, (normed, total, *copy) = made.args, norm.args[0], norm.result
        if kernel is None or takes is None or not made.kwargs.get("transpose", True) or not takes(x, w):
            continue
        whole = same(made.result, norm.kwargs["add"]) and h.ndim == 2 and h.stride(1) == 1 and total.is_contiguous()
        maker = book.makers.get(h.untyped_storage().data_ptr())
        there = maker is None or book.place[maker] < book.place[made]
        between = calls[book.place[made] : book.place[norm]]
        if not whole or not there or not book.read_once(made) or written(h, between):
            continue
        replaced[made] = call("qmm_onto_stream", kernel, (x, w, h), {"out": total}, total, (), (made,))
        out = (normed, *copy) if copy else normed
        settings = {**norm.kwargs, "add": None, "return_sum": False, "out": out}
        replaced[norm] = call("rms_norm", norm.run, (total, *norm.args[1:]), settings, out, (), (norm,))
    return [replaced.get(one, one) for one in calls]


READS_NORMED = {"qmm": "normed_qmm", "expert_mlp": "normed_expert_mlp"}  # what such a call becomes
TAKES_NORM = {"choose_experts"}  # fused calls that take a norm as they are


class Split(NamedTuple):
    """A norm between who makes the stream and who reads it normed."""

    maker: Call
    weighted: Tensor
    readers: list[Call]


def norm_first(calls: list[Call]) -> list[Call]:
    """A norm between projections is shared out among them (kernels/triton/stream.py), and costs no launch.

    Who makes the stream puts stream . weight where the norm had its result, and the squares of its blocks of outputs
    beside; who reads that multiplies results by what the norm would have multiplied its input by.
    """
    book, readers = Book(calls), readers_of(calls)
    replaced: dict[Call, Call] = {}
    dropped: set[Call] = set()
    for norm in calls:
        found = find_split(norm, book, readers)
        if found is None or found.maker in replaced:
            continue
        (h, weight, eps), maker = norm.args, found.maker
        together = find(language(maker), "fused_projections", "outputs_together")
        rest = find(language(maker), "stream", "Norm")
        assert together is not None and rest is not None
        squares = torch.empty(h.shape[0], -(-h.shape[1] // together(*maker.args[:2])), device=h.device)
        kept = (weight, found.weighted, squares)
        replaced[maker] = replace(
            maker, kwargs={**maker.kwargs, "keep": kept}, reads=maker.reads | addresses(weight),
            writes=maker.writes | addresses(kept[1:]), parts=(*maker.parts, *norm.parts),
        )  # fmt: skip
        replaced |= {one: with_norm(one, rest(squares, eps)) for one in found.readers}
        dropped.add(norm)
    return [replaced.get(one, one) for one in calls if one not in dropped]


def find_split(norm: Call, book: Book, readers: dict[int, list[Call]]) -> Split | None:
    """The neighbours of a norm, if all of them can take their share of it."""
    if norm.name != "rms_norm" or not options(norm) <= {"extra_dtype"} or norm.args[1] is None:
        return None
    h, weight, _ = norm.args
    maker = book.makers.get(h.untyped_storage().data_ptr())
    results = [(y, found) for y in (norm.result if isinstance(norm.result, tuple) else (norm.result,))
               if (found := readers.get(y.untyped_storage().data_ptr(), []))]  # fmt: skip
    if maker is None or maker.name != "qmm_onto_stream" or not same(maker.result, h) or len(results) != 1:
        return None
    (y, found), able = results[0], find(language(maker), "fused_projections", "weighs")
    if able is None or not able(y.dtype) or not weight.is_contiguous() or y.ndim != 2 or y.stride(1) != 1:
        return None
    if maker.kwargs.get("keep") is not None:
        return None
    return Split(maker, y, found) if all(can_norm(one, y) for one in found) else None


def can_norm(one: Call, y: Tensor) -> bool:
    """Whether a call that reads y, a norm's result, could do the rest of it: it reads y first, and nowhere else."""
    if not one.args or not isinstance(one.args[0], Tensor) or not same(one.args[0], y):
        return False
    if addresses((one.args[1:], {**one.kwargs, "out": None})) & addresses(y) or one.kwargs.get("norm") is not None:
        return False
    if one.name in TAKES_NORM:
        return True
    kind = "takes_experts" if one.name == "expert_mlp" else "takes"
    takes = find(language(one), "fused_projections", kind) if one.name in READS_NORMED else None
    if takes is None or not one.kwargs.get("transpose", True):
        return False
    return bool(takes(y, *one.args[1 : 3 if one.name == "expert_mlp" else 2]))


def with_norm(one: Call, norm: object) -> Call:
    """The call, with the rest of a norm to do."""
    name, reads = READS_NORMED.get(one.name), one.reads | addresses(norm)
    if name is None:
        return replace(one, kwargs={**one.kwargs, "norm": norm}, reads=reads)
    kernel = find(language(one), "fused_projections", name)
    assert kernel is not None
    return replace(one, name=name, run=kernel, kwargs={"norm": norm, "out": one.result}, reads=reads)


def readers_of(calls: Sequence[Call]) -> dict[int, list[Call]]:
    """Who reads what lies at an address, as tensors lie now."""
    readers: dict[int, list[Call]] = {}
    for one in calls:
        for address in addresses((one.args, one.kwargs)) - addresses(one.result):
            readers.setdefault(address, []).append(one)
    return readers


def same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def written(value: Tensor, calls: Sequence[Call]) -> bool:
    return any(addresses(value) & one.writes for one in calls)
