from __future__ import annotations

import datetime
import itertools
import json
import pickle
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import SchemaError
from penstock.formats import Decoded, json_parse
from penstock.formats import json as module
from penstock.formats.inference import Misfit, combine, fields_of, fit, merge, schema_of, widen
from penstock.formats.json import Json, JsonConfig
from penstock.formats.json_parse import value

FORMAT = Json(JsonConfig())


def decode(payloads: list[bytes | None], known: pa.Schema | None = None, **options: Any) -> Decoded:
    return Json(JsonConfig(**options)).decode(pa.array(payloads, pa.binary()), known)


def rules(decoded: Decoded) -> dict[int, str]:
    return dict(zip(decoded.failures.positions.tolist(), decoded.failures.rules, strict=True))


def check_laws(payloads: list[bytes | None], decoded: Decoded) -> None:
    positions = decoded.positions.tolist()
    failed = decoded.failures.positions.tolist()
    assert decoded.rows.num_rows == len(positions)
    assert sorted([*positions, *failed]) == list(range(len(payloads)))
    assert positions == sorted(positions)
    assert failed == sorted(failed)
    assert len(decoded.failures.rules) == len(decoded.failures.reasons) == len(failed)
    decoded.rows.validate(full=True)


# -- the rows --------------------------------------------------------------------------------------------------------


class TestRows:
    def test_members_are_columns_objects_structs_and_arrays_lists(self):
        decoded = decode([b'{"id": 1, "to": {"city": "Bern", "zip": 3000}, "tags": ["a", "b"], "paid": true}'])
        assert decoded.rows.schema == pa.schema(
            [
                ("id", pa.int64()),
                ("paid", pa.bool_()),
                ("tags", pa.list_(pa.string())),
                ("to", pa.struct([("city", pa.string()), ("zip", pa.int64())])),
            ]
        )
        assert decoded.rows.to_pylist() == [
            {"id": 1, "paid": True, "tags": ["a", "b"], "to": {"city": "Bern", "zip": 3000}}
        ]

    def test_text_that_looks_like_a_time_stays_text(self):
        rows = [b'{"at": "2026-01-01", "in": {"at": "2026-01-01T00:00:00Z"}, "all": ["2026-01-01"]}'] * 3
        for payloads in (rows, [*rows, b'{"at": "soon"}'], rows * 100):
            for each in decode(payloads).rows.schema.types:
                assert "timestamp" not in str(each)
        assert decode(rows).rows.column("at").to_pylist() == ["2026-01-01"] * 3

    def test_known_columns_come_first_and_new_ones_by_name(self):
        known = pa.schema([("z", pa.int64()), ("in", pa.struct([("y", pa.int64())]))])
        decoded = decode([b'{"b": 1, "a": 2, "in": {"x": 1}}'], known)
        assert decoded.rows.schema.names == ["z", "in", "a", "b"]
        assert decoded.rows.schema.field("in").type == pa.struct([("y", pa.int64()), ("x", pa.int64())])

    def test_known_columns_are_there_without_any_payload(self):
        known = pa.schema([("z", pa.int64())])
        assert decode([], known).rows.schema == known
        assert decode([b"x", None], known).rows.to_pylist() == [{"z": None}]

    def test_whole_numbers_widen_to_double(self):
        decoded = decode([b'{"x": 1}', b'{"x": 2.5}', b'{"x": 3}'], pa.schema([("x", pa.int64())]))
        assert decoded.rows.to_pylist() == [{"x": 1.0}, {"x": 2.5}, {"x": 3.0}]
        assert decode([b'{"x": 1}'], decoded.rows.schema).rows.schema == decoded.rows.schema

    def test_a_column_of_nulls_takes_any_type_later(self):
        decoded = decode([b'{"x": null, "l": []}', b'{"x": null}'])
        assert decoded.rows.schema == pa.schema([("l", pa.list_(pa.null())), ("x", pa.null())])
        later = decode([b'{"x": {"y": 1}, "l": ["a"]}', b'{"l": 1}'], decoded.rows.schema)
        assert later.rows.schema == pa.schema([("l", pa.list_(pa.string())), ("x", pa.struct([("y", pa.int64())]))])
        assert rules(later) == {1: "json.type"}

    def test_the_first_value_of_a_new_column_decides_its_kind(self):
        decoded = decode([b'{"x": 1}', b'{"x": "a"}', b'{"x": 2}', b'{"x": {"y": 1}}'])
        assert decoded.rows.to_pylist() == [{"x": 1}, {"x": 2}]
        assert rules(decoded) == {1: "json.type", 3: "json.type"}
        assert decoded.failures.reasons[0] == "/x is int64 in other rows and string here"

    def test_a_row_that_fails_adds_no_columns(self):
        decoded = decode([b'{"x": 1}', b'{"new": 1, "x": "a"}'])
        assert decoded.rows.schema.names == ["x"]

    def test_known_columns_that_cannot_be_inferred_are_refused(self):
        with pytest.raises(SchemaError, match="PEN-4000 the column 'at' is date32"):
            decode([b"{}"], pa.schema([("at", pa.date32())]))

    def test_a_format_travels(self):
        assert pickle.loads(pickle.dumps(FORMAT)).options == FORMAT.options

    @pytest.mark.parametrize("kind", [pa.large_binary(), pa.binary_view(), pa.string()])
    def test_payloads_of_any_binary_type_are_read(self, kind):
        payloads = pa.array([b'{"x": 1}', None, b'{"x": 2}'], pa.binary()).cast(kind)
        assert FORMAT.decode(payloads.slice(1)).rows.to_pylist() == [{"x": None}, {"x": 2}]


