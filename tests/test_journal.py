"""The journal: what is durable stays, what was cut short goes, and nothing is guessed at."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import stat
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import failpoints
from penstock.errors import DataError, FatalError, RetryableError
from penstock.runtime.journal import Journal, JournalConfig, JournalPosition, JournalSource, JournalSplit
from penstock.runtime.journal import disk as disks
from penstock.runtime.journal import envelopes as enveloped
from penstock.runtime.journal import segment as segments
from penstock.runtime.journal import source as sources
from penstock.schema import key_of, with_key
from penstock.source import ENVELOPE_SCHEMA, ReadLimit, SourceBatch, SourceContext, SourceEnvelope, SourceRecord
from penstock.testing.processes import wait_until
from thorough import few

processes = multiprocessing.get_context("fork")


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "the condition never came true"
        time.sleep(0.002)


def envelope(number: int, stream: str = "s", key: str | None = None) -> SourceEnvelope:
    return SourceEnvelope(SourceRecord.from_number(stream, number), dedupe_key=key)


def numbers(*values: int, stream: str = "n") -> SourceBatch:
    return SourceBatch(pa.record_batch({"number": pa.array(values, pa.int64())}), stream=stream)


def source(directory: Path) -> JournalSource:
    return JournalSource(JournalConfig(directory=directory))


def rows(directory: Path, start: int = 0, end: int | None = None) -> dict[str, list[int]]:
    """The numbers in a range, per stream, as a task reads them."""
    end = source(directory).latest(JournalPosition(), ReadLimit()).row if end is None else end
    found = defaultdict(list)
    for batch in source(directory).read(JournalSplit(directory, start, end)) if start < end else ():
        if "payload" in batch.records.schema.names:
            found[batch.stream] += [int(value) for value in batch.records.column("payload").to_pylist()]
        else:
            found[batch.stream] += batch.records.column("number").to_pylist()
    return dict(found)


def in_child(work: Callable[[], None]) -> multiprocessing.Process:
    child = processes.Process(target=work)
    child.start()
    return child


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "SEGMENT_BYTES", 2000)


def test_envelopes_and_batches_come_back_as_they_went_in(tmp_path: Path) -> None:
    record = SourceRecord("a/b", b"\x00raw", key=b"k", attributes={"qos": "1", "ü": ""}, timestamp_ms=1_700_000_000_123)
    writer = Journal(tmp_path / "j")
    writer.append([SourceEnvelope(record), envelope(1)])
    writer.append(numbers(1, 2))
    writer.append([numbers(3), numbers(4, stream="m")])
    writer.flush()
    first, *others = source(tmp_path / "j").read(JournalSplit(tmp_path / "j", 0, writer.tail))
    assert first.records.schema == ENVELOPE_SCHEMA
    assert first.stream == "a/b"
    row = first.records.to_pylist()[0]
    assert row.pop("timestamp").timestamp() == 1_700_000_000.123
    assert row.pop("offset") is None
    assert row == {"stream": "a/b", "key": b"k", "payload": b"\x00raw", "attributes": [("qos", "1"), ("ü", "")]}
    assert [(b.stream, b.num_rows) for b in others] == [("s", 1), ("n", 3), ("m", 1)]
    assert source(tmp_path / "j").schema() == writer.schemas()
    assert writer.schemas()["n"] == numbers(1).records.schema
    writer.close()


def test_rows_and_checkpoint_survive_a_restart(tmp_path: Path) -> None:
    writer = Journal(tmp_path)
    writer.append([envelope(1)], {"at": 1})
    writer.append([envelope(2)], {"at": 2})
    writer.append([envelope(3)])
    writer.close()
    again = Journal(tmp_path)
    assert (again.tail, again.checkpoint) == (3, {"at": 2})
    again.append([envelope(4)])
    again.close()
    assert rows(tmp_path) == {"s": [1, 2, 3, 4]}


@pytest.mark.parametrize(("inline_bytes", "synced"), [(-1, [".arrow", ".index"]), (1 << 16, [".index"])])
def test_each_commit_syncs_data_then_index_then_calls_back_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int, synced: list[str]
) -> None:
    monkeypatch.setattr(segments, "INLINE_BYTES", inline_bytes)
    writer = Journal(tmp_path)
    seen: list[object] = []
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    writer.append([envelope(1)], on_durable=lambda: seen.append(1))
    writer.append([envelope(2)], on_durable=lambda: seen.append(2))
    writer.close()
    assert seen == [*synced, 1, 2]


def test_concurrent_senders_share_their_fsyncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Journal(tmp_path, linger_ms=20)
    calls: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append(descriptor), fsync(descriptor))[1])

    def send(number: int) -> None:
        for n in range(5):
            durable = threading.Event()
            writer.append([envelope(number * 5 + n)], on_durable=durable.set)
            assert durable.wait(10)

    senders = [threading.Thread(target=send, args=(number,)) for number in range(40)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    writer.close()
    assert sorted(rows(tmp_path)["s"]) == list(range(200))
    assert len(calls) < 200 / 4


def test_a_flush_does_not_linger(tmp_path: Path) -> None:
    writer = Journal(tmp_path, linger_ms=60_000)
    writer.append([envelope(1)])
    began = time.monotonic()
    writer.flush()
    assert time.monotonic() - began < 5
    writer.close()


def test_a_full_journal_blocks_until_an_ack_frees_room(tmp_path: Path) -> None:
    writer = Journal(tmp_path, max_bytes=5000, linger_ms=0)
    bound = source(tmp_path).bind(writer)
    sender = threading.Thread(target=lambda: [writer.append([envelope(n)]) for n in range(1000)])
    sender.start()
    until(lambda: writer.full)
    held = writer.appended
    assert held < 1000
    until(lambda: writer.tail == held)
    assert sender.is_alive()
    seen: list[int] = []
    while sender.is_alive() or len(seen) < 1000:
        start = len(seen)
        end = bound.latest(JournalPosition(row=start), ReadLimit())
        seen += rows(tmp_path, start, end.row).get("s", [])
        bound.ack(end)
    assert seen == list(range(1000))
    assert not writer.full
    writer.close()


def test_an_item_above_the_limit_waits_for_an_empty_journal(tmp_path: Path) -> None:
    writer = Journal(tmp_path, max_bytes=1000, linger_ms=0)
    writer.append([envelope(0)])
    sender = threading.Thread(target=writer.append, args=(numbers(*range(10_000)),))
    sender.start()
    writer.flush()
    assert writer.appended == 1
    assert sender.is_alive()
    writer.retain(1)
    sender.join(10)
    writer.flush()
    assert writer.tail == 10_001
    assert writer.full
    writer.close()


def test_a_stop_wakes_a_blocked_append_and_keeps_what_was_accepted(tmp_path: Path) -> None:
    writer = Journal(tmp_path, max_bytes=1, linger_ms=60_000)
    told = threading.Event()
    writer.append([envelope(0)], on_durable=told.set)
    refused: list[Exception] = []

    def send() -> None:
        try:
            writer.append([envelope(1)])
        except RetryableError as error:
            refused.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    writer.refuse()
    sender.join(10)
    assert refused
    writer.close()
    assert told.is_set()
    assert rows(tmp_path) == {"s": [0]}


@pytest.mark.usefixtures("small_files")
def test_retention_deletes_whole_segments_and_keeps_checkpoint_keys_and_schemas(tmp_path: Path) -> None:
    writer = Journal(tmp_path, linger_ms=0)
    for n in range(60):
        writer.append([envelope(n, key=f"key-{n}")], {"at": n})
        writer.flush()
    writer.append(numbers(1))
    writer.flush()
    before = set(tmp_path.glob("*.index"))
    assert len(before) > 5
    writer.retain(writer.tail // 2)
    between = set(tmp_path.glob("*.index"))
    assert between < before
    assert {path.stem for path in between} == {path.stem for path in tmp_path.glob("*.arrow")}
    assert rows(tmp_path, writer.tail // 2)["s"] == list(range(30, 60))
    writer.retain(writer.tail)
    assert len(list(tmp_path.glob("*.index"))) == 1
    assert writer.held_bytes == 0
    writer.close()

    again = Journal(tmp_path)
    told = threading.Event()
    again.append([envelope(3, key="key-3")], on_durable=told.set)
    again.flush()
    assert told.is_set()
    assert (again.tail, again.checkpoint) == (61, {"at": 59})
    assert set(again.schemas()) == {"s", "n"}
    again.close()
    with pytest.raises(FatalError, match="PEN-5011"):
        rows(tmp_path, 0, 1)


@pytest.mark.usefixtures("small_files")
def test_a_read_only_needs_the_segments_of_its_rows(tmp_path: Path) -> None:
    writer = Journal(tmp_path, linger_ms=0)
    for n in range(30):
        writer.append([envelope(n)])
        writer.flush()
    writer.close()
    assert [rows(tmp_path, n, n + 1) for n in range(30)] == [{"s": [n]} for n in range(30)]


def test_a_repeated_key_is_dropped_and_still_called_back_after_its_original(tmp_path: Path) -> None:
    writer = Journal(tmp_path)
    order: list[str] = []
    writer.append([envelope(1, key="a"), envelope(2, key="a")], on_durable=lambda: order.append("first"))
    writer.append([envelope(3, key="a")], on_durable=lambda: order.append("again"))
    writer.append([envelope(4, key="b"), envelope(5)])
    writer.close()
    again = Journal(tmp_path)
    again.append([envelope(6, key="b"), envelope(7, key="c")], on_durable=lambda: order.append("restarted"))
    again.close()
    assert order == ["first", "again", "restarted"]
    assert rows(tmp_path) == {"s": [1, 4, 5, 7]}


@pytest.mark.parametrize("segment_bytes", [1, 2000])
def test_a_key_whose_row_never_became_durable_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    monkeypatch.setattr(disks, "SEGMENT_BYTES", segment_bytes)

    def dies() -> None:
        failpoints.arm("journal.data=kill@2")
        writer = Journal(tmp_path)
        writer.append([envelope(1, key="a")])
        writer.flush()
        writer.append([envelope(2, key="b")])
        writer.flush()

    child = in_child(dies)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    writer = Journal(tmp_path)
    writer.append([envelope(1, key="a"), envelope(2, key="b")])
    writer.close()
    assert rows(tmp_path) == {"s": [1, 2]}


def test_the_window_of_keys_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enveloped, "DEDUPE_KEYS", 10)
    writer = Journal(tmp_path)
    writer.append([envelope(n, key=str(n)) for n in range(20)])
    writer.append([envelope(n, key=str(n)) for n in (15, 0)])
    writer.close()
    assert rows(tmp_path)["s"] == [*range(20), 0]


def test_a_record_costs_the_same_after_many_as_at_first() -> None:
    repeats, spent = enveloped.Repeats(), []
    for first in range(0, 4 * enveloped.DEDUPE_KEYS, enveloped.DEDUPE_KEYS // 2):
        envelopes = [envelope(n, key=str(n)) for n in range(first, first + enveloped.DEDUPE_KEYS // 2)]
        began = time.thread_time()
        repeats.without(envelopes)
        spent.append(time.thread_time() - began)
    assert spent[-1] < 10 * max(spent[:2]), spent  # it was 80 times as much, and went on growing


def test_an_envelope_that_cannot_be_stored_is_refused_in_the_senders_thread(tmp_path: Path) -> None:
    writer = Journal(tmp_path)
    for bad in (
        SourceRecord("s", "text"),  # type: ignore[arg-type]
        SourceRecord("\ud800", b""),
        SourceRecord("s", b"", attributes={"n": 1}),  # type: ignore[dict-item]
        SourceRecord("s", b"", timestamp_ms=1 << 64),
    ):
        with pytest.raises(DataError, match="PEN-3001"):
            writer.append([envelope(0), SourceEnvelope(bad)])
    writer.append([envelope(1)])
    writer.close()
    assert rows(tmp_path) == {"s": [1]}


def test_a_second_writer_is_refused_and_told_who_holds_the_journal(tmp_path: Path) -> None:
    writer = Journal(tmp_path)
    with pytest.raises(FatalError, match=f"PEN-5002.* process {os.getpid()}"):
        Journal(tmp_path)
    writer.close()
    Journal(tmp_path).close()


def test_a_child_of_a_killed_writer_does_not_keep_the_journal_locked(tmp_path: Path) -> None:
    got, pids = os.pipe()

    def writes_and_forks() -> None:
        writer = Journal(tmp_path)
        writer.append([envelope(1)])
        writer.flush()
        if os.fork() == 0:
            os.write(pids, b"%d\n" % os.getpid())
        _wait_for_ever()

    child = in_child(writes_and_forks)
    grandchild = int(os.read(got, 32))
    try:
        child.kill()
        child.join()
        Journal(tmp_path).close()
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(got)
        os.close(pids)


def _wait_for_ever() -> None:
    while True:
        time.sleep(60)


@pytest.mark.parametrize("point", ["journal.data", "journal.index"])
def test_readers_in_another_process_see_nothing_beyond_the_durable_tail(tmp_path: Path, point: str) -> None:
    reached, at_point = os.pipe()

    def stays_in_the_middle() -> None:
        writer = Journal(tmp_path)
        writer.append([envelope(1)])
        writer.flush()
        failpoints.hit = lambda name: (os.write(at_point, b"!"), _wait_for_ever())[1] if name == point else None
        writer.append([envelope(2)])
        writer.flush()

    child = in_child(stays_in_the_middle)
    try:
        os.read(reached, 1)
        assert source(tmp_path).latest(JournalPosition(), ReadLimit()).row == 1
        assert rows(tmp_path) == {"s": [1]}
    finally:
        child.kill()
        child.join()
        os.close(reached)
        os.close(at_point)


def test_a_failed_fsync_is_fatal_for_every_later_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Journal(tmp_path)
    told: list[int] = []

    def refuse(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        writer.append([envelope(1)], on_durable=lambda: told.append(1))
        with pytest.raises(FatalError, match="PEN-5009"):
            writer.flush()
    with pytest.raises(FatalError, match="PEN-5009"):
        writer.append([envelope(2)])
    writer.close()
    assert not told
    assert rows(tmp_path) == {}


@pytest.mark.parametrize("number", [5, 28])
def test_a_failed_fsync_of_the_index_is_fatal_and_the_record_is_never_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Also if the disk says that it is full: whether the record is there cannot be known, so it must not be tried again."""
    writer = Journal(tmp_path, linger_ms=0)
    writer.append([envelope(1)])
    writer.flush()
    fsync, told, failed = os.fsync, list[int](), list[str]()

    def refuse(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith(".index"):
            failed.append(name)
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        writer.append([envelope(2)], on_durable=lambda: told.append(2))
        with pytest.raises(FatalError, match="PEN-5009"):
            writer.flush()
    with pytest.raises(FatalError, match="PEN-5009"):
        writer.append([envelope(3)])
    writer.close()
    assert len(failed) == 1
    assert not told
    again = Journal(tmp_path, linger_ms=0)  # what is whole on the disk counts, once
    again.append([envelope(4)])
    again.close()
    assert rows(tmp_path)["s"] in ([1, 4], [1, 2, 4])


def test_an_epoch_that_is_staged_again_is_split_as_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run that has fewer cores: sinks may name rows by task, so other splits would double them."""
    monkeypatch.setattr(sources, "LEAST_SPLIT_ROWS", 2)
    writer = Journal(tmp_path, linger_ms=0)
    writer.append([envelope(n) for n in range(40)])
    writer.close()
    first = source(tmp_path)
    end = first.latest(first.initial(), ReadLimit(parallelism=4))
    planned = first.split(first.initial(), end)
    assert len(planned) == 4
    again = source(tmp_path)
    again.open(SourceContext(parallelism=4))
    assert again.split(again.initial(), end) == planned
    assert len(source(tmp_path).split(again.initial(), end)) == 1  # what a run would do that was not told


def test_a_full_disk_is_a_clear_error_and_costs_nothing_that_was_durable(tmp_path: Path) -> None:
    def fills_the_disk() -> None:
        writer = Journal(tmp_path, linger_ms=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        told = 0
        try:
            for n in range(1000):
                writer.append([envelope(n)])
                writer.flush()
                told = n + 1
        except FatalError as error:
            (tmp_path / "told").write_text(f"{told} {error.code}")

    in_child(fills_the_disk).join()
    told, code = (tmp_path / "told").read_text().split()
    assert code == "PEN-5009"
    assert int(told) > 3
    writer = Journal(tmp_path)
    assert writer.tail == int(told)
    writer.append([envelope(int(told))])
    writer.close()
    assert rows(tmp_path)["s"] == list(range(int(told) + 1))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are in the data file, however small they are."""
    monkeypatch.setattr(segments, "INLINE_BYTES", -1)


def three_commits(directory: Path) -> tuple[Path, Path, list[int], list[int]]:
    """A journal of three commits: its files, and where each commit ends in them; the headers count as the first."""
    writer = Journal(directory)
    (index,), (data,) = directory.glob("*.index"), directory.glob("*.arrow")
    ends = ([index.stat().st_size], [0])
    for n in range(3):
        writer.append([envelope(n, key=f"k{n}")], {"at": n})
        writer.flush()
        ends[0].append(index.stat().st_size)
        ends[1].append(data.stat().st_size)
    writer.close()
    return index, data, *ends


def reopened(directory: Path) -> int:
    writer = Journal(directory)
    tail, checkpoint = writer.tail, writer.checkpoint
    assert checkpoint == ({"at": tail - 1} if tail else None)
    writer.append([envelope(100)])
    writer.close()
    assert rows(directory) == {"s": [*range(tail), 100]}
    return tail


@pytest.mark.parametrize("inline_bytes", [-1, 1 << 16], ids=["apart", "inline"])
def test_an_index_cut_at_any_byte_of_its_last_record_loses_that_record_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(segments, "INLINE_BYTES", inline_bytes)
    index, data, index_ends, data_ends = three_commits(tmp_path / "j")
    raw = index.read_bytes()
    for length in few(range(index_ends[2], index_ends[3])):
        index.write_bytes(raw[:length])
        copy = shutil.copytree(tmp_path / "j", tmp_path / "copy")
        (copy / data.name).write_bytes(
            data.read_bytes()[: data_ends[2] + length % 500]
        )  # its data is torn too, or whole
        assert reopened(copy) == 2
        shutil.rmtree(copy)


def test_a_data_file_shorter_than_its_index_is_fatal(tmp_path: Path, apart: None) -> None:
    _, data, _, data_ends = three_commits(tmp_path)
    for length in reversed(range(data_ends[2], data_ends[3])):
        os.truncate(data, length)
        with pytest.raises(FatalError, match=f"PEN-5005.*{data.name}"):
            Journal(tmp_path)


def test_any_flipped_byte_of_data_is_fatal(tmp_path: Path, apart: None) -> None:
    _, data, _, _ = three_commits(tmp_path)
    raw = data.read_bytes()
    for at in range(0, len(raw), 7):
        data.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(FatalError, match=f"PEN-5005.*{data.name}"):
            Journal(tmp_path)
    data.write_bytes(raw)
    assert reopened(tmp_path) == 3


@pytest.mark.parametrize("bit", [1, *(pytest.param(each, marks=pytest.mark.soak) for each in (2, 128))])
def test_a_flipped_byte_of_the_index_is_fatal_unless_it_is_in_the_last_record(tmp_path: Path, bit: int) -> None:
    index, data, index_ends, _ = three_commits(tmp_path)
    raw, blocks = index.read_bytes(), data.read_bytes()
    for at in range(len(raw)):
        index.write_bytes(raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :])
        if at < index_ends[2]:
            with pytest.raises(FatalError, match=f"PEN-500[56].*{index.name}"):
                Journal(tmp_path)
        elif at % 7 == 0 or at == len(raw) - 1:
            assert reopened(tmp_path) == 2
            data.write_bytes(blocks)


