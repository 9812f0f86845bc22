"""What a Kafka topic does not take is refused in the task, row by row, and what it takes is never refused at the commit."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from pydantic import ValidationError

from kafka_topics import delete_topic, fresh, make_topic, records
from penstock.connectors.kafka import limits
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.errors import ConfigError, DataError, FatalError
from penstock.pipeline import Pipeline, PipelineError
from penstock.sink import Epoch, SinkContext, Task, TopicContext
from penstock.source import ENVELOPE_SCHEMA
from penstock.testing.kafka import KafkaServer
from penstock.testing.sinks.steps import END, TOPIC, commit, epoch_of, opened_sink, stage

MOST = (1 << 63) - 1


def make_sink(kafka: KafkaServer, stem: str, **options: Any) -> KafkaSink:
    topic = f"{stem}.{{topic}}"
    return KafkaSink(KafkaSinkConfig(bootstrap_servers=kafka.bootstrap, topic=topic, **{"partitions": 1, **options}))


def envelopes(count: int, **columns: Any) -> pa.RecordBatch:
    own = {
        "stream": ["s"] * count,
        "key": [b"%d" % n for n in range(count)],
        "payload": [b"v"] * count,
        "attributes": [None] * count,
        "timestamp": [1_700_000_000_000] * count,
        "offset": [None] * count,
    }
    return pa.RecordBatch.from_pydict({**own, **columns}, schema=ENVELOPE_SCHEMA)


def refused(sink: KafkaSink, batch: pa.RecordBatch, match: str) -> list[int]:
    with opened_sink(sink) as opened:
        opened.begin_epoch(epoch_of(1), Task(0))
        with pytest.raises(DataError, match=match) as error:
            opened.write_batch(TOPIC, batch)
        assert error.value.hint
        return list(error.value.rows)


@pytest.mark.parametrize("in_tasks_bytes", [0, 128 << 20])
def test_a_topic_that_takes_only_small_batches_gets_small_ones(
    kafka: KafkaServer, tmp_path: Path, in_tasks_bytes: int
) -> None:
    stem = fresh("small")
    make_topic(kafka.bootstrap, f"{stem}.lake.orders", max_message_bytes=20_000)
    sink = make_sink(kafka, stem, staging=str(tmp_path), publish_in_tasks_bytes=in_tasks_bytes)
    payloads = [os.urandom(1000) for _ in range(300)]
    epoch = epoch_of(1)
    with opened_sink(sink, SinkContext(state_dir=tmp_path)) as driver:
        receipts = [stage(sink, epoch, envelopes(300, payload=payloads))]
        for work in driver.plan_epoch(epoch, receipts):
            with opened_sink(sink, SinkContext(state_dir=tmp_path)) as task:
                task.apply(epoch, work, Task(0))
        driver.commit_epoch(epoch, receipts, END)
    assert sorted(each.value() for each in records(kafka.bootstrap, f"{stem}.lake.orders")) == sorted(payloads)


def test_headers_count_for_the_size_of_a_record(kafka: KafkaServer) -> None:
    stem = fresh("headers")
    make_topic(kafka.bootstrap, f"{stem}.lake.orders", max_message_bytes=5000)
    given = [None, [("a", os.urandom(2340).hex())], [("b", "x" * 4000)], [], [("n" * 2000, None), ("m" * 3000, "x")]]
    batch = envelopes(5, attributes=given)
    assert refused(make_sink(kafka, stem), batch, "larger than the 5000 bytes") == [4]
    assert refused(make_sink(kafka, stem), batch.slice(1), "larger than the 5000 bytes") == [3]
    assert refused(make_sink(kafka, stem, headers=True), batch, "larger than") == [1, 4]
    sink = make_sink(kafka, stem)
    commit(sink, epoch_of(1), [stage(sink, epoch_of(1), batch.slice(0, 4))])
    assert len(records(kafka.bootstrap, f"{stem}.lake.orders")) == 4


def test_a_time_that_a_topic_does_not_take_is_refused(kafka: KafkaServer) -> None:
    stem, now, day = fresh("times"), int(time.time() * 1000), 86_400_000
    make_topic(kafka.bootstrap, f"{stem}.lake.orders", message_timestamp_before_max_ms=10 * day, retention_ms=-1)
    batch = envelopes(5, timestamp=[now, now + day, now - 11 * day, now - 9 * day, -1])
    assert refused(make_sink(kafka, stem, keep_timestamps=True), batch, "time") == [1, 2, 4]
    for own, kept in (("LogAppendTime", False), ("CreateTime", True)):
        stem = fresh("times")
        make_topic(kafka.bootstrap, f"{stem}.lake.orders", message_timestamp_type=own, retention_ms=-1)
        batch = envelopes(1, timestamp=[now + (day if own == "LogAppendTime" else -11 * day)])
        sink = make_sink(kafka, stem, keep_timestamps=True)
        commit(sink, epoch_of(1), [stage(sink, epoch_of(1), batch)])
        (found,) = records(kafka.bootstrap, f"{stem}.lake.orders")
        assert (found.timestamp()[1] == now - 11 * day) == kept


@pytest.mark.parametrize(
    ("settings", "ages"),
    [
        ({"message.timestamp.difference.max.ms": "5"}, (5, 5)),  # Kafka 3.5
        ({"difference": "5", "before": str(MOST), "after": str(MOST)}, (5, 5)),  # 3.6 to 3.9
        ({"difference": "5", "before": "7", "after": str(MOST)}, (7, 5)),
        ({"before": str(MOST), "after": "3600000"}, (MOST, 3_600_000)),  # 4
        ({"before": "7", "message.timestamp.type": "LogAppendTime"}, None),
    ],
)
def test_the_times_that_a_broker_takes_are_those_of_its_version(
    settings: dict[str, str], ages: tuple[int, int] | None
) -> None:
    named = {name if "." in name else f"message.timestamp.{name}.max.ms": value for name, value in settings.items()}
    assert limits._ages(named) == ages


def test_a_compacted_topic_takes_no_row_without_a_key(kafka: KafkaServer) -> None:
    stem = fresh("compacted")
    sink = make_sink(kafka, stem, topic_config={"cleanup.policy": "compact"})
    assert refused(sink, envelopes(3, key=[b"1", None, b""]), "no key") == [1]


def test_a_topic_that_takes_less_than_when_rows_were_staged_says_what_to_do(kafka: KafkaServer) -> None:
    stem, epoch = fresh("less"), epoch_of(1)
    sink = make_sink(kafka, stem, topic_config={"max.message.bytes": 50_000})
    receipt = stage(sink, epoch, envelopes(1, payload=[os.urandom(10_000)]))
    alter(kafka, f"{stem}.lake.orders", "max.message.bytes", "2000")
    with opened_sink(sink) as driver:
        with pytest.raises(FatalError, match="MSG_SIZE_TOO_LARGE") as stuck:
            driver.commit_epoch(epoch, [receipt], END)
        assert "offsets restage" in stuck.value.hint
        alter(kafka, f"{stem}.lake.orders", "max.message.bytes", "50000")
        driver.commit_epoch(epoch, [receipt], END)
    assert len(records(kafka.bootstrap, f"{stem}.lake.orders")) == 1


def test_a_topic_that_is_deleted_after_rows_were_staged_for_it_is_named(kafka: KafkaServer) -> None:
    """It was waited for by every try of every run, and nothing would ever make it again."""
    stem, epoch = fresh("gone"), epoch_of(1)
    sink = make_sink(kafka, stem, options={"topic.metadata.propagation.max.ms": 500})
    receipt = stage(sink, epoch, envelopes(3))
    delete_topic(kafka.bootstrap, f"{stem}.lake.orders")
    with opened_sink(sink) as driver:
        with pytest.raises(FatalError, match=r"'gone-\w+\.lake\.orders' was deleted") as gone:
            driver.commit_epoch(epoch, [receipt], END)
        assert "offsets restage" in gone.value.hint
        driver.commit_epoch(epoch, [stage(sink, epoch, envelopes(3))], END)
    assert len(records(kafka.bootstrap, f"{stem}.lake.orders")) == 3


def alter(kafka: KafkaServer, topic: str, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(60)


TWO_SINKS = """
connector_name = "two"
[source]
connector = "kafka"
bootstrap_servers = "b:9092"
topics = ["in"]
[[routes]]
from = "in"
to = "/a"
sinks = ["one"]
[[sinks]]
name = "one"
connector = "kafka"
bootstrap_servers = "b:9092,c:9092"
[[sinks]]
name = "two"
connector = "kafka"
bootstrap_servers = "{address}"
{more}
"""


@pytest.mark.parametrize(
    ("address", "more", "refused"),
    [
        ("b:9092", "", True),
        ("b:9092", 'mode = "changes"', True),
        ("d:9092, c:9092", "", True),
        ("elsewhere:9092", "", False),
        ("b:9092", 'marker_topic = "_two"', False),
        ("b:9092", 'topic = "other.{topic}"', False),
    ],
)
def test_two_sinks_with_one_marker_topic_are_refused(tmp_path: Path, address: str, more: str, refused: bool) -> None:
    """Each of their producers would fence the other's, and the marker of the one would speak for both."""
    (file := tmp_path / "pipeline.toml").write_text(TWO_SINKS.replace("{address}", address).replace("{more}", more))
    with pytest.raises(PipelineError, match="'one' and 'two' would both use") if refused else nullcontext() as error:
        Pipeline.from_toml(str(file))
    if refused:
        assert "marker_topic" in error.value.hint


