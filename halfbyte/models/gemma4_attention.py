"""Attention of Gemma 4: windows and whole texts, in turn."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..cache import Kept
from ..checkpoint import Weights
from ..config import Config
from ..ops.rowwise import rms_norm
from ..step import Step
from . import rotary
from .layers import Linear, Norm, attend

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_theta": 1e4},
    FULL: {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25},
}


class GemmaAttention:
    """Queries and keys are normalised with weights, values without; the scale is 1.

    Full layers have heads of another size, and may use their keys, before the norm, as values. A layer that `reads` has
    no keys and values of its own.
    """

    def __init__(self, config: Config, weights: Weights, kind: str, H: int, eps: float, reads: bool) -> None:
        full, self.reads, self.eps = kind == FULL, reads, eps
        self.heads, self.D = config.integer("num_attention_heads", 1, 4096), config.integer("head_dim", 1, 512)
        self.kv_heads = config.integer("num_key_value_heads", 1, 4096)
        if full:
            self.D = config.integer("global_head_dim", 1, 512, default=config.usual("global_head_dim", 512, self.D))
        keys_only = full and config.flag("attention_k_eq_v", default=False)
        if keys_only:
            self.kv_heads = config.integer("num_global_key_value_heads", 1, 4096, default=self.kv_heads)
        self.window = None if full else config.integer("sliding_window", 1, default=512)
        self.q, self.o = (
            Linear(weights, "q_proj", self.heads * self.D, H),
            Linear(weights, "o_proj", H, self.heads * self.D),
        )
        self.q_norm = Norm(weights, "q_norm", self.D, eps)
        if reads:
            for name in ("k_proj", "v_proj", "k_norm"):
                weights.skip(name)
        else:
            self.k, self.k_norm = (
                Linear(weights, "k_proj", self.kv_heads * self.D, H),
                Norm(weights, "k_norm", self.D, eps),
            )
            self.v = None if keys_only else Linear(weights, "v_proj", self.kv_heads * self.D, H)
        given = config.section("rope_parameters")
        said = given.section(kind) if given else Config(config.path, ROPE[kind])
        pairs = config.flag("rope_traditional", default=False)
        self.rope = rotary.read(said, self.D, weights.device, interleaved=pairs, whole=True, settings=said)

    @property
    def kept(self) -> Kept:
        row = (self.kv_heads, self.D)
        return Kept(rows={"k": row, "v": row}, window=self.window)

    def __call__(self, x: Tensor, step: Step, kept: dict[str, Tensor]) -> Tensor:
        q = self.rope(self.q_norm(self.q(x).unflatten(-1, (self.heads, self.D))), step.positions)
        k = v = None
        if not self.reads:
            raw = self.k(x).unflatten(-1, (self.kv_heads, self.D))
            k = self.rope(self.k_norm(raw), step.positions)
            v = raw if self.v is None else self.v(x).unflatten(-1, (self.kv_heads, self.D))
            v = rms_norm(v, None, self.eps)
        return self.o(attend(step, kept, q, k, v, scale=1.0, window=self.window).flatten(1))
