"""Laws of what rows mean: keys, changes, and schemas that evolve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from penstock.changes import CHANGE_FIELDS
from penstock.changes.old_key import pack_key
from penstock.errors import SchemaError
from penstock.schema import with_key
from penstock.schema.evolution import EvolutionConfig, Policy
from penstock.sink import (
    Epoch,
    Task,
)
from penstock.testing.crash.stage import as_rows
from penstock.testing.sinks.steps import (
    TOPIC,
    Sink,
    Visible,
    commit,
    epoch_of,
    ids_of,
    needs,
    opened_sink,
    read_target,
    rows,
    stage,
    visible_rows,
)

WIDER = [
    (pa.scalar(7, pa.int32()), pa.scalar(1 << 40, pa.int64())),
    (pa.scalar(0.5, pa.float32()), pa.scalar(0.1, pa.float64())),
    (pa.scalar(20_000, pa.date32()), pa.scalar(1_700_000_000_123_456, pa.timestamp("us"))),
]
"""A value of a type, and one that only a wider type holds."""


class ChangeLaws:
    """Rows and changes by key."""

    @needs("idempotent")
    def test_a_row_that_comes_twice_is_there_once(self, sink: Sink, visible: Visible) -> None:
        for number in (1, 2):
            epoch = epoch_of(number)
            commit(sink, epoch, [stage(sink, epoch, rows(0), rows(0))])
        assert visible_rows(visible) == rows(0).to_pylist()

    @needs("upsert")
    def test_the_newest_row_of_a_key_stays(self, sink: Sink, visible: Visible) -> None:
        commit(sink, epoch_of(1), [stage(sink, epoch_of(1), rows(0), rows(5, name="newer"))])
        commit(sink, epoch_of(2), [stage(sink, epoch_of(2), rows(8, name="newest"))])
        names = [row["name"] for row in visible_rows(visible)]
        assert names == [f"row {id}" for id in range(5)] + ["newer"] * 3 + ["newest"] * 10

    @needs("changelog")
    def test_changes_are_applied_by_upsert_sinks_and_kept_by_others(self, sink: Sink, visible: Visible) -> None:
        first, second = [("c", 1, "new"), ("c", 2, "new"), ("u", 1, "changed")], [("d", 2, None), ("c", 3, "new")]
        for number, changes in ((1, first), (2, second)):
            epoch = epoch_of(number)
            commit(sink, epoch, [stage(sink, epoch, _changes(changes, number))])
        found = as_rows(read_target(visible, TOPIC))
        if sink.capabilities.upsert:
            assert sorted((row["id"], row["name"]) for row in found) == [(1, "changed"), (3, "new")]
        else:
            shown = [(row["_op"], row["id"], row["name"]) for row in found]
            assert sorted(shown, key=str) == sorted([*first, *second], key=str), "a change got lost or was altered"

    @needs("upsert", "changelog")
    def test_changes_are_applied_in_the_order_of_their_positions(self, sink: Sink, visible: Visible) -> None:
        """Whatever task they come through; also a row that is deleted and comes back."""
        _apply(sink, 1, [("c", 1, "old"), ("c", 2, "old"), ("c", 3, "old")])
        late, early = (
            _changes([("u", 1, "last"), ("c", 2, "back")], 2, first=5),
            _changes([("u", 1, "x"), ("d", 2, None)], 2),
        )
        epoch = epoch_of(2)
        commit(sink, epoch, [stage(sink, epoch, late, task=0), stage(sink, epoch, early, task=1)])
        assert _by_id(visible, "name") == {1: "last", 2: "back", 3: "old"}

    @needs("upsert", "changelog")
    def test_a_truncate_empties_the_target_of_what_came_before_it(self, sink: Sink, visible: Visible) -> None:
        _apply(sink, 1, [("c", 1, "old"), ("c", 2, "old")])
        _apply(sink, 2, [("c", 3, "void"), ("t", None, None), ("c", 2, "new")])
        assert _by_id(visible, "name") == {2: "new"}
        _apply(sink, 3, [("t", None, None)])
        assert _by_id(visible, "name") == {}

    @needs("upsert", "changelog")
    def test_a_column_that_is_unchanged_keeps_its_value(self, sink: Sink, visible: Visible) -> None:
        """The stored one, or that of an earlier change of the epoch; a row that is new has none."""
        _apply(sink, 1, [("c", 1, "old"), ("c", 2, "old"), ("c", 3, "old")])
        kept = {"_unchanged": ["name"]}
        _apply(
            sink, 2, [("u", 1, None, kept), ("u", 2, "new"), ("u", 2, None, kept), ("d", 3, None), ("c", 3, None, kept)]
        )
        _apply(sink, 3, [("u", 1, None, kept)])
        assert _by_id(visible, "name") == {1: "old", 2: "new", 3: None}

    @needs("upsert", "changelog")
    def test_a_row_whose_key_changes_moves_with_what_was_not_sent(self, sink: Sink, visible: Visible) -> None:
        """Two rows swap their keys over a third one; another moves twice, in two epochs."""

        def move(old: int, new: int) -> tuple[Any, ...]:
            return ("u", new, None, {"_unchanged": ["name"], "_old_key": pack_key({"id": old})})

        _apply(sink, 1, [("c", 1, "one"), ("c", 2, "two"), ("c", 7, "seven")])
        _apply(sink, 2, [move(1, 3), move(2, 1), move(3, 2), move(7, 8)])
        _apply(sink, 3, [move(8, 9), ("c", 8, "eight")])
        assert _by_id(visible, "name") == {1: "two", 2: "one", 8: "eight", 9: "seven"}

    @needs("upsert", "changelog")
    def test_a_column_that_a_change_does_not_know_keeps_its_value(self, sink: Sink, visible: Visible) -> None:
        def with_note(batch: pa.RecordBatch, notes: Sequence[str | None]) -> pa.RecordBatch:
            return batch.append_column("note", pa.array(notes, pa.string()))

        epoch = epoch_of(1)
        commit(sink, epoch, [stage(sink, epoch, with_note(_changes([("c", 1, "a"), ("c", 2, "b")], 1), ["x", "y"]))])
        _apply(sink, 2, [("u", 1, "c"), ("c", 3, "d")])
        epoch = epoch_of(3)
        older, newer = _changes([("u", 2, "e")], 3), with_note(_changes([("c", 4, "f")], 3, first=1), ["z"])
        commit(sink, epoch, [stage(sink, epoch, older, newer)])
        assert _by_id(visible, "note") == {1: "x", 2: "y", 3: None, 4: "z"}


class EvolutionLaws:
    """Columns and types that change, by policy, and rows laid out by a column."""

    @needs("schema_evolution")
    def test_a_column_that_is_added_is_null_in_older_rows(self, sink: Sink, visible: Visible) -> None:
        wider = rows(10).append_column("note", pa.array(["x"] * 10))
        for number, batch in ((1, rows(0)), (2, wider), (3, rows(20))):
            commit(sink, epoch_of(number), [stage(sink, epoch_of(number), batch)])
        notes = [row["note"] for row in visible_rows(visible, columns=("id", "note"))]
        assert notes == [None] * 10 + ["x"] * 10 + [None] * 10

    @needs("schema_evolution")
    def test_a_column_of_another_type_is_refused_by_its_name(self, sink: Sink, visible: Visible) -> None:
        commit(sink, epoch_of(1), [stage(sink, epoch_of(1), rows(0))])
        other = rows(10).set_column(1, "name", pa.array([[1]] * 10, pa.list_(pa.int64())))
        with pytest.raises(SchemaError, match="name"):
            commit(sink, epoch_of(2), [stage(sink, epoch_of(2), other)])
        assert ids_of(visible) == list(range(10))

    @needs("schema_evolution")
    @pytest.mark.parametrize(("narrow", "wide"), WIDER, ids=lambda each: str(each.type))
    def test_a_type_that_becomes_wider_is_followed_or_refused_by_its_name(
        self, sink: Sink, visible: Visible, narrow: pa.Scalar, wide: pa.Scalar
    ) -> None:
        refused: SchemaError | None = None
        for number, value in enumerate((narrow, wide, narrow), 1):
            batch = rows(10 * number).append_column("value", pa.repeat(value, 10))
            try:
                commit(sink, epoch_of(number), [stage(sink, epoch_of(number), batch)])
            except SchemaError as error:
                refused = error
        values = [narrow, narrow] if refused else [narrow.cast(wide.type), wide, narrow.cast(wide.type)]
        shown = [row["value"] for row in visible_rows(visible, columns=("id", "value"))]
        assert shown == [each.as_py() for each in values for _ in range(10)]
        assert refused is None or "value" in str(refused)

    @needs("schema_evolution")
    def test_freeze_refuses_a_new_column_and_names_itself(self, sink: Sink, visible: Visible) -> None:
        sink = _with_policy(sink, Policy.FREEZE)
        commit(sink, epoch_of(1), [stage(sink, epoch_of(1), rows(0))])
        with pytest.raises(SchemaError, match=r"(?s)note.*freeze"):
            commit(sink, epoch_of(2), [stage(sink, epoch_of(2), _noted(10))])
        assert ids_of(visible) == list(range(10))

    @needs("schema_evolution")
    def test_discard_row_leaves_out_what_has_no_place_and_counts_it(self, sink: Sink, visible: Visible) -> None:
        sink = _with_policy(sink, Policy.DISCARD_ROW)
        commit(sink, epoch_of(1), [stage(sink, epoch_of(1), rows(0))])
        assert _discarded(sink, epoch_of(2), _noted(10)) == (5, 5)
        commit(sink, epoch_of(2), [stage(sink, epoch_of(2), _noted(10))])
        assert ids_of(visible) == [*range(10), *range(11, 20, 2)]

    @needs("schema_evolution")
    def test_discard_value_keeps_the_row_without_it_and_counts_it(self, sink: Sink, visible: Visible) -> None:
        sink = _with_policy(sink, Policy.DISCARD_VALUE)
        commit(sink, epoch_of(1), [stage(sink, epoch_of(1), rows(0))])
        assert _discarded(sink, epoch_of(2), _noted(10)) == (10, 5)
        commit(sink, epoch_of(2), [stage(sink, epoch_of(2), _noted(10))])
        assert ids_of(visible) == list(range(20))
        assert all("note" not in row for row in as_rows(read_target(visible, TOPIC)))

    @needs("partitioned")
    def test_rows_laid_out_by_a_column_come_back_whole(self, partitioned_sink: Sink, visible: Visible) -> None:
        parts = ["plain", "a b/c=d%é", None, "..", "plain"] * 4
        batch = rows(0, 20).set_column(2, "part", pa.array(parts))
        epoch = epoch_of(1)
        commit(partitioned_sink, epoch, [stage(partitioned_sink, epoch, batch)])
        assert visible_rows(visible) == batch.to_pylist()


def _changes(changes: Sequence[tuple[Any, ...]], epoch: int, first: int = 0) -> pa.RecordBatch:
    """Changes as (op, id, name, more columns); `first` is the place of the first of them in the epoch."""
    schema = with_key(pa.schema([("id", pa.int64()), ("name", pa.string()), *CHANGE_FIELDS]), ["id"])
    found = [
        {"id": id, "name": name, "_op": op, "_position": f"{epoch:04d}/{place:04d}", **(more[0] if more else {})}
        for place, (op, id, name, *more) in enumerate(changes, first)
    ]
    return pa.RecordBatch.from_pylist(found, schema=schema)


def _apply(sink: Sink, number: int, changes: Sequence[tuple[Any, ...]]) -> None:
    epoch = epoch_of(number)
    commit(sink, epoch, [stage(sink, epoch, _changes(changes, number))])


def _by_id(visible: Visible, column: str) -> dict[int, Any]:
    """A column's values; a key that is there twice is a failure."""
    found = as_rows(read_target(visible, TOPIC))
    shown = {row["id"]: row.get(column) for row in found}
    assert len(shown) == len(found), f"a key is there twice: {sorted(row['id'] for row in found)}"
    return shown


def _with_policy(sink: Sink, policy: Policy) -> Sink:
    if not isinstance(sink.config, EvolutionConfig):
        pytest.skip("the sink has no option `schema_evolution`")
    return type(sink)(sink.config.model_copy(update={"schema_evolution": policy}))


def _noted(first: int) -> pa.RecordBatch:
    """Ten rows with a column more, and a value in it for every other row, the first among them."""
    return rows(first).append_column("note", pa.array(["x", None] * 5))


def _discarded(sink: Sink, epoch: Epoch, batch: pa.RecordBatch) -> tuple[int, int]:
    """How many rows a sink says it has taken, and how many lost something; in a try that goes no further."""
    with opened_sink(sink) as opened:
        opened.begin_epoch(epoch, Task(5))
        written = opened.write_batch(TOPIC, batch)
        return written.records_written, written.records_discarded
