"""Metal kernels on a CPU: `compile_shader` stands in for torch.mps.compile_shader, on CPU tensors.

A source is translated to C++ (translation.py), compiled with g++ and run by machine.cpp, which checks every access.
What the launchers bind is checked as torch and Metal would, and listed where a test asks: see `recording`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.metal import shaders

from .translation import translate

HERE = Path(__file__).parent
HEADERS = ("machine.h", "metal_stdlib", "metal_simdgroup_matrix")
SHARED = ["-fPIC", "-shared", f"-I{HERE}"]
LANGUAGE = ["-std=c++14", "-Werror=c++17-extensions", "-ffp-contract=off", "-fsingle-precision-constant", "-fwrapv"]
CHECKS = ["-fsanitize=thread,alignment,bounds", "--param", "tsan-instrument-func-entry-exit=0"]
# Without the usual libraries: with them would come the sanitizer's, in whose place machine.cpp stands.
KERNEL_FLAGS = [*SHARED, *LANGUAGE, *CHECKS, "-O1", "-g1", "-w", "-fno-strict-aliasing", "-fno-exceptions", "-nostdlib"]
MACHINE_FLAGS = [*SHARED, "-std=c++17", "-O2", "-U_FORTIFY_SOURCE"]
CASTS = {"int32": ctypes.c_int32, "int16": ctypes.c_int16, "int8": ctypes.c_int8, "uint8": ctypes.c_uint8}
MOST_ARGUMENTS, MOST_THREADS, MOST_BYTES, SIMD = 31, 1024, 4096, 32  # Metal's: bytes are those of a number's array
NUMBERS, TENSOR, ADDRESSES = 0, 1, 2  # kinds of arguments, as memory.h has them

order = 2  # of simd groups, their lanes and threadgroups: 0 ascending, 1 descending, any other number a shuffle


class Fault(AssertionError):
    """What the machine found wrong with a launch."""


@dataclass(frozen=True)
class Launch:
    """One launch as it was asked for."""

    kernel: str
    arguments: tuple[Any, ...]
    threads: tuple[int, ...]
    group_size: tuple[int, ...]


_recorded: list[Launch] | None = None


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """List every launch inside the block."""
    global _recorded
    outer, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = outer


@contextmanager
def scheduled(way: int) -> Iterator[None]:
    """Run every launch inside the block in this order."""
    global order
    outer, order = order, way
    try:
        yield
    finally:
        order = outer


def compile_shader(source: str) -> Library:
    return Library(source)


class Library:
    """As torch's: an attribute is a kernel."""

    def __init__(self, source: str) -> None:
        machine()  # a kernel's file asks it for its symbols
        headers = "".join((HERE / name).read_text(encoding="utf-8") for name in HEADERS)
        self.loaded = ctypes.CDLL(str(built(translate(source), KERNEL_FLAGS, headers)))

    def __getattr__(self, name: str) -> Kernel:
        threads = ctypes.c_uint.in_dll(self.loaded, f"threads_{name}").value
        return Kernel(name, ctypes.cast(self.loaded[f"entry_{name}"], ctypes.c_void_p), threads)


