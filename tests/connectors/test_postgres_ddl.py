"""Tables whose columns change between two changes of one epoch, and what the mirror makes of it."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest

from mirrored import Lake, Reading, database_on
from penstock.connectors.postgres_cdc import plan, tables
from penstock.connectors.postgres_cdc.shape import Shape
from penstock.testing.mirror import replayed

_NUMBERS = itertools.count()

ALTERED = {
    "added": ["ALTER TABLE {t} ADD COLUMN more text", "UPDATE {t} SET more = 'm' WHERE id = 3"],
    "added_with_a_default": ["ALTER TABLE {t} ADD COLUMN more int DEFAULT 7"],
    "added_with_a_default_of_each_row": ["ALTER TABLE {t} ADD COLUMN more text DEFAULT md5(random()::text)"],
    "added_with_a_default_that_goes": [
        "ALTER TABLE {t} ADD COLUMN more int DEFAULT 7",
        "ALTER TABLE {t} ALTER COLUMN more DROP DEFAULT",
    ],
    "added_as_identity": ["ALTER TABLE {t} ADD COLUMN more int GENERATED ALWAYS AS IDENTITY"],
    "added_as_generated": ["ALTER TABLE {t} ADD COLUMN more int GENERATED ALWAYS AS (amount * 2) STORED"],
    "dropped": ["ALTER TABLE {t} DROP COLUMN note"],
    "dropped_and_added": ["ALTER TABLE {t} DROP COLUMN note", "ALTER TABLE {t} ADD COLUMN note varchar(20)"],
    "added_dropped_and_added": [
        "ALTER TABLE {t} ADD COLUMN more text",
        "UPDATE {t} SET more = 'm' WHERE id = 3",
        "ALTER TABLE {t} DROP COLUMN more",
        "ALTER TABLE {t} ADD COLUMN more text",
    ],
    "renamed": ["ALTER TABLE {t} RENAME COLUMN note TO remark"],
    "renamed_and_replaced": [
        "ALTER TABLE {t} RENAME COLUMN note TO remark",
        "ALTER TABLE {t} ADD COLUMN note varchar(20)",
    ],
    "exchanged": [
        "ALTER TABLE {t} ADD COLUMN other varchar(20)",
        "ALTER TABLE {t} RENAME COLUMN note TO aside",
        "ALTER TABLE {t} RENAME COLUMN other TO note",
        "ALTER TABLE {t} RENAME COLUMN aside TO other",
    ],
    "counted_up": ["ALTER TABLE {t} ALTER COLUMN amount TYPE int4 USING amount + 1"],
    "key_counted_up": ["ALTER TABLE {t} ALTER COLUMN id TYPE int8 USING id + 10"],
    "key_made_text": [
        "ALTER TABLE {t} ALTER COLUMN id TYPE char(4) USING 'k' || id",
        "ALTER TABLE {t} ALTER COLUMN id TYPE int8 USING (substr(id, 2)::int8 + 20)",
    ],
    "cut": ["ALTER TABLE {t} ALTER COLUMN note TYPE varchar(3) USING left(note, 3)"],
    "rounded": ["ALTER TABLE {t} ALTER COLUMN at TYPE timestamp(0)"],
    "made_longer": ["ALTER TABLE {t} ALTER COLUMN note TYPE varchar(40)"],
    "made_text": ["ALTER TABLE {t} ALTER COLUMN note TYPE text"],
    "defined": [
        "ALTER TABLE {t} ALTER COLUMN amount SET DEFAULT 1",
        "ALTER TABLE {t} ALTER COLUMN amount SET NOT NULL",
    ],
    "rewritten": ["VACUUM FULL {t}", "CLUSTER {t} USING {t}_pkey"],
    "emptied": ["TRUNCATE {t}"],
}
NO_COPY = {"added", "dropped", "made_longer", "defined", "rewritten", "emptied"}
"""What changes no row that is already there, or says so in the log."""


@pytest.fixture
def database(server):
    with database_on(server, f"ddl_{next(_NUMBERS)}") as made:
        yield made


@pytest.fixture
def look_always(monkeypatch):
    monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)
    monkeypatch.setattr(tables, "RETRY_SECS", 0.0)


def make(database, table):
    database.run(
        f"CREATE TABLE {table} (id int8 PRIMARY KEY, amount int4, note varchar(20), at timestamp)",
        f"INSERT INTO {table} SELECT i, i * 10, 'note ' || i, '2024-01-01 00:00:00.7' FROM generate_series(1, 5) i",
    )


def same(lake, database, table):
    columns = [each.name for each in database.connection.execute(f"SELECT * FROM {table} LIMIT 0").description]
    return lake.table(f"public.{table}", columns) == database.table(table)


@pytest.fixture(scope="module")
def altered(server, tmp_path_factory):
    """
    All of them at once, each in a table of its own, between two changes of one epoch; then more changes.

    Gives per table whether the mirror was equal after each of the two, and how often it was copied.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(plan, "LOOKED_SECS", 0.0)
        database = stack.enter_context(database_on(server, "altered"))
        for table in ALTERED:
            make(database, table)
        lake = stack.enter_context(Lake(tmp_path_factory.mktemp("altered"), database.source()))
        lake.catch_up()
        for table, statements in ALTERED.items():
            database.run(
                f"UPDATE {table} SET note = 'before' WHERE id IN (1, 3)",
                f"INSERT INTO {table} (id, amount) VALUES (6, 60)",
                *(statement.format(t=table) for statement in statements),
                f"UPDATE {table} SET amount = 11 WHERE id IN (1, 2)",
                f"INSERT INTO {table} (id, amount) VALUES (7, 70)",
                f"DELETE FROM {table} WHERE id = 5",
            )
        lake.catch_up()
        first = {table: same(lake, database, table) for table in ALTERED}
        for table in ALTERED:
            database.run(f"UPDATE {table} SET amount = 12", f"DELETE FROM {table} WHERE id = 4")
        lake.catch_up()
        second = {table: same(lake, database, table) for table in ALTERED}
        copies = {table: lake.position.tables[f"public.{table}"].copies for table in ALTERED}
        yield {table: (first[table], second[table], copies[table]) for table in ALTERED}


