"""What generate and its like are given: a prompt's ids, room for the reply, and how its tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .chat import Tokenizer
from .models.decoder import Decoder
from .request import Chooser
from .sample_utils import TokenSampler
from .sampling import SamplingParams

Prompt = str | Sequence[int] | Tensor


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.prompt_ids(prompt)
    return prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)


def room(model: Decoder, length: int, max_tokens: int) -> int:
    """How many tokens may follow: what is asked for, as far as the model's context goes; -1 asks for all of that."""
    if max_tokens < 1 and max_tokens != -1:
        raise ValueError(
            f"max_tokens must be 1 or more, or -1 for as many as the context has room for, got {max_tokens}"
        )
    if length >= model.context:
        raise ValueError(f"the prompt has {length} tokens, and the model's context is {model.context}: shorten it")
    left = model.context - length
    return left if max_tokens == -1 else min(max_tokens, left)


def choosing(
    tokenizer: Tokenizer, sampler: Chooser | None, sampling: Mapping[str, Any]
) -> tuple[SamplingParams, Chooser | None]:
    """How one reply's tokens are chosen: by parameters, or by a function. One that says no more than parameters can is
    taken at its word, so that its steps are replayed."""
    if isinstance(sampler, TokenSampler) and (params := sampler.params()) is not None:
        given = SamplingParams.of(None, **sampling)
        return (params if given.seed is None else replace(params, seed=given.seed)), None
    return SamplingParams.of(tokenizer.generation_config, **sampling), sampler
