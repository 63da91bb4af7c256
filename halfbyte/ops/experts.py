"""Experts: the same small network many times, of which each token uses a few.

The weights of one projection of all experts come in three shapes, none of which is copied: a stack (a `Packed` or dense
tensor [E, N, K]); one buffer a part, with an element offset for each expert; separate buffers, with byte offsets.
The last two are a `Scattered`. Where not all experts are in memory, a `Lender` hands out those that were chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import FLOATS, INTEGERS, as_one, deliver, kernel, require, require_floats, require_out, usual, wide
from .formats import Packed, require_format
from .quant import exact_weights, require_ids
from .rowwise import ACTIVATIONS, NAMED, activate


@dataclass(frozen=True)
class Scattered:
    """One quantised projection [E, N, K] whose experts lie apart: for each expert, byte views of its parts.

    words_i uint8 [N K bits / 8]   scales_i, biases_i uint8 [N (K / group) itemsize]; no biases in the fp modes
    """

    words: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    N: int
    K: int
    bits: int
    group: int
    mode: str = "affine"
    scale_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require_format("Scattered", self.bits, self.group, self.mode, reading=True)
        require(len(self.words) > 0, "Scattered", "words", "one buffer an expert, at least one")
        require(self.N > 0 and self.K > 0 and self.K % self.group == 0, "Scattered", "K", "whole groups", self.K)
        allowed = FLOATS[:3] if self.mode == "affine" else (torch.uint8,)
        require(self.scale_dtype in allowed, "Scattered", "scale_dtype", f"one of {allowed}", self.scale_dtype)
        scale_bytes = self.N * (self.K // self.group) * self.scale_dtype.itemsize
        wanted = {"words": self.N * self.K * self.bits // 8, "scales": scale_bytes, "biases": scale_bytes}
        for name, size in wanted.items():
            parts: tuple[Tensor, ...] = getattr(self, name)
            count = 0 if name == "biases" and self.mode != "affine" else len(self.words)
            require(len(parts) == count, "Scattered", name, f"{count} buffers", len(parts))
            for part in parts:
                whole = part.dtype == torch.uint8 and part.ndim == 1 and part.is_contiguous() and len(part) == size
                require(whole, "Scattered", name, f"{size} bytes, contiguous", part)

    @classmethod
    def at_elements(
        cls,
        parts: Sequence[Tensor],
        offsets: Sequence[Sequence[int]],
        shape: tuple[int, int],
        bits: int,
        group: int,
        mode: str = "affine",
    ) -> Scattered:
        """Experts in one flat buffer a part (words, scales, biases), expert e at element offsets[part][e]."""
        N, K = shape
        counts = (N * K * bits // 32, N * K // group, N * K // group)
        views = []
        for part, places, count in zip(parts, offsets, counts, strict=False):
            size, flat = part.element_size(), part.view(torch.uint8)
            views.append(tuple(_slice(flat, int(at) * size, count * size) for at in places))
        words, scales, biases = (*views, ())[:3]
        return cls(words, scales, biases, N, K, bits, group, mode, parts[1].dtype)

    @classmethod
    def at_bytes(
        cls,
        buffers: Sequence[Tensor],
        offsets: Sequence[int],
        shape: tuple[int, int],
        bits: int,
        group: int,
        mode: str = "affine",
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> Scattered:
        """Experts in a buffer of bytes each, their words, scales and biases at the same three offsets in every one."""
        N, K = shape
        sizes = [N * K * bits // 8, *[N * (K // group) * scale_dtype.itemsize] * 2]
        flat = [b.reshape(-1).view(torch.uint8) for b in buffers]
        views = [tuple(_slice(b, at, size) for b in flat) for at, size in zip(offsets, sizes, strict=False)]
        words, scales, biases = (*views, ())[:3]
        return cls(words, scales, biases, N, K, bits, group, mode, scale_dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (len(self.words), self.N, self.K)

    @property
    def device(self) -> torch.device:
        return self.words[0].device

    @cached_property
    def addresses(self) -> Tensor:
        """int64 [3, E]: where each expert's words, scales and biases begin (0 for biases that are absent)."""
        biases = [t.data_ptr() for t in self.biases] or [0] * len(self.words)
        return torch.tensor([[t.data_ptr() for t in self.words], [t.data_ptr() for t in self.scales], biases])

    def __getstate__(self) -> dict[str, object]:
        """What a copy starts from: its buffers lie elsewhere, so it must not inherit their addresses."""
        return {name: value for name, value in self.__dict__.items() if name != "addresses"}

    def expert(self, index: int) -> Packed:
        """One expert as a Packed: a copy, since bytes may lie at any alignment."""
        shape = (self.N, self.K // self.group)
        words = self.words[index].clone().view(torch.int32).reshape(self.N, -1)
        scales = self.scales[index].clone().view(self.scale_dtype).reshape(shape)
        biases = self.biases[index].clone().view(self.scale_dtype).reshape(shape) if self.biases else None
        return Packed(words, scales, biases, self.bits, self.group, self.mode)


Projection = Packed | Scattered | Tensor


@dataclass(frozen=True)
class Experts:
    """The three projections of E gated experts: gate and up [E, I, H], down [E, H, I]. A shared expert has E = 1.

    `among`: how many there are to choose from, where these are some of them: launch sizes follow from that, so that
    results do not depend on how many are here.
    """

    gate: Projection
    up: Projection
    down: Projection
    among: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        gate, up, down = (tuple(p.shape) for p in (self.gate, self.up, self.down))
        require(len(gate) == 3 and gate == up, "Experts", "gate and up", "[E, I, H] alike", gate, up)
        require(down == (gate[0], gate[2], gate[1]), "Experts", "down", "[E, H, I] for gate [E, I, H]", down, gate)

    @property
    def count(self) -> int:
        return int(self.gate.shape[0]) if self.among is None else self.among


class Loan(NamedTuple):
    """Experts in memory, for as long as it takes to compute with them: what some of the choices ids [T, A] need."""

    experts: Experts
    ids: Tensor  # of these experts: [T, A]; or [pairs, 1] where only some pairs (token, choice) are meant
    pairs: Tensor | None = None  # int64, those pairs, counted t A + a


class Lender(ABC):
    """Experts of which only some are in memory at a time. `shape` is that of the gates, (E, I, H).

    `asks`: the host reads which experts were chosen. A step that is recorded then has the whole of a layer's experts as
    one call.
    """

    shape: tuple[int, int, int]
    asks = False

    @abstractmethod
    def lend(self, ids: Tensor) -> Generator[Loan]:
        """Loans that together cover every choice of ids [T, A] once; each lasts until the next is asked for."""


def expert_qmm(x: Tensor, ids: Tensor, w: Projection, *, out: Tensor | None = None) -> Tensor:
    """y[t, a] = w[ids[t, a]] x[t], or x[t, a]: one projection of the chosen experts.

    x [T, K], shared by a token's experts, or [T, A, K]   ids [T, A] integers   w [E, N, K]   ->   y [T, A, N]

    An expert's weights are read once, however many tokens chose it. `out` must not overlap x.
    """
    _require_chosen("expert_qmm", x, ids, w)
    T, A = ids.shape
    require_out("expert_qmm", out, (T, A, w.shape[1]), x.dtype, x.device)
    if found := kernel("experts", "expert_qmm", x):
        return found(x, ids, w, out=out)  # type: ignore[no-any-return]
    rows = wide(x)
    y = torch.zeros(T, A, w.shape[1], dtype=rows.dtype, device=x.device)
    for index in ids.unique().tolist():
        t, a = (ids == index).nonzero(as_tuple=True)
        chosen = rows[t] if x.ndim == 2 else rows[t, a]
        y[t, a] = chosen @ _expert_weights(w, index, rows.dtype).mT
    return deliver(y, x.dtype, out)


def expert_mlp(
    x: Tensor, ids: Tensor, experts: Experts | Lender, activation: str = "silu", *, out: Tensor | None = None
) -> Tensor:
    """y[t, a] = down_e (activation(gate_e x) . (up_e x)) with e = ids[t, a].

    x [T, H], or [T, A, H] for an input of its own to each expert   ids [T, A]   ->   y [T, A, H], dtype of x

    Any number of tokens, experts and choices; what lies between stays float32. `out` must not overlap x.
    """
    if isinstance(experts, Lender):
        return _lent_mlp(x, ids, experts, activation, out)
    require(isinstance(experts, Experts), "expert_mlp", "experts", "an Experts", experts)
    require(activation in ACTIVATIONS, "expert_mlp", "activation", NAMED, activation)
    _require_chosen("expert_mlp", x, ids, experts.gate, "experts")
    T, A = ids.shape
    require_out("expert_mlp", out, (T, A, experts.down.shape[1]), x.dtype, x.device)
    if found := kernel("experts", "expert_mlp", x):
        return found(x, ids, experts, activation, out=out)  # type: ignore[no-any-return]
    rows = wide(x)
    y = torch.zeros(T, A, experts.down.shape[1], dtype=rows.dtype, device=x.device)
    for index in ids.unique().tolist():
        t, a = (ids == index).nonzero(as_tuple=True)
        chosen = rows[t] if x.ndim == 2 else rows[t, a]
        gate, up, down = (_expert_weights(w, index, rows.dtype).mT for w in (experts.gate, experts.up, experts.down))
        y[t, a] = (activate(chosen @ gate, activation) * (chosen @ up)) @ down
    return deliver(y, x.dtype, out)


def _lent_mlp(x: Tensor, ids: Tensor, lender: Lender, activation: str, out: Tensor | None) -> Tensor:
    """As many calls as there are loans: a pair's result does not depend on what is computed beside it."""
    require(isinstance(ids, Tensor) and ids.ndim == 2, "expert_mlp", "ids", "int32 or int64 [T, A]", ids)
    E, _, H = lender.shape
    require_ids("expert_mlp", "ids", ids, E)
    require_out("expert_mlp", out, (*ids.shape, H), x.dtype, x.device)
    y = torch.empty(*ids.shape, H, dtype=x.dtype, device=x.device) if out is None else out
    compute = as_one("lent_mlp", _compute_lent, x, opens=True) if lender.asks else _compute_lent
    return compute(x, ids, lender, activation, out=y)


def _compute_lent(x: Tensor, ids: Tensor, lender: Lender, activation: str, out: Tensor) -> Tensor:
    with closing(lender.lend(ids)) as loans:
        for loan in loans:
            if loan.pairs is None:
                expert_mlp(x, loan.ids, loan.experts, activation, out=out)
                continue
            t, a = loan.pairs // ids.shape[1], loan.pairs % ids.shape[1]
            rows = x[t] if x.ndim == 2 else x[t, a]
            out[t, a] = expert_mlp(rows, loan.ids, loan.experts, activation).squeeze(1)
    return out


def _expert_weights(w: Projection, index: int, dtype: torch.dtype) -> Tensor:
    if isinstance(w, Scattered):
        return exact_weights(w.expert(index), dtype)
    if isinstance(w, Tensor):
        return w[index].to(dtype)
    biases = None if w.biases is None else w.biases[index]
    scale = w.global_scale if w.global_scale is None or w.global_scale.numel() == 1 else w.global_scale[index]
    return exact_weights(Packed(w.words[index], w.scales[index], biases, w.bits, w.group, w.mode, scale), dtype)


def _require_chosen(op: str, x: Tensor, ids: Tensor, w: Projection, argument: str = "w") -> None:
    simple = type(w) is Packed and len(w.shape) == 3 and type(ids) is Tensor and ids.dtype in INTEGERS and ids.ndim == 2
    if not (simple and ids.shape[1] and ids.device == w.device and usual(x, (ids.shape[0], w.shape[2]), w.device)):
        _require_choice(op, x, ids, w, argument)
    require_ids(op, "ids", ids, w.shape[0])


def _require_choice(op: str, x: Tensor, ids: Tensor, w: Projection, argument: str) -> None:
    require(isinstance(x, Tensor), op, "x", "a tensor", x)
    require_floats(op, x.device, x=x)
    require(isinstance(ids, Tensor), op, "ids", "a tensor", ids)
    require(ids.dtype in INTEGERS and ids.ndim == 2, op, "ids", "int32 or int64 [T, A]", ids)
    require(ids.device == x.device, op, "ids", "on x's device", ids, x)
    require(ids.shape[1] > 0, op, "ids", "[T, A] with A > 0", ids)
    require(isinstance(w, Projection), op, argument, "a Packed, a Scattered or a tensor", w)
    require(w.device == x.device, op, argument, "on x's device", w.device, x)
    require(len(w.shape) == 3 and w.shape[2] > 0, op, argument, "[E, N, K]", tuple(w.shape))
    require(not isinstance(w, Tensor) or w.dtype in FLOATS, op, argument, "floats or quantised", w)
    shared, own = (ids.shape[0], w.shape[2]), (*ids.shape, w.shape[2])
    require(tuple(x.shape) in (shared, own), op, "x", "[T, K] or [T, A, K] for ids [T, A] and these weights", x, ids)


def _slice(flat: Tensor, start: int, size: int) -> Tensor:
    inside = start >= 0 and start + size <= len(flat)
    require(inside, "Scattered", "offsets", f"inside a buffer of {len(flat)} bytes", start, size)
    return flat[start : start + size]
