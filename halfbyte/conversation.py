"""A conversation with a model: its messages, and the model's state of them, which is computed once.

    conversation = Conversation(model, tokenizer, system="Be brief.")
    for event in conversation.say("Why is the sky blue?"):
        print(event.text, end="", flush=True)

The state follows the messages, never the other way round: each prompt is made of the messages anew, and what of its ids
the state holds already is not computed again. So messages may be changed, replaced or taken away between two replies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .cache import Cache, Snapshot, make_room
from .chat import Tokenizer
from .engine import Engine, Made, Request
from .errors import HalfbyteError, NotEnoughMemory
from .memory import peak
from .models.decoder import Decoder
from .prefixes import shared
from .request import ended
from .sampling import SamplingParams
from .text.reply import Event

Message = dict[str, str]
Progress = Callable[[int, int], None]  # (tokens computed, tokens in all)
LONG_PROMPT = 256  # tokens: reading fewer is not worth a progress bar


class ContextFull(HalfbyteError, ValueError):
    """The messages leave the model no room for a reply."""

    exit_code = 2


@dataclass
class Stats:
    """What a reply took. `reused` tokens of the prompt were held already; memory is in bytes, the process's most."""

    prompt_tokens: int
    reused: int
    generation_tokens: int = 0
    prompt_seconds: float = 0.0  # until the first token was drawn
    ttft_s: float = 0.0  # the same with the chat template's work before it
    generation_seconds: float = 0.0  # from the first token to the last
    peak_memory: int = 0
    finish_reason: str = "interrupted"  # until another reason is known

    @property
    def prompt_tps(self) -> float:
        return (self.prompt_tokens - self.reused) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_tps(self) -> float:
        return (self.generation_tokens - 1) / self.generation_seconds if self.generation_seconds else 0.0


