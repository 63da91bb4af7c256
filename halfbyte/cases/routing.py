"""Cases of routing and combining. Serving shapes: the experts of Qwen3.5, Qwen3-Next, Gemma 4 and DeepSeek-V3."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.routing import combine, route
from .case import Case, Random


def choose(
    *shape: int,
    k: int,
    scale: float = 2.0,
    bias: bool = False,
    expert_scale: bool = False,
    strided: bool = False,
    serving: bool = False,
    only: str | None = None,
    **options: Any,
) -> Case:
    """Routing of `shape` [..., E]; `options` go to the op as they are."""

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        kwargs = dict(options)
        if bias:
            kwargs["bias"] = random.normal(shape[-1], scale=0.3)
        if expert_scale:
            kwargs["per_expert_scale"] = random.normal(shape[-1], dtype=torch.bfloat16)
        return (make(*shape, dtype=dtype, scale=scale), k), kwargs

    said = [f"k{k}"] + ["bias"] * bias + ["expert-scale"] * expert_scale + ["strided"] * strided
    said += [f"{name}={value}" for name, value in options.items()] + ([f"x{scale:g}"] if scale != 2 else [])
    return Case(route, "x".join(map(str, shape)) + "".join(f"-{s}" for s in said), build, serving, only=only)


def gather(
    *shape: int,
    residual: bool = False,
    shared: bool = False,
    gate: int = 0,
    strided: bool = False,
    serving: bool = False,
    only: str | None = None,
) -> Case:
    """Combining of y [..., A, D]; gate 1 or 2 is shared_gate as [...] or [..., 1]."""

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        result = (*shape[:-2], shape[-1])
        kwargs: dict[str, Any] = {}
        if residual:
            kwargs["residual"] = make(*result, dtype=dtype)
        if shared:
            kwargs["shared"] = make(*result, dtype=dtype)
        if gate:
            kwargs["shared_gate"] = random.normal(*result[:-1], *([1] if gate == 2 else []), dtype=dtype, scale=2.0)
        return (make(*shape, dtype=dtype), torch.softmax(random.normal(*shape[:-1]), -1)), kwargs

    said = ["residual"] * residual + ["shared"] * shared + [f"gate{gate}"] * bool(gate) + ["strided"] * strided
    return Case(combine, "x".join(map(str, shape)) + "".join(f"-{s}" for s in said), build, serving, only=only)


def bucket(M: int, T: int, D: int, *, serving: bool = False, only: str | None = None) -> Case:
    """Serving accumulates in place."""

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        residual, tokens = random.normal(T, D, dtype=dtype), random.integers(0, max(T, 1), M)
        options = {"residual": residual, "tokens": tokens} | ({"out": residual} if serving else {})
        return (random.normal(M, D, dtype=dtype), random.normal(M)), options

    return Case(combine, f"bucket-{M}x{D}-to-{T}", build, serving, only=only)


DEEPSEEK: dict[str, Any] = {"kind": "sigmoid", "bias": True, "groups": 8, "keep_groups": 4, "scaling": 2.5}
ON_GPU: dict[str, Any] = {"serving": True, "only": "cuda"}

CASES = [
    choose(3, 5, 37, k=5),
    choose(7, 1, k=1),
    choose(4, 19, k=19, renormalise=False),
    choose(37, k=3),
    choose(0, 8, k=2),
    choose(5, 129, k=6, expert_scale=True, scaling=0.37),
    choose(5, 129, k=6, scale=40.0, renormalise=False),
    choose(6, 50, k=7, bias=True, strided=True),
    choose(6, 33, k=4, kind="sigmoid"),
    choose(6, 33, k=4, kind="sigmoid", bias=True, renormalise=False, scaling=2.5),
    choose(5, 42, k=6, groups=7, keep_groups=3),
    choose(5, 42, k=6, bias=True, groups=14, keep_groups=2),
    choose(5, 12, k=4, kind="sigmoid", bias=True, groups=12, keep_groups=5),
    choose(3, 4096, k=100),
    choose(5, 77, k=9, order="slot"),
    choose(5, 77, k=9, order="slot", renormalise=False, expert_scale=True),
    choose(70, 300, k=11),
    choose(1, 256, k=8, serving=True),
    choose(512, 256, k=8, serving=True),
    choose(1, 512, k=10, serving=True),
    choose(512, 128, k=8, expert_scale=True, serving=True),
    choose(1, 256, k=8, serving=True, **DEEPSEEK),
    choose(512, 256, k=8, serving=True, **DEEPSEEK),
    gather(3, 5, 123),
    gather(2, 3, 4, 33, residual=True, shared=True, gate=1, strided=True),
    gather(3, 7, 130, residual=True, shared=True, gate=2),
    gather(5, 1, 48, shared=True),
    gather(6, 31, residual=True),
    gather(17, 6, 600, residual=True, shared=True),
    gather(0, 4, 8, residual=True),
    gather(1, 8, 2048, residual=True, shared=True, gate=2, serving=True),
    gather(512, 8, 2048, residual=True, shared=True, gate=2, serving=True),
    gather(1, 8, 7168, residual=True, shared=True, serving=True),
    gather(1, 10, 4096, residual=True, shared=True, gate=2, serving=True),
    bucket(13, 5, 67),
    bucket(0, 3, 16),
    bucket(40, 9, 700),
    bucket(64, 512, 2048, serving=True),
    choose(2048, 256, k=8, **ON_GPU),
    choose(2048, 128, k=8, expert_scale=True, **ON_GPU),
    choose(2048, 256, k=8, **ON_GPU, **DEEPSEEK),
    choose(2048, 512, k=10, **ON_GPU),
    gather(2048, 8, 2048, residual=True, shared=True, gate=2, **ON_GPU),
    gather(2048, 8, 7168, residual=True, shared=True, **ON_GPU),
    bucket(2048, 2048, 2048, **ON_GPU),
]
