from __future__ import annotations

import datetime
import json
import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.formats import Decoded, WireSchema, framing
from penstock.formats import json_schema as module
from penstock.formats.json_schema import JsonSchema, JsonSchemaConfig
from penstock.formats.json_schema_bulk import check_of

ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "price": {"type": "number"},
        "at": {"type": "string", "format": "date-time"},
        "day": {"type": ["string", "null"], "format": "date"},
        "to": {"$ref": "#/$defs/address"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["id"],
    "$defs": {
        "address": {"type": "object", "properties": {"zip": {"type": "integer"}}, "required": ["zip"]},
    },
}


def made(schema: Any, references: tuple[tuple[str, Any], ...] = (), id: int = 0, **options: Any) -> JsonSchema:
    others = tuple((name, WireSchema("json_schema", json.dumps(each))) for name, each in references)
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return JsonSchema(JsonSchemaConfig(**options), WireSchema("json_schema", text, id=id, references=others))


def column(schema: Any, **more: Any) -> JsonSchema:
    return made({"type": "object", "properties": {"x": schema}, **more})


def decode(format: JsonSchema, payloads: list[bytes | None]) -> Decoded:
    decoded = format.decode(pa.array(payloads, pa.binary()))
    positions, failed = decoded.positions.tolist(), decoded.failures.positions.tolist()
    assert sorted([*positions, *failed]) == list(range(len(payloads)))
    assert decoded.rows.num_rows == len(positions)
    assert decoded.rows.schema == format.columns()
    decoded.rows.validate(full=True)
    return decoded


def rules(decoded: Decoded) -> dict[int, str]:
    return dict(zip(decoded.failures.positions.tolist(), decoded.failures.rules, strict=True))


TEXT, WHOLE, REAL = pa.string(), pa.int64(), pa.float64()
TREE = {"type": "object", "properties": {"left": {"$ref": "#/properties/x"}, "size": {"type": "integer"}}}


