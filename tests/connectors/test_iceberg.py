"""The Iceberg sink: the protocol, then what is particular to Iceberg's metadata and catalogs."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import ClassVar

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.expressions import EqualTo
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import create_mapping_from_schema
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import DateType, IntegerType, LongType, NestedField, StringType, UUIDType
from sink_protocol import END, ORDERS, SinkProtocol, commit_in_a_process, epoch, rows, stage, staged_places
from sqlalchemy.exc import OperationalError

from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.connectors.iceberg import catalog as catalogs
from penstock.connectors.iceberg.catalog import Catalog
from penstock.connectors.iceberg.commit import IcebergTarget
from penstock.connectors.iceberg.table import Table
from penstock.errors import ConfigError, FatalError, RetryableError, SchemaError
from penstock.schema.evolution import Policy
from penstock.sink import SinkContext, Task, TopicContext
from penstock.testing import SinkContract
from penstock.testing.postgres import PostgresServer


@pytest.fixture
def make(tmp_path):
    def make(**options):
        uri = f"sqlite:///{tmp_path}/.catalog.db"
        sink = Iceberg(IcebergConfig(**{"path": str(tmp_path / "out/{topic}"), "catalog_uri": uri, **options}))
        sink.open()
        return sink

    return make


@pytest.fixture
def catalog(tmp_path):
    """The catalog as another program sees it."""
    return SqlCatalog("default", uri=f"sqlite:///{tmp_path}/.catalog.db")


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out/lake/orders"


@pytest.fixture
def sink(make):
    return make()


@pytest.fixture
def table(catalog):
    """The table of a topic, as another program sees it now."""

    def table(topic=ORDERS):
        name = topic.removeprefix("/").replace("/", ".")
        return catalog.load_table(name if "." in name else f"default.{name}")

    return table


@pytest.fixture
def read(table):
    def read(topic=ORDERS):
        try:
            return table(topic).scan().to_arrow()
        except NoSuchTableError:
            return pa.table({"id": []})

    return read


def commit(sink, number, *batches, **more):
    e = epoch(number, **more)
    receipts = [stage(sink, e, *batches)]
    sink.commit_epoch(e, receipts, END)
    return receipts


def ids(read) -> list[int]:
    return sorted(read().column("id").to_pylist())


def metadata_files(target: Path) -> list[Path]:
    return sorted((target / "metadata").iterdir())


class TestIceberg(SinkProtocol):
    @pytest.fixture
    def visible(self, read):
        return read


def test_a_catalog_whose_tables_another_task_makes_at_the_same_time_is_used(make, monkeypatch):
    tries = []

    def late(*given):
        tries.append(given)
        if len(tries) == 1:
            raise OperationalError("CREATE TABLE iceberg_tables", {}, Exception("table iceberg_tables already exists"))
        return Catalog(*given)

    monkeypatch.setattr(catalogs, "Catalog", late)
    assert make().committed_epoch("shop", ORDERS) is None
    assert len(tries) == 2


def test_a_table_of_which_no_rows_came_is_there_and_empty(make, catalog):
    sink = make()
    schema = pa.schema([("id", pa.int64()), ("small", pa.int16())])
    sink.open(SinkContext({ORDERS: TopicContext(source_schema=schema)}))
    sink.mark_seeded(ORDERS)
    table = catalog.load_table("lake.orders").scan().to_arrow()
    assert (table.num_rows, table.column_names) == (0, ["id", "small"])
    assert sink.is_seeded(ORDERS)


class TestIcebergContract(SinkContract):
    options: ClassVar[dict[str, str]] = {}

    @pytest.fixture
    def sink(self, tmp_path):
        uri = f"sqlite:///{tmp_path}/.catalog.db"
        return Iceberg(IcebergConfig(path=f"{tmp_path}/out/{{topic}}", catalog_uri=uri, **self.options))

    @pytest.fixture
    def visible(self, read):
        return read


class TestIcebergChanges(TestIcebergContract):
    options: ClassVar[dict[str, str]] = {"mode": "changes"}


# -- the commit ------------------------------------------------------------------------------------------------------


def test_a_commit_that_lost_the_race_looks_at_the_marker_again(sink, make, read, table, target, monkeypatch):
    """Another program appends between the look and the commit, three times."""
    commit(sink, 1, rows(0))
    e = epoch(2)
    receipts = [stage(sink, e, rows(10))]
    left = [1, 2, 3]

    def interfere(name):
        if name == "commit.before" and left:
            table().append(pa.table({"id": [1000 + left.pop()]}))

    monkeypatch.setattr("penstock.failpoints.hit", interfere)
    sink.commit_epoch(e, receipts, END)
    assert ids(read) == [*range(20), 1001, 1002, 1003]
    assert make().committed_epoch("shop", ORDERS).number == 2
    assert len([path for path in metadata_files(target) if epoch(2).stem()[:12] in path.name]) == 2  # of four tries


def test_the_catalog_refuses_a_commit_when_another_one_slips_in_behind_its_checks(sink, read, table, monkeypatch):
    """The requirements are checked, the metadata is written, and only then another program commits."""
    commit(sink, 1, rows(0))
    e = epoch(2)
    receipts, done = [stage(sink, e, rows(10))], []
    write = Catalog._write_metadata

    def interfere(self, metadata, io, metadata_path):
        write(self, metadata, io, metadata_path)
        if not done:
            done.append(metadata_path)
            table().append(pa.table({"id": [1000]}))

    monkeypatch.setattr(Catalog, "_write_metadata", interfere)
    sink.commit_epoch(e, receipts, END)
    assert ids(read) == [*range(20), 1000]
    assert not Path(done[0]).exists()


def test_a_second_process_may_append_all_the_while(sink, read, tmp_path):
    script = f"""
