"""Calls that a request insists on: whatever the model would say, its words follow the tool's schema."""
# ruff: noqa: RUF001 (DeepSeek writes its tokens with ｜)

import json
from functools import cache
from pathlib import Path

import pytest

import halfbyte
from halfbyte.chat import Tokenizer
from halfbyte.grammar import Grammars
from halfbyte.server import tools
from halfbyte.server.refusals import Refused
from halfbyte.server.tables import ToolName
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
        'city:<|"|>Oslo<|"|>,days:3,place:{x:<|"|>1<|"|>},tags:[<|"|>a<|"|>,<|"|>b<|"|>],unit:<|"|>C<|"|>}<tool_call|>',
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


@pytest.mark.parametrize("family", CHOSEN)
@pytest.mark.parametrize("name", ["3d_render", "7zip", "-a.b-", "404"])
def test_a_name_may_begin_with_a_digit(tokenizer, grammars, family, name):
    """As the APIs have names: letters, digits, _ and -; and a point, as clients have sent it."""
    offered = [{"type": "function", "function": {"name": ToolName(64, 1).read(name, "name")}}]
    form, rest = syntax(FAMILIES[family]), CHOSEN[family][1].replace("now", name)
    matcher = grammars.constraint("grammar", tools.rest(form, offered, "", True, grammars.term)).copy().matcher
    ids = tokenizer.encode(rest)
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    reply = Reply(form, offered)
    found = [*reply.push(tools.opening(form, "")), *reply.push(rest), *reply.finish()]
    assert [(event.kind, event.text) for event in found] == [("call", name), ("arguments", "{}")]


@pytest.mark.parametrize("name", ["", "a b", "a>b", 'a"b', "a{b", "a\nb", "a" * 65])
def test_a_name_has_no_other_signs(name):
    with pytest.raises(Refused):
        ToolName(64, 1).read(name, "name")
