"""The chosen experts of few tokens, and what becomes of their results, in two launches: gate and up, then down, whose
results are weighted, added up and joined to the stream before they leave their program.

A program owns some outputs of a token and sees all its experts. The warps of a program take turns with the spans of
their rows, expert after expert, as if these were one long row (PARTS in nibbles.py), and keep weighted sums. So no
partial result is written, and every sum has one order.
"""

# ruff: noqa: RUF005, SIM300 - Triton knows no starred tuples

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .codes import chunk_words, row_words
from .device import INTERPRETED, facts, overlap
from .exact import small
from .experts import ALONE
from .matvec import LONG, activations, multiply, of_choices, products, scale_at
from .nibbles import activations_of, add_span, codes_loaded, operands, outputs_at, span_of, zeros
from .stacks import matrix, prefetch, stack
from .stream import Stream, store_row, stream_arguments, stream_rows


@triton.jit
def share_of(weights, shared_gate, token, expert, gate_step, CHOICES: tl.constexpr, A: tl.constexpr):
    """What the results of these experts are multiplied by: the router's weights [token, CHOICES], and for one beside
    them, that all tokens take, the sigmoid of its gate or 1. Past the last one 0.

    Read past the L1, which nothing may have refreshed: see job_of.
    """
    share = tl.load(weights + token * CHOICES + expert, expert < CHOICES, 0.0, cache_modifier=".cg").to(tl.float32)
    if A > CHOICES:
        gate = 1.0
        if shared_gate is not None:
            logit = tl.load(shared_gate + token * gate_step, cache_modifier=".cg").to(tl.float32)
            gate = 1.0 / (1.0 + tl.exp(-logit))
        share = tl.where(expert == CHOICES, gate, share)
    return share


@triton.jit
def begin_down(OVERLAP: tl.constexpr):
    """ids, weights and gates were complete before the launch that this one overlaps let it start (job_of)."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def expert_span(
    w, ids, weights, shared_gate, token, first, span, N, K, gate_step,
    FORMAT: tl.constexpr, CHOICES: tl.constexpr, A: tl.constexpr, EACH: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Spans `span` [1, 1, PARTS, 1] of a token's experts, EACH to an expert: their tiles, what sums are multiplied by,
    where in a row each begins as span_of counts that, and which of the token's experts they are of."""
    SPAN: tl.constexpr = 4 * codes_loaded(FORMAT.bits) * BLOCKS
    expert = span // EACH
    index = tl.load(ids + token * A + tl.minimum(expert, A - 1), cache_modifier=".cg").to(tl.int64)
    part = tl.arange(0, PARTS)[None, None, :, None]
    start = tl.where(expert < A, span % EACH, EACH) * SPAN - part * SPAN
    w = matrix(w, index, FORMAT)
    share = tl.reshape(share_of(weights, shared_gate, token, expert, gate_step, CHOICES, A) * w[3], [PARTS, 1, 1])
    return span_of(w, w, first, start, N, K, FORMAT, False, 16, BLOCKS, PARTS, EVEN), share, start, expert


