"""Samplers and logits processors under the names that mlx-lm's scripts import.

Filters come in mlx-lm's order, which is not that of `temperature=` and its like: they look at the probabilities before
the temperature does (top_p, min_p, XTC, top_k; then the draw). Penalties look back at the last tokens of prompt and
reply; of what a prompt cache holds already they know if `held_ids` says it. What is random follows
`torch.manual_seed`, as mlx's follows mx.random.seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import limits
from .errors import shown
from .ops.dispatch import wide
from .ops.sampling import Sampling, sample
from .request import Processor
from .sampling import SEEDS, SamplingParams, plain

MINUS_INF = float("-inf")


@dataclass(frozen=True)
class TokenSampler:
    """Log-probabilities [B, V] to ids [B]. What make_sampler makes; its arguments are said there."""

    temp: float
    top_p: float
    min_p: float
    min_tokens_to_keep: int
    top_k: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: tuple[int, ...]

    def __call__(self, logprobs: Tensor) -> Tensor:
        if self.temp == 0:
            return logprobs.argmax(-1)
        if 0 < self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p != 0:
            logprobs = apply_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability > 0:
            logprobs = apply_xtc(logprobs, self.xtc_probability, self.xtc_threshold, self.xtc_special_tokens)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, self.top_k)
        return categorical_sampling(logprobs, self.temp)

    def params(self) -> SamplingParams | None:
        """The same wish in the engine's own terms, where it has them: then steps need no call of Python a token.

        Greedy, or with a temperature and top_k alone: these two do not mind which of them comes first.
        """
        if self.temp == 0:
            return SamplingParams()
        if 0 < self.top_p < 1 or self.min_p != 0 or self.xtc_probability > 0 or self.temp > limits.TEMPERATURE:
            return None
        return SamplingParams(self.temp, max(self.top_k, 0), seed=int(_seeds(1)))


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] | None = None,
) -> TokenSampler:
    """How to choose a token, for `sampler=` of generate and its like. 0 turns each part off; temp 0 is greedy.

    `min_p` never leaves fewer than `min_tokens_to_keep`. XTC takes the likeliest tokens away, but the last one above
    `xtc_threshold`, in `xtc_probability` of all draws; `xtc_special_tokens` it leaves alone.
    """
    temp, top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold = map(
        plain, (temp, top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold)
    )
    _require("temp", temp, 0, math.inf)
    _require("top_p", top_p, 0, 1)
    _require("min_p", min_p, 0, 1)
    _require("xtc_probability", xtc_probability, 0, 1)
    _require("xtc_threshold", xtc_threshold, 0, 0.5)
    for name, value, least in (("min_tokens_to_keep", min_tokens_to_keep, 1), ("top_k", top_k, -1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an integer from {least} on, it is {shown(value)}.")
    special = tuple(xtc_special_tokens or ())
    return TokenSampler(
        temp, top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold, special
    )  # fmt: skip


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int | None = 20,
    presence_penalty: float | None = None,
    presence_context_size: int | None = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int | None = 20,
) -> list[Processor]:
    """What changes logits before a token is chosen, for `logits_processors=` of generate and its like.

    Penalties count the last so many tokens of the text; a context size of None or 0 counts all. A penalty of None or 0
    is off.
    """
    processors: list[Processor] = [_bias(plain(logit_bias))] if logit_bias else []
    if repetition_penalty:
        processors.append(make_repetition_penalty(repetition_penalty, repetition_context_size))
    if presence_penalty:
        processors.append(make_presence_penalty(presence_penalty, presence_context_size))
    if frequency_penalty:
        processors.append(make_frequency_penalty(frequency_penalty, frequency_context_size))
    return processors


def apply_top_p(logprobs: Tensor, top_p: float) -> Tensor:
    """Only the fewest likeliest tokens whose probabilities sum to top_p, and those as likely as the last of them."""
    values = wide(logprobs).sort(-1, descending=True).values
    share = values.exp()
    before = share.cumsum(-1) - share  # the probability of all that are likelier
    kept = before < top_p * share.sum(-1, keepdim=True)
    kept[..., 0] = True
    least = values.gather(-1, kept.sum(-1, keepdim=True) - 1)
    return logprobs.masked_fill(wide(logprobs) < least, MINUS_INF)


def apply_min_p(logprobs: Tensor, min_p: float, min_tokens_to_keep: int = 1) -> Tensor:
    """Only tokens at least min_p times as likely as the likeliest, but never fewer than min_tokens_to_keep."""
    removed = logprobs < logprobs.amax(-1, keepdim=True) + (math.log(min_p) if min_p else MINUS_INF)
    if min_tokens_to_keep > 1:
        kept = logprobs.topk(min(min_tokens_to_keep, logprobs.shape[-1]), -1).indices
        removed = removed.scatter(-1, kept, False)
    return logprobs.masked_fill(removed, MINUS_INF)


def apply_top_k(logprobs: Tensor, top_k: int) -> Tensor:
    """Only the top_k likeliest tokens."""
    V = logprobs.shape[-1]
    if type(top_k) is not int or not 0 < top_k < V:
        raise ValueError(f"top_k must be an integer from 1 to {V - 1}, it is {shown(top_k)}.")
    kept = logprobs.topk(top_k, -1)
    return torch.full_like(logprobs, MINUS_INF).scatter(-1, kept.indices, kept.values)


def apply_xtc(
    logits: Tensor, xtc_probability: float, xtc_threshold: float, xtc_special_tokens: Sequence[int] = ()
) -> Tensor:
    """In xtc_probability of all draws, without the tokens that are likelier than the last one above xtc_threshold."""
    if float(torch.rand(())) >= xtc_probability:
        return logits
    share = torch.softmax(wide(logits), -1)
    last = share.masked_fill(share <= xtc_threshold, math.inf).amin(-1, keepdim=True)
    removed = share > last
    V = logits.shape[-1]
    if any(not 0 <= id < V for id in xtc_special_tokens):
        raise ValueError(f"xtc_special_tokens: ids must be from 0 to {V - 1}, they are {shown([*xtc_special_tokens])}.")
    removed[..., list(xtc_special_tokens)] = False
    return logits.masked_fill(removed, MINUS_INF)


def categorical_sampling(logits: Tensor, temp: float) -> Tensor:
    """A token a row [B], drawn with probabilities softmax(logits / temp)."""
    rows, device = logits.shape[0], logits.device
    temperature = torch.full((rows,), temp, dtype=torch.float32, device=device)
    places = torch.zeros(rows, dtype=torch.int64, device=device)
    return sample(logits, Sampling(temperature), _seeds(rows).to(device), places)


def make_repetition_penalty(penalty: float, context_size: int | None = 20) -> Processor:
    """Logits of tokens that are in the text already are divided by the penalty where positive, else multiplied."""
    _require("repetition_penalty", penalty, 0, math.inf)
    last = _last("repetition_context_size", context_size)

    def repeat_less(tokens: Tensor, logits: Tensor) -> Tensor:
        ids = _ids(tokens, last, logits)
        found = wide(logits)[:, ids]
        return wide(logits).index_copy(-1, ids, torch.where(found < 0, found * penalty, found / penalty))

    return repeat_less


def make_presence_penalty(penalty: float, context_size: int | None = 20) -> Processor:
    """Logits of tokens that are in the text already lose the penalty, once."""
    _require("presence_penalty", penalty, -math.inf, math.inf)
    last = _last("presence_context_size", context_size)

    def avoid_seen(tokens: Tensor, logits: Tensor) -> Tensor:
        ids = _ids(tokens, last, logits)
        return wide(logits).index_copy(-1, ids, wide(logits)[:, ids] - penalty)

    return avoid_seen


def make_frequency_penalty(penalty: float, context_size: int | None = 20) -> Processor:
    """Logits lose the penalty as often as their token is in the text."""
    _require("frequency_penalty", penalty, -math.inf, math.inf)
    last = _last("frequency_context_size", context_size)

    def avoid_frequent(tokens: Tensor, logits: Tensor) -> Tensor:
        ids = _ids(tokens, last, logits)
        return wide(logits) - penalty * torch.bincount(ids, minlength=logits.shape[-1])

    return avoid_frequent


def _bias(logit_bias: Mapping[int, float]) -> Processor:
    for id, value in logit_bias.items():
        if type(id) is not int or id < 0:
            raise ValueError(f"logit_bias: a token id must be an integer from 0 on, it is {shown(id)}.")
        _require(f"logit_bias of {id}", value, -math.inf, math.inf, finite=False)
    highest, ids, values = max(logit_bias), list(logit_bias), list(logit_bias.values())

    def add_bias(tokens: Tensor, logits: Tensor) -> Tensor:
        if highest >= logits.shape[-1]:
            raise ValueError(f"logit_bias: token id {highest}, but there are {logits.shape[-1]}.")
        scores = wide(logits)
        added = torch.tensor(values, dtype=scores.dtype, device=scores.device)
        return scores.index_add(-1, torch.tensor(ids, device=scores.device), added.expand(scores.shape[0], -1))

    return add_bias


def _seeds(rows: int) -> Tensor:
    """From torch's own generator, on the host: the same after the same torch.manual_seed, on any device."""
    return torch.randint(-SEEDS, SEEDS - 1, (rows,), dtype=torch.int64)


def _ids(tokens: Any, last: int, logits: Tensor) -> Tensor:
    """The last ids of a text; 0 is all of them."""
    return torch.as_tensor(tokens, dtype=torch.int64, device=logits.device)[-last:]


def _last(name: str, context_size: int | None) -> int:
    if context_size is not None and (type(context_size) is not int or context_size < 0):
        raise ValueError(f"{name} must be None or an integer from 0 on, it is {shown(context_size)}.")
    return context_size or 0


def _require(name: str, value: Any, low: float, high: float, finite: bool = True) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if not (number and low <= value <= high and (math.isfinite(value) or not finite)):
        span = f" from {low:g} to {high:g}" if math.isfinite(high) else f" from {low:g} on" * math.isfinite(low)
        raise ValueError(f"{name} must be a number{span}, it is {shown(value)}.")
