"""What `halfbyte plan --trace` says: recorded routes, replayed through caches of experts on disk or slots on a GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UsageError, size

if TYPE_CHECKING:
    from ..accounting import Account
    from ..checkpoint import Checkpoint
    from ..checkpoint.ledger import Ledger
    from ..routes import Routes
    from ..simulation import Prediction

PARTS = (0.1, 0.25, 0.5, 0.75)  # of all experts in memory, where no --expert-cache says how much
LAYERS = 16  # whose hit rates stand in one line

Rows = list[tuple[str, str]]


class Gpu(NamedTuple):
    """What a plan knows of a GPU, which need not be there."""

    free: int  # bytes
    bus: float | None  # bytes a second from host memory
    resident: float | None  # tokens a second with all experts on it


class Above(NamedTuple):
    """A GPU over a cache in host memory over a disk."""

    gpu: Gpu
    slots: list[int]  # of each layer

    def says(self, one: Prediction) -> dict[str, Any]:
        return {
            "gpu_memory_bytes": self.gpu.free, "slots_per_layer": self.slots,
            "copied_bytes_per_token": one.bytes_copied / one.tokens, "bus_bytes_per_second": self.gpu.bus,
        }  # fmt: skip


def recorded(path: Path, checkpoint: Checkpoint, ledger: Ledger, account: Account) -> Routes:
    """The routes of a file, if they are this model's and have a reply to say something of."""
    from .. import routes

    trace = routes.read(path)
    sizes = (len(ledger.mixtures), account.expert_count, account.experts_per_token)
    if trace.fingerprint != checkpoint.fingerprint or (trace.layers, trace.experts, trace.per_token) != sizes:
        raise UsageError(f"{path}: it was recorded with another model. {routes.AGAIN}")
    if not any(trace.tokens(step) == 1 for step in trace.steps):
        raise UsageError(f"{path}: it holds no {'reply, only prompts' if trace.steps else 'step'}. {routes.AGAIN}")
    return trace


def on_disk(
    trace: Routes, ledger: Ledger, account: Account, cache: int | None, resident: float | None,
    direct: bool, above: Above | None = None,
) -> tuple[dict[str, Any], Rows]:  # fmt: skip
    """What each policy would do, with the cache that was asked for or with several."""
    from .. import expert_shares, simulation
    from ..disk import expert_bandwidth
    from ..expert_cache import POLICIES

    mixtures = list(ledger.mixtures.values())
    least = sum(share.nbytes for share in expert_shares.fewest(mixtures, account.experts_per_token))
    usual = sorted({max(round(part * account.experts), least) for part in PARTS})
    budgets = usual if cache is None else [cache]
    shares = [expert_shares.plan(mixtures, budget, account.experts_per_token) for budget in budgets]
    disk, bus = expert_bandwidth(ledger, direct), above.gpu.bus if above else None
    found: list[dict[str, Any]] = []
    for share, policy in ((share, policy) for share in shares for policy in POLICIES):
        one = simulation.simulate(trace, share, policy, above.slots if above else None)
        speed = one.tokens_per_second(resident or math.inf, disk, bus)
        found.append({
            "policy": policy, "cache_bytes": sum(part.nbytes for part in share), "hit_rate": one.hit_rate,
            "hit_rate_by_layer": one.by_layer, "disk_bytes_per_token": one.bytes_per_token,
            "disk_bytes_per_second": disk, "tokens_per_second_at_most": None if math.isinf(speed) else speed,
            **(above.says(one) if above else {}),
        })  # fmt: skip
    rows = [("experts", f"{size(account.experts)}, read at {size(round(disk))}/s")]
    if above:
        rows.append(("on a GPU", held(above.gpu, above.slots, account.expert_count)))
    rows += [(f"  {one['policy']}, {size(one['cache_bytes'])}", described(one, resident)) for one in found]
    return {"expert_caches": found}, rows


