"""The kit itself: its reference connectors keep every law, and for each law a connector that breaks it is caught."""

from __future__ import annotations

import inspect
import json
import os
import random
import re
import signal
import threading
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pydantic import ConfigDict, Field

from penstock import failpoints
from penstock.config import Config
from penstock.errors import ConfigError, DataError, FatalError, RetryableError
from penstock.pipeline.routing import Route, Router, Target
from penstock.runtime.job import Job, Part, TaskResult
from penstock.schema.evolution import Policy
from penstock.sink import CommittedEpoch, Epoch, Receipt, SinkConnectorCapabilities, WriteResult
from penstock.source import (
    PollingSource,
    Position,
    ReadLimit,
    SourceBatch,
    SourceCheckpoint,
    SourceContext,
    SourceEnvelope,
    SourceRecord,
    StreamingSource,
)
from penstock.testing import (
    Crash,
    CrashContract,
    Fault,
    FaultySink,
    FaultySource,
    ForkEngine,
    MemoryApplySink,
    MemorySink,
    MemorySinkConfig,
    MemorySource,
    MemorySourceConfig,
    Pause,
    SinkContract,
    SourceContract,
    crash,
    processes,
    sinks,
)
from penstock.testing.crash import applying, scenarios
from penstock.testing.engine import Forked, Killed, Zygote
from penstock.testing.memory import MemoryReceipt
from penstock.testing.sinks.changes import WIDER
from penstock.testing.sources import journaled

ROWS = [[{"id": 3 * item + row} for row in range(3)] for item in range(10)]


# -- the reference connectors keep every law ------------------------------------------------------------------------


class TestMemorySink(SinkContract):
    @pytest.fixture(params=["append", "upsert"])
    def sink(self, tmp_path, request):
        return MemorySink(MemorySinkConfig(path=tmp_path / "target", mode=request.param))

    @pytest.fixture
    def visible(self, sink):
        return sink.visible


class TestMemoryApplySink(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path):
        return MemoryApplySink(MemorySinkConfig(path=tmp_path / "target"))

    @pytest.fixture
    def visible(self, sink):
        return sink.visible


class AppliesInSight(MemoryApplySink):
    """Shows what it applied before the commit."""

    def apply(self, epoch, work, task):
        applied = super().apply(epoch, work, task)
        for log in sorted((self._topic(work.topic) / "log").glob("*"))[-1:]:
            entry = json.loads(log.read_text())
            log.write_text(json.dumps({**entry, "files": [*entry["files"], applied.file]}))
        return applied


class CommitsStalePlans(MemoryApplySink):
    """Does not look whether the target is where the plan saw it."""

    def commit_applied(self, epoch, topic, receipts, end, applied):
        now = len(self._log(topic))
        super().commit_applied(epoch, topic, receipts, end, [a.model_copy(update={"version": now}) for a in applied])


class KeepsDeadWork(MemoryApplySink):
    """Never removes what a dead try has done."""

    def sweep(self, epoch, keep):
        pass


class PlansWhatIsDone(MemoryApplySink):
    """Does not look whether the epoch is there when it plans."""

    def plan_apply(self, epoch, topic, receipts):
        return super().plan_apply(replace(epoch, number=epoch.number + 1), topic, receipts)


class TestMemorySource(SourceContract):
    @pytest.fixture
    def source(self, tmp_path):
        return MemorySource.of(tmp_path, *ROWS[:8], Pause(), *ROWS[8:])

    @pytest.fixture
    def expected(self):
        return [row for rows in ROWS[:8] for row in rows]

    @pytest.fixture
    def more(self, source):
        return source.release

    @pytest.fixture
    def wrong(self, tmp_path):
        return MemorySource.of(tmp_path / "nowhere")


class OutsideConfig(Config):
    path: Path
    """Directory that stands for the outside system: it holds what that was told."""


class Poller(PollingSource[OutsideConfig]):
    """A polling source that keeps every law."""

    name = "poller"

    def open(self, context=SourceContext()):
        self.next = 0

    def poll_batch(self, max_records):
        found = [f"message {n}".encode() for n in range(self.next, min(20, self.next + max_records))]
        self.next += len(found)
        return [SourceEnvelope(SourceRecord("messages", payload)) for payload in found] or None

    def checkpoint(self):
        return SourceCheckpoint(offsets={"all": self.next})

    def restore(self, checkpoint):
        if not isinstance(checkpoint.offsets.get("all"), int):
            raise FatalError("not a checkpoint of this source", code="PEN-5011")
        self.next = checkpoint.offsets["all"]

    def commit(self, offsets):
        tell(self.config.path, offsets["all"])


class Streamer(StreamingSource[OutsideConfig]):
    """A streaming source that keeps every law."""

    name = "streamer"

    def start_streaming(self, sender):
        for n in range(20):
            envelope = SourceEnvelope(SourceRecord("messages", f"message {n}".encode()))
            sender.send(envelope, on_durable=lambda n=n: tell(self.config.path, n + 1))
        while not sender.wait(60):
            pass


def tell(path, count):
    (path / "told").write_text(str(count))


def told(path):
    return int((path / "told").read_text()) if (path / "told").exists() else 0


