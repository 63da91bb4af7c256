"""How fast the CPU kernels are: against memory, and against torch, mlx, mlx-lm and llama.cpp on the same machine.

    python benchmarks/cpu.py                          every case, in under ten minutes
    python benchmarks/cpu.py --only product experts   some kinds: product, experts, attention, prompts, decode, prefill

Each competitor is a process of its own. They take turns, shuffled in every round. A turn begins when nothing runs on
the machine (the last one's threads go on waiting for work for some milliseconds, on the CPUs that the next one needs),
and counts only if its threads did not queue for a CPU and got the share of it that this competitor usually gets: the
same rule for all. Rounds go on until enough of them count. What is compared are medians of ratios, each of two turns of
one round. "Of read" is the time of a verified read of the same bytes.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpu_competitors import COMPETITORS, CONTEXT, SHAPE

HERE = Path(__file__).parent
QUEUED, SHARE = 0.04, 0.85  # of a turn's time, in line for a CPU; of the competitor's usual share of it
PATIENCE = 10  # seconds for the turns of a case
CALM = 0.1  # seconds that a turn waits for others to stop, at most
INTEGERS = ("i16", "i8")  # ours beside float32, see --cpu-activations
SHAPES = ((2048, 2048), (4096, 2048), (1024, 4096), (12288, 4096))


class Competitor:
    def __init__(self, name, threads, python):
        self.name = name
        command = [python, str(HERE / "cpu_competitors.py"), name, str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process; a pipe would fill up
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self.says = self.answer()["says"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError((self.log.read().strip().splitlines() or ["it ended without a word"])[-1])
        return json.loads(line)

    def ask(self, **what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def stop(self):
        self.process.kill()
        self.process.communicate()


def packed_bytes(weights, bits=4, group=64):
    return int(weights * (bits / 8 + 4 / group))


def case(name, kind, sizes, size, bars):
    """bars: of (competitor, how many times as fast as it we must be); as fast as a read is 1."""
    return {"name": name, "kind": kind, "sizes": sizes, "bytes": size // 8 * 8, "bars": bars}


def cases():
    made = []
    for N, K in SHAPES:
        made.append(("product", N, K, 1, 4, (("read", 0.8), ("llama.cpp", 1.6))))
    for bits, bar in ((2, 0.75), (8, 0.75), (3, 0.6), (5, 0.6), (6, 0.6)):
        made.append(("product", 4096, 2048, 1, bits, (("read", bar),)))
    for rows, bar in ((128, 1.0), (512, 0.85)):
        for N, K in (SHAPES[0], SHAPES[3]):
            made.append(("prompts", N, K, rows, 4, (("llama.cpp", 1.0), ("torch", bar))))
    for label, N, K, rows, bits, bars in made:
        name = f"{rows} x {N}x{K}, {bits} bit"
        yield label, case(name, "product", (rows, N, K, bits), packed_bytes(N * K, bits), bars)
        if bits == 4:
            for kind in INTEGERS:
                against = () if rows == 1 else (("llama.cpp", 1.0),)
                found = case(f"{name}, {kind}", "product", (rows, N, K, bits), packed_bytes(N * K, bits), against)
                yield label, {**found, "activations": kind}
    size = packed_bytes(8 * 3 * 768 * 2048)
    for kind, bars in (("f32", (("read", 0.65),)), ("i16", (("read", 0.75),)), ("i8", ())):
        found = case(f"8 of 128 experts 768x2048, {kind}", "experts", (128, 8, 768, 2048), size, bars)
        yield "experts", {**found, "activations": kind}
    S, H, G, D = 4096, 32, 8, 128
    size = 2 * S * G * D * 4
    yield "attention", case(f"attention, {S} tokens, {H}/{G} x {D}", "attention", (S, H, G, D), size, (("read", 0.65),))
    bars = {"f32": (("read", 0.55), ("llama.cpp", 1.3), ("mlx", 25)), "i16": (("read", 0.58),), "i8": (("read", 0.58),)}
    for kind in ("f32", *INTEGERS):
        found = case(f"decode, a whole model, {kind}", "decode", (), step_bytes(), bars[kind])
        yield "decode", {**found, "activations": kind}
    for kind in ("f32", *INTEGERS):
        found = case(f"512 tokens, a whole model, {kind}", "prefill", (), step_bytes(), (("llama.cpp", 1.0),))
        yield "prefill", {**found, "activations": kind}


def step_bytes():
    """What a decode step must read: the chosen experts and everything else once, and the cached tokens."""
    s = SHAPE
    attention = s["hidden"] * s["D"] * (2 * s["heads"] + 2 * s["groups"])
    experts = 3 * s["chosen"] * s["inner"] * s["hidden"]
    router = packed_bytes(s["hidden"] * s["experts"], 8)
    layer = packed_bytes(attention + experts) + router + 2 * 4 * CONTEXT * s["groups"] * s["D"]
    return s["layers"] * layer + packed_bytes(s["hidden"] * s["vocabulary"])


def turns(competitors, what, rounds):
    """{name: [seconds, or None where the turn does not count]}, a round each: until enough count, or time is up."""
    offered = [one for one in competitors if one.ask(make=what)["offered"]]
    taken, end = {one.name: [] for one in offered}, time.monotonic() + PATIENCE
    while True:
        for one in random.sample(offered, len(offered)):
            wait_for_calm()
            taken[one.name].append(one.ask(turn=True))
        counted = {name: those_that_count(each) for name, each in taken.items()}
        if min(sum(one is not None for one in each) for each in counted.values()) >= rounds:
            return counted
        if time.monotonic() > end:
            return counted


def wait_for_calm():
    """Until no thread but this one is running, or for as long as a turn may wait for that."""
    end = time.monotonic() + CALM
    while time.monotonic() < end:
        time.sleep(0.002)
        stat = Path("/proc/stat").read_text() if Path("/proc/stat").exists() else "procs_running 1"
        if int(stat.partition("procs_running ")[2].split()[0]) <= 1:
            return


def those_that_count(each):
    usual = statistics.median(turn["share"] for turn in each)
    return [turn["seconds"] if turn["queued"] <= QUEUED and turn["share"] >= SHARE * usual else None for turn in each]


def ratio(taken, name):
    """How many times as fast as `name` we are: the median over rounds in which both turns count."""
    pairs = zip(taken.get(name, ()), taken["halfbyte"], strict=False)
    ratios = [theirs / ours for theirs, ours in pairs if theirs is not None and ours is not None]
    return statistics.median(ratios) if ratios else None


def row(what, taken):
    ours = [seconds for seconds in taken["halfbyte"] if seconds is not None]
    times = f"{statistics.median(ours) * 1e6:.0f} us" if ours else "-"
    cells = [what["name"], times]
    for name in COMPETITORS:
        if name != "halfbyte":
            found = ratio(taken, name)
            cells.append("" if found is None else f"{found:.2f}")
    kept = sum(seconds is not None for each in taken.values() for seconds in each)
    cells.append(f"{kept}/{sum(map(len, taken.values()))}")
    return "| " + " | ".join(cells) + " |"


def judged(what, taken):
    """A line for each bar: met, missed, or why nothing can be said."""
    for name, least in what["bars"]:
        found = ratio(taken, name)
        bar = f"{what['name']}: {least} of read" if name == "read" else f"{what['name']}: {least}x {name}"
        if found is None:
            yield "unknown", f"{bar}: {'every turn was disturbed' if name in taken else f'{name} is not here'}"
        else:
            yield ("met" if found >= least else "missed"), f"{bar}: {found:.2f}"


def started(names, threads, python):
    running = []
    for name in names:
        try:
            running.append(Competitor(name, threads, python if name == "llama.cpp" else sys.executable))
            if running[-1].says:
                print(f"{name}: {running[-1].says}")
        except (RuntimeError, OSError) as error:
            print(f"{name} is left out: {error}")
    return running


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), metavar="KIND")
    parser.add_argument("--against", nargs="+", default=list(COMPETITORS), choices=list(COMPETITORS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--llama", default=sys.executable, metavar="PYTHON", help="the Python that has llama-cpp-python"
    )
    asked = parser.parse_args()
    begun, bars = time.monotonic(), []
    running = started(dict.fromkeys(("halfbyte", *asked.against)), asked.threads, asked.llama)
    others = [name for name in COMPETITORS if name != "halfbyte"]
    print(
        f"\n| case | halfbyte | {' | '.join('of read' if name == 'read' else f'x {name}' for name in others)} | turns |"
    )
    print("|---" * (len(others) + 3) + "|")
    try:
        for kind, what in cases():
            if not asked.only or kind in asked.only:
                taken = turns(running, what, asked.rounds if kind in ("product", "experts", "attention") else 7)
                print(row(what, taken), flush=True)
                bars += judged(what, taken)
    finally:
        for one in running:
            one.stop()
    print()
    for verdict, said in bars:
        print(f"{verdict:8}{said}")
    print(f"\n{sum(verdict == 'met' for verdict, _ in bars)} of {len(bars)} bars met, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
