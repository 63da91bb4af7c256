"""Attention with norms, rotations and the new row in one launch, against the same in two."""

import pytest
import torch

from halfbyte.kernels.triton import attention, fused, fused_attention

# Query heads, those of keys, their size, how many channels of them rotate; whether values are normed, and the window.
SHAPES = [
    (4, 2, 64, 16, False, None),
    (16, 2, 64, 64, False, None),
    (3, 3, 24, 12, True, 48),
    (9, 1, 16, 16, False, 200),
]
LENGTHS = [[1], [2, 64], [65, 129, 1], [128], [200, 127]]


def random_step(shape, lengths, S, dtype):
    """Arguments of `rotate_and_append` and of the attention behind it: caches hold NaN where nothing was appended."""
    H, G, D, rotary, norm_v, window = shape
    torch.manual_seed(sum(lengths))
    B = len(lengths)
    q, (k, v) = torch.randn(B, H, 2 * D).to(dtype)[..., D:], torch.randn(2, B, G, D).to(dtype)
    caches = [torch.full((B + 1, S, G, D), torch.nan).to(dtype) for _ in range(2)]
    slots = torch.arange(B, 0, -1, dtype=torch.int32)
    for slot, length in zip(slots, lengths, strict=True):
        for cache in caches:
            cache[slot, : length - 1] = torch.randn(min(length - 1, S), G, D).to(dtype)
    counts = torch.tensor(lengths, dtype=torch.int32)
    args = (q, k, v, torch.randn(D).to(dtype), torch.randn(D).to(dtype), 1e-5, counts - 1, torch.rand(rotary // 2))
    put = {"slots": slots, "lengths": counts, "rotary": rotary, "norm_v": norm_v, "ring": window is not None}
    return args, caches, put, {"scale": D**-0.5, "window": window}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_launch_does_what_two_do(shape, lengths, softcap, dtype):
    S = 64 if shape[-1] == 48 else 160  # a ring that went around, a cache that is full, and caches with room
    args, caches, put, seen = random_step(shape, lengths, S, dtype)
    others, seen = [cache.clone() for cache in caches], {**seen, "softcap": softcap}
    turned = fused.rotate_and_append(*args, *caches, **put, scale=0.9, out=torch.empty_like(args[0]).contiguous())
    expected = attention.attention(turned[:, None], *caches, lengths=put["lengths"], slots=put["slots"], **seen)
    got = fused_attention.rotate_and_attend(
        *args, *others, **put, turn_scale=0.9, **seen, out=torch.full_like(expected, 7)
    )
    close = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **close)
    for cache, other in zip(caches, others, strict=True):
        torch.testing.assert_close(other, cache, equal_nan=True, **close)


SHORT, MOST = 2, 6  # chunks, instead of 32 and 66: texts need not be long
FEWEST, LONGEST = attention.CHUNK * SHORT, 2 * attention.CHUNK * MOST


@pytest.mark.parametrize("heads", [(2, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("length", [FEWEST, FEWEST + 1, LONGEST, LONGEST + 1, LONGEST + 90, 2 * LONGEST + 1])
def test_texts_are_seen_whole_in_any_number_of_chunks(length, heads, monkeypatch):
    monkeypatch.setattr(attention, "MOST", MOST)
    for module in (attention, fused_attention):
        monkeypatch.setattr(module, "SHORT", SHORT)
    (H, G), D, S = heads, 16, 2 * LONGEST + 100
    args, caches, put, seen = random_step((H, G, D, D, False, None), [length], S, torch.float16)
    out = torch.empty(1, 1, H, D, dtype=torch.float16)
    got = fused_attention.rotate_and_attend(*args, *caches, **put, turn_scale=1.0, **seen, softcap=None, out=out)
    turned = fused.rotate_and_append(*args, *caches, **put, scale=1.0, out=torch.empty_like(args[0]).contiguous())
    also = attention.attention(turned[:, None], *caches, lengths=put["lengths"], slots=put["slots"], **seen)
    keys, values = (cache[1, :length].double().transpose(0, 1) for cache in caches)
    weights = (turned[0, :, None].double() @ keys.mT * seen["scale"]).softmax(-1)
    for one in (got, also):
        torch.testing.assert_close(one[0, 0].double(), (weights @ values)[:, 0], rtol=2e-3, atol=1e-3)
