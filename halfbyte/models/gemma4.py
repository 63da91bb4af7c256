"""Gemma 4: windowed and full attention; experts beside a dense network (26B-A4B), or inputs for every layer and shared
keys and values (E2B, E4B)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import limits
from ..cache import Cache, Kept
from ..checkpoint import Weights
from ..config import Config
from ..ops.experts import expert_mlp
from ..ops.quant import embed
from ..ops.routing import combine, route
from ..ops.rowwise import glu, rms_norm_many, softcap
from ..step import Step
from .decoder import Decoder
from .gemma4_attention import FULL, SLIDING, GemmaAttention
from .layers import EPS, GatedMLP, Linear, Norm

ACTIVATION = "gelu_tanh"


class Gemma4(Decoder):
    def __init__(self, config: Config, weights: Weights) -> None:
        self.H, self.eps = config.integer("hidden_size", 1, limits.HIDDEN), config.number("rms_norm_eps", 0.0, 1.0, EPS)
        config.must_be("hidden_activation", "gelu_pytorch_tanh")
        config.must_be("attention_bias", False)
        config.must_be("use_bidirectional_attention", (None, "vision"), default=None)
        super().__init__(config, weights, self.H, self.eps, tied=True)
        # mlx-lm's files leave out what it takes for granted. Those of Hugging Face have every key, some of them null.
        self.cap = config.number(
            "final_logit_softcapping", 0.0, default=config.usual("final_logit_softcapping", 30.0, None)
        )
        kinds = self.kinds(config)
        shared = config.integer("num_kv_shared_layers", 0, len(kinds) - 1, default=0)
        owners = {kind: index for index, kind in enumerate(kinds[: len(kinds) - shared])}
        if orphans := set(kinds) - owners.keys():
            config.refuse(
                "num_kv_shared_layers",
                f"no layer before the last {shared} is of {min(orphans)}, so that none has keys for them",
            )
        self.owner = [index if index < len(kinds) - shared else owners[kind] for index, kind in enumerate(kinds)]
        usual = config.usual("hidden_size_per_layer_input", 256, 0)
        self.own_width = config.integer("hidden_size_per_layer_input", 0, limits.HIDDEN, default=usual)
        if self.own_width:
            total = len(kinds) * self.own_width
            self.own_table = weights.linear(
                "embed_tokens_per_layer", config.integer("vocab_size_per_layer_input", 1, limits.VOCABULARY), total
            )
            self.own_projection = Linear(weights, "per_layer_model_projection", total, self.H)
            # The projection is scaled by 1/sqrt(H) before this norm, which only its eps can tell.
            self.own_norm = Norm(weights, "per_layer_projection_norm", self.own_width, self.eps * self.H)
        if config.flag("enable_moe_block", default=False):
            self.expert_count = config.integer("num_experts", 1, limits.EXPERTS)
            self.experts_per_token = config.integer("top_k_experts", 1, self.expert_count)
        for index, here in enumerate(self.places(config, weights)):
            reads = self.owner[index] != index
            self.layers.append(GemmaLayer(config, here, kinds[index], self.H, self.eps, self.own_width, reads))

    @staticmethod
    def kinds(config: Config) -> list[str]:
        count = config.integer("num_hidden_layers", 1, limits.LAYERS)
        pattern = config.integer("sliding_window_pattern", 1, limits.LAYERS, default=5)
        usual = [SLIDING if (i + 1) % pattern else FULL for i in range(count)]
        kinds = config.list_of("layer_types", str, count, default=usual)
        if unknown := set(kinds) - {SLIDING, FULL}:
            config.refuse("layer_types", f"{SLIDING} and {FULL} are implemented, not {unknown.pop()!r}")
        return kinds

    @property
    def kept(self) -> list[Kept]:
        """Nothing, where a layer reads what an earlier one keeps."""
        return [layer.kept if self.owner[i] == i else Kept() for i, layer in enumerate(self.layers)]

    def __call__(self, step: Step, cache: Cache) -> Tensor:
        h = self.embedding(step.ids, torch.float32) * self.H**0.5
        own = self.own_inputs(step, h) if self.own_width else None
        for index, layer in enumerate(self.layers):
            h = layer(h, step, cache.layers[self.owner[index]], None if own is None else own[:, index])
        logits = self.logits(h, None, step)
        return logits if self.cap is None else softcap(logits, self.cap, out=logits)

    def own_inputs(self, step: Step, h: Tensor) -> Tensor:
        """What every layer gets of its own: a row of a second table, and a projection of the embedding."""
        rows = embed(step.ids, self.own_table, step.dtype) * self.own_width**0.5
        shape = (len(self.layers), self.own_width)
        return self.own_norm(
            self.own_projection(h.to(step.dtype)).unflatten(-1, shape),
            residual=rows.unflatten(-1, shape),
            scale=2**-0.5,
        )


class GemmaLayer:
    """Norms stand before and behind each part, and one number scales what leaves the layer."""

    def __init__(
        self, config: Config, weights: Weights, kind: str, H: int, eps: float, own_width: int, reads: bool
    ) -> None:
        def norm(name: str) -> Norm:
            return Norm(weights, name, H, eps)

        self.attention = GemmaAttention(config, weights / "self_attn", kind, H, eps, reads)
        self.before, self.after = norm("input_layernorm"), norm("post_attention_layernorm")
        self.before_mlp, self.after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        usual = config.usual("use_double_wide_mlp", True, False)
        wide = 2 if reads and config.flag("use_double_wide_mlp", default=usual) else 1
        self.mlp = GatedMLP(
            weights / "mlp", H, wide * config.integer("intermediate_size", 1, limits.HIDDEN * 8), ACTIVATION
        )
        self.mixture = GemmaMixture(config, weights, H, eps) if config.flag("enable_moe_block", default=False) else None
        self.scalar, self.own_width = weights.tensor("layer_scalar", 1), own_width
        if own_width:
            self.own_gate = Linear(weights, "per_layer_input_gate", own_width, H)
            self.own_out, self.own_after = (
                Linear(weights, "per_layer_projection", H, own_width),
                norm("post_per_layer_input_norm"),
            )

    @property
    def kept(self) -> Kept:
        return self.attention.kept

    def __call__(self, h: Tensor, step: Step, kept: dict[str, Tensor], own: Tensor | None) -> Tensor:
        stream = h.dtype  # wider than what the projections take and give
        r = self.after(self.attention(self.before(h, step.dtype), step, kept), stream, residual=h)
        last, narrow = None if self.own_width else self.scalar, r.to(step.dtype)
        if self.mixture is None:
            h = self.after_mlp(self.mlp(self.before_mlp(narrow)), stream, residual=r, scale=last)
        else:
            for_mlp, for_router, for_experts = rms_norm_many(
                narrow, [self.before_mlp.weight, self.mixture.router_scale, self.mixture.before.weight], self.before.eps
            )
            dense = self.mixture.after_dense(self.mlp(for_mlp))
            h = self.after_mlp(self.mixture(for_router, for_experts), stream, add=dense, residual=r, scale=last)
        if own is None:
            return h
        own = self.own_out(glu(self.own_gate(h.to(step.dtype)), own, ACTIVATION))
        return self.own_after(own, stream, residual=h, scale=self.scalar)


class GemmaMixture:
    """Experts beside the dense network. The router has a norm without weight, and a scale of its own."""

    def __init__(self, config: Config, weights: Weights, H: int, eps: float) -> None:
        E = config.integer("num_experts", 1, limits.EXPERTS)
        self.experts = weights.experts(
            "experts.switch_glu", E, config.integer("moe_intermediate_size", 1, limits.HIDDEN), H
        )
        self.router_scale = weights.tensor("router.scale", H).float() * H**-0.5
        self.router = GemmaRouter(weights, H, E, config.integer("top_k_experts", 1, E))
        self.before = Norm(weights, "pre_feedforward_layernorm_2", H, eps)
        self.after = Norm(weights, "post_feedforward_layernorm_2", H, eps)
        self.after_dense = Norm(weights, "post_feedforward_layernorm_1", H, eps)

    def __call__(self, for_router: Tensor, for_experts: Tensor) -> Tensor:
        ids, shares = self.router(for_router)
        return self.after(combine(expert_mlp(for_experts, ids, self.experts, ACTIVATION), shares))


class GemmaRouter:
    """The k largest of softmax(gate x), each share times a scale of the expert's."""

    def __init__(self, weights: Weights, H: int, E: int, k: int) -> None:
        self.gate, self.k = Linear(weights, "router.proj", E, H), k
        self.scales = weights.tensor("router.per_expert_scale", E)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return route(self.gate(x), self.k, per_expert_scale=self.scales)
