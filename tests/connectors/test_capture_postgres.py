"""Capture from a real PostgreSQL, change by change: acks that move the slot, copies that the log does not repeat."""

from __future__ import annotations

import itertools
import pickle
from functools import partial

import psycopg
import pytest

from mirrored import Database, database_on
from penstock.capture import Delete, Upsert
from penstock.changes import Op
from penstock.connectors.postgres_capture.source import PostgresCapture, PostgresCaptureConfig
from penstock.connectors.postgres_cdc.log import read, slot
from penstock.connectors.postgresql import connections
from penstock.errors import DataError, FatalError
from penstock.runtime.ingest.capturing import as_rows
from penstock.source import ReadLimit, SourceBatch, SourceContext
from penstock.testing import CaptureContract
from penstock.testing.postgres import PostgresServer, binaries

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    with PostgresServer(18, settings={"max_replication_slots": "60", "fsync": "off"}) as running:
        yield running


class Shop(Database):
    """With two tables, and a capture of them."""

    def __init__(self, server, name):
        super().__init__(server, name)
        self.run(
            "CREATE TABLE orders (id int8 PRIMARY KEY, note text, big text)",
            "ALTER TABLE orders ALTER big SET STORAGE EXTERNAL",
            "CREATE TABLE people (name text PRIMARY KEY, age int4)",
        )

    def together(self, *statements):
        with self.connection.transaction():
            self.run(*statements)

    def confirmed(self):
        return slot.slot(self.connection, self.name).confirmed

    def capture(self, tmp_path=None, **options):
        options = {"dsn": self.dsn, "slot": self.name, "tables": ["public.*"], "poll_interval_ms": 5, **options}
        made = PostgresCapture(PostgresCaptureConfig.model_validate(options))
        made.open = partial(made.open, SourceContext(tmp_path))
        return made


@pytest.fixture
def database(server):
    with database_on(server, f"shop_{next(_NUMBERS)}", Shop) as made:
        yield made


@pytest.fixture
def opened(database, tmp_path):
    """A capture whose slot is there, and nothing in it."""
    made = database.capture(tmp_path)
    made.open()
    take(made)
    yield made
    made.close()


def take(opened, most=None):
    """The changes that are there; the first None behind a look that found nothing ends them."""
    found, live, quiet = [], opened.live(), 0
    for change in live:
        quiet = quiet + 1 if change is None else 0
        if change is not None:
            found.append(change)
        if quiet == 2 or len(found) == most:
            break
    live.close()
    return found


def confirm(changes):
    for change in changes:
        change.ack.confirm()


def test_a_long_stretch_of_log_is_read_without_the_driver_that_may_end_its_process(database, opened, monkeypatch):
    """The Arrow driver calls `abort` when a server breaks off in the middle of an answer."""
    monkeypatch.setattr(read, "SMALL_RANGE_BYTES", 0)
    monkeypatch.setattr(read, "PLAIN_BYTES", 10_000)
    monkeypatch.setattr(connections, "connect_arrow", None)
    database.run("INSERT INTO orders SELECT i, 'n', repeat('x', 100) FROM generate_series(1, 1000) i")
    found = take(opened)
    assert [change.event.row["id"] for change in found] == list(range(1, 1001))
    confirm(found)
    database.run("UPDATE orders SET note = 'm' WHERE id = 7")
    assert [change.event.row["note"] for change in take(opened)] == ["m"]


class TestContract(CaptureContract):
    @pytest.fixture
    def source(self, database):
        return database.capture()

    @pytest.fixture
    def more(self, database):
        numbers = itertools.count()

        def happen():
            n = next(numbers) * 10
            database.together(
                f"INSERT INTO orders VALUES ({n}, 'a'), ({n + 1}, 'b')", f"INSERT INTO people VALUES ('p{n}', {n})"
            )
            database.run(f"UPDATE orders SET note = 'c' WHERE id = {n}", f"DELETE FROM orders WHERE id = {n + 1}")

        return happen

    @pytest.fixture
    def wrong(self, database):
        return database.capture(tables=["public.nowhere"])


