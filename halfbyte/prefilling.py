"""Prompts by replay: pieces of a few sizes, captured once and replayed, so that the host does not hold them up.

Which ids, how many, where they stand, in which slot and after how many others are read from the device, and attention's
launch sizes follow from the cache's room, not from the text: one graph serves every piece that it is large enough for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .cache import Cache
from .graph import call
from .models.decoder import Decoder
from .replaying import Replay, shelf, upload
from .step import Run, Step

SIZES = (128, 512)  # of graphs, beside that of a whole chunk; where nothing is captured, filling one up costs time


class Chunk:
    """Up to so many tokens of one prompt. The first run is as written, so that kernels are compiled; then captured.

    A recorded list of calls would keep every result of every layer apart: gigabytes. In a capture they take each
    other's places as in an eager run, and only the last token's logits are kept.
    """

    def __init__(self, model: Decoder, cache: Cache, size: int) -> None:
        def numbers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=model.device)

        self.size = size
        self.ids, self.positions = numbers(size), numbers(size)
        self.slot, self.length, self.count, self.last = (numbers(1) for _ in range(4))
        run = Run(0, 1, size, self.slot, self.length)
        self.step = Step(self.ids, self.positions, (run,), cache.dtype, self.last, self.count)
        self.logits: Tensor | None = None
        self._layers: object = None
        self.replay = Replay()

    def run(self, model: Decoder, cache: Cache, slot: int, ids: Sequence[int]) -> Tensor:
        """The logits [1, V] of the last of these tokens; the next run writes over them.

        Rows behind them are filled with tokens that nothing keeps: they are written past the text's end, and states
        do not take them in.
        """
        held, count = cache.lengths[slot], len(ids)
        filled = [*ids, *[0] * (self.size - count)]
        given = upload([*filled, slot, held + self.size, count, count - 1], model.device)
        for number, part in zip(
            (self.ids, self.slot, self.length, self.count, self.last), given.split([self.size, 1, 1, 1, 1]), strict=True
        ):
            number.copy_(part)
        torch.arange(held, held + self.size, out=self.positions)
        again, self._layers = self._layers is cache.layers, None
        if not again:  # the first run, or the cache has grown
            self.replay.forget()
            self._compute(model, cache)
        else:
            work = call("prefill", lambda: self._compute(model, cache), (), {}, ())
            self.replay.run([work], model, shelf(model, cache).pool)
        self._layers = cache.layers
        assert self.logits is not None
        return self.logits

    def _compute(self, model: Decoder, cache: Cache) -> None:
        logits = model(self.step, cache)
        self.logits = logits.clone() if self.logits is None else self.logits.copy_(logits)


def prefill(model: Decoder, cache: Cache, slot: int, ids: Sequence[int]) -> Tensor:
    """Append a piece of a prompt to a slot. The logits [1, V] of its last token, which a later piece may write over."""
    most = min(cache.capacity - cache.lengths[slot], cache.chunk)
    sizes = (*SIZES, cache.chunk) if model.device.type == "cuda" else (cache.chunk,) * (len(ids) == cache.chunk)
    if (size := next((size for size in sizes if len(ids) <= size <= most), None)) is not None:
        chunk = shelf(model, cache).get(("prefill", size), partial(Chunk, model, cache, size))
        logits = chunk.run(model, cache, slot, ids)
    else:
        logits = model(cache.plan([(slot, ids)]), cache)
    cache.advance([(slot, ids)])
    return logits
