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
from importlib import import_module
from typing import Any

from . import __version__
from .errors import HalfbyteError

COMMANDS = ("generate", "info", "plan", "convert", "perplexity", "verify", "doctor")  # as files of commands/


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

    if not args.check and (args.only or args.part != (1, 1)):
        args.parser.error("arguments --only and --part: go with --check")
    if args.only == "goldens" and args.op:
        args.parser.error("argument --op: golden vectors belong to no single op")
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
    from .proof import default_processes, goldens, prove

    jobs = {"cases": cases, "goldens": goldens() if args.op is None else []}
    part, parts = args.part
    chosen = [job for kind, given in jobs.items() if args.only in (None, kind) for job in given][part - 1 :: parts]
    start, processes = time.perf_counter(), args.processes or default_processes(args.device)
    kinds = "cases in float32 and bfloat16", "golden files"
    count, wrong = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    for job, problem in prove(chosen, args.device, processes, progress):
        count[kinds[isinstance(job, str)]] += 1
        wrong[kinds[isinstance(job, str)]] += bool(problem)
        if problem:
            progress("")
            print(problem, file=sys.stderr if args.json else sys.stdout, flush=True)
    progress("")
    if args.json:
        results = [{"checked": kind, "count": count[kind], "wrong": wrong[kind]} for kind in kinds]
        print(json.dumps({"device": args.device, "results": results}, indent=1))
    else:
        said = ", ".join(f"{count[kind]} {kind}, {wrong[kind]} wrong" for kind in kinds)
        print(f"{args.device}: {said}; {time.perf_counter() - start:.0f} s")
    return 1 if any(wrong.values()) else 0


def time_ops(args: argparse.Namespace, cases: list[Any]) -> int:
    from functools import partial

    from . import bench, cuda, proof
    from .machine import ReadProbe, facts

    checked: dict[str, bench.Row] = {}
    if args.device == "cuda":
        checked = proof.rows(cases, "cuda", args.processes or proof.default_processes("cuda"), progress)
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
    for row in bench.bench(cases, args.device, measure, progress, checked):
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


def bench_load(args: argparse.Namespace) -> int:
    """Time loading a made-up checkpoint against a plain read of its file, from the disk and from memory, in turns."""
    from .bench_load import bench_load as measured

    found = measured(int(args.gb * 1e9), args.rounds, args.load, progress=progress)
    progress("")
    print(json.dumps(found.as_json(), indent=1) if args.json else "\n".join(found.lines()))
    return 0


def progress(text: str) -> None:
    """One line on a terminal, rewritten; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def whole(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)


def part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"must be one part of several, as 2/8, got {text}")
    return int(number), int(of)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="halfbyte", description="Quantised expert models on the machine you have.")
    top.add_argument("--version", action="version", version=f"halfbyte {__version__}")
    commands = top.add_subparsers(required=True, metavar="command", title="commands")
    for name in COMMANDS:
        module = import_module(f".commands.{name}", __package__)
        added = _command(commands, name, module.run)
        module.arguments(added)
        added.add_argument("--device", choices=["cpu", "cuda", "mps"], help="where to run (default: the best there is)")
        added.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")
        added.add_argument("--offline", action="store_true", help="fetch nothing")
        added.add_argument("--json", action="store_true", help="print one JSON object")
    _command(commands, "ops", ops)
    kinds = commands.add_parser("bench", help="Measure this machine.").add_subparsers(required=True, metavar="what")
    timed = _command(kinds, "ops", bench_ops)
    timed.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to run (default: cpu)")
    timed.add_argument("--check", action="store_true", help="check every case and golden vector, time nothing")
    timed.add_argument("--only", choices=["cases", "goldens"], help="check only these")
    timed.add_argument(
        "--part", type=part, default=(1, 1), metavar="N/OF", help="check only every OF-th, from the N-th"
    )
    timed.add_argument(
        "--processes", type=whole, metavar="N", help="processes that check on a GPU (default: cores - 1)"
    )
    timed.add_argument("--op", metavar="NAME", help="only this op (qmm), or only this case (as it is printed)")
    timed.add_argument("--json", action="store_true", help="print one JSON object: machine and rows")
    loaded = _command(kinds, "load", bench_load)
    loaded.add_argument("--gb", type=positive, default=4.0, metavar="N", help="size of the checkpoint (default: 4)")
    loaded.add_argument("--rounds", type=whole, default=3, metavar="N", help="turns of each (default: 3)")
    loaded.add_argument("--load", choices=["read", "map"], default="read", help="how weights are loaded")
    loaded.add_argument("--json", action="store_true", help="print one JSON object")
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
    except HalfbyteError as error:
        progress("")
        print(f"halfbyte: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        progress("")
        return 130
    except BrokenPipeError:  # the reader (`| head -1`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
