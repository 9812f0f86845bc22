"""Avro's binary encoding against fastavro: random schemas, random rows, both ways, and payloads that are wrong."""

from __future__ import annotations

import io
import json
import pickle
import time
from decimal import Decimal

import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.formats import WireSchema
from penstock.formats.avro import Avro, AvroConfig
from penstock.formats.avro import scan as at_scan

SLOW = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=60
)
INT, LONG = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
DAY_US = 86_400_000_000
MOMENTS = st.integers(-62_135_596_800_000, 253_402_300_799_999)  # milliseconds of the years 1 to 9999


def format_of(schema, framing="none", resolve=None, id=0) -> Avro:
    return Avro(AvroConfig(framing=framing), WireSchema("avro", json.dumps(schema), id=id), resolve)


def written(schema, rows) -> list[bytes]:
    parsed = fastavro.parse_schema(schema)
    payloads = []
    for row in rows:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, row)
        payloads.append(out.getvalue())
    return payloads


def binary(payloads) -> pa.Array:
    return pa.array(payloads, pa.binary())


def record(*fields, name="R", **more):
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields], **more}


# A kind is a schema and a strategy of pairs: the value as fastavro writes it, and as pyarrow takes it.
def same(values):
    return values.map(lambda value: (value, value))


def millis(values):
    return values.map(lambda value: (value, value * 1000))


def logical(kind, logical_type, **more):
    return {"type": kind, "logicalType": logical_type, **more}


@st.composite
def decimals(draw, names):
    precision = draw(st.integers(1, 40))
    scale = draw(st.integers(0, precision))
    numbers = st.integers(-(10**precision) + 1, 10**precision - 1)
    values = same(numbers.map(lambda n: Decimal((n < 0, tuple(int(d) for d in str(abs(n))), -scale))))
    if draw(st.booleans()):
        return logical("bytes", "decimal", precision=precision, scale=scale), values
    return logical("fixed", "decimal", name=next(names), size=20, precision=precision, scale=scale), values


def primitives(names):
    text = st.text(max_size=8)
    return st.one_of(
        st.sampled_from(
            [
                ("boolean", same(st.booleans())),
                ("int", same(INT)),
                ("long", same(LONG)),
                ("float", same(st.floats(width=32, allow_nan=False))),
                ("double", same(st.floats(allow_nan=False))),
                ("string", same(text)),
                ("bytes", same(st.binary(max_size=20))),
                ("null", same(st.none())),
                (logical("int", "date"), same(st.integers(-719_162, 2_932_896))),
                (logical("int", "time-millis"), millis(st.integers(0, 86_399_999))),
                (logical("long", "time-micros"), same(st.integers(0, DAY_US - 1))),
                (logical("long", "timestamp-millis"), millis(MOMENTS)),
                (logical("long", "timestamp-micros"), same(MOMENTS.map(lambda ms: ms * 1000 + 7))),
                (logical("long", "timestamp-nanos"), same(LONG)),
                (logical("long", "local-timestamp-millis"), millis(MOMENTS)),
                (logical("long", "local-timestamp-micros"), same(MOMENTS)),
                (logical("string", "uuid"), st.uuids().map(lambda u: (u, str(u)))),
            ]
        ),
        decimals(names),
        st.builds(
            lambda size: (
                {"type": "fixed", "name": next(names), "size": size},
                same(st.binary(min_size=size, max_size=size)),
            ),
            st.integers(0, 5),
        ),
        st.builds(
            lambda count: (
                {"type": "enum", "name": next(names), "symbols": [f"S{i}" for i in range(count)]},
                same(st.sampled_from([f"S{i}" for i in range(count)])),
            ),
            st.integers(1, 4),
        ),
    )