# -- odd payloads ----------------------------------------------------------------------------------------------------

GOOD = b'{"x": 1}'
ODD: list[tuple[str, bytes | None, str | dict[str, Any]]] = [
    ("tombstone", None, {"x": None}),
    ("empty object", b"{}", {"x": None}),
    ("empty payload", b"", "json.empty"),
    ("white space only", b" \n", "json.empty"),
    ("white space around", b' \r\n\t{"x": 2}\n', {"x": 2}),
    ("byte order mark", b'\xef\xbb\xbf{"x": 2}', {"x": 2}),
    ("pretty-printed", b'{\n  "x":\n  2\n}', {"x": 2}),
    ("two objects", b'{"x": 2}{"x": 3}', "json.syntax"),
    ("two lines", b'{"x": 2}\n{"x": 3}', "json.syntax"),
    ("trailing bytes", b'{"x": 2} x', "json.syntax"),
    ("trailing NUL", b'{"x": 2}\x00', "json.syntax"),
    ("NUL within", b'{"x": 2}\x00{"x": 3}', "json.syntax"),
    ("trailing comma", b'{"x": 2,}', "json.syntax"),
    ("comment", b'{"x": 2 /* two */}', "json.syntax"),
    ("single quotes", b"{'x': 2}", "json.syntax"),
    ("cut short", b'{"x": {"y": 2}', "json.syntax"),
    ("leading zero", b'{"x": 02}', "json.syntax"),
    ("array", b'[{"x": 2}]', "json.not_object"),
    ("string", b'"{}"', "json.not_object"),
    ("number", b"2", "json.not_object"),
    ("null", b"null", "json.not_object"),
    ("UTF-8 broken", b'{"x": 2, "s": "\xff"}', "json.encoding"),
    ("UTF-16", '{"x": 2}'.encode("utf-16"), "json.encoding"),
    ("half a surrogate pair", b'{"x": 2, "s": "\\ud800"}', "json.syntax"),
    ("duplicate key", b'{"x": 2, "x": 3}', "json.duplicate_key"),
    ("duplicate key within", b'{"x": 2, "y": {"a": 1, "a": 2}}', "json.duplicate_key"),
    ("whole number of 64 bits", b'{"x": 9223372036854775807}', {"x": 9223372036854775807}),
    ("whole number beyond", b'{"x": 9223372036854775808}', "json.number"),
    ("number of 5,000 digits", b'{"x": %s}' % (b"9" * 5000), "json.number"),
    ("NaN", b'{"x": NaN}', "json.number"),
    ("NaN in a new column", b'{"y": [NaN]}', "json.number"),
    ("Infinity", b'{"x": -Infinity}', "json.number"),
    ("beyond double", b'{"x": 1e400}', "json.number"),
    ("text for a number", b'{"x": "2"}', "json.type"),
    ("42 levels", b'{"y":' * 42 + b"1" + b"}" * 42, "good"),
    ("43 levels", b'{"y":' * 43 + b"1" + b"}" * 43, "json.depth"),
    ("43 levels of arrays", b'{"y":' + b"[" * 42 + b"]" * 42 + b"}", "json.depth"),
    ("100,000 levels", b'{"y":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "json.depth"),
    ("brackets in text", b'{"s": "%s"}' % (b"[" * 1000), "good"),
    ("300 objects in an array", b'{"y": [%s]}' % b",".join([b'{"z": 1}'] * 300), "good"),
]


@pytest.mark.parametrize(("payload", "result"), [each[1:] for each in ODD], ids=[each[0] for each in ODD])
def test_an_odd_payload_has_its_result_and_spoils_no_other(payload, result):
    known = pa.schema([("x", pa.int64())])
    payloads = [GOOD, payload, GOOD]
    decoded = decode(payloads, known)
    check_laws(payloads, decoded)
    if isinstance(result, dict):
        assert decoded.rows.to_pylist() == [{"x": 1}, result, {"x": 1}]
    elif result == "good":
        assert len(decoded.failures) == 0
    else:
        assert rules(decoded) == {1: result}
        assert decoded.rows.to_pylist() == [{"x": 1}, {"x": 1}]


def test_an_empty_payload_and_two_objects_in_one_do_not_shift_rows():
    decoded = decode([b'{"x": 1}', b"", b'{"x": 2}{"x": 3}', b'{"x": 4}'])
    assert decoded.rows.to_pylist() == [{"x": 1}, {"x": 4}]
    assert rules(decoded) == {1: "json.empty", 2: "json.syntax"}


def test_an_exponent_makes_a_double():
    assert decode([b'{"x": 1e3}']).rows.to_pylist() == [{"x": 1000.0}]


def test_a_whole_number_beyond_64_bits_fits_a_column_of_doubles():
    decoded = decode([b'{"x": 1.5}', b'{"x": 18446744073709551616}'])
    assert decoded.rows.to_pylist() == [{"x": 1.5}, {"x": 2.0**64}]
    assert rules(decode([b'{"x": 18446744073709551616}', b'{"x": 1.5}'])) == {0: "json.number"}


def test_ten_thousand_keys_are_ten_thousand_columns_and_one_more_is_a_failure():
    wide = {f"k{at}": at for at in range(10_000)}
    decoded = decode([json.dumps(wide).encode(), b'{"one": "more"}', b'{"k7": 1}'])
    assert decoded.rows.num_columns == 10_000
    assert decoded.rows.slice(0, 1).to_pylist() == [wide]
    assert rules(decoded) == {1: "json.columns"}


def test_payloads_with_a_name_of_their_own_each_do_not_fill_the_memory(monkeypatch):
    cells = []

    def read(bodies: pa.Array, *arguments: Any) -> pa.RecordBatch:
        batch = json_parse.read(bodies, *arguments)
        cells.append(batch.num_rows * batch.num_columns)
        return batch

    monkeypatch.setattr(module, "read", read)
    decoded = decode([b'{"k%d": 1}' % at for at in range(3000)], max_columns=100)
    assert decoded.rows.num_columns == 100
    assert len(decoded.failures) == 2900
    assert max(cells) <= 512 * (512 + 100)


def test_reasons_name_fields_and_types_and_no_values():
    secret = "s3cret"
    payloads = [b'{"x": "s3cret"}', b'{"x": s3cret}', b"s3cret", b'["s3cret"]', b'{"s": "s3cret', b'{"y": {"y": NaN}}']
    decoded = decode(payloads, pa.schema([("x", pa.int64())]))
    assert len(decoded.failures) == 6
    assert not any(secret in reason for reason in decoded.failures.reasons)


def test_bad_payloads_among_many_are_found_wherever_they_are():
    payloads = [b'{"id": %d, "s": "2026-01-01", "n": {"id": "a"}}' % at for at in range(5000)]
    bad = {7: b"", 2000: b'{"id": "x"}', 3001: b'{"id": 1, "s": "a}', 3002: b'{"id": 1 2}', 4999: b'{"n": {"id": 5}}'}
    for at, payload in bad.items():
        payloads[at] = payload
    for known in (None, decode(payloads[:1]).rows.schema):
        decoded = decode(payloads, known)
        assert sorted(rules(decoded)) == sorted(bad)
        assert decoded.rows.column("id").to_pylist() == [at for at in range(5000) if at not in bad]


# -- the law: as if read one by one ----------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=5)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 65), 1 << 65),
    st.floats(allow_nan=True, allow_infinity=True),
    texts,
    st.just("2026-01-01T00:00:00Z"),
)
names = st.sampled_from(["a", "b", "c", "ä", "", "a b", 'q"', "\x00"])
values = st.recursive(
    scalars, lambda each: st.one_of(st.lists(each, max_size=3), st.dictionaries(names, each, max_size=3)), max_leaves=8
)
objects = st.dictionaries(names, values, max_size=4)
dumped = st.builds(lambda each, spread: json.dumps(each, indent=spread).encode(), objects, st.sampled_from([None, 1]))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    payload = bytearray(draw(dumped))
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, max(0, len(payload) - 1)))
        change = draw(st.sampled_from(["drop", "double", "byte", "cut"]))
        if change == "drop":
            del payload[at : at + 1]
        elif change == "double":
            payload[at:at] = payload[at : at + 3]
        elif change == "byte":
            payload[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        else:
            del payload[at:]
    return bytes(payload)


payload_lists = st.lists(
    st.one_of(dumped, dumped, dumped, mutated(), st.binary(max_size=8), st.none(), st.sampled_from([b"{}", b"{}{}"])),
    max_size=12,
)


def one_by_one(payloads: list[bytes | None], known: pa.Schema | None) -> tuple[pa.Schema, list[Any], dict[int, str]]:
    fields = fields_of(known) if known is not None else {}
    good: list[Any] = []
    failed: dict[int, str] = {}
    for at, payload in enumerate(payloads):
        if payload is None:
            good.append({})
            continue
        body = payload.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r\n")
        try:
            if not body:
                raise Misfit("json.empty", "")
            row = value(body)
            fields = widen(fields, row, max_depth=42)
            good.append(row)
        except Misfit as misfit:
            failed[at] = misfit.rule
    return schema_of(fields, known), good, failed


def shaped(found: Any, kind: pa.DataType) -> Any:
    if found is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: shaped(found.get(field.name), field.type) for field in kind}
    if pa.types.is_list(kind):
        return [shaped(each, kind.value_type) for each in found]
    return float(found) if pa.types.is_floating(kind) else found