import sys, pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
table = SqlCatalog("default", uri="sqlite:///{tmp_path}/.catalog.db").load_table("lake.orders")
number = 0
print("ready", flush=True)
while not sys.stdin.readline().startswith("stop"):
    try:
        table.append(pa.table({{"id": [-1 - number]}}))
        number += 1
    except CommitFailedException:
        table.refresh()
print(number)
"""
    commit(sink, 0, rows(0))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as other:
        assert other.stdout.readline() == "ready\n"
        for number in range(1, 11):
            other.stdin.write("go\n" * 2)
            other.stdin.flush()
            commit(sink, number, rows(number * 10))
        appended = int(other.communicate("stop\n", timeout=60)[0])
    assert appended > 0
    assert ids(read) == [*range(-appended, 0), *range(110)]


def test_a_twin_that_commits_between_the_look_and_the_commit_wins_and_nothing_is_doubled(sink, make, read, monkeypatch):
    commit(sink, 1, rows(0))
    e = epoch(2)
    receipts, twin, done = [stage(sink, e, rows(10))], make(), []

    def interfere(name):
        if name == "commit.before" and not done:
            done.append(name)
            twin.commit_epoch(e, receipts, END)

    monkeypatch.setattr("penstock.failpoints.hit", interfere)
    sink.commit_epoch(e, receipts, END)
    assert done
    assert ids(read) == list(range(20))


def test_a_table_that_is_written_all_the_time_is_a_passing_failure(sink, read, table, monkeypatch):
    commit(sink, 1, rows(0))
    e = epoch(2)
    receipts = [stage(sink, e, rows(10))]

    def interfere(name):
        if name == "commit.before":
            table().append(pa.table({"id": [0]}))

    monkeypatch.setattr("penstock.failpoints.hit", interfere)
    with pytest.raises(RetryableError, match="PEN-2005"):
        sink.commit_epoch(e, receipts, END)
    monkeypatch.undo()
    sink.commit_epoch(e, receipts, END)
    assert sorted(set(read().column("id").to_pylist())) == list(range(20))


@pytest.mark.parametrize("is_made", [True, False])
def test_a_catalog_that_fails_in_the_commit_is_asked_again(sink, read, monkeypatch, is_made):
    """Whether the commit was made is unknown: the marker tells."""
    commit(sink, 1, rows(0))
    e = epoch(2)
    receipts = [stage(sink, e, rows(10))]
    commit_table = Catalog.commit_table

    def fail(self, *args):
        if is_made:
            commit_table(self, *args)
        raise OperationalError("COMMIT", {}, Exception("the connection broke"))

    monkeypatch.setattr(Catalog, "commit_table", fail)
    with pytest.raises(RetryableError, match=r"PEN-2001 .*the connection broke"):
        sink.commit_epoch(e, receipts, END)
    assert len(ids(read)) == (20 if is_made else 10)
    monkeypatch.undo()
    sink.commit_epoch(e, receipts, END)
    assert ids(read) == list(range(20))


def test_the_client_tries_a_commit_only_once_whatever_the_table_says(sink, table, monkeypatch):
    """With the client's own retries a commit would stand on a snapshot whose marker nobody has looked at."""
    commit(sink, 1, rows(0))
    table().transaction().set_properties({"commit.retry.num-retries": "9"}).commit_transaction()
    calls = []

    def refuse(self, *args):
        calls.append(args)
        raise CommitFailedException("no")

    monkeypatch.setattr(Catalog, "commit_table", refuse)
    monkeypatch.setattr("penstock.connectors.lake.commit.TRIES", 3)
    with pytest.raises(RetryableError, match="PEN-2005"):
        commit(sink, 2, rows(10))
    assert len(calls) == 3


def test_the_marker_stands_in_the_properties_and_in_the_summary(sink, table):
    commit(sink, 7, rows(0))
    stored = json.loads(table().properties["penstock.epoch.shop"])
    assert stored == {"incarnation": "one", "number": 7, "end": END}
    summary = table().current_snapshot().summary.additional_properties
    assert {summary[f"penstock.{name}"] for name in ("pipeline", "incarnation", "epoch")} == {"shop", "one", "7"}


def test_the_marker_survives_that_all_our_snapshots_are_expired(sink, make, table, read):
    commit(sink, 1, rows(0))
    ours = table().current_snapshot().snapshot_id
    table().append(pa.table({"id": [100]}))
    table().maintenance.expire_snapshots().by_id(ours).commit()
    assert make().committed_epoch("shop", ORDERS).number == 1
    commit(make(), 1, rows(0))
    assert ids(read) == [*range(10), 100]


def test_a_commit_that_was_killed_leaves_no_manifests_once_it_is_made_good(sink, target, read):
    commit(sink, 1, rows(0))
    before = metadata_files(target)
    e = epoch(2)
    receipts = [stage(sink, e, rows(10))]
    for _ in range(2):
        assert commit_in_a_process(sink, e, receipts, "commit.before=kill") == -signal.SIGKILL
    assert len(metadata_files(target)) == len(before) + 4
    sink.commit_epoch(e, receipts, END)
    assert len(metadata_files(target)) == len(before) + 3  # the metadata, a manifest and the list of them
    assert ids(read) == list(range(20))


def test_a_table_that_was_dropped_while_the_pipeline_ran_is_told(sink, catalog):
    commit(sink, 1, rows(0))
    catalog.drop_table("lake.orders")
    with pytest.raises(FatalError, match="PEN-5010"):
        commit(sink, 2, rows(10))


