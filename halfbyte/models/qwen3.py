"""Qwen3 and Qwen3-MoE: attention with normalised queries and keys; dense layers, or softmax-routed experts."""

from __future__ import annotations

from .. import limits
from ..checkpoint import Weights
from ..config import Config
from . import rotary
from .decoder import Decoder, Layer
from .layers import EPS, Attention, GatedMLP, MixtureBlock, SoftmaxRouter


class Qwen3(Decoder):
    def __init__(self, config: Config, weights: Weights) -> None:
        H, heads, kv_heads, D, eps = sizes(config)
        config.must_be("use_sliding_window", False)
        if others := set(config.list_of("layer_types", str, default=[])) - {"full_attention"}:
            config.refuse("layer_types", f"only 'full_attention' is implemented, it is {min(others)!r} for some layers")
        super().__init__(config, weights, H, eps)
        turn, biased = rotary.read(config, D, weights.device), config.flag("attention_bias", default=False)
        mixture = config.model_type == "qwen3_moe" and config.integer("num_experts", 0, limits.EXPERTS) > 0
        if mixture:
            self.expert_count, self.experts_per_token = expert_counts(config)
        dense = config.list_of("mlp_only_layers", int, default=[]) if mixture else []
        every = config.integer("decoder_sparse_step", 1, limits.LAYERS, default=1) if mixture else 1
        for index, here in enumerate(self.places(config, weights)):
            mixer = Attention(here / "self_attn", H, heads, kv_heads, D, eps, turn, biased=biased)
            if mixture and index not in dense and (index + 1) % every == 0:
                mlp: MixtureBlock | GatedMLP = softmax_mixture(config, here / "mlp", H)
            else:
                mlp = GatedMLP(here / "mlp", H, config.integer("intermediate_size", 1, limits.HIDDEN * 8))
            self.layers.append(Layer(here, H, eps, mixer, mlp))


def sizes(config: Config) -> tuple[int, int, int, int, float]:
    """Width, query heads, key and value heads, head size, eps: what every Qwen3 says in the same words."""
    config.must_be("hidden_act", "silu")
    H, heads = config.integer("hidden_size", 1, limits.HIDDEN), config.integer("num_attention_heads", 1, 4096)
    kv_heads = config.integer("num_key_value_heads", 1, 4096, default=heads)
    D = config.integer("head_dim", 1, 512, default=H // heads)
    return H, heads, kv_heads, D, config.number("rms_norm_eps", 0.0, 1.0, EPS)


def expert_counts(config: Config) -> tuple[int, int]:
    E = config.integer("num_experts", 1, limits.EXPERTS)
    return E, config.integer("num_experts_per_tok", 1, E)


def softmax_mixture(
    config: Config, weights: Weights, H: int, *, renormalise: bool = False, shared: bool = False
) -> MixtureBlock:
    """Qwen's experts: softmax over all, the k largest, renormalised; beside them, perhaps, a gated shared expert."""
    E, k = expert_counts(config)
    inner = config.integer("moe_intermediate_size", 1, limits.HIDDEN)
    router = SoftmaxRouter(weights, H, E, k, config.flag("norm_topk_prob", default=renormalise))
    if not shared:
        return MixtureBlock(weights, H, inner, E, router)
    beside = ("shared_expert", config.integer("shared_expert_intermediate_size", 1, limits.HIDDEN))
    return MixtureBlock(weights, H, inner, E, router, shared=beside, shared_gate="shared_expert_gate")
