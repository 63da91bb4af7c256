"""Tokenizers, conversations and control tokens: what a model folder's text side accepts, refuses and encodes."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import PLAIN_ADDED, SPECIAL, TEMPLATE, byte_fallback, byte_level, save

from halfbyte import limits
from halfbyte.chat import Tokenizer
from halfbyte.errors import CheckpointError
from halfbyte.text.control import MARK, Controls, Guard, clean
from halfbyte.text.template import TemplateError

USER = {"role": "user", "content": "Weather in Oslo?"}
CONTROL = [*SPECIAL, *(token for token in PLAIN_ADDED if token != "<b>")]  # <b> is a word like others
kinds = pytest.mark.parametrize(
    "make", [byte_level, byte_fallback, lambda: byte_fallback(1)], ids=["bytes", "gemma", "llama"]
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("model"), tokenizer_config={"eos_token": "<|im_end|>"})
    return Tokenizer.open(folder)


def control_ids(tokenizer, ids):
    """The control tokens among ids, by name."""
    names = {tokenizer.tokens.token_to_id(token): token for token in CONTROL}
    return [names[id] for id in ids if id in names]


# Row 26: tokenizers that do not fit.


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"null",
        b'{"model": {"type": "Nothing"}}',
        b'{"version": "1.0", "model": 3}',
    ],
)
def test_row_26_a_broken_tokenizer_is_refused_by_name(data, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer: .* Download the file again"):
        Tokenizer.open(tmp_path)


def test_row_26_a_truncated_tokenizer_is_refused(tmp_path):
    whole = byte_level().to_str().encode()
    for length in (len(whole) // 3, len(whole) - 1):
        (tmp_path / "tokenizer.json").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Tokenizer.open(tmp_path)


def test_row_26_a_missing_tokenizer_an_html_page_and_a_huge_file_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: there is no such file"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("<!DOCTYPE html><html>")
    with pytest.raises(CheckpointError, match="this is an HTML page"):
        Tokenizer.open(tmp_path)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(limits.TOKENIZER_BYTES + 1)  # sparse: it takes no disk, and must take no memory
    with pytest.raises(CheckpointError, match=r"268\.4 MB, more than the 268\.4 MB"):
        Tokenizer.open(tmp_path)


def test_row_26_more_ids_than_embeddings_are_refused(tmp_path):
    folder = save(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"})
    size = byte_level().get_vocab_size()
    assert Tokenizer.open(folder, vocab_rows=size).vocab_size == size
    assert Tokenizer.open(folder, vocab_rows=size + 64).vocab_size == size  # rows are often padded
    with pytest.raises(CheckpointError, match=rf"ids up to {size - 1}, but the model has {size - 1} embeddings"):
        Tokenizer.open(folder, vocab_rows=size - 1)


@pytest.mark.parametrize("bad", [10**6, -1, "2", 1.5, None, True, [[3]]], ids=str)
def test_row_26_eos_ids_that_the_model_lacks_are_ignored_and_said(bad, tmp_path, caplog):
    folder = save(tmp_path, generation_config={"eos_token_id": [5, bad]})
    assert Tokenizer.open(folder).eos_ids == {5}
    assert "end-of-text ids that the model does not have are ignored" in caplog.text


def test_row_26_without_eos_replies_end_by_length_and_it_is_said(tmp_path, caplog):
    assert Tokenizer.open(save(tmp_path)).eos_ids == frozenset()
    assert "no end-of-text token is known: replies end by their length" in caplog.text


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config": {"eos_token_id": 7}}, {7}),
        ({"config": {"eos_token_id": [7, 8]}}, {7, 8}),
        ({"config": {"text_config": {"eos_token_id": 9}}}, {9}),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [1, 2]}}, {1, 2}),
        ({"config": {"eos_token_id": 7}, "generation_config": {"temperature": 1}}, {7}),
        ({"generation_config": {"eos_token_id": 0}}, {0}),
    ],
    ids=str,
)
def test_eos_ids_come_from_generation_config_then_config_and_from_the_tokenizer(files, ids, tmp_path):
    own = byte_level().token_to_id("<|im_end|>")
    for eos_token in ("<|im_end|>", {"content": "<|im_end|>", "lstrip": False}):
        assert Tokenizer.open(save(tmp_path, tokenizer_config={"eos_token": eos_token}, **files)).eos_ids == {own, *ids}


def test_a_broken_generation_config_is_ignored_and_said(tmp_path, caplog):
    folder = save(tmp_path, config={"eos_token_id": 7})
    (folder / "generation_config.json").write_text("{")
    opened = Tokenizer.open(folder)
    assert (opened.eos_ids, opened.generation_config) == ({7}, {})
    assert "generation_config.json" in caplog.text and "It is ignored." in caplog.text


def test_a_broken_tokenizer_config_is_refused(tmp_path):
    (save(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.open(tmp_path)


def test_truncation_and_padding_of_the_file_are_not_ours(tmp_path):
    spec = json.loads(byte_level().to_str())
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    text = "a text of more than three tokens"
    assert Tokenizer.open(tmp_path).decode(Tokenizer.open(tmp_path).encode(text)) == text


# Row 29: conversations, with a template or without.


def test_row_29_without_a_template_a_chat_fails_and_a_raw_prompt_works(tmp_path):
    opened = Tokenizer.open(save(tmp_path, template=None))
    with pytest.raises(TemplateError, match=r"no default chat template .* give it a raw prompt"):
        opened.chat_ids([USER])
    assert opened.decode(opened.prompt_ids("raw <|im_end|>")) == "raw <|im_end|>"


def test_row_29_a_template_that_raises_is_the_callers_error(tokenizer):
    with pytest.raises(TemplateError, match="The chat template failed: Unexpected role judge"):
        tokenizer.chat_ids([{"role": "judge", "content": ""}])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "at least one"),
        ("hello", "must be a list"),
        ([{"content": "x"}], r"messages\[0\]: an object with a role"),
        ([USER, 7], r"messages\[1\]: an object with a role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only parts of text"),
        ([{"role": "user", "content": object()}], "cannot be given"),
    ],
)
def test_row_29_wrong_messages_are_refused(messages, said, tokenizer):
    with pytest.raises(TemplateError, match=said):
        tokenizer.chat_ids(messages)


def test_row_29_messages_that_nest_without_end_are_refused(tokenizer):
    loop, deep = [], []
    loop.append(loop)
    for _ in range(100_000):
        deep = [deep]
    for tools in (loop, deep):
        with pytest.raises(TemplateError, match="nest too deeply"):
            tokenizer.chat_ids([USER], tools=tools)


def test_a_conversation_becomes_text_and_ids(tokenizer):
    text = "<|im_start|>user\nWeather in Oslo?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render([USER]) == text
    assert tokenizer.decode(tokenizer.chat_ids([USER])) == text
    assert control_ids(tokenizer, tokenizer.chat_ids([USER])) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert tokenizer.apply_chat_template([USER], tokenize=False) == text
    assert tokenizer.apply_chat_template([USER]) == tokenizer.chat_ids([USER])
    assert tokenizer.render([USER], add_generation_prompt=False) == text.removesuffix("<|im_start|>assistant\n")
    assert tokenizer.render([USER], enable_thinking=True) == text + "<think>\n"
    assert '<tools>[{"name": "f"}]</tools>' in tokenizer.render([USER], tools=[{"name": "f"}])


def test_messages_are_brought_to_the_form_that_templates_read(tokenizer):
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}
    text = tokenizer.render([USER, {**said, "tool_calls": [call]}], add_generation_prompt=False)
    assert text.endswith('xy<|im_end|>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert "<think>\nhm\n</think>\n\nxy" in tokenizer.render([USER, {**said, name: "hm"}])


def test_the_template_for_tools_is_taken_where_there_is_one(tmp_path):
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    opened = Tokenizer.open(save(tmp_path, template=None, tokenizer_config={"chat_template": both}))
    assert opened.render([USER]) == "plain"
    assert opened.render([USER], tools=[{"name": "f"}]) == "tools"


def test_named_tokens_are_variables_and_absent_ones_are_undefined(tmp_path):
    template = "{{ bos_token }}{% if eos_token is defined %}?{% endif %}{{ tools is none }}{{ documents is none }}"
    opened = Tokenizer.open(save(tmp_path, template=template, tokenizer_config={"bos_token": "<|endoftext|>"}))
    assert opened.render([USER]) == "<|endoftext|>TrueTrue"
    assert opened.bos_id == opened.tokens.token_to_id("<|endoftext|>")


def test_a_raw_prompt_is_opened_once(tmp_path):
    from tokenizers import processors

    from_gemma = byte_fallback()
    bos = from_gemma.token_to_id("<|endoftext|>")
    spec = json.loads(from_gemma.to_str())
    processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)])
    spec["post_processor"] = json.loads(processor.__getstate__())
    save(tmp_path, tokenizer_config={"bos_token": "<|endoftext|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    opened = Tokenizer.open(tmp_path)
    assert opened.prompt_ids("a")[0] == bos
    assert opened.prompt_ids("<|endoftext|>a") == opened.prompt_ids("a")
    assert bos not in opened.encode("a") and bos not in opened.chat_ids([USER])


# Row 30: what users write is text.


@kinds
@pytest.mark.parametrize("token", CONTROL)
def test_row_30_control_tokens_in_messages_stay_text(make, token, tmp_path):
    opened = Tokenizer.open(save(tmp_path, make()))
    clean_ids = opened.chat_ids([USER])
    for content in (
        token,
        f"a {token} b",
        f"{token}{token}",
        f"  {token}\n",
        token[:-1] + token,
        f"<{token}>",
        token * 9,
    ):
        for role in ("user", "system", "tool"):
            ids = opened.chat_ids([{"role": role, "content": content}])
            assert control_ids(opened, ids) == control_ids(opened, clean_ids)
            assert opened.decode(ids) == opened.decode(clean_ids).replace("user", role).replace(
                USER["content"], content.strip()
            )
        assert control_ids(opened, opened.encode(content)) == []
        assert content in opened.decode(opened.encode(content))


def test_row_30_control_tokens_meant_in_a_raw_prompt_are_control_tokens(tokenizer):
    assert control_ids(tokenizer, tokenizer.encode("<|im_end|><think>", special=True)) == ["<|im_end|>", "<think>"]
    assert control_ids(tokenizer, tokenizer.prompt_ids("<|im_end|><think>")) == ["<|im_end|>", "<think>"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "<|im_end|>"},
        {"role": "assistant", "content": "", "reasoning": "<|im_end|>"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "<|im_end|>", "arguments": {}}}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"<|im_end|>": 1}}}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": '{"<|im_end|>": 1}'}}],
        },
        {"role": "user", "content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]},
    ],
)
def test_row_30_wherever_they_stand_in_a_message(message, tokenizer):
    def turns(messages, **more):
        return [token for token in control_ids(tokenizer, tokenizer.chat_ids(messages, **more)) if token in SPECIAL]

    plain = {**message, "content": "x", "reasoning": None, "tool_calls": None}
    assert turns([USER, message]) == turns([USER, plain])
    tools = [{"name": "<|im_end|>", "<|im_start|>": ["<|endoftext|>"]}]
    assert turns([USER], tools=tools) == turns([USER], tools=[{"name": "x"}])


def test_row_30_a_model_may_have_reasoned_and_called_in_its_own_text(tokenizer):
    """Its marks in an assistant's text are the model's, and the template reads them; those that end a turn are not."""
    text = "<think>\nhm\n</think>\n\nYes <tool_call><|im_end|>"
    ids = tokenizer.chat_ids([USER, {"role": "assistant", "content": text}], add_generation_prompt=False)
    assert tokenizer.decode(ids).endswith("assistant\nYes <tool_call><|im_end|><|im_end|>\n")
    assert control_ids(tokenizer, ids)[2:] == ["<|im_start|>", "<tool_call>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ messages[0].content }}end|>", "<|im_"),  # completed by the template
        ("<|im_{{ messages[0].content }}", "end|>"),
        ("<|im_{{ messages[0].content | trim }}", " \n end|> \n"),
        ("{{ messages[0].content }}{{ messages[1].content }}", "<|im_|end|>"),
        ("{{ messages[0].content | lower }}", "<|IM_END|>"),
        ("{{ messages[0].content[:10] }}", "<|im_end|> and more"),
        ("{{ messages[0].content[2:] }}", "ab<|im_end|>"),
        ("{{ messages[0].content | replace('x', '') }}", "<|im_end|>"),
        ("{{ messages[0].content.split()[1] }}", "a <|im_end|> b"),
        ("{{ messages[0] | tojson }}", "<|im_end|>"),
        ("{{ '%s' % messages[0].content }}{{ '{}'.format(messages[0].content) }}", "<|im_end|>"),
        ("{% for k, v in messages[0].items() %}<p={{ k }}>{{ v }}{% endfor %}", "<|im_end|>"),
    ],
)
def test_row_30_whatever_a_template_does_with_text(template, content, tmp_path):
    opened = Tokenizer.open(save(tmp_path, template=template))
    messages = [{"role": "user", "content": content}, {"role": "user", "content": content[5:]}]
    ids = opened.chat_ids(messages)
    assert control_ids(opened, ids) == []
    if "[:10]" not in template:  # marks count as characters
        assert opened.decode(ids) == opened.render(messages)


PARTS = ["<", "|", ">", *CONTROL, "<|im_", "end|>", "think>", " ", "\n", "é", "a"]


@given(parts=st.lists(st.sampled_from(PARTS), max_size=12))
def test_row_30_any_text_is_text(tokenizer, parts):
    message = {"role": "user", "content": "".join(parts)}
    ids = tokenizer.chat_ids([message])
    assert control_ids(tokenizer, ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert tokenizer.decode(ids) == tokenizer.render([message])


@given(content=st.text(max_size=40))
def test_ids_of_text_without_control_tokens_are_those_of_the_whole_text(tokenizer, content):
    """Marks must not change how text is cut into tokens."""
    content = clean(content)
    if not any(token.lower() in content.lower() for token in CONTROL):
        text = tokenizer.render([{"role": "user", "content": content}])
        assert tokenizer.chat_ids([{"role": "user", "content": content}]) == tokenizer.tokens.encode(text).ids


@kinds
@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("\ufeffBOM", "\ufeffBOM"),
        ("NUL \0 here", "NUL \0 here"),
        ("lone \ud83d surrogate", "lone \ufffd surrogate"),
        ("\ude42\ud83d", "\ufffd\ufffd"),
        ("a pair \ud83d\ude42", "a pair 🙂"),
        (f"mark {MARK}", "mark \ufffd"),
        ("\ufdd1\ufde0\ufdd2", "\ufffd\ufffd\ufffd"),
        ("\x7f\x1b[31m\u202e", "\x7f\x1b[31m\u202e"),
    ],
    ids=ascii,
)
def test_row_30_odd_characters_are_text(make, content, read, tmp_path):
    opened = Tokenizer.open(save(tmp_path, make()))
    assert read in opened.render([{"role": "user", "content": content}])
    assert read in opened.decode(opened.chat_ids([{"role": "user", "content": content}]))
    assert opened.decode(opened.encode(content)).strip() == read.strip()
    assert read in opened.decode(opened.prompt_ids(content))


def test_row_30_a_token_that_a_tokenizer_makes_of_text_in_any_case_is_refused(tmp_path):
    """Its model may have the token's text as a word."""
    spec = json.loads(byte_fallback().to_str())
    spec["model"]["ignore_merges"] = True
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(TemplateError, match=r"The text holds '<\|im_end\|>'"):
        Tokenizer.open(tmp_path).encode("<|im_end|>")


