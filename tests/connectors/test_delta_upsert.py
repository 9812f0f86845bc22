"""The Delta sink by key: which files are written anew, what stays, and what happens to a commit that loses."""

from __future__ import annotations

import datetime
import decimal
import io
import json
import os
import pickle
import random
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from lake_readers import table_of
from sink_protocol import END, ORDERS, SinkProtocol, commit_in_a_process, epoch, rows, stage

from penstock.changes import CHANGE_FIELDS
from penstock.changes.keys import EQUALITY
from penstock.changes.streamed import collapse_parts
from penstock.connectors.delta import Delta, DeltaConfig, marking
from penstock.connectors.delta import apply as applying
from penstock.connectors.delta import files as table_files
from penstock.connectors.delta import rewrite as rewriting
from penstock.connectors.delta.commit import DeltaTarget
from penstock.connectors.lake import changed, index
from penstock.errors import ConfigError, DataError, Fenced, PlanStale, RetryableError, SchemaError, StagingLost
from penstock.schema import ChangeKind, SchemaChange, with_key
from penstock.sink import Epoch, SinkContext, Task, TopicContext
from thorough import THOROUGH

PLAIN = pa.schema([("id", pa.int64()), ("name", pa.string()), ("doc", pa.string())])


@pytest.fixture(params=["rewrite", "vectors"])
def apply(request, monkeypatch):
    """How old rows go. With vectors, files of any size are marked, and parts of the index of a few rows are kept."""
    monkeypatch.setattr(marking, "MARKED_ROWS", 0)
    monkeypatch.setattr(index, "STORED_ROWS", 5)
    return request.param


REWRITE = pytest.mark.parametrize("apply", ["rewrite"], indirect=True)


@pytest.fixture
def make(tmp_path, apply):
    def make(**options):
        given = {"path": str(tmp_path / "out/{topic}"), "mode": "upsert", "key": ["id"]}
        given |= {"apply": apply} if options.get("mode", "upsert") == "upsert" else {}
        sink = Delta(DeltaConfig(**{**given, **options}))
        sink.open()
        return sink

    return make


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out/lake/orders"


@pytest.fixture
def sink(make):
    return make()


class TestDeltaUpsert(SinkProtocol):
    """The protocol of every sink that stages files; what is staged here are changes, without partitions."""

    test_every_file_of_a_receipt_and_every_directory_to_it_is_synced_before_the_receipt = None

    @pytest.fixture
    def visible(self, tmp_path):
        def read(topic):
            path = tmp_path / "out" / topic[1:]
            return table_of(path) if (path / "_delta_log").exists() else pa.table({"id": []})

        return read


def changes(*events, schema=PLAIN, key=("id",)):
    """Changes as dicts with `_op`; their positions are their places."""
    found = [{"_position": f"{place:06d}", **event} for place, event in enumerate(events)]
    return pa.RecordBatch.from_pylist(found, schema=with_key(pa.schema([*schema, *CHANGE_FIELDS]), key))


def insert(*ids, name="new"):
    return changes(*({"_op": "c", "id": id, "name": name, "doc": f"doc {id}"} for id in ids))


def theirs(id):
    return pa.table({"id": [id], "name": ["theirs"], "doc": ["theirs"]})


def commit(sink, number, *batches, **more) -> Epoch:
    e = epoch(number, **more)
    sink.commit_epoch(e, [stage(sink, e, *batches)], END)
    return e


def read(target) -> list[dict]:
    return sorted(table_of(target).to_pylist(), key=lambda row: str(row["id"]))


def names(target):
    return {row["id"]: row["name"] for row in read(target)}


def live(target):
    return {os.path.relpath(uri, target) for uri in DeltaTable(str(target)).file_uris()}


def data_files(target):
    return {str(path.relative_to(target)) for path in target.rglob("*.parquet") if "_delta_log" not in path.parts}


def removed(target):
    """What the log has removed: still there for readers of older versions."""
    lines = [line for entry in (target / "_delta_log").glob("*.json") for line in entry.read_text().splitlines()]
    return {json.loads(line)["remove"]["path"] for line in lines if line.startswith('{"remove"')}


@pytest.fixture
def opened(monkeypatch):
    """The names of the Parquet files of the table that were opened."""
    seen = []

    class Recording(pq.ParquetFile):
        def __init__(self, source, **options):
            if "_penstock" not in str(source):
                seen.append(os.path.basename(source))
            super().__init__(source, **options)

    monkeypatch.setattr(table_files.pq, "ParquetFile", Recording)
    return seen


