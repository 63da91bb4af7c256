"""Models of the published shapes with random weights, made where they are to run: no files, no names to download."""

import math
import sys
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from real_models import REAL  # noqa: E402

from halfbyte import config as configs  # noqa: E402
from halfbyte.decoding import DecodeStep  # noqa: E402
from halfbyte.fusion import FUSIONS, fuse  # noqa: E402
from halfbyte.memory import allocate, shown_as  # noqa: E402
from halfbyte.models import MODELS  # noqa: E402
from halfbyte.ops.experts import Experts  # noqa: E402
from halfbyte.ops.quant import Packed  # noqa: E402

BITS, GROUP = 4, 64
EIGHT_BIT = ("gate", "shared_expert_gate", "router.proj")  # what mlx-lm quantises finer: whatever chooses experts
SPREAD = {4: 4.61, 8: 73.9}  # the standard deviation of uniform codes


def packed_memory(lead, K, bits, group, device):
    """Words, scales and biases of a packed weight, in memory as a loader takes it: large pages on a CPU."""
    rows = math.prod(lead)
    sizes = [rows * K * bits // 8] + [rows * (K // group) * 2] * 2
    words, *others = allocate(sum(sizes), torch.device(device)).split(sizes)
    scales, biases = (shown_as(one, torch.bfloat16, (*lead, K // group)) for one in others)
    return shown_as(words, torch.int32, (*lead, K * bits // 32)), scales, biases


class RandomWeights:
    """Answers what a checkpoint's Weights are asked, with random numbers; counts what it gave, by what it is for."""

    def __init__(self, device, prefix="", given=None):
        self.device, self.prefix = torch.device(device), prefix
        self.given = {"bytes": Counter(), "parameters": Counter()} if given is None else given

    def __truediv__(self, name):
        return RandomWeights(self.device, f"{self.prefix}{name}.", self.given)

    def __contains__(self, name):
        return False  # other ways of storing the same: q|k|v|z in one, kv_b_proj

    def skip(self, name):
        pass

    def shape(self, name):
        return None

    def tensor(self, name, *shape):
        full = f"{self.prefix}{name}"
        if name == "A_log":
            made = torch.rand(shape, device=self.device).mul_(15).add_(1).log_()
        elif name == "conv1d.weight":
            made = torch.randn(shape, device=self.device).mul_(0.5)
        elif len(shape) > 1:  # a dense matrix
            made = torch.randn(shape, device=self.device).mul_(shape[-1] ** -0.5)
        elif "bias" in name:
            made = torch.randn(shape, device=self.device).mul_(0.1)
        else:  # norms and scales
            made = torch.randn(shape, device=self.device).mul_(0.1).add_(1)
        made = made.bfloat16()
        self._count("dense", [made], math.prod(shape) if len(shape) > 1 else 0, full)
        return made

    def linear(self, name, N, K, lead=()):
        bits = 8 if f"{self.prefix}{name}".endswith(EIGHT_BIT) else BITS
        use = "tables" if name.startswith("embed_tokens") else "head" if name == "lm_head" else "dense"
        return self._packed((*lead, N, K), bits, use, name)

    def experts(self, name, E, I, H):  # noqa: E741
        return Experts(*(self._packed(shape, BITS, "experts", name) for shape in ((E, I, H), (E, I, H), (E, H, I))))

    def _packed(self, shape, bits, use, name):
        *lead, K = shape
        group = GROUP if K % GROUP == 0 else 32
        words, scales, biases = packed_memory(lead, K, bits, group, self.device)
        words.random_(-(2**31), 2**31)
        scales.uniform_(0.5, 1.5).mul_(1 / (SPREAD[bits] * math.sqrt(K)))
        torch.mul(scales, -(2**bits - 1) / 2, out=biases)
        self._count(use, [words, scales, biases], math.prod(shape), name)
        return Packed(words, scales, biases, bits, group)

    def _count(self, use, tensors, parameters, name):
        self.given["bytes"][use] += sum(t.nbytes for t in tensors)
        self.given["parameters"][use] += parameters


def config_of(name, layers=None):
    """The published config, with fewer layers where asked: then each kind of layer at least once, dense ones first."""
    values = {**REAL[name]}
    text = {**values.get("text_config", values)}
    if layers is not None and layers < text["num_hidden_layers"]:
        kinds = text.get("layer_types")
        if kinds is not None:
            every = list(dict.fromkeys(kinds))
            text["layer_types"] = every[:layers] if layers <= len(every) else kinds[:layers]
        if "first_k_dense_replace" in text:
            text["first_k_dense_replace"] = min(text["first_k_dense_replace"], max(1, layers // 4))
        text["num_hidden_layers"] = layers
    values = {**values, "text_config": text} if "text_config" in values else text
    return configs.from_dict(values, Path(name), set(MODELS))


def build(name, device, dtype=torch.bfloat16, layers=None):
    """(model, bytes and parameters by use)"""
    torch.manual_seed(0)
    config, weights = config_of(name, layers), RandomWeights(device)
    model = MODELS[config.model_type](config, weights)
    model.dtype = dtype
    given = weights.given
    if model.tied:  # the table is also the head, and read whole
        for counts in given.values():
            counts["head"] += counts.pop("tables")
    return model, given


def lay_together(model):
    """As a loader lays weights (checkpoint/neighbours.py); random ones come one by one."""
    step = DecodeStep(model, model.new_cache(1, 16), 1)
    step.bind([0], [1])
    step.launch()
    fuse(step.calls, without=FUSIONS.keys() - {"side_by_side"})


def fill(cache, length):
    """A cache as if texts of this length had been computed in every slot."""
    for layer in cache.layers:
        for tensor in layer.values():
            tensor.normal_()
    cache.lengths = [length] * cache.padding.stop


def step_bytes(model, given, streams, context, dtype=torch.bfloat16):
    """The fewest bytes that a decode step moves: every weight it needs once, every row it sees, every state twice."""
    chosen, E = model.experts_per_token, model.expert_count
    distinct = E * (1 - (1 - chosen / E) ** streams) if E else 0
    weights = given["bytes"]["dense"] + given["bytes"]["head"] + given["bytes"]["experts"] * distinct / max(E, 1)
    rows = fixed = 0
    for kept in model.kept:
        seen = context if kept.window is None else min(context, kept.window)
        rows += seen * sum(math.prod(row) for row in kept.rows.values()) * dtype.itemsize
        fixed += 2 * sum(math.prod(shape) * (own or dtype).itemsize for shape, own in kept.fixed.values())
    return weights + streams * (rows + fixed)


def prompt_flops(model, given, tokens):
    """Arithmetic of a prompt: its products with weights, and the pairs of tokens that attention looks at."""
    share = model.experts_per_token / max(model.expert_count, 1)
    flops = 2 * tokens * (given["parameters"]["dense"] + share * given["parameters"]["experts"])
    for layer in model.layers:
        mixer = getattr(layer, "mixer", None) or layer.attention
        window = min(layer.kept.window or tokens, tokens)
        pairs = tokens * window - window * (window - 1) / 2 if window < tokens else tokens * (tokens + 1) / 2
        if hasattr(mixer, "rank"):
            flops += 2 * pairs * mixer.heads * (2 * mixer.rank + mixer.turned)
        elif hasattr(mixer, "heads"):
            flops += 4 * pairs * mixer.heads * mixer.D
        else:
            flops += 2 * tokens * mixer.Hv * mixer.Dv * mixer.Dk * 3  # the recurrence, token by token
    return flops + 2 * given["parameters"]["head"]
