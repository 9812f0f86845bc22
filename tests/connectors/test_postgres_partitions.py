"""Partitions that come, go and are emptied as a whole, of which the log of their root says nothing; against a real PostgreSQL."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading

import psycopg
import pytest

from mirrored import Lake, database_on
from penstock.connectors.postgres_cdc import plan, table_errors
from penstock.connectors.postgres_cdc.log import slot
from penstock.source import ReadLimit
from penstock.testing.mirror import Mirror, replayed
from penstock.testing.processes import wait_until

_NUMBERS = itertools.count()

ROOT = [
    "CREATE TABLE {t} (id int8, part int, note text, story text, PRIMARY KEY (id, part)) PARTITION BY LIST (part)",
    "CREATE TABLE {t}_1 PARTITION OF {t} FOR VALUES IN (1)",
    "CREATE TABLE {t}_2 PARTITION OF {t} FOR VALUES IN (2)",
    "CREATE TABLE {t}_3 PARTITION OF {t} FOR VALUES IN (3) PARTITION BY RANGE (id)",
    "CREATE TABLE {t}_3a PARTITION OF {t}_3 FOR VALUES FROM (0) TO (7)",
    "CREATE TABLE {t}_3b PARTITION OF {t}_3 FOR VALUES FROM (7) TO (1000)",
    "INSERT INTO {t} SELECT i, 1 + i % 3, 'n' || i, repeat(md5(i::text), 200) FROM generate_series(1, 12) i",
]
ALONE = "CREATE TABLE {t}_4 (id int8 NOT NULL, part int NOT NULL, note text, story text)"
ATTACH = "ALTER TABLE {t} ATTACH PARTITION {t}_4 FOR VALUES IN (4)"
FILL = "INSERT INTO {t}_4 SELECT i, 4, 'attached', repeat(md5(i::text), 200) FROM generate_series(1, 5) i"

COPIED = {
    "truncated": ["TRUNCATE {t}_1", "INSERT INTO {t} VALUES (1, 1, 'after')"],
    "truncated_below": ["TRUNCATE {t}_3"],
    "truncated_and_rewritten": ["TRUNCATE {t}_3b", "INSERT INTO {t} VALUES (8, 3, 'after')", "VACUUM FULL {t}_3b"],
    "truncated_one_by_one": ["TRUNCATE {t}_1, {t}_2, {t}_3a, {t}_3b", "INSERT INTO {t} VALUES (1, 1, 'after')"],
    "truncated_like_its_root": ["BEGIN; TRUNCATE {t}; INSERT INTO {t} VALUES (1, 1), (2, 2); TRUNCATE {t}_1; COMMIT"],
    "made_and_truncated": [
        "CREATE TABLE {t}_4 PARTITION OF {t} FOR VALUES IN (4)",
        "INSERT INTO {t} VALUES (1, 4), (2, 4)",
        "TRUNCATE {t}_4",
    ],
    "made_and_truncated_at_once": [
        "BEGIN; CREATE TABLE {t}_4 PARTITION OF {t} FOR VALUES IN (4);"
        "INSERT INTO {t} VALUES (1, 4), (2, 4); TRUNCATE {t}_4; INSERT INTO {t} VALUES (2, 4, 'after'); COMMIT"
    ],
    "attached": [ALONE, FILL, ATTACH],
    "attached_at_once": [f"BEGIN; {ALONE}; {FILL}; {ATTACH}; COMMIT"],
    "attached_behind_a_savepoint": [f"BEGIN; {ALONE}; SAVEPOINT s; {FILL}; RELEASE s; {ATTACH}; COMMIT"],
    "attached_and_changed": [
        ALONE,
        FILL,
        ATTACH,
        "UPDATE {t} SET note = 'u' WHERE part = 4 AND id < 3",  # the story is not sent, and the target has never had it
        "UPDATE {t} SET part = 1 WHERE part = 4 AND id = 4",
        "DELETE FROM {t} WHERE part = 4 AND id = 5",
    ],
    "attached_and_truncated": [ALONE, FILL, ATTACH, "INSERT INTO {t} VALUES (9, 4, 'logged')", "TRUNCATE {t}_4"],
    "attached_with_partitions": [
        f"{ALONE} PARTITION BY RANGE (id)",
        "CREATE TABLE {t}_4a PARTITION OF {t}_4 FOR VALUES FROM (0) TO (1000)",
        FILL,
        ATTACH,
    ],
    "attached_below": [
        "CREATE TABLE {t}_5 PARTITION OF {t} FOR VALUES IN (5) PARTITION BY RANGE (id)",
        "CREATE TABLE {t}_5a (LIKE {t})",
        "INSERT INTO {t}_5a VALUES (1, 5, 'attached')",
        "ALTER TABLE {t}_5 ATTACH PARTITION {t}_5a FOR VALUES FROM (0) TO (1000)",
    ],
    "detached": ["UPDATE {t} SET note = 'u' WHERE part = 1", "ALTER TABLE {t} DETACH PARTITION {t}_1"],
    "detached_while_read": ["ALTER TABLE {t} DETACH PARTITION {t}_1 CONCURRENTLY"],
    "detached_with_partitions": ["ALTER TABLE {t} DETACH PARTITION {t}_3"],
    "dropped": ["DROP TABLE {t}_2"],
    "dropped_and_made": ["DROP TABLE {t}_2", "CREATE TABLE {t}_2 PARTITION OF {t} FOR VALUES IN (2)"],
    "made_filled_and_dropped": [
        "CREATE TABLE {t}_4 PARTITION OF {t} FOR VALUES IN (4)",
        "INSERT INTO {t} VALUES (1, 4), (2, 4)",
        "DROP TABLE {t}_4",
    ],
    "made_filled_and_detached": [
        "CREATE TABLE {t}_4 PARTITION OF {t} FOR VALUES IN (4)",
        "INSERT INTO {t} VALUES (1, 4), (2, 4)",
        "ALTER TABLE {t} DETACH PARTITION {t}_4",
        "DELETE FROM {t} WHERE id = 1",
    ],
    "attached_again": [
        "ALTER TABLE {t} DETACH PARTITION {t}_1",
        "DELETE FROM {t}_1 WHERE id > 5",
        "UPDATE {t}_1 SET note = 'aside'",
        "ALTER TABLE {t} ATTACH PARTITION {t}_1 FOR VALUES IN (1)",
    ],
    "attached_again_with_partitions": [
        "ALTER TABLE {t} DETACH PARTITION {t}_3",
        "DELETE FROM {t}_3 WHERE id < 9",
        "ALTER TABLE {t} ATTACH PARTITION {t}_3 FOR VALUES IN (3)",
    ],
}
NOT_COPIED = {
    "made_and_filled": [
        "BEGIN; CREATE TABLE {t}_4 PARTITION OF {t} FOR VALUES IN (4) PARTITION BY RANGE (id);"
        "CREATE TABLE {t}_4a PARTITION OF {t}_4 FOR VALUES FROM (0) TO (1000); INSERT INTO {t} VALUES (1, 4, 'new'); COMMIT"
    ],
    "attached_empty": [ALONE, ATTACH],
    "attached_and_emptied": [ALONE, FILL, ATTACH, "DELETE FROM {t} WHERE part = 4"],
    "rewritten": ["VACUUM FULL {t}_1", "UPDATE {t} SET note = 'u' WHERE part = 1", "CLUSTER {t}_2 USING {t}_2_pkey"],
    "made_and_rewritten": [
        "CREATE TABLE {t}_4 PARTITION OF {t} FOR VALUES IN (4)",
        "INSERT INTO {t} VALUES (1, 4, 'new')",
        "VACUUM FULL {t}_4",
    ],
    "emptied": ["TRUNCATE {t}", "INSERT INTO {t} VALUES (1, 1, 'after'), (2, 3, 'after')"],
    "emptied_with_another": ["TRUNCATE {t}, {t}_1", "INSERT INTO {t} VALUES (1, 1, 'after')"],
    "nearly_detached": ["BEGIN; ALTER TABLE {t} DETACH PARTITION {t}_1; ROLLBACK", "UPDATE {t} SET note = 'u'"],
}
CASES = {**COPIED, **NOT_COPIED}


@pytest.fixture
def database(server):
    with database_on(server, f"parts_{next(_NUMBERS)}") as made:
        yield made


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch):
    monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)


def make(database, table="parts"):
    database.run(*(statement.format(t=table) for statement in ROOT))


def do(database, *statements, table="parts"):
    database.run(*(statement.format(t=table) for statement in statements))


def same(lake, database, table="parts"):
    return lake.table(f"public.{table}") == database.table(table)


def copies(lake, table="parts"):
    return lake.position.tables[f"public.{table}"].copies


@pytest.fixture(scope="module", params=["running", "down"])
def followed(server, tmp_path_factory, request):
    """
    All of them at once, each with a root of its own, while the pipeline is running or down; then changes as they come.

    Gives per root whether the mirror was equal after each of the two, and how often it was copied.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(plan, "LOOKED_SECS", 0.0)
        database = stack.enter_context(database_on(server, f"followed_{request.param}"))
        for table in CASES:
            make(database, table)
        path, roots = tmp_path_factory.mktemp("followed"), [f"public.{table}" for table in CASES]
        lake = stack.enter_context(Lake(path, database.source(tables=roots)))
        lake.catch_up()
        if request.param == "down":
            lake.__exit__()
        for table, statements in CASES.items():
            do(database, *statements, table=table)
        if request.param == "down":
            lake = stack.enter_context(Lake(path, database.source(tables=roots)))
        lake.catch_up()
        first = {table: same(lake, database, table) for table in CASES}
        for table in CASES:
            do(database, "UPDATE {t} SET note = 'last' WHERE id % 2 = 0", "DELETE FROM {t} WHERE id = 3", table=table)
        lake.catch_up()
        yield {table: (first[table], same(lake, database, table), copies(lake, table)) for table in CASES}


