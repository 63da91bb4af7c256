"""From a folder to weights: rows 13 to 21 and 25 of the fault plan, names, forms of experts, fingerprints."""

import json
import logging

import checkpoint_files as made
import pytest
import torch
from checkpoint_files import E, H, I, Toy, V, load, parts, quantize, save, save_index, skeleton, tensors, weight
from safetensors.torch import save_file

from halfbyte import checkpoint, limits
from halfbyte.checkpoint import names
from halfbyte.checkpoint.folder import INDEX
from halfbyte.errors import CheckpointError
from halfbyte.ops.formats import Packed
from halfbyte.ops.quant import dequantize

GATE = "model.layers.0.gate"
STACK = "model.layers.0.mlp.switch_mlp"


def config(**quantization):
    return {**made.CONFIG, "quantization": {**made.CONFIG["quantization"], **quantization}}


def same(a, b):
    if isinstance(a, Packed):
        return torch.equal(dequantize(a), dequantize(b)) and (a.bits, a.group, a.mode) == (b.bits, b.group, b.mode)
    return torch.equal(a, b)


def refused(folder, *said, **how):
    with pytest.raises(CheckpointError) as caught:
        load(folder, **how)
    assert str(folder) in str(caught.value)
    for text in said:
        assert text in str(caught.value)
    return str(caught.value)


def test_a_good_checkpoint(tmp_path):
    save(tmp_path)
    steps = []
    found = load(tmp_path, progress=lambda done, total: steps.append((done, total)))
    assert same(found.gate, quantize(weight(E, H), 8, 32))
    assert same(found.embed_tokens, quantize(weight(V, H)))
    assert same(found.experts.down, quantize(weight(E, H, I), 4, 32))
    assert torch.equal(found.norm, weight(H))
    total = sum(tensor.nbytes for tensor in tensors().values())
    assert steps == sorted(steps) and steps[-1] == (total, total) == (skeleton(tmp_path).size,) * 2


def test_weights_may_be_read_one_by_one(tmp_path):
    w = checkpoint.open(save(tmp_path)).weights("cpu")
    assert same(Toy(w).gate, load(tmp_path).gate)
    with pytest.raises(CheckpointError, match=r"'nothing\.weight': missing; \[4\] was expected"):
        w.tensor("nothing.weight", 4)


