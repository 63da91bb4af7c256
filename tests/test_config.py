"""config.json: rows 22 to 25 of the fault plan, and how a model asks."""

import json
import logging
import math
import re
import shutil
from pathlib import Path

import pytest
from model_goldens import FOLDER
from tiny_models import TINY

from halfbyte import config, limits, models
from halfbyte.accounting import skeleton
from halfbyte.errors import CheckpointError

SUPPORTED = ("toy", "other")


def read(folder, text):
    (folder / "config.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return config.read(folder, SUPPORTED)


def settings(**values):
    return config.from_dict({"model_type": "toy", **values}, Path("somewhere/config.json"))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("hidden_size", "1000000000"),
        ("num_hidden_layers", "1000000000000"),
        ("num_hidden_layers", "1e12"),
        ("num_experts", "1000000000"),
        ("vocab_size", str(2**63)),
        ("vocab_size", "-1"),
        ("vocab_size", "0"),
        ("hidden_size", "true"),
        ("hidden_size", '"64"'),
        ("hidden_size", '{"__float__": "Infinity"}'),
        ("max_position_embeddings", "1e999"),
    ],
)
def test_row_22_sizes_are_bounded(tmp_path, key, text):
    found = read(tmp_path, f'{{"model_type": "toy", "{key}": {text}}}')
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}: an integer from 1 to \d+ was expected, it is "):
        found.size(key)


@pytest.mark.parametrize(
    "text", ["1e999", "-1e999", "NaN", "Infinity", '{"__float__": "NaN"}', '{"__float__": "-Infinity"}']
)
def test_row_22_numbers_are_finite(tmp_path, text):
    found = read(tmp_path, f'{{"model_type": "toy", "rope_theta": {text}}}')
    with pytest.raises(CheckpointError, match="rope_theta: a finite number was expected"):
        found.number("rope_theta")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "a JSON object was expected, it holds a list"),
        ("null", "it holds null"),
        ("", "it is not JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' stands in it twice"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' stands in it twice"),
        ('{"a": {"__float__": "one"}}', "must be one of Infinity"),
        ('{"a": {"__float__": []}}', "must be one of Infinity"),  # found by a fuzzer
        ('{"a": ' + "9" * 5000 + "}", "an integer of 5000 digits"),
        ("[" * 200_000, "nests deeper"),
        ("<!DOCTYPE html>", "this is an HTML page"),
        ("version https://git-lfs.github.com/spec/v1", "this is a Git-LFS pointer"),
    ],
    ids=lambda text: text[:20],
)
def test_row_23_broken_files(tmp_path, text, said):
    with pytest.raises(CheckpointError, match=r"config\.json: ") as caught:
        read(tmp_path, text)
    assert said in str(caught.value)


