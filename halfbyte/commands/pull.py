"""`halfbyte pull`: a model from the hub into its cache, checked."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..errors import size
from ..progress import bar, say
from .terminal import show

SHARED = ("revision", "offline", "json")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="owner/name on the hub")
    parser.add_argument("--force", action="store_true", help="fetch every file anew, also what is there and right")


def run(args: argparse.Namespace) -> int:
    """Fetch a model from the hub, or what it lacks. Every byte is checked; interrupted, it goes on next time.

    Only settings, tokenizer, templates and safetensors are fetched, never code. They go where the hub's own tools
    look for them (HF_HOME, HF_HUB_CACHE). HF_TOKEN opens private and gated models, HTTPS_PROXY is respected.
    """
    from .. import hub

    if not hub.REPOSITORY.fullmatch(args.model):
        args.parser.error(f"argument model: must be a name on the hub as mlx-community/Qwen3-4B-4bit, got {args.model}")
    if args.force and args.offline:
        args.parser.error("arguments --force and --offline: one fetches everything, the other nothing")
    start = time.monotonic()
    found = hub.fetch(
        args.model, revision=args.revision, offline=args.offline, force=args.force, check=True, progress=bar, say=say
    )
    seconds, count = time.monotonic() - start, sum(file.size for file in found.fetched)
    rows = [
        ("model", f"{args.model} at {found.commit[:7]}"),
        ("fetched", f"{size(count)} in {len(found.fetched)} files, {seconds:.1f} s" if found.fetched else "nothing"),
        ("folder", str(found.folder)),
    ]
    values = {
        "model": args.model, "commit": found.commit, "folder": str(found.folder), "seconds": seconds,
        "files": [{"name": file.name, "bytes": file.size, "checksum": file.sum} for file in found.files],
        "fetched": [file.name for file in found.fetched], "fetched_bytes": count,
    }  # fmt: skip
    show(values, rows, args.json)
    return 0


def located(model: str, args: argparse.Namespace) -> Path:
    """The folder of a model that a command was given. One that has to be fetched before shows how far it is."""
    from .. import hub

    return hub.locate(model, revision=args.revision, offline=args.offline, progress=bar, say=say)
