"""Publications that leave changes out, from the start or for a while: nothing is lost in silence; against a real PostgreSQL."""

from __future__ import annotations

import itertools

import pytest

from mirrored import Lake, database_on
from penstock.cli.checking import _examine
from penstock.connectors.postgres_cdc import plan
from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from penstock.pipeline.routing import Route, Router
from penstock.source import ReadLimit
from penstock.testing.postgres import PostgresServer, binaries

_NUMBERS = itertools.count()


@pytest.fixture
def database(server, monkeypatch):
    monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)
    with database_on(server, f"published_{next(_NUMBERS)}") as made:
        made.run(
            "CREATE TABLE orders (id int PRIMARY KEY, number int, twice int GENERATED ALWAYS AS (number * 2) STORED)",
            "INSERT INTO orders (id, number) SELECT i, i + 100 FROM generate_series(1, 5) i",
            "CREATE TABLE others (id int PRIMARY KEY)",
        )
        yield made


CHANGES = (
    "UPDATE orders SET number = number + 1 WHERE id = 1",
    "DELETE FROM orders WHERE id = 2",
    "INSERT INTO orders (id, number) VALUES (6, 1)",
)

BREAKS = {
    "the table goes": ["ALTER PUBLICATION penstock DROP TABLE orders"],
    "all goes": ["DROP PUBLICATION penstock"],
    "updates go": ["ALTER PUBLICATION penstock SET (publish = 'insert')"],
    "rows go": ["ALTER PUBLICATION penstock SET TABLE others, orders WHERE (id > 3)"],
    "columns go": ["ALTER PUBLICATION penstock SET TABLE others, orders (id)"],
    "generated columns go": ["ALTER PUBLICATION penstock SET (publish_generated_columns = none)"],
}

REPAIRS = {
    "the table goes": ["ALTER PUBLICATION penstock ADD TABLE orders"],
    "all goes": ["CREATE PUBLICATION penstock FOR ALL TABLES WITH (publish_generated_columns = stored)"],
    "updates go": ["ALTER PUBLICATION penstock SET (publish = 'insert, update, delete, truncate')"],
    "rows go": ["ALTER PUBLICATION penstock SET TABLE others, orders"],
    "columns go": ["ALTER PUBLICATION penstock SET TABLE others, orders"],
    "generated columns go": ["ALTER PUBLICATION penstock SET (publish_generated_columns = stored)"],
}


