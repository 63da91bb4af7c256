"""Tensors that are the file: a read-only map, shared with the page cache and with other processes, without a copy.

The price: when a mapped file shrinks, whoever touches the lost part is killed (SIGBUS), and nothing can catch that. So
only files that are not shared over a network are mapped, and only what memory can hold; `reading` has neither risk.
What is written into a file is seen at once, so before each step somebody asks whether all are as they were (`Guard`).
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, StorageError
from .descriptors import Descriptors
from .reading import Progress, read
from .shards import State
from .spans import Span

MOUNTS = Path("/proc/self/mountinfo")
SHARED = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "gluster", "lustre", "gpfs", "fuse", "virtiofs")


def map_files(
    files: Mapping[Path, State], spans: Sequence[Span], progress: Progress | None = None
) -> dict[str, Tensor]:
    """The tensors of `spans`, by name: views of maps, and copies of those that are gathered or lie unaligned."""
    maps: dict[Path, mmap.mmap] = {}
    tensors, copied = {}, []
    with Descriptors(files, most=1) as descriptors, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # and nobody writes
        for span in spans:
            piece = span.pieces[0]
            path = piece.stored.path
            if len(span.pieces) > 1 or not span.size or piece.start % span.dtype.itemsize:
                copied.append(span)
                continue
            if path not in maps:
                with descriptors.open(path) as descriptor:
                    maps[path] = _map(path, descriptor)
            flat = torch.frombuffer(
                maps[path], dtype=span.dtype, count=span.size // span.dtype.itemsize, offset=piece.start
            )
            tensors[span.name] = flat.view(span.shape)
    tensors |= read(files, copied, torch.device("cpu"))
    total = sum(span.size for span in spans)
    if progress is not None:
        progress(total, total)
    return tensors


class Guard:
    """Mapped files, held open: a name may come to mean another one."""

    def __init__(self, files: Mapping[Path, State]) -> None:
        self.files, self.descriptors = files, Descriptors(files, most=max(len(files), 1))
        weakref.finalize(self, self.descriptors.close)
        try:
            self.check()
        except StorageError as error:  # a map holds one descriptor, and this another
            raise StorageError(f"{error}. Load without a map, or allow more open files (`ulimit -n`).") from None

    def check(self) -> None:
        """Refuse to go on with what somebody has written into; a deleted file stays what it was."""
        for path in self.files:
            with self.descriptors.open(path) as descriptor:
                self.descriptors.check(path, descriptor)


def _map(path: Path, descriptor: int) -> mmap.mmap:
    system = file_system(os.fstat(descriptor).st_dev)
    if system.startswith(SHARED):
        raise CheckpointError(f"{path}: it lies on {system}, where a file may change under a map. Load without a map.")
    try:
        area = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:  # a map keeps a descriptor: too many shards
        raise StorageError(f"{path}: it cannot be mapped: {error.strerror}. Load without a map.") from None
    if hasattr(mmap, "MADV_WILLNEED"):
        area.madvise(mmap.MADV_WILLNEED)
    return area


def file_system(device: int) -> str:
    """The type of the file system that is mounted as this device; "" where that cannot be told."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in MOUNTS.read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == number:
                return after.split()[0]
    return ""
