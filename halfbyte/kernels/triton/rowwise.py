"""Row ops on a GPU: bytes set their floor, so each input is read once and each output written once, 16 bytes at a time.

A row that fits stays in registers between its statistic and its results: one program a row, or several rows a program
where rows are short (heads), so that a warp owns whole rows and sums them without shared memory. Longer rows are read
again for each pass. Launch sizes depend on the row alone, so a row's bits do not depend on its batch.

float32 rows get float64 where a sum may cancel, and an exponential of full precision; 16-bit
rows would round both away.
"""

import torch
import triton
import triton.language as tl

from . import device

INTERPRETED = tl.constexpr(device.INTERPRETED)
# 2026-11-15, H200: elements of a program's tile and of each thread.
LONGEST_BLOCK = 16384
TILE = 2048
PER_THREAD = 16
SPAN, SPAN_WARPS = 1024, 4  # elements and warps of a program of glu and softcap
ROPE_TILE, ROPE_WARPS = 4096, 4

ACTIVATIONS = {"silu": tl.constexpr(0), "gelu_tanh": tl.constexpr(1), "sigmoid": tl.constexpr(2)}


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """float32 to dtype, to nearest; Triton's interpreter would truncate to bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        value = tl.where(value == value, nearest, bits).to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def exact_exp(x):
    """e^x to the last place or two, as 2^whole e^rest: the product with log2(e) alone would lose what |x| is long."""
    x = tl.where(x < -104.0, -104.0, tl.where(x > 89.0, 89.0, x))
    whole = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - whole * 0.693359375) + whole * 2.12194440e-4
    return tl.exp2(rest * 1.4426950408889634) * tl.exp2(whole)


@triton.jit
def exp(x, EXACT: tl.constexpr):
    return exact_exp(x) if EXACT else tl.exp(x)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """A polynomial near 0, where 1 - 2 / (1 + e^2x) would cancel (coefficients of Cephes' tanhf)."""
    size, square = tl.abs(x), x * x
    near = -5.70498872745e-3 * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    far = 1.0 - 2.0 / (1.0 + exp(2.0 * size, EXACT))
    return tl.where(size < 0.625, near * square * x + x, tl.where(x < 0, -far, far))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """silu, gelu_tanh or sigmoid of float32 x; gelu's (1 + tanh u) / 2 is 1 / (1 + e^-2u)."""
    if ACTIVATION == 0:
        return x / (1.0 + exp(-x, EXACT))
    elif ACTIVATION == 1:
        return x / (1.0 + exp(-1.5957691216057308 * (x + 0.044715 * x * x * x), EXACT))
    else:
        return 1.0 / (1.0 + exp(-x, EXACT))


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
def inverse_rms(squares, D: tl.constexpr, eps, EXACT: tl.constexpr):
    """1 / sqrt(mean + eps) of the rows' sums of squares, as a column."""
    if EXACT:
        factor = 1.0 / tl.sqrt(squares.to(tl.float64) / D + eps)
    else:
        factor = tl.div_rn(1.0, tl.sqrt_rn(squares / D + eps))
    return factor[:, None]


@triton.jit
def product_sum(s, factor, by, joined, EXACT: tl.constexpr):
    """s factor by, and what joins it: that sum is exact until it is rounded once, since the two may cancel."""
    if joined is None:
        return s * factor.to(tl.float32) * by
    elif EXACT:
        return (s.to(tl.float64) * factor * by.to(tl.float64) + joined.to(tl.float64)).to(tl.float32)
    else:
        return joined + s * factor * by


@triton.jit
def scaled(y, number, scale, SCALE_STEP: tl.constexpr, columns, D: tl.constexpr):
    """y times a number, or times a tensor of one value (step 0) or of one a column (step 1)."""
    if number is not None:
        y = y * number
    if scale is not None:
        y = y * (load_columns(scale, columns, D) if SCALE_STEP else tl.load(scale).to(tl.float32))
    return y


@triton.jit
def norm_factors(weight, mul, gate, at, columns, mask, D: tl.constexpr, EXACT: tl.constexpr):
    """weight mul silu(gate) of some columns."""
    by = tl.full([1, 1], 1.0, tl.float32)
    if weight is not None:
        by = load_columns(weight, columns, D)
    if mul is not None:
        by = by * load_rows(mul, at, columns, mask)
    if gate is not None:
        by = by * activated(load_rows(gate, at, columns, mask), 0, EXACT)
    return by


@triton.jit
def store_norm(
    s, factor, by, joined, number, scale, SCALE_STEP: tl.constexpr, y, s_out, copy, at, columns, mask, D: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """All results of some columns, whose inputs are all loaded: a result may lie where an input did."""
    result = product_sum(s, factor, by, joined, EXACT)
    result = scaled(result, number, scale, SCALE_STEP, columns, D)
    store_rows(y, at, columns, mask, result)
    if s_out is not None:
        store_rows(s_out, at, columns, mask, s)
    if copy is not None:
        store_rows(copy, at, columns, mask, result)


@triton.jit
def rms_norm_kernel(
    x, weight, eps, add, mul, gate, residual, number, scale, SCALE_STEP: tl.constexpr, y, s_out, copy, rows, tokens,
    heads, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    at = rows_at(first, ROWS, tokens, heads)
    inside = (first + tl.arange(0, ROWS) < rows)[:, None]
    columns = tl.arange(0, BLOCK)
    mask = inside & (columns < D)[None, :]
    if D <= BLOCK:
        # The weight is asked for first: placed after x, ptxas would wait for x before it asks.
        by = norm_factors(weight, mul, gate, at, columns, mask, D, EXACT)
        joined = None
        if residual is not None:
            joined = load_rows(residual, at, columns, mask)
        s = sum_input(x, add, at, columns, mask)
        factor = inverse_rms(tl.sum(s * s, 1), D, eps, EXACT)
        store_norm(
            s, factor, by, joined, number, scale, SCALE_STEP, y, s_out, copy, at, columns, mask, D, EXACT
        )  # fmt: skip
    else:
        squares = tl.zeros([ROWS], tl.float32)
        for start in range(0, D, BLOCK):
            more = start + columns
            s = sum_input(x, add, at, more, inside & (more < D)[None, :])
            squares += tl.sum(s * s, 1)
        factor = inverse_rms(squares, D, eps, EXACT)
        for start in range(0, D, BLOCK):
            more = start + columns
            mask = inside & (more < D)[None, :]
            s = sum_input(x, add, at, more, mask)
            by = norm_factors(weight, mul, gate, at, more, mask, D, EXACT)
            joined = None
            if residual is not None:
                joined = load_rows(residual, at, more, mask)
            store_norm(
                s, factor, by, joined, number, scale, SCALE_STEP, y, s_out, copy, at, more, mask, D, EXACT
            )  # fmt: skip


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


def destinations(shapes, device, out):
    """One tensor a result to write into, rows whole: the given one where it is so itself."""
    outs = out if isinstance(out, tuple) else (out,) * len(shapes)
    return outs, [
        o if o is not None and (o.is_contiguous() or (o.stride(-1) == 1 and o.ndim <= 4))
        else torch.empty(shape, dtype=dtype, device=device)
        for o, (shape, dtype) in zip(outs, shapes, strict=True)
    ]  # fmt: skip


def delivered(outs, made):
    """The results where the caller wants them."""
    return tuple(m if o is None or o is m else o.copy_(m) for o, m in zip(outs, made, strict=True))


def norm_launch(D, rows):
    """The grid and the sizes of a program for rows of D."""
    block = min(triton.next_power_of_2(D), LONGEST_BLOCK)
    together = max(1, TILE // block)
    warps = min(16, max(1, block * together // (32 * PER_THREAD)))
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
    outs, made = destinations(shapes, x.device, out)
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
            x.numel() // D, source.shape[1], source.shape[2], D, EXACT=x.dtype == torch.float32, **sizes,
        )  # fmt: skip
    results = delivered(outs, made)
    return results if len(results) > 1 else results[0]


@triton.jit
def chain_input(x, weight, residual, factor, at, columns, mask, D: tl.constexpr, EXACT: tl.constexpr):
    """r = residual + x factor weight of some columns, or x where there is no first norm."""
    s = load_rows(x, at, columns, mask)
    if weight is not None:
        s = product_sum(s, factor, load_columns(weight, columns, D), load_rows(residual, at, columns, mask), EXACT)
    return s


@triton.jit
def store_chain(
    r, factor, weights, joined, number, scale, SCALE_STEP: tl.constexpr, r_out, ys, at, columns, mask, D: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """y_i of some columns, and r where it is asked."""
    if r_out is not None:
        store_rows(r_out, at, columns, mask, r)
    for i in tl.static_range(len(weights)):
        y = product_sum(r, factor, load_columns(weights[i], columns, D), joined, EXACT)
        store_rows(ys[i], at, columns, mask, scaled(y, number, scale, SCALE_STEP, columns, D))


@triton.jit
def rms_norm_chain_kernel(
    x, weight, residual, weights, eps, residual2, number, scale, SCALE_STEP: tl.constexpr, r_out, ys, rows, tokens,
    heads, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    at = rows_at(first, ROWS, tokens, heads)
    inside = (first + tl.arange(0, ROWS) < rows)[:, None]
    columns = tl.arange(0, BLOCK)
    mask = inside & (columns < D)[None, :]
    r = load_rows(x, at, columns, mask)
    if D <= BLOCK:
        joined2 = None
        if residual2 is not None:
            joined2 = load_rows(residual2, at, columns, mask)
        if weight is not None:
            by, joined = load_columns(weight, columns, D), load_rows(residual, at, columns, mask)
            r = product_sum(r, inverse_rms(tl.sum(r * r, 1), D, eps, EXACT), by, joined, EXACT)
        second = inverse_rms(tl.sum(r * r, 1), D, eps, EXACT)
        store_chain(
            r, second, weights, joined2, number, scale, SCALE_STEP, r_out, ys, at, columns, mask, D, EXACT
        )  # fmt: skip
    else:
        squares = tl.sum(r * r, 1)
        for start in range(BLOCK, D, BLOCK):
            more = start + columns
            r = load_rows(x, at, more, inside & (more < D)[None, :])
            squares += tl.sum(r * r, 1)
        factor = inverse_rms(squares, D, eps, EXACT)
        second = factor
        if weight is not None:
            squares = tl.zeros([ROWS], tl.float32)
            for start in range(0, D, BLOCK):
                more = start + columns
                r = chain_input(x, weight, residual, factor, at, more, inside & (more < D)[None, :], D, EXACT)
                squares += tl.sum(r * r, 1)
            second = inverse_rms(squares, D, eps, EXACT)
        for start in range(0, D, BLOCK):
            more = start + columns
            mask = inside & (more < D)[None, :]
            r = chain_input(x, weight, residual, factor, at, more, mask, D, EXACT)
            joined2 = None
            if residual2 is not None:
                joined2 = load_rows(residual2, at, more, mask)
            store_chain(
                r, second, weights, joined2, number, scale, SCALE_STEP, r_out, ys, at, more, mask, D, EXACT
            )  # fmt: skip


def launch_chain(x, weight, residual, weights, eps, residual2, scale, r, ys):
    source, D = in_rows(x), x.shape[-1]
    grid, sizes = norm_launch(D, x.numel() // D)
    rms_norm_chain_kernel[grid](
        strided(source), weight, strided(residual), tuple(w.contiguous() for w in weights), eps, strided(residual2),
        *scale_arguments(scale), strided(r), tuple(map(strided, ys)), x.numel() // D, source.shape[1],
        source.shape[2], D, EXACT=x.dtype == torch.float32, **sizes,
    )  # fmt: skip


def rms_norm_many(x, weights, eps=1e-6, *, out=None):
    outs, ys = destinations([(x.shape, x.dtype)] * len(weights), x.device, out)
    if x.numel():
        launch_chain(x, None, None, weights, eps, None, None, None, ys)
    return delivered(outs, ys)


def rms_norm_chain(x, weight, residual, weights, eps=1e-6, *, residual2=None, scale=None, out=None):
    outs, made = destinations([(x.shape, x.dtype)] * (len(weights) + 1), x.device, out)
    if x.numel():
        launch_chain(x, weight.contiguous(), residual, weights, eps, residual2, scale, made[0], made[1:])
    return delivered(outs, made)


@triton.jit
def span_of(blocks, BLOCK: tl.constexpr, D):
    """The row, columns and mask of a program that does one of the `blocks` spans of a row."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, columns, columns < D


@triton.jit
def glu_kernel(
    gate, up, y, gate_stride, up_stride, y_stride, blocks, D, ACTIVATION: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns, mask = span_of(blocks, BLOCK, D)
    g = tl.load(gate + row * gate_stride + columns, mask, 0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask, 0).to(tl.float32)
    result = activated(g, ACTIVATION, EXACT) * u
    tl.store(y + row * y_stride + columns, rounded(result, y.dtype.element_ty), mask)


@triton.jit
def softcap_kernel(x, cap, y, x_stride, y_stride, blocks, D, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    row, columns, mask = span_of(blocks, BLOCK, D)
    v = tl.load(x + row * x_stride + columns, mask, 0).to(tl.float32)
    tl.store(y + row * y_stride + columns, rounded(tanh(v / cap, EXACT) * cap, y.dtype.element_ty), mask)


def flat_rows(*tensors):
    """Tensors of one shape as [rows, D] of whole rows: one long row where all of them lie together."""
    if all(t.is_contiguous() for t in tensors):
        return [t.reshape(1, -1) for t in tensors]
    flat = [t.reshape(-1, t.shape[-1]) for t in tensors]
    return [t if t.stride(-1) == 1 else t.contiguous() for t in flat]


def span_launch(rows, D):
    blocks = triton.cdiv(D, SPAN)
    return blocks, (rows * blocks,), {"BLOCK": SPAN, "num_warps": SPAN_WARPS}


def writable_rows(out, like):
    """A tensor for an elementwise result whose rows are views, which `flat_rows` will not copy."""
    if out is not None and (out.is_contiguous() or (out.ndim == 2 and out.stride(-1) == 1)):
        return out
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def glu(gate, up, activation="silu", *, out=None):
    y = writable_rows(out, up)
    if y.numel():
        g, u, result = flat_rows(gate, up, y)
        blocks, grid, sizes = span_launch(*result.shape)
        glu_kernel[grid](
            g, u, result, g.stride(0), u.stride(0), result.stride(0), blocks, result.shape[1], ACTIVATIONS[activation],
            EXACT=up.dtype == torch.float32, **sizes,
        )  # fmt: skip
    return delivered((out,), (y,))[0]


def softcap(x, cap, *, out=None):
    y = writable_rows(out, x)
    if y.numel():
        source, result = flat_rows(x, y)
        blocks, grid, sizes = span_launch(*result.shape)
        softcap_kernel[grid](
            source, float(cap), result, source.stride(0), result.stride(0), blocks, result.shape[1],
            EXACT=x.dtype == torch.float32, **sizes,
        )  # fmt: skip
    return delivered((out,), (y,))[0]


@triton.jit
def cos_sin(turns):
    """cos and sin of `turns` (float64) quarter turns: reduced in float64 to an eighth of a turn about the nearest
    quarter, then Cephes' float32 polynomials, good to the last place there."""
    quarter = tl.floor(turns + 0.5)
    r = ((turns - quarter) * 1.5707963267948966).to(tl.float32)
    quadrant = (quarter - 4.0 * tl.floor(quarter * 0.25)).to(tl.int32)
    z = r * r
    sin = r + r * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    cos = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    odd = quadrant % 2 == 1
    c, s = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where((quadrant == 1) | (quadrant == 2), -c, c), tl.where(quadrant >= 2, -s, s)


@triton.jit
def rope_kernel(
    x, y, positions, position_batch, inv_freq, scale, tokens, heads, ROTARY: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: its angles once, then the rotations, then the REST of the channels as they are."""
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
    outs, (y,) = destinations([(x.shape, x.dtype)], x.device, out)
    if x.numel():
        source, D = in_rows(x), x.shape[-1]
        B, T, H, _ = source.shape
        rotary = D if rotary is None else rotary
        rest = 0 if out is x and y is x else D - rotary
        together = min(triton.next_power_of_2(H), max(1, ROPE_TILE // triton.next_power_of_2(D)))
        rope_kernel[(B * T, triton.cdiv(H, together))](
            strided(source), strided(y), positions.contiguous(), T if positions.ndim > 1 else 0,
            inv_freq.contiguous(), float(scale), T, H, rotary, rest, interleaved, together,
            triton.next_power_of_2(rotary // 2), triton.next_power_of_2(max(rest, 1)), num_warps=ROPE_WARPS,
        )  # fmt: skip
    return delivered(outs, (y,))[0]
