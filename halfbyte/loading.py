"""From a folder to a model that runs: checked as a skeleton first, then filled."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import checkpoint as checkpoints
from . import hub, memory
from .cache import bytes_of
from .chat import Tokenizer
from .checkpoint.finite import Check
from .checkpoint.ledger import Ledger
from .checkpoint.mapping import Guard
from .checkpoint.weights import Load
from .config import Config
from .device_experts import BUFFERS, DeviceResidency
from .device_experts import plan as plan_slots
from .download import no_progress
from .errors import UsageError, shown, size
from .expert_cache import POLICIES
from .fitting import TEXT, Allowed, device_room, place, place_beside
from .host_experts import in_host_memory
from .models import MODELS
from .models.decoder import Decoder
from .progress import bar, rewritable
from .residency import Residency
from .tiered_experts import BUFFERS as TIERED_BUFFERS
from .tiered_experts import TieredResidency

log = logging.getLogger(__name__)
PER_TOKEN = ("num_experts_per_tok", "top_k_experts")  # the key, as families call it
NOT_DONE = {
    "model_config": "a model is what its config.json says; change that file",
    "adapter_path": "adapters are not applied; fuse them into the weights first (mlx_lm.fuse)",
    "return_config": "it is halfbyte.config.read(folder).values",
}  # of what mlx-lm's load does
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
    check: Check = "sampled",
) -> Decoder:
    """The model of an MLX checkpoint's folder. dtype is that of its activations; weights stay as they are stored.

    `load`: "read" copies them into memory of our own, "map" shows the files themselves, which must not change (CPU).
    `expert_cache`: experts stay on disk, and so many bytes of them in host memory (CPU, CUDA); results are the same.
    `allowed` says more of what it may take; without a word, experts stay on disk where memory has no room for all.
    `top_k_experts`: fewer experts a token than the model was made for. That is another, worse model.
    `check`: what is looked through for NaN and infinities: "sampled" is a few experts and all else, or "all", "none";
    experts that stay on disk always are, when they are first read.
    """
    target = pick_device(device)
    if expert_policy not in POLICIES:
        raise UsageError(f"expert_policy: {shown(expert_policy)} is none; there are {', '.join(POLICIES)}")
    checkpoint = checkpoints.open(path, set(MODELS))
    build, fingerprint = MODELS[checkpoint.config.model_type], checkpoint.fingerprint
    if top_k_experts is not None:
        fingerprint += use_fewer_experts(checkpoint.config, top_k_experts)
    skeleton = checkpoint.weights("meta")
    made = build(checkpoint.config, skeleton)
    skeleton.finish(made.further_layers)
    checkpoint.config.log_unread()
    allowed = allowed or Allowed()
    if expert_cache is not None:
        allowed = replace(allowed, expert_cache=expert_cache)
    residency: Residency | DeviceResidency | TieredResidency | None = None
    if load == "map" and (allowed.limited or allowed.expert_cache is not None):
        raise UsageError(
            "weights that stay in the files (map) take what memory the system gives them: "
            "an expert cache and limits on memory are for weights that are read"
        )
    if load != "map":
        allowed.restrict(target)
        if target.type == "cpu":
            residency = resident_experts(made, skeleton.ledger, allowed, expert_policy)
        elif target.type == "cuda":
            residency = experts_beside(made, skeleton.ledger, target, allowed, expert_policy, check, progress)
        elif allowed.expert_cache is not None and skeleton.ledger.mixtures:
            raise UsageError(f"an expert cache is for CPU and CUDA: on {target}, all experts are in its memory")
    lenders = None if residency is None else residency.lenders
    model = build(checkpoint.config, skeleton.load(target, load=load, check=check, progress=progress, lenders=lenders))
    model.residency = residency
    model.guard = Guard(checkpoint.states) if load == "map" else None
    if residency is not None:
        residency.foresee(model.layers)
    model.dtype, model.fingerprint, model.nbytes = pick_dtype(dtype, target), fingerprint, skeleton.size
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
    made: Decoder, ledger: Ledger, device: torch.device, allowed: Allowed, policy: str, check: Check = "sampled",
    progress: Callable[[int, int], None] | None = None,
) -> DeviceResidency | TieredResidency | None:  # fmt: skip
    """Experts in host memory, where the device has no room for all, and on disk, where the host has none either; None
    is all on the device. `made` is the skeleton."""
    text = bytes_of(made.kept, 1, min(made.context, TEXT), 1, torch.bfloat16)
    room = device_room(memory.available(device), ledger, text)
    if not ledger.mixtures or (allowed.expert_cache is None and (room.all_fit or not allowed.fit)):
        return None
    mixtures, per_token = list(ledger.mixtures.values()), made.experts_per_token
    placed = place_beside(allowed, ledger, per_token)
    buffers = BUFFERS if placed.cache is None else TIERED_BUFFERS
    slots = plan_slots(mixtures, room.experts, room.most, per_token, room.beside, buffers)
    if placed.cache is None:
        hosts, areas = in_host_memory(ledger, progress, check)
        found = DeviceResidency(hosts, slots, device, areas)
        log.warning("%s has room for %s of its experts; the others come from host memory", device, size(found.nbytes))
        return found
    tiers = TieredResidency(ledger, placed.cache, slots, device, per_token, policy, direct=placed.direct)
    if allowed.expert_cache is None:
        log.warning(
            "%s has room for %s of its experts, host memory for %s; the others stay on disk", device,
            size(tiers.device_bytes), size(tiers.below.nbytes),
        )  # fmt: skip
    return tiers


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
    path_or_hf_repo: Path | str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_path: Path | str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    offline: bool = False,
    load: Load = "read",
    progress: Callable[[int, int], None] | None = None,
    allowed: Allowed | None = None,
    expert_cache: int | None = None,
    expert_policy: str = "lfu",
    top_k_experts: int | None = None,
    check: Check = "sampled",
) -> tuple[Decoder, Tokenizer]:
    """The model and the tokenizer of a folder, or of a repository of the hub such as mlx-community/...

    On a terminal a bar shows how far a download is, unless there is a `progress`, which is told of the loading.

    mlx-lm's arguments go by name. `tokenizer_config` replaces special tokens (eos_token="...") and the chat_template.
    `lazy` and `trust_remote_code` may be said and change nothing: weights are read at once, unless load="map", and no
    code of a model is ever run. `model_config`, `adapter_path` and `return_config` are refused where they ask for
    something.
    """
    if isinstance(device, Mapping):
        raise TypeError("load: the second argument is the device; give tokenizer_config and model_config by name")
    asked = {"model_config": model_config, "adapter_path": adapter_path, "return_config": return_config}
    for name, why in NOT_DONE.items():
        if asked[name]:
            raise ValueError(f"load: {name} is not taken: {why}")
    fetching = bar if progress is None and rewritable(sys.stderr) else no_progress
    folder = hub.locate(path_or_hf_repo, revision=revision, offline=offline, progress=fetching)
    model = load_model(
        folder, device, dtype, load=load, progress=progress, allowed=allowed, expert_cache=expert_cache,
        expert_policy=expert_policy, top_k_experts=top_k_experts, check=check,
    )  # fmt: skip
    return model, Tokenizer.open(folder, model.vocabulary, tokenizer_config)


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
