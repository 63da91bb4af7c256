"""Cases of the experts: stacks, one buffer with offsets, separate buffers; few tokens and many; any number chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..check import tensors
from ..ops.experts import Experts, Projection, Scattered, expert_mlp, expert_qmm
from ..ops.formats import Packed
from .case import Case, Random
from .quant import Weight, affine, dense, large_affine, small_float


def stacked(random: Random, weight: Weight, E: int, N: int, K: int) -> Projection:
    return weight(random, (E, N, K))


def in_one_buffer(random: Random, weight: Weight, E: int, N: int, K: int) -> Projection:
    """Experts in one flat buffer a part, in another order and with gaps."""
    w = weight(random, (E, N, K))
    assert isinstance(w, Packed) and w.biases is not None
    buffers, offsets = [], []
    for part, gap in ((w.words.view(torch.int32), 3), (w.scales, 5), (w.biases, 7)):
        size = part[0].numel() + gap
        flat = torch.zeros(E * size, dtype=part.dtype)
        places = [(E - 1 - e) * size + gap for e in range(E)]
        for e, at in enumerate(places):
            flat[at : at + part[e].numel()] = part[e].reshape(-1)
        buffers.append(flat)
        offsets.append(places)
    return Scattered.at_elements(buffers, offsets, (N, K), w.bits, w.group)


def in_separate_buffers(random: Random, weight: Weight, E: int, N: int, K: int) -> Projection:
    """An unaligned blob of bytes for each expert."""
    w = weight(random, (E, N, K))
    assert isinstance(w, Packed) and w.biases is not None
    parts = [t.view(torch.uint8).reshape(E, -1) for t in (w.words.view(torch.int32), w.scales, w.biases)]
    sizes = [part.shape[1] for part in parts]
    offsets = [1, 2 + sizes[0], 7 + sizes[0] + sizes[1]]
    blobs = []
    for e in range(E):
        blob = torch.zeros(offsets[2] + sizes[2], dtype=torch.uint8)
        for part, at, size in zip(parts, offsets, sizes, strict=True):
            blob[at : at + size] = part[e]
        blobs.append(blob)
    return Scattered.at_bytes(blobs, offsets, (N, K), w.bits, w.group, w.mode, w.scale_dtype)


def beside_a_shared(random: Random, weight: Weight, E: int, N: int, K: int) -> Projection:
    """A stack of E - 1 experts, and the last one in buffers of its own: a shared expert is called with the others."""
    stack, own = weight(random, (E - 1, N, K)), weight(random, (1, N, K))
    assert isinstance(stack, Packed) and isinstance(own, Packed)

    def parts(name: str) -> tuple[Tensor, ...]:
        each = (getattr(w, name) for w in (stack, own))
        return tuple(row for t in each for row in t.view(torch.uint8).reshape(len(t), -1))

    words, scales, biases = (parts(name) for name in ("words", "scales", "biases"))
    return Scattered(words, scales, biases, N, K, stack.bits, stack.group, stack.mode, stack.scale_dtype)


FORMS = {
    "stacked": stacked,
    "one-buffer": in_one_buffer,
    "separate": in_separate_buffers,
    "shared": beside_a_shared,
}


def distinct_ids(random: Random, T: int, A: int, E: int) -> Tensor:
    """A choices a token, different from each other."""
    return random.normal(T, E).argsort(-1)[:, :A].int()


def ids_for(form: str, random: Random, T: int, A: int, E: int) -> Tensor:
    """As `distinct_ids`; where the last expert is a shared one, it is everybody's last choice."""
    if form != "shared":
        return distinct_ids(random, T, A, E)
    shared = torch.full((T, 1), E - 1, dtype=torch.int32, device=random.device)
    return torch.cat([distinct_ids(random, T, A - 1, E - 1), shared], 1)


