"""config.json, strictly: typed and bounded values, errors that name file and key, nothing overlooked in silence.

A model asks for what it needs. Keys that change the meaning and are not implemented are refused by the model, by name
(`must_be`, `refuse`); keys that nobody asked for are logged once (`log_unread`), since real configs are full of them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from . import files, limits, strict_json
from .errors import CheckpointError, shown

log = logging.getLogger(__name__)
T = TypeVar("T")
D = TypeVar("D")


class _Required:
    """The default of a key that must be there."""


REQUIRED = _Required()
FILE = "config.json"
MODEL_CODE = "model_file"  # mlx-lm's: the model is what the code says
OTHER_CODE = "auto_map"  # for transformers, beside a model_type that says the same: DeepSeek's own configs have it
# Known to everyone, and nothing for a model to compute with.
ASKED_BY_NO_MODEL = {
    "model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "quantization", "quantization_config", "text_config",
    "vision_config", "audio_config", "attention_dropout",
}  # fmt: skip


def read(folder: Path | str, supported: Collection[str] | None = None) -> Config:
    """The config of a model folder. `supported` are the model types there are; None takes any."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder. Give the folder of an MLX checkpoint.")
    path = find(folder)
    data = files.read_small(path, limits.CONFIG_BYTES)
    config = from_dict(strict_json.parse_object(data, str(path)), path, supported)
    config.digest = hashlib.sha256(data).digest()
    return config


def find(folder: Path) -> Path:
    if not os.path.lexists(folder / FILE):
        raise files.lacks(folder, FILE)
    return files.find(folder, FILE)


def from_dict(values: dict[str, Any], path: Path, supported: Collection[str] | None = None) -> Config:
    """The config that `values` are: the keys of text_config count as keys of the top."""
    outer = Config(path, values)
    inner = outer.section("text_config")
    for section in (outer, inner):
        if MODEL_CODE in section:
            section.refuse(MODEL_CODE, "it names Python code to run, and halfbyte runs no code from a model folder. "
                           "Where the model is a plain one of its type, delete the key")  # fmt: skip
        if OTHER_CODE in section:
            log.info("%s: %s names Python code, which is not run", path, OTHER_CODE)
    model_type = outer.text("model_type")
    if supported is not None and model_type not in supported:
        outer.refuse("model_type", f"{shown(model_type)} is not supported; these are: {', '.join(sorted(supported))}")
    text = {key: value for key, value in inner.values.items() if value is not None or key not in values}
    return Config(path, {**values, **text, "model_type": model_type}, nested=text.keys())