def test_what_the_catalog_names_is_on_the_disk_before_it(sink, target, monkeypatch):
    """The metadata, the list of manifests and the manifests are synced before the catalog's own commit."""
    commit(sink, 1, rows(0))
    synced: set[str] = set()
    fsync, commit_row = os.fsync, []

    def record(descriptor):
        fsync(descriptor)
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    write = Catalog._write_metadata

    def written(self, metadata, io, metadata_path):
        write(self, metadata, io, metadata_path)
        commit_row.append(set(synced))

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Catalog, "_write_metadata", written)
    before = set(metadata_files(target))
    commit(sink, 2, rows(10))
    new = set(metadata_files(target)) - before
    assert len(new) == 3
    assert commit_row[0] >= {*map(str, new), str(target / "metadata")}


def test_sqlite_syncs_its_directory_too(sink):
    with sink.catalogs.here().engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 3  # EXTRA


# -- columns and their ids -------------------------------------------------------------------------------------------

KINDS = {
    "flag": pa.array([True, None]),
    "small": pa.array([-1, None], pa.int8()),
    "byte": pa.array([255, None], pa.uint8()),
    "int": pa.array([-(2**31), None], pa.int32()),
    "long": pa.array([2**63 - 1, None], pa.int64()),
    "uint": pa.array([2**32 - 1, None], pa.uint32()),
    "float": pa.array([1.5, None], pa.float32()),
    "double": pa.array([float("nan"), None], pa.float64()),
    "price": pa.array([decimal.Decimal("-1.23"), None], pa.decimal128(9, 2)),
    "big": pa.array([decimal.Decimal("1" * 30), None], pa.decimal128(38, 0)),
    "text": pa.array(["ü" * 40, None]),
    "long_text": pa.array(["x", None], pa.large_string()),
    "word": pa.array(["a", None]).dictionary_encode(),
    "bytes": pa.array([b"\xff" * 40, None]),
    "fixed": pa.array([b"1234", None], pa.binary(4)),
    "day": pa.array([datetime.date(2026, 1, 2), None]),
    "time": pa.array([datetime.time(1, 2, 3, 4), None], pa.time64("us")),
    "at": pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5, 6), None], pa.timestamp("us")),
    "at_utc": pa.array([datetime.datetime(1960, 1, 1, tzinfo=datetime.UTC), None], pa.timestamp("ms", "UTC")),
    "list": pa.array([[1, None], None], pa.list_(pa.int64())),
    "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
    "struct": pa.array([{"a": 1, "b": {"c": ["x"]}}, None]),
    "a b.c/é": pa.array([1, None]),
}


def test_every_type_comes_back_as_it_was(sink, read, table):
    batch = pa.record_batch(KINDS)
    commit(sink, 1, batch)
    assert read().select(batch.schema.names).to_pylist() == [
        {**row, "double": pytest.approx(row["double"], nan_ok=True)} for row in batch.to_pylist()
    ]
    assert len(staged_places(sink)) == 1  # the ids that the task gave are the table's


def test_what_iceberg_cannot_hold_without_loss_is_refused(sink):
    for values in (
        pa.array([2**64 - 1], pa.uint64()),
        pa.array([1], pa.timestamp("ns")),
        pa.array([1], pa.duration("s")),
    ):
        with pytest.raises(SchemaError, match=r"PEN-4002 .*'odd'"):
            stage(sink, epoch(1), pa.record_batch({"odd": values}))


def by_field_ids(table, query):
    """What DuckDB answers, which gets the list of files and the table's ids, and no names of columns."""
    files = [task.file.file_path for task in table().scan().plan_files()]
    kinds = {"long": "BIGINT", "string": "VARCHAR", "timestamp": "TIMESTAMP"}
    schema = ", ".join(
        f"{each.field_id}: {{name: '{each.name}', type: '{kinds[str(each.field_type)]}', default_value: NULL}}"
        for each in table().schema().fields
    )
    return duckdb.sql(query.format(rows=f"read_parquet({files}, schema = MAP {{{schema}}})")).fetchall()


def test_another_engine_reads_the_files_by_their_field_ids(sink, table):
    commit(sink, 1, rows(0, note=pa.array(["x"] * 10)))
    with table().update_schema() as update:
        update.rename_column("note", "remark")
    commit(sink, 2, rows(10, remark=pa.array(["y"] * 10)))
    found = by_field_ids(table, "SELECT * FROM {rows} ORDER BY id")
    assert found == [(id, "x" if id < 10 else "y") for id in range(20)]


def test_tasks_that_add_different_columns_at_once_do_not_mix_them_up(sink, read, table):
    """Both gave their column the same id: one file is written anew."""
    commit(sink, 1, rows(0))
    e = epoch(2)
    a, b = pa.array(["a"] * 10), pa.array(["b"] * 10)
    sink.commit_epoch(e, [stage(sink, e, rows(10, a=a), task=0), stage(sink, e, rows(20, b=b), task=1)], END)
    found = read().sort_by("id")
    assert found.column("a").to_pylist() == [None] * 10 + ["a"] * 10 + [None] * 10
    assert found.column("b").to_pylist() == [None] * 20 + ["b"] * 10
    live = {Path(task.file.file_path) for task in table().scan().plan_files()}
    assert staged_places(sink) == live  # nothing is left of the file that was written anew


