"""Where a model is: the embedded one, a folder, or a repository of the Hugging Face hub, in its cache or fetched."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from .download import PASSING, Progress, Remote, no_progress, partial_of, transfer
from .errors import CheckpointError, HalfbyteError, StorageError, shown
from .files import plain
from .hub_cache import COMMIT, CachedRepository, Listing, cached_names, is_whole

EMBEDDED = "tiny"  # the name of the model that comes with the package
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
FILES = ("*.json", "*.jinja", "*.model", "*.txt", "README.md")  # beside the weights; never code, never pickles
PATIENCE = 20.0  # seconds for the hub to say what a repository holds
PAUSES = (0.5, 2.0)  # before it is asked again
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """A repository in the cache. `fetched` are those of its files that were not there, or not right."""

    folder: Path
    commit: str
    files: tuple[Remote, ...]
    fetched: tuple[Remote, ...]


class Here(NamedTuple):
    """A model on this machine."""

    name: str
    folder: Path

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())


def locate(
    path_or_repo: Path | str,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress = no_progress,
    say: Callable[[str], None] = log.info,
) -> Path:
    """The folder of a model. A name like `mlx-community/Qwen3-...` is fetched where the cache does not have it whole.

    What the cache has is used as it is: nothing is asked of the hub. `fetch` looks for something newer. The embedded
    model is meant by its name, a string: a Path is a folder.
    """
    path, name = Path(path_or_repo), os.fspath(path_or_repo)
    with suppress(RuntimeError):  # no such user: then it is no folder either
        path = path.expanduser()
    if revision is not None and (path_or_repo == EMBEDDED or (name and path.is_dir())):
        log.warning("%s: it is on no hub, so there is no revision %s: it is used as it is", name, revision)
    if path_or_repo == EMBEDDED:
        embedded = Path(__file__).parent / EMBEDDED
        if path.is_dir() and path.resolve() != embedded:
            log.warning("%s: the folder of this name is used, not the embedded model", os.path.join(".", name))
            return path
        return embedded
    if name and path.is_dir():
        return path
    if path.exists() or not REPOSITORY.fullmatch(name):
        is_file = name and path.exists()
        what = "it is a file" if is_file else "there is no such folder, and it is no name on the hub (owner/name)"
        raise CheckpointError(
            f"{name or shown(name)}: {what}. Give the folder of an MLX "
            f"checkpoint, a name such as mlx-community/Qwen3-30B-A3B-4bit, or {EMBEDDED}, the embedded model."
        )
    if (found := CachedRepository(name).find(revision)) is not None:
        return found
    return fetch(name, revision=revision, offline=offline, progress=progress, say=say).folder


def fetch(
    name: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    force: bool = False,
    check: bool = False,
    progress: Progress = no_progress,
    say: Callable[[str], None] = log.info,
) -> Fetched:
    """Bring the cache up to the hub. Interrupted, it goes on next time; `check` also reads what is there already."""
    from huggingface_hub import constants

    repository = CachedRepository(name)
    if offline or constants.HF_HUB_OFFLINE:
        found = None if force else repository.find(revision)
        if found is None:
            asked = "--offline" if offline else "HF_HUB_OFFLINE"
            absent = "" if force else f"it is not in the cache ({repository.cache}), and "
            raise CheckpointError(
                f"{name}: {absent}{asked} forbids to fetch it. "
                "Give a folder, or fetch it while there is a network: `halfbyte pull`."
            )
        return Fetched(found, found.name, (), ())
    try:
        listing = listed(name, revision)
        with repository.alone(say):
            if force:
                missing = listing.files
                for file in missing:
                    partial_of(repository.blob(file)).unlink(missing_ok=True)
            else:
                missing = tuple(repository.lacking(listing.files, check, progress, say))
            repository.require_space(listing, missing, say)
            transfer({repository.blob(file): file for file in missing}, progress, say)
            return Fetched(repository.snapshot(listing, revision), listing.commit, listing.files, missing)
    except HalfbyteError:
        raise
    except Exception as error:
        refuse(name, revision, error)


def here() -> list[Here]:
    """The models that need no network: the embedded one, and those that the cache has whole."""
    embedded = Path(__file__).parent / EMBEDDED
    found = [Here(EMBEDDED, embedded)] if is_whole(embedded) else []
    for name in cached_names():
        if (folder := CachedRepository(name).newest()) is not None:
            found.append(Here(name, folder))
    return found


def remove(name: str, say: Callable[[str], None] = log.info) -> int:
    """Delete a repository from the cache; returns the bytes that this freed."""
    repository = CachedRepository(name)
    if not repository.home.is_dir():
        raise CheckpointError(f"{name}: it is not in the cache ({repository.cache}). `halfbyte list` shows what is.")
    with repository.alone(say):
        return repository.remove()


def listed(name: str, revision: str | None) -> Listing:
    """Ask the hub what a repository holds: names, sizes and checksums."""
    from huggingface_hub import HfApi, hf_hub_url

    info = patiently(lambda: HfApi().model_info(name, revision=revision, files_metadata=True, timeout=PATIENCE))
    files = []
    for one in info.siblings or []:
        digest = one.lfs.sha256 if one.lfs is not None else one.blob_id
        if plain(one.rfilename) and one.size is not None and SUM.fullmatch(digest or ""):
            url = hf_hub_url(name, one.rfilename, revision=info.sha)
            files.append(Remote(one.rfilename, url, one.size, str(digest)))
    chosen = tuple(wanted(files))
    if not info.sha or not COMMIT.fullmatch(info.sha) or not any(is_weights(file.name) for file in chosen):
        raise CheckpointError(f"{name}: the repository has no *.safetensors. Give that of an MLX checkpoint.")
    return Listing(name, info.sha, chosen)


def wanted(files: list[Remote]) -> Iterator[Remote]:
    """Settings and tokenizer first, then the weights: those called model*, as mlx-lm reads them, or else all."""
    yield from (file for file in files if any(fnmatch(file.name, pattern) for pattern in FILES))
    weights = [file for file in files if is_weights(file.name)]
    yield from [file for file in weights if file.name.startswith("model")] or weights


def is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def patiently(ask: Callable[[], T]) -> T:
    """What the hub answers, asked again where it may do better soon."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    for pause in PAUSES:
        try:
            return ask()
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code not in PASSING:
                raise
            time.sleep(pause)
    return ask()


