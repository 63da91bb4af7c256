"""Experts on disk, measured: tokens a second, what the disk gives beside a plain read of the same bytes, and memory.

python benchmarks/residency.py make FOLDER --gigabytes 16      a random checkpoint, in Qwen3.5-35B-A3B's shape
python benchmarks/residency.py run FOLDER --memory-limit 4GB           cold: dropped from the page cache for each token
python benchmarks/residency.py run FOLDER --expert-cache 3GB --warm    whatever the system keeps in memory of the files
python benchmarks/residency.py warm FOLDER --expert-cache 3GB          the same in turns with all experts in memory
python benchmarks/residency.py run FOLDER                              all experts in memory, where they fit
python benchmarks/residency.py prompt FOLDER --memory-limit 4GB        a prompt instead of a reply, cold
python benchmarks/residency.py bits FOLDER       the same tokens with every policy and budget, directly read and not
"""

import argparse
import json
import mmap
import os
import random
import statistics
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch
from random_models import RandomWeights, config_of  # first: it finds the package
from safetensors.torch import save_file

from halfbyte import hub, memory
from halfbyte.accounting import skeleton
from halfbyte.checkpoint.reading import PAGE
from halfbyte.commands.numbers import byte_count
from halfbyte.engine import Engine, Request, logits
from halfbyte.errors import size
from halfbyte.expert_cache import POLICIES
from halfbyte.expert_reader import CUT, THREADS
from halfbyte.expert_shares import fewest
from halfbyte.fitting import CPU, Allowed
from halfbyte.loading import load_model
from halfbyte.models import MODELS
from halfbyte.sampling import SamplingParams

NAME = "Qwen3.5-35B-A3B"
LAYER = 256 * 1_769_472  # bytes of a layer's experts
SHARD = 1 << 30
SAMPLED = 0.05  # seconds between two looks at memory
GREEDY = SamplingParams(temperature=0.0)
ANY = 1 << 40  # a limit that limits nothing: but files are then read directly


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
        self.most = 0
        self.start()

    def run(self):
        while True:
            self.most = max(self.most, memory.held(CPU))
            time.sleep(SAMPLED)


def drop(folder):
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_seconds(ranges, direct):
    """Of a plain parallel read of these (path, start, size): no layers, no slots, nothing computed beside it."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    waiting, opened = deque(ranges), {path: os.open(path, flags) for path in {path for path, _, _ in ranges}}

    def work():
        buffer = memoryview(mmap.mmap(-1, CUT + 2 * PAGE))
        while waiting:
            try:
                path, start, count = waiting.popleft()
            except IndexError:
                return
            first = start - start % PAGE if direct else start
            last = -(-(start + count) // PAGE) * PAGE if direct else start + count
            os.preadv(opened[path], [buffer[: last - first]], first)

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        for job in [pool.submit(work) for _ in range(THREADS)]:
            job.result()
    seconds = time.perf_counter() - start
    for descriptor in opened.values():
        os.close(descriptor)
    return seconds


def read_plainly(folder, ranges, seconds):
    """One token's ranges again, directly and not, from the disk. Adds what that took."""
    for direct in random.sample((True, False), 2):
        drop(folder)
        seconds[direct] += plain_seconds(ranges, direct)


def load(args):
    limits = Allowed(expert_cache=args.expert_cache, memory_limit=args.memory_limit)
    if not args.warm:
        drop(args.folder)
    start = time.perf_counter()
    model = load_model(args.folder, "cpu", allowed=limits, expert_policy=args.policy, load=args.load)
    print(f"loaded in {time.perf_counter() - start:.2f} s", flush=True)
    for lender in model.residency.lenders.values() if args.blind else ():
        lender.following = None
    return model


