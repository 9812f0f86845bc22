"""The generator: the same rows however they are cut, dense ids, a steady rate."""

import pickle
import time

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.connectors.generator import _COLUMNS, Generator, GeneratorConfig, IdRange, NextIds
from penstock.schema import SchemaProvider, key_of
from penstock.source import ReadLimit

ALL = tuple(_COLUMNS)
PINNED = {"id": "123", "customer": "19821", "name": "birch quarry", "amount": "21590.97", "active": "False"}


def make(**options):
    return Generator(GeneratorConfig(**options))


def rows(source, start, end):
    """Rows of a range per stream, in order, as a fresh process would read them."""
    tables = {}
    for split in source.split(start, end):
        copy = pickle.loads(pickle.dumps(source))
        for batch in copy.read(pickle.loads(pickle.dumps(split))):
            tables.setdefault(batch.stream, []).append(batch.records)
    return {stream: pa.Table.from_batches(batches).combine_chunks() for stream, batches in tables.items()}


def at(**ids):
    return NextIds(ids=ids)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 500), min_size=3, max_size=3).map(sorted),
    batch_rows=st.integers(1, 200),
    parallelism=st.integers(1, 5),
)
def test_a_row_does_not_depend_on_how_its_range_is_cut(cuts, batch_rows, parallelism):
    a, b, c = (at(x=cut) for cut in cuts)
    source = make(streams=["x"], batch_rows=batch_rows, columns=ALL)
    source._parallelism = parallelism
    whole = make(streams=["x"], columns=ALL)
    parts = [table for part in (rows(source, a, b), rows(source, b, c)) for table in part.values()]
    expected = rows(whole, at(), at(x=500))["x"].slice(cuts[0], cuts[2] - cuts[0]).combine_chunks()
    assert sum(part.num_rows for part in parts) == expected.num_rows
    if parts:
        assert pa.concat_tables(parts).combine_chunks().equals(expected)


@settings(max_examples=50, deadline=None)
@given(
    spans=st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1),
    batch_rows=st.integers(1, 100),
    parallelism=st.integers(1, 8),
)
def test_splits_cover_a_range_exactly_and_are_not_many_more_than_the_tasks(spans, batch_rows, parallelism):
    source = make(batch_rows=batch_rows)
    source._parallelism = parallelism
    start = NextIds(ids={stream: first for stream, (first, _) in spans.items()})
    end = NextIds(ids={stream: first + count for stream, (first, count) in spans.items()})
    splits = source.split(start, end)
    found = {(each.stream, id) for each in splits for id in range(each.start, each.end)}
    assert found == {(s, id) for s, (first, count) in spans.items() for id in range(first, first + count)}
    assert sum(each.end - each.start for each in splits) == len(found)
    assert all(each.start < each.end for each in splits)
    assert len(splits) <= parallelism + 2 * len(spans)


def test_every_column_has_its_type_and_the_nullable_ones_have_nulls():
    source = make(columns=ALL)
    batch = next(source.read(IdRange("rows", 0, 5000))).records
    batch.validate(full=True)
    assert batch.schema == source.schema()["rows"]
    assert key_of(batch.schema) == ["id"]
    assert batch["id"].to_pylist() == list(range(5000))
    assert {name for name in ALL if batch[name].null_count} == {"note", "score"}
    assert all(len(set(map(str, batch[name].to_pylist()))) > 1 for name in ALL)
    assert len(set(batch["code"].to_pylist())) == 5000
    assert batch["at"].to_pylist() == sorted(batch["at"].to_pylist())
    assert min(batch["amount"].to_pylist()) < 0 < max(batch["amount"].to_pylist())


def test_a_row_is_the_same_in_every_release():
    batch = next(make(seed=7).read(IdRange("rows", 123, 124))).records
    row = batch.select(["id", "customer", "name", "amount", "active"]).to_pylist()[0]
    assert {key: str(value) for key, value in row.items()} == PINNED


def test_seed_and_stream_change_the_rows_but_not_the_ids():
    one, two = make(seed=1, streams=["a", "b"]), make(seed=2, streams=["a", "b"])
    read = [rows(source, at(), at(a=100, b=100)) for source in (one, two)]
    tables = [read[0]["a"], read[0]["b"], read[1]["a"]]
    assert [t["id"].to_pylist() for t in tables] == [list(range(100))] * 3
    assert len({str(t["customer"].to_pylist()) for t in tables}) == 3


def test_it_ends_after_its_rows_and_keeps_to_the_limit():
    source = make(rows=10, streams=["a", "b", "c"])
    position, seen = source.initial(), []
    while (end := source.latest(position, ReadLimit(rows=4))) != position:
        seen.append(sum(end.ids.values()) - sum(position.ids.values()))
        position = end
    assert position.ids == {"a": 10, "b": 10, "c": 10}
    assert max(seen) == 4
    assert source.lag() == 0


def test_no_stream_starves_under_a_limit_smaller_than_the_streams():
    source = make(streams=["a", "b", "c"])
    position = source.initial()
    for _ in range(9):
        position = source.latest(position, ReadLimit(rows=1))
    assert position.ids == {"a": 3, "b": 3, "c": 3}


def test_an_endless_generator_still_answers_when_nothing_limits_it():
    source = make()
    end = source.latest(source.initial(), ReadLimit(parallelism=2))
    assert 0 < end.ids["rows"] < 10_000_000
    assert source.lag() is None


def test_a_rate_holds_across_a_restart_that_knows_only_the_position(monkeypatch):
    clock = [1_000_000_000_000_000_000]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])
    options = {"rows_per_sec": 100, "streams": ["a", "b"]}
    position = make(**options).latest(NextIds(), ReadLimit())
    assert position.ids == {"a": 1, "b": 1}
    clock[0] += 2_000_000_000
    source = make(**options)
    position = source.latest(NextIds.model_validate_json(position.model_dump_json()), ReadLimit(rows=50))
    assert position.ids == {"a": 26, "b": 26}
    assert source.lag() == 350
    position = source.latest(position, ReadLimit())
    assert position.ids == {"a": 201, "b": 201}
    assert source.latest(position, ReadLimit()) == position
    clock[0] += 10_000_000
    assert source.latest(position, ReadLimit()).ids == {"a": 202, "b": 202}


def test_a_lower_rate_after_a_restart_does_not_stall(monkeypatch):
    clock = [1_000_000_000_000_000_000]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])
    position = make(rows_per_sec=1000).latest(NextIds(), ReadLimit())
    clock[0] += 60_000_000_000
    position = make(rows_per_sec=1000).latest(position, ReadLimit())
    assert position.ids == {"rows": 60_001}
    clock[0] += 2_000_000_000
    assert make(rows_per_sec=1).latest(position, ReadLimit()).ids == {"rows": 60_003}


def test_a_drain_ends_at_what_was_due_when_it_began(monkeypatch):
    clock = [1_000_000_000_000_000_000]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])
    source = make(rows_per_sec=10)
    frozen = source.latest(NextIds(), ReadLimit())
    clock[0] += 1_000_000_000
    end = source.latest(NextIds(), ReadLimit(rows=100, until=frozen))
    assert end.ids == {"rows": 1}


def test_wrong_columns_and_streams_are_refused():
    for options in ({"columns": ["nope"]}, {"columns": []}, {"streams": []}, {"streams": ["a", "a"]}, {"rows": -1}):
        with pytest.raises(ValidationError):
            GeneratorConfig(**options)


def test_it_provides_an_authoritative_schema():
    source = make()
    assert isinstance(source, SchemaProvider)
    assert source.is_authoritative()
    assert source.provide_schema() == source.schema()
