"""Upserts into Iceberg tables by position deletes: what every reader sees, and what commits leave in the table."""

from __future__ import annotations

import numpy as np
import polars
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile, DataFileContent, ManifestFile
from sink_protocol import END, ORDERS, SinkProtocol, epoch, stage

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.iceberg import Iceberg, IcebergConfig, apply, upsert, worn
from penstock.connectors.lake import index
from penstock.errors import SchemaError
from penstock.schema import with_key
from penstock.testing.readers import DuckDB, is_installed

PLAIN = pa.schema([("id", pa.int64()), ("name", pa.string()), ("doc", pa.string())])


@pytest.fixture(autouse=True)
def _keeps_parts_of_few_rows(monkeypatch):
    monkeypatch.setattr(index, "STORED_ROWS", 5)


@pytest.fixture(scope="module")
def duckdb(need):
    need(is_installed(), "the DuckDB of penstock.testing.readers is not installed")
    with DuckDB() as process:
        yield process


class InTasks(Iceberg):
    """Has work for tasks in every epoch, however small it is, and a piece for each file."""

    small_rows = 0


def made(home, kind=Iceberg, **options):
    given = {"path": f"{home}/{{topic}}", "mode": "upsert", "key": ["id"], "purge_percent": 100}
    sink = kind(IcebergConfig(**{**given, **options}))
    sink.open()
    return sink


@pytest.fixture(params=[Iceberg, InTasks], ids=["driver", "tasks"])
def kind(request, monkeypatch):
    monkeypatch.setattr(apply, "PIECE_BYTES", 1)
    return request.param


@pytest.fixture
def make(tmp_path, kind):
    return lambda **options: made(tmp_path / "out", kind, **options)


@pytest.fixture
def sink(make):
    return make()


@pytest.fixture
def table(tmp_path):
    """The table as another program finds it."""
    return lambda: loaded(tmp_path / "out")


def loaded(path):
    return SqlCatalog("default", uri=f"sqlite:///{path}/catalog.db").load_table("lake.orders")


class TestIcebergUpsert(SinkProtocol):
    """The protocol of every sink that stages files; what is staged here are changes, without partitions."""

    test_every_file_of_a_receipt_and_every_directory_to_it_is_synced_before_the_receipt = None

    @pytest.fixture
    def kind(self):
        return Iceberg

    @pytest.fixture
    def visible(self, tmp_path):
        def read(topic):
            catalog = SqlCatalog("default", uri=f"sqlite:///{tmp_path}/out/catalog.db")
            name = topic[1:].replace("/", ".")
            name = name if "." in name else f"default.{name}"
            if not catalog.table_exists(name):
                return pa.table({"id": []})
            return catalog.load_table(name).scan().to_arrow()

        return read


def changes(*events, schema=PLAIN, key=("id",)):
    found = [{"_position": f"{place:06d}", **event} for place, event in enumerate(events)]
    return pa.RecordBatch.from_pylist(found, schema=with_key(pa.schema([*schema, *CHANGE_FIELDS]), key))


def upserts(rows, deletes=()):
    events = [{"_op": "u", "id": id, "name": name, "doc": f"doc {id}"} for id, name in dict(rows).items()]
    return changes(*events, *({"_op": "d", "id": id} for id in deletes))


def commit(sink, number, *batches):
    e = epoch(number)
    receipts = [stage(sink, e, *batches)]
    sink.commit_epoch(e, receipts, END)
    sink.sweep(e, receipts)


def fill(sink, count=100):
    commit(sink, 1, upserts({id: f"row {id}" for id in range(count)}))
    return {id: f"row {id}" for id in range(count)}


def names(table):
    rows = table.scan().to_arrow().to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["name"] for row in rows}


def files(table, content):
    manifests = table.current_snapshot().manifests(table.io)
    entries = [entry for each in manifests for entry in each.fetch_manifest_entry(table.io)]
    return [entry.data_file for entry in entries if entry.data_file.content == content]


