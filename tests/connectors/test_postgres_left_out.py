"""Nothing that the options choose is left out without a word: tables, columns, values."""

from __future__ import annotations

import itertools
import json

import pyarrow as pa
import pytest

from mirrored import Database, Lake, database_on
from penstock.connectors.postgresql.types import TypeCatalog, parse_text
from penstock.errors import ConfigError, DataError
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.testing.engine import ForkEngine
from penstock.testing.postgres import PostgresServer, binaries

_NUMBERS = itertools.count()
INT4_ARRAY = 1007


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    with PostgresServer(18, settings={"max_replication_slots": "60", "fsync": "off"}) as running:
        yield running


@pytest.fixture
def database(server):
    with database_on(server, f"left_{next(_NUMBERS)}", Database) as made:
        yield made


KINDS = {
    "plain": "CREATE TABLE plain (id int PRIMARY KEY, v text)",
    "unlogged": "CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY)",
    "keyless": "CREATE TABLE keyless (id int)",
    "clash": "CREATE TABLE clash (id int PRIMARY KEY, _op text)",
    "computed": "CREATE TABLE computed (id int PRIMARY KEY, w int, "
    "area int GENERATED ALWAYS AS (w * 2) VIRTUAL, stored int GENERATED ALWAYS AS (w * 3) STORED)",
    "parts": "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
    "lists": "CREATE TABLE lists (id int PRIMARY KEY, xs int[])",
}


@pytest.fixture
def everything(database):
    database.run(*KINDS.values())
    return database


def test_every_chosen_table_is_captured_or_listed_with_a_fix(everything):
    source = everything.source()
    source.open()
    try:
        tables = source.session.tables
        matching = {
            f"public.{name}"
            for (name,) in everything.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        }
        assert tables.captured.keys() | tables.refused.keys() == matching
        assert sorted(tables.refused) == ["public.clash", "public.keyless", "public.unlogged"]
        texts = {finding.what: finding.fix for finding in source.check() if not finding.ok}
        for stream, finding in tables.refused.items():
            assert texts[f"{stream} is left out: {finding.what}"] == finding.fix != ""
        position = source.initial()
        assert source.tables(position).keys() == matching
    finally:
        source.close()


def test_every_column_of_a_captured_table_is_captured_excluded_or_listed(everything):
    source = everything.source(exclude_columns=["public.plain.v"])
    source.open()
    try:
        findings = {finding.what for finding in source.check()}
        for stream, table in source.session.tables.captured.items():
            query = "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attnum > 0"
            there = {name for (name,) in everything.connection.execute(query, [table.oid]).fetchall()}
            captured = {column.name for column in table.columns}
            assert there == captured | {*table.unpublished} | ({"v"} if stream == "public.plain" else set())
        what = "public.computed: left out: 'area' (generated; the server does not publish it)"
        assert what in findings
        assert source.tables(source.initial())["public.computed"].note.endswith("left out, since generated: area")
    finally:
        source.close()


def test_an_unlogged_table_that_is_named_stops_the_start(everything):
    with pytest.raises(ConfigError, match=r"PEN-1016 public\.unlogged cannot be captured: it is UNLOGGED") as raised:
        everything.source(tables=["public.plain", "public.unlogged"]).open()
    assert raised.value.hint.startswith('ALTER TABLE "public"."unlogged" SET LOGGED')


