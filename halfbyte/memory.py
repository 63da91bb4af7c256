"""How much memory there is, on each device, and memory for weights."""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from .errors import NotEnoughMemory, size

LARGE = 2 << 20  # from here on memory of its own, in large pages: filling small ones costs as much as reading the file
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
LIMITS: dict[str, int] = {}  # by kind of device: bytes that this process may hold, where somebody said so


def require(need: int, device: torch.device, what: str) -> None:
    """Refuse before anything is allocated."""
    have = available(device)
    if need > have:
        raise NotEnoughMemory(
            f"{what} needs {size(need)} on {device}, and {size(have)} are free there. "
            "Free some, take a smaller quantisation, or use another device."
        )


def available(device: torch.device) -> int:
    """Bytes that can be taken on a device now."""
    limit = LIMITS.get(device.type)
    left = [] if limit is None else [max(limit - held(device), 0)]
    if device.type == "cuda":
        return min([torch.cuda.mem_get_info(device)[0], *left])
    if device.type == "mps":
        return min([torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), *left])
    return min(limit for limit in (_system(), _cgroup(), _address_space(), *left) if limit is not None)


def restrict(limit: int, device: torch.device) -> None:
    """From now on this process may hold so many bytes on a device: what is free there is what is left of them."""
    LIMITS[device.type] = limit


def held(device: torch.device) -> int:
    """Bytes that this process holds on a device now; on the host, all that it has resident."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    with suppress(OSError, ValueError):
        return int((PROC / "self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak(device)


def peak(device: torch.device) -> int:
    """The most bytes that this process has held on a device so far, or since `forget_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    with suppress(OSError, ValueError):
        for line in (PROC / "self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def forget_peak(device: torch.device) -> None:
    """Let the most that is held count from now on; where the system cannot, it counts from the start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with suppress(OSError):
            (PROC / "self/clear_refs").write_text("5")


def allocate(count: int, device: torch.device) -> Tensor:
    """`count` bytes, uninitialised."""
    try:
        if device.type == "cpu" and count >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
            area = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without large pages
                area.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(area, dtype=torch.uint8)
        return torch.empty(count, dtype=torch.uint8, device=device)
    except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError, and the CPU's has no name
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise NotEnoughMemory(f"{device} has no {size(count)} left for a tensor. Use another device.") from error


def shown_as(memory: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Bytes as a tensor that is no view to torch: one that is given other memory holds on to what it was made of, and a
    weight would then be there twice (fusion/together.py)."""
    at, steps = memory.storage_offset() // dtype.itemsize, [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), at, shape, steps)


def _system() -> int:
    with suppress(OSError, ValueError):
        for line in (PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup() -> int | None:
    """What the tightest of our control groups (a container's limit) leaves; cached files count as free."""
    free: list[int] = []
    with suppress(OSError, ValueError, StopIteration):
        lines = (PROC / "self/cgroup").read_text().splitlines()
        own = CGROUPS / next(line for line in lines if line.startswith("0::"))[len("0::/") :]
        for group in (own, *own.parents):
            if not group.is_relative_to(CGROUPS):
                break
            with suppress(OSError, ValueError):  # the root has no limit, "max" is none
                most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                free.append(most - used + int(stat["file"]))
    return max(min(free), 0) if free else None


def _address_space() -> int | None:
    """What RLIMIT_AS leaves."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    with suppress(OSError, ValueError):
        pages = int((PROC / "self/statm").read_text().split()[0])
        return max(limit - pages * os.sysconf("SC_PAGE_SIZE"), 0)
    return limit
