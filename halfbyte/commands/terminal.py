"""What commands share: how they show text, tables and results, on a terminal and elsewhere."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

from ..progress import rewritable

# A model's text could steer the terminal it is shown on. Control characters are shown as their pictures instead.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def colours(stream: TextIO) -> bool:
    """Whether a stream takes colours: on a terminal that knows them, unless NO_COLOR says otherwise."""
    return rewritable(stream) and not os.environ.get("NO_COLOR")


def printable(text: str, stream: TextIO) -> str:
    """A model's text as a stream may have it: on a terminal without control characters, elsewhere as it is."""
    return text.translate(PICTURES) if stream.isatty() else text


def tolerate_any_text() -> None:
    """Text that a stream's encoding does not have becomes question marks, instead of ending the program."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def show(values: dict[str, Any], rows: list[tuple[str, str]], as_json: bool) -> None:
    print(json.dumps(values, indent=1) if as_json else table(rows), flush=True)
