"""Debezium's change envelopes: what an upsert sink makes of them, and what Debezium's readers get from us."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.changes import is_changelog
from penstock.changes.collapse import collapse
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.formats import WireSchema, framing
from penstock.formats.avro import Avro, AvroConfig
from penstock.formats.debezium import UNAVAILABLE, Debezium, DebeziumConfig
from penstock.schema import key_of

SOURCE = {"connector": "postgresql", "name": "shop", "ts_ms": 1_700_000_000_000, "txId": 7, "table": "orders"}


def envelope(op, before=None, after=None, lsn=1, **source):
    return {"before": before, "after": after, "source": {**SOURCE, "lsn": lsn, **source}, "op": op, "ts_ms": 1}


def with_schema(payload):
    return {
        "schema": {"type": "struct", "fields": [{"field": "op", "default": 1}, {"default": "x"}]},
        "payload": payload,
    }


def texts(values) -> pa.Array:
    return pa.array([None if each is None else json.dumps(each).encode() for each in values], pa.binary())


def debezium(**options) -> Debezium:
    return Debezium(DebeziumConfig(**options))


CHANGES = [
    envelope("r", after={"id": 1, "name": "a", "note": "n"}, lsn=5),
    envelope("c", after={"id": 2, "name": "b", "note": None}, lsn=10),
    envelope(
        "u", before={"id": 1, "name": "a", "note": "n"}, after={"id": 1, "name": "z", "note": UNAVAILABLE}, lsn=11
    ),
    envelope("d", before={"id": 2, "name": None, "note": None}, lsn=12),
    None,
    envelope("u", before={"id": 1, "name": "z", "note": "n"}, after={"id": 9, "name": "z", "note": "n"}, lsn=13),
]
KEYS = [{"id": 1}, {"id": 2}, {"id": 1}, {"id": 2}, {"id": 2}, {"id": 9}]


@pytest.mark.parametrize("dress", [lambda each: each, lambda each: each and with_schema(each)])
def test_envelopes_become_rows_with_change_columns(dress):
    payloads, keys = texts(map(dress, CHANGES)), texts(map(dress, KEYS))
    decoded = debezium().decode_with_keys(payloads, keys)
    rows = decoded.rows
    assert len(decoded.failures) == 0
    assert is_changelog(rows.schema)
    assert key_of(rows.schema) == ["id"]
    assert rows.column("_op").to_pylist() == ["r", "c", "u", "d", "d", "u"]
    assert rows.column("id").to_pylist() == [1, 2, 1, 2, 2, 9]
    assert rows.column("note").to_pylist() == ["n", None, None, None, None, "n"]
    assert rows.column("_unchanged").to_pylist() == [None, None, ["note"], None, None, None]
    assert rows.column("_old_key").to_pylist() == [None] * 5 + ['{"id":1}']
    assert rows.column("_txid").to_pylist() == [7, 7, 7, 7, None, 7]
    assert rows.column("_committed_at")[0].as_py().isoformat() == "2023-11-14T22:13:20+00:00"
    positions = rows.column("_position").to_pylist()
    assert positions == sorted(positions)


def test_an_upsert_sink_gets_the_last_state_of_every_key():
    rows = debezium().decode_with_keys(texts(CHANGES), texts(KEYS)).rows
    result = collapse(pa.Table.from_batches([rows]), ["id"])
    assert result.upserts.select(["id", "name", "note"]).to_pylist() == [{"id": 9, "name": "z", "note": "n"}]
    assert sorted(row["id"] for row in result.deletes.to_pylist()) == [1, 2]


def test_a_truncate_empties_the_target():
    rows = debezium(key=["id"]).decode(texts([CHANGES[1], envelope("t", lsn=20)])).rows
    assert collapse(pa.Table.from_batches([rows]), ["id"]).truncated


def test_columns_of_the_epochs_before_keep_their_place_and_type():
    first = debezium(key=["id"]).decode(texts([envelope("c", after={"id": 1, "price": 1.5})])).rows.schema
    later = debezium(key=["id"]).decode(texts([envelope("c", after={"price": 2, "extra": "x", "id": 2})]), first).rows
    assert later.schema.names[:3] == ["id", "price", "extra"]
    assert later.schema.field("price").type == pa.float64()


def test_only_payloads_that_are_no_envelopes_fall_out():
    payloads = [
        json.dumps({"id": 1}).encode(),
        b"nonsense",
        json.dumps({"op": 5, "after": 7}).encode(),
        json.dumps(envelope("m")).encode(),
        json.dumps(envelope("c")).encode(),
        json.dumps(envelope("d")).encode(),
        None,
        json.dumps(CHANGES[1]).encode(),
    ]
    decoded = debezium(key=["id"]).decode(pa.array(payloads, pa.binary()))
    assert decoded.rows.column("id").to_pylist() == [2]
    assert decoded.positions.tolist() == [7]
    rules = dict(zip(decoded.failures.positions.tolist(), decoded.failures.rules, strict=True))
    assert {at: rule for at, rule in rules.items() if at not in (1, 2)} == {
        0: "debezium.envelope", 3: "debezium.op", 4: "debezium.envelope", 5: "debezium.envelope", 6: "debezium.tombstone"
    }  # fmt: skip
    assert rules[1].startswith("json.")
    assert rules[2].startswith("json.")


def test_a_payload_that_falls_out_brings_no_column():
    odd = envelope("m", after={"id": 1, "new": 5})
    payloads = texts([CHANGES[1], odd, envelope("c"), CHANGES[1]])
    for known in (None, debezium(key=["id"]).decode(texts([CHANGES[1]])).rows.schema):
        decoded = debezium(key=["id"]).decode(payloads, known)
        assert "new" not in decoded.rows.schema.names
        assert decoded.positions.tolist() == [0, 3]
        assert decoded.failures.positions.tolist() == [1, 2]
        assert decoded.failures.rules == ("debezium.op", "debezium.envelope")
    assert "new" in debezium(key=["id"]).decode(texts([CHANGES[1], {**odd, "op": "c"}])).rows.schema.names
    assert debezium(key=["id"]).decode(texts([odd])).rows.num_rows == 0


def test_a_row_with_a_column_that_describes_changes_here_falls_out_alone():
    payloads = texts([CHANGES[1], envelope("c", after={"id": 3, "_op": "x"}), envelope("c", after={"id": 4})])
    decoded = debezium(key=["id"]).decode(payloads)
    assert decoded.rows.column("id").to_pylist() == [2, 4]
    assert decoded.rows.column("_op").to_pylist() == ["c", "c"]
    assert decoded.failures.rules == ("debezium.reserved",)
    again = debezium(key=["id"]).decode(payloads, decoded.rows.schema)
    assert again.rows.equals(decoded.rows)


@pytest.mark.parametrize("odd", [{"other": 2}, {"id": 2, "more": 3}])
def test_a_message_with_another_key_falls_out_and_leaves_the_key_of_the_others(odd):
    payloads, keys = texts([envelope("c", after={"id": at}) for at in (1, 2, 3)]), texts([{"id": 1}, odd, {"id": 3}])
    decoded = debezium().decode_with_keys(payloads, keys)
    assert list(key_of(decoded.rows.schema)) == ["id"]
    assert decoded.rows.column("id").to_pylist() == [1, 3]
    assert decoded.failures.rules == ("debezium.key",)
    first = debezium().decode_with_keys(payloads.slice(1), keys.slice(1), decoded.rows.schema)
    assert first.rows.column("id").to_pylist() == [3], "the key of the epochs before counts"
    chosen = debezium(key=["id"]).decode_with_keys(payloads, keys)
    assert chosen.rows.column("id").to_pylist() == [1, 2, 3], "a key that is set does not look at those of the messages"


def test_a_delete_whose_row_has_another_type_falls_out_alone():
    payloads = texts(
        [envelope("c", after={"id": 1}), envelope("d", before={"id": "x"}, lsn=2), envelope("d", before={"id": 1})]
    )
    decoded = debezium(key=["id"]).decode(payloads)
    assert decoded.positions.tolist() == [0, 2]
    assert decoded.failures.rules == ("json.type",)


def test_deletes_without_a_row_are_known_by_their_key():
    decoded = debezium().decode_with_keys(texts([envelope("d"), CHANGES[1]]), texts([{"id": 3}, {"id": 2}]))
    assert decoded.rows.column("id").to_pylist() == [3, 2]


@pytest.mark.parametrize(
    ("ids", "key", "gone"), [((1.5, 2, 3), 2, 2.0), ((1, 2, 3), 2.0, 2), ((1.5, 2), 2**53 + 1, None)]
)
def test_a_key_is_the_same_number_with_and_without_a_fraction(ids, key, gone):
    made = [envelope("c", after={"id": each}, lsn=n) for n, each in enumerate(ids)]
    decoded = debezium(key=["id"]).decode_with_keys(
        texts([*made, envelope("d", lsn=8), None]), texts([*({"id": each} for each in ids), {"id": key}, {"id": key}])
    )
    found = decoded.rows.column("id").to_pylist()[len(ids) :]
    assert found == ([] if gone is None else [gone, gone])
    assert len(decoded.failures) == (2 if gone is None else 0)


def test_placeholders_of_bytes_and_lists_are_values_left_as_they_were():
    encoded = "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="
    rows = (
        debezium(key=["id"])
        .decode(
            texts([envelope("u", after={"id": 1, "raw": encoded, "tags": [UNAVAILABLE], "other": ["x", UNAVAILABLE]})])
        )
        .rows
    )
    assert rows.column("_unchanged").to_pylist() == [["raw", "tags"]]
    assert rows.select(["raw", "tags", "other"]).to_pylist() == [
        {"raw": None, "tags": None, "other": ["x", UNAVAILABLE]}
    ]


def test_a_new_row_without_all_its_values_is_a_failure_and_not_nulls():
    """A row that got another key: a delete and a new row, for which Debezium did not know the large values."""
    moved = [envelope("d", before={"id": 1}), envelope("c", after={"id": 2, "note": UNAVAILABLE}, lsn=2)]
    decoded = debezium(key=["id"]).decode(texts([*moved, envelope("u", after={"id": 3, "note": UNAVAILABLE}, lsn=3)]))
    assert (decoded.failures.positions.tolist(), list(decoded.failures.rules)) == ([1], ["debezium.incomplete"])
    assert decoded.rows.column("_unchanged").to_pylist() == [None, ["note"]]


def test_infinities_in_json_are_text_beside_numbers():
    rows = [{"id": 1, "x": 1.5}, {"id": 2, "x": "NaN"}, {"id": 3, "x": "-Infinity"}]
    decoded = debezium(key=["id"]).decode(texts([envelope("c", after=each) for each in rows]))
    assert decoded.rows.column("x").to_pylist() == [1.5]
    assert decoded.failures.rules == ("json.type", "json.type")


def test_positions_of_other_databases_sort_as_well():
    mysql = [envelope("c", after={"id": n}, lsn=None, file="bin.000002", pos=n * 100, row=0) for n in (9, 10)]
    for each in mysql:
        del each["source"]["lsn"]
    positions = debezium(key=["id"]).decode(texts(mysql)).rows.column("_position").to_pylist()
    assert positions == sorted(positions)
    assert positions[0].startswith("bin.000002.")


def test_a_change_without_a_position_never_comes_before_the_changes_of_earlier_batches():
    first = texts([envelope("c", after={"id": 1, "name": "old"}, lsn=10)])
    later = texts(
        [envelope("r", after={"id": 1, "name": "new"}, lsn=None), envelope("c", after={"id": 2}, lsn=11), None]
    )
    keys = texts([{"id": 1}, {"id": 2}, {"id": 2}])
    batches = [debezium().decode_with_keys(first, keys.slice(0, 1)).rows, debezium().decode_with_keys(later, keys).rows]
    assert batches[1].column("_position").to_pylist() == [f"{11:020d}"] * 3
    state = collapse([pa.Table.from_batches([each]) for each in batches], ["id"])
    assert state.upserts.to_pylist() == [{"id": 1, "name": "new"}]
    assert state.deletes.to_pylist() == [{"id": 2}]


def test_positions_that_are_numbers_in_text_sort_as_numbers():
    found = debezium(key=["id"]).decode(texts([envelope("c", after={"id": at}, lsn=str(at)) for at in (9, 10)]))
    assert found.rows.column("_position").to_pylist() == [f"{9:020d}", f"{10:020d}"]


@pytest.mark.parametrize("first", ["schema", "payload"])
def test_a_name_that_is_there_twice_is_a_failure_wherever_the_schema_part_stands(first):
    parts = {
        "schema": '{"type": "struct"}',
        "payload": '{"op": "c", "after": {"id": 1, "id": 2}, "source": {"lsn": 1}}',
    }
    order = [first, *({*parts} - {first})]
    text = "{" + ", ".join(f'"{name}": {parts[name]}' for name in order) + "}"
    decoded = debezium(key=["id"]).decode(pa.array([text.encode()], pa.binary()))
    assert (decoded.rows.num_rows, decoded.failures.rules) == (0, ("json.duplicate_key",))


@pytest.mark.parametrize("key", [["id"], []], ids=["a key of its own", "the rows' key"])
def test_changes_written_as_envelopes_come_back(key):
    rows = debezium().decode_with_keys(texts(CHANGES), texts(KEYS)).rows
    written = debezium(key=key).encode(rows)
    first = json.loads(written[2].as_py())
    assert (first["op"], first["after"]["note"], first["before"]) == ("u", UNAVAILABLE, None)
    assert json.loads(written[5].as_py())["before"] == {"id": 1, "name": None, "note": None}
    again = debezium(key=["id"]).decode(written).rows
    for name in ("id", "name", "note", "_op", "_position", "_txid", "_committed_at", "_unchanged", "_old_key"):
        assert again.column(name).to_pylist() == rows.column(name).to_pylist(), name


def test_what_debezium_cannot_say_is_refused():
    with pytest.raises(SchemaError, match="_op"):
        debezium().encode(pa.record_batch({"id": [1]}))
    rows = debezium(key=["id"]).decode(texts([envelope("u", after={"id": 1, "n": 5})])).rows
    at = rows.schema.get_field_index("_unchanged")
    rows = rows.set_column(at, "_unchanged", pa.array([["n"]], pa.list_(pa.string())))
    with pytest.raises(DataError, match="n was left"):
        debezium().encode(rows)


VALUE = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "at", "type": ["null", {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}]},
    ],
}
ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "namespace": "shop",
    "fields": [
        {"name": "before", "type": ["null", VALUE], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {
            "name": "source",
            "type": {
                "type": "record",
                "name": "Source",
                "fields": [
                    {"name": "connector", "type": "string"},
                    {"name": "ts_ms", "type": "long"},
                    {"name": "txId", "type": ["null", "long"]},
                    {"name": "lsn", "type": ["null", "long"]},
                ],
            },
        },
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"]},
    ],
}
KEY = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "int"}]}
KNOWN = {1: WireSchema("avro", json.dumps(ENVELOPE), id=1), 2: WireSchema("avro", json.dumps(KEY), id=2)}


def test_envelopes_in_avro_become_rows_with_change_columns():
    raw = Avro(AvroConfig(framing="confluent"), KNOWN[1])
    source = {"connector": "postgresql", "ts_ms": 5, "txId": None, "lsn": 3}
    found = [
        {"before": None, "after": {"id": 1, "note": UNAVAILABLE, "at": 1_000_000}, "source": source, "op": "u"},
        {"before": {"id": 2, "note": None, "at": None}, "after": None, "source": source, "op": "d"},
    ]
    payloads = raw.encode(pa.RecordBatch.from_pylist(found, schema=raw.columns()))
    payloads = pa.array([*payloads.to_pylist(), None, b"\0\0\0\0\x01\x00"], pa.binary())
    keys = framing.add(pa.array([b"\x02", b"\x04", b"\x04", b"\x02"], pa.binary()), 2)
    avro = Debezium(DebeziumConfig(encoding="avro", framing="confluent"), KNOWN[1], KNOWN.__getitem__)
    decoded = avro.decode_with_keys(payloads, keys)
    assert decoded.rows.column("id").to_pylist() == [1, 2, 2]
    assert decoded.rows.column("at").type == pa.timestamp("us")
    assert decoded.rows.column("_op").to_pylist() == ["u", "d", "d"]
    assert decoded.rows.column("_unchanged").to_pylist() == [["note"], None, None]
    assert key_of(decoded.rows.schema) == ["id"]
    assert decoded.rows.schema.names == avro.columns().names
    assert decoded.failures.rules == ("avro.truncated",)
    again = avro.decode(avro.encode(decoded.rows))
    assert again.rows.column("_op").to_pylist() == ["u", "d", "d"]
    assert again.rows.column("at").equals(decoded.rows.column("at"))


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match="JSON"):
        Debezium(DebeziumConfig(), KNOWN[1])
    with pytest.raises(ConfigError, match="schema"):
        Debezium(DebeziumConfig(encoding="avro"))
    with pytest.raises(SchemaError, match="envelope"):
        Debezium(DebeziumConfig(encoding="avro"), KNOWN[2]).columns()


values = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3)
images = st.none() | st.dictionaries(st.sampled_from(["id", "a", "b"]), values, max_size=3) | st.integers()
envelopes = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["c", "u", "d", "r", "t", "m", None, 5]),
        "before": images,
        "after": images,
        "source": st.none() | st.dictionaries(st.sampled_from(["lsn", "ts_ms", "txId"]), values, max_size=3),
        "schema": st.just({"type": "struct"}),
        "payload": images,
    },
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(st.lists(st.none() | envelopes, max_size=6), st.lists(st.none() | images, min_size=6, max_size=6))
def test_every_payload_is_a_row_or_a_failure(payloads, keys):
    decoded = debezium().decode_with_keys(texts(payloads), texts(keys[: len(payloads)]))
    decoded.rows.validate(full=True)
    assert decoded.rows.num_rows == len(decoded.positions)
    assert sorted([*decoded.positions, *decoded.failures.positions]) == list(range(len(payloads)))


def known(id: int) -> WireSchema:
    """A registry that has two schemas, and one for keys that are plain text."""
    if id not in (1, 2, 3):
        raise DataError(f"the registry has no schema with the id {id}", code="PEN-3030")
    return KNOWN.get(id) or WireSchema("avro", '"string"', id=3)


def in_avro() -> Debezium:
    return Debezium(DebeziumConfig(encoding="avro", framing="confluent"), KNOWN[1], known)


@pytest.mark.parametrize("odd", [b"\0\0\0\0\x09\x02", b"\0\0\0\0\x03\x02a", b"\0", None])
def test_a_first_key_that_cannot_be_read_spoils_no_other_message(odd):
    payloads, keys = avro_changes()
    payloads, keys = [payloads[0], None, payloads[0]], [odd, keys[1], keys[0]]
    decoded = in_avro().decode_with_keys(pa.array(payloads, pa.binary()), pa.array(keys, pa.binary()))
    assert sorted([*decoded.positions, *decoded.failures.positions]) == [0, 1, 2]
    found = dict(zip(decoded.positions.tolist(), decoded.rows.column("id").to_pylist(), strict=True))
    assert (found[1], found[2]) == (2, 1)


def avro_changes() -> tuple[list[bytes], list[bytes]]:
    """Two whole changes, and their keys."""
    raw = Avro(AvroConfig(framing="confluent"), KNOWN[1])
    source = {"connector": "postgresql", "ts_ms": 5, "txId": None, "lsn": 3}
    found = [
        {"before": None, "after": {"id": 1, "note": "n", "at": 1_000_000}, "source": source, "op": "c"},
        {"before": {"id": 2, "note": None, "at": None}, "after": None, "source": source, "op": "d"},
    ]
    payloads = raw.encode(pa.RecordBatch.from_pylist(found, schema=raw.columns())).to_pylist()
    return payloads, framing.add(pa.array([b"\x02", b"\x04"], pa.binary()), 2).to_pylist()


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)
@given(st.sampled_from(["json", "avro"]), st.data())
def test_damaged_payloads_and_keys_are_rows_or_failures_and_spoil_no_other(encoding, data):
    if encoding == "avro":
        format = in_avro()
        whole, keys = avro_changes()
    else:
        format = debezium()
        whole, keys = texts(CHANGES[:2]).to_pylist(), texts(KEYS[:2]).to_pylist()

    def damaged(value: bytes) -> bytes | None:
        place = data.draw(st.integers(0, len(value) - 1))
        changed = value[:place] + bytes([data.draw(st.integers(0, 255))]) + value[place + 1 :]
        return data.draw(st.none() | st.binary(max_size=12) | st.sampled_from([changed, value[:place], value + b"\0"]))

    at = data.draw(st.lists(st.integers(0, 1), max_size=5))
    payloads = [whole[0], *(damaged(whole[each]) for each in at)]
    beside = [keys[0], *(data.draw(st.sampled_from([keys[each], damaged(keys[each])])) for each in at)]
    decoded = format.decode_with_keys(pa.array(payloads, pa.binary()), pa.array(beside, pa.binary()))
    decoded.rows.validate(full=True)
    assert decoded.rows.num_rows == len(decoded.positions)
    assert sorted([*decoded.positions, *decoded.failures.positions]) == list(range(len(payloads)))
    assert decoded.positions[0] == 0
    assert decoded.rows.column("id")[0].as_py() == 1
