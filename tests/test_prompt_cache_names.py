"""mlx-lm's names for prompt caches: made, gone on with, copied, trimmed where that is possible."""

import copy
import inspect
import json
import os
import subprocess
import sys

import mlx_lm.models.cache as theirs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_models import model_of

import halfbyte
from halfbyte import cache_file
from halfbyte.engine import logits
from halfbyte.errors import CheckpointError, NotEnoughMemory
from halfbyte.models import cache as ours

NAMES = [
    "make_prompt_cache", "save_prompt_cache", "load_prompt_cache", "can_trim_prompt_cache", "trim_prompt_cache",
]  # fmt: skip
TRIMMED = ["qwen3_moe-4bit", "deepseek_v3-4bit", "gemma4_e-4bit"]  # without recurrent states


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_mlx_lms(name):
    def said(module):
        return [(one.name, one.default) for one in inspect.signature(getattr(module, name)).parameters.values()]

    assert said(ours) == said(theirs)


def test_a_conversation_in_a_prompt_cache():
    model, tokenizer = halfbyte.load("tiny", device="cpu")
    kept = ours.make_prompt_cache(model)
    first = tokenizer.encode("Once upon a time")
    answers = list(halfbyte.stream_generate(model, tokenizer, first, 5, temperature=0, prompt_cache=kept))
    copied = copy.deepcopy(kept)
    made = [one.token for one in answers]
    more = tokenizer.encode(" and then")
    wanted = halfbyte.generate(model, tokenizer, [*first, *made, *more], max_tokens=8, temperature=0)
    for each in (copied, kept):
        assert wanted == halfbyte.generate(model, tokenizer, more, max_tokens=8, temperature=0, prompt_cache=each)
    assert kept.lengths[0] == len(first) + len(made) + len(more) + 8 and not ours.can_trim_prompt_cache(kept)
    before = kept.lengths[0]
    assert ours.trim_prompt_cache(kept, 3) == 0 and kept.lengths[0] == before


@pytest.mark.parametrize("name", TRIMMED)
def test_what_is_trimmed_was_never_there(name):
    model = model_of(name)
    kept = ours.make_prompt_cache(model)
    logits(model, [1, 2, 3, 4, 5], kept)
    assert ours.can_trim_prompt_cache(kept) and ours.trim_prompt_cache(kept, 2) == 2
    found, _ = logits(model, [9, 10, 11], kept)
    wanted, _ = logits(model, [1, 2, 3, 9, 10, 11])
    assert torch.equal(found, wanted[3:])
    assert ours.trim_prompt_cache(kept, 99) == 6 and kept.lengths[0] == 0
    assert torch.equal(logits(model, [1, 2, 3], kept)[0], wanted[:3])


def test_a_window_that_has_moved_on_is_not_trimmed():
    model = model_of("gemma4_e-4bit")
    kept = ours.make_prompt_cache(model)
    window = min(one.window for one in kept.kept if one.window is not None)
    logits(model, [5] * window, kept)
    assert not ours.can_trim_prompt_cache(kept) and ours.trim_prompt_cache(kept, 1) == 0


@pytest.mark.parametrize("name", [*TRIMMED, "qwen3_5_moe-4bit"])
@pytest.mark.parametrize("length", [0, 1, 40])
def test_a_saved_cache_goes_on_with_the_same_bits(name, length, tmp_path):
    model, ids = model_of(name), [7 * i % 101 for i in range(length)]
    kept = ours.make_prompt_cache(model)
    logits(model, ids, kept)
    ours.save_prompt_cache(str(tmp_path / "kept.safetensors"), kept, {"title": "ein Bär"})
    loaded, metadata = ours.load_prompt_cache(tmp_path / "kept.safetensors", return_metadata=True)
    assert metadata == {"title": "ein Bär"} and loaded.lengths[0] == length
    assert torch.equal(logits(model, [1, 2, 3], loaded)[0], logits(model, [1, 2, 3], kept)[0])


IN_ANOTHER_PROCESS = """
import sys
from halfbyte import load, generate
from halfbyte.models.cache import load_prompt_cache
model, tokenizer = load("tiny", device="cpu")
print(generate(model, tokenizer, [9, 10], max_tokens=8, temperature=0, prompt_cache=load_prompt_cache(sys.argv[1])))
"""


def test_a_saved_cache_in_another_process(tmp_path):
    model, tokenizer = halfbyte.load("tiny", device="cpu")
    kept = ours.make_prompt_cache(model)
    halfbyte.generate(model, tokenizer, "Once upon a time", max_tokens=4, temperature=0, prompt_cache=kept)
    ours.save_prompt_cache(tmp_path / "kept", kept)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, tmp_path / "kept"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == halfbyte.generate(model, tokenizer, [9, 10], max_tokens=8, temperature=0, prompt_cache=kept) + "\n"


def test_a_cache_of_another_model_is_refused():
    kept = ours.make_prompt_cache(model_of(TRIMMED[0]))
    with pytest.raises(ValueError, match="prompt_cache: another model made it"):
        halfbyte.generate(*halfbyte.load("tiny", device="cpu"), [1], prompt_cache=kept)


