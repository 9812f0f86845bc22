"""What both file-staging sinks must do, whatever their target looks like, beyond what the kit asks of every sink."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import durable, failpoints
from penstock.connectors.delta import table
from penstock.connectors.files import sink as files_sink
from penstock.connectors.lake import lists
from penstock.connectors.lake.staging import StagedFiles
from penstock.errors import ConfigError, SchemaError, StagingLost
from penstock.sink import Epoch, SinkConnector, Task, Topic
from penstock.testing.engine import Killed
from penstock.testing.processes import elsewhere

ORDERS = "/lake/orders"
END = {"source": {"offset": 7}}


def epoch(number: int, incarnation: str = "one", **more: Any) -> Epoch:
    return Epoch("shop", incarnation, number, **more)


def rows(first: int, count: int = 10, **more: pa.Array) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(range(first, first + count), pa.int64()), **more})


def stage(
    sink: SinkConnector[Any, Any], epoch: Epoch, *batches: pa.RecordBatch, topic: Topic = ORDERS, task: int = 0
) -> StagedFiles:
    """One task, in a sink of its own, as the runtime has it; its receipt as the manifest keeps it."""
    worker = pickle.loads(pickle.dumps(sink))
    worker.open()
    worker.begin_epoch(epoch, Task(task))
    for batch in batches:
        worker.write_batch(topic, batch)
    receipt = worker.pre_commit(epoch)
    worker.close()
    return StagedFiles.model_validate(json.loads(json.dumps(receipt.model_dump(mode="json"))))


def commit_in_a_process(
    sink: SinkConnector[Any, Any], epoch: Epoch, receipts: list[StagedFiles], failpoint: str = "", hook: str = ""
) -> int:
    """Commit in a process of its own that a failpoint or a hook kills; gives its exit code."""
    given = [receipt.model_dump(mode="json") for receipt in receipts]
    try:
        elsewhere(_commit, sink, epoch, given, failpoint, hook)
    except Killed as killed:
        return -killed.signal
    return 0


def _commit(sink: SinkConnector[Any, Any], epoch: Epoch, receipts: list[Any], failpoint: str, hook: str) -> None:
    failpoints.arm(failpoint or None)
    known = {"os": os, "signal": signal, "durable": durable, "files_sink": files_sink, "lists": lists, "table": table}
    exec(hook, known)
    sink.open()
    sink.commit_epoch(epoch, [StagedFiles.model_validate(receipt) for receipt in receipts], END)


def staged_places(sink: SinkConnector[Any, Any]) -> set[Path]:
    """Every data file below the sink's root, published or not."""
    root = Path(sink.config.path.partition("{topic}")[0])
    found = (path for path in root.rglob("0*-*-*-*") if not {".begun", "metadata"}.intersection(path.parts))
    return {path for path in found if path.is_file()}


