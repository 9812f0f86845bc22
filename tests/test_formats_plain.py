from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, SchemaError
from penstock.formats import Decoded, Format, WireSchema, load


def made(name: str, **options: Any) -> Format[Any]:
    kind = load(name)
    return kind(kind.options_type(**options))


def decode(format: Format[Any], payloads: list[bytes | None]) -> Decoded:
    decoded = format.decode(pa.array(payloads, pa.binary()))
    positions, failed = decoded.positions.tolist(), decoded.failures.positions.tolist()
    assert sorted([*positions, *failed]) == list(range(len(payloads)))
    assert decoded.rows.num_rows == len(positions)
    assert decoded.rows.schema == format.columns()
    decoded.rows.validate(full=True)
    return decoded


CASES = [
    ("string", {}, "ä".encode(), "ä"),
    ("string", {}, b"", ""),
    ("string", {}, b" \n", " \n"),
    ("string", {}, b"\xff", "string.encoding"),
    ("bytes", {}, b"\xff\x00", b"\xff\x00"),
    ("bytes", {}, b"", b""),
    ("number", {}, b"42", 42.0),
    ("number", {}, b" -1.5e3\r\n", -1500.0),
    ("number", {}, b"1e-400", 0.0),
    ("number", {}, b"-Infinity", -math.inf),
    ("number", {}, b"18446744073709551616", 2.0**64),
    ("number", {}, b"1e400", "number.range"),
    ("number", {}, b"1" * 400, "number.range"),
    ("number", {}, b"", "number.syntax"),
    ("number", {}, b"one", "number.syntax"),
    ("number", {}, b"01", "number.syntax"),
    ("number", {}, b"1 2", "number.syntax"),
    ("number", {}, b"1\x00", "number.syntax"),
    ("number", {}, b"0x10", "number.syntax"),
    ("number", {}, b"inf", "number.syntax"),
    ("number", {}, b"\xff", "number.syntax"),
    ("number", {"type": "int64"}, b"9223372036854775807", (1 << 63) - 1),
    ("number", {"type": "int64"}, b"-9223372036854775808", -(1 << 63)),
    ("number", {"type": "int64"}, b"9223372036854775808", "number.range"),
    ("number", {"type": "int64"}, b"9" * 5000, "number.range"),
    ("number", {"type": "int64"}, b"1.0", "number.syntax"),
    ("number", {"type": "int64"}, b"1e3", "number.syntax"),
]


@pytest.mark.parametrize(("name", "options", "payload", "result"), CASES)
def test_a_payload_has_its_result_and_spoils_no_other(name, options, payload, result):
    decoded = decode(made(name, **options), [b"1", payload, None, b"2"])
    found = decoded.rows.column("value").to_pylist()
    if decoded.failures.rules:
        assert decoded.failures.rules == (result,)
        assert len(found) == 3
    else:
        assert found[1:3] == [result, None]
    assert [str(each).strip("b'") for each in (found[0], found[-1])] in (["1", "2"], ["1.0", "2.0"])


def test_nan_is_read_and_written():
    format = made("number")
    assert math.isnan(decode(format, [b"NaN"]).rows.column("value")[0].as_py())
    assert format.encode(pa.record_batch({"value": [math.nan, math.inf]})).to_pylist() == [b"NaN", b"Infinity"]


payloads = st.lists(st.one_of(st.none(), st.binary(max_size=8), st.floats().map(lambda each: repr(each).encode())))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([("string", {}), ("bytes", {}), ("number", {}), ("number", {"type": "int64"})]), payloads)
def test_random_payloads_are_rows_or_failures_and_survive_the_way_back(kind, found):
    name, options = kind
    format = made(name, **options)
    rows = decode(format, found).rows
    again = decode(format, format.encode(rows).to_pylist()).rows
    assert str(again.to_pylist()) == str(rows.to_pylist())


@pytest.mark.parametrize("name", ["string", "number", "bytes", "json", "csv"])
def test_a_schema_is_refused(name):
    kind = load(name)
    with pytest.raises(ConfigError, match=f"PEN-1016 the format {name} takes no schema"):
        kind(kind.options_type(), WireSchema("avro", "{}"))


@pytest.mark.parametrize("name", ["string", "number", "bytes"])
def test_other_columns_are_refused(name):
    with pytest.raises(SchemaError, match=r"PEN-4002 the format '.*' has one column, value, and the rows have a, b"):
        made(name).encode(pa.record_batch({"a": [1], "b": [2]}))
    with pytest.raises(SchemaError, match="PEN-4002 the column 'value' is list<"):
        made(name).encode(pa.record_batch({"value": [[1]]}))


def test_numbers_of_any_type_are_written():
    assert made("number", type="int64").encode(
        pa.record_batch({"value": pa.array([1, None], pa.int8())})
    ).to_pylist() == [
        b"1",
        None,
    ]
    assert made("string").encode(pa.record_batch({"value": [1.5]})).to_pylist() == [b"1.5"]
