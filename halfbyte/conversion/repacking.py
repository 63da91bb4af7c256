"""`convert --repack`: experts once more, in the order in which they are read when memory has no room for all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path

from ..checkpoint.descriptors import Descriptors
from ..checkpoint.ledger import Ledger, Mixture
from ..checkpoint.sidecar import MANIFEST, described, file_size, path_of, read_expert, stride
from ..errors import size
from .saving import ASIDE, own, put, require_space, storage, sync, write_json


def repack(ledger: Ledger, progress: Callable[[int, int], None]) -> int:
    """Write the sidecar of a checkpoint, into its folder; bytes written. All of it is written aside and then put in
    place: until then an older one stays, and where something goes wrong, nothing of this one does.
    """
    checkpoint, mixtures = ledger.checkpoint, list(ledger.mixtures.values())
    total, done = sum(map(file_size, mixtures)), 0
    with aside(checkpoint.folder) as made:
        require_space(checkpoint.folder, total)
        with Descriptors(checkpoint.states) as shards:
            for layer, mixture in enumerate(mixtures):
                write_layer(mixture, path_of(made, layer), shards)
                done += file_size(mixture)
                progress(done, total)
        write_json(made / MANIFEST, described(checkpoint))
        put_in_place(made, checkpoint.folder, [path_of(made, layer).name for layer in range(len(mixtures))])
    return total


def lines(ledger: Ledger) -> Iterator[str]:
    """What `repack` would write, for people: neighbours alike in one line."""
    sizes = [(mixture.form.gate.shape[0], file_size(mixture)) for mixture in ledger.mixtures.values()]
    for (experts, nbytes), alike in groupby(range(len(sizes)), sizes.__getitem__):
        first, *others = (path_of(Path(), layer).name for layer in alike)
        if others:
            yield f"{first} to {others[-1]}: {experts} experts each, {size(nbytes)} a file"
        else:
            yield f"{first}: {experts} experts, {size(nbytes)}"


@contextmanager
def aside(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, inside `folder`, that nobody else fills; removed at the end with what is still in it."""
    made = folder / f"{ASIDE}{MANIFEST}"
    lock = own(made)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def write_layer(mixture: Mixture, path: Path, shards: Descriptors) -> None:
    step = stride(mixture)
    buffer = memoryview(bytearray(step))
    with storage(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for expert in range(mixture.form.gate.shape[0]):
                read_expert(mixture, expert, buffer, shards)
                put(descriptor, buffer, expert * step)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def put_in_place(made: Path, folder: Path, names: Sequence[str]) -> None:
    """Move these files of a sidecar, without a manifest between the first and the last: nobody reads a mixture of an
    older one and this. Where that goes wrong, neither is left.
    """
    with storage(folder / MANIFEST):  # an older one that cannot be removed keeps its files
        (folder / MANIFEST).unlink(missing_ok=True)
    try:
        with storage(folder):
            sync(folder)
        move(made, folder, names)
        move(made, folder, [MANIFEST])
    except BaseException:
        for name in (MANIFEST, *names):
            with suppress(OSError):
                (folder / name).unlink()
        raise


def move(made: Path, folder: Path, names: Sequence[str]) -> None:
    for name in names:
        with storage(folder / name):
            os.replace(made / name, folder / name)
    with storage(folder):
        sync(folder)
