"""Products of packed matrices with activations as whole numbers: preparing rows, and the tasks over planes.py.

Jobs are those of products.py. Up to FEW rows of activations go by `plane_dots`, more by tiles; the bits are the same.
"""

import numpy as np
from numba import prange

from .compiled import allocating, inlined, inner, kernel
from .dots import WIDEST, tile_rows
from .lanes import (
    WIDTH,
    compiled_once,
    floats_in_lines,
    fma,
    larger,
    largest,
    load,
    load_n,
    stack_floats,
    store,
    store_n,
    threads,
    total,
    zeros,
)
from .plane_tiles import ROWS, TILE, plane_codes, plane_scales, plane_tile
from .planes import plane_block, plane_dots, plane_sizes, plane_sums

HIGHEST = np.float32(127)  # of a plane of bytes
HIGHEST_FRACTION = (0x7F7F7F & 0x3FFFFF) << 1  # of 127 (65536 + 256 + 1), as float32 has it
LEAST = np.float32(1e-30)  # a group whose activations are all smaller counts as zeros: their quotients would overflow
FEW = 2  # rows; from three on, unpacking a tile once for all of them pays
SMALL = 1 << 19  # multiplications, 13 us of one thread, 20 in float32: with another that is awake it takes 10
SMALL_TILES = 1 << 20  # the same where weights are unpacked once for many rows: 12 to 25 us; cores may be slow to share
FEW_NUMBERS = 1 << 15  # activations, prepared by one thread in 20 us


@inlined
def three_planes_step(most):
    """The power of two that divides activations up to `most` into whole numbers for three planes, and its inverse.

    No number is then off by more than a unit in the last place of the largest, two where that is just below a power
    of two and a larger step is needed.
    """
    bits = np.float32(most).view(np.int32)
    exponent = (bits >> 23) + (1 if (bits & 0x7FFFFF) > HIGHEST_FRACTION else 0)
    return np.int32((exponent - 22) << 23).view(np.float32), np.int32((276 - exponent) << 23).view(np.float32)


