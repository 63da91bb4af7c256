"""Which experts are in memory, and which of them make room for others. No tensor is known here.

A run and a simulation drive the same object: what it decides depends only on what was chosen before.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

HALF_LIFE = 64  # steps after which having been chosen counts half, for "lfu"

Key = tuple[int, int]  # layer, expert
# An expert's score once it is chosen in a step, from the score it had. The least one goes first. Scores only grow,
# and time does not change their order: so a heap of them stays one.
Score = Callable[[float | None, int], float]
UNCHOSEN = -math.inf  # the score of an expert that was read on a guess: it goes first, unless it is chosen


def least_recent(before: float | None, step: int) -> float:
    """The expert that was chosen longest ago goes first."""
    return float(step)


def least_frequent(before: float | None, step: int) -> float:
    """The expert that was chosen least often goes first, where a choice counts half after HALF_LIFE steps.

    The sum of 2^(step / HALF_LIFE) over its steps, as a logarithm: the decay that all share is left out.
    """
    now = step / HALF_LIFE
    return now if before is None else now + math.log2(1 + 2.0 ** (before - now))


class Policy(NamedTuple):
    score: Score
    foresees: bool = False  # for every token what the next layer will probably choose, and reads that ahead


POLICIES = {
    "lru": Policy(least_recent),
    "lfu": Policy(least_frequent),
    "lfu-ahead": Policy(least_frequent, foresees=True),
}


def certain(choices: int, experts: int) -> bool:
    """Whether a guess is safe: as many choices as there are experts, as a prompt makes, leave few of them out."""
    return choices >= experts


class Round(NamedTuple):
    """Experts that are computed together, and those of them that must be read for that, each into a slot."""

    keys: list[Key]
    loads: list[tuple[Key, int]]


def busy_last(before: Round, last: Round, chosen: int) -> list[Key]:
    """What may be computed with while the next layer's experts are read: the last round. Both, where they are all that
    was chosen: a run that does not have to wait computes them in one go, and what it has to wait for decides nothing.
    """
    together = before.keys + last.keys
    return together if len(together) == chosen else last.keys


class ExpertCache:
    """So many slots, for the experts of all layers that use them. One thread owns it."""

    def __init__(self, slots: int, policy: Policy = POLICIES["lfu"]) -> None:
        self.slots, self.policy = slots, policy
        self.places: dict[Key, int] = {}
        self.free = list(range(slots - 1, -1, -1))
        self.scores: dict[Key, float] = {}  # of experts that have left, too
        self.heap: list[tuple[float, Key]] = []  # of those that are here, with scores of the past among them
        self.step, self.layer = 0, -1
        self.hits: Counter[int] = Counter()  # by layer
        self.misses: Counter[int] = Counter()
        self.read_ahead: Counter[int] = Counter()

    @property
    def hit_rate(self) -> float | None:
        """Of all experts that steps have needed, the part that was here; None before the first."""
        needed = self.hits.total() + self.misses.total()
        return self.hits.total() / needed if needed else None

    def rounds(self, layer: int, experts: Sequence[int]) -> Iterator[Round]:
        """What one layer of a step needs, each expert once: first what is here, then what must be read.

        A round is planned while the one before it is computed, so that its reads do not touch those slots. Where there
        is no room beside them, an empty round lets them be done first.
        """
        self._next(layer)
        keys = [(layer, expert) for expert in experts]
        here, absent = [key for key in keys if key in self.places], [key for key in keys if key not in self.places]
        self.hits[layer] += len(here)
        self.misses[layer] += len(absent)
        for key in keys:
            self._touch(key)
        yield Round(here, [])
        busy = set(here)
        while absent:
            room = self.slots - len(busy)
            if room == 0:
                busy = set()
                yield Round([], [])
                continue
            count = len(absent) if len(absent) <= room else min(room, max(self.slots // 2, 1))
            now, absent = absent[:count], absent[count:]
            loads = [(key, self._place(key, busy)) for key in now]
            yield Round(now, loads)
            busy = set(now)

    def ahead(self, layer: int, likely: Iterable[int], busy: Iterable[Key]) -> list[tuple[Key, int]]:
        """Reads of what a layer will probably need, the likeliest first, beside what is computed now.

        Half of the slots at most: the other half is for what that layer has to read then.
        """
        keys = [(layer, expert) for expert in likely]
        taken = {*busy, *(key for key in keys if key in self.places)}
        room = min(self.slots - len(taken), self.slots // 2)
        absent = [key for key in keys if key not in self.places][: max(room, 0)]
        for key in absent:
            self.scores.setdefault(key, UNCHOSEN)
        self.read_ahead[layer] += len(absent)
        return [(key, self._place(key, taken)) for key in absent]

    def forget(self, layer: int, experts: Iterable[int]) -> None:
        """These are not here after all: nobody knows what their slots hold."""
        for expert in experts:
            if (slot := self.places.pop((layer, expert), None)) is not None:
                self.free.append(slot)

    def clear(self) -> None:
        """Nobody knows what any slot holds."""
        self.places.clear()
        self.free, self.heap = list(range(self.slots - 1, -1, -1)), []

    def _next(self, layer: int) -> None:
        """A layer that does not come after the last one begins a new step."""
        self.step += layer <= self.layer
        self.layer = layer

    def _touch(self, key: Key) -> None:
        self.scores[key] = self.policy.score(self.scores.get(key), self.step)
        if key in self.places:
            self._push(key)

    def _push(self, key: Key) -> None:
        if len(self.heap) >= 4 * self.slots:
            self.heap = [(self.scores[one], one) for one in self.places]
            heapq.heapify(self.heap)
        heapq.heappush(self.heap, (self.scores[key], key))

    def _place(self, key: Key, busy: set[Key]) -> int:
        """A slot for an expert, which is busy from now on."""
        slot = self.free.pop() if self.free else self.places.pop(self._least(busy))
        self.places[key] = slot
        self._push(key)
        busy.add(key)
        return slot

    def _least(self, busy: set[Key]) -> Key:
        """The expert of the least score among those that are not busy."""
        passed = []
        while True:
            entry = heapq.heappop(self.heap)
            score, key = entry
            if key not in self.places or score != self.scores[key]:
                continue
            if key not in busy:
                break
            passed.append(entry)
        for entry in passed:
            heapq.heappush(self.heap, entry)
        return key