class Config:
    """A JSON object whose values are asked for by type. null counts as absent."""

    def __init__(
        self, path: Path, values: dict[str, Any], inside: str = "", nested: Collection[str] = frozenset()
    ) -> None:
        self.path, self.values, self.inside, self.nested = path, values, inside, nested
        self.digest = b""  # of the file's bytes
        self.asked: set[str] = set()
        self.sections: dict[str, Config] = {}

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def model_type(self) -> str:
        return self.text("model_type")

    def __contains__(self, key: str) -> bool:
        self.asked.add(key)
        return self.values.get(key) is not None

    def __bool__(self) -> bool:
        return bool(self.values)

    def usual(self, key: str, absent: T, null: D) -> T | D:
        """The default of a key for which null is not the same as no word at all."""
        return null if key in self.values else absent

    def integer(self, key: str, low: int = 0, high: int = limits.CONTEXT, default: D | _Required = REQUIRED) -> int | D:
        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

        return self._value(key, int, fits, f"an integer from {low} to {high}", default)

    def size(self, key: str, default: D | _Required = REQUIRED) -> int | D:
        """A size of the model, at least 1 and at most what limits.py says for this key."""
        return self.integer(key, 1, limits.SIZES.get(key, limits.SIZE), default)

    def number(
        self, key: str, low: float = -math.inf, high: float = math.inf, default: D | _Required = REQUIRED
    ) -> float | D:
        """A finite number in [low, high]."""

        def fits(value: Any) -> bool:
            plain = isinstance(value, int | float) and not isinstance(value, bool)
            return plain and math.isfinite(value) and low <= value <= high

        span = f" from {low:g} to {high:g}" if (low, high) != (-math.inf, math.inf) else ""
        value = self._value(key, float, fits, f"a finite number{span}", default)
        return float(value) if isinstance(value, int) else value

    def flag(self, key: str, default: D | _Required = REQUIRED) -> bool | D:
        return self._value(key, bool, lambda value: isinstance(value, bool), "true or false", default)

    def text(self, key: str, choices: Collection[str] | None = None, default: D | _Required = REQUIRED) -> str | D:
        def fits(value: Any) -> bool:
            return isinstance(value, str) and (choices is None or value in choices)

        return self._value(key, str, fits, "a string" if choices is None else f"one of {', '.join(choices)}", default)

    def list_of(
        self, key: str, kind: type[T], length: int | None = None, default: D | _Required = REQUIRED
    ) -> list[T] | D:
        """A list of values of one type; float takes integers too, and no number is a bool."""

        def fits(value: Any) -> bool:
            kinds = (int, float) if kind is float else (kind,)
            return (
                isinstance(value, list)
                and (length is None or len(value) == length)
                and all(isinstance(item, kinds) and (kind is bool or not isinstance(item, bool)) for item in value)
            )

        count = "" if length is None else f" of {length}"
        return self._value(key, cast(type[list[T]], list), fits, f"a list{count} of {kind.__name__}", default)

    def integers(self, key: str, default: tuple[int, ...] | _Required = REQUIRED) -> tuple[int, ...]:
        return tuple(self.list_of(key, int, default=default))

    def token_ids(self, key: str) -> list[int]:
        """Ids given as one integer or as a list of them; none where the key is absent."""
        if key not in self:
            return []
        found = self.values[key]
        ids = found if isinstance(found, list) else [found]
        if not all(type(one) is int and 0 <= one < limits.VOCABULARY for one in ids):
            self.refuse(key, f"token ids were expected, it is {shown(found)}")
        return list(ids)

    def section(self, key: str) -> Config:
        """The object under a key, empty where it is absent."""
        if key not in self.sections:
            values = self._value(key, dict, lambda value: isinstance(value, dict), "an object", {})
            self.sections[key] = Config(self.path, values, self._named(key))
        return self.sections[key]

    def must_be(self, key: str, allowed: object, default: object = REQUIRED) -> None:
        """Refuse the key where it has another value than `allowed`, one or a tuple of them; absent means `default`."""
        choices = allowed if isinstance(allowed, tuple) else (allowed,)
        absent = choices[0] if default is REQUIRED else default
        value = self.values[key] if key in self else absent
        if not any(isinstance(value, bool) is isinstance(choice, bool) and value == choice for choice in choices):
            said = " or ".join(shown(choice) for choice in choices)
            self.refuse(key, f"only {said} is implemented, it is {shown(value)}")

    def refuse(self, key: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {self._named(key)}: {why}.")

    def unread(self) -> Iterator[str]:
        """The keys that nobody asked for."""
        for key in self.values:
            if key in self.sections:
                yield from self.sections[key].unread()
            elif key not in self.asked | ASKED_BY_NO_MODEL:
                yield self._named(key)

    def log_unread(self) -> None:
        """Call once, when a model has been built."""
        if keys := sorted(set(self.unread())):
            log.info("%s: not used: %s", self.path, ", ".join(keys))

    def _value(self, key: str, kind: type[T], fits: Any, expected: str, default: D | _Required) -> T | D:
        if key not in self:
            if isinstance(default, _Required):
                self.refuse(key, f"the key is missing; {expected} was expected")
            return default
        value = self.values[key]
        if not fits(value):
            self.refuse(key, f"{expected} was expected, it is {shown(value)}")
        return cast(T, value)

    def _named(self, key: str) -> str:
        inside = "text_config" if key in self.nested else self.inside
        return f"{inside}.{key}" if inside else key
