"""Answers: what all have, and those of OpenAI's older routes, whole and in chunks."""

from __future__ import annotations

import codecs
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from functools import partial
from typing import Any, Protocol

from starlette.responses import JSONResponse

from ..chat import Tokenizer
from ..jobs import Job, Piece, Token
from .refusals import Refused
from .schema import Wish

DONE = b"data: [DONE]\n\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Answer(Protocol):
    """What becomes of the pieces of a request's replies: one JSON, or server-sent events."""

    def __init__(self, model: str, tokenizer: Tokenizer, wish: Wish, jobs: list[Job]) -> None: ...
    def whole(self, replies: list[list[Piece]]) -> dict[str, Any]: ...
    def events(self, index: int, piece: Piece) -> bytes:
        """What is sent for a piece of a reply; nothing where there is nothing to say yet."""

    def end(self) -> bytes:
        """What is sent when all replies have ended."""

    def failed(self, refused: Refused) -> bytes:
        """What is sent instead, when one cannot end."""


def event(value: Any, name: str = "") -> bytes:
    """A server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + written(value) + b"\n\n"


def written(value: Any) -> bytes:
    """As JSON. Half a pair of surrogates, which somebody may have escaped, is no character: it becomes "?"."""
    return ENCODER.encode(value).encode("utf-8", "replace")


class Whole(JSONResponse):
    """An answer in one."""

    def render(self, content: Any) -> bytes:
        return written(content)


class OpenAI(ABC):
    """What the two older routes share: who answers, and what it took."""

    object = chunk_object = prefix = ""

    def __init__(self, model: str, tokenizer: Tokenizer, wish: Wish, jobs: list[Job]) -> None:
        self.model, self.tokenizer, self.jobs, self.include_usage = model, tokenizer, jobs, wish.include_usage
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.opened: set[int] = set()  # replies of which something was sent
        # Around a choice, in every chunk: written once.
        self.before = b"data: " + written(self._head(self.chunk_object))[:-1] + b',"choices":['
        self.behind = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"

    def whole(self, replies: list[list[Piece]]) -> dict[str, Any]:
        choices = [self.choice(index, pieces) for index, pieces in enumerate(replies)]
        return {**self._head(self.object), "choices": choices, "usage": usage(self.jobs)}

    def events(self, index: int, piece: Piece) -> bytes:
        choices = self.deltas(index, piece)
        if index not in self.opened:
            self.opened.add(index)
            choices = [*self.opening(index), *choices]
        return b"".join(self.before + written(choice) + self.behind for choice in choices)

    def end(self) -> bytes:
        last = {**self._head(self.chunk_object), "choices": [], "usage": usage(self.jobs)}
        return (event(last) if self.include_usage else b"") + DONE

    def failed(self, refused: Refused) -> bytes:
        return event(refused.body) + DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """What stands before a reply's first piece."""
        return []

    @abstractmethod
    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """A whole reply."""

    @abstractmethod
    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """A piece as choices of chunks; none where there is nothing to say yet."""

    def _text(self, id: int) -> str:
        return self.tokenizer.token_bytes(id).decode("utf-8", "replace")


class ChatAnswer(OpenAI):
    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.called: set[int] = set()  # replies that have called a tool
        self.unsaid: dict[int, list[Token]] = {}  # log-probabilities of tokens whose text is held back

    def opening(self, index: int) -> list[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": first, "logprobs": None, "finish_reason": None}]

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        deltas = [self._delta(index, event.kind, event.text, event.index) for event in piece.events]
        if piece.token is not None:
            self.unsaid.setdefault(index, []).append(piece.token)
        reason = self._reason(index, piece)
        if reason is not None:
            deltas.append({})
        tokens = self.unsaid.pop(index, []) if deltas else []
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if choices:
            choices[0]["logprobs"] = self._logprobs(tokens)
            choices[-1]["finish_reason"] = reason
        return choices

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        said: dict[str, str] = {"text": "", "reasoning": ""}
        calls: list[dict[str, Any]] = []
        for event in (event for piece in pieces for event in piece.events):
            if event.kind == "call":
                calls.append(_call(event.text))
            elif event.kind == "arguments":
                calls[event.index]["function"]["arguments"] += event.text
            else:
                said[event.kind] += event.text
        message: dict[str, Any] = {"role": "assistant", "content": said["text"] if said["text"] or not calls else None}
        if said["reasoning"]:
            message |= {"reasoning_content": said["reasoning"], "reasoning": said["reasoning"]}
        if calls:
            self.called.add(index)
            message["tool_calls"] = calls
        tokens = [piece.token for piece in pieces if piece.token is not None]
        reason = self._reason(index, pieces[-1])
        return {"index": index, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def _delta(self, index: int, kind: str, text: str, call: int) -> dict[str, Any]:
        if kind == "text":
            return {"content": text}
        if kind == "reasoning":
            return {"reasoning_content": text, "reasoning": text}  # both names: clients know one or the other
        self.called.add(index)
        piece = _call(text) if kind == "call" else {"function": {"arguments": text}}
        return {"tool_calls": [{"index": call, **piece}]}

    def _reason(self, index: int, piece: Piece) -> str | None:
        return "tool_calls" if piece.finish_reason == "stop" and index in self.called else piece.finish_reason

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not tokens:
            return None
        content = [
            {**self._told(one.id, one.logprob), "top_logprobs": [self._told(*top) for top in one.top]} for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _told(self, id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(id), "logprob": finite(logprob), "bytes": list(self.tokenizer.token_bytes(id))}


class CompletionAnswer(OpenAI):
    object, chunk_object, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        reader = partial(codecs.getincrementaldecoder("utf-8"), "replace")
        self.read: dict[int, codecs.IncrementalDecoder] = defaultdict(reader)
        self.offsets: Counter[int] = Counter()  # characters of each reply so far, as far as they are whole

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        silent = not piece.events and piece.finish_reason is None and piece.token is None
        return [] if silent else [self.choice(index, [piece])]

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        text = "".join(event.text for piece in pieces for event in piece.events)
        tokens = [piece.token for piece in pieces if piece.token is not None]
        said = {"index": index, "text": text, "logprobs": self._logprobs(index, tokens)}
        return {**said, "finish_reason": pieces[-1].finish_reason}

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, Any] | None:
        if not tokens:
            return None
        offsets = []
        for one in tokens:
            offsets.append(self.offsets[index])
            self.offsets[index] += len(self.read[index].decode(self.tokenizer.token_bytes(one.id)))
        return {
            "tokens": [self._text(one.id) for one in tokens],
            "token_logprobs": [finite(one.logprob) for one in tokens],
            "top_logprobs": [{self._text(id): finite(value) for id, value in one.top} for one in tokens],
            "text_offset": offsets,
        }


def usage(jobs: list[Job]) -> dict[str, Any]:
    """Tokens of an answer. Prompts that are one (n > 1) count once, as they are computed once for the user."""
    prompts = {id(job.prompt): job for job in jobs}.values()
    prompted, made = sum(len(job.prompt) for job in prompts), sum(job.made for job in jobs)
    return {
        "prompt_tokens": prompted,
        "completion_tokens": made,
        "total_tokens": prompted + made,
        "prompt_tokens_details": {"cached_tokens": sum(job.reused for job in prompts)},
    }


def finite(logprob: float) -> float:
    """JSON has no infinity: -9999 stands for it, as in OpenAI's answers."""
    return logprob if logprob > -9999.0 else -9999.0  # NaN, which a broken model may give, too


def _call(name: str) -> dict[str, Any]:
    call = {"name": name, "arguments": ""}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call}