def test_views(tmp_path):
    w = checkpoint.open(save(tmp_path)).weights("meta")
    layer = w / "layers.0"
    assert "gate" in layer and "gate.scales" in layer and "layers" in w and "mlp" in layer
    assert "gat" not in layer and "v_proj" not in layer
    assert layer.shape("gate.weight") == (E, H // 4)
    assert layer.shape("gate") is None
    assert w.device.type == "meta"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", f"{GATE}.scales", f"{GATE}.biases", f"{STACK}.up_proj.scales"])
def test_row_13_not_finite(tmp_path, name, bad):
    stored = tensors()
    stored[name].view(-1)[-1] = bad
    save(tmp_path, stored)
    refused(tmp_path, repr(names.canonical(name)), "holds NaN or infinite values")
    load(tmp_path, check="none")


def test_row_13_experts_are_sampled(tmp_path):
    """Eight of a stack, with the first and the last; `check="all"` sees the others."""
    stored = tensors()
    stored[f"{STACK}.up_proj.biases"][2, 0, 0] = float("nan")
    save(tmp_path, stored)
    load(tmp_path)
    refused(tmp_path, "up_proj.biases", check="all")


@pytest.mark.parametrize(("mode", "code"), [("mxfp4", 255), ("mxfp8", 255), ("nvfp4", 0x7F), ("nvfp4", 0xFF)])
def test_row_13_scales_that_are_codes(tmp_path, mode, code):
    stored = tensors() | parts("model.embed_tokens", quantize(weight(V, H), mode=mode))
    del stored["model.embed_tokens.biases"]
    save(tmp_path, stored)
    assert same(load(tmp_path).embed_tokens, quantize(weight(V, H), mode=mode))
    stored["model.embed_tokens.scales"][3, 1] = code
    save(tmp_path, stored)
    refused(tmp_path, "'embed_tokens.scales' holds NaN")


def test_row_14_odd_scales_are_exact(tmp_path):
    """w = scale q + bias, as stored: zero groups, scales of -1e-7, negative scales."""
    codes = torch.arange(V * H).reshape(V, H) % 16
    words = (codes.reshape(V, -1, 8) << (4 * torch.arange(8))).sum(-1).to(torch.uint32)
    scales = torch.tensor([0.0, -1e-7, -0.5, 0.25]).repeat(V // 4)[:, None].contiguous()
    biases = torch.tensor([0.0, 0.0, 3.0, -1.0]).repeat(V // 4)[:, None].contiguous()
    stored = {
        f"model.embed_tokens.{part}": x
        for part, x in zip(("weight", "scales", "biases"), (words, scales, biases), strict=True)
    }
    save(tmp_path, tensors() | stored)
    assert torch.equal(dequantize(load(tmp_path).embed_tokens), scales * codes + biases)


@pytest.mark.parametrize(
    ("part", "dtype", "said"),
    [
        ("weight", torch.int32, ".weight is I32; beside .scales it must be U32"),
        ("scales", torch.float64, ".scales are F64; they must be BF16, F16 or F32 (affine), or U8 (fp modes)"),
        ("biases", torch.uint8, ".biases are U8; they must be BF16, F16 or F32"),
        ("scales", torch.uint8, ".scales are U8 (an fp mode), so there must be no .biases"),
    ],
)
def test_row_15_wrong_dtypes(tmp_path, part, dtype, said):
    stored = tensors()
    stored[f"{GATE}.{part}"] = torch.zeros(stored[f"{GATE}.{part}"].shape, dtype=dtype)
    refused(save(tmp_path, stored), "'layers.0.gate': ", said)


def test_row_15_a_norm_of_integers(tmp_path):
    save(tmp_path, {**tensors(), "model.norm.weight": torch.ones(H, dtype=torch.int64)})
    refused(tmp_path, "'norm.weight': I64; BF16, F16, F32 are read")


def test_row_16_mixed_scale_dtypes_are_promoted(tmp_path):
    stored = tensors()
    stored[f"{GATE}.scales"] = stored[f"{GATE}.scales"].half()
    found = load(save(tmp_path, stored)).gate
    assert found.scales.dtype == found.biases.dtype == torch.float32
    assert torch.equal(found.scales, stored[f"{GATE}.scales"].float())


def test_row_17_shapes_win_over_the_general_setting(tmp_path):
    save(tmp_path, config=config(bits=2, group_size=128, mode="mxfp4"))
    assert load(tmp_path).embed_tokens.bits == 4
    save(tmp_path, config={key: value for key, value in made.CONFIG.items() if key != "quantization"})
    assert load(tmp_path).gate.group == 32


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"bits": 4, "group_size": 32}, "its tensors have bits 8, the config says 4 for it"),
        ({"bits": 8, "group_size": 64}, "its tensors have group_size 32, the config says 64 for it"),
        (
            {"bits": 8, "group_size": 32, "mode": "mxfp8"},
            "its tensors have mode affine, the config says 'mxfp8' for it",
        ),
        (False, "the config says that it is not quantised, but it has .scales"),
    ],
)
@pytest.mark.parametrize("prefix", names.PREFIXES)
def test_row_17_an_override_must_agree(tmp_path, prefix, override, said):
    quantization = {"bits": 4, "group_size": 64, f"{prefix}layers.0.gate": override}
    save(tmp_path, config={**made.CONFIG, "quantization": quantization})
    refused(tmp_path, "'layers.0.gate': ", said)


def test_row_17_an_override_without_a_mode_is_affine(tmp_path):
    stored = tensors() | parts(GATE, quantize(weight(E, H), mode="mxfp8"))
    del stored[f"{GATE}.biases"]
    refused(save(tmp_path, stored), "its tensors have mode mxfp8, the config says 'affine' for it")
    override = {"bits": 8, "group_size": 32, "mode": "mxfp8"}
    assert load(save(tmp_path, stored, config=config(**{GATE: override}))).gate.mode == "mxfp8"


def test_row_17_an_override_of_what_is_dense(tmp_path):
    stored = {name: tensor for name, tensor in tensors().items() if not name.startswith(GATE)}
    stored[f"{GATE}.weight"] = weight(E, H)
    save(tmp_path, stored)
    refused(tmp_path, "'layers.0.gate': the config says that it is quantised, but it has no .scales")
    save(tmp_path, stored, config=config(**{GATE: False}))
    assert torch.equal(load(tmp_path).gate, weight(E, H))


