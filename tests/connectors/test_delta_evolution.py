"""Delta tables under schemas that change: by policy, in the middle of a run, read back by other engines."""

from __future__ import annotations

import datetime
import random
from decimal import Decimal

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from sink_protocol import END, ORDERS, commit_in_a_process, epoch, stage

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.errors import ConfigError, SchemaError
from penstock.pipeline.routing import Route, Router
from penstock.runtime.epochs import EpochLoop, State
from penstock.runtime.task import run_task
from penstock.schema import with_key
from penstock.schema.evolution import Policy
from penstock.sink import SinkContext, Task, TopicContext
from penstock.source import SourceBatch
from penstock.testing import MemorySource

KEPT = pa.schema([("id", pa.int64()), ("name", pa.string()), ("doc", pa.string())])


@pytest.fixture
def make(tmp_path):
    def make(**options):
        sink = Delta(DeltaConfig(**{"path": str(tmp_path / "out/{topic}"), **options}))
        sink.open()
        return sink

    return make


@pytest.fixture
def upsert(make):
    return lambda **options: make(mode="upsert", key=["id"], **options)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out/lake/orders"


def commit(sink, number, *batches):
    e = epoch(number)
    sink.commit_epoch(e, [stage(sink, e, *batches)], END)


def changes(*events, schema=KEPT):
    found = [{"_position": f"{place:06d}", **event} for place, event in enumerate(events)]
    return pa.RecordBatch.from_pylist(found, schema=with_key(pa.schema([*schema, *CHANGE_FIELDS]), ["id"]))


def read(target):
    rows = DeltaTable(str(target)).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row["id"])


def by_id(target, column):
    return {row["id"]: row[column] for row in read(target)}


DAY = datetime.date(2026, 1, 2)
NOON = datetime.datetime(2026, 1, 2, 12)

WIDER = [
    (pa.array([1], pa.int8()), pa.array([1 << 14], pa.int16())),
    (pa.array([1], pa.int16()), pa.array([1 << 30], pa.int32())),
    (pa.array([1], pa.int32()), pa.array([1 << 40], pa.int64())),
    (pa.array([1.5], pa.float32()), pa.array([1e300], pa.float64())),
    (pa.array([Decimal("1.5")], pa.decimal128(5, 1)), pa.array([Decimal("123456.75")], pa.decimal128(9, 2))),
    (pa.array([DAY]), pa.array([NOON], pa.timestamp("us"))),
]


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize(("old", "new"), WIDER, ids=[f"{old.type} to {new.type}" for old, new in WIDER])
def test_a_column_is_widened_in_place_and_every_engine_reads_both_kinds_of_files(make, target, old, new, mode):
    sink = make(mode=mode, key=["id"] if mode == "upsert" else [])
    first, second, third = (
        with_key(pa.schema([("id", pa.int64()), ("v", values.type)]), ["id"]) for values in (old, new, old)
    )
    commit(sink, 1, pa.record_batch([pa.array([1]), old], schema=first))
    commit(sink, 2, pa.record_batch([pa.array([2]), new], schema=second))
    commit(sink, 3, pa.record_batch([pa.array([3]), old], schema=third))
    before = datetime.datetime.combine(DAY, datetime.time()) if old.type == pa.date32() else old[0].as_py()
    expected = [(1, before), (2, new[0].as_py()), (3, before)]
    table = DeltaTable(str(target))
    assert pa.schema(table.schema().to_arrow()).field("v").type == new.type
    assert [(row["id"], row["v"]) for row in read(target)] == expected
    assert table.to_pyarrow_dataset().to_table(filter=pa.compute.field("v") == new[0]).num_rows == 1
    found = pa.table(QueryBuilder().register("t", table).execute("select id, v from t order by id"))
    assert [(row["id"], row["v"]) for row in found.to_pylist()] == expected
    files = [uri.removeprefix("file://") for uri in table.file_uris()]
    query = f"select id, v from read_parquet({files}, union_by_name = true) order by id"
    assert duckdb.sql(query).fetchall() == expected


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_struct_gains_fields_and_every_engine_reads_both_kinds_of_files(make, target, mode):
    few, more = pa.struct([("x", pa.int64())]), pa.struct([("x", pa.int64()), ("y", pa.string())])
    sink = make(mode=mode, **({"key": ["id"]} if mode == "upsert" else {}))
    for number, (kind, doc) in enumerate([(few, {"x": 1}), (more, {"x": 2, "y": "new"}), (few, {"x": 3})]):
        schema = pa.schema([("id", pa.int64()), ("doc", kind), ("docs", pa.list_(kind))])
        row = {"id": number, "doc": doc, "docs": [doc]}
        if mode == "upsert":
            commit(sink, number + 1, changes({**row, "_op": "c"}, schema=schema))
        else:
            commit(sink, number + 1, pa.RecordBatch.from_pylist([row], schema=schema))
    expected = [{"x": 1, "y": None}, {"x": 2, "y": "new"}, {"x": 3, "y": None}]
    assert [row["doc"] for row in read(target)] == expected
    assert [row["docs"] for row in read(target)] == [[doc] for doc in expected]
    found = QueryBuilder().register("t", DeltaTable(str(target))).execute("SELECT doc FROM t ORDER BY id").read_all()
    assert pa.table(found)["doc"].to_pylist() == expected
    files = [uri.removeprefix("file://") for uri in DeltaTable(str(target)).file_uris()]
    query = f"SELECT doc FROM read_parquet({files}, union_by_name = true) ORDER BY id"
    assert duckdb.sql(query).fetchall() == [(doc,) for doc in expected]


