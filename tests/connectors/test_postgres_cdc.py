"""Change capture from a real PostgreSQL: ranges of its log, copies that race with writers, and what is refused."""

from __future__ import annotations

import itertools
import pickle
import random
import select
import threading
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import psycopg
import psycopg.rows
import pytest
from pydantic import ValidationError

from mirrored import Database, Lake, Reading, database_on
from penstock.connectors.postgres_cdc import PostgresCdc, PostgresCdcConfig, plan
from penstock.connectors.postgres_cdc.copy import chunk_where, edges
from penstock.connectors.postgres_cdc.log import probe, slot
from penstock.connectors.postgresql import connections
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.runtime.telemetry.names import SLOT_STATES
from penstock.source import Note, ReadLimit
from penstock.testing import SourceContract
from penstock.testing.mirror import Mirror, replayed, versions_are_dense
from penstock.testing.postgres import PostgresServer, binaries
from penstock.testing.processes import wait_until

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    with PostgresServer(18, settings={"max_replication_slots": "60", "fsync": "off"}) as running:
        yield running


class Shop(Database):
    def table(self, name, key):
        """What the table holds, as `replayed` gives it."""
        return sorted(super().table(name), key=lambda row: tuple(map(repr, (row[each] for each in key))))


@pytest.fixture
def database(server):
    with database_on(server, f"shop_{next(_NUMBERS)}", Shop) as made:
        yield made


def read(opened, start, end):
    """The rows of a range by stream, and its notes."""
    rows, notes = {}, []
    for split in opened.split(start, end):
        for item in opened.read(pickle.loads(pickle.dumps(split))):
            if isinstance(item, Note):
                notes.append(item.value)
            else:
                rows.setdefault(item.stream, []).extend(item.records.to_pylist())
    return rows, notes


def drain(lake):
    """As `run --drain`: commit what is there now, and no more."""
    if lake.loop.frozen is None:
        lake.loop.freeze()
    until = time.monotonic() + 60
    while lake.loop.step() is not None or lake.position.copying:
        assert time.monotonic() < until, "the drain never ended"


ORDERS = "CREATE TABLE orders (id int8 PRIMARY KEY, version int8 NOT NULL DEFAULT 0, note text)"


class TestContract(SourceContract):
    """The laws of ranges, over the log alone."""

    @pytest.fixture
    def source(self, database):
        database.run(ORDERS, "CREATE TABLE people (name text PRIMARY KEY, age int4)")
        made = database.source(snapshot="never", max_wal_bytes=12000, heartbeat_secs=600)
        made.open()
        made.initial()
        made.close()
        for number in range(6):
            database.run(
                f"INSERT INTO orders SELECT i, 0, repeat('x', 100) FROM generate_series({number * 9}, {number * 9 + 8}) i",
                f"INSERT INTO people VALUES ('p{number}', {number})",
            )
        database.run("UPDATE orders SET version = 1 WHERE id % 7 = 0", "DELETE FROM orders WHERE id = 3")
        return made

    @pytest.fixture
    def more(self, database):
        return lambda: database.run("INSERT INTO orders VALUES (100000)", "UPDATE people SET age = 1 WHERE name = 'p1'")

    @pytest.fixture
    def wrong(self, database):
        return PostgresCdc(PostgresCdcConfig(dsn=database.dsn + "_nowhere", tables=["*"]))


