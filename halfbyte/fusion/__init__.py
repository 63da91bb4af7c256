"""A recorded step with fewer launches: calls are replaced by one that does the work of several.

Nothing is recorded anew. Each rewriting finds its calls by what makes and who reads each tensor, and leaves alone what
is another case. It has a name, and HALFBYTE_WITHOUT (names, with commas; read once, shown by `doctor`) leaves it out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from ..errors import UsageError
from ..graph import Call
from ..ops.dispatch import find, is_deterministic
from .dense import dense_mlp
from .experts import combine_and_norm, shared_expert
from .norms import norm_chain
from .projections import add_to_stream, norm_first, side_by_side
from .recurrence import recurrent_step
from .rotation import rotate_and_append, rotate_and_append_latent, rotate_and_attend
from .routing import choose_experts, routed_experts
from .together import lie_together

FUSIONS: dict[str, Callable[[list[Call]], list[Call]]] = {
    "shared_expert": shared_expert,
    "dense_mlp": dense_mlp,
    "side_by_side": side_by_side,
    "rotate_and_append": rotate_and_append,
    "rotate_and_attend": rotate_and_attend,
    "rotate_and_append_latent": rotate_and_append_latent,
    "recurrent_step": recurrent_step,
    "choose_experts": choose_experts,
    "routed_experts": routed_experts,
    "combine_and_norm": combine_and_norm,
    "norm_chain": norm_chain,
    "add_to_stream": add_to_stream,
    "norm_first": norm_first,
}

SEVERAL_ROWS = frozenset({"choose_experts", "add_to_stream", "norm_first"})
"""For one row these take a step no time and give it none: the small launches that they spare run while the next large
one becomes resident and asks for its weights (docs/performance.md)."""

ONE_ROW = frozenset({"rotate_and_attend", "routed_experts"})
"""With several rows every processor has work enough, and what each program does again costs more than a launch."""


def left_out(names: Iterable[str]) -> frozenset[str]:
    """The names of fusions that are not to be done, all of which must exist."""
    found = frozenset(filter(None, (name.strip() for name in names)))
    if unknown := found - FUSIONS.keys():
        wrong, known = min(unknown), ", ".join(FUSIONS)
        raise UsageError(f"HALFBYTE_WITHOUT: no fusion is called {wrong!r}; there are {known}")
    return found


WITHOUT = left_out(os.environ.get("HALFBYTE_WITHOUT", "").split(","))


def fuse(calls: Sequence[Call], without: Iterable[str] | None = None, rows: int | None = None) -> list[Call]:
    """The calls with every fusion that is not left out and pays for a step of so many rows, in the order of FUSIONS.

    None where a row's bits may not depend on the batch: steps that were not recorded before run as they are written.
    """
    if is_deterministic():
        return list(calls)
    made, out = list(calls), WITHOUT if without is None else left_out(without)
    if rows is not None:
        out |= SEVERAL_ROWS if rows == 1 else ONE_ROW
    for name, rewrite in FUSIONS.items():
        if name not in out:
            made = rewrite(made)
    return made


def fuse_in_place(calls: Sequence[Call]) -> list[Call]:
    """What changes no bit and moves no weight, which on a CPU another thread may be reading: projections side by side.

    For steps of one row: the parts of several would no longer lie one behind the other.
    """
    same_bits = find("numba", "products", "same_bits_together")
    if same_bits is None or is_deterministic() or "side_by_side" in WITHOUT:
        return list(calls)
    return side_by_side(list(calls), lambda weights: lie_together(weights) and same_bits(weights))