class MessageContract(SourceContract):
    @pytest.fixture
    def expected(self):
        return [f"message {n}".encode() for n in range(20)]

    @pytest.fixture
    def told(self, tmp_path):
        return lambda: told(tmp_path)


class TestPoller(MessageContract):
    @pytest.fixture
    def source(self, tmp_path):
        return Poller(OutsideConfig(path=tmp_path))


class TestStreamer(MessageContract):
    @pytest.fixture
    def source(self, tmp_path):
        return Streamer(OutsideConfig(path=tmp_path))


# -- sinks that break one law each ----------------------------------------------------------------------------------


class Unpicklable(MemorySink):
    def __reduce__(self):
        return type(self), (self.config, threading.Lock())


class ClosesOnce(MemorySink):
    closed = False

    def close(self):
        assert not self.closed, "closed already"
        self.closed = True


class LaxConfig(MemorySinkConfig):
    model_config = ConfigDict(extra="ignore")


class Lax(MemorySink):
    def __init__(self, config):
        super().__init__(LaxConfig(**dict(config)))


class Mute(MemorySink):
    def health_check(self):
        return None


class LosesABatch(MemorySink):
    def write_batch(self, topic, batch):
        self._rows[topic] = [batch]
        return WriteResult(batch.num_rows)


class ForgetsCopies(MemorySink):
    def mark_seeded(self, topic):
        pass


class Miscounts(MemorySink):
    def write_batch(self, topic, batch):
        super().write_batch(topic, batch)
        return WriteResult()


class NoJson(Receipt):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    handle: Any = Field(default_factory=threading.Lock)


class ReceiptNotJson(MemorySink):
    receipt_type = NoJson

    def pre_commit(self, epoch):
        return NoJson()


class AlwaysMarked(MemorySink):
    def committed_epoch(self, pipeline, topic):
        return super().committed_epoch(pipeline, topic) or CommittedEpoch(incarnation="", number=0)


class VisibleTooEarly(MemorySink):
    def pre_commit(self, epoch):
        receipt = super().pre_commit(epoch)
        self.commit_epoch(epoch, [receipt], {})
        return receipt


class Unnamed(MemoryReceipt):
    def topics(self):
        return ()


class ReceiptWithoutTopics(MemorySink):
    receipt_type = Unnamed

    def pre_commit(self, epoch):
        return Unnamed(files=super().pre_commit(epoch).files)


class NeverRollsBack(MemorySink):
    def rollback_epoch(self, epoch, receipts):
        pass


class RollsBackByNumber(MemorySink):
    """Takes the epoch for the try, and so removes what another try has staged."""

    def rollback_epoch(self, epoch, receipts):
        for file in self.config.path.glob(f"*/rows/{epoch.number:012d}-*"):
            file.unlink()


class RollsBackEverything(MemorySink):
    def rollback_epoch(self, epoch, receipts):
        for file in self.config.path.glob("*/rows/*"):
            file.unlink()


class CommitsWhatItFinds(MemorySink):
    """Takes the files in the directory for the receipts."""

    def flush(self):
        self.pre_commit(None)

    def commit_topic(self, epoch, topic, receipts, end):
        found = [file.name for file in (self._topic(topic) / "rows").glob(f"{epoch.stem()}*")]
        super().commit_topic(epoch, topic, [MemoryReceipt(files={topic: found})], end)


class SweepsAll(MemorySink):
    def sweep(self, epoch, keep):
        super().sweep(epoch, ())


class CommitsTwice(MemorySink):
    """Never asks whether the epoch is there: it looks for a marker under a name that nobody has used."""

    def commit_topic(self, epoch, topic, receipts, end):
        super().commit_topic(replace(epoch, pipeline=uuid4().hex), topic, receipts, end)

    def committed_epoch(self, pipeline, topic):
        log = self._log(topic)
        return CommittedEpoch.model_validate(log[-1]["marker"]) if log else None


class MarksTheTry(CommitsTwice):
    """Takes another try at the same epoch for another epoch."""

    def commit_topic(self, epoch, topic, receipts, end):
        tries = self.config.path / f"{epoch.attempt}-{topic[-1]}"
        if not tries.exists():
            super().commit_topic(epoch, topic, receipts, end)
            tries.touch()


class ForgetsTheEnd(MemorySink):
    def commit_topic(self, epoch, topic, receipts, end):
        super().commit_topic(epoch, topic, receipts, {})


class RemembersInMemory(MemorySink):
    """Its marker dies with the process."""

    markers: dict[str, CommittedEpoch] = {}  # noqa: RUF012 - that it is shared is the fault

    def commit_topic(self, epoch, topic, receipts, end):
        super().commit_topic(epoch, topic, receipts, end)
        self.markers[topic] = CommittedEpoch(incarnation=epoch.incarnation, number=epoch.number, end=dict(end))

    def committed_epoch(self, pipeline, topic):
        return self.markers.get(topic)


class CommitsOneTopic(MemorySink):
    def commit_epoch(self, epoch, receipts, end):
        topic = min({topic for receipt in receipts for topic in receipt.topics()}, default=None)
        if topic is not None:
            self.commit_topic(epoch, topic, [r for r in receipts if topic in r.topics()], end)


