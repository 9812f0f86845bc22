"""Rows that break a rule of their table in PostgreSQL are dead letters, alone and once; what depends on other rows stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest

import test_messages
from penstock.changes import CHANGE_FIELDS
from penstock.connectors.postgres import Postgres, PostgresSinkConfig
from penstock.errors import DataError, SchemaError
from penstock.runtime.epochs import State
from penstock.runtime.messages.replay import ReplayRequests, Step
from penstock.sink import Epoch, SinkContext, Task, TopicContext
from penstock.testing.postgres import PostgresServer
from test_messages import JSON, Home

GOOD = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"


class Table(Home):
    """A pipeline of messages into one table of PostgreSQL."""

    def __init__(self, path: Path, server: PostgresServer) -> None:
        super().__init__(path)
        self.name, self.dsn = f"r{uuid4().hex[:12]}", server.dsn

    def execute(self, statement: str) -> list[Any]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            found = connection.execute(statement.replace("TABLE_NAME", self.name))
            return found.fetchall() if found.description else []

    def send(self, *rows: dict[str, Any]) -> None:
        self.put(*rows, stream=self.name)

    def drain(self, **parts: Any) -> None:
        self.run(JSON.replace("/a", f"/{self.name}"), **parts)

    def ids(self) -> list[int]:
        return [id for (id,) in self.execute("SELECT id FROM TABLE_NAME ORDER BY id")]

    def dead(self) -> list[tuple[int, str]]:
        return sorted((json.loads(each["payload"])["id"], each["reason"]) for each in self.letters())


@pytest.fixture
def table(tmp_path: Path, server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    file = test_messages.PIPELINE
    sink = f'[sink]\nconnector = "postgres"\ndsn = "{server.dsn}"\n{{sink}}\n'
    monkeypatch.setattr("test_messages.PIPELINE", file[: file.index("[sink]")] + sink)
    made = Table(tmp_path, server)
    yield made
    made.execute("DROP TABLE IF EXISTS TABLE_NAME CASCADE")


RULES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("v int8 CHECK (v > 0)", {"v": 1}, {"v": -1}, "constraint"),
    ("v int8, w int8, CHECK (v < w)", {"v": 1, "w": 2}, {"v": 2, "w": 1}, "constraint"),
    ("v int8 CHECK (100 / v > 3)", {"v": 7}, {"v": 0}, "division by zero"),
    ("v int8, w int8 GENERATED ALWAYS AS (v * 2) STORED CHECK (w < 10)", {"v": 1}, {"v": 5}, "constraint"),
    ("v int8, w int8 DEFAULT 5, CHECK (v < w)", {"v": 1}, {"v": 6}, "constraint"),
    ("v char(4) CHECK (v <> 'b')", {"v": "a"}, {"v": "b   "}, "constraint"),
    ("v TABLE_NAME.word", {"v": "abc"}, {"v": "xyz"}, "check constraint"),
    ("v TABLE_NAME.words", {"v": ["abc"]}, {"v": ["xyz"]}, "check constraint"),
    ("v varchar(3)", {"v": "abc"}, {"v": "abcd"}, "4 characters"),
    ("v text NOT NULL", {"v": "a"}, {"v": None}, "null"),
    ("v text NOT NULL DEFAULT 'x'", {"v": "a"}, {"v": None}, "is null"),
    ("v uuid", {"v": GOOD}, {"v": "x"}, "invalid text representation"),
    ("v TABLE_NAME.mood", {"v": "sad"}, {"v": "glum"}, "invalid text representation"),
    ("v numeric CHECK (v < 5)", {"v": "1.5"}, {"v": "five"}, "invalid text representation"),
]


def test_a_row_that_breaks_a_rule_of_its_table_is_a_dead_letter_alone(table: Table) -> None:
    table.execute("CREATE SCHEMA TABLE_NAME")
    for kind in (
        "DOMAIN {}.word AS text CHECK (VALUE ~ '^a')",
        "DOMAIN {}.words AS text[] CHECK (VALUE[1] ~ '^a')",
        "TYPE {}.mood AS ENUM ('sad')",
    ):
        table.execute(f"CREATE {kind.format(table.name)}")
    for number, (columns, good, bad, _) in enumerate(RULES):
        table.execute(f"CREATE TABLE TABLE_NAME.t{number} (id int8, {columns})")
        for id in range(6):
            table.put({"id": id, **(bad if id in (1, 3) else good)}, stream=f"{table.name}/t{number}")
    table.run(JSON.replace("/a", f"/{table.name}/*"))
    found = {(each["topic"], json.loads(each["payload"])["id"]): each["reason"] for each in table.letters()}
    assert len(table.letters()) == 2 * len(RULES)
    for number, (columns, _, _, why) in enumerate(RULES):
        ids = table.execute(f"SELECT array_agg(id ORDER BY id) FROM TABLE_NAME.t{number}")
        assert ids == [([0, 2, 4, 5],)], columns
        assert all(why in found[f"/{table.name}/t{number}", id] for id in (1, 3)), (columns, found)
    table.execute("DROP SCHEMA TABLE_NAME CASCADE")


def test_letters_of_a_rule_come_back_once_when_the_table_takes_them(table: Table) -> None:
    table.execute("CREATE TABLE TABLE_NAME (id int8, v int8 CONSTRAINT small CHECK (v < 5)) PARTITION BY RANGE (id)")
    table.execute("CREATE TABLE TABLE_NAME_low PARTITION OF TABLE_NAME FOR VALUES FROM (0) TO (50)")
    table.send(*({"id": n, "v": n % 6} for n in range(60)))
    table.drain(partitions=2)
    refused = [n for n in range(60) if n % 6 == 5 or n >= 50]
    assert [id for id, _ in table.dead()] == refused
    assert {why.partition(": ")[2] for _, why in table.dead()} == {
        "it breaks the constraint 'small'",
        "it has no partition",
    }
    assert table.ids() == [n for n in range(60) if n not in refused]
    table.execute("ALTER TABLE TABLE_NAME DROP CONSTRAINT small")
    table.execute("CREATE TABLE TABLE_NAME_high PARTITION OF TABLE_NAME FOR VALUES FROM (50) TO (100)")
    state = State(table.path / "state", "messages").peek()
    assert state.newest is not None
    step = Step(verb="replay", incarnation=state.identity.incarnation, epoch=state.newest.number)
    ReplayRequests.of(table.path / "state").add(step)
    table.drain(partitions=2)
    assert table.ids() == list(range(60))
    assert len(table.letters()) == len(refused)


def test_many_refused_rows_before_the_first_good_one_are_letters(table: Table) -> None:
    table.execute("CREATE TABLE TABLE_NAME (id int8, v int8 CHECK (v > 0))")
    table.send(*({"id": n, "v": int(n >= 70)} for n in range(75)))
    table.drain()
    assert table.ids() == [*range(70, 75)]
    assert [id for id, _ in table.dead()] == [*range(70)]


def test_rows_by_key_are_tried_too(table: Table) -> None:
    table.execute("CREATE TABLE TABLE_NAME (id int8 PRIMARY KEY, v int8 NOT NULL DEFAULT 1 CHECK (v > 0))")
    table.send({"id": 1, "v": 1}, {"id": 2, "v": 0}, {"id": 1, "v": 5})
    table.drain(sink='mode = "upsert"\nkey = ["id"]')
    assert table.execute("SELECT id, v FROM TABLE_NAME") == [(1, 5)]
    assert [id for id, _ in table.dead()] == [2]


def test_a_rule_that_only_the_table_can_ask_is_asked_by_the_commit(table: Table) -> None:
    table.execute("CREATE TABLE TABLE_NAME (id int8, v uuid)")
    table.execute("CREATE FUNCTION f_TABLE_NAME(r TABLE_NAME) RETURNS bool LANGUAGE sql IMMUTABLE RETURN r.id < 5")
    table.execute("ALTER TABLE TABLE_NAME ADD CHECK (f_TABLE_NAME(TABLE_NAME))")
    table.send({"id": 1, "v": GOOD}, {"id": 2, "v": "x"})
    table.drain()
    assert (table.ids(), [id for id, _ in table.dead()]) == ([1], [2])
    table.send({"id": 9, "v": GOOD})
    with pytest.raises(SchemaError, match="PEN-4002"):
        table.drain()


@pytest.mark.parametrize("rule", ["UNIQUE (id)", "FOREIGN KEY (v) REFERENCES TABLE_NAME_other (id)"])
def test_a_rule_about_other_rows_stops_the_run_with_a_way_on(table: Table, rule: str) -> None:
    table.execute("CREATE TABLE TABLE_NAME_other (id int8 PRIMARY KEY)")
    table.execute(f"CREATE TABLE TABLE_NAME (id int8, v int8, CONSTRAINT other {rule})")
    table.send({"id": 1, "v": 1}, {"id": 1, "v": 1})
    with pytest.raises(SchemaError, match="PEN-4002") as error:
        table.drain()
    assert "start again" in error.value.hint
    table.execute("ALTER TABLE TABLE_NAME DROP CONSTRAINT other")
    table.drain()
    assert (table.ids(), table.letters()) == ([1, 1], [])


def test_rows_are_tried_only_where_they_are_kept_and_changes_only_if_they_bring_one(server: PostgresServer) -> None:
    name = f"r{uuid4().hex[:12]}"
    plain = pa.record_batch({"id": [1, 9, 2, 8], "v": [1, 1, 1, None]})
    changes = pa.RecordBatch.from_pylist(
        [
            {"id": 9, "_op": "d", "_position": "1"},
            {"id": 9, "v": 1, "_op": "u", "_position": "2"},
            {"id": 3, "v": None, "_op": "u", "_position": "3", "_unchanged": ["v"]},
            {"id": 3, "v": 1, "_op": "c", "_position": "4"},
        ],
        schema=pa.schema([("id", pa.int64()), ("v", pa.int64()), *CHANGE_FIELDS]),
    )
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {name} (id int8 PRIMARY KEY CHECK (id < 5), v int8 NOT NULL DEFAULT 1)")

        def refused(keeps: bool, rows: pa.RecordBatch, **options: Any) -> list[int]:
            sink = Postgres(PostgresSinkConfig(dsn=server.dsn, **options))
            sink.open(SinkContext({f"/{name}": TopicContext(keeps_refused=keeps)}))
            sink.begin_epoch(Epoch("p", "one", 1), Task(0))
            try:
                sink.write_batch(f"/{name}", rows)
            except DataError as error:
                return list(error.rows)
            finally:
                sink.close()
            return []

        assert refused(False, plain) == []
        assert refused(True, plain) == [1, 3]
        assert refused(True, changes, mode="upsert", key=["id"]) == [1]
        connection.execute(f"DROP TABLE {name}")