@inner
def prepare_planes(form, grouping, planes, x, base, K, group, prepared, place):
    """One row of planes, their sums and steps (see planes.py), zeros after its end; returns whether it is infinite."""
    compiled_once()
    values, blocks, parts = plane_sizes(form, grouping, planes)
    wide = WIDTH * values
    block_floats = planes.ndim * wide // 4
    G, check, top = K // group, zeros(), HIGHEST if planes.ndim == 1 else HIGHEST * np.float32(256)
    inverses, tail = stack_floats(WIDTH), stack_floats(WIDEST)
    for span in range((G + WIDTH - 1) // WIDTH):
        centres, sums, steps = place, place + parts * WIDTH, place + (parts + 1) * WIDTH
        place = steps + WIDTH
        prepared[centres:place] = 0
        inverses[:] = 0
        for g in range(min(WIDTH, G - span * WIDTH)):
            at, peak = base + (span * WIDTH + g) * group, zeros()
            for i in range(at, at + group, WIDTH):
                v = load(x, i)
                check = fma(v, zeros(), check)
                peak = larger(larger(peak, v), zeros() - v)
            most = largest(peak)
            if most > LEAST:
                step, inverse = (most / top, top / most) if planes.ndim < 3 else three_planes_step(most)
                inverses[g], prepared[steps + g] = inverse, step
                prepared[sums + g] = plane_sums(form, grouping, planes, x, at, inverse, prepared, centres + g * parts)
        for block in range(min(blocks, (K - span * WIDTH * group + wide - 1) // wide)):
            start = span * WIDTH * group + block * wide
            first = block * wide // group
            if start + wide <= K:
                plane_block(form, grouping, planes, x, base + start, inverses, first, prepared, place)
            else:
                for i in range(0, wide, WIDTH):
                    store(tail, i, load_n(x, base + start + i, min(WIDTH, max(0, K - start - i))))
                plane_block(form, grouping, planes, tail, np.intp(0), inverses, first, prepared, place)
            place += block_floats
    return 0 if total(check) == 0 else 1


@kernel
def prepare_planes_kernel(form, grouping, planes, x, K, group, prepared, stride):
    """Prepare every row; returns how many are not finite."""
    rows, odd = x.size // K, 0
    if x.size < FEW_NUMBERS:
        for row in range(rows):
            odd += prepare_planes(form, grouping, planes, x, row * K, K, group, prepared, row * stride)
    else:
        for index in prange(rows):
            row = np.intp(index)
            odd += prepare_planes(form, grouping, planes, x, row * K, K, group, prepared, row * stride)
    return odd


@inlined
def dots_of_tile(form, grouping, planes, K, words, scales, biases, streams, x, at, y, to):
    for rows in streams:
        dots = plane_dots(form, grouping, planes, K, words, scales, biases, rows, x, at)
        for r in range(len(rows)):
            y[to + rows[r]] = dots[r]


@inner
def row_products(form, grouping, planes, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y, low, high):
    """Tasks low .. high: task t is a tile of four weight rows of job t // tiles."""
    compiled_once()
    tiles, last = (N + 3) // 4, N - 1
    for task in range(low, high):
        j, tile = task // tiles, task % tiles
        rows = tile_rows(np.intp(0), tile, tiles, last)
        for i in range(first[j], first[j + 1]):
            at, to = x_rows[i] * stride, y_rows[i] * N
            dots_of_tile(form, grouping, planes, K, words[j], scales[j], biases[j], rows, x, at, y, to)


@inner
def unpack_tile(form, grouping, planes, group, K, row, last, words, scales, biases, codes, scale, bias):
    """The codes, scales and biases of 32 weight rows from `row` on, lanes being rows."""
    values, G = plane_sizes(form, grouping, planes)[0], K // group
    wide = WIDTH * values
    for side in range(0, TILE, WIDTH):
        for block in range((K + wide - 1) // wide):
            inside, to = min(WIDTH, (K - block * wide) // values), block * wide * TILE // 4 + side
            plane_codes(form, grouping, planes, K, words, row + side, last, block, inside, codes, to)
        for g in range(0, G, WIDTH):
            inside, to = min(WIDTH, G - g), g * TILE + side
            plane_scales(form, grouping, K, scales, row + side, last, g, inside, scale, to)
            plane_scales(form, grouping, K, biases, row + side, last, g, inside, bias, to)


@inner
def fold_tile(running, sums, rows, y, y_rows, i, row, N):
    """Add the sums of each row of a tile, by halves as sixteen lanes are folded, into rows of y, listed from i on.

    Sums that a short row does not have count as zeros: adding one of them is adding all.
    """
    step = ROWS * TILE
    for m in range(rows):
        for side in range(0, min(TILE, N - row), WIDTH):
            here, half, left = m * TILE + side, WIDTH // 2, sums
            while half:
                for number in range(half, left):
                    at = here + number * step
                    store(running, at - half * step, load(running, at - half * step) + load(running, at))
                half, left = half // 2, min(left, half)
            whole = load(running, here) if sums == WIDTH else load(running, here) + zeros()
            store_n(y, y_rows[i + m] * N + row + side, whole, np.intp(N - row - side))


@inner
def tiles_of_jobs(
    form, grouping, planes, group, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y, low, high, room
):
    """As `tile_products`, with room for a tile: its codes, scales and biases, and its sums."""
    compiled_once()
    tiles, G = (N + TILE - 1) // TILE, K // group
    sums = min(G, WIDTH)
    codes, scale, bias, running = room
    for task in range(low, high):
        j, row, last = task // tiles, task % tiles * TILE, N - 1
        begin, end = first[j], first[j + 1]
        if end - begin <= FEW:
            for tile in range(TILE // 4):
                rows = tile_rows(row, np.intp(tile), np.intp(TILE // 4), last)
                if rows[0][0] > last:
                    break
                for i in range(begin, end):
                    at, to = x_rows[i] * stride, y_rows[i] * N
                    dots_of_tile(form, grouping, planes, K, words[j], scales[j], biases[j], rows, x, at, y, to)
            continue
        unpack_tile(form, grouping, planes, group, K, row, last, words[j], scales[j], biases[j], codes, scale, bias)
        for i in range(begin, end, ROWS):
            running[: sums * ROWS * TILE] = 0
            a, b, c, d = i, min(i + 1, end - 1), min(i + 2, end - 1), min(i + 3, end - 1)
            at = (x_rows[a] * stride, x_rows[b] * stride, x_rows[c] * stride, x_rows[d] * stride)
            plane_tile(form, grouping, planes, G, codes, scale, bias, x, at, running)
            fold_tile(running, sums, min(ROWS, end - i), y, y_rows, i, row, N)


@allocating
def room_for_tiles(form, grouping, planes, group, K):
    """What `tiles_of_jobs` needs on a thread, for rows of up to K weights."""
    values, G = plane_sizes(form, grouping, planes)[0], K // group
    scale, bias = floats_in_lines((G + WIDTH) * TILE), floats_in_lines((G + WIDTH) * TILE)
    return floats_in_lines((K + WIDTH * values) * TILE // 4), scale, bias, floats_in_lines(WIDTH * ROWS * TILE)


@allocating
def tile_products(
    form, grouping, planes, group, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y, low, high
):
    """Tasks low .. high: task t is 32 weight rows of job t // tiles. A job of FEW rows does not unpack them."""
    compiled_once()
    room = room_for_tiles(form, grouping, planes, group, K)
    tiles_of_jobs(
        form, grouping, planes, group, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y, low, high, room
    )  # fmt: skip


@kernel
def plane_products_kernel(
    form, grouping, planes, group, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y
):
    """Jobs j: matrix at words[j], ... times the rows listed in [first[j], first[j + 1])."""
    most, jobs = 0, words.size
    for j in range(jobs):
        most = max(most, first[j + 1] - first[j])
    if most <= FEW:
        tasks = jobs * ((N + 3) // 4)
        runs = min(tasks, threads())
        if x_rows.size * N * K < SMALL:
            row_products(
                form, grouping, planes, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y, np.intp(0),
                tasks,
            )  # fmt: skip
        else:
            for index in prange(runs):
                run = np.intp(index)
                row_products(
                    form, grouping, planes, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y,
                    tasks * run // runs, tasks * (run + 1) // runs,
                )  # fmt: skip
    else:
        tasks = jobs * ((N + TILE - 1) // TILE)
        runs = min(tasks, threads()) if x_rows.size * N * K >= SMALL_TILES else 1
        for index in prange(runs):
            run = np.intp(index)
            tile_products(
                form, grouping, planes, group, K, N, words, scales, biases, first, x_rows, y_rows, x, stride, y,
                tasks * run // runs, tasks * (run + 1) // runs,
            )  # fmt: skip
