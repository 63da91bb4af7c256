"""The fields of every route's body, once: they are checked by these tables, and /openapi.json is made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import limits
from .fields import (
    Biases,
    Choice,
    Description,
    Either,
    Field,
    Flag,
    Integer,
    Items,
    Number,
    Object,
    Only,
    Table,
    Tagged,
    Text,
    TokenIds,
)  # fmt: skip
from .refusals import Refused, wrong
from .settings import Settings

ROLES = ("system", "developer", "user", "assistant", "tool")
# What a request may say to a chat template. Anything else could take the place of what the server gives it.
TEMPLATE_ARGS = ("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking", "clear_thinking")
EFFORTS = Choice(("none", "minimal", "low", "medium", "high", "xhigh"))
LISTS = ("content", "tool_calls", "output", "summary")  # of a message, or of a part of one, on any route
MOST = (1 << 31) - 1
LEAST = 2.0**-126  # above 0 as the sampler sees it, which counts in float32: 5e-324 would be 0 there
NAME_BYTES = 64
PLAIN_BYTES = 64  # of a value for a template
TEXT_ONLY = "a part of text: this model reads nothing else: such a part"


@dataclass(frozen=True)
class Model:
    """What a request is held against."""

    names: tuple[str, ...]
    context: int
    vocabulary: int
    generation_config: Mapping[str, Any]


@dataclass(frozen=True)
class Tool(Field):
    """A function that a reply may call. The template sees all that is said of it."""

    limit: int  # bytes

    @property
    def table(self) -> Table:
        return Table({"type": Choice(("function",)), "function": function(self.limit)}, ("type", "function"))

    def read(self, value: Any, path: str) -> dict[str, Any]:
        self.table.read(value, path)
        if len(json.dumps(value)) > self.limit:
            raise wrong(path, f"at most {self.limit} bytes")
        return {"type": "function", "function": dict(value["function"])}

    def describe(self) -> Description:
        return self.table.describe()


class ToolName(Text):
    def read(self, value: Any, path: str) -> str:
        name = super().read(value, path)
        if not ("_" + name.replace("-", "_").replace(".", "_")).isidentifier():  # it may begin with a digit
            raise wrong(path, "a name of letters, digits, _, - and .")
        return name


@dataclass(frozen=True)
class TemplateArgs(Field):
    """Plain values for the template, from a short list of names."""

    def read(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise wrong(path, "an object")
        for name, one in value.items():
            if name not in TEMPLATE_ARGS or not isinstance(one, str | int | float | bool | None):
                raise wrong(path, f"plain values of {', '.join(TEMPLATE_ARGS)}")
            if isinstance(one, str):
                Text(PLAIN_BYTES).read(one, f"{path}.{name}")
        return dict(value)

    def describe(self) -> Description:
        plain = {"type": ["string", "number", "boolean", "null"], "maxLength": PLAIN_BYTES}
        return {"type": "object", "properties": dict.fromkeys(TEMPLATE_ARGS, plain), "additionalProperties": False}


@dataclass(frozen=True)
class Conversation(Items):
    """Messages, or what stands for them. They are counted, with what is in them, before one of them is read."""

    most: int = 0  # of all: messages, parts, calls

    def read(self, value: Any, path: str) -> list[Any]:
        count, lists = 0, [value]
        while lists and count <= self.most:
            if isinstance(found := lists.pop(), list):
                count += len(found)
                within = found if count <= self.most else []
                lists += [one[name] for one in within if isinstance(one, Mapping) for name in LISTS if name in one]
        if count > self.most:
            raise wrong(path, f"at most {self.most} messages, parts and calls of tools together")
        return super().read(value, path)


@dataclass(frozen=True)
class Prompts(Field):
    """One prompt or several, of text or of token ids."""

    ids: TokenIds
    most: int  # prompts
    limit: int  # bytes of one

    def read(self, value: Any, path: str) -> list[str | list[int]]:
        one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
        several = [value] if one else value
        if not isinstance(several, list) or not 0 < len(several) <= self.most:
            raise wrong(path, f"a text, token ids, or a list of up to {self.most} of them")
        for prompt in several:
            if isinstance(prompt, str):
                Text(least=1).read(prompt, path)
                bounded([prompt], self.limit)
            else:
                self.ids.read(prompt, path)
        return several

    def describe(self) -> Description:
        one = [Text(self.limit, 1).describe(), self.ids.describe()]
        return {"anyOf": [*one, {"type": "array", "items": {"anyOf": one}, "minItems": 1, "maxItems": self.most}]}


def bounded(texts: Iterable[str], limit: int) -> None:
    """No prompt of this model has more bytes, so a longer one is not even tokenised."""
    left = limit
    for text in texts:
        left -= len(text.encode("utf-8", "replace"))
        if left < 0:
            said = f"The prompt has more than {limit} bytes, which no prompt of this model has."
            raise Refused(413, said, code="prompt_too_long")


def function(limit: int) -> Table:
    said = {"name": ToolName(NAME_BYTES, 1), "description": Text(), "parameters": Object(limit), "strict": Flag()}
    return Table(said, ("name",))


def common(model: Model, settings: Settings) -> dict[str, Field]:
    """What every route that makes a reply takes."""
    return {
        "model": Text(1024), "stream": Flag(), "temperature": Number(0, limits.TEMPERATURE),
        "top_p": Number(LEAST, 1), "top_k": Integer(-1, MOST), "min_p": Number(0, 1),
        "repetition_penalty": Number(LEAST, limits.REPETITION), "seed": Integer(-1 << 63, (1 << 63) - 1),
        "presence_penalty": Number(-limits.PENALTY, limits.PENALTY),
        "frequency_penalty": Number(-limits.PENALTY, limits.PENALTY),
        "logit_bias": Biases(model.vocabulary, settings.max_logit_bias),
        "chat_template_kwargs": TemplateArgs(),
    }  # fmt: skip


def stops(settings: Settings) -> Items:
    return Items(Text(settings.max_stop_bytes, 1), 0, settings.max_stop, numbered=False)


def openai(model: Model, settings: Settings) -> dict[str, Field]:
    """What OpenAI's two older routes share, with llama.cpp's names for what is not OpenAI's."""
    schema_bytes, several = settings.max_schema_kb * 1000, stops(settings)
    inner = Table({"name": Text(), "schema": Object(schema_bytes), "strict": Flag()}, ("schema",))
    forms = {
        "text": Table({}), "json_object": Table({"schema": Object(schema_bytes)}),
        "json_schema": Table({"json_schema": inner}, ("json_schema",)),
        "grammar": Table({"grammar": Text(schema_bytes, 1)}, ("grammar",)),
        "regex": Table({"regex": Text(schema_bytes, 1)}, ("regex",)),
    }  # fmt: skip
    return {
        **common(model, settings), "n": Integer(1, settings.max_n), "max_tokens": Integer(1, MOST),
        "max_completion_tokens": Integer(1, MOST), "stream_options": Table({"include_usage": Flag()}),
        "stop": Either({str: several.of, list: several}, "a string or a list of strings"),
        "repeat_penalty": Number(LEAST, limits.REPETITION), "grammar": Text(schema_bytes),
        "response_format": Tagged(forms, "the type " + " or ".join(map(repr, forms))),
    }  # fmt: skip


