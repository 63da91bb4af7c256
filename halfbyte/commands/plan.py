"""`halfbyte plan`: will it fit, and how fast can it be?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NotEnoughMemory, UsageError, size
from .arguments import add_memory, allowed
from .pull import located
from .terminal import show

if TYPE_CHECKING:
    from ..accounting import Account
    from ..checkpoint import Checkpoint
    from ..checkpoint.ledger import Ledger
    from ..fitting import Allowed

PARTS = (0.1, 0.25, 0.5, 0.75)  # of all experts in memory, where no --expert-cache says how much
STATE_ROUND_TRIP = 2  # recurrent states are read and written


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of an MLX checkpoint, or owner/name on the hub")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens to make room for (default: 8192, or the model's)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="routes that `bench --record-routes` wrote: say what an expert cache would do with them",
    )  # fmt: skip
    add_memory(parser)


def run(args: argparse.Namespace) -> int:
    """Say what a model needs on device, host and disk, and how fast it can answer at the measured bandwidth."""
    from .. import memory
    from ..accounting import skeleton
    from ..loading import pick_device

    folder = located(args.model, args)
    checkpoint, ledger, account = skeleton(folder)
    device = pick_device(args.device)
    context = min(args.context or 8192, account.context)
    if context < 1:
        args.parser.error("argument --context: must be 1 or more")
    need = account.weights + account.cache(context)
    limits = allowed(args)
    limits.restrict(device)
    have = memory.available(device)
    bandwidth = read_bandwidth(device.type)
    moved = account.read_per_token + STATE_ROUND_TRIP * account.cache_fixed
    full = moved + account.cache_windows + context * account.cache_per_token
    fits = need <= have
    rows = [
        (
            "device",
            f"{device}: {size(account.weights)} of weights + {size(account.cache(context))} for {context} tokens",
        ),
        ("free there", f"{size(have)}: {'it fits' if fits else f'{size(need - have)} too little'}"),
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
    if device.type == "cpu" and ledger.mixtures:
        tiers = tiered(limits, ledger, account, bandwidth)
        values |= tiers
        rows += described_tiers(tiers)
    if args.trace is not None:
        values["expert_caches"] = caches = predicted(args, checkpoint, ledger, account, bandwidth / moved)
        rows += [("experts", f"{size(account.experts)}, read at {size(round(caches[0]['disk_bytes_per_second']))}/s")]
        rows += [(f"  {one['policy']}, {size(one['cache_bytes'])}", described(one)) for one in caches]
    show(values, rows, args.json)
    return 0


def tiered(limits: Allowed, ledger: Ledger, account: Account, bandwidth: float) -> dict[str, Any]:
    """Where weights would lie, and what that costs a token; every expert as likely as any other, without a trace.

    `even_so`: why they fit nowhere. A plan is asked before there is a machine, so that is an answer.
    """
    from ..disk import expert_bandwidth
    from ..fitting import TEXT, place

    text = 2 * account.cache(min(account.context, TEXT))  # float32, where the account has bfloat16
    try:
        cache = place(limits, ledger, text, account.experts_per_token).cache
    except NotEnoughMemory as error:
        return {"expert_cache_bytes": None, "experts_read_per_token": None, "even_so": str(error)}
    if cache is None:
        return {"expert_cache_bytes": None, "experts_read_per_token": 0.0}
    missing = 1 - min(cache / account.experts, 1)
    needed = account.experts_per_token * len(ledger.mixtures)
    read = missing * account.experts * account.experts_per_token / account.expert_count
    disk = expert_bandwidth(ledger)
    seconds = (account.read_per_token + STATE_ROUND_TRIP * account.cache_fixed) / bandwidth + read / disk
    return {
        "expert_cache_bytes": cache, "experts_on_disk_bytes": max(account.experts - cache, 0),
        "dense_bytes": account.weights - account.experts, "experts_read_per_token": missing * needed,
        "disk_bytes_per_token": read, "disk_bytes_per_second": disk, "tokens_per_second_streamed": 1 / seconds,
    }  # fmt: skip


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


def predicted(
    args: argparse.Namespace, checkpoint: Checkpoint, ledger: Ledger, account: Account, resident: float
) -> list[dict[str, Any]]:
    """What each policy would do on the recorded routes, with the cache that was asked for or with several."""
    from .. import residency, routes, simulation
    from ..disk import expert_bandwidth
    from ..expert_cache import POLICIES

    trace, mixtures = routes.read(args.trace), list(ledger.mixtures.values())
    if trace.fingerprint != checkpoint.fingerprint:
        raise UsageError(f"{args.trace}: it was recorded with another model. {routes.AGAIN}")
    if not any(trace.tokens(step) == 1 for step in trace.steps):
        raise UsageError(f"{args.trace}: it holds no reply, only prompts. {routes.AGAIN}")
    least = sum(share.nbytes for share in residency.fewest(mixtures, account.experts_per_token))
    usual = sorted({max(round(part * account.experts), least) for part in PARTS})
    budgets = usual if args.expert_cache is None else [args.expert_cache]
    shares = [residency.plan(mixtures, budget, account.experts_per_token) for budget in budgets]
    disk, found = expert_bandwidth(ledger), []
    for share, policy in ((share, policy) for share in shares for policy in POLICIES):
        one = simulation.simulate(trace, share, policy)
        found.append({
            "policy": policy, "cache_bytes": sum(part.nbytes for part in share), "hit_rate": one.hit_rate,
            "hit_rate_by_layer": one.by_layer, "disk_bytes_per_token": one.bytes_per_token,
            "disk_bytes_per_second": disk, "tokens_per_second_at_most": one.tokens_per_second(resident, disk),
        })  # fmt: skip
    return found


def described(one: dict[str, Any]) -> str:
    return (
        f"{one['hit_rate']:.1%} found in memory, {size(round(one['disk_bytes_per_token']))} read a token: "
        f"{one['tokens_per_second_at_most']:.1f} tok/s at most"
    )


def read_bandwidth(device: str) -> float:
    if device == "cuda":
        from ..cuda import read_bandwidth as measured

        return measured()
    from ..machine import ReadProbe

    return ReadProbe().bandwidth()
