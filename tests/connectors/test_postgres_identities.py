"""What tells rows apart at the source: replica identities of every kind, partitions, and what is left out or refused."""

from __future__ import annotations

import itertools

import pytest

from mirrored import Lake, database_on
from penstock.connectors.postgres_cdc import plan
from penstock.errors import ConfigError
from penstock.testing.mirror import Mirror

_NUMBERS = itertools.count()

FIVE = "SELECT i, 'c' || i, i, repeat('s', 5000) FROM generate_series(1, 5) i"

IDENTITIES = {
    "by_default": ["CREATE TABLE by_default (id int8 PRIMARY KEY, code text NOT NULL, amount int4, story text)"],
    "by_all": [
        "CREATE TABLE by_all (id int8 PRIMARY KEY, code text NOT NULL, amount int4, story text)",
        "ALTER TABLE by_all REPLICA IDENTITY FULL",
    ],
    "by_index": [
        "CREATE TABLE by_index (id int8 PRIMARY KEY, code text NOT NULL UNIQUE, amount int4, story text)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_code_key",
    ],
    "by_index_alone": [
        "CREATE TABLE by_index_alone (id int8 NOT NULL, code text NOT NULL, amount int4, story text, UNIQUE (code, id))",
        "ALTER TABLE by_index_alone REPLICA IDENTITY USING INDEX by_index_alone_code_id_key",
    ],
}
CHANGES = [
    "UPDATE {t} SET amount = 10 WHERE id = 1",  # the story is not sent
    "UPDATE {t} SET code = 'moved' WHERE id = 2",
    "UPDATE {t} SET id = 30 WHERE id = 3",
    "UPDATE {t} SET id = 300, code = 'moved on', amount = 7 WHERE id = 30",
    "DELETE FROM {t} WHERE id = 4",
    "INSERT INTO {t} VALUES (6, 'c6', 6, 'new')",
    "UPDATE {t} SET story = NULL WHERE id = 5",
]


@pytest.fixture
def database(server):
    with database_on(server, f"identity_{next(_NUMBERS)}") as made:
        yield made


def test_tables_of_every_replica_identity_are_mirrored_as_they_are(database, tmp_path):
    for table, statements in IDENTITIES.items():
        database.run(*statements, f"INSERT INTO {table} {FIVE}")
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        for table in IDENTITIES:
            database.run(*(statement.format(t=table) for statement in CHANGES))
        lake.catch_up()
        for table in IDENTITIES:
            assert lake.table(f"public.{table}") == database.table(table), table
        keys = {stream: table.key for stream, table in lake.source.session.tables.captured.items()}
        assert keys == {
            "public.by_default": ("id",),
            "public.by_all": ("id",),
            "public.by_index": ("code",),
            "public.by_index_alone": ("id", "code"),
        }


def test_a_table_without_a_key_that_logs_whole_rows_is_mirrored_by_the_sinks_key(database, tmp_path):
    database.run(
        "CREATE TABLE orders (id int8, code text NOT NULL, amount int4, story text)",
        "ALTER TABLE orders REPLICA IDENTITY FULL",
        f"INSERT INTO orders {FIVE}",
    )
    with Lake(tmp_path, database.source(), key=["id"]) as lake:
        lake.catch_up()
        database.run(*(statement.format(t="orders") for statement in CHANGES))
        lake.catch_up()
        assert lake.table("public.orders") == database.table("orders")


def test_a_table_with_a_key_that_logs_nothing_is_refused_left_out_or_captured_by_its_inserts(database, tmp_path):
    make = "CREATE TABLE {t} (id int8 PRIMARY KEY, code text NOT NULL, amount int4, story text)"
    for table in ("orders", "silent"):
        database.run(make.format(t=table), f"INSERT INTO {table} {FIVE}")
    database.run("ALTER TABLE silent REPLICA IDENTITY NOTHING")
    with pytest.raises(
        ConfigError, match=r"PEN-1016 public\.silent cannot be captured: it has no replica identity"
    ) as caught:
        database.source(tables=["public.orders", "public.silent"]).open()
    assert 'ALTER TABLE "public"."silent" REPLICA IDENTITY DEFAULT' in caught.value.hint
    left_out = Mirror(tmp_path / "a", database.source())
    left_out.run()
    database.run("UPDATE silent SET amount = 1", "DELETE FROM silent WHERE id = 1")  # the application goes on
    left_out.run()
    assert left_out.log("public.silent") == []
    inserts = Mirror(tmp_path / "b", database.source(insert_only=["public.silent"], slot=f"{database.name}_b"))
    inserts.run()
    database.run(
        "UPDATE silent SET amount = 2", "DELETE FROM silent WHERE id = 2", "INSERT INTO silent VALUES (9, 'c9', 9)"
    )
    inserts.run()
    log = [(row["_op"], row["id"], row["amount"]) for row in inserts.log("public.silent")]
    assert sorted(log) == [("c", 9, 9), ("r", 2, 1), ("r", 3, 1), ("r", 4, 1), ("r", 5, 1)]


