"""Attention in two schedules, and the joining of two attentions.

Few rows (decoding) read much and compute little: a request's positions are cut into chunks, enough for every processor
to stream some of them, and the chunks' means are merged in order. Many rows (a prompt) compute much: a program keeps a
tile of rows and walks the positions on the tensor cores. Device code is in flash.py.
"""

import math

import torch
import triton
import triton.language as tl

from .device import facts, overlap, steady
from .flash import attend_rows_kernel, attend_splits_kernel, merge_splits
from .latent import latent_attention as latent_attention

LOG2E = math.log2(math.e)
SMALLEST = 1e-30
DOTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# 2026-11-15, H200, bfloat16, heads of 256 where nothing else is said.
FEW = 64  # rows of a kv head up to which attend_splits_kernel takes them
CHUNK, SHORT = 64, 32  # its positions of a short chunk, and up to how many of them are taken: 1k 6.4 us, 4k 9.1 us
MOST = 66  # chunks of a request, twice that where it has only one kv head: an H200 has 132 processors
LONG = 512  # positions that a split of attend_rows_kernel is worth: 512 tokens on 16k 542 us in one, 364 us in two


def split_sizes(rows, wide, narrow, device):
    """(BLOCK_M, BLOCK_N, warps, stages, programs on a processor) for few rows; `wide` is the larger head size, `narrow`
    if 16-bit."""
    block_m = max(16, triton.next_power_of_2(rows))
    if not narrow:
        return 16, 16, 4, 1, 1
    if wide > 256:
        if device.shared > 200000 and block_m == 16:
            return 16, 32, 8, 3, 1  # 32k, one kv head of 512: 26.8 us
        return block_m, 16, 4 if block_m == 16 else 8, 2, 1
    if device.shared < 110000:
        return block_m, 32, 4, 2, 1
    # 32k: 21.7 us; slower by 1.3 us with eight warps, by 2.3 with two programs a processor. Heads of 128 leave room for
    # two: a step of Qwen3-30B at 32k 2482 to 2304 us.
    return (16, 64, 4, 3, 2 if wide <= 128 else 1) if block_m == 16 else (block_m, 64, 8, 2, 1)


def row_sizes(rows, wide, narrow, device):
    """(BLOCK_M, BLOCK_N, warps, stages) for many rows."""
    if not narrow:
        return 32, 16, 8, 1
    if device.shared < 110000:
        return 64, 16 if wide > 256 else 32, 8, 2 if wide <= 128 else 1
    if wide > 256:
        return 64, 32, 8, 2
    return 128, 64, 8, 2  # 8192 tokens: 490 to 540 TFLOP/s; (128, 32, 8, 3) 455, (64, 32, 4, 2) 331, (64, 64, 4, 2) 288


def chunks_of(seen, B, G):
    """How many chunks a request has at most, if it has so many positions, and the most that any may have."""
    most = MOST if G > 1 else 2 * MOST
    if steady(B):
        return most, most  # the cache grows with the longest request
    return min(most, max(min(SHORT, triton.cdiv(seen, CHUNK)), triton.cdiv(seen, 2 * CHUNK))), most


