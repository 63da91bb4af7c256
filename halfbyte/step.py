"""One step of a model: which tokens of which requests are computed together.

Most of a model works on tokens one by one, so a step is one flat row of tokens, whatever requests they belong to. Ops
that look into a request's past (attention, convolution, recurrence) take [B, L] tokens: those are the step's runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Wanted = Literal["last", "all", "none"]
FIRST = {"last": -1, "all": 0, "none": 1 << 62}  # of a request's new tokens, whose logits are wanted from there on


@dataclass(frozen=True)
class Run:
    """B requests with L new tokens each, side by side in the step from token `start` on."""

    start: int
    B: int
    L: int
    slots: Tensor  # int32 [B]
    lengths: Tensor  # int32 [B], these tokens included

    def view(self, x: Tensor) -> Tensor:
        """This run's part of x [T, ...], as [B, L, ...]."""
        part = x if x.shape[0] == self.B * self.L else x[self.start : self.start + self.B * self.L]
        return part.view(self.B, self.L, *x.shape[1:]) if part.is_contiguous() else part.unflatten(0, (self.B, self.L))


@dataclass(frozen=True)
class Step:
    """ids, positions [T]: every token of the step. wanted: the tokens whose logits are asked for, None for all.

    dtype is that of the activations that projections take and give; what is added up from layer to layer is float32.
    The requests of a step of one run may be filled up behind their `count` tokens: no state may take in what stands
    there.
    """

    ids: Tensor
    positions: Tensor
    runs: tuple[Run, ...]
    dtype: torch.dtype
    wanted: Tensor | None = None
    count: Tensor | None = None  # int32 [B]

    def each_run(self, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """work(run, *inputs as [B, L, ...]) -> [B, L, ...] for every run, joined to [T, ...] again."""
        done = [work(run, *map(run.view, inputs)).flatten(0, 1) for run in self.runs]
        return done[0] if len(done) == 1 else torch.cat(done)


def plan(
    work: Sequence[tuple[int, Sequence[int]]],
    held: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype,
    wanted: Wanted | Sequence[Wanted] = "last",
) -> Step:
    """A step for (slot, new ids) pairs, where slot s holds held[s] tokens so far.

    Requests with as many new tokens share a run. The logits come in the order of `work`: those of each request's last
    new token, of all its new tokens or of none.
    """
    wishes = [wanted] * len(work) if isinstance(wanted, str) else wanted
    groups: dict[int, list[int]] = {}
    for i, (_, new) in enumerate(work):
        groups.setdefault(len(new), []).append(i)
    ids: list[int] = []
    positions: list[int] = []
    runs, firsts = [], {}
    for L, group in sorted(groups.items()):
        start = len(ids)
        for i in group:
            slot, new = work[i]
            firsts[i] = len(ids)
            ids += new
            positions += range(held[slot], held[slot] + L)
        slots = [work[i][0] for i in group]
        ends = [held[slot] + L for slot in slots]
        runs.append(Run(start, len(group), L, upload(slots, device), upload(ends, device)))
    spans = [range(firsts[i], firsts[i] + len(work[i][1])) for i in range(len(work))]
    rows = [row for span, wish in zip(spans, wishes, strict=True) for row in span[FIRST[wish] :]]
    chosen = None if rows == list(range(len(ids))) else upload(rows, device)
    return Step(upload(ids, device), upload(positions, device), tuple(runs), dtype, chosen)


def upload(numbers: Sequence[Any], device: torch.device | str, dtype: torch.dtype = torch.int32) -> Tensor:
    """On the device. Nobody waits: what is under way there goes on, and so does the host."""
    here = torch.tensor(numbers, dtype=dtype)
    cuda = torch.device(device).type == "cuda"
    return here.pin_memory().to(device, non_blocking=True) if cuda else here.to(device)
