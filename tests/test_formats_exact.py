"""Whole numbers that a double does not hold: every format says so instead of giving back another number."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.formats import Format, WireSchema, load
from penstock.formats.exact import beyond_years

LARGE = 2**53 + 1
"""The first whole number that a double does not hold."""

INTS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(2**53 - 4, 2**53 + 4), st.integers(-(2**70), 2**70))


def made(name: str, schema: str | None = None, resolve: Any = None, **options: Any) -> Format[Any]:
    kind = load(name)
    return kind(kind.options_type(**options), WireSchema(name, schema) if schema else None, resolve)


NUMBER = json.dumps({"type": "object", "properties": {"v": {"type": "number"}}})
NESTED = json.dumps(
    {
        "type": "object",
        "properties": {
            "l": {"type": "array", "items": {"type": "number"}},
            "m": {"type": "object", "additionalProperties": {"type": "number"}},
        },
    }
)
TEXTS: dict[str, tuple[Format[Any], Any]] = {
    "json": (made("json"), lambda n: b'{"v": %d}' % n),
    "json_schema": (made("json_schema", NUMBER), lambda n: b'{"v": %d}' % n),
    "csv": (made("csv", columns={"v": "float64", "w": "string"}), lambda n: b"%d,x" % n),
    "number": (made("number"), lambda n: b"%d" % n),
}


def decode(format: Format[Any], payloads: list[bytes]) -> tuple[list[Any], dict[int, str]]:
    found = format.decode(pa.array(payloads, pa.binary()))
    failed = dict(zip(found.failures.positions.tolist(), found.failures.rules, strict=True))
    assert sorted([*found.positions.tolist(), *failed]) == list(range(len(payloads)))
    return found.rows.column(0).to_pylist(), failed


@pytest.mark.parametrize("name", TEXTS)
class TestTexts:
    def test_a_whole_number_that_would_be_rounded_falls_out_alone(self, name):
        format, payload = TEXTS[name]
        fraction = payload(0).replace(b"0", b"0.5")
        values, failed = decode(format, [fraction, payload(LARGE), payload(2**53), payload(-LARGE), payload(7)])
        assert values == [0.5, float(2**53), 7.0]
        assert failed == {1: f"{name}.exact", 3: f"{name}.exact"}

    def test_large_numbers_with_a_fraction_or_an_exponent_are_doubles(self, name):
        format, payload = TEXTS[name]
        texts = [payload(0).replace(b"0", each) for each in (b"0.5", b"1e300", b"9007199254740993.0", b"-1E18")]
        values, failed = decode(format, texts)
        assert values == [0.5, 1e300, 9007199254740992.0, -1e18]
        assert failed == {}

    @given(numbers=st.lists(INTS, max_size=8))
    def test_what_comes_out_is_what_went_in(self, name, numbers):
        format, payload = TEXTS[name]
        values, failed = decode(format, [payload(0).replace(b"0", b"0.5"), *map(payload, numbers)])
        kept = [number for at, number in enumerate(numbers, 1) if at not in failed]
        assert [int(value) for value in values[1:]] == kept
        assert all(int(float(numbers[at - 1])) != numbers[at - 1] for at in failed)


def test_a_machine_that_stalls_for_a_moment_makes_no_property_wrong():
    stalls = iter([0.0, 0.3])

    @given(st.integers())
    def holds(number):
        time.sleep(next(stalls, 0.0))

    holds()


class TestJson:
    def test_rows_of_whole_numbers_are_not_rounded_by_a_fraction_that_comes_after_them(self):
        """The column is int64 until the last payload: what was read before is looked at once more."""
        payloads = [b'{"v": %d}' % n for n in [LARGE, *range(2000)]] + [b'{"v": 0.5}']
        values, failed = decode(made("json"), payloads)
        assert failed == {0: "json.exact"}
        assert values == [*map(float, range(2000)), 0.5]

    def test_numbers_in_lists_and_structs_are_looked_at(self):
        payloads = [b'{"a": {"l": [0.5]}}', b'{"a": {"l": [1, %d]}}' % LARGE, b'{"a": null}', b'{"a": {"l": [2]}}']
        values, failed = decode(made("json"), payloads)
        assert failed == {1: "json.exact"}
        assert values == [{"l": [0.5]}, None, {"l": [2.0]}]

    def test_columns_of_whole_numbers_hold_them_all(self):
        assert decode(made("json"), [b'{"v": %d}' % LARGE]) == ([LARGE], {})


def test_json_schema_looks_into_lists_and_maps():
    payloads = [b'{"l": [%d]}' % LARGE, b'{"m": {"a": %d}}' % LARGE, b'{"l": [1.5], "m": {"a": 2}}', b'{"m": null}']
    _, failed = decode(made("json_schema", NESTED), payloads[:3])
    assert failed == {0: "json_schema.exact", 1: "json_schema.exact"}


class TestAvro:
    @pytest.mark.parametrize(
        ("kinds", "large"), [(("long", "double"), LARGE), (("long", "float"), 2**24 + 1), (("int", "float"), 2**24 + 1)]
    )
    @pytest.mark.parametrize("items", [1, 100_000])
    def test_a_promotion_never_rounds(self, kinds, large, items):
        """Also in records with very many items, which are read one by one."""
        writer, reader = (
            {"type": "record", "name": "R", "fields": [{"name": "v", "type": {"type": "array", "items": kind}}]}
            for kind in kinds
        )
        payloads = []
        for value in (large, large - 1, -large, 3):
            out = io.BytesIO()
            fastavro.schemaless_writer(out, fastavro.parse_schema(writer), {"v": [value] * items})
            payloads.append(b"\0\0\0\0\1" + out.getvalue())
        resolve = lambda id: WireSchema("avro", json.dumps(writer), id=id)  # noqa: E731
        values, failed = decode(made("avro", json.dumps(reader), resolve, framing="confluent"), payloads)
        assert failed == {0: "avro.exact", 2: "avro.exact"}
        assert [each[0] for each in values] == [large - 1, 3]


@pytest.mark.parametrize(("kind", "size"), [(pa.ListArray, pa.int32()), (pa.LargeListArray, pa.int64())])
def test_times_that_a_null_list_hides_are_not_looked_at(kind: Any, size: pa.DataType) -> None:
    far = 10**14
    moments = pa.array([far, 1, 2, far, 3], pa.timestamp("s"))
    lists = kind.from_arrays(pa.array([0, 2, 3, 4, 5], size), moments, mask=pa.array([True, False, False, False]))
    assert beyond_years(lists).tolist() == [False, False, True, False]
    assert beyond_years(lists.slice(1)).tolist() == [False, True, False]
