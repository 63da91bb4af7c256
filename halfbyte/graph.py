"""A step recorded once and replayed: on a CUDA device as one graph of launches, on a CPU as bound calls.

Recording runs a step as always and writes down every kernel that dispatch.py hands out, and every torch operation
between them, with the tensors they work on. A replay calls the same kernels on the same tensors, each result into the
memory of the first one: what was checked, chosen and allotted then is not done again. It gives the bits of the step
itself. What nobody reads, such as the ends of a check, falls out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .check import tensors
from .ops.dispatch import LANGUAGE_OF, Entry, find, watching

# The argument that a kernel changes in place.
CHANGED = {"append": 0, "causal_conv": 2, "gated_delta": 5, "assign_slots": 1, "fill_slots": 2}
CHANGED |= {"foresee": 0, "copy_ahead": 0, "copy_layer": 0, "join": 0}
IN_PLACE = {"append", "fill_slots", "foresee", "copy_ahead", "copy_layer", "join"}  # what makes nothing else
COPIES = {"_to_copy", "clone"}
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True, eq=False)
class Part:
    """A recorded call, as a fused one remembers it: no tensors stay alive for that."""

    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """One thing that a step does: a kernel of ours, or an operation of torch's between kernels.

    `run` does it again, into the same `result`. `reads` and `writes` are the addresses of the memory it touches. A
    call has one of `parts`, a fused one has those of all the calls whose work it does.
    """

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    reads: frozenset[int]
    writes: frozenset[int]
    parts: tuple[Part, ...]


def call(
    name: str, run: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any, changed: Any = (),
    parts: Iterable[Call] = (),
) -> Call:  # fmt: skip
    """A call that does the work of `parts`; without any, one that is recorded now."""
    writes = addresses(result) | addresses(changed)
    made_of = tuple(part for one in parts for part in one.parts) or (Part(name),)
    return Call(name, run, args, kwargs, result, addresses((args, kwargs)), writes, made_of)


class Recorder(TorchDispatchMode):
    """Lists the calls made while it is entered. Their results stay alive, so no two share memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.made: set[int] = set()  # memory that came into being here
        self.held: list[Any] = []
        self.inside = False  # a kernel: its own torch calls are not the step's

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Or torch imports its compiler, for seconds, to tell it to leave this alone. Nothing here is compiled."""
        return False

    def watch(self, entry: Entry) -> Callable[..., Any] | None:
        return None if entry.kernel is None else partial(self._kernel, entry.op, entry.kernel)

    def _kernel(self, op: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.inside = True
        try:
            result = kernel(*args, **kwargs)
        finally:
            self.inside = False
        into = {} if op in IN_PLACE else {"out": result}
        changed = [args[CHANGED[op]]] if op in CHANGED else []
        self._note(call(op, kernel, args, {**kwargs, **into}, result, changed), (args, kwargs))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.inside or not isinstance(result, Tensor | tuple | list):
            return result
        if torch.Tag.dynamic_output_shape in func.tags and not by_numbers(func, args):
            raise ValueError(f"a step that calls {func} cannot be recorded: the shape of its result depends on values")
        name = func.overloadpacket.__name__
        if func._schema.is_mutable:
            changed = [kwargs[a.name] if a.name in kwargs else args[i] for i, a in enumerate(func._schema.arguments)
                       if a.alias_info is not None and a.alias_info.is_write]  # fmt: skip
            self._note(call(name, func, args, kwargs, (), changed), (args, kwargs))
        elif not addresses(result) & addresses((args, kwargs)):  # else a view: it shows what it always shows
            if name in UNWRITTEN:
                self.made |= addresses(result)
            elif name in COPIES and isinstance(result, Tensor):
                self._note(call(name, result.copy_, args[:1], {}, result), args)
            elif (into := out_form(func)) is not None:
                self._note(call(name, into, args, {**kwargs, "out": result}, result), (args, kwargs))
            else:
                self._note(call(name, partial(again, func, result), args, kwargs, result), (args, kwargs))
            self.held.append(result)
        return result

    def _note(self, made: Call, given: Any) -> None:
        self.made |= made.writes - addresses(given)
        self.calls.append(made)


def by_numbers(func: Any, args: Any) -> bool:
    """Whether this picks rows by their numbers: then the shape does not depend on values, as it does with masks."""
    masks = torch.bool, torch.uint8
    return func is torch.ops.aten.index.Tensor and not any(t is not None and t.dtype in masks for t in args[1])


def out_form(func: Any) -> Any:
    """The same operation into a given tensor; None where torch has none."""
    wanted = [(one.name, str(one.type)) for one in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        if [(one.name, str(one.type)) for one in other._schema.arguments] == [*wanted, ("out", "Tensor")]:
            return other
    return None


def again(func: Callable[..., Any], results: Any, *args: Any, **kwargs: Any) -> None:
    for old, new in zip(tensors(results), tensors(func(*args, **kwargs)), strict=True):
        old.copy_(new)


def addresses(value: Any) -> frozenset[int]:
    """Where the tensors inside a value begin; those without memory are nowhere."""
    return frozenset(t.untyped_storage().data_ptr() for t in tensors(value)) - {0}


def record(step: Callable[[], Any]) -> tuple[Any, list[Call]]:
    """Run a step: its result, and the calls that compute it again. The result's tensors are those that replays fill."""
    recorder = Recorder()
    with watching(recorder.watch), recorder:
        result = step()
    return result, needed(recorder.calls, addresses(result), recorder.made)


