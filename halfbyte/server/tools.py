"""Calls that a request insists on: begun for the model in its family's own words, and held to the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..text.calls import BracedCall, JsonCall, SeparatedCall, TaggedCall
from ..text.reply import Syntax
from .refusals import wrong

Mark = Callable[[str], str]  # a marker of the syntax as a term of a grammar: a token of its own, or its text
Schema = Mapping[str, Any]
ON_A_LINE = {"whitespace_pattern": " ?"}  # as templates write arguments, and models have learnt to
SCALARS = ("integer", "number", "boolean", "null")


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


def rest(syntax: Syntax, tools: Sequence[Mapping[str, Any]], name: str, single: bool, mark: Mark) -> str:
    """The grammar of what may follow an opening: arguments by the tool's schema, and what ends the call.

    Where the model chooses the tool, more calls may follow, unless there must be a `single` one.
    """
    grammar = Grammar(syntax, mark)
    functions = [tool["function"] for tool in tools if not name or tool["function"]["name"] == name]
    calls = grammar.rule(" | ".join(f"({grammar.call(one, named=bool(name))})" for one in functions))
    more = "" if name or single else f" ({grammar.again} {calls})*"
    after = f" {mark(syntax.silent[1])}?" if len(syntax.silent) > 1 else ""
    return "\n".join([f"start: {calls}{more}{after}", *grammar.rules])


class Grammar:
    """Lark's, as llguidance reads it; every rule has a number for a name."""

    def __init__(self, syntax: Syntax, mark: Mark) -> None:
        self.kind, self.mark = syntax.call_type, mark
        self.rules: list[str] = []
        self.close = f'"\\n"? {mark(syntax.call[1])}'
        before = {JsonCall: '"\\n{\\"name\\": \\""', TaggedCall: '"\\n<function="', BracedCall: '"call:"'}
        self.again = f'"\\n"? {mark(syntax.call[0])} {before.get(self.kind, "")}'.strip()
        self.root: Schema = {}

    def rule(self, body: str, attributes: str = "") -> str:
        self.rules.append(f"r{len(self.rules)}{attributes}: {body}")
        return f"r{len(self.rules) - 1}"

    def call(self, function: Mapping[str, Any], named: bool) -> str:
        """From behind the opening to the end of the call."""
        self.root = {"type": "object", **(function.get("parameters") or {})}
        name = function["name"]
        if self.kind is JsonCall:
            head = "" if named else quoted(f'{name}", "arguments": ')
            return f'{head} {self.json(self.root)} "}}" {self.close}'
        if self.kind is TaggedCall:
            head = "" if named else quoted(f"{name}>\n")
            return f'{head} {self.parameters()} "</function>" {self.close}'
        if self.kind is SeparatedCall:
            head = "" if named else f"{quoted(name)} {self.mark(SeparatedCall.SEPARATOR)}"
            return f"{head} {self.json(self.root)} {self.close}"
        head = "" if named else quoted(f"{name}{{")
        return f'{head} {self.braced_fields(self.root)} "}}" {self.close}'

    def json(self, schema: Schema) -> str:
        """A value as JSON. What the schema refers to stands in the tool's."""
        shared = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        return self.rule("%json " + json.dumps({**shared, **schema, "x-guidance": ON_A_LINE}))

    def parameters(self) -> str:
        """Tagged ones, in the order of the schema, each at most once."""
        needed = self.root.get("required") or []
        made = []
        for key, schema in properties(self.root).items():
            one = f"{quoted(f'<parameter={key}>' + chr(10))} {self.tagged(schema)}"
            made.append(f"({one})" if key in needed else f"({one})?")
        return " ".join(made)

    def tagged(self, schema: Any) -> str:
        end = "\n</parameter>\n"
        if choices := texts(schema):
            return "(" + " | ".join(map(quoted, choices)) + f") {quoted(end)}"
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        if isinstance(kinds, str) and kinds != "string":
            return f"{self.json(schema)} {quoted(end)}"
        return self.rule("/(?s:.*)/", f"[suffix={quoted(end)}]")

    def braced_fields(self, schema: Schema) -> str:
        """Needed ones first, then others: a comma stands between two."""
        needed = [key for key in properties(schema) if key in (schema.get("required") or [])]
        fields = {key: f"{quoted(f'{key}:')} {self.braced(inner)}" for key, inner in sorted(properties(schema).items())}
        others = [key for key in fields if key not in needed]
        if needed:
            first = ' "," '.join(fields[key] for key in sorted(needed))
            return f"{first} " + " ".join(f'("," {fields[key]})?' for key in others)
        ways = [
            f"{fields[key]} " + " ".join(f'("," {fields[later]})?' for later in others[index + 1 :])
            for index, key in enumerate(others)
        ]
        return f"({' | '.join(ways)})?" if ways else ""

    def braced(self, schema: Any) -> str:
        quote, kind = self.mark(BracedCall.QUOTE), schema.get("type") if isinstance(schema, Mapping) else None
        if choices := texts(schema):
            return "(" + " | ".join(f"{quote} {quoted(choice)} {quote}" for choice in choices) + ")"
        if kind == "object" and properties(schema):
            return f'"{{" {self.braced_fields(schema)} "}}"'
        if kind == "array":
            item = self.rule(self.braced(schema.get("items")))
            return f'"[" ({item} ("," {item})*)? "]"'
        if isinstance(kind, str) and kind in SCALARS:
            return self.json(schema)
        free = quote.startswith("<[")  # as a token of its own it cannot stand in a text
        said = f"{self.rule('/(?s:.*)/')} {quote}" if free else self.rule("/(?s:.*)/", f"[suffix={quote}]")
        text = f"{quote} {said}"
        return text if kind == "string" else f"({text} | {self.json({'type': [*SCALARS]})})"


def properties(schema: Schema) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def texts(schema: Any) -> list[str]:
    """The texts that a schema lists, where it takes nothing else."""
    listed = schema.get("enum") if isinstance(schema, Mapping) else None
    return list(listed) if isinstance(listed, list) and all(isinstance(one, str) for one in listed) else []


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
