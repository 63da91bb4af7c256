"""How fast a model runs: prompts and replies through the engine, as a user gets them.

A trial is a prompt (pp512), a reply (tg128) or both, on a text of so many tokens, by so many streams at a time. Weights
are read once a step, so a reply's floor is the bytes of a step over the measured read bandwidth.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .accounting import Account
from .cache import Cache, bytes_of
from .engine import Engine, Request
from .machine import queueing_seconds
from .memory import forget_peak, peak
from .models.decoder import Decoder
from .replaying import pending
from .sampling import SamplingParams

QUEUED = 0.1  # part of the time that our threads may wait for a CPU; beyond that others disturb us
WARM_UPS = 4  # at most: a step is recorded, captured, and captured again where another one has moved its weights
REPORTED = 0.2  # seconds between two words of progress: saying them takes time too
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Trial:
    prompt: int
    reply: int
    depth: int = 0  # tokens that the text has already
    streams: int = 1

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg128, pp512+tg128, tg128 @ d1024; and x4 for four streams."""
        parts = [f"pp{self.prompt}" * bool(self.prompt), f"tg{self.reply}" * bool(self.reply)]
        deep = f" @ d{self.depth}" if self.depth else ""
        return "+".join(filter(None, parts)) + deep + (f" x{self.streams}" if self.streams > 1 else "")

    @property
    def length(self) -> int:
        """The longest that the text of a stream becomes; a stream that begins early is a few tokens ahead."""
        return self.depth + max(self.prompt, 1) + self.reply + self.streams + 1

    @property
    def tokens(self) -> int:
        return self.streams * (self.prompt + self.reply)


class Turn(NamedTuple):
    seconds: float
    first: float | None  # seconds to the first token of the first stream, where there is a prompt


@dataclass(frozen=True)
class Result:
    trial: Trial
    turns: tuple[Turn, ...]
    peak: int  # bytes on the device
    busy: bool  # our threads queued for a CPU: the numbers are too low
    bytes_per_step: float | None  # that must be read and written for a token of every stream, where that is known

    @property
    def rates(self) -> list[float]:
        return [self.trial.tokens / turn.seconds for turn in self.turns]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.rates) if len(self.turns) > 1 else 0.0

    @property
    def first(self) -> float | None:
        found = [turn.first for turn in self.turns if turn.first is not None]
        return statistics.fmean(found) if found else None

    @property
    def bytes_per_second(self) -> float | None:
        return self.bytes_per_step and self.bytes_per_step * self.mean / self.trial.streams


def _ids(model: Decoder, count: int, stream: int = 0) -> list[int]:
    """Tokens as if by chance, the same every time; each stream has its own, or all would choose the same experts."""
    return random.Random((stream << 32) + count).choices(range(model.vocabulary), k=count)


def measure(
    model: Decoder,
    account: Account,
    trial: Trial,
    repetitions: int = 5,
    warm_up: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Time a trial so many times, after turns that do not count: one, or more where the next would capture a graph.

    Progress is in tokens of all that is computed.
    """
    cache = model.new_cache(trial.streams, trial.length)
    report = Reporter(progress, trial.depth + (repetitions + warm_up) * trial.tokens)
    if trial.depth:
        fill(model, cache, trial.depth, report)
        filled = cache.snapshot(0)

    def turn(number: int) -> Turn:
        if trial.depth:
            for slot in range(trial.streams):
                cache.restore(slot, filled)
        report.before = trial.depth + number * trial.tokens
        return run(model, cache, trial, report)

    forget_peak(model.device)
    start, queued = time.perf_counter(), queueing_seconds()
    for _ in range(WARM_UPS if warm_up else 0):
        before = pending(model, cache)
        turn(0)
        if pending(model, cache) in ([], before):  # what only the text before needed is captured by no turn
            break
    turns = tuple(turn(number + warm_up) for number in range(repetitions))
    progress(1, 1)
    busy = queueing_seconds() - queued > QUEUED * (time.perf_counter() - start)
    return Result(trial, turns, peak(model.device), busy, step_bytes(model, account, trial))


class Reporter:
    """Passes progress on, now and then."""

    def __init__(self, progress: Callable[[int, int], None], total: int) -> None:
        self.progress, self.before, self.total, self.said = progress, 0, total, 0.0

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.said >= REPORTED:
            self.progress(min(self.before + done, self.total - 1), self.total)
            self.said = now


def fill(model: Decoder, cache: Cache, depth: int, report: Callable[[int], None]) -> None:
    """A text of so many tokens in slot 0, which an engine takes first."""
    engine, request = Engine(model, cache), Request(_ids(model, depth), 1, GREEDY)
    engine.submit(request)
    _step_until(engine, [request], 1, report)


def run(model: Decoder, cache: Cache, trial: Trial, report: Callable[[int], None]) -> Turn:
    """One turn. A reply without a prompt is timed from where every stream has begun; a token each is a step."""
    engine = Engine(model, cache)
    prompts = [_ids(model, max(trial.prompt, 1), stream) for stream in range(trial.streams)]
    most = max(trial.reply, 1) if trial.prompt else trial.length
    requests = [Request(prompt, most, GREEDY, goes_on=trial.depth > 0) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    if not trial.prompt:
        _step_until(engine, requests, 1, report)
        start = time.perf_counter()
        for made in range(trial.reply):
            engine.step()
            report(made * trial.streams)
        return Turn(time.perf_counter() - start, None)
    start = time.perf_counter()
    _step_until(engine, requests[:1], 1, report)
    first = time.perf_counter() - start
    _step_until(engine, requests, max(trial.reply, 1), report)
    return Turn(time.perf_counter() - start, first)


def _step_until(engine: Engine, requests: Sequence[Request], made: int, report: Callable[[int], None]) -> None:
    """Until each of the requests has so many tokens. The first comes with the prompt."""
    while any(len(request.made) < made for request in requests):
        engine.step()
        report(sum(request.computed + len(request.made) for request in requests))


def step_bytes(model: Decoder, account: Account, trial: Trial) -> float | None:
    """The bytes that a step of a reply must move: weights once, and of each stream what it keeps of its text.

    None for a prompt, which is bound by arithmetic, and where several streams share experts: how many depends on text.
    """
    if trial.prompt or (trial.streams > 1 and account.expert_count):
        return None
    length = trial.depth + 1 + trial.reply // 2  # in the middle of the reply
    fixed = bytes_of(model.kept, 1, 0, 1, model.dtype)
    kept = bytes_of(model.kept, 1, length, 1, model.dtype) + fixed  # recurrent states are read and written
    return account.read_per_token + trial.streams * kept
