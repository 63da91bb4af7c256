"""mlx-lm's names for prompt caches: made, gone on with, copied, trimmed where that is possible."""

import copy
import inspect

import mlx_lm.models.cache as theirs
import pytest
import torch
from test_models import model_of

import halfbyte
from halfbyte.engine import logits
from halfbyte.models import cache as ours

NAMES = ["make_prompt_cache", "can_trim_prompt_cache", "trim_prompt_cache"]
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
    more = [made[-1], *tokenizer.encode(" and then")]
    wanted = halfbyte.generate(model, tokenizer, [*first, *made[:-1], *more], max_tokens=8, temperature=0)
    for each in (copied, kept):
        assert wanted == halfbyte.generate(model, tokenizer, more, max_tokens=8, temperature=0, prompt_cache=each)
    assert kept.lengths[0] == len(first) + len(made) - 1 + len(more) + 7 and not ours.can_trim_prompt_cache(kept)
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


def test_what_cannot_be_is_refused_by_name():
    model = model_of(TRIMMED[0])
    with pytest.raises(ValueError, match="max_kv_size is not taken"):
        ours.make_prompt_cache(model, max_kv_size=512)
    with pytest.raises(ValueError, match="num_tokens must be 0 or more"):
        ours.trim_prompt_cache(ours.make_prompt_cache(model), -1)
