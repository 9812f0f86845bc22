"""What a task stages of an epoch: rows in the form of a binary COPY, in tables that nobody else knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes import Op, is_changelog
from penstock.changes.old_key import unpack_keys
from penstock.connectors.postgres import columns
from penstock.connectors.postgres.events import StagedPart
from penstock.connectors.postgres.refusals import refusals
from penstock.connectors.postgres.target import Target
from penstock.connectors.postgresql import failures
from penstock.connectors.postgresql.types import quoted
from penstock.errors import SchemaError
from penstock.schema.codec import pack_schema
from penstock.sink import Topic

BUFFER_BYTES = 32 << 20
"""Rows that a task collects before it copies them, over all its staging tables."""

PIECE_ROWS = 1 << 16
"""Rows that are turned into the form of a copy at a time."""

_ROWLESS = [Op.DELETE.value, Op.TRUNCATE.value]


def exact(schema: pa.Schema) -> bytes:
    """A schema with its metadata, which says that a column has grown; Arrow calls such schemas equal."""
    return schema.serialize().to_pybytes()  # type: ignore[no-any-return]


@dataclass
class Known:
    """A topic's table as it was when a task began."""

    target: Target | None
    altered: dict[bytes, dict[str, str]] = field(default_factory=dict)
    """Per schema of rows, as `exact` gives it: the columns that the commit will add or give another type."""

    @property
    def generated(self) -> list[str]:
        return [each.name for each in self.target.columns.values() if each.generated] if self.target else []

    def refuse_values(self, topic: Topic, rows: pa.RecordBatch, altered: Mapping[str, str], upserts: bool) -> None:
        """Refuse values that the table does not take; once they are staged it is too late."""
        assert self.target is not None
        whole = rows
        if upserts and is_changelog(rows.schema):
            if "_unchanged" in rows.schema.names and rows.column("_unchanged").null_count < rows.num_rows:
                whole = rows.slice(0, 0)
            whole = whole.filter(has_row(whole))
        for column in self.target.columns.values():
            there = column.name in rows.schema.names
            if column.required and (whole.column(column.name).null_count if there else whole.num_rows):
                raise SchemaError(
                    f"the column {column.name!r} of {topic} holds nulls, and the table forbids them",
                    code="PEN-4001",
                    hint=f"ALTER TABLE {self.target.name.sql} ALTER COLUMN {quoted(column.name)} DROP NOT NULL",
                )
            if there and column.length is not None and column.name not in altered:
                longest = columns.longest(rows.column(column.name))
                if longest > column.length:
                    raise SchemaError(
                        f"the column {column.name!r} of {topic} is {column.type} in the table, "
                        f"and a text has {longest} characters",
                        code="PEN-4001",
                        hint=f"ALTER TABLE {self.target.name.sql} ALTER COLUMN {quoted(column.name)} TYPE text",
                    )


def has_row(changes: pa.RecordBatch) -> pa.Array:
    """Which changes bring a row: not deletes and truncates."""
    return pc.invert(pc.is_in(changes.column("_op"), value_set=pa.array(_ROWLESS)))


@dataclass
class Open:
    """A staging table that still takes rows."""

    table: str
    schema: pa.Schema
    old_key: bool
    rows: int = 0
    deletes: bool = False
    truncates: bool = False
    unchanged: set[str] = field(default_factory=set)
    held: list[list[pa.Array]] = field(default_factory=list)

    def note(self, rows: pa.RecordBatch) -> None:
        """Record what the changes ask for, so that the driver need not look."""
        if not is_changelog(rows.schema):
            return
        ops = set(pc.unique(rows.column("_op")).to_pylist())
        self.deletes |= Op.DELETE.value in ops
        self.truncates |= Op.TRUNCATE.value in ops
        if "_unchanged" in rows.schema.names:
            self.unchanged |= set(pc.unique(rows.column("_unchanged").flatten()).to_pylist())

    def receipt(self) -> StagedPart:
        return StagedPart(
            table=self.table,
            rows=self.rows,
            columns=pack_schema(self.schema),
            deletes=self.deletes,
            truncates=self.truncates,
            unchanged=sorted(self.unchanged),
            old_key=self.old_key,
        )


