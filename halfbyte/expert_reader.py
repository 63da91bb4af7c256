"""Experts from the files of a checkpoint, by pread on a few threads: many reads at a time is what disks are fast at.

A stacked expert is nine ranges, or one where a file has it in one place: ranges that touch are read in one call.
Where the system has no room to keep files in memory, reads go past it, straight from the disk into a page-aligned
buffer: clearing pages that nobody asks for again, and taking them away from others, costs more than the copy out.
Numba's kernels hold Python's lock, so threads read in compiled code, which does without it. What that cannot read is
read again by Python, which says why. What the system has in its memory is copied from there by the threads of kernels,
between two of them: those wait for each other awake, and would keep threads that read from the cores.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint.descriptors import MOST, Descriptors
from .checkpoint.reading import PAGE, fill_pages, fill_views
from .checkpoint.shards import State
from .expert_batch import BILLION, Batch, now
from .expert_ranges import Integers, Range, Where, address_of, of_pages, runs
from .ops import dispatch

log = logging.getLogger(__name__)
THREADS = 8
CUT = 2 << 20  # bytes of one read: most experts in one, where a file has them so
SHARED = 1 << 20  # the same where there is less than that for each thread, so that they share an expert
STALLED = 5.0  # seconds without an end, after which people are told
NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # Linux has it: read only what is in the system's memory


def _serve(work: SimpleQueue[tuple[Callable[[Batch], None], Batch] | None]) -> None:
    """A thread's life. While it waits it keeps nobody's reader alive."""
    while (job := work.get()) is not None:
        job[0](job[1])
        del job


@cache
def compiled(name: str) -> Callable[..., Any] | None:
    """Where there is no Numba, Python reads."""
    return None if find_spec("numba") is None else dispatch.find("numba", "reads", name)


class ExpertReader:
    """Fills memory from files whose states were checked. What it raises is the first fault that a thread met.

    `direct`: past the system's memory of files, where disk and system let us.
    """

    def __init__(
        self, files: Mapping[Path, State], threads: int = THREADS, most_open: int = MOST, direct: bool = False
    ) -> None:
        self.files, self.own = Descriptors(files, most_open, direct=direct), local()
        self.work: SimpleQueue[tuple[Callable[[Batch], None], Batch] | None] = SimpleQueue()
        self.closed = False
        self.bytes, self.calls, self.stalls = 0, 0, 0
        self.seconds = 0.0  # from the start of reads to the end of the last
        self.waited = 0.0  # of these, somebody had nothing else to do
        self.batch, self.held = Batch([], {}, set(), threads), ExitStack()
        self.unchecked: set[Path] = set()  # what was read of, and must not have changed meanwhile
        compiled("read_runs")  # loaded now, not when somebody waits for a read
        try:
            for path in list(files)[:most_open]:  # a file that is deleted while it is open can still be read
                with self.files.open(path):
                    pass
        except BaseException:
            self.files.close()
            raise
        self.threads = [
            Thread(target=_serve, args=(self.work,), name=f"experts-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    def compile(self) -> None:
        """Have what reads compiled now, where nobody sees to a CPU's kernels."""
        none, two = np.zeros(0, np.int64), np.zeros(2, np.int64)
        if NOWAIT and (read := compiled("read_kept")) is not None:
            read(two, np.zeros((0, 0, 2), np.int64), none, none, none, none, NOWAIT)
        if (look := compiled("are_numbers")) is not None:
            look(none, none, none, none, none)
        if (read := compiled("read_runs")) is not None:
            places = np.zeros((0, 2), np.int64)
            read(two[:1], np.zeros((0, 6), np.int64), places, 0, PAGE, time.CLOCK_MONOTONIC, two)

    def take(self, where: Where, experts: Sequence[int], slots: Sequence[int], memory: Integers) -> NDArray[np.bool_]:
        """Fill slots with what the system has in its memory of experts: which parts [R, P] are filled now.

        memory [P]: the addresses of the first slot's parts
        """
        self.batch.stop()
        begun, read = now(), compiled("read_kept")
        with self._opened(where.paths) as opened:
            if not (NOWAIT and read and opened and self.files.buffered):
                return np.zeros((len(experts), len(where.sizes)), np.bool_)
            files, *lists = (np.array(list(numbers), np.int64) for numbers in (opened.values(), experts, slots))
            filled: NDArray[np.bool_] = read(files, where.starts, *lists, memory, where.sizes, NOWAIT)
            self.unchecked |= opened.keys()
            if filled.all():
                self._check()
        seconds = (now() - begun) / BILLION
        self.seconds, self.waited = self.seconds + seconds, self.waited + seconds
        self.bytes, self.calls = self.bytes + int((filled @ where.sizes).sum()), self.calls + int(filled.sum())
        return filled

    def start(self, ranges: Iterable[Range]) -> None:
        """Begin to fill these. What was begun before is done, or given up by all its threads, before that.

        It returns once every thread reads: whoever holds Python's lock from then on keeps none of them waiting.
        """
        self.batch.stop()
        self.held.close()
        wanted = list(ranges)
        plenty = sum(len(one.view) for one in wanted) > CUT * len(self.threads) // 2
        found = runs(wanted, CUT if plenty else SHARED)
        paths = {run[0].path for run in found}
        self.unchecked |= paths
        opened = self.held.enter_context(self._opened(paths))
        batch = self.batch = Batch(found, opened, self.files.buffered, len(self.threads))
        for _ in range(batch.threads):
            self.work.put((self._work, batch))
        if batch.threads:
            batch.wait(batch.all_joined, STALLED)
            self.waited += (now() - batch.begun) / BILLION

    def finish(self) -> None:
        """Wait until all is filled, from files that are still what they were.

        After an error nobody reads any more, and what was filled is not to be used.
        """
        start, batch = time.monotonic(), self.batch
        while not batch.wait(batch.all_left, STALLED):
            self.stalls += 1
            log.warning("reading experts: no end after %.0f s; the disk is slow", time.monotonic() - start)
        self.waited += time.monotonic() - start
        self.held.close()
        if batch.error is not None:
            raise batch.error
        self.seconds += batch.seconds
        self.bytes += batch.bytes
        self.calls += len(batch.runs)
        self._check()

    def _check(self) -> None:
        while self.unchecked:
            path = self.unchecked.pop()
            with self.files.open(path) as descriptor:
                self.files.check(path, descriptor)

    def stop(self) -> None:
        """Whatever was begun, nobody reads when this returns."""
        self.batch.stop()
        self.held.close()

    def close(self) -> None:
        self.closed = True
        self.stop()
        for _ in self.threads:
            self.work.put(None)
        for thread in self.threads:
            thread.join()
        self.files.close()

    @contextmanager
    def _opened(self, paths: Collection[Path]) -> Generator[dict[Path, int]]:
        """Descriptors that stay open for the whole of a batch; where they are too many, Python opens one at a time."""
        if self.closed:
            raise RuntimeError("this model was closed: its experts can no longer be read")
        with ExitStack() as held:
            few = len(paths) <= self.files.most
            yield {path: held.enter_context(self.files.open(path)) for path in paths} if few else {}

    def _work(self, batch: Batch) -> None:
        if (thread := batch.join()) < 0:
            return
        fault: BaseException | None = None
        try:
            pages, read = self._pages(), compiled("read_runs")
            while True:
                if read is None:
                    run = batch.take()
                else:
                    run = read(
                        batch.taken, batch.table, batch.places, address_of(pages), PAGE, time.CLOCK_MONOTONIC,
                        batch.ended[thread],
                    )  # fmt: skip
                if run < 0:
                    return
                self._read(batch.runs[run], pages)
                batch.ended[thread] = divmod(now(), BILLION)
        except BaseException as error:
            batch.give_up()
            fault = error
        finally:
            batch.leave(fault)

    def _read(self, run: list[Range], pages: memoryview) -> None:
        path, start, stop = run[0].path, run[0].start, run[-1].stop

        def name(at: int) -> str:
            return next(one.name for one in run if one.stop > at)

        with self.files.open(path) as descriptor:
            if path in self.files.buffered or all(map(of_pages, run)):
                fill_views(descriptor, path, start, [one.view for one in run], name)
                return
            at = start % PAGE
            fill_pages(descriptor, path, start, stop, pages, name)
            for one in run:  # by numpy, which lets other threads run meanwhile
                np.copyto(np.frombuffer(one.view, np.uint8), np.frombuffer(pages, np.uint8, len(one.view), at))
                at += len(one.view)

    def _pages(self) -> memoryview:
        """A thread's own buffer, for a run that begins and ends inside of pages."""
        if not hasattr(self.own, "pages"):
            self.own.pages = memoryview(mmap.mmap(-1, CUT + 2 * PAGE))
        return self.own.pages  # type: ignore[no-any-return]
