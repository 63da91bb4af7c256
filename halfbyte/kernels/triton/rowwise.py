"""Row ops on a GPU: bytes set their floor, so each input is read once and each output written once, 16 bytes at a time.

A row that fits stays in registers between its statistic and its results: one program a row, or several rows a program
where rows are short (heads), so that a warp owns whole rows and sums them without shared memory. Longer rows are read
again for each pass. Launch sizes depend on the row alone, so a row's bits do not depend on its batch.

float32 rows get float64 where a sum may cancel, and an exponential of full precision; 16-bit rows
would round both away.
"""

import torch
import triton
import triton.language as tl

from .device import facts, overlap
from .elementary import ACTIVATIONS, activated, begin_early, cos_sin, rounded, tanh
from .stacks import prefetch_columns

# 2026-11-15, H200, bfloat16, medians in a graph. A norm's elements a thread: at 2048 x 4096, 16 and 32 are alike (10.7
# and 10.6 us; 13.0 with 8), a chain wants 32 (30.5 against 32.7 us); heads of 128 and one row of 2048 want 16 (14.7
# against 16.6 us, 1.43 against 1.48). Programs that stay and walk over rows, weight in registers, took 11.2 at best.
LONGEST_BLOCK = 16384  # a row in registers; longer ones are read again
TILE = 2048  # elements of short rows a program takes together
SHORT, PER_THREAD, PER_THREAD_LONG = 2048, 16, 32
SPAN, SPAN_WARPS = 1024, 2  # glu: 14.4 us, 16.3 with 4096 elements and 4 warps
# Rope at 2048 x 64 x 128: 20.7 us, 22.4 with 8 warps; one token is quicker in more programs (1.4 against 1.7 us).
ROPE_TILE, ROPE_TILE_FEW, ROPE_WARPS = 4096, 1024, 2


