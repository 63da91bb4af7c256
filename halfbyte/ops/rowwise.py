"""Ops on rows: norms with what models put before and after them, gated activations, rotary positions, soft caps.

All compute in float32 and round each output once. `out=` may be any of an op's own elementwise inputs (the very same
tensor, for working in place); any other overlap is undefined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .dispatch import FLOATS, INTEGERS, deliver, kernel, require, require_floats, require_out, usual, wide

ACTIVATIONS = ("silu", "gelu_tanh", "sigmoid")
NAMED = f"one of {', '.join(ACTIVATIONS)}"


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    add: Tensor | None = None,
    mul: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float | Tensor | None = None,
    return_sum: bool = False,
    extra_dtype: torch.dtype | None = None,
    head_major: bool = False,
    out: Tensor | tuple[Tensor, ...] | None = None,
) -> Any:
    """s = x + add;  y = s / sqrt(mean(s^2) + eps) . weight . mul . silu(gate);  y = (residual + y) scale.

    x, add, mul, gate, residual [..., D]   weight [D]   scale one number, [1] or [D]   ->   y [..., D], dtype of x

    Returns y, or the tuple of y and what was asked: `return_sum` adds s, `extra_dtype` adds a second copy of y rounded
    from the same float32 value. With `head_major`, x is [..., T, H, D] and the copy (or y, where no copy is asked) is
    laid out [..., H, T, D]. `out` is a tensor, or a tuple where several are returned; it may be x, add, mul, gate or
    residual, but not with `head_major`.
    """
    others = {"add": add, "mul": mul, "gate": gate, "residual": residual}
    simple = out is None and extra_dtype is None and not head_major and (scale is None or type(scale) is float)
    if not (simple and eps >= 0 and _usual_rows(x, weight, others.values())):
        _require_norm(x, weight, eps, others, scale, extra_dtype, head_major)
        _require_outs("rms_norm", out, _norm_shapes(x, return_sum, extra_dtype, head_major), x.device)
    if found := kernel("rowwise", "rms_norm", x):
        return found(
            x, weight, eps, add=add, mul=mul, gate=gate, residual=residual, scale=scale, return_sum=return_sum,
            extra_dtype=extra_dtype, head_major=head_major, out=out,
        )  # fmt: skip
    s = wide(x) if add is None else wide(x) + wide(add)
    y = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    for factor in (weight, mul):
        y = y if factor is None else y * wide(factor)
    y = y if gate is None else y * torch.nn.functional.silu(wide(gate))
    y = y if residual is None else wide(residual) + y
    y = _scaled(y, scale)
    copy = y.transpose(-3, -2) if head_major else y
    results = [y if extra_dtype else copy] + ([s] if return_sum else []) + ([copy] if extra_dtype else [])
    shapes = _norm_shapes(x, return_sum, extra_dtype, head_major)
    outs = _require_outs("rms_norm", out, shapes, x.device)
    done = tuple(deliver(r.contiguous(), d, o) for r, (_, d), o in zip(results, shapes, outs, strict=True))
    return done if len(done) > 1 else done[0]


def _norm_shapes(
    x: Tensor, return_sum: bool, extra_dtype: torch.dtype | None, head_major: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each result."""
    natural, turned = tuple(x.shape), _head_major(x.shape) if head_major else tuple(x.shape)
    shapes = [(natural if extra_dtype else turned, x.dtype)]
    shapes += [(natural, x.dtype)] if return_sum else []
    return shapes + ([(turned, extra_dtype)] if extra_dtype else [])


def _usual_rows(x: Tensor, weight: Tensor | None, others: Iterable[Tensor | None]) -> bool:
    if not (type(x) is Tensor and x.dtype in FLOATS and x.ndim and x.shape[-1] > 0):
        return False
    shape, device = x.shape, x.device
    fits = weight is None or usual(weight, shape[-1:], device)
    return fits and all(other is None or usual(other, shape, device) for other in others)


def _require_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    others: dict[str, Tensor | None],
    scale: float | Tensor | None,
    extra_dtype: torch.dtype | None,
    head_major: bool,
) -> None:
    _require_rows("rms_norm", x, weight, eps)
    require_floats("rms_norm", x.device, **others)
    for name, other in others.items():
        require(other is None or other.shape == x.shape, "rms_norm", name, "of x's shape", other, x)
    _require_scale("rms_norm", scale, x)
    require(extra_dtype is None or extra_dtype in FLOATS, "rms_norm", "extra_dtype", "a float dtype", extra_dtype)
    require(not head_major or x.ndim >= 3, "rms_norm", "x", "[..., T, H, D] for head_major", x)


