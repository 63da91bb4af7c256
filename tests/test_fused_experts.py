"""A mixture of experts in few launches: a router that chooses, or experts that choose themselves."""

import pytest
import torch

from halfbyte.check import ratio
from halfbyte.fusion import FUSIONS, fuse
from halfbyte.graph import record, run_all
from halfbyte.kernels.triton import fused_router
from halfbyte.kernels.triton.stream import Norm
from halfbyte.ops.dispatch import reference, using
from halfbyte.ops.experts import Experts, expert_mlp
from halfbyte.ops.quant import qmm, quantize
from halfbyte.ops.routing import combine, route
from halfbyte.ops.rowwise import glu, rms_norm

TOGETHER = {"shared_expert", "side_by_side"}


def weights(*shape, bits=4, group=64, mode="affine"):
    return quantize(torch.randn(shape) * shape[-1] ** -0.5, bits, group, mode)


class Mixture:
    """As models/layers.py has them, with its weights at hand."""

    def __init__(self, E=4, H=64, I=64, k=2, shared=True, gated=True, dense=False, **settings):  # noqa: E741
        torch.manual_seed(0)
        self.k, self.settings = k, settings
        self.router = torch.randn(E, H).half() if dense else weights(E, H, bits=8)
        self.experts = Experts(weights(E, I, H), weights(E, I, H), weights(E, H, I))
        self.shared = [weights(I, H), weights(I, H), weights(H, I)] if shared else None
        self.gate = weights(1, H, bits=8) if shared and gated else None
        self.norm = torch.rand(H) + 0.5

    def __call__(self, x):
        ids, shares = route(qmm(x, self.router), self.k, **self.settings)
        y = expert_mlp(x, ids, self.experts)
        if self.shared is None:
            return combine(y, shares)
        gate, up, down = self.shared
        beside = qmm(glu(qmm(x, gate), qmm(x, up), "silu"), down)
        return combine(y, shares, shared=beside, shared_gate=None if self.gate is None else qmm(x, self.gate).flatten())

    def block(self, x, h):
        """The norm of the stream h with what the experts add to it, and the new stream."""
        _, total, normed = rms_norm(h, self.norm, 1e-6, add=self(x), return_sum=True, extra_dtype=x.dtype)
        return normed, total


def fused_twice(block, B, fusion):
    """The outcome of the fused step, which is the same twice, the names of its calls, and its error ratio."""
    x, h = torch.randn(B, 64).half(), torch.randn(B, 64)
    with using("triton"):
        got, calls = record(lambda: block(x, h))
        fused = fuse(calls, without=FUSIONS.keys() - {fusion, "combine_and_norm", *TOGETHER})
        outcomes = []
        for _ in range(2):
            for result in got:
                result.fill_(torch.nan)
            run_all(fused)
            outcomes.append([result.clone() for result in got])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))
    with reference():
        body, exact = block(x, h), block(x.double(), h.double())
    return [one.name for one in fused], max(map(ratio, outcomes[0], body, exact))


@pytest.mark.parametrize(
    ("B", "settings"),
    [
        (2, {}),  # Qwen3.5
        (1, {"shared": False}),  # Qwen3
        (2, {"gated": False, "dense": True, "kind": "sigmoid", "bias": torch.linspace(-0.1, 0.1, 4), "scaling": 2.5,
             "groups": 2, "keep_groups": 1}),  # DeepSeek-V3
    ],
    ids=["shared-gated", "none-shared", "sigmoid"],
)  # fmt: skip
def test_a_router_chooses(B, settings):
    names, error = fused_twice(Mixture(**settings).block, B, "choose_experts")
    assert names == ["choose_experts", "expert_mlp", "combine_and_norm"]
    assert error <= 2


