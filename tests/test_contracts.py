"""Every check of the original dispatch layer, and what our ops do there: refuse, accept, or give an empty result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from halfbyte.ops.dispatch import trace
from halfbyte.ops.routing import combine
from halfbyte.ops.rowwise import rms_norm, rms_norm_chain, rms_norm_many

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
R, D, A = 3, 20, 2


class Rule(NamedTuple):
    """One check of the original dispatch layer, and ours beside it.

    `ours` is "raises ARGUMENT" (a refusal that names it), "accepts" (what the original refuses or leaves unchecked
    has one meaning here) or "empty" (zero rows give an empty result).
    """

    function: str
    check: str
    ours: str
    why: str
    call: Callable[[], Any]

    def __str__(self) -> str:
        return f"{self.function}: {self.check}"


def x(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return (
        torch.linspace(-2, 3, max(1, torch.Size(shape).numel())).to(dtype)[: torch.Size(shape).numel()].reshape(shape)
    )


def w(size: int = D, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, size).to(dtype)


def chain(rows: int = R, dim: int = D, **changes: Any) -> Any:
    """The norms after attention: three weights."""
    given = {"x": x(rows, dim), "weight": w(dim), "residual": x(rows, dim), "weights": [w(dim)] * 3} | changes
    return rms_norm_chain(given.pop("x"), given.pop("weight"), given.pop("residual"), given.pop("weights"), **given)


def ending(rows: int = R, dim: int = D, **changes: Any) -> Any:
    """The norms at the end of a layer: one weight, a second residual, a scale."""
    return chain(rows, dim, **({"weights": [w(dim)], "residual2": x(rows, dim), "scale": w(1)} | changes))


def ending_from_experts(rows: int = R, dim: int = D, active: int = A, **changes: Any) -> Any:
    y, weights = changes.pop("y", x(rows, active, dim)), changes.pop("weights_of", x(rows, active))
    return ending(rows, dim, **({"x": combine(y, weights)} | changes))


def outs(count: int, *shape: int, dtype: torch.dtype = F32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=dtype) for _ in range(count))


NORM, TRIPLE, MUL = "dispatch_rms_norm", "dispatch_rms_norm_f32_triple", "dispatch_rms_norm_mul"
RECORD = "build_rms_norm_decode_record"
ATTN, FF = "dispatch_fused_post_attn_triple_norm_f32", "dispatch_fused_post_ff_norm2_endlayer_f32"
WSUM = "dispatch_fused_moe_wsum_post_ff_norm2_endlayer_f32_v2"
BARE = {BF16: "dispatch_rms_norm_no_scale_bf16", F32: "dispatch_rms_norm_no_scale_f32"}

EMPTY = "a batch may have no rows in it; the result has none either"
NO_MEAN = "the mean of no numbers is not a number"
OWN_SHAPE = "rows and dim are the tensor's own shape, so a count cannot disagree with them; leading axes are rows"
WIDENED = "values are widened to float32 as they are, so a weight may have any float dtype"
NARROW = "every float dtype has one meaning, so the op is not tied to one"
EXACT = "a larger buffer is a mistake in a tensor world: a view says which part is meant"
UNSEEN = "not checked by the original, which would read past the end"
UNSEEN_DTYPE = "not checked by the original, which would read its bits as floats"

RULES = [
    Rule(NORM, "rows == 0", "empty", EMPTY, lambda: rms_norm(x(0, D), w())),
    Rule(NORM, "dim == 0", "raises x", NO_MEAN, lambda: rms_norm(x(R, 0), w(0))),
    Rule(NORM, "input count != rows * dim", "accepts", OWN_SHAPE, lambda: rms_norm(x(2, 3, D), w())),
    Rule(NORM, "output count != rows * dim", "raises out", "as the original",
         lambda: rms_norm(x(R, D), w(), out=torch.zeros(R + 1, D))),
    Rule(NORM, "weight dtype != input dtype", "accepts", WIDENED, lambda: rms_norm(x(R, D, dtype=BF16), w())),
    Rule(NORM, "f16 input with the f32 weight that its kernel reads", "accepts",
         "the original refuses the only weight its f16 kernel can read", lambda: rms_norm(x(R, D, dtype=F16), w())),
    Rule(NORM, "output dtype != input dtype", "raises out", "as the original",
         lambda: rms_norm(x(R, D), w(), out=torch.zeros(R, D, dtype=BF16))),
    Rule(NORM, "dtype not f32, f16, bf16", "raises x", "as the original; float64 is taken, by the body alone",
         lambda: rms_norm(x(R, D).int(), w())),
    Rule(NORM, "dim % 4 != 0 leaves the float4 kernel", "accepts", "one kernel for every D",
         lambda: rms_norm(x(R, 7), w(7))),
    Rule(NORM, "tg_size < 32 is raised to 32", "accepts", "no launch size reaches the result",
         lambda: rms_norm(x(R, 4), w(4))),
    Rule(NORM, "weight count (unchecked)", "raises weight", UNSEEN, lambda: rms_norm(x(R, D), w(D - 1))),
    Rule(RECORD, "rows == 0 gives no record", "empty", EMPTY, lambda: rms_norm(x(0, D), w())),
    Rule(RECORD, "dim == 0 gives no record", "raises x", "an error, where the original's silence runs nothing",
         lambda: rms_norm(x(R, 0), w(0))),
    Rule(RECORD, "other dtype gives no record", "raises x", "an error, where the original's silence runs nothing",
         lambda: rms_norm(x(R, D).int(), w())),
    Rule(TRIPLE, "rows == 0", "empty", EMPTY, lambda: rms_norm_many(x(0, D), [w()] * 3)),
    Rule(TRIPLE, "dim == 0", "raises x", NO_MEAN, lambda: rms_norm_many(x(R, 0), [w(0)] * 3)),
    Rule(TRIPLE, "input count != rows * dim", "accepts", OWN_SHAPE, lambda: rms_norm_many(x(2, 3, D), [w()] * 3)),
    *(
        Rule(TRIPLE, f"output_{'abc'[i]} count != rows * dim", "raises out", "as the original",
             lambda i=i: rms_norm_many(x(R, D), [w()] * 3, out=tuple(torch.zeros(R + (j == i), D) for j in range(3))))
        for i in range(3)
    ),
    Rule(TRIPLE, "input dtype != f32", "accepts", NARROW, lambda: rms_norm_many(x(R, D, dtype=BF16), [w()] * 3)),
    *(
        Rule(TRIPLE, f"output_{'abc'[i]} dtype != f32", "raises out", "an output has the dtype of x",
             lambda i=i: rms_norm_many(x(R, D), [w()] * 3, out=tuple(
                 torch.zeros(R, D, dtype=BF16 if j == i else F32) for j in range(3))))
        for i in range(3)
    ),
    *(
        Rule(TRIPLE, f"weight_{'abc'[i]} count != dim", "raises weight", "as the original",
             lambda i=i: rms_norm_many(x(R, D), [w(D + (j == i)) for j in range(3)]))
        for i in range(3)
    ),
    *(
        Rule(TRIPLE, f"weight_{'abc'[i]} dtype != f32", "accepts", WIDENED,
             lambda i=i: rms_norm_many(x(R, D), [w(dtype=BF16 if j == i else F32) for j in range(3)]))
        for i in range(3)
    ),
    Rule(ATTN, "rows == 0", "empty", EMPTY, lambda: chain(rows=0)),
    Rule(ATTN, "dim == 0", "raises x", NO_MEAN, lambda: chain(dim=0)),
    Rule(ATTN, "hidden count < rows * dim", "raises residual", "as the original",
         lambda: chain(residual=x(R - 1, D))),
    Rule(ATTN, "hidden may be larger", "raises residual", EXACT, lambda: chain(residual=x(R + 1, D))),
    Rule(ATTN, "attn_out count < rows * dim", "raises residual", "x sets the shape, the residual is named",
         lambda: chain(x=x(R - 1, D))),
    Rule(ATTN, "attn_out may be larger", "raises residual", EXACT, lambda: chain(x=x(R + 1, D))),
    *(
        Rule(ATTN, f"{name} count < rows * dim", "raises out", "as the original",
             lambda i=i: chain(out=tuple(torch.zeros(R - (j == i), D) for j in range(4))))
        for i, name in enumerate(("residual_out", "output_a", "output_b", "output_c"))
    ),
    *(
        Rule(ATTN, f"{name} may be larger", "raises out", EXACT,
             lambda i=i: chain(out=tuple(torch.zeros(R + (j == i), D) for j in range(4))))
        for i, name in enumerate(("residual_out", "output_a", "output_b", "output_c"))
    ),
    Rule(ATTN, "hidden dtype != f32", "accepts", NARROW, lambda: chain(residual=x(R, D, dtype=BF16))),
    Rule(ATTN, "attn_out dtype != f32", "accepts", NARROW, lambda: chain(x=x(R, D, dtype=BF16))),
    *(
        Rule(ATTN, f"{name} dtype != f32", "raises out", "an output has the dtype of x",
             lambda i=i: chain(out=tuple(torch.zeros(R, D, dtype=BF16 if j == i else F32) for j in range(4))))
        for i, name in enumerate(("residual_out", "output_a", "output_b", "output_c"))
    ),
    Rule(ATTN, "post_attn_w count != dim", "raises weight", "as the original", lambda: chain(weight=w(D + 1))),
    *(
        Rule(ATTN, f"weight_{'abc'[i]} count != dim", "raises weight", "as the original",
             lambda i=i: chain(weights=[w(D + (j == i)) for j in range(3)]))
        for i in range(3)
    ),
    Rule(ATTN, "weight dtype (unchecked)", "raises weight", UNSEEN_DTYPE, lambda: chain(weight=w().int())),
    Rule(ATTN, "float4 kernel only with dim % 4 == 0", "accepts", "one kernel for every D", lambda: chain(dim=7)),
    Rule(ATTN, "float4 kernel with tg_size < 32 (unclamped)", "accepts", "no launch size reaches the result",
         lambda: chain(dim=16)),
    Rule(FF, "rows == 0", "empty", EMPTY, lambda: ending(rows=0)),
    Rule(FF, "dim == 0", "raises x", NO_MEAN, lambda: ending(dim=0)),
    Rule(FF, "attn_out count < rows * dim", "raises residual", "as the original",
         lambda: ending(residual=x(R - 1, D))),
    Rule(FF, "moe_accum count < rows * dim", "raises residual", "x sets the shape, the residual is named",
         lambda: ending(x=x(R - 1, D))),
    Rule(FF, "residual count < rows * dim", "raises residual2", "as the original",
         lambda: ending(residual2=x(R - 1, D))),
    Rule(FF, "mlp_down count < rows * dim", "raises out", "as the original",
         lambda: ending(out=(torch.zeros(R - 1, D), torch.zeros(R, D)))),
    Rule(FF, "hidden count < rows * dim", "raises out", "as the original",
         lambda: ending(out=(torch.zeros(R, D), torch.zeros(R - 1, D)))),
    Rule(FF, "activations may be larger", "raises residual2", EXACT, lambda: ending(residual2=x(R + 1, D))),
    Rule(FF, "attn_out dtype != f32", "accepts", NARROW, lambda: ending(residual=x(R, D, dtype=BF16))),
    Rule(FF, "moe_accum dtype != f32", "accepts", NARROW, lambda: ending(x=x(R, D, dtype=BF16))),
    Rule(FF, "residual dtype != f32", "accepts", NARROW, lambda: ending(residual2=x(R, D, dtype=F16))),
    Rule(FF, "mlp_down, hidden dtype != f32", "raises out", "an output has the dtype of x",
         lambda: ending(out=outs(2, R, D, dtype=BF16))),
    Rule(FF, "w2 count != dim", "raises weight", "as the original", lambda: ending(weight=w(D - 1))),
    Rule(FF, "w3 count != dim", "raises weight", "as the original", lambda: ending(weights=[w(D - 1)])),
    Rule(FF, "w2, w3 dtype (unchecked)", "raises weight", UNSEEN_DTYPE, lambda: ending(weights=[w().long()])),
    Rule(FF, "layer_scalar count < 1", "raises scale", "as the original", lambda: ending(scale=torch.zeros(0))),
    Rule(FF, "layer_scalar count < dim when a vector", "raises scale", "as the original; its size says which it is",
         lambda: ending(scale=w(D - 1))),
    Rule(FF, "layer_scalar may be larger", "raises scale", EXACT, lambda: ending(scale=w(D + 1))),
    Rule(FF, "layer_scalar dtype (unchecked)", "raises scale", UNSEEN_DTYPE, lambda: ending(scale=w(1).int())),
    Rule(FF, "float4 kernel only with dim % 4 == 0", "accepts", "one kernel for every D", lambda: ending(dim=7)),
    Rule(FF, "float4 kernel with tg_size < 32 (unclamped)", "accepts", "no launch size reaches the result",
         lambda: ending(dim=16)),
    Rule(WSUM, "rows == 0", "empty", EMPTY, lambda: ending_from_experts(rows=0)),
    Rule(WSUM, "dim == 0", "raises y", NO_MEAN, lambda: ending_from_experts(dim=0)),
    Rule(WSUM, "top_k == 0", "raises y", "a sum over no expert is a mistake", lambda: ending_from_experts(active=0)),
    Rule(WSUM, "dim % 4 != 0", "accepts", "one kernel for every D", lambda: ending_from_experts(dim=7)),
    Rule(WSUM, "attn_out count < rows * dim", "raises residual", "as the original",
         lambda: ending_from_experts(residual=x(R - 1, D))),
    Rule(WSUM, "residual count < rows * dim", "raises residual2", "as the original",
         lambda: ending_from_experts(residual2=x(R - 1, D))),
    Rule(WSUM, "mlp_down, hidden count < rows * dim", "raises out", "as the original",
         lambda: ending_from_experts(out=outs(2, R - 1, D))),
    Rule(WSUM, "activations dtype != f32", "accepts", NARROW,
         lambda: ending_from_experts(residual=x(R, D, dtype=BF16), residual2=x(R, D, dtype=BF16))),
    Rule(WSUM, "mlp_down, hidden dtype != f32", "raises out", "an output has the dtype of x",
         lambda: ending_from_experts(out=outs(2, R, D, dtype=BF16))),
    Rule(WSUM, "expert_outputs count < rows * top_k * dim", "raises weights", "y sets the shape, the weights are named",
         lambda: ending_from_experts(y=x(R, A - 1, D))),
    Rule(WSUM, "routing_weights count < rows * top_k", "raises weights", "as the original",
         lambda: ending_from_experts(weights_of=x(R, A - 1))),
    Rule(WSUM, "expert and routing dtypes (unchecked)", "raises weights", UNSEEN_DTYPE,
         lambda: ending_from_experts(weights_of=x(R, A).int())),
    Rule(WSUM, "w2 count != dim", "raises weight", "as the original", lambda: ending_from_experts(weight=w(D + 1))),
    Rule(WSUM, "w3 count != dim", "raises weight", "as the original", lambda: ending_from_experts(weights=[w(D + 1)])),
    Rule(WSUM, "layer_scalar count < 1", "raises scale", "as the original",
         lambda: ending_from_experts(scale=torch.zeros(0))),
    Rule(WSUM, "layer_scalar count < dim when a vector", "raises scale", "as the original",
         lambda: ending_from_experts(scale=w(D - 1))),
    *(
        rule
        for own, other in ((BF16, F32), (F32, BF16))
        for rule in (
            Rule(BARE[own], "rows == 0", "empty", EMPTY, lambda own=own: rms_norm(x(0, D, dtype=own))),
            Rule(BARE[own], "dim == 0", "raises x", NO_MEAN, lambda own=own: rms_norm(x(R, 0, dtype=own))),
            Rule(BARE[own], "input count != rows * dim", "accepts", OWN_SHAPE,
                 lambda own=own: rms_norm(x(2, 3, D, dtype=own))),
            Rule(BARE[own], "output count != rows * dim", "raises out", "as the original",
                 lambda own=own: rms_norm(x(R, D, dtype=own), out=torch.zeros(R - 1, D, dtype=own))),
            Rule(BARE[own], "input of another dtype", "accepts", NARROW,
                 lambda other=other: rms_norm(x(R, D, dtype=other))),
            Rule(BARE[own], "output of another dtype", "raises out", "an output has the dtype of x",
                 lambda own=own, other=other: rms_norm(x(R, D, dtype=own), out=torch.zeros(R, D, dtype=other))),
        )
    ),
    Rule(BARE[F32], "float4 kernel only with dim % 4 == 0", "accepts", "one kernel for every D",
         lambda: rms_norm(x(R, 7))),
    Rule(MUL, "rows == 0", "empty", EMPTY, lambda: rms_norm(x(0, D), w(), mul=x(0, D))),
    Rule(MUL, "dim == 0", "raises x", NO_MEAN, lambda: rms_norm(x(R, 0), w(0), mul=x(R, 0))),
    Rule(MUL, "input count != rows * dim", "accepts", OWN_SHAPE, lambda: rms_norm(x(2, 3, D), w(), mul=x(2, 3, D))),
    Rule(MUL, "norm_weight dtype != input dtype", "accepts", WIDENED,
         lambda: rms_norm(x(R, D, dtype=F16), w(), mul=x(R, D, dtype=F16))),
    Rule(MUL, "scale dtype != input dtype", "accepts", WIDENED,
         lambda: rms_norm(x(R, D), w(), mul=x(R, D, dtype=BF16))),
    Rule(MUL, "output dtype != input dtype", "raises out", "as the original",
         lambda: rms_norm(x(R, D), w(), mul=x(R, D), out=torch.zeros(R, D, dtype=F16))),
    Rule(MUL, "dtype not f32, f16, bf16", "raises x", "as the original",
         lambda: rms_norm(x(R, D).int(), w(), mul=x(R, D))),
    Rule(MUL, "scale count (unchecked)", "raises mul", UNSEEN, lambda: rms_norm(x(R, D), w(), mul=x(R - 1, D))),
    Rule(MUL, "weight count (unchecked)", "raises weight", UNSEEN, lambda: rms_norm(x(R, D), w(D + 1), mul=x(R, D))),
    Rule(MUL, "output count (unchecked)", "raises out", UNSEEN,
         lambda: rms_norm(x(R, D), w(), mul=x(R, D), out=torch.zeros(R, D + 1))),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_check_of_the_original_dispatch_layer(rule):
    verdict, _, argument = rule.ours.partition(" ")
    if verdict == "raises":
        op = "combine" if argument in ("y", "weights") else r"rms_norm(_many|_chain)?"
        with trace() as entries, pytest.raises(ValueError, match=rf"^{op}: {argument}\b"):
            rule.call()
        assert all(entry.op == "combine" for entry in entries) and (op != "combine" or entries == [])
        return
    result = rule.call()
    first = result[0] if isinstance(result, tuple) else result
    assert (first.numel() == 0) == (verdict == "empty")
    assert torch.isfinite(first.float()).all()
