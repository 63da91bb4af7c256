"""How a weight is quantised: read off the shapes of its tensors, then held against what the config says.

Shapes win over the config's general setting, as in mlx-lm; a setting for the one module must agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..config import Config
from ..errors import shown
from ..ops.formats import AFFINE_BITS, AFFINE_GROUPS
from .names import canonical
from .spans import Span

AFFINE_READ = (1, *AFFINE_BITS)
FP_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
FLOAT_KINDS = ("BF16", "F16", "F32")
SETTINGS = ("bits", "group_size", "mode")


class Format(NamedTuple):
    bits: int
    group: int
    mode: str

    def __str__(self) -> str:
        return f"{self.bits}-bit {self.mode}, groups of {self.group}" if self.mode == "affine" else self.mode


class Mismatch(ValueError):
    """Why tensors are no quantised weight; the caller knows the name."""


@dataclass(frozen=True)
class Quantisation:
    """config["quantization"]: the general setting, and what single modules have instead, by canonical path."""

    general: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    method: str | None = None  # of a scheme that is not mlx's: fp8, awq, ...

    @classmethod
    def read(cls, config: Config) -> Quantisation:
        key = "quantization" if "quantization" in config else "quantization_config"
        section = config.section(key)
        section.asked |= section.values.keys()
        method = section.text("quant_method", default=None) if key == "quantization_config" else None
        overrides: dict[str, Any] = {}
        for path, value in section.values.items():
            if isinstance(value, bool | dict):
                if canonical(path) in overrides:
                    section.refuse(path, "the module is named twice, under different prefixes")
                overrides[canonical(path)] = value
        general = {name: section.values[name] for name in SETTINGS if name in section}
        return cls(general, overrides, method)

    def check_dense(self, path: str) -> None:
        """The module `path` is stored without scales."""
        if self.overrides.get(path):
            raise Mismatch("the config says that it is quantised, but it has no .scales")

    def format(self, path: str, shape: tuple[int, ...], parts: dict[str, Span]) -> Format:
        """The format of the weight `path` of `shape` [..., N, K], stored as `parts`: weight, scales, perhaps biases."""
        found = _by_shape(shape, parts)
        _check_global_scale(found, shape, parts.get("global_scale"))
        override = self.overrides.get(path)
        if override is False:
            raise Mismatch("the config says that it is not quantised, but it has .scales")
        if isinstance(override, dict):
            said = {"mode": "affine", **override}
            for name, value in zip(SETTINGS, found, strict=True):
                if name in said and said[name] != value:
                    raise Mismatch(f"its tensors have {name} {value}, the config says {shown(said[name])} for it")
        return found


def _by_shape(shape: tuple[int, ...], parts: dict[str, Span]) -> Format:
    weight, scales, biases = parts["weight"], parts["scales"], parts.get("biases")
    *rows, K = shape
    if weight.kind != "U32":
        raise Mismatch(f".weight is {weight.kind}; beside .scales it must be U32, packed codes")
    if weight.shape[:-1] != tuple(rows) or scales.shape[:-1] != tuple(rows):
        raise Mismatch(f".weight {list(weight.shape)} and .scales {list(scales.shape)} must begin with {rows}")
    words, groups = weight.shape[-1], scales.shape[-1]
    bits, group = 32 * words // K, K // max(groups, 1)
    if not words or bits * K != 32 * words:
        raise Mismatch(f".weight {list(weight.shape)} does not hold {K} codes of whole bits a row")
    if group * groups != K:
        raise Mismatch(f".scales {list(scales.shape)} do not cut {K} inputs into equal groups")
    if scales.kind == "U8":
        if biases is not None:
            raise Mismatch(".scales are U8 (an fp mode), so there must be no .biases")
        if (bits, group) not in FP_MODES:
            raise Mismatch(f"{bits} bits in groups of {group} with U8 scales is no mode; there are {_modes()}")
        return Format(bits, group, FP_MODES[bits, group])
    if scales.kind not in FLOAT_KINDS:
        raise Mismatch(f".scales are {scales.kind}; they must be BF16, F16 or F32 (affine), or U8 (fp modes)")
    if biases is None:
        raise Mismatch("it has .scales but no .biases, which the affine mode needs")
    if biases.kind not in FLOAT_KINDS:
        raise Mismatch(f".biases are {biases.kind}; they must be BF16, F16 or F32")
    if biases.shape != scales.shape:
        raise Mismatch(f".biases {list(biases.shape)} must have the shape of .scales {list(scales.shape)}")
    if bits not in AFFINE_READ or group not in AFFINE_GROUPS:
        allowed = f"bits {', '.join(map(str, AFFINE_READ))} and groups {', '.join(map(str, AFFINE_GROUPS))}"
        raise Mismatch(f"{bits} bits in groups of {group} is not affine quantisation, which has {allowed}")
    return Format(bits, group, "affine")


def _check_global_scale(found: Format, shape: tuple[int, ...], scale: Span | None) -> None:
    if scale is None:
        return
    if found.mode != "nvfp4":
        raise Mismatch(f"it has a .global_scale, which {found.mode} has not")
    if scale.kind != "F32" or scale.shape not in ((), (1,), shape[:-2]):
        raise Mismatch(f".global_scale is {scale.kind} {list(scale.shape)}; one F32 number a matrix was expected")


def _modes() -> str:
    return ", ".join(f"{mode} ({bits} bits, groups of {group})" for (bits, group), mode in FP_MODES.items())
