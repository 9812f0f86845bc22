"""Tables that cannot be mirrored as they are: each is set aside by itself, and the others go on."""

from __future__ import annotations

import itertools
import json

import psycopg
import pytest
from deltalake import DeltaTable

import mirrored
from mirrored import Lake, database_on
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.postgres_cdc import plan, tables
from penstock.connectors.postgresql import failures
from penstock.errors import ConfigError, FatalError
from penstock.pipeline import Pipeline
from penstock.pipeline.routing import Route, Router
from penstock.runtime import supervisor
from penstock.tables import Requests
from penstock.testing.engine import ForkEngine
from penstock.testing.postgres import PostgresServer, binaries

_NUMBERS = itertools.count()


@pytest.fixture
def database(server, monkeypatch):
    monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)
    with database_on(server, f"misfits_{next(_NUMBERS)}") as made:
        made.run("CREATE TABLE good (id int PRIMARY KEY)", "INSERT INTO good VALUES (1)")
        yield made


def failure(lake, stream):
    return lake.position.tables[stream].failure


def found_by_check(opened):
    opened.open()
    try:
        return {finding.what: finding for finding in opened.check() if not finding.ok}
    finally:
        opened.close()


@pytest.mark.parametrize(
    ("table", "code", "named"),
    [
        ("CREATE TABLE bad (k int[] PRIMARY KEY, v int); INSERT INTO bad VALUES ('{1}', 1)", "PEN-4002", "bad"),
        ('CREATE TABLE "b\\d" (k int PRIMARY KEY); INSERT INTO "b\\d" VALUES (1)', "PEN-1010", "b\\d"),
        ('CREATE TABLE "%41" (k int PRIMARY KEY); INSERT INTO "%41" VALUES (1)', "PEN-1010", "%41"),
        ('CREATE TABLE "b//d" (k int PRIMARY KEY); INSERT INTO "b//d" VALUES (1)', "PEN-1018", "b//d"),
        (
            "CREATE TABLE bad (); ALTER TABLE bad REPLICA IDENTITY FULL; INSERT INTO bad DEFAULT VALUES",
            "PEN-4002",
            "bad",
        ),
        ("CREATE TABLE bad (k int PRIMARY KEY, v numeric(9, 2)); INSERT INTO bad VALUES (1, 'NaN')", "PEN-3001", "bad"),
        ("CREATE TABLE bad (k int PRIMARY KEY, v int[]); INSERT INTO bad VALUES (1, '{{1}}')", "PEN-3001", "bad"),
        (
            "CREATE TABLE bad (k int PRIMARY KEY, v timestamp); INSERT INTO bad VALUES (1, '294276-12-31')",
            "PEN-3001",
            "bad",
        ),
    ],
    ids=["array key", "backslash", "percent", "empty level", "no columns", "NaN", "two dimensions", "far timestamp"],
)
@pytest.mark.parametrize("when", ["at first", "later"])
def test_a_bad_table_is_set_aside_and_the_others_are_mirrored(database, tmp_path, table, code, named, when):
    if when == "at first":
        database.run(table)
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        database.run("INSERT INTO good VALUES (2)", *([table] if when == "later" else []))
        lake.catch_up()
        assert lake.table("public.good") == [{"id": 1}, {"id": 2}]
        assert lake.position.tables["public.good"].state == "seeded"
        assert lake.position.tables[f"public.{named}"].state == "failed"
        told = failure(lake, f"public.{named}")
        assert told.code == code
        assert told.hint
        assert told.next_try is not None


def test_a_table_that_failed_is_mirrored_as_text_once_its_columns_are_named(database, tmp_path):
    database.run(
        "CREATE TABLE odd (k int[] PRIMARY KEY, n numeric(9, 2), t timestamp, r refcursor)",
        "INSERT INTO odd VALUES ('{{1,2}}', 'NaN', '294276-12-31', 'c')",
    )
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        assert "`text_columns`" in failure(lake, "public.odd").hint
    opened = database.source(text_columns=["public.odd.[knt]"])
    with Lake(tmp_path, opened) as lake:
        try_again(lake, "public.odd")
        database.run("UPDATE odd SET k = '{{7}}', r = 'd'", "INSERT INTO odd VALUES ('{}', 1.5, 'infinity', NULL)")
        lake.catch_up()
        assert lake.table("public.odd") == sorted(
            [
                {"k": "{{7}}", "n": "NaN", "t": "294276-12-31 00:00:00", "r": "d"},
                {"k": "{}", "n": "1.50", "t": "infinity", "r": None},
            ],
            key=repr,
        )


