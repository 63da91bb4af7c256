"""What stands before an attention of one token each: norms, rotations, and rows for the cache."""

from __future__ import annotations

from typing import NamedTuple

from ..graph import Book, Call, call
from ..ops.dispatch import find
from .matching import alike, language, options

MOST_ROWS = 16  # query heads of a kv head that one program takes
# Channels of a head. 2026-11-16, H200, one stream of Qwen3-30B (128): 1540 to 1486 us a step; of 35B (256): 1310 both.
MOST_CHANNELS = 128
FEWEST_CHANNELS = 16  # tensor cores multiply so many at a time


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
        parts = [one for one in chain if one is not None]
        replaced[last] = call("rotate_and_append", kernel, args, kwargs, out, end.args[1:3], parts)
        dropped |= set(parts) - {last}
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


def rotate_and_attend(calls: list[Call]) -> list[Call]:
    """rotate_and_append; attention: one launch for two, and their merging."""
    book = Book(calls)
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    for end in calls:
        start = book.maker(end.args[0], "rotate_and_append") if end.name == "attention" else None
        kernel = None if start is None else find(language(end), "fused_attention", "rotate_and_attend")
        if start is None or kernel is None or not book.read_once(start) or not one_launch(start, end):
            continue
        given = {**start.kwargs, "turn_scale": start.kwargs["scale"], "out": end.result}
        given |= {name: end.kwargs[name] for name in ("scale", "window", "softcap")}
        replaced[end] = call("rotate_and_attend", kernel, start.args, given, end.result, end.args[1:3], (start, end))
        dropped.add(start)
    return [replaced.get(one, one) for one in calls if one not in dropped]


def one_launch(start: Call, end: Call) -> bool:
    """Whether an attention reads all that was appended for it, and nothing but that and what was there before."""
    (q, k, v), given, put = end.args[:3], end.kwargs, start.kwargs
    pairs = [(k, start.args[-2]), (v, start.args[-1]), *((given[name], put[name]) for name in ("lengths", "slots"))]
    same = all(one is not None and one.data_ptr() == other.data_ptr() for one, other in pairs)
    plain = given["causal"] and not given["return_lse"] and given["scale"] > 0
    ring = put["ring"] == (given["window"] is not None)
    fits = q.shape[2] // k.shape[2] <= MOST_ROWS and FEWEST_CHANNELS <= q.shape[3] <= MOST_CHANNELS
    return same and plain and ring and fits and q.element_size() == 2  # measured, and run on a GPU, in 16 bits alone


class LatentRotations(NamedTuple):
    """What stands before a latent attention of one token each."""

    norm: Call
    turn_q: Call
    turn_k: Call
    put_latent: Call
    put_k: Call


def rotate_and_append_latent(calls: list[Call]) -> list[Call]:
    """rope(q); append(rope(k)); append(rms_norm(latent)): one launch for five."""
    book = Book(calls)
    appends = {one.args[0].untyped_storage().data_ptr(): one for one in calls if one.name == "append"}
    dropped: set[Call] = set()
    replaced: dict[Call, Call] = {}
    for end in calls:
        chain = find_latent_rotations(end, book, appends) if end.name == "latent_attention" else None
        kernel = None if chain is None else find(language(end), "fused_latent", "rotate_and_append_latent")
        if chain is None or kernel is None:
            continue
        (latent, weight, eps), (q, positions, inv_freq), k = chain.norm.args, chain.turn_q.args, chain.turn_k.args[0]
        caches, put, out = end.args[2:4], chain.put_k.kwargs, chain.turn_q.result
        kwargs = {"slots": put["slots"], "lengths": put["lengths"], "scale": chain.turn_q.kwargs["scale"], "out": out}
        args = (q, k[:, 0], latent, weight, eps, positions, inv_freq, *caches)
        last = max(chain, key=book.place.__getitem__)
        replaced[last] = call("rotate_and_append_latent", kernel, args, kwargs, out, caches, chain)
        dropped |= set(chain) - {last}
    return [replaced.get(one, one) for one in calls if one not in dropped]


def find_latent_rotations(end: Call, book: Book, appends: dict[int, Call]) -> LatentRotations | None:
    put_latent, put_k = (appends.get(cache.untyped_storage().data_ptr()) for cache in end.args[2:4])
    if end.args[0].shape[1] != 1 or put_latent is None or put_k is None or put_k.kwargs["slots"] is None:
        return None
    turn_q, turn_k = book.maker(end.args[1], "rope"), book.maker(put_k.args[1], "rope")
    norm = book.maker(put_latent.args[1], "rms_norm")
    if turn_q is None or turn_k is None or norm is None or put_latent is put_k or put_k.kwargs["ring"]:
        return None
    if not alike(turn_q, turn_k, given=1) or not alike(put_latent, put_k, given=2) or not turn_q.kwargs["interleaved"]:
        return None
    q, latent = turn_q.args[0], norm.args[0]
    plain = turn_q.kwargs["rotary"] in (None, q.shape[-1]) and not options(norm) and norm.args[1] is not None
    plain = plain and q.ndim == 3 and turn_k.args[0].shape[1] == 1 and latent.ndim == 2
    plain = plain and all(t.stride(-1) == 1 for t in (q, turn_k.args[0], latent, turn_q.result, *end.args[2:4]))
    found = LatentRotations(norm, turn_q, turn_k, put_latent, put_k)
    return found if plain and book.read_once(norm, turn_q, turn_k) else None
