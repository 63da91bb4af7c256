"""Checkpoints into MLX checkpoints: quantised, to other bits, or dense again."""

from .conversion import Plan as Plan
from .converting import convert as convert