def test_rows_that_look_like_a_record_do_not_make_a_torn_write_look_whole(tmp_path: Path) -> None:
    index, _, index_ends, _ = three_commits(tmp_path / "j")
    fake = segments.frame({"row": 3, "at": 0, "blocks": [], "keys": []})
    with contextlib.closing(Journal(tmp_path / "j")) as writer:
        writer.append([SourceEnvelope(SourceRecord.from_bytes("s", b"\n" + fake * 3))], {"at": 3})
    os.truncate(index, index.stat().st_size - 1)
    assert reopened(tmp_path / "j") == 3
    assert index_ends


def test_a_segment_of_the_first_format_is_read_and_written_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(disks, "FORMAT_VERSION", 1)
        older.setattr(segments, "FORMAT_VERSION", 1)
        index, data, _, data_ends = three_commits(tmp_path)
    assert data_ends[-1], "the first format has its rows in the data file"
    size = data.stat().st_size
    assert reopened(tmp_path) == 3
    assert data.stat().st_size > size, "so has what is added to it"
    assert b'"version":1' in index.read_bytes().splitlines()[0]


def test_damage_before_the_last_segment_is_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "SEGMENT_BYTES", 1)
    index, *_ = three_commits(tmp_path / "j")
    raw = index.read_bytes()
    index.write_bytes(raw[:-1])
    with pytest.raises(FatalError, match=f"PEN-5005.*{index.name}: record 0 is damaged"):
        Journal(tmp_path / "j")
    index.write_bytes(raw)
    sorted((tmp_path / "j").glob("*.index"))[1].unlink()
    with pytest.raises(FatalError, match=r"PEN-5005.*begins at row 2 where row 1 should come next|is missing"):
        Journal(tmp_path / "j")


