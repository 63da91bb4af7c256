"""What requests keep between steps. A model says what each of its layers keeps; a cache holds that for many slots.

A layer keeps rows, one a token (keys and values, latents), and things of a fixed size (recurrent states). Rows of a
layer with a window form a ring: room for the window and the longest run of new tokens, whatever the context.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from .memory import require
from .step import Step, Wanted, plan

# Rows: a cache that grows does so in steps of this, so that few copies are made; on a GPU, few steps recorded again.
GROWTH = {"cpu": 256, "cuda": 4096}


@dataclass(frozen=True)
class Kept:
    """What one layer keeps of a request: `rows` name -> shape of one token's row; `fixed` name -> shape and dtype."""

    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fixed: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = field(default_factory=dict)
    window: int | None = None

    def shapes(self, capacity: int, chunk: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape, after the axis of slots, and dtype of each tensor. dtype None in `fixed` is the activations'."""
        length = capacity if self.window is None else min(capacity, self.window + chunk - 1)
        return {name: ((length, *row), dtype) for name, row in self.rows.items()} | {
            name: (shape, own or dtype) for name, (shape, own) in self.fixed.items()
        }


@dataclass(frozen=True)
class Snapshot:
    """A request's state, apart from its slot: so many tokens, and the tensors of every layer."""

    length: int
    layers: tuple[dict[str, Tensor], ...]


class Cache:
    """The state of up to `slots` requests of at most `capacity` tokens, computed in runs of at most `chunk` tokens.

    `padding`: some slots more, nobody's, for rows that fill a step up to a size that is recorded; on a GPU by default.
    `torn`: slots in which a step ended in the middle, so that some of their recurrent states are those of a longer
    text than others. Rows that such a step left are behind a text's end, or in a ring before its window.
    """

    def __init__(
        self,
        kept: Sequence[Kept],
        slots: int,
        capacity: int,
        *,
        chunk: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        padding: int | None = None,
    ) -> None:
        self.kept, self.slots, self.chunk = tuple(kept), slots, chunk
        self.device, self.dtype = torch.device(device), dtype
        self.padding = range(slots, slots + (padding_of(slots, self.device) if padding is None else padding))
        self.lengths = [0] * self.padding.stop
        self.made_by = ""  # which model's states these are, if somebody says so
        self.torn: set[int] = set()
        self.recurrent = any(one.fixed for one in kept)
        self.capacity = capacity
        self.layers = self._made(capacity)

    @torch.inference_mode(False)
    def _made(self, capacity: int) -> list[dict[str, Tensor]]:
        return [
            {
                name: torch.zeros(self.padding.stop, *shape, dtype=dtype, device=self.device)
                for name, (shape, dtype) in one.shapes(capacity, self.chunk, self.dtype).items()
            }
            for one in self.kept
        ]

    def reserve(self, length: int) -> None:
        """Room for `length` tokens in every slot; what is held stays."""
        if length <= self.capacity:
            return
        capacity = self.grown(length)
        larger = self._made(capacity)
        for old, new in zip(self.layers, larger, strict=True):
            for name, tensor in old.items():
                # A ring grows only while it is shorter than its window: it has not turned yet, so rows stay in place.
                new[name][:, : tensor.shape[1]].copy_(tensor)
        self.layers, self.capacity = larger, capacity

    def grown(self, length: int) -> int:
        """The capacity after `reserve(length)`."""
        if length <= self.capacity:
            return self.capacity
        step = GROWTH.get(self.device.type, GROWTH["cpu"])
        return -(-max(length, self.capacity * 3 // 2) // step) * step

    def plan(self, work: Sequence[tuple[int, Sequence[int]]], wanted: Wanted | Sequence[Wanted] = "last") -> Step:
        """A step that appends new ids to slots. Their lengths count as held once `advance` is told so."""
        for slot, ids in work:
            if not 0 < len(ids) <= self.chunk:
                raise ValueError(f"a run of {len(ids)} tokens: this cache takes 1 to {self.chunk} at a time")
            if self.lengths[slot] + len(ids) > self.capacity:
                total = self.lengths[slot] + len(ids)
                raise ValueError(f"slot {slot} would hold {total} tokens: this cache has room for {self.capacity}")
        return plan(work, self.lengths, self.device, self.dtype, wanted)

    @contextmanager
    def changing(self, slots: Iterable[int]) -> Generator[None]:
        """Around a step of these slots and the advance that counts it."""
        slots = [*slots] if self.recurrent else []
        self.torn.update(slots)
        yield
        self.torn.difference_update(slots)

    def require_whole(self, slot: int, what: str) -> None:
        """ValueError if a step of a slot ended in the middle: whatever goes on from there gives wrong tokens."""
        if slot in self.torn:
            raise ValueError(
                f"{what}: a step of it failed or was interrupted, and left half of a state. Make a new one"
            )

    def advance(self, work: Sequence[tuple[int, Sequence[int]]]) -> None:
        for slot, ids in work:
            self.lengths[slot] += len(ids)

    def reset(self, slot: int) -> None:
        """Forget a request. Rows past a length are never read, but recurrent states are."""
        self.lengths[slot] = 0
        self.torn.discard(slot)
        layers = zip(self.kept, self.layers, strict=True)
        if states := [layer[name][slot] for one, layer in layers for name in one.fixed]:
            torch._foreach_zero_(states)

    def snapshot(self, slot: int) -> Snapshot:
        """Rows come out in the order of their tokens, so that a cache of another size can take them."""
        return self._saved(slot, rows=True)

    def mark(self, slot: int) -> Snapshot:
        """A snapshot without plain rows, to go back in this slot while it still holds the same text: later tokens leave
        those rows alone, and change recurrent states and rings, which are small."""
        return self._saved(slot, rows=False)

    def _saved(self, slot: int, rows: bool) -> Snapshot:
        length = self.lengths[slot]
        saved = tuple(
            {
                name: (t[slot, self._places(one, length, t.shape[1])] if name in one.rows else t[slot].clone())
                for name, t in layer.items()
                if rows or name in one.fixed or one.window is not None
            }
            for one, layer in zip(self.kept, self.layers, strict=True)
        )
        return Snapshot(length, saved)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        self.reserve(snapshot.length)
        self.lengths[slot] = snapshot.length
        for one, layer, saved in zip(self.kept, self.layers, snapshot.layers, strict=True):
            for name, tensor in saved.items():
                if name in one.rows:
                    layer[name][slot, self._places(one, snapshot.length, layer[name].shape[1])] = tensor
                else:
                    layer[name][slot] = tensor
        self.torn.discard(slot)

    def _places(self, one: Kept, length: int, rows: int) -> Tensor:
        """Where the tokens lie that a layer may still read: all of them, or those of its window."""
        first = 0 if one.window is None else max(0, length - one.window)
        return torch.arange(first, length, device=self.device) % rows

    @property
    def nbytes(self) -> int:
        return bytes_of(self.kept, self.padding.stop, self.capacity, self.chunk, self.dtype)


def step_sizes(slots: int, device: torch.device) -> list[int]:
    """How many answers a recorded step may have: any number, or on a GPU, where recording takes time, few numbers."""
    return [size for size in range(1, slots + 1) if device.type != "cuda" or size in (1, 2, slots) or size % 4 == 0]


def padding_of(slots: int, device: torch.device) -> int:
    """The most rows that fill a step up to its size; from 8 slots on it is the same, however many there are."""
    return max((larger - size - 1 for size, larger in pairwise(step_sizes(min(slots, 8), device))), default=0)


def make_room(cache: Cache, length: int, what: str) -> None:
    """Room for `length` tokens, or NotEnoughMemory before any of it is taken."""
    if length > cache.capacity:
        need = bytes_of(cache.kept, cache.padding.stop, cache.grown(length), cache.chunk, cache.dtype)
        require(need, cache.device, what)
        cache.reserve(length)


def bytes_of(kept: Sequence[Kept], slots: int, capacity: int, chunk: int, dtype: torch.dtype) -> int:
    """The memory of a cache, without making it."""
    return slots * sum(
        torch.Size(shape).numel() * own.itemsize
        for one in kept
        for shape, own in one.shapes(capacity, chunk, dtype).values()
    )