def touched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The weights of the experts that were chosen, the rows in and out."""
    x, ids, chosen = args[:3]
    parts = [chosen.gate, chosen.up, chosen.down] if isinstance(chosen, Experts) else [chosen]
    held = sum(int(t.nbytes) for t in tensors(parts))
    share = int(ids.unique().numel()) / parts[0].shape[0]
    return int(held * share + x.nbytes + ids.numel() * parts[-1].shape[1] * x.element_size())


def arithmetic(T: int, flops: float) -> Callable[[tuple[Any, ...], dict[str, Any]], float] | None:
    """What sets the floor of many tokens; few tokens wait for the weights."""
    return (lambda *_: flops) if T >= 512 else None


def project(
    T: int,
    A: int,
    E: int,
    N: int,
    K: int,
    *,
    weight: Weight,
    name: str,
    form: str = "stacked",
    own: bool = False,
    serving: bool = False,
    only: str | None = None,
) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        w = FORMS[form](random, weight, E, N, K)
        x = random.normal(*((T, A, K) if own else (T, K)), dtype=dtype)
        return (x, ids_for(form, random, T, A, E), w), {}

    said = f"{T}x{A}-of-{E}x{N}x{K}-{name}-{form}{'-own' if own else ''}"
    return Case(expert_qmm, said, build, serving, touched=touched, flops=arithmetic(T, 2.0 * T * A * N * K), only=only)


def network(
    T: int,
    A: int,
    E: int,
    I: int,  # noqa: E741
    H: int,
    *,
    weight: Weight,
    name: str,
    form: str = "stacked",
    activation: str = "silu",
    own: bool = False,
    strided: bool = False,
    serving: bool = False,
    only: str | None = None,
) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        x = make(*((T, A, H) if own else (T, H)), dtype=dtype)
        shapes = ((E, I, H), (E, I, H), (E, H, I))
        experts = Experts(*(FORMS[form](random, weight, *shape) for shape in shapes))
        return (x, ids_for(form, random, T, A, E), experts, activation), {}

    said = f"{T}x{A}-of-{E}x{I}x{H}-{name}-{form}-{activation}"
    said += ("-own" if own else "") + ("-strided" if strided else "")
    return Case(expert_mlp, said, build, serving, touched=touched, flops=arithmetic(T, 6.0 * T * A * I * H), only=only)


CASES = [
    project(3, 2, 5, 19, 128, weight=affine(), name="4bit"),
    project(7, 3, 4, 530, 128, weight=affine(), name="4bit", form="separate"),
    project(1, 10, 13, 9, 64, weight=affine(4, 32), name="4bit", form="one-buffer"),
    project(2, 3, 4, 11, 128, weight=affine(4, 32), name="4bit", form="separate", own=True),
    project(5, 2, 3, 7, 70, weight=dense(torch.bfloat16), name="bf16"),
    project(5, 2, 6, 7, 64, weight=small_float("mxfp4"), name="mxfp4"),
    project(0, 2, 3, 8, 64, weight=affine(), name="4bit"),
    project(1, 8, 32, 512, 2048, weight=affine(), name="4bit", serving=True),
    network(1, 2, 4, 64, 128, weight=affine(), name="4bit"),
    network(7, 3, 5, 96, 160, weight=affine(2, 32), name="2bit", activation="gelu_tanh"),
    network(9, 2, 3, 64, 64, weight=affine(8, 32), name="8bit", form="one-buffer"),
    network(9, 2, 3, 256, 320, weight=affine(8, 32), name="8bit", form="one-buffer"),
    network(2, 12, 16, 64, 64, weight=affine(), name="4bit", form="separate", own=True),
    network(4, 1, 1, 33, 47, weight=dense(torch.float32), name="f32", activation="sigmoid"),
    network(3, 2, 4, 64, 96, weight=small_float("mxfp8"), name="mxfp8", strided=True),
    network(0, 2, 4, 64, 64, weight=affine(), name="4bit"),
    network(1, 8, 16, 512, 2048, weight=affine(), name="4bit", serving=True),
    network(64, 8, 16, 512, 1024, weight=affine(), name="4bit", serving=True),
    network(1, 1, 1, 512, 2048, weight=affine(), name="4bit-shared", serving=True),
    project(45, 3, 7, 70, 160, weight=affine(4, 32, torch.float16), name="4bit-f16"),
    project(40, 2, 5, 33, 96, weight=affine(5, 32), name="5bit"),
    project(50, 2, 3, 65, 128, weight=dense(torch.float16), name="f16"),
    network(40, 2, 5, 64, 96, weight=affine(3, 32), name="3bit", activation="gelu_tanh", own=True),
    network(37, 3, 6, 128, 64, weight=affine(), name="4bit", form="shared"),
    project(90, 2, 2, 1100, 512, weight=affine(), name="4bit", own=True),
    network(75, 2, 2, 256, 256, weight=affine(4, 32), name="4bit-g32"),
    network(75, 2, 2, 128, 256, weight=affine(), name="4bit"),
    project(2048, 8, 256, 512, 2048, weight=large_affine, name="4bit", serving=True, only="cuda"),
    network(1, 8, 256, 512, 2048, weight=large_affine, name="4bit", serving=True, only="cuda"),
    network(1, 9, 257, 512, 2048, weight=large_affine, name="4bit", form="shared", serving=True, only="cuda"),
    network(1, 1, 1, 512, 2048, weight=large_affine, name="4bit", serving=True, only="cuda"),
    network(8, 8, 256, 512, 2048, weight=large_affine, name="4bit", serving=True, only="cuda"),
    network(64, 8, 256, 512, 2048, weight=large_affine, name="4bit", serving=True, only="cuda"),
    network(2048, 8, 256, 512, 2048, weight=large_affine, name="4bit", serving=True, only="cuda"),
]