class Kernel:
    def __init__(self, name: str, entry: ctypes.c_void_p, threads: int) -> None:
        self.name, self.entry, self.threads = name, entry, threads  # threads: of a group, at most

    def __call__(self, *arguments: Any, threads: Any, group_size: Any, arg_casts: dict[int, str] | None = None) -> None:
        grid, group = triple(threads), triple(group_size)
        if _recorded is not None:
            _recorded.append(Launch(self.name, arguments, grid, group))
        self.require(len(arguments) <= MOST_ARGUMENTS, f"{len(arguments)} arguments")
        size = group[0] * group[1] * group[2]
        most = min(self.threads, MOST_THREADS)
        self.require(size % SIMD == 0 and 0 < size <= most, f"{size} threads in a group")
        whole = all(t > 0 and t % g == 0 for t, g in zip(grid, group, strict=True))
        self.require(whole, f"{grid} threads in groups of {group}")
        # Tensors of lists follow the arguments: the kernel finds them by their addresses.
        inside = [tensor for a in arguments if of_tensors(a) for tensor in a]
        bound = (Argument * (len(arguments) + len(inside)))()
        kept = []
        for index, argument in enumerate([*arguments, *inside]):
            bound[index], keep = self.bind(argument, (arg_casts or {}).get(index))
            kept.append(keep)
        geometry = (ctypes.c_uint32 * 6)(*(t // g for t, g in zip(grid, group, strict=True)), *group)
        if machine().machine_run(self.entry, bound, len(bound), geometry, order):
            raise Fault(f"{self.name}: {finding()}")

    def require(self, condition: bool, got: str) -> None:
        if not condition:
            raise Fault(f"{self.name}: Metal does not allow {got}")

    def bind(self, argument: Any, cast: str | None) -> tuple[Argument, Any]:
        """As torch binds it: a tensor's memory, tensors' addresses, an int64, a float32 or an array of them."""
        if isinstance(argument, Tensor):
            self.require(argument.numel() > 0, "an empty buffer")
            extent = 1 + sum((n - 1) * s for n, s in zip(argument.shape, argument.stride(), strict=True))
            return Argument(argument.data_ptr(), extent * argument.element_size(), TENSOR, 0), argument
        if of_tensors(argument):
            self.require(8 * len(argument) <= MOST_BYTES, f"{len(argument)} addresses")
            addresses = (ctypes.c_uint64 * len(argument))(*(t.data_ptr() for t in argument))
            return Argument(ctypes.addressof(addresses), ctypes.sizeof(addresses), ADDRESSES, 0), addresses
        values = list(argument) if isinstance(argument, list | tuple) else [argument]
        self.require(len(values) > 0 and all(type(v) in (int, float) for v in values), f"the argument {argument!r}")
        kind = CASTS[cast] if cast else ctypes.c_int64 if type(values[0]) is int else ctypes.c_float
        array = (kind * len(values))(*values)
        return Argument(ctypes.addressof(array), ctypes.sizeof(array), NUMBERS, 0), array


class Argument(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("region", ctypes.c_int32),
        ("offset", ctypes.c_uint64),
    )


def of_tensors(argument: Any) -> bool:
    return isinstance(argument, list | tuple) and len(argument) > 0 and isinstance(argument[0], Tensor)


def triple(size: int | tuple[int, ...]) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (*sizes, 1, 1)[:3]


@cache
def machine() -> ctypes.CDLL:
    source = (HERE / "machine.cpp").read_text(encoding="utf-8")
    headers = "".join((HERE / name).read_text(encoding="utf-8") for name in ("machine.h", "memory.h"))
    library = ctypes.CDLL(str(built(source, MACHINE_FLAGS, headers)), mode=ctypes.RTLD_GLOBAL)
    library.machine_finding.restype = ctypes.c_char_p
    return library


def finding() -> str:
    """What was found, with the line of the source where that is known."""
    file, address = ctypes.create_string_buffer(4096), ctypes.c_uint64()
    text = machine().machine_finding(file, len(file), ctypes.byref(address)).decode()
    if not file.value:
        return text
    command = ["addr2line", "-i", "-e", file.value.decode(), hex(address.value)]
    places = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    lines = [place.split(":")[1].split()[0] for place in places if "kernel.metal:" in place]
    return f"{text} (line {', called from '.join(lines)})" if lines else text


def built(code: str, flags: list[str], included: str) -> Path:
    """The shared object of some C++, made once: its name is a hash of all that went into it."""
    key = hashlib.sha256("\0".join([code, included, *flags]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / "halfbyte-metal"
    folder.mkdir(exist_ok=True)
    made = folder / f"{key}.so"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            fresh = Path(work) / made.name
            command = ["g++", *flags, "-x", "c++", "-", "-o", str(fresh), "-lgcc"]
            done = subprocess.run(command, input=code, text=True, capture_output=True)
            if done.returncode:
                raise SyntaxError(f"g++ refused the kernel:\n{done.stderr[:4000]}")
            os.replace(fresh, made)
    return made


def install() -> str:
    """Have the launchers use this, unless the machine has an Apple GPU of its own; the device to test on."""
    if torch.backends.mps.is_available():
        return "mps"
    if shaders.compile_shader is torch.mps.compile_shader:  # what else a test has put there stays
        shaders.compile_shader = compile_shader
    return "cpu"
