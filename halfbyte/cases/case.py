"""A case: one call of one op, made from a seed. Tested against the body, timed where it is a serving shape, listed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """`build(random, dtype)` makes (args, kwargs); activations come in dtype, weights in what a checkpoint has.

    `mutates` names keyword arguments that the op changes in place, which are compared too. `touched` counts the bytes
    a call must move, where that is less than all its arguments and results (one row of an embedding).
    """

    op: Callable[..., Any]
    name: str
    build: Callable[[Random, torch.dtype], tuple[tuple[Any, ...], dict[str, Any]]]
    serving: bool = False
    mutates: tuple[str, ...] = ()
    touched: Callable[[tuple[Any, ...], dict[str, Any]], int] | None = None

    def __str__(self) -> str:
        return f"{self.op.__name__}[{self.name}]"

    def inputs(self, dtype: torch.dtype, turn: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments; another turn gives other values of the same shapes."""
        return self.build(Random(zlib.crc32(str(self).encode()) + turn), dtype)


class Random:
    """Tensors from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype)

    def strided(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """As `normal`, but no two neighbours of the last axis touch in memory."""
        return self.normal(*shape[:-1], 2 * shape[-1], dtype=dtype, scale=scale)[..., ::2]

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)
