"""What becomes of rows whose schema changed, against a model that looks at one value at a time."""

from __future__ import annotations

import datetime
import json
import math
import zoneinfo
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pyarrow import types

from penstock.changes import CHANGE_FIELDS
from penstock.errors import DataError, SchemaError
from penstock.schema import with_key
from penstock.schema.evolution import Policy, diff, fit, follow, widened, widens, widens_or_doubles
from thorough import examples

TOPIC = "/lake/orders"

KINDS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64()),
    *(pa.float32(), pa.float64(), pa.decimal128(3, 1), pa.decimal128(5, 1), pa.decimal128(5, 3)),
    *(pa.date32(), pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("us", "UTC")),
    *(pa.string(), pa.large_string(), pa.binary(), pa.binary(2), pa.bool_()),
]

kinds = st.sampled_from(KINDS)
policies = st.sampled_from(list(Policy))


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of the type, those at the edges of narrower ones among them."""
    if types.is_integer(kind):
        edges = [sign * (1 << bits) + by for bits in (0, 7, 8, 15, 31, 32, 63) for sign in (1, -1) for by in (-1, 0)]
        return st.sampled_from([edge for edge in edges if _fits(edge, kind)])
    if types.is_floating(kind):
        return st.floats(width=kind.bit_width)
    if types.is_decimal(kind):
        most = Decimal(10 ** (kind.precision - kind.scale)) - Decimal(10) ** -kind.scale
        return st.decimals(-most, most, places=kind.scale)
    if types.is_date(kind):
        return st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1))
    if types.is_timestamp(kind):
        days = st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1))
        millis = st.sampled_from([0, 1, 1000, 3_600_000])
        zone = zoneinfo.ZoneInfo("UTC") if kind.tz else None
        start = days.map(lambda day: datetime.datetime.combine(day, datetime.time(), zone))
        return st.tuples(start, millis).map(lambda both: both[0] + datetime.timedelta(milliseconds=both[1]))
    if types.is_boolean(kind):
        return st.booleans()
    if types.is_fixed_size_binary(kind):
        return st.binary(min_size=2, max_size=2)
    return st.binary(max_size=3) if types.is_binary(kind) else st.text(max_size=3)


def _fits(value: Any, kind: pa.DataType) -> bool:
    """True when a single value has its place in a column of the type."""
    if value is None:
        return True
    if types.is_integer(kind):
        bits = kind.bit_width
        low, high = (-(1 << bits - 1), 1 << bits - 1) if types.is_signed_integer(kind) else (0, 1 << bits)
        return isinstance(value, int) and not isinstance(value, bool) and low <= value < high
    if types.is_floating(kind):
        if isinstance(value, int) and not isinstance(value, bool):
            return kind.bit_width == 64 and abs(value) <= 2**53
        if not isinstance(value, float):
            return False
        with np.errstate(over="ignore"):
            return math.isnan(value) or kind.bit_width == 64 or float(np.float32(value)) == value
    if types.is_decimal(kind):
        if not isinstance(value, Decimal):
            return False
        return abs(value) < 10 ** (kind.precision - kind.scale) and value == round(value, kind.scale)
    if types.is_timestamp(kind):
        if type(value) is datetime.date:
            return kind.tz is None
        if not isinstance(value, datetime.datetime) or (value.tzinfo is None) != (kind.tz is None):
            return False
        return kind.unit == "us" or value.microsecond % 1000 == 0
    if types.is_date(kind):
        return type(value) is datetime.date or (
            isinstance(value, datetime.datetime) and value.tzinfo is None and value.time() == datetime.time()
        )
    if types.is_boolean(kind):
        return isinstance(value, bool)
    return isinstance(value, str if types.is_string(kind) or types.is_large_string(kind) else bytes)


def _as(value: Any, kind: pa.DataType) -> Any:
    """The value as a column of the type gives it back."""
    if type(value) is datetime.date and types.is_timestamp(kind):
        return datetime.datetime.combine(value, datetime.time())
    if isinstance(value, datetime.datetime) and types.is_date(kind):
        return value.date()
    if types.is_float64(kind) and value is not None:
        return float(value)
    return round(value, kind.scale) if types.is_decimal(kind) and value is not None else value


@st.composite
def rows_and_targets(draw: st.DrawFn) -> tuple[pa.RecordBatch, pa.Schema]:
    """A batch with `id` and some of a, b, c; a target with `id` and some of them, of types that may differ."""
    count = draw(st.integers(1, 5))
    columns: dict[str, pa.Array] = {"id": pa.array(range(count), pa.int64())}
    target = [pa.field("id", pa.int64())]
    for name in "abc":
        sent = draw(st.none() | kinds)
        if sent is not None:
            values = st.lists(st.none() | values_of(sent), min_size=count, max_size=count)
            columns[name] = pa.array(draw(values), sent)
        # Often a type of the same kind: two that have nothing in common are refused alike.
        near = [kind for kind in KINDS if sent is not None and type(kind) is type(sent)]
        held = draw(st.none() | kinds | st.sampled_from([sent, *near] if sent is not None else KINDS))
        if held is not None:
            target.append(pa.field(name, held))
    return with_columns(columns), pa.schema(target)


def with_columns(columns: dict[str, pa.Array]) -> pa.RecordBatch:
    batch = pa.record_batch(columns)
    return pa.RecordBatch.from_arrays(batch.columns, schema=with_key(batch.schema, ["id"]))


def _same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    """Equality in which NaN is itself."""
    return repr(a) == repr(b)


def _rounds(batch: pa.RecordBatch, target: pa.Schema) -> bool:
    """True if a whole number has no exact place in its column of doubles."""
    doubles = [
        name for name in batch.schema.names if name in target.names and types.is_float64(target.field(name).type)
    ]
    return any(not _fits(value, pa.float64()) for name in doubles for value in batch.column(name).to_pylist())


@settings(max_examples=examples(300), deadline=None)
@given(rows_and_targets(), policies)
def test_rows_fit_as_a_look_at_every_single_value_says(both: tuple[pa.RecordBatch, pa.Schema], policy: Policy) -> None:
    batch, target = both
    binary = [each for each in batch.schema if types.is_binary(each.type) and each.name in target.names]
    assume(not any(types.is_fixed_size_binary(target.field(each.name).type) for each in binary))
    types_fit = all(
        each.name in target.names and widens_or_doubles(each.type, target.field(each.name).type)
        for each in batch.schema
    )
    if not policy.discards and not types_fit:
        with pytest.raises(SchemaError, match=rf"PEN-4001 .*{TOPIC}.*{policy}"):
            fit(TOPIC, batch, target, policy)
        return
    if not policy.discards and _rounds(batch, target):
        with pytest.raises(DataError, match="does not fit double"):
            fit(TOPIC, batch, target, policy)
        return
    fitted, discarded = fit(TOPIC, batch, target, policy)
    expected, lost = [], 0
    for row in batch.to_pylist():
        places = {name: name in target.names and _fits(row[name], target.field(name).type) for name in row}
        has_place = all(place or row[name] is None for name, place in places.items())
        lost += not has_place
        if has_place or policy is Policy.DISCARD_VALUE:
            kept = {name: row[name] if places[name] else None for name in row if name in target.names}
            expected.append({name: _as(value, target.field(name).type) for name, value in kept.items()})
    assert _same(fitted.to_pylist(), expected)
    assert discarded == lost
    assert all(each.type == target.field(each.name).type for each in fitted.schema)
    fitted.validate(full=True)


@settings(max_examples=examples(300), deadline=None)
@given(rows_and_targets(), policies)
def test_rows_always_fit_the_columns_that_a_target_has_once_it_followed(
    both: tuple[pa.RecordBatch, pa.Schema], policy: Policy
) -> None:
    batch, target = both
    try:
        followed = follow(TOPIC, target, batch.schema, policy)
    except SchemaError:
        assert not policy.discards
        return
    assert followed.names[: len(target)] == target.names
    assert all(widens(old.type, followed.field(old.name).type) for old in target)
    if policy is not Policy.EVOLVE:
        assert followed == target
    if not policy.discards and _rounds(batch, followed):
        return
    _, discarded = fit(TOPIC, batch, followed, policy)
    assert policy.discards or not discarded
    assert follow(TOPIC, followed, batch.schema, policy) == followed


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from([(old, new) for old in KINDS for new in KINDS if widens(old, new)]), st.data())
def test_a_wider_type_holds_every_value(both: tuple[pa.DataType, pa.DataType], data: st.DataObject) -> None:
    old, new = both
    value = data.draw(values_of(old))
    assert _fits(value, new)
    assert _same([{"v": pa.array([value], old).cast(new)[0].as_py()}], [{"v": _as(value, new)}])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.int32(), pa.int64()),
        (pa.uint32(), pa.int64()),
        (pa.float32(), pa.float64()),
        (pa.decimal128(5, 1), pa.decimal128(7, 2)),
        (pa.decimal128(38, 2), pa.decimal256(40, 2)),
        (pa.date32(), pa.timestamp("us")),
        (pa.timestamp("ms"), pa.timestamp("us")),
        (pa.string(), pa.large_string()),
        (pa.binary(16), pa.binary()),
        (pa.null(), pa.int8()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.list_(pa.int32()), pa.list_(pa.int64())),
        (pa.struct([("a", pa.int32())]), pa.struct([("a", pa.int64())])),
        (pa.struct([("a", pa.int32())]), pa.struct([("b", pa.string()), ("a", pa.int32())])),
    ],
    ids=str,
)
def test_types_widen_and_do_not_narrow(old: pa.DataType, new: pa.DataType) -> None:
    assert widens(old, new)
    assert not widens(new, old) or types.is_large_string(new) or types.is_dictionary(old)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.int64(), pa.uint64()),
        (pa.int32(), pa.float64()),
        (pa.decimal128(5, 1), pa.decimal128(5, 2)),
        (pa.date32(), pa.timestamp("us", "UTC")),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.int64(), pa.string()),
        (pa.string(), pa.binary()),
        (pa.struct([("a", pa.int32())]), pa.struct([("b", pa.int64())])),
    ],
    ids=str,
)
def test_types_that_do_not_hold_each_others_values_do_not_widen(old: pa.DataType, new: pa.DataType) -> None:
    assert not widens(old, new)
    assert not widens(new, old)


def test_a_target_that_cannot_widen_a_type_in_place_refuses_it_and_says_so() -> None:
    old, new = pa.schema([("n", pa.int32())]), pa.schema([("n", pa.int64())])
    assert follow(TOPIC, old, new) == new
    with pytest.raises(SchemaError, match=r"PEN-4001 .*'n' of /lake/orders is int32 .* int64 .*evolve(.|\n)*in place"):
        follow(TOPIC, old, new, sink_widens=lambda *_: False)
    assert follow(TOPIC, new, old, sink_widens=lambda *_: False) == new


def test_a_column_that_is_no_longer_sent_stays() -> None:
    old = pa.schema([("id", pa.int64()), ("note", pa.string())])
    assert follow(TOPIC, old, old.remove(1), Policy.FREEZE) == old
    assert [str(change.kind) for change in diff(old, old.remove(1))] == ["dropped"]


def test_a_date_too_far_away_for_a_finer_unit_is_bad_data_and_not_wrapped_around() -> None:
    far = with_columns({"id": pa.array([1]), "d": pa.array([2_000_000_000], pa.int32()).cast(pa.date32())})
    target = pa.schema([("id", pa.int64()), ("d", pa.timestamp("us"))])
    with pytest.raises(DataError, match="'d'"):
        fit(TOPIC, far, target, Policy.EVOLVE)


def changes(*events: dict[str, Any]) -> pa.RecordBatch:
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("extra", pa.string()), *CHANGE_FIELDS])
    found = [{"_position": str(place), **event} for place, event in enumerate(events)]
    return pa.RecordBatch.from_pylist(found, schema=with_key(schema, ["id"]))


HELD = pa.schema([("id", pa.int64()), ("n", pa.int32())])


def test_a_delete_is_never_lost_with_values_that_have_no_place() -> None:
    batch = changes(
        {"_op": "c", "id": 1, "n": 1 << 40},
        {"_op": "d", "id": 2, "n": 1 << 40, "extra": "x"},
        {"_op": "t", "extra": "x"},
        {"_op": "u", "id": 3, "n": 3},
    )
    fitted, discarded = fit(TOPIC, batch, HELD, Policy.DISCARD_ROW)
    assert [(row["_op"], row["id"], row["n"]) for row in fitted.to_pylist()] == [
        ("d", 2, None),
        ("t", None, None),
        ("u", 3, 3),
    ]
    assert discarded == 1
    assert fitted.schema.names == ["id", "n", *(each.name for each in CHANGE_FIELDS)]


def test_a_row_that_moved_and_has_no_place_still_leaves_its_old_key() -> None:
    moved = {"_op": "u", "id": 2, "n": 1 << 40, "_old_key": json.dumps({"id": 1}), "_txid": 7, "_unchanged": ["extra"]}
    fitted, discarded = fit(TOPIC, changes(moved, {"_op": "c", "id": 5}), HELD, Policy.DISCARD_ROW)
    assert discarded == 1
    gone, new = fitted.to_pylist()
    assert (new["_op"], new["id"]) == ("c", 5)
    assert gone == {
        **dict.fromkeys(["n", "_committed_at", "_unchanged", "_old_key"]),
        "_op": "d",
        "id": 1,
        "_position": "0",
        "_txid": 7,
    }


def test_a_key_that_the_target_cannot_hold_has_nothing_to_delete() -> None:
    narrow = pa.schema([("id", pa.int32()), ("n", pa.int64()), ("extra", pa.string())])
    batch = changes({"_op": "c", "id": 1 << 40}, {"_op": "d", "id": 1 << 40}, {"_op": "d", "id": 7})
    fitted, discarded = fit(TOPIC, batch, narrow, Policy.DISCARD_ROW)
    assert (fitted.column("id").to_pylist(), discarded) == ([7], 2)


@pytest.mark.parametrize("policy", [Policy.DISCARD_ROW, Policy.DISCARD_VALUE])
def test_a_key_of_another_kind_is_refused_since_its_deletes_would_be_lost(policy: Policy) -> None:
    texts = pa.schema([("id", pa.string()), ("n", pa.int64())])
    with pytest.raises(SchemaError, match=r"'id' .*(.|\n)*never discarded"):
        fit(TOPIC, changes({"_op": "d", "id": 7}), texts, policy)
    with pytest.raises(SchemaError, match="'id'"):
        fit(TOPIC, changes({"_op": "d", "id": 7}), pa.schema([("n", pa.int64())]), policy)


def test_a_value_of_the_key_is_never_made_null() -> None:
    narrow = pa.schema([("id", pa.int32()), ("n", pa.int64()), ("extra", pa.string())])
    with pytest.raises(SchemaError, match=r"'id' of /lake/orders is int32 .*int64.*discard_value"):
        fit(TOPIC, changes({"_op": "c", "id": 1 << 40}), narrow, Policy.DISCARD_VALUE)
    with pytest.raises(SchemaError, match="'n'"):
        fit(TOPIC, changes({"_op": "c", "id": 1, "n": 1 << 40}), HELD, Policy.DISCARD_VALUE, key=["id", "n"])


def test_the_columns_that_describe_a_change_and_the_key_in_the_schema_pass_through() -> None:
    batch = changes({"_op": "c", "id": 1, "_unchanged": ["n"]})
    fitted, _ = fit(TOPIC, batch, HELD, Policy.DISCARD_VALUE)
    assert fitted.select([each.name for each in CHANGE_FIELDS]) == batch.select([each.name for each in CHANGE_FIELDS])
    assert fitted.schema.metadata == batch.schema.metadata


def test_a_column_of_nulls_has_no_value_to_lose() -> None:
    batch = with_columns({"id": pa.array([1]), "extra": pa.nulls(1), "n": pa.nulls(1)})
    for policy in Policy:
        fitted, discarded = fit(TOPIC, batch, HELD, policy)
        assert (fitted.to_pylist(), discarded) == ([{"id": 1, "n": None}], 0)


def test_the_infinities_of_dates_stay_infinities_as_timestamps() -> None:
    days = pa.array([0, (1 << 31) - 1, None, -(1 << 31) + 1, 1], pa.date32())
    times = [0, (1 << 63) - 1, None, -(1 << 63) + 1, 86_400_000_000]
    target = pa.schema([("at", pa.timestamp("us"))])
    rows, lost = fit("/t", pa.record_batch({"at": days}), target, Policy.EVOLVE)
    assert (rows["at"].cast(pa.int64()).to_pylist(), lost) == (times, 0)
    assert widened(pa.chunked_array([days, days]), pa.timestamp("us")).cast(pa.int64()).to_pylist() == times * 2


WIDE = pa.struct([("a", pa.int64()), ("b", pa.int64())])
NARROW = pa.struct([("a", pa.int64())])


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("policy", [Policy.DISCARD_ROW, Policy.DISCARD_VALUE])
def test_a_struct_loses_only_the_fields_that_the_target_lacks(policy: Policy, is_listed: bool) -> None:
    given_, kept = (pa.list_(each) if is_listed else each for each in (WIDE, NARROW))
    structs = [{"a": 1, "b": None}, {"a": 2, "b": 5}, None, {"a": None, "b": None}]
    values = [each if not is_listed else [each, {"a": 9, "b": None}] for each in structs]
    batch = pa.record_batch([[1, 2, 3, 4], pa.array(values, given_)], names=["id", "n"])
    sliced = pa.concat_batches([batch, batch]).slice(2, 4)  # rows 3, 4, 1, 2: what comes before must not be looked at
    target = pa.schema([("id", pa.int64()), ("n", kept)])
    fitted, discarded = fit(TOPIC, sliced, target, policy)
    assert discarded == 1
    assert fitted.schema.field("n").type == kept
    wanted = [None, {"a": None}, {"a": 1}, *([{"a": 2}] if policy is Policy.DISCARD_VALUE else [])]
    assert fitted.column("n").to_pylist() == [each if not is_listed else [each, {"a": 9}] for each in wanted]


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_a_value_in_a_struct_or_a_list_fits_as_it_does_by_itself(data: st.DataObject) -> None:
    old, new = data.draw(kinds), data.draw(kinds)
    values = pa.array(data.draw(st.lists(st.none() | values_of(old), min_size=1, max_size=5)), old)
    plain, lost = fitted_alone(values, new)
    struct = pa.StructArray.from_arrays([values], names=["x"])
    found, gone = fitted_alone(struct, pa.struct([("x", new)]))
    assert (found.field("x"), gone) == (plain, lost)
    lists = pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), values)
    found, gone = fitted_alone(lists, pa.list_(new))
    if widens(old, new) or fitted_alone(values, new)[0].null_count < len(values):
        assert (found.flatten(), gone) == (plain, lost)


def fitted_alone(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, int]:
    batch = pa.record_batch([values], names=["n"])
    fitted, discarded = fit(TOPIC, batch, pa.schema([("n", kind)]), Policy.DISCARD_VALUE)
    return fitted.column("n"), discarded
