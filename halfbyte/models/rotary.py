"""Rotary positions: what configs call them, and the frequencies they mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import Config
from ..ops.rowwise import rope

KINDS = "default, linear, dynamic, llama3, yarn and proportional"


class Rope:
    """Pairs of channels turned by position · inv_freq. `scale` multiplies what is turned (YaRN's temperature)."""

    def __init__(
        self, inv_freq: Tensor, *, rotary: int | None = None, interleaved: bool = False, scale: float = 1.0
    ) -> None:
        self.inv_freq, self.rotary, self.interleaved, self.scale = inv_freq, rotary, interleaved, scale

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return rope(x, positions, self.inv_freq, rotary=self.rotary, interleaved=self.interleaved, scale=self.scale)


def section(config: Config) -> Config:
    """Where a config keeps its rotary settings: rope_scaling, which people add for longer texts, or rope_parameters."""
    return config.section("rope_scaling") or config.section("rope_parameters")


def read(
    config: Config,
    D: int,
    device: torch.device,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    whole: bool = False,
    settings: Config | None = None,
) -> Rope:
    """The rotary positions of heads of D channels. theta and partial count where the config has none.

    `whole`: all channels turn, unless they are spread proportionally.
    """
    said = section(config) if settings is None else settings
    kind = said.text("rope_type", default=None) or said.text("type", default="default")
    share = partial
    for place in (config.section("rope_parameters"), config, said):  # the last one that says it counts
        theta = place.number("rope_theta", 1.0, default=theta)
        share = place.number("partial_rotary_factor", 0.0, 1.0, default=share)
    share = 1.0 if whole and kind != "proportional" else share
    rotary = int(D * share)
    if rotary < 2 or rotary % 2:
        said.refuse("partial_rotary_factor", f"{share} of {D} channels is {rotary}, which are no pairs")
    inv_freq, scale = frequencies(theta, rotary), 1.0
    match kind:
        case "default" | "mrope" | "dynamic":
            pass  # the three axes of mrope are one and the same for text; dynamic begins where the context ends
        case "linear":
            inv_freq = inv_freq / said.number("factor", 1e-3)
        case "llama3":
            original, low = (
                said.integer("original_max_position_embeddings", 1, default=8192),
                said.number("low_freq_factor", 1e-6, default=1.0),
            )
            high = said.number("high_freq_factor", low + 1e-6, default=4.0)
            inv_freq = llama3(inv_freq, said.number("factor", 1e-3), original, low, high)
        case "yarn" | "deepseek_yarn":
            factor = said.number("factor", 1.0)
            inv_freq = yarn(
                theta, rotary, factor, said.integer("original_max_position_embeddings", 1),
                said.number("beta_fast", 1e-6, default=32.0), said.number("beta_slow", 1e-6, default=1.0),
            )  # fmt: skip
            scale = yarn_scale(factor, said.number("mscale", 0.0, default=1.0))
            scale /= yarn_scale(factor, said.number("mscale_all_dim", 0.0, default=0.0))
            scale = said.number("attention_factor", 0.0, default=scale)
        case "proportional":
            # The rotated channels are spread over the whole head: the frequencies count all its pairs, and the last
            # ones stand still.
            inv_freq = frequencies(theta, D)
            inv_freq[rotary // 2 :] = 0
            rotary, inv_freq = D, inv_freq / said.number("factor", 1e-3, default=1.0)
        case _:
            said.refuse("rope_type", f"{kind!r} is not implemented; {KINDS} are")
    home = torch.device("cpu") if device.type == "mps" else device  # an Apple GPU has no float64: see rope
    return Rope(inv_freq.to(home), rotary=rotary, interleaved=interleaved, scale=scale)


def frequencies(theta: float, rotary: int) -> Tensor:
    """theta^(-2i / rotary), i < rotary / 2, in float64: angles are formed from them without loss."""
    return theta ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)


def yarn(theta: float, rotary: int, factor: float, original: int, beta_fast: float, beta_slow: float) -> Tensor:
    """YaRN: high frequencies as they are, low ones divided by `factor`, and a ramp between them.

    The ramp lies between the pairs that turn beta_fast and beta_slow times within the original context.
    """

    def pair_of(turns: float) -> float:
        return rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(beta_fast)), 0), min(math.ceil(pair_of(beta_slow)), rotary - 1)
    place = torch.arange(rotary // 2, dtype=torch.float64)
    ramp = ((place - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    plain = frequencies(theta, rotary)
    return plain * (1 - ramp) + plain / factor * ramp


def llama3(plain: Tensor, factor: float, original: int, low: float, high: float) -> Tensor:
    """Pairs that turn at least `high` times within the original context as they are, those that turn at most `low`
    times slower by `factor`, and a ramp between them."""
    ramp = ((original * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return plain * ramp + plain / factor * (1 - ramp)


def yarn_scale(factor: float, mscale: float) -> float:
    """How much a longer context sharpens attention: 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
