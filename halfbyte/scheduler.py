"""Many people, one model: jobs wait in line, an engine thread runs them together, pieces of their replies come out.

One thread owns the engine, and everything that touches a slot happens in it. Others hand it jobs, cancel them, and ask
whether it is well. Before each step cancelled jobs leave and waiting ones take their slots, so both cost one step at
most. The memory of every slot is taken at the start: a job that was let in cannot run out of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from .cache import Cache
from .engine import Engine, Made, Request
from .errors import HalfbyteError
from .grammar import GrammarError
from .jobs import Job, Piece, decoded, resumable, resumed
from .machine import share_threads
from .metrics import Histogram, Sampled
from .models.decoder import Decoder
from .prefixes import WORTH, Prefixes
from .recordings import Recordings

log = logging.getLogger(__name__)
FAILURES = 3  # steps in a row that raise, and not for lack of memory: the device is broken, not a request
LEAST = 64  # tokens of prompts in a step, after memory ran out: fewer take hardly less
GOOD = 256  # steps that read prompts, until more tokens are tried again


class QueueFull(HalfbyteError):
    """No more jobs may wait."""


class Unwell(HalfbyteError):
    """The engine thread has ended, or its step takes too long."""


Deliver = Callable[[Sequence[tuple[Job, Piece]]], None]


class Scheduler:
    """`deliver` gets the pieces of a step, all at once, in the engine's thread. `step_seconds`: longer is hung."""

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        stop_ids: frozenset[int],
        deliver: Deliver,
        *,
        max_queue: int = 1024,
        prefix_bytes: int = 0,
        step_seconds: float = 60.0,
    ) -> None:
        self.model, self.cache, self.stop_ids, self.deliver = model, cache, stop_ids, deliver
        self.max_queue, self.step_seconds = max_queue, step_seconds
        self.engine = Engine(model, cache)
        self.recordings, self.prefixes = Recordings(self.engine), Prefixes(cache, prefix_bytes)
        # A reply's state is kept for the next prompt, unless that would keep the engine from launching steps ahead.
        self.keeps = prefix_bytes > 0 and self.engine.flights.saves(cache.slots)
        self.jobs: dict[Request, Job] = {}  # those that run
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closing = self.idle = False
        self.beat, self.turn, self.failures = time.monotonic(), 0, 0
        self.piece = cache.chunk  # tokens of prompts in a step; less after memory ran out
        self.good = 0  # steps since then that have read prompts
        self.counts, self.aborts = Counter[str](), Counter[str]()
        self.first_token, self.between_tokens = Histogram(), Histogram()
        self.reads = Sampled(lambda: None if model.residency is None else model.residency.reads)
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """Let the thread end after its present step."""
        with self.changed:
            self.closing = True
            self.changed.notify()

    def submit(self, job: Job) -> None:
        """A job joins the line, or is refused at once."""
        with self.changed:
            if self.trouble is not None:
                raise Unwell(self.trouble)
            if self.full:
                raise QueueFull("too many requests are waiting already")
            self.waiting.append(job)
            self.changed.notify()

    def cancel(self, job: Job, reason: str) -> None:
        """The job ends before the next step, without another piece. Of one that has ended nothing changes."""
        with self.changed:
            job.cancelled = job.cancelled or reason
            if job in self.waiting:
                self.waiting.remove(job)
                self.aborts[reason] += 1

    @property
    def trouble(self) -> str | None:
        """What is wrong with the engine thread; None while it is well."""
        if not self.thread.is_alive():
            return "the engine has stopped"
        if not self.idle and time.monotonic() - self.beat > self.step_seconds:
            return "the engine does not answer"
        return None

    @property
    def full(self) -> bool:
        return len(self.waiting) >= self.max_queue + self.cache.slots - len(self.jobs)  # free slots are no queue

    @property
    def running(self) -> int:
        return len(self.jobs)

    def _run(self) -> None:
        try:
            share_threads()
            for _ in self.recordings.brief():
                self.beat = time.monotonic()
            while not self.closing:
                with self.changed:
                    nothing = not (self.jobs or self.waiting)
                    if nothing and not self.recordings.left and not self.closing:
                        self.idle = True
                        self.changed.wait()
                        nothing = False
                    self.beat = time.monotonic()  # before it is said that somebody works
                    self.idle = False
                if nothing:
                    self.recordings.record()
                    continue
                self._drop_cancelled()
                self._admit()
                if self.jobs:
                    self._step()
        except Exception:
            log.exception("the engine thread ends")

    def _drop_cancelled(self) -> None:
        for request, job in list(self.jobs.items()):
            if job.cancelled:
                self.engine.cancel(request, job.cancelled)
                self.aborts[job.cancelled] += 1
                del self.jobs[request]

    def _admit(self) -> None:
        """Waiting jobs take the free slots, each with as much of its text as is known already."""
        free = self.engine.free[::-1]  # the engine takes them in this order
        while free:
            with self.changed:
                if not self.waiting or not self._fits(self.waiting[0]):
                    return
                job = self.waiting.popleft()
                self.jobs[job.request] = job
            slot, request = free.pop(0), job.request
            found = self.prefixes.find(job.owner, request.prompt)
            if found.node is not None and found.length >= WORTH:
                self.prefixes.restore(found, slot)
                request.computed = found.length
            else:
                self.cache.reset(slot)
            job.fork = found.fork
            request.goes_on, request.keeps = True, self.keeps
            self._pause(job)
            self.engine.submit(request)
            if not job.admitted:  # else it was counted before memory ran out
                job.admitted, job.reused = True, request.computed
                self.counts["prompt_tokens"] += len(request.prompt)
                self.counts["prefix_cache_hit_tokens"] += job.reused

    def _fits(self, job: Job) -> bool:
        """Whether a prompt may be read beside those that are: one that memory ran out over is read alone, so that no
        other is taken for it."""
        reading = [other for one, other in self.jobs.items() if one.computed < len(one.prompt)]
        return not reading or not (job.tried or any(other.tried for other in reading))

    def _pause(self, job: Job) -> None:
        """Where the next piece of a prompt ends: at the next place whose state may serve again."""
        computed, total = job.request.computed, len(job.request.prompt)
        places = {computed + self.piece}
        if self.prefixes.budget:
            stride = self.prefixes.fine if len(self.jobs) == 1 else self.prefixes.stride
            places |= {place for place in (job.fork, job.stable) if place >= max(WORTH, computed + 1)}
            places.add((computed // stride + 1) * stride)
        job.request.pause = min(total, *places)

    def _order(self) -> None:
        """Whose prompts come first in the next step: by turns those with least left, so that short ones pass long ones,
        and the oldest, so that long ones end too."""
        reading = [one for one in self.engine.running if one.computed < len(one.prompt)]
        if not reading:
            return
        answering = [one for one in self.engine.running if one.computed == len(one.prompt)]
        for one in reading:
            self._pause(self.jobs[one])
        self.turn += 1
        reading.sort(key=lambda one: len(one.prompt) - one.computed if self.turn % 2 else self.jobs[one].begun)
        self.engine.running = reading + answering

    def _step(self) -> None:
        self._order()
        reading = [(one, one.computed) for one in self.jobs if one.computed < len(one.prompt)]
        try:
            made = self.engine.step()
        except Exception as error:
            self._recover(error, reading)
            return
        self.failures = 0
        self.good += bool(reading)
        if self.good >= GOOD and self.piece < self.cache.chunk:
            self.piece, self.good = min(2 * self.piece, self.cache.chunk), 0
            self.engine.room = self.piece
        for request, computed in reading:
            if computed < request.computed and (self.prefixes.cut_anywhere or request.computed < len(request.prompt)):
                self._save(self.jobs[request], request.prompt[: request.computed])
        now = time.monotonic()
        self.counts["generation_tokens"] += len(made)
        pieces = [(job := self.jobs[one.request], self._piece(job, one, now)) for one in made]
        for job, piece in pieces:
            if piece.last:
                self._leave(job, piece)
        self.reads.renew(at_once=not self.jobs)
        if pieces:
            self.deliver(pieces)

    def _save(self, job: Job, ids: list[int]) -> None:
        """What is kept is a convenience: where it does not fit, there is none."""
        slot = job.request.slot
        if slot is None or self.cache.lengths[slot] != len(ids):
            return
        try:
            self.prefixes.save(job.owner, ids, slot)
        except (MemoryError, RuntimeError):  # torch's allocator raises either
            log.warning("no memory for the beginnings of prompts: they are forgotten")
            self.prefixes.clear()

    def _leave(self, job: Job, piece: Piece) -> None:
        request = job.request
        if request.finish_reason is None:
            self.engine.cancel(request, piece.finish_reason or "error")
        if piece.error is not None:
            self.aborts["error"] += 1
        elif request.keeps:
            self._save(job, [*request.prompt, *request.made[:-1]])
        del self.jobs[request]

    def _piece(self, job: Job, made: Made, now: float) -> Piece:
        """What a token adds to a reply. What fails here fails for this job alone."""
        (self.between_tokens if job.last else self.first_token).observe(now - (job.last or job.begun))
        job.last = now
        job.made += 1
        try:
            return decoded(job, made, self.stop_ids)
        except GrammarError as error:
            return Piece(error=str(error), theirs=True)
        except Exception:
            log.exception("a reply cannot be decoded")
            return Piece(error="the reply could not be decoded")

    def _recover(self, error: Exception, reading: Sequence[tuple[Request, int]]) -> None:
        """A step failed: states may be half written, and the engine is made anew. The step's requests end; after lack
        of memory those whose prompts were read are tried once more, each alone, and the others go on.
        """
        memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        log.error("a step failed", exc_info=error)
        if memory:
            self.prefixes.clear()
            self.piece, self.good = max(self.piece // 2, min(LEAST, self.cache.chunk)), 0
            torch.cuda.empty_cache()  # nothing where there is no GPU
        else:
            self.failures += 1
        if self.model.residency is not None:
            self.model.residency.mend()
        self.engine = Engine(self.model, self.cache)
        self.engine.room = self.piece
        read = [one for one, computed in reading if one.computed > computed] or [one for one, _ in reading]
        again, ended = list[Job](), list[Job]()
        for request, job in self.jobs.items():
            suspect = request in (read or self.jobs)
            goes_on = memory and not (suspect and job.tried) and resumable(request)
            job.tried = job.tried or suspect
            (again if goes_on else ended).append(job)
        said = "the machine has no memory left for this request" if memory else "the engine failed on this request"
        self.aborts["error"] += len(ended)
        with self.changed:
            self.jobs.clear()
            again.sort(key=lambda one: one.tried)  # who is read alone is read last
            for job in reversed(again):
                job.request = resumed(job.request)
                self.waiting.appendleft(job)
        self.deliver([(job, Piece(error=said)) for job in ended])
        if self.failures >= FAILURES:
            raise error
