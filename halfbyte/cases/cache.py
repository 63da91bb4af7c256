"""Cases of the cache's append: lines and rings, odd rows, caches with gaps."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.cache import append
from .case import Case, Random


def appended(
    B: int,
    L: int,
    *rest: int,
    S: int,
    lengths: tuple[int, ...] | None = None,
    slots: tuple[int, ...] | None = None,
    ring: bool = False,
    strided: bool = False,
    stored: torch.dtype | None = None,
    serving: bool = False,
    only: str | None = None,
) -> Case:
    """B requests append L rows; the cache has two slots more, and the activations' dtype unless `stored` says other."""

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        kwargs: dict[str, Any] = {"ring": ring}
        if lengths is not None:
            kwargs["lengths"] = torch.tensor(lengths, dtype=torch.int32, device=random.device)
        if slots is not None:
            kwargs["slots"] = torch.tensor(slots, device=random.device)
        return (make(B + 2, S, *rest, dtype=stored or dtype), make(B, L, *rest, dtype=dtype)), kwargs

    said = [f"at{lengths}" if lengths else "", "ring" if ring else "", "strided" if strided else ""]
    said += [str(stored).removeprefix("torch.") if stored else ""]
    name = f"{'x'.join(map(str, (B, L, *rest)))}-of{S}" + "".join(f"-{s}" for s in said if s)

    def touched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        cache, new = args
        return int(new.nbytes + new.numel() * cache.element_size())

    return Case(append, name.replace(" ", ""), build, serving, touched=touched, only=only)


CASES = [
    appended(2, 3, 2, 5, S=7),
    appended(2, 3, 2, 5, S=7, lengths=(3, 7), slots=(3, 0)),
    appended(1, 1, 9, S=4, lengths=(4,), stored=torch.bfloat16),
    appended(6, 2, 2, 5, S=7, lengths=(3, 7, 2, 4, 6, 5), slots=(3, 0, 7, 1, 2, 5)),
    appended(6, 2, 3, S=5, lengths=(3, 17, 2, 4, 60, 5), ring=True),
    appended(2, 3, 2, 5, S=7, lengths=(3, 22), slots=(1, 2), ring=True),
    appended(2, 9, 11, S=4, lengths=(9, 30), ring=True, stored=torch.float16),
    appended(2, 3, 2, 5, S=7, lengths=(5, 6), strided=True),
    appended(0, 3, 4, S=7),
    appended(2, 0, 4, S=7),
    appended(1, 1, 2, 256, S=1024, lengths=(900,), serving=True),
    appended(1, 512, 2, 256, S=1024, lengths=(900,), stored=torch.bfloat16, serving=True),
    appended(8, 1, 576, S=1024, lengths=tuple(range(100, 900, 100)), serving=True),
    appended(1, 1, 2, 256, S=32768, lengths=(30000,), serving=True, only="cuda"),
    appended(1, 8192, 2, 256, S=8192, serving=True, only="cuda"),
    appended(1, 2048, 4, 256, S=1536, lengths=(9000,), ring=True, serving=True, only="cuda"),
]
