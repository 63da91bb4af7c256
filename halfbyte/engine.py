"""The only loop that runs a model: requests come in, steps are made of them, tokens come out.

A request lives in one slot from its first token to its last. A step takes one token of every request that is being
answered, and of prompts as much as one piece may be: prompts do not hold up answers, nor answers prompts for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from operator import index
from typing import Any

import torch
from torch import Tensor

from .cache import Cache
from .decoding import Drawn
from .flights import Draw, Flights, slots_of
from .machine import one_for_torch
from .models.decoder import Decoder
from .ops.dispatch import is_deterministic, watched
from .prefilling import pays, prefill, together
from .request import Chooser as Chooser
from .request import Made as Made
from .request import Processor as Processor
from .request import Request as Request
from .request import replayable
from .sampling import Sampler
from .step import Wanted, upload


class Engine:
    """Runs requests on a model, up to as many at a time as the cache has slots; the others wait in order.

    `replays`: what a step of answers computes is recorded, once it has come a few times, and replayed, which takes
    Python out of the loop; None does so on CPU and CUDA, unless somebody watches ops. `ahead`: it is recorded at once,
    prompts of any model are replayed, and a step of answers is launched before the tokens of the one before are read,
    whoever joins or leaves; None does so on CUDA. A request that ends meanwhile has taken a token too many: that one is
    not counted, and the state goes back (see `Request.keeps`).
    """

    @torch.inference_mode(False)  # what is kept from step to step must serve outside of that mode too
    def __init__(self, model: Decoder, cache: Cache, *, replays: bool | None = None, ahead: bool | None = None) -> None:
        self.model, self.cache = model, cache
        self.replays = (model.device.type in ("cuda", "cpu") and not watched()) if replays is None else replays
        self.ahead = model.device.type == "cuda" if ahead is None else ahead
        if model.residency is not None and not model.residency.replayable:
            self.replays = False
        self.threads = one_for_torch if model.device.type == "cpu" else nullcontext
        self.sampler = Sampler(cache.padding.stop, model.vocabulary, model.device)
        self.room = cache.chunk  # tokens of prompts that a step takes
        self.free = list(range(cache.slots - 1, -1, -1))
        self.flights = Flights(model, cache, self.sampler, self.free)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def submit(self, request: Request) -> None:
        if not request.prompt:
            raise ValueError("the prompt is empty: a model needs at least one token to go on from")
        request.prompt = token_ids(self.model, request.prompt)
        self.waiting.append(request)

    def cancel(self, request: Request, reason: str = "cancelled") -> None:
        """End a request before its time; one that has ended already stays as it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._finish(request, reason)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @torch.inference_mode(False)
    def step(self) -> list[Made]:
        """Compute one step. A request that has ended leaves its slot; its state stays there until the next step, which
        may write into free slots."""
        if self.model.guard is not None:
            self.model.guard.check()
        while self.waiting and self.free:
            self._start(self.waiting.popleft())
        with self.threads(), self.model.turn:
            made = self._computed()
        for request, id, _ in made:
            request.made.append(id)
            if id in request.stop_ids:
                self._finish(request, "stop")
            elif len(request.made) == request.max_tokens:
                self._finish(request, "length")
        return made

    def _computed(self) -> list[Made]:
        answering = [request for request in self.running if request.computed == len(request.prompt)]
        if self.replays and (self._as_before(answering) or (all(map(replayable, answering)) and self._pays(answering))):
            return self._replayed(answering)
        flight = self.flights.land()  # one may be under way where somebody has come who cannot be replayed
        return self._written() if flight is None else flight.made()

    def _as_before(self, answering: list[Request]) -> bool:
        """Whether nobody has come or gone since a step was replayed: the usual case, of which nothing need be asked."""
        return len(answering) == len(self.running) and self.flights.go_on(answering)

    def _pays(self, answering: list[Request]) -> bool:
        """Whether the next step is better replayed: of answers alone, or with one prompt whose piece is bound too."""
        if self.ahead:
            return True
        prompting = [request for request in self.running if request.computed < len(request.prompt)]
        if len(prompting) > 1:
            return False
        for one in prompting:
            assert one.slot is not None
            if not pays(self.model, self.cache, one.slot, self._piece_length(one)):
                return False
        return not answering or self.flights.pays(answering)

    def _written(self) -> list[Made]:
        """All the work of a step at once, as the model is written."""
        self.flights.last = None
        work, wanted, drawing = self._chosen()
        if not work:
            return []
        step = self.cache.plan(work, wanted)
        with self.cache.changing(slot for slot, _ in work):
            logits = self.model(step, self.cache)
            self.cache.advance(work)
        draw = self._draw(logits, drawing)
        return [] if draw is None else draw.made()

    def _replayed(self, answering: list[Request]) -> list[Made]:
        """A token of each answer and pieces of prompts; the next answers are launched before those tokens are read."""
        with self.cache.changing(slots_of(self.running)):
            if answering and self.flights.under_way is None:
                self.flights.launch(answering)
            draw = self._prompted()
            flight = self.flights.land()
            if self.ahead:
                self.flights.follow(flight, draw, answering)
        return [made for one in (flight, draw) if one is not None for made in one.made()]

    def _prompted(self) -> Draw | None:
        """Have the next pieces of prompts under way, and the first tokens of those that are complete with them."""
        prompting = [request for request in self.running if request.computed < len(request.prompt)]
        if not prompting:
            return None
        lengths = [self._piece_length(request) for request in prompting]
        del prompting[1 if is_deterministic() else together(lengths, self.room) :]
        pieces = [self._piece(request) for request in prompting]
        logits = prefill(self.model, self.cache, *zip(slots_of(prompting), pieces, strict=True))
        rows = [row for row, request in enumerate(prompting) if request.computed == len(request.prompt)]
        logits = torch.cat([logits[:0], *(logits[row : row + 1] for row in rows)])
        return self._draw(logits, [prompting[row] for row in rows])

    def _start(self, request: Request) -> None:
        request.slot = self.free.pop()
        if not request.goes_on:
            self.cache.reset(request.slot)
        self.sampler.start(request.slot, request.params, request.prompt)
        self.running.append(request)

    def _finish(self, request: Request, reason: str) -> None:
        assert request.slot is not None
        request.finish_reason = reason
        self.running.remove(request)
        self.free.append(request.slot)
        self.flights.leave(request)

    def _chosen(self) -> tuple[list[tuple[int, list[int]]], list[Wanted], list[Request]]:
        """The work of the next step, whose logits are wanted, and the requests that a token is drawn for.

        Of prompts, those whose pieces have room together, in order. Where bits may not depend on the batch, one has a
        step of its own: kernels differ with the rows.
        """
        work: list[tuple[int, list[int]]] = []
        wanted: list[Wanted] = []
        drawing = []
        room = self.room
        prompts = [request for request in self.running if request.computed < len(request.prompt)]
        for request in prompts[:1] if prompts and is_deterministic() else self.running:
            left = len(request.prompt) - request.computed
            if left and self._piece_length(request) > room:
                continue
            assert request.slot is not None
            if left:
                piece = self._piece(request)
                room -= len(piece)
                work.append((request.slot, piece))
                wanted.append("last" if len(piece) == left else "none")
            else:
                work.append((request.slot, request.made[-1:]))
                wanted.append("last")
            if wanted[-1] == "last":
                drawing.append(request)
        return work, wanted, drawing

    def _piece(self, request: Request) -> list[int]:
        """The next tokens of a prompt, which count as computed."""
        piece = request.prompt[request.computed : request.computed + self._piece_length(request)]
        request.computed += len(piece)
        return piece

    def _piece_length(self, request: Request) -> int:
        end = request.pause if request.computed < request.pause else len(request.prompt)
        return min(self.room, end - request.computed)

    def _draw(self, logits: Tensor, requests: list[Request]) -> Draw | None:
        """Have a token of each row under way."""
        if not requests:
            return None
        slots = slots_of(requests)
        places = upload([self.cache.lengths[slot] for slot in slots], self.model.device, torch.int64)
        processed = self._processed(logits, requests)
        ids = self.sampler(processed, slots, places)
        return Draw(requests, logits, processed, ids, Drawn(ids))

    def _processed(self, logits: Tensor, drawing: Sequence[Request]) -> Tensor:
        if not any(request.processors for request in drawing):
            return logits
        rows = []
        for row, request in zip(logits.split(1), drawing, strict=True):
            ids = torch.tensor(request.prompt + request.made, device=self.model.device)
            for processor in request.processors:
                row = processor(ids, row)
            rows.append(row)
        return torch.cat(rows)