def test_damaged_rows_are_fatal_when_they_are_read(tmp_path: Path, apart: None) -> None:
    _, data, _, _ = three_commits(tmp_path)
    raw = data.read_bytes()
    data.write_bytes(raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:])
    with pytest.raises(FatalError, match=f"PEN-5005.*{data.name}: the rows of record 2"):
        rows(tmp_path)


def test_a_missing_index_is_fatal_and_never_a_fresh_start(tmp_path: Path) -> None:
    index, _, _, _ = three_commits(tmp_path)
    index.unlink()
    with pytest.raises(FatalError, match=r"PEN-5005.*index .* is missing"):
        Journal(tmp_path)


def test_files_left_by_a_crash_between_two_steps_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "SEGMENT_BYTES", 1)
    three_commits(tmp_path)
    first, *_, last = sorted(tmp_path.glob("*.index"))
    first.unlink()  # retention died before it deleted the data
    (tmp_path / f".{last.name}.abcd1234").write_bytes(b"half")
    (tmp_path / "00000009-00000000000000000009.arrow").touch()  # a segment died before it had an index
    writer = Journal(tmp_path)
    assert (writer.first, writer.tail) == (1, 3)
    writer.close()
    assert {path.stem for path in tmp_path.glob("*.arrow")} == {path.stem for path in tmp_path.glob("*.index")}
    assert not list(tmp_path.glob(".*"))


