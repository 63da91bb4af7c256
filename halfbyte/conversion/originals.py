"""A checkpoint to convert, Hugging Face's or MLX's, and what its model uses of it.

The model itself says which tensors make up which of its modules, and refuses a checkpoint that is not its own: it is
built as a skeleton over the source. Before that, what Hugging Face stores otherwise is made to look like MLX's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import config as configs
from .. import files, limits, strict_json
from ..checkpoint import folder as checkpoints
from ..checkpoint import names, shards
from ..checkpoint.folder import Checkpoint
from ..checkpoint.ledger import PARTS, Ledger
from ..checkpoint.quantisation import Format, Quantisation
from ..checkpoint.shards import State, Stored
from ..checkpoint.weights import Weights
from ..config import Config
from ..errors import CheckpointError, shown
from ..models import MODELS
from ..ops.experts import Experts
from ..ops.quant import Packed
from .hf_names import BLOCK_SCALES, CENTRED, CONVOLUTION, FAMILIES, INSIDE_ROPE, RENAMED, Family
from .sources import FP8, Blocks, Source

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Original:
    """A source checkpoint: its settings as they stand in config.json, and all that its model uses."""

    folder: Path
    values: dict[str, Any]
    config: Config
    family: Family
    quantisation: Quantisation
    layers: int
    sources: list[Source]
    left_out: Counter[str]  # tensors, by reason
    size: int  # bytes of all tensors, used or not


def open(folder: Path | str) -> Original:
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder. Give the folder of a checkpoint.")
    values = read_config(folder)
    config = configs.from_dict(values, folder / configs.FILE, set(FAMILIES))
    family = FAMILIES[config.model_type]
    index = checkpoints.read_index(folder)
    found = [shards.read(files.find(folder, name)) for name in checkpoints.shard_names(folder, index)]
    stored = checkpoints.joined(found)
    checkpoints.check_index(folder, index, stored)
    quantisation, block = read_quantisation(config)
    raw = family.centred and any(name.endswith(CONVOLUTION) and one.shape[-1] != 1 for name, one in stored.items())
    alike = as_mlx(stored, block)
    states = {shard.path: shard.state for shard in found}
    recorder = Recorder(Ledger(Checkpoint(folder, config, quantisation, alike, states, ""), torch.device("meta")))
    model = MODELS[config.model_type](config, recorder)
    recorder.finish(model.further_layers)
    sources = recorder.sources(states, raw)
    used = {piece.stored.name for source in sources for span in source.spans.values() for piece in span.pieces}
    unused = [name for name, one in alike.items() if one.name not in used]
    left_out = Counter(names.left_out(name, model.further_layers) or "tied or shared weights" for name in unused)
    size = sum(one.size for one in stored.values())
    return Original(folder, values, config, family, quantisation, len(model.layers), sources, left_out, size)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands, less what names code: none of it is run, and the type is one we have."""
    path = configs.find(folder)
    values = strict_json.parse_object(files.read_small(path, limits.CONFIG_BYTES), str(path))
    for section in (values, values.get("text_config")):
        if isinstance(section, dict) and section.pop("auto_map", None) is not None:
            log.info("%s: auto_map names Python code; it is left out", path)
    family = FAMILIES.get(str(values.get("model_type")))
    if family is not None:
        values["model_type"] = family.model_type
        if family.prefix == Family.prefix:
            spell_out(values)
    return values


def spell_out(values: dict[str, Any]) -> None:
    """Add what older configs, and mlx-lm, call otherwise than transformers 5 does."""
    for new, old in RENAMED.items():
        if new in values:
            values.setdefault(old, values[new])
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        values |= {key: rope[key] for key in INSIDE_ROPE if key in rope and key not in values}
        if rope.get("rope_type", "default") != "default":
            values.setdefault("rope_scaling", rope)


def read_quantisation(config: Config) -> tuple[Quantisation, tuple[int, int]]:
    """MLX's quantisation, or none, and the size of fp8 blocks."""
    found, block = Quantisation.read(config), (128, 128)
    if found.method is None:
        return found, block
    section = config.section("quantization_config")
    section.text("quant_method", ("fp8",))
    if "weight_block_size" in section:
        rows, columns = section.list_of("weight_block_size", int, 2)
        block = (rows, columns) if min(rows, columns) > 0 else section.refuse("weight_block_size", "sizes above 0")
    return Quantisation(), block


