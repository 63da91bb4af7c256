"""Attention on an Apple GPU: of few tokens a threadgroup a query, its keys shared out by position; of many a
threadgroup a tile of 32 queries, in 8x8 matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .shaders import MSL, SIMD, blocks, delivered, flat, kernel, launch, result, row_threads

HAS_SLOTS, HAS_LENGTHS, IS_CAUSAL, WANTS_LSE, HAS_WINDOW, HAS_CAP = (1 << i for i in range(6))
THREADS = 256
FEW = 8  # tokens of a call that are not worth tiles
BLOCK = 32  # a tile's side


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    lengths: Tensor | None = None,
    slots: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Any:
    keys, values = _rows(k), _rows(v)
    strides = (*keys.stride()[:3], 0, 0, *values.stride()[:3])
    flags = IS_CAUSAL * causal + HAS_WINDOW * (window is not None) + HAS_CAP * (softcap is not None)
    given = flat(q)
    numbers = float(scale), float(softcap or 1.0), window or 0
    return _attend((given, given), (keys, keys, values), strides, numbers, flags, lengths, slots, return_lse, out)


def latent_attention(
    q: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    *,
    scale: float,
    causal: bool = True,
    lengths: Tensor | None = None,
    slots: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Any:
    rows, turned = _rows(latent), _rows(k_pe)
    strides = (*rows.stride()[:2], 0, *turned.stride()[:2], *rows.stride()[:2], 0)
    queries, numbers = (flat(q), flat(q_pe)), (float(scale), 1.0, 0)
    cached = rows[:, :, None], turned, rows[:, :, None]
    return _attend(queries, cached, strides, numbers, IS_CAUSAL * causal, lengths, slots, return_lse, out)


def _rows(cache: Tensor) -> Tensor:
    """A cache whose last axis lies side by side; any other stays where it is."""
    return cache if cache.stride(-1) == 1 or cache.shape[-1] == 1 else cache.contiguous()


def _attend(
    queries: tuple[Tensor, Tensor],
    cached: tuple[Tensor, Tensor, Tensor],
    strides: tuple[int, ...],
    numbers: tuple[float, float, int],
    flags: int,
    lengths: Tensor | None,
    slots: Tensor | None,
    return_lse: bool,
    out: Tensor | tuple[Tensor, Tensor] | None,
) -> Any:
    """Queries and their second parts against keys, second keys and values. One tensor for both parts: no second."""
    (q, q2), (k, k2, v) = queries, cached
    (B, L, H, D), (S, G, Dv) = q.shape, v.shape[1:]
    D2 = 0 if q2 is q else q2.shape[-1]
    outs = (out, None) if isinstance(out, Tensor) else out or (None, None)
    o = result(outs[0], (B, L, H, Dv), q.dtype, q.device)
    lse = result(outs[1], (B, L, H), torch.float32, q.device) if return_lse else None
    if o.numel():
        flags += HAS_SLOTS * (slots is not None) + HAS_LENGTHS * (lengths is not None) + WANTS_LSE * return_lse
        named = [q if t is None else flat(t) for t in (slots, lengths)]
        types = [MSL[t.dtype] for t in (q, q2, k, k2, v)] + ["int" if t is q else MSL[t.dtype] for t in named]
        if L > FEW:
            chosen = kernel("attention", "attend_tiles", *types, blocks(Dv, BLOCK))
            groups, size = (blocks(L * (H // G), BLOCK), G, B), 128
        else:
            chosen = kernel("attention", "attend", *types, *(blocks(width, SIMD) for width in (D, D2, Dv)))
            groups, size = (H, L, B), THREADS
        launch(
            chosen, q, q2, k, k2, v, *named, o, o if lse is None else lse, L, H, G, D, D2, Dv, S, strides, *numbers,
            flags, groups=groups, size=(size, 1, 1),
        )  # fmt: skip
    done = delivered(o, outs[0])
    return done if lse is None else (done, delivered(lse, outs[1]))


def merge_states(
    o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    D, outs = o1.shape[-1], out or (None, None)
    o = result(outs[0], tuple(o1.shape), o1.dtype, o1.device)
    lse = result(outs[1], tuple(lse1.shape), torch.float32, o1.device)
    if o.numel():
        chosen = kernel("attention", "merge_states", MSL[o1.dtype], MSL[o2.dtype])
        launch(
            chosen, flat(o1), flat(lse1), flat(o2), flat(lse2), o, lse, D,
            groups=(lse.numel(), 1), size=(row_threads(D, 1), 1),
        )  # fmt: skip
    return delivered(o, outs[0]), delivered(lse, outs[1])
