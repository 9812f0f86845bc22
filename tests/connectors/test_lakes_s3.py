"""The lake sinks in an object store: the kit, spoiled answers at every step of a commit, and stores that cannot be used."""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import TableNotFoundError
from sink_protocol import END, ORDERS, epoch, rows, stage

from penstock import store
from penstock.config import Config
from penstock.connectors.delta import Delta, DeltaConfig, apply, marking, purge
from penstock.connectors.delta.client import client_options
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.connectors.lake import index
from penstock.errors import ConfigError, FatalError, Fenced, RetryableError, StagingLost
from penstock.sink import Task
from penstock.testing import SinkContract
from penstock.testing.spoiler import Spoiler


class Options(Config):
    storage_options: store.StorageOptions


@pytest.fixture
def place(s3):
    """A place in a bucket of its own."""
    return store.at(f"{s3.bucket()}/lake", Options(storage_options=s3.options()).storage_options)


@pytest.fixture
def spoiler(s3):
    with Spoiler(s3.port) as running:
        yield running


def config(place, endpoint="", **more):
    options = {**place.store.options, **({"endpoint": endpoint} if endpoint else {})}
    return {"path": f"{place}/{{topic}}", "storage_options": options, **more}


def table(place, topic=ORDERS):
    where = place / topic[1:]
    return DeltaTable(str(where), storage_options=client_options(where))


def read_delta(place, topic=ORDERS):
    try:
        found = QueryBuilder().register("t", table(place, topic)).execute("SELECT * FROM t").read_all()
        return pa.table(found)
    except TableNotFoundError:
        return pa.table({"id": pa.array([], pa.int64())})


def read_files(place, topic=ORDERS):
    found = read_published(place / topic[1:])
    return found if found.num_columns else pa.table({"id": pa.array([], pa.int64())})


def lose_staged(place):
    found = [entry.place for entry in store.listed(place)]
    store.delete(each for each in found if "/." not in str(each) and each.name.startswith("000000000001-"))


class TestDelta(SinkContract):
    @pytest.fixture(params=["append", "upsert"])
    def sink(self, place, request):
        return Delta(DeltaConfig(**config(place, mode=request.param)))

    @pytest.fixture
    def visible(self, place):
        return lambda topic: read_delta(place, topic)

    @pytest.fixture
    def lose_staged(self, place):
        return lambda _: lose_staged(place)


class TestFiles(SinkContract):
    @pytest.fixture(params=["parquet", "jsonl"])
    def sink(self, place, request):
        return FilesSink(FilesSinkConfig(**config(place, format=request.param)))

    @pytest.fixture
    def visible(self, place):
        return lambda topic: read_files(place, topic)

    @pytest.fixture
    def lose_staged(self, place):
        return lambda _: lose_staged(place)


SINKS = {"delta": (Delta, DeltaConfig, read_delta), "files": (FilesSink, FilesSinkConfig, read_files)}


@pytest.fixture(params=list(SINKS))
def kind(request):
    return request.param


@pytest.fixture
def make(kind, place):
    def make(endpoint="", **more):
        sink, options, _ = SINKS[kind]
        made = sink(options(**config(place, endpoint, **more)))
        made.open()
        return made

    return make


@pytest.fixture
def read(kind, place):
    return lambda topic=ORDERS: sorted(SINKS[kind][2](place, topic).column("id").to_pylist())


def until_done(action):
    """As the runtime does: what is worth another try is tried again."""
    for _ in range(10):
        try:
            return action()
        except RetryableError:
            pass
    raise AssertionError("ten tries failed")


STEP = {"delta": r"_delta_log/0*2\.json", "files": r"_penstock/shop/0*2\.json"}
"""The request that commits the second epoch."""

ACTIONS = ["503", "409", "412", "cut", "applied, then 500", "applied, then 503", "applied, then cut"]


