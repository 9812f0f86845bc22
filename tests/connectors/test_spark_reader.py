"""Spark, by the code of Delta and Iceberg, reads what upserts leave: deletion vectors and position deletes."""

import random

import pyarrow as pa
import pytest
from sink_protocol import END, epoch, stage

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.delta import Delta, DeltaConfig, marking
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.schema import with_key
from penstock.testing import spark_reader

pytestmark = pytest.mark.soak

SCHEMA = with_key(pa.schema([("id", pa.int64()), ("name", pa.string()), *CHANGE_FIELDS]), ["id"])


def applied(sink, expected, number, drawn):
    """One epoch of random changes, in the sink and in a dict."""
    if number == 1:
        changes = {each: f"first-{each}" for each in range(2_000)}
    else:
        changes = {drawn.randrange(2_100): f"epoch-{number}-{place}" for place in range(100)}
        changes |= dict.fromkeys(drawn.sample(sorted(expected), 20))
    events = [{"_op": "u" if name else "d", "id": key, "name": name} for key, name in changes.items()]
    rows = [{"_position": f"{number:03d}-{place:06d}", **event} for place, event in enumerate(events)]
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    sink.commit_epoch(epoch(number), [stage(sink, epoch(number), batch)], END)
    expected.update(changes)
    for key in [key for key, name in expected.items() if name is None]:
        del expected[key]


def test_spark_reads_deletion_vectors_and_position_deletes(tmp_path, need, java, monkeypatch):
    monkeypatch.setattr(marking, "MARKED_ROWS", 0)  # small files too
    need(spark_reader.is_installed(), "not installed: python -m penstock.testing.spark_reader")
    common = {"mode": "upsert", "key": ["id"], "purge_percent": 100}
    path = f"{tmp_path}/{{topic}}"
    sinks = {
        "delta": Delta(DeltaConfig(path=path, apply="vectors", **common)),
        "iceberg": Iceberg(
            IcebergConfig(
                path=f"{tmp_path}/ice/{{topic}}",
                catalog="files",
                catalog_uri=f"sqlite:///{tmp_path}/catalog.db",
                **common,
            )
        ),
    }
    expected = {}
    for name, sink in sinks.items():
        sink.open()
        expected[name], drawn = {}, random.Random(7)
        for number in range(1, 13):
            applied(sink, expected[name], number, drawn)
        sink.close()
    assert list((tmp_path / "lake/orders").glob("deletion_vector_*.bin"))
    assert list((tmp_path / "ice/lake/orders/data").glob("*-deletes-*.parquet"))
    tables = [f"delta.`{tmp_path}/lake/orders`", "files.lake.orders"]
    queries = [text.format(table) for table in tables for text in ("select * from {}", "select count(*) as n from {}")]
    delta, counted, iceberg, counted_too = spark_reader.rows(queries, tmp_path)
    for rows, name, count in ((delta, "delta", counted), (iceberg, "iceberg", counted_too)):
        assert {row["id"]: row["name"] for row in rows} == expected[name]
        assert len(rows) == len(expected[name]) == count[0]["n"]
