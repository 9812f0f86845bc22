"""What the lakes share, without a lake."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import durable
from penstock.connectors.lake import commit as committing
from penstock.connectors.lake import lists
from penstock.connectors.lake.commit import Commit, LakeTarget
from penstock.connectors.lake.staging import FileSpec, ParquetPart, Stage, StagedFile, StagedTopic, finish
from penstock.connectors.lake.targets import Targets
from penstock.connectors.lake.types import COMMON, LakeTypes
from penstock.errors import ConfigError, Fenced, RetryableError, SchemaError, StagingLost
from penstock.sink import CommittedEpoch, Epoch, Task

TYPES = LakeTypes("Tarn", ((pa.types.is_int32, pa.int64()), (pa.types.is_int64, None), *COMMON))


class TestTargets:
    @pytest.mark.parametrize(("one", "other"), [("/a", "/a/b"), ("/a/b", "/a"), ("/a/b/c", "/a"), ("a", "/a")])
    def test_a_topic_gets_no_directory_that_another_has_or_that_is_above_or_below_it(self, one, other):
        targets = Targets("/lake/{topic}")
        targets.claim(one)
        with pytest.raises(ConfigError, match="meet in"):
            targets.claim(other)

    def test_neighbours_do_not_meet(self):
        targets = Targets("/lake/{topic}")
        assert [targets.claim(topic) for topic in ("/a/b", "/a/c", "/ab", "/a/b")][2] == Path("/lake/ab")

    def test_many_topics_are_claimed_by_threads_at_the_same_time(self):
        targets = Targets("/lake/{topic}")
        with ThreadPoolExecutor(8) as threads:
            found = set(threads.map(targets.claim, [f"/t/{number % 500}" for number in range(4000)]))
        assert len(found) == 500


class TestLists:
    def test_a_sweep_of_one_topic_leaves_the_lists_of_others_alone_even_if_they_are_still_empty(self, tmp_path):
        epoch = Epoch("shop", "one", 1)
        for topic in ("/a", "/b"):
            begun = lists.begin(tmp_path, epoch, f"{epoch.stem()}-00000", topic)
            file = tmp_path / f"{epoch.stem()}{topic[1:]}"
            begun.note(file)
            file.touch()
        unwritten = (
            tmp_path / "_penstock/.begun/shop" / lists.begin(tmp_path, epoch, f"{epoch.stem()}-00001", "/b").name
        )
        unwritten.write_text("")  # its process has opened it, and not written yet
        lists.sweep(tmp_path, epoch, lambda *_: False, only="/a")
        assert [path.name for path in tmp_path.glob("0*")] == [f"{epoch.stem()}b"]
        assert unwritten.exists()
        lists.sweep(tmp_path, epoch, lambda *_: False, only="/b")
        assert not list(tmp_path.glob("0*"))
        assert not unwritten.parent.exists()

    def test_lists_are_begun_while_others_are_dropped(self, tmp_path):
        epoch = Epoch("shop", "one", 1)

        def begin_and_drop(number: int) -> None:
            for _ in range(50):
                begun = lists.begin(tmp_path, epoch, f"{epoch.stem()}-{number}", f"/t{number}")
                lists.sweep(tmp_path, epoch, lambda *_: False, only=f"/t{number}")
                lists.drop(tmp_path, "shop", [begun.name])

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(begin_and_drop, range(8)))
        assert not list((tmp_path / "_penstock/.begun/shop").iterdir())


def test_files_of_several_stages_are_durable_and_each_directory_is_synced_once(tmp_path, monkeypatch):
    targets = Targets(str(tmp_path / "lake/{topic}"))
    spec = FileSpec(begin=lambda path, schema: ParquetPart(path, schema, "none"))
    stages = [Stage(Epoch("shop", "one", 1), Task(number), targets, spec) for number in range(3)]
    for stage in stages:
        stage.write("/orders", pa.record_batch({"id": [1]}))
        stage.end("/orders")
        stage.write("/orders", pa.record_batch({"id": [2]}))
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), synced.append(os.readlink(f"/proc/self/fd/{fd}"))))
    staged = finish(stages)
    files = [file.path for each in staged for file in each["/orders"].files]
    orders = tmp_path / "lake/orders"
    assert len(files) == 6
    assert {*(str(orders / file) for file in files), str(orders), str(tmp_path / "lake")} <= set(synced)
    assert len(synced) == len(set(synced))


def test_fsync_syncs_a_directory_after_the_files_in_it_and_only_once(tmp_path, monkeypatch):
    inner = tmp_path / "a"
    inner.mkdir()
    for name in ("x", "y"):
        (inner / name).touch()
    synced = []
    monkeypatch.setattr(durable, "_sync", lambda path: synced.append(os.path.relpath(path, tmp_path)))
    durable.fsync(inner, inner / "x", inner / "y", inner / "x")
    assert synced == ["a/x", "a/y", "a", "."]


class TestTypes:
    def test_types_are_stored_without_loss_at_any_depth(self):
        kind = pa.struct([("a", pa.list_(pa.int32())), ("b", pa.map_(pa.large_string(), pa.timestamp("ms", "CET")))])
        stored = TYPES.type("/t", "column", kind)
        assert stored.field("a").type.value_type == pa.int64()
        assert stored.field("b").type.item_type == pa.timestamp("us", "UTC")

    def test_a_type_without_a_place_is_named_with_its_path(self):
        with pytest.raises(SchemaError, match=r"'column.a' of /t is duration\[s\], which Tarn cannot hold"):
            TYPES.type("/t", "column", pa.struct([("a", pa.list_(pa.duration("s")))]))

    def test_a_batch_is_cast_and_loses_its_null_columns_and_those_that_are_left_out(self):
        batch = pa.record_batch({"a": pa.array([1], pa.int32()), "b": pa.nulls(1), "c": ["x"], "d": ["y"]})
        stored = TYPES.batch("/t", batch, without=("d",))
        assert stored.schema == pa.schema([("a", pa.int64()), ("c", pa.string())])
        assert stored.to_pylist() == [{"a": 1, "c": "x"}]


class Conflict(Exception):
    pass


class Versions(LakeTarget[dict]):
    """A lake in memory: what `load` gives is scripted."""

    conflicts = (Conflict,)

    def __init__(self, root: Path, *scripted: object) -> None:
        super().__init__("/t", root / "t", root)
        self.scripted = list(scripted)
        self.calls: list[str] = []

    name = "the lake"

    def load(self):
        self.calls.append("load")
        return self.scripted.pop(0) if len(self.scripted) > 1 else self.scripted[0]

    def marker(self, loaded, pipeline):
        return loaded.get("marker")

    def settle(self, loaded, epoch):
        self.calls.append("settle")

    def attempt(self, commit, loaded):
        self.calls.append("attempt")
        if loaded is not None and "fails" in loaded:
            raise Conflict("somebody was first")
        return loaded is not None

    def tidy(self, commit):
        self.calls.append("tidy")

    def forget(self):
        self.calls.append("forget")

    def schema(self):
        return None

    def is_seeded(self):
        return False

    def mark_seeded(self, now):
        pass

    def live_files(self, pipeline):
        return set()


EPOCH = Epoch("shop", "one", 2)
OLD, DONE = (CommittedEpoch(incarnation="one", number=number) for number in (1, 2))


def staged(*files: StagedFile) -> Commit:
    return Commit(EPOCH, [StagedTopic(listed="x/y", columns="", files=list(files))])


class TestCommitLoop:
    def test_a_target_is_created_and_its_marker_is_read_again_before_the_commit(self, tmp_path):
        target = Versions(tmp_path, None, {"marker": OLD})
        target.commit(staged())
        assert target.calls == ["load", "attempt", "load", "attempt", "tidy"]

    def test_a_conflict_is_looked_at_again_and_found_done(self, tmp_path):
        target = Versions(tmp_path, {"fails": 1}, {"marker": DONE})
        target.commit(staged())
        assert target.calls == ["load", "attempt", "forget", "load", "settle", "tidy"]

    def test_a_target_that_never_yields_is_tried_again_later(self, tmp_path, monkeypatch):
        monkeypatch.setattr(committing, "TRIES", 3)
        target = Versions(tmp_path, {"fails": 1})
        with pytest.raises(RetryableError, match=r"PEN-2005 the lake refused 3 commits .*somebody was first"):
            target.commit(staged())
        assert target.calls.count("attempt") == 3

    def test_files_that_a_twin_has_committed_and_moved_are_not_lost(self, tmp_path):
        gone = staged(StagedFile(path="gone", rows=1, bytes=1))
        target = Versions(tmp_path, {"marker": OLD}, {"marker": DONE})
        target.commit(gone)
        assert "attempt" not in target.calls
        with pytest.raises(StagingLost, match="gone"):
            Versions(tmp_path, {"marker": OLD}).commit(gone)

    def test_another_run_is_fenced_before_anything_is_attempted(self, tmp_path):
        target = Versions(tmp_path, {"marker": CommittedEpoch(incarnation="two", number=1)})
        with pytest.raises(Fenced):
            target.commit(staged())
        assert target.calls == ["load"]

    def test_a_target_that_was_dropped_since_the_last_commit_stops_the_run(self, tmp_path):
        target = Versions(tmp_path, {"marker": OLD}, None)
        target.commit(staged())
        with pytest.raises(Exception, match="PEN-5010 the lake was dropped or replaced"):
            target.commit(Commit(Epoch("shop", "one", 3), []))


def test_columns_whose_values_repeat_get_a_dictionary_however_far_apart_they_are(tmp_path):
    rows = pa.table({"id": range(1 << 17), "city": [f"city {each % 10_000}" for each in range(1 << 17)]})
    part = ParquetPart(tmp_path / "a.parquet", rows.schema, "none")
    part.write(rows)
    part.close()
    group = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
    assert {group.column(n).path_in_schema: group.column(n).has_dictionary_page for n in range(2)} == {
        "id": False,
        "city": True,
    }
