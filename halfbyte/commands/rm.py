"""`halfbyte rm`: a model out of the hub's cache."""

from __future__ import annotations

import argparse

from ..errors import size
from ..progress import say
from .terminal import show

SHARED = ("json",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="owner/name, as `halfbyte list` shows it")


def run(args: argparse.Namespace) -> int:
    """Delete a model from the hub's cache, with all of its revisions. Folders of your own are left alone."""
    from .. import hub

    if not hub.REPOSITORY.fullmatch(args.model):
        args.parser.error(f"argument model: must be a name as mlx-community/Qwen3-4B-4bit, got {args.model}")
    freed = hub.remove(args.model, say)
    show({"model": args.model, "freed_bytes": freed}, [("removed", args.model), ("freed", size(freed))], args.json)
    return 0
