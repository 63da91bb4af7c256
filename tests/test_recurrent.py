"""The recurrent ops beyond their cases: the same bits however a prompt is cut, both forms alike, decays of nothing."""

import pytest
import torch
from torch.nn.functional import normalize

from halfbyte.ops.dispatch import reference, using
from halfbyte.ops.recurrent import causal_conv, delta_gates, gated_delta

LANGUAGES = pytest.mark.parametrize("language", ["numba", "torch"])


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(B, L, Hk=2, Hv=4, Dk=32, Dv=48, dtype=torch.float32):
    """q, k, v, g, beta of a gated delta layer."""
    q, k = normalize(normal(B, L, Hk, Dk), dim=-1), normalize(normal(B, L, Hk, Dk, seed=1), dim=-1)
    g, beta = torch.exp(-0.2 * normal(B, L, Hv, seed=3).abs()), torch.sigmoid(normal(B, L, Hv, seed=4))
    return [x.to(dtype) for x in (q, k, normal(B, L, Hv, Dv, seed=2), g, beta)]


def cut(x, start, stop):
    return [one[:, start:stop] for one in x]


@pytest.mark.parametrize("form", [None, "sequential"])
@pytest.mark.parametrize("size", [1, 3, 16, 50])
def test_gated_delta_has_the_same_bits_however_a_prompt_is_cut(size, form):
    x, state = tokens(1, 50), normal(2, 4, 48, 32, seed=5)
    pieces = state.clone()
    slot = torch.tensor([1])
    whole = gated_delta(*x, state, slots=slot, form=form)
    parts = [gated_delta(*cut(x, i, i + size), pieces, slots=slot, form=form) for i in range(0, 50, size)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(pieces, state)


@pytest.mark.parametrize("form", [None, "chunked"])
def test_a_request_has_the_same_bits_alone_in_a_batch_and_in_another_slot(form):
    x, state = tokens(3, 40), normal(5, 4, 48, 32, seed=5)
    start, slots = state.clone(), torch.tensor([4, 0, 2])
    o = gated_delta(*x, state, slots=slots, form=form)
    for b, slot in enumerate(slots):
        alone = start[slot : slot + 1].clone()
        assert torch.equal(gated_delta(*(one[b : b + 1] for one in x), alone, form=form), o[b : b + 1])
        assert torch.equal(alone[0], state[slot])
    assert torch.equal(state[[1, 3]], start[[1, 3]])


@LANGUAGES
@pytest.mark.parametrize("form", [None, "chunked"])
def test_without_in_place_the_state_is_left_alone(form, language):
    x, state = tokens(2, 20), normal(3, 4, 48, 32, seed=5)
    start, slots = state.clone(), torch.tensor([2, 0])
    with using(language):
        o, new = gated_delta(*x, state, slots=slots, form=form, in_place=False)
        assert torch.equal(state, start)
        assert torch.equal(gated_delta(*x, state, slots=slots, form=form), o)
        assert torch.equal(state[slots], new)
        out = torch.empty_like(o), torch.empty_like(new)
        assert gated_delta(*x, start, slots=slots, form=form, in_place=False, out=out)[1] is out[1]
    assert torch.equal(out[0], o) and torch.equal(out[1], new)


def decays(kind, g):
    """The decays of a test: as they come, with zeros, with tiny ones, or all tiny."""
    g = g.clone()
    if kind == "zeros":
        g[:, ::5], g[:, 7:9] = 0.0, 0.0
    elif kind == "tiny":
        g[:, ::5], g[:, 3:4] = 1e-30, torch.finfo(torch.float32).tiny / 4
    elif kind == "all tiny":
        g[:] = 1e-20
    return g


@pytest.mark.parametrize("kind", ["plain", "zeros", "tiny", "all tiny"])
@pytest.mark.parametrize("L", [1, 31, 32, 33, 130])
def test_both_forms_mean_the_same(L, kind):
    """In float64 the torch bodies agree to rounding; the kernels agree with that to float32's."""
    x, state = tokens(2, L, dtype=torch.float64), normal(2, 4, 48, 32, seed=5).double()
    x[3] = decays(kind, x[3])
    o, S = gated_delta(*x, state, form="sequential", in_place=False)
    o_chunked, S_chunked = gated_delta(*x, state, form="chunked", in_place=False)
    assert (o - o_chunked).abs().max() < 1e-10 and (S - S_chunked).abs().max() < 1e-10
    for form in ("sequential", "chunked"):
        single, S_single = gated_delta(*(one.float() for one in x), state.float(), form=form, in_place=False)
        torch.testing.assert_close(single.double(), o, rtol=1e-5, atol=3e-6)
        torch.testing.assert_close(S_single.double(), S, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("form", ["sequential", "chunked"])
def test_a_decay_of_zero_forgets_everything_before(form):
    x, state = tokens(1, 45), normal(1, 4, 48, 32, seed=5)
    x[3][:, 40] = 0.0
    o, S = gated_delta(*x, state, form=form, in_place=False)
    fresh, S_fresh = gated_delta(*cut(x, 40, 45), torch.zeros_like(state), form=form, in_place=False)
    torch.testing.assert_close(o[:, 40:], fresh, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(S, S_fresh, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["sequential", "chunked"])
def test_512_steps_drift_no_further_than_the_body(form):
    x, state = tokens(1, 512), torch.zeros(1, 4, 48, 32)
    with reference():
        exact, _ = gated_delta(*(one.double() for one in x), state.double(), in_place=False)
        body, _ = gated_delta(*x, state, in_place=False)
    steps = gated_delta(*x, state, form=form)
    assert (steps - exact).abs().max() <= 2 * (body - exact).abs().max() + 1e-6


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("W", [2, 4, 6])
def test_causal_conv_has_the_same_bits_however_a_prompt_is_cut(W, stored):
    x, state = normal(1, 20, 37, dtype=stored), normal(3, W - 1, 37, seed=2, dtype=stored)
    weight, slot = normal(37, W, seed=1), torch.tensor([2])
    for size in (1, 2, 3, 7):
        whole_state, piece_state = state.clone(), state.clone()
        whole = causal_conv(x, weight, whole_state, slots=slot)
        parts = [causal_conv(x[:, i : i + size], weight, piece_state, slots=slot) for i in range(0, 20, size)]
        assert torch.equal(torch.cat(parts, 1), whole) and torch.equal(piece_state, whole_state)
        assert torch.equal(whole_state[2], torch.cat([state[2], x[0]])[-(W - 1) :])
        assert torch.equal(whole_state[:2], state[:2])


def test_causal_conv_has_the_same_bits_alone_and_in_a_batch():
    x, weight, state = normal(3, 5, 70), normal(70, 4, seed=1), normal(4, 3, 70, seed=2)
    start, slots = state.clone(), torch.tensor([3, 0, 1])
    y = causal_conv(x, weight, state, slots=slots)
    for b, slot in enumerate(slots):
        assert torch.equal(causal_conv(x[b : b + 1], weight, start[slot : slot + 1]), y[b : b + 1])
        assert torch.equal(start[slot], state[slot])


@LANGUAGES
@pytest.mark.parametrize("L", [1, 2, 9, 300])
def test_causal_conv_may_write_over_its_input(L, language):
    x, weight, state = normal(2, L, 100), normal(100, 4, seed=1), normal(2, 3, 100, seed=2)
    with using(language):
        wanted, states = causal_conv(x, weight, state.clone()), state.clone()
        assert causal_conv(x, weight, states, out=x) is x
        assert torch.equal(x, wanted)


@LANGUAGES
def test_a_float64_state_is_kept(language):
    x, state = tokens(2, 5), normal(2, 4, 48, 32).double()
    single = state.float()
    with using(language):
        assert torch.equal(gated_delta(*x, state), gated_delta(*x, single))
        assert gated_delta(*x, state, in_place=False)[1].dtype == torch.float64
    assert torch.equal(state, single.double())


@LANGUAGES
def test_no_tokens_leave_the_states_alone(language):
    state, memory = normal(2, 3, 8), normal(2, 4, 48, 32)
    with using(language):
        before, kept = state.clone(), memory.clone()
        assert causal_conv(torch.empty(2, 0, 8), normal(8, 4), state).shape == (2, 0, 8)
        assert gated_delta(*tokens(2, 0), memory).shape == (2, 0, 4, 48)
    assert torch.equal(state, before) and torch.equal(memory, kept)


@LANGUAGES
def test_gates_hold_where_the_naive_softplus_overflows(language):
    a = torch.tensor([[-torch.inf, -200.0, -20.0, 0.0, 20.0, 89.0, 200.0, 1e30, torch.nan]]).T
    with using(language):
        g, beta = delta_gates(a, a, torch.tensor([-7.0]), torch.zeros(1))
        still, _ = delta_gates(a[1:8], a[1:8], torch.tensor([-torch.inf]), torch.zeros(1))
    exact = torch.exp(-torch.exp(torch.tensor(-7.0).double()) * torch.nn.functional.softplus(a.double()))
    torch.testing.assert_close(g.double(), exact, rtol=1e-6, atol=1e-30, equal_nan=True)
    torch.testing.assert_close(beta, torch.sigmoid(a), rtol=1e-6, atol=1e-30, equal_nan=True)
    assert g[5].item() == pytest.approx(0.922, abs=1e-3)
    assert (still == 1).all()


@LANGUAGES
def test_gates_of_a_token_do_not_depend_on_the_others_and_may_replace_their_inputs(language):
    a, b, a_log, dt_bias = normal(600, 33), normal(600, 33, seed=1), normal(33, seed=2), normal(33, seed=3)
    with using(language):
        g, beta = delta_gates(a, b, a_log, dt_bias)
        one = delta_gates(a[7:8], b[7:8], a_log, dt_bias)
        if language == "numba":
            assert torch.equal(one[0], g[7:8]) and torch.equal(one[1], beta[7:8])
        assert delta_gates(a, b, a_log, dt_bias, out=(a, b))[0] is a
    assert torch.equal(a, g) and torch.equal(b, beta)


@pytest.mark.parametrize(
    "change",
    [
        {"k": normal(2, 3, 2, 31)},
        {"v": normal(2, 3, 3, 48)},
        {"g": normal(2, 3, 3)},
        {"state": normal(2, 4, 32, 48)},
        {"state": normal(2, 4, 48, 32, dtype=torch.bfloat16)},
        {"state": normal(1, 4, 48, 32)},
        {"slots": torch.tensor([1, 1])},
        {"form": "parallel"},
        {"out": torch.empty(2, 3, 4, 47)},
        {"in_place": False, "out": torch.empty(2, 3, 4, 48)},
    ],
    ids=" ".join,
)
def test_gated_delta_refuses(change):
    names = ("q", "k", "v", "g", "beta")
    arguments = dict(zip(names, tokens(2, 3), strict=True)) | {"state": normal(2, 4, 48, 32)} | change
    with pytest.raises(ValueError, match="gated_delta: "):
        gated_delta(**arguments)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": normal(8, 1)},
        {"weight": normal(7, 4)},
        {"weight": normal(8, 4, 2)},
        {"state": normal(2, 4, 8)},
        {"slots": torch.tensor([0, 2])},
        {"slots": torch.tensor([0, 0])},
        {"activation": "gelu"},
    ],
    ids=" ".join,
)
def test_causal_conv_refuses(change):
    with pytest.raises(ValueError, match="causal_conv: "):
        causal_conv(**{"x": normal(2, 3, 8), "weight": normal(8, 4), "state": normal(2, 3, 8)} | change)