class SinkProtocol:
    """Subclasses give `make(**options)` and `visible(topic) -> pa.Table`."""

    @pytest.fixture
    def sink(self, make: Callable[..., SinkConnector[Any, Any]]) -> SinkConnector[Any, Any]:
        return make()

    @pytest.fixture
    def ids(self, visible: Callable[..., pa.Table]) -> Callable[..., list[int]]:
        return lambda topic=ORDERS: sorted(visible(topic).column("id").to_pylist())

    def test_a_process_killed_at_the_point_of_commit_leaves_nothing_and_the_next_completes(self, sink, ids, visible):
        receipts = [stage(sink, e := epoch(1), rows(0))]
        assert commit_in_a_process(sink, e, receipts, "commit.before=kill") == -signal.SIGKILL
        assert visible(ORDERS).num_rows == 0
        assert sink.committed_epoch("shop", ORDERS) is None
        sink.commit_epoch(e, receipts, END)
        assert ids() == list(range(10))

    def test_a_process_killed_between_two_topics_is_completed(self, make, sink, ids):
        e = epoch(1)
        receipts = [stage(sink, e, rows(0), topic="/a"), stage(sink, e, rows(5), topic="/b", task=1)]
        assert commit_in_a_process(sink, e, receipts, "commit.topic=kill") == -signal.SIGKILL
        assert sink.committed_epoch("shop", "/a").number == 1
        assert sink.committed_epoch("shop", "/b") is None
        make().commit_epoch(e, receipts, END)
        assert ids("/a") == list(range(10))
        assert ids("/b") == list(range(5, 15))

    def test_topics_are_committed_at_the_same_time(self, sink, ids):
        topics = [f"/t{number}" for number in range(6)]
        assert sink.concurrent
        for number in (1, 2, 3):
            e = epoch(number)
            receipts = {t: stage(sink, e, rows(number * 10), topic=t, task=i) for i, t in enumerate(topics)}
            with ThreadPoolExecutor(6) as threads:
                list(threads.map(lambda t: sink.commit_topic(e, t, [receipts[t]], END), topics))  # noqa: B023
        for topic in topics:
            assert ids(topic) == list(range(10, 40))
            assert sink.committed_epoch("shop", topic).number == 3
        assert not list(sink.targets.root.glob("_penstock/.begun/*/*"))

    def test_of_two_processes_with_one_epoch_only_one_commits(self, make, sink, ids):
        """Both have looked at the target before either commits."""
        sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0))], END)
        twin = make()
        for each in (sink, twin):
            assert each.committed_epoch("shop", ORDERS).number == 1
        sink.commit_epoch(epoch(2), [stage(sink, epoch(2), rows(10))], END)
        twin.commit_epoch(epoch(2), [stage(twin, epoch(2), rows(10))], END)
        assert ids() == list(range(20))

    def test_a_pipeline_goes_on_after_another_one_has_committed_to_the_same_target(self, make, sink, ids):
        other = make()
        for number in (1, 2):
            for name, each, first in (("shop", sink, 0), ("till", other, 100)):
                e = Epoch(name, f"of-{name}", number)
                each.commit_epoch(e, [stage(each, e, rows(first + number * 10))], END)
        assert len(ids()) == 40
        assert sink.committed_epoch("till", ORDERS).number == sink.committed_epoch("shop", ORDERS).number == 2

    @pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"short")])
    def test_staged_data_that_is_gone_or_cut_is_reported_and_the_other_topics_are_committed(self, sink, ids, damage):
        e = epoch(1)
        lost = stage(sink, e, rows(0), topic="/a")
        damage(staged_places(sink).pop())
        kept = stage(sink, e, rows(10), topic="/b", task=1)
        with pytest.raises(StagingLost):
            sink.commit_epoch(e, [lost, kept], END)
        assert sink.committed_epoch("shop", "/a") is None
        assert ids("/b") == list(range(10, 20))
        again = epoch(1)
        sink.commit_epoch(again, [stage(sink, again, rows(0), topic="/a")], END)
        assert ids("/a") == list(range(10))
        sink.sweep(e, [])
        assert ids("/b") == list(range(10, 20))

    def test_a_sweep_keeps_what_the_receipts_name(self, sink, ids):
        e = epoch(1)
        kept = stage(sink, e, rows(0), task=0)
        with_kept = staged_places(sink)
        stage(sink, e, rows(0), task=0)
        sink.sweep(e, [kept])
        assert staged_places(sink) == with_kept
        sink.commit_epoch(e, [kept], END)
        sink.sweep(e, [kept])
        sink.sweep(e, [])
        assert ids() == list(range(10))

    def test_a_committed_epoch_leaves_no_list_of_begun_files(self, sink):
        sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0))], END)
        root = Path(sink.config.path.partition("{topic}")[0])
        assert not [path for path in root.rglob("*") if path.is_file() and ".begun" in path.parts]

    def test_columns_may_be_added_between_epochs_within_one_and_within_a_task(self, sink, visible):
        text = pa.array(["x"] * 10)
        sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0))], END)
        e = epoch(2)
        receipts = [
            stage(sink, e, rows(10), rows(20, note=text), task=0),
            stage(sink, e, rows(30, price=pa.array([1.5] * 10)), task=1),
        ]
        sink.commit_epoch(e, receipts, END)
        sink.commit_epoch(epoch(3), [stage(sink, epoch(3), rows(40))], END)
        table = visible(ORDERS).sort_by("id")
        assert table.column("id").to_pylist() == list(range(50))
        assert table.column("note").to_pylist() == [None] * 20 + ["x"] * 10 + [None] * 20
        assert table.column("price").to_pylist() == [None] * 30 + [1.5] * 10 + [None] * 10

    def test_a_column_of_another_type_is_refused_before_it_is_staged(self, sink, ids):
        sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0, price=pa.array([1.5] * 10)))], END)
        with pytest.raises(SchemaError, match=r"PEN-4001 .*'price' of /lake/orders is double .*string"):
            stage(sink, epoch(2), rows(10, price=pa.array(["1"] * 10)))
        assert ids() == list(range(10))

    def test_a_column_of_another_type_is_refused_also_in_a_later_batch(self, sink):
        sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0, price=pa.array([1.5] * 10)))], END)
        with pytest.raises(SchemaError, match=r"PEN-4001 .*'price'"):
            stage(sink, epoch(2), rows(10), rows(20, price=pa.array(["1"] * 10)))

    def test_tasks_that_disagree_about_a_type_are_refused_at_the_commit(self, sink, visible):
        e = epoch(1)
        receipts = [stage(sink, e, rows(0, x=pa.array([t] * 10)), task=i) for i, t in enumerate((1, "1"))]
        with pytest.raises(SchemaError, match="PEN-4001"):
            sink.commit_epoch(e, receipts, END)
        assert visible(ORDERS).num_rows == 0

    def test_a_column_of_nulls_gets_its_type_with_its_first_value(self, sink, visible):
        sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0, note=pa.nulls(10)))], END)
        sink.commit_epoch(epoch(2), [stage(sink, epoch(2), rows(10, note=pa.array(["x"] * 10)))], END)
        assert visible(ORDERS).sort_by("id").column("note").to_pylist() == [None] * 10 + ["x"] * 10

    def test_partition_values_come_back_as_they_were(self, make, visible):
        sink = make(partition_by=["text", "day", "at", "flag", "small"])
        texts = ["plain", "a b/c%é:?#=", None, "..", "plain"]
        batch = pa.record_batch(
            {
                "id": pa.array(range(5)),
                "text": pa.array(texts),
                "day": pa.array([0, 1, None, 20000, 0], pa.date32()),
                "at": pa.array([1_500_000_000_123_456, 0, None, -1, 1_500_000_000_123_456], pa.timestamp("us", "UTC")),
                "flag": pa.array([True, False, None, True, True]),
                "small": pa.array([1, -2, None, 3, 1], pa.int32()),
            }
        )
        sink.commit_epoch(epoch(1), [stage(sink, epoch(1), batch)], END)
        table = visible(ORDERS).sort_by("id").select(batch.schema.names)
        assert table.equals(pa.table(batch))
        assert len({path.parent for path in staged_places(sink)}) == 4

    def test_more_partitions_than_open_files_and_more_rows_than_a_file_holds(self, make, ids):
        sink = make(partition_by=["p"], max_open_files=2, target_file_rows=30)
        batches = [rows(i * 100, 100, p=pa.array([n % 7 for n in range(100)])) for i in range(3)]
        sink.commit_epoch(epoch(1), [stage(sink, epoch(1), *batches)], END)
        assert ids() == list(range(300))

    def test_two_topics_may_not_meet_in_one_target(self, make, tmp_path):
        sink = make(path=str(tmp_path / "one"))
        sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0), topic="/a")], END)
        with pytest.raises(ConfigError, match="PEN-1011"):
            sink.committed_epoch("shop", "/b")

    def test_a_topic_below_another_is_refused(self, sink):
        sink.committed_epoch("shop", "/a")
        with pytest.raises(ConfigError, match="PEN-1011"):
            sink.committed_epoch("shop", "/a/b")

    @pytest.mark.parametrize("topic", ["/../x", "/a/../../x", "/a//b", "/_penstock", "/a\nb", "/", "/" + "ü" * 128])
    def test_topics_that_would_leave_their_place_are_refused(self, sink, topic):
        with pytest.raises(ConfigError, match="PEN-1010"):
            stage(sink, epoch(1), rows(0), topic=topic)

    def test_addresses_of_stores_that_nobody_knows_are_refused(self, make):
        with pytest.raises(ConfigError, match="PEN-1009"):
            make(path="ftp://bucket/{topic}")

    def test_seeding_is_remembered_in_the_target(self, make, sink):
        sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0))], END)
        assert not sink.is_seeded(ORDERS)
        sink.mark_seeded(ORDERS)
        sink.mark_seeded("/empty")
        assert make().is_seeded(ORDERS)
        assert make().is_seeded("/empty")
        assert not make().is_seeded("/other")

    def test_every_file_of_a_receipt_and_every_directory_to_it_is_synced_before_the_receipt(
        self, make, synced, tmp_path
    ):
        sink = make(partition_by=["p"])
        stage(sink, epoch(1), rows(0, p=pa.array(["x", "y"] * 5)))
        files = staged_places(sink)
        assert len(files) == 2
        directories = {d for file in files for d in file.parents if tmp_path in d.parents}
        assert synced >= {*map(str, files), *map(str, directories), str(tmp_path)}

    @pytest.fixture
    def synced(self, monkeypatch: pytest.MonkeyPatch) -> set[str]:
        """The paths that were synced so far."""
        seen: set[str] = set()
        fsync = os.fsync

        def record(descriptor: int) -> None:
            fsync(descriptor)
            seen.add(os.readlink(f"/proc/self/fd/{descriptor}"))

        monkeypatch.setattr(os, "fsync", record)
        return seen