@st.composite
def kinds(draw, names, depth=2):
    shape = draw(st.sampled_from(["leaf", "leaf", "array", "map", "record", "optional", "choice"])) if depth else "leaf"
    if shape == "leaf":
        return draw(primitives(names))
    if shape == "record":
        parts = draw(st.lists(kinds(names, depth - 1), max_size=3))
        schema = record(*((f"f{i}", part[0]) for i, part in enumerate(parts)), name=next(names))
        values = st.tuples(*(part[1] for part in parts)).map(
            lambda pairs: tuple({f"f{i}": pair[side] for i, pair in enumerate(pairs)} for side in (0, 1))
        )
        return schema, values
    if shape == "choice":
        return draw(choices(names, depth))
    inner, values = draw(kinds(names, depth - 1))
    if shape == "array":
        return {"type": "array", "items": inner}, st.lists(values, max_size=4).map(
            lambda pairs: tuple([pair[side] for pair in pairs] for side in (0, 1))
        )
    if shape == "map":
        return {"type": "map", "values": inner}, st.dictionaries(st.text(max_size=3), values, max_size=3).map(
            lambda pairs: ({k: v[0] for k, v in pairs.items()}, [(k, v[1]) for k, v in pairs.items()])
        )
    if inner == "null" or isinstance(inner, list):
        return inner, values
    branches = draw(st.permutations(["null", inner]))
    return list(branches), st.one_of(st.just((None, None)), values)


@st.composite
def choices(draw, names, depth):
    """A union of kinds that fastavro tells apart by the value's type."""
    fixed = {"type": "fixed", "name": next(names), "size": 3}
    options = {
        "long": ("long", same(LONG)),
        "string": ("string", same(st.text(max_size=5))),
        "boolean": ("boolean", same(st.booleans())),
        fixed["name"]: (fixed, same(st.binary(min_size=3, max_size=3))),
        "map": (
            {"type": "map", "values": "int"},
            st.dictionaries(st.text(max_size=2), INT, max_size=3).map(lambda found: (found, list(found.items()))),
        ),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(options)), min_size=2, max_size=4, unique=True))
    values = [options[name][1].map(lambda pair, name=name: (pair[0], {name: pair[1]})) for name in chosen]
    schema = [options[name][0] for name in chosen]
    if draw(st.booleans()):
        schema.insert(draw(st.integers(0, len(schema))), "null")
        values.append(st.just((None, None)))
    return schema, st.one_of(values)


@st.composite
def tables(draw, rows=6):
    """A record's schema, and rows as fastavro writes them and as pyarrow takes them."""
    names = iter(f"N{i}" for i in range(1000))
    parts = draw(st.lists(kinds(names), min_size=1, max_size=4))
    schema = record(*((f"c{i}", part[0]) for i, part in enumerate(parts)))
    pairs = draw(st.lists(st.tuples(*(part[1] for part in parts)), max_size=rows))
    return schema, [[{f"c{i}": pair[side] for i, pair in enumerate(row)} for row in pairs] for side in (0, 1)]


@pytest.fixture(params=["in bulk", "one by one"])
def way(request, monkeypatch):
    """Both ways to read an array: records with many items are read one by one once they are few."""
    if request.param == "one by one":
        monkeypatch.setattr(at_scan, "FEW_RECORDS", 1 << 30)
        monkeypatch.setattr(at_scan, "SOME_ITEMS", 0)
    return request.param


@SLOW
@given(table=tables())
def test_rows_that_fastavro_wrote_are_read_and_written_again(way, table):
    schema, (theirs, ours) = table
    payloads = written(schema, theirs)
    avro = format_of(schema)
    decoded = avro.decode(binary(payloads))
    decoded.rows.validate(full=True)
    assert len(decoded.failures) == 0
    assert decoded.positions.tolist() == list(range(len(payloads)))
    assert decoded.rows.schema == avro.columns()
    wanted = pa.array(ours, pa.struct(list(avro.columns())))
    assert decoded.rows.to_struct_array().equals(wanted)
    assert avro.encode(decoded.rows).to_pylist() == payloads


def verdicts(avro, payloads):
    """Each payload's row or rule, by itself."""
    found = []
    for payload in payloads:
        decoded = avro.decode(binary([payload]))
        found.append(decoded.failures.rules[0] if len(decoded.failures) else repr(decoded.rows.to_struct_array()[0]))
    return found


