"""The blocks models are built from. Each takes its weights by name when it is made, and calls ops when it is run.

Tokens come flat, x [T, ...]; what looks into a request's past goes through the step's runs. What a block adds to the
stream h is left to the next norm, as the pair (h, r): one pass sums, keeps the sum in float32 and normalises it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..cache import Kept
from ..checkpoint import Weights
from ..ops.attention import attention
from ..ops.cache import append
from ..ops.experts import expert_mlp
from ..ops.quant import embed, qmm
from ..ops.routing import combine, route
from ..ops.rowwise import glu, rms_norm
from ..step import Run, Step
from .rotary import Rope

EPS = 1e-6  # of norms, where the config does not say


def wide_on_cpu(weight: Tensor) -> Tensor:
    """A vector of weights as CPU kernels compute with it: widened once, which is exact, instead of at every call."""
    return weight.float() if weight.is_cpu else weight


class Linear:
    """y = x wᵀ, for a quantised or a dense weight [N, K]; `biased`, + bias [N]."""

    def __init__(self, weights: Weights, name: str, N: int, K: int, biased: bool = False) -> None:
        self.weight = weights.linear(name, N, K)
        self.bias = wide_on_cpu(weights.tensor(f"{name}.bias", N)) if biased else None

    def __call__(self, x: Tensor) -> Tensor:
        y = qmm(x, self.weight)
        return y if self.bias is None else (y + self.bias).to(y.dtype)


class Embedding:
    """A table [V, K]: rows by id, and, tied, the projection back to the vocabulary."""

    def __init__(self, weights: Weights, name: str, V: int, K: int) -> None:
        self.weight = weights.linear(name, V, K)

    def __call__(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return embed(ids, self.weight, dtype)

    def project(self, x: Tensor) -> Tensor:
        return qmm(x, self.weight)


class Norm:
    """y = x / sqrt(mean x² + eps) weight."""

    def __init__(self, weights: Weights, name: str, D: int, eps: float) -> None:
        self.weight, self.eps = wide_on_cpu(weights.tensor(f"{name}.weight", D)), eps

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None, **more: Tensor | float | None) -> Tensor:
        """In x's dtype, or rounded once to another."""
        if dtype in (None, x.dtype):
            y: Tensor = rms_norm(x, self.weight, self.eps, **more)  # type: ignore[arg-type]
            return y
        return rms_norm(x, self.weight, self.eps, extra_dtype=dtype, **more)[-1]  # type: ignore

    def after(self, h: Tensor, r: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(norm of h + r in dtype, h + r in h's)"""
        if r is None:
            return self(h, dtype), h
        extra = None if dtype == h.dtype else dtype
        y, h, *copy = rms_norm(h, self.weight, self.eps, add=r, return_sum=True, extra_dtype=extra)
        return copy[0] if copy else y, h


class GatedMLP:
    """down(activation(gate x) · up x)"""

    def __init__(self, weights: Weights, H: int, I: int, activation: str = "silu") -> None:  # noqa: E741
        self.gate, self.up = Linear(weights, "gate_proj", I, H), Linear(weights, "up_proj", I, H)
        self.down, self.activation = Linear(weights, "down_proj", H, I), activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(glu(self.gate(x), self.up(x), self.activation))


class MixtureBlock:
    """The sum of the chosen experts' outputs, weighted by the router, + the shared expert, gated or not."""

    def __init__(
        self,
        weights: Weights,
        H: int,
        I: int,  # noqa: E741
        E: int,
        router: Callable[[Tensor], tuple[Tensor, Tensor]],
        shared: tuple[str, int] | None = None,
        shared_gate: str | None = None,
    ) -> None:
        self.router = router
        self.experts = weights.experts("switch_mlp", E, I, H)
        self.shared = None if shared is None else GatedMLP(weights / shared[0], H, shared[1])
        self.shared_gate = None if shared_gate is None else Linear(weights, shared_gate, 1, H)

    def __call__(self, x: Tensor) -> Tensor:
        ids, shares = self.router(x)
        y = expert_mlp(x, ids, self.experts)
        shared = None if self.shared is None else self.shared(x)
        gate = None if self.shared_gate is None else self.shared_gate(x).flatten()
        return combine(y, shares, shared=shared, shared_gate=gate)


class SoftmaxRouter:
    """The k largest of softmax(gate x), renormalised or not."""

    def __init__(self, weights: Weights, H: int, E: int, k: int, renormalise: bool) -> None:
        self.gate, self.k, self.renormalise = Linear(weights, "gate", E, H), k, renormalise

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return route(self.gate(x), self.k, renormalise=self.renormalise)


class Attention:
    """Grouped-query attention with normalised queries and keys; `gated` multiplies its output by sigmoid(gate).

    Gated, the query projection holds [query | gate] for each head. `biased`: all four projections have a bias.
    """

    def __init__(
        self,
        weights: Weights,
        H: int,
        heads: int,
        kv_heads: int,
        D: int,
        eps: float,
        rope: Rope,
        *,
        gated: bool = False,
        biased: bool = False,
    ) -> None:
        self.heads, self.kv_heads, self.D, self.gated, self.rope = heads, kv_heads, D, gated, rope
        self.q = Linear(weights, "q_proj", heads * D * (2 if gated else 1), H, biased)
        self.k, self.v = (Linear(weights, name, kv_heads * D, H, biased) for name in ("k_proj", "v_proj"))
        self.o = Linear(weights, "o_proj", H, heads * D, biased)
        self.q_norm, self.k_norm = Norm(weights, "q_norm", D, eps), Norm(weights, "k_norm", D, eps)

    @property
    def kept(self) -> Kept:
        return Kept(rows={"k": (self.kv_heads, self.D), "v": (self.kv_heads, self.D)})

    def __call__(self, x: Tensor, step: Step, kept: dict[str, Tensor]) -> Tensor:
        T = len(x)
        q, k, v = (
            self.q(x).view(T, self.heads, -1),
            self.k(x).view(T, self.kv_heads, -1),
            self.v(x).view(T, self.kv_heads, -1),
        )
        q, gate = (q[..., : self.D], q[..., self.D :]) if self.gated else (q, None)
        q = self.rope(self.q_norm(q), step.positions)
        k = self.rope(self.k_norm(k), step.positions)
        o = attend(step, kept, q, k, v, scale=self.D**-0.5)
        return self.o((o if gate is None else glu(gate, o, "sigmoid")).view(T, -1))


def attend(
    step: Step,
    kept: dict[str, Tensor],
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Append keys and values, then attend: q [T, heads, D]. Without them the layer reads what another has appended."""

    def work(run: Run, q: Tensor, *new: Tensor) -> Tensor:
        for name, rows in zip(("k", "v"), new, strict=False):
            append(kept[name], rows, slots=run.slots, lengths=run.lengths, ring=window is not None)
        o: Tensor = attention(q, kept["k"], kept["v"], scale=scale, window=window, lengths=run.lengths, slots=run.slots)
        return o

    return step.each_run(work, q, *(x for x in (k, v) if x is not None))
