"""Names of tensors, as data: prefixes that mean nothing, tensors we leave out, forms in which experts are stored."""

from __future__ import annotations

import re

# The longest first. What is left begins with embed_tokens, layers.N, norm or lm_head.
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")

# First part of a canonical name -> what is left out. Text is all we run.
LEFT_OUT = {
    "vision_tower": "vision",
    "vision_model": "vision",
    "vision_embed_tokens": "vision",
    "visual": "vision",
    "embed_vision": "vision",
    "multi_modal_projector": "vision",
    "mm_projector": "vision",
    "audio_tower": "audio",
    "audio_model": "audio",
    "embed_audio": "audio",
    "mtp": "multi-token prediction",
}
LAYER = re.compile(r"layers\.(\d{1,9})\.")
BUFFER = re.compile(r"(^|\.)inv_freq$")  # rotary frequencies, which the config gives

# One stack [E, N, K] a projection, as mlx stores experts; else one matrix an expert, or gate and up in one.
PROJECTIONS = {"gate_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w3"), "down_proj": ("down_proj", "w2")}
STACKS = ("switch_mlp", "switch_glu")
UNSTACKED = "experts"
FUSED = "gate_up_proj"


def canonical(name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def left_out(name: str, further: range = range(0)) -> str | None:
    """Why a tensor of this canonical name is not loaded; None where it should be. `further`: layers that predict
    tokens beyond the next, behind those of the model."""
    if reason := LEFT_OUT.get(name.split(".", 1)[0]):
        return reason
    if BUFFER.search(name):
        return "rotary buffers"
    found = LAYER.match(name)
    if found and int(found[1]) in further:
        return "multi-token prediction"
    return None


def unstacked(stack: str) -> str:
    """Where the experts of `…mlp.switch_mlp` or `…experts.switch_glu` lie when they are not stacked by mlx."""
    parts = stack.split(".")
    if parts[-1] in STACKS:
        parts.pop()
    return ".".join(parts if parts and parts[-1] == UNSTACKED else [*parts, UNSTACKED])
