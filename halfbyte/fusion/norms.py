"""Chains of norms around the stream between layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..graph import Book, Call, addresses, call
from ..ops.dispatch import find
from .matching import language, options

LONGEST = 16384  # channels of a row that a program holds


class Source(NamedTuple):
    """What a norm takes: a tensor as it is; or what is normed first: a tensor, or rows added up by their shares."""

    x: Tensor | None
    weight: Tensor | None = None
    shares: Tensor | None = None
    calls: tuple[Call, ...] = ()


class Followers(NamedTuple):
    """Who reads a sum: a copy in another dtype, and norms of either; `alone` where nobody else reads the copy."""

    copy: Call | None
    norms: tuple[Call, ...]
    alone: bool


def norm_chain(calls: list[Call]) -> list[Call]:
    """r = residual + rms_norm(...), with the norms and the sum of experts right before it, and the norms of r, in one.

    Gemma's layers are made of that: what each part leaves is normed, joins the stream, and is normed for the next.
    """
    book = Book(calls)
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    for middle in calls:
        kernel = find(language(middle), "fused_norms", "norm_chain") if joins(middle, book) else None
        if kernel is None:
            continue
        first, second = (source(x, middle, calls, book) for x in (middle.args[0], middle.kwargs.get("add")))
        if second.shares is not None:  # the kernel adds up rows of the first alone
            second = Source(middle.kwargs["add"])
        behind = followers(middle, calls, book)
        parts = [*first.calls, *second.calls, middle, *([behind.copy] if behind.copy else []), *behind.norms]
        if len(parts) == 1 or dropped & set(parts):
            continue
        ys = [y for norm in behind.norms for y in results(norm)]
        weights = [
            w for norm in behind.norms for w in (norm.args[1] if norm.name == "rms_norm_many" else [norm.args[1]])
        ]
        narrow = None if behind.copy is None or behind.alone else behind.copy.result
        (_, weight, eps), given = middle.args, middle.kwargs
        args = (first.x, first.shares, first.weight, second.x, second.weight, weight, given["residual"], given["scale"],
                weights, eps)  # fmt: skip
        out = (results(middle)[0], narrow, *ys)
        replaced[middle] = call("norm_chain", kernel, args, {"out": out}, out, (), parts)
        dropped |= set(parts) - {middle}
    return [replaced.get(one, one) for one in calls if one not in dropped]


def joins(one: Call, book: Book) -> bool:
    """Whether this is a norm of rows that a residual joins, and no other call sees more of it than the result."""
    if one.name != "rms_norm" or not {"residual"} <= options(one) <= {"residual", "add", "scale", "extra_dtype"}:
        return False
    given = [one.args[0], one.kwargs["residual"], *([one.kwargs["add"]] if one.kwargs["add"] is not None else [])]
    plain = all(x.ndim == 2 and x.stride(1) == 1 and x.shape[1] <= LONGEST for x in given)
    return plain and one.args[1] is not None and one_result(one, book)


def one_result(norm: Call, book: Book) -> bool:
    """A norm in another dtype than its input's comes as a second result; then nobody reads the first."""
    return norm.name != "rms_norm" or "extra_dtype" not in options(norm) or not book.readers[start(norm.result[0])]


def results(norm: Call) -> list[Tensor]:
    if norm.name == "rms_norm_many":
        return list(norm.result)
    return [norm.result[-1] if "extra_dtype" in options(norm) else norm.result]


def start(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def source(x: Tensor | None, middle: Call, calls: Sequence[Call], book: Book) -> Source:
    """Where an input comes from, as far back as nobody else reads it and nothing on the way is written over."""
    norm = book.maker(x, "rms_norm")
    if norm is None or options(norm) or norm.args[1] is None or norm.args[2] != middle.args[2]:
        return Source(x)
    inner: Tensor = norm.args[0]
    between = calls[book.place[norm] : book.place[middle]]
    if inner.ndim != 2 or inner.stride(1) != 1 or not book.read_once(norm) or written(inner, between):
        return Source(x)
    added = book.maker(inner, "combine")
    if added is None or not book.read_once(added):
        return Source(inner, norm.args[1], None, (norm,))
    (y, shares), more = added.args, ("residual", "shared", "shared_gate", "tokens")
    between = calls[book.place[added] : book.place[middle]]
    plain = (
        y.ndim == 3 and y.stride(2) == 1 and shares.is_contiguous() and all(added.kwargs[name] is None for name in more)
    )
    if not plain or written((y, shares), between):
        return Source(inner, norm.args[1], None, (norm,))
    return Source(y, norm.args[1], shares, (added, norm))


def written(value: object, calls: Sequence[Call]) -> bool:
    return any(addresses(value) & (one.writes | addresses(one.result)) for one in calls)


def followers(middle: Call, calls: Sequence[Call], book: Book) -> Followers:
    (r,), after = results(middle), calls[book.place[middle] + 1 :]

    def reads(one: Call, x: Tensor) -> bool:
        given = one.args[0] if one.args else None
        return isinstance(given, Tensor) and given.data_ptr() == x.data_ptr() and given.shape == x.shape

    copy = next((one for one in after if one.name == "_to_copy" and reads(one, r)), None)
    shown = [r] if copy is None else [r, copy.result]
    norms = tuple(
        one for one in after
        if any(reads(one, x) for x in shown)
        and (one.name == "rms_norm_many" or (one.name == "rms_norm" and options(one) <= {"extra_dtype"}))
        and one.args[1] is not None and one.args[2] == middle.args[2] and one_result(one, book)
    )  # fmt: skip
    moved = [*([copy] if copy else []), *norms]
    last = max((book.place[one] for one in moved), default=0)
    if not moved or written(shown, [one for one in calls[book.place[middle] + 1 : last] if one is not copy]):
        return Followers(None, (), True)
    of_copy = sum(reads(one, copy.result) for one in norms) if copy else 0
    return Followers(copy, norms, copy is None or book.readers[start(copy.result)] == of_copy)