def together(avro, payloads):
    decoded = avro.decode(binary(payloads))
    decoded.rows.validate(full=True)
    assert decoded.rows.num_rows == len(decoded.positions)
    found = dict(zip(decoded.positions.tolist(), map(repr, decoded.rows.to_struct_array()), strict=True))
    found |= dict(zip(decoded.failures.positions.tolist(), decoded.failures.rules, strict=True))
    assert len(decoded.positions) + len(decoded.failures) == len(payloads)
    return [found[each] for each in range(len(payloads))]


@SLOW
@given(tables(rows=3), st.lists(st.binary(max_size=30), max_size=6), st.randoms())
def test_random_bytes_fall_out_alone_and_alike_in_bulk_and_one_by_one(table, junk, random):
    schema, (theirs, _) = table
    payloads = [*written(schema, theirs), *junk]
    random.shuffle(payloads)
    check_alone(schema, payloads)


@SLOW
@given(tables(rows=4), st.data())
def test_payloads_with_a_few_bytes_changed_spoil_no_other(table, data):
    schema, (theirs, _) = table
    payloads = []
    for payload in written(schema, theirs):
        changed = bytearray(payload)
        for _ in range(data.draw(st.integers(0, 2))):
            place = data.draw(st.integers(0, len(changed)))
            how = data.draw(st.sampled_from(["cut", "flip", "insert"]))
            if how == "cut":
                del changed[place:]
            elif how == "insert" or place == len(changed):
                changed.insert(place, data.draw(st.integers(0, 255)))
            else:
                changed[place] ^= 1 << data.draw(st.integers(0, 7))
        payloads.append(bytes(changed))
    check_alone(schema, payloads)


def check_alone(schema, payloads):
    avro = format_of(schema)
    bulk = together(avro, payloads)
    assert bulk == verdicts(avro, payloads)
    few, some = at_scan.FEW_RECORDS, at_scan.SOME_ITEMS
    try:
        at_scan.FEW_RECORDS, at_scan.SOME_ITEMS = 1 << 30, 0
        one_by_one = together(avro, payloads)
    finally:
        at_scan.FEW_RECORDS, at_scan.SOME_ITEMS = few, some
    # A payload that breaks several rules falls out by the first that is looked at.
    assert [x if x.startswith("<") else "" for x in one_by_one] == [x if x.startswith("<") else "" for x in bulk]


