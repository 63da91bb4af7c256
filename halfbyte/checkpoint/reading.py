"""Bytes of files into memory of our own, by pread: a file that shrinks is then a short read, not a dead process.

Pieces are read in the order of the files by a few threads, neighbours in one call. A device that is not the CPU is fed
through pinned buffers; the copies run while the next piece is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from ..errors import CheckpointError, StorageError, shown
from ..files import remedy
from ..memory import allocate, shown_as
from .descriptors import Descriptors
from .neighbours import neighbours
from .shards import State
from .spans import Span

Progress = Callable[[int, int], None]
BATCH = 4 << 20  # bytes of one read
PAGE = 4096  # what direct reads begin and end at; disks ask for less
BUFFERS = 512  # memory views of one read; systems take 1024
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
THREADS = min(4, CORES)  # half of a read is the CPU's: copying, and clearing new pages
STAGING = THREADS * 2 * BATCH  # pinned bytes, for a device that is not the CPU


@dataclass(frozen=True, slots=True)
class Target:
    """Bytes of a file from `start` on, and the bytes of memory that they fill."""

    path: Path
    name: str  # of the tensor
    start: int
    memory: Tensor

    @property
    def size(self) -> int:
        return self.memory.numel()

    @property
    def stop(self) -> int:
        return self.start + self.size


def read(
    files: Mapping[Path, State], spans: Sequence[Span], device: torch.device, progress: Progress | None = None
) -> dict[str, Tensor]:
    """The tensors of `spans` on a device, by name. `files` are the states in which the files were validated."""
    tensors, targets = {}, []
    for group in neighbours(spans):
        memory, at = allocate(sum(span.size for span in group), device), 0
        for span in group:
            tensors[span.name] = shown_as(memory[at:], span.dtype, span.shape)
            for stored, start, size in span.pieces:
                targets.append(Target(stored.path, stored.name, start, memory[at : at + size]))
                at += size
    fill(files, targets, direct if device.type == "cpu" else partial(staged, device), progress)
    return tensors


class Work:
    """Batches, handed to threads one by one, and how much of them is done."""

    def __init__(self, files: Descriptors, targets: list[Target], progress: Progress | None) -> None:
        self.files, self.progress = files, progress
        self.batches, self.lock = batches(targets), Lock()
        self.done, self.total = 0, sum(target.size for target in targets)

    def __iter__(self) -> Iterator[list[Target]]:
        while True:
            with self.lock:
                batch = next(self.batches, None)
            if batch is None:
                return
            yield batch
            with self.lock:
                self.done += batch[-1].stop - batch[0].start
                if self.progress is not None:
                    self.progress(self.done, self.total)

    def stop(self) -> None:
        with self.lock:
            self.batches = iter(())


def fill(
    files: Mapping[Path, State], targets: list[Target], way: Callable[[Work], None], progress: Progress | None = None
) -> None:
    """Fill every target. The first error, or an interrupt, stops all threads and is raised."""
    with Descriptors(files) as descriptors:
        work = Work(descriptors, targets, progress)
        if work.total <= BATCH:  # threads would cost more than they save
            way(work)
            return
        with ThreadPoolExecutor(THREADS) as pool:
            jobs = [pool.submit(way, work) for _ in range(THREADS)]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                work.stop()
                raise


def batches(targets: list[Target]) -> Iterator[list[Target]]:
    """Targets in the order of the files, cut to at most BATCH bytes and joined to runs without gaps of at most that."""
    run: list[Target] = []
    space = 0
    for target in sorted(targets, key=lambda target: (str(target.path), target.start)):
        for at in range(0, target.size, BATCH):
            part = Target(target.path, target.name, target.start + at, target.memory[at : at + BATCH])
            follows = bool(run) and (run[-1].path, run[-1].stop) == (part.path, part.start)
            if run and not (follows and part.size <= space and len(run) < BUFFERS):
                yield run
                run = []
            space = (space if run else BATCH) - part.size
            run.append(part)
    if run:
        yield run


def direct(work: Work) -> None:
    """Into memory that the CPU sees."""
    for batch in work:
        read_batch(work.files, batch, [target.memory.numpy().data for target in batch])


def staged(device: torch.device, work: Work) -> None:
    """Into a device's memory: each thread reads into one of its two buffers while the other is being copied."""
    cuda = device.type == "cuda"
    buffers = [torch.empty(BATCH, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    copied = [torch.cuda.Event() if cuda else None for _ in buffers]
    stream = torch.cuda.Stream(device) if cuda else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))  # which may still use the memory's last owner
    for batch, buffer, event in zip(work, cycle(buffers), cycle(copied), strict=False):
        if event is not None:
            event.synchronize()
        read_batch(work.files, batch, [buffer[: batch[-1].stop - batch[0].start].numpy().data])
        with torch.cuda.stream(stream):
            for target in batch:
                at = target.start - batch[0].start
                target.memory.copy_(buffer[at : at + target.size], non_blocking=cuda)
        if event is not None:
            event.record(stream)
    if stream is not None:
        stream.synchronize()


def read_batch(files: Descriptors, batch: list[Target], views: list[memoryview]) -> None:
    """Fill the views with the bytes of a batch, in as many calls as that takes."""
    path, at = batch[0].path, batch[0].start
    with files.open(path) as descriptor:
        fill_views(descriptor, path, at, views, lambda at: next(target.name for target in batch if target.stop > at))


def fill_views(descriptor: int, path: Path, at: int, views: list[memoryview], name: Callable[[int], str]) -> None:
    """Fill views with the bytes of a file from `at` on. `name` says which tensor a byte belongs to, for an error."""
    end = at + sum(map(len, views))
    while at < end:
        count = read_once(descriptor, path, at, *views)
        if count == 0:
            raise ended(path, at, end, name(at))
        at += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


def read_once(descriptor: int, path: Path, at: int, *views: memoryview) -> int:
    """As many bytes as the system gives at a time; a signal is no reason to give up."""
    while True:
        try:
            return os.preadv(descriptor, views, at)
        except InterruptedError:
            continue
        except OSError as error:
            raise StorageError(f"{path}: reading at byte {at}: {error.strerror or error}.") from error


def ended(path: Path, at: int, end: int, name: str) -> CheckpointError:
    return CheckpointError(f"{path}: it ends at byte {at}; tensor {shown(name)} needs {end}. {remedy(path)}")


def fill_pages(
    descriptor: int, path: Path, start: int, stop: int, pages: memoryview, name: Callable[[int], str]
) -> None:
    """Bytes start .. stop of a file, by whole pages: the first one is at start % PAGE of `pages`."""
    begin, done = start - start % PAGE, 0
    need = stop - begin
    while done < need:
        done -= done % PAGE
        wanted = pages[done : -(-need // PAGE) * PAGE]
        before, done = done, done + read_once(descriptor, path, begin + done, wanted)
        if done == before or (done < need and os.fstat(descriptor).st_size <= begin + done):
            raise ended(path, begin + done, stop, name(max(begin + done, start)))
