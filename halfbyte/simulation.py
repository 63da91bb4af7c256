"""What an expert cache would do on recorded routes: hits and reads, by the code that a run uses, without a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .expert_cache import POLICIES, ExpertCache, Round, busy_last, certain
from .expert_shares import Share
from .foresight import by_votes
from .routes import Routes


@dataclass(frozen=True)
class Prediction:
    """Of replies, that is of steps of one token, once a cache has seen what comes before; prompts only fill it."""

    policy: str
    tokens: int
    needed: int  # experts, of all layers
    read: int  # of these, the ones that were missing
    bytes_read: int  # from disk or host memory when they were needed
    bytes_ahead: int  # on a guess
    by_layer: tuple[float, ...]  # hit rates
    bytes_copied: int = 0  # to a device above the cache

    @property
    def hit_rate(self) -> float:
        return 1 - self.read / self.needed if self.needed else 0.0

    @property
    def bytes_per_token(self) -> float:
        return (self.bytes_read + self.bytes_ahead) / self.tokens if self.tokens else 0.0

    def tokens_per_second(self, resident: float, source: float, bus: float | None = None) -> float:
        """`resident`: tokens a second if nothing had to be read; `source`: bytes a second of a disk or a bus.

        What is read when it is needed overlaps with nothing but copies to a device, over its `bus`; what is read ahead
        overlaps with all that is computed.
        """
        ahead, read = (count / source / max(self.tokens, 1) for count in (self.bytes_ahead, self.bytes_read))
        copied = 0.0 if bus is None else self.bytes_copied / bus / max(self.tokens, 1)
        seconds = max(1 / resident, ahead) + max(read, copied)
        return 1 / seconds if seconds else math.inf


def simulate(routes: Routes, shares: Sequence[Share], policy: str, slots: Sequence[int] | None = None) -> Prediction:
    """Drive caches as `StoredExperts.lend` does, step by step and layer by layer.

    With `slots` of each layer on a device, as `TieredExperts.lend` does: they ask for what these do not have.
    """
    needed, copied, read, of_replies, bytes_ahead = *([0] * routes.layers for _ in range(3)), 0, 0
    caches = [ExpertCache(share.slots, POLICIES[policy]) for share in shares]
    above = [ExpertCache(count, POLICIES[policy]) for count in slots or ()]
    of_layer = {layer: at for at, share in enumerate(shares) for layer in share.layers}
    for step in routes.steps:
        reply = routes.tokens(step) == 1
        of_replies += reply
        for layer, ids in enumerate(step.chosen):
            chosen, following, likely = sorted(set(ids)), layer + 1, list[int]()
            needed[layer] += reply * len(chosen)
            if following < routes.layers and (POLICIES[policy].foresees or certain(len(ids), routes.experts)):
                likely = by_votes(step.guessed[layer])
            if above:
                chosen = absent(above[layer], layer, chosen)
                copied[layer] += reply * len(chosen)
                likely = [expert for expert in likely if (following, expert) not in above[following].places]
            rounds = list(caches[of_layer[layer]].rounds(layer, chosen))
            read[layer] += reply * sum(len(one.loads) for one in rounds)
            if likely:
                at = of_layer[following]
                before, last = [Round([], []), *rounds][-2:]
                loads = caches[at].ahead(following, likely, busy_last(before, last, len(chosen)))
                bytes_ahead += reply * len(loads) * shares[at].expert_bytes
    bytes_read, bytes_copied = (
        sum(count * shares[of_layer[layer]].expert_bytes for layer, count in enumerate(counts))
        for counts in (read, copied)
    )
    rates = tuple(1 - less / all if all else 0.0 for less, all in zip(read, needed, strict=True))
    return Prediction(policy, of_replies, sum(needed), sum(read), bytes_read, bytes_ahead, rates, bytes_copied)


def absent(cache: ExpertCache, layer: int, chosen: list[int]) -> list[int]:
    """What slots on a device ask for below: more than they have room for passes them by, and they stay as they are."""
    if len(chosen) > cache.slots:
        return [expert for expert in chosen if (layer, expert) not in cache.places]
    return sorted(expert for one in cache.rounds(layer, chosen) for (_, expert), _ in one.loads)
