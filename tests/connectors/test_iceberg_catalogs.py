"""The iceberg sink with catalogs that are services: REST and Glue, raced and with spoiled answers."""

from __future__ import annotations

import threading
from uuid import uuid4

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError
from sink_protocol import END, ORDERS, epoch, rows, stage

from penstock import store
from penstock.config import Config
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.errors import ConfigError, ConnectorError, FatalError, Fenced, RetryableError
from penstock.testing import SinkContract
from penstock.testing.iceberg_rest import CREDENTIAL, TOKEN, RestCatalogServer
from penstock.testing.s3 import KEY, SECRET
from penstock.testing.spoiler import Spoiler


class Options(Config):
    storage_options: store.StorageOptions


@pytest.fixture
def place(s3, kind, tmp_path):
    if kind == "hive":  # the metastore makes the directories of tables itself, and has no client for S3
        return tmp_path / "lake"
    return store.at(f"{s3.bucket()}/lake", Options(storage_options=s3.options()).storage_options)


@pytest.fixture
def files(s3):
    """How pyiceberg itself reaches the files."""
    own = {"s3.endpoint": s3.endpoint, "s3.access-key-id": KEY, "s3.secret-access-key": SECRET}
    return {**own, "s3.region": "us-east-1"}


@pytest.fixture
def rest(tmp_path, files):
    with RestCatalogServer(tmp_path, files) as server:
        yield server


@pytest.fixture(params=["rest", "glue", pytest.param("hive", marks=pytest.mark.soak)])
def kind(request):
    return request.param


@pytest.fixture
def port(kind, s3, request):
    """Of the catalog's service."""
    return request.getfixturevalue(kind).port if kind in ("rest", "hive") else s3.port


