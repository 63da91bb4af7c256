"""Muon for the matrices of the layers, AdamW for everything else, on the twin's flat buffers.

Muon moves a matrix by its momentum made orthogonal (Newton and Schulz's iteration), scaled to the size of Adam's steps.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from .twin import Twin

BETAS, EPS, DECAY = (0.95, 0.98), 1e-10, 0.05
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
AS_ADAM = 0.2  # the usual root mean square of an AdamW step, in learning rates
SMALLEST = 32  # rows of a matrix that is worth making orthogonal


class Optimiser:
    def __init__(self, twin: Twin) -> None:
        self.twin, self.steps = twin, 0
        self.first = {key: torch.zeros_like(flat) for key, flat in twin.flat.items()}
        self.second = {key: torch.zeros_like(flat) for key, flat in twin.flat.items()}
        self.groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, size in twin.sizes.items():
            if len(size) >= 2 and min(size[-2:]) >= SMALLEST and name != "embed_tokens.weight":
                self.groups[size[-2:]].append(name)

    @torch.no_grad()
    def step(self, rate: float, most: float = 1.0) -> Tensor:
        """One step against the gradients, which are cut to the norm `most` and then forgotten. Returns their norm."""
        self.steps += 1
        gradients = {key: flat.grad for key, flat in self.twin.flat.items() if flat.grad is not None}
        norm: Tensor = torch.stack([one.norm() for one in gradients.values()]).norm()
        cut = (most / (norm + 1e-6)).clamp(max=1.0)
        step: dict[str, Tensor] = {}
        for key, gradient in gradients.items():
            gradient.mul_(cut)
            first, second = self.first[key], self.second[key]
            first.lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square(), 1 - BETAS[1])
            mean = first / (1 - BETAS[0] ** self.steps)
            step[key] = mean / ((second / (1 - BETAS[1] ** self.steps)).sqrt() + EPS)
        self._orthogonal(self.twin.split(step), self.twin.split(gradients))
        for key, flat in self.twin.flat.items():
            if key in ("bits4", "bits8"):
                flat.mul_(1 - rate * DECAY)
            flat.sub_(step[key], alpha=rate)
            flat.grad = None
        return norm

    def _orthogonal(self, step: dict[str, Tensor], gradient: dict[str, Tensor]) -> None:
        """Overwrite the steps of the matrices. Adam's first moment is the momentum too."""
        momentum = self.twin.split(self.first)
        for (rows, columns), names in self.groups.items():
            moved = [(momentum[name].lerp(gradient[name], 1 - BETAS[0])).view(-1, rows, columns) for name in names]
            made = orthogonal(torch.cat(moved)) * (AS_ADAM * max(rows, columns) ** 0.5)
            for name, part in zip(names, made.split([len(one) for one in moved]), strict=True):
                step[name].copy_(part.view_as(step[name]))


def orthogonal(x: Tensor) -> Tensor:
    """The nearest orthogonal matrices to x [n, rows, columns], roughly: singular values of about 1."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[1] > x.shape[2]
    y = (x.mT if tall else x).to(torch.bfloat16 if x.is_cuda else x.dtype)
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    result: Tensor = (y.mT if tall else y).float()
    return result
