"""`halfbyte bench load`: how long loading takes, beside a plain read of the files."""

from __future__ import annotations

import argparse
import json

from ..progress import passing
from .numbers import positive, whole

SHARED = ("json",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gb", type=positive, default=4.0, metavar="N", help="size of the checkpoint (default: 4)")
    parser.add_argument("--rounds", type=whole, default=3, metavar="N", help="turns of each (default: 3)")
    parser.add_argument("--load", choices=["read", "map"], default="read", help="how weights are loaded")


def run(args: argparse.Namespace) -> int:
    """Time loading a made-up checkpoint against a plain read of its file, from the disk and from memory, in turns."""
    from ..bench_load import bench_load

    found = bench_load(int(args.gb * 1e9), args.rounds, args.load, progress=passing)
    passing("")
    print(json.dumps(found.as_json(), indent=1) if args.json else "\n".join(found.lines()))
    return 0