def test_the_key_itself_can_be_widened(upsert, target):
    sink = upsert()
    narrow = pa.schema([("id", pa.int32()), ("name", pa.string())])
    commit(sink, 1, changes({"_op": "c", "id": 1, "name": "a"}, {"_op": "c", "id": 2, "name": "b"}, schema=narrow))
    wide = [{"_op": "u", "id": 1, "name": "c"}, {"_op": "c", "id": 1 << 40, "name": "d"}, {"_op": "d", "id": 2}]
    commit(sink, 2, changes(*wide, schema=KEPT.remove(2)))
    assert by_id(target, "name") == {1: "c", 1 << 40: "d"}


def test_old_and_new_types_may_meet_in_one_epoch_and_in_two_tasks(upsert, target):
    sink, e = upsert(), epoch(1)
    narrow = pa.schema([("id", pa.int64()), ("n", pa.int32())])
    wide = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    one = changes({"_op": "c", "id": 1, "n": 1}, schema=narrow)
    two = [
        changes({"_op": "c", "id": 2, "n": 1 << 40}, schema=wide),
        changes({"_op": "c", "id": 3, "n": 3}, schema=narrow),
    ]
    sink.commit_epoch(e, [stage(sink, e, one), stage(sink, e, *two, task=1)], END)
    assert by_id(target, "n") == {1: 1, 2: 1 << 40, 3: 3}


@pytest.mark.parametrize(
    ("old", "new"),
    [(pa.int64(), pa.int32()), (pa.int64(), pa.string()), (pa.list_(pa.int32()), pa.list_(pa.int64()))],
    ids=str,
)
def test_what_cannot_be_followed_names_topic_column_types_and_policy(make, target, old, new):
    sink = make()
    commit(sink, 1, pa.record_batch({"id": [1], "v": pa.nulls(1, old)}))
    values = {pa.string(): ["x"], pa.int32(): [1]}.get(new, [[1]])
    batch = pa.record_batch({"id": [2], "v": pa.array(values, new)})
    if new == pa.int32():
        commit(sink, 2, batch)
        return
    commit(sink, 2, pa.record_batch({"id": [2], "v": pa.nulls(1, new)}))  # nothing in it needs a place
    with pytest.raises(SchemaError, match=r"PEN-4001 .*'v' of /lake/orders is (int64|list).*evolve"):
        stage(sink, epoch(2), batch)