class OlderIsDone(MemorySink):
    """Takes an older epoch for one that is done: a zombie goes on and believes that it has committed."""

    def commit_topic(self, epoch, topic, receipts, end):
        marker = self.committed_epoch(epoch.pipeline, topic)
        if marker is None or marker.number <= epoch.number:
            super().commit_topic(epoch, topic, receipts, end)


class BlindToRanges(MemorySink):
    """Takes any epoch of a number for the same one: what another run has read is given up as if it were committed."""

    def commit_topic(self, epoch, topic, receipts, end):
        super().commit_topic(replace(epoch, start={}, end={}), topic, receipts, end)


class ComparesNumbersOnly(MemorySink):
    """Compares its 1 with their 500, and its 501 with their 1."""

    def commit_topic(self, epoch, topic, receipts, end):
        marker = self.committed_epoch(epoch.pipeline, topic)
        if marker is None or epoch.number > marker.number:
            adopts = frozenset({(marker.incarnation, marker.number)}) if marker else frozenset()
            epoch = Epoch(epoch.pipeline, epoch.incarnation, epoch.number, epoch.attempt, adopts=adopts)
            super().commit_topic(epoch, topic, receipts, end)


class RetriesBlindly(MemorySink):
    """When another commit came first, it commits behind it without looking."""

    depth = 0

    def commit_topic(self, epoch, topic, receipts, end):
        self.depth += 1
        try:
            super().commit_topic(
                epoch if self.depth == 1 else replace(epoch, pipeline=uuid4().hex), topic, receipts, end
            )
        finally:
            self.depth -= 1


class SkipsWhatIsLost(MemorySink):
    def commit_topic(self, epoch, topic, receipts, end):
        there = [name for r in receipts for name in r.files[topic] if (self._topic(topic) / "rows" / name).exists()]
        super().commit_topic(epoch, topic, [MemoryReceipt(files={topic: there})], end)


def without_fsync(method):
    """The method, with an fsync that does nothing."""

    def unsafe(self, *args):
        fsync, os.fsync = os.fsync, lambda descriptor: None
        try:
            return method(self, *args)
        finally:
            os.fsync = fsync

    return unsafe


class StagesWithoutFsync(MemorySink):
    pre_commit = without_fsync(MemorySink.pre_commit)


class CommitsWithoutFsync(MemorySink):
    commit_topic = without_fsync(MemorySink.commit_topic)


class ClaimsTooMuch(MemorySink):
    def __init__(self, config):
        super().__init__(config)
        self.capabilities = self.capabilities.with_idempotent().with_upsert()


class LosesDeletes(MemorySink):
    def write_batch(self, topic, batch):
        rows = [row for row in batch.to_pylist() if row.get("_op") != "d"]
        return super().write_batch(topic, pa.RecordBatch.from_pylist(rows, schema=batch.schema))


class Upserting(MemorySink):
    """Loses a part of every change on its way in."""

    def __init__(self, config):
        super().__init__(config.model_copy(update={"mode": "upsert"}))

    def write_batch(self, topic, batch):
        rows = [row for each in batch.to_pylist() if (row := self.alter(each)) is not None]
        return super().write_batch(topic, pa.RecordBatch.from_pylist(rows, schema=batch.schema))


class IgnoresPositions(Upserting):
    def alter(self, row):
        return {**row, "_position": ""}


class IgnoresTruncates(Upserting):
    def alter(self, row):
        return row if row["_op"] != "t" else None


class NullsUnchanged(Upserting):
    def alter(self, row):
        return {**row, "_unchanged": None}


class LeavesOldKeys(Upserting):
    def alter(self, row):
        return {**row, "_old_key": None}


class NullsUnknown(Upserting):
    def write_batch(self, topic, batch):
        if "note" not in batch.schema.names:
            batch = batch.append_column("note", pa.nulls(batch.num_rows, pa.string()))
        return MemorySink.write_batch(self, topic, batch)


class IgnoresNewColumns(MemorySink):
    def write_batch(self, topic, batch):
        return super().write_batch(topic, batch.select(["id", "name", "part"]))


class TakesAnyType(MemorySink):
    def write_batch(self, topic, batch):
        names = pa.array([str(value) for value in batch.column("name").to_pylist()])
        return super().write_batch(topic, batch.set_column(1, "name", names))


class NeverWidens(MemorySink):
    def write_batch(self, topic, batch):
        if "value" in batch.schema.names:
            batch = batch.set_column(3, "value", pc.cast(batch["value"], pa.int32(), safe=False))
        return super().write_batch(topic, batch)


class HasNoPolicy(MemorySink):
    """Parses the option, and ignores it."""

    def policy(self, topic):
        return Policy.EVOLVE


class LosesNullPartitions(MemorySink):
    def write_batch(self, topic, batch):
        if self.config.partition_by:
            batch = batch.filter(batch.column("part").is_valid())
        return super().write_batch(topic, batch)


