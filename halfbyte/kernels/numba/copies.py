"""What launchers and steps do with torch between kernels, as kernels: for calls that are bound (binding.py).

Each function does what torch would, and returns whether it could: for the few kinds of tensors that models have there.
"""

import torch

from .compiled import alone
from .lanes import copy_bytes, load_n, store_n
from .views import raw

NARROW = (torch.bfloat16, torch.float16)


@alone
def rows_kernel(source, target, size, counts, strides):
    """Rows of `size` bytes along three axes, from the address `source` to where they follow each other."""
    for i in range(counts[0]):
        for j in range(counts[1]):
            for k in range(counts[2]):
                at = (i * counts[1] + j) * counts[2] + k
                start = source + i * strides[0] + j * strides[1] + k * strides[2]
                copy_bytes(target + at * size, start, size)


@alone
def integers_kernel(source, target):
    """Integers of one width as those of another."""
    for i in range(target.size):
        target[i] = source[i]


@alone
def widen_kernel(source, target):
    for i in range(0, target.size, 16):
        n = min(16, target.size - i)
        store_n(target, i, load_n(source, i, n), n)


@alone
def take_kernel(source, size, rows, target):
    """Rows of `size` bytes by number, between addresses."""
    for i in range(rows.size):
        copy_bytes(target + i * size, source + rows[i] * size, size)


@alone
def add_kernel(target, more):
    """target [..., B] += more [B]."""
    for i in range(target.size):
        target[i] += more[i % more.size]


def copy(source, target):
    """target = source, of the same shape."""
    if source.shape != target.shape or not target.is_contiguous() or not 0 < source.ndim <= 4:
        return False
    if source.dtype == target.dtype:
        return copy_rows(source, target)
    if not source.is_contiguous():
        return False
    if source.dtype in NARROW and target.dtype == torch.float32:
        widen_kernel(raw(source), raw(target))
    elif source.dtype in (torch.int32, torch.int64) and target.dtype in (torch.int32, torch.int64):
        integers_kernel(raw(source), raw(target))
    else:
        return False
    return True


def copy_into(target, source):
    return copy(source, target)


def copy_rows(source, target):
    gaps = source.stride(-1) != 1 and source.shape[-1] != 1
    lead = source.ndim if gaps else source.ndim - 1
    if lead > 3:
        return False
    width = source.element_size()
    counts = (*(1,) * (3 - lead), *source.shape[:lead])
    strides = (*(0,) * (3 - lead), *(stride * width for stride in source.stride()[:lead]))
    rows_kernel(source.data_ptr(), target.data_ptr(), width if gaps else source.shape[-1] * width, counts, strides)
    return True


def take(source, rows, target):
    """target = source[rows]"""
    if rows.dtype != torch.int64 or rows.ndim != 1 or not (source.is_contiguous() and target.is_contiguous()):
        return False
    take_kernel(source.data_ptr(), source[0].numel() * source.element_size(), raw(rows), target.data_ptr())
    return True


def add(target, more):
    """target += more, for integers."""
    alike = target.dtype == more.dtype == torch.int32 and target.shape[-more.ndim :] == more.shape
    if not alike or not more.is_contiguous():
        return False
    if not target.is_contiguous():
        return target.ndim > more.ndim and all(add(part, more) for part in target)
    add_kernel(raw(target), raw(more))
    return True
