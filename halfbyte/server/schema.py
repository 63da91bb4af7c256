"""What requests may ask for: each route's body to a wish, every field checked, before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..grammar import Kind
from ..sampling import SamplingParams
from ..text.decoder import Stops
from . import tools
from .fields import Fields
from .refusals import Refused, wrong
from .settings import Settings

ROLES = ("system", "developer", "user", "assistant", "tool")
# What a request may say to a chat template. Anything else could take the place of what the server gives it.
TEMPLATE_ARGS = ("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking", "clear_thinking")
MOST = (1 << 31) - 1
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


@dataclass(frozen=True)
class Model:
    """What a request is held against."""

    names: tuple[str, ...]
    context: int
    vocabulary: int
    generation_config: Mapping[str, Any]


@dataclass
class Wish:
    """What every kind of request may ask for."""

    params: SamplingParams
    stop: list[str]
    max_tokens: int
    n: int
    stream: bool
    include_usage: bool
    logprobs: int | None
    form: tuple[Kind, str] | None
    prompts: list[str | list[int]] = field(default_factory=list)  # of /v1/completions
    messages: list[dict[str, Any]] = field(default_factory=list)  # of /v1/chat/completions
    tools: list[dict[str, Any]] = field(default_factory=list)
    forced: str | None = None  # a tool must be called: "" any, else the one of this name
    template_args: dict[str, Any] = field(default_factory=dict)


def chat(body: Any, model: Model, settings: Settings) -> Wish:
    given = Fields(body)
    wish = _wish(given, model, settings)
    if given.flag("logprobs") or given.get("top_logprobs"):
        wish.logprobs = given.integer("top_logprobs", 0, 20) or 0
    wish.messages = messages(given, model, settings)
    wish.tools, wish.forced = tools.asked(given, settings)
    wish.template_args = template_args(given)
    given.refuse("functions", [], why="tools, which take their place,")
    given.refuse("modalities", ["text"], why='["text"]')
    given.refuse("audio", why="nothing: only text is made here: nothing")
    return wish


def completion(body: Any, model: Model, settings: Settings) -> Wish:
    given = Fields(body)
    wish = _wish(given, model, settings)
    wish.logprobs = given.integer("logprobs", 0, 20)
    wish.prompts = prompts(given.get("prompt"), model, settings)
    if len(wish.prompts) * wish.n > settings.max_n:
        raise wrong("prompt", f"at most {settings.max_n} replies over all prompts")
    given.refuse("echo", False, why="false: a prompt is not repeated; false")
    given.refuse("suffix", "", why="nothing: text cannot be filled in; nothing")
    given.refuse("best_of", 1, wish.n, why="1")
    return wish


def _wish(given: Fields, model: Model, settings: Settings) -> Wish:
    name = given.text("model", 1024)
    if name is not None and name not in model.names:
        raise Refused(
            404, "There is no such model here; GET /v1/models lists what there is.", "model", "model_not_found"
        )
    options = given.object("stream_options") or Fields({})
    room = given.integer("max_completion_tokens", 1, MOST) or given.integer("max_tokens", 1, MOST)
    return Wish(
        params=sampling(given, model),
        stop=stops(given),
        max_tokens=room or settings.max_tokens_default,
        n=given.integer("n", 1, settings.max_n) or 1,
        stream=given.flag("stream"),
        include_usage=options.flag("include_usage"),
        logprobs=None,
        form=form(given, settings),
    )


def sampling(given: Fields, model: Model) -> SamplingParams:
    asked = {name: given.get(name) for name in SAMPLING}
    if asked["repetition_penalty"] is None:
        asked["repetition_penalty"] = given.get("repeat_penalty")  # llama.cpp's name
    try:
        return SamplingParams.of(model.generation_config, **asked, logit_bias=biases(given, model))
    except ValueError as error:
        name = str(error).split(" ")[0].rstrip(":")
        raise Refused(400, str(error), name, "invalid_value") from None


def biases(given: Fields, model: Model) -> dict[int, float] | None:
    bias = given.object("logit_bias")
    if bias is None:
        return None
    ids = {}
    for key, value in bias.given.items():
        if not (isinstance(key, str) and key.isdecimal() and len(key) < 10 and int(key) < model.vocabulary):
            raise wrong("logit_bias", f"token ids from 0 to {model.vocabulary - 1} as keys")
        ids[int(key)] = value
    return ids


def stops(given: Fields) -> list[str]:
    stop = given.get("stop")
    found = [stop] if isinstance(stop, str) else [] if stop is None else stop
    try:
        if not isinstance(found, list):
            raise ValueError("stop: a string or a list of strings was expected.")
        return Stops(found).stops
    except ValueError as error:
        raise Refused(400, str(error), "stop", "invalid_value") from None


def form(given: Fields, settings: Settings) -> tuple[Kind, str] | None:
    """The form that a reply must have: OpenAI's response_format, and grammars as llama.cpp takes them."""
    most = settings.max_schema_kb * 1000
    if (grammar := given.text("grammar", most)) is not None:
        return "grammar", grammar
    wanted = given.object("response_format")
    if wanted is None:
        return None
    kind = wanted.choice("type", "text", "json_object", "json_schema", "grammar", "regex")
    if kind == "json_object":
        return "json_schema", '{"type": "object"}'
    if kind == "json_schema":
        inner = wanted.object("json_schema") or Fields({})
        schema = json.dumps(inner.get("schema"))
        if not isinstance(inner.get("schema"), dict) or len(schema) > most:
            raise wrong("response_format.json_schema.schema", f"an object of at most {most} bytes")
        return "json_schema", schema
    if kind in ("grammar", "regex"):
        source = wanted.text(kind, most)
        if not source:
            raise wrong(f"response_format.{kind}", "a string")
        return ("grammar" if kind == "grammar" else "regex"), source
    return None


