"""Experts on disk, some of them in host memory and some on the GPU: for when neither memory has room for all.

One lender on another. What a layer chose and has no slot on the GPU is asked of a lender below (stored_experts.py): it
reads from the files what has no slot in host memory, and reads on while what it lent is copied. Each level sees only
what the one above misses: an expert that is asked for so often that it stays on the GPU is asked for no more below, and
is the next to go there. So what is hot does not lie in both memories for long, and neither level knows of the other.

A layer computes once, with all experts that it chose: by rounds a GPU would take other kernels, which give other bits.
The experts of a prompt, more than a layer has slots, are gathered in a buffer that has room for a whole layer. The host
must know what was chosen, so it waits for the GPU once a layer: no step is recorded, and one stream keeps the order.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import memory
from .checkpoint.ledger import Ledger
from .device_experts import like
from .errors import CheckpointError, StorageError
from .expert_cache import POLICIES, ExpertCache
from .foresight import blocks_of
from .host_experts import own, pin, unpin
from .ops.experts import Experts, Lender, Loan
from .residency import Reads, Residency
from .slots import fill_slots
from .stored_experts import Shelf, StoredExperts, in_memory

BUFFERS = 1  # of whole layers, for the layers of one form


class TieredExperts(Lender):
    """The experts of one layer: some in slots on a device, the others wherever the lender below has them."""

    asks = True

    def __init__(self, below: StoredExperts, slots: Experts, buffer: Experts, policy: str) -> None:
        self.below, self.slots, self.buffer = below, slots, buffer
        self.layer, self.shape, self.count = below.layer, below.shape, int(slots.gate.shape[0])
        self.cache = ExpertCache(self.count, POLICIES[policy])
        self.following: TieredExperts | None = None  # the next layer's
        self.needed = self.copied = 0  # experts
        self.sound = True  # slots hold what they are said to

    def lend(self, ids: Tensor) -> Generator[Loan]:
        """All that was chosen, in one loan. Whatever goes wrong, nothing half copied stays known: what ends it in the
        middle, an interrupt between any two operations, leaves the slots unsound, and nothing of them is believed."""
        if not self.sound:
            self.cache.clear()
        self.sound = False
        flat = ids.cpu().reshape(-1).numpy()  # from here on the device reads nothing that was lent before
        chosen: list[int] = np.unique(flat).tolist()
        self.needed += len(chosen)
        if self.following is not None:
            there = self.following.cache.places
            self.below.likely = [one for one in self.below.likely if (self.following.layer, one) not in there]
        try:
            yield self._gathered(ids, chosen) if len(chosen) > self.count else self._fetched(ids, flat, chosen)
        except (CheckpointError, StorageError):
            self.cache.forget(self.layer, chosen)
            self.sound = True
            raise
        self.sound = True

    def _fetched(self, ids: Tensor, flat: NDArray[np.int64], chosen: Sequence[int]) -> Loan:
        """In slots, where what was there already stays."""
        rounds = self.cache.rounds(self.layer, chosen)
        self._fetch([(expert, slot) for one in rounds for (_, expert), slot in one.loads], self.slots)
        table = np.zeros(self.shape[0], np.int64)
        for expert in chosen:
            table[expert] = self.cache.places[self.layer, expert]
        return Loan(self.slots, torch.from_numpy(table[flat]).view(ids.shape).to(ids))

    def _gathered(self, ids: Tensor, chosen: Sequence[int]) -> Loan:
        """In the buffer an expert lies at its own number. Slots stay as they are: a prompt would sweep them clean."""
        here = [(self.cache.places[key], key[1]) for one in chosen if (key := (self.layer, one)) in self.cache.places]
        known = {expert for _, expert in here}
        self._copy(own(self.slots), torch.tensor(here).view(-1, 2), self.buffer)
        self._fetch([(expert, expert) for expert in chosen if expert not in known], self.buffer)
        return Loan(self.buffer, ids)

    def _fetch(self, loads: Sequence[tuple[int, int]], target: Experts) -> None:
        """Experts from below to places of the target. One that has none to fetch asks too: that lets more be read."""
        self.copied += len(loads)
        experts, places = torch.tensor(loads, dtype=torch.int64).view(-1, 2).unbind(1)
        with closing(self.below.lend(experts[:, None])) as loans:
            for loan in loans:
                wanted = places if loan.pairs is None else places[loan.pairs]
                self._copy(own(loan.experts), torch.stack([loan.ids.flatten(), wanted], 1), target)

    def _copy(self, sources: Sequence[Tensor], moves: Tensor, target: Experts) -> None:
        """moves [M, 2]: from which place to which. Afterwards the sources may be overwritten."""
        if len(moves):
            device = target.gate.device
            fill_slots(moves.int().to(device), sources, own(target))
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


class TieredResidency:
    """The lenders of a model's layers on a device, those below them, and what they have read so far."""

    replayable = False  # no graph holds a host that reads
    source = "disk"

    def __init__(
        self, ledger: Ledger, budget: int, slots: Sequence[int], device: torch.device, per_token: int,
        policy: str = "lfu", *, direct: bool = False,
    ) -> None:  # fmt: skip
        """`budget`: bytes in host memory. `slots`: of each layer, on the device."""
        pinned: list[Tensor] = []
        weakref.finalize(self, unpin, pinned, device)

        def allocate(count: int) -> Tensor:
            area = in_memory(max(count, memory.LARGE))  # pages of its own, or two areas would pin the same
            pin(area, device)
            pinned.append(area)
            return area[:count]

        self.below = Residency(ledger, budget, per_token, policy, direct=direct, allocate=allocate)
        self.below.reader.compile()
        self.buffers: dict[tuple[Shelf, int], Experts] = {}  # for layers alike, by how many experts they have
        self.lenders: dict[str, TieredExperts] = {}
        for (name, below), count in zip(self.below.lenders.items(), slots, strict=True):
            E = below.shape[0]
            if (alike := (below.shelf, E)) not in self.buffers:
                self.buffers[alike] = like(below.slots, E, device, E)
            buffer = like(below.slots, E, device, E, self.buffers[alike])
            self.lenders[name] = TieredExperts(below, like(below.slots, count, device, E), buffer, policy)
        for lender, following in pairwise(self.lenders.values()):
            lender.following = following

    def foresee(self, layers: Sequence[object]) -> None:
        self.below.foresee(layers)

    @contextmanager
    def rehearsed(self, layers: Sequence[object]) -> Generator[None]:
        """Inside, nothing is launched, so nobody knows what is chosen, and nothing is to be read for it."""
        blocks = blocks_of(layers)
        lenders = [block.experts for block in blocks]
        for block in blocks:
            block.experts = block.experts.buffer
        try:
            yield
        finally:
            for block, lender in zip(blocks, lenders, strict=True):
                block.experts, lender.below.likely = lender, []

    def rehearse_copies(self) -> None:
        """Copy what is copied up, once for each form."""
        for lender in {id(one.below.shelf): one for one in self.lenders.values()}.values():
            loads = torch.zeros(1, 2, dtype=torch.int32, device=lender.buffer.gate.device)
            fill_slots(loads, own(lender.below.slots), own(lender.buffer))
            fill_slots(loads, own(lender.slots), own(lender.buffer))

    def mend(self) -> None:
        """After a step that failed: what it had begun to read is settled."""
        self.below.mend()

    @property
    def device_bytes(self) -> int:
        held = [*self.buffers.values(), *(lender.slots for lender in self.lenders.values())]
        return sum(part.nbytes for experts in held for part in own(experts))

    @property
    def nbytes(self) -> int:
        """In both memories."""
        return self.device_bytes + self.below.nbytes

    @property
    def reads(self) -> Reads:
        """What came from the disk; any thread may ask."""
        needed = sum(lender.needed for lender in self.lenders.values())
        return Reads(needed, self.below.reads.missing, self.below.reader.bytes, self.below.reader.seconds)

    @property
    def copied(self) -> int:
        """Experts that were not on the device when they were needed."""
        return sum(lender.copied for lender in self.lenders.values())

    @property
    def hit_rates(self) -> dict[int, float]:
        """By layer, of those that have run: what did not have to be read."""
        ran = [lender for lender in self.lenders.values() if lender.needed]
        return {one.layer: 1 - one.below.shelf.cache.misses[one.layer] / one.needed for one in ran}

    @property
    def stalls(self) -> int:
        return self.below.stalls

    def close(self) -> None:
        """End the threads and close the files; the model cannot run any more."""
        self.below.close()
