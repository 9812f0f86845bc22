"""The sink `kafka`: what a consumer sees, and what a task refuses before it is too late."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from kafka_topics import delete_topic, fresh, make_topic, records, truncate
from penstock import store
from penstock.changes import CHANGE_FIELDS
from penstock.changes.old_key import pack_key
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.errors import ConfigError, DataError, FatalError, RetryableError, SchemaError, StagingLost
from penstock.formats.debezium import Debezium
from penstock.schema import with_key
from penstock.sink import Receipt, SinkContext, Task, TopicContext
from penstock.testing import SinkContract
from penstock.testing.kafka import KafkaServer
from penstock.testing.s3 import S3Server
from penstock.testing.sinks.steps import END, TOPIC, Visible, commit, epoch_of, opened_sink, rows, stage


def make_sink(kafka: KafkaServer, stem: str, **options: Any) -> KafkaSink:
    topic = options.pop("topic", f"{stem}.{{topic}}")
    return KafkaSink(KafkaSinkConfig(bootstrap_servers=kafka.bootstrap, topic=topic, **{"partitions": 2, **options}))


def patiently(ask: Callable[[], Any]) -> Any:
    """As the runtime does: what may be over soon is tried again."""
    until = time.monotonic() + 60
    while True:
        try:
            return ask()
        except RetryableError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def write(sink: KafkaSink, number: int, *batches: pa.RecordBatch, context: SinkContext = SinkContext()) -> None:
    """An epoch of one task, from its rows to its commit."""
    epoch = epoch_of(number)
    with opened_sink(sink, context) as opened:
        opened.begin_epoch(epoch, Task(0))
        for batch in batches:
            opened.write_batch(TOPIC, batch)
        receipt = opened.pre_commit(epoch)
        opened.commit_epoch(epoch, [receipt], END)


class TestKafkaSink(SinkContract):
    mode = "append"

    @pytest.fixture
    def stem(self) -> str:
        return fresh("sink")

    @pytest.fixture
    def sink(self, kafka: KafkaServer, stem: str) -> KafkaSink:
        return make_sink(kafka, stem, mode=self.mode)

    @pytest.fixture
    def visible(self, kafka: KafkaServer, stem: str) -> Visible:
        def visible(topic: str) -> list[dict[str, Any]]:
            found = records(kafka.bootstrap, f"{stem}{topic.replace('/', '.')}")
            return [json.loads(each.value()) for each in found]

        return visible

    @pytest.fixture
    def lose_staged(self, kafka: KafkaServer) -> Callable[[Sequence[Receipt]], None]:
        def lose(receipts: Sequence[Any]) -> None:
            for receipt in receipts:
                for chunk in (each for chunks in receipt.chunks.values() for each in chunks):
                    truncate(kafka.bootstrap, receipt.staging, chunk.offset + 1, chunk.partition)

        return lose


class TestKafkaStagedInFiles(TestKafkaSink):
    @pytest.fixture
    def sink(self, kafka: KafkaServer, stem: str, tmp_path: Path) -> KafkaSink:
        return make_sink(kafka, stem, staging=str(tmp_path))

    @pytest.fixture
    def lose_staged(self) -> Callable[[Sequence[Receipt]], None]:
        def lose(receipts: Sequence[Any]) -> None:
            for receipt in receipts:
                for chunk in (each for chunks in receipt.chunks.values() for each in chunks):
                    Path(receipt.staging, chunk.name).unlink()

        return lose


@pytest.mark.parametrize("in_tasks_bytes", [0, 128 << 20])
def test_staged_files_go_with_their_epoch_and_a_rollback_takes_only_its_own(
    kafka: KafkaServer, tmp_path: Path, in_tasks_bytes: int
) -> None:
    sink = make_sink(kafka, fresh("swept"), publish_in_tasks_bytes=in_tasks_bytes)
    with opened_sink(sink, SinkContext(state_dir=tmp_path / "own")) as opened:
        dead, epoch = epoch_of(1), epoch_of(1)
        for each in (dead, epoch):
            opened.begin_epoch(each, Task(0))
            opened.write_batch(TOPIC, rows(0))
            receipt = opened.pre_commit(each)
        assert len(list((tmp_path / "own").iterdir())) == 2
        opened.rollback_epoch(dead, ())
        assert [file.name for file in (tmp_path / "own").iterdir()] == [receipt.chunks[TOPIC][0].name]
        opened.sweep(epoch, [receipt])
        opened.commit_epoch(epoch, [receipt], END)
        assert not list((tmp_path / "own").iterdir())


def test_a_staged_file_that_is_cut_short_is_lost_and_not_published_in_part(kafka: KafkaServer, tmp_path: Path) -> None:
    stem = fresh("short")
    with opened_sink(make_sink(kafka, stem, staging=str(tmp_path))) as opened:
        opened.begin_epoch(epoch_of(1), Task(0))
        opened.write_batch(TOPIC, rows(0))
        receipt = opened.pre_commit(epoch_of(1))
        (file,) = tmp_path.rglob("*.arrows")
        file.write_bytes(file.read_bytes()[:-40])
        with pytest.raises(StagingLost):
            opened.commit_epoch(epoch_of(1), [receipt], END)
    assert seen(kafka, stem) == []


def test_files_of_a_run_that_died_after_its_commit_are_removed_by_the_next(kafka: KafkaServer, tmp_path: Path) -> None:
    stem, epoch, own = fresh("died"), epoch_of(1), tmp_path / "own"
    sink, context = make_sink(kafka, stem), SinkContext(state_dir=own)
    with opened_sink(sink, context) as opened:
        opened.begin_epoch(epoch, Task(0))
        opened.write_batch(TOPIC, rows(0))
        receipt = opened.pre_commit(epoch)
        shutil.copytree(own, tmp_path / "kept")
        opened.commit_epoch(epoch, [receipt], END)
    shutil.copytree(tmp_path / "kept", own, dirs_exist_ok=True)  # as if it had not come to the removal
    with opened_sink(sink, context) as opened:
        opened.commit_epoch(epoch, [receipt], END)
    assert not list(own.iterdir())
    assert len(seen(kafka, stem)) == rows(0).num_rows


def test_rows_that_a_local_master_staged_are_published_by_the_driver_where_tasks_run_elsewhere_now(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    stem, epoch, context = fresh("moved"), epoch_of(1), SinkContext(state_dir=tmp_path / "own")
    sink, on_a_worker = (make_sink(kafka, stem, publish_in_tasks_bytes=0) for _ in range(2))
    with opened_sink(sink, context) as opened:
        opened.begin_epoch(epoch, Task(0))
        opened.write_batch(TOPIC, rows(0))
        receipt = opened.pre_commit(epoch)
    with opened_sink(sink, context) as driver, opened_sink(on_a_worker) as task:
        work = driver.plan_epoch(epoch, [receipt])
        assert work
        for each in work:
            task.apply(epoch, each, Task(0))
        assert seen(kafka, stem) == []
        driver.commit_epoch(epoch, [receipt], END)
    assert len(seen(kafka, stem)) == rows(0).num_rows


def test_rows_are_staged_in_an_object_store(kafka: KafkaServer, s3: S3Server) -> None:
    stem, bucket = fresh("object"), s3.bucket()
    own = {"staging": f"s3://{bucket.removeprefix('s3://')}/rows", "storage_options": s3.options()}
    for number, in_tasks_bytes in enumerate((128 << 20, 0), 1):
        write(make_sink(kafka, stem, publish_in_tasks_bytes=in_tasks_bytes, **own), number, rows(number))
    assert len(seen(kafka, stem)) == 2 * rows(0).num_rows
    with opened_sink(make_sink(kafka, stem, **own)) as opened:
        place = opened._directory("kit")
        assert store.names(place) == []
        opened.begin_epoch(epoch_of(3), Task(0))
        opened.write_batch(TOPIC, rows(3))
        receipt = opened.pre_commit(epoch_of(3))
        store.delete([place / name for name in store.names(place)])
        with pytest.raises(StagingLost):
            opened.commit_epoch(epoch_of(3), [receipt], END)


def test_a_relative_staging_directory_is_refused(kafka: KafkaServer) -> None:
    with pytest.raises(ValidationError, match="absolute directory"):
        make_sink(kafka, "x", staging="somewhere")


class OnlyItsOwn(TestKafkaSink):
    """The laws that only a mode switches on: the others are those of `append`."""

    __test__ = False

    flag: str

    @pytest.fixture(autouse=True)
    def _only_its_own(self, request: pytest.FixtureRequest) -> None:
        if self.flag not in getattr(request.function, "needs", ()):
            pytest.skip("the same as in mode append")


class TestKafkaChanges(OnlyItsOwn):
    __test__ = True
    mode, flag = "changes", "changelog"


class TestKafkaUpsert(OnlyItsOwn):
    __test__ = True
    mode, flag = "upsert", "upsert"

    @pytest.fixture
    def visible(self, kafka: KafkaServer, stem: str) -> Visible:
        def visible(topic: str) -> list[dict[str, Any]]:
            found = {each.key(): each.value() for each in records(kafka.bootstrap, f"{stem}{topic.replace('/', '.')}")}
            return [json.loads(value) for value in found.values() if value is not None]

        return visible


def changes(*events: dict[str, Any]) -> pa.RecordBatch:
    schema = with_key(pa.schema([("id", pa.int64()), ("name", pa.string()), *CHANGE_FIELDS]), ["id"])
    rows = [{"_position": f"{place:03d}", **event} for place, event in enumerate(events)]
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def seen(kafka: KafkaServer, stem: str) -> list[tuple[bytes | None, Any]]:
    found = records(kafka.bootstrap, f"{stem}.lake.orders")
    return [(each.key(), None if each.value() is None else json.loads(each.value())) for each in found]


def test_upserts_write_the_row_under_its_key_and_a_tombstone_for_each_key_that_goes(kafka: KafkaServer) -> None:
    stem = fresh("upsert")
    sink = make_sink(kafka, stem, mode="upsert", partitions=1, topic_config={"cleanup.policy": "compact"})
    moved = {"_op": "u", "id": 3, "name": "moved", "_old_key": pack_key({"id": 1})}
    write(sink, 1, changes({"_op": "c", "id": 1, "name": "one"}, {"_op": "c", "id": 2, "name": "two"}, moved))
    write(sink, 2, changes({"_op": "d", "id": 2}))
    assert seen(kafka, stem) == [
        (b"1", {"id": 1, "name": "one"}),
        (b"2", {"id": 2, "name": "two"}),
        (b"1", None),
        (b"3", {"id": 3, "name": "moved"}),
        (b"2", None),
    ]


@pytest.mark.parametrize(
    "event", [{"_op": "t"}, {"_op": "u", "id": 1, "_unchanged": ["name"]}, {"_op": "c", "name": "no key"}]
)
def test_a_change_that_a_log_of_keys_cannot_say_is_refused_with_its_row(
    kafka: KafkaServer, event: dict[str, Any]
) -> None:
    with opened_sink(make_sink(kafka, fresh("refused"), mode="upsert")) as sink:
        sink.begin_epoch(epoch_of(1), Task(0))
        with pytest.raises(DataError) as refused:
            sink.write_batch(TOPIC, changes({"_op": "c", "id": 7, "name": "good"}, event))
        assert list(refused.value.rows) == [1]


def test_changes_in_the_envelope_of_debezium(kafka: KafkaServer) -> None:
    stem = fresh("debezium")
    encoder = Debezium(Debezium.options_type(key=["id"]))
    context = SinkContext({TOPIC: TopicContext(encoder=encoder)})
    batch = changes({"_op": "c", "id": 1, "name": "one"}, {"_op": "d", "id": 1, "name": "one"})
    write(make_sink(kafka, stem, mode="changes", partitions=1), 1, batch, context=context)
    (_, first), (key, second) = seen(kafka, stem)
    assert (first["op"], first["after"]) == ("c", {"id": 1, "name": "one"})
    assert (key, second["op"], second["after"]) == (b"1", "d", None)


def test_headers_say_which_epoch_a_row_is_of_and_its_place_there(kafka: KafkaServer) -> None:
    stem = fresh("headers")
    write(make_sink(kafka, stem, headers=True, partitions=1), 4, rows(0, 2))
    found = [dict(each.headers()) for each in records(kafka.bootstrap, f"{stem}.lake.orders")]
    assert [each["penstock.row"] for each in found] == [b"0", b"1"]
    assert json.loads(found[0]["penstock.epoch"]) == ["kit", "one", 4]


def murmur2(data: bytes) -> int:
    """As the Java client computes it."""
    length, m, mask = len(data), 0x5BD1E995, 0xFFFFFFFF
    h = (0x9747B28C ^ length) & mask
    for at in range(0, length - length % 4, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k = (k ^ (k >> 24)) * m & mask
        h = (h * m & mask) ^ k
    tail = data[length - length % 4 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return h ^ (h >> 15)


def test_keys_go_to_the_partitions_that_the_java_client_chooses(kafka: KafkaServer) -> None:
    known = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536,
             b"a-little-bit-longer-string": -1486304829, b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
             b"abc": 479470107}  # fmt: skip
    assert {key: murmur2(key) for key in known} == {key: value & 0xFFFFFFFF for key, value in known.items()}
    stem = fresh("murmur2")
    keys = [key.decode() for key in known] + [str(n) for n in range(50)]
    batch = pa.record_batch({"id": keys})
    write(make_sink(kafka, stem, key=("id",), partitions=7), 1, batch)
    found = {each.key(): each.partition() for each in records(kafka.bootstrap, f"{stem}.lake.orders")}
    assert found == {key.encode(): (murmur2(key.encode()) & 0x7FFFFFFF) % 7 for key in keys}


def test_rows_of_a_key_keep_their_order_over_tasks_and_epochs(kafka: KafkaServer) -> None:
    stem = fresh("order")
    sink = make_sink(kafka, stem, mode="upsert", partitions=3)
    for number in (1, 2):
        epoch = epoch_of(number)
        receipts = [stage(sink, epoch, rows(0, 30, f"{number} {task}"), task=task) for task in range(3)]
        commit(sink, epoch, receipts)
    by_key: dict[bytes, list[str]] = {}
    for each in records(kafka.bootstrap, f"{stem}.lake.orders"):
        by_key.setdefault(each.key(), []).append(json.loads(each.value())["name"])
    assert len(by_key) == 30
    assert all(names == [f"{n} {t}" for n in (1, 2) for t in range(3)] for names in by_key.values())


# -- what a task refuses, since the commit could only go forward -------------------------------------------------------


def test_a_record_that_the_topic_does_not_take_is_refused_before_it_is_staged(kafka: KafkaServer) -> None:
    stem = fresh("large")
    make_topic(kafka.bootstrap, f"{stem}.lake.orders", max_message_bytes=2000)
    with opened_sink(make_sink(kafka, stem)) as sink:
        sink.begin_epoch(epoch_of(1), Task(0))
        with pytest.raises(DataError, match="larger than the 2000 bytes") as refused:
            sink.write_batch(TOPIC, pa.record_batch({"id": ["small", "x" * 3000]}))
        assert list(refused.value.rows) == [1]


def test_a_topic_that_does_not_exist_can_be_an_error(kafka: KafkaServer) -> None:
    with opened_sink(make_sink(kafka, fresh("none"), create=False)) as sink:
        sink.begin_epoch(epoch_of(1), Task(0))
        with pytest.raises(FatalError, match="PEN-5010"):
            sink.write_batch(TOPIC, rows(0))
        with pytest.raises(ConfigError, match="PEN-1010"):
            sink.write_batch("/white space", rows(0))


def test_rows_without_changes_or_keys_do_not_fit_their_modes(kafka: KafkaServer) -> None:
    for mode in ("changes", "upsert"):
        with opened_sink(make_sink(kafka, fresh("misfit"), mode=mode)) as sink:
            sink.begin_epoch(epoch_of(1), Task(0))
            with pytest.raises(SchemaError, match="PEN-4002"):
                sink.write_batch(TOPIC, pa.record_batch({"name": ["no key"]}))
    with pytest.raises(ValidationError, match="braces"):
        KafkaSinkConfig(bootstrap_servers="b", topic="{table}")


def test_a_large_epoch_is_staged_in_many_chunks_and_published_whole(kafka: KafkaServer) -> None:
    stem = fresh("chunks")
    sink = make_sink(kafka, stem, partitions=1, compression="zstd")
    batch = pa.record_batch({"id": range(40_000), "text": [f"{n:0100d}" for n in range(40_000)]})
    epoch = epoch_of(1)
    receipt = stage(sink, epoch, batch)
    assert len(receipt.chunks[TOPIC]) > 4
    commit(sink, epoch, [receipt])
    assert [json.loads(each.value())["id"] for each in records(kafka.bootstrap, f"{stem}.lake.orders")] == list(
        range(40_000)
    )


# -- the marker --------------------------------------------------------------------------------------------------------


def test_a_task_does_not_fence_its_own_driver(kafka: KafkaServer) -> None:
    sink = make_sink(kafka, fresh("driver"))
    with opened_sink(sink) as driver:
        assert driver.committed_epoch("kit", TOPIC) is None
        for number in (1, 2):
            epoch = epoch_of(number)
            driver.commit_epoch(epoch, [stage(sink, epoch, rows(0))], END)  # RetryableError if it was fenced
        assert driver.committed_epoch("kit", TOPIC).number == 2


def test_a_marker_topic_that_is_deleted_while_the_sink_runs_stops_it(kafka: KafkaServer) -> None:
    sink = make_sink(kafka, fresh("marker"), marker_topic=(name := fresh("marker")))
    write(sink, 1, rows(0))
    with opened_sink(sink) as driver:
        assert driver.committed_epoch("kit", TOPIC).number == 1
        delete_topic(kafka.bootstrap, name)
        make_topic(kafka.bootstrap, name)
        with pytest.raises(FatalError, match="PEN-5020"):
            patiently(lambda: driver.committed_epoch("kit", TOPIC))


def test_a_transaction_timeout_above_the_brokers_own_is_a_config_error(kafka: KafkaServer) -> None:
    sink = make_sink(kafka, fresh("timeout"), transaction_timeout_ms=10_000_000)
    with opened_sink(sink) as sink, pytest.raises(ConfigError, match="transaction_timeout_ms"):
        sink.committed_epoch("kit", TOPIC)


def test_a_reader_never_sees_part_of_an_epoch(kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stem = fresh("whole")
    sink, counts = make_sink(kafka, stem, partitions=3), []
    monkeypatch.setattr(
        "penstock.failpoints.hit",
        lambda name: counts.append(
            [len(records(kafka.bootstrap, f"{stem}.lake.orders", committed)) for committed in (True, False)]
        ),
    )
    for number in (1, 2):
        write(sink, number, rows(number * 100, 50))
        assert len(records(kafka.bootstrap, f"{stem}.lake.orders")) == number * 50
    assert counts == [[0, 50], [50, 100]], "where everything was sent, only a reader of uncommitted rows sees it"
