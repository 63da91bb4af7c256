"""Cases of attention. Serving shapes: 16 query and 2 kv heads of 256 (Qwen3.5), windows (Gemma), latents (DeepSeek)."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.attention import attention, latent_attention, merge_states
from .case import Case, Random


def attend(
    B: int,
    L: int,
    H: int,
    G: int,
    D: int,
    S: int,
    *,
    Dv: int | None = None,
    scale: float | None = None,
    lengths: tuple[int, ...] | None = None,
    slots: tuple[int, ...] | None = None,
    stored: torch.dtype | None = None,
    strided: bool = False,
    serving: bool = False,
    only: str | None = None,
    **options: Any,
) -> Case:
    """B requests of L queries over caches of S rows in B + 1 slots; scores spread by about 2, without a `scale`."""
    window, causal = options.get("window"), options.get("causal", True)
    ends = lengths or (S,) * B

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = random.strided if strided else random.normal
        count = B if serving else B + 1
        k = make(count, S, G, D, dtype=stored or dtype)
        v = make(count, S, G, Dv or D, dtype=stored or dtype)
        kwargs = {"scale": scale or 2 * D**-0.5, **options}
        if lengths is not None:
            kwargs["lengths"] = torch.tensor(lengths, dtype=torch.int32, device=random.device)
        if slots is not None:
            kwargs["slots"] = torch.tensor(slots, device=random.device)
        return (make(B, L, H, D, dtype=dtype), k, v), kwargs

    said = [f"{name}{value}" for name, value in options.items()]
    said += [f"of{'.'.join(map(str, lengths))}"] if lengths else []
    said += ["strided"] if strided else []
    said += [str(stored).removeprefix("torch.")] if stored else []
    name = f"{B}x{L}x{H}.{G}x{D}{f'.{Dv}' if Dv else ''}-{S}" + "".join(f"-{s}" for s in said)

    def flops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        return 2.0 * H * (D + (Dv or D)) * sum(seen(length, L, causal, window) for length in ends)

    def touched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        q, k, v = args
        rows = sum(min(length, S if window is None else window + L - 1) for length in ends)
        return int(q.nbytes // D * (D + (Dv or D)) + rows * (k[0, 0].nbytes + v[0, 0].nbytes))

    return Case(attention, name, build, serving, touched=touched, flops=flops if L > 16 else None, only=only)


def seen(length: int, L: int, causal: bool, window: int | None) -> int:
    """The positions that L queries of a request see, all together."""
    places = range(max(0, length - L), length)
    return sum((p + 1 if causal else length) - (max(0, p - window + 1) if window else 0) for p in places)


def latents(
    B: int,
    L: int,
    H: int,
    R: int,
    P: int,
    S: int,
    *,
    lengths: tuple[int, ...] | None = None,
    slots: tuple[int, ...] | None = None,
    joined: bool = False,
    stored: torch.dtype | None = None,
    serving: bool = False,
    only: str | None = None,
    **options: Any,
) -> Case:
    """As `attend`, over latents; `joined` keeps both parts of a position in one row of R + P."""
    ends = lengths or (S,) * B

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        count = B if serving else B + 1
        if joined:
            latent, k_pe = random.normal(count, S, R + P, dtype=stored or dtype).split([R, P], -1)
        else:
            latent = random.normal(count, S, R, dtype=stored or dtype)
            k_pe = random.normal(count, S, P, dtype=stored or dtype)
        kwargs = {"scale": 2 * (R + P) ** -0.5, **options}
        if lengths is not None:
            kwargs["lengths"] = torch.tensor(lengths, device=random.device)
        if slots is not None:
            kwargs["slots"] = torch.tensor(slots, dtype=torch.int32, device=random.device)
        return (random.normal(B, L, H, R, dtype=dtype), random.normal(B, L, H, P, dtype=dtype), latent, k_pe), kwargs

    said = [f"{name}{value}" for name, value in options.items()] + (["joined"] if joined else [])
    said += [f"of{'.'.join(map(str, lengths))}"] if lengths else []
    said += [str(stored).removeprefix("torch.")] if stored else []
    name = f"{B}x{L}x{H}x{R}.{P}-{S}" + "".join(f"-{s}" for s in said)

    def flops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        return 2.0 * H * (2 * R + P) * sum(seen(length, L, options.get("causal", True), None) for length in ends)

    def touched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        q, q_pe, latent, k_pe = args
        return int(2 * q.nbytes + q_pe.nbytes + sum(ends) * (latent[0, 0].nbytes + k_pe[0, 0].nbytes))

    return Case(latent_attention, name, build, serving, touched=touched, flops=flops if L > 16 else None, only=only)


def merged(*shape: int, empty: bool = False, serving: bool = False) -> Case:
    """Two states of `shape`; `empty` makes the first row of each, and of the first the second row, see nothing."""

    def build(random: Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        states: list[Any] = []
        for unseen in (2, 1) if empty else (0, 0):
            o, lse = random.normal(*shape, dtype=dtype), random.normal(*shape[:-1], scale=3.0)
            o.flatten(0, -2)[:unseen], lse.flatten()[:unseen] = 0.0, -torch.inf
            states += [o, lse]
        return tuple(states), {}

    return Case(merge_states, "x".join(map(str, shape)) + ("-empty" if empty else ""), build, serving)


CASES = [
    attend(2, 3, 4, 2, 20, 33, Dv=70, lengths=(20, 33), slots=(2, 0), return_lse=True),
    attend(1, 1, 1, 1, 1, 1),
    attend(2, 5, 3, 3, 7, 40, lengths=(5, 40), causal=False, return_lse=True),
    attend(2, 7, 6, 2, 16, 300, lengths=(299, 150), window=37),
    attend(2, 4, 4, 1, 24, 50, lengths=(400, 49), window=40, return_lse=True),
    attend(1, 5, 2, 1, 16, 200, lengths=(200,), window=130, causal=False),
    attend(2, 3, 4, 2, 32, 150, scale=3.0, softcap=5.0, lengths=(150, 7)),
    attend(1, 3, 2, 2, 64, 140, scale=0.125, softcap=50.0),
    attend(3, 4, 2, 1, 8, 9, lengths=(0, 2, 9), return_lse=True),
    attend(3, 4, 2, 1, 8, 9, lengths=(0, 2, 9), causal=False),
    attend(2, 2, 4, 2, 33, 130, stored=torch.bfloat16, lengths=(130, 129), slots=(1, 1)),
    attend(2, 2, 4, 2, 48, 130, stored=torch.float16, lengths=(130, 64)),
    attend(2, 3, 4, 2, 18, 40, strided=True),
    attend(1, 2, 2, 1, 512, 260, scale=0.1),
    attend(1, 70, 3, 3, 16, 270, lengths=(270,)),
    attend(0, 3, 2, 1, 8, 9),
    attend(2, 0, 2, 1, 8, 9),
    attend(1, 1, 16, 2, 256, 4096, serving=True),
    attend(1, 1, 16, 2, 256, 4096, stored=torch.bfloat16, serving=True),
    attend(1, 1, 16, 2, 256, 32768, stored=torch.bfloat16, serving=True),
    attend(8, 1, 16, 2, 256, 512, serving=True),
    attend(1, 512, 16, 2, 256, 512, serving=True),
    attend(1, 256, 16, 8, 256, 1024, window=512, lengths=(5000,), serving=True),
    attend(2, 2, 4, 2, 12, 90, scale=-0.7, return_lse=True),
    attend(1, 130, 4, 2, 80, 400, lengths=(333,), return_lse=True),
    attend(1, 70, 2, 2, 16, 2100, lengths=(2060,), return_lse=True),
    attend(2, 90, 4, 2, 24, 200, Dv=40, lengths=(700, 140), window=50, return_lse=True),
    attend(1, 100, 4, 4, 40, 150, lengths=(60,), causal=False, softcap=8.0),
    attend(1, 1, 16, 2, 256, 1024, serving=True, only="cuda"),
    attend(1, 1, 16, 2, 256, 32768, serving=True, only="cuda"),
    attend(8, 1, 16, 2, 256, 4096, serving=True, only="cuda"),
    attend(32, 1, 16, 2, 256, 4096, serving=True, only="cuda"),
    attend(1, 4, 16, 2, 256, 8192, serving=True, only="cuda"),
    attend(1, 2048, 16, 2, 256, 2048, serving=True, only="cuda"),
    attend(1, 8192, 16, 2, 256, 8192, serving=True, only="cuda"),
    attend(1, 512, 16, 2, 256, 16384, serving=True, only="cuda"),
    attend(1, 1, 8, 4, 256, 1536, window=1024, lengths=(9000,), serving=True, only="cuda"),
    attend(1, 512, 8, 4, 256, 1536, window=1024, lengths=(9000,), serving=True, only="cuda"),
    attend(1, 1, 8, 1, 512, 8192, serving=True, only="cuda"),
    attend(1, 2048, 8, 1, 512, 2048, serving=True, only="cuda"),
    latents(2, 3, 4, 20, 7, 33, lengths=(20, 33), slots=(2, 0), return_lse=True),
    latents(1, 2, 3, 96, 16, 150, joined=True),
    latents(2, 3, 2, 64, 8, 40, causal=False, lengths=(0, 40), stored=torch.bfloat16),
    latents(1, 1, 70, 32, 16, 300, stored=torch.float16),
    latents(0, 1, 2, 16, 8, 9),
    latents(1, 1, 16, 512, 64, 4096, serving=True),
    latents(1, 1, 128, 512, 64, 1024, stored=torch.bfloat16, joined=True, serving=True),
    latents(1, 64, 16, 512, 64, 512, serving=True),
    latents(3, 1, 17, 48, 8, 700, lengths=(700, 1, 333), return_lse=True),
    latents(2, 9, 3, 130, 24, 260, lengths=(4, 260), joined=True, return_lse=True),
    latents(1, 1, 16, 512, 64, 32768, serving=True, only="cuda"),
    latents(1, 1, 128, 512, 64, 32768, joined=True, serving=True, only="cuda"),
    latents(8, 1, 16, 512, 64, 4096, joined=True, serving=True, only="cuda"),
    latents(1, 512, 16, 512, 64, 512, serving=True, only="cuda"),
    latents(1, 2048, 16, 512, 64, 2048, joined=True, serving=True, only="cuda"),
    latents(1, 512, 128, 512, 64, 512, serving=True, only="cuda"),
    merged(3, 2, 37),
    merged(5, 16, empty=True),
    merged(0, 8),
    merged(16, 256, serving=True),
    merged(512, 16, 256, serving=True),
]
