"""Polling SQL tables by a cursor: pages with ties, rows that commit late, soft deletes, on SQLite and on PostgreSQL."""

from __future__ import annotations

import itertools
import json
import sqlite3
from functools import partial

import psycopg
import pytest
from pydantic import ValidationError

from penstock.capture import Delete, Upsert
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.connectors.sql_poll import SqlPoll, SqlPollConfig, source
from penstock.errors import ConfigError, DataError, FatalError, RetryableError
from penstock.pipeline import Pipeline, Processing
from penstock.pipeline.routing import Router
from penstock.runtime import supervisor
from penstock.source import SourceContext
from penstock.testing import CaptureContract, ForkEngine

_NUMBERS = itertools.count()


class Outside:
    """A database with a table `orders`, and a connection that writes to it."""

    def __init__(self, dsn, connection):
        self.dsn, self.connection = dsn, connection
        self.run(
            "DROP TABLE IF EXISTS orders",
            "CREATE TABLE orders (id bigint PRIMARY KEY, note text, updated_at bigint, gone boolean)",
        )

    def run(self, *statements):
        for statement in statements:
            self.connection.execute(statement)

    def put(self, *rows):
        self.run(*(f"INSERT INTO orders VALUES ({id}, '{note}', {at}, false)" for id, note, at in rows))

    def capture(self, state_dir=None, **options):
        fixed = {"dsn": self.dsn, "tables": ["orders"], "key": ["id"], "cursor": "updated_at"}
        quick = {"settle_ms": 0, "poll_interval_ms": 1, "batch_rows": 3}
        made = SqlPoll(SqlPollConfig.model_validate({**fixed, **quick, **options}))
        made.open = partial(made.open, SourceContext(state_dir))
        return made


@pytest.fixture
def sqlite(tmp_path):
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None, check_same_thread=False)
    yield Outside(f"sqlite:{tmp_path}/shop.db", connection)
    connection.close()


@pytest.fixture(params=["sqlite", "postgres"])
def outside(request):
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite")
        return
    dsn = request.getfixturevalue("server").dsn
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Outside(dsn, connection)


@pytest.fixture
def opened(outside, tmp_path):
    made = outside.capture(tmp_path / "state", deleted="gone")
    made.open()
    yield made
    made.close()


def take(opened, quiet=2):
    """The changes until it has said `quiet` times that there are none."""
    found, live = [], opened.live()
    for change in live:
        quiet -= change is None
        if change is not None:
            found.append(change)
        if not quiet:
            break
    live.close()
    return found


def ids(changes):
    return [c.event.row["id"] if isinstance(c.event, Upsert) else -c.event.key["id"] for c in changes]


def confirm(changes):
    for change in changes:
        change.ack.confirm()


class TestContract(CaptureContract):
    @pytest.fixture
    def source(self, outside):
        return outside.capture()

    @pytest.fixture
    def more(self, outside):
        numbers = itertools.count(1)
        return lambda: outside.put(*((n * 100 + i, "x", n) for n in [next(numbers)] for i in range(8)))

    @pytest.fixture
    def wrong(self, outside):
        return outside.capture(cursor="changed_at")


def test_rows_that_share_a_cursor_across_the_end_of_a_page_come_once_each(outside, opened):
    outside.put(*((id, "x", 5) for id in (9, 2, 7, 4, 1, 8, 3)), (5, "x", 4), (6, "x", 6))
    found = take(opened)
    assert ids(found) == [5, 1, 2, 3, 4, 7, 8, 9, 6]
    confirm(found[:5])  # the second page holds 3, 4 and 7
    opened.close()
    opened.open()
    assert ids(take(opened)) == [3, 4, 7, 8, 9, 6]


def test_a_row_comes_again_when_it_is_written_again(outside, opened):
    outside.put((1, "a", 1), (2, "b", 2))
    confirm(take(opened))
    outside.run("UPDATE orders SET note = 'c', updated_at = 3 WHERE id = 1")
    (change,) = take(opened)
    assert change.event.row == {"id": 1, "note": "c", "updated_at": 3, "gone": False}


def test_a_row_that_is_marked_as_deleted_becomes_a_delete(outside, opened):
    outside.put((1, "a", 1))
    confirm(take(opened))
    outside.run("UPDATE orders SET gone = true, updated_at = 2")
    (change,) = take(opened)
    assert change.event == Delete(change.event.table, {"id": 1})


