"""Recurrent layers on an Apple GPU: the short convolution, the gates, and the gated delta rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .shaders import MSL, SIMD, blocks, delivered, flat, kernel, launch, result

HAS_SLOTS, HAS_SILU, IN_PLACE = 1, 2, 4
THREADS = 256
ROWS = 4  # of a state for each simd group
SIMDS = 4  # of a threadgroup of the delta rule
CHUNK = 32  # tokens at a time in the chunked form, and rows of a state


def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    slots: Tensor | None = None,
    activation: str | None = "silu",
    out: Tensor | None = None,
) -> Tensor:
    (B, L, C), taps = x.shape, weight.shape[1]
    made = result(out, (B, L, C), x.dtype, x.device)
    if x.numel():
        given, w = flat(x), flat(weight.reshape(C, taps))
        named = given if slots is None else flat(slots)
        flags = HAS_SLOTS * (slots is not None) + HAS_SILU * (activation == "silu")
        index = "int" if slots is None else MSL[slots.dtype]
        launch(
            kernel("recurrent", "causal_conv", MSL[x.dtype], MSL[w.dtype], MSL[state.dtype], index, taps), given, w,
            state, named, made, L, C, state.stride(), flags, groups=(blocks(C, THREADS), B), size=(THREADS, 1),
        )  # fmt: skip
    return delivered(made, out)


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    outs = out or (None, None)
    g, beta = (result(o, tuple(a.shape), torch.float32, a.device) for o in outs)
    if count := a.numel():
        given = [flat(t) for t in (a, b, a_log, dt_bias)]
        chosen = kernel("recurrent", "delta_gates", *(MSL[t.dtype] for t in given))
        launch(chosen, *given, g, beta, count, a.shape[-1], groups=blocks(count, THREADS), size=THREADS)
    return delivered(g, outs[0]), delivered(beta, outs[1])


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    slots: Tensor | None = None,
    form: str | None = None,
    in_place: bool = True,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Any:
    (B, L, Hk, Dk), (Hv, Dv) = q.shape, v.shape[2:]
    outs = (out, None) if isinstance(out, Tensor) else out or (None, None)
    made = result(outs[0], (B, L, Hv, Dv), v.dtype, v.device)
    after = state if in_place else result(outs[1], (B, Hv, Dv, Dk), state.dtype, v.device)
    if state.dtype == torch.float64:  # an Apple GPU has no such numbers: the state passes through float32
        o, S = gated_delta(q, k, v, g, beta, state.float(), slots=slots, form=form, in_place=False)
        at = slice(B) if slots is None or not in_place else slots.long()
        after[at] = S.double()
        made.copy_(o)
    elif made.numel():
        queries, keys = flat(q), flat(k, q.dtype)
        named = queries if slots is None else flat(slots)
        flags = HAS_SLOTS * (slots is not None) + IN_PLACE * in_place
        index = "int" if slots is None else MSL[slots.dtype]
        chunked = form == "chunked" or (form is None and L > CHUNK)
        name, rows, size = ("delta_chunks", CHUNK, 128) if chunked else ("delta_steps", ROWS * SIMDS, SIMD * SIMDS)
        launch(
            kernel("recurrent", name, MSL[q.dtype], MSL[v.dtype], index, blocks(Dk, SIMD)), queries, keys, flat(v),
            flat(g, torch.float32), flat(beta, torch.float32), state, named, after, made, L, Hk, Hv, Dk, Dv,
            (*state.stride(), *after.stride()), flags, groups=(blocks(Dv, rows), Hv, B), size=(size, 1, 1),
        )  # fmt: skip
    elif not in_place:
        after.copy_(state[:B] if slots is None else state[slots.long()])
    o = delivered(made, outs[0])
    return o if in_place else (o, delivered(after, outs[1]))
