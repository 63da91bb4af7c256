"""`halfbyte list`: the models that are here."""

from __future__ import annotations

import argparse

from ..errors import size
from .terminal import show

SHARED = ("json",)


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    """List the models that run without a network: the embedded one, and those in the hub's cache."""
    from .. import hub

    found = hub.here()
    values = {"models": [{"model": one.name, "bytes": one.bytes, "folder": str(one.folder)} for one in found]}
    show(values, [(one.name, f"{size(one.bytes):>10}  {one.folder}") for one in found], args.json)
    return 0