def test_a_manifest_that_points_beyond_the_tail_is_fatal(tmp_path: Path) -> None:
    three_commits(tmp_path)
    writer = Journal(tmp_path)
    writer.require(3)
    with pytest.raises(FatalError, match=r"PEN-5005.* row 3, .* up to 4"):
        writer.require(4)
    writer.close()


def test_a_newer_format_is_refused_by_writer_and_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(disks, "FORMAT_VERSION", 3)
        three_commits(tmp_path)
    with pytest.raises(FatalError, match=r"PEN-5006.* version 3"):
        Journal(tmp_path)
    with pytest.raises(FatalError, match=r"PEN-5006.* version 3"):
        rows(tmp_path)


def test_a_range_beyond_what_a_reader_can_see_is_retryable(tmp_path: Path) -> None:
    three_commits(tmp_path)
    with pytest.raises(RetryableError, match="ends at row 3"):
        rows(tmp_path, 0, 5)


@pytest.mark.parametrize("lossy", [False, True])
def test_a_task_that_cannot_see_the_journal_says_so_and_drops_nothing(tmp_path: Path, lossy: bool) -> None:
    split = JournalSplit(tmp_path / "journal", 0, 5, lossy=lossy)
    with pytest.raises(FatalError, match=r"PEN-5016 there is no journal .*/journal on .*\n.*storage that they share"):
        list(source(tmp_path).read(split))
    with contextlib.closing(Journal(tmp_path / "journal")) as other:  # a directory of that name, but not the driver's
        other.append([envelope(1)])
        other.flush()
        with pytest.raises(RetryableError, match=r"ends at row 1 as seen from .*, and row 4 was planned"):
            list(source(tmp_path).read(split))