BROKEN_SINKS = {
    "test_work_is_small_and_what_it_gives_is_visible_to_nobody": (AppliesInSight, "shows before its commit"),
    "test_work_that_is_done_is_committed_once": (PlansWhatIsDone, "there is work for a committed epoch"),
    "test_a_plan_that_another_commit_overtook_is_stale": (CommitsStalePlans, "DID NOT RAISE"),
    "test_a_sweep_removes_the_work_of_a_dead_try_and_keeps_what_is_committed": (
        KeepsDeadWork,
        "left files of a dead try",
    ),
    "test_it_is_a_picklable_value_until_it_is_opened": (Unpicklable, "cannot pickle"),
    "test_opening_and_closing_may_repeat": (ClosesOnce, "closed already"),
    "test_an_unknown_option_is_refused": (Lax, "DID NOT RAISE"),
    "test_it_answers_what_the_runtime_asks_of_it": (Mute, "HealthStatus"),
    "test_rows_of_all_tasks_and_batches_are_visible_after_the_commit": (LosesABatch, "not what is visible"),
    "test_a_first_copy_without_rows_is_remembered_and_rows_may_follow": (ForgetsCopies, "the copy is forgotten"),
    "test_it_counts_what_it_takes": (Miscounts, "assert 0 == 7"),
    "test_receipts_survive_pickle_and_json": (ReceiptNotJson, "cannot pickle|Unable to serialize"),
    "test_a_topic_without_rows_holds_nothing": (AlwaysMarked, "is None"),
    "test_nothing_is_visible_before_the_commit": (VisibleTooEarly, "rows are visible after pre_commit"),
    "test_a_receipt_names_the_topics_that_were_staged": (ReceiptWithoutTopics, "set()"),
    "test_a_rollback_leaves_nothing_of_its_try": (NeverRollsBack, "left staged files behind"),
    "test_a_rollback_touches_no_other_try": (RollsBackByNumber, "PEN-2004"),
    "test_a_rollback_touches_nothing_that_is_committed": (RollsBackEverything, "No such file"),
    "test_a_task_that_dies_shows_nothing": (CommitsWhatItFinds, "without a receipt became visible"),
    "test_a_sweep_keeps_what_the_receipts_name_and_removes_the_rest": (SweepsAll, "No such file"),
    "test_an_epoch_that_is_committed_twice_is_there_once": (CommitsTwice, "applied twice"),
    "test_another_try_at_a_committed_epoch_adds_nothing": (MarksTheTry, r"\[0, 0, 1, 1"),
    "test_the_target_records_whose_epoch_it_holds_and_where_it_ended": (ForgetsTheEnd, "@epoch"),
    "test_another_process_sees_the_same_marker": (RemembersInMemory, "None"),
    "test_every_topic_of_an_epoch_is_committed": (CommitsOneTopic, r"\[1, None\]"),
    "test_a_commit_of_an_older_epoch_is_fenced": (OlderIsDone, "was not fenced"),
    "test_an_epoch_of_the_same_number_and_other_ranges_is_fenced": (BlindToRanges, "was not fenced"),
    "test_another_incarnation_is_fenced_unless_it_adopts_the_marker": (ComparesNumbersOnly, "was not fenced"),
    "test_of_two_commits_that_race_one_wins": (RetriesBlindly, "won: .*first.*second"),
    "test_staged_data_that_is_gone_is_reported_as_lost": (SkipsWhatIsLost, "DID NOT RAISE"),
    "test_what_is_staged_is_synced_before_the_receipt": (StagesWithoutFsync, "never fsynced"),
    "test_what_is_committed_is_synced_before_commit_returns": (CommitsWithoutFsync, "never fsynced"),
    "test_a_row_that_comes_twice_is_there_once": (ClaimsTooMuch, "Left contains 30 more items"),
    "test_the_newest_row_of_a_key_stays": (ClaimsTooMuch, "newest"),
    "test_changes_are_applied_by_upsert_sinks_and_kept_by_others": (LosesDeletes, "a change got lost"),
    "test_changes_are_applied_in_the_order_of_their_positions": (IgnoresPositions, "'last'"),
    "test_a_truncate_empties_the_target_of_what_came_before_it": (IgnoresTruncates, "'void'"),
    "test_a_column_that_is_unchanged_keeps_its_value": (NullsUnchanged, "1: None"),
    "test_a_row_whose_key_changes_moves_with_what_was_not_sent": (LeavesOldKeys, "7: 'seven'"),
    "test_a_column_that_a_change_does_not_know_keeps_its_value": (NullsUnknown, "1: None"),
    "test_a_column_that_is_added_is_null_in_older_rows": (IgnoresNewColumns, "note"),
    "test_a_column_of_another_type_is_refused_by_its_name": (TakesAnyType, "DID NOT RAISE"),
    "test_a_type_that_becomes_wider_is_followed_or_refused_by_its_name": (NeverWidens, "assert"),
    "test_freeze_refuses_a_new_column_and_names_itself": (HasNoPolicy, "DID NOT RAISE"),
    "test_discard_row_leaves_out_what_has_no_place_and_counts_it": (HasNoPolicy, r"\(10, 0\) == \(5, 5\)"),
    "test_discard_value_keeps_the_row_without_it_and_counts_it": (HasNoPolicy, r"\(10, 0\) == \(10, 5\)"),
    "test_rows_laid_out_by_a_column_come_back_whole": (LosesNullPartitions, "Right contains 4 more items"),
}


