"""Tensors that say they are on an Apple GPU and have no memory: what the Python of a Mac does, without one.

Shapes, types and devices are as they would be there, and what a Mac refuses is refused: float64 on its GPU, and a
kernel that is given memory of another device. Nothing is computed; executor.py does that, on a CPU's tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfbyte.check import tensors
from halfbyte.kernels.metal import shaders

from .executor import SHARED, built

# A torch without MPS has nothing to switch to its devices with, which indexing asks for.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(MPS, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS>);
"""


class NoDoubles(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(one.device.type == "mps" and one.dtype == torch.float64 for one in tensors(made)):
            raise TypeError(f"{func}: an Apple GPU has no float64")
        return made


@dataclass(frozen=True)
class Kernel:
    name: str

    def __call__(self, *arguments: Any, threads: Any, group_size: Any, arg_casts: Any) -> None:
        for tensor in tensors(arguments):
            if tensor.device.type != "mps":
                raise TypeError(f"{self.name}: it is given memory of {tensor.device}")


class Library:
    def __init__(self, source: str) -> None:
        pass

    def __getattr__(self, name: str) -> Kernel:
        return Kernel(name)


@contextmanager
def imagined() -> Iterator[None]:
    """Inside the block this machine has an Apple GPU."""
    if not torch.backends.mps.is_available():
        guard()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shaders, "compile_shader", Library)
        shaders.kernel.cache_clear()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), NoDoubles():
                yield
        finally:
            shaders.kernel.cache_clear()


@cache
def guard() -> ctypes.CDLL:
    torchs = Path(torch.__file__).parent
    flags = [*SHARED, "-std=c++20", f"-I{torchs / 'include'}", f"-L{torchs / 'lib'}", "-Wl,--no-as-needed", "-lc10"]
    return ctypes.CDLL(str(built(GUARD, flags, torch.__version__)))
