"""Checkpoints into MLX checkpoints: quantised, to other bits, or dense again."""

from .converting import convert as convert
from .planning import Plan as Plan
