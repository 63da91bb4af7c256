"""Routing and combining on the CPU: one token a task, then runs of columns.

The k best are kept in a heap of integer keys that hold value and id together, so ties and NaN need no cases of their
own, and a long row costs one comparison for each expert that does not enter.
"""

import numpy as np
import torch
from numba import prange

from . import lanes
from .compiled import allocating, inlined, inner, kernel
from .views import SERIAL, destination, finish, floats, raw

EMPTY_SLOT = np.float32(-1e30)
NOT_A_NUMBER = np.int64(0x7FFFFFFF)  # above the bits of every number


@inlined
def place(value, index):
    """A key that is larger for what comes first: NaN, then larger values, then lower indices; -0 equals 0."""
    bits = np.int64(np.float32(value).view(np.int32))
    ordered = bits if bits >= 0 else -(bits & 0x7FFFFFFF)
    if value != value:
        ordered = NOT_A_NUMBER
    return (ordered << 32) - index


@inlined
def index_of(key):
    return -key & 0xFFFFFFFF


@inner
def sink(heap, size, spot, key):
    """Put the key into the heap (smallest first) at `spot` or below."""
    while 2 * spot + 1 < size:
        child = 2 * spot + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[spot] = heap[child]
        spot = child
    heap[spot] = key


@inner
def largest_first(values, n, k, heap):
    """The keys of the k first of values[:n], in order, in heap[:k]."""
    for i in range(k):
        heap[i] = place(values[i], i)
    for i in range(k // 2 - 1, -1, -1):
        sink(heap, k, i, heap[i])
    bar = values[index_of(heap[0])]
    for i in range(k, n):
        # Equal values come later and stay out; NaN passes on either side and is settled by the key.
        if not values[i] <= bar:
            key = place(values[i], i)
            if key > heap[0]:
                sink(heap, k, 0, key)
                bar = values[index_of(heap[0])]
    for size in range(k - 1, 0, -1):
        smallest, last = heap[0], heap[size]
        sink(heap, size, 0, last)
        heap[size] = smallest


@inner
def softmax_row(x, base, E, score):
    minus_inf = np.float32(-np.inf)
    top = lanes.splat(minus_inf)
    for i in range(0, E, 16):
        n = min(16, E - i)
        top = lanes.larger(top, lanes.keep(lanes.load_n(x, base + i, n), n, minus_inf))
    top = lanes.splat(lanes.largest(top))
    total = lanes.zeros()
    for i in range(0, E, 16):
        n = min(16, E - i)
        e = lanes.exp(lanes.load_n(x, base + i, n) - top)
        lanes.store_n(score, i, e, n)
        total = total + lanes.keep(e, n, np.float32(0))
    inverse = lanes.splat(lanes.total(total))
    for i in range(0, E, 16):
        n = min(16, E - i)
        lanes.store_n(score, i, lanes.load_n(score, i, n) / inverse, n)


@inner
def sigmoid_row(x, base, E, score):
    one = lanes.splat(np.float32(1))
    for i in range(0, E, 16):
        n = min(16, E - i)
        v = lanes.zeros() - lanes.load_n(x, base + i, n)
        lanes.store_n(score, i, one / (one + lanes.exp(v)), n)


@allocating
def drop_groups(choice, score, bias, E, groups, keep, heap):
    """Set the choices outside the `keep` best groups to -inf; a NaN makes its group's value NaN, which is the best."""
    size = E // groups
    values = np.empty(groups, np.float32)
    for group in range(groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for i in range(group * size, group * size + size):
            v = score[i] + bias[i] if bias.size else score[i]
            if v != v or v > first:
                first, second = v, first
            elif v > second:
                second = v
        values[group] = first + second if size > 1 else first
    largest_first(values, groups, keep, heap)
    stays = np.zeros(groups, np.bool_)
    for i in range(keep):
        stays[index_of(heap[i])] = True
    for i in range(E):
        if not stays[i // size]:
            choice[i] = np.float32(-np.inf)


@inner
def fill_slots(score, E, k, ids, weights, at):
    for slot in range(k):
        ids[at + slot], weights[at + slot] = 0, EMPTY_SLOT
    smallest = 0
    for expert in range(E):
        if score[expert] > weights[at + smallest]:
            ids[at + smallest], weights[at + smallest] = expert, score[expert]
            smallest = 0
            for slot in range(1, k):
                if weights[at + slot] < weights[at + smallest]:
                    smallest = slot


@allocating
def route_row(
    x, k, E, sigmoid, bias, groups, keep, renormalise, expert_scale, scaling, slots, ids, weights, row
):  # fmt: skip
    lanes.compiled_once()
    base, at = row * E, row * k
    score = np.empty(E, np.float32)
    if sigmoid:
        sigmoid_row(x, base, E, score)
    else:
        softmax_row(x, base, E, score)
    if slots:
        fill_slots(score, E, k, ids, weights, at)
    else:
        heap, choice = np.empty(max(k, keep), np.int64), np.empty(E, np.float32)
        for i in range(E):
            choice[i] = score[i] + bias[i] if bias.size else x[base + i]
        if groups:
            drop_groups(choice, score, bias, E, groups, keep, heap)
        largest_first(choice, E, k, heap)
        for slot in range(k):
            expert = index_of(heap[slot])
            ids[at + slot], weights[at + slot] = expert, score[expert]
    sums = lanes.zeros()
    for i in range(0, k, 16):
        sums = sums + lanes.load_n(weights, at + i, min(16, k - i))
    total = lanes.total(sums)
    for slot in range(at, at + k):
        weight = weights[slot]
        if renormalise and total > np.float32(0):
            weight /= total
        if expert_scale.size:
            weight *= expert_scale[ids[slot]]
        weights[slot] = weight * scaling


@kernel
def route_kernel(
    x, k, E, sigmoid, bias, groups, keep, renormalise, expert_scale, scaling, slots, ids, weights
):  # fmt: skip
    rows = x.size // E
    if x.size < SERIAL:
        for row in range(rows):
            route_row(
                x, k, E, sigmoid, bias, groups, keep, renormalise, expert_scale, scaling, slots, ids, weights, row
            )
    else:
        for row in prange(rows):
            route_row(
                x, k, E, sigmoid, bias, groups, keep, renormalise, expert_scale, scaling, slots, ids, weights,
                np.int64(row),
            )  # fmt: skip


def route(
    logits, k, *, kind="softmax", bias=None, groups=None, keep_groups=None, renormalise=True, per_expert_scale=None,
    scaling=1.0, order="score", out=None,
):  # fmt: skip
    shape = (*logits.shape[:-1], k)
    ids_out, weights_out = out or (None, None)
    direct = ids_out is not None and ids_out.is_contiguous()
    ids = ids_out if direct else torch.zeros(shape, dtype=torch.int32)  # experts that exist, also in a rehearsal
    weights = destination(shape, weights_out)
    route_kernel(
        floats(logits), k, logits.shape[-1], kind == "sigmoid", floats(bias), groups or 0, keep_groups or 0,
        renormalise, floats(per_expert_scale), np.float32(scaling), order == "slot", raw(ids), raw(weights),
    )  # fmt: skip
    return finish(ids, torch.int32, ids_out), finish(weights, torch.float32, weights_out)


COLUMNS = 512  # columns a task
FEW = 4 * SERIAL  # one fused multiply-add an element: below this a second thread gains less than waking it costs


@inlined
def combine_piece(y, weights, residual, shared, gate, result, row, A, D, i, n):
    """n columns from i of one token: the experts in order, then the residual, then the shared expert."""
    total = lanes.zeros()
    for a in range(A):
        v = lanes.load(y, (row * A + a) * D + i) if n == 16 else lanes.load_n(y, (row * A + a) * D + i, n)
        total = lanes.fma(lanes.splat(weights[row * A + a]), v, total)
    if residual.size:
        total = lanes.load_n(residual, row * D + i, n) + total
    if shared.size:
        total = lanes.fma(lanes.splat(gate), lanes.load_n(shared, row * D + i, n), total)
    lanes.store_n(result, row * D + i, total, n)


@inner
def combine_columns(y, weights, residual, shared, shared_gate, result, row, A, D, start, stop):
    lanes.compiled_once()
    gate = np.float32(1)
    if shared_gate.size:
        gate = np.float32(1) / (np.float32(1) + np.exp(-shared_gate[row]))
    whole = stop - (stop - start) % 16
    for i in range(start, whole, 16):
        combine_piece(y, weights, residual, shared, gate, result, row, A, D, i, np.intp(16))
    if whole < stop:
        combine_piece(y, weights, residual, shared, gate, result, row, A, D, whole, stop - whole)


@kernel
def combine_kernel(y, weights, residual, shared, shared_gate, result, A, D):
    rows, runs = result.size // D, (D + COLUMNS - 1) // COLUMNS
    if y.size < FEW:
        for row in range(rows):
            combine_columns(y, weights, residual, shared, shared_gate, result, row, A, D, np.intp(0), D)
    else:
        for task in prange(rows * runs):
            row, start = np.int64(task) // runs, np.int64(task) % runs * COLUMNS
            stop = min(D, start + COLUMNS)
            combine_columns(y, weights, residual, shared, shared_gate, result, row, A, D, start, stop)


@inner
def add_columns(y, weights, tokens, result, D, start, stop):
    """All rows' share of some columns: rows in order, so a token that occurs again adds up in order."""
    lanes.compiled_once()
    for m in range(tokens.size):
        source, target, weight = m * D, tokens[m] * D, lanes.splat(weights[m])
        for i in range(start, stop, 16):
            n = min(16, stop - i)
            v = lanes.load(y, source + i) if n == 16 else lanes.load_n(y, source + i, n)
            lanes.store_n(result, target + i, lanes.fma(weight, v, lanes.load_n(result, target + i, n)), n)


@kernel
def bucket_kernel(y, weights, tokens, result, D):
    if y.size < FEW:
        add_columns(y, weights, tokens, result, D, np.intp(0), D)
    else:
        for task in prange((D + COLUMNS - 1) // COLUMNS):
            start = np.intp(task) * COLUMNS
            add_columns(y, weights, tokens, result, D, start, min(D, start + COLUMNS))


def combine(y, weights, *, residual=None, shared=None, shared_gate=None, tokens=None, out=None):
    A, D = y.shape[-2:]
    if tokens is not None:
        result = destination(residual.shape, out)
        if result is not residual:
            result.copy_(residual)
        bucket_kernel(raw(y), floats(weights), raw(tokens.long()), floats(result), D)
        return finish(result, y.dtype, out)
    result = destination((*y.shape[:-2], D), out)
    combine_kernel(raw(y), floats(weights), floats(residual), floats(shared), floats(shared_gate), floats(result), A, D)
    return finish(result, y.dtype, out)
