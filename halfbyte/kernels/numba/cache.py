"""Rows into caches, and the view of a cache that kernels read: as it is stored and as it lies in memory."""

import numpy as np
import torch
from numba import prange

from .compiled import inner, kernel
from .lanes import compiled_once, copy_bytes
from .views import SERIAL

STORED = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


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
    """int64 array of the given indices, or of 0, 1, ... `default`."""
    return np.arange(default) if given is None else given.to(torch.int64).contiguous().numpy()


@inner
def copy_row(cache, slot_step, row_step, S, new, slots, ends, L, size, task):
    """Row task % L of request task // L, to its place in the cache; a ring keeps only the last S of a request."""
    compiled_once()
    b, i = task // L, task % L
    if i >= L - S:
        copy_bytes(cache + slots[b] * slot_step + (ends[b] - L + i) % S * row_step, new + task * size, size)


@kernel
def append_kernel(cache, slot_step, row_step, S, new, slots, ends, L, size):
    """Rows of `size` bytes from the address `new` to the address `cache`; steps are in bytes."""
    rows = slots.size * L
    if rows * size < 16 * SERIAL:
        for task in range(rows):
            copy_row(cache, slot_step, row_step, S, new, slots, ends, L, size, task)
    else:
        for task in prange(rows):
            copy_row(cache, slot_step, row_step, S, new, slots, ends, L, size, np.intp(task))


def append(cache, new, *, slots=None, lengths=None, ring=False):
    B, L, S = new.shape[0], new.shape[1], cache.shape[1]
    if new.numel() == 0:
        return cache
    slots, ends = indices(slots, B), np.full(B, L) if lengths is None else indices(lengths, B)
    rows = new.to(cache.dtype).contiguous()
    if cache.is_contiguous() or cache[0, 0].is_contiguous():
        width = cache.element_size()
        slot_step, row_step = cache.stride(0) * width, cache.stride(1) * width
        append_kernel(
            cache.data_ptr(), slot_step, row_step, S, rows.data_ptr(), slots, ends, L, rows.numel() // (B * L) * width
        )
    else:  # a row with gaps: filled in a copy, which is then copied back
        whole = cache.contiguous()
        append(whole, new, slots=torch.from_numpy(slots), lengths=torch.from_numpy(ends), ring=ring)
        cache.copy_(whole)
    return cache