def test_a_partition_column_is_never_retyped(make):
    sink = make(partition_by=["part"])
    commit(sink, 1, pa.record_batch({"id": [1], "part": pa.array([1], pa.int32())}))
    with pytest.raises(SchemaError, match="'part'"):
        stage(sink, epoch(2), pa.record_batch({"id": [2], "part": pa.array([1], pa.int64())}))


def test_a_frozen_table_takes_what_it_has_and_nothing_else(make, target):
    sink = make(schema_evolution="freeze")
    commit(sink, 1, pa.record_batch({"id": [1], "n": [1]}))
    commit(sink, 2, pa.record_batch({"id": [2], "n": pa.array([2], pa.int16())}))
    commit(sink, 3, pa.record_batch({"id": [3]}))
    assert by_id(target, "n") == {1: 1, 2: 2, 3: None}
    for bad in ({"id": [4], "note": ["x"]}, {"id": [4], "n": [0.5]}):
        with pytest.raises(SchemaError, match=r"PEN-4001 .*freeze"):
            stage(sink, epoch(4), pa.record_batch(bad))


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_rows_without_a_place_are_left_out_and_counted(make, target, mode):
    sink = make(mode=mode, key=["id"] if mode == "upsert" else [], schema_evolution="discard_row")
    commit(sink, 1, pa.record_batch({"id": [1], "n": pa.array([1], pa.int32())}))
    sink.begin_epoch(epoch(2), Task(0))
    extra = pa.record_batch({"id": [2, 3, 4], "n": [2, 1 << 40, 4], "note": [None, None, "x"]})
    result = sink.write_batch(ORDERS, extra)
    assert (result.records_written, result.records_discarded) == (1, 2)
    sink.commit_epoch(epoch(2), [sink.pre_commit(epoch(2))], END)
    assert read(target) == [{"id": 1, "n": 1}, {"id": 2, "n": 2}]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_values_without_a_place_are_left_out_of_rows_that_stay(make, target, mode):
    sink = make(mode=mode, key=["id"] if mode == "upsert" else [], schema_evolution="discard_value")
    commit(sink, 1, pa.record_batch({"id": [1], "n": pa.array([1], pa.int32())}))
    sink.begin_epoch(epoch(2), Task(0))
    extra = pa.record_batch({"id": [2, 3, 4], "n": [2, 1 << 40, 4], "note": [None, None, "x"]})
    result = sink.write_batch(ORDERS, extra)
    assert (result.records_written, result.records_discarded) == (3, 2)
    sink.commit_epoch(epoch(2), [sink.pre_commit(epoch(2))], END)
    assert by_id(target, "n") == {1: 1, 2: 2, 3: None, 4: 4}


def test_an_epoch_that_loses_all_its_rows_leaves_the_table_as_it_was(make, target):
    sink = make(schema_evolution="discard_row")
    commit(sink, 1, pa.record_batch({"id": [1]}))
    receipt = stage(sink, epoch(2), pa.record_batch({"id": [2], "note": ["x"]}))
    assert list(receipt.topics()) == []
    sink.commit_epoch(epoch(2), [receipt], END)
    assert by_id(target, "id") == {1: 1}


def test_a_route_decides_for_its_topic(make, target):
    sink = make(schema_evolution="freeze")
    routed = SinkContext({ORDERS: TopicContext(policy=Policy.EVOLVE)})
    sink.open(routed)
    assert sink.policy("/other") is Policy.FREEZE
    commit(sink, 1, pa.record_batch({"id": [1]}))
    worker = make(schema_evolution="freeze")
    worker.open(routed)
    worker.begin_epoch(epoch(2), Task(0))
    worker.write_batch(ORDERS, pa.record_batch({"id": [2], "note": ["x"]}))
    sink.commit_epoch(epoch(2), [worker.pre_commit(epoch(2))], END)
    assert by_id(target, "note") == {1: None, 2: "x"}