def as_mlx(stored: Mapping[str, Stored], block: tuple[int, int]) -> dict[str, Stored]:
    """The tensors of any source in MLX's shapes and dtypes: convolutions turned round, fp8 with its scales."""
    alike: dict[str, Stored] = {}
    for name, one in stored.items():
        if one.kind == FP8:
            scales = stored.get(f"{name}{BLOCK_SCALES}")
            wanted = None if len(one.shape) != 2 else tuple(-(-n // b) for n, b in zip(one.shape, block, strict=True))
            if scales is None or scales.shape != wanted or scales.kind not in ("F32", "BF16", "F16"):
                raise CheckpointError(
                    f"{one.path}: tensor {shown(one.name)}: fp8 is read as matrices with float scales, one for each "
                    f"{block[0]} x {block[1]} weights, in a tensor of the same name and {BLOCK_SCALES!r}. "
                    "Convert the bfloat16 original instead."
                )
            one = Blocks(one.name, one.path, "BF16", one.shape, one.start, one.size, scales, block)
        elif name.endswith(CONVOLUTION) and len(one.shape) == 3 and one.shape[1] == 1:
            one = replace(one, shape=(one.shape[0], one.shape[2], 1))
        if not name.endswith(BLOCK_SCALES):
            alike[name] = one
    return alike


class Recorder(Weights):
    """A skeleton that remembers which tensors make up which module."""

    def __init__(self, ledger: Ledger, prefix: str = "", modules: dict[str, Source] | None = None) -> None:
        super().__init__(ledger, prefix)
        self.modules = {} if modules is None else modules

    def __truediv__(self, name: str) -> Recorder:
        return Recorder(self.ledger, f"{self.prefix}{name}.", self.modules)

    def linear(self, name: str, N: int, K: int, lead: tuple[int, ...] = ()) -> Packed | Tensor:
        before = len(self.ledger.wanted)
        weight = super().linear(name, N, K, lead)
        self._remember(before, {name: weight})
        return weight

    def experts(self, name: str, E: int, I: int, H: int) -> Experts:  # noqa: E741
        before = len(self.ledger.wanted)
        found = super().experts(name, E, I, H)
        assert isinstance(found, Experts)  # an original's are never lent
        self._remember(
            before, {f"{name}.gate_proj": found.gate, f"{name}.up_proj": found.up, f"{name}.down_proj": found.down}
        )
        return found

    def _remember(self, before: int, weights: dict[str, Any]) -> None:
        """The spans that were asked for last, in the order of asking, are the parts of these weights."""
        asked = islice(self.ledger.wanted.values(), before, None)
        for name, weight in weights.items():
            path, format, granule = f"{self.prefix}{name}", None, 1
            parts = ["weight"]
            if isinstance(weight, Packed):
                format = Format(weight.bits, weight.group, weight.mode)
                having = (weight.words, weight.scales, weight.biases, weight.global_scale)
                parts = [part for part, tensor in zip(PARTS, having, strict=True) if tensor is not None]
                granule = weight.shape[-2] if weight.global_scale is not None else 1
            spans = dict(zip(parts, asked, strict=False))
            shape, states = tuple(weight.shape), self.ledger.checkpoint.states
            self.modules[path] = Source(path, shape, spans, states, True, format, granule=granule)

    def sources(self, states: Mapping[Path, State], raw: bool) -> list[Source]:
        """Everything that was asked for. `raw`: Hugging Face's, whose norms may be stored less 1."""
        owners = {span.name: source for source in self.modules.values() for span in source.spans.values()}
        found: dict[str, Source] = {}
        for name, span in self.ledger.wanted.items():
            if name in owners:
                found.setdefault(owners[name].name, owners[name])
            else:
                shift = 1.0 if raw and CENTRED.search(name) else 0.0
                found[name] = Source(name, span.shape, {"weight": span}, states, shift=shift)
        return list(found.values())
