"""A recorded step with fewer launches: calls are replaced by one that does the work of several.

Nothing is recorded anew. Each rewriting finds its calls by what makes and who reads each tensor, and leaves alone what
is another case. It has a name, and HALFBYTE_WITHOUT (names, with commas; read once) leaves it out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from ..graph import Call
from .experts import combine_and_norm, shared_expert
from .projections import side_by_side
from .recurrence import recurrent_step
from .rotation import rotate_and_append

WITHOUT = frozenset(filter(None, os.environ.get("HALFBYTE_WITHOUT", "").split(",")))


def fuse(calls: Sequence[Call], without: Iterable[str] | None = None) -> list[Call]:
    """The calls with every fusion that is not left out, in the order of FUSIONS."""
    made, out = list(calls), WITHOUT if without is None else frozenset(without)
    if unknown := out - FUSIONS.keys():
        wrong, known = min(unknown), ", ".join(FUSIONS)
        raise ValueError(f"HALFBYTE_WITHOUT: no fusion is called {wrong!r}; there are {known}")
    for name, rewrite in FUSIONS.items():
        if name not in out:
            made = rewrite(made)
    return made


FUSIONS: dict[str, Callable[[list[Call]], list[Call]]] = {
    "shared_expert": shared_expert,
    "side_by_side": side_by_side,
    "rotate_and_append": rotate_and_append,
    "recurrent_step": recurrent_step,
    "combine_and_norm": combine_and_norm,
}
