"""The iceberg sink in an object store, with a catalog in a database."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from sink_protocol import END, ORDERS, epoch, rows, stage

from penstock import store
from penstock.config import Config
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.iceberg import Iceberg, IcebergConfig, io
from penstock.connectors.iceberg.catalog import Catalog
from penstock.connectors.iceberg.io import StoreIO, properties_for
from penstock.errors import ConfigError, Fenced, RetryableError
from penstock.testing import SinkContract
from penstock.testing.s3 import KEY, SECRET
from penstock.testing.spoiler import Spoiler


class Options(Config):
    storage_options: store.StorageOptions


@pytest.fixture
def place(s3):
    return store.at(f"{s3.bucket()}/lake", Options(storage_options=s3.options()).storage_options)


@pytest.fixture
def make(place, tmp_path):
    def make(endpoint="", opened=True, **more):
        options = {**place.store.options, **({"endpoint": endpoint} if endpoint else {})}
        uri = f"sqlite:///{tmp_path}/.catalog.db"
        sink = Iceberg(IcebergConfig(path=f"{place}/{{topic}}", storage_options=options, catalog_uri=uri, **more))
        if opened:
            sink.open()
        return sink

    return make


@pytest.fixture
def read(s3, tmp_path):
    """As another program reads it, with the client's own files."""

    def read(topic=ORDERS):
        catalog = SqlCatalog(
            "default",
            **{
                "uri": f"sqlite:///{tmp_path}/.catalog.db",
                "s3.endpoint": s3.endpoint,
                "s3.access-key-id": KEY,
                "s3.secret-access-key": SECRET,
                "s3.region": "us-east-1",
            },
        )
        name = topic.removeprefix("/").replace("/", ".")
        try:
            return catalog.load_table(name if "." in name else f"default.{name}").scan().to_arrow()
        except NoSuchTableError:
            return pa.table({"id": pa.array([], pa.int64())})

    return read


class TestIceberg(SinkContract):
    @pytest.fixture
    def sink(self, make):
        return make(opened=False)

    @pytest.fixture
    def visible(self, read):
        return read

    @pytest.fixture
    def lose_staged(self, place):
        def lose(_):
            found = [entry.place for entry in store.listed(place)]
            store.delete(each for each in found if "/data/" in str(each))

        return lose


def until_done(action):
    for _ in range(10):
        try:
            return action()
        except RetryableError:
            pass
    raise AssertionError("ten tries failed")


@pytest.mark.parametrize(
    ("method", "pattern", "action"),
    [
        ("PUT", r"metadata/.*\.json", "applied, then cut"),
        ("PUT", r"metadata/.*\.avro", "applied, then 500"),
        ("PUT", r"metadata/", "503"),
        ("GET", r"metadata/", "cut"),
        ("PUT", r"/data/", "applied, then 503"),
    ],
)
def test_spoiled_answers_of_the_store(make, read, s3, method, pattern, action, monkeypatch):
    monkeypatch.setattr(io, "HELD_FILE_BYTES", 0)  # or few files are read
    with Spoiler(s3.port) as spoiler:
        sink = make(spoiler.endpoint)
        for number in (1, 2, 3):
            rule = spoiler.spoil(method, pattern, action, count=2)
            receipts = until_done(lambda n=number: [stage(sink, epoch(n), rows(10 * n))])
            until_done(lambda n=number, r=receipts: sink.commit_epoch(epoch(n), r, END))
        assert rule.struck
    assert sorted(read().column("id").to_pylist()) == list(range(10, 40))
    assert make().committed_epoch("shop", ORDERS).number == 3


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_each_epoch_read_the_metadata_of_all_snapshots_again(make, read, s3, mode):
    """The page on object stores says how many requests an epoch takes."""
    key = {"key": ("id",)} if mode == "upsert" else {}
    counts = []
    with Spoiler(s3.port) as spoiler:
        sink = make(spoiler.endpoint, mode=mode, keep_snapshots=5, **key)
        for number in range(1, 15):
            receipts, before = [stage(sink, epoch(number), rows(10 * number))], len(spoiler.requests)
            assert not sink.plan_apply(epoch(number), ORDERS, receipts)
            sink.commit_topic(epoch(number), ORDERS, receipts, END)
            counts.append(len(spoiler.requests) - before)
    assert max(counts) <= 50  # some epochs join small files
    assert sorted(counts)[7] <= 20
    assert sorted(read().column("id").to_pylist()) == list(range(10, 150))


