"""Checks cases, and times the serving ones against their torch bodies and against memory; will not time what is wrong.

`measure` is how it is done on a CPU; cuda.py has the same for a GPU. A round is a turn of kernel calls, a turn of body
calls and one read of the probe, so that all three meet the same neighbours; every figure is the median over rounds, and
ratios are formed inside a round. Rounds in which our threads queued for a CPU do not count. Each call takes the next of
enough copies of the inputs to exceed every cache, so weights come from memory. Python's call overhead is inside.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import cycle
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .cases import Case
from .check import LIMIT, error_ratio, same_bits, tensors
from .machine import READ_BYTES, REST, ReadProbe, queueing_seconds
from .ops.dispatch import reference, trace

ROUNDS = 7
QUEUED = 0.1  # a round counts unless our threads waited this part of it for a CPU
PATIENCE = 5  # times the given seconds that calm rounds are waited for
CHECKED = (torch.float32, torch.bfloat16)
WORKING = torch.float32  # activations on a CPU


class Rotation(NamedTuple):
    """How many copies of the inputs calls rotate over: enough to touch so many bytes, within count and memory."""

    touched: int
    copies: int
    memory: int


ROTATION = Rotation(192 << 20, 128, 2 << 30)  # several times the last cache

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Row:
    """One case: how wrong it is, and, where it is right, how fast. Times in seconds, sizes in bytes."""

    case: str
    op: str
    language: str
    error_ratios: dict[str, float | None]
    wrong: bool
    same_bits: bool = True
    seconds: float | None = None
    torch_seconds: float | None = None
    speedup: float | None = None
    bytes_moved: int | None = None
    bytes_per_second: float | None = None
    of_read: float | None = None
    of_copy: float | None = None
    flops_per_second: float | None = None
    of_matmul: float | None = None
    graph: bool | None = None
    from_memory: bool | None = None
    busy: bool | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Round(NamedTuple):
    kernel: float
    body: float
    read: float


def bench(
    cases: Iterable[Case],
    device: str,
    measure: Callable[[Case, Row], None],
    progress: Callable[[str], None],
    checked: Mapping[str, Row] = MappingProxyType({}),
) -> Iterator[Row]:
    """A row for each case, as it finishes; `checked` holds rows of cases that were checked before, by name."""
    for case in cases:
        if (row := checked.get(str(case))) is None:
            progress(f"checking {case}")
            row = check(case, device)
        if not row.wrong:
            progress(f"timing {case}")
            measure(case, row)
        yield row


def check(case: Case, device: str = "cpu") -> Row:
    """Is the kernel as accurate as its body, in float32 and in the GPU's working dtype, and the same twice?"""
    ratios, same = {}, True
    with trace() as entries:
        for dtype in CHECKED:
            args, kwargs = case.inputs(dtype, device=device)
            ratios[str(dtype).removeprefix("torch.")] = error_ratio(case.op, args, kwargs, mutates=case.mutates)
            same &= same_bits(case.op, args, kwargs, mutates=case.mutates)
    wrong = not same or not all(ratio <= LIMIT for ratio in ratios.values())
    ran = {entry.language for entry in entries if entry.op == case.op.__name__} - {"torch"}
    finite = {name: ratio if math.isfinite(ratio) else None for name, ratio in ratios.items()}
    return Row(str(case), case.op.__name__, ", ".join(sorted(ran)) or "torch", finite, wrong, same)


def measure(case: Case, row: Row, probe: ReadProbe, seconds: float) -> None:
    """Fill in the row's times, from about `seconds` of the kernel and as much of its body; more on a busy machine."""
    row.bytes_moved = moved(case, case.inputs(WORKING))
    # Inputs that no call has seen: what a weight remembers of its own addresses must not be copied with it.
    inputs = copies(case.inputs(WORKING), row.bytes_moved)
    row.from_memory = len(inputs) * row.bytes_moved >= ROTATION.touched
    turns = cycle(inputs)
    estimate = turn(case, turns, 3)
    with reference():
        body_estimate = turn(case, turns, 1)
    rounds: list[Round] = []
    calm: list[Round] = []
    start = time.perf_counter()
    while len(calm) < ROUNDS and (not rounds or time.perf_counter() - start < PATIENCE * seconds):
        began, queued = time.perf_counter(), queueing_seconds()
        time.sleep(REST)
        kernel, body = turn(case, turns, calls(seconds, estimate)), body_estimate
        time.sleep(REST)
        if body_estimate <= seconds:
            with reference():
                body = turn(case, turns, calls(seconds, body_estimate))
            time.sleep(REST)
        rounds.append(Round(kernel, body, probe.seconds()))
        if queueing_seconds() - queued < QUEUED * (time.perf_counter() - began):
            calm.append(rounds[-1])
    row.busy = len(calm) < 3
    used = rounds if row.busy else calm
    row.seconds = statistics.median(r.kernel for r in used)
    row.torch_seconds = statistics.median(r.body for r in used)
    row.speedup = statistics.median(r.body / r.kernel for r in used)
    row.bytes_per_second = row.bytes_moved / row.seconds
    row.of_read = statistics.median(row.bytes_moved / r.kernel / (READ_BYTES / r.read) for r in used)