@settings(max_examples=80, deadline=None)
@given(payload_lists, payload_lists, st.sampled_from([1, 2, 512]))
@example([b'{"a": 1}', b'{"a": 1.5}'], [b'{"a": 18446744073709551616}'], 1)
@example(
    [],
    [b'{"a": [{"b": null}, {}, {}], "c": [null, 1]}', b'{"a": [null, null]}', b'{"d": {"b": null}}', b'{"d": {}}'],
    1,
)
@example([], [b'{"": {"": []}}', b'{"": {"": [[]]}}', b'{"": {"": [1]}}'], 2)
def test_reading_at_once_is_reading_one_by_one(before, payloads, few_rows):
    known = decode(before).rows.schema if before else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FEW_ROWS", few_rows)
        decoded = decode(payloads, known)
    check_laws(payloads, decoded)
    schema, good, failed = one_by_one(payloads, known)
    assert decoded.rows.schema == schema
    found = rules(decoded)
    assert {at: each for at, each in found.items() if each != "json.encoding"} == {
        at: each for at, each in failed.items() if found.get(at) != "json.encoding"
    }
    assert decoded.rows.to_pylist() == [{f.name: shaped(row.get(f.name), f.type) for f in schema} for row in good]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.none(), st.binary(max_size=30)), max_size=20))