def conversation(settings: Settings) -> Items:
    text = Table({"text": Text()}, ("text",))
    parts = Items(Tagged(dict.fromkeys(("text", "input_text", "output_text"), text), TEXT_ONLY), 0, settings.max_parts)
    arguments = Either({str: Text(), dict: Object()}, "a string of JSON")
    called = Table({"name": Text(least=1), "arguments": arguments}, ("name",))
    message = {
        "role": Choice(ROLES), "content": Either({str: Text(), list: parts}, "a text or parts of text"),
        "name": Text(), "tool_call_id": Text(), "reasoning_content": Text(), "reasoning": Text(),
        "tool_calls": Items(Table({"id": Text(), "function": called}, ("function",)), 0, settings.max_tools),
    }  # fmt: skip
    return Conversation(Table(message, ("role",)), 1, settings.max_messages, most=settings.max_items)


def chat(model: Model, settings: Settings) -> Table:
    chosen = Table({"function": Table({"name": Text(NAME_BYTES)}, ("name",))}, ("function",))
    choices: dict[type, Field] = {str: Choice(("none", "auto", "required")), dict: chosen}
    fields: dict[str, Field] = {
        **openai(model, settings), "messages": conversation(settings), "logprobs": Flag(),
        "top_logprobs": Integer(0, settings.max_top_logprobs), "reasoning_effort": EFFORTS,
        "tools": Items(Tool(settings.max_schema_kb * 1000), 0, settings.max_tools),
        "tool_choice": Either(choices, "'none', 'auto', 'required' or a function of the tools"),
        "functions": Only(([],), "tools, which take their place,"), "modalities": Only((["text"],), '["text"]'),
        "audio": Only((), "nothing: only text is made here: nothing"), "parallel_tool_calls": Flag(),
    }  # fmt: skip
    return Table(fields, ("messages",))


def completion(model: Model, settings: Settings) -> Table:
    ids = TokenIds(model.vocabulary, model.context - 1)
    fields: dict[str, Field] = {
        **openai(model, settings), "logprobs": Integer(0, settings.max_top_logprobs),
        "prompt": Prompts(ids, settings.max_n, settings.prompt_bytes(model.context)),
        "echo": Only((False,), "false: a prompt is not repeated; false"),
        "suffix": Only(("",), "nothing: text cannot be filled in; nothing"),
        "best_of": Integer(1, settings.max_n),
    }  # fmt: skip
    return Table(fields, ("prompt",))


def tokenize(model: Model, settings: Settings) -> Table:
    """Of a text ("prompt", or "content" as llama.cpp has it), or of messages through the template."""
    text, asked = Text(settings.prompt_bytes(model.context)), chat(model, settings).fields
    said: dict[str, Field] = {"prompt": text, "content": text, "add_special_tokens": Flag(), "add_special": Flag()}
    return Table({**asked, **said, "add_generation_prompt": Flag()})


def detokenize(model: Model, settings: Settings) -> Table:
    return Table({"tokens": TokenIds(model.vocabulary, model.context - 1, least=0)}, ("tokens",))