def test_the_fix_of_an_unlogged_table_brings_it_in(everything, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.connectors.postgres_cdc.plan.LOOKED_SECS", 0.0)
    everything.run("INSERT INTO unlogged VALUES (1)")
    with Lake(tmp_path, everything.source(tables=["public.plain", "public.unl*"])) as lake:
        lake.catch_up()
        health = lake.source.health_check()
        assert (health.state, "public.unlogged: it is UNLOGGED" in health.reason) == ("degraded", True)
        fix = lake.position.refused["public.unlogged"].fix.partition(";")[0]
        everything.run(fix)
        lake.catch_up()
        assert lake.table("public.unlogged") == [{"id": 1}]
        assert lake.position.refused == {}
        assert lake.source.health_check().state == "healthy"


def test_a_deferrable_key_tells_no_rows_apart(database, tmp_path):
    """In the middle of `SET id = id + 1` two rows have one key: mirrored by it, all rows but one were lost."""
    for name in ("late", "whole"):
        database.run(f"CREATE TABLE {name} (id int PRIMARY KEY DEFERRABLE)", f"INSERT INTO {name} VALUES (1), (2), (3)")
    database.run("ALTER TABLE whole REPLICA IDENTITY FULL", "CREATE TABLE plain (id int PRIMARY KEY)")
    with Lake(tmp_path, database.source()) as lake:
        lake.catch_up()
        database.run("UPDATE late SET id = id + 1")  # refused by the server, if the table were published
        states = lake.source.tables(lake.position)
        assert {stream: each.state for stream, each in states.items()} == {
            "public.late": "left_out",
            "public.plain": "active",
            "public.whole": "failed",
        }
        assert "no key" in states["public.whole"].error


def test_tables_and_columns_that_are_left_out_show_in_the_list_of_tables(everything, tmp_path, cli):
    file = tmp_path / "pipeline.toml"
    file.write_text(f'''
connector_name = "left"
[source]
connector = "postgres_cdc"
dsn = "{everything.dsn}"
slot = "{everything.name}"
tables = ["public.*"]
[sink]
connector = "files"
path = "lake/{{topic}}"
''')
    supervisor.run(Pipeline.from_toml(file), ForkEngine(1), drain=True)
    code, out, _ = cli("tables", file, "show", "--json")
    shown = {each["stream"]: each for each in json.loads(out)}
    assert code == 0
    assert {stream for stream, each in shown.items() if each["state"] == "left_out"} == {
        "public.clash",
        "public.keyless",
        "public.unlogged",
    }
    assert shown["public.unlogged"]["hint"].startswith("ALTER TABLE")
    assert "area" in shown["public.computed"]["note"]
    code, _, err = cli("tables", file, "resync", "public.unlogged")
    assert (code != 0, "public.unlogged cannot be captured" in err) == (True, True)
    code, out, _ = cli("tables", file, "resync", "public.*")
    assert (code, "public.plain" in out, "public.unlogged" in out) == (0, True, False)
    _, out, _ = cli("tables", file, "show")
    assert "left out" in out
    assert "UNLOGGED" in out


@pytest.mark.parametrize("lower", [-3, -1, 0, 1, 2, 7])
def test_an_array_keeps_its_subscripts_or_is_refused(lower):
    text = "{7,8}" if lower == 1 else f"[{lower}:{lower + 1}]={{7,8}}"
    if lower == 1:
        assert parse_text(pa.array([text]), INT4_ARRAY, -1, TypeCatalog()).to_pylist() == [[7, 8]]
        return
    with pytest.raises(DataError, match=rf"PEN-3001.*'xs'.*subscripts do not start at 1 but are \[{lower}:") as raised:
        parse_text(pa.array(["{1}", None, text, "{}"]), INT4_ARRAY, -1, TypeCatalog(), name="xs")
    assert "`text_columns`" in raised.value.hint
    assert "{7,8}" not in str(raised.value)


def test_an_array_of_texts_that_look_like_subscripts_is_a_plain_one():
    texts = ["{[0:1]=a}", '{"[0:1]={7}"}']
    assert parse_text(pa.array(texts), 1009, -1, TypeCatalog()).to_pylist() == [["[0:1]=a"], ["[0:1]={7}"]]


def test_an_array_with_other_subscripts_sets_its_table_aside_and_text_columns_keep_them(everything, tmp_path):
    everything.run("INSERT INTO lists VALUES (1, '{1}'), (2, '[0:1]={7,8}')", "INSERT INTO plain VALUES (1)")
    options = {"tables": ["public.plain", "public.lists"]}
    source = everything.source(**options)
    what = "public.lists: arrays in 'xs' need one dimension, with subscripts from 1"
    assert [f.fix for f in source.check() if f.what == what] == [
        'if some have others: text_columns = ["public.lists.xs"]'
    ]
    with Lake(tmp_path / "a", source) as lake:
        while lake.loop.step() is not None:
            pass
        failure = lake.position.tables["public.lists"].failure
        assert (failure.code, "subscripts do not start at 1" in failure.message) == ("PEN-3001", True)
        assert lake.table("public.plain") == everything.table("plain")
    kept = everything.source(**options, slot=everything.name + "_b", text_columns=["public.lists.xs"])
    with Lake(tmp_path / "b", kept) as lake:
        lake.catch_up()
        everything.run("UPDATE lists SET xs = '[5:5]={9}' WHERE id = 1")
        lake.catch_up()
        assert lake.table("public.lists") == [{"id": 1, "xs": "[5:5]={9}"}, {"id": 2, "xs": "[0:1]={7,8}"}]