@REWRITE
def test_only_files_that_hold_a_key_of_the_changes_are_written_anew(sink, target, opened):
    for number in range(5):
        commit(sink, number + 1, insert(*range(number * 10, number * 10 + 10)))
    before = live(target)
    assert opened == []
    commit(sink, 6, changes({"_op": "u", "id": 15, "name": "u"}, {"_op": "d", "id": 16}, {"_op": "c", "id": 99}))
    assert len(live(target) & before) == 4
    assert len(set(opened)) == 1
    assert len(names(target)) == 50
    assert names(target)[15] == "u"
    assert 16 not in names(target)


def test_a_file_that_could_hold_a_key_and_does_not_is_left_alone(sink, target, opened):
    commit(sink, 1, insert(1, 9))
    before = live(target)
    commit(sink, 2, insert(5))
    assert opened
    assert before < live(target)
    assert sorted(names(target)) == [1, 5, 9]


AT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
KEYS = {
    "int": (pa.int32(), lambda n: n),
    "text": (pa.string(), lambda n: f"{'long ' * 8}{n:04d}"),
    "uuid": (pa.string(), lambda n: f"{n * 7919 % 1000:08x}-0000-4000-8000-000000000000"),
    "zoned": (pa.timestamp("us", "UTC"), lambda n: AT + datetime.timedelta(microseconds=n)),
    "naive": (pa.timestamp("us"), lambda n: AT.replace(tzinfo=None) + datetime.timedelta(microseconds=n)),
    "date": (pa.date32(), lambda n: datetime.date(2026, 1, 1) + datetime.timedelta(days=n)),
    "decimal": (pa.decimal128(30, 3), lambda n: decimal.Decimal(n) / 8 + 10**20),
    "binary": (pa.binary(), lambda n: bytes([0, n % 256, 255])),
    "double": (pa.float64(), lambda n: n / 8),
}


@pytest.fixture
def in_pieces(monkeypatch):
    """Every epoch is planned and done in pieces, however small it is."""
    monkeypatch.setattr(Delta, "small_rows", 0)
    monkeypatch.setattr(applying, "PIECE_BYTES", 1)


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_every_type_are_found_again(make, target, kind, partitioned, request):
    """Alone, and in a key of two columns of which one may be the table's partition."""
    if partitioned:
        request.getfixturevalue("in_pieces")
    type_, value = KEYS[kind]
    schema = pa.schema([("id", type_), ("shop", pa.string()), ("name", pa.string())])
    sink = make(key=["id", "shop"], partition_by=["shop"] if partitioned else [])

    def events(op, numbers, name):
        found = ({"_op": op, "id": value(n), "shop": shop, "name": name} for n in numbers for shop in ("x y", "z"))
        return changes(*found, schema=schema, key=("id", "shop"))

    commit(sink, 1, events("c", range(20), "a"))
    commit(sink, 2, events("c", range(20, 40), "b"))
    commit(sink, 3, events("u", range(10, 30), "c"), events("d", [0, 39], None))
    shown = {(row["id"], row["shop"]): row["name"] for row in read(target)}
    assert len(read(target)) == len(shown) == 76
    for n in range(1, 39):
        expected = "c" if 10 <= n < 30 else "a" if n < 20 else "b"
        assert shown[value(n), "x y"] == shown[value(n), "z"] == expected


def test_a_row_whose_partition_changes_moves_there(make, target):
    sink = make(partition_by=["name"])
    commit(sink, 1, insert(1, 2, name="a b/ä%"), insert(3, name="other"))
    commit(sink, 2, changes({"_op": "u", "id": 1, "name": "other", "_unchanged": ["doc"]}, {"_op": "d", "id": 2}))
    assert [(row["id"], row["name"], row["doc"]) for row in read(target)] == [
        (1, "other", "doc 1"),
        (3, "other", "doc 3"),
    ]
    assert {path.split("/")[0] for path in live(target)} == {"name=other"}


@pytest.mark.parametrize("partition_by", [[], ["name"]])
def test_what_other_writers_have_written_is_found_and_kept(sink, make, target, partition_by):
    names_ = ["a b", "c/ü%25=", None, "plain"]
    foreign = pa.table({"id": pa.array(range(4)), "name": names_, "extra": pa.array([[1], None, [2, 3], []])})
    write_deltalake(str(target), foreign, partition_by=partition_by)
    sink = make(partition_by=partition_by)
    commit(sink, 1, *(changes({"_op": "u", "id": id, "name": name}) for id, name in enumerate(names_[:2])))
    commit(sink, 2, changes({"_op": "d", "id": 3}, {"_op": "u", "id": 2, "name": "was null", "doc": "x"}))
    found = [(row["id"], row["name"], row["extra"]) for row in read(target)]
    assert found == [(0, "a b", [1]), (1, "c/ü%25=", None), (2, "was null", [2, 3])]


