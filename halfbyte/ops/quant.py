"""Quantised weights: making them, reading them, multiplying with them. formats.py says what their bits mean."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import FLOATS, INTEGERS, deliver, kernel, refuse, require, require_floats, require_out, wide
from .formats import (
    DEFAULTS,
    NV_RANGE,
    Packed,
    affine_codes,
    decoded_scales,
    decoded_values,
    fp_codes,
    pack,
    per_matrix,
    require_format,
    unpack,
)

FEW = 32  # ids: so many Python looks through before torch has begun

__all__ = ["Packed", "dequantize", "embed", "exact_weights", "qmm", "quantize", "require_ids"]


def quantize(
    w: Tensor,
    bits: int | None = None,
    group: int | None = None,
    mode: str = "affine",
    global_scale: float | Tensor | None = None,
) -> Packed:
    """Quantise w [..., N, K] along its last axis, to the bits that mlx 0.32.4 gives.

    affine, a group at a time in float32: with lo and hi its extremes and e the larger of them in magnitude,
    s = max((hi - lo) / (2^b - 1), 1e-7), negated when e is hi; if q0 = round(e / s) is not 0 then s = e / q0 and
    bias = e, else bias = 0; q = clip(round((w - bias) / s), 0, 2^b - 1). Scales and biases are stored in w's dtype.
    The fp modes store 2^ceil(log2(max|w| / largest)) (mxfp4, mxfp8) or e4m3(max|w| / 6) (nvfp4) as uint8.
    Rounding is to even; w must be finite. bits and group default to the mode's own: affine 4 and 64, mxfp4 4 and 32,
    nvfp4 4 and 16, mxfp8 8 and 32.
    """
    require(mode in DEFAULTS, "quantize", "mode", f"one of {', '.join(DEFAULTS)}", mode)
    bits, group = bits or DEFAULTS[mode][0], group or DEFAULTS[mode][1]
    require_format("quantize", bits, group, mode)
    require(isinstance(w, Tensor), "quantize", "w", "a tensor", w)
    require_floats("quantize", w.device, w=w)
    require(w.ndim >= 2 and w.shape[-1] > 0, "quantize", "w", "[..., N, K] with K > 0", w)
    require(w.shape[-1] % group == 0, "quantize", "w", f"[..., N, K] with K a multiple of the group {group}", w)
    require(global_scale is None or mode == "nvfp4", "quantize", "global_scale", "absent outside nvfp4", mode)
    require(w.is_meta or _finite(w), "quantize", "w", "finite: it has NaN or infinite values", w)
    if global_scale is not None:
        global_scale = torch.as_tensor(global_scale, dtype=torch.float32, device=w.device)
    if found := kernel("quant", "quantize", w):
        words, scales, biases = found(w, bits, group, mode, global_scale)
        return Packed(words, scales, biases, bits, group, mode, global_scale)
    grouped = w.reshape(*w.shape[:-1], w.shape[-1] // group, group)
    if mode == "affine":
        codes, scales, biases = affine_codes(grouped.float(), bits)
        stored = biases.to(w.dtype)
        return Packed(pack(codes.flatten(-2), bits), scales.to(w.dtype), stored, bits, group, mode)
    codes, scales = fp_codes(grouped, mode, global_scale)
    return Packed(pack(codes.flatten(-2), bits), scales, None, bits, group, mode, global_scale)


def _finite(w: Tensor) -> bool:
    """A sum that is finite says so of all that went into it, at a tenth of the cost; one that is not may overflow."""
    return bool(torch.isfinite(w.sum(dtype=wide(w[:0]).dtype))) or bool(torch.isfinite(w).all())


def dequantize(p: Packed, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    """The weights [..., N, K] that p stands for.

    Formed in dtype, as mlx does: affine rounds twice, r(r(scale q) + bias). Only a global scale is applied in float32.
    """
    require(isinstance(p, Packed), "dequantize", "p", "a Packed", p)
    require(dtype in FLOATS, "dequantize", "dtype", "a float dtype", dtype)
    require_out("dequantize", out, p.shape, dtype, p.device)
    if dtype != torch.float64 and (found := kernel("quant", "dequantize", p.words)):
        return found(p, dtype, out=out)  # type: ignore[no-any-return]
    codes = unpack(p.words, p.bits).reshape(*p.scales.shape, p.group)
    if p.mode == "affine":
        assert p.biases is not None
        w = codes.to(dtype) * p.scales[..., None].to(dtype) + p.biases[..., None].to(dtype)
    else:
        scales = decoded_scales(p.scales, p.mode)
        if p.global_scale is not None:
            scales = scales * (per_matrix(p.global_scale) / NV_RANGE)
        scales = scales if p.global_scale is not None else scales.to(dtype)
        w = (decoded_values(codes, p.bits).to(scales.dtype) * scales[..., None]).to(dtype)
    return deliver(w.flatten(-2), dtype, out)


def qmm(x: Tensor, w: Packed | Tensor, *, transpose: bool = True, out: Tensor | None = None) -> Tensor:
    """y[..., l, n] = sum_k x[..., l, k] w[l, n, k], for a quantised or a dense weight.

    w [*L, N, K], with any leading axes L (heads, experts), often none
    transpose=True    x [..., *L, K] -> y [..., *L, N]
    transpose=False   x [..., *L, N] -> y [..., *L, K]: the contraction over rows, sum_n x[..., l, n] w[l, n, k]

    Sums in float32; y has the dtype of x. A quantised weight counts as the exact scale q + bias. `out` must not
    overlap x.
    """
    plain = type(w) is Packed and len(w.shape) == 2 and transpose and out is None and type(x) is Tensor
    if not (plain and x.dtype in FLOATS and x.ndim and x.shape[-1] == w.shape[1] and x.device == w.device):
        _require_product(x, w, transpose, out)
    if found := kernel("quant", "qmm", x):
        return found(x, w, transpose=transpose, out=out)  # type: ignore[no-any-return]
    lead, wider = w.shape[:-2], wide(x)
    dense = exact_weights(w, wider.dtype)
    y = (
        torch.einsum("...nk,...k->...n" if transpose else "...nk,...n->...k", dense, wider)
        if lead
        else (wider @ (dense.mT if transpose else dense))
    )
    return deliver(y, x.dtype, out)


def _require_product(x: Tensor, w: Packed | Tensor, transpose: bool, out: Tensor | None) -> None:
    require(isinstance(x, Tensor), "qmm", "x", "a tensor", x)
    require_floats("qmm", x.device, x=x)
    require(isinstance(w, Packed | Tensor), "qmm", "w", "a Packed or a tensor", w)
    require(w.device == x.device, "qmm", "w", "on x's device", w.device, x)
    require(isinstance(w, Packed) or w.dtype in FLOATS, "qmm", "w", "a Packed or a float tensor", w)
    shape = tuple(w.shape)
    require(len(shape) >= 2 and shape[-1] > 0, "qmm", "w", "[..., N, K] with K > 0", shape)
    lead, inner, width = shape[:-2], shape[-1 if transpose else -2], shape[-2 if transpose else -1]
    if x.ndim <= len(lead) or tuple(x.shape[x.ndim - 1 - len(lead) :]) != (*lead, inner):
        refuse("qmm", "x", f"[..., {', '.join(map(str, (*lead, inner)))}] for this w", x, shape)
    require_out("qmm", out, (*x.shape[:-1], width), x.dtype, x.device)


def exact_weights(w: Packed | Tensor, dtype: torch.dtype) -> Tensor:
    """Dense weights for a body to multiply with."""
    return dequantize(w, dtype) if isinstance(w, Packed) else w.to(dtype)


def embed(ids: Tensor, w: Packed | Tensor, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    """Rows of w: y[..., :] = w[ids[...]].   ids [...] integers   w [V, K]   ->   y [..., K] in dtype."""
    require(isinstance(ids, Tensor), "embed", "ids", "a tensor", ids)
    require(ids.dtype in INTEGERS, "embed", "ids", "int32 or int64", ids)
    require(isinstance(w, Packed | Tensor), "embed", "w", "a Packed or a tensor", w)
    require(isinstance(w, Packed) or w.dtype in FLOATS, "embed", "w", "a Packed or a float tensor", w)
    require(w.device == ids.device, "embed", "w", "on the device of ids", w.device, ids)
    V, K = _matrix("embed", w)
    require(dtype in FLOATS, "embed", "dtype", "a float dtype", dtype)
    require_ids("embed", "ids", ids, V)
    require_out("embed", out, (*ids.shape, K), dtype, ids.device)
    if dtype != torch.float64 and (found := kernel("quant", "embed", ids)):
        return found(ids, w, dtype, out=out)  # type: ignore[no-any-return]
    chosen = ids.long()
    if isinstance(w, Tensor):
        return deliver(w[chosen], dtype, out)
    biases = None if w.biases is None else w.biases[chosen]
    words = w.words.view(torch.int32)[chosen]
    flat = [None if t is None else t.reshape(-1, t.shape[-1]) for t in (words, w.scales[chosen], biases)]
    assert flat[0] is not None and flat[1] is not None
    rows = Packed(flat[0], flat[1], flat[2], w.bits, w.group, w.mode, w.global_scale)
    return deliver(dequantize(rows, dtype).reshape(*ids.shape, K), dtype, out)


def require_ids(op: str, argument: str, ids: Tensor, count: int) -> None:
    """Ids lie in [0, count). Read on a CPU only: a GPU would have to be waited for, so there the caller checks."""
    if ids.is_cpu and (size := ids.numel()):
        if size <= FEW:
            listed = ids.flatten().tolist()
            low, high = min(listed), max(listed)
        else:
            low, high = (int(edge) for edge in ids.aminmax())
        if low < 0 or high >= count:
            refuse(op, argument, f"in [0, {count})", low, high)


def _matrix(op: str, w: Packed | Tensor) -> tuple[int, int]:
    require(len(w.shape) == 2 and w.shape[-1] > 0, op, "w", "[V, K] with K > 0", tuple(w.shape))
    return w.shape[0], w.shape[1]
