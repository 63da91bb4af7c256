"""A dense network of one token: gate, up and what joins them need no memory between."""

from __future__ import annotations

import torch

from ..graph import Book, Call, call
from ..ops.dispatch import find
from ..ops.experts import Experts
from ..ops.formats import Packed
from .matching import language
from .together import form, joinable, laid_together


def dense_mlp(calls: list[Call]) -> list[Call]:
    """down(glu(gate x, up x)) of one token becomes an expert_mlp of one expert, whose gate and up are one launch.

    For more tokens an expert's weights would be read again by each.
    """
    book = Book(calls)
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    for down in calls:
        found = find_dense(down, book) if down.name == "qmm" else None
        kernel = None if found is None else find(language(down), "experts", "expert_mlp")
        if found is None or kernel is None:
            continue
        gate, up, glu = found
        x, inner = gate.args[0], gate.result.shape[1]
        joined = laid_together([gate.args[1], up.args[1]], (2, inner, x.shape[1]))
        outward = laid_together([down.args[1]], (1, *down.args[1].shape))
        experts = Experts(stacked(joined, 0), stacked(joined, 1), outward)
        ids, out = torch.zeros((1, 1), dtype=torch.int32, device=x.device), down.result[:, None]
        args = (x, ids, experts, glu.args[2])
        replaced[down] = call("expert_mlp", kernel, args, {"out": out}, out, (), (gate, up, glu, down))
        dropped |= {gate, up, glu}
    return [replaced.get(one, one) for one in calls if one not in dropped]


def find_dense(down: Call, book: Book) -> tuple[Call, Call, Call] | None:
    glu = book.maker(down.args[0], "glu")
    if glu is None or down.args[0].shape[0] != 1 or down.args[0].ndim != 2:
        return None
    gate, up = book.maker(glu.args[0], "qmm"), book.maker(glu.args[1], "qmm")
    if gate is None or up is None or gate.args[0].data_ptr() != up.args[0].data_ptr():
        return None
    plain = all(
        joinable(one.args[1]) and len(one.args[1].shape) == 2 and one.kwargs.get("transpose", True)
        and form(one.args[1]) == form(down.args[1])
        for one in (gate, up, down)
    )  # fmt: skip
    whole = plain and gate.args[0].is_contiguous() and gate.args[1].shape == up.args[1].shape
    return (gate, up, glu) if whole and book.read_once(gate, up, glu) else None


def stacked(w: Packed, index: int) -> Packed:
    """One of a stack of weights, as a stack."""
    one = slice(index, index + 1)
    return Packed(w.words[one], w.scales[one], None if w.biases is None else w.biases[one], w.bits, w.group, w.mode)
