"""Open files, few at a time: a checkpoint may have more shards than a process may open."""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import NoReturn

from ..errors import CheckpointError, StorageError
from .shards import State

log = logging.getLogger(__name__)
MOST = 32
DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it


class Descriptors:
    """Descriptors by path, opened when asked for; the longest unused is closed. Threads may share it.

    Each file must be in the state in which it was validated, when it is opened and when all reading is done.
    `direct`: reads are of whole pages, past the system's memory of files; `buffered` are the files that refuse that.
    """

    def __init__(self, states: Mapping[Path, State], most: int = MOST, *, direct: bool = False) -> None:
        self.states, self.most = states, most
        self.buffered: set[Path] = set() if direct and DIRECT else set(states)
        self.opened: OrderedDict[Path, int] = OrderedDict()
        self.users: dict[Path, int] = {}
        self.deleted: set[Path] = set()
        self.lock = Lock()

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        changed = [path for path in list(self.opened) if not self._close(path)]
        if changed and kind is None:
            _changed(changed[0])

    def close(self) -> None:
        """Close all, whatever became of the files: what counted of them was checked."""
        for path in list(self.opened):
            self._close(path)

    @contextmanager
    def open(self, path: Path) -> Iterator[int]:
        with self.lock:
            descriptor = self.opened.get(path)
            if descriptor is None:
                self._close_unused()
                descriptor = self.opened[path] = self._open(path)
            self.opened.move_to_end(path)
            self.users[path] = self.users.get(path, 0) + 1
        try:
            yield descriptor
        finally:
            with self.lock:
                self.users[path] -= 1

    def check(self, path: Path, descriptor: int) -> None:
        """What was read of an open file counts only if the file is still as it was. A deleted one is, and is said."""
        found = os.fstat(descriptor)
        if State.of(found) != self.states[path]:
            _changed(path)
        if not found.st_nlink and path not in self.deleted:
            self.deleted.add(path)
            log.warning("%s: it was deleted; what is open of it is still read, until this process ends", path)

    def _open(self, path: Path) -> int:
        try:
            descriptor = os.open(path, os.O_RDONLY | (0 if path in self.buffered else DIRECT))
        except OSError as error:
            if error.errno == errno.EINVAL and path not in self.buffered:  # a file system without direct reads
                self.buffered.add(path)
                return self._open(path)
            raise StorageError(f"{path}: {error.strerror or error}") from None
        if State.of(os.fstat(descriptor)) != self.states[path]:
            os.close(descriptor)
            _changed(path)
        return descriptor

    def _close(self, path: Path) -> bool:
        """Whether the file is still as it was."""
        descriptor = self.opened.pop(path)
        state = State.of(os.fstat(descriptor))
        os.close(descriptor)
        return state == self.states[path]

    def _close_unused(self) -> None:
        for path in list(self.opened):
            if len(self.opened) < self.most:
                return
            if not self.users.get(path) and not self._close(path):
                _changed(path)


def _changed(path: Path) -> NoReturn:
    raise CheckpointError(f"{path}: it was changed after it had been checked. Load it again when nobody writes to it.")
