"""How the CPU kernels grow with threads: a table, and the same as JSON.

    python benchmarks/scaling.py                     1, 2, 4, ... threads up to the cores, 40 s each
    python benchmarks/scaling.py --threads 1 16

Each number of threads has a process of its own, in which turns of a kernel and of a verified read of the same bytes by
the same threads take each other's place; turns whose threads queued for a core do not count. Weights rotate through
several times the last cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

from cpu import QUEUED, case, packed_bytes
from cpu_competitors import ROTATED, Halfbyte, Read, turn

ROUNDS, PATIENCE = 11, 6  # rounds that count; seconds that they are waited for
REGIONS = 200  # empty parallel loops that one timing goes through
IDLE = 0.005  # seconds after which threads no longer wait for work


def cases():
    for rows, N, K in ((1, 4096, 2048), (1, 12288, 4096), (512, 2048, 2048)):
        yield f"{rows} x {N}x{K}, 4 bit", "product", (rows, N, K, 4), packed_bytes(N * K)
    yield "8 of 128 experts 768x2048", "experts", (128, 8, 768, 2048), packed_bytes(8 * 3 * 768 * 2048)
    yield "attention, 4096 tokens, 32/8 x 128", "attention", (4096, 32, 8, 128), 2 * 4096 * 8 * 128 * 4


def rotated():
    """Bytes to go round: three times all the last caches that these cores have together."""
    caches = {}
    for core in os.sched_getaffinity(0):
        folder = Path(f"/sys/devices/system/cpu/cpu{core}/cache/index3")
        if folder.is_dir():
            size = int((folder / "size").read_text().strip().removesuffix("K")) << 10
            caches[(folder / "shared_cpu_list").read_text()] = size
    return min(1 << 30, max(ROTATED, 3 * sum(caches.values())))


def measured(threads):
    """{case: {seconds, read}} with so many threads; seconds of a call, and of a read of its bytes."""
    ours, read, rows, going_round = Halfbyte(threads), Read(threads), {}, rotated()
    for name, kind, sizes, size in cases():
        what = {**case(name, kind, sizes, size, ()), "rotated": going_round}
        calls = [cycle(competitor.make(what)) for competitor in (ours, read)]
        for one in (*calls, *calls):  # compiled, then awake
            next(one)()
        rows[name] = {"bytes": what["bytes"], **paired(*calls)}
    return {**rows, **regions(threads)}


def paired(ours, read):
    """Medians over rounds of a turn each: seconds of a call and of a read, and of their ratio."""
    counted, disturbed, end = [], [], time.monotonic() + PATIENCE
    while len(counted) < ROUNDS and time.monotonic() < end:
        turns = turn(ours), turn(read)
        calm = max(one["queued"] for one in turns) <= QUEUED
        (counted if calm else disturbed).append([one["seconds"] for one in turns])
    used = counted if len(counted) >= 3 else counted + disturbed
    took, reading = (statistics.median(each) for each in zip(*used, strict=True))
    of_read = statistics.median(floor / seconds for seconds, floor in used)
    return {"seconds": took, "read": reading, "of_read": of_read, "rounds": len(counted)}


def regions(threads):
    """What a parallel loop costs that does nothing: one after the other, and after a pause."""
    import numpy as np
    from numba import njit, prange

    @njit(parallel=True)
    def region(marks):
        for i in prange(marks.size):
            marks[i] += 1

    @njit
    def many(marks, count):
        for _ in range(count):
            region(marks)

    marks, hot, cold = np.zeros(threads), [], []
    many(marks, 1)
    for _ in range(ROUNDS):
        many(marks, REGIONS)
        start = time.perf_counter()
        many(marks, REGIONS)
        hot.append((time.perf_counter() - start) / REGIONS)
        time.sleep(IDLE)
        start = time.perf_counter()
        many(marks, 1)
        cold.append(time.perf_counter() - start)
    return {
        "an empty region": {"seconds": statistics.median(hot)},
        f"an empty region after {IDLE * 1e3:.0f} ms idle": {"seconds": statistics.median(cold)},
    }


def cell(row, one):
    """The time, how many times as fast as the fewest threads, and the part of read, where that is a bound."""
    took = row["seconds"] * 1e6
    said = [f"{took:.1f} us" if took < 100 else f"{took:.0f} us"]
    if "bytes" in row:
        said.append(f"{one['seconds'] / row['seconds']:.2f}x")
        said += [f"{row['of_read']:.2f} of read"] * (row["of_read"] > 0.1) + ["disturbed"] * (row["rounds"] < 3)
    return ", ".join(said)


def table(results):
    counts = list(results)
    yield f"| threads | {' | '.join(map(str, counts))} |"
    yield "|---" * (len(counts) + 1) + "|"
    for name in results[counts[0]]:
        rows = [results[count][name] for count in counts]
        yield f"| {name} | {' | '.join(cell(row, rows[0]) for row in rows)} |"
    largest = max((row["bytes"], name) for name, row in results[counts[0]].items() if "bytes" in row)[1]
    speeds = [results[count][largest]["bytes"] / results[count][largest]["read"] / 1e9 for count in counts]
    yield f"| read, GB/s | {' | '.join(f'{speed:.1f}' for speed in speeds)} |"


def main():
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [count for count in (1, 2, 4, 8, 16) if count <= cores]
    parser.add_argument("--threads", nargs="+", type=int, default=usual, metavar="N")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)  # in the process of one number of threads
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measured(asked.measure)))
        return
    begun, results = time.monotonic(), {}
    for count in asked.threads:
        command = [sys.executable, __file__, "--measure", str(count)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(count)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        results[count] = json.loads(done.stdout.splitlines()[-1])
        print(f"{count} threads measured, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    from halfbyte import machine

    print("\n".join(table(results)))
    print(json.dumps({"machine": machine.facts(), "threads": results}))


if __name__ == "__main__":
    main()
