"""The only loop that runs a model: requests come in, steps are made of them, tokens come out.

A request lives in one slot from its first token to its last. A step takes one token of every request that is being
answered, and a piece of one prompt: prompts do not hold up answers, and answers do not hold up prompts for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cache import Cache
from .decoding import DecodeStep
from .models.decoder import Decoder
from .sampling import Sampler, SamplingParams
from .step import Wanted

Processor = Callable[[Tensor, Tensor], Tensor]  # (the text's ids so far [T], logits [1, V]) -> logits [1, V]
Chooser = Callable[[Tensor], Tensor]  # log-probabilities [1, V] -> an id [1]


@dataclass(eq=False)
class Request:
    """A text to go on with. A program may change the logits (`processors`) or choose by itself (`chooser`)."""

    prompt: list[int]
    max_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    processors: Sequence[Processor] = ()
    chooser: Chooser | None = None
    goes_on: bool = False  # with the text that its slot holds already
    pause: int = 0  # a step ends after so many tokens of the prompt: there the caller can mark the state
    slot: int | None = None
    computed: int = 0  # tokens of the prompt that are in the cache
    made: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Made(NamedTuple):
    """A token that a step has made; `logits` are the row [V] that it was drawn from."""

    request: Request
    id: int
    logits: Tensor


class Engine:
    """Runs requests on a model, up to as many at a time as the cache has slots; the others wait in order.

    `replays`: steps of nothing but answers are recorded once for each number of them and replayed; None does so on a
    CUDA device, where it takes Python out of the loop.
    """

    def __init__(self, model: Decoder, cache: Cache, *, replays: bool | None = None) -> None:
        self.model, self.cache = model, cache
        self.replays = model.device.type == "cuda" if replays is None else replays
        self.recorded: dict[tuple[int, bool], DecodeStep] = {}  # by requests, and whether tokens are filtered
        self.last: tuple[DecodeStep, list[Request]] | None = None  # what the next replay may go on from
        self.sampler = Sampler(cache.slots, model.vocabulary, model.device)
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

    def step(self) -> list[Made]:
        """Compute one step. A request that has ended leaves its slot; its state stays there until the slot is taken."""
        while self.waiting and self.free:
            self._start(self.waiting.popleft())
        work, wanted, drawing = self._chosen()
        if not work:
            return []
        if self.replays and len(drawing) == len(work) and all(map(replayable, drawing)):
            logits, ids = self._replayed(drawing)
        else:
            self.last = None
            logits = self.model(self.cache.plan(work, wanted), self.cache)
            self.cache.advance(work)
            if not drawing:
                return []
            ids = self._drawn(logits, drawing)
        made = [Made(request, id, row) for request, id, row in zip(drawing, ids, logits, strict=True)]
        for request, id, _ in made:
            request.made.append(id)
            if id in request.stop_ids:
                self._finish(request, "stop")
            elif len(request.made) == request.max_tokens:
                self._finish(request, "length")
        return made

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

    def _chosen(self) -> tuple[list[tuple[int, list[int]]], list[Wanted], list[Request]]:
        """The work of the next step, whose logits are wanted, and the requests that a token is drawn for."""
        work: list[tuple[int, list[int]]] = []
        wanted: list[Wanted] = []
        drawing = []
        prompted = False
        for request in self.running:
            left = len(request.prompt) - request.computed
            if left and prompted:
                continue
            assert request.slot is not None
            if left:
                prompted = True
                before_pause = request.computed < request.pause
                limit = min(self.cache.chunk, request.pause - request.computed) if before_pause else self.cache.chunk
                piece = request.prompt[request.computed : request.computed + limit]
                request.computed += len(piece)
                work.append((request.slot, piece))
                wanted.append("last" if len(piece) == left else "none")
            else:
                work.append((request.slot, request.made[-1:]))
                wanted.append("last")
            if wanted[-1] == "last":
                drawing.append(request)
        return work, wanted, drawing

    def _replayed(self, drawing: list[Request]) -> tuple[Tensor, list[int]]:
        """One token of each request, and the logits it was drawn from: a copy, as the next replay writes over them."""
        filtered = any(one.params.temperature > 0 and one.params.filtered for one in drawing)
        key = (len(drawing), filtered)
        if key not in self.recorded:
            self.recorded[key] = DecodeStep(self.model, self.cache, len(drawing), filtered=filtered)
        step = self.recorded[key]
        if self.last is None or self.last[0] is not step or self.last[1] != drawing:
            slots = [request.slot for request in drawing if request.slot is not None]
            step.bind(slots, [request.made[-1] for request in drawing], self.sampler)
        self.last = (step, list(drawing))
        drawn = step.launch()
        assert step.logits is not None
        return step.logits.clone(), drawn.tolist()

    def _drawn(self, logits: Tensor, drawing: Sequence[Request]) -> list[int]:
        logits = self._processed(logits, drawing)
        slots = [request.slot for request in drawing if request.slot is not None]
        places = torch.tensor([self.cache.lengths[slot] for slot in slots], device=self.model.device)
        ids: list[int] = self.sampler(logits, slots, places).tolist()
        for row, request in enumerate(drawing):
            if request.chooser is not None:
                ids[row] = int(request.chooser(torch.log_softmax(logits[row : row + 1].float(), -1)))
        return ids

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


def replayable(request: Request) -> bool:
    """Whether a request goes on from one token by what its slot and its sampling parameters say alone."""
    plain = not request.processors and request.chooser is None and not request.params.logit_bias
    return plain and bool(request.made) and not request.params.penalised


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
