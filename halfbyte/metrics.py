"""Numbers for Prometheus, in its text format: counters, gauges, histograms. No label comes from a request."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")
PREFIX = "halfbyte_"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """How often a value was at most each of the bounds. One thread observes; another may read at any time."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), list(self.counts), strict=True):
            total += count
            yield f'{PREFIX}{name}_bucket{{le="{bound}"}} {total}'
        yield f"{PREFIX}{name}_sum {self.sum}"
        yield f"{PREFIX}{name}_count {total}"


class Sampled(Generic[T]):
    """A value that only one thread may ask for: that one renews it, others read what it was a second ago at most."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self.ask, self.value, self.due = ask, ask(), 0.0

    def renew(self, at_once: bool = False) -> None:
        if at_once or time.monotonic() >= self.due:
            self.value, self.due = self.ask(), time.monotonic() + 1.0


Labels = tuple[tuple[str, str], ...]
Value = float | Histogram | Mapping[Labels, float]


def text(values: Mapping[str, tuple[str, Value]]) -> str:
    """What /metrics answers. values: name -> (what it counts, a number, a histogram, or numbers by labels)."""
    lines: list[str] = []
    for name, (meaning, value) in values.items():
        kind = "histogram" if isinstance(value, Histogram) else "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {PREFIX}{name} {meaning}", f"# TYPE {PREFIX}{name} {kind}"]
        if isinstance(value, Histogram):
            lines += value.lines(name)
        elif isinstance(value, Mapping):
            for labels, number in sorted(Counter(value).items()):
                said = ",".join(f'{key}="{label}"' for key, label in labels)
                lines.append(f"{PREFIX}{name}{{{said}}} {number}")
        else:
            lines.append(f"{PREFIX}{name} {value}")
    return "\n".join(lines) + "\n"
