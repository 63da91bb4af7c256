"""Is everything right on this device? Every case of every op, and the original kernels' golden vectors.

On a GPU most of the time goes into compiling kernels, so processes share the work and their compiled kernels. Cases too
large for a CPU take gigabytes for their float64 references: only a few of the processes do those.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from .bench import Row, check, line
from .cases import CASES, Case
from .ops.dispatch import LANGUAGE_OF

TESTS = Path(__file__).parent.parent / "tests"
LARGE = 5  # large cases at a time; by estimate the largest reference takes 40 GB, the others up to 16

T = TypeVar("T")
Job = Case | str  # a case, or the name of a golden vector's file


def goldens() -> list[str]:
    """The golden files. They lie in the source tree; a wheel has none."""
    if not (TESTS / "golden_adapter.py").is_file():
        return []
    return [path.stem for path in golden_module("golden_vectors").files()]


def prove(
    jobs: Iterable[Job], device: str, processes: int, progress: Callable[[str], None]
) -> Iterator[tuple[Job, str]]:
    """Each job with what is wrong with it, or nothing, as it ends. A case that no kernel ran is wrong too."""
    if processes == 1:
        for job in jobs:
            progress(f"checking {job}")
            yield job, problem_of(job, device)
        return
    for job, done in shared(problem_in_process, jobs, device, processes, progress):
        try:
            yield job, done.result()
        except BrokenProcessPool:
            yield job, f"{job}  FAILED: a process died, on this or beside it"


def rows(cases: Iterable[Case], device: str, processes: int, progress: Callable[[str], None]) -> dict[str, Row]:
    """The row of each case, by name, checked by several processes; none where there is only one.

    What they compiled lies in Triton's cache, for this process too.
    """
    if processes == 1:
        return {}
    return {str(case): done.result() for case, done in shared(row_in_process, cases, device, processes, progress)}


def default_processes(device: str) -> int:
    """All cores but one of a GPU's machine; kernels for a CPU use all cores themselves."""
    return max(1, (os.cpu_count() or 1) - 1) if device == "cuda" else 1


def problem_of(job: Job, device: str) -> str:
    if isinstance(job, str):
        return golden_problem(job, LANGUAGE_OF[device])
    try:
        row = check(job, device)
    except Exception as error:  # a kernel that does not compile must not hide the others
        return f"{job}  FAILED: {type(error).__name__}: {error}"
    finally:
        leave_memory()
    if row.wrong:
        return line(row, 0).removesuffix("; not timed")
    return f"{job}  NO KERNEL: the torch body ran" if row.language == "torch" else ""


def golden_problem(name: str, language: str) -> str:
    vectors, adapter = golden_module("golden_vectors"), golden_module("golden_adapter")
    misses = []
    try:
        for vector in vectors.load(vectors.FOLDER / f"{name}.npz"):
            got = adapter.run(vector.kernel, vector.inputs, vector.scalars, vector.meta, language=language)
            misses += vector.misses(got)
    except Exception as error:
        misses = [f"{type(error).__name__}: {error}"]
    return f"golden {name}  WRONG: {'; '.join(misses)}" if misses else ""


def golden_module(name: str) -> Any:
    """A module of the tests: they know the originals, this package does not."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return import_module(name)


def shared(
    work: Callable[[str, str], T], jobs: Iterable[Job], device: str, processes: int, progress: Callable[[str], None]
) -> Iterator[tuple[Job, Future[T]]]:
    """Each job with work(its name, device), done by so many processes, as it ends."""
    jobs = spread(jobs)
    large = sum(map(is_large, jobs))
    few = min(LARGE, large, processes - (large < len(jobs)))
    with workers(few) as for_large, workers(processes - few) as for_others:
        running = {(for_large if is_large(job) else for_others).submit(work, str(job), device): job for job in jobs}
        try:
            for count, done in enumerate(as_completed(running), 1):
                progress(f"checked {count} of {len(running)}: {running[done]}")
                yield running[done], done
        finally:
            for future in running:  # an interrupt does not wait for what has not begun
                future.cancel()


def spread(jobs: Iterable[Job]) -> list[Job]:
    """One job of each op in turn: cases side by side then compile different kernels, later ones find theirs."""
    turns: Counter[str] = Counter()
    placed: list[tuple[int, int, Job]] = []
    for job in jobs:
        op = job.op.__name__ if isinstance(job, Case) else "golden"
        placed.append((turns[op], len(placed), job))
        turns[op] += 1
    return [job for _, _, job in sorted(placed, key=lambda each: each[:2])]


def is_large(job: Job) -> bool:
    return isinstance(job, Case) and job.only is not None


def workers(count: int) -> ProcessPoolExecutor:
    """Processes, started when they are given work."""
    return ProcessPoolExecutor(max(1, count), mp_context=get_context("spawn"))


def problem_in_process(name: str, device: str) -> str:
    return problem_of(named(name), device)


def row_in_process(name: str, device: str) -> Row:
    try:
        return check(named(name), device)
    finally:
        leave_memory()


def named(name: str) -> Any:
    """The case of that name; a golden vector's name is all there is of it."""
    return next((case for case in CASES if str(case) == name), name)


def leave_memory() -> None:
    """Gives the GPU's memory back to the processes beside this one."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
