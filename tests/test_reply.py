"""Replies taken apart: reasoning, text and calls in each family's syntax, wherever the text is cut."""
# ruff: noqa: RUF001 (DeepSeek writes its tokens with ｜)

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import TEMPLATE, save

from halfbyte.chat import Tokenizer
from halfbyte.text.calls import BracedCall, JsonCall, SeparatedCall, TaggedCall
from halfbyte.text.reply import Event, Reply, Syntax, syntax

QWEN3 = syntax("<think></think> <tool_call>{}</tool_call>")
QWEN3_5 = syntax("<think></think> <tool_call><function=f></function></tool_call>")
CODER = syntax("<tool_call><function=f></function></tool_call>")
GEMMA = syntax("<|channel>thought <channel|> <|tool_call>call:f{}<tool_call|>")
DEEPSEEK = syntax("<think></think> <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>")
FAMILIES = {"qwen3": QWEN3, "qwen3.5": QWEN3_5, "coder": CODER, "gemma": GEMMA, "deepseek": DEEPSEEK}
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "at": {"type": "array"},
    "maybe": {"type": ["string", "null"]},
    "open": {},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},  # as Pydantic writes Optional[int]
    "name": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "level": {"enum": [1, 2]},
    "colour": {"$ref": "#/$defs/Colour"},
    "size": {"allOf": [{"$ref": "#/$defs/Size"}], "default": None},
    "mixed": {"enum": ["1", 2, None]},
    "five": {"const": 5},
    "endless": {"$ref": "#/$defs/Endless"},
}
DEFS = {"Colour": {"type": "string", "enum": ["5", "true"]}, "Size": {"type": "integer"},
        "Endless": {"anyOf": [{"$ref": "#/$defs/Endless"}]}}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": PROPERTIES, "$defs": DEFS}}}]


def text(words):
    return Event("text", words)


def reasoning(words):
    return Event("reasoning", words)


def call(name, arguments, index=0):
    return [Event("call", name, index), Event("arguments", arguments, index)]


def joined(events):
    """Neighbours of one kind as one, which is what remains of events when their cuts do not matter."""
    whole = []
    for event in events:
        if whole and event.kind == whole[-1].kind != "call" and event.index == whole[-1].index:
            event = Event(event.kind, whole.pop().text + event.text, event.index)
        whole.append(event)
    return whole


def read(family, reply, cuts=(), tools=TOOLS, **more):
    reader, places = Reply(family, tools, **more), [0, *sorted(cuts), len(reply)]
    events = [e for a, b in pairwise(places) for e in reader.push(reply[a:b])]
    return joined([*events, *reader.finish()])


