"""
Which changes of the log belong after a copy, and which ones the copy already contains.

An example. `orders` is copied up to the frontier key 6, in two chunks: keys up to 3 in the snapshot 700:700:, keys 4 to 6 in the
snapshot 710:712:711, which shows every transaction below 712 except 711. The log now brings

    change                          verdict     why
    704  update key 2               applied     key ≤ frontier, and snapshot 700 does not show 704
    705  update key 5               dropped     snapshot 710 shows 705: the chunk contains the new row
    711  update key 5               applied     snapshot 710 does not show 711, which was still running
    713  insert key 8               dropped     key past the frontier: a later chunk will bring the row
    714  key 8 becomes key 2        insert 2    the row enters the copied part: the target has never seen it
    715  key 3 becomes key 9        delete 3    the row leaves the copied part: a later chunk will bring it
    716  TRUNCATE                   applied     the copy begins again from the first key

Once the table is complete and the log has passed the snapshots of all of its chunks, every change is applied as it comes.

A *refresh* is a copy over the rows of the target, for a table whose changes were never interrupted (a new default, another
type). There every change is applied at all times: it leads from the old rows to the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes import Op
from penstock.changes.old_key import unpack_keys
from penstock.connectors.postgres_cdc.catalog import Table
from penstock.connectors.postgres_cdc.log.decode import Rows
from penstock.connectors.postgres_cdc.log.snapshots import Snapshot
from penstock.connectors.postgres_cdc.position import Copied
from penstock.connectors.postgres_cdc.table_errors import TableError
from penstock.connectors.postgres_cdc.tables import Captured, Copying, Following, Key
from penstock.connectors.postgresql.types import TypeCatalog, arrow_type, parse_text
from penstock.durable import Json
from penstock.errors import ConnectorError, DataError, SchemaError
from penstock.source import SourceBatch
from penstock.tables import Refused


@dataclass
class Rule:
    """Which changes of one table belong after its copy; the others are in the copy, or will be."""

    table: Table
    catalog: TypeCatalog
    progress: Captured
    copied: Sequence[Copied]
    reset: bool = False
    """Its copy begins again after this range."""
    again: bool = False
    """It is copied once more after this range, beginning with a clear."""
    copies: bool = True
    """It may be copied; not with `snapshot = "never"`."""

    @property
    def _frontier(self) -> Key | None:
        return self.progress.frontier if isinstance(self.progress, Copying) else None

    def rows(self, item: Rows) -> Iterator[pa.RecordBatch]:
        """The rows that are applied, in order."""
        batch = item.batch
        if self.again:
            return
        if self.table.insert_only:  # it may still be in the other publication as well
            batch = _only(batch, _numpy(pc.is_in(batch["_op"], value_set=pa.array([Op.INSERT, Op.TRUNCATE]))))
            if not batch.num_rows:
                return
        complete = isinstance(self.progress, Following)
        followed = self.progress.refresh or (complete and not self.copied)
        if followed and self.copies and self.progress.key and _has_other_key(item, self.table, self.progress.key):
            self.again = True  # under another key it is not known which rows of the target these are
            return
        if self.progress.refresh:
            yield from self._over(batch)
            return
        if self.reset or (not complete and self._frontier is None and not self.copied):
            return
        if complete and not self.copied:
            yield batch
        elif self.progress.shape and self.table.shape.differs_from(self.progress.shape):
            # The copy's keys are of another time and cannot be compared with these: begin again, with an empty target.
            yield self._restart(batch)
        elif _has_other_key(item, self.table, self.table.key):
            if not self._precedes_copy(batch):  # else the copy contains them; here the key went and came back after it
                yield self._restart(batch)
        elif not self.table.chunked:
            yield _only(batch, ~self._contained(self.copied, _txids(batch)))
        else:
            yield from self._by_key(batch)

    def _over(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """
        All changes: the target still holds the rows from before the copy, and the log leads from them to the end.

        One case does not work: a row that moved to another key without all of its values, after a copy that contains
        the move. The missing values would be taken from the old key, where there may be another row by now.
        """
        moved = _numpy(pc.and_(batch["_old_key"].is_valid(), batch["_unchanged"].is_valid()))
        found = np.flatnonzero(moved & self._contained(self.copied, _txids(batch)))
        self.again = len(found) > 0
        yield batch.slice(0, int(found[0])) if self.again else batch

    def _restart(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Begin the copy again: the row that empties the target, in place of a batch."""
        self.reset = True
        return _changed(batch.slice(0, 1), {"_op": Op.TRUNCATE}, keep=("_position", "_txid", "_committed_at"))

    def _precedes_copy(self, batch: pa.RecordBatch) -> bool:
        """True if every part of the copy shows the changes; parts that the log has passed are forgotten, the first one first."""
        first = [each for each in self.copied if each.after is None]
        return bool(self._contained(first, _txids(batch)).all())

    def _by_key(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        truncated = np.flatnonzero(_numpy(pc.equal(batch["_op"], str(Op.TRUNCATE))))
        end = int(truncated[0]) if len(truncated) else batch.num_rows
        yield from self._keyed(batch.slice(0, end))
        if end < batch.num_rows and not self.reset:
            self.reset = True  # the copied rows are gone, and later changes are in the next copy
            yield batch.slice(end, 1)

    def _keyed(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        columns = self.table.key_columns
        names = [column.name for column in columns]
        kinds = {c.name: arrow_type(c.type_oid, c.typmod, self.catalog) for c in columns}
        if any(name not in batch.schema.names or batch.schema.field(name).type != kinds[name] for name in names):
            return  # from before the key was renamed or retyped; the copy is from after that, and contains them
        live = self._live([batch[name] for name in names], _txids(batch))
        moved = np.flatnonzero(_numpy(batch["_old_key"].is_valid()))
        done = 0
        for index in map(int, moved):
            yield _only(batch.slice(done, index - done), live[done:index])
            done = index + 1
            row = batch.slice(index, 1)
            yield from self._moved(row, bool(live[index]))
            if self.reset:
                return
        yield _only(batch.slice(done), live[done:])

    def _moved(self, row: pa.RecordBatch, new_lives: bool) -> Iterator[pa.RecordBatch]:
        """A row whose key changed: it may leave the copied part, or enter it."""
        columns = self.table.key_columns
        kinds = pa.schema([(c.name, arrow_type(c.type_oid, c.typmod, self.catalog)) for c in columns])
        keys = [column.combine_chunks() for column in unpack_keys(row["_old_key"], kinds).columns]
        old_lives = bool(self._live(keys, _txids(row))[0])
        if old_lives and new_lives:
            yield row
        elif old_lives:
            values = {column.name: key for column, key in zip(columns, keys, strict=True)}
            yield _changed(row, {"_op": Op.DELETE}, keep=("_position", "_txid", "_committed_at"), values=values)
        elif new_lives and row["_unchanged"][0].as_py():
            # It enters without all of its values, and the target has never had them: copy the table again.
            self.reset = True
            yield _changed(row, {"_op": Op.TRUNCATE}, keep=("_position", "_txid", "_committed_at"))
        elif new_lives:
            names = tuple(name for name in row.schema.names if name not in ("_op", "_old_key"))
            yield _changed(row, {"_op": Op.INSERT}, keep=names)

    def _live(self, keys: Sequence[pa.Array], txids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        live = np.ones(len(txids), dtype=bool)
        if not isinstance(self.progress, Following):
            live &= self._at_most(keys, self._frontier) if self._frontier else False
        for chunk in self.copied:
            inside = Snapshot.parse(chunk.snapshot).sees(txids)
            if chunk.upto is not None:
                inside &= self._at_most(keys, chunk.upto)
            if chunk.after is not None:
                inside &= ~self._at_most(keys, chunk.after)
            live &= ~inside
        return live

    def _contained(self, copied: Sequence[Copied], txids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        contained = np.zeros(len(txids), dtype=bool)
        for each in copied:
            contained |= Snapshot.parse(each.snapshot).sees(txids)
        return contained

    def _at_most(self, keys: Sequence[pa.Array], edge: Key) -> npt.NDArray[np.bool_]:
        """Which keys are not past the edge, compared column by column."""
        result = np.ones(len(keys[0]), dtype=bool)
        for values, text, column in reversed(list(zip(keys, edge, self.table.key_columns, strict=True))):
            bound = _plain(parse_text(pa.array([text]), column.type_oid, column.typmod, self.catalog))[0]
            less, same = _numpy(pc.less(_plain(values), bound)), _numpy(pc.equal(_plain(values), bound))
            result = less | (same & result)
        return result


@dataclass
class Rules:
    """The rules of all tables in one WAL range."""

    by_stream: Mapping[str, Rule] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    """Tables that were followed and cannot be any more; if the range has changes of them, these are missed."""
    bad: dict[str, Refused] = field(default_factory=dict)
    """The tables that failed in this range, and why; the rest of their changes is dropped."""

    def wants(self, stream: str) -> bool:
        if stream in self.missing:
            self.set_aside(stream, TableError(f"{stream} was dropped, or has lost its replica identity"))
        return stream in self.by_stream and stream not in self.bad

    def set_aside(self, stream: str, error: ConnectorError) -> None:
        self.bad.setdefault(stream, Refused.because(stream, error))

    def rows(self, item: Rows) -> Iterator[SourceBatch]:
        stream = item.relation.stream
        if not self.wants(stream) or item.relation.namespace != self.by_stream[stream].table.namespace:
            return
        try:
            for batch in self.by_stream[stream].rows(item):
                if batch.num_rows:
                    yield SourceBatch(batch, stream=stream)
        except (DataError, SchemaError) as error:
            self.set_aside(stream, error)

    def note(self) -> Json:
        """Which copies begin again, and which tables are copied once more, for the note of the range."""
        good = [(stream, rule) for stream, rule in sorted(self.by_stream.items()) if stream not in self.bad]
        found = {"reset": [s for s, rule in good if rule.reset], "again": [s for s, rule in good if rule.again]}
        return {what: streams for what, streams in found.items() if streams}


def _has_other_key(item: Rows, table: Table, key: Sequence[str]) -> bool:
    """True if changes tell rows apart by other columns than these: the table had another key then."""
    return set(item.relation.key(table.primary_key)) != set(key)


def _txids(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    return batch["_txid"].to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def _only(batch: pa.RecordBatch, mask: npt.NDArray[np.bool_]) -> pa.RecordBatch:
    return batch if mask.all() else batch.filter(pa.array(mask))


def _numpy(mask: pa.Array) -> npt.NDArray[np.bool_]:
    return pc.fill_null(mask, False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _plain(values: pa.Array) -> pa.Array:
    return values.storage if isinstance(values.type, pa.BaseExtensionType) else values


def _changed(
    row: pa.RecordBatch, new: Mapping[str, str], keep: Sequence[str], values: Mapping[str, pa.Array] | None = None
) -> pa.RecordBatch:
    """One row with some columns kept, some replaced, and null in the others."""
    columns = []
    for each, column in zip(row.schema, row.columns, strict=True):
        if values and each.name in values:
            columns.append(values[each.name])
        elif each.name in new:
            columns.append(pa.array([str(new[each.name])], each.type))
        else:
            columns.append(column if each.name in keep else pa.nulls(1, each.type))
    return pa.RecordBatch.from_arrays(columns, schema=row.schema)
