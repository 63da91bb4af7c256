"""Which experts steps chose, written down: a file from which a cache can be tried out before it is used.

JSON lines: a header, then one line a step: for each layer with experts, in order, the ids of its tokens' choices; then,
for each layer but the first, those that the layer before it foresaw, in the two ways of foresight.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from . import files, limits, strict_json
from .errors import CheckpointError, StorageError, shown
from .foresight import blocks_of, foreseen, foreseen_in_stream
from .ops.dispatch import Entry, reference, watching
from .ops.routing import route

VERSION = 3
AGAIN = "Record it again: `halfbyte bench MODEL --record-routes FILE`."

Ids = list[list[int]]  # by layer: of all tokens, `per_token` of each


class Step(NamedTuple):
    chosen: Ids
    guessed: Ids  # from the second layer on: what is read ahead from a disk
    from_stream: Ids  # likewise: what is copied ahead to a GPU; nothing where the layer before it does not guess so


@dataclass
class Routes:
    """Steps of one model, which its checkpoint's fingerprint stands for."""

    fingerprint: str
    layers: int
    experts: int
    per_token: int
    steps: list[Step] = field(default_factory=list)

    def tokens(self, step: Step) -> int:
        return len(step.chosen[0]) // self.per_token

    @contextmanager
    def recording(self, layers: Sequence[Any]) -> Iterator[None]:
        """Write down every step that the model of these layers computes inside, as it is written (not replayed)."""
        begun, guessed, from_stream = Ids(), Ids(), Ids([] for _ in range(self.layers - 1))

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
                self.steps.append(Step(begun.copy(), guessed.copy(), from_stream.copy()))
                begun.clear()
                guessed.clear()
                from_stream[:] = [[] for _ in from_stream]
            return ids, weights

        def note(layer: int, ids: list[int]) -> None:
            from_stream[layer - 1] = ids

        by_blocks = foreseen(blocks_of(layers), lambda layer, ids: guessed.append(ids))
        with watching(noted), by_blocks, foreseen_in_stream(layers, note):
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
    if not path.is_file():  # nor a pipe, which might never end
        what = "it is no file" if path.exists() else "there is no such file"
        raise StorageError(f"{path}: {what}. `halfbyte bench MODEL --record-routes FILE` makes one.")
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
    found = Routes(header["fingerprint"], layers, experts, per_token)
    for number, step in enumerate(steps, 2):
        if not _sound(found, step):
            raise CheckpointError(f"{path}: line {number}: it does not hold the choices of {layers} layers. {AGAIN}")
        found.steps.append(Step(*step))
    return found


def _sound(routes: Routes, step: Any) -> bool:
    """As many layers as there are, the same number of tokens in each, and ids of experts."""
    if not (isinstance(step, list) and len(step) == 3 and all(isinstance(part, list) for part in step)):
        return False
    if [len(part) for part in step] != [routes.layers, routes.layers - 1, routes.layers - 1]:
        return False
    layers = [*step[0], *step[1], *(ids for ids in step[2] if ids != [])]
    if not all(isinstance(ids, list) for ids in layers):
        return False
    counts = {len(ids) for ids in layers}
    ids = (id for layer in layers for id in layer)
    whole = len(counts) == 1 and counts.pop() % routes.per_token == 0
    return whole and all(type(id) is int and 0 <= id < routes.experts for id in ids)
