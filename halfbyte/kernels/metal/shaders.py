"""Kernels from Metal sources: each compiled for the types it is asked for when it is first asked, launched by torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MSL = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bf16",
    torch.int32: "int",
    torch.int64: "long",
    torch.uint8: "uchar",
}
SIMD = 32  # lanes of a simd group
MOST_THREADS = 1024  # of a threadgroup
INT32, UINT32 = 1 << 31, 1 << 32
MOST_BUFFERS = 512  # of a list: their addresses go as bytes, of which Metal takes 4096

# What a family's source begins with, after elements.
PREAMBLES = {
    "quant": ("formats", "tiles"),
    "experts": ("formats", "tiles"),
    "attention": ("tiles",),
    "recurrent": ("tiles",),
}

compile_shader: Callable[[str], Any] = torch.mps.compile_shader  # tests put a CPU's executor here

Groups = int | tuple[int, ...]


@cache
def source(family: str) -> str:
    names = ("elements", *PREAMBLES.get(family, ()), family)
    return "\n".join(Path(__file__).with_name(f"{name}.metal").read_text(encoding="utf-8") for name in names)


@cache
def kernel(family: str, name: str, *types: str | int) -> Any:
    """A template of <family>.metal, compiled for these arguments."""
    listed = ", ".join(map(str, types))
    known_as = "_".join([name, *map(str, types)]).replace("-", "m")
    wanted = f'template [[host_name("{known_as}")]] [[kernel]] decltype({name}<{listed}>) {name}<{listed}>;'
    return getattr(compile_shader(f"{source(family)}\n{wanted}\n"), known_as)


def launch(kernel: Any, *arguments: Any, groups: Groups, size: Groups) -> None:
    """Run groups of `size` threads. A plain integer goes as int32, a tuple of integers as an array of int64."""
    counts, sizes = (n if isinstance(n, tuple) else (n,) for n in (groups, size))
    if 0 in counts:
        return
    casts = {}
    for index, argument in enumerate(arguments):
        if type(argument) is int:
            if not -INT32 <= argument < INT32:
                raise ValueError(f"metal: a size must be below 2^31; got {argument}. Split the call")
            casts[index] = "int32"
        elif isinstance(argument, list) and len(argument) > MOST_BUFFERS:
            raise ValueError(f"metal: at most {MOST_BUFFERS} buffers in a list; got {len(argument)}. Stack them")
    threads = tuple(n * s for n, s in zip(counts, sizes, strict=True))
    if max(threads) > UINT32:
        raise ValueError(f"metal: a grid has at most 2^32 threads an axis; got {threads}. Split the call")
    kernel(*arguments, threads=threads, group_size=sizes, arg_casts=casts)


def blocks(count: int, size: int) -> int:
    """How many blocks of `size` hold `count`."""
    return -(-count // size)


def row_threads(width: int, at_once: int) -> int:
    """Threads for a row: whole simd groups, enough to load it in one go where that is possible."""
    return min(MOST_THREADS, SIMD * max(1, blocks(width, SIMD * at_once)))


def vector(width: int, *tensors: Tensor) -> int:
    """How many elements a load takes: 4 where every row of each tensor starts at a multiple of 4."""
    return 4 if width % 4 == 0 and all(t.storage_offset() % 4 == 0 for t in tensors) else 1


def flat(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x for a kernel that reads it from front to back."""
    return (x if dtype is None else x.to(dtype)).contiguous()


def result(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a kernel writes to: `out` itself, or fresh memory where there is none or its elements lie apart."""
    return out if out is not None and out.is_contiguous() else torch.empty(shape, dtype=dtype, device=device)


def delivered(made: Tensor, out: Tensor | None) -> Tensor:
    return made if out is None or out is made else out.copy_(made)
