"""Calls that a request insists on: begun for the model in its family's own words, and held to the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..grammar import GrammarError
from ..text.alternatives import Schema, alternatives, listed, of
from ..text.calls import BracedCall, JsonCall, SeparatedCall, TaggedCall
from ..text.reply import Syntax
from ..text.values import plain
from .refusals import wrong

Mark = Callable[[str], str]  # a marker of the syntax as a term of a grammar: a token of its own, or its text
ON_A_LINE = {"whitespace_pattern": " ?"}  # as templates write arguments, and models have learnt to
UNFOLLOWED = (  # where a value is not written as JSON
    "not", "if", "dependentRequired", "dependentSchemas", "minProperties", "maxProperties", "patternProperties",
    "propertyNames", "prefixItems", "contains", "uniqueItems",
)  # fmt: skip
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
    try:
        calls = grammar.rule(" | ".join(f"({grammar.call(one, named=bool(name))})" for one in functions))
    except (ValueError, TypeError, RecursionError) as error:
        said = str(error) if isinstance(error, ValueError) else "it is not one, or too deep"
        raise GrammarError(said) from None
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
        self.names: dict[str, str] = {}  # rules of schemas

    def rule(self, body: str, attributes: str = "") -> str:
        self.rules.append(f"r{len(self.rules)}{attributes}: {body}")
        return f"r{len(self.rules) - 1}"

    def call(self, function: Mapping[str, Any], named: bool) -> str:
        """From behind the opening to the end of the call."""
        self.root, self.names = {"type": "object", **(function.get("parameters") or {})}, {}
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
        fields = self.either([self.braced_fields(one) for one in self.ways(self.root)])
        return f'{head} {fields} "}}" {self.close}'

    def json(self, schema: Schema) -> str:
        """A value as JSON. What the schema refers to stands in the tool's."""
        shared = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        return self.rule("%json " + json.dumps({**shared, **schema, "x-guidance": ON_A_LINE}))

    def ways(self, schema: Any) -> list[Schema]:
        """The schemas of which a value that is not written as JSON must follow one."""
        found = [] if schema is False else alternatives(schema, self.root)
        kinds = [one.get("type") for one in found if listed(one) is None and one.get("type") != "object"]
        distinct = {"number" if kind == "integer" else kind for kind in kinds}
        if isinstance(schema, Mapping) and "oneOf" in schema and len(distinct) < len(kinds):
            raise ValueError("oneOf: more than one may hold; use anyOf")
        if not (found := [one for one in found if listed(one) != []]):
            raise ValueError("enum: no value is left")
        return found

    def parameters(self) -> str:
        """Tagged ones, in the order of the schema, each at most once."""
        return self.either([self.tags(one) for one in self.ways(self.root)])

    def tags(self, schema: Schema) -> str:
        made = []
        check(schema)
        for key, inner, needed in fields(schema):
            if re.search(r"[>\n]", key) or key != key.strip():
                raise ValueError(f"properties: {key!r} cannot be the name in a tag")
            one = f"{quoted(f'<parameter={key}>' + chr(10))} {self.tagged(inner)}"
            made.append(f"({one})" if needed else f"({one})?")
        return " ".join(made)

    def tagged(self, schema: Any) -> str:
        end, made = "\n</parameter>\n", []
        ways = self.ways(schema)
        if any(one.get("type") == "string" for one in ways if listed(one) is None):  # then all but null is read as text
            ways = [one for one in ways if listed(one) is not None or one.get("type", "string") in ("string", "null")]
        for one in ways:
            kind, values = one.get("type"), listed(one)
            if values is not None:
                said = [plain(value) for value in values]
                if any(TaggedCall.END in text for text in said):
                    raise ValueError(f"enum: a value with {TaggedCall.END} cannot be written in tags")
                made += [f"{quoted(text)} {quoted(end)}" for text in said]
            elif isinstance(kind, str) and kind != "string":
                made.append(f"{self.json(one)} {quoted(end)}")
            else:
                made.append(self.text(one, quoted(end), TaggedCall.END))
        return self.either(made)

    def text(self, schema: Schema, end: str, never: str) -> str:
        """Any text, or one of some length or by a pattern, up to its end: a term that it cannot have inside."""
        check(schema)
        low, high, pattern = schema.get("minLength"), schema.get("maxLength"), schema.get("pattern")
        held = [f"/(?s:.{{{int(low or 0)},{'' if high is None else int(high)}}})/"] if low or high is not None else []
        held += [searched(pattern)] if isinstance(pattern, str) else []
        said = " & ".join(
            [*held, f"~/(?s:.*){re.escape(never).replace('/', chr(92) + '/')}(?s:.*)/"] if held else ["/(?s:.*)/"]
        )
        if end.startswith("<["):  # as a token of its own it cannot stand in a text
            self.rules.append(f"T{len(self.rules)}: {said}")
            return f"T{len(self.rules) - 1} {end}"
        return self.rule(said, f"[suffix={end}]")

    @staticmethod
    def either(ways: Sequence[str]) -> str:
        return ways[0] if len(ways) == 1 else "(" + " | ".join(f"({way})" if way else '""' for way in ways) + ")"

    def braced_fields(self, schema: Schema) -> str:
        """Needed ones first, then others: a comma stands between two."""
        made = {}
        check(schema)
        for key, inner, must in sorted(fields(schema), key=lambda field: field[0]):
            if ":" in key or BracedCall.QUOTE in key or key != key.strip().strip('"'):
                raise ValueError(f"properties: this model cannot write {key!r} as a name")
            made[key] = f"{quoted(f'{key}:')} {self.braced(inner)}", must
        needed = [one for one, must in made.values() if must]
        others = [one for one, must in made.values() if not must]
        if needed:
            return ' "," '.join(needed) + " " + " ".join(f'("," {one})?' for one in others)
        ways = [
            f"{one} " + " ".join(f'("," {later})?' for later in others[index + 1 :]) for index, one in enumerate(others)
        ]
        return f"({' | '.join(ways)})?" if ways else ""

    def braced(self, schema: Any) -> str:
        return self.either([self.known(one) for one in self.ways(schema)])

    def known(self, schema: Schema) -> str:
        """A rule for each schema: one that comes back within itself refers to its own."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self.names:
            place, self.names[key] = len(self.rules), f"r{len(self.rules)}"
            self.rules.append("")
            self.rules[place] = f"r{place}: {self.braced_value(schema)}"
        return self.names[key]

    def braced_value(self, schema: Schema) -> str:
        quote, kind, values = self.mark(BracedCall.QUOTE), schema.get("type"), listed(schema)
        if values is not None:
            if any(isinstance(one, dict | list) or BracedCall.QUOTE in plain(one) for one in values):
                raise ValueError("enum: this model can write only texts, numbers, booleans and null of a list")
            return self.either(
                [f"{quote} {quoted(v)} {quote}" if isinstance(v, str) else quoted(plain(v)) for v in values]
            )
        if kind == "object":
            inner = self.braced_fields(schema)
            if not fields(schema) and schema.get("additionalProperties") is not False:
                pair = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {self.braced(schema.get("additionalProperties"))}'
                inner = f'({pair} ("," {pair})*)?'
            return f'"{{" {inner} "}}"'
        if kind == "array":
            return f'"[" {self.items(self.braced(schema.get("items")), schema)} "]"'
        if isinstance(kind, str) and kind in SCALARS:
            return self.json(schema)
        text = f"{quote} {self.text(schema, quote, BracedCall.QUOTE)}"
        return text if kind == "string" else f"({text} | {self.json({'type': [*SCALARS]})})"

    @staticmethod
    def items(item: str, schema: Schema) -> str:
        check(schema)
        low, high = int(schema.get("minItems") or 0), schema.get("maxItems")
        if high is not None and (int(high) < low or not int(high)):
            return "" if not low else '""'
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else int(high) - 1}}}'
        return f"{item} {more}" if low else f"({item} {more})?"


def check(schema: Schema) -> None:
    if said := [name for name in UNFOLLOWED if schema.get(name)]:
        raise ValueError(f"{said[0]}: this model does not write its calls in JSON, so it cannot be held to that")


def fields(schema: Schema) -> list[tuple[str, Any, bool]]:
    """Names, schemas, and whether they are required; also what is required and not among the properties."""
    required = dict.fromkeys(key for key in schema.get("required") or () if isinstance(key, str))
    more = [key for key in required if key not in of(schema)]
    if more and schema.get("additionalProperties") is False:
        raise ValueError(f"required: {more[0]!r} is not among the properties")
    found = [(key, inner, key in required) for key, inner in of(schema).items()]
    return [*found, *((key, schema.get("additionalProperties"), True) for key in more)]


def searched(pattern: str) -> str:
    """A pattern, which may stand anywhere in a text, as one of the whole text."""
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = re.sub(
        r"(\\.)|/", lambda found: found[1] or r"\/", pattern.removeprefix("^")[: -1 if ends else None], flags=re.DOTALL
    )
    before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if ends else "(?s:.*)"
    return f"/{before}({inner}){after}/".replace("\n", "\\n")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