NAN = float("nan")


@pytest.mark.parametrize("way", ["at_once", "in_pieces"])
@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()])
def test_the_two_zeros_are_one_key_and_so_are_all_nans(make, target, kind, way, request):
    if way == "in_pieces":
        request.getfixturevalue("in_pieces")
    schema = pa.schema([("id", kind), ("name", pa.string())])

    def events(*rows):
        return changes(*({"_op": op, "id": id, "name": name} for op, id, name in rows), schema=schema)

    sink = make()
    commit(sink, 1, events(("c", 0.0, "zero"), ("c", NAN, "nan"), ("c", 1.0, "one")))
    commit(sink, 2, events(("u", -0.0, "minus zero"), ("u", -NAN, "another nan")))
    assert sorted(row["name"] for row in read(target)) == ["another nan", "minus zero", "one"]
    commit(sink, 3, events(("u", -0.0, "a"), ("u", 0.0, "b"), ("d", NAN, None)))
    assert sorted(row["name"] for row in read(target)) == ["b", "one"]
    commit(sink, 4, events(("d", 0.0, None)))
    assert [row["name"] for row in read(target)] == ["one"]


@pytest.mark.parametrize("way", ["at_once", "in_pieces"])
def test_texts_that_are_the_same_key_are_found_whatever_the_statistics_say(make, target, way, request):
    if way == "in_pieces":
        request.getfixturevalue("in_pieces")
    number = pa.field("id", pa.string(), metadata={EQUALITY: b"number"})
    schema = pa.schema([number, ("name", pa.string())])
    sink = make()
    commit(
        sink, 1, changes({"_op": "c", "id": "2.0", "name": "a"}, {"_op": "c", "id": "3", "name": "b"}, schema=schema)
    )
    commit(sink, 2, changes({"_op": "u", "id": "2.00", "name": "c"}, {"_op": "d", "id": "3.000"}, schema=schema))
    assert [(row["id"], row["name"]) for row in read(target)] == [("2.00", "c")]
    assert not any(each.metadata for each in DeltaTable(str(target)).schema().fields)


def test_work_that_another_writer_overtook_is_planned_again(sink, target, in_pieces, monkeypatch):
    commit(sink, 1, insert(1, 2))
    e = epoch(2)
    receipts = [stage(sink, e, insert(2, 3, name="newer"))]
    stale = sink.plan_apply(e, ORDERS, receipts)
    applied = [sink.apply(e, each, Task(place)) for place, each in enumerate(stale)]
    write_deltalake(str(target), theirs(3), mode="append")
    with pytest.raises(PlanStale, match="PEN-2005"):
        sink.commit_applied(e, ORDERS, receipts, END, applied)
    assert names(target) == {1: "new", 2: "new", 3: "theirs"}
    sink.commit_epoch(e, receipts, END)
    assert names(target) == {1: "new", 2: "newer", 3: "newer"}
    assert sink.plan_apply(e, ORDERS, receipts) == []  # it is there
    sink.commit_applied(e, ORDERS, receipts, END, applied)
    assert names(target) == {1: "new", 2: "newer", 3: "newer"}
    sink.sweep(e, [])
    assert data_files(target) == live(target) | removed(target)


def test_a_table_that_somebody_else_creates_and_fills_makes_the_plan_stale(sink, target, in_pieces):
    e = epoch(1)
    receipts = [stage(sink, e, insert(1))]
    applied = [sink.apply(e, each, Task(0)) for each in sink.plan_apply(e, ORDERS, receipts)]
    assert applied
    write_deltalake(str(target), theirs(1))
    with pytest.raises(PlanStale):
        sink.commit_applied(e, ORDERS, receipts, END, applied)
    sink.commit_epoch(e, receipts, END)
    assert names(target) == {1: "new"}


