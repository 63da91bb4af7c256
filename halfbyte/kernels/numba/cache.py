"""Rows into caches, and the view of a cache that kernels read: as it is stored and as it lies in memory."""

import torch

STORED = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
FEW = 4  # requests up to which a copy each is faster than one scattered write


def strided(t):
    """A tensor as a flat array of what is stored, with the strides of its axes.

    Copied where its last axis has gaps, and where it is float64, which kernels do not read.
    """
    t = t.float() if t.dtype == torch.float64 else t
    if t.stride(-1) != 1 and t.shape[-1] != 1:
        t = t.contiguous()
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    stored = t.view(STORED[t.dtype]) if t.dtype in STORED else t
    return stored.as_strided((span,), (1,)).numpy(), t.stride()


def indices(given, default):
    """int64 array of the given indices, or the default."""
    return default if given is None else given.to(torch.int64).contiguous().numpy()


def append(cache, new, *, slots=None, lengths=None, ring=False):
    """torch's own copies: a row is copied and rounded at the speed of memory, and no strides are in the way."""
    B, L, S = new.shape[0], new.shape[1], cache.shape[1]
    if new.numel() == 0:
        return cache
    new = new[:, -S:]
    kept = new.shape[1]
    if B > FEW:
        ends = torch.full((B,), L) if lengths is None else lengths.long()
        rows = (ends[:, None] - kept + torch.arange(kept)) % S
        named = torch.arange(B) if slots is None else slots.long()
        cache[named[:, None], rows] = new.to(cache.dtype)
        return cache
    ends = [L] * B if lengths is None else lengths.tolist()
    named = range(B) if slots is None else slots.tolist()
    for slot, end, rows in zip(named, ends, new, strict=True):
        start = (end - kept) % S
        whole = min(kept, S - start)
        cache[slot, start : start + whole].copy_(rows[:whole])
        if whole < kept:
            cache[slot, : kept - whole].copy_(rows[whole:])
    return cache
