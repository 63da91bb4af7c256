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
    even: bool  # scales and biases of a matrix begin at a multiple of two of them


def stack(w):
    """A Packed with any leading axes, or experts that lie apart: what a kernel reads, and its format."""
    N, K = w.shape[-2:]
    wide = {2: 2 if K % 64 else 4, 4: 4, 6: 2, 8: 4}.get(w.bits, 1) if K % 32 == 0 else 0
    form = Format(w.bits, w.group, w.mode, KINDS[w.scale_dtype], wide, False, True)
    if hasattr(w, "addresses"):
        table, alignment = on_device(w)
        form = form._replace(wide=min(wide, alignment), apart=True, even=w.addresses.even)
        return (table, table, table, None, w.shape[0], 0, 0), form
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
        whole, addresses.even = (not (addresses[1:] % (n * w.scale_dtype.itemsize)).any() for n in (1, 2))
        addresses.on_device = (addresses.to(w.device), least // 4 if whole else 0)
    return addresses.on_device


@triton.jit
def prefetch(pointers):
    """Ask for what lies there to come to the L2. That reads nothing: what is written later is in the L2 as well."""
    pointers = pointers.to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_columns(vector, D, BLOCK: tl.constexpr):
    """The first D, at most BLOCK, of a vector, in lines of 128 bytes as if it were of float32."""
    prefetch(vector + tl.minimum(32 * tl.arange(0, (BLOCK + 31) // 32), D - 1))


@triton.jit
def prefetch_table(stack):
    """The addresses of matrices that lie apart."""
    words, _, _, _, matrices, _, _ = stack
    for start in range(0, 3 * matrices, 1024):
        prefetch(words + tl.minimum(start + 16 * tl.arange(0, 64), 3 * matrices - 1))


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
        if FORMAT.even:
            scales = tl.multiple_of(scales, [FORMAT.kind.primitive_bitwidth // 4])
            biases = tl.multiple_of(biases, [FORMAT.kind.primitive_bitwidth // 4])
    else:
        words += index * word_step
        scales += index * scale_step
        biases += index * scale_step
    factor = tl.full((), 1.0, tl.float32)
    if global_scale is not None:
        factor = tl.load(global_scale + index * global_step) / 2688.0
    return words, scales, biases, factor
