"""Kinds of JSON values. Each reads a value or refuses it by its name, and describes itself for /openapi.json.

So what is checked and what is described are one thing. null is the same as nothing, everywhere.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .refusals import Refused, wrong

Description = dict[str, Any]


class Field(ABC):
    @abstractmethod
    def read(self, value: Any, path: str) -> Any:
        """The value, as the routes take it; `path` says where it stands, as in "messages[0].content"."""

    @abstractmethod
    def describe(self) -> Description:
        """As a JSON schema."""


@dataclass(frozen=True)
class Integer(Field):
    low: int
    high: int

    def read(self, value: Any, path: str) -> int:
        if type(value) is not int or not self.low <= value <= self.high:
            raise wrong(path, f"an integer from {self.low} to {self.high}")
        return value

    def describe(self) -> Description:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Number(Field):
    low: float
    high: float

    def read(self, value: Any, path: str) -> float:
        number = type(value) in (int, float) and math.isfinite(value)
        if not number or not self.low <= value <= self.high:
            raise wrong(path, f"a number from {self.low:g} to {self.high:g}")
        return float(value)

    def describe(self) -> Description:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Flag(Field):
    def read(self, value: Any, path: str) -> bool:
        if type(value) is not bool:
            raise wrong(path, "true or false")
        return value

    def describe(self) -> Description:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Text(Field):
    limit: int | None = None  # bytes
    least: int = 0

    def read(self, value: Any, path: str) -> str:
        size = len(value.encode("utf-8", "replace")) if isinstance(value, str) else -1
        if size < self.least or (self.limit is not None and size > self.limit):
            most = "" if self.limit is None else f" of {f'{self.least} to' if self.least else 'at most'} {self.limit}"
            raise wrong(path, f"a string{most}{' bytes' if most else ' that is not empty' if self.least else ''}")
        return str(value)

    def describe(self) -> Description:
        bounds = {"minLength": self.least or None, "maxLength": self.limit}  # a character has a byte at least
        return {"type": "string", **{name: bound for name, bound in bounds.items() if bound is not None}}


@dataclass(frozen=True)
class Choice(Field):
    names: tuple[str, ...]

    def read(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise wrong(path, " or ".join(map(repr, self.names)))
        return value

    def describe(self) -> Description:
        return {"enum": [*self.names]}


@dataclass(frozen=True)
class Only(Field):
    """A field that would change the answer, and that is not implemented: it may say what is done anyway."""

    harmless: tuple[Any, ...]
    why: str

    def read(self, value: Any, path: str) -> Any:
        if value not in self.harmless:
            raise wrong(path, self.why)
        return value

    def describe(self) -> Description:
        return {"enum": [*self.harmless]}


@dataclass(frozen=True)
class Anything(Field):
    def read(self, value: Any, path: str) -> Any:
        return value

    def describe(self) -> Description:
        return {}


@dataclass(frozen=True)
class Object(Field):
    """Any object, such as a schema of the client's: whether that can be followed is seen when it is compiled."""

    limit: int | None = None  # bytes

    def read(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict) or (self.limit is not None and len(json.dumps(value)) > self.limit):
            raise wrong(path, "an object" if self.limit is None else f"an object of at most {self.limit} bytes")
        return value

    def describe(self) -> Description:
        return {"type": "object"}


@dataclass(frozen=True)
class Items(Field):
    of: Field
    low: int
    high: int
    numbered: bool = True  # an error names the item, not only the list

    def read(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list) or not self.low <= len(value) <= self.high:
            raise wrong(path, f"a list of {self.low} to {self.high}")
        return [self.of.read(item, f"{path}[{n}]" if self.numbered else path) for n, item in enumerate(value)]

    def describe(self) -> Description:
        return {"type": "array", "items": self.of.describe(), "minItems": self.low, "maxItems": self.high}


