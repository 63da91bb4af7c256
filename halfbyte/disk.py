"""How fast experts come from the disk: the reads of a run, of ranges that the system does not have in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cache
from itertools import islice

from .checkpoint.ledger import Ledger, Mixture
from .checkpoint.sidecar import find
from .expert_ranges import Range
from .expert_reader import ExpertReader
from .expert_shares import expert_bytes, parts_of
from .residency import descriptors_for

MOST = 256 << 20  # bytes that are read
TOGETHER = 8  # experts that are asked for at a time, as a layer does


@cache
def expert_bandwidth(ledger: Ledger, direct: bool = False, most: int = MOST) -> float:
    """Bytes a second, over experts from all of the checkpoint or its sidecar; `direct`: past the system's memory of
    files. Otherwise the system forgets what it had of them there.
    """
    mixtures, files = list(ledger.mixtures.values()), ledger.checkpoint.states
    if repacked := find(ledger.checkpoint, ledger.mixtures):
        mixtures, files = repacked
    experts = [(one, expert) for one in mixtures for expert in range(one.form.gate.shape[0])]
    total = sum(expert_bytes(one) for one, _ in experts)
    sample = experts[:: -(-total // most)]
    buffer = memoryview(bytearray(TOGETHER * max(expert_bytes(one) for one, _ in sample)))
    seconds, reader = 0.0, ExpertReader(files, most_open=descriptors_for(files), direct=direct)
    try:
        waiting = iter(sample)
        while some := list(islice(waiting, TOGETHER)):
            ranges = _ranges(some, buffer)
            _drop(reader, ranges)
            before = time.perf_counter()
            reader.start(ranges)
            reader.finish()
            seconds += time.perf_counter() - before
        return reader.bytes / seconds
    finally:
        reader.close()


def _ranges(experts: Sequence[tuple[Mixture, int]], buffer: memoryview) -> list[Range]:
    found, at = [], 0
    for mixture, expert in experts:
        for span in parts_of(mixture).values():
            stored, start, size = span.entry(expert)
            found.append(Range(stored.path, start, stored.name, buffer[at : at + size]))
            at += size
    return found


def _drop(reader: ExpertReader, ranges: Sequence[Range]) -> None:
    """Where the system cannot be asked to forget, its memory is what is measured."""
    for one in ranges if hasattr(os, "posix_fadvise") else ():
        with reader.files.open(one.path) as descriptor:
            os.posix_fadvise(descriptor, one.start, len(one.view), os.POSIX_FADV_DONTNEED)
