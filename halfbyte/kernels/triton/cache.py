"""Rows into caches: one program copies a tile of new rows to where their positions live, sixteen bytes a load."""

import triton
import triton.language as tl

from .device import overlap
from .elementary import begin_early, rounded

TILE = 4096  # elements of a program


@triton.jit(do_not_specialize=["L", "S", "heads"])
def append_kernel(
    cache, new, slots, lengths, L, S, heads, size, cache_strides, new_strides,
    RING: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row is one (token, head) pair of a request: `size` elements."""
    begin_early(OVERLAP)
    b = tl.program_id(2).to(tl.int64)
    slot = b if slots is None else tl.load(slots + b).to(tl.int64)
    end = L if lengths is None else tl.load(lengths + b).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    position = end - L + token
    # Of more new rows than a ring holds the last survive; rows before the first position are padding.
    kept = (token < L) & (position >= 0) & ((token >= L - S) if RING else (position < S))
    place = position % S if RING else position
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = kept[:, None] & (column < size)[None, :]
    source = new + b * new_strides[0] + token * new_strides[1] + head * new_strides[2]
    target = cache + slot * cache_strides[0] + place * cache_strides[1] + head * cache_strides[2]
    values = tl.load(source[:, None] + column[None, :] * new_strides[3], mask=mask, other=0.0).to(tl.float32)
    values = rounded(values, cache.dtype.element_ty)
    tl.store(target[:, None] + column[None, :] * cache_strides[3], values, mask=mask)


def append(cache, new, *, slots=None, lengths=None, ring=False):
    if new.numel() == 0:
        return cache
    sizes, cache_strides, new_strides = joined_axes(cache, new)
    if len(sizes) > 2:  # heads of heads with gaps between them all
        for i in range(cache.shape[2]):
            append(cache.select(2, i), new.select(2, i), slots=slots, lengths=lengths, ring=ring)
        return cache
    heads, size = [1] * (2 - len(sizes)) + sizes
    (B, L), S = new.shape[:2], cache.shape[1]
    block = min(TILE, triton.next_power_of_2(size))
    block_rows = min(TILE // block, triton.next_power_of_2(L * heads))
    append_kernel[(triton.cdiv(L * heads, block_rows), triton.cdiv(size, block), B)](
        cache, new, slots, lengths, L, S, heads, size,
        (*cache.stride()[:2], *cache_strides), (*new.stride()[:2], *new_strides),
        RING=ring, BLOCK_ROWS=block_rows, BLOCK=block, num_warps=4, **overlap(cache.device),
    )  # fmt: skip
    return cache


def joined_axes(cache, new):
    """The axes behind [slots, S] and [B, L] as few: sizes, and both tensors' strides, at least two of them."""
    sizes, cache_strides, new_strides = [1], [1], [1]
    for size, far, near in reversed(list(zip(new.shape, cache.stride(), new.stride(), strict=True))[2:]):
        if sizes == [1]:
            sizes, cache_strides, new_strides = [size], [far], [near]
        elif far == sizes[0] * cache_strides[0] and near == sizes[0] * new_strides[0]:
            sizes[0] *= size
        elif size > 1:
            sizes, cache_strides, new_strides = [size, *sizes], [far, *cache_strides], [near, *new_strides]
    pad = 2 - len(sizes)
    return sizes, [0] * pad + cache_strides, [0] * pad + new_strides
