"""Launches of the fused kernels at the published shapes, on tensors without memory, for cross_compile.py."""

import torch

from halfbyte.kernels.triton import (
    fused,
    fused_attention,
    fused_experts,
    fused_latent,
    fused_norms,
    fused_projections,
    fused_router,
    slots,
)
from halfbyte.kernels.triton.stream import Norm
from halfbyte.ops.experts import Experts
from halfbyte.ops.formats import Packed

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
# Channels, the inner ones of an expert, experts, those of a token; whether one is beside them; whether the router is
# of bfloat16, and its groups.
CHOICES = [
    (2048, 512, 256, 8, True, False, None),  # Qwen3.5-35B-A3B
    (2048, 768, 128, 8, False, False, None),  # Qwen3-30B-A3B
    (2816, 704, 128, 8, False, False, None),  # gemma-4-26B-A4B
    (7168, 2048, 256, 8, True, True, 8),  # DeepSeek-V3
]
# Channels, and experts that are added up first: gemma-4-26B-A4B, behind its attention and behind its experts.
CHAINS = [(2816, 0), (2816, 8)]
OUTWARD = [(2048, 4096, 12352), (7168, 16384, 2112)]  # channels, those of a mixer, the next one's projections
LATENTS = [(128, 64, 512)]  # heads, channels that rotate, rank: DeepSeek-V3
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


def rotate_and_attend(B, H, G, D, rotary, norm_v, ring):
    q, k, v, (k_cache, v_cache) = meta(B, H, D), meta(B, G, D), meta(B, G, D), (meta(B, 1280, G, D) for _ in range(2))
    fused_attention.rotate_and_attend(
        q, k, v, meta(D), meta(D), 1e-6, whole(B), wide(rotary // 2), k_cache, v_cache, slots=whole(B),
        lengths=whole(B), rotary=rotary, turn_scale=1.0, norm_v=norm_v, ring=ring, scale=0.1,
        window=1024 if ring else None, softcap=None, out=meta(B, 1, H, D),
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


def rotate_and_append_latent(B, H, P, R):
    q, joined = meta(B, H, 2 * P), meta(B, R + P)
    fused_latent.rotate_and_append_latent(
        q[..., P:], joined[:, R:], joined[:, :R], meta(R), 1e-6, whole(B), meta(P // 2, dtype=torch.float64),
        meta(B, 1280, R), meta(B, 1280, P), slots=whole(B), lengths=whole(B), scale=1.0, out=meta(B, H, P),
    )  # fmt: skip


def norm_chain(B, D, A):
    """Behind attention three norms read the sum. Behind experts a dense network's result is added, and one does."""
    x, shares, inner = (meta(B, A, D), wide(B, A), meta(D)) if A else (meta(B, D), None, None)
    add, outer, count = (meta(B, D), meta(D), 1) if A else (None, None, 3)
    scale, weights = meta(1) if A else None, [meta(D) for _ in range(count)]
    fused_norms.norm_chain(
        x, shares, inner, add, outer, meta(D), wide(B, D), scale, weights, 1e-6,
        out=(wide(B, D), None, *(meta(B, D) for _ in range(count))),
    )  # fmt: skip


def packed(*shape, bits=4):
    *lead, K = shape
    return Packed(whole(*lead, K * bits // 32), meta(*lead, K // 64), meta(*lead, K // 64), bits, 64)


def chosen_experts(B, H, I, E, k, shared, dense, groups):  # noqa: E741
    """The router with the norm before it, and experts with the same."""
    x, squares, ids, weights = meta(B, H), wide(B, H // 16), whole(B, k + shared), wide(B, k)
    norm = Norm(squares, 1e-6)
    router = meta(E, H) if dense else packed(E + shared, H, bits=8)
    logits, more = meta(B, router.shape[0]), {"kind": "sigmoid", "bias": wide(E)} if dense else {}
    fused_router.choose_experts(
        x, router, k, experts=E, board=whole(B, E), out=(logits, ids[:, :k], weights), norm=norm, groups=groups,
        keep_groups=groups and groups // 2, **more,
    )  # fmt: skip
    experts = Experts(packed(E + shared, I, H), packed(E + shared, I, H), packed(E + shared, H, I))
    fused_projections.normed_expert_mlp(x, ids, experts, norm=norm, out=meta(B, k + shared, H))


def routed_experts(B, H, I, E, k, shared, dense, groups):  # noqa: E741
    """Experts of one token that choose themselves."""
    if B == 1 and H <= fused_experts.WIDEST:
        ids, logits, scale = whole(B, k + shared), meta(B, E + shared)[:, :E], None if shared else wide(E)
        experts = Experts(packed(E + shared, I, H), packed(E + shared, I, H), packed(E + shared, H, I))
        out = meta(B, k + shared, H), wide(B, k)
        fused_experts.routed_experts(meta(B, H), logits, k, experts, ids=ids, per_expert_scale=scale, out=out)


def fetched_experts(B, H, I, E, k, *_):  # noqa: E741
    """Slots for what B tokens chose of experts in host memory, and the copies."""

    def parts(count):
        stacks = (packed(count, I, H), packed(count, I, H), packed(count, H, I))
        return [part for one in stacks for part in (one.words, one.scales, one.biases)]

    state = whole(3, E), meta(4, dtype=torch.int64)
    slots.assign_slots(whole(B, k), state, limit=1)
    _, loads = slots.assign_slots(whole(B, k), state)
    slots.fill_slots(loads, parts(E), parts(E // 4))


def onto_stream(B, N, inner, after):
    """A projection out of a mixer with what is kept for the norm behind it, and one that reads that."""
    x, w, h = meta(B, inner), packed(N, inner), wide(B, N)
    together = fused_projections.outputs_together(x, w)
    normed, squares = meta(B, N), wide(B, -(-N // together))
    fused_projections.qmm_onto_stream(x, w, h, keep=(meta(N), normed, squares), out=wide(B, N))
    fused_projections.normed_qmm(normed, packed(after, N), norm=Norm(squares, 1e-6), out=meta(B, after))


FAMILIES = ((rotate_and_append, ATTENTIONS), (rotate_and_attend, ATTENTIONS), (recurrent_step, RECURRENCES),
            (combine_and_norm, MIXTURES), (norm_chain, CHAINS), (rotate_and_append_latent, LATENTS),
            (chosen_experts, CHOICES), (routed_experts, CHOICES), (fetched_experts, CHOICES))  # fmt: skip
LAUNCHES = {
    f"{launch.__name__}[{', '.join(map(str, (B, *shape)))}]": (launch, (B, *shape))
    for launch, shapes in FAMILIES
    for shape in shapes
    for B in STREAMS
} | {f"onto_stream[{B}, {shape}]": (onto_stream, (B, *shape)) for shape in OUTWARD for B in (1, 2, 4)}
