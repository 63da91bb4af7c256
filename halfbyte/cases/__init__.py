"""Every op's cases, once: tested, timed, listed. Odd sizes that divide by nothing, strided inputs, scales at which
every parameter matters, and the real serving shapes. One file a family, as in `ops`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .case import Case, Random

__all__ = ["CASES", "Case", "Random"]

CASES: list[Case] = [
    case
    for module in sorted(m.name for m in iter_modules(__path__) if m.name != "case")
    for case in import_module(f"{__name__}.{module}").CASES
]
