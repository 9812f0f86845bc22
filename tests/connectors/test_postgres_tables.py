"""One table paused, skipped, copied again or broken, while the others stream on; against a real PostgreSQL."""

from __future__ import annotations

import itertools
import json
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
import psycopg.rows
import pytest
from deltalake import DeltaTable

from mirrored import Database, Lake, database_on
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.postgres_cdc import chunks, copy, plan, table_errors, tables
from penstock.connectors.postgres_cdc.position import LogPosition
from penstock.connectors.postgresql import failures
from penstock.errors import SchemaError
from penstock.pipeline import Pipeline
from penstock.pipeline.routing import Router
from penstock.runtime import supervisor
from penstock.runtime.epochs import EpochLoop, State
from penstock.source import Note, ReadLimit, SourceContext
from penstock.tables import Refused, Requests
from penstock.testing import TableSourceContract
from penstock.testing.engine import ForkEngine
from penstock.testing.memory import MemorySink, MemorySinkConfig
from penstock.testing.mirror import Mirror, replayed
from penstock.testing.postgres import PostgresServer, binaries
from penstock.testing.processes import wait_until

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    with PostgresServer(18, settings={"max_replication_slots": "60", "fsync": "off"}) as running:
        yield running


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch):
    monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)


class Shop(Database):
    """With the tables `orders` and `items`, ten rows each."""

    def __init__(self, server, name):
        super().__init__(server, name)
        for table in ("orders", "items"):
            self.run(f"CREATE TABLE {table} (id int8 PRIMARY KEY, note text)")
            self.run(f"INSERT INTO {table} SELECT i, 'n' || i FROM generate_series(1, 10) i")

    def table(self, name):
        return sorted(super().table(name), key=lambda row: repr(row["id"]))


@pytest.fixture
def database(server):
    with database_on(server, f"tables_{next(_NUMBERS)}", Shop) as made:
        yield made


class PickySink(MemorySink):
    """Refuses rows of a topic while its notes say `bad`."""

    def write_batch(self, topic, batch):
        if "note" in batch.schema.names and "bad" in batch.column("note").to_pylist():
            raise SchemaError(f"{topic} is not what it was", hint="mend it")
        return super().write_batch(topic, batch)


@dataclass
class Tables(Mirror):
    """A mirror whose source takes commands."""

    picky: bool = False

    @property
    def requests(self):
        return Requests(self.path / "state" / "sources" / "source")

    def _sink(self):
        kind = PickySink if self.picky else MemorySink
        return kind(MemorySinkConfig(path=self.path / "target"))

    def ask(self, verb, *streams):
        return self.requests.add(verb, streams)

    @property
    def position(self):
        newest = State(self.path / "state", "mirror").peek().newest
        end = self.source.position_type.model_validate(newest.ranges["source"].end)
        return self.source.next_start(end, newest.notes.get("source", ()))

    def states(self):
        known = self.source.tables(self.position)
        return {stream.removeprefix("public."): each.state for stream, each in known.items()}

    def failed(self, name):
        """The one table that has an error."""
        failed = {stream: each for stream, each in self.source.tables(self.position).items() if each.error}
        assert list(failed) == [f"public.{name}"]
        return failed[f"public.{name}"]

    def ops(self, name):
        return "".join(row["_op"] for row in self.log(f"public.{name}"))


def check(database, mirror, *names):
    for name in names or ("orders", "items"):
        assert replayed(mirror.log(f"public.{name}"), ["id"]) == database.table(name)


