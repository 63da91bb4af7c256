"""Conversion side by side with its two peers: what transformers saves becomes, bit for bit, what mlx-lm makes of it."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from inspect import signature
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers
from mlx.utils import tree_map
from mlx_lm import convert as mlx_convert
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import load_model as mlx_load
from safetensors.torch import load_file, save_file
from tiny_models import TINY

import halfbyte
from halfbyte.checkpoint import shards
from halfbyte.checkpoint.quantisation import Format
from halfbyte.conversion import convert, planning, saving
from halfbyte.conversion.hf_names import FAMILIES as HF_FAMILIES
from halfbyte.conversion.recipes import MIXED, Recipe
from halfbyte.engine import logits
from halfbyte.errors import CheckpointError
from halfbyte.loading import load_model
from halfbyte.models import MODELS
from halfbyte.ops.quant import Packed, dequantize, quantize

DATA = Path(__file__).parent / "data" / "models"
CLOSE = 2e-4  # of the logits' standard deviation
IDS = [(7 * i * i + 3 * i + 5) % 130 for i in range(20)]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "mlp_only_layers": []}
MORE = {
    "qwen3_5": {"num_hidden_layers": 4, "full_attention_interval": 4},
    "gemma4_moe": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_e": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
                 "num_kv_shared_layers": 2},
    "deepseek_v3": {"qk_nope_head_dim": 64, "v_head_dim": 64},
}  # fmt: skip
FAMILIES = list(TINY)
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Parallel regions of tiny work take longer than the work where other processes run too."""
    import numba

    mx.set_default_device(mx.cpu)
    threads = numba.get_num_threads(), torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    yield
    numba.set_num_threads(threads[0])
    torch.set_num_threads(threads[1])


def keys_of(family):
    return {**TINY[family], **SIZES, **MORE.get(family, {})}


def random_values(name, like, centred, generator):
    """No norm is 1 and no bias 0. Centred norms are such that 1 more of them is a bfloat16 too."""
    values = torch.randn(like.shape, generator=generator)
    if "norm" in name or name.endswith(("scalar", "scale")):
        return (values * 8).round() / 64 if centred and "linear_attn.norm" not in name else 1 + values / 5
    if name.endswith(("A_log", "dt_bias")):
        return values / 2
    if name.endswith("e_score_correction_bias"):
        return values.abs() / 2
    return values * (2 if "conv1d" in name else like.shape[-1]) ** -0.5 * 1.5


@cache
def original(family):
    """A model of transformers, random but for what positions need, and its logits in float32."""
    keys = keys_of(family)
    kind = keys.pop("model_type")
    kind += "_text" if kind.startswith("qwen3_5") else ""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **keys)).eval()
    generator, centred = torch.Generator().manual_seed(1), kind.startswith(("qwen3_5", "qwen3_next"))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not name.endswith(("inv_freq", "embed_scale")):
            tensor.data = random_values(name, tensor, centred, generator).bfloat16().float()
    with torch.no_grad():
        return model, model(torch.tensor([IDS])).logits[0].float()


def published(family, folder):
    """The tensors and config of a family as Hugging Face's hub has them."""
    model, _ = original(family)
    tensors = dict(model.state_dict())
    if family in ("qwen3_moe", "qwen3_next", "deepseek_v3"):  # whose experts are apart, in files
        model.save_pretrained(folder / "saved")
        tensors = load_file(folder / "saved" / "model.safetensors")
        shutil.rmtree(folder / "saved")
    if keys_of(family).get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    # mlx-lm casts A_log of qwen3_next alone, so there it is stored as what that gives.
    wide = ("e_score_correction_bias",) if family == "qwen3_next" else ("A_log", "e_score_correction_bias")
    tensors = {name: (t if name.endswith(wide) else t.bfloat16()).contiguous() for name, t in tensors.items()}
    config = {**keys_of(family), "torch_dtype": "bfloat16", "eos_token_id": 1, "_name_or_path": "somewhere"}
    if family.startswith("qwen3_5") or family == "gemma4_moe":
        tensors = {re.sub(r"^model\.", "model.language_model.", name): t for name, t in tensors.items()}
        more = (
            ("model.vision_tower.x", "model.embed_vision.x") if family == "gemma4_moe" else ("model.visual.x", "mtp.x")
        )
        tensors |= {name: torch.ones(3) for name in more}
        config = {
            "model_type": config["model_type"].removesuffix("_text"), "vocab_size": config["vocab_size"],
            "text_config": {**config, "dtype": "bfloat16"}, "vision_config": {"depth": 1},
        }  # fmt: skip
    return tensors, config


