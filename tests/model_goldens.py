"""mlx-lm's own logits of tiny models, and how far ours are from them on a device.

python tests/model_goldens.py --device cuda      every model in float32 and in bfloat16
"""

import argparse
import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))

from halfbyte.engine import logits
from halfbyte.loading import load_model

FOLDER = Path(__file__).parent / "data" / "models"
NAMES = sorted(path.name for path in FOLDER.iterdir())
CLOSE = 2e-4  # largest error of float32, in standard deviations of the logits
CLEAR = 0.1  # a largest logit this far above the next, in the same unit, must stay the largest in 16 bits
KEPT = 0.99  # of those


@cache
def golden(name):
    with np.load(FOLDER / name / "golden.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def forced(model, name):
    """Our logits and mlx-lm's where mlx-lm's own tokens are given: the end of the prompt, then token by token."""
    wanted = golden(name)
    tail = wanted["prefill_logits_tail"]
    rows, kept = logits(model, wanted["prompt"])
    steps = [logits(model, [int(token)], kept)[0] for token in wanted["decode_tokens"]]
    return torch.cat([rows[-len(tail) :], *steps]).cpu(), torch.cat([tail, wanted["decode_logits"]])


def problem(name, device, dtype):
    """What is wrong with a model on a device, or nothing."""
    got, wanted = forced(load_model(FOLDER / name, device, dtype), name)
    std = wanted.std()
    error = float((got - wanted).abs().max() / std)
    same = got.argmax(-1) == wanted.argmax(-1)
    best = wanted.topk(2).values
    clear = (best[:, 0] - best[:, 1]) > CLEAR * std
    share = float(same[clear].float().mean())
    said = f"{name} {device} {dtype}: error {error:.1e} std, {share:.1%} of {int(clear.sum())} clear argmaxes"
    right = (error < CLOSE and bool(same.all())) if dtype == "float32" else share >= KEPT
    print(said, "" if right else "WRONG", flush=True)
    return "" if right else said


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=NAMES, action="append", help="only this one (may be given several times)")
    args = parser.parse_args()
    wrong = [problem(name, args.device, dtype) for name in args.model or NAMES for dtype in ("float32", "bfloat16")]
    sys.exit(any(wrong))
