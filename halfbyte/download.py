"""Files over HTTP, right or not at all: they go on where they stopped, start anew where they changed, are checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import IO, Any

from .errors import StorageError, size

ABREAST = 4  # files at a time
TRIES = 5  # connections in a row that bring nothing, and whole files that come out wrong
PAUSE = 0.5  # seconds before the next connection, doubled for each that brought nothing
TIMEOUT = 20.0  # seconds without a byte
PIECE = 4 << 20
PASSING = (408, 429, 500, 502, 503, 504)  # what a server says that may do better soon
TOO_FAR = 416  # what we hold is longer than the file

Progress = Callable[[str], Callable[[int, int], None]]  # what is being done -> a callback (bytes done, of how many)


def no_progress(what: str) -> Callable[[int, int], None]:
    return lambda done, total: None


@dataclass(frozen=True)
class Remote:
    """A file of a repository. `sum` is its sha256, or git's own sha1 of a small file; the hub's cache names it so."""

    name: str
    url: str
    size: int
    sum: str


class Stopped(Exception):
    """Another file has failed, or the user has: what has come so far is kept."""


class Line:
    """What downloads share: the hub's own HTTP client, and who hears of them. `stop` ends them all, soon."""

    def __init__(self, headers: dict[str, str], moved: Callable[[int], None], say: Callable[[str], None]) -> None:
        from huggingface_hub.utils import get_session

        self.client = get_session()
        # Compressed bytes would fit neither the sizes nor the ranges.
        self.headers = {**headers, "Accept-Encoding": "identity"}
        self.moved, self.say, self.stop = moved, say, Event()


class Download:
    """One file on its way to `target`. `line.moved` hears of every byte that comes, and of those that are dropped."""

    def __init__(self, line: Line, file: Remote, target: Path) -> None:
        self.line, self.file, self.target = line, file, target
        self.version: str | None = None  # of what we hold, as the server names it

    def run(self) -> None:
        """The file in its place, checked. One that came out wrong is fetched again from its first byte."""
        partial = partial_of(self.target)
        partial.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(TRIES):
            with partial.open("r+b" if partial.exists() else "w+b") as out:
                out.seek(0, os.SEEK_END)
                self._fill(out)
            if is_right(partial, self.file):
                os.replace(partial, self.target)
                return
            self.line.moved(-partial.stat().st_size)
            partial.unlink()
            self.line.say(f"{self.file.name}: its checksum is wrong; it is fetched again")
        raise StorageError(
            f"{self.file.name}: {TRIES} downloads had the wrong checksum. Something on the way changes it: a proxy, "
            "a mirror or failing memory. Try another network."
        )

    def _fill(self, out: IO[bytes]) -> None:
        """Connect until the file has its size. A connection that brought bytes is followed by as many tries as ever."""
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        fruitless = 0
        while out.tell() < self.file.size:
            before, why = out.tell(), "it ended early"
            try:
                self._read(out)
            except HfHubHTTPError as error:
                if error.response.status_code not in PASSING:
                    raise
                why = f"the server answers {error.response.status_code}"
            except HTTPError as error:  # cut, refused, or silent for too long
                why = str(error) or type(error).__name__
            if out.tell() == self.file.size:
                return
            fruitless = 0 if out.tell() > before else fruitless + 1
            if fruitless == TRIES:
                raise StorageError(
                    f"{self.file.name}: the connection failed {TRIES} times in a row ({why}) at {size(out.tell())} of "
                    f"{size(self.file.size)}. Try again: it goes on from there."
                )
            if self.line.stop.wait(PAUSE * 2**fruitless):
                raise Stopped

    def _read(self, out: IO[bytes]) -> None:
        """One connection, as far as it goes: appends to `out`, or begins it anew."""
        from huggingface_hub.utils import hf_raise_for_status

        start, headers = out.tell(), dict(self.line.headers)
        if start:
            headers["Range"] = f"bytes={start}-"
            if self.version:  # a file that has changed since comes whole
                headers["If-Range"] = self.version
        get = self.line.client.stream("GET", self.file.url, headers=headers, timeout=TIMEOUT, follow_redirects=True)
        with get as response:
            if response.status_code != TOO_FAR:
                hf_raise_for_status(response)
            if start and not goes_on(response, start):
                self._restart(out)
            if response.status_code == TOO_FAR:
                return
            etag = response.headers.get("ETag", "W/")
            self.version = None if etag.startswith("W/") else etag
            for data in response.iter_raw():
                if self.line.stop.is_set():
                    raise Stopped
                if out.tell() + len(data) > self.file.size:  # no server may fill the disk
                    raise StorageError(f"{self.file.name}: the server sends more than {size(self.file.size)}.")
                out.write(data)
                self.line.moved(len(data))

    def _restart(self, out: IO[bytes]) -> None:
        self.line.moved(-out.tell())
        out.seek(0)
        out.truncate()


def transfer(files: Mapping[Path, Remote], progress: Progress, say: Callable[[str], None]) -> None:
    """All of these files, a few at a time. Where one fails the others stop, and keep what has come."""
    from huggingface_hub.utils import build_hf_headers

    if not files:
        return
    lock, report, total = Lock(), progress("fetching"), sum(file.size for file in files.values())
    done = sum(partial.stat().st_size for target in files if (partial := partial_of(target)).exists())

    def moved(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            report(done, total)

    line = Line(build_hf_headers(library_name="halfbyte"), moved, say)
    with ThreadPoolExecutor(ABREAST) as pool:
        running = [pool.submit(Download(line, file, target).run) for target, file in files.items()]
        try:
            for one in as_completed(running):
                one.result()
        except BaseException:
            line.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def goes_on(response: Any, start: int) -> bool:
    """Whether a response holds the bytes from `start` on, rather than the whole file."""
    said: str = response.headers.get("Content-Range", "")
    return bool(response.status_code == 206 and said.startswith(f"bytes {start}-"))


def partial_of(target: Path) -> Path:
    """Where a file grows; older versions of huggingface_hub go on from the same name."""
    return target.with_name(f"{target.name}.incomplete")


def is_right(path: Path, file: Remote, read: Callable[[int], None] = lambda count: None) -> bool:
    """Whether the bytes on the disk are those that the hub names."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    small = len(file.sum) == 40  # not in large-file storage: git's name of the content
    digest = hashlib.sha1(f"blob {file.size}\0".encode()) if small else hashlib.sha256()
    with path.open("rb") as data:
        while piece := data.read(PIECE):
            digest.update(piece)
            read(len(piece))
    return digest.hexdigest() == file.sum
