"""The crash suite over the iceberg sink."""

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError

from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.testing import CrashContract


class TestIcebergCrash(CrashContract):
    def make_sink(self, path):
        return Iceberg(IcebergConfig(path=f"{path}/{{topic}}"))

    def visible(self, path, topic):
        if not (path / "catalog.db").exists():
            return []
        try:
            table = SqlCatalog("default", uri=f"sqlite:///{path}/catalog.db").load_table(f"default.{topic[1:]}")
        except NoSuchTableError:
            return []
        return table.scan().to_arrow()