def write(folder, tensors, config, shards=2):
    """As the hub has them: several files, an index, a tokenizer, settings for generation, and code."""
    folder.mkdir(exist_ok=True)
    names, index = sorted(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    vocabulary = {f"t{i}": i for i in range(130)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    tokenizer |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "modeling_evil.py").write_text("raise SystemExit('code was run')")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a family as on the hub, made once."""

    @cache
    def make(family):
        folder = tmp_path_factory.mktemp(family)
        return write(folder, *published(family, folder))

    return make


@pytest.fixture(scope="module")
def dense(source, tmp_path_factory):
    """Our conversion of it, dense."""

    @cache
    def make(family):
        folder = tmp_path_factory.mktemp("dense") / family
        convert(source(family), folder)
        return folder

    return make


@pytest.fixture(scope="module")
def four_bits(source, tmp_path_factory):
    """mlx-lm's conversion of it to 4 bits."""

    @cache
    def make(family):
        return by_mlx_lm(source(family), tmp_path_factory.mktemp("mlx") / family, quantize=True)

    return make


def by_mlx_lm(source, folder, **options):
    mlx_convert(str(source), str(folder), **options)
    return folder


def tensors_of(folder):
    found = {}
    for path in folder.glob("model*.safetensors"):
        found |= load_file(path)
    return found


def same_files(ours, theirs):
    """Every tensor, bit for bit, and the config."""
    got, wanted = tensors_of(ours), tensors_of(theirs)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert config_of(ours) == config_of(theirs)
    index, their_index = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (ours, theirs))
    assert index["weight_map"] == their_index["weight_map"]
    assert index["metadata"]["total_size"] == their_index["metadata"]["total_size"]


def config_of(folder):
    """mlx-lm writes Qwen3.5's rope_type under its own name for it."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("text_config", config).get("rope_parameters", {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    return config


def mlx_logits(folder):
    model, _ = mlx_load(folder)
    model.update(tree_map(lambda p: p.astype(mx.float32) if p.dtype == mx.bfloat16 else p, model.parameters()))
    return torch.from_numpy(np.array(model(mx.array([IDS]))[0]))


def error(got, wanted):
    return float((got - wanted).abs().max() / wanted.std())


@every_family
def test_a_dense_conversion_runs_as_transformers_runs_the_original(family, dense):
    _, wanted = original(family)
    assert error(logits(load_model(dense(family)), IDS)[0], wanted) < CLOSE
    assert error(mlx_logits(dense(family)), wanted) < CLOSE


@every_family
def test_a_dense_conversion_is_that_of_mlx_lm(family, source, dense, tmp_path):
    same_files(dense(family), by_mlx_lm(source(family), tmp_path / "theirs"))


@every_family
def test_a_second_conversion_changes_nothing(family, dense, tmp_path):
    """An MLX checkpoint's norms and convolutions are what they should be already."""
    convert(dense(family), tmp_path / "again")
    same_files(tmp_path / "again", dense(family))


def test_every_model_has_a_family():
    assert HF_FAMILIES.keys() == MODELS.keys()
    assert {family.model_type for family in HF_FAMILIES.values()} <= MODELS.keys()


@every_family
def test_quantised_bits_are_those_of_mlx_lm(family, source, four_bits, tmp_path):
    convert(source(family), tmp_path / "ours", quantize=True)
    same_files(tmp_path / "ours", four_bits(family))
    assert error(logits(load_model(tmp_path / "ours"), IDS)[0], mlx_logits(tmp_path / "ours")) < CLOSE


