"""The files sink: the protocol, then what its readers see."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import shutil
import signal
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from sink_protocol import END, ORDERS, SinkProtocol, commit_in_a_process, epoch, rows, stage

from penstock import durable
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.errors import FatalError, SchemaError


@pytest.fixture
def make(tmp_path):
    def make(**options):
        sink = FilesSink(FilesSinkConfig(**{"path": str(tmp_path / "out/{topic}"), **options}))
        sink.open()
        return sink

    return make


class TestFilesSink(SinkProtocol):
    @pytest.fixture(params=["parquet", "jsonl"])
    def make(self, tmp_path, request, make):
        return lambda **options: make(format=request.param, **options)

    @pytest.fixture
    def visible(self, tmp_path):
        return lambda topic: read_published(tmp_path / "out" / topic[1:])


def plain(target: Path) -> list[int]:
    """What a reader that takes every Parquet file sees."""
    if not list(target.rglob("*.parquet")):
        return []
    query = f"select id from read_parquet('{target}/**/*.parquet', union_by_name=true) order by id"
    return [row[0] for row in duckdb.sql(query).fetchall()]


def test_plain_readers_never_see_a_staged_row(make, tmp_path):
    sink = make()
    receipts = [stage(sink, e := epoch(1), rows(0))]
    assert plain(tmp_path) == []
    sink.commit_epoch(e, receipts, END)
    assert plain(tmp_path) == list(range(10))


KILLS = {
    "before any file is moved": "files_sink._Ledger.finish = lambda self: self.newest() and os.kill(os.getpid(), 9)",
    "after the first file is moved": (
        "link, count = os.link, []\n"
        "def killing(source, place):\n"
        "    link(source, place)\n"
        "    count.append(place)\n"
        "    if len(count) == 3: os.kill(os.getpid(), 9)\n"  # the entry, its temporary name, a file
        "os.link = killing"
    ),
    "when the staged names go": (
        "fsync, unlink = os.fsync, files_sink.Path.unlink\n"
        "def killing(path, missing_ok=False):\n"
        "    unlink(path, missing_ok)\n"
        "    if path.name.endswith('.staged'): os.kill(os.getpid(), 9)\n"
        "files_sink.Path.unlink = killing"
    ),
}


@pytest.mark.parametrize("hook", KILLS.values(), ids=KILLS)
def test_an_epoch_whose_files_were_not_all_moved_is_whole_for_ledger_readers_and_finished_by_the_next_commit(
    make, tmp_path, hook
):
    sink = make()
    e = epoch(1)
    receipts = [stage(sink, e, rows(i * 10), task=i) for i in range(4)]
    assert commit_in_a_process(sink, e, receipts, hook=hook) == -signal.SIGKILL
    target = tmp_path / "out/lake/orders"
    assert sink.committed_epoch("shop", ORDERS).number == 1
    assert sorted(read_published(target).column("id").to_pylist()) == list(range(40))
    sink.commit_epoch(e, receipts, END)
    assert plain(target) == list(range(40))
    assert not list((target / "_staging").iterdir())


def test_a_run_that_takes_over_finishes_the_epoch_it_takes_over(make, tmp_path):
    sink = make()
    e = epoch(3)
    receipts = [stage(sink, e, rows(0))]
    assert commit_in_a_process(sink, e, receipts, hook=KILLS["before any file is moved"]) == -signal.SIGKILL
    heir = epoch(1, "two", adopts=frozenset({("one", 3)}))
    sink.commit_epoch(heir, [stage(sink, heir, rows(10))], END)
    assert plain(tmp_path / "out/lake/orders") == list(range(20))


def test_a_sweep_never_takes_a_committed_file_for_a_leftover(make, tmp_path):
    sink = make()
    e = epoch(1)
    receipts = [stage(sink, e, rows(0))]
    assert commit_in_a_process(sink, e, receipts, hook=KILLS["before any file is moved"]) == -signal.SIGKILL
    sink.sweep(e, [])
    assert plain(tmp_path / "out/lake/orders") == list(range(10))


def test_the_entry_is_synced_before_a_file_is_moved_and_the_moved_file_before_its_staged_name_goes(
    make, tmp_path, monkeypatch
):
    sink = make(partition_by=["p"])
    receipts = [stage(sink, e := epoch(1), rows(0, p=pa.array(["x"] * 10)))]
    events = []
    fsync, link, unlink = os.fsync, os.link, Path.unlink

    def name(path):
        return str(path).removeprefix(f"{tmp_path}/out/lake/orders").lstrip("/")

    monkeypatch.setattr(
        os, "fsync", lambda fd: (fsync(fd), events.append(f"sync {name(os.readlink(f'/proc/self/fd/{fd}'))}"))
    )
    monkeypatch.setattr(os, "link", lambda a, b: (link(a, b), events.append(f"link {name(b)}")))
    monkeypatch.setattr(
        Path, "unlink", lambda p, missing_ok=False: (events.append(f"unlink {name(p)}"), unlink(p, missing_ok))
    )
    sink.commit_epoch(e, receipts, END)
    place = receipts[0].staged[ORDERS].files[0].path
    entry = "_penstock/shop/000000000001.json"
    wanted = [
        f"link {entry}",
        "sync _penstock/shop",
        f"link {place}",
        f"sync {place}",
        "sync p=x",
        "sync ",
        f"unlink _staging/{os.path.basename(place)}.staged",
    ]
    found = iter(events)
    assert all(event in found for event in wanted), events


def test_an_entry_that_its_maker_did_not_live_to_sync_is_synced_before_the_epoch_counts_as_done(make, monkeypatch):
    sink = make()
    receipts = [stage(sink, e := epoch(1), rows(0))]
    hook = (
        "sync = durable._sync\n"
        "durable._sync = lambda path: os.kill(os.getpid(), 9) if os.path.basename(path) == 'shop' else sync(path)\n"
        "durable.make_directory = lambda path: path.mkdir(parents=True, exist_ok=True)"
    )
    assert commit_in_a_process(sink, e, receipts, hook=hook) == -signal.SIGKILL
    assert sink.committed_epoch("shop", ORDERS).number == 1
    synced = []
    fsync = durable._sync
    monkeypatch.setattr(durable, "_sync", lambda path: (fsync(path), synced.append(os.path.basename(path))))
    sink.commit_epoch(e, receipts, END)
    assert {"000000000001.json", "shop", "_penstock", "orders"} <= set(synced)


def test_a_target_that_is_dropped_while_the_pipeline_runs_stops_it(make, tmp_path):
    sink = make()
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0))], END)
    shutil.rmtree(tmp_path / "out/lake/orders")
    receipts = [stage(sink, epoch(2), rows(10))]
    with pytest.raises(FatalError, match="PEN-5010"):
        sink.commit_epoch(epoch(2), receipts, END)


def test_a_corrupt_entry_is_named(make, tmp_path):
    sink = make()
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0))], END)
    entry = tmp_path / "out/lake/orders/_penstock/shop/000000000001.json"
    entry.write_text("{")
    with pytest.raises(FatalError, match=r"PEN-5020 .*000000000001\.json is corrupt"):
        make().committed_epoch("shop", ORDERS)
    entry.write_text('{"format": 99}')
    with pytest.raises(FatalError, match="PEN-5006"):
        make().committed_epoch("shop", ORDERS)


ALL_TYPES = {
    "bool": pa.array([True, None, False]),
    "int8": pa.array([-128, None, 127], pa.int8()),
    "uint64": pa.array([0, None, 2**64 - 1], pa.uint64()),
    "float32": pa.array([1.5, None, 0.1], pa.float32()),
    "double": pa.array([1.0, None, 1e300]),
    "text": pa.array(['say "é"\\\n\t\x00\x1f\u2028😀', None, ""]),
    "large": pa.array(["a", None, "b"], pa.large_string()),
    "bytes": pa.array([b"\x00\xff", None, b""]),
    "date": pa.array([datetime.date(2026, 1, 2), None, datetime.date(1, 1, 1)]),
    "time": pa.array([1, None, 86_399_999_999], pa.time64("us")),
    "naive": pa.array([1, None, -1], pa.timestamp("us")),
    "zoned": pa.array([1, None, -1], pa.timestamp("ms", "UTC")),
    "nanos": pa.array([1, None, 1_500_000_000_123_456_789], pa.timestamp("ns")),
    "span": pa.array([1, None, -1], pa.duration("us")),
    "money": pa.array(
        [decimal.Decimal("0.10"), None, decimal.Decimal("-12345678901234567890.12")], pa.decimal128(30, 2)
    ),
    "list": pa.array([[1, None], None, []], pa.list_(pa.int32())),
    "nested": pa.array([[["a"], []], None, [None]], pa.list_(pa.list_(pa.string()))),
    "struct": pa.array(
        [{"a": 1, "b": 'x"'}, None, {"a": None, "b": None}], pa.struct([("a", pa.int32()), ("b", pa.string())])
    ),
    "map": pa.array([[('k"', 1)], None, [("a", None), ("b", 2)]], pa.map_(pa.string(), pa.int32())),
    "numbered": pa.array([[(1, "x")], None, []], pa.map_(pa.int32(), pa.string())),
}


@pytest.mark.parametrize("options", [{}, {"format": "jsonl"}, {"format": "jsonl", "compression": "gzip"}], ids=str)
def test_values_of_every_type_come_back_as_they_were(make, tmp_path, options):
    sink = make(**options)
    batch = pa.record_batch(ALL_TYPES)
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), batch, batch.slice(1, 2))], END)
    table = read_published(tmp_path / "out/lake/orders")
    for name in batch.schema.names:
        assert table.column(name).combine_chunks().to_pylist() == [
            *batch.column(name).to_pylist(),
            *batch.slice(1, 2).column(name).to_pylist(),
        ], name
        assert table.schema.field(name).type == batch.schema.field(name).type


def test_json_lines_are_strict_json_and_say_what_json_cannot_hold_in_text(make, tmp_path):
    sink = make(format="jsonl")
    batch = pa.record_batch(
        {
            "x": pa.array([float("nan"), float("inf"), float("-inf"), None, 2.0]),
            "at": pa.array([0] * 5, pa.timestamp("ms", "Europe/Berlin")),
            "money": pa.array([decimal.Decimal("1.50")] * 5),
            "raw": pa.array([b"\x00\xff"] * 5),
        }
    )
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), batch)], END)
    (file,) = (tmp_path / "out/lake/orders").glob("*.jsonl")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]
    assert [line["x"] for line in lines] == ["NaN", "Infinity", "-Infinity", None, 2.0]
    assert lines[0] | {"x": 0} == {"x": 0, "at": "1970-01-01T00:00:00.000Z", "money": "1.50", "raw": "AP8="}
    assert '"x":2.0' in file.read_text()
    query = f"select cast(x as double) from read_json('{file}', columns={{x: 'varchar'}}) where x is not null"
    assert [str(row[0]) for row in duckdb.sql(query).fetchall()] == ["nan", "inf", "-inf", "2.0"]


def test_partitions_are_read_by_hive_readers(make, tmp_path):
    sink = make(partition_by=["country"])
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0, 3, country=pa.array(["de", "a b/%", None])))], END)
    query = f"select id, country from read_parquet('{tmp_path}/out/**/*.parquet', hive_partitioning=true) order by id"
    assert duckdb.sql(query).fetchall() == [(0, "de"), (1, "a b/%"), (2, None)]


def test_small_batches_are_gathered_into_large_row_groups(make, tmp_path):
    import pyarrow.parquet as pq

    sink = make()
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), *(rows(i * 10) for i in range(100)))], END)
    (file,) = (tmp_path / "out/lake/orders").glob("*.parquet")
    assert pq.ParquetFile(file).num_row_groups == 1


def test_json_lines_refuse_a_compression_that_their_readers_lack(make):
    with pytest.raises(ValueError, match="gzip"):
        make(format="jsonl", compression="zstd")


def test_rows_are_fitted_to_the_files_that_are_there_by_policy(make, tmp_path):
    sink = make(schema_evolution="discard_value")
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0))], END)
    narrow = pa.record_batch({"id": pa.array([10], pa.int16()), "note": ["x"]})
    sink.commit_epoch(epoch(2), [stage(sink, epoch(2), narrow)], END)
    table = read_published(tmp_path / "out/lake/orders")
    assert table.schema.names == ["id"]
    assert sorted(table.column("id").to_pylist()) == list(range(11))
    frozen = make(schema_evolution="freeze")
    with pytest.raises(SchemaError, match=r"PEN-4001 .*'note'.*freeze"):
        stage(frozen, epoch(3), narrow)
