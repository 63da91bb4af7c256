"""The only loop that runs a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import Cache
from .models.decoder import Decoder


def logits(model: Decoder, ids: Sequence[int] | Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
    """The logits [T, V] of every token of one text, in float32, and the cache that holds it.

    Given that cache again, `ids` go on where the text ended.
    """
    tokens = token_ids(model, ids)
    cache = model.new_cache() if cache is None else cache
    cache.reserve(cache.lengths[0] + len(tokens))
    parts = [torch.empty(0, model.vocabulary, device=model.device)]
    for start in range(0, len(tokens), cache.chunk):
        work = [(0, tokens[start : start + cache.chunk])]
        parts.append(model(cache.plan(work, all_logits=True), cache).float())
        cache.advance(work)
    return torch.cat(parts), cache


def token_ids(model: Decoder, ids: Sequence[int] | Tensor) -> list[int]:
    """ids as a list, checked: a GPU would read past the embedding without a word."""
    tokens = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    for id in tokens:
        if not isinstance(id, int) or not 0 <= id < model.vocabulary:
            raise ValueError(f"token ids must be integers from 0 to {model.vocabulary - 1}, got {id!r}")
    return tokens
