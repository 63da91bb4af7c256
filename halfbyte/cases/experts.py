"""Cases of the experts: stacks, one buffer with offsets, separate buffers; few tokens and many; any number chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..check import tensors
from ..ops.experts import Experts, Projection, Scattered, expert_mlp, expert_qmm
from ..ops.formats import Packed
from .case import Case, Random
from .quant import Weight, affine, dense, small_float


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


FORMS = {"stacked": stacked, "one-buffer": in_one_buffer, "separate": in_separate_buffers}


def distinct_ids(random: Random, T: int, A: int, E: int) -> Tensor:
    """A choices a token, different from each other."""
    order = torch.stack([torch.randperm(E, generator=random.generator) for _ in range(T)]) if T else torch.empty(0, E)
    return order[:, :A].int()


def touched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The weights of the experts that were chosen, the rows in and out."""
    x, ids, chosen = args[:3]
    parts = [chosen.gate, chosen.up, chosen.down] if isinstance(chosen, Experts) else [chosen]
    held = sum(int(t.nbytes) for t in tensors(parts))
    share = int(ids.unique().numel()) / parts[0].shape[0]
    return int(held * share + x.nbytes + ids.numel() * parts[-1].shape[1] * x.element_size())


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
) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        w = FORMS[form](random, weight, E, N, K)
        x = random.normal(*((T, A, K) if own else (T, K)), dtype=dtype)
        return (x, distinct_ids(random, T, A, E), w), {}

    said = f"{T}x{A}-of-{E}x{N}x{K}-{name}-{form}{'-own' if own else ''}"
    return Case(expert_qmm, said, build, serving, touched=touched)


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
) -> Case:
    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        x = make(*((T, A, H) if own else (T, H)), dtype=dtype)
        shapes = ((E, I, H), (E, I, H), (E, H, I))
        experts = Experts(*(FORMS[form](random, weight, *shape) for shape in shapes))
        return (x, distinct_ids(random, T, A, E), experts, activation), {}

    said = f"{T}x{A}-of-{E}x{I}x{H}-{name}-{form}-{activation}"
    said += ("-own" if own else "") + ("-strided" if strided else "")
    return Case(expert_mlp, said, build, serving, touched=touched)


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
]