def attention(
    q, k, v, *, scale, causal=True, window=None, softcap=None, lengths=None, slots=None, return_lse=False, out=None
):
    (B, L, H, D), (S, G, DV) = q.shape, v.shape[1:]
    o, lse = out if return_lse and out is not None else (out, None)
    o = torch.empty((B, L, H, DV), dtype=q.dtype, device=q.device) if o is None else o
    if return_lse and lse is None:
        lse = torch.empty((B, L, H), dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return (o, lse) if return_lse else o
    if softcap is not None:
        scale, inner = softcap * LOG2E, scale / softcap
    else:
        # The largest score is found before scaling, so the sign goes to q; a scale of 0 weighs all alike, as SMALLEST.
        q, scale, inner = q if scale >= 0 else -q, max(abs(scale) * LOG2E, SMALLEST), None
    rows, device = L * (H // G), facts(q.device)
    seen = S if window is None else min(S, window + L - 1)
    narrow = q.dtype.itemsize == 2 and q.dtype == k.dtype == v.dtype
    block_d, block_dv = (max(16, triton.next_power_of_2(size)) for size in (D, DV))
    few = rows <= FEW
    asked = rows, max(block_d, block_dv), narrow, device
    block_m, block_n, warps, stages, each = split_sizes(*asked) if few else (*row_sizes(*asked), 1)
    tiles = triton.cdiv(rows, block_m)
    if few:
        splits, most = chunks_of(seen, B, G)
    else:
        splits = max(1, min(device.processors // (G * tiles), seen // LONG))
    means = logs = None
    if few or splits > 1:
        means = torch.empty((B * L * H, splits, DV), dtype=torch.float32, device=q.device)
        logs = torch.empty((B * L * H, splits), dtype=torch.float32, device=q.device)
    sizes = {
        "GROUP": H // G, "D": D, "DV": DV, "CAUSAL": causal, "RING": window is not None, "BLOCK_M": block_m,
        "BLOCK_N": block_n, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "DOT": DOTS[q.dtype if narrow else torch.float32],
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    if few:
        workers = min(splits, max(1, each * device.processors // (B * G * tiles)))
        attend_splits_kernel[(workers, tiles, B * G)](
            q, k, v, lengths, slots, means, logs, L, G, S, scale, inner, window, splits,
            q.stride(), k.stride(), v.stride(), CHUNK=CHUNK, SHORT=SHORT, MOST=most,
            TWICE=narrow and 2 * rows <= block_m, **sizes, **overlap(q.device),
        )  # fmt: skip
    else:
        attend_rows_kernel[(tiles * B * G, splits)](
            q, k, v, lengths, slots, o, lse, means, logs, L, G, S, scale, inner, window, tiles, splits,
            q.stride(), k.stride(), v.stride(), o.stride(), None if lse is None else lse.stride(), **sizes,
        )  # fmt: skip
    if means is not None:
        merge_splits(means, logs, o, lse)
    return (o, lse) if return_lse else o


@triton.jit
def merge_states_kernel(o1, lse1, o2, lse2, o, lse, rows, D, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Whole rows, because a row's new lse may take the place of an old one that all its columns need."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < rows
    log1 = tl.load(lse1 + row, mask=is_row, other=0.0)
    log2 = tl.load(lse2 + row, mask=is_row, other=0.0)
    peak = tl.maximum(log1, log2)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    w1, w2 = tl.exp(log1 - shift), tl.exp(log2 - shift)
    weight = w1 + w2
    for first in range(0, D, BLOCK_D):
        column = first + tl.arange(0, BLOCK_D)
        at, mask = row[:, None] * D + column[None, :], is_row[:, None] & (column < D)[None, :]
        both = w1[:, None] * tl.load(o1 + at, mask=mask, other=0.0).to(tl.float32)
        both += w2[:, None] * tl.load(o2 + at, mask=mask, other=0.0).to(tl.float32)
        both = both / tl.where(weight == 0.0, 1.0, weight)[:, None]
        tl.store(o + at, both.to(o.dtype.element_ty), mask=mask)
    tl.store(lse + row, peak + tl.log(weight), mask=is_row)


def merge_states(o1, lse1, o2, lse2, *, out=None):
    inputs = [x.contiguous() for x in (o1, lse1, o2, lse2)]
    wanted = out or (torch.empty_like(inputs[0]), torch.empty_like(inputs[1]))
    o, lse = (x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanted)
    if rows := lse.numel():
        D = o.shape[-1]
        block_d = min(1024, triton.next_power_of_2(D))
        block_rows = max(1, 2048 // block_d)
        merge_states_kernel[(triton.cdiv(rows, block_rows),)](
            *inputs, o, lse, rows, D, BLOCK_ROWS=block_rows, BLOCK_D=block_d, num_warps=4
        )
    for given, made in zip(wanted, (o, lse), strict=True):
        if given is not made:
            given.copy_(made)
    return wanted
