"""Experts from the files of a checkpoint, by pread on a few threads: many reads at a time is what disks are fast at.

A stacked expert is nine ranges, or one where a file has it in one place: ranges that touch are read in one call.
Where the system has no room to keep files in memory, reads go past it, straight from the disk into a page-aligned
buffer: clearing pages that nobody asks for again, and taking them away from others, costs more than the copy out.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, Lock, local
from typing import NamedTuple

import numpy as np

from .checkpoint.descriptors import MOST, Descriptors
from .checkpoint.reading import BUFFERS, PAGE, fill_pages, fill_views
from .checkpoint.shards import State

log = logging.getLogger(__name__)
THREADS = 8
CUT = 2 << 20  # bytes of one read: most experts in one, where a file has them so
SHARED = 1 << 20  # the same where there is less than that for each thread, so that they share an expert
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


def of_pages(one: Range) -> bool:
    """Whether a disk can write it where it belongs: whole pages of a file into whole pages of memory."""
    if one.start % PAGE or len(one.view) % PAGE:
        return False
    address: int = np.frombuffer(one.view, np.uint8).ctypes.data
    return address % PAGE == 0


def runs(ranges: Iterable[Range], cut: int) -> list[list[Range]]:
    """Ranges in the order of the files, cut to so many bytes, and joined to runs without gaps of at most that."""
    found: list[list[Range]] = []
    room = 0
    for whole in sorted(ranges, key=lambda one: (str(one.path), one.start)):
        for at in range(0, len(whole.view), cut):
            part = Range(whole.path, whole.start + at, whole.name, whole.view[at : at + cut])
            last = found[-1] if found else []
            follows = bool(last) and (last[-1].path, last[-1].stop) == (part.path, part.start)
            if follows and len(part.view) <= room and len(last) < BUFFERS:
                last.append(part)
            else:
                found.append([part])
                room = cut
            room -= len(part.view)
    return found


class ExpertReader:
    """Fills memory from files whose states were checked. What it raises is the first fault that a thread met.

    `direct`: past the system's memory of files, where disk and system let us.
    """

    def __init__(
        self, files: Mapping[Path, State], threads: int = THREADS, most_open: int = MOST, direct: bool = False
    ) -> None:
        self.files, self.own = Descriptors(files, most_open, direct=direct), local()
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="experts")
        self.threads = threads
        self.lock = Lock()
        self.bytes, self.calls, self.stalls = 0, 0, 0
        self.seconds = 0.0  # from the start of reads to the end of the last
        self.waited = 0.0  # of these, somebody had nothing else to do
        self.begun = self.ended = 0.0
        self.jobs: list[Future[None]] = []
        self.all_begun = Event()
        self.paths: set[Path] = set()  # that these jobs read
        for path in list(files)[:most_open]:  # a file that is deleted while it is open can still be read
            with self.files.open(path):
                pass

    def start(self, ranges: Iterable[Range]) -> None:
        """Begin to fill these. What was begun before is done, or given up by all its threads, when this returns."""
        wait(self.jobs)
        wanted = list(ranges)
        plenty = sum(len(one.view) for one in wanted) > CUT * self.threads // 2
        waiting = deque(runs(wanted, CUT if plenty else SHARED))
        self.paths = {run[0].path for run in waiting}
        self.begun = time.monotonic()
        self.jobs = []
        self.all_begun.clear()
        if not waiting:
            self.all_begun.set()
        for _ in range(min(self.threads, len(waiting))):  # one by one: an interrupt must not lose sight of them
            self.jobs.append(self.pool.submit(self._work, waiting))

    def drain(self) -> None:
        """Wait until the last read has begun: a kernel that runs keeps threads from beginning others."""
        start = time.monotonic()
        self.all_begun.wait(STALLED)
        self.waited += time.monotonic() - start

    def finish(self) -> None:
        """Wait until all is filled, from files that are still what they were.

        After an error nobody reads any more, and what was filled is not to be used.
        """
        start = time.monotonic()
        while wait(self.jobs, STALLED).not_done:
            self.stalls += 1
            log.warning("reading experts: no end after %.0f s; the disk is slow", time.monotonic() - start)
        self.waited += time.monotonic() - start
        self.seconds += max(self.ended - self.begun, 0.0)
        for job in self.jobs:
            job.result()
        for path in self.paths:
            with self.files.open(path) as descriptor:
                self.files.check(path, descriptor)

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.files.close()

    def _work(self, waiting: deque[list[Range]]) -> None:
        while True:
            try:
                run = waiting.popleft()
            except IndexError:
                self.all_begun.set()
                self.ended = time.monotonic()
                return
            if not waiting:
                self.all_begun.set()
            try:
                self._read(run)
            except BaseException:
                waiting.clear()
                self.all_begun.set()
                raise

    def _read(self, run: list[Range]) -> None:
        path, start, stop = run[0].path, run[0].start, run[-1].stop

        def name(at: int) -> str:
            return next(one.name for one in run if one.stop > at)

        with self.files.open(path) as descriptor:
            if path in self.files.buffered or all(map(of_pages, run)):
                fill_views(descriptor, path, start, [one.view for one in run], name)
            else:
                pages, at = self._pages(), start % PAGE
                fill_pages(descriptor, path, start, stop, pages, name)
                for one in run:  # by numpy, which lets other threads run meanwhile
                    np.copyto(np.frombuffer(one.view, np.uint8), np.frombuffer(pages, np.uint8, len(one.view), at))
                    at += len(one.view)
        with self.lock:
            self.bytes += stop - start
            self.calls += 1

    def _pages(self) -> memoryview:
        """A thread's own buffer, for a run that begins and ends inside of pages."""
        if not hasattr(self.own, "pages"):
            self.own.pages = memoryview(mmap.mmap(-1, CUT + 2 * PAGE))
        return self.own.pages  # type: ignore[no-any-return]