class TestSpoiledAnswers:
    @pytest.mark.parametrize("action", ACTIONS)
    def test_the_request_that_commits(self, kind, make, read, spoiler, action):
        sink = make(spoiler.endpoint)
        for number in (1, 2, 3):
            receipts = [stage(sink, epoch(number), rows(10 * number))]
            if number == 2:
                rule = spoiler.spoil("PUT", STEP[kind], action, count=2 if action == "503" else 1)
            until_done(lambda n=number, r=receipts: sink.commit_epoch(epoch(n), r, END))
        assert rule.struck
        assert read() == list(range(10, 40))
        assert make().committed_epoch("shop", ORDERS).number == 3

    @pytest.mark.parametrize(("method", "action"), [("PUT", "applied, then cut"), ("GET", "503"), ("POST", "cut")])
    def test_everything_else(self, make, read, spoiler, method, action):
        """The first requests of one kind in every epoch, whatever they are for."""
        sink = make(spoiler.endpoint)
        for number in (1, 2, 3):
            spoiler.spoil(method, r"lake", action, count=3)
            receipts = until_done(lambda n=number: [stage(sink, epoch(n), rows(10 * n))])
            until_done(lambda n=number, r=receipts: sink.commit_epoch(epoch(n), r, END))
        assert read() == list(range(10, 40))

    def test_a_zombie_whose_commit_comes_late_is_fenced(self, make, read):
        zombie, successor = make(), make()
        for number in (1, 2):
            receipts = [stage(zombie, epoch(number), rows(10 * number))]
            if number == 2:
                other = [stage(successor, epoch(2), rows(20))]
                successor.commit_epoch(epoch(2), other, END)
                third = [stage(successor, epoch(3), rows(30))]
                successor.commit_epoch(epoch(3), third, END)
                with pytest.raises(Fenced):
                    zombie.commit_epoch(epoch(2), receipts, END)
            else:
                zombie.commit_epoch(epoch(1), receipts, END)
        assert read() == list(range(10, 40))


class TestRefusals:
    def test_a_store_that_ignores_conditional_writes_is_refused_before_the_first_epoch(self, make, spoiler):
        spoiler.spoil("PUT", "", "without conditions", count=10_000)
        sink = make(spoiler.endpoint)
        with pytest.raises(ConfigError, match=r"PEN-1040 .*ignores conditional writes"):
            sink.committed_epoch("shop", ORDERS)
        (finding,) = make(spoiler.endpoint).check()
        assert not finding.ok
        assert "conditional" in finding.what

    def test_a_store_that_can_be_used_is_found_fine(self, make, place):
        (finding,) = make().check()
        assert finding.ok
        assert list(store.listed(place)) == []

    def test_a_missing_bucket_is_named(self, kind, s3):
        sink, options, _ = SINKS[kind]
        made = sink(options(path="s3://no-such-bucket/{topic}", storage_options=s3.options()))
        made.open()
        with pytest.raises(FatalError, match=r"PEN-5050 there is no bucket"):
            made.committed_epoch("shop", ORDERS)

    def test_options_of_the_delta_client_that_would_give_up_safety_do_not_exist(self, place):
        for name in ("AWS_S3_ALLOW_UNSAFE_RENAME", "aws_s3_locking_provider", "conditional_put"):
            with pytest.raises(ValueError, match="there is no storage option"):
                DeltaConfig(path=str(place), storage_options={name: "x"})


class TestPlaces:
    def test_a_staged_object_that_is_gone_is_staged_again(self, make, kind):
        sink = make()
        receipts = [stage(sink, epoch(1), rows(0))]
        target = sink.target(ORDERS)
        (file,) = receipts[0].staged[ORDERS].files
        below = target.path / "_staging" if kind == "files" else target.path
        store.delete([below / name for name in store.names(below) if file.path in name])
        with pytest.raises(StagingLost):
            sink.commit_epoch(epoch(1), receipts, END)

    def test_partitions_with_odd_values_and_a_topic_below_another_name(self, make, read):
        sink = make(partition_by=["day"])
        values = ["2026-01-01", "a b", "x=y", "50%", "ü/ö", None]
        batch = rows(0, len(values), day=pa.array(values))
        for topic in ("/lake/orders", "/lake/more/deep"):
            sink.commit_epoch(epoch(1), [stage(sink, epoch(1), batch, topic=topic)], END)
            assert read(topic) == list(range(len(values)))

    def test_the_root_of_a_bucket_is_a_place(self, kind, s3):
        sink, options, reader = SINKS[kind]
        bucket = s3.bucket()
        made = sink(options(path=f"{bucket}/{{topic}}", storage_options=s3.options()))
        made.open()
        made.commit_epoch(epoch(1), [stage(made, epoch(1), rows(0))], END)
        root = store.at(bucket, Options(storage_options=s3.options()).storage_options)
        assert reader(root).num_rows == 10

    def test_an_epoch_that_is_rolled_back_leaves_nothing(self, make, place):
        sink, worker, dead = make(), make(), epoch(1)
        stage(sink, dead, rows(0))
        worker.begin_epoch(dead, Task(1))
        worker.write_batch(ORDERS, rows(10))
        worker.close()
        sink.rollback_epoch(dead, ())
        assert [str(entry.place) for entry in store.listed(place)] == []


