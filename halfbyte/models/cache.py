"""Prompt caches under the names that mlx-lm's scripts import. A cache here is one object for all layers, not a list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, overload

from ..cache import Cache
from . import cache_saving
from .decoder import Decoder


def make_prompt_cache(model: Decoder, max_kv_size: int | None = None) -> Cache:
    """An empty cache for one text, for `prompt_cache=` of generate and its like. It grows with the text.

    `max_kv_size` must be None: a cache that forgets tokens would change what a model says.
    """
    if max_kv_size is not None:
        raise ValueError("make_prompt_cache: max_kv_size is not taken: a cache keeps all tokens of its text")
    return model.new_cache()


def save_prompt_cache(file_name: Path | str, cache: Cache, metadata: Mapping[str, str] | None = None) -> None:
    """Write a cache, and texts by name to find again with it, for load_prompt_cache in another process."""
    cache_saving.write(Path(file_name), cache, metadata or {})


@overload
def load_prompt_cache(file_name: Path | str, return_metadata: Literal[False] = False) -> Cache: ...
@overload
def load_prompt_cache(file_name: Path | str, return_metadata: Literal[True]) -> tuple[Cache, dict[str, str]]: ...
def load_prompt_cache(file_name: Path | str, return_metadata: bool = False) -> Cache | tuple[Cache, dict[str, str]]:
    """The cache of a file, and what was said with it if that is asked for. It goes on with the model that made it."""
    cache, metadata = cache_saving.read(Path(file_name))
    return (cache, metadata) if return_metadata else cache


def can_trim_prompt_cache(cache: Cache) -> bool:
    """Whether the last tokens can be taken back: not from recurrent states, nor once a window has moved on."""
    return all(not one.fixed and (one.window is None or cache.lengths[0] < one.window) for one in cache.kept)


def trim_prompt_cache(cache: Cache, num_tokens: int) -> int:
    """Take back the last `num_tokens` tokens. Returns how many that were: all, as many as there are, or 0."""
    if num_tokens < 0:
        raise ValueError(f"trim_prompt_cache: num_tokens must be 0 or more, got {num_tokens}")
    if not can_trim_prompt_cache(cache):
        return 0
    taken = min(num_tokens, cache.lengths[0])
    cache.lengths[0] -= taken
    return taken