def needed(calls: Iterable[Call], wanted: Iterable[int], made: set[int]) -> list[Call]:
    """The calls that something depends on: what is wanted, or memory that was there before."""
    read, kept = set(wanted), []
    for one in reversed(list(calls)):
        if one.writes & read or one.writes - made:
            kept.append(one)
            read |= one.reads
    return kept[::-1]


class Book:
    """Who makes what lies at an address, and how many calls read it."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.place = {one: index for index, one in enumerate(calls)}
        self.makers = {address: one for one in calls for address in addresses(one.result)}
        self.readers: Counter[int] = Counter()
        for one in calls:  # as their tensors lie now: a fusion before may have moved results
            self.readers.update(addresses((one.args, one.kwargs)) - addresses(one.result) - one.writes)

    def maker(self, value: Tensor | None, name: str) -> Call | None:
        """The call that made this tensor, if it is one of this name."""
        one = None if value is None else self.makers.get(value.untyped_storage().data_ptr())
        return one if one is not None and one.name == name else None

    def read_once(self, *calls: Call) -> bool:
        """Whether each result of these calls is read by one call alone."""
        return all(self.readers[address] == 1 for one in calls for address in addresses(one.result))


def run_all(calls: Iterable[Call]) -> None:
    for one in calls:
        one.run(*one.args, **one.kwargs)


def bound(calls: Sequence[Call], device: torch.device, pool: Any = None) -> Callable[[], None]:
    """What replays the calls. On a CUDA device they are captured: nothing runs now, and all kernels ran before."""
    if device.type != "cuda":
        bind = find(LANGUAGE_OF.get(device.type, "torch"), "binding", "bind")
        run: Callable[[], None] = partial(run_all, calls) if bind is None else bind(calls)
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run_all(calls)
    return graph.replay


def bound_beside(parts: Sequence[Sequence[Call]], device: torch.device) -> Callable[[], None] | None:
    """What replays, on a CPU, calls of which no part has to do with another, a thread each; None where it cannot."""
    bind = find(LANGUAGE_OF.get(device.type, "torch"), "binding", "bind_beside")
    return None if bind is None else bind(parts)


def cut(calls: Sequence[Call], cuts: Sequence[int]) -> list[Sequence[Call]]:
    return [calls[start:end] for start, end in pairwise((0, *cuts, len(calls)))]
