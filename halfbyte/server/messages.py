"""Anthropic's messages: what a request has, the conversation in it, and the answer as a row of content blocks."""

from __future__ import annotations

import json
import secrets
from typing import Any

from ..chat import Tokenizer
from ..jobs import Job, Piece
from . import schema, tables
from .answers import event
from .blocks import Block, Blocks, Change
from .fields import Choice, Either, Field, Flag, Integer, Items, Object, Table, Tagged, Text
from .refusals import Refused, wrong
from .schema import Given, Wish
from .settings import Settings
from .tables import MOST, TEXT_ONLY, Model, ToolName

NAME_BYTES = 128  # of a tool: names of servers' tools are long
EFFORTS = Choice(("low", "medium", "high", "xhigh", "max"))
STOPS = {"stop": "end_turn", "length": "max_tokens"}
BEGUN = "a conversation that ends with the user, as a reply that was begun is not continued; such a conversation"


def count(model: Model, settings: Settings) -> Table:
    """The body of a question how long a prompt is."""
    text, schema_bytes = Table({"text": Text()}, ("text",)), settings.max_schema_kb * 1000
    texts = Items(Tagged({"text": text}, TEXT_ONLY), 0, settings.max_parts)
    said = Either({str: Text(), list: texts}, "a text or blocks of text")
    blocks = {
        "text": text, "thinking": Table({"thinking": Text()}, ("thinking",)), "redacted_thinking": Table({}),
        "tool_use": Table({"id": Text(), "name": Text(least=1), "input": Object()}, ("id", "name")),
        "tool_result": Table({"tool_use_id": Text(), "content": said, "is_error": Flag()}, ("tool_use_id",)),
    }  # fmt: skip
    content = Either({str: Text(), list: Items(Tagged(blocks, TEXT_ONLY), 0, settings.max_parts)}, "a text or blocks")
    message = Table({"role": Choice(("user", "assistant", "system")), "content": content}, ("role", "content"))
    tool = {
        "type": Choice(("custom",)), "name": ToolName(NAME_BYTES, 1), "description": Text(schema_bytes),
        "input_schema": Object(schema_bytes),
    }  # fmt: skip
    form = Tagged({"json_schema": Table({"schema": Object(schema_bytes)}, ("schema",))}, "the type 'json_schema'")
    alone = Table({"disable_parallel_tool_use": Flag()})
    named = Table({**alone.fields, "name": Text(NAME_BYTES)}, ("name",))
    choices = {"auto": alone, "any": alone, "none": Table({}), "tool": named}
    kinds = dict.fromkeys(("enabled", "adaptive", "disabled"), Table({"budget_tokens": Integer(1, MOST)}))
    fields: dict[str, Field] = {
        **tables.common(model, settings), "system": said,
        "messages": tables.Conversation(message, 1, settings.max_messages, most=settings.max_items),
        "max_tokens": Integer(1, MOST), "stop_sequences": tables.stops(settings), "metadata": Object(),
        "tools": Items(Table(tool, ("name", "input_schema")), 0, settings.max_tools),
        "tool_choice": Tagged(choices, "the type 'auto', 'any', 'tool' or 'none'"),
        "thinking": Tagged(kinds, "the type 'enabled', 'adaptive' or 'disabled'"),
        "output_config": Table({"effort": EFFORTS, "format": form}),
    }  # fmt: skip
    return Table(fields, ("messages",))


def table(model: Model, settings: Settings) -> Table:
    """The body of a request for a reply."""
    return Table(count(model, settings).fields, ("messages", "max_tokens"))


def wish(given: Given, model: Model, settings: Settings) -> Wish:
    config, thinking = given["output_config"] or {}, given["thinking"]
    more = given["chat_template_kwargs"] or {}
    asked = {"enable_thinking": thinking is not None and thinking["type"] != "disabled"}  # unasked, a reply has none
    if thinking is None and "thinking" in more:  # under the name that other templates have for it
        asked = {}
    made = Wish(
        params=schema.sampling(given, model),
        stop=given["stop_sequences"] or [],
        max_tokens=given["max_tokens"] or settings.max_tokens_default,
        stream=bool(given["stream"]),
        form=schema.form(config.get("format")),
        template_args=schema.template_args({**asked, **more}, config.get("effort")),
        given=given,
    )
    system = [{"role": "system", "content": schema.text_of(given["system"])}] if given["system"] else []
    spoken = [turn for message in given["messages"] for turn in _turns(message)]
    if not spoken or spoken[-1]["role"] == "assistant":
        raise wrong("messages", BEGUN)
    made.messages = [*system, *spoken]
    choice = given["tool_choice"] or {"type": "auto"}
    kind = {"any": "required", "tool": "named"}.get(choice["type"], choice["type"])
    schema.choose(made, [_tool(one) for one in given["tools"] or []], kind, choice.get("name"))
    made.single = bool(choice.get("disable_parallel_tool_use"))
    return schema.bounded(made, model, settings)


