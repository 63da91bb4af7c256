"""Where experts live when memory has no room for all: in the files of the checkpoint, and some of them in slots.

Slots are a stack of experts as a layer has one, with the parts and the format of the file. What a layer chose is read
into slots, its ids become those of the slots, and the op that computes with them is the same as ever, to the last bit.
Layers whose experts are alike share slots: memory goes where it is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import memory
from .checkpoint.ledger import Ledger, Mixture
from .checkpoint.reading import read
from .checkpoint.shards import State
from .checkpoint.sidecar import find, own_parts
from .checkpoint.spans import Span
from .errors import CheckpointError, NotEnoughMemory, size
from .expert_cache import POLICIES, ExpertCache, Key
from .expert_reader import ExpertReader, Range
from .ops.experts import Experts, Lender, Loan, Projection
from .ops.formats import Packed

FEWEST = 2  # slots: one is read while the other is computed with
SHARE = 8  # of the descriptors that a process may have, this part is for shards
CPU = torch.device("cpu")

Part = tuple[int, str]  # projection (gate, up, down), part of it
Form = tuple[tuple[Part, str, tuple[int, ...]], ...]  # what makes experts alike: dtype and shape of each part


def parts_of(mixture: Mixture) -> dict[Part, Span]:
    return {(projection, name): span for projection, name, span in own_parts(mixture)}


def form_of(mixture: Mixture) -> Form:
    return tuple((part, span.kind, span.shape[1:]) for part, span in parts_of(mixture).items())


def expert_bytes(mixture: Mixture) -> int:
    return sum(span.size // span.shape[0] for span in parts_of(mixture).values())


@dataclass(frozen=True)
class Share:
    """Layers whose experts are alike, by number, and the slots that they get."""

    layers: tuple[int, ...]
    expert_bytes: int
    experts: int  # of all these layers
    slots: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.expert_bytes


def fewest(mixtures: Sequence[Mixture], per_token: int) -> list[Share]:
    """The least that can be worked with, by form: slots for the experts of one token."""
    alike: dict[Form, list[int]] = {}
    for layer, mixture in enumerate(mixtures):
        alike.setdefault(form_of(mixture), []).append(layer)
    found = []
    for layers in alike.values():
        count = sum(mixtures[layer].form.gate.shape[0] for layer in layers)
        slots = min(max(per_token, FEWEST), count)
        found.append(Share(tuple(layers), expert_bytes(mixtures[layers[0]]), count, slots))
    return found


def plan(mixtures: Sequence[Mixture], budget: int, per_token: int) -> list[Share]:
    """Slots for `budget` bytes, so that every form has the same part of its experts in memory."""
    least = fewest(mixtures, per_token)
    minimum = sum(share.nbytes for share in least)
    if budget < minimum:
        raise NotEnoughMemory(
            f"an expert cache of {size(budget)} is too small: the experts of one token take {size(minimum)} "
            f"({minimum} bytes). Give it at least that."
        )
    rest = sum(share.expert_bytes * (share.experts - share.slots) for share in least)
    more = min(budget - minimum, rest)
    return [replace(share, slots=share.slots + more * (share.experts - share.slots) // max(rest, 1)) for share in least]


class Shelf:
    """The slots of one share: memory, what is in it, and the bytes of each slot as a read fills them."""

    def __init__(self, share: Share, form: Form, policy: str) -> None:
        self.share, self.cache = share, ExpertCache(share.slots, POLICIES[policy])
        self.tensors: dict[Part, Tensor] = {}
        self.views: dict[Part, memoryview] = {}
        for part, kind, shape in form:
            span = Span("", kind, (share.slots, *shape), ())
            flat = memory.allocate(span.size, CPU).zero_()  # taken now: whoever asks what is free must see it
            self.tensors[part], self.views[part] = flat.view(span.dtype).view(span.shape), flat.numpy().data

    @property
    def nbytes(self) -> int:
        return sum(len(view) for view in self.views.values())

    def slot(self, part: Part, slot: int) -> memoryview:
        view = self.views[part]
        each = len(view) // self.share.slots
        return view[slot * each : (slot + 1) * each]


class StoredExperts(Lender):
    """The experts of one layer, most of them on disk."""

    def __init__(self, layer: int, mixture: Mixture, shelf: Shelf, reader: ExpertReader, common: Mapping[str, Tensor]):
        self.layer, self.parts, self.shelf, self.reader = layer, parts_of(mixture), shelf, reader
        gate = mixture.form.gate.shape
        self.shape = (gate[0], gate[1], gate[2])
        forms = (mixture.form.gate, mixture.form.up, mixture.form.down)
        held: list[dict[str, Tensor]] = []
        for at, spans in enumerate(mixture.parts):
            tensors, names = shelf.tensors, {name: span.name for name, span in spans.items()}
            held.append({n: tensors[at, n] if (at, n) in tensors else common[names[n]] for n in spans})
        self.slots = Experts(*(in_slots(form, tensors) for form, tensors in zip(forms, held, strict=True)))

    def lend(self, ids: Tensor) -> Generator[Loan]:
        """First what is here, computed while the rest is read. Whatever goes wrong, nothing half read stays known."""
        cache, flat = self.shelf.cache, ids.reshape(-1).numpy()
        chosen: list[int] = np.unique(flat).tolist()
        try:
            rounds = cache.rounds(self.layer, chosen)
            now = next(rounds)
            for later in rounds:
                with self._reading(later.loads):
                    if now.keys:
                        yield self._loan(ids, flat, now.keys, len(chosen))
                now = later
            if now.keys:
                yield self._loan(ids, flat, now.keys, len(chosen))
        except BaseException:
            cache.forget(self.layer, chosen)
            raise

    @contextmanager
    def _reading(self, loads: list[tuple[Key, int]]) -> Generator[None]:
        self.reader.start(one for (_, expert), slot in loads for one in self._ranges(expert, slot))
        self.reader.drain()
        yield
        self.reader.finish()

    def _ranges(self, expert: int, slot: int) -> list[Range]:
        found = []
        for part, span in self.parts.items():
            stored, start, _ = span.entry(expert)
            found.append(Range(stored.path, start, stored.name, self.shelf.slot(part, slot)))
        return found

    def _loan(self, ids: Tensor, flat: NDArray[np.int64], keys: list[Key], chosen: int) -> Loan:
        table = np.full(self.shape[0], -1, np.int64)
        for key in keys:
            table[key[1]] = self.shelf.cache.places[key]
        slots = table[flat]
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


@dataclass(frozen=True)
class Reads:
    """What steps have needed of experts, and what of that had to be read, in which time."""

    needed: int
    missing: int
    bytes: int
    seconds: float

    @property
    def hit_rate(self) -> float | None:
        return 1 - self.missing / self.needed if self.needed else None

    def __sub__(self, before: Reads) -> Reads:
        return Reads(
            self.needed - before.needed, self.missing - before.missing, self.bytes - before.bytes,
            self.seconds - before.seconds,
        )  # fmt: skip


def require_as_stored(folder: Path, mixtures: Mapping[str, Mixture]) -> None:
    """What loading would convert cannot be computed with as it lies on disk."""
    for name, (form, parts) in mixtures.items():
        for projection, spans in zip((form.gate, form.up, form.down), parts, strict=True):
            if isinstance(projection, Packed) and projection.scales.dtype != spans["scales"].dtype:
                raise CheckpointError(
                    f"{folder}: {name}: scales and biases of its experts differ in dtype, so they cannot stay on disk. "
                    "Load it without an expert cache, or convert it: `halfbyte convert`."
                )


class Residency:
    """The lenders of a model's layers, what they share, and what that has cost so far."""

    def __init__(
        self, ledger: Ledger, budget: int, per_token: int, policy: str = "lfu", *, direct: bool = False
    ) -> None:
        require_as_stored(ledger.checkpoint.folder, ledger.mixtures)
        mixtures, files = list(ledger.mixtures.values()), ledger.checkpoint.states
        if repacked := find(ledger.checkpoint, ledger.mixtures):
            mixtures, files = repacked[0], {**files, **repacked[1]}
        self.shares = plan(mixtures, budget, per_token)
        memory.require(sum(share.nbytes for share in self.shares), CPU, "the expert cache")
        self.shelves = [Shelf(share, form_of(mixtures[share.layers[0]]), policy) for share in self.shares]
        used = {p.stored.path for m in mixtures for span in parts_of(m).values() for p in span.pieces}
        states = {path: state for path, state in files.items() if path in used}
        self.reader = ExpertReader(states, most_open=descriptors_for(states), direct=direct)
        self._closed = weakref.finalize(self, self.reader.close)
        own = {span.name for mixture in mixtures for span in parts_of(mixture).values()}
        of_stacks = [span for mixture in mixtures for spans in mixture.parts for span in spans.values()]
        common = read(files, [span for span in of_stacks if span.name not in own], CPU)
        shelf_of = {layer: shelf for shelf in self.shelves for layer in shelf.share.layers}
        self.lenders = {
            name: StoredExperts(layer, mixture, shelf_of[layer], self.reader, common)
            for layer, (name, mixture) in enumerate(zip(ledger.mixtures, mixtures, strict=True))
        }

    @property
    def nbytes(self) -> int:
        return sum(shelf.nbytes for shelf in self.shelves)

    @property
    def reads(self) -> Reads:
        """So far; any thread may ask, so counts are copied before they are added up."""
        hits = sum(sum(list(shelf.cache.hits.values())) for shelf in self.shelves)
        misses = sum(sum(list(shelf.cache.misses.values())) for shelf in self.shelves)
        return Reads(hits + misses, misses, self.reader.bytes, self.reader.seconds)

    @property
    def hit_rates(self) -> dict[int, float]:
        """By layer, of those that have run."""
        caches = [shelf.cache for shelf in self.shelves]
        return {
            layer: cache.hits[layer] / (cache.hits[layer] + cache.misses[layer])
            for cache in caches
            for layer in sorted(cache.hits.keys() | cache.misses.keys())
        }

    def close(self) -> None:
        """End the threads and close the files; the model cannot run any more."""
        self._closed()


def descriptors_for(files: Mapping[Path, State]) -> int:
    """How many shards may be open at a time: all, unless that took too much of what the process may open."""
    try:
        import resource
    except ImportError:
        return len(files)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(len(files), max(soft // SHARE, 1)) if soft != resource.RLIM_INFINITY else len(files)
