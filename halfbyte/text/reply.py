"""A model's reply, taken apart as it comes: its reasoning, its text, its tool calls."""
# ruff: noqa: RUF001 (DeepSeek writes its tokens with ｜)

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .calls import BracedCall, Call, JsonCall, Piece, SeparatedCall, TaggedCall, Tools

Kind = Literal["text", "reasoning", "call", "arguments"]


@dataclass(frozen=True)
class Event:
    """A piece of text or reasoning, the name of a tool called, or a piece of the JSON of its arguments."""

    kind: Kind
    text: str
    index: int = 0  # which call, from 0


@dataclass(frozen=True)
class Syntax:
    """How a family marks what is not text. An empty pair of markers: it has no such thing."""

    think: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("", "")
    call_type: type[Call] = JsonCall
    silent: tuple[str, ...] = ()  # markers around calls that say nothing by themselves
    inside: tuple[str, ...] = ()  # markers within calls

    @property
    def markers(self) -> set[str]:
        return {*self.think, *self.call, *self.silent, *self.inside} - {""}


THINK = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")
GEMMA_THINK = ("<|channel>thought", "<channel|>")
GEMMA_CALL = ("<|tool_call>", "<tool_call|>")
DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def syntax(template: str) -> Syntax:
    """The syntax that a chat template writes when it is given reasoning and calls."""
    if GEMMA_THINK[0] in template or GEMMA_CALL[0] in template:
        return Syntax(GEMMA_THINK, GEMMA_CALL, BracedCall, inside=(BracedCall.QUOTE, "<|channel>"))
    think = THINK if THINK[1] in template else ("", "")
    if DEEPSEEK_CALL[0] in template:
        return Syntax(think, DEEPSEEK_CALL, SeparatedCall, silent=DEEPSEEK_CALLS, inside=(SeparatedCall.SEPARATOR,))
    if TOOL_CALL[0] in template:
        return Syntax(think, TOOL_CALL, TaggedCall if "<function=" in template else JsonCall)
    return Syntax(think)


class Reply:
    """push(text) and finish() give events. `thinking`: the prompt has opened the reasoning already.

    Calls are looked for only where tools were offered. Newlines next to reasoning and calls belong to the syntax, so
    they are dropped. Reasoning is opened only before there is text: later, the same characters are a quotation.
    """

    def __init__(self, syntax: Syntax, tools: Tools | None = None, thinking: bool = False) -> None:
        self.syntax, self.tools = syntax, tools
        self.state: Kind = "reasoning" if thinking else "text"
        self.held = ""
        self.fresh = True  # no text since the start, the reasoning or the last call
        self.after_marker = thinking  # and the newlines here are the marker's
        self.calls = 0
        self.call: Call = syntax.call_type(())

    def push(self, text: str) -> list[Event]:
        self.held += text
        events: list[Event] = []
        while marker := self._advance(events):
            self._enter(marker, events)
        return _joined(events)

    def finish(self, cut: bool = False) -> list[Event]:
        """What was held back. A call that was cut off is given as far as it came; `cut`: the model did not end here."""
        events: list[Event] = []
        rest, self.held = self.held, ""
        if self.state == "call":
            self._from_call([*self.call.push(rest), *self.call.end(cut)], events, closing="")
        else:
            self._give(rest.rstrip("\n") if self.state == "reasoning" else rest, events)
        return _joined(events)

    def _advance(self, events: list[Event]) -> str | None:
        """Give what is sure; at a marker, remove it and return it."""
        opening = self.syntax.think[0]
        if opening and self.state == "text" and self.fresh:
            start = self.held.lstrip("\n")
            if start.startswith(opening):
                self.held = start.removeprefix(opening)
                return opening
            if opening.startswith(start):
                return None
        watched = self._watched()
        place, marker = min(
            ((self.held.index(marker), marker) for marker in watched if marker in self.held),
            default=(len(self.held) - _beginning(self.held, watched), None),
        )
        ready, rest = self.held[:place], self.held[place:]
        if self.state == "call":
            self._from_call(self.call.push(ready), events)
        else:
            # Newlines before a marker are dropped, so they wait while one may come.
            given = ready.rstrip("\n") if watched else ready
            rest = rest if marker else ready[len(given) :] + rest
            self._give(given, events)
        self.held = rest.removeprefix(marker or "")
        return marker

    def _watched(self) -> list[str]:
        if self.state == "text":
            return [marker for marker in (self.syntax.call[0], *self.syntax.silent) if marker and self.tools]
        return [self.syntax.think[1] if self.state == "reasoning" else self.syntax.call[1]]

    def _enter(self, marker: str, events: list[Event]) -> None:
        if marker == self.syntax.think[0]:
            self.state = "reasoning"
        elif marker == self.syntax.call[0]:
            self.state, self.call = "call", self.syntax.call_type(self.tools or ())
        else:
            if self.state == "call":
                self._from_call(self.call.end(), events)
            self.state = "text"
        self.fresh = self.after_marker = True

    def _give(self, text: str, events: list[Event]) -> None:
        text = text.lstrip("\n") if self.after_marker else text
        if text:
            self.fresh = self.after_marker = False
            events.append(Event(self.state, text))

    def _from_call(self, pieces: Iterable[Piece], events: list[Event], closing: str | None = None) -> None:
        for kind, text in pieces:
            if kind == "text":  # not a call after all
                closing = self.syntax.call[1] if closing is None else closing
                events.append(Event("text", f"{self.syntax.call[0]}{text}{closing}"))
            else:
                self.calls += kind == "call"
                events.append(Event("call" if kind == "call" else "arguments", text, self.calls - 1))


def _beginning(text: str, markers: Iterable[str]) -> int:
    """The length of the longest end of the text with which a marker begins."""
    return max(
        (n for marker in markers for n in range(1, min(len(marker), len(text) + 1)) if text.endswith(marker[:n])),
        default=0,
    )


def _joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one; names stay apart."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if last and event.kind == last.kind != "call" and event.index == last.index:
            joined[-1] = Event(event.kind, last.text + event.text, event.index)
        else:
            joined.append(event)
    return joined
