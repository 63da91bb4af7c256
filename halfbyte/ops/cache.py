"""What a request keeps between steps: rows appended to its slot of a cache, as a line or as a ring.

A cache is [slots, S, ...]; request b of a call lives in slot slots[b] (in slot b, where no slots are given). The values
of `slots` and `lengths` are checked where they can be read without waiting for a device: on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import INTEGERS, kernel, refuse, require, require_floats


def append(
    cache: Tensor, new: Tensor, *, slots: Tensor | None = None, lengths: Tensor | None = None, ring: bool = False
) -> Tensor:
    """cache[slots[b], lengths[b] - L + i] = new[b, i], in place, rounded to the cache's dtype; returns the cache.

    cache [slots, S, ...]   new [B, L, ...]   slots [B], distinct   lengths [B], after the append (default: L, from
    the start)

    A position must be below S; in a ring, position p lives in row p % S instead, and of more than S new rows the
    last S survive. `new` may not overlap the cache.
    """
    require(isinstance(cache, Tensor) and cache.ndim >= 2, "append", "cache", "a tensor [slots, S, ...]", cache)
    require_floats("append", cache.device, cache=cache, new=new)
    fits = new.ndim == cache.ndim and new.shape[2:] == cache.shape[2:]
    require(fits, "append", "new", "[B, L, ...] for a cache [slots, S, ...]", new, cache)
    B, L, S = new.shape[0], new.shape[1], cache.shape[1]
    require_slots("append", slots, B, cache, distinct=True)
    require_lengths("append", lengths, B, cache.device)
    if lengths is None:
        require(ring or L <= S, "append", "new", "at most S rows", new, cache)
    elif lengths.device.type == "cpu":
        for length in lengths.tolist():
            require(
                length >= L and (ring or length <= S), "append", "lengths", "from L to S (to any, ring)", lengths, L
            )
    if found := kernel("cache", "append", cache):
        return found(cache, new, slots=slots, lengths=lengths, ring=ring)  # type: ignore[no-any-return]
    if new.numel() == 0:
        return cache
    ends = all_lengths(lengths, L, B, cache.device)
    rows = ends[:, None] - L + torch.arange(L, device=cache.device)
    if ring:
        rows, new = rows[:, -S:] % S, new[:, -S:]
    cache[all_slots(slots, B, cache.device)[:, None], rows] = new.to(cache.dtype)
    return cache


def require_slots(op: str, slots: Tensor | None, B: int, cache: Tensor, *, distinct: bool) -> None:
    """Slots are [B] integers that name rows of the cache; without them the cache has a row for every request."""
    count = cache.shape[0]
    if slots is None:
        require(count >= B, op, "slots", f"given where {B} requests share {count} slots")
        return
    require_indices(op, "slots", slots, B, cache.device)
    if slots.is_cpu and B:
        named = slots.tolist()
        if min(named) < 0 or max(named) >= count:
            refuse(op, "slots", f"from 0 to {count - 1}", named)
        require(not distinct or len(set(named)) == B, op, "slots", "distinct", named)


def require_lengths(op: str, lengths: Tensor | None, B: int, device: torch.device) -> None:
    if lengths is not None:
        require_indices(op, "lengths", lengths, B, device)
        if lengths.is_cpu and B and min(held := lengths.tolist()) < 0:
            refuse(op, "lengths", "0 or more", held)


def require_indices(op: str, name: str, indices: Tensor, B: int, device: torch.device) -> None:
    if type(indices) is Tensor and indices.dtype in INTEGERS and indices.shape == (B,) and indices.device == device:
        return
    require(isinstance(indices, Tensor), op, name, "a tensor", indices)
    require(indices.dtype in INTEGERS, op, name, "int32 or int64", indices)
    require(indices.shape == (B,), op, name, f"[{B}], one a request", indices)
    require(indices.device == device, op, name, f"on {device}", indices)


def all_slots(slots: Tensor | None, B: int, device: torch.device) -> Tensor:
    return torch.arange(B, device=device) if slots is None else slots.long()


def all_lengths(lengths: Tensor | None, default: int, B: int, device: torch.device) -> Tensor:
    return torch.full((B,), default, device=device) if lengths is None else lengths.long()


def rows_of(cache: Tensor, slots: Tensor | None, B: int) -> Tensor:
    """cache[slots]: each request's part; a view where no slots are named."""
    return cache[:B] if slots is None else cache[slots.long()]
