"""Requests for streams: in order, whole, and gone only when they are forgotten."""

from __future__ import annotations

import threading

from penstock import commands


def test_requests_come_in_the_order_in_which_they_were_made_also_when_the_clock_is_set_back(tmp_path, monkeypatch):
    commands.ask(tmp_path, "pause", ["a"])
    monkeypatch.setattr(commands.time, "time_ns", lambda: 5)
    commands.ask(tmp_path, "resume", ["a", "b"])
    commands.ask(tmp_path, "skip", ["c"])
    assert [(each.verb, each.streams) for each in commands.asked(tmp_path)] == [
        ("pause", ("a",)),
        ("resume", ("a", "b")),
        ("skip", ("c",)),
    ]


def test_a_request_that_was_forgotten_is_gone_and_forgetting_it_again_does_nothing(tmp_path):
    first, second = (commands.ask(tmp_path, "pause", [name]) for name in "ab")
    for _ in range(2):
        commands.forget(tmp_path, [first.name])
        assert commands.asked(tmp_path) == [second]


def test_nothing_is_asked_where_nobody_asked(tmp_path):
    assert commands.asked(None) == commands.asked(tmp_path) == []
    commands.forget(tmp_path, ["00000000000000000001-abcdef01"])


def test_requests_that_are_made_at_once_are_all_there(tmp_path):
    threads = [threading.Thread(target=commands.ask, args=(tmp_path, "pause", [str(n)])) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.streams for each in commands.asked(tmp_path)) == [(str(n),) for n in range(8)]
