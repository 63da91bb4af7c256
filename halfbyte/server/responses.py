"""OpenAI's responses, without a memory: what a request has, the conversation in it, and the answer as output items."""

from __future__ import annotations

import secrets
import time
from typing import Any

from ..chat import Tokenizer
from ..jobs import Job, Piece
from . import schema, tables
from .answers import event, usage
from .blocks import Block, Blocks, Change
from .fields import Anything, Choice, Either, Field, Flag, Integer, Items, Object, Only, Table, Tagged, Text
from .refusals import Refused, wrong
from .schema import Given, Wish
from .settings import Settings
from .tables import EFFORTS, MOST, NAME_BYTES, TEXT_ONLY, Model, ToolName

STATELESS = "nothing: nothing is kept here between requests, so the input must be whole: nothing"
ITEMS = "a message, a function_call, a function_call_output or a reasoning item: nothing is kept here: such an item"


def _items(settings: Settings) -> Items:
    text = Table({"text": Text()}, ("text",))
    parts = {**dict.fromkeys(("input_text", "output_text", "text"), text), "refusal": Table({"refusal": Text()})}
    content = Either({str: Text(), list: Items(Tagged(parts, TEXT_ONLY), 0, settings.max_parts)}, "a text or parts")
    texts = Items(text, 0, settings.max_parts)
    items = {
        "message": Table({"role": Choice(("user", "assistant", "system", "developer")), "content": content},
                         ("role", "content")),
        "function_call": Table({"call_id": Text(), "name": Text(least=1), "arguments": Text()},
                               ("call_id", "name", "arguments")),
        "function_call_output": Table({"call_id": Text(), "output": content}, ("call_id", "output")),
        "reasoning": Table({"summary": texts, "content": texts}),
    }  # fmt: skip
    kinds = Tagged(items, ITEMS, default="message")
    return tables.Conversation(kinds, 1, settings.max_messages, most=settings.max_items)


def table(model: Model, settings: Settings) -> Table:
    schema_bytes = settings.max_schema_kb * 1000
    tool = {
        "type": Choice(("function",)), "name": ToolName(NAME_BYTES, 1), "description": Text(schema_bytes),
        "parameters": Object(schema_bytes), "strict": Flag(),
    }  # fmt: skip
    inner = Table({"name": Text(), "schema": Object(schema_bytes), "strict": Flag()}, ("schema",))
    forms = {"text": Table({}), "json_object": Table({}), "json_schema": inner}
    chosen = Table({"type": Choice(("function",)), "name": Text(NAME_BYTES)}, ("type", "name"))
    choices: dict[type, Field] = {str: Choice(("none", "auto", "required")), dict: chosen}
    fields: dict[str, Field] = {
        **tables.common(model, settings), "instructions": Text(), "max_output_tokens": Integer(1, MOST),
        "input": Either({str: Text(least=1), list: _items(settings)}, "a text or a list of items"),
        "tools": Items(Table(tool, ("type", "name")), 0, settings.max_tools),
        "tool_choice": Either(choices, "'none', 'auto', 'required' or a function of the tools"),
        "text": Table({"format": Tagged(forms, "the type 'text', 'json_object' or 'json_schema'"),
                       "verbosity": Choice(("low", "medium", "high"))}),
        "reasoning": Table({"effort": EFFORTS, "summary": Text()}), "parallel_tool_calls": Flag(), "store": Flag(),
        "metadata": Object(), "truncation": Choice(("auto", "disabled")), "include": Anything(),
        "top_logprobs": Only((0,), "0: /v1/chat/completions tells log-probabilities; 0"),
        "background": Only((False,), STATELESS), "previous_response_id": Only((), STATELESS),
        "conversation": Only((), STATELESS), "prompt": Only((), STATELESS),
    }  # fmt: skip
    return Table(fields, ("input",))


def wish(given: Given, model: Model, settings: Settings) -> Wish:
    reasoning, choice = given["reasoning"] or {}, given["tool_choice"] or "auto"
    made = Wish(
        params=schema.sampling(given, model),
        stop=[],
        max_tokens=given["max_output_tokens"] or settings.max_tokens_default,
        stream=bool(given["stream"]),
        form=schema.form((given["text"] or {}).get("format")),
        template_args=schema.template_args(given["chat_template_kwargs"], reasoning.get("effort")),
        single=given["parallel_tool_calls"] is False,
        given=given,
    )
    system = [{"role": "system", "content": given["instructions"]}] if given["instructions"] else []
    made.messages = [*system, *_conversation(given["input"])]
    if not any(message["role"] != "system" or message["content"] for message in made.messages):
        raise wrong("input", "a message")
    name = choice["name"] if isinstance(choice, dict) else None
    schema.choose(made, [_tool(one) for one in given["tools"] or []], "named" if name else str(choice), name)
    return schema.bounded(made, model, settings)


def _tool(given: Given) -> dict[str, Any]:
    said = {name: given[name] for name in ("name", "description", "parameters") if given[name] is not None}
    return {"type": "function", "function": said}