class TestTypes:
    @pytest.mark.parametrize(
        ("schema", "kind"),
        [
            ({"type": "boolean"}, pa.bool_()),
            ({"type": "integer"}, WHOLE),
            ({"type": "number"}, REAL),
            ({"type": "string"}, TEXT),
            ({"type": "null"}, pa.null()),
            ({"type": "string", "format": "date-time"}, pa.timestamp("us", "UTC")),
            ({"type": "string", "format": "date"}, pa.date32()),
            ({"type": "string", "format": "time"}, TEXT),
            ({"type": "string", "format": "uuid"}, TEXT),
            ({"type": ["integer", "null"]}, WHOLE),
            ({"type": ["integer", "number"]}, REAL),
            ({"type": ["integer", "string"]}, TEXT),
            ({"enum": ["a", "b", None]}, TEXT),
            ({"enum": [1, 2.5]}, REAL),
            ({"const": 1}, WHOLE),
            ({"type": "array", "items": {"type": "integer"}}, pa.list_(WHOLE)),
            ({"type": "array"}, pa.list_(TEXT)),
            ({"type": "array", "prefixItems": [{"type": "integer"}]}, TEXT),
            ({"type": "object"}, TEXT),
            ({}, TEXT),
            (True, TEXT),
            ({"type": "object", "additionalProperties": {"type": "integer"}}, pa.map_(TEXT, WHOLE)),
            ({"type": "object", "properties": {"y": {"type": "integer"}}}, pa.struct([("y", WHOLE)])),
            ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, WHOLE),
            ({"anyOf": [{"type": "number"}, {"type": "integer"}]}, REAL),
            ({"anyOf": [{"type": "number"}, {"type": "string"}]}, TEXT),
            ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, WHOLE),
            (
                {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "string"}}}]},
                pa.struct([("a", WHOLE), ("b", TEXT)]),
            ),
            (TREE, pa.struct([("left", pa.struct([("left", TEXT), ("size", WHOLE)])), ("size", WHOLE)])),
        ],
        ids=str,
    )
    def test_a_property_has_its_type(self, schema, kind):
        assert column(schema).columns() == pa.schema([("x", kind)])

    def test_another_schema_is_found_by_its_name(self):
        format = made(
            {"type": "object", "properties": {"to": {"$ref": "address.json#/$defs/a"}}},
            references=(("address.json", {"$defs": {"a": {"properties": {"zip": {"type": "integer"}}}}}),),
        )
        assert format.columns() == pa.schema([("to", pa.struct([("zip", WHOLE)]))])
        assert rules(decode(format, [b'{"to": {"zip": "x"}}'])) == {0: "json_schema.type"}

    @pytest.mark.parametrize("reference", ["#/$defs/none", "other.json", "http://127.0.0.1:1/x.json", "#anchor"])
    def test_what_cannot_be_found_is_refused_and_nothing_is_fetched(self, reference):
        with pytest.raises(SchemaError, match=r"PEN-4000 the JSON Schema refers to .* cannot be found"):
            column({"$ref": reference})

    @pytest.mark.parametrize("schema", ["{", '{"type": "array"}', '{"type": "object"}', "true"])
    def test_a_schema_without_columns_is_refused(self, schema):
        with pytest.raises(SchemaError, match="PEN-4000 the JSON Schema"):
            made(schema)

    def test_a_schema_that_is_none_is_refused(self):
        with pytest.raises(SchemaError, match="PEN-4000 the JSON Schema cannot be used"):
            made({"type": "object", "properties": {"x": {"type": "integer", "minimum": "a"}}})

    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "object", "properties": [1]},
            {"type": {"a": 1}, "properties": {"x": {}}},
            {"type": "object", "properties": {"x": {"type": ["integer", 5]}}},
            {"type": "object", "properties": {"x": {}}, "required": 5},
            {"type": "object", "properties": {"x": {"enum": 5}}},
            {"type": "object", "properties": {"x": {"type": "string", "format": []}}},
            {"type": "object", "properties": {"x": {"$ref": "#/more/y"}}, "more": {"y": {"properties": 5}}},
        ],
        ids=str,
    )
    def test_a_schema_whose_keywords_hold_anything_is_refused(self, schema):
        with pytest.raises(SchemaError, match="PEN-4000 the JSON Schema "):
            made(schema)

    def test_a_schema_that_grows_beyond_bounds_when_written_out_is_refused(self):
        kinds = {f"d{n}": {"properties": {name: {"$ref": f"#/$defs/d{n + 1}"} for name in "ab"}} for n in range(30)}
        schema = {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": {**kinds, "d30": {"type": "integer"}}}
        with pytest.raises(SchemaError, match="PEN-4000 the JSON Schema has more than 20,000 fields"):
            made(schema)

    def test_a_schema_that_is_nested_too_deeply_is_refused(self):
        text = '{"properties": {"x":' * 400 + "{}" + "}}" * 400
        with pytest.raises(SchemaError, match="PEN-4000 the JSON Schema"):
            made(text)

    def test_a_schema_is_needed(self):
        with pytest.raises(ConfigError, match="PEN-1004 the format json_schema needs a schema"):
            JsonSchema(JsonSchemaConfig())


class TestRows:
    def test_valid_payloads_are_typed_rows(self):
        payload = (
            b'{"id": 1, "price": 2, "at": "2026-01-02T03:04:05+01:00", "day": "2026-01-02", '
            b'"to": {"zip": 8000}, "tags": ["a"], "more": [1]}'
        )
        decoded = decode(made(ORDER), [payload, b'{"id": 2}', None])
        nothing = dict.fromkeys(ORDER["properties"])
        assert decoded.rows.to_pylist() == [
            {
                "id": 1,
                "price": 2.0,
                "at": datetime.datetime(2026, 1, 2, 2, 4, 5, tzinfo=datetime.UTC),
                "day": datetime.date(2026, 1, 2),
                "to": {"zip": 8000},
                "tags": ["a"],
            },
            {**nothing, "id": 2},
            nothing,
        ]

    @pytest.mark.parametrize(
        ("payload", "rule", "reason"),
        [
            (b"{}", "json_schema.required", "the object lacks the required property 'id'"),
            (b'{"id": 1, "to": {}}', "json_schema.required", "/to lacks the required property 'zip'"),
            (b'{"id": "x"}', "json_schema.type", "/id is a string, not an integer"),
            (b'{"id": 1, "tags": ["a", 1]}', "json_schema.type", "/tags/1 is an integer, not a string"),
            (b'{"id": 1, "at": "soon"}', "json_schema.format", "/at is not of the format 'date-time'"),
            (b'{"id": 1.5}', "json_schema.type", "/id is a number, not an integer"),
            (b'{"id": 1, "price": null}', "json_schema.type", "/price is null, not a number"),
            (b'{"id": 9223372036854775808}', "json_schema.type", "/id has no place in a column of int64"),
            (b'{"id": 1, "at": "2016-12-31T23:59:60Z"}', "json_schema.type", "/at has no place in a column of "),
            (b'{"id": 1, "at": "0001-01-01T00:00:00+00:01"}', "json_schema.type", "/at has no place in a column of "),
            (b'{"id": 1, "at": "9999-12-31T23:59:59-00:01"}', "json_schema.type", "/at has no place in a column of "),
            (b'{"id": 1, "day": "0000-12-31"}', "json_schema.type", "/day has no place in a column of "),
            (b'{"id": 1, "id": 2}', "json.duplicate_key", "an object in it has two members of one name"),
            (b'{"id": NaN}', "json.number", "NaN is no JSON number"),
            (b'{"id": 1, "more": NaN}', "json.number", "NaN is no JSON number"),
            (b'{"id": 1e400}', "json.number", "it holds a number beyond the range of double"),
            (b'{"id": 1, "more": [-%s]}' % (b"9" * 400), "json.number", "it holds a number beyond the range of double"),
            (b'{"id": 1', "json.syntax", "it is not JSON from byte 8 on"),
            ('{"größe": "1'.encode(), "json.syntax", "it is not JSON from byte 12 on: Unterminated string"),
            (b"", "json.empty", "it is empty"),
            (b"[]", "json.not_object", "it is a JSON array, not an object"),
            (b'{"id": 1, "more": "\xff"}', "json.encoding", "it is not UTF-8"),
            (b'{"id": 1, "more": %s}' % (b"[" * 5000 + b"]" * 5000), "json.depth", "it is nested too deep"),
        ],
    )
    def test_a_bad_payload_names_the_rule_and_the_place(self, payload, rule, reason):
        decoded = decode(made(ORDER), [b'{"id": 1}', payload, b'{"id": 3}'])
        assert rules(decoded) == {1: rule}
        assert decoded.failures.reasons[0].startswith(reason)
        assert decoded.rows.column("id").to_pylist() == [1, 3]

    @pytest.mark.parametrize(
        ("payload", "name", "found"),
        [
            (b'{"id": 7.0}', "id", 7),
            (b'{"id": 1, "at": "2026-01-01T00:00:00.123456789Z"}', "at", 123456),
            (b'{"id": 1, "at": "2026-01-01t00:00:00z"}', "at", 0),
        ],
    )
    def test_values_that_are_written_in_a_rare_way_are_read(self, payload, name, found):
        (row,) = decode(made(ORDER), [b'{"id": 1}', payload]).rows.slice(1).to_pylist()
        assert (row[name].microsecond if name == "at" else row[name]) == found

    @pytest.mark.parametrize(
        "text",
        [
            "0.1234567890123456789",
            "[9007199254740993.5]",
            "12345678901234567890123.10",
            "1.10",
            '{"a":[1E5,"1.50"]}',
            "[1.0e+2,2]",
        ],
    )
    def test_numbers_in_json_text_are_as_they_came(self, text):
        numbers = {"type": "object", "additionalProperties": {"type": "number"}}
        schema = {"type": "object", "properties": {"x": {}, "m": numbers}}
        decoded = decode(made(schema), [b'{"x": %s, "m": {"a": 1.5}}' % text.encode(), b'{"x": "1.0"}'])
        assert decoded.rows.column("x").to_pylist() == [text, '"1.0"']
        assert decoded.rows.column("m").to_pylist() == [[("a", 1.5)], None]

    def test_what_the_schema_leaves_open_is_json_text(self):
        decoded = decode(column(True), [b'{"x": {"a": [1, 123456789012345678901234567890]}}', b'{"x": "a"}', b"{}"])
        assert decoded.rows.to_pylist() == [
            {"x": '{"a":[1,123456789012345678901234567890]}'},
            {"x": '"a"'},
            {"x": None},
        ]

    def test_keys_that_the_schema_leaves_open_are_a_map(self):
        format = column({"type": "object", "additionalProperties": {"type": "integer"}})
        decoded = decode(
            format, [b'{"x": {"a": 1, "b": 2}}', b'{"x": {"a": "b"}}', b'{"x": {"a": 9223372036854775808}}']
        )
        assert decoded.rows.to_pylist() == [{"x": [("a", 1), ("b", 2)]}]
        assert rules(decoded) == {1: "json_schema.type", 2: "json_schema.type"}

    def test_members_that_the_schema_forbids_are_failures(self):
        format = column({"type": "integer"}, additionalProperties=False)
        assert rules(decode(format, [b'{"y": 1}'])) == {0: "json_schema.additionalProperties"}

    def test_reasons_hold_no_values(self):
        payloads = [b'{"id": "s3cret"}', b'{"id": 1, "day": "s3cret"}', b'{"id": 1, "to": "s3cret"}', b"s3cret"]
        decoded = decode(made(ORDER), payloads)
        assert len(decoded.failures) == 4
        assert not any("s3cret" in reason for reason in decoded.failures.reasons)

    @pytest.mark.parametrize(
        ("schema", "value", "rule", "reason"),
        [
            ({"type": ["string", "null"]}, [1], "type", "/x is an array, not null or a string"),
            ({"type": "number", "minimum": 3}, 1, "minimum", "/x is below the minimum 3"),
            ({"type": "number", "maximum": 0.5}, 1, "maximum", "/x is above the maximum 0.5"),
            ({"type": "number", "exclusiveMinimum": 3}, 3, "exclusiveMinimum", "/x is not above 3"),
            ({"type": "number", "exclusiveMaximum": 3}, 3, "exclusiveMaximum", "/x is not below 3"),
            ({"type": "integer", "multipleOf": 2}, 77, "multipleOf", "/x is no multiple of 2"),
            ({"type": "string", "minLength": 3}, "zz", "minLength", "/x has fewer characters than 3"),
            ({"type": "string", "maxLength": 3}, "zzzz", "maxLength", "/x has more characters than 3"),
            ({"type": "string", "pattern": "^a+$"}, "zz", "pattern", "/x does not match the pattern '^a+$'"),
            ({"type": "array", "minItems": 2}, [77], "minItems", "/x has fewer items than 2"),
            ({"type": "array", "maxItems": 1}, [77, 78], "maxItems", "/x has more items than 1"),
            ({"type": "array", "uniqueItems": True}, [77, 77], "uniqueItems", "/x has two equal items"),
            ({"type": "array", "contains": {"type": "null"}}, [77], "contains", "/x breaks 'contains' of the schema"),
            ({"type": "object", "minProperties": 2}, {"a": 77}, "minProperties", "/x has fewer members than 2"),
            ({"type": "object", "maxProperties": 0}, {"a": 77}, "maxProperties", "/x has more members than 0"),
            ({"enum": ["a", "b"]}, "zz", "enum", "/x is none of the 2 values that the schema lists"),
            ({"const": "a"}, "zz", "const", "/x is not the value that the schema fixes"),
            ({"anyOf": [{"type": "null"}, {"const": 1}]}, 77, "anyOf", "/x fits no part of 'anyOf' of the schema"),
            ({"not": {"type": "integer"}}, 77, "not", "/x breaks 'not' of the schema"),
            (False, 77, "falseSchema", "/x is not allowed by the schema"),
            (
                {"properties": {"a": {}}, "unevaluatedProperties": False},
                {"b": 77},
                "unevaluatedProperties",
                "/x has 'b', which the schema does not allow",
            ),
            (
                {"type": "object", "additionalProperties": {"type": "string"}},
                {"a\x1b[31m" + "b" * 60: 77},
                "type",
                "/x/a\\x1b[31m" + "b" * 33 + "… is an integer, not a string",
            ),
        ],
        ids=str,
    )
    def test_a_reason_names_the_place_and_the_bound_but_no_value(self, schema, value, rule, reason):
        for keep in ({}, {"y": {"type": ["integer", "string"]}}):  # read in bulk where it can be, and one by one
            format = made({"type": "object", "properties": {"x": schema, **keep}})
            failures = decode(format, [json.dumps({"x": value}).encode()]).failures
            assert (failures.rules, failures.reasons) == ((f"json_schema.{rule}",), (reason,))

    @pytest.mark.parametrize(
        ("names", "shown"),
        [
            (["coupon"], "'coupon'"),
            (["a", "b", "c", "d", "e"], "'a', 'b', 'c' and 2 more"),
            (["\x1b]0;\n" + "n" * 100], "'\\x1b]0;\\n" + "n" * 34 + "…'"),
        ],
    )
    def test_a_reason_names_the_members_that_are_not_allowed(self, names, shown):
        format = column({"type": "integer"}, additionalProperties=False)
        failures = decode(format, [json.dumps(dict.fromkeys(names, "s3cret")).encode()]).failures
        assert failures.reasons == (f"the object has {shown}, which the schema does not allow",)

    def test_a_format_travels(self):
        format = pickle.loads(pickle.dumps(made(ORDER)))
        assert decode(format, [b'{"id": 1}']).rows.column("id").to_pylist() == [1]


OPEN = {"type": "object", "properties": {"id": {"type": "integer"}, "ratio": {"type": "number"}}}


@pytest.mark.parametrize(
    "number",
    [
        "9" * 5000,
        "-" + "9" * 309,
        "9" * 308 + "e1",
        "9" * 309 + ".5",
        "1.8e308",
        "99E+308",
        "[" + "9" * 400 + "]",
        "1e999",
    ],
    ids=lambda each: each[:3] + each[-4:],
)
def test_a_number_beyond_double_is_a_failure_in_any_member_and_whatever_comes_beside_it(number):
    payload = f'{{"id": 1, "ratio": 1e300, "more": {number}}}'.encode()
    for others in ([], [b'{"id": 2}'], [b'{"id": 1.0}'], [b'{"id": "a"}']):
        assert rules(decode(made(OPEN), [payload, *others]))[0] == "json.number"


def test_rows_that_pyarrow_refuses_leave_their_neighbours_as_they_are():
    odd = [b'{"id": 1.0}', b'{"id": 2, "ratio": -0}', b'{"id": 3, "more": {"a": 1, "a": 2}}', b'{"id": 4, "id": 4}']
    found = decode(made(OPEN), odd * 50)
    alone = [decode(made(OPEN), [each]) for each in odd]
    assert (
        list(map(repr, found.rows.to_pylist())) == [repr(row) for each in alone for row in each.rows.to_pylist()] * 50
    )
    assert rules(found) == dict.fromkeys(range(3, 200, 4), "json.duplicate_key")


def test_nanoseconds_are_cut_and_cost_no_look_at_each_row(monkeypatch):
    format = made({"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}})
    monkeypatch.setattr(JsonSchema, "_validated", None)
    payloads = [b'{"at": "2026-01-02T03:04:05.123456789+01:00"}', b'{"at": "2026-01-02T03:04:05.1Z"}']
    first, second = decode(format, payloads).rows.column("at").cast(pa.timestamp("us")).to_pylist()
    assert first == datetime.datetime(2026, 1, 2, 2, 4, 5, 123456)
    assert second == datetime.datetime(2026, 1, 2, 3, 4, 5, 100000)


@pytest.mark.parametrize("number", ["9" * 308, "0." + "9" * 5000, "1.7e308", "1e-999", "0e999", "9" * 400 + "e-200"])
def test_a_long_number_that_a_double_can_hold_is_none(number):
    payload = f'{{"id": 1, "ratio": 1e300, "more": {number}}}'.encode()
    for others in ([], [b'{"id": 1.0}']):
        assert decode(made(OPEN), [payload, *others]).rows.to_pylist()[0] == {"id": 1, "ratio": 1e300}


class TestFrames:
    def test_a_frame_is_taken_off_and_put_on(self):
        format = made(ORDER, id=258, framing="confluent")
        decoded = decode(format, [b'\0\0\0\1\2{"id": 1}', b'{"id": 2}', None, b"\0\0\0\0\1", b'\0\0\0\0\7{"id": 3}'])
        assert decoded.rows.column("id").to_pylist() == [1, None, 3]
        assert rules(decoded) == {1: "framing.missing", 3: "json.empty"}
        assert format.encode(decoded.rows.slice(2).select(["id"])).to_pylist() == [b'\0\0\0\1\2{"id":3}']

    def test_a_schema_without_an_id_cannot_be_put_in_a_frame(self):
        with pytest.raises(ConfigError, match="PEN-1000 Confluent's framing needs a schema"):
            made(ORDER, framing="confluent").encode(pa.record_batch({"id": [1]}))

    def test_a_frame_of_a_schema_that_is_refused_is_a_failure(self):
        def resolve(id):
            if id != 7:
                raise (
                    DataError("not known")
                    if id == 9
                    else framing.WrongSubject(f"the schema {id} is of another subject")
                )
            return WireSchema("json_schema", "{}", id=id)

        format = JsonSchema(JsonSchemaConfig(framing="confluent"), made(ORDER, id=258).schema, resolve)
        bodies = framing.add(pa.array([b'{"id": 1}'], pa.binary()), 258).to_pylist()
        bodies += framing.add(pa.array([b'{"id": 2}'], pa.binary()), 7).to_pylist()
        bodies += framing.add(pa.array([b'{"id": 3}'], pa.binary()), 8).to_pylist()
        bodies += framing.add(pa.array([b'{"id": 4}'], pa.binary()), 9).to_pylist()
        decoded = format.decode(pa.array([*bodies, None], pa.binary()))
        assert decoded.rows.column("id").to_pylist() == [1, 2, None]
        assert rules(decoded) == {2: "framing.subject", 3: "framing.unknown_id"}


class TestEncoding:
    def test_nulls_are_left_out_unless_the_member_is_required(self):
        schema = {
            "type": "object",
            "properties": {"a": {"type": ["string", "null"]}, "b": {"type": "string"}, "c": {"type": "integer"}},
            "required": ["a"],
        }
        rows = pa.record_batch({"a": ["x", None, None], "b": [None, "y", None], "c": [1, None, None]})
        assert made(schema).encode(rows).to_pylist() == [b'{"a":"x","c":1}', b'{"a":null,"b":"y"}', b'{"a":null}']

    def test_a_column_that_the_schema_lacks_is_refused(self):
        with pytest.raises(SchemaError, match="PEN-4002 the JSON Schema has no property 'y'"):
            made(ORDER).encode(pa.record_batch({"id": [1], "y": [1]}))

    def test_rows_that_break_the_schema_are_refused(self):
        with pytest.raises(
            DataError, match=r"PEN-3001 2 of 3 rows break the JSON Schema; in the first of them, row 1, "
        ):
            made(ORDER).encode(pa.record_batch({"id": [1, None, None]}))

    @pytest.mark.parametrize("at", [datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31)])
    def test_the_first_and_the_last_year_can_be_written(self, at):
        rows = pa.record_batch({"id": [1], "at": pa.array([at], pa.timestamp("us", "UTC"))})
        assert decode(made(ORDER), made(ORDER).encode(rows).to_pylist()).rows.column("at").equals(rows.column("at"))

    @pytest.mark.parametrize(
        "schema",
        [
            {
                "allOf": [
                    {"properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]},
                    {"properties": {"b": {}}},
                ]
            },
            {
                "$ref": "#/$defs/open",
                "required": ["a"],
                "$defs": {"open": {"properties": {"a": {"type": "null"}, "b": {}}}},
            },
        ],
        ids=["of a part", "beside a reference"],
    )
    def test_a_null_that_a_combined_schema_requires_is_written(self, schema):
        format = made({"type": "object", **schema})
        assert format.encode(decode(format, [b'{"a": null, "b": 1}']).rows).to_pylist() == [b'{"a":null,"b":1}']

    def test_lists_of_nothing_but_nulls_are_written(self):
        format = made({"properties": {"m": {"additionalProperties": {"type": "array", "items": {"type": "null"}}}}})
        payloads = [b'{"m": {"k": [null, null], "l": []}}', b'{"m": {}}', b'{"m": {"k": [null]}}']
        assert format.encode(decode(format, payloads).rows).to_pylist() == [
            each.replace(b" ", b"") for each in payloads
        ]

    def test_a_year_that_no_text_has_is_refused(self):
        rows = pa.record_batch({"id": [1], "at": pa.array([1 << 60], pa.timestamp("us", "UTC"))})
        with pytest.raises(DataError, match="PEN-3001 1 of 1 rows break the JSON Schema"):
            made(ORDER).encode(rows)


def rows_of(schema: pa.Schema, numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[pa.RecordBatch]:
    """Rows of any values of their types, whether the schema allows them or not."""
    kinds = {
        pa.int64(): numbers,
        pa.float64(): st.one_of(st.none(), st.floats()),
        pa.string(): st.one_of(st.none(), st.sampled_from(["a", "b", "c"])),
        pa.date32(): st.one_of(st.none(), st.integers(-800_000, 3_000_000)),
        pa.timestamp("us", "UTC"): st.one_of(st.none(), st.integers(-(10**17), 10**18)),
        pa.list_(pa.int64()): st.one_of(st.none(), st.lists(numbers, max_size=2)),
        pa.struct([("on", pa.bool_())]): st.one_of(st.none(), st.just({"on": None}), st.just({"on": True})),
    }
    row = st.fixed_dictionaries({field.name: kinds[field.type] for field in schema})
    return st.lists(row, max_size=4).map(
        lambda rows: pa.RecordBatch.from_arrays(
            [
                pa.array([row[field.name] for row in rows], pa.int32() if pa.types.is_date(field.type) else None).cast(
                    field.type
                )
                if pa.types.is_date(field.type)
                else pa.array([row[field.name] for row in rows], field.type)
                for field in schema
            ],
            schema=schema,
        )
    )


# -- random payloads -------------------------------------------------------------------------------------------------

RANDOM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "ratio": {"type": "number"},
        "name": {"type": ["string", "null"]},
        "at": {"type": "string", "format": "date-time"},
        "in": {"type": "object", "properties": {"on": {"type": "boolean"}, "any": {}}, "required": ["on"]},
        "all": {"type": "array", "items": {"type": "integer"}},
        "map": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["id"],
}
texts = st.text(st.characters(codec="utf-8"), max_size=5)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 62), 1 << 62), st.floats(-1e9, 1e9), texts),
    lambda each: st.one_of(st.lists(each, max_size=3), st.dictionaries(texts, each, max_size=3)),
    max_leaves=4,
)
valid = st.fixed_dictionaries(
    {"id": st.integers(-(1 << 63), (1 << 63) - 1)},
    optional={
        "ratio": st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-1000, 1000)),
        "name": st.one_of(st.none(), texts),
        "at": st.datetimes(timezones=st.just(datetime.UTC)).map(lambda at: at.isoformat()),
        "in": st.fixed_dictionaries({"on": st.booleans()}, optional={"any": anything}),
        "all": st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=3),
        "map": st.dictionaries(texts, texts, max_size=3),
        "more": anything,
    },
)
broken = st.fixed_dictionaries({}, optional=dict.fromkeys(["id", "ratio", "in", "all", "map", "at"], anything))
payloads = st.lists(
    st.one_of(
        valid.map(lambda each: json.dumps(each).encode()),
        valid.map(lambda each: json.dumps(each).encode()),
        broken.map(lambda each: json.dumps(each).encode()),
        st.binary(max_size=10),
        st.none(),
    ),
    max_size=10,
)


