"""Checkpoints for tests: a small good one, and a writer of files that the safetensors package would never write."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from halfbyte import checkpoint
from halfbyte.checkpoint.folder import INDEX
from halfbyte.ops.quant import quantize

H, I, E, V = 64, 32, 12, 16  # noqa: E741
CONFIG = {
    "model_type": "toy",
    "hidden_size": H,
    "vocab_size": V,
    "num_hidden_layers": 1,
    "quantization": {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "model.layers.0.gate": {"bits": 8, "group_size": 32},
    },
}
EXPERTS = {"gate_proj": (E, I, H), "up_proj": (E, I, H), "down_proj": (E, H, I)}


def raw(path, header, data=b"", length=None):
    """A file of this header, an object or bytes, which claims to have `length` bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def parts(name, packed):
    found = {f"{name}.weight": packed.words, f"{name}.scales": packed.scales, f"{name}.biases": packed.biases}
    found[f"{name}.global_scale"] = packed.global_scale
    return {key: tensor for key, tensor in found.items() if tensor is not None}


def weight(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def tensors():
    """All tensors of the toy model, by stored name."""
    return {name: tensor.clone() for name, tensor in _tensors().items()}


@cache
def _tensors():
    found = {"model.norm.weight": weight(H), **parts("model.embed_tokens", quantize(weight(V, H)))}
    found |= parts("model.layers.0.gate", quantize(weight(E, H), 8, 32))
    for name, shape in EXPERTS.items():
        found |= parts(f"model.layers.0.mlp.switch_mlp.{name}", quantize(weight(*shape), 4, 32))
    return found


def save(folder, stored=None, config=None, file="model.safetensors"):
    """A folder with this in it. Without tensors and config, those of the toy model."""
    Path(folder).mkdir(exist_ok=True)
    save_file(tensors() if stored is None else stored, folder / file, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def save_index(folder, places):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


class Toy:
    """What a model does with weights."""

    def __init__(self, w):
        layer = w / "layers.0"
        self.norm = w.tensor("norm.weight", H)
        self.embed_tokens = w.linear("embed_tokens", V, H)
        self.gate = layer.linear("gate", E, H)
        self.experts = (layer / "mlp").experts("switch_mlp", E, I, H)


def skeleton(folder):
    """A checked skeleton of the toy model."""
    weights = checkpoint.open(folder, {"toy"}).weights("meta")
    Toy(weights)
    weights.finish(further=range(1, 2))
    return weights


def load(folder, **how):
    return Toy(skeleton(folder).load("cpu", **how))
