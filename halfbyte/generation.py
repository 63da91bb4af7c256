"""Text from a model, under the names that mlx-lm's scripts import: generate, stream_generate, batch_generate."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .cache import Cache, bytes_of, make_room
from .chat import Tokenizer
from .compilation import compile_kernels
from .engine import Chooser, Engine, Processor, Request
from .engine import logits as logits_of
from .generation_arguments import Prompt, choosing, prompt_ids, require_own, room, several
from .memory import peak, require
from .models.decoder import Decoder
from .request import ended

MOST_AHEAD = 1 << 14  # tokens of a reply that room is made for before it begins; it grows with a longer one
_left: WeakKeyDictionary[Decoder, Cache] = WeakKeyDictionary()  # by replies that are over


@dataclass(frozen=True)
class GenerationResponse:
    """A piece of a reply. `text` is what the token made sure of, and may be empty.

    `peak_memory` is in GB, and measured at the first token and the last: asking the system at each would cost time.
    """

    text: str
    token: int
    logits: Tensor
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    from_draft: bool = False

    @cached_property
    def logprobs(self) -> Tensor:
        """The log-probability of every token [V] at this place, as the model gave it."""
        return torch.log_softmax(self.logits.float(), -1)


@dataclass(frozen=True)
class BatchStats:
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float


@dataclass(frozen=True)
class BatchResponse:
    """`token_ids` are without the token that ended a reply; `logprobs`, where asked for, are those of these tokens."""

    texts: list[str]
    stats: BatchStats
    token_ids: list[list[int]]
    finish_reasons: list[str]
    logprobs: list[list[float]] | None = None


def generate(model: Decoder, tokenizer: Tokenizer, prompt: Prompt, verbose: bool = False, **options: Any) -> str:
    """The whole reply. `options` are those of stream_generate; `verbose` prints it as it comes, and its speed."""
    pieces: list[str] = []
    response = None
    for response in stream_generate(model, tokenizer, prompt, **options):
        pieces.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print()
        _say_speed(response)
    return "".join(pieces)


def _say_speed(of: GenerationResponse | BatchStats) -> None:
    print(
        f"Prompt: {of.prompt_tokens} tokens, {of.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {of.generation_tokens} tokens, {of.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {of.peak_memory:.3f} GB",
        file=sys.stderr,
    )


def stream_generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: Prompt,
    max_tokens: int = 256,
    *,
    sampler: Chooser | None = None,
    logits_processors: Sequence[Processor] | None = None,
    prompt_cache: Cache | None = None,
    held_ids: Sequence[int] = (),
    prefill_step_size: int | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    prompt_state_callback: Callable[[], None] | None = None,
    stop: str | Sequence[str] = (),
    **sampling: Any,
) -> Iterator[GenerationResponse]:
    """A reply, token by token.

    A string is taken as it stands (a chat template is applied by tokenizer.apply_chat_template). `sampling` are
    temperature, top_k, top_p, min_p, the penalties, logit_bias and seed; what is not given comes from the model's
    generation_config.json. `logits_processors` change the logits before; a `sampler` (logprobs [1, V] -> id) takes the
    place of all that. A `prompt_cache` goes on with the text it holds, and then holds prompt and reply too; processors
    and penalties know that text if its ids are given, as `held_ids`. `prompt_state_callback` is called when it holds
    the prompt but its last token: all that this prompt and longer ones have in common.
    """
    new, before = prompt_ids(tokenizer, prompt), list(held_ids)
    held = 0 if prompt_cache is None and not before else require_own(model, prompt_cache, before)
    most = room(model, held + len(new), max_tokens)
    params, chooser = choosing(tokenizer, sampler, sampling)
    request = Request(
        [*before, *new], most, params, tokenizer.eos_ids, logits_processors or (), chooser,
        goes_on=prompt_cache is not None, keeps=prompt_cache is not None, computed=len(before),
    )  # fmt: skip
    request.pause = 0 if prompt_state_callback is None else len(request.prompt) - 1
    compile_kernels(model)
    cache = _new_cache(model, prefill_step_size) if prompt_cache is None else prompt_cache
    make_room(cache, held + len(new) + min(most, MOST_AHEAD), f"a text of {held + len(new)} tokens and its reply")
    engine = Engine(model, cache)
    engine.submit(request)
    try:
        decoder, told = tokenizer.decoder(stop), (prompt_progress_callback, prompt_state_callback)
        yield from _responses(engine, request, decoder, tokenizer.eos_ids, *told)
    finally:  # a loop that is left leaves the state of the tokens that it was given
        engine.cancel(request)
        made = len(request.made)
        whole = prompt_cache is not None and 0 not in cache.torn
        if whole and made and cache.lengths[0] == held + len(new) + made - 1:
            logits_of(model, request.made[-1:], cache)  # the engine computes a token when one is to follow
        if prompt_cache is None and prefill_step_size is None and engine.replays:
            _left[model] = cache


def _responses(
    engine: Engine,
    request: Request,
    decoder: Any,
    eos_ids: frozenset[int],
    prompt_progress_callback: Callable[[int, int], None] | None,
    prompt_state_callback: Callable[[], None] | None,
) -> Iterator[GenerationResponse]:
    model, cache, before = engine.model, engine.cache, request.computed
    prompted = len(request.prompt) - before
    start, first, memory = time.perf_counter(), 0.0, 0.0
    while engine.busy:
        if prompt_state_callback is not None and request.computed == len(request.prompt) - 1:
            prompt_state_callback()
        if request.made:
            make_room(cache, cache.lengths[0] + 1, f"a text of {cache.lengths[0] + 1} tokens")
        made = engine.step()
        if prompt_progress_callback is not None and not request.made[1:]:
            prompt_progress_callback(request.computed - before, prompted)
        for _, id, logits in made:
            now = time.perf_counter()
            first = first or now
            text = "" if id in eos_ids else decoder.push(id)
            if decoder.stopped is not None:
                engine.cancel(request, "stop")
            if request.finish_reason is not None:
                text += decoder.finish()
            count = len(request.made)
            if count == 1 or request.finish_reason is not None:
                memory = peak(model.device) / 1e9
            yield GenerationResponse(
                text, id, logits, prompted, prompted / (first - start), count,
                (count - 1) / (now - first) if count > 1 else 0.0, memory, ended(request, decoder.stopped),
            )  # fmt: skip


class _Row:
    """One reply of a batch, as it comes."""

    def __init__(self, request: Request, decoder: Any) -> None:
        self.request, self.decoder = request, decoder
        self.text, self.ids, self.scores = "", list[int](), list[float]()

    def take(self, token: int, logits: Tensor) -> None:
        if token in self.request.stop_ids:
            return
        self.text += self.decoder.push(token)
        self.ids.append(token)
        if self.request.wants_logits:
            self.scores.append(float(torch.log_softmax(logits.float(), -1)[token]))


def batch_generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    prompt_caches: None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = True,
    return_logprobs: bool = False,
    *,
    sampler: Chooser | None = None,
    logits_processors: Sequence[Processor] | None = None,
    completion_batch_size: int = 32,
    prefill_step_size: int | None = None,
    stop: str | Sequence[str] = (),
    **sampling: Any,
) -> BatchResponse:
    """The replies to several prompts, computed together. On a CPU each is the reply it would be alone, bit for bit.

    Arguments are mlx-lm's, options those of stream_generate. A prompt is a text or token ids; `max_tokens` may be one
    number for each. Token ids are returned whatever `return_token_ids` says; `logprobs` are as the model gave them,
    before processors. `verbose` says on standard error how fast it was.
    """
    if prompt_caches is not None or return_prompt_caches:
        name = "return_prompt_caches" if prompt_caches is None else "prompt_caches"
        raise ValueError(f"batch_generate: {name} is not taken; stream_generate goes on with a prompt_cache")
    all_ids, rooms = several(model, tokenizer, prompts, max_tokens)
    chosen = [choosing(tokenizer, sampler, sampling) for _ in all_ids]
    requests = [
        Request(
            ids, most, params, tokenizer.eos_ids, logits_processors or (), chooser,
            keeps=False, wants_logits=return_logprobs,
        )
        for ids, most, (params, chooser) in zip(all_ids, rooms, chosen, strict=True)
    ]  # fmt: skip
    rows = [_Row(request, tokenizer.decoder(stop)) for request in requests]
    longest = max((len(ids) + most for ids, most in zip(all_ids, rooms, strict=True)), default=0)
    slots = max(min(completion_batch_size, len(rows)), 1)
    what = f"a cache for {slots} texts (completion_batch_size) of {longest} tokens (max_tokens)"
    require(bytes_of(model.kept, slots, longest, prefill_step_size or model.chunk, model.dtype), model.device, what)
    compile_kernels(model)
    stats = _run(Engine(model, model.new_cache(slots, longest, prefill_step_size)), rows)
    if verbose:
        _say_speed(stats)
    return BatchResponse(
        [row.text + row.decoder.finish() for row in rows],
        stats,
        [row.ids for row in rows],
        [ended(row.request, row.decoder.stopped) or "length" for row in rows],
        [row.scores for row in rows] if return_logprobs else None,
    )


def _run(engine: Engine, rows: list[_Row]) -> BatchStats:
    """Have an engine answer all rows."""
    by_request = {id(row.request): row for row in rows}
    for row in rows:
        engine.submit(row.request)
    spent = {True: 0.0, False: 0.0}  # seconds of steps that computed a prompt, and of the others
    while engine.busy:
        start, before = time.perf_counter(), sum(row.request.computed for row in rows)
        for request, token, logits in engine.step():
            row = by_request[id(request)]
            row.take(token, logits)
            if row.decoder.stopped is not None:
                engine.cancel(request, "stop")
        spent[sum(row.request.computed for row in rows) > before] += time.perf_counter() - start
    prompted, made = sum(len(row.request.prompt) for row in rows), sum(len(row.request.made) for row in rows)
    return BatchStats(
        prompted, prompted / spent[True] if prompted else 0.0, made, made / (sum(spent.values()) or 1.0),
        peak(engine.model.device) / 1e9,
    )  # fmt: skip


def _new_cache(model: Decoder, chunk: int | None) -> Cache:
    """An empty cache: that of the last reply where it was left, because steps are recorded on it."""
    left = _left.pop(model, None) if chunk is None else None
    return model.new_cache(1, 0, chunk) if left is None else left
