"""What a connector can say about schemas; the runtime finds these abilities by `isinstance`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa
from pyarrow import types

from penstock.formats import WireSchema
from penstock.source import ENVELOPE_SCHEMA, Schemas, SourceConnector, SourceRecord

if TYPE_CHECKING:
    from penstock.schema.compatibility import Incompatibility

_KEY = b"penstock.key"
_SCHEMA = b"penstock.schema"


def with_key(schema: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """The schema with its key columns recorded in its metadata, where they travel with every batch."""
    return schema.with_metadata({**(schema.metadata or {}), _KEY: json.dumps(list(key)).encode()})


def key_of(schema: pa.Schema) -> list[str]:
    """The key columns of a schema; empty when it has none."""
    return list(json.loads((schema.metadata or {}).get(_KEY, b"[]")))


class SchemaRef(NamedTuple):
    """A version of a subject in the registry."""

    subject: str
    version: int
    id: int


def with_ref(schema: pa.Schema, wire: WireSchema) -> pa.Schema:
    """The columns with the schema by which their rows were decoded recorded in their metadata."""
    ref = json.dumps([wire.subject, wire.version, wire.id]).encode()
    return schema.with_metadata({**(schema.metadata or {}), _SCHEMA: ref})


def ref_of(schema: pa.Schema) -> SchemaRef | None:
    """The schema by which rows with these columns were decoded; None: they were not, or without one."""
    found = (schema.metadata or {}).get(_SCHEMA)
    return None if found is None else SchemaRef(*json.loads(found))


def is_envelope(schema: pa.Schema) -> bool:
    """
    True for rows that are messages as they came, and not yet decoded.

    Rows of a table and objects in payloads may have columns of these names, but hardly a map and a time among them. Key
    and payload may be text.
    """
    named = ((name, schema.get_field_index(name)) for name in ("key", "payload", "attributes", "timestamp"))
    alike = (at >= 0 and _is_alike(schema.field(at).type, ENVELOPE_SCHEMA.field(name).type) for name, at in named)
    return ref_of(schema) is None and all(alike)


def _is_alike(kind: pa.DataType, own: pa.DataType) -> bool:
    """True if a column may be one of an envelope: a file or a query gives such columns with other widths and units."""
    if types.is_binary(own):
        return any(of_kind(kind) for of_kind in _BYTES)
    return bool(kind.id == own.id)


_BYTES = (
    types.is_binary,
    types.is_large_binary,
    types.is_binary_view,
    types.is_string,
    types.is_large_string,
    types.is_string_view,
    types.is_null,
)


def as_came(messages: pa.RecordBatch) -> pa.RecordBatch:
    """Messages with keys and payloads in bytes: a query or a source may give text, which is its bytes in UTF-8."""
    for name in ("key", "payload"):
        at = messages.schema.get_field_index(name)
        if not types.is_binary(messages.schema.field(at).type):
            field = messages.schema.field(at).with_type(pa.binary())
            messages = messages.set_column(at, field, messages.column(at).cast(pa.binary()))
    return messages


class ChangeKind(StrEnum):
    ADDED = "added"
    DROPPED = "dropped"
    RETYPED = "retyped"


@dataclass(frozen=True)
class SchemaChange:
    """One difference between two schemas."""

    kind: ChangeKind
    column: str
    old: pa.DataType | None = None
    new: pa.DataType | None = None


@runtime_checkable
class SchemaProvider(Protocol):
    """Knows its schemas (a database catalog)."""

    def provide_schema(self) -> dict[str, pa.Schema]: ...

    def is_authoritative(self) -> bool: ...


@runtime_checkable
class SchemaInferable(Protocol):
    """Can show samples from which a schema is inferred."""

    def sample_records(self, n: int) -> Sequence[SourceRecord]: ...

    def infer_from_samples(self, samples: Sequence[SourceRecord]) -> dict[str, pa.Schema]: ...


@runtime_checkable
class SchemaRegistryAware(Protocol):
    """Talks to a schema registry."""

    def fetch_schema(self, subject: str, version: int | None = None) -> WireSchema:
        """One version of a subject, by default the latest."""
        ...

    def fetch_schema_by_id(self, id: int) -> WireSchema:
        """The schema of an id; `DataError` when the registry does not have it."""
        ...

    def check_compatibility(self, subject: str, schema: WireSchema) -> Sequence[Incompatibility]:
        """Why a schema may not become the next version of a subject; empty: it may."""
        ...

    def register_schema(self, subject: str, schema: WireSchema) -> WireSchema:
        """Make it the next version, unless it is one already; with the version and the id that it has then."""
        ...


@runtime_checkable
class SchemaEvolvable(Protocol):
    """Can follow a schema that changes."""

    def diff_schemas(self, old: pa.Schema, new: pa.Schema) -> Sequence[SchemaChange]:
        """What must change in a target with the columns `old` so that rows with the columns `new` fit."""

    def evaluate_evolution(self, changes: Sequence[SchemaChange], refilled: str | None = None) -> bool:
        """
        True if a target can change like this.

        `refilled` names a topic whose rows follow a clear: True if its target can change together with its rows, in
        their commit. The task then finds `TopicContext.refilled` set.
        """

    def apply_evolution(self, topic: str, changes: Sequence[SchemaChange]) -> None:
        """Change the target of a topic, before the rows that need it are staged."""


@runtime_checkable
class Doubling(Protocol):
    """A sink with stored columns that can turn whole numbers into doubles, also after rows are committed."""

    def can_be_double(self, topic: str, column: str) -> bool:
        """
        True if a column of a topic can become double: the target can change it, and no value would be rounded.

        Asked on the driver, before the rows that need it are staged.
        """


@runtime_checkable
class Choosy(Protocol):
    """A sink that can say before the first row which columns its target could never have."""

    def check_columns(self, topic: str, columns: pa.Schema) -> None:
        """
        Raise a SchemaError for columns that the target of a topic cannot have; may look at it, and changes nothing.

        Asked on the driver, where a schema fixes the columns of messages.
        """


@runtime_checkable
class Readable(Protocol):
    """A sink whose rows can be read again, so that dead letters which it holds can be replayed."""

    takes_nested: ClassVar[bool]
    """False: structs and maps have no place in it, and letters come with JSON text instead."""

    def read_topic(self, topic: str) -> pa.Table | None:
        """Every committed row of a topic, on the driver or for a command, after `open`; None if there is none."""


SAMPLES = 1000
"""Records that are looked at when a schema has to be inferred."""


def discover(source: SourceConnector[Any]) -> Schemas:
    """The schemas a pipeline starts with: an authoritative provider's, else what the source says, else inferred ones."""
    if isinstance(source, SchemaProvider) and source.is_authoritative():
        return source.provide_schema()
    known = source.schema()
    if not known and isinstance(source, SchemaInferable):
        return source.infer_from_samples(source.sample_records(SAMPLES))
    return known
