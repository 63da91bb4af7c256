"""As much of a terminal as our commands use: text and control sequences in, a grid of characters and looks out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

PALETTE = (
    "#484f58", "#ff7b72", "#7ee787", "#d29922", "#79c0ff", "#d2a8ff", "#56d4dd", "#c9d1d9",
    "#6e7681", "#ffa198", "#aff5b4", "#e3b341", "#a5d6ff", "#e2c5ff", "#b3f0ff", "#ffffff",
)  # fmt: skip
TOKEN = re.compile(
    r"\x1b\[[?>=]?(?P<numbers>[\d;]*)(?P<final>[@-~])"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # a title
    r"|\x1b[()][0-9A-Za-z]|\x1b[=>]"  # character sets, keypads
    r"|(?P<control>[\x00-\x1a\x7f])|(?P<text>[^\x00-\x1f\x7f]+)"
)


class Look(NamedTuple):
    """How a cell is drawn. Colours are written as in SVG; None is the terminal's own."""

    fore: str | None = None
    back: str | None = None
    bold: bool = False
    dim: bool = False
    italic: bool = False
    underline: bool = False
    inverse: bool = False


class Cell(NamedTuple):
    character: str
    look: Look = Look()


BLANK = Cell(" ")
LOOKS = {
    1: {"bold": True}, 2: {"dim": True}, 3: {"italic": True}, 4: {"underline": True}, 7: {"inverse": True},
    22: {"bold": False, "dim": False}, 23: {"italic": False}, 24: {"underline": False}, 27: {"inverse": False},
    39: {"fore": None}, 49: {"back": None},
    **{start + i: {side: PALETTE[first + i]} for start, side, first in
       ((30, "fore", 0), (90, "fore", 8), (40, "back", 0), (100, "back", 8)) for i in range(8)},
}  # fmt: skip


class Screen:
    """A sequence that it does not know is an error, not a guess."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.cells = [[BLANK] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.look = Look()
        self.pending = ""  # the beginning of a sequence whose end has not come yet

    def feed(self, text: str) -> None:
        text, place = self.pending + text, 0
        while place < len(text) and (token := TOKEN.match(text, place)):
            if token["text"]:
                self.write(token["text"])
            elif token["control"]:
                self.control(token["control"])
            elif token["final"] and token["final"] not in "hl":  # modes change nothing that we draw
                self.sequence(token["final"], [int(number or 0) for number in token["numbers"].split(";")])
            place = token.end()
        self.pending = text[place:]
        if len(self.pending) > 64:
            raise ValueError(f"the recorder does not know {self.pending[:16]!r}")

    def write(self, text: str) -> None:
        for character in text:
            if self.column == self.columns:
                self.column = 0
                self.line_down()
            self.cells[self.row][self.column] = Cell(character, self.look)
            self.column += 1

    def control(self, character: str) -> None:
        match character:
            case "\n":
                self.line_down()
            case "\r":
                self.column = 0
            case "\b":
                self.column = max(self.column - 1, 0)
            case "\t":
                self.column = min(self.column // 8 * 8 + 8, self.columns - 1)

    def line_down(self) -> None:
        if self.row < self.rows - 1:
            self.row += 1
        else:
            self.cells = [*self.cells[1:], [BLANK] * self.columns]

    def sequence(self, final: str, numbers: list[int]) -> None:
        count = max(numbers[0], 1)
        match final:
            case "A":
                self.row = max(self.row - count, 0)
            case "B":
                self.row = min(self.row + count, self.rows - 1)
            case "C":
                self.column = min(self.column + count, self.columns - 1)
            case "D":
                self.column = max(self.column - count, 0)
            case "G":
                self.column = min(count, self.columns) - 1
            case "H":
                self.row = min(count, self.rows) - 1
                self.column = min(max(*numbers[1:2], 1, 1), self.columns) - 1
            case "K":
                self.erase(self.row * self.columns, numbers[0], (self.row + 1) * self.columns)
            case "J":
                self.erase(0, numbers[0], self.rows * self.columns)
            case "m":
                self.restyle(iter(numbers))
            case _:
                raise ValueError(f"the recorder does not know the control sequence that ends in {final!r}")

    def erase(self, first: int, kind: int, last: int) -> None:
        """Of the cells first to last: from the cursor on (0), up to the cursor (1), all (2)."""
        cursor = self.row * self.columns + self.column
        for place in range(cursor if kind == 0 else first, cursor + 1 if kind == 1 else last):
            self.cells[place // self.columns][place % self.columns] = BLANK

    def restyle(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            if number == 0:
                self.look = Look()
            elif number in (38, 48):
                self.look = self.look._replace(**{"fore" if number == 38 else "back": colour(numbers)})
            else:
                self.look = self.look._replace(**LOOKS.get(number, {}))

    def before_cursor(self) -> str:
        return "".join(cell.character for cell in self.cells[self.row][: self.column])

    def text(self) -> str:
        return "\n".join("".join(cell.character for cell in row).rstrip() for row in self.cells).rstrip()


def colour(numbers: Iterator[int]) -> str:
    """What follows 38 or 48: 5;n of the 256, or 2;r;g;b."""
    if next(numbers) == 2:
        return "#{:02x}{:02x}{:02x}".format(*(next(numbers) for _ in range(3)))
    index = next(numbers)
    if index < 16:
        return PALETTE[index]
    if index >= 232:
        return "#" + f"{8 + 10 * (index - 232):02x}" * 3
    steps = (0, 95, 135, 175, 215, 255)
    return "#" + "".join(f"{steps[(index - 16) // size % 6]:02x}" for size in (36, 6, 1))
