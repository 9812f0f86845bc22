"""Upserts by deletion vectors: what the files and the log hold, who reads them, and who may interfere."""

from __future__ import annotations

import json
import os
import time
from uuid import UUID

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import DeltaError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lake_readers import table_of
from sink_protocol import END, ORDERS, epoch, stage

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.delta import Delta, DeltaConfig, entries, marking, upkeep
from penstock.connectors.delta import apply as applying
from penstock.connectors.delta.files import Log, TableFile
from penstock.connectors.delta.vectors import Vector, file_of, positions_of, rows_at
from penstock.connectors.lake import index
from penstock.errors import FatalError, PlanStale
from penstock.schema import with_key
from penstock.sink import Task
from penstock.testing.readers import DuckDB, is_installed

PLAIN = pa.schema([("id", pa.int64()), ("name", pa.string())])
NAME = UUID("d2c639aa-8816-431a-aaf6-d3fe2512ff61")


@pytest.fixture(autouse=True)
def _marks_every_file(monkeypatch):
    monkeypatch.setattr(marking, "MARKED_ROWS", 0)
    monkeypatch.setattr(index, "STORED_ROWS", 5)


@pytest.fixture(scope="module")
def duckdb(need):
    need(is_installed(), "the DuckDB of penstock.testing.readers is not installed")
    with DuckDB() as process:
        yield process


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out/lake/orders"


@pytest.fixture
def make(tmp_path):
    def make(**options):
        given = {"path": str(tmp_path / "out/{topic}"), "mode": "upsert", "key": ["id"], "apply": "vectors"}
        sink = Delta(DeltaConfig(**{**given, **options}))
        sink.open()
        return sink

    return make


@pytest.fixture
def sink(make):
    return make(purge_percent=100)


def upserts(rows, deletes=()):
    events = [{"_op": "u", "id": id, "name": name} for id, name in dict(rows).items()]
    events += [{"_op": "d", "id": id} for id in deletes]
    found = [{"_position": f"{place:06d}", **event} for place, event in enumerate(events)]
    return pa.RecordBatch.from_pylist(found, schema=with_key(pa.schema([*PLAIN, *CHANGE_FIELDS]), ["id"]))


def commit(sink, number, *batches):
    e = epoch(number)
    receipts = [stage(sink, e, *batches)]
    work = sink.plan_apply(e, ORDERS, receipts)
    if work:
        sink.commit_applied(e, ORDERS, receipts, END, [sink.apply(e, each, Task(n)) for n, each in enumerate(work)])
    else:
        sink.commit_epoch(e, receipts, END)
    sink.sweep(e, receipts)


def fill(sink, count=100):
    commit(sink, 1, upserts({id: f"row {id}" for id in range(count)}))
    return {id: f"row {id}" for id in range(count)}


def read(target):
    return {row["id"]: row["name"] for row in table_of(target).to_pylist()}


def entry(target, version):
    lines = (target / "_delta_log" / f"{version:020d}.json").read_text().splitlines()
    return [json.loads(line) for line in lines]


def vectors(target):
    return {path.name for path in target.glob("deletion_vector_*.bin")}


def live_vectors(sink):
    return sink.target(ORDERS).load().entries.vector_files()


# -- the bytes -----------------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_file_of_vectors():
    data, (first, second) = file_of(NAME, [rows_at(np.array([1, 5, 2**32 + 7])), rows_at(np.array([0]))])
    framed = (
        "01"  # version
        "0000003a"  # length, big endian
        "d1d33964"  # magic number, little endian
        "0200000000000000"  # two bitmaps of 32 bits
        "00000000" "3a300000" "01000000" "0000" "0100" "10000000" "0100" "0500"
        "01000000" "3a300000" "01000000" "0000" "0000" "10000000" "0700"
    )  # fmt: skip
    assert data.hex().startswith(framed)
    assert (first.offset, first.size, first.count) == (1, 0x3A, 3)
    assert (second.offset, second.count) == (1 + 4 + 0x3A + 4, 1)
    assert first.file == "deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert [positions_of(each.rows(lambda _: data)).tolist() for each in (first, second)] == [[1, 5, 2**32 + 7], [0]]


