"""Projections of few rows together with what stands around them: the norm before, the sum behind (stream.py)."""

import torch

from . import matvec
from .device import INTERPRETED
from .exact import small
from .experts import ALONE
from .quant import FEW
from .stream import Stream


def weighs(dtype):
    """Before it is divided, a row may be too large for float16; the interpreter's bfloat16 is none."""
    return dtype != torch.float16 or INTERPRETED


def takes(x, w):
    """Whether a projection of x is for this file: few rows by one matrix.

    Small matrices are not: products with float32 are exact there (exact.py).
    """
    return x.ndim == 2 and x.shape[0] <= FEW and x.stride(-1) == 1 and len(w.shape) == 2 and not small(x, w)


def takes_experts(x, ids, experts):
    """As `takes`, of chosen experts, for calls that matvec.chosen_mlp does."""
    few = x.ndim == 2 and ids.numel() <= ALONE and x.stride(-1) == 1
    return few and not any(small(x, w) for w in (experts.gate, experts.up))


def outputs_together(x, w):
    """How many outputs a program of qmm_onto_stream makes at a time: it adds up their squares."""
    return matvec.outputs_together(x, w)


def normed_qmm(x, w, *, norm, out):
    """qmm of the norm of x, of which `norm` (stream.Norm) is left to do.   x [M, K]   w [N, K]   out [M, N]"""
    matvec.multiply(x[:, None], None, w, out[:, None], norm=norm)
    return out


def qmm_onto_stream(x, w, h, *, out, keep=None):
    """h + qmm(x, w)   x [M, K]   w [N, K]   h, out [M, N]   `keep` (weight, weighted, squares): see stream.Stream"""
    matvec.multiply(x[:, None], None, w, out[:, None], stream=Stream(h, *(keep or ())))
    return out


def normed_expert_mlp(x, ids, experts, activation="silu", *, norm, out):
    """expert_mlp of the norm of x, of which `norm` (stream.Norm) is left to do."""
    return matvec.chosen_mlp(x, ids, experts, activation, out, norm)
