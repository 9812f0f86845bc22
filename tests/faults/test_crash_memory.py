"""The crash suite over the kit's own sinks."""

from penstock.testing import CrashContract, MemoryApplySink, MemorySink, MemorySinkConfig


class TestMemorySinkCrash(CrashContract):
    ordered = True

    def make_sink(self, path):
        return MemorySink(MemorySinkConfig(path=path))

    def visible(self, path, topic):
        return self.make_sink(path).visible(topic)


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
