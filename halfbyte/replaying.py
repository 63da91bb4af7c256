"""What was recorded of a model on a cache: it lives as long as both, for whoever runs them next.

A captured graph keeps addresses, and so do bound calls. Those of a cache change when it grows, those of weights when a
fusion lays them elsewhere: both are noticed here, and the calls are captured or bound anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from .cache import Cache
from .check import tensors
from .fusion import fuse
from .graph import Call, bound, bound_beside, cut, run_all
from .models.decoder import Decoder
from .ops.dispatch import LANGUAGE_OF, find

log = logging.getLogger(__name__)
MOST = 8  # recorded steps of a kind, of a model on a cache, on a CPU
T = TypeVar("T")
_shelves: WeakKeyDictionary[Cache, WeakKeyDictionary[Decoder, Shelf]] = WeakKeyDictionary()
_moves: WeakKeyDictionary[Decoder, int] = WeakKeyDictionary()


class Shelf:
    """The recorded steps of one model on one cache. They refer to neither, or neither would ever go.

    Their graphs share one pool of memory: a graph needs it only while it runs, and one runs at a time. On a CPU each
    step has memory of its own, and there is one for every number of requests: only those used last are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.most = None if device.type == "cuda" else MOST
        self.kept: dict[Any, Any] = {}  # the one used last is the last
        self.unrecorded: Counter[Any] = Counter()  # how often steps came that were not recorded

    def get(self, key: Any, make: Callable[[], T]) -> T:
        kept: T = self.kept.pop(key) if key in self.kept else make()
        self.kept[key] = kept
        alike = [one for one in self.kept if one[0] == key[0]]
        if self.most is not None and len(alike) > self.most:
            del self.kept[alike[0]]
        return kept

    def touch(self, key: Any) -> None:
        """A step was used again, by somebody who had it still."""
        if key in self.kept:
            self.kept[key] = self.kept.pop(key)

    def worth(self, key: Any, times: int) -> bool:
        """Whether to replay a step, asked before each: it was recorded, or comes for so many times that it is now."""
        if key in self.kept:
            return True
        self.unrecorded[key] = (self.unrecorded[key] + 1) % times
        return self.unrecorded[key] == 0


def shelf(model: Decoder, cache: Cache) -> Shelf:
    return _shelves.setdefault(cache, WeakKeyDictionary()).setdefault(model, Shelf(model.device))


def pending(model: Decoder, cache: Cache) -> list[Any]:
    """The recorded steps whose next run captures."""
    return [key for key, kept in shelf(model, cache).kept.items() if kept.replay.pending(model)]


def captures(device: torch.device) -> bool:
    return device.type == "cuda"


def small(model: Decoder) -> bool:
    """Whether steps are bound for a few sizes, and filled up to them: on a CPU, where a model is small enough for that
    to cost less than Python around a step as it is written."""
    fits = find(LANGUAGE_OF.get(model.device.type, "torch"), "binding", "fits")
    return fits is not None and model.nbytes is not None and model.residency is None and bool(fits(model.nbytes))


def moves(model: Decoder) -> int:
    """How often weights of a model came to lie elsewhere."""
    return _moves.get(model, 0)


class Replay:
    """Calls as one CUDA graph, or bound on a CPU, for as long as what they work on stays where it is; elsewhere, the
    calls themselves."""

    def __init__(self, binds: bool = False) -> None:
        self.binds = binds  # on a CPU, where nothing is captured
        self.cuts: Sequence[int] = ()  # from each of these on, calls have nothing to do with those before
        self.in_turn = False  # such parts could not be run beside each other
        self._graph: Callable[[], None] | None = None
        self._moves, self._alone = -1, False

    def forget(self) -> None:
        self._moves = -1

    def pending(self, model: Decoder) -> bool:
        """Whether the next run captures or binds, and so takes longer than those after it."""
        does = captures(model.device) or (self.binds and model.device.type == "cpu")
        return does and not self._alone and self._moves != moves(model)

    def prepare(self, calls: Sequence[Call], model: Decoder, pool: Any) -> None:
        """Capture the calls, unless that was done. All of their kernels have run before; none runs now."""
        if not self.pending(model):
            return
        try:
            beside = bound_beside(cut(calls, self.cuts), model.device) if self.cuts else None
            self.in_turn = bool(self.cuts) and beside is None
            self._graph = beside or bound(calls, model.device, pool)  # the old one goes afterwards: so its pool stays
            self._moves = moves(model)
        except (torch.OutOfMemoryError, MemoryError):
            self._graph, self._alone, self.in_turn = None, True, False
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
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # where they lay before is too small for what they lie in now
    return new
