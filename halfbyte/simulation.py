"""What an expert cache would do on recorded routes: hits and reads, by the code that a run uses, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .expert_cache import POLICIES, ExpertCache
from .residency import Share
from .routes import Routes


@dataclass(frozen=True)
class Prediction:
    """Of replies, that is of steps of one token, once a cache has seen what comes before; prompts only fill it."""

    policy: str
    tokens: int
    needed: int  # experts, of all layers
    read: int  # of these, from disk
    bytes_read: int
    by_layer: tuple[float, ...]  # hit rates

    @property
    def hit_rate(self) -> float:
        return 1 - self.read / self.needed if self.needed else 0.0

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / self.tokens if self.tokens else 0.0

    def tokens_per_second(self, resident: float, disk: float) -> float:
        """`resident`: tokens a second if nothing had to be read; `disk`: bytes a second. Reads overlap with nothing."""
        return 1 / (1 / resident + self.bytes_per_token / disk)


def simulate(routes: Routes, shares: Sequence[Share], policy: str) -> Prediction:
    needed, read, bytes_read = [0] * routes.layers, [0] * routes.layers, 0
    caches = [ExpertCache(share.slots, POLICIES[policy]) for share in shares]
    of_layer = {layer: at for at, share in enumerate(shares) for layer in share.layers}
    replies = [routes.tokens(step) == 1 for step in routes.steps]
    for step, counts in zip(routes.steps, replies, strict=True):
        for layer, ids in enumerate(step):
            at, chosen = of_layer[layer], sorted(set(ids))
            loads = sum(len(one.loads) for one in caches[at].rounds(layer, chosen))
            if counts:
                needed[layer] += len(chosen)
                read[layer] += loads
                bytes_read += loads * shares[at].expert_bytes
    rates = tuple(1 - less / all if all else 0.0 for less, all in zip(read, needed, strict=True))
    return Prediction(policy, sum(replies), sum(needed), sum(read), bytes_read, rates)
