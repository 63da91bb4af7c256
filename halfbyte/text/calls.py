"""The ways models write a tool call, read as it comes. Each reader gets the text between a call's markers.

push() and end() return ("call", name), once, and ("arguments", piece of JSON). What cannot be read is returned by end()
as ("text", ...) for the reader to see, since hiding it would lose the model's words. A call that was `cut` before its
end is left open, so that nobody takes half of it for all: its arguments are no JSON.
"""
# ruff: noqa: RUF001 (DeepSeek writes its tokens with ｜)

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .alternatives import Schema, declared
from .values import PRINTED_NULL, is_json, loaded, parsed, textual, typed, written

Piece = tuple[str, str]
Tools = Sequence[Mapping[str, Any]]


class Call(Protocol):
    def __init__(self, tools: Tools) -> None: ...
    def push(self, text: str) -> list[Piece]: ...
    def end(self, cut: bool = False) -> list[Piece]: ...


class JsonCall:
    """{"name": "f", "arguments": {...}} (Qwen3). Arguments are passed on as they come, but for the last brace."""

    HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=[{\[])')

    def __init__(self, tools: Tools) -> None:
        self.body, self.start, self.given = "", 0, 0  # arguments begin at start, and were given up to given

    def push(self, text: str) -> list[Piece]:
        self.body += text
        pieces: list[Piece] = []
        if not self.start and (head := self.HEAD.match(self.body)):
            self.start = self.given = head.end()
            pieces.append(("call", json.loads(head[1], strict=False)))
        if self.start:
            pieces += self._arguments(self.given + len(self.body[self.given :].rstrip("}] \t\r\n")))
        return pieces

    def end(self, cut: bool = False) -> list[Piece]:
        if not self.start:
            return self._whole()
        end = len(self.body.rstrip())
        inner = len(self.body[:end].removesuffix("}").rstrip())
        closed = is_json(self.body[self.start : inner]) or not is_json(self.body[self.start : end])
        return self._arguments(inner if closed else end)

    def _arguments(self, end: int) -> list[Piece]:
        piece, self.given = self.body[self.given : end], max(end, self.given)
        return [("arguments", piece)] if piece else []

    def _whole(self) -> list[Piece]:
        """Keys in another order, or arguments inside a string."""
        try:
            call = parsed(self.body)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return [("text", self.body)]
        return [("call", str(name)), ("arguments", arguments if isinstance(arguments, str) else written(arguments))]


class SeparatedCall:
    """f<｜tool▁sep｜>{...} (DeepSeek V3.1), or function<｜tool▁sep｜>f, newline, ```json, {...}, ``` (V3 and R1)."""

    SEPARATOR = "<｜tool▁sep｜>"
    FENCED = re.compile(r"\s*([^\n]+?)\s*\n```(?:json)?\n(.*?)(?:\n```\s*)?", re.DOTALL)

    def __init__(self, tools: Tools) -> None:
        self.head, self.named, self.tail = "", False, ""

    def push(self, text: str) -> list[Piece]:
        if self.named:
            return self._arguments(text)
        self.head += text
        name, separator, rest = self.head.partition(self.SEPARATOR)
        if not separator or name.strip() == "function":
            return []
        self.named = True
        return [("call", name.strip()), *self._arguments(rest.lstrip())]

    def end(self, cut: bool = False) -> list[Piece]:
        if self.named:
            return []
        kind, _, rest = self.head.partition(self.SEPARATOR)
        if (fenced := self.FENCED.fullmatch(rest)) and kind.strip() == "function":
            return [("call", fenced[1]), ("arguments", fenced[2])]
        return [("text", self.head)]

    def _arguments(self, text: str) -> list[Piece]:
        """White space at the end waits for what follows; at the very end it is dropped."""
        text = self.tail + text
        sure = len(text.rstrip())
        self.tail = text[sure:]
        return [("arguments", text[:sure])] if sure else []


class TaggedCall:
    """<function=f> <parameter=k> value </parameter> ... </function> (Qwen3-Coder, Qwen3.5), a parameter at a time."""

    NAME = re.compile(r"<function=\s*([^>\s]+)\s*>")
    KEY = re.compile(r"<parameter=\s*([^>\n]+?)\s*>")
    END = "</parameter>"

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.body, self.read, self.count = "", 0, 0
        self.name: str | None = None

    def push(self, text: str) -> list[Piece]:
        searched = max(0, len(self.body) - len(self.END))  # no closing tag stands before it
        self.body += text
        pieces: list[Piece] = []
        if self.name is None:
            if not (named := self.NAME.search(self.body)):
                return []
            self.name, self.read = named[1], named.end()
            pieces.append(("call", self.name))
        while (end := self.body.find(self.END, max(self.read, searched))) >= 0 and (
            key := self.KEY.search(self.body, self.read, end)
        ):
            pieces.append(self._parameter(key[1], self.body[key.end() : end]))
            self.read = end + len(self.END)
        return pieces

    def end(self, cut: bool = False) -> list[Piece]:
        if self.name is None:
            return [("text", self.body)]
        pieces: list[Piece] = []
        key = self.KEY.search(self.body, self.read)
        if cut and (key or "</function>" not in self.body[self.read :]):
            return self._open(key[1], self.body[key.end() :]) if key else [] if self.count else [("arguments", "{")]
        if key:  # its closing tag was forgotten
            pieces.append(self._parameter(key[1], self.body[key.end() :].partition("</function>")[0]))
        return [*pieces, ("arguments", "}" if self.count else "{}")]

    def _parameter(self, key: str, text: str) -> Piece:
        value = typed(text.removeprefix("\n").removesuffix("\n"), self._schemas(key))
        return self._field(key, written(value))

    def _open(self, key: str, text: str) -> list[Piece]:
        """The beginning of a value, without that of its closing tag."""
        end = "\n" + self.END
        tag = next((n for n in range(len(end), 0, -1) if text.endswith(end[:n])), 0)
        text = text[: len(text) - tag].removeprefix("\n")
        said = written(text)[:-1] if textual(self._schemas(key)) else text.rstrip("}] \t\r\n")
        if said:
            return [self._field(key, said)]
        return [] if self.count else [("arguments", "{")]

    def _field(self, key: str, value: str) -> Piece:
        self.count += 1
        return "arguments", f"{', ' if self.count > 1 else '{'}{written(key)}: {value}"

    def _schemas(self, key: str) -> list[Schema]:
        for tool in self.tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and function.get("name") == self.name:
                return declared(function.get("parameters"), key)
        return []


class BracedCall:
    """call:f{k:<|"|>text<|"|>,n:2} (Gemma 4): keys without quotes, strings between tokens of their own."""

    QUOTE = '<|"|>'
    NAME = re.compile(r"\s*call:([^{]+)(?=\{)")

    def __init__(self, tools: Tools) -> None:
        self.body, self.start = "", 0

    def push(self, text: str) -> list[Piece]:
        self.body += text
        if self.start or not (named := self.NAME.match(self.body)):
            return []
        self.start = named.end()
        return [("call", named[1].strip())]

    def end(self, cut: bool = False) -> list[Piece]:
        if not self.start:
            return [("text", self.body)]
        body = self.body.rstrip()
        try:
            value, end = self._value(body, self.start)
        except (IndexError, ValueError, RecursionError):
            value, end = None, -1
        return [("arguments", written(value) if end == len(body) else body[self.start :])]

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        """The value at a place, and the place after it."""
        for quote in (self.QUOTE, '"'):
            if text.startswith(quote, at):
                end = text.index(quote, at + len(quote))
                return text[at + len(quote) : end], end + len(quote)
        if text[at] == "{":
            fields: dict[str, Any] = {}
            at = self._next(text, at, "}")
            while text[at] != "}":
                key, at = self._key(text, at)
                fields[key], at = self._value(text, at)
                at = self._next(text, at, "}", ",")
            return fields, at + 1
        if text[at] == "[":
            items: list[Any] = []
            at = self._next(text, at, "]")
            while text[at] != "]":
                item, at = self._value(text, at)
                items.append(item)
                at = self._next(text, at, "]", ",")
            return items, at + 1
        bare = re.compile(r"[^,}\]]*").match(text, at)
        assert bare is not None  # it matches nothing too
        word = bare[0].strip()
        return (None if word == PRINTED_NULL else loaded(word)), bare.end()

    def _key(self, text: str, at: int) -> tuple[str, int]:
        end = text.index(":", at)
        return text[at:end].strip().removeprefix(self.QUOTE).removesuffix(self.QUOTE).strip('"'), _skip(text, end + 1)

    @staticmethod
    def _next(text: str, at: int, closing: str, separator: str = "{[") -> int:
        """The place after an opening bracket or a separator, or that of the closing bracket."""
        at = _skip(text, at)
        if text[at] == closing:
            return at
        if text[at] not in separator:
            raise ValueError
        return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at
