"""Launches of the fused kernels at the published shapes, on tensors without memory, for cross_compile.py."""

import torch

from halfbyte.kernels.triton import fused

# Query heads, those of keys, their size, how many channels of them rotate; and whether values are normed, rows a ring.
ATTENTIONS = [
    (16, 2, 256, 64, False, False),  # Qwen3.5-35B-A3B
    (32, 4, 128, 128, False, False),  # Qwen3-30B-A3B
    (16, 8, 256, 256, True, True),  # gemma-4-26B-A4B: most of its layers
    (16, 2, 512, 128, True, False),  # and the others
]
RECURRENCES = [(16, 32, 128), (16, 64, 128)]  # heads of keys, of values, their size: Qwen3.5's 35B and 397B
# Channels, experts a token, and whether one is beside them that all tokens take, with a gate or without.
MIXTURES = [(2048, 8, True, True), (2048, 8, False, False), (4096, 10, True, True), (7168, 8, True, False)]
STREAMS = (1, 8, 32)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def whole(*shape):
    return meta(*shape, dtype=torch.int32)


def wide(*shape):
    return meta(*shape, dtype=torch.float32)


def rotate_and_append(B, H, G, D, rotary, norm_v, ring):
    q, k, v, (k_cache, v_cache) = meta(B, H, D), meta(B, G, D), meta(B, G, D), (meta(B, 1280, G, D) for _ in range(2))
    fused.rotate_and_append(
        q, k, v, meta(D), meta(D), 1e-6, whole(B), wide(rotary // 2), k_cache, v_cache, slots=whole(B),
        lengths=whole(B), rotary=rotary, scale=1.0, norm_v=norm_v, ring=ring, out=meta(B, H, D),
    )  # fmt: skip


def recurrent_step(B, Hk, Hv, D):
    C, q, k = (2 * Hk + Hv) * D, meta(B, Hk, D), meta(B, Hk, D)
    mixed = fused.convolve_and_norm(
        meta(B, 1, C), meta(C, 4, 1), meta(B, 3, C), whole(B), q, k, 1e-6, 0.5, 0.5, out=meta(B, 1, C)
    )
    v = mixed[:, 0, 2 * Hk * D :].view(B, Hv, D)
    fused.delta_and_norm(
        q, k, v, meta(B, Hv), meta(B, Hv), meta(Hv), meta(Hv), wide(B, Hv, D, D), whole(B), meta(B, Hv, D), meta(D),
        1e-6, out=meta(B, Hv, D),
    )  # fmt: skip


def combine_and_norm(B, D, A, shared, gated):
    y, out = meta(B, A + shared, D), (None, wide(B, D), meta(B, D))
    beside, gate = y[:, A] if shared else None, meta(B, 1) if gated else None
    fused.combine_and_norm(y[:, :A], wide(B, A), beside, gate, wide(B, D), meta(D), 1e-6, out=out)


FAMILIES = ((rotate_and_append, ATTENTIONS), (recurrent_step, RECURRENCES), (combine_and_norm, MIXTURES))
LAUNCHES = {
    f"{launch.__name__}[{', '.join(map(str, (B, *shape)))}]": (launch, (B, *shape))
    for launch, shapes in FAMILIES
    for shape in shapes
    for B in STREAMS
}
