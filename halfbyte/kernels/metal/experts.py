"""Experts on an Apple GPU. Few choices are matrix-vector products; many are sorted by expert, so that weights are read
once for every 32 tokens that chose an expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .quant import BLOCK, MODES, ROWS_A_GROUP, THREADS, Weights, weights
from .rowwise import glu
from .shaders import MSL, blocks, delivered, flat, kernel, launch, result

FEW = 16  # choices that are not worth sorting
NOWHERE = (0,)  # in place of addresses


class Choices(NamedTuple):
    """Which experts a call's tokens go to; the lists are there where choices are sorted."""

    ids: Tensor  # [T, A]
    sorted: Tensor | None = None  # the choices t A + a, by expert
    starts: Tensor | None = None  # where each expert's begin, and the end
    tiles: Tensor | None = None  # the number of each expert's first tile


def expert_qmm(x: Tensor, ids: Tensor, w: Any, *, out: Tensor | None = None) -> Tensor:
    made = result(out, (*ids.shape, w.shape[1]), x.dtype, x.device)
    if made.numel():
        _project(flat(x), _choices(ids, w.shape[0]), w, made)
    return delivered(made, out)


def expert_mlp(x: Tensor, ids: Tensor, experts: Any, activation: str = "silu", *, out: Tensor | None = None) -> Tensor:
    made = result(out, (*ids.shape, experts.down.shape[1]), x.dtype, x.device)
    if made.numel():
        given, choices = flat(x), _choices(ids, experts.gate.shape[0])
        shape = (*ids.shape, experts.gate.shape[1])
        gate, up = (torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2))
        _project(given, choices, experts.gate, gate)
        _project(given, choices, experts.up, up)
        _project(glu(gate, up, activation, out=up), choices, experts.down, made)
    return delivered(made, out)


def _choices(ids: Tensor, E: int) -> Choices:
    if ids.numel() <= FEW:
        return Choices(flat(ids))
    wanted, order = ids.flatten().long().sort(stable=True)
    starts = torch.searchsorted(wanted, torch.arange(E + 1, device=ids.device))
    tiles = (starts.diff() + BLOCK - 1) // BLOCK
    return Choices(flat(ids), order, starts, torch.cat([tiles.new_zeros(1), tiles.cumsum(0)]))


def _project(x: Tensor, choices: Choices, w: Any, y: Tensor) -> None:
    """y[t, a] = w[ids[t, a]] x[t], or x[t, a]."""
    E, N, K = w.shape
    A, count = choices.ids.shape[1], choices.ids.numel()
    given, apart = _parts(w)
    share = A if x.ndim == 2 else 1
    listed = choices.ids if choices.sorted is None else choices.sorted
    types = MSL[x.dtype], MSL[y.dtype], MSL[listed.dtype], *given.types, int(apart[0] is not NOWHERE)
    shared = x, listed, *given.tensors, *apart, y, N, K, share, given.strides, given.factor_step
    if choices.sorted is None:
        groups = blocks(N, ROWS_A_GROUP), count
        launch(kernel("experts", "chosen_matvec", *types), *shared, groups=groups, size=(THREADS, 1))
    else:
        tiles = blocks(N, BLOCK), blocks(count, BLOCK) + min(E, count)
        chosen = kernel("experts", "chosen_gemm", *types)
        launch(chosen, *shared, choices.starts, choices.tiles, E, groups=tiles, size=(128, 1))


def _parts(w: Any) -> tuple[Weights, tuple[Any, Any, Any]]:
    """A projection's weights, and lists of where its experts lie where they lie apart."""
    if isinstance(w, Tensor) or not isinstance(w.words, tuple):
        return weights(w), (NOWHERE,) * 3
    first = w.words[0]
    kinds = (MSL[w.scale_dtype], MODES[w.mode], w.bits, w.group)
    lists = list(w.words), list(w.scales), list(w.biases or w.scales)
    return Weights((first,) * 4, (0,) * 4, -1, kinds), lists
