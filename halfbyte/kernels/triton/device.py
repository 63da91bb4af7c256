"""What launch sizes are chosen by: properties of the device that the tensors live on."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch


class Facts(NamedTuple):
    """One device, as far as launch sizes depend on it."""

    capability: int  # 90 is Hopper; 0 where it is not NVIDIA's
    processors: int
    shared: int  # bytes of shared memory that one program may have


# Bytes of shared memory a program may ask for, by compute capability; read from the CUDA programming guide.
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
H200 = Facts(90, 132, 232448)

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("0", "", "false", "off")
_pretended: Facts | None = None
_deterministic = False
_one_by_one = False
# Rows of a decode step. A step of more is a piece of one prompt, which the requests beside it do not change.
MOST_STREAMS = 64


def facts(device: torch.device) -> Facts:
    """Of a GPU; of an H200 for CPU tensors (the interpreter) unless a test pretends another."""
    if _pretended is not None:
        return _pretended
    return _read(device.index or 0) if device.type == "cuda" else H200


def overlap(device: torch.device) -> dict[str, bool]:
    """Launch options with which a kernel starts while the one before it still runs (Hopper and later).

    Before its gdc_wait() such a kernel may read weights and, in a recorded step, what no launch of that step writes
    before it: positions, slots, a layer's own state. Anything else may still be being written. It may always ask for
    memory to come to the L2, which reads nothing.
    """
    able = facts(device).capability >= 90 and not INTERPRETED and not _one_by_one
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}


@contextmanager
def one_by_one():
    """Inside, launches start when the one before has ended: what has come from another stream is waited for so."""
    global _one_by_one
    before, _one_by_one = _one_by_one, True
    try:
        yield
    finally:
        _one_by_one = before


def make_deterministic(on: bool) -> None:
    """From now on a row's bits depend neither on how many rows a decode step has nor on which: see `steady`."""
    global _deterministic
    _deterministic = on


def steady(rows: int) -> bool:
    """Whether launch sizes for so many rows must be those for one: they may follow from the matrix alone."""
    return _deterministic and rows <= MOST_STREAMS


def pretend(other: Facts | None) -> None:
    """Choose launch sizes as if on another device, so that they can be compiled for it without one."""
    global _pretended
    _pretended = other


@cache
def _read(index: int) -> Facts:
    properties = torch.cuda.get_device_properties(index)
    capability = 0 if torch.version.hip else properties.major * 10 + properties.minor
    shared = getattr(properties, "shared_memory_per_block_optin", 65536)
    return Facts(capability, properties.multi_processor_count, shared)
