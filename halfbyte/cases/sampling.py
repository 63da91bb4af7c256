"""Cases of sampling. Serving shapes: the vocabulary of Qwen3.5, with its published defaults and in mixed batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.sampling import Sampling, sample
from .case import Case, Random

INTEGER = ("top_k",)


def draw(
    B: int,
    V: int,
    *,
    scale: float = 3.0,
    strided: bool = False,
    serving: bool = False,
    only: str | None = None,
    name: str = "",
    **fields: Any,
) -> Case:
    """B rows of V logits; a field is one number for all rows or a list of them, which repeats; counts=True makes
    counts."""

    def field(random: Random, name: str, value: Any) -> Tensor:
        if name == "counts":
            return (random.integers(0, 5, B, V) - 2).clamp(min=0)
        values = value if isinstance(value, list) else [value]
        dtype = torch.int32 if name in INTEGER else torch.float32
        return torch.tensor([values[row % len(values)] for row in range(B)], dtype=dtype)

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        logits = make(B, V, dtype=dtype, scale=scale)
        params = Sampling(**{key: field(random, key, value) for key, value in fields.items()})
        seeds = random.integers(-(2**63), 2**63 - 1, B, dtype=torch.int64)
        return (logits, params, seeds, random.integers(0, 2**40, B, dtype=torch.int64)), {}

    said = [name] if name else [f"{key}={value}" for key, value in fields.items()]
    said += ["strided"] * strided + ([f"x{scale:g}"] if scale != 3 else [])
    return Case(sample, f"{B}x{V}" + "".join(f"-{s}" for s in said), build, serving, only=only)


MIXED: dict[str, Any] = {
    "temperature": [0.7, 0.0, 1.0, 1.3, 0.6],
    "top_k": [20, 0, 0, 50, 3, 1000],
    "top_p": [0.8, 1.0, 0.95, 0.5],
    "min_p": [0.0, 0.05, 0.0],
}
PENALTIES: dict[str, Any] = {
    "counts": True,
    "repetition": [1.3, 1.0, 0.8],
    "presence": [0.0, 1.5],
    "frequency": [0.7, 0.0, -0.3],
}

CASES = [
    draw(3, 37),
    draw(1, 1, temperature=1.0),
    draw(0, 8, temperature=1.0),
    draw(7, 129, temperature=[0.0, 1.0, 0.3], strided=True),
    draw(9, 501, temperature=[0.5, 2.0], top_k=[1, 7, 0, 2000, 501]),
    draw(9, 501, temperature=1.5, top_p=[0.9, 0.3, 1.0, 1e-6], scale=1.0),
    draw(9, 501, temperature=1.5, min_p=[0.1, 0.0, 1.0, 0.01], scale=1.0),
    draw(60, 1003, name="mixed", **MIXED),
    draw(12, 333, temperature=[1.0, 0.0], **PENALTIES),
    draw(60, 67, name="mixed-penalties", scale=1.0, **MIXED, **PENALTIES),
    draw(5, 6001, temperature=1.0, top_p=0.999, scale=0.1),
    draw(5, 6001, temperature=1.0, top_k=3000, top_p=0.9, scale=0.1),
    draw(4, 5003, temperature=1.0, top_p=[0.5, 0.9], scale=0.0),
    draw(6, 4099, temperature=1.0, top_k=[300, 30], min_p=[0.0, 0.0, 0.2]),
    draw(1, 248320, name="greedy", temperature=0.0, serving=True),
    draw(1, 248320, temperature=0.7, top_k=20, top_p=0.8, serving=True),
    draw(1, 248320, temperature=1.0, serving=True),
    draw(8, 248320, name="mixed", serving=True, **MIXED),
    draw(1, 248320, temperature=1.0, top_p=0.95, serving=True, only="cuda"),
    draw(1, 248320, temperature=0.7, top_k=1000, top_p=0.8, serving=True, only="cuda"),
    draw(64, 248320, name="mixed", serving=True, only="cuda", **MIXED),
    draw(64, 151936, name="mixed-penalties", serving=True, only="cuda", **MIXED, **PENALTIES),
    draw(4, 262144, temperature=1.0, top_p=[0.95, 0.5], scale=5.0, serving=True, only="cuda"),
]