class TestCommands:
    def test_a_paused_table_drops_its_changes_and_is_copied_again_when_it_resumes(self, database, tmp_path):
        mirror = Tables(tmp_path, database.source())
        mirror.run()
        mirror.ask("pause", "public.orders")
        mirror.run()
        assert mirror.states() == {"orders": "paused", "items": "active"}
        change = "UPDATE {0} SET note = 'later' WHERE id = 1", "DELETE FROM {0} WHERE id = 2"
        database.run(*(each.format(name) for name in ("orders", "items") for each in change))
        mirror.run()
        assert mirror.ops("orders") == "r" * 10
        check(database, mirror, "items")
        mirror.ask("resume", "public.orders")
        mirror.run()
        assert mirror.ops("orders") == "r" * 10 + "t" + "r" * 9
        assert mirror.ops("items") == "r" * 10 + "ud"
        database.run("INSERT INTO orders VALUES (11)")
        mirror.run()
        check(database, mirror)
        assert mirror.states() == {"orders": "active", "items": "active"}

    def test_a_running_pipeline_takes_up_a_command_while_the_others_stream(self, database, tmp_path):
        mirror = Tables(tmp_path, database.source())
        mirror.run()
        run = mirror.start()
        try:
            mirror.ask("pause", "public.orders")
            wait_until(lambda: mirror.states()["orders"] == "paused", "the pause")
            database.run("INSERT INTO orders VALUES (11)", "INSERT INTO items VALUES (11)")
            wait_until(lambda: len(mirror.ops("items")) == 11, "the other table")
            assert mirror.ops("orders") == "r" * 10
            mirror.ask("resync", "public.orders")
            wait_until(lambda: mirror.ops("orders") == "r" * 10 + "t" + "r" * 11, "the copy")
        finally:
            run.kill()
        mirror.run()
        check(database, mirror)

    def test_a_skipped_table_stays_out_until_a_resync(self, database, tmp_path):
        mirror = Tables(tmp_path, database.source())
        mirror.run()
        mirror.ask("skip", "public.orders")
        mirror.ask("resume", "public.orders")
        mirror.run()
        database.run("INSERT INTO orders VALUES (11)", "ALTER TABLE orders ADD COLUMN more int DEFAULT 1")
        mirror.run()
        assert mirror.states()["orders"] == "skipped"
        assert mirror.ops("orders") == "r" * 10
        mirror.ask("resync", "public.orders")
        mirror.run()
        names = {"more": None}
        assert replayed([names | row for row in mirror.log("public.orders")], ["id"]) == database.table("orders")

    def test_commands_given_before_a_start_are_kept_and_applied_in_their_order(self, database, tmp_path):
        mirror = Tables(tmp_path, database.source())
        mirror.run()
        for verb in ("pause", "resume", "skip", "resync", "pause"):
            mirror.ask(verb, "public.orders")
        mirror.ask("pause", "public.nothing")
        mirror.run()
        assert mirror.states()["orders"] == "paused"
        mirror.run()
        assert mirror.requests.pending() == []

    def test_the_clear_comes_in_the_epoch_of_the_first_rows(self, database, monkeypatch):
        monkeypatch.setattr(chunks, "WHOLE_ROWS", 1)
        with opened(database.source(seed_chunk_rows=4)) as reader:
            position = caught_up(reader, reader.initial())
            failure = tables.Failure(code="PEN-3000", message="", since=0, next_try=0)
            due = position.tables["public.orders"].become(tables.Failed, failure=failure)
            start = position.with_table("public.orders", due).model_copy(update={"turn": "copy"})
            rows, _ = read(reader, start, reader.latest(start, ReadLimit(rows=100, parallelism=1)))
        log = sorted(rows["public.orders"], key=lambda row: row["_position"])
        assert "".join(row["_op"] for row in log) == "trrrr"

    @pytest.mark.parametrize(("whole", "seen"), [(1, [10, 9, 8, 9]), (1000, [10, 9, 9])])
    def test_a_keyed_target_is_never_seen_empty_while_a_table_is_copied_again(
        self, database, tmp_path, monkeypatch, whole, seen
    ):
        monkeypatch.setattr(chunks, "WHOLE_ROWS", whole)
        lake = Delta(DeltaConfig(path=str(tmp_path / "{topic}"), mode="upsert"))
        reader = database.source(seed_chunk_rows=4)
        with running(tmp_path, reader, {"lake": lake}) as loop:
            drive(loop)
            before = DeltaTable(str(tmp_path / "public.orders")).version()
            database.run("DELETE FROM orders WHERE id = 10")
            drive(loop)
            Requests(reader.context.state_dir).add("resync", ["public.orders"])
            drive(loop)
            table = DeltaTable(str(tmp_path / "public.orders"))
            counts = []
            for version in range(before, table.version() + 1):
                table.load_as_version(version)
                counts.append(table.to_pyarrow_table().num_rows)
        assert counts == seen

    def test_a_range_gives_the_same_rows_after_a_command(self, database, tmp_path):
        with opened(database.source(heartbeat_secs=600), SourceContext(tmp_path)) as reader:
            position = caught_up(reader, reader.initial())
            database.run("UPDATE orders SET note = 'x'", "UPDATE items SET note = 'x'")
            Requests(tmp_path).add("pause", ["public.orders"])
            end = reader.latest(position, ReadLimit(rows=100))
            assert end.tables["public.orders"].state == "paused"
            first, _ = read(reader, position, end)
            assert first == read(reader, position, end)[0]
            assert len(first["public.orders"]) == len(first["public.items"]) == 10
            database.run("UPDATE orders SET note = 'y'", "UPDATE items SET note = 'y'")
            after, _ = read(reader, end, reader.latest(end, ReadLimit(rows=100)))
            assert list(after) == ["public.items"]

    def test_a_table_that_changed_is_copied_over_the_rows_in_the_target(self, database, tmp_path):
        mirror = Tables(tmp_path, database.source(seed_chunk_rows=3))
        mirror.run()
        database.run("ALTER TABLE orders ADD COLUMN more int DEFAULT 1", "DELETE FROM orders WHERE id = 7")
        mirror.run()
        database.run("UPDATE orders SET id = 70 WHERE id = 8", "INSERT INTO orders VALUES (7)")
        mirror.run()
        assert "t" not in mirror.ops("orders")
        log = [{"more": None} | row for row in mirror.log("public.orders")]
        assert replayed(log, ["id"], refreshed=True) == database.table("orders")

    def test_another_key_makes_it_another_table(self, database, tmp_path):
        mirror = Tables(tmp_path, database.source())
        mirror.run()
        database.run(
            "ALTER TABLE orders DROP CONSTRAINT orders_pkey",
            "ALTER TABLE orders ALTER note SET NOT NULL",
            "ALTER TABLE orders ADD PRIMARY KEY (note)",
        )
        mirror.run()
        assert mirror.ops("orders") == "r" * 10 + "t" + "r" * 10