def test_the_name_of_a_file_with_a_prefix_is_that_of_the_protocol():
    vector = Vector(storage="u", place="ab^-aqEH.-t@S}K{vb[*k^", offset=4, size=40, count=6)
    assert vector.file == "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"


@settings(deadline=None)
@given(st.sets(st.integers(0, 2**34), max_size=200), st.booleans())
def test_positions_come_back(positions, dense):
    wanted = np.array(sorted({*positions, *(range(70_000) if dense else ())}), np.int64)
    data, (vector,) = file_of(NAME, [rows_at(wanted)])
    assert positions_of(vector.rows(lambda _: data)).tolist() == wanted.tolist()


@pytest.mark.parametrize("place", [2, 5, 20, -1])
def test_a_damaged_vector_is_never_taken_for_a_whole_one(place):
    data, (vector,) = file_of(NAME, [rows_at(np.arange(50))])
    bad = bytearray(data)
    bad[place] ^= 1
    with pytest.raises(FatalError, match="PEN-5001"):
        vector.rows(lambda _: bytes(bad))
    with pytest.raises(FatalError, match="PEN-5001"):
        vector.rows(lambda _: data[:-2])


# -- the log -------------------------------------------------------------------------------------------------------------


def test_an_entry_removes_a_file_with_its_old_vector_and_adds_it_with_the_new_one(sink, target):
    fill(sink)
    commit(sink, 2, upserts({7: "new"}))
    commit(sink, 3, upserts({8: "new"}, deletes=[9]))
    (before,) = [each["add"] for each in entry(target, 2) if "deletionVector" in each.get("add", {})]
    (removed,) = [each["remove"] for each in entry(target, 3) if "remove" in each]
    (added,) = [each["add"] for each in entry(target, 3) if each.get("add", {}).get("path") == before["path"]]
    assert removed["deletionVector"] == before["deletionVector"] != added["deletionVector"]
    assert (before["deletionVector"]["cardinality"], added["deletionVector"]["cardinality"]) == (1, 3)
    stats = json.loads(added["stats"])
    assert (stats["numRecords"], stats["tightBounds"]) == (100, False)
    assert added["modificationTime"] == before["modificationTime"]
    assert read(target)[8] == "new"


def test_the_feature_is_declared_once_and_only_where_it_is_asked_for(make, target):
    write_deltalake(str(target), pa.table({"id": [1, 2], "name": ["theirs", "theirs"]}))
    for number, apply in enumerate(["rewrite", "auto"], 1):
        commit(make(apply=apply), number, upserts({number: apply}))
        assert DeltaTable(str(target)).protocol().min_reader_version == 1
        assert not vectors(target)
    sink = make()
    for number in (3, 4):
        commit(sink, number, upserts({2: "vectors"}))
    declared = [
        v for v in range(DeltaTable(str(target)).version() + 1) if any("protocol" in e for e in entry(target, v))
    ]
    assert declared == [0, 3]
    assert {name for each in entry(target, 3) for name in each} == {"commitInfo", "protocol", "metaData"}
    protocol = DeltaTable(str(target)).protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (3, 7)
    assert {"deletionVectors", "appendOnly", "invariants"} <= set(protocol.writer_features)
    assert read(target) == {1: "rewrite", 2: "vectors"}


def test_auto_gives_vectors_to_tables_that_it_creates(make, target):
    sink = make(apply="auto", purge_percent=100)
    fill(sink)
    commit(sink, 2, upserts({7: "new"}))
    assert len(vectors(target)) == 1
    assert DeltaTable(str(target)).metadata().configuration["delta.enableDeletionVectors"] == "true"


def test_rewriting_honours_the_vectors_that_a_table_has(make, sink, target):
    state = fill(sink)
    commit(sink, 2, upserts({7: "new"}, deletes=[8]))
    again = make(apply="rewrite")
    commit(again, 3, upserts({50: "again"}))
    state.update({7: "new", 50: "again"})
    del state[8]
    assert read(target) == state
    assert live_vectors(again) == set()


def test_a_file_whose_last_row_goes_is_removed_without_a_vector(sink, target):
    fill(sink, 3)
    commit(sink, 2, upserts({1: "a"}, deletes=[0]))
    commit(sink, 3, upserts({2: "b"}))
    assert read(target) == {1: "a", 2: "b"}
    assert len(DeltaTable(str(target)).file_uris()) == 2
    assert live_vectors(sink) == set()


