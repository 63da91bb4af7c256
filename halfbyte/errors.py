"""The errors that reach people: each says what is wrong, where, and what to do next. `exit_code` is the command's."""

from __future__ import annotations


class HalfbyteError(Exception):
    exit_code = 1


class UsageError(HalfbyteError, ValueError):
    """A setting that means nothing, wherever it was made."""

    exit_code = 2


class CheckpointError(HalfbyteError, ValueError):
    """A file or a config that is damaged, or that needs what is not implemented."""

    exit_code = 3


class NotEnoughMemory(HalfbyteError, MemoryError):
    """Said before anything is allocated."""

    exit_code = 4


class StorageError(HalfbyteError, OSError):
    """A disk or a file system that fails."""

    exit_code = 5


def shown(value: object, limit: int = 120) -> str:
    """Text from a file as a message may hold it: quoted, control characters and lone surrogates escaped, cut."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 12]}... ({len(text)} characters)"


def size(count: int) -> str:
    """1536 -> '1.5 kB'; powers of 1000, as disks are sold."""
    amount, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{count} bytes" if units[0] == "bytes" else f"{amount:.1f} {units[0]}"
