"""Compiles what the launchers would launch, for any GPU, without one: a driver that answers with a target, and meta
tensors that have a shape but no memory. That a launcher runs on them also shows that it never waits for the device.

    python tests/cross_compile.py serving sm_90             every serving case of every op, for one target
    python tests/cross_compile.py small sm_90               every other case, in float32 and bfloat16
    python tests/cross_compile.py fused sm_90               what a recorded step launches in the place of several ops
    python tests/cross_compile.py qmm sm_90                 of one op, or of one such launch
    python tests/cross_compile.py 'qmm[...]' sm_90 --sass   one case, and its machine code
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton
from fused_launches import LAUNCHES
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from halfbyte.cases import CASES
from halfbyte.kernels.triton import device
from halfbyte.ops.dispatch import using

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), device.Facts(80, 108, device.SHARED[80])),
    "sm_86": (GPUTarget("cuda", 86, 32), device.Facts(86, 84, device.SHARED[86])),
    "sm_89": (GPUTarget("cuda", 89, 32), device.Facts(89, 128, device.SHARED[89])),
    "sm_90": (GPUTarget("cuda", 90, 32), device.Facts(90, 132, device.SHARED[90])),
    "sm_100": (GPUTarget("cuda", 100, 32), device.Facts(100, 148, device.SHARED[100])),
    "sm_120": (GPUTarget("cuda", 120, 32), device.Facts(120, 170, device.SHARED[120])),
    "gfx942": (GPUTarget("hip", "gfx942", 64), device.Facts(0, 304, 65536)),
}


# These multiply what their threads have loaded themselves (kernels/triton/laid.py); where tiles lie otherwise, every
# operand comes by way of shared memory: 68 to 552 loads from there, and otherwise at most 20.
FROM_REGISTERS, FETCHED = ("matvec_kernel", "nibbles_kernel", "pairs_kernel", "rows_kernel"), 32


class Pretended:
    """A GPU driver that launches nothing."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@contextmanager
def compiled_for(name):
    """Inside, every launch compiles for this target instead of running; gives the list of what was compiled."""
    target, facts = TARGETS[name]
    made, touched, run = [], set(), JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        touched.add(self)
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        made.append(kernel)
        return kernel

    triton.runtime.driver.set_active(Pretended(target))
    device.pretend(facts)
    JITFunction.run = compile_only
    try:
        with using("triton"):
            yield made
    finally:
        JITFunction.run = run
        for function in touched:
            function.device_caches.clear()  # compiled for this target
        device.pretend(None)
        triton.runtime.driver._active = None


def launches(case, dtype=torch.bfloat16):
    """What one call of a case launches."""
    args, kwargs = case.inputs(dtype, device="meta")
    case.op(*args, **kwargs)


def wanted(chosen):
    """What to compile: its name, and what launches it."""
    for name, (launch, shape) in LAUNCHES.items():
        if chosen in ("fused", name, launch.__name__):
            yield name, partial(launch, *shape)
    for case in CASES:
        if chosen == "small" and not case.serving:
            for dtype in (torch.float32, torch.bfloat16):
                yield f"{case} in {dtype}", partial(launches, case, dtype)
        elif chosen == str(case) or (case.serving and chosen in ("serving", case.op.__name__)):
            yield str(case), partial(launches, case)


def main():
    chosen, name, *options = sys.argv[1:]
    limit, failed, seen = TARGETS[name][1].shared, 0, set()
    with compiled_for(name) as made:
        for case, launch in wanted(chosen):
            made.clear()
            try:
                launch()
            except Exception as error:
                print(f"{case}  FAILED for {name}: {type(error).__name__}: {error}", flush=True)
                failed += 1
            for kernel in made:
                m = kernel.metadata
                failed += m.shared > limit
                if m.name in FROM_REGISTERS and (fetched := kernel.asm.get("ptx", "").count("ld.shared")) > FETCHED:
                    print(f"{case}  {m.name} FAILED for {name}: {fetched} loads from shared memory", flush=True)
                    failed += 1
                if chosen not in ("serving", "small", "fused") or m.shared > limit:
                    print(f"{case}  {m.name}  warps {m.num_warps}  stages {m.num_stages}  shared {m.shared} of {limit}")
                seen.add(kernel.hash)
                for form in ("ttir", "ttgir", "llir", "ptx", "sass"):
                    if f"--{form}" in options:
                        print(kernel.asm[form])
    print(f"{name}: {len(seen)} kernels compiled, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