@pytest.mark.parametrize("what", ALTERED)
def test_a_table_that_is_altered_between_two_changes_of_one_epoch_is_mirrored_as_it_is(altered, what):
    first, second, _ = altered[what]
    assert first
    assert second


@pytest.mark.parametrize("what", sorted(NO_COPY))
def test_what_changes_no_row_copies_nothing_again(altered, what):
    assert altered[what][2] == 1


def test_a_column_that_was_dropped_long_ago_comes_back_empty(database, tmp_path, look_always):
    make(database, "orders")
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        database.run("ALTER TABLE orders DROP COLUMN note", "UPDATE orders SET amount = 1 WHERE id = 1")
        lake.catch_up()
        database.run("ALTER TABLE orders ADD COLUMN plain int", "INSERT INTO orders (id) VALUES (6)")
        lake.catch_up()
        assert same(lake, database, "orders")
        assert lake.position.tables["public.orders"].copies == 1
        assert {row["id"]: row["note"] for row in lake.table("public.orders")}[6] is None
        assert "note" not in lake.source.schema()["public.orders"].names
        database.run("ALTER TABLE orders ADD COLUMN note varchar(20)", "UPDATE orders SET note = 'n' WHERE id = 2")
        lake.catch_up()
        assert same(lake, database, "orders")


