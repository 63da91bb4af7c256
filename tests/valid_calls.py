"""One small valid call of every op, with its optional tensors given: what contract and property tests change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.cases import Random
from halfbyte.check import clone
from halfbyte.ops.attention import attention, latent_attention, merge_states
from halfbyte.ops.cache import append
from halfbyte.ops.experts import Experts, expert_mlp, expert_qmm
from halfbyte.ops.quant import dequantize, embed, qmm, quantize
from halfbyte.ops.recurrent import causal_conv, delta_gates, gated_delta
from halfbyte.ops.routing import combine, route
from halfbyte.ops.rowwise import glu, rms_norm, rms_norm_chain, rms_norm_many, rope, softcap
from halfbyte.ops.sampling import Sampling, sample


class Call(NamedTuple):
    """`first` is the argument that sets device and dtype for the others; `mutates` those that the op changes."""

    op: Callable[..., Any]
    arguments: dict[str, Any]
    first: str
    mutates: tuple[str, ...] = ()

    def __call__(self, **changes: Any) -> Any:
        """A run on copies, so that what one call changes is not there for the next."""
        return self.op(**clone({k: v for k, v in self.arguments.items() if k not in changes}), **changes)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def calls(dtype: torch.dtype = torch.float32) -> dict[str, Call]:
    r = Random(7)

    def n(*shape: int) -> Tensor:
        return r.normal(*shape, dtype=dtype)

    D, w = 20, r.normal(20)
    packed = quantize(r.normal(5, 64, dtype=torch.bfloat16), 4, 32)
    stack, down = (quantize(r.normal(*shape, dtype=torch.bfloat16), 4, 32) for shape in ((6, 32, 64), (6, 64, 32)))
    chosen = torch.stack([ints(5, 0), ints(1, 5), ints(5, 2)])
    made = [
        Call(
            rms_norm,
            {
                "x": n(3, D),
                "weight": w,
                "add": n(3, D),
                "mul": n(3, D),
                "gate": n(3, D),
                "residual": n(3, D),
                "scale": w,
            },
            "x",
        ),
        Call(rms_norm_many, {"x": n(3, D), "weights": [w, r.normal(D)]}, "x"),
        Call(
            rms_norm_chain,
            {"x": n(3, D), "weight": w, "residual": n(3, D), "weights": [w], "residual2": n(3, D), "scale": w},
            "x",
        ),
        Call(glu, {"gate": n(3, D), "up": n(3, D)}, "up"),
        Call(rope, {"x": n(3, 2, 8), "positions": ints(5, 6, 7), "inv_freq": torch.rand(3).double(), "rotary": 6}, "x"),
        Call(softcap, {"x": n(3, D), "cap": 3.0}, "x"),
        Call(quantize, {"w": n(3, 64), "bits": 4, "group": 32}, "w"),
        Call(dequantize, {"p": packed}, "p"),
        Call(qmm, {"x": n(3, 64), "w": packed}, "x"),
        Call(expert_qmm, {"x": n(3, 64), "ids": chosen, "w": stack}, "x"),
        Call(expert_mlp, {"x": n(3, 64), "ids": chosen, "experts": Experts(stack, stack, down)}, "x"),
        Call(embed, {"ids": ints(4, 0, 4), "w": packed}, "ids"),
        Call(
            route,
            {
                "logits": n(3, 12),
                "k": 4,
                "bias": r.normal(12),
                "groups": 4,
                "keep_groups": 2,
                "per_expert_scale": r.normal(12),
            },
            "logits",
        ),
        Call(
            combine,
            {"y": n(3, 2, D), "weights": n(3, 2), "residual": n(3, D), "shared": n(3, D), "shared_gate": n(3)},
            "y",
        ),
        Call(
            attention,
            {
                "q": n(2, 2, 4, 8),
                "k": n(3, 6, 2, 8),
                "v": n(3, 6, 2, 10),
                "scale": 0.3,
                "lengths": ints(5, 4),
                "slots": ints(2, 0),
            },
            "q",
        ),
        Call(
            latent_attention,
            {
                "q": n(2, 2, 4, 8),
                "q_pe": n(2, 2, 4, 6),
                "latent": n(3, 6, 8),
                "k_pe": n(3, 6, 6),
                "scale": 0.3,
                "lengths": ints(5, 4),
                "slots": ints(2, 0),
            },
            "q",
        ),
        Call(merge_states, {"o1": n(3, D), "lse1": r.normal(3), "o2": n(3, D), "lse2": r.normal(3)}, "o1"),
        Call(
            append,
            {"cache": n(3, 6, 2, 4), "new": n(2, 2, 2, 4), "slots": ints(2, 0), "lengths": ints(6, 3)},
            "cache",
            ("cache",),
        ),
        Call(
            causal_conv,
            {"x": n(2, 3, 7), "weight": r.normal(7, 4), "state": n(3, 3, 7), "slots": ints(2, 0)},
            "x",
            ("state",),
        ),
        Call(delta_gates, {"a": n(3, 5), "b": n(3, 5), "a_log": r.normal(5), "dt_bias": r.normal(5)}, "a"),
        Call(
            gated_delta,
            {
                "q": n(2, 3, 2, 6),
                "k": n(2, 3, 2, 6) * 0.3,
                "v": n(2, 3, 4, 5),
                "g": r.normal(2, 3, 4).sigmoid(),
                "beta": r.normal(2, 3, 4).sigmoid(),
                "state": r.normal(3, 4, 5, 6),
                "slots": ints(2, 0),
            },
            "q",
            ("state",),
        ),
        Call(
            sample,
            {
                "logits": n(3, 12),
                "params": Sampling(temperature=torch.ones(3), top_k=ints(5, 0, 3)),
                "seeds": ints(3, 4, 5).long(),
                "positions": ints(0, 1, 9),
            },
            "logits",
        ),
    ]
    return {call.op.__name__: call for call in made}
