"""From a folder to a model that runs: checked as a skeleton first, then filled."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from . import checkpoint as checkpoints
from . import hub, memory
from .cache import bytes_of
from .chat import Tokenizer
from .checkpoint.ledger import Ledger
from .checkpoint.weights import Load
from .config import Config
from .device_experts import DeviceResidency
from .device_experts import plan as plan_slots
from .download import no_progress
from .errors import UsageError, size
from .fitting import TEXT, Allowed, device_room, place
from .host_experts import in_host_memory
from .models import MODELS
from .models.decoder import Decoder
from .progress import bar, rewritable
from .residency import Residency

log = logging.getLogger(__name__)
PER_TOKEN = ("num_experts_per_tok", "top_k_experts")  # the key, as families call it
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: Path | str,
    device: torch.device | str | None = "cpu",
    dtype: torch.dtype | str | None = None,
    *,
    load: Load = "read",
    progress: Callable[[int, int], None] | None = None,
    allowed: Allowed | None = None,
    expert_cache: int | None = None,
    expert_policy: str = "lfu",
    top_k_experts: int | None = None,
) -> Decoder:
    """The model of an MLX checkpoint's folder. dtype is that of its activations; weights stay as they are stored.

    `load`: "read" copies them into memory of our own, "map" shows the files themselves, which must not change (CPU).
    `expert_cache`: experts stay on disk, and so many bytes of them in memory (CPU). Results are the same, bit for bit.
    `allowed` says more of what it may take; without a word, experts stay on disk where memory has no room for all.
    `top_k_experts`: fewer experts a token than the model was made for. That is another, worse model.
    """
    target = pick_device(device)
    checkpoint = checkpoints.open(path, set(MODELS))
    build, fingerprint = MODELS[checkpoint.config.model_type], checkpoint.fingerprint
    if top_k_experts is not None:
        fingerprint += use_fewer_experts(checkpoint.config, top_k_experts)
    skeleton = checkpoint.weights("meta")
    made = build(checkpoint.config, skeleton)
    skeleton.finish(layers=len(made.layers))
    checkpoint.config.log_unread()
    allowed = allowed or Allowed()
    if expert_cache is not None:
        allowed = replace(allowed, expert_cache=expert_cache)
    residency: Residency | DeviceResidency | None = None
    if load != "map":
        allowed.restrict(target)
        residency = (
            resident_experts(made, skeleton.ledger, allowed, expert_policy)
            if target.type == "cpu"
            else experts_beside(made, skeleton.ledger, target, allowed, progress)
        )
    lenders = None if residency is None else residency.lenders
    model = build(checkpoint.config, skeleton.load(target, load=load, progress=progress, lenders=lenders))
    model.residency = residency
    if residency is not None:
        residency.foresee(model.layers)
    model.dtype, model.fingerprint = pick_dtype(dtype, target), fingerprint
    return model


def use_fewer_experts(config: Config, count: int) -> str:
    """Let tokens choose so many experts; what tells the model that comes of it from the whole one."""
    key = next((key for key in PER_TOKEN if key in config), None)
    own = 0 if key is None else config.integer(key, 1)
    if key is None or not 1 <= count <= own:
        raise UsageError(f"{config.folder}: a token has {own} experts; {count} of them cannot be chosen")
    if count == own:
        return ""
    config.values[key] = count
    log.warning(
        "%d of %d experts a token: replies get worse. By how much: `halfbyte perplexity MODEL FILE --top-k-experts %d "
        "--kl MODEL`", count, own, count,
    )  # fmt: skip
    return f"-{count}-of-{own}-experts"


def experts_beside(
    made: Decoder, ledger: Ledger, device: torch.device, allowed: Allowed, progress: Callable[[int, int], None] | None
) -> DeviceResidency | None:
    """Experts in host memory, where the device has no room for all; None is all there. `made` is the skeleton."""
    if allowed.expert_cache is not None and ledger.mixtures:
        raise UsageError(
            f"an expert cache is for the CPU: with {device}, all experts are in memory, and --gpu-memory says how much "
            "of them is on the GPU"
        )
    text = bytes_of(made.kept, 1, min(made.context, TEXT), 1, torch.bfloat16)
    room = device_room(memory.available(device), ledger, text)
    if not allowed.fit or not ledger.mixtures or room.all_fit or device.type != "cuda":
        return None
    mixtures = list(ledger.mixtures.values())
    slots = plan_slots(mixtures, room.experts, room.most, made.experts_per_token, room.beside)
    hosts, areas = in_host_memory(ledger, progress)
    found = DeviceResidency(hosts, slots, device, areas)
    log.warning("%s has room for %s of its experts; the others come from host memory", device, size(found.nbytes))
    return found


def resident_experts(made: Decoder, ledger: Ledger, allowed: Allowed, policy: str) -> Residency | None:
    """Experts that stay on disk, where they are to or have to; None is all in memory. `made` is the skeleton."""
    text = bytes_of(made.kept, 1, min(made.context, TEXT), 1, torch.float32)
    placed = place(allowed, ledger, text, made.experts_per_token)
    if placed.cache is None:
        return None
    if allowed.expert_cache is None:
        log.warning("memory has room for %s of its experts; the others stay on disk", size(placed.cache))
    return Residency(ledger, placed.cache, made.experts_per_token, policy, direct=placed.direct)


def load(
    path_or_repo: Path | str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    load: Load = "read",
    progress: Callable[[int, int], None] | None = None,
    allowed: Allowed | None = None,
    expert_cache: int | None = None,
    top_k_experts: int | None = None,
) -> tuple[Decoder, Tokenizer]:
    """The model and the tokenizer of a folder, or of a repository of the hub such as mlx-community/...

    On a terminal a bar shows how far a download is, unless there is a `progress`, which is told of the loading.
    """
    fetching = bar if progress is None and rewritable(sys.stderr) else no_progress
    folder = hub.locate(path_or_repo, revision=revision, offline=offline, progress=fetching)
    model = load_model(
        folder, device, dtype, load=load, progress=progress, allowed=allowed, expert_cache=expert_cache,
        top_k_experts=top_k_experts,
    )  # fmt: skip
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