def test_another_journal_of_the_same_name_is_not_read(tmp_path: Path) -> None:
    three_commits(tmp_path)
    split = source(tmp_path).split(JournalPosition(), JournalPosition(row=3))[0]
    assert len(list(source(tmp_path).read(split))) == 1
    (tmp_path / "identity").write_text("of another machine")
    with pytest.raises(FatalError, match="PEN-5016 there is another journal"):
        list(source(tmp_path).read(split))


def test_rows_that_are_carried_to_a_task_are_the_rows_of_the_split(tmp_path: Path) -> None:
    three_commits(tmp_path)
    split = source(tmp_path).split(JournalPosition(row=1), JournalPosition(row=3))[0]
    carried = replace(split, directory=tmp_path / "not here", carried=SimpleNamespace(value=split.rows()))
    read = [[each.records.to_pylist() for each in source(tmp_path).read(one)] for one in (split, carried)]
    assert read[0] == read[1]
    assert sum(map(len, read[0])) == 2


def test_a_range_holds_no_more_bytes_than_it_may(tmp_path: Path) -> None:
    with contextlib.closing(Journal(tmp_path)) as journal:
        for number in range(20):
            journal.append([SourceEnvelope(SourceRecord.from_bytes("s", b"%d" % number * 1000))])
            journal.flush()
    small = JournalSource(JournalConfig(directory=tmp_path, max_epoch_bytes=20_000))
    ends, position = [], JournalPosition()
    assert small.latest(position, ReadLimit()).row == 20, "where a drain is to end"
    while (end := small.latest(position, ReadLimit(rows=100))) != position:
        assert sum(segment.index.stat().st_size for segment in segments.segments_of(tmp_path)) > 20_000
        ends.append(end.row - position.row)
        position = end
    assert sum(ends) == 20
    assert len(ends) > 1
    tiny = JournalSource(JournalConfig(directory=tmp_path, max_epoch_bytes=1))
    assert tiny.latest(JournalPosition(), ReadLimit(rows=100)).row == 1, "at least one block"