CASES = [
    ("plain", QWEN3, "Hello\nthere\n", [text("Hello\nthere\n")]),
    ("newlines first", QWEN3, "\n\nHello", [text("\n\nHello")]),
    ("reasoning", QWEN3, "<think>\nhm\n\nso\n</think>\n\nYes\n", [reasoning("hm\n\nso"), text("Yes\n")]),
    ("empty reasoning", QWEN3, "<think>\n\n</think>\n\nYes", [text("Yes")]),
    ("reasoning that does not end", QWEN3, "<think>\nhm\n", [reasoning("hm")]),
    ("a quotation", QWEN3, "Write <think> and </think>", [text("Write <think> and </think>")]),
    ("less than", QWEN3, "a < b <thin", [text("a < b <thin")]),
    (
        "two calls",
        QWEN3,
        'Look:\n<tool_call>\n{"name": "weather", "arguments": {"city": "O}"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        [text("Look:"), *call("weather", '{"city": "O}"}'), *call("f", "{}", 1)],
    ),
    (
        "text after a call",
        QWEN3,
        '<tool_call>{"name": "f", "arguments": {"a": [1, {}]}}</tool_call>\nDone.',
        [*call("f", '{"a": [1, {}]}'), text("Done.")],
    ),
    (
        "keys in another order",
        QWEN3,
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        call("f", '{"a": 1}'),
    ),
    (
        "arguments in a string",
        QWEN3,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call("f", '{"a": 1}'),
    ),
    (
        "no closing marker",
        QWEN3,
        '<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}}}\n',
        call("f", '{"a": {"b": 1}}'),
    ),
    ("cut off", QWEN3, '<tool_call>\n{"name": "f", "arguments": {"a": "x', call("f", '{"a": "x')),
    ("not a call", QWEN3, "<tool_call>\nno\n</tool_call>", [text("<tool_call>\nno\n</tool_call>")]),
    ("not a call, cut off", QWEN3, "<tool_call>\nno", [text("<tool_call>\nno")]),
    ("a name with quotes", QWEN3, '<tool_call>{"name": "a\\"b", "arguments": {}}</tool_call>', call('a"b', "{}")),
    (
        "parameters",
        QWEN3_5,
        "<think>\nhm\n</think>\n\nLet me.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        [reasoning("hm"), text("Let me."), *call("weather", '{"city": "Oslo", "days": 2}')],
    ),
    (
        "types by the schema",
        CODER,
        "<tool_call><function=weather><parameter=city>7</parameter><parameter=exact>True</parameter>"
        '<parameter=at>[1, "x"]</parameter><parameter=maybe>null</parameter><parameter=open>7</parameter>'
        "<parameter=days>soon</parameter><parameter=other>\n[1]\n</parameter></function></tool_call>",
        call(
            "weather",
            '{"city": "7", "exact": true, "at": [1, "x"], "maybe": null, "open": "7", "days": "soon", "other": "[1]"}',
        ),
    ),
    (
        "types of a choice",
        CODER,
        "<tool_call><function=weather><parameter=limit>5</parameter><parameter=name>5</parameter>"
        "<parameter=level>2</parameter></function></tool_call>",
        call("weather", '{"limit": 5, "name": "5", "level": 2}'),
    ),
    (
        "types behind references, and values that are listed",
        CODER,
        "<tool_call><function=weather><parameter=colour>5</parameter><parameter=size>5</parameter>"
        "<parameter=mixed>2</parameter><parameter=five>5</parameter><parameter=endless>5</parameter>"
        "</function></tool_call>",
        call("weather", '{"colour": "5", "size": 5, "mixed": 2, "five": 5, "endless": "5"}'),
    ),
    (
        "None as templates print it",
        CODER,
        "<tool_call><function=weather><parameter=days>None</parameter><parameter=limit>None</parameter>"
        "<parameter=maybe>None</parameter><parameter=city>None</parameter><parameter=open>None</parameter>"
        "</function></tool_call>",
        call("weather", '{"days": null, "limit": null, "maybe": null, "city": "None", "open": "None"}'),
    ),
    ("no parameters", CODER, "<tool_call>\n<function=f>\n</function>\n</tool_call>", call("f", "{}")),
    (
        "lines, quotes and tags in a value",
        CODER,
        '<tool_call>\n<function=f>\n<parameter=code>\n\nif a < b:\n  "</p>"\n\n</parameter>\n</function>\n</tool_call>',
        call("f", '{"code": "\\nif a < b:\\n  \\"</p>\\"\\n"}'),
    ),
    (
        "a parameter without its end",
        CODER,
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        call("f", '{"a": "1"}'),
    ),
    ("no function", CODER, "<tool_call>x</tool_call>", [text("<tool_call>x</tool_call>")]),
    ("coder does not reason", CODER, "<think>x</think>", [text("<think>x</think>")]),
    (
        "gemma",
        GEMMA,
        "<|channel>thought\nhm\n<channel|>Let me."
        '<|tool_call>call:weather{city:<|"|>O{s},"lo"<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:f{}<tool_call|>",
        [
            reasoning("hm"),
            text("Let me."),
            *call("weather", '{"city": "O{s},\\"lo\\"", "days": 2}'),
            *call("f", "{}", 1),
        ],
    ),
    (
        "gemma's values",
        GEMMA,
        '<|tool_call>call:f{a:[1,<|"|>x<|"|>,[]],b:{c:true,d:null,e:{}},g:-1.5e3,h:word, i: "json" }<tool_call|>',
        call(
            "f",
            '{"a": [1, "x", []], "b": {"c": true, "d": null, "e": {}}, "g": -1500.0, "h": "word", "i": "json"}',
        ),
    ),
    (
        "gemma's null, as its template prints it",
        GEMMA,
        '<|tool_call>call:f{a:None,b:[None,<|"|>None<|"|>],None:1}<tool_call|>',
        call("f", '{"a": null, "b": [null, "None"], "None": 1}'),
    ),
    (
        "numbers that JSON cannot write",
        CODER,
        "<tool_call><function=weather><parameter=days>1e999</parameter><parameter=at>[-1e999, 2]</parameter>"
        "<parameter=level>NaN</parameter></function></tool_call>",
        call("weather", '{"days": "1e999", "at": ["-1e999", 2], "level": "NaN"}'),
    ),
    (
        "numbers that JSON cannot write, in an object of another order",
        QWEN3,
        '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>',
        call("f", '{"a": "1e999"}'),
    ),
    (
        "gemma's numbers that JSON cannot write",
        GEMMA,
        "<|tool_call>call:f{a:1e999,b:[-1e999,Infinity],c:1e5}<tool_call|>",
        call("f", '{"a": "1e999", "b": ["-1e999", "Infinity"], "c": 100000.0}'),
    ),
    ("gemma, cut off", GEMMA, '<|tool_call>call:f{a:<|"|>x', call("f", '{a:<|"|>x')),
    ("gemma, not a call", GEMMA, "<|tool_call>x<tool_call|>", [text("<|tool_call>x<tool_call|>")]),
    (
        "deepseek",
        DEEPSEEK,
        'Let me.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"} <｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [text("Let me."), *call("weather", '{"city": "Oslo"}'), *call("f", "{}", 1)],
    ),
    (
        "deepseek before V3.1",
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        call("weather", '{"city": "Oslo"}'),
    ),
    (
        "deepseek, not a call",
        DEEPSEEK,
        "<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>",
        [text("<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>")],
    ),
]
cases = pytest.mark.parametrize(("family", "reply", "events"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])


