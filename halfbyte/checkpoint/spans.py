"""Where the bytes of a tensor lie: in one place of a file, or in many that are read one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch

from .shards import DTYPES, Stored


class Piece(NamedTuple):
    stored: Stored
    start: int  # in the file
    size: int


@dataclass(frozen=True)
class Span:
    """A tensor to be read: its pieces, in order, are its bytes. Nothing is copied to stack or to cut it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> Span:
        """These rows of each matrix: [..., N, K] -> [..., stop - start, K]."""
        *lead, N, K = self.shape
        (piece,) = self.pieces
        row = K * self.dtype.itemsize
        places = [piece.start + (matrix * N + start) * row for matrix in range(math.prod(lead))]
        pieces = tuple(Piece(piece.stored, at, (stop - start) * row) for at in places)
        return replace(self, shape=(*lead, stop - start, K), pieces=pieces)

    def entry(self, index: int) -> Piece:
        """Where one entry of the first axis lies, such as an expert of a stack."""
        size = self.size // self.shape[0]
        if len(self.pieces) == 1:
            return Piece(self.pieces[0].stored, self.pieces[0].start + index * size, size)
        return self.pieces[index]


def whole(name: str, stored: Stored) -> Span:
    return Span(name, stored.kind, stored.shape, (Piece(stored, stored.start, stored.size),))


def stacked(name: str, spans: Sequence[Span]) -> Span:
    """Spans alike in kind and shape as one, with a first axis."""
    first = spans[0]
    pieces = tuple(chain.from_iterable(span.pieces for span in spans))
    return Span(name, first.kind, (len(spans), *first.shape), pieces)
