"""The crash suite over the iceberg sink, and a reader that looks on while runs crash."""

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from sqlalchemy.exc import OperationalError

from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.testing import CrashContract
from penstock.testing.crash.stage import EPOCH_ROWS, SINKS, TOPICS, Run
from penstock.testing.engine import Forked
from penstock.testing.processes import wait_until


class TestIcebergCrash(CrashContract):
    def make_sink(self, path):
        return Iceberg(IcebergConfig(path=f"{path}/{{topic}}"))

    def visible(self, path, topic):
        if not (path / "catalog.db").exists():
            return []
        reads = {"uri": f"sqlite:///{path}/catalog.db", "init_catalog_tables": "false"}  # the writer makes its own
        try:
            table = SqlCatalog("default", **reads).load_table(f"default.{topic[1:]}")
        except (NoSuchTableError, OperationalError):  # the catalog has no tables yet
            return []
        return table.scan().to_arrow()

    def test_a_reader_sees_whole_epochs_only_whatever_happens_to_the_writer(self, tmp_path):
        self._play(_look_on, tmp_path)


class InTasks(Iceberg):
    """Has work for tasks in every epoch, however small it is."""

    small_rows = 0

    def plan_apply(self, epoch, topic, receipts):
        planned = super().plan_apply(epoch, topic, receipts)
        return [work.model_copy(update={"bytes": 1 << 30}) for work in planned]


class TestIcebergApplyCrash(TestIcebergCrash):
    test_a_reader_sees_whole_epochs_only_whatever_happens_to_the_writer = None
    commits_without_work = False

    def make_sink(self, path):
        return InTasks(IcebergConfig(path=f"{path}/{{topic}}", mode="upsert"))


@pytest.mark.soak
class TestIcebergUpsertCrash(TestIcebergCrash):
    """On the driver, where the commit is that of an append."""

    test_a_reader_sees_whole_epochs_only_whatever_happens_to_the_writer = None

    def make_sink(self, path):
        return Iceberg(IcebergConfig(path=f"{path}/{{topic}}", mode="upsert"))


def _look_on(stage):
    reader = Forked(lambda: _poll(stage))
    stage.started.append(reader)
    for step, epoch in (("stage.task", 1), ("commit.before@2", 1), ("commit.topic", 2), ("commit.sink", 2)):
        name, _, count = step.partition("@")
        stage.killed(Run(f"{name}=kill@{count or 1}", epoch))
        before = _passes(stage)
        wait_until(lambda: _passes(stage) >= before + 2, "the reader to look at what the kill has left")  # noqa: B023
    stage.run()
    stage.check_all()
    (stage.path / "stop").touch()
    seen = reader.result()
    assert {EPOCH_ROWS, 3 * EPOCH_ROWS} <= seen <= {n * EPOCH_ROWS for n in range(4)}, seen


def _poll(stage):
    """Read every table over and over; gives the numbers of rows that were ever seen in one."""
    seen, is_last = set(), False
    while not is_last:
        is_last = (stage.path / "stop").exists()
        for sink in SINKS:
            for topic in TOPICS:
                rows = stage.contract.visible(stage.path / sink, topic)
                ids = sorted(rows.column("id").to_pylist()) if rows else []
                assert ids == list(range(len(ids))), f"{topic} in {sink} shows {ids}"
                seen.add(len(ids))
        with open(stage.path / "passes", "a") as file:
            file.write(".")
    return seen


def _passes(stage):
    """How often the reader has looked at every table."""
    path = stage.path / "passes"
    return path.stat().st_size if path.exists() else 0