def test_rows_that_commit_late_are_waited_for(outside, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(source.time, "monotonic", lambda: now[0])
    opened = outside.capture(tmp_path / "state", settle_ms=1000)
    opened.open()
    live = opened.live()
    outside.put((1, "a", 10), (2, "b", 20))
    assert next(live) is None
    now[0] = 0.9
    outside.put((3, "late", 15), (4, "new", 30))
    assert next(live) is None
    now[0] = 1.0
    assert ids([next(live) for _ in range(3)]) == [1, 3, 2]
    assert next(live) is None
    now[0] = 2.0
    assert ids([next(live)]) == [4]
    live.close()
    opened.close()


def test_a_change_whose_confirmation_was_lost_is_not_read_again_even_if_rows_moved(outside, opened):
    outside.put(*((id, "x", id) for id in range(1, 8)))
    journaled = take(opened)[4]
    outside.run("UPDATE orders SET updated_at = 100 WHERE id IN (2, 5, 6)")
    opened.close()
    opened.open()
    opened.restore(json.loads(json.dumps(journaled.position)), {})
    assert ids(take(opened)) == [7, 2, 5, 6]


def test_a_copy_holds_what_was_read_before_and_live_the_rest(outside, opened):
    outside.put(*((id, "x", id) for id in range(1, 6)))
    assert list(opened.snapshot(opened.tables())) == []
    confirm(take(opened))
    outside.put((6, "x", 6))
    outside.run("UPDATE orders SET updated_at = 7 WHERE id = 2")
    assert ids(opened.snapshot(opened.tables())) == [1, 3, 4, 5]
    assert ids(take(opened)) == [6, 2]


def test_several_tables_each_have_a_place_of_their_own(outside, tmp_path):
    outside.run("DROP TABLE IF EXISTS users", "CREATE TABLE users (id bigint PRIMARY KEY, updated_at bigint)")
    opened = outside.capture(tmp_path / "state", tables=["orders", "users"])
    opened.open()
    outside.put((1, "a", 5))
    outside.run("INSERT INTO users VALUES (7, 1), (8, 2)")
    assert [c.event.table.stream for c in take(opened)] == ["orders", "users", "users"]
    confirm(take(opened))
    outside.run("INSERT INTO users VALUES (9, 3)")
    assert ids(take(opened)) == [9]
    opened.close()


def test_a_column_that_is_added_is_there_from_the_next_look_on(outside, opened):
    outside.put((1, "a", 1))
    live = opened.live()
    assert next(live).event.row.keys() == {"id", "note", "updated_at", "gone"}
    outside.run("ALTER TABLE orders ADD colour text", "INSERT INTO orders VALUES (2, 'b', 2, false, 'red')")
    assert next(live) is None
    assert next(live) is None
    assert next(live).event.row["colour"] == "red"
    assert opened.schema()["orders"].names[-1] == "colour"
    live.close()


def test_its_lag_is_the_rows_that_are_not_confirmed(outside, opened):
    outside.put(*((id, "x", id) for id in range(1, 8)))
    assert opened.lag() == 7
    confirm(take(opened)[:3])
    assert opened.lag() == 4


def test_a_growing_id_can_be_key_and_cursor_at_once(outside, tmp_path):
    outside.put((3, "c", 0), (1, "a", 0), (2, "b", 0))
    opened = outside.capture(tmp_path / "state", cursor="id", batch_rows=2)
    opened.open()
    assert ids(take(opened)) == [1, 2, 3]
    opened.close()


def test_rows_without_a_cursor_are_never_seen_and_check_says_so(outside, opened):
    outside.put((1, "a", "NULL"), (2, "b", 1))
    assert ids(take(opened)) == [2]
    (finding,) = opened.check()
    assert not finding.ok
    assert "updated_at" in finding.what


def test_a_key_that_is_null_is_bad_data(outside, tmp_path):
    outside.run("DROP TABLE orders", "CREATE TABLE orders (id bigint, updated_at bigint)")
    outside.run("INSERT INTO orders VALUES (NULL, 1)")
    opened = outside.capture(tmp_path / "state")
    opened.open()
    with pytest.raises(DataError, match="no value in 'id'"):
        take(opened)
    opened.close()


def test_values_of_postgres_are_those_of_its_log(server, tmp_path):
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        outside = Outside(server.dsn, connection)
        outside.run(
            "DROP TABLE orders",
            'CREATE TABLE orders (id uuid PRIMARY KEY, "per%cent" numeric(5,2), tags text[], updated_at timestamptz, raw bytea)',
            "INSERT INTO orders VALUES ('00000000-0000-0000-0000-000000000001', 1.50, '{a,b}', "
            "'2026-01-02 03:04:05.678901+00', '\\xff')",
            "INSERT INTO orders VALUES ('00000000-0000-0000-0000-000000000002', NULL, NULL, 'infinity', NULL)",
        )
        opened = outside.capture(tmp_path / "state")
        opened.open()
        first, second = take(opened)
        assert str(first.event.row["per%cent"]) == "1.50"
        assert first.event.row["tags"] == ["a", "b"]
        assert first.event.row["raw"] == b"\xff"
        assert first.position == {"orders": ["2026-01-02 03:04:05.678901+00", "00000000-0000-0000-0000-000000000001"]}
        assert second.event.row["updated_at"].value == 2**63 - 1
        confirm([first, second])
        opened.close()
        opened.open()
        assert take(opened) == []
        opened.close()


def test_a_value_without_a_place_comes_with_a_way_out_that_is_open(server, tmp_path):
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        outside = Outside(server.dsn, connection)
        outside.run("DROP TABLE orders", "CREATE TABLE orders (id int PRIMARY KEY, xs int[], updated_at int)")
        outside.run("INSERT INTO orders VALUES (1, '[0:1]={7,8}', 1)")
        opened = outside.capture(tmp_path / "state")
        opened.open()
        with pytest.raises(DataError, match="subscripts do not start at 1") as raised:
            take(opened)
        opened.close()
        assert 'SELECT …, "xs"::text AS "xs"' in raised.value.hint
        assert "text_columns" not in raised.value.hint, "which this source does not have"
        outside.run('CREATE VIEW texts AS SELECT id, updated_at, "xs"::text AS "xs" FROM orders')
        opened = outside.capture(tmp_path / "other", tables=["texts"])
        opened.open()
        found = [change.event.row["xs"] for change in take(opened)]
        opened.close()
        outside.run("DROP VIEW texts")
        assert found == ["[0:1]={7,8}"]


def test_sqlite_values_keep_their_declared_types(sqlite, tmp_path):
    sqlite.run(
        "DROP TABLE orders",
        "CREATE TABLE orders (id integer PRIMARY KEY, price real, paid boolean, at datetime, raw blob, total decimal(9,2))",
        "INSERT INTO orders VALUES (1, 2, 1, '2026-01-01', x'ff', '12.50')",
    )
    opened = sqlite.capture(tmp_path / "state", cursor="id")
    opened.open()
    (change,) = take(opened)
    assert change.event.row == {
        "id": 1,
        "price": 2.0,
        "paid": True,
        "at": "2026-01-01",
        "raw": b"\xff",
        "total": "12.5",
    }
    assert [str(kind) for kind in opened.schema()["orders"].types] == [
        "int64",
        "double",
        "bool",
        "string",
        "binary",
        "string",
    ]
    opened.close()


def test_a_relative_file_lies_beside_the_pipeline_file(tmp_path):
    options = {"dsn": "sqlite:shop.db", "tables": ["t"], "key": ["id"], "cursor": "at"}
    config = SqlPollConfig.model_validate(options, context={"base": tmp_path})
    assert config.dsn == f"sqlite:{tmp_path}/shop.db"
    with pytest.raises(ValidationError, match="relative to this file"):
        SqlPollConfig.model_validate({**options, "dsn": "sqlite:///shop.db"})


def test_what_is_not_there_is_told(sqlite, tmp_path):
    for wrong, error in (
        ({"tables": ["nothing"]}, ConfigError),
        ({"key": ["no"]}, ConfigError),
        ({"deleted": "no"}, ConfigError),
        ({"dsn": f"sqlite:{tmp_path}/nowhere.db"}, RetryableError),
    ):
        with pytest.raises(error):
            sqlite.capture(**wrong).open()
    (tmp_path / "text.db").write_text("not a database, and long enough to be looked at" * 20)
    with pytest.raises(FatalError, match="see that the file is an SQLite database"):
        sqlite.capture(dsn=f"sqlite:{tmp_path}/text.db").open()


def test_a_password_in_the_dsn_is_refused(sqlite):
    with pytest.raises(ConfigError, match="holds a password"):
        sqlite.capture(dsn="postgresql://a:secret@127.0.0.1/x").open()


def test_a_damaged_resume_point_is_named(sqlite, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "places.json").write_text("{")
    with pytest.raises(FatalError, match=r"PEN-5011 .*places.json is damaged"):
        sqlite.capture(tmp_path / "state").open()


def test_a_connection_that_broke_is_made_again(server, tmp_path):
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        outside = Outside(server.dsn, connection)
        opened = outside.capture(tmp_path / "state")
        opened.open()
        assert take(opened) == []
        outside.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'penstock'")
        with pytest.raises(RetryableError):
            take(opened)
        outside.put((1, "a", 1))
        assert ids(take(opened)) == [1]
        opened.close()


def test_a_drain_waits_for_the_rows_that_have_yet_to_settle(sqlite, tmp_path, caplog):
    sqlite.put((1, "a", 10), (2, "b", 20))
    pipeline = Pipeline(
        "polled",
        sources={"shop": SqlPoll(sqlite.capture(settle_ms=300).config)},
        sinks={"lake": FilesSink(FilesSinkConfig(path=str(tmp_path / "lake" / "{topic}")))},
        router=Router((), ("lake",)),
        processing=Processing(state_dir=tmp_path / "state"),
    )
    supervisor.run(pipeline, ForkEngine(1), drain=True)
    assert sorted(read_published(tmp_path / "lake" / "orders")["id"].to_pylist()) == [1, 2]
    assert "has no streams" not in caplog.text, "they are in the database, though none of their rows was journaled yet"


def test_it_has_caught_up_once_what_was_there_then_is_handed_over_though_more_keeps_coming(sqlite, monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(source.time, "monotonic", lambda: float(next(now)))
    settling = source._Settling(3)
    assert settling.upto(None) is None
    assert settling.settled_at == 0
    found = [(settling.upto(cursor), settling.settled_at) for cursor in range(1, 7)]
    # The cursor of the look at 1 has settled at 4: what was there at 1 is known, what came at 2 is not.
    assert found == [(None, 0), (None, 0), (None, 0), (1, 1), (2, 2), (3, 3)]
