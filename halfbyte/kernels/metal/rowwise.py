"""Row ops on an Apple GPU. A norm's row is one threadgroup's, whose size depends on the row's length alone, so a row's
bits do not depend on its batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .shaders import MSL, blocks, delivered, flat, kernel, launch, result, row_threads, vector

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "sigmoid": 2}
HAS_WEIGHT, HAS_ADD, HAS_MUL, HAS_GATE, HAS_RESIDUAL, HAS_VECTOR, WANTS_SUM, WANTS_EXTRA, HEAD_MAJOR = (
    1 << i for i in range(9)
)
AT_ONCE = 4  # weights of one launch of a norm with many
THREADS = 256  # of a threadgroup, for what is elementwise
ROPE_HEADS = 8


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
    D, shape = x.shape[-1], tuple(x.shape)
    turned = (*shape[:-3], shape[-2], shape[-3], D) if head_major else shape
    shapes = [(shape if extra_dtype else turned, x.dtype)]
    shapes += [(shape, x.dtype)] if return_sum else []
    shapes += [(turned, extra_dtype)] if extra_dtype else []
    outs = (None,) * len(shapes) if out is None else (out,) if isinstance(out, Tensor) else out
    made = [result(o, s, d, x.device) for o, (s, d) in zip(outs, shapes, strict=True)]
    if x.numel():
        given = flat(x)
        others = [given if t is None else flat(t, x.dtype) for t in (add, mul, gate, residual)]
        present = (weight, add, mul, gate, residual)
        flags = sum(1 << i for i, t in enumerate(present) if t is not None)
        flags += WANTS_SUM * return_sum + WANTS_EXTRA * (extra_dtype is not None) + HEAD_MAJOR * head_major
        number, scales = _scale(scale, given)
        flags += HAS_VECTOR * (scales is not given)
        w = given if weight is None else flat(weight)
        N = vector(D, given, w, *others, *made)
        types = MSL[x.dtype], MSL[w.dtype], MSL[extra_dtype or x.dtype], N
        launch(
            kernel("rowwise", "rms_norm", *types), given, w, *others, scales, made[0], made[1 if return_sum else 0],
            made[-1], D, float(eps), number, flags, *(shape[-3:-1] if head_major else (1, 1)),
            groups=x.numel() // D, size=row_threads(D, N),
        )  # fmt: skip
    done = tuple(delivered(m, o) for m, o in zip(made, outs, strict=True))
    return done if len(done) > 1 else done[0]


def _scale(scale: float | Tensor | None, absent: Tensor) -> tuple[float, Tensor]:
    """A number and a vector of which one counts; `absent` stands in for the vector."""
    if isinstance(scale, Tensor):
        width = absent.shape[-1]
        return 1.0, flat(scale.float().expand(width) if scale.numel() == 1 else scale.float())
    return 1.0 if scale is None else float(scale), absent


def rms_norm_many(
    x: Tensor, weights: Sequence[Tensor], eps: float = 1e-6, *, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    D, given, outs = x.shape[-1], flat(x), out or (None,) * len(weights)
    if len(weights) > AT_ONCE and out is not None:  # one of them may be x, which later launches still read
        given = given.clone()
    made = [result(o, tuple(x.shape), x.dtype, x.device) for o in outs]
    for start in range(0, len(weights) if x.numel() else 0, AT_ONCE):
        ws, ys = _alike(weights[start : start + AT_ONCE]), made[start : start + AT_ONCE]
        N = vector(D, given, *ws, *ys)
        launch(
            kernel("rowwise", "rms_norm_many", MSL[x.dtype], MSL[ws[0].dtype], N), given, *_filled(ws), *_filled(ys),
            D, float(eps), len(ws), groups=x.numel() // D, size=row_threads(D, N),
        )  # fmt: skip
    return tuple(delivered(m, o) for m, o in zip(made, outs, strict=True))


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
    D, outs = x.shape[-1], out or (None,) * (len(weights) + 1)
    given, before, w = flat(x), flat(residual, x.dtype), flat(weight)
    more = given if residual2 is None else flat(residual2, x.dtype)
    if len(weights) > AT_ONCE and out is not None:  # some of them may be inputs, which later launches still read
        given, before, more = given.clone(), before.clone(), more.clone()
    made = [result(o, tuple(x.shape), x.dtype, x.device) for o in outs]
    for start in range(0, len(weights) if x.numel() else 0, AT_ONCE):
        ws, ys = _alike(weights[start : start + AT_ONCE]), made[1:][start : start + AT_ONCE]
        number, scales = _scale(scale, given)
        flags = HAS_RESIDUAL * (residual2 is not None) + HAS_VECTOR * (scales is not given)
        N = vector(D, given, before, more, w, made[0], *ws, *ys)
        types = MSL[x.dtype], MSL[w.dtype], MSL[ws[0].dtype], N
        launch(
            kernel("rowwise", "rms_norm_chain", *types), given, w, before, more, *_filled(ws), scales, made[0],
            *_filled(ys), D, float(eps), len(ws), number, flags, groups=x.numel() // D, size=row_threads(D, N),
        )  # fmt: skip
    return tuple(delivered(m, o) for m, o in zip(made, outs, strict=True))


def _alike(weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights of one dtype, for one kernel."""
    dtypes = {w.dtype for w in weights}
    return [flat(w, None if len(dtypes) == 1 else torch.float32) for w in weights]


