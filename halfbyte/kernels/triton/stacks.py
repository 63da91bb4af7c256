"""Where quantised matrices lie: a stack of them, or experts apart in memory, as the kernels for few rows take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8}


class Format(NamedTuple):
    """What a kernel is compiled for."""

    bits: int
    group: int
    mode: str
    kind: tl.dtype  # of scales and biases
    wide: int  # words that one load may take; 0: bytes
    apart: bool  # matrices lie apart: a table of addresses stands for the stack


def stack(w):
    """A Packed with any leading axes, or experts that lie apart: what a kernel reads, and its format."""
    N, K = w.shape[-2:]
    wide = {2: 2, 4: 4, 6: 2, 8: 4}.get(w.bits, 1) if K % 32 == 0 else 0
    form = Format(w.bits, w.group, w.mode, KINDS[w.scale_dtype], wide, False)
    if hasattr(w, "addresses"):
        table, alignment = on_device(w)
        return (table, table, table, None, w.shape[0], 0, 0), form._replace(wide=min(wide, alignment), apart=True)
    words, scales = w.words.view(torch.int32).contiguous(), w.scales.contiguous()
    biases = scales if w.biases is None else w.biases.contiguous()
    each = 0 if w.global_scale is None or w.global_scale.numel() == 1 else 1
    return (words, scales, biases, w.global_scale, N * K * w.bits // 32, N * (K // w.group), each), form


def on_device(w):
    """The addresses of experts that lie apart on their device, and the words that a load may take at once.

    Kept with the addresses themselves: a copy waits for the device, and must not happen in a captured graph.
    """
    addresses = w.addresses
    if not hasattr(addresses, "on_device"):
        least = int((addresses[0] | 16).bitwise_and(-(addresses[0] | 16)).min())  # the lowest bit set, up to 16
        whole = not (addresses[1:] % w.scale_dtype.itemsize).any()
        addresses.on_device = (addresses.to(w.device), least // 4 if whole else 0)
    return addresses.on_device


@triton.jit
def matrix(stack, index, FORMAT: tl.constexpr):
    """Where the words, scales and biases of matrix `index` begin, and what its global scale multiplies results by."""
    words, scales, biases, global_scale, word_step, scale_step, global_step = stack
    if FORMAT.apart:  # words is a table of addresses [3, word_step]
        scales = tl.load(words + word_step + index).to(tl.pointer_type(FORMAT.kind))
        biases = tl.load(words + 2 * word_step + index).to(tl.pointer_type(FORMAT.kind))
        words = tl.load(words + index).to(tl.pointer_type(tl.int32))
        if FORMAT.wide > 1:
            words = tl.multiple_of(words, [4 * FORMAT.wide])
    else:
        words += index * word_step
        scales += index * scale_step
        biases += index * scale_step
    factor = tl.full((), 1.0, tl.float32)
    if global_scale is not None:
        factor = tl.load(global_scale + index * global_step) / 2688.0
    return words, scales, biases, factor
