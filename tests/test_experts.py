"""Experts: the three ways their weights may lie give the same bits, and nothing depends on who else is in the batch."""

import copy

import pytest
import torch
from numba import get_num_threads, set_num_threads

from halfbyte.cases.case import Random
from halfbyte.cases.experts import FORMS
from halfbyte.cases.quant import affine
from halfbyte.ops.experts import Experts, Scattered, expert_mlp, expert_qmm
from halfbyte.ops.quant import dequantize, qmm, quantize
from halfbyte.ops.rowwise import glu


def experts(E=6, I=64, H=128, form="stacked"):  # noqa: E741
    random = Random(5)
    return Experts(*(FORMS[form](random, affine(), *shape) for shape in ((E, I, H), (E, I, H), (E, H, I))))


@pytest.mark.parametrize("form", ["one-buffer", "separate"])
def test_where_experts_lie_does_not_change_a_bit(form):
    x, ids = torch.randn(5, 128), torch.tensor([[0, 5], [5, 3], [1, 2], [3, 0], [4, 5]])
    assert torch.equal(expert_mlp(x, ids, experts(form=form)), expert_mlp(x, ids, experts()))
    assert torch.equal(expert_qmm(x, ids, experts(form=form).up), expert_qmm(x, ids, experts().up))


def test_a_token_does_not_see_its_batch():
    torch.manual_seed(0)
    e, x, ids = experts(), torch.randn(23, 128), torch.stack([torch.randperm(6)[:3] for _ in range(23)])
    whole = expert_mlp(x, ids, e)
    assert torch.equal(torch.cat([expert_mlp(x[t : t + 1], ids[t : t + 1], e) for t in range(23)]), whole)
    assert torch.equal(expert_mlp(x, ids.flip(1), e), whole.flip(1))
    own = x[:, None].expand(23, 3, 128)
    assert torch.equal(expert_mlp(own, ids, e), whole)


@pytest.mark.parametrize(("inner", "hidden"), [(64, 256), (256, 64), (192, 320)])
def test_an_expert_on_one_thread_has_the_bits_of_single_tokens(inner, hidden):
    """Sixteen experts, some chosen by several tokens: each is one thread's, however many there are."""
    torch.manual_seed(0)
    e, x = experts(16, inner, hidden), torch.randn(40, hidden)
    ids = torch.stack([torch.randperm(16)[:3] for _ in range(40)])
    x[7, 3] = torch.inf
    single = torch.cat([expert_mlp(x[t : t + 1], ids[t : t + 1], e) for t in range(40)])
    before = get_num_threads()
    try:
        for count in (1, before):
            set_num_threads(count)
            together = expert_mlp(x, ids, e)
            assert torch.equal(together.view(torch.int32), single.view(torch.int32))
    finally:
        set_num_threads(before)


def test_one_expert_is_an_ordinary_network():
    e, x = experts(E=1), torch.randn(4, 128)
    gate, up, down = (dequantize(w)[0] for w in (e.gate, e.up, e.down))
    plain = qmm(glu(qmm(x, gate), qmm(x, up)), down)
    assert torch.allclose(expert_mlp(x, torch.zeros(4, 1, dtype=torch.int32), e)[:, 0], plain, rtol=1e-4, atol=1e-3)


def test_any_number_of_choices_and_repeated_ones():
    """The originals bind eight experts and reuse the last beyond that."""
    e, x = experts(E=20), torch.randn(2, 128)
    ids = torch.tensor([list(range(17)), [3] * 17])
    y = expert_mlp(x, ids, e)
    each = torch.cat([expert_mlp(x, ids[:, a : a + 1], e) for a in range(17)], 1)
    assert torch.equal(y, each)
    assert (y[1] == y[1, 0]).all()


def test_no_weight_is_copied():
    blobs = [torch.randint(0, 255, (5000,), dtype=torch.uint8) for _ in range(3)]
    w = Scattered.at_bytes(blobs, [3, 3000, 4001], (8, 64), 4, 64)
    for index, blob in enumerate(blobs):
        assert [int(a) - blob.data_ptr() for a in w.addresses[:, index]] == [3, 3000, 4001]


def test_a_copy_has_addresses_of_its_own():
    w = experts(form="separate").gate
    assert (copy.deepcopy(w).addresses != w.addresses).all()
    assert (copy.deepcopy(w).addresses != w.addresses).all()  # also once the first has been asked for its own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([[6, 0]])}, r"expert_mlp: ids must be in \[0, 6\)"),
        ({"ids": torch.tensor([[-1, 0]])}, r"expert_mlp: ids must be in \[0, 6\)"),
        ({"ids": torch.zeros(1, 0, dtype=torch.int32)}, "expert_mlp: ids must be"),
        ({"ids": torch.zeros(1, 2)}, "expert_mlp: ids must be int32 or int64"),
        ({"x": torch.randn(1, 64)}, "expert_mlp: x must be"),
        ({"activation": "relu"}, "expert_mlp: activation must be one of"),
        ({"experts": None}, "expert_mlp: experts must be an Experts"),
    ],
)
def test_bad_arguments_are_named(change, message):
    good = {"x": torch.randn(1, 128), "ids": torch.tensor([[0, 1]]), "experts": experts(), "activation": "silu"}
    with pytest.raises(ValueError, match=message):
        expert_mlp(**(good | change))


def test_buffers_must_hold_what_they_promise():
    with pytest.raises(ValueError, match="Scattered: offsets must be inside a buffer of 100 bytes"):
        Scattered.at_bytes([torch.zeros(100, dtype=torch.uint8)], [0, 64, 90], (8, 64), 4, 64)
    w = quantize(torch.randn(4, 8, 64))
    with pytest.raises(ValueError, match=r"Experts: down must be \[E, H, I\]"):
        Experts(w, w, w)