class Stage:
    """What one task stages of one epoch, in one transaction."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str, stem: str) -> None:
        self.targets: dict[Topic, Known] = {}
        self.keys: dict[Topic, list[str]] = {}
        self.parts: dict[Topic, list[Open]] = {}
        self.connection = connection
        self._schema = schema
        self._stem = stem
        self._open: dict[tuple[Any, ...], Open] = {}
        self._held_bytes = 0
        self._rows = 0
        connection.execute("BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0")

    def write(self, topic: Topic, rows: pa.RecordBatch, key: Sequence[str]) -> None:
        """Take rows; with a key, as changes: they get numbers, and their old keys become columns."""
        old: list[pa.Array] = []
        if key and is_changelog(rows.schema):
            rows, old = _with_old_keys(rows, key)
        part = self._part(topic, rows.schema, key, bool(old))
        values = [*rows.columns, *old]
        if key:
            values.append(pa.array(np.arange(self._rows, self._rows + rows.num_rows)))
            part.note(rows)
        self._rows += rows.num_rows
        part.rows += rows.num_rows
        part.held.append(values)
        self._held_bytes += sum(each.nbytes for each in values)
        if self._held_bytes >= BUFFER_BYTES:
            self.flush()

    def _part(self, topic: Topic, schema: pa.Schema, key: Sequence[str], old_key: bool) -> Open:
        signature = (topic, exact(schema), old_key)
        if signature not in self._open:
            part = Open(f"{self._stem}-{len(self._open):03d}", schema, old_key)
            kinds = [f"c{place} {columns.staged_type(each.type)}" for place, each in enumerate(schema)]
            if old_key:
                kinds += [f"o{n} {columns.staged_type(schema.field(name).type)}" for n, name in enumerate(key)]
            kinds += ["r int8"] if key else []
            with failures.errors(failures.NO_ANSWER):
                self.connection.execute(
                    f"CREATE TABLE {self._sql(part)} ({', '.join(kinds)}) WITH (autovacuum_enabled = false)"
                )
            self._open[signature] = part
            self.parts.setdefault(topic, []).append(part)
        return self._open[signature]

    def _sql(self, part: Open) -> str:
        return f"{quoted(self._schema)}.{quoted(part.table)}"

    def flush(self) -> None:
        """Copy the rows that were collected."""
        for (topic, *_), part in self._open.items():
            if not part.held:
                continue
            with failures.errors(failures.NO_ANSWER), refusals(topic):
                copy_rows(self.connection, self._sql(part), part.held, topic)
            part.held = []
        self._held_bytes = 0

    def commit(self) -> None:
        """Everything staged, and on the server's disk."""
        with failures.errors(failures.NO_ANSWER):
            self.connection.execute("COMMIT")


def copy_rows(
    connection: psycopg.Connection[Any], table: str, held: Sequence[Sequence[pa.Array]], topic: Topic
) -> None:
    """Copy rows, given as columns, into a table."""
    with connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN (FORMAT binary)") as copy:
        copy.write(columns.HEADER)
        for values in held:
            for first in range(0, len(values[0]), PIECE_ROWS):
                copy.write(columns.copied([each.slice(first, PIECE_ROWS) for each in values], topic))
        copy.write(columns.TRAILER)


def _with_old_keys(rows: pa.RecordBatch, key: Sequence[str]) -> tuple[pa.RecordBatch, list[pa.Array]]:
    """The rows without `_old_key`, and the columns in it; also without `_unchanged` if it is null in every row."""
    old: list[pa.Array] = []
    if "_old_key" in rows.schema.names:
        texts = rows.column("_old_key")
        if texts.null_count < len(texts):
            fields = pa.schema([rows.schema.field(name) for name in key])
            there = texts.is_valid()
            found = unpack_keys(texts.drop_null(), fields)
            place = pc.if_else(there, pc.subtract(pc.cumulative_sum(there.cast(pa.int64())), 1), None)
            old = [found.column(name).combine_chunks().take(place) for name in key]
        rows = rows.drop_columns(["_old_key"])
    if "_unchanged" in rows.schema.names and rows.column("_unchanged").null_count == rows.num_rows:
        rows = rows.drop_columns(["_unchanged"])
    return rows, old