def test_a_full_disk_holds_the_source_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, told = [1 << 40], []
    monkeypatch.setattr(disks, "free_bytes", lambda directory: free[0])
    monkeypatch.setattr(disks, "ROOM_ASKED_SECS", 0.0)
    with contextlib.closing(Journal(tmp_path)) as journal:
        journal.append([envelope(1)])
        journal.flush()
        free[0] = 1000
        journal.append([envelope(2)], on_durable=lambda: told.append(2))
        wait_until(lambda: journal.no_room, "the journal to find the disk full")
        assert journal.full
        assert (journal.tail, told) == (1, [])
        free[0] = 1 << 40
        journal.flush()
        assert (journal.tail, told, journal.no_room, journal.full) == (2, [2], "", False)
    assert rows(tmp_path) == {"s": [1, 2]}


@pytest.mark.parametrize("file", ["data", "index"])
def test_a_write_that_the_disk_has_no_room_for_leaves_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    write, left = disks._write, [2]
    monkeypatch.setattr(segments, "INLINE_BYTES", -1 if file == "data" else 1 << 16)
    with contextlib.closing(Journal(tmp_path)) as journal:
        journal.append([envelope(1)])
        journal.flush()

        def full(target: Any, raw: Any) -> None:
            if left[0] and Path(target.name).suffix == {"data": ".arrow", "index": ".index"}[file]:
                left[0] -= 1
                write(target, memoryview(raw)[:10])
                raise OSError(errno.ENOSPC, "No space left on device")
            write(target, raw)

        monkeypatch.setattr(disks, "_write", full)
        journal.append([envelope(2)])
        journal.flush()
    assert left == [0]
    assert rows(tmp_path) == {"s": [1, 2]}
    Journal(tmp_path).close()


