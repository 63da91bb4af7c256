"""A recorded step with fewer launches: calls are replaced by one that does the work of several.

Nothing is recorded anew. Results move into shared memory, and every tensor that shows them is pointed there; weights
that are read together are laid together, and their old tensors show them in their new place. So the calls in between
need not know. Each rewriting has a name, and HALFBYTE_WITHOUT (names, with commas; read once) leaves it out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from .check import tensors
from .fused_chains import combine_and_norm, recurrent_step, rotate_and_append
from .graph import Book, Call, addresses, call
from .ops.experts import Experts
from .ops.formats import Packed

WITHOUT = frozenset(filter(None, os.environ.get("HALFBYTE_WITHOUT", "").split(",")))


def fuse(calls: Sequence[Call], without: Iterable[str] | None = None) -> list[Call]:
    """The calls with every fusion that is not left out, in the order of FUSIONS."""
    made, out = list(calls), WITHOUT if without is None else frozenset(without)
    if unknown := out - FUSIONS.keys():
        wrong, known = min(unknown), ", ".join(FUSIONS)
        raise ValueError(f"HALFBYTE_WITHOUT: no fusion is called {wrong!r}; there are {known}")
    for name, rewrite in FUSIONS.items():
        if name not in out:
            made = rewrite(made)
    return made


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
    book = Book(calls)
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    for end in calls:
        found = find_shared(end, book) if end.name == "combine" else None
        if found is None:
            continue
        chosen, gate, up, glu, down = found
        x, ids, experts, *more = chosen.args
        B, k = ids.shape
        all_ids = torch.full((B, k + 1), experts.gate.shape[0], dtype=ids.dtype, device=ids.device)
        y = torch.empty((B, k + 1, experts.gate.shape[2]), dtype=x.dtype, device=x.device)
        if not point(calls, [(ids, all_ids[:, :k]), (chosen.result, y[:, :k]), (down.result, y[:, k])]):
            continue
        parts = [(experts.gate, gate.args[1]), (experts.up, up.args[1]), (experts.down, down.args[1])]
        joined = Experts(*(laid_together(pair, (pair[0].shape[0] + 1, *pair[0].shape[1:])) for pair in parts))
        replaced[chosen] = call("expert_mlp", chosen.run, (x, all_ids, joined, *more), {"out": y}, y)
        dropped |= {gate, up, glu, down}
    return [replaced.get(one, one) for one in calls if one not in dropped]


def find_shared(end: Call, book: Book) -> Shared | None:
    """The calls whose results a combine adds up, if a shared expert's are among them and nobody else reads these."""
    chosen, down = book.maker(end.args[0], "expert_mlp"), book.maker(end.kwargs.get("shared"), "qmm")
    if chosen is None or down is None or chosen.args[0].ndim != 2 or book.maker(chosen.args[1], "route") is None:
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


def joinable(w: object) -> TypeGuard[Packed]:
    """A scale of a whole matrix would have to become one of each of its rows, which no format has."""
    return isinstance(w, Packed) and w.global_scale is None


def form(w: Packed) -> tuple[object, ...]:
    """What weights must have in common to be laid together."""
    return (w.bits, w.group, w.mode, w.scale_dtype, w.words.dtype)


def point(calls: Sequence[Call], moves: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Let every tensor that shows one of the sources show the same part of its target: of all of them, or of none.

    Sources and targets are [B, ...] with the same rows; rows of a source follow each other, those of a target need not.
    """
    changes: list[tuple[Tensor, Tensor]] = []
    for source, target in moves:
        memory = source.untyped_storage().data_ptr()
        seen: dict[int, Tensor] = {}
        for one in calls:
            for tensor in tensors((one.args, one.kwargs, one.result)):
                if tensor.untyped_storage().data_ptr() == memory:
                    seen[id(tensor)] = tensor
        for view in seen.values():
            part = shown(view, source, target)
            if part is None:
                return False
            changes.append((view, part))
    for view, part in changes:
        view.data = part
    return True


def shown(view: Tensor, source: Tensor, target: Tensor) -> Tensor | None:
    """What a view of the source shows, as a view of the target; None where it takes more than other strides."""
    B, row = source.shape[0], source[0].numel()
    strides, inside = list(view.stride()), view.storage_offset() - source.storage_offset()
    if B > 1:
        whole = view.ndim > 0 and view.shape[0] == B and strides[0] == row
        reach = sum((size - 1) * stride for size, stride in zip(view.shape[1:], strides[1:], strict=True))
        if not whole or inside + reach >= row:
            return None
        strides[0] = target.stride(0)
    return target.as_strided(view.shape, strides, target.storage_offset() + inside)


def laid_together(weights: Sequence[Packed], shape: tuple[int, ...]) -> Packed:
    """One weight of `shape` whose rows are those of the weights, which from now on are views of it."""

    def joined(parts: Sequence[Tensor]) -> Tensor:
        columns = parts[0].shape[-1]
        return rows_together(parts, columns).view(*shape[:-1], columns)

    first = weights[0]
    words, scales = joined([w.words for w in weights]), joined([w.scales for w in weights])
    biases = None if first.biases is None else joined([w.biases for w in weights if w.biases is not None])
    return Packed(words, scales, biases, first.bits, first.group, first.mode)


def rows_together(parts: Sequence[Tensor], columns: int) -> Tensor:
    """[rows, columns]: the rows of all parts. Where they lie one behind the other already, nothing is copied."""
    rows = [part.numel() // columns for part in parts]
    starts = [sum(rows[:i]) * columns for i in range(len(parts))]
    memory, first = parts[0].untyped_storage().data_ptr(), parts[0].storage_offset()
    if all(
        part.untyped_storage().data_ptr() == memory and part.storage_offset() == first + start and part.is_contiguous()
        for part, start in zip(parts, starts, strict=True)
    ):
        return parts[0].as_strided((sum(rows), columns), (columns, 1))
    whole = torch.empty((sum(rows), columns), dtype=parts[0].dtype, device=parts[0].device)
    for part, piece in zip(parts, whole.split(rows), strict=True):
        piece.copy_(part.reshape(piece.shape))
        part.data = piece.view(part.shape)
    return whole


FUSIONS: dict[str, Callable[[list[Call]], list[Call]]] = {
    "shared_expert": shared_expert,
    "side_by_side": side_by_side,
    "rotate_and_append": rotate_and_append,
    "recurrent_step": recurrent_step,
    "combine_and_norm": combine_and_norm,
}
