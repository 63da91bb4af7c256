"""What the schema of a value comes to: references followed, choices, lists of types and allOf spelled out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]
MOST = 256  # choices of a value, with the references on the way to them
WORK = 20_000  # keywords and properties that are put together for it
SAYING = {"description", "title", "default", "examples", "$comment", "$id", "$schema", "deprecated"}
NAMES = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}


def alternatives(schema: Any, root: Schema) -> list[Schema]:
    """The schemas of which a value must follow one; a ValueError that names what cannot be spelled out."""
    found: list[Schema] = []
    waiting, work = [schema], 0
    for _ in range(MOST):
        if not waiting:
            return found
        one = waiting.pop()
        one = one if isinstance(one, Mapping) else {}
        if any(
            isinstance(one.get(name), list) and len(one[name]) > MOST for name in ("allOf", "anyOf", "oneOf", "type")
        ):
            break
        work += len(one) + len(of(one))
        if work > WORK and any(name in one for name in ("$ref", "allOf", "anyOf", "oneOf")):
            break
        if "$ref" in one:
            waiting.append(_both(referred(one["$ref"], root), _without(one, "$ref")))
        elif isinstance(one.get("allOf"), list):
            whole = _without(one, "allOf")
            for part in one["allOf"]:
                part = part if isinstance(part, Mapping) else {}
                part = _both(referred(part["$ref"], root), _without(part, "$ref")) if "$ref" in part else part
                work += MOST // 4 + len(part) + len(of(part))
                if work > WORK:
                    raise ValueError("allOf: too many parts, or too large ones")
                whole = _both(part, whole)
            waiting.append(whole)
        elif name := next((name for name in ("anyOf", "oneOf") if isinstance(one.get(name), list)), ""):
            rest = _without(one, name)
            waiting += [_both(choice if isinstance(choice, Mapping) else {}, rest) for choice in reversed(one[name])]
        elif isinstance(kinds := one.get("type"), list) and listed(one) is None:
            waiting += [{**one, "type": kind} for kind in reversed(kinds)]
        else:
            found.append({"type": "object", **one} if "properties" in one else one)
    raise ValueError(f"anyOf: more than {MOST} choices, or a $ref to itself")


def declared(parameters: Any, key: str) -> list[Schema]:
    """The schemas of which a parameter follows one; none where nothing is said of it."""
    if not isinstance(parameters, Mapping):
        return []
    try:
        said = [of(whole).get(key, whole.get("additionalProperties")) for whole in alternatives(parameters, parameters)]
        return [one for schema in said if isinstance(schema, Mapping) for one in alternatives(schema, parameters)]
    except (ValueError, TypeError, RecursionError):
        schema = of(parameters).get(key)
        return [schema] if isinstance(schema, Mapping) else []


def of(schema: Schema) -> Schema:
    """The properties of an object."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def listed(schema: Schema) -> list[Any] | None:
    """The values that a schema lists, as far as they are of its type."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    said = schema.get("type")
    kinds = said if isinstance(said, list) else [said]
    return [
        value for value in values if said is None or {kind(value), "number" * (kind(value) == "integer")} & {*kinds}
    ]


def kind(value: Any) -> str:
    return NAMES.get(type(value), "string")


def referred(name: Any, root: Schema) -> Schema:
    """What a reference within a schema stands for."""
    found: Any = root
    if not isinstance(name, str) or name[:1] != "#":
        raise ValueError(f"$ref: {name} is not in this schema")
    for step in name[1:].split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise ValueError(f"$ref: {name} is not in this schema")
    return found


def _without(schema: Schema, name: str) -> Schema:
    return {key: value for key, value in schema.items() if key != name}


def _both(one: Schema, other: Schema) -> Schema:
    """A schema that says what both say."""
    whole = {**one, **other}
    for name in (name for name in one if name in other and one[name] != other[name] and name not in SAYING):
        here, there = one[name], other[name]
        if name == "required" and isinstance(here, list) and isinstance(there, list):
            whole[name] = [*dict.fromkeys([*here, *there])]
        elif (
            name == "properties" and isinstance(here, Mapping) and isinstance(there, Mapping) and not {*here} & {*there}
        ):
            whole[name] = {**there, **here}
        elif name == "type" and [here, there] in (["integer", "number"], ["number", "integer"]):
            whole[name] = "integer"
        else:
            raise ValueError(f"{name}: two that differ, by a $ref, anyOf, oneOf or allOf")
    return whole
