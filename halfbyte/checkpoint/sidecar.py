"""Experts repacked: a second copy beside the shards, where each expert lies in one place and begins at a page.

`experts-NN.bin` has the experts of one layer, `experts.json` says of which checkpoint. What is where follows from the
checkpoint: an expert is its parts in the order of its projections, and the next one begins at the next page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from .. import files, limits, strict_json
from ..errors import CheckpointError, StorageError
from ..files import REPACK_AGAIN as AGAIN
from .descriptors import Descriptors
from .ledger import Contents, Mixture
from .reading import PAGE, fill_views
from .shards import State, Stored
from .spans import Piece, Span

MANIFEST = "experts.json"
VERSION = 1


def own_parts(mixture: Mixture) -> list[tuple[int, str, Span]]:
    """(projection, part, span) of what every expert has its own of; one number for a whole stack is not among it."""
    E = mixture.form.gate.shape[0]
    parts = [(at, name, span) for at, spans in enumerate(mixture.parts) for name, span in spans.items()]
    return [(at, name, span) for at, name, span in parts if span.shape[:1] == (E,)]


def stride(mixture: Mixture) -> int:
    """From one expert of a file to the next."""
    used = sum(span.size // span.shape[0] for _, _, span in own_parts(mixture))
    return -(-used // PAGE) * PAGE


def file_size(mixture: Mixture) -> int:
    return int(mixture.form.gate.shape[0]) * stride(mixture)


def path_of(folder: Path, layer: int) -> Path:
    return folder / f"experts-{layer:02d}.bin"


def moved(mixture: Mixture, path: Path) -> Mixture:
    """The same experts, where a sidecar has them."""
    step, at = stride(mixture), 0
    parts = [dict(spans) for spans in mixture.parts]
    for projection, name, span in own_parts(mixture):
        each = span.size // span.shape[0]
        stored = Stored(span.name, path, span.kind, span.shape, 0, file_size(mixture))
        pieces = tuple(Piece(stored, expert * step + at, each) for expert in range(span.shape[0]))
        parts[projection][name] = replace(span, pieces=pieces)
        at += each
    return Mixture(mixture.form, (parts[0], parts[1], parts[2]))


def find(checkpoint: Contents, mixtures: Mapping[str, Mixture]) -> tuple[list[Mixture], dict[Path, State]] | None:
    """The experts of a sidecar, if the checkpoint has one, and the states of its files. One that is not of this
    checkpoint is refused: it would answer with other weights.
    """
    states = find_files(checkpoint, mixtures)
    if states is None:
        return None
    found = []
    for mixture, path in zip(mixtures.values(), states, strict=True):
        found.append(moved(mixture, path))
        if beginnings(mixture) != beginnings(found[-1]):
            raise CheckpointError(f"{path}: its experts are not those of the shards. {AGAIN}")
    return found, states


def find_files(checkpoint: Contents, mixtures: Mapping[str, Mixture]) -> dict[Path, State] | None:
    """The files of a sidecar by layer, if the checkpoint has one: made of it, all there, each of its size."""
    manifest = checkpoint.folder / MANIFEST
    if not manifest.exists():
        return None
    try:
        text = files.read_small(manifest, limits.CONFIG_BYTES)
    except StorageError as error:
        raise StorageError(f"{error}. {AGAIN}") from None
    said = strict_json.parse(text, str(manifest), remedy=f" {AGAIN}")
    if said != described(checkpoint):
        raise CheckpointError(f"{manifest}: it is not of this checkpoint as it is now. {AGAIN}")
    states = {}
    for layer, mixture in enumerate(mixtures.values()):
        path = path_of(checkpoint.folder, layer)
        try:
            states[path] = State.of(os.stat(path))
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}. {AGAIN}") from None
        if states[path].size != file_size(mixture):
            raise CheckpointError(f"{path}: it has {states[path].size} bytes, not {file_size(mixture)}. {AGAIN}")
    return states


def beginnings(mixture: Mixture) -> dict[int, bytes]:
    """Of every expert the first page of one part, each part in its turn: enough to tell other weights of the same
    shapes, also where few experts are others."""
    parts = [span for _, _, span in own_parts(mixture)]
    pieces = [(parts[expert % len(parts)].entry(expert), expert) for expert in range(mixture.form.gate.shape[0])]
    pieces.sort(key=lambda one: str(one[0].stored.path))
    found: dict[int, bytes] = {}
    for path, of_file in groupby(pieces, lambda one: one[0].stored.path):
        try:
            with path.open("rb", buffering=0) as file:
                for piece, expert in of_file:
                    file.seek(piece.start)
                    found[expert] = file.read(min(piece.size, PAGE))
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}") from None
    return found


def compare(checkpoint: Contents, mixtures: Mapping[str, Mixture], states: Mapping[Path, State]) -> Iterator[int]:
    """Check every byte of a sidecar, page ends too, against the shards; yields how many more are right. `states` are
    those of its files, by layer.
    """
    with Descriptors({**checkpoint.states, **states}) as opened:
        for mixture, path in zip(mixtures.values(), states, strict=True):
            step = stride(mixture)
            expected, found = bytearray(step), bytearray(step)
            for expert in range(mixture.form.gate.shape[0]):
                read_expert(mixture, expert, memoryview(expected), opened)
                with opened.open(path) as descriptor:
                    fill_views(descriptor, path, expert * step, [memoryview(found)], lambda at: "experts")
                if found != expected:
                    raise CheckpointError(f"{path}: expert {expert} is not that of the shards. {AGAIN}")
                yield step


def read_expert(mixture: Mixture, expert: int, buffer: memoryview, shards: Descriptors) -> None:
    """What a sidecar has of an expert, from the shards; behind it the buffer stays as it is."""
    at = 0
    for _, _, span in own_parts(mixture):
        stored, start, count = span.entry(expert)
        read_piece(stored, start, buffer[at : at + count], shards)
        at += count


def read_piece(stored: Stored, start: int, view: memoryview, shards: Descriptors) -> None:
    with shards.open(stored.path) as descriptor:
        fill_views(descriptor, stored.path, start, [view], lambda at: stored.name)


def described(checkpoint: Contents) -> dict[str, object]:
    """What a manifest says: all that the places in the files depend on."""
    return {"repacked": VERSION, "page": PAGE, "fingerprint": checkpoint.fingerprint}