def try_again(lake, stream):
    """Let the next try of a table that failed be now."""
    Requests(lake.source.context.state_dir).add("resume", [stream])
    lake.catch_up()


RETYPED = {
    "int": ("text USING 'x' || v", "numeric(12, 0)", "bool USING v > 0", "int8[] USING ARRAY[v]"),
    "text": ("int USING v::int", "bytea USING v::bytea"),
    "timestamp": ("timestamptz", "text"),
    "timestamptz": ("timestamp",),
    "numeric(10, 2)": ("numeric",),
    "int[]": ("int8[]",),
}


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, many in RETYPED.items() for new in many])
def test_a_column_that_gets_any_other_type_has_its_table_copied_anew_into_the_same_target(database, tmp_path, old, new):
    value = {"int[]": "'{1}'", "timestamp": "'2024-01-01'", "timestamptz": "'2024-01-01'"}.get(old, "'1'")
    database.run(
        f"CREATE TABLE changed (id int PRIMARY KEY, v {old})", f"INSERT INTO changed VALUES (1, {value}), (2, NULL)"
    )
    opened = database.source()
    with Lake(tmp_path, opened) as lake:
        lake.catch_up()
        again = "INSERT INTO changed SELECT {}, v FROM changed WHERE id = 1"
        database.run(again.format(3), f"ALTER TABLE changed ALTER v TYPE {new}", again.format(4))
        lake.catch_up()
        assert failure(lake, "public.changed").code == "PEN-4001"
        assert [row["id"] for row in lake.table("public.changed")] == [1, 2]
        try_again(lake, "public.changed")
        database.run(again.format(5))
        lake.catch_up()
        found = lake.table("public.changed")
        assert [row["id"] for row in found] == [1, 2, 3, 4, 5]
        expected = database.table("changed")
        if new == "numeric":
            expected = [{**row, "v": row["v"] and str(row["v"])} for row in expected]
        assert found == sorted(expected, key=repr)


def test_whole_numbers_that_become_doubles_are_followed(database, tmp_path):
    database.run("CREATE TABLE changed (id int PRIMARY KEY, v int)", "INSERT INTO changed VALUES (1, 1), (2, NULL)")
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        database.run("INSERT INTO changed VALUES (3, 3)", "ALTER TABLE changed ALTER v TYPE float8")
        database.run("INSERT INTO changed VALUES (4, 4.5)", "UPDATE changed SET v = 1.5 WHERE id = 1")
        lake.catch_up()
        assert failure(lake, "public.changed") is None
        assert lake.table("public.changed") == sorted(database.table("changed"), key=repr)
        assert {type(row["v"]) for row in lake.table("public.changed")} == {float, type(None)}


def test_columns_that_are_named_as_text_later_have_their_table_copied_anew(database, tmp_path):
    database.run("CREATE TABLE texts (k int PRIMARY KEY, v text)", "INSERT INTO texts VALUES (1, 'a')")
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        before = lake.position.tables
    with Lake(tmp_path, database.source(text_columns=["public.texts.v"])) as lake:
        lake.catch_up()
        after = lake.position.tables
        assert after["public.texts"].copies == before["public.texts"].copies + 1
        assert after["public.good"].copies == before["public.good"].copies
        assert lake.table("public.texts") == [{"k": 1, "v": "a"}]


def test_check_finds_an_array_that_is_a_key(database):
    database.run("CREATE TABLE bad (k int[] PRIMARY KEY)")
    (finding,) = found_by_check(database.source()).values()
    assert "public.bad" in finding.what
    assert 'text_columns = ["public.bad.k"]' in finding.fix
    assert not found_by_check(database.source(text_columns=["public.bad.k"]))


