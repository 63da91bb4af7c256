"""The values of a call's arguments: what a text stands for by a tool's schema, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from .alternatives import Schema, kind, listed

PRINTED_NULL = "None"  # templates show a model its own calls so


def typed(text: str, schemas: Sequence[Schema]) -> Any:
    """What a parameter's text stands for by the schemas of which it follows one; without any, and in doubt, text."""
    if not schemas:
        return text
    for value in (value for schema in schemas for value in listed(schema) or ()):
        if text == plain(value):
            return value
    kinds = _kinds(schemas)
    if text == "null" and kinds != {"string"}:
        return None
    if text == PRINTED_NULL and kinds and ("null" in kinds or "string" not in kinds):
        return None
    if text in ("True", "False") and "boolean" in kinds:  # as templates print them
        return text == "True"
    value = text if "string" in kinds else loaded(text)
    return value if kinds or isinstance(value, dict | list) else text


def plain(value: Any) -> str:
    """A value as it is written between tags: text as it is, others as JSON."""
    return value if isinstance(value, str) else written(value)


def textual(schemas: Sequence[Schema]) -> bool:
    """Whether a parameter may be text."""
    kinds = _kinds(schemas)
    return not kinds or "string" in kinds


def _kinds(schemas: Sequence[Schema]) -> set[str]:
    """The types that schemas name, or else those of the values that they list; none where they leave that open."""
    said = {one["type"] for one in schemas if listed(one) is None and isinstance(one.get("type"), str)}
    return said or {kind(value) for one in schemas for value in listed(one) or ()}


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
