"""Slots on a device for some of the experts that lie in host memory: which expert gets which, and the copies.

What is decided depends on what was chosen alone, and is decided where the choice is: no host waits for it, so a
recorded step holds it. The bodies here say what that means; kernels/triton/slots.py does it on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .ops.dispatch import as_one, kernel

DECAY = 11  # of 1024, of a score: being chosen counts half after 64 steps, as in expert_cache.py
CHOICE = 1 << 12


class State(NamedTuple):
    """What is known of the E experts of a layer, changed in place."""

    table: Tensor  # int32 [3, E]: the slot of each or -1; its score; whether it came before it was asked for
    counts: Tensor  # int64 [4]: experts asked for, missing, of those that came ahead the ones asked for, and all

    @classmethod
    def new(cls, E: int, slots: int, device: torch.device) -> State:
        """The first experts are in the slots; so none is ever empty."""
        table = torch.zeros(3, E, dtype=torch.int32)
        table[0] = torch.arange(E).where(torch.arange(E) < slots, torch.tensor(-1))
        return cls(table.to(device), torch.zeros(4, dtype=torch.int64, device=device))


def assign_slots(ids: Tensor, state: State, *, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Where the experts ids [T, A] are to lie, and which must be copied there first.

    ids [T, A]   ->   slots [T, A]   loads int32 [T A, 2]: (expert, slot) by expert, then -1

    Those missing take the slots of those that are not asked for and have the least score, lower ids first. A score
    adds up choices that count less with time. There must be as many slots as ids.

    With a `limit`, ids are a guess: at most so many are loaded, the first ones, and no score changes; loads [limit, 2].
    """
    work = kernel("slots", "assign_slots", ids) or as_one("assign_slots", assigned, ids)
    return work(ids, state, limit=limit)  # type: ignore[no-any-return]


def assigned(
    ids: Tensor, state: State, limit: int | None, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The body of assign_slots; into `out`, where a step is replayed."""
    (places, scores, ahead), counts, E = state.table, state.counts, state.table.shape[1]
    flat, experts = ids.flatten().long(), torch.arange(state.table.shape[1], device=ids.device)
    chosen = torch.zeros(E, dtype=torch.bool, device=ids.device).index_fill(0, flat, True)
    missing, room = chosen & (places < 0), ids.numel()
    if limit is None:
        scores.copy_(scores - (scores * DECAY >> 10) + CHOICE * chosen)
        counts[:3] += torch.stack([chosen.sum(), missing.sum(), ahead[chosen].sum()])
        ahead.zero_()
    else:
        absent, room = places[flat] < 0, min(limit, room)
        first = flat[absent & (absent.cumsum(0) <= limit)]
        missing = torch.zeros_like(missing).index_fill(0, first, True)
        counts[3] += missing.sum()
        ahead.masked_fill_(missing, 1)
    order = torch.where((places >= 0) & ~chosen, scores.long() * E + experts, 1 << 62).argsort(stable=True)
    count, rank = missing.sum(), missing.cumsum(0) - 1
    slots = torch.where(missing, places[order][rank.clamp(min=0)], places)
    listed = (~missing).int().argsort(stable=True)[:room].int()
    loads = torch.full((room, 2), -1, dtype=torch.int32, device=ids.device)
    loads[: len(listed)] = torch.stack([listed, slots[listed]], 1).where((experts < count)[: len(listed), None], -1)
    wanted = slots[flat].view(ids.shape).to(ids.dtype)
    slots[order] = slots[order].where(experts >= count, -1)
    places.copy_(slots)
    return (wanted, loads) if out is None else (out[0].copy_(wanted), out[1].copy_(loads))


def fill_slots(loads: Tensor, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """targets[part][slot] = sources[part][expert] for each (expert, slot) of loads [M, 2] that is not negative.

    The parts of experts [E, ...], in memory that the device can read, and those of slots [S, ...] on it.
    """
    work = kernel("slots", "fill_slots", loads) or as_one("fill_slots", filled, loads)
    work(loads, sources, targets)


def filled(loads: Tensor, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """The body of fill_slots."""
    for expert, slot in loads.tolist():
        for source, target in zip(sources, targets, strict=True):
            if expert >= 0:
                target[slot].copy_(source[expert])
