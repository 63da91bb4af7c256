"""A request's state in a file, to go on in another process with the same bits.

One safetensors file: the tensors of every layer, and in its metadata the version of this format, the ids of the text
and the fingerprint of the checkpoint. A file of another model, another version or another dtype is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from . import files, strict_json
from .cache import Cache, Snapshot
from .errors import CheckpointError
from .models.decoder import Decoder

VERSION = "1"
AGAIN = "Delete it and make it again."


def save(path: Path | str, model: Decoder, cache: Cache, ids: list[int], slot: int = 0) -> None:
    """Write what a slot holds; `ids` are its tokens. The file appears whole or not at all."""
    from safetensors.torch import save as to_bytes

    if len(ids) != cache.lengths[slot]:
        raise ValueError(f"{len(ids)} ids for a slot that holds {cache.lengths[slot]} tokens")
    snapshot = cache.snapshot(slot)
    tensors = {_name(i, part): t.cpu() for i, layer in enumerate(snapshot.layers) for part, t in layer.items()}
    metadata = {"version": VERSION, "model": model.made_by, "ids": json.dumps(ids)}
    files.write_whole(Path(path), to_bytes(tensors, metadata), "the prompt cache")


def load(path: Path | str, model: Decoder) -> tuple[Cache, list[int]]:
    """The cache of one slot that a file holds, and the ids of its text."""
    ids, tensors = _read(Path(path), model)
    cache = model.new_cache(1, len(ids))
    layers = []
    for index, (one, made) in enumerate(zip(cache.kept, cache.layers, strict=True)):
        layer = {}
        for name, room in made.items():
            tensor = tensors.pop(_name(index, name), None)
            rows = len(ids) if one.window is None else min(len(ids), one.window)
            wanted = (rows, *one.rows[name]) if name in one.rows else tuple(room.shape[1:])
            if tensor is None or tuple(tensor.shape) != wanted or tensor.dtype != room.dtype:
                _refuse(
                    path, f"layer {index} needs {name} as {room.dtype} {list(wanted)}, which the file does not have"
                )
            if not bool(torch.isfinite(tensor).all()):
                _refuse(path, f"{name} of layer {index} has NaN or infinite values")
            layer[name] = tensor.to(model.device)
        layers.append(layer)
    if tensors:
        _refuse(path, f"the model has no use for {next(iter(tensors))!r}")
    cache.restore(0, Snapshot(len(ids), tuple(layers)))
    return cache, ids


def _read(path: Path, model: Decoder) -> tuple[list[int], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            said = file.metadata() or {}
            if said.get("version") != VERSION:
                _refuse(path, f"it has version {said.get('version')!r}, this program reads {VERSION!r}")
            if said.get("model") != model.made_by:
                _refuse(path, "it was made with another checkpoint, or other --cpu-activations")
            text, where = said.get("ids", "null").encode(), f"{path}: not a prompt cache: its token ids"
            ids = strict_json.parse(text, where, remedy=f" {AGAIN}", finite=True)
            if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < model.vocabulary for id in ids):
                _refuse(path, "its token ids are damaged")
            return ids, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such prompt cache.") from None
    except (SafetensorError, ValueError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a prompt cache: {error}. {AGAIN}") from None


def _name(layer: int, part: str) -> str:
    return f"layers.{layer}.{part}"


def _refuse(path: Path | str, why: str) -> NoReturn:
    raise CheckpointError(f"{path}: the prompt cache does not fit: {why}. {AGAIN}")