@triton.jit
def fetch_rows(w, ids, token, first, N, K, FORMAT: tl.constexpr, A: tl.constexpr, LINES: tl.constexpr):
    """Ask for 16 rows of each of a token's experts to come to the L2, in LINES of 128 bytes. It takes no registers."""
    EXPERTS: tl.constexpr = triton.next_power_of_2(A)
    expert = tl.minimum(tl.arange(0, EXPERTS), A - 1)
    index = tl.load(ids + token * A + expert, cache_modifier=".cg").to(tl.int64)[:, None]
    words, scales, biases, _ = matrix(w, index, FORMAT)
    rows = tl.minimum(16, tl.cast(N - first, tl.int32))
    pitch = row_words(K, FORMAT)
    line = 32 * tl.arange(0, LINES)[None, :]  # words
    prefetch(words + (first * pitch + tl.minimum(line, rows * pitch - 1)))
    pitch = K // FORMAT.group
    EACH: tl.constexpr = 1024 // FORMAT.kind.primitive_bitwidth
    few = EACH * tl.arange(0, max(1, LINES // 8))[None, :]
    at = first * pitch + tl.minimum(few, rows * pitch - 1)
    prefetch(scales + at)
    if FORMAT.mode == "affine":
        prefetch(biases + at)


@triton.jit
def down_nibbles_kernel(
    x, ids, weights, shared_gate, w, stream, y, N, K, x_row, x_choice, gate_step, y_row,
    FORMAT: tl.constexpr, CHOICES: tl.constexpr, A: tl.constexpr, EACH: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, LINES: tl.constexpr, EVEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """16 outputs of one token, for codes of 2 and 4 bits: warp p takes spans p, p + PARTS, ...

    Registers decide whether it starts before gate_and_up has ended, so a warp holds two spans at most, and the others
    come to the L2.
    """
    begin_down(OVERLAP)
    TYPE: tl.constexpr = x.dtype.element_ty
    token, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * 16
    one = ((0x43004300 if TYPE == tl.bfloat16 else 0x3C003C00) + tl.minimum(N, 0)).to(tl.uint32)  # see nibbles_kernel
    x += token * x_row
    if OVERLAP and LINES > 0:
        fetch_rows(w, ids, token, first, N, K, FORMAT, A, LINES)
    span = tl.arange(0, PARTS)[None, None, :, None]
    tiles, share, start, expert = expert_span(
        w, ids, weights, shared_gate, token, first, span, N, K, gate_step, FORMAT, CHOICES, A, EACH, BLOCKS, PARTS, EVEN
    )  # fmt: skip
    tl.debug_barrier()  # all is asked for before any is waited for; to spare registers, ptxas would not
    if OVERLAP:
        gdc_wait()
    loaded = activations_of(x + tl.minimum(expert, A - 1) * x_choice, start, K, FORMAT, BLOCKS, PARTS)
    outputs = outputs_at(first, N, 16)
    old = stream_rows(stream, token, 1, outputs, 1)
    totals = zeros(1, PARTS, 16)[0]
    for _ in range(0, A * EACH, PARTS):
        now, times, right = tiles, share, (operands(loaded, FORMAT, PARTS),)
        span += PARTS
        tiles, share, start, expert = expert_span(
            w, ids, weights, shared_gate, token, first, span, N, K, gate_step, FORMAT, CHOICES, A, EACH, BLOCKS, PARTS,
            EVEN,
        )  # fmt: skip
        loaded = activations_of(x + tl.minimum(expert, A - 1) * x_choice, start, K, FORMAT, BLOCKS, PARTS)
        tl.debug_barrier()
        sums = add_span(zeros(1, PARTS, 16), now, right, None, one, FORMAT, TYPE, 1, 16, BLOCKS, PARTS, False)
        totals += sums[0] * times
    result, inside = tl.sum(tl.sum(totals, 2), 0), first + tl.arange(0, 16) < N
    store_row(y + token * y_row, result, stream, old, token, first // 16, outputs, inside, 0, 1, tl.float32)


@triton.jit
def expert_tile(w, ids, token, first, rows, chunk, N, K, FORMAT: tl.constexpr, A: tl.constexpr):
    """As tile_of, for chunks [C] of a token's experts counted as if their rows were one; and each one's factor.

    The chunks of a stack of matrices are counted through, so an expert's begin where those of the ones before it end.
    """
    each = K // 32
    expert = chunk // each
    index = tl.load(ids + token * A + tl.minimum(expert, A - 1), cache_modifier=".cg").to(tl.int64)
    inside = (expert < A)[:, None]
    words, scales, biases, _ = matrix(w, 0, FORMAT)
    chunk = index * N * each + chunk % each
    parts = chunk_words(words + first * row_words(K, FORMAT), rows, chunk, K, FORMAT)
    pitch = K // FORMAT.group
    groups = rows[None, :] * pitch + (chunk * 32 // FORMAT.group)[:, None]
    scale = scale_at(scales + first * pitch, groups, inside, FORMAT)
    other = scale
    if FORMAT.mode == "affine":
        other = scale_at(biases + first * pitch, groups, inside, FORMAT)
    elif FORMAT.mode == "nvfp4":
        other = scale_at(scales + first * pitch, groups + 1, inside, FORMAT)
    return parts + (scale, other), matrix(w, index, FORMAT)[3]


@triton.jit
def down_chunks_kernel(
    x, ids, weights, shared_gate, w, stream, y, N, K, x_row, gate_step, y_row,
    FORMAT: tl.constexpr, CHOICES: tl.constexpr, A: tl.constexpr, PRECISE: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """R outputs of one token, for codes of any width, C chunks at a time."""
    begin_down(OVERLAP)
    token, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * R
    rows = tl.minimum(tl.arange(0, R), tl.cast(N - 1 - first, tl.int32))
    one = (0x3F800000 + tl.minimum(N, 0)).to(tl.uint32)  # see affine_value
    x += token * x_row
    chunk, each = tl.arange(0, C), K // 32
    tile, factor = expert_tile(w, ids, token, first, rows, chunk, N, K, FORMAT, A)
    tl.debug_barrier()  # as above
    if OVERLAP:
        gdc_wait()
    outputs = outputs_at(first, N, R)
    old = stream_rows(stream, token, 1, outputs, 1)
    totals = tl.zeros([C, R], tl.float32)
    for _ in range(0, A * each, C):
        xs = activations(x, chunk, A * K, FORMAT, PRECISE)
        share = share_of(weights, shared_gate, token, chunk // each, gate_step, CHOICES, A) * factor
        totals += products(xs, one, tile, FORMAT, PRECISE, 1)[0] * share[:, None]
        chunk += C
        tile, factor = expert_tile(w, ids, token, first, rows, chunk, N, K, FORMAT, A)
    result, inside = tl.sum(totals, 0), first + tl.arange(0, R) < N
    store_row(y + token * y_row, result, stream, old, token, first // R, outputs, inside, 0, 1, tl.float32)


class Spans(NamedTuple):
    """Launch sizes of down_nibbles_kernel."""

    blocks: int  # of a span
    parts: int  # warps, each with its own spans
    fetch: bool = True  # all weights come to the L2 before they are asked for


def span_sizes(A, K, form):
    """2026-11-15, H200, mixtures of Qwen3.5-35B-A3B, with all spans of a program in registers (35000): one token in
    13.8 us as before, two in 24.4 instead of 22.0, four in 38.6 instead of 49.8. 16 warps instead of 8 cost
    one token 1.1 to 1.6 more. With spans in the L2 it takes 13000 registers, to start sooner; not measured alone yet.
    """
    block = 512 // form.bits
    most = min(4, 8 * form.group // block)
    if INTERPRETED:  # which takes as long for few warps
        return Spans(most, 4)
    return Spans(most, 4)


ROWS, WARPS = (64, 8) if INTERPRETED else (4, 2)  # of a program of down_chunks_kernel


def takes(x, ids, experts):
    """Whether these experts of these tokens are for this file: few tokens, and matrices in a stack, in whole chunks.

    Small matrices are not: products with float32 are exact there (exact.py).
    """
    few = ids.numel() <= max(ALONE, experts.count // 2) and ids.is_contiguous() and x.stride(-1) == 1
    weights = (experts.gate, experts.up, experts.down)
    if not few or any(isinstance(w, torch.Tensor) or hasattr(w, "addresses") for w in weights):
        return False
    (_, gate), (_, up), (_, down) = map(stack, weights)
    return gate == up and down.wide > 0 and not any(small(x, w) for w in weights)


def between_type(x, experts):
    """As in matvec.chosen_mlp."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 and experts.gate.shape[1] >= LONG else torch.float32


def gate_and_up(x, ids, experts, activation="silu", *, out, norm=None):
    """out[t, a] = activation(gate[e] x[t]) . (up[e] x[t]) where e = ids[t, a].   x [T, H]   out [T, A, I]

    `norm` (stream.Norm): what is left to do of the norm of x.
    """
    precise = x.dtype == torch.float32
    return multiply(of_choices(x, ids), ids, experts.gate, out, experts.up, activation, precise=precise, norm=norm)


def narrow(x, form):
    """Whether down_nibbles_kernel multiplies: as in matvec.sizes."""
    able = form.bits in (2, 4) and form.wide == 4 and x.dtype != torch.float32
    return able and (form.mode == "affine" or facts(x.device).capability > 0)


def outputs_together(x, down):
    """How many outputs a program of down_and_add makes: it adds up their squares."""
    return 16 if narrow(x, stack(down)[1]) else ROWS


def down_and_add(x, ids, weights, shared_gate, down, h, *, out, keep=None, launch=None):
    """out[t] = h[t] + sum_a weights[t, a] down[ids[t, a]] x[t, a]

    Where ids have one expert more than weights, its weight is sigmoid(shared_gate[t]), or 1 without a gate.

    x [T, A, I], whole   ids [T, A]   weights [T, A] or [T, A - 1], whole   shared_gate [T] or [T, 1]   h, out [T, H]

    `keep` (weight, weighted, squares): see stream.Stream.

    Overlapping, it reads all but x and h before it waits: the launch before it, gate_and_up, has waited for the rest.
    """
    T, A, K = x.shape
    N = down.shape[1]
    source, form = stack(down)
    steps = (0 if shared_gate is None else shared_gate.stride(0), out.stride(0))
    stream = None if h is None else stream_arguments(Stream(h, *(keep or ())))
    given = {"FORMAT": form, "CHOICES": weights.shape[1], "A": A, **overlap(x.device)}
    if narrow(x, form):
        blocks, parts, fetch = launch or span_sizes(A, K, form)
        each = triton.cdiv(K, 512 // form.bits * blocks)
        lines = triton.next_power_of_2(triton.cdiv(16 * K * form.bits, 1024)) if fetch else 0
        down_nibbles_kernel[(triton.cdiv(N, 16), T)](
            x, ids, weights, shared_gate, source, stream, out, N, K, x.stride(0), x.stride(1), *steps, **given,
            EACH=each, BLOCKS=blocks, PARTS=parts, LINES=lines, EVEN=K % (2 * form.group) == 0, num_warps=parts,
            num_stages=1,
        )  # fmt: skip
    else:
        rows, warps = launch or (ROWS, WARPS)
        down_chunks_kernel[(triton.cdiv(N, rows), T)](
            x, ids, weights, shared_gate, source, stream, out, N, K, x.stride(0), *steps, **given,
            PRECISE=x.dtype == torch.float32, R=rows, C=32 * warps, num_warps=warps,
        )  # fmt: skip
    return out