@pytest.mark.parametrize("law", BROKEN_SINKS)
def test_a_sink_that_breaks_a_law_is_caught(law, tmp_path, monkeypatch):
    broken, message = BROKEN_SINKS[law]
    sink = broken(MemorySinkConfig(path=tmp_path / "target"))
    fixtures = {
        "sink": sink,
        "visible": sink.visible,
        "tmp_path": tmp_path,
        "monkeypatch": monkeypatch,
        "rival": "a later incarnation",
        **dict(zip(("narrow", "wide"), WIDER[0], strict=True)),
        "lose_staged": lambda receipts: sinks._delete_named(tmp_path, receipts),
        "partitioned_sink": broken(MemorySinkConfig(path=tmp_path / "target", partition_by=("part",))),
    }
    check_caught(SinkContract, law, fixtures, message)


# -- sources that break one law each --------------------------------------------------------------------------------


class UnpicklableSource(MemorySource):
    def __reduce__(self):
        return type(self), (self.config, threading.Lock())


class ClosesSourceOnce(MemorySource):
    closed = False

    def close(self):
        assert not self.closed, "closed already"
        self.closed = True


class LaxSourceConfig(MemorySourceConfig):
    model_config = ConfigDict(extra="ignore")


class LaxSource(MemorySource):
    def __init__(self, config):
        super().__init__(LaxSourceConfig(**dict(config)))


class OpensAnything(MemorySource):
    def open(self, context=SourceContext()):
        pass


class MuteSource(MemorySource):
    def lag(self):
        return "a lot"


class Lossy(Position):
    index: int = Field(default=0, exclude=True)


class LossyPosition(MemorySource):
    position_type = Lossy

    def latest(self, start, limit):
        return Lossy(index=super().latest(start, limit).index)


class OtherSchema(MemorySource):
    def schema(self):
        return {"rows": pa.schema([("id", pa.string())])}


class MovingEnd(MemorySource):
    calls = 0

    def latest(self, start, limit):
        self.calls += 1
        return type(start)(index=min(8, start.index + self.calls))


class Overlaps(MemorySource):
    """Both edges belong to its ranges."""

    def split(self, start, end):
        return range(start.index, min(8, end.index + 1))


class SkipsARow(MemorySource):
    """The last item of a range is in none of its splits."""

    def split(self, start, end):
        return range(start.index, max(start.index + 1, end.index - 1))


class CapsAnyway(MemorySource):
    """A bound of its own holds even when everything is asked for."""

    def latest(self, start, limit):
        end = super().latest(start, limit)
        return type(end)(index=min(end.index, start.index + 4))


class Random(MemorySource):
    def read(self, split):
        for batch in super().read(split):
            ids = pa.array([random.random() for _ in range(batch.num_rows)])
            yield SourceBatch(pa.record_batch([ids], ["id"]), stream="rows")


class Consumes(MemorySource):
    """Acknowledges what it reads: the rows are gone before anyone has committed them."""

    def read(self, split):
        yield from super().read(split)
        self.ack(self.position_type(index=split + 1))


class SplitsByMemory(MemorySource):
    """Its splits mean something only to the copy that made them."""

    def split(self, start, end):
        self.planned = list(range(start.index, end.index))
        return range(len(self.planned))

    def read(self, split):
        yield from super().read(getattr(self, "planned", [0] * 100)[split])


class KeepsItsPlace(MemorySource):
    """Goes on from where this copy stands, whatever position it is given."""

    place = 0

    def split(self, start, end):
        first, self.place = self.place, self.place + end.index - start.index
        return range(first, self.place)


class AcksOnce(MemorySource):
    def ack(self, end):
        if end.index <= self.acked:
            raise FatalError(f"{end} was acked already")
        super().ack(end)


class KnowsNoBounds(MemorySource):
    def latest(self, start, limit):
        return super().latest(start, replace(limit, until=None))


class ReadsOn(MemorySource):
    """Whatever lands late is read with the last item that was there."""

    def read(self, split):
        yield from super().read(split)
        if split == 7 and self._remembers("released", 8):
            yield from super().read(9)


class RestoresNothing(Poller):
    def restore(self, checkpoint):
        if "all" not in checkpoint.offsets:
            raise ConfigError("not a checkpoint of this source")


class TellsAtOnce(Poller):
    def poll_batch(self, max_records):
        found = super().poll_batch(max_records)
        self.commit({"all": self.next})
        return found


class TakesAnyCheckpoint(Poller):
    def restore(self, checkpoint):
        self.next = 0


class NeverStops(Streamer):
    def start_streaming(self, sender):
        super().start_streaming(sender)
        threading.Event().wait()


class StreamsAndTells(Streamer):
    def start_streaming(self, sender):
        tell(self.config.path, 20)
        super().start_streaming(sender)


class SendsTwice(Streamer):
    def start_streaming(self, sender):
        sender.send(SourceEnvelope(SourceRecord("messages", b"message 0")))
        super().start_streaming(sender)


