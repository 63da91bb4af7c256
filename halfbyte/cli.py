"""The command line: one function a command, named as the command; its docstring is the help text.

Nothing heavy is imported before a command needs it, so that help is instant.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from . import __version__


def ops(args: argparse.Namespace) -> int:
    """Print which op has a kernel in which language, and how many cases prove it."""
    from .cases import CASES
    from .listing import ops as listed
    from .ops.dispatch import LANGUAGES

    found = listed()
    width = max(len(op.name) for op in found)
    family = ""
    print(f"{'':<{width + 2}}  {'  '.join(f'{name:<6}' for name in LANGUAGES)}  cases  serving")
    for op in found:
        if op.family != family:
            family = op.family
            print(family)
        having = "  ".join(f"{'yes' if name in op.languages else '-':<6}" for name in LANGUAGES)
        cases = [case for case in CASES if case.op.__name__ == op.name]
        print(f"  {op.name:<{width}}  {having}  {len(cases):>5}  {sum(case.serving for case in cases):>7}")
    return 0


def bench_ops(args: argparse.Namespace) -> int:
    """Time every op at its serving shapes: kernel, torch body, GB/s, percent of read bandwidth.

    A kernel that is more than twice as far from the truth as its torch body is reported as WRONG, not timed, and makes
    the exit status 1. "cached" marks inputs too small to rotate out of the caches, "busy" a row that other processes
    disturbed throughout.
    """
    from .bench import bench, header, line
    from .cases import CASES
    from .machine import ReadProbe, facts

    cases = [case for case in CASES if case.serving and args.op in (None, case.op.__name__, str(case))]
    if not cases:
        known = ", ".join(dict.fromkeys(case.op.__name__ for case in CASES if case.serving))
        args.parser.error(f"argument --op: no serving case of {args.op!r}; ops are {known}")
    probe = ReadProbe()
    machine = {**facts(), "device": args.device, "read_bytes_per_second": probe.bandwidth()}
    if not args.json:
        print(*header(machine), sep="\n", flush=True)
    width = max(len(str(case)) for case in cases)
    rows = []
    for row in bench(cases, probe, args.seconds, progress):
        rows.append(row)
        progress("")
        if not args.json:
            print(line(row, width), flush=True)
    wrong, slower = sum(row.wrong for row in rows), sum(row.speedup is not None and row.speedup < 1 for row in rows)
    if args.json:
        print(json.dumps({"machine": machine, "rows": [row.as_json() for row in rows]}, indent=1))
    else:
        print(f"{len(rows)} cases, {wrong} wrong, {slower} slower than torch")
    return 1 if wrong else 0


def progress(text: str) -> None:
    """One line on a terminal, rewritten; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="halfbyte", description="Quantised expert models on the machine you have.")
    top.add_argument("--version", action="version", version=f"halfbyte {__version__}")
    commands = top.add_subparsers(required=True, metavar="command", title="commands")
    _command(commands, "ops", ops)
    kinds = commands.add_parser("bench", help="Measure this machine.").add_subparsers(required=True, metavar="what")
    timed = _command(kinds, "ops", bench_ops)
    timed.add_argument("--device", choices=["cpu"], default="cpu", help="where to run (default: cpu)")
    timed.add_argument("--op", metavar="NAME", help="only this op (qmm), or only this case (as it is printed)")
    timed.add_argument("--json", action="store_true", help="print one JSON object: machine and rows")
    timed.add_argument("--seconds", type=positive, default=0.5, metavar="S", help="time for a case (default: 0.5)")
    return top


def _command(commands: Any, name: str, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    text = function.__doc__ or ""
    added: argparse.ArgumentParser = commands.add_parser(name, help=text.split("\n")[0], description=text)
    added.set_defaults(run=function, parser=added)
    return added


def main(argv: list[str] | None = None) -> int:
    try:
        args = parser().parse_args(argv)
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        progress("")
        return 130
    except BrokenPipeError:  # the reader (`| head -1`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
