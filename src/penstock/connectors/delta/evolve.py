"""The columns of a topic's Delta table: how it is created, altered for new rows, or given other types when it is cleared."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from penstock import store
from penstock.connectors.delta.client import client_options
from penstock.connectors.delta.columns import MARK, delta_schema, follow_rows, refuse_partitions, stored_columns
from penstock.connectors.delta.doubles import holds_beyond, rewrite_as_doubles
from penstock.connectors.delta.table import Table
from penstock.connectors.lake.commit import Commit
from penstock.schema import SchemaChange
from penstock.schema.evolution import Policy, becomes_double, diff, follow, is_doubling, no_exact_double
from penstock.sink import Topic
from penstock.store import Place

if TYPE_CHECKING:
    from penstock.connectors.delta.sink import Delta


class Evolution:
    """What rows of a topic make of the columns of its table."""

    def __init__(self, sink: Delta, topic: Topic, path: Place) -> None:
        self._sink = sink
        self._config = sink.config
        self._topic = topic
        self._path = path

    @property
    def uri(self) -> str:
        """The table's address, as the client takes it."""
        return str(self._path)

    def joined(self, schemas: Sequence[pa.Schema]) -> pa.Schema:
        """The columns of a table that is created for such rows."""
        schema = stored_columns(self._config, schemas[0])
        for each in schemas:
            schema = follow_rows(self._topic, self._config, schema, stored_columns(self._config, each))
        return schema.append(MARK) if self._config.soft_delete else schema

    def create(self, schemas: Sequence[pa.Schema]) -> None:
        store.make_directory(self._path)
        DeltaTable.create(
            self.uri,
            self.joined(schemas),
            mode="ignore",
            partition_by=list(self._config.partition_by),
            configuration={"delta.enableDeletionVectors": "true"} if self._config.makes_vectors else None,
            storage_options=client_options(self._path),
        )
        store.sync([self._path / "_delta_log" / f"{0:020d}.json", self._path / "_delta_log"])

    def lacking(self, table: Table, schemas: Sequence[pa.Schema]) -> tuple[list[pa.Field], list[pa.Field]]:
        """The columns that the table lacks for such rows, and those that need a wider type."""
        refuse_partitions(self._topic, self._config, table.partition_by())
        columns = wider = delta_schema(self._topic, table.columns())
        # Tasks have discarded what the table lacked then: what it lacks only now is for a person to decide.
        policy = Policy.FREEZE if self._sink.policy(self._topic) is not Policy.EVOLVE else Policy.EVOLVE
        for each in schemas:
            wider = follow_rows(self._topic, self._config, wider, stored_columns(self._config, each), policy)
        if self._config.soft_delete:
            wider = follow(self._topic, wider, pa.schema([MARK]))
        known = [each for each in wider if each.name in columns.names]
        added = [each for each in wider if each.name not in columns.names]
        return added, [each for each in known if each.type != columns.field(each.name).type]

    def evolve(self, table: Table, schemas: Sequence[pa.Schema]) -> bool:
        """True if the table can hold such rows; False if it was altered, and its marker must be read again."""
        added, retyped = self.lacking(table, schemas)
        if added:
            table.add_columns(pa.schema(added))
        elif doubles := self._doubles(table, retyped):
            rewrite_as_doubles(self._sink, self._topic, table, pa.schema(doubles))
        elif retyped:
            table.widen_columns(pa.schema(retyped))
        return not added and not retyped

    def _doubles(self, table: Table, retyped: Sequence[pa.Field]) -> list[pa.Field]:
        """Those that become doubles; refused if that would round a value."""
        columns = delta_schema(self._topic, table.columns())
        doubles = [each for each in retyped if becomes_double(columns.field(each.name).type, each.type)]
        for each in doubles:
            if holds_beyond(table, columns, each.name):
                raise no_exact_double(self._topic, each.name)
        return doubles

    def evolve_early(self, table: Table | None, changes: Sequence[SchemaChange]) -> None:
        """Add and widen columns before the rows come, so that tasks see them."""
        new = pa.schema([(change.column, change.new) for change in changes if change.new is not None])
        # If another writer is first, the commit of the rows evolves the table.
        with contextlib.suppress(CommitFailedError, FileExistsError):
            while table is not None and not self.evolve(table, [delta_schema(self._topic, new)]):
                pass

    def can_replace_types(self, table: Table | None, changes: Sequence[SchemaChange]) -> bool:
        """True if columns can get any other types in the commit that clears the table."""
        fixed = [change for change in changes if change.column in self._config.partition_by]
        plain = table is not None and all(each.nullable for each in table.columns())
        return self._config.upserts and not self._config.soft_delete and plain and not fixed

    def renewed(self, table: Table, commit: Commit) -> pa.Schema | None:
        """The new columns of a table that is cleared and then filled with types that its own cannot follow; else None."""
        if not any(part.renews for part in commit.parts):
            return None
        rows = [delta_schema(self._topic, stored_columns(self._config, each)) for each in commit.schemas()]
        old, new = delta_schema(self._topic, table.columns()), rows[0]
        for each in rows:
            new = follow_rows(self._topic, self._config, new, each)
        changes = diff(old, new)
        if self._sink.evaluate_evolution(changes) and not any(map(is_doubling, changes)):
            return None
        kept = [new.field(each.name) if each.name in new.names else each for each in old]
        return pa.schema([*kept, *(each for each in new if each.name not in old.names)])
