"""A request's state in a file with the ids of its text, to go on in another process with the same bits.

The file is that of save_prompt_cache. One of another model, another version or another dtype is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

from . import strict_json
from .cache import Cache
from .models.cache_saving import AGAIN, read, refuse, write
from .models.decoder import Decoder


def save(path: Path | str, model: Decoder, cache: Cache, ids: list[int], slot: int = 0) -> None:
    """Write what a slot holds; `ids` are its tokens. The file appears whole or not at all."""
    if len(ids) != cache.lengths[slot]:
        raise ValueError(f"{len(ids)} ids for a slot that holds {cache.lengths[slot]} tokens")
    if not model.owns(cache):
        raise ValueError("the cache holds states of another model, or of this one computed otherwise")
    write(Path(path), cache, {"ids": json.dumps(ids)}, slot)


def load(path: Path | str, model: Decoder) -> tuple[Cache, list[int]]:
    """The cache of one slot that a file holds, and the ids of its text."""
    path = Path(path)
    cache, said = read(path, model)
    text, where = said.get("ids", "null").encode("utf-8", "replace"), f"{path}: not a prompt cache: its token ids"
    ids = strict_json.parse(text, where, remedy=f" {AGAIN}", finite=True)
    if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < model.vocabulary for id in ids):
        refuse(path, "its token ids are damaged")
    if len(ids) != cache.lengths[0]:
        refuse(path, f"it has {len(ids)} token ids for the state of {cache.lengths[0]} tokens")
    return cache, ids
