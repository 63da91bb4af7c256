"""Where experts live when memory has no room for all: in the files of the checkpoint, and some of them in slots."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from . import memory
from .checkpoint import finite
from .checkpoint.ledger import Ledger, Mixture
from .checkpoint.reading import read
from .checkpoint.shards import State
from .checkpoint.sidecar import find
from .errors import CheckpointError
from .expert_cache import POLICIES, certain
from .expert_reader import ExpertReader
from .expert_shares import form_of, parts_of, plan
from .foresight import blocks_of, by_votes, foresee
from .ops.formats import Packed
from .stored_experts import CPU, Ahead, Shelf, StoredExperts, in_memory

SHARE = 8  # of the descriptors that a process may have, this part is for shards


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
            if isinstance(projection, Packed) and any(
                spans[name].dtype != projection.scales.dtype for name in ("scales", "biases") if name in spans
            ):
                raise CheckpointError(
                    f"{folder}: {name}: scales and biases of its experts differ in dtype, so they cannot stay on disk. "
                    "Load it without an expert cache, or convert it: `halfbyte convert`."
                )


class Residency:
    """The lenders of a model's layers, what they share, and what that has cost so far."""

    source = "disk"

    def __init__(
        self, ledger: Ledger, budget: int, per_token: int, policy: str = "lfu", *, direct: bool = False,
        allocate: Callable[[int], Tensor] = in_memory,
    ) -> None:  # fmt: skip
        require_as_stored(ledger.checkpoint.folder, ledger.mixtures)
        mixtures, files = list(ledger.mixtures.values()), ledger.checkpoint.states
        if repacked := find(ledger.checkpoint, ledger.mixtures):
            mixtures, files = repacked[0], {**files, **repacked[1]}
        self.shares = plan(mixtures, budget, per_token)
        memory.require(sum(share.nbytes for share in self.shares), CPU, "the expert cache")
        self.shelves = [Shelf(share, form_of(mixtures[share.layers[0]]), policy, allocate) for share in self.shares]
        used = {p.stored.path for m in mixtures for span in parts_of(m).values() for p in span.pieces}
        states = {path: state for path, state in files.items() if path in used}
        self.reader = ExpertReader(states, most_open=descriptors_for(states), direct=direct)
        self._closed = weakref.finalize(self, self.reader.close)
        own = {span.name for mixture in mixtures for span in parts_of(mixture).values()}
        of_stacks = [span for mixture in mixtures for spans in mixture.parts for span in spans.values()]
        common = read(files, [span for span in of_stacks if span.name not in own], CPU)
        finite.check(ledger.checkpoint.folder, common, set(), ledger.modes, "all")
        shelf_of = {layer: shelf for shelf in self.shelves for layer in shelf.share.layers}
        self.ahead, self.foresees = Ahead(self.reader, self.shelves), POLICIES[policy].foresees
        self.lenders = {
            name: StoredExperts(layer, mixture, shelf_of[layer], self.ahead, common)
            for layer, (name, mixture) in enumerate(zip(ledger.mixtures, mixtures, strict=True))
        }

    @property
    def replayable(self) -> bool:
        """A recorded step guesses nothing."""
        return not self.foresees

    def mend(self) -> None:
        """After a step that failed: what it had begun to read is settled."""
        self.ahead.enter()
        self.ahead.sound = True

    def foresee(self, layers: Sequence[object]) -> None:
        """Let the layers of a model say what each next one will probably choose, which its lender here is told."""
        blocks = blocks_of(layers)
        lenders = list(self.lenders.values())
        for lender, following in pairwise(lenders):
            lender.following = following

        def wanted(ids: Tensor) -> bool:
            return self.foresees or certain(ids.numel(), lenders[0].shape[0])

        def tell(layer: int, ids: list[int]) -> None:
            lenders[layer - 1].likely = by_votes(ids)

        foresee(blocks, wanted, tell)

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

    @property
    def stalls(self) -> int:
        """How often a read seemed to have no end."""
        return self.reader.stalls

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
