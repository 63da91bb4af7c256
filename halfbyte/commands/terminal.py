"""What commands share: how they show progress, sizes and results."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

PLAIN_EVERY = 2.0  # seconds between lines where there is no terminal


def bar(what: str) -> Callable[[int, int], None]:
    """A callback (done, total) in bytes: a bar that is rewritten on a terminal, a line now and then elsewhere."""
    start = said = time.monotonic()
    terminal = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if done < total and now - said < (0.1 if terminal else PLAIN_EVERY):
            return
        share, rate = done / max(total, 1), done / max(now - start, 1e-9)
        text = f"{what} {share:4.0%} of {total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s"
        if terminal:
            filled = int(24 * share)
            print(f"\r\x1b[K[{'█' * filled}{'·' * (24 - filled)}] {text}", end="", file=sys.stderr, flush=True)
            if done >= total:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        elif now - start >= PLAIN_EVERY:
            print(text, file=sys.stderr, flush=True)
        said = now

    return progress


def table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def show(values: dict[str, Any], rows: list[tuple[str, str]], as_json: bool) -> None:
    print(json.dumps(values, indent=1) if as_json else table(rows), flush=True)


def counter(what: str) -> Callable[[int, int], None]:
    """A callback (done, total) of things that are counted."""
    said = time.monotonic()
    terminal = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if terminal:
            end = "\r\x1b[K" if done >= total else f"\r\x1b[K{done} of {total} {what}"
            print(end, end="", file=sys.stderr, flush=True)
        elif now - said >= PLAIN_EVERY:
            print(f"{done} of {total} {what}", file=sys.stderr, flush=True)
            said = now

    return progress
