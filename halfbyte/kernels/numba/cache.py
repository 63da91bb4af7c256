"""Rows into caches, and the view of a cache that kernels read: as it is stored and as it lies in memory."""

import numpy as np
import torch
from numba import njit, prange

from .views import SERIAL

STORED = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def strided(t):
    """A tensor as a flat array of what is stored, with the strides of its axes; copied where its last axis has gaps."""
    if t.stride(-1) != 1 and t.shape[-1] != 1:
        t = t.contiguous()
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    stored = t.view(STORED[t.dtype]) if t.dtype in STORED else t
    return stored.as_strided((span,), (1,)).numpy(), t.stride()


def indices(given, default):
    """int64 array of the given indices, or the default."""
    return default if given is None else given.to(torch.int64).contiguous().numpy()


@njit(parallel=True, cache=True)
def append_kernel(cache, slot_stride, row_stride, new, slots, lengths, L, S, width):
    """Row i of request b to row (lengths[b] - L + i) % S of its slot, of which only the last S rows count."""
    first = max(0, L - S)
    rows = L - first
    total = slots.size * rows
    if total * width < SERIAL:
        for task in range(total):
            copy_row(
                cache, slot_stride, row_stride, new, slots, lengths, L, S, width, task // rows, first + task % rows
            )
    else:
        for task in prange(total):
            copy_row(
                cache, slot_stride, row_stride, new, slots, lengths, L, S, width, task // rows, first + task % rows
            )


@njit
def copy_row(cache, slot_stride, row_stride, new, slots, lengths, L, S, width, b, i):
    to = slots[b] * slot_stride + (lengths[b] - L + i) % S * row_stride
    at = (b * L + i) * width
    for c in range(width):
        cache[to + c] = new[at + c]


def append(cache, new, *, slots=None, lengths=None, ring=False):
    B, L, S = new.shape[0], new.shape[1], cache.shape[1]
    if new.numel() == 0:
        return cache
    rounded = new.to(cache.dtype)
    if slots is None and lengths is None and L <= S:
        cache[:B, :L].copy_(rounded)
        return cache
    # Rows of a cache whose own axes have gaps are written in a copy.
    tight = cache if cache[0, 0].is_contiguous() else cache.contiguous()
    array, strides = strided(tight.flatten(2) if tight.ndim > 2 else tight[..., None])
    source, _ = strided(rounded.contiguous().view(-1))
    append_kernel(
        array, strides[0], strides[1], source, indices(slots, np.arange(B)), indices(lengths, np.full(B, L)), L, S,
        new[0, 0].numel(),
    )  # fmt: skip
    return cache if tight is cache else cache.copy_(tight)
