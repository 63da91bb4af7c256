"""Compiling the kernels of a model before its first step, where its device's language compiles on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from .models.decoder import Decoder
from .ops.dispatch import LANGUAGE_OF, find
from .ops.sampling import Sampling, sample

log = logging.getLogger(__name__)
PROMPT = [0, 0]  # several tokens, then one: all that a text is made of


def compile_kernels(model: Decoder, progress: Callable[[int, int], None] | None = None) -> int:
    """Make sure that the kernels which this model needs are compiled; returns how many had to be.

    They are kept in the user's cache folder, so that happens once. progress(done, total) counts them, from 0; where
    nothing is compiled it is not called. Without it, a line of the log says why the first answer takes long.
    """
    prepare = find(LANGUAGE_OF.get(model.device.type, "torch"), "compiling", "prepare")
    if model.compiled or prepare is None:
        return 0

    def steps() -> None:
        cache, row = model.new_cache(1, len(PROMPT) + 1), torch.zeros(1, dtype=torch.int64)
        for ids in (PROMPT, PROMPT[:1]):
            logits = model(cache.plan([(0, ids)]), cache)
            cache.advance([(0, ids)])
            sample(logits, Sampling(torch.ones(1)), row, row)

    compiled: int = prepare(steps, progress or _announced)
    model.compiled = True
    return compiled


def _announced(done: int, total: int) -> None:
    if done == 0:
        log.warning("compiling %d CPU kernels for this model, once: about a second each", total)