PLAIN = {**RANDOM, "properties": {name: RANDOM["properties"][name] for name in ("id", "ratio", "name", "at", "all")}}
PLAIN["properties"] |= {
    "in": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    "kind": {"enum": ["a", "b", None]},
    "day": {"type": "string", "format": "date"},
    "size": {"type": ["integer", "null"], "minimum": 0, "exclusiveMaximum": 10},
    "share": {"type": "number", "maximum": 1},
}
CLOSED = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "name": {"type": ["string", "null"]}, "ratio": {"type": "number"}},
    "additionalProperties": False,
}
odd = st.one_of(st.integers(-12, 12), st.floats(allow_nan=False), texts, st.none(), st.booleans(), st.just(2**53 + 1))
times = st.one_of(
    st.datetimes(timezones=st.just(datetime.UTC)).map(lambda at: at.isoformat()),
    st.from_regex(
        r"\A20[0-9]{2}-[0-9]{2}-[0-9]{2}([Tt ][0-9]{2}:[0-9]{2}(:[0-9]{2})?(\.[0-9]+)?(Z|z|[+-][0-9]{2}:?[0-9]{2})?)?\Z"
    ),
)
nearly = st.fixed_dictionaries(
    {"id": st.one_of(odd, st.integers(-9, 9))},
    optional={
        "ratio": odd,
        "name": odd,
        "at": times,
        "all": st.lists(odd, max_size=2),
        "in": st.one_of(odd, st.dictionaries(st.sampled_from(["on", "off"]), st.booleans() | st.none())),
        "kind": st.sampled_from(["a", "b", "c", None]),
        "day": times,
        "size": odd,
        "share": odd,
        "more": st.floats(),
    },
).map(lambda each: json.dumps(each).encode())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([PLAIN, CLOSED]),
    st.lists(st.one_of(nearly, valid.map(lambda e: json.dumps(e).encode())), max_size=6),
)
@example(PLAIN, [b'{"id": 1, "id": 2}', b'{"id": 1, "more": 1, "more": 2}', b'{"id": 1, "more": "Info"}', b'{"id": 2'])
@example(PLAIN, [b'{"id": 1, "at": "2026-01-01T10:00Z"}', b'{"id": 1, "at": "2026-01-01 10:00:00Z"}'])
@example(PLAIN, [b'{"id": 1, "share": 9007199254740993}', b'{"id": 1, "ratio": NaN}', b'{"id": 1, "kind": null}'])
def test_what_columns_show_to_be_valid_is_what_the_validator_says(schema, found):
    format = made(schema)
    assert check_of(format.schema) is not None
    bulk = decode(format, found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "check_of", lambda schema: None)
        one_by_one = decode(format, found)
    assert rules(bulk) == rules(one_by_one)
    assert bulk.failures.reasons == one_by_one.failures.reasons
    assert bulk.rows.to_pylist() == one_by_one.rows.to_pylist()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_rows_are_refused_just_when_the_validator_says_so(data):
    format = made(data.draw(st.sampled_from([PLAIN, CLOSED])))
    numbers = st.one_of(st.none(), st.integers(-3, 12))
    rows = data.draw(rows_of(format.columns(), numbers))
    names = data.draw(st.lists(st.sampled_from(rows.schema.names), unique=True, min_size=1))
    rows = rows.select(names)

    def answer() -> Any:
        try:
            return format.encode(rows).to_pylist()
        except DataError as error:
            return error.message

    bulk = answer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "check_of", lambda schema: None)
        assert answer() == bulk


