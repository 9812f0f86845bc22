"""Branches of Iceberg tables as targets: what one branch gets, no other shows."""

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from sink_protocol import END, ORDERS, epoch, stage

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.errors import ConfigError, SchemaError
from penstock.schema import with_key

ROWS = pa.schema([("id", pa.int64()), ("name", pa.string())])


@pytest.fixture
def make(tmp_path):
    def make(branch, **options):
        sink = Iceberg(IcebergConfig(path=f"{tmp_path}/{{topic}}", branch=branch, keep_snapshots=2, **options))
        sink.open()
        return sink

    return make


@pytest.fixture
def seen(tmp_path):
    """The rows that another program finds on a branch."""

    def seen(branch):
        table = SqlCatalog("default", uri=f"sqlite:///{tmp_path}/catalog.db").load_table("lake.orders")
        rows = table.scan(snapshot_id=table.snapshot_by_name(branch).snapshot_id).to_arrow().to_pylist()
        return sorted((row["id"], row["name"]) for row in rows)

    return seen


def append(sink, number, *rows):
    batch = pa.RecordBatch.from_pylist([{"id": key, "name": name} for key, name in rows], schema=ROWS)
    sink.commit_epoch(epoch(number), [stage(sink, epoch(number), batch)], END)


def upsert(sink, number, *changes):
    rows = [
        {"_op": "u" if name else "d", "_position": f"{number}-{place}", "id": key, "name": name}
        for place, (key, name) in enumerate(changes)
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=with_key(pa.schema([*ROWS, *CHANGE_FIELDS]), ["id"]))
    sink.commit_epoch(epoch(number), [stage(sink, epoch(number), batch)], END)


def test_a_branch_begins_at_main_and_both_go_on_by_themselves(make, seen):
    append(make("main"), 1, (1, "main"))
    audit = make("audit")
    assert audit.committed_epoch(epoch(1).pipeline, ORDERS) is None  # the marker of main is not its own
    for number in range(1, 6):
        append(audit, number, (10 + number, "audit"))
    main = make("main")
    append(main, 2, (2, "main"))
    assert seen("main") == [(1, "main"), (2, "main")]
    assert seen("audit") == [(1, "main"), *((10 + number, "audit") for number in range(1, 6))]
    assert audit.committed_epoch(epoch(1).pipeline, ORDERS).number == 5
    assert main.committed_epoch(epoch(1).pipeline, ORDERS).number == 2
    assert audit.read_topic(ORDERS).num_rows == 6


def test_in_a_table_that_is_new_only_the_branch_shows_rows(make, seen):
    append(make("audit"), 1, (1, "audit"))
    append(make("audit"), 2, (2, "audit"))
    assert seen("audit") == [(1, "audit"), (2, "audit")]
    assert seen("main") == []


def test_upserts_of_a_branch_delete_no_row_of_main(make, seen):
    options = {"mode": "upsert", "key": ["id"]}
    upsert(make("main", **options), 1, *((key, "old") for key in range(20)))
    audit = make("audit", **options)
    upsert(audit, 1, (3, "new"), (4, None))
    upsert(audit, 2, (3, "newer"), (20, "more"))
    assert seen("main") == [(key, "old") for key in range(20)]
    kept = [(key, "old") for key in range(20) if key not in (3, 4)]
    assert seen("audit") == sorted([*kept, (3, "newer"), (20, "more")])


def test_an_epoch_that_is_committed_again_adds_nothing(make, seen):
    append(make("main"), 1, (1, "main"))
    audit = make("audit")
    receipts = [stage(audit, epoch(1), pa.RecordBatch.from_pylist([{"id": 2, "name": "audit"}], schema=ROWS))]
    audit.commit_epoch(epoch(1), receipts, END)
    make("audit").commit_epoch(epoch(1), receipts, END)
    assert seen("audit") == [(1, "main"), (2, "audit")]


def test_a_commit_from_an_older_version_of_the_branch_is_refused(make):
    append(make("main"), 1, (1, "main"))
    audit = make("audit")
    append(audit, 1, (2, "audit"))
    stale = make("audit").target(ORDERS).load()
    append(audit, 2, (3, "audit"))
    with pytest.raises(CommitFailedException):
        stale.commit(epoch(2), END, stale.columns(), [], 2)


def test_a_tag_is_no_target(make):
    append(make("main"), 1, (1, "main"))
    table = make("main").target(ORDERS).load().iceberg
    table.manage_snapshots().create_tag(table.current_snapshot().snapshot_id, "release").commit()
    with pytest.raises(ConfigError, match="PEN-1003 'release' is a tag"):
        append(make("release"), 1, (2, "x"))


def test_a_column_that_would_be_another_one_is_refused_on_a_branch(make, seen):
    append(make("main"), 1, (1, "main"))
    audit = make("audit")
    batch = pa.RecordBatch.from_pylist(
        [{"id": 2.5, "name": "x"}], schema=pa.schema([("id", pa.float64()), ("name", pa.string())])
    )
    with pytest.raises(SchemaError, match="a branch cannot follow"):
        audit.commit_epoch(epoch(1), [stage(audit, epoch(1), batch)], END)
    assert seen("main") == [(1, "main")]
