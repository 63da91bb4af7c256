"""Chains of a recorded step's calls that a kernel of kernels/<language>/fused.py does in one launch.

Each function finds its chain by what makes and who reads each tensor, and leaves alone what is another case.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .graph import Book, Call, call
from .ops.dispatch import find

NORM_OPTIONS = ("add", "mul", "gate", "residual", "scale", "return_sum", "extra_dtype", "head_major")


def options(norm: Call) -> set[str]:
    """What a rms_norm does beside norming."""
    given = ((name, norm.kwargs.get(name)) for name in NORM_OPTIONS)
    return {name for name, value in given if value is not None and value is not False}


def language(one: Call) -> str:
    """That of a kernel: halfbyte.kernels.<language>.<family>."""
    return one.run.__module__.split(".")[2]


def alike(one: Call, other: Call, given: int) -> bool:
    """Whether two calls of an op differ in nothing but their first arguments, `given` many, and their results."""
    settings = [{**dict(enumerate(each.args[given:])), **each.kwargs, "out": None} for each in (one, other)]
    return settings[0].keys() == settings[1].keys() and all(
        a.data_ptr() == b.data_ptr() if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
        for a, b in ((settings[0][name], settings[1][name]) for name in settings[0])
    )


class Rotations(NamedTuple):
    """What stands before an attention of one token each."""

    norm_q: Call
    turn_q: Call
    norm_k: Call
    turn_k: Call
    put_k: Call
    put_v: Call
    norm_v: Call | None  # values may be normed, or not


def rotate_and_append(calls: list[Call]) -> list[Call]:
    """rope(rms_norm(q)); append(rope(rms_norm(k))); append(v) or append(rms_norm(v)): one launch for six or seven."""
    book = Book(calls)
    appends = {one.args[0].untyped_storage().data_ptr(): one for one in calls if one.name == "append"}
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    for end in calls:
        chain = find_rotations(end, book, appends) if end.name == "attention" else None
        kernel = None if chain is None else find(language(end), "fused", "rotate_and_append")
        if chain is None or kernel is None:
            continue
        q, k = chain.norm_q.args[0], chain.norm_k.args[0]
        v = chain.put_v.args[1].flatten(0, 1) if chain.norm_v is None else chain.norm_v.args[0]
        if any(t.stride(-1) != 1 for t in (q, k, v, *end.args[:3])):
            continue
        (_, q_weight, eps), (_, k_weight, _), (_, positions, inv_freq) = (
            one.args for one in (chain.norm_q, chain.norm_k, chain.turn_q)
        )
        turn, put, out = chain.turn_q.kwargs, chain.put_k.kwargs, chain.turn_q.result
        kwargs = {
            "slots": put["slots"], "lengths": put["lengths"], "ring": put["ring"],
            "rotary": turn["rotary"] or q.shape[-1],
            "scale": turn["scale"], "norm_v": chain.norm_v is not None, "out": out,
        }  # fmt: skip
        args = (q, k, v, q_weight, k_weight, eps, positions, inv_freq, *end.args[1:3])
        last = max((chain.put_k, chain.put_v, chain.turn_q), key=book.place.__getitem__)
        replaced[last] = call("rotate_and_append", kernel, args, kwargs, out, end.args[1:3])
        dropped |= {one for one in chain if one is not None and one is not last}
    return [replaced.get(one, one) for one in calls if one not in dropped]


def find_rotations(end: Call, book: Book, appends: dict[int, Call]) -> Rotations | None:
    """An append belongs to the first attention that reads it, and is taken out: a later layer may read it again."""
    put_k, put_v = (appends.pop(cache.untyped_storage().data_ptr(), None) for cache in end.args[1:3])
    if end.args[0].shape[1] != 1 or put_k is None or put_v is None or put_k.kwargs["slots"] is None:
        return None
    turn_q, turn_k = book.maker(end.args[0], "rope"), book.maker(put_k.args[1], "rope")
    if turn_q is None or turn_k is None or turn_q.kwargs["interleaved"]:
        return None
    if not alike(turn_q, turn_k, given=1) or not alike(put_k, put_v, given=2) or end.args[1].shape != end.args[2].shape:
        return None
    norm_q, norm_k = book.maker(turn_q.args[0], "rms_norm"), book.maker(turn_k.args[0], "rms_norm")
    norm_v = book.maker(put_v.args[1], "rms_norm")
    if norm_q is None or norm_k is None or (norm_v is not None and norm_v.args[1] is not None):
        return None
    norms = [one for one in (norm_q, norm_k, norm_v) if one is not None]
    plain = all(not options(one) and one.args[0].ndim == 3 and one.args[2] == norm_q.args[2] for one in norms)
    found = Rotations(norm_q, turn_q, norm_k, turn_k, put_k, put_v, norm_v)
    return found if plain and book.read_once(turn_q, turn_k, *norms) else None


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
        replaced[conv] = call("convolve_and_norm", first, args, {"out": conv.result}, conv.result, (q, k, conv_state))
        args = (q, k, v.flatten(0, 1), *gates.args, state, slots, end.kwargs["gate"], *end.args[1:3])
        replaced[end] = call("delta_and_norm", second, args, {"out": end.result}, end.result, state)
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


def combine_and_norm(calls: list[Call]) -> list[Call]:
    """rms_norm(h, add=combine(...)): what the experts of a layer leave to the norm of the next one."""
    book = Book(calls)
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    for end in calls:
        summed = book.maker(end.kwargs.get("add"), "combine") if end.name == "rms_norm" else None
        if summed is None or options(end) - {"extra_dtype"} != {"add", "return_sum"} or not book.read_once(summed):
            continue
        kernel = find(language(end), "fused", "combine_and_norm")
        (y, weights), (h, weight, eps), given = summed.args, end.args, summed.kwargs
        flat = y.ndim == 3 and h.ndim == 2 and h.is_contiguous() and weights.is_contiguous() and y.stride(-1) == 1
        alone = given["residual"] is None and given["tokens"] is None
        if kernel is None or weight is None or not flat or not alone:
            continue
        normed, total, *copy = end.result
        read = book.readers[normed.untyped_storage().data_ptr()] > 0
        out = (normed if read or not copy else None, total, copy[0] if copy else None)
        args = (y, weights, given["shared"], given["shared_gate"], h, weight, eps)
        replaced[end] = call("combine_and_norm", kernel, args, {"out": out}, end.result)
        dropped.add(summed)
    return [replaced.get(one, one) for one in calls if one not in dropped]
