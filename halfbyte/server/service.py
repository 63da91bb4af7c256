"""From a wish to jobs: the work that is done before a request may join the line, off the loop's thread."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from .. import grammar, limits
from ..cache import Cache, bytes_of, padding_of
from ..chat import Tokenizer
from ..engine import Processor, Request
from ..errors import NotEnoughMemory, size
from ..fitting import STEP
from ..grammar import Constraint, Form, GrammarError, Grammars
from ..jobs import Job
from ..memory import available
from ..models.decoder import Decoder
from ..prefixes import shared
from ..scheduler import Scheduler
from ..text import template
from ..text.decoder import Stops
from ..text.reply import Event, Reply
from ..text.template import TemplateError
from . import tools
from .line import Line
from .refusals import Refused, wrong
from .schema import Wish, full
from .settings import Settings
from .streams import Desk
from .tables import Model

CACHE_SHARE = 0.1  # of memory, for the beginnings of prompts
SMALLEST = 256  # tokens: a context below this serves nobody
MOST_THREADS = 8  # that render and tokenise prompts; the loop and the engine need cores too
PAUSE = 0.002  # seconds: see Desk; on a GPU a step leaves the cores to those who write


class Service:
    """A model that is served: everything that requests share."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, names: Sequence[str], settings: Settings) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        template.worker.limit(settings.template_seconds, settings.template_mb << 20, settings.template_output_mb << 20)
        grammar.worker.limit(settings.schema_seconds, limits.SCHEMA_MEMORY, limits.SCHEMA_OUTPUT)
        # Who sends many schemas waits for nobody else's texts, nor does a form that is known to be fine wait for them.
        self.trials, self.compiling = Line("trials", settings.max_queue), Line("schemas", settings.max_queue)
        prompts = settings.max_queue + settings.max_concurrency  # that may come to anything
        self.preparing = Line("prompts", prompts, min(os.cpu_count() or 1, MOST_THREADS))
        free = max(available(model.device) - (STEP if model.device.type == "cpu" else 0), 0)
        budget = settings.prompt_cache_bytes if settings.prompt_cache_bytes >= 0 else int(free * CACHE_SHARE)
        if budget > free:
            raise NotEnoughMemory(
                f"--prompt-cache-bytes may take {size(budget)} on {model.device}, and {size(free)} are free there. "
                "Give it fewer, or leave it out: then it is a tenth of what is free."
            )
        self.cache = new_cache(model, settings, free - budget)
        self.described = Model(tuple(names), self.cache.capacity, model.vocabulary, tokenizer.generation_config)
        self.grammars = Grammars(tokenizer, model.vocabulary)
        self.desk = Desk(settings.stream_buffer_kb * 1000, PAUSE if model.device.type == "cpu" else 0.0)
        self.scheduler = self.desk.scheduler = Scheduler(
            model, self.cache, tokenizer.eos_ids, self.desk.deliver,
            max_queue=settings.max_queue, prefix_bytes=budget, step_seconds=settings.step_seconds,
        )  # fmt: skip
        self.draining = False

    def close(self) -> None:
        self.scheduler.close()
        self.trials.close()
        self.compiling.close()
        self.preparing.close()

    async def jobs(self, wish: Wish, owner: bytes) -> list[Job]:
        """The jobs of a wish, or a refusal: texts rendered and tokenised, schemas compiled."""
        most = self.cache.slots + self.settings.max_queue
        if wish.n * max(len(wish.prompts), 1) > most:  # nor would it be taken later
            field = "n" if wish.n > 1 else "prompt"
            raise wrong(field, f"at most {most} replies, which is what the slots and the queue hold,")
        constraint = await self._compiled(wish)
        made = []
        for prompt, stable, opening in await self.prepared(wish):
            if len(prompt) >= self.cache.capacity:
                raise full(len(prompt), self.cache.capacity, wish.asks)
            made += [self._job(wish, owner, number, prompt, stable, opening, constraint) for number in range(wish.n)]
        return made

    async def prepared(self, wish: Wish) -> list[tuple[list[int], int, str]]:
        """What `texts` or `conversation` make of a wish, in a line that is left by clients that go."""
        if wish.prompts and not any(isinstance(prompt, str) for prompt in wish.prompts):
            return self.texts(wish)  # ids: no work that is worth a thread
        return await self.preparing.run(partial(self.conversation if wish.messages else self.texts, wish))

    async def _compiled(self, wish: Wish) -> Constraint | None:
        """What replies are held to, if to anything."""
        where = "tools"
        try:
            if wish.tools:
                await self._try(lambda: [schema_of(one) for one in wish.tools])
            form = wish.form
            if wish.forced is not None and self.tokenizer.syntax.call[0]:  # then the answer is a call
                form = "grammar", await self.compiling.run(partial(self._called, wish, wish.forced))
            elif form is not None:
                where = "response_format"
            if form is None:
                return None
            await self._try(lambda: [form])
            return await self.compiling.run(partial(self.grammars.constraint, *form))
        except GrammarError as error:
            said = f"A schema or grammar cannot be followed: {error}"
            raise Refused(400, said, where, "invalid_schema") from None

    async def _try(self, forms: Callable[[], list[Form]]) -> None:
        """Refuse what cannot be followed. Where all of them are known, nobody is waited for."""
        if new := await asyncio.to_thread(lambda: grammar.untried(*forms())):
            await self.trials.run(partial(grammar.check, *new))

    def _called(self, wish: Wish, forced: str) -> str:
        return tools.rest(self.tokenizer.syntax, wish.tools, forced, wish.single, self.grammars.term)

    def texts(self, wish: Wish) -> list[tuple[list[int], int, str]]:
        encode = self.tokenizer.prompt_ids
        texts = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in wish.prompts]
        return [(ids, 0, "") for ids in texts]

    def conversation(self, wish: Wish) -> list[tuple[list[int], int, str]]:
        """The ids of a conversation, how many of them the next one will share, and a call that is begun for it."""
        given = {"tools": wish.tools or None, **wish.template_args}
        try:
            ids = self.tokenizer.chat_ids(wish.messages, add_generation_prompt=wish.opens, **given)
            before = self.tokenizer.chat_ids(wish.messages, add_generation_prompt=False, **given)
        except TemplateError as error:
            raise Refused(400, str(error), wish.asks, "template_failed") from None
        stable = shared(ids, before)
        if wish.forced is None or not wish.opens:
            return [(ids, stable, "")]
        opening = tools.opening(self.tokenizer.syntax, wish.forced)
        if self.tokenizer.reply(ids).state == "reasoning":
            opening = f"{self.tokenizer.syntax.think[1]}\n\n{opening}"
        return [([*ids, *self.tokenizer.encode(opening, special=True)], stable, opening)]

    def _job(
        self,
        wish: Wish,
        owner: bytes,
        number: int,
        prompt: list[int],
        stable: int,
        opening: str,
        form: Constraint | None,
    ) -> Job:
        seed = secrets.randbits(62) if wish.params.seed is None else wish.params.seed
        params = replace(wish.params, seed=seed + number if seed + number < 1 << 63 else seed - number)
        room = min(wish.max_tokens, self.cache.capacity - len(prompt))
        reply, early = self._reply(wish, prompt, opening)
        told = wish.logprobs is not None
        stops = Stops(wish.stop, self.settings.max_stop, self.settings.max_stop_bytes)
        job = Job(
            Request(prompt, room, params, self.tokenizer.eos_ids, wants_logits=told), owner,
            self.tokenizer.decoder(stops), reply, form.copy() if form else None, wish.logprobs,
            single=wish.single, stable=stable, prompt=prompt, early=early,
        )  # fmt: skip
        if job.constraint is not None:
            job.constraint.active = reply is None or reply.state != "reasoning"
            job.request.processors = [guarded(job, job.constraint)]
        return job

    def _reply(self, wish: Wish, prompt: list[int], opening: str) -> tuple[Reply | None, list[Event]]:
        if not wish.messages:
            return None, []
        if not opening:
            return self.tokenizer.reply(prompt, wish.tools or None), []
        reply = Reply(
            self.tokenizer.syntax, wish.tools, thinking=opening.startswith(self.tokenizer.syntax.think[1] or "\0")
        )
        return reply, reply.push(opening)


