"""Every serving configuration compiles for every GPU we name, within its shared memory; no GPU is needed."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("cross_compile.py")
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


@pytest.fixture(scope="module")
def outcomes():
    """One process a target, as many at a time as there are cores: kernels compile where Triton does not interpret."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}

    def compiled(target):
        command = [sys.executable, str(SCRIPT), "all", target]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {target: pool.submit(compiled, target) for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_serving_configurations_compile_within_shared_memory(target, outcomes):
    done = outcomes[target].result()
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = int(done.stdout.split(f"{target}: ")[1].split()[0])
    assert kernels > 80
