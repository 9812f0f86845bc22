"""Ask SQL tables for the rows that changed, by a cursor; the resume point is a small file."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pyarrow as pa
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from penstock.capture import Ack, AckSink, Change, ChangeCapture, ChangeEvent, Delete, SnapshotTable, Upsert, pause
from penstock.config import Config, Secret, beside
from penstock.connectors.sql_poll.database import (
    Database,
    Found,
    Table,
    closing_on_error,
    count,
    has_nulls,
    page,
    parted,
)
from penstock.durable import Json, canonical, make_directory, write_atomic
from penstock.errors import ConfigError, FatalError
from penstock.schema import key_of
from penstock.source import Finding, Schemas, SourceContext

MOST_COUNTED = 1_000_000
"""A lag of more rows than this is shown as so many."""

_SQLITE = "sqlite:"

Places = Mapping[str, Sequence[Json]]
"""For each stream the place of the last row; none: its beginning."""


class SqlPollConfig(Config):
    identity: ClassVar[frozenset[str]] = frozenset({"tables", "key", "cursor"})

    dsn: str
    """Where the database is: `postgresql://user@host:port/database` (no password in it; needs
    `pip install 'penstock[sql-poll]'`), or `sqlite:` and a file's path."""

    password: Secret | None = None
    """The user's password."""

    tables: Annotated[tuple[str, ...], Field(min_length=1)]
    """Tables or views to read, as `schema.table` or `table`; they share the options below. Others get a source of their own."""

    key: Annotated[tuple[str, ...], Field(min_length=1)]
    """The columns that tell rows apart."""

    cursor: str
    """A column that grows whenever a row is written: `updated_at`, a version, or a growing id where rows only ever come."""

    deleted: str | None = None
    """A column that marks rows as deleted: true, a number but 0, or a time. They become deletes."""

    settle_ms: NonNegativeInt = 2000
    """A row is read once a cursor as large was seen this long ago: rows that commit up to so much later are not missed."""

    poll_interval_ms: PositiveInt = 1000
    """Time between two looks while there is nothing new."""

    batch_rows: PositiveInt = 1000
    """Rows that are asked for at a time."""

    @field_validator("dsn")
    @classmethod
    def _beside_file(cls, dsn: str, info: ValidationInfo) -> str:
        if not dsn.startswith(_SQLITE):
            return dsn
        path = dsn.removeprefix(_SQLITE)
        if not path or path.startswith("//"):
            raise ValueError("write sqlite:shop.db, relative to this file, or sqlite:/data/shop.db")
        return _SQLITE + beside((info.context or {}).get("base"), path)


