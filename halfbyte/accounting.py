"""What a model costs before it is loaded: bytes by part and by precision, bytes a token reads, bytes of its cache."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import checkpoint as checkpoints
from .cache import bytes_of
from .checkpoint import Checkpoint
from .checkpoint.ledger import Ledger
from .models import MODELS
from .models.decoder import Decoder

TABLES = ("embed_tokens.", "embed_tokens_per_layer.")


@dataclass(frozen=True)
class Account:
    """A skeleton's sizes, in bytes where nothing else is said."""

    model_type: str
    layers: int
    hidden: int
    vocabulary: int
    context: int
    expert_count: int
    experts_per_token: int
    parameters: int
    formats: dict[str, int]  # of matrices: parameters in each
    weights: int
    experts: int  # of these
    left_out: int  # vision, further-token prediction: stored, not used
    read_per_token: int  # weights that one token needs
    cache_fixed: int  # of one request, whatever its length; bfloat16 where it is as the activations
    cache_fixed_float32: int  # the same where those are float32, as on a CPU
    cache_per_token: int
    cache_windows: int  # of layers that look back a window only, when it is full

    def cache(self, tokens: int, wide: bool = False) -> int:
        """Of one text; `wide`: with activations of float32, as on a CPU."""
        return self.state(wide) + (1 + wide) * (self.cache_windows + tokens * self.cache_per_token)

    def state(self, wide: bool = False) -> int:
        """What of that is the same for every text."""
        return self.cache_fixed_float32 if wide else self.cache_fixed

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def skeleton(folder: Path | str) -> tuple[Checkpoint, Ledger, Account]:
    """A model without its weights, checked as for loading: its files, what it takes of them, what that costs."""
    checkpoint = checkpoints.open(folder, set(MODELS))
    weights = checkpoint.weights("meta")
    model = MODELS[checkpoint.config.model_type](checkpoint.config, weights)
    weights.finish(model.further_layers)
    return checkpoint, weights.ledger, account(checkpoint, model, weights.ledger)


def account(checkpoint: Checkpoint, model: Decoder, ledger: Ledger) -> Account:
    sizes = {name: span.size for name, span in ledger.wanted.items()}
    total = sum(sizes.values())
    experts = sum(sizes[name] for name in ledger.stacks)
    looked_up = sum(size for name, size in sizes.items() if name.startswith(TABLES[model.tied :]))
    share = model.experts_per_token / max(model.expert_count, 1)
    formats: Counter[str] = Counter()
    for shape, form in ledger.matrices.values():
        formats[form] += math.prod(shape)
    plain = sum(math.prod(span.shape) for name, span in ledger.wanted.items() if name not in ledger.of_matrices)
    lines = [one for one in model.kept if one.window is None]
    windows = [one for one in model.kept if one.window is not None]
    fixed = bytes_of(lines, 1, 0, 1, torch.bfloat16)
    return Account(
        model_type=model.model_type,
        layers=len(model.layers),
        hidden=model.norm.weight.shape[0],
        vocabulary=model.vocabulary,
        context=model.context,
        expert_count=model.expert_count,
        experts_per_token=model.experts_per_token,
        parameters=formats.total() + plain,
        formats=dict(formats.most_common()),
        weights=total,
        experts=experts,
        left_out=checkpoint.size - total,
        read_per_token=round(total - experts - looked_up + experts * share),
        cache_fixed=fixed,
        cache_fixed_float32=bytes_of(lines, 1, 0, 1, torch.float32),
        cache_per_token=bytes_of(lines, 1, 1, 1, torch.bfloat16) - fixed,
        cache_windows=bytes_of(windows, 1, model.context, 1, torch.bfloat16),
    )