BROKEN_SOURCES = [
    ("test_it_is_a_picklable_value_until_it_is_opened", UnpicklableSource, "cannot pickle"),
    ("test_opening_and_closing_may_repeat", ClosesSourceOnce, "closed already"),
    ("test_an_unknown_option_is_refused", LaxSource, "DID NOT RAISE"),
    ("test_a_wrong_setting_is_a_config_error", OpensAnything, "DID NOT RAISE"),
    ("test_it_answers_what_the_runtime_asks_of_it", MuteSource, "a lot"),
    ("test_positions_survive_json", LossyPosition, "index=0"),
    ("test_rows_are_of_the_schema_that_it_gives", OtherSchema, "schema\\(\\) says"),
    ("test_the_end_stays_where_it_is_while_nothing_new_comes", MovingEnd, "nothing new came"),
    ("test_a_range_holds_the_rows_of_the_ranges_it_is_cut_into", Overlaps, "range .* differ .* missing"),
    ("test_a_range_holds_the_rows_of_the_ranges_it_is_cut_into", SkipsARow, "range .* differ .* too many"),
    ("test_all_there_is_can_be_one_range", CapsAnyway, "without a limit .* differ"),
    ("test_a_range_always_holds_the_same_rows", Random, "the same range again differ"),
    ("test_a_range_always_holds_the_same_rows", Consumes, "PEN-5011"),
    ("test_splits_cover_a_range_exactly_in_any_order_and_process", SplitsByMemory, "splits read elsewhere .* differ"),
    ("test_a_position_from_json_goes_on_exactly_in_a_new_process", KeepsItsPlace, "differ|list index"),
    ("test_an_ack_may_repeat_and_may_be_old", AcksOnce, "was acked already"),
    ("test_nothing_is_planned_past_a_position_that_bounds_it", KnowsNoBounds, r"latest\(\) comes to"),
    ("test_it_holds_the_rows_that_are_expected", SkipsARow, "expected differ .* missing"),
    ("test_rows_that_come_later_are_in_later_ranges_only", ReadsOn, "before and after more rows came differ"),
    ("test_polling_goes_on_exactly_from_every_checkpoint", RestoresNothing, "polling from checkpoint"),
    ("test_a_commit_may_repeat_and_nothing_is_told_before_it", TellsAtOnce, "before anything was on disk"),
    ("test_an_invalid_checkpoint_is_refused", TakesAnyCheckpoint, "DID NOT RAISE"),
    (
        "test_streaming_sends_everything_waits_until_it_is_durable_and_stops",
        NeverStops,
        "did not return within",
    ),
    (
        "test_streaming_sends_everything_waits_until_it_is_durable_and_stops",
        StreamsAndTells,
        "before anything was on disk",
    ),
    ("test_streaming_sends_everything_waits_until_it_is_durable_and_stops", SendsTwice, "differ .* too many"),
]


@pytest.mark.parametrize(("law", "broken", "message"), BROKEN_SOURCES)
def test_a_source_that_breaks_a_law_is_caught(law, broken, message, tmp_path, monkeypatch):
    monkeypatch.setattr(journaled, "STOP_SECS", 0.2)
    messages = issubclass(broken, Poller | Streamer)
    source = broken(OutsideConfig(path=tmp_path)) if messages else broken.of(tmp_path, *ROWS[:8], Pause(), *ROWS[8:])
    rows = [f"message {n}".encode() for n in range(20)] if messages else [row for rows in ROWS[:8] for row in rows]
    fixtures = {
        "source": source,
        "limit": 3,
        "expected": rows,
        "more": None if messages else source.release,
        "told": (lambda: told(tmp_path)) if messages else None,
        "wrong": source,
        "invalid_checkpoint": SourceCheckpoint(),
    }
    check_caught(SourceContract, law, fixtures, message)


def check_caught(contract, law, fixtures, message):
    test = getattr(contract(), law)
    wanted = inspect.signature(test).parameters
    with pytest.raises((Exception, pytest.fail.Exception), match=f"(?s){message}"):
        test(**{name: value for name, value in fixtures.items() if name in wanted})


@pytest.mark.parametrize(
    ("contract", "broken"), [(SinkContract, BROKEN_SINKS), (SourceContract, [law for law, *_ in BROKEN_SOURCES])]
)
def test_every_law_has_a_connector_that_breaks_it(contract, broken):
    assert {name for name in dir(contract) if name.startswith("test_")} == set(broken)


def test_every_capability_is_covered_by_a_law():
    laws = [getattr(SinkContract, name) for name in dir(SinkContract) if name.startswith("test_")]
    assert {flag for law in laws for flag in getattr(law, "needs", ())} == {
        flag.name for flag in fields(SinkConnectorCapabilities)
    }


# -- the crash suite catches what only a crash shows ----------------------------------------------------------------


class CrashOf(CrashContract):
    sink: type[MemorySink] = MemorySink

    def make_sink(self, path):
        return self.sink(MemorySinkConfig(path=path))

    def visible(self, path, topic):
        return self.make_sink(path).visible(topic)


class CrashOfCommitsTwice(CrashOf):
    sink = CommitsTwice


class CrashOfVisibleTooEarly(CrashOf):
    sink = VisibleTooEarly


class CrashOfNumbersOnly(CrashOf):
    sink = ComparesNumbersOnly


