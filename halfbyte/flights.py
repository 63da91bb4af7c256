"""Steps of answers under way: launched, followed by the next one before their tokens are read, and landed.

Who goes on is known before the tokens are: all but those whose last token is under way. So requests join and leave from
step to step on the device, where the newest ids are gathered from what the step before and the prompts have drawn, and
no step waits for the host. A request that a token ends after all has taken one too many: its state goes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cache import Cache, bytes_of, step_sizes
from .decoding import DecodeStep, Drawn
from .models.decoder import Decoder
from .replaying import small
from .request import Made, Request, replayable
from .sampling import Sampler

FEW = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # requests in a step of a small model, filled up in between
SAVED = 1 << 28  # bytes of recurrent states that are kept to go back to: beyond, no step is launched ahead


class Draw(NamedTuple):
    """Tokens drawn from the logits of prompts, and of steps that are not replayed, that are not read yet."""

    requests: list[Request]
    logits: Tensor
    processed: Tensor
    ids: Tensor  # on the device
    drawn: Drawn

    def made(self) -> list[Made]:
        ids = self.drawn.tolist()
        for row, request in enumerate(self.requests):
            if request.chooser is not None:
                ids[row] = int(request.chooser(torch.log_softmax(self.processed[row : row + 1].float(), -1)))
        return [Made(*one) for one in zip(self.requests, ids, self.logits, strict=True)]


class Flight(NamedTuple):
    """A step of answers that was launched, and whose tokens are not read yet; `logits` are a copy, where wanted."""

    requests: list[Request]
    step: DecodeStep
    drawn: Drawn
    logits: Tensor | None
    ahead: bool  # launched before the tokens that it goes on from were read: it may be for nothing

    @property
    def ids(self) -> Tensor:
        """On the device, until another step is bound to the tape."""
        return self.step.ids[: len(self.requests)]

    def made(self) -> list[Made]:
        rows: Any = repeat(self.drawn.ids.new_empty(0)) if self.logits is None else self.logits
        made = map(Made, self.requests, self.drawn.tolist(), rows)  # ids may be followed by padding
        return [one for one in made if one.request.finish_reason is None]


class Flights:
    """The steps of an engine's answers, of which one at most is under way when the engine's step ends.

    What a slot holds, by the cache's lengths, does not count the token that is under way.
    """

    def __init__(self, model: Decoder, cache: Cache, sampler: Sampler, free: list[int]) -> None:
        self.model, self.cache, self.sampler, self.free = model, cache, sampler, free
        sizes = step_sizes(cache.slots, model.device)
        self.sizes = [size for size in sizes if size in (*FEW, cache.slots)] if small(model) else sizes
        self.state_bytes = bytes_of(cache.kept, 1, 0, 1, cache.dtype)  # recurrent, of a slot
        self.saved = Saved(cache)
        self.under_way: Flight | None = None
        self.last: Flight | None = None  # that the next launch may go on from, landed or not

    def saves(self, slots: int) -> bool:
        """Whether the states of so many slots may be kept to go back to."""
        return slots * self.state_bytes <= SAVED

    def pays(self, requests: list[Request]) -> bool:
        """Whether to replay the next step, of these."""
        size, filtered = self._size(requests)
        return size in self.sizes and DecodeStep.pays(self.model, self.cache, size, filtered)

    def go_on(self, requests: list[Request]) -> bool:
        """Whether the last step was of these, and nobody has taken its tape or a slot that it fills up since."""
        if self.last is None or self.last.requests != requests or not self.last.step.bound:
            return False
        return all(slot in self.free for slot in self.last.step.lent)

    def launch(self, requests: list[Request]) -> None:
        """Have a token of each request under way, after those that were read."""
        step = self._step(requests)
        if not step.bound:
            newest = [request.made[-1] for request in requests]
            step.bind(slots_of(requests), newest, self.sampler, free=self.free)
        self._launch(step, requests, ahead=False)

    def land(self) -> Flight | None:
        """What was under way, if it was for anybody; what it computed counts from now on."""
        flight, self.under_way = self.under_way, None
        going = [] if flight is None else [request for request in flight.requests if request.finish_reason is None]
        for slot in slots_of(going):
            self.cache.lengths[slot] += 1
        return flight if going else None

    def follow(self, flight: Flight | None, draw: Draw | None, answering: Sequence[Request]) -> None:
        """Launch the step after these, of all who surely go on, unless that must wait until their tokens are read."""
        arriving = [one for one in (flight, draw) if one is not None]
        rows = [request for one in arriving for request in one.requests]
        places = [place for place, request in enumerate(rows) if wants_more(request)]
        requests = [rows[place] for place in places]
        if not requests or not {*answering} <= {*rows} or not all(map(replayable, requests)):
            return  # somebody would be left behind
        keeping = [request for request in requests if request.keeps]
        full = any(self.cache.lengths[slot] >= self.cache.capacity for slot in slots_of(requests))
        lost = flight is not None and not flight.step.bound  # another engine has taken the tape
        if full or lost or not self.saves(len(keeping)):
            return
        step = self._step(requests)
        if not step.recorded:  # who waits for a token would wait until it is
            return
        if not step.bound:
            drawn = torch.cat([one.ids for one in arriving])
            step.bind(slots_of(requests), places, self.sampler, drawn, self.free)
        self.saved.save(slots_of(keeping))
        self._launch(step, requests, ahead=True)

    def leave(self, request: Request) -> None:
        """A request has ended: where it has taken a token too many, the state before that is what it leaves."""
        flight = self.under_way
        if flight is not None and flight.ahead and request.keeps and request in flight.requests:
            assert request.slot is not None
            self.saved.restore(request.slot)

    def _step(self, requests: list[Request]) -> DecodeStep:
        """The last one, where it goes on with these; else one that is to be bound."""
        if self.last is not None:
            if self.go_on(requests):
                return self.last.step
            self.last.step.set_aside()
        size, filtered = self._size(requests)
        return DecodeStep(self.model, self.cache, size, filtered=filtered)

    def _size(self, requests: list[Request]) -> tuple[int, bool]:
        """Rows of a step that has room for these, and whether some of them draw by top-k, top-p or min-p."""
        filtered = any(one.params.temperature > 0 and one.params.filtered for one in requests)
        size = next(size for size in self.sizes if size >= len(requests))
        fits = size - len(requests) <= len(self.cache.padding) + len(self.free)
        return size if fits else len(requests), filtered

    def _launch(self, step: DecodeStep, requests: list[Request], ahead: bool) -> None:
        drawn = step.launch(counts=False)  # its tokens count when it lands
        wanted = any(request.wants_logits for request in requests)
        logits = step.logits[: len(requests)].clone() if wanted else None
        self.last = self.under_way = Flight(list(requests), step, drawn, logits, ahead)


class Saved:
    """Copies of the recurrent states of some slots, all made at once: what a step changes for good. Rows past a length
    are written over anyway."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.layers = cache, cache.layers
        self.pairs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # of each slot: its states, their copies

    def save(self, slots: Sequence[int]) -> None:
        if self.layers is not self.cache.layers:  # it has grown
            self.layers, self.pairs = self.cache.layers, {}
        self.pairs = {slot: self.pairs.get(slot) or self._pair(slot) for slot in slots}
        copy(chain(*(states for states, _ in self.pairs.values())), chain(*(kept for _, kept in self.pairs.values())))

    def restore(self, slot: int) -> None:
        """Bring a slot to where it was when it was saved."""
        copy(self.pairs[slot][1], states(self.cache, slot))  # the cache may have grown since

    def _pair(self, slot: int) -> tuple[list[Tensor], list[Tensor]]:
        found = states(self.cache, slot)
        return found, [torch.empty_like(state) for state in found]


def states(cache: Cache, slot: int) -> list[Tensor]:
    return [layer[name][slot] for one, layer in zip(cache.kept, cache.layers, strict=True) for name in one.fixed]


def copy(given: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    """All of one dtype in one launch: mixed, torch would launch each alone."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(given, into, strict=True):
        sources, targets = pairs.setdefault(source.dtype, ([], []))
        sources.append(source)
        targets.append(target)
    for sources, targets in pairs.values():
        torch._foreach_copy_(targets, sources, non_blocking=True)


def slots_of(requests: Iterable[Request]) -> list[int]:
    return [request.slot for request in requests if request.slot is not None]


def wants_more(request: Request) -> bool:
    """Whether a request goes on after the token that is under way, if that does not end it."""
    return request.finish_reason is None and len(request.made) + 1 < request.max_tokens
