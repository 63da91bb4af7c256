"""`halfbyte plan`: will it fit, and how fast can it be?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NotEnoughMemory, size
from .arguments import add_memory, allowed, require_device
from .numbers import positive, whole
from .plan_trace import Above, Gpu, beside_gpu, on_disk, recorded
from .pull import located
from .terminal import show

if TYPE_CHECKING:
    import torch

    from ..accounting import Account
    from ..checkpoint.ledger import Ledger
    from ..fitting import Allowed, DeviceRoom, Placed
    from ..routes import Routes

STATE_ROUND_TRIP = 2  # recurrent states are read and written


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of an MLX checkpoint, or owner/name on the hub")
    parser.add_argument(
        "--context", type=whole, default=8192, metavar="N",
        help="tokens to make room for (default: 8192, or the model's)",
    )  # fmt: skip
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="routes that `bench --record-routes` wrote: say what an expert cache would do with them, or with "
        "--gpu-memory a GPU of that size beside experts in host memory, with both all three tiers",
    )  # fmt: skip
    parser.add_argument(
        "--copy-gbps", type=positive, metavar="X",
        help="GB/s from host memory to a CUDA GPU (default: measured, where there is one)",
    )  # fmt: skip
    add_memory(parser)


def run(args: argparse.Namespace) -> int:
    """Say what a model needs on device, host and disk, and how fast it can answer at the measured bandwidth."""
    from .. import memory
    from ..accounting import skeleton
    from ..loading import pick_device

    require_device(args)
    folder = located(args.model, args)
    checkpoint, ledger, account = skeleton(folder)
    device = pick_device(args.device)
    context, wide = min(args.context, account.context), device.type == "cpu"
    cache = account.cache(context, wide)
    need = account.weights + cache
    limits = allowed(args)
    limits.restrict(device)
    free = memory.available(device)
    have = max(free - for_steps(device, ledger), 0)
    here = device.type == "cpu" and bool(ledger.mixtures)
    placed = experts_in_memory(limits, ledger, account) if here else None  # before what measures takes memory too
    bandwidth = read_bandwidth(device.type)
    moved = account.read_per_token + STATE_ROUND_TRIP * account.state(wide)
    full = moved + cache - account.state(wide)
    fits, said = verdict(need, have, placed, limits)
    rows = [
        (
            "device",
            f"{device}: {size(account.weights)} of weights + {size(cache)} for {context} tokens",
        ),
        ("free there", f"{size(have)}: {said}"),
        ("disk", size(account.weights + account.left_out)),
        ("measured", f"{device} reads {bandwidth / 1e9:.1f} GB/s"),
        ("at most", f"{bandwidth / moved:.1f} tok/s on a short text, {bandwidth / full:.1f} on {context} tokens"),
    ]
    values = {
        "device": str(device), "context": context, "device_bytes": need, "available_bytes": have, "fits": fits,
        "host_bytes": need if device.type == "cpu" else 0, "disk_bytes": account.weights + account.left_out,
        "read_bytes_per_second": bandwidth, "bytes_per_token": moved, "tokens_per_second_at_most": bandwidth / moved,
        "tokens_per_second_at_context": bandwidth / full,
    }  # fmt: skip
    if placed is not None:
        tiers = tiered(placed, ledger, account, bandwidth)
        values |= tiers
        rows += described_tiers(tiers)
    gpu = known_gpu(args, limits, device, free, bandwidth / moved, bool(ledger.mixtures))
    if device.type == "cuda" and gpu is not None and gpu.bus is not None:
        beside = beside_device(limits, ledger, account, free, bandwidth, gpu.bus)
        values |= beside
        rows += described_beside(beside)
    if args.trace is not None:
        trace = recorded(args.trace, checkpoint, ledger, account)
        found, lines = foretold(trace, ledger, account, limits, placed, gpu, bandwidth / moved)
        values |= found
        rows += lines
    show(values, rows, args.json)
    return 0


def for_steps(device: torch.device, ledger: Ledger) -> int:
    """Bytes that loading leaves free for what a step computes with; of a model without experts it asks for none."""
    from ..fitting import GPU_WORKING, WORKING

    return {"cpu": WORKING, "cuda": GPU_WORKING}.get(device.type, 0) if ledger.mixtures else 0


def verdict(need: int, have: int, placed: Placed | NotEnoughMemory | None, limits: Allowed) -> tuple[bool, str]:
    """Whether all of a model fits, and how to say so; `placed` is what loading it on a CPU would do."""
    if need > have:
        return False, f"{size(need - have)} too little"
    if isinstance(placed, NotEnoughMemory):
        return False, "too little to load it"
    if placed is not None and placed.cache is not None and limits.expert_cache is None:  # which nobody asked for
        return False, "too little for all experts"
    return True, "it fits"


def foretold(
    trace: Routes, ledger: Ledger, account: Account, limits: Allowed,
    placed: Placed | NotEnoughMemory | None, gpu: Gpu | None, resident: float,
) -> tuple[dict[str, Any], list[tuple[str, str]]]:  # fmt: skip
    """What recorded routes say of the tiers that a run would have: beside a GPU it reads from disk where --expert-cache
    says so; `placed` is where a run on a CPU would have them."""
    if gpu is None:
        cache, direct = (None, limits.limited) if placed is None or isinstance(placed, NotEnoughMemory) else placed
        return on_disk(trace, ledger, account, limits.expert_cache if cache is None else cache, resident, direct)
    if limits.expert_cache is not None:
        slots = slots_beside(ledger, account, gpu.free, on_disk=True)
        return on_disk(trace, ledger, account, limits.expert_cache, gpu.resident, limits.limited, Above(gpu, slots))
    all_fit = room_beside(ledger, account, gpu.free).all_fit
    return beside_gpu(trace, ledger, account, gpu, None if all_fit else slots_beside(ledger, account, gpu.free))


def known_gpu(
    args: argparse.Namespace, limits: Allowed, device: torch.device, have: int, resident: float, experts: bool
) -> Gpu | None:
    """The CUDA GPU that experts of host memory would be beside: the one here, or one that --gpu-memory speaks of."""
    here = device.type == "cuda"
    elsewhere = limits.gpu_memory if device.type == "cpu" and args.trace is not None else None
    free = have if here else elsewhere
    if free is None or not (limits.fit or limits.expert_cache is not None) or not experts:
        if args.copy_gbps is not None:
            args.parser.error("argument --copy-gbps: for experts beside a CUDA GPU, or --trace with --gpu-memory")
        return None
    return Gpu(free, copy_bandwidth(device.type, args.copy_gbps), resident if here else None)


def experts_in_memory(limits: Allowed, ledger: Ledger, account: Account) -> Placed | NotEnoughMemory:
    """Where the experts of a run on a CPU would be, or why it would be refused."""
    from ..fitting import TEXT, place

    text = account.cache(min(account.context, TEXT), wide=True)
    try:
        return place(limits, ledger, text, account.experts_per_token)
    except NotEnoughMemory as error:
        return error


def tiered(placed: Placed | NotEnoughMemory, ledger: Ledger, account: Account, bandwidth: float) -> dict[str, Any]:
    """Where weights would lie, and what that costs a token; every expert as likely as any other, without a trace.

    `even_so`: why they fit nowhere. A plan is asked before there is a machine, so that is an answer.
    """
    from ..disk import expert_bandwidth

    if isinstance(placed, NotEnoughMemory):
        return {"expert_cache_bytes": None, "experts_read_per_token": None, "even_so": str(placed)}
    if (cache := placed.cache) is None:
        return {"expert_cache_bytes": None, "experts_read_per_token": 0.0}
    missing = 1 - min(cache / account.experts, 1)
    needed = account.experts_per_token * len(ledger.mixtures)
    read = missing * account.experts * account.experts_per_token / account.expert_count
    disk = expert_bandwidth(ledger, placed.direct)
    seconds = (account.read_per_token + STATE_ROUND_TRIP * account.state(wide=True)) / bandwidth + read / disk
    return {
        "expert_cache_bytes": cache, "experts_on_disk_bytes": max(account.experts - cache, 0),
        "dense_bytes": account.weights - account.experts, "experts_read_per_token": missing * needed,
        "disk_bytes_per_token": read, "disk_bytes_per_second": disk, "tokens_per_second_streamed": 1 / seconds,
    }  # fmt: skip


def beside_device(
    limits: Allowed, ledger: Ledger, account: Account, have: int, bandwidth: float, bus: float
) -> dict[str, Any]:
    """The same with a GPU that has `have` bytes: experts that have no room there come from host memory, and those that
    have none in either from the disk.

    What is on the GPU has come through host memory: as long as every expert is as likely as any other, the larger of
    both has all that the smaller one has.
    """
    from ..disk import expert_bandwidth
    from ..fitting import place_beside

    if limits.expert_cache is None and room_beside(ledger, account, have).all_fit:
        return {"experts_in_host_memory_bytes": 0}
    try:
        cache, direct = place_beside(limits, ledger, account.experts_per_token)
        slots = slots_beside(ledger, account, have, on_disk=cache is not None)
    except NotEnoughMemory as error:
        return {"experts_in_host_memory_bytes": None, "even_so": str(error)}
    needed, part = account.experts_per_token * len(slots), sum(slots) / (len(slots) * account.expert_count)
    missing, each = 1 - part, account.experts / (len(slots) * account.expert_count)
    seconds = (account.read_per_token + STATE_ROUND_TRIP * account.state()) / bandwidth
    copied, host = missing * needed * each, account.experts if cache is None else min(cache, account.experts)
    found = {
        "host_bytes": host, "experts_in_host_memory_bytes": host, "expert_slots_per_layer": slots,
        "expert_slot_bytes": round(part * account.experts), "experts_copied_per_token": missing * needed,
        "copied_bytes_per_token": copied, "bus_bytes_per_second": bus,
        "tokens_per_second_beside": 1 / max(seconds, copied / bus),
    }  # fmt: skip
    if cache is None:
        return found
    read, disk = (1 - max(part, host / account.experts)) * needed, expert_bandwidth(ledger, direct)
    return found | {
        "experts_on_disk_bytes": account.experts - host, "experts_read_per_token": read,
        "disk_bytes_per_token": read * each, "disk_bytes_per_second": disk,
        "tokens_per_second_beside": 1 / (seconds + max(copied / bus, read * each / disk)),
    }  # fmt: skip


def room_beside(ledger: Ledger, account: Account, free: int) -> DeviceRoom:
    """What of a GPU of so many bytes is left for experts."""
    from ..fitting import TEXT, device_room

    return device_room(free, ledger, account.cache(min(account.context, TEXT)))


def slots_beside(ledger: Ledger, account: Account, free: int, on_disk: bool = False) -> list[int]:
    """The slots that a run would give each layer on a GPU of so many bytes; with some experts `on_disk`, or none."""
    from .. import device_experts, tiered_experts

    room, mixtures = room_beside(ledger, account, free), list(ledger.mixtures.values())
    buffers = tiered_experts.BUFFERS if on_disk else device_experts.BUFFERS
    return device_experts.plan(mixtures, room.experts, room.most, account.experts_per_token, room.beside, buffers)


def described_beside(beside: dict[str, Any]) -> list[tuple[str, str]]:
    if not beside["experts_in_host_memory_bytes"]:
        return [("even so", beside["even_so"])] if "even_so" in beside else []
    sizes = {name: size(round(value)) for name, value in beside.items() if "bytes" in name}
    on_disk = "experts_on_disk_bytes" in beside
    read = f" and reads {beside['experts_read_per_token']:.0f}, {sizes['disk_bytes_per_token']}" if on_disk else ""
    rows = [
        (
            "on the GPU",
            f"{sizes['expert_slot_bytes']} of experts, {min(beside['expert_slots_per_layer'])} a layer; the others "
            f"come at {sizes['bus_bytes_per_second']}/s",
        ),
        ("in host memory", f"{sizes['experts_in_host_memory_bytes']} of experts"),
    ]
    if on_disk:
        stay = f"{sizes['experts_on_disk_bytes']} of experts, read at {sizes['disk_bytes_per_second']}/s"
        rows.append(("on disk", stay))
    return [
        *rows,
        (
            "a token",
            f"copies {beside['experts_copied_per_token']:.0f} experts, {sizes['copied_bytes_per_token']},{read} if it "
            f"is as likely to choose one as another: {beside['tokens_per_second_beside']:.1f} tok/s at most",
        ),
    ]


def described_tiers(tiers: dict[str, Any]) -> list[tuple[str, str]]:
    if tiers["expert_cache_bytes"] is None:
        return [("even so", tiers["even_so"])] if "even_so" in tiers else []
    sizes = {name: size(round(tiers[name])) for name in tiers if "bytes" in name}
    return [
        ("in memory", f"{sizes['dense_bytes']} that every token reads + {sizes['expert_cache_bytes']} of experts"),
        ("on disk", f"{sizes['experts_on_disk_bytes']} of experts, read at {sizes['disk_bytes_per_second']}/s"),
        (
            "a token",
            f"reads {tiers['experts_read_per_token']:.0f} experts, {sizes['disk_bytes_per_token']}, if it is as likely "
            f"to choose one as another: {tiers['tokens_per_second_streamed']:.1f} tok/s at most",
        ),
    ]


def read_bandwidth(device: str) -> float:
    if device == "cuda":
        from ..cuda import read_bandwidth as measured

        return measured()
    from ..machine import ReadProbe

    return ReadProbe().bandwidth()


def copy_bandwidth(device: str, stated: float | None) -> float | None:
    """Bytes a second from host memory to a GPU: as stated, or measured, or unknown."""
    if stated is not None:
        return stated * 1e9
    if device != "cuda":
        return None
    from ..cuda import bus_bandwidth

    return bus_bandwidth()
