"""Experts on a CPU: the pairs (token, choice) sorted by expert, then one run of products.py over all of them.

One token and many take the same way: an expert's weights stream by once, for all the rows that chose it. For a few
tokens the whole MLP is one call. With many experts, some of them chosen by several tokens, each is one thread's from
gate to down, and what lies between stays in that core's cache; else gates and ups are one parallel region and downs
another, as they are where activations are no whole numbers.
"""

from functools import lru_cache

import numpy as np
from numba import prange

from .compiled import allocating, alone, inner, kernel, looks_at_values
from .lanes import compiled_once, floats_in_lines, threads
from .plane_products import FEW as ROWS_APART
from .plane_products import prepare_planes, room_for_tiles, tiles_of_jobs
from .plane_tiles import TILE
from .products import Activations, format_of, multiply, prepare_rows, run_products
from .quant import NV_RANGE, matrices
from .rowwise import ACTIVATION, glu_kernel, glu_span
from .views import destination, finish, floats

EXACT = 1 << 13  # weights of a projection: a single product is exact up to four times that (products.py)
FEW = 1 << 20  # numbers of all pairs: more are a prompt's, whose activations are prepared by all threads
EVEN = 8  # experts of each thread that make even shares
UNPACKING = 6  # pairs that take as long as unpacking their expert


class Choices:
    """The jobs that ids [T, A] make: which experts, and which rows each of them gets."""

    def __init__(self, ids, shared):
        flat, A = ids.numpy().reshape(-1), ids.shape[1]
        if flat.size == A:  # one token: a job for each choice
            self.experts, (self.pairs, self.first, zeros) = flat, one_token(A)
            self.x_rows = zeros if shared else self.pairs
            return
        looks_at_values()
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
    looks_at_values()
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


@allocating
def sorted_pairs(flat, E):
    """The experts of `flat` (pairs' choices) in order, where each one's pairs begin, and the pairs in that order."""
    counts, jobs = np.zeros(E, np.int64), 0
    for expert in flat:
        jobs += 1 if counts[expert] == 0 else 0
        counts[expert] += 1
    experts, first, pairs = np.empty(jobs, np.int64), np.empty(jobs + 1, np.int64), np.empty(flat.size, np.int64)
    job, total = 0, 0
    for expert in range(E):
        if counts[expert]:
            experts[job], first[job] = expert, total
            total, counts[expert] = total + counts[expert], total  # from here on: where its next pair goes
            job += 1
    first[jobs] = total
    for pair in range(flat.size):
        pairs[counts[flat[pair]]] = pair
        counts[flat[pair]] += 1
    return experts, first, pairs


@inner
def share_of_experts(first, run, runs):
    """Where a thread's share begins, of experts whose pairs begin at `first`."""
    J = first.size - 1
    j, target = 0, (first[J] + UNPACKING * J) * run // runs
    while j < J and first[j] + UNPACKING * j < target:
        j += 1
    return j


@inner
def experts_in_turn(
    form, grouping, planes, group, hidden, inner, both, downs, first, firsts, rows, places, pairs, most, activation, x,
    wide, narrow, y, low, high, room, h, prepared,
):  # fmt: skip
    """The MLPs of experts low .. high on one thread: gates in the first half of h, ups in the other."""
    J, odd, inner_tiles, tiles = first.size - 1, 0, (inner + TILE - 1) // TILE, (hidden + TILE - 1) // TILE
    for j in range(low, high):
        for job in (j, J + j):
            tiles_of_jobs(
                form, grouping, planes, group, hidden, inner, both[0], both[1], both[2], firsts, rows, places, x, wide,
                h, job * inner_tiles, (job + 1) * inner_tiles, room,
            )  # fmt: skip
        count, gates = first[j + 1] - first[j], h.ctypes.data
        glu_span(gates, h[most * inner :].ctypes.data, activation, gates, np.intp(0), count * inner)
        for row in range(count):
            odd += prepare_planes(form, grouping, planes, h, row * inner, inner, group, prepared, row * narrow)
        tiles_of_jobs(
            form, grouping, planes, group, inner, hidden, downs[0], downs[1], downs[2], first, places, pairs, prepared,
            narrow, y, j * tiles, (j + 1) * tiles, room,
        )  # fmt: skip
    return odd


@allocating
def share_of_mlp(
    form, grouping, planes, group, hidden, inner, both, downs, first, firsts, rows, places, pairs, most, activation, x,
    wide, narrow, y, low, high,
):  # fmt: skip
    compiled_once()
    room, h = room_for_tiles(form, grouping, planes, group, max(hidden, inner)), np.empty(2 * most * inner, np.float32)
    return experts_in_turn(
        form, grouping, planes, group, hidden, inner, both, downs, first, firsts, rows, places, pairs, most, activation,
        x, wide, narrow, y, low, high, room, h, floats_in_lines(most * narrow),
    )  # fmt: skip


@kernel
def mlp_by_experts(
    form, grouping, planes, group, hidden, inner, both, downs, first, firsts, rows, places, pairs, most, activation, x,
    wide, narrow, y,
):  # fmt: skip
    """An expert at a time on each thread. Returns how many rows have sums that are not finite."""
    runs, odd = min(first.size - 1, threads()), 0
    for index in prange(runs):
        run = np.intp(index)
        odd += share_of_mlp(
            form, grouping, planes, group, hidden, inner, both, downs, first, firsts, rows, places, pairs, most,
            activation, x, wide, narrow, y, share_of_experts(first, run, runs), share_of_experts(first, run + 1, runs),
        )  # fmt: skip
    return odd


