"""Attention beyond its cases: the same bits however a prompt is cut, batched or stored; masks; and appending."""

import pytest
import torch

from halfbyte.ops.attention import attention, latent_attention, merge_states
from halfbyte.ops.cache import append
from halfbyte.ops.dispatch import reference, using

H, G, D, DV, S, L = 6, 2, 32, 48, 400, 9
OPTIONS = [{}, {"window": 150}, {"softcap": 3.0}]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads(slots=3, dtype=torch.float32):
    return normal(slots, S, G, D, seed=1, dtype=dtype), normal(slots, S, G, DV, seed=2, dtype=dtype)


def attend(q, k, v, length, slot=0, **options):
    B = q.shape[0]
    lengths = torch.tensor([length] * B) if isinstance(length, int) else torch.tensor(length)
    slots = torch.tensor([slot] * B) if isinstance(slot, int) else torch.tensor(slot)
    return attention(q, k, v, scale=0.5, lengths=lengths, slots=slots, return_lse=True, **options)


def same(got, wanted):
    return all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_query_has_the_bits_of_its_row_in_a_prompt(options, stored):
    k, v = heads(dtype=stored)
    long = normal(1, 300, H, D)
    o, lse = attend(long, k, v, 390, **options)
    for i in (0, 1, 37, 38, 165, 299):
        one = attend(long[:, i : i + 1], k, v, 91 + i, **options)
        assert same(one, (o[:, i : i + 1], lse[:, i : i + 1]))


def test_a_prompt_in_pieces_has_the_bits_of_the_whole():
    k, v = heads()
    q = normal(1, 290, H, D)
    whole = attend(q, k, v, 290)
    for size in (7, 64, 128):
        parts = [attend(q[:, i : i + size], k, v, min(290, i + size)) for i in range(0, 290, size)]
        assert same([torch.cat(part, 1) for part in zip(*parts, strict=True)], whole)


def test_a_request_has_the_same_bits_alone_in_a_batch_and_in_another_slot():
    k, v = heads(slots=5)
    q, lengths, slots = normal(4, L, H, D), [400, 130, 9, 257], [4, 0, 2, 0]
    o, lse = attend(q, k, v, lengths, slots)
    for b in range(4):
        alone = attend(q[b : b + 1], k, v, lengths[b], slots[b])
        assert same(alone, (o[b : b + 1], lse[b : b + 1]))
    moved = attend(q[:1], k.roll(1, 0), v.roll(1, 0), lengths[0], 0)
    assert same(moved, (o[:1], lse[:1]))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_head_has_the_same_bits_alone_and_among_others(stored):
    """Heads of one request take turns at the rows of the cache: in a call alone, in a batch, and not at all."""
    k, v = (normal(12, 300, 8, 64, seed=seed, dtype=stored) for seed in (1, 2))
    q, lengths, slots = normal(12, 1, 16, 64), list(range(300, 180, -10)), list(range(12))
    o, lse = attend(q, k, v, lengths, slots)
    for head in (0, 5):
        mine = slice(2 * head, 2 * head + 2)
        alone = attend(q[:, :, mine], k[:, :, head : head + 1], v[:, :, head : head + 1], lengths, slots)
        assert same(alone, (o[:, :, mine], lse[:, :, mine]))
    assert same(attend(q[3:4], k, v, lengths[3], 3), (o[3:4], lse[3:4]))


@pytest.mark.parametrize("rows", [140, 160, 399])
def test_a_ring_has_the_bits_of_a_line(rows):
    k, v = heads()
    q, window = normal(1, L, H, D), 132
    ring_k, ring_v = torch.full((1, rows, G, D), torch.nan), torch.full((1, rows, G, DV), torch.nan)
    for ring, line in ((ring_k, k), (ring_v, v)):
        append(ring, line[:1, :395], lengths=torch.tensor([395]), ring=True)
        append(ring, line[:1, 395:], lengths=torch.tensor([400]), ring=True)
    assert same(attend(q, ring_k, ring_v, 400, window=window), attend(q, k, v, 400, window=window))


def test_strided_caches_have_the_bits_of_contiguous_ones():
    k, v = heads()
    q = normal(2, L, H, D)
    wanted = attend(q, k, v, [400, 33], [2, 1])
    joined = torch.cat([k, v], -1)
    assert same(attend(q, joined[..., :D], joined[..., D:], [400, 33], [2, 1]), wanted)
    turned = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    assert same(attend(q, *turned, [400, 33], [2, 1]), wanted)
    spread = (t.repeat_interleave(2, -1)[..., ::2] for t in (k, v))
    assert same(attend(q, *spread, [400, 33], [2, 1]), wanted)


