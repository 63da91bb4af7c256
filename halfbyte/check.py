"""Is a kernel as accurate as its reference?

error_ratio = max|kernel - exact| / (max|body - exact| + 4 eps max|exact|), where exact is the op's torch body in
float64 and body is the same body in the kernel's dtype. No hand-picked tolerances: a kernel may be at most twice as
far from the truth as plain torch is. NaN and infinities must stand in the same places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .ops.dispatch import reference, using

EPS = torch.finfo(torch.float32).eps
LIMIT = 2.0


def clone(value: Any, floats: torch.dtype | None = None) -> Any:
    """A deep copy of an op's arguments that keeps strides; with `floats`, floating tensors change to that dtype.

    Quantised weights are dataclasses and stay as they are: their body dequantises exactly in any dtype.
    """
    if isinstance(value, Tensor):
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        copy.copy_(value)
        return copy.to(floats) if floats and value.is_floating_point() else copy
    return each_inside(value, lambda v: clone(v, floats))


def move(value: Any, device: torch.device | str) -> Any:
    """An op's arguments on a device, weights included. What is there already is not copied; strides are kept.

    float64 stays on the CPU where the device is an Apple GPU, which has no such numbers.
    """
    if isinstance(value, Tensor):
        if value.device == torch.device(device):
            return value
        if value.dtype == torch.float64 and torch.device(device).type == "mps":
            return value
        moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return moved.copy_(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value)(**{name: move(field, device) for name, field in fields.items()})
    return each_inside(value, lambda v: move(v, device))


def each_inside(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tuple, list or dict with all it holds changed; anything else as it is."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if isinstance(value, list | tuple):
        return type(value)(map(change, value))
    if isinstance(value, dict):
        return {k: change(v) for k, v in value.items()}
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside an op's arguments or results, weights' included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from tensors(v)
    else:
        for name in fields_of(value.__class__):
            yield from tensors(getattr(value, name))


@cache
def fields_of(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def with_doubles(value: Any) -> Any:
    """An op's arguments where its body can run in float64: those of an Apple GPU move to the CPU."""
    return move(value, "cpu") if any(one.device.type == "mps" for one in tensors(value)) else value


def outcome(op: Callable[..., Any], args: Any, kwargs: dict[str, Any], mutates: tuple[str, ...]) -> list[Tensor]:
    """What one call returns, then what it left in the arguments it changes in place."""
    result = op(*args, **kwargs)
    return [*tensors(result), *(kwargs[name] for name in mutates)]


def error_ratio(
    op: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mutates: tuple[str, ...] = (),
    language: str | None = None,
) -> float:
    """The error ratio of the kernel that serves these arguments; inf where integers differ or NaNs moved."""
    given, named = with_doubles((args, kwargs))
    with reference():
        exact = outcome(op, clone(given, torch.float64), clone(named, torch.float64), mutates)
        body = outcome(op, clone(given), clone(named), mutates)
    args, kwargs = clone(args), clone(kwargs)
    if language is None:
        kernel = outcome(op, args, kwargs, mutates)
    else:
        with using(language):
            kernel = outcome(op, args, kwargs, mutates)
    return max((ratio(k, b, e) for k, b, e in zip(kernel, body, exact, strict=True)), default=0.0)


def same_bits(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, mutates: tuple[str, ...] = ()
) -> bool:
    """Do two identical calls give identical bits? Where they do not, something races."""
    first, second = (outcome(op, clone(args), clone(kwargs), mutates) for _ in range(2))
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))


def bits(x: Tensor) -> Tensor:
    """x as bytes: NaNs and signed zeros compare like anything else."""
    return x.contiguous().view(torch.uint8) if x.ndim else x.reshape(1).view(torch.uint8)


def ratio(kernel: Tensor, body: Tensor, exact: Tensor, rounding: float = 4 * EPS) -> float:
    """`rounding`: how far the kernel may be from exact, as a part of the largest number, beside what the body is."""
    if kernel.shape != body.shape or kernel.dtype != body.dtype:
        return float("inf")
    if not kernel.is_floating_point():
        return 0.0 if torch.equal(kernel.cpu(), body.cpu()) else float("inf")
    if kernel.numel() == 0:
        return 0.0
    k, b, e = kernel.cpu().double(), body.cpu().double(), exact.cpu().double()
    finite = torch.isfinite(b)
    same_odd = torch.equal(k[~finite].nan_to_num(7.0), b[~finite].nan_to_num(7.0))
    if not same_odd or not torch.isfinite(k[finite]).all():
        return float("inf")
    finite &= torch.isfinite(e)
    k, b, e = k[finite], b[finite], e[finite]
    if k.numel() == 0:
        return 0.0
    allowed = (b - e).abs().max() + rounding * e.abs().max()
    worst = (k - e).abs().max()
    return 0.0 if worst == 0 else float(worst / allowed)
