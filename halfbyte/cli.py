"""The command line: one function a command, named as the command; its docstring is the help text.

Nothing heavy is imported before a command needs it, so that help is instant.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
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
    """Time every op at its serving shapes: kernel, torch body, rate, percent of what the machine can do.

    A kernel that is more than twice as far from the truth as its torch body, or whose bits change between two runs, is
    reported as WRONG, not timed, and makes the exit status 1. On a GPU, times are those of CUDA graphs, with inputs
    rotated past the cache ("eager" where an op waits for the device), and the percentage is of the measured read
    bandwidth, of a torch copy of as many bytes, or of the measured matmul rate. "cached" marks inputs too small to
    rotate out of the caches, "busy" a row that other processes disturbed throughout.
    """
    from .cases import CASES

    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            args.parser.error("argument --device: torch finds no CUDA GPU here; --device cpu runs anywhere")
    cases = [case for case in CASES if case.runs_on(args.device) and args.op in (None, case.op.__name__, str(case))]
    if not any(case.serving for case in cases):
        known = ", ".join(dict.fromkeys(case.op.__name__ for case in CASES if case.serving))
        args.parser.error(f"argument --op: no serving case of {args.op!r}; ops are {known}")
    return check_ops(args, cases) if args.check else time_ops(args, [case for case in cases if case.serving])


def check_ops(args: argparse.Namespace, cases: list[Any]) -> int:
    """Every case, not only the serving ones, and every golden vector: prints what is wrong, times nothing."""
    from .proof import cases as proved
    from .proof import goldens

    start, results = time.perf_counter(), []
    for kind, problems in (
        ("cases in float32 and bfloat16", proved(cases, args.device, progress)),
        ("golden files", goldens(args.device, progress) if args.op is None else ()),
    ):
        count = wrong = 0
        for problem in problems:
            count, wrong = count + 1, wrong + bool(problem)
            if problem:
                progress("")
                print(problem, file=sys.stderr if args.json else sys.stdout, flush=True)
        results.append({"checked": kind, "count": count, "wrong": wrong})
    progress("")
    if args.json:
        print(json.dumps({"device": args.device, "results": results}, indent=1))
    else:
        said = ", ".join(f"{one['count']} {one['checked']}, {one['wrong']} wrong" for one in results)
        print(f"{args.device}: {said}; {time.perf_counter() - start:.0f} s")
    return 1 if any(one["wrong"] for one in results) else 0


def time_ops(args: argparse.Namespace, cases: list[Any]) -> int:
    from functools import partial

    from . import bench, cuda
    from .machine import ReadProbe, facts

    if args.device == "cuda":
        machine, said, measure = cuda.facts(), cuda.header, cuda.measure
    else:
        probe = ReadProbe()
        machine, said = {**facts(), "read_bytes_per_second": probe.bandwidth()}, bench.header
        measure = partial(bench.measure, probe=probe, seconds=args.seconds)
    machine["device"] = args.device
    if not args.json:
        print(*said(machine), sep="\n", flush=True)
    width = max(len(str(case)) for case in cases)
    rows = []
    for row in bench.bench(cases, args.device, measure, progress):
        rows.append(row)
        progress("")
        if not args.json:
            print(bench.line(row, width), flush=True)
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
    timed.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to run (default: cpu)")
    timed.add_argument("--check", action="store_true", help="check every case and golden vector, time nothing")
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
