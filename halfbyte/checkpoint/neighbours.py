"""Weights that a step reads together get memory together, in the order in which they are read.

Who makes one weight of several (fusion/together.py) then finds them one behind the other, and moves nothing. This is
about speed alone: weights that a model reads in another way are only neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable

from .spans import Span

TOGETHER = (
    ("switch_mlp", "shared_expert"),
    ("switch_mlp", "shared_experts"),
    ("gate", "shared_expert_gate"),
    ("q_proj", "k_proj", "v_proj"),
    ("in_proj_qkv", "in_proj_a", "in_proj_b", "in_proj_z"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
STACKS = 2  # the first ones are for stacks of experts too


def neighbours(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans in groups that are to share memory; groups come in the order of their first."""
    given = list(spans)
    names = {span.name for span in given}
    groups: dict[tuple[object, ...], list[tuple[int, Span]]] = {}
    for span in given:
        key, place = _home(span, names)
        groups.setdefault(key, []).append((place, span))
    return [[span for _, span in sorted(group, key=lambda one: one[0])] for group in groups.values()]


def _home(span: Span, names: set[str]) -> tuple[tuple[object, ...], int]:
    """What names a span's group, and its place there: the first of TOGETHER of which another member exists."""
    words = span.name.split(".")
    for members in TOGETHER if len(span.shape) < 3 else TOGETHER[:STACKS]:
        for at, word in enumerate(words):
            if word in members:
                others = (".".join([*words[:at], other, *words[at + 1 :]]) for other in members if other != word)
                if any(other in names for other in others):
                    return (*words[:at], members, *words[at + 1 :], span.kind), members.index(word)
    return (span.name,), 0