class TestWhileRunning:
    @pytest.mark.parametrize("what", BREAKS)
    def test_what_is_not_published_any_more_is_published_again_and_copied(self, database, tmp_path, what):
        with Lake(tmp_path, database.source()) as lake:
            lake.catch_up()
            database.run(*BREAKS[what], *CHANGES)
            lake.catch_up()
            assert lake.table("public.orders") == database.table("orders")
            database.run("UPDATE orders SET number = 0 WHERE id = 3", "DELETE FROM orders WHERE id = 4")
            lake.catch_up()
            assert lake.table("public.orders") == database.table("orders")

    @pytest.mark.parametrize("what", BREAKS)
    def test_what_was_not_published_between_two_looks_is_copied(self, database, tmp_path, monkeypatch, what):
        with Lake(tmp_path, database.source()) as lake:
            lake.catch_up()
            monkeypatch.setattr(plan, "LOOKED_SECS", 600.0)
            database.run(*BREAKS[what], *CHANGES, *REPAIRS[what])
            lake.catch_up()
            monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)
            lake.catch_up()
            assert lake.table("public.orders") == database.table("orders")

    def test_what_was_not_published_while_nothing_ran_is_copied(self, database, tmp_path):
        with Lake(tmp_path, database.source()) as lake:
            lake.catch_up()
        database.run(*BREAKS["the table goes"], *CHANGES, *REPAIRS["the table goes"])
        with Lake(tmp_path, database.source()) as lake:
            lake.loop.ack()
            lake.catch_up()
            assert lake.table("public.orders") == database.table("orders")
            assert lake.position.tables["public.others"].copies == 1

    def test_without_manage_its_table_is_set_aside_until_somebody_publishes_it(self, database, tmp_path, monkeypatch):
        with Lake(tmp_path, database.source()) as lake:
            lake.catch_up()
        with Lake(tmp_path, database.source(manage=False)) as lake:
            database.run(*BREAKS["the table goes"], *CHANGES, "INSERT INTO others VALUES (1)")
            lake.catch_up()
            failure = lake.position.tables["public.orders"].failure
            assert "does not publish all changes of public.orders" in failure.message
            assert failure.hint == 'ALTER PUBLICATION "penstock" ADD TABLE "public"."orders"'
            assert lake.table("public.others") == database.table("others")
            database.run(failure.hint)
            monkeypatch.setattr(plan.time, "time", lambda: failure.next_try + 1)
            lake.catch_up()
            assert lake.table("public.orders") == database.table("orders")

    def test_with_never_its_table_is_set_aside(self, database, tmp_path):
        with Lake(tmp_path, database.source(snapshot="never")) as lake:
            lake.catch_up()
            database.run(*BREAKS["the table goes"], *CHANGES, "INSERT INTO others VALUES (1)")
            lake.catch_up()
            failure = lake.position.tables["public.orders"].failure
            assert "changes may be missing" in failure.message
            assert "penstock tables resync FILE public.orders" in failure.hint
            assert lake.table("public.others") == database.table("others")

    def test_what_is_added_to_a_publication_copies_nothing_again(self, database, tmp_path):
        with Lake(tmp_path, database.source()) as lake:
            lake.catch_up()
            database.run("CREATE TABLE more (id int PRIMARY KEY)", "ALTER PUBLICATION penstock ADD TABLE more")
            lake.catch_up()
            assert {progress.copies for progress in lake.position.tables.values()} == {1}

    def test_a_position_from_before_there_were_marks_goes_on_without_a_copy(self, database):
        reader = database.source()
        reader.open()
        try:
            position = reader.initial()
            tables = {
                stream: progress.copied_up_to(None).with_fields(published="")
                for stream, progress in position.tables.items()
            }
            end = reader.latest(position.model_copy(update={"tables": tables}), ReadLimit(rows=100))
            assert all(end.tables[stream].published for stream in tables)
            assert {(each.state, each.copies) for each in end.tables.values()} == {("seeded", 1)}
        finally:
            reader.close()

    def test_an_older_server_passes_over_log_that_it_does_not_decode(self, need, tmp_path, monkeypatch):
        need(binaries(16), "PostgreSQL 16 is not installed")
        monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)
        with PostgresServer(16, settings={"fsync": "off"}) as older, database_on(older, "older") as database:
            database.run(
                "CREATE TABLE orders (id int PRIMARY KEY, number int)", "INSERT INTO orders VALUES (1, 1), (2, 2)"
            )
            with Lake(tmp_path, database.source(heartbeat_secs=0.001)) as lake:
                lake.catch_up()
                monkeypatch.setattr(plan, "LOOKED_SECS", 600.0)  # so that the range is planned, and then fails
                database.run("DROP PUBLICATION penstock", *CHANGES)
                lake.catch_up()
                database.run("UPDATE orders SET number = 0 WHERE id = 6")
                lake.catch_up()
                assert lake.table("public.orders") == database.table("orders")


class TestAtFirst:
    @pytest.mark.parametrize(
        "publication",
        [
            "FOR TABLE orders, others WITH (publish = 'insert', publish_generated_columns = stored)",
            "FOR TABLE orders, others",
            "FOR TABLE orders WHERE (id < 3), others WITH (publish_generated_columns = stored)",
            "FOR TABLE orders (id, number), others",
            "FOR TABLES IN SCHEMA public",
        ],
    )
    def test_a_publication_that_leaves_changes_out_is_mended(self, database, tmp_path, publication):
        database.run(f"CREATE PUBLICATION penstock {publication}")
        with Lake(tmp_path, database.source()) as lake:
            lake.catch_up()
            database.run(*CHANGES)
            lake.catch_up()
            assert lake.table("public.orders") == database.table("orders")
            assert {progress.copies for progress in lake.position.tables.values()} == {1}

    def test_a_partitioned_root_is_published_as_itself(self, database, tmp_path):
        database.run(
            "CREATE TABLE parted (id int PRIMARY KEY, number int) PARTITION BY RANGE (id)",
            "CREATE TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (100)",
            "CREATE PUBLICATION penstock FOR ALL TABLES",
        )
        with Lake(tmp_path, database.source(tables=["public.parted"])) as lake:
            lake.catch_up()
            database.run("INSERT INTO parted VALUES (1, 1)")
            lake.catch_up()
            assert lake.table("public.parted") == database.table("parted")

    def test_without_manage_it_is_refused_with_the_sql(self, database):
        database.run(
            "CREATE PUBLICATION penstock FOR TABLE orders, others WITH (publish = 'insert')",
            f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
        )
        reader = database.source(manage=False)
        reader.open()
        try:
            with pytest.raises(ConfigError, match="does not publish all changes") as caught:
                reader.initial()
            assert caught.value.hint == (
                "ALTER PUBLICATION \"penstock\" SET (publish = 'insert, update, delete, truncate', "
                "publish_generated_columns = stored)"
            )
        finally:
            reader.close()

    def test_a_list_of_all_columns_that_are_captured_is_left_alone(self, database, tmp_path):
        database.run("CREATE PUBLICATION penstock FOR TABLE orders (id, number), others")
        before = database.rows("SELECT xmin FROM pg_publication_rel")
        with Lake(tmp_path, database.source(exclude_columns=["*.twice"])) as lake:
            lake.catch_up()
            database.run(*CHANGES)
            lake.catch_up()
            assert lake.table("public.orders") == database.table("orders", "id, number")
        assert database.rows("SELECT xmin FROM pg_publication_rel") == before

    def test_updates_that_would_fail_for_everyone_are_not_published(self, database):
        database.run(
            "CREATE TABLE keyless (id int)",
            "INSERT INTO keyless VALUES (1)",
            "CREATE PUBLICATION penstock FOR ALL TABLES WITH (publish = 'insert')",
        )
        reader = database.source()
        reader.open()
        try:
            with pytest.raises(ConfigError, match=r"it includes public\.keyless, which has no replica identity"):
                reader.initial()
        finally:
            reader.close()
        database.run("UPDATE keyless SET id = 2")


