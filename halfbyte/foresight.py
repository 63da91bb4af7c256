"""What the next layer will probably choose: its router, asked now, with what this layer's router is asked with.

A layer adds little to the stream that runs through all of them, so the next router sees almost the same. The experts
that it names are read while this layer computes. A guess never changes a result: what was not foreseen is read later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from .ops.dispatch import watching

Router = Callable[[Tensor], tuple[Tensor, Tensor]]  # ids and shares of x's rows
Wanted = Callable[[Tensor], bool]
Tell = Callable[[int, list[int]], None]  # the number of a block, and the ids that it would choose


class Block(Protocol):
    """A block of a model that chooses experts."""

    router: Router
    experts: Any


def blocks_of(layers: Iterable[object]) -> list[Block]:
    """The blocks that choose experts, in the order of the layers."""
    parts = (part for layer in layers for part in vars(layer).values())
    return [part for part in parts if hasattr(part, "router") and hasattr(part, "experts")]


def by_votes(ids: Iterable[int]) -> list[int]:
    """Experts, those that most tokens chose first."""
    votes = Counter(ids)
    return sorted(votes, key=lambda expert: (-votes[expert], expert))


class Foreseeing:
    """A router that also tells which experts the next layer's router would choose, for each of x's rows."""

    def __init__(self, router: Router, following: Router, wanted: Wanted, tell: Callable[[list[int]], None]) -> None:
        self.router, self.following, self.wanted, self.tell = router, following, wanted, tell

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, shares = self.router(x)
        if self.wanted(ids):
            with watching(lambda entry: entry.kernel):  # whoever watches what a model computes does not see guesses
                self.tell(self.following(x)[0].flatten().tolist())
        return ids, shares


def foresee(blocks: Sequence[Block], wanted: Wanted, tell: Tell) -> None:
    """From now on every block but the last tells of the next one, where its own choices, ids [T, A], are `wanted`."""
    own = [itself(block.router) for block in blocks]
    for number, (block, following) in enumerate(zip(blocks, own[1:], strict=False), 1):
        block.router = Foreseeing(block.router, following, wanted, partial(tell, number))


def itself(router: Router) -> Router:
    return itself(router.router) if isinstance(router, Foreseeing) else router


@contextmanager
def foreseen(blocks: Sequence[Block], tell: Tell) -> Iterator[None]:
    """Inside, every guess is told."""
    routers = [block.router for block in blocks]
    foresee(blocks, lambda ids: True, tell)
    try:
        yield
    finally:
        for block, router in zip(blocks, routers, strict=True):
            block.router = router


class FromStream:
    """What a layer would choose if nothing more came into the stream before its experts: its norm and router.

    Nearer to what it will choose than `Foreseeing`, which asks with what the norm of the layer before has made.
    """

    def __init__(self, layer: Any) -> None:
        self.norm, self.router = layer.between, itself(layer.mlp.router)

    @property
    def per_token(self) -> int:
        return self.router.k  # type: ignore[attr-defined, no-any-return]

    def __call__(self, h: Tensor, dtype: torch.dtype) -> Tensor:
        return self.router(self.norm(h, dtype))[0]


def neighbours(layers: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Layers that are told of the stream (`foresee`), each with the next one, where both choose experts."""
    pairs = [pair for pair in pairwise(layers) if hasattr(pair[0], "foresee")]
    return [pair for pair in pairs if all(hasattr(getattr(layer, "mlp", None), "experts") for layer in pair)]


@contextmanager
def foreseen_in_stream(layers: Sequence[Any], tell: Tell) -> Iterator[None]:
    """Inside, what the layers of a model guess from the stream is told, whether or not anything comes of it."""
    blocks, pairs = blocks_of(layers), neighbours(layers)
    before = [layer.foresee for layer, _ in pairs]

    def told(own: Any, guess: FromStream, number: int, h: Tensor, dtype: torch.dtype) -> None:
        if own is not None:
            own(h, dtype)
        with watching(lambda entry: entry.kernel):
            tell(number, guess(h, dtype).flatten().tolist())

    for own, (layer, following) in zip(before, pairs, strict=True):
        layer.foresee = partial(told, own, FromStream(following), blocks.index(following.mlp))
    try:
        yield
    finally:
        for own, (layer, _) in zip(before, pairs, strict=True):
            layer.foresee = own