def test_a_truncate_removes_every_file_with_its_vector(sink, target):
    fill(sink)
    commit(sink, 2, upserts({7: "new"}))
    cleared = upserts({3: "after"}).to_pylist()
    cleared = [{"_op": "t", "_position": "000000"}, {**cleared[0], "_position": "000001"}]
    schema = with_key(pa.schema([*PLAIN, *CHANGE_FIELDS]), ["id"])
    commit(sink, 3, pa.RecordBatch.from_pylist(cleared, schema=schema))
    assert read(target) == {3: "after"}
    assert sum("deletionVector" in each.get("remove", {}) for each in entry(target, 3)) == 1


# -- readers -------------------------------------------------------------------------------------------------------------


def by_polars(target):
    found = polars.scan_delta(str(target)).collect()
    return dict(zip(found["id"].to_list(), found["name"].to_list(), strict=True))


def by_duckdb(duckdb, target):
    return {row["id"]: row["name"] for row in duckdb.rows(f"select id, name from delta_scan('{target}')")}


def test_what_duckdb_prints_is_no_answer_of_it(duckdb):
    loud = "set progress_bar_time = 0; set enable_progress_bar = true; select 1 as n from range(1)"
    assert [duckdb.rows(text) for text in (loud, "select 2 as n")] == [[{"n": 1}], [{"n": 2}]]


IDS = st.integers(0, 40)
CHANGES = st.tuples(st.dictionaries(IDS, st.text("abc", max_size=3)), st.sets(IDS, max_size=10))
EPOCHS = st.lists(CHANGES.filter(any), max_size=6)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(epochs=EPOCHS, drops=st.booleans())
def test_every_reader_sees_the_state_after_every_epoch(tmp_path_factory, duckdb, epochs, drops):
    path = tmp_path_factory.mktemp("vectors")
    target = path / "lake/orders"
    config = {"mode": "upsert", "key": ["id"], "apply": "vectors", "purge_percent": 60, "optimize_every_epochs": 4}
    sink = Delta(DeltaConfig(path=f"{path}/{{topic}}", **config))
    sink.open()
    state = fill(sink, 30)
    for number, (written, deleted) in enumerate(epochs, 2):
        commit(sink, number, upserts(written, deleted - set(written)))
        state = {id: name for id, name in {**state, **written}.items() if id in written or id not in deleted}
        if drops and number % 2:
            table = DeltaTable(str(target))
            table.create_checkpoint()
            for version in range(table.version()):
                (target / "_delta_log" / f"{version:020d}.json").unlink(missing_ok=True)
            sink = Delta(sink.config)  # as after a restart: what is known comes from the checkpoint
            sink.open()
        rows = table_of(target).to_pylist()
        assert len(rows) == len(state)
        assert {row["id"]: row["name"] for row in rows} == state
        assert by_polars(target) == state
        assert by_duckdb(duckdb, target) == state


def test_readers_that_skip_files_by_their_bounds_find_no_deleted_row(sink, target, duckdb):
    fill(sink)
    commit(sink, 2, upserts({}, deletes=[99, 0, 50]))
    query = "select max(id) high, min(id) low, count(*) n, count(*) filter (id in (0, 50, 99)) dead from {}"
    expected = {"high": 98, "low": 1, "n": 97, "dead": 0}
    assert duckdb.rows(query.format(f"delta_scan('{target}')")) == [expected]
    assert duckdb.rows(f"select id from delta_scan('{target}') where id = 99") == []
    client = QueryBuilder().register("t", DeltaTable(str(target)))
    assert pa.table(client.execute(query.format("t").replace("(id in", "(where id in"))).to_pylist() == [expected]
    frame = polars.scan_delta(str(target))
    assert frame.filter(polars.col("id") == 99).collect().is_empty()
    assert frame.select(polars.col("id").max()).collect().item() == 98


def test_the_client_counts_deleted_rows_which_the_documents_say(sink, target):
    fill(sink)
    commit(sink, 2, upserts({}, deletes=range(10)))
    assert DeltaTable(str(target)).count() == 100  # when this fails, take the warning out of the documents
    assert len(read(target)) == 90


