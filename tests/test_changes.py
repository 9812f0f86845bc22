"""The collapse of a changelog, held against a table that really lived through the changes."""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
import random
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.changes import CHANGE_FIELDS
from penstock.changes import keys as keys_module
from penstock.changes import streamed as streamed_module
from penstock.changes.checks import check_changes
from penstock.changes.collapse import collapse
from penstock.changes.keys import Keys
from penstock.changes.old_key import moment_texts, pack_keys, unpack_keys
from penstock.changes.streamed import collapse_parts
from penstock.errors import DataError, SchemaError
from thorough import examples

SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("doc", pa.string()), ("img", pa.string())])
EVENT = pa.schema([*SCHEMA, *CHANGE_FIELDS])


class Lived:
    """A table with unique keys that writes down what happens to it, as a database does."""

    def __init__(self):
        self.rows = {}
        self.log = []

    def play(self, op, key, other, values):
        """One statement; what the table would refuse does not happen."""
        if op == "t":
            self.rows.clear()
            return self._note("t", {})
        if op == "c" and key not in self.rows:
            self.rows[key] = {"k": key, **values}
            return self._note("c", self.rows[key])
        if op == "r" and key in self.rows:
            return self._note("r", self.rows[key])
        if op == "d" and self.rows.pop(key, None):
            return self._note("d", {"k": key})
        if op in "um" and key in self.rows:
            row = {**self.rows[key], **{name: value for name, value in values.items() if value is not None}}
            unchanged = [name for name in ("doc", "img") if values[name] is None]
            event = {**row, **dict.fromkeys(unchanged)}
            if op == "m" and other not in self.rows:
                del self.rows[key]
                self.rows[other] = {**row, "k": other}
                return self._note("u", {**event, "k": other}, unchanged, json.dumps({"k": key}))
            self.rows[key] = row
            return self._note("u", event, unchanged)
        return None

    def _note(self, op, row, unchanged=None, old_key=None):
        position = f"{len(self.log):06d}"
        self.log.append({**row, "_op": op, "_position": position, "_unchanged": unchanged or None, "_old_key": old_key})


def apply(stored: pa.Table, changes, key=("k",), columns=None) -> pa.Table:
    """What a sink does with a collapsed epoch, by the contract of `Collapsed`."""
    result = collapse(changes, key, columns)
    if result.truncated:
        stored = stored.slice(0, 0)
    rows = filled(result, stored)
    stays = [place < 0 for place in Keys(result.keys()).find(stored.select(key))]
    return pa.concat_tables([stored.filter(pa.array(stays, pa.bool_())), rows], promote_options="default")


