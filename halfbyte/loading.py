"""From a folder to a model that runs: checked as a skeleton first, then filled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from . import checkpoint as checkpoints
from . import hub
from .chat import Tokenizer
from .checkpoint.weights import Load
from .download import no_progress
from .errors import UsageError
from .models import MODELS
from .models.decoder import Decoder
from .progress import bar, rewritable
from .residency import Residency

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: Path | str,
    device: torch.device | str | None = "cpu",
    dtype: torch.dtype | str | None = None,
    *,
    load: Load = "read",
    progress: Callable[[int, int], None] | None = None,
    expert_cache: int | None = None,
    expert_policy: str = "lfu",
) -> Decoder:
    """The model of an MLX checkpoint's folder. dtype is that of its activations; weights stay as they are stored.

    `load`: "read" copies them into memory of our own, "map" shows the files themselves, which must not change (CPU).
    `expert_cache`: experts stay on disk, and so many bytes of them in memory (CPU). Results are the same, bit for bit.
    """
    target = pick_device(device)
    checkpoint = checkpoints.open(path, set(MODELS))
    build = MODELS[checkpoint.config.model_type]
    skeleton = checkpoint.weights("meta")
    made = build(checkpoint.config, skeleton)
    skeleton.finish(layers=len(made.layers))
    checkpoint.config.log_unread()
    residency = None
    if expert_cache is not None and skeleton.ledger.mixtures:
        if target.type != "cpu":
            raise UsageError(f"an expert cache is for the CPU so far, not for {target}")
        residency = Residency(skeleton.ledger, expert_cache, made.experts_per_token, expert_policy)
    lenders = None if residency is None else residency.lenders
    model = build(checkpoint.config, skeleton.load(target, load=load, progress=progress, lenders=lenders))
    model.residency = residency
    model.dtype, model.fingerprint = pick_dtype(dtype, target), checkpoint.fingerprint
    return model


def load(
    path_or_repo: Path | str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    load: Load = "read",
    progress: Callable[[int, int], None] | None = None,
    expert_cache: int | None = None,
) -> tuple[Decoder, Tokenizer]:
    """The model and the tokenizer of a folder, or of a repository of the hub such as mlx-community/...

    On a terminal a bar shows how far a download is, unless there is a `progress`, which is told of the loading.
    """
    fetching = bar if progress is None and rewritable(sys.stderr) else no_progress
    folder = hub.locate(path_or_repo, revision=revision, offline=offline, progress=fetching)
    model = load_model(folder, device, dtype, load=load, progress=progress, expert_cache=expert_cache)
    return model, Tokenizer.open(folder, model.vocabulary)


def pick_device(device: torch.device | str | None) -> torch.device:
    """None is the best there is: cuda, mps, cpu."""
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def pick_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    if dtype not in DTYPES:
        raise ValueError(f"load_model: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]
