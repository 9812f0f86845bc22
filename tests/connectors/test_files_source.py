"""The files source: every file once, whatever its name and time; the same range, the same rows; bad rows told apart."""

import gzip
import json
import os
import pickle
import shutil
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.files import Files, FilesConfig, Inventoried, json_lines, readers, splits
from penstock.connectors.files.json_lines import misfit
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.connectors.files.types import csv_misfits
from penstock.errors import ConfigError, DataError, FatalError, RangeGone, RetryableError, SchemaError
from penstock.formats.exact import ROUNDED
from penstock.pipeline import Pipeline, Processing
from penstock.pipeline.routing import Router
from penstock.runtime import supervisor
from penstock.runtime.telemetry import Telemetry
from penstock.schema import SchemaInferable, SchemaProvider
from penstock.schema.typenames import arrow_type
from penstock.source import HealthState, Note, ReadLimit, SourceBatch, SourceContext
from penstock.testing import ForkEngine
from thorough import examples

LIMIT = ReadLimit(rows=1_000_000)


def put(path, content, age_secs=60.0):
    """A file that was finished some time ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, pa.Table):
        pq.write_table(content, path, row_group_size=10)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    then = time.time() - age_secs
    os.utime(path, (then, then))
    return path


def ids(*numbers):
    return [{"id": number} for number in numbers]


@pytest.fixture
def landing(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def make(path, state=None, **options):
    """A source as a fresh process has it."""
    source = Files(FilesConfig(path=path, scan_interval_ms=0, **options))
    source.open(SourceContext(state))
    return source


@pytest.fixture
def source(landing, tmp_path):
    return make(landing, tmp_path / "state")


def again(source):
    """What a new process knows: the configuration and the state directory."""
    copy = pickle.loads(pickle.dumps(source))
    copy.open(source.context)
    return copy


def stored(position):
    """A position as it comes back out of a manifest."""
    return Inventoried.model_validate(json.loads(json.dumps(position.model_dump(mode="json"))))


def items(source, start, end):
    return [
        item for split in pickle.loads(pickle.dumps(source.split(start, end))) for item in again(source).read(split)
    ]


def rows(source, start, end):
    return [
        row for item in items(source, start, end) if isinstance(item, SourceBatch) for row in item.records.to_pylist()
    ]


def drained(source, start=None, limit=LIMIT):
    """All rows from `start` on, epoch by epoch, each planned and read by a process of its own, and where that ends."""
    position, found = start or Inventoried(), []
    while (end := stored(again(source).latest(position, limit))) != position:
        found += rows(again(source), position, end)
        position = end
    return found, position


def numbers(found):
    return sorted(row["id"] for row in found)


def failing(source, split):
    """The good rows of a split and the error at its end."""
    found = []
    try:
        for item in source.read(split):
            found += item.records.to_pylist() if isinstance(item, SourceBatch) else []
    except DataError as error:
        return found, pickle.loads(pickle.dumps(error))
    pytest.fail("the split has no bad rows")


# -- each file once ----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    arrivals=st.lists(
        st.lists(st.tuples(st.text("ab0", min_size=1, max_size=4), st.integers(2, 10**6)), max_size=4), max_size=5
    ),
    with_state=st.booleans(),
    max_files=st.integers(1, 3),
)
def test_every_file_is_read_once_in_whatever_order_names_and_times_arrive(arrivals, with_state, max_files):
    with tempfile.TemporaryDirectory() as home:
        landing = Path(home, "in")
        landing.mkdir()
        source = make(landing, Path(home, "state") if with_state else None, max_files_per_epoch=max_files)
        position, found, written, edges = Inventoried(), [], {}, [Inventoried()]
        for arrival in arrivals:
            for name, age in arrival:
                if name not in written:
                    written[name] = len(written)
                    put(landing / f"{name}.jsonl", ids(written[name]), age)
            more, position = drained(source, position)
            found += more
            edges.append(position)
        assert numbers(found) == list(range(len(written)))
        assert rows(source, Inventoried(), position) == found
        for middle in edges[1:-1]:
            assert rows(source, Inventoried(), middle) + rows(source, middle, position) == found


def test_a_late_file_with_an_older_name_and_time_is_read(source, landing):
    put(landing / "m.jsonl", ids(1), age_secs=10)
    _, position = drained(source)
    put(landing / "a.jsonl", ids(2), age_secs=1000)
    assert drained(source, position)[0] == ids(2)


def test_a_file_that_lands_between_planning_and_splitting_is_not_in_the_range(source, landing):
    put(landing / "b.jsonl", ids(1))
    end = source.latest(Inventoried(), LIMIT)
    put(landing / "a.jsonl", ids(2), age_secs=1000)
    assert rows(again(source), Inventoried(), stored(end)) == ids(1)
    assert drained(source, end)[0] == ids(2)


def test_a_position_stays_small_and_is_the_same_when_nothing_happens(source, landing):
    for number in range(200):
        put(landing / f"{number}.jsonl", ids(number))
    _, position = drained(source)
    assert len(position.model_dump_json()) < 100
    assert source.latest(position, LIMIT) == position


def test_a_process_killed_after_the_inventory_was_written_loses_and_doubles_nothing(source, landing):
    put(landing / "a.jsonl", ids(1))
    first, position = drained(source)
    put(landing / "b.jsonl", ids(2))
    child = os.fork()
    if not child:
        source.latest(position, LIMIT)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    put(landing / "0.jsonl", ids(3), age_secs=1000)
    second, _ = drained(source, position)
    assert first + second == ids(1, 2, 3)


def test_an_inventory_torn_at_any_byte_loses_and_doubles_nothing(source, landing, tmp_path):
    put(landing / "a.jsonl", ids(1))
    _, position = drained(source)
    (inventory,) = (tmp_path / "state").iterdir()
    safe = inventory.stat().st_size
    put(landing / "b.jsonl", [{"id": 2, "more": "x"}])
    put(landing / "c.jsonl", ids(3))
    source.latest(position, LIMIT)
    whole = inventory.read_bytes()
    for length in range(safe, len(whole) + 1, 7):
        inventory.write_bytes(whole[:length] + (b"\0" * 5 if length % 2 else b""))
        found, end = drained(source, position)
        assert numbers(found) == [2, 3]
        assert rows(source, position, end) == found


def test_a_lost_or_shortened_inventory_is_fatal_and_never_a_silent_new_start(source, landing, tmp_path):
    put(landing / "a.jsonl", ids(1))
    _, position = drained(source)
    (inventory,) = (tmp_path / "state").iterdir()
    whole = inventory.read_bytes()
    inventory.write_bytes(whole[:-3])
    with pytest.raises(FatalError, match="PEN-5011"):
        again(source).latest(position, LIMIT)
    inventory.write_bytes(b"something else")
    with pytest.raises(FatalError, match="PEN-5011"):
        again(source).latest(position, LIMIT)
    inventory.write_bytes(whole.replace(b'"format":1', b'"format":9'))
    with pytest.raises(FatalError, match="PEN-5006"):
        again(source).latest(position, LIMIT)
    inventory.unlink()
    with pytest.raises(FatalError, match="PEN-5011"):
        again(source).split(Inventoried(), position)


def test_starting_over_reads_what_is_there_now(source, landing):
    put(landing / "a.jsonl", ids(1))
    put(landing / "b.jsonl", ids(2))
    drained(source)
    (landing / "a.jsonl").unlink()
    assert drained(source)[0] == ids(2)


def test_without_a_state_directory_the_position_itself_lists_the_files(landing):
    source = make(landing)
    put(landing / "a.jsonl", ids(1))
    first, position = drained(source)
    put(landing / "0.jsonl", ids(2))
    assert [row["file"] for row in position.listed if "file" in row] == ["a.jsonl"]
    assert first + drained(source, position)[0] == ids(1, 2)


def test_the_inventory_may_live_elsewhere(landing, tmp_path):
    source = make(landing, tmp_path / "state", inventory=tmp_path / "elsewhere")
    put(landing / "a.jsonl", ids(1))
    drained(source)
    assert list((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "state").exists()


def test_an_epoch_keeps_to_its_files_and_bytes_but_always_moves(landing, tmp_path):
    for number in range(5):
        put(landing / f"{number}.jsonl", ids(number), age_secs=100 - number)
    size = (landing / "0.jsonl").stat().st_size
    for options in ({"max_files_per_epoch": 2}, {"max_bytes_per_epoch": 2 * size}):
        source = make(landing, tmp_path / "state", **options)
        end = source.latest(Inventoried(), LIMIT)
        assert rows(source, Inventoried(), end) == ids(0, 1)
        assert (source.lag(), source.lag_unit) == (3 * size, "bytes")
    source = make(landing, tmp_path / "state", max_bytes_per_epoch=1)
    assert rows(source, Inventoried(), source.latest(Inventoried(), LIMIT)) == ids(0)


@pytest.mark.parametrize("with_state", [True, False])
def test_a_drain_ends_at_what_was_there_when_it_began(landing, tmp_path, with_state):
    source = make(landing, tmp_path / "state" if with_state else None, max_files_per_epoch=1)
    put(landing / "a.jsonl", ids(1))
    put(landing / "b.jsonl", ids(2))
    frozen = source.latest(Inventoried(), ReadLimit())
    put(landing / "c.jsonl", ids(3), age_secs=10)
    position, found = Inventoried(), []
    while (end := source.latest(position, replace(LIMIT, until=frozen))) != position:
        found += rows(source, position, end)
        position = end
    assert numbers(found) == [1, 2]
    assert drained(source, position)[0] == ids(3)


# -- files that are not ready, not the same, not there -----------------------------------------------------------------


def test_a_file_that_is_still_written_waits(landing, tmp_path):
    source = make(landing, tmp_path / "state", settle_ms=30_000)
    growing = put(landing / "a.jsonl", '{"id": 1}\n{"id"', age_secs=0)
    assert source.latest(Inventoried(), LIMIT) == Inventoried()
    assert source.lag() == growing.stat().st_size
    put(growing, ids(1, 2), age_secs=31)
    assert drained(source)[0] == ids(1, 2)


def test_a_file_of_a_clock_ahead_of_ours_settles_too(landing, tmp_path):
    source = make(landing, tmp_path / "state", settle_ms=20)
    put(landing / "a.jsonl", ids(1), age_secs=-3600)
    deadline = time.monotonic() + 10
    while (end := source.latest(Inventoried(), LIMIT)) == Inventoried():
        assert time.monotonic() < deadline
    assert rows(source, Inventoried(), end) == ids(1)


def test_a_first_look_does_not_miss_a_file_that_was_finished_a_moment_ago(landing, tmp_path):
    put(landing / "a.jsonl", ids(1), age_secs=0)
    assert drained(make(landing, tmp_path / "state", settle_ms=50))[0] == ids(1)


def test_hidden_temporary_and_foreign_files_are_passed_over(landing, tmp_path):
    for name in (".a.jsonl", "_b.jsonl", "c.jsonl.tmp", "d.jsonl.part", "README.md", "_temporary/e.jsonl"):
        put(landing / name, ids(1))
    put(landing / "f.jsonl", ids(2))
    assert drained(make(landing, tmp_path / "state", recursive=True))[0] == ids(2)


@pytest.mark.parametrize("change", ["appended", "rewritten", "replaced"])
def test_a_planned_file_that_changed_is_planned_again_and_never_gives_other_rows(source, landing, change):
    path = put(landing / "a.jsonl", ids(1))
    end = source.latest(Inventoried(), LIMIT)
    (split,) = source.split(Inventoried(), end)
    if change == "appended":
        put(path, ids(1, 2))
    elif change == "rewritten":
        put(path, ids(9), age_secs=1)
    else:
        os.replace(put(landing / ".new", ids(9), age_secs=1), path)
    with pytest.raises(RangeGone, match=f"PEN-5015 {path} changed after it was planned"):
        source.split(Inventoried(), end)
    with pytest.raises(RangeGone, match=f"PEN-5015 {path} changed after it was planned"):
        list(source.read(split))
    expected = ids(1, 2) if change == "appended" else ids(9)
    assert rows(source, Inventoried(), source.latest(Inventoried(), LIMIT)) == expected


def test_a_file_that_changes_while_it_is_read_is_read_again(source, landing):
    path = put(landing / "a.jsonl", ids(1))
    (split,) = source.split(Inventoried(), source.latest(Inventoried(), LIMIT))
    reading = source.read(split)
    next(reading)
    put(path, ids(1, 2))
    with pytest.raises(RetryableError, match="changed while"):
        list(reading)


def test_a_planned_file_that_is_gone_is_no_longer_planned(source, landing):
    put(landing / "a.jsonl", ids(1), 20)
    _, position = drained(source)
    path = put(landing / "b.jsonl", ids(2), 15)
    put(landing / "c.jsonl", ids(3), 10)
    end = source.latest(position, LIMIT)
    path.unlink()
    with pytest.raises(RangeGone, match=f"PEN-5015 {path} is gone"):
        items(source, position, end)
    for planner in (source, again(source)):  # the next process finds the old plan on disk
        assert rows(planner, position, planner.latest(position, LIMIT)) == ids(3)
    put(landing / "d.jsonl", ids(4), 5)
    assert drained(source, position)[0] == ids(3, 4)
    assert drained(again(source), position)[0] == ids(3, 4)


def test_a_plan_that_was_replaced_and_torn_at_any_byte_loses_and_doubles_nothing(source, landing, tmp_path):
    put(landing / "a.jsonl", ids(1), 30)
    _, position = drained(source)
    (inventory,) = (tmp_path / "state").iterdir()
    committed = inventory.stat().st_size
    bad = put(landing / "b.jsonl", ids(8, 9), 20)
    source.latest(position, LIMIT)
    planned = inventory.read_bytes()
    put(bad, ids(2), 10)
    put(landing / "c.jsonl", ids(3), 5)
    source.latest(position, LIMIT)
    replaced = inventory.read_bytes()
    for whole in (planned, replaced):
        for cut in range(committed, len(whole) + 1):
            inventory.write_bytes(whole[:cut])
            assert drained(source, position)[0] == ids(2, 3)


@pytest.mark.parametrize("way_out", ["corrected in place", "corrected under a new name", "columns", "left out"])
@pytest.mark.parametrize("value", ["eleven", 1.5])
def test_a_bad_file_that_stopped_a_pipeline_is_no_trap(landing, tmp_path, way_out, value):
    def run(on_error="stop", **options):
        pipeline = Pipeline(
            "trap",
            sources={"landing": Files(FilesConfig(path=landing, settle_ms=0, scan_interval_ms=0, **options))},
            sinks={"lake": FilesSink(FilesSinkConfig(path=str(tmp_path / "lake" / "{topic}")))},
            router=Router((), ("lake",)),
            processing=Processing(state_dir=tmp_path / "state", on_error=on_error),
        )
        supervisor.run(pipeline, ForkEngine(1), drain=True)

    put(landing / "a.jsonl", [{"v": 10}], 30)
    run()
    bad = put(landing / "b.jsonl", [{"v": value}], 20)
    # Rows of text cannot be read; the numbers can, and this sink cannot widen its column for them.
    with pytest.raises((DataError, SchemaError), match="PEN-3001" if value == "eleven" else "PEN-4001"):
        run()
    if way_out == "corrected in place":
        put(bad, [{"v": 11}], 10)
        run()
    elif way_out == "corrected under a new name":
        bad.unlink()
        put(landing / "c.jsonl", [{"v": 11}], 10)
        run()
    elif way_out == "columns":
        put(bad, [{"v": 11, "w": "x"}], 10)
        run(columns={"v": "int64"})
    else:
        put(landing / "c.jsonl", [{"v": 11}], 10)
        run(on_error="skip", columns={"v": "int64"})
    assert sorted(read_published(tmp_path / "lake" / "files")["v"].to_pylist()) == [10, 11]


def test_a_file_that_changes_after_it_was_read_stops_the_source_or_shows_in_its_health(source, landing, tmp_path):
    path = put(landing / "a.jsonl", ids(1))
    _, position = drained(source)
    put(path, ids(1, 2))
    with pytest.raises(DataError, match=r"PEN-3004 a\.jsonl changed"):
        again(source).latest(position, LIMIT)
    ignoring = make(landing, tmp_path / "state", on_change="ignore")
    assert ignoring.latest(position, LIMIT) == position
    assert ignoring.health_check().state == HealthState.DEGRADED


def test_a_file_may_go_after_it_was_read(source, landing):
    path = put(landing / "a.jsonl", ids(1))
    _, position = drained(source)
    path.unlink()
    assert source.latest(position, LIMIT) == position
    assert source.health_check().state == HealthState.HEALTHY


def test_a_missing_directory_is_refused_and_one_that_goes_away_is_waited_for(landing, tmp_path):
    with pytest.raises(ConfigError, match="PEN-1016"):
        make(tmp_path / "nowhere")
    source = make(landing, tmp_path / "state")
    shutil.rmtree(landing)
    with pytest.raises(RetryableError):
        source.latest(Inventoried(), LIMIT)
    assert source.health_check().state == HealthState.UNHEALTHY


def test_an_idle_source_does_not_look_all_the_time(landing, tmp_path):
    source = Files(FilesConfig(path=landing, scan_interval_ms=60_000))
    source.open(SourceContext(tmp_path / "state"))
    assert source.latest(Inventoried(), LIMIT) == Inventoried()
    put(landing / "a.jsonl", ids(1))
    assert source.latest(Inventoried(), LIMIT) == Inventoried()
    assert source.latest(Inventoried(), ReadLimit()) != Inventoried()


# -- where files are ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "recursive", "expected"),
    [
        ("", False, [1]),
        ("", True, [1, 2, 3, 4]),
        ("*.jsonl", False, [1]),
        ("**/*.jsonl", False, [1, 2, 3, 4]),
        ("*/*.jsonl", False, [2, 4]),
        ("x/**", False, [2, 3]),
        ("[xw]/[b]*.jsonl", False, [2]),
        ("x/y/c.jsonl", False, [3]),
        ("z[1]", False, [4]),
        ("**/y/*", False, [3]),
    ],
)
def test_directories_globs_and_single_files(landing, tmp_path, path, recursive, expected):
    for name, number in (("a", 1), ("x/b", 2), ("x/y/c", 3), ("z[1]/d", 4)):
        put(landing / f"{name}.jsonl", ids(number))
    assert numbers(drained(make(landing / path, tmp_path / "state", recursive=recursive))[0]) == expected


def test_a_glob_that_takes_a_file_of_no_known_format_says_so(landing, tmp_path):
    put(landing / "a.log", ids(1))
    with pytest.raises(ConfigError, match="PEN-1016"):
        make(landing / "*.log", tmp_path / "state").latest(Inventoried(), LIMIT)
    assert drained(make(landing / "*.log", tmp_path / "state", format="jsonl"))[0] == ids(1)


def test_streams_can_be_named_by_directory_and_file(landing, tmp_path):
    put(landing / "orders/1.jsonl", ids(1))
    put(landing / "users/1.v2.jsonl", [{"name": "x"}])
    source = make(landing, tmp_path / "state", recursive=True, stream="{parent}-{stem}")
    end = source.latest(Inventoried(), LIMIT)
    found = {item.stream: item.records.to_pylist() for item in items(source, Inventoried(), end)}
    assert found == {"orders-1": ids(1), "users-1": [{"name": "x"}]}
    assert {stream: schema.names for stream, schema in again(source).schema().items()} == {
        "orders-1": ["id"],
        "users-1": ["name"],
    }
    source.split(Inventoried(), end)
    assert set(source.schema()) == set(found)


# -- JSON lines --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), max_size=40),
    split_bytes=st.integers(1, 400),
    block=st.integers(1, 200),
    newline=st.booleans(),
    blank=st.booleans(),
)
def test_byte_ranges_cover_every_line_exactly_once(sizes, split_bytes, block, newline, blank):
    expected = [{"id": number, "pad": "é" * size} for number, size in enumerate(sizes)]
    text = ("\n\n" if blank else "\n").join(json.dumps(row, ensure_ascii=False) for row in expected)
    before, splits.BLOCK_BYTES = splits.BLOCK_BYTES, block
    try:
        with tempfile.TemporaryDirectory() as home:
            put(Path(home, "a.jsonl"), text + "\n" * newline)
            source = make(home, split_bytes=split_bytes)
            end = source.latest(Inventoried(), LIMIT)
            assert rows(source, Inventoried(), end) == expected
    finally:
        splits.BLOCK_BYTES = before


def test_bad_lines_are_left_out_and_the_first_is_told_with_its_number(landing, tmp_path):
    lines = [json.dumps({"id": number}) for number in range(2000)]
    lines[1300], lines[1500], lines[1999] = '{"id": "text"}', "not json", "[1]"
    text = "\n".join(lines).encode().replace(b'"id": 1700}', b'"id": 1700, "n": "\xff"}')
    path = put(landing / "a.jsonl", text)
    source = make(landing, tmp_path / "state", split_bytes=8_000)
    splits = source.split(Inventoried(), source.latest(Inventoried(), LIMIT))
    assert len(splits) > 2
    good, errors = [], []
    for split in splits:
        try:
            for item in source.read(split):
                good += item.records.to_pylist() if isinstance(item, SourceBatch) else []
        except DataError as error:
            errors.append(pickle.loads(pickle.dumps(error)))
    assert numbers(good) == [n for n in range(2000) if n not in (1300, 1500, 1700, 1999)]
    assert sum(error.count for error in errors) == 4
    assert errors[0].code == "PEN-3001"
    assert f"{path}, line 1,301:" in errors[0].message
    assert "column 'id' is a str, not int64" in errors[0].message
    assert errors[0].samples[0] == f"{path}, line 1,301: column 'id' is a str, not int64"
    assert "".join(line for error in errors for line in error.samples).count(", line ") == 4
    assert "text" not in str(errors[0])


def test_skipped_and_discarded_rows_are_named_without_their_values(landing, tmp_path, caplog):
    def run():
        pipeline = Pipeline(
            "named",
            sources={"landing": Files(FilesConfig(path=landing, settle_ms=0, scan_interval_ms=0))},
            sinks={"lake": FilesSink(FilesSinkConfig(path=str(tmp_path / "{topic}"), schema_evolution="discard_row"))},
            router=Router((), ("lake",)),
            processing=Processing(state_dir=tmp_path / "state", on_error="skip"),
        )
        telemetry = Telemetry.of(pipeline)
        supervisor.run(pipeline, ForkEngine(1), drain=True, telemetry=telemetry)
        return telemetry.status()

    put(landing / "a.jsonl", [{"v": 10}], 30)
    run()
    bad = put(landing / "b.jsonl", [{"v": "secret"}, {"v": 11}, {"v": "secret"}, {"v": 12, "w": "secret"}], 20)
    status = run()
    assert [each["reason"] for each in status["bad"]] == [
        f"{bad}, line 1: column 'v' is a str, not int64",
        f"{bad}, line 3: column 'v' is a str, not int64",
        "rows or values left out of sink 'lake': 'w' is string, which the target lacks",
    ]
    assert (status["skipped"], status["discarded"]) == (2, 1)
    assert f"PEN-3001: {bad}, line 3: column 'v' is a str" in caplog.text
    assert "secret" not in caplog.text + json.dumps(status)


def test_blank_files_byte_order_marks_and_missing_last_newlines_are_fine(source, landing):
    put(landing / "a.jsonl", b"")
    put(landing / "b.jsonl", b"\n \n\n")
    put(landing / "c.jsonl", b'\xef\xbb\xbf{"id": 1}\r\n{"id": 2}')
    assert drained(source)[0] == ids(1, 2)


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_text_is_read(source, landing, ending):
    text = b"".join(json.dumps(row).encode() + b"\n" for row in ids(*range(1000)))
    packed = gzip.compress(text) if ending == "gz" else pa.Codec("zstd").compress(text, asbytes=True)
    put(landing / f"a.jsonl.{ending}", packed)
    assert drained(source)[0] == ids(*range(1000))


def test_a_damaged_compressed_file_gives_its_whole_part_and_then_an_error(source, landing, monkeypatch):
    monkeypatch.setattr(splits, "BLOCK_BYTES", 1000)
    packed = gzip.compress(b"".join(b'{"id": %d}\n' % number for number in range(100_000)))
    put(landing / "a.jsonl.gz", packed[: len(packed) // 2])
    (split,) = source.split(Inventoried(), source.latest(Inventoried(), LIMIT))
    found, error = failing(source, split)
    assert found == ids(*range(len(found)))
    assert 0 < len(found) < 100_000
    assert error.code == "PEN-3001"
    assert "damaged" in error.message


def test_memory_stays_flat(landing, tmp_path):
    put(landing / "a.jsonl", b'{"id": 1, "text": "%s"}\n' % (b"x" * 1000) * 40_000)
    source = make(landing, tmp_path / "state", split_bytes=1 << 40)
    (split,) = source.split(Inventoried(), source.latest(Inventoried(), LIMIT))
    before, most, count = pa.total_allocated_bytes(), 0, 0
    for item in source.read(split):
        most, count = max(most, pa.total_allocated_bytes() - before), count + item.num_rows
        del item
    assert count == 40_000
    assert most < 20 << 20


# -- CSV ---------------------------------------------------------------------------------------------------------------


def test_csv_with_quoted_newlines_and_tabs(source, landing):
    put(landing / "a.csv", 'id,text\n1,"two\nlines, one comma"\n2,\n', 20)
    put(landing / "b.tsv", "id\ttext\n3\tx\n", 10)
    assert drained(source)[0] == [
        {"id": 1, "text": "two\nlines, one comma"},
        {"id": 2, "text": ""},
        {"id": 3, "text": "x"},
    ]


def test_bad_csv_rows_are_left_out_one_by_one(landing, tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "BLOCK_BYTES", 2000)
    lines = [f"{number},{number / 4},name {number}" for number in range(1000)]
    lines[600], lines[700], lines[999] = "x,1,bad id", "700,1", "999,y,bad ratio"
    path = put(landing / "a.csv", "id,ratio,name\n" + "\n".join(lines) + "\n")
    source = make(landing, tmp_path / "state", columns={"id": "int64", "ratio": "float64", "name": "string"})
    (split,) = source.split(Inventoried(), source.latest(Inventoried(), LIMIT))
    found, error = failing(source, split)
    assert found == [{"id": n, "ratio": n / 4, "name": f"name {n}"} for n in range(1000) if n not in (600, 700, 999)]
    assert error.count == 3
    assert error.message.startswith(f"{path}, ")
    assert error.message.endswith("and 2 more")


def converts(kind, text):
    options = pa.csv.ConvertOptions(column_types={"x": kind})
    try:
        return pa.csv.read_csv(pa.BufferReader(b"y,x\n1," + text + b"\n"), convert_options=options).num_rows == 1
    except pa.ArrowInvalid:
        return False


@settings(max_examples=examples(300), deadline=None)
@given(
    kind=st.sampled_from(["int64", "uint8", "float64", "bool", "date32", "timestamp[us]", "decimal128(9, 2)"]).map(
        arrow_type
    ),
    text=st.one_of(
        st.text("0123456789+-.eExXfFaAnNtTrRuUlLiIsS: /#_", min_size=1, max_size=6).map(str.encode),
        st.from_regex(rb"\A ?[-+]?[0-9]{0,4}[.-]?[0-9]{0,2}-?[0-9]{0,2}[T ]?\Z"),
        st.sampled_from(
            [b"NaN", b"-nan", b"#N/A", b"TRUE", b"inf", b"-Infinity", b"0x1f", b"1e3", b"2024-02-30", b" 7 "]
        ),
    ),
)
def test_only_values_that_arrow_refuses_are_called_misfits(kind, text):
    misfits = csv_misfits(pa.RecordBatch.from_pydict({"x": pa.array([text])}), pa.schema([("x", kind)]))
    assert not (misfits and converts(kind, text))


@settings(max_examples=examples(300), deadline=None)
@given(
    kind=st.sampled_from(
        [
            "int64",
            "float64",
            "bool",
            "string",
            "date32",
            "timestamp[us]",
            "decimal128(9, 2)",
            "list<int64>",
            "struct<a: int64>",
        ]
    ).map(arrow_type),
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**65), 2**65)
        | st.floats()
        | st.sampled_from(["", "1", "2024-01-02", "x"]),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        max_leaves=3,
    ),
)
def test_only_json_that_arrow_refuses_is_called_a_misfit(kind, value):
    line, schema = json.dumps({"x": value}).encode(), pa.schema([("x", kind)])
    if json_lines.misfit(line, schema):
        with pytest.raises(pa.ArrowInvalid):
            json_lines.parse(line, schema, "ignore")


def arrow_schema(**columns):
    return pa.schema([(name, arrow_type(text)) for name, text in columns.items()])


def test_a_column_that_a_csv_file_lacks_is_null_also_beside_bad_rows(landing, tmp_path):
    put(landing / "a.csv", "id\n1\nx\n3\n")
    source = make(landing, tmp_path / "state", columns={"id": "int64", "note": "string"})
    found, error = failing(source, source.split(Inventoried(), source.latest(Inventoried(), LIMIT))[0])
    assert found == [{"id": 1, "note": None}, {"id": 3, "note": None}]
    assert error.count == 1
    assert "a.csv, row 2: " in error.message
    assert "column 'id' is not int64" in error.message


def test_csv_without_a_header_takes_its_names_from_the_columns(landing, tmp_path):
    put(landing / "a.csv", "1;x\n2;y\n")
    source = make(landing, tmp_path / "state", header=False, delimiter=";", columns={"id": "int32", "name": "string"})
    assert drained(source)[0] == [{"id": 1, "name": "x"}, {"id": 2, "name": "y"}]
    with pytest.raises(ValidationError, match="columns"):
        FilesConfig(path=landing, header=False)


@pytest.mark.parametrize(("text", "why"), [("a,a\n1,2\n", "one name"), ("b;c\n1;2\n", "none of the columns")])
def test_a_csv_file_with_the_wrong_header_says_so(landing, tmp_path, text, why):
    put(landing / "a.csv", text)
    source = make(landing, tmp_path / "state", columns={"a": "int64"})
    _, error = failing(source, source.split(Inventoried(), source.latest(Inventoried(), LIMIT))[0])
    assert why in error.message


# -- Parquet -----------------------------------------------------------------------------------------------------------


def test_large_parquet_files_are_split_by_row_groups(landing, tmp_path):
    put(landing / "a.parquet", pa.table({"id": range(95)}))
    source = make(landing, tmp_path / "state", split_bytes=300)
    end = source.latest(Inventoried(), LIMIT)
    assert len(source.split(Inventoried(), end)) > 2
    assert rows(source, Inventoried(), end) == ids(*range(95))


def test_parquet_columns_may_come_later_and_dictionaries_are_plain_rows(source, landing):
    put(landing / "a.parquet", pa.table({"id": [1]}), 20)
    first, position = drained(source)
    put(
        landing / "b.parquet",
        pa.table({"tag": pa.array(["x"]).dictionary_encode(), "id": pa.array([2], pa.int32())}),
        10,
    )
    second, end = drained(source, position)
    assert (first, second) == (ids(1), [{"id": 2, "tag": "x"}])
    source.split(position, end)
    assert source.schema() == {"files": arrow_schema(id="int64", tag="string")}


def test_parquet_values_that_do_not_fit_name_file_row_column_and_types(landing, tmp_path):
    source = make(landing, tmp_path / "state", columns={"id": "int8"})
    path = put(landing / "b.parquet", pa.table({"id": [2, 300, 4]}), 10)
    found, error = failing(source, source.split(Inventoried(), source.latest(Inventoried(), LIMIT))[0])
    assert found == ids(2, 4)
    assert error.count == 1
    assert f"{path}, row 2: column 'id' is int64, not int8" in error.message


def test_a_file_that_is_no_parquet_is_an_error_that_names_it(source, landing):
    path = put(landing / "a.parquet", b"PAR1 nonsense")
    _, error = failing(source, source.split(Inventoried(), source.latest(Inventoried(), LIMIT))[0])
    assert str(path) in error.message
    shutil.copy(put(landing / ".b", pa.table({"id": range(5000)})), landing / "b.parquet")
    data = bytearray((landing / "b.parquet").read_bytes())
    data[100:5000] = bytes(4900)
    put(landing / "b.parquet", bytes(data))
    end = source.latest(Inventoried(), ReadLimit())
    (split,) = (s for s in source.split(Inventoried(), source.latest(end, LIMIT)) if s.path.endswith("b.parquet"))
    assert failing(source, split)[1].code == "PEN-3001"


# -- schemas -----------------------------------------------------------------------------------------------------------


def test_inferred_types_are_kept_across_a_restart(source, landing):
    put(landing / "a.jsonl", [{"id": 1, "ratio": 0.5, "at": "2024-01-02T03:04:05Z", "void": None, "in": {"x": 1}}])
    _, position = drained(source)
    put(landing / "b.jsonl", [{"id": 2, "ratio": 3, "at": "soon"}])
    more, end = drained(source, position)
    assert more == [{"id": 2, "ratio": 3.0, "at": "soon", "in": None}]
    fresh = again(source)
    fresh.split(position, end)
    assert fresh.schema() == {
        "files": arrow_schema(id="int64", ratio="float64", at="string", **{"in": "struct<x: int64>"})
    }


def test_files_that_are_seen_together_agree_on_the_widest_types(source, landing):
    put(landing / "a.csv", "id,code\n1,7\n", 20)
    put(landing / "b.csv", "id,code\n2.5,x\n", 10)
    assert drained(source)[0] == [{"id": 1.0, "code": "7"}, {"id": 2.5, "code": "x"}]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_numbers_widen_with_the_files_that_come_later(source, landing, ending):
    def write(name, values, age):
        text = "\n".join(map(str, ["v", *values])) + "\n"
        content = {"jsonl": [{"v": v} for v in values], "csv": text, "parquet": pa.table({"v": values})}[ending]
        put(landing / f"{name}.{ending}", content, age)

    write("a", [10], 20)
    first, position = drained(source)
    write("b", [1.5], 10)
    assert [first, drained(source, position)[0]] == [[{"v": 10}], [{"v": 1.5}]]
    write("c", [7], 5)
    assert drained(source, position)[0] == [{"v": 1.5}, {"v": 7.0}]
    assert isinstance(drained(source, position)[0][1]["v"], float)


def test_a_struct_gains_the_fields_of_later_files(source, landing):
    put(landing / "a.jsonl", [{"s": {"x": 1}}], 20)
    _, position = drained(source)
    put(landing / "b.jsonl", [{"s": {"x": 2.5, "y": "new"}}], 10)
    assert drained(source, position)[0] == [{"s": {"x": 2.5, "y": "new"}}]


def test_an_empty_list_stays_a_list_though_nothing_tells_the_type_of_its_items(source, landing):
    put(landing / "a.jsonl", [{"id": 1, "tags": []}, {"id": 2, "tags": None}], 20)
    found, position = drained(source)
    assert found == [{"id": 1, "tags": []}, {"id": 2, "tags": None}]
    put(landing / "b.jsonl", [{"id": 3, "tags": ["x"]}], 10)
    assert drained(source, position)[0] == [{"id": 3, "tags": ["x"]}]


def test_a_list_that_was_empty_at_first_takes_any_items_later(source, landing):
    """Its items were taken for text; a number among them used to stop the pipeline, with no way on but a reset."""
    put(landing / "a.jsonl", [{"id": 1, "tags": []}], 40)
    _, position = drained(source)
    later = {2: [1, None, 20], 3: ["x", "2024-01-01"], 4: [{"at": "2024-01-01", "n": [1.5]}], 5: None, 6: [], 7: [True]}
    put(landing / "b.jsonl", [{"id": id, "tags": tags} for id, tags in later.items()], 30)
    found, position = drained(source, position)
    texts = {2: ["1", None, "20"], 4: ['{"at":"2024-01-01","n":[1.5]}'], 7: ["true"]}
    assert found == [{"id": id, "tags": tags} for id, tags in (later | texts).items()]
    put(landing / "c.jsonl", [{"id": 8, "tags": [30]}, {"id": 9, "tags": ["y"]}], 20)
    found, position = drained(source, position)
    assert found == [{"id": 8, "tags": ["30"]}, {"id": 9, "tags": ["y"]}]
    put(landing / "d.jsonl", [{"id": 10, "tags": "no list"}], 10)
    with pytest.raises(DataError, match=r"column 'tags' is a str, not list"):
        drained(source, position)


def test_an_empty_list_has_the_type_of_the_items_in_a_file_that_is_seen_together_with_it(source, landing):
    put(landing / "a.jsonl", [{"id": 1, "tags": []}], 20)
    put(landing / "b.jsonl", [{"id": 2, "tags": [3]}], 10)
    assert drained(source)[0] == [{"id": 1, "tags": []}, {"id": 2, "tags": [3]}]


def test_a_list_that_a_task_met_first_and_empty_takes_any_items_later(landing, tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(readers, "_HEAD_BYTES", 1000)
    put(landing / "a.jsonl", [*ids(*range(500)), {"id": 500, "late": []}], 20)
    source = make(landing, tmp_path / "state")
    end = source.latest(Inventoried(), LIMIT)
    found = items(source, Inventoried(), end)
    assert [row for item in found if isinstance(item, SourceBatch) for row in item.records.to_pylist()][500:] == [
        {"id": 500, "late": []}
    ]
    start = source.next_start(end, [item.value for item in found if isinstance(item, Note)])
    put(landing / "b.jsonl", [{"id": 501, "late": [7]}], 10)
    assert rows(source, start, source.latest(start, LIMIT)) == [{"id": 501, "late": ["7"]}]


def test_nulls_at_the_beginning_of_a_list_are_kept_where_a_task_meets_the_column_first(landing, tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(readers, "_HEAD_BYTES", 1000)
    late = [{"id": 500, "late": [None, 1]}, {"id": 501, "late": [2]}, {"id": 502, "late": [None, None, 3]}]
    put(landing / "a.jsonl", [*ids(*range(500)), *late])
    source = make(landing, tmp_path / "state")
    assert rows(source, Inventoried(), source.latest(Inventoried(), LIMIT))[500:] == late


def test_a_field_that_appears_later_is_added(source, landing):
    put(landing / "a.jsonl", ids(1))
    _, position = drained(source)
    put(landing / "b.jsonl", [{"new": "x", "id": 2}])
    end = source.latest(position, LIMIT)
    assert rows(source, position, end) == [{"id": 2, "new": "x"}]
    assert source.schema()["files"].names == ["id", "new"]
    assert not any(isinstance(item, Note) for item in items(source, position, end))


def test_a_field_deep_inside_a_file_is_noted_and_known_from_then_on(landing, tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(readers, "_HEAD_BYTES", 1000)
    source = make(landing, tmp_path / "state")
    deep = [*ids(*range(500)), {"id": 500, "late": "2024-01-01T00:00:00Z"}, {"id": 501, "late": None}]
    put(landing / "a.jsonl", deep)
    end = source.latest(Inventoried(), LIMIT)
    assert source.split(Inventoried(), end)[0].schema.names == ["id"]
    found = items(source, Inventoried(), end)
    notes = [item.value for item in found if isinstance(item, Note)]
    table = pa.concat_tables(
        [pa.Table.from_batches([item.records]) for item in found if isinstance(item, SourceBatch)],
        promote_options="default",
    )
    assert table.to_pylist() == [{"late": None, **row} for row in deep]
    assert len(notes) == 1
    restarted = again(source)
    position = restarted.next_start(stored(end), json.loads(json.dumps(notes)))
    assert position == end
    put(landing / "b.jsonl", ids(502))
    after = restarted.latest(position, LIMIT)
    assert rows(restarted, position, after) == [{"id": 502, "late": None}]
    assert rows(again(source), position, after) == [{"id": 502, "late": None}]


def test_explicit_columns_are_all_there_is(landing, tmp_path):
    columns = {"day": "date32", "at": "timestamp[us, UTC]", "amount": "decimal128(9, 2)", "tags": "list<string>"}
    source = make(landing, tmp_path / "state", columns=columns)
    assert source.schema() == {"files": arrow_schema(**columns)}
    row = {"day": "2024-01-02", "at": "2024-01-02T03:04:05.5Z", "amount": "1.25", "tags": ["x"], "more": 1}
    put(landing / "a.jsonl", [row, {}, {"day": "never"}])
    found, error = failing(source, source.split(Inventoried(), source.latest(Inventoried(), LIMIT))[0])
    assert [str(value) for value in found[0].values()] == [
        "2024-01-02",
        "2024-01-02 03:04:05.500000+00:00",
        "1.25",
        "['x']",
    ]
    assert found[1] == dict.fromkeys(columns)
    assert error.count == 1
    assert "line 3" in error.message


def test_types_are_read_as_arrow_prints_them():
    for kind in (
        pa.int64(), pa.decimal128(12, 2), pa.timestamp("us", "UTC"), pa.timestamp("ms"), pa.list_(pa.list_(pa.int8())),
        pa.struct([("a", pa.list_(pa.string())), ("b", pa.struct([("c", pa.decimal128(5, 1))]))]), pa.date32(), pa.bool_(),
    ):  # fmt: skip
        assert arrow_type(str(kind).replace("[day]", "").replace("double", "float64")) == kind
    with pytest.raises(ValidationError, match="is no Arrow type"):
        FilesConfig(path=Path("x"), columns={"id": "integer"})
    for options in ({"columns": {}}, {"stream": "{nope}"}, {"stream": "{"}):
        with pytest.raises(ValidationError):
            FilesConfig(path=Path("x"), **options)


def test_it_shows_samples_and_a_schema_before_anything_is_planned(source, landing, tmp_path):
    assert isinstance(source, SchemaProvider)
    assert isinstance(source, SchemaInferable)
    assert source.schema() == {}
    assert [finding.ok for finding in source.check()] == [False]
    put(landing / "a.jsonl", ids(1))
    put(landing / "b.parquet", pa.table({"name": ["x"]}))
    assert source.infer_from_samples(source.sample_records(10)) == source.provide_schema()
    assert set(source.schema()["files"].names) == {"id", "name"}
    assert not source.is_authoritative()
    assert [finding.ok for finding in source.check()] == [True]
    assert not (tmp_path / "state").exists()


def test_a_source_travels_without_its_inventory(source, landing):
    for number in range(100):
        put(landing / f"{number}.jsonl", ids(number))
    empty = len(pickle.dumps(source))
    drained(source)
    source.latest(Inventoried(), LIMIT)
    assert len(pickle.dumps(source)) == empty


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_a_task_that_needs_few_columns_reads_few(tmp_path, format):
    table = pa.table({"id": [1, 2], "note": ["a", "b"], "extra": [1.5, 2.5]})
    if format == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        lines = {
            "jsonl": [json.dumps(row) for row in table.to_pylist()],
            "csv": ["id,note,extra", "1,a,1.5", "2,b,2.5"],
        }[format]
        (tmp_path / f"a.{format}").write_text("\n".join(lines))
    source = Files(FilesConfig(path=tmp_path, settle_ms=0))
    source.open()
    splits = source.split(source.initial(), source.latest(source.initial(), ReadLimit()))
    source.open(SourceContext(in_task=True, columns=frozenset({"id", "extra"})))
    items = [item.records for split in splits for item in source.read(split)]
    assert pa.Table.from_batches(items).to_pydict() == {"id": [1, 2], "extra": [1.5, 2.5]}


def test_an_epoch_that_fails_leaves_no_column_in_a_lake(landing, tmp_path):
    def run():
        pipeline = Pipeline(
            "fails",
            sources={"landing": Files(FilesConfig(path=landing, settle_ms=0, scan_interval_ms=0))},
            sinks={"lake": Delta(DeltaConfig(path=str(tmp_path / "lake/{topic}")))},
            router=Router((), ("lake",)),
            processing=Processing(state_dir=tmp_path / "state"),
        )
        supervisor.run(pipeline, ForkEngine(1), drain=True)
        return DeltaTable(str(tmp_path / "lake/files")).to_pyarrow_table()

    put(landing / "a.jsonl", [{"id": 1}], 30)
    run()
    put(landing / "b.jsonl", [{"id": 2, "n": {"x": 1}}, {"id": "bad"}], 20)
    with pytest.raises(DataError, match="PEN-3001"):
        run()
    assert DeltaTable(str(tmp_path / "lake/files")).to_pyarrow_table().column_names == ["id"]
    put(landing / "b.jsonl", [{"id": 2, "n": "text"}], 10)
    assert run().sort_by("id").to_pydict() == {"id": [1, 2], "n": [None, "text"]}


def test_a_number_that_a_double_cannot_hold_is_named_as_that():
    said = misfit(b'{"v": 9007199254740993}', pa.schema([("v", pa.float64())]))
    assert said == f"column 'v' holds {ROUNDED}"
    assert misfit(b'{"v": "x"}', pa.schema([("v", pa.float64())])) == "column 'v' is a str, not double"
