"""What a decode step launches, and what each call costs: bytes, arithmetic, time, and how near that is to its floor.

On a GPU the calls of one kind, such as the same projection of every layer, are captured as one graph and replayed: each
finds its weights in memory rather than in a cache, as in a step. On a CPU whole steps run, with a clock between their
calls. Either way the sum of the calls stands beside the time of the whole step, which is measured apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .cache import Cache
from .check import tensors
from .costs import SPECIAL, Cost, cost, together
from .cuda import graph_seconds, timed
from .decoding import DecodeStep
from .device_experts import DeviceResidency
from .graph import Call, Part, bound
from .machine import queueing_seconds
from .models.decoder import Decoder

STEPS = 15  # that are timed, as a whole and call by call
ROOM = STEPS + 8  # tokens that a text grows by meanwhile
QUEUED = 0.1  # part of the time that our threads may wait for a CPU
BEGUN = ("foresee", "copy_ahead", "copy_layer")  # calls that go on beside others; the last argument is their lane
CAPTURED = 16  # calls that a graph has at least, so that its own launch hardly counts


@dataclass(frozen=True)
class Line:
    """Calls of one kind: how many, what one was made from, what it gives and what it costs."""

    count: int
    op: str
    parts: tuple[str, ...]  # the recorded ops whose work it does
    result: str
    bytes: float
    flops: float
    seconds: float
    floor: float  # seconds that the device needs at least


@dataclass(frozen=True)
class Explanation:
    lines: tuple[Line, ...]
    seconds: float  # of the whole step
    busy: bool  # our threads queued for a CPU: a call is seldom disturbed, a step often
    copies: Line | None = None  # of experts from host memory, among the lines
    python: float | None = None  # seconds around the step's machine code until its tokens are read, on a CPU

    @property
    def calls(self) -> Line:
        """All of them added up."""
        return self._summed("all calls", sum(line.count * line.seconds for line in self.lines))

    @property
    def step(self) -> Line:
        return self._summed("whole step", self.seconds)

    @property
    def beside(self) -> float:
        """Seconds of copies that ran beside the computing: what the step takes less than its calls one by one."""
        return 0.0 if self.copies is None else min(max(self.calls.seconds - self.seconds, 0.0), self.copies.seconds)

    def _summed(self, op: str, seconds: float) -> Line:
        def total(name: str) -> float:
            return sum(line.count * float(getattr(line, name)) for line in self.lines)

        count = sum(line.count for line in self.lines)
        return Line(count, op, (), "", total("bytes"), total("flops"), seconds, total("floor"))


def explain(
    model: Decoder, cache: Cache, bandwidth: float, flops: float | None = None, *, fused: bool | None = None,
    each: bool = False,
) -> Explanation:  # fmt: skip
    """One step of a token for every slot of the cache, as decoding.py replays it; `each` keeps equal calls apart.

    The device reads `bandwidth` bytes a second and does so many `flops`, where those may bound it. The cache needs ROOM
    behind the texts that it holds. Requests that a CPU would compute in parts beside each other are computed together.
    """
    step = DecodeStep(model, cache, cache.slots, fused=fused, parts=1)
    step.bind(range(cache.slots), [(1 + slot) % model.vocabulary for slot in range(cache.slots)])
    step.launch()
    costs = Costs(step.calls)
    for _ in range(2):  # fused where the device does that, then captured
        step.launch()
    places = step.places.clone()

    def rewind() -> None:
        step.places.copy_(places)

    kinds: dict[Any, list[int]] = {}
    for index, one in enumerate(step.calls):
        kinds.setdefault(kind(one), []).append(index)
    measure = captured_seconds if model.device.type == "cuda" else clocked_seconds
    start, queued = time.perf_counter(), queueing_seconds()
    seconds, whole = measure(step.calls, list(kinds.values()), rewind)
    busy = queueing_seconds() - queued > QUEUED * (time.perf_counter() - start)
    groups = [[index] for index in range(len(step.calls))] if each else kinds.values()
    lines = []
    for indices in groups:
        first, paid = step.calls[indices[0]], [costs.of(step.calls[index]) for index in indices]
        moved, work = statistics.fmean(one.bytes for one in paid), statistics.fmean(one.flops for one in paid)
        taken = statistics.fmean(seconds[index] for index in indices)
        floor = max(moved / bandwidth, 0.0 if flops is None else work / flops)
        parts = tuple(part.name for part in first.parts)
        lines.append(Line(len(indices), first.name, parts, described(first), moved, work, taken, floor))
    copies = copied(model, step.calls, rewind)
    python = None if model.device.type == "cuda" else python_seconds(step, whole, rewind)
    if model.residency is not None:
        model.residency.mend()
    return Explanation((*lines, *([copies] if copies else [])), whole, busy, copies, python)


def python_seconds(step: DecodeStep, whole: float, rewind: Callable[[], None]) -> float:
    """What a step takes from its launch until its tokens are read, beyond its calls."""
    lengths, taken = list(step.cache.lengths), []
    for _ in range(STEPS):
        rewind()
        step.cache.lengths[:] = lengths
        start = time.perf_counter()
        step.launch().tolist()
        taken.append(time.perf_counter() - start)
    step.cache.lengths[:] = lengths
    return max(0.0, statistics.median(taken) - whole)


def copied(model: Decoder, calls: Sequence[Call], rewind: Callable[[], None]) -> Line | None:
    """What a step copies of experts from host memory, where some are there, counted over steps.

    Alone, the calls that copy find all there: so the time of a copy is taken apart, from one that repeats itself.
    """
    residency = model.residency
    if not isinstance(residency, DeviceResidency):
        return None
    before, replay = residency.reads.bytes, bound(calls, model.device)
    for _ in range(STEPS):
        rewind()
        replay()
    moved = (residency.reads.bytes - before) / STEPS
    lender = next(iter(residency.lenders.values()))
    source, count = lender.sources[0], min(lender.count, model.experts_per_token)
    landed = torch.empty(source.shape, dtype=source.dtype, device=model.device)
    rate = count * lender.expert_bytes / seconds_of(lender.copy_again(count), model.device)
    bus = source.nbytes / seconds_of(lambda: landed.copy_(source, non_blocking=True), model.device)
    return Line(1, "copies", ("fill_slots",), "from host memory", moved, 0.0, moved / rate, moved / bus)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        return graph_seconds([work] * CAPTURED, STEPS)
    taken = []
    for _ in range(STEPS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


class Costs:
    """What recorded calls cost, and those that are made of them; looked up before fusing moves any tensor."""

    def __init__(self, recorded: Sequence[Call]) -> None:
        self.known: dict[Part, Cost] = {one.parts[0]: plain_cost(one) for one in recorded}
        self.readers: dict[int, set[Part]] = {}
        self.kept: set[int] = set()  # memory that was there before the step
        made: set[int] = set()
        for part, paid in self.known.items():
            read, written = ({memory for memory, _ in places} for places in (paid.reads, paid.writes))
            for memory in read:
                self.readers.setdefault(memory, set()).add(part)
            self.kept |= read - made
            made |= written - self.kept

    def of(self, one: Call) -> Cost:
        parts = set(one.parts)
        outside = {memory for memory, readers in self.readers.items() if readers - parts} | self.kept
        ordered = [paid for part, paid in self.known.items() if part in parts]
        return ordered[0] if len(ordered) == 1 else together(ordered, outside)


def plain_cost(one: Call) -> Cost:
    given = {name: value for name, value in one.kwargs.items() if name != "out"}
    changed = [t for t in tensors((one.args, given)) if t.untyped_storage().data_ptr() in one.writes]
    return cost(one.name, one.args, one.kwargs, one.result, () if one.name in SPECIAL else changed)


def kind(one: Call) -> Any:
    """Calls of one kind differ in their tensors' memory alone."""
    shapes = tuple((t.shape, t.dtype) for t in tensors((one.args, one.kwargs)))
    return one.name, tuple(part.name for part in one.parts), shapes


