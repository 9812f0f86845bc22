"""Laws of the commit: once, fenced, durable."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import failpoints
from penstock.errors import Fenced, RetryableError, StagingLost
from penstock.sink import (
    CommittedEpoch,
    Epoch,
    Receipt,
    Task,
)
from penstock.testing.crash.stage import is_hidden
from penstock.testing.processes import PATIENCE_SECS, elsewhere
from penstock.testing.sinks.steps import (
    END,
    OTHER,
    TOPIC,
    Sink,
    Visible,
    commit,
    epoch_of,
    ids_of,
    marker_of,
    needs,
    opened_sink,
    rows,
    stage,
)


class Synced:
    """Records what is fsynced below a directory, and tells what is not."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._before = self._entries()
        self._files: dict[tuple[int, int], tuple[int, int]] = {}
        self._names: dict[tuple[int, int], set[str]] = {}
        for call in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, call, self._recording(getattr(os, call)))

    def check(self) -> None:
        """Every new file is synced as it is now, and its name in the directory that holds it."""
        new = {path for path in self._entries() - self._before if not is_hidden(path, self._root)}
        files = [path for path in new if path.is_file() and path.stat().st_size]
        if not files:
            pytest.skip("the sink writes no local files")
        for path in sorted(files):
            found = path.stat()
            synced = self._files.get((found.st_dev, found.st_ino))
            assert synced == (found.st_size, found.st_mtime_ns), (
                f"{path} was {'never fsynced' if synced is None else 'written to after its fsync'}: "
                "a power cut would leave the promise without the rows"
            )
        for path in sorted(each for file in files for each in (file, *file.parents) if each in new):
            directory = path.parent.stat()
            assert path.name in self._names.get((directory.st_dev, directory.st_ino), ()), (
                f"{path.parent} was not fsynced after {path.name} appeared in it: a power cut would leave no such name"
            )

    def _entries(self) -> set[Path]:
        return set(self._root.rglob("*"))

    def _recording(self, sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def record(descriptor: Any) -> None:
            sync(descriptor)
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            found, path = os.fstat(number), f"/proc/self/fd/{number}"
            key = (found.st_dev, found.st_ino)
            if os.path.isdir(path):
                self._names[key] = set(os.listdir(path))
            else:
                self._files[key] = (found.st_size, found.st_mtime_ns)

        return record


class OnceLaws:
    """An epoch is there once, whatever is repeated, raced or lost."""

    @needs("exactly_once")
    def test_an_epoch_that_is_committed_twice_is_there_once(self, sink: Sink, visible: Visible) -> None:
        for number in (1, 2):
            epoch = epoch_of(number)
            receipts = [stage(sink, epoch, rows(number * 10))]
            with opened_sink(sink) as opened:
                opened.commit_epoch(epoch, receipts, END)
                opened.commit_epoch(epoch, receipts, END)
            commit(sink, epoch, receipts)
        assert ids_of(visible) == list(range(10, 30)), "a commit that ran twice was applied twice"

    @needs("exactly_once")
    def test_another_try_at_a_committed_epoch_adds_nothing(self, sink: Sink, visible: Visible) -> None:
        for _ in range(2):
            epoch = epoch_of(1)
            commit(sink, epoch, [stage(sink, epoch, rows(0))])
        assert ids_of(visible) == list(range(10))

    @needs("exactly_once")
    def test_the_target_records_whose_epoch_it_holds_and_where_it_ended(self, sink: Sink) -> None:
        for number in (1, 2):
            epoch, end = epoch_of(number), {"kit": {"index": number}, "@epoch": {"start": {}, "topics": {"a": ["/b"]}}}
            commit(sink, epoch, [stage(sink, epoch, rows(number * 10))], end)
            with opened_sink(sink) as opened:
                marker = opened.committed_epoch("kit", TOPIC)
                assert isinstance(marker, CommittedEpoch), f"after epoch {number} the target records {marker!r}"
                assert (marker.incarnation, marker.number, marker.end) == ("one", number, end)
                assert opened.committed_epoch("kit", OTHER) is None, "a topic without rows has a marker"
                assert opened.committed_epoch("another pipeline", TOPIC) is None, (
                    "markers of two pipelines are mixed up"
                )

    @needs("exactly_once")
    def test_another_process_sees_the_same_marker(self, sink: Sink) -> None:
        commit(sink, epoch_of(3), [stage(sink, epoch_of(3), rows(0))])
        with opened_sink(sink) as opened:
            here = opened.committed_epoch("kit", TOPIC)
        assert elsewhere(marker_of, sink) == here is not None

    @needs("exactly_once")
    def test_every_topic_of_an_epoch_is_committed(self, sink: Sink, visible: Visible) -> None:
        epoch = epoch_of(1)
        with opened_sink(sink) as opened:
            opened.begin_epoch(epoch, Task(0))
            opened.write_batch(TOPIC, rows(0))
            opened.write_batch(OTHER, rows(50))
            receipt = opened.pre_commit(epoch)
        commit(sink, epoch, [receipt, stage(sink, epoch, rows(60), topic=OTHER, task=1)])
        with opened_sink(sink) as opened:
            markers = [opened.committed_epoch("kit", topic) for topic in (TOPIC, OTHER)]
        assert [marker and marker.number for marker in markers] == [1, 1]
        if inspect.signature(visible).parameters:
            assert ids_of(visible) == list(range(10))
            assert ids_of(visible, OTHER) == list(range(50, 70))

    @needs("exactly_once")
    def test_a_commit_of_an_older_epoch_is_fenced(self, sink: Sink, visible: Visible) -> None:
        late = epoch_of(1)
        receipts = [stage(sink, late, rows(90))]
        with opened_sink(sink) as zombie:
            zombie.committed_epoch("kit", TOPIC)
            for number in (1, 2):
                commit(sink, epoch_of(number), [stage(sink, epoch_of(number), rows(number * 10))])
            _must_be_refused(zombie, late, receipts)
        assert ids_of(visible) == list(range(10, 30))

    @needs("exactly_once")
    def test_an_epoch_of_the_same_number_and_other_ranges_is_fenced(self, sink: Sink, visible: Visible) -> None:
        """Two runs on copies of one state directory reach one number with other ends: the first to commit wins."""
        began = {"kit": {"index": 0}}
        first, second = (epoch_of(1, start=began, end={"kit": {"index": index}}) for index in (END["kit"]["index"], 9))
        late = [stage(sink, second, rows(90))]
        receipts = [stage(sink, first, rows(0))]
        commit(sink, first, receipts)
        with opened_sink(sink) as opened:
            _must_be_refused(opened, second, late)
        commit(sink, first, receipts)  # the same epoch once more
        assert ids_of(visible) == list(range(10))

    @needs("exactly_once")
    def test_another_incarnation_is_fenced_unless_it_adopts_the_marker(self, sink: Sink, visible: Visible) -> None:
        commit(sink, epoch_of(500), [stage(sink, epoch_of(500), rows(0))])
        stranger = epoch_of(1, "two")
        with opened_sink(sink) as opened:
            _must_be_refused(opened, stranger, [stage(sink, stranger, rows(90))])
        heir = epoch_of(1, "two", adopts=frozenset({("one", 500)}))
        commit(sink, heir, [stage(sink, heir, rows(10))])
        zombie = epoch_of(501)
        with opened_sink(sink) as opened:
            marker = opened.committed_epoch("kit", TOPIC)
            assert marker is not None
            assert (marker.incarnation, marker.number) == ("two", 1)
            _must_be_refused(opened, zombie, [stage(sink, zombie, rows(90))])
        assert ids_of(visible) == list(range(20))

    @needs("exactly_once")
    @pytest.mark.parametrize("rival", ["the same epoch", "another incarnation", "a later incarnation"])
    def test_of_two_commits_that_race_one_wins(
        self, sink: Sink, visible: Visible, monkeypatch: pytest.MonkeyPatch, rival: str
    ) -> None:
        """The second one runs from its start to its end at the very point where the first would become visible."""
        first = 0
        epoch = epoch_of(5)
        other = {"the same epoch": epoch_of(5), "another incarnation": epoch_of(5, "two")}.get(rival)
        if other is None:
            commit(sink, epoch_of(4), [stage(sink, epoch_of(4), rows(0))])
            first, other = 10, epoch_of(1, "two", adopts=frozenset({("one", 4)}))
        theirs = [stage(sink, other, rows(first))]
        receipts = [stage(sink, epoch, rows(first))]
        race = _Race(lambda: commit(sink, other, theirs))
        monkeypatch.setattr(failpoints, "hit", race.hit)
        with opened_sink(sink) as opened:
            lost = _refusal(opened, epoch, receipts)
            assert race.run, "the commit never passed failpoints.hit('commit.before')"
            race.join()
            if lost is not None and not isinstance(lost, Fenced):
                lost = _refusal(opened, epoch, receipts)  # it asked to be called again
            won = [each for each, error in (("first", lost), ("second", race.error)) if error is None]
        assert ids_of(visible) == list(range(first + 10)), f"won: {won}"
        assert len(won) == 1 or rival == "the same epoch", f"of two commits that exclude each other these won: {won}"

    @needs("exactly_once", "two_phase_commit")
    def test_staged_data_that_is_gone_is_reported_as_lost(
        self, sink: Sink, visible: Visible, lose_staged: Callable[[Sequence[Receipt]], None] | None
    ) -> None:
        if lose_staged is None:
            pytest.skip("staged data cannot be lost on its own")
        epoch = epoch_of(1)
        receipts = [stage(sink, epoch, rows(0))]
        lose_staged(receipts)
        with opened_sink(sink) as opened:
            with pytest.raises(StagingLost):
                opened.commit_epoch(epoch, receipts, END)
            assert opened.committed_epoch("kit", TOPIC) is None, "an epoch whose rows are gone is marked as committed"
        again = epoch_of(1)
        commit(sink, again, [stage(sink, again, rows(0))])
        assert ids_of(visible) == list(range(10))


class DurableLaws:
    """Durable means fsync: of files, and of the directories that name them."""

    @needs("two_phase_commit")
    def test_what_is_staged_is_synced_before_the_receipt(
        self, sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced = Synced(tmp_path, monkeypatch)
        stage(sink, epoch_of(1), rows(0))
        synced.check()

    @needs("two_phase_commit")
    def test_what_is_committed_is_synced_before_commit_returns(
        self, sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced = Synced(tmp_path, monkeypatch)
        for number in (1, 2):
            epoch = epoch_of(number)
            commit(sink, epoch, [stage(sink, epoch, rows(number * 10))])
            synced.check()


class _Race:
    """Runs a rival once, from start to end, when `commit.before` is first passed; or beside it, if it has to wait."""

    def __init__(self, rival: Callable[[], None]) -> None:
        self.run = False
        self.error: Exception | None = None
        self._rival = rival
        self._thread = threading.Thread(target=self._go, daemon=True)

    def hit(self, name: str) -> None:
        if name == "commit.before" and not self.run:
            self.run = True
            self._thread.start()
            self._thread.join(2)  # a sink that locks its target makes the rival wait for us

    def join(self) -> None:
        self._thread.join(PATIENCE_SECS)
        assert not self._thread.is_alive(), "a rival commit never came back"

    def _go(self) -> None:
        try:
            self._rival()
        except (Fenced, RetryableError) as error:
            self.error = error


def _refusal(sink: Sink, epoch: Epoch, receipts: Sequence[Receipt]) -> Fenced | RetryableError | None:
    try:
        sink.commit_epoch(epoch, receipts, END)
    except (Fenced, RetryableError) as error:
        return error
    return None


def _must_be_refused(sink: Sink, epoch: Epoch, receipts: Sequence[Receipt]) -> None:
    error = _refusal(sink, epoch, receipts)
    if error is not None and not isinstance(error, Fenced):
        error = _refusal(sink, epoch, receipts)  # it asked to be called again
    assert isinstance(error, Fenced), f"{epoch} of {epoch.incarnation} was not fenced: {error}"
