"""What was recorded of a model on a cache: it lives as long as both, for whoever runs them next.

A captured graph keeps addresses. Those of a cache change when it grows, those of weights when a fusion lays them
elsewhere: both are noticed here, and the graph is captured anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .cache import Cache
from .check import tensors
from .fusion import fuse
from .graph import Call, bound, run_all
from .models.decoder import Decoder

log = logging.getLogger(__name__)
T = TypeVar("T")
_shelves: WeakKeyDictionary[Cache, WeakKeyDictionary[Decoder, Shelf]] = WeakKeyDictionary()
_moves: WeakKeyDictionary[Decoder, int] = WeakKeyDictionary()


class Shelf:
    """The recorded steps of one model on one cache. They refer to neither, or neither would ever go.

    Their graphs share one pool of memory: a graph needs it only while it runs, and one runs at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.kept: dict[Any, Any] = {}

    def get(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self.kept:
            self.kept[key] = make()
        kept: T = self.kept[key]
        return kept


def shelf(model: Decoder, cache: Cache) -> Shelf:
    return _shelves.setdefault(cache, WeakKeyDictionary()).setdefault(model, Shelf(model.device))


def pending(model: Decoder, cache: Cache) -> list[Any]:
    """The recorded steps whose next run captures."""
    return [key for key, kept in shelf(model, cache).kept.items() if kept.replay.pending(model)]


def captures(device: torch.device) -> bool:
    return device.type == "cuda"


def upload(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """int32 on the device. Nobody waits: what is under way there goes on, and so does the host."""
    here = torch.tensor(numbers, dtype=torch.int32)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def moves(model: Decoder) -> int:
    """How often weights of a model came to lie elsewhere."""
    return _moves.get(model, 0)


class Replay:
    """Calls as one CUDA graph, for as long as what they work on stays where it is; elsewhere, the calls themselves."""

    def __init__(self) -> None:
        self._graph: Callable[[], None] | None = None
        self._moves, self._alone = -1, False

    def forget(self) -> None:
        self._moves = -1

    def pending(self, model: Decoder) -> bool:
        """Whether the next run captures, and so takes longer than those after it."""
        return captures(model.device) and not self._alone and self._moves != moves(model)

    def prepare(self, calls: Sequence[Call], model: Decoder, pool: Any) -> None:
        """Capture the calls, unless that was done. All of their kernels have run before; none runs now."""
        if not self.pending(model):
            return
        try:
            self._graph = bound(calls, model.device, pool)  # the old one goes afterwards: so its pool stays
            self._moves = moves(model)
        except torch.OutOfMemoryError:
            self._graph, self._alone = None, True
            log.warning("%s has no memory left for the graph of a step: its kernels run one by one", model.device)

    def run(self, calls: Sequence[Call], model: Decoder, pool: Any) -> None:
        self.prepare(calls, model, pool)
        if self._graph is None:
            run_all(calls)
        else:
            self._graph()


def fused(calls: Sequence[Call], model: Decoder, rows: int) -> list[Call]:
    """The calls of a step of so many rows, fused.

    Graphs that keep old addresses of weights are captured anew when they run next.
    """
    made = {address for one in calls for address in one.writes}
    weights = [t for one in calls for t in tensors(one.args) if t.untyped_storage().data_ptr() not in made]
    before = [t.data_ptr() for t in weights]
    new = fuse(calls, rows=rows)
    if any(t.data_ptr() != address for t, address in zip(weights, before, strict=True)):
        _moves[model] = moves(model) + 1
    return new