ONE_SINK = """
connector_name = "one"
[source]
connector = "kafka"
bootstrap_servers = "b:9092, c:9092"
topics = ["orders", "^shop\\\\..*"]
options = {{ "ssl.ca.location" = "ca.pem", "ssl.key.location" = "/etc/key.pem" }}
[[routes]]
from = "#"
{route}
[[sinks]]
name = "out"
connector = "kafka"
bootstrap_servers = "{brokers}"
{sink}
"""


def checked(tmp_path: Path, streams: list[str], sink: str = "", brokers: str = "c:9092", route: str = "") -> list[Any]:
    (file := tmp_path / "pipeline.toml").write_text(ONE_SINK.format(sink=sink, brokers=brokers, route=route))
    return Pipeline.from_toml(str(file)).check_streams({"kafka": streams})


@pytest.mark.parametrize(
    ("streams", "sink", "brokers", "route", "refused"),
    [
        (["orders"], "", "c:9092", "", "'orders'"),
        (["orders"], "", "elsewhere:9092", "", ""),
        (["orders"], 'topic = "clean.{topic}"', "c:9092", "", ""),
        (["orders"], 'topic = "shop.{topic}"', "b:9092", "", "'shop.orders'"),  # by the pattern, once it is there
        (["orders"], "", "c:9092", "sql = \"SELECT * FROM input WHERE attributes['seen'] IS NULL\"", ""),
        (["orders"], "", "c:9092", 'match = { again = "yes" }', ""),
    ],
)
def test_a_sink_that_writes_what_its_pipeline_reads_is_refused(
    tmp_path: Path, streams: list[str], sink: str, brokers: str, route: str, refused: str
) -> None:
    """`topic` is by default the name of the topic that was read: each row came back in the next epoch, for ever."""
    problems = checked(tmp_path, streams, sink, brokers, route)
    assert [each.code for each in problems] == ["PEN-1010"] * bool(refused)
    if refused:
        assert f"kafka/orders to {refused}, which source 'kafka' reads" in problems[0].what


