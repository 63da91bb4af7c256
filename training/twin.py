"""The embedded model once more, for training: in parallel over whole rows, differentiable, and quantised as it ships.

It computes what halfbyte/models/qwen3_5.py computes, but over rows [B, L] that start with nothing behind them: the
delta rule in chunks, all experts at once (they are small), attention by torch. Weights live in flat float32
buffers, one a width; a step rounds each buffer once, as the export will, and the gradient passes straight through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .shape import GROUP, Shape, bits, tensors

CHUNK = 64  # tokens that the delta rule solves at once
BASE = 16  # of the blocks whose inverse is a product of powers: larger ones would lose digits
Weights = dict[str, Tensor]


class Twin(nn.Module):
    """ids [B, L] -> the stream before the last norm, and the routers' imbalance."""

    def __init__(self, shape: Shape, weights: Weights, *, compiled: bool = False) -> None:
        super().__init__()
        self.shape, self.sizes = shape, tensors(shape)
        self.names = {width: [name for name in self.sizes if bits(name) == width] for width in (4, 8, 16, 32)}
        self.flat = nn.ParameterDict({
            key(width): nn.Parameter(torch.cat([weights[name].float().flatten() for name in names]))
            for width, names in self.names.items()
        })  # fmt: skip
        wrap: Callable[[Any], Any] = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.layer = {True: wrap(attention_layer), False: wrap(delta_layer)}
        self.rounded, self.loss_of = wrap(rounded), wrap(cross_entropy)

    def split(self, flat: dict[str, Tensor]) -> Weights:
        """The tensors by name, as views of buffers laid out like our own."""
        found: Weights = {}
        for width, names in self.names.items():
            pieces = flat[key(width)].split([torch.Size(self.sizes[name]).numel() for name in names])
            found |= {name: piece.view(self.sizes[name]) for name, piece in zip(names, pieces, strict=True)}
        return found

    def weights(self, dtype: torch.dtype, *, quantised: bool) -> Weights:
        """Projections in dtype, the rest in float32; quantised, with the values that the checkpoint will stand for."""
        flat = {}
        for width in self.names:
            as_stored = self.rounded if quantised else None
            flat[key(width)] = Straight.apply(self.flat[key(width)], width, dtype if width <= 8 else None, as_stored)
        return self.split(flat)

    def forward(self, ids: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        turn = rotation(self.shape, ids.shape[1], ids.device)
        h = F.embedding(ids, weights["embed_tokens.weight"]).float()
        imbalance = h.new_zeros(())
        for index in range(self.shape.layers):
            inside = f"layers.{index}."
            own = {name.removeprefix(inside): w for name, w in weights.items() if name.startswith(inside)}
            h, extra = self.layer[self.shape.attends(index)](h, own, turn, self.shape)
            imbalance = imbalance + extra
        return h, imbalance / self.shape.layers

    def logits(self, ids: Tensor, weights: Weights) -> Tensor:
        h, _ = self(ids, weights)
        table = weights["embed_tokens.weight"]
        return (rms(h, weights["norm.weight"], self.shape.eps).to(table.dtype) @ table.T).float()

    def losses(self, ids: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """Nats [B, L - 1] that each next token costs, and the routers' imbalance."""
        h, imbalance = self(ids[:, :-1], weights)
        cost = self.loss_of(h, weights["norm.weight"], weights["embed_tokens.weight"], ids[:, 1:], self.shape.eps)
        return cost, imbalance


def key(width: int) -> str:
    return f"bits{width}"


class Straight(torch.autograd.Function):
    """Weights as the checkpoint will hold them; the gradient does not see the rounding."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, width: int, dtype: torch.dtype | None, as_stored: Any) -> Tensor:
        return (flat if as_stored is None else as_stored(flat, width)).to(dtype or flat.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.float(), None, None, None


def rounded(flat: Tensor, width: int) -> Tensor:
    """What the checkpoint will stand for: halfbyte.ops.formats.affine_codes of the bfloat16 weights, and back."""
    if width > 8:
        return flat.bfloat16().float() if width == 16 else flat
    grouped, top = flat.bfloat16().float().view(-1, GROUP), (1 << width) - 1
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    from_low = low.abs() > high.abs()
    scale = ((high - low) / torch.full_like(low, top)).clamp(min=1e-7)
    scale, edge = torch.where(from_low, scale, -scale), torch.where(from_low, low, high)
    steps = torch.round(edge / scale)
    scale = torch.where(steps != 0, edge / steps, scale)
    bias = torch.where(steps != 0, edge, 0.0)
    codes = torch.round((grouped - bias) / scale).clamp(0, top)
    return (codes * scale.bfloat16().float() + bias.bfloat16().float()).flatten()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def cross_entropy(h: Tensor, norm: Tensor, table: Tensor, targets: Tensor, eps: float) -> Tensor:
    logits = (rms(h, norm, eps).to(table.dtype) @ table.T).float()
    return logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]


def attention_layer(h: Tensor, w: Weights, turn: tuple[Tensor, Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
    h = h + attention(normed(h, w, "input_layernorm", shape), w, turn, shape).float()
    return mixed(h, w, shape)


def delta_layer(h: Tensor, w: Weights, turn: tuple[Tensor, Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
    h = h + delta_net(normed(h, w, "input_layernorm", shape), w, shape).float()
    return mixed(h, w, shape)


def normed(h: Tensor, w: Weights, name: str, shape: Shape) -> Tensor:
    """In the dtype of the projections."""
    return rms(h, w[f"{name}.weight"], shape.eps).to(w["mlp.gate.weight"].dtype)


def mixed(h: Tensor, w: Weights, shape: Shape) -> tuple[Tensor, Tensor]:
    y, imbalance = mixture(normed(h, w, "post_attention_layernorm", shape), w, shape)
    return h + y.float(), imbalance


def rotation(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [L, rotary / 2] of every position."""
    rotary = int(shape.head_size * shape.rotary_share)
    rate = shape.rotary_base ** (-torch.arange(0, rotary, 2, dtype=torch.float64, device=device) / rotary)
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * rate
    return angle.cos().float(), angle.sin().float()


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, L, heads, D]: the first channels rotated, half against half."""
    cos, sin = (one[:, None, :] for one in turn)
    half = cos.shape[-1]
    left, right, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)


def attention(x: Tensor, w: Weights, turn: tuple[Tensor, Tensor], shape: Shape) -> Tensor:
    D = shape.head_size
    q, gate = (x @ w["self_attn.q_proj.weight"].T).unflatten(-1, (shape.heads, 2 * D)).split([D, D], -1)
    k, v = ((x @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (shape.kv_heads, D)) for name in "kv")
    q = turned(rms(q, w["self_attn.q_norm.weight"], shape.eps), turn).to(x.dtype)
    k = turned(rms(k, w["self_attn.k_norm.weight"], shape.eps), turn).to(x.dtype)
    k, v = (one.repeat_interleave(shape.heads // shape.kv_heads, 2) for one in (k, v))
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    o = o.transpose(1, 2) * torch.sigmoid(gate)
    return o.flatten(2) @ w["self_attn.o_proj.weight"].T


def mixture(x: Tensor, w: Weights, shape: Shape) -> tuple[Tensor, Tensor]:
    """All experts as one wide one: what a token does not choose is multiplied by 0 before the way down."""
    logits = (x @ w["mlp.gate.weight"].T).float()
    chance = torch.softmax(logits, -1)
    order = torch.arange(shape.experts, device=x.device)
    mine, other = logits[..., :, None], logits[..., None, :]
    before = (other > mine) | ((other == mine) & (order[None, :] < order[:, None]))  # ties go to the lower id
    chosen = (before.sum(-1) < shape.chosen).float()
    share = chance * chosen
    share = share / share.sum(-1, keepdim=True)
    gate, up = (x @ w[f"mlp.switch_mlp.{name}_proj.weight"].flatten(0, 1).T for name in ("gate", "up"))
    inner = (F.silu(gate) * up).unflatten(-1, (shape.experts, shape.inner)) * share[..., None].to(x.dtype)
    y = inner.flatten(-2) @ w["mlp.switch_mlp.down_proj.weight"].transpose(1, 2).flatten(0, 1)
    gate, up = (x @ w[f"mlp.shared_expert.{name}_proj.weight"].T for name in ("gate", "up"))
    beside = (F.silu(gate) * up) @ w["mlp.shared_expert.down_proj.weight"].T
    y = y + torch.sigmoid(x @ w["mlp.shared_expert_gate.weight"].T) * beside
    imbalance = shape.experts / shape.chosen * (chosen.mean((0, 1)) * chance.mean((0, 1))).sum()  # 1 is even
    return y, imbalance


def delta_net(x: Tensor, w: Weights, shape: Shape) -> Tensor:
    """A short convolution, then the gated delta rule."""
    D, Hk, Hv, dtype = shape.delta_size, shape.key_heads, shape.value_heads, x.dtype
    seen = F.pad(x @ w["linear_attn.in_proj_qkv.weight"].T, (0, 0, shape.convolution - 1, 0))
    taps, length = w["linear_attn.conv1d.weight"].to(dtype)[..., 0], x.shape[1]
    wave = sum(taps[:, j] * seen[:, j : j + length] for j in range(shape.convolution))
    q, k, v = F.silu(wave).split([Hk * D, Hk * D, Hv * D], -1)  # type: ignore[arg-type]
    q, k = (unit(part.unflatten(-1, (Hk, D))).repeat_interleave(Hv // Hk, 2) for part in (q, k))
    a, b = (x @ w[f"linear_attn.in_proj_{name}.weight"].T for name in "ab")
    rate = F.softplus(a.float() + w["linear_attn.dt_bias"])
    decay = -w["linear_attn.A_log"].exp() * rate
    o = gated_delta(q * D**-0.5, k, v.unflatten(-1, (Hv, D)), decay, torch.sigmoid(b.float()), dtype)
    gate = (x @ w["linear_attn.in_proj_z.weight"].T).unflatten(-1, (Hv, D))
    o = rms(o, w["linear_attn.norm.weight"], shape.eps) * F.silu(gate.float())
    return o.to(dtype).flatten(2) @ w["linear_attn.out_proj.weight"].T


def unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, dtype: torch.dtype) -> Tensor:
    """S = g S;  S = S + beta (v - S k) k^T;  o = S q, with decay = log g, from S = 0: all chunks side by side.

    q, k, v [B, L, H, D]   decay, beta [B, L, H] float32   ->   o [B, L, H, D], in dtype

    In a chunk, the changes U that its tokens make to the state solve (I + A) U = beta (v - g S k): U = V - W S, and
    the state behind it is M S + K. That is linear in S, so the states are a scan of matrix products.
    Large products are formed in dtype, the inverse and the states in float32.
    """
    length, wide = q.shape[1], torch.promote_types(dtype, torch.float32)
    short = -length % CHUNK
    q, k, v = (chunks(F.pad(one, (0, 0, 0, 0, 0, short))) for one in (q, k, v))
    decay, beta = (chunks(F.pad(one, (0, 0, 0, short))[..., None]) for one in (decay, beta))  # [B, H, N, C, 1]
    q, k, v = (one.to(dtype) for one in (q, k, v))
    since = decay.cumsum(-2)  # logarithm of what is left of the state before the chunk
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    left = (since - since.mT).masked_fill(~lower, float("-inf")).exp()
    A = (beta * left * (k @ k.mT).to(wide)).tril(-1)
    T = inverse(A).to(dtype)
    V = T @ (beta * v).to(dtype)
    W = T @ (beta * since.exp() * k).to(dtype)
    last = since[..., -1:, :]
    kept = ((last - since).exp() * k).to(dtype).mT
    keep = last.exp() * torch.eye(k.shape[-1], device=q.device)
    states = scan(keep - (kept @ W).to(wide), (kept @ V).to(wide))
    before = F.pad(states[:, :, :-1], (0, 0, 0, 0, 1, 0)).to(dtype)  # a row begins with nothing
    U = V - W @ before
    o = (since.exp() * q).to(dtype) @ before + (left * (q @ k.mT).to(wide)).to(dtype) @ U
    return o.flatten(2, 3).transpose(1, 2)[:, :length]


def chunks(x: Tensor) -> Tensor:
    """[B, L, H, D] -> [B, H, L / CHUNK, CHUNK, D]"""
    return x.transpose(1, 2).unflatten(2, (-1, CHUNK))


def scan(M: Tensor, K: Tensor) -> Tensor:
    """S[n] = M[n] S[n - 1] + K[n] along axis 2, in log2(n) rounds."""
    reach = 1
    while reach < K.shape[2]:
        K = torch.cat([K[:, :, :reach], K[:, :, reach:] + M[:, :, reach:] @ K[:, :, :-reach]], 2)
        M = torch.cat([M[:, :, :reach], M[:, :, reach:] @ M[:, :, :-reach]], 2)
        reach *= 2
    return K


def inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 of strictly lower matrices [..., C, C]: small blocks by powers, then two of them at a time.

    (I - A)(I + A^2)(I + A^4)... ends, since A^C = 0; but its powers grow before they vanish, so only for small C.
    """
    N = -diagonal_blocks(A, BASE)
    X = torch.eye(BASE, device=A.device) + N
    for _ in range(BASE.bit_length() - 2):
        N = N @ N
        X = X + X @ N
    size = BASE
    while size < A.shape[-1]:
        upper, lower = X[..., 0::2, :, :], X[..., 1::2, :, :]
        corner = -(lower @ diagonal_blocks(A, 2 * size)[..., size:, :size] @ upper)
        X = torch.cat([F.pad(upper, (0, size)), torch.cat([corner, lower], -1)], -2)
        size *= 2
    return X[..., 0, :, :]


def diagonal_blocks(A: Tensor, size: int) -> Tensor:
    """[..., C, C] -> [..., C / size, size, size]"""
    cut = A.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return cut.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
