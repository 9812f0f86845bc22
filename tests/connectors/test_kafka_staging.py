"""Rows that wait for their commit in files: what becomes of them when runs die, move, or are set up otherwise."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kafka_topics import fresh, records
from penstock import store
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.errors import FatalError, StagingLost
from penstock.sink import SinkContext, Task
from penstock.testing.kafka import KafkaServer
from penstock.testing.s3 import S3Server
from penstock.testing.sinks.steps import END, TOPIC, epoch_of, opened_sink, rows


def make_sink(kafka: KafkaServer, stem: str, **options: Any) -> KafkaSink:
    return KafkaSink(
        KafkaSinkConfig(bootstrap_servers=kafka.bootstrap, topic=f"{stem}.{{topic}}", **{"partitions": 2, **options})
    )


def seen(kafka: KafkaServer, stem: str) -> list[Any]:
    return [json.loads(each.value()) for each in records(kafka.bootstrap, f"{stem}.lake.orders")]


def publish(sink: KafkaSink, number: int) -> None:
    """An epoch of one task, from its rows to its commit."""
    epoch = epoch_of(number)
    with opened_sink(sink) as opened:
        opened.begin_epoch(epoch, Task(0))
        opened.write_batch(TOPIC, rows(number))
        opened.commit_epoch(epoch, [opened.pre_commit(epoch)], END)


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


def test_many_small_batches_are_staged_as_few(kafka: KafkaServer, tmp_path: Path) -> None:
    """A batch of one row took ten times the room of the row, on the disk and more in memory."""
    stem, epoch = fresh("few"), epoch_of(1)
    with opened_sink(make_sink(kafka, stem, partitions=1), SinkContext(state_dir=tmp_path)) as sink:
        sink.begin_epoch(epoch, Task(0))
        for number in range(2500):
            sink.write_batch(TOPIC, rows(number, 1))
        receipt = sink.pre_commit(epoch)
        assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 2500 * 300
        sink.commit_epoch(epoch, [receipt], END)
    assert [each["id"] for each in seen(kafka, stem)] == list(range(2500))


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


@pytest.mark.parametrize("in_tasks_bytes", [0, 128 << 20])
def test_an_epoch_that_waits_is_published_though_state_dir_has_moved_and_staging_is_another(
    kafka: KafkaServer, tmp_path: Path, in_tasks_bytes: int
) -> None:
    stem, epoch = fresh("elsewhere"), epoch_of(1)
    with opened_sink(make_sink(kafka, stem), SinkContext(state_dir=tmp_path / "old")) as opened:
        opened.begin_epoch(epoch, Task(0))
        opened.write_batch(TOPIC, rows(0))
        receipt = opened.pre_commit(epoch)
    (tmp_path / "old").rename(tmp_path / "new")
    later = make_sink(kafka, stem, staging="topic", publish_in_tasks_bytes=in_tasks_bytes)
    with opened_sink(later, SinkContext(state_dir=tmp_path / "new")) as driver:
        with opened_sink(make_sink(kafka, stem, staging="topic")) as task:
            for each in driver.plan_epoch(epoch, [receipt]):
                task.apply(epoch, each, Task(0))
        driver.commit_epoch(epoch, [receipt], END)
        driver.sweep(epoch, [])
    assert len(seen(kafka, stem)) == rows(0).num_rows
    assert not list((tmp_path / "new").iterdir())


def test_two_clusters_may_stage_in_one_directory(kafka: KafkaServer, tmp_path: Path) -> None:
    """Topics of one name have markers of one name; a sweep of the one must leave the other's rows alone."""
    stem, epoch = fresh("both"), epoch_of(1)
    sink = make_sink(kafka, stem, staging=str(tmp_path))
    other = KafkaSink(sink.config.model_copy(update={"bootstrap_servers": f"{kafka.bootstrap},{kafka.bootstrap}"}))
    with opened_sink(sink) as opened, opened_sink(other) as beside:
        opened.begin_epoch(epoch, Task(0))
        opened.write_batch(TOPIC, rows(0))
        receipt = opened.pre_commit(epoch)
        beside.rollback_epoch(epoch, ())
        opened.commit_epoch(epoch, [receipt], END)
    assert len(seen(kafka, stem)) == rows(0).num_rows


def test_a_full_disk_stops_the_task_and_says_so(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with opened_sink(make_sink(kafka, fresh("full")), SinkContext(state_dir=tmp_path / "own")) as opened:
        opened.begin_epoch(epoch_of(1), Task(0))
        opened.write_batch(TOPIC, rows(0))
        monkeypatch.setattr(store, "sync", full)
        with pytest.raises(FatalError, match="PEN-5009") as stopped:
            opened.pre_commit(epoch_of(1))
        assert "free some space" in stopped.value.hint
        opened.rollback_epoch(epoch_of(1), ())


def test_rows_are_staged_in_an_object_store(kafka: KafkaServer, s3: S3Server) -> None:
    stem, bucket = fresh("object"), s3.bucket()
    own = {"staging": f"s3://{bucket.removeprefix('s3://')}/rows", "storage_options": s3.options()}
    for number, in_tasks_bytes in enumerate((128 << 20, 0), 1):
        publish(make_sink(kafka, stem, publish_in_tasks_bytes=in_tasks_bytes, **own), number)
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
