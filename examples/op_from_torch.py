"""One op, called from torch: weights of half a byte each, and a multiplication that reads them as they are."""

import torch

import halfbyte
from halfbyte.ops import dispatch
from halfbyte.ops.quant import qmm

device = "cuda" if torch.cuda.is_available() else "cpu"
weight = torch.randn(4096, 2048, device=device)
x = torch.randn(1, 2048, device=device)

packed = halfbyte.quantize(weight, bits=4, group=64)  # bit for bit what mlx makes of it
stored = sum(part.nbytes for part in (packed.words, packed.scales, packed.biases))
print(f"{weight.nbytes / 1e6:.1f} MB of float32 became {stored / 1e6:.1f} MB")

with dispatch.trace() as calls:  # which kernel runs is the device's choice, and can be seen
    y = qmm(x, packed)
print(*(f"{call.op} ran in {call.language}" for call in calls))

# The kernel multiplies with exactly what the codes stand for: all that is lost was lost by the four bits.
same = x @ halfbyte.dequantize(packed).mT
print(f"against the same weights in full: {(y - same).abs().max() / same.abs().max():.0e}")
print(f"against the weights before:       {(y - x @ weight.mT).norm() / y.norm():.1%}")

with dispatch.reference():  # the same op as plain torch code: its definition, and the way to debug
    assert torch.allclose(y, qmm(x, packed), rtol=1e-4, atol=1e-3)
