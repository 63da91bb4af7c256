"""`halfbyte bench ops`: every op checked, then timed against its torch body and against the machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from ..progress import passing
from .numbers import part, positive, whole

SHARED = ("json",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--check", action="store_true", help="check every case and golden vector, time nothing")
    parser.add_argument("--only", choices=["cases", "goldens"], help="check only these")
    parser.add_argument(
        "--part", type=part, default=(1, 1), metavar="N/OF", help="check only every OF-th, from the N-th"
    )
    parser.add_argument(
        "--processes", type=whole, metavar="N", help="processes that check on a GPU (default: cores - 1)"
    )
    parser.add_argument("--op", metavar="NAME", help="only this op (qmm), or only this case (as it is printed)")
    parser.add_argument("--seconds", type=positive, default=0.5, metavar="S", help="time for a case (default: 0.5)")


def run(args: argparse.Namespace) -> int:
    """Time every op at its serving shapes: kernel, torch body, rate, percent of what the machine can do.

    A kernel that is more than twice as far from the truth as its torch body, or whose bits change between two runs, is
    reported as WRONG, not timed, and makes the exit status 1. On a GPU, times are those of CUDA graphs, with inputs
    rotated past the cache ("eager" where an op waits for the device), and the percentage is of the measured read
    bandwidth, of a torch copy of as many bytes, or of the measured matmul rate. "cached" marks inputs too small to
    rotate out of the caches, "busy" a row that other processes disturbed throughout.
    """
    from ..cases import CASES

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
    from ..proof import default_processes, goldens, prove

    jobs = {"cases": cases, "goldens": goldens() if args.op is None else []}
    part, parts = args.part
    chosen = [job for kind, given in jobs.items() if args.only in (None, kind) for job in given][part - 1 :: parts]
    start, processes = time.perf_counter(), args.processes or default_processes(args.device)
    kinds = "cases in float32 and bfloat16", "golden files"
    count, wrong = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    for job, problem in prove(chosen, args.device, processes, passing):
        count[kinds[isinstance(job, str)]] += 1
        wrong[kinds[isinstance(job, str)]] += bool(problem)
        if problem:
            passing("")
            print(problem, file=sys.stderr if args.json else sys.stdout, flush=True)
    passing("")
    if args.json:
        results = [{"checked": kind, "count": count[kind], "wrong": wrong[kind]} for kind in kinds]
        print(json.dumps({"device": args.device, "results": results}, indent=1))
    else:
        said = ", ".join(f"{count[kind]} {kind}, {wrong[kind]} wrong" for kind in kinds)
        print(f"{args.device}: {said}; {time.perf_counter() - start:.0f} s")
    return 1 if any(wrong.values()) else 0


def time_ops(args: argparse.Namespace, cases: list[Any]) -> int:
    from functools import partial

    from .. import bench, cuda, proof
    from ..machine import ReadProbe, facts

    checked: dict[str, bench.Row] = {}
    if args.device == "cuda":
        checked = proof.rows(cases, "cuda", args.processes or proof.default_processes("cuda"), passing)
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
    for row in bench.bench(cases, args.device, measure, passing, checked):
        rows.append(row)
        passing("")
        if not args.json:
            print(bench.line(row, width), flush=True)
    wrong, slower = sum(row.wrong for row in rows), sum(row.speedup is not None and row.speedup < 1 for row in rows)
    if args.json:
        print(json.dumps({"machine": machine, "rows": [row.as_json() for row in rows]}, indent=1))
    else:
        print(f"{len(rows)} cases, {wrong} wrong, {slower} slower than torch")
    return 1 if wrong else 0
