"""Worn files of tables with deletion vectors are written again a part at a time, while epochs and others go on."""

from __future__ import annotations

import json

import numpy as np
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lake_readers import table_of
from sink_protocol import END, ORDERS, epoch, stage

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.delta import Delta, DeltaConfig, marking, purge, upkeep
from penstock.connectors.delta import apply as applying
from penstock.connectors.delta.files import Log, TableFile
from penstock.connectors.lake import index
from penstock.schema import with_key

PLAIN = pa.schema([("id", pa.int64()), ("name", pa.string())])


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(marking, "MARKED_ROWS", 0)
    monkeypatch.setattr(index, "STORED_ROWS", 5)
    monkeypatch.setattr(applying, "PURGE_HERE_ROWS", 0)
    monkeypatch.setattr(applying, "LATE", 100)
    for name, value in (("PART_ROWS", 20), ("FEWEST_PARTS", 1), ("_PIECE_ROWS", 10), ("_BUFFER_BYTES", 1)):
        monkeypatch.setattr(purge, name, value)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out/lake/orders"


@pytest.fixture
def make(tmp_path):
    def make(**options):
        given = {"path": str(tmp_path / "out/{topic}"), "mode": "upsert", "key": ["id"], "apply": "vectors"}
        sink = Delta(DeltaConfig(**{**given, "purge_percent": 20, "optimize_every_epochs": 0, **options}))
        sink.open()
        return sink

    return make


def upserts(rows, deletes=()):
    events = [{"_op": "u", "id": id, "name": name} for id, name in dict(rows).items()]
    events += [{"_op": "d", "id": id} for id in deletes]
    found = [{"_position": f"{place:06d}", **event} for place, event in enumerate(events)]
    return pa.RecordBatch.from_pylist(found, schema=with_key(pa.schema([*PLAIN, *CHANGE_FIELDS]), ["id"]))


def commit(sink, number, *batches):
    e = epoch(number)
    receipts = [stage(sink, e, *batches)]
    assert not sink.plan_apply(e, ORDERS, receipts)
    sink.commit_epoch(e, receipts, END)
    sink.sweep(e, receipts)


def fill(sink, dead=range(0, 50, 2)):
    """A file of 100 rows, a quarter of which are deleted; the first part of it is written again by then."""
    state = {id: f"row {id}" for id in range(100)}
    commit(sink, 1, upserts(state))
    commit(sink, 2, upserts({}, deletes=dead))
    return {id: name for id, name in state.items() if id not in dead}


def read(target):
    rows = table_of(target).to_pylist()
    found = {row["id"]: row["name"] for row in rows}
    assert len(rows) == len(found)
    frame = polars.scan_delta(str(target)).collect()
    assert dict(zip(frame["id"].to_list(), frame["name"].to_list(), strict=True)) == found
    return found


def entries(target):
    found = []
    for version in range(DeltaTable(str(target)).version() + 1):
        lines = (target / "_delta_log" / f"{version:020d}.json").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
    return found


def purged(target):
    return [entry for entry in entries(target) if "purged" in entry[0]["commitInfo"].get("penstock", {})]


def begun(target):
    """Data files that no version names."""
    known = {action["add"]["path"] for entry in entries(target) for action in entry if "add" in action}
    return {path.name for path in target.glob("*.parquet")} - known


def test_a_worn_file_was_written_again_at_once_and_the_epoch_waited_for_all_of_it(make, target, monkeypatch):
    sink = make()
    taken = []
    real = purge.Purge.advance
    monkeypatch.setattr(purge.Purge, "advance", lambda self, rows: taken.append(real(self, rows)) or taken[-1])
    state = fill(sink)
    (old,) = {file.path for file in Log(sink.target(ORDERS).load()).files()}
    for number in range(3, 8):  # each deletes a row that is written again already, and one that is not
        assert not purged(target)
        assert begun(target)
        commit(sink, number, upserts({1 + 2 * number: "new"}, deletes=[100 - number]))
        state.update({1 + 2 * number: "new"})
        del state[100 - number]
        assert read(target) == state
    assert [rows for rows, _ in taken] == [20, 20, 20, 20, 20, 0]
    assert not begun(target)
    (entry,) = purged(target)
    (removed,) = [each["remove"] for each in entry if "remove" in each]
    (added,) = [each["add"] for each in entry if "add" in each]
    assert removed["path"] == old
    assert removed["deletionVector"]["cardinality"] == 25 + 2 * 5
    stats = json.loads(added["stats"])
    assert (stats["numRecords"], stats["tightBounds"]) == (75, False)
    assert added["deletionVector"]["cardinality"] == 2 * 5
    commit(sink, 8, upserts({99: "last"}, deletes=[7]))
    state.update({99: "last"})
    del state[7]
    assert read(target) == state


