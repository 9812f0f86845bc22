"""Kafka to Kafka on executors of their own: they share no disk with the driver, and publish the parts of a large epoch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from standalone import LIGHT_EXECUTORS

from kafka_topics import fresh, make_topic, records, transaction
from penstock.testing.kafka import KafkaServer

CONNECTOR = '''
"""The sink with epochs that all count as large, and a note of who published what."""

import os
from pathlib import Path

from penstock.connectors.kafka.sink import KafkaSink

HERE = Path(r"{here}")


class InTasks(KafkaSink):
    name = "kafka_in_tasks"

    def plan_epoch(self, epoch, receipts):
        assert all(receipt.staging.endswith(".staging") for receipt in receipts), "staged where executors cannot read"
        return [each.model_copy(update={{"bytes": 1 << 24}}) for each in super().plan_epoch(epoch, receipts)]

    def apply(self, epoch, work, task):
        (HERE / f"{{work.shard}}-{{os.getppid()}}").touch()
        if (HERE / "kill").exists():
            (HERE / "kill").unlink()
            super().apply(epoch, work, task)
            os.kill(os.getpid(), 9)  # published, and its answer is lost
        return super().apply(epoch, work, task)
'''

PIPELINE = """
connector_name = "{stem}"
delivery = "exactly-once"
[source]
connector = "kafka"
bootstrap_servers = "{bootstrap}"
topics = ["{stem}"]
[sink]
connector = "in_tasks:InTasks"
bootstrap_servers = "{bootstrap}"
topic = "out.{{topic}}"
partitions = 3
publish_in_tasks_bytes = 0
"""


@pytest.mark.timeout(300)
def test_executors_publish_an_epoch_once_though_one_dies_after_it_did(kafka: KafkaServer, tmp_path: Path) -> None:
    stem, here = fresh("cluster"), tmp_path / "applied"
    here.mkdir()
    (here / "kill").touch()
    make_topic(kafka.bootstrap, stem, 4)
    sent = [(str(n % 50).encode(), str(n).encode()) for n in range(2000)]
    with transaction(kafka.bootstrap) as producer:
        for key, value in sent:
            producer.produce(stem, value, key=key)
    (tmp_path / "in_tasks.py").write_text(CONNECTOR.format(here=here))
    (tmp_path / "pipeline.toml").write_text(PIPELINE.format(stem=stem, bootstrap=kafka.bootstrap))
    command = [sys.executable, "-m", "penstock", "run", "pipeline.toml", "--drain", "--master"]
    done = subprocess.run(
        [*command, "local-cluster[2,1,1024]"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_SUBMIT_ARGS": LIGHT_EXECUTORS},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [(each.key(), each.value()) for each in records(kafka.bootstrap, f"out.{stem}")]
    assert sorted(found) == sorted(sent)
    for key in {key for key, _ in sent}:
        assert [int(v) for k, v in found if k == key] == [int(v) for k, v in sent if k == key], "the order of a key"
    by_shard = [file.name.split("-") for file in here.iterdir()]
    assert {shard for shard, _ in by_shard} == {str(shard) for shard in range(8)}
    assert not (here / "kill").exists()
    assert not (tmp_path / "state" / "sinks").exists(), "something was staged on the driver's disk"
