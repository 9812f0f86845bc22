"""The files source over an object store."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import store
from penstock.config import Config
from penstock.connectors.files import Files, FilesConfig, Inventoried
from penstock.errors import ConfigError, FatalError, RangeGone
from penstock.source import ReadLimit, SourceBatch, SourceContext
from penstock.testing import SourceContract

LIMIT = ReadLimit(rows=1_000_000)


class Options(Config):
    storage_options: store.StorageOptions


@pytest.fixture
def landing(s3):
    return store.at(f"{s3.bucket()}/landing", Options(storage_options=s3.options()).storage_options)


def put(place, first, count=10, groups=4):
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": pa.array(range(first, first + count), pa.int64())}), buffer, row_group_size=groups)
    store.put(place, buffer.getvalue().to_pybytes())


class TestFilesSource(SourceContract):
    @pytest.fixture
    def source(self, landing):
        for number in range(4):
            put(landing / f"{number}.parquet", 10 * number)
        options = landing.store.options
        return Files(FilesConfig(path=f"{landing}/*.parquet", storage_options=options, scan_interval_ms=0))

    @pytest.fixture
    def expected(self):
        return [{"id": number} for number in range(40)]

    @pytest.fixture
    def more(self, landing):
        return lambda: put(landing / "9.parquet", 90)

    @pytest.fixture
    def wrong(self, s3):
        return Files(FilesConfig(path="s3://no-such-bucket/*.parquet", storage_options=s3.options()))


@pytest.fixture
def make(landing, tmp_path):
    def make(path="", **more):
        config = FilesConfig(
            path=path or str(landing), storage_options=landing.store.options, scan_interval_ms=0, **more
        )
        source = Files(config)
        source.open(SourceContext(state_dir=tmp_path))
        return source

    return make


def plan(source, start=None):
    start = start or Inventoried()
    end = source.latest(start, LIMIT)
    return end, source.split(start, end)


def rows(source, splits):
    return [row["id"] for split in splits for each in source.read(split) if isinstance(each, SourceBatch)
            for row in each.records.to_pylist()]  # fmt: skip


def test_prefixes_globs_and_single_objects_of_all_formats(make, landing):
    put(landing / "a.parquet", 0)
    store.put(landing / "b.jsonl", b"".join(json.dumps({"id": each}).encode() + b"\n" for each in (100, 101)))
    store.put(landing / "deep" / "c.csv", b"id\n200\n201\n")
    store.put(landing / "_ignored" / "d.csv", b"id\n300\n")
    store.put(landing / "note.txt", b"no rows")
    for options, expected in [
        ({}, [*range(10), 100, 101]),
        ({"recursive": True}, [*range(10), 100, 101, 200, 201]),
        ({"path": f"{landing}/**/*.csv"}, [200, 201]),
        ({"path": f"{landing}/b.jsonl"}, [100, 101]),
    ]:
        source = make(**options)
        assert sorted(rows(source, plan(source)[1])) == expected


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_an_object_that_is_replaced_between_plan_and_read_is_never_read_for_the_planned_one(make, landing, format):
    place, texts = landing / f"a.{format}", [b'{"id": 1}\n' * 10, b'{"id": 2}\n' * 10]
    put(place, 0) if format == "parquet" else store.put(place, texts[0])
    source = make()
    _, splits = plan(source)
    put(place, 50) if format == "parquet" else store.put(place, texts[1])
    with pytest.raises(RangeGone, match="changed after it was planned"):
        rows(source, splits)


def test_an_object_that_is_replaced_between_two_row_groups_gives_no_mixed_rows(make, landing):
    count = 300_000
    put(landing / "a.parquet", 0, count, groups=count // 4)
    source = make()
    _, splits = plan(source)
    reading = source.read(splits[0])
    first = next(reading)
    put(landing / "a.parquet", 10_000_000, count, groups=count // 4)
    seen = [first]
    try:
        seen += [each for each in reading if isinstance(each, SourceBatch)]
    except RangeGone:
        pass
    else:  # all that was asked for had been fetched before
        assert sum(each.num_rows for each in seen) == count
    assert max(max(each.records.column("id").to_pylist()) for each in seen) < count


def test_a_planned_object_that_is_gone_is_a_gone_range(make, landing):
    put(landing / "a.parquet", 0)
    source = make()
    end, splits = plan(source)
    store.delete([landing / "a.parquet"])
    with pytest.raises(RangeGone, match="is gone"):
        rows(source, splits)
    with pytest.raises(RangeGone, match="is gone"):
        source.split(Inventoried(), end)


def test_more_objects_than_a_page_lists_are_all_found_once(make, landing):
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda each: store.put(landing / f"{each:05d}.csv", b"id\n%d\n" % each), range(1100)))
    source = make(columns={"id": "int64"}, max_files_per_epoch=600)
    seen, start = [], Inventoried()
    while True:
        end, splits = plan(source, start)
        if end == start:
            break
        seen += [split.path.rpartition("/")[2] for split in splits]
        start = end
    assert sorted(seen) == [f"{each:05d}.csv" for each in range(1100)]


def test_what_cannot_be_used_is_refused(make, tmp_path, s3):
    with pytest.raises(FatalError, match="PEN-5050"):
        make(path="s3://no-such-bucket/x")
    source = Files(FilesConfig(path=str(tmp_path), storage_options={"region": "eu"}))
    with pytest.raises(ConfigError, match=r"PEN-1003 .*`storage_options` are for object stores"):
        source.open()


def test_no_secret_is_in_a_split(make, landing):
    put(landing / "a.parquet", 0)
    source = make()
    _, (split, *_) = plan(source)
    assert "not-a-secret" not in repr(split)
