"""Whole numbers of a Delta table become doubles: its files are written again, in one version of the same rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from penstock.connectors.delta.columns import delta_schema
from penstock.connectors.delta.files import Log
from penstock.connectors.delta.rewrite import Rewrite, write
from penstock.connectors.delta.table import Table, recast, refuse_unsupported
from penstock.connectors.lake import lists
from penstock.connectors.lake.staging import Stage
from penstock.schema.evolution import EXACT
from penstock.sink import Epoch, Task, Topic

if TYPE_CHECKING:
    from penstock.connectors.delta.sink import Delta

_REWRITER = Task(99_998)
_TRY = Epoch("penstock-doubles", "", 0, "00000000")
"""Names the files, whichever epoch needs them: what a crash has left is found by the next try, and swept."""


def holds_beyond(table: Table, schema: pa.Schema, column: str) -> bool:
    """True if a live value of the column lies beyond what doubles can count to."""
    actions = pa.table(table.delta.get_add_actions(flatten=True))
    bounds = [
        actions.column(f"{edge}.{column}") for edge in ("min", "max") if f"{edge}.{column}" in actions.column_names
    ]
    files = Log(table).files()
    if len(bounds) == 2:
        low, high = bounds
        is_near = pc.and_(pc.greater_equal(low, -EXACT), pc.less_equal(high, EXACT))
        # No bounds: nobody wrote them, or the file has no value of the column at all.
        files = [file for file, near in zip(files, is_near.to_pylist(), strict=True) if not near]
    for file in files:
        for rows in file.read(table.path, schema, [column]):
            values = rows.column(column)
            if pc.any(pc.or_(pc.greater(values, EXACT), pc.less(values, -EXACT))).as_py():
                return True
    return False


def rewrite_as_doubles(sink: Delta, topic: Topic, table: Table, columns: pa.Schema) -> None:
    """Make the next version of the same rows with these columns as doubles, or raise what a lost race raises."""
    refuse_unsupported(table, rewrites=True)
    root, known = sink.targets.root, delta_schema(topic, table.columns())
    schema = pa.schema([columns.field(each.name) if each.name in columns.names else each for each in known])
    _sweep(sink, topic)
    files = Log(table).files()
    stage = Stage(_TRY, _REWRITER, sink.targets, sink.spec())
    try:
        for file in files:
            for rows in file.read(table.path, schema):
                write(stage, topic, rows)
        written = Rewrite(removes=[file.removed() for file in files]).take([stage])
    except BaseException:
        stage.abandon()
        _sweep(sink, topic)
        raise
    recast(table, columns, written.adds)
    lists.drop(root, _TRY.pipeline, written.listed)


def _sweep(sink: Delta, topic: Topic) -> None:
    """Remove what earlier tries have begun, but for what the table names: one may have died after its commit."""
    live = sink.target(topic).live_files(_TRY.pipeline)
    lists.sweep(sink.targets.root, _TRY, lambda _, place: place.name in live, only=topic)
