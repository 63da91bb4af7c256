"""Latent attention (MLA, absorbed): every query head reads the same cached latents, as keys and as values.

A tile of latents is read from memory once, lies in shared memory once, and serves both products: transposed for the
scores, as it is for the sums. A row is a (token, head) pair of one request, so decode and prefill are one kernel: tiles
of 16 rows for a decoded token with few heads, of 64 for more, whose sums [64, 512] just fit into registers.

Decode is bound by reading the cache: a request's tokens are split over programs until they fill the chip once, each
leaves its mean and the logarithm of its sum, and `merge_splits` joins them in the order of the splits. A program has
only a few tiles then, so their latency counts: everything of a tile comes through the pipeline, and the channels stand
in two halves, so that the scores are three chains of products instead of a long one. Sixteen-bit inputs of one dtype go
to the tensor cores; all others are widened to float32 and multiplied as IEEE says.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .device import facts, overlap, steady
from .flash import LN2, LOG2E, NOTHING, merge_splits, products, rows_of, soften

DOTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def load_tokens(
    cache, strides, first, stop, FROM: tl.constexpr, N: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, INSIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of a slot from token `first`, of its channels from FROM.

    Past `stop` it repeats the last token: what nobody sees may hold NaN.
    """
    at, n = tl.arange(0, BLOCK_TOKENS), FROM + tl.arange(0, BLOCK_N)
    at = tl.minimum(at, tl.maximum(stop - 1, 0) - first).to(INSIDE)[:, None]
    place = cache + tl.cast(first, tl.int64) * strides[1] + (at * strides[1] + n.to(INSIDE) * strides[2])
    if FROM + BLOCK_N <= N:
        return tl.load(place).to(DOT)
    else:
        return tl.load(place, mask=(n < N)[None, :], other=0.0).to(DOT)


@triton.jit
def load_rows(rows, stride, is_row, FROM: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr):
    """Channels from FROM of the queries that `rows` point at."""
    n = FROM + tl.arange(0, BLOCK_N)
    return tl.load(rows[:, None] + n * stride, mask=is_row[:, None] & (n < N), other=0.0).to(DOT)


@triton.jit
def store_means(rows, stride, mean, is_row, FROM: tl.constexpr, N: tl.constexpr):
    """Channels from FROM of what `rows` point at."""
    n = FROM + tl.arange(0, mean.shape[1])
    tl.store(rows[:, None] + n * stride, mean.to(rows.dtype.element_ty), mask=is_row[:, None] & (n < N))


