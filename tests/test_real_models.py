"""The real models at their real sizes, without their weights: headers over files that are holes.

mlx-lm names the tensors: it builds each model lazily, and nothing of it is ever computed.
"""

import copy
import json
import math
import struct

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, quantize_model
from real_models import REAL

from halfbyte.accounting import skeleton
from halfbyte.cli import main

KINDS = {mx.uint32: ("U32", 4), mx.bfloat16: ("BF16", 2), mx.float32: ("F32", 4), mx.uint8: ("U8", 1)}
SHARD = 5 << 30
KEPT_WIDE = ("A_log", "e_score_correction_bias")
# Left out by name: a vision tower, and what predicts further tokens.
EXTRA = {
    "qwen3_5": ["model.visual.patch_embed.proj.weight", "language_model.mtp.fc.weight"],
    "gemma4": ["vision_tower.patch_embedder.input_proj.weight", "embed_vision.embedding_projection.weight"],
    "deepseek": ["model.layers.61.eh_proj.weight"],
}
# 4-bit experts of all layers, and what a token reads: the numbers that models.md and the model cards give.
EXPERT_BYTES = {
    "Qwen3.5-35B-A3B": 40 * 256 * 1_769_472, "Qwen3.5-397B-A17B": 60 * 512 * 7_077_888,
    "gemma-4-26B-A4B": 30 * 128 * 3_345_408, "DeepSeek-V3": 58 * 256 * 24_772_608,
}  # fmt: skip
READ_GB = {"Qwen3.5-35B-A3B": (1.5, 1.8), "gemma-4-26B-A4B": (1.9, 2.3)}
BILLIONS = {
    "Qwen3.5-35B-A3B": 35, "Qwen3.5-397B-A17B": 397, "Qwen3-Next-80B-A3B": 80, "gemma-4-26B-A4B": 26,
    "DeepSeek-V3": 671, "Qwen3-30B-A3B": 30.5, "Qwen3-4B": 4.0, "gemma-4-31B": 31,
}  # fmt: skip


def write(config, folder):
    """What mlx-lm's conversion to 4 bits would write, as sparse files."""
    config = copy.deepcopy(config)
    kind, arguments = _get_classes(config)
    model = kind(arguments.from_dict(copy.deepcopy(config)))
    predicate = getattr(model, "quant_predicate", None)
    model, config = quantize_model(model, config, 64, 4, quant_predicate=predicate)
    tensors = [(name, tuple(t.shape), t.dtype) for name, t in tree_flatten(model.parameters())]
    extra = [name for family in EXTRA if config["model_type"].startswith(family) for name in EXTRA[family]]
    tensors += [(name, (64, 64), mx.bfloat16) for name in extra]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shards = [{}]
    for name, shape, dtype in tensors:
        form, width = KINDS[mx.bfloat16 if dtype == mx.float32 and not name.endswith(KEPT_WIDE) else dtype]
        start = max((entry["data_offsets"][1] for entry in shards[-1].values()), default=0)
        if start + width * math.prod(shape) > SHARD and start:
            shards, start = [*shards, {}], 0
        end = start + width * math.prod(shape)
        shards[-1][name] = {"dtype": form, "shape": shape, "data_offsets": [start, end]}
    for number, shard in enumerate(shards, 1):
        text = json.dumps({"__metadata__": {"format": "mlx"}, **shard}).encode()
        end = max(entry["data_offsets"][1] for entry in shard.values())
        with (folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)


@pytest.fixture(scope="module", params=REAL)
def real(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / request.param
    write(REAL[request.param], folder)
    return folder


def test_a_skeleton_builds_without_its_weights(real):
    name = real.name
    _, _, account = skeleton(real)
    if name in EXPERT_BYTES:
        assert account.experts == EXPERT_BYTES[name]
    if name in READ_GB:
        low, high = READ_GB[name]
        assert low < account.read_per_token / 1e9 < high
    if name in BILLIONS:
        assert account.parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.03)
    extra = [kind for kind in EXTRA if account.model_type.startswith(kind)]
    assert account.left_out == sum(64 * 64 * 2 * len(EXTRA[kind]) for kind in extra)


def test_info_and_plan(real, capsys):
    assert main(["info", str(real)]) == 0
    assert "4-bit affine, groups of 64" in capsys.readouterr().out
    assert main(["plan", str(real), "--device", "cpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tokens_per_second_at_most"] > plan["tokens_per_second_at_context"] > 0
