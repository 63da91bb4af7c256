"""The next token of each row of logits. Random numbers are a function of (seed, position, token id) alone, so a row
draws the same token in any batch, on any device, whatever was drawn before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import INTEGERS, deliver, kernel, require, require_floats, require_out, wide

MINUS_INF = float("-inf")
WORD = 0xFFFFFFFF


class Sampling(NamedTuple):
    """How each row is drawn: one tensor [B] a field, or None where a field is off for all rows.

    counts int32 [B, V] says how often each token stands in the row's text; the penalties need it.
    """

    temperature: Tensor | None = None  # 0 is greedy; off is 1
    top_k: Tensor | None = None  # int32; 0 is off
    top_p: Tensor | None = None  # 1 is off
    min_p: Tensor | None = None  # 0 is off
    repetition: Tensor | None = None  # 1 is off
    presence: Tensor | None = None  # 0 is off
    frequency: Tensor | None = None  # 0 is off
    counts: Tensor | None = None


def sample(logits: Tensor, params: Sampling, seeds: Tensor, positions: Tensor, *, out: Tensor | None = None) -> Tensor:
    """One token id a row: penalties, temperature, top-k, top-p, min-p, then a draw by the Gumbel maximum.

    logits [B, V]   seeds int64 [B]   positions int32 or int64 [B]   ->   ids int32 [B]

    In this order: where count > 0, a logit is divided by repetition if positive, else multiplied by it, and loses
    presence; every logit loses frequency . count. Temperature 0 takes the largest. Otherwise s = logit / temperature;
    the top_k largest stay; of these the fewest most probable whose probabilities sum to top_p; of these the ones with
    at least min_p times the largest probability; the id is that of the largest s + g. Ties go to the lower id.

    g = -log(-log(u)), u = (bits >> 9 + 1/2) 2^-23, exact in float32 and inside (0, 1); the bits are lane id mod 4 of
    Philox4x32-10 with the seed's low and high word as key and (id // 4, position's low word, high word, 0) as counter.
    NaN counts as -inf. Where the largest s is infinite the largest logit is taken without a draw: +inf surely wins, a
    row without a number gives 0.
    """
    _require_sample(logits, params, seeds, positions)
    require_out("sample", out, logits.shape[:1], torch.int32, logits.device)
    if found := kernel("sampling", "sample", logits):
        return found(logits, params, seeds, positions, out=out)  # type: ignore[no-any-return]
    x = _penalised(logits, params)
    scaled = x
    if params.temperature is not None:
        scaled = x / wide(params.temperature).to(x.dtype)[:, None]
        scaled = scaled.masked_fill(scaled.isnan(), MINUS_INF)
    best = scaled.max(-1, keepdim=True).values
    kept = _kept(scaled, best, params)
    drawn = (scaled + _gumbel(seeds, positions, logits.shape[1])).masked_fill(~kept, MINUS_INF).argmax(-1)
    sure = best[:, 0].isinf() if params.temperature is None else best[:, 0].isinf() | (params.temperature == 0)
    return deliver(torch.where(sure, x.argmax(-1), drawn), torch.int32, out)


def _penalised(logits: Tensor, params: Sampling) -> Tensor:
    """The logits after the penalties, without NaN."""
    x = wide(logits)

    def column(field: Tensor) -> Tensor:
        return wide(field).to(x.dtype)[:, None]

    if params.counts is not None:
        seen = params.counts > 0
        if params.repetition is not None:
            by = column(params.repetition)
            x = torch.where(seen, torch.where(x > 0, x / by, x * by), x)
        if params.presence is not None:
            x = torch.where(seen, x - column(params.presence), x)
        if params.frequency is not None:
            x = x - column(params.frequency) * params.counts
    return x.masked_fill(x.isnan(), MINUS_INF)


def _kept(scaled: Tensor, best: Tensor, params: Sampling) -> Tensor:
    """Which tokens [B, V] the filters leave."""
    kept = torch.ones(scaled.shape, dtype=torch.bool, device=scaled.device)
    if params.top_k is not None or params.top_p is not None:
        value, order = scaled.sort(dim=-1, descending=True, stable=True)
        if params.top_k is not None:
            k = torch.where(params.top_k == 0, scaled.shape[1], params.top_k)[:, None]
            inside = torch.arange(scaled.shape[1], device=scaled.device) < k
            kept.scatter_(-1, order, inside)
            value = value.masked_fill(~inside, MINUS_INF)
        if params.top_p is not None:
            p, share = params.top_p.double()[:, None], torch.softmax(value, -1).double()
            kept &= torch.zeros_like(kept).scatter_(-1, order, (share.cumsum(-1) - share < p) | (p == 1))
    if params.min_p is not None:
        least = wide(params.min_p).to(scaled.dtype)[:, None]
        kept &= (scaled >= best + least.log()) | (least == 0)
    return kept


def _gumbel(seeds: Tensor, positions: Tensor, V: int) -> Tensor:
    """The noise of every token, float32 [B, V]."""
    blocks = torch.arange((V + 3) // 4, device=seeds.device)
    position = positions.long()[:, None]
    words = philox(
        (blocks, position & WORD, position >> 32 & WORD, torch.zeros_like(position)),
        (seeds[:, None] & WORD, seeds[:, None] >> 32 & WORD),
    )
    uniform = ((torch.stack(words, -1).flatten(-2)[:, :V] >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., 2011): four random words from four counter words and two key words.

    Words are int64 tensors of values below 2^32, broadcast together. A product's upper word survives the overflow into
    the sign, since the shift copies the sign and the mask removes the copies.
    """
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32 & WORD) ^ b ^ low, right & WORD, (left >> 32 & WORD) ^ d ^ high, left & WORD
        low, high = low + 0x9E3779B9 & WORD, high + 0xBB67AE85 & WORD
    return tuple(torch.broadcast_tensors(a, b, c, d))