def test_check_says_which_readers_and_commands_do_not_know_vectors(make):
    (found,) = make().check()
    assert found.ok
    assert "count()" in found.what
    assert "vacuum(full=True)" in found.what
    assert make(apply="rewrite").check() == ()


def test_a_full_vacuum_of_the_client_destroys_the_table_which_the_documents_say(sink, target):
    fill(sink)
    commit(sink, 2, upserts({}, deletes=range(10)))
    DeltaTable(str(target)).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    assert len(read(target)) == 90  # the plain one is safe
    DeltaTable(str(target)).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
    with pytest.raises(DeltaError):  # when this fails, take the warning out of the documents
        read(target)


# -- others --------------------------------------------------------------------------------------------------------------


def _compact(target):
    DeltaTable(str(target)).optimize.compact()


def _append(target):
    write_deltalake(str(target), pa.table({"id": [1000], "name": ["theirs"]}), mode="append")


def _delete(target):
    DeltaTable(str(target)).delete("id = 60")


def _merge(target):
    source = pa.table({"id": [61], "name": ["merged"]})
    table = DeltaTable(str(target))
    table.merge(source, "s.id = t.id", source_alias="s", target_alias="t").when_matched_update_all().execute()


OTHERS = {
    _compact: lambda state: state,
    _append: lambda state: {**state, 1000: "theirs"},
    _delete: lambda state: {id: name for id, name in state.items() if id != 60},
    _merge: lambda state: {**state, 61: "merged"},
}


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__[1:])
@pytest.mark.parametrize("in_tasks", [True, False])
def test_a_commit_of_others_between_plan_and_commit_loses_and_doubles_nothing(
    make, target, other, in_tasks, monkeypatch
):
    sink = make(purge_percent=100)
    state = fill(sink)
    commit(sink, 2, upserts({7: "two"}, deletes=[8]))
    monkeypatch.setattr(Delta, "small_rows", 0 if in_tasks else 1_000_000)
    e = epoch(3)
    receipts = [stage(sink, e, upserts({7: "three", 30: "three"}, deletes=[31]))]
    work = sink.plan_apply(e, ORDERS, receipts)
    assert bool(work) == in_tasks
    if in_tasks:
        applied = [sink.apply(e, each, Task(n)) for n, each in enumerate(work)]
        other(target)
        with pytest.raises(PlanStale):
            sink.commit_applied(e, ORDERS, receipts, END, applied)
        work = sink.plan_apply(e, ORDERS, receipts)
        applied = [sink.apply(e, each, Task(n)) for n, each in enumerate(work)]
        sink.commit_applied(e, ORDERS, receipts, END, applied)
        sink.sweep(e, receipts)
    else:
        other(target)
        sink.commit_epoch(e, receipts, END)
    state = OTHERS[other]({**state, 7: "three", 30: "three"})
    expected = {id: name for id, name in state.items() if id not in (8, 31)}
    assert len(table_of(target)) == len(expected)
    assert read(target) == expected
    assert live_vectors(sink) <= vectors(target)
    commit(sink, 4, upserts({5: "four"}))
    assert read(target) == {**expected, 5: "four"}


def test_a_commit_that_loses_the_race_for_its_version_plans_again(sink, target, monkeypatch):
    state = fill(sink)
    real, raced = applying.Applying.all_at_once, []

    def all_at_once(self, *given):
        files = real(self, *given)
        if not raced:
            raced.append(_delete(target))
        return files

    monkeypatch.setattr(applying.Applying, "all_at_once", all_at_once)
    commit(sink, 2, upserts({60: "new", 61: "new"}))
    assert read(target) == {**state, 60: "new", 61: "new"}
    assert len(table_of(target)) == 100
    assert vectors(target) == live_vectors(sink)  # those of the lost try are swept