@triton.jit
def rows_at(first, ROWS: tl.constexpr, tokens, heads):
    """Where rows first, first + 1, ... of [batch, token, head, D] lie, ready for strides."""
    row = first + tl.arange(0, ROWS)
    head, token = row % heads, row // heads
    return (token // tokens).to(tl.int64), (token % tokens).to(tl.int64), head.to(tl.int64)


@triton.jit
def addresses(tensor, at, columns):
    """Of columns [BLOCK] of the rows `at`. A tensor comes as (pointer, batch stride, token stride, head stride)."""
    start = at[0] * tensor[1] + at[1] * tensor[2] + at[2] * tensor[3]
    return tensor[0] + start[:, None] + columns[None, :]


@triton.jit
def load_rows(tensor, at, columns, mask):
    return tl.load(addresses(tensor, at, columns), mask, 0).to(tl.float32)


@triton.jit
def store_rows(tensor, at, columns, mask, value):
    tl.store(addresses(tensor, at, columns), rounded(value, tensor[0].dtype.element_ty), mask)


@triton.jit
def load_columns(vector, columns, D: tl.constexpr):
    """[1, BLOCK], so that a single row's tile and its vectors lie alike in the threads."""
    return tl.load(vector + columns[None, :], (columns < D)[None, :], 0).to(tl.float32)


@triton.jit
def sum_input(x, add, at, columns, mask):
    s = load_rows(x, at, columns, mask)
    if add is not None:
        s += load_rows(add, at, columns, mask)
    return s


@triton.jit
def inverse_rms(squares, D: tl.constexpr, eps, PRECISE: tl.constexpr):
    """1 / sqrt(mean + eps) of the rows' sums of squares, as a column."""
    if PRECISE:
        factor = 1.0 / tl.sqrt(squares.to(tl.float64) / D + eps)
    else:
        factor = tl.div_rn(1.0, tl.sqrt_rn(squares / D + eps))  # rsqrt would flush tiny means to infinity
    return factor[:, None]


@triton.jit
def weighted(s, by, residual, PRECISE: tl.constexpr):
    """s by, in float64 where a residual will join it and may cancel it.

    It is formed before the row's factor is known: one value an element waits for that in registers, not two.
    """
    if PRECISE and residual is not None:
        return s.to(tl.float64) * by.to(tl.float64)
    else:
        return s * by


@triton.jit
def normed(product, factor, residual):
    """product factor, joined by the residual, rounded once to float32."""
    result = product * factor.to(product.dtype)
    if residual is not None:
        result = residual.to(product.dtype) + result
    return result.to(tl.float32)


@triton.jit
def scaled(y, number, scale, SCALE_STEP: tl.constexpr, columns, D: tl.constexpr):
    """y times a number, or times a tensor of one value (step 0) or of one a column (step 1)."""
    if number is not None:
        y = y * number
    if scale is not None:
        y = y * (load_columns(scale, columns, D) if SCALE_STEP else tl.load(scale).to(tl.float32))
    return y


@triton.jit
def norm_factors(weight, mul, gate, at, columns, mask, D: tl.constexpr, PRECISE: tl.constexpr):
    """weight mul silu(gate) of some columns."""
    by = tl.full([1, 1], 1.0, tl.float32)
    if weight is not None:
        by = load_columns(weight, columns, D)
    if mul is not None:
        by = by * load_rows(mul, at, columns, mask)
    if gate is not None:
        by = by * activated(load_rows(gate, at, columns, mask), 0, PRECISE)
    return by


@triton.jit
def store_norm(
    result, s, number, scale, SCALE_STEP: tl.constexpr, y, s_out, copy, at, columns, mask, D: tl.constexpr
):  # fmt: skip
    """All results of some columns, whose inputs are all loaded: a result may lie where an input did."""
    result = scaled(result, number, scale, SCALE_STEP, columns, D)
    store_rows(y, at, columns, mask, result)
    if s_out is not None:
        store_rows(s_out, at, columns, mask, s)
    if copy is not None:
        store_rows(copy, at, columns, mask, result)


@triton.jit
def tile_of(rows, tokens, heads, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Where a program's rows lie, which of them exist, and its first columns."""
    first = tl.program_id(0) * ROWS
    inside = (first + tl.arange(0, ROWS) < rows)[:, None]
    return rows_at(first, ROWS, tokens, heads), inside, tl.arange(0, BLOCK)


@triton.jit
def rms_norm_kernel(
    x, weight, eps, add, mul, gate, residual, number, scale, SCALE_STEP: tl.constexpr, y, s_out, copy, rows, tokens,
    heads, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PRECISE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP and weight is not None:
        prefetch_columns(weight, D, BLOCK)
    begin_early(OVERLAP)
    at, inside, columns = tile_of(rows, tokens, heads, ROWS, BLOCK)
    if D <= BLOCK:
        mask = inside & (columns < D)[None, :]
        by = norm_factors(weight, mul, gate, at, columns, mask, D, PRECISE)
        joined = None
        if residual is not None:
            joined = load_rows(residual, at, columns, mask)
        s = sum_input(x, add, at, columns, mask)
        product = weighted(s, by, joined, PRECISE)
        factor = inverse_rms(tl.sum(s * s, 1), D, eps, PRECISE)
        result = normed(product, factor, joined)
        store_norm(result, s, number, scale, SCALE_STEP, y, s_out, copy, at, columns, mask, D)
    else:
        squares = tl.zeros([ROWS], tl.float32)
        for start in range(0, D, BLOCK):
            more = start + columns
            s = sum_input(x, add, at, more, inside & (more < D)[None, :])
            squares += tl.sum(s * s, 1)
        factor = inverse_rms(squares, D, eps, PRECISE)
        for start in range(0, D, BLOCK):
            more = start + columns
            mask = inside & (more < D)[None, :]
            by = norm_factors(weight, mul, gate, at, more, mask, D, PRECISE)
            joined = None
            if residual is not None:
                joined = load_rows(residual, at, more, mask)
            s = sum_input(x, add, at, more, mask)
            result = normed(weighted(s, by, joined, PRECISE), factor, joined)
            store_norm(result, s, number, scale, SCALE_STEP, y, s_out, copy, at, more, mask, D)


def in_rows(t):
    """A tensor [..., D] as [batch, token, head, D], copied only where its rows are not whole or axes cannot merge."""
    while t.ndim < 4:
        t = t[None]
    t = t.flatten(0, -4)
    return t if t.stride(-1) == 1 else t.contiguous()


def strided(t):
    """What a kernel gets of a tensor: (pointer, batch stride, token stride, head stride), or None."""
    if t is None:
        return None
    t = in_rows(t)
    return t, *t.stride()[:3]


def destination(shape, dtype, device, out):
    """What a kernel writes into: the given tensor where its rows are whole and its axes few, else a new one."""
    fits = out is not None and (out.is_contiguous() or (out.stride(-1) == 1 and out.ndim <= 4))
    return out if fits else torch.empty(shape, dtype=dtype, device=device)


def delivered(result, out):
    """The result where the caller wants it."""
    return result if out is None or out is result else out.copy_(result)


def norm_launch(D, rows):
    """The grid and the sizes of a program for rows of D."""
    block = min(triton.next_power_of_2(D), LONGEST_BLOCK)
    together = max(1, TILE // block)
    per_thread = PER_THREAD if D <= SHORT else PER_THREAD_LONG
    warps = max(1, block * together // (32 * per_thread))
    return (triton.cdiv(rows, together),), {"BLOCK": block, "ROWS": together, "num_warps": warps}


def scale_arguments(scale):
    """A scale as (number, tensor, step between its columns)."""
    if isinstance(scale, torch.Tensor):
        return None, scale.contiguous(), int(scale.numel() > 1)
    return None if scale is None else float(scale), None, 0


def rms_norm(
    x, weight=None, eps=1e-6, *, add=None, mul=None, gate=None, residual=None, scale=None, return_sum=False,
    extra_dtype=None, head_major=False, out=None,
):  # fmt: skip
    natural = tuple(x.shape)
    turned = (*natural[:-3], natural[-2], natural[-3], natural[-1]) if head_major else natural
    shapes = [(natural if extra_dtype else turned, x.dtype)]
    shapes += [(natural, x.dtype)] if return_sum else []
    shapes += [(turned, extra_dtype)] if extra_dtype else []
    outs = out if isinstance(out, tuple) else (out,) * len(shapes)
    made = [destination(shape, dtype, x.device, o) for o, (shape, dtype) in zip(outs, shapes, strict=True)]
    if x.numel():
        views = list(made)
        if head_major:  # the kernel counts rows in x's order, the strides turn them
            views[-1 if extra_dtype else 0] = views[-1 if extra_dtype else 0].transpose(-3, -2)
        source, D = in_rows(x), x.shape[-1]
        grid, sizes = norm_launch(D, x.numel() // D)
        rms_norm_kernel[grid](
            strided(source), None if weight is None else weight.contiguous(), eps, strided(add), strided(mul),
            strided(gate), strided(residual), *scale_arguments(scale), strided(views[0]),
            strided(views[1]) if return_sum else None, strided(views[-1]) if extra_dtype else None,
            x.numel() // D, source.shape[1], source.shape[2], D, PRECISE=x.dtype == torch.float32, **sizes,
            **overlap(x.device),
        )  # fmt: skip
    results = tuple(map(delivered, made, outs))
    return results if len(results) > 1 else results[0]


@triton.jit
def chain_input(x, weight, residual, factor, at, columns, mask, D: tl.constexpr, PRECISE: tl.constexpr):
    """r = residual + x factor weight of some columns, or x where there is no first norm."""
    r = load_rows(x, at, columns, mask)
    if weight is not None:
        joined = load_rows(residual, at, columns, mask)
        r = normed(weighted(r, load_columns(weight, columns, D), joined, PRECISE), factor, joined)
    return r


@triton.jit
def store_chain(
    r, factor, weights, residual2, number, scale, SCALE_STEP: tl.constexpr, r_out, ys, at, columns, mask,
    D: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """y_i of some columns, and r where it is asked; r_out or y_0 may lie where residual2 does."""
    joined = None
    if residual2 is not None:
        joined = load_rows(residual2, at, columns, mask)
    if r_out is not None:
        store_rows(r_out, at, columns, mask, r)
    for i in tl.static_range(len(weights)):
        y = normed(weighted(r, load_columns(weights[i], columns, D), joined, PRECISE), factor, joined)
        store_rows(ys[i], at, columns, mask, scaled(y, number, scale, SCALE_STEP, columns, D))


@triton.jit
def rms_norm_chain_kernel(
    x, weight, residual, weights, eps, residual2, number, scale, SCALE_STEP: tl.constexpr, r_out, ys, rows, tokens,
    heads, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PRECISE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_early(OVERLAP)
    at, inside, columns = tile_of(rows, tokens, heads, ROWS, BLOCK)
    if D <= BLOCK:
        mask = inside & (columns < D)[None, :]
        r = load_rows(x, at, columns, mask)
        if weight is not None:
            joined = load_rows(residual, at, columns, mask)
            product = weighted(r, load_columns(weight, columns, D), joined, PRECISE)
            r = normed(product, inverse_rms(tl.sum(r * r, 1), D, eps, PRECISE), joined)
        second = inverse_rms(tl.sum(r * r, 1), D, eps, PRECISE)
        store_chain(
            r, second, weights, residual2, number, scale, SCALE_STEP, r_out, ys, at, columns, mask, D, PRECISE
        )  # fmt: skip
    else:
        squares = tl.zeros([ROWS], tl.float32)
        for start in range(0, D, BLOCK):
            more = start + columns
            r = load_rows(x, at, more, inside & (more < D)[None, :])
            squares += tl.sum(r * r, 1)
        factor = inverse_rms(squares, D, eps, PRECISE)
        second = factor
        if weight is not None:
            squares = tl.zeros([ROWS], tl.float32)
            for start in range(0, D, BLOCK):
                more = start + columns
                r = chain_input(x, weight, residual, factor, at, more, inside & (more < D)[None, :], D, PRECISE)
                squares += tl.sum(r * r, 1)
            second = inverse_rms(squares, D, eps, PRECISE)
        for start in range(0, D, BLOCK):
            more = start + columns
            mask = inside & (more < D)[None, :]
            r = chain_input(x, weight, residual, factor, at, more, mask, D, PRECISE)
            store_chain(
                r, second, weights, residual2, number, scale, SCALE_STEP, r_out, ys, at, more, mask, D, PRECISE
            )  # fmt: skip


def launch_chain(x, weight, residual, weights, eps, residual2, scale, r, ys):
    source, D = in_rows(x), x.shape[-1]
    grid, sizes = norm_launch(D, x.numel() // D)
    rms_norm_chain_kernel[grid](
        strided(source), weight, strided(residual), tuple(w.contiguous() for w in weights), eps, strided(residual2),
        *scale_arguments(scale), strided(r), tuple(map(strided, ys)), x.numel() // D, source.shape[1],
        source.shape[2], D, PRECISE=x.dtype == torch.float32, **sizes, **overlap(x.device),
    )  # fmt: skip


def rms_norm_many(x, weights, eps=1e-6, *, out=None):
    outs = out or (None,) * len(weights)
    ys = [destination(x.shape, x.dtype, x.device, o) for o in outs]
    if x.numel():
        launch_chain(x, None, None, weights, eps, None, None, None, ys)
    return tuple(map(delivered, ys, outs))


def rms_norm_chain(x, weight, residual, weights, eps=1e-6, *, residual2=None, scale=None, out=None):
    outs = out or (None,) * (len(weights) + 1)
    r, *ys = made = [destination(x.shape, x.dtype, x.device, o) for o in outs]
    if x.numel():
        launch_chain(x, weight.contiguous(), residual, weights, eps, residual2, scale, r, ys)
    return tuple(map(delivered, made, outs))


@triton.jit
def span_of(tokens, heads, D, BLOCK: tl.constexpr):
    """The row, the columns and the mask of a program that does one span of a row."""
    blocks = tl.cdiv(D, BLOCK)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return rows_at(tl.program_id(0) // blocks, 1, tokens, heads), columns, (columns < D)[None, :]


@triton.jit
def glu_kernel(
    gate, up, y, tokens, heads, D, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_early(OVERLAP)
    at, columns, mask = span_of(tokens, heads, D, BLOCK)
    g, u = load_rows(gate, at, columns, mask), load_rows(up, at, columns, mask)
    store_rows(y, at, columns, mask, activated(g, ACTIVATION, PRECISE) * u)


@triton.jit
def softcap_kernel(
    x, cap, y, tokens, heads, D, PRECISE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    begin_early(OVERLAP)
    at, columns, mask = span_of(tokens, heads, D, BLOCK)
    v = load_rows(x, at, columns, mask)
    v = v / cap if PRECISE else v * (1.0 / cap)
    store_rows(y, at, columns, mask, tanh(v, PRECISE) * cap)


def long_rows(*tensors):
    """Tensors of one shape as `in_rows`, but as one long row where all of them lie together."""
    together = all(t.is_contiguous() for t in tensors)
    return [t.view(1, 1, 1, -1) if together else in_rows(t) for t in tensors]


def span_launch(rows):
    """The grid over spans of rows [batch, token, head, D], and the arguments that count them."""
    batch, tokens, heads, D = rows.shape
    return (batch * tokens * heads * triton.cdiv(D, SPAN),), (tokens, heads, D)


def glu(gate, up, activation="silu", *, out=None):
    y = destination(up.shape, up.dtype, up.device, out)
    if y.numel():
        g, u, rows = long_rows(gate, up, y)
        grid, counts = span_launch(rows)
        glu_kernel[grid](
            strided(g), strided(u), strided(rows), *counts, ACTIVATIONS[activation], up.dtype == torch.float32, SPAN,
            num_warps=SPAN_WARPS, **overlap(up.device),
        )  # fmt: skip
    return delivered(y, out)


def softcap(x, cap, *, out=None):
    y = destination(x.shape, x.dtype, x.device, out)
    if y.numel():
        source, rows = long_rows(x, y)
        grid, counts = span_launch(rows)
        softcap_kernel[grid](
            strided(source), float(cap), strided(rows), *counts, x.dtype == torch.float32, SPAN, num_warps=SPAN_WARPS,
            **overlap(x.device),
        )  # fmt: skip
    return delivered(y, out)


@triton.jit
def rope_kernel(
    x, y, positions, position_batch, inv_freq, scale, tokens, heads, ROTARY: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: its angles once, then the rotations, then the REST of the channels as they are."""
    begin_early(OVERLAP)
    batch, token = tl.program_id(0) // tokens, tl.program_id(0) % tokens
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = (batch.to(tl.int64), token.to(tl.int64), head.to(tl.int64))
    pairs, present = tl.arange(0, PAIRS), (head < heads)[:, None]
    half: tl.constexpr = ROTARY // 2
    position = tl.load(positions + batch.to(tl.int64) * position_batch + token).to(tl.float64)
    frequency = tl.load(inv_freq + pairs, pairs < half, 0).to(tl.float64)
    cos, sin = cos_sin(position * frequency * 0.6366197723675814)
    cos, sin = (cos * scale)[None, :], (sin * scale)[None, :]
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PAIRS)
        mask = present & (columns < ROTARY)[None, :]
        a, b = tl.split(tl.reshape(load_rows(x, at, columns, mask), [HEADS, PAIRS, 2]))
        turned = tl.join(a * cos - b * sin, a * sin + b * cos)
        store_rows(y, at, columns, mask, tl.reshape(turned, [HEADS, 2 * PAIRS]))
    else:
        mask = present & (pairs < half)[None, :]
        a, b = load_rows(x, at, pairs, mask), load_rows(x, at, half + pairs, mask)
        store_rows(y, at, pairs, mask, a * cos - b * sin)
        store_rows(y, at, half + pairs, mask, a * sin + b * cos)
    if REST > 0:
        columns = tl.arange(0, BLOCK)
        mask = present & (columns < REST)[None, :]
        store_rows(y, at, ROTARY + columns, mask, load_rows(x, at, ROTARY + columns, mask))


def rope(x, positions, inv_freq, *, rotary=None, interleaved=False, scale=1.0, out=None):
    y = destination(x.shape, x.dtype, x.device, out)
    if x.numel():
        source, D = in_rows(x), x.shape[-1]
        B, T, H, _ = source.shape
        rotary = D if rotary is None else rotary
        rest = 0 if y is x else D - rotary  # in place they are there already
        tile = ROPE_TILE_FEW if facts(x.device).processors > B * T else ROPE_TILE
        together = min(triton.next_power_of_2(H), max(1, tile // triton.next_power_of_2(D)))
        rope_kernel[(B * T, triton.cdiv(H, together))](
            strided(source), strided(y), positions.contiguous(), T if positions.ndim > 1 else 0,
            inv_freq.contiguous(), float(scale), T, H, rotary, rest, interleaved, together,
            triton.next_power_of_2(rotary // 2), triton.next_power_of_2(max(rest, 1)), num_warps=ROPE_WARPS,
            **overlap(x.device),
        )  # fmt: skip
    return delivered(y, out)