def test_a_file_that_is_written_anew_when_the_process_is_killed_leaves_nothing(sink, read, table):
    commit(sink, 1, rows(0))
    e = epoch(2)
    a, b = pa.array(["a"] * 10), pa.array(["b"] * 10)
    receipts = [stage(sink, e, rows(10, a=a), task=0), stage(sink, e, rows(20, b=b), task=1)]
    assert commit_in_a_process(sink, e, receipts, "commit.before=kill") == -signal.SIGKILL
    assert len(staged_places(sink)) == 4
    sink.commit_epoch(e, receipts, END)
    assert ids(read) == list(range(30))
    assert staged_places(sink) == {Path(task.file.file_path) for task in table().scan().plan_files()}


def test_a_type_may_grow_within_a_task(sink, read):
    small, large = (pa.array([7] * 10, kind) for kind in (pa.int32(), pa.int64()))
    commit(sink, 1, rows(0, n=small), rows(10, n=large), rows(20, n=small))
    assert ids(read) == list(range(30))
    assert read().column("n").to_pylist() == [7] * 30


def test_types_are_widened_and_older_files_stay_as_they_are(sink, read, table):
    small = {"n": pa.int32(), "f": pa.float32(), "d": pa.decimal128(5, 2)}
    large = {"n": pa.int64(), "f": pa.float64(), "d": pa.decimal128(9, 2)}

    def batch(first, kinds):
        one = {"n": 1, "f": 1.0, "d": decimal.Decimal(1)}
        return rows(first, **{name: pa.array([one[name]] * 10, kind) for name, kind in kinds.items()})

    commit(sink, 1, batch(0, small))
    files = staged_places(sink)
    e = epoch(2)
    older, newer = stage(sink, e, batch(10, small), task=0), stage(sink, e, batch(20, large), task=1)
    sink.commit_epoch(e, [older, newer], END)
    commit(sink, 3, batch(30, small))
    assert files <= staged_places(sink)
    found = read()
    assert {name: found.schema.field(name).type for name in large} == large
    assert found.num_rows == 40
    assert {found.column(name)[row].as_py() for name in large for row in range(40)} == {1}
    assert [str(each.field_type) for each in table().schema().fields] == ["long", "long", "double", "decimal(9, 2)"]
    assert table().scan(row_filter="n = 1").to_arrow().num_rows == 40
    assert [each.field_id for each in table().schema().fields] == [1, 2, 3, 4]


@pytest.mark.parametrize("is_listed", [False, True])
def test_structs_get_new_fields_and_older_files_stay_as_they_are(sink, read, table, is_listed):
    def batch(first, value):
        return rows(first, n=pa.array([[value, None] if is_listed else value] * 10))

    commit(sink, 1, batch(0, {"a": 1}))
    with table().transaction() as transaction:
        transaction.set_properties({"schema.name-mapping.default": table().schema().name_mapping.model_dump_json()})
    files = staged_places(sink)
    e = epoch(2)
    older, newer = (
        stage(sink, e, batch(10, {"a": 2}), task=0),
        stage(sink, e, batch(20, {"a": 3, "b": {"c": "x"}}), task=1),
    )
    sink.commit_epoch(e, [older, newer], END)
    commit(sink, 3, batch(30, {"a": 4}))
    assert files <= staged_places(sink)
    found = {row["id"]: row["n"][0] if is_listed else row["n"] for row in read().to_pylist()}
    wanted = {0: {"a": 1, "b": None}, 10: {"a": 2, "b": None}, 20: {"a": 3, "b": {"c": "x"}}, 30: {"a": 4, "b": None}}
    assert {first: found[first + 9] for first in wanted} == wanted
    kept = table().schema().find_field("n.element.a" if is_listed else "n.a").field_id
    assert kept == (4 if is_listed else 3)
    assert table().schema().name_mapping == table().name_mapping()


@pytest.mark.parametrize("value", [{"b": 1}, {"a": "text"}])
def test_a_struct_that_loses_or_retypes_a_field_is_refused_by_its_name(sink, value):
    commit(sink, 1, rows(0, n=pa.array([{"a": 1}] * 10)))
    with pytest.raises(SchemaError, match=r"PEN-4001 .*'n' of /lake/orders is struct"):
        commit(sink, 2, rows(10, n=pa.array([value] * 10)))


DAYS = pa.array([0, 20_000, None, (1 << 31) - 1, -(1 << 31) + 1] * 2, pa.date32())
TIMES = pa.array([0, 20_000 * 86_400_000_000, None, (1 << 63) - 1, -(1 << 63) + 1] * 2, pa.timestamp("us"))
"""The same; the ends are the infinities."""


def shown_files(table) -> set[Path]:
    """The data files that any snapshot shows."""
    ids = [each.snapshot_id for each in table().snapshots()]
    return {Path(task.file.file_path) for id in ids for task in table().scan(snapshot_id=id).plan_files()}


def times(read) -> list[int]:
    return read().sort_by("id").column("at").cast(pa.int64()).to_pylist()