@pytest.mark.parametrize("damage", ["deleted", "truncated", "foreign", "emptied", "spoiled"])
def test_the_index_is_only_a_cache(make, target, damage):
    sink = make(purge_percent=100)
    state = fill(sink)
    commit(sink, 2, upserts({7: "two"}))
    (part,) = [path for path in (target / "_penstock/.index").iterdir() if path.stat().st_size > 1000]
    if damage == "deleted":
        part.unlink()
    elif damage == "truncated":
        part.write_bytes(part.read_bytes()[:-100])
    elif damage == "emptied":
        part.write_bytes(b"")
    elif damage == "spoiled":  # Arrow reads it as before, with other rows
        data = bytearray(part.read_bytes())
        rows = np.arange(100).tobytes()
        first = data.index(rows[:200])
        data[first : first + len(rows)] = np.roll(np.arange(100), 1).tobytes()
        part.write_bytes(data)
    else:  # a part of another table at its place
        other = make(path=str(target.parents[2] / "other/{topic}"), purge_percent=100)
        commit(other, 1, upserts({1000 + id: "other" for id in range(100)}))
        commit(other, 2, upserts({1007: "two"}))
        theirs = target.parents[2] / "other/lake/orders/_penstock/.index"
        (foreign,) = [path for path in theirs.iterdir() if path.stat().st_size > 1000]
        part.write_bytes(foreign.read_bytes())
    again = make(purge_percent=100)
    commit(again, 3, upserts({7: "three", 9: "three"}, deletes=[10]))
    expected = {id: name for id, name in {**state, 7: "three", 9: "three"}.items() if id != 10}
    assert read(target) == expected


def test_keys_that_are_more_than_one_number_are_compared_and_not_only_hashed(make, target, monkeypatch):
    monkeypatch.setattr(index, "hashes_of", lambda keys: np.zeros(keys.num_rows, np.uint64))
    sink = make(key=["name"], purge_percent=100)
    commit(sink, 1, upserts({id: f"key {id}" for id in range(50)}))
    commit(sink, 2, upserts({1007: "key 7", 1008: "key 8"}))
    assert sorted(read(target)) == sorted({*range(50), 1007, 1008} - {7, 8})


def test_a_row_of_others_whose_key_is_null_was_taken_for_the_row_with_the_key_zero(make, target):
    sink = make(purge_percent=100)
    fill(sink, 10)
    write_deltalake(str(target), pa.table({"id": [None, 1000], "name": ["nobody's", "theirs"]}, PLAIN), mode="append")
    commit(sink, 2, upserts({0: "two"}, deletes=[5]))
    commit(make(purge_percent=100), 3, upserts({0: "three"}))
    assert sorted(table_of(target).column("name").to_pylist()) == sorted(
        ["nobody's", "theirs", "three", *(f"row {id}" for id in range(1, 10) if id != 5)]
    )


def test_polars_shows_deleted_rows_of_quoted_partitions_which_the_documents_say(make, target, duckdb):
    sink = make(partition_by=["name"], purge_percent=100)
    values = ["plain", "2026-01-01", "A_b.c-d", None, "a b", "é", "a/b", "100%", "x=1"]
    commit(sink, 1, upserts({10 * place + id: value for place, value in enumerate(values) for id in range(10)}))
    commit(sink, 2, upserts({10 * place: value for place, value in enumerate(values)}, deletes=range(1, 90, 10)))
    assert len(live_vectors(sink)) == 1
    expected = {10 * place + id: value for place, value in enumerate(values) for id in range(10) if id != 1}
    assert read(target) == expected
    found = {row["id"]: row["name"] for row in duckdb.rows(f"select * from delta_scan('{target}')")}
    assert found == expected
    rows = polars.scan_delta(str(target)).collect().rows()
    assert {(id, name) for id, name in rows if id < 40} == {(id, name) for id, name in expected.items() if id < 40}
    # Once this fails, the page, `check` and this test can forget it.
    assert len(rows) == len(expected) + 5 * 2


def test_the_client_could_not_compact_partitions_with_a_tilde(make, target):
    sink = make(partition_by=["name"], purge_percent=100)
    commit(sink, 1, upserts(dict.fromkeys(range(10), "a~b")))
    commit(sink, 2, upserts(dict.fromkeys(range(5), "a~b"), deletes=[9]))
    DeltaTable(str(target)).optimize.compact()
    assert read(target) == dict.fromkeys(range(9), "a~b")


# -- upkeep --------------------------------------------------------------------------------------------------------------


