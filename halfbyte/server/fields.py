"""Fields of a JSON object, checked as they are read: each has a type and a range, and an error names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .refusals import wrong


class Fields:
    """An object of a request; `path` says where in it, as in "response_format.json_schema"."""

    def __init__(self, given: Any, path: str = "") -> None:
        if not isinstance(given, Mapping):
            raise wrong(path or "the body", "an object")
        self.given, self.path = given, path

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        return self.given.get(key)

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise wrong(self.name(key), f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise wrong(self.name(key), f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise wrong(self.name(key), "true or false")
        return default if value is None else value

    def text(self, key: str, limit: int | None = None) -> str | None:
        value = self.get(key)
        if value is not None and (
            not isinstance(value, str) or (limit is not None and len(value.encode("utf-8", "replace")) > limit)
        ):
            raise wrong(self.name(key), "a string" if limit is None else f"a string of at most {limit} bytes")
        return value

    def choice(self, key: str, *choices: str) -> str | None:
        value: str | None = self.get(key)
        if value is not None and value not in choices:
            raise wrong(self.name(key), " or ".join(map(repr, choices)))
        return value

    def items(self, key: str, low: int, high: int) -> list[Any] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not low <= len(value) <= high:
            raise wrong(self.name(key), f"a list of {low} to {high}")
        return value

    def object(self, key: str) -> Fields | None:
        value = self.get(key)
        return None if value is None else Fields(value, self.name(key))

    def refuse(self, key: str, *harmless: Any, why: str) -> None:
        """A field that would change the answer, and that is not implemented."""
        if self.get(key) is not None and self.get(key) not in harmless:
            raise wrong(self.name(key), why)