def test_a_generated_key_that_the_server_does_not_send_leaves_its_table_out_alone(tmp_path, need):
    need(binaries(16), "PostgreSQL 16 is not installed")
    with PostgresServer(16) as old, database_on(old, "misfits") as made:
        made.run(
            "CREATE TABLE bad (a int, g int GENERATED ALWAYS AS (a * 2) STORED PRIMARY KEY)",
            "CREATE TABLE good (id int PRIMARY KEY)",
            "INSERT INTO good VALUES (1)",
        )
        with Lake(tmp_path, made.source()) as lake:
            lake.catch_up()
            assert lake.table("public.good") == [{"id": 1}]
            assert "generated" in lake.source.health_check().reason
        (finding,) = found_by_check(made.source()).values()
        assert "public.bad is left out: its key has the generated column" in finding.what
        made.run(finding.fix.partition(";")[0])
        assert not found_by_check(made.source())
        made.run(
            "DROP TABLE good", "DROP TABLE bad", "CREATE TABLE bad (a int PRIMARY KEY GENERATED ALWAYS AS (1) STORED)"
        )
        with pytest.raises(ConfigError, match="generated"):
            made.source(slot="new").open()


def test_of_two_tables_with_one_name_the_second_is_left_out(database, tmp_path):
    database.run(
        'CREATE SCHEMA "a.b"',
        "CREATE SCHEMA a",
        'CREATE TABLE "a.b".c (id int PRIMARY KEY)',
        'CREATE TABLE a."b.c" (id int PRIMARY KEY, x text)',
        'INSERT INTO "a.b".c VALUES (1)',
        "INSERT INTO a.\"b.c\" VALUES (2, 'x')",
        "CREATE PUBLICATION penstock FOR ALL TABLES WITH (publish_generated_columns = stored)",
    )
    opened = database.source(tables=["*"])
    with Lake(tmp_path, opened) as lake:
        lake.catch_up()
        database.run('INSERT INTO "a.b".c VALUES (3)', "INSERT INTO a.\"b.c\" VALUES (4, 'y')")
        lake.catch_up()
        assert lake.table("a.b.c") == [{"id": 1}, {"id": 3}]
        assert '"a"."b.c"' in opened.health_check().reason
    (finding,) = found_by_check(database.source(tables=["*"])).values()
    assert finding.what.startswith('"a"."b.c" is left out')


@pytest.fixture
def by_table(monkeypatch):
    """A route that leaves the schema out."""
    monkeypatch.setattr(mirrored, "Router", lambda routes, sinks: Router((Route(stream="*", to="/{table}"),), sinks))


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_a_table_that_would_go_where_another_goes_is_set_aside_when_it_appears(
    database, tmp_path, by_table, first, second
):
    database.run("CREATE SCHEMA a", "CREATE SCHEMA b", f"CREATE TABLE {first}.t (id int PRIMARY KEY)")
    database.run(f"INSERT INTO {first}.t VALUES (1)")
    options = {"tables": ["a.*", "b.*"]}
    with Lake(tmp_path, database.source(**options)) as lake:
        lake.catch_up()
        database.run(f"CREATE TABLE {second}.t (id int PRIMARY KEY)", f"INSERT INTO {second}.t VALUES (1), (2)")
        lake.catch_up()
    opened = database.source(**options)
    with Lake(tmp_path, opened) as lake:
        database.run(f"INSERT INTO {first}.t VALUES (5)", f"INSERT INTO {second}.t VALUES (6)")
        try_again(lake, f"{second}.t")
        assert lake.table("t") == [{"id": 1}, {"id": 5}]
        assert failure(lake, f"{second}.t").code == "PEN-1011"
        assert failure(lake, f"{second}.t").tries == 2
        database.run(f"DROP TABLE {first}.t")
        lake.catch_up()
        try_again(lake, f"{second}.t")
        assert lake.table("t") == [{"id": 1}, {"id": 2}, {"id": 6}]


def test_a_table_that_no_route_takes_is_set_aside_when_it_appears(database, tmp_path, monkeypatch):
    monkeypatch.setattr(mirrored, "Router", lambda routes, sinks: Router((Route(stream="public.g*"),), sinks))
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        database.run(
            "CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other VALUES (1)", "INSERT INTO good VALUES (2)"
        )
        lake.catch_up()
        assert lake.table("public.good") == [{"id": 1}, {"id": 2}]
        assert failure(lake, "public.other").code == "PEN-1018"


