"""Decoding by replay: one more token for each of B requests, with all that changes from step to step on the device.

The token that a step draws is the next step's input, and places move on by themselves, so that any number of steps can
be under way before the first of their tokens is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .cache import Cache
from .fusion import fuse_in_place
from .fusion.reuse import share_memory
from .graph import Call, addresses, cut, record, run_all
from .models.decoder import Decoder
from .ops.dispatch import LANGUAGE_OF, cpu_activations, find, is_deterministic
from .ops.sampling import Sampling, sample
from .replaying import Replay, fused, shelf
from .sampling import Sampler
from .step import Run, Step, upload

OFTEN = 4  # times that steps of some size have come: then they surely come again


class Drawn:
    """The ids that a step draws, on their way to the host."""

    def __init__(self, ids: Tensor) -> None:
        self.ids, self.read = ids, list[int]()
        self.arrived: torch.cuda.Event | None = None
        if ids.device.type == "cuda":
            self.ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True).copy_(ids, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()
        else:  # the next step writes over them; a copy of torch's would let go of Python's lock, and wait for it
            self.read = ids.tolist()

    def tolist(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
            self.read = self.ids.tolist()
        return self.read


class Tape:
    """A step of B requests as it was recorded, and the tensors that it reads: whose token, where, drawn how.

    The first run computes the step as it is written and records it. Where it is fused the second runs it so, so that
    what fusions launch is compiled, and captures it. From then on it is replayed. In several `parts`, each has some of
    the requests, and none has to do with another.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        B: int,
        filtered: bool,
        fuses: bool,
        in_place: bool = False,
        parts: int = 1,
    ) -> None:
        self.dtype, self.filtered, self.fuses, self.in_place = dtype, filtered, fuses, in_place
        self.parts = [slice(*ends) for ends in pairwise(B * part // parts for part in range(parts + 1))]

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Each in memory of its own: who reads what is told by that.
        self.ids, self.slots, self.seeds = numbers(B), numbers(B), numbers(B, dtype=torch.int64)
        self.places = numbers(2, B)  # of the tokens that are computed, and the lengths that they make
        self.moves = numbers(B)
        self.settings, self.top_k = numbers(3, B, dtype=torch.float32), numbers(B)
        self.settings[1].fill_(1.0)  # top-p
        self.calls: list[Call] = []
        self.logits: list[Tensor] = []  # of each part
        self.binding: object = None  # the newest; a DecodeStep knows its own
        self._layers: object = None  # of the cache that it was recorded on
        self._captured = False
        self.replay = Replay(binds=True)

    def recorded(self, cache: Cache) -> bool:
        return self._layers is cache.layers

    def run(self, model: Decoder, cache: Cache) -> None:
        recorded, self._layers = self.recorded(cache), None  # so that after an exception all begins anew
        if not recorded:  # the first run, or the cache has grown
            self._captured = False
            self.replay.forget()
            recordings = [record(partial(self.compute, model, cache, rows)) for rows in self.parts]
            self.calls = [one for _, calls in recordings for one in calls]
            self.replay.cuts = list(accumulate(len(calls) for _, calls in recordings[:-1]))
            self.logits = [logits for logits, _ in recordings]
        elif not self._captured and self.fuses:
            self.calls = fused(self.calls, model, len(self.ids))
            run_all(self.calls)
            self.replay.prepare(self.calls, model, shelf(model, cache).pool)
            self._captured = True
        else:
            if not self._captured and model.device.type == "cpu":
                self.calls = fuse_in_place(self.calls) if self.in_place else self.calls
                for part in cut(self.calls, self.replay.cuts):
                    share_memory(part, addresses(self.logits))
            self._captured = True
            self.replay.run(self.calls, model, shelf(model, cache).pool)
            if self.replay.in_turn:  # all that parts cost and nothing that they give: recorded anew, in one
                self.parts = [slice(len(self.ids))]
                return
        self._layers = cache.layers

    def compute(self, model: Decoder, cache: Cache, rows: slice) -> Tensor:
        """The logits of some of the requests, whose next tokens are drawn."""
        ids, slots, places = self.ids[rows], self.slots[rows], self.places[:, rows]
        temperature, top_p, min_p = self.settings[:, rows]
        params = Sampling(temperature, self.top_k[rows], top_p, min_p) if self.filtered else Sampling(temperature)
        step = Step(ids, places[0], (Run(0, len(ids), 1, slots, places[1]),), self.dtype)
        logits = model(step, cache)
        sample(logits, params, self.seeds[rows], places[1], out=ids)
        places += self.moves[rows]
        return logits


def rehearse(model: Decoder, cache: Cache, B: int) -> None:
    """Launch all that a step of B requests launches: as it is written, and fused or bound."""
    tape = Tape(model.device, cache.dtype, B, filtered=False, fuses=True)
    tape.places[1].fill_(1)
    _, calls = record(lambda: tape.compute(model, cache, slice(B)))
    if (traced := find(LANGUAGE_OF.get(model.device.type, "torch"), "binding", "traced")) is not None:
        traced(calls)
    else:
        run_all(fused(calls, model, B))


def tape_key(model: Decoder, B: int, filtered: bool, fused: bool | None, parts: int | None = None) -> tuple[Any, ...]:
    """What a tape is made for, and the settings that it was recorded under."""
    fuses = model.device.type == "cuda" if fused is None else fused
    if parts is None:
        parts = parts_of(model, B) if fused is None else 1
    return "decode", B, filtered, fuses, fused is None and B == 1, parts, cpu_activations(), is_deterministic()


def parts_of(model: Decoder, B: int) -> int:
    """In how many parts a step of B requests is best replayed."""
    shares = find(LANGUAGE_OF.get(model.device.type, "torch"), "binding", "shares")
    if shares is None or model.nbytes is None or model.residency is not None:
        return 1
    parts: int = shares(B, model.nbytes)
    return parts


class DecodeStep:
    """One token of up to B requests, by a tape that all who decode so many on this cache share.

    Tokens are drawn at a temperature each (0 is greedy) and, where `filtered`, by top-k, top-p and min-p. Fusing may
    move weights: the steps of one model are all fused, or none is. If nobody says, they are on a GPU, and in place on a
    CPU, where a small model's are in several `parts`.
    """

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        B: int,
        *,
        filtered: bool = False,
        fused: bool | None = None,
        parts: int | None = None,
    ) -> None:
        self.model, self.cache, self.B = model, cache, B
        self.key = key = tape_key(model, B, filtered, fused, parts)
        self.tape = shelf(model, cache).get(key, lambda: Tape(model.device, cache.dtype, *key[1:6]))
        self.rows: list[int] = []
        self.lent: list[int] = []  # slots of nobody's that are no padding: they may become somebody's
        self._binding: object = None

    @staticmethod
    def pays(model: Decoder, cache: Cache, B: int, filtered: bool) -> bool:
        """Whether to replay a step of so many, asked before each: it was recorded, or came often enough to be now.

        While many come and go, some numbers of answers come once: recording those would only cost.
        """
        return shelf(model, cache).worth(tape_key(model, B, filtered, None), OFTEN)

    def set_aside(self) -> None:
        """Another step comes next: until now this was the one used last."""
        shelf(self.model, self.cache).touch(self.key)

    @property
    def ids(self) -> Tensor:
        return self.tape.ids

    @property
    def places(self) -> Tensor:
        return self.tape.places

    @property
    def calls(self) -> list[Call]:
        return self.tape.calls

    @property
    def logits(self) -> Tensor:
        """Of the step that was launched last, [B, V]; the next one writes over them."""
        logits = self.tape.logits
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @property
    def bound(self) -> bool:
        """Whether the tape goes on with what this step was bound to."""
        return self._binding is not None and self.tape.binding is self._binding

    @property
    def recorded(self) -> bool:
        """Whether a launch runs what was recorded; else it runs the step as it is written, and records it."""
        return self.tape.recorded(self.cache)

    def bind(
        self,
        slots: Sequence[int],
        ids: Sequence[int],
        sampler: Sampler | None = None,
        drawn: Tensor | None = None,
        free: Sequence[int] = (),
    ) -> None:
        """The requests to go on with: the slots they live in, and each one's newest token, which no step has taken.

        Where the host has not read those tokens, `ids` are their places among what was `drawn`, on the device.
        Where they are fewer than B, the rows that are left compute tokens of nobody's in the cache's slots for padding,
        and in `free` ones.
        """
        self.rows, padding = list(slots), self.cache.padding
        self.lent = list(free[: max(self.B - len(slots) - len(padding), 0)])
        held = [self.cache.lengths[slot] for slot in slots]
        used = [(id, slot, length, length + 1, 1) for id, slot, length in zip(ids, slots, held, strict=True)]
        columns = [*used, *((0, slot, 0, 1, 0) for slot in (*padding, *self.lent)[: self.B - len(used)])]
        assert len(columns) == self.B
        given = upload(list(zip(*columns, strict=True)), self.model.device)
        tape = self.tape
        tape.binding = self._binding = object()
        tape.ids.copy_(given[0] if drawn is None else drawn.index_select(0, given[0]))
        tape.slots.copy_(given[1])
        tape.places.copy_(given[2:4])
        tape.moves.copy_(given[4])
        if sampler is not None:
            rows = given[1].long()
            tape.settings.copy_(sampler.settings[:3, rows])
            tape.top_k.copy_(sampler.top_k[rows])
            tape.seeds.copy_(sampler.seeds[rows])

    def launch(self, counts: bool = True) -> Drawn:
        """Compute one step, or, on a GPU, have it under way. The cache `counts` its tokens, or the caller will."""
        if not self.bound:
            raise RuntimeError(
                "another step was bound to the tape since, or none was: say again whose tokens come next"
            )
        lengths = self.cache.lengths
        longest = max([lengths[slot] for slot in self.rows], default=0)
        if longest >= self.cache.capacity:
            raise ValueError(f"a slot would hold {longest + 1} tokens: this cache has room for {self.cache.capacity}")
        self.tape.run(self.model, self.cache)
        for slot in self.rows if counts else ():
            lengths[slot] += 1
        return Drawn(self.tape.ids)