@dataclass(frozen=True)
class Table(Field):
    """An object. Fields that are not in the table are left alone, as clients send ever new ones."""

    fields: Mapping[str, Field]
    needs: tuple[str, ...] = ()

    def read(self, value: Any, path: str = "") -> dict[str, Any]:
        """Every field of the table, None where there was nothing."""
        if not isinstance(value, Mapping):
            raise wrong(path or "the body", "an object")
        read = {}
        for name, kind in self.fields.items():
            given, place = value.get(name), f"{path}.{name}" if path else name
            if given is None and name in self.needs:
                raise Refused(400, f"{place}: it is missing.", place, "missing_required_parameter")
            read[name] = None if given is None else kind.read(given, place)
        return read

    def describe(self) -> Description:
        described = {name: _optional(kind, name in self.needs) for name, kind in self.fields.items()}
        return {"type": "object", "properties": described, **({"required": [*self.needs]} if self.needs else {})}


@dataclass(frozen=True)
class Either(Field):
    """One kind or another, by the type that JSON gives the value."""

    kinds: Mapping[type, Field]
    expected: str

    def read(self, value: Any, path: str) -> Any:
        if (kind := self.kinds.get(type(value))) is None:
            raise wrong(path, self.expected)
        return kind.read(value, path)

    def describe(self) -> Description:
        return {"anyOf": [kind.describe() for kind in self.kinds.values()]}


@dataclass(frozen=True)
class Tagged(Field):
    """An object whose "type" says what else is in it. `default` is that of one that does not say."""

    kinds: Mapping[str, Table]
    expected: str
    default: str | None = None

    def read(self, value: Any, path: str) -> dict[str, Any]:
        tag = value.get("type", self.default) if isinstance(value, Mapping) else None
        if not isinstance(tag, str) or tag not in self.kinds:
            raise wrong(path, self.expected)
        return {**self.kinds[tag].read(value, path), "type": tag}

    def describe(self) -> Description:
        return {"anyOf": [self._described(tag, kind.describe()) for tag, kind in self.kinds.items()]}

    def _described(self, tag: str, described: Description) -> Description:
        needs = [*([] if tag == self.default else ["type"]), *described.get("required", [])]
        properties = {"type": {"const": tag}, **described["properties"]}
        return {"type": "object", "properties": properties, **({"required": needs} if needs else {})}


@dataclass(frozen=True)
class TokenIds(Field):
    vocabulary: int
    most: int
    least: int = 1

    def read(self, value: Any, path: str) -> list[int]:
        if not isinstance(value, list) or len(value) < self.least:
            raise wrong(path, "a list of token ids")
        if len(value) > self.most:
            raise wrong(path, f"at most {self.most} token ids", code="context_length_exceeded")
        if not all(type(id) is int and 0 <= id < self.vocabulary for id in value):
            raise wrong(path, f"token ids from 0 to {self.vocabulary - 1}")
        return value

    def describe(self) -> Description:
        return Items(Integer(0, self.vocabulary - 1), self.least, self.most).describe()


@dataclass(frozen=True)
class Biases(Field):
    """Numbers by token id."""

    vocabulary: int
    most: int
    value: Number = field(default_factory=lambda: Number(-100, 100))

    def read(self, value: Any, path: str) -> dict[int, float]:
        if not isinstance(value, Mapping) or len(value) > self.most:
            raise wrong(path, f"an object of at most {self.most} token ids")
        read = {}
        for key, bias in value.items():
            if not (isinstance(key, str) and key.isdecimal() and len(key) < 10 and int(key) < self.vocabulary):
                raise wrong(path, f"token ids from 0 to {self.vocabulary - 1} as keys")
            read[int(key)] = self.value.read(bias, path)
        return read

    def describe(self) -> Description:
        keys = {"pattern": "^[0-9]{1,9}$"}
        more = {"propertyNames": keys, "maxProperties": self.most}
        return {"type": "object", "additionalProperties": self.value.describe(), **more}


def _optional(kind: Field, needed: bool) -> Description:
    described = kind.describe()
    return described if needed or not described else {"anyOf": [described, {"type": "null"}]}