def _require_sample(logits: Tensor, params: Sampling, seeds: Tensor, positions: Tensor) -> None:
    require(isinstance(logits, Tensor), "sample", "logits", "a tensor", logits)
    require_floats("sample", logits.device, logits=logits)
    require(logits.ndim == 2 and 0 < logits.shape[1] < 2**31, "sample", "logits", "[B, V] with V > 0", logits)
    require(isinstance(params, Sampling), "sample", "params", "a Sampling", params)
    B = logits.shape[0]
    for name, each, dtypes in (("seeds", seeds, (torch.int64,)), ("positions", positions, INTEGERS)):
        fits = isinstance(each, Tensor) and each.dtype in dtypes and each.shape == (B,)
        require(fits and each.device == logits.device, "sample", name, f"integers [{B}] on logits' device", each)
    finite = math.isfinite
    _require_field(logits, "temperature", params.temperature, "finite, 0 or more", lambda v: finite(v) and v >= 0)
    _require_field(logits, "top_k", params.top_k, "0 or more", lambda v: v >= 0)
    _require_field(logits, "top_p", params.top_p, "above 0 and at most 1", lambda v: 0 < v <= 1)
    _require_field(logits, "min_p", params.min_p, "from 0 to 1", lambda v: 0 <= v <= 1)
    _require_field(logits, "repetition", params.repetition, "finite and above 0", lambda v: finite(v) and v > 0)
    _require_field(logits, "presence", params.presence, "finite", finite)
    _require_field(logits, "frequency", params.frequency, "finite", finite)
    counts = params.counts
    if counts is None:
        penalties = params.repetition, params.presence, params.frequency
        require(not any(p is not None for p in penalties), "sample", "counts", "given where a penalty is")
        return
    fits = isinstance(counts, Tensor) and counts.dtype == torch.int32 and counts.shape == logits.shape
    require(fits and counts.device == logits.device, "sample", "counts", "int32 [B, V] on logits' device", counts)


def _require_field(
    logits: Tensor, name: str, field: Tensor | None, expected: str, allowed: Callable[[float], bool]
) -> None:
    """One number a row of the field's type; its range only where reading it does not wait for a device."""
    if field is None:
        return
    require(isinstance(field, Tensor), "sample", name, "a tensor", field)
    if name == "top_k":
        fits = field.dtype == torch.int32 and field.device == logits.device
        require(fits, "sample", name, "int32 on logits' device", field)
    else:
        require_floats("sample", logits.device, **{name: field})
    require(field.shape == logits.shape[:1], "sample", name, "[B], one a row of logits", field, logits)
    if field.device.type == "cpu":
        values = field.tolist()
        require(all(map(allowed, values)), "sample", name, expected, values)