def _filled(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A tensor for each of a kernel's places; it does not look at those beyond its count."""
    return [*tensors, *[tensors[0]] * (AT_ONCE - len(tensors))]


def glu(gate: Tensor, up: Tensor, activation: str = "silu", *, out: Tensor | None = None) -> Tensor:
    made = result(out, tuple(up.shape), up.dtype, up.device)
    count = up.numel()
    if count:
        g, u = flat(gate), flat(up)
        N = vector(count, g, u, made)
        chosen = kernel("rowwise", "glu", MSL[g.dtype], MSL[up.dtype], ACTIVATIONS[activation], N)
        launch(chosen, g, u, made, count, groups=blocks(count, N * THREADS), size=THREADS)
    return delivered(made, out)


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
    H, D = x.shape[-2:]
    rotary = D if rotary is None else rotary
    made = result(out, tuple(x.shape), x.dtype, x.device)
    if x.numel():
        split = inv_freq.dtype == torch.float64
        frequency, remainder = _parts(inv_freq, _version(inv_freq), x.device) if split else (flat(inv_freq),) * 2
        launch(
            kernel("rowwise", "rope", MSL[x.dtype], MSL[positions.dtype]), flat(x), flat(positions), frequency,
            remainder, made, positions.numel(), H, D, rotary, int(interleaved), float(scale), int(split),
            groups=(x.numel() // (H * D), blocks(H, ROPE_HEADS)), size=(THREADS, 1),
        )  # fmt: skip
    return delivered(made, out)


@lru_cache(maxsize=64)
def _parts(table: Tensor, version: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two float32 tables on the device that add up to one of float64, which an Apple GPU does not have.

    They are kept, as long as the table has this version: to move them, torch would wait for all that was launched.
    """
    large = table.float()
    return large.to(device), (table - large.double()).float().to(device)


def _version(x: Tensor) -> int:
    """How often x was written to; torch does not count for tensors of inference mode."""
    return 0 if x.is_inference() else x._version


def softcap(x: Tensor, cap: float, *, out: Tensor | None = None) -> Tensor:
    made = result(out, tuple(x.shape), x.dtype, x.device)
    count = x.numel()
    if count:
        given = flat(x)
        N = vector(count, given, made)
        chosen = kernel("rowwise", "softcap", MSL[x.dtype], N)
        launch(chosen, given, made, count, float(cap), groups=blocks(count, N * THREADS), size=THREADS)
    return delivered(made, out)