@pytest.mark.parametrize("what", CASES)
def test_what_happens_to_a_partition_as_a_whole_is_followed(followed, what):
    first, second, _ = followed[what]
    assert first
    assert second


@pytest.mark.parametrize("what", CASES)
def test_a_root_is_copied_anew_only_if_its_log_is_not_enough(followed, what):
    assert followed[what][2] == (2 if what in COPIED else 1)


class TestWhenItIsNoticed:
    def test_with_every_range_that_moves_over_the_log(self, database, tmp_path, monkeypatch):
        make(database)
        with Lake(tmp_path, database.source()) as lake:
            lake.catch_up()
            monkeypatch.setattr(plan, "LOOKED_SECS", 600.0)
            do(database, "TRUNCATE {t}_1", "INSERT INTO {t} VALUES (30, 2)")
            lake.catch_up()
            assert same(lake, database)

    def test_while_the_first_copy_runs(self, database, tmp_path):
        make(database)
        with Lake(tmp_path, database.source(seed_chunk_rows=2)) as lake:
            lake.loop.step()
            assert lake.position.copying
            do(database, "TRUNCATE {t}_2", ALONE, FILL, ATTACH, "ALTER TABLE {t} DETACH PARTITION {t}_1")
            lake.loop.step()
            do(database, "DROP TABLE {t}_3a", "INSERT INTO {t} VALUES (1, 2, 'after')")
            lake.catch_up()
            assert same(lake, database)

    def test_a_plan_that_was_never_carried_out_is_made_again(self, database, tmp_path):
        make(database)
        with Lake(tmp_path, database.source(tables=["public.parts"])) as lake:
            lake.catch_up()
            do(database, "INSERT INTO {t} VALUES (20, 1)", "TRUNCATE {t}_1", "ALTER TABLE {t} DETACH PARTITION {t}_2")
            planned = lake.source.latest(lake.position, ReadLimit())
            assert planned.tables["public.parts"].copies == 2
        with Lake(tmp_path, database.source(tables=["public.parts"])) as lake:
            assert copies(lake) == 1
            lake.catch_up()
            assert same(lake, database)
            assert copies(lake) == 2

    @pytest.mark.parametrize("failpoint", ["plan.after=kill", "commit.after=kill"])
    def test_a_crash_at_any_step_loses_none_of_it(self, database, tmp_path, failpoint):
        make(database)
        mirror = Mirror(tmp_path, database.source())
        mirror.run()
        do(database, "INSERT INTO {t} VALUES (20, 1), (21, 2)", "TRUNCATE {t}_1", ALONE, FILL, ATTACH)
        assert mirror.killed(failpoint)
        do(database, "DROP TABLE {t}_2", "UPDATE {t} SET note = 'u'")
        assert mirror.killed(failpoint)
        mirror.run()
        key = ["id", "part"]
        assert sorted(replayed(mirror.log("public.parts"), key, refreshed=True), key=repr) == database.table("parts")

    def test_a_truncate_that_the_log_holds_before_anybody_sees_it(self, server, database, tmp_path):
        def waits():
            return database.rows("SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'")

        make(database)
        database.run("SET synchronous_commit = local")
        with Lake(tmp_path, database.source()) as lake, psycopg.connect(database.dsn, autocommit=True) as other:
            lake.catch_up()
            try:
                database.run("ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
                while not waits():  # not every process of the server has heard of it at the same time
                    writing = threading.Thread(
                        target=other.execute, args=["SELECT pg_logical_emit_message(true, '', '')"]
                    )
                    writing.start()
                    wait_until(lambda writing=writing: waits() or not writing.is_alive(), "a write waits or ends")
                database.run(f"SELECT pg_cancel_backend({other.info.backend_pid})")
                writing.join()
                truncating = threading.Thread(target=other.execute, args=["TRUNCATE parts_1"])
                truncating.start()
                wait_until(waits, "the truncate is in the log")
                database.run("INSERT INTO parts VALUES (30, 2, 'behind it')")
                behind = slot.server(database.connection).flushed
                while lake.position.lsn < behind or lake.loop.unacked:
                    lake.loop.step()
                assert waits()
            finally:
                database.run("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
            truncating.join()
            lake.catch_up()
            assert same(lake, database)
            assert copies(lake) == 2

    def test_files_that_a_range_does_not_explain_are_asked_about_again_with_the_next(self, database, tmp_path):
        make(database)
        with Lake(tmp_path, database.source()) as lake:
            lake.catch_up()
        more = "UPDATE {t} SET note = md5(random()::text), story = repeat(md5(random()::text), 200)"
        do(database, more, "VACUUM FULL {t}_2", more, more, "TRUNCATE {t}_1", more)
        with Lake(tmp_path, database.source(max_wal_bytes=1_000)) as lake:
            lake.loop.max_epoch_rows = 1_000_000
            assert lake.loop.step() is not None
            assert copies(lake) == 1  # it is further on
            lake.catch_up()
            assert same(lake, database)
            assert copies(lake) == 2
            parts = lake.position.tables["public.parts"].tree.parts
            assert {file for _, file in parts.values() if file} == {
                file
                for (file,) in database.rows(
                    "SELECT relfilenode FROM pg_class WHERE relname ~ '^parts_..?$' AND relkind = 'r'"
                )
            }

    def test_a_position_of_before_takes_the_partitions_over_as_they_are(self, database, tmp_path):
        make(database)
        with Lake(tmp_path, database.source()) as lake:
            lake.catch_up()
            database.run("DROP PUBLICATION penstock_truncates", "DROP TABLE parts_2")
            newest = lake.state.newest
            end = dict(newest.ranges["source"].end)
            end["tables"]["public.parts"]["tree"] = None
            ranges = {"source": newest.ranges["source"].model_copy(update={"end": end})}
            lake.state.save(newest.model_copy(update={"ranges": ranges}))
        with Lake(tmp_path, database.source()) as lake:
            lake.catch_up()
            assert copies(lake) == 1
            do(database, "VACUUM FULL {t}_3a")
            lake.catch_up()
            assert copies(lake) == 1
            do(database, "TRUNCATE {t}_1")
            lake.catch_up()
            assert same(lake, database)
            assert copies(lake) == 2

    def test_what_the_log_holds_of_a_partition_that_is_locked_is_read_and_so_are_the_others(
        self, database, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(table_errors, "LOCK_SECS", 1)
        make(database)
        database.run("CREATE TABLE orders (id int8 PRIMARY KEY)")
        with Lake(tmp_path, database.source()) as lake, psycopg.connect(database.dsn) as other:
            lake.catch_up()
            other.execute("LOCK TABLE parts_1 IN ACCESS EXCLUSIVE MODE")
            database.run("INSERT INTO orders VALUES (1)", "INSERT INTO parts VALUES (30, 2)")
            lake.catch_up()
            assert lake.table("public.orders") == [{"id": 1}]
            other.rollback()
            assert same(lake, database)
            assert copies(lake) == 1


class TestOptions:
    def test_rows_of_a_partition_that_left_may_stay(self, database, tmp_path):
        make(database)
        with Lake(tmp_path, database.source(detached_rows="keep")) as lake:
            lake.catch_up()
            before = database.table("parts")
            do(database, "ALTER TABLE {t} DETACH PARTITION {t}_1", "DROP TABLE {t}_2", "INSERT INTO {t} VALUES (30, 3)")
            lake.catch_up()
            new = {"id": 30, "part": 3, "note": None, "story": None}
            assert lake.table("public.parts") == sorted([*before, new], key=repr)
            assert copies(lake) == 1
            do(database, "UPDATE {t}_1 SET note = 'aside'", "ALTER TABLE {t} ATTACH PARTITION {t}_1 FOR VALUES IN (1)")
            lake.catch_up()
            stays = [row for row in before if row["part"] == 2]
            assert lake.table("public.parts") == sorted([*stays, *database.table("parts")], key=repr)

    def test_what_is_not_followed_without_copies_is_told(self, database, tmp_path, caplog):
        make(database)
        with Lake(tmp_path, database.source(snapshot="never")) as lake:
            lake.catch_up()
            with caplog.at_level(logging.WARNING, "penstock"):
                do(database, "DROP TABLE {t}_1", "TRUNCATE {t}_2", "INSERT INTO {t} VALUES (30, 3)")
                lake.catch_up()
                lake.catch_up()
            (told,) = caplog.messages
            assert told.startswith("public.parts: the partition public.parts_1 was detached or dropped; the partition")
            assert "public.parts_2 was truncated, or rewritten" in told
            assert told.endswith("which does not appear in the log: the target stays as it is")
            assert [row["id"] for row in lake.table("public.parts")] == [30]
        assert ("penstock_truncates",) not in database.rows("SELECT pubname FROM pg_publication")

    def test_without_the_publication_of_truncates_a_rewritten_partition_counts_as_truncated(self, database, tmp_path):
        make(database)
        database.run(
            "CREATE PUBLICATION penstock FOR TABLE parts WITH (publish_via_partition_root)",
            f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
        )
        options = {"manage": False, "tables": ["public.parts"]}
        with Lake(tmp_path, database.source(**options)) as lake:
            lake.catch_up()
            do(database, "TRUNCATE {t}_1")
            lake.catch_up()
            assert same(lake, database)
            do(database, "VACUUM FULL {t}_2")
            lake.catch_up()
            assert copies(lake) == 3
            findings = lake.source.check()
            (fix,) = [each.fix for each in findings if "penstock_truncates" in each.what]
            assert all(each.ok for each in findings)
            database.run(fix)
            lake.catch_up()
            assert not [each for each in lake.source.check() if "penstock_truncates" in each.what]
            do(database, "VACUUM FULL {t}_2")
            lake.catch_up()
            assert copies(lake) == 3
            do(database, "TRUNCATE {t}_2")
            lake.catch_up()
            assert same(lake, database)
            assert copies(lake) == 4

    def test_partitions_that_only_their_root_lets_read_are_copied(self, database, tmp_path):
        make(database)
        database.run(
            "CREATE PUBLICATION penstock FOR TABLE parts WITH (publish_via_partition_root)",
            "CREATE ROLE parts_reader LOGIN REPLICATION",
            "GRANT SELECT ON parts TO parts_reader",
        )
        try:
            source = database.source(dsn=database.dsn.replace("postgres@", "parts_reader@"), tables=["public.parts"])
            with Lake(tmp_path, source) as lake:
                lake.catch_up()
                do(database, ALONE, FILL, ATTACH)
                lake.catch_up()
                assert same(lake, database)
                assert lake.position.tables["public.parts"].state == "seeded"
        finally:
            database.run("DROP OWNED BY parts_reader", "DROP ROLE parts_reader")


@pytest.mark.parametrize("seed", [0])
def test_any_sequence_of_what_can_happen_to_partitions_leads_to_the_same_table(database, tmp_path, seed):
    chance = random.Random(seed)
    make(database)
    attached, aside, number = {1, 2}, set(), 4
    with contextlib.ExitStack() as stack:
        lake = stack.enter_context(Lake(tmp_path, database.source()))
        for step in range(60):
            part = chance.choice(sorted(attached)) if attached else 3
            leaf = f"parts_{part}" if part != 3 else "parts_3b"
            what = chance.choice(
                ["truncate", "new", "new", "attach", "detach", "back", "drop", "rewrite", "root", *["dml"] * 8]
            )
            if what == "truncate":
                database.run(f"TRUNCATE {chance.choice([leaf, leaf, 'parts_3a', 'parts_3'])}")
            elif what == "rewrite":
                database.run(f"VACUUM FULL {chance.choice([leaf, 'parts_3a'])}")
            elif what == "root":
                database.run("TRUNCATE parts")
            elif what in ("new", "attach"):
                number += 1
                rows = f"SELECT i, {number}, 'new', repeat(md5(i::text), 200) FROM generate_series(1, 6) i"
                made = [
                    f"CREATE TABLE parts_{number} PARTITION OF parts FOR VALUES IN ({number})",
                    f"INSERT INTO parts {rows}",
                ]
                if what == "attach":
                    fill = [f"INSERT INTO parts_{number} {rows}"] if chance.random() < 0.7 else []
                    attach = f"ALTER TABLE parts ATTACH PARTITION parts_{number} FOR VALUES IN ({number})"
                    made = [f"CREATE TABLE parts_{number} (LIKE parts)", *fill, attach]
                database.run(*([f"BEGIN; {'; '.join(made)}; COMMIT"] if chance.random() < 0.5 else made))
                attached.add(number)
            elif what in ("detach", "drop") and part != 3:
                database.run(f"ALTER TABLE parts DETACH PARTITION {leaf}" if what == "detach" else f"DROP TABLE {leaf}")
                attached.remove(part)
                aside |= {part} if what == "detach" else set()
            elif what == "back" and aside:
                part = aside.pop()
                database.run(
                    f"DELETE FROM parts_{part} WHERE id % 3 = 0",
                    f"UPDATE parts_{part} SET note = 'aside'",
                    f"ALTER TABLE parts ATTACH PARTITION parts_{part} FOR VALUES IN ({part})",
                )
                attached.add(part)
            elif what == "dml":
                database.run(
                    f"INSERT INTO parts VALUES ({100 + step}, {part}, 'dml', repeat('s', 5000))",
                    f"UPDATE parts SET note = 'u{step}' WHERE id % 4 = {step % 4}",
                    f"UPDATE parts SET part = {part}, id = id + 1000 * {step} WHERE id = {100 + step // 2}"
                    if part != 3
                    else "",
                    f"DELETE FROM parts WHERE id = {chance.randrange(20)}",
                )
            done = chance.random()
            if done < 0.5:
                lake.loop.step()
            elif done < 0.6:
                lake.__exit__()
                lake = stack.enter_context(Lake(tmp_path, database.source()))
        lake.catch_up()
        assert same(lake, database)
