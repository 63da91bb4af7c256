"""Every serving configuration compiles for the GPUs we name, within their shared memory; no GPU is needed.

That takes minutes of one core: conftest.py begins it with the first test of a session, beside all others and behind
them in priority, so that it has what they leave idle, and these tests come last.
"""

import os

import pytest

# Without Hopper's products and with little shared memory; with both. All GPUs, another maker's too, and all cases take
# too long for every change: .ci/full asks for those.
EVERY = bool(os.environ.get("EVERY_TARGET"))
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942") if EVERY else ("sm_86", "sm_90")
# What is served compiles for every target; all else, where arguments of 0 and 1 become constants, for one: first, since
# it takes longest.
RUNS = [("small", "sm_90")] * EVERY + [(which, target) for which in ("serving", "fused") for target in TARGETS]


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_kernels_compile_within_shared_memory(run, compilations):
    status, said = compilations[run].result()
    assert status == 0, said
    kernels = int(said.split(f"{run[1]}: ")[-1].split()[0])
    assert kernels > (10 if run[0] == "fused" else 80)