def filled(result, stored):
    """All rows to write; read in two shares."""
    count = result.upserts.num_rows
    rows = result.rows(stored)
    return pa.concat_tables([*rows(0, count // 3), *rows(count // 3, count)])


def by_key(table: pa.Table, key="k"):
    rows = table.to_pylist()
    assert len({row[key] for row in rows}) == len(rows), "a key stands twice"
    return {row[key]: row for row in rows}


KEYS = st.integers(0, 4)
STATEMENTS = st.lists(
    st.tuples(
        st.sampled_from("cccuuuummmmddrt"),
        KEYS,
        KEYS,
        st.fixed_dictionaries(
            {
                "n": st.integers(0, 9),
                "doc": st.none() | st.sampled_from("abcdef"),
                "img": st.none() | st.sampled_from("uvwxyz"),
            }
        ),
    ),
    max_size=40,
)
NOTHING = {"n": 0, "doc": None, "img": None}


@settings(max_examples=examples(400), deadline=None)
@given(STATEMENTS, st.lists(st.integers(0, 40), max_size=3), st.randoms(use_true_random=False))
@example(
    [("c", k, 0, {**NOTHING, "doc": str(k)}) for k in (1, 2)]
    + [("m", a, b, NOTHING) for a, b in ((1, 3), (2, 1), (3, 2))],
    [2],
    None,
)
def test_epochs_of_changes_make_of_a_target_what_the_source_is(statements, cuts, shuffle):
    """Wherever the log is cut into epochs, and in whatever order an epoch's rows come."""
    source = Lived()
    for statement in statements:
        source.play(*statement)
    target = SCHEMA.empty_table()
    edges = [0, *sorted(min(cut, len(source.log)) for cut in cuts), len(source.log)]
    for begin, end in itertools.pairwise(edges):
        events = source.log[begin:end]
        if shuffle is not None:
            shuffle.shuffle(events)
        half = len(events) // 2
        tables = [pa.Table.from_pylist(part, schema=EVENT) for part in (events[:half], events[half:])]
        target = apply(target, tables)
    assert by_key(target) == source.rows


class Pieces:
    """Changes that are read some at a time."""

    def __init__(self, table, rows):
        self.schema = table.schema
        self._pieces = [table.slice(first, rows) for first in range(0, table.num_rows, rows)]
        self.sizes = [piece.num_rows for piece in self._pieces]

    def read(self, columns, pieces=None):
        found = self._pieces if pieces is None else [self._pieces[place] for place in pieces]
        yield from (piece.select(columns) for piece in found or [self.schema.empty_table()][: pieces is None])


def with_two_columns_as_key(event):
    """The same change of a row whose key is a number and a text."""
    event = {**event, "shop": None if event.get("k") is None else f"shop {event['k'] % 3}"}
    if event["_old_key"] is not None:
        old = json.loads(event["_old_key"])
        event["_old_key"] = json.dumps({**old, "shop": f"shop {old['k'] % 3}"})
    return event


@settings(max_examples=examples(300), deadline=None)
@given(
    statements=STATEMENTS,
    two_columns=st.booleans(),
    says_all=st.booleans(),
    shuffle=st.none() | st.randoms(use_true_random=False),
    held_rows=st.integers(0, 12),
    bucket_rows=st.integers(1, 12),
    piece_rows=st.integers(1, 9),
    cut=st.integers(0, 40),
)
def test_changes_too_many_to_be_held_come_to_the_same_as_those_that_are(
    statements, two_columns, says_all, shuffle, held_rows, bucket_rows, piece_rows, cut
):
    source = Lived()
    for op, key, other, values in statements:
        source.play(op, key, other, {n: "" if v is None else v for n, v in values.items()} if says_all else values)
    events = [with_two_columns_as_key({n: None if v == "" else v for n, v in e.items()}) for e in source.log]
    if shuffle is not None:
        shuffle.shuffle(events)
    key = ["k", "shop"] if two_columns else ["k"]
    schema = pa.schema([pa.field("shop", pa.string()), *EVENT])
    tables = [pa.Table.from_pylist(part, schema=schema) for part in (events[:cut], events[cut:])]
    own = pa.schema([schema.field("shop"), *SCHEMA])
    held = collapse(tables, key, own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed_module, "HELD_ROWS", held_rows)
        patch.setattr(streamed_module, "BUCKET_ROWS", bucket_rows)
        streamed = collapse_parts([Pieces(table, piece_rows) for table in tables], key, own)
    assert (streamed.picked is not None) == (len(events) > held_rows)
    assert streamed.truncated == held.truncated
    assert streamed.upserts.num_rows == held.upserts.num_rows
    assert by_key(streamed.deletes) == by_key(held.deletes)
    assert streamed.kept.keys() == held.kept.keys()
    places = [{**row, "doc": f"doc {k}", "img": None} for k in range(4) for row in [{"k": k, "shop": f"shop {k % 3}"}]]
    for stored in (None, pa.Table.from_pylist(places, schema=own)):
        assert rows_of(streamed, stored) == rows_of(held, stored)


def rows_of(result, stored):
    return by_key(filled(result, stored)) if result.upserts.num_rows else {}


def test_rows_that_are_no_changes_and_too_many_to_be_held_are_taken_in_their_order(monkeypatch):
    monkeypatch.setattr(streamed_module, "HELD_ROWS", 10)
    monkeypatch.setattr(streamed_module, "BUCKET_ROWS", 30)
    dice = random.Random(5)
    table = pa.table({"k": [dice.randrange(30) for _ in range(200)], "n": range(200), "_old_key": ["{}"] * 200})
    streamed = collapse_parts([Pieces(table.slice(0, 70), 9), Pieces(table.slice(70), 16)], ["k"], table.schema)
    assert streamed.picked is not None
    assert by_key(pa.concat_tables(streamed.rows(None)(0, 30))) == by_key(collapse(table, ["k"]).upserts)


@settings(max_examples=examples(200), deadline=None)
@given(STATEMENTS, st.integers(0, 40))
def test_changes_that_a_target_has_seen_already_may_come_again(statements, seen):
    """A first copy that was read after the log began; key changes apart, which a copy cannot tell from new rows."""
    source = Lived()
    for op, *rest in statements[:seen]:
        source.play("u" if op == "m" else op, *rest)
    copy = pa.Table.from_pylist(list(source.rows.values()), schema=SCHEMA)
    for op, *rest in statements[seen:]:
        source.play("u" if op == "m" else op, *rest)
    assert by_key(apply(copy, pa.Table.from_pylist(source.log, schema=EVENT))) == source.rows


def log(*events, schema=EVENT):
    rows = [{"_position": f"{place:04d}", **event} for place, event in enumerate(events)]
    return pa.Table.from_pylist(rows, schema=schema)


def stored(*rows):
    return pa.Table.from_pylist([{"k": k, "n": 0, "doc": doc, "img": "i"} for k, doc in rows], schema=SCHEMA)


def test_the_collapse_says_what_is_kept_and_where_it_is_found():
    result = collapse(
        log(
            {"_op": "u", "k": 2, "n": 5, "img": "new", "_unchanged": ["doc"], "_old_key": '{"k":1}'},
            {"_op": "u", "k": 2, "n": 6, "_unchanged": ["doc", "img"]},
            {"_op": "c", "k": 9, "n": 1, "doc": "x", "img": "y"},
        ),
        ["k"],
    )
    assert result.upserts.to_pylist() == [
        {"k": 2, "n": 6, "doc": None, "img": "new"},
        {"k": 9, "n": 1, "doc": "x", "img": "y"},
    ]
    assert result.deletes.to_pylist() == [{"k": 1}]
    assert {name: mask.tolist() for name, mask in result.kept.items()} == {"doc": [True, False]}
    assert result.origins.to_pylist() == [{"k": 2, "_row": 0}, {"k": 1, "_row": 0}]
    assert filled(result, stored((1, "old"))).column("doc").to_pylist() == ["old", "x"]


def test_a_row_that_was_deleted_and_comes_back_keeps_nothing():
    events = log({"_op": "d", "k": 1}, {"_op": "c", "k": 1, "n": 1, "_unchanged": ["doc"]})
    assert by_key(apply(stored((1, "old")), events))[1]["doc"] is None


def test_a_truncate_voids_what_stood_before_it_in_the_epoch_and_in_the_target():
    events = log(
        {"_op": "c", "k": 5}, {"_op": "t"}, {"_op": "c", "k": 1, "n": 1, "_unchanged": ["doc"]}, {"_op": "d", "k": 7}
    )
    result = collapse(events, ["k"])
    assert result.truncated
    assert not result.kept
    assert by_key(apply(stored((1, "old"), (2, "x")), events)) == {1: {"k": 1, "n": 1, "doc": None, "img": None}}


def test_an_old_key_that_is_the_key_moves_nothing():
    events = log({"_op": "u", "k": 1, "n": 1, "_unchanged": ["doc"], "_old_key": '{"k": 1}'})
    assert by_key(apply(stored((1, "old")), events))[1]["doc"] == "old"


def test_columns_that_an_older_event_did_not_know_are_unchanged_and_not_null():
    old = log({"_op": "u", "k": 1, "n": 3}, schema=pa.schema([SCHEMA.field("k"), SCHEMA.field("n"), *CHANGE_FIELDS]))
    new = log(
        {"_op": "u", "_position": "0005", "k": 2, "n": 4, "doc": "new"},
        schema=pa.schema([SCHEMA.field("k"), SCHEMA.field("n"), SCHEMA.field("doc"), *CHANGE_FIELDS]),
    )
    rows = by_key(apply(stored((1, "old"), (2, "old")), [old, new], columns=SCHEMA))
    assert rows == {1: {"k": 1, "n": 3, "doc": "old", "img": "i"}, 2: {"k": 2, "n": 4, "doc": "new", "img": "i"}}


def test_rows_that_are_no_changes_are_taken_in_their_order():
    rows = pa.table({"k": [1, 2, 1], "n": [1, 2, 3], "_op_count": [7, 8, 9]})
    assert by_key(collapse(rows, ["k"]).upserts) == {
        1: {"k": 1, "n": 3, "_op_count": 9},
        2: {"k": 2, "n": 2, "_op_count": 8},
    }


def test_no_changes_come_to_nothing():
    result = collapse(log(), ["k"])
    assert (result.upserts.num_rows, result.deletes.num_rows, result.truncated) == (0, 0, False)


UTC = datetime.UTC
KINDS = {
    "int32": (pa.int32(), [1, -2, 3], [1, -2, 3]),
    "text": (pa.string(), ["a", "", "é"], ["a", "", "é"]),
    "large text": (pa.large_string(), ["a", "", "é"], ["a", "", "é"]),
    "decimal": (pa.decimal128(38, 4), [decimal.Decimal("1.1000"), decimal.Decimal(2), decimal.Decimal("-1E20")],
                ["1.1", 2, "-100000000000000000000"]),
    "timestamp": (pa.timestamp("us", "UTC"), [datetime.datetime(2026, 1, 1, 0, 0, 0, n, UTC) for n in (1, 2, 3)],
                  [f"2026-01-01 00:00:00.00000{n}Z" for n in (1, 2, 3)]),
    "naive": (pa.timestamp("us"), [datetime.datetime(2026, 1, 1, n) for n in (1, 2, 3)],
              [f"2026-01-01 0{n}:00:00" for n in (1, 2, 3)]),
    "date": (pa.date32(), [datetime.date(2026, 1, n) for n in (1, 2, 3)], [f"2026-01-0{n}" for n in (1, 2, 3)]),
    "binary": (pa.binary(), [b"", b"\x00", b"\xff\xfe"], ["", "00", "\\xfffe"]),
    "bool": (pa.bool_(), [True, False, None], [True, False]),
    "double": (pa.float64(), [1.5, -0.25, 1e300], [1.5, -0.25, 1e300]),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_key_may_have_any_type_alone_and_beside_another(name):
    kind, values, texts = KINDS[name]
    values = [value for value in values if value is not None]
    schema = pa.schema([("a", kind), ("b", pa.string()), ("n", pa.int64()), *CHANGE_FIELDS])
    events = [{"_op": "c", "a": a, "b": b, "n": n} for n in (1, 2) for a in values for b in "xy"]
    for key in (["a"], ["a", "b"], ["b", "a"]):
        result = collapse(log(*events, schema=schema), key)
        assert result.upserts.column("n").to_pylist() == [2] * (len(values) * (2 if "b" in key else 1))
        assert Keys(result.keys()).find(result.keys()).tolist() == list(range(len(result.keys())))
    assert (
        unpack_keys(pa.array([json.dumps({"a": text}) for text in texts]), pa.schema([("a", kind)]))
        .column("a")
        .to_pylist()
        == values
    )
    move = {"_op": "u", "a": values[0], "b": "z", "n": 7, "_old_key": json.dumps({"a": texts[0], "b": "x"})}
    result = collapse(log(*events, move, schema=schema), ["a", "b"])
    assert result.deletes.to_pylist() == [{"a": values[0], "b": "x"}]


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("s")])
def test_old_keys_hold_every_date_that_their_type_does(kind):
    storage = pa.int32() if pa.types.is_date(kind) else pa.int64()
    end, unit = (2**31 - 1, 1) if pa.types.is_date(kind) else (2**63 - 1, 86_400 * (10**6 if kind.unit == "us" else 1))
    days = [0, -719_528, -719_529, -735_160, 2_932_896, 2_932_897, 50_000_000, -50_000_000]
    values = pa.array([end, -end, *(day * unit for day in days)], storage).view(kind)
    texts = moment_texts(values)
    zone = "" if pa.types.is_date(kind) or not kind.tz else "Z"
    midnight = "" if pa.types.is_date(kind) else " 00:00:00" if kind.unit == "s" else " 00:00:00.000000"
    years = ["1970-01-01", "0000-01-01", "-0001-12-31", "-0043-03-15", "9999-12-31", "10000-01-01"]
    assert texts.to_pylist()[:8] == ["infinity", "-infinity", *(f"{year}{midnight}{zone}" for year in years)]
    keys = unpack_keys(pa.array([json.dumps({"k": text}) for text in texts.to_pylist()]), pa.schema([("k", kind)]))
    assert keys.column("k").combine_chunks() == values


def test_a_set_of_keys_tells_what_is_in_it():
    keys = Keys(pa.table({"a": [1, 2], "b": ["x", "y"]}))
    rows = pa.table({"a": [2, 1, 2, 3, None], "b": ["y", "y", "x", "x", "x"]})
    assert keys.find(rows).tolist() == [1, -1, -1, -1, -1]
    assert Keys(pa.table({"a": pa.array([], pa.int64())})).find(pa.table({"a": [1]})).tolist() == [-1]


@pytest.mark.parametrize("same_hash", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        pa.array([3, None, -1, 7, 2**62], pa.int64()),
        pa.array(["", "a", None, "12345678", "123456789", "12345678X12345678Y", "12345678Y12345678X", "ä" * 40]),
        pa.array([0.0, None, 1.5, float("nan"), float("inf")]),
        pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("-1.10")], pa.decimal128(20, 2)),
        pa.array([True, None, False]),
    ],
    ids=lambda values: str(values.type),
)
def test_keys_are_found_in_any_part_of_a_table_whatever_their_hashes(monkeypatch, values, same_hash):
    if same_hash:
        monkeypatch.setattr(keys_module, "hashes_of", lambda keys: np.zeros(keys.num_rows, np.uint64))
    column = pa.chunked_array([values, values.slice(1), values.slice(0, 2)])
    rows = pa.table({"a": column, "b": pa.chunked_array([pa.array([1] * len(column))])})
    keys = rows.filter(column.is_valid()).slice(1)
    texts = [str(value) for value in keys.column("a").to_pylist()]
    expected = [-1 if value is None else texts.index(str(value)) for value in column.to_pylist()]
    assert Keys(keys).find(rows).tolist() == expected
    assert Keys(keys).find(pa.concat_tables([rows] * 9)).tolist() == expected * 9
    assert [Keys(keys).find(rows.slice(place, 1)).item() for place in range(len(rows))] == expected


