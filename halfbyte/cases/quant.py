"""Cases of the quantised weights: every width, group and mode; one row and many; heads; both contractions."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..check import tensors
from ..ops.dispatch import reference
from ..ops.quant import Packed, dequantize, embed, qmm, quantize
from .case import Case, Random

Weight = Callable[[Random, tuple[int, ...]], Packed | Tensor]


def affine(bits: int = 4, group: int = 64, scales: torch.dtype = torch.bfloat16) -> Weight:
    return lambda random, shape: packed(random.normal(*shape, dtype=scales), bits, group)


def small_float(mode: str, global_scale: float | None = None) -> Weight:
    return lambda random, shape: packed(random.normal(*shape), None, None, mode, global_scale)


def dense(dtype: torch.dtype) -> Weight:
    return lambda random, shape: random.normal(*shape, dtype=dtype)


def packed(w: Tensor, *format: Any) -> Packed:
    """Quantised by the body: what is under test must not make its own inputs."""
    with reference():
        return quantize(w, *format)


def random_packed(random: Random, shape: tuple[int, ...], bits: int, group: int, mode: str = "affine") -> Packed:
    """A weight of random words and plausible scales, made on its own device: quantising large ones takes too long."""
    *rows, K = shape
    words = random.integers(-(1 << 31), 1 << 31, *rows, K * bits // 32)
    groups = (*rows, K // group)
    if mode == "affine":
        scales, biases = (random.normal(*groups, dtype=torch.bfloat16, scale=0.02) for _ in range(2))
        return Packed(words, scales, biases, bits, group)
    low, high = (0x20, 0x51) if mode == "nvfp4" else (121, 130)  # e4m3, or powers of two about 1
    return Packed(words, random.integers(low, high, *groups, dtype=torch.uint8), None, bits, group, mode)


def large_affine(random: Random, shape: tuple[int, ...]) -> Packed:
    return random_packed(random, shape, 4, 64)


def product(
    *shape: int,
    rows: tuple[int, ...] = (1,),
    weight: Weight,
    name: str,
    transpose: bool = True,
    strided: bool = False,
    mean: float = 0.0,
    serving: bool = False,
    only: str | None = None,
) -> Case:
    """x [*rows, *leading, inner] times a weight of `shape` [*leading, N, K]; the floor of many rows is arithmetic."""

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        w = weight(random, shape)
        make = random.strided if strided else random.normal
        x = make(*rows, *shape[:-2], shape[-1 if transpose else -2], dtype=dtype)
        x = x + mean if mean else x
        return (x, w), ({} if transpose else {"transpose": False})

    said = "x".join(map(str, rows)) + "-of-" + "x".join(map(str, shape)) + f"-{name}"
    said += ("" if transpose else "-rows") + ("-strided" if strided else "") + (f"-mean{mean:g}" if mean else "")
    many = prod(rows) >= 64
    return Case(
        qmm, said, build, serving, flops=(lambda *_: 2.0 * prod(rows) * prod(shape)) if many else None, only=only
    )


def on_gpu(N: int, K: int, bits: int = 4, group: int = 64, mode: str = "affine", rows: int = 1) -> Case:
    """A shape of a real model, too large to be made on a CPU."""
    name = f"{bits}bit" if mode == "affine" else mode
    return product(
        N,
        K,
        rows=(rows,),
        weight=lambda random, shape: random_packed(random, shape, bits, group, mode),
        name=name,
        serving=True,
        only="cuda",
    )


def every_width() -> list[Case]:
    """The first of each is small enough for kernels that sum small matrices exactly, the others are not."""
    cases = []
    for bits in (2, 3, 4, 5, 6, 8):
        for group, N, K, rows in ((32, 37, 224, (3,)), (64, 97, 704, (6,)), (128, 53, 1280, (1,))):
            kind = torch.float16 if group == 128 and bits in (3, 4) else torch.bfloat16
            kind = torch.float32 if group == 32 and bits in (4, 8) else kind
            weight = affine(bits, group, kind)
            cases.append(product(N, K, rows=rows, weight=weight, name=f"{bits}bit-g{group}"))
    return cases


def around_a_mean() -> list[Case]:
    """Activations of one sign: what codes add up to and what biases do are large then, and cancel."""
    return [
        product(97, 704, rows=(rows,), weight=affine(bits), name=f"{bits}bit", mean=4.0)
        for bits, rows in ((2, 1), (3, 3), (4, 1), (4, 9), (5, 2), (6, 1), (8, 1))
    ]


def reading(*shape: int, weight: Weight, name: str, dtype: torch.dtype, serving: bool = False) -> Case:
    def build(random: Random, _: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (weight(random, shape), dtype), {}

    said = f"{'x'.join(map(str, shape))}-{name}-{str(dtype).removeprefix('torch.')}"
    return Case(dequantize, said, build, serving)


def making(*shape: int, serving: bool = False, scale: float = 1.0, **format: Any) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random.normal(*shape, dtype=dtype, scale=scale),), format

    said = "-".join(f"{key}{value}" for key, value in format.items())
    return Case(quantize, f"{'x'.join(map(str, shape))}-{said}-x{scale:g}", build, serving)


def looking(
    V: int, K: int, *ids: int, weight: Weight, name: str, serving: bool = False, only: str | None = None
) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random.integers(0, V, *ids), weight(random, (V, K)), dtype), {}

    def touched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The rows asked for, and what is written."""
        chosen, w, dtype = args
        held = sum(int(t.nbytes) for t in tensors(w))
        return int(chosen.numel() * (held // V + K * dtype.itemsize))

    return Case(embed, f"{'x'.join(map(str, ids))}-of-{V}x{K}-{name}", build, serving, touched=touched, only=only)


CASES = [
    *every_width(),
    *around_a_mean(),
    product(45, 640, rows=(3,), weight=affine(2, 64), name="2bit"),
    product(70, 320, rows=(2,), weight=affine(2, 32), name="2bit"),
    product(21, 2240, rows=(1,), weight=affine(4, 64), name="4bit"),
    product(33, 96, rows=(2,), weight=small_float("mxfp4"), name="mxfp4"),
    product(209, 352, rows=(5,), weight=small_float("mxfp4"), name="mxfp4"),
    product(33, 80, rows=(5,), weight=small_float("nvfp4"), name="nvfp4"),
    product(210, 400, rows=(1,), weight=small_float("nvfp4", 3.25), name="nvfp4-global"),
    product(33, 96, rows=(3,), weight=small_float("mxfp8"), name="mxfp8"),
    product(303, 224, rows=(6,), weight=small_float("mxfp8"), name="mxfp8"),
    product(17, 300, rows=(3,), weight=dense(torch.bfloat16), name="bf16"),
    product(5, 1, rows=(1,), weight=dense(torch.bfloat16), name="bf16"),
    product(301, 257, rows=(9,), weight=dense(torch.float16), name="f16"),
    product(601, 130, rows=(2, 3), weight=dense(torch.float32), name="f32", strided=True),
    product(3, 519, 128, rows=(5,), weight=affine(), name="4bit"),
    product(2, 3, 11, 64, rows=(2,), weight=affine(8, 32), name="8bit"),
    product(3, 7, 40, rows=(4,), weight=dense(torch.bfloat16), name="bf16"),
    product(3, 21, 192, rows=(2,), weight=affine(4, 32), name="4bit", transpose=False),
    product(21, 448, rows=(3,), weight=affine(3, 64), name="3bit", transpose=False),
    product(21, 448, rows=(1,), weight=affine(8, 64), name="8bit", transpose=False),
    product(21, 96, rows=(2,), weight=small_float("mxfp8"), name="mxfp8", transpose=False),
    product(2, 33, 70, rows=(3,), weight=dense(torch.float32), name="f32", transpose=False),
    product(37, 128, rows=(0,), weight=affine(), name="4bit"),
    product(37, 128, rows=(3,), weight=affine(), name="4bit", strided=True),
    product(4096, 2048, weight=affine(), name="4bit", serving=True),
    product(2048, 2048, weight=affine(8), name="8bit", serving=True),
    product(2048, 512, weight=affine(2), name="2bit", serving=True),
    product(1024, 2048, weight=affine(6), name="6bit", serving=True),
    product(1024, 2048, weight=small_float("mxfp4"), name="mxfp4", serving=True),
    product(256, 7168, weight=dense(torch.bfloat16), name="bf16", serving=True),
    product(1024, 2048, rows=(8,), weight=affine(), name="4bit", serving=True),
    product(1024, 2048, rows=(256,), weight=affine(), name="4bit", serving=True),
    product(32, 2048, rows=(128,), weight=affine(), name="4bit", serving=True),
    product(1, 2048, rows=(128,), weight=affine(8), name="8bit", serving=True),
    product(16, 128, 512, rows=(1,), weight=affine(), name="4bit", transpose=False, serving=True),
    product(16, 128, 512, rows=(1,), weight=affine(), name="4bit", serving=True),
    reading(3, 5, 192, weight=affine(5, 32), name="5bit", dtype=torch.float32),
    reading(7, 192, weight=affine(4, 64), name="4bit", dtype=torch.bfloat16),
    reading(0, 192, weight=affine(4, 64), name="4bit", dtype=torch.float32),
    reading(7, 192, weight=affine(3, 64, torch.float16), name="3bit", dtype=torch.float16),
    reading(7, 96, weight=small_float("mxfp4"), name="mxfp4", dtype=torch.bfloat16),
    reading(7, 96, weight=small_float("mxfp8"), name="mxfp8", dtype=torch.float32),
    reading(7, 80, weight=small_float("nvfp4", 0.7), name="nvfp4", dtype=torch.float32),
    reading(1024, 2048, weight=affine(), name="4bit", dtype=torch.float32, serving=True),
    making(3, 7, 192, bits=3, group=64),
    making(9, 256, bits=8, group=128, scale=1e-6),
    making(9, 96, bits=5, group=32),
    making(9, 96, mode="mxfp4"),
    making(9, 96, mode="mxfp8"),
    making(9, 96, mode="nvfp4", global_scale=2.5),
    making(0, 64, bits=4),
    making(512, 2048, serving=True, bits=4, group=64),
    looking(11, 192, 2, 3, weight=affine(6), name="6bit"),
    looking(11, 70, 5, weight=dense(torch.bfloat16), name="bf16"),
    looking(11, 96, 4, weight=small_float("mxfp4"), name="mxfp4"),
    looking(11, 64, 0, weight=affine(), name="4bit"),
    looking(4096, 2048, 1, weight=affine(), name="4bit", serving=True),
    looking(4096, 2048, 512, weight=affine(), name="4bit", serving=True),
    *(on_gpu(248320, 2048, bits) for bits in (2, 3, 4, 5, 6, 8)),
    on_gpu(248320, 2048, 4, 32, "mxfp4"),
    on_gpu(248320, 2048, 8, 32, "mxfp8"),
    on_gpu(248320, 2048, 4, 16, "nvfp4"),
    *(on_gpu(N, K) for N, K in ((12288, 4096), (2048, 4096), (1024, 4096))),
    *(on_gpu(12288, 4096, rows=rows) for rows in (2, 8, 64, 512, 2048)),
    looking(248320, 2048, 1, weight=large_affine, name="4bit", serving=True, only="cuda"),
    looking(248320, 2048, 2048, weight=large_affine, name="4bit", serving=True, only="cuda"),
]
