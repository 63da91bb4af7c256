"""What has been asked of a checkpoint: names that were taken, where their bytes lie, and all that was wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError, shown
from ..ops.experts import Experts, Lender
from .quantisation import Quantisation
from .reading import read
from .shards import State, Stored
from .spans import Span, whole

PARTS = ("weight", "scales", "biases", "global_scale")  # of a quantised matrix; a dense one has the first


class Mixture(NamedTuple):
    """The experts of a layer as a skeleton knows them: without memory, and where the parts of each projection lie."""

    form: Experts
    parts: tuple[dict[str, Span], dict[str, Span], dict[str, Span]]  # of gate, up, down


class Contents(Protocol):
    """What weights need of a checkpoint."""

    @property
    def folder(self) -> Path: ...
    @property
    def tensors(self) -> dict[str, Stored]: ...
    @property
    def states(self) -> dict[Path, State]: ...
    @property
    def quantisation(self) -> Quantisation: ...
    @property
    def fingerprint(self) -> str: ...
    def has(self, name: str) -> bool: ...


class Ledger:
    """What all views of one set of weights share: what was taken, what was wrong, what has been read."""

    def __init__(
        self,
        checkpoint: Contents,
        device: torch.device,
        ready: dict[str, Tensor] | None = None,
        lenders: Mapping[str, Lender] | None = None,
    ) -> None:
        self.checkpoint, self.device = checkpoint, device
        self.ready = {} if ready is None else ready
        self.lenders = lenders or {}  # of experts that are not loaded, by name
        self.skeleton = device.type == "meta"
        self.taken: set[str] = set()
        self.matrices: dict[str, tuple[tuple[int, ...], str]] = {}
        self.of_matrices: set[str] = set()
        self.stacks: set[str] = set()  # experts' tensors
        self.mixtures: dict[str, Mixture] = {}  # in the order of the layers
        self.modes: dict[str, str] = {}  # of scales that are no floats
        self.wanted: dict[str, Span] = {}
        self.problems: list[str] = []

    def note(self, path: str, shape: tuple[int, ...], form: str, parts: dict[str, Span]) -> None:
        """What accounting.py counts: a matrix, the form it is stored in, and its tensors."""
        self.matrices[path] = (shape, form)
        self.of_matrices |= {span.name for span in parts.values()}

    def complain(self, name: str, why: str) -> None:
        """A skeleton collects faults; loaded weights were checked as one, or are being tried out by hand."""
        self.problems.append(f"{shown(name)}: {why}")
        if not self.skeleton:
            raise CheckpointError(f"{self.checkpoint.folder}: {self.problems[-1]}")

    def span(self, name: str) -> Span | None:
        stored = self.checkpoint.tensors.get(name)
        if stored is None:
            return None
        self.taken.add(name)
        return whole(name, stored)

    def fetch(self, span: Span) -> Tensor:
        if self.skeleton:
            self.wanted[span.name] = span
            return torch.empty(span.shape, dtype=span.dtype, device="meta")
        found = self.ready.pop(span.name, None)
        return read(self.checkpoint.states, [span], self.device)[span.name] if found is None else found
