"""The crash suite over the Kafka sink, against a real broker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from kafka_topics import delete_topic, fresh, records, truncate
from penstock import failpoints
from penstock.changes import CHANGE_FIELDS
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.schema import with_key
from penstock.sink import Receipt, Work
from penstock.testing import CrashContract
from penstock.testing.engine import Killed
from penstock.testing.kafka import KafkaServer
from penstock.testing.processes import elsewhere
from penstock.testing.sinks.steps import END, epoch_of, opened_sink, stage
from thorough import THOROUGH


def told(path: Path) -> list[str]:
    """What the test's own process has written down for those that it starts: the broker, and a name of the test's own."""
    return next(file for each in (path, *path.parents) if (file := each / "broker").exists()).read_text().split()


def address(path: Path) -> str:
    return told(path)[0]


def stem(path: Path) -> str:
    return "crash-" + hashlib.sha256(f"{told(path)[1]} {path}".encode()).hexdigest()[:16]


class TestKafkaCrash(CrashContract):
    ordered = True

    @pytest.fixture(autouse=True)
    def _told(self, kafka: KafkaServer, tmp_path: Path) -> None:
        (tmp_path / "broker").write_text(f"{kafka.bootstrap} {fresh('crash')}")

    @pytest.fixture(autouse=True)
    def _few(self, request: pytest.FixtureRequest) -> None:
        """Each of these starts five runs with producers of their own; `make soak NAME=tests` plays all of them."""
        given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        few = given.get("method", "commit_epoch") in ("commit_epoch", "pre_commit")
        if "lost_state" in request.node.name:
            few = given.get("step", "commit.before@2") == "commit.before@2"
        if not few and not THOROUGH:
            pytest.skip("left to `make soak NAME=tests`")

    sink_type = KafkaSink
    options: ClassVar[dict[str, Any]] = {}

    def make_sink(self, path: Path) -> KafkaSink:
        topic = f"{stem(path)}.{{topic}}"
        marker = f"_{stem(path)}"
        return self.sink_type(
            KafkaSinkConfig(
                bootstrap_servers=address(path),
                topic=topic,
                marker_topic=marker,
                partitions=1,
                mode="append",
                **self.options,
            )
        )

    def visible(self, path, topic):
        return [json.loads(each.value()) for each in records(address(path), f"{stem(path)}.{topic[1:]}")]

    def lose_staged(self, path):
        if self.options.get("staging") != "topic":
            found = list((path.parent / "state" / "sinks" / path.name).glob("000000000002-*.arrows"))
            assert found, "nothing of epoch 2 is staged"
            for each in found:
                each.unlink()
            return
        staging = f"_{stem(path)}.staging"
        found = [each for each in records(address(path), staging) if each.key().startswith(b"000000000002-")]
        assert found, "nothing of epoch 2 is staged"
        for each in found:
            truncate(address(path), staging, each.offset() + 1, each.partition())

    def empty(self, path):
        for name in (*(f"{stem(path)}.{topic}" for topic in ("a", "b")), f"_{stem(path)}"):
            delete_topic(address(path), name)


class TestKafkaStagedInATopic(TestKafkaCrash):
    """As on a cluster, where tasks and driver share nothing but the brokers."""

    options: ClassVar[dict[str, Any]] = {"staging": "topic"}

    @pytest.fixture(autouse=True)
    def _few(self, request: pytest.FixtureRequest) -> None:
        given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        few = given.get("step") == "commit.before" and given.get("epoch") == 2
        if not (few or "staged_again" in request.node.originalname or THOROUGH):
            pytest.skip("left to `make soak NAME=tests`")


class InTasks(KafkaSink):
    """One whose epochs are always published by tasks, as if they were large."""

    def plan_epoch(self, *args: Any) -> Sequence[Work]:
        return [each.model_copy(update={"bytes": 1 << 24}) for each in super().plan_epoch(*args)]


class TestKafkaPublishedInTasks(TestKafkaCrash):
    """Each of eight shards has a transaction of its own: killed between any two of them, the next run publishes the rest."""

    ordered = False
    whole_epochs = False
    sink_type = InTasks
    options: ClassVar[dict[str, Any]] = {"publish_in_tasks_bytes": 0}

    @pytest.fixture(autouse=True)
    def _few(self, request: pytest.FixtureRequest) -> None:
        """Of the steps that others share only those beside which shards are published."""
        given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        name = request.node.originalname
        few = "zombie_task" in name or "staged_again" in name
        if "step" in given and "epoch" in given:
            few = (given["step"], given["epoch"]) in {("apply.middle", 2)}
        elif "second" in given:
            few = (given["first"], given["second"]) == ("apply.middle", "apply.task")
        elif "method" in given:
            few = False
        if not few and not THOROUGH:
            pytest.skip("left to `make soak NAME=tests`")


def _commit(config: KafkaSinkConfig, number: int, receipt: Receipt, failpoint: str | None = None) -> None:
    failpoints.arm(failpoint)
    with opened_sink(KafkaSink(config)) as driver:
        driver.commit_epoch(epoch_of(number), [receipt], END)


def test_a_driver_that_is_killed_while_it_publishes_a_truncate_removes_each_key_once(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    """The next one reads the keys again, of which the tombstones of the first have removed none."""
    stem = fresh("truncate")
    config = KafkaSinkConfig(
        bootstrap_servers=kafka.bootstrap, topic=stem, mode="upsert", partitions=2, staging=str(tmp_path)
    )
    columns = with_key(pa.schema([("id", pa.int64()), *CHANGE_FIELDS]), ["id"])

    def staged(number: int, *events: dict[str, Any]) -> Receipt:
        batch = pa.RecordBatch.from_pylist([{"_position": f"{number}{n}", **e} for n, e in enumerate(events)], columns)
        return stage(KafkaSink(config), epoch_of(number), batch)

    def keys(committed: bool = True) -> list[tuple[bytes, bool]]:
        return sorted((each.key(), each.value() is None) for each in records(kafka.bootstrap, stem, committed))

    first = [{"_op": "c", "id": id} for id in range(4)]
    _commit(config, 1, staged(1, *first))
    before = keys()
    receipt = staged(2, {"_op": "t"}, {"_op": "c", "id": 9})
    with pytest.raises(Killed):
        elsewhere(_commit, config, 2, receipt, "commit.before=kill")
    assert keys() == before
    tombstones = [(b"%d" % id, True) for id in range(4)]
    added = [*tombstones, (b"9", False)]
    assert keys(committed=False) == sorted(before + added), "it was not killed in the middle"
    _commit(config, 2, receipt)
    assert keys() == sorted(before + added)