def prompt(args):
    model = load(args)
    for turn in range(args.turns + 1):  # the first one fills the cache, and compiles what is not compiled
        if not args.warm:
            drop(args.folder)
        request = Request(random.Random(turn).choices(range(model.vocabulary), k=args.tokens), 1, GREEDY)
        engine, before = Engine(model, model.new_cache(1, args.tokens + 1)), model.residency and model.residency.reads
        waited = model.residency and model.residency.reader.waited
        engine.submit(request)
        start = time.perf_counter()
        while not request.made:
            engine.step()
        seconds = time.perf_counter() - start
        line = f"{args.tokens / seconds:.1f} tok/s, {seconds:.2f} s"
        if before is not None:
            reads, idle = model.residency.reads - before, model.residency.reader.waited - waited
            line += f"; {size(reads.bytes)} read in {reads.seconds:.2f} s, for which {idle:.2f} were waited"
        print(line if turn else f"(first: {line})", flush=True)


def said(model):
    """What it answers to two prompts, and once more to the first, which then finds another cache."""
    found = []
    for seed in (1, 2, 1):
        request = Request(random.Random(seed).choices(range(model.vocabulary), k=24), 8, GREEDY)
        engine = Engine(model, model.new_cache(1, 40))
        engine.submit(request)
        while engine.busy:
            engine.step()
        found.append((request.made, logits(model, request.prompt)[0]))
    return found


def bits(args):
    folder = hub.locate(args.folder)
    whole = load_model(folder, "cpu", allowed=Allowed(fit=False))
    expected = said(whole)
    shares = fewest(list(skeleton(folder)[1].mixtures.values()), whole.experts_per_token)
    every, least = (sum(count * one.expert_bytes for one, count in of) for of in (
        [(one, one.experts) for one in shares], [(one, one.slots) for one in shares],
    ))  # fmt: skip
    del whole
    tried = wrong = 0
    for part, policy, direct in product((0, 0.1, 0.4, 1.0), POLICIES, (False, True)):
        limits = Allowed(max(round(part * every), least), memory_limit=ANY if direct else None)
        model = load_model(folder, "cpu", allowed=limits, expert_policy=policy)
        assert bool(model.residency.reader.files.buffered) != direct
        same = all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(said(model), expected, strict=True))
        tried, wrong = tried + 1, wrong + (not same)
        print(f"{part:4.0%} in memory, {policy}{', directly' * direct}: {'the same' if same else 'WRONG'}", flush=True)
        model.residency.close()
    print(f"{tried} combinations, {wrong} wrong")


def run(args):
    sampled = Memory()
    model = load(args)
    streamed = model.residency is not None
    engine = Engine(model, model.new_cache(1, args.tokens + args.first + 8))
    engine.submit(Request([1], args.tokens + args.first + 2, SamplingParams(temperature=1.0, seed=0)))
    start = time.perf_counter()
    for _ in range(args.first + 1):
        engine.step()
    print(f"the first {args.first + 1} tokens: {time.perf_counter() - start:.2f} s", flush=True)
    seconds, asked, before = [], [], model.residency.reads if streamed else None
    plain = {True: 0.0, False: 0.0}
    if streamed:
        reader = model.residency.reader
        start_reading, waited = reader.start, reader.waited

        def noted(ranges):
            start_reading(ranges)
            asked[-1] += [(run[0].path, run[0].start, run[-1].stop - run[0].start) for run in reader.batch.runs]

        reader.start = noted
    for _ in range(args.tokens):
        if streamed and not args.warm:
            drop(args.folder)
        asked.append([])
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
        if streamed and not args.warm:  # now, for a disk is not the same a minute later
            read_plainly(args.folder, asked[-1], plain)
    limit = "" if args.memory_limit is None else f", {sampled.most / args.memory_limit:.1%} of the limit"
    print(f"{1 / statistics.median(seconds):.2f} tok/s; {size(sampled.most)} resident at most{limit}")
    if streamed:
        report(args, model.residency, model.residency.reads - before, plain, sum(seconds), reader.waited - waited)


