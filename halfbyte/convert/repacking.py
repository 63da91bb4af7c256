"""`convert --repack`: experts once more, in the order in which they are read when memory has no room for all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from .. import files
from ..checkpoint.descriptors import Descriptors
from ..checkpoint.ledger import Ledger, Mixture
from ..checkpoint.reading import fill_views
from ..checkpoint.sidecar import MANIFEST, described, file_size, own_parts, path_of, stride
from ..checkpoint.spans import Piece
from .saving import put, require_space, storage

ASIDE = ".tmp-"


def repack(ledger: Ledger, progress: Callable[[int, int], None]) -> int:
    """Write the sidecar of a checkpoint, into its folder; bytes written. The manifest comes last: until then, and where
    something goes wrong, nobody knows of the rest.
    """
    checkpoint, mixtures = ledger.checkpoint, list(ledger.mixtures.values())
    manifest, total, done = checkpoint.folder / MANIFEST, sum(map(file_size, mixtures)), 0
    require_space(checkpoint.folder, total)
    with storage(manifest):
        manifest.unlink(missing_ok=True)
    with Descriptors(checkpoint.states) as shards:
        for layer, mixture in enumerate(mixtures):
            write_layer(mixture, path_of(checkpoint.folder, layer), shards)
            done += file_size(mixture)
            progress(done, total)
    files.write_whole(manifest, json.dumps(described(checkpoint)).encode(), "the manifest of the experts")
    return total


def write_layer(mixture: Mixture, path: Path, shards: Descriptors) -> None:
    """One file, which appears whole."""
    aside, parts, step = path.with_name(f"{ASIDE}{path.name}"), own_parts(mixture), stride(mixture)
    buffer = memoryview(bytearray(step))
    with storage(path):
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                for expert in range(mixture.form.gate.shape[0]):
                    read_expert([span.entry(expert) for _, _, span in parts], buffer, shards)
                    put(descriptor, buffer, expert * step)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            aside.replace(path)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise


def read_expert(pieces: Sequence[Piece], buffer: memoryview, shards: Descriptors) -> None:
    at = 0
    for piece in pieces:
        read_piece(piece, buffer[at : at + piece.size], shards)
        at += piece.size


def read_piece(piece: Piece, view: memoryview, shards: Descriptors) -> None:
    stored = piece.stored
    with shards.open(stored.path) as descriptor:
        fill_views(descriptor, stored.path, piece.start, [view], lambda at: stored.name)