@pytest.fixture()
def saved(tmp_path):
    kept = ours.make_prompt_cache(model_of(TRIMMED[0]))
    logits(model_of(TRIMMED[0]), [1, 2, 3, 4], kept)
    ours.save_prompt_cache(tmp_path / "kept", kept)
    return tmp_path / "kept"


def refused(path, said=""):
    with pytest.raises(CheckpointError, match=said):
        ours.load_prompt_cache(path)


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_file_that_is_cut_off(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    refused(saved, "not a prompt cache")


def test_a_file_of_mlx_lms_and_none_at_all(tmp_path):
    save_file({"0.0": torch.zeros(2)}, tmp_path / "kept", {"1.0": "KVCache"})
    refused(tmp_path / "kept", "another program made it")
    refused(tmp_path / "nothing", "no such prompt cache")


def changed_about(**changes):
    return lambda said, tensors: said.update(cache=json.dumps({**json.loads(said["cache"]), **changes}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed_about(length=5), "layer 0 is damaged"),
        (changed_about(length=-1), "its length is damaged"),
        (changed_about(length=1 << 60), "its length is damaged"),
        (changed_about(chunk=0), "its chunk is damaged"),
        (changed_about(device="os"), "made on os, which is not here"),
        (changed_about(device=[]), "not a prompt cache"),
        (changed_about(dtype="int8"), "not a prompt cache"),
        (changed_about(kept=[]), "there is no layer for"),
        (changed_about(kept=[{"rows": {}, "fixed": {}, "window": "x"}]), "a window is damaged"),
        (changed_about(kept=7), "not a prompt cache"),
        (lambda said, tensors: said.update(cache="[" * 9999), "nests deeper"),
        (lambda said, tensors: said.pop("metadata"), "not a prompt cache"),
        (lambda said, tensors: said.update(metadata="[1]"), "not a prompt cache"),
        (lambda said, tensors: tensors.pop("layers.0.k"), "not a prompt cache"),
        (lambda said, tensors: tensors["layers.0.k"].fill_(torch.nan), "k of layer 0 has NaN"),
    ],
)
def test_a_damaged_file(saved, change, said):
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved)
    change(metadata, tensors)
    save_file(tensors, saved, metadata)
    refused(saved, said)


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    model = model_of("qwen3_moe-4bit")
    kept = model.new_cache(chunk=20_000)
    logits(model, [1, 2, 3], kept)
    ours.save_prompt_cache(tmp_path / "kept", kept, {"model": "a"})
    assert ours.load_prompt_cache(tmp_path / "kept", return_metadata=True)[1] == {"model": "a"}
    for wrong in ({"loss": float("nan")}, {1: "a"}, {"n": 10**30}, {"path": tmp_path}, {"none": None}):
        with pytest.raises(ValueError, match="metadata are texts by name"):
            ours.save_prompt_cache(tmp_path / "wrong", kept, wrong)
    with pytest.raises(TypeError, match="not a list"):
        ours.save_prompt_cache(tmp_path / "wrong", [kept])
    assert not (tmp_path / "wrong").exists()
    with pytest.raises(TypeError, match="one cache for all layers"):
        next(halfbyte.stream_generate(model, halfbyte.load("tiny", device="cpu")[1], [1], prompt_cache=[kept]))


def test_a_file_that_would_take_more_memory_than_there_is(tmp_path, monkeypatch):
    model = model_of("gemma4_e-4bit")
    kept = model.new_cache()
    logits(model, [1, 2, 3], kept)
    cache_file.save(tmp_path / "kept", model, kept, [1, 2, 3])
    monkeypatch.setattr("halfbyte.memory.available", lambda device: 1000)
    with pytest.raises(NotEnoughMemory, match=r"the prompt cache .* needs"):
        ours.load_prompt_cache(tmp_path / "kept")
    with pytest.raises(CheckpointError, match="another checkpoint"):  # before memory is asked for
        cache_file.load(tmp_path / "kept", model_of("qwen3_moe-4bit"))


def test_what_is_no_prompt_cache_is_nobodys_to_delete(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "notes").write_text("not a cache")
    save_file({"weight": torch.ones(2)}, tmp_path / "weights")
    for name, said in (("pipe", "a pipe or a device"), ("notes", "not a prompt cache"), ("weights", "another program")):
        with pytest.raises(CheckpointError, match=rf"{said}.*Name another file") as error:
            ours.load_prompt_cache(tmp_path / name)
        assert "elete" not in str(error.value)


def test_what_cannot_be_is_refused_by_name():
    model = model_of(TRIMMED[0])
    with pytest.raises(ValueError, match="max_kv_size is not taken"):
        ours.make_prompt_cache(model, max_kv_size=512)
    with pytest.raises(ValueError, match="num_tokens must be 0 or more"):
        ours.trim_prompt_cache(ours.make_prompt_cache(model), -1)