def calls(seconds: float, estimate: float) -> int:
    """How many calls make a turn of one round."""
    return max(1, int(seconds / ROUNDS / estimate))


def turn(case: Case, inputs: Iterator[Inputs], count: int) -> float:
    """The median time of `count` calls in a row."""
    times = []
    for _ in range(count):
        args, kwargs = next(inputs)
        start = time.perf_counter()
        case.op(*args, **kwargs)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def moved(case: Case, inputs: Inputs) -> int:
    """The bytes that a call must read and write: arguments, results, and once more what it changes in place."""
    args, kwargs = inputs
    if case.touched is not None:
        return case.touched(args, kwargs)
    given = {t.data_ptr(): t.nbytes for t in tensors((args, kwargs))}
    return int(sum(given.values()) + written(case, inputs))


def written(case: Case, inputs: Inputs) -> int:
    """The bytes of what a call returns and of what it changes in place."""
    args, kwargs = inputs
    given = {t.data_ptr() for t in tensors((args, kwargs))}
    results = {t.data_ptr(): t.nbytes for t in tensors(case.op(*args, **kwargs)) if t.data_ptr() not in given}
    return int(sum(results.values()) + sum(kwargs[name].nbytes for name in case.mutates))


def copies(inputs: Inputs, touched: int, rotation: Rotation = ROTATION) -> list[Inputs]:
    """The inputs, as often as it takes to touch more than any cache holds, within limits of count and memory."""
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(inputs)}
    wanted = math.ceil(rotation.touched / max(1, touched))
    count = max(1, min(wanted, rotation.copies, rotation.memory // max(1, sum(held.values()))))
    return [copy.deepcopy(inputs) for _ in range(count)]


def line(row: Row, width: int) -> str:
    """A row for people: name, time, the body's time, how much faster, rate, percent of the read bandwidth beside it."""
    if row.wrong:
        said = ", ".join(f"{name} {'inf' if r is None else f'{r:.3g}'}" for name, r in row.error_ratios.items())
        moving = "" if row.same_bits else "; two runs gave different bits"
        return f"{row.case:<{width}}  WRONG: error ratio {said} (limit {LIMIT:g}){moving}; not timed"
    assert row.seconds and row.torch_seconds and row.speedup and row.bytes_per_second and row.of_read is not None
    marks = {
        "cached": not row.from_memory,
        "no kernel": row.language == "torch",
        "busy": row.busy,
        "slower": row.speedup < 1 and row.language != "torch",
        "eager": row.graph is False,
    }
    rate, share = f"{row.bytes_per_second / 1e9:>6.2f} GB/s", f"{row.of_read:>4.0%}"
    if row.flops_per_second is not None and row.of_matmul is not None:
        rate, share = f"{row.flops_per_second / 1e12:>6.1f} TFLOP/s", f"{row.of_matmul:>4.0%} of matmul"
    elif row.of_copy is not None:
        share = f"{row.of_copy:>4.0%} of copy"
    return "  ".join(
        [
            f"{row.case:<{width}}",
            f"{duration(row.seconds):>8}",
            f"torch {duration(row.torch_seconds):>8}",
            f"{row.speedup:>5.3g}x",
            rate,
            share,
            *(mark for mark, holds in marks.items() if holds),
        ]
    )


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds >= s or u == "us")
    value = seconds / scale
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def header(machine: dict[str, Any]) -> list[str]:
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, {' '.join(machine['vectors'])}",
        f"torch {machine['torch']}, numba {machine['numba']} ({machine['threading_layer']}), {machine['system']}",
        f"reads {machine['read_bytes_per_second'] / 1e9:.1f} GB/s (256 MB, every thread, eight streams each)",
    ]
    if machine["threading_layer"] == "workqueue":
        lines.append("warning: numba runs on its workqueue threads, 100 us a region: install libgomp (omp) or tbb")
    return lines


if __name__ == "__main__":  # python -m halfbyte.bench ops ... is halfbyte bench ops ...
    sys.exit(import_module("halfbyte.cli").main(["bench", *sys.argv[1:]]))
