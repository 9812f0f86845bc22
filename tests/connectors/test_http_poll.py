"""The http_poll source: pages of every kind, newer records, full refreshes; each against a server that moves meanwhile."""

from __future__ import annotations

import contextlib
import email.utils
import errno
import gzip
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from pydantic import ValidationError

from connectors.receiver import Asked, Receiver, receiving
from connectors.webhooks import journaled
from penstock.connectors.http_client import client, pause_of
from penstock.connectors.http_poll import HttpPoll, HttpPollConfig
from penstock.connectors.http_poll import known as known_module
from penstock.connectors.http_poll.known import MOST_LINES, Known
from penstock.durable import disk_errors
from penstock.errors import NOT_READY, ConfigError, FatalError, RetryableError
from penstock.pipeline import Pipeline
from penstock.pipeline.options import Processing
from penstock.runtime import supervisor
from penstock.runtime.ingest import Ingest
from penstock.source import SourceContext
from penstock.testing import ForkEngine, SourceContract
from penstock.testing.processes import wait_until


@pytest.fixture(autouse=True)
def _direct(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@dataclass
class Shop:
    """A REST API: orders by `updated` and `id`, in pages of three, by every way of paging."""

    orders: list[dict[str, Any]] = field(default_factory=list)
    size: int = 3

    def put(self, id: int, updated: int, **more: Any) -> None:
        self.orders = [each for each in self.orders if each["id"] != id] + [{"id": id, "updated": updated, **more}]

    def answer(self, asked: Asked) -> Any:
        query = asked.query
        found = sorted(
            (each for each in self.orders if each["updated"] >= int(query.get("since", 0))),
            key=lambda each: (each["updated"], each["id"]),
        )
        if asked.path == "/page":
            start = (int(query["page"]) - 1) * self.size
        elif asked.path == "/offset":
            start = int(query["offset"])
        else:
            start = int(query.get("cursor", 0))
        part, end = found[start : start + self.size], start + self.size
        body: Any = {"data": {"items": part}}
        headers = {}
        if end < len(found):
            rest = f"&since={query['since']}" if "since" in query else ""
            body["next_cursor"] = str(end)
            body["next"] = f"/next?cursor={end}{rest}"
            headers["Link"] = f'</first>; rel="first", <link?cursor={end}{rest}>; rel="next"'
        return 200, body, headers


PAGINATIONS: dict[str, dict[str, Any]] = {
    "cursor": {"type": "cursor"},
    "page": {"type": "page", "size": 3},
    "offset": {"type": "offset", "size": 3},
    "link": {"type": "link"},
    "next": {"type": "next_url"},
}
SECRET = {"env": "API_SECRET"}
NEWER = {"incremental": {"path": "updated"}, "key": ["id"], "records": "data.items"}


def make(receiver: Receiver, kind: str = "cursor", **options: Any) -> HttpPoll:
    plain = {"url": f"{receiver.url}/{kind}", "stream": "orders", "interval_secs": 0.001}
    return HttpPoll(HttpPollConfig.model_validate({**plain, "pagination": PAGINATIONS[kind], **NEWER, **options}))


@pytest.fixture
def shop() -> Shop:
    made = Shop()
    for id in range(8):
        made.put(id, id // 2)
    return made


@pytest.fixture
def api(shop: Shop) -> Iterator[Receiver]:
    with receiving(shop.answer) as receiver:
        yield receiver


class TestContract(SourceContract):
    @pytest.fixture(params=PAGINATIONS)
    def source(self, api: Receiver, request: pytest.FixtureRequest) -> HttpPoll:
        return make(api, request.param)

    @pytest.fixture
    def expected(self, shop: Shop) -> Any:
        return [json.dumps(each, separators=(",", ":")).encode() for each in shop.orders]

    @pytest.fixture
    def wrong(self) -> HttpPoll:
        return HttpPoll(HttpPollConfig(url="ftp://x", stream="orders"))


def polled(source: HttpPoll, rounds: int = 1) -> list[Any]:
    """The payloads of so many rounds of an open source."""
    found: list[Any] = []
    for _ in range(rounds):
        while (batch := source.poll_batch(1000)) is not None:
            found += [json.loads(each.record.payload or b"null") for each in batch]
            source.commit(source.checkpoint().offsets)
            if source._place.page is None:
                break
        source._due = 0.0
    return found


@pytest.fixture
def opened() -> Iterator[Callable[[HttpPoll], HttpPoll]]:
    made = []

    def start(source: HttpPoll, context: SourceContext = SourceContext()) -> HttpPoll:
        source.open(context)
        made.append(source)
        return source

    yield start
    for source in made:
        source.close()


# -- newer records -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PAGINATIONS)
def test_a_round_asks_for_newer_records_only_and_ties_are_broken_by_the_key(api, shop, opened, kind):
    source = opened(make(api, kind))
    assert sorted(each["id"] for each in polled(source)) == list(range(8))
    assert polled(source, 3) == []
    assert api.asked[-1].query["since"] == "3"
    shop.put(99, 3)  # as new as the newest, and came later
    shop.put(0, 4)  # an old one that has changed
    assert sorted((each["id"], each["updated"]) for each in polled(source)) == [(0, 4), (99, 3)]
    assert polled(source, 2) == []


def test_a_record_that_moves_to_the_next_page_meanwhile_comes_once(api, shop, opened):
    source = opened(make(api, "offset"))
    first = source.poll_batch(10)
    shop.orders.insert(0, {"id": -1, "updated": -1})
    shop.size = 3
    rest = polled(source)
    ids = [json.loads(each.record.payload)["id"] for each in first] + [each["id"] for each in rest]
    assert len(ids) == len(set(ids))
    assert set(range(8)) <= set(ids)


def test_older_records_of_a_server_that_knows_no_parameter_are_passed_over(shop, opened):
    with receiving(lambda asked: (200, shop.orders)) as api:
        source = opened(make(api, "cursor", records="", pagination=None))
        assert len(polled(source)) == 8
        shop.put(3, 1, note="changed, and not newer")
        shop.put(4, 9)
        assert [each["id"] for each in polled(source)] == [4]


def test_the_first_round_may_begin_at_a_value(api, opened):
    source = opened(make(api, incremental={"path": "updated", "start": "3"}))
    assert [each["id"] for each in polled(source)] == [6, 7]


@pytest.mark.parametrize(
    ("old", "same", "new"),
    [
        ("2026-01-01T12:00:00Z", "2026-01-01T12:00:00.000Z", "2026-01-01T12:00:00.5Z"),
        ("2026-01-01T12:00:00.45Z", "2026-01-01 12:00:00,450+00:00", "2026-01-01T12:00:00.5Z"),
        ("2026-01-01T12:00:00+02:00", "2026-01-01T10:00:00Z", "2026-01-01T11:00:00Z"),
        ("2026-01-01T12:00:00.123456788Z", "2026-01-01T12:00:00.1234567880Z", "2026-01-01T12:00:00.123456789Z"),
        ("999", "0999", "1000"),
        ("9" * 5000, "9" * 5000, "9" * 5000 + "0"),
        ("9.75", "9.750", "10.5"),
        ("99.5", "99.50", "100"),
        ("-10", "-10.0", "-9.5"),
        ("2026-13-01T00:00:00Z", "2026-13-01T00:00:00Z", "2026-13-02T00:00:00Z"),
        (9, 9.0, 10),
    ],
    ids=[
        "fraction",
        "digits",
        "zone",
        "nanoseconds",
        "number",
        "long",
        "decimal",
        "whole",
        "negative",
        "no time",
        "plain",
    ],
)
def test_the_newer_of_two_values_is_told_by_what_they_mean(opened, old, same, new):
    """The server gives all each time: what counts as older is passed over, and what was seen does not come again."""
    records = [{"id": 1, "updated": old}]
    with receiving(lambda asked: (200, records)) as api:
        source = opened(make(api, records="", pagination=None))
        assert [each["id"] for each in polled(source)] == [1]
        records[:] = [{"id": 1, "updated": same}, {"id": 2, "updated": same}]
        assert [each["id"] for each in polled(source)] == [2]
        assert polled(source) == []
        records.append({"id": 3, "updated": new})
        assert [each["id"] for each in polled(source)] == [3]
        assert polled(source) == [], "the first two are older now"


def test_a_list_of_plain_numbers_is_a_list_of_records(opened):
    numbers = [1, 2.5, 10**20]
    with receiving(lambda asked: (200, numbers)) as api:
        source = opened(make(api, records="", pagination=None, incremental=None, key=()))
        assert [each.record.payload for each in source.poll_batch(10)] == [b"1", b"2.5", b"100000000000000000000"]
        source._due = 0.0
        numbers.append(7)
        assert [each.record.payload for each in source.poll_batch(10)] == [b"7"]


@pytest.mark.parametrize("kind", PAGINATIONS)
def test_parameters_that_the_address_has_itself_are_asked_for_with_the_others(api, opened, kind):
    url = f"{api.url}/{kind}?status=open&tag=a&tag=b%20c"
    source = opened(make(api, kind, url=url, params={"shop": "7"}))
    assert len(polled(source, 2)) == 8
    own = [asked for asked in api.asked if not asked.query.get("cursor") or kind == "cursor"]
    assert len(own) > 1
    for asked in own:
        query = parse_qs(urlsplit(asked.target).query)
        assert {name: query.get(name) for name in ("status", "tag", "shop")} == {
            "status": ["open"],
            "tag": ["a", "b c"],
            "shop": ["7"],
        }


# -- full refresh --------------------------------------------------------------------------------------------------------

FULL = {"incremental": None, "deletes": True}


def test_a_full_refresh_sends_what_is_new_changed_or_gone(api, shop, opened, tmp_path):
    source = opened(make(api, **FULL), SourceContext(state_dir=tmp_path))
    assert {(each["op"], each["after"]["id"]) for each in polled(source)} == {("c", id) for id in range(8)}
    assert polled(source, 2) == []
    shop.put(1, 0, note="changed")
    shop.put(50, 0)
    shop.orders = [each for each in shop.orders if each["id"] != 7]
    found = {(each["op"], (each["after"] or each["before"])["id"]) for each in polled(source)}
    assert found == {("u", 1), ("c", 50), ("d", 7)}
    assert polled(source, 2) == []


def test_an_empty_answer_is_not_taken_for_the_end_of_all_records(api, shop, opened):
    source = opened(make(api, **FULL))
    assert len(polled(source)) == 8
    kept, shop.orders = shop.orders, []
    with pytest.raises(RetryableError, match="allow_empty"):
        polled(source)
    shop.orders = kept
    assert polled(source) == []
    source = opened(make(api, **FULL, allow_empty=True))
    assert len(polled(source)) == 8
    shop.orders = []
    assert {each["op"] for each in polled(source)} == {"d"}


def test_without_a_key_every_content_comes_once(shop, opened):
    with receiving(lambda asked: (200, [{"a": 1}, {"a": 2}, {"a": 1}])) as api:
        source = opened(make(api, pagination=None, records="", key=[], incremental=None))
        assert polled(source, 3) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("durable", [0, 1, 2, 3])
def test_what_was_sent_is_known_after_a_restart_as_far_as_it_is_in_the_journal(api, shop, opened, tmp_path, durable):
    context = SourceContext(state_dir=tmp_path)
    source = opened(make(api, **FULL), context)
    checkpoints = [None]
    sent: list[list[Any]] = []
    for _ in range(3):
        batch = source.poll_batch(10)
        sent.append([json.loads(each.record.payload) for each in batch])
        checkpoints.append(source.checkpoint())
    source.close()
    shop.put(0, 0, note="changed while nobody looked")
    shop.orders = [each for each in shop.orders if each["id"] != 1]
    again = opened(make(api, **FULL), context)
    if checkpoints[durable] is not None:
        again.restore(checkpoints[durable])
    target: dict[int, Any] = {}
    for each in [*(change for batch in sent[:durable] for change in batch), *polled(again)]:
        id = (each["after"] or each["before"])["id"]
        if each["op"] == "d":
            assert target.pop(id, None) is not None, "a delete of what was never sent"
        else:
            assert target.get(id) != each["after"], "sent twice"
            target[id] = each["after"]
    assert target == {each["id"]: each for each in shop.orders}


def test_the_log_of_what_was_sent_is_written_together_and_its_torn_end_left_out(tmp_path):
    path = tmp_path / "own" / "records.jsonl"
    known = Known(path)
    known.clear()
    for batch in range(1, MOST_LINES + 3):
        known.add(batch, {f"k{batch % 7}": str(batch)}, ["k0"] if batch % 7 == 1 else [])
        known.settle(batch)
    assert len(path.read_bytes().splitlines()) < 10
    with open(path, "ab") as file:
        file.write(b'{"batch": 9999, "set": {"torn')
    another = Known(path)
    another.load(MOST_LINES + 2)
    assert another.records == known.records
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(FatalError, match="PEN-5011"):
        Known(path).load(1)


def test_a_full_disk_takes_nothing_of_a_batch_which_may_be_tried_again(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    known = Known(path)
    known.clear()
    known.add(1, {"a": "1"}, [])
    before = path.read_bytes()
    with monkeypatch.context() as full:
        full.setattr(known_module, "open", lambda *args, **options: FullDisk(path, "ab"), raising=False)
        with pytest.raises(RetryableError, match="room on the disk") as refused:
            known.add(2, {"b": "2"}, ["a"])
    assert refused.value.code == NOT_READY, "it is waited for, however long that takes"
    assert (path.read_bytes(), known.records) == (before, {"a": "1"})
    known.add(2, {"b": "2"}, ["a"])
    again = Known(path)
    again.load(2)
    assert again.records == {"b": "2"}


class FullDisk(FileIO):
    """Has room for a few bytes more."""

    room = 5

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken, self.room = super().write(data[: self.room]), 0
        return taken


def test_a_log_that_a_full_disk_cannot_write_together_stays_as_it_is(tmp_path, monkeypatch):
    known = Known(tmp_path / "records.jsonl")
    known.clear()
    for batch in range(1, MOST_LINES + 2):
        known.add(batch, {"a": str(batch)}, [])

    def refuse(path, data, **options):
        with disk_errors(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(known_module, "write_atomic", refuse)
        known.settle(MOST_LINES + 1)
    assert len((tmp_path / "records.jsonl").read_bytes().splitlines()) > MOST_LINES
    known.settle(MOST_LINES + 1)
    assert len((tmp_path / "records.jsonl").read_bytes().splitlines()) == 1


def test_an_api_without_records_costs_no_write_in_each_round(opened, tmp_path, monkeypatch):
    written: list[Any] = []
    monkeypatch.setattr(known_module, "write_atomic", lambda path, data, **options: written.append(path))
    with receiving(lambda asked: (200, [])) as api:
        source = opened(make(api, records="", pagination=None, **FULL), SourceContext(state_dir=tmp_path))
        assert polled(source, 5) == []
    assert len(api.asked) == 5
    assert len(written) == 1


# -- being polite --------------------------------------------------------------------------------------------------------


def test_a_page_that_has_not_changed_is_not_sent_again(shop, opened):
    def answer(asked: Asked) -> Any:
        tag = f'"{len(shop.orders)}"'
        if asked.headers.get("if-none-match") == tag:
            return 304, b""
        return 200, shop.orders, {"ETag": tag, "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}

    with receiving(answer) as api:
        source = opened(make(api, pagination=None, records="", incremental=None))
        assert len(polled(source)) == 8
        assert polled(source) == []
        assert api.asked[-1].headers["if-modified-since"] == "Wed, 21 Oct 2015 07:28:00 GMT"
        shop.put(77, 0)
        assert [each["id"] for each in polled(source)] == [77]


@pytest.mark.parametrize("says_when", [True, False])
def test_a_time_of_change_that_has_just_passed_marks_nothing(shop, opened, says_when):
    """Another change in the same second would never be seen."""
    now = email.utils.formatdate(usegmt=True)

    def answer(asked: Asked) -> Any:
        return 200, shop.orders, {"Last-Modified": now} if says_when else {"Last-Modified": "at noon"}

    with receiving(answer) as api:
        source = opened(make(api, pagination=None, records="", incremental=None))
        assert len(polled(source)) == 8
        shop.put(77, 0)
        assert [each["id"] for each in polled(source)] == [77]
        assert "if-modified-since" not in api.asked[-1].headers


def test_a_mark_is_of_the_question_that_it_came_with(shop, opened):
    """The server marks all that it has, and gives three records at a time."""

    def answer(asked: Asked) -> Any:
        tag = f'"{len(shop.orders)}"'
        if asked.headers.get("if-none-match") == tag:
            return 304, b""
        found = sorted(
            (each for each in shop.orders if each["updated"] >= int(asked.query.get("since", 0))),
            key=lambda each: each["updated"],
        )
        return 200, found[:3], {"ETag": tag}

    with receiving(answer) as api:
        source = opened(make(api, pagination=None, records=""))
        assert sorted(each["id"] for each in polled(source, rounds=6)) == list(range(8))
        assert "if-none-match" in api.asked[-1].headers, "a round that found nothing new is the same question"


def test_a_server_that_asks_for_a_pause_is_left_alone(shop, opened):
    says: list[Any] = [(429, {}, {"Retry-After": "3600"})]
    with receiving(lambda asked: says.pop() if says else shop.answer(asked)) as api:
        source = opened(make(api))
        for _ in range(3):
            with pytest.raises(RetryableError, match="3600 s") as caught:
                source.poll_batch(10)
            assert caught.value.code == NOT_READY
        assert len(api.asked) == 1
        assert "left alone" in source.health_check().reason
        source._api._wait_until = 0.0
        assert len(polled(source)) == 8
        assert source.health_check().reason == ""


def test_requests_keep_to_a_rate(api, opened, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("penstock.connectors.http_poll.pages.time", clock)
    polled(opened(make(api, rate_limit_per_sec=0.5)))
    assert clock.waited == [0, 2, 2]


class Clock:
    """A clock that only `sleep` moves."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def monotonic(self) -> float:
        return 1000 + sum(self.waited)

    def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ((500, {}), RetryableError),
        ((200, b"<html>"), RetryableError),
        ((200, {"data": {}}), RetryableError),
        ((401, {}), FatalError),
        ((404, {}), FatalError),
        (None, RetryableError),
        ((200, {"data": {"items": [{"id": 1}]}}), FatalError),
        ((200, {"data": {"items": [{"updated": 1}]}}), FatalError),
    ],
)
def test_other_answers_are_errors_that_say_what_happens_next(opened, says, error):
    with receiving(lambda asked: says) as api, pytest.raises(error):
        opened(make(api)).poll_batch(10)


@pytest.mark.parametrize(
    ("auth", "sent"),
    [
        ({"type": "bearer", "token": SECRET}, {"authorization": "Bearer correct horse"}),
        ({"type": "basic", "user": "me", "password": SECRET}, {"authorization": "Basic bWU6Y29ycmVjdCBob3JzZQ=="}),
        ({"type": "api_key", "key": SECRET}, {"x-api-key": "correct horse"}),
        (
            {"type": "oauth2", "token_url": "{url}/token", "client_id": "me", "client_secret": SECRET},
            {"authorization": "Bearer fresh"},
        ),
    ],
    ids=["bearer", "basic", "api_key", "oauth2"],
)
def test_every_page_is_asked_for_with_the_credentials(shop, opened, monkeypatch, auth, sent):
    monkeypatch.setenv("API_SECRET", "correct horse")

    def answer(asked: Asked) -> Any:
        if asked.path == "/token":
            return 200, {"access_token": "fresh", "expires_in": 3600}
        return shop.answer(asked) if sent.items() <= asked.headers.items() else (401, {})

    with receiving(answer) as api:
        auth = {name: value.format(url=api.url) if name == "token_url" else value for name, value in auth.items()}
        assert polled(opened(make(api, auth=auth))) == shop.orders
        pages = [asked for asked in api.asked if asked.path != "/token"]
        assert len(pages) > 1, "each page is another request"
        assert len(api.asked) - len(pages) == (auth["type"] == "oauth2"), "a token is fetched once"


def test_a_key_that_a_page_repeats_in_the_address_of_the_next_is_not_kept(opened, monkeypatch):
    monkeypatch.setenv("API_SECRET", "correct horse")

    def answer(asked: Asked) -> Any:
        items = [{"id": int(asked.query.get("at", 0)), "updated": 1}]
        return 200, {
            "data": {"items": items},
            "next": "/next?key=correct+horse&at=1" if "at" not in asked.query else None,
        }

    with receiving(answer) as api:
        source = opened(make(api, "next", auth={"type": "api_key", "key": SECRET, "param": "key"}))
        assert [each["id"] for each in (json.loads(found.record.payload) for found in source.poll_batch(10))] == [0]
        assert "correct" not in source.checkpoint().model_dump_json()
        assert len(source.poll_batch(10)) == 1
    assert [asked.query["key"] for asked in api.asked] == ["correct horse"] * 2


def test_credentials_do_not_follow_a_page_to_another_server(opened):
    page = {"data": {"items": [{"id": 1, "updated": 1}]}, "next": "http://other.example/next"}
    with receiving(lambda asked: (200, page)) as api, pytest.raises(FatalError, match="another server"):
        opened(make(api, "next")).poll_batch(10)


def test_a_page_may_name_its_own_server_in_other_words(shop, opened):
    def answer(asked: Asked) -> Any:
        status, body, headers = shop.answer(asked)
        if "next" in body:
            body["next"] = body["next"].replace("/next", f"HTTP://LOCALHOST:{port}/next")
        return status, body, headers

    with receiving(answer) as api:
        port = api.url.rpartition(":")[2]
        api.url = f"http://localhost:{port}"
        assert len(polled(opened(make(api, "next")))) == 8


@pytest.mark.parametrize("address", ["http://[", "http://localhost:99999999/", "//[x", "http://a\0b/"])
@pytest.mark.parametrize("kind", ["next", "link"])
def test_an_address_of_a_next_page_that_is_none_is_an_error_that_says_so(opened, kind, address):
    headers = {"Link": f'<{address}>; rel="next"'} if "\0" not in address else {"Link": '<http://[>; rel="next"'}
    page = {"data": {"items": [{"id": 1, "updated": 1}]}, "next": address}
    with (
        receiving(lambda asked: (200, page, headers)) as api,
        pytest.raises((RetryableError, FatalError), match="next page"),
    ):
        opened(make(api, kind)).poll_batch(10)


def test_pages_that_lead_back_to_an_earlier_one_are_noticed_and_none_comes_twice(opened):
    def answer(asked: Asked) -> Any:
        at = int(asked.query.get("cursor", 0)) % 3
        return 200, {"data": {"items": [{"id": at, "updated": 1}]}, "next_cursor": str(at + 1 if at < 2 else 1)}

    with receiving(answer) as api:
        source = opened(make(api))
        found = [source.poll_batch(10), source.poll_batch(10)]
        for _ in range(5):
            with pytest.raises(RetryableError, match="same page"):
                source.poll_batch(10)
        assert [json.loads(each.record.payload)["id"] for batch in found for each in batch] == [0, 1]


def test_a_page_that_nobody_marked_and_that_is_said_to_be_unchanged_is_asked_for_again(opened):
    """The newest come first: to believe it would lose the older ones."""
    says: list[Any] = [(304, b"")]
    pages = {"": [{"id": 9, "updated": 9}], "1": [{"id": 1, "updated": 1}]}

    def answer(asked: Asked) -> Any:
        at = asked.query.get("cursor", "")
        if at and says:
            return says.pop()
        return 200, {"data": {"items": pages[at]}, "next_cursor": None if at else "1"}

    with receiving(answer) as api:
        source = opened(make(api))
        assert len(source.poll_batch(10)) == 1
        with pytest.raises(RetryableError, match="304"):
            source.poll_batch(10)
        assert [json.loads(each.record.payload)["id"] for each in source.poll_batch(10)] == [1]


def test_a_page_that_would_fill_all_memory_is_given_up(opened):
    bomb = gzip.compress(b"[" + b" " * (32 << 20) + b"]")
    with receiving(lambda asked: (200, bomb, {"Content-Encoding": "gzip"})) as api:
        options = {"records": "", "pagination": None, "incremental": None}
        assert opened(make(api, **options)).poll_batch(10) is None
        with pytest.raises(FatalError, match="max_page_bytes"):
            opened(make(api, **options, max_page_bytes=1 << 20)).poll_batch(10)


def test_a_page_that_comes_byte_by_byte_is_given_up(opened, monkeypatch):
    monkeypatch.setattr("penstock.connectors.http_poll.pages.PAGE_TIMEOUTS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            with contextlib.suppress(OSError):
                client = listener.accept()[0]
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n[")
                while True:
                    client.sendall(b" ")
                    time.sleep(0.01)

        threading.Thread(target=drip, daemon=True).start()
        api = Receiver(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        source = opened(make(api, records="", pagination=None, timeout_secs=20))
        with pytest.raises(RetryableError, match="does not end"):
            source.poll_batch(10)


def test_half_a_surrogate_pair_stops_nobody(opened, tmp_path):
    items = b'{"data": {"items": [{"id": "\\ud800", "updated": "\\udfff"}, {"id": "\\ud83d\\ude00", "updated": "x"}]}}'
    with receiving(lambda asked: (200, items)) as api:
        found = opened(make(api)).poll_batch(10)
        assert [json.loads(each.record.payload)["id"] for each in found] == ["\ufffd" * 3, "\U0001f600"]
        assert len(opened(make(api, **FULL), SourceContext(state_dir=tmp_path)).poll_batch(10)) == 2


def test_pages_without_anything_new_do_not_hide_a_stop(opened, monkeypatch):
    monkeypatch.setattr("penstock.connectors.http_poll.source.LOOK_SECS", 0.0)
    monkeypatch.setattr("penstock.connectors.http_poll.source.MOST_EMPTY_PAGES", 4)

    def answer(asked: Asked) -> Any:
        return 200, {"data": {"items": []}, "next_cursor": int(asked.query.get("cursor", 0)) + 1}

    with receiving(answer) as api:
        source = opened(make(api))
        for count in range(1, 5):
            assert source.poll_batch(10) == [], "it is asked again at once, and what it has passed is journaled"
            assert len(api.asked) == count
        with pytest.raises(FatalError, match="4 pages"):
            source.poll_batch(10)


@pytest.mark.parametrize(
    ("asks", "secs"),
    [("7", 7), ("9" * 30, 86_400), ("9" * 400, 86_400), ("\xb2", None), ("soon", None), ("-5", None), ("", None)],
)
def test_a_pause_is_a_number_of_seconds_and_a_day_at_most(asks, secs):
    assert pause_of(httpx.Response(429, headers=[(b"Retry-After", asks.encode("latin-1"))])) == secs


def test_a_pause_may_be_a_date():
    at = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 90 < pause_of(httpx.Response(503, headers={"Retry-After": at})) <= 100
    for date in ("Wed, 21 Oct 2015 07:28:00 GMT", "Mon, 01 Jan 0001 00:00:00 GMT"):
        assert pause_of(httpx.Response(503, headers={"Retry-After": date})) == 0
    assert pause_of(httpx.Response(503, headers={"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"})) == 86_400


def test_a_cursor_that_never_moves_is_noticed(opened):
    page = {"data": {"items": [{"id": 1, "updated": 1}]}, "next_cursor": "x"}
    with receiving(lambda asked: (200, page)) as api:
        source = opened(make(api))
        assert len(source.poll_batch(10)) == 1
        with pytest.raises(RetryableError, match="same page"):
            source.poll_batch(10)


@pytest.mark.parametrize(
    "options",
    [
        {"incremental": {}, "key": []},
        {"incremental": {}, "deletes": True},
        {"key": [], "incremental": None, "deletes": True},
    ],
)
def test_options_that_exclude_each_other_are_refused(api, options):
    with pytest.raises(ValidationError):
        make(api, **options)


# -- with its journal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, FULL], ids=["newer", "full"])
def test_a_restart_loses_nothing_and_doubles_nothing(api, shop, tmp_path, options):
    for round in range(4):
        shop.put(100 + round, 10 + round)
        source = make(api, **options)
        ingest = Ingest("poll", source, tmp_path / "journal", Processing(linger_ms=0, poll_interval_ms=1))
        ingest.open(context=SourceContext(state_dir=tmp_path / "own"))
        ingest.start()
        wait_until(lambda: ingest.journal.tail >= 9 + round or ingest.failure, "the new record")  # noqa: B023
        ingest.close()
        assert ingest.failure is None
    payloads = [json.loads(payload) for _, payload, _ in journaled(tmp_path / "journal")]
    ids = [(each.get("after") or each)["id"] for each in payloads]
    assert sorted(ids) == [*range(8), 100, 101, 102, 103]


def test_a_full_refresh_mirrors_the_records_into_a_table(api, shop, tmp_path):
    file = tmp_path / "pipeline.toml"
    file.write_text(f"""
connector_name = "orders"
[processing]
epoch_interval_ms = 0
[source]
connector = "http_poll"
url = "{api.url}/cursor"
stream = "orders"
records = "data.items"
pagination = {{ type = "cursor" }}
key = ["id"]
deletes = true
interval_secs = 0.01
[[schemas]]
topic = "/orders"
schema_type = "debezium"
[sink]
connector = "delta"
path = "lake/{{topic}}"
mode = "upsert"
""")
    from deltalake import DeltaTable

    def rows() -> dict[int, Any]:
        supervisor.run(Pipeline.from_toml(file), ForkEngine(1), drain=True)
        found = DeltaTable(tmp_path / "lake" / "orders").to_pyarrow_table().to_pylist()
        return {row["id"]: row["updated"] for row in found}

    assert rows() == {each["id"]: each["updated"] for each in shop.orders}
    shop.put(1, 5)
    shop.put(50, 6)
    shop.orders = [each for each in shop.orders if each["id"] != 7]
    assert rows() == {each["id"]: each["updated"] for each in shop.orders}


def test_check_asks_for_a_page_and_says_what_a_run_would_meet():
    with receiving() as server:
        server.answer = lambda asked: (200, {"data": []})
        found = {}
        for name, options in {"good": {"records": "data"}, "records": {"records": "items"}}.items():
            source = HttpPoll(HttpPollConfig(url=f"{server.url}/x", stream="orders", **options))
            source.open()
            found[name] = source.check()
            source.close()
        address = server.url
    source = HttpPoll(HttpPollConfig(url=f"{address}/x", stream="orders"))
    source.open()
    [away] = source.check()
    source.close()
    assert not found["good"]
    assert [finding.ok for finding in found["records"]] == [False]
    assert "PEN-2001" in away.what
    assert away.fix == "check `url`, and that the server runs"


@pytest.mark.parametrize("url", ["http://[::1", "https://api.example.com:99999/v1", "api.example.com/v1"])
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match=r"PEN-1003 `url` = .* is no address of the web"):
        client(HttpPollConfig(url=url, stream="s"))
