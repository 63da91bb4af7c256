"""Where experts lie in files: ranges of bytes, and those that follow each other joined to one read."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import addressof, c_char
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .checkpoint.reading import BUFFERS, PAGE

Integers = NDArray[np.int64]


class Range(NamedTuple):
    """Bytes of a file from `start` on, and the memory that they fill."""

    path: Path
    start: int
    name: str  # of the tensor
    view: memoryview

    @property
    def stop(self) -> int:
        return self.start + len(self.view)

    @property
    def address(self) -> int:
        return address_of(self.view)


class Where(NamedTuple):
    """Where the parts [P] of a layer's experts [E] lie."""

    paths: list[Path]
    starts: Integers  # [E, P, 2]: the number of a path, and where a part starts there
    sizes: Integers  # [P]


def address_of(view: memoryview) -> int:
    return addressof(c_char.from_buffer(view))


def of_pages(one: Range) -> bool:
    """Whether a disk can write it where it belongs: whole pages of a file into whole pages of memory."""
    return not (one.start % PAGE or len(one.view) % PAGE or one.address % PAGE)


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