class TestMirror:
    def test_a_copy_and_the_changes_behind_it_make_the_table(self, database, tmp_path):
        database.run(ORDERS, "INSERT INTO orders SELECT i, 0, 'n' || i FROM generate_series(1, 1000) i")
        mirror = Mirror(tmp_path, database.source(seed_chunk_rows=100))
        mirror.run()
        log = mirror.log("public.orders")
        assert [row["_op"] for row in log] == ["r"] * 1000
        assert replayed(log, ["id"]) == database.table("orders", ["id"])
        database.run(
            "UPDATE orders SET version = version + 1 WHERE id <= 10",
            "DELETE FROM orders WHERE id = 1000",
            "INSERT INTO orders VALUES (2000)",
            "UPDATE orders SET id = 3000 WHERE id = 999",
        )
        mirror.run()
        log = mirror.log("public.orders")
        assert [row["_op"] for row in log[1000:]] == ["u"] * 10 + ["d", "c", "u"]
        assert replayed(log, ["id"]) == database.table("orders", ["id"])

    def test_writers_that_race_the_copy_on_its_own_keys_lose_and_double_nothing(self, database, tmp_path):
        database.run(
            ORDERS,
            'CREATE TABLE items (region text COLLATE "C", number int4, version int8, PRIMARY KEY (region, number))',
            "INSERT INTO orders SELECT i, 0, 'n' || i FROM generate_series(1, 400) i",
            "INSERT INTO items SELECT chr(97 + i % 5), i, 0 FROM generate_series(1, 300) i",
            "ANALYZE orders",  # its chunks are cut by statistics, the others by counting
        )
        mirror = Mirror(tmp_path, database.source(seed_chunk_rows=40))
        with Writers(database, 2):
            mirror.run(until="copied")
        mirror.run()
        check(database, mirror)

    def test_chunks_are_cut_by_the_statistics_of_the_key_while_these_tell_the_size(self, database):
        def sizes():
            with closing(database.source(seed_chunk_rows=1000)) as opened:
                opened.open()
                start = opened.initial()
                chunks = opened.split(start, opened.latest(start, ReadLimit(parallelism=4)))
                read = [sum(item.num_rows for item in opened.read(c) if not isinstance(item, Note)) for c in chunks]
            return chunks, read

        database.run(ORDERS, "INSERT INTO orders SELECT i * i FROM generate_series(1, 10000) i", "ANALYZE orders")
        bounds = database.rows("SELECT unnest(histogram_bounds::text::text[]) FROM pg_stats WHERE attname = 'id'")
        chunks, read = sizes()
        assert [chunk.upto for chunk in chunks] == [bounds[place] for place in (11, 22, 33, 44)]
        assert [chunk.after for chunk in chunks] == [None, *(chunk.upto for chunk in chunks[:-1])]
        assert all(900 < rows < 1300 for rows in read)
        database.run("INSERT INTO orders SELECT -i FROM generate_series(1, 10000) i")
        assert sizes()[1] == [1000] * 4  # they are of another table, so to say

    def test_chunks_by_statistics_cover_the_table_once_whatever_their_size(self, database):
        database.run(ORDERS, "INSERT INTO orders SELECT i - 100 FROM generate_series(1, 250) i", "ANALYZE orders")
        database.run("INSERT INTO orders SELECT i FROM generate_series(1000, 1040) i")
        opened = database.source()
        with closing(opened):
            opened.open()
            opened.initial()
            known, catalog = opened.session.tables.captured, opened.session.catalog
            table = known["public.orders"]
            with psycopg.connect(database.dsn, autocommit=True) as connection:
                for count, room, upto in itertools.product(
                    (1, 6, 7, 10, 99, 500, 5000), (1, 3, 1000), (None, ("110",))
                ):
                    after, keys, turns = None, [], 0
                    while not turns or after != upto:
                        for edge in edges(connection, table, catalog, after, upto, count, count * room):
                            where = chunk_where(table, after, edge.upto)
                            keys += [key for (key,) in connection.execute(f"SELECT id FROM orders{where}")]
                            after = edge.upto
                        turns += 1
                    keys_there = [key for (key,) in database.rows("SELECT id FROM orders")]
                    assert sorted(keys) == sorted(key for key in keys_there if upto is None or key <= 110)

    def test_the_log_is_read_between_chunks_only_if_it_holds_changes_or_the_slot_has_stood_long(
        self, database, monkeypatch
    ):
        database.run(ORDERS, "INSERT INTO orders SELECT i FROM generate_series(1, 20) i", "CREATE TABLE other (id int)")
        options = {"tables": ["public.orders"], "seed_chunk_rows": 2, "heartbeat_secs": 3600}
        with closing(database.source(**options)) as opened:
            opened.open()
            reading = Reading(opened)

            def kinds(epochs):
                """What the next epochs read."""
                found = []
                for _ in range(epochs):
                    reading.step()
                    found.append(type(reading.splits[0]).__name__)
                    while reading.end is not None:
                        reading.step()
                return found

            assert kinds(1) == ["Chunk"]
            database.run("INSERT INTO other VALUES (1)")  # of no interest, but log all the same
            assert kinds(1) == ["Chunk"]
            database.run("UPDATE orders SET note = 'new' WHERE id = 1")
            assert kinds(3) == ["LogRange", "Chunk", "Chunk"]
            database.run("INSERT INTO other VALUES (2)")
            with monkeypatch.context() as later:
                later.setattr(probe, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 3600))
                assert kinds(2) == ["LogRange", "Chunk"]
            reading.finish()
            assert not reading.position.copied, "the log is read once more behind the last chunk"
        assert replayed(reading.log, ["id"]) == database.table("orders", ["id"])

    @pytest.mark.parametrize(
        ("secs", "options", "expected"),
        [
            (3600.0, {}, [10, 20, 40, 40, 40, 5]),
            (1e-9, {}, [10] * 15 + [5]),
            (3600.0, {"seed_chunk_rows": 50}, [50, 50, 50, 5]),
        ],
    )
    def test_epochs_of_copies_grow_while_they_are_over_soon(self, database, monkeypatch, secs, options, expected):
        for name, value in (("CHUNK_ROWS", 10), ("MOST_CHUNK_ROWS", 40), ("COPY_SECS", secs)):
            monkeypatch.setattr(f"penstock.connectors.postgres_cdc.chunks.{name}", value)
        database.run(ORDERS, "INSERT INTO orders SELECT i FROM generate_series(1, 155) i")
        with closing(database.source(heartbeat_secs=3600, **options)) as opened:
            opened.open()
            position, epochs = opened.initial(), []
            while position.copying:
                end = opened.latest(position, ReadLimit())
                items = [item for part in opened.split(position, end) for item in opened.read(part)]
                position = opened.next_start(end, [item.value for item in items if isinstance(item, Note)])
                epochs.append(sum(item.num_rows for item in items if not isinstance(item, Note)))
        assert epochs == expected

    @pytest.mark.parametrize("key", ["PRIMARY KEY", ""])
    def test_a_part_is_the_same_however_often_it_is_read(self, database, key):
        database.run(
            f"CREATE TABLE t (id int8 {key}, note text)",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            "INSERT INTO t SELECT i, 'old' FROM generate_series(1, 100) i",
        )
        with closing(database.source(seed_chunk_rows=40)) as opened:
            opened.open()
            start = opened.initial()
            parts = opened.split(start, opened.latest(start, ReadLimit(parallelism=2)))
            first = [list(opened.read(part)) for part in parts]
            database.run("UPDATE t SET note = 'new'", "DELETE FROM t WHERE id < 50")
            again = [list(opened.read(part)) for part in parts]
        assert sum(item.records.num_rows for items in first for item in items if not isinstance(item, Note)) >= 80
        for before, after in zip(first, again, strict=True):
            assert [item for item in before if isinstance(item, Note)] == [i for i in after if isinstance(i, Note)]
            rows = [[i.records for i in items if not isinstance(i, Note)] for items in (before, after)]
            assert rows[0] == rows[1]

    def test_a_snapshot_whose_connection_is_lost_makes_the_copy_begin_again(self, database):
        database.run("CREATE TABLE t (id int8 PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 100)")
        with closing(database.source()) as opened:
            opened.open()
            start = opened.initial()
            (part,) = opened.split(start, opened.latest(start, ReadLimit(parallelism=2)))
            opened.session.release_snapshot()
            held = (
                "SELECT FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND datname = current_database()"
            )
            wait_until(lambda: not database.rows(held), "the server to notice it")
            with pytest.raises(RetryableError, match="is gone"):
                list(opened.read(part))

    def test_tables_without_a_key_or_with_one_that_cannot_be_compared_are_copied_under_one_snapshot(
        self, database, tmp_path
    ):
        database.run(
            "CREATE TABLE events (what text)",
            "ALTER TABLE events REPLICA IDENTITY FULL",
            "CREATE TABLE scores (score numeric PRIMARY KEY, name text)",
            "CREATE TABLE nothing (id int PRIMARY KEY)",
            "INSERT INTO events SELECT 'e' || i % 10 FROM generate_series(1, 500) i",
            "INSERT INTO scores SELECT i / 7.0, 's' || i FROM generate_series(1, 500) i",
        )
        mirror = Mirror(tmp_path, database.source())
        mirror.run()
        database.run("INSERT INTO events VALUES ('later')", "DELETE FROM scores WHERE name = 's1'")
        mirror.run()
        events = mirror.log("public.events")
        assert [row["_op"] for row in events] == ["r"] * 500 + ["c"]
        assert sorted(row["what"] for row in events) == sorted(
            what for (what,) in database.rows("SELECT what FROM events")
        )
        assert len(replayed(mirror.log("public.scores"), ["score"])) == 499
        assert mirror.log("public.nothing") == []

    def test_a_table_that_is_added_later_is_copied_while_the_others_stream(self, database, tmp_path):
        database.run(ORDERS, "INSERT INTO orders SELECT i FROM generate_series(1, 10) i")
        Mirror(tmp_path, database.source(tables=["public.orders"])).run()
        database.run(
            "CREATE TABLE items (region text, number int4, version int8, PRIMARY KEY (region, number))",
            "INSERT INTO items SELECT 'x', i, 0 FROM generate_series(1, 10) i",
        )
        mirror = Mirror(tmp_path, database.source(tables=["public.orders", "public.items"], seed_chunk_rows=4))
        with psycopg.connect(database.dsn) as early:
            early.execute("INSERT INTO items VALUES ('early', 1, 0)")  # written before ALTER PUBLICATION …
            run = mirror.start(until="caught_up")
            wait_until(lambda: database.rows("SELECT FROM pg_publication_tables WHERE tablename = 'items'"), "ALTER")
            database.run("INSERT INTO orders VALUES (11)")
            wait_until(lambda: len(mirror.log("public.orders")) == 11, "the other table to stream")
            assert mirror.log("public.items") == []
            early.commit()  # … and committed behind it
        run.result()
        check(database, mirror)

    def test_truncate_in_the_middle_of_a_copy_begins_it_anew(self, database, tmp_path):
        database.run(ORDERS, "INSERT INTO orders SELECT i FROM generate_series(1, 100) i")
        opened = database.source(seed_chunk_rows=10)
        opened.open()
        try:
            log, position = [], opened.initial()
            for number in range(40):
                end = opened.latest(position, ReadLimit(rows=10))
                rows, notes = read(opened, position, end)
                log += rows.get("public.orders", [])
                position = opened.next_start(end, notes)
                opened.ack(position)
                if number == 6:
                    assert position.tables["public.orders"].state == "seeding"
                    database.run(
                        "UPDATE orders SET version = 1",
                        "TRUNCATE orders",
                        "INSERT INTO orders SELECT i, 5 FROM generate_series(50, 70) i",
                    )
                if number > 6 and not position.copying and not position.copied:
                    break
            else:
                pytest.fail("the copy never ended")
        finally:
            opened.close()
        assert "t" in [row["_op"] for row in log]
        assert replayed(sorted(log, key=lambda row: row["_position"]), ["id"]) == database.table("orders", ["id"])

    def test_a_drain_ends_behind_the_copy_although_a_writer_goes_on(self, database):
        database.run(ORDERS, "INSERT INTO orders SELECT i FROM generate_series(1, 50) i")
        opened = database.source(seed_chunk_rows=10)
        opened.open()
        try:
            log, position = [], opened.initial()
            frozen = opened.latest(position, ReadLimit(parallelism=1))
            for number in range(1000, 1040):
                end = opened.latest(position, ReadLimit(rows=10, until=frozen))
                if end == position:
                    break
                rows, notes = read(opened, position, end)
                log += rows.get("public.orders", [])
                position = opened.next_start(end, notes)
                opened.ack(position)
                database.run(
                    f"INSERT INTO orders VALUES ({number})", f"UPDATE orders SET version = 1 WHERE id = {number - 960}"
                )
            else:
                pytest.fail("the drain never ended")
        finally:
            opened.close()
        ids = [row["id"] for row in replayed(log, ["id"])]
        assert set(ids) >= set(range(1, 51))

    def test_names_of_all_kinds_and_partitions(self, database, tmp_path):
        database.run(
            'CREATE SCHEMA "Odd.Schema"',
            'CREATE TABLE "Odd.Schema"."Mixed ""Case" ("Id %" int PRIMARY KEY, "select" text)',
            'INSERT INTO "Odd.Schema"."Mixed ""Case" VALUES (1, NULL), (2, $$it\'s \\ "x" ☕$$)',
            "CREATE TABLE parts (id int, at date, PRIMARY KEY (id, at)) PARTITION BY RANGE (at)",
            "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')",
            "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM ('2025-01-01') TO ('2026-01-01')",
            "INSERT INTO parts VALUES (1, '2024-02-02'), (2, '2025-02-02')",
        )
        mirror = Mirror(tmp_path, database.source(tables=["*"]))
        mirror.run()
        database.run(
            'UPDATE "Odd.Schema"."Mixed ""Case" SET "select" = $$y$$ WHERE "Id %" = 1',
            "UPDATE parts SET at = '2025-03-03' WHERE id = 1",
        )
        mirror.run()
        odd = 'Odd.Schema.Mixed "Case'
        assert replayed(mirror.log(odd), ["Id %"]) == database.table('"Odd.Schema"."Mixed ""Case"', ["Id %"])
        assert replayed(mirror.log("public.parts"), ["id", "at"]) == database.table("parts", ["id", "at"])
        assert mirror.log("public.parts_1") == []

    def test_text_keys_of_any_collation_are_copied_in_the_order_of_their_bytes(self, database, tmp_path):
        database.run(
            'CREATE TABLE words (word text COLLATE "C.utf8" PRIMARY KEY, version int8)',
            "INSERT INTO words SELECT chr(65 + i % 26) || chr(97 + i % 23) || i || (ARRAY['ä', '-', 'Z', ''])[1 + i % 4], 0 "
            "FROM generate_series(1, 200) i",
        )
        mirror = Mirror(tmp_path, database.source(seed_chunk_rows=30))
        with closing(psycopg.connect(database.dsn, autocommit=True)) as writer:
            run = mirror.start(until="copied")
            while not select.select([run], [], [], 0.005)[0]:
                writer.execute("UPDATE words SET version = version + 1 WHERE random() < 0.1")
            run.result()
        mirror.run()
        assert replayed(mirror.log("public.words"), ["word"]) == database.table("words", ["word"])
        versions_are_dense(mirror.log("public.words"), "word", "version")

    def test_always_copies_again_at_every_start_and_clears_what_was_there(self, database, tmp_path):
        database.run(ORDERS, "INSERT INTO orders SELECT i FROM generate_series(1, 5) i")
        mirror = Mirror(tmp_path, database.source(snapshot="always"))
        mirror.run()
        mirror.run()
        log = mirror.log("public.orders")
        assert [row["_op"] for row in log] == ["r"] * 5 + ["t"] + ["r"] * 5
        assert replayed(log, ["id"]) == database.table("orders", ["id"])

    def test_ddl_in_mid_stream_leads_to_the_same_table(self, database, tmp_path, monkeypatch):
        monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)
        database.run(ORDERS, "INSERT INTO orders SELECT i, 0, 'n' FROM generate_series(1, 5) i")
        mirror = Mirror(tmp_path, database.source())
        mirror.run()
        database.run(
            "INSERT INTO orders VALUES (6)",
            "ALTER TABLE orders ADD COLUMN plain int",
            "INSERT INTO orders VALUES (7, 0, 'n', 7)",
        )
        mirror.run()
        assert [row["_op"] for row in mirror.log("public.orders")] == ["r"] * 5 + ["c"] * 2
        assert replayed(_filled(mirror.log("public.orders")), ["id"]) == database.table("orders", ["id"])
        database.run("ALTER TABLE orders DROP COLUMN note", "INSERT INTO orders VALUES (8)")
        mirror.run()
        assert [row["_op"] for row in mirror.log("public.orders")] == ["r"] * 5 + ["c"] * 3
        database.run("ALTER TABLE orders ADD COLUMN filled int DEFAULT 9", "INSERT INTO orders VALUES (9)")
        mirror.run()
        log = [{name: row[name] for name in row if name != "note"} for row in _filled(mirror.log("public.orders"))]
        assert [row["_op"] for row in log if row["filled"] is not None] == ["c"] + ["r"] * 9
        assert "t" not in [row["_op"] for row in log]  # no change was missed, so the target is never emptied
        assert replayed(log, ["id"], refreshed=True) == database.table("orders", ["id"])

    def test_a_table_that_goes_and_comes_back_is_copied_again(self, database, tmp_path, monkeypatch):
        monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)
        database.run(ORDERS, "CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1), (2)")
        mirror = Mirror(tmp_path, database.source())
        mirror.run()
        database.run("DROP TABLE orders", "INSERT INTO other VALUES (1)")
        mirror.run()
        database.run(ORDERS, "INSERT INTO orders VALUES (2), (3)")
        mirror.run()
        database.run("INSERT INTO orders VALUES (4)")
        mirror.run()
        assert replayed(mirror.log("public.orders"), ["id"]) == database.table("orders", ["id"])