def test_only_its_user_can_read_a_journal(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with contextlib.closing(Journal(tmp_path / "journal")) as journal:
            journal.append([envelope(1)])
            journal.flush()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "journal").iterdir()}
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o700
    assert len(modes) == 5
    assert set(modes.values()) == {0o600}, modes


def test_what_waits_for_its_commit_is_counted_with_its_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Journal(tmp_path)) as one:
        assert (one.counts()["journal_rows"], one.counts()["journal_oldest_seconds"]) == (0, 0)
        one.append([envelope(1), envelope(2)])
        one.flush()
    with contextlib.closing(Journal(tmp_path)) as one:  # also over a restart
        written = time.time()
        monkeypatch.setattr(time, "time", lambda: written + 100)
        counts = one.counts()
        assert (counts["journal_rows"], counts["journal_bytes"]) == (2, one.held_bytes)
        assert 100 <= counts["journal_oldest_seconds"] < 130
        one.append([envelope(3)])
        one.flush()
        assert one.counts()["journal_fsyncs_total"] == 1
        one.retain(3)
        assert (one.counts()["journal_rows"], one.counts()["journal_oldest_seconds"]) == (0, 0)


def test_large_batches_are_cut_so_that_a_task_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "BLOCK_BYTES", 8000)
    monkeypatch.setattr(segments, "_FEW_BYTES", 0)  # blocks this small would only be measured about right
    writer = Journal(tmp_path)
    writer.append(numbers(*range(10_000)))
    for n in range(500):
        writer.append([envelope(n)])
    writer.close()
    read = list(source(tmp_path).read(JournalSplit(tmp_path, 0, 10_500)))
    assert max(batch.records.nbytes for batch in read) <= 8100  # the bitmaps of a slice are rounded up to bytes
    assert len(read) < 20
    assert rows(tmp_path) == {"n": list(range(10_000)), "s": list(range(500))}


@pytest.mark.parametrize("inline", [True, False])
def test_rows_of_every_kind_are_written_as_arrow_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    monkeypatch.setattr(segments, "INLINE_BYTES", 1 << 30 if inline else -1)
    many = pa.record_batch(
        {"n": range(20_000), "text": [str(n) for n in range(20_000)], "lists": [[n, None] for n in range(20_000)]}
    )
    few = pa.record_batch({"kind": pa.array(["a", "b", None, "a"]).dictionary_encode(), "x": [None, 1.5, 2.5, 0.0]})
    messages = SourceBatch.of_messages("m", [b"x" * n for n in range(500)], {"a": "b"}).records
    for batch in (many.slice(3, 15_001), few, few.slice(1, 2), messages, messages.slice(7, 400)):
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        assert segments.serialise(batch) == b"".join(segments.parts_of(batch)) == stream.getvalue()
    with contextlib.closing(Journal(tmp_path)) as journal:
        journal.append([SourceBatch(many.slice(3, 15_001), stream="many"), SourceBatch(few, stream="few")])
    read = {each.stream: each.records for each in source(tmp_path).read(JournalSplit(tmp_path, 0, 15_005))}
    assert read == {"many": many.slice(3, 15_001), "few": few}


def test_batches_that_differ_only_in_their_key_are_not_joined(tmp_path: Path) -> None:
    writer = Journal(tmp_path)
    keyed = numbers(2)
    schema = with_key(keyed.records.schema, ["number"])
    writer.append([numbers(1), SourceBatch(keyed.records.cast(schema), stream="n")])
    writer.close()
    read = list(source(tmp_path).read(JournalSplit(tmp_path, 0, 2)))
    assert [key_of(batch.records.schema) for batch in read] == [[], ["number"]]