def schema_of(tool: dict[str, Any]) -> Form:
    return "tool", json.dumps(tool["function"].get("parameters") or {})


def guarded(job: Job, constraint: Constraint) -> Processor:
    """A constraint as the engine calls it. Should it fail, the job ends, and the others of the step go on."""

    def mask(ids: Tensor, logits: Tensor) -> Tensor:
        try:
            return constraint.mask(logits)
        except GrammarError as error:
            job.error = str(error)
            return logits

    return mask


def new_cache(model: Decoder, settings: Settings, free: int) -> Cache:
    """Room for every slot, now: as much of the model's context as memory has, so that nothing runs out later."""
    slots, wanted = settings.max_concurrency, min(model.context, settings.max_context or model.context)
    chunk = model.new_cache(0).chunk

    def need(tokens: int) -> int:
        return bytes_of(model.kept, slots + padding_of(slots, model.device), tokens, chunk, model.dtype)

    tokens = wanted
    while tokens >= SMALLEST and need(tokens) > free:
        tokens = tokens * 7 // 8
    if need(tokens) > free or (settings.max_context and tokens < wanted):
        raise NotEnoughMemory(
            f"{slots} requests of {wanted} tokens need {size(need(wanted))} on {model.device}, and {size(free)} are "
            "free there. Give a smaller --max-concurrency or --max-context."
        )
    return model.new_cache(slots, tokens)
