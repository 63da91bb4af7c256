"""Chat templates: where a model folder keeps them, and rendering in a process that is killed when it takes too much."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import files, limits, strict_json
from ..errors import CheckpointError, HalfbyteError, shown

WORKER = Path(__file__).with_name("template_worker.py")
LENGTH_BYTES = 8
ANSWER_BYTES = 8  # of a character, at most: as JSON it takes up to six times its bytes
START_SECONDS = 60.0  # a machine under load; it takes a tenth of a second
# What Python needs to find jinja2, and the clock of strftime_now. Nothing else, above all no keys and tokens.
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "SYSTEMROOT", "TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH")


class TemplateError(HalfbyteError, ValueError):
    """A chat template that is missing, wrong, too slow or too greedy, or messages it does not take."""

    exit_code = 3


def find(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a model folder by name; the one most use is "default".

    chat_template.jinja comes before tokenizer_config.json's chat_template, a string or a list of names and templates,
    and that before the old chat_template.json. additional_chat_templates/ holds further ones.
    """
    found: dict[str, str] = {}
    if (folder / "chat_template.jinja").exists():
        found["default"] = _text(folder, "chat_template.jinja")
    else:
        given, where = tokenizer_config.get("chat_template"), folder / "tokenizer_config.json"
        if given is None and (folder / "chat_template.json").exists():
            where = files.find(folder, "chat_template.json")
            read = strict_json.parse_object(files.read_small(where, limits.CONFIG_BYTES), str(where))
            given = read.get("chat_template")
        found |= _named(given, where)
    if (more := folder / "additional_chat_templates").is_dir():
        found |= {path.stem: _text(more, path.name) for path in sorted(more.glob("*.jinja"))}
    return found


def _named(given: Any, where: Path) -> dict[str, str]:
    if given is None:
        return {}
    pairs = [{"name": "default", "template": given}] if isinstance(given, str) else given
    try:
        named = {str(pair["name"]): pair["template"] for pair in pairs}
    except (TypeError, KeyError):
        named = {"": None}
    if not all(isinstance(source, str) for source in named.values()):
        raise CheckpointError(f"{where}: chat_template: a string or a list of names and templates was expected, "
                              f"it is {shown(given)}.")  # fmt: skip
    return named


def _text(folder: Path, name: str) -> str:
    path = files.find(folder, name)
    try:
        return files.read_small(path, limits.CONFIG_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: it is not UTF-8 at byte {error.start}. Download the file again.") from None


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template makes of its variables, which must be JSON."""
    spent = {"seconds": _worker.seconds, "output": _worker.output}
    try:
        request = json.dumps({"template": source, "variables": variables, **spent})
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"The messages cannot be given to the chat template: {error}.") from None
    answer = _worker.ask(request.encode("ascii"))
    if "error" in answer:
        raise TemplateError(f"The chat template failed: {answer['error']}")
    return answer["text"]


def limit(seconds: float, memory: int, output: int) -> None:
    """Of every rendering from here on: its time, and bytes of memory and of text."""
    with _worker.lock:
        _worker.seconds, _worker.memory, _worker.output = seconds, memory, output
        _worker.stop()


class Worker:
    """The process that renders: started when first needed, killed when it is late, then started anew."""

    def __init__(self) -> None:
        self.seconds, self.memory, self.output = limits.TEMPLATE_SECONDS, limits.TEMPLATE_MEMORY, limits.TEMPLATE_OUTPUT
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0
        self.lock = threading.Lock()

    def ask(self, request: bytes) -> dict[str, str]:
        with self.lock:
            if self.owner != os.getpid() or self.process is None or self.process.poll() is not None:
                self.start()  # a forked child must not speak into its parent's pipes
            answer = self._exchange(request, self.seconds)
            if "spent" in answer:
                self.stop()
            return answer

    def start(self) -> None:
        """-P keeps the current folder, which may be the model's, out of what Python imports from."""
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(self.memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            start_new_session=True,  # Ctrl-C on the terminal is not for it
        )
        if "text" not in self._exchange(b"", START_SECONDS):
            raise TemplateError("The process that renders chat templates does not start. Is jinja2 installed?")

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None and self.owner == os.getpid():
            process.kill()
            process.communicate()

    def _exchange(self, request: bytes, seconds: float) -> dict[str, str]:
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
            return {"error": f"it takes longer than {seconds:g} s" if late.is_set() else "it ended its process"}
        except BaseException:  # Ctrl-C: an answer without a reader would be taken for the next one
            self.stop()
            raise
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():  # it was killed just after it answered
            self.stop()
        return answer


_worker = Worker()
atexit.register(_worker.stop)
