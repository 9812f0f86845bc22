"""Ask a web API for records, page by page: newer ones, or all of them and what is gone."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from pydantic import ValidationError

from penstock.config import Config
from penstock.connectors.http_poll.config import HttpPollConfig, Incremental
from penstock.connectors.http_poll.known import Known
from penstock.connectors.http_poll.pages import Api, Marks, Page, member
from penstock.connectors.http_poll.values import is_after, is_same
from penstock.durable import Json, canonical
from penstock.errors import ConnectorError, FatalError, RetryableError
from penstock.health import Finding
from penstock.source import (
    ENVELOPE_SCHEMA,
    HealthStatus,
    PollingSource,
    Schemas,
    SourceCheckpoint,
    SourceContext,
    SourceEnvelope,
    SourceRecord,
)

MOST_EMPTY_PAGES = 10_000
LOOK_SECS = 1.0
"""How long pages without anything new may hide a stop."""


class Place(Config):
    """How far the records were read: the round in hand, and what is known from the ones before."""

    since: Json = None
    """The newest value of whole rounds, and which records had it."""
    border: tuple[str, ...] = ()
    page: Json = None
    """What to ask for next in this round; None: a round begins."""
    newest: Json = None
    """The newest value of this round so far, and which records had it."""
    newest_keys: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    """The records of the last page: they come again where pages have moved."""
    etag: str = ""
    modified: str = ""
    """What the only page of the last round was marked with."""


class HttpPoll(PollingSource[HttpPollConfig]):
    """
    A record is a message, and `key` makes its key.

    Supports exactly-once: how far it was read is journaled with the records. With `incremental` a round goes on after a
    restart at the page it had come to. Without, it begins again, and knows what it has sent. It cannot see what changes twice
    between two rounds, and by pages with numbers or offsets a record that moves up while they are read. Numbers with a fraction
    come as doubles.
    """

    name = "http_poll"

    def __init__(self, config: HttpPollConfig) -> None:
        super().__init__(config)
        self._api: Api | None = None
        self._place = Place()
        self._known = Known(None)
        self._is_new = True  # nothing was sent yet
        self._found: set[str] = set()  # in the round in hand
        self._due = 0.0  # the next round begins then
        self._batch = 0  # how many were handed over
        self._empty_pages = 0  # one after the other

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.close()
        super().open(context)
        self._api = Api(self.config)
        self._place, self._due, self._batch, self._empty_pages, self._is_new = Place(), 0.0, 0, 0, True
        is_kept = context.state_dir is not None and self.config.incremental is None
        self._known = Known(context.state_dir / "records.jsonl" if context.state_dir and is_kept else None)

    def close(self) -> None:
        if self._api is not None:
            self._api.close()
        self._api = None

    def schema(self) -> Schemas:
        return {self.config.stream: ENVELOPE_SCHEMA}

    def check(self) -> Sequence[Finding]:
        """Ask for the first page, as a run would: address, certificate, credentials and `records` are seen with it."""
        if self._api is None:
            return ()
        start = self.config.incremental.start if self.config.incremental is not None else None
        try:
            self._api.page(None, start, Marks())
        except ConnectorError as error:
            return [
                Finding(False, f"{error.code} {error.message}", error.hint or "check `url`, and that the server runs")
            ]
        return ()

    def health_check(self) -> HealthStatus:
        waits = self._api.waits if self._api is not None else ""
        return HealthStatus.degraded(waits) if waits else HealthStatus.healthy()

    def poll_batch(self, max_records: int) -> list[SourceEnvelope] | None:
        """The new records of the next page that has some."""
        if self._place.page is None and time.monotonic() < self._due:
            return None
        if self._is_new:
            self._known.clear()
            self._is_new = False
        incremental = self.config.incremental
        until = time.monotonic() + LOOK_SECS
        while self._empty_pages < MOST_EMPTY_PAGES:
            page = self._ask()
            found = self._full(page) if incremental is None else self._newer(page, incremental)
            self._empty_pages = 0 if found or self._place.page is None else self._empty_pages + 1
            if found:
                self._batch += 1
                return found
            if self._place.page is None:
                return None
            if time.monotonic() > until:
                return []
        raise FatalError(
            f"{MOST_EMPTY_PAGES:,} pages in a row bring nothing new", code="PEN-5001", hint="look at `pagination`"
        )

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(offsets={"batch": self._batch}, metadata=self._place.model_dump(mode="json"))

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        try:
            place = Place.model_validate(checkpoint.metadata)
            self._batch = int(checkpoint.offsets["batch"])
        except (ValidationError, ValueError, TypeError, KeyError) as error:
            raise FatalError(
                "the recorded position is not one of http_poll",
                code="PEN-5011",
                hint="`penstock offsets reset` reads everything again",
            ) from error
        self._is_new = False
        if self.config.incremental is not None:
            self._place = place
        else:  # the round begins again, and what was sent of it is known
            self._known.load(self._batch)

    def commit(self, offsets: Mapping[str, Json]) -> None:
        if offsets["batch"] == self._batch:
            self._known.settle(self._batch)

    def _ask(self) -> Page:
        assert self._api is not None
        place, incremental = self._place, self.config.incremental
        since = place.since if place.since is not None or incremental is None else incremental.start
        marks = Marks(place.etag, place.modified) if place.page is None else Marks()
        return self._api.page(place.page, since, marks)

    # -- newer records -------------------------------------------------------------------------------------------

    def _newer(self, page: Page, incremental: Incremental) -> list[SourceEnvelope]:
        """The records that are not older than the newest of the rounds before, and were not seen at its border."""
        place = self._place
        if page.unchanged:
            self._finish(place)
            return []
        fresh: list[SourceEnvelope] = []
        seen: dict[str, None] = {}
        newest, newest_keys = place.newest, dict.fromkeys(place.newest_keys)
        for record in page.records:
            value, key = member(record, incremental.path), self._key(record)
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise self._wrong(f"a value at {incremental.path!r} that could grow", "`path` of `incremental`")
            if newest is None or is_after(value, newest):
                newest, newest_keys = value, {}
            if is_same(value, newest):
                newest_keys[key] = None
            mark = f"{key}\n{value}"
            is_border = key in place.border and is_same(value, place.since)
            is_old = place.since is not None and is_after(place.since, value)
            if not (is_old or is_border or mark in seen or mark in place.last):
                fresh.append(self._message(record, key))
            seen[mark] = None
        update = {"newest": newest, "newest_keys": tuple(newest_keys), "last": tuple(seen), "page": page.following}
        self._place = place.model_copy(update={**update, **self._marks(page)})
        if page.following is None:
            self._finish(self._place)
        return fresh

    def _finish(self, place: Place) -> None:
        """The round is over: the next one asks from its newest value on."""
        since, border = place.since, place.border
        cleared: dict[str, Any] = {"page": None, "newest": None, "newest_keys": (), "last": ()}
        if place.newest is not None and (since is None or not is_after(since, place.newest)):
            if since is None or is_after(place.newest, since):  # the next round asks another question
                border, cleared = (), cleared | {"etag": "", "modified": ""}
            border = tuple(sorted({*place.newest_keys, *border}))
            since = place.newest
        self._place = place.model_copy(update={**cleared, "since": since, "border": border})
        self._due = time.monotonic() + self.config.interval_secs

    def _marks(self, page: Page) -> dict[str, str]:
        """Only a round of one page can be passed over by what the page is marked with."""
        only = self._place.page is None and page.following is None
        return {"etag": page.marks.etag, "modified": page.marks.modified} if only else {"etag": "", "modified": ""}

    # -- all records ---------------------------------------------------------------------------------------------

    def _full(self, page: Page) -> list[SourceEnvelope]:
        """The records that are new or have changed; at the end of the round, those that are gone."""
        place, known = self._place, self._known.records
        if page.unchanged:
            self._finish(place)
            return []
        if place.page is None:
            self._found = set()
        sent: list[SourceEnvelope] = []
        changed: dict[str, str] = {}
        for record in page.records:
            key, content = self._key(record), sha256(canonical(record).encode()).hexdigest()[:24]
            if content != changed.get(key, known.get(key)):
                op = "u" if key in known or key in changed else "c"
                sent.append(self._message(_envelope(op, None, record) if self.config.deletes else record, key))
                changed[key] = content
            self._found.add(key)
        gone = self._gone() if page.following is None else []
        sent += [self._message(_envelope("d", self._named(key), None), key) for key in gone]
        if sent:
            self._known.add(self._batch + 1, changed, gone)
        self._place = place.model_copy(update={"page": page.following, **self._marks(page)})
        if page.following is None:
            self._finish(self._place)
        return sent

    def _gone(self) -> list[str]:
        """The records that were there, and that a whole round has not found."""
        known = self._known.records
        if not self.config.deletes:
            return []
        if known and not self._found and not self.config.allow_empty:
            raise RetryableError(
                f"{self.config.url} has no records any more, and had {len(known):,}",
                hint="if that is right, set allow_empty = true",
            )
        return sorted(known.keys() - self._found)

    # -- messages ------------------------------------------------------------------------------------------------

    def _message(self, body: Any, key: str) -> SourceEnvelope:
        is_number = isinstance(body, int | float) and not isinstance(body, bool)  # a list may hold plain numbers
        record = (SourceRecord.from_number if is_number else SourceRecord.from_json)(self.config.stream, body)
        if self.config.key:
            record = record.with_key(canonical(self._named(key)))
        return SourceEnvelope(record)

    def _key(self, record: Any) -> str:
        """What tells the record apart, as text."""
        if not self.config.key:
            return sha256(canonical(record).encode()).hexdigest()[:24]
        values = [member(record, path) for path in self.config.key]
        if None in values:
            raise self._wrong(f"a value for its key {', '.join(self.config.key)}", "`key`")
        return canonical(values)

    def _named(self, key: str) -> dict[str, Any]:
        return dict(zip(self.config.key, json.loads(key), strict=True))

    def _wrong(self, what: str, option: str) -> FatalError:
        return FatalError(f"a record of {self.config.url} lacks {what}", code="PEN-5001", hint=f"correct {option}")


def _envelope(op: str, before: Any, after: Any) -> dict[str, Any]:
    """A change as Debezium writes it."""
    return {"op": op, "before": before, "after": after, "ts_ms": time.time_ns() // 1_000_000}
