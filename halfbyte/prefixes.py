"""What the beginnings of texts left behind, to go on from: a tree of exact token ids, a root for each owner.

A node is a run of ids and the rows that layers keep of them, once, however many texts begin so. What cannot be cut
(recurrent states, rings) is kept whole at the ends of nodes where it was saved; a text goes on from the last such end
that it shares. Ids are compared one by one, never by a hash, and owners share nothing, not even the time a hit saves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .cache import Cache, Snapshot, bytes_of

WORTH = 64  # tokens: a beginning shorter than this is computed again faster than it is managed
STRIDE = 128  # tokens between two saved states of a prompt, at least; half of it for one alone, where there is room
ROOM = 1024  # states

Rows = list[dict[str, Tensor]]  # of each layer, by name


class Node:
    """ids[start:length] of a text, whose beginning is the nodes above."""

    def __init__(self, parent: Node | None, ids: Sequence[int], rows: Rows, state: Snapshot | None) -> None:
        self.parent, self.ids, self.rows, self.state = parent, list(ids), rows, state
        self.length: int = len(ids) + (parent.length if parent else 0)
        self.children: dict[int, Node] = {}  # by their first id

    @property
    def nbytes(self) -> int:
        kept = [*self.rows, *(self.state.layers if self.state else ())]
        return sum(tensor.nbytes for layer in kept for tensor in layer.values())

    @property
    def path(self) -> list[Node]:
        """From the root's child to here."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Found(NamedTuple):
    """Where a text can go on: after `length` tokens, whose end is `node`'s or lies inside of it.

    `fork`: it shares so many with what is known. A state saved there would serve whoever shares them too.
    """

    node: Node | None
    length: int
    fork: int


class Prefixes:
    """The beginnings of a cache's texts, of `budget` bytes together; what was not used longest goes first."""

    def __init__(self, cache: Cache, budget: int) -> None:
        self.cache, self.budget, self.held = cache, budget, 0
        self.roots: dict[bytes, Node] = {}
        self.order: OrderedDict[Node, bytes] = OrderedDict()  # to its owner; a parent was never used before its child
        self.cut_anywhere = all(not one.fixed and one.window is None for one in cache.kept)
        state, row = self._sizes()
        usual = max(STRIDE, 1 << max((state // max(row, 1)).bit_length() - 1, 0))  # takes as much memory as the rows
        self.stride = cache.chunk if self.cut_anywhere else min(cache.chunk, usual)
        halved = self.stride <= STRIDE and 0 < state <= budget // ROOM
        self.fine = min(self.stride, STRIDE // 2) if halved else self.stride

    def _sizes(self) -> tuple[int, int]:
        """Bytes of a saved state, and of what is kept of one token."""
        kept, cache = self.cache.kept, self.cache
        lines = [one for one in kept if one.window is None]
        rings = [one for one in kept if one.window is not None]
        fixed = bytes_of(lines, 1, 0, 1, cache.dtype)
        state = fixed + bytes_of(rings, 1, cache.capacity, 1, cache.dtype)
        return state, bytes_of(lines, 1, 1, 1, cache.dtype) - fixed

    def find(self, owner: bytes, ids: Sequence[int]) -> Found:
        """The longest beginning to go on from. The last id is always left to compute: its logits are wanted."""
        best, length = None, 0
        node, matched = self._walk(owner, ids[:-1])
        if self.cut_anywhere and matched:
            best, length = node, matched
        else:
            inner = node if matched == node.length else node.parent
            while inner is not None and inner.state is None:
                inner = inner.parent
            if inner is not None:
                best, length = inner, inner.length
        return Found(best, length, matched)

    def _walk(self, owner: bytes, ids: Sequence[int]) -> tuple[Node, int]:
        """The deepest node that a text reaches, and how many of its ids lie in the tree."""
        node, at = self.roots.get(owner) or Node(None, (), [], None), 0
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            same = shared(child.ids, ids[at : at + len(child.ids)])
            node, at = child, at + same
            if same < len(child.ids):
                break
        return node, at

    def restore(self, found: Found, slot: int) -> None:
        """Bring a slot to the state after `found.length` tokens."""
        assert found.node is not None
        for node in found.node.path:
            start = node.length - len(node.ids)
            end = min(node.length, found.length)
            for layer, rows in zip(self.cache.layers, node.rows, strict=True):
                for name, tensor in rows.items():
                    layer[name][slot, start:end] = tensor[: end - start]
        state = found.node.state if not self.cut_anywhere else None
        self.cache.restore(slot, state or Snapshot(found.length, tuple({} for _ in self.cache.kept)))
        self._use(found.node)

    def save(self, owner: bytes, ids: Sequence[int], slot: int) -> None:
        """Keep what a slot holds of these ids, all of them and no more."""
        if len(ids) < WORTH or self.budget == 0:
            return
        assert self.cache.lengths[slot] == len(ids)
        root = self.roots.setdefault(owner, Node(None, (), [], None))
        node, matched = self._walk(owner, ids)
        if matched < node.length:
            node = self._split(node, matched - (node.length - len(node.ids)))
        if matched < len(ids):
            state = None if self.cut_anywhere else self.cache.mark(slot)
            node = self._add(Node(node, ids[matched:], self._rows(slot, matched, len(ids)), state), owner)
        elif node.state is None and node is not root and not self.cut_anywhere:
            self.held -= node.nbytes
            node.state = self.cache.mark(slot)
            self.held += node.nbytes
        self._use(node)
        while self.held > self.budget and self.order:
            self._drop(next(iter(self.order)))

    def clear(self) -> None:
        self.roots.clear()
        self.order.clear()
        self.held = 0

    def _rows(self, slot: int, start: int, end: int) -> Rows:
        return [
            {name: layer[name][slot, start:end].clone() for name in one.rows if one.window is None}
            for one, layer in zip(self.cache.kept, self.cache.layers, strict=True)
        ]

    def _add(self, node: Node, owner: bytes) -> Node:
        assert node.parent is not None
        node.parent.children[node.ids[0]] = node
        self.order[node] = owner
        self.held += node.nbytes
        return node

    def _split(self, node: Node, count: int) -> Node:
        """A node of the first `count` ids between a node and its parent; the state stays where the text ended."""
        owner = self.order[node]
        parent, self.held = node.parent, self.held - node.nbytes
        upper = self._add(Node(parent, node.ids[:count], _part(node.rows, 0, count), None), owner)
        node.parent, node.ids, node.rows = upper, node.ids[count:], _part(node.rows, count, None)
        upper.children[node.ids[0]] = node
        self.held += node.nbytes
        return upper

    def _use(self, node: Node) -> None:
        for one in reversed(node.path):  # the root's child last: what others build on goes last
            self.order.move_to_end(one)

    def _drop(self, node: Node) -> None:
        """The node that was not used longest, which is always a leaf."""
        owner = self.order.pop(node)
        assert node.parent is not None and not node.children
        del node.parent.children[node.ids[0]]
        self.held -= node.nbytes
        if not self.roots[owner].children:
            del self.roots[owner]


def _part(rows: Rows, start: int, end: int | None) -> Rows:
    """Copies, so that each part's memory is freed with it."""
    return [{name: tensor[start:end].clone() for name, tensor in layer.items()} for layer in rows]


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two texts begin with in common."""
    if a[: len(b)] == b[: len(a)]:  # the usual case, without a loop
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
