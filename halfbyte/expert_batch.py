"""Reads that threads share: what is to be read, who reads, and when all have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock

import numpy as np

from .expert_ranges import Range, of_pages

BILLION = 10**9  # nanoseconds in a second


class Batch:
    """Runs that threads read together: each takes the next one. The tables are those of kernels/numba/reads.py.

    Whoever waits may be interrupted between any two operations (Ctrl-C), so nothing may be right only if he is not: who
    reads is counted by the threads that do, and all that both sides change is changed by operations that are one, in C.
    Futures, events and locks are not: interrupted, they lose sight of a thread, or stay locked.
    """

    def __init__(self, runs: Sequence[list[Range]], descriptors: Mapping[Path, int], buffered: set[Path], threads: int):
        self.runs, self.threads = runs, min(threads, len(runs))
        self.bytes = sum(run[-1].stop - run[0].start for run in runs)
        rows: list[tuple[int, ...]] = []
        places: list[tuple[int, int]] = []
        for run in runs:
            path, first = run[0].path, len(places)
            places += [(one.address, len(one.view)) for one in run]
            straight = path in buffered or all(map(of_pages, run))
            rows.append((descriptors.get(path, -1), run[0].start, run[-1].stop, first, len(places), straight))
        self.table, self.places = np.array(rows, np.int64), np.array(places, np.int64)
        self.taken, self.lock = np.zeros(1, np.int64), Lock()
        self.numbers = count()
        self.joined: list[int] = []  # threads that have begun
        self.left: list[BaseException | None] = []  # threads that have ended, and what stopped them
        self.over = False
        self.news: SimpleQueue[None] = SimpleQueue()  # that one has joined or left
        self.begun = now()
        self.ended = np.array([[self.begun // BILLION, self.begun % BILLION]] * self.threads)

    def join(self) -> int:
        """The number of one more thread that is about to read; -1 where nobody is to any more."""
        number = next(self.numbers)
        self.joined.append(number)
        self.news.put(None)
        if self.over:  # looked at after it has joined: whoever stopped the batch before saw that, or is seen here
            self.leave(None)
            return -1
        return number

    def leave(self, error: BaseException | None) -> None:
        self.left.append(error)
        self.news.put(None)

    def all_joined(self) -> bool:
        return len(self.joined) == self.threads

    def all_left(self) -> bool:
        return len(self.left) == self.threads

    @property
    def error(self) -> BaseException | None:
        """The first fault that a thread has met."""
        return next((error for error in list(self.left) if error is not None), None)

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Whether it has come to that in time."""
        end = time.monotonic() + seconds
        while not until():
            if (left := end - time.monotonic()) <= 0:
                return False
            with suppress(Empty):
                self.news.get(timeout=left)
        return True

    def stop(self) -> None:
        """When this returns nobody reads, nor will: those who have not joined yet are sent away."""
        self.give_up()
        self.over = True
        while not self.wait(lambda: len(self.left) == len(self.joined), 1.0):
            pass

    def take(self) -> int:
        """The next run, for Python to read; -1 where none is left."""
        with self.lock:
            self.taken += 1
            return int(self.taken[0]) - 1 if self.taken[0] <= len(self.runs) else -1

    def give_up(self) -> None:
        """Nobody takes another run."""
        self.taken[0] = len(self.runs)

    @property
    def seconds(self) -> float:
        """From the start to the end of the last read."""
        last = max((second * BILLION + rest for second, rest in self.ended.tolist()), default=self.begun)
        return (last - self.begun) / BILLION


def now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
