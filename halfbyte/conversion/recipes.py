"""Which format each module is quantised to: one for all, but for routers, or a mixture of two by layer (as mlx-lm)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..checkpoint.quantisation import Format
from ..ops.formats import require_format
from .hf_names import ROUTER, Family

MIXED = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}
SENSITIVE = ("v_proj", "v_a_proj", "v_b_proj", "down_proj")  # what a mixture gives more bits to, in some layers
LAYER = re.compile(r"\.layers\.(\d+)\.")

# path and shape [..., N, K] of a module -> whether it is quantised, or how: {"bits", "group_size", perhaps "mode"}
Predicate = Callable[[str, tuple[int, ...]], bool | dict[str, Any]]


class Recipe:
    def __init__(self, general: Format, family: Family, layers: int, predicate: Predicate | str | None) -> None:
        self.general, self.layers = general, layers
        self.predicate: Predicate
        if predicate is None:
            self.predicate = lambda path, shape: dict(ROUTER) if path.endswith(family.routers) else True
        elif isinstance(predicate, str):
            low, high = MIXED[predicate]
            self.predicate = lambda path, shape: self._mixed(path, low, high)
        else:
            self.predicate = predicate

    def __call__(self, path: str, shape: tuple[int, ...]) -> tuple[Format | None, dict[str, Any] | None]:
        """The format of a module, None where it stays as it is, and what the config has to say about it."""
        if shape[-1] % self.general.group:
            return None, None
        answer = self.predicate(path, shape)
        if not isinstance(answer, dict):
            return (self.general if answer else None), None
        chosen = Format(answer["bits"], answer["group_size"], answer.get("mode", "affine"))
        require_format("convert", *chosen)
        return (None, None) if shape[-1] % chosen.group else (chosen, answer)

    def _mixed(self, path: str, low: int, high: int) -> dict[str, Any]:
        """More bits in the first and last eighth of the layers and in every third between, and for the head."""
        found = LAYER.search(path)
        layer, eighth = int(found[1]) if found else 0, self.layers // 8
        more = layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2
        several = "lm_head" in path or (more and any(name in path for name in SENSITIVE))
        return {"group_size": self.general.group, "bits": high if several else low, "mode": "affine"}
