"""From a route's body, whose fields its table has checked, to a wish: what every kind of request may ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..grammar import Kind
from ..sampling import SamplingParams
from . import tables
from .refusals import Refused, wrong
from .settings import Settings
from .tables import Model

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "logit_bias",
)  # fmt: skip
Given = dict[str, Any]


@dataclass
class Wish:
    params: SamplingParams
    stop: list[str]
    max_tokens: int
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None
    form: tuple[Kind, str] | None = None
    prompts: list[str | list[int]] = field(default_factory=list)  # of /v1/completions
    messages: list[dict[str, Any]] = field(default_factory=list)  # of conversations, in the shape of chat completions
    tools: list[dict[str, Any]] = field(default_factory=list)
    forced: str | None = None  # a tool must be called: "" any, else the one of this name
    single: bool = False  # and no second one with it
    template_args: dict[str, Any] = field(default_factory=dict)
    opens: bool = True  # the reply, at the end of the prompt
    given: Given = field(default_factory=dict)  # as it was read, for answers that repeat it

    @property
    def asks(self) -> str:
        """The field that has the prompt."""
        return next(name for name in ("messages", "prompt", "input") if self.given.get(name) is not None)


def chat(given: Given, model: Model, settings: Settings) -> Wish:
    wish = _openai(given, model, settings)
    if given["logprobs"] is False and given["top_logprobs"]:
        raise wrong("top_logprobs", "logprobs: true with it, or 0,")
    if given["logprobs"] or given["top_logprobs"]:
        wish.logprobs = given["top_logprobs"] or 0
    wish.messages = [_message(one) for one in given["messages"]]
    choice = given["tool_choice"]
    name = choice["function"]["name"] if isinstance(choice, dict) else None
    choose(wish, given["tools"] or [], "named" if name else choice or "auto", name)
    wish.single = given["parallel_tool_calls"] is False
    wish.template_args = template_args(given["chat_template_kwargs"], given["reasoning_effort"])
    return bounded(wish, model, settings)


def completion(given: Given, model: Model, settings: Settings) -> Wish:
    wish = _openai(given, model, settings)
    wish.logprobs, wish.prompts = given["logprobs"], given["prompt"]
    if len(wish.prompts) * wish.n > settings.max_n:
        raise wrong("prompt", f"at most {settings.max_n} replies over all prompts")
    if given["best_of"] not in (None, 1, wish.n):
        raise wrong("best_of", "1")
    return wish


def _openai(given: Given, model: Model, settings: Settings) -> Wish:
    stop = given["stop"] or []
    if given["repetition_penalty"] is None:
        given["repetition_penalty"] = given["repeat_penalty"]  # llama.cpp's name
    return Wish(
        params=sampling(given, model),
        stop=[stop] if isinstance(stop, str) else stop,
        max_tokens=given["max_completion_tokens"] or given["max_tokens"] or settings.max_tokens_default,
        n=given["n"] or 1,
        stream=bool(given["stream"]),
        include_usage=bool((given["stream_options"] or {}).get("include_usage")),
        form=("grammar", given["grammar"]) if given["grammar"] else form(given["response_format"]),
        given=given,
    )


def sampling(given: Given, model: Model) -> SamplingParams:
    """The model must be ours; what is not asked for comes from its own settings."""
    if given["model"] is not None and given["model"] not in model.names:
        said = "There is no such model here; GET /v1/models lists what there is."
        raise Refused(404, said, "model", "model_not_found")
    return SamplingParams.of(model.generation_config, **{name: given[name] for name in SAMPLING})


def form(wanted: Given | None) -> tuple[Kind, str] | None:
    """The form that a reply must have: OpenAI's response_format, with grammars and schemas as llama.cpp takes them."""
    match wanted["type"] if wanted else "text":
        case "json_object":
            assert wanted is not None
            return "json_schema", json.dumps(wanted.get("schema") or {"type": "object"})
        case "json_schema":
            assert wanted is not None
            return "json_schema", json.dumps((wanted.get("json_schema") or wanted)["schema"])
        case "grammar":
            assert wanted is not None
            return "grammar", wanted["grammar"]
        case "regex":
            assert wanted is not None
            return "regex", wanted["regex"]
    return None


def choose(wish: Wish, tools: list[dict[str, Any]], choice: str, name: str | None) -> None:
    """Which tools a reply may call, and whether it must."""
    if choice == "named":
        if name not in [tool["function"]["name"] for tool in tools]:
            raise wrong("tool_choice", "the name of one of the tools")
        wish.forced = name
    elif choice == "required":
        if not tools:
            raise wrong("tool_choice", "tools to choose from")
        wish.forced = ""
    wish.tools = [] if choice == "none" else tools


def bounded(wish: Wish, model: Model, settings: Settings) -> Wish:
    """The wish of a conversation, unless its texts are more than a prompt can have."""
    tables.bounded(_texts(wish), settings.prompt_bytes(model.context))
    return wish


def _texts(wish: Wish) -> Iterator[str]:
    """All that a template may write of a conversation; objects as JSON, in its shortest form."""
    for message in wish.messages:
        yield from (text for text in message.values() if isinstance(text, str))
        for one in message.get("tool_calls", ()):
            arguments = one["function"]["arguments"]
            yield from (one["id"], one["function"]["name"])
            yield arguments if isinstance(arguments, str) else _json(arguments)
    yield from map(_json, wish.tools)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _message(given: Given) -> dict[str, Any]:
    role = "system" if given["role"] == "developer" else given["role"]
    message: dict[str, Any] = {"role": role, "content": text_of(given["content"])}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if given[name] is not None:
            message[name] = given[name]
    if given["tool_calls"]:
        message["tool_calls"] = [
            call(one["id"] or "", one["function"]["name"], one["function"]["arguments"]) for one in given["tool_calls"]
        ]
    return message


def call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call of a tool as templates take it."""
    called = {"name": name, "arguments": "{}" if arguments is None else arguments}
    return {"id": id, "type": "function", "function": called}


def text_of(content: str | list[Given] | None) -> str:
    """A message's text, whole or in parts; that of a message of calls alone is empty."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def template_args(asked: Given | None, effort: str | None) -> dict[str, Any]:
    args = dict(asked or {})
    if effort == "none":
        args.setdefault("enable_thinking", False)
    elif effort is not None:
        args.setdefault("reasoning_effort", effort)
    return args


def full(length: int, context: int, field: str) -> Refused:
    said = f"The prompt has {length} tokens, and there is room for {context} with the reply."
    return Refused(400, said, field, "context_length_exceeded")