def test_names_keep_their_case_and_may_be_reserved_words(upsert, target):
    schema = pa.schema([("id", pa.int64()), ("Select", pa.string()), ("ORDER", pa.int32()), ("a.b c", pa.string())])
    sink = upsert()
    commit(sink, 1, changes({"_op": "c", "id": 1, "Select": "x", "ORDER": 1, "a.b c": "y"}, schema=schema))
    wider = schema.set(2, pa.field("ORDER", pa.int64())).append(pa.field("From", pa.string()))
    commit(
        sink,
        2,
        changes({"_op": "u", "id": 1, "Select": "z", "ORDER": 1 << 40, "a.b c": "y", "From": "w"}, schema=wider),
    )
    assert read(target) == [{"id": 1, "Select": "z", "ORDER": 1 << 40, "a.b c": "y", "From": "w"}]


# -- a column that the topic no longer has ---------------------------------------------------------------------------


def test_a_dropped_column_stays_and_is_null_in_rows_that_are_written_later(upsert, target):
    sink = upsert()
    commit(sink, 1, changes(*({"_op": "c", "id": n, "name": "a", "doc": "d"} for n in (1, 2, 3))))
    sink.open(SinkContext({ORDERS: TopicContext(source_schema=KEPT.remove(2))}))
    # The epoch holds changes from before the drop as well, in a task of their own.
    e = epoch(2)
    before = changes({"_op": "u", "id": 3, "name": "b", "doc": "new"})
    after = changes({"_op": "u", "id": 1, "name": "b", "_position": "9"}, schema=KEPT.remove(2))
    sink.commit_epoch(e, [stage(sink, e, before), stage(sink, e, after, task=1)], END)
    assert by_id(target, "doc") == {1: None, 2: "d", 3: "new"}
    commit(sink, 3, changes({"_op": "u", "id": 2, "name": "c"}, schema=KEPT.remove(2)))
    assert by_id(target, "doc") == {1: None, 2: None, 3: "new"}
    assert by_id(target, "name") == {1: "b", 2: "c", 3: "b"}


def test_a_column_that_an_older_change_does_not_know_is_not_taken_for_dropped(upsert, target):
    sink = upsert()
    commit(sink, 1, changes({"_op": "c", "id": 1, "name": "a", "doc": "d"}))
    sink.open(SinkContext({ORDERS: TopicContext(source_schema=KEPT)}))
    commit(sink, 2, changes({"_op": "u", "id": 1, "name": "b"}, schema=KEPT.remove(2)))
    commit(sink, 3, changes({"_op": "u", "id": 1, "name": "c", "_unchanged": ["doc"]}))
    assert read(target) == [{"id": 1, "name": "c", "doc": "d"}]


def test_a_column_that_the_topic_never_had_is_left_alone(upsert, target):
    write_deltalake(str(target), pa.table({"id": [1], "name": ["a"], "note": ["by hand"]}))
    sink = upsert()
    sink.open(SinkContext({ORDERS: TopicContext(source_schema=KEPT.remove(2))}))
    commit(sink, 1, changes({"_op": "u", "id": 1, "name": "b"}, schema=KEPT.remove(2)))
    assert read(target) == [{"id": 1, "name": "b", "note": "by hand"}]


# -- soft deletes --------------------------------------------------------------------------------------------------------


