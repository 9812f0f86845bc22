"""The crash suite over the kit's own sink, in both of its modes."""

from penstock.testing import CrashContract, MemorySink, MemorySinkConfig


class TestMemorySinkCrash(CrashContract):
    ordered = True

    def make_sink(self, path):
        return MemorySink(MemorySinkConfig(path=path))

    def visible(self, path, topic):
        return self.make_sink(path).visible(topic)
