"""The crash suite over the delta sink."""

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.testing import CrashContract


class TestDeltaCrash(CrashContract):
    def make_sink(self, path):
        return Delta(DeltaConfig(path=f"{path}/{{topic}}"))

    def visible(self, path, topic):
        try:
            return DeltaTable(path / topic[1:]).to_pyarrow_table()
        except TableNotFoundError:
            return []
