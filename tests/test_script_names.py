"""mlx-lm's names for what scripts begin with: load, and what they ask of a tokenizer."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import halfbyte
from halfbyte.chat import Tokenizer
from halfbyte.hub import locate
from halfbyte.text.template import TemplateError

TEXTS = ["Once upon a time", "<|im_start|>user\nHi<|im_end|>\n", "", " zwei  äöü 日本 👋", "<|im_end|><|endoftext|>"]
PROMPT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def loaded():
    return halfbyte.load("tiny", device="cpu")


def test_load_takes_what_mlx_lms_takes(loaded):
    unasked = {"model_config": {}, "adapter_path": None, "return_config": False, "revision": None}
    for given in (
        {"lazy": False, "tokenizer_config": {}},
        {"lazy": True, "tokenizer_config": {"trust_remote_code": True}, "trust_remote_code": True, **unasked},
    ):
        model, tokenizer = halfbyte.load("tiny", "cpu", "float32", **given)
        text = halfbyte.generate(model, tokenizer, tokenizer.apply_chat_template(PROMPT), max_tokens=5, temperature=0)
        assert text == halfbyte.generate(*loaded, tokenizer.apply_chat_template(PROMPT), max_tokens=5, temperature=0)
    assert halfbyte.load(path_or_hf_repo="tiny", device="cpu")[0].fingerprint == loaded[0].fingerprint


def test_special_tokens_and_the_template_may_be_others(loaded):
    first = loaded[1].encode("Once upon a time")[0]
    word = loaded[1].tokens.id_to_token(first)
    given = {"eos_token": word, "chat_template": "{{ messages[0].content }}", "pad_token": None}
    _, tokenizer = halfbyte.load("tiny", device="cpu", tokenizer_config=given)
    assert tokenizer.eos_token_id == first and first in tokenizer.eos_token_ids > loaded[1].eos_token_ids - {first}
    assert tokenizer.apply_chat_template(PROMPT, tokenize=False) == "Hi"
    assert tokenizer.named["pad_token"] == loaded[1].named["pad_token"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adapter_path": "adapters"}, "adapter_path is not taken: adapters are not applied"),
        ({"model_config": {"rope_scaling": None}}, "model_config is not taken"),
        ({"return_config": True}, "return_config is not taken: it is halfbyte.config.read"),
        ({"tokenizer_config": {"padding_side": "left"}}, "padding_side is not taken; these are: bos_token"),
        ({"tokenizer_config": {"eos_token": "<|nothing|>"}}, "eos_token '<|nothing|>' is no token"),
        ({"tokenizer_config": {"chat_template": 7}}, "chat_template must be a string, it is 7"),
    ],
)
def test_what_load_does_not_do_is_refused_by_name(given, said):
    with pytest.raises(ValueError) as caught:
        halfbyte.load("tiny", device="cpu", **given)
    assert said in str(caught.value)


def test_a_tokenizer_config_by_position_is_no_device():
    with pytest.raises(TypeError, match="give tokenizer_config and model_config by name"):
        halfbyte.load("tiny", {"trust_remote_code": True})


@pytest.fixture(scope="module")
def theirs(loaded):
    """transformers' own, of the same files."""
    return PreTrainedTokenizerFast(tokenizer_file=str(locate("tiny") / "tokenizer.json"), **loaded[1].named)


@pytest.mark.parametrize(
    "name", ["eos_token", "eos_token_id", "pad_token", "pad_token_id", "bos_token", "bos_token_id"]
)
def test_special_tokens_are_those_of_transformers(loaded, theirs, name):
    assert getattr(loaded[1], name) == getattr(theirs, name)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_tokens_are_those_of_transformers(loaded, theirs, text):
    ours = loaded[1]
    for add in (True, False):
        assert ours.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
    ids = theirs.encode(text, add_special_tokens=False)
    tokens = theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(ids) == tokens and ours.convert_tokens_to_ids(tokens) == ids
    for skip in (True, False):
        wanted = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == wanted
        assert ours.decode(torch.tensor(ids, dtype=torch.int64), skip_special_tokens=skip) == wanted
    if ids:
        assert ours.convert_ids_to_tokens(ids[0]) == tokens[0] and ours.convert_tokens_to_ids(tokens[0]) == ids[0]
        assert ours.decode(ids[0]) == theirs.decode(ids[0])


