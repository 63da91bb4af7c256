"""One safetensors file, validated: u64 length | JSON header | data, where every byte of the data belongs to one tensor.

First what the safetensors package checks, then all of it again and more, with arithmetic that cannot wrap: spans equal
shape times dtype, nothing overlaps, nothing is left over, no key stands twice.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from .. import files, limits, strict_json
from ..errors import CheckpointError, StorageError, shown

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class State:
    """What tells that a file is still the one that was validated."""

    size: int
    modified: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> State:
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `size` bytes from `start`, counted from the beginning of the file."""

    name: str
    path: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]


@dataclass(frozen=True)
class Shard:
    path: Path
    state: State
    digest: bytes  # of the header
    tensors: tuple[Stored, ...]


def read(path: Path) -> Shard:
    """A shard's tensors, by the header alone."""
    try:
        with path.open("rb", buffering=0) as file:
            state = State.of(os.fstat(file.fileno()))
            header = _header(path, file, state.size)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from None
    rejected = _package_check(path)
    entries = strict_json.parse_object(header, str(path))
    begin = 8 + len(header)
    metadata = entries.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        _refuse(path, "__metadata__ is not an object of strings")
    tensors = [_stored(path, name, entry, begin, state.size) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.size))
    _without_gaps(path, tensors, begin, state.size)
    if rejected:  # ours says more where both object
        _refuse(path, f"safetensors rejects it: {rejected}")
    return Shard(path, state, hashlib.sha256(header).digest(), tuple(tensors))


def _header(path: Path, file: Any, length: int) -> bytes:
    head = file.read(files.HEAD)
    if said := files.impostor(head):
        raise CheckpointError(f"{path}: {said}")
    if length < 8 or len(head) < 8:
        _refuse(path, f"it has {length} bytes, less than the 8 of a header's length")
    count = int.from_bytes(head[:8], "little")
    if count > limits.HEADER_BYTES:
        _refuse(path, f"its header would have {count} bytes, more than {limits.HEADER_BYTES}: not a safetensors file")
    if 8 + count > length:
        _refuse(path, f"its header would end at byte {8 + count}, but the file has {length}")
    file.seek(8)
    header: bytes = file.read(count)
    if len(header) < count:
        _refuse(path, f"the header ends after {len(header)} of {count} bytes")
    return header


def _package_check(path: Path) -> str | None:
    """What the safetensors package says against the file."""
    try:
        with safe_open(path, "np"):  # "pt" maps privately, for which a large file needs as much memory
            return None
    except SafetensorError as error:
        return str(error)
    except (
        MemoryError
    ):  # it maps the whole file, which a limit on address space may forbid; our own checks need nothing
        return None
    except OSError as error:
        raise StorageError(f"{path}: {error}") from None


def _stored(path: Path, name: str, entry: Any, begin: int, length: int) -> Stored:
    def fail(why: str) -> NoReturn:
        _refuse(path, f"tensor {shown(name)}: {why}")

    if len(name) > limits.NAME_CHARACTERS:
        fail(f"its name has {len(name)} characters")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        fail(f"dtype, shape and data_offsets were expected, it has {shown(entry)}")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        fail(f"unknown dtype {shown(kind)}")
    if not _counts(shape, limits.DIMENSION) or len(shape) > limits.DIMENSIONS:
        fail(f"shape {shown(shape)}: at most {limits.DIMENSIONS} sizes from 0 to 2^31 - 1 were expected")
    if not _counts(offsets, limits.FILE_BYTES) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(f"offsets {shown(offsets)}: begin <= end were expected")
    size, wanted = offsets[1] - offsets[0], math.prod(shape) * DTYPES[kind].itemsize
    if size != wanted:
        fail(f"{kind} {shape} takes {wanted} bytes, its offsets {offsets} span {size}")
    if (end := begin + offsets[1]) > length:
        fail(f"it ends at byte {end}, but the file has {length}: {end - length} bytes are missing")
    return Stored(name, path, kind, tuple(shape), begin + offsets[0], size)


def _counts(value: Any, limit: int) -> bool:
    """A list of integers from 0 to below the limit."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < limit for item in value)


def _without_gaps(path: Path, tensors: list[Stored], begin: int, length: int) -> None:
    at, before = begin, "the header"
    for tensor in tensors:
        if tensor.start != at:
            what = "overlaps" if tensor.start < at else f"leaves a hole of {tensor.start - at} bytes after"
            _refuse(path, f"tensor {shown(tensor.name)} {what} {before}")
        at, before = tensor.start + tensor.size, shown(tensor.name)
    if at != length:
        _refuse(path, f"{length - at} bytes follow the last tensor")


def _refuse(path: Path, why: str, remedy: str = files.AGAIN) -> NoReturn:
    raise CheckpointError(f"{path}: {why}. {remedy}".removesuffix(" "))
