"""The threads that run the kernels: our own, which come where they can, and Numba's where those are not to be had."""

import os
import subprocess
import sys
from threading import Thread

import numba
import numpy as np
import pytest
import torch
from model_goldens import FOLDER
from numba import njit, prange

from halfbyte import machine
from halfbyte.engine import Engine, Request
from halfbyte.loading import load_model
from halfbyte.scheduler import Scheduler

# As where our threads are not offered, and libgomp is absent.
WITH_WORKQUEUE = """
import os, sys
os.environ["NUMBA_THREADING_LAYER"] = "workqueue"
import torch
from halfbyte import machine
from halfbyte.cli import main
from halfbyte.ops.rowwise import glu
x = torch.randn(64, 1024)
assert torch.allclose(glu(x, x), torch.nn.functional.silu(x) * x, atol=1e-5)
assert main(["generate", "tiny", "--prompt", "Once", "-n", "4"]) == 0
sys.exit(main(["doctor"]))
"""
# A fork takes the helpers away; OpenMP's threads would be waited for without an end.
FORKED = """
import os, signal, torch
from halfbyte.ops.rowwise import glu
torch.set_num_threads(1)  # it has OpenMP's
x = torch.randn(512, 1024)
before = glu(x, x)
for turn in range(3):
    if (child := os.fork()) == 0:
        signal.alarm(20)
        same = all(torch.equal(glu(x, x), before) for _ in range(50))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(glu(x, x), before)
"""
needs_own = pytest.mark.skipif(machine.threading_layer() != "own", reason="our own threads are for Linux")


@njit(parallel=True)
def doubled(x, y, times):
    total = 0
    for _ in range(times):
        for i in prange(x.size):
            y[i] = 2 * x[i]
            total += x[i]
    return total


@njit(parallel=True)
def nested(x, y):
    for i in prange(x.shape[0]):
        doubled(x[i], y[i], 1)


@needs_own
@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 1000])
def test_every_part_of_a_loop_is_done_once(count):
    x, y = np.arange(count), np.zeros(count, np.int64)
    assert doubled(x, y, 500) == 500 * x.sum()
    assert np.array_equal(y, 2 * x)


@needs_own
def test_a_loop_in_a_loop():
    x = np.arange(8 * 1000).reshape(8, 1000)
    y = np.zeros_like(x)
    nested(x, y)
    assert np.array_equal(y, 2 * x)


@needs_own
def test_loops_of_several_threads_at_once():
    """One of them has the helpers, the others do without."""
    wrong = []

    def work(number):
        x, y = np.arange(500) + number, np.zeros(500, np.int64)
        if doubled(x, y, 3000) != 3000 * x.sum() or not np.array_equal(y, 2 * x):
            wrong.append(number)

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and not wrong


@needs_own
def test_more_threads_than_cores():
    code = "import test_threads as t; [t.test_every_part_of_a_loop_is_done_once(n) for n in (3, 64, 1000)]"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "NUMBA_NUM_THREADS": "9"}, cwd=os.path.dirname(__file__),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# Helpers that were hired for nine threads, and a loop that may have two.
FEWER = """
import time, numba, numpy as np
from pathlib import Path
import test_threads as t
def seconds():  # of every thread on a CPU
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}
x, y = np.arange(1000), np.zeros(1000, np.int64)
t.doubled(x, y, 2000)
time.sleep(0.1)  # they fall asleep
numba.set_num_threads(2)
before, end = seconds(), time.monotonic() + 0.5
while time.monotonic() < end:
    t.doubled(x, y, 10)
    time.sleep(0.002)  # so do those who may help
taken = [after - before.get(task, 0.0) for task, after in seconds().items()]
assert sum(one > 0.01 for one in taken) <= 2, taken
"""


@needs_own
def test_helpers_who_may_not_help_sleep():
    environment = {**os.environ, "NUMBA_NUM_THREADS": "9"}
    done = subprocess.run(
        [sys.executable, "-c", FEWER], env=environment, cwd=os.path.dirname(__file__), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@needs_own
def test_kernels_run_after_a_fork():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@needs_own
def test_torch_keeps_to_one_thread_during_a_step():
    """Its threads would look for work on cores that the kernels need."""
    model, before, seen = load_model(FOLDER / "qwen3_moe-4bit"), torch.get_num_threads(), []
    engine = Engine(model, model.new_cache(1, 20), replays=False)
    engine.submit(Request([1, 2, 3], 2, processors=[lambda ids, row: seen.append(torch.get_num_threads()) or row]))
    torch.set_num_threads(2)
    try:
        engine.step()
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_slow_pool_is_spoken_of():
    done = subprocess.run([sys.executable, "-c", WITH_WORKQUEUE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "(workqueue)" in done.stdout and "libgomp" in done.stdout
    assert done.stderr.count("workqueue") == 1


def test_waiting_asleep_is_spoken_of():
    code = "from halfbyte import machine; print(machine.threading_layer(), machine.slow_threads())"
    asked = {"NUMBA_THREADING_LAYER": "omp", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.startswith("omp") and "unset it" in done.stdout, done.stderr


def test_the_thread_of_a_server_has_as_many_threads():
    """Numba counts for each thread anew."""
    model, before, seen = load_model(FOLDER / "qwen3_moe-4bit"), torch.get_num_threads(), []

    class Watched(Scheduler):
        def _drop_cancelled(self):
            seen.append(numba.get_num_threads())
            self.closing = True

    machine.use_threads(1)
    try:
        other = Thread(target=lambda: seen.append(numba.get_num_threads()))
        other.start()
        other.join()
        scheduler = Watched(model, model.new_cache(1, 20), frozenset(), lambda *pieces: None)
        scheduler.waiting.append(None)
        scheduler.start()
        scheduler.thread.join(60)
    finally:
        machine.use_threads(before)
    assert seen[1:] == [1]
