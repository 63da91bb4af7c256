"""Products of packed matrices with rows of activations: what `qmm` and the expert ops share.

A job is a packed matrix, given by addresses (so experts may lie anywhere), and the rows of activations that it
multiplies. Tasks are (job, four weight rows); the rows of activations are taken in chunks that stay in cache while the
weights stream by. Matrices of at most EXACT weights, whose products cost little more than the call, take another way:
exact weights, summed in float64. The golden vectors of the original kernels, sums that cancel among them, are met so.
(Experts' MLPs, which have no such vectors, say themselves from what size on they take whole numbers.)

Where there is a way, products go through plane_products.py, with activations as whole numbers: of 24 bits where VNNI
multiplies them, or of fewer if `use_activations` asks for that. Other formats take float32 activations as they are.
"""

from functools import cached_property, lru_cache

import numpy as np
import torch
from numba import prange

from .compiled import inner, kernel
from .dots import (
    VALUES,
    WIDEST,
    begun,
    four_rows,
    one_row_dots,
    permute_block,
    powers,
    tile_dots,
    tile_rows,
    token,
)
from .exact import exact_kernel
from .lanes import WIDTH, compiled_once, floats_in_lines, load, load_n, stack_floats, store, threads, total
from .plane_products import FEW_NUMBERS, SMALL, plane_products_kernel, prepare_planes, prepare_planes_kernel
from .planes import Planes, multiplies_bytes, offers
from .planes import token as planes_token
from .views import NOTHING

CHUNK = 32  # rows of activations that pass over a matrix together: 512 KB at K = 4096
EXACT = 1 << 15  # weights: many rows of activations would feel it in larger matrices
KIND = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
PLANES = {"f32": 3 if multiplies_bytes() else 0, "i16": 2, "i8": 1}  # of bytes that activations are cut into
_planes = PLANES["f32"]


def use_activations(kind):
    """From now on products take activations as one of PLANES, wherever there is a way for their format."""
    global _planes
    _planes = PLANES[kind]


