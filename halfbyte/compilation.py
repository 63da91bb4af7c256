"""Compiling the kernels of a model before its first step, where its device's language compiles on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from .cache import step_sizes
from .decoding import rehearse
from .machine import warn_of_slow_threads
from .models.decoder import Decoder
from .ops.dispatch import LANGUAGE_OF, find
from .ops.sampling import Sampling, sample
from .tiered_experts import TieredResidency

log = logging.getLogger(__name__)
PROMPTS = {"cpu": (2,), "cuda": (2048, 512, 128)}  # tokens; on a GPU those of prefilling.py
MANY_ROWS = 64  # of logits: more take the same kernels
ROWS = 256  # of a cache: sizes that 16 divides are compiled for as such


def compile_kernels(model: Decoder, progress: Callable[[int, int], None] | None = None, slots: int = 1) -> int:
    """Make sure that the kernels which this model needs are compiled; returns how many had to be.

    On a GPU, steps of several requests take kernels of their own: `slots` is how many there may be at a time.
    They are kept in the user's cache folder, so that happens once. progress(done, total) counts them, from 0; where
    nothing is compiled it is not called. Without it, a line of the log says why the first answer takes long.
    """
    kind = model.device.type
    prepare = find(LANGUAGE_OF.get(kind, "torch"), "compiling", "prepare")
    if model.compiled or prepare is None:
        return 0
    if kind == "cpu":
        warn_of_slow_threads()
    if kind == "cuda":
        prepare = partial(prepare, subject=_subject(model, slots))
    tiers = model.residency if isinstance(model.residency, TieredResidency) else None
    with nullcontext() if tiers is None else tiers.rehearsed(model.layers):
        compiled: int = prepare(partial(_steps, model, slots), progress or partial(_announced, kind))
    model.compiled = True
    return compiled


def _steps(model: Decoder, slots: int) -> None:
    """All that a text is made of: several tokens, then one; and steps of several texts."""
    lengths, replays = PROMPTS[model.device.type], model.residency is None or model.residency.replayable
    if isinstance(model.residency, TieredResidency):
        model.residency.rehearse_copies()
    cache = model.new_cache(1, max(lengths) + ROWS)
    temperature, row = (torch.ones(1, device=model.device), torch.zeros(1, dtype=torch.int64, device=model.device))
    for length in (*lengths, 1):
        logits = model(cache.plan([(0, [0] * length)]), cache)
        sample(logits, Sampling(temperature), row, row)
    if model.device.type == "cuda":
        sizes = step_sizes(slots, model.device)
    else:  # a step of one takes what one of any number takes, but for how tokens are drawn
        sizes = [1] if replays else []
        if slots > 1:
            _draw_in_every_way(model, slots)
    for size in sizes:
        cache = model.new_cache(size, ROWS)
        if replays:
            rehearse(model, cache, size)
        else:
            model(cache.plan([(slot, [0]) for slot in range(size)]), cache)


def _draw_in_every_way(model: Decoder, slots: int) -> None:
    """What strangers may ask for: one who is the first to must not keep the others waiting."""
    rows = min(slots, MANY_ROWS)
    zeros = torch.zeros(rows, dtype=torch.int64)
    half, top_k = torch.full((rows,), 0.5), torch.ones(rows, dtype=torch.int32)
    counts = torch.zeros(rows, model.vocabulary, dtype=torch.int32)
    logits = torch.zeros(rows, model.vocabulary, dtype=model.dtype)
    sample(logits, Sampling(half, top_k, half, half, half, half, half, counts), zeros, zeros)


def _subject(model: Decoder, slots: int) -> str:
    """What decides which kernels a model needs on this GPU; where it is wrong, some are compiled when they are used."""
    sizes = model.vocabulary, model.norm.weight.shape[0], model.expert_count, model.experts_per_token, slots
    gpu, elsewhere = torch.cuda.get_device_capability(model.device), model.residency and model.residency.source
    return f"{model.model_type} {model.fingerprint} {model.dtype} {sizes} {model.kept} {gpu} {elsewhere}"


def _announced(kind: str, done: int, total: int) -> None:
    if done == 0:
        name, speed = ("CPU", "about a second each") if kind == "cpu" else ("GPU", "some seconds each, many at a time")
        log.warning("compiling %d %s kernels for this model, once: %s", total, name, speed)
