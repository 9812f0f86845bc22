"""A JSON Schema for messages that have none: to be read, corrected and then kept in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import DataError
from penstock.formats import WireSchema


def infer_json_schema(payloads: Iterable[bytes]) -> WireSchema:
    """
    The narrowest schema of this shape that allows every payload: types, nested objects and lists.

    A property is required when every object has it. Objects are closed: by the rules of compatibility a property can be
    added to such an object later, and never to an open one.
    """
    merged: dict[str, Any] | None = None
    for number, payload in enumerate(payloads, 1):
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"sample {number} is not JSON: {error}", code="PEN-3001", hint="one JSON value per line"
            ) from error
        found = _schema_of(value)
        merged = found if merged is None else _merged(merged, found)
    if merged is None:
        raise DataError("there are no samples to infer a schema from", hint="give a file with a JSON value per line")
    text = json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **merged}, indent=2)
    return WireSchema("json_schema", text)


def _schema_of(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        properties = {name: _schema_of(each) for name, each in value.items()}
        required = sorted(properties)
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if isinstance(value, list):
        items: dict[str, Any] | None = None
        for each in value:
            found = _schema_of(each)
            items = found if items is None else _merged(items, found)
        return {"type": "array"} if items is None else {"type": "array", "items": items}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int | float):
        return {"type": "integer" if isinstance(value, int) else "number"}
    return {"type": "null" if value is None else "string"}


def _merged(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that allows what either allows."""
    types = sorted(_types(one) | _types(two))
    if "number" in types and "integer" in types:
        types.remove("integer")
    made: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
    parts = [each for each in (one, two) if "object" in _types(each)]
    if parts:
        names = dict.fromkeys(name for each in parts for name in each["properties"])
        made["properties"] = {name: _merge_all(each["properties"].get(name) for each in parts) for name in names}
        made["required"] = sorted(set.intersection(*(set(each["required"]) for each in parts)))
        made["additionalProperties"] = False
    items = [each["items"] for each in (one, two) if "items" in each]
    if items:
        made["items"] = _merge_all(items)
    return made


def _merge_all(schemas: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    known = [each for each in schemas if each is not None]
    return dict(known[0]) if len(known) == 1 else _merged(known[0], known[1])


def _types(schema: Mapping[str, Any]) -> set[str]:
    return {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