RETYPED = {
    "wider": "ALTER TABLE orders ALTER COLUMN amount TYPE int8",
    "to text, computed": "ALTER TABLE orders ALTER COLUMN amount TYPE text USING 'x' || amount",
    "the key, wider": "ALTER TABLE orders ALTER COLUMN id TYPE numeric(20, 0)",
    "the key, to text": "ALTER TABLE orders ALTER COLUMN id TYPE text",
    "the key, renamed": "ALTER TABLE orders RENAME COLUMN id TO number",
    "the key, another one": "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (amount)",
    "the key, one more": "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (id, amount)",
}


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("what", RETYPED)
def test_a_retype_between_two_changes_of_one_range_is_told_by_a_new_copy(database, look_always, what, copied):
    make(database, "orders")
    opened = database.source(seed_chunk_rows=2)
    opened.open()
    try:
        reading = Reading(opened)
        if copied:
            reading.finish()
        else:
            while not reading.log:
                reading.step()
        database.run(
            "UPDATE orders SET note = 'before' WHERE id::text IN ('1', '5')", "DELETE FROM orders WHERE amount = 40"
        )
        database.run(RETYPED[what], "UPDATE orders SET note = 'after' WHERE note = 'before'")
        reading.finish()
        database.run("UPDATE orders SET note = 'later'")
        reading.finish()
    finally:
        opened.close()
    key = "number" if "renamed" in what else "amount" if "another" in what else "id"
    columns = [each.name for each in database.connection.execute("SELECT * FROM orders LIMIT 0").description]
    found = [{name: row[name] for name in columns} for row in applied(reading.log, key)]
    assert sorted(map(repr, found)) == sorted(map(repr, database.table("orders")))


def applied(log, key):
    """The table that a log leads to, where a copy may go over what is there."""
    table = {}
    for row in sorted(log, key=lambda row: row["_position"]):
        if row["_op"] == "t":
            table = {}
        elif row["_op"] == "d":
            table.pop(str(row.get(key)), None)
        else:
            table[str(row.get(key))] = row
    return table.values()


@pytest.mark.parametrize("back", ["", "ALTER TABLE orders RENAME COLUMN number TO id"])
def test_a_key_that_is_altered_behind_a_planned_range_begins_the_copy_anew(database, back):
    make(database, "orders")
    opened = database.source(seed_chunk_rows=2)
    opened.open()
    try:
        reading = Reading(opened)
        while not (reading.end is not None and reading.end.lsn > reading.position.lsn and reading.log):
            database.run("UPDATE orders SET note = 'before' WHERE id IN (1, 5)")
            reading.step()
        assert reading.position.copying
        database.run("DELETE FROM orders WHERE id = 1", "ALTER TABLE orders RENAME COLUMN id TO number")
        reading.step()
        database.run(*([back] if back else ()))
        reading.finish()
    finally:
        opened.close()
    found = applied(reading.log, "id" if back else "number")
    found = [{name: value for name, value in row.items() if not name.startswith("_")} for row in found]
    assert sorted(map(repr, found)) == sorted(map(repr, database.table("orders")))


def test_a_change_from_before_a_rewrite_does_not_come_behind_the_copy_that_follows_it(database, tmp_path, look_always):
    make(database, "orders")
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        database.run("UPDATE orders SET amount = 7 WHERE id = 1")
        lake.catch_up()
        assert lake.position.turn == "copy", "a copy may be planned before the log is read"
        database.run(
            "UPDATE orders SET amount = 50 WHERE id = 3",
            "ALTER TABLE orders ALTER COLUMN amount TYPE int4 USING amount + 1",
        )
        lake.catch_up()
        assert lake.position.tables["public.orders"].copies == 2
        assert same(lake, database, "orders")


