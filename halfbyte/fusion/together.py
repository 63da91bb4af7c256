"""Results and weights that come to lie together, so that one call can make or read them all.

Results move into shared memory, and every tensor that shows them is pointed there; weights that are read together are
laid together, and their old tensors show them in their new place. So the calls in between need not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

from torch import Tensor

from ..check import tensors
from ..graph import Call
from ..memory import allocate, shown_as
from ..ops.formats import Packed


def joinable(w: object) -> TypeGuard[Packed]:
    """A scale of a whole matrix would have to become one of each of its rows, which no format has."""
    return isinstance(w, Packed) and w.global_scale is None


def form(w: Packed) -> tuple[object, ...]:
    """What weights must have in common to be laid together."""
    return (w.bits, w.group, w.mode, w.scale_dtype, w.words.dtype)


class Views:
    """The tensors of some calls by the memory that they show: looked up once, for there are thousands of them."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.of: dict[int, dict[int, Tensor]] = {}
        for one in calls:
            for tensor in tensors((one.args, one.kwargs, one.result)):
                self.of.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = tensor

    def point(self, moves: Iterable[tuple[Tensor, Tensor]]) -> bool:
        """Let every tensor that shows one of the sources show the same part of its target: of all of them, or of none.

        Sources and targets are [B, ...] with the same rows; those of a source follow each other, of a target they need
        not. Nothing has been moved to or from a source before.
        """
        changes: list[tuple[Tensor, Tensor]] = []
        for source, target in moves:
            for view in self.of[source.untyped_storage().data_ptr()].values():
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


def lie_together(weights: Sequence[Packed]) -> bool:
    """Whether they need not be moved for that, as a loader lays them (checkpoint/neighbours.py)."""
    parts = zip(*((w.words, w.scales, w.biases) for w in weights), strict=True)
    return all(None in part or follow_each_other(part) for part in parts)


def follow_each_other(parts: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before it ends."""
    memory, at = parts[0].untyped_storage().data_ptr(), parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != at or not part.is_contiguous():
            return False
        at += part.numel()
    return True


def rows_together(parts: Sequence[Tensor], columns: int) -> Tensor:
    """[rows, columns]: the rows of all parts. Where they lie one behind the other already, nothing is copied."""
    rows = [part.numel() // columns for part in parts]
    if follow_each_other(parts):
        return parts[0].as_strided((sum(rows), columns), (columns, 1))
    first = parts[0]
    whole = shown_as(allocate(sum(part.nbytes for part in parts), first.device), first.dtype, (sum(rows), columns))
    for part, piece in zip(parts, whole.split(rows), strict=True):
        piece.copy_(part.reshape(piece.shape))
        part.data = piece.view(part.shape)
    return whole