def test_a_pipeline_may_read_what_it_wrote_as_a_second_step(tmp_path: Path) -> None:
    steps = 'to = "/clean"\nexclude = ["clean"]\n[[routes]]\nfrom = "clean"\nto = "/{stream}"\nsinks = ["SINK"]'
    names = {
        "[[sinks]]\nname": "[[sinks]]\nname = 'screen'\nconnector = 'console'\n[[sinks]]\nname",
        '"orders"': '"orders", "clean"',
    }
    for last, count in (("screen", 0), ("out", 2)):
        text = ONE_SINK.format(sink="", brokers="c:9092", route=steps.replace("SINK", last))
        for old, new in names.items():
            text = text.replace(old, new)
        text = text.replace('exclude = ["clean"]', 'exclude = ["clean"]\nsinks = ["out"]')
        (file := tmp_path / "pipeline.toml").write_text(text)
        problems = Pipeline.from_toml(str(file)).check_streams({"kafka": ["orders", "clean"]})
        assert [each.code for each in problems].count("PEN-1010") == count, problems


@pytest.mark.parametrize(
    ("streams", "sink", "refused"),
    [
        (["orders", "shop.a"], 'topic = "all"\nmode = "upsert"', True),
        (["orders", "shop.a"], 'topic = "all"', False),
        (["shop.a", "shop/a"], 'topic = "clean.{topic}"', True),
        (["orders", "shop.a"], 'topic = "clean.{topic}"\nmode = "upsert"', False),
    ],
)
def test_two_topics_in_one_of_kafka_are_refused_where_keys_of_the_one_would_replace_the_others(
    tmp_path: Path, streams: list[str], sink: str, refused: bool
) -> None:
    problems = checked(tmp_path, streams, sink)
    assert [each.code for each in problems] == ["PEN-1011"] * refused
    if refused:
        assert "`topic` of sink 'out'" in problems[0].hint


