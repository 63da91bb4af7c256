"""What each family's checkpoints are like, as data: how Hugging Face's differ from MLX's, and what quantising spares.

Which tensors a model has, and in which forms experts may lie, the models and names.py know already.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

ROUTER = {"group_size": 64, "bits": 8}  # routers decide for everything behind them
CONVOLUTION = "conv1d.weight"  # [C, 1, W] in Hugging Face's files, [C, W, 1] in MLX's
BLOCK_SCALES = "_scale_inv"  # ends the name of the scales of fp8 weights, one for each block
JOINED_HEADS = "self_attn.kv_b_proj"  # holds what MLX stores apart, as the two below
QUERY_HEADS, VALUE_HEADS = "self_attn.embed_q", "self_attn.unembed_out"
# Norms that Hugging Face's Qwen3.5 and Qwen3-Next store less 1; the norm inside linear attention is not one of them.
CENTRED = re.compile(r"^norm\.weight$|\.(input_layernorm|post_attention_layernorm|q_norm|k_norm)\.weight$")
# Keys that transformers 5 writes under a new name, or only inside rope_parameters; mlx-lm asks for the old ones.
RENAMED = {"num_local_experts": "num_experts"}
INSIDE_ROPE = ("rope_theta", "partial_rotary_factor")
NEVER_CAST = ("A_log", "e_score_correction_bias")  # float32 in the original, and of consequence


@dataclass(frozen=True)
class Family:
    model_type: str  # as mlx-lm names it
    prefix: str = "model."
    head_prefix: str = ""
    routers: tuple[str, ...] = ()  # ends of the paths of modules that are stored as ROUTER says
    centred: bool = False

    def path(self, canonical: str) -> str:
        """The name in an MLX checkpoint of a tensor or module."""
        return f"{self.head_prefix if canonical.startswith('lm_head') else self.prefix}{canonical}"


Nested = partial(Family, prefix="language_model.model.", head_prefix="language_model.")
GATES = ("mlp.gate", "shared_expert_gate")
FAMILIES = {
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3_moe", routers=("mlp.gate",)),
    "qwen3_5": Nested("qwen3_5", centred=True),
    "qwen3_5_text": Nested("qwen3_5", centred=True),
    "qwen3_5_moe": Nested("qwen3_5_moe", routers=GATES, centred=True),
    "qwen3_5_moe_text": Nested("qwen3_5_moe", routers=GATES, centred=True),
    "qwen3_next": Family("qwen3_next", routers=GATES, centred=True),
    "gemma4": Nested("gemma4", routers=("router.proj",)),
    "gemma4_text": Family("gemma4_text", routers=("router.proj",)),
    "deepseek_v3": Family("deepseek_v3"),
}
