"""What the embedded model is like: its sizes, the name and shape of every tensor, and the bits it is stored in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GROUP = 64  # weights that share a scale
PREFIX = "language_model.model."  # of every tensor's name in an MLX checkpoint of this family


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 3072
    hidden: int = 256
    layers: int = 8
    attention_every: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    key_heads: int = 2  # of the delta rule
    value_heads: int = 4
    delta_size: int = 64
    convolution: int = 4
    experts: int = 16
    chosen: int = 4
    inner: int = 64  # of an expert, and of the shared one
    positions: int = 8192
    rotary_share: float = 0.25
    rotary_base: float = 10000.0
    eps: float = 1e-6

    @property
    def channels(self) -> int:
        """What the short convolution runs over: queries, keys and values of the delta rule."""
        return (2 * self.key_heads + self.value_heads) * self.delta_size

    def attends(self, layer: int) -> bool:
        return (layer + 1) % self.attention_every == 0


def tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name -> size, less PREFIX."""
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for index in range(shape.layers):
        mixer = attention_tensors(shape) if shape.attends(index) else delta_tensors(shape)
        found |= {f"layers.{index}.{name}": size for name, size in (mixer | block_tensors(shape)).items()}
    return found | {"norm.weight": (shape.hidden,)}


def attention_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    H, queries, keys = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes = {"q_proj": (2 * queries, H), "k_proj": (keys, H), "v_proj": (keys, H), "o_proj": (H, queries)}
    norms = {"q_norm": (shape.head_size,), "k_norm": (shape.head_size,)}
    return {f"self_attn.{name}.weight": size for name, size in {**sizes, **norms}.items()}


def delta_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    H, values = shape.hidden, shape.value_heads * shape.delta_size
    return {
        "linear_attn.in_proj_qkv.weight": (shape.channels, H),
        "linear_attn.in_proj_z.weight": (values, H),
        "linear_attn.in_proj_a.weight": (shape.value_heads, H),
        "linear_attn.in_proj_b.weight": (shape.value_heads, H),
        "linear_attn.out_proj.weight": (H, values),
        "linear_attn.conv1d.weight": (shape.channels, shape.convolution, 1),
        "linear_attn.A_log": (shape.value_heads,),
        "linear_attn.dt_bias": (shape.value_heads,),
        "linear_attn.norm.weight": (shape.delta_size,),
    }


def block_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    H, E, inner = shape.hidden, shape.experts, shape.inner
    found: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "mlp.gate.weight": (E, H),
        "mlp.shared_expert_gate.weight": (1, H),
    }
    for name, (rows, columns) in {"gate": (inner, H), "up": (inner, H), "down": (H, inner)}.items():
        found[f"mlp.switch_mlp.{name}_proj.weight"] = (E, rows, columns)
        found[f"mlp.shared_expert.{name}_proj.weight"] = (rows, columns)
    return found


def bits(name: str) -> int:
    """Of a weight in the checkpoint: routers get 8, projections and the embedding 4, the rest is 16 bits of float."""
    if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
        return 8
    if name.endswith("A_log"):
        return 32
    return 4 if name.endswith(("_proj.weight", "embed_tokens.weight")) or ".in_proj_" in name else 16


def initial(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Weights to begin with, in float32."""
    random = torch.Generator().manual_seed(seed)
    return {name: first_values(name, size, shape, random) for name, size in tensors(shape).items()}


def first_values(name: str, size: tuple[int, ...], shape: Shape, random: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(size)
    if name.endswith("A_log"):  # as Mamba: decays of many speeds
        return torch.empty(size).uniform_(1, 16, generator=random).log()
    if name.endswith("dt_bias"):
        rate = torch.empty(size).uniform_(math.log(1e-3), math.log(0.1), generator=random).exp()
        return rate + torch.log(-torch.expm1(-rate))
    if name.endswith("conv1d.weight"):
        return torch.empty(size).uniform_(-1, 1, generator=random) / math.sqrt(shape.convolution)
    spread = 1 / math.sqrt(size[-1])
    if name.endswith(("down_proj.weight", "out_proj.weight", "o_proj.weight")):  # what layers add to the stream
        spread /= math.sqrt(2 * shape.layers)
    return torch.empty(size).normal_(0, spread, generator=random)


def config(shape: Shape, eos: list[int]) -> dict[str, Any]:
    """config.json, with the keys of the family's real checkpoints."""
    kinds = ["full_attention" if shape.attends(index) else "linear_attention" for index in range(shape.layers)]
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": shape.vocabulary, "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers, "layer_types": kinds, "full_attention_interval": shape.attention_every,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_size,
        "attn_output_gate": True, "attention_bias": False, "attention_dropout": 0.0,
        "linear_num_key_heads": shape.key_heads, "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.delta_size, "linear_value_head_dim": shape.delta_size,
        "linear_conv_kernel_dim": shape.convolution, "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen, "norm_topk_prob": True, "moe_intermediate_size": shape.inner,
        "shared_expert_intermediate_size": shape.inner, "hidden_act": "silu", "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.positions, "dtype": "bfloat16", "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": shape.rotary_base, "partial_rotary_factor": shape.rotary_share,
        },
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "tie_word_embeddings": True, "eos_token_id": eos, "text_config": text,
    }  # fmt: skip