@pytest.mark.parametrize(
    ("words", "groups", "said"),
    [
        (7 * H // 32, 2, "7 bits in groups of 32 is not affine quantisation"),
        (4 * H // 32, 4, "4 bits in groups of 16 is not affine quantisation"),
        (4 * H // 32, 3, "do not cut 64 inputs into equal groups"),
        (4 * H // 32 + 1, 1, "does not hold 64 codes of whole bits a row"),
        (4 * H // 32, 0, "do not cut 64 inputs"),
        (0, 1, "does not hold 64 codes"),
    ],
)
def test_row_18_formats_that_do_not_exist(tmp_path, words, groups, said):
    stored = tensors()
    stored["model.embed_tokens.weight"] = torch.zeros(V, words, dtype=torch.uint32)
    for part in ("scales", "biases"):
        stored[f"model.embed_tokens.{part}"] = torch.zeros(V, groups)
    refused(save(tmp_path, stored), "'embed_tokens': ", said)


def test_row_18_fp_modes_have_their_own_sizes(tmp_path):
    stored = tensors()
    del stored["model.embed_tokens.biases"]
    stored["model.embed_tokens.scales"] = torch.zeros(V, 1, dtype=torch.uint8)
    refused(
        save(tmp_path, stored),
        "4 bits in groups of 64 with U8 scales is no mode; there are nvfp4 (4 bits, groups of 16)",
    )


@pytest.mark.parametrize(
    ("shape", "said"), [((), None), ((1,), None), ((3,), "global_scale is F32 [3]; one F32 number a matrix")]
)
def test_row_18_global_scales(tmp_path, shape, said):
    packed = quantize(weight(V, H), mode="nvfp4", global_scale=2.0)
    stored = {name: tensor for name, tensor in tensors().items() if "embed_tokens" not in name}
    stored |= parts("model.embed_tokens", packed) | {"model.embed_tokens.global_scale": torch.full(shape, 2.0)}
    save(tmp_path, stored)
    if said:
        refused(tmp_path, said)
    else:
        assert same(load(tmp_path).embed_tokens, packed)


def test_row_19_missing_parts_are_listed_together(tmp_path):
    stored = tensors()
    for name in (f"{GATE}.scales", "model.embed_tokens.biases", "model.norm.weight", f"{STACK}.up_proj.weight"):
        del stored[name]
    stored["model.layers.0.surprise.weight"] = weight(H)
    said = refused(save(tmp_path, stored), "its tensors are not those of this model")
    assert "'norm.weight': missing; [64] was expected" in said and "`halfbyte pull --force`" in said.splitlines()[0]
    assert "'embed_tokens': it has .scales but no .biases, which the affine mode needs" in said
    assert "'layers.0.gate': the config says that it is quantised, but it has no .scales" in said
    assert "'layers.0.mlp.switch_mlp.up_proj.weight': missing; [12, 32, 64] was expected" in said
    assert "'layers.0.surprise.weight': the model has no use for this tensor" in said
    save(tmp_path, stored, config={**made.CONFIG, "quantization": {"bits": 4, "group_size": 64}})
    refused(tmp_path, "'layers.0.gate': .weight is U32, packed codes, but there are no .scales")


def test_row_19_biases_of_what_is_dense(tmp_path):
    stored = {name: tensor for name, tensor in tensors().items() if "embed_tokens" not in name}
    stored |= {"model.embed_tokens.weight": weight(V, H), "model.embed_tokens.biases": weight(V, 1)}
    refused(save(tmp_path, stored), "'embed_tokens': it has .biases but no .scales")


def test_row_19_ten_are_shown(tmp_path):
    stored = {**tensors(), **{f"model.stray.{i}": torch.zeros(1) for i in range(25)}}
    said = refused(save(tmp_path, stored))
    assert said.count("\n") == 11 and said.endswith("\n  and 15 more")


def test_shapes_are_those_of_the_config(tmp_path):
    save(tmp_path, {**tensors(), "model.norm.weight": weight(H + 1)})
    refused(tmp_path, "'norm.weight': shape [65]; the config makes it [64]")
    save(tmp_path, {**tensors(), **parts("model.embed_tokens", quantize(weight(V + 1, H)))})
    refused(tmp_path, "'embed_tokens': .weight [17, 8] and .scales [17, 1] must begin with [16]")


def halves(stored):
    """Two shards, by the order of names, and the index that says so."""
    ordered = sorted(stored)
    first, second = ordered[::2], ordered[1::2]
    files = {f"model-0000{n}-of-00002.safetensors": group for n, group in ((1, first), (2, second))}
    return files, {name: file for file, group in files.items() for name in group}


@pytest.fixture
def sharded(tmp_path):
    stored = tensors()
    files, index = halves(stored)
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for file, group in files.items():
        save_file({name: stored[name] for name in group}, tmp_path / file)
    save_index(tmp_path, index)
    return tmp_path


def test_row_20_shards(sharded):
    assert same(load(sharded).gate, quantize(weight(E, H), 8, 32))
    (sharded / INDEX).unlink()
    assert same(load(sharded).gate, quantize(weight(E, H), 8, 32))


@pytest.mark.parametrize("indexed", [True, False])
def test_row_20_missing_shard(sharded, indexed):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    if not indexed:
        (sharded / INDEX).unlink()
    refused(sharded, "model-00002-of-00002.safetensors: the shard is missing")


def test_row_20_a_wrong_index_does_no_harm_where_all_tensors_exist(sharded, caplog):
    names_of = json.loads((sharded / INDEX).read_text())["weight_map"]
    name = sorted(names_of)[0]
    for wrong in (
        {key: file for key, file in names_of.items() if key != name},
        {**names_of, name: "model-00002-of-00002.safetensors"},
        {**names_of, name: "model-00009-of-00009.safetensors"},
    ):
        save_index(sharded, wrong)
        with caplog.at_level(logging.INFO):
            load(sharded)
    assert caplog.text.count("1 tensors are in other shards than the index says") == 2


def test_row_20_a_tensor_that_only_the_index_has(sharded):
    names_of = json.loads((sharded / INDEX).read_text())["weight_map"]
    save_index(sharded, {**names_of, "model.more": "model-00001-of-00002.safetensors"})
    refused(sharded, "model-00001-of-00002.safetensors: tensor 'model.more' is missing, which the index puts there")


def test_row_20_a_tensor_in_two_shards(sharded):
    save_file({"language_model.model.norm.weight": weight(H)}, sharded / "model-extra.safetensors")
    refused(sharded, "tensor 'language_model.model.norm.weight' stands in model-0000", "too, as 'model.norm.weight'")


def test_row_20_no_shard_at_all(tmp_path):
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "there is no model*.safetensors in it. Give the folder")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "there is no model*.safetensors in it, but PyTorch's pickles, which are not read")


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}'])
def test_row_20_broken_index(sharded, index):
    (sharded / INDEX).write_text(index)
    refused(sharded, INDEX)


def test_row_20_too_large_an_index(sharded):
    with (sharded / INDEX).open("wb") as file:
        file.truncate(limits.INDEX_BYTES + 1)
    refused(sharded, "it has 67.1 MB, more than the 67.1 MB such a file may have")


@pytest.mark.parametrize(
    "file", ["../../etc/passwd", "../x.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "", "x.py"]
)
def test_row_21_paths_in_the_index(sharded, file):
    save_index(sharded, {"model.norm.weight": file})
    refused(sharded, "is no safetensors file of this folder. It is refused")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", INDEX])
def test_row_21_links_out_of_the_folder(tmp_path, file):
    folder = save(tmp_path / "model")
    save_index(folder, dict.fromkeys(tensors(), "model.safetensors"))
    (folder / file).rename(tmp_path / "elsewhere")
    (folder / file).symlink_to(tmp_path / "elsewhere")
    refused(folder, f"{file}: it links to ", "outside of the model folder")


def test_row_21_links_that_are_fine(tmp_path):
    """Snapshots of a Hugging Face cache link to its blobs; a folder may itself be a link."""
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    folder = save(cache / "snapshots" / "abc")
    for number, path in enumerate(folder.iterdir()):
        path.rename(cache / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    (tmp_path / "link").symlink_to(folder)
    assert same(load(tmp_path / "link").gate, load(folder).gate)


def test_row_21_not_a_file(tmp_path):
    folder = save(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    refused(folder, "not a regular file. Download it again")
    (folder / "model.safetensors").rmdir()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        checkpoint.open(folder)


def test_row_25_code_in_the_folder_is_never_run(tmp_path):
    for name in ("toy.py", "modeling_toy.py", "__init__.py", "conftest.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    load(save(tmp_path))
    assert not (tmp_path / "canary").exists()


def test_other_quantisations_are_named(tmp_path):
    plain = {key: value for key, value in made.CONFIG.items() if key != "quantization"}
    save(tmp_path, config={**plain, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    refused(tmp_path, "quantization_config: quant_method 'fp8' is not MLX's", "halfbyte convert")
    save(tmp_path, config={**plain, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    refused(tmp_path, "quant_method 'gptq' is not MLX's. Take an MLX conversion of it")
    save(tmp_path, config={**plain, "quantization_config": made.CONFIG["quantization"]})
    load(tmp_path)


@pytest.mark.parametrize("prefix", ["", *names.PREFIXES])
def test_prefixes_mean_nothing(tmp_path, prefix):
    stored = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors().items()}
    assert same(load(save(tmp_path, stored)).gate, quantize(weight(E, H), 8, 32))


def test_what_is_left_out_is_said_once(tmp_path, caplog):
    extra = ["vision_tower.blocks.0.weight", "model.visual.x", "embed_audio.weight", "language_model.mtp.norm.weight"]
    extra += ["model.layers.1.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    save(tmp_path, {**tensors(), **{name: torch.zeros(1) for name in extra}})
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    assert "left out: 1 of audio, 1 of rotary buffers, 2 of multi-token prediction, 2 of vision" in caplog.text


def test_a_model_may_skip_a_module(tmp_path):
    save(tmp_path, {**tensors(), "lm_head.weight": weight(V, H), "lm_head_of_more.weight": weight(1)})
    weights = checkpoint.open(tmp_path).weights("meta")
    Toy(weights)
    weights.skip("lm_head")
    with pytest.raises(CheckpointError, match=r"'lm_head_of_more\.weight': the model has no use") as caught:
        weights.finish()
    assert "'lm_head.weight'" not in str(caught.value)


def unstacked(aliases, quantised):
    stored = {name: tensor for name, tensor in tensors().items() if STACK not in name}
    for shape, alias in zip(made.EXPERTS.values(), aliases, strict=True):
        for expert, matrix in enumerate(weight(*shape)):
            path = f"model.layers.0.mlp.experts.{expert}.{alias}"
            stored |= parts(path, quantize(matrix, 4, 32)) if quantised else {f"{path}.weight": matrix.clone()}
    return stored


@pytest.mark.parametrize("aliases", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("how", ["read", "map"])
def test_experts_one_by_one_become_stacks(tmp_path, aliases, quantised, how):
    found = load(save(tmp_path, unstacked(aliases, quantised)), load=how).experts
    for name, got in zip(made.EXPERTS, (found.gate, found.up, found.down), strict=True):
        whole = weight(*made.EXPERTS[name])
        assert same(got, quantize(whole, 4, 32) if quantised else whole)


def test_experts_one_by_one_must_be_alike(tmp_path):
    stored = unstacked(("gate_proj", "up_proj", "down_proj"), True)
    del stored["model.layers.0.mlp.experts.5.up_proj.scales"]
    stored |= parts("model.layers.0.mlp.experts.7.gate_proj", quantize(weight(I, H), 8, 32))
    stored["model.layers.0.mlp.experts.11.down_proj.global_scale"] = torch.ones(1)
    said = refused(save(tmp_path, stored))
    assert "'layers.0.mlp.experts.0.down_proj.global_scale': missing, while other experts have it" in said
    assert "'layers.0.mlp.experts.5.up_proj.scales': missing, while other experts have it" in said
    assert "'layers.0.mlp.experts.7.gate_proj.weight': other in dtype or shape than that of the first expert" in said


@pytest.mark.parametrize("quantised", [True, False])
def test_gate_and_up_in_one(tmp_path, quantised):
    """As Hugging Face stores them: [E, 2 I, H], the gate first, and weights without `.weight`."""
    gate, up, down = (weight(*shape, seed=seed) for seed, shape in enumerate(made.EXPERTS.values()))
    stored = {name: tensor for name, tensor in tensors().items() if STACK not in name}
    for name, whole in {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}.items():
        path = f"model.layers.0.mlp.experts.{name}"
        stored |= parts(path, quantize(whole, 4, 32)) if quantised else {path: whole}
    found = load(save(tmp_path, stored)).experts
    for got, whole in ((found.gate, gate), (found.up, up), (found.down, down)):
        assert same(got, quantize(whole, 4, 32) if quantised else whole)


def test_fingerprint(tmp_path):
    """Of the config, of the shards' names, sizes and headers, and of some weights."""
    marks = [checkpoint.open(save(tmp_path)).fingerprint for _ in range(2)]
    marks.append(checkpoint.open(save(tmp_path, config={**made.CONFIG, "more": 1})).fingerprint)
    marks.append(checkpoint.open(save(tmp_path, {**tensors(), "z": torch.zeros(1)})).fingerprint)
    marks.append(
        checkpoint.open(save(tmp_path, file="model-extra.safetensors", stored={"y": torch.zeros(1)})).fingerprint
    )
    trained = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in tensors().items()}
    marks.append(checkpoint.open(save(tmp_path / "trained", trained)).fingerprint)
    assert len(set(marks)) == 5
    assert marks[0] == marks[1] and len(marks[0]) == 64
