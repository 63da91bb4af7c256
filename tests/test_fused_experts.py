"""A mixture of experts in three launches: router and choice, gate and up, down with all that follows it."""

import pytest
import torch

from halfbyte.check import ratio
from halfbyte.fusion import FUSIONS, fuse
from halfbyte.graph import record, run_all
from halfbyte.kernels.triton import fused_experts, fused_router
from halfbyte.kernels.triton.stream import Norm
from halfbyte.ops.dispatch import reference, using
from halfbyte.ops.experts import Experts, expert_mlp
from halfbyte.ops.quant import dequantize, qmm, quantize
from halfbyte.ops.routing import combine, route
from halfbyte.ops.rowwise import glu, rms_norm

OTHERS = FUSIONS.keys() - {"shared_expert", "side_by_side", "choose_experts", "down_and_add"}


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


def fused_twice(mixture, block, B):
    """The outcome of the fused step, which is the same twice, the names of its calls, and its error ratio."""
    x, h = torch.randn(B, 64).half(), torch.randn(B, 64)
    with using("triton"):
        got, calls = record(lambda: block(x, h))
        fused = fuse(calls, without=OTHERS)
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
def test_a_mixture_is_three_launches_and_a_norm(B, settings):
    mixture = Mixture(**settings)
    names, error = fused_twice(mixture, mixture.block, B)
    assert names == ["choose_experts", "gate_and_up", "down_and_add", "rms_norm"]
    assert error <= 2


def test_a_sum_that_is_read_twice_is_not_joined_to_the_stream():
    mixture = Mixture(shared=False)

    def block(x, h):
        added = mixture(x)
        return *rms_norm(h, mixture.norm, 1e-6, add=added, return_sum=True), added * 2

    names, error = fused_twice(mixture, block, 1)
    assert names == ["choose_experts", "gate_and_up", "down_and_add", "rms_norm", "mul"]
    assert error <= 2


def test_results_that_somebody_reads_stay():
    mixture = Mixture(shared=False)

    def block(x, h):
        ids, shares = route(qmm(x, mixture.router), mixture.k)
        y = expert_mlp(x, ids, mixture.experts)
        return combine(y, shares), y * 2

    names, error = fused_twice(mixture, block, 1)
    assert names == ["choose_experts", "expert_mlp", "combine", "mul"]
    assert error <= 2


def test_a_gate_of_another_format_is_there_before_it_is_read_early():
    """down_and_add reads gates before it waits for gate_and_up: their projection must not come between the two."""
    mixture = Mixture()
    mixture.gate = weights(1, 64, bits=4)
    names, error = fused_twice(mixture, mixture.block, 1)
    assert names == ["choose_experts", "qmm", "gate_and_up", "down_and_add", "rms_norm"]
    assert error <= 2


@pytest.mark.parametrize(
    ("bits", "group", "mode", "dtype", "K"),
    [
        (4, 64, "affine", torch.float16, 512),
        (4, 64, "affine", torch.float16, 704),  # Gemma's: no whole spans, an odd number of groups
        (2, 64, "affine", torch.float16, 256),
        (4, 32, "mxfp4", torch.float16, 256),
        (8, 64, "affine", torch.float32, 192),
        (6, 64, "affine", torch.float16, 192),
        (4, 16, "nvfp4", torch.float32, 96),
        (8, 32, "mxfp8", torch.float32, 96),
    ],
)
def test_down_projections_of_every_format_are_weighted_and_added(bits, group, mode, dtype, K):
    torch.manual_seed(0)
    E, N, k, B = 5, 24, 3, 2
    down, x, h = (
        weights(E, N, K, bits=bits, group=group, mode=mode),
        torch.randn(B, k + 1, K).to(dtype),
        torch.randn(B, N),
    )
    ids = torch.stack([torch.randperm(E)[: k + 1] for _ in range(B)]).int()
    shares, gate = torch.rand(B, k), torch.randn(B, 1)
    got = fused_experts.down_and_add(x, ids, shares, gate, down, h, out=torch.full_like(h, torch.nan))
    every = torch.cat([shares, gate.sigmoid()], 1)

    def total(kind):
        y = torch.einsum("bank,bak->ban", dequantize(down).to(kind)[ids.long()], x.to(kind))
        return h.to(kind) + torch.einsum(
            "ba,ban->bn", every.to(kind), y.to(dtype).to(kind) if kind == torch.float32 else y
        )

    assert ratio(got, total(torch.float32), total(torch.float64)) <= 2


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