def test_an_epoch_writes_its_rows_and_the_positions_of_the_old_ones(sink, table):
    state = fill(sink)
    before = {file.file_path for file in files(table(), DataFileContent.DATA)}
    commit(sink, 2, upserts({7: "new", 200: "new"}, deletes=[8]))
    state.update({7: "new", 200: "new"})
    del state[8]
    assert names(table()) == state
    data, (deletes,) = files(table(), DataFileContent.DATA), files(table(), DataFileContent.POSITION_DELETES)
    assert before < {file.file_path for file in data}
    assert sorted(file.record_count for file in data) == [2, 100]
    assert deletes.record_count == 2
    summary = table().current_snapshot().summary
    assert summary.operation.value == "overwrite"
    assert (summary["added-position-deletes"], summary["total-position-deletes"]) == ("2", "2")


IDS = st.integers(0, 40)
CHANGES = st.tuples(st.dictionaries(IDS, st.text("abc", max_size=3)), st.sets(IDS, max_size=10))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    epochs=st.lists(CHANGES.filter(any), max_size=6),
    purge=st.sampled_from([20, 100]),
    merged=st.sampled_from([2, 16]),
    kind=st.sampled_from([Iceberg, InTasks]),
)
def test_every_reader_sees_the_state_after_every_epoch(tmp_path_factory, duckdb, epochs, purge, merged, kind):
    path = tmp_path_factory.mktemp("upserts")
    sink = made(path, kind, purge_percent=purge)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upsert, "MERGED", merged)
        patch.setattr(apply, "PIECE_BYTES", 1)
        state = fill(sink, 30)
        for number, (written, deleted) in enumerate(epochs, 2):
            commit(sink, number, upserts(written, deleted - set(written)))
            state = {id: name for id, name in {**state, **written}.items() if id in written or id not in deleted}
            if number % 3 == 0:  # as after a restart
                sink = made(path, kind, purge_percent=purge)
            table = loaded(path)
            assert names(table) == state
            frame = polars.scan_iceberg(table).collect()
            assert dict(zip(frame["id"].to_list(), frame["name"].to_list(), strict=True)) == state
            found = duckdb.rows(f"select id, name from iceberg_scan('{table.metadata_location}')")
            assert {row["id"]: row["name"] for row in found} == state
            assert len(found) == len(state)


def test_delete_files_become_one_and_files_with_many_deleted_rows_are_written_again(make, table, monkeypatch):
    monkeypatch.setattr(upsert, "MERGED", 3)
    sink = make(purge_percent=10)
    state = fill(sink)
    counts = []
    for number in range(2, 14):
        commit(sink, number, upserts({number: "new"}))
        state[number] = "new"
        assert names(table()) == state
        counts.append(len(files(table(), DataFileContent.POSITION_DELETES)))
    assert max(counts) == 3
    assert counts.count(1) >= 2
    assert max(file.record_count for file in files(table(), DataFileContent.DATA)) < 100  # the first file is gone


def aged(dead):
    """Files of a thousand rows, each with so many deleted ones."""
    return [
        (upsert.TableFile(DataFile.from_args(file_path=str(place), record_count=1_000)), np.arange(count))
        for place, count in enumerate(dead)
    ]


def test_files_of_one_age_came_due_all_at_once():
    assert worn.worst_first(aged([9] * 10), 2, 10_000) == []
    files = aged([10] * 9 + [12])  # 1 % of the table and a little
    assert [file.path for file in worn.worst_first(files, 2, 10_000)] == ["9"]
    dead, written = [0] * 10, []
    for _ in range(1_000):  # epochs that each delete one row of every file
        dead = [each + 1 for each in dead]
        due = [int(file.path) for file in worn.worst_first(aged(dead), 2, 10_000)]
        written.append(len(due))
        dead = [0 if place in due else each for place, each in enumerate(dead)]
    assert max(written) <= 3
    assert len(worn.worst_first(aged([500] * 10), 2, 3_000)) == 3  # an epoch writes so many rows again