class CrashOfRetriesBlindly(CrashOf):
    sink = RetriesBlindly


class CrashOfSkipsWhatIsLost(CrashOf):
    sink = SkipsWhatIsLost


class CrashOfRemembersInMemory(CrashOf):
    sink = RemembersInMemory


class CrashOfCommitsWhatItFinds(CrashOf):
    """Takes every file of the epoch for its own, and never rolls back."""

    class sink(MemorySink):
        def commit_topic(self, epoch, topic, receipts, end):
            found = [file.name for file in (self._topic(topic) / "rows").glob(f"{epoch.number:012d}-*")]
            super().commit_topic(epoch, topic, [MemoryReceipt(files={topic: found})], end)

        def rollback_epoch(self, epoch, receipts):
            pass


@pytest.mark.parametrize(
    ("contract", "scenario", "args", "message"),
    [
        (CrashOfCommitsTwice, scenarios.killed, ("commit.after", 1), "doubled"),
        (CrashOfVisibleTooEarly, scenarios.killed, ("stage.after", 1), "not a prefix of whole epochs|PEN-500"),
        (CrashOfCommitsWhatItFinds, scenarios.killed, ("stage.task", 1), "doubled|File is too small"),
        (CrashOfNumbersOnly, scenarios.zombie_of_lost_state, (), "fenced|PEN-5011"),
        (CrashOfRetriesBlindly, scenarios.zombie_of_lost_state, (), "fenced|doubled"),
        (CrashOfSkipsWhatIsLost, scenarios.staging_lost, ("prepare.after",), "lost"),
        (CrashOfRemembersInMemory, scenarios.state_lost, ("commit.after",), "PEN-5011"),
    ],
)
def test_a_sink_that_breaks_in_a_crash_is_caught(contract, scenario, args, message, tmp_path):
    with pytest.raises((Exception, pytest.fail.Exception), match=f"(?s){message}"):
        contract()._play(scenario, tmp_path, *args)


def test_the_crash_suite_passes_every_failpoint_of_the_protocol():
    protocol = {name for name in failpoints.NAMES if not name.startswith("journal.")}
    assert {step.partition("@")[0] for step in (*crash.STEPS, *applying.APPLY_STEPS)} == protocol


def test_the_crash_matrix_of_the_spec_names_every_step_and_every_test_it_claims():
    page = (Path(__file__).parents[1] / "docs" / "spec" / "epochs.md").read_text()
    steps = {step.partition("@")[0] for step in (*crash.STEPS, *applying.APPLY_STEPS)}
    assert steps <= set(re.findall(r"`([a-z_]+\.[a-z]+)(?:@\d)?`", page))
    claimed = set(re.findall(r"`(?:CrashContract\.)?(test_[a-z_]+)…?`", page))
    assert len(claimed) >= 10
    for name in claimed:
        assert any(test.startswith(name) for test in dir(CrashContract)), name


def test_a_failpoint_that_is_never_passed_is_not_taken_for_a_success(tmp_path):
    with pytest.raises(AssertionError, match="never passed"):
        CrashOf()._play(scenarios.killed, tmp_path, "commit.before@99", 1)


# -- the forking engine ---------------------------------------------------------------------------------------------


def job(tmp_path, sink_path, *script, source=None, routes=()):
    made = source or MemorySource.of(tmp_path, *script)
    return Job(
        epoch=Epoch("kit", "one", 1),
        parts=[Part(number, "memory", number) for number in range(len(made.config.script))],
        sources={"memory": made},
        sinks={"lake": MemorySink(MemorySinkConfig(path=sink_path))},
        router=Router(tuple(routes), ("lake",)),
    )


def staged(work, results):
    """The ids that each task staged."""
    sink = work.sinks["lake"]
    sink.open()
    found = []
    for result in results:
        receipts = [result.receipts["lake"]] if result.receipts else []
        names = [name for receipt in receipts for name in receipt.files["/rows"]]
        paths = [sink.config.path / "rows" / "rows" / name for name in names]
        found.append([i for path in paths for i in pa.ipc.open_file(str(path)).read_all()["id"].to_pylist()])
    return found


def test_each_task_gets_neighbouring_parts(tmp_path):
    work = job(tmp_path, tmp_path / "lake", *ROWS[:4])
    assert staged(work, ForkEngine(2).run(work)) == [list(range(6)), list(range(6, 12))]


def test_a_route_with_partitions_keeps_the_rows_of_a_key_in_one_task_and_in_order(tmp_path):
    script = [[{"id": key, "turn": turn} for key in range(9)] for turn in range(4)]
    work = job(tmp_path, tmp_path / "lake", *script, routes=[Route(partitions=3, key=("id",))])
    results = ForkEngine(2).run(work)
    tasks = [ids for ids in staged(work, results) if ids]
    assert len(tasks) == 3
    assert sorted(i for ids in tasks for i in ids) == sorted(list(range(9)) * 4)
    assert not set(tasks[0]) & set(tasks[1])
    assert {number: tally.rows for result in results for number, tally in result.tallies.items()} == dict.fromkeys(
        range(4), 9
    )