def logits(model: Decoder, ids: Sequence[int] | Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
    """The logits [T, V] of every token of one text, in float32, and the cache that holds it.

    Given that cache again, `ids` go on where the text ended.
    """
    tokens = token_ids(model, ids)
    if model.guard is not None:
        model.guard.check()
    cache = model.new_cache() if cache is None else cache
    cache.require_whole(0, "cache")
    cache.reserve(cache.lengths[0] + len(tokens))
    parts = [torch.empty(0, model.vocabulary, device=model.device)]
    for start in range(0, len(tokens), cache.chunk):
        work = [(0, tokens[start : start + cache.chunk])]
        step = cache.plan(work, "all")
        with model.turn, cache.changing([0]):
            parts.append(model(step, cache).float())
            cache.advance(work)
    return torch.cat(parts), cache


def as_integer(id: Any) -> Any:
    """NumPy's integers as Python's; what is no integer stays as it is, to be refused."""
    return index(id) if hasattr(id, "__index__") and not isinstance(id, bool) else id


def token_ids(model: Decoder, ids: Sequence[int] | Tensor) -> list[int]:
    """ids as a list, checked: a GPU would read past the embedding without a word."""
    tokens = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    tokens = [id if type(id) is int else as_integer(id) for id in tokens]
    for id in tokens:
        if type(id) is not int or not 0 <= id < model.vocabulary:
            raise ValueError(f"token ids must be integers from 0 to {model.vocabulary - 1}, got {id!r}")
    return tokens
