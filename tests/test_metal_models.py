"""Whole tiny models through the Metal kernels: mlx-lm's own logits, prompt and steps."""

import pytest
import torch
from metal import executor
from model_goldens import CLOSE, FOLDER, NAMES, golden

from halfbyte.engine import logits
from halfbyte.loading import load_model
from halfbyte.ops.dispatch import trace, using

DEVICE = executor.install()
STEPS = 4


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_mlx_lm(name):
    model, wanted = load_model(FOLDER / name, DEVICE, "float32"), golden(name)
    tail, steps = wanted["prefill_logits_tail"], wanted["decode_tokens"][:STEPS]
    with using("metal"), trace() as entries:
        got, kept = logits(model, wanted["prompt"])
        rows = [got[-len(tail) :].cpu()]
        for token in steps:
            got, kept = logits(model, [int(token)], kept)
            rows.append(got.cpu())
    expected = torch.cat([tail, wanted["decode_logits"][:STEPS]])
    assert float((torch.cat(rows) - expected).abs().max() / expected.std()) < CLOSE
    assert {entry.language for entry in entries} == {"metal"}