def test_a_row_that_moves_without_all_of_its_values_does_not_take_those_of_another(database, tmp_path, look_always):
    make(database, "orders")
    long = "(SELECT string_agg(md5('{} ' || j), '') FROM generate_series(1, 200) j)"
    database.run(
        "ALTER TABLE orders ADD COLUMN story text", f"UPDATE orders SET story = {long.format('first')} WHERE id = 5"
    )
    with Lake(tmp_path, database.source(seed_chunk_rows=2)) as lake:
        lake.catch_up()
        database.run("ALTER TABLE orders ALTER COLUMN amount TYPE int4 USING amount + 1")
        for _ in range(100):
            progress = lake.position.tables["public.orders"]
            if isinstance(progress, tables.Copying) and progress.refresh and progress.frontier == ("4",):
                break
            lake.loop.step()
        database.run("UPDATE orders SET amount = 70 WHERE id = 1")  # so that the log is read in between
        lake.loop.step()
        assert lake.position.tables["public.orders"].frontier == ("4",)
        assert lake.position.turn == "copy", "its last row is copied next"
        # Its new place is in what is copied, and its old one, where another row stands by then, in what is not.
        database.run(
            "UPDATE orders SET id = 0 WHERE id = 5",
            f"INSERT INTO orders (id, story) VALUES (5, {long.format('second')})",
        )
        lake.catch_up()
        assert same(lake, database, "orders")
        assert lake.position.tables["public.orders"].copies == 3


def test_a_table_that_is_altered_before_the_log_has_passed_its_first_copy_is_begun_anew(database, look_always):
    make(database, "orders")
    opened = database.source()
    opened.open()
    try:
        reading = Reading(opened)
        database.run("DELETE FROM orders WHERE id = 2")  # in the log and in the copy
        while not reading.position.copied:
            reading.step()
        database.run("ALTER TABLE orders ALTER COLUMN amount TYPE int4 USING amount + 1")
        while reading.position.tables["public.orders"].state != "waiting":
            reading.step()
        database.run(
            "DELETE FROM orders WHERE id = 3"
        )  # the target was emptied when its columns were seen to be others
        reading.finish()
    finally:
        opened.close()
    log = sorted(reading.log, key=lambda row: row["_position"])
    assert "".join(row["_op"] for row in log) == "rrrrttrrr"
    assert replayed(log, ["id"]) == sorted(database.table("orders"), key=lambda row: row["id"])


OTHER_KEYS = {
    "primary_key": (
        "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD CONSTRAINT orders_pkey PRIMARY KEY (number)",
        "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD CONSTRAINT orders_pkey PRIMARY KEY (id)",
    ),
    "replica_identity": (
        "ALTER TABLE orders REPLICA IDENTITY USING INDEX orders_number_key",
        "ALTER TABLE orders REPLICA IDENTITY DEFAULT",
    ),
}


def make_numbered(database):
    database.run(
        "CREATE TABLE orders (id int PRIMARY KEY, number int NOT NULL UNIQUE)",
        "INSERT INTO orders SELECT i, i + 100 FROM generate_series(1, 5) i",
    )


@pytest.mark.parametrize("which", OTHER_KEYS)
def test_a_row_that_moved_before_its_table_got_another_key_is_in_the_copy(database, tmp_path, look_always, which):
    make_numbered(database)
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        database.run("UPDATE orders SET id = 50 WHERE id = 1", OTHER_KEYS[which][0])
        lake.catch_up()
        database.run("UPDATE orders SET number = 7 WHERE id = 2")
        lake.catch_up()
        assert same(lake, database, "orders")


@pytest.mark.parametrize("which", OTHER_KEYS)
@pytest.mark.parametrize("chunk_rows", [2, 100])
def test_a_key_that_went_and_came_back_unseen_makes_a_new_copy(database, tmp_path, monkeypatch, which, chunk_rows):
    monkeypatch.setattr(plan, "LOOKED_SECS", 3600.0)
    make_numbered(database)
    other, back = OTHER_KEYS[which]
    with Lake(tmp_path, database.source(seed_chunk_rows=chunk_rows)) as lake:
        for row in (1, 2, 3, None):  # once or more while it is copied, and once behind that
            if row is None:
                lake.catch_up()
            else:
                lake.loop.step()
            # A move of its target's key, of which the log says nothing, and one under a key that is not the target's.
            moves = [
                f"UPDATE orders SET id = id + 50 WHERE number = {100 + (row or 4)}",
                "UPDATE orders SET number = -number",
            ]
            database.run(other, *moves, back)
        lake.catch_up()
        assert same(lake, database, "orders")


