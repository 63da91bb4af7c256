"""Routing and combining on an Apple GPU: a simd group a token, so a token's bits do not depend on its batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .shaders import MSL, SIMD, blocks, delivered, flat, kernel, launch, result

SIGMOID, HAS_BIAS, HAS_SCALE, RENORMALISE, HAS_GROUPS, SLOT_ORDER = (1 << i for i in range(6))
HAS_RESIDUAL, HAS_SHARED, HAS_GATE = 1, 2, 4
COLUMNS = 256  # of a threadgroup of `combine`


def route(
    logits: Tensor,
    k: int,
    *,
    kind: str = "softmax",
    bias: Tensor | None = None,
    groups: int | None = None,
    keep_groups: int | None = None,
    renormalise: bool = True,
    per_expert_scale: Tensor | None = None,
    scaling: float = 1.0,
    order: str = "score",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    E, shape = logits.shape[-1], (*logits.shape[:-1], k)
    outs = out or (None, None)
    ids = result(outs[0], shape, torch.int32, logits.device)
    weights = result(outs[1], shape, torch.float32, logits.device)
    if ids.numel():
        flags = SIGMOID * (kind == "sigmoid") + HAS_BIAS * (bias is not None) + RENORMALISE * renormalise
        flags += HAS_SCALE * (per_expert_scale is not None) + HAS_GROUPS * (groups is not None)
        flags += SLOT_ORDER * (order == "slot")
        x = flat(logits)
        vectors = [x if v is None else flat(v, torch.float32) for v in (bias, per_expert_scale)]
        launch(
            kernel("routing", "route", MSL[x.dtype]), x, *vectors, ids, weights, E, k, groups or 1, keep_groups or 1,
            float(scaling), flags, groups=x.numel() // E, size=SIMD,
        )  # fmt: skip
    return delivered(ids, outs[0]), delivered(weights, outs[1])


def combine(
    y: Tensor,
    weights: Tensor,
    *,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    D = y.shape[-1]
    if tokens is not None:
        return _combine_bucket(y, weights, residual, tokens, out)
    made = result(out, (*y.shape[:-2], D), y.dtype, y.device)
    if made.numel():
        given, A = flat(y), y.shape[-2]
        added = [given if t is None else flat(t) for t in (residual, shared)]
        gate = given if shared_gate is None else flat(shared_gate, torch.float32)
        flags = HAS_RESIDUAL * (residual is not None) + HAS_SHARED * (shared is not None)
        flags += HAS_GATE * (shared_gate is not None)
        launch(
            kernel("routing", "combine", MSL[y.dtype], *(MSL[t.dtype] for t in added)), given,
            flat(weights, torch.float32), *added, gate, made, A, D, flags,
            groups=(blocks(D, COLUMNS), made.numel() // D), size=(COLUMNS, 1),
        )  # fmt: skip
    return delivered(made, out)


def _combine_bucket(y: Tensor, weights: Tensor, residual: Tensor | None, tokens: Tensor, out: Tensor | None) -> Tensor:
    assert residual is not None
    D, M, before = y.shape[-1], tokens.numel(), flat(residual)
    made = result(out, tuple(residual.shape), y.dtype, y.device)
    if M == 0:
        made.copy_(before)
    elif made.numel():
        launch(
            kernel("routing", "combine_bucket", MSL[y.dtype], MSL[before.dtype], MSL[tokens.dtype]), flat(y),
            flat(weights, torch.float32), before, flat(tokens), made, M, D,
            groups=(blocks(D, COLUMNS), made.numel() // D), size=(COLUMNS, 1),
        )  # fmt: skip
    return delivered(made, out)