def test_a_value_that_the_server_cannot_print_is_told_with_a_way_out():
    with (
        pytest.raises(FatalError, match=r"too large for the server to print[\s\S]*exclude_columns"),
        failures.errors("no"),
    ):
        raise psycopg.errors.InternalError_("invalid memory alloc request size 1132462083")


PIPELINE = """
connector_name = "misfits"
delivery = "exactly-once"

[source]
connector = "postgres_cdc"
dsn = "{dsn}"
slot = "{slot}"
tables = ["*"]

[[routes]]
from = "*"
to = "/{{table}}"

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

    def drain(self, file):
        supervisor.run(Pipeline.from_toml(file), engine=ForkEngine(2), drain=True)

    def states(self, file, cli):
        shown = json.loads(cli("tables", file, "show", "--json")[1])
        return {each["stream"]: (each["state"], each["code"]) for each in shown}

    @pytest.mark.parametrize("name", ["%41", "b\\d"])
    def test_a_name_that_a_sink_has_no_place_for_is_found_by_check_and_set_aside(self, database, file, cli, name):
        database.run(f'CREATE TABLE "{name}" (id int PRIMARY KEY)', f'INSERT INTO "{name}" VALUES (1)')
        code, out, _ = cli("check", file)
        assert code == 1
        assert f"/{name} is left out: PEN-1010" in out
        for _ in range(2):
            self.drain(file)
            assert self.states(file, cli) == {f"public.{name}": ("failed", "PEN-1010"), "public.good": ("active", "")}
        assert DeltaTable(str(file.parent / "lake/good")).to_pyarrow_table().num_rows == 1

    @pytest.mark.parametrize("connector", ["postgres_cdc", "postgres_capture"])
    def test_a_sample_before_the_first_start_makes_neither_slot_nor_publication(self, database, file, cli, connector):
        file.write_text(file.read_text().replace('"postgres_cdc"', f'"{connector}"'))
        database.run("INSERT INTO good SELECT generate_series(2, 9)")
        code, out, _ = cli("check", file, "--sample", "3", "--json")
        (taken,) = json.loads(out)["sample"]
        assert code == 0
        assert taken["stream"] == "public.good"
        assert [(row["id"], row["_op"]) for row in taken["rows"]] == [(1, "r"), (2, "r"), (3, "r")]
        assert database.rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == []
        assert database.rows("SELECT pubname FROM pg_publication") == []

    def test_tables_that_meet_are_refused_at_the_first_start_and_later_the_new_one_is_set_aside(
        self, database, file, cli
    ):
        self.drain(file)
        database.run("CREATE SCHEMA a", "CREATE TABLE a.good (id int PRIMARY KEY)", "INSERT INTO a.good VALUES (5)")
        for number in (2, 3):  # it came while nothing ran, and is there at every start from then on
            database.run(f"INSERT INTO good VALUES ({number})")
            self.drain(file)
            assert self.states(file, cli) == {"a.good": ("failed", "PEN-1011"), "public.good": ("active", "")}
        rows = DeltaTable(str(file.parent / "lake/good")).to_pyarrow_table().to_pydict()
        assert sorted(rows["id"]) == [1, 2, 3]
        assert "PEN-1011 the streams" in cli("check", file)[1]
        other = file.parent / "other" / file.name
        other.parent.mkdir()
        other.write_text(file.read_text())
        with pytest.raises(ConfigError, match="PEN-1011"):
            self.drain(other)


def test_a_log_of_changes_does_not_grow_while_another_sink_refuses_the_table(database, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RETRY_SECS", 0.0)
    database.run("CREATE TABLE loose (n int)", "INSERT INTO loose SELECT generate_series(1, 5)")
    log = Delta(DeltaConfig(path=str(tmp_path / "log/{topic}"), mode="changes"))
    upserts = Delta(DeltaConfig(path=str(tmp_path / "lake/{topic}"), mode="upsert"))
    source = database.source(tables=["public.loose"], insert_only=["public.loose"])
    with Lake(tmp_path, source, {"log": log, "lake": upserts}) as lake:
        for _ in range(6):
            lake.loop.step()
        assert lake.source.tables(lake.position)["public.loose"].state == "failed"
    assert not (tmp_path / "log" / "public.loose" / "_delta_log").exists()
