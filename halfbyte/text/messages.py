"""The messages of a conversation, as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import shown
from .template import TemplateError

Messages = Sequence[Mapping[str, Any]]
END = "\ufdd3 "  # a noncharacter, which no text may contain, and a space, which shows whether a template trims
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; templates read the first


def normal(messages: Messages) -> list[dict[str, Any]]:
    """Messages as templates expect them: reasoning under its name, text parts joined, arguments as objects."""
    if isinstance(messages, str | Mapping) or not messages:
        raise TemplateError("The messages must be a list of at least one {'role': ..., 'content': ...}.")
    normal = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"messages[{index}]: an object with a role was expected, it is {shown(message)}.")
        one = dict(message)
        reasoning = next((one[name] for name in REASONING if one.get(name) is not None), None)
        if reasoning is not None:
            one = {"thinking": reasoning, **one, "reasoning_content": reasoning}
        if isinstance(one.get("content"), list | tuple):
            one["content"] = _joined(one["content"], index)
        if isinstance(one.get("tool_calls"), list | tuple):
            one["tool_calls"] = [_call(call) for call in one["tool_calls"]]
        normal.append(one)
    return normal


def marked_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark at the end of the last one's content, where its text is to be cut."""
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        raise TemplateError("continue_final_message: the last message has no text to go on with.")
    return [*messages[:-1], {**messages[-1], "content": content + END}]


def cut_at_end(text: str) -> str:
    """What a template made of such messages, up to the mark; without the space before it where the template trims."""
    before, mark, after = text.rpartition(END[0])
    if not mark:
        raise TemplateError("continue_final_message: the chat template leaves the last message out.")
    return before if after.startswith(END[1:]) else before.rstrip()


def _joined(parts: Iterable[Any], index: int) -> str:
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    joined = [text for text in texts if isinstance(text, str)]
    if len(joined) < len(texts):
        raise TemplateError(f"messages[{index}]: only parts of text are taken.")
    return "".join(joined)


def _call(call: Any) -> Any:
    """OpenAI's clients send arguments as a string of JSON; templates read an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