def test_a_small_upsert_needs_no_work_and_a_large_one_does(sink, target, monkeypatch):
    commit(sink, 1, insert(*range(10)))
    write_deltalake(str(target), pa.concat_tables([theirs(id) for id in range(100, 110)]), mode="append")
    e = epoch(2)
    receipts = [stage(sink, e, insert(105))]
    for small_rows, pieces in ((21, 0), (11, 0), (10, 2)):  # one change; the statistics rule out the file of ten rows
        monkeypatch.setattr(Delta, "small_rows", small_rows)
        assert len(sink.plan_apply(e, ORDERS, receipts)) == pieces


def test_pieces_of_work_are_made_of_json(sink, target, in_pieces):
    commit(sink, 1, insert(1))
    e = epoch(2)
    for work in sink.plan_apply(e, ORDERS, receipts := [stage(sink, e, insert(1, 2, name="newer"))]):
        work = pickle.loads(pickle.dumps(work))
        applied = sink.apply(e, work, Task(0))
        assert Delta.applied_type.model_validate(json.loads(applied.model_dump_json())) == applied
    sink.sweep(e, receipts)


def test_truncates_and_soft_deletes_are_done_in_pieces_as_well(make, target, in_pieces):
    sink = make(soft_delete=True)
    commit(sink, 1, insert(1, 2))
    commit(sink, 2, insert(3, 4))
    commit(sink, 3, changes({"_op": "d", "id": 1}, {"_op": "u", "id": 3, "name": "u"}))
    assert {row["id"]: row["_deleted"] for row in read(target)} == {1: True, 2: False, 3: False, 4: False}
    commit(sink, 4, changes({"_op": "t"}, {"_op": "c", "id": 2, "name": "again"}))
    assert {row["id"]: row["_deleted"] for row in read(target)} == {1: True, 2: False, 3: True, 4: True}


def test_a_row_that_moves_to_the_key_of_one_marked_as_deleted_keeps_its_own_values(make, target):
    sink = make(soft_delete=True)
    commit(sink, 1, insert(1, 2, 3))
    commit(sink, 2, changes({"_op": "d", "id": 1}))
    commit(sink, 3, changes({"_op": "u", "id": 1, "name": "moved", "_old_key": '{"id":2}', "_unchanged": ["doc"]}))
    assert {row["id"]: row["doc"] for row in read(target) if not row["_deleted"]} == {1: "doc 2", 3: "doc 3"}


@pytest.mark.parametrize("way", ["at_once", "in_pieces"])
@pytest.mark.parametrize("held_rows", [0, 1 << 20])
def test_random_changes_leave_what_a_dict_of_them_holds(make, target, monkeypatch, held_rows, way, request):
    """With files and chunks so small that every way through the rewriting is taken."""
    if way == "in_pieces":
        request.getfixturevalue("in_pieces")
    monkeypatch.setattr("penstock.changes.streamed.HELD_ROWS", held_rows)
    monkeypatch.setattr("penstock.changes.streamed.BUCKET_ROWS", 7)
    monkeypatch.setattr(table_files, "RANKED_ROWS", 5)
    monkeypatch.setattr(table_files, "SMALL_FILE_ROWS", 8)
    monkeypatch.setattr(changed, "CHUNK_ROWS", 4)
    monkeypatch.setattr("penstock.connectors.lake.staging.ROW_GROUP_ROWS", 3)
    monkeypatch.setattr(rewriting, "ROW_GROUP_ROWS", 5)
    dice, model, sink, place = random.Random(7), {}, make(target_file_rows=25), 0
    for number in range(1, 40 if THOROUGH else 24):
        events = []
        for _ in range(dice.randrange(1, 30)):
            place += 1
            id, free = dice.randrange(60), dice.randrange(60, 70)
            said = {"_position": f"{place:09d}", "id": id, "name": f"n{place}", "doc": f"d{place}"}
            if id not in model:
                model[id] = [said["name"], said["doc"]]
                events.append({**said, "_op": "c"})
            elif dice.random() < 0.2:
                del model[id]
                events.append({**said, "_op": "d", "name": None, "doc": None})
            elif dice.random() < 0.2 and free not in model:
                model[free] = [said["name"], model.pop(id)[1]]
                moved = {"id": free, **_doc(number, model[free][1]), "_old_key": json.dumps({"id": id})}
                events.append({**said, "_op": "u", **moved})
            elif dice.random() < 0.01:
                model.clear()
                events.append({"_position": said["_position"], "_op": "t"})
            else:
                model[id][0] = said["name"]
                events.append({**said, "_op": "u", **_doc(number, model[id][1])})
        dice.shuffle(events)
        commit(sink, number, changes(*events))
        found = read(target)
        assert len(found) == len(model)
        assert {row["id"]: [row["name"], row["doc"]] for row in found} == model
    assert data_files(target) == live(target) | removed(target)


