"""The model families, one file each. MODELS maps config.json's model_type to the class that builds it."""

from __future__ import annotations

from collections.abc import Callable

from ..checkpoint import Weights
from ..config import Config
from .decoder import Decoder
from .deepseek_v3 import DeepseekV3
from .gemma4 import Gemma4
from .qwen3 import Qwen3
from .qwen3_5 import Qwen3_5

MODELS: dict[str, Callable[[Config, Weights], Decoder]] = {
    "deepseek_v3": DeepseekV3,
    "gemma4": Gemma4,
    "gemma4_text": Gemma4,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3,
    "qwen3_5": Qwen3_5,
    "qwen3_5_text": Qwen3_5,
    "qwen3_5_moe": Qwen3_5,
    "qwen3_5_moe_text": Qwen3_5,
    "qwen3_next": Qwen3_5,
}
