"""What an expert cache would do on recorded routes: hits and reads, by the code that a run uses, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .expert_cache import POLICIES, ExpertCache, certain
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

    @property
    def hit_rate(self) -> float:
        return 1 - self.read / self.needed if self.needed else 0.0

    @property
    def bytes_per_token(self) -> float:
        return (self.bytes_read + self.bytes_ahead) / self.tokens if self.tokens else 0.0

    def tokens_per_second(self, resident: float, source: float) -> float:
        """`resident`: tokens a second if nothing had to be read; `source`: bytes a second of a disk or a bus.

        What is read when it is needed overlaps with nothing, what is read ahead with all that is computed.
        """
        ahead = self.bytes_ahead / source / max(self.tokens, 1)
        return 1 / (max(1 / resident, ahead) + self.bytes_read / source / max(self.tokens, 1))


def simulate(routes: Routes, shares: Sequence[Share], policy: str) -> Prediction:
    """Drive caches as `StoredExperts.lend` does, step by step and layer by layer."""
    needed, read, of_replies, bytes_ahead = [0] * routes.layers, [0] * routes.layers, 0, 0
    caches = [ExpertCache(share.slots, POLICIES[policy]) for share in shares]
    of_layer = {layer: at for at, share in enumerate(shares) for layer in share.layers}
    for step in routes.steps:
        reply = routes.tokens(step) == 1
        of_replies += reply
        for layer, ids in enumerate(step.chosen):
            chosen = sorted(set(ids))
            rounds = list(caches[of_layer[layer]].rounds(layer, chosen))
            needed[layer] += reply * len(chosen)
            read[layer] += reply * sum(len(one.loads) for one in rounds)
            following = layer + 1
            if following < routes.layers and (POLICIES[policy].foresees or certain(len(ids), routes.experts)):
                at = of_layer[following]
                loads = caches[at].ahead(following, by_votes(step.guessed[layer]), rounds[-1].keys)
                bytes_ahead += reply * len(loads) * shares[at].expert_bytes
    bytes_read = sum(count * shares[of_layer[layer]].expert_bytes for layer, count in enumerate(read))
    rates = tuple(1 - less / all if all else 0.0 for less, all in zip(read, needed, strict=True))
    return Prediction(policy, of_replies, sum(needed), sum(read), bytes_read, bytes_ahead, rates)