def test_changes_come_in_commit_order_across_tables(database, opened):
    with psycopg.connect(database.dsn) as late:
        late.execute("INSERT INTO people VALUES ('late', 1)")
        database.together(
            "INSERT INTO orders VALUES (1, 'a')",
            "INSERT INTO people VALUES ('b', 2)",
            "INSERT INTO orders VALUES (2, 'c')",
        )
    database.run("UPDATE orders SET id = 3 WHERE id = 2", "DELETE FROM people WHERE name = 'late'")
    events = [change.event for change in take(opened)]
    assert [e.row if isinstance(e, Upsert) else e.key for e in events] == [
        {"id": 1, "note": "a", "big": None},
        {"name": "b", "age": 2},
        {"id": 2, "note": "c", "big": None},
        {"name": "late", "age": 1},
        {"id": 3, "note": "c", "big": None},
        {"name": "late"},
    ]
    assert events[4].old_key == {"id": 2}
    assert isinstance(events[5], Delete)


def test_the_slot_moves_at_transaction_ends_only(database, opened):
    before = database.confirmed()
    database.together("INSERT INTO orders VALUES (1)", "INSERT INTO orders VALUES (2)")
    database.run("INSERT INTO orders VALUES (3)")
    first, second, third = take(opened)
    first.ack.confirm()
    opened.close()
    assert database.confirmed() <= first.position[0]
    opened.open()
    again = take(opened)
    assert [change.position for change in again] == [first.position, second.position, third.position]
    confirm(again[:2])
    opened.close()
    assert before < first.position[0] < database.confirmed() <= third.position[0]
    opened.open()
    assert [change.position for change in take(opened)] == [third.position]


def test_an_idle_slot_moves_with_the_traffic_of_others(database, tmp_path):
    opened = database.capture(tmp_path, heartbeat_secs=0.05)
    opened.open()
    take(opened)
    before = database.confirmed()
    database.run("CREATE SCHEMA other", "CREATE TABLE other.t (i int)", "INSERT INTO other.t VALUES (1)")
    live = opened.live()
    while database.confirmed() == before:
        assert next(live) is None
    live.close()
    opened.close()


def test_a_value_that_was_not_sent_is_left_out_of_its_row(database, opened):
    database.run(f"INSERT INTO orders VALUES (1, 'a', '{'x' * 5000}')", "UPDATE orders SET note = 'b'")
    _, update = take(opened)
    assert update.event.row == {"id": 1, "note": "b"}


def test_a_copy_is_of_one_moment_and_the_log_does_not_repeat_it(database, opened):
    database.run("INSERT INTO orders VALUES (1, 'before')", "INSERT INTO people VALUES ('p', 1)")
    copying = opened.snapshot(opened.tables())
    first = next(copying)
    database.run(
        "UPDATE orders SET note = 'after'", "INSERT INTO people VALUES ('q', 2)", "DELETE FROM people WHERE name = 'p'"
    )
    copied = [first, *copying]
    assert [change.event.row for change in copied] == [
        {"id": 1, "note": "before", "big": None},
        {"name": "p", "age": 1},
    ]
    behind = [{"id": 1, "note": "after", "big": None}, {"name": "q", "age": 2}, {"name": "p"}]
    values = [c.event.row if isinstance(c.event, Upsert) else c.event.key for c in take(opened)]
    assert values == behind

    restored = pickle.loads(pickle.dumps(opened))
    restored.open()
    restored.restore(None, {change.event.table.stream: change.position for change in copied})
    values = [c.event.row if isinstance(c.event, Upsert) else c.event.key for c in take(restored)]
    assert values == behind
    restored.close()


def test_a_column_that_is_added_dropped_or_retyped_between_two_changes_keeps_both(database, opened):
    database.run(
        "INSERT INTO people VALUES ('a', 1)",
        "ALTER TABLE people ALTER age TYPE text",
        "INSERT INTO people VALUES ('b', 'two')",
        "ALTER TABLE people DROP age",
        "ALTER TABLE people ADD born date",
        "INSERT INTO people VALUES ('c', '2000-01-01')",
    )
    types, live, events = [], opened.live(), []
    while len(events) < 3:
        change = next(live)
        if change is not None:
            events.append(change.event)
            types.append([str(each) for each in opened.schema()["public.people"].types])
    live.close()
    assert [list(event.row) for event in events] == [["name", "age"], ["name", "age"], ["name", "born"]]
    assert types == [["string", "int32"], ["string", "string"], ["string", "date32[day]"]]