BAD = [
    ("int", b"", "avro.truncated"),
    ("int", b"\x80", "avro.truncated"),
    ("long", b"\xff" * 12, "avro.varint"),
    ("int", b"\x80\x80\x80\x80\x80\x80\x01", "avro.range"),
    ("int", b"\x02\x00", "avro.trailing"),
    ("string", b"\x04\xff\xff", "avro.utf8"),
    ("string", b"\x01", "avro.size"),
    ("string", b"\x40abc", "avro.truncated"),
    ("boolean", b"\x02", "avro.boolean"),
    ("double", b"1234567", "avro.truncated"),
    (["null", "int"], b"\x04\x02", "avro.union"),
    (["null", "int", "string"], b"\x01", "avro.union"),
    ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x02", "avro.enum"),
    ({"type": "array", "items": "int"}, b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f", "avro.count"),
    ({"type": "array", "items": "null"}, b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f\x00", "avro.count"),
    ({"type": "array", "items": record(name="Empty")}, b"\x82\x01\x00", "avro.count"),
    ({"type": "array", "items": "int"}, b"\x01\x40\x02\x00", "avro.count"),
    ({"type": "array", "items": "int"}, b"\x02", "avro.count"),
    ({"type": "map", "values": "null"}, b"\x80\x01", "avro.count"),
    (logical("bytes", "decimal", precision=2, scale=0), b"\x02\x64", "avro.decimal"),
    (logical("bytes", "decimal", precision=2, scale=0), b"\x00", "avro.decimal"),
    (logical("int", "time-millis"), b"\x01", "avro.range"),
    (logical("int", "date"), b"\xfe\xff\xff\xff\x0f", "avro.range"),
    (logical("long", "timestamp-millis"), b"\xfe" + b"\xff" * 8 + b"\x01", "avro.range"),
]


@pytest.mark.parametrize(("kind", "payload", "rule"), BAD)
def test_a_wrong_payload_falls_out_with_its_rule(way, kind, payload, rule):
    avro = format_of(record(("f", kind)))
    decoded = avro.decode(binary([payload, None, payload]))
    assert decoded.failures.rules == (rule, rule)
    assert decoded.failures.positions.tolist() == [0, 2]
    assert "f" in decoded.failures.reasons[0] or rule == "avro.trailing"
    assert decoded.rows.to_pylist() == [{"f": None}]


def test_what_is_wrong_with_the_form_counts_before_what_is_wrong_with_a_value(way):
    avro = format_of(record(("f", {"type": "array", "items": "string"})))
    decoded = avro.decode(binary([b"\x04\x02\xff\x02", b"\x02\x02\xff\x00\x00", b"\x02\x02\xff\x00"]))
    assert decoded.failures.rules == ("avro.truncated", "avro.trailing", "avro.utf8")


def test_hostile_counts_cost_neither_memory_nor_time():
    deep = {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": "null"}}}
    avro = format_of(record(("f", deep), ("g", {"type": "array", "items": "string"})))
    many_blocks = b"\x00" + b"\x02\x02a" * 100_000 + b"\x00"
    many_nulls = b"\xfe\x03" * 60_000
    many_items = b"\x00" + b"\xfe\xff\x7f" + b"\x00" * 1_048_575 + b"\x00"
    before, began = pa.total_allocated_bytes(), time.process_time()
    decoded = avro.decode(binary([many_blocks, many_nulls, many_items, b"\x00\x00"]))
    assert decoded.positions.tolist() == [0, 2, 3]
    assert [len(items) for items in decoded.rows.column("g")] == [100_000, 1_048_575, 0]
    assert decoded.failures.rules == ("avro.count",)
    assert pa.total_allocated_bytes() - before < 64 << 20
    assert time.process_time() - began < 30  # a pass per item would take minutes


def test_a_schema_that_is_no_record_has_one_column():
    avro = format_of(["null", "string"])
    rows = avro.decode(binary([b"\x00", b"\x02\x02a"])).rows
    assert rows.to_pylist() == [{"value": None}, {"value": "a"}]
    assert avro.encode(rows).to_pylist() == [b"\x00", b"\x02\x02a"]


def test_nan_duration_and_fixed_uuid_keep_their_values():
    uuid = logical("fixed", "uuid", name="U", size=16)
    schema = record(("d", "double"), ("t", logical("fixed", "duration", name="D", size=12)), ("u", uuid))
    payload = b"\0\0\0\0\0\0\xf8\x7f" + b"\x01\0\0\0\x02\0\0\0\xff\xff\xff\xff" + bytes(range(16))
    avro = format_of(schema)
    rows = avro.decode(binary([payload])).rows
    assert rows.column("t").to_pylist() == [{"months": 1, "days": 2, "millis": 2**32 - 1}]
    assert rows.column("u").to_pylist() == ["00010203-0405-0607-0809-0a0b0c0d0e0f"]
    assert str(rows.column("d")[0]) == "nan"
    assert avro.encode(rows).to_pylist() == [payload]


def test_a_record_without_fields_still_has_rows():
    avro = format_of(record())
    decoded = avro.decode(binary([b"", None, b"x"]))
    assert (decoded.rows.num_rows, decoded.positions.tolist()) == (2, [0, 1])
    assert avro.encode(decoded.rows).to_pylist() == [b"", b""]


def test_a_large_fixed_costs_no_more_than_its_bytes():
    avro = format_of(record(("f", ["null", {"type": "fixed", "name": "F", "size": 100_000}])))
    values = [b"a" * 100_000, None, b"b" * 100_000]
    payloads = [*(b"\x00" if each is None else b"\x02" + each for each in values), b"\x02short"]
    decoded = avro.decode(binary(payloads * 50))
    assert decoded.rows.column("f").to_pylist() == values * 50
    assert decoded.failures.rules == ("avro.truncated",) * 50


def test_decimals_with_more_bytes_than_they_need_keep_their_value():
    avro = format_of(record(("f", logical("bytes", "decimal", precision=5, scale=2))))
    wide = [b"\x00" * 30 + b"\x01\x00", b"\xff" * 31 + b"\x01", b"\x01" + b"\x00" * 31]
    decoded = avro.decode(binary([b"\x40" + each for each in wide]))
    assert decoded.rows.column("f").to_pylist() == [Decimal("2.56"), Decimal("-2.55")]
    assert decoded.failures.rules == ("avro.decimal",)


@pytest.mark.parametrize(
    ("kind", "column", "error"),
    [
        ("int", pa.array(["x"]), SchemaError),
        ("int", pa.array([1 << 40]), DataError),
        ("int", pa.array([None], pa.int32()), DataError),
        ("string", pa.array([1]), SchemaError),
        ("boolean", pa.array([1]), SchemaError),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, pa.array(["B"]), DataError),
        ({"type": "fixed", "name": "F", "size": 2}, pa.array([b"x"]), DataError),
        (logical("long", "timestamp-micros"), pa.array([1]), SchemaError),
        (logical("bytes", "decimal", precision=3, scale=1), pa.array([Decimal("1.25")]), DataError),
        ({"type": "array", "items": "int"}, pa.array([1]), SchemaError),
        (["int", "string"], pa.array([{"int": 1, "string": "x"}]), DataError),
    ],
)
def test_a_column_that_the_schema_cannot_hold_is_refused(kind, column, error):
    with pytest.raises(error, match="f"):
        format_of(record(("f", kind))).encode(pa.record_batch({"f": column}))


def test_columns_without_a_field_are_refused_and_missing_ones_are_null_if_they_may_be():
    avro = format_of(record(("a", ["null", "int"]), ("b", "int")))
    assert avro.encode(pa.record_batch({"b": pa.array([1], pa.int64())})).to_pylist() == [b"\x00\x02"]
    with pytest.raises(SchemaError, match="no field c"):
        avro.encode(pa.record_batch({"b": pa.array([1]), "c": pa.array([1])}))
    with pytest.raises(SchemaError, match="no column b"):
        avro.encode(pa.record_batch({"a": pa.array([1])}))


def test_slices_and_dictionaries_are_encoded_like_the_values_they_show():
    avro = format_of(record(("a", ["null", "string"]), ("b", {"type": "array", "items": "long"})))
    whole = pa.record_batch(
        {
            "a": pa.array(["x", None, "yy", None]).dictionary_encode(),
            "b": pa.array([[1], [], [2, 3], [4]], pa.list_(pa.int64())),
        }
    )
    assert avro.encode(whole.slice(1, 2)).to_pylist() == avro.encode(whole).to_pylist()[1:3]
    assert avro.encode(whole.slice(0, 0)).to_pylist() == []


def test_confluents_frame_needs_an_id_to_write():
    with pytest.raises(ConfigError, match="registry"):
        format_of(record(("a", "int")), "confluent").encode(pa.record_batch({"a": [1]}))
    framed = format_of(record(("a", "int")), "confluent", id=7).encode(pa.record_batch({"a": [1]}))
    assert framed.to_pylist() == [b"\0\0\0\0\x07\x02"]


def test_a_format_travels_to_tasks():
    avro = pickle.loads(pickle.dumps(format_of(record(("a", "int")))))
    assert avro.decode(binary([b"\x02"])).rows.to_pylist() == [{"a": 1}]


def test_many_pieces_are_one_batch():
    avro = format_of(record(("a", "long"), ("s", "string")))
    rows = pa.record_batch({"a": pa.array(range(100_000)), "s": pa.array([str(i) for i in range(100_000)])})
    payloads = avro.encode(rows)
    assert avro.decode(payloads.slice(5)).rows.equals(rows.slice(5))
    assert avro.decode(payloads.cast(pa.large_binary())).rows.equals(rows)