IDS = st.integers(0, 60)
CHANGES = st.tuples(st.dictionaries(IDS, st.text("abc", max_size=3), max_size=12), st.sets(IDS, max_size=12))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(epochs=st.lists(CHANGES.filter(any), min_size=4, max_size=12), rows=st.integers(5, 40), joins=st.booleans())
def test_rows_change_while_their_files_are_written_again(tmp_path_factory, monkeypatch, epochs, rows, joins):
    monkeypatch.setattr(purge, "PART_ROWS", rows)
    monkeypatch.setattr(upkeep, "PART_ROWS", rows)
    monkeypatch.setattr(upkeep, "FAN", 2)
    path = tmp_path_factory.mktemp("purge")
    options = {"mode": "upsert", "key": ["id"], "apply": "vectors", "purge_percent": 10}
    sink = Delta(DeltaConfig(path=f"{path}/{{topic}}", optimize_every_epochs=2 if joins else 0, **options))
    sink.open()
    state = {id: f"row {id}" for id in range(60)}
    commit(sink, 1, upserts(state))
    for number, (written, deleted) in enumerate(epochs, 2):
        commit(sink, number, upserts(written, deleted - set(written)))
        state = {id: name for id, name in {**state, **written}.items() if id in written or id not in deleted}
        found = table_of(path / "lake/orders").to_pylist()
        assert len(found) == len(state)
        assert {row["id"]: row["name"] for row in found} == state


def test_partitions_and_columns_that_an_old_file_lacks_come_along(make, target):
    sink = make(partition_by=["name"])
    first = {id: "a b" if id % 2 else None for id in range(200)}
    commit(sink, 1, upserts(first))
    commit(sink, 2, upserts({}, deletes=range(80)))
    wider = pa.schema([*PLAIN, ("more", pa.int32()), *CHANGE_FIELDS])
    row = {"_op": "u", "_position": "0", "id": 199, "name": "a b", "more": 7}
    commit(sink, 3, pa.RecordBatch.from_pylist([row], schema=with_key(wider, ["id"])))
    for number in range(4, 20):
        commit(sink, number, upserts({}, deletes=[76 + number]))
    assert len(purged(target)) == 2
    found = table_of(target).sort_by("id").to_pylist()
    assert [row["id"] for row in found] == range_without(80, 200, 80, 96)
    assert {row["id"]: row["name"] for row in found} == {row["id"]: first[row["id"]] for row in found}
    assert [row["more"] for row in found] == [None] * (len(found) - 1) + [7]
    sink.close()
    assert not begun(target)


def range_without(first, end, *gap):
    return [id for id in range(first, end) if id not in range(*gap)]


def _compact(target):
    DeltaTable(str(target)).optimize.compact()


def _vacuum(target):
    _compact(target)
    DeltaTable(str(target)).vacuum(0, dry_run=False, enforce_retention_duration=False)


def _append(target):
    write_deltalake(str(target), pa.table({"id": [1000], "name": ["theirs"]}), mode="append")


def _delete(target):
    DeltaTable(str(target)).delete("id = 60")


OTHERS = {
    _compact: lambda state: state,
    _vacuum: lambda state: state,
    _append: lambda state: {**state, 1000: "theirs"},
    _delete: lambda state: {id: name for id, name in state.items() if id != 60},
}


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__[1:])
def test_what_others_do_to_the_file_meanwhile_is_kept(make, target, other):
    sink = make()
    state = fill(sink)
    commit(sink, 3, upserts({97: "three"}))
    other(target)
    state = OTHERS[other]({**state, 97: "three"})
    for number in range(4, 12):
        commit(sink, number, upserts({90: str(number)}))
        state[90] = str(number)
        assert read(target) == state
    assert bool(purged(target)) == (other is _append)
    sink.close()
    assert not begun(target)


@pytest.mark.parametrize("other", [_compact, _delete], ids=lambda other: other.__name__[1:])
def test_what_others_began_before_is_refused(make, target, other, monkeypatch):
    sink = make()
    state = fill(sink)
    real, raced = purge.replace_worn, []

    def beside(*given):
        theirs = DeltaTable(str(target))
        real(*given)
        with pytest.raises(Exception, match=r"(?i)commit|conflict"):
            theirs.optimize.compact() if other is _compact else theirs.delete("id = 60")
        raced.append(other)

    monkeypatch.setattr(purge, "replace_worn", beside)
    for number in range(3, 9):
        commit(sink, number, upserts({90: str(number)}))
        state[90] = str(number)
    assert raced == [other]
    assert read(target) == state


def test_one_that_loses_the_race_is_begun_anew_and_fails_no_epoch(make, target, monkeypatch, caplog):
    monkeypatch.setattr(purge, "TRIES", 1)
    sink = make()
    state = fill(sink)
    real = purge.replace_worn

    def late(*given):
        _append(target)
        real(*given)

    monkeypatch.setattr(purge, "replace_worn", late)
    for number in range(3, 9):
        commit(sink, number, upserts({90: str(number)}))
    assert "postponed" in caplog.text
    assert not purged(target)
    assert len(begun(target)) == 1
    monkeypatch.setattr(purge, "replace_worn", real)
    for number in range(9, 16):
        commit(sink, number, upserts({90: str(number)}))
    assert len(purged(target)) == 1
    assert read(target) == {**state, 90: "15", 1000: "theirs"}