def rms_norm_many(
    x: Tensor, weights: Sequence[Tensor], eps: float = 1e-6, *, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """y_i = x / sqrt(mean(x^2) + eps) . weights_i: one statistic, several weights.

    x [..., D]   weights_i [D]   ->   a tuple of y_i [..., D]. One of `out` may be x.
    """
    require(len(weights) > 0, "rms_norm_many", "weights", "at least one weight")
    for weight in weights:
        _require_rows("rms_norm_many", x, weight, eps)
    outs = _require_outs("rms_norm_many", out, [(tuple(x.shape), x.dtype)] * len(weights), x.device, always_tuple=True)
    if found := kernel("rowwise", "rms_norm_many", x):
        return found(x, weights, eps, out=out)  # type: ignore[no-any-return]
    s = wide(x)
    y = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    return tuple(deliver(y * wide(w), x.dtype, o) for w, o in zip(weights, outs, strict=True))


def rms_norm_chain(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    weights: Sequence[Tensor],
    eps: float = 1e-6,
    *,
    residual2: Tensor | None = None,
    scale: float | Tensor | None = None,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """r = residual + rms(x) . weight;  y_i = (residual2 + rms(r) . weights_i) scale: two statistics in one pass.

    x, residual, residual2 [..., D]   weight, weights_i [D]   scale one number, [1] or [D]   ->   (r, y_0, y_1, ...)

    The second statistic is that of r before it is rounded. These are the layer ends of Gemma: after attention
    (three weights), and after the experts (one weight, residual2, scale). `out` may hold x, residual or residual2.
    """
    require(len(weights) > 0, "rms_norm_chain", "weights", "at least one weight")
    for one in (weight, *weights):
        _require_rows("rms_norm_chain", x, one, eps)
    require_floats("rms_norm_chain", x.device, residual=residual, residual2=residual2)
    for name, other in (("residual", residual), ("residual2", residual2)):
        require(other is None or other.shape == x.shape, "rms_norm_chain", name, "of x's shape", other, x)
    _require_scale("rms_norm_chain", scale, x)
    outs = _require_outs("rms_norm_chain", out, [(tuple(x.shape), x.dtype)] * (len(weights) + 1), x.device)
    if found := kernel("rowwise", "rms_norm_chain", x):
        return found(x, weight, residual, weights, eps, residual2=residual2, scale=scale, out=out)  # type: ignore[no-any-return]
    s = wide(x)
    r = wide(residual) + s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps) * wide(weight)
    normed = r * torch.rsqrt(r.square().mean(-1, keepdim=True) + eps)
    results = [r]
    for one in weights:
        y = normed * wide(one)
        results.append(_scaled(y if residual2 is None else wide(residual2) + y, scale))
    return tuple(deliver(result, x.dtype, o) for result, o in zip(results, outs, strict=True))


def glu(gate: Tensor, up: Tensor, activation: str = "silu", *, out: Tensor | None = None) -> Tensor:
    """y = activation(gate) . up, with activation silu, gelu_tanh or sigmoid.

    gate, up [...]   ->   y [...], dtype of up. `out` may be gate or up.
    """
    simple = type(up) is Tensor and up.dtype in FLOATS and activation in ACTIVATIONS and out is None
    if not (simple and usual(gate, up.shape, up.device)):
        require(isinstance(up, Tensor), "glu", "up", "a tensor", up)
        require_floats("glu", up.device, gate=gate, up=up)
        require(gate.shape == up.shape, "glu", "gate", "of up's shape", gate, up)
        require(activation in ACTIVATIONS, "glu", "activation", NAMED, activation)
        require_out("glu", out, up.shape, up.dtype, up.device)
    if found := kernel("rowwise", "glu", up):
        return found(gate, up, activation, out=out)  # type: ignore[no-any-return]
    return deliver(activate(wide(gate), activation) * wide(up), up.dtype, out)


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation alone, as the bodies of glu and expert_mlp use it."""
    match activation:
        case "silu":
            return torch.nn.functional.silu(x)
        case "gelu_tanh":
            return torch.nn.functional.gelu(x, approximate="tanh")
        case _:
            return torch.sigmoid(x)


def rope(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    rotary: int | None = None,
    interleaved: bool = False,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate pairs (a, b) of each head by the angle positions . inv_freq: (a cos - b sin, a sin + b cos) scale.

    x [..., T, H, D]   positions [T] or [..., T], integers   inv_freq [rotary / 2]   ->   y, shape and dtype of x

    The first `rotary` channels (all, by default) are rotated, the others copied. Pairs are (i, i + rotary/2), or
    (2i, 2i + 1) when `interleaved`. inv_freq is data: plain, proportional (zeros leave a pair alone) or YaRN tables,
    float64 or float32 as given. The angle is formed and reduced in float64, cos and sin are float32: at position one
    million a float32 angle would be off by 1e-2. An Apple GPU has no float64: beside an x that lies there, a table of
    float64 lies on the CPU. `out` may be x.
    """
    require(isinstance(x, Tensor), "rope", "x", "a tensor", x)
    apart = x.device.type == "mps" and isinstance(inv_freq, Tensor) and inv_freq.dtype == torch.float64
    require_floats("rope", x.device, x=x, inv_freq=None if apart else inv_freq)
    require(not apart or inv_freq.device.type == "cpu", "rope", "inv_freq", "on the CPU where it is float64", inv_freq)
    require(x.ndim >= 3 and x.shape[-1] > 0, "rope", "x", "[..., T, H, D] with D > 0", x)
    rotary = x.shape[-1] if rotary is None else rotary
    require(0 < rotary <= x.shape[-1] and rotary % 2 == 0, "rope", "rotary", "even, above 0 and at most D", rotary, x)
    require(inv_freq.dtype in (torch.float32, torch.float64), "rope", "inv_freq", "float64 or float32", inv_freq)
    require(inv_freq.shape == (rotary // 2,), "rope", "inv_freq", "[rotary / 2]", inv_freq, rotary)
    require(isinstance(positions, Tensor), "rope", "positions", "a tensor", positions)
    require(positions.dtype in INTEGERS, "rope", "positions", "int32 or int64", positions)
    require(positions.device == x.device, "rope", "positions", "on x's device", positions, x)
    fits = positions.shape in (x.shape[:-2], x.shape[-3:-2])
    require(fits, "rope", "positions", "[T] or [..., T] of x [..., T, H, D]", positions, x)
    require_out("rope", out, x.shape, x.dtype, x.device)
    if found := kernel("rowwise", "rope", x):
        return found(x, positions, inv_freq, rotary=rotary, interleaved=interleaved, scale=scale, out=out)  # type: ignore[no-any-return]
    home = torch.device("cpu") if x.device.type == "mps" else x.device  # where float64 is
    turns = positions.to(home).double()[..., None] * inv_freq.to(home).double()
    y = wide(x).clone()
    angle = torch.remainder(turns, 2 * torch.pi)[..., None, :].to(y.dtype).to(y.device)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    half = rotary // 2
    first = slice(0, rotary, 2) if interleaved else slice(0, half)
    second = slice(1, rotary, 2) if interleaved else slice(half, rotary)
    a, b = y[..., first].clone(), y[..., second].clone()
    y[..., first] = a * cos - b * sin
    y[..., second] = a * sin + b * cos
    return deliver(y, x.dtype, out)


def softcap(x: Tensor, cap: float, *, out: Tensor | None = None) -> Tensor:
    """y = cap tanh(x / cap).   x [...]   ->   y, shape and dtype of x. `out` may be x."""
    require(isinstance(x, Tensor), "softcap", "x", "a tensor", x)
    require_floats("softcap", x.device, x=x)
    require(cap > 0, "softcap", "cap", "above 0", cap)
    require_out("softcap", out, x.shape, x.dtype, x.device)
    if found := kernel("rowwise", "softcap", x):
        return found(x, cap, out=out)  # type: ignore[no-any-return]
    return deliver(torch.tanh(wide(x) / cap) * cap, x.dtype, out)


def _scaled(y: Tensor, scale: float | Tensor | None) -> Tensor:
    if scale is None:
        return y
    return y * (wide(scale) if isinstance(scale, Tensor) else scale)


def _head_major(shape: torch.Size) -> tuple[int, ...]:
    return (*shape[:-3], shape[-2], shape[-3], shape[-1])


def _require_rows(op: str, x: Tensor, weight: Tensor | None, eps: float) -> None:
    require(isinstance(x, Tensor), op, "x", "a tensor", x)
    require_floats(op, x.device, x=x, weight=weight)
    require(x.ndim >= 1 and x.shape[-1] > 0, op, "x", "[..., D] with D > 0", x)
    require(weight is None or weight.shape == x.shape[-1:], op, "weight", "[D], the last axis of x", weight, x)
    require(eps >= 0, op, "eps", "0 or more", eps)


def _require_scale(op: str, scale: float | Tensor | None, x: Tensor) -> None:
    if isinstance(scale, Tensor):
        require_floats(op, x.device, scale=scale)
        require(scale.shape in ((), (1,), x.shape[-1:]), op, "scale", "one number, [1] or [D]", scale, x)
    else:
        require(scale is None or isinstance(scale, int | float), op, "scale", "a number or a tensor", scale)


def _require_outs(
    op: str,
    out: Tensor | tuple[Tensor, ...] | None,
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
    always_tuple: bool = False,
) -> Sequence[Tensor | None]:
    """Check `out` against what the op returns, and give it back as one entry a result."""
    if out is None:
        return [None] * len(shapes)
    outs: Any = (out,) if isinstance(out, Tensor) and not always_tuple else out
    require(isinstance(outs, tuple), op, "out", f"a tuple of {len(shapes)} tensors", out)
    require(len(outs) == len(shapes), op, "out", f"{len(shapes)} tensors, one a result", len(outs))
    for one, (shape, dtype) in zip(outs, shapes, strict=True):
        require_out(op, one, shape, dtype, device)
    return list(outs)
