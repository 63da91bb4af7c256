"""From the engine's thread to a client: pieces that arrive, one JSON or server-sent events, and who has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from threading import Lock
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from ..jobs import Job, Piece
from ..scheduler import QueueFull, Scheduler, Unwell
from .answers import Answer
from .refusals import Refused, queue_full

T = TypeVar("T")
EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect what is meant to flow
)


class Ticket:
    """The jobs of one request, and the pieces of theirs that were not sent yet."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.arrived: list[tuple[int, Piece]] = []
        self.waiter: asyncio.Future[None] | None = None
        self.open = set(range(len(jobs)))
        self.size = 0  # characters that wait to be sent

    def push(self, job: Job, piece: Piece) -> None:
        index = self.jobs.index(job)
        if piece.last:
            self.open.discard(index)
        self.size += sum(len(event.text) for event in piece.events) + 100
        self.arrived.append((index, piece))
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def next(self, seconds: float | None = None) -> list[tuple[int, Piece]]:
        """All pieces that have come since; none after `seconds` of silence, or when all replies have ended.

        A loop that is late finds several: what they share, a wake-up and a write, is then paid once.
        """
        if not self.arrived and self.open:
            loop = asyncio.get_running_loop()
            self.waiter = loop.create_future()
            timer = None if seconds is None else loop.call_later(seconds, self.wake)
            try:
                await self.waiter
            finally:
                if timer is not None:
                    timer.cancel()
        arrived, self.arrived, self.size = self.arrived, [], 0
        return arrived


class Desk:
    """Hands jobs to the scheduler and its pieces to their tickets, in the thread of asyncio's loop.

    `pause`: seconds for each further reply of a step, in which pieces may wait to be written with the next ones. Where
    kernels run on the cores that write, writing 32 replies every 3 ms takes a sixth of their speed, and no eye sees it.
    """

    def __init__(self, buffer: int, pause: float = 0.0) -> None:
        self.buffer, self.pause = buffer, pause
        self.kept: list[tuple[Job, Piece]] = []  # pieces that wait; they leave in the loop alone, in their order
        self.replies = 0  # of the newest step
        self.awaited, self.keeping = False, Lock()  # whether the loop will come for them by itself
        self.timer: asyncio.TimerHandle | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.scheduler: Scheduler = None  # type: ignore[assignment]  # they know each other
        self.tickets: dict[Job, Ticket] = {}

    def deliver(self, pieces: Sequence[tuple[Job, Piece]]) -> None:
        """Called in the engine's thread, after each step. Who waits for a first word or for the end does not wait for
        others, and neither do those who have come before."""
        urgent = any(job.made == 1 or piece.last for job, piece in pieces)
        with self.keeping:
            self.kept += pieces
            self.replies = len(pieces)
            wakes, self.awaited = urgent or not self.awaited, True
        if wakes and self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        """Bring what has come to its tickets, and what comes meanwhile after a while; nothing has come: wait for it."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        with self.keeping:
            pieces, self.kept = self.kept, []
            seconds = self.pause * (self.replies - 1) if pieces else 0.0
            self.awaited = seconds > 0
        if self.awaited and self.loop is not None:
            self.timer = self.loop.call_later(seconds, self._collect)
        self._arrive(pieces)

    def _arrive(self, pieces: Sequence[tuple[Job, Piece]]) -> None:
        """Who has left more than the buffer holds of what came before is too slow; what comes now comes at once."""
        arriving = [(job, piece, ticket) for job, piece in pieces if (ticket := self.tickets.get(job)) is not None]
        slow = {ticket for _, _, ticket in arriving if ticket.size > self.buffer}
        for job, piece, ticket in arriving:
            if ticket in slow and not piece.last:
                self._fail(job, ticket, "slow_reader", "the reply was not read in time")
            else:
                ticket.push(job, piece)

    def submit(self, jobs: list[Job]) -> Ticket:
        """All of a request's jobs, or none."""
        ticket = Ticket(jobs)
        for job in jobs:
            self.tickets[job] = ticket
            try:
                self.scheduler.submit(job)
            except QueueFull:
                self.drop(ticket, "queue_full")
                raise queue_full() from None
            except Unwell as error:
                self.drop(ticket, "unwell")
                raise Refused(503, f"The server is not well: {error}.", code="engine_failed") from None
        return ticket

    def drop(self, ticket: Ticket, reason: str) -> None:
        """End what of a request still runs or waits, and forget it."""
        for index, job in enumerate(ticket.jobs):
            if self.tickets.pop(job, None) is not None and index in ticket.open:
                self.scheduler.cancel(job, reason)
        if ticket.open:
            ticket.open.clear()
            ticket.wake()

    def fail_all(self, message: str) -> None:
        """Tell every client that waits, after what was made for it; the engine will not."""
        self._collect()
        for job, ticket in list(self.tickets.items()):
            self._fail(job, ticket, "server", message)

    def _fail(self, job: Job, ticket: Ticket, reason: str, message: str) -> None:
        if ticket.jobs.index(job) in ticket.open:
            self.scheduler.cancel(job, reason)
            ticket.push(job, Piece(error=message))


async def whole(desk: Desk, ticket: Ticket, answer: Answer, receive: Receive) -> dict[str, Any]:
    """The answer in one, unless its client goes first."""
    try:
        return answer.whole(await unless_gone(receive, collected(ticket)))
    finally:
        desk.drop(ticket, "disconnect")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What comes of some work, which is cancelled should the client go first."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refused(499, "The client has gone.")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def collected(ticket: Ticket) -> list[list[Piece]]:
    """All pieces of each reply."""
    replies: list[list[Piece]] = [[] for _ in ticket.jobs]
    while arrived := await ticket.next():
        for index, piece in arrived:
            if piece.error is not None:
                raise failure(piece)
            replies[index].append(piece)
    return replies


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def failure(piece: Piece) -> Refused:
    message = piece.error or "the engine failed"
    said = f"{message[0].upper()}{message[1:]}."
    return Refused(400, said, code="invalid_schema") if piece.theirs else Refused(503, said, code="engine_failed")


class EventStream:
    """The answer as server-sent events. Until the first piece is there, a refusal is still an answer of its own."""

    def __init__(self, desk: Desk, ticket: Ticket, answer: Answer, ping_seconds: float) -> None:
        self.desk, self.ticket, self.answer, self.ping_seconds = desk, ticket, answer, ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(scope, receive, send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self.desk.drop(self.ticket, "disconnect")
            for task in (writing, gone):
                task.cancel()
            await asyncio.gather(writing, gone, return_exceptions=True)

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = last = False
        while not last:
            data, refused = self._data(await self.ticket.next(self.ping_seconds))
            last = refused is not None or not self.ticket.open
            if refused is not None and not started and not data:
                await refused.response(scope["path"])(scope, receive, send)
                return
            if last:
                data += self.answer.end() if refused is None else self.answer.failed(refused)
            if data and not started:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                started = True
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": not last})

    def _data(self, arrived: list[tuple[int, Piece]]) -> tuple[bytes, Refused | None]:
        """What is sent for these pieces, as far as the first that has failed; or a comment, where nothing came."""
        if not arrived and self.ticket.open:
            request = self.ticket.jobs[0].request
            return f": keep-alive {request.computed}/{len(request.prompt)}\n\n".encode(), None
        said: list[bytes] = []
        for index, piece in arrived:
            if piece.error is not None:
                return b"".join(said), failure(piece)
            said.append(self.answer.events(index, piece))
        return b"".join(said), None
