"""A prepared epoch that a sink refuses for ever: `offsets restage` is the way on, and survives kills."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, FatalError
from penstock.runtime.epochs import State, restage
from penstock.testing import CrashContract, MemorySink, MemorySinkConfig
from penstock.testing.crash.stage import EPOCH_ROWS, EPOCHS, Run, kill_at


class Stubborn(MemorySink):
    """Refuses to commit `/b` in the sink `one`, whatever is staged, until it is mended."""

    def commit_topic(self, epoch, topic, receipts, end):
        if topic == "/b" and (self.config.path.parent / "refuses").exists() and self.config.path.name == "one":
            raise FatalError("cannot affect row a second time")
        super().commit_topic(epoch, topic, receipts, end)


class Contract(CrashContract):
    ordered = True

    def make_sink(self, path):
        return Stubborn(MemorySinkConfig(path=path))

    def visible(self, path, topic):
        return self.make_sink(path).visible(topic)


def refuse(stage):
    """Run until the epoch is prepared, committed in part, and refused."""
    (stage.path / "refuses").touch()
    for _ in range(2):  # starting again does not help
        with pytest.raises(FatalError, match="second time"):
            stage.run()
    assert len(stage.rows()["one", "/b"]) == 0
    assert len(stage.rows()["one", "/a"]) == len(stage.rows()["two", "/b"]) == EPOCH_ROWS


def mended(stage, step):
    refuse(stage)
    restage(stage.path / "state", "crash")
    (stage.path / "refuses").unlink()
    stage.killed(Run(kill_at(step)))
    stage.run()
    stage.check_all()


def left_out(stage, step):
    refuse(stage)
    restage(stage.path / "state", "crash", ["/b"])
    if step:
        stage.killed(Run(kill_at(step), epoch=1))
    (stage.path / "refuses").unlink()
    stage.run()
    rows = stage.rows()
    every = list(range(EPOCHS * EPOCH_ROWS))
    assert rows.pop(("one", "/b")) == every[EPOCH_ROWS:], "only what was asked to be left out is missing"
    assert all(ids == every for ids in rows.values())


@pytest.mark.parametrize(
    "step", ["stage.begin", "stage.middle", "stage.task", "prepare.after", "commit.before", "commit.after", "ack.after"]
)
def test_what_was_refused_is_staged_again_and_a_kill_neither_loses_nor_doubles_a_row(tmp_path, step):
    Contract()._play(mended, tmp_path, step)


@pytest.mark.parametrize("step", [None, "prepare.after", "commit.after"])
def test_a_topic_can_be_left_out_of_the_epoch_where_it_is_not_committed(tmp_path, step):
    Contract()._play(left_out, tmp_path, step)


def test_only_a_prepared_epoch_is_staged_again(tmp_path):
    with pytest.raises(ConfigError, match="nothing to stage again"):
        restage(tmp_path / "state", "orders")


def unknown_topic(stage):
    refuse(stage)
    with pytest.raises(ConfigError, match="has no rows for /c"):
        restage(stage.path / "state", "crash", ["/c"])
    assert State(stage.path / "state", "crash").peek().newest.restage is None


def test_a_topic_that_the_epoch_does_not_have_is_refused(tmp_path):
    Contract()._play(unknown_topic, tmp_path)
