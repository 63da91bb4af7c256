"""Writing a checkpoint: beside its place, and then there at once. A kill leaves nothing, or everything.

The folder that is being written is `.tmp-halfbyte-NAME`, next to the target and so on its file system. Whoever holds
its lock owns it; the lock is on the folder itself, so it dies with its process and goes along when the folder is
renamed. What a dead process has left is taken over by the next one that writes to the same target. `repacking` fills
such a folder too.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.shards import DTYPES
from ..errors import StorageError, size

SHARD_BYTES = 5 << 30
ALIGNMENT = 64  # of the data in a file, and of every tensor whose size is a multiple of it
SPARE = 1 << 20  # bytes for what is written beside tensors and counted files: folders, blocks not filled
ASIDE = ".tmp-halfbyte-"
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Slot:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """Where each tensor goes: files of at most SHARD_BYTES of tensors, a larger tensor alone."""

    def __init__(self, slots: list[Slot]) -> None:
        shards: list[list[Slot]] = []
        space = 0
        for slot in slots:
            if not shards or slot.size > space:
                shards.append([])
                space = SHARD_BYTES
            shards[-1].append(slot)
            space -= slot.size
        self.files = {shard_name(number, len(shards)): aligned(shard) for number, shard in enumerate(shards, 1)}
        self.headers: dict[str, bytes] = {}
        self.places: dict[str, tuple[str, int]] = {}  # file and offset by tensor
        for file, shard in self.files.items():
            self.headers[file], offsets = header(shard)
            self.places |= {slot.name: (file, offset) for slot, offset in zip(shard, offsets, strict=True)}

    @property
    def size(self) -> int:
        return sum(len(self.headers[file]) + sum(slot.size for slot in shard) for file, shard in self.files.items())

    def index(self, parameters: int) -> dict[str, Any]:
        total = sum(slot.size for shard in self.files.values() for slot in shard)
        return {
            "metadata": {"total_size": total, "total_parameters": parameters},
            "weight_map": {name: self.places[name][0] for name in sorted(self.places)},
        }


def shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def aligned(shard: list[Slot]) -> list[Slot]:
    """Tensors of odd sizes behind the others, the widest dtype first, so that all begin where their dtype can."""
    return sorted(shard, key=lambda slot: -slot.dtype.itemsize if slot.size % ALIGNMENT else -ALIGNMENT)


def header(shard: list[Slot]) -> tuple[bytes, list[int]]:
    """A safetensors file's beginning, and where in the file each tensor begins."""
    entries: dict[str, Any] = {}
    at, offsets = 0, []
    for slot in shard:
        entries[slot.name] = {
            "dtype": KINDS[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [at, at + slot.size],
        }
        offsets.append(at)
        at += slot.size
    text = {"__metadata__": {"format": "mlx"}, **dict(sorted(entries.items()))}
    data = json.dumps(text, separators=(",", ":")).encode()
    data += b" " * (-(8 + len(data)) % ALIGNMENT)
    return len(data).to_bytes(8, "little") + data, [8 + len(data) + offset for offset in offsets]


class Writer:
    """Tensors into the files of a layout, part by part; a file is closed when it is full."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder, self.layout = folder, layout
        self.open: dict[str, int] = {}
        self.missing = {file: sum(slot.size for slot in shard) for file, shard in layout.files.items()}

    def write(self, slot: Slot, row: int, rows: Tensor) -> None:
        """Put rows of a tensor, counted over all its matrices, from `row` on."""
        file, start = self.layout.places[slot.name]
        start += row * (slot.shape[-1] if slot.shape else 1) * slot.dtype.itemsize
        assert rows.dtype == slot.dtype
        data = rows.contiguous().flatten().view(torch.uint8).numpy().data
        path = self.folder / file
        with storage(path):
            if file not in self.open:
                self.open[file] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                put(self.open[file], memoryview(self.layout.headers[file]), 0)
            put(self.open[file], data, start)
            self.missing[file] -= len(data)
            if not self.missing[file]:
                descriptor = self.open.pop(file)
                os.fsync(descriptor)
                os.close(descriptor)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)


def put(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count


def write_json(path: Path, value: Any) -> None:
    with storage(path), path.open("x", encoding="utf-8") as file:
        json.dump(value, file, indent=4)
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: Path, target: Path) -> None:
    with storage(target):
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
        sync(target)


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """What the system says against a file, as ours."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}. What was written has been removed.") from error


def check_target(source: Path, target: Path) -> None:
    """Refuse a target that cannot become a new folder, before anything is touched."""
    parent, place = target.absolute().parent, target.resolve()
    if place == source.resolve():
        raise ValueError(f"convert: {target} is the source. Choose another folder for the result.")
    if place.is_relative_to(source.resolve()):
        raise ValueError(f"convert: {target} lies inside the source. Choose a folder elsewhere.")
    if os.path.lexists(target):
        raise ValueError(f"convert: {target} exists already. Remove it, or choose another folder.")
    if not parent.is_dir():
        raise ValueError(f"convert: {parent} is not a folder. Create it, or choose another place for {target.name}.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"convert: {parent} is not writable. Choose another place for {target.name}.")


def require_space(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise StorageError(
            f"{folder}: the result needs {size(need)} of disk space, and {size(free)} are free there. "
            "Free some, or work in another place."
        )


@contextmanager
def aside(target: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `target` when the block ends well and is removed when it does not."""
    parent = target.absolute().parent
    folder = parent / f"{ASIDE}{target.name}"
    lock = own(folder)
    try:
        if os.path.lexists(target):  # since it was checked: another process has just finished
            raise ValueError(f"convert: {target} exists already. Remove it, or choose another folder.")
        yield folder
        with storage(target):
            for inner, _, _ in os.walk(folder):
                sync(Path(inner))
            os.rename(folder, target)
            sync(parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def own(folder: Path) -> int:
    """Make `folder`, or take over what a dead process left of it: emptied, and locked for as long as we live."""
    import fcntl

    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            pass
        except OSError as error:  # also where nothing can be made: FileNotFoundError in /proc
            raise unwritable(folder, error) from None
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # its owner has just finished
            continue
        except NotADirectoryError:
            raise StorageError(f"{folder}: it is in the way, and no folder. Remove it.") from None
        except OSError as error:
            raise unwritable(folder, error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.lstat(folder)):
                with storage(folder):
                    for path in folder.iterdir():
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                return lock
        except FileNotFoundError:  # renamed or removed before we had the lock
            pass
        except BlockingIOError:
            os.close(lock)
            target = folder.with_name(folder.name.removeprefix(ASIDE))
            raise StorageError(f"{target}: another process is writing it. Wait for it.") from None
        except OSError as error:
            os.close(lock)
            raise StorageError(f"{folder}: {error.strerror or error}. Work in another place.") from None
        os.close(lock)


def unwritable(folder: Path, error: OSError) -> ValueError:
    return ValueError(f"convert: {folder.parent} is not writable ({error.strerror}). Make it so, or use another.")


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
