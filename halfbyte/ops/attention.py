"""Attention over cached keys and values, grouped heads or shared latents, and the joining of partial attentions.

One position rule for all: request b has lengths[b] tokens in its slot of the cache, the L of this call included and
appended before it, so its query i stands at position p = lengths[b] - L + i.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cache import all_lengths, require_lengths, require_slots, rows_of
from .dispatch import deliver, kernel, refuse, require, require_floats, require_out, wide

LARGEST_HEAD = 512


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
    """o = softmax(cap(q . k scale)) . v over the positions a query sees;  cap(s) = softcap tanh(s / softcap).

    q [B, L, H, D]   k [slots, S, G, D]   v [slots, S, G, Dv]   lengths, slots [B]   ->   o [B, L, H, Dv], dtype of q

    Query head h reads kv head h // (H / G). The query at position p sees the positions up to p (all of the request's,
    where not `causal`), of which `window` keeps those above p - window. lengths default to S. Where a length exceeds S
    the cache is a ring, position j in row j % S: that needs a window, and S rows for it and the L queries.
    A query that sees nothing gives zeros. `return_lse` adds lse [B, L, H] float32, the natural logarithm of the sum
    of exp(scores); -inf where nothing is seen. `out` is o, or (o, lse); it may not overlap the inputs.

    A query's bits depend on its own position, keys and values alone: not on B, its slot, or whether the cache is a
    ring, nor, on a CPU, on L.
    """
    require(isinstance(q, Tensor), "attention", "q", "a tensor", q)
    require_floats("attention", q.device, q=q, k=k, v=v)
    require(q.ndim == 4 and 0 < q.shape[3] <= LARGEST_HEAD, "attention", "q", "[B, L, H, D], D from 1 to 512", q)
    fits = k.ndim == 4 and k.shape[3] == q.shape[3] and k.shape[1] > 0 and k.shape[2] > 0
    require(fits, "attention", "k", "[slots, S, G, D] with q's D", k, q)
    fits = v.ndim == 4 and v.shape[:3] == k.shape[:3] and 0 < v.shape[3] <= LARGEST_HEAD
    require(fits, "attention", "v", "[slots, S, G, Dv] as k, Dv from 1 to 512", v, k)
    B, L, H, D = q.shape
    S, G, Dv = k.shape[1], k.shape[2], v.shape[3]
    if not (H > 0 and H % G == 0):
        refuse("attention", "q", f"of a multiple of {G} heads", q)
    require(window is None or window > 0, "attention", "window", "above 0", window)
    require(softcap is None or softcap > 0, "attention", "softcap", "above 0", softcap)
    require_slots("attention", slots, B, k, distinct=False)
    require_lengths("attention", lengths, B, q.device)
    _require_room("attention", lengths, S, None if window is None else window + L - 1)
    outs = _require_outs("attention", out, return_lse, (B, L, H, Dv), q)
    if found := kernel("attention", "attention", q):
        return found(
            q, k, v, scale=scale, causal=causal, window=window, softcap=softcap, lengths=lengths, slots=slots,
            return_lse=return_lse, out=out,
        )  # fmt: skip
    queries = wide(q).reshape(B, L, G, H // G, D).permute(0, 2, 1, 3, 4).reshape(B, G, L * (H // G), D)
    keys = wide(rows_of(k, slots, B)).to(queries.dtype).permute(0, 2, 3, 1)
    scores = (queries @ keys * scale).view(B, G, L, H // G, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(all_lengths(lengths, S, B, q.device), L, S, causal, window)
    values = wide(rows_of(v, slots, B)).to(queries.dtype).permute(0, 2, 1, 3)
    o, lse = _soft_sum(scores, visible[:, None, :, None], values)
    o, lse = o.permute(0, 2, 1, 3, 4).reshape(B, L, H, Dv), lse.permute(0, 2, 1, 3).reshape(B, L, H)
    return _delivered(o, lse, q.dtype, return_lse, outs)


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
    """o = softmax((q . latent + q_pe . k_pe) scale) . latent: every head reads the same cached latents (MLA).

    q [B, L, H, R]   q_pe [B, L, H, P]   latent [slots, S, R]   k_pe [slots, S, P]   ->   o [B, L, H, R], dtype of q

    Positions, masks, lengths (at most S), slots, lse, `out` and the sameness of bits are those of `attention`.
    """
    require(isinstance(q, Tensor), "latent_attention", "q", "a tensor", q)
    require_floats("latent_attention", q.device, q=q, q_pe=q_pe, latent=latent, k_pe=k_pe)
    require(q.ndim == 4 and q.shape[2] > 0 and q.shape[3] > 0, "latent_attention", "q", "[B, L, H, R]", q)
    fits = q_pe.ndim == 4 and q_pe.shape[:3] == q.shape[:3] and q_pe.shape[3] > 0
    require(fits, "latent_attention", "q_pe", "[B, L, H, P] as q", q_pe, q)
    fits = latent.ndim == 3 and latent.shape[1] > 0 and latent.shape[2] == q.shape[3]
    require(fits, "latent_attention", "latent", "[slots, S, R] with q's R", latent, q)
    fits = k_pe.ndim == 3 and k_pe.shape[:2] == latent.shape[:2] and k_pe.shape[2] == q_pe.shape[3]
    require(fits, "latent_attention", "k_pe", "[slots, S, P] as latent, with q_pe's P", k_pe, latent)
    B, L, H, _ = q.shape
    S = latent.shape[1]
    require_slots("latent_attention", slots, B, latent, distinct=False)
    require_lengths("latent_attention", lengths, B, q.device)
    _require_room("latent_attention", lengths, S, None)
    outs = _require_outs("latent_attention", out, return_lse, tuple(q.shape), q)
    if found := kernel("attention", "latent_attention", q):
        return found(
            q, q_pe, latent, k_pe, scale=scale, causal=causal, lengths=lengths, slots=slots, return_lse=return_lse,
            out=out,
        )  # fmt: skip
    rows = wide(rows_of(latent, slots, B)).to(wide(q).dtype)
    turned = wide(rows_of(k_pe, slots, B)).to(rows.dtype)
    scores = wide(q).flatten(1, 2) @ rows.mT + wide(q_pe).to(rows.dtype).flatten(1, 2) @ turned.mT
    visible = _visible(all_lengths(lengths, S, B, q.device), L, S, causal, None)
    o, lse = _soft_sum((scores * scale).view(B, 1, L, H, S), visible[:, None, :, None], rows[:, None])
    return _delivered(o[:, 0], lse[:, 0], q.dtype, return_lse, outs)


def merge_states(
    o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Join two attentions over disjoint keys: w_i = exp(lse_i - max lse);  o = (w1 o1 + w2 o2) / (w1 + w2).

    o1, o2 [..., D]   lse1, lse2 [...]   ->   o [..., D], dtype of o1, and lse = max lse + log(w1 + w2) [...] float32

    Two that saw nothing (-inf) give zeros and -inf. `out` may be (o1, lse1) or (o2, lse2).
    """
    require(isinstance(o1, Tensor), "merge_states", "o1", "a tensor", o1)
    require_floats("merge_states", o1.device, o1=o1, lse1=lse1, o2=o2, lse2=lse2)
    require(o1.ndim >= 1 and o1.shape[-1] > 0, "merge_states", "o1", "[..., D] with D > 0", o1)
    require(o2.shape == o1.shape, "merge_states", "o2", "of o1's shape", o2, o1)
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        require(lse.shape == o1.shape[:-1], "merge_states", name, "[...] of o1 [..., D]", lse, o1)
        require(lse.dtype == _wide_dtype(o1), "merge_states", name, "float32 (float64 where o1 is)", lse)
    outs = _require_outs("merge_states", out, True, tuple(o1.shape), o1)
    if found := kernel("attention", "merge_states", o1):
        return found(o1, lse1, o2, lse2, out=out)  # type: ignore[no-any-return]
    peak = torch.maximum(lse1, lse2)
    shift = torch.where(peak == -torch.inf, 0.0, peak)
    w1, w2 = torch.exp(lse1 - shift), torch.exp(lse2 - shift)
    weight = w1 + w2
    o = (w1[..., None] * wide(o1) + w2[..., None] * wide(o2)) / torch.where(weight == 0, 1.0, weight)[..., None]
    joined: tuple[Tensor, Tensor] = _delivered(o, peak + torch.log(weight), o1.dtype, True, outs)
    return joined


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _visible(lengths: Tensor, L: int, S: int, causal: bool, window: int | None) -> Tensor:
    """Which cache rows each query sees, [B, L, S]. A row holds the last position that fell on it (plain or ring)."""
    newest = lengths[:, None] - 1
    held = newest - (newest - torch.arange(S, device=lengths.device)) % S
    held, place = held[:, None], (lengths[:, None] - L + torch.arange(L, device=lengths.device))[..., None]
    visible = (held >= 0) & (place >= 0)
    if causal:
        visible &= held <= place
    return visible if window is None else visible & (held > place - window)


