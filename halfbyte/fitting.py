"""Whether a model goes into memory whole, and if not, how much of its experts does: on a GPU, beside it, on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import memory
from .checkpoint.ledger import Ledger
from .errors import NotEnoughMemory, size
from .expert_shares import fewest, plan

CPU = torch.device("cpu")
KERNELS = 160 << 20  # bytes for compiled kernels, a tokenizer, a server
STEP = 224 << 20  # for what a step computes with: prompts of 512 tokens at a time
WORKING = KERNELS + STEP
GPU_WORKING = 768 << 20  # the same on a GPU, where prompts of 2048 tokens are computed at a time
STARTS = 16 << 20  # by which a process may be larger before it has a weight than it was the last time
TEXTS = 8  # of what is free, this part is left for texts: caches of requests
TEXT = 8192  # tokens, for which there must be room at least
UNPINNED = 8  # of what is free on the host, this part is left to the system: pinned memory is never given back


@dataclass(frozen=True)
class Allowed:
    """What a model may take, in bytes; None is what the machine has."""

    expert_cache: int | None = None  # of experts in memory
    ram: int | None = None  # of weights and caches on the host
    memory_limit: int | None = None  # of all that the process has resident
    gpu_memory: int | None = None  # of all that it has on the GPU
    fit: bool = True  # where not all experts have room, leave some on disk

    @property
    def limited(self) -> bool:
        """Whether a limit was set: then there may be no memory for the system to keep files in."""
        return self.ram is not None or self.memory_limit is not None

    def restrict(self, device: torch.device) -> None:
        """From now on, whatever this process takes is within the limits."""
        memory.available(device)  # what a GPU's driver takes of the host is there before we look
        own = memory.held(CPU) + WORKING  # before there is a weight
        limits = [self.memory_limit, None if self.ram is None else self.ram + own]
        if given := [limit for limit in limits if limit is not None]:
            memory.restrict(min(given), CPU)
        if self.gpu_memory is not None and device.type != "cpu":
            memory.restrict(self.gpu_memory, device)


class Placed(NamedTuple):
    """Where the experts of a model go."""

    cache: int | None  # bytes of them in memory; None: all
    direct: bool  # whether the system has no room to keep what is read of the others


class DeviceRoom(NamedTuple):
    """What of a GPU is left for experts, in bytes."""

    all_fit: bool
    experts: int
    most: int  # the same where there is one text alone
    beside: int  # what all else takes then


def device_room(free: int, ledger: Ledger, text: int) -> DeviceRoom:
    """Dense weights come first, then what a step computes with, and texts: one at least, or their part of the rest."""
    dense, experts = weighed(ledger)
    beside = dense + GPU_WORKING + text
    most = free - beside
    return DeviceRoom(experts <= most, min(most, most + text - (free - dense) // TEXTS), most, beside)


def place(allowed: Allowed, ledger: Ledger, text: int, per_token: int) -> Placed:
    """On the CPU: all in memory if that has room, else as many as go in beside the rest and `text` bytes of a text."""
    free, (dense, experts) = memory.available(CPU) - WORKING, weighed(ledger)
    room = free - dense - max(text, free // TEXTS)
    if not ledger.mixtures or (allowed.expert_cache is None and experts <= free - dense - text):
        return Placed(None, False)
    if allowed.expert_cache is None and not allowed.fit:
        require(ledger, free, dense + text + experts, "weights and texts")
        return Placed(None, False)
    least = sum(share.nbytes for share in fewest(list(ledger.mixtures.values()), per_token))
    require(ledger, free, dense + text + least, "weights and texts", ", with all but the experts of one token on disk")
    cache = cut(allowed, ledger, per_token, max(room, least))  # rather a shorter text than none
    return Placed(cache, allowed.limited or experts > free - dense - text - cache)


def place_beside(allowed: Allowed, ledger: Ledger, per_token: int) -> Placed:
    """On the host of a GPU, which has all else: all experts if there is room, else as many as go in."""
    free, (_, experts) = memory.available(CPU) - WORKING, weighed(ledger)
    if allowed.expert_cache is None and experts <= free:
        return Placed(None, False)
    least = sum(share.nbytes for share in fewest(list(ledger.mixtures.values()), per_token))
    require(ledger, free, least, "on the host of a GPU, experts", " for those of one token, with all others on disk")
    cache = cut(allowed, ledger, per_token, max(free - free // UNPINNED, least))
    return Placed(cache, allowed.limited or experts > free - cache)


def cut(allowed: Allowed, ledger: Ledger, per_token: int, room: int) -> int:
    """Bytes of experts in memory that has room for some: all of it, or what was asked for, if that is enough."""
    _, experts = weighed(ledger)
    cache = min(room, experts if allowed.expert_cache is None else allowed.expert_cache)
    plan(list(ledger.mixtures.values()), cache, per_token)
    return cache


def weighed(ledger: Ledger) -> tuple[int, int]:
    """Bytes of dense weights, and of experts."""
    sizes = {name: span.size for name, span in ledger.wanted.items()}
    experts = sum(sizes[name] for name in ledger.stacks)
    return sum(sizes.values()) - experts, experts


def require(ledger: Ledger, free: int, need: int, what: str, how: str = "") -> None:
    if need > free:
        raise NotEnoughMemory(
            f"{ledger.checkpoint.folder}: {what} may take {size(max(free, 0))}; they need "
            f"{size(need)}{how}. Free as much, or give it --ram {need} or "
            f"--memory-limit {need + memory.held(CPU) + WORKING + STARTS} at least."
        )
