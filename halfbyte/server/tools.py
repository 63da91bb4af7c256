"""The tools of a request, and calls that it insists on: these are begun for the model, in its family's own words."""

from __future__ import annotations

import json
from typing import Any

from ..text.calls import BracedCall, JsonCall, SeparatedCall, TaggedCall
from ..text.reply import Syntax
from .fields import Fields
from .refusals import wrong
from .settings import Settings

NAME_BYTES = 64


def asked(given: Fields, settings: Settings) -> tuple[list[dict[str, Any]], str | None]:
    """The tools that a reply may call, and whether it must."""
    found = given.items("tools", 0, settings.max_tools) or []
    tools = [_tool(Fields(one, f"tools[{index}]"), settings) for index, one in enumerate(found)]
    choice = given.get("tool_choice")
    if isinstance(choice, dict):
        function = Fields(choice, "tool_choice").object("function") or Fields({})
        name = function.text("name", NAME_BYTES)
        if name not in [tool["function"]["name"] for tool in tools]:
            raise wrong("tool_choice", "the name of one of the tools")
        return tools, name
    given.choice("tool_choice", "none", "auto", "required")
    if choice == "required" and not tools:
        raise wrong("tool_choice", "tools to choose from")
    return ([] if choice == "none" else tools), ("" if choice == "required" else None)


def _tool(given: Fields, settings: Settings) -> dict[str, Any]:
    function = given.object("function")
    if given.get("type") != "function" or function is None:
        raise wrong(given.path, 'a tool of the type "function"')
    name = function.text("name", NAME_BYTES)
    if not name or not name.replace("-", "_").replace(".", "_").isidentifier():
        raise wrong(function.name("name"), "a name of letters, digits, _, - and .")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(function.name("parameters"), "a JSON schema")
    if len(json.dumps(given.given)) > settings.max_schema_kb * 1000:
        raise wrong(given.path, f"at most {settings.max_schema_kb} kB")
    return {"type": "function", "function": dict(function.given)}


def opening(syntax: Syntax, name: str) -> str:
    """The beginning of a call, which stands at the end of the prompt; "" leaves the tool to the model."""
    if not syntax.call[0]:
        raise wrong("tool_choice", "'auto' or 'none': this model's template has no tool calls; one of these")
    kind, begin = syntax.call_type, "".join(syntax.silent[:1]) + syntax.call[0]
    if kind is JsonCall:
        return begin + ('\n{"name": ' + (f'{json.dumps(name)}, "arguments": ' if name else '"'))
    if kind is TaggedCall:
        return begin + (f"\n<function={name}>\n" if name else "\n<function=")
    if kind is SeparatedCall:
        return begin + (f"{name}{SeparatedCall.SEPARATOR}" if name else "")
    assert kind is BracedCall
    return begin + (f"call:{name}{{" if name else "call:")
