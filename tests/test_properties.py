"""What holds for every op: zero rows, NaN and infinity, `out=`; and kernels against bodies over shapes nobody chose."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from valid_calls import Call, calls, ints

from halfbyte.cases import Random
from halfbyte.check import LIMIT, clone, error_ratio, tensors
from halfbyte.ops.attention import attention
from halfbyte.ops.dispatch import using
from halfbyte.ops.quant import Packed, qmm, quantize
from halfbyte.ops.recurrent import gated_delta
from halfbyte.ops.routing import route
from halfbyte.ops.rowwise import ACTIVATIONS, glu, rms_norm, rope
from halfbyte.ops.sampling import Sampling

DTYPES = [torch.float32, torch.bfloat16]
OPS = calls()
WITH_OUT = [op for op, call in OPS.items() if "out" in signature(call.op).parameters]


def z(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def delta(B: int, L: int) -> dict[str, torch.Tensor]:
    heads = {"g": z(B, L, 4), "beta": z(B, L, 4), "v": z(B, L, 4, 5)}
    return {"q": z(B, L, 2, 6), "k": z(B, L, 2, 6)} | heads


NONE = torch.zeros(0, dtype=torch.int32)
NO_ROWS = {
    "rms_norm": [({name: z(0, 20) for name in ("x", "add", "mul", "gate", "residual")}, [(0, 20)])],
    "rms_norm_many": [({"x": z(0, 20)}, [(0, 20), (0, 20)])],
    "rms_norm_chain": [({name: z(0, 20) for name in ("x", "residual", "residual2")}, [(0, 20), (0, 20)])],
    "glu": [({"gate": z(0, 20), "up": z(0, 20)}, [(0, 20)]), ({"gate": z(3, 0), "up": z(3, 0)}, [(3, 0)])],
    "rope": [({"x": z(0, 2, 8), "positions": NONE}, [(0, 2, 8)]), ({"x": z(3, 0, 8)}, [(3, 0, 8)])],
    "softcap": [({"x": z(0, 20)}, [(0, 20)])],
    "quantize": [({"w": z(0, 64)}, [(0, 8), (0, 2), (0, 2)])],
    "dequantize": [({"p": Packed(torch.zeros(0, 8, dtype=torch.uint32), z(0, 2), z(0, 2), 4, 32)}, [(0, 64)])],
    "qmm": [
        ({"x": z(0, 64)}, [(0, 5)]),
        ({"x": z(2, 0, 64)}, [(2, 0, 5)]),
        ({"w": z(0, 64)}, [(3, 0)]),
        ({"x": z(0, 5), "transpose": False}, [(0, 64)]),
    ],
    "expert_qmm": [
        ({"x": z(0, 64), "ids": NONE.view(0, 2)}, [(0, 2, 32)]),
        ({"x": z(0, 2, 64), "ids": NONE.view(0, 2)}, [(0, 2, 32)]),
    ],
    "expert_mlp": [({"x": z(0, 64), "ids": NONE.view(0, 2)}, [(0, 2, 64)])],
    "embed": [({"ids": NONE}, [(0, 64)])],
    "route": [({"logits": z(0, 12)}, [(0, 4), (0, 4)])],
    "combine": [
        (
            {"y": z(0, 2, 20), "weights": z(0, 2), "residual": z(0, 20), "shared": z(0, 20), "shared_gate": z(0)},
            [(0, 20)],
        ),
        (
            {"y": z(0, 20), "weights": z(0), "residual": z(4, 20), "tokens": NONE, "shared": None, "shared_gate": None},
            [(4, 20)],
        ),
    ],
    "attention": [
        ({"q": z(0, 2, 4, 8), "lengths": NONE, "slots": NONE}, [(0, 2, 4, 10)]),
        ({"q": z(2, 0, 4, 8)}, [(2, 0, 4, 10)]),
    ],
    "latent_attention": [
        ({"q": z(0, 2, 4, 8), "q_pe": z(0, 2, 4, 6), "lengths": NONE, "slots": NONE}, [(0, 2, 4, 8)]),
        ({"q": z(2, 0, 4, 8), "q_pe": z(2, 0, 4, 6)}, [(2, 0, 4, 8)]),
    ],
    "merge_states": [({"o1": z(0, 20), "o2": z(0, 20), "lse1": z(0), "lse2": z(0)}, [(0, 20), (0,)])],
    "append": [
        ({"new": z(0, 2, 2, 4), "slots": NONE, "lengths": NONE}, [(3, 6, 2, 4)]),
        ({"new": z(2, 0, 2, 4)}, [(3, 6, 2, 4)]),
    ],
    "causal_conv": [
        ({"x": z(0, 3, 7), "slots": NONE}, [(0, 3, 7)]),
        ({"x": z(2, 0, 7)}, [(2, 0, 7)]),
    ],
    "delta_gates": [({"a": z(0, 5), "b": z(0, 5)}, [(0, 5), (0, 5)])],
    "gated_delta": [
        (delta(0, 3) | {"slots": NONE}, [(0, 3, 4, 5)]),
        (delta(2, 0), [(2, 0, 4, 5)]),
        (delta(2, 0) | {"in_place": False}, [(2, 0, 4, 5), (2, 4, 5, 6)]),
    ],
    "sample": [({"logits": z(0, 12), "params": Sampling(), "seeds": NONE.long(), "positions": NONE}, [(0,)])],
}


def test_every_op_has_a_call_without_rows():
    assert set(NO_ROWS) == set(OPS)


@pytest.mark.parametrize("language", ["torch", "numba"])
@pytest.mark.parametrize(
    ("op", "changes", "shapes"), [(op, changes, shapes) for op, rows in NO_ROWS.items() for changes, shapes in rows]
)
def test_no_rows_give_empty_results(op, changes, shapes, language):
    call = OPS[op]
    arguments = clone(call.arguments | changes)
    with using(language):
        result = call.op(**arguments)
    assert [tuple(t.shape) for t in tensors(result)] == shapes
    for name in call.mutates:
        assert torch.equal(arguments[name], (call.arguments | changes)[name])


def float_arguments(call: Call) -> list[str]:
    return [n for n, v in call.arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]


POISON = [
    (op, name, value)
    for op in OPS
    for name in float_arguments(OPS[op])
    for value in (torch.nan, torch.inf, -torch.inf)
    if op != "quantize" and (op, name) != ("gated_delta", "g")  # those take finite weights, and decays from 0 to 1
]


@pytest.mark.parametrize(("op", "argument", "value"), POISON)
def test_nan_and_infinity_propagate_as_in_the_body(op, argument, value):
    for dtype in DTYPES:
        call = calls(dtype)[op]
        for place in (0, -1):
            arguments = clone(call.arguments)
            arguments[argument].view(-1)[place] = value
            if op in (
                "qmm",
                "expert_qmm",
                "expert_mlp",
            ):  # sums of x over a group make NaN of an infinity, where the body may keep it
                assert same_finite(call, arguments)
            else:
                assert error_ratio(call.op, (), arguments, mutates=call.mutates) <= LIMIT


def same_finite(call: Call, arguments: dict[str, Any]) -> bool:
    with using("torch"):
        body = call.op(**arguments)
    return torch.equal(call.op(**arguments).isfinite(), body.isfinite())


def bits(result) -> list[torch.Tensor]:
    return [t.view(torch.uint8) if t.numel() else t for t in (t.contiguous() for t in tensors(result))]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


@pytest.mark.parametrize("language", ["torch", "numba"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("op", WITH_OUT)
def test_out_receives_the_same_bits(op, dtype, language):
    call = calls(dtype)[op]
    with using(language):
        expected = call()
        for step in (1, 2):
            outs = [
                torch.empty(*t.shape[:-1], step * t.shape[-1], dtype=t.dtype)[..., ::step] for t in tensors(expected)
            ]
            result = call(out=tuple(outs) if isinstance(expected, tuple) else outs[0])
            assert all(a is b for a, b in zip(tensors(result), outs, strict=True))
            assert same(outs, expected)


IN_PLACE = {
    "rms_norm": ["x", "add", "mul", "gate", "residual"],
    "rms_norm_many": [("x", None), (None, "x")],
    "rms_norm_chain": [("x", "residual"), ("residual", "residual2"), ("residual2", "x")],
    "glu": ["gate", "up"],
    "rope": ["x"],
    "softcap": ["x"],
    "combine": ["residual", "shared"],
    "merge_states": [("o1", "lse1"), ("o2", "lse2")],
    "causal_conv": ["x"],
    "delta_gates": [("a", "b")],
}


@pytest.mark.parametrize("language", ["torch", "numba"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("op", "names"), [(op, names) for op, rows in IN_PLACE.items() for names in rows])
def test_out_may_be_an_input_where_the_op_says_so(op, names, dtype, language):
    call = calls(dtype)[op]
    with using(language):
        expected = call()
        arguments = clone(call.arguments)
        if op == "delta_gates":  # its results are float32
            arguments |= {name: arguments[name].float() for name in names}
        if isinstance(names, str):
            out = arguments[names]
        else:
            out = tuple(
                torch.empty_like(e) if n is None else arguments[n] for n, e in zip(names, expected, strict=True)
            )
        assert same(call.op(**arguments, out=out), expected)
        assert same(out, expected)


def test_combine_adds_tokens_in_place():
    r = Random(3)
    y, weights, residual, tokens = r.normal(5, 9), r.normal(5), r.normal(4, 9), ints(3, 0, 3, 3, 1)
    expected = OPS["combine"].op(y, weights, residual=residual, tokens=tokens)
    assert same(OPS["combine"].op(y, weights, residual=residual, tokens=tokens, out=residual), expected)
    assert same(residual, expected)


examples = settings(max_examples=20, deadline=None, derandomize=True)
sizes = st.integers(1, 70)
seeds = st.integers(0, 10**6)
dtypes = st.sampled_from(DTYPES)


@examples
@given(
    rows=st.integers(0, 9), D=st.integers(1, 700), seed=seeds, dtype=dtypes, options=st.sets(st.sampled_from("amgrs"))
)
def test_rms_norm_over_shapes(rows, D, seed, dtype, options):
    r = Random(seed)
    rest = {name: r.normal(rows, D, dtype=dtype) for name in ("add", "mul", "gate", "residual") if name[0] in options}
    kwargs = rest | {"return_sum": "s" in options, "scale": r.normal(D) if "s" in options else None}
    assert error_ratio(rms_norm, (r.normal(rows, D, dtype=dtype, scale=0.01), r.normal(D)), kwargs) <= LIMIT


@examples
@given(rows=st.integers(0, 9), D=st.integers(0, 900), seed=seeds, dtype=dtypes, activation=st.sampled_from(ACTIVATIONS))
def test_glu_over_shapes(rows, D, seed, dtype, activation):
    r = Random(seed)
    assert (
        error_ratio(glu, (r.normal(rows, D, dtype=dtype, scale=3), r.normal(rows, D, dtype=dtype), activation), {})
        <= LIMIT
    )


@examples
@given(
    T=st.integers(0, 6),
    H=st.integers(1, 5),
    half=st.integers(1, 40),
    tail=st.integers(0, 9),
    start=st.integers(0, 2**20),
    interleaved=st.booleans(),
    seed=seeds,
    dtype=dtypes,
)
def test_rope_over_shapes(T, H, half, tail, start, interleaved, seed, dtype):
    r = Random(seed)
    inv_freq = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    args = (r.normal(T, H, 2 * half + tail, dtype=dtype), torch.arange(start, start + T), inv_freq)
    assert error_ratio(rope, args, {"rotary": 2 * half, "interleaved": interleaved, "scale": 1.3}) <= LIMIT


@examples
@given(
    rows=st.sampled_from([0, 1, 2, 3, 5, 8, 17, 40]),
    N=sizes,
    groups=st.integers(1, 5),
    stored=st.sampled_from([(2, 64), (3, 64), (4, 32), (4, 64), (8, 64)]),
    transpose=st.booleans(),
    lead=st.sampled_from([(), (3,), (2, 2)]),
    seed=seeds,
    dtype=dtypes,
)
def test_qmm_over_shapes(rows, N, groups, stored, transpose, lead, seed, dtype):
    r, (bits, group) = Random(seed), stored
    K = groups * group
    w = quantize(r.normal(*lead, N, K, dtype=torch.bfloat16), bits, group)
    x = r.normal(rows, *lead, K if transpose else N, dtype=dtype)
    assert error_ratio(qmm, (x, w), {"transpose": transpose}) <= LIMIT


@examples
@given(
    rows=st.integers(0, 9),
    N=sizes,
    K=st.integers(1, 300),
    transpose=st.booleans(),
    seed=seeds,
    dtype=dtypes,
    stored=dtypes,
)
def test_dense_qmm_over_shapes(rows, N, K, transpose, seed, dtype, stored):
    r = Random(seed)
    x, w = r.normal(rows, K if transpose else N, dtype=dtype), r.normal(N, K, dtype=stored)
    assert error_ratio(qmm, (x, w), {"transpose": transpose}) <= LIMIT


@examples
@given(
    rows=st.integers(0, 9),
    E=st.integers(1, 200),
    k=st.integers(1, 16),
    seed=seeds,
    kind=st.sampled_from(["softmax", "sigmoid"]),
)
def test_route_over_shapes(rows, E, k, seed, kind):
    r = Random(seed)
    assert error_ratio(route, (r.normal(rows, E), min(k, E)), {"kind": kind, "per_expert_scale": r.normal(E)}) <= LIMIT


@examples
@given(
    B=st.integers(1, 3),
    L=st.integers(1, 9),
    G=st.integers(1, 3),
    per=st.integers(1, 4),
    D=st.integers(1, 80),
    Dv=st.integers(1, 80),
    S=st.integers(9, 150),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 40),
    softcap=st.none() | st.just(5.0),
    seed=seeds,
    dtype=dtypes,
)
def test_attention_over_shapes(B, L, G, per, D, Dv, S, causal, window, softcap, seed, dtype):
    r = Random(seed)
    args = (
        r.normal(B, L, G * per, D, dtype=dtype),
        r.normal(B, S, G, D, dtype=dtype),
        r.normal(B, S, G, Dv, dtype=dtype),
    )
    options = {"scale": D**-0.5, "causal": causal, "window": window, "softcap": softcap, "return_lse": True}
    assert error_ratio(attention, args, options | {"lengths": r.integers(L, S + 1, B)}) <= LIMIT


@examples
@given(
    B=st.integers(1, 2),
    L=st.integers(1, 90),
    Hk=st.integers(1, 2),
    per=st.integers(1, 3),
    Dk=st.integers(1, 40),
    Dv=st.integers(1, 40),
    form=st.sampled_from(["sequential", "chunked"]),
    seed=seeds,
    dtype=dtypes,
)
def test_gated_delta_over_shapes(B, L, Hk, per, Dk, Dv, form, seed, dtype):
    r, Hv = Random(seed), Hk * per
    q, k = (torch.nn.functional.normalize(r.normal(B, L, Hk, Dk), dim=-1).to(dtype) for _ in range(2))
    g, beta = r.normal(B, L, Hv).sigmoid(), r.normal(B, L, Hv).sigmoid()
    kwargs = {"state": r.normal(B, Hv, Dv, Dk), "form": form}
    args = (q, k, r.normal(B, L, Hv, Dv, dtype=dtype), g, beta)
    assert error_ratio(gated_delta, args, kwargs, mutates=("state",)) <= LIMIT
