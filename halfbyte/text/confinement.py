"""The inside of confined.py: what its scripts do besides their work. With the standard library alone on board.

Requests and answers on stdin and stdout are JSON after 8 bytes of length.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

LENGTH_BYTES = 8
DESCRIPTORS = 3  # stdin, stdout, stderr: none is left for what breaks out
Answer = dict[str, str]


def confine(memory: int) -> None:
    """No more memory than `memory` from here on, no new files, no new processes, no core dump. POSIX only."""
    try:
        import resource
    except ImportError:
        return
    try:
        with open("/proc/self/statm", encoding="ascii") as pages:
            memory += int(pages.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        memory += 1 << 30  # a system without /proc: what Python may have mapped already
    limits = [("RLIMIT_AS", memory), ("RLIMIT_NOFILE", DESCRIPTORS), ("RLIMIT_NPROC", 0), ("RLIMIT_FSIZE", 0)]
    for name, limit in [*limits, ("RLIMIT_CORE", 0)]:
        try:
            resource.setrlimit(getattr(resource, name), (limit, limit))
        except (AttributeError, ValueError, OSError):  # not every system has every limit
            continue


def read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        sys.exit(0)  # the caller is gone
    return data


def send(stream: BinaryIO, message: Answer) -> None:
    data = json.dumps(message).encode("ascii")
    stream.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    stream.flush()


def serve(answer: Callable[[dict[str, Any]], Answer]) -> None:
    """Answer requests, {"text"} or {"error"}, until the caller is gone; with no more memory than it has said."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
    confine(int(sys.argv[1]))
    alarm: Callable[..., Any] = getattr(signal, "setitimer", lambda *_: None)
    send(answers, {"text": "ready"})
    while True:
        length = int.from_bytes(read_exactly(requests, LENGTH_BYTES), "little")
        data = read_exactly(requests, length)
        try:
            request = json.loads(data)
            # The caller kills in time. Should it be gone, the alarm, which nothing here handles, does.
            alarm(getattr(signal, "ITIMER_REAL", 0), request["seconds"] + 1)
            message = answer(request)
        except MemoryError:
            message = {"error": "what it was given is too large", "spent": "yes"}
        except (RecursionError, ValueError):
            message = {"error": "what it was given is too large"}
        alarm(getattr(signal, "ITIMER_REAL", 0), 0)
        send(answers, message)