def _tool(given: Given) -> dict[str, Any]:
    described = {} if given["description"] is None else {"description": given["description"]}
    return {"type": "function", "function": {"name": given["name"], **described, "parameters": given["input_schema"]}}


def _turns(message: Given) -> list[dict[str, Any]]:
    """A message in the shape of chat completions, where each result of a tool is one of its own."""
    role, content = message["role"], message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    turns = [
        {"role": "tool", "tool_call_id": one["tool_use_id"], "content": schema.text_of(one["content"])}
        for one in blocks
        if one["type"] == "tool_result"
    ]
    said: dict[str, Any] = {"role": role, "content": schema.text_of([one for one in blocks if one["type"] == "text"])}
    if thought := "".join(one["thinking"] for one in blocks if one["type"] == "thinking"):
        said["reasoning_content"] = thought
    if calls := [one for one in blocks if one["type"] == "tool_use"]:
        said["tool_calls"] = [schema.call(one["id"], one["name"], json.dumps(one["input"] or {})) for one in calls]
    return turns if turns and not said["content"] else [*turns, said]


class MessagesAnswer:
    """Of one reply. `blocks` is all that it has said."""

    def __init__(self, model: str, tokenizer: Tokenizer, wish: Wish, jobs: list[Job]) -> None:
        self.model, self.job, self.blocks = model, jobs[0], Blocks()
        self.id = f"msg_{secrets.token_hex(12)}"
        self.begun, self.reason = False, ""

    def whole(self, replies: list[list[Piece]]) -> dict[str, Any]:
        for piece in replies[0]:
            self._push(piece)
        content = [_content(block) for block in self.blocks.all]
        return {**self._message(), "content": content, **self._stop(), "usage": self._usage()}

    def events(self, index: int, piece: Piece) -> bytes:
        said = [_sent(change) for change in self._push(piece)]
        if not self.begun:
            self.begun = True
            opening = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
            said.insert(
                0, {"type": "message_start", "message": {**opening, "usage": {**self._usage(), "output_tokens": 0}}}
            )
        return b"".join(event(one, one["type"]) for one in said)

    def end(self) -> bytes:
        last = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return event(last, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def failed(self, refused: Refused) -> bytes:
        return event(refused.anthropic, "error")

    def _push(self, piece: Piece) -> list[Change]:
        changes = self.blocks.push(piece.events)
        if piece.finish_reason is not None:
            self.reason = piece.finish_reason
            changes += self.blocks.end()
        return changes

    def _message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}

    def _stop(self) -> dict[str, Any]:
        met = self.job.decoder.stopped
        reason = "stop_sequence" if met is not None else STOPS.get(self.reason, self.reason)
        if reason == "end_turn" and self.blocks.called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": met}

    def _usage(self) -> dict[str, Any]:
        kept = self.job.reused
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": kept}
        return {"input_tokens": len(self.job.prompt) - kept, "output_tokens": self.job.made, **cached}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": _input(block.text)}


def _input(text: str) -> dict[str, Any]:
    """Arguments as an object, which the API wants; what is none is given as its text."""
    try:
        read = json.loads(text or "{}", strict=False)
        json.dumps(read, allow_nan=False)  # nor is it one with numbers that JSON cannot write
    except (ValueError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {"arguments": text}


def _sent(change: Change) -> dict[str, Any]:
    block = change.block
    if change.what == "begin":
        return {"type": "content_block_start", "index": block.index, "content_block": _content(block)}
    if change.what == "end":
        return {"type": "content_block_stop", "index": block.index}
    kind, name = {
        "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }[block.kind]  # fmt: skip
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: change.text}}
