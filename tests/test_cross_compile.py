"""Every serving configuration compiles for the GPUs we name, within their shared memory; no GPU is needed."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("cross_compile.py")
# Without Hopper's products and with little shared memory; with both; of another maker. All of them take too long for
# every change: .ci/full asks for those.
TARGETS = ("sm_86", "sm_90", "gfx942")
if os.environ.get("EVERY_TARGET"):
    TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
# What is served compiles for every target; all else, where arguments of 0 and 1 become constants, for one: first, since
# it takes longest.
RUNS = [("small", "sm_90"), *((which, target) for which in ("serving", "fused") for target in TARGETS)]


@pytest.fixture(scope="module")
def outcomes():
    """One process a run, as many at a time as there are cores; there Triton compiles, where here it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}

    def compiled(run):
        return subprocess.run(
            [sys.executable, str(SCRIPT), *run], capture_output=True, text=True, env=environment, check=False
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {run: pool.submit(compiled, run) for run in RUNS}


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_kernels_compile_within_shared_memory(run, outcomes):
    done = outcomes[run].result()
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = int(done.stdout.split(f"{run[1]}: ")[-1].split()[0])
    assert kernels > (10 if run[0] == "fused" else 80)
