"""Are a model's kernels right, on its own weights and what flows between them?

Every call of every op is held against its torch body and the body in float64, as cases are (check.py). Whole logits
would not do: where two experts score alike, rounding chooses one or the other, and all that follows is another text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from . import memory
from .check import EPS, LIMIT, bits, clone, ratio, tensors, with_doubles
from .graph import CHANGED
from .models.decoder import Decoder
from .ops.dispatch import Entry, cpu_activations, reference, watching
from .ops.formats import Packed

PROMPT, STEPS = 12, 4  # tokens of a text that are computed together, then one by one
UNPACKED = 24  # bytes that a weight takes in a body: in float64, with what is made on the way
ROUNDED = {"qmm", "expert_qmm", "expert_mlp"}  # ops that take activations as --cpu-activations says
ROUNDING = {"f32": 4 * EPS, "i16": 5e-4, "i8": 5e-2}  # what that may take from a result


@dataclass
class Proof:
    """The error ratios of each op's calls, and what is wrong, or nothing."""

    calls: dict[str, list[float]] = field(default_factory=dict)
    bits_move: bool = False
    unchecked: dict[str, int] = field(default_factory=dict)  # calls of each op for whose body memory had no room

    @property
    def ratios(self) -> dict[str, float]:
        """Of each op, the root mean square: in one call of hundreds, plain torch may be lucky where sums cancel."""
        return {op: math.sqrt(sum(one * one for one in found) / len(found)) for op, found in self.calls.items()}

    @property
    def wrong(self) -> str:
        for op, found in self.ratios.items():
            if not found <= LIMIT:
                return f"{op}: error ratio {found:.3g} (limit {LIMIT:g})"
        return "two identical runs gave different bits" if self.bits_move else ""


def prove(model: Decoder, streams: Iterable[int] = (1,)) -> Proof:
    """Hold every call of a short text against its body, for each number of texts at a time."""
    proof = Proof()
    for count in sorted(set(streams)):
        with watching(partial(compared, proof)):
            logits = text(model, count)
        proof.bits_move |= not torch.equal(bits(logits), bits(text(model, count)))
    return proof


def text(model: Decoder, streams: int) -> Tensor:
    """The last logits of texts as if by chance, the same every time."""
    ids = random.Random(streams).choices(range(model.vocabulary), k=streams + PROMPT + STEPS)
    cache = model.new_cache(streams, PROMPT + STEPS)
    pieces = [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + STEPS))]
    for start, end in pieces:
        work = [(slot, ids[slot + start : slot + end]) for slot in range(streams)]
        logits = model(cache.plan(work), cache)
        cache.advance(work)
    return logits


def compared(proof: Proof, entry: Entry) -> Callable[..., Any] | None:
    """What is no op has no body of its own: what it is made of is compared."""
    if entry.kernel is None or not is_op(entry.family):
        return None
    return partial(run_compared, proof, entry, entry.kernel)


@cache
def is_op(family: str) -> bool:
    return bool(family) and find_spec(f".ops.{family}", __package__) is not None


def run_compared(proof: Proof, entry: Entry, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The kernel's result, after its body has had the same arguments, twice: a kernel may change them."""
    if not has_room(entry.op, args):
        proof.unchecked[entry.op] = proof.unchecked.get(entry.op, 0) + 1
        return kernel(*args, **kwargs)
    op = getattr(import_module(f".ops.{entry.family}", __package__), entry.op)
    given = with_doubles((args, {name: value for name, value in kwargs.items() if name != "out"}))

    def outcome(floats: torch.dtype | None) -> list[Tensor]:
        own, named = clone(given, floats)
        return seen(entry.op, op(*own, **named), own)

    with reference(), watching(lambda entry: None):
        exact, body = outcome(torch.float64), outcome(None)
    result = kernel(*args, **kwargs)
    found = seen(entry.op, result, args)
    rounding = ROUNDING[cpu_activations() if entry.language == "numba" and entry.op in ROUNDED else "f32"]
    ratios = [ratio(*three, rounding) for three in zip(found, body, exact, strict=True)]
    proof.calls.setdefault(entry.op, []).append(max(ratios, default=0.0))
    return result


def has_room(op: str, args: Any) -> bool:
    """Whether a CPU's body may take a matrix apart: beside a limit on memory, or what the machine has, it may not."""
    whole = [w for w in args if isinstance(w, Packed)] if op != "embed" else []  # which takes rows of it
    need = UNPACKED * sum(math.prod(w.shape) for w in whole)
    return not need or whole[0].words.device.type != "cpu" or need <= memory.available(whole[0].words.device)


def seen(op: str, result: Any, args: Any) -> list[Tensor]:
    """What a call returns, then what it left in the argument it changes in place."""
    return [*tensors(result), *tensors([args[CHANGED[op]]] if op in CHANGED else [])]
