"""Slots for experts: kernels do what the bodies say, and a slot has the expert that it is said to have."""

import pytest
import torch

from halfbyte.ops.dispatch import reference, trace, using
from halfbyte.slots import State, assign_slots, fill_slots


def choices(steps, T, A, E, seed=0):
    """Some experts are chosen more often than others, as in a model."""
    random = torch.Generator().manual_seed(seed)
    likely = torch.rand(E, generator=random) ** 3
    for _ in range(steps):
        yield torch.stack([torch.multinomial(likely, A, generator=random) for _ in range(T)]).int()


class Layer:
    """Experts of odd sizes and slots for some, both ways of going on from the same state."""

    def __init__(self, E, slots):
        self.sources = [torch.randint(0, 99, (E, 3, 5), dtype=torch.int32), torch.randn(E, 7, 2).half()]
        self.targets = [source[:slots].clone() for source in self.sources]
        self.state = State.new(E, slots, torch.device("cpu"))

    def step(self, ids, limit=None):
        slots, loads = assign_slots(ids, self.state, limit=limit)
        fill_slots(loads, self.sources, self.targets)
        return slots, loads


@pytest.mark.parametrize(("T", "A", "E", "slots"), [(1, 4, 16, 4), (1, 3, 37, 9), (3, 2, 20, 6), (2, 8, 40, 17)])
def test_kernels_do_what_the_bodies_say(T, A, E, slots):
    body, kernel = Layer(E, slots), Layer(E, slots)
    kernel.sources = body.sources
    kernel.targets = [target.clone() for target in body.targets]
    for turn, ids in enumerate(choices(30, T, A, E)):
        for limit in (2, None) if turn % 2 else (None,):
            with reference():
                expected = body.step(ids, limit)
            with using("triton"), trace() as entries:
                found = kernel.step(ids, limit)
            assert {entry.op for entry in entries if entry.kernel} == {"assign_slots", "fill_slots"}
            for one, other in zip(
                (*expected, *body.state, *body.targets), (*found, *kernel.state, *kernel.targets), strict=True
            ):
                assert torch.equal(one, other)
        for part, source in zip(kernel.targets, kernel.sources, strict=True):
            assert torch.equal(part[found[0].long()], source[ids.long()]), "a slot has another expert than it should"


def test_what_is_chosen_often_stays():
    """Scores tell the experts that are chosen again and again from those that came once."""
    layer, kept = Layer(32, 8), torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    for _ in range(8):
        layer.step(kept)
    for other in range(4, 32, 4):
        layer.step(torch.arange(other, other + 4, dtype=torch.int32)[None])
    before = layer.state.counts.clone()
    layer.step(kept)
    assert (layer.state.counts - before).tolist() == [4, 0, 0, 0]


def test_guesses_are_counted_apart():
    layer = Layer(16, 6)
    _, loads = layer.step(torch.tensor([[9, 2, 8, 7]], dtype=torch.int32), limit=2)
    assert loads.tolist() == [[8, 0], [9, 1]], "the first two that are missing, in the slots of the least used"
    layer.step(torch.tensor([[9, 2, 12, 13]], dtype=torch.int32))
    assert layer.state.counts.tolist() == [4, 2, 1, 2]
