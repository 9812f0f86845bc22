"""The crash suite over the delta sink."""

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.testing import CrashContract


class TestDeltaCrash(CrashContract):
    mode = "append"

    def make_sink(self, path):
        return Delta(DeltaConfig(path=f"{path}/{{topic}}", mode=self.mode))

    def visible(self, path, topic):
        try:
            return DeltaTable(path / topic[1:]).to_pyarrow_table()
        except TableNotFoundError:
            return []


class TestDeltaUpsertCrash(TestDeltaCrash):
    mode = "upsert"
