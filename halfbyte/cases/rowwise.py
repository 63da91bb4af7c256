"""Cases of the row ops. Serving shapes: the hidden sizes and heads of Qwen3.5, Gemma 4 and DeepSeek-V3."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.rowwise import glu, rms_norm, rms_norm_chain, rms_norm_many, rope, softcap
from .case import Case, Random


def norm(
    *shape: int,
    serving: bool = False,
    only: str | None = None,
    scale: float = 1.0,
    weight: torch.dtype | None = torch.bfloat16,
    strided: bool = False,
    eps: float = 1e-6,
    **options: Any,
) -> Case:
    """A norm of `shape`; `options` name the tensors to pass (True) or their values."""

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        kwargs: dict[str, Any] = {}
        for name, value in options.items():
            if name in ("add", "mul", "gate", "residual"):
                value = make(*shape, dtype=dtype, scale=scale if name == "add" else 1.0)
            elif name == "scale_vector":
                name, value = "scale", random.normal(shape[-1])
            elif name == "scale_number":
                name = "scale"
            kwargs[name] = value
        w = None if weight is None else random.normal(shape[-1], dtype=weight)
        return (make(*shape, dtype=dtype, scale=scale), w, eps), kwargs

    said = [*options, *(["strided"] if strided else []), *([f"x{scale:g}"] if scale != 1 else [])]
    said += ["no-weight"] if weight is None else [str(weight).removeprefix("torch.")]
    return Case(rms_norm, "x".join(map(str, shape)) + "".join(f"-{s}" for s in said), build, serving, only=only)


def many(*shape: int, count: int = 3, serving: bool = False, only: str | None = None) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        weights = [random.normal(shape[-1]) for _ in range(count)]
        return (random.normal(*shape, dtype=dtype, scale=1e-2), weights), {}

    return Case(rms_norm_many, f"{'x'.join(map(str, shape))}-{count}", build, serving, only=only)


def chain(*shape: int, count: int = 3, end: bool = False, serving: bool = False, only: str | None = None) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, residual = random.normal(*shape, dtype=dtype, scale=1e-2), random.normal(*shape, dtype=dtype)
        weights = [random.normal(shape[-1], dtype=torch.bfloat16) for _ in range(count)]
        tail = {"residual2": random.normal(*shape, dtype=dtype), "scale": random.normal(shape[-1])} if end else {}
        return (x, random.normal(shape[-1]), residual, weights, 1e-5), tail

    name = f"{'x'.join(map(str, shape))}-{count}{'-end' if end else ''}"
    return Case(rms_norm_chain, name, build, serving, only=only)


def gated(*shape: int, activation: str, serving: bool = False, strided: bool = False, only: str | None = None) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        return (make(*shape, dtype=dtype, scale=4.0), make(*shape, dtype=dtype), activation), {}

    name = f"{'x'.join(map(str, shape))}-{activation}{'-strided' if strided else ''}"
    return Case(glu, name, build, serving, only=only)


def rotate(
    *shape: int,
    rotary: int | None = None,
    interleaved: bool = False,
    scale: float = 1.0,
    start: int = 0,
    serving: bool = False,
    strided: bool = False,
    only: str | None = None,
) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        pairs = (rotary or shape[-1]) // 2
        inv_freq = 10_000.0 ** -(torch.arange(pairs, dtype=torch.float64, device=random.device) / pairs)
        positions = start + torch.arange(shape[-3], dtype=torch.int32, device=random.device)
        return (make(*shape, dtype=dtype), positions, inv_freq), {
            "rotary": rotary,
            "interleaved": interleaved,
            "scale": scale,
        }

    said = [f"of{rotary}"] if rotary else []
    said += ["pairs"] if interleaved else []
    said += [f"at{start}"] if start else []
    said += ["strided"] if strided else []
    return Case(rope, "x".join(map(str, shape)) + "".join(f"-{s}" for s in said), build, serving, only=only)


def cap(*shape: int, cap: float, serving: bool = False, only: str | None = None) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random.normal(*shape, dtype=dtype, scale=2 * cap), cap), {}

    return Case(softcap, f"{'x'.join(map(str, shape))}-{cap:g}", build, serving, only=only)


ON_GPU: dict[str, Any] = {"serving": True, "only": "cuda"}

CASES = [
    norm(3, 5, 123),
    norm(2, 64, scale=1e-3),
    norm(1, 1),
    norm(7, 2880, weight=None),
    norm(4, 33, weight=torch.float16, strided=True),
    norm(0, 64),
    norm(3, 77, add=True, return_sum=True),
    norm(3, 77, add=True, scale_vector=True),
    norm(5, 130, mul=True),
    norm(3, 2, 128, gate=True),
    norm(5, 129, residual=True, scale_number=0.37),
    norm(2, 31, add=True, mul=True, gate=True, residual=True, scale_vector=True, return_sum=True, strided=True),
    norm(3, 4, 70, weight=None, extra_dtype=torch.bfloat16, head_major=True),
    norm(5, 3, 96, head_major=True),
    norm(6, 50, extra_dtype=torch.float16, return_sum=True),
    norm(1, 2048, serving=True),
    norm(1, 7168, add=True, return_sum=True, serving=True),
    norm(512, 2816, serving=True),
    norm(32, 128, gate=True, serving=True),
    many(3, 123),
    many(2, 5, 64, count=1),
    many(0, 64),
    many(1, 2816, serving=True),
    many(256, 2816, serving=True),
    chain(3, 123),
    chain(17, 24, count=1, end=True),
    chain(0, 24),
    chain(1, 2816, serving=True),
    chain(256, 2816, count=1, end=True, serving=True),
    gated(3, 257, activation="silu"),
    gated(3, 257, activation="gelu_tanh"),
    gated(3, 257, activation="sigmoid"),
    gated(5, 31, activation="silu", strided=True),
    gated(0, 8, activation="silu"),
    gated(8, 512, activation="silu", serving=True),
    gated(512, 2112, activation="gelu_tanh", serving=True),
    rotate(5, 3, 64),
    rotate(2, 5, 3, 48, rotary=20),
    rotate(7, 2, 64, interleaved=True, scale=1.3),
    rotate(4, 1, 32, start=999_997),
    rotate(5, 3, 66, rotary=34, interleaved=True, strided=True),
    rotate(0, 3, 64),
    rotate(1, 16, 256, rotary=64, start=4096, serving=True),
    rotate(512, 16, 256, rotary=64, serving=True),
    rotate(512, 16, 64, interleaved=True, serving=True),
    cap(3, 257, cap=30.0),
    cap(0, 4, cap=1.0),
    cap(1, 262144, cap=30.0, serving=True),
    norm(2, 40_000, only="cuda", add=True, residual=True, return_sum=True),
    chain(2, 40_000, only="cuda", count=2, end=True),
    norm(1, 4096, **ON_GPU),
    norm(2048, 4096, **ON_GPU),
    norm(2048, 4096, **ON_GPU, add=True, return_sum=True),
    norm(2048, 4096, **ON_GPU, gate=True),
    norm(2048, 4096, **ON_GPU, residual=True, scale_number=0.37),
    norm(2048, 7168, **ON_GPU, add=True, return_sum=True),
    norm(2048, 16, 256, **ON_GPU),
    norm(2048, 16, 256, **ON_GPU, head_major=True),
    norm(2048, 32, 128, **ON_GPU, gate=True),
    many(2048, 4096, **ON_GPU),
    chain(2048, 4096, **ON_GPU),
    chain(2048, 4096, count=1, end=True, **ON_GPU),
    gated(2048, 4096, activation="silu", **ON_GPU),
    gated(2048, 4096, activation="gelu_tanh", **ON_GPU),
    rotate(2048, 16, 256, rotary=64, **ON_GPU),
    rotate(2048, 64, 128, **ON_GPU),
    rotate(2048, 128, 64, interleaved=True, start=1 << 17, **ON_GPU),
    cap(2048, 4096, cap=30.0, **ON_GPU),
    cap(64, 262_144, cap=30.0, **ON_GPU),
]
