"""Every mode of compatibility with every type of schema: which versions are looked at, and in which direction."""

from __future__ import annotations

import json

import pytest

from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility, incompatibilities


def avro(*fields: str) -> WireSchema:
    found = [{"name": name, "type": "long"} for name in ("id", *fields)]
    return WireSchema("avro", json.dumps({"type": "record", "name": "R", "fields": found}))


def json_schema(*required: str) -> WireSchema:
    properties = {name: {"type": "integer"} for name in ("id", "x")}
    text = {"type": "object", "properties": properties, "required": ["id", *required], "additionalProperties": False}
    return WireSchema("json_schema", json.dumps(text))


def protobuf(label: str) -> WireSchema:
    return WireSchema("protobuf", f'syntax = "proto2"; message R {{ required int64 id = 1; {label} int64 x = 2; }}')


LOOSE_AND_STRICT = {
    "avro": (avro(), avro("x")),
    "json_schema": (json_schema(), json_schema("x")),
    "protobuf": (protobuf("optional"), protobuf("required")),
}
"""Of two schemas the first: what the second has written it can read, but not the other way round."""

READS = {"none": (), "backward": ("new",), "forward": ("old",), "full": ("new", "old")}
"""Who must be able to read what the other has written."""


@pytest.mark.parametrize("kind", LOOSE_AND_STRICT)
@pytest.mark.parametrize("mode", Compatibility)
@pytest.mark.parametrize(
    "versions", ["loose strict", "strict loose", "loose loose strict", "loose strict strict", "strict loose loose"]
)
def test_a_new_version_is_refused_just_when_a_reader_could_not_read(kind, mode, versions):
    named = dict(zip(("loose", "strict"), LOOSE_AND_STRICT[kind], strict=True))
    *earlier, new = versions.split()
    looked_at = earlier if mode.is_transitive else earlier[-1:]
    readers = READS[mode.value.removesuffix("_transitive")]
    pairs = [(new, old) if reader == "new" else (old, new) for old in looked_at for reader in readers]
    is_refused = ("strict", "loose") in pairs  # the strict one reads what the loose one has written
    found = incompatibilities(mode, [named[each] for each in earlier], named[new])
    assert bool(found) == is_refused, found
    assert all(each.rule.startswith(f"{kind}.") for each in found)
