"""The Delta sink: the protocol, then what is particular to Delta's log."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Field, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError
from deltalake.schema import PrimitiveType
from deltalake.transaction import AddAction
from sink_protocol import END, ORDERS, SinkProtocol, commit_in_a_process, epoch, rows, stage

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.errors import ConfigError, DataError, FatalError, RetryableError, SchemaError
from penstock.schema import ChangeKind, SchemaEvolvable
from penstock.sink import SinkContext, TopicContext


@pytest.fixture
def make(tmp_path):
    def make(**options):
        sink = Delta(DeltaConfig(**{"path": str(tmp_path / "out/{topic}"), **options}))
        sink.open()
        return sink

    return make


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out/lake/orders"


@pytest.fixture
def sink(make):
    return make()


def commit(sink, number, *batches, **more):
    e = epoch(number, **more)
    receipts = [stage(sink, e, *batches)]
    sink.commit_epoch(e, receipts, END)
    return receipts


def read(target) -> pa.Table:
    return DeltaTable(str(target)).to_pyarrow_table() if (target / "_delta_log").exists() else pa.table({"id": []})


class TestDelta(SinkProtocol):
    @pytest.fixture
    def visible(self, tmp_path):
        return lambda topic: read(tmp_path / "out" / topic[1:])


def test_a_table_of_which_no_rows_came_is_there_and_empty(make, target):
    sink = make(mode="upsert", key=["id"], soft_delete=True)
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("note", pa.string()), *CHANGE_FIELDS])
    sink.open(SinkContext({ORDERS: TopicContext(source_schema=schema)}))
    sink.mark_seeded(ORDERS)
    table = DeltaTable(str(target)).to_pyarrow_table()
    assert (table.num_rows, table.column_names) == (0, ["id", "note", "_deleted"])
    assert sink.is_seeded(ORDERS)


def test_the_client_refuses_a_commit_at_a_version_that_is_taken(sink, target):
    """What the whole sink stands on: with no retries the client does not put a commit on top of another."""
    commit(sink, 1, rows(0))
    tables = [DeltaTable(str(target)) for _ in range(2)]
    properties = CommitProperties(max_commit_retries=0, app_transactions=[Transaction("test", 1)])
    size = os.path.getsize(next(target.glob("*.parquet")))
    for position, table in enumerate(tables):
        add = AddAction(f"{position}.parquet", size, {}, 0, True, "{}")
        if position:
            with pytest.raises(CommitFailedError):
                table.create_write_transaction([add], "append", table.schema(), commit_properties=properties)
        else:
            table.create_write_transaction([add], "append", table.schema(), commit_properties=properties)
    assert DeltaTable(str(target)).version() == tables[0].version() + 1


def test_a_commit_that_lost_the_race_looks_at_the_marker_again(sink, make, target, monkeypatch):
    """Another writer commits between the look and the commit, three times."""
    commit(sink, 1, rows(0))
    e = epoch(2)
    receipts = [stage(sink, e, rows(10))]
    left = [1, 2, 3]

    def interfere(name):
        if name == "commit.before" and left:
            write_deltalake(str(target), pa.table({"id": [1000 + left.pop()]}), mode="append")

    monkeypatch.setattr("penstock.failpoints.hit", interfere)
    sink.commit_epoch(e, receipts, END)
    assert sorted(read(target).column("id").to_pylist()) == [*range(20), 1001, 1002, 1003]
    assert make().committed_epoch("shop", ORDERS).number == 2


def test_a_twin_that_commits_between_the_look_and_the_commit_wins_and_nothing_is_doubled(
    sink, make, target, monkeypatch
):
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
    assert sorted(read(target).column("id").to_pylist()) == list(range(20))


def test_a_table_that_is_written_all_the_time_is_a_passing_failure(sink, target, monkeypatch):
    commit(sink, 1, rows(0))
    e = epoch(2)
    receipts = [stage(sink, e, rows(10))]

    def interfere(name):
        if name == "commit.before":
            write_deltalake(str(target), pa.table({"id": [0]}), mode="append")

    monkeypatch.setattr("penstock.failpoints.hit", interfere)
    with pytest.raises(RetryableError, match="PEN-2005"):
        sink.commit_epoch(e, receipts, END)
    monkeypatch.undo()
    sink.commit_epoch(e, receipts, END)
    assert sorted(set(read(target).column("id").to_pylist())) == list(range(20))


def test_the_sidecar_of_a_commit_that_lost_is_ignored(sink, make, target):
    commit(sink, 1, rows(0))
    loser = epoch(9, "two", adopts=frozenset({("one", 1)}))
    receipts = [stage(sink, loser, rows(50))]
    assert commit_in_a_process(make(), loser, receipts, "commit.before=kill") == -signal.SIGKILL
    commit(sink, 2, rows(10))
    names = sorted(os.listdir(target / "_penstock/shop"))
    assert [name[:12] for name in names] == ["000000000001", "000000000002", "000000000002"]
    marker = make().committed_epoch("shop", ORDERS)
    assert (marker.incarnation, marker.number, marker.end) == ("one", 2, END)


def test_of_two_tries_at_one_commit_the_sidecar_of_the_one_in_the_log_counts(sink, make, target):
    """Two copies of a state directory try the same epoch with other ends, and a directory is listed in any order."""
    commit(sink, 1, rows(0), attempt="77777777")
    hidden = target / "_penstock/shop"
    won = (hidden / "000000000001-77777777.json").read_text()
    lost = json.dumps(json.loads(won) | {"end": {"s": "another end"}})
    for dead in ("00000000", "44444444", "aaaaaaaa", "ffffffff"):  # before and after it, by name and by time
        (hidden / f"000000000001-{dead}.json").write_text(lost)
    (hidden / "000000000001-77777777.json").unlink()
    (hidden / "000000000001-77777777.json").write_text(won)
    for dead in ("11111111", "eeeeeeee"):
        (hidden / f"000000000001-{dead}.json").write_text(lost)
    assert make().committed_epoch("shop", ORDERS).end == END


def test_the_marker_survives_a_checkpoint_and_the_removal_of_older_entries(sink, make, target):
    for number in range(1, 4):
        commit(sink, number, rows(number * 10))
    DeltaTable(str(target)).create_checkpoint()
    for entry in (target / "_delta_log").glob("*.json"):
        if not entry.name.endswith("3.json"):
            entry.unlink()
    fresh = make()
    assert fresh.committed_epoch("shop", ORDERS).number == 3
    commit(fresh, 4, rows(40))
    assert sorted(read(target).column("id").to_pylist()) == list(range(10, 50))
    with pytest.raises(SchemaError):  # the schema stands in the checkpoint only
        stage(fresh, epoch(5), pa.record_batch({"id": ["x"]}))


def test_checkpoints_are_made_at_the_tables_interval_and_synced(make, target, monkeypatch):
    DeltaTable.create(str(target), rows(0).schema, configuration={"delta.checkpointInterval": "5"})
    sink, synced = make(), []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (fsync(fd), synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
    )
    for number in range(1, 13):
        commit(sink, number, rows(number * 10))
    made = {path.name for path in (target / "_delta_log").glob("*.checkpoint.parquet")}
    assert len(made) == 2
    assert made | {"_last_checkpoint"} <= set(synced)
    assert read(target).num_rows == 120


def test_old_entries_go_after_a_checkpoint_and_the_marker_stays(make, target):
    keep = {"delta.checkpointInterval": "5", "delta.logRetentionDuration": "interval 0 seconds"}
    DeltaTable.create(str(target), rows(0).schema, configuration=keep)
    sink = make()
    for number in range(1, 14):
        commit(sink, number, rows(number * 10))
    assert len(list((target / "_delta_log").glob("*.json"))) < 14
    assert make().committed_epoch("shop", ORDERS).number == 13
    assert read(target).num_rows == 130


@pytest.mark.parametrize("number", [1, 2])
def test_a_lost_sidecar_is_said_and_not_guessed_at(sink, make, target, number):
    for each in range(1, number + 1):
        commit(sink, each, rows(each * 10))
    shutil.rmtree(target / "_penstock/shop")
    with pytest.raises(FatalError, match="PEN-5020"):
        make().committed_epoch("shop", ORDERS)


def test_a_corrupt_sidecar_is_named(sink, make, target):
    commit(sink, 1, rows(0))
    (sidecar,) = (target / "_penstock/shop").iterdir()
    sidecar.write_text("{")
    with pytest.raises(FatalError, match=rf"PEN-5020 .*{sidecar.name} is corrupt"):
        make().committed_epoch("shop", ORDERS)


def test_a_created_table_without_a_commit_has_no_marker(sink, make, target):
    DeltaTable.create(str(target), rows(0).schema)
    assert make().committed_epoch("shop", ORDERS) is None
    commit(sink, 1, rows(0))
    assert read(target).num_rows == 10


@pytest.mark.parametrize("replacement", [None, rows(0)])
def test_a_table_that_is_dropped_while_the_pipeline_runs_stops_it(sink, target, replacement):
    for number in (1, 2):
        commit(sink, number, rows(number * 10))
    shutil.rmtree(target)
    if replacement is not None:
        for _ in range(5):
            write_deltalake(str(target), pa.table(replacement), mode="append")
    with pytest.raises(FatalError, match="PEN-5010"):
        commit(sink, 3, rows(30))


def test_a_table_that_is_dropped_before_the_first_commit_of_a_run_stops_it(sink, make, target):
    commit(sink, 1, rows(0))
    next_run = make()
    assert next_run.committed_epoch("shop", ORDERS).number == 1
    shutil.rmtree(target)
    with pytest.raises(FatalError, match="PEN-5010"):
        commit(next_run, 2, rows(10))


def test_the_entry_and_the_sidecar_are_synced_before_the_commit_returns(sink, target, monkeypatch):
    commit(sink, 1, rows(0))
    e = epoch(2)
    receipts = [stage(sink, e, rows(10))]
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), synced.append(os.readlink(f"/proc/self/fd/{fd}"))))
    before = []
    monkeypatch.setattr("penstock.failpoints.hit", lambda name: before.extend(synced))
    sink.commit_epoch(e, receipts, END)
    sidecars = str(target / "_penstock/shop")
    assert sidecars in before
    assert any(path.startswith(f"{sidecars}/.000000000002-") for path in before)
    log = target / "_delta_log"
    after = synced[len(before) :]
    (entry,) = (place for place, path in enumerate(after) if path.startswith(str(log / f".{2:020d}.json.")))
    assert str(log) in after[entry:], "the entry is synced under another name, and then its directory"


def test_epochs_with_the_same_columns_are_added_without_the_client_and_other_writers_are_seen(
    sink, make, target, monkeypatch
):
    for number in (1, 2):
        commit(sink, number, rows(10 * number))
    reads = []
    update = DeltaTable.update_incremental
    monkeypatch.setattr(DeltaTable, "update_incremental", lambda self: (reads.append(1), update(self)))
    for number in (3, 4):
        commit(sink, number, rows(10 * number))
    assert reads == [], "nobody else has written"
    for number in (5, 6):  # small files are joined
        commit(sink, number, rows(10 * number))
    foreign = DeltaTable(str(target)).to_pyarrow_table().slice(0, 2)
    write_deltalake(str(target), foreign, mode="append")
    commit(sink, 7, rows(70))
    commit(make(), 8, rows(80))  # another process of ours
    commit(sink, 8, rows(80))
    DeltaTable(str(target)).alter.add_columns([Field("more", PrimitiveType("string"))])
    commit(sink, 9, rows(90))
    commit(sink, 10, rows(100))
    table = DeltaTable(str(target))
    assert table.to_pyarrow_table().num_rows == 2 + sum(rows(10 * number).num_rows for number in range(1, 11))
    assert sink.committed_epoch("shop", ORDERS).number == 10
    assert table.history(1)[0]["penstock"] == {"pipeline": "shop", "epoch": 10}


def test_an_entry_that_its_maker_did_not_live_to_sync_is_synced_before_the_epoch_counts_as_done(
    sink, target, monkeypatch
):
    commit(sink, 1, rows(0))
    e = epoch(2)
    receipts = [stage(sink, e, rows(10))]
    hook = "table.Table.sync = lambda self, version: os.kill(os.getpid(), 9)"
    assert commit_in_a_process(sink, e, receipts, hook=hook) == -signal.SIGKILL
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), synced.append(os.readlink(f"/proc/self/fd/{fd}"))))
    sink.commit_epoch(e, receipts, END)
    assert {str(target / "_delta_log"), str(target / "_delta_log" / f"{2:020d}.json")} <= set(synced)
    assert read(target).num_rows == 20


def test_a_process_killed_after_the_table_was_created_or_widened_is_completed(sink, target):
    e = epoch(1)
    receipts = [stage(sink, e, rows(0))]
    hook = "table.Table.commit = lambda *_: os.kill(os.getpid(), 9)"
    assert commit_in_a_process(sink, e, receipts, hook=hook) == -signal.SIGKILL
    assert DeltaTable(str(target)).version() == 0
    sink.commit_epoch(e, receipts, END)
    e = epoch(2)
    receipts = [stage(sink, e, rows(10, note=pa.array(["x"] * 10)))]
    assert commit_in_a_process(sink, e, receipts, hook=hook) == -signal.SIGKILL
    assert "note" in DeltaTable(str(target)).to_pyarrow_table().column_names
    sink.commit_epoch(e, receipts, END)
    assert read(target).num_rows == 20


def test_a_file_of_the_table_is_never_swept(sink, target):
    e = epoch(1)
    receipts = [stage(sink, e, rows(0))]
    hook = "lists.drop = lambda *_: os.kill(os.getpid(), 9)"
    assert commit_in_a_process(sink, e, receipts, hook=hook) == -signal.SIGKILL
    sink.sweep(e, [])
    assert read(target).num_rows == 10


def test_types_that_fit_without_loss_are_kept_and_read_back(sink, target):
    utc = datetime.UTC
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)
    columns = {
        "bool": pa.array([True, None]),
        "u8": pa.array([255, None], pa.uint8()),
        "u16": pa.array([65535, None], pa.uint16()),
        "u32": pa.array([2**32 - 1, None], pa.uint32()),
        "f16": pa.array([1.5, None], pa.float16()),
        "f64": pa.array([float("nan"), None]),
        "text": pa.array(["é\x00", None], pa.large_string()),
        "view": pa.array(["x", None], pa.string_view()),
        "word": pa.array(["x", None]).dictionary_encode(),
        "raw": pa.array([b"\x00", None], pa.binary(1)),
        "date": pa.array([at.date(), None]),
        "naive_ms": pa.array([1, None], pa.timestamp("ms")),
        "naive": pa.array([at, None], pa.timestamp("us")),
        "zoned": pa.array([at.replace(tzinfo=utc), None], pa.timestamp("us", "Europe/Berlin")),
        "money": pa.array([decimal.Decimal("1.10"), None], pa.decimal128(38, 2)),
        "list": pa.array([[1, None], None], pa.large_list(pa.uint8())),
        "struct": pa.array([{"a": [{"b": "x"}]}, None]),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
        "empty": pa.nulls(2),
    }
    commit(sink, 1, pa.record_batch(columns))
    table = read(target)
    assert table.column("f64").to_pylist()[1] is None
    assert table.column("f64")[0].as_py() != table.column("f64")[0].as_py()
    for name, column in columns.items():
        if name not in ("f64", "empty"):
            assert table.column(name).to_pylist() == column.to_pylist(), name
    kinds = {name: str(table.schema.field(name).type) for name in ("u8", "u16", "u32", "naive", "zoned")}
    assert kinds == {
        "u8": "int16",
        "u16": "int32",
        "u32": "int64",
        "naive": "timestamp[us]",
        "zoned": "timestamp[us, tz=UTC]",
    }
    commit(sink, 2, pa.record_batch(columns))
    assert read(target).num_rows == 4


@pytest.mark.parametrize(
    "kind",
    [pa.uint64(), pa.time64("us"), pa.duration("s"), pa.timestamp("ns"), pa.decimal256(50, 2), pa.list_(pa.uint64())],
    ids=str,
)
def test_types_that_delta_cannot_hold_are_refused_by_name(sink, kind):
    with pytest.raises(SchemaError, match=r"PEN-4002 the column 'odd' of /lake/orders is"):
        stage(sink, epoch(1), pa.record_batch({"id": pa.array([1]), "odd": pa.nulls(1, kind)}))


def nested(levels):
    """A column that is nested so deep that its row has this many levels."""
    kind, value = pa.int64(), 1
    for _ in range(levels - 1):
        kind, value = pa.struct([("a", kind)]), {"a": value}
    return pa.record_batch({"id": pa.array([1], pa.int64()), "deep": pa.array([value], kind)})


def test_the_deepest_column_that_is_taken_can_be_read_and_the_next_is_refused(sink, target):
    """One of 43 levels, added to a table, would make all of it unreadable."""
    commit(sink, 1, rows(0))
    commit(sink, 2, nested(42))
    assert read(target).num_rows == 11
    with pytest.raises(SchemaError, match=r"PEN-4002 .*nested more than 42 levels"):
        stage(sink, epoch(3), nested(43))


def test_statistics_let_readers_skip_files_and_never_rows(sink, target):
    """A filter at each bound finds the rows that a full scan finds."""
    at = [datetime.datetime(2026, 1, 1, 0, 0, 0, micros) for micros in (1, 999_999, 500)]
    values = {
        "n": pa.array([1, 5, None]),
        "x": pa.array([1.5, float("nan"), 2.5]),
        "y": pa.array([1.5, 2.5, None]),
        "text": pa.array(["a" * 40, "z" * 40, None]),
        "at": pa.array(at, pa.timestamp("us")),
        "zoned": pa.array(at, pa.timestamp("us", "UTC")),
        "day": pa.array([datetime.date(2026, 1, d) for d in (1, 2, 3)]),
        "money": pa.array([decimal.Decimal("1.10")] * 3),
        "raw": pa.array([b"a", b"b", None]),
        "flag": pa.array([True, False, None]),
    }
    commit(sink, 1, pa.record_batch(values))
    (add,) = pa.table(DeltaTable(str(target)).get_add_actions(flatten=True)).to_pylist()
    assert add["num_records"] == 3
    assert (add["null_count.n"], add["min.n"], add["max.n"]) == (1, 1, 5)
    assert add.get("max.x") is None
    assert add["max.y"] == 2.5
    table = DeltaTable(str(target)).to_pyarrow_dataset()
    full = pa.table(values)
    for name in ("n", "y", "text", "at", "zoned", "day"):
        for value in full.column(name):
            for condition in (ds.field(name) <= value, ds.field(name) >= value, ds.field(name) == value):
                if value.is_valid:
                    assert table.count_rows(filter=condition) == full.filter(condition).num_rows, (name, value)
    (line,) = [
        json.loads(text)["add"]
        for text in (target / "_delta_log" / f"{1:020d}.json").read_text().splitlines()
        if '"add"' in text
    ]
    stats = json.loads(line["stats"])
    assert stats["minValues"]["text"] == "a" * 32
    assert stats["maxValues"]["text"] > "z" * 40
    assert stats["minValues"]["at"] == "2026-01-01T00:00:00.000"
    assert stats["maxValues"]["zoned"] == "2026-01-01T00:00:01.000Z"


def test_partition_columns_stand_in_the_log_and_not_in_the_files(make, target):
    sink = make(partition_by=["day"])
    commit(sink, 1, rows(0, 2, day=pa.array([datetime.date(2026, 1, 1), None])))
    files = sorted(target.rglob("*.parquet"))
    assert [file.parent.name for file in files] == ["day=2026-01-01", "day=__HIVE_DEFAULT_PARTITION__"]
    assert pq.read_schema(files[0]).names == ["id"]
    assert DeltaTable(str(target)).metadata().partition_columns == ["day"]


def test_an_empty_text_in_a_partition_column_is_refused_and_not_turned_into_null(make):
    with pytest.raises(DataError, match="empty text"):
        stage(make(partition_by=["p"]), epoch(1), rows(0, 2, p=pa.array(["", "x"])))


@pytest.mark.parametrize(
    ("existing", "options"),
    [
        ({"partition_by": ["id"]}, {}),
        ({}, {"partition_by": ["p"]}),
        ({"configuration": {"delta.columnMapping.mode": "name"}}, {}),
        ({"configuration": {"delta.setTransactionRetentionDuration": "interval 1 day"}}, {}),
    ],
    ids=str,
)
def test_an_existing_table_that_does_not_fit_is_refused(make, target, existing, options):
    batch = rows(0, p=pa.array(["x"] * 10))
    DeltaTable.create(str(target), batch.schema, **existing)
    sink = make(**options)
    with pytest.raises(SchemaError, match="PEN-4002"):
        commit(sink, 1, batch)
    assert DeltaTable(str(target)).version() == 0


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("feature", ["rowTracking", "clustering", "typeWidening", "inCommitTimestamp", "columnMapping"])
def test_a_table_with_a_feature_that_cannot_be_kept_to_is_refused_with_what_to_do(make, target, feature, mode):
    """Tables as other engines make them: the feature stands in the protocol, what it says in the metadata."""
    DeltaTable.create(str(target), rows(0).schema)
    entry = target / "_delta_log" / f"{0:020d}.json"
    features = {"writerFeatures": [feature], "minWriterVersion": 7, "minReaderVersion": 1}
    if feature in ("typeWidening", "columnMapping"):
        features |= {"readerFeatures": [feature], "minReaderVersion": 3}
    actions = [json.loads(line) for line in entry.read_text().splitlines() if '{"protocol"' not in line]
    for action in actions:
        if "metaData" in action and feature == "columnMapping":
            mapped = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}
            column = {"name": "id", "type": "long", "nullable": True, "metadata": mapped}
            action["metaData"]["schemaString"] = json.dumps({"type": "struct", "fields": [column]})
            action["metaData"]["configuration"] = {"delta.columnMapping.mode": "name"}
    entry.write_text("\n".join(json.dumps(each) for each in [*actions, {"protocol": features}]))
    sink = make(mode=mode, key=["id"] if mode == "upsert" else [])
    with pytest.raises(SchemaError, match=rf"PEN-4002 .*{feature}(.|\n)*another table"):
        sink.committed_epoch("shop", ORDERS)  # before the first write
    with pytest.raises(SchemaError, match="PEN-4002"):
        commit(sink, 1, rows(0))
    assert DeltaTable(str(target)).version() == 0


def test_rows_can_be_appended_to_a_table_with_deletion_vectors(sink, target):
    DeltaTable.create(str(target), rows(0).schema, configuration={"delta.enableDeletionVectors": "true"})
    commit(sink, 1, rows(0))
    assert DeltaTable(str(target)).count() == 10


def test_columns_that_must_not_be_null_are_kept_so(sink, target):
    DeltaTable.create(str(target), pa.schema([pa.field("id", pa.int64(), nullable=False), ("note", pa.string())]))
    commit(sink, 1, rows(0))
    for bad in (pa.record_batch({"note": ["x"]}), pa.record_batch({"id": pa.array([None], pa.int64())})):
        with pytest.raises(SchemaError, match=r"'id' .*forbids"):
            stage(sink, epoch(2), bad)


def test_columns_that_differ_in_case_only_are_refused(sink):
    commit(sink, 1, rows(0))
    with pytest.raises(SchemaError, match="case only"):
        stage(sink, epoch(2), pa.record_batch({"ID": [1]}))


def test_the_sink_can_follow_a_schema_on_request(sink, target):
    commit(sink, 1, rows(0))
    assert isinstance(sink, SchemaEvolvable)
    changes = sink.diff_schemas(sink.schema(ORDERS), pa.schema([("note", pa.large_string()), ("n", pa.uint8())]))
    assert [(change.kind, change.column) for change in changes] == [
        (ChangeKind.DROPPED, "id"),
        (ChangeKind.ADDED, "note"),
        (ChangeKind.ADDED, "n"),
    ]
    assert sink.evaluate_evolution(changes)
    sink.apply_evolution(ORDERS, changes)
    assert [str(kind) for kind in sink.schema(ORDERS).types] == ["int64", "string", "int16"]
    assert not sink.evaluate_evolution(sink.diff_schemas(sink.schema(ORDERS), pa.schema([("id", pa.string())])))
    commit(sink, 2, rows(10, note=pa.array(["x"] * 10)))
    assert read(target).num_rows == 20


def test_a_table_whose_columns_another_writer_replaced_is_looked_at_again(sink, target):
    commit(sink, 1, rows(0))
    stage(sink, epoch(2), rows(10))
    write_deltalake(str(target), pa.table({"id": ["text"]}), mode="overwrite", schema_mode="overwrite")
    with pytest.raises(SchemaError, match=r"'id' .*string"):
        stage(sink, epoch(2), rows(10))


def test_a_column_without_time_zone_can_be_added_to_a_table_that_has_none(sink, target):
    commit(sink, 1, rows(0))
    commit(sink, 2, rows(10, at=pa.array([1] * 10, pa.timestamp("us"))))
    assert read(target).column("at").null_count == 10


def test_the_log_tells_which_epoch_a_version_is(sink, target):
    commit(sink, 1, rows(0))
    assert DeltaTable(str(target)).history(1)[0]["penstock"] == {"pipeline": "shop", "epoch": 1}


def test_addresses_of_disks_are_taken_and_those_of_unknown_stores_refused(make, tmp_path, target):
    for remote in ("ftp://bucket/{topic}", "file://host/{topic}"):
        with pytest.raises(ConfigError, match=r"(?s)PEN-1009 .*local"):
            make(path=remote)
    with pytest.raises(ConfigError, match=r"PEN-1003 .*`storage_options` are for object stores"):
        make(storage_options={"region": "x"})
    sink = make(path=f"file://{tmp_path}/out/{{topic}}")
    commit(sink, 1, rows(0))
    commit(sink, 2, rows(10))
    assert read(target).num_rows == 20


@pytest.mark.parametrize(
    "values",
    [
        pa.array([decimal.Decimal("-1.75"), decimal.Decimal("12345678901234567890123456789012345.75")]),
        pa.array([False, True]),
        pa.array(["decimal:1", "\U0010ffff" * 40]),
    ],
    ids=lambda values: str(values.type),
)
def test_a_filter_finds_every_value_by_its_statistics(sink, target, values):
    """The client takes a bound that is missing for one that nothing satisfies, so that none may be missing."""
    commit(sink, 1, pa.record_batch({"id": [1, 2], "v": values}))
    table = DeltaTable(str(target)).to_pyarrow_dataset()
    for number, value in enumerate(values, 1):
        assert table.to_table(filter=ds.field("v") == value).column("id").to_pylist() == [number]


def test_tasks_work_in_a_process_forked_after_the_client_was_used(sink, target):
    """The client's threads do not survive a fork; tasks of an engine that forks must not need them."""
    commit(sink, 1, rows(0))
    assert sink.committed_epoch("shop", ORDERS).number == 1
    e, handed = epoch(2), Path(f"{target}.receipt")
    pid = os.fork()
    if pid == 0:
        try:
            handed.write_text(stage(sink, e, rows(10)).model_dump_json())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    sink.commit_epoch(e, [sink.receipt_type.model_validate_json(handed.read_text())], END)
    assert read(target).num_rows == 20


def test_a_topic_that_the_client_would_read_as_another_is_refused(make):
    sink = make(path="{topic}")
    with pytest.raises(ConfigError, match=r"PEN-1010 .*%20"):
        sink.committed_epoch("shop", "/a%20b")
    with pytest.raises(ConfigError, match=r"PEN-1010 .*backslash"):
        stage(make(), epoch(1), rows(1), topic="/a\\b")
    assert sink.committed_epoch("shop", "/50%") is None
    with pytest.raises(ConfigError, match=r"PEN-1003 .*`path`"):
        make(path="lake%20/{topic}")
