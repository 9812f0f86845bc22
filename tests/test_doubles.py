"""A column of whole numbers gets a fraction after its rows are committed: it is followed, and no number is ever rounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

from penstock.connectors.delta.config import DeltaConfig
from penstock.connectors.delta.sink import Delta
from penstock.connectors.files.sink import read_published
from penstock.errors import SchemaError
from penstock.formats.json import Json, JsonConfig
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.messages.decoding import Decoder
from penstock.testing import ForkEngine
from penstock.testing.postgres import PostgresServer

pytestmark = pytest.mark.processes

PIPELINE = """
connector_name = "doubles"
delivery = "exactly-once"

[processing]
on_error = "dead_letter"

[[schemas]]
topic = "#"
schema_type = "json"
key = ["id"]

[source]
connector = "test_messages:Listed"
path = "in.jsonl"

[sink]
{sink}
"""

DELTA = 'connector = "delta"\npath = "lake/{topic}"\n'
ICEBERG = 'connector = "iceberg"\npath = "lake/{topic}"\n'
FILES = 'connector = "files"\npath = "lake/{topic}"\n'
POSTGRES = 'connector = "postgres"\ndsn = "{dsn}"\n'
UPSERT = 'mode = "upsert"\n'
FOLLOW = {
    "delta": DELTA,
    "delta upsert": DELTA + UPSERT,
    "delta vectors": DELTA + UPSERT + 'apply = "vectors"\n',
    "delta parts": DELTA + 'partition_by = ["part"]\n',
    "iceberg": ICEBERG,
    "jsonl": FILES + 'format = "jsonl"\n',
    "postgres": POSTGRES,
    "postgres upsert": POSTGRES + UPSERT,
}
STAY = {
    "frozen": DELTA + 'schema_evolution = "freeze"\n',
    "iceberg upsert": ICEBERG + UPSERT,
    "parquet": FILES,
}


class Place:
    """A pipeline from a file of messages to one sink, and what the sink holds."""

    def __init__(self, path: Path, sink: str, server: PostgresServer | None = None) -> None:
        self.path, self.sink, self.server = path, sink, server
        self.stream = f"d{uuid4().hex[:12]}"

    def put(self, *rows: dict[str, Any]) -> None:
        with open(self.path / "in.jsonl", "a") as file:
            file.writelines(json.dumps([self.stream, None, json.dumps(row)]) + "\n" for row in rows)

    def run(self) -> None:
        file = self.path / "pipeline.toml"
        sink = self.sink.replace("{dsn}", self.server.dsn if self.server else "")
        file.write_text(PIPELINE.replace("{sink}", sink))
        supervisor.run(Pipeline.from_toml(file), ForkEngine(2), drain=True)

    def rows(self) -> dict[int, Any]:
        return {row["id"]: row["v"] for row in self.table().to_pylist()}

    def table(self) -> pa.Table:
        target = self.path / "lake" / self.stream
        if '"postgres"' in self.sink:
            assert self.server is not None
            with psycopg.connect(self.server.dsn) as connection:
                found = connection.execute(f"SELECT id, v, pg_typeof(v)::text FROM {self.stream}").fetchall()
            kind = {"double precision": pa.float64(), "bigint": pa.int64()}[found[0][2]]
            return pa.table({"id": [each[0] for each in found], "v": pa.array([each[1] for each in found], kind)})
        if '"iceberg"' in self.sink:
            catalog = SqlCatalog("default", uri=f"sqlite:///{self.path}/lake/catalog.db")
            (found,) = [each for space in catalog.list_namespaces() for each in catalog.list_tables(space)]
            return catalog.load_table(found).scan().to_arrow()
        if '"files"' in self.sink:
            return read_published(target)
        table = DeltaTable(target)
        if "vectors" in self.sink:
            from deltalake import QueryBuilder

            return pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t"))
        return table.to_pyarrow_table()

    def letters(self) -> list[dict[str, Any]]:
        path = self.path / "state" / "dead_letters"
        return DeltaTable(path).to_pyarrow_table().to_pylist() if (path / "_delta_log").exists() else []


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Place:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sink = {**FOLLOW, **STAY}[request.param]
    server = request.getfixturevalue("server") if "postgres" in sink else None
    return Place(tmp_path, sink, server)


@pytest.mark.parametrize("place", FOLLOW, indirect=True)
def test_whole_numbers_become_doubles_in_the_target(place: Place) -> None:
    place.put(*({"id": n, "v": n, "part": "x"} for n in range(50)), {"id": 50, "v": None, "part": "y"})
    place.run()
    assert place.table().schema.field("v").type == pa.int64()
    place.put({"id": 100, "v": 2.5, "part": "x"}, {"id": 101, "v": 2**53, "part": "z"})
    place.run()
    place.put({"id": 102, "v": 3, "part": "x"}, {"id": 1, "v": 0.25, "part": "x"})
    place.run()
    assert place.table().schema.field("v").type == pa.float64()
    found = place.rows()
    updated = {1: 0.25} if "upsert" in place.sink else {}
    expected = {**{n: float(n) for n in range(50)}, 50: None, 100: 2.5, 101: float(2**53), 102: 3.0, **updated}
    if not updated:
        found.pop(1), expected.pop(1)  # there twice
    assert found == expected
    assert place.letters() == []


@pytest.mark.parametrize("place", STAY, indirect=True)
def test_a_target_that_cannot_follow_keeps_whole_numbers_and_fractions_are_kept_apart(place: Place) -> None:
    place.put({"id": 1, "v": 1})
    place.run()
    place.put({"id": 2, "v": 2.5}, {"id": 3, "v": 3}, {"id": 4, "v": 5.0})
    place.run()
    place.put({"id": 5, "v": 6.5}, {"id": 6, "v": 6})
    place.run()
    assert place.rows() == {1: 1, 3: 3, 4: 5, 6: 6}
    assert place.table().schema.field("v").type == pa.int64()
    assert [letter["rule"] for letter in place.letters()] == ["column.fraction"] * 2


@pytest.mark.parametrize("place", ["delta", "delta vectors", "iceberg", "postgres"], indirect=True)
def test_a_target_that_holds_a_larger_number_is_not_rounded(place: Place) -> None:
    place.put({"id": 1, "v": 2**53 + 1}, {"id": 2, "v": 1})
    place.run()
    place.put({"id": 3, "v": 2.5}, {"id": 4, "v": 2**60 + 1})
    place.run()
    assert place.rows() == {1: 2**53 + 1, 2: 1, 4: 2**60 + 1}
    assert [letter["rule"] for letter in place.letters()] == ["column.fraction"]


@pytest.mark.parametrize("place", ["delta"], indirect=True)
class TestOneColumn:
    def test_numbers_within_lists_and_structs_stay_and_the_other_columns_follow(self, place: Place) -> None:
        place.put({"id": 1, "v": 1, "deep": {"n": [1]}})
        place.run()
        place.put({"id": 2, "v": 2.5}, {"id": 3, "v": 3, "deep": {"n": [1.5]}}, {"id": 4, "v": 4, "deep": {"n": [2]}})
        place.run()
        assert place.rows() == {1: 1.0, 2: 2.5, 4: 4.0}
        assert [letter["rule"] for letter in place.letters()] == ["column.fraction"]

    def test_a_key_stays_what_it_is(self, place: Place) -> None:
        place.put({"id": 1, "v": 1})
        place.run()
        place.put({"id": 1.5, "v": 2}, {"id": 2, "v": 2})
        place.run()
        assert place.rows() == {1: 1, 2: 2}
        assert [letter["rule"] for letter in place.letters()] == ["column.fraction"]


@pytest.mark.parametrize("vectors", [False, True])
def test_a_rewrite_that_dies_leaves_the_table_as_it_was_and_no_file_after_the_next_try(
    tmp_path: Path, vectors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    upsert = {"mode": "upsert", "key": ["id"], "apply": "vectors"} if vectors else {}
    config = DeltaConfig.model_validate({"path": str(tmp_path / "{topic}"), **upsert})
    pa_rows = pa.table({"id": [1, 2], "v": [1, 2]})
    from deltalake import write_deltalake

    write_deltalake(tmp_path / "t", pa_rows)
    sink = Delta(config)
    sink.open()
    wider = pa.schema([("id", pa.int64()), ("v", pa.float64())])
    changes = sink.diff_schemas(pa_rows.schema, wider)

    class Died(BaseException):
        pass

    def die(*_: Any) -> None:
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr("penstock.connectors.delta.doubles.recast", die)
        with pytest.raises(Died):
            sink.apply_evolution("/t", changes)
    assert DeltaTable(tmp_path / "t").to_pyarrow_table().equals(pa_rows)
    assert len(list((tmp_path / "t").glob("*.parquet"))) == 2
    sink.apply_evolution("/t", changes)
    assert DeltaTable(tmp_path / "t").to_pyarrow_table().column("v").to_pylist() == [1.0, 2.0]
    assert len(list((tmp_path / "t").glob("*.parquet"))) == 2  # the old one, for readers of the version before
    version = DeltaTable(tmp_path / "t").version()
    sink.apply_evolution("/t", changes)
    assert DeltaTable(tmp_path / "t").version() == version
    sink.close()


def test_rows_of_a_table_source_that_would_be_rounded_are_refused_before_they_are_staged(tmp_path: Path) -> None:
    from deltalake import write_deltalake

    write_deltalake(tmp_path / "t", pa.table({"v": [2**53 + 1]}))
    sink = Delta(DeltaConfig(path=str(tmp_path / "{topic}")))
    sink.open()
    changes = sink.diff_schemas(pa.schema([("v", pa.int64())]), pa.schema([("v", pa.float64())]))
    with pytest.raises(SchemaError, match="beyond 2\\^53"):
        sink.apply_evolution("/t", changes)
    sink.close()


@pytest.mark.parametrize("beside", ["1.5", "1.0", "1e300", "2e3", "-9007199254740994.0"])
def test_a_large_whole_number_is_a_row_whatever_comes_beside_it(beside: str) -> None:
    decoder = Decoder(Json(JsonConfig()), known=pa.schema([("v", pa.int64())]), pinned=frozenset({"v"}))
    large = [2**53 + 1, -(2**63), 2**63 - 1, 5]
    texts = [f'{{"v": {each}}}'.encode() for each in (large[0], beside, *large[1:])]
    envelopes = pa.record_batch({"key": pa.nulls(5, pa.binary()), "payload": pa.array(texts, pa.binary())})
    found = decoder.decode(envelopes)
    alone = decoder.decode(envelopes.slice(1, 1))
    assert found.columns.field("v").type == pa.int64()
    assert [each for at, each in zip(found.positions, found.rows["v"].to_pylist(), strict=True) if at != 1] == large
    assert found.failures.rules == alone.failures.rules