def test_a_bound_source_travels_as_a_reader(tmp_path: Path) -> None:
    writer = Journal(tmp_path)
    writer.append([envelope(1)])
    writer.flush()
    copy = pickle.loads(pickle.dumps(source(tmp_path).bind(writer)))
    end = copy.latest(copy.initial(), ReadLimit())
    assert [b.num_rows for split in copy.split(copy.initial(), end) for b in copy.read(split)] == [1]
    copy.ack(end)
    writer.close()


def test_rows_that_bypass_the_journal_keep_their_numbers_apart_over_restarts(tmp_path: Path) -> None:
    first = Journal(tmp_path, durable=False)
    first.append([envelope(n) for n in range(5)])
    first.close()
    again = Journal(tmp_path, durable=False, first_row=3)
    again.append([envelope(9)])
    again.close()
    assert (again.first, again.tail) == (5, 6)
    last = Journal(tmp_path, durable=False, first_row=40)
    last.append([envelope(10)])
    last.close()
    found = list(source(tmp_path).read(JournalSplit(tmp_path, 0, 41, lossy=True)))
    assert [b.records.column("payload").to_pylist() for b in found] == [[b"10"]]


def test_a_limit_serves_journaled_and_bypassing_rows(tmp_path: Path) -> None:
    sure, direct = Journal(tmp_path / "a"), Journal(tmp_path / "b", durable=False)
    sure.append(numbers(*range(100)))
    direct.append(numbers(*range(100)))
    sure.flush()
    direct.flush()
    both = JournalSource(JournalConfig(directory=tmp_path / "a", direct=tmp_path / "b")).bind(sure, direct)
    assert both.latest(both.initial(), ReadLimit(rows=50)) == JournalPosition(row=25, direct=25)
    assert both.latest(JournalPosition(row=90), ReadLimit(rows=50)) == JournalPosition(row=100, direct=40)
    assert both.latest(JournalPosition(direct=100), ReadLimit(rows=50)) == JournalPosition(row=50, direct=100)
    end = both.latest(both.initial(), ReadLimit())
    assert sum(b.num_rows for split in both.split(both.initial(), end) for b in both.read(split)) == 200
    sure.close()
    direct.close()


items = st.one_of(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), max_size=8).map(
        lambda pairs: [envelope(n, stream) for n, stream in pairs]
    ),
    st.lists(st.integers(0, 9), max_size=40).map(lambda values: numbers(*values)),
)


@settings(max_examples=40, deadline=None)
@given(appended=st.lists(st.lists(items, max_size=3), max_size=6), data=st.data())
def test_ranges_add_up_and_splits_cover_them(
    tmp_path_factory: pytest.TempPathFactory, appended: list, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("ranges")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disks, "SEGMENT_BYTES", 1500)
        patched.setattr(segments, "BLOCK_BYTES", 100)
        patched.setattr(sources, "LEAST_SPLIT_ROWS", 2)
        writer = Journal(directory, linger_ms=0)
        for commit in appended:
            for item in commit:
                writer.append(item)
            writer.flush()
        writer.close()
        ranges = source(directory)
        tail = ranges.latest(ranges.initial(), ReadLimit()).row
        a, b, c = sorted(data.draw(st.tuples(*[st.integers(0, tail)] * 3)))
        whole, left, right = rows(directory, a, c), rows(directory, a, b), rows(directory, b, c)
        assert whole == {s: left.get(s, []) + right.get(s, []) for s in left.keys() | right.keys()}
        assert sum(map(len, whole.values())) == c - a
        limit = ReadLimit(rows=data.draw(st.integers(1, 50)), parallelism=data.draw(st.integers(1, 4)))
        end = ranges.latest(JournalPosition(row=a), limit)
        assert end.row == min(tail, a + limit.rows)
        splits = ranges.split(JournalPosition(row=a), end)
        assert len(splits) <= limit.parallelism
        parts: Counter[tuple[str, int]] = Counter()
        for split in splits:
            assert split.start < split.end
            parts += Counter((s, n) for s, ns in rows(directory, split.start, split.end).items() for n in ns)
        assert parts == Counter((s, n) for s, ns in rows(directory, a, end.row).items() for n in ns)
    shutil.rmtree(directory)


@settings(max_examples=25, deadline=None)
@given(streams=st.lists(st.sampled_from("abcd"), min_size=1, max_size=60))
def test_grouping_by_stream_keeps_the_order_within_each(streams: list[str]) -> None:
    batch = enveloped.encode([envelope(n, stream) for n, stream in enumerate(streams)])
    grouped = list(enveloped.by_stream(batch))
    assert sorted(b.stream for b in grouped) == sorted(set(streams))
    for found in grouped:
        assert set(found.records.column("stream").to_pylist()) == {found.stream}
        numbers_of = [int(value) for value in found.records.column("payload").to_pylist()]
        assert numbers_of == [n for n, stream in enumerate(streams) if stream == found.stream]