def test_topics_that_come_to_meet_while_a_pipeline_runs_are_refused_in_the_task(kafka: KafkaServer) -> None:
    sink = make_sink(kafka, fresh("meet"), mode="upsert")
    both = SinkContext({"/a/b": TopicContext(), "/a.b": TopicContext()})
    with opened_sink(sink, both) as opened:
        opened.begin_epoch(epoch_of(1), Task(0))
        with pytest.raises(ConfigError, match=r"PEN-1011 the topics /a\.b and /a/b meet"):
            opened.write_batch("/a/b", envelopes(1))


def test_files_in_options_are_those_beside_the_pipeline_file(tmp_path: Path) -> None:
    """They were looked for where the command was given."""
    (file := tmp_path / "pipeline.toml").write_text(
        ONE_SINK.format(sink='topic = "x.{topic}"', brokers="c:9092", route="")
    )
    options = Pipeline.from_toml(str(file)).sources["kafka"].config.options
    assert options["ssl.ca.location"] == str(tmp_path / "ca.pem")
    assert options["ssl.key.location"] == "/etc/key.pem"


def test_a_file_in_options_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The client says that BIO lib failed, and not for which file."""
    (there := tmp_path / "ca.pem").write_text("")
    for path, is_there in ((there, True), (tmp_path / "other.pem", False)):
        config = KafkaSinkConfig(bootstrap_servers="127.0.0.1:1", options={"ssl.ca.location": str(path)})
        with nullcontext() if is_there else pytest.raises(ConfigError, match=r"`ssl\.ca\.location` .*/other\.pem, and"):
            config.settings()
    KafkaSinkConfig(bootstrap_servers="127.0.0.1:1", options={"ssl.ca.location": "probe"}).settings()


def test_names_that_no_topic_can_have_and_keys_in_plain_text_are_refused() -> None:
    with pytest.raises(ValidationError, match="at most 240"):
        KafkaSinkConfig(bootstrap_servers="b", marker_topic="my markers")
    for name in ("ssl.key.pem", "sasl.oauthbearer.assertion.private.key.passphrase"):
        with pytest.raises(ValidationError, match="is a secret"):
            KafkaSinkConfig(bootstrap_servers="b", options={name: "plain"})


def test_two_pipelines_with_one_marker_topic_are_told_of_each_other(kafka: KafkaServer) -> None:
    """Each would fence the other in every epoch, and say no more than that somebody took over."""
    stem, marker = fresh("shared"), fresh("_shared")
    sink = make_sink(kafka, stem, marker_topic=marker)
    mine, other = (Epoch(pipeline, "one", 1) for pipeline in ("mine", "other"))
    commit(sink, Epoch("earlier", "one", 7), [stage(sink, Epoch("earlier", "one", 7), envelopes(1))])  # is over
    with opened_sink(sink) as driver:
        driver.commit_epoch(mine, [stage(sink, mine, envelopes(1))], END)
        commit(sink, other, [stage(sink, other, envelopes(1))])
        later = Epoch("mine", "one", 2)
        with pytest.raises(ConfigError, match=f"'mine' and 'other' both record their epochs in the topic '{marker}'"):
            driver.commit_epoch(later, [stage(sink, later, envelopes(1))], END)
    assert len(records(kafka.bootstrap, f"{stem}.lake.orders")) == 3
    commit(sink, later, [stage(sink, later, envelopes(1))])  # started again without the other
    assert len(records(kafka.bootstrap, f"{stem}.lake.orders")) == 4