FORMATS = {
    "2": {"q_bits": 2}, "3": {"q_bits": 3, "q_group_size": 32}, "5": {"q_bits": 5}, "6": {"q_bits": 6},
    "8": {"q_bits": 8, "q_group_size": 128}, "mxfp4": {"q_mode": "mxfp4"}, "nvfp4": {"q_mode": "nvfp4"},
    "mxfp8": {"q_mode": "mxfp8"}, "float16": {"dtype": "float16"}, "float32": {"dtype": "float32"},
    **{name: {"quant_predicate": name, "q_group_size": 64} for name in MIXED},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_that_of_mlx_lm(form, source, tmp_path):
    options = {"quantize": True, **FORMATS[form]}
    convert(source("qwen3_5_moe"), tmp_path / "ours", **options)
    same_files(tmp_path / "ours", by_mlx_lm(source("qwen3_5_moe"), tmp_path / "theirs", **options))


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("layers", [1, 7, 27, 61])
def test_a_mixture_gives_more_bits_to_the_layers_that_mlx_lm_chooses(name, layers):
    class Model:
        def __init__(self):
            self.layers = [None] * layers

        def named_modules(self):
            return [("model.layers.0.mlp.down_proj", None)]

    theirs = mixed_quant_predicate_builder(name, Model(), 64)
    ours = Recipe(Format(4, 64, "affine"), HF_FAMILIES["deepseek_v3"], layers, name)
    modules = ["self_attn.v_proj", "self_attn.kv_a_proj_with_mqa", "mlp.switch_mlp.down_proj", "mlp.gate_proj"]
    paths = [f"model.layers.{layer}.{module}" for layer in range(layers) for module in modules]
    for path in ("lm_head", "model.embed_tokens", *paths):
        format, listed = ours(path, (8, 128))
        assert listed == theirs(path, None) == {"group_size": 64, "bits": format.bits, "mode": "affine"}


MLX_SOURCES = ["qwen3_5_moe", "gemma4_moe", "deepseek_v3"]


@pytest.mark.parametrize("family", MLX_SOURCES)
def test_what_mlx_lm_wrote_is_dequantised_and_requantised_as_it_would(family, four_bits, tmp_path):
    """Routers, which have their format already, keep their codes."""
    convert(four_bits(family), tmp_path / "ours", dequantize=True)
    theirs = by_mlx_lm(four_bits(family), tmp_path / "theirs", dequantize=True)
    if family != "deepseek_v3":  # whose per-head projections mlx-lm forgets to dequantise
        same_files(tmp_path / "ours", theirs)
    convert(four_bits(family), tmp_path / "ours_six", quantize=True, q_bits=6)
    got, before = tensors_of(tmp_path / "ours_six"), tensors_of(four_bits(family))
    wanted = tensors_of(by_mlx_lm(tmp_path / "ours", tmp_path / "six", quantize=True, q_bits=6))
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        router = re.search(r"\.(gate|shared_expert_gate|router\.proj)\.(weight|scales|biases)$", name)
        assert torch.equal(got[name], before[name] if router else tensor), name
    assert config_of(tmp_path / "ours_six") == config_of(tmp_path / "six")


@every_family
def test_codes_are_copied_where_they_are_what_is_asked_for(family, four_bits, tmp_path):
    convert(four_bits(family), tmp_path / "copy")
    same_files(tmp_path / "copy", four_bits(family))
    convert(four_bits(family), tmp_path / "again", quantize=True)
    same_files(tmp_path / "again", four_bits(family))


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_fp_modes_are_dequantised_as_by_mlx_lm(mode, source, tmp_path):
    convert(source("qwen3"), tmp_path / "packed", quantize=True, q_mode=mode)
    convert(tmp_path / "packed", tmp_path / "ours", dequantize=True)
    same_files(tmp_path / "ours", by_mlx_lm(tmp_path / "packed", tmp_path / "theirs", dequantize=True))


def to_fp8(tensors, block):
    """Matrices of attention and experts as DeepSeek stores them: e4m3, and a float32 scale a block."""
    made = {}
    for name, w in tensors.items():
        if not re.search(r"(self_attn|mlp).*_(proj|mqa)\.weight$", name):
            made[name] = w
            continue
        rows, columns = (-(-n // b) for n, b in zip(w.shape, block, strict=True))
        padded = torch.nn.functional.pad(
            w.float(), (0, columns * block[1] - w.shape[1], 0, rows * block[0] - w.shape[0])
        )
        blocks = padded.unflatten(1, (columns, -1)).unflatten(0, (rows, -1))
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[: w.shape[0], : w.shape[1]]
        made[name], made[f"{name}_scale_inv"] = codes.to(torch.float8_e4m3fn).contiguous(), scales
    return made


@pytest.mark.parametrize("quantised", [False, True])
def test_fp8_blocks_are_those_of_mlx_lm(quantised, source, tmp_path):
    config = {**keys_of("deepseek_v3"), "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config |= {"auto_map": {"AutoModel": "modeling_evil.Model"}}
    fp8 = write(tmp_path / "fp8", to_fp8(tensors_of(source("deepseek_v3")), (128, 128)), config)
    convert(fp8, tmp_path / "ours", quantize=quantised)
    # mlx-lm knows fp8 by its tensors, and stumbles over the config.
    (fp8 / "config.json").write_text(json.dumps(keys_of("deepseek_v3")))
    same_files(tmp_path / "ours", by_mlx_lm(fp8, tmp_path / "theirs", quantize=quantised))


def test_fp8_blocks_of_any_size_and_family(source, tmp_path, monkeypatch):
    """Read in pieces that end inside blocks and inside experts."""
    block = (48, 32)
    tensors = tensors_of(source("qwen3_moe"))
    config = {**keys_of("qwen3_moe"), "quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    fp8 = to_fp8(tensors, block)
    monkeypatch.setattr(planning, "CHUNK", 128 * 37)
    convert(write(tmp_path / "fp8", fp8, config), tmp_path / "ours")
    got = tensors_of(tmp_path / "ours")

    def exact(name):
        w, scales = fp8[name].float(), fp8[f"{name}_scale_inv"]
        spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return (w * spread[: w.shape[0], : w.shape[1]]).bfloat16()

    name = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(got[name], exact(name))
    experts = [exact(f"model.layers.1.mlp.experts.{e}.up_proj.weight") for e in range(6)]
    assert torch.equal(got["model.layers.1.mlp.switch_mlp.up_proj.weight"], torch.stack(experts))


def test_joined_heads_keep_their_codes_or_are_split_exactly(tmp_path):
    """An older MLX checkpoint, with kv_b_proj; mlx-lm would quantise what it splits a second time."""
    old, name = DATA / "deepseek_v3-kv_b-4bit", "model.layers.1.self_attn.kv_b_proj"
    convert(old, tmp_path / "copy")
    before, after = tensors_of(old), tensors_of(tmp_path / "copy")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    convert(old, tmp_path / "dense", dequantize=True, dtype="float32")
    packed = Packed(*(before[f"{name}.{part}"] for part in ("weight", "scales", "biases")), 4, 64)
    heads = dequantize(packed).unflatten(0, (4, 128))
    dense = tensors_of(tmp_path / "dense")
    assert torch.equal(dense["model.layers.1.self_attn.embed_q.weight"], heads[:, :64].mT)
    assert torch.equal(dense["model.layers.1.self_attn.unembed_out.weight"], heads[:, 64:])
    with np.load(old / "golden.npz") as golden:
        wanted, prompt = torch.from_numpy(golden["prefill_logits_tail"]), golden["prompt"].tolist()
    assert error(logits(load_model(tmp_path / "dense"), prompt)[0][-len(wanted) :], wanted) < CLOSE
    assert error(logits(load_model(tmp_path / "copy"), prompt)[0][-len(wanted) :], wanted) < CLOSE


def test_nvfp4_with_a_scale_for_each_expert(source, tmp_path, monkeypatch):
    """Copied, or dequantised expert by expert; mlx-lm loads the copy."""
    convert(source("qwen3_moe"), tmp_path / "plain", quantize=True, q_mode="nvfp4")
    tensors, wanted = tensors_of(tmp_path / "plain"), {}
    originals = tensors_of(source("qwen3_moe"))
    for layer in range(2):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            path = f"model.layers.{layer}.mlp.switch_mlp.{projection}"
            each = [originals[f"model.layers.{layer}.mlp.experts.{e}.{projection}.weight"] for e in range(6)]
            w = torch.stack(each)
            packed = quantize(w, mode="nvfp4", global_scale=w.float().abs().amax((1, 2)))
            tensors |= {f"{path}.weight": packed.words, f"{path}.scales": packed.scales}
            tensors[f"{path}.global_scale"] = packed.global_scale
            wanted[f"{path}.weight"] = dequantize(packed, torch.bfloat16)
    scaled = write(tmp_path / "scaled", tensors, config_of(tmp_path / "plain"))
    monkeypatch.setattr(planning, "CHUNK", 128 * 64 * 2)
    convert(scaled, tmp_path / "copy")
    copied = tensors_of(tmp_path / "copy")
    assert copied.keys() == tensors.keys() and all(torch.equal(copied[name], tensors[name]) for name in copied)
    load_model(tmp_path / "copy")
    mlx_load(tmp_path / "copy")  # which multiplies with such weights on GPUs alone
    convert(scaled, tmp_path / "dense", dequantize=True)
    dense = tensors_of(tmp_path / "dense")
    assert all(torch.equal(dense[name], w) for name, w in wanted.items())


def test_experts_that_lie_apart_are_stacked_codes_as_they_are(four_bits, tmp_path):
    """As some MLX checkpoints have them, under either name."""
    stacked, apart = tensors_of(four_bits("qwen3_moe")), {}
    for name, tensor in stacked.items():
        if ".switch_mlp." in name:
            for expert, one in enumerate(tensor):
                named = name.replace("switch_mlp.", f"experts.{expert}.")
                apart[named.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2")] = (
                    one.clone()
                )
        else:
            apart[name] = tensor
    source = write(tmp_path / "source", apart, config_of(four_bits("qwen3_moe")))
    convert(source, tmp_path / "ours")
    same_files(tmp_path / "ours", four_bits("qwen3_moe"))


def test_weights_cut_into_pieces_are_the_same(source, four_bits, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "CHUNK", 128 * 5)
    convert(source("deepseek_v3"), tmp_path / "ours", quantize=True)
    same_files(tmp_path / "ours", four_bits("deepseek_v3"))


def test_several_files(source, four_bits, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SHARD_BYTES", 50_000)
    plan = convert(source("gemma4_e"), tmp_path / "ours", quantize=True)
    files = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 5 and list(plan.layout.files) == files
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(four_bits("gemma4_e"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())["weight_map"]
    for file in files:
        shard = shards.read(tmp_path / "ours" / file)
        assert {one.name for one in shard.tensors} == {name for name, at in index.items() if at == file}
        assert sum(one.size for one in shard.tensors) <= 50_000 or len(shard.tensors) == 1
        assert all(one.start % (64 if one.size % 64 == 0 else one.dtype.itemsize) == 0 for one in shard.tensors)
    assert error(logits(load_model(tmp_path / "ours"), IDS)[0], mlx_logits(tmp_path / "ours")) < CLOSE


def test_a_dry_run_says_what_becomes_what_and_writes_nothing(source, tmp_path):
    told = []
    plan = convert(source("qwen3_5_moe"), tmp_path / "ours", quantize=True, dry_run=True, progress=print)
    assert list(tmp_path.iterdir()) == []
    convert(source("qwen3_5_moe"), tmp_path / "ours", quantize=True, progress=lambda *at: told.append(at))
    written = tensors_of(tmp_path / "ours")
    assert plan.bytes_after == sum(t.nbytes for t in written.values()) == told[-1][0]
    assert told == sorted(told) and {total for _, total in told} == {plan.bytes_after}
    assert plan.need > sum(path.stat().st_size for path in (tmp_path / "ours").rglob("*"))
    assert plan.bytes_before == sum(t.nbytes for t in tensors_of(source("qwen3_5_moe")).values())
    assert plan.forms["8 bits in groups of 64"] == 4
    assert plan.original.left_out == {"vision": 1, "multi-token prediction": 1}
    lines = list(plan.lines())
    stack = "language_model.model.layers.*.mlp.switch_mlp.gate_proj [6, 64, 128] x 2: BF16 -> 4 bits in groups of 64"
    assert any(line.startswith(stack) for line in lines)
    assert any("mlp.gate [6, 128] x 2: BF16 -> 8 bits in groups of 64" in line for line in lines)
    assert f"{plan.bits_per_weight:.3f} bits per weight" in lines[-1]
    assert 4.5 < plan.bits_per_weight < 5


def test_what_is_copied_beside_the_weights(source, tmp_path):
    folder = shutil.copytree(source("qwen3"), tmp_path / "source")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("free")
    (folder / "pytorch_model.bin").write_text("pickle")
    convert(folder, tmp_path / "ours")
    assert {path.relative_to(tmp_path / "ours").as_posix() for path in (tmp_path / "ours").rglob("*.*")} == {
        "additional_chat_templates/tools.jinja", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (tmp_path / "ours" / "LICENSE").read_text() == "free"
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_configs_of_transformers_5(tmp_path):
    """It writes some keys under new names; the result has the old ones too, so mlx-lm loads it."""
    model, wanted = original("qwen3_moe")
    model.save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    assert "num_experts" not in config and "rope_theta" not in config
    convert(tmp_path / "source", tmp_path / "ours")
    assert error(mlx_logits(tmp_path / "ours"), wanted) < CLOSE


def test_text_alone_of_qwen3_5_becomes_what_mlx_lm_knows(tmp_path):
    model, wanted = original("qwen3_5")
    model.save_pretrained(tmp_path / "source")
    assert json.loads((tmp_path / "source" / "config.json").read_text())["model_type"] == "qwen3_5_text"
    convert(tmp_path / "source", tmp_path / "ours")
    assert error(mlx_logits(tmp_path / "ours"), wanted) < CLOSE


def test_what_must_not_be_cast_is_not(source, tmp_path):
    tensors, config = published("qwen3_next", tmp_path)
    name = "model.layers.0.linear_attn.A_log"
    tensors[name] = tensors[name].float() + 1e-5
    convert(write(tmp_path / "source", tensors, config), tmp_path / "ours", dtype="float16")
    got = tensors_of(tmp_path / "ours")
    assert torch.equal(got[name], tensors[name])
    assert got["model.layers.0.linear_attn.dt_bias"].dtype == torch.float16


def test_a_quantised_source_keeps_its_scales(source, tmp_path):
    """Whatever dtype its config names, which may be that of the original."""
    convert(source("qwen3"), tmp_path / "half", quantize=True, dtype="float16")
    assert config_of(tmp_path / "half")["torch_dtype"] == "bfloat16"
    convert(tmp_path / "half", tmp_path / "copy")
    same_files(tmp_path / "copy", tmp_path / "half")
    convert(tmp_path / "half", tmp_path / "dense", dequantize=True)
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "dense").values()} == {torch.float16}
    convert(tmp_path / "half", tmp_path / "cast", dtype="float32")
    cast, half = tensors_of(tmp_path / "cast"), tensors_of(tmp_path / "half")
    assert all(torch.equal(cast[name], t.float() if t.is_floating_point() else t) for name, t in half.items())


def test_a_predicate_of_ones_own(source, tmp_path):
    seen = []

    def predicate(path, shape):
        seen.append((path, shape))
        if path == "lm_head":
            return False
        return {"bits": 8, "group_size": 32} if path.endswith("v_proj") else True

    convert(source("qwen3_moe"), tmp_path / "ours", quantize=True, quant_predicate=predicate)
    got = tensors_of(tmp_path / "ours")
    assert ("model.layers.0.mlp.switch_mlp.up_proj", (6, 64, 128)) in seen
    assert got["lm_head.weight"].dtype == torch.bfloat16
    assert got["model.layers.1.self_attn.v_proj.weight"].shape == (64, 32)
    settings = config_of(tmp_path / "ours")["quantization"]
    assert settings["model.layers.1.self_attn.v_proj"] == {"bits": 8, "group_size": 32}
    assert error(logits(load_model(tmp_path / "ours"), IDS)[0], mlx_logits(tmp_path / "ours")) < CLOSE


def test_arguments_are_mlx_lms_in_its_order():
    """With its defaults; ours come after, by name."""
    ours, theirs = ([*signature(each).parameters.values()] for each in (halfbyte.convert, mlx_convert))
    both = list(zip(ours, theirs, strict=False))
    assert len(both) == len(theirs) and all((a.name, a.default) == (b.name, b.default) for a, b in both)
    assert all(one.kind is one.KEYWORD_ONLY for one in ours[len(theirs) :])


def test_a_script_of_mlx_lms_converts_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    halfbyte.convert("tiny", q_mode="affine", dequantize=True, trust_remote_code=True)
    with pytest.raises(ValueError, match="exists"):
        halfbyte.convert("tiny", "mlx_model", dequantize=True)
    halfbyte.convert(str(tmp_path / "mlx_model"), "eight", True, 64, 8)
    before, _ = halfbyte.load("tiny", device="cpu")
    after, tokenizer = halfbyte.load("eight", device="cpu")
    ids = tokenizer.encode("Once upon a time")
    assert error(logits(after, ids)[0], logits(before, ids)[0]) < 0.5
    assert json.loads((tmp_path / "eight" / "config.json").read_text())["quantization"]["bits"] == 8


def broken(change):
    """A small dense source with something wrong, by name of what is."""

    def make(folder, source):
        tensors, config = tensors_of(source("qwen3")), json.loads((source("qwen3") / "config.json").read_text())
        change(tensors, config)
        return write(folder, tensors, config)

    return make


def huge(tensors, config):
    tensors["model.norm.weight"] = torch.full((128,), 1e38, dtype=torch.bfloat16)


def with_nan(tensors, config):
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (with_nan, {"quantize": True}, "'layers.1.mlp.up_proj' has NaN or infinite values"),
        (with_nan, {}, "'layers.1.mlp.up_proj' has NaN or infinite values"),
        (huge, {"dtype": "float16"}, "'norm.weight' has NaN or infinite values, or such beyond float16"),
        (lambda t, c: t.update({"model.extra.weight": torch.ones(3)}), {}, "extra.weight': the model has no use for"),
        (lambda t, c: t.pop("model.layers.0.mlp.up_proj.weight"), {}, "layers.0.mlp.up_proj.weight': missing"),
        (lambda t, c: c.update(quantization_config={"quant_method": "awq"}), {}, "quant_method: one of fp8 was"),
        (lambda t, c: c.update(model_type="llama"), {}, "model_type: 'llama' is not supported"),
        (lambda t, c: c.update(model_file="evil.py"), {}, "model_file: it names Python code"),
        (lambda t, c: t.update({"lm_head.weight": t["model.embed_tokens.weight"].to(torch.float8_e4m3fn)}), {},
         "'lm_head.weight': fp8 is read as matrices with float scales"),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_converted(change, options, said, source, tmp_path):
    folder = broken(change)(tmp_path / "source", source)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        convert(folder, tmp_path / "ours", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantize": True, "dequantize": True}, "quantize and dequantize exclude each other"),
        ({"q_bits": 4}, "q_bits counts only with quantize"),
        ({"q_mode": "mxfp4"}, "q_mode counts only with quantize"),
        ({"q_mode": "nvfp4", "dequantize": True}, "q_mode counts only with quantize"),
        ({"upload_repo": "me/model"}, "upload_repo is not taken"),
        ({"quant_predicate": "mixed_2_6"}, "quant_predicate counts only with quantize"),
        ({"quantize": True, "q_bits": 7}, "bits"),
        ({"quantize": True, "q_group_size": 16}, "group"),
        ({"quantize": True, "q_mode": "int4"}, "q_mode must be one of affine, mxfp4, nvfp4, mxfp8, got 'int4'"),
        ({"quantize": True, "q_mode": "mxfp4", "q_bits": 8}, "mxfp4"),
        ({"quantize": True, "quant_predicate": "mixed_1_2"}, "quant_predicate must be one of mixed_2_6"),
        ({"quantize": True, "quant_predicate": "mixed_2_6", "q_mode": "mxfp4"}, "mixes affine formats"),
        ({"dtype": "int8"}, "dtype must be one of float16, bfloat16, float32, got 'int8'"),
    ],
)
def test_options_that_make_no_sense(options, said, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        convert(tmp_path / "nowhere", tmp_path / "ours", **options)
    assert list(tmp_path.iterdir()) == []


GROWTH = """
import sys
from pathlib import Path
from halfbyte import convert

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

warm, source, target = map(Path, sys.argv[1:])
convert(warm, target / "warm", quantize=True)  # compiles
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
before = status("VmRSS")
convert(source, target / "result", quantize=True)
print(status("VmHWM") - before)
"""


def test_memory_does_not_grow_with_the_model(source, tmp_path):
    """120 MB of weights, a third of them in one tensor, take less than 30 MB."""
    tensors, config = tensors_of(source("qwen3_moe")), keys_of("qwen3_moe")
    config |= {"num_experts": 32, "moe_intermediate_size": 5120, "num_hidden_layers": 1}
    tensors = {name: t for name, t in tensors.items() if "experts" not in name and "layers.1" not in name}
    stacks = {"gate_proj": (32, 5120, 128), "up_proj": (32, 5120, 128), "down_proj": (32, 128, 5120)}
    for name, shape in stacks.items():
        tensors[f"model.layers.0.mlp.switch_mlp.{name}.weight"] = torch.randn(shape[1:]).bfloat16().repeat(32, 1, 1)
    tensors["model.layers.0.mlp.gate.weight"] = torch.randn(32, 128).bfloat16()
    large = write(tmp_path / "large", tensors, config, shards=1)
    assert sum(t.nbytes for t in tensors.values()) > 120e6
    command = [sys.executable, "-c", GROWTH, source("qwen3"), large, tmp_path]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
    assert int(done.stdout) < 30e6