@pytest.mark.parametrize("number", range(8))
def test_a_mirror_follows_whatever_happens_to_its_key(database, tmp_path, monkeypatch, number):
    choice = random.Random(number)
    monkeypatch.setattr(plan, "LOOKED_SECS", choice.choice([0.0, 3600.0]))
    monkeypatch.setattr(tables, "RETRY_SECS", 0.0)
    make_numbered(database)
    rows, done = itertools.count(200), []

    def change():
        one = f"id = (SELECT id FROM orders ORDER BY md5(id || '{choice.random()}') LIMIT 1)"
        fresh = next(rows)
        return choice.choices(
            [
                f"INSERT INTO orders (id, number) VALUES ({fresh}, {fresh})",
                f"UPDATE orders SET id = {fresh} WHERE {one}",
                f"UPDATE orders SET number = {fresh} WHERE {one}",
                f"DELETE FROM orders WHERE {one}",
                f"ALTER TABLE orders DROP CONSTRAINT orders_pkey, "
                f"ADD CONSTRAINT orders_pkey PRIMARY KEY ({choice.choice(['id', 'number', 'id, number', 'number, id'])})",
                f"ALTER TABLE orders REPLICA IDENTITY "
                f"{choice.choice(['DEFAULT', 'FULL', 'USING INDEX orders_number_key'])}",
                choice.choice(["TRUNCATE orders", "VACUUM FULL orders"]),
            ],
            weights=[4, 4, 4, 2, 4, 3, 1],
        )[0]

    with Lake(tmp_path, database.source(seed_chunk_rows=choice.choice([2, 1000]))) as lake:
        for _ in range(30):
            if choice.random() < 0.3:
                done.append("steps")
                for _ in range(choice.randrange(1, 5)):
                    lake.loop.step()
            else:
                done.append(change())
                database.run(done[-1])
        monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)
        lake.catch_up()
        database.run("INSERT INTO orders (id, number) VALUES (1000, 1000)")
        lake.catch_up()
        assert same(lake, database, "orders"), done


RESPELLED = {
    "an_enum": ("p mood", "'sad'", "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'", True),
    "a_list_of_an_enum": ("p mood[]", "'{sad}'", "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'", True),
    "a_domain_over_an_enum": ("p feeling", "'sad'", "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'", True),
    "an_enum_in_a_composite": ("p pair", "'(1,sad)'", "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'", True),
    "a_range_of_an_enum": ("p moods", "'[sad,glad]'", "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'", True),
    "a_longer_composite": ("p pair", "'(1,sad)'", "ALTER TYPE pair ADD ATTRIBUTE z int", True),
    "a_shorter_composite": ("p pair[]", "'{\"(1,sad)\"}'", "ALTER TYPE pair DROP ATTRIBUTE x", True),
    "more_labels": ("p mood", "'sad'", "ALTER TYPE mood ADD VALUE 'angry' BEFORE 'sad'", False),
    "other_names": ("p pair", "'(1,sad)'", "ALTER TYPE pair RENAME ATTRIBUTE x TO y", False),
    "a_column_less": ("p mood", "'sad'", "ALTER TABLE {t} DROP COLUMN p", False),
    "a_column_more": ("n int", "1", "ALTER TABLE {t} ADD COLUMN p mood", False),
}
TYPES = [
    "CREATE TYPE mood AS ENUM ('sad', 'glad')",
    "CREATE DOMAIN feeling AS mood",
    "CREATE TYPE pair AS (x int, m mood)",
    "CREATE TYPE moods AS RANGE (subtype = mood)",
]