def test_every_epoch_left_a_small_file_for_ever(make, table):
    sink = make()
    state, counts = {}, []
    for number in range(1, 21):
        new = {number * 10 + place: f"row {number}" for place in range(9)}
        commit(sink, number, upserts(new))
        state.update(new)
        counts.append(len(files(table(), DataFileContent.DATA)))
    assert names(table()) == state
    assert max(counts) < 16


def test_manifests_of_which_all_files_are_gone_were_read_in_every_epoch(make, table, monkeypatch):
    sink, reads, fetch = make(keep_snapshots=20), [], ManifestFile.fetch_manifest_entry
    monkeypatch.setattr(ManifestFile, "fetch_manifest_entry", lambda *a, **k: reads.append(1) or fetch(*a, **k))
    for number in range(1, 16):
        reads.clear()
        commit(sink, number, upserts(dict.fromkeys(range(10), str(number))))
    assert len(reads) <= 10
    assert names(table()) == dict.fromkeys(range(10), "15")


def test_files_that_upserts_drop_go_with_the_last_snapshot_that_names_them(make, table, tmp_path):
    sink = make(purge_percent=5, keep_snapshots=2)
    fill(sink)
    for number in range(2, 12):
        commit(sink, number, upserts(dict.fromkeys(range(20), str(number))))
    there = {path.name for path in (tmp_path / "out/lake/orders/data").rglob("*.parquet")}
    named = {
        entry.data_file.file_path.rpartition("/")[2]
        for snapshot in table().metadata.snapshots
        for manifest in snapshot.manifests(table().io)
        for entry in manifest.fetch_manifest_entry(table().io)
    }
    assert named <= there
    assert len(there) < len(named) + 6  # what the last commits have dropped goes with the next
    assert len(names(table())) == 100


def test_unchanged_values_moves_and_rows_that_come_again(sink, table):
    fill(sink, 10)
    commit(sink, 2, changes({"_op": "u", "id": 3, "name": "new", "doc": None, "_unchanged": ["doc"]}))
    moved = {"_op": "u", "id": 50, "name": "moved", "doc": None, "_unchanged": ["doc"], "_old_key": '{"id":4}'}
    commit(sink, 3, changes(moved, {"_op": "d", "id": 5}))
    commit(sink, 4, upserts({5: "again"}))
    rows = {row["id"]: (row["name"], row["doc"]) for row in table().scan().to_arrow().to_pylist()}
    assert rows[3] == ("new", "doc 3")
    assert rows[50] == ("moved", "doc 4")
    assert 4 not in rows
    assert rows[5] == ("again", "doc 5")
    assert len(rows) == 10


def test_a_truncate_drops_every_file(sink, table):
    fill(sink)
    commit(sink, 2, upserts({7: "new"}))
    commit(sink, 3, changes({"_op": "t"}, {"_op": "c", "id": 1, "name": "after"}))
    assert names(table()) == {1: "after"}
    assert files(table(), DataFileContent.POSITION_DELETES) == []


def test_soft_delete_keeps_the_row_and_marks_it(make, table):
    sink = make(soft_delete=True)
    fill(sink, 10)
    commit(sink, 2, upserts({3: "new"}, deletes=[4]))
    rows = {row["id"]: row for row in table().scan().to_arrow().to_pylist()}
    assert len(rows) == 10
    assert (rows[4]["_deleted"], rows[4]["doc"], rows[3]["_deleted"]) == (True, "doc 4", False)
    commit(sink, 3, upserts({4: "again"}))
    assert names(table())[4] == "again"
    commit(sink, 4, changes({"_op": "t"}, {"_op": "c", "id": 1, "name": "after"}))
    rows = {row["id"]: row["_deleted"] for row in table().scan().to_arrow().to_pylist()}
    assert rows == {id: id != 1 for id in range(10)}