@pytest.mark.parametrize("route", [Route(sql="select 1"), Route(transform="module:function")])
def test_routes_with_sql_are_refused(tmp_path, route):
    with pytest.raises(ConfigError, match="no SQL"):
        ForkEngine().check([(Target("/rows", ("sink",), route), pa.schema([]))])
    with pytest.raises(ConfigError, match="no SQL"):
        ForkEngine().run(job(tmp_path, tmp_path / "lake", ROWS[0], routes=[route]))


class Raises(MemorySource):
    def read(self, split):
        raise self.config.script[split]


@pytest.mark.parametrize("error", [DataError("bad row", hint="mend it"), RetryableError("later"), ValueError("odd")])
def test_a_task_raises_in_the_driver_what_it_raised(tmp_path, error):
    work = job(tmp_path, tmp_path / "lake", source=Raises.of(tmp_path, error))
    with pytest.raises(type(error)) as raised:
        ForkEngine().run(work)
    assert str(raised.value) == str(error)
    assert "in process" in "".join(raised.value.__notes__)


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def test_an_error_that_cannot_travel_is_told_as_a_fatal_one(tmp_path):
    class Inner(Exception):
        pass

    for error in (Odd(1, 2), Inner("local")):
        with pytest.raises(FatalError, match=f"PEN-5012 {type(error).__name__}"):
            Forked(lambda error=error: (_ for _ in ()).throw(error)).result()


def test_a_task_that_is_killed_is_a_lost_task(tmp_path):
    work = job(tmp_path, tmp_path / "lake", Crash(), *ROWS[:3])
    with pytest.raises(RetryableError, match=r"PEN-2006 .*SIGKILL"):
        ForkEngine().run(work)
    assert sum(len(ids) for ids in staged(work, ForkEngine().run(work))) == 9


def test_a_task_that_is_killed_takes_the_driver_along_when_asked(tmp_path):
    work = job(tmp_path, tmp_path / "lake", Crash(), *ROWS[:3])
    with pytest.raises(Killed) as killed:
        Forked(lambda: ForkEngine(die_with_task=True).run(work)).result()
    assert killed.value.signal == signal.SIGKILL


def test_a_task_that_fails_is_tried_again_under_another_attempt(tmp_path):
    source = FaultySource(MemorySource.of(tmp_path, *ROWS[:2]), Fault("read", "reject", tmp_path))
    work = job(tmp_path, tmp_path / "lake", source=source)
    results: list[TaskResult] = list(ForkEngine(task_attempts=2).run(work))
    assert sorted(result.attempt for result in results) == [0, 1]
    assert sorted(i for ids in staged(work, results) for i in ids) == list(range(6))


def test_tasks_die_with_their_driver(tmp_path):
    source = FaultySource(MemorySource.of(tmp_path, *ROWS[:2]), Fault("read", "hang", tmp_path, times=2))
    work = job(tmp_path, tmp_path / "lake", source=source)
    driver = Forked(lambda: ForkEngine().run(work))
    tasks = processes.wait_until(
        lambda: (c := list(processes.children_of(driver.pid))) and len(c) == 2 and c, "two tasks"
    )
    processes.wait_until(lambda: source.fault.struck == 2, "both to hang")
    driver.kill()
    processes.wait_until(lambda: all(processes.process_state(task) in ("", "Z") for task in tasks), "the tasks to die")


# -- scripts and faults ---------------------------------------------------------------------------------------------


def test_a_scripted_crash_kills_its_reader_once(tmp_path):
    source = MemorySource.of(tmp_path, Crash(), {"id": 1})
    with pytest.raises(Killed):
        Forked(lambda: list(source.read(0))).result()
    assert Forked(lambda: list(source.read(0))).result() == []


def test_a_scripted_pause_ends_when_it_is_released_in_any_process(tmp_path):
    source = MemorySource.of(tmp_path, {"id": 1}, Pause(), {"id": 2})
    assert source.latest(source.initial(), ReadLimit()).index == 1
    MemorySource.of(tmp_path, *source.config.script).release()
    assert source.latest(source.initial(), ReadLimit()).index == 3


def test_a_fault_strikes_as_often_as_it_was_told_to(tmp_path):
    sink = FaultySink(MemorySink(MemorySinkConfig(path=tmp_path / "lake")), Fault("flush", "reject", tmp_path, times=2))
    assert sink.capabilities.exactly_once
    for _ in range(2):
        with pytest.raises(RetryableError):
            sink.flush()
    sink.flush()
    assert sink.fault.struck == 2


def test_a_lost_answer_comes_after_the_call(tmp_path):
    called = []
    fault = Fault("commit_epoch", "lose_answer", tmp_path)
    inner = SimpleNamespace(config=None, commit_epoch=lambda *args: called.append(args))
    with pytest.raises(RetryableError):
        FaultySink(inner, fault).commit_epoch(Epoch("kit", "one", 1), [], {})  # type: ignore[arg-type]
    assert len(called) == 1


@pytest.mark.timeout(60)
def test_a_process_that_forks_tasks_ends_though_another_was_forked_after_it() -> None:
    first, second = Zygote(), Zygote()
    for each in (first, second):
        each.stop()
        assert not Path(f"/proc/{each.pid}").exists()