@cases
def test_a_reply_is_taken_apart_wherever_it_is_cut(family, reply, events):
    assert read(family, reply) == events
    assert read(family, reply, range(1, len(reply))) == events
    for place in range(1, len(reply)):
        assert read(family, reply, [place]) == events


@cases
def test_nothing_of_a_marker_is_given_before_it_is_known(family, reply, events):
    """Pieces of text and reasoning only ever grow into the whole."""
    reader, seen = Reply(family, TOOLS), {}
    whole = {kind: "".join(e.text for e in events if e.kind == kind) for kind in ("text", "reasoning")}
    for character in reply:
        for event in reader.push(character):
            seen[event.kind] = seen.get(event.kind, "") + event.text
            assert event.kind not in whole or whole[event.kind].startswith(seen[event.kind])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@given(data=st.data())
def test_any_text_in_any_pieces_loses_nothing_but_syntax(family, data):
    words = [
        *sorted(family.markers),
        "<think>",
        "\n",
        "a",
        "{",
        "}",
        '"',
        "<",
        '{"name": "f", "arguments": {}}',
        "call:f{}",
    ]
    reply = "".join(data.draw(st.lists(st.sampled_from(words), max_size=12)))
    cuts = data.draw(st.lists(st.integers(0, len(reply)), max_size=6))
    tools = data.draw(st.sampled_from([TOOLS, None]))
    assert read(family, reply, cuts, tools) == read(family, reply, tools=tools)


def test_arguments_come_as_they_are_written():
    reader = Reply(QWEN3, TOOLS)
    reader.push('<tool_call>\n{"name": "weather", ')
    assert reader.push('"arguments": {"city": ') == call("weather", '{"city":')
    assert reader.push('"Os') == [Event("arguments", ' "Os')]
    assert reader.push('lo"}') == [Event("arguments", 'lo"')]
    assert reader.push("}\n</tool") == []
    assert reader.push("_call>") == [Event("arguments", "}")]


