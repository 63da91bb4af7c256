"""Calls that a request insists on: whatever the model would say, its words follow the tool's schema."""
# ruff: noqa: RUF001 (DeepSeek writes its tokens with ｜)

import json
from functools import cache
from pathlib import Path

import pytest

import halfbyte
from halfbyte.chat import Tokenizer
from halfbyte.grammar import GrammarError, Grammars
from halfbyte.server import tools
from halfbyte.text.reply import Reply, syntax

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"x": {"$ref": "#/$defs/number"}}},
    },
    "required": ["city", "days"], "additionalProperties": False, "$defs": {"number": {"type": "number"}},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
FAMILIES = {
    "qwen3": "<tool_call>",
    "qwen3.5": "<tool_call><function=",
    "deepseek": "<｜tool▁call▁begin｜>",
    "gemma4": "<|tool_call>",
}
RIGHT = {  # the rest of a call of weather, Oslo and 3 days
    "qwen3": ['{"city": "Oslo", "days": 3}}\n</tool_call>', '{"city": "Oslo", "days": 3, "unit": "C"}}</tool_call>'],
    "qwen3.5": [
        "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=unit>\nF\n</parameter>\n"
        '<parameter=tags>\n["a"]\n</parameter>\n</function>\n</tool_call>',
    ],
    "deepseek": ['{"city": "Oslo", "days": 3}<｜tool▁call▁end｜>', '{"city":"Oslo","days":3}<｜tool▁call▁end｜>'],
    "gemma4": [
        'city:<|"|>Oslo<|"|>,days:3}<tool_call|>',
        'city:<|"|>Oslo<|"|>,days:3,place:{x:1},tags:[<|"|>a<|"|>,<|"|>b<|"|>],unit:<|"|>C<|"|>}<tool_call|>',
    ],
}
WRONG = {
    "qwen3": ['{"city": "Oslo"}}', '{"city": 5', '{"city": "Oslo", "days": "3', '{"city": "Oslo", "days": 3, "more"'],
    "qwen3.5": [
        "</function>", "<parameter=days>\n3", "<parameter=city>\nOslo\n</parameter>\n</function>",
        "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\nmany",
    ],
    "deepseek": ['{"city": "Oslo"}<', '{"days": "3'],
    "gemma4": ["}", "days:3", 'city:<|"|>Oslo<|"|>}', 'city:<|"|>Oslo<|"|>,days:many', "city:Oslo"],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(Path(halfbyte.__file__).parent / "tiny")


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def follows(tokenizer, grammars):
    """Whether a text can be the beginning of what follows an opening, and all of it."""

    @cache
    def compiled(family, name, single):
        rest = tools.rest(syntax(FAMILIES[family]), TOOLS, name, single, grammars.term)
        return grammars.constraint("grammar", rest)

    def check(family, name, text, single=False):
        matcher = compiled(family, name, single).copy().matcher
        ids = tokenizer.encode(text)
        begins = matcher.try_consume_tokens(ids) == len(ids)
        return begins, begins and matcher.is_accepting()

    return check


@pytest.mark.parametrize(("family", "text"), [(family, text) for family in RIGHT for text in RIGHT[family]])
def test_what_follows_the_schema_is_taken(follows, family, text):
    assert follows(family, "weather", text) == (True, True)
    reply = Reply(syntax(FAMILIES[family]), TOOLS)
    found = [*reply.push(tools.opening(reply.syntax, "weather")), *reply.push(text), *reply.finish()]
    arguments = json.loads("".join(event.text for event in found if event.kind == "arguments"))
    assert (arguments["city"], arguments["days"]) == ("Oslo", 3)


@pytest.mark.parametrize(("family", "text"), [(family, text) for family in WRONG for text in WRONG[family]])
def test_what_does_not_is_not(follows, family, text):
    assert follows(family, "weather", text)[0] is False


DEFS = {
    "Colour": {"type": "string", "enum": ["red", 'b/l"ue']},
    "Tree": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}},
    "Top": {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"]},
}
HELD = [  # the schema of v; of its values those that follow it, and others: as they are written, in tags and by Gemma
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [5, None], ["x", True]),
    ({"type": ["integer", "null"], "maximum": 9}, [5, None], ["x", 10, True]),
    ({"type": ["string", "null"], "maxLength": 4}, ["x", "", None], ["12345"]),
    ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, [5, True], ["x", None]),
    ({"$ref": "#/$defs/Colour"}, ["red", 'b/l"ue'], ["green", 5, None]),
    ({"allOf": [{"$ref": "#/$defs/Colour"}], "default": "red"}, ["red"], ["green"]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3], [2, "x"]),
    ({"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "integer"}]}, ["red", 5], ["green", None]),
    ({"enum": [1, 2, 3]}, [1, 3], [4, "x", None]),
    ({"enum": ["1", 2, None]}, ["1", 2, None], [3, "x"]),
    ({"enum": ["5", "true", "null", "None", "[1]", ""]}, ["5", "true", "null", "None", "[1]", ""], ["x"]),
    ({"enum": ["a", None], "type": "string"}, ["a"], [None]),
    ({"const": "yes"}, ["yes"], ["no", 5]),
    ({"const": 5}, [5], ["yes", 6]),
    ({"type": "string", "pattern": "^[0-9/]{2}$"}, ["12", "1/"], ["1", "123", "ab"]),
    ({"type": "string", "pattern": "a.c"}, ["abc", "xabcx\n"], ["ab"]),
    ({"type": "string", "minLength": 2, "pattern": "^x"}, ["xx", "x</p>"], ["x", "yy"]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        [[1], [1, 2]],
        [[], [1, 2, 3], ["x"]],
    ),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": 2}], [{"a": "x"}, 5]),
    ({"$ref": "#/$defs/Tree"}, [{}, {"kids": [{"kids": []}, {}]}], [{"kids": [5]}, []]),
    ({"anyOf": [{"$ref": "#/$defs/Top"}, {"type": "null"}]}, [{"v": True}, None], [{}, {"v": 5}, "x"]),
]


def tagged(value):
    said = value if isinstance(value, str) else json.dumps(value)
    return f"<parameter=v>\n{said}\n</parameter>\n</function></tool_call>"


def braced(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{braced(one)}" for key, one in value.items()) + "}"
    return "[" + ",".join(map(braced, value)) + "]" if isinstance(value, list) else json.dumps(value)


@pytest.mark.parametrize("family", ["qwen3.5", "gemma4"])
@pytest.mark.parametrize(("schema", "right", "wrong"), HELD, ids=[json.dumps(case[0]) for case in HELD])
def test_values_follow_choices_references_and_lists(tokenizer, grammars, family, schema, right, wrong):
    for top in (
        {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": DEFS},
        {"$ref": "#/$defs/Whole", "$defs": {**DEFS, "Whole": {"properties": {"v": schema}, "required": ["v"]}}},
        {"additionalProperties": schema, "required": ["v"], "$defs": DEFS},
    ):
        offered = [{"type": "function", "function": {"name": "f", "parameters": top}}]
        form = syntax(FAMILIES[family])
        start = grammars.constraint("grammar", tools.rest(form, offered, "f", True, grammars.term))
        for value in [*right, *wrong]:
            text = tagged(value) if family == "qwen3.5" else f"v:{braced(value)}}}<tool_call|>"
            matcher, ids = start.copy().matcher, tokenizer.encode(text)
            taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert taken == any(value is one or value == one for one in right), value
            if taken:
                reply = Reply(form, offered)
                found = [*reply.push(tools.opening(form, "f")), *reply.push(text), *reply.finish()]
                assert json.loads("".join(one.text for one in found if one.kind == "arguments")) == {"v": value}


REFUSED = [
    ({"properties": {"v": {"$ref": "other.json"}}}, "ref"),
    ({"properties": {"v": {"$ref": "#/$defs/none"}}}, "ref"),
    ({"properties": {"v": {"not": {"type": "string"}}}}, "not"),
    ({"properties": {"v": {"type": "string", "pattern": "(?=a)"}}}, "look-around"),
    ({"properties": {"v": {"allOf": [{"maxLength": 1}, {"maxLength": 2}]}}}, "maxLength"),
    ({"properties": {"v": {"$ref": "#/properties/v"}}}, "itself"),
    ({"properties": {"a>\n:": {}}, "minProperties": 1}, "properties|minProperties"),
    ({"properties": {"a\n:": {}}}, "properties"),
    ({"required": ["v"], "additionalProperties": False}, "required"),
    ({"properties": {"v": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, "oneOf"),
    ({"properties": {"v": {"enum": ["a</parameter>b", '<|"|>']}}}, "enum"),
]


@pytest.mark.parametrize("family", ["qwen3.5", "gemma4"])
@pytest.mark.parametrize(("parameters", "said"), REFUSED, ids=[json.dumps(case[0]) for case in REFUSED])
def test_what_cannot_be_followed_is_refused_by_name(grammars, family, parameters, said):
    offered = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(GrammarError, match=said):
        grammars.constraint("grammar", tools.rest(syntax(FAMILIES[family]), offered, "f", True, grammars.term))


CHOSEN = {
    "qwen3": ('weather", "arguments": ', 'now", "arguments": {}}\n</tool_call>', '\n<tool_call>\n{"name": "'),
    "qwen3.5": ("weather>\n", "now>\n</function>\n</tool_call>", "\n<tool_call>\n<function="),
    "deepseek": ("weather<｜tool▁sep｜>", "now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>"),
    "gemma4": ("weather{", "now{}<tool_call|>", "<|tool_call>call:"),
}


@pytest.mark.parametrize("family", CHOSEN)
def test_where_the_model_chooses_any_tool_may_be_called_and_several(follows, family):
    head, other, again = CHOSEN[family]
    one = head + RIGHT[family][0]
    assert follows(family, "", one) == follows(family, "", other) == (True, True)
    assert follows(family, "", one + again + other) == (True, True)
    assert follows(family, "", one + again + other, single=True)[0] is False
    assert follows(family, "", "other")[0] is False