def test_a_deleted_row_is_marked_and_unmarked_when_it_comes_again(upsert, target):
    sink = upsert(soft_delete=True)
    commit(sink, 1, changes(*({"_op": "c", "id": n, "name": "a", "doc": "d"} for n in (1, 2, 3))))
    commit(sink, 2, changes({"_op": "d", "id": 1}, {"_op": "u", "id": 2, "name": "b", "_unchanged": ["doc"]}))
    assert by_id(target, "_deleted") == {1: True, 2: False, 3: False}
    assert by_id(target, "name") == {1: "a", 2: "b", 3: "a"}
    assert by_id(target, "doc") == {1: "d", 2: "d", 3: "d"}
    commit(sink, 3, changes({"_op": "c", "id": 1, "name": "again"}, {"_op": "u", "id": 9, "_old_key": '{"id":3}'}))
    assert by_id(target, "_deleted") == {1: False, 2: False, 3: True, 9: False}


def test_a_truncate_marks_every_row_that_does_not_come_again(upsert, target, monkeypatch):
    sink = upsert(soft_delete=True, target_file_rows=2)
    for number in (1, 2, 3):
        commit(sink, number, changes({"_op": "c", "id": number}, {"_op": "c", "id": 10 * number}))
    commit(sink, 4, changes({"_op": "u", "id": 1}, {"_op": "t"}, {"_op": "c", "id": 30, "name": "new"}))
    assert by_id(target, "_deleted") == {1: True, 2: True, 3: True, 10: True, 20: True, 30: False}
    commit(sink, 5, changes({"_op": "t"}))
    assert set(by_id(target, "_deleted").values()) == {True}


def test_soft_deletes_can_begin_on_a_table_that_exists(upsert, target):
    commit(upsert(), 1, changes({"_op": "c", "id": 1}, {"_op": "c", "id": 2}))
    commit(upsert(soft_delete=True), 2, changes({"_op": "d", "id": 1}))
    assert by_id(target, "_deleted") == {1: True, 2: None}


def test_soft_deletes_need_their_column_and_their_mode(make, upsert):
    own = pa.schema([*KEPT, ("_deleted", pa.string())])
    with pytest.raises(SchemaError, match=r"PEN-4002 .*_deleted"):
        stage(upsert(soft_delete=True), epoch(1), changes({"_op": "c", "id": 1}, schema=own))
    with pytest.raises(ConfigError, match="soft_delete"):
        make(soft_delete=True)


def test_random_changes_mark_what_a_dict_of_them_marks(upsert, target):
    chance, sink = random.Random(5), upsert(soft_delete=True, target_file_rows=4)
    model: dict[int, tuple[str, bool]] = {}
    for number in range(1, 16):
        events = []
        stored = set(model)
        for place in range(chance.randrange(1, 8)):
            id, op = chance.randrange(8), chance.choice("cuudt" if chance.random() < 0.2 else "cuud")
            events.append({"_op": op, "id": id if op != "t" else None, "name": f"{number}.{place}"})
            if op == "t":
                model = {key: (name, True) for key, (name, _) in model.items() if key in stored}
            elif op != "d":
                model[id] = (f"{number}.{place}", False)
            elif id in model:
                model[id] = (model[id][0], True)
        commit(sink, number, changes(*events))
        # A row that came and went within one epoch was never stored, and one that is gone has its stored values.
        found = by_id(target, "_deleted")
        assert {id for id, gone in found.items() if not gone} == {id for id, (_, gone) in model.items() if not gone}
        assert set(found) >= stored
        model = {row["id"]: (row["name"], bool(row["_deleted"])) for row in read(target)}


# -- faults and runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["table.Table.commit", "durable.write_atomic", "table.Table.sync"])
def test_a_process_killed_while_it_widens_is_completed(make, target, hook):
    sink, e = make(), epoch(2)
    commit(sink, 1, pa.record_batch({"id": [1], "n": pa.array([1], pa.int32())}))
    receipts = [stage(sink, e, pa.record_batch({"id": [2], "n": pa.array([1 << 40])}))]
    kill = f"{hook} = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)"
    assert commit_in_a_process(sink, e, receipts, hook=kill) == -9
    assert by_id(target, "id") == {1: 1}
    sink.commit_epoch(e, receipts, END)
    assert by_id(target, "n") == {1: 1, 2: 1 << 40}
    assert sink.committed_epoch("shop", ORDERS).number == 2
    assert not list(target.glob("_penstock/.*.json"))