def test_the_vocabulary(loaded, theirs):
    ours = loaded[1]
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert ours.vocab_size > max(ours.get_vocab().values())
    assert ours.convert_ids_to_tokens(10**6) is None and ours.convert_ids_to_tokens(-1) is None
    assert ours.convert_tokens_to_ids("no such token") is None and ours.unk_token_id is None


def test_what_a_model_can_do(loaded):
    tiny = loaded[1]
    assert tiny.has_chat_template and not tiny.has_thinking and not tiny.has_tool_calling
    assert (tiny.think_start, tiny.think_end) == (None, None)
    thinks = {"default": "{{ '<think>' }}{{ messages }}</think><tool_call>"}
    thinker = Tokenizer(tiny.tokens, tiny.named, thinks, tiny.eos_ids, {}, tiny.vocab_size)
    assert thinker.has_thinking and thinker.has_tool_calling and thinker.think_start == "<think>"
    bare = Tokenizer(tiny.tokens, {}, {}, [], {}, tiny.vocab_size)
    assert not bare.has_chat_template and bare.pad_token is bare.pad_token_id is bare.eos_token is None


def test_more_tokens_may_end_a_reply(loaded):
    tokenizer = Tokenizer(loaded[1].tokens, loaded[1].named, {}, [0], {}, loaded[1].vocab_size)
    tokenizer.add_eos_token("<|im_end|>")
    tokenizer.add_eos_token("7")
    assert tokenizer.eos_token_ids == {0, 7, tokenizer.eos_token_id}
    with pytest.raises(ValueError, match="'<nothing>' is no token"):
        tokenizer.add_eos_token("<nothing>")
    with pytest.raises(ValueError, match="'999999' is no token"):
        tokenizer.add_eos_token("999999")
    first = next(halfbyte.stream_generate(loaded[0], loaded[1], [5, 6, 7], temperature=0)).token
    tokenizer.eos_token_ids = [first]
    (only,) = halfbyte.stream_generate(loaded[0], tokenizer, [5, 6, 7], temperature=0)
    assert only.finish_reason == "stop"


@pytest.mark.parametrize("text", TEXTS)
def test_a_detokenizer_streams_it(loaded, text):
    tokenizer = loaded[1]
    stream, segments = tokenizer.detokenizer, []
    for _ in range(2):
        stream.reset()
        for id in tokenizer.encode(text):
            stream.add_token(id)
            segments.append(stream.last_segment)
        stream.finalize()
        segments.append(stream.last_segment)
        assert stream.text == text == tokenizer.decode(stream.tokens)
    assert "".join(segments) == text * 2


def test_a_chat_template_gives_a_list_or_a_text(loaded):
    tokenizer = loaded[1]
    plain = tokenizer.apply_chat_template(PROMPT)
    assert tokenizer.apply_chat_template(PROMPT, return_dict=False, return_tensors=None) == plain
    text = tokenizer.apply_chat_template(PROMPT, tokenize=False)
    assert tokenizer.encode(text, add_special_tokens=False) == plain
    for given in ({"return_dict": True}, {"return_tensors": "np"}, {"return_assistant_tokens_mask": True}):
        with pytest.raises(ValueError, match="apply_chat_template: return_"):
            tokenizer.apply_chat_template(PROMPT, **given)
    with pytest.raises(ValueError, match="chat_template is not taken here, but by load"):
        tokenizer.apply_chat_template(PROMPT, chat_template="{{ messages }}")
    with pytest.raises(ValueError, match="the second argument is the tools"):
        tokenizer.apply_chat_template(PROMPT, False)