def test_a_row_that_moves_to_the_key_of_one_marked_as_deleted_keeps_its_own_values(make, table):
    sink = make(soft_delete=True)
    fill(sink, 4)
    commit(sink, 2, upserts({}, deletes=[1]))
    commit(sink, 3, changes({"_op": "u", "id": 1, "name": "moved", "_unchanged": ["doc"], "_old_key": '{"id":2}'}))
    rows = [row for row in table().scan().to_arrow().to_pylist() if not row["_deleted"]]
    assert {row["id"]: row["doc"] for row in rows} == {0: "doc 0", 1: "doc 2", 3: "doc 3"}


def test_a_row_leaves_its_partition(make, table):
    sink = make(partition_by=["name"])
    fill(sink, 10)
    commit(sink, 2, upserts({3: "a", 4: "a"}, deletes=[5]))
    commit(sink, 3, upserts({3: "b"}))
    assert names(table()) == {**{id: f"row {id}" for id in range(10) if id not in (3, 4, 5)}, 3: "b", 4: "a"}


def test_columns_come_and_get_wider_types(sink, table):
    narrow = pa.schema([("id", pa.int32()), ("n", pa.int32())])
    commit(sink, 1, changes(*({"_op": "c", "id": id, "n": id} for id in range(10)), schema=narrow))
    wide = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("more", pa.string())])
    commit(sink, 2, changes({"_op": "u", "id": 3, "n": 2**40, "more": "x"}, {"_op": "d", "id": 4}, schema=wide))
    rows = {row["id"]: (row["n"], row["more"]) for row in table().scan().to_arrow().to_pylist()}
    assert rows == {**{id: (id, None) for id in range(10) if id != 4}, 3: (2**40, "x")}


def test_structs_get_new_fields_and_rows_keep_what_is_unchanged_in_them(sink, table):
    narrow, wide = (pa.struct([(name, pa.int64()) for name in names]) for names in ("a", "ab"))
    schema = pa.schema([("id", pa.int64()), ("n", narrow), ("m", pa.int64())])
    commit(sink, 1, changes(*({"_op": "c", "id": id, "n": {"a": id}, "m": 0} for id in range(4)), schema=schema))
    schema = schema.set(1, pa.field("n", wide))
    new = [
        {"_op": "u", "id": 1, "n": {"a": 10, "b": 11}, "m": 1},
        {"_op": "u", "id": 2, "n": None, "m": 2, "_unchanged": ["n"]},
    ]
    commit(sink, 2, changes(*new, schema=schema))
    rows = {row["id"]: (row["n"], row["m"]) for row in table().scan().to_arrow().to_pylist()}
    assert rows == {
        **{id: ({"a": id, "b": None}, 0) for id in (0, 3)},
        1: ({"a": 10, "b": 11}, 1),
        2: ({"a": 2, "b": None}, 2),
    }


def test_others_may_append_and_delete_between_epochs_and_before_the_commit(sink, table, monkeypatch, kind):
    state = fill(sink)
    commit(sink, 2, upserts({7: "new"}))
    table().append(pa.table({"id": [1000], "name": ["theirs"], "doc": ["theirs"]}))
    table().delete("id = 60")
    where, name = (apply.Applying, "do") if kind is InTasks else (upsert.Upsert, "all_at_once")
    real, raced = getattr(where, name), []

    def run(self, *given):
        found = real(self, *given)
        if not raced:
            raced.append(table().delete("id = 61"))
        return found

    monkeypatch.setattr(where, name, run)
    commit(sink, 3, upserts({1000: "ours", 8: "new", 61: "back"}))
    assert raced
    state.update({7: "new", 8: "new", 61: "back", 1000: "ours"})
    del state[60]
    assert names(table()) == state


def test_the_index_is_only_a_cache(make, table, tmp_path):
    state = fill(make())
    commit(make(), 2, upserts({7: "two"}))
    for part in (tmp_path / "out/lake/orders/_penstock/.index").iterdir():
        part.write_bytes(part.read_bytes()[:-50])
    commit(make(), 3, upserts({7: "three"}, deletes=[8]))
    state[7] = "three"
    del state[8]
    assert names(table()) == state


