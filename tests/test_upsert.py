"""What both upsert sinks check, without a sink."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.config import Config
from penstock.connectors import upsert
from penstock.errors import ConfigError, SchemaError
from penstock.schema import with_key
from penstock.schema.codec import pack_schema, unpack_schema

ORDERS = with_key(pa.schema([("id", pa.int64()), ("note", pa.string())]), ["id"])


class Options(Config):
    mode: str = "upsert"
    key: tuple[str, ...] = ()
    soft_delete: bool = False


def options(mode: str = "upsert", key: tuple[str, ...] = (), soft_delete: bool = False) -> Options:
    return Options(mode=mode, key=key, soft_delete=soft_delete)


def test_a_key_is_refused_where_nothing_is_upserted() -> None:
    with pytest.raises(ConfigError, match="`key` has no meaning"):
        upsert.check_options(options("append", key=("id",)))
    with pytest.raises(ConfigError, match="`soft_delete` has no meaning"):
        upsert.check_options(options("changes", soft_delete=True))
    upsert.check_options(options("upsert", ("id",), True))


def test_the_option_key_takes_precedence_over_the_schema() -> None:
    assert upsert.key_for(options(), "/t", ORDERS, {}) == ["id"]
    assert upsert.key_for(options(key=("note",)), "/t", ORDERS, {}) == ["note"]


@pytest.mark.parametrize("schema", [ORDERS.remove_metadata(), with_key(ORDERS, ["gone"])])
def test_rows_without_their_key_are_refused(schema: pa.Schema) -> None:
    with pytest.raises(SchemaError, match="no key that every row has"):
        upsert.key_for(options(), "/t", schema, {})


def test_a_key_that_changes_within_a_task_is_refused() -> None:
    seen: dict[str, list[str]] = {}
    upsert.key_for(options(), "/t", ORDERS, seen)
    with pytest.raises(SchemaError):
        upsert.key_for(options(), "/t", with_key(ORDERS, ["note"]), seen)


def test_a_key_that_differs_between_tasks_is_refused() -> None:
    assert upsert.one_key("/t", [["id"], ("id",)]) == ["id"]
    with pytest.raises(SchemaError, match="changes within an epoch"):
        upsert.one_key("/t", [["id"], ["note"]])


def test_a_column_of_nulls_gets_the_type_of_the_target() -> None:
    batch = pa.record_batch({"id": pa.array([1]), "note": pa.nulls(1), "new": pa.nulls(1)})
    typed = upsert.with_known_types(batch, {"id": pa.int32(), "note": pa.string()})
    assert typed.schema.types == [pa.int64(), pa.string(), pa.null()]


def test_only_changes_lose_the_columns_that_an_upsert_does_not_need() -> None:
    rows = pa.record_batch({"id": [1], "_txid": [7]})
    assert upsert.without_unused(rows) is rows
    changes = pa.record_batch({"id": [1], "_op": ["c"], "_position": ["1"], "_txid": [7]})
    assert upsert.without_unused(changes).schema.names == ["id", "_op", "_position"]


def test_a_topic_with_a_column_for_soft_deletes_is_refused() -> None:
    with pytest.raises(SchemaError, match="_deleted"):
        upsert.refuse_own_mark(options(soft_delete=True), "/t", ["id", "_deleted"])
    upsert.refuse_own_mark(options(), "/t", ["id", "_deleted"])


def test_columns_are_gone_only_if_the_source_says_what_it_has() -> None:
    assert upsert.gone_columns({"id", "b", "a"}, pa.schema([("id", pa.int64())])) == ["a", "b"]
    assert upsert.gone_columns({"id", "b"}, None) == []


def test_a_schema_survives_as_text_with_its_key() -> None:
    assert unpack_schema(pack_schema(ORDERS)).equals(ORDERS, check_metadata=True)
