"""Ctrl-C that ends what is being done, and never breaks what is half done."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# An exception out of the middle of these leaves them broken, or is swallowed by the C code that called them.
FRAGILE = ("numba", "llvmlite", "triton", "importlib")
NOTICED = 0.1  # seconds after which Ctrl-C at a prompt is noticed at the latest


@contextmanager
def interrupts(stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """While this is entered, Ctrl-C calls `stop`, and where that is not enough (False) raises KeyboardInterrupt.

    A kernel that is being compiled is compiled first. Where Ctrl-C is ignored (a script's job in the background) it
    stays so, and a thread that gets no signals changes nothing.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        if stop():
            return
        if frame is None or (caller := outside(frame)) is frame:
            raise KeyboardInterrupt
        # As a debugger stops at the next line of a function, so KeyboardInterrupt is raised at the caller's next line.
        caller.f_trace = raise_interrupt
        sys.settrace(lambda *event: None)

    def raise_interrupt(*event: Any) -> None:
        sys.settrace(None)
        raise KeyboardInterrupt

    def unraisable(event: sys.UnraisableHookArgs) -> None:
        """What interrupts a destructor goes no further; it is pressed again."""
        if not issubclass(event.exc_type, KeyboardInterrupt):
            before[1](event)

    before = signal.signal(signal.SIGINT, interrupted), sys.unraisablehook
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        sys.unraisablehook = before[1]
        signal.signal(signal.SIGINT, before[0])


@contextmanager
def noticed() -> Iterator[None]:
    """While this is entered, a signal is not slept through by C code that looks for signals only when one wakes it.

    `input` with readline is such code: a Ctrl-C that comes while it shows the last key would wait for the next one.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before, idle = signal.getsignal(signal.SIGALRM), (0.0, 0.0)
    if before is None or signal.getitimer(signal.ITIMER_REAL) != idle:  # it is somebody else's
        yield
        return
    try:
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.setitimer(signal.ITIMER_REAL, NOTICED, NOTICED)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *idle)
        signal.signal(signal.SIGALRM, before)


def outside(frame: FrameType) -> FrameType:
    """The innermost frame that nothing fragile has called."""
    safe, at = frame, frame
    while at is not None:
        name = str(at.f_globals.get("__name__", ""))
        if name.partition(".")[0] in FRAGILE and at.f_back is not None:
            safe = at.f_back
        at = at.f_back  # type: ignore[assignment]
    return safe