def test_another_writer_that_is_faster_than_the_widening_makes_it_look_again(make, target, monkeypatch):
    sink = make()
    commit(sink, 1, pa.record_batch({"id": [1], "n": pa.array([1], pa.int32())}))
    receipt = stage(sink, epoch(2), pa.record_batch({"id": [2], "n": pa.array([1 << 40])}))
    table = sink.target(ORDERS).load()
    narrow, widen = table.delta, type(table).widen_columns
    tried = []

    def late(self, columns):
        if not tried:
            tried.append(1)
            other = pa.table({"id": [3], "n": pa.array([3], pa.int32())})
            write_deltalake(str(target), other, mode="append")
        widen(self, columns)

    monkeypatch.setattr(type(table), "widen_columns", late)
    sink.commit_epoch(epoch(2), [receipt], END)
    assert by_id(target, "n") == {1: 1, 2: 1 << 40, 3: 3}
    assert narrow.version() >= 1


class InlineEngine:
    parallelism = 1
    is_local = True

    def check(self, routes):
        pass

    def run(self, job):
        return [run_task(job, job.parts, Task(0))]


class Scripted(MemorySource):
    """Tells of each stream the schema of its next item, as a catalog does."""

    def schema(self):
        return {"orders": self._items[min(self.acked, len(self._items) - 1)].records.schema}


@pytest.mark.parametrize("policy", [Policy.EVOLVE, Policy.DISCARD_ROW, Policy.DISCARD_VALUE])
def test_a_schema_changes_in_the_middle_of_a_run(make, tmp_path, policy):
    sink = make(mode="upsert", key=["id"], schema_evolution="freeze")
    script = [
        pa.record_batch({"id": [1], "n": pa.array([1], pa.int32()), "gone": ["x"]}),
        pa.record_batch({"id": [2, 3], "n": [1 << 40, 3], "gone": ["y", "y"]}),
        pa.record_batch({"id": [1], "n": pa.array([4]), "note": ["new"]}),
    ]
    source = Scripted.of(tmp_path, *(SourceBatch(batch, stream="orders") for batch in script))
    state = State(tmp_path / "state", "shop")
    state.open()
    router = Router((Route(to=ORDERS, schema_evolution=policy),), ("lake",))
    loop = EpochLoop(state, {"memory": source}, {"lake": sink}, router, InlineEngine(), max_epoch_rows=1)
    loop.contexts.open()
    loop.start([("lake", ORDERS)])
    reports = []
    while (report := loop.step()) is not None:
        reports.append(report)
    state.close()
    lost = [sum(each.records_discarded for each in report.rows_out.values()) for report in reports]
    rows = read(tmp_path / "out/lake/orders")
    if policy is Policy.EVOLVE:
        assert lost == [0, 0, 0]
        assert rows == [
            {"id": 1, "n": 4, "gone": None, "note": "new"},
            {"id": 2, "n": 1 << 40, "gone": "y", "note": None},
            {"id": 3, "n": 3, "gone": "y", "note": None},
        ]
    elif policy is Policy.DISCARD_ROW:
        assert lost == [0, 1, 1]
        assert rows == [{"id": 1, "n": 1, "gone": "x"}, {"id": 3, "n": 3, "gone": "y"}]
        assert state.newest.discarded == {"lake": {ORDERS: 1}}
        assert state.newest.rows_out == {}
    else:
        assert lost == [0, 1, 1]
        assert rows == [
            {"id": 1, "n": 4, "gone": None},
            {"id": 2, "n": None, "gone": "y"},
            {"id": 3, "n": 3, "gone": "y"},
        ]