PARTS = [
    "CREATE TABLE parts (id int8, day date, note text, PRIMARY KEY (day, id)) PARTITION BY RANGE (day)",
    "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')",
    "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM ('2025-01-01') TO ('2026-01-01') PARTITION BY HASH (id)",
    "CREATE TABLE parts_2a PARTITION OF parts_2 FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
    "CREATE TABLE parts_2b PARTITION OF parts_2 FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    "INSERT INTO parts SELECT i, date '2024-06-01' + i % 2 * 365, 'n' || i FROM generate_series(1, 20) i",
]


def test_a_partitioned_table_is_one_and_rows_may_move_within_it(database, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)
    database.run(*PARTS)
    with Lake(tmp_path, database.source(seed_chunk_rows=7)) as lake:
        lake.catch_up()
        assert lake.table("public.parts") == database.table("parts")
        database.run(
            "UPDATE parts SET note = 'u' WHERE id < 5",
            "UPDATE parts SET day = '2025-03-03' WHERE id = 6",
            "CREATE TABLE parts_3 PARTITION OF parts FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')",
            "INSERT INTO parts VALUES (30, '2026-02-02', 'new')",
            "UPDATE parts SET day = '2026-03-03' WHERE id = 7",
            "DELETE FROM parts_2 WHERE id = 9",
            "ALTER TABLE parts ADD COLUMN more text",
            "UPDATE parts SET more = 'm' WHERE id = 10",
        )
        lake.catch_up()
        assert lake.table("public.parts") == database.table("parts")
        assert lake.position.tables["public.parts"].copies == 1
        database.run("TRUNCATE parts", "INSERT INTO parts VALUES (1, '2024-02-02')")
        lake.catch_up()
        assert lake.table("public.parts") == database.table("parts")
        assert {path.name for path in (tmp_path / "lake").iterdir()} == {"public.parts", "_penstock"}


def test_leaves_that_are_named_are_tables_of_their_own(database, tmp_path):
    database.run(*PARTS)
    with Lake(tmp_path, database.source(tables=["public.parts_1", "public.parts_2a"])) as lake:
        lake.catch_up()
        database.run(
            "UPDATE parts SET note = 'u' WHERE id < 5",
            "UPDATE parts SET day = '2025-03-03' WHERE id = 6",  # it leaves the one, and enters one of the others
            "UPDATE parts SET day = '2024-03-03' WHERE id = 7",
            "INSERT INTO parts VALUES (31, '2025-02-02', 'new')",
        )
        lake.catch_up()
        for leaf in ("parts_1", "parts_2a"):
            assert lake.table(f"public.{leaf}") == database.table(leaf), leaf
        database.run("TRUNCATE parts")
        lake.catch_up()
        assert [lake.table(f"public.{leaf}") for leaf in ("parts_1", "parts_2a")] == [[], []]


@pytest.mark.parametrize("chunk_rows", [2, 100])
def test_rows_leave_keys_that_are_infinite_or_of_far_years(database, tmp_path, chunk_rows):
    kinds = ("date", "timestamp", "timestamptz")
    far = ("-infinity", "infinity", "0044-03-15 BC", "20000-01-01", "2024-01-01")
    for kind in kinds:
        database.run(f"CREATE TABLE {kind}s (at {kind}, id int, PRIMARY KEY (at, id))")
        for number, text in enumerate(far):
            database.run(f"INSERT INTO {kind}s VALUES ('{text}', {number})")
    with Lake(tmp_path, database.source(seed_chunk_rows=chunk_rows)) as lake:
        lake.loop.step()
        for kind in kinds:  # while they are copied, and behind that
            database.run(f"UPDATE {kind}s SET at = '2000-01-01'::date + id WHERE id < 2")
        lake.catch_up()
        for kind in kinds:
            database.run(f"UPDATE {kind}s SET at = '2000-01-01'::date + id WHERE id < 4")
        lake.catch_up()
        for kind in kinds:
            assert lake.position.tables[f"public.{kind}s"].failure is None
            found = [(row["id"], row["at"].isoformat()[:10]) for row in lake.table(f"public.{kind}s")]
            expected = database.rows(f"SELECT id, at::date::text FROM {kind}s")
            assert sorted(found) == sorted(expected)