def test_metadata_is_kept_up_to_a_bound_and_only_under_names_that_never_come_again(place, monkeypatch):
    monkeypatch.setattr(io, "HELD_BYTES", 10)
    monkeypatch.setattr(io, "_held", io._Held())
    files = StoreIO(properties_for(place))

    def read(name):
        with files.new_input(f"{place}/t/metadata/{name}").open() as stream:
            return stream.read()

    names = ["00001-0123abcd.metadata.json", "00002-0123abcd.metadata.json", "v1.metadata.json"]
    for name in names:
        with files.new_output(f"{place}/t/metadata/{name}").create() as stream:
            stream.write(b"first ")
        store.put(place / "t/metadata" / name, b"second")
    assert [read(name) for name in reversed(names)] == [b"second", b"first ", b"second"]
    files.delete(f"{place}/t/metadata/{names[0]}")
    with pytest.raises(FileNotFoundError):
        read(names[0])


def test_a_refusal_that_follows_its_own_success_deletes_nothing_that_is_live(make, read, monkeypatch):
    """Whatever lies between us and a catalog may repeat a request: its second answer is a conflict."""
    sink = make()
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(10))], END)
    commit = Catalog.commit_table

    def twice(self, table, *changes):
        commit(self, table, *changes)
        monkeypatch.undo()
        raise CommitFailedException("somebody was first, and it was us")

    monkeypatch.setattr(Catalog, "commit_table", twice)
    sink.commit_epoch(epoch(2), [stage(sink, epoch(2), rows(20))], END)
    assert sorted(read().column("id").to_pylist()) == list(range(10, 30))


def test_a_zombie_whose_commit_comes_late_is_fenced(make, read):
    zombie, successor = make(), make()
    zombie.commit_epoch(epoch(1), [stage(zombie, epoch(1), rows(10))], END)
    late = [stage(zombie, epoch(2), rows(20))]
    for number in (2, 3):
        successor.commit_epoch(epoch(number), [stage(successor, epoch(number), rows(10 * number))], END)
    with pytest.raises(Fenced):
        zombie.commit_epoch(epoch(2), late, END)
    assert sorted(read().column("id").to_pylist()) == list(range(10, 40))


def test_tables_in_a_store_need_a_catalog_elsewhere(place):
    sink = Iceberg(IcebergConfig(path=f"{place}/{{topic}}", storage_options=place.store.options))
    with pytest.raises(ConfigError, match=r"(?s)PEN-1004.*`catalog_uri`"):
        sink.open()


def test_old_metadata_is_removed_and_the_catalog_holds_no_secret(make, place, read, tmp_path):
    sink = make(keep_snapshots=2)
    for number in range(1, 26):
        sink.commit_epoch(epoch(number), [stage(sink, epoch(number), rows(10 * number))], END)
    names = store.names(place / "lake" / "orders" / "metadata")
    assert len([name for name in names if name.endswith(".json")]) <= 22
    assert len([name for name in names if name.startswith("snap-")]) <= 3
    assert read().num_rows == 250
    assert SECRET.encode() not in (tmp_path / ".catalog.db").read_bytes()


def test_a_bucket_is_known_by_its_whole_name_and_by_its_server():
    """Another bucket may have a name that begins alike, and another server a bucket of the same name."""
    one, two = (store.at("s3://lake/a", {"endpoint": f"http://127.0.0.1:{port}"}) for port in (1, 2))
    first, second = StoreIO(properties_for(one)), StoreIO(properties_for(two))
    for each, server in ((first, one), (second, two)):
        beside = each.new_input("s3://lake-two/a/b")._place
        assert (beside.store.url, beside.key) == ("s3://lake-two", "a/b")
        own = each.new_input("s3://lake/a/b")._place
        assert (own.store.options, own.key) == (server.store.options, "a/b")


def test_the_page_shows_how_to_read_both_kinds_of_tables(make, place, s3, tmp_path):
    sinks = (
        make(mode="upsert", key=("id",)),
        Delta(
            DeltaConfig(
                path=f"{place}/{{topic}}",
                storage_options=place.store.options,
                mode="upsert",
                key=("id",),
                apply="vectors",
            )
        ),
    )
    page = (Path(__file__).parents[2] / "docs" / "object-stores.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for ours, theirs in (
        ("https://minio.example:9000", s3.endpoint),
        ("eu-central-1", "us-east-1"),
        ("s3://lake/shop/orders", f"{place}/lines"),
        ("sqlite:///lake/catalog.db", f"sqlite:///{tmp_path}/.catalog.db"),
        ("options = {", 'options = {"allow_http": "true", '),
        ("orders = ", "found[len(found)] = "),
    ):
        assert ours in shown
        shown = shown.replace(ours, theirs)
    for sink, topic in zip(sinks, ("/orders", "/lines"), strict=True):
        sink.open()
        for number in (1, 2):
            sink.commit_epoch(epoch(number), [stage(sink, epoch(number), rows(0, 600), topic=topic)], END)
    found = {}
    exec(shown, {"key": KEY, "secret": SECRET, "found": found})
    assert [sorted(each["id"].to_list() if i != 1 else each["id"].to_pylist()) for i, each in found.items()] == [
        list(range(600))
    ] * 3
