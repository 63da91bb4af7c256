"""Latent attention (MLA, absorbed): every query head reads the same cached latents, as keys and as values.

A tile of latents is read from memory once, lies in shared memory once, and serves both products: transposed for the
scores, as it is for the sums. A row is a (token, head) pair of one request, so decode and prefill are one kernel: tiles
of 16 rows for a decoded token with few heads, of 64 for more, whose sums [64, 512] just fit into registers.

Decode is bound by reading the cache: a request's tokens are split over programs until they fill the chip once, each
leaves its mean and the logarithm of its sum, and `merge_splits` joins them in the order of the splits. Sixteen-bit
inputs of one dtype go to the tensor cores; all others are widened to float32 and multiplied as IEEE says.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .device import facts, overlap
from .flash import LN2, LOG2E, merge_splits

DOTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def load_tokens(
    cache, strides, first, stop, N: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """A tile of a slot from token `first`. Past `stop` it repeats the last token: what nobody sees may hold NaN."""
    at, n = tl.arange(0, BLOCK_TOKENS), tl.arange(0, BLOCK_N)
    at = tl.minimum(at, tl.maximum(stop - 1, 0) - first).to(INSIDE)[:, None]
    place = cache + tl.cast(first, tl.int64) * strides[1] + (at * strides[1] + n.to(INSIDE) * strides[2])
    if N == BLOCK_N:
        return tl.load(place)
    else:
        return tl.load(place, mask=(n < N)[None, :], other=0.0)


@triton.jit
def float32_products(x, y, PART: tl.constexpr):
    """x . y transposed in float32, in sums over PART channels that are added after: one long sum rounds too often."""
    PARTS: tl.constexpr = x.shape[1] // PART
    x = tl.permute(tl.reshape(x, (x.shape[0], PARTS, PART)), (1, 0, 2))
    y = tl.permute(tl.reshape(y, (y.shape[0], PARTS, PART)), (1, 2, 0))
    return tl.sum(tl.dot(x, y, input_precision="ieee"), 0)


@triton.jit
def latent_attention_kernel(
    q, q_pe, latent, k_pe, lengths, slots, out, lse, means, logs, L, S, scale, tiles, splits,
    q_strides, q_pe_strides, latent_strides, k_pe_strides, out_strides, lse_strides,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    PART: tl.constexpr, DOT: tl.constexpr, INSIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of a request's rows against one split of the tokens it sees."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    # Late tokens see most: their tiles start first. Tiles of one split are neighbours, and share its latents in L2.
    tile = tiles - 1 - tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles % splits
    request = (tl.program_id(0) // tiles // splits).to(tl.int64)
    length = S if lengths is None else tl.load(lengths + request).to(tl.int32)
    slot = request if slots is None else tl.load(slots + request).to(tl.int64)

    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = row // H, row % H
    is_row = token < L
    # How many tokens a row sees, and the most that any row of this tile does.
    place = length - L + token
    seen = tl.where(is_row & (place >= 0), place + 1 if CAUSAL else length, 0)
    most = tl.max(seen, 0)
    share = tl.cdiv(tl.cdiv(most, splits), BLOCK_TOKENS) * BLOCK_TOKENS
    start = split * share
    stop = tl.minimum(most, start + share)

    r, pe = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    token, head = token.to(tl.int64), head.to(tl.int64)
    q_row = q + request * q_strides[0] + token * q_strides[1] + head * q_strides[2]
    queries = tl.load(q_row[:, None] + r * q_strides[3], mask=is_row[:, None] & (r < R), other=0.0).to(DOT)
    pe_row = q_pe + request * q_pe_strides[0] + token * q_pe_strides[1] + head * q_pe_strides[2]
    turned = tl.load(pe_row[:, None] + pe * q_pe_strides[3], mask=is_row[:, None] & (pe < P), other=0.0).to(DOT)
    latent += slot * latent_strides[0]
    k_pe += slot * k_pe_strides[0]

    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_ROWS], tl.float32)
    total = tl.zeros([BLOCK_ROWS, BLOCK_R], tl.float32)
    keys = load_tokens(k_pe, k_pe_strides, start, stop, P, BLOCK_TOKENS, BLOCK_P, INSIDE)
    for first in range(start, stop, BLOCK_TOKENS):
        rows = load_tokens(latent, latent_strides, first, stop, R, BLOCK_TOKENS, BLOCK_R, INSIDE).to(DOT)
        scores = tl.dot(turned, tl.trans(keys.to(DOT)), input_precision="ieee")
        if PART < BLOCK_R:
            scores += float32_products(queries, rows, PART)
        else:
            scores = tl.dot(queries, tl.trans(rows), scores, input_precision="ieee")
        # The next rotary keys wait in registers: shared memory is all taken by the tiles of latents.
        keys = load_tokens(k_pe, k_pe_strides, first + BLOCK_TOKENS, stop, P, BLOCK_TOKENS, BLOCK_P, INSIDE)
        at = first + tl.arange(0, BLOCK_TOKENS)
        scores = tl.where(at < tl.minimum(seen, stop)[:, None], scores * (scale * LOG2E), float("-inf"))
        peak = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(top - shift)
        weight = weight * shrink + tl.sum(weights, 1)
        total = tl.dot(weights.to(DOT), rows, total * shrink[:, None], input_precision="ieee")
        top = peak

    mean = total / tl.where(weight == 0, 1.0, weight)[:, None]
    log_weight = top + tl.log2(weight)
    if SPLIT:
        line = (request * (L * H) + row) * splits + split
        tl.store(means + line[:, None] * R + r, mean, mask=is_row[:, None] & (r < R))
        tl.store(logs + line, log_weight, mask=is_row)
    else:
        line = out + request * out_strides[0] + token * out_strides[1] + head * out_strides[2]
        tl.store(line[:, None] + r * out_strides[3], mean.to(out.dtype.element_ty), mask=is_row[:, None] & (r < R))
        if lse is not None:
            line = lse + request * lse_strides[0] + token * lse_strides[1] + head * lse_strides[2]
            tl.store(line, log_weight * LN2, mask=is_row)


MOST_SPLITS = 128
# Tokens and stages of a tile, the first that shared memory has room for, by the rows of a tile. 2026-11-15, H200,
# one token over 32768 of 512 + 64 in bfloat16: 16 heads (64, 4) 20.7 us, with 4 warps 20.9, (32, 6) 25.4; 128 heads
# (64, 2) 52.9 us, (32, 3) 59.6. Tokens as the rows of both products would pad nothing, but Triton 3.6 miscompiles it.
TILES = {64: ((64, 2), (32, 3), (32, 2), (16, 2)), 16: ((64, 4), (64, 3), (32, 3), (32, 2), (16, 2))}
WARPS = 8
BESIDE = 7168  # bytes of shared memory for weights and reductions


def launch_sizes(many, R, P, narrow, device):
    """(rows, tokens, warps, stages) of a tile, for `many` rows or few; `narrow` if the tensor cores take the inputs."""
    if narrow:
        for block_rows in (64, 16) if many else (16,):
            for tokens, stages in TILES[block_rows]:
                # Hopper's matrix instructions keep one tile more for 64 rows, Blackwell's two.
                tiles = stages - 1 + (1 + (device.capability == 100) if block_rows == 64 else 0)
                if 2 * ((block_rows + tokens) * (R + P) + (tiles - 1) * tokens * R) + BESIDE <= device.shared:
                    return block_rows, tokens, WARPS, stages
    return 16, 16, 4, 1


def latent_attention(
    q, q_pe, latent, k_pe, *, scale, causal=True, lengths=None, slots=None, return_lse=False, out=None
):
    B, L, H, R = q.shape
    S, P = latent.shape[1], k_pe.shape[2]
    q_pe, latent, k_pe = (x.float() if x.dtype == torch.float64 else x for x in (q_pe, latent, k_pe))
    o, lse = out if return_lse and out is not None else (out, None)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if o is None else o
    if return_lse and lse is None:
        lse = torch.empty((B, L, H), dtype=torch.float32, device=q.device)
    if q.numel():
        narrow = q.dtype.itemsize == 2 and q.dtype == q_pe.dtype == latent.dtype == k_pe.dtype
        device = facts(q.device)
        block_r, block_p = max(16, triton.next_power_of_2(R)), max(16, triton.next_power_of_2(P))
        # Rows of the cache that 16-byte copies can take; tiles of 64 rows are for them alone.
        smooth = R % 8 == 0 and all(x.stride(2) == 1 and x.stride(1) % 8 == 0 for x in (latent, k_pe))
        many = smooth and L * H >= 64
        block_rows, block_tokens, warps, stages = launch_sizes(many, block_r, block_p, narrow, device)
        part = block_r if narrow else min(64, block_r)
        tiles = triton.cdiv(L * H, block_rows)
        splits = min(MOST_SPLITS, max(1, device.processors // (B * tiles)), triton.cdiv(S, block_tokens))
        # Places inside a tile fit 32 bits, but for caches with enormous strides.
        far = any(block_tokens * x.stride(1) + x.shape[2] * x.stride(2) >= 2**31 for x in (latent, k_pe))
        means = logs = None
        if splits > 1:
            means = torch.empty((B * L * H, splits, R), dtype=torch.float32, device=q.device)
            logs = torch.empty((B * L * H, splits), dtype=torch.float32, device=q.device)
        latent_attention_kernel[(B * splits * tiles,)](
            q, q_pe, latent, k_pe, lengths, slots, o, lse, means, logs, L, S, scale, tiles, splits,
            q.stride(), q_pe.stride(), latent.stride(), k_pe.stride(), o.stride(),
            None if lse is None else lse.stride(),
            H=H, R=R, P=P, CAUSAL=causal, SPLIT=splits > 1,
            BLOCK_ROWS=block_rows, BLOCK_TOKENS=block_tokens, BLOCK_R=block_r, BLOCK_P=block_p,
            PART=part, DOT=DOTS[q.dtype if narrow else torch.float32], INSIDE=tl.int64 if far else tl.int32,
            num_warps=warps, num_stages=stages, **overlap(q.device),
        )  # fmt: skip
        if splits > 1:
            merge_splits(means, logs, o, lse)
    return (o, lse) if return_lse else o