def _conversation(given: str | list[Given]) -> list[dict[str, Any]]:
    """Items in the shape of chat completions: what the model thought, said and called in one turn is one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    turns: list[dict[str, Any]] = []

    def own() -> dict[str, Any]:
        """The model's turn: the one that goes on, or a new one."""
        if not turns or turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": ""})
        return turns[-1]

    for item in given:
        if item["type"] == "reasoning":
            thought = [*(item["content"] or []), *([] if item["content"] else item["summary"] or [])]
            own()["reasoning_content"] = schema.text_of(thought)
        elif item["type"] == "function_call":
            called = schema.call(item["call_id"], item["name"], item["arguments"] or "{}")
            own().setdefault("tool_calls", []).append(called)
        elif item["type"] == "function_call_output":
            turns.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        elif item["role"] == "assistant":
            own()["content"] += _text(item["content"])
        else:
            role = "system" if item["role"] == "developer" else item["role"]
            turns.append({"role": role, "content": _text(item["content"])})
    return turns


def _text(content: str | list[Given]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or part.get("refusal") or "" for part in content)


class ResponsesAnswer:
    """Of one reply. Every event has a number, and the last one has all that was said."""

    def __init__(self, model: str, tokenizer: Tokenizer, wish: Wish, jobs: list[Job]) -> None:
        self.model, self.wish, self.jobs, self.blocks = model, wish, jobs, Blocks()
        self.id, self.created, self.sent = f"resp_{secrets.token_hex(12)}", int(time.time()), 0
        self.status, self.thought = "in_progress", 0  # tokens of reasoning

    def whole(self, replies: list[list[Piece]]) -> dict[str, Any]:
        for piece in replies[0]:
            self._push(piece)
        return self._response()

    def events(self, index: int, piece: Piece) -> bytes:
        said = b""
        if not self.sent:
            said = self._event("response.created", response=self._response())
            said += self._event("response.in_progress", response=self._response())
        return said + b"".join(self._sent(change) for change in self._push(piece))

    def end(self) -> bytes:
        return self._event(f"response.{self.status}", response=self._response())

    def failed(self, refused: Refused) -> bytes:
        self.status = "failed"
        error = {"code": "server_error", "message": refused.message}
        return self._event("response.failed", response={**self._response(), "error": error})

    def _push(self, piece: Piece) -> list[Change]:
        changes = self.blocks.push(piece.events)
        self.thought += bool(self.blocks.all) and self.blocks.all[-1].kind == "reasoning"
        if piece.finish_reason is not None:
            self.status = "incomplete" if piece.finish_reason == "length" else "completed"
            changes += self.blocks.end()
        return changes

    def _response(self) -> dict[str, Any]:
        given, wish, done = self.wish.given, self.wish, self.status in ("completed", "incomplete")
        why = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        repeated = {name: given[name] for name in ("instructions", "max_output_tokens", "metadata")}
        text = {name: value for name, value in (given["text"] or {}).items() if value is not None}
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": self.status, "error": None,
            "incomplete_details": why, "model": self.model, "output": [_item(block) for block in self.blocks.all],
            "usage": self._usage() if done else None, "temperature": wish.params.temperature,
            "top_p": wish.params.top_p, "tools": given["tools"] or [], "tool_choice": given["tool_choice"] or "auto",
            "parallel_tool_calls": not wish.single, "text": {"format": {"type": "text"}, **text},
            "reasoning": given["reasoning"] or {"effort": None, "summary": None}, "store": False, "background": False,
            "truncation": "disabled", "previous_response_id": None, **repeated,
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        took = usage(self.jobs)
        read = {**took["prompt_tokens_details"], "cache_write_tokens": 0}  # which their types need
        return {
            "input_tokens": took["prompt_tokens"], "input_tokens_details": read,
            "output_tokens": took["completion_tokens"], "output_tokens_details": {"reasoning_tokens": self.thought},
            "total_tokens": took["total_tokens"],
        }  # fmt: skip

    def _event(self, kind: str, **more: Any) -> bytes:
        self.sent += 1
        return event({"type": kind, "sequence_number": self.sent - 1, **more}, kind)

    def _sent(self, change: Change) -> bytes:
        """The events of a change: an item has a part, of which there is text; a call has arguments alone."""
        block = change.block
        place: dict[str, Any] = {"item_id": _name(block), "output_index": block.index}
        part = {} if block.kind == "call" else {"content_index": 0}
        kind = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[block.kind]
        extra: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if change.what == "more":
            return self._event(f"response.{kind}.delta", **place, **part, delta=change.text, **extra)
        if change.what == "begin":
            said = self._event("response.output_item.added", output_index=block.index, item=_item(block))
            return said + (
                self._event("response.content_part.added", **place, **part, part=_part(block)) if part else b""
            )
        if part:
            said = self._event(f"response.{kind}.done", **place, **part, text=block.text, **extra)
            said += self._event("response.content_part.done", **place, **part, part=_part(block))
        else:
            said = self._event(f"response.{kind}.done", **place, name=block.name, arguments=block.text)
        return said + self._event("response.output_item.done", output_index=block.index, item=_item(block))


def _name(block: Block) -> str:
    return {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind] + block.id


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block) -> dict[str, Any]:
    item: dict[str, Any] = {"id": _name(block), "status": "completed" if block.done else "in_progress"}
    parts = [_part(block)] if block.text or block.done else []
    if block.kind == "text":
        return {**item, "type": "message", "role": "assistant", "content": parts}
    if block.kind == "reasoning":
        return {**item, "type": "reasoning", "summary": [], "content": parts}
    call = {"call_id": f"call_{block.id}", "name": block.name, "arguments": block.text}
    return {**item, "type": "function_call", **call}
