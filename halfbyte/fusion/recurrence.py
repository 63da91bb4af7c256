"""The chain of a gated delta rule of one token each."""

from __future__ import annotations

from typing import NamedTuple

from ..graph import Book, Call, call
from ..ops.dispatch import find
from .matching import language, options


class Recurrence(NamedTuple):
    """What stands before a gated norm, of one token each."""

    conv: Call
    norm_q: Call
    norm_k: Call
    gates: Call
    delta: Call


def recurrent_step(calls: list[Call]) -> list[Call]:
    """The chain of a gated delta rule in two launches instead of six.

    causal_conv and the norms of its queries and keys; then delta_gates, gated_delta and the gated norm of its result.
    """
    book = Book(calls)
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    for end in calls:
        chain = find_recurrence(end, book) if end.name == "rms_norm" else None
        if chain is None:
            continue
        first, second = (find(language(end), "fused", name) for name in ("convolve_and_norm", "delta_and_norm"))
        if first is None or second is None:
            continue
        conv, norm_q, norm_k, gates, delta = chain
        (x, weight, conv_state), (_, _, v, _, _, state), slots = conv.args, delta.args, delta.kwargs["slots"]
        q, k, scales = norm_q.result, norm_k.result, (norm_q.kwargs["scale"], norm_k.kwargs["scale"])
        args = (x, weight, conv_state, slots, q, k, norm_q.args[2], *scales)
        out, parts = conv.result, (conv, norm_q, norm_k)
        replaced[conv] = call("convolve_and_norm", first, args, {"out": out}, out, (q, k, conv_state), parts)
        args = (q, k, v.flatten(0, 1), *gates.args, state, slots, end.kwargs["gate"], *end.args[1:3])
        out, parts = end.result, (gates, delta, end)
        replaced[end] = call("delta_and_norm", second, args, {"out": out}, out, state, parts)
        dropped |= {norm_q, norm_k, gates, delta}
    return [replaced.get(one, one) for one in calls if one not in dropped]


def find_recurrence(end: Call, book: Book) -> Recurrence | None:
    delta = book.maker(end.args[0], "gated_delta")
    if delta is None or options(end) != {"gate"} or end.args[1] is None or end.args[0].ndim != 3:
        return None
    q, k, v, g, beta, _ = delta.args
    if q.shape[1] != 1 or not delta.kwargs["in_place"] or delta.kwargs["slots"] is None:
        return None
    gates, conv = book.maker(g, "delta_gates"), book.maker(v, "causal_conv")
    norm_q, norm_k = book.maker(q, "rms_norm"), book.maker(k, "rms_norm")
    if (
        gates is None
        or gates is not book.maker(beta, "delta_gates")
        or conv is None
        or norm_q is None
        or norm_k is None
    ):
        return None
    (heads, D), found = q.shape[2:], Recurrence(conv, norm_q, norm_k, gates, delta)
    plain = all(
        options(norm) == {"scale"} and norm.args[1] is None and norm.args[2] == norm_q.args[2]
        and book.maker(norm.args[0], "causal_conv") is conv and norm.args[0].storage_offset() == at * heads * D
        for at, norm in enumerate((norm_q, norm_k))
    )  # fmt: skip
    plain = plain and v.storage_offset() == 2 * heads * D and v.shape[2] * v.shape[3] % D == 0
    plain = plain and conv.kwargs["activation"] == "silu" and conv.kwargs["slots"] is delta.kwargs["slots"]
    plain = plain and all(t.stride(-1) == 1 for t in (conv.args[0], v, end.kwargs["gate"], *gates.args))
    thrice = book.readers[v.untyped_storage().data_ptr()] == 3  # queries, keys, values
    return found if plain and thrice and book.read_once(norm_q, norm_k, gates, delta) else None
