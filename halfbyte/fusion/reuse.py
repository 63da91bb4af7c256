"""Results of a recorded step that take each other's places: what a layer leaves behind is the next one's memory.

A recorded list keeps every result of every layer apart. A step needs few of them at a time, and those that it has just
read are still in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph import Call, addresses
from .together import Views

ALIGNED = 64  # bytes: a line of a cache, and the widest vector


def share_memory(calls: Sequence[Call], kept: frozenset[int]) -> int:
    """Lay the results of these calls into one piece of memory, except those at the addresses `kept`; returns its size.

    A result has its place from the call that makes it to the last one that touches it.
    """
    spans = lifetimes(calls, kept)
    views = Views(calls)
    shown = {at: list(views.of[at].values()) for at in spans}
    places, size = arranged(
        {at: (*span, -(-shown[at][0].untyped_storage().nbytes() // ALIGNED)) for at, span in spans.items()}
    )
    whole = torch.empty(size * ALIGNED, dtype=torch.uint8)
    for at, place in places.items():
        for view in shown[at]:
            typed = whole.view(view.dtype)
            start = place * ALIGNED // view.element_size() + view.storage_offset()
            view.data = typed.as_strided(view.shape, view.stride(), start)
    return size * ALIGNED


def lifetimes(calls: Sequence[Call], kept: frozenset[int]) -> dict[int, tuple[int, int]]:
    """Where memory begins -> the first and the last call that touch it: memory that the first one fills."""
    spans: dict[int, tuple[int, int]] = {}
    before: set[int] = set()  # memory that something was in when the step began
    for index, one in enumerate(calls):  # as their tensors lie now: a fusion may have moved results
        given = addresses((one.args, one.kwargs))
        made = addresses(one.result) - (given - addresses(one.kwargs.get("out")))
        touched = given | addresses(one.result)
        before |= touched - spans.keys() - made
        for at in touched - before:
            spans[at] = (spans[at][0] if at in spans else index, index)
    return {at: span for at, span in spans.items() if at not in before | kept}


def arranged(wanted: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """A place for each (first, last, length), so that those that live at a time are apart; and how much that takes.

    In the order of their beginnings, each as far to the front as it goes.
    """
    places: dict[int, int] = {}
    living: list[tuple[int, int, int]] = []  # (start, end, last)
    size = 0
    for at, (first, last, length) in sorted(wanted.items(), key=lambda item: item[1]):
        living = sorted(one for one in living if one[2] >= first)
        place = 0
        for start, end, _ in living:
            if place + length <= start:
                break
            place = end
        places[at] = place
        living.append((place, place + length, last))
        size = max(size, place + length)
    return places, size