def test_a_row_of_others_whose_key_is_null_was_taken_for_the_row_with_the_key_zero(make, table):
    fill(make(), 10)
    table().append(pa.table({"id": [None], "name": ["nobody's"], "doc": [""]}, PLAIN))
    commit(make(), 2, upserts({0: "two"}))
    found = {row["id"]: row["name"] for row in table().scan().to_arrow().to_pylist()}
    assert found == {**{id: f"row {id}" for id in range(10)}, 0: "two", None: "nobody's"}


def test_a_date_that_becomes_a_timestamp_is_refused(sink):
    day = pa.schema([("id", pa.int64()), ("at", pa.date32())])
    commit(sink, 1, changes({"_op": "c", "id": 1}, schema=day))
    e = epoch(2)
    when = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us"))])
    receipts = [stage(sink, e, changes({"_op": "c", "id": 2}, schema=when))]
    with pytest.raises(SchemaError, match="PEN-4001"):
        sink.commit_epoch(e, receipts, END)


def test_a_table_of_format_version_1_was_refused_by_the_client_once_its_rows_were_staged(make, table, tmp_path):
    home = tmp_path / "out"
    home.mkdir()
    catalog = SqlCatalog("default", uri=f"sqlite:///{home}/catalog.db")
    catalog.create_namespace("lake")
    old = catalog.create_table("lake.orders", PLAIN, location=f"{home}/lake/orders", properties={"format-version": "1"})
    with pytest.raises(SchemaError, match=r"PEN-4002 .*format version 1"):
        make().committed_epoch("shop", ORDERS)
    with old.transaction() as change:
        change.upgrade_table_version(2)
    sink = make()
    commit(sink, 1, upserts({1: "one"}))
    commit(sink, 2, upserts({1: "two"}))
    assert names(table()) == {1: "two"}


def test_delete_files_are_counted_by_partition(make, table, monkeypatch):
    """Each epoch leaves one in each of four partitions: all of them together would be merged in every epoch."""
    monkeypatch.setattr(upsert, "MERGED", 4)
    sink = make(partition_by=["bucket(4, id)"])
    state, counts = fill(sink), []
    for number in range(2, 8):
        new = {id: f"{number}" for id in range(20 * number - 40, 20 * number - 20) if id < 100}
        commit(sink, number, upserts(new))
        state.update(new)
        assert names(table()) == state
        counts.append(len(files(table(), DataFileContent.POSITION_DELETES)))
    assert counts[:4] == [4, 8, 12, 16]
    assert counts[4] <= 8


def test_a_large_purge_and_a_first_index_are_work_for_tasks(make, table, kind):
    """And what an epoch on a known table needs is not, nor is an epoch that is there."""
    sink = make(purge_percent=10)
    fill(sink)
    if kind is Iceberg:
        sink.small_rows = 60
    commit(sink, 2, upserts(dict.fromkeys(range(12), "new")))
    e = epoch(3)
    receipts = [stage(sink, e, upserts({50: "new"}))]
    planned = sink.plan_apply(e, "/lake/orders", receipts)
    assert [len(work.files) for work in planned if work.purges] == [1]
    assert [work.share for work in planned if work.share is not None] == [0]
    sink.commit_epoch(e, receipts, END)
    assert sum(file.record_count for file in files(table(), DataFileContent.DATA)) == 100  # no row is there twice
    assert not sink.plan_apply(e, "/lake/orders", receipts)
    commit(sink, 4, upserts({50: "newer"}))
    e = epoch(5)
    receipts = [stage(sink, e, upserts({50: "newest"}))]
    assert bool(sink.plan_apply(e, "/lake/orders", receipts)) is (kind is InTasks)


def test_nothing_is_left_of_staged_changes(sink, tmp_path):
    fill(sink)
    commit(sink, 2, upserts({7: "new"}))
    hidden = tmp_path / "out/lake/orders/_penstock"
    assert list(hidden.rglob("*.parquet")) == []