NAN = float("nan")
SAME = {
    "zeros": (pa.field("k", pa.float64()), [0.0, -0.0], 1.0),
    "single zeros": (pa.field("k", pa.float32()), [-0.0, 0.0], 1.0),
    "no numbers": (pa.field("k", pa.float64()), [NAN, -NAN], 0.0),
    "numbers": (pa.field("k", pa.string(), metadata={keys_module.EQUALITY: b"number"}), ["2.0", "2.00", "2"], "20"),
    "padded": (pa.field("k", pa.string(), metadata={keys_module.EQUALITY: b"padded"}), ["a", "a "], " a"),
    "intervals": (pa.field("k", pa.string(), metadata={keys_module.EQUALITY: b"interval"}), ["30 days", "1 mon"], "1 day"),
    "documents": (pa.field("k", pa.string(), metadata={keys_module.EQUALITY: b"json"}), ['{"a": 1.0}', '{"a":1}'], '"1"'),
}  # fmt: skip


@pytest.mark.parametrize("held_rows", [100, 0])
@pytest.mark.parametrize("name", SAME)
def test_keys_that_are_the_same_are_one_key_however_they_are_written(monkeypatch, name, held_rows):
    field, same, other = SAME[name]
    monkeypatch.setattr(streamed_module, "HELD_ROWS", held_rows)
    monkeypatch.setattr(streamed_module, "BUCKET_ROWS", 1)
    own = pa.schema([field, pa.field("n", pa.int64()), pa.field("doc", pa.string())])
    events = [{"_op": "c", "k": other, "n": -1}, *({"_op": "u", "k": key, "n": n} for n, key in enumerate(same))]
    events.append({"_op": "u", "k": same[0], "n": 9, "_unchanged": ["doc"], "_old_key": json.dumps({"k": same[-1]})})
    table = log(*events, schema=pa.schema([*own, *CHANGE_FIELDS]))
    result = collapse_parts([Pieces(table, 2)], ["k"], own)
    assert result.upserts.num_rows == 2
    assert result.deletes.num_rows == 0
    stored = pa.Table.from_pylist([{"k": same[-1], "n": 0, "doc": "kept"}], schema=own)
    assert [place >= 0 for place in Keys(stored.select(["k"]), result.equality).find(table.select(["k"]))] == [
        False, *[True] * (len(same) + 1)
    ]  # fmt: skip


