"""What every op refuses: a ValueError that names the op and the argument, before any kernel runs."""

from __future__ import annotations

import re
from contextlib import contextmanager
from inspect import signature

import pytest
import torch
from valid_calls import Call, calls, ints

from halfbyte.ops.dispatch import trace
from halfbyte.ops.sampling import Sampling


@contextmanager
def refused(op: str, argument: str):
    with trace() as entries, pytest.raises(ValueError, match=rf"^{op}: .*\b{re.escape(argument)}\b"):
        yield
    assert entries == [], "a kernel was chosen before the arguments were checked"


OPS = calls()


def tensor_arguments(call: Call) -> list[str]:
    return [name for name, value in call.arguments.items() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("op", OPS)
def test_the_valid_call_is_valid(op):
    OPS[op]()


OTHERS = [(op, name) for op, call in OPS.items() for name in tensor_arguments(call) if name != call.first]


@pytest.mark.parametrize(("op", "argument"), [*OTHERS, ("qmm", "w"), ("embed", "w")])
def test_tensors_on_another_device_are_refused(op, argument):
    with refused(op, argument):
        OPS[op](**{argument: OPS[op].arguments[argument].to("meta")})


@pytest.mark.parametrize(
    ("op", "argument"), [(op, name) for op, call in OPS.items() for name in tensor_arguments(call)]
)
def test_tensors_of_another_kind_are_refused(op, argument):
    """Integers for floats, floats for integers."""
    given = OPS[op].arguments[argument]
    with refused(op, argument):
        OPS[op](**{argument: given.long() if given.is_floating_point() else given.float()})


@pytest.mark.parametrize(
    ("op", "argument"), [(op, name) for op, call in OPS.items() for name in tensor_arguments(call)]
)
def test_what_is_no_tensor_is_refused(op, argument):
    with refused(op, argument):
        OPS[op](**{argument: "a string"})


def z(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


BUCKET = {
    "y": z(2, 20),
    "weights": z(2),
    "residual": z(4, 20),
    "tokens": ints(3, 1),
    "shared": None,
    "shared_gate": None,
}
REFUSALS = {
    "rms_norm": [
        ("x", {"x": z(3, 0)}),
        ("weight", {"weight": z(19)}),
        ("weight", {"weight": z(1, 20)}),
        ("eps", {"eps": -1e-6}),
        ("add", {"add": z(2, 20)}),
        ("mul", {"mul": z(20)}),
        ("gate", {"gate": z(3, 1)}),
        ("residual", {"residual": z(20, 3)}),
        ("scale", {"scale": z(3)}),
        ("extra_dtype", {"extra_dtype": torch.int32}),
        ("x", {"head_major": True}),
    ],
    "rms_norm_many": [
        ("weights", {"weights": []}),
        ("weight", {"weights": [z(20), z(21)]}),
        ("x", {"x": z(2, 0), "weights": [z(0)]}),
        ("weight", {"weights": [z(20).to("meta")]}),
        ("weight", {"weights": [z(20).int()]}),
    ],
    "rms_norm_chain": [
        ("weight", {"weight": z(19)}),
        ("weights", {"weights": []}),
        ("weight", {"weights": [z(1)]}),
        ("residual", {"residual": z(20)}),
        ("residual2", {"residual2": z(4, 20)}),
        ("scale", {"scale": z(2)}),
        ("eps", {"eps": -1.0}),
        ("x", {"x": z(3, 0), "weight": z(0)}),
    ],
    "glu": [("gate", {"gate": z(3, 21)}), ("activation", {"activation": "relu"})],
    "rope": [
        ("x", {"x": z(2, 8)}),
        ("x", {"x": z(3, 2, 0)}),
        ("rotary", {"rotary": 0}),
        ("rotary", {"rotary": 5}),
        ("rotary", {"rotary": 10}),
        ("inv_freq", {"inv_freq": z(4)}),
        ("inv_freq", {"inv_freq": z(3).bfloat16()}),
        ("positions", {"positions": ints(1, 2)}),
    ],
    "softcap": [("cap", {"cap": 0.0}), ("cap", {"cap": -1.0})],
    "quantize": [
        ("bits", {"bits": 7}),
        ("bits", {"bits": 1}),
        ("group", {"group": 48}),
        ("mode", {"mode": "int4"}),
        ("w", {"w": z(3, 40)}),
        ("w", {"w": z(3, 0)}),
        ("w", {"w": z(64)}),
        ("w", {"w": z(1, 64) / 0}),
        ("global_scale", {"global_scale": 1.0}),
        ("bits and group", {"mode": "mxfp4", "bits": 8}),
    ],
    "dequantize": [("p", {"p": z(3, 64)}), ("dtype", {"dtype": torch.int32})],
    "qmm": [
        ("x", {"x": z(3, 63)}),
        ("x", {"x": z(3, 5)}),
        ("x", {"transpose": False}),
        ("w", {"w": z(64)}),
        ("w", {"w": z(5, 0), "x": z(3, 0)}),
        ("x", {"w": z(2, 5, 64)}),
        ("w", {"w": z(5, 64).int()}),
        ("w", {"w": [1.0]}),
    ],
    "expert_qmm": [
        ("x", {"x": z(3, 63)}),
        ("x", {"x": z(2, 64)}),
        ("x", {"x": z(3, 3, 64)}),
        ("ids", {"ids": ints(1, 2, 3)}),
        ("ids", {"ids": torch.zeros(3, 0, dtype=torch.int32)}),
        ("ids", {"ids": torch.full((3, 2), 6)}),
        ("ids", {"ids": torch.full((3, 2), -1)}),
        ("w", {"w": z(32, 64)}),
        ("w", {"w": z(6, 32, 64).int()}),
        ("w", {"w": z(6, 32, 0), "x": z(3, 0)}),
        ("w", {"w": z(6, 32, 64).to("meta")}),
    ],
    "expert_mlp": [
        ("x", {"x": z(3, 63)}),
        ("x", {"x": z(2, 64)}),
        ("ids", {"ids": ints(1, 2, 3)}),
        ("ids", {"ids": torch.zeros(3, 0, dtype=torch.int32)}),
        ("ids", {"ids": torch.full((3, 2), 6)}),
        ("ids", {"ids": torch.full((3, 2), -1)}),
        ("experts", {"experts": z(6, 32, 64)}),
        ("activation", {"activation": "relu"}),
    ],
    "embed": [
        ("ids", {"ids": ints(0, 5)}),
        ("ids", {"ids": ints(-1)}),
        ("w", {"w": z(2, 5, 64)}),
        ("w", {"w": z(5, 64).int()}),
        ("dtype", {"dtype": torch.int32}),
    ],
    "route": [
        ("k", {"k": 0}),
        ("k", {"k": 13, "groups": None, "keep_groups": None}),
        ("k", {"k": 7}),
        ("k", {"k": 2.0}),
        ("logits", {"logits": z(3, 0)}),
        ("bias", {"bias": z(11)}),
        ("per_expert_scale", {"per_expert_scale": z(1, 12)}),
        ("groups", {"groups": 5}),
        ("groups", {"groups": 0}),
        ("keep_groups", {"keep_groups": 0}),
        ("keep_groups", {"keep_groups": 5}),
        ("groups", {"keep_groups": None}),
        ("kind", {"kind": "relu"}),
        ("order", {"order": "random"}),
        ("order", {"order": "slot"}),
    ],
    "combine": [
        ("y", {"y": z(3, 0, 20), "weights": z(3, 0)}),
        ("y", {"y": z(3, 2, 0)}),
        ("y", {"y": z(20)}),
        ("weights", {"weights": z(3, 3)}),
        ("residual", {"residual": z(2, 20)}),
        ("shared", {"shared": z(3, 21)}),
        ("shared_gate", {"shared_gate": z(3, 20)}),
        ("shared_gate", {"shared": None}),
        ("shared", {**BUCKET, "shared": z(4, 20)}),
        ("residual", {**BUCKET, "residual": None}),
        ("tokens", {**BUCKET, "tokens": ints(0, 4)}),
        ("tokens", {**BUCKET, "tokens": ints(-1, 0)}),
        ("tokens", {**BUCKET, "tokens": z(2)}),
        ("tokens", {**BUCKET, "tokens": ints(0, 1).to("meta")}),
        ("weights", {**BUCKET, "weights": z(2, 1)}),
        ("residual", {**BUCKET, "residual": z(4, 19)}),
        ("y", {**BUCKET, "y": z(3, 20)}),
        ("y", {**BUCKET, "y": z(2, 0)}),
    ],
    "attention": [
        ("q", {"q": z(2, 2, 8)}),
        ("q", {"q": z(2, 2, 4, 0)}),
        ("q", {"q": z(2, 2, 4, 513)}),
        ("q", {"q": z(2, 2, 3, 8)}),
        ("q", {"q": z(2, 2, 0, 8)}),
        ("k", {"k": z(3, 6, 2, 9)}),
        ("k", {"k": z(3, 0, 2, 8)}),
        ("v", {"v": z(3, 5, 2, 10)}),
        ("v", {"v": z(3, 6, 2, 0)}),
        ("window", {"window": 0}),
        ("softcap", {"softcap": 0.0}),
        ("lengths", {"lengths": ints(5)}),
        ("lengths", {"lengths": ints(7, 4)}),
        ("lengths", {"lengths": ints(-1, 4)}),
        ("lengths", {"lengths": ints(9, 4), "window": 6}),
        ("slots", {"slots": ints(3, 0)}),
        ("slots", {"slots": ints(-1, 0)}),
        ("slots", {"slots": ints(1)}),
        ("slots", {"slots": None, "k": z(1, 6, 2, 8), "v": z(1, 6, 2, 10)}),
    ],
    "latent_attention": [
        ("q", {"q": z(2, 2, 8)}),
        ("q", {"q": z(2, 2, 4, 0)}),
        ("q_pe", {"q_pe": z(2, 2, 3, 6)}),
        ("q_pe", {"q_pe": z(2, 2, 4, 0)}),
        ("latent", {"latent": z(3, 6, 7)}),
        ("latent", {"latent": z(3, 0, 8)}),
        ("k_pe", {"k_pe": z(3, 6, 5)}),
        ("k_pe", {"k_pe": z(3, 5, 6)}),
        ("lengths", {"lengths": ints(7, 4)}),
        ("lengths", {"lengths": ints(-1, 4)}),
        ("slots", {"slots": ints(3, 0)}),
    ],
    "merge_states": [
        ("o1", {"o1": z(3, 0), "o2": z(3, 0)}),
        ("o2", {"o2": z(3, 19)}),
        ("lse1", {"lse1": z(2)}),
        ("lse2", {"lse2": z(3, 20)}),
        ("lse1", {"lse1": z(3).bfloat16()}),
    ],
    "append": [
        ("cache", {"cache": z(3)}),
        ("new", {"new": z(2, 2, 2, 5)}),
        ("new", {"new": z(2, 2, 2)}),
        ("slots", {"slots": ints(2, 2)}),
        ("slots", {"slots": ints(2, 3)}),
        ("slots", {"slots": ints(-1, 0)}),
        ("slots", {"slots": ints(2)}),
        ("lengths", {"lengths": ints(7, 3)}),
        ("lengths", {"lengths": ints(1, 3)}),
        ("lengths", {"lengths": ints(6)}),
        ("new", {"new": z(2, 7, 2, 4), "lengths": None}),
        ("lengths", {"lengths": ints(1, 3), "ring": True}),
    ],
    "causal_conv": [
        ("x", {"x": z(2, 7)}),
        ("x", {"x": z(2, 3, 0)}),
        ("weight", {"weight": z(8, 4)}),
        ("weight", {"weight": z(7, 1)}),
        ("weight", {"weight": z(7, 4, 2)}),
        ("state", {"state": z(3, 4, 7)}),
        ("state", {"state": z(3, 3, 8)}),
        ("activation", {"activation": "relu"}),
        ("slots", {"slots": ints(2, 2)}),
        ("slots", {"slots": ints(0, 3)}),
        ("slots", {"slots": None, "state": z(1, 3, 7)}),
    ],
    "delta_gates": [
        ("a", {"a": z(3, 0), "b": z(3, 0)}),
        ("b", {"b": z(3, 4)}),
        ("a_log", {"a_log": z(4)}),
        ("dt_bias", {"dt_bias": z(3, 5)}),
    ],
    "gated_delta": [
        ("q", {"q": z(2, 3, 6)}),
        ("q", {"q": z(2, 3, 2, 0), "k": z(2, 3, 2, 0)}),
        ("q", {"q": z(2, 3, 0, 6), "k": z(2, 3, 0, 6)}),
        ("k", {"k": z(2, 3, 2, 5)}),
        ("v", {"v": z(2, 3, 3, 5)}),
        ("v", {"v": z(2, 2, 4, 5)}),
        ("v", {"v": z(2, 3, 4, 0)}),
        ("g", {"g": z(2, 3, 2)}),
        ("beta", {"beta": z(2, 3, 4, 1)}),
        ("state", {"state": z(3, 4, 6, 5)}),
        ("state", {"state": z(3, 4, 5, 6).bfloat16()}),
        ("form", {"form": "parallel"}),
        ("slots", {"slots": ints(2, 2)}),
        ("slots", {"slots": ints(-1, 0)}),
        ("slots", {"slots": None, "state": z(1, 4, 5, 6)}),
        ("out", {"in_place": False, "out": z(2, 3, 4, 5)}),
        ("out", {"out": (z(2, 3, 4, 5), z(2, 4, 5, 6))}),
    ],
    "sample": [
        ("logits", {"logits": z(12)}),
        ("logits", {"logits": z(3, 0)}),
        ("params", {"params": {}}),
        ("seeds", {"seeds": ints(1, 2, 3)}),
        ("seeds", {"seeds": ints(1).long()}),
        ("positions", {"positions": ints(1)}),
        *(
            (
                name,
                {
                    "params": Sampling(
                        **{name: torch.tensor([1.0, bad, 1.0])}, counts=None if name[0] in "tm" else z(3, 12).int()
                    )
                },
            )
            for name, bads in {
                "temperature": (-1.0, torch.inf),
                "top_p": (0.0, 1.5),
                "min_p": (-0.1, 1.1),
                "repetition": (0.0, torch.nan),
                "presence": (torch.inf,),
                "frequency": (torch.nan,),
            }.items()
            for bad in bads
        ),
        ("top_k", {"params": Sampling(top_k=ints(1, -1, 1))}),
        ("top_k", {"params": Sampling(top_k=z(3))}),
        ("temperature", {"params": Sampling(temperature=z(2))}),
        ("temperature", {"params": Sampling(temperature=z(3).to("meta"))}),
        ("counts", {"params": Sampling(presence=z(3))}),
        ("counts", {"params": Sampling(counts=z(3, 11).int())}),
    ],
}


def test_every_op_has_refusals():
    assert set(REFUSALS) == set(OPS)


@pytest.mark.parametrize(
    ("op", "argument", "changes"),
    [(op, argument, changes) for op, rows in REFUSALS.items() for argument, changes in rows],
)
def test_bad_arguments_are_refused(op, argument, changes):
    with refused(op, argument):
        OPS[op](**changes)


@pytest.mark.parametrize("op", [op for op, call in OPS.items() if "out" in signature(call.op).parameters])
def test_a_bad_out_is_refused(op):
    result = OPS[op]()
    several = isinstance(result, tuple)
    good = list(result) if several else [result]
    for i, tensor in enumerate(good):
        wrong = torch.float16 if tensor.dtype != torch.float16 else torch.float32
        for bad in (tensor[:-1].clone(), tensor[..., None].clone(), tensor.to(wrong), tensor.to("meta"), "a string"):
            outs = [*good[:i], bad, *good[i + 1 :]]
            with refused(op, "out"):
                OPS[op](out=tuple(outs) if several else bad)
    if several:
        for bad in (tuple(good[:-1]), good[0]):
            with refused(op, "out"):
                OPS[op](out=bad)
