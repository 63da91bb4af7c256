"""Decoding by replay: one more token for each of B requests, with all that changes from step to step on the device.

The token that a step draws is the next step's input, and places move on by themselves, so that any number of steps can
be under way before the first of their tokens is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .cache import Cache
from .fusion import fuse
from .graph import Call, bound, record, run_all
from .models.decoder import Decoder
from .ops.sampling import Sampling, sample
from .sampling import Sampler
from .step import Run, Step


class Drawn:
    """The ids that a step draws, on their way to the host."""

    def __init__(self, ids: Tensor) -> None:
        self.arrived: torch.cuda.Event | None = None
        if ids.device.type == "cuda":
            self.ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True).copy_(ids, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()
        else:
            self.ids = ids.clone()

    def tolist(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        ids: list[int] = self.ids.tolist()
        return ids


class DecodeStep:
    """One token of B requests. The first launch runs the model and records it, the next ones replay that, fused.

    Tokens are drawn at a temperature each (0 is greedy) and, where `filtered`, by top-k, top-p and min-p. Fusing moves
    weights, and a captured graph keeps their addresses: the steps of one model are all fused, or none is.
    """

    def __init__(
        self, model: Decoder, cache: Cache, B: int, *, filtered: bool = False, fused: bool | None = None,
        pool: Any = None,
    ) -> None:  # fmt: skip
        self.model, self.cache, self.B, self.pool = model, cache, B, pool
        self.fused = model.device.type == "cuda" if fused is None else fused

        def numbers(*shape: int, dtype: torch.dtype = torch.int32, value: float = 0) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=model.device)

        self.ids, self.slots, self.seeds = numbers(B), numbers(B), numbers(B, dtype=torch.int64)
        self.places = numbers(2, B)  # of the tokens that are computed, and the lengths they make
        self.settings, self.top_k = numbers(3, B, dtype=torch.float32), numbers(B)
        temperature, top_p, min_p = self.settings
        self.params = Sampling(temperature, self.top_k, top_p, min_p) if filtered else Sampling(temperature)
        self.step = Step(self.ids, self.places[0], (Run(0, B, 1, self.slots, self.places[1]),), cache.dtype)
        self.rows: list[int] = []
        self.calls: list[Call] = []
        self.logits: Tensor | None = None  # of the step that was launched last
        self._replay: Callable[[], None] | None = None
        self._layers: Any = None
        self._ran = False

    def bind(self, slots: Sequence[int], ids: Sequence[int], sampler: Sampler | None = None) -> None:
        """The requests to go on with: the slots they live in, and each one's newest token, which no step has taken."""
        self.rows = list(slots)
        held = [self.cache.lengths[slot] for slot in slots]
        given = torch.tensor([list(ids), self.rows, held, [length + 1 for length in held]], dtype=torch.int32)
        given = given.to(self.model.device)
        self.ids.copy_(given[0])
        self.slots.copy_(given[1])
        self.places.copy_(given[2:])
        if sampler is not None:
            rows = given[1].long()
            self.settings.copy_(sampler.settings[:3, rows])
            self.top_k.copy_(sampler.top_k[rows])
            self.seeds.copy_(sampler.seeds[rows])

    def launch(self) -> Drawn:
        """Compute one step, or, on a GPU, have it under way."""
        longest = max(self.cache.lengths[slot] for slot in self.rows)
        if longest >= self.cache.capacity:
            raise ValueError(f"a slot would hold {longest + 1} tokens: this cache has room for {self.cache.capacity}")
        if self._layers is not self.cache.layers:  # the first launch, or the cache has grown
            self._layers, self._replay, self._ran = self.cache.layers, None, False
            self.logits, self.calls = record(self._compute)
        elif not self._ran:  # so that what fusions launch is compiled before it is captured
            self.calls = fuse(self.calls) if self.fused else self.calls
            run_all(self.calls)
            self._ran = True
        else:
            self._replay = self._replay or bound(self.calls, self.model.device, self.pool)
            self._replay()
        for slot in self.rows:
            self.cache.lengths[slot] += 1
        return Drawn(self.ids)

    def _compute(self) -> Tensor:
        logits = self.model(self.step, self.cache)
        sample(logits, self.params, self.seeds, self.places[1], out=self.ids)
        self.places += 1
        return logits
