"""`halfbyte plan`: will it fit, and how fast can it be?"""

from __future__ import annotations

import argparse

from ..errors import size
from .pull import located
from .terminal import show

STATE_ROUND_TRIP = 2  # recurrent states are read and written


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of an MLX checkpoint, or owner/name on the hub")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens to make room for (default: 8192, or the model's)"
    )


def run(args: argparse.Namespace) -> int:
    """Say what a model needs on device, host and disk, and how fast it can answer at the measured bandwidth."""
    from .. import memory
    from ..accounting import skeleton
    from ..loading import pick_device

    folder = located(args.model, args)
    _, _, account = skeleton(folder)
    device = pick_device(args.device)
    context = min(args.context or 8192, account.context)
    if context < 1:
        args.parser.error("argument --context: must be 1 or more")
    need = account.weights + account.cache(context)
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
    show(values, rows, args.json)
    return 0


def read_bandwidth(device: str) -> float:
    if device == "cuda":
        from ..cuda import read_bandwidth as measured

        return measured()
    from ..machine import ReadProbe

    return ReadProbe().bandwidth()
