"""The values of a call's arguments: what a text stands for by a tool's schema, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

PRINTED_NULL = "None"  # templates show a model its own calls so
NAMES = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}


def typed(text: str, schema: Any) -> Any:
    """What a parameter's text stands for by its schema; without one, and in doubt, text."""
    if not isinstance(schema, Mapping):
        return text
    kinds = _kinds(schema)
    if text == "null" and kinds != {"string"}:
        return None
    if text == PRINTED_NULL and kinds and ("null" in kinds or "string" not in kinds):
        return None
    if text in ("True", "False") and "boolean" in kinds:  # as templates print them
        return text == "True"
    value = text if "string" in kinds else loaded(text)
    return value if kinds or isinstance(value, dict | list) else text


def textual(schema: Any) -> bool:
    """Whether a parameter may be text."""
    kinds = _kinds(schema) if isinstance(schema, Mapping) else set()
    return not kinds or "string" in kinds


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names, also as a choice of schemas or of values; none where it leaves that open."""
    said = schema.get("type")
    kinds = {kind for kind in (said if isinstance(said, list) else [said]) if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        choices = schema.get(name)
        for choice in choices if isinstance(choices, list) else ():
            kinds |= _kinds(choice) if isinstance(choice, Mapping) else set()
    values = schema.get("enum")
    if not kinds and isinstance(values, list):
        kinds = {NAMES.get(type(value), "string") for value in values}
    return kinds


def loaded(text: str) -> Any:
    """The JSON in a text, or the text."""
    try:
        return parsed(text)
    except (ValueError, RecursionError):
        return text


def parsed(text: str) -> Any:
    """JSON that can be written as JSON again: a number beyond all floats is the text that it is."""
    return json.loads(text, strict=False, parse_float=_finite, parse_constant=_no_constant)


def _finite(text: str) -> float | str:
    return number if math.isfinite(number := float(text)) else text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True