def _soft_sum(scores: Tensor, visible: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(scores) . values over what is visible, and its lse; zeros and -inf where nothing is.

    scores [B, G, L, M, S]   visible [B, 1, L, 1, S]   values [B, G, S, Dv]   ->   [B, G, L, M, Dv], [B, G, L, M]
    """
    scores = scores.masked_fill(~visible, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    shift = torch.where(peak == -torch.inf, 0.0, peak)
    weights = torch.exp(scores - shift)
    weight = weights.sum(-1, keepdim=True)
    # A row that nobody sees may hold anything, and 0 times NaN is NaN.
    values = values.masked_fill(~visible.any(2).transpose(2, 3), 0.0)
    o = (weights.flatten(2, 3) @ values).unflatten(2, scores.shape[2:4])
    return o / torch.where(weight == 0, 1.0, weight), (shift + torch.log(weight)).squeeze(-1)


def _require_room(op: str, lengths: Tensor | None, S: int, ring: int | None) -> None:
    """A length above S means a ring of at least `ring` rows: checked where lengths can be read at once."""
    if lengths is not None and lengths.is_cpu and lengths.shape[0]:
        longest = max(lengths.tolist())
        if longest > S and (ring is None or ring > S):
            room = "at most S" if ring is None else f"at most S, or S at least window + L - 1 = {ring} (a ring)"
            refuse(op, "lengths", room, longest, S)


def _require_outs(op: str, out: Any, pair: bool, shape: tuple[int, ...], q: Tensor) -> tuple[Tensor | None, ...]:
    if out is None:
        return (None, None)
    require(isinstance(out, tuple if pair else Tensor), op, "out", "(o, lse)" if pair else "a tensor", out)
    outs = out if pair else (out, None)
    require(len(outs) == 2, op, "out", "(o, lse)", len(outs))
    require_out(op, outs[0], shape, q.dtype, q.device)
    require_out(op, outs[1], shape[:-1], _wide_dtype(q), q.device)
    return tuple(outs)


def _delivered(o: Tensor, lse: Tensor, dtype: torch.dtype, pair: bool, outs: tuple[Tensor | None, ...]) -> Any:
    done = deliver(o.contiguous(), dtype, outs[0])
    return (done, deliver(lse.contiguous(), lse.dtype, outs[1])) if pair else done