def test_a_field_without_an_equality_compares_texts_as_they_are_written():
    table = log(
        *({"_op": "c", "doc": text} for text in ("2.0", "2.00")), schema=pa.schema([*list(SCHEMA)[2:3], *CHANGE_FIELDS])
    )
    assert collapse(table, ["doc"]).upserts.num_rows == 2


def test_an_old_key_keeps_the_sign_of_zero_and_what_is_no_number():
    values = pa.array([0.0, -0.0, NAN, float("inf"), 1e300])
    found = unpack_keys(pack_keys(["k"], [values]), pa.schema([("k", pa.float64())])).column("k")
    assert list(map(repr, found.to_pylist())) == list(map(repr, values.to_pylist()))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"_op": "c", "k": None}, "key column 'k'"),
        ({"_op": "x", "k": 1}, "`_op` x"),
        ({"_op": "u", "k": 1, "_old_key": "{}"}, "_old_key"),
        ({"_op": "u", "k": 1, "_old_key": '{"k": "x"}'}, "_old_key"),
        ({"_op": "u", "k": 1, "_old_key": '{"k": null}'}, "key column 'k'"),
        ({"_op": "u", "k": 1, "_old_key": "7"}, "_old_key"),
    ],
    ids=str,
)
def test_changes_that_could_not_be_applied_are_refused(event, message):
    with pytest.raises(DataError, match=message):
        check_changes(log(event), ["k"])