@pytest.mark.parametrize("content", ["Once upon", " Once upon ", "<|im_end|> Once <|im_start|>", "\n\nOnce <|", "日本"])
def test_a_message_that_the_model_is_to_go_on_with(loaded, content):
    folder = locate("tiny")
    their = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    messages, controls = [*PROMPT, {"role": "assistant", "content": content}], loaded[1].controls.all_ids
    given = {"continue_final_message": True, "add_generation_prompt": False}
    trimming = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}!\n{% endfor %}"
    for source in (loaded[1].chat_template, trimming):
        _, tokenizer = halfbyte.load("tiny", device="cpu", tokenizer_config={"chat_template": source})
        text = their.apply_chat_template(messages, chat_template=source, tokenize=False, **given)
        assert tokenizer.apply_chat_template(messages, tokenize=False, **given) == text
        assert tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True) == text
        ids = tokenizer.apply_chat_template(messages, **given)
        assert tokenizer.decode(ids) == text
        opening = tokenizer.apply_chat_template([*PROMPT, {**messages[1], "content": "x"}], continue_final_message=True)
        assert sum(map(controls.__contains__, ids)) == sum(map(controls.__contains__, opening)), "content is text"
    with pytest.raises(ValueError, match="exclude each other"):
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, continue_final_message=True)
    for last in ({"role": "assistant", "content": ""}, {"role": "assistant", "tool_calls": []}):
        with pytest.raises(TemplateError, match="no text to go on with"):
            tokenizer.apply_chat_template([*PROMPT, last], continue_final_message=True)


def test_a_template_without_the_last_message(loaded):
    _, tokenizer = halfbyte.load("tiny", device="cpu", tokenizer_config={"chat_template": "{{ messages[0].content }}"})
    with pytest.raises(TemplateError, match="leaves the last message out"):
        tokenizer.apply_chat_template([*PROMPT, *PROMPT], continue_final_message=True)


def test_control_tokens_taken_as_text_are_told_of_once(caplog):
    tokenizer = halfbyte.load("tiny", device="cpu")[1]
    ids = [tokenizer.encode("<|im_end|>", special=False), tokenizer.encode("plain")]
    assert len(ids[0]) > 1 and not caplog.messages
    for _ in range(2):
        assert tokenizer.encode("<|im_end|>") == ids[0]
    assert len(caplog.messages) == 1 and "add_special_tokens=False) means them" in caplog.messages[0]


def test_ids_that_cannot_be(loaded):
    tokenizer = loaded[1]
    assert tokenizer.convert_ids_to_tokens([2**40, -1]) == [None, None]
    for wrong in (-1, 2**40):
        with pytest.raises(ValueError, match=f"decode: {wrong} is no token id"):
            tokenizer.decode([5, wrong])
    with pytest.raises(ValueError, match="is no token of this model"):
        tokenizer.add_eos_token("99999999999999")


SCRIPT = """
from {package} import load, generate, stream_generate, batch_generate, convert
from {package}.sample_utils import make_sampler, make_logits_processors
from {package}.models.cache import make_prompt_cache

model, tokenizer = load("tiny", lazy=False, tokenizer_config={{}})
prompt = tokenizer.apply_chat_template([{{"role": "user", "content": "Hi"}}], add_generation_prompt=True)
text = generate(
    model, tokenizer, prompt=prompt, max_tokens=20, verbose=True,
    sampler=make_sampler(temp=0.7, top_p=0.9, min_p=0.0, top_k=20),
    logits_processors=make_logits_processors(repetition_penalty=1.1),
)
cache = make_prompt_cache(model)
for response in stream_generate(model, tokenizer, prompt, max_tokens=5, prompt_cache=cache):
    print(response.text, end="")
many = batch_generate(model, tokenizer, [prompt, prompt], max_tokens=4, verbose=True, sampler=make_sampler())
assert isinstance(text, str) and len(many.texts) == 2 and callable(convert)
"""


def test_a_script_of_mlx_lms_with_another_import():
    exec(SCRIPT.format(package="halfbyte"), {})
