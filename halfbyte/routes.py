"""Which experts steps chose, written down: a file from which a cache can be tried out before it is used.

JSON lines: a header, then one line a step: for each layer with experts, in order, the ids of its tokens' choices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from . import files, limits, strict_json
from .errors import CheckpointError, shown
from .ops.dispatch import Entry, reference, watching
from .ops.routing import route

VERSION = 1
AGAIN = "Record it again: `halfbyte bench MODEL --record-routes FILE`."

Step = list[list[int]]  # by layer: the ids of all tokens, `per_token` of each


@dataclass
class Routes:
    """Steps of one model, which its checkpoint's fingerprint stands for."""

    fingerprint: str
    layers: int
    experts: int
    per_token: int
    steps: list[Step] = field(default_factory=list)

    def tokens(self, step: Step) -> int:
        return len(step[0]) // self.per_token

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down every step that a model computes inside the block, as it is written (not replayed)."""
        begun: Step = []

        def noted(entry: Entry) -> Callable[..., Any] | None:
            return partial(choose, entry) if entry.op == "route" else entry.kernel

        def choose(entry: Entry, *args: Any, **kwargs: Any) -> Any:
            if entry.kernel is not None:
                ids, weights = entry.kernel(*args, **kwargs)
            else:
                with reference(), watching(lambda entry: None):
                    ids, weights = route(*args, **kwargs)
            begun.append(ids.flatten().tolist())
            if len(begun) == self.layers:
                self.steps.append(begun.copy())
                begun.clear()
            return ids, weights

        with watching(noted):
            yield

    def save(self, path: Path) -> None:
        header = {
            "routes": VERSION, "fingerprint": self.fingerprint, "layers": self.layers, "experts": self.experts,
            "per_token": self.per_token,
        }  # fmt: skip
        lines = [json.dumps(header), *(json.dumps(step, separators=(",", ":")) for step in self.steps)]
        files.write_whole(path, "".join(f"{line}\n" for line in lines).encode(), "the recorded routes")


def read(path: Path) -> Routes:
    """A file that `save` wrote, every number checked: it may come from another machine."""
    lines = enumerate(files.read_small(path, limits.ROUTES_BYTES).splitlines(), 1)
    parsed = [strict_json.parse(line, f"{path}: line {number}", remedy=f" {AGAIN}") for number, line in lines]
    header, steps = parsed[0] if parsed and isinstance(parsed[0], dict) else {}, parsed[1:]
    if header.get("routes") != VERSION or not isinstance(header.get("fingerprint"), str):
        raise CheckpointError(f"{path}: it is no recording of routes of version {VERSION}. {AGAIN}")
    most = {"layers": limits.LAYERS, "experts": limits.EXPERTS, "per_token": limits.EXPERTS}
    for name, limit in most.items():
        if type(value := header.get(name)) is not int or not 1 <= value <= limit:
            raise CheckpointError(f"{path}: line 1: {name} is {shown(value)}, not from 1 to {limit}. {AGAIN}")
    layers, experts, per_token = (header[name] for name in most)
    found = Routes(header["fingerprint"], layers, experts, per_token, steps)
    for number, step in enumerate(steps, 2):
        if not _sound(found, step):
            raise CheckpointError(f"{path}: line {number}: it does not hold the choices of {layers} layers. {AGAIN}")
    return found


def _sound(routes: Routes, step: Any) -> bool:
    """As many layers as there are, the same number of tokens in each, and ids of experts."""
    if not (isinstance(step, list) and len(step) == routes.layers and all(isinstance(ids, list) for ids in step)):
        return False
    counts = {len(ids) for ids in step}
    ids = (id for layer in step for id in layer)
    whole = len(counts) == 1 and counts.pop() % routes.per_token == 0
    return whole and all(type(id) is int and 0 <= id < routes.experts for id in ids)
