"""How far something long is: a bar that is rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from .errors import size

PLAIN_EVERY = 2.0  # seconds between lines where there is no terminal
REDRAW_EVERY = 0.1  # seconds between two states of a bar
PATIENCE = 0.3  # seconds that may pass without a word: what is done by then shows no bar
WIDTH = 24  # of a bar

Progress = Callable[[int, int], None]
_passing = False  # whether the terminal's present line is one to rewrite


def bar(what: str) -> Progress:
    """A callback (done, total) in bytes: a bar that is rewritten on a terminal, a line now and then elsewhere.

    Told that 0 is done, it shows itself at once: that announces what takes long.
    """
    return _progress(_share(what, size, lambda rate: f"{size(int(rate))}/s"))


def counter(what: str, unit: str = "") -> Progress:
    """The same of things that are counted."""
    amount, speed = lambda total: f"{total} {unit}".rstrip(), lambda rate: f"{rate:.0f} {unit}".rstrip() + "/s"
    return _progress(_share(what, amount, speed))


def prompt_progress() -> Progress:
    return counter("reading the prompt", "tokens")


def kernels(device: str = "cpu") -> Progress:
    """The same of kernels that are compiled: few and slow, so they are counted one by one."""
    kind = "CPU" if device == "cpu" else "GPU"
    return _progress(lambda done, total, seconds: f"compiling {kind} kernels, once: {done}/{total}")


State = Callable[[int, int, float], str]  # (done, total, seconds) -> what a line says


def _share(what: str, amount: Callable[[int], str], speed: Callable[[float], str]) -> State:
    def state(done: int, total: int, seconds: float) -> str:
        text = f"{what} {done / max(total, 1):4.0%} of {amount(total)}"
        return text + (f", {speed(done / max(seconds, 1e-9))}" if done else "")

    return state


def _progress(state: State) -> Progress:
    start = said = time.monotonic()
    terminal, shown = rewritable(sys.stderr), False

    def progress(done: int, total: int) -> None:
        nonlocal said, shown
        now = time.monotonic()
        if done >= total:
            passing("")
            return
        patience = PLAIN_EVERY if not terminal else REDRAW_EVERY if shown else PATIENCE if done else 0.0
        if now - said < patience:
            return
        text = state(done, total, now - start)
        if terminal:
            filled = int(WIDTH * done / max(total, 1))
            passing(f"[{'█' * filled}{'·' * (WIDTH - filled)}] {text}")
        else:
            print(text, file=sys.stderr, flush=True)
        said, shown = now, True

    return progress


def passing(text: str) -> None:
    """What is being done, on one line of a terminal that the next call rewrites; nothing elsewhere.

    "" takes the line away; where none stands, what was printed there stays.
    """
    global _passing
    if rewritable(sys.stderr) and (text or _passing):
        room = shutil.get_terminal_size().columns - 1  # a line that wraps could not be taken back
        print(f"\r\x1b[K{text[:room]}", end="", file=sys.stderr, flush=True)
        _passing = bool(text)


def rewritable(stream: TextIO) -> bool:
    """Whether what stands on a stream can be taken back."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def say(text: str) -> None:
    """A line above what is passing."""
    passing("")
    print(text, file=sys.stderr, flush=True)
