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
    """Read a whole model, and say whether every byte of it is as it should be.

    That is: headers, names, shapes, the tokenizer, finite values, checksums where the hub's cache names them, and
    repacked experts, every byte of which must be as in the shards.
    """
    import torch

    from ..accounting import skeleton
    from ..chat import Tokenizer
    from ..checkpoint import finite, sidecar
    from ..checkpoint.reading import read

    folder = located(args.model, args)
    checkpoint, ledger, account = skeleton(folder)
    tokens = Tokenizer.open(folder, account.vocabulary).vocab_size
    repacked = (sidecar.find_files(checkpoint, ledger.mixtures) if ledger.mixtures else None) or {}
    total = sum(state.size for state in (*checkpoint.states.values(), *repacked.values()))
    progress, done, sums = bar("verifying"), 0, {}
    for path in checkpoint.states:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while data := file.read(PIECE):
                digest.update(data)
                done += len(data)
                progress(done, total)
        sums[path.name] = digest.hexdigest()
        require_named_sum(path, sums[path.name])
    for count in sidecar.compare(checkpoint, ledger.mixtures, repacked) if repacked else ():
        done += count
        progress(done, total)
    for span in ledger.wanted.values():
        finite.check(folder, read(checkpoint.states, [span], torch.device("cpu")), ledger.stacks, ledger.modes, "all")
    rows = [*sums.items(), ("tokenizer", f"{tokens} tokens")]
    rows += [("experts", f"{len(repacked)} files, as in the shards")] if repacked else []
    values = {
        "folder": str(folder), "sha256": sums, "tokens": tokens, "repacked": [path.name for path in repacked],
        "right": True,
    }  # fmt: skip
    show(values, [*rows, (folder.name, "right")], args.json)
    return 0


def require_named_sum(path: Path, found: str) -> None:
    """A file whose checksum the hub names has that one."""
    from ..errors import CheckpointError

    named = named_sum(path)
    if named not in (None, found):
        raise CheckpointError(f"{path}: its sha256 is {found}, the hub's is {named}. Fetch it again: `halfbyte pull`.")


def named_sum(path: Path) -> str | None:
    """A file of the hub's cache is a link to a blob that is named by its checksum."""
    target = path.resolve().name
    return target if path.is_symlink() and SHA256.fullmatch(target) else None
