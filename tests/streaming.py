"""Models whose experts are elsewhere, for tests: budgets in slots, and the tokens that a model says."""

import errno
import os
from pathlib import Path

import checkpoint_files as made
import torch
from safetensors.torch import load_file, save_file

from halfbyte import checkpoint as checkpoints
from halfbyte import hub
from halfbyte.accounting import skeleton
from halfbyte.device_experts import DeviceResidency
from halfbyte.engine import Engine, Request, logits
from halfbyte.expert_shares import plan
from halfbyte.host_experts import in_host_memory
from halfbyte.models import MODELS
from halfbyte.ops.quant import Packed, dequantize, quantize
from halfbyte.sampling import SamplingParams
from halfbyte.tiered_experts import TieredResidency

CPU = torch.device("cpu")
TINY = Path(hub.locate("tiny"))
PROMPT = [5, 9, 100, 7, 33, 4, 61, 62, 63, 5, 9, 12]
GREEDY = SamplingParams(temperature=0.0)


def mixtures_of(folder):
    return list(skeleton(folder)[1].mixtures.values())


def budget_of(folder, slots):
    """Bytes of so many slots of each form."""
    mixtures = mixtures_of(folder)
    return sum(slots * share.expert_bytes for share in plan(mixtures, 1 << 40, 1))


def beside(folder, slots):
    """The model of a folder with its experts in host memory and so many slots a layer; a CPU stands in for both."""

    def residency(ledger, made):
        hosts, areas = in_host_memory(ledger)
        return DeviceResidency(hosts, [slots] * len(hosts), CPU, areas)

    return lent(folder, residency)


def tiered(folder, slots, held, policy="lfu", **more):
    """The same with experts on disk: so many slots a layer on a device, so many of each form in host memory."""

    def residency(ledger, made):
        counts = [slots] * len(ledger.mixtures)
        return TieredResidency(ledger, budget_of(folder, held), counts, CPU, made.experts_per_token, policy, **more)

    return lent(folder, residency)


def lent(folder, residency):
    """The model of a folder whose experts are those of residency(ledger, skeleton)."""
    checkpoint = checkpoints.open(folder, set(MODELS))
    build, empty = MODELS[checkpoint.config.model_type], checkpoint.weights("meta")
    skeleton = build(checkpoint.config, empty)
    empty.finish(skeleton.further_layers)
    found = residency(empty.ledger, skeleton)
    model = build(checkpoint.config, empty.load(CPU, lenders=found.lenders))
    model.residency = found
    found.foresee(model.layers)
    return model


def share_a_scale(folder, scales):
    """Turn the down projections of these layers of the embedded model to nvfp4, with one number for all experts."""
    stored = load_file(shard(folder))
    for layer, scale in scales.items():
        name = f"language_model.model.layers.{layer}.mlp.switch_mlp.down_proj"
        words, old, biases = (stored.pop(f"{name}.{part}") for part in ("weight", "scales", "biases"))
        weight = dequantize(Packed(words, old, biases, 4, 64), torch.bfloat16)
        stored |= made.parts(name, quantize(weight, mode="nvfp4", global_scale=torch.tensor(scale)))
    save_file(stored, shard(folder), metadata={"format": "mlx"})


def tokens(model, count=12):
    request = Request(list(PROMPT), count, GREEDY)
    engine = Engine(model, model.new_cache(1, len(PROMPT) + count))
    engine.submit(request)
    while engine.busy:
        engine.step()
    return request.made


def assert_the_same_logits(model, whole):
    """Bit for bit: of a prompt, then of single tokens."""
    ids = [id % whole.vocabulary for id in PROMPT]
    (expected, cache), (found, kept) = logits(whole, ids), logits(model, ids)
    assert torch.equal(found, expected)
    for id in ids[:3]:
        assert torch.equal(logits(model, [id], kept)[0], logits(whole, [id], cache)[0])


def failing_after(count, real=os.preadv):
    """An os.preadv that fails after so many reads, and leaves zeros."""
    left = iter(range(count))

    def fail(fd, views, at):
        if next(left, None) is not None:
            return real(fd, views, at)
        views[0][:] = bytes(len(views[0]))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    return fail


def shard(folder):
    return folder / "model.safetensors"
