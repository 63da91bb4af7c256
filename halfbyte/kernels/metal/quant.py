"""Quantised weights on an Apple GPU: qmm with few rows reads each weight once for all of them, with many it fills 8x8
matrices; embed and dequantize read rows out, quantize makes them, to mlx's bits."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .shaders import MSL, SIMD, blocks, delivered, flat, kernel, launch, result

MODES = {"affine": 0, "mxfp4": 1, "nvfp4": 2, "mxfp8": 3}
DENSE = 4
NV_RANGE = 2688.0  # the largest e4m3 scale times the largest e2m1 value
FEW = 8  # rows of x that `matvec` takes
AT_ONCE = 4  # of them for one reading of the weight
ROWS_A_GROUP = 32  # of w: 8 simd groups, 4 rows each
BLOCK = 32  # a tile's side in `gemm`
THREADS = 256


class Weights(NamedTuple):
    """What kernels take of a weight [matrices, N, K]: its tensors, where its rows lie, and how it is compiled for."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]  # words, scales, biases, factors
    strides: tuple[int, int, int, int]  # of matrices and rows: in words, then in scales
    factor_step: int  # from one matrix's factor to the next; -1 without factors
    types: tuple[str | int, ...]  # of scales; mode, bits, group


def weights(w: Any) -> Weights:
    """Of a Packed, or of a dense tensor, which comes in the place of the scales. Only what lies askew is copied."""
    if isinstance(w, Tensor):
        stack = _stack(w)
        strides = (0, 0, stack.stride(0), stack.stride(1))
        return Weights((stack, stack, stack, stack), strides, -1, (MSL[w.dtype], DENSE, 8, 8))
    words, scales = _stack(w.words.view(torch.int32)), _stack(w.scales)
    biases = scales if w.biases is None else _stack(w.biases)
    if biases.stride() != scales.stride():
        scales, biases = scales.contiguous(), biases.contiguous()
    strides = (words.stride(0), words.stride(1), scales.stride(0), scales.stride(1))
    types = (MSL[scales.dtype], MODES[w.mode], w.bits, w.group)
    if w.global_scale is None:
        return Weights((words, scales, biases, scales), strides, -1, types)
    factors = flat(w.global_scale.reshape(-1) / NV_RANGE)
    return Weights((words, scales, biases, factors), strides, int(factors.numel() > 1), types)


def _stack(t: Tensor) -> Tensor:
    """[..., N, K] as [matrices, N, K] with neighbours of a row side by side."""
    t = t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()
    return t.reshape(-1, *t.shape[-2:]) if t.ndim != 3 else t


def quantize(
    w: Tensor,
    bits: int | None = None,
    group: int | None = None,
    mode: str = "affine",
    global_scale: float | Tensor | None = None,
) -> Any:
    assert bits is not None and group is not None
    K, affine = w.shape[-1], mode == "affine"
    words = torch.empty((*w.shape[:-1], K * bits // 32), dtype=torch.int32, device=w.device)
    scales = torch.empty((*w.shape[:-1], K // group), dtype=w.dtype if affine else torch.uint8, device=w.device)
    biases = torch.empty(scales.shape, dtype=scales.dtype, device=w.device) if affine else None
    if groups := scales.numel():
        given, whole = flat(w), isinstance(global_scale, Tensor)
        factors = flat(global_scale.reshape(-1)) if isinstance(global_scale, Tensor) else given
        each = groups // factors.numel() if whole else groups
        launch(
            kernel("quant", "quantize", MSL[w.dtype], MSL[scales.dtype], MODES[mode], bits, group), given, factors,
            words, scales, scales if biases is None else biases, groups, each, int(whole),
            groups=blocks(groups, THREADS // SIMD), size=THREADS,
        )  # fmt: skip
    return words.view(torch.uint32), scales, biases


def dequantize(p: Any, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    made = result(out, p.shape, dtype, p.device)
    if made.numel():
        _read(None, p, prod(p.shape[:-1]), made)
    return delivered(made, out)


def embed(ids: Tensor, w: Any, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    made = result(out, (*ids.shape, w.shape[-1]), dtype, ids.device)
    if made.numel():
        _read(flat(ids), w, ids.numel(), made)
    return delivered(made, out)


def _read(ids: Tensor | None, w: Any, count: int, y: Tensor) -> None:
    given, (N, K) = weights(w), w.shape[-2:]
    index = "int" if ids is None else MSL[ids.dtype]
    launch(
        kernel("quant", "read_rows", MSL[y.dtype], given.types[0], index, *given.types[1:]),
        given.tensors[0] if ids is None else ids, *given.tensors, y, count, N, K, given.strides, given.factor_step,
        int(ids is not None), groups=blocks(count * blocks(K, 8), THREADS), size=THREADS,
    )  # fmt: skip


def qmm(x: Tensor, w: Any, *, transpose: bool = True, out: Tensor | None = None) -> Tensor:
    N, K = w.shape[-2:]
    heads, width = prod(w.shape[:-2]), N if transpose else K
    made = result(out, (*x.shape[:-1], width), x.dtype, x.device)
    if made.numel():
        rows = x.numel() // (heads * x.shape[-1])
        multiply(flat(x), weights(w), made, (rows, heads), (N, K), transpose)
    return delivered(made, out)


def multiply(
    x: Tensor, w: Weights, y: Tensor, counts: tuple[int, int], shape: tuple[int, int], transpose: bool = True
) -> None:
    """x [rows, heads, inner] times w [heads, N, K], into y."""
    (rows, heads), (N, K) = counts, shape
    if transpose and rows <= FEW:
        taken = min(rows, AT_ONCE)
        name, option, size = "matvec", taken, THREADS
        groups = blocks(N, ROWS_A_GROUP), blocks(rows, taken), heads
    else:
        name, option, size = "gemm", int(not transpose), 128
        groups = blocks(N if transpose else K, BLOCK), blocks(rows, BLOCK), heads
    chosen = kernel("quant", name, MSL[x.dtype], *w.types, option)
    launch(chosen, x, *w.tensors, y, N, K, rows, heads, w.strides, w.factor_step, groups=groups, size=(size, 1, 1))
