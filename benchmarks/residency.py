"""Experts on disk, measured: tokens a second, what the disk gives beside a plain read of the same bytes, and memory.

python benchmarks/residency.py make FOLDER --gigabytes 16      a random checkpoint, in Qwen3.5-35B-A3B's shape
python benchmarks/residency.py run FOLDER --ram 4GB            cold: dropped from the page cache before every token
python benchmarks/residency.py run FOLDER --ram 4GB --warm     whatever the system keeps in memory of the files
python benchmarks/residency.py run FOLDER --resident           all experts in memory
"""

import argparse
import json
import os
import statistics
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from random_models import RandomWeights, config_of  # first: it finds the package
from safetensors.torch import save_file

from halfbyte.accounting import skeleton
from halfbyte.commands.numbers import byte_count
from halfbyte.engine import Engine, Request
from halfbyte.errors import size
from halfbyte.expert_reader import CUT, THREADS
from halfbyte.loading import load_model
from halfbyte.models import MODELS
from halfbyte.sampling import SamplingParams

NAME = "Qwen3.5-35B-A3B"
LAYER = 256 * 1_769_472  # bytes of a layer's experts
SHARD = 1 << 30
SAMPLED = 0.05  # seconds between two looks at memory


class SavedWeights(RandomWeights):
    """Random weights that go to shards as they are asked for; experts are not kept in memory."""

    shelf = None  # (folder, tensors that wait, shards written), shared by all views

    def __truediv__(self, name):
        made = SavedWeights(self.device, f"{self.prefix}{name}.", self.given)
        made.shelf = self.shelf
        return made

    def tensor(self, name, *shape):
        found = super().tensor(name, *shape)
        self.put({f"{self.prefix}{name}": found})
        return found

    def linear(self, name, N, K, lead=()):
        found = super().linear(name, N, K, lead)
        self.put(parts(f"{self.prefix}{name}", found))
        return found

    def experts(self, name, E, I, H):  # noqa: E741
        found = super().experts(name, E, I, H)
        for projection in ("gate", "up", "down"):
            self.put(parts(f"{self.prefix}{name}.{projection}_proj", getattr(found, projection)))

    def put(self, tensors):
        folder, waiting, written = self.shelf
        waiting |= {f"model.{name}": tensor.clone() for name, tensor in tensors.items()}
        if sum(tensor.nbytes for tensor in waiting.values()) >= SHARD:
            self.flush(folder, waiting, written)

    @staticmethod
    def flush(folder, waiting, written):
        written.append(f"model-part-{len(written):05d}.safetensors")
        save_file(waiting, folder / written[-1], metadata={"format": "mlx"})
        print(written[-1], flush=True)
        waiting.clear()


def parts(name, packed):
    named = {"weight": packed.words.view(torch.uint32), "scales": packed.scales, "biases": packed.biases}
    return {f"{name}.{part}": tensor for part, tensor in named.items()}


def make(args):
    args.folder.mkdir()
    torch.manual_seed(0)
    config, weights = config_of(NAME, max(round(args.gigabytes * 1e9 / LAYER), 1)), SavedWeights("cpu")
    weights.shelf = shelf = (args.folder, {}, [])
    MODELS[config.model_type](config, weights)
    SavedWeights.flush(*shelf)
    values = {**config.values, "quantization": {"group_size": 64, "bits": 4}}
    (args.folder / "config.json").write_text(json.dumps(values))
    print(size(sum(path.stat().st_size for path in args.folder.iterdir())))


class Memory(threading.Thread):
    """The most that this process has resident, looked at every 50 ms."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.page = 0, os.sysconf("SC_PAGE_SIZE")
        self.start()

    def run(self):
        while True:
            self.most = max(self.most, int(Path("/proc/self/statm").read_text().split()[1]) * self.page)
            time.sleep(SAMPLED)


def drop(folder):
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_reads(ranges):
    """Bytes a second of a plain parallel read of these (path, start, size)."""
    waiting, opened = deque(ranges), {path: os.open(path, os.O_RDONLY) for path, _, _ in ranges}

    def work():
        buffer = memoryview(bytearray(CUT))
        while waiting:
            try:
                path, start, count = waiting.popleft()
            except IndexError:
                return
            os.preadv(opened[path], [buffer[:count]], start)

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        for job in [pool.submit(work) for _ in range(THREADS)]:
            job.result()
    return sum(count for _, _, count in ranges) / (time.perf_counter() - start)


def run(args):
    memory, account = Memory(), skeleton(args.folder)[2]
    own = int(Path("/proc/self/statm").read_text().split()[1]) * memory.page
    cache = None if args.resident else args.ram - own - (account.weights - account.experts) - args.spare
    model = load_model(args.folder, "cpu", expert_cache=cache)
    engine = Engine(model, model.new_cache(1, args.tokens + 8))
    engine.submit(Request([1], args.tokens + 2, SamplingParams(temperature=1.0, seed=0)))
    engine.step()
    engine.step()
    seconds, reads, asked = [], [], []
    if model.residency is not None:
        reader = model.residency.reader
        real = reader._read
        reader._read = lambda run: asked.append((run[0].path, run[0].start, run[-1].stop - run[0].start)) or real(run)
    for _ in range(args.tokens):
        if not args.warm and not args.resident:
            drop(args.folder)
        before = model.residency and model.residency.reads
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
        if before is not None:
            reads.append(model.residency.reads - before)
    rate = 1 / statistics.median(seconds)
    allowed = "" if args.resident else f" of {size(args.ram)}"
    print(f"{rate:.2f} tok/s; {size(memory.most)} resident at most{allowed}")
    if not reads:
        return
    total, spent = sum(one.bytes for one in reads), sum(one.seconds for one in reads)
    hits = 1 - sum(one.missing for one in reads) / sum(one.needed for one in reads)
    if not args.warm:
        drop(args.folder)
    plain = plain_reads(asked)
    print(f"{hits:.1%} in memory; {size(round(total / args.tokens))} a token, read at {total / spent / 1e9:.2f} GB/s")
    print(f"the same ranges, plainly: {plain / 1e9:.2f} GB/s, so {total / spent / plain:.0%} of that")
    print(f"of {sum(seconds):.2f} s, reads took {spent:.2f}; {model.residency.reader.waited:.2f} were waited for them")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--gigabytes", type=float, default=16.0)
    making.set_defaults(work=make)
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--ram", type=byte_count, default=byte_count("4GB"), help="of the whole process")
    running.add_argument("--spare", type=byte_count, default=byte_count("200MB"), help="for kernels and activations")
    running.add_argument("--tokens", type=int, default=16)
    running.add_argument("--warm", action="store_true")
    running.add_argument("--resident", action="store_true")
    running.set_defaults(work=run)
    chosen = parser.parse_args()
    chosen.work(chosen)
