"""mlx-lm's own logits of tiny models, and how far ours are from them on a device.

python tests/model_goldens.py --device cuda               every model in float32 and in bfloat16
python tests/model_goldens.py --device cuda --streams 1 8    tokens by steps of so many texts, replayed and fused
"""

import argparse
import sys
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))

from halfbyte.decoding import DecodeStep
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


def replayed(model, name, streams):
    """As forced, of so many texts at a time, all the same: steps recorded, fused where the device fuses, replayed."""
    wanted = golden(name)
    prompt, tail, tokens = wanted["prompt"].tolist(), wanted["prefill_logits_tail"], wanted["decode_tokens"].tolist()
    texts = range(streams)
    kept = model.new_cache(streams, len(prompt) + len(tokens))
    parts = []
    for slot in texts:
        parts.append(model(kept.plan([(slot, prompt)], "all"), kept).float()[-len(tail) :])
        kept.advance([(slot, prompt)])
    step = DecodeStep(model, kept, streams)
    for token in tokens:
        step.bind(texts, [token] * streams)
        step.launch().tolist()
        parts.append(step.logits.to(torch.float32, copy=True))  # the next step writes over them
    expected = [tail] * streams + [row.expand(streams, -1) for row in wanted["decode_logits"]]
    return torch.cat(parts).cpu(), torch.cat(expected)


def problem(name, device, dtype, streams=0):
    """What is wrong with a model on a device, or nothing; its tokens by steps of so many streams, or one by one."""
    model = load_model(FOLDER / name, device, dtype)
    got, wanted = replayed(model, name, streams) if streams else forced(model, name)
    std = wanted.std()
    error = float((got - wanted).abs().max() / std)
    same = got.argmax(-1) == wanted.argmax(-1)
    best = wanted.topk(2).values
    clear = (best[:, 0] - best[:, 1]) > CLEAR * std
    share = float(same[clear].float().mean())
    how = f", {streams} streams" if streams else ""
    said = f"{name} {device} {dtype}{how}: error {error:.1e} std, {share:.1%} of {int(clear.sum())} clear argmaxes"
    right = (error < CLOSE and bool(same.all())) if dtype == "float32" else share >= KEPT
    print(said, "" if right else "WRONG", flush=True)
    return "" if right else said


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=NAMES, action="append", help="only this one (may be given several times)")
    parser.add_argument("--streams", type=int, nargs="+", default=[0], help="decode so many texts at a time, by replay")
    args = parser.parse_args()
    cases = product(args.model or NAMES, ("float32", "bfloat16"), args.streams)
    wrong = [problem(name, args.device, dtype, streams) for name, dtype, streams in cases]
    sys.exit(any(wrong))
