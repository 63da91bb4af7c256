"""GPU kernels are compiled ahead by processes, once: shown without a GPU, by a driver that answers with a target."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
SCRIPT = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
import torch, triton
from cross_compile import Pretended, TARGETS
from halfbyte.kernels.triton import compiling, device
from halfbyte.ops.dispatch import using
from halfbyte.ops.rowwise import rms_norm, softcap

target, facts = TARGETS["sm_90"]
triton.runtime.driver.set_active(Pretended(target))
device.pretend(facts)
said = []

def steps():
    with using("triton"):
        for _ in range(3):
            rms_norm(torch.empty(4, 64, device="meta"))
            softcap(torch.empty(4, 64, device="meta"), 30.0)

print(compiling.prepare(steps, lambda done, total: said.append((done, total))), said)
print(compiling.prepare(steps, lambda done, total: said.append((done, total))), len(said))
for _ in range(2):
    print(compiling.prepare(lambda: print("rehearsed"), None, "a model"))
with compiling.rehearsal() as noted:
    steps()
print(len(noted), all(compiling.compiled(kernel.key) for kernel in noted))
"""


def test_kernels_are_compiled_by_other_processes_and_found_afterwards(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 [(0, 2), (1, 2), (2, 2)]", "0 3", "rehearsed", "0", "0", "2 True"]
