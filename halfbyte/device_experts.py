"""Experts in host memory, as many of them in slots on the GPU as there is room for.

Slots are a stack of experts, as in residency.py; what a token chose and has no slot is copied there by kernels that
read host memory over the bus, so that a recorded step needs no host (slots.py). Many tokens want nearly all experts of
a layer: then whole layers go through two buffers, and the next one is copied while this one is computed with.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .checkpoint.ledger import Mixture
from .errors import NotEnoughMemory, UsageError, size
from .expert_shares import expert_bytes, form_of
from .foresight import FromStream, neighbours
from .host_experts import named_parts, own, pin, unpin
from .ops.dispatch import as_one, find
from .ops.experts import Experts, Lender, Loan
from .residency import Reads
from .slots import State, assign_slots, fill_slots
from .stored_experts import in_slots

BUFFERS = 2  # of whole layers
MOST_EXPERTS = 4096  # of a layer: the kernel that assigns slots counts so far
# Experts of the next layer that are guessed and copied while a layer computes. 2026-11-16, H200, tok/s: none 108.0, one
# 111.7, two 109.4. Guesses are right in 94 of 100 cases; made when the next layer begins, as before, they gain nothing.
AHEAD = 1


def like(host: Experts, count: int, device: torch.device, among: int, room: Experts | None = None) -> Experts:
    """Room for so many experts of this form on a device, or the `room` of others alike; what they share is copied
    there. They are some `among` so many."""
    held, given = host.gate.shape[0], None if room is None else iter(own(room))

    def made(part: Tensor) -> Tensor:
        if part.shape[:1] != (held,):
            return part.to(device)
        return next(given) if given else torch.empty((count, *part.shape[1:]), dtype=part.dtype, device=device)

    projections = (host.gate, host.up, host.down)
    return Experts(
        *(in_slots(p, {name: made(part) for name, part in named_parts(p).items()}) for p in projections), among=among
    )


class Lane:
    """What runs beside the computing; on a CPU, before it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, work: Callable[[], None]) -> None:
        """Once all that was begun before is done."""
        if self.stream is None:
            work()
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        one_by_one = find("triton", "device", "one_by_one")
        assert one_by_one is not None
        with torch.cuda.stream(self.stream), one_by_one():
            work()

    def join(self, landed: torch.cuda.Event | None = None) -> None:
        """What comes now waits for what was begun, or for what was begun before this event."""
        if landed is not None:
            torch.cuda.current_stream(self.device).wait_event(landed)
        elif self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


class WholeLayers:
    """All experts of a layer at a time, for the layers of one form: two buffers that they take in turns."""

    def __init__(self, hosts: Sequence[Experts], lane: Lane) -> None:
        self.layers, self.lane = [own(host) for host in hosts], lane
        E = hosts[0].gate.shape[0]
        self.buffers = [like(host, E, lane.device, E) for host in hosts[:BUFFERS]]
        self.lent = [like(host, E, lane.device, E, self._buffer(index)) for index, host in enumerate(hosts)]
        self.begun: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for buffer in self.buffers for part in own(buffer))

    def lend(self, index: int, ids: Tensor) -> Generator[Loan]:
        buffer = self.lent[index]
        if self.begun != index:
            self._begin(index, ids)
        as_one("join", joined_lane, ids)(own(buffer), self.lane)
        self.begun = None
        if index + 1 < len(self.layers):
            self._begin(index + 1, ids)
        yield Loan(buffer, ids)

    def _begin(self, index: int, ids: Tensor) -> None:
        as_one("copy_layer", copied_layer, ids)(own(self._buffer(index)), self.layers[index], self.lane)
        self.begun = index

    def _buffer(self, index: int) -> Experts:
        return self.buffers[index % len(self.buffers)]


def copied_layer(targets: Sequence[Tensor], sources: Sequence[Tensor], lane: Lane) -> None:
    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    lane.begin(copy)