@triton.jit
def latent_attention_kernel(
    q, q_pe, latent, k_pe, lengths, slots, out, lse, means, logs, L, S, scale, tiles, splits,
    q_strides, q_pe_strides, latent_strides, k_pe_strides, out_strides, lse_strides,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    DOT: tl.constexpr, INSIDE: tl.constexpr, FEW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of a request's rows against one split of the tokens it sees."""
    # Late tokens see most: their tiles start first. Tiles of one split are neighbours, and share its latents in L2.
    tile = tiles - 1 - tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles % splits
    request = (tl.program_id(0) // tiles // splits).to(tl.int64)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = row // H, (row % H).to(tl.int64)
    is_row = token < L
    q_rows = rows_of(q, q_strides, request, token, head)
    pe_rows = rows_of(q_pe, q_pe_strides, request, token, head)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    length = S if lengths is None else tl.load(lengths + request).to(tl.int32)
    slot = request if slots is None else tl.load(slots + request).to(tl.int64)
    # The most tokens that any row of this tile sees, this program's share of them, and what each row sees of that.
    last = tl.minimum((tile * BLOCK_ROWS + BLOCK_ROWS - 1) // H, L - 1)
    most = tl.maximum(length - L + last + 1 if CAUSAL else length, 0)
    share = tl.cdiv(tl.cdiv(most, splits), BLOCK_TOKENS) * BLOCK_TOKENS
    start = split * share
    stop = tl.minimum(most, start + share)
    place = length - L + token
    seen = tl.where(is_row & (place >= 0), tl.minimum(place + 1 if CAUSAL else length, stop), 0)[:, None]
    latent += slot * latent_strides[0]
    k_pe += slot * k_pe_strides[0]
    scale *= LOG2E

    HALF: tl.constexpr = BLOCK_R // 2
    at = tl.arange(0, BLOCK_TOKENS)
    turned = load_rows(pe_rows, q_pe_strides[3], is_row, 0, P, BLOCK_P, DOT)
    top = tl.full([BLOCK_ROWS], NOTHING, tl.float32)
    if FEW:
        queries = load_rows(q_rows, q_strides[3], is_row, 0, R, HALF, DOT)
        queries2 = load_rows(q_rows, q_strides[3], is_row, HALF, R, HALF, DOT)
        weight = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
        total, total2 = tl.zeros([BLOCK_ROWS, HALF], tl.float32), tl.zeros([BLOCK_ROWS, HALF], tl.float32)
        for first in range(start, stop, BLOCK_TOKENS):
            keys = load_tokens(k_pe, k_pe_strides, first, stop, 0, P, BLOCK_TOKENS, BLOCK_P, INSIDE, DOT)
            rows = load_tokens(latent, latent_strides, first, stop, 0, R, BLOCK_TOKENS, HALF, INSIDE, DOT)
            rows2 = load_tokens(latent, latent_strides, first, stop, HALF, R, BLOCK_TOKENS, HALF, INSIDE, DOT)
            # Scaled one by one: sums of bare products would be made one chain again.
            scores = products(turned, keys, None) * scale + products(queries, rows, None) * scale
            scores += products(queries2, rows2, None) * scale
            weights, top, shrink = soften(tl.where(first + at < seen, scores, NOTHING), top, 1.0, 1)
            weight = weight * shrink[:, None] + weights
            total = tl.dot(weights.to(DOT), rows, total * shrink[:, None], input_precision="ieee")
            total2 = tl.dot(weights.to(DOT), rows2, total2 * shrink[:, None], input_precision="ieee")
        weight = tl.sum(weight, 1)
    else:
        queries = load_rows(q_rows, q_strides[3], is_row, 0, R, BLOCK_R, DOT)
        weight, total = tl.zeros([BLOCK_ROWS], tl.float32), tl.zeros([BLOCK_ROWS, BLOCK_R], tl.float32)
        keys = load_tokens(k_pe, k_pe_strides, start, stop, 0, P, BLOCK_TOKENS, BLOCK_P, INSIDE, DOT)
        for first in range(start, stop, BLOCK_TOKENS):
            rows = load_tokens(latent, latent_strides, first, stop, 0, R, BLOCK_TOKENS, BLOCK_R, INSIDE, DOT)
            scores = tl.dot(queries, tl.trans(rows), tl.dot(turned, tl.trans(keys)))
            # The next rotary keys wait in registers: shared memory is all taken by the queries and the latents.
            after = first + BLOCK_TOKENS
            keys = load_tokens(k_pe, k_pe_strides, after, stop, 0, P, BLOCK_TOKENS, BLOCK_P, INSIDE, DOT)
            weights, top, shrink = soften(tl.where(first + at < seen, scores * scale, NOTHING), top, 1.0, 1)
            weight = weight * shrink + tl.sum(weights, 1)
            total = tl.dot(weights.to(DOT), rows, total * shrink[:, None])

    log = top + tl.log2(weight)
    weight = tl.where(weight == 0, 1.0, weight)[:, None]
    if SPLIT:
        line = (request * (L * H) + row) * splits + split
        o_rows, stride = means + line * R, 1
        tl.store(logs + line, log, mask=is_row)
    else:
        o_rows, stride = rows_of(out, out_strides, request, token, head), out_strides[3]
        if lse is not None:
            tl.store(rows_of(lse, lse_strides, request, token, head), log * LN2, mask=is_row)
    store_means(o_rows, stride, total / weight, is_row, 0, R)
    if FEW:
        store_means(o_rows, stride, total2 / weight, is_row, HALF, R)


MOST_SPLITS = 128
# Tokens, warps and stages of a tile, the first that shared memory has room for, by the rows of a tile. 2026-11-15,
# H200, one token over 32768 of 512 + 64 in bfloat16: 16 heads (64, 4, 3) 16.3 us, with 8 warps 17.3, (32, 4, 6) 17.5;
# 128 heads (64, 8, 2) 53 us, (32, 8, 3) 60.
TILES = {
    64: ((64, 8, 2), (32, 8, 3), (32, 8, 2), (16, 8, 2)),
    16: ((64, 4, 3), (32, 4, 4), (32, 4, 3), (32, 4, 2), (16, 4, 2)),
}
KEPT = {90: 1, 100: 2}  # tiles that matrix instructions of these capabilities keep beside those on their way
BESIDE = 7168  # bytes of shared memory for weights and reductions


def launch_sizes(many, R, P, narrow, device):
    """(rows, tokens, warps, stages) of a tile, for `many` rows or few; `narrow` if the tensor cores take the inputs."""
    if narrow:
        for block_rows in (64, 16) if many else (16,):
            for tokens, warps, stages in TILES[block_rows]:
                if block_rows == 64:
                    tiles = (stages - 1 + KEPT.get(device.capability, 0)) * tokens * R + tokens * P
                else:
                    tiles = (stages - 1) * tokens * (R + P)
                if 2 * (block_rows * (R + P) + tiles) + BESIDE <= device.shared:
                    return block_rows, tokens, warps, stages
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
        block_r, block_p = max(32, triton.next_power_of_2(R)), max(16, triton.next_power_of_2(P))
        # Rows of the cache that 16-byte copies can take; tiles of 64 rows are for them alone.
        smooth = R % 8 == 0 and all(x.stride(2) == 1 and x.stride(1) % 8 == 0 for x in (latent, k_pe))
        many = smooth and L * H >= 64
        block_rows, block_tokens, warps, stages = launch_sizes(many, block_r, block_p, narrow, device)
        tiles = triton.cdiv(L * H, block_rows)
        splits = min(MOST_SPLITS, max(1, device.processors // (B * tiles)), triton.cdiv(S, block_tokens))
        if steady(B):  # neither the batch nor the longest request, with which the cache grows
            splits = min(MOST_SPLITS, max(1, device.processors // tiles))
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
            DOT=DOTS[q.dtype if narrow else torch.float32], INSIDE=tl.int64 if far else tl.int32, FEW=block_rows == 16,
            num_warps=warps, num_stages=stages, **overlap(q.device),
        )  # fmt: skip
        if splits > 1:
            merge_splits(means, logs, o, lse)
    return (o, lse) if return_lse else o
