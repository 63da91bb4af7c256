"""A case: one call of one op, made from a seed. Tested against the body, timed where it is a serving shape, listed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..check import move


@dataclass(frozen=True)
class Case:
    """`build(random, dtype)` makes (args, kwargs); activations come in dtype, weights in what a checkpoint has.

    `mutates` names keyword arguments that the op changes in place, which are compared too. `touched` counts the bytes
    a call must move, where that is less than all its arguments and results (one row of an embedding); `flops` its
    multiplications and additions, where they rather than bytes set its floor. `only` names the one device the case is
    for, where it is too large for others: its tensors are made there.
    """

    op: Callable[..., Any]
    name: str
    build: Callable[[Random, torch.dtype], tuple[tuple[Any, ...], dict[str, Any]]]
    serving: bool = False
    mutates: tuple[str, ...] = ()
    touched: Callable[[tuple[Any, ...], dict[str, Any]], int] | None = None
    flops: Callable[[tuple[Any, ...], dict[str, Any]], float] | None = None
    only: str | None = None

    def __str__(self) -> str:
        return f"{self.op.__name__}[{self.name}]"

    def runs_on(self, device: str) -> bool:
        return self.only in (None, device)

    def inputs(
        self, dtype: torch.dtype, turn: int = 0, device: torch.device | str = "cpu"
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments on a device; another turn gives other values of the same shapes.

        A case for any device has the same values on all of them.
        """
        random = Random(zlib.crc32(str(self).encode()) + turn, device if self.only else "cpu")
        made: tuple[tuple[Any, ...], dict[str, Any]] = move(self.build(random, dtype), device)
        return made


class Random:
    """Tensors from one seeded generator, on its device."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device if self.device.type != "meta" else "cpu").manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        return (torch.randn(shape, generator=self.generator, device=self.device) * scale).to(dtype)

    def strided(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """As `normal`, but no two neighbours of the last axis touch in memory."""
        return self.normal(*shape[:-1], 2 * shape[-1], dtype=dtype, scale=scale)[..., ::2]

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.randint(low, high, shape, generator=self.generator, device=self.device).to(dtype)
