"""The iceberg sink with keys that a REST catalog gives: each is for one table, and ends."""

from __future__ import annotations

import re
import time
from urllib.parse import unquote_plus, urlparse
from uuid import uuid4

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField
from sink_protocol import END, ORDERS, epoch, rows, stage

from penstock import store
from penstock.config import Config
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.sink import Task
from penstock.testing import SinkContract
from penstock.testing.iceberg_rest import TOKEN, RestCatalogServer
from penstock.testing.s3 import KEY, SECRET
from penstock.testing.spoiler import Spoiler


class Options(Config):
    storage_options: store.StorageOptions


class Gate(Spoiler):
    """Before a store: each key may reach what lies below one address, until it ends."""

    def __post_init__(self):
        super().__post_init__()
        self.allowed, self.ended, self.strangers = {}, set(), []

    def keys_for(self, location):
        name = f"key-{uuid4().hex[:12]}"
        address = urlparse(location)
        self.allowed[name] = f"{address.netloc}{address.path}".rstrip("/")
        return {
            "s3.access-key-id": name,
            "s3.secret-access-key": SECRET,
            "s3.session-token": "a-token",
            "s3.endpoint": self.endpoint,
            "client.region": "us-east-1",
        }

    def end_all(self):
        self.ended.update(self.allowed)

    def judged(self, path, head, body):
        found = re.search(r"Credential=([^/]+)/", head)
        name = found[1] if found else ""
        if name in self.ended:
            return "400"
        about = [path]
        if "?delete" in path or "&delete" in path:
            about = [
                f"{path.partition('?')[0].rstrip('/')}/{key}" for key in re.findall("<Key>(.*?)</Key>", body.decode())
            ]
        elif "prefix=" in path:
            about = [f"{path.partition('?')[0].rstrip('/')}/{re.search('prefix=([^&]*)', path)[1]}"]
        every = [unquote_plus(each).lstrip("/").partition("?")[0] for each in about]
        if name in self.allowed and all(f"{each}/".startswith(f"{self.allowed[name]}/") for each in every):
            return ""
        self.strangers.append((name, *every))
        return "403"


@pytest.fixture
def gate(s3):
    with Gate(s3.port) as gate:
        yield gate


@pytest.fixture
def bucket(s3):
    return s3.bucket()


@pytest.fixture
def files(s3):
    own = {"s3.endpoint": s3.endpoint, "s3.access-key-id": KEY, "s3.secret-access-key": SECRET}
    return {**own, "s3.region": "us-east-1"}


@pytest.fixture
def rest(tmp_path, files, gate):
    with RestCatalogServer(tmp_path, files, gate.keys_for) as server:
        yield server


@pytest.fixture
def make(bucket, rest, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)

    def make(opened=True, **more):
        given = {"catalog_uri": rest.uri, "catalog_token": {"file": str(token)}, **more}
        sink = Iceberg(IcebergConfig(path=f"{bucket}/lake/{{topic}}", **given))
        if opened:
            sink.open()
        return sink

    return make


@pytest.fixture
def catalog(tmp_path, files, rest):
    return SqlCatalog("default", uri=f"sqlite:///{tmp_path}/rest-catalog.db", **files)


@pytest.fixture
def read(catalog):
    def read(topic=ORDERS):
        name = topic.removeprefix("/").replace("/", ".")
        try:
            return catalog.load_table(name if "." in name else f"default.{name}").scan().to_arrow()
        except NoSuchTableError:
            return pa.table({"id": pa.array([], pa.int64())})

    return read


class TestVended(SinkContract):
    @pytest.fixture
    def sink(self, make, gate):
        yield make(opened=False)
        assert gate.strangers == []

    @pytest.fixture
    def visible(self, read):
        return read

    @pytest.fixture
    def lose_staged(self, s3, bucket):
        def lose(_):
            options = Options(storage_options=s3.options()).storage_options
            found = [entry.place for entry in store.listed(store.at(bucket, options))]
            store.delete(each for each in found if "/data/" in str(each))

        return lose


@pytest.mark.soak
class TestVendedUpsert(TestVended):
    @pytest.fixture
    def sink(self, make, gate):
        yield make(opened=False, mode="upsert")
        assert gate.strangers == []

    @pytest.fixture
    def lose_staged(self, s3, bucket):
        def lose(_):
            options = Options(storage_options=s3.options()).storage_options
            found = [entry.place for entry in store.listed(store.at(bucket, options))]
            store.delete(each for each in found if str(each).endswith(".parquet"))

        return lose


