"""What slots on a GPU would do on recorded routes: the rule of slots.py in plain numbers, without a GPU or a model."""

from __future__ import annotations

from collections.abc import Sequence

from .routes import Routes
from .simulation import Prediction
from .slots import CHOICE, DECAY


class Slots:
    """The slots of one layer: who lies where, and what is known of every expert, as in `slots.State`."""

    def __init__(self, experts: int, slots: int) -> None:
        self.place = {expert: expert for expert in range(min(slots, experts))}
        self.scores = [0] * experts
        self.early: set[int] = set()  # came ahead, and nobody has chosen since
        self.counts = [0, 0, 0, 0]  # as State.counts

    def choose(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """The experts of a step, of all its tokens; what must be copied before it goes on, (expert, slot)."""
        chosen = set(ids)
        self.scores = [score - (score * DECAY >> 10) for score in self.scores]
        for expert in chosen:
            self.scores[expert] += CHOICE
        loads = self._load(chosen - self.place.keys(), chosen)
        for at, more in enumerate((len(chosen), len(loads), len(chosen & self.early))):
            self.counts[at] += more
        self.early.clear()
        return loads

    def guess(self, ids: Sequence[int], limit: int) -> list[tuple[int, int]]:
        """As `choose` for a guess: the first that are not there come, and no score changes.

        Two tokens that name the same expert use up the limit twice: the kernel looks at places, not at experts.
        """
        first = {*[expert for expert in ids if expert not in self.place][:limit]}
        loads = self._load(first, {*ids})
        self.counts[3] += len(loads)
        self.early |= first
        return loads

    def _load(self, missing: set[int], staying: set[int]) -> list[tuple[int, int]]:
        """By expert, each into the slot of the next that has the least score, lower ids first, and need not stay."""
        if not missing:
            return []
        leaving = sorted(self.place.keys() - staying, key=lambda expert: (self.scores[expert], expert))
        loads = [(expert, self.place.pop(old)) for expert, old in zip(sorted(missing), leaving, strict=False)]
        self.place.update(loads)
        return loads


def simulate_slots(routes: Routes, slots: Sequence[int], expert_bytes: Sequence[int], ahead: int) -> Prediction:
    """Drive the slots of each layer as `HostExperts.lend` and `Guess` do; `ahead` experts may come on a guess.

    An expert that came ahead was not there all the same: it counts as missing, as in `DeviceResidency.reads`.
    """
    layers = [Slots(routes.experts, count) for count in slots]
    of_replies, replies = [[0] * 4 for _ in layers], 0
    for step in routes.steps:
        reply = routes.tokens(step) == 1
        replies += reply
        for layer, (one, ids) in enumerate(zip(layers, step.chosen, strict=True)):
            before = one.counts.copy()
            if len(ids) > slots[layer]:
                continue  # they go through buffers of whole layers, and slots stay as they are
            if layer and len(ids) <= slots[layer - 1]:
                one.guess(step.from_stream[layer - 1], ahead)
            one.choose(ids)
            for at, (now, then) in enumerate(zip(one.counts, before, strict=True)):
                of_replies[layer][at] += reply * (now - then)
    needed, absent, foreseen, early = zip(*of_replies, strict=True)
    missing = [sum(both) for both in zip(absent, foreseen, strict=True)]
    bytes_read, bytes_ahead = (
        sum(count * each for count, each in zip(counts, expert_bytes, strict=True)) for counts in (absent, early)
    )
    rates = tuple(1 - less / all if all else 0.0 for less, all in zip(missing, needed, strict=True))
    return Prediction("slots", replies, sum(needed), sum(missing), bytes_read, bytes_ahead, rates)
