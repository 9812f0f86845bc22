"""The crash suite over the files sink."""

import pyarrow as pa
import pytest

from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.sink import Epoch, Task
from penstock.testing import CrashContract


class TestFilesCrash(CrashContract):
    def make_sink(self, path):
        return FilesSink(FilesSinkConfig(path=f"{path}/{{topic}}"))

    def visible(self, path, topic):
        return read_published(path / topic[1:])


@pytest.mark.parametrize("left", [0, 1, 30])
def test_a_task_killed_while_it_listed_its_first_file_can_be_rolled_back(tmp_path, left):
    sink, epoch = TestFilesCrash().make_sink(tmp_path), Epoch("shop", "one", 1)
    sink.open()
    sink.begin_epoch(epoch, Task(0))
    sink.write_batch("/a", pa.record_batch({"id": [1]}))
    (listed,) = (file for file in (tmp_path / "_penstock" / ".begun").rglob("*") if file.is_file())
    listed.write_bytes(listed.read_bytes()[:left])
    sink.close()
    sink.rollback_epoch(epoch, ())
    assert not listed.exists()
