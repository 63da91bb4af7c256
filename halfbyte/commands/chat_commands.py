"""What may be typed in `halfbyte chat` instead of a message: /help and the others, one function each."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HalfbyteError, size
from .terminal import table

if TYPE_CHECKING:
    from ..conversation import Conversation

KEYS = [
    ('"""', "begins and ends a message of several lines; so does \\ at the end of a line"),
    ("Ctrl-C", "stops the reply"),
    ("Ctrl-D", "leaves"),
]


class Refused(HalfbyteError):
    """A command that is unknown or lacks something; the text says what to type."""


class Leave(Exception):
    """The person wants to go."""


def obey(line: str, conversation: Conversation, model: str) -> str:
    """Do what a line that begins with / says, and return what to tell."""
    name, _, rest = line.strip().partition(" ")
    command = COMMANDS.get(name.lower())
    if command is None:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else "A message may begin with a space."
        raise Refused(f"{name}: there is no such command. {hint} /help lists them.")
    return command(rest.strip(), conversation, model)


def help(rest: str, conversation: Conversation, model: str) -> str:
    return table([(usage, said) for usage, said in USAGE] + KEYS)


def system(rest: str, conversation: Conversation, model: str) -> str:
    if not rest:
        return f"The system prompt is: {conversation.system}" if conversation.system else "There is no system prompt."
    if conversation.raw:
        raise Refused("/system: goes with a chat template, and there is none here. Put it into a message.")
    text = unquoted(rest)
    conversation.system = text or None
    return "The system prompt is set." if text else "The system prompt is removed."


def clear(rest: str, conversation: Conversation, model: str) -> str:
    conversation.clear()
    kept = " The system prompt stays." if conversation.system else ""
    return f"The conversation is forgotten.{kept}"


def save(rest: str, conversation: Conversation, model: str) -> str:
    from .. import conversation_file

    path = path_of(rest, "/save")
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    conversation_file.save(path, [*system, *conversation.messages], model)
    return f"{counted(len(conversation.messages))} saved in {path}."


def load(rest: str, conversation: Conversation, model: str) -> str:
    from .. import conversation_file

    path = path_of(rest, "/load")
    messages = conversation_file.load(path)
    if messages and messages[0]["role"] == "system":
        conversation.system = messages.pop(0)["content"] or None
    else:
        conversation.system = None
    conversation.messages = messages
    return f"{counted(len(messages))} loaded from {path}."


def stats(rest: str, conversation: Conversation, model: str) -> str:
    rows = [
        ("messages", str(len(conversation.messages)) + (", and a system prompt" if conversation.system else "")),
        ("context", f"{conversation.held if conversation.messages else 0} of {conversation.model.context} tokens"),
    ]
    if last := conversation.stats:
        rows += [
            ("prompt", f"{last.prompt_tokens} tokens, {last.reused} of them known; {last.prompt_tps:.1f} tok/s"),
            ("reply", f"{last.generation_tokens} tokens; {last.generation_tps:.1f} tok/s ({last.finish_reason})"),
            ("first token", f"after {last.ttft_s:.2f} s"),
            ("peak memory", size(last.peak_memory)),
        ]
    if (residency := conversation.model.residency) is not None and (rate := residency.reads.hit_rate) is not None:
        read, seconds = residency.reads.bytes, residency.reads.seconds
        came = f"{size(read)} from {residency.source}"
        came += f", read at {size(round(read / seconds))}/s" if seconds else ""
        rows += [("experts", f"{rate:.1%} were in memory ({size(residency.nbytes)}); {came}")]
    return table(rows)


def leave(rest: str, conversation: Conversation, model: str) -> str:
    raise Leave


def path_of(rest: str, command: str) -> Path:
    name = unquoted(rest)
    if not name or "\0" in name:
        raise Refused(f"{command} needs the name of a file: {command} FILE")
    return Path(os.path.expanduser(name))


def unquoted(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text


def counted(messages: int) -> str:
    return f"{messages} message{'' if messages == 1 else 's'}"


USAGE = [
    ("/help", "shows this"),
    ("/system TEXT", 'sets the system prompt; without a text shows it, "" removes it'),
    ("/clear", "begins a new conversation"),
    ("/save FILE", "writes the conversation to a file"),
    ("/load FILE", "goes on with a saved conversation"),
    ("/stats", "shows speed, memory, and how full the context is"),
    ("/exit", "leaves; so does /bye"),
]
COMMANDS = {
    "/help": help, "/?": help, "/system": system, "/clear": clear, "/save": save, "/load": load, "/stats": stats,
    "/exit": leave, "/bye": leave, "/quit": leave,
}  # fmt: skip
