"""Prompts by replay: pieces of a few sizes, captured or bound once, so that the host does not hold them up.

Which ids, how many, where they stand, in which slot and after how many others are read from the device, and attention's
launch sizes follow from the cache's room, not from the text: one graph serves every piece that it is large enough for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .cache import Cache
from .fusion.reuse import share_memory
from .graph import Call, addresses, call, record
from .models.decoder import Decoder
from .ops.dispatch import cpu_activations, is_deterministic
from .replaying import Replay, captures, shelf, small
from .step import Run, Step, upload

SIZES = (128, 512)  # of graphs, beside that of a whole chunk
BOUND = (16, 32, 64, 96, 128)  # on a CPU; what fills a piece up takes less than Python's 2.5 ms
OFTEN = 12  # pieces as they are written that cost as much more than bound ones as recording and binding one does
PAIR = SIZES[0]  # two pieces of up to so many tokens share a graph: most of its time goes into weights, read once


class Chunk:
    """Up to so many tokens of each of B prompts. The first run is as written, so that kernels are compiled; then
    captured, or, where it `binds`, recorded and then bound.

    A recorded list of calls keeps every result of every layer apart until it is bound: gigabytes, if a model is large.
    In a capture they take each other's places as in an eager run, and only the last tokens' logits are kept.
    """

    def __init__(self, model: Decoder, cache: Cache, size: int, B: int = 1, binds: bool = False) -> None:
        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=model.device)

        self.size, self.B = size, B
        self.ids, self.positions = numbers(B, size), numbers(B, size)
        self.rows = slots, self.lengths, counts, last = [numbers(B) for _ in range(4)]
        self.offsets = torch.arange(-size, 0, dtype=torch.int32, device=model.device)
        run = Run(0, B, size, slots, self.lengths)
        self.step = Step(self.ids.view(-1), self.positions.view(-1), (run,), cache.dtype, last, counts)
        self.logits: Tensor | None = None
        self.calls: list[Call] = []  # of one that binds
        self._layers: object = None
        self.replay = Replay(binds)

    def run(self, model: Decoder, cache: Cache, work: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """The logits [B, V] of the last token of each (slot, ids); the next run writes over them.

        Rows behind them are filled with tokens that nothing keeps: they are written past the text's end, and states
        do not take them in.
        """
        filled = [id for _, ids in work for id in (*ids, *[0] * (self.size - len(ids)))]
        rows = [
            (slot, cache.lengths[slot] + self.size, len(ids), row * self.size + len(ids) - 1)
            for row, (slot, ids) in enumerate(work)
        ]
        given = upload([*filled, *chain(*zip(*rows, strict=True))], model.device)
        for numbers, part in zip(
            (self.ids.view(-1), *self.rows), given.split([len(filled), *[self.B] * 4]), strict=True
        ):
            numbers.copy_(part)
        torch.add(self.lengths[:, None], self.offsets, out=self.positions)
        again, self._layers = self._layers is cache.layers, None
        if not again:  # the first run, or the cache has grown
            self.replay.forget()
            self._first(model, cache)
        elif self.replay.binds:
            if self.replay.pending(model):
                share_memory(self.calls, addresses(self.logits))
            self.replay.run(self.calls, model, None)
        else:
            whole = call("prefill", lambda: self._compute(model, cache), (), {}, ())
            self.replay.run([whole], model, shelf(model, cache).pool)
        self._layers = cache.layers
        assert self.logits is not None
        return self.logits

    def _first(self, model: Decoder, cache: Cache) -> None:
        if self.replay.binds:
            self.logits, self.calls = record(partial(model, self.step, cache))
        else:
            self._compute(model, cache)

    def _compute(self, model: Decoder, cache: Cache) -> None:
        logits = model(self.step, cache)
        self.logits = logits.clone() if self.logits is None else self.logits.copy_(logits)


def graphs(model: Decoder, cache: Cache) -> list[tuple[int, int]]:
    """(tokens of a piece, pieces) of all that are captured or bound."""
    on_gpu = captures(model.device)
    offered = (*SIZES, cache.chunk) if on_gpu else BOUND if small(model) else ()
    sizes = [size for size in dict.fromkeys(offered) if size <= min(cache.capacity, cache.chunk)]
    return [(size, 1) for size in sizes] + [(PAIR, 2)] * (on_gpu and PAIR in sizes and cache.slots > 1)


def pays(model: Decoder, cache: Cache, slot: int, tokens: int) -> bool:
    """Whether to have the next piece of a prompt bound, asked before each: it was recorded, or came often enough to be
    now."""
    key = key_of(model, cache, [(slot, range(tokens))])
    return key is not None and shelf(model, cache).worth(key, OFTEN)


def key_of(model: Decoder, cache: Cache, work: Sequence[tuple[int, Sequence[int]]]) -> tuple[Any, ...] | None:
    """What serves these pieces, by its size and the settings that it was made under; None where nothing does."""
    longest = max(len(ids) for _, ids in work)
    most = min(cache.chunk, *(cache.capacity - cache.lengths[slot] for slot, _ in work))
    sizes = [size for size, pieces in graphs(model, cache) if pieces == len(work)]
    size = next((size for size in sizes if longest <= size <= most), None)
    return None if size is None else ("prefill", size, len(work), cpu_activations(), is_deterministic())


def together(lengths: Sequence[int], room: int) -> int:
    """How many of the next pieces of prompts, of these lengths, are computed in one step of up to `room` tokens."""
    return 2 if len(lengths) > 1 and max(lengths[:2]) <= PAIR <= room // 2 else 1


def prefill(model: Decoder, cache: Cache, *work: tuple[int, Sequence[int]]) -> Tensor:
    """Append pieces of prompts to slots. The logits [pieces, V] of their last tokens; a later call may reuse them."""
    if (key := key_of(model, cache, work)) is None:
        logits = model(cache.plan(work), cache)
    else:
        _, size, B, *_ = key
        make = partial(Chunk, model, cache, size, B, binds=not captures(model.device))
        chunk = shelf(model, cache).get(key, make)
        logits = chunk.run(model, cache, work)
    cache.advance(work)
    return logits
