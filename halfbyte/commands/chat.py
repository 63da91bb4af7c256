"""`halfbyte chat`: a conversation, on a terminal or through a pipe."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import HalfbyteError, size
from ..progress import passing, prompt_progress
from . import arguments as shared
from .chat_commands import Leave, obey
from .chat_input import Input
from .interrupts import interrupts
from .terminal import colours, tolerate_any_text
from .wrapping import Writer

if TYPE_CHECKING:
    from ..conversation import Conversation, Stats

SHARED = ("device", "revision", "offline")
DIM, BOLD, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"


def arguments(parser: argparse.ArgumentParser) -> None:
    shared.add(parser, max_tokens=None)


def run(args: argparse.Namespace) -> int:
    """Talk with a model. Ctrl-C stops a reply, /help lists commands; a pipe's lines are answered one by one."""
    wishes = shared.checked(args)
    tolerate_any_text()
    return talk(args, wishes)


def talk(args: argparse.Namespace, wishes: shared.Wishes) -> int:
    from ..conversation import Conversation
    from ..machine import backend

    model, tokenizer = shared.loaded(args.model, args, args.load)
    shared.require_template(args, tokenizer)
    conversation = Conversation(
        model, tokenizer, args.system_prompt, max_tokens=args.max_tokens, stop=args.stop,
        template_args=wishes.template_args, raw=args.ignore_chat_template, prefill_step_size=args.prefill_step_size,
        **wishes.sampling,
    )  # fmt: skip
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return Pipe(conversation, args.model).run()
    screen = Screen(conversation, args.model)
    screen.open(backend(model.device))
    with interrupts(conversation.stop):
        return screen.run()


class Pipe:
    """Without a terminal: messages from standard input, replies to standard output, all else to standard error."""

    def __init__(self, conversation: Conversation, model: str) -> None:
        self.conversation, self.model = conversation, model
        self.input = Input(interactive=False)
        self.status = 0

    def run(self) -> int:
        while True:
            try:
                self.take(self.input.message())
            except (EOFError, Leave):
                return self.status
            except HalfbyteError as error:
                print(f"halfbyte: {error}", file=sys.stderr)
                self.status = error.exit_code

    def take(self, text: str) -> None:
        if text.startswith("/") and "\n" not in text:
            self.tell(obey(text, self.conversation, self.model))
        elif text.strip():
            self.answer(text)

    def tell(self, text: str) -> None:
        print(text, flush=True)

    def answer(self, text: str) -> None:
        for event in self.conversation.say(text, prompt_progress()):
            if event.kind == "text":  # what the model thought is no part of the answer
                print(event.text, end="", flush=True)
        print(flush=True)


class Screen(Pipe):
    """On a terminal: the same with a first screen, colours, editing, and Ctrl-C that stops only the reply."""

    def __init__(self, conversation: Conversation, model: str) -> None:
        super().__init__(conversation, model)
        self.coloured = colours(sys.stdout)
        # readline counts characters to know where the line wraps: those between \001 and \002 take no room.
        prompt = f"\001{BOLD}\002> \001{PLAIN}\002" if self.coloured else "> "
        self.input = Input(interactive=True, prompt=prompt)

    def open(self, backend: str) -> None:
        model = self.conversation.model
        print(self.bold(f"halfbyte {__version__}") + f" · {backend}")
        toy = " (a toy that checks your install)" if self.model == shared.DEFAULT_MODEL else ""
        print(f"{self.model}{toy} · {model.model_type} · context of {model.context} tokens")
        if self.conversation.raw:
            print("No chat template: the model goes on with your text.")
        self.tell('/help lists commands, """ begins several lines, Ctrl-C stops a reply, Ctrl-D leaves.')
        print(flush=True)

    def run(self) -> int:
        while True:
            try:
                self.take(self.input.message())
            except (EOFError, Leave):
                print(flush=True)
                return 0
            except KeyboardInterrupt:
                print()
                if not self.input.begun:
                    self.tell("Ctrl-D or /bye leaves.")
            except HalfbyteError as error:
                passing("")
                print(f"{error}\n", flush=True)

    def take(self, text: str) -> None:
        super().take(text)
        if text.strip():
            print(flush=True)

    def tell(self, text: str) -> None:
        print(self.dim(text), flush=True)

    def answer(self, text: str) -> None:
        before, kind, writer = len(self.conversation.messages), "text", Writer(sys.stdout)
        passing("...")
        with suppress(KeyboardInterrupt), closing(self.conversation.say(text, prompt_progress())) as reply:
            for event in reply:
                passing("")
                if event.kind != kind:
                    self.turn_to(event.kind, writer)
                    kind = event.kind
                writer.write(event.text)
        passing("")
        if kind == "reasoning":
            self.turn_to("text", writer)
        if len(self.conversation.messages) == before:
            self.tell("Stopped before the reply: the message is taken back.")
        elif self.conversation.stats is not None:
            print()
            self.tell(self.summary(self.conversation.stats))

    def turn_to(self, kind: str, writer: Writer) -> None:
        """What the model thinks is dim, and stands apart from what it says."""
        if self.coloured:
            print(DIM if kind == "reasoning" else PLAIN, end="")
        elif kind == "reasoning":
            writer.write("Thinking: ")
        if kind == "text":
            writer.write("\n\n")

    def summary(self, stats: Stats) -> str:
        said = [
            f"{stats.generation_tps:.0f} tok/s" if stats.generation_tokens > 1 else "1 token",
            f"first token {stats.ttft_s:.2f} s",
            f"peak memory {size(stats.peak_memory)}",
            self.ending(stats),
        ]
        return " · ".join(filter(None, said))

    def ending(self, stats: Stats) -> str:
        if stats.finish_reason == "interrupted":
            return "stopped"
        if stats.finish_reason != "length":
            return ""
        if stats.generation_tokens == self.conversation.max_tokens:
            return f"cut at {stats.generation_tokens} tokens (-m)"
        return "the context is full: /clear begins anew"

    def dim(self, text: str) -> str:
        return f"{DIM}{text}{PLAIN}" if self.coloured else text

    def bold(self, text: str) -> str:
        return f"{BOLD}{text}{PLAIN}" if self.coloured else text