@pytest.mark.parametrize("window", [None, 1, 5, 128, 1000])
@pytest.mark.parametrize("causal", [True, False])
def test_every_query_sees_exactly_its_positions(causal, window):
    """Values that name their position: a uniform softmax over them gives the mean of the positions seen."""
    length = 300
    k = torch.zeros(1, S, 1, 16)
    v = torch.arange(S, dtype=torch.float32).view(1, S, 1, 1).expand(1, S, 1, 16)
    o, lse = attend(normal(1, L, 1, 16), k, v, length, causal=causal, window=window)
    for i in range(L):
        place = length - L + i
        high = place if causal else length - 1
        low = 0 if window is None else max(0, place - window + 1)
        assert o[0, i, 0, 0].item() == pytest.approx((low + high) / 2, rel=1e-6)
        assert lse[0, i, 0].exp().item() == pytest.approx(high - low + 1, rel=1e-5)


def test_a_query_that_sees_nothing_gives_zeros():
    k, v = heads()
    for causal in (True, False):
        o, lse = attend(normal(2, L, H, D), k, v, [0, 4], [0, 1], causal=causal)
        assert o[0].count_nonzero() == 0 and (lse[0] == -torch.inf).all()
        assert o[1, : L - 4].count_nonzero() == 0 and (lse[1, : L - 4] == -torch.inf).all()
        assert o[1, L - 4 :].all() and lse[1, L - 4 :].isfinite().all()


def test_what_is_not_seen_does_not_matter():
    k, v = heads()
    q = normal(1, L, H, D)
    wanted = attend(q, k, v, 200, window=50)
    for cache in (k, v):
        cache[:, 200:], cache[:, : 200 - L - 50] = torch.nan, torch.inf
    assert same(attend(q, k, v, 200, window=50), wanted)
    for cache in (k, v):
        cache[:, 196] = torch.nan
    o, lse = attend(q, k, v, 200, window=50)
    assert same((o[:, :5], lse[:, :5]), (wanted[0][:, :5], wanted[1][:, :5]))
    assert o[:, 5:].isnan().all() and lse[:, 5:].isnan().all()


