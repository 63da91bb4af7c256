"""JSON from files we did not write: no duplicate keys, bounded depth and numbers, and every error names the file."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

from . import limits
from .errors import CheckpointError, shown

FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


REMEDY = " Download the file again."


def parse(
    data: bytes, where: str, *, depth: int = limits.JSON_DEPTH, remedy: str = REMEDY, finite: bool = False
) -> Any:
    """The value in `data`. Numbers may be non-finite: bare, as Python writes them, or {"__float__": "NaN"} (mlx).

    `finite`: they may not, and an object is what it says.
    """
    hooks: dict[str, Any] = {"object_pairs_hook": _object, "parse_constant": FLOATS.__getitem__}
    if finite:
        hooks = {"object_pairs_hook": _distinct, "parse_constant": _no_number, "parse_float": _finite}
    try:
        value = json.loads(data.decode("utf-8"), parse_int=_integer, **hooks)
        _bound_depth(value, depth)
        return value
    except UnicodeDecodeError as error:
        _refuse(where, f"it is not UTF-8 at byte {error.start}", remedy)
    except RecursionError:
        _refuse(where, f"it nests deeper than {depth}", remedy)
    except json.JSONDecodeError as error:
        _refuse(where, f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}", remedy)
    except _Rejected as error:
        _refuse(where, str(error), remedy)


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    value = parse(data, where)
    if not isinstance(value, dict):
        _refuse(where, f"a JSON object was expected, it holds {_kind(value)}")
    return value


class _Rejected(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) == 1 and pairs[0][0] == "__float__":
        if not isinstance(pairs[0][1], str) or pairs[0][1] not in FLOATS:
            raise _Rejected(f'"__float__" must be one of {", ".join(FLOATS)}, it is {shown(pairs[0][1])}')
        return FLOATS[pairs[0][1]]
    return _distinct(pairs)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _Rejected(f"the key {shown(twice)} stands in it twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > limits.INTEGER_DIGITS:
        raise _Rejected(f"an integer of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise _Rejected("a number of it is too large")
    return value


def _no_number(name: str) -> NoReturn:
    raise _Rejected(f"{name} is not JSON")


def _bound_depth(value: Any, most: int) -> None:
    level, depth = [value], 0
    while level:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        depth += 1
        if depth > most:
            raise _Rejected(f"it nests deeper than {most}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _refuse(where: str, why: str, remedy: str = REMEDY) -> NoReturn:
    raise CheckpointError(f"{where}: {why}.{remedy}")
