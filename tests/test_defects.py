"""The defects of the original kernels, one test for each: ours does what they meant. docs/kernels.md lists them."""

from __future__ import annotations

import math

import pytest
import torch

from halfbyte.check import LIMIT, error_ratio
from halfbyte.ops.attention import attention, latent_attention, merge_states
from halfbyte.ops.experts import expert_qmm
from halfbyte.ops.quant import dequantize, qmm, quantize
from halfbyte.ops.recurrent import delta_gates, gated_delta
from halfbyte.ops.routing import combine, route
from halfbyte.ops.rowwise import rms_norm, rms_norm_chain, rope


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def tensors_of(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def assert_accurate_and_repeatable(op, *args, **kwargs):
    """As close to float64 as the body, and the same bits again: a race would show in one of the two."""
    assert error_ratio(op, args, kwargs) <= LIMIT
    first = tensors_of(op(*args, **kwargs))
    for _ in range(3):
        for one, other in zip(first, tensors_of(op(*args, **kwargs)), strict=True):
            assert torch.equal(one, other)


ROWS, WIDE = 576, 1024  # enough rows for every thread to work at once


@pytest.mark.parametrize("weights", [3, 1])
def test_chained_norms_do_not_race(weights):
    x, residual, other = (normal(ROWS, WIDE, seed=i) for i in range(3))
    extra = {} if weights == 3 else {"residual2": other, "scale": normal(WIDE, seed=3)}
    given = [normal(WIDE, seed=10 + i) for i in range(weights)]
    assert_accurate_and_repeatable(rms_norm_chain, x, normal(WIDE, seed=4), residual, given, **extra)


def test_chained_norm_of_combined_experts_does_not_race():
    y, weights = normal(ROWS, 8, 256), normal(ROWS, 8, seed=1).softmax(-1)
    assert_accurate_and_repeatable(combine, y, weights)
    mixed, residual = combine(y, weights), normal(ROWS, 256, seed=2)
    assert_accurate_and_repeatable(rms_norm_chain, mixed, normal(256), residual, [normal(256, seed=3)], residual2=mixed)


def test_routing_does_not_race():
    assert_accurate_and_repeatable(route, normal(1, 128), 8, per_expert_scale=normal(128, seed=1).exp())
    assert_accurate_and_repeatable(route, normal(ROWS, 128), 8, per_expert_scale=normal(128, seed=1).exp())


def latent_case(length: int, heads: int = 3, rank: int = 64, pe: int = 16) -> tuple[torch.Tensor, ...]:
    return (
        normal(1, 1, heads, rank), normal(1, 1, heads, pe, seed=1), normal(1, length, rank, seed=2),
        normal(1, length, pe, seed=3),
    )  # fmt: skip


def test_latent_attention_does_not_race():
    assert_accurate_and_repeatable(latent_attention, *latent_case(700, heads=16), scale=0.1, causal=False)


def test_latent_attention_has_no_length_cap():
    assert_accurate_and_repeatable(latent_attention, *latent_case(4097 + 64), scale=0.1, causal=False)


@pytest.mark.parametrize("cut", [1, 300, 4096])
def test_latent_attention_in_tiles_is_the_whole(cut):
    q, q_pe, latent, k_pe = latent_case(4500)
    options = {"scale": 0.1, "causal": False, "return_lse": True}
    whole, whole_lse = latent_attention(q, q_pe, latent, k_pe, **options)
    first = latent_attention(q, q_pe, latent[:, :cut], k_pe[:, :cut], **options)
    second = latent_attention(q, q_pe, latent[:, cut:], k_pe[:, cut:], **options)
    o, lse = merge_states(*first, *second)
    torch.testing.assert_close(o, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)
    swapped, _ = merge_states(*second, *first)
    torch.testing.assert_close(swapped, o, rtol=1e-6, atol=1e-7)


def delta_case(tokens: int, zeros: bool) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    q, k = (torch.nn.functional.normalize(normal(1, tokens, 2, 128, seed=i), dim=-1) for i in range(2))
    v, beta = normal(1, tokens, 4, 128, seed=2), normal(1, tokens, 4, seed=3).sigmoid()
    g = normal(1, tokens, 4, seed=4).sigmoid()
    if zeros:
        g[:, ::5] = 0.0
    return (q, k, v, g, beta), normal(1, 4, 128, 128, seed=5)


@pytest.mark.parametrize("form", ["sequential", "chunked"])
@pytest.mark.parametrize("zeros", [False, True], ids=["decaying", "with zeros"])
def test_gated_delta_forms_agree_with_float64(form, zeros):
    args, state = delta_case(67, zeros)
    wide = [t.double() for t in args]
    exact, exact_state = gated_delta(*wide, state.double(), in_place=False, form="sequential")
    o, new = gated_delta(*args, state, in_place=False, form=form)
    assert (o - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert (new - exact_state).abs().max() <= 1e-6 * exact_state.abs().max()
    again = gated_delta(*args, state, in_place=False, form=form)
    assert torch.equal(again[0], o) and torch.equal(again[1], new)


@pytest.mark.parametrize("N", [1, 7, 9, 13])
def test_expert_outputs_need_not_divide_by_eight(N):
    w = quantize(normal(4, N, 128).bfloat16(), 4, 64)
    ids = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    assert_accurate_and_repeatable(expert_qmm, normal(2, 128, seed=1), ids, w)


@pytest.mark.parametrize("k", [9, 10, 16])
def test_more_than_eight_experts(k):
    """Ten a token is what Qwen3.5-397B has: none is dropped, none is repeated."""
    w = quantize(normal(20, 16, 128).bfloat16(), 4, 64)
    x, ids = normal(1, 128, seed=1), torch.arange(k, dtype=torch.int32)[None] + 2
    y = expert_qmm(x, ids, w)
    expected = torch.einsum("nko,to->tnk", dequantize(w, torch.float64)[2 : 2 + k], x.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    weights = normal(1, k, seed=2)
    mixed = combine(y, weights)
    torch.testing.assert_close(mixed, (weights[..., None] * y).sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_products_with_more_than_4096_inputs(bits):
    w = quantize(normal(5, 7168, scale=0.05).bfloat16(), bits, 64)
    assert_accurate_and_repeatable(qmm, normal(2, 7168, seed=1), w)
    marked = torch.zeros(1, 7168)
    marked[0, -1] = 1.0
    torch.testing.assert_close(qmm(marked, w)[0], dequantize(w)[:, -1], rtol=1e-6, atol=1e-7)


def test_float16_rows_take_a_float32_weight():
    x, weight, mul = normal(3, 40).half(), normal(40, seed=1), normal(3, 40, seed=2).half()
    assert_accurate_and_repeatable(rms_norm, x, weight)
    assert_accurate_and_repeatable(rms_norm, x, weight, mul=mul)


@pytest.mark.parametrize("D", [1, 4, 8, 12, 16, 20, 31])
def test_narrow_norms_keep_their_sum(D):
    x, residual = normal(5, D), normal(5, D, seed=1)
    three, one = [normal(D, seed=i) for i in (3, 4, 5)], [normal(D, seed=3)]
    assert_accurate_and_repeatable(rms_norm, x, normal(D, seed=2))
    assert_accurate_and_repeatable(rms_norm_chain, x, normal(D, seed=2), residual, three)
    assert_accurate_and_repeatable(rms_norm_chain, x, normal(D, seed=2), residual, one, residual2=x, scale=0.5)


@pytest.mark.parametrize("D", [257, 1000, 2816])
def test_wide_sums_are_kept_whole(D):
    """The original's sum did not fit the shared memory that its launch asked for."""
    x, add = normal(3, D), normal(3, D, seed=1)
    assert_accurate_and_repeatable(rms_norm, x, normal(D, seed=2), add=add, return_sum=True)
    assert_accurate_and_repeatable(rms_norm, x, normal(D, seed=2), add=add, scale=normal(D, seed=3))
    assert torch.equal(rms_norm(x, add=add, return_sum=True)[1], x + add)


@pytest.mark.parametrize("hidden", [2048, 2816, 3584])
def test_no_hidden_size_is_built_in(hidden):
    """The originals' comments name three sizes for one model; sizes come from the tensors."""
    given = normal(1, hidden), normal(hidden, seed=1), normal(1, hidden, seed=2), [normal(hidden, seed=3)] * 3
    assert_accurate_and_repeatable(rms_norm_chain, *given)


@pytest.mark.parametrize("E", [3, 5, 9, 33, 48, 60, 63])
def test_routing_sees_every_expert(E):
    """Each expert in turn is the best one: none is lost, whatever the number of experts."""
    logits = torch.full((E, E), -1.0) + 5.0 * torch.eye(E)
    ids, _ = route(logits, 2)
    assert ids[:, 0].tolist() == list(range(E))
    assert_accurate_and_repeatable(route, normal(7, E), min(3, E))


def test_softplus_does_not_overflow():
    a = torch.tensor([[80.0, 88.0, 89.0, 100.0, 1000.0, -1000.0, 0.0]])
    a_log = torch.full((7,), math.log(8e-4))
    g, beta = delta_gates(a, a, a_log, torch.zeros(7))
    softplus = a.double().clamp(min=0) + torch.log1p(torch.exp(-a.double().abs()))
    expected = torch.exp(-a_log.double().exp() * softplus)
    torch.testing.assert_close(g.double(), expected, rtol=1e-6, atol=0)
    assert 0.92 < g[0, 3] < 0.93
    torch.testing.assert_close(beta.double(), a.double().sigmoid(), rtol=1e-6, atol=1e-30)


def test_no_decay_where_a_is_zero():
    a = torch.tensor([[-5.0, 0.0, 50.0, 100.0]])
    g, _ = delta_gates(a, a, torch.full((4,), -torch.inf), torch.zeros(4))
    assert torch.equal(g, torch.ones(1, 4))


def test_every_output_of_every_head():
    """The original's grid covers one output in 32."""
    w = quantize(normal(3, 40, 64).bfloat16(), 4, 64)
    x = normal(2, 3, 64, seed=1)
    expected = torch.einsum("thk,hnk->thn", x.double(), dequantize(w, torch.float64))
    torch.testing.assert_close(qmm(x, w).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_fully_masked_row_gives_zeros():
    q, k = normal(2, 1, 4, 16), normal(2, 5, 2, 16, seed=1)
    o, lse = attention(q, k, k, scale=0.25, lengths=torch.tensor([0, 5], dtype=torch.int32), return_lse=True)
    assert torch.equal(o[0], torch.zeros(1, 4, 16)) and (lse[0] == -torch.inf).all()
    assert torch.isfinite(o[1]).all() and torch.isfinite(lse[1]).all()
    merged, merged_lse = merge_states(o, lse, o, lse)
    assert torch.equal(merged[0], o[0]) and (merged_lse[0] == -torch.inf).all()


@pytest.mark.parametrize("position", [4096, 131071, 999_983, 1_000_000])
def test_rope_is_exact_at_far_positions(position):
    inv_freq = 10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    x = torch.cat([torch.ones(1, 1, 32), torch.zeros(1, 1, 32)], -1)
    y = rope(x, torch.tensor([position]), inv_freq)[0, 0]
    for i, frequency in enumerate(inv_freq.tolist()):
        angle = math.fmod(position * frequency, 2 * math.pi)
        assert abs(y[i].item() - math.cos(angle)) <= 1e-6
        assert abs(y[32 + i].item() - math.sin(angle)) <= 1e-6


def yarn(dim: int, base: float, factor: float, original: int) -> torch.Tensor:
    """YaRN's table as transformers has it: 1 / (factor base^e) where a channel turns too slowly to be extrapolated."""
    turns = lambda r: dim * math.log(original / (r * 2 * math.pi)) / (2 * math.log(base))  # noqa: E731
    low, high = math.floor(turns(32)), math.ceil(turns(1))
    exponent = torch.arange(dim // 2, dtype=torch.float64) * 2 / dim
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    plain = base**-exponent
    return plain / factor * (1 - keep) + plain * keep


def test_rope_takes_frequencies_as_data():
    """A wrong YaRN table cannot be built in: the op takes the table. This one is DeepSeek-V3's."""
    table = yarn(64, 10000.0, 40.0, 4096)
    wrong = (40.0 * 10000.0) ** -(torch.arange(32, dtype=torch.float64) / 32)
    assert (wrong / table).max() > 2.7 and table[31] == pytest.approx(10000.0 ** -(31 / 32) / 40)
    x = normal(1, 2, 64)
    y = rope(x, torch.tensor([5000]), table)
    angle = 5000 * table
    expected = x[..., :32].double() * angle.cos() - x[..., 32:].double() * angle.sin()
    torch.testing.assert_close(y[..., :32].double(), expected, rtol=1e-5, atol=1e-6)


def test_rope_rotates_neighbours_when_interleaved():
    x, inv_freq = normal(1, 2, 64), 10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    y = rope(x, torch.tensor([7]), inv_freq, interleaved=True)
    turned = torch.view_as_complex(x.double().unflatten(-1, (32, 2))) * torch.polar(
        torch.ones_like(inv_freq), 7 * inv_freq
    )
    torch.testing.assert_close(y.double(), torch.view_as_real(turned).flatten(-2), rtol=1e-5, atol=1e-6)


def test_attention_scale_is_an_argument():
    """DeepSeek-V3's is 192^-0.5 times 1.87385, the square of YaRN's mscale: 0.13523, which no head size gives."""
    args = latent_case(40)
    scale = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
    assert scale == pytest.approx(0.13523, abs=1e-5)
    assert_accurate_and_repeatable(latent_attention, *args, scale=scale, causal=False)
    assert not torch.allclose(latent_attention(*args, scale=scale), latent_attention(*args, scale=192**-0.5))
