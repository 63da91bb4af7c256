"""The MLX formats of quantised weights, bit for bit: how codes lie in words and what they stand for.

A row of K weights is one little-endian bit stream of K codes in uint32 words: code i owns bits [i b, i b + b).

    affine          w = scale q + bias                              bits 2 3 4 5 6 8, groups 32 64 128 (1: reading only)
    mxfp4, mxfp8    w = e2m1(q) 2^(s - 127), e4m3(q) 2^(s - 127)    groups of 32
    nvfp4           w = e2m1(q) e4m3(s) [global_scale / 2688]       groups of 16
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .dispatch import FLOATS, require, wide

DEFAULTS = {"affine": (4, 64), "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NV_RANGE = 448.0 * 6.0  # the largest e4m3 scale times the largest e2m1 value: what a global scale is relative to


@dataclass(frozen=True)
class Packed:
    """A quantised matrix, or a stack of them, as a checkpoint holds it.

    words uint32 [..., N, K bits / 32]   scales [..., N, K / group]: floats (affine) or uint8 (fp modes)
    biases, as scales, for affine only   global_scale float32, one number or [...]: nvfp4 only, optional
    """

    words: Tensor
    scales: Tensor
    biases: Tensor | None
    bits: int
    group: int
    mode: str = "affine"
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        require_format("Packed", self.bits, self.group, self.mode, reading=True)
        words, scales, biases = self.words, self.scales, self.biases
        require(words.dtype in (torch.uint32, torch.int32), "Packed", "words", "uint32", words)
        require(words.ndim >= 2, "Packed", "words", "[..., N, K bits / 32]", words)
        K = words.shape[-1] * 32 // self.bits
        require(
            K * self.bits == words.shape[-1] * 32 and K > 0, "Packed", "words", f"whole {self.bits}-bit codes", words
        )
        require(K % self.group == 0, "Packed", "words", f"whole groups of {self.group}", words)
        expected = (*words.shape[:-1], K // self.group)
        require(tuple(scales.shape) == expected, "Packed", "scales", f"of shape {list(expected)}", scales, words)
        require(scales.device == words.device, "Packed", "scales", "on the device of words", scales, words)
        if self.mode == "affine":
            require(scales.dtype in FLOATS, "Packed", "scales", "float32, bfloat16 or float16", scales)
            require(biases is not None, "Packed", "biases", "given in affine mode")
            assert biases is not None
            require(biases.shape == scales.shape, "Packed", "biases", "of the shape of scales", biases, scales)
            require(biases.dtype == scales.dtype, "Packed", "biases", "of the dtype of scales", biases, scales)
            require(biases.device == words.device, "Packed", "biases", "on the device of words", biases, words)
        else:
            require(scales.dtype == torch.uint8, "Packed", "scales", f"uint8 in {self.mode} mode", scales)
            require(biases is None, "Packed", "biases", f"absent in {self.mode} mode", biases)
        if self.global_scale is not None:
            require(self.mode == "nvfp4", "Packed", "global_scale", "absent outside nvfp4", self.mode)
            require(
                tuple(self.global_scale.shape) in ((), (1,), tuple(words.shape[:-2])),
                "Packed",
                "global_scale",
                "one number, or one a matrix of the stack",
                self.global_scale,
                words,
            )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight that this stands for, [..., N, K]."""
        return (*self.words.shape[:-1], self.words.shape[-1] * 32 // self.bits)

    @cached_property
    def scale_dtype(self) -> torch.dtype:
        return self.scales.dtype

    @cached_property
    def device(self) -> torch.device:
        return self.words.device

    def to(self, device: torch.device | str) -> Packed:
        moved = [None if t is None else t.to(device) for t in (self.words, self.scales, self.biases, self.global_scale)]
        words, scales, biases, global_scale = moved
        assert words is not None and scales is not None
        return Packed(words, scales, biases, self.bits, self.group, self.mode, global_scale)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Codes int64 [..., K] of words [..., K bits / 32]."""
    start = torch.arange(words.shape[-1] * 32 // bits, device=words.device) * bits
    wide_words = words.view(torch.int32).long() & 0xFFFFFFFF
    after = torch.cat([wide_words[..., 1:], torch.zeros_like(wide_words[..., :1])], -1)
    pairs = wide_words | after << 32  # a code may straddle two words
    return pairs[..., start >> 5] >> (start & 31) & ((1 << bits) - 1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Words uint32 [..., K bits / 32] of codes [..., K]: the inverse of `unpack`."""
    lanes = torch.arange(bits, device=codes.device)
    stream = (codes[..., None] >> lanes & 1).reshape(*codes.shape[:-1], codes.shape[-1] * bits // 32, 32)
    words = (stream << torch.arange(32, device=codes.device)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().view(torch.uint32)


def affine_codes(grouped: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    top = (1 << bits) - 1
    low, high = grouped.amin(-1), grouped.amax(-1)
    from_low = low.abs() > high.abs()
    scales = _quotient(high - low, top).clamp(min=1e-7)
    scales = torch.where(from_low, scales, -scales)
    edge = torch.where(from_low, low, high)
    steps = torch.round(edge / scales)
    scales = torch.where(steps != 0, edge / steps, scales)
    biases = torch.where(steps != 0, edge, 0.0)
    codes = torch.round((grouped - biases[..., None]) / scales[..., None]).clamp(0, top)
    return codes.long(), scales, biases


def _quotient(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once everywhere: by a plain number, CUDA would multiply with its reciprocal."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def fp_codes(grouped: Tensor, mode: str, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups in w's own dtype: mlx forms them there, and every rounding counts."""
    dtype, factor = grouped.dtype, None
    ideal = _quotient(grouped.abs().amax(-1), 448.0 if mode == "mxfp8" else 6.0)
    if mode == "nvfp4":
        factor = None if global_scale is None else nv_factor(per_matrix(global_scale))
        scales = _e4m3_codes(ideal if factor is None else ideal.float() * factor)
        step = decoded_scales(scales, mode).to(dtype)
    else:
        exponent = torch.where(ideal == 0, 0.0, torch.ceil(torch.log2(ideal.double()).float())).clamp(-127, 127)
        scales = (exponent + 127).to(torch.uint8)
        step = torch.ldexp(torch.ones_like(exponent), exponent.int()).to(dtype)
    scaled = torch.where(step[..., None] == 0, 0.0, grouped / step[..., None])
    scaled = scaled if factor is None else scaled.float() * factor[..., None]
    return (_e4m3_codes(scaled).long() if mode == "mxfp8" else _e2m1_codes(scaled)), scales


def _e2m1_codes(x: Tensor) -> Tensor:
    """The nearest value's code, the lower code where two are as near; far beyond the table 16 bits tell none apart."""
    x = wide(x)
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=x.dtype, device=x.device)
    distance = (x[..., None] - table).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    return torch.where(nearest, torch.arange(16, device=x.device), 16).amin(-1)


def _e4m3_codes(x: Tensor) -> Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def decoded_scales(scales: Tensor, mode: str) -> Tensor:
    if mode == "nvfp4":
        return scales.view(torch.float8_e4m3fn).float()
    powers = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - 127)
    return torch.where(scales == 255, torch.inf, powers)


def nv_factor(global_scale: Tensor) -> Tensor:
    """NV_RANGE / global_scale, rounded once: of a plain number torch takes the reciprocal, and multiplies."""
    return torch.full_like(global_scale, NV_RANGE) / global_scale


def per_matrix(global_scale: Tensor) -> Tensor:
    """A global scale, shaped to multiply scales [..., N, K / group]."""
    return global_scale.reshape(()) if global_scale.numel() == 1 else global_scale[..., None, None]


def decoded_values(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=codes.device)
    return table[codes]


def require_format(op: str, bits: int, group: int, mode: str, reading: bool = False) -> None:
    require(mode in DEFAULTS, op, "mode", f"one of {', '.join(DEFAULTS)}", mode)
    if mode == "affine":
        allowed = (1, *AFFINE_BITS) if reading else AFFINE_BITS
        require(bits in allowed, op, "bits", f"one of {', '.join(map(str, allowed))}", bits)
        require(group in AFFINE_GROUPS, op, "group", "32, 64 or 128", group)
    else:
        fixed = DEFAULTS[mode]
        require((bits, group) == fixed, op, "bits and group", f"{fixed[0]} and {fixed[1]} in {mode} mode", bits, group)