@pytest.mark.parametrize("version", [16, 15])
def test_an_older_server_is_mirrored_as_well(need, tmp_path, version):
    need(binaries(version), f"PostgreSQL {version} is not installed")
    with PostgresServer(version) as server, database_on(server, "mirror", Shop) as database:
        database.run(ORDERS, "INSERT INTO orders SELECT i FROM generate_series(1, 50) i")
        mirror = Mirror(tmp_path, database.source(seed_chunk_rows=20))
        mirror.run()
        database.run("UPDATE orders SET version = 1, note = repeat('x', 5000) WHERE id < 5")
        database.run("UPDATE orders SET version = 2 WHERE id < 5")
        mirror.run()
        assert replayed(mirror.log("public.orders"), ["id"]) == database.table("orders", ["id"])


class TestSlot:
    def test_a_slot_that_was_made_again_stops_the_pipeline_with_the_choices(self, database, tmp_path):
        database.run(ORDERS, "INSERT INTO orders VALUES (1)")
        mirror = Mirror(tmp_path, database.source())
        mirror.run()
        name = database.name
        database.run(f"SELECT pg_drop_replication_slot('{name}')", "INSERT INTO orders VALUES (2)")
        with pytest.raises(FatalError, match=r"PEN-5011 .*does not exist any more") as caught:
            mirror.run()
        assert "when_needed" in caught.value.hint
        assert not database.rows(f"SELECT FROM pg_replication_slots WHERE slot_name = '{name}'")
        database.run(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
        with pytest.raises(FatalError, match=r"PEN-5011 .*made again"):
            mirror.run()

    def test_when_needed_copies_everything_again_after_the_slot_was_lost(self, database, tmp_path):
        database.run(ORDERS, "INSERT INTO orders SELECT i FROM generate_series(1, 5) i")
        mirror = Mirror(tmp_path, database.source(snapshot="when_needed"))
        mirror.run()
        database.run(f"SELECT pg_drop_replication_slot('{database.name}')", "DELETE FROM orders WHERE id = 2")
        mirror.run()
        database.run("INSERT INTO orders VALUES (9)")
        mirror.run()
        assert replayed(mirror.log("public.orders"), ["id"]) == database.table("orders", ["id"])

    @pytest.mark.parametrize("snapshot", ["when_needed", "always"])
    def test_a_drain_ends_although_the_slot_was_lost(self, database, tmp_path, snapshot):
        database.run(ORDERS, "INSERT INTO orders SELECT i FROM generate_series(1, 5) i")
        with Lake(tmp_path, database.source(snapshot=snapshot)) as lake:
            lake.catch_up()
        database.run(f"SELECT pg_drop_replication_slot('{database.name}')", "DELETE FROM orders WHERE id = 2")
        with Lake(tmp_path, database.source(snapshot=snapshot)) as lake:
            drain(lake)
            assert lake.position.slots == 2
            assert lake.position.tables["public.orders"].copies == 2
            assert lake.table("public.orders") == database.table("orders", ["id"])

    def test_a_drain_ends_although_the_slot_is_lost_meanwhile(self, database, tmp_path):
        database.run(ORDERS, "INSERT INTO orders SELECT i FROM generate_series(1, 5) i")
        with Lake(tmp_path, database.source(snapshot="when_needed")) as lake:
            lake.catch_up()
            lake.loop.freeze()
            database.run(f"SELECT pg_drop_replication_slot('{database.name}')", "DELETE FROM orders WHERE id = 2")
            drain(lake)
            assert lake.table("public.orders") == database.table("orders", ["id"])

    def test_a_slot_of_another_database_or_plugin_is_refused(self, database, server):
        database.run(f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')")
        with pytest.raises(ConfigError, match=rf"PEN-1016 .*decodes the database '{database.name}'"):
            PostgresCdc(PostgresCdcConfig(dsn=server.dsn, slot=database.name, tables=["*"])).open()
        here = slot.server(database.connection)
        found = replace(slot.slot(database.connection, database.name), plugin="test_decoding")
        with pytest.raises(ConfigError, match=r"PEN-1016 .*plugin 'test_decoding'"):
            slot.verify_slot(found, database.name, here)

    def test_a_position_of_another_server_is_refused(self, database):
        database.run(ORDERS)
        opened = database.source()
        opened.open()
        start = opened.initial()
        try:
            with pytest.raises(FatalError, match="PEN-5011 this is another server"):
                opened.latest(start.model_copy(update={"system": "1"}), ReadLimit())
            with pytest.raises(FatalError, match=r"PEN-5011 .*failover or restore"):
                opened.latest(start.model_copy(update={"timeline": 7}), ReadLimit())
            with pytest.raises(FatalError, match=r"PEN-5011 .*failover or restore"):
                opened.latest(start.model_copy(update={"lsn": 1 << 50}), ReadLimit())
        finally:
            opened.close()

    def test_an_idle_table_on_a_busy_server_is_acknowledged_at_every_heartbeat(self, database):
        database.run(ORDERS, "CREATE TABLE other (id int)")
        opened = database.source(snapshot="never", tables=["public.orders"], heartbeat_secs=0.3)
        opened.open()
        try:
            position = opened.initial()
            database.run("INSERT INTO other SELECT generate_series(1, 1000)")
            assert opened.latest(position, ReadLimit(rows=10)) == position
            assert opened.lag() > 0
            assert opened.lag_unit == "bytes"
            end = wait_until(lambda: _moved(opened, position), "the heartbeat")
            rows, notes = read(opened, position, end)
            assert rows == {}
            assert notes == [{"quiet": True}]
            for _ in range(2):
                opened.ack(end)
            opened.ack(position)
            (confirmed,) = database.rows(
                f"SELECT (confirmed_flush_lsn - '0/0')::int8 FROM pg_replication_slots WHERE slot_name = '{database.name}'"
            )[0]
            assert confirmed == end.lsn
        finally:
            opened.close()


class TestSetUp:
    def test_what_is_missing_is_listed_with_the_sql_that_mends_it(self, database):
        database.run(
            ORDERS,
            "CREATE TABLE keyless (id int)",
            "CREATE TABLE logged (id int)",
            "ALTER TABLE logged REPLICA IDENTITY FULL",
        )
        opened = database.source()
        opened.open()
        try:
            found = {finding.what: finding for finding in opened.check()}
        finally:
            opened.close()
        wrong = {what: finding.fix for what, finding in found.items() if not finding.ok}
        assert wrong.pop("public.keyless is left out: it has no replica identity") == (
            'ALTER TABLE "public"."keyless" REPLICA IDENTITY FULL; for a sink that upserts rather ADD PRIMARY KEY'
        )
        assert [what for what in wrong if what.startswith("public.logged: replica identity full, key none")]
        assert len(wrong) == 1
        assert "wal_level is logical" in found
        assert "public.orders: replica identity default, key id" in found

    def test_a_table_without_replica_identity_is_never_published_with_its_updates(self, database, tmp_path):
        database.run(ORDERS, "CREATE TABLE keyless (id int)", "INSERT INTO keyless VALUES (1)")
        with pytest.raises(
            ConfigError, match=r"PEN-1016 public\.keyless cannot be captured: it has no replica identity"
        ):
            database.source(tables=["public.orders", "public.keyless"]).open()
        Mirror(tmp_path / "a", database.source()).run()
        database.run("UPDATE keyless SET id = 2")
        mirror = Mirror(tmp_path / "b", database.source(insert_only=["public.keyless"], slot=database.name + "_b"))
        mirror.run()
        database.run("UPDATE keyless SET id = 3", "INSERT INTO keyless VALUES (4)")
        mirror.run()
        assert [(row["_op"], row["id"]) for row in mirror.log("public.keyless")] == [("r", 2), ("c", 4)]

    def test_without_manage_nothing_is_made(self, database):
        database.run(ORDERS)
        with pytest.raises(ConfigError, match=r"PEN-1016 .*manage = false") as caught:
            database.source(manage=False).open()
        assert "pg_create_logical_replication_slot" in caught.value.hint
        database.run(f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')")
        opened = database.source(manage=False)
        opened.open()
        try:
            with pytest.raises(ConfigError, match=r"PEN-1016 .*does not publish all changes of public") as caught:
                opened.initial()
        finally:
            opened.close()
        assert caught.value.hint.startswith('CREATE PUBLICATION "penstock" FOR TABLE "public"."orders"')

    def test_a_password_in_the_dsn_and_an_excluded_key_are_refused(self, database):
        with pytest.raises(ValidationError, match="leave the password out"):
            PostgresCdcConfig(dsn="postgresql://u:secret@h/d", tables=["*"])
        database.run(ORDERS)
        with pytest.raises(ConfigError, match=r"PEN-1016 .*exclude_columns leaves out 'id'"):
            database.source(exclude_columns=["public.orders.id"]).open()

    def test_columns_are_left_out_of_the_copy_and_of_the_log(self, database, tmp_path):
        database.run(ORDERS, "INSERT INTO orders VALUES (1, 0, 'secret')")
        mirror = Mirror(tmp_path, database.source(exclude_columns=["*.note"]))
        mirror.run()
        database.run("INSERT INTO orders VALUES (2, 0, 'secret')")
        mirror.run()
        assert [sorted(row)[-2:] for row in mirror.log("public.orders")] == [["id", "version"]] * 2

    def test_tls_is_really_asked_for(self, database):
        database.run(ORDERS)
        with pytest.raises(ConfigError, match=r"PEN-1016 .*SSL"):
            database.source(sslmode="require").open()
        with pytest.raises(ConfigError, match=r"PEN-1016 .*SSL"):
            connections.connect_arrow(database.source(sslmode="require").config)

    def test_health_tells_of_the_slot(self, database):
        database.run(ORDERS)
        opened = database.source()
        opened.open()
        try:
            before = opened.health_check()
            assert (before.state, before.reason) == (
                "healthy",
                f"the replication slot {database.name!r} is not made yet",
            )
            assert opened.metrics().custom["slot_not_made"] == 1
            assert "slot_missing" not in opened.metrics().custom, "which would be red, and an alert"
            opened.initial()
            health = opened.health_check()
            assert health.state == "healthy"
            assert "reserved" in health.reason
            counted = opened.metrics().custom
            assert counted["slot_reserved"] == 1
            assert counted["slot_held_bytes"] >= 0
            assert {name.removeprefix("slot_") for name in counted if name.startswith("slot_")} <= {
                *SLOT_STATES,
                "held_bytes",
                "safe_bytes",
            }, "what the console and the metrics know"
            database.run(f"SELECT pg_drop_replication_slot('{database.name}')")
            gone = opened.health_check()
            assert gone.state == "degraded"
            assert gone.reason.endswith("does not exist any more")
            assert opened.metrics().custom["slot_missing"] == 1
            assert "slot_reserved" not in opened.metrics().custom
        finally:
            opened.close()


class Writers:
    """Threads that insert, update, move and delete rows at random until they are stopped."""

    def __init__(self, database, count, seed=0):
        self.dsn = database.dsn
        self.stopped = threading.Event()
        self.failed = []
        self.threads = [threading.Thread(target=self._run, args=(seed * 100 + n,)) for n in range(count)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        self.stopped.set()
        for thread in self.threads:
            thread.join()
        assert not self.failed, self.failed

    def _run(self, seed):
        chance = random.Random(seed)
        try:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                while not self.stopped.is_set():
                    try:
                        with connection.transaction():
                            for _ in range(chance.randint(1, 4)):
                                self._write(connection, chance)
                            if chance.random() < 0.1:
                                raise psycopg.Rollback()
                    except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
                        pass
                    self.stopped.wait(chance.random() * 0.01)
        except psycopg.Error as error:
            self.failed.append(error)

    def _write(self, connection, chance):
        key, other = chance.randint(1, 500), chance.randint(1, 500)
        region, number = chance.choice("abcdez"), chance.randint(1, 320)
        connection.execute(
            chance.choice(
                [
                    f"INSERT INTO orders VALUES ({key}) ON CONFLICT DO NOTHING",
                    f"UPDATE orders SET version = version + 1 WHERE id = {key}",
                    f"UPDATE orders SET version = version + 1 WHERE id BETWEEN {key} AND {key + 10}",
                    f"UPDATE orders SET id = {other} WHERE id = {key} AND NOT EXISTS (SELECT FROM orders WHERE id = {other})",
                    f"DELETE FROM orders WHERE id = {key}",
                    f"INSERT INTO items VALUES ('{region}', {number}, 0) ON CONFLICT DO NOTHING",
                    f"UPDATE items SET version = version + 1 WHERE number = {number}",
                    f"UPDATE items SET region = '{region}' WHERE number = {number}",
                    f"DELETE FROM items WHERE region = '{region}' AND number = {number}",
                ]
            )
        )


def check(database, mirror):
    """The log of every table is exact, and leads to what the table holds."""
    for name, key in (("orders", ["id"]), ("items", ["region", "number"])):
        assert replayed(mirror.log(f"public.{name}"), key) == database.table(name, key)


def _moved(opened, position):
    end = opened.latest(position, ReadLimit(rows=10))
    return end if end != position else None


def _filled(log):
    """The rows of a log, each with every column that any of them has."""
    names = {name: None for row in log for name in row}
    return [names | row for row in log]
