"""The only loop that runs a model: requests come in, steps are made of them, tokens come out.

A request lives in one slot from its first token to its last. A step takes one token of every request that is being
answered, and of prompts as much as one piece may be: prompts do not hold up answers, nor answers prompts for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cache import Cache, bytes_of, step_sizes
from .decoding import DecodeStep, Drawn
from .models.decoder import Decoder
from .ops.dispatch import is_deterministic, watched
from .prefilling import prefill, together
from .request import Chooser as Chooser
from .request import Made as Made
from .request import Processor as Processor
from .request import Request as Request
from .request import replayable
from .sampling import Sampler
from .step import Wanted, upload

SAVED = 1 << 28  # bytes of recurrent states that are kept to go back to: beyond, no step is launched ahead


class Flight(NamedTuple):
    """A step of answers that was launched, and whose tokens are not read yet; `logits` are a copy, where wanted."""

    requests: list[Request]
    drawn: Drawn
    logits: Tensor | None
    ahead: bool  # launched before the tokens that it goes on from were read: it may be for nothing


class Draw(NamedTuple):
    """Tokens drawn from the logits of prompts, and of steps that are not replayed, that are not read yet."""

    requests: list[Request]
    logits: Tensor
    processed: Tensor
    drawn: Drawn


class Bound(NamedTuple):
    """The requests that a recorded step goes on with."""

    step: DecodeStep
    requests: list[Request]


class Engine:
    """Runs requests on a model, up to as many at a time as the cache has slots; the others wait in order.

    `replays`: what a step of answers computes is recorded once and replayed, which takes Python out of the loop; None
    does so on CPU and CUDA, unless somebody watches ops. `ahead`: prompts are replayed too, and a step of answers is
    launched before the tokens of the one before are read; None does so on CUDA. A request that ends meanwhile has taken
    a token too many: that one is not counted, and the state goes back (see `Request.keeps`).
    """

    @torch.inference_mode(False)  # what is kept from step to step must serve outside of that mode too
    def __init__(self, model: Decoder, cache: Cache, *, replays: bool | None = None, ahead: bool | None = None) -> None:
        self.model, self.cache = model, cache
        self.replays = (model.device.type in ("cuda", "cpu") and not watched()) if replays is None else replays
        self.ahead = model.device.type == "cuda" if ahead is None else ahead
        if model.residency is not None and not model.residency.replayable:
            self.replays = False
        self.sizes = step_sizes(cache.slots, model.device)
        self.state_bytes = bytes_of(cache.kept, 1, 0, 1, cache.dtype)  # recurrent, of a slot
        self.flight: Flight | None = None
        self.last: Bound | None = None  # what the next launch may go on from
        self.sampler = Sampler(cache.padding.stop, model.vocabulary, model.device)
        self.room = cache.chunk  # tokens of prompts that a step takes
        self.free = list(range(cache.slots - 1, -1, -1))
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
        """Compute one step. A request that has ended leaves its slot; its state stays there until the next step."""
        while self.waiting and self.free:
            self._start(self.waiting.popleft())
        answering = [request for request in self.running if request.computed == len(request.prompt)]
        if self.replays and (self.ahead or len(answering) == len(self.running)) and all(map(replayable, answering)):
            made = self._replayed(answering)
        else:  # a step may be under way where somebody has come who cannot be replayed
            made = self._written() if self.flight is None else self._landed()
        for request, id, _ in made:
            request.made.append(id)
            if id in request.stop_ids:
                self._finish(request, "stop")
            elif len(request.made) == request.max_tokens:
                self._finish(request, "length")
        return made

    def _written(self) -> list[Made]:
        """All the work of a step at once, as the model is written."""
        self.last = None
        work, wanted, drawing = self._chosen()
        if not work:
            return []
        logits = self.model(self.cache.plan(work, wanted), self.cache)
        self.cache.advance(work)
        return self._made(self._draw(logits, drawing))

    def _replayed(self, answering: list[Request]) -> list[Made]:
        """Answers and pieces of prompts, one after the other; or answers alone, and the step after them."""
        if self.flight is None and answering:
            self._launch(answering)
        prompting = [request for request in self.running if request.computed < len(request.prompt)]
        if not prompting:
            return self._landed(answering) if self.flight is not None else []
        lengths = [self._piece_length(request) for request in prompting]
        del prompting[1 if is_deterministic() else together(lengths, self.room) :]
        slots = [request.slot for request in prompting if request.slot is not None]
        logits = prefill(self.model, self.cache, *zip(slots, map(self._piece, prompting), strict=True))
        rows = [row for row, request in enumerate(prompting) if request.computed == len(request.prompt)]
        drawing = [prompting[row] for row in rows]
        logits = torch.cat([logits[:0], *(logits[row : row + 1] for row in rows)])
        draw = self._draw(logits, drawing)  # before the next step of answers, which may follow
        made = self._landed(answering) if self.flight is not None else []
        return made + self._made(draw)

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
        if self.flight is not None and self.flight.ahead and request in self.flight.requests and request.keeps:
            assert self.last is not None
            self.last.step.go_back(request.slot)

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

    def _launch(self, requests: list[Request], ahead: bool = False) -> None:
        """Have one token of each request under way."""
        if self.last is None or self.last.requests != requests or not self.last.step.bound:
            filtered = any(one.params.temperature > 0 and one.params.filtered for one in requests)
            size = next(size for size in self.sizes if size >= len(requests))
            step = DecodeStep(self.model, self.cache, size, filtered=filtered)
            slots = [request.slot for request in requests if request.slot is not None]
            step.bind(slots, [request.made[-1] for request in requests], self.sampler)
            self.last = Bound(step, list(requests))
        step = self.last.step
        if ahead and any(request.keeps for request in requests):
            step.save()
        drawn = step.launch()
        assert step.logits is not None
        wanted = any(request.wants_logits for request in requests)
        self.flight = Flight(list(requests), drawn, step.logits[: len(requests)].clone() if wanted else None, ahead)
        for slot in step.rows:
            self.cache.lengths[slot] -= 1  # counted when the tokens are read

    def _landed(self, answering: Sequence[Request] = ()) -> list[Made]:
        """The tokens that are under way. Where these requests surely go on, their next step is launched first."""
        flight, self.flight = self.flight, None
        assert flight is not None
        for request in flight.requests:
            if request.finish_reason is None and request.slot is not None:
                self.cache.lengths[request.slot] += 1
        if self.ahead and list(answering) == flight.requests and self._goes_on(flight.requests):
            self._launch(flight.requests, ahead=True)
        rows: Any = flight.drawn.ids.new_empty(len(flight.requests), 0) if flight.logits is None else flight.logits
        made = zip(flight.requests, flight.drawn.tolist(), rows, strict=False)  # ids may be followed by padding
        return [Made(*one) for one in made if one[0].finish_reason is None]

    def _goes_on(self, requests: list[Request]) -> bool:
        """Whether another step is needed whatever tokens are under way, unless a request is ended by one of them."""
        if self.last is None or not self.last.step.bound:
            return False
        longest = max(self.cache.lengths[slot] for slot in self.last.step.rows)
        if longest >= self.cache.capacity or any(len(one.made) + 1 >= one.max_tokens for one in requests):
            return False
        return not any(one.keeps for one in requests) or self.state_bytes * len(requests) <= SAVED

    def _draw(self, logits: Tensor, requests: list[Request]) -> Draw | None:
        """Have a token of each row under way."""
        if not requests:
            return None
        slots = [request.slot for request in requests if request.slot is not None]
        places = upload([self.cache.lengths[slot] for slot in slots], self.model.device, torch.int64)
        processed = self._processed(logits, requests)
        return Draw(requests, logits, processed, Drawn(self.sampler(processed, slots, places)))

    def _made(self, draw: Draw | None) -> list[Made]:
        if draw is None:
            return []
        ids = draw.drawn.tolist()
        for row, request in enumerate(draw.requests):
            if request.chooser is not None:
                ids[row] = int(request.chooser(torch.log_softmax(draw.processed[row : row + 1].float(), -1)))
        return [Made(*one) for one in zip(draw.requests, ids, draw.logits, strict=True)]

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
    cache = model.new_cache() if cache is None else cache
    cache.reserve(cache.lengths[0] + len(tokens))
    parts = [torch.empty(0, model.vocabulary, device=model.device)]
    for start in range(0, len(tokens), cache.chunk):
        work = [(0, tokens[start : start + cache.chunk])]
        parts.append(model(cache.plan(work, "all"), cache).float())
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
