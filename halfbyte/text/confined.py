"""Work on what strangers give, in a process that is killed when it takes too much."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import HalfbyteError

LENGTH_BYTES = 8
ANSWER_BYTES = 8  # of a character, at most: as JSON it takes up to six times its bytes
START_SECONDS = 60.0  # a machine under load; it takes a tenth of a second
# What Python needs to find packages, and the clock of strftime_now. Nothing else, above all no keys and tokens.
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "SYSTEMROOT", "TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH")


class Worker:
    """A process that runs a script of this folder, which answers JSON with JSON (confinement.py). It is started when
    first needed, killed when it is late, then started anew. Where it does not start, that is `absent`'s to say.
    """

    def __init__(
        self, script: str, seconds: float, memory: int, output: int, absent: Callable[[], HalfbyteError]
    ) -> None:
        self.script, self.absent = Path(__file__).with_name(script), absent
        self.seconds, self.memory, self.output = seconds, memory, output
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0
        self.lock = threading.Lock()
        atexit.register(self.stop)

    def limit(self, seconds: float, memory: int, output: int) -> None:
        """Of every answer from here on: its time, and bytes of memory and of text."""
        with self.lock:
            self.seconds, self.memory, self.output = seconds, memory, output
            self.stop()

    def ask(self, **request: Any) -> Mapping[str, str]:
        """The answer; {"error"} where there is none in time, with "spent" where it took all the time or memory that it
        has. What is no JSON is the caller's error.
        """
        with self.lock:
            sent = json.dumps({**request, "seconds": self.seconds, "output": self.output}).encode("ascii")
            if self.owner != os.getpid() or self.process is None or self.process.poll() is not None:
                self.start()  # a forked child must not speak into its parent's pipes
            answer = self._exchange(sent, self.seconds)
            if "spent" in answer:
                self.stop()
            return answer

    def start(self) -> None:
        """-P keeps the current folder, which may be the model's, out of what Python imports from. -B: it writes nothing
        in the package's folder, not even what it compiled of its own sources."""
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-B", str(self.script), str(self.memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            start_new_session=True,  # Ctrl-C on the terminal is not for it
        )
        if "text" not in self._exchange(b"", START_SECONDS):
            raise self.absent()

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None and self.owner == os.getpid():
            process.kill()
            process.communicate()

    def _exchange(self, request: bytes, seconds: float) -> Mapping[str, str]:
        """Send what there is to send and wait for the answer. No answer in time, or none at all: it is dead after."""
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            if request:
                process.stdin.write(len(request).to_bytes(LENGTH_BYTES, "little") + request)
                process.stdin.flush()
            length = int.from_bytes(process.stdout.read(LENGTH_BYTES), "little")
            answer: dict[str, str] = json.loads(process.stdout.read(min(length, ANSWER_BYTES * self.output)))
        except (OSError, ValueError):  # the pipe broke
            self.stop()
            said = f"it takes longer than {seconds:g} s" if late.is_set() else "it ended its process"
            return {"error": said, "spent": "yes"}
        except BaseException:  # Ctrl-C: an answer without a reader would be taken for the next one
            self.stop()
            raise
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():  # it was killed just after it answered
            self.stop()
        return answer
