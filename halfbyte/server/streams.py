"""From the engine's thread to a client: pieces that arrive, one JSON or server-sent events, and who has gone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from ..jobs import Job, Piece
from ..scheduler import QueueFull, Scheduler, Unwell
from .answers import Answer
from .refusals import Refused

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect what is meant to flow
]


class Ticket:
    """The jobs of one request, and the pieces of theirs that were not sent yet."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.arrived: deque[tuple[int, Piece]] = deque()
        self.news = asyncio.Event()
        self.open = set(range(len(jobs)))
        self.size = 0  # characters that wait to be sent

    def push(self, job: Job, piece: Piece) -> None:
        index = self.jobs.index(job)
        if piece.finish_reason is not None or piece.error is not None:
            self.open.discard(index)
        self.size += sum(len(event.text) for event in piece.events) + 100
        self.arrived.append((index, piece))
        self.news.set()

    async def next(self, seconds: float | None = None) -> tuple[int, Piece] | None:
        """The next piece; None when all have ended. TimeoutError after `seconds` of silence."""
        while not self.arrived:
            if not self.open:
                return None
            self.news.clear()
            async with asyncio.timeout(seconds):
                await self.news.wait()
        index, piece = self.arrived.popleft()
        self.size -= sum(len(event.text) for event in piece.events) + 100
        return index, piece


class Desk:
    """Hands jobs to the scheduler and its pieces to their tickets, in the thread of asyncio's loop."""

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer
        self.loop: asyncio.AbstractEventLoop | None = None
        self.scheduler: Scheduler = None  # type: ignore[assignment]  # they know each other
        self.tickets: dict[Job, Ticket] = {}

    def deliver(self, pieces: Sequence[tuple[Job, Piece]]) -> None:
        """Called in the engine's thread: one wake-up a step."""
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._arrive, pieces)

    def _arrive(self, pieces: Sequence[tuple[Job, Piece]]) -> None:
        for job, piece in pieces:
            if (ticket := self.tickets.get(job)) is not None:
                ticket.push(job, piece)
                if ticket.size > self.buffer:
                    self._fail(job, ticket, "slow_reader", "the reply was not read in time")

    def submit(self, jobs: list[Job]) -> Ticket:
        """All of a request's jobs, or none."""
        ticket = Ticket(jobs)
        for job in jobs:
            self.tickets[job] = ticket
            try:
                self.scheduler.submit(job)
            except QueueFull:
                self.drop(ticket, "queue_full")
                raise Refused(429, "Too many requests are waiting. Try again soon.", code="queue_full") from None
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
            ticket.news.set()

    def fail_all(self, message: str) -> None:
        """Tell every client that waits; the engine will not."""
        for job, ticket in list(self.tickets.items()):
            self._fail(job, ticket, "server", message)

    def _fail(self, job: Job, ticket: Ticket, reason: str, message: str) -> None:
        if ticket.jobs.index(job) in ticket.open:
            self.scheduler.cancel(job, reason)
            ticket.push(job, Piece(error=message))


async def whole(desk: Desk, ticket: Ticket, answer: Answer, receive: Receive) -> dict[str, Any]:
    """The answer in one, unless its client goes first."""
    gone = asyncio.ensure_future(disconnected(receive))
    replies: list[list[Piece]] = [[] for _ in ticket.jobs]
    try:
        while True:
            coming = asyncio.ensure_future(ticket.next())
            await asyncio.wait({gone, coming}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                raise Refused(499, "The client has gone.")
            if (arrived := coming.result()) is None:
                return answer.whole(replies)
            if arrived[1].error is not None:
                raise failure(arrived[1])
            replies[arrived[0]].append(arrived[1])
    finally:
        gone.cancel()
        desk.drop(ticket, "disconnect")


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
        started = False
        async for data in self._events():
            if isinstance(data, Refused):
                if not started:
                    await data.response(scope["path"])(scope, receive, send)
                    return
                data = self.answer.failed(data)
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                started = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes | Refused]:
        while True:
            try:
                arrived = await self.ticket.next(self.ping_seconds)
            except TimeoutError:
                job = self.ticket.jobs[0]
                yield f": keep-alive {job.request.computed}/{len(job.request.prompt)}\n\n".encode()
                continue
            if arrived is None:
                yield self.answer.end()
                return
            index, piece = arrived
            if piece.error is not None:
                yield failure(piece)
                return
            if data := self.answer.events(index, piece):
                yield data
