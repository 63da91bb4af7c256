"""Cases of the recurrent ops. Serving shapes: Qwen3.5 (16 q and k heads, 32 v heads of 128; 8192 channels, width 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import normalize

from ..ops.recurrent import causal_conv, delta_gates, gated_delta
from .case import Case, Random


def conv(
    B: int,
    L: int,
    C: int,
    W: int = 4,
    *,
    slots: tuple[int, ...] | None = None,
    stored: torch.dtype = torch.float32,
    weight: torch.dtype = torch.bfloat16,
    third: bool = False,
    strided: bool = False,
    activation: str | None = "silu",
    serving: bool = False,
    only: str | None = None,
) -> Case:
    """`third`: the weight has its third axis."""

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        x, w = make(B, L, C, dtype=dtype), random.normal(C, W, dtype=weight)
        kwargs: dict[str, Any] = {"state": make(B if serving else B + 2, W - 1, C, dtype=stored)}
        if slots is not None:
            kwargs["slots"] = torch.tensor(slots)
        return (x, w[..., None] if third else w), {**kwargs, "activation": activation}

    said = [str(stored).removeprefix("torch."), activation or "plain", "third" if third else ""]
    said += ["slots" if slots else "", "strided" if strided else ""]
    name = f"{B}x{L}x{C}x{W}" + "".join(f"-{s}" for s in said if s)
    return Case(causal_conv, name, build, serving, mutates=("state",), only=only)


def gates(
    *shape: int, scale: float = 3.0, strided: bool = False, serving: bool = False, only: str | None = None
) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        a, b = make(*shape, dtype=dtype, scale=scale), make(*shape, dtype=dtype, scale=scale)
        return (a, b, random.normal(shape[-1]), random.normal(shape[-1], dtype=torch.bfloat16)), {}

    name = f"{'x'.join(map(str, shape))}-x{scale:g}{'-strided' if strided else ''}"
    return Case(delta_gates, name, build, serving, only=only)


def delta(
    B: int,
    L: int,
    Hk: int,
    Hv: int,
    Dk: int,
    Dv: int,
    *,
    form: str | None = None,
    slots: tuple[int, ...] | None = None,
    zeros: bool = False,
    kept: bool = False,
    strided: bool = False,
    in_place: bool = True,
    serving: bool = False,
    only: str | None = None,
) -> Case:
    """Keys of length 1 and decays near 1, as models have them; `zeros` puts decays of 0 and of 1e-30 among them.

    `kept` has decays so near 1 that a state outlives many chunks, and keys that repeat.
    """

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        q, k = (normalize(make(B, L, Hk, Dk), dim=-1).to(dtype) for _ in range(2))
        g, beta = torch.exp(-0.3 * make(B, L, Hv).abs()), torch.sigmoid(make(B, L, Hv))
        if zeros:
            g[:, 1::5], g[:, 3::7] = 0.0, 1e-30
        if kept:
            g, k = g**0.03, torch.where((torch.arange(L, device=k.device) % 3 == 0)[:, None, None], k[:, :1], k)
        state = make(B if serving else B + 2, Hv, Dv, Dk)
        kwargs = {"state": state, "form": form, "in_place": in_place}
        if slots is not None:
            kwargs["slots"] = torch.tensor(slots, dtype=torch.int32)
        return (q, k, make(B, L, Hv, Dv, dtype=dtype), g, beta), kwargs

    def flops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Of the rule itself: S k, the outer product and S q of each token. The chunked form does more of them."""
        return 6.0 * B * L * Hv * Dv * Dk

    said = [form or "", "slots" if slots else "", "zeros" if zeros else "", "kept" if kept else ""]
    said += ["strided" if strided else "", "" if in_place else "copy"]
    name = f"{B}x{L}x{Hk}.{Hv}x{Dk}.{Dv}" + "".join(f"-{s}" for s in said if s)
    return Case(gated_delta, name, build, serving, mutates=("state",), flops=flops if L > 1 else None, only=only)


CASES = [
    conv(2, 5, 37, slots=(3, 1)),
    conv(2, 1, 37, stored=torch.bfloat16, slots=(0, 3)),
    conv(1, 2, 300, 7, stored=torch.float16, weight=torch.float16),
    conv(2, 3, 16, 2, activation=None, third=True, weight=torch.float32),
    conv(2, 9, 21, strided=True),
    conv(1, 30, 33),
    conv(2, 0, 8),
    conv(0, 3, 8),
    conv(1, 1, 8192, third=True, serving=True),
    conv(1, 128, 8192, third=True, serving=True),
    gates(3, 5),
    gates(2, 7, 33, strided=True),
    gates(4, 16, scale=60.0),
    gates(0, 4),
    gates(1, 32, serving=True),
    gates(512, 32, serving=True),
    delta(1, 1, 1, 1, 1, 1),
    delta(2, 7, 2, 6, 20, 33, slots=(3, 0)),
    delta(1, 40, 1, 2, 32, 16, zeros=True),
    delta(2, 5, 2, 2, 16, 48, in_place=False),
    delta(2, 5, 1, 2, 7, 5, in_place=False, slots=(2, 2), strided=True),
    delta(1, 0, 1, 2, 16, 16),
    delta(0, 3, 1, 2, 16, 16),
    delta(2, 71, 1, 2, 20, 33, form="chunked", slots=(3, 0)),
    delta(1, 70, 1, 2, 32, 16, form="chunked", zeros=True),
    delta(1, 33, 2, 2, 16, 16, form="chunked", in_place=False),
    delta(1, 150, 1, 3, 24, 40, form="chunked", kept=True),
    delta(1, 90, 1, 1, 64, 20, form="chunked", kept=True, strided=True),
    delta(1, 9, 1, 2, 32, 16, form="sequential"),
    delta(1, 1, 16, 32, 128, 128, serving=True),
    delta(1, 128, 16, 32, 128, 128, serving=True),
    delta(1, 128, 16, 32, 128, 128, form="chunked", serving=True),
    conv(1, 2048, 8192, third=True, serving=True, only="cuda"),
    conv(32, 1, 8192, third=True, serving=True, only="cuda"),
    gates(2048, 32, serving=True, only="cuda"),
    delta(32, 1, 16, 32, 128, 128, serving=True, only="cuda"),
    delta(1, 2048, 16, 32, 128, 128, serving=True, only="cuda"),
    delta(1, 16384, 16, 32, 128, 128, serving=True, only="cuda"),
]
