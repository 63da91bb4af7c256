"""A row's bits never depend on the batch it is computed in, or on the slot it lives in: every op, bit for bit.

Batches are large enough for the parallel paths, single rows small enough for the serial ones. That the bits do not
depend on how a prompt is cut into chunks is tested with attention and the recurrent ops.
"""

from importlib import import_module

import pytest
import torch

from halfbyte import listing
from halfbyte.cases.case import Random
from halfbyte.check import clone, tensors
from halfbyte.ops.experts import Experts
from halfbyte.ops.quant import Packed, quantize
from halfbyte.ops.sampling import Sampling

ROWS = 70
R = Random(11)


def n(*shape, **options):
    return R.normal(*shape, **options)


def u(*shape):
    return torch.rand(shape, generator=R.generator)


def ids(high, *shape):
    return R.integers(0, high, *shape)


def stack(*shape, bits=4):
    return quantize(n(*shape, dtype=torch.bfloat16), bits, 32)


SLOTS = torch.randperm(ROWS, generator=R.generator).int()

# op: (arguments with one entry a row, arguments shared by the rows, shared arguments that hold one entry a slot)
CALLS = {
    "rms_norm": ({"x": n(ROWS, 333), "add": n(ROWS, 333), "gate": n(ROWS, 333)}, {"weight": n(333)}, {}),
    "rms_norm_many": ({"x": n(ROWS, 333)}, {"weights": [n(333), n(333)]}, {}),
    "rms_norm_chain": (
        {"x": n(ROWS, 333), "residual": n(ROWS, 333), "residual2": n(ROWS, 333)},
        {"weight": n(333), "weights": [n(333)], "scale": 0.3},
        {},
    ),
    "glu": ({"gate": n(ROWS, 333), "up": n(ROWS, 333)}, {}, {}),
    "rope": (
        {"x": n(ROWS, 7, 40), "positions": ids(9999, ROWS)},
        {"inv_freq": 100.0 ** -torch.arange(20).double().div(20)},
        {},
    ),
    "softcap": ({"x": n(ROWS, 333)}, {"cap": 3.0}, {}),
    "quantize": ({"w": n(ROWS, 320)}, {"bits": 5, "group": 64}, {}),
    "dequantize": ({"p": stack(ROWS, 320, bits=3)}, {}, {}),
    "qmm": ({"x": n(ROWS, 320)}, {"w": stack(99, 320)}, {}),
    "embed": ({"ids": ids(50, ROWS)}, {"w": stack(50, 320)}, {}),
    "route": ({"logits": n(ROWS, 300)}, {"k": 5}, {}),
    "combine": ({"y": n(ROWS, 5, 300), "weights": n(ROWS, 5), "residual": n(ROWS, 300)}, {}, {}),
    "expert_qmm": ({"x": n(ROWS, 128), "ids": ids(9, ROWS, 3)}, {"w": stack(9, 40, 128)}, {}),
    "expert_mlp": (
        {"x": n(ROWS, 128), "ids": ids(9, ROWS, 3)},
        {"experts": Experts(stack(9, 64, 128), stack(9, 64, 128), stack(9, 128, 64))},
        {},
    ),
    "attention": (
        {"q": n(ROWS, 3, 4, 24), "slots": SLOTS, "lengths": 3 + ids(290, ROWS)},
        {"scale": 0.2, "window": 200},
        {"k": n(ROWS, 300, 2, 24), "v": n(ROWS, 300, 2, 24)},
    ),
    "latent_attention": (
        {"q": n(ROWS, 2, 5, 48), "q_pe": n(ROWS, 2, 5, 8), "slots": SLOTS, "lengths": 2 + ids(290, ROWS)},
        {"scale": 0.2},
        {"latent": n(ROWS, 300, 48), "k_pe": n(ROWS, 300, 8)},
    ),
    "merge_states": (
        {"o1": n(ROWS, 300), "lse1": n(ROWS), "o2": n(ROWS, 300), "lse2": n(ROWS)},
        {},
        {},
    ),
    "append": (
        {"new": n(ROWS, 3, 50), "slots": SLOTS, "lengths": 3 + ids(90, ROWS)},
        {"ring": True},
        {"cache": n(ROWS, 40, 50)},
    ),
    "causal_conv": (
        {"x": n(ROWS, 5, 77), "slots": SLOTS},
        {"weight": n(77, 4)},
        {"state": n(ROWS, 3, 77)},
    ),
    "delta_gates": ({"a": n(ROWS, 33), "b": n(ROWS, 33)}, {"a_log": n(33), "dt_bias": n(33)}, {}),
    "gated_delta": (
        {
            "q": n(ROWS, 5, 2, 32),
            "k": n(ROWS, 5, 2, 32, scale=0.1),
            "v": n(ROWS, 5, 4, 24),
            "g": u(ROWS, 5, 4),
            "beta": u(ROWS, 5, 4),
            "slots": SLOTS,
        },
        {},
        {"state": n(ROWS, 4, 24, 32)},
    ),
    "sample": (
        {
            "logits": n(ROWS, 3000),
            "params": Sampling(temperature=0.1 + u(ROWS), top_k=ids(50, ROWS), top_p=0.5 + u(ROWS) / 2),
            "seeds": ids(10**6, ROWS).long(),
            "positions": ids(9999, ROWS),
        },
        {},
        {},
    ),
}


def rows_of(value, chosen):
    """Some rows of an argument."""
    if isinstance(value, Packed):
        return Packed(value.words[chosen], value.scales[chosen], value.biases[chosen], value.bits, value.group)
    if isinstance(value, Sampling):
        return Sampling(*(None if field is None else field[chosen] for field in value))
    return value[chosen]


def run(name, chosen, order=None):
    """The op on some of its rows, with slots renumbered by `order`: its results and what it left in the slots."""
    batched, shared, slotted = CALLS[name]
    op = next(o for o in listing.ops() if o.name == name)
    given = {key: rows_of(value, chosen) for key, value in batched.items()}
    held = clone(slotted)
    if order is not None and "slots" in given:
        given["slots"] = order[given["slots"].long()].int()
        for key, value in slotted.items():
            held[key] = torch.empty_like(value)
            held[key][order] = value
    results = list(tensors(getattr(import_module(f"halfbyte.ops.{op.family}"), name)(**given, **shared, **held)))
    if name == "append":
        results = []  # it returns the cache itself
    return results + [value[given["slots"].long()] for value in held.values()]


def test_every_op_is_here():
    assert set(CALLS) == {op.name for op in listing.ops()}


@pytest.mark.parametrize("name", CALLS)
def test_rows_alone_equal_rows_in_a_batch(name):
    whole = run(name, slice(None))
    for chosen in (slice(0, 1), slice(37, 38), slice(ROWS - 1, ROWS), slice(20, 41)):
        for part, all_of_it in zip(run(name, chosen), whole, strict=True):
            assert torch.equal(part, all_of_it[chosen])


@pytest.mark.parametrize("name", [name for name, (_, _, slotted) in CALLS.items() if slotted])
def test_another_slot_gives_the_same_bits(name):
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    for part, other in zip(run(name, slice(None)), run(name, slice(None), order), strict=True):
        assert torch.equal(part, other)
