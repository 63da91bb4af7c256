"""`halfbyte info`: what a model is, from its headers alone."""

from __future__ import annotations

import argparse

from ..errors import size
from .pull import located
from .terminal import show


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of an MLX checkpoint, or owner/name on the hub")


def run(args: argparse.Namespace) -> int:
    """Say what a model is: architecture, bits, sizes. No weights are read."""
    from ..accounting import skeleton

    folder = located(args.model, args)
    checkpoint, _, account = skeleton(folder)
    bits = 8 * account.weights / account.parameters
    rows = [
        ("model", f"{folder.name}, {account.model_type}"),
        ("layers", f"{account.layers} of width {account.hidden}"),
        ("vocabulary", f"{account.vocabulary}"),
        ("context", f"{account.context} tokens"),
        ("parameters", f"{account.parameters / 1e9:.2f} billion, {bits:.2f} bits each"),
    ]
    if account.expert_count:
        rows.append(
            ("experts", f"{account.experts_per_token} of {account.expert_count} a token, {size(account.experts)}")
        )
    rows += [("stored as", f"{form}: {count / account.parameters:.1%}") for form, count in account.formats.items()]
    rows += [
        ("weights", f"{size(account.weights)} in {len(checkpoint.states)} files"),
        ("read a token", size(account.read_per_token)),
        ("cache", f"{size(account.cache_per_token)} a token + {size(account.cache_fixed + account.cache_windows)}"),
    ]
    if account.left_out:
        rows.append(("left out", f"{size(account.left_out)}: vision, audio or further-token prediction"))
    show({"folder": str(folder), "fingerprint": checkpoint.fingerprint, **account.as_json()}, rows, args.json)
    return 0
