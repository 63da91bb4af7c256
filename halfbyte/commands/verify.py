"""`halfbyte verify`: is every byte of a model as it should be?"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path

from ..progress import bar
from .pull import located
from .terminal import show

SHA256 = re.compile(r"[0-9a-f]{64}")
PIECE = 16 << 20


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of an MLX checkpoint, or owner/name on the hub")


def run(args: argparse.Namespace) -> int:
    """Read a whole model: headers, names, shapes, finite values, and checksums where the hub's cache names them."""
    import torch

    from ..accounting import skeleton
    from ..checkpoint import finite
    from ..checkpoint.reading import read
    from ..errors import CheckpointError

    folder = located(args.model, args)
    checkpoint, ledger, _ = skeleton(folder)
    total = sum(path.stat().st_size for path in checkpoint.states)
    progress, done, sums = bar("verifying"), 0, {}
    for path in checkpoint.states:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while data := file.read(PIECE):
                digest.update(data)
                done += len(data)
                progress(done, total)
        sums[path.name] = digest.hexdigest()
        named = named_sum(path)
        if named not in (None, sums[path.name]):
            raise CheckpointError(
                f"{path}: its sha256 is {sums[path.name]}, the hub's is {named}. Fetch it again: `halfbyte pull`."
            )
    for span in ledger.wanted.values():
        finite.check(folder, read(checkpoint.states, [span], torch.device("cpu")), ledger.stacks, ledger.modes, "all")
    show({"folder": str(folder), "sha256": sums, "right": True}, [*sums.items(), (folder.name, "right")], args.json)
    return 0


def named_sum(path: Path) -> str | None:
    """A file of the hub's cache is a link to a blob that is named by its checksum."""
    target = path.resolve().name
    return target if path.is_symlink() and SHA256.fullmatch(target) else None