class HostExperts(Lender):
    """The experts of one layer: all in host memory, some in slots."""

    def __init__(self, host: Experts, slots: int, device: torch.device) -> None:
        self.host, self.count = host, slots
        E, inner, hidden = host.gate.shape
        self.shape = (E, inner, hidden)
        self.slots, self.state = like(host, slots, device, E), State.new(E, slots, device)
        self.sources = own(host)
        self.whole: tuple[WholeLayers, int] | None = None  # and the place among its layers
        self.guessed: Guess | None = None  # in this step: its copies must have landed before the choice
        self.guess: Guess | None = None  # of the next layer's choice
        self.begin_anew()

    def begin_anew(self) -> None:
        """The first experts lie in the slots, whatever was there."""
        self.guess = self.guessed = None
        for target, source in zip(own(self.slots), self.sources, strict=True):
            target.copy_(source[: self.count], non_blocking=True)
        self.state.table.copy_(State.new(self.shape[0], self.count, self.state.table.device).table)

    @property
    def expert_bytes(self) -> int:
        return sum(part[0].nbytes for part in self.sources)

    def copy_again(self, count: int) -> Callable[[], None]:
        """What copies so many experts to where they are already: to see how long that takes."""
        here = [(expert, slot) for expert, slot in enumerate(self.state.table[0].tolist()) if slot >= 0][:count]
        loads = torch.tensor(here, dtype=torch.int32, device=self.state.table.device)
        return lambda: fill_slots(loads, self.sources, own(self.slots))

    def lend(self, ids: Tensor) -> Generator[Loan]:
        if ids.numel() > self.count:
            assert self.whole is not None
            yield from self.whole[0].lend(self.whole[1], ids)
            return
        if self.guessed is not None:
            as_one("join", joined_lane, ids)((self.state, own(self.slots)), self.guessed.lane, self.guessed.landed)
            self.guessed = None
        slots, loads = assign_slots(ids, self.state)
        fill_slots(loads, self.sources, own(self.slots))
        if self.guess is not None:
            self.guess.fetch(ids)
            self.guess = None
        yield Loan(self.slots, slots)


def joined_lane(changed: object, lane: Lane, landed: torch.cuda.Event | None = None) -> None:
    lane.join(landed)


class Guess:
    """What the next layer will probably choose, from the stream as this one's experts see it: a layer adds little.

    The next router is asked while this layer's copies are on the bus; what it names is copied behind them, while this
    layer's experts and what follows are computed. A wrong guess costs a slot and a copy; no result depends on it.
    """

    def __init__(self, here: HostExperts, following: Any, lane: Lane, ahead: int) -> None:
        self.here, self.lane = here, lane
        self.choice, self.lender = FromStream(following), following.mlp.experts
        self.loads = torch.full((ahead, 2), -1, dtype=torch.int32, device=lane.device)
        self.landed = None if lane.stream is None else torch.cuda.Event()

    def __call__(self, h: Tensor, dtype: torch.dtype) -> None:
        if len(h) * self.choice.per_token <= min(self.here.count, self.lender.count):
            as_one("foresee", self._choose, h)((self.lender.state, self.loads), h, dtype, self.lane)
            self.here.guess = self

    def _choose(self, changed: object, h: Tensor, dtype: torch.dtype, lane: Lane) -> None:
        self.h = h  # as long as the lane may read it

        def choose() -> None:
            _, loads = assign_slots(self.choice(h, dtype), self.lender.state, limit=len(self.loads))
            self.loads.copy_(loads)

        lane.begin(choose)

    def fetch(self, ids: Tensor) -> None:
        """Copy what was guessed, behind all that was begun before."""
        as_one("copy_ahead", self._fetch, ids)(own(self.lender.slots), self.loads, self.lender.sources, self.lane)
        self.lender.guessed = self

    def _fetch(self, targets: Sequence[Tensor], loads: Tensor, sources: Sequence[Tensor], lane: Lane) -> None:
        lane.begin(lambda: fill_slots(loads, sources, targets))
        if self.landed is not None:
            self.landed.record(lane.stream)