def test_dates_beyond_those_of_python_survive(database, opened):
    database.run("CREATE TABLE ages (id int4 PRIMARY KEY, at timestamptz, days date[])")
    take(opened)  # it is published now
    database.run("INSERT INTO ages VALUES (1, 'infinity', '{infinity,2000-01-01}'), (2, NULL, NULL)")
    row, nulls = (change.event.row for change in take(opened))
    assert row["at"].value == 2**63 - 1
    assert nulls == {"id": 2, "at": None, "days": None}


TYPES = {
    "b": ("bool", "true"), "i2": ("int2", "-7"), "f4": ("float4", "0.1"), "f8": ("float8", "'-Infinity'"),
    "n": ("numeric(9, 3)", "1.250"), "free": ("numeric", "'NaN'"), "d": ("date", "'0044-03-15 BC'"),
    "at": ("timestamptz", "'2026-01-02 03:04:05.678901+02'"), "plain": ("timestamp", "'-infinity'"),
    "iv": ("interval", "'1 mon 2 days'"), "tm": ("time", "'24:00'"), "j": ("jsonb", """'{"a": [1, null]}'"""),
    "u": ("uuid", "'00000000-0000-0000-0000-00000000000a'"), "raw": ("bytea", "'\\x00ff'"), "ip": ("inet", "'10.0.0.1'"),
    "ints": ("int4[]", "'{1,NULL,3}'"), "days": ("date[]", "'{infinity,2000-01-01}'"), "r": ("int4range", "'[1,5)'"),
    "bits": ("bit(4)", "'0101'"), "fix": ("char(4)", "'ab'"), "cash": ("money", "1.5"), "empty": ("text", "''"),
}  # fmt: skip


def test_values_reach_the_journal_as_postgres_cdc_reads_them(database, tmp_path):
    database.run(
        f"CREATE TABLE kinds (id int8 PRIMARY KEY, {', '.join(f'{name} {kind}' for name, (kind, _) in TYPES.items())})"
    )
    opened = database.capture(tmp_path, tables=["public.kinds"])
    opened.open()
    take(opened)
    values = ", ".join(value for _, value in TYPES.values())
    database.run(f"INSERT INTO kinds VALUES (1, {values}), (2{', NULL' * len(TYPES)})")
    live = [(Op.UPDATE, change, n) for n, change in enumerate(take(opened))]
    copied = [(Op.SEEDED, change, n) for n, change in enumerate(opened.snapshot(opened.tables()))]
    log = database.source(tables=["public.kinds"], snapshot="never")
    log.open()
    start = log.initial()
    (split,) = log.split(start, log.latest(start, ReadLimit()))
    (expected,) = (item.records for item in log.read(split) if isinstance(item, SourceBatch))
    expected = expected.select(["id", *TYPES])
    for changes in (live, copied):
        found = as_rows("public.kinds", opened.schema()["public.kinds"], changes).select(["id", *TYPES])
        assert found.schema.equals(expected.schema)
        assert found.equals(expected)
    log.close()
    opened.close()


def test_a_truncate_stops_the_capture_unless_it_is_to_be_skipped(database, opened, tmp_path):
    database.run("INSERT INTO orders VALUES (1)", "TRUNCATE orders", "INSERT INTO orders VALUES (2)")
    with pytest.raises(DataError, match=r"public.orders was truncated.*\n.*truncate = \"skip\""):
        take(opened)
    opened.close()
    skipping = database.capture(tmp_path, truncate="skip")
    skipping.open()
    assert [change.event.row["id"] for change in take(skipping)] == [1, 2]
    assert skipping.metrics().custom == {"truncates_skipped": 1}
    skipping.close()


@pytest.mark.parametrize("moved", ["dropped", "made again", "moved"])
def test_a_slot_that_somebody_else_touched_is_found_out(database, opened, moved):
    confirm(take(opened))
    opened.close()
    database.run("INSERT INTO orders VALUES (1)")
    if moved != "moved":
        database.run(f"SELECT pg_drop_replication_slot('{database.name}')")
    if moved == "made again":
        slot.make_slot(database.connection, database.name)
    if moved == "moved":
        database.run(f"SELECT pg_replication_slot_advance('{database.name}', pg_current_wal_lsn())")
    opened.open()
    with pytest.raises(FatalError, match=r"PEN-5011 .*slot.*\n.*start over"):
        take(opened)
