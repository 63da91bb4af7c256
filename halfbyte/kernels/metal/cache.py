"""Appending to caches on an Apple GPU: a thread a number, wherever the cache keeps it."""

from __future__ import annotations

from math import prod

from torch import Tensor

from .shaders import MSL, blocks, flat, kernel, launch

HAS_SLOTS, HAS_LENGTHS, IS_RING = 1, 2, 4
COLUMNS = 256


def append(
    cache: Tensor, new: Tensor, *, slots: Tensor | None = None, lengths: Tensor | None = None, ring: bool = False
) -> Tensor:
    if new.numel() == 0:
        return cache
    B, L, S = new.shape[0], new.shape[1], cache.shape[1]
    places = cache.reshape(*cache.shape[:2], 1, 1) if cache.ndim == 2 else cache.view(*_as_heads(cache))
    H, D = places.shape[2:]
    given = flat(new)
    named = [given if t is None else flat(t) for t in (slots, lengths)]
    kinds = ["int" if t is given else MSL[t.dtype] for t in named]
    flags = HAS_SLOTS * (slots is not None) + HAS_LENGTHS * (lengths is not None) + IS_RING * ring
    launch(
        kernel("cache", "append", MSL[cache.dtype], MSL[new.dtype], *kinds), places, given, *named, L, S, H, D,
        places.stride(), flags, groups=(blocks(H * D, COLUMNS), L, B), size=(COLUMNS, 1, 1),
    )  # fmt: skip
    return cache


def _as_heads(cache: Tensor) -> tuple[int, ...]:
    """[slots, S, heads, D] of a cache: all axes between the second and the last are heads."""
    return (*cache.shape[:2], prod(cache.shape[2:-1]), cache.shape[-1])
