"""The query that `penstock init --from-danube` makes of field mappings: it reads payloads as Danube Connect's sink does."""

from __future__ import annotations

import json
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.from_danube import convert

FIELDS = {
    "id": ("order_id", "Int64", False),
    "customer.name": ("name", "Utf8", True),
    "customer.it's": ("odd`name", "Utf8", True),
    "at": ("at", "Timestamp", True),
    "seen": ("seen", "Timestamp", True),
    "raw": ("raw", "Binary", True),
    "big": ("big", "UInt64", True),
    "paid": ("paid", "Boolean", True),
    "price": ("price", "Float64", True),
}
NOON = datetime(2026, 1, 2, 12, 0, 0, 250_000)
WHOLE = {
    "id": 1, "customer": {"name": "Ada", "it's": 7}, "at": "2026-01-02T12:00:00.25Z", "big": 2**53 + 1, "paid": True,
    "seen": round(NOON.replace(tzinfo=UTC).timestamp() * 1_000_000), "raw": "00ff", "price": 0.5, "more": [1],
}  # fmt: skip


@pytest.fixture(scope="module")
def sql(tmp_path_factory: pytest.TempPathFactory) -> str:
    fields = [
        {"json_path": path, "column": column, "data_type": kind, "nullable": nullable}
        for path, (column, kind, nullable) in FIELDS.items()
    ]
    listed = ", ".join(
        "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in each.items()) + " }" for each in fields
    )
    text = 'connector_name = "x"\n[deltalake]\nstorage_backend = "s3"\n[[deltalake.routes]]\nfrom = "/shop/orders"\n'
    text += f'subscription = "s"\nto = "lake/orders"\ninclude_danube_metadata = true\nfield_mappings = [{listed}]\n'
    file: Path = tmp_path_factory.mktemp("moved") / "connector.toml"
    file.write_text(text)
    return str(tomllib.loads(convert(file).text(file.name))["routes"][0]["sql"])


def rows(spark: Any, sql: str, *payloads: str) -> list[dict[str, Any]]:
    values = [(payload, "/shop/orders", NOON) for payload in payloads]
    spark.createDataFrame(values, "value string, _stream string, _timestamp timestamp").createTempView("input")
    try:
        return [row.asDict() for row in spark.sql(sql).collect()]
    finally:
        spark.catalog.dropTempView("input")


def test_members_become_columns_and_what_is_not_there_is_null(spark: Any, sql: str) -> None:
    whole, bare = rows(spark, sql, json.dumps(WHOLE), '{"id": 2, "price": null}')
    metadata = json.loads(whole.pop("_danube_metadata"))
    said = {"topic": "/shop/orders", "timestamp": WHOLE["seen"] // 1000, "timestamp_iso": "2026-01-02T12:00:00.250Z"}
    assert metadata == said
    assert whole == {
        "order_id": 1, "name": "Ada", "odd`name": "7", "at": NOON, "seen": NOON, "raw": b"\x00\xff", "big": 2**53 + 1,
        "paid": True, "price": 0.5,
    }  # fmt: skip
    del bare["_danube_metadata"]
    assert bare.pop("order_id") == 2
    assert set(bare.values()) == {None}


@pytest.mark.parametrize(
    "payload", ["no JSON", "{}", '{"id": null}', '{"id": "x"}', '{"id": 1, "at": "noon"}', '{"id": 1, "raw": "zz"}']
)
def test_what_does_not_fit_is_an_error_of_its_row(spark: Any, sql: str, payload: str) -> None:
    with pytest.raises(Exception, match=r"CAST_INVALID|CONVERSION|USER_RAISED"):
        rows(spark, sql, payload)