class Conversation:
    """`messages` are {role, content} and, where the model thought, reasoning_content; `system` stands before them.

    A reply may be stopped at any time: by `stop()`, by leaving the loop over `say`, or by an exception out of the
    middle of a step (Ctrl-C). Stopped before its first token, it leaves nothing, and the question is taken back too.
    Stopped later, question and partial reply stay, as they were shown.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        system: str | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        template_args: Mapping[str, Any] | None = None,
        raw: bool = False,
        prefill_step_size: int | None = None,
        **sampling: Any,
    ) -> None:
        """`max_tokens` None: as far as the context goes. `raw`: no template, the model goes on with the text."""
        self.model, self.tokenizer, self.system = model, tokenizer, system
        self.messages: list[Message] = []
        self.stats: Stats | None = None  # of the last reply
        self.max_tokens, self.stops, self.raw = max_tokens, stop, raw or not tokenizer.templates
        self.template_args = dict(template_args or {})
        self.params = SamplingParams.of(tokenizer.generation_config, **sampling)
        self._cache: Cache = model.new_cache(1, 0, prefill_step_size)
        self._held: list[int] = []  # the ids that the cache holds
        self._unsure = False  # an exception came out of a step: layers may hold different numbers of tokens
        self._mark: Snapshot | None = None  # of the beginning that the next prompt will share, whatever its template
        self._request: Request | None = None
        self._engine: Engine | None = None  # that answers it
        self._stopping = False

    @property
    def held(self) -> int:
        """How many tokens the model's state holds."""
        return len(self._held)

    def clear(self) -> None:
        """Forget the messages; the system prompt stays."""
        self.messages = []

    def stop(self) -> bool:
        """End the reply that is being made after its present token; False while there is none to end so."""
        answering = self._request is not None and bool(self._request.made) and not self._stopping
        self._stopping = answering or self._stopping
        return answering

    def say(self, text: str, progress: Progress | None = None) -> Generator[Event, None, None]:
        """The reply to a message, as it comes. `progress` is told how much of a long prompt is computed."""
        start = time.perf_counter()
        messages = [*self.messages, {"role": "user", "content": text}]
        ids, stable = self._prompt(messages)
        room = self.model.context - len(ids)
        if room < 1:
            raise ContextFull(
                f"the conversation has {len(ids)} tokens with this message, and the model's context is "
                f"{self.model.context}. Begin a new one (/clear), or say it in fewer words."
            )
        if self._engine is not None and self._request is not None:  # a reply that was left in the middle
            self._engine.cancel(self._request, "left")
        self._keep(ids)
        self._stopping = False
        request = self._request = Request(
            ids, min(room, self.max_tokens or room), self.params, self.tokenizer.eos_ids,
            goes_on=True, pause=stable, computed=len(self._held), wants_logits=False,
        )  # fmt: skip
        stats = Stats(len(ids), len(self._held))
        reply: Message = {"role": "assistant", "content": ""}
        try:
            for events in self._tokens(request, stats, start, progress):
                if reply is not messages[-1]:
                    messages.append(reply)
                    self.messages, self.stats = messages, stats
                for event in events:
                    name = "content" if event.kind == "text" else "reasoning_content"
                    reply[name] = reply.get(name, "") + event.text
                    yield event
        finally:
            stats.peak_memory = peak(self.model.device)
            if self._request is request:
                self._request = None

    def _prompt(self, messages: list[Message]) -> tuple[list[int], int]:
        """The ids of a prompt, and how many of them stay as they are whatever the reply becomes.

        The template may write an answer of the past differently from one being given (without its reasoning), so what
        stands before the reply is the last place to which the state can surely go back.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        given = [*system, *messages]
        if self.raw:
            ids = self.tokenizer.prompt_ids("\n".join(message["content"] for message in given))
            return ids, len(ids) - 1
        ids = self.tokenizer.chat_ids(given, **self.template_args)
        without = self.tokenizer.chat_ids(given, add_generation_prompt=False, **self.template_args)
        return ids, min(shared(ids, without), len(ids) - 1)

    def _keep(self, ids: list[int]) -> None:
        """Bring the state to a beginning of these ids but not all: what it holds, what was marked, or nothing."""
        usable = min(shared(self._held, ids), len(ids) - 1)
        if not self._unsure and usable == len(self._held):
            return
        self._unsure = True
        if self._mark is not None and self._mark.length <= usable:
            self._held = self._held[: self._mark.length]
            self._cache.restore(0, self._mark)
        else:
            self._held, self._mark = [], None
            self._cache.reset(0)
        self._unsure = False

    def _tokens(self, request: Request, stats: Stats, start: float, progress: Progress | None) -> Iterator[list[Event]]:
        """For each token of the reply, what it made sure of: often one event, sometimes none."""
        engine, decoder = Engine(self.model, self._cache), self.tokenizer.decoder(self.stops)
        self._engine = engine
        reply = self.tokenizer.reply(request.prompt)
        engine.submit(request)
        new = len(request.prompt) - stats.reused
        told: Progress = progress if progress is not None and new >= LONG_PROMPT else lambda done, total: None
        told(0, new)
        begun, first = time.perf_counter(), 0.0
        try:
            while engine.busy or request.finish_reason == "left":
                made = self._step(engine, request)
                if not request.made[1:]:
                    told(request.computed - stats.reused, new)
                for _, id, _ in made:
                    now = time.perf_counter()
                    if not first:
                        first, stats.prompt_seconds, stats.ttft_s = now, now - begun, now - start
                    stats.generation_tokens, stats.generation_seconds = len(request.made), now - first
                    events = reply.push("" if id in self.tokenizer.eos_ids else decoder.push(id))
                    if decoder.stopped is not None or self._stopping:
                        engine.cancel(request, "interrupted" if decoder.stopped is None else "stop")
                    if request.finish_reason is not None:
                        stats.finish_reason = ended(request, decoder.stopped) or ""
                        events += [*reply.push(decoder.finish()), *reply.finish()]
                    yield events
        finally:
            engine.cancel(request, "interrupted")  # so that the state is that of the tokens which were given

    def _step(self, engine: Engine, request: Request) -> list[Made]:
        """One step, after which `_held` is what the cache holds; or an exception, and the cache is `_unsure`."""
        if self._request is not request:
            raise RuntimeError("this reply was left for another one: it cannot go on")
        prompt, cache = request.prompt, self._cache
        length = max(len(prompt), len(self._held)) + 1
        make_room(cache, length, f"a conversation of {length} tokens")  # refused here, not when half of it is computed
        self._unsure = True
        try:
            made = engine.step()
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise NotEnoughMemory(f"{self.model.device} has no memory left for {length} tokens: begin anew.") from error
        first, end = len(self._held), cache.lengths[0]
        self._held += prompt[first:end] or request.made[first - len(prompt) : end - len(prompt)]
        self._unsure = False
        if end == request.pause:
            self._mark = cache.mark(0)
        return made
