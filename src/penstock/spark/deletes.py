"""Deletes for changes that a route's SQL filtered out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.collapse import has_op
from penstock.changes.columns import Op, nullable
from penstock.changes.keys import Keys
from penstock.changes.old_key import unpack_keys
from penstock.errors import SchemaError


@dataclass
class FilteredChanges:
    """
    Turns changes that a route's SQL filtered out into deletes, for sinks that upsert.

    A change that the query drops has left its result, and so must its row: it becomes a delete. A task reads and writes
    in two processes, which share a file: every change is noted there before the query sees it.
    """

    key: Sequence[str]
    sinks: tuple[str, ...]
    """The sinks that apply changes by key; a log simply does not hold what was filtered out."""
    computed_on: frozenset[str] = frozenset()
    """Columns whose value the query looks at, or hands on without `_unchanged`."""

    @property
    def _noted(self) -> list[str]:
        return [*self.key, "_op", "_position"]

    def columns(self, known: frozenset[str]) -> frozenset[str]:
        """The columns that must be read for it, in addition to those that the query uses."""
        return known.intersection([*self._noted, "_old_key", "_unchanged"])

    @contextlib.contextmanager
    def noting(self, path: Path) -> Iterator[Callable[[pa.RecordBatch], None]]:
        """Gives a function that notes a batch of changes; the file is complete when the context ends."""
        with contextlib.ExitStack() as stack:
            writers: list[tuple[pa.RecordBatchStreamWriter, pa.Schema]] = []

            def note(rows: pa.RecordBatch) -> None:
                self._refuse_unknown_values(rows)
                has_old = "_old_key" in rows.schema.names
                old = rows.column("_old_key") if has_old else pa.nulls(rows.num_rows, pa.string())
                noted = rows.select(self._noted).append_column("_old_key", old)
                if not writers:
                    file = stack.enter_context(open(path, "wb"))
                    schema = nullable(noted.schema)
                    writers.append((stack.enter_context(pa.ipc.new_stream(file, schema)), schema))
                writer, schema = writers[0]
                writer.write_batch(noted.cast(schema))

            yield note

    def came_out(self, rows: pa.RecordBatch) -> pa.Table:
        """The columns that identify a change in the query's result."""
        return pa.Table.from_batches([rows.select([*self.key, "_position"])])

    def gone(self, path: Path, came_out: Sequence[pa.Table], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Deletes, with the columns of the result: for changes that did not come out, and for keys that rows have left."""
        try:
            with open(path, "rb") as file:
                noted = pa.ipc.open_stream(file).read_all()
        except FileNotFoundError:
            return  # nothing was read
        path.unlink()
        cleared = has_op(noted.column("_op"), Op.TRUNCATE)
        yield from _as_deletes(noted.filter(pa.array(cleared)), Op.TRUNCATE, schema)
        noted = noted.filter(pa.array(~cleared))
        identity = noted.select([*self.key, "_position"])
        found = [table.cast(identity.schema) for table in (*came_out, identity.slice(0, 0))]
        left = (
            Keys(pa.concat_tables(found)).find(identity) < 0
        )  # a change that came out has the very spelling of its key
        yield from _as_deletes(noted.filter(pa.array(left)), Op.DELETE, schema)
        moved = noted if "_old_key" not in schema.names else noted.filter(pa.array(left))
        moved = moved.filter(moved.column("_old_key").is_valid())
        if moved.num_rows:
            old = unpack_keys(moved.column("_old_key"), pa.schema([noted.schema.field(name) for name in self.key]))
            yield from _as_deletes(old.append_column("_position", moved.column("_position")), Op.DELETE, schema)

    def _refuse_unknown_values(self, rows: pa.RecordBatch) -> None:
        """A value that was not sent, since it did not change, cannot be computed on."""
        if not self.computed_on or "_unchanged" not in rows.schema.names:
            return
        named = pc.unique(pc.list_flatten(rows.column("_unchanged")))
        used = self.computed_on.intersection(named.to_pylist())
        if used:
            raise SchemaError(
                f"an update did not include the unchanged value of {', '.join(sorted(used))}, which the route's SQL reads",
                code="PEN-4003",
                hint="ALTER TABLE … REPLICA IDENTITY FULL at the source; or select the column as it is, and `_unchanged`",
            )


def _as_deletes(changes: pa.Table, op: Op, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The keys and positions of `changes` as changes of another kind; nothing is said of the other columns."""
    count = changes.num_rows
    ops = pa.chunked_array([pa.array([op.value], pa.string()).take(pa.array(np.zeros(count, np.int64)))])
    said = {
        "_op": ops,
        **{name: changes.column(name) for name in changes.column_names if name not in ("_op", "_old_key")},
    }
    arrays = [said[each.name].cast(each.type) if each.name in said else pa.nulls(count, each.type) for each in schema]
    yield from pa.Table.from_arrays(arrays, schema=nullable(schema)).to_batches()