class SqlPoll(ChangeCapture[SqlPollConfig]):
    """
    Rows come in the order of cursor and key, each once for every value of its cursor that was there when it was asked.

    Supports exactly-once: the place of the last row is journaled with it. Needs no rights but SELECT; an index on cursor
    and key keeps it quick. It cannot see rows that are removed by DELETE, values between two looks, rows without a
    cursor, and rows that commit more than `settle_ms` after one whose cursor is as large; and a cursor set far into the
    future hides all that comes before it. Where that matters, read the log: `postgres_cdc`.
    """

    name = "sql_poll"

    def __init__(self, config: SqlPollConfig) -> None:
        super().__init__(config)
        self._database: Database | None = None
        self._schemas: dict[str, pa.Schema] = {}
        self._places: Places = {}
        self._settled_at = float("-inf")  # rows that were there then have been handed over

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.close()
        super().open(context)
        self._database = self._connect()
        with closing_on_error(self._database):
            self._schemas = {stream: self._describe(self._database, stream).schema for stream in self.config.tables}
        self._places = self._stored()
        self._settled_at = float("-inf")

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = None

    def check(self) -> Sequence[Finding]:
        with contextlib.closing(self._connect()) as database:
            return [
                Finding(False, f"{table.stream} has rows without a {self.config.cursor!r}, which are never seen", fix)
                for table in (self._describe(database, stream) for stream in self.config.tables)
                if has_nulls(database, table)
                for fix in [f"UPDATE {table.sql} SET … WHERE {self.config.cursor} IS NULL; and make it NOT NULL"]
            ]

    def lag(self) -> int | None:
        """Rows that are not confirmed, counted over a connection of its own."""
        with contextlib.closing(self._connect()) as database:
            tables = [self._describe(database, stream) for stream in self.config.tables]
            return sum(count(database, table, self._places.get(table.stream), MOST_COUNTED) for table in tables)

    def tables(self) -> Sequence[SnapshotTable]:
        return [_named(stream) for stream in self.config.tables]

    def schema(self) -> Schemas:
        return dict(self._schemas)

    def restore(self, position: Json, copies: Mapping[str, Json]) -> None:
        """Only the database knows the order of its places: it continues after the last journaled one."""
        if position is not None:
            self._moved(position)

    def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
        """What was read before: the rows up to the resume point. All others come by `live`, from the beginning on if need be."""
        for table in tables:
            upto, after = self._places.get(table.stream), None
            while upto is not None:
                known = self._described(table.stream)
                found = page(self._opened(), known, after, upto, self.config.batch_rows)
                for each in found:
                    event = self._event(known, each)
                    if isinstance(event, Upsert):
                        yield Change(event, Ack(), {table.stream: each.place})
                if len(found) < self.config.batch_rows:
                    break
                after = found[-1].place

    def live(self) -> Iterator[Change | None]:
        acks = AckSink(self._moved)
        settling = {stream: _Settling(self.config.settle_ms / 1000) for stream in self.config.tables}
        places = self._places
        while True:
            for stream in self.config.tables:
                table = self._described(stream)
                upto = settling[stream].upto(self._opened().newest(table))
                if not table.schema.equals(self._schemas[stream], check_metadata=True):
                    yield None  # the rows before had another shape
                    self._schemas[stream] = table.schema
                more = upto is not None
                while more:
                    found = page(self._opened(), table, places.get(stream), [upto], self.config.batch_rows)
                    more = len(found) == self.config.batch_rows
                    before = places
                    for number, each in enumerate(found, 1):
                        places = {**before, stream: each.place}
                        # The resume point moves by whole pages: a write to disk for each row would be slow.
                        resume = places if number == len(found) else before
                        yield Change(self._event(table, each), acks.ack(resume), places)
            self._settled_at = min(each.settled_at for each in settling.values())
            yield from pause(self.config.poll_interval_ms / 1000)

    def caught_up(self, since: float) -> bool:
        """True once the rows that were there at `since` have settled and come out of `live`."""
        return self._settled_at >= since

    def _event(self, table: Table, found: Found) -> ChangeEvent:
        named = _named(table.stream)
        if self.config.deleted is not None and found.row[self.config.deleted] not in (None, False, 0):
            return Delete(named, {name: found.row[name] for name in key_of(table.schema) or ()})
        return Upsert(named, found.row)

    # -- the resume point ----------------------------------------------------------------------------------------

    def _moved(self, places: Json) -> None:
        if places != self._places:
            path = self._file()
            if path is not None:
                make_directory(path.parent, private=True)
                write_atomic(path, canonical(places).encode(), private=True)
            self._places = places

    def _stored(self) -> Places:
        path = self._file()
        if path is None or not path.exists():
            return {}
        try:
            return dict(json.loads(path.read_bytes()))
        except ValueError as error:
            raise FatalError(
                f"{path} is damaged: {error}",
                code="PEN-5011",
                hint="restore it from a copy; without it all rows are read again from the beginning",
            ) from error

    def _file(self) -> Path | None:
        return self.context.state_dir / "places.json" if self.context.state_dir else None

    # -- the database --------------------------------------------------------------------------------------------

    def _connect(self) -> Database:
        if self.config.dsn.startswith(_SQLITE):
            from penstock.connectors.sql_poll.sqlite import Sqlite

            return Sqlite(self.config.dsn.removeprefix(_SQLITE))
        try:
            from penstock.connectors.sql_poll.postgres import Postgres
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"PostgreSQL needs the module {error.name}, which is not installed",
                code="PEN-1007",
                hint="pip install 'penstock[sql-poll]'",
            ) from error
        return Postgres(self.config.dsn, self.config.password)

    def _opened(self) -> Database:
        if self._database is None:
            self._database = self._connect()
        return self._database

    def _described(self, stream: str) -> Table:
        """The table as it looks now; over a new connection if the last one broke."""
        if self._database is not None and self._database.broken:
            self.close()
        return self._describe(self._opened(), stream)

    def _describe(self, database: Database, stream: str) -> Table:
        table = database.describe(stream, (self.config.cursor, *self.config.key))
        if self.config.deleted is not None and self.config.deleted not in table.schema.names:
            raise ConfigError(
                f"{stream} has no column {self.config.deleted!r}", code="PEN-1016", hint="correct `deleted`"
            )
        return table


class _Settling:
    """Tells up to which cursor all rows may be taken for committed: the largest that was seen some time ago."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: deque[_Seen] = deque()
        self._upto: Json = None
        self._looked = float("-inf")

    def upto(self, newest: Json) -> Json:
        now = time.monotonic()
        last = self._seen[-1].newest if self._seen else self._upto
        if newest is not None and last != newest:
            self._seen.append(_Seen(now, newest, self._looked))
        self._looked = now
        while self._seen and self._seen[0].at <= now - self._seconds:
            self._upto = self._seen.popleft().newest
        return self._upto

    @property
    def settled_at(self) -> float:
        """The time of the last look whose newest cursor has settled."""
        return self._seen[0].before if self._seen else self._looked


@dataclass(frozen=True)
class _Seen:
    """The largest cursor at one look, and when the look before it was."""

    at: float
    newest: Json
    before: float


def _named(stream: str) -> SnapshotTable:
    return SnapshotTable(*parted(stream))