def test_random_bytes_are_rows_or_failures(payloads):
    check_laws(payloads, decode(payloads))


@settings(max_examples=40, deadline=None)
@given(payload_lists, payload_lists)
def test_two_batches_one_after_the_other_are_as_one(first, second):
    whole = decode([*first, *second])
    one = decode(first)
    two = decode(second, one.rows.schema)
    assert fields_of(two.rows.schema) == fields_of(whole.rows.schema)
    assert rules(whole) == rules(one) | {at + len(first): rule for at, rule in rules(two).items()}


# -- what tasks found ------------------------------------------------------------------------------------------------

kinds = st.recursive(
    st.sampled_from([None, "bool", "int64", "double", "string"]),
    lambda each: st.one_of(st.lists(each, min_size=1, max_size=1), st.dictionaries(names, each, max_size=3)),
    max_leaves=6,
)
schemas = st.dictionaries(names, kinds, max_size=3).map(schema_of)


class TestMerge:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(schemas, min_size=1, max_size=3))
    def test_neither_order_nor_grouping_counts(self, found):
        whole = merge(found)
        for order in itertools.permutations(found):
            assert merge(order) == whole
            for cut in range(1, len(order)):
                assert merge([merge(order[:cut]), merge(order[cut:])]) == whole
        assert merge([whole, *found]) == whole

    @settings(max_examples=40, deadline=None)
    @given(payload_lists, payload_lists, payload_lists)
    def test_what_two_tasks_found_fits_together(self, before, first, second):
        known = decode(before).rows.schema
        tasks = [decode(payloads, known) for payloads in (first, second)]
        merged = merge((each.rows.schema for each in tasks), known)
        assert merged.names[: len(known)] == known.names
        for task in tasks:
            try:
                combine(fields_of(merged), fields_of(task.rows.schema))
            except Misfit:
                continue  # the kind of the other task won
            fitted = fit(task.rows, merged)
            fitted.validate(full=True)
            rows = [{f.name: shaped(row.get(f.name), f.type) for f in merged} for row in task.rows.to_pylist()]
            assert fitted.to_pylist() == rows

    def test_rows_of_the_kind_that_lost_are_refused_and_fail_when_they_are_decoded_again(self):
        first, second = [b'{"x": 1}'], [b'{"x": "a"}']
        merged = merge([decode(first).rows.schema, decode(second).rows.schema])
        assert merged == pa.schema([("x", pa.string())])
        with pytest.raises(SchemaError, match="PEN-4000 the column /x is int64 in these rows and string"):
            fit(decode(first).rows, merged)
        assert rules(decode(first, merged)) == {0: "json.type"}

    def test_rows_of_a_slice_fit(self):
        rows = decode([b'{"l": [1]}', b'{"l": [2, 3], "s": {"x": 1}}', b'{"l": null}', b'{"l": []}']).rows.slice(1)
        wanted = merge([rows.schema, decode([b'{"l": [0.5], "s": {"w": "a", "x": 0.5}}']).rows.schema])
        assert fit(rows, wanted).to_pylist() == [
            {"l": [2.0, 3.0], "s": {"w": None, "x": 1.0}},
            {"l": None, "s": None},
            {"l": [], "s": None},
        ]


# -- the way back ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(payload_lists)
@example([b'{"a": [{"b": null}, {}, {}]}'])
def test_what_was_decoded_is_encoded_and_decoded_to_the_same(payloads):
    rows = decode(payloads).rows
    again = FORMAT.decode(FORMAT.encode(rows), rows.schema)
    assert len(again.failures) == 0
    assert again.rows.schema == rows.schema
    assert again.rows.to_pylist() == rows.to_pylist()


def test_types_that_json_lacks_are_written_as_text():
    rows = pa.record_batch(
        {
            "at": pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5)], pa.timestamp("us", "UTC")),
            "price": pa.array([Decimal("1.10")]),
            "raw": pa.array([b"\x00\xff"]),
            "nan": pa.array([float("nan")]),
        }
    )
    (payload,) = FORMAT.encode(rows).to_pylist()
    assert json.loads(payload) == {"at": "2026-01-02T03:04:05.000000Z", "price": "1.10", "raw": "AP8=", "nan": "NaN"}


def test_rows_without_columns_are_empty_objects():
    assert FORMAT.encode(decode([b"{}", b"{}"]).rows).to_pylist() == [b"{}", b"{}"]
