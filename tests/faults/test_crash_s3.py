"""The crash suite over sinks that write to an object store."""

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError
from test_crash_delta import InTasks
from test_crash_iceberg import InTasks as IcebergInTasks

import s3_targets
from penstock import store
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.delta.client import client_options
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.testing import CrashContract
from s3_targets import InS3


def config(path, **more):
    where, options = s3_targets.at(path)
    return {"path": f"{where}/{{topic}}", "storage_options": options, **more}


def table(path, topic):
    place = s3_targets.place(path / topic[1:])
    try:
        return DeltaTable(str(place), storage_options=client_options(place))
    except TableNotFoundError:
        return None


class TestDeltaS3Crash(InS3, CrashContract):
    def make_sink(self, path):
        return Delta(DeltaConfig(**config(path)))

    def visible(self, path, topic):
        found = table(path, topic)
        # With deletion vectors, `to_pyarrow_table` refuses a table.
        return pa.table(QueryBuilder().register("t", found).execute("SELECT * FROM t").read_all()) if found else []

    def lose_staged(self, path):
        found = [found for topic in ("/a", "/b") if (found := table(path, topic))]
        s3_targets.delete_staged(path, {uri.rpartition("/")[2] for each in found for uri in each.file_uris()})


class TestDeltaApplyS3Crash(TestDeltaS3Crash):
    commits_without_work = False

    def make_sink(self, path):
        return InTasks(DeltaConfig(**config(path, mode="upsert")))


class TestIcebergS3Crash(InS3, CrashContract):
    """The catalog is on a disk, the tables are in the store."""

    mode = "append"

    def make_sink(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        more = {"catalog_uri": f"sqlite:///{path}.db", "mode": self.mode, "namespace": "default"}
        return Iceberg(IcebergConfig(**config(path, **more)))

    def visible(self, path, topic):
        sink = self.make_sink(path)
        sink.open()
        loaded = sink.target(topic).load()
        return loaded.iceberg.scan().to_arrow() if loaded else []

    def lose_staged(self, path):
        sink = self.make_sink(path)
        sink.open()
        live = {name for topic in ("/a", "/b") for name in sink.target(topic).live_files("crash")}
        s3_targets.delete_staged(path, live)

    def empty(self, path):
        super().empty(path)
        path.with_name(f"{path.name}.db").unlink(missing_ok=True)


class TestIcebergApplyS3Crash(TestIcebergS3Crash):
    mode = "upsert"
    commits_without_work = False

    def make_sink(self, path):
        return IcebergInTasks(super().make_sink(path).config)


@pytest.mark.soak
class TestIcebergUpsertS3Crash(TestIcebergS3Crash):
    mode = "upsert"


class TestFilesS3Crash(InS3, CrashContract):
    def make_sink(self, path):
        return FilesSink(FilesSinkConfig(**config(path)))

    def visible(self, path, topic):
        return read_published(s3_targets.place(path / topic[1:]))

    def lose_staged(self, path):
        found = [entry.place for entry in store.listed(s3_targets.place(path))]
        assert [each for each in found if each.name.endswith(".staged")]
        store.delete(each for each in found if each.name.endswith(".staged"))
