"""What a conversion reads: the values of a weight, however it is stored, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.quantisation import Format
from ..checkpoint.reading import read
from ..checkpoint.shards import State, Stored
from ..checkpoint.spans import Piece, Span, whole
from ..config import Config
from ..errors import CheckpointError, shown
from ..ops.quant import Packed, dequantize
from .hf_names import JOINED_HEADS, QUERY_HEADS, VALUE_HEADS

CPU = torch.device("cpu")
FP8 = "F8_E4M3"


@dataclass(frozen=True)
class Blocks(Stored):
    """An fp8 matrix with a scale for each block. It passes for the bfloat16 matrix that it stands for."""

    scales: Stored
    block: tuple[int, int]


@dataclass(frozen=True)
class Source:
    """A tensor, or the weight of a module: values of `shape`, read by rows, which are counted over all its matrices."""

    name: str  # canonical; a module's is its path
    shape: tuple[int, ...]
    spans: dict[str, Span]  # by part
    states: Mapping[Path, State]
    module: bool = False  # whether it may be quantised
    format: Format | None = None  # in which it is
    shift: float = 0.0  # to be added
    granule: int = 1  # rows that must be read together

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """Bytes in the source's files."""
        pieces = [piece for span in self.spans.values() for piece in span.pieces]
        return sum(
            piece.size + (piece.stored.scales.size if isinstance(piece.stored, Blocks) else 0) for piece in pieces
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of its values, where no other is asked for."""
        if self.format is None:
            return self.spans["weight"].dtype
        if self.format.mode != "affine":
            return torch.bfloat16
        return torch.promote_types(self.spans["scales"].dtype, self.spans["biases"].dtype)

    @property
    def place(self) -> Path:
        """A file that has some of it."""
        return self.spans["weight"].pieces[0].stored.path

    @property
    def kind(self) -> str:
        """How it is stored, in words."""
        if self.format is not None:
            return described(self.format)
        return "fp8 blocks" if isinstance(self.spans["weight"].pieces[0].stored, Blocks) else self.spans["weight"].kind

    def stored(self, first: int, last: int) -> dict[str, Tensor]:
        """Rows of each part, as the files have them."""
        cuts = [cut(span, first, last) for part, span in self.spans.items() if part != "global_scale"]
        return dict(zip(self.spans, read(self.states, cuts, CPU).values(), strict=False))

    def global_scale(self) -> Tensor:
        span = self.spans["global_scale"]
        return read(self.states, [span], CPU)[span.name]

    def values(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Rows [last - first, K]."""
        if self.format is not None:
            w = self._dequantised(first, last, dtype)
        elif isinstance(self.spans["weight"].pieces[0].stored, Blocks):
            w = from_blocks(self.states, self.spans["weight"], first, last)
        else:
            w = self.stored(first, last)["weight"]
        return (w + self.shift if self.shift else w).to(dtype)

    def _dequantised(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        assert self.format is not None
        parts = {part: rows.unflatten(0, (-1, self.granule)) for part, rows in self.stored(first, last).items()}
        scales, biases = parts["scales"], parts.get("biases")
        if biases is not None:
            scales, biases = scales.to(self.dtype), biases.to(self.dtype)
        scale = self.global_scale() if "global_scale" in self.spans else None
        if scale is not None and scale.numel() > 1:
            scale = scale[first // self.granule : last // self.granule]
        return dequantize(Packed(parts["weight"], scales, biases, *self.format, scale), dtype).flatten(0, 1)

    def require_finite(self, rows: Tensor) -> None:
        """Refuse rows that nobody could load. A finite sum shows that all is well, at an eighteenth of the cost."""
        if not (torch.isfinite(rows.sum(dtype=torch.float32)) or torch.isfinite(rows).all()):
            why = "NaN or infinite values" + (", or such beyond float16" if rows.dtype == torch.float16 else "")
            raise CheckpointError(f"{self.place}: {shown(self.name)} has {why}. Take another original or dtype.")


@dataclass(frozen=True, kw_only=True)
class Heads(Source):
    """A part of joined heads: of each head's rows those from `begin` on, as many as `shape` has, perhaps transposed."""

    joined: Source
    begin: int = 0
    transposed: bool = False

    @property
    def size(self) -> int:
        return self.joined.size * math.prod(self.shape) // math.prod(self.joined.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.joined.dtype

    @property
    def place(self) -> Path:
        return self.joined.place

    @property
    def kind(self) -> str:
        return self.joined.kind

    def values(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        each = self.joined.rows // self.shape[0]
        a, b = first // self.granule, last // self.granule
        w = self.joined.values(a * each, b * each, dtype).unflatten(0, (b - a, each))
        w = w[:, self.begin : self.begin + self.shape[-1 if self.transposed else -2]]
        turned: Tensor = w.mT if self.transposed else w
        return turned.flatten(0, 1)


def split_heads(joined: Source, config: Config) -> list[Source]:
    """The two projections that joined heads [heads (nope + v), rank] hold; the first one is used transposed."""
    heads, rank = config.integer("num_attention_heads", 1), joined.shape[-1]
    nope, v = config.integer("qk_nope_head_dim", 1), config.integer("v_head_dim", 1)
    layer = joined.name.removesuffix(JOINED_HEADS)
    return [
        Heads(f"{layer}{QUERY_HEADS}", (heads, rank, nope), {}, joined.states, True,
              granule=rank, joined=joined, transposed=True),
        Heads(f"{layer}{VALUE_HEADS}", (heads, v, rank), {}, joined.states, True,
              granule=v, joined=joined, begin=nope),
    ]  # fmt: skip


def cut(span: Span, first: int, last: int) -> Span:
    """Rows of a span, counted over all of its matrices."""
    row, at, pieces = span.shape[-1] * span.dtype.itemsize, 0, []
    for piece in span.pieces:
        begin, end = max(first * row - at, 0), min(last * row - at, piece.size)
        if begin < end:
            pieces.append(Piece(piece.stored, piece.start + begin, end - begin))
        at += piece.size
    return replace(span, shape=(last - first, span.shape[-1]), pieces=tuple(pieces))


def from_blocks(states: Mapping[Path, State], span: Span, first: int, last: int) -> Tensor:
    """Rows of fp8 matrices as bfloat16: each weight times its block's scale, in float32, rounded once."""
    N, K = span.shape[-2:]
    codes: list[Span] = []
    places: list[tuple[Blocks, int, int]] = []
    for matrix in range(first // N, -(-last // N)):
        stored = span.pieces[matrix].stored
        assert isinstance(stored, Blocks)
        begin, end = max(first - matrix * N, 0), min(last - matrix * N, N)
        piece = Piece(stored, stored.start + begin * K, (end - begin) * K)
        codes.append(Span(stored.name, FP8, (end - begin, K), (piece,)))
        places.append((stored, begin, end))
    found = read(states, [*codes, *(whole(one.scales.name, one.scales) for one, _, _ in places)], CPU)
    parts = []
    for one, begin, end in places:
        scales = found[one.scales.name].float()[torch.arange(begin, end) // one.block[0]]
        scales = scales.repeat_interleave(one.block[1], 1)[:, :K]
        parts.append((found[one.name].float() * scales).bfloat16())
    return torch.cat(parts)


def described(format: Format) -> str:
    mode = "" if format.mode == "affine" else f"{format.mode}, "
    return f"{mode}{format.bits} bits in groups of {format.group}"
