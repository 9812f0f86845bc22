"""
What a pipeline looked like when it last ran, and which changes of its file are safe.

`docs/spec/changes.md` is the table that `compare_shapes` implements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.config import Secret
from penstock.durable import Json
from penstock.errors import ConfigError, FatalError
from penstock.pipeline.routing import Router
from penstock.pipeline.toml import without_password
from penstock.sink import DeliveryGuarantee, SinkConnector
from penstock.source import Connector, Finding, SourceConnector

VERSION = 1

_RESET = "undo the change, or give up the recorded positions: penstock offsets reset FILE"


def shape_of(
    name: str,
    sources: Mapping[str, SourceConnector[Any]],
    sinks: Mapping[str, SinkConnector[Any, Any]],
    router: Router,
    delivery: DeliveryGuarantee,
    base: Path | None,
) -> Json:
    """The parts of a pipeline that its state depends on, as JSON. Paths below `base` are kept as seen from there."""
    routes = [
        {
            "from": route.stream,
            "source": route.source,
            "match": dict(route.match),
            "to": "/" + route.to.lstrip("/"),
            "sinks": sorted(route.sinks or router.sinks),
            **({"exclude": sorted(route.exclude)} if route.exclude else {}),
            "work": {"sql": route.sql, "transform": route.transform, "key": list(route.key)},
        }
        for route in router.effective
    ]
    return {
        "version": VERSION,
        "name": name,
        "delivery": str(delivery),
        "sources": {name: _connector_shape(source, base) for name, source in sources.items()},
        "sinks": {name: _connector_shape(sink, base) for name, sink in sinks.items()},
        "routes": routes,
    }


def changes_between(old: Json, new: Json) -> list[Finding]:
    """What changed between two runs: `ok` for a notice, otherwise a refusal and what to do."""
    if old["version"] > VERSION:
        raise FatalError(
            f"the recorded shape has version {old['version']}, and this Penstock knows {VERSION}",
            code="PEN-5006",
            hint="run a Penstock that is at least as new as the one that wrote the state",
        )
    return [
        *_compare_name(old, new),
        *_compare_connectors("source", old["sources"], new["sources"]),
        *_compare_connectors("sink", old["sinks"], new["sinks"]),
        *_compare_routes(old["routes"], new["routes"], new["sinks"]),
    ]


def compare_shapes(old: Json, new: Json) -> list[str]:
    """Refuse the changes that need a reset, all at once; otherwise what changed, as notices."""
    findings = changes_between(old, new)
    refused = [finding for finding in findings if not finding.ok]
    if refused:
        what = "; ".join(finding.what for finding in refused)
        hint = " · ".join(dict.fromkeys(finding.fix for finding in refused))
        raise ConfigError(f"since the last run {what}", code="PEN-1013", hint=hint)
    return [finding.what for finding in findings]


def _connector_shape(connector: Connector[Any], base: Path | None) -> Json:
    config = connector.config
    names = [name for name in type(config).model_fields if name in type(config).identity]
    dumped = config.model_dump(mode="json", include={n for n in names if not isinstance(getattr(config, n), Secret)})
    kind = type(connector)
    own = kind.__module__.startswith("penstock.")
    return {
        "connector": kind.name if own else f"{kind.__module__}:{kind.__qualname__}",
        "identity": {key: _portable(value, base) for key, value in dumped.items()},
    }


def _portable(value: Json, base: Path | None) -> Json:
    """The value without passwords, and without the directory that the file happens to be in."""
    if isinstance(value, str):
        here = f"{base}/" if base else ""
        return without_password(value.removeprefix(here))
    if isinstance(value, list):
        return [_portable(each, base) for each in value]
    return value


def _compare_name(old: Json, new: Json) -> Iterator[Finding]:
    if old["name"] != new["name"]:
        yield Finding(
            False, f"the pipeline {old['name']!r} was renamed {new['name']!r}", "undo it, or use another state_dir"
        )
    if old["delivery"] != new["delivery"]:
        yield Finding(True, f"delivery is {new['delivery']} from now on; earlier rows were written {old['delivery']}")


def _compare_connectors(kind: str, old: Json, new: Json) -> Iterator[Finding]:
    for name in old:
        if name not in new:
            yield Finding(False, f"the {kind} {name!r} was removed or renamed", _RESET)
        elif old[name]["connector"] != new[name]["connector"]:
            before, now = old[name]["connector"], new[name]["connector"]
            yield Finding(False, f"the {kind} {name!r} changed its connector from {before!r} to {now!r}", _RESET)
        else:
            yield from _compare_options(f"{kind} {name!r}", old[name]["identity"], new[name]["identity"])
    for name in new:
        if name not in old:
            begins = "is read from its beginning" if kind == "source" else "gets rows from now on"
            yield Finding(True, f"the {kind} {name!r} is new and {begins}")


def _compare_options(of: str, old: Json, new: Json) -> Iterator[Finding]:
    for option in old:
        before, now = old[option], new.get(option)
        if option not in new or before == now:
            continue
        if isinstance(before, list) and isinstance(now, list):
            gone = [each for each in before if each not in now]
            added = [each for each in now if each not in before]
        elif isinstance(before, dict) and isinstance(now, dict):
            gone = [key for key in before if before[key] != now.get(key)]
            added = [key for key in now if key not in before]
        else:
            yield Finding(False, f"`{option}` of {of} changed from {before!r} to {now!r}", _RESET)
            continue
        if gone:
            yield Finding(False, f"`{option}` of {of} lost or changed {_names(gone)}", _RESET)
        if added:
            yield Finding(True, f"`{option}` of {of} has {_names(added)} from now on")


def _compare_routes(old: Json, new: Json, sinks: Json) -> Iterator[Finding]:
    for route in old:
        same = [each for each in new if _takes(each) == _takes(route)]
        kept = next((each for each in same if each["to"] == route["to"]), None)
        if kept is None and same:
            yield Finding(
                False, f"the route from {route['from']!r} now leads to {same[0]['to']!r}, not {route['to']!r}", _RESET
            )
        elif kept is None:
            yield Finding(False, f"the route from {route['from']!r} to {route['to']!r} was removed or changed", _RESET)
        else:
            gone = [sink for sink in route["sinks"] if sink in sinks and sink not in kept["sinks"]]
            if gone:
                what = f"the route from {route['from']!r} to {route['to']!r} no longer names the sink {_names(gone)}"
                yield Finding(False, what, _RESET)
            yield from _compare_exclude(route, kept)
            if route["work"] != kept["work"]:
                yield Finding(
                    True, f"the route from {route['from']!r} to {route['to']!r} works differently from now on"
                )
    for route in new:
        if not any((_takes(each), each["to"]) == (_takes(route), route["to"]) for each in old):
            yield Finding(True, f"the route from {route['from']!r} to {route['to']!r} is new and gets rows from now on")


def _compare_exclude(old: Json, new: Json) -> Iterator[Finding]:
    before, now = old.get("exclude", []), new.get("exclude", [])
    name = f"the route from {old['from']!r} to {old['to']!r}"
    if added := [each for each in now if each not in before]:
        yield Finding(True, f"{name} leaves {_names(added)} out from now on; earlier rows stay in the targets")
    if gone := [each for each in before if each not in now]:
        yield Finding(True, f"{name} takes {_names(gone)} from now on; earlier rows of it are not read again")


def _takes(route: Json) -> Json:
    return route["from"], route["source"], sorted(route["match"].items())


def _names(values: list[Any]) -> str:
    return ", ".join(map(repr, values))