def test_dates_become_timestamps_by_a_column_in_their_place_and_files_written_anew(make, read, table):
    sink = make(keep_snapshots=3)
    commit(sink, 1, rows(0, at=DAYS, n=pa.array([1] * 10, pa.int32())))
    commit(sink, 2, rows(10, at=DAYS, n=pa.array([1] * 10, pa.int64())))
    before = read().sort_by("id")
    old = staged_places(sink)
    e = epoch(3)
    receipts = [
        stage(sink, e, rows(20, at=DAYS), rows(30, at=TIMES), rows(40, at=DAYS), task=0),
        stage(sink, e, rows(50, at=DAYS), task=1),
    ]
    sink.commit_epoch(e, receipts, END)
    assert ids(read) == list(range(60))
    assert times(read) == TIMES.cast(pa.int64()).to_pylist() * 6
    assert read().sort_by("id").column("n").to_pylist() == [1] * 20 + [None] * 40
    shown = by_field_ids(table, 'SELECT id, epoch_us("at") FROM {rows} WHERE isfinite("at") ORDER BY id')
    assert shown == [(id, (id % 5) * 20_000 * 86_400_000_000) for id in range(60) if id % 5 < 2]
    assert by_field_ids(table, 'SELECT count(*) FROM {rows} WHERE isinf("at")') == [(24,)]
    assert [(each.name, each.field_id, str(each.field_type)) for each in table().schema().fields] == [
        ("id", 1, "long"),
        ("at", 4, "timestamp"),
        ("n", 3, "long"),
    ]
    replaced, appended = table().snapshots()[-2:]
    assert [str(each.summary.operation.value) for each in (replaced, appended)] == ["replace", "append"]
    assert replaced.summary["total-records"] == "20"  # as before: readers of what is new pass over it
    assert table().scan(snapshot_id=replaced.parent_snapshot_id).to_arrow().sort_by("id") == before
    assert old <= staged_places(sink)
    for number in range(4, 8):
        commit(sink, number, rows(10 * number + 20, at=TIMES))
    assert staged_places(sink) == shown_files(table)  # the old ones went with their snapshots
    assert times(read) == TIMES.cast(pa.int64()).to_pylist() * 10


def test_a_table_that_is_written_anew_when_the_process_is_killed_is_so_once(sink, read, table):
    commit(sink, 1, rows(0, at=DAYS))
    e = epoch(2)
    receipts = [stage(sink, e, rows(10, at=TIMES))]
    assert commit_in_a_process(sink, e, receipts, "commit.before=kill") == -signal.SIGKILL
    assert read().column("at").type == pa.date32()
    for _ in range(2):
        sink.commit_epoch(e, receipts, END)
        assert times(read) == TIMES.cast(pa.int64()).to_pylist() * 2
    assert staged_places(sink) == shown_files(table)


def test_a_table_that_another_writer_changes_while_it_is_written_anew_is_written_once_more(
    sink, read, table, monkeypatch
):
    commit(sink, 1, rows(0, at=DAYS))
    batches = Table.batches

    def append():
        table().append(pa.table({"id": [1000]}))

    def tag():
        table().manage_snapshots().create_tag(table().snapshots()[0].snapshot_id, "kept").commit()

    others = iter([append, tag, lambda: None])

    def slow(self):
        yield from batches(self)
        next(others)()

    monkeypatch.setattr(Table, "batches", slow)
    commit(sink, 2, rows(10, at=TIMES))
    assert next(others, None) is None
    assert ids(read) == [*range(20), 1000]
    assert table().refs()["kept"].snapshot_id == table().snapshots()[0].snapshot_id
    assert staged_places(sink) <= shown_files(table)  # nothing is left of the tries that were in vain


def test_a_process_that_dies_behind_the_commit_of_a_table_written_anew_leaves_nothing(sink, read, table, monkeypatch):
    commit(sink, 1, rows(0, at=DAYS))
    e = epoch(2)
    receipts = [stage(sink, e, rows(10, at=TIMES), task=0), stage(sink, e, rows(20, at=DAYS), task=1)]
    assert commit_in_a_process(sink, e, receipts, "commit.before=kill") == -signal.SIGKILL
    with monkeypatch.context() as patched:
        patched.setattr(IcebergTarget, "tidy", lambda *_: pytest.fail("died"))
        with pytest.raises(pytest.fail.Exception, match="died"):
            sink.commit_epoch(e, receipts, END)
    assert len(staged_places(sink)) > len(shown_files(table))
    sink.commit_epoch(e, receipts, END)
    assert times(read) == TIMES.cast(pa.int64()).to_pylist() * 3
    assert staged_places(sink) == shown_files(table)


def test_a_date_beyond_all_timestamps_is_told_and_leaves_no_half_a_table(sink, read):
    commit(sink, 1, rows(0, at=pa.array([200_000_000] * 10, pa.date32())))
    before = staged_places(sink)
    e = epoch(2)
    receipts = [stage(sink, e, rows(10, at=TIMES))]
    with pytest.raises(FatalError, match=r"PEN-5021 a value of /lake/orders does not fit"):
        sink.commit_epoch(e, receipts, END)
    assert len(staged_places(sink)) == len(before) + 1


def test_a_column_that_takes_the_place_of_another_is_required_and_mapped_as_that_was(make, catalog, read):
    catalog.create_namespace("lake")
    fields = [NestedField(1, "id", LongType(), required=True), NestedField(2, "at", DateType(), required=True)]
    made = catalog.create_table(
        "lake.orders",
        Schema(*fields, identifier_field_ids=[1, 2]),
        location=make().config.path.replace("{topic}", "lake/orders"),
    )
    mapping = create_mapping_from_schema(made.schema()).model_dump_json()
    with made.transaction() as change:
        change.set_properties({"schema.name-mapping.default": mapping})
    sink, days, hours = make(), pa.array(range(10), pa.date32()), pa.array(range(10), pa.timestamp("us"))
    commit(sink, 1, rows(0, at=days))
    with pytest.raises(SchemaError, match="'at' of /lake/orders holds nulls, and the table forbids them"):
        commit(sink, 2, rows(10, at=TIMES))
    commit(sink, 2, rows(10, at=hours))
    table = catalog.load_table("lake.orders")
    assert [(each.name, each.field_id, each.required) for each in table.schema().fields] == [
        ("id", 1, True),
        ("at", 3, True),
    ]
    assert table.schema().identifier_field_ids == [1, 3]
    assert {name: each.field_id for each in table.name_mapping().root for name in each.names} == {"id": 1, "at": 3}
    assert ids(read) == list(range(20))


