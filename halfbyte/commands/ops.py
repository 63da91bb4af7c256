"""`halfbyte ops`: which op has a kernel in which language."""

from __future__ import annotations

import argparse

SHARED = ()


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    """Print which op has a kernel in which language, and how many cases prove it."""
    from ..cases import CASES
    from ..listing import ops as listed
    from ..ops.dispatch import LANGUAGES

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
