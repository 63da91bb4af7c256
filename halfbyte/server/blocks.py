"""A reply as a row of blocks, as the newer APIs have it: reasoning, text and calls, each begun, continued and ended."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ..text.reply import Event

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    kind: Kind
    index: int  # in the reply, from 0
    name: str = ""  # of the tool that is called
    text: str = ""  # so far: what is said, or the JSON of arguments
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    done: bool = False


class Change(NamedTuple):
    what: Literal["begin", "more", "end"]
    block: Block  # at its beginning without what it comes to say
    text: str = ""  # that is new


class Blocks:
    def __init__(self) -> None:
        self.all: list[Block] = []

    def push(self, events: Iterable[Event]) -> list[Change]:
        changes: list[Change] = []
        for event in events:
            kind: Kind = "call" if event.kind == "call" or event.kind == "arguments" else event.kind
            if event.kind == "call" or not self.all or self.all[-1].done or self.all[-1].kind != kind:
                changes += self.end()
                self.all.append(Block(kind, len(self.all), event.text if event.kind == "call" else ""))
                changes.append(Change("begin", replace(self.all[-1])))
            if event.kind != "call" and event.text:
                self.all[-1].text += event.text
                changes.append(Change("more", self.all[-1], event.text))
        return changes

    def end(self) -> list[Change]:
        """The last block is over, where there is one."""
        if not self.all or self.all[-1].done:
            return []
        self.all[-1].done = True
        return [Change("end", self.all[-1])]

    @property
    def called(self) -> bool:
        return any(block.kind == "call" for block in self.all)