def test_structs_in_lists_keep_dates_as_they_are_since_nulls_among_them_would_be_lost(sink, read):
    tags = pa.array([None, [{"x": 1}]] * 5)
    commit(sink, 1, rows(0, at=DAYS, tags=tags))
    with pytest.raises(SchemaError, match=r"PEN-4001 .*'at' of /lake/orders is date32.*timestamp"):
        commit(sink, 2, rows(10, at=TIMES, tags=tags))


def test_rows_that_others_deleted_and_columns_that_they_sort_by_outlive_that_dates_become_timestamps(sink, read, table):
    days = pa.array(range(10), pa.date32())
    commit(sink, 1, rows(0, at=days), rows(10, at=days))
    table().delete("id < 5 or id = 12")
    with table().update_sort_order() as update:
        update.asc("at", IdentityTransform())
    commit(sink, 2, rows(20, at=TIMES))
    assert ids(read) == [*range(5, 12), *range(13, 30)]
    order = table().sort_order()
    assert [table().schema().find_column_name(each.source_id) for each in order.fields] == ["at"]


def test_dates_that_a_table_is_laid_out_by_do_not_become_timestamps(make, read):
    days = pa.array([20_000] * 10, pa.date32())
    for layout in ("at", "day(at)"):
        sink = make(partition_by=(layout,), table=f"lake.{layout[:3].strip('(')}", path=make().config.path + layout[:2])
        commit(sink, 1, rows(0, at=days))
        with pytest.raises(SchemaError, match=r"PEN-4001 .*'at' of /lake/orders is date32.*timestamp"):
            commit(sink, 2, rows(10, at=TIMES))
        commit(sink, 2, rows(10, at=days))


def test_a_type_that_cannot_be_widened_is_refused_by_its_name(sink, read):
    commit(sink, 1, rows(0, at=pa.array([0] * 10, pa.timestamp("us"))))
    with pytest.raises(SchemaError, match=r"PEN-4001 .*'at' of /lake/orders is timestamp.*string.*evolve"):
        commit(sink, 2, rows(10, at=pa.array(["now"] * 10)))
    commit(sink, 2, rows(10))
    assert ids(read) == list(range(20))
    assert read().sort_by("id").column("at").null_count == 10


def test_the_policy_decides_what_happens_to_new_columns(make, read):
    commit(make(), 1, rows(0))
    wider = rows(10, note=pa.array(["x", None] * 5))
    with pytest.raises(SchemaError, match=r"PEN-4001 .*'note' of /lake/orders is not in the target.*freeze"):
        commit(make(schema_evolution=Policy.FREEZE), 2, wider)
    commit(make(schema_evolution=Policy.DISCARD_ROW), 2, wider)
    assert ids(read) == [*range(10), *range(11, 20, 2)]
    commit(make(schema_evolution=Policy.DISCARD_VALUE), 3, rows(20, note=pa.array(["x"] * 10)))
    assert ids(read) == [*range(10), *range(11, 20, 2), *range(20, 30)]
    assert read().column_names == ["id"]


def test_rows_are_counted_that_the_policy_leaves_out(make):
    commit(make(), 1, rows(0))
    sink = make(schema_evolution=Policy.DISCARD_ROW)
    sink.begin_epoch(epoch(2), Task(0))
    written = sink.write_batch(ORDERS, rows(10, note=pa.array(["x", None] * 5)))
    assert (written.records_written, written.records_discarded) == (5, 5)


def test_a_table_of_another_program_is_taken_as_it_is(sink, catalog, read, table, tmp_path):
    schema = Schema(
        NestedField(3, "id", LongType(), required=True, doc="the key"),
        NestedField(5, "tag", UUIDType(), required=False),
        NestedField(9, "n", IntegerType(), required=False),
        identifier_field_ids=[3],
    )
    catalog.create_namespace("lake")
    catalog.create_table("lake.orders", schema, location=f"file://{tmp_path}/elsewhere")
    tag = uuid.uuid4()
    tags = pa.array([tag.bytes] * 10, pa.binary(16))
    commit(sink, 1, rows(0, tag=tags, n=pa.array([1] * 10, pa.int64())))
    fields = table().schema().fields
    assert [(each.name, str(each.field_type)) for each in fields] == [("id", "long"), ("tag", "uuid"), ("n", "long")]
    assert fields[0].required
    assert fields[0].doc == "the key"
    assert table().schema().identifier_field_ids == [1]
    assert set(read().column("tag").to_pylist()) <= {tag, tag.bytes}
    with pytest.raises(SchemaError, match=r"PEN-4001 .*'id' of /lake/orders holds nulls"):
        stage(sink, epoch(2), pa.record_batch({"id": pa.array([None], pa.int64())}))


def test_a_table_that_does_not_fit_is_refused_before_the_first_row_is_staged(sink, catalog):
    catalog.create_namespace("lake")
    schema = Schema(NestedField(1, "id", StringType(), required=False))
    catalog.create_table("lake.orders", schema, location=str(sink.targets.claim(ORDERS)))
    with pytest.raises(SchemaError, match=r"PEN-4001 .*'id' of /lake/orders is string in the target.*int64"):
        stage(sink, epoch(1), rows(0))
    assert not staged_places(sink)


