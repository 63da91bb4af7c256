"""Ids to text as they come: never half a character, never a piece of a stop string, at constant cost an id.

All that was given out is, in the end, exactly what the tokenizer decodes of all ids at once.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from tokenizers import Tokenizer

from .. import limits
from ..errors import shown

WINDOW = 64  # ids after which a tokenizer that gives no text is not waited for


class Detokenizer(Protocol):
    def push(self, id: int) -> str: ...
    def finish(self) -> str: ...
    def bytes_of(self, id: int) -> bytes:
        """What one token adds to a text, which may be a part of a character."""


class Decoder:
    """push(id) gives the text that is sure by now, finish() the rest. `stopped` is the stop string that was met.

    Text before a stop string is given, the stop string and what follows are not. Which one is met first is decided
    character by character, so it does not depend on how the text is cut into tokens.
    """

    def __init__(self, text: Detokenizer, stop: str | Iterable[str] | Stops = (), hidden: Iterable[int] = ()) -> None:
        self._text = text
        self._stops = stop if isinstance(stop, Stops) else Stops([stop] if isinstance(stop, str) else stop)
        self._hidden = frozenset(hidden)

    @property
    def stopped(self) -> str | None:
        return self._stops.met

    def push(self, id: int) -> str:
        if self._stops.met is not None or id in self._hidden:
            return ""
        text = self._text.push(id)
        return self._stops.push(text) if self._stops.stops else text

    def finish(self) -> str:
        return "" if self.stopped is not None else self._stops.push(self._text.finish()) + self._stops.finish()


class Stops:
    """Looks for stop strings with one Knuth-Morris-Pratt automaton each, and holds back what may become one."""

    def __init__(
        self, stops: Iterable[str], most: int = limits.STOP_STRINGS, most_bytes: int = limits.STOP_BYTES
    ) -> None:
        self.stops = list(stops)
        if len(self.stops) > most:
            raise ValueError(f"{len(self.stops)} stop strings, at most {most} are taken.")
        for stop in self.stops:
            if not isinstance(stop, str) or not 0 < len(stop.encode("utf-8", "replace")) <= most_bytes:
                raise ValueError(f"A stop string must have 1 to {most_bytes} bytes, this is {shown(stop)}.")
        self.stops.sort(key=len, reverse=True)  # of two that end together the longer is met
        self.borders = [_borders(stop) for stop in self.stops]
        self.matched = [0] * len(self.stops)
        self.held = ""
        self.met: str | None = None

    def push(self, text: str) -> str:
        if not self.stops:
            return text
        self.held += text
        for position, character in enumerate(text, start=len(self.held) - len(text) + 1):
            for which, stop in enumerate(self.stops):
                self._advance(which, character)
                if self.matched[which] == len(stop):
                    self.met = stop
                    return self.held[: position - len(stop)]
        sure = len(self.held) - max(self.matched)
        given, self.held = self.held[:sure], self.held[sure:]
        return given

    def finish(self) -> str:
        given, self.held = ("" if self.met is not None else self.held), ""
        return given

    def _advance(self, which: int, character: str) -> None:
        stop, matched = self.stops[which], self.matched[which]
        while matched and stop[matched] != character:
            matched = self.borders[which][matched - 1]
        self.matched[which] = matched + (stop[matched] == character)


def _borders(word: str) -> list[int]:
    """For each prefix of the word, the length of its longest proper prefix that is also its suffix."""
    borders, length = [0] * len(word), 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        length += word[i] == word[length]
        borders[i] = length
    return borders


def detokenizer(tokens: Tokenizer) -> Callable[[], Detokenizer]:
    """What streams this tokenizer's text; the bytes and strings of its tokens are looked up once and shared."""
    spec: dict[str, Any] = json.loads(tokens.decoder.__getstate__()) if tokens.decoder is not None else {}
    steps = spec["decoders"] if spec.get("type") == "Sequence" else [spec]
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        table: dict[int, bytes] = {}
        texts: dict[int, str] = {}
        return lambda: ByteLevel(tokens, table, texts)
    if (fallback := _fallback(steps)) is not None:
        words: dict[int, str | int] = {}
        return lambda: ByteFallback(tokens, words, *fallback)
    return lambda: Windowed(tokens)