def test_another_writer_may_append_and_compact_meanwhile(place):
    sink = Delta(DeltaConfig(**config(place)))
    sink.open()
    where = place / ORDERS[1:]
    for number in (1, 2, 3):
        sink.commit_epoch(epoch(number), [stage(sink, epoch(number), rows(10 * number))], END)
        extra = pa.table({"id": pa.array([1000 + number], pa.int64())})
        write_deltalake(str(where), extra, mode="append", storage_options=client_options(where))
        table(place).optimize.compact()
    assert sorted(read_delta(place).column("id").to_pylist()) == [*range(10, 40), 1001, 1002, 1003]


@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        ("delta", {}, 20),
        ("files", {}, 22),
        ("delta", {"mode": "upsert", "key": ("id",)}, 31),
        ("delta", {"mode": "upsert", "key": ("id",), "apply": "vectors"}, 31),
    ],
)
def test_an_epoch_of_one_table_takes_few_requests(place, spoiler, kind, options, most):
    """The page on object stores gives the figures of the bench."""
    made, config_of, _ = SINKS[kind]
    sink = made(config_of(**config(place, spoiler.endpoint, **options)))
    sink.open()
    for number in (1, 2, 3, 4):
        before = len(spoiler.requests)
        receipts = [stage(sink, epoch(number), rows(10 * number))]
        assert not sink.plan_apply(epoch(number), ORDERS, receipts)
        sink.commit_topic(epoch(number), ORDERS, receipts, END)
        last = len(spoiler.requests) - before
    assert last <= most


def test_the_keys_of_a_whole_table_in_a_store_were_held_in_memory(place, monkeypatch):
    monkeypatch.setattr(index, "STORED_ROWS", 1000)

    def changes(ids):
        return pa.record_batch({"id": ids, "text": pa.array(["x"] * len(ids))})

    for number in (1, 2, 3):
        sink = Delta(DeltaConfig(**config(place, mode="upsert", key=("id",), apply="vectors")))
        sink.open()
        ids = pa.array(range(400_000 if number == 1 else 5), pa.int64())
        receipts = [stage(sink, epoch(number), changes(ids))]
        held = pa.total_allocated_bytes()
        sink.commit_epoch(epoch(number), receipts, END)
        if number > 1:  # makes the index, and then reads it
            assert pa.total_allocated_bytes() - held < 1_000_000
            assert sum(part.rows.num_rows for part in sink.target(ORDERS).known._index.known.values()) >= 200_000
        sink.close()


def test_worn_files_in_a_store_are_written_again_a_part_at_a_time(place, monkeypatch):
    monkeypatch.setattr(marking, "MARKED_ROWS", 0)
    monkeypatch.setattr(apply, "PURGE_HERE_ROWS", 0)
    monkeypatch.setattr(apply, "LATE", 100)
    for name, value in (("PART_ROWS", 30), ("FEWEST_PARTS", 1), ("_PIECE_ROWS", 10), ("_BUFFER_BYTES", 1)):
        monkeypatch.setattr(purge, name, value)
    options = {"mode": "upsert", "key": ("id",), "apply": "vectors", "purge_percent": 20, "optimize_every_epochs": 0}
    sink = Delta(DeltaConfig(**config(place, **options)))
    sink.open()

    def rows_of(ids, turn):
        ids = pa.array(ids, pa.int64())
        return pa.record_batch({"id": ids, "text": pa.array([str(turn)] * len(ids))})

    expected = dict.fromkeys(range(100), "1")
    sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows_of(range(100), 1))], END)
    for number in range(2, 9):
        changed = range(10 * number, 10 * number + 12)
        sink.commit_epoch(epoch(number), [stage(sink, epoch(number), rows_of(changed, number))], END)
        expected |= dict.fromkeys(changed, str(number))
        found = read_delta(place).to_pylist()
        assert len(found) == len(expected)
        assert {row["id"]: row["text"] for row in found} == expected
    done = [each for each in table(place).history() if "purged" in str(each.get("penstock"))]
    assert done
    sink.close()
    assert not list(store.listed(place / "_penstock/.begun"))
