"""Experts from the files of a checkpoint, by pread on a few threads: many reads at a time is what disks are fast at.

A stacked expert is nine ranges, or one where a file has it in one place: ranges that touch are read in one call.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from .checkpoint.descriptors import MOST, Descriptors
from .checkpoint.reading import BUFFERS, fill_views
from .checkpoint.shards import State

log = logging.getLogger(__name__)
THREADS = 8
CUT = 1 << 20  # bytes of one read: large enough for a disk, small enough that threads share one expert
STALLED = 5.0  # seconds without an end, after which people are told


class Range(NamedTuple):
    """Bytes of a file from `start` on, and the memory that they fill."""

    path: Path
    start: int
    name: str  # of the tensor
    view: memoryview

    @property
    def stop(self) -> int:
        return self.start + len(self.view)


def runs(ranges: Iterable[Range]) -> list[list[Range]]:
    """Ranges in the order of the files, cut to CUT bytes, and joined to runs without gaps of at most that."""
    found: list[list[Range]] = []
    room = 0
    for whole in sorted(ranges, key=lambda one: (str(one.path), one.start)):
        for at in range(0, len(whole.view), CUT):
            part = Range(whole.path, whole.start + at, whole.name, whole.view[at : at + CUT])
            last = found[-1] if found else []
            follows = bool(last) and (last[-1].path, last[-1].stop) == (part.path, part.start)
            if follows and len(part.view) <= room and len(last) < BUFFERS:
                last.append(part)
            else:
                found.append([part])
                room = CUT
            room -= len(part.view)
    return found


class ExpertReader:
    """Fills memory from files whose states were checked. What it raises is the first fault that a thread met."""

    def __init__(self, files: Mapping[Path, State], threads: int = THREADS, most_open: int = MOST) -> None:
        self.files = Descriptors(files, most_open)
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="experts")
        self.threads = threads
        self.lock = Lock()
        self.bytes, self.calls, self.stalls = 0, 0, 0
        self.seconds = 0.0  # from the start of reads to the end of the last
        self.waited = 0.0  # of these, somebody had nothing else to do
        self.begun = self.ended = 0.0
        self.jobs: list[Future[None]] = []
        for path in list(files)[:most_open]:  # a file that is deleted while it is open can still be read
            with self.files.open(path):
                pass

    def start(self, ranges: Iterable[Range]) -> None:
        """Begin to fill these. What was begun before is done, or given up by all its threads, when this returns."""
        wait(self.jobs)
        waiting = deque(runs(ranges))
        self.begun = time.monotonic()
        self.jobs = []
        for _ in range(min(self.threads, len(waiting))):  # one by one: an interrupt must not lose sight of them
            self.jobs.append(self.pool.submit(self._work, waiting))

    def finish(self) -> None:
        """Wait until all is filled. After an error nobody reads any more, and what was filled is not to be used."""
        start = time.monotonic()
        while wait(self.jobs, STALLED).not_done:
            self.stalls += 1
            log.warning("reading experts: no end after %.0f s; the disk is slow", time.monotonic() - start)
        self.waited += time.monotonic() - start
        self.seconds += max(self.ended - self.begun, 0.0)
        for job in self.jobs:
            job.result()

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.files.close()

    def _work(self, waiting: deque[list[Range]]) -> None:
        while True:
            try:
                run = waiting.popleft()
            except IndexError:
                self.ended = time.monotonic()
                return
            try:
                self._read(run)
            except BaseException:
                waiting.clear()
                raise

    def _read(self, run: list[Range]) -> None:
        path, start, stop = run[0].path, run[0].start, run[-1].stop
        with self.files.open(path) as descriptor:
            views = [one.view for one in run]
            fill_views(descriptor, path, start, views, lambda at: next(one.name for one in run if one.stop > at))
            self.files.check(path, descriptor)
        with self.lock:
            self.bytes += stop - start
            self.calls += 1
