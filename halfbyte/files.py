"""Files of a model folder: only those inside it, only regular ones, and small ones whole but capped. Files of ours."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from .errors import CheckpointError, StorageError, shown, size

AGAIN = "Download it again: `halfbyte pull --force`."
REPACK_AGAIN = "Make it again, `halfbyte convert MODEL --repack`, or remove experts.json."
IMPOSTORS = (
    (b"version https://git-lfs", "a Git-LFS pointer", "Fetch the file itself: `git lfs pull`."),
    (b"<!doctype html", "an HTML page", AGAIN),
    (b"<html", "an HTML page", AGAIN),
    (b"<?xml", "an XML page", AGAIN),
    (b"pk\x03\x04", "a zip file (PyTorch's pickle format)", "Only safetensors are read."),
    (b"gguf", "a GGUF file", "Only MLX checkpoints are read."),
)
HEAD = 64  # bytes that suffice to recognise these
FOREIGN = {".gguf": "GGUF files", ".bin": "PyTorch's pickles", ".pth": "PyTorch's pickles", ".pt": "PyTorch's pickles"}


def find(folder: Path, name: str) -> Path:
    """The path of a file named in a model folder; what is not inside it is refused.

    A link may leave the folder in one direction: to the blobs of a Hugging Face cache, which keeps its snapshots so.
    """
    if not plain(name):
        raise CheckpointError(f"{folder}: the file name {shown(name)} leaves the model folder. It is refused.")
    path = folder / name
    try:
        real = path.resolve(strict=True)
        kind = real.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file. {AGAIN}") from None
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        raise StorageError(f"{path}: {error}") from None
    home = folder.resolve()
    blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if not (real.is_relative_to(home) or blob):
        raise CheckpointError(
            f"{path}: it links to {real}, outside of the model folder. Copy the file into the folder."
        )
    if not stat.S_ISREG(kind):
        raise CheckpointError(f"{path}: not a regular file. {AGAIN}")
    return path


def remedy(path: Path) -> str:
    """What to do about a file of weights that is damaged: shards were downloaded, repacked experts were made here."""
    return REPACK_AGAIN if path.suffix == ".bin" else AGAIN


def lacks(folder: Path, what: str) -> CheckpointError:
    """That a folder is no checkpoint, and of what else it is one."""
    kinds = {FOREIGN[path.suffix] for path in folder.iterdir() if path.suffix in FOREIGN}
    instead = f", but {' and '.join(sorted(kinds))}, which are not read" if kinds else ""
    return CheckpointError(
        f"{folder}: there is no {what} in it{instead}. Give the folder of an MLX checkpoint; `halfbyte pull` gets one."
    )


def plain(name: str) -> bool:
    """Whether this is the name of a file in a folder, and no path."""
    return name not in ("", ".", "..") and not any(mark in name for mark in ("/", "\\", "\0"))


def read_small(path: Path, limit: int) -> bytes:
    """All of a file of at most `limit` bytes."""
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length > limit:
                raise CheckpointError(
                    f"{path}: it has {size(length)}, more than the {size(limit)} such a file may have."
                )
            data = file.read(length)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from None
    if said := impostor(data[:HEAD]):
        raise CheckpointError(f"{path}: {said}")
    return data


def write_whole(path: Path, data: bytes, what: str) -> None:
    """A file that appears whole or not at all, for its owner alone; what stood there before stays until then."""
    aside = None
    try:
        path = path.resolve()  # a link stays one
        if path.exists() and not path.is_file():  # a device or a pipe: who may would put a file in its place
            raise OSError(errno.EINVAL, "it is no file")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".tmp-{path.name}-", delete=False) as file:
            aside = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        aside = None
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        said = error.strerror if isinstance(error, OSError) else None
        raise StorageError(f"{path}: {what} could not be written: {said or error}.") from error
    finally:
        if aside is not None:
            aside.unlink(missing_ok=True)


def impostor(head: bytes) -> str | None:
    """What a file that begins so is instead, and what to do; None where nothing is recognised."""
    start = head.lstrip().lower()
    for mark, what, remedy in IMPOSTORS:
        if start.startswith(mark):
            return f"this is {what}, not weights or settings. {remedy}"
    return None