def test_changes_that_can_be_applied_pass():
    check_changes(log({"_op": "t"}, {"_op": "u", "k": 1, "_old_key": '{"k": 2}'}, {"_op": "d", "k": 1}), ["k"])
    check_changes(pa.table({"k": [1]}), ["k"])


def test_changes_without_positions_are_not_taken_for_plain_rows():
    with pytest.raises(SchemaError, match="_position"):
        check_changes(pa.table({"k": [1], "_op": ["d"]}), ["k"])


def test_changes_and_plain_rows_in_one_epoch_are_refused():
    with pytest.raises(SchemaError, match="PEN-4002"):
        collapse([log({"_op": "c", "k": 1}), pa.table({"k": [1]})], ["k"])


def test_the_cost_of_a_row_is_far_below_that_of_python_per_row():
    count = 200_000
    events = pa.table(
        {
            "k": pa.array(range(count)),
            "n": pa.array(range(count)),
            "_op": pa.array(["u"] * count),
            "_position": pa.array([f"{n:012d}" for n in range(count)]),
            "_unchanged": pa.array([["doc"]] * count),
        }
    )
    begin = time.process_time()
    rows = collapse(events.append_column("doc", pa.nulls(count, pa.string())), ["k"])
    assert time.process_time() - begin < 1.0  # 0.06 to 0.12 s in five runs on two busy cores
    assert rows.kept["doc"].all()