def refuse(name: str, revision: str | None, error: Exception) -> NoReturn:
    """What went wrong, in words that say what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    token = f"HF_TOKEN to a token of your account ({hub}/settings/tokens)"
    if isinstance(error, GatedRepoError):
        raise CheckpointError(f"{name}: its terms must be accepted first. Do so at {hub}/{name}, and set {token}.")
    if isinstance(error, RevisionNotFoundError):
        raise CheckpointError(
            f"{name}: the hub has no revision {revision}. See {hub}/{name}/tree/main for those it has."
        )
    if isinstance(error, RepositoryNotFoundError):
        raise CheckpointError(
            f"{name}: the hub has no such repository, or it is private. Check the name; for a private one, set {token}."
        )
    if isinstance(error, HfHubHTTPError):
        code = error.response.status_code
        if code in (401, 403):
            raise CheckpointError(f"{name}: the hub refuses the access ({code}). Set {token} that may read it.")
        raise StorageError(f"{name}: the hub answers {code}. Try again: it goes on where it stopped.")
    if isinstance(error, HTTPError):
        proxies = [one for one in PROXIES if one in os.environ or one.lower() in os.environ]
        through = f" through {' and '.join(proxies)}" if proxies else ""
        raise StorageError(f"{name}: {hub} cannot be reached{through}: {error}. Check the network, or give a folder.")
    if isinstance(error, OSError):
        raise StorageError(f"{name}: {error}. Try again: it goes on where it stopped.") from error
    raise error