def test_row_23_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no config\.json in it\. Give the folder of an MLX checkpoint"):
        config.read(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"there is no config\.json in it, but GGUF files, which are not read"):
        config.read(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        config.read(tmp_path / "nothing")


def test_row_23_too_large(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(50 << 20)
    with pytest.raises(CheckpointError, match=r"it has 52\.4 MB, more than the 16\.8 MB such a file may have"):
        config.read(tmp_path)


def test_row_24_unknown_model_type(tmp_path):
    with pytest.raises(CheckpointError, match="'mystery' is not supported; these are: other, toy"):
        read(tmp_path, {"model_type": "mystery"})
    with pytest.raises(CheckpointError, match="model_type: the key is missing"):
        read(tmp_path, {})


def test_row_24_missing_field(tmp_path):
    found = read(tmp_path, {"model_type": "toy", "text_config": {"hidden_size": None}})
    with pytest.raises(
        CheckpointError, match=r"hidden_size: the key is missing; an integer from 1 to 131072 was expected"
    ):
        found.size("hidden_size")


@pytest.mark.parametrize("nested", [False, True])
def test_row_25_code_that_is_the_model_is_refused(tmp_path, nested):
    code = {"model_file": "model.py"}
    with pytest.raises(CheckpointError, match="model_file: it names Python code to run"):
        read(tmp_path, {"model_type": "toy", **({"text_config": code} if nested else code)})


@pytest.mark.parametrize("nested", [False, True])
def test_row_25_code_for_another_program_is_ignored_and_said(tmp_path, nested, caplog):
    code = {"auto_map": {"AutoModel": "modeling_evil.Model"}}
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit")
    with caplog.at_level("INFO", "halfbyte"):
        read(tmp_path, {"model_type": "toy", **({"text_config": code} if nested else code)})
    assert "auto_map names Python code, which is not run" in caplog.text


def test_text_config_counts_as_the_top(tmp_path):
    values = {
        "model_type": "toy",
        "hidden_size": 8,
        "eos_token_id": [1, 2],
        "text_config": {"model_type": "toy_text", "hidden_size": 64, "eos_token_id": None, "layers": "x"},
    }
    found = read(tmp_path, values)
    assert (found.model_type, found.size("hidden_size"), found.token_ids("eos_token_id")) == ("toy", 64, [1, 2])
    with pytest.raises(CheckpointError, match=r"text_config\.layers: an integer"):
        found.size("layers")


def test_types():
    found = settings(n=3, x=0.5, on=True, name="silu", rows=[1, 2], words=["a"], nothing=None, rope={"theta": 1e4})
    assert (found.integer("n"), found.number("x"), found.flag("on"), found.text("name")) == (3, 0.5, True, "silu")
    assert isinstance(found.number("n"), float)
    assert found.integers("rows") == (1, 2)
    assert found.integers("absent", default=()) == ()
    assert (found.list_of("rows", float), found.list_of("words", str, 1)) == ([1, 2], ["a"])
    assert found.integer("nothing", default=7) == 7
    assert found.number("absent", default=None) is None
    assert found.section("rope").number("theta") == 1e4
    assert not found.section("absent")
    assert found.token_ids("n") == [3]
    assert found.token_ids("absent") == []


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda c: c.integer("x", 1, 9), "x: an integer from 1 to 9 was expected, it is 0.5"),
        (lambda c: c.number("x", 1, 2), "x: a finite number from 1 to 2 was expected, it is 0.5"),
        (lambda c: c.number("on"), "on: a finite number was expected, it is True"),
        (lambda c: c.flag("x"), "x: true or false was expected, it is 0.5"),
        (lambda c: c.text("name", ("gelu", "relu")), "name: one of gelu, relu was expected, it is 'silu'"),
        (lambda c: c.list_of("rows", str), "rows: a list of str was expected, it is [1, 2]"),
        (lambda c: c.list_of("rows", int, 3), "rows: a list of 3 of int was expected, it is [1, 2]"),
        (lambda c: c.list_of("flags", int), "flags: a list of int was expected, it is [True]"),
        (lambda c: c.section("rope").integer("theta"), "rope.theta: an integer"),
        (lambda c: c.section("x"), "x: an object was expected, it is 0.5"),
        (lambda c: c.token_ids("x"), "x: token ids were expected, it is 0.5"),
        (lambda c: c.token_ids("long"), "... (60000 characters)"),
        (lambda c: c.refuse("x", "not today"), "x: not today"),
        (lambda c: c.must_be("name", "gelu"), "name: only 'gelu' is implemented, it is 'silu'"),
        (lambda c: c.must_be("on", (False, None)), "on: only False or None is implemented, it is True"),
        (lambda c: c.must_be("one", True), "one: only True is implemented, it is 1"),
        (lambda c: c.must_be("absent", False, default=True), "absent: only False is implemented, it is True"),
    ],
)
def test_errors_name_the_key(ask, said):
    found = settings(
        x=0.5, on=True, name="silu", rows=[1, 2], flags=[True], one=1, rope={"theta": 0.5}, long=["x"] * 12_000
    )
    with pytest.raises(CheckpointError) as caught:
        ask(found)
    assert str(caught.value).startswith(f"{Path('somewhere/config.json')}: ")
    assert said in str(caught.value)


def test_must_be_passes():
    found = settings(name="silu", absent=None, one=1)
    found.must_be("name", ("gelu", "silu"))
    found.must_be("one", 1.0)
    found.must_be("absent", False)
    found.must_be("absent", False, default=False)


NOT_IMPLEMENTED = [
    ("qwen3", "hidden_act", "gelu"), ("qwen3", "use_sliding_window", True),
    ("qwen3", "layer_types", ["full_attention", "sliding_attention"]),
    ("qwen3_moe", "use_sliding_window", True), ("qwen3_moe", "layer_types", ["sliding_attention"] * 3),
    ("qwen3_5", "hidden_act", "gelu"), ("qwen3_5", "attn_output_gate", False),
    ("qwen3_5_moe", "attn_output_gate", False), ("qwen3_next", "attn_output_gate", False),
    ("gemma4_moe", "hidden_activation", "silu"), ("gemma4_moe", "attention_bias", True),
    ("gemma4_e", "use_bidirectional_attention", "all"),
    ("deepseek_v3", "hidden_act", "gelu"), ("deepseek_v3", "topk_method", "greedy"),
    ("deepseek_v3", "scoring_func", "softmax"), ("deepseek_v3", "rope_interleave", False),
]  # fmt: skip


