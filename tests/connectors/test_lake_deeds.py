"""Each thing that can happen to a table with deletion vectors or position deletes, as engines that are not ours read it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import partial

import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from lake_readers import table_of
from pyiceberg.catalog.sql import SqlCatalog
from sink_protocol import END, ORDERS, epoch, stage

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.delta import Delta, DeltaConfig, marking
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.connectors.lake import index
from penstock.schema import with_key
from penstock.testing import spark_reader
from penstock.testing.readers import DuckDB, is_installed

PLAIN = (("id", pa.int64()), ("name", pa.string()), ("doc", pa.string()))


def changes(*events, columns=PLAIN):
    found = [{"_position": f"{place:06d}", **event} for place, event in enumerate(events)]
    schema = with_key(pa.schema([*columns, *CHANGE_FIELDS]), ["id"])
    return pa.RecordBatch.from_pylist(found, schema=schema)


def written(**rows):
    return [{"_op": "u", "id": int(id[1:]), "name": name, "doc": f"doc of {name}"} for id, name in rows.items()]


class Orders:
    """A table of ten rows, one of them marked as deleted, and what is done to it."""

    def __init__(self, home, **options):
        self.home = home
        self.sink = self.made({"mode": "upsert", "key": ["id"], "purge_percent": 100, **options})
        self.sink.open()
        self.number = 0
        self.apply(*written(**{f"r{id}": f"row {id}" for id in range(10)}))
        self.apply(*written(r9="new"))

    def apply(self, *events, columns=PLAIN, before=None):
        """One epoch; `before` is done between its plan and its commit."""
        self.number += 1
        e = epoch(self.number)
        receipts = [stage(self.sink, e, changes(*events, columns=columns))]
        assert not self.sink.plan_apply(e, ORDERS, receipts)
        if before is not None:
            before()
        self.sink.commit_epoch(e, receipts, END)
        self.sink.sweep(e, receipts)

    @property
    def rows(self):
        return {id: (f"row {id}", f"doc of row {id}") for id in range(9)} | {9: ("new", "doc of new")}


class InDelta(Orders):
    def made(self, options):
        self.path = self.home / "lake/orders"
        return Delta(DeltaConfig(path=f"{self.home}/{{topic}}", apply="vectors", **options))

    @property
    def table(self):
        return DeltaTable(str(self.path))

    def compact(self):
        self.table.optimize.compact()

    def append(self, rows):
        write_deltalake(self.table, rows, mode="append")

    def vacuum(self):
        self.table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    def readers(self, duckdb):
        yield table_of(self.path).to_pylist()
        yield polars.scan_delta(str(self.path)).collect().to_dicts()
        yield duckdb.rows(f"select * from delta_scan('{self.path}')")

    @property
    def in_spark(self):
        return f"delta.`{self.path}`"


class InIceberg(Orders):
    def made(self, options):
        self.name = self.home.name
        where = {"path": f"{self.home}/{{topic}}", "catalog": "files", "table": f"{self.name}.orders"}
        self.uri = f"sqlite:///{self.home.parent}/catalog.db"
        return Iceberg(IcebergConfig(**where, catalog_uri=self.uri, **options))

    @property
    def table(self):
        return SqlCatalog("files", uri=self.uri).load_table(f"{self.name}.orders")

    def compact(self):
        self.table.overwrite(self.table.scan().to_arrow())

    def append(self, rows):
        self.table.append(rows)

    def vacuum(self):
        self.table.maintenance.expire_snapshots().older_than(datetime.now(UTC)).commit()

    def readers(self, duckdb):
        yield self.table.scan().to_arrow().to_pylist()
        yield polars.scan_iceberg(self.table).collect().to_dicts()
        yield duckdb.rows(f"select * from iceberg_scan('{self.table.metadata_location}')")

    @property
    def in_spark(self):
        return f"files.{self.name}.orders"


def unchanged(make):
    it = make()
    it.apply({"_op": "u", "id": 4, "name": "renamed", "_unchanged": ["doc"]})
    return it, it.rows | {4: ("renamed", "doc of row 4")}


def moved(make):
    it = make()
    it.apply({"_op": "u", "id": 40, "name": "moved", "_old_key": json.dumps({"id": 4}), "_unchanged": ["doc"]})
    expected = it.rows | {40: ("moved", "doc of row 4")}
    del expected[4]
    return it, expected


def deleted_and_again(make):
    it = make()
    it.apply({"_op": "d", "id": 4}, {"_op": "d", "id": 5})
    it.apply(*written(r4="again"), {"_op": "d", "id": 6}, *written(r6="at once"))
    expected = it.rows | {4: ("again", "doc of again"), 6: ("at once", "doc of at once")}
    del expected[5]
    return it, expected


def truncated(make):
    it = make()
    it.apply({"_op": "t"}, *written(r4="after"))
    it.apply(*written(r5="later"))
    return it, {4: ("after", "doc of after"), 5: ("later", "doc of later")}


def soft_deleted(make):
    it = make(soft_delete=True)
    it.apply({"_op": "d", "id": 4}, {"_op": "d", "id": 5})
    it.apply(*written(r5="back"))
    return it, {id: (*row, id == 4) for id, row in (it.rows | {5: ("back", "doc of back")}).items()}


def widened(make):
    it = make()
    with_more = (*PLAIN, ("amount", pa.int32()))
    it.apply({**written(r4="four")[0], "amount": 4}, columns=with_more)
    it.apply({**written(r5="five")[0], "amount": 2**40}, columns=(*PLAIN, ("amount", pa.int64())))
    amounts = {4: 4, 5: 2**40}
    state = it.rows | {4: ("four", "doc of four"), 5: ("five", "doc of five")}
    return it, {id: (*row, amounts.get(id)) for id, row in state.items()}


def compacted(make):
    it = make()
    it.apply(*written(r4="four"), before=it.compact)
    return it, it.rows | {4: ("four", "doc of four")}


def appended(make):
    it = make()
    theirs = pa.table({"id": [50, 51], "name": ["theirs"] * 2, "doc": ["their doc"] * 2})
    it.apply(*written(r4="four"), *written(r50="ours"), before=lambda: it.append(theirs))
    ours = {4: ("four", "doc of four"), 50: ("ours", "doc of ours")}
    return it, it.rows | ours | {51: ("theirs", "their doc")}


def vacuumed(make):
    it = make()
    it.apply(*written(r4="four"), before=it.vacuum)
    it.vacuum()
    return it, it.rows | {4: ("four", "doc of four")}


DEEDS = [unchanged, moved, deleted_and_again, truncated, soft_deleted, widened, compacted, appended, vacuumed]


@pytest.fixture(autouse=True)
def _marks_every_file(monkeypatch):
    monkeypatch.setattr(marking, "MARKED_ROWS", 0)
    monkeypatch.setattr(index, "STORED_ROWS", 5)


@pytest.fixture(scope="module")
def duckdb(need):
    need(is_installed(), "the DuckDB of penstock.testing.readers is not installed")
    with DuckDB() as process:
        yield process


def same(found, expected):
    rows = [tuple(row.values()) for row in found]
    assert len(rows) == len(expected)
    assert {id: tuple(rest) for id, *rest in rows} == expected


@pytest.mark.parametrize("kind", [InDelta, InIceberg], ids=["delta", "iceberg"])
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_other_engines_read_what_has_happened(tmp_path, duckdb, deed, kind):
    it, expected = deed(partial(kind, tmp_path / "out"))
    for found in it.readers(duckdb):
        same(found, expected)


@pytest.mark.soak
def test_spark_reads_what_has_happened(tmp_path, need, java):
    need(spark_reader.is_installed(), "not installed: python -m penstock.testing.spark_reader")
    done = [
        deed(partial(kind, tmp_path / f"{kind.__name__}_{deed.__name__}"))
        for deed in DEEDS
        for kind in (InDelta, InIceberg)
        if (kind, deed) != (InIceberg, soft_deleted)  # Spark refuses its column, as the page says
    ]
    found = spark_reader.rows([f"select * from {it.in_spark}" for it, _ in done], tmp_path)
    for rows, (it, expected) in zip(found, done, strict=True):
        assert rows, it.home.name
        same(rows, expected)
