"""Trained weights into the checkpoint that ships: an MLX folder, 4 bits a weight, 8 for the routers.

    python -m training.export WEIGHTS TOKENIZER TARGET

WEIGHTS is the folder that training wrote (weights-*.safetensors), TOKENIZER a tokenizer.json, TARGET a new folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path

import tokenizers
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from halfbyte import convert

from . import tokenizer
from .shape import GROUP, PREFIX, Shape, config

PIECE = 14 << 20  # bytes of a file of weights: small enough to travel


def save_weights(weights: dict[str, Tensor], shape: Shape, folder: Path) -> None:
    """float32 weights in files that say their shape: what training can go on from."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {"shape": json.dumps({field.name: getattr(shape, field.name) for field in fields(shape)})}
    pieces: list[dict[str, Tensor]] = [{}]
    for name, weight in weights.items():
        if sum(one.nbytes for one in pieces[-1].values()) + weight.nbytes > PIECE:
            pieces.append({})
        pieces[-1][name] = weight.detach().float().cpu().contiguous()
    for number, piece in enumerate(pieces, 1):
        save_file(piece, folder / f"weights-{number}.safetensors", metadata=said)


def load_weights(folder: Path) -> tuple[dict[str, Tensor], Shape]:
    paths = sorted(folder.glob("weights-*.safetensors"))
    if not paths:
        raise SystemExit(f"{folder} holds no weights-*.safetensors. Give the folder that training.train wrote.")
    with safe_open(paths[0], "pt") as file:
        shape = Shape(**json.loads(file.metadata()["shape"]))
    return {name: weight for path in paths for name, weight in load_file(path).items()}, shape


def export(weights: dict[str, Tensor], shape: Shape, tokens: Path, target: Path, *, dense: bool = False) -> None:
    """Write the model folder `target`, which must not exist yet. `dense` leaves the weights in bfloat16."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "bfloat16"
        folder.mkdir()
        stored = {
            PREFIX + name: weight.detach().to("cpu", torch.float32 if name.endswith("A_log") else torch.bfloat16)
            for name, weight in weights.items()
        }
        save_file(stored, folder / "model.safetensors", metadata={"format": "mlx"})
        write_text_side(folder, tokens, shape)
        if dense:
            shutil.copytree(folder, target)
        else:
            convert(folder, target, quantize=True, q_bits=4, q_group_size=GROUP)


def write_text_side(folder: Path, path: Path, shape: Shape) -> None:
    tokens = tokenizers.Tokenizer.from_file(str(path))
    if tokens.get_vocab_size() > shape.vocabulary:
        raise SystemExit(f"{path} has {tokens.get_vocab_size()} tokens, and the model {shape.vocabulary} embeddings.")
    tokenizer.write(folder, tokens)
    values = config(shape, [tokens.token_to_id(one) for one in (tokenizer.TURN_END, tokenizer.END_OF_TEXT)])
    (folder / "config.json").write_text(json.dumps(values, indent=4) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trained weights into the checkpoint that ships.")
    parser.add_argument("weights", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dense", action="store_true", help="leave the weights in bfloat16")
    options = parser.parse_args()
    weights, shape = load_weights(options.weights)
    export(weights, shape, options.tokenizer, options.target, dense=options.dense)


if __name__ == "__main__":
    main()
