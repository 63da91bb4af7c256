"""What a conversion will write, from headers alone: which tensors become which, how large, in which files."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import files, limits, strict_json
from ..checkpoint.quantisation import Format
from ..errors import CheckpointError, size
from ..ops.quant import quantize
from . import saving
from .hf_names import JOINED_HEADS, NEVER_CAST
from .originals import Original
from .recipes import Predicate, Recipe
from .saving import Layout, Slot
from .sources import Source, described, split_heads

CHUNK = 1 << 20  # weights in memory at a time
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "*.tiktoken", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
DROPPED = ("_name_or_path", "vision_config", "quantization", "quantization_config")  # keys of config.json


@dataclass(frozen=True)
class Change:
    """One weight or tensor, and what is written of it."""

    source: Source
    path: str  # in the result
    dtype: torch.dtype
    format: Format | None = None  # it is quantised to
    listed: dict[str, Any] | None = None  # what config.json says about it

    @property
    def form(self) -> str:
        return saving.KINDS[self.dtype] if self.format is None else described(self.format)

    @property
    def copied(self) -> bool:
        """Whether the codes are in the wanted format already."""
        return self.format is not None and self.source.format == self.format

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """The tensors it becomes, by part."""
        shape, name = self.source.shape, f"{self.path}.weight" if self.source.module else self.path
        if self.format is None:
            return {"weight": Slot(name, self.dtype, shape)}
        (*rows, K), (bits, group, mode) = shape, self.format
        scales = self.dtype if mode == "affine" else torch.uint8
        found = {"weight": Slot(name, torch.uint32, (*rows, K * bits // 32))}
        for part in ("scales", "biases") if mode == "affine" else ("scales",):
            found[part] = Slot(f"{self.path}.{part}", scales, (*rows, K // group))
        if self.copied and "global_scale" in self.source.spans:
            span = self.source.spans["global_scale"]
            found["global_scale"] = Slot(f"{self.path}.global_scale", span.dtype, span.shape)
        return found

    @property
    def size(self) -> int:
        return sum(slot.size for slot in self.slots.values())

    def parts(self) -> Iterator[tuple[Slot, int, Tensor]]:
        """What is to be written: tensor, row in it, rows."""
        granule, K = self.source.granule, self.source.shape[-1] if self.source.shape else 1
        step = max(CHUNK // K // granule, 1) * granule
        if "global_scale" in self.slots:
            yield self.slots["global_scale"], 0, self.source.global_scale()
        for first in range(0, self.source.rows, step):
            for part, rows in self._rows(first, min(first + step, self.source.rows)).items():
                yield self.slots[part], first, rows

    def _rows(self, first: int, last: int) -> dict[str, Tensor]:
        if self.copied:
            return {part: rows.to(self.slots[part].dtype) for part, rows in self.source.stored(first, last).items()}
        w = self.source.values(first, last, self.dtype)
        if self.format is None:
            self.source.require_finite(w)
            return {"weight": w}
        try:
            packed = quantize(w, *self.format)
        except ValueError:
            self.source.require_finite(w)  # which says of what; quantize looks through all values, so not before
            raise
        parts = {"weight": packed.words, "scales": packed.scales}
        return parts if packed.biases is None else {**parts, "biases": packed.biases}


@dataclass(frozen=True)
class Plan:
    """What a conversion will write."""

    original: Original
    changes: list[Change]
    config: dict[str, Any]
    copies: list[Path]  # files of the source, relative to it
    layout: Layout = field(repr=False)

    @property
    def parameters(self) -> int:
        return sum(math.prod(change.source.shape) for change in self.changes)

    @property
    def bytes_before(self) -> int:
        """Of all tensors of the source, left out or not."""
        return self.original.size

    @property
    def bytes_after(self) -> int:
        return sum(change.size for change in self.changes)

    @property
    def bits_per_weight(self) -> float:
        return self.bytes_after * 8 / self.parameters

    @property
    def forms(self) -> dict[str, int]:
        """How many weights have which form in the result."""
        return dict(Counter(change.form for change in self.changes).most_common())

    @property
    def need(self) -> int:
        """Bytes of disk space."""
        copied = sum((self.original.folder / path).stat().st_size for path in self.copies)
        texts = sum(len(json.dumps(text, indent=4)) for text in (self.config, self.layout.index(0)))
        return self.layout.size + copied + texts + saving.SPARE

    def lines(self) -> Iterator[str]:
        """For people: like modules of all layers in one line, then the sums."""
        groups: dict[tuple[str, str], list[Change]] = {}
        for change in self.changes:
            path = re.sub(r"\.\d+\.", ".*.", change.path)
            key = f"{path} {list(change.source.shape)}", f"{change.source.kind} -> {change.form}"
            groups.setdefault(key, []).append(change)
        for (what, becomes), changes in groups.items():
            many = f" x {len(changes)}" if len(changes) > 1 else ""
            sizes = f"{size(sum(one.source.size for one in changes))} -> {size(sum(one.size for one in changes))}"
            yield f"{what}{many}: {becomes}, {sizes}"
        for reason, count in self.original.left_out.items():
            yield f"left out: {count} tensors of {reason}"
        yield f"files copied: {', '.join(map(str, self.copies)) or 'none'}"
        yield (
            f"{self.parameters:,} parameters, {size(self.bytes_before)} -> {size(self.bytes_after)} "
            f"in {len(self.layout.files)} files, {self.bits_per_weight:.3f} bits per weight; "
            f"{size(self.need)} of disk space"
        )


def make(
    original: Original, general: Format | None, predicate: Predicate | str | None, dtype: str | None, dequantize: bool
) -> Plan:
    """Quantised to `general` where one is given, dense where that is asked for, else in the formats there are."""
    recipe = None if general is None else Recipe(general, original.family, original.layers, predicate)
    present = usual_format(original)
    usual = present if general is None and not dequantize else general
    # What is quantised already keeps its scales as they are: its config may still name the dtype of its original.
    chosen = DTYPES.get(dtype or (said_dtype(original.values) if present is None else ""))
    changes: list[Change] = []

    def add(source: Source) -> None:
        path = original.family.path(source.name)
        format, listed = None if dequantize else source.format, None
        if recipe is not None and source.module:
            format, listed = recipe(path, source.shape)
        elif format is not None and format != usual:
            listed = {"group_size": format.group, "bits": format.bits}
            listed |= {"mode": format.mode} if format.mode != "affine" else {}
            listed |= {"global_scale": True} if "global_scale" in source.spans else {}
        if source.name.endswith(JOINED_HEADS) and (format is None or format != source.format):
            for part in split_heads(source, original.config):
                add(part)
            return
        cast = source.dtype if chosen is None or source.name.endswith(NEVER_CAST) else chosen
        changes.append(Change(source, path, cast, format, listed))

    for source in original.sources:
        add(source)
    layout = Layout([slot for change in changes for slot in change.slots.values()])
    return Plan(original, changes, new_config(original, usual, changes), files_to_copy(original.folder), layout)


def usual_format(original: Original) -> Format | None:
    """The format that a quantised source's config names for all, if any module has it; else the one that most have."""
    found = Counter(source.format for source in original.sources if source.format is not None)
    said = {"mode": "affine", **original.quantisation.general}
    named = Format(said.get("bits", 0), said.get("group_size", 0), said["mode"])
    return named if named in found else found.most_common(1)[0][0] if found else None


