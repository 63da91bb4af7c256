"""Where a model is: a folder, or a repository of the Hugging Face hub, in the cache or downloaded into it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import CheckpointError, StorageError

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "README.md"]  # never code


def locate(path_or_repo: Path | str, *, revision: str | None = None, offline: bool = False) -> Path:
    """The folder of a model. A name like `mlx-community/Qwen3-...` is fetched, unless `offline`."""
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    name = os.fspath(path_or_repo)
    if path.exists() or not REPOSITORY.fullmatch(name):
        raise CheckpointError(
            f"{name}: there is no such folder, and it is no name on the hub (owner/name). "
            "Give the folder of an MLX checkpoint, or a name such as mlx-community/Qwen3-30B-A3B-4bit."
        )
    return fetch(name, revision=revision, offline=offline)


def fetch(name: str, *, revision: str | None = None, offline: bool = False) -> Path:
    """Download what of a repository is missing, and nothing where it is complete; interrupted, it goes on next time."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES, local_files_only=offline))
    except RepositoryNotFoundError:
        raise CheckpointError(f"{name}: the hub has no such repository, or it is private. Check the name.") from None
    except LocalEntryNotFoundError:
        why = "it is not in the cache, and --offline forbids to fetch it" if offline else "the hub cannot be reached"
        raise CheckpointError(f"{name}: {why}. Give a folder, or connect to the network.") from None
    except (HfHubHTTPError, OSError) as error:
        raise StorageError(f"{name}: the download failed: {error}. Try again: it goes on where it stopped.") from error
