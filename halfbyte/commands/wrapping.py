"""A model's text on a terminal, its lines broken between words though it comes in pieces of words."""

from __future__ import annotations

import re
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from typing import TextIO

from ..progress import rewritable
from .terminal import printable

PIECES = re.compile(r"\n|[ \t]|[^ \t\n]+")
TAB = 8
FENCE = "```"


class Writer:
    """Writes a model's text to a stream as it comes: on a terminal with whole words, elsewhere as it is."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.wrapping = Wrapping() if rewritable(stream) else None

    def write(self, text: str) -> None:
        text = printable(text, self.stream)
        print(text if self.wrapping is None else self.wrapping.take(text), end="", file=self.stream, flush=True)


class Wrapping:
    """What to send to a terminal so that no word crosses its edge. It begins where the cursor stands to the left.

    Nothing is held back: the beginning of a word that turns out to be too long for its line is taken back there, and
    written again on the next. What is longer than a line, and what stands in a block of code, the terminal breaks.
    """

    def __init__(self, width: Callable[[], int] = lambda: shutil.get_terminal_size().columns) -> None:
        self.width = width  # asked again and again: windows change
        self.column = 0  # of the cursor
        self.word = ""  # the last one, as far as it is shown
        self.line = ""  # the text's present line: the terminal may have broken it
        self.movable = False  # whether the word may go to the next line: another stands before it on this one
        self.in_code = False

    def take(self, text: str) -> str:
        columns = self.width()
        return "".join(self._placed(part, columns) for part in parts(text))

    def _placed(self, part: str, columns: int) -> str:
        if part == "\n":
            self.in_code ^= self.line.lstrip().startswith(FENCE)
            self.column, self.word, self.line, self.movable = 0, "", "", False
            return part
        self.line += part
        if self.in_code:
            return part
        edge = columns - 1  # a cursor behind the last column stands in none, and could not go back from there
        if part in (" ", "\t") or ends(self.word, part):
            self.movable |= self.word != ""
            self.word = ""
        if part in (" ", "\t"):
            room = 1 if part == " " else TAB - self.column % TAB
            fits = self.column + room <= edge  # where it does not, a new line takes its place, if a word follows
            self.column += room if fits else 0
            return part if fits else ""
        if self.movable and self.column + width(part) > edge:
            shown, part = width(self.word), self.word + part
            self.column, self.word, self.movable = 0, "", False
            return (f"\x1b[{shown}D\x1b[K" if shown else "") + "\n" + self._written(part, columns)
        return self._written(part, columns)

    def _written(self, part: str, columns: int) -> str:
        self.word += part
        for character in part:
            room = width(character)
            self.column = self.column + room if self.column + room <= columns else room
        return part


def parts(text: str) -> Iterator[str]:
    """Newlines, blanks, and the words or pieces of words between them."""
    for piece in PIECES.findall(text):
        start = 0
        for end in range(1, len(piece) + 1):
            if end == len(piece) or ends(piece[start], piece[end]):
                yield piece[start:end]
                start = end


def ends(word: str, following: str) -> bool:
    """Scripts of wide characters (Chinese, Japanese) have no blanks: a line may end before and after each of those."""
    return word != "" and (is_wide(word[0]) or is_wide(following[0])) and width(following[0]) > 0


def is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


def width(text: str) -> int:
    """The columns that a terminal needs for a text: none for accents and joiners, which stand on another character."""
    return sum(1 + is_wide(one) for one in text if unicodedata.category(one) not in ("Mn", "Me", "Cf"))