def test_a_file_with_many_deleted_rows_is_written_again_as_work_of_an_epoch(make, target, monkeypatch):
    monkeypatch.setattr(applying, "PURGE_HERE_ROWS", 99)
    sink = make(purge_percent=10)
    state = fill(sink)
    commit(sink, 2, upserts(dict.fromkeys(range(20), "two")))
    assert live_vectors(sink)
    e = epoch(3)
    receipts = [stage(sink, e, upserts({50: "three"}, deletes=[51]))]
    work = sink.plan_apply(e, ORDERS, receipts)
    assert [each.purges for each in work if each.share is None].count(True) == 1
    sink.commit_applied(e, ORDERS, receipts, END, [sink.apply(e, each, Task(n)) for n, each in enumerate(work)])
    state.update({**dict.fromkeys(range(20), "two"), 50: "three"})
    del state[51]
    assert read(target) == state
    assert live_vectors(sink) == set()


def test_rows_of_a_file_that_was_due_came_twice_when_a_truncate_marked_all_of_them(make, target, monkeypatch):
    monkeypatch.setattr(applying, "PURGE_HERE_ROWS", 99)
    sink = make(purge_percent=10, soft_delete=True)
    fill(sink)
    commit(sink, 2, upserts(dict.fromkeys(range(20), "two")))
    clear = pa.RecordBatch.from_pylist([{"_op": "t", "_position": "0"}], schema=upserts({}).schema)
    commit(sink, 3, clear)
    found = table_of(target)
    assert sorted(found.column("id").to_pylist()) == list(range(100))
    assert found.column("_deleted").to_pylist() == [True] * 100


def test_a_small_file_with_many_deleted_rows_is_written_again_by_the_commit_itself(make, target):
    sink = make(purge_percent=10)
    state = fill(sink)
    commit(sink, 2, upserts(dict.fromkeys(range(20), "two")))
    assert live_vectors(sink)
    e = epoch(3)
    receipts = [stage(sink, e, upserts({50: "three"}, deletes=[51]))]
    assert not sink.plan_apply(e, ORDERS, receipts)  # no job for a hundred rows
    sink.commit_epoch(e, receipts, END)
    state.update({**dict.fromkeys(range(20), "two"), 50: "three"})
    del state[51]
    assert read(target) == state
    assert live_vectors(sink) == set()


def test_a_large_file_is_written_again_as_smaller_ones(make, target, monkeypatch):
    monkeypatch.setattr(applying, "PURGE_HERE_ROWS", 99)
    monkeypatch.setattr("penstock.connectors.delta.sink.PURGE_ROWS", 300)
    monkeypatch.setattr("penstock.connectors.lake.changed.CHUNK_ROWS", 100)
    monkeypatch.setattr("penstock.connectors.lake.staging.ROW_GROUP_ROWS", 100)
    monkeypatch.setattr("penstock.connectors.delta.files.SMALL_FILE_ROWS", 100)
    sink = make(purge_percent=10)
    state = fill(sink, 1_000)
    commit(sink, 2, upserts(dict.fromkeys(range(0, 1_000, 5), "two")))
    assert len(live_vectors(sink)) == 1
    commit(sink, 3, upserts({50: "three"}))
    state.update({**dict.fromkeys(range(0, 1_000, 5), "two"), 50: "three"})
    assert read(target) == state
    sizes = sorted(file.rows for file in Log(sink.target(ORDERS).load()).files())
    assert sizes == [1, 160, 200, 320, 320]


def aged(dead, rows=1_000):
    """Files with so many deleted rows each."""
    vector = lambda count: Vector(storage="u", place="x" * 20, offset=1, size=40, count=count)  # noqa: E731
    return [
        TableFile(logged=f"{place}.parquet", bytes=rows, records=rows, vector=vector(count) if count else None)
        for place, count in enumerate(dead)
    ]


