"""Steps recorded before anybody needs them: on a GPU each takes a second or two, which a request would wait for.

On a CPU those of answers take little, and come soon enough by themselves; pieces of a small model's prompts do not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

from .decoding import DecodeStep
from .engine import Engine
from .prefilling import graphs, prefill

log = logging.getLogger(__name__)
RUNS = 2  # of a step until it is captured: as it is written, then fused


class Recordings:
    """The steps that are left to record, for whoever has time."""

    def __init__(self, engine: Engine) -> None:
        self._slow = engine.ahead
        self._turns = recordings(engine) if engine.replays else iter(())
        self.left = next(self._turns, 0)

    def brief(self) -> Iterator[None]:
        """Record at once what takes a twentieth of a second each: less than requests would wait without. Yields before
        each, and at the end."""
        yield
        while self.left and not self._slow:
            self.record()
            yield

    def record(self) -> None:
        """One of them."""
        try:
            self.left = next(self._turns, 0)
        except Exception as error:  # no memory, say: they are recorded when they are needed, or run one by one
            log.warning("no more steps are recorded ahead: %s", error)
            self.left = 0


def recordings(engine: Engine) -> Iterator[int]:
    """Record all steps that may come, one a turn, those of few requests first. The numbers say how many are left.

    Between two turns the engine may run; during one nothing may, since slots are written.
    """
    sizes = engine.flights.sizes if engine.ahead else []
    works = [partial(_decode, engine, size, filtered) for size in sizes for filtered in (False, True)]
    works[1:1] = [partial(_prompt, engine, *graph) for graph in graphs(engine.model, engine.cache)]
    for done, work in enumerate(works):
        yield len(works) - done
        work()


def _decode(engine: Engine, size: int, filtered: bool) -> None:
    _forget(engine, size)  # what requests have left there
    step = DecodeStep(engine.model, engine.cache, size, filtered=filtered)
    step.bind(range(size), [0] * size)
    for _ in range(RUNS):
        step.launch()
        for slot in range(size):
            engine.cache.lengths[slot] = 0
    _forget(engine, size)


def _prompt(engine: Engine, tokens: int, pieces: int) -> None:
    _forget(engine, pieces)
    for _ in range(RUNS):
        prefill(engine.model, engine.cache, *((slot, [0] * tokens) for slot in range(pieces)))
        _forget(engine, pieces)


def _forget(engine: Engine, slots: int) -> None:
    for slot in range(slots):
        engine.cache.reset(slot)
