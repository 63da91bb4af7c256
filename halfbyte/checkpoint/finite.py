"""Weights that are no numbers, found when they are loaded rather than as text that makes no sense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..errors import CheckpointError, shown
from ..files import remedy

Check = Literal["sampled", "all", "none"]
EXPERTS = 8  # of a stack, where it is sampled
CHUNK = 1 << 18  # values looked at together, so that they stay in a cache
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# A value is NaN or infinite if all bits of its exponent are set. Scales that are codes have theirs by mode.
EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
NO_NUMBER = {"mxfp4": 0xFF, "mxfp8": 0xFF, "nvfp4": 0x7F}


def check(folder: Path, tensors: Mapping[str, Tensor], stacks: set[str], modes: Mapping[str, str], how: Check) -> None:
    """Refuse NaN and infinities. `stacks` are experts' tensors, [E, ...]; `modes` those of uint8 scales, by name."""
    for name, tensor in tensors.items() if how != "none" else ():
        for part in sample(tensor) if how == "sampled" and name in stacks and tensor.ndim else [tensor]:
            require_numbers(folder, name, part, modes.get(name))


def require_numbers(path: Path, name: str, tensor: Tensor, mode: str | None) -> None:
    """Refuse NaN and infinities in a tensor, or in a part of one. `mode`: of scales that are codes."""
    mask = mask_of(tensor.dtype, mode)
    if mask is not None and _has(tensor.reshape(-1).view(INTEGERS[tensor.itemsize]), mask):
        raise CheckpointError(f"{path}: tensor {shown(name)} holds NaN or infinite values. {remedy(path)}")


def mask_of(dtype: torch.dtype, mode: str | None) -> int | None:
    """The bits that only NaN and infinities have all set; None where every code is a number."""
    return EXPONENTS.get(dtype) if mode is None else NO_NUMBER[mode]


def sample(stack: Tensor) -> Iterator[Tensor]:
    """A few experts, the first and the last among them."""
    parts = max(min(len(stack), EXPERTS) - 1, 1)
    for expert in sorted({(len(stack) - 1) * part // parts for part in range(parts + 1)}):
        yield stack[expert]


def _has(bits: Tensor, mask: int) -> bool:
    """Whether all bits of the mask are set in some value."""
    if bits.device.type != "cpu":
        return bool(((bits & mask) == mask).any())
    values = bits.numpy()  # one thread: torch would wake a team of them for each small tensor
    return any(bool(((values[at : at + CHUNK] & mask) == mask).any()) for at in range(0, len(values), CHUNK))
