"""The experts of a layer, most of them on disk and some in slots.

Slots are a stack of experts as a layer has one, with the parts and the format of the file. What a layer chose is read
into slots, its ids become those of the slots, and the op that computes with them is the same as ever, to the last bit.
While a layer computes with the last of its experts, what the next one will probably choose is read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import memory
from .checkpoint import finite
from .checkpoint.ledger import Mixture
from .checkpoint.spans import Span
from .errors import CheckpointError, StorageError
from .expert_cache import POLICIES, ExpertCache, Key, Round, busy_last
from .expert_ranges import Integers, Range, Where, address_of
from .expert_reader import ExpertReader, compiled
from .expert_shares import Form, Part, Share, parts_of
from .ops.experts import Experts, Lender, Loan, Projection
from .ops.formats import Packed

CPU = torch.device("cpu")

Load = tuple[Key, int]  # an expert, and the slot that it is read into


def in_memory(count: int) -> Tensor:
    """So many bytes, taken now: whoever asks what is free must see it."""
    return memory.allocate(count, CPU).zero_()


class Shelf:
    """The slots of one share: memory, what is in it, and the bytes of each slot as a read fills them."""

    def __init__(self, share: Share, form: Form, policy: str, allocate: Callable[[int], Tensor] = in_memory) -> None:
        self.share, self.cache = share, ExpertCache(share.slots, POLICIES[policy])
        self.tensors: dict[Part, Tensor] = {}
        self.views: dict[Part, memoryview] = {}
        for part, kind, shape in form:
            span = Span("", kind, (share.slots, *shape), ())
            flat = allocate(span.size)
            self.tensors[part], self.views[part] = flat.view(span.dtype).view(span.shape), flat.numpy().data
        self.addresses = np.array([address_of(view) for view in self.views.values()], np.int64)  # of the first slot

    @property
    def nbytes(self) -> int:
        return sum(len(view) for view in self.views.values())

    def slot(self, part: Part, slot: int) -> memoryview:
        view = self.views[part]
        each = len(view) // self.share.slots
        return view[slot * each : (slot + 1) * each]


class Ahead:
    """What is read before it is asked for: of one layer at a time, by the reader that all layers share.

    `sound`: shelves hold what they are said to. It is not so while a layer lends: whatever ends that in the middle, an
    interrupt between any two operations, leaves it so, and then nothing of them is believed.
    """

    def __init__(self, reader: ExpertReader, shelves: Sequence[Shelf]) -> None:
        self.reader, self.shelves, self.sound = reader, shelves, True
        self.layer: StoredExperts | None = None
        self.experts: list[int] = []

    def enter(self) -> None:
        """Before a layer lends: what was begun is done, and shelves hold what they are said to."""
        if self.sound:
            self.sound = False
            self.settle()
            return
        self.reader.stop()
        self.layer = None
        for shelf in self.shelves:
            shelf.cache.clear()

    def begin(self, layer: StoredExperts, likely: list[int], busy: list[Key]) -> None:
        """Read as many of these experts as have room beside those that are busy, the likeliest first."""
        loads = layer.shelf.cache.ahead(layer.layer, likely, busy)
        if loads:
            self.layer, self.experts = layer, [expert for (_, expert), _ in loads]
            with self._nobodys_faults():
                self.reader.start(layer.ranges(loads))

    def settle(self) -> None:
        """Wait for what was begun."""
        if self.layer is not None:
            with self._nobodys_faults():
                self.reader.finish()
            self.layer = None

    @contextmanager
    def _nobodys_faults(self) -> Generator[None]:
        """What failed is forgotten, or it would count as read. A fault is nobody's yet: whoever needs that expert reads
        it again, and meets it."""
        try:
            yield
        except Exception as error:
            layer, self.layer = self.layer, None
            assert layer is not None
            layer.shelf.cache.forget(layer.layer, self.experts)
            if not isinstance(error, CheckpointError | StorageError):
                raise


class StoredExperts(Lender):
    """The experts of one layer, most of them on disk."""

    asks = True

    def __init__(self, layer: int, mixture: Mixture, shelf: Shelf, ahead: Ahead, common: Mapping[str, Tensor]) -> None:
        self.layer, self.parts, self.shelf, self.ahead = layer, parts_of(mixture), shelf, ahead
        self.following: StoredExperts | None = None  # the next layer's
        self.likely: list[int] = []  # what that one will probably choose, the likeliest first
        self.checked: set[int] = set()  # experts that were seen to hold numbers: their files stay as they are
        gate = mixture.form.gate.shape
        self.shape = (gate[0], gate[1], gate[2])
        self.forms = forms = (mixture.form.gate, mixture.form.up, mixture.form.down)
        held: list[dict[str, Tensor]] = []
        for at, spans in enumerate(mixture.parts):
            tensors, names = shelf.tensors, {name: span.name for name, span in spans.items()}
            held.append({n: tensors[at, n] if (at, n) in tensors else common[names[n]] for n in spans})
        self.slots = Experts(*(in_slots(form, tensors) for form, tensors in zip(forms, held, strict=True)))

    def lend(self, ids: Tensor) -> Generator[Loan]:
        """First what is here, computed while the rest is read. Whatever goes wrong, nothing half read stays known."""
        cache, flat = self.shelf.cache, ids.reshape(-1).numpy()
        chosen = sorted(set(flat.tolist()))
        self.ahead.enter()
        try:
            rounds = cache.rounds(self.layer, chosen)
            now = next(rounds)
            busy = now.keys
            for later in rounds:
                left, busy = self._taken(later.loads), busy_last(now, later, len(chosen))
                if not left and len(busy) == len(chosen):  # all of it is here: in one go
                    now = Round(busy, [])
                    break
                with self._reading(left):
                    if now.keys:
                        yield self._loan(ids, flat, now.keys, len(chosen))
                now = later
            if self.following is not None and self.likely:
                self.ahead.begin(self.following, self.likely, busy)
                self.likely = []
            if now.keys:
                yield self._loan(ids, flat, now.keys, len(chosen))
        except (CheckpointError, StorageError):  # of reads, which have ended
            cache.forget(self.layer, chosen)
            self.ahead.sound = True
            raise
        self.ahead.sound = True

    def _taken(self, loads: list[Load]) -> list[Range]:
        """Fill slots with what the system has in its memory of their experts; what is left of these."""
        experts, slots = [expert for (_, expert), _ in loads], [slot for _, slot in loads]
        filled = self.ahead.reader.take(self.where, experts, slots, self.shelf.addresses)
        if filled.all():
            return []
        left = ~filled.reshape(-1)
        return [one for one, is_left in zip(self.ranges(loads), left.tolist(), strict=True) if is_left]

    @cached_property
    def where(self) -> Where:
        entries = [[span.entry(expert) for span in self.parts.values()] for expert in range(self.shape[0])]
        paths = sorted({piece.stored.path for pieces in entries for piece in pieces})
        number = {path: index for index, path in enumerate(paths)}
        starts = [[(number[piece.stored.path], piece.start) for piece in pieces] for pieces in entries]
        return Where(paths, np.array(starts, np.int64), np.array([piece.size for piece in entries[0]], np.int64))

    @contextmanager
    def _reading(self, ranges: list[Range]) -> Generator[None]:
        self.ahead.reader.start(ranges)
        yield
        self.ahead.reader.finish()

    def ranges(self, loads: list[Load]) -> list[Range]:
        found = []
        for (_, expert), slot in loads:
            for part, span in self.parts.items():
                stored, start, _ = span.entry(expert)
                found.append(Range(stored.path, start, stored.name, self.shelf.slot(part, slot)))
        return found

    def _require_numbers(self, table: Mapping[int, int]) -> None:
        """What a loader asks of all weights, of experts (to their slots) that were read for the first time."""
        if not (new := table.keys() - self.checked):
            return
        slots, look = np.array([table[expert] for expert in new], np.int64), compiled("are_numbers")
        if look is None or not look(slots, *self.looked_at):
            for expert in sorted(new):
                for part, tensor in self.shelf.tensors.items():
                    stored = self.parts[part].entry(expert).stored
                    finite.require_numbers(stored.path, stored.name, tensor[table[expert]], self._mode(part))
        self.checked |= new

    def _mode(self, part: Part) -> str | None:
        """Of scales that are codes."""
        form = self.forms[part[0]]
        return form.mode if isinstance(form, Packed) and self.shelf.tensors[part].dtype == torch.uint8 else None

    @cached_property
    def looked_at(self) -> tuple[Integers, ...]:
        """Of each part that may hold what is no number: the first slot's address, bytes of a slot's and of a value, and
        the bits that mark it."""
        rows = [
            (address, size, tensor.itemsize, mask)
            for (part, tensor), address, size in zip(
                self.shelf.tensors.items(), self.shelf.addresses, self.where.sizes, strict=True
            )
            if (mask := finite.mask_of(tensor.dtype, self._mode(part))) is not None
        ]
        return tuple(np.array(rows, np.int64).reshape(-1, 4).T.copy())

    def _loan(self, ids: Tensor, flat: NDArray[np.int64], keys: list[Key], chosen: int) -> Loan:
        places = self.shelf.cache.places
        table = {key[1]: places[key] for key in keys}
        self._require_numbers(table)
        slots = np.array([table.get(expert, -1) for expert in flat.tolist()], np.int64)
        if len(keys) == chosen:
            return Loan(self.slots, torch.from_numpy(slots).view(ids.shape))
        pairs = np.flatnonzero(slots >= 0)
        return Loan(self.slots, torch.from_numpy(slots[pairs, None]), torch.from_numpy(pairs))


def in_slots(form: Projection, tensors: Mapping[str, Tensor]) -> Projection:
    """A projection in the format of `form`, of other memory."""
    if not isinstance(form, Packed):
        return tensors["weight"]
    words, scales = tensors["weight"], tensors["scales"]
    return Packed(words, scales, tensors.get("biases"), form.bits, form.group, form.mode, tensors.get("global_scale"))