def _doc(number, doc):
    """In every other epoch it is not said."""
    return {"doc": None, "_unchanged": ["doc"]} if number % 2 else {"doc": doc}


@REWRITE
def test_small_epochs_do_not_leave_a_file_each(sink, target):
    for number in range(1, 15):
        commit(sink, number, insert(*range(number, number + 10), name=str(number)))
    assert len(live(target)) == 1


def test_changes_that_come_to_nothing_are_an_epoch_all_the_same(sink, make, target):
    commit(sink, 1, changes({"_op": "d", "id": 1}))
    commit(sink, 2, insert(1), changes({"_op": "d", "id": 1, "_position": "9"}))
    assert read(target) == []
    assert make().committed_epoch("shop", ORDERS).number == 2


def test_rows_that_are_no_changes_replace_those_of_their_key_in_their_order(sink, target):
    """Also when the columns change to and fro within a task, and so the files."""

    def batch(id, value, **more):
        return pa.record_batch({"id": [id], "n": [value], **more})

    commit(sink, 1, batch(1, 1), batch(2, 1))
    commit(sink, 2, batch(1, 2), batch(1, 3, note=["x"]), batch(1, 4), batch(2, 5, note=["y"]))
    assert read(target) == [{"id": 1, "n": 4, "note": "x"}, {"id": 2, "n": 5, "note": "y"}]
    commit(sink, 3, batch(2, 6, note=pa.nulls(1)))
    assert read(target)[1] == {"id": 2, "n": 6, "note": None}


def test_the_key_of_the_topic_counts_when_none_is_set(make, target):
    sink = make(key=[])
    commit(sink, 1, insert(1, 2))
    commit(sink, 2, insert(2, name="newer"))
    assert names(target) == {1: "new", 2: "newer"}


# -- commits that lose -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deed", ["append", "compact", "delete", "update"])
def test_another_writer_between_the_look_and_the_commit_makes_it_look_again(sink, target, monkeypatch, deed):
    commit(sink, 1, insert(*range(10)))
    commit(sink, 2, insert(*range(200, 210)))
    e = epoch(3)
    receipts = [stage(sink, e, changes({"_op": "u", "id": 5, "name": "ours", "_unchanged": ["doc"]}))]
    left = [1, 2]

    def interfere(name):
        if name == "commit.before" and left:
            left.pop()
            table = DeltaTable(str(target))
            if deed == "append":
                write_deltalake(table, theirs(1000 + len(left)), mode="append")
            elif deed == "compact":
                table.optimize.compact() if left else table.delete("id = 0")
            elif deed == "delete":
                table.delete(f"id = {len(left)}")
            else:
                table.update(predicate="id = 5", updates={"doc": "'theirs'"})

    monkeypatch.setattr("penstock.failpoints.hit", interfere)
    sink.commit_epoch(e, receipts, END)
    assert left == []
    ours = next(row for row in read(target) if row["id"] == 5)
    assert (ours["name"], ours["doc"]) == ("ours", "theirs" if deed == "update" else "doc 5")
    assert len(read(target)) == {"append": 22, "compact": 19, "delete": 18, "update": 20}[deed]
    own = {path for path in data_files(target) if os.path.basename(path).startswith("0000")}
    assert own <= live(target) | removed(target), "files of a commit that lost are left"


def test_a_table_that_is_written_all_the_time_is_a_passing_failure_and_leaves_what_a_sweep_finds(
    sink, target, monkeypatch
):
    commit(sink, 1, insert(1, 2))
    e = epoch(2)
    receipts = [stage(sink, e, insert(2, name="newer"))]

    def interfere(name):
        if name == "commit.before":
            write_deltalake(str(target), theirs(1000), mode="append")

    monkeypatch.setattr("penstock.failpoints.hit", interfere)
    with pytest.raises(RetryableError, match="PEN-2005"):
        sink.commit_epoch(e, receipts, END)
    monkeypatch.undo()
    sink.commit_epoch(e, receipts, END)
    assert names(target)[2] == "newer"
    assert data_files(target) == live(target) | removed(target)


