"""Delta tables over many epochs, and beside other writers: small files are joined, dead ones go, staged ones stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from lake_readers import table_of
from sink_protocol import END, ORDERS, commit_in_a_process, epoch, rows, stage

from penstock.connectors.delta import Delta, DeltaConfig, upkeep
from penstock.connectors.delta.table import Table


@pytest.fixture
def make(tmp_path):
    def make(**options):
        given = {"path": str(tmp_path / "out/{topic}"), "optimize_every_epochs": 1, **options}
        sink = Delta(DeltaConfig(**given))
        sink.open()
        return sink

    return make


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out/lake/orders"


def commit(sink, number, *batches):
    e = epoch(number)
    sink.commit_epoch(e, [stage(sink, e, *batches)], END)


def ids(target):
    return sorted(DeltaTable(str(target)).to_pyarrow_table().column("id").to_pylist())


def data_files(target):
    return {path.name for path in target.rglob("*.parquet") if "_delta_log" not in path.parts}


def live(target):
    return {os.path.basename(uri) for uri in DeltaTable(str(target)).file_uris()}


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_small_files_are_joined_and_no_row_is_lost_or_doubled(make, target, mode):
    sink = make(mode=mode, key=["id"] if mode == "upsert" else [])
    for number in range(1, 40):
        commit(sink, number, rows(number * 10))
    assert ids(target) == list(range(10, 400))
    assert len(live(target)) < 2 * upkeep.FAN
    assert sink.committed_epoch("shop", ORDERS).number == 39
    listed = [uri.removeprefix("file://") for uri in DeltaTable(str(target)).file_uris()]
    assert duckdb.sql(f"select count(*), count(distinct id) from read_parquet({listed})").fetchall() == [(390, 390)]


def test_joining_is_no_change_of_data_to_those_who_follow_the_table(make, target):
    sink = make()
    for number in range(1, 20):
        commit(sink, number, rows(number * 10))
    joined = [entry for entry in (target / "_delta_log").glob("*.json") if '"joined"' in entry.read_text()]
    assert joined
    assert all('"dataChange":true' not in entry.read_text() for entry in joined)


def test_files_of_different_partitions_and_of_wider_columns_are_joined_as_what_they_are(make, target):
    sink = make(partition_by=["part"])
    for number in range(1, 21):
        parts = pa.array(["a", "b/c", None, "a", "b/c"])
        kind = pa.int32() if number < 5 else pa.int64()
        batch = pa.record_batch({"id": pa.array(range(number * 5, number * 5 + 5)), "part": parts})
        commit(sink, number, batch.append_column("n", pa.array([number] * 5, kind)))
    table = DeltaTable(str(target)).to_pyarrow_table().to_pylist()
    assert len(live(target)) <= 3 * (upkeep.FAN + 1)
    assert {row["id"]: (row["n"], row["part"]) for row in table} == {
        id: (id // 5, ["a", "b/c", None, "a", "b/c"][id % 5]) for id in range(5, 105)
    }


def test_tables_with_deletion_vectors_are_left_as_they_are(make, target):
    settings = {"delta.enableDeletionVectors": "true"}
    DeltaTable.create(str(target), pa.schema([("id", pa.int64())]), configuration=settings)
    sink = make()
    for number in range(1, 15):
        commit(sink, number, rows(number * 10))
    assert len(live(target)) == 14


@pytest.mark.parametrize(
    "options", [{}, {"mode": "upsert", "key": ["id"], "apply": "vectors"}], ids=["append", "vectors"]
)
@pytest.mark.parametrize(
    "deed", [lambda table: table.optimize.compact(), lambda table: table.delete("id < 15")], ids=["compact", "delete"]
)
def test_a_compaction_that_others_began_before_small_files_were_joined_doubled_their_rows(make, target, options, deed):
    sink = make(**options)
    for number in range(1, upkeep.FAN):
        commit(sink, number, rows(number * 10))
    theirs = DeltaTable(str(target))
    commit(sink, upkeep.FAN, rows(80))  # joins all files
    assert len(live(target)) == 1
    with pytest.raises(CommitFailedError, match="Metadata changed"):
        deed(theirs)
    assert sorted(table_of(target).column("id").to_pylist()) == list(range(10, 90))
    theirs = DeltaTable(str(target))
    theirs.delete("id < 15")
    commit(sink, upkeep.FAN + 1, rows(90))
    assert sorted(table_of(target).column("id").to_pylist()) == list(range(15, 100))


def test_a_join_that_loses_to_another_writer_leaves_nothing_and_never_fails_the_epoch(
    make, target, monkeypatch, caplog
):
    sink = make()
    for number in range(1, upkeep.FAN):
        commit(sink, number, rows(number * 10))
    monkeypatch.setattr(
        Table, "replace", lambda *_: (_ for _ in ()).throw(CommitFailedError("another writer was first"))
    )
    commit(sink, upkeep.FAN, rows(80))
    assert "postponed" in caplog.text
    assert data_files(target) == live(target)
    monkeypatch.undo()
    commit(sink, upkeep.FAN + 1, rows(90))
    assert len(live(target)) == 1
    assert ids(target) == list(range(10, 100))


@pytest.mark.parametrize("where", ["table.Table.replace", "lists.drop", "upkeep.join_small_files"])
def test_a_process_killed_while_it_joins_has_committed_its_epoch_and_a_sweep_finds_the_rest(make, target, where):
    sink = make()
    for number in range(1, upkeep.FAN):
        commit(sink, number, rows(number * 10))
    e = epoch(upkeep.FAN)
    receipts = [stage(sink, e, rows(80))]
    module = "import penstock.connectors.delta.upkeep as s; " if where.startswith("upkeep") else ""
    what = "s.join_small_files" if where.startswith("upkeep") else where
    hook = f"{module}{what} = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)"
    assert commit_in_a_process(sink, e, receipts, hook=hook) == -9
    sink.commit_epoch(e, receipts, END)
    sink.sweep(e, receipts)
    assert ids(target) == list(range(10, 90))
    assert live(target) <= data_files(target)
    dead = {path for path in data_files(target) if path.startswith(e.stem())} - live(target)
    assert not [name for name in dead if f"-{upkeep.REWRITER.partition}-" in name]


def test_a_vacuum_never_looks_at_files_of_an_epoch_in_flight(make, target):
    sink = make(optimize_every_epochs=0)
    commit(sink, 1, rows(0))
    DeltaTable(str(target)).alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    receipt = stage(sink, epoch(2), rows(10))
    then = time.time() - 30 * 86400
    for path in target.rglob("*.parquet"):
        os.utime(path, (then, then))
    assert upkeep.remove_dead_files(sink.target(ORDERS).load()) == 0
    sink.commit_epoch(epoch(2), [receipt], END)
    assert ids(target) == list(range(20))


def test_dead_files_go_once_the_table_keeps_them_no_longer(make, target):
    sink = make()
    commit(sink, 1, rows(0))
    for number in range(2, upkeep.FAN + 2):
        commit(sink, number, rows(number * 10))
    dead = data_files(target) - live(target)
    assert len(dead) >= upkeep.FAN
    ours = DeltaTable(str(target))
    ours.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 1 weeks"})
    assert upkeep.remove_dead_files(sink.target(ORDERS).load()) == 0
    ours.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    assert upkeep.remove_dead_files(sink.target(ORDERS).load()) == len(dead)
    assert data_files(target) == live(target)


_OTHER = """
import sys
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
path, count = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
for n in range(count):
    mine = pa.table({"id": pa.array([-1 - n], pa.int64()), "name": ["theirs"]})
    while True:
        try:
            if n % 3 == 2:
                merge = DeltaTable(path).merge(mine, "t.id = s.id", source_alias="s", target_alias="t")
                merge.when_not_matched_insert_all().execute()
            else:
                write_deltalake(path, mine, mode="append")
            break
        except CommitFailedError:  # what it began before small files were joined is refused: docs/upserts.md
            pass
"""


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_second_process_that_appends_and_merges_all_the_time_costs_neither_of_them_a_row(make, target, mode):
    sink = make(mode=mode, key=["id"] if mode == "upsert" else [], optimize_every_epochs=4)
    commit(sink, 1, rows(0, name=pa.array(["ours"] * 10)))
    other = subprocess.Popen([sys.executable, "-c", _OTHER, str(target), "12"], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "ready\n"
    number = 1
    while other.poll() is None or number < 15:
        number += 1
        commit(sink, number, rows(number * 10 - 10, name=pa.array(["ours"] * 10)))
    assert other.returncode == 0
    assert ids(target) == [*range(-12, 0), *range(number * 10)]
    markers = [each.get("penstock", {}).get("epoch") for each in DeltaTable(str(target)).history()]
    assert sorted(filter(None, markers)) == list(range(1, number + 1)), "an epoch stands in the log once"
