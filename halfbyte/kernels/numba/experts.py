"""Experts on a CPU: the pairs (token, choice) sorted by expert, then one run of products.py over all of them.

One token and many take the same way: an expert's weights stream by once, for all the rows that chose it.
"""

from functools import lru_cache

import numpy as np

from .products import Activations, format_of, multiply
from .quant import NV_RANGE, matrices
from .rowwise import ACTIVATION, glu_kernel
from .views import destination, finish, floats


class Choices:
    """The jobs that ids [T, A] make: which experts, and which rows each of them gets."""

    def __init__(self, ids, shared):
        flat, A = ids.numpy().reshape(-1), ids.shape[1]
        if flat.size == A:  # one token: a job for each choice
            self.experts, (self.pairs, self.first, zeros) = flat, one_token(A)
            self.x_rows = zeros if shared else self.pairs
            return
        self.pairs = np.argsort(flat, kind="stable")
        self.experts, starts = np.unique(flat[self.pairs], return_index=True)
        self.first = np.append(starts, flat.size)
        self.x_rows = self.pairs // A if shared else self.pairs


@lru_cache(maxsize=64)
def one_token(A):
    return np.arange(A), np.arange(A + 1), np.zeros(A, np.int64)


def expert_addresses(w):
    """int64 [3, E] of words, scales and biases, and what must stay alive while they are used."""
    if hasattr(w, "addresses"):
        return w.addresses.numpy(), w
    found = matrices(w)
    return found.addresses, found


def project(choices, w, activations, x_rows, y):
    """y[pair] = w[expert of the pair] x; y is a float32 array [pairs, N]."""
    addresses, kept = expert_addresses(w)
    chosen = addresses.take(choices.experts, 1)
    multiply(activations, chosen, choices.first, x_rows, choices.pairs, y.reshape(-1), w.shape[1])
    del kept
    scale = getattr(w, "global_scale", None)
    if scale is not None:
        each = np.repeat(scale.reshape(-1).numpy(), w.shape[0]) if scale.numel() == 1 else scale.numpy()
        counts = np.diff(choices.first)
        y[choices.pairs] *= (np.repeat(each[choices.experts], counts) / np.float32(NV_RANGE))[:, None]


def expert_qmm(x, ids, w, *, out=None):
    y = destination((*ids.shape, w.shape[1]), out)
    if y.numel():
        choices, activations = Choices(ids, x.ndim == 2), Activations(format_of(w), floats(x), x.shape[-1])
        project(choices, w, activations, choices.x_rows, y.numpy().reshape(-1, w.shape[1]))
    return finish(y, x.dtype, out)


def expert_mlp(x, ids, experts, activation="silu", *, out=None):
    inner, hidden = experts.down.shape[2], experts.down.shape[1]
    y = destination((*ids.shape, hidden), out)
    if not y.numel():
        return finish(y, x.dtype, out)
    choices, source, ready = Choices(ids, x.ndim == 2), floats(x), {}
    gate, up = np.empty((2, ids.numel(), inner), np.float32)
    for w, result in ((experts.gate, gate), (experts.up, up)):
        form = format_of(w)
        if form not in ready:
            ready[form] = Activations(form, source, hidden)
        project(choices, w, ready[form], choices.x_rows, result)
    gate, up = gate.reshape(-1), up.reshape(-1)
    glu_kernel(gate.ctypes.data, up.ctypes.data, ACTIVATION[activation], gate.ctypes.data, gate.size)
    between = Activations(format_of(experts.down), gate, inner)
    project(choices, experts.down, between, choices.pairs, y.numpy().reshape(-1, hidden))
    return finish(y, x.dtype, out)