@pytest.mark.parametrize(("family", "key", "value"), NOT_IMPLEMENTED)
def test_what_no_model_implements_is_refused_by_name(family, key, value):
    found = config.from_dict({**TINY[family], "sliding_window": 7, key: value}, Path("config.json"))
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key}: only .+ is implemented, it is "):
        models.MODELS[found.model_type](found, None)  # before it asks for a weight


def test_every_such_refusal_is_tested():
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(models.__file__).parent.glob("*.py"))
    assert set(re.findall(r'must_be\(\s*"(\w+)"', sources)) <= {key for _, key, _ in NOT_IMPLEMENTED}


def test_full_attention_may_be_said_of_every_layer(tmp_path):
    folder = Path(shutil.copytree(FOLDER / "qwen3_moe-4bit", tmp_path / "model"))
    values = json.loads((folder / "config.json").read_text())
    kinds = {"layer_types": ["full_attention"] * values["num_hidden_layers"], "sliding_window": 7}
    (folder / "config.json").write_text(json.dumps({**values, **kinds}))
    assert skeleton(folder)[2] == skeleton(FOLDER / "qwen3_moe-4bit")[2]


def with_config(tmp_path, name, change):
    """A golden model whose settings a function has changed."""
    folder = Path(shutil.copytree(FOLDER / name, tmp_path / "model"))
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, key) for name in ("qwen3_5_moe-4bit", "gemma4_moe-4bit", "deepseek_v3-4bit")
          for key in ("max_position_embeddings", "rms_norm_eps")),
        ("qwen3_5_moe-4bit", "linear_conv_kernel_dim"), ("gemma4_moe-4bit", "sliding_window"),
    ],
)  # fmt: skip
def test_what_mlx_lm_takes_for_granted_may_be_left_out(tmp_path, name, key):
    account = skeleton(with_config(tmp_path, name, lambda values: values.pop(key)))[2]
    assert account.weights == skeleton(FOLDER / name)[2].weights


@pytest.mark.parametrize("name", sorted({"qwen3_5_moe-4bit", "gemma4_moe-4bit", "qwen3_moe-4bit", "deepseek_v3-4bit"}))
def test_fewer_layers_than_the_file_has_are_no_model(tmp_path, name):
    def fewer(values):
        values["num_hidden_layers"] -= 2
        values.pop("layer_types", None)

    with pytest.raises(CheckpointError, match=r"layers\.\d.*the model has no use for this tensor"):
        skeleton(with_config(tmp_path, name, fewer))


@pytest.mark.parametrize(
    ("name", "key", "value", "why"),
    [
        ("deepseek_v3-4bit", "n_group", 3, "3 groups cannot have the same number of 8 experts"),
        ("deepseek_v3-4bit", "topk_group", 1, "4 are more than the 2 experts of topk_group groups"),
        ("gemma4_e-4bit", "num_kv_shared_layers", 6, "no layer before the last 6 is of full_attention"),
    ],
)
def test_numbers_that_cannot_be_together_are_refused(tmp_path, name, key, value, why):
    with pytest.raises(CheckpointError, match=rf"config\.json: \w+: {why}"):
        skeleton(with_config(tmp_path, name, lambda values: values.update({key: value})))


def test_a_head_in_the_file_counts_where_only_the_outer_config_says_it_is_tied(tmp_path):
    """mlx-lm asks text_config alone, in which it is not."""

    def nested(values):
        text = {key: values.pop(key) for key in [*values] if key not in ("model_type", "quantization_config")}
        del text["tie_word_embeddings"]
        values.update(text_config=text, tie_word_embeddings=True)

    name = "qwen3_5_moe-4bit"
    ours, outer = skeleton(FOLDER / name)[2], skeleton(with_config(tmp_path, name, nested))[2]
    assert outer.weights == ours.weights and outer.read_per_token == ours.read_per_token


def test_unread_keys_are_logged_once(caplog):
    found = settings(hidden_size=1, use_cache=True, novelty=1, rope={"theta": 1.0, "twist": 2}, text_config={"deep": 1})
    found.size("hidden_size")
    found.section("rope").number("theta")
    with caplog.at_level(logging.INFO):
        found.log_unread()
    assert [record.getMessage().split(": ", 2)[2] for record in caplog.records] == [
        "novelty, rope.twist, text_config.deep"
    ]


def test_every_size_has_a_limit_a_model_can_reach():
    assert set(limits.SIZES.values()) <= {
        limits.LAYERS,
        limits.EXPERTS,
        limits.VOCABULARY,
        limits.HIDDEN,
        limits.CONTEXT,
    }
    assert all(math.log2(limit) < 31 for limit in limits.SIZES.values())
