"""Every shipped connector passes the kit."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from penstock.connectors.console import Console, ConsoleConfig
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.files import Files, FilesConfig
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.connectors.generator import Generator, GeneratorConfig
from penstock.testing import SinkContract, SourceContract


class TestConsole(SinkContract):
    @pytest.fixture
    def sink(self):
        return Console(ConsoleConfig(format="jsonl", max_rows=1000))

    @pytest.fixture
    def visible(self, capsys):
        shown = []

        def read():
            shown.extend(json.loads(line) for line in capsys.readouterr().out.splitlines())
            return shown

        return read


class TestFilesSink(SinkContract):
    @pytest.fixture(params=["parquet", "jsonl"])
    def sink(self, tmp_path, request):
        return FilesSink(FilesSinkConfig(path=f"{tmp_path}/out/{{topic}}", format=request.param))

    @pytest.fixture
    def visible(self, tmp_path):
        return lambda topic: read_published(tmp_path / "out" / topic[1:])


class TestDelta(SinkContract):
    @pytest.fixture(params=["append", "upsert", "changes"])
    def sink(self, tmp_path, request):
        return Delta(DeltaConfig(path=f"{tmp_path}/{{topic}}", mode=request.param))

    @pytest.fixture
    def visible(self, tmp_path):
        def read(topic):
            try:
                return DeltaTable(tmp_path / topic[1:]).to_pyarrow_table()
            except TableNotFoundError:
                return []

        return read


class TestGenerator(SourceContract):
    @pytest.fixture
    def source(self):
        return Generator(GeneratorConfig(rows=60, streams=("a", "b"), batch_rows=7))


class TestFilesSource(SourceContract):
    @pytest.fixture
    def source(self, tmp_path):
        for number in range(4):
            self.put(tmp_path, number)
        return Files(FilesConfig(path=f"{tmp_path}/in/*.parquet", scan_interval_ms=0, settle_ms=0))

    @pytest.fixture
    def expected(self):
        return [{"id": number} for number in range(40)]

    @pytest.fixture
    def more(self, tmp_path):
        return lambda: self.put(tmp_path, 9)

    @pytest.fixture
    def wrong(self):
        return Files(FilesConfig(path="/nowhere/at/all/*.parquet"))

    def put(self, tmp_path, number):
        (tmp_path / "in").mkdir(exist_ok=True)
        table = pa.table({"id": pa.array(range(10 * number, 10 * number + 10), pa.int64())})
        path = tmp_path / "in" / f"{number}.parquet"
        pq.write_table(table, path, row_group_size=4)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
