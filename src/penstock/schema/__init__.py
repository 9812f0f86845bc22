"""What a connector can say about schemas; the runtime finds these abilities by `isinstance`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import pyarrow as pa

from penstock.formats import WireSchema
from penstock.source import Schemas, SourceConnector, SourceRecord

if TYPE_CHECKING:
    from penstock.schema.compatibility import Incompatibility

_KEY = b"penstock.key"


def with_key(schema: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """The schema with its key columns recorded in its metadata, where they travel with every batch."""
    return schema.with_metadata({**(schema.metadata or {}), _KEY: json.dumps(list(key)).encode()})


def key_of(schema: pa.Schema) -> list[str]:
    """The key columns of a schema; empty when it has none."""
    return list(json.loads((schema.metadata or {}).get(_KEY, b"[]")))


def is_envelope(schema: pa.Schema) -> bool:
    """True for rows that are messages as they came, and not yet decoded."""
    return {"key", "payload", "attributes", "timestamp"} <= set(schema.names)


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
