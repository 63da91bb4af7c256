"""Sampling on an Apple GPU: a threadgroup a row, in as many passes over its logits as the filters need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .shaders import MSL, delivered, flat, kernel, launch, result, row_threads

TOKENS = 8  # of a thread, before there are more threads


def sample(logits: Tensor, params: Any, seeds: Tensor, positions: Tensor, *, out: Tensor | None = None) -> Tensor:
    B, V = logits.shape
    ids = result(out, (B,), torch.int32, logits.device)
    if B:
        given = flat(logits)
        fields = params.temperature, params.top_k, params.top_p, params.min_p, *params[4:7]
        flags = sum(1 << i for i, field in enumerate(fields) if field is not None)
        kinds = [torch.int32 if field is params.top_k else torch.float32 for field in fields]
        each = [given if f is None else flat(f, d) for f, d in zip(fields, kinds, strict=True)]
        counts = given if params.counts is None else flat(params.counts)
        launch(
            kernel("sampling", "sample", MSL[logits.dtype], MSL[positions.dtype]), given, counts, *each, flat(seeds),
            flat(positions), ids, V, max(1, (V - 1).bit_length()), flags, groups=B, size=row_threads(V, TOKENS),
        )  # fmt: skip
    return delivered(ids, out)
