"""Rows of measurements as they come, in one of four forms: for people (md), for spreadsheets (csv), for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

FORMS = ("md", "csv", "json", "jsonl")


class Table:
    """`columns` and the room that their cells usually take; those in `words` stand to the left, numbers to the right.

    `shown` makes the cells of a row for people. JSON comes at the end, as one array.
    """

    def __init__(
        self,
        form: str,
        columns: dict[str, int],
        words: Collection[str],
        shown: Callable[[dict[str, Any]], dict[str, str]],
    ) -> None:
        self.form, self.columns, self.words, self.shown = form, columns, words, shown
        self.rows = list[dict[str, Any]]()
        self.widths: list[int] = []

    def head(self, title: str) -> None:
        """Rows that follow stand below this title, and below the names of the columns once more, for people."""
        if self.form == "md":
            print(f"\n{title}\n" if self.rows else f"{title}\n")
            self.widths = []

    def add(self, row: dict[str, Any]) -> None:
        first = not self.rows
        self.rows.append(row)
        if self.form == "jsonl":
            print(json.dumps(row), flush=True)
        elif self.form == "csv":
            print(*([comma_line(row)] if first else []), comma_line(row.values()), sep="\n", flush=True)
        elif self.form == "md":
            cells = self.shown(row)
            if not self.widths:
                self.widths = [max(width, len(cells[name])) for name, width in self.columns.items()]
                print(self._line({name: name for name in cells}), self._line(dict.fromkeys(cells, "-")), sep="\n")
            print(self._line(cells), flush=True)

    def _line(self, cells: dict[str, str]) -> str:
        padded = []
        for width, (name, cell) in zip(self.widths, cells.items(), strict=True):
            padded.append("-" * width if cell == "-" else f"{cell:{'<' if name in self.words else '>'}{width}}")
        return f"| {' | '.join(padded)} |"

    def end(self) -> None:
        if self.form == "json":
            print(json.dumps(self.rows, indent=1), flush=True)


def comma_line(values: Iterable[Any]) -> str:
    """One line of CSV; what is no number or text stands there as JSON."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(
        json.dumps(value) if isinstance(value, list | dict) else "" if value is None else value for value in values
    )
    return text.getvalue()
