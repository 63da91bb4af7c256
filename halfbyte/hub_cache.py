"""The hub's cache on this machine, in its own layout: other programs find what we fetch, and we what they did.

models--owner--name/ has blobs/, files named by their checksums; snapshots/<commit>/, links to them under their real
names; refs/, which commit a branch is at. A snapshot appears when all of its files are there and right.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from .download import Progress, Remote, is_right, partial_of
from .errors import CheckpointError, StorageError, size

COMMIT = re.compile(r"[0-9a-f]{40}")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Listing:
    """What we want of a repository, at one commit."""

    name: str
    commit: str
    files: tuple[Remote, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def cached_names() -> list[str]:
    """The repositories of models that the cache has, whole or in part."""
    found = (path.name.removeprefix("models--") for path in cache_folder().glob("models--*--*"))
    return sorted(name.replace("--", "/", 1) for name in found)


class CachedRepository:
    """A repository's folder in the cache, which may be absent or in part."""

    def __init__(self, name: str) -> None:
        self.name, self.cache = name, cache_folder()
        self.home = self.cache / f"models--{name.replace('/', '--')}"

    def blob(self, file: Remote) -> Path:
        return self.home / "blobs" / file.sum

    def ref(self, revision: str | None) -> Path:
        """The file that says which commit a branch or tag is at."""
        wanted = Path(revision or "main")
        if wanted.is_absolute() or ".." in wanted.parts:
            raise CheckpointError(f"{self.name}: {revision} is no branch, tag or commit. Leave it away for the newest.")
        return self.home / "refs" / wanted

    def find(self, revision: str | None) -> Path | None:
        """The folder of a revision, if it has all of its weights."""
        ref = self.ref(revision)
        commit = ref.read_text().strip() if ref.is_file() else str(revision)
        folder = self.home / "snapshots" / commit
        return folder if COMMIT.fullmatch(commit) and is_whole(folder) else None

    def newest(self) -> Path | None:
        """The whole snapshot of the branch main, or else the one that was made last."""
        if (found := self.find(None)) is not None:
            return found
        whole = [folder for folder in (self.home / "snapshots").glob("*") if is_whole(folder)]
        return max(whole, key=lambda folder: folder.stat().st_mtime, default=None)

    @contextmanager
    def alone(self, say: Callable[[str], None]) -> Iterator[None]:
        """One process fetches a repository at a time; the others wait for it, then find what it fetched."""
        from huggingface_hub.utils import WeakFileLock

        lock = self.cache / ".locks" / self.home.name / "halfbyte.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(WeakFileLock(lock, timeout=0.5))
            except TimeoutError:
                say(f"{self.name}: another process is fetching it; waiting for that")
                stack.enter_context(WeakFileLock(lock))
            yield

    def lacking(
        self, files: Sequence[Remote], check: bool, progress: Progress, say: Callable[[str], None]
    ) -> Iterator[Remote]:
        """The files that are absent, or of another size; with `check`, every byte of the others is read."""
        there = {file for file in files if has_size(self.blob(file), file.size)}
        report, read, total = progress("checking"), 0, sum(file.size for file in there)

        def count(more: int) -> None:
            nonlocal read
            read += more
            report(read, total)

        for file in files:
            if file not in there:
                yield file
            elif check and not is_right(self.blob(file), file, count):
                say(f"{file.name}: its bytes in the cache are damaged; it is fetched again")
                yield file

    def require_space(self, listing: Listing, missing: Sequence[Remote], say: Callable[[str], None]) -> None:
        """Say what is going to happen, and refuse before it begins where the disk is too small."""
        partials = [partial_of(self.blob(file)) for file in missing]
        held = sum(partial.stat().st_size for partial in partials if partial.exists())
        need, free = sum(file.size for file in missing) - held, shutil.disk_usage(self.cache).free
        if need > free:
            raise StorageError(
                f"{self.name}: {size(need)} are to be fetched, and {size(free)} are free in {self.cache}. "
                "Free some, or set HF_HOME to a folder on a larger disk."
            )
        said = f"{size(need)} to fetch, {size(free)} free in {self.cache}" if missing else "all of it is here"
        said += f"; {size(held)} are here already" if held else ""
        say(f"{self.name} at {listing.commit[:7]}: {len(listing.files)} files, {size(listing.size)}; {said}")

    def snapshot(self, listing: Listing, revision: str | None) -> Path:
        """The folder of a commit: links to its files."""
        folder = self.home / "snapshots" / listing.commit
        folder.mkdir(parents=True, exist_ok=True)
        for file in listing.files:
            blob, pointer = self.blob(file), folder / file.name
            if pointer.is_file() and pointer.samefile(blob):
                continue
            pointer.unlink(missing_ok=True)
            try:
                pointer.symlink_to(os.path.relpath(blob, folder))
            except OSError:  # Windows without the right to make such links
                os.link(blob, pointer)
        ref = self.ref(revision)
        if ref.name != listing.commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(listing.commit)
        return folder

    def remove(self) -> int:
        """Delete it all; returns the bytes that this freed. Links are not followed, so nothing outside is touched."""
        files = [path for path in self.home.rglob("*") if path.is_file() and not path.is_symlink()]
        freed = sum(path.stat().st_size for path in files)
        try:
            shutil.rmtree(self.home)
        except OSError as error:
            raise StorageError(f"{self.home}: {error.strerror or error}. Some of it may be left.") from error
        return freed


def has_size(path: Path, count: int) -> bool:
    return path.is_file() and path.stat().st_size == count


def is_whole(folder: Path) -> bool:
    """Whether config and weights are there: all shards that the index names, or any where there is no index."""
    if not (folder / "config.json").is_file():
        return False
    if not (folder / INDEX).is_file():
        return any(path.is_file() for path in folder.glob("*.safetensors"))
    try:
        shards = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
