"""A prompt cache in a file that says all about itself, so that it is read without its model, as mlx-lm's are.

One safetensors file: the tensors of every layer, and in its metadata what the layers keep and whose states these are.
Whether the model that goes on from it is that one is checked then (`Decoder.owns`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import files, limits, strict_json
from ..cache import Cache, Kept, Snapshot, bytes_of
from ..errors import CheckpointError, shown
from ..memory import require
from .decoder import Decoder

VERSION = "prompt 1"
MOST_CHUNK = 1 << 13  # rings have room for one, whatever the file has of them
AGAIN = "Delete it and make it again."
OTHER = "Name another file."  # for this one may be somebody's
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(path: Path, cache: Cache, metadata: Mapping[str, str], slot: int = 0) -> None:
    """What a slot holds. The file appears whole or not at all."""
    from safetensors.torch import save

    if not isinstance(cache, Cache):
        raise TypeError("a prompt cache is what make_prompt_cache(model) gives: one for all layers, not a list")
    cache.require_whole(slot, "the prompt cache")
    for name, value in metadata.items():
        if not isinstance(name, str) or not isinstance(value, str):
            said = f"{shown(name)}: {shown(value)}"
            raise ValueError(f"metadata are texts by name, and {said} is none: json.dumps makes one")
    about = {
        "length": cache.lengths[slot], "chunk": min(cache.chunk, MOST_CHUNK),
        "device": cache.device.type, "dtype": NAMES[cache.dtype],
        "kept": [_described(one) for one in cache.kept],
    }  # fmt: skip
    layers = cache.snapshot(slot).layers
    tensors = {
        f"layers.{i}.{part}": t.cpu().contiguous() for i, layer in enumerate(layers) for part, t in layer.items()
    }
    said = {
        "version": VERSION,
        "model": cache.made_by,
        "cache": json.dumps(about),
        "metadata": json.dumps({**metadata}),
    }
    files.write_whole(path, save(tensors, said), "the prompt cache")


def read(path: Path, model: Decoder | None = None) -> tuple[Cache, dict[str, str]]:
    """A cache of one slot, and what was said with it. One that is not the model's is refused before it takes memory."""
    from safetensors import SafetensorError, safe_open

    if path.exists() and not path.is_file():
        refuse(path, "it is a folder" if path.is_dir() else "it is a pipe or a device", OTHER)
    try:
        with safe_open(path, "pt") as file:
            said = file.metadata() or {}
            if said.get("version") != VERSION:
                why = f"it has version {said.get('version')!r}, this program reads {VERSION!r}"
                refuse(path, why if "version" in said else "another program made it", OTHER)
            about, metadata = (_parsed(path, said.get(name, "")) for name in ("cache", "metadata"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        cache = _made(path, str(said.get("model")), about, tensors, model)
        return cache, {str(name): str(value) for name, value in metadata.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such prompt cache.") from None
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a prompt cache: {error}. {OTHER}") from None


def _described(one: Kept) -> dict[str, Any]:
    fixed = {name: [list(shape), dtype and NAMES[dtype]] for name, (shape, dtype) in one.fixed.items()}
    return {"rows": {name: list(row) for name, row in one.rows.items()}, "fixed": fixed, "window": one.window}


def _kept(said: Any) -> Kept:
    fixed = {name: (tuple(shape), dtype and DTYPES[dtype]) for name, (shape, dtype) in said["fixed"].items()}
    return Kept({name: tuple(row) for name, row in said["rows"].items()}, fixed, said["window"])


def _made(path: Path, made_by: str, about: Any, tensors: dict[str, Tensor], model: Decoder | None) -> Cache:
    """Nothing is allocated that the file does not have the tensors for, but room in rings for new tokens."""
    length, chunk, device = about["length"], about["chunk"], about["device"]
    for name, value, most in (("length", length, limits.CONTEXT), ("chunk", chunk, MOST_CHUNK)):
        if type(value) is not int or not (name == "chunk") <= value <= most:
            refuse(path, f"its {name} is damaged")
    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not here.get(device):
        refuse(path, f"it was made on {device}, which is not here")
    dtype, kept = DTYPES[about["dtype"]], [_kept(one) for one in about["kept"]]
    if model is not None and not model.made(made_by, dtype, device, kept):
        refuse(path, "it was made with another checkpoint, on another device, with another dtype or --cpu-activations")
    layers = []
    for index, one in enumerate(kept):
        if one.window is not None and not (type(one.window) is int and 0 < one.window <= limits.CONTEXT):
            refuse(path, "a window is damaged")
        rows = length if one.window is None else min(length, one.window)
        wanted = {name: ((rows, *row), dtype) for name, row in one.rows.items()}
        wanted |= {name: (shape, own or dtype) for name, (shape, own) in one.fixed.items()}
        layer = {name: tensors.pop(f"layers.{index}.{name}") for name in wanted}
        for name, tensor in layer.items():
            if (tuple(tensor.shape), tensor.dtype) != wanted[name]:
                refuse(path, f"{name} of layer {index} is damaged")
            if not bool(torch.isfinite(tensor).all()):
                refuse(path, f"{name} of layer {index} has NaN or infinite values")
        layers.append(layer)
    if tensors:
        refuse(path, f"there is no layer for {next(iter(tensors))!r}")
    capacity = length if device == "cpu" else -(-length // 16) * 16  # as Decoder.new_cache
    require(bytes_of(kept, 1, capacity, chunk, dtype), torch.device(device), f"the prompt cache {path}")
    cache = Cache(kept, 1, capacity, chunk=chunk, device=device, dtype=dtype)
    cache.made_by = made_by
    cache.restore(0, Snapshot(length, tuple({name: t.to(device) for name, t in one.items()} for one in layers)))
    return cache


def _parsed(path: Path, text: str) -> Any:
    where = f"{path}: not a prompt cache: its metadata"
    return strict_json.parse(text.encode("utf-8", "replace"), where, remedy=f" {AGAIN}", finite=True)


def refuse(path: Path, why: str, remedy: str = AGAIN) -> NoReturn:
    raise CheckpointError(f"{path}: the prompt cache cannot be used: {why}. {remedy}")
