"""Messages from a person at a terminal, or from a pipe: lines, several lines at once, and what was said before."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from ..files import write_whole
from .interrupts import noticed

QUOTES = '"""'  # opens and closes a message of several lines
REMEMBERED = 1000  # messages that the arrow keys find again
SETTINGS = (
    (0x700, "enable-bracketed-paste on"),  # pasted newlines do not send the message
    (0x802, "enable-active-region off"),  # pasted text looks like typed text
)  # GNU readline's, and the version that brought them


class Input:
    """`message()` is the next message; EOFError where there is none. A line that ends in \\ goes on in the next one.

    With readline (Linux, macOS) a terminal's lines can be edited, pasted text keeps its newlines, and messages of
    earlier chats are found with the arrow keys.
    """

    def __init__(self, interactive: bool, prompt: str = "> ", more: str = ". ") -> None:
        self.interactive, self.prompt, self.more = interactive, prompt, more
        self.history = History(_readline() if interactive else None)
        if self.history.readline is None:  # nobody to read the marks around what takes no room
            self.prompt = prompt.replace("\001", "").replace("\002", "")

    @property
    def begun(self) -> bool:
        """Whether the line that is being typed has something in it, as far as that can be known."""
        return self.history.readline is not None and bool(self.history.readline.get_line_buffer())

    def message(self) -> str:
        text = self._whole(self._line(self.prompt))
        if text.strip():
            self.history.add(text)
        return text

    def _whole(self, line: str) -> str:
        if line.lstrip().startswith(QUOTES):
            return self._quoted(line.lstrip().removeprefix(QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._line(self.more))
        return "\n".join(lines)

    def _quoted(self, line: str) -> str:
        lines = [line]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self._line(self.more))
            except EOFError:
                if self.interactive:
                    raise
                return "\n".join(lines)  # a pipe that ended: what it brought is the message
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if self.interactive:
            with noticed():
                return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


class History:
    """Messages of this and earlier chats, in a file for the user alone: a JSON string each, as they may have newlines.

    A history that cannot be read or written is none; the chat goes on.
    """

    def __init__(self, readline: ModuleType | None) -> None:
        self.readline, self.path = readline, state_folder() / "history"
        if readline is None:
            return
        readline.set_auto_history(False)  # a message is remembered whole, not by its lines
        with suppress(OSError, ValueError):
            lines = self.path.read_text(encoding="utf-8").splitlines()
            for text in map(json.loads, lines[-REMEMBERED:]):
                readline.add_history(str(text))
            if len(lines) > 2 * REMEMBERED:
                write_whole(self.path, "\n".join([*lines[-REMEMBERED:], ""]).encode(), "the history")

    def add(self, text: str) -> None:
        if self.readline is None:
            return
        self.readline.add_history(text)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as file:
                file.write(json.dumps(text) + "\n")


def state_folder() -> Path:
    """Where this user's programs keep what they remember."""
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "halfbyte"
    given = os.environ.get("XDG_STATE_HOME")
    return Path(given or os.path.join(os.path.expanduser("~"), ".local", "state")) / "halfbyte"


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # Windows, whose console edits lines by itself
        return None
    version = 0 if "libedit" in (readline.__doc__ or "") else getattr(readline, "_READLINE_VERSION", 0)
    for since, setting in SETTINGS:
        if version >= since:  # another one would complain about a name it does not know
            readline.parse_and_bind(f"set {setting}")
    return readline
