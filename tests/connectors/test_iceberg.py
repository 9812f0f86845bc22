"""The Iceberg sink: the protocol, then what is particular to Iceberg's metadata and catalogs."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from sink_protocol import ORDERS, SinkProtocol

from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.testing import SinkContract


@pytest.fixture
def make(tmp_path):
    def make(**options):
        uri = f"sqlite:///{tmp_path}/.catalog.db"
        sink = Iceberg(IcebergConfig(**{"path": str(tmp_path / "out/{topic}"), "catalog_uri": uri, **options}))
        sink.open()
        return sink

    return make


@pytest.fixture
def catalog(tmp_path):
    """The catalog as another program sees it."""
    return SqlCatalog("default", uri=f"sqlite:///{tmp_path}/.catalog.db")


@pytest.fixture
def sink(make):
    return make()


@pytest.fixture
def read(catalog):
    def read(topic=ORDERS):
        try:
            return (
                catalog.load_table(
                    ("default" + topic.replace("/", ".")) if topic.count("/") == 1 else topic[1:].replace("/", ".")
                )
                .scan()
                .to_arrow()
            )
        except NoSuchTableError:
            return pa.table({"id": []})

    return read


class TestIceberg(SinkProtocol):
    @pytest.fixture
    def visible(self, read):
        return read


class TestIcebergContract(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path):
        return Iceberg(IcebergConfig(path=f"{tmp_path}/out/{{topic}}", catalog_uri=f"sqlite:///{tmp_path}/.catalog.db"))

    @pytest.fixture
    def visible(self, read):
        return read


class TestIcebergChanges(TestIcebergContract):
    @pytest.fixture
    def sink(self, tmp_path):
        uri = f"sqlite:///{tmp_path}/.catalog.db"
        return Iceberg(IcebergConfig(path=f"{tmp_path}/out/{{topic}}", catalog_uri=uri, mode="changes"))
