"""Routing and combining against plain Python, one token at a time; every test runs the kernel and the torch body."""

import math

import pytest
import torch

from halfbyte.ops.dispatch import using
from halfbyte.ops.routing import combine, route

NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, params=["numba", "torch"])
def language(request):
    with using(request.param):
        yield request.param


def first(values, k):
    """The indices of the k largest: NaN first, ties to the lower."""
    return sorted(range(len(values)), key=lambda i: (not math.isnan(values[i]), -values[i], i))[:k]


def scores(row, kind):
    x = torch.tensor(row, dtype=torch.float64)
    return (torch.softmax(x, -1) if kind == "softmax" else torch.sigmoid(x)).tolist()


def expected(row, k, kind="softmax", bias=None, groups=None, keep=None, renormalise=True, scale=None, scaling=1.0):
    score = scores(row, kind)
    biased = score if bias is None else [s + b for s, b in zip(score, bias, strict=True)]
    choice = list(row if bias is None else biased)
    if groups:
        size = len(row) // groups
        value = [sum(sorted(biased[g * size : g * size + size])[-2:]) for g in range(groups)]
        stays = first(value, keep)
        choice = [c if i // size in stays else -INF for i, c in enumerate(choice)]
    ids = first(choice, k)
    weights = [score[i] for i in ids]
    if renormalise and sum(weights) > 0:
        weights = [w / sum(weights) for w in weights]
    return ids, [w * (scale[i] if scale else 1.0) * scaling for w, i in zip(weights, ids, strict=True)]


def slots(probabilities, k):
    """moe_softmax_topk's selection, statement by statement."""
    ids, values = [0] * k, [-1e30] * k
    for i, v in enumerate(probabilities):
        smallest = 0
        for s in range(1, k):
            if values[s] < values[smallest]:
                smallest = s
        if v > values[smallest]:
            ids[smallest], values[smallest] = i, v
    return ids, values


def random(*shape, seed=0, scale=2.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def assert_close(weights, wanted):
    torch.testing.assert_close(weights, torch.tensor(wanted, dtype=torch.float32), rtol=3e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "E, k, options",
    [
        (1, 1, {}),
        (19, 19, {}),
        (37, 5, {"renormalise": False, "scaling": 2.5}),
        (37, 5, {"scale": True}),
        (40, 7, {"kind": "sigmoid"}),
        (40, 7, {"kind": "sigmoid", "bias": True, "groups": 8, "keep": 3, "scaling": 2.5}),
        (40, 5, {"bias": True, "groups": 40, "keep": 9, "scale": True}),
        (40, 5, {"groups": 4, "keep": 1}),
        (4096, 33, {}),
        (4096, 9, {"kind": "sigmoid", "bias": True, "groups": 64, "keep": 2}),
    ],
)
def test_route_is_what_plain_python_says(E, k, options, dtype):
    options = dict(options)
    logits = random(6, E, seed=E).to(dtype)
    for name in ("bias", "scale"):
        if options.get(name):
            options[name] = random(E, seed=5, scale=0.3).tolist()
    wanted = [expected(row, k, **options) for row in logits.tolist()]
    renamed = {"keep": "keep_groups", "scale": "per_expert_scale"}
    given = {renamed.get(n, n): torch.tensor(v) if isinstance(v, list) else v for n, v in options.items()}
    ids, weights = route(logits, k, **given)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ids.tolist() == [w[0] for w in wanted]
    assert_close(weights, [w[1] for w in wanted])


def test_ties_go_to_the_lower_id():
    row = [1.0, 3.0, -0.0, 3.0, 0.0, 1.0, 3.0, 0.0]
    assert route(torch.tensor([row]), 8)[0].tolist() == [[1, 3, 6, 0, 5, 2, 4, 7]]
    assert route(torch.zeros(2, 50), 9)[0].tolist() == [list(range(9))] * 2
    bias = torch.tensor([0.0, 0.5, 0.5, 0.0, 0.5, 0.0])
    assert route(torch.zeros(1, 6), 4, kind="sigmoid", bias=bias)[0].tolist() == [[1, 2, 4, 0]]
    tied_groups = torch.tensor([[0.0, 1, 2, 1, 2, 1, 2, 0]])
    assert route(tied_groups, 4, kind="sigmoid", groups=4, keep_groups=2)[0].tolist() == [[2, 4, 3, 5]]
    assert route(torch.zeros(1, 6), 2, groups=3, keep_groups=1)[0].tolist() == [[0, 1]]


def test_experts_are_told_apart_by_logits_where_their_scores_round_alike():
    close = torch.tensor([[0.0, -200.0, -150.0, -120.0]])
    ids, weights = route(close, 4)
    assert ids.tolist() == [[0, 3, 2, 1]] and weights.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert route(torch.tensor([[30.0, 40.0, 50.0]]), 2, kind="sigmoid")[0].tolist() == [[2, 1]]


def test_nan_comes_first_and_spreads():
    row = torch.tensor([[0.0, NAN, 5.0, NAN, 1.0, -INF]])
    ids, weights = route(row, 4)
    assert ids.tolist() == [[1, 3, 2, 4]] and weights.isnan().all()
    ids, weights = route(row, 4, kind="sigmoid", renormalise=False)
    assert ids.tolist() == [[1, 3, 2, 4]] and weights.isnan().tolist() == [[True, True, False, False]]
    assert route(torch.tensor([[NAN, 3.0, NAN, 4.0]]), 3)[0].tolist() == [[0, 2, 3]]
    assert route(torch.full((1, 6), NAN), 4, bias=torch.zeros(6), groups=3, keep_groups=2)[0].tolist() == [[0, 1, 2, 3]]
    row = torch.tensor([[9.0, 9, 9, 0, NAN, 0, 0, 0]])
    assert route(row, 2, kind="sigmoid", groups=4, keep_groups=1)[0].tolist() == [[4, 5]]


def test_infinite_logits():
    ids, weights = route(torch.full((1, 5), -INF), 3)
    assert ids.tolist() == [[0, 1, 2]] and weights.isnan().all()
    ids, weights = route(torch.tensor([[-INF, 2.0, -INF, 2.0]]), 3)
    assert ids.tolist() == [[1, 3, 0]] and weights.tolist() == [[0.5, 0.5, 0.0]]
    ids, weights = route(torch.tensor([[0.0, INF, 1.0]]), 2)
    assert ids.tolist() == [[1, 2]] and weights.isnan().all()
    ids, weights = route(torch.full((1, 5), -INF), 3, kind="sigmoid")
    assert ids.tolist() == [[0, 1, 2]] and weights.tolist() == [[0.0, 0.0, 0.0]]


def test_slot_order_is_the_running_minimum_replacement():
    logits = random(9, 70, seed=3)
    logits[4] = logits[4].round()
    ids, weights = route(logits, 11, order="slot", renormalise=False)
    wanted = [slots(row, 11) for row in torch.softmax(logits, -1).tolist()]
    assert ids.tolist() == [w[0] for w in wanted]
    assert_close(weights, [w[1] for w in wanted])
    total = route(logits, 11, order="slot")[1].sum(-1)
    torch.testing.assert_close(total, torch.ones(9))


@pytest.mark.parametrize("row", [[0.0, NAN, 1.0, 2.0], [-INF] * 4, [INF, 0.0, 0.0, 0.0]])
def test_slot_order_never_chooses_nan(row):
    ids, weights = route(torch.tensor([row]), 2, order="slot")
    assert ids.tolist() == [[0, 0]] and (weights == torch.tensor(-1e30)).all()


def test_a_row_alone_is_the_row_in_a_batch():
    logits, bias = random(150, 200, seed=8), random(200, seed=9, scale=0.2)
    for options in ({}, {"order": "slot"}, {"kind": "sigmoid", "bias": bias, "groups": 8, "keep_groups": 3}):
        ids, weights = route(logits, 8, **options)
        for row in (0, 77, 149):
            alone = route(logits[row], 8, **options)
            assert torch.equal(alone[0], ids[row]) and torch.equal(alone[1], weights[row])


def test_route_writes_into_out():
    logits = random(2, 3, 20)
    wanted = route(logits, 4)
    for given in (lambda d: torch.empty(2, 3, 4, dtype=d), lambda d: torch.empty(2, 3, 8, dtype=d)[..., ::2]):
        out = given(torch.int32), given(torch.float32)
        ids, weights = route(logits, 4, out=out)
        assert ids is out[0] and weights is out[1]
        assert torch.equal(ids, wanted[0]) and torch.equal(weights, wanted[1])


@pytest.mark.parametrize(
    "change, word",
    [
        ({"k": 0}, "k"),
        ({"k": 13}, "k"),
        ({"logits": torch.zeros(2, 0)}, "logits"),
        ({"logits": torch.zeros(2, 4097)}, "logits"),
        ({"logits": torch.zeros(2, 12, dtype=torch.int32)}, "logits"),
        ({"kind": "tanh"}, "kind"),
        ({"order": "id"}, "order"),
        ({"bias": torch.zeros(11)}, "bias"),
        ({"per_expert_scale": torch.zeros(2, 12)}, "per_expert_scale"),
        ({"groups": 3}, "groups and keep_groups"),
        ({"keep_groups": 3}, "groups and keep_groups"),
        ({"groups": 5, "keep_groups": 2}, "groups"),
        ({"groups": 4, "keep_groups": 5}, "keep_groups"),
        ({"groups": 4, "keep_groups": 0}, "keep_groups"),
        ({"groups": 6, "keep_groups": 1}, "k"),
        ({"order": "slot", "kind": "sigmoid"}, "slot"),
        ({"order": "slot", "bias": torch.zeros(12)}, "slot"),
        ({"out": torch.zeros(2, 3)}, "out"),
        ({"out": (torch.zeros(2, 3), torch.zeros(2, 3))}, "out"),
        ({"out": (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 4))}, "out"),
    ],
)
def test_route_refuses(change, word):
    call = {"logits": torch.zeros(2, 12), "k": 3} | change
    with pytest.raises(ValueError, match=f"^route: {word}|^route: order=.{word}"):
        route(call.pop("logits"), call.pop("k"), **call)


@pytest.mark.parametrize("dtype", FLOATS)
def test_combine_adds_in_its_order(dtype):
    T, A, D = 5, 7, 83
    y, residual, shared = (random(*s, seed=i).to(dtype) for i, s in enumerate([(T, A, D), (T, D), (T, D)]))
    weights, gate = random(T, A, seed=4), random(T, seed=5)
    moe = (weights.double()[..., None] * y.double()).sum(-2)
    wanted = residual.double() + moe + torch.sigmoid(gate.double())[:, None] * shared.double()
    given = {"residual": residual, "shared": shared}
    result = combine(y, weights, shared_gate=gate, **given)
    assert result.dtype == dtype
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(result.double(), wanted, **tolerance)
    assert torch.equal(result, combine(y, weights, shared_gate=gate[:, None], **given))
    torch.testing.assert_close(combine(y, weights).double(), moe, **tolerance)
    torch.testing.assert_close(combine(y, weights, shared=shared).double(), moe + shared.double(), **tolerance)
    for target in ("residual", "shared"):
        inputs = {name: tensor.clone() for name, tensor in given.items()}
        assert torch.equal(combine(y, weights, shared_gate=gate, out=inputs[target], **inputs), result)
        assert torch.equal(inputs[target], result)


def test_experts_add_up_before_the_residual():
    y = torch.tensor([[1.0], [1.0]])
    big = torch.tensor([2.0**24])
    assert combine(y, torch.ones(2), residual=big).item() == 2.0**24 + 2
    assert combine(torch.tensor([[2.0**24], [1.0], [1.0]]), torch.ones(3)).item() == 2.0**24


def test_combine_of_a_token_alone_is_the_token_in_a_batch():
    y, weights, residual, shared = (random(*s, seed=6) for s in [(90, 8, 200), (90, 8), (90, 200), (90, 200)])
    whole = combine(y, weights, residual=residual, shared=shared)
    for t in (0, 44, 89):
        assert torch.equal(combine(y[t], weights[t], residual=residual[t], shared=shared[t]), whole[t])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("M, T, D", [(13, 5, 37), (300, 40, 700), (0, 3, 4)])
def test_buckets_add_to_their_tokens(M, T, D, dtype):
    y, weights, residual = random(M, D, seed=1).to(dtype), random(M, seed=2), random(T, D, seed=3).to(dtype)
    tokens = torch.randint(0, T, (M,), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    wanted = residual.double()
    for m, t in enumerate(tokens.tolist()):
        wanted[t] += weights[m].double() * y[m].double()
    before = residual.clone()
    result = combine(y, weights, residual=residual, tokens=tokens)
    assert torch.equal(residual, before)
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps, "atol": 1e-4}
    torch.testing.assert_close(result.double(), wanted, **tolerance)
    in_place = combine(y, weights, residual=residual, tokens=tokens.long(), out=residual)
    assert in_place is residual and torch.equal(residual, result)


def test_buckets_add_in_order():
    y = torch.tensor([[1.0], [1.0], [-(2.0**24)], [1.0]]).expand(4, 20)
    result = combine(y, torch.ones(4), residual=torch.full((1, 20), 2.0**24), tokens=torch.zeros(4, dtype=torch.int64))
    assert torch.equal(result, torch.ones(1, 20))


TWO = {"y": torch.zeros(2, 3, 4), "weights": torch.zeros(2, 3)}
BUCKET = {"y": torch.zeros(3, 4), "weights": torch.zeros(3), "residual": torch.zeros(2, 4)}
TOKENS = torch.tensor([0, 1, 1])


@pytest.mark.parametrize(
    "call, word",
    [
        (TWO | {"weights": torch.zeros(2, 4)}, "weights"),
        (TWO | {"y": torch.zeros(2, 0, 4), "weights": torch.zeros(2, 0)}, "y"),
        (TWO | {"y": torch.zeros(2, 3, 0)}, "y"),
        (TWO | {"residual": torch.zeros(4)}, "residual"),
        (TWO | {"shared": torch.zeros(2, 3)}, "shared"),
        (TWO | {"shared_gate": torch.zeros(2)}, "shared_gate"),
        (TWO | {"shared": torch.zeros(2, 4), "shared_gate": torch.zeros(2, 4)}, "shared_gate"),
        (TWO | {"out": torch.zeros(2, 4, dtype=torch.bfloat16)}, "out"),
        (BUCKET | {"tokens": TOKENS[:2]}, "y"),
        (BUCKET | {"tokens": TOKENS.float()}, "tokens"),
        (BUCKET | {"tokens": TOKENS + 1}, "tokens"),
        (BUCKET | {"tokens": TOKENS - 1}, "tokens"),
        (BUCKET | {"tokens": TOKENS, "residual": None}, "residual"),
        (BUCKET | {"tokens": TOKENS, "residual": torch.zeros(2, 5)}, "residual"),
        (BUCKET | {"tokens": TOKENS, "shared": torch.zeros(2, 4)}, "shared"),
        (BUCKET | {"tokens": TOKENS, "weights": torch.zeros(2)}, "weights"),
    ],
)
def test_combine_refuses(call, word):
    call = dict(call)
    with pytest.raises(ValueError, match=f"^combine: {word}"):
        combine(call.pop("y"), call.pop("weights"), **call)


def test_combine_does_not_write_over_y():
    y = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="out"):
        combine(y, torch.zeros(4), residual=torch.zeros(4, 4), tokens=torch.arange(4), out=y)
