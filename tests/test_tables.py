"""What people ask of tables, and what the runtime reads off their states."""

from __future__ import annotations

import threading

from penstock import tables
from penstock.errors import SchemaError
from penstock.tables import CopyAgain, Refused, Requests, TableState


class TestRequests:
    def test_they_wait_in_the_order_in_which_they_were_made_whatever_the_clock_says(self, tmp_path, monkeypatch):
        requests = Requests(tmp_path)
        requests.add("pause", ["a"])
        monkeypatch.setattr(tables.time, "time_ns", lambda: 5)
        requests.add("resume", ["a", "b"])
        requests.add("skip", ["c"])
        assert [(each.verb, each.streams) for each in requests.pending()] == [
            ("pause", ("a",)),
            ("resume", ("a", "b")),
            ("skip", ("c",)),
        ]

    def test_one_that_is_done_is_gone_and_the_others_stay(self, tmp_path):
        requests = Requests(tmp_path)
        first, second = (requests.add("pause", [name]) for name in "ab")
        for _ in range(2):
            requests.done([first.name])
            assert requests.pending() == [second]

    def test_without_a_directory_there_are_none(self, tmp_path):
        assert Requests(None).pending() == Requests(tmp_path).pending() == []
        Requests(tmp_path).done(["00000000000000000001-abcdef01"])
        Requests(None).done(["00000000000000000001-abcdef01"])

    def test_many_may_ask_at_once(self, tmp_path):
        requests = Requests(tmp_path)
        threads = [threading.Thread(target=requests.add, args=("pause", [str(n)])) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(each.streams for each in requests.pending()) == [(str(n),) for n in range(8)]


class TestStates:
    def test_a_copy_that_begins_after_the_first_one_refills_its_target(self):
        before = {name: TableState("active", copy=1) for name in ("again", "same", "over", "paused")}
        after = {
            "again": TableState("seeding", copy=2),
            "same": TableState("active", copy=1),
            "over": TableState("seeding", copy=2, refreshes=True),
            "paused": TableState("paused", copy=2),
            "new": TableState("seeding", copy=1),
            "held": TableState("seeding", copy=2),
        }
        assert tables.refilled(before, after) == {"again", "held"}

    def test_what_a_range_copies_shows_in_the_progress_of_a_copy(self):
        before = {"a": TableState("seeding", copy=1, rows=5), "b": TableState("active", copy=1, complete=True, rows=9)}
        after = {
            "a": TableState("seeding", copy=1, rows=8),
            "b": before["b"],
            "c": TableState("failed", copy=1, rows=1),
        }
        assert tables.copied(before, after) == {"a"}
        assert tables.seeded(after) == {"b"}


class TestNotes:
    def test_a_refusal_is_read_back_as_it_was_written(self):
        refused = Refused.because("public.orders", SchemaError("no place for it", hint="x" * 1000))
        assert Refused.read(refused.note()) == refused
        assert (refused.code, len(refused.hint)) == ("PEN-4000", tables.MOST_TEXT)
        assert CopyAgain.read(refused.note()) is None

    def test_tables_to_copy_again_are_read_back_as_they_were_written(self):
        again = CopyAgain(streams=("a", "b"))
        assert CopyAgain.read(again.note()) == again
        assert Refused.read(again.note()) is None
