"""Is everything right on this device? Every case of every op, and the original kernels' golden vectors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path

from .bench import check, line
from .cases import Case

TESTS = Path(__file__).parent.parent / "tests"


def cases(chosen: Iterable[Case], device: str, progress: Callable[[str], None]) -> Iterator[str]:
    """For each case what is wrong with it, or nothing. A case that no kernel ran is wrong too."""
    for case in chosen:
        progress(f"checking {case}")
        try:
            row = check(case, device)
        except Exception as error:  # a kernel that does not compile must not hide the others
            yield f"{case}  FAILED: {type(error).__name__}: {error}"
            continue
        if row.wrong:
            yield line(row, 0).removesuffix("; not timed")
        elif row.language == "torch":
            yield f"{case}  NO KERNEL: the torch body ran"
        else:
            yield ""


def goldens(language: str, progress: Callable[[str], None]) -> Iterator[str]:
    """For each golden file what is wrong with it, or nothing. They lie in the source tree; a wheel has none."""
    if not (TESTS / "golden_adapter.py").is_file():
        return
    sys.path.insert(0, str(TESTS))
    try:
        vectors, adapter = import_module("golden_vectors"), import_module("golden_adapter")
    finally:
        sys.path.remove(str(TESTS))
    for path in vectors.files():
        progress(f"checking golden {path.stem}")
        misses = []
        try:
            for vector in vectors.load(path):
                got = adapter.run(vector.kernel, vector.inputs, vector.scalars, vector.meta, language=language)
                misses += vector.misses(got)
        except Exception as error:
            misses = [f"{type(error).__name__}: {error}"]
        yield f"golden {path.stem}  WRONG: {'; '.join(misses)}" if misses else ""