@pytest.fixture
def reader(database):
    """The dsn of a user who may replicate and make publications, and no more."""
    name = f"reader_{database.name}"
    database.run(f"CREATE ROLE {name} LOGIN REPLICATION", f"GRANT CREATE ON DATABASE {database.name} TO {name}")
    yield database.dsn.replace("postgres@", f"{name}@")
    database.run(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def wrong(source):
    """What `penstock check` finds to be wrong, and how to mend it."""
    try:
        return {finding.what: finding.fix for finding in source.check() if not finding.ok}
    finally:
        source.close()


class TestPermissions:
    def test_rows_that_a_policy_hides_set_their_table_aside(self, database, tmp_path, monkeypatch, reader):
        name = f"reader_{database.name}"
        database.run(
            "CREATE POLICY few ON orders FOR SELECT USING (id < 3)",
            "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
            f"GRANT SELECT ON orders, others TO {name}",
            "CREATE PUBLICATION penstock FOR ALL TABLES WITH (publish_generated_columns = stored)",
        )
        found = wrong(database.source(dsn=reader))
        assert found == {
            "public.orders may not be read whole: it has row-level security": (
                f'ALTER ROLE "{name}" BYPASSRLS -- as a superuser; or let "{name}" own the table'
            )
        }
        with Lake(tmp_path, database.source(dsn=reader)) as lake:
            lake.catch_up()
            failure = lake.position.tables["public.orders"].failure
            assert "row-level security" in failure.message
            assert "BYPASSRLS" in failure.hint
            assert lake.position.tables["public.others"].state == "seeded"
            database.run(f"ALTER ROLE {name} BYPASSRLS")
            monkeypatch.setattr(plan.time, "time", lambda: failure.next_try + 1)
            lake.catch_up()
            assert lake.table("public.orders") == database.table("orders")

    def test_tables_that_may_not_be_published_or_read_are_listed_and_set_aside(self, database, tmp_path, reader):
        name = f"reader_{database.name}"
        database.run(
            "CREATE SCHEMA closed",
            "CREATE TABLE closed.orders (id int PRIMARY KEY)",
            f"GRANT SELECT ON closed.orders, orders TO {name}",
            f"ALTER TABLE others OWNER TO {name}",
        )
        tables = ["public.*", "closed.*"]
        found = wrong(database.source(dsn=reader, tables=tables))
        assert set(found) == {
            "closed.orders may not be read: no usage of its schema",
            "closed.orders may not be published: the user does not own it",
            "public.orders may not be published: the user does not own it",
        }
        assert found["closed.orders may not be read: no usage of its schema"] == (
            f'GRANT USAGE ON SCHEMA "closed" TO "{name}"'
        )
        with Lake(tmp_path, database.source(dsn=reader, tables=tables)) as lake:
            lake.catch_up()
            states = {stream: progress.state for stream, progress in lake.position.tables.items()}
            assert states == {"closed.orders": "failed", "public.orders": "failed", "public.others": "seeded"}
            assert "GRANT USAGE ON SCHEMA" in lake.position.tables["closed.orders"].failure.hint

    def test_a_user_who_may_publish_nothing_is_refused(self, database, reader):
        opened = database.source(dsn=reader)
        opened.open()
        try:
            with pytest.raises(ConfigError, match=r"no table can be published: .* must be owner of table orders"):
                opened.initial()
        finally:
            opened.close()

    def test_a_user_who_may_make_no_publication_is_told_which_right_is_missing(self, database, reader):
        name = f"reader_{database.name}"
        database.run(
            f"REVOKE CREATE ON DATABASE {database.name} FROM {name}",
            f"ALTER TABLE orders OWNER TO {name}",
            f"ALTER TABLE others OWNER TO {name}",
        )
        opened = database.source(dsn=reader)
        opened.open()
        try:
            with pytest.raises(ConfigError, match="permission denied for database") as refused:
                opened.initial()
        finally:
            opened.close()
        assert "GRANT CREATE ON DATABASE" in refused.value.hint

    def test_a_publication_of_another_user_is_named_as_what_has_to_be_altered(self, database, reader):
        name = f"reader_{database.name}"
        database.run(
            f"ALTER TABLE orders OWNER TO {name}",
            f"ALTER TABLE others OWNER TO {name}",
            "CREATE PUBLICATION penstock WITH (publish_via_partition_root = true, publish_generated_columns = stored)",
        )
        opened = database.source(dsn=reader)
        opened.open()
        try:
            with pytest.raises(ConfigError, match="must be owner of publication") as refused:
                opened.initial()
        finally:
            opened.close()
        assert 'ALTER PUBLICATION … ADD TABLE "public"."orders"' in refused.value.hint

    def test_columns_that_are_captured_are_all_that_must_be_read(self, database, reader):
        database.run(
            f"GRANT SELECT (id, number) ON orders TO reader_{database.name}",
            "CREATE PUBLICATION penstock FOR ALL TABLES WITH (publish_generated_columns = stored)",
        )
        options = {"dsn": reader, "tables": ["public.orders"]}
        assert set(wrong(database.source(**options))) == {"public.orders may not be read"}
        assert wrong(database.source(**options, exclude_columns=["*.twice"])) == {}

    def test_all_that_is_wrong_is_listed_and_each_fix_names_the_user(self, database):
        name = f"Nobody {database.name}"
        database.run(
            f'CREATE ROLE "{name}" LOGIN',
            "CREATE TABLE keyless (id int)",
            "CREATE TABLE another (id int)",
        )
        try:
            dsn = database.dsn.replace("postgres@", f"{name.replace(' ', '%20')}@")
            tables = ["public.others", "public.keyless", "public.another"]
            found = wrong(database.source(dsn=dsn, tables=tables))
            with pytest.raises(ConfigError, match=r"public\.another .*also wrong: public\.keyless"):
                database.source(dsn=dsn, tables=tables).open()
        finally:
            database.run(f'DROP ROLE "{name}"')
        assert list(found) == [
            "the user may not replicate",
            "the publication 'penstock' will be made",
            "public.keyless is left out: it has no replica identity",
            "public.another is left out: it has no replica identity",
            "public.others may not be read",
            "public.others may not be published: the user does not own it",
        ]
        fixes = list(found.values())
        assert fixes[0] == f'ALTER ROLE "{name}" REPLICATION -- as a superuser'
        assert fixes[1].startswith(f'GRANT CREATE ON DATABASE "{database.name}" TO "{name}"; or let a superuser run')
        assert fixes[4] == f'GRANT SELECT ON "public"."others" TO "{name}"'


def test_what_makes_a_source_refuse_to_open_is_listed_with_the_rest(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    settings = {"fsync": "off", "wal_level": "replica"}
    with PostgresServer(18, settings=settings) as replica, database_on(replica, "plain") as database:
        database.run("CREATE TABLE orders (id int PRIMARY KEY)", "CREATE TABLE keyless (id int)")
        opened = database.source(tables=["public.orders", "public.keyless"])
        pipeline = Pipeline("shop", {"shop": opened}, {}, Router((Route(),), ()))
        found = list(_examine("shop", opened, None, {}, pipeline))
    assert [finding.what for finding in found if not finding.ok] == [
        "wal_level is replica: the log does not hold what change capture needs",
        "public.keyless is left out: it has no replica identity",
    ]
