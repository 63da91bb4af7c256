"""Which part of a model's experts gets memory: slots, shared by the layers whose experts are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .checkpoint.ledger import Mixture
from .checkpoint.sidecar import own_parts
from .checkpoint.spans import Span
from .errors import NotEnoughMemory, size

FEWEST = 2  # slots: one is read while the other is computed with

Part = tuple[int, str]  # projection (gate, up, down), part of it
Form = tuple[tuple[Part, str, tuple[int, ...]], ...]  # what makes experts alike: dtype and shape of each part


def parts_of(mixture: Mixture) -> dict[Part, Span]:
    return {(projection, name): span for projection, name, span in own_parts(mixture)}


def form_of(mixture: Mixture) -> Form:
    return tuple((part, span.kind, span.shape[1:]) for part, span in parts_of(mixture).items())


def expert_bytes(mixture: Mixture) -> int:
    return sum(span.size // span.shape[0] for span in parts_of(mixture).values())


@dataclass(frozen=True)
class Share:
    """Layers whose experts are alike, by number, and the slots that they get."""

    layers: tuple[int, ...]
    expert_bytes: int
    experts: int  # of all these layers
    slots: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.expert_bytes


def fewest(mixtures: Sequence[Mixture], per_token: int) -> list[Share]:
    """The least that can be worked with, by form: slots for the experts of one token."""
    alike: dict[Form, list[int]] = {}
    for layer, mixture in enumerate(mixtures):
        alike.setdefault(form_of(mixture), []).append(layer)
    found = []
    for layers in alike.values():
        count = sum(mixtures[layer].form.gate.shape[0] for layer in layers)
        slots = min(max(per_token, FEWEST), count)
        found.append(Share(tuple(layers), expert_bytes(mixtures[layers[0]]), count, slots))
    return found


def plan(mixtures: Sequence[Mixture], budget: int, per_token: int) -> list[Share]:
    """Slots for `budget` bytes, so that every form has the same part of its experts in memory."""
    least = fewest(mixtures, per_token)
    minimum = sum(share.nbytes for share in least)
    if budget < minimum:
        raise NotEnoughMemory(
            f"an expert cache of {size(budget)} is too small: the experts of one token take {size(minimum)} "
            f"({minimum} bytes). Give it at least that."
        )
    rest = sum(share.expert_bytes * (share.experts - share.slots) for share in least)
    more = min(budget - minimum, rest)
    return [replace(share, slots=share.slots + more * (share.experts - share.slots) // max(rest, 1)) for share in least]