def prompts(given: Any, model: Model, settings: Settings) -> list[str | list[int]]:
    """One prompt or several, of text or of token ids."""
    one = isinstance(given, str) or (isinstance(given, list) and bool(given) and type(given[0]) is int)
    several = [given] if one else given
    if not isinstance(several, list) or not several or len(several) > settings.max_n:
        raise wrong("prompt", f"a text, token ids, or a list of up to {settings.max_n} of them")
    most = settings.prompt_bytes(model.context)
    for prompt in several:
        if isinstance(prompt, str):
            if not prompt:
                raise wrong("prompt", "some text")
            if len(prompt.encode("utf-8", "replace")) > most:
                raise too_long(most)
        else:
            ids(prompt, "prompt", model)
    return several


def ids(given: Any, param: str, model: Model) -> list[int]:
    if not isinstance(given, list) or not given:
        raise wrong(param, "a list of token ids")
    if len(given) >= model.context:
        raise full(len(given), model.context)
    if not all(type(id) is int and 0 <= id < model.vocabulary for id in given):
        raise wrong(param, f"token ids from 0 to {model.vocabulary - 1}")
    return given


def messages(given: Fields, model: Model, settings: Settings) -> list[dict[str, Any]]:
    found = given.items("messages", 1, settings.max_messages)
    if found is None:
        raise wrong("messages", "a list of messages")
    read = [_message(Fields(one, f"messages[{index}]"), settings) for index, one in enumerate(found)]
    most = settings.prompt_bytes(model.context)
    if (
        sum(len(text.encode("utf-8", "replace")) for one in read for text in one.values() if isinstance(text, str))
        > most
    ):
        raise too_long(most)
    return read


def _message(given: Fields, settings: Settings) -> dict[str, Any]:
    role = given.choice("role", *ROLES)
    if role is None:
        raise wrong(given.name("role"), " or ".join(ROLES))
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _content(given, settings)}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (text := given.text(name)) is not None:
            message[name] = text
    calls = given.items("tool_calls", 0, settings.max_tools)
    if calls:
        message["tool_calls"] = [_call(Fields(one, f"{given.path}.tool_calls[{n}]")) for n, one in enumerate(calls)]
    return message


def _content(given: Fields, settings: Settings) -> str:
    """A message's text, whole or in parts; that of a message of calls alone is empty."""
    if not isinstance(given.get("content"), list):
        return given.text("content") or ""
    parts = given.items("content", 0, settings.max_parts) or []
    read = [Fields(part, f"{given.path}.content[{index}]") for index, part in enumerate(parts)]
    for part in read:
        if part.get("type") not in ("text", "input_text", "output_text") or part.get("text") is None:
            raise wrong(part.path, "a part of text: this model reads nothing else: such a part")
    return "".join(part.text("text") or "" for part in read)


def _call(given: Fields) -> dict[str, Any]:
    function = given.object("function")
    if function is None or not function.text("name"):
        raise wrong(given.path, "a call of a function with a name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        raise wrong(function.name("arguments"), "a string of JSON")
    called = {"name": function.text("name"), "arguments": "{}" if arguments is None else arguments}
    return {"id": given.text("id") or "", "type": "function", "function": called}


def template_args(given: Fields) -> dict[str, Any]:
    """For the template, from a short list of names, with plain values."""
    asked = given.object("chat_template_kwargs") or Fields({})
    for name, value in asked.given.items():
        if name not in TEMPLATE_ARGS or not isinstance(value, str | int | float | bool | None):
            raise wrong("chat_template_kwargs", f"plain values of {', '.join(TEMPLATE_ARGS)}")
    args = {name: asked.text(name, 64) if isinstance(value, str) else value for name, value in asked.given.items()}
    effort = given.choice("reasoning_effort", "none", "minimal", "low", "medium", "high", "xhigh")
    if effort == "none":
        args.setdefault("enable_thinking", False)
    elif effort is not None:
        args.setdefault("reasoning_effort", effort)
    return args


def too_long(most: int) -> Refused:
    return Refused(
        413, f"The prompt has more than {most} bytes, which no prompt of this model has.", code="prompt_too_long"
    )


def full(length: int, context: int) -> Refused:
    said = f"The prompt has {length} tokens, and there is room for {context} with the reply."
    return Refused(400, said, "messages", "context_length_exceeded")