@pytest.fixture
def token(tmp_path):
    """A file, since processes that were started earlier do not see a new variable of the environment."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


@pytest.fixture
def make(kind, port, place, token):
    namespace = f"n{uuid4().hex[:12]}"

    def make(spoiled=None, opened=True, **more):
        uri = f"http://127.0.0.1:{spoiled.port if spoiled else port}"
        if kind == "rest":
            own = {"catalog_uri": uri, "catalog_token": {"file": str(token)}}
        elif kind == "hive":
            own = {"catalog_uri": f"thrift://127.0.0.1:{port}"}
        else:
            keys = {"glue.access-key-id": "PENSTOCK_S3_KEY", "glue.secret-access-key": "PENSTOCK_S3_SECRET"}
            references = {name: {"env": value} for name, value in keys.items()}
            own = {
                "catalog_type": "glue",
                "catalog_uri": uri,
                "catalog_options": {"glue.region": "us-east-1", "glue.max-retries": 1, **references},
            }
        reached = {} if kind == "hive" else {"storage_options": place.store.options}
        options = {**reached, "namespace": namespace, "table": "{topic}", **own, **more}
        sink = Iceberg(IcebergConfig(path=f"{place}/{{topic}}", **options))
        if opened:
            sink.open()
        return sink

    make.namespace = namespace
    return make


@pytest.fixture
def read(kind, port, make, files):
    """As another program reads it."""

    def read(topic=ORDERS):
        own = {"uri": f"http://127.0.0.1:{port}", "token": TOKEN}
        if kind == "glue":
            keys = {"glue.access-key-id": KEY, "glue.secret-access-key": SECRET, "glue.region": "us-east-1"}
            own = {"type": "glue", "glue.endpoint": own["uri"], **keys}
        if kind == "hive":
            own = {"type": "hive", "uri": f"thrift://127.0.0.1:{port}"}
        catalog = load_catalog("default", **own, **files)
        name = topic.removeprefix("/").replace("/", ".")
        try:
            found = catalog.load_table(name if "." in name else f"{make.namespace}.{name}")
            return found.scan().to_arrow()
        except NoSuchTableError:
            return pa.table({"id": pa.array([], pa.int64())})

    return read


TOPIC = "/orders"
"""Without a namespace of its own: Glue is one for all tests."""


class TestCatalogs(SinkContract):
    @pytest.fixture
    def kind(self):
        return "rest"

    @pytest.fixture
    def sink(self, make):
        return make(opened=False, mode="upsert", table=f"{make.namespace}.{{topic}}")

    @pytest.fixture
    def visible(self, read, make):
        return lambda topic: read(f"/{make.namespace}/{topic[1:].replace('/', '.')}")

    @pytest.fixture
    def lose_staged(self, place):
        def lose(_):
            store.delete(each.place for each in store.listed(place) if str(each.place).endswith(".parquet"))

        return lose


def until_done(action):
    for _ in range(10):
        try:
            return action()
        except RetryableError:
            pass
    raise AssertionError("ten tries failed")


COMMIT = {"rest": r"/v1/namespaces/.*/tables/orders$", "glue": r"^/$"}
"""The requests of a commit; Glue has one address for all that it does."""


@pytest.mark.parametrize(
    "action", ["500", "503", "409", "cut", "applied, then 500", "applied, then 503", "applied, then cut"]
)
def test_spoiled_answers_of_the_catalog(make, kind, port, read, action):
    if kind == "hive":
        pytest.skip("it does not speak HTTP; see below")
    with Spoiler(port) as spoiler:
        sink = make(spoiler)
        for number in (1, 2, 3):
            receipts = [stage(sink, epoch(number), rows(10 * number), topic=TOPIC)]
            rule = spoiler.spoil("POST", COMMIT[kind], action, count=1)
            until_done(lambda n=number, r=receipts: sink.commit_epoch(epoch(n), r, END))
        assert rule.struck
    assert sorted(read(TOPIC).column("id").to_pylist()) == list(range(10, 40))
    assert make().committed_epoch("shop", TOPIC).number == 3


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["hive"])
@pytest.mark.parametrize(
    ("call", "is_applied"),
    # A lock whose answer is lost is held for five minutes: nothing is committed meanwhile.
    [("lock", False), ("unlock", True), *(("alter_table_with_environment_context", each) for each in (True, False))],
)
def test_lost_answers_of_hive(make, read, monkeypatch, call, is_applied):
    from hive_metastore.ThriftHiveMetastore import Client
    from thrift.transport.TTransport import TTransportException

    sink, real, struck = make(), getattr(Client, call), []

    def lost(self, *given, **named):
        if struck:
            return real(self, *given, **named)
        if is_applied:
            real(self, *given, **named)
        struck.append(call)
        raise TTransportException(message="TSocket read 0 bytes")

    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(10), topic=TOPIC)], END)
    receipts = [stage(sink, epoch(2), rows(20), topic=TOPIC)]
    monkeypatch.setattr(Client, call, lost)
    until_done(lambda: sink.commit_epoch(epoch(2), receipts, END))
    assert struck
    assert sorted(read(TOPIC).column("id").to_pylist()) == list(range(10, 30))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["hive"])
def test_topics_are_committed_at_the_same_time_with_hive(make, read):
    """Its client is not made for threads."""
    sink, topics, errors = make(), [f"/t{number}" for number in range(6)], []

    def run(topic):
        try:
            for number in (1, 2, 3):
                receipts = [stage(sink, epoch(number), rows(10 * number), topic=topic)]
                sink.commit_topic(epoch(number), topic, receipts, END)
        except ConnectorError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[topic]) for topic in topics]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert errors == []
    for topic in topics:
        assert sorted(read(topic).column("id").to_pylist()) == list(range(10, 40))


def test_a_zombie_whose_commit_comes_late_is_fenced(make, read):
    zombie, successor = make(), make()
    zombie.commit_epoch(epoch(1), [stage(zombie, epoch(1), rows(10), topic=TOPIC)], END)
    late = [stage(zombie, epoch(2), rows(20), topic=TOPIC)]
    for number in (2, 3):
        receipts = [stage(successor, epoch(number), rows(10 * number), topic=TOPIC)]
        successor.commit_epoch(epoch(number), receipts, END)
    with pytest.raises(Fenced):
        zombie.commit_epoch(epoch(2), late, END)
    assert sorted(read(TOPIC).column("id").to_pylist()) == list(range(10, 40))


def test_of_many_drivers_with_one_epoch_each_row_comes_once(make, read):
    """All of them start from the same version of the table."""
    first = make()
    first.commit_epoch(epoch(1), [stage(first, epoch(1), rows(0), topic=TOPIC)], END)
    drivers = [make() for _ in range(4)]
    staged = [[stage(each, epoch(2), rows(10), topic=TOPIC)] for each in drivers]
    ready, errors = threading.Barrier(len(drivers)), []

    def commit(sink, receipts):
        ready.wait(60)
        try:
            until_done(lambda: sink.commit_epoch(epoch(2), receipts, END))
        except ConnectorError as error:
            errors.append(error)

    threads = [threading.Thread(target=commit, args=each) for each in zip(drivers, staged, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    assert sorted(read(TOPIC).column("id").to_pylist()) == list(range(20))


def test_old_snapshots_go(make, read):
    sink = make(keep_snapshots=3)
    for number in range(1, 9):
        sink.commit_epoch(epoch(number), [stage(sink, epoch(number), rows(10 * number), topic=TOPIC)], END)
    assert len(sink.target(TOPIC).load().metadata.snapshots) <= 4
    assert read(TOPIC).num_rows == 80


class TestRest:
    @pytest.fixture
    def kind(self):
        return "rest"

    def test_tokens_are_asked_for_with_a_credential(self, make, monkeypatch, rest):
        monkeypatch.setenv("CATALOG_CREDENTIAL", CREDENTIAL)
        options = {"oauth2-server-uri": f"{rest.uri}/v1/oauth/tokens"}
        sink = make(catalog_token=None, catalog_credential={"env": "CATALOG_CREDENTIAL"}, catalog_options=options)
        assert sink.committed_epoch("shop", TOPIC) is None

    def test_a_wrong_token_stops_and_is_not_shown(self, make, token):
        sink = make()
        token.write_text("mistaken-token")
        with pytest.raises(FatalError, match=r"PEN-5001 .*refused") as raised:
            sink.committed_epoch("shop", TOPIC)
        assert "mistaken-token" not in str(raised.value)

    def test_a_token_that_is_renewed_is_read_again(self, make, rest, token):
        sink = make()
        assert sink.committed_epoch("shop", TOPIC) is None
        rest.token = "another-token"
        token.write_text("another-token")
        with pytest.raises(RetryableError, match="expired"):
            sink.committed_epoch("shop", TOPIC)
        assert sink.committed_epoch("shop", TOPIC) is None

    def test_a_catalog_that_is_not_there_is_tried_again(self, make, rest):
        sink = make(catalog_uri="http://127.0.0.1:1")
        with pytest.raises(RetryableError, match="PEN-2001"):
            sink.committed_epoch("shop", TOPIC)


def test_secrets_in_catalog_options_must_be_references():
    for options in ({"glue.secret-access-key": "plain"}, {"token": "plain"}, {"s3.access-key-id": "plain"}):
        with pytest.raises(ValueError, match=r"reference|catalog_token"):
            IcebergConfig(path="lake/{topic}", catalog_type="glue", catalog_options=options)


def test_the_kind_of_a_catalog_goes_by_its_address():
    kinds = {"https://catalog/api": "rest", "thrift://host:9083": "hive", "sqlite:///a.db": "sql", "": "sql"}
    for uri, expected in kinds.items():
        assert IcebergConfig(path="lake/{topic}", catalog_uri=uri).catalog_kind == expected
    assert IcebergConfig(path="lake/{topic}", catalog_type="glue").catalog_kind == "glue"
    with pytest.raises(ConfigError, match=r"PEN-1003|PEN-1009"):
        Iceberg(IcebergConfig(path="lake/{topic}", catalog_uri="mysql://host/db")).open()