def test_columns_of_the_footer_are_known_to_the_manifest(sink, table):
    commit(sink, 1, rows(5, text=pa.array(["a" * 30] * 9 + [None])))
    file = next(iter(table().scan().plan_files())).file
    assert file.record_count == 10
    assert file.file_size_in_bytes == os.path.getsize(file.file_path)
    assert from_bytes(LongType(), file.lower_bounds[1]) == 5
    assert from_bytes(LongType(), file.upper_bounds[1]) == 14
    assert file.null_value_counts == {1: 0, 2: 1}
    assert file.value_counts == {1: 10, 2: 10}
    assert len(file.upper_bounds[2]) == 16
    names = {field.name: field.metadata[b"PARQUET:field_id"] for field in pq.read_schema(file.file_path)}
    assert names == {"id": b"1", "text": b"2"}
    assert [*table().scan(row_filter="id > 100").plan_files()] == []


# -- partitions ------------------------------------------------------------------------------------------------------


def test_rows_are_laid_out_by_column_and_by_day_and_readers_skip_what_they_do_not_ask_for(make, table, target):
    sink = make(partition_by=["country", "day(ts)"])
    noon = datetime.datetime(2026, 1, 1, 12)
    days = [noon + datetime.timedelta(days=n % 3 - 1) if n % 5 else None for n in range(30)]
    batch = rows(0, 30, country=pa.array(["DE", "FR"] * 15), ts=pa.array(days, pa.timestamp("us")))
    commit(sink, 1, batch)
    assert table().scan().to_arrow().sort_by("id").to_pylist() == batch.to_pylist()
    planned = [*table().scan(row_filter="country = 'DE' and ts >= '2026-01-02T00:00:00'").plan_files()]
    assert len(planned) == 1
    assert "/data/country=DE/ts_day=2026-01-02/" in planned[0].file.file_path
    assert len([*table().scan().plan_files()]) == 8
    assert {path.name for path in (target / "data/country=FR").iterdir()} == {
        *("ts_day=2025-12-31", "ts_day=2026-01-01", "ts_day=2026-01-02", "ts_day=__HIVE_DEFAULT_PARTITION__")
    }


def test_days_before_1970_and_days_of_dates_and_of_times_with_a_zone(make, table):
    sink = make(partition_by=["day(day)", "day(at)"])
    at = pa.array([-1, 0, None], pa.timestamp("us", "UTC"))
    batch = rows(0, 3, day=pa.array([-1, 0, None], pa.date32()), at=at)
    commit(sink, 1, batch)
    assert table().scan().to_arrow().sort_by("id").to_pylist() == batch.to_pylist()
    found = {tuple(task.file.partition) for task in table().scan().plan_files()}
    assert found == {(-1, -1), (0, 0), (None, None)}


def test_partitions_that_do_not_fit_are_refused(make, catalog, tmp_path):
    for wrong in ("week(ts)", "bucket(id)", "bucket(0, id)", "day(3, ts)"):
        with pytest.raises(ConfigError, match=rf"PEN-1009 .*{re.escape(wrong)}"):
            make(partition_by=[wrong])
    for wrong in ("hour(day)", "truncate(3, day)", "year(id)"):
        with pytest.raises(SchemaError, match=rf"PEN-4002 .*{re.escape(wrong)}"):
            stage(make(partition_by=[wrong]), epoch(1), rows(0, 1, day=pa.array([0], pa.date32())))
    with pytest.raises(SchemaError, match=r"PEN-4002 .*day\(id\)"):
        stage(make(partition_by=["day(id)"]), epoch(1), rows(0))
    with pytest.raises(SchemaError, match=r"PEN-4002 .*needs country"):
        stage(make(partition_by=["country"]), epoch(1), rows(0))
    catalog.create_namespace("lake")
    bucket = PartitionField(source_id=1, field_id=1000, transform=BucketTransform(4), name="id_bucket")
    schema = Schema(NestedField(1, "id", LongType(), required=False))
    catalog.create_table("lake.orders", schema, str(tmp_path / "out/lake/orders"), PartitionSpec(bucket))
    for look in (lambda: stage(make(), epoch(1), rows(0)), lambda: make().committed_epoch("shop", ORDERS)):
        with pytest.raises(SchemaError, match=r"PEN-4002 .*bucket"):
            look()


TRANSFORMS = [
    *(
        "year(ts)",
        "month(ts)",
        "hour(ts)",
        "year(day)",
        "month(day)",
        "bucket(4, id)",
        "bucket(3, name)",
        "bucket(3, ts)",
    ),
    *("bucket(3, day)", "bucket(5, price)", "truncate(10, id)", "truncate(2, name)"),
]


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("text", TRANSFORMS)
def test_every_transform_lays_rows_out_as_the_client_would(make, table, text, mode):
    sink = make(partition_by=[text], mode=mode, **({"key": ["id"]} if mode == "upsert" else {}))
    hours = [0, -1, 3_599, -3_601, 10**9, None]
    batch = pa.record_batch(
        {
            "id": pa.array([-11, -1, 0, 9, 10, 123], pa.int64()),
            "ts": pa.array([each and each * 1_000_000 for each in hours], pa.timestamp("us")),
            "day": pa.array([0, -1, 31, -400, 20_000, None], pa.date32()),
            "name": pa.array(["", "a", "äöü", "abc", "abd", None]),
            "price": pa.array([150, -325, None, 0, 9999, 700]).cast(pa.decimal128(19, 0)).cast(pa.decimal128(21, 2)),
        }
    )
    commit(sink, 1, batch)
    commit(make(**sink.config.model_dump()), 2, batch.slice(2, 2) if mode == "upsert" else batch.slice(0, 0))
    found = table()
    assert found.scan().to_arrow().select(batch.schema.names).sort_by("id").to_pylist() == batch.to_pylist()
    (field,) = found.spec().fields
    source = found.schema().find_field(field.source_id)
    transformed = field.transform.transform(source.field_type)
    for task in found.scan().plan_files():
        raw = pq.read_table(task.file.file_path).column(source.name)
        raw = raw.cast(pa.int64()) if source.name == "ts" else raw.cast(pa.int32()) if source.name == "day" else raw
        assert {transformed(each) for each in raw.to_pylist()} == {task.file.partition[0]}
    wanted = found.scan(row_filter=EqualTo("id", 10)).to_arrow()
    assert wanted.column("id").to_pylist() == [10]


