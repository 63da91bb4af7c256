"""Layers that keep a state instead of a cache: the short causal convolution, and the gated delta rule.

A state is [slots, ...] and is updated in place for the slots that are named (slot b for request b, by default).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cache import all_slots, require_slots, rows_of
from .dispatch import deliver, kernel, require, require_floats, require_out, wide

FORMS = (None, "sequential", "chunked")
CHUNK = 32


def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    slots: Tensor | None = None,
    activation: str | None = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """y[t, c] = act(sum_j weight[c, j] seen[t + j, c]) where seen = [state; x];  then state = the last rows of seen.

    x [B, L, C]   weight [C, W] or [C, W, 1]   state [slots, W - 1, C], in place   ->   y [B, L, C], dtype of x

    activation is "silu" or None. The state keeps its dtype; with no tokens it stays as it is. slots [B] are distinct.
    `out` may be x.
    """
    require(isinstance(x, Tensor), "causal_conv", "x", "a tensor", x)
    require_floats("causal_conv", x.device, x=x, weight=weight, state=state)
    require(x.ndim == 3 and x.shape[2] > 0, "causal_conv", "x", "[B, L, C] with C > 0", x)
    B, L, C = x.shape
    fits = weight.ndim == 2 or (weight.ndim == 3 and weight.shape[2] == 1)
    fits = fits and weight.shape[0] == C and weight.shape[1] >= 2
    require(fits, "causal_conv", "weight", "[C, W] or [C, W, 1] with x's C and W of 2 or more", weight, x)
    W = weight.shape[1]
    require(
        state.ndim == 3 and state.shape[1:] == (W - 1, C), "causal_conv", "state", "[slots, W - 1, C]", state, weight
    )
    require(activation in ("silu", None), "causal_conv", "activation", "silu or None", activation)
    require_slots("causal_conv", slots, B, state, distinct=True)
    require_out("causal_conv", out, x.shape, x.dtype, x.device)
    if found := kernel("recurrent", "causal_conv", x):
        return found(x, weight, state, slots=slots, activation=activation, out=out)  # type: ignore[no-any-return]
    seen = torch.cat([wide(rows_of(state, slots, B)).to(wide(x[:0]).dtype), wide(x)], 1)
    taps = wide(weight).to(seen.dtype).view(C, W)
    y = sum((taps[:, j] * seen[:, j : j + L] for j in range(1, W)), taps[:, 0] * seen[:, :L])
    y = y if activation is None else torch.nn.functional.silu(y)
    state[all_slots(slots, B, x.device)] = seen[:, L:].to(state.dtype)
    return deliver(y, x.dtype, out)


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """g = exp(-exp(a_log) softplus(a + dt_bias)), the decay of the state;  beta = sigmoid(b), its learning rate.

    a, b [..., Hv]   a_log, dt_bias [Hv]   ->   g, beta [..., Hv] float32

    softplus(x) = max(x, 0) + log(1 + exp(-|x|)) never overflows. `out` may be (a, b) where those are float32.
    """
    require(isinstance(a, Tensor), "delta_gates", "a", "a tensor", a)
    require_floats("delta_gates", a.device, a=a, b=b, a_log=a_log, dt_bias=dt_bias)
    require(a.ndim >= 1 and a.shape[-1] > 0, "delta_gates", "a", "[..., Hv] with Hv > 0", a)
    require(b.shape == a.shape, "delta_gates", "b", "of a's shape", b, a)
    for name, one in (("a_log", a_log), ("dt_bias", dt_bias)):
        require(one.shape == a.shape[-1:], "delta_gates", name, "[Hv], the last axis of a", one, a)
    dtype = torch.float64 if a.dtype is torch.float64 else torch.float32
    require(out is None or (isinstance(out, tuple) and len(out) == 2), "delta_gates", "out", "(g, beta)", out)
    for one in out or ():
        require_out("delta_gates", one, a.shape, dtype, a.device)
    if found := kernel("recurrent", "delta_gates", a):
        return found(a, b, a_log, dt_bias, out=out)  # type: ignore[no-any-return]
    x = wide(a) + wide(dt_bias).to(dtype)
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    g, beta = torch.exp(-torch.exp(wide(a_log).to(dtype)) * softplus), torch.sigmoid(wide(b).to(dtype))
    into = out or (None, None)
    return deliver(g, dtype, into[0]), deliver(beta, dtype, into[1])


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
    """The gated delta rule, token by token: S = g S;  S = S + beta (v - S k) k^T;  o = S q.

    q, k [B, L, Hk, Dk]   v [B, L, Hv, Dv]   g, beta [B, L, Hv]   state S [slots, Hv, Dv, Dk] float32
    ->   o [B, L, Hv, Dv], dtype of v

    v head h reads q and k head h // (Hv / Hk). The state is updated in place for `slots` [B], which are distinct; with
    in_place=False it is left alone and (o, S [B, Hv, Dv, Dk]) comes back. form "sequential" goes token by token;
    "chunked" solves 32 tokens at a time (the WY form) and rounds differently; None lets the device's language choose:
    on a CPU always "sequential", whose bits do not depend on how a prompt is cut into calls.
    `out` is o, or (o, S); it may not overlap the inputs.
    """
    require(isinstance(q, Tensor), "gated_delta", "q", "a tensor", q)
    require_floats("gated_delta", q.device, q=q, k=k, v=v, g=g, beta=beta, state=state)
    require(q.ndim == 4 and q.shape[2] > 0 and q.shape[3] > 0, "gated_delta", "q", "[B, L, Hk, Dk]", q)
    require(k.shape == q.shape, "gated_delta", "k", "of q's shape", k, q)
    B, L, Hk, Dk = q.shape
    fits = v.ndim == 4 and v.shape[:2] == q.shape[:2] and v.shape[2] > 0 and v.shape[2] % Hk == 0 and v.shape[3] > 0
    require(fits, "gated_delta", "v", "[B, L, Hv, Dv] as q, Hv a multiple of its heads", v, q)
    Hv, Dv = v.shape[2:]
    for name, one in (("g", g), ("beta", beta)):
        require(one.shape == (B, L, Hv), "gated_delta", name, "[B, L, Hv]", one, v)
    require(
        state.ndim == 4 and state.shape[1:] == (Hv, Dv, Dk), "gated_delta", "state", "[slots, Hv, Dv, Dk]", state, v
    )
    require(state.dtype in (torch.float32, torch.float64), "gated_delta", "state", "float32", state)
    require(form in FORMS, "gated_delta", "form", "sequential, chunked or None", form)
    require_slots("gated_delta", slots, B, state, distinct=in_place)
    pair = isinstance(out, tuple) and len(out) == 2
    require(out is None or pair != in_place, "gated_delta", "out", "o, or (o, S) where not in_place", out)
    into: Any = (None, None) if out is None else (out, None) if in_place else out
    require_out("gated_delta", into[0], v.shape, v.dtype, v.device)
    require_out("gated_delta", into[1], (B, Hv, Dv, Dk), state.dtype, v.device)
    if found := kernel("recurrent", "gated_delta", v):
        return found(q, k, v, g, beta, state, slots=slots, form=form, in_place=in_place, out=out)
    S = wide(rows_of(state, slots, B)).to(wide(v[:0]).dtype)
    queries, keys = (wide(x).to(S.dtype).repeat_interleave(Hv // Hk, 2) for x in (q, k))
    run = _chunked if form == "chunked" else _sequential
    o, S = run(queries, keys, wide(v), wide(g).to(S.dtype), wide(beta).to(S.dtype), S)
    o = deliver(o, v.dtype, into[0])
    if not in_place:
        return o, deliver(S, state.dtype, into[1])
    state[all_slots(slots, B, v.device)] = S.to(state.dtype)
    return o


def _sequential(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    o = torch.empty_like(v)
    for t in range(v.shape[1]):
        S = S * g[:, t, :, None, None]
        key = k[:, t, :, None, :]
        delta = (v[:, t] - (S * key).sum(-1)) * beta[:, t, :, None]
        S = S + delta[..., None] * key
        o[:, t] = (S * q[:, t, :, None, :]).sum(-1)
    return o, S.clone() if v.shape[1] == 0 else S


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Chunk by chunk: with decay[t, i] = g[i + 1] ... g[t], the deltas U of a chunk solve (I + A) U = B, where

    A[t, i] = beta[t] decay[t, i] k[i] . k[t] for i < t,   B[t] = beta[t] (v[t] - decay[t, start] S k[t]).

    decay is a product over its span, never a quotient of running products: a g of 0, or one that leaves the range of
    a float when multiplied on, is exact. The same products in logarithms would lose digits where g is tiny.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    g, beta = g.transpose(1, 2), beta.transpose(1, 2)
    o, S = torch.empty_like(v), S.clone()
    for start in range(0, v.shape[2], CHUNK):
        now = slice(start, start + CHUNK)
        K, Q, rate = k[:, :, now], q[:, :, now], beta[:, :, now, None]
        size = K.shape[2]
        after = torch.ones(size, size, dtype=torch.bool, device=v.device).tril(-1)
        decay = torch.where(after, g[:, :, now, None], 1.0).cumprod(2).tril()
        since = g[:, :, now].cumprod(2)[..., None]
        A = rate * decay * (K @ K.mT)
        B = rate * (v[:, :, now] - since * (K @ S.mT))
        U = torch.linalg.solve_triangular(A.tril(-1), B, upper=False, unitriangular=True)
        o[:, :, now] = since * (Q @ S.mT) + (decay * (Q @ K.mT)) @ U
        S = since[:, :, -1:] * S + (decay[:, :, -1, :, None] * U).mT @ K
    return o.transpose(1, 2).contiguous(), S
