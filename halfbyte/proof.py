"""Is everything right on this device? Every case of every op, and the original kernels' golden vectors.

On a GPU most of the time goes into compiling kernels, so several processes share the work. Cases that are too large for
a CPU also fill a GPU's memory with their float64 references: they run alone, one after the other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from .bench import check, line
from .cases import CASES, Case
from .ops.dispatch import LANGUAGE_OF

TESTS = Path(__file__).parent.parent / "tests"


def cases(chosen: Iterable[Case], device: str, progress: Callable[[str], None]) -> Iterator[str]:
    """For each case what is wrong with it, or nothing. A case that no kernel ran is wrong too."""
    chosen = list(chosen)
    shared = [str(case) for case in chosen if case.only is None] if device == "cuda" else []
    with workers() as pool:
        for name, problem in zip(shared, pool.map(case_problem, shared), strict=True):
            progress(f"checking {name}")
            yield problem
    for case in chosen:
        if str(case) not in shared:
            progress(f"checking {case}")
            yield problem_of(case, device)


def case_problem(name: str) -> str:
    return problem_of(next(case for case in CASES if str(case) == name), "cuda")


def problem_of(case: Case, device: str) -> str:
    try:
        row = check(case, device)
    except Exception as error:  # a kernel that does not compile must not hide the others
        return f"{case}  FAILED: {type(error).__name__}: {error}"
    if row.wrong:
        return line(row, 0).removesuffix("; not timed")
    return f"{case}  NO KERNEL: the torch body ran" if row.language == "torch" else ""


def goldens(device: str, progress: Callable[[str], None]) -> Iterator[str]:
    """For each golden file what is wrong with it, or nothing. They lie in the source tree; a wheel has none."""
    if not (TESTS / "golden_adapter.py").is_file():
        return
    files = [path.stem for path in golden_module("golden_vectors").files()]
    languages = [LANGUAGE_OF[device]] * len(files)
    with workers() as pool:
        problems = (pool.map if device == "cuda" else map)(golden_problem, files, languages)
        for name, problem in zip(files, problems, strict=True):
            progress(f"checking golden {name}")
            yield problem


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


def workers() -> ProcessPoolExecutor:
    """Processes, started when they are given work; kernels for a CPU use all cores themselves and need none."""
    return ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=get_context("spawn"))