def said_dtype(values: dict[str, Any]) -> str:
    """The dtype that a config names, "" where it names none that we write."""
    text = values.get("text_config")
    sections = [values, text] if isinstance(text, dict) else [values]
    said = [section.get(key) for section in sections for key in ("torch_dtype", "dtype")]
    return next((one for one in said if isinstance(one, str) and one in DTYPES), "")


def new_config(original: Original, general: Format | None, changes: list[Change]) -> dict[str, Any]:
    config = {key: value for key, value in original.values.items() if key not in DROPPED}
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = {key: value for key, value in text.items() if not key.startswith("quantization")}
    if eos := generation_eos(original.folder):
        config["eos_token_id"] = eos
    if general is not None:
        overrides = {change.path: change.listed for change in changes if change.listed is not None}
        quantisation = {"group_size": general.group, "bits": general.bits, "mode": general.mode, **overrides}
        config["quantization"] = config["quantization_config"] = quantisation
    return dict(sorted(config.items()))


def generation_eos(folder: Path) -> Any:
    """What generation_config.json says, which counts for more than config.json; broken, it counts for nothing."""
    if not (folder / "generation_config.json").exists():
        return None
    path = files.find(folder, "generation_config.json")
    try:
        return strict_json.parse_object(files.read_small(path, limits.CONFIG_BYTES), str(path)).get("eos_token_id")
    except CheckpointError:
        return None


def files_to_copy(folder: Path) -> list[Path]:
    """Tokenizer, template, licence and the like, relative to the folder; never code."""
    found = {path for pattern in COPIED for path in folder.glob(pattern) if path.suffix != ".py"}
    return sorted(files.find(path.parent, path.name).relative_to(folder) for path in found)