@alone
def few_tokens_kernel(
    form, grouping, planes, lane_values, powers, centre, group, hidden, inner, wide, narrow, gate, up, down, ids, each,
    activation, x, y,
):  # fmt: skip
    """gate, up, down: addresses [3, E]; wide, narrow: floats of a prepared row of `hidden` and of `inner`; each: how
    many choices in a row share one of x's.

    Returns how many rows, before or after the activation, have sums that are not finite.
    """
    experts, first, pairs = sorted_pairs(ids, gate.shape[1])
    J, P, odd = experts.size, pairs.size, 0
    both, downs = np.empty((3, 2 * J), np.int64), np.empty((3, J), np.int64)
    for j in range(J):
        for part in range(3):
            both[part, j], both[part, J + j] = gate[part, experts[j]], up[part, experts[j]]
            downs[part, j] = down[part, experts[j]]
    firsts, rows, places = np.empty(2 * J + 1, np.int64), np.empty(2 * P, np.int64), np.empty(2 * P, np.int64)
    for j in range(J + 1):
        firsts[j], firsts[J + j] = first[j], P + first[j]
    for i in range(P):
        rows[i] = rows[P + i] = pairs[i] // each
        places[i], places[P + i] = pairs[i], P + pairs[i]
    T = x.size // hidden
    prepared, sums = floats_in_lines(T * wide), np.empty(T * (hidden // group), np.float32)
    odd += prepare_rows(form, grouping, planes, lane_values, powers, centre, group, x, T, hidden, prepared, wide, sums)
    if planes.ndim:
        most = np.intp(0)
        for j in range(J):
            most = max(most, first[j + 1] - first[j])
        if most > ROWS_APART and J // threads() >= EVEN:
            for j in range(J):
                for i in range(first[j], first[j + 1]):
                    places[i], places[P + i] = i - first[j], most + i - first[j]
            return odd + mlp_by_experts(
                form, grouping, planes, group, hidden, inner, both, downs, first, firsts, rows, places, pairs, most,
                activation, prepared, wide, narrow, y,
            )  # fmt: skip
    h = np.empty(2 * P * inner, np.float32)
    run_products(
        form, grouping, planes, powers, group, hidden, inner, both, firsts, rows, places, prepared, wide, sums, h
    )
    glu_span(h.ctypes.data, h[P * inner :].ctypes.data, activation, h.ctypes.data, np.intp(0), P * inner)
    prepared, sums = floats_in_lines(P * narrow), np.empty(P * (inner // group), np.float32)
    odd += prepare_rows(form, grouping, planes, lane_values, powers, centre, group, h, P, inner, prepared, narrow, sums)
    run_products(
        form, grouping, planes, powers, group, inner, hidden, downs, first, pairs, pairs, prepared, narrow, sums, y
    )
    return odd


def mlp_of_few(x, ids, each, experts, activation, y):
    """The MLP in one call, into y; returns whether that was done: for a few tokens, of experts in one affine format."""
    parts = experts.gate, experts.up, experts.down
    form, inner, hidden = format_of(parts[0], EXACT), parts[2].shape[2], parts[2].shape[1]
    alike = form.affine and all(format_of(w, EXACT) is form for w in parts[1:])
    if not alike or ids.size * hidden >= FEW:
        return False
    found = [expert_addresses(w) for w in parts]
    return not few_tokens_kernel(
        form.form, form.grouping, form.planes, form.lane_values, form.powers, form.centre, form.group, hidden, inner,
        form.row_stride(hidden), form.row_stride(inner), *(addresses for addresses, _ in found), ids, each,
        ACTIVATION[activation], x, y,
    )  # fmt: skip


def expert_mlp(x, ids, experts, activation="silu", *, out=None):
    inner, hidden = experts.down.shape[2], experts.down.shape[1]
    y = destination((*ids.shape, hidden), out)
    if not y.numel():
        return finish(y, x.dtype, out)
    shared, source, ready = x.ndim == 2, floats(x), {}
    each = ids.shape[1] if shared else 1
    if mlp_of_few(source, ids.contiguous().numpy().reshape(-1), each, experts, activation, y.numpy().reshape(-1)):
        return finish(y, x.dtype, out)
    choices = Choices(ids, shared)
    gate, up = np.empty((2, ids.numel(), inner), np.float32)
    for w, result in ((experts.gate, gate), (experts.up, up)):
        form = format_of(w, EXACT)
        if form not in ready:
            ready[form] = Activations(form, source, hidden)
        project(choices, w, ready[form], choices.x_rows, result)
    gate, up = gate.reshape(-1), up.reshape(-1)
    glu_kernel(gate.ctypes.data, up.ctypes.data, ACTIVATION[activation], gate.ctypes.data, gate.size)
    between = Activations(format_of(experts.down, EXACT), gate, inner)
    project(choices, experts.down, between, choices.pairs, y.numpy().reshape(-1, hidden))
    return finish(y, x.dtype, out)