def test_other_writers_that_are_as_fast_as_we_do_not_cost_all_of_the_work(make, target, monkeypatch):
    sink = make()
    state = fill(sink)
    real, lost = purge.replace_worn, []

    def late(*given):
        if len(lost) < 2:
            lost.append(1000 + len(lost))
            write_deltalake(str(target), pa.table({"id": lost[-1:], "name": ["theirs"]}), mode="append")
        real(*given)

    monkeypatch.setattr(purge, "replace_worn", late)
    for number in range(3, 9):
        commit(sink, number, upserts({90: str(number)}))
    assert lost == [1000, 1001]
    assert len(purged(target)) == 1
    assert read(target) == {**state, 90: "8", 1000: "theirs", 1001: "theirs"}
    sink.close()
    assert not begun(target)


def test_a_pipeline_that_ends_leaves_no_half_written_file(make, target):
    sink = make()
    fill(sink)
    assert begun(target)
    sink.close()
    assert not begun(target)
    assert not list((target.parents[1] / "_penstock/.begun").rglob("*-*"))


def test_what_a_killed_process_has_begun_goes_after_the_first_epoch_of_the_next(make, target):
    killed = make()
    state = fill(killed)
    (left,) = begun(target)
    sink = make()
    commit(sink, 3, upserts({97: "three"}))
    assert left not in begun(target)
    (right,) = begun(target)
    # The old process only seemed dead: it removes nothing of another one's, and sees that this has gone on.
    killed.target(ORDERS).upkeep._purges._stop(epoch(2))
    assert begun(target) == {right}
    killed.commit_epoch(epoch(2), [], END)
    killed.target(ORDERS).upkeep.run(epoch(2), killed.target(ORDERS).load())
    for number in range(4, 9):
        killed.target(ORDERS).upkeep.run(epoch(2), killed.target(ORDERS).load())
        commit(sink, number, upserts({90: str(number)}))
    assert len(purged(target)) == 1
    assert read(target) == {**state, 97: "three", 90: "8"}
    assert not begun(target)


def test_rows_that_somebody_brought_back_stay(make, target):
    sink = make()
    fill(sink)
    table = sink.target(ORDERS).load()
    (file,) = Log(table).files()
    half = sink.target(ORDERS).upkeep._purges._now
    assert isinstance(half, purge.Purge)
    assert half.advance(1000)[1]
    back = TableFile(**{**file.model_dump(), "vector": None})
    assert half.finish({file.path: back}) is None


def test_a_file_that_is_being_written_again_is_no_work_for_tasks(make, target, monkeypatch):
    sink = make()
    state = fill(sink)
    commit(sink, 3, upserts({}, deletes=range(51, 71)))  # 45 %: tasks would do it, were it not in hand
    monkeypatch.setattr(applying, "LATE", 2)
    e = epoch(4)
    receipts = [stage(sink, e, upserts({90: "four"}))]
    assert not sink.plan_apply(e, ORDERS, receipts)
    other = make()
    assert [each.purges for each in other.plan_apply(e, ORDERS, receipts)].count(True) == 1
    sink.commit_epoch(e, receipts, END)
    assert read(target) == {**{id: name for id, name in state.items() if id not in range(51, 71)}, 90: "four"}


def test_many_changes_bring_parts_sooner(make, target, monkeypatch):
    monkeypatch.setattr(purge, "FEWEST_PARTS", 1_000)
    sink = make(purge_percent=20)
    fill(sink)
    parts = []
    monkeypatch.setattr(purge.Purge, "advance", lambda self, rows: parts.append(rows) or (rows, False))
    for number in range(3, 6):  # one row worn out is worth five written again: four make a part of 20
        commit(sink, number, upserts({}, deletes=[2 * number + 45]))
    assert len(parts) <= 1
    for number in range(6, 9):
        commit(sink, number, upserts({}, deletes=range(4 * number + 36, 4 * number + 40)))
    assert len(parts) >= 3


def test_a_part_has_few_rows_if_they_are_wide():
    file = TableFile(logged="a", bytes=1_000 * purge.PART_BYTES, records=5_000)
    assert purge._part([file]) == 5
    assert purge._part([TableFile(logged="a", bytes=10, records=5_000)]) == purge.PART_ROWS


def test_rows_that_are_wide_are_not_held_in_memory_by_the_ten_thousand(make, target, monkeypatch):
    monkeypatch.setattr(purge, "PART_BYTES", 1_000)
    sizes = []
    real = TableFile.stream
    monkeypatch.setattr(TableFile, "stream", lambda self, *given: sizes.append(given[2]) or real(self, *given))
    fill(make())
    assert sizes[0] < 10


def test_positions_in_several_old_and_new_files():
    made = purge.Purge.__new__(purge.Purge)
    made.path = None
    vector = lambda rows: type("File", (), {"path": "x", "dead": lambda self, _: np.array(rows, np.int64)})()  # noqa: E731
    first = TableFile(logged="a", bytes=1, records=6)
    second = TableFile(logged="b", bytes=1, records=4)
    made.files, made._dead = [first, second], [np.array([1, 4]), np.array([0])]
    late = made._deleted_meanwhile({"a": vector([1, 2, 4]), "b": vector([0, 1, 3])})
    assert late.tolist() == [1, 4, 6]
