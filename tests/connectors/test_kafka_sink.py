"""The sink `kafka`: what a consumer sees, and what a task refuses before it is too late."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from kafka_topics import delete_topic, fresh, make_topic, records, truncate
from penstock.changes import CHANGE_FIELDS
from penstock.changes.old_key import pack_key
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.errors import ConfigError, DataError, FatalError, RetryableError, SchemaError
from penstock.formats import WireSchema, load
from penstock.formats.debezium import Debezium
from penstock.schema import key_of, with_key
from penstock.sink import Receipt, SinkContext, Task, TopicContext
from penstock.testing import SinkContract
from penstock.testing.kafka import KafkaServer
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


@pytest.mark.parametrize("event", [{"_op": "u", "id": 1, "_unchanged": ["name"]}, {"_op": "c", "name": "no key"}])
def test_a_change_that_a_log_of_keys_cannot_say_is_refused_with_its_row(
    kafka: KafkaServer, event: dict[str, Any]
) -> None:
    with opened_sink(make_sink(kafka, fresh("refused"), mode="upsert")) as sink:
        sink.begin_epoch(epoch_of(1), Task(0))
        with pytest.raises(DataError) as refused:
            sink.write_batch(TOPIC, changes({"_op": "t"}, {"_op": "c", "id": 7, "name": "good"}, event))
        assert list(refused.value.rows) == [2]


@pytest.mark.parametrize("staging", ["", "topic"])
def test_a_truncate_is_a_tombstone_for_each_key_that_is_there(kafka: KafkaServer, tmp_path: Path, staging: str) -> None:
    """Its position says what came before it, in whichever task; the other way round it would remove what came after it."""
    stem, context = fresh("truncate"), SinkContext(state_dir=tmp_path)
    sink = make_sink(kafka, stem, mode="upsert", staging=staging, publish_in_tasks_bytes=0)

    def created(*rows: tuple[str, int]) -> pa.RecordBatch:
        return changes(*({"_op": "c", "_position": at, "id": id, "name": at} for at, id in rows))

    write(sink, 1, created(*((f"0{n}", n) for n in range(1, 9))), context=context)
    write(sink, 2, changes({"_op": "d", "_position": "09", "id": 8}), context=context)
    with opened_sink(sink, context) as opened:
        receipts = []
        for task, batches in enumerate(
            (
                [created(("12", 20), ("14", 21)), changes({"_op": "t", "_position": "13"})],
                [created(("11", 1), ("15", 2), ("16", 22))],
            )
        ):
            opened.begin_epoch(epoch_of(3), Task(task))
            for batch in batches:
                opened.write_batch(TOPIC, batch)
            receipts.append(opened.pre_commit(epoch_of(3)))
        assert not opened.plan_epoch(epoch_of(3), receipts)
        opened.commit_epoch(epoch_of(3), receipts, END)
        opened.commit_epoch(epoch_of(3), receipts, END)
    found = seen(kafka, stem)
    assert sorted(key for key, value in found if value is None) == [b"%d" % n for n in (1, 2, 3, 4, 5, 6, 7, 8)]
    newest = {key: value["id"] for key, value in dict(found).items() if value is not None}
    assert newest == {b"21": 21, b"2": 2, b"22": 22}
    write(sink, 4, changes({"_op": "t", "_position": "20"}), context=context)  # an epoch of nothing else
    assert not [key for key, value in dict(seen(kafka, stem)).items() if value is not None]


def test_a_delete_needs_no_more_than_its_key_whatever_the_schema_requires(kafka: KafkaServer) -> None:
    stem, avro = fresh("required"), load("avro")
    fields = [{"name": "id", "type": "long"}, {"name": "name", "type": "string"}]
    encoder = avro(
        avro.options_type(), WireSchema("avro", json.dumps({"type": "record", "name": "R", "fields": fields}))
    )
    context = SinkContext({TOPIC: TopicContext(encoder=encoder)})
    sink = make_sink(kafka, stem, mode="upsert", partitions=1)
    write(sink, 1, changes({"_op": "c", "id": 1, "name": "x"}, {"_op": "d", "id": 1}), context=context)
    found = [(each.key(), each.value()) for each in records(kafka.bootstrap, f"{stem}.lake.orders")]
    assert found == [(b"1", b"\x02\x02x"), (b"1", None)]


def test_rows_that_are_too_large_are_not_named_where_records_are_no_rows(kafka: KafkaServer) -> None:
    """A row that gets another key is two records: their numbers would name other rows."""
    stem = fresh("moved")
    make_topic(kafka.bootstrap, f"{stem}.lake.orders", max_message_bytes=2000)
    moved = {"_op": "u", "id": 3, "name": "moved", "_old_key": pack_key({"id": 1})}
    with opened_sink(make_sink(kafka, stem, mode="upsert")) as sink:
        sink.begin_epoch(epoch_of(1), Task(0))
        with pytest.raises(DataError, match="larger than") as refused:
            sink.write_batch(TOPIC, changes(moved, {"_op": "c", "id": 4, "name": "x" * 3000}))
        assert list(refused.value.rows) == []


def test_changes_in_the_envelope_of_debezium(kafka: KafkaServer) -> None:
    stem = fresh("debezium")
    encoder = Debezium(Debezium.options_type(key=["id"]))
    context = SinkContext({TOPIC: TopicContext(encoder=encoder)})
    batch = changes({"_op": "c", "id": 1, "name": "one"}, {"_op": "d", "id": 1, "name": "one"})
    write(make_sink(kafka, stem, mode="changes", partitions=1), 1, batch, context=context)
    (_, first), (key, second) = seen(kafka, stem)
    assert (first["op"], first["after"]) == ("c", {"id": 1, "name": "one"})
    assert (key, second["op"], second["after"]) == (b'{"id":1}', "d", None)


def test_a_row_that_moves_leaves_its_old_key_to_those_that_read_debeziums_envelopes(kafka: KafkaServer) -> None:
    """It was one update under the new key: readers kept the old row, and one that was late with the old key revived it."""
    stem = fresh("moved")
    context = SinkContext({TOPIC: TopicContext(encoder=Debezium(Debezium.options_type()))})
    batch = changes(
        {"_op": "c", "id": 1, "name": "one"},
        {"_op": "u", "id": 2, "name": "one", "_old_key": '{"id": 1}'},
        {"_op": "u", "id": 2, "name": "two"},
    )
    write(make_sink(kafka, stem, mode="changes", partitions=1), 1, batch, context=context)
    found = records(kafka.bootstrap, f"{stem}.lake.orders")
    payloads, keys = (pa.array([getattr(each, what)() for each in found], pa.binary()) for what in ("value", "key"))
    read = Debezium(Debezium.options_type()).decode_with_keys(payloads, keys)
    assert not len(read.failures)
    assert key_of(read.rows.schema) == ["id"]
    rows = [(row["_op"], row["id"], row["name"], row["_old_key"]) for row in read.rows.to_pylist()]
    assert rows == [("c", 1, "one", None), ("d", 1, None, None), ("c", 2, "one", None), ("u", 2, "two", None)]
    assert keys.to_pylist() == [b'{"id":1}', b'{"id":1}', b'{"id":2}', b'{"id":2}']


def test_a_row_that_moves_without_all_its_values_is_refused_in_debeziums_envelope(kafka: KafkaServer) -> None:
    context = SinkContext({TOPIC: TopicContext(encoder=Debezium(Debezium.options_type()))})
    moved = {"_op": "u", "id": 2, "_old_key": '{"id": 1}', "_unchanged": ["name"]}
    batch = changes({"_op": "c", "id": 1, "name": "one"}, moved)
    with pytest.raises(DataError, match="does not carry all its values") as refused:
        write(make_sink(kafka, fresh("moved"), mode="changes", partitions=1), 1, batch, context=context)
    assert list(refused.value.rows) == [1]


def test_headers_say_which_epoch_a_row_is_of_and_its_place_there(kafka: KafkaServer) -> None:
    stem = fresh("headers")
    write(make_sink(kafka, stem, headers=True, partitions=1), 4, rows(0, 2))
    found = [dict(each.headers()) for each in records(kafka.bootstrap, f"{stem}.lake.orders")]
    assert [each["penstock.row"] for each in found] == [b"0", b"1"]
    assert json.loads(found[0]["penstock.epoch"]) == ["kit", "one", 4]


JAVA_PARTITIONS = {
    "": 2, "a": 5, "ab": 0, "abc": 4, "abcd": 5, "abcde": 4, "21": 3, "foobar": 0, "0": 3, "-1": 6,
    "9223372036854775807": 4, "größe": 4, "鍵": 0, "🔑": 5, "a b\tc": 3, '{"id":1}': 3, '[1,"x"]': 1,
    "a-little-bit-long-string": 1, "a-little-bit-longer-string": 0,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": 3,
}  # fmt: skip
"""
The partition of seven that Java's client gives each key: what a program of a few lines printed that calls
`BuiltInPartitioner.partitionForKey(key.getBytes(UTF_8), 7)` of kafka-clients 4.3.1.
"""


def test_keys_go_to_the_partitions_that_the_java_client_chooses(kafka: KafkaServer) -> None:
    stem = fresh("murmur2")
    write(make_sink(kafka, stem, key=("id",), partitions=7), 1, pa.record_batch({"id": list(JAVA_PARTITIONS)}))
    found = {each.key().decode(): each.partition() for each in records(kafka.bootstrap, f"{stem}.lake.orders")}
    assert found == JAVA_PARTITIONS


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


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"replication": 3}, "lower `replication`"),
        ({"topic_config": {"clean.policy": "compact"}}, "correct `topic_config`"),
    ],
)
def test_a_topic_that_the_brokers_refuse_to_make_says_what_to_change(
    kafka: KafkaServer, options: dict[str, Any], hint: str
) -> None:
    with opened_sink(make_sink(kafka, fresh("refused"), **options)) as sink:
        sink.begin_epoch(epoch_of(1), Task(0))
        with pytest.raises(FatalError) as refused:
            sink.write_batch(TOPIC, rows(0))
    assert hint in refused.value.hint


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