def test_files_of_one_age_are_not_written_again_all_at_once():
    assert applying.worn(aged([9] * 10), 2) == []
    files = aged([10] * 9 + [12])  # 1 % of the table and a little
    assert applying.worn(files, 2) == [files[9]]
    files = aged([0] * 9 + [20])  # 2 % of a file alone, and less of the table
    assert applying.worn(files, 2) == [files[9]]
    dead, written = [0.0] * 10, []
    for _ in range(1_000):  # epochs that each delete one row of every file
        dead = [each + 1 for each in dead]
        due = applying.worn(aged([int(each) for each in dead]), 2)
        written.append(len(due))
        for file in due:
            dead[int(file.path.partition(".")[0])] = 0
        assert sum(dead) <= 110
    assert max(written) <= 3  # and not all ten in the twentieth epoch
    assert sum(written) < 1.1 * 1_000 * 10 / 18  # no more of them than if each was written at nearly 2 %


def test_one_epoch_purges_a_bounded_part_of_the_table_the_worst_file_first(make, target, monkeypatch):
    monkeypatch.setattr(applying, "PURGE_HERE_ROWS", 99)
    monkeypatch.setattr(applying, "PURGE_ROWS", 100)
    sink = make(purge_percent=10)
    for number in range(4):
        commit(sink, number + 1, upserts(dict.fromkeys(range(number * 100, number * 100 + 100), "one")))
    dead = [*range(20), *range(100, 140), *range(200, 225), *range(300, 330)]
    monkeypatch.setattr(applying, "worn", lambda files, percent: [])
    commit(sink, 5, upserts({}, deletes=dead))
    monkeypatch.undo()
    monkeypatch.setattr(marking, "MARKED_ROWS", 0)
    monkeypatch.setattr(applying, "PURGE_HERE_ROWS", 99)
    monkeypatch.setattr(applying, "PURGE_ROWS", 100)
    counts = []
    for number in range(6, 11):
        loaded = sink.target(ORDERS).load()
        counts.append(
            sorted(loaded.entries.vector(path).count for path in loaded.entries.adds if loaded.entries.vector(path))
        )
        commit(sink, number, upserts({1000: str(number)}))
    assert counts == [[20, 25, 30, 40], [20, 25, 30], [20, 25], [20], []]
    assert len(read(target)) == 400 - len(dead) + 1


def test_small_files_are_joined_without_their_deleted_rows(make, target):
    sink = make(purge_percent=100, optimize_every_epochs=5)
    expected = {}
    for number in range(1, 30):
        rows = {id: str(number) for id in range(number * 5, number * 5 + 8)}
        commit(sink, number, upserts(rows))
        expected.update(rows)
        assert read(target) == expected
    assert len(DeltaTable(str(target)).file_uris()) < 2 * upkeep.FAN
    assert live_vectors(sink) <= vectors(target)


def test_upkeep_removes_dead_vectors_after_the_retention_and_no_live_one(make, target, monkeypatch):
    monkeypatch.setattr(entries, "SHORT_SECS", -1.0)  # as if days lay between the epochs
    sink = make(purge_percent=100)
    fill(sink)
    for number in range(2, 6):
        commit(sink, number, upserts({number: "new"}))
    live = live_vectors(sink)
    assert len(live) == 1
    assert len(vectors(target)) == 4
    table = sink.target(ORDERS).load()
    assert upkeep.remove_dead_vectors(table) == 0
    long_ago = time.time() - 8 * 86_400
    for path in target.glob("*.bin"):
        os.utime(path, (long_ago, long_ago))
    assert upkeep.remove_dead_vectors(table) == 0  # readers of versions of the last days need them
    table.entries.gone = dict.fromkeys(table.entries.gone, int(long_ago * 1000))
    assert upkeep.remove_dead_vectors(table) == 3
    assert vectors(target) == live
    assert len(read(target)) == 100


def test_a_log_that_others_have_cleaned_up_since_is_read_again(sink, target):
    """The client reads some of it only when it is asked, e.g. for the marker after a commit of somebody else."""
    state = fill(sink)
    write_deltalake(str(target), pa.table({"id": [1000], "name": ["theirs"]}), mode="append")
    e = epoch(2)
    receipts = [stage(sink, e, upserts({3: "three"}))]
    assert not sink.plan_apply(e, ORDERS, receipts)
    table = DeltaTable(str(target))
    table.create_checkpoint()
    for version in range(table.version()):
        (target / "_delta_log" / f"{version:020d}.json").unlink()
    sink.commit_epoch(e, receipts, END)
    assert read(target) == {**state, 1000: "theirs", 3: "three"}