def test_a_process_that_is_killed_at_the_point_of_commit_leaves_nothing_once_the_epoch_is_done(sink, target):
    commit(sink, 1, insert(*range(10)))
    e = epoch(2)
    receipts = [stage(sink, e, insert(5, name="newer"))]
    for _ in range(2):
        assert commit_in_a_process(sink, e, receipts, "commit.before=kill") == -signal.SIGKILL
    assert names(target)[5] == "new"
    assert len(data_files(target) - live(target)) == 3  # the staged changes and two rewritten files
    sink.commit_epoch(e, receipts, END)
    assert names(target)[5] == "newer"
    assert data_files(target) == live(target) | removed(target)


def test_a_process_that_is_killed_after_the_commit_leaves_nothing_either(sink, target):
    commit(sink, 1, insert(*range(10)))
    e = epoch(2)
    receipts = [stage(sink, e, insert(5, name="newer"))]
    hook = "table.Table.sync = lambda self, version: os.kill(os.getpid(), 9)"
    assert commit_in_a_process(sink, e, receipts, hook=hook) == -signal.SIGKILL
    sink.commit_epoch(e, receipts, END)
    sink.commit_epoch(e, receipts, END)
    sink.sweep(e, [])
    assert names(target)[5] == "newer"
    assert len(read(target)) == 10
    assert data_files(target) == live(target) | removed(target)


def test_a_rollback_removes_what_a_dead_commit_has_written(sink, target):
    commit(sink, 1, insert(*range(10)))
    e = epoch(2)
    receipts = [stage(sink, e, insert(5, name="newer"))]
    assert commit_in_a_process(sink, e, receipts, "commit.before=kill") == -signal.SIGKILL
    assert len(data_files(target) - live(target)) == 2
    sink.rollback_epoch(e, receipts)
    assert data_files(target) == live(target)


def test_a_zombie_that_is_fenced_leaves_nothing(sink, make, target, monkeypatch):
    commit(sink, 1, insert(*range(10)))
    late, receipts = epoch(2), []
    receipts = [stage(sink, late, insert(5, name="late"))]
    successor, done = make(), []

    def interfere(name):
        if name == "commit.before" and not done:
            done.append(name)
            for number in (2, 3):
                commit(successor, number, insert(5, name=f"epoch {number}"))

    monkeypatch.setattr("penstock.failpoints.hit", interfere)
    with pytest.raises(Fenced):
        sink.commit_epoch(late, receipts, END)
    sink.rollback_epoch(late, receipts)
    assert names(target)[5] == "epoch 3"
    assert data_files(target) == live(target) | removed(target)


def test_changes_that_a_twin_has_applied_and_dropped_are_done_and_not_lost(sink, make, target, monkeypatch):
    commit(sink, 1, insert(1, 2))
    e = epoch(2)
    receipts = [stage(sink, e, insert(2, name="newer"))]
    is_there, twin = DeltaTarget.lost, make()

    def look(self, *args):
        if self.sink is sink and not twin_ran:
            twin_ran.append(1)
            twin.commit_epoch(e, receipts, END)
        return is_there(self, *args)

    twin_ran: list[int] = []
    monkeypatch.setattr(DeltaTarget, "lost", look)
    sink.commit_epoch(e, receipts, END)
    assert twin_ran
    assert names(target) == {1: "new", 2: "newer"}


def test_staged_changes_that_are_gone_are_reported(sink, target):
    commit(sink, 1, insert(1))
    e = epoch(2)
    receipts = [stage(sink, e, insert(1, name="newer"))]
    (staged,) = (target / "_penstock/shop/changes").iterdir()
    staged.unlink()
    with pytest.raises(StagingLost):
        sink.commit_epoch(e, receipts, END)
    assert names(target) == {1: "new"}


def test_staged_changes_are_never_in_the_way_of_a_reader(sink, target):
    commit(sink, 1, insert(1))
    stage(sink, epoch(2), insert(2))
    assert DeltaTable(str(target)).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=True) == []
    assert names(target) == {1: "new"}


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (changes({"_op": "c"}), DataError, "key column 'id'"),
        (changes({"_op": "?", "id": 1}), DataError, "`_op`"),
        (changes({"_op": "u", "id": 1, "_old_key": "{}"}), DataError, "_old_key"),
        (pa.record_batch({"name": ["x"]}), SchemaError, "PEN-4002 /lake/orders has no key"),
    ],
)
def test_changes_that_could_not_be_applied_are_refused_before_they_are_staged(sink, batch, error, message):
    with pytest.raises(error, match=message):
        stage(sink, epoch(1), batch)


def test_a_topic_without_a_key_is_refused(make):
    with pytest.raises(SchemaError, match=r"PEN-4002 .*none is named"):
        stage(make(key=[]), epoch(1), rows(0))


