"""Side by side with mlx-lm: tiny models that it builds, quantises, saves and runs, loaded by us.

In float32: mlx multiplies bfloat16 matrices inaccurately on a CPU.
"""

import copy
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.utils import _get_classes, quantize_model, save_config, save_model
from tiny_models import FORMATS, TINY

from halfbyte.engine import logits
from halfbyte.loading import load_model

CLOSE = 2e-4  # of the logits' standard deviation
IDS = [(7 * i * i + 3 * i + 5) % 130 for i in range(24)]


def build(config, seed=0):
    """A model of mlx-lm with every parameter drawn at random: no norm is 1, no bias 0."""
    config = copy.deepcopy(config)
    kind, arguments = _get_classes(config)
    model = kind(arguments.from_dict(config))
    draw = np.random.default_rng(seed)

    def random(name, old):
        values = draw.standard_normal(old.shape).astype(np.float32)
        if "norm" in name or name.endswith(("scalar", "scale")):
            return 1 + values / 5
        if name.endswith(("A_log", "dt_bias")):
            return values / 2
        if name.endswith("e_score_correction_bias"):
            return abs(values) / 2  # below 0, mlx-lm may choose an expert of a group that it has ruled out
        if name.endswith(".bias"):
            return values / 2
        return values * (old.shape[-1] if "conv1d" not in name else 2) ** -0.5 * 1.5

    named = [(name, mx.array(random(name, old))) for name, old in tree_flatten(model.parameters())]
    model.update(tree_unflatten(named))
    return model, config


def save(model, config, folder):
    model.update(tree_map(lambda p: p.astype(mx.bfloat16) if p.dtype == mx.float32 else p, model.parameters()))
    save_model(folder, model)
    save_config(config, folder / "config.json")


def mlx_logits(model, chunks):
    model.update(tree_map(lambda p: p.astype(mx.float32) if p.dtype == mx.bfloat16 else p, model.parameters()))
    made = model.make_cache() if hasattr(model, "make_cache") else None
    if made is None:
        from mlx_lm.models.cache import make_prompt_cache

        made = make_prompt_cache(model)
    return torch.from_numpy(np.concatenate([np.array(model(mx.array([ids]), cache=made)[0]) for ids in chunks]))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", TINY)
def test_what_mlx_lm_wrote_runs_the_same(name, form, tmp_path, monkeypatch):
    mx.set_default_device(mx.cpu)
    # Rows of an fp mode come out of mlx in bfloat16, which what follows would then be computed in.
    looked_up = nn.QuantizedEmbedding.__call__
    monkeypatch.setattr(nn.QuantizedEmbedding, "__call__", lambda self, x: looked_up(self, x).astype(mx.float32))
    model, config = build(TINY[name])
    model.update(tree_map(lambda p: p.astype(mx.bfloat16), model.parameters()))
    if FORMATS[form] is not None:
        bits, group, mode = FORMATS[form]
        predicate = getattr(model, "quant_predicate", None)
        model, config = quantize_model(model, config, group, bits, mode=mode, quant_predicate=grouped(predicate, group))
    assert_the_same(model, config, tmp_path)


def assert_the_same(model, config, folder):
    """A prompt and a few tokens: what mlx-lm computes, we compute from what it saves."""
    save(model, config, folder)
    wanted = mlx_logits(model, [IDS[:20], *([one] for one in IDS[20:])])
    ours = load_model(folder)
    first, kept = logits(ours, IDS[:20])
    got = torch.cat([first, *(logits(ours, [one], kept)[0] for one in IDS[20:])])
    assert float((got - wanted).abs().max() / wanted.std()) < CLOSE
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))


ABSENT = object()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# What configs may say beside what the tiny models have, and what it means where they say nothing.
SAID = {
    "a head in the file": ("deepseek_v3", {"tie_word_embeddings": True}),
    "one expert": ("deepseek_v3", {"num_experts_per_tok": 1}),
    "every other layer": ("deepseek_v3", {"moe_layer_freq": 2, "num_hidden_layers": 4}),
    "no experts": ("deepseek_v3", {"n_routed_experts": None}),
    "experts under a dense name": ("qwen3_5_moe", {"model_type": "qwen3_5"}),
    "experts in every layer": ("qwen3_5_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "no frequencies": ("qwen3_5", {"rope_parameters": ABSENT, "rope_theta": ABSENT}),
    "no norm_topk_prob": ("qwen3_next", {"norm_topk_prob": ABSENT}),
    "longer texts": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": ABSENT, "rope_scaling": YARN},
    ),
    "llama3": (
        "qwen3",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}},
    ),
    "dynamic": ("qwen3_next", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "rope_parameters first": ("qwen3_5", {"rope_scaling": YARN}),
    "traditional": ("gemma4_moe", {"rope_traditional": True}),
    "heads turn whole": (
        "gemma4_moe",
        {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor": 0.25},
    ),
    "no softcapping": ("gemma4_moe", {"final_logit_softcapping": None}),
    "as ever": (
        "gemma4_moe",
        dict.fromkeys(
            [
                "final_logit_softcapping",
                "global_head_dim",
                "num_global_key_value_heads",
                "sliding_window_pattern",
                "layer_types",
                "tie_word_embeddings",
            ],
            ABSENT,
        ),
    ),
    "as ever, E": ("gemma4_e", dict.fromkeys(["hidden_size_per_layer_input", "use_double_wide_mlp"], ABSENT)),
    "nothing said of no inputs": ("gemma4_moe", {"hidden_size_per_layer_input": None, "global_head_dim": None}),
    "biases, DeepSeek": ("deepseek_v3", {"attention_bias": True}),
    "biases, and no lower rank": ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}),
    "biases, Qwen3.5": ("qwen3_5_moe", {"attention_bias": True}),
    "biases, Qwen3-Next": ("qwen3_next", {"attention_bias": True}),
    "none of the experts": ("qwen3_moe", {"num_experts": 0}),
}


@pytest.mark.parametrize("case", SAID)
def test_keys_mean_what_they_mean_to_mlx_lm(case, tmp_path):
    mx.set_default_device(mx.cpu)
    name, changes = SAID[case]
    keys = {key: value for key, value in {**TINY[name], **changes}.items() if value is not ABSENT}
    assert_the_same(*build(keys), tmp_path)


def grouped(predicate, group):
    """The model's own predicate (routers in 8 bit), with groups that divide these tiny sizes."""
    if predicate is None:
        return None

    def chosen(path, module):
        answer = predicate(path, module)
        return {**answer, "group_size": group} if isinstance(answer, dict) else answer

    return chosen


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_text_model_under_its_own_name(name, tmp_path):
    """Conversions of the text part alone keep the inner model_type."""
    mx.set_default_device(mx.cpu)
    model, config = build(TINY[name])
    save(model, config, tmp_path)
    wanted, _ = logits(load_model(tmp_path), IDS)
    config["model_type"] += "_text"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(load_model(tmp_path), IDS)[0], wanted)