def described(one: dict[str, Any], resident: float | None) -> str:
    copied = f"{size(round(one['copied_bytes_per_token']))} copied and " if "copied_bytes_per_token" in one else ""
    free = ["computing"] * (resident is None) + ["copies"] * (bool(copied) and one["bus_bytes_per_second"] is None)
    speed, took = one["tokens_per_second_at_most"], f", if {' and '.join(free)} took no time" if free else ""
    at_most = "as fast as it computes" if speed is None else f"{speed:.1f} tok/s at most{took}"
    read = f"{size(round(one['disk_bytes_per_token']))} read a token"
    return f"{one['hit_rate']:.1%} found in memory, {copied}{read}: {at_most}"


def held(gpu: Gpu, slots: list[int], experts: int) -> str:
    few = f"{min(slots)}" if min(slots) == max(slots) else f"{min(slots)} to {max(slots)}"
    return f"{size(gpu.free)}: slots for {few} of {experts} experts a layer"


def beside_gpu(
    trace: Routes, ledger: Ledger, account: Account, gpu: Gpu, slots: list[int] | None
) -> tuple[dict[str, Any], Rows]:
    """What so many slots for each layer would do on a GPU; None is room for all experts."""
    from ..device_experts import AHEAD
    from ..expert_shares import expert_bytes
    from ..slot_simulation import simulate_slots

    slots = slots or [account.expert_count] * len(ledger.mixtures)
    each = [expert_bytes(mixture) for mixture in ledger.mixtures.values()]
    one = simulate_slots(trace, slots, each, AHEAD)
    speed = gpu.resident
    if one.bytes_per_token:
        speed = None if gpu.bus is None else one.tokens_per_second(gpu.resident or math.inf, gpu.bus)
    found = {
        "gpu_memory_bytes": gpu.free, "slots_per_layer": slots,
        "slot_bytes": sum(count * size for count, size in zip(slots, each, strict=True)),
        "hit_rate": one.hit_rate, "hit_rate_by_layer": one.by_layer, "copied_bytes_per_token": one.bytes_per_token,
        "copied_ahead_bytes_per_token": one.bytes_ahead / one.tokens, "bus_bytes_per_second": gpu.bus,
        "tokens_per_second_at_most": speed,
    }  # fmt: skip
    return {"expert_slots": found}, described_slots(found, account.expert_count, gpu)


def described_slots(found: dict[str, Any], experts: int, gpu: Gpu) -> Rows:
    slots, rates = found["slots_per_layer"], found["hit_rate_by_layer"]
    if min(slots) == experts:
        return [("on a GPU", f"{size(gpu.free)}: room for all experts, nothing is copied")]
    rows = [
        ("on a GPU", f"{held(gpu, slots, experts)}, {size(found['slot_bytes'])}"),
        ("  routes", f"{found['hit_rate']:.1%} found there, {copied(found)}: {speed(found, gpu)}"),
    ]
    for start in range(0, len(rates), LAYERS):
        some = rates[start : start + LAYERS]
        rows.append((f"  layers {start} to {start + len(some) - 1}", " ".join(f"{rate:.0%}" for rate in some)))
    return rows


def copied(found: dict[str, Any]) -> str:
    ahead = size(round(found["copied_ahead_bytes_per_token"]))
    return f"{size(round(found['copied_bytes_per_token']))} copied a token, {ahead} of it ahead"


def speed(found: dict[str, Any], gpu: Gpu) -> str:
    if gpu.bus is None:
        return "there is no CUDA GPU here to measure copies with; --copy-gbps says how fast they are"
    at = f"at {size(round(gpu.bus))}/s"
    if found["tokens_per_second_at_most"] is None:
        return f"{at} as fast as it computes"
    alone = ", if computing took no time" if gpu.resident is None else ""
    return f"{at} {found['tokens_per_second_at_most']:.1f} tok/s at most{alone}"
