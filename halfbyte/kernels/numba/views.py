"""Between torch tensors and the arrays that kernels take: widened or raw views in, results out."""

import numpy as np
import torch

NOTHING = np.empty(0, np.float32)

# Below this many elements a kernel stays on the calling thread. Our threads cost 0.5 us a loop, Numba's 3 us and 100
# after a pause; what one core has written another reads slowly, so fewer elements gain nothing (2026-11-18, 2 cores).
SERIAL = 1 << 14


def widened(t):
    """A tensor as contiguous float32: itself where it is."""
    if t is None or (t.dtype is torch.float32 and t.is_contiguous()):
        return t
    return t.to(torch.float32).contiguous()


def address(t):
    """Where a contiguous tensor begins, 0 for None. The tensor must outlive the use of its address."""
    return 0 if t is None else t.data_ptr()


def floats(t):
    """A tensor's values as a flat float32 array, a view where it is contiguous float32; None gives an empty array."""
    return NOTHING if t is None else widened(t).numpy().reshape(-1)


def raw(t):
    """A tensor as it is stored, flat and contiguous: bfloat16 as uint16, float16 as int16 (see `lanes.load`)."""
    t = t.contiguous()
    if t.dtype == torch.bfloat16:
        t = t.view(torch.uint16)
    elif t.dtype == torch.float16:
        t = t.view(torch.int16)
    return t.numpy().reshape(-1)


def destination(shape, out=None):
    """A float32 tensor to compute into: `out` itself where that is contiguous float32."""
    if out is not None and out.dtype is torch.float32 and out.is_contiguous():
        return out
    return torch.empty(shape, dtype=torch.float32)


def finish(result, dtype, out=None):
    """Round a float32 result once to what the op returns, in `out` where one is given."""
    if out is None:
        return result if result.dtype is dtype else result.to(dtype)
    return out if result is out else out.copy_(result)
