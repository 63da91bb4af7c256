"""A reply that somebody waits for: the request, whose it is, and the pieces that it comes in."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch

from .engine import Made, Request
from .grammar import Constraint
from .sampling import Logprobs, logprobs
from .text.decoder import Decoder
from .text.reply import Event, Reply


@dataclass(frozen=True)
class Token:
    """A token's log-probability as the model gave it, and the likeliest tokens' at its place."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Piece:
    """What a step made of a reply. The last one has a `finish_reason` or an `error`, which is fit to be shown."""

    events: list[Event] = field(default_factory=list)
    token: Token | None = None
    finish_reason: str | None = None
    error: str | None = None
    theirs: bool = False  # the error is what was asked for, not how it was answered

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(eq=False)
class Job:
    """A request, whose it is, and what turns its tokens into a reply."""

    request: Request
    owner: bytes  # of what is kept of its text: others' jobs cannot go on from it
    decoder: Decoder
    reply: Reply | None = None  # None: all is text
    constraint: Constraint | None = None
    logprobs: int | None = None  # how many of the likeliest tokens are told; None tells nothing
    single: bool = False  # its first call of a tool is its end
    stable: int = 0  # tokens of the prompt that the next prompt of this conversation will surely share
    prompt: list[int] = field(default_factory=list)  # as it was asked, whatever has become of the request
    early: list[Event] = field(default_factory=list)  # what is known of the reply before its first token
    made: int = 0  # tokens of the reply
    reused: int = 0  # tokens of the prompt that were not computed
    cancelled: str = ""  # why, once it is
    error: str = ""  # what is wrong with the form that it must have
    admitted: bool = False  # it has had a slot
    tried: bool = False  # a step that read its prompt ran out of memory: should that happen again, it ends
    fork: int = 0  # tokens of the prompt that somebody else's began with, as far as is known
    begun: float = field(default_factory=time.monotonic)
    last: float = 0.0  # when its newest token came

    def said(self, text: str) -> list[Event]:
        """What a text adds to the reply."""
        if self.reply is not None:
            return self.reply.push(text)
        return [Event("text", text)] if text else []


def resumed(request: Request) -> Request:
    """The same request, to be computed from its text again. Its draws depend on its seed and places, so they go on."""
    text, left = request.prompt + request.made, request.max_tokens - len(request.made)
    return replace(request, prompt=text, max_tokens=left, goes_on=False, slot=None, computed=0, made=[])


def resumable(request: Request) -> bool:
    """Whether that changes nothing: what was made becomes prompt, which presence and frequency alone do not count."""
    return not request.made or not request.params.penalised or request.params.repetition_penalty != 1


def decoded(job: Job, made: Made, stop_ids: frozenset[int]) -> Piece:
    """What a token adds to the reply."""
    request, piece = job.request, Piece()
    if job.error:
        return Piece(error=job.error, theirs=True)
    if job.logprobs is not None:
        found = logprobs(made.logits[None], torch.tensor([made.id], device=made.logits.device), job.logprobs)
        piece.token = told(made.id, found)
    text = "" if made.id in stop_ids else job.decoder.push(made.id)
    ended = request.finish_reason
    if job.decoder.stopped is not None:
        ended = "stop"
    piece.events = job.said(text)
    if job.constraint is not None:  # whose form begins with the token after the one that ends the reasoning
        job.constraint.push(made.id, thinking=job.reply is not None and job.reply.state == "reasoning")
        ended = ended or ("stop" if job.constraint.complete else None)
    if job.reply is not None and job.single and job.reply.calls and job.reply.state != "call":
        ended = ended or "stop"
    if ended is not None:
        piece.events += job.said(job.decoder.finish())
        piece.events += job.reply.finish(cut=made.id not in stop_ids) if job.reply is not None else []
    piece.events, job.early = [*job.early, *piece.events], []
    piece.finish_reason = ended
    return piece


def told(id: int, found: Logprobs) -> Token:
    top = zip(found.ids[0].tolist(), found.top[0].tolist(), strict=True)
    return Token(id, float(found.chosen[0]), tuple(top))
