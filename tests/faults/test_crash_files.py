"""The crash suite over the files sink."""

from penstock.connectors.files_sink import FilesSink, FilesSinkConfig, read_published
from penstock.testing import CrashContract


class TestFilesCrash(CrashContract):
    def make_sink(self, path):
        return FilesSink(FilesSinkConfig(path=f"{path}/{{topic}}"))

    def visible(self, path, topic):
        return read_published(path / topic[1:])