def warm(args):
    """Turns of a model whose experts are mapped and of one that copies them out of the system's memory.

    The machine's own bandwidth changes from minute to minute: what counts are turns that follow each other.
    """
    for path in args.folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    models = {
        "in memory": load_model(args.folder, "cpu", load="map"),
        "on disk": load_model(args.folder, "cpu", allowed=Allowed(expert_cache=args.expert_cache)),
    }
    engines, seconds = {}, {name: [] for name in models}
    for name, model in models.items():
        engines[name] = Engine(model, model.new_cache(1, 2 * args.tokens + args.first + 8))
        engines[name].submit(Request([1], 2 * args.tokens + args.first + 2, SamplingParams(temperature=1.0, seed=0)))
        for _ in range(args.first + 1):
            engines[name].step()
    before = models["on disk"].residency.reads
    for _ in range(args.tokens):
        for name in random.sample(list(engines), 2):
            engines[name].step()  # wakes its threads, and the memory that they use
            start = time.perf_counter()
            engines[name].step()
            seconds[name].append(time.perf_counter() - start)
    for name, taken in seconds.items():
        print(f"experts {name}: {1 / statistics.median(taken):.2f} tok/s")
    reads = models["on disk"].residency.reads - before
    held, copies = size(models["on disk"].residency.nbytes), reads.seconds / args.tokens / 2
    print(f"{reads.hit_rate:.1%} of what was needed found in {held}; copies took {copies * 1e3:.0f} ms a token")
    ratios = [whole / part for whole, part in zip(*seconds.values(), strict=True)]
    print(f"{statistics.median(ratios):.0%} of the speed with all experts in memory, the median of {args.tokens} turns")


def report(args, residency, reads, plain, seconds, waited):
    rate, direct = reads.bytes / reads.seconds, not residency.reader.files.buffered
    print(f"{size(residency.nbytes)} of experts in memory, {reads.hit_rate:.1%} of what was needed;", end=" ")
    print(f"{size(round(reads.bytes / args.tokens))} a token, read {'directly ' * direct}at {rate / 1e9:.2f} GB/s")
    print(f"of {seconds:.2f} s, reads took {reads.seconds:.2f}; {waited:.2f} were waited for them")
    for name, straight in () if args.warm else (("directly", True), ("through the system's memory", False)):
        other = reads.bytes / plain[straight]
        print(f"the same ranges in a plain parallel read, {name}: {other / 1e9:.2f} GB/s; {rate / other:.0%} of that")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--gigabytes", type=float, default=16.0)
    making.set_defaults(work=make)
    comparing = commands.add_parser("bits")
    comparing.add_argument("folder", help="or tiny")
    comparing.set_defaults(work=bits)
    turns = commands.add_parser("warm")
    turns.add_argument("folder", type=Path)
    turns.add_argument("--expert-cache", type=byte_count, required=True, help="of experts in memory")
    turns.add_argument("--tokens", type=int, default=24, help="of each, that count")
    turns.add_argument("--first", type=int, default=4, help="tokens that come before")
    turns.set_defaults(work=warm)
    for name, work in (("run", run), ("prompt", prompt)):
        running = commands.add_parser(name)
        running.add_argument("folder", type=Path)
        running.add_argument("--memory-limit", type=byte_count, help="of the whole process")
        running.add_argument("--expert-cache", type=byte_count, help="of experts in memory")
        running.add_argument("--policy", choices=POLICIES, default="lfu")
        running.add_argument("--blind", action="store_true", help="read nothing ahead")
        running.add_argument("--warm", action="store_true", help="leave the page cache as it is")
        running.add_argument("--load", choices=("read", "map"), default="read", help="where all experts fit")
        running.set_defaults(work=work)
        running.add_argument("--tokens", type=int, default=16 if work is run else 512)
        if work is run:
            running.add_argument("--first", type=int, default=4, help="tokens that come before, and fill the cache")
        else:
            running.add_argument("--turns", type=int, default=2)
    chosen = parser.parse_args()
    chosen.work(chosen)