# -- upkeep ----------------------------------------------------------------------------------------------------------


def test_snapshots_metadata_and_manifests_stay_few_and_no_row_is_lost(make, table, target, read):
    sink = make(keep_snapshots=5)
    for number in range(1, 81):
        commit(sink, number, rows(number * 10))
        if number == 40:
            old = table().metadata.snapshots[0].snapshot_id
    assert ids(read) == list(range(10, 810))
    found = table()
    assert len(found.metadata.snapshots) == 5
    assert all(found.scan(snapshot_id=each.snapshot_id).to_arrow().num_rows for each in found.metadata.snapshots)
    assert old not in {each.snapshot_id for each in found.metadata.snapshots}
    files = metadata_files(target)
    assert len([path for path in files if path.name.endswith(".metadata.json")]) <= 22
    named = {m.manifest_path for each in found.metadata.snapshots for m in each.manifests(found.io)}
    lists = {each.manifest_list for each in found.metadata.snapshots}
    assert {str(path) for path in files if path.suffix == ".avro"} == named | lists
    assert len(found.current_snapshot().manifests(found.io)) < 40


def test_what_a_tag_names_is_kept(make, table, read):
    sink = make(keep_snapshots=2)
    commit(sink, 1, rows(0))
    tagged = table().current_snapshot().snapshot_id
    table().manage_snapshots().create_tag(tagged, "first").commit()
    for number in range(2, 7):
        commit(sink, number, rows(number * 10))
    assert len(table().metadata.snapshots) == 3
    assert table().scan(snapshot_id=tagged).to_arrow().num_rows == 10
    assert len(ids(read)) == 60


def test_a_table_that_forbids_it_is_not_cleaned_up(make, table):
    sink = make(keep_snapshots=1)
    commit(sink, 1, rows(0))
    table().transaction().set_properties({"gc.enabled": "false"}).commit_transaction()
    for number in range(2, 5):
        commit(sink, number, rows(number * 10))
    assert len(table().metadata.snapshots) == 4


# -- the catalog and the options -------------------------------------------------------------------------------------


def test_seeding_is_a_property_of_the_table_and_goes_with_it(make, sink, catalog, table):
    sink.mark_seeded(ORDERS)  # before there is a table
    commit(sink, 1, rows(0))
    assert table().properties["penstock.seeded"] == "true"
    assert make().is_seeded(ORDERS)
    catalog.drop_table("lake.orders")
    assert not make().is_seeded(ORDERS)


def test_topics_that_would_meet_in_one_table_are_refused(make, tmp_path):
    sink = make(path=str(tmp_path / "out/{topic}"), table="one")
    sink.committed_epoch("shop", "/a")
    with pytest.raises(ConfigError, match=r"PEN-1011 .*default\.one"):
        sink.committed_epoch("shop", "/b")


def test_tables_are_named_by_the_template(make, catalog):
    sink = make(table="lake.raw.{topic}")
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0), topic="/shop/orders")], END)
    assert catalog.load_table("lake.raw.shop.orders").scan().to_arrow().num_rows == 10


def test_by_default_the_catalog_is_a_file_above_the_tables(tmp_path):
    sink = Iceberg(IcebergConfig(path=f"{tmp_path}/lake/{{topic}}"))
    sink.open()
    commit(sink, 1, rows(0))
    found = SqlCatalog("default", uri=f"sqlite:///{tmp_path}/lake/catalog.db").load_table("lake.orders")
    assert found.scan().to_arrow().num_rows == 10


def test_settings_that_cannot_be_honoured_are_refused(make):
    with pytest.raises(ConfigError, match="PEN-1003"):
        make(key=["id"])
    with pytest.raises(ConfigError, match=r"PEN-1009 .*mysql"):
        make(catalog_uri="mysql://host/db")
    with pytest.raises(ConfigError, match="PEN-1003"):
        make(catalog_uri="nonsense")
    with pytest.raises(ConfigError, match="PEN-1003") as refused:
        make(catalog_uri="postgresql://me:geheim@host/db")
    assert "geheim" not in str(refused.value)


def test_a_catalog_that_cannot_be_reached_is_told_without_its_password(make, monkeypatch):
    monkeypatch.setenv("CATALOG_PASSWORD", "geheimnis")
    uri = "postgresql://me@127.0.0.1:1/none"
    sink = make(catalog_uri=uri, catalog_password={"env": "CATALOG_PASSWORD"})
    with pytest.raises(FatalError, match="PEN-5001") as refused:
        sink.committed_epoch("shop", ORDERS)
    assert "geheimnis" not in str(refused.value)


# -- a catalog in PostgreSQL -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with PostgresServer() as server:
        yield server


class TestIcebergInPostgres(SinkContract):
    @pytest.fixture
    def own(self):
        """All tests share one database, in which each has a catalog of its own: names of directories come again."""
        return uuid.uuid4().hex

    @pytest.fixture
    def sink(self, tmp_path, server, own):
        return Iceberg(IcebergConfig(path=f"{tmp_path}/out/{{topic}}", catalog_uri=server.dsn, catalog=own))

    @pytest.fixture
    def catalog(self, server, own):
        return SqlCatalog(own, uri=server.dsn.replace("postgresql:", "postgresql+psycopg:"))

    @pytest.fixture
    def visible(self, read):
        return read
