"""An MLX checkpoint: a folder of config.json and safetensors, checked file by file, of which nothing is read yet."""

from __future__ import annotations

import hashlib
import logging
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from .. import config as configs
from .. import files, limits, strict_json
from ..config import Config
from ..errors import CheckpointError, shown
from . import shards
from .descriptors import Descriptors
from .ledger import Ledger
from .names import canonical
from .quantisation import Quantisation
from .reading import fill_views
from .shards import Shard, State, Stored
from .weights import Weights

__all__ = ["Checkpoint", "Weights", "open"]

log = logging.getLogger(__name__)
INDEX = "model.safetensors.index.json"
SAMPLES, BLOCK = 256, 4096  # of weights, in a fingerprint: tensors at most, bytes of each
FP8_METHOD = "fp8"  # the one scheme of others that convert reads
NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    config: Config
    quantisation: Quantisation
    tensors: dict[str, Stored]  # by canonical name
    states: dict[Path, State]
    fingerprint: str  # of the config's bytes, of the shards' names, sizes and headers, and of some weights

    def has(self, name: str) -> bool:
        """Whether there is a tensor or a module of this canonical name."""
        inside = f"{name}."
        at = bisect_left(self.ordered, inside)
        return name in self.tensors or (at < len(self.ordered) and self.ordered[at].startswith(inside))

    @cached_property
    def ordered(self) -> list[str]:
        return sorted(self.tensors)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.size for stored in self.tensors.values())

    def weights(self, device: torch.device | str = "meta") -> Weights:
        """Weights to build a model from: a skeleton on "meta"; elsewhere each tensor is read when it is asked for."""
        if self.quantisation.method is not None:
            method = self.quantisation.method
            next_step = (
                "Convert the model: `halfbyte convert`" if method == FP8_METHOD else "Take an MLX conversion of it"
            )
            self.config.refuse("quantization_config", f"quant_method {shown(method)} is not MLX's. {next_step}")
        return Weights(Ledger(self, torch.device(device)))


def open(folder: Path | str, supported: set[str] | None = None) -> Checkpoint:
    """Check the config and every shard's header. `supported` are the model types there are; None takes any."""
    folder = Path(folder)
    config = configs.read(folder, supported)
    index = read_index(folder)
    found = [shards.read(files.find(folder, name)) for name in shard_names(folder, index)]
    tensors = joined(found)
    check_index(folder, index, tensors)
    states = {shard.path: shard.state for shard in found}
    return Checkpoint(folder, config, Quantisation.read(config), tensors, states, fingerprint(config, found))


def read_index(folder: Path) -> dict[str, str]:
    """Which shard holds which tensor, as the index says; empty where there is none."""
    if not (folder / INDEX).exists():
        return {}
    path = files.find(folder, INDEX)
    values = strict_json.parse_object(files.read_small(path, limits.INDEX_BYTES), str(path))
    index = values.get("weight_map")
    if not (isinstance(index, dict) and all(isinstance(file, str) for file in index.values())):
        raise CheckpointError(f"{path}: weight_map: an object of file names was expected. {files.AGAIN}")
    for file in set(index.values()):
        if not files.plain(file) or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: weight_map: {shown(file)} is no safetensors file of this folder. It is refused."
            )
    return index


def shard_names(folder: Path, index: dict[str, str]) -> list[str]:
    """The files to read: all that mlx-lm would (it ignores the index), and others that the index names."""
    present = {path.name for path in folder.glob("model*.safetensors")}
    present |= {name for name in set(index.values()) if (folder / name).exists()}
    if not index:
        for name in list(present):
            if numbered := NUMBERED.fullmatch(name):
                stem, _, count = numbered.groups()
                first = f"{stem}-{{:05d}}-of-{count}.safetensors"
                absent = [file for number in range(int(count)) if (file := first.format(number + 1)) not in present]
                if absent:
                    raise CheckpointError(f"{folder / absent[0]}: the shard is missing. {files.AGAIN}")
    if not present and not index:
        raise files.lacks(folder, "model*.safetensors")
    return sorted(present)


def joined(found: list[Shard]) -> dict[str, Stored]:
    """All tensors by canonical name; two of one name are refused."""
    tensors: dict[str, Stored] = {}
    for stored in (stored for shard in found for stored in shard.tensors):
        first = tensors.setdefault(canonical(stored.name), stored)
        if first is not stored:
            raise CheckpointError(
                f"{stored.path}: tensor {shown(stored.name)} stands in {first.path.name} too, as {shown(first.name)}. "
                "Remove the file that does not belong to this checkpoint."
            )
    return tensors


def check_index(folder: Path, index: dict[str, str], tensors: dict[str, Stored]) -> None:
    """Every tensor of the index must exist; that it is in another shard than the index says does no harm."""
    elsewhere = 0
    for name, file in index.items():
        stored = tensors.get(canonical(name))
        if stored is not None:
            elsewhere += stored.path.name != file
        elif (folder / file).exists():
            raise CheckpointError(
                f"{folder / file}: tensor {shown(name)} is missing, which the index puts there. {files.AGAIN}"
            )
        else:
            raise CheckpointError(
                f"{folder / file}: the shard is missing; the index puts {shown(name)} there. {files.AGAIN}"
            )
    if elsewhere:
        log.info("%s: %d tensors are in other shards than the index says", folder, elsewhere)


def fingerprint(config: Config, found: list[Shard]) -> str:
    digest = hashlib.sha256(config.digest)
    for shard in found:
        digest.update(f"{shard.path.name}\0{shard.state.size}\0".encode())
        digest.update(shard.digest)
    for block in some_weights(found):
        digest.update(block)
    return digest.hexdigest()


def some_weights(found: list[Shard]) -> Iterator[bytes]:
    """The middle of each of some tensors, spread over all: further training of a model changes nothing else."""
    tensors = [stored for shard in found for stored in shard.tensors if stored.size]
    with Descriptors({shard.path: shard.state for shard in found}) as files:
        for stored in tensors[:: -(-len(tensors) // SAMPLES) or 1]:
            with files.open(stored.path) as descriptor:
                yield middle(descriptor, stored)


def middle(descriptor: int, stored: Stored) -> bytes:
    block = bytearray(min(stored.size, BLOCK))
    place = stored.start + (stored.size - len(block)) // 2
    fill_views(descriptor, stored.path, place, [memoryview(block)], lambda at: stored.name)
    return bytes(block)
