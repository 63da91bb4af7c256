"""How well a model predicts a text, and how far it is from another one: the numbers to judge a conversion by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .engine import logits
from .models.decoder import Decoder
from .ops.dispatch import with_cpu_activations


@dataclass(frozen=True)
class Quality:
    """Of `tokens` predictions. `kl` is KL(base || model) in nats a token, `agreement` how often both guess the same."""

    tokens: int
    loss: float  # nats a token
    loss_error: float  # standard error of it
    kl: float | None = None
    agreement: float | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def quality(
    model: Decoder,
    ids: Sequence[int],
    base: Decoder | None = None,
    *,
    context: int = 512,
    cpu_activations: str = "f32",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Windows of `context` tokens, one after the other; in each, every token but the first is predicted.

    `cpu_activations`: of the model; the base's are f32.
    """
    if len(ids) < 2:
        raise ValueError("perplexity needs a text of at least two tokens")
    losses, distances, agreed = [], [], 0
    starts = range(0, len(ids) - 1, context)
    for index, start in enumerate(starts):
        window = ids[start : start + context + 1]
        scores = _scores(model, window, cpu_activations)
        next_ids = torch.tensor(window[1:], device=scores.device)
        losses.append(-scores.gather(-1, next_ids[:, None])[:, 0].cpu().double())
        if base is not None:
            truth = _scores(base, window, "f32").to(scores.device)
            distances.append((truth.exp() * (truth - scores)).sum(-1).cpu().double())
            agreed += int((truth.argmax(-1) == scores.argmax(-1)).sum())
        progress(index + 1, len(starts))
    each = torch.cat(losses)
    count = len(each)
    error = float(each.std()) / math.sqrt(count) if count > 1 else 0.0
    if base is None:
        return Quality(count, float(each.mean()), error)
    return Quality(count, float(each.mean()), error, float(torch.cat(distances).mean()), agreed / count)


def _scores(model: Decoder, window: Sequence[int], cpu_activations: str) -> Tensor:
    """Log-probabilities of what follows each token but the last."""
    with with_cpu_activations(cpu_activations):
        return torch.log_softmax(logits(model, window[:-1])[0], -1)