def test_nan_reaches_the_heads_that_read_it():
    k, v = heads()
    k[0, 3, 1, 0], v[0, 3, 0, 5] = torch.nan, torch.nan
    o, lse = attend(normal(1, 1, H, D), k, v, 10)
    assert o[0, 0, H // G :].isnan().all() and lse[0, 0, H // G :].isnan().all()
    assert o[0, 0, : H // G, 5].isnan().all() and o[0, 0, : H // G].isnan().sum() == H // G


def test_infinite_scores_weigh_nothing_or_everything():
    k, v = torch.zeros(1, 4, 1, 16), normal(1, 4, 1, 16)
    k[0, 1, 0, 0] = -torch.inf
    q = torch.ones(1, 1, 1, 16)
    o, _ = attend(q, k, v, 4)
    torch.testing.assert_close(o[0, 0, 0], v[0, [0, 2, 3], 0].mean(0))
    k[..., 0] = -torch.inf
    o, lse = attend(q, k, v, 4)
    assert o.count_nonzero() == 0 and lse.item() == -torch.inf


@pytest.mark.parametrize("D", [1, 15, 512])
def test_head_sizes_at_the_ends(D):
    q, k = normal(2, 3, 4, D), normal(2, 140, 2, D, seed=1)
    with reference():
        wanted = attention(q, k, k, scale=D**-0.5)
    torch.testing.assert_close(attention(q, k, k, scale=D**-0.5), wanted, rtol=1e-5, atol=1e-6)


def test_two_halves_merge_into_the_whole():
    k, v = heads()
    q = normal(2, 1, H, D)
    whole = attend(q, k, v, [390, 333], [0, 1])
    first = attend(q, k, v, [150, 150], [0, 1])
    second = attend(q, k[:, 150:], v[:, 150:], [240, 183], [0, 1])
    for got, wanted in zip(merge_states(*first, *second), whole, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    empty = torch.zeros_like(first[0]), torch.full_like(first[1], -torch.inf)
    assert same(merge_states(*first, *empty), first)
    assert same(merge_states(*empty, *empty), empty)
    merged = merge_states(*first, *second)
    assert same(merge_states(*first, *second, out=first), merged) and same(first, merged)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_latent_attention_has_the_same_bits_however_it_is_cut(stored):
    latent, k_pe = normal(3, S, 64, dtype=stored), normal(3, S, 16, seed=1, dtype=stored)
    q, q_pe = normal(1, 290, 5, 64, seed=2), normal(1, 290, 5, 16, seed=3)

    def run(start, stop, slot=1):
        cut, cut_pe = q[:, start:stop], q_pe[:, start:stop]
        lengths, slots = torch.tensor([stop + 100]), torch.tensor([slot])
        return latent_attention(cut, cut_pe, latent, k_pe, scale=0.2, lengths=lengths, slots=slots, return_lse=True)

    whole = run(0, 290)
    for size in (1, 50, 128):
        parts = [run(i, min(290, i + size)) for i in range(0, 290, size)]
        assert same([torch.cat(part, 1) for part in zip(*parts, strict=True)], whole)
    wanted, _ = attention(
        torch.cat([q, q_pe], -1), torch.cat([latent, k_pe], -1)[:, :, None], latent[:, :, None], scale=0.2,
        lengths=torch.tensor([390]), slots=torch.tensor([1]), return_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(whole[0], wanted, rtol=1e-5, atol=1e-6)


def test_float64_caches_serve_float32_queries():
    k, v = heads()
    q = normal(1, 2, H, D)
    assert torch.equal(attention(q, k.double(), v.double(), scale=0.5), attention(q, k, v, scale=0.5))


def test_out_is_filled_and_returned():
    k, v = heads()
    q = normal(1, 2, H, D)
    wanted = attention(q, k, v, scale=0.5, return_lse=True)
    for o in (torch.empty(1, 2, H, DV), torch.empty(1, 2, DV, H).mT):
        out = o, torch.empty(1, 2, H)
        got = attention(q, k, v, scale=0.5, return_lse=True, out=out)
        assert got[0] is out[0] and got[1] is out[1] and same(out, wanted)


@pytest.mark.parametrize("language", ["numba", "torch"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("B", [1, 2, 7])
def test_append_writes_each_position_once(B, stored, language):
    new, slots = normal(B, 5, 3, 4), torch.randperm(9, generator=torch.Generator().manual_seed(B))[:B]
    lengths = torch.arange(B) * 3 + 5
    with using(language):
        for ring, rows in ((False, 40), (True, 7), (True, 3)):
            plain = torch.zeros(9, rows, 3, 4, dtype=stored)
            gaps = torch.zeros(9, 4, 3, rows, dtype=stored).permute(0, 3, 2, 1)
            for cache in (plain, gaps, torch.zeros(9, rows, 3, 8, dtype=stored)[..., ::2]):
                wanted = cache.clone()
                for b in range(B):
                    for i in range(5):
                        wanted[slots[b], (lengths[b] - 5 + i) % rows] = new[b, i].to(stored)
                assert append(cache, new, slots=slots, lengths=lengths, ring=ring) is cache
                assert torch.equal(cache, wanted)


@pytest.mark.parametrize(
    "change",
    [
        {"q": normal(1, 2, 5, D)},
        {"q": normal(1, 2, H, 513), "k": normal(3, S, G, 513)},
        {"k": normal(3, S, G, D + 1)},
        {"v": normal(3, S - 1, G, DV)},
        {"v": normal(3, S, G, 0)},
        {"window": 0},
        {"softcap": 0.0},
        {"slots": torch.tensor([3])},
        {"slots": torch.tensor([0.0])},
        {"slots": torch.tensor([0, 1])},
        {"lengths": torch.tensor([401])},
        {"lengths": torch.tensor([-1])},
        {"lengths": torch.tensor([401]), "window": 400},
        {"out": torch.empty(1, 2, H, D)},
        {"return_lse": True, "out": torch.empty(1, 2, H, DV)},
        {"q": normal(4, 2, H, D)},
    ],
    ids=" ".join,
)
def test_attention_refuses(change):
    k, v = heads()
    arguments = {"q": normal(1, 2, H, D), "k": k, "v": v, "scale": 1.0} | change
    with pytest.raises(ValueError, match="attention: "):
        attention(**arguments)


@pytest.mark.parametrize(
    "change",
    [
        {"new": normal(2, 3, 5)},
        {"new": normal(2, 9, 4)},
        {"lengths": torch.tensor([3, 9])},
        {"lengths": torch.tensor([2, 5])},
        {"slots": torch.tensor([1, 1])},
        {"slots": torch.tensor([1, 4])},
    ],
    ids=" ".join,
)
def test_append_refuses(change):
    with pytest.raises(ValueError, match="append: "):
        append(**{"cache": normal(4, 8, 4), "new": normal(2, 3, 4)} | change)
