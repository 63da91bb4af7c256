"""Latent attention (MLA, absorbed): every query head reads the same cached latents, as keys and as values.

The tile of latents is the large operand, so it stands on the left of both products: scores are latents . queries
[tokens, rows] and sums are latentsᵀ . weights [R, rows]. It is read from memory once, lies in shared memory once, and
serves both; few query rows (16 heads of one decoded token) then fill the narrow side of a matrix instruction instead of
padding its wide side. A row is a (token, head) pair of one request, so decode and prefill are one kernel.

Decode is bound by reading the cache: a request's tokens are split over programs until they fill the chip once, each
leaves its mean and the logarithm of its sum, and `merge_splits` joins them in the order of the splits. Sixteen-bit
inputs of one dtype go to the tensor cores; all others are widened to float32 and multiplied as IEEE says.
"""

import torch
import triton
import triton.language as tl

from .device import facts
from .flash import LN2, LOG2E, merge_splits

DOTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def load_tokens(
    cache,
    strides,
    first,
    stop,
    N: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """A tile of a slot from token `first`. Past `stop` it repeats the last token: what nobody sees may hold NaN."""
    at, n = tl.arange(0, BLOCK_TOKENS), tl.arange(0, BLOCK_N)
    at = tl.minimum(at, tl.maximum(stop - 1, 0) - first).to(INSIDE)[:, None]
    place = cache + tl.cast(first, tl.int64) * strides[1] + (at * strides[1] + n.to(INSIDE) * strides[2])
    if N == BLOCK_N:
        return tl.load(place)
    else:
        return tl.load(place, mask=(n < N)[None, :], other=0.0)


@triton.jit
def latent_attention_kernel(
    q, q_pe, latent, k_pe, lengths, slots, out, lse, means, logs, L, S, scale, tiles, splits,
    q_strides, q_pe_strides, latent_strides, k_pe_strides, out_strides, lse_strides,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    ROWS_FIRST: tl.constexpr, DOT: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """One tile of a request's rows against one split of the tokens it sees."""
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
    total = tl.zeros([BLOCK_ROWS, BLOCK_R] if ROWS_FIRST else [BLOCK_R, BLOCK_ROWS], tl.float32)
    TOKENS: tl.constexpr = 1 if ROWS_FIRST else 0  # the axis of the scores that is reduced
    keys = load_tokens(k_pe, k_pe_strides, start, stop, P, BLOCK_TOKENS, BLOCK_P, INSIDE)
    for first in range(start, stop, BLOCK_TOKENS):
        rows = load_tokens(latent, latent_strides, first, stop, R, BLOCK_TOKENS, BLOCK_R, INSIDE).to(DOT)
        if ROWS_FIRST:
            scores = tl.dot(turned, tl.trans(keys.to(DOT)), input_precision="ieee")
            scores = tl.dot(queries, tl.trans(rows), scores, input_precision="ieee")
        else:
            scores = tl.dot(keys.to(DOT), tl.trans(turned), input_precision="ieee")
            scores = tl.dot(rows, tl.trans(queries), scores, input_precision="ieee")
        # The next rotary keys wait in registers: shared memory is all taken by the tiles of latents.
        keys = load_tokens(k_pe, k_pe_strides, first + BLOCK_TOKENS, stop, P, BLOCK_TOKENS, BLOCK_P, INSIDE)
        at = tl.expand_dims(first + tl.arange(0, BLOCK_TOKENS), 1 - TOKENS)
        is_seen = at < tl.expand_dims(tl.minimum(seen, stop), TOKENS)
        scores = tl.where(is_seen, scores * (scale * LOG2E), float("-inf"))
        peak = tl.maximum(top, tl.max(scores, TOKENS))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(scores - tl.expand_dims(shift, TOKENS))
        shrink = tl.exp2(top - shift)
        weight = weight * shrink + tl.sum(weights, TOKENS)
        total *= tl.expand_dims(shrink, TOKENS)
        if ROWS_FIRST:
            total = tl.dot(weights.to(DOT), rows, total, input_precision="ieee")
        else:
            total = tl.dot(tl.trans(rows), weights.to(DOT), total, input_precision="ieee")
        top = peak

    mean = total / tl.expand_dims(tl.where(weight == 0, 1.0, weight), TOKENS)
    mean = mean if ROWS_FIRST else tl.trans(mean)
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


# 2026-11-15, not measured yet: (rows, tokens, warps, stages).
MOST_SPLITS = 128


def launch_sizes(rows, R, P, size, device):
    """(rows, tokens) of a tile, its warps and stages, for elements of `size` bytes."""
    wide = (R + P) * size
    block_rows = 64 if rows >= 64 and size == 2 else 16
    room = device.shared - 7168 - block_rows * wide
    if size == 2:
        for tokens, stages in ((64, 3), (64, 2), (32, 3), (32, 2), (16, 2)):
            # Blackwell's tensor cores keep one tile more.
            if tokens * ((stages + (device.capability == 100)) * R + P) * size <= room:
                return block_rows, tokens, 8 if block_rows > 16 else 4, stages
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
        same = q.dtype.itemsize == 2 and q.dtype == q_pe.dtype == latent.dtype == k_pe.dtype
        device, size = facts(q.device), 2 if same else 4
        block_r, block_p = max(16, triton.next_power_of_2(R)), max(16, triton.next_power_of_2(P))
        block_rows, block_tokens, warps, stages = launch_sizes(L * H, block_r, block_p, size, device)
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
            ROWS_FIRST=block_rows >= 64, DOT=DOTS[q.dtype if same else torch.float32],
            INSIDE=tl.int64 if far else tl.int32, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if splits > 1:
            merge_splits(means, logs, o, lse)
    return (o, lse) if return_lse else o