class Format:
    """How one matrix is stored, as the kernels take it, and the shape of activations prepared for it."""

    def __init__(self, form, kind, group, planes=0):
        self.form, self.grouping = token(form, kind, group)
        self.exact = Format(form, kind, group) if planes else self  # the same, with activations as they are
        self.planes = planes_token(planes)
        self.cut = Planes(self.form, self.grouping, self.planes) if planes else None
        self.powers, self.values, self.group = powers(form), VALUES[form], group
        self.affine, self.dense = form.startswith("affine"), form == "dense"
        self.begun = begun(form)
        middle = 1 << (32 // self.values - 1)  # of codes that fill words
        self.centre = np.float32(-middle * float(self.powers[-1]) if self.begun else 0)
        self.lane_values = np.empty((0,) * self.values.bit_length(), np.uint8)  # V as a type, for `permute_block`

    def row_stride(self, K):
        """Floats that one prepared row of activations takes."""
        if self.cut is not None:
            return self.cut.prepared_row(K) // 4
        return -(-K // (WIDTH * self.values)) * WIDTH * (self.values + self.begun)


@lru_cache(maxsize=256)
def _format(mode, bits, group, kind, planes):
    if mode == "dense":
        return Format("dense", KIND[kind], 16)
    if mode == "affine":
        form = f"affine{bits}"
        return Format(form, KIND[kind], group, planes if offers(form, planes) else 0)
    return Format("fp8" if mode == "mxfp8" else "fp4", "e4m3" if mode == "nvfp4" else "e8m0", group)


def format_of(w, exact=EXACT):
    """The Format of a Packed, of an expert provider that has its fields, or of a dense tensor; of more than `exact`
    weights, with activations as whole numbers where there is a way."""
    if hasattr(w, "bits"):
        planes = _planes if w.shape[-2] * w.shape[-1] > exact else 0
        return _format(w.mode, w.bits, w.group, w.scale_dtype, planes)
    return _format("dense", 0, 16, w.dtype, 0)


@inner
def prepare_row(x, base, K, lane_values, powers, centre, group, prepared, place, sums, sums_at):
    """One row, permuted to the lanes of its weights' blocks, zeros after the end; then its sums over groups.

    Where centre is not 0, each block ends with its sums times that.

    Returns whether a sum is not finite.
    """
    compiled_once()
    values = powers.size
    wide = WIDTH * values
    pitch = wide + WIDTH if centre != 0 else wide
    whole = K - K % wide
    for first in range(0, whole, wide):
        permute_block(lane_values, x, base + first, powers, centre, prepared, place + first // wide * pitch)
    if whole < K:
        rest = stack_floats(WIDEST)
        for i in range(0, wide, WIDTH):
            store(rest, i, load_n(x, base + whole + i, min(WIDTH, max(0, K - whole - i))))
        permute_block(lane_values, rest, np.intp(0), powers, centre, prepared, place + whole // wide * pitch)
    check = np.float32(0)
    if sums.size:
        for g in range(K // group):
            lanes = load(x, base + g * group)
            for i in range(WIDTH, group, WIDTH):
                lanes = lanes + load(x, base + g * group + i)
            sums[sums_at + g] = total(lanes)
            check += sums[sums_at + g] * np.float32(0)
    return 0 if check == 0 else 1


@kernel
def prepare_kernel(x, K, lane_values, powers, centre, group, prepared, stride, sums):
    """Prepare every row; returns how many have sums that are not finite."""
    rows, G, odd = x.size // K, K // group, 0
    if x.size < FEW_NUMBERS:
        for row in range(rows):
            odd += prepare_row(x, row * K, K, lane_values, powers, centre, group, prepared, row * stride, sums, row * G)
    else:
        for index in prange(rows):
            row = np.intp(index)
            odd += prepare_row(x, row * K, K, lane_values, powers, centre, group, prepared, row * stride, sums, row * G)
    return odd


class Activations:
    """Rows of K float32, prepared for matrices of one format."""

    def __init__(self, form, x, K):
        rows, self.stride = x.size // K, form.row_stride(K)
        self.form, self.x, self.K, self.odd, self.sums = form, x, K, 0, NOTHING
        if form.dense and self.stride == K:
            self.prepared = x
            return
        self.prepared = floats_in_lines(rows * self.stride)
        if form.planes.ndim:
            self.odd = prepare_planes_kernel(
                form.form, form.grouping, form.planes, x, K, form.group, self.prepared, self.stride
            )
            return
        if form.affine:
            self.sums = np.empty(rows * (K // form.group), np.float32)
        self.odd = prepare_kernel(
            x, K, form.lane_values, form.powers, form.centre, form.group, self.prepared, self.stride, self.sums
        )

    @cached_property
    def exact(self):
        """The same rows as they are."""
        return Activations(self.form.exact, self.x, self.K) if self.form.planes.ndim else self


@inner
def product_tiles(
    form, grouping, K, N, words, scales, biases, first, x_rows, y_rows, start, chunk, x, stride, sums, G, y, low, high
):
    """Tasks low .. high: task t is a tile of job t // tiles times the rows of activations that the job lists from
    `start` on, `chunk` at most."""
    compiled_once()
    tiles, last = (N + 3) // 4, N - 1
    for task in range(low, high):
        j, tile = task // tiles, task % tiles
        i, end = first[j] + start, min(first[j + 1], first[j] + start + chunk)
        streams = tile_rows(np.intp(0), tile, tiles, last)
        while i + 4 <= end:
            a, b, c, d = x_rows[i], x_rows[i + 1], x_rows[i + 2], x_rows[i + 3]
            x_at, sums_at = (a * stride, b * stride, c * stride, d * stride), (a * G, b * G, c * G, d * G)
            rows = four_rows(streams)
            dots = tile_dots(form, grouping, K, words[j], scales[j], biases[j], rows, x, x_at, sums, sums_at)
            for r in range(4):
                for m in range(4):
                    y[y_rows[i + m] * N + rows[r]] = dots[4 * r + m]
            i += 4
        while i < end:
            x_at, sums_at = (x_rows[i] * stride,), (x_rows[i] * G,)
            for some in streams:
                few = one_row_dots(form, grouping, K, words[j], scales[j], biases[j], some, x, x_at, sums, sums_at)
                for r in range(len(some)):
                    y[y_rows[i] * N + some[r]] = few[r]
            i += 1


@kernel
def products_kernel(form, grouping, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, sums, G, y):
    """Jobs j: matrix at words[j], ... times the rows listed in [first[j], first[j + 1])."""
    tasks, most = words.size * ((N + 3) // 4), 0
    for j in range(words.size):
        most = max(most, first[j + 1] - first[j])
    runs = min(tasks, threads())
    for start in range(0, most, CHUNK):
        if x_rows.size * N * K < SMALL:
            product_tiles(
                form, grouping, K, N, words, scales, biases, first, x_rows, y_rows, start, CHUNK, x, stride, sums, G, y,
                np.intp(0), tasks,
            )  # fmt: skip
        else:
            for index in prange(runs):
                run = np.intp(index)
                product_tiles(
                    form, grouping, K, N, words, scales, biases, first, x_rows, y_rows, start, CHUNK, x, stride, sums,
                    G, y, tasks * run // runs, tasks * (run + 1) // runs,
                )  # fmt: skip


@inner
def prepare_rows(form, grouping, planes, lane_values, powers, centre, group, x, rows, K, prepared, stride, sums):
    """Prepare rows of x, on this thread; returns how many have sums that are not finite."""
    odd, G = 0, K // group
    for row in range(rows):
        if planes.ndim == 0:
            odd += prepare_row(x, row * K, K, lane_values, powers, centre, group, prepared, row * stride, sums, row * G)
        else:
            odd += prepare_planes(form, grouping, planes, x, row * K, K, group, prepared, row * stride)
    return odd


@inner
def run_products(form, grouping, planes, powers, group, K, N, addresses, first, x_rows, y_rows, x, stride, sums, y):
    """As `multiply`, of an affine format, inside a kernel: x is prepared and finite."""
    words, scales, biases = addresses[0], addresses[1], addresses[2]
    if planes.ndim == 0:
        if N * K <= EXACT:
            exact_kernel(form, grouping, powers, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y)
        else:
            G = K // group
            products_kernel(form, grouping, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, sums, G, y)
    else:
        plane_products_kernel(
            form, grouping, planes, group, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y
        )


def same_bits_together(weights):
    """Whether a product by matrices as one has the bits of a product by each: whether all of them go the same way."""
    sizes = [w.shape[-2] * w.shape[-1] for w in weights]
    return min(sizes) > EXACT or sum(sizes) <= EXACT


def multiply(activations, addresses, first, x_rows, y_rows, y, N):
    """Run jobs. addresses: of words, scales, biases, int64 [J] each; y: flat float32, rows of N."""
    form, K, sums = activations.form, activations.K, activations.sums
    x, stride, lists = activations.prepared, activations.stride, (first, x_rows, y_rows)
    if form.planes.ndim:
        plane_products_kernel(form.form, form.grouping, form.planes, form.group, K, N, *addresses, *lists, x, stride, y)
    elif N * K <= EXACT:
        exact_kernel(form.form, form.grouping, form.powers, K, N, *addresses, *lists, x, stride, y)
        return
    else:
        G = K // form.group if form.affine else 0
        products_kernel(form.form, form.grouping, K, N, *addresses, *lists, x, stride, sums, G, y)
    if activations.odd:
        # An infinite activation times a weight is an infinity; in two parts, a code's and a bias's, it would be NaN.
        told = activations.x.reshape(-1, K) if form.planes.ndim else sums.reshape(-1, K // form.group)
        odd, exact = ~np.isfinite(told).all(1)[x_rows], activations.exact
        starts = np.concatenate(([0], np.cumsum(odd)))[first]
        lists = starts, x_rows[odd], y_rows[odd]
        rows = exact.prepared, exact.stride, y
        exact_kernel(form.form, form.grouping, form.powers, K, N, *addresses, *lists, *rows)
