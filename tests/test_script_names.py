"""mlx-lm's names for what scripts begin with: load, and what they ask of a tokenizer."""

import pytest

import halfbyte

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