@pytest.mark.parametrize("setting", ["appendOnly", "enableChangeDataFeed"])
def test_tables_whose_files_cannot_be_written_anew_are_refused(sink, target, setting):
    DeltaTable.create(str(target), PLAIN, configuration={f"delta.{setting}": "true"})
    with pytest.raises(SchemaError, match=f"PEN-4002 .*{setting}"):
        commit(sink, 1, insert(1))


def test_columns_that_must_not_be_null_are_kept_so(sink, target):
    DeltaTable.create(
        str(target),
        pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string(), nullable=False)]),
    )
    commit(sink, 1, changes({"_op": "c", "id": 1, "name": "x"}))
    commit(sink, 2, changes({"_op": "d", "id": 1}))
    with pytest.raises(SchemaError, match=r"'name' .*forbids"):
        stage(sink, epoch(3), changes({"_op": "c", "id": 1}))
    assert read(target) == []


def test_a_key_without_upsert_is_refused(make):
    with pytest.raises(ConfigError, match="PEN-1003"):
        make(mode="append")


@pytest.mark.parametrize("option", [{"apply": "vectors"}, {"purge_percent": 5}, {"soft_delete": True}])
@pytest.mark.parametrize("mode", ["append", "changes"])
def test_who_asked_for_vectors_and_forgot_the_mode_got_every_change_as_a_row_of_its_own(make, mode, option):
    (name,) = option
    with pytest.raises(ConfigError, match=f"PEN-1003 `{name}` has no meaning"):
        make(mode=mode, key=[], **option)


def test_schemas_are_compared_without_the_columns_that_describe_a_change(sink, target):
    commit(sink, 1, insert(1))
    assert sink.diff_schemas(sink.schema(ORDERS), insert(1).schema) == []


def test_changes_mode_keeps_every_change_as_it_is(make, target):
    sink = make(mode="changes", key=[])
    commit(sink, 1, insert(1), changes({"_op": "u", "id": 1, "_unchanged": ["doc"], "_old_key": '{"id":0}'}))
    commit(sink, 2, changes({"_op": "d", "id": 1}))
    table = DeltaTable(str(target)).to_pyarrow_table()
    assert sorted(table.column("_op").to_pylist()) == ["c", "d", "u"]
    assert [row["_unchanged"] for row in table.to_pylist() if row["_op"] == "u"] == [["doc"]]
    assert set(table.column_names) == {*PLAIN.names, *(each.name for each in CHANGE_FIELDS)}


def test_of_many_changes_only_the_keys_are_held_while_their_rows_are_written(tmp_path, monkeypatch):
    rows, wide = 40_000, "x" * 500
    monkeypatch.setattr("penstock.changes.streamed.HELD_ROWS", 1000)
    monkeypatch.setattr("penstock.changes.streamed.BUCKET_ROWS", 1000)
    monkeypatch.setattr(changed, "CHUNK_ROWS", 2000)
    path = tmp_path / "changes.parquet"
    with pq.ParquetWriter(path, changes().schema) as writer:
        for first in range(0, rows, 2000):
            events = (
                {"_op": "c", "_position": f"{id:09d}", "id": id, "doc": wide} for id in range(first, first + 2000)
            )
            writer.write_batch(changes(*events))
    before = pa.total_allocated_bytes()
    collapsed = collapse_parts([changed.StagedChanges(path, lambda rows: rows)], ["id"], PLAIN)
    held, seen = [], 0
    for piece in collapsed.rows(None)(0, rows):
        held.append(pa.total_allocated_bytes() - before)
        seen += piece.num_rows
    assert seen == rows
    assert max(held) < rows * len(wide) / 3


_COMMIT = """
import pickle, sys

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10

sink, epoch, receipts = pickle.loads(bytes.fromhex(sys.stdin.read()))
sink.open()
before = peak()
sink.commit_epoch(epoch, receipts, {})
print(peak() - before)
"""