def test_checkpoints_are_made_and_carry_the_vectors(make, target):
    write_deltalake(
        str(target),
        pa.table({"id": range(100), "name": ["theirs"] * 100}),
        configuration={"delta.checkpointInterval": "4"},
    )
    sink = make(purge_percent=100)
    for number in range(1, 12):
        commit(sink, number, upserts({number: str(number)}))
    made = sorted(path.name[:20] for path in (target / "_delta_log").glob("*.checkpoint.parquet"))
    assert made == [f"{version:020d}" for version in (4, 8, 12)]
    for version in range(12):
        (target / "_delta_log" / f"{version:020d}.json").unlink(missing_ok=True)
    again = make(purge_percent=100)
    assert again.committed_epoch("shop", ORDERS).number == 11
    commit(again, 12, upserts({5: "last"}, deletes=[6]))
    expected = {id: str(id) if id in range(1, 12) else "theirs" for id in range(100)}
    expected[5] = "last"
    del expected[6]
    assert read(target) == expected
    assert len(table_of(target)) == 99


def tombstones(target):
    newest = max((target / "_delta_log").glob("*.checkpoint.parquet"))
    return [row for row in pq.read_table(newest).column("remove").to_pylist() if row is not None]


def test_each_checkpoint_named_every_vector_that_was_ever_replaced(make, target, monkeypatch, duckdb):
    """With 30 files and three epochs a second, these were seven million a day."""
    monkeypatch.setattr(entries, "THIN", 1)
    write_deltalake(
        str(target),
        pa.table({"id": range(100), "name": ["theirs"] * 100}),
        configuration={"delta.checkpointInterval": "10"},
    )
    sink = make(purge_percent=100, optimize_every_epochs=0)
    expected = dict.fromkeys(range(100), "theirs")
    for number in range(1, 60):
        commit(sink, number, upserts({number: str(number)}))
        expected[number] = str(number)
        if number == 30:
            sink = make(purge_percent=100, optimize_every_epochs=0)
    assert len(tombstones(target)) < 20
    assert len(sink.target(ORDERS).load().entries.gone) < 20
    said = json.loads((target / "_delta_log/_last_checkpoint").read_bytes())
    newest = max((target / "_delta_log").glob("*.checkpoint.parquet"))
    assert (said["version"], said["sizeInBytes"]) == (60, newest.stat().st_size)
    for version in range(60):  # all that readers have is the checkpoint
        (target / "_delta_log" / f"{version:020d}.json").unlink(missing_ok=True)
        (target / "_delta_log" / f"{version:020d}.checkpoint.parquet").unlink(missing_ok=True)
    assert read(target) == by_polars(target) == by_duckdb(duckdb, target) == expected
    again = make(purge_percent=100)
    assert again.committed_epoch("shop", ORDERS).number == 59
    commit(again, 60, upserts({5: "last"}, deletes=[6]))
    del expected[6]
    assert read(target) == {**expected, 5: "last"}


def test_a_checkpoint_names_vectors_that_lasted_longer_and_data_files_that_are_gone(make, target, monkeypatch):
    """Their files may be old, and are kept for readers of versions of the last days."""
    monkeypatch.setattr(entries, "THIN", 1)
    sink = make(purge_percent=100, optimize_every_epochs=0)
    write_deltalake(
        str(target),
        pa.table({"id": range(100), "name": ["theirs"] * 100}),
        configuration={"delta.checkpointInterval": "10"},
    )
    for number in range(1, 10):
        commit(sink, number, upserts({number: str(number)}))
    (lasting,) = live_vectors(sink)
    for number in range(10, 20):
        commit(sink, number, upserts({number: str(number)}))
    commit(sink, 20, upserts({}, deletes=range(100)))
    for number in range(21, 30):
        commit(sink, number, upserts({number + 100: "new"}))
    kept = {Vector.logged(row["deletionVector"]).file for row in tombstones(target) if row["deletionVector"]}
    assert lasting in kept
    assert len(kept) < 5
    first = [row["path"] for row in tombstones(target) if row["path"].startswith("part-")]
    assert first  # the table's first file is gone, and its last vector with it
    assert upkeep.remove_dead_vectors(make().target(ORDERS).load()) == 0
