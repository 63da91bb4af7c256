"""What stands before a latent attention of one token each, in one launch."""

import triton
import triton.language as tl

from .device import overlap
from .elementary import begin_early, rounded
from .fused import turn_of


@triton.jit
def turn_pairs(source, target, turn, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """A row of 2 HALF channels, whose neighbours are pairs."""
    column = tl.arange(0, 2 * PAIRS)
    cos, sin = turn
    inside = column < 2 * HALF
    a, b = tl.split(tl.reshape(tl.load(source + column, inside, 0).to(tl.float32), [PAIRS, 2]))
    turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), [2 * PAIRS])
    tl.store(target + column, rounded(turned, target.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["S"])
def rotate_and_append_latent_kernel(
    q, k, latent, weight, eps, positions, inv_freq, scale, slots, lengths, S, y, k_cache, latent_cache,
    q_steps, k_step, latent_step, y_steps, k_cache_steps, latent_cache_steps,
    H: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One request's head of queries, or its key, or its latent. What is read early: see rotate_and_append_kernel."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    turn = turn_of(positions, request, inv_freq, scale, HALF, PAIRS)
    slot, place = tl.load(slots + request).to(tl.int64), tl.load(lengths + request).to(tl.int64) - 1
    column = tl.arange(0, BLOCK)
    by = tl.load(weight + column, column < R, 0).to(tl.float32)
    begin_early(OVERLAP)
    if head < H:
        source, target = q + request * q_steps[0] + head * q_steps[1], y + request * y_steps[0] + head * y_steps[1]
        turn_pairs(source, target, turn, HALF, PAIRS)
    else:
        if place < S:
            if head == H:
                kept = k_cache + slot * k_cache_steps[0] + place * k_cache_steps[1]
                turn_pairs(k + request * k_step, kept, turn, HALF, PAIRS)
            else:
                inside = column < R
                x = tl.load(latent + request * latent_step + column, inside, 0).to(tl.float32)
                factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / R + eps)
                x = x * by * factor
                row = latent_cache + slot * latent_cache_steps[0] + place * latent_cache_steps[1]
                tl.store(row + column, rounded(x, latent_cache.dtype.element_ty), inside)


def rotate_and_append_latent(
    q, k, latent, weight, eps, positions, inv_freq, latent_cache, k_cache, *, slots, lengths, scale, out
):  # fmt: skip
    """out = rope(q);  rope(k) and rms_norm(latent) go into their caches. Pairs are neighbours, and all channels turn.

    q, out [B, H, P]   k [B, P]   latent [B, R]   latent_cache [slots, S, R]   k_cache [slots, S, P]
    positions, slots, lengths [B]
    """
    (B, H, P), R = q.shape, latent.shape[1]
    rotate_and_append_latent_kernel[(B, H + 2)](
        q, k, latent, weight, eps, positions, inv_freq, float(scale), slots, lengths, k_cache.shape[1], out, k_cache,
        latent_cache, q.stride()[:2], k.stride(0), latent.stride(0), out.stride()[:2], k_cache.stride()[:2],
        latent_cache.stride()[:2], H, P // 2, R, triton.next_power_of_2(P // 2), triton.next_power_of_2(R),
        num_warps=1, **overlap(q.device),
    )  # fmt: skip
    return out
