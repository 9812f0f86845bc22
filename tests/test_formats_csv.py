from __future__ import annotations

import csv
import datetime
import io
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.errors import SchemaError
from penstock.formats import Decoded
from penstock.formats.csv import Csv, CsvConfig

TYPED = {"id": "int64", "note": "string", "at": "timestamp[us, UTC]"}


def made(**options: Any) -> Csv:
    return Csv(CsvConfig(**options))


def decode(format: Csv, payloads: list[bytes | None], known: pa.Schema | None = None) -> Decoded:
    decoded = format.decode(pa.array(payloads, pa.binary()), known)
    positions, failed = decoded.positions.tolist(), decoded.failures.positions.tolist()
    assert sorted([*positions, *failed]) == list(range(len(payloads)))
    assert decoded.rows.num_rows == len(positions)
    decoded.rows.validate(full=True)
    return decoded


def rules(decoded: Decoded) -> dict[int, str]:
    return dict(zip(decoded.failures.positions.tolist(), decoded.failures.rules, strict=True))


class TestRows:
    def test_values_have_the_types_of_their_columns(self):
        decoded = decode(made(columns=TYPED), [b"1,a,2026-01-01T00:00:00Z", b"2,,", None])
        assert decoded.rows.to_pylist() == [
            {"id": 1, "note": "a", "at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)},
            {"id": 2, "note": None, "at": None},
            {"id": None, "note": None, "at": None},
        ]

    def test_columns_without_types_are_text(self):
        assert decode(made(columns=["a", "b"]), [b"1,2"]).rows.to_pylist() == [{"a": "1", "b": "2"}]

    def test_columns_without_names_are_numbered_and_grow_with_the_records(self):
        decoded = decode(made(), [b"a,b", b"c"])
        assert decoded.rows.to_pylist() == [{"column_1": "a", "column_2": "b"}, {"column_1": "c", "column_2": None}]
        later = decode(made(), [b"d,e,f"], decoded.rows.schema)
        assert later.rows.schema.names == ["column_1", "column_2", "column_3"]
        assert decode(made(), [b"g"], later.rows.schema).rows.schema == later.rows.schema
        assert decode(made(), []).rows.num_columns == 0

    def test_other_characters_can_be_chosen(self):
        format = made(columns=["a", "b", "c"], delimiter="\t", quote="'", null="-")
        assert decode(format, [b"1\t'2\t''x'''\t-"]).rows.to_pylist() == [{"a": "1", "b": "2\t'x'", "c": None}]

    @pytest.mark.parametrize(
        ("payload", "result"),
        [
            (b'1,"say ""hi"", twice",', 'say "hi", twice'),
            (b'1,"two\nlines",\r\n', "two\nlines"),
            (b"1,a,\n", "a"),
            (b'1,"",', ""),
            (b"1, a ,", " a "),
            (b"1,a\x00b,", "a\x00b"),
            (b"", "csv.values"),
            (b"1,a", "csv.values"),
            (b"1,a,,", "csv.values"),
            (b"1,a,\n2,b,", "csv.records"),
            (b"1,a,\n\n", "csv.records"),
            (b'1,a"b,', "csv.quote"),
            (b'1,"a"b,', "csv.quote"),
            (b'1,"a,', "csv.quote"),
            (b"one,a,", "csv.type"),
            (b"9223372036854775808,a,", "csv.type"),
            (b"1,\xff,", "csv.encoding"),
            (b"\xef\xbb\xbf1,a,", "csv.type"),
        ],
    )
    def test_an_odd_payload_has_its_result_and_spoils_no_other(self, payload, result):
        decoded = decode(made(columns=TYPED), [b"0,x,", payload, b'2,"y",'])
        if result.startswith("csv."):
            assert rules(decoded) == {1: result}
            assert decoded.rows.column("id").to_pylist() == [0, 2]
        else:
            assert decoded.rows.column("note").to_pylist() == ["x", result, "y"]

    @pytest.mark.parametrize(
        ("kind", "texts", "refused"),
        [
            ("int64", "-1 007 0x10", "+1 1.0 1e3 1_000"),
            ("uint8", "255", "-1 256"),
            ("float64", "1 -1.5 1e3 .5 nan inf -Infinity", "1.5x 0x10 1e999 -1e999"),
            ("float32", "1.5 1e38 inf", "1e39"),
            ("decimal(10,2)", "1 1.2 1.250 1e2 -1.5", "1.255 123456789.00"),
            ("bool", "true FALSE 1 0", "yes t"),
            ("date32", "2026-01-02 0001-01-01 9999-12-31", "0000-12-31 2026-1-2 20260102 2026-01-02T00:00:00"),
            (
                "timestamp[us, UTC]",
                "2026-01-02T03:04:05Z 2026-01-02T03:04:05.123456+01:00 2026-01-02T03:04Z",
                "2026-01-02T03:04:05 2026-01-02 2026-01-02T03:04:05.1234567Z 1735787045",
            ),
            (
                "timestamp[ms, UTC]",
                "0001-01-01T00:00:00Z 9999-12-31T23:59:59.999Z",
                "0001-01-01T00:00:00+00:01 9999-12-31T23:59:59-00:01",
            ),
            ("timestamp[us]", "2026-01-02T03:04:05 2026-01-02", "2026-01-02T03:04:05Z 0000-01-01"),
            ("timestamp[ns]", "1700-01-01T00:00:00 2200-01-01", "1600-01-01 2300-01-01"),
        ],
    )
    def test_a_type_takes_these_texts_and_no_others(self, kind, texts, refused):
        payloads = [each.encode() for each in (*texts.split(), *refused.split())]
        decoded = decode(made(columns={"x": kind}), payloads)
        assert decoded.positions.tolist() == list(range(len(texts.split())))
        assert set(decoded.failures.rules) == {"csv.type"}

    def test_the_reason_of_a_time_shows_what_is_missing(self):
        reasons = decode(made(columns=TYPED), [b"1,a,2026-01-02 03:04:05"]).failures.reasons
        assert reasons == ("the column 'at' is not timestamp[us, tz=UTC], such as 2026-01-02T03:04:05Z",)

    def test_a_record_of_one_value_may_be_empty(self):
        assert decode(made(columns=["a"]), [b"", b'""']).rows.to_pylist() == [{"a": None}, {"a": ""}]

    def test_a_record_of_too_many_values_is_a_failure(self):
        assert rules(decode(made(), [b"a", b"," * 10_000])) == {1: "csv.values"}

    def test_reasons_hold_no_values(self):
        decoded = decode(made(columns=TYPED), [b"s3cret,a,", b's3cret"', b"s3cret", b"1,a,s3cret"])
        assert len(decoded.failures) == 4
        assert not any("s3cret" in reason for reason in decoded.failures.reasons)


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"columns": []},
            {"columns": ["a", "a"]},
            {"columns": {"a": "int65"}},
            {"columns": {"a": "list<int64>"}},
            {"delimiter": '"'},
            {"delimiter": ",,"},
            {"delimiter": "\n"},
            {"null": "a,b"},
        ],
        ids=str,
    )
    def test_what_cannot_be_read_is_refused(self, options):
        with pytest.raises(ValidationError):
            made(**options)

    def test_a_delimiter_of_two_characters_is_refused_for_what_it_is(self):
        with pytest.raises(ValidationError, match="should be one ASCII character"):
            made(delimiter=";;")