def test_row_30_tokens_that_normalising_makes_are_not_control_tokens(tmp_path):
    """An added token may be looked for in normalised text, where full-width brackets have become plain."""
    spec = json.loads(byte_level().to_str())
    spec["normalizer"] = {"type": "NFKC"}
    for token in spec["added_tokens"]:
        token["normalized"] = True
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    opened = Tokenizer.open(tmp_path)
    written = "\uff1cthink\uff1e"
    assert control_ids(opened, opened.encode(written, special=True)) == ["<think>"]
    assert control_ids(opened, opened.encode(written)) == []
    assert len(control_ids(opened, opened.chat_ids([{"role": "user", "content": written}]))) == 3


def test_which_added_tokens_are_control_tokens(tokenizer):
    assert tokenizer.controls.ids.keys() == set(CONTROL)
    without = Controls(byte_level(), []).ids.keys()
    assert without == {*SPECIAL, "<｜User｜>"}  # noqa: RUF001 (DeepSeek's)
    assert control_ids(tokenizer, tokenizer.encode("<b>")) == []
    assert tokenizer.encode("<b>") == [tokenizer.tokens.token_to_id("<b>")]


@pytest.mark.timed
def test_a_guard_of_many_tokens_is_fast():
    import time

    guard = Guard([f"<unused{number}>" for number in range(6000)] + ["<|im_end|>"])
    start = time.process_time()
    guard("Paste of a page: <b>bold</b> <unused12> and <i>more</i>.\n" * 10_000)
    assert time.process_time() - start < 2


def test_opening_says_nothing_else(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    Tokenizer.open(save(tmp_path, tokenizer_config={"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    assert caplog.text == ""
