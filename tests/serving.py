"""A real server process on loopback, and what tests do with one."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2

ROOT = Path(__file__).parents[1]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Runs before the command: a program of a test may break something on purpose.
COMMAND = "import sys\n{faults}\nfrom halfbyte.cli import main\nsys.exit(main(sys.argv[1:]))"


class Server:
    """A process that serves; `log` is all that it has said."""

    def __init__(self, folder, *flags, model="tiny", faults="", key=None):
        self.path = folder / f"server-{time.monotonic_ns()}.log"
        code = COMMAND.format(faults=faults)
        flags = ("--port", "0", "--device", "cpu", "--log-level", "info", *map(str, flags))
        keys = ("--api-key", key) if key else ()
        with self.path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "serve", str(model), *flags, *keys],
                stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self.key, self.port = key, self._port()
        self.address = f"http://127.0.0.1:{self.port}"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx2.Client(base_url=self.address, headers=headers, timeout=60)
        self._wait_until(lambda: self._up())

    def _port(self):
        found = self._wait_until(lambda: re.search(r"on http://\S+:(\d+)\n", self.log))
        return int(found[1])

    def _up(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _wait_until(self, met, seconds=90):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if result := met():
                return result
            assert self.process.poll() is None, self.log
            time.sleep(0.05)
        raise AssertionError(f"it does not start:\n{self.log}")

    @property
    def log(self):
        return self.path.read_text(errors="replace")

    def post(self, path, body, **more):
        return self.http.post(path, json=body, **more)

    def chat(self, content, max_tokens=16, **more):
        """A greedy reply's text, unless something else is asked for."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "temperature": 0, **more}
        return self.post(CHAT, body)

    def metric(self, name):
        found = re.search(rf"^halfbyte_{re.escape(name)} (\S+)$", self.http.get("/metrics").text, re.M)
        return float(found[1]) if found else 0.0

    def idle(self, seconds=1.0):
        """Whether no request holds or awaits a slot, within so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.metric("requests_running") == self.metric("requests_waiting") == 0:
                return True
            time.sleep(0.02)
        return False

    def memory(self):
        """Resident bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def raw(self, data, seconds=15.0):
        """What comes back for these bytes until the server closes, or is silent for so long."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as sock:
            received = b""
            try:
                sock.sendall(data)
                while part := sock.recv(65536):
                    received += part
            except (TimeoutError, ConnectionError):
                pass
            return received

    def stop(self, sig=signal.SIGTERM, seconds=40):
        if self.process.poll() is None:
            self.process.send_signal(sig)
        status = self.process.wait(seconds)
        self.http.close()
        return status

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.http.close()


@contextmanager
def serving(folder, *flags, **more):
    server = Server(folder, *flags, **more)
    try:
        yield server
    finally:
        server.kill()


def tool_caller(folder, call="<tool_call></tool_call>"):
    """The embedded model with a template that knows tools and reasoning, as Qwen's do; `call`: how one is written."""
    shutil.copytree(ROOT / "halfbyte" / "tiny", folder)
    template = (folder / "chat_template.jinja").read_text()
    knows = "{% if tools %}{{ tools | tojson }}" + call + "{% endif %}" + template
    knows += "{% if enable_thinking %}{{ '<think>\\n' }}{% endif %}{# </think> #}"
    (folder / "chat_template.jinja").write_text(knows)
    return folder


def events(response):
    """The events of a stream: JSON values, then "[DONE]"; comments as they are."""
    found = []
    for line in response.iter_lines() if hasattr(response, "iter_lines") else response.splitlines():
        if line.startswith("data: "):
            found.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
        elif line.startswith(":"):
            found.append(line)
    return found


def error(response):
    """The error of a response, whose shape is OpenAI's."""
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"} and found["message"]
    return found