class TestEncoding:
    def test_values_are_quoted_where_they_must_be(self):
        rows = pa.record_batch({"a": ["x", "", None, 'say "hi"'], "b": [1.5, 2, None, float("inf")]})
        assert made().encode(rows).to_pylist() == [b"x,1.5", b'"",2', b",", b'"say ""hi""",inf']

    def test_other_columns_than_those_named_are_refused(self):
        with pytest.raises(SchemaError, match="PEN-4002 the rows have the columns b"):
            made(columns=["a"]).encode(pa.record_batch({"b": [1]}))

    @pytest.mark.parametrize("values", [pa.array([[1]]), pa.array([b"\xff"])], ids=["list", "bytes"])
    def test_what_has_no_text_is_refused(self, values):
        with pytest.raises(SchemaError, match="PEN-4002 the column 'a' is"):
            made().encode(pa.record_batch({"a": values}))


texts = st.text(st.one_of(st.sampled_from(',"\n\r;x'), st.characters(codec="utf-8")), max_size=5)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(st.none(), st.binary(max_size=12), texts.map(str.encode)), max_size=12))
def test_random_payloads_are_decoded_as_if_each_were_alone(payloads):
    format = made(columns=["a", "b"])
    whole = decode(format, payloads)
    rows: list[Any] = []
    failed: dict[int, str] = {}
    for at, payload in enumerate(payloads):
        alone = decode(format, [payload])
        rows += alone.rows.to_pylist()
        failed |= dict(zip([at], alone.failures.rules, strict=False))
    assert rules(whole) == failed
    assert whole.rows.to_pylist() == rows


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(texts, min_size=3, max_size=3), max_size=8))
def test_what_python_writes_is_read(records):
    payloads = []
    for record in records:
        text = io.StringIO(newline="")
        csv.writer(text, quoting=csv.QUOTE_ALL).writerow(record)
        payloads.append(text.getvalue().encode())
    decoded = decode(made(columns=["a", "b", "c"]), payloads)
    assert [list(row.values()) for row in decoded.rows.to_pylist()] == records


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "n": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
                "r": st.none() | st.floats(allow_nan=False),
                "s": st.none() | texts,
                "b": st.none() | st.booleans(),
                "d": st.none() | st.dates(),
            }
        ),
        max_size=8,
    )
)
def test_what_is_encoded_is_decoded_to_the_same(found):
    columns = {"n": "int64", "r": "float64", "s": "string", "b": "bool", "d": "date32"}
    format = made(columns=columns)
    rows = pa.RecordBatch.from_pylist(found, format.columns())
    assert decode(format, format.encode(rows).to_pylist()).rows.to_pylist() == found