class TestBadTables:
    def test_a_table_that_may_not_be_read_is_set_aside_and_tried_again(self, database, tmp_path, monkeypatch):
        monkeypatch.setattr(tables, "RETRY_SECS", 0.0)
        mirror = Tables(tmp_path, database.source(dsn=_as_reader(database)))
        database.run("REVOKE SELECT ON orders FROM reader")
        mirror.run(until="copied")
        failed = mirror.failed("orders")
        assert (failed.state, failed.code) == ("failed", "PEN-3006")
        assert "permission denied" in failed.error
        assert failed.hint.startswith("GRANT SELECT")
        check(database, mirror, "items")
        database.run("GRANT SELECT ON orders TO reader", "INSERT INTO orders VALUES (11)")
        mirror.run()
        check(database, mirror)
        assert mirror.states() == {"orders": "active", "items": "active"}
        database.run("INSERT INTO items VALUES (11)")
        mirror.run()  # the old failure goes once the log behind the copy is read
        assert not any(progress.failure for progress in mirror.position.tables.values())

    def test_a_row_that_cannot_be_read_in_the_middle_of_a_copy_sets_its_table_aside(
        self, database, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(tables, "RETRY_SECS", 0.0)
        mirror = Tables(tmp_path, database.source())
        database.run("DELETE FROM items WHERE id = 5")
        with monkeypatch.context() as patched:
            failing = {"note": "CASE WHEN id = 5 THEN (1 / (id - 5))::text ELSE note END"}
            patched.setattr(copy, "select_native", lambda column, catalog: failing.get(column.name, column.name))
            mirror.run(until="copied")
        failed = mirror.failed("orders")
        assert (failed.state, failed.code) == ("failed", "PEN-3006")
        assert "division by zero" in failed.error
        database.run("INSERT INTO orders VALUES (11)")
        mirror.run()
        check(database, mirror)

    def test_rows_that_a_sink_refuses_set_their_table_aside(self, database, tmp_path, monkeypatch):
        monkeypatch.setattr(tables, "RETRY_SECS", 0.0)
        mirror = Tables(tmp_path, database.source(), picky=True)
        mirror.run()
        database.run("INSERT INTO orders VALUES (11, 'bad')", "INSERT INTO items VALUES (11)")
        mirror.run(until="copied")
        check(database, mirror, "items")
        failed = mirror.failed("orders")
        assert (failed.code, failed.hint) == ("PEN-4000", "mend it")
        database.run("UPDATE orders SET note = 'good' WHERE id = 11", "INSERT INTO items VALUES (12)")
        mirror.run()
        check(database, mirror)

    def test_a_copy_whose_rows_are_refused_leaves_the_target_as_it_was(self, database, tmp_path):
        mirror = Tables(tmp_path, database.source(), picky=True)
        mirror.run()
        mirror.ask("pause", "public.orders")
        mirror.run()
        database.run("INSERT INTO orders VALUES (0, 'bad')")
        mirror.ask("resume", "public.orders")
        mirror.run()
        assert mirror.states()["orders"] == "failed"
        assert mirror.ops("orders") == "r" * 10

    @pytest.mark.parametrize("mode", ["upsert", "changes"])
    def test_a_table_that_one_sink_refuses_in_the_middle_of_its_copy_is_cleared_in_the_other(
        self, database, tmp_path, mode, monkeypatch
    ):
        monkeypatch.setattr(tables, "RETRY_SECS", tables.MOST_RETRY_SECS)  # only `resume` copies it again
        database.run("UPDATE orders SET note = 'bad' WHERE id = 8")
        other = Delta(DeltaConfig(path=str(tmp_path / "lake/{topic}"), mode=mode))
        picky = PickySink(MemorySinkConfig(path=tmp_path / "picky"))
        with Lake(tmp_path, database.source(seed_chunk_rows=2), {"picky": picky, "lake": other}) as lake:
            most = 0
            for _ in range(30):
                lake.loop.step()
                if (tmp_path / "lake/public.orders/_delta_log").exists():
                    most = max(most, len(lake.table("public.orders")))
            assert most >= 4, "the copy was to be refused after some of its rows"
            known = lake.source.tables(lake.position)["public.orders"]
            assert (known.state, known.cleared, known.code) == ("failed", True, "PEN-4000")
            assert "the targets are cleared" in known.note
            assert [row["id"] for row in picky.visible("/public.orders") if row["_op"] != "t"][-1] < 8
            log = sorted(picky.visible("/public.orders"), key=lambda row: row["_position"])
            assert log[-1]["_op"] == "t"
            held = sorted(lake.table("public.orders"), key=lambda row: row.get("_position", ""))
            assert held == [] if mode == "upsert" else held[-1]["_op"] == "t"
            assert len(lake.table("public.items")) == 10, "the others go on"
            rows = len(held)
            database.run("INSERT INTO orders VALUES (11, 'good')")
            for retried in range(2):  # the next copies are refused as well, and change nothing
                Requests(lake.source.context.state_dir).add("resume", ["public.orders"])
                for _ in range(4):
                    lake.loop.step()
                known = lake.source.tables(lake.position)["public.orders"]
                assert (known.state, known.tries, known.cleared) == ("failed", 2 + retried, True)
                assert len(lake.table("public.orders")) == rows
            database.run("UPDATE orders SET note = 'good' WHERE id = 8")
            Requests(lake.source.context.state_dir).add("resume", ["public.orders"])
            lake.catch_up()
            assert lake.source.tables(lake.position)["public.orders"].state == "active"
            if mode == "upsert":
                assert sorted(row["id"] for row in lake.table("public.orders")) == list(range(1, 12))

    def test_an_identity_that_is_lost_and_found_between_two_looks_loses_no_change(
        self, database, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(tables, "RETRY_SECS", 0.0)
        mirror = Tables(tmp_path, database.source())
        mirror.run()
        with opened(mirror.source) as reader:
            start = mirror.position
            database.run("INSERT INTO orders VALUES (11)")
            end = reader.latest(start, ReadLimit(rows=100))
            database.run("ALTER TABLE orders DROP CONSTRAINT orders_pkey")
            with opened(database.source()) as task:  # it looks at the catalog while the key is away
                database.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
                rows, notes = read(task, start, end)
            assert rows == {}
            assert reader.next_start(end, notes).tables["public.orders"].state == "failed"

    def test_pauses_between_tries_grow_and_end(self):
        progress = tables.Waiting(oid=1)
        pauses = []
        for _ in range(9):
            failed = progress.failed(Refused(stream="public.t", at=1000.0, code="PEN-3000", message="no"))
            pauses.append(failed.failure.next_try - 1000)
            progress = failed.become(tables.Waiting)
        assert pauses == [10, 20, 40, 80, 160, 320, 600, 600, 600]
        assert progress.failure.tries == 9

    def test_a_value_that_cannot_be_decoded_sets_its_table_aside(self, database, tmp_path):
        database.run("CREATE TABLE moments (id int8 PRIMARY KEY, at timestamp)")
        mirror = Tables(tmp_path, database.source())
        mirror.run()
        database.run("INSERT INTO moments VALUES (1, '294276-12-31')", "INSERT INTO items VALUES (11)")
        mirror.run(until="copied")
        assert mirror.states() == {"orders": "active", "items": "active", "moments": "failed"}
        check(database, mirror, "items")

    def test_a_table_that_loses_its_identity_is_set_aside_and_comes_back(self, database, tmp_path, monkeypatch):
        monkeypatch.setattr(tables, "RETRY_SECS", 0.0)
        mirror = Tables(tmp_path, database.source(tables=["public.orders", "public.items"]))
        mirror.run()
        database.run("ALTER TABLE orders DROP CONSTRAINT orders_pkey", "INSERT INTO items VALUES (11)")
        mirror.run()
        check(database, mirror, "items")
        failed = mirror.failed("orders")
        assert "no replica identity" in failed.error
        assert failed.hint.startswith('ALTER TABLE "public"."orders" REPLICA IDENTITY FULL; ')
        assert failed.hint.endswith("ADD PRIMARY KEY")
        database.run("INSERT INTO orders VALUES (11)", "ALTER TABLE orders ADD PRIMARY KEY (id)")
        mirror.run()
        check(database, mirror)

    def test_a_new_table_that_may_not_be_published_does_not_stop_the_others(self, database, tmp_path):
        mirror = Tables(tmp_path, database.source(dsn=_as_reader(database)))
        database.run("ALTER TABLE orders OWNER TO reader", "ALTER TABLE items OWNER TO reader")
        mirror.run()
        database.run("CREATE TABLE foreign_one (id int PRIMARY KEY)", "INSERT INTO items VALUES (11)")
        mirror.run(until="copied")
        assert mirror.states() == {"orders": "active", "items": "active", "foreign_one": "failed"}
        check(database, mirror)

    def test_a_lock_on_one_table_does_not_hold_the_others_up(self, database, tmp_path, monkeypatch):
        monkeypatch.setattr(table_errors, "LOCK_SECS", 1)
        mirror = Tables(tmp_path, database.source())
        with psycopg.connect(database.dsn) as locking:
            mirror.source.open()
            mirror.source.initial()
            mirror.source.close()
            locking.execute("LOCK TABLE orders IN ACCESS EXCLUSIVE MODE")
            mirror.run(until="copied")
        assert mirror.states() == {"orders": "failed", "items": "active"}

    def test_failed_tables_are_shown_with_their_reason_and_counted(self, database, tmp_path):
        mirror = Tables(tmp_path, database.source(dsn=_as_reader(database)))
        database.run("REVOKE SELECT ON orders FROM reader")
        mirror.run(until="copied")
        with opened(mirror.source) as reader:
            reader.latest(mirror.position, ReadLimit(rows=1))
            shown, counted = reader.tables(mirror.position), reader.metrics().custom
        assert (shown["public.orders"].state, shown["public.orders"].code) == ("failed", "PEN-3006")
        assert (counted["tables_failed"], counted["tables_active"]) == (1, 1)

    def test_a_table_that_breaks_between_plan_and_reading_is_set_aside(self, database):
        with opened(database.source(dsn=_as_reader(database))) as reader:
            start = reader.initial()
            end = reader.latest(start, ReadLimit(rows=100, parallelism=2))
            parts = reader.split(start, end)
            database.run("REVOKE SELECT ON orders FROM reader")
            for planned in ("before", "again after a crash"):
                parts = parts if planned == "before" else reader.split(start, end)
                notes = [item.value for part in parts for item in reader.read(part) if isinstance(item, Note)]
                tables = reader.next_start(end, notes).tables
                assert (tables["public.orders"].state, tables["public.items"].state) == ("failed", "seeded")

    def test_columns_that_a_target_cannot_follow_set_their_table_aside(self, database, tmp_path, monkeypatch):
        monkeypatch.setattr(tables, "RETRY_SECS", 0.0)
        lake = Delta(DeltaConfig(path=str(tmp_path / "{topic}"), mode="upsert"))
        reader = database.source()
        with running(tmp_path, reader, {"lake": lake}) as loop:
            drive(loop)
            database.run("ALTER TABLE orders ALTER note TYPE int USING 1", "INSERT INTO items VALUES (11)")
            drive(loop, lambda: rows(tmp_path, "items") == 11, idle=False)
            failed = loop.position("source").tables["public.orders"].failure
            assert failed.code == "PEN-4001"
            database.run("ALTER TABLE orders ALTER note TYPE text", "INSERT INTO orders VALUES (11)")
            drive(loop, lambda: rows(tmp_path, "orders") == 11)
            assert loop.position("source").tables["public.orders"].state == "seeded"

    def test_with_never_a_table_is_copied_only_when_that_is_asked_for(self, database, tmp_path):
        database.run("CREATE TABLE moments (id int8 PRIMARY KEY, at timestamp)")
        mirror = Tables(tmp_path, database.source(snapshot="never", heartbeat_secs=0.5))
        mirror.run()
        database.run("INSERT INTO moments VALUES (1, '294276-12-31')", "INSERT INTO items VALUES (11)")
        mirror.run()
        assert mirror.position.tables["public.moments"].failure.next_try is None
        mirror.ask("resume", "public.moments")
        mirror.run()
        database.run("INSERT INTO moments VALUES (2, '2024-01-01')", "DELETE FROM moments WHERE id = 1")
        mirror.run()
        assert mirror.ops("moments") == "cd"
        mirror.ask("resync", "public.moments")
        mirror.run()
        assert mirror.ops("moments") == "cdtr"

    def test_a_column_with_the_name_of_a_change_column_leaves_its_table_out(self, database, tmp_path):
        database.run("CREATE TABLE odd (id int8 PRIMARY KEY, _op text)")
        mirror = Tables(tmp_path, database.source())
        mirror.run()
        assert mirror.states() == {"orders": "active", "items": "active", "odd": "left_out"}
        database.run("ALTER TABLE items ADD COLUMN _position text")
        mirror.run()
        assert mirror.states() == {"orders": "active", "items": "failed", "odd": "left_out"}


PIPELINE = """
connector_name = "shop"
delivery = "exactly-once"

[source]
connector = "postgres_cdc"
dsn = "{dsn}"
slot = "{slot}"
tables = ["public.*"]

[[sinks]]
name = "lake"
connector = "delta"
path = "lake/{{topic}}"
mode = "upsert"
"""


class TestCommandLine:
    @pytest.fixture
    def file(self, database, tmp_path):
        path = tmp_path / "pipeline.toml"
        path.write_text(PIPELINE.format(dsn=database.dsn, slot=database.name))
        return path

    def test_tables_are_shown_and_changed_with_nothing_running(self, database, file, cli):
        assert cli("tables", file, "show")[1].startswith("shop has not read any table yet")
        drain(file)
        code, out, _ = cli("tables", file, "show")
        assert code == 0
        assert [line.split()[:3] for line in out.splitlines()[1:]] == [
            ["public.items", "active", "10"],
            ["public.orders", "active", "10"],
        ]
        assert cli("tables", file, "pause", "*.ord*")[1] == "pause public.orders: kept for the next start\n"
        assert "active → pause" in cli("tables", "show", file, "public.orders")[1]
        drain(file)
        drain(file)
        shown = json.loads(cli("tables", file, "show", "--json")[1])
        assert [(each["stream"], each["state"], each["asked"]) for each in shown] == [
            ("public.items", "active", []),
            ("public.orders", "paused", []),
        ]

    def test_a_name_cannot_break_the_list_or_reach_the_terminal(self, database, file, cli, caplog):
        drain(file)
        database.run('CREATE TABLE "a\nb\x1b[31m" (id int8 PRIMARY KEY)')
        drain(file)
        out = cli("tables", "show", file)[1]
        assert "public.a\\nb" in out
        assert "\x1b[31m" not in out + caplog.text

    def test_check_says_that_the_slot_of_earlier_runs_is_gone(self, database, file, cli):
        assert "one more will be made" in cli("check", file)[1]
        drain(file)
        assert "any more" not in cli("check", file)[1]
        database.run(f"SELECT pg_drop_replication_slot('{database.name}')")
        code, out, _ = cli("check", file)
        assert code == 1
        assert f"PEN-5011 the replication slot '{database.name}' does not exist any more" in out
        file.write_text(file.read_text().replace("[[sinks]]", 'snapshot = "when_needed"\n\n[[sinks]]'))
        assert "one more will be made" in cli("check", file)[1]

    def test_a_run_goes_on_when_every_table_is_gone(self, database, file, cli):
        drain(file)
        database.run("DROP TABLE items", "ALTER TABLE orders RENAME TO aside", "CREATE SCHEMA elsewhere")
        database.run("ALTER TABLE aside SET SCHEMA elsewhere")
        drain(file)
        assert {each["state"] for each in json.loads(cli("tables", file, "show", "--json")[1])} == {"gone"}
        assert "no table" in cli("check", file)[1]
        database.run("ALTER TABLE elsewhere.aside SET SCHEMA public", "ALTER TABLE aside RENAME TO orders")
        drain(file)
        states = {each["stream"]: each["state"] for each in json.loads(cli("tables", file, "show", "--json")[1])}
        assert states == {"public.items": "gone", "public.orders": "active"}

    def test_a_table_that_nobody_knows_is_refused_with_the_nearest(self, file, cli):
        drain(file)
        code, _, err = cli("tables", file, "pause", "public.order")
        assert code == 2
        assert "no table is called 'public.order'; the nearest is 'public.orders'" in err
        assert cli("tables", file, "pause")[0] == cli("tables", file)[0] == 2
        cli("tables", file, "skip", "public.orders")
        drain(file)
        code, _, err = cli("tables", file, "resume", "public.orders")
        assert code == 2
        assert "resync FILE public.orders" in err

    def test_what_failed_is_shown_with_code_hint_and_next_try(self, database, file, cli, monkeypatch):
        file.write_text(PIPELINE.format(dsn=_as_reader(database), slot=database.name))
        database.run("REVOKE SELECT ON orders FROM reader")
        drain(file)
        out = cli("tables", file, "show", "*orders")[1]
        assert "failed" in out
        assert "PEN-3006 cannot copy public.orders" in out
        assert "→ GRANT SELECT" in out
        assert "try 2 in 0:00:0" in out

    def test_a_drain_reads_what_was_committed_before_it_also_while_a_failed_table_is_tried_again(
        self, database, file, tmp_path, monkeypatch
    ):
        """The failed table is due when the drain begins, so that its first range is a copy and not log."""
        due = []
        monkeypatch.setattr(tables.Failed, "is_due", lambda failed, now: bool(due and due.pop()))
        file.write_text(PIPELINE.format(dsn=_as_reader(database), slot=database.name))
        database.run("REVOKE SELECT ON orders FROM reader")
        drain(file)
        database.run("INSERT INTO items VALUES (900)")
        due.append(True)
        drain(file)
        assert not due
        assert 900 in DeltaTable(str(tmp_path / "lake/public.items")).to_pyarrow_table().column("id").to_pylist()


def drain(file):
    supervisor.run(Pipeline.from_toml(file), engine=ForkEngine(2), drain=True)


class TestSeeded:
    def test_sinks_are_told_of_complete_copies_and_asked_before_another(self, database, tmp_path):
        mirror = Tables(tmp_path, database.source())
        mirror.run()
        assert mirror._sink().is_seeded("/public.orders")
        fresh = Tables(tmp_path / "fresh", database.source())
        (tmp_path / "fresh").mkdir()
        (tmp_path / "target" / "public.items" / "seeded").unlink()
        for name in ("orders", "items"):
            held = tmp_path / "target" / f"public.{name}" / "seeded"
            if held.exists():
                (tmp_path / "fresh" / "target" / f"public.{name}").mkdir(parents=True)
                (tmp_path / "fresh" / "target" / f"public.{name}" / "seeded").touch()
        database.run("INSERT INTO orders VALUES (11)", "INSERT INTO items VALUES (11)")
        fresh.run()
        assert fresh.ops("orders") == "c"
        assert sorted(fresh.ops("items")) == ["r"] * 11

    def test_a_slot_that_was_just_made_copies_also_what_is_seeded(self, database, tmp_path):
        (tmp_path / "target" / "public.orders").mkdir(parents=True)
        (tmp_path / "target" / "public.orders" / "seeded").touch()
        mirror = Tables(tmp_path, database.source())
        mirror.run()
        assert mirror.ops("orders") == "t" + "r" * 10
        assert mirror.ops("items") == "r" * 10


class TestRecovery:
    def test_a_planned_range_that_went_with_its_slot_is_withdrawn(self, database, tmp_path):
        sink = MemorySink(MemorySinkConfig(path=tmp_path / "target"))
        mirror = Tables(tmp_path, database.source(snapshot="when_needed"))
        mirror.run()
        database.run("INSERT INTO orders VALUES (11)")
        assert mirror.killed("plan.after=kill")
        number = State(tmp_path / "state", "mirror").peek().newest.number
        database.run(f"SELECT pg_drop_replication_slot('{database.name}')", "DELETE FROM orders WHERE id = 1")
        mirror.run()
        check(database, mirror)
        closed = State(tmp_path / "state", "mirror").peek().load(number)
        assert closed.state == "committed"
        assert closed.ranges["source"].start == closed.ranges["source"].end
        assert sink.committed_epoch("mirror", "/public.orders").number > number

    def test_a_planned_range_is_not_withdrawn_without_being_told_to_copy_again(self, database, tmp_path):
        mirror = Tables(tmp_path, database.source())
        mirror.run()
        database.run("INSERT INTO orders VALUES (11)")
        assert mirror.killed("plan.after=kill")
        database.run(f"SELECT pg_drop_replication_slot('{database.name}')")
        with pytest.raises(failures.SlotLost):
            mirror.run()


class TestLaws(TableSourceContract):
    """The database has two tables of ten rows each."""

    @pytest.fixture
    def source(self, database):
        return database.source(seed_chunk_rows=4)

    @pytest.fixture
    def change(self, database):
        numbers = itertools.count(100)

        def happen(stream):
            number = next(numbers)
            database.run(
                f"INSERT INTO {stream} VALUES ({number}, 'new')",
                f"UPDATE {stream} SET note = 'changed {number}' WHERE id = {number % 5 + 1}",
                f"DELETE FROM {stream} WHERE id = {number % 3 + 6}",
            )

        return happen

    @pytest.fixture
    def content(self, database):
        return database.table


def _as_reader(database):
    """The dsn of a user who may do what a capture needs, and no more."""
    if not database.rows("SELECT FROM pg_roles WHERE rolname = 'reader'"):
        database.run("CREATE ROLE reader LOGIN REPLICATION")
    database.run(
        f"GRANT CREATE ON DATABASE {database.name} TO reader",
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader",
        "GRANT EXECUTE ON FUNCTION pg_control_system() TO reader",
        "CREATE PUBLICATION penstock FOR TABLE orders, items WITH (publish_generated_columns = stored)",
        "ALTER PUBLICATION penstock OWNER TO reader",
    )
    return database.dsn.replace("postgres@", "reader@")


@contextmanager
def opened(reader, context=SourceContext()):
    reader.open(context)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def running(path, reader, sinks):
    """An epoch loop in this process."""
    state = State(path / "state", "mirror")
    state.open()
    loop = EpochLoop(state, {"source": reader}, sinks, Router((), tuple(sinks)), ForkEngine(2))
    try:
        loop.contexts.open()
        loop.start([])
        yield loop
    finally:
        reader.close()
        state.close()


def drive(loop, until=lambda: True, idle=True):
    """Step until the condition holds and, if it must be `idle`, there is nothing left to do."""

    def done():
        report = loop.step()
        return until() and not (idle and (report or loop.position("source").copying))

    wait_until(done, "the epochs")


def rows(lake, name):
    return DeltaTable(str(lake / f"public.{name}")).to_pyarrow_table().num_rows


def read(reader, start, end):
    """The rows of a range by stream, and its notes."""
    rows, notes = {}, []
    for split in reader.split(start, end):
        for item in reader.read(split):
            if isinstance(item, Note):
                notes.append(item.value)
            else:
                rows.setdefault(item.stream, []).extend(item.records.to_pylist())
    return rows, notes


def caught_up(reader, position):
    """The position with nothing left to copy or to read."""
    while True:
        end = reader.latest(position, ReadLimit(rows=1000))
        if end == position:
            return position
        position = reader.next_start(end, read(reader, position, end)[1])
        reader.ack(position)


def test_notes_of_tables_that_a_position_does_not_know_yet_change_nothing():
    failed = {"stream": "public.new", "code": "PEN-3000", "message": "", "hint": "", "at": 0.0}
    position = LogPosition(lsn=8, settled=8)
    notes = [{"failed": failed}, {"again": ["public.new"]}, {"reset": ["public.new"]}]
    assert position.after(notes, retried=True, whole=1_000) == position
