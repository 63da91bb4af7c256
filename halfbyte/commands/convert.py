"""`halfbyte convert`: a Hugging Face or MLX checkpoint, quantised or to another precision."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import size
from ..progress import bar
from .pull import located
from .terminal import show

RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
CONVERTING = ("quantize", "q_bits", "q_group_size", "q_mode", "quant_predicate", "dtype", "dequantize")  # not --repack


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder of a checkpoint, or owner/name on the hub")
    parser.add_argument("target", metavar="DST", type=Path, nargs="?", help="folder to make")
    parser.add_argument(
        "--repack", action="store_true",
        help="instead: write SRC's experts once more beside its shards, one read each, for when memory has no room",
    )  # fmt: skip
    parser.add_argument("-q", "--quantize", action="store_true", help="quantise the matrices")
    parser.add_argument("--q-bits", type=int, metavar="N", help="2, 3, 4, 5, 6 or 8 (default: the mode's)")
    parser.add_argument("--q-group-size", type=int, metavar="N", help="32, 64 or 128 (default: the mode's)")
    parser.add_argument("--q-mode", choices=["affine", "mxfp4", "nvfp4", "mxfp8"], help="default: affine")
    parser.add_argument("--quant-predicate", choices=RECIPES, help="more bits where they matter most")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], help="of all that is not codes")
    parser.add_argument("-d", "--dequantize", action="store_true", help="dense again")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written")


def run(args: argparse.Namespace) -> int:
    """Convert a checkpoint to MLX's format. The result appears whole or not at all; mlx-lm loads it too."""
    from ..conversion.converting import convert
    from ..errors import HalfbyteError

    if args.repack != (args.target is None):
        args.parser.error("convert takes SRC DST, or SRC --repack")
    if args.repack:
        return repacked(args)
    source = located(args.source, args)
    try:
        plan = convert(
            source, args.target, args.quantize, args.q_group_size, args.q_bits, args.q_mode, args.dtype,
            dequantize=args.dequantize, quant_predicate=args.quant_predicate, dry_run=args.dry_run,
            progress=bar("writing"),
        )  # fmt: skip
    except HalfbyteError:
        raise
    except ValueError as error:  # options that exclude each other, a target that may not be written
        args.parser.error(str(error))
    rows = [
        ("from", f"{source}, {size(plan.bytes_before)}"),
        ("to", f"{args.target}, {size(plan.bytes_after)}{' (not written)' if args.dry_run else ''}"),
        ("bits", f"{plan.bits_per_weight:.3f} a weight"),
        *((form, f"{count} weights") for form, count in plan.forms.items()),
    ]
    values = {
        "source": str(source), "target": str(args.target), "written": not args.dry_run,
        "bytes_before": plan.bytes_before, "bytes_after": plan.bytes_after, "bits_per_weight": plan.bits_per_weight,
        "forms": plan.forms,
    }  # fmt: skip
    if args.dry_run and not args.json:
        print(*plan.lines(), sep="\n")
    show(values, rows, args.json)
    return 0


def repacked(args: argparse.Namespace) -> int:
    """`convert SRC --repack`."""
    from ..accounting import skeleton
    from ..checkpoint.sidecar import file_size
    from ..conversion import repacking
    from ..errors import HalfbyteError
    from ..residency import require_as_stored

    refuse_options_of_conversion(args)
    source = located(args.source, args)
    ledger = skeleton(source)[1]
    if not ledger.mixtures:
        args.parser.error(f"argument --repack: {source} has no experts")
    require_as_stored(source, ledger.mixtures)
    if not args.dry_run:
        try:
            repacking.repack(ledger, bar("writing"))
        except HalfbyteError:
            raise
        except ValueError as error:  # a folder that takes no files
            args.parser.error(str(error))
    elif not args.json:
        print(*repacking.lines(ledger), sep="\n")
    count, total = len(ledger.mixtures), sum(map(file_size, ledger.mixtures.values()))
    rows = [
        ("beside", str(source)),
        ("experts", f"{count} files, {size(total)}{' (not written)' if args.dry_run else ''}"),
    ]
    values = {
        "source": str(source), "written": not args.dry_run, "files": count, "bytes": total,
        "bytes_written": 0 if args.dry_run else total,
    }  # fmt: skip
    show(values, rows, args.json)
    return 0


def refuse_options_of_conversion(args: argparse.Namespace) -> None:
    """Repacked experts are those of the checkpoint, bit for bit."""
    given = [name for name in CONVERTING if getattr(args, name) != args.parser.get_default(name)]
    if given:
        *others, last = (f"--{name.replace('_', '-')}" for name in given)
        named = f"{', '.join(others)} and {last}" if others else last
        args.parser.error(f"argument --repack: not with {named}: experts are written as they are")
