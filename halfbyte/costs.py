"""What a call of an op must move and compute: each byte that it needs once, and the arithmetic of its products.

Memory is told apart by address, so that several calls done as one can be counted too: what passes between them stays in
registers. The arithmetic of row ops hides behind their bytes, and counts as none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from .check import tensors

Place = tuple[int, int]  # where the memory begins that a tensor lies in, and where the tensor does
Bytes = dict[Place, int]


@dataclass(frozen=True)
class Cost:
    """Bytes by place, and multiplications and additions."""

    reads: Bytes
    writes: Bytes
    flops: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


def cost(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, changed: Iterable[Tensor] = ()) -> Cost:
    """Of one call: all its arguments and results, where an op does not say otherwise.

    What only values tell (the experts that are chosen, the length of a text) is looked up in them.
    """
    given = {name: value for name, value in kwargs.items() if name != "out"}
    plain = Cost(whole(args, given), whole(result, *changed))
    return SPECIAL[op](plain, args, given, result) if op in SPECIAL else plain


def together(costs: Iterable[Cost], outside: set[int]) -> Cost:
    """Of several calls done as one: what one makes and others of them read costs nothing, unless it is `outside` too.

    `outside` holds where memory begins that others read, or that was there before.
    """
    reads: Bytes = {}
    writes: Bytes = {}
    made: set[int] = set()
    flops = 0.0
    for one in costs:
        reads |= {place: size for place, size in one.reads.items() if place[0] not in made}
        writes |= {place: size for place, size in one.writes.items() if place[0] in outside}
        made |= {memory for memory, _ in one.writes.keys() - one.reads.keys()}
        flops += one.flops
    return Cost(reads, writes, flops)


def place(t: Tensor) -> Place:
    return t.untyped_storage().data_ptr(), t.data_ptr()


def whole(*values: Any) -> Bytes:
    return {place(t): t.nbytes for t in tensors(values)}


def share(weights: Any, part: float) -> Bytes:
    """Of each of the weights' tensors."""
    return {at: round(size * part) for at, size in whole(weights).items()}


def _product(plain: Cost, args: Any, given: Any, result: Any) -> Cost:
    return Cost(plain.reads, plain.writes, 2.0 * result.numel() * args[0].shape[-1])


def _rows(plain: Cost, args: Any, given: Any, result: Any) -> Cost:
    """As many of a table as ids were given."""
    ids, w = args[:2]
    return Cost(plain.reads | share(w, ids.numel() / w.shape[0]), plain.writes)


def _stacks(which: Callable[[Any], list[Any]]) -> Callable[..., Cost]:
    """Each chosen expert is read once, however many tokens chose it."""

    def counted(plain: Cost, args: Any, given: Any, result: Any) -> Cost:
        ids, stacks = args[1], which(args)
        chosen = int(ids.unique().numel()) / stacks[0].shape[0]
        flops = 2.0 * ids.numel() * sum(prod(one.shape[1:]) for one in stacks)
        others = {at: size for at, size in plain.reads.items() if at not in whole(args[2])}
        return Cost(others | share(stacks, chosen), plain.writes, flops)

    return counted


def _attention(plain: Cost, args: Any, given: Any, result: Any) -> Cost:
    """The rows that a request has, or those of its window; a latent is a key and a value."""
    q, keys, values = args[0], args[-2], args[-1]
    latent = len(args) == 4
    (B, L, H), S = q.shape[:3], keys.shape[1]
    lengths, window = given.get("lengths"), given.get("window")
    ends = [S] * B if lengths is None else lengths.tolist()
    rows = sum(min(end, S if window is None else window + L - 1) for end in ends)
    seen = sum(visible(end, L, given.get("causal", True), window) for end in ends)
    width = (2 if latent else 1) * keys.shape[-1] + values.shape[-1]
    reads = plain.reads | {place(one): rows * one[0, 0].nbytes for one in (keys, values)}
    return Cost(reads, plain.writes, 2.0 * H * width * seen)


def visible(length: int, L: int, causal: bool, window: int | None) -> int:
    """The positions that the last L queries of a text see, all together."""
    places = range(max(0, length - L), length)
    return sum((p + 1 if causal else length) - (max(0, p - window + 1) if window else 0) for p in places)


def _append(plain: Cost, args: Any, given: Any, result: Any) -> Cost:
    cache, new = args
    reads = {at: size for at, size in plain.reads.items() if at != place(cache)}
    return Cost(reads, {place(cache): new.numel() * cache.element_size()})


def _recurrent(state_at: int, flops_each: Callable[[Any], float]) -> Callable[..., Cost]:
    """Every request reads and writes its own state."""

    def counted(plain: Cost, args: Any, given: Any, result: Any) -> Cost:
        state = given["state"] if "state" in given else args[state_at]
        B, L = args[0].shape[:2]
        own = {place(state): B * state[0].nbytes}
        kept = own if given.get("in_place", True) else {}
        return Cost(plain.reads | own, plain.writes | kept, B * L * flops_each((*args, state)))

    return counted


def _chosen_slots(plain: Cost, args: Any, given: Any, result: Any) -> Cost:
    ids, (table, counts) = args
    return Cost(whole(ids, table, counts), whole(result, table, counts))


def _copied(plain: Cost, args: Any, given: Any, result: Any) -> Cost:
    """As many experts as were missing, over the bus and into their slots."""
    loads, sources, targets = args
    count = int((loads[:, 0] >= 0).sum())
    read, written = ({place(part): count * part[0].nbytes for part in parts} for parts in (sources, targets))
    return Cost(read, written)


def _layer(plain: Cost, args: Any, given: Any, result: Any) -> Cost:
    return Cost(whole(args[1]), whole(args[0]))


def _nothing(plain: Cost, args: Any, given: Any, result: Any) -> Cost:
    return Cost({}, {})


SPECIAL: dict[str, Callable[..., Cost]] = {
    "qmm": _product,
    "embed": _rows,
    "expert_qmm": _stacks(lambda args: [args[2]]),
    "expert_mlp": _stacks(lambda args: [args[2].gate, args[2].up, args[2].down]),
    "assign_slots": _chosen_slots,
    "fill_slots": _copied,
    "foresee": _nothing,
    "copy_ahead": _nothing,
    "copy_layer": _layer,
    "join": _nothing,
    "attention": _attention,
    "latent_attention": _attention,
    "append": _append,
    "causal_conv": _recurrent(2, lambda args: 2.0 * args[0].shape[2] * args[1].shape[1]),
    "gated_delta": _recurrent(5, lambda args: 6.0 * prod(args[-1].shape[1:])),
}