@pytest.mark.parametrize(
    "more",
    [
        {"properties": {"x": {"type": "string", "pattern": "a"}}},
        {"properties": {"x": {"type": "string", "format": "email"}}},
        {"properties": {"x": {"type": "integer", "multipleOf": 2}}},
        {"properties": {"x": {"type": "integer", "maximum": 2**60}}},
        {"properties": {"x": {"type": ["integer", "string"]}}},
        {"properties": {"x": {"enum": [1]}}},
        {"properties": {"x": {"type": "integer"}}, "required": ["y"]},
        {"properties": {"x": {"type": "integer"}}, "minProperties": 1},
        {"properties": {"x": {"type": "integer"}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"x": {"$ref": "#/properties/x"}}},
    ],
    ids=str,
)
def test_what_columns_cannot_show_is_left_to_the_validator(more):
    assert check_of(WireSchema("json_schema", json.dumps({"type": "object", **more}))) is None


@settings(max_examples=40, deadline=None)
@given(payloads)
def test_each_payload_is_decoded_as_if_it_were_alone(found):
    format = made(RANDOM)
    whole = decode(format, found)
    rows, failed = [], {}
    for at, payload in enumerate(found):
        alone = decode(format, [payload])
        rows += alone.rows.to_pylist()
        failed |= dict(zip([at], alone.failures.rules, strict=False))
    assert rules(whole) == failed
    assert whole.rows.to_pylist() == rows


@settings(max_examples=60, deadline=None)
@given(st.lists(valid, max_size=8))
def test_what_was_decoded_is_encoded_and_decoded_to_the_same(found):
    format = made(RANDOM)
    rows = decode(format, [json.dumps(each).encode() for each in found]).rows
    assert rows.num_rows == len(found)
    again = decode(format, format.encode(rows).to_pylist())
    assert again.rows.to_pylist() == rows.to_pylist()
