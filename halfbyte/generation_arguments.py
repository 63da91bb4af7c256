"""What generate and its like are given: a prompt's ids, room for the reply, and how its tokens are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from .cache import Cache
from .chat import Tokenizer
from .errors import shown
from .models.decoder import Decoder
from .request import Chooser
from .sample_utils import TokenSampler
from .sampling import SamplingParams, plain

Prompt = str | Sequence[int] | Tensor
SAMPLING = frozenset(field.name for field in fields(SamplingParams))
PROCESSORS = "logits_processors=make_logits_processors(...) of halfbyte.sample_utils"
ELSEWHERE = {
    "temp": "temperature",
    "repetition_context_size": PROCESSORS,
    "presence_context_size": PROCESSORS,
    "frequency_context_size": PROCESSORS,
    "min_tokens_to_keep": "sampler=make_sampler(...) of halfbyte.sample_utils",
    "xtc_probability": "sampler=make_sampler(...) of halfbyte.sample_utils",
    "xtc_threshold": "sampler=make_sampler(...) of halfbyte.sample_utils",
    "max_new_tokens": "max_tokens",
    "eos_token_ids": "the tokenizer's eos_token_ids",
}  # where what scripts ask for is taken
MISSING = {
    "draft_model": "there is no speculative decoding",
    "kv_bits": "a cache keeps what the model computed, unrounded",
    "max_kv_size": "a cache keeps all tokens of its text",
    "input_embeddings": "a prompt is ids or a text",
    "stream": "there are no streams of mlx",
}  # what mlx-lm takes, and we do not
DETAILS = {"num_draft_tokens", "kv_group_size", "quantized_kv_start", "prefill_batch_size"}  # of what was not asked for


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.prompt_ids(prompt)
    return prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)


def room(model: Decoder, length: int, max_tokens: int) -> int:
    """How many tokens may follow: what is asked for, as far as the model's context goes; -1 asks for all of that."""
    max_tokens = plain(max_tokens)
    if type(max_tokens) is not int or (max_tokens < 1 and max_tokens != -1):
        raise ValueError(
            f"max_tokens must be 1 or more, or -1 for as many as the context has room for, got {shown(max_tokens)}"
        )
    if length >= model.context:
        raise ValueError(f"the prompt has {length} tokens, and the model's context is {model.context}: shorten it")
    left = model.context - length
    return left if max_tokens == -1 else min(max_tokens, left)


def several(
    model: Decoder, tokenizer: Tokenizer, prompts: Sequence[Prompt], max_tokens: int | Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """The ids of each prompt, and how many tokens may follow."""
    if isinstance(prompts, str):
        raise ValueError("batch_generate: prompts must be a list of texts or of token ids, got one text: [text] is one")
    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    limits = list(max_tokens) if isinstance(max_tokens, Iterable) else [max_tokens] * len(ids)
    if len(limits) != len(ids):
        raise ValueError(
            f"batch_generate: max_tokens must be one number, or one for each of {len(ids)} prompts, got {len(limits)}"
        )
    return ids, [room(model, len(one), limit) for one, limit in zip(ids, limits, strict=True)]


def require_own(model: Decoder, cache: Cache | None, held_ids: Sequence[int]) -> int:
    """How many tokens a prompt cache holds, which must be this model's."""
    if not isinstance(cache, Cache):
        raise TypeError("prompt_cache must be what make_prompt_cache(model) gives: one cache for all layers, no list")
    if held_ids and len(held_ids) != cache.lengths[0]:
        raise ValueError(f"held_ids: {len(held_ids)} ids, and the prompt cache holds {cache.lengths[0]} tokens")
    if not model.owns(cache):
        raise ValueError(
            "prompt_cache: another model made it, or this one on another device, with another dtype or other "
            "--cpu-activations. Make a new one: make_prompt_cache(model)"
        )
    cache.require_whole(0, "prompt_cache")
    return cache.lengths[0]


def choosing(
    tokenizer: Tokenizer, sampler: Chooser | None, options: Mapping[str, Any]
) -> tuple[SamplingParams, Chooser | None]:
    """How one reply's tokens are chosen: by parameters, or by a function. One that says no more than parameters can is
    taken at its word, so that its steps are replayed. None is as good as not given."""
    given = {name: plain(value) for name, value in options.items() if value is not None and name not in DETAILS}
    if unknown := sorted(given.keys() - SAMPLING):
        raise TypeError("; ".join(map(_unknown, unknown)))
    if sampler is None:
        return SamplingParams.of(tokenizer.generation_config, **given), None
    if given:
        raise ValueError(
            f"{', '.join(sorted(given))}: without effect beside a sampler. Leave one of them out, or say it in "
            "make_sampler or make_logits_processors; draws of make_sampler follow torch.manual_seed."
        )
    params = sampler.params() if isinstance(sampler, TokenSampler) else None
    return (SamplingParams(), sampler) if params is None else (params, None)


def _unknown(name: str) -> str:
    """What is wrong with a name that nobody takes."""
    if name in MISSING:
        return f"{name} is not taken: {MISSING[name]}"
    if name in ELSEWHERE:
        return f"{name} is not taken here: use {ELSEWHERE[name]}"
    near = get_close_matches(name, [*SAMPLING, "max_tokens", "sampler", "logits_processors", "prompt_cache"], 1)
    return f"there is no parameter {name}" + (f": did you mean {near[0]}?" if near else "")