def described(one: Call) -> str:
    """The largest tensor that a call gives, or changes."""
    largest = max(list(tensors(one.result)) or tensors(one.args), key=lambda t: t.numel())
    return f"{'x'.join(map(str, largest.shape))} {str(largest.dtype).removeprefix('torch.')}"


def again(one: Call) -> Callable[[], Any]:
    run = partial(one.run, *one.args, **one.kwargs)
    return partial(begun_and_ended, run, one.args[-1]) if one.name in BEGUN else run


def begun_and_ended(run: Callable[[], Any], lane: Any) -> None:
    """A graph ends what it has begun on another stream."""
    run()
    lane.join()


def clocked_seconds(
    calls: Sequence[Call], kinds: Sequence[Sequence[int]], rewind: Callable[[], None]
) -> tuple[list[float], float]:
    """Of each call and of the step: medians over steps, with a clock between their calls and without, in turn."""
    times: list[list[float]] = [[] for _ in calls]
    wholes, device = [], next(tensors(calls[0].args)).device
    each, whole = [bound([one], device) for one in calls], bound(calls, device)
    for _ in range(STEPS):
        rewind()
        for one, taken in zip(each, times, strict=True):
            start = time.perf_counter()
            one()
            taken.append(time.perf_counter() - start)
        rewind()
        start = time.perf_counter()
        whole()
        wholes.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times], statistics.median(wholes)


def captured_seconds(
    calls: Sequence[Call], kinds: Sequence[Sequence[int]], rewind: Callable[[], None]
) -> tuple[list[float], float]:
    """Of each call, the mean of its kind, all of them in one graph; of the step as a graph. Medians over replays."""
    seconds = [0.0] * len(calls)
    for indices in kinds:
        if calls[indices[0]].name == "join":  # which waits for what another call has begun, and does nothing
            continue
        turns = -(-CAPTURED // len(indices))
        rewind()
        taken = graph_seconds([again(calls[index]) for index in indices] * turns, STEPS)
        for index in indices:
            seconds[index] = taken
    rewind()
    return seconds, timed(bound(calls, next(tensors(calls[0].args)).device), STEPS)