def peak_of_commit(sink, e, receipts):
    """By how much the memory of a driver grows while it commits."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _COMMIT],
        input=pickle.dumps((sink, e, receipts)).hex(),
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.soak
def test_two_million_changes_are_applied_in_little_memory(make, target):
    sink, e, count = make(), epoch(1), 2_000_000

    def batches():
        for first in range(0, count, 100_000):
            ids = pa.array(range(first, first + 100_000))
            position = pc.utf8_lpad(ids.cast(pa.string()), 27, "0")
            yield pa.record_batch({"id": ids, "n": ids, "_op": ["c"] * len(ids), "_position": position})

    receipts = [stage(sink, e, *batches())]
    assert peak_of_commit(sink, e, receipts) < 350 << 20
    assert DeltaTable(str(target)).to_pyarrow_dataset().count_rows() == count


class TestRenewed:
    """A table that is cleared takes other types in the commit that clears it."""

    RETYPED = pa.schema([("id", pa.string()), ("name", pa.timestamp("us")), ("more", pa.list_(pa.int64()))])

    def stage(self, sink, e, *events, cleared=True):
        worker = pickle.loads(pickle.dumps(sink))
        worker.open(SinkContext({ORDERS: TopicContext(refilled=cleared)}))
        worker.begin_epoch(e, Task(0))
        worker.write_batch(ORDERS, changes(*events, schema=self.RETYPED))
        receipt = worker.pre_commit(e)
        worker.close()
        return sink.receipt_type.model_validate_json(receipt.model_dump_json())

    def test_types_are_replaced_together_with_the_rows(self, make, target):
        sink = make()
        commit(sink, 1, insert(1, 2))
        before = DeltaTable(str(target))
        row = {"_op": "r", "id": "a", "name": datetime.datetime(2024, 1, 1), "more": [1]}
        e = epoch(2)
        receipt = self.stage(sink, e, {"_op": "t"}, row)
        for _ in range(2):  # the answer may have been lost
            sink.commit_epoch(e, [receipt], END)
        assert read(target) == [{"id": "a", "name": row["name"], "doc": None, "more": [1]}]
        after = DeltaTable(str(target))
        assert after.metadata().id == before.metadata().id
        assert removed(target) == {os.path.basename(uri) for uri in before.file_uris()}
        assert sink.committed_epoch("shop", ORDERS).number == 2
        e = epoch(3)
        sink.commit_epoch(e, [self.stage(sink, e, {**row, "id": "b"}, cleared=False)], END)
        assert [row["id"] for row in read(target)] == ["a", "b"]

    def test_rows_without_their_clear_are_not_applied_since_they_come_again(self, make, target):
        sink = make()
        commit(sink, 1, insert(1, 2))
        e = epoch(2)
        sink.commit_epoch(e, [self.stage(sink, e, {"_op": "r", "id": "a"})], END)
        assert names(target) == {1: "new", 2: "new"}
        assert sink.committed_epoch("shop", ORDERS).number == 2

    def test_a_clear_with_types_that_the_table_can_follow_changes_as_ever(self, make, target):
        sink = make()
        commit(sink, 1, changes({"_op": "c", "id": 1}, schema=pa.schema([("id", pa.int32())])))
        worker = pickle.loads(pickle.dumps(sink))
        worker.open(SinkContext({ORDERS: TopicContext(refilled=True)}))
        e = epoch(2)
        worker.begin_epoch(e, Task(0))
        worker.write_batch(ORDERS, insert(2**40))
        sink.commit_epoch(e, [worker.pre_commit(e)], END)
        assert names(target) == {1: None, 2**40: "new"}

    def test_a_partition_column_a_rule_and_marked_rows_forbid_it(self, make, target):
        retyped = [SchemaChange(ChangeKind.RETYPED, "name", pa.string(), pa.int64())]
        for options in ({"partition_by": ["name"]}, {"soft_delete": True}):
            sink = make(path=str(target.parent / next(iter(options)) / "{topic}"), **options)
            commit(sink, 1, insert(1))
            assert not sink.evaluate_evolution(retyped, refilled=ORDERS)
        sink = make()
        commit(sink, 1, insert(1))
        assert sink.evaluate_evolution(retyped, refilled=ORDERS)


class Counted(io.BytesIO):
    """The reader of an object, which counts the bytes that were asked for."""

    taken = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


def test_a_large_staged_file_in_an_object_store_is_not_read_before_it_is_open(monkeypatch):
    made = []

    def reader(place):
        made.append(Counted(b"x" * sizes[place]))
        return made[-1]

    monkeypatch.setattr(changed.store, "reader", reader)
    sizes = {object(): changed.SMALL_BYTES + 1}
    large = changed._opened(*sizes)
    assert made == [large]
    assert (large.taken, large.tell()) == (0, 0)
    sizes = {object(): changed.SMALL_BYTES}
    for _ in range(2):
        assert changed._opened(*sizes).size() == changed.SMALL_BYTES
    assert len(made) == 2
    assert made[1].taken == changed.SMALL_BYTES
