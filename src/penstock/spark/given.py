"""The options of `format("penstock")`: which connector, and how it is set up."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.pipeline.registry import Kind, config_of, load
from penstock.source import Connector

_OF_SPARK = ("checkpointlocation", "queryname")
"""What Spark hands on of its own options."""


def connector_of(
    kind: Kind, options: Mapping[str, str], own: Collection[str]
) -> tuple[type[Connector[Any]], Config, dict[str, str]]:
    """
    The connector that the options name, its configuration, and those of the options that are ours: the names in `own`.

    An option that the connector has as well is the connector's. What is not text is JSON.
    """
    given = dict(options)
    name = given.pop("connector", None)
    for each in _OF_SPARK:
        given.pop(each, None)
    if name is None:
        raise ConfigError('format("penstock") needs option("connector", …)', code="PEN-1004")
    made = load(kind, name)
    model = config_of(made)
    ours = {each: given.pop(each) for each in own if each in given and each not in model.model_fields}
    by_lower = {field.lower(): field for field in model.model_fields}  # Spark forgets the case of options
    texts = {by_lower.get(each.lower(), each): text for each, text in given.items()}
    return made, _validated(name, model, texts), ours


def _validated(name: str, model: type[Config], texts: Mapping[str, str]) -> Config:
    parsed = {option: _value(text) for option, text in texts.items()}
    try:
        return model.model_validate(parsed)
    except ValidationError as error:  # text that only looks like a number, such as the name of a table
        wrong = {each["loc"][0] for each in error.errors() if each["loc"]}
        parsed.update({option: text for option, text in texts.items() if option in wrong})
    try:
        return model.model_validate(parsed)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
    first = min(found, key=lambda each: each["type"] != "extra_forbidden")  # a wrong name is why another is missing
    option = str(first["loc"][0]) if first["loc"] else ""
    what = {
        "missing": f"{name} needs option({option!r}, …)",
        "extra_forbidden": f"{name} has no option {option!r}",
    }.get(first["type"], f"option {option!r} of {name}: {first['msg']}")
    near = difflib.get_close_matches(option, model.model_fields, n=1)
    code = {"missing": "PEN-1004", "extra_forbidden": "PEN-1002"}.get(first["type"], "PEN-1003")
    known = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(model.model_fields)}"
    raise ConfigError(what, code=code, hint=known if code == "PEN-1002" else "")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