class DeviceResidency:
    """The lenders of a model's layers, and what they have copied so far."""

    replayable = True  # nothing of a step is decided on the host
    source = "host memory"
    stalls = 0

    def __init__(
        self, hosts: Mapping[str, Experts], slots: Sequence[int], device: torch.device, areas: Sequence[Tensor] = ()
    ) -> None:
        pinned: list[Tensor] = []
        weakref.finalize(self, unpin, pinned, device)
        for area in areas:
            pin(area, device)
            pinned.append(area)
        self.lane = Lane(device)
        self.lenders = {
            name: HostExperts(host, count, device) for (name, host), count in zip(hosts.items(), slots, strict=True)
        }
        alike: dict[object, list[HostExperts]] = {}
        for lender in self.lenders.values():
            alike.setdefault(tuple((part.dtype, part.shape) for part in lender.sources), []).append(lender)
        self.whole = [WholeLayers([one.host for one in of], self.lane) for of in alike.values()]
        for whole, lenders in zip(self.whole, alike.values(), strict=True):
            for index, lender in enumerate(lenders):
                lender.whole = whole, index

    @property
    def nbytes(self) -> int:
        """On the device."""
        slots = sum(part.nbytes for lender in self.lenders.values() for part in own(lender.slots))
        return slots + sum(whole.nbytes for whole in self.whole)

    @property
    def counts(self) -> list[list[int]]:
        """Of each layer, as in State; whoever asks waits for the device."""
        found: list[list[int]] = torch.stack([one.state.counts for one in self.lenders.values()]).tolist()
        return found

    @property
    def reads(self) -> Reads:
        """What came over the bus counts as read, and no time: it is not measured in a step."""
        needed = missing = copied = 0
        for (asked, absent, foreseen, ahead), one in zip(self.counts, self.lenders.values(), strict=True):
            needed, missing = needed + asked, missing + absent + foreseen
            copied += (absent + ahead) * one.expert_bytes
        return Reads(needed, missing, copied, 0.0)

    def foresee(self, layers: Sequence[Any], ahead: int = AHEAD) -> None:
        """Let layers guess what the next will choose, and have so many of the experts that it misses under way."""
        for layer, following in neighbours(layers):
            layer.foresee = Guess(layer.mlp.experts, following, self.lane, ahead) if ahead else None

    def mend(self) -> None:
        """After a step that failed, or ran in pieces: slots may count as filled that are not."""
        self.lane.join()
        for whole in self.whole:
            whole.begun = None
        for lender in self.lenders.values():
            lender.begin_anew()

    def close(self) -> None:
        """Nothing is open."""


def plan(
    mixtures: Sequence[Mixture], budget: int, most: int, per_token: int, beside: int = 0, buffers: int = BUFFERS
) -> list[int]:
    """Slots for each layer, the same part of all experts, so that with so many buffers of whole layers, of each form,
    they take at most `budget` bytes.

    The least that can be worked with may be as much as `most`; `beside` is what else the device must hold, for the
    message that says how much there must be.
    """
    each, counts = [expert_bytes(one) for one in mixtures], [int(one.form.gate.shape[0]) for one in mixtures]
    if max(counts) > MOST_EXPERTS:
        raise UsageError(f"a layer has {max(counts)} experts, beside a GPU at most {MOST_EXPERTS}: use --device cpu")
    alike: dict[object, list[int]] = {}
    for layer, mixture in enumerate(mixtures):
        alike.setdefault(form_of(mixture), []).append(layer)
    whole = sum(min(buffers, len(of)) * counts[of[0]] * each[of[0]] for of in alike.values())
    least = [min(per_token, count) for count in counts]
    need = whole + sum(count * one for count, one in zip(least, each, strict=True))
    if most < need:
        layers = "two whole layers" if buffers > 1 else "a whole layer"
        raise NotEnoughMemory(
            f"the GPU has {size(max(most, 0))} for experts; the least are {layers} and the experts of one token, "
            f"{size(need)}. Give it --gpu-memory {need + beside} at least, or use --device cpu."
        )
    part = (max(budget, need) - whole) / sum(count * one for count, one in zip(counts, each, strict=True))
    return [max(few, min(int(part * count), count)) for few, count in zip(least, counts, strict=True)]
