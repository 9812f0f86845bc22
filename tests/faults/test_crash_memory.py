"""The crash suite over the kit's own sinks."""

import pytest

from penstock.testing import CrashContract, MemoryApplySink, MemorySink, MemorySinkConfig
from penstock.testing.crash.scenarios import must_be_fenced
from penstock.testing.crash.stage import Run


def taken_over(stage, step):
    zombie = stage.stopped(Run(f"{step}=stop", epoch=2))
    stage.run()
    stage.check_all()
    must_be_fenced(stage, zombie)


class TestMemorySinkCrash(CrashContract):
    ordered = True

    def make_sink(self, path):
        return MemorySink(MemorySinkConfig(path=path))

    def visible(self, path, topic):
        return self.make_sink(path).visible(topic)


class TestStoredStateCrash(TestMemorySinkCrash):
    """Every run begins on another machine, as it were."""

    stored = True

    @pytest.mark.parametrize("step", ["prepare.after", "commit.sink", "commit.after"])
    def test_a_zombie_whose_state_was_taken_over_is_fenced(self, tmp_path, step):
        self._play(taken_over, tmp_path, step)


class TestMemoryApplySinkCrash(CrashContract):
    """Work in tasks of its own."""

    ordered = True
    commits_without_work = False

    def make_sink(self, path):
        return MemoryApplySink(MemorySinkConfig(path=path))

    def visible(self, path, topic):
        return self.make_sink(path).visible(topic)


class LittleWork(MemoryApplySink):
    work_bytes = 1


class TestLittleWorkCrash(TestMemoryApplySinkCrash):
    """Work on the driver."""

    def make_sink(self, path):
        return LittleWork(MemorySinkConfig(path=path))