@pytest.mark.parametrize(
    "settings",
    [
        {},  # Qwen3.5
        {"shared": False, "E": 8, "k": 4},  # Qwen3
        {"shared": False, "E": 24, "k": 5, "per_expert_scale": torch.linspace(0.5, 2, 24), "renormalise": False},
        {"gated": False, "dense": True, "E": 6, "kind": "sigmoid", "scaling": 2.5},
        {"shared": False, "k": 1},
    ],
    ids=["shared-gated", "none-shared", "scaled", "sigmoid", "one"],
)
def test_experts_choose_themselves(settings):
    mixture = Mixture(**settings)
    names, error = fused_twice(mixture.block, 1, "routed_experts")
    assert names == ["qmm", "routed_experts", "combine_and_norm"]
    assert error <= 2


@pytest.mark.parametrize(("bits", "group", "mode"), [(2, 64, "affine"), (8, 64, "affine"), (4, 32, "mxfp4")])
def test_experts_of_every_kernel_choose_as_route_does(bits, group, mode):
    """Ids and weights are left for who reads them later, bit by bit."""
    torch.manual_seed(1)
    E, k = 12, 3
    shapes = ((E, 32, 64), (E, 32, 64), (E, 64, 32))
    experts = Experts(*(weights(*shape, bits=bits, group=min(group, shape[-1]), mode=mode) for shape in shapes))
    logits, x = torch.randn(1, E).half(), torch.randn(1, 64).half()

    def step():
        ids, shares = route(logits, k)
        return expert_mlp(x, ids, experts), ids, shares

    with using("triton"):
        got, calls = record(step)
        expected = [one.clone() for one in got]
        fused = fuse(calls, rows=1)
        for one in got:
            one.zero_()
        run_all(fused)
    assert [one.name for one in fused] == ["routed_experts"]
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("case", ["two tokens", "float32 logits", "a bias", "ids read between", "wide rows"])
def test_other_choices_are_left_to_route(case):
    H = 2176 if case == "wide rows" else 64
    experts = Experts(weights(4, 64, H), weights(4, 64, H), weights(4, H, 64))
    rows = 2 if case == "two tokens" else 1
    logits = torch.randn(rows, 4).to(torch.float32 if case == "float32 logits" else torch.float16)
    bias = torch.linspace(-0.1, 0.1, 4) if case == "a bias" else None
    x = torch.randn(rows, H).half()

    def step():
        ids, shares = route(logits, 2, bias=bias)
        between = ids + 1 if case == "ids read between" else None
        return expert_mlp(x, ids, experts), shares, between

    with using("triton"):
        fused = fuse(record(step)[1], without=FUSIONS.keys() - {"routed_experts"})
    assert "routed_experts" not in [one.name for one in fused]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_router_norms_its_input_and_leaves_its_board_empty(dtype):
    torch.manual_seed(0)
    router, h, weight = weights(9, 160, bits=8, group=32), torch.randn(2, 160), torch.rand(160) + 0.5
    board, ids = torch.full((2, 8), -1, dtype=torch.int32), torch.full((2, 4), -1, dtype=torch.int32)
    out = (torch.empty(2, 9, dtype=dtype), ids[:, :3], torch.empty(2, 3))
    x, norm = (h * weight).to(dtype), Norm(h.square().view(2, 5, 32).sum(2), 1e-6)  # as who makes h leaves it
    for _ in range(2):
        fused_router.choose_experts(x, router, 3, board=board, experts=8, norm=norm, out=out)
    assert (board == -1).all()
    assert (ids[:, 3] == -1).all()  # where one that all tokens take stands
    with reference():
        body, exact = (
            qmm(rms_norm(h.to(kind), weight.to(kind), 1e-6), router) for kind in (torch.float32, torch.float64)
        )
        assert ratio(out[0], body.to(dtype), exact) <= 2
        expected = route(out[0][:, :8], 3)
    assert torch.equal(out[1], expected[0])
    torch.testing.assert_close(out[2], expected[1])


def test_equal_logits_of_16_bits_go_to_the_lower_id():
    logits = torch.tensor([[1, -2, 1, float("nan"), -0.0, 0.0, -2, float("-inf")]]).half()
    with using("triton"):
        ids, _ = route(logits, 8)
    assert ids.tolist() == [[3, 0, 2, 4, 5, 1, 6, 7]]