@pytest.mark.parametrize("what", RESPELLED)
def test_stored_rows_that_a_type_spells_anew_are_copied_over(database, tmp_path, look_always, what):
    column, value, altered, copied = RESPELLED[what]
    database.run(*TYPES, f"CREATE TABLE t (id int PRIMARY KEY, {column})", f"INSERT INTO t VALUES (1, {value})")
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        database.run(altered.format(t="t"), "INSERT INTO t (id) VALUES (2)")
        lake.catch_up()
        assert lake.position.tables["public.t"].copies == 1 + copied
        if not column.endswith("[]") and what != "a_column_less":
            name = column.split()[0]
            expected = [{"id": number, name: text} for number, text in database.rows(f"SELECT id, {name}::text FROM t")]
            found = [{**row, name: row[name] and str(row[name])} for row in lake.table("public.t", ["id", name])]
            assert found == sorted(expected, key=repr)
        lake.catch_up()
        assert lake.position.tables["public.t"].copies == 1 + copied, "once is enough"


def test_a_shape_that_knows_neither_types_nor_columns_left_out_copies_nothing(database):
    database.run(*TYPES, "CREATE TABLE t (id int PRIMARY KEY, p mood, q int)")
    with contextlib.closing(database.source(exclude_columns=["public.t.q"])) as opened:
        opened.open()
        table = opened.session.tables.captured["public.t"]
    old = Shape.parse(":".join(str(table.shape).split(":")[:4]))
    assert old.types is None is old.left_out
    assert table.shape.differs_from(old) is None
    assert table.shape.after(old) == table.shape.stored()


def test_a_column_that_is_left_out_no_more_is_copied(database, tmp_path):
    make(database, "orders")
    without = {"exclude_columns": ["public.orders.note"]}
    with Lake(tmp_path, database.source(**without)) as lake:
        lake.catch_up()
        assert "note" not in lake.table("public.orders")[0]
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        assert same(lake, database, "orders")
    with Lake(tmp_path, database.source(**without)) as lake:
        lake.catch_up()
        database.run("UPDATE orders SET note = 'unseen'")
        lake.catch_up()
        assert lake.position.tables["public.orders"].copies == 2
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        assert same(lake, database, "orders")
        assert lake.position.tables["public.orders"].copies == 3


def test_a_table_that_moves_into_insert_only_keeps_its_rows_and_is_copied_when_it_moves_out(database, tmp_path):
    make(database, "orders")
    changes = ["UPDATE orders SET amount = 7 WHERE id = 1", "DELETE FROM orders WHERE id = 2"]
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
    with Lake(tmp_path, database.source(insert_only=["public.orders"])) as lake:
        lake.catch_up()
        before = lake.table("public.orders")
        database.run(*changes, "INSERT INTO orders (id) VALUES (6)")
        lake.catch_up()
        added = {"id": 6, "amount": None, "note": None, "at": None}
        assert lake.table("public.orders") == sorted([*before, added], key=repr)
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        assert same(lake, database, "orders")
        database.run("UPDATE orders SET amount = 8", "DELETE FROM orders WHERE id = 3")
        lake.catch_up()
        assert same(lake, database, "orders")


@pytest.mark.parametrize("restarted", [False, True])
def test_the_only_table_may_go_and_come_back(database, tmp_path, look_always, restarted):
    make(database, "orders")
    with Lake(tmp_path, database.source(heartbeat_secs=0.5)) as lake:
        lake.catch_up()
        database.run("ALTER TABLE orders RENAME TO aside")
        database.run("CREATE SCHEMA elsewhere", "ALTER TABLE aside SET SCHEMA elsewhere")
        if not restarted:
            lake.catch_up()
            assert lake.position.tables["public.orders"].state == "gone"
    with Lake(tmp_path, database.source(heartbeat_secs=0.5)) as lake:
        lake.catch_up()
        assert lake.position.tables["public.orders"].state == "gone"
        database.run("DELETE FROM elsewhere.aside WHERE id = 1")
        database.run("ALTER TABLE elsewhere.aside SET SCHEMA public", "ALTER TABLE aside RENAME TO orders")
        lake.catch_up()
        assert same(lake, database, "orders")
        database.run("DROP TABLE orders")
        lake.catch_up()
        make(database, "orders")
        lake.catch_up()
        assert same(lake, database, "orders")
