"""One token's experts, which choose themselves: route and expert_mlp in the two launches of the latter."""

import torch

from .exact import small
from .experts import ALONE
from .jobs import Choice
from .matvec import chosen_mlp
from .routing import WARP_EXPERTS
from .stacks import stack

WIDEST = 2048  # inputs: for more the programs of gate and up come in turns, and each turn would choose first


def takes(x, ids, experts):
    """Whether these experts are for this file: chosen by few, of one form, in a stack, in whole chunks.

    Small matrices are not: products with float32 are exact there (exact.py).
    """
    few = ids.numel() <= max(ALONE, experts.count // 2) and ids.is_contiguous() and x.stride(-1) == 1
    weights = (experts.gate, experts.up, experts.down)
    if not few or x.shape[-1] > WIDEST or any(isinstance(w, torch.Tensor) or hasattr(w, "addresses") for w in weights):
        return False
    (_, gate), (_, up), (_, down) = map(stack, weights)
    return gate == up and down.wide > 0 and not any(small(x, w) for w in weights)


def chooses(logits, weights, settings):
    """Whether one token's logits decide alone, have 16 bits, which leave room for an id in a key, and fit a warp."""
    alone = all(settings.get(name) is None for name in ("bias", "groups")) and settings.get("order", "score") == "score"
    rows, experts = logits.shape
    able = logits.dtype.itemsize == 2 and logits.stride(1) == 1 and weights.is_contiguous()
    return alone and able and rows == 1 and experts <= WARP_EXPERTS


def routed_experts(
    x, logits, k, experts, activation="silu", *, ids, kind="softmax", renormalise=True, per_expert_scale=None,
    scaling=1.0, out,
):  # fmt: skip
    """route(logits, k) and expert_mlp: gate and up choose, and so does down, which leaves ids and weights for others.

    x [1, H]   logits [1, experts]   ids [1, A]: one more than k where all tokens take the last expert
    out (y [1, A, H], weights [1, k])
    """
    y, weights = out
    choice = Choice(logits, k, weights, kind, renormalise, per_expert_scale, scaling)
    chosen_mlp(x, ids, experts, activation, y, choice=choice)
    return out