def test_keys_that_end_within_an_epoch_are_asked_for_again(make, gate, read):
    sink = make()
    for number in (1, 2, 3):
        receipts = [stage(sink, epoch(number), rows(10 * number))]
        gate.end_all()
        sink.commit_epoch(epoch(number), receipts, END)
    assert sorted(read().column("id").to_pylist()) == list(range(10, 40))

    # In the middle of a task: the try fails, and the next one has other keys.
    sink.begin_epoch(epoch(4), Task(0))
    sink.write_batch(ORDERS, rows(40))
    gate.end_all()
    with pytest.raises(RetryableError, match="expired"):
        sink.pre_commit(epoch(4))
    sink.sweep(epoch(4), ())
    sink.commit_epoch(epoch(4), [stage(sink, epoch(4), rows(40))], END)
    assert sorted(read().column("id").to_pylist()) == list(range(10, 50))
    assert gate.strangers == []


def test_upserts(make, gate, read):
    sink = make(mode="upsert", key=["id"])
    for number in (1, 2):
        sink.commit_epoch(epoch(number), [stage(sink, epoch(number), rows(5 * number))], END)
        gate.end_all()
    assert sorted(read().column("id").to_pylist()) == list(range(5, 20))
    assert gate.strangers == []


def test_a_refusal_after_the_end_that_the_catalog_named_is_no_mistake(make, gate, rest):
    """Not every store says that a key has ended: some do not know it any more."""
    given = rest.vended
    rest.vended = lambda location: {**given(location), "s3.session-token-expires-at-ms": str(int(time.time() * 1000))}
    gate.judged = lambda *_: "403"
    with pytest.raises(RetryableError, match="expired"):
        stage(make(), epoch(1), rows(10))


def test_a_refusal_before_their_end_stops(make, gate):
    sink = make()
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(10))], END)
    gate.judged = lambda *_: "403"
    with pytest.raises(FatalError, match="PEN-5050"):
        stage(sink, epoch(2), rows(20))


def test_rows_go_to_where_the_table_is(make, gate, catalog, read, bucket):
    """Somebody else has made it, at a place that `path` does not name."""
    catalog.create_namespace("lake")
    schema = Schema(NestedField(1, "id", LongType()))
    catalog.create_table("lake.orders", schema, location=f"{bucket}/elsewhere/of its own/orders/")
    sink = make()
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(10))], END)
    assert sorted(read().column("id").to_pylist()) == list(range(10, 20))
    (file,) = catalog.load_table("lake.orders").inspect.files().column("file_path").to_pylist()
    assert file.startswith(f"{bucket}/elsewhere/of its own/orders/data/")
    assert gate.strangers == []


def test_keys_in_the_options_take_precedence(make, gate, s3, read):
    sink = make(storage_options=s3.options())
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(10))], END)
    assert read().num_rows == 10
    assert gate.requests == []


def test_check_writes_to_the_tables_that_are_there(make, gate):
    sink = make()
    assert [each.ok for each in sink.check()] == [True]
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(10))], END)
    (found,) = sink.check()
    assert found.ok
    assert "keys that the catalog gives" in found.what
    gate.end_all()
    gate.judged = lambda *_: "403"
    assert not sink.check()[-1].ok


def test_a_catalog_that_wants_to_sign_requests_itself_is_refused(make, rest):
    rest.vended = lambda location: {"s3.remote-signing-enabled": "true"}
    with pytest.raises(ConfigError, match="sign each request"):
        stage(make(), epoch(1), rows(10))


def test_the_token_of_azure_is_that_of_the_account():
    from penstock.connectors.iceberg.vended import place_of

    properties = {
        "adls.sas-token.other.dfs.core.windows.net": "wrong",
        "adls.sas-token.mine.dfs.core.windows.net": "right",
    }
    place = place_of("abfss://box@mine.dfs.core.windows.net/a b/t", properties, {})
    assert place.store.options == {"sas_token": "right", "account_name": "mine"}
    assert str(place) == "abfss://box@mine.dfs.core.windows.net/a b/t"
