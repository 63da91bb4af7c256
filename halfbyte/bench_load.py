"""How long a checkpoint takes to load, beside a plain read of its file: cold and warm, in turns, and at what memory."""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import checkpoint, limits
from .checkpoint.weights import Load, Weights
from .errors import NotEnoughMemory, StorageError, UsageError, size
from .memory import allocate, available

E, I, H = 64, 512, 2048  # noqa: E741
SHAPES = {"gate_proj": (E, I, H), "up_proj": (E, I, H), "down_proj": (E, H, I)}
PIECE = 8 << 20  # of the plain read
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class LoadTimes:
    """Seconds are medians; ratios are medians of the ratios of one turn's two times."""

    bytes: int
    way: str
    cold_read: float
    cold_load: float
    cold_ratio: float
    warm_read: float
    warm_load: float
    warm_ratio: float
    peak_ratio: float  # memory taken at the highest, over the file's bytes

    def as_json(self) -> dict[str, float | int | str]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        yield f"a checkpoint of {size(self.bytes)}, {self.way}; a plain read is one thread, {size(PIECE)} at a time"
        for heat in ("cold", "warm"):
            read, load, ratio = (getattr(self, f"{heat}_{what}") for what in ("read", "load", "ratio"))
            rates = [f"{seconds:6.2f} s {self.bytes / seconds / 1e9:6.2f} GB/s" for seconds in (read, load)]
            yield f"{heat}   plain read {rates[0]}   load {rates[1]}   {ratio:.2f} times"
        yield f"memory at the highest: {self.peak_ratio:.3f} of the file"


def bench_load(
    folder_bytes: int = 4_000_000_000,
    rounds: int = 3,
    way: Load = "read",
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> LoadTimes:
    """Write a checkpoint of about so many bytes into a temporary folder (inside `folder`), and load it in turns."""
    with tempfile.TemporaryDirectory(prefix="halfbyte-load-", dir=folder) as made:
        layers = max(round(folder_bytes / layer_bytes()), 1)
        require_room(Path(made), layers)
        progress(f"writing {size(folder_bytes)}")
        path = write(Path(made), layers)
        total = path.stat().st_size
        progress("memory")
        peak = peak_memory(lambda: load(Path(made), way))
        times: dict[tuple[str, str], list[float]] = {}
        for heat in ("cold", "warm"):
            for turn in range(rounds):
                for what, work in (("read", lambda: plain_read(path)), ("load", lambda: load(Path(made), way))):
                    progress(f"{heat} {what}, {turn + 1} of {rounds}")
                    (drop if heat == "cold" else plain_read)(path)
                    touch(2 * total)
                    start = time.perf_counter()
                    work()
                    times.setdefault((heat, what), []).append(time.perf_counter() - start)
    median = {key: statistics.median(found) for key, found in times.items()}
    ratio = {
        heat: statistics.median(b / a for a, b in zip(times[heat, "read"], times[heat, "load"], strict=True))
        for heat in ("cold", "warm")
    }
    return LoadTimes(
        total, way,
        median["cold", "read"], median["cold", "load"], ratio["cold"],
        median["warm", "read"], median["warm", "load"], ratio["warm"],
        peak / total,
    )  # fmt: skip


def require_room(folder: Path, layers: int) -> None:
    """What the machine has no room for is refused before a byte is written."""
    count, most = layers * layer_bytes(), limits.LAYERS * layer_bytes()
    if count > most:
        raise UsageError(f"a checkpoint to time has at most {size(most)}, not {size(count)}: give a smaller --gb")
    if (free := shutil.disk_usage(folder).free) < count:
        raise StorageError(
            f"{folder.parent}: a checkpoint of {size(count)} has no room there, {size(free)} are free. "
            "Give a smaller --gb, or name another folder in TMPDIR."
        )
    if (have := available(torch.device("cpu"))) < 2 * count:  # it is loaded while it lies in the page cache
        raise NotEnoughMemory(
            f"timing a checkpoint of {size(count)} takes {size(2 * count)} of memory, and {size(have)} are free. "
            "Give a smaller --gb."
        )


def stored(layers: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes, in an order that is not that of the model, as mlx writes them."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer in range(layers):
        for name, (*rows, K) in SHAPES.items():
            at = f"model.layers.{layer}.mlp.switch_mlp.{name}"
            found[f"{at}.weight"] = ("U32", (*rows, K // 8))
            found[f"{at}.scales"] = found[f"{at}.biases"] = ("BF16", (*rows, K // 64))
        found[f"model.layers.{layer}.input_layernorm.weight"] = ("BF16", (H,))
    return dict(sorted(found.items(), key=lambda item: item[0][::-1]))


def layer_bytes() -> int:
    return sum(count for _, count in sizes(stored(1)))


def sizes(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, int]]:
    for name, (kind, shape) in tensors.items():
        yield name, torch.Size(shape).numel() * (4 if kind == "U32" else 2)


def write(folder: Path, layers: int) -> Path:
    """A model of 4-bit experts, 64 weights a group; values are noise."""
    tensors, header, at = stored(layers), {}, 0
    for name, count in sizes(tensors):
        kind, shape = tensors[name]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(header).encode()
    noise = {
        "U32": torch.randint(-(2**31), 2**31, (PIECE // 4,), dtype=torch.int32),
        "BF16": torch.randn(PIECE // 2).bfloat16(),
    }
    block = {kind: values.view(torch.uint8).numpy().data for kind, values in noise.items()}
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, count in sizes(tensors):
            for start in range(0, count, PIECE):
                file.write(block[tensors[name][0]][: min(PIECE, count - start)])
        os.fsync(file.fileno())
    (folder / "config.json").write_text(json.dumps({"model_type": "load", "num_hidden_layers": layers}))
    return path


def load(folder: Path, way: Load) -> list[object]:
    """All steps of loading a model: check, skeleton, plan, read, finite check, build."""
    opened = checkpoint.open(folder)
    layers = opened.config.size("num_hidden_layers")
    skeleton = opened.weights("meta")
    build(skeleton, layers)
    skeleton.finish()
    return build(skeleton.load("cpu", load=way), layers)


def build(w: Weights, layers: int) -> list[object]:
    found: list[object] = []
    for index in range(layers):
        layer = w / f"layers.{index}"
        found += [layer.tensor("input_layernorm.weight", H), (layer / "mlp").experts("switch_mlp", E, I, H)]
    return found


def plain_read(path: Path) -> None:
    buffer = bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def drop(path: Path) -> None:
    """Out of the page cache, so that the next read comes from the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch(count: int) -> None:
    """Take memory and give it back, for file and weights: a virtual machine has to ask its host, which is slow."""
    allocate(count, torch.device("cpu")).fill_(1)


def peak_memory(work: Callable[[], object]) -> int:
    """Bytes of memory that `work` adds at its highest."""
    gc.collect()
    CLEAR.write_text("5")  # the high-water mark starts anew
    before = _status("VmRSS")
    result = work()
    peak = _status("VmHWM") - before
    del result
    return peak


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