def test_a_parameter_comes_when_it_is_complete():
    reader = Reply(CODER, TOOLS)
    assert reader.push("<tool_call>\n<function=weather>\n") == [Event("call", "weather")]
    assert reader.push("<parameter=city>\nOs") == []
    assert reader.push("lo\n</parameter>\n") == [Event("arguments", '{"city": "Oslo"')]
    assert reader.push("</function>\n</tool_call>") == [Event("arguments", "}")]


CUT = [  # what was said, and the arguments as far as they came
    ("<parameter=city>\nOslo\n</parameter>\n<parameter=open>\nhalf a", '{"city": "Oslo", "open": "half a'),
    ("<parameter=city>\nOslo\n</param", '{"city": "Oslo'),
    ("<parameter=city>\nOslo\n</parameter>\n</func", '{"city": "Oslo"'),
    ("<parameter=city>\nOslo\n</parameter>\n<parameter=da", '{"city": "Oslo"'),
    ("<parameter=days>\n12", '{"days": 12'),
    ("<parameter=days>\n", "{"),
    ('<parameter=at>\n[1, {"a": 2}', '{"at": [1, {"a": 2'),
    ("", "{"),
    ("<parameter=city>\nOslo\n</parameter>\n</function>", '{"city": "Oslo"}'),
    ("</function>\n</tool", "{}"),
]


@pytest.mark.parametrize(("said", "arguments"), CUT)
def test_parameters_that_are_cut_are_left_open(said, arguments):
    for cuts in [(), range(1, len(said) + 30)]:
        whole = f"<tool_call>\n<function=weather>\n{said}"
        reader, places = Reply(CODER, TOOLS), [0, *(n for n in cuts if n < len(whole)), len(whole)]
        events = [e for a, b in pairwise(places) for e in reader.push(whole[a:b])]
        assert joined([*events, *reader.finish(cut=True)]) == call("weather", arguments)


def test_reasoning_that_the_prompt_opened():
    assert read(QWEN3_5, "\nhm\n</think>\n\nYes", thinking=True) == [reasoning("hm"), text("Yes")]
    assert read(QWEN3_5, "hm", thinking=True) == [reasoning("hm")]


def test_without_tools_calls_are_text():
    said = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    assert read(QWEN3, said, tools=None) == read(QWEN3, said, tools=[]) == [text(said)]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", Syntax()),
        ("<think>a</think>", Syntax(("<think>", "</think>"))),
        ("<tool_call>", Syntax(call=("<tool_call>", "</tool_call>"), call_type=JsonCall)),
    ],
)
def test_a_template_shows_its_syntax(template, expected):
    assert syntax(template) == expected
    assert [family.call_type for family in (QWEN3, QWEN3_5, GEMMA, DEEPSEEK)] == [
        JsonCall,
        TaggedCall,
        BracedCall,
        SeparatedCall,
    ]


def test_a_tokenizer_knows_whether_its_prompt_opened_the_reasoning(tmp_path):
    tokenizer = Tokenizer.open(save(tmp_path, template=TEMPLATE))
    user = {"role": "user", "content": "Say <think>"}
    assert tokenizer.reply(tokenizer.chat_ids([user], enable_thinking=True)).state == "reasoning"
    assert tokenizer.reply(tokenizer.chat_ids([user])).state == "text"
    _, arguments = read(tokenizer.syntax, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    assert json.loads(arguments.text) == {"a": 1}


@pytest.mark.parametrize(
    "reply", ["<tool_call>" + "{" * 100_000, "<|tool_call>call:f" + "{a:" * 100_000], ids=["json", "gemma"]
)
def test_deep_nesting_is_text_not_a_crash(reply):
    for family in (QWEN3, GEMMA):
        assert read(family, reply)