class ByteLevel:
    """Every token is bytes (GPT-2, Qwen, DeepSeek); characters may span tokens. `texts`: of those that are ASCII."""

    def __init__(self, tokens: Tokenizer, table: dict[int, bytes], texts: dict[int, str]) -> None:
        self.tokens, self.table, self.texts = tokens, table, texts
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.between = False  # characters

    def push(self, id: int) -> str:
        if not self.between and (text := self.texts.get(id)) is not None:
            return text
        data = self.bytes_of(id)
        text = self.utf8.decode(data)
        self.between = self.utf8.getstate() != (b"", 0)
        if data.isascii():
            self.texts[id] = data.decode("ascii")
        return text

    def finish(self) -> str:
        return self.utf8.decode(b"", final=True)

    def bytes_of(self, id: int) -> bytes:
        data = self.table.get(id)
        if data is None:
            data = self.table[id] = _bytes(self.tokens.id_to_token(id) or "")
        return data


class ByteFallback:
    """Every token is a string, with a sign for spaces (Gemma, Llama); characters without a token come as <0xE2> etc.

    A run of bytes that is not UTF-8 decodes to one U+FFFD a byte, so a run is sure only when it has ended.
    """

    def __init__(self, tokens: Tokenizer, words: dict[int, str | int], space: str, strip: int) -> None:
        self.tokens, self.words, self.space = tokens, words, space
        self.strip = strip  # spaces to remove from the start of the text
        self.run = bytearray()

    def push(self, id: int) -> str:
        word = self._word(id)
        if word is None:
            return ""  # no token: it does not even end a run
        if isinstance(word, int):
            self.run.append(word)
            return ""
        return self._stripped(self._end_run() + word)

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def bytes_of(self, id: int) -> bytes:
        word = self._word(id)
        return bytes([word]) if isinstance(word, int) else (word or "").encode()

    def _word(self, id: int) -> str | int | None:
        if id not in self.words and (token := self.tokens.id_to_token(id)) is not None:
            self.words[id] = _word(token, self.space)
        return self.words.get(id)

    def _end_run(self) -> str:
        run, self.run = self.run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while text and self.strip:
            if text[0] != " ":
                self.strip = 0
            else:
                text, self.strip = text[1:], self.strip - 1
        return text


class Windowed:
    """Any other tokenizer: decodes the last few ids again, and gives what the newest added.

    The ids before it stay in the window, since what stands at the start of a text may decode differently.
    """

    def __init__(self, tokens: Tokenizer) -> None:
        self.tokens = tokens
        self.ids: list[int] = []
        self.known = 0  # ids whose text was given

    def push(self, id: int) -> str:
        self.ids.append(id)
        return self._new(force=len(self.ids) - self.known >= WINDOW)

    def finish(self) -> str:
        return self._new(force=True)

    def bytes_of(self, id: int) -> bytes:
        return self._decode([id]).encode()

    def _new(self, force: bool) -> str:
        before = self._decode(self.ids[: self.known])
        text = self._decode(self.ids)
        if not force and (len(text) <= len(before) or text.endswith("\ufffd")):
            return ""
        self.ids = self.ids[self.known :]
        self.known = len(self.ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokens.decode(ids, skip_special_tokens=False)
        return text


def _fallback(steps: list[dict[str, Any]]) -> tuple[str, int] | None:
    """The sign for a space and the spaces removed from the start, where these steps are those of byte fallback."""
    rest, space, strip = list(steps), "", 0
    if rest and rest[0].get("type") == "Replace" and rest[0].get("content") == " ":
        space = rest.pop(0)["pattern"].get("String", "")
        if not space:
            return None
    if rest and rest[-1].get("type") == "Strip" and (rest[-1]["content"], rest[-1]["stop"]) == (" ", 0):
        strip = rest.pop()["start"]
    return (space, strip) if [step.get("type") for step in rest] == ["ByteFallback", "Fuse"] else None


def _word(token: str, space: str) -> str | int:
    """A token's text, or the byte that it is."""
    if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
        return int(byte[1], 16)
    return token.replace(space, " ") if space else token


def _bytes(token: str) -> bytes:
    """A byte-level token's bytes; one with other characters (an added token) stands for itself."""
    try:
        return bytes(BYTES[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _byte_characters() -> dict[str, int]:
    """The character that stands for each byte: printable ones for themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTES = _byte_characters()
