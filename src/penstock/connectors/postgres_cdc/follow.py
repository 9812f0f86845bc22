"""Read one range of log in a task: decode it, merge it with the copies, and note what became of the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from penstock.connectors.postgres_cdc.catalog import Table, as_text, excluded
from penstock.connectors.postgres_cdc.config import PostgresCdcConfig
from penstock.connectors.postgres_cdc.log import read, snapshots
from penstock.connectors.postgres_cdc.log.decode import Decoder
from penstock.connectors.postgres_cdc.log.slot import Slot, server
from penstock.connectors.postgres_cdc.merge import Rule, Rules
from penstock.connectors.postgres_cdc.position import LogPosition
from penstock.connectors.postgres_cdc.publications import publications
from penstock.connectors.postgres_cdc.session import Session
from penstock.connectors.postgres_cdc.tables import Captured
from penstock.connectors.postgresql import failures
from penstock.connectors.postgresql.types import TypeCatalog
from penstock.durable import Json
from penstock.source import Note, SourceBatch


@dataclass(frozen=True)
class LogRange:
    """The split of a range of log, decoded by one task; it carries the tables and types as planning saw them."""

    start: LogPosition
    end: int
    tables: Mapping[str, Table]
    catalog: TypeCatalog

    @property
    def followed(self) -> Mapping[str, Captured]:
        """The tables whose changes are read, with their states."""
        return {s: table for s, table in self.start.tables.items() if table.captured}  # type: ignore[misc]


def read_range(session: Session, config: PostgresCdcConfig, split: LogRange) -> Iterator[SourceBatch | Note]:
    """The changes that belong after the copies, in commit order, then the notes of the range."""
    start, known = split.start, split.tables
    found = session.ask(partial(verify, session, start))
    rules = _rules(config, split)
    decoder = Decoder(
        split.catalog,
        start.lsn,
        split.end,
        wanted=rules.wants,
        exclude=partial(excluded, config=config),
        as_text=partial(as_text, config=config) if config.text_columns else None,
        keys={stream: known[stream].primary_key for stream in rules.by_stream},
        current_xid=session.ask(snapshots.current_xid),
        on_bad=rules.set_aside,
    )
    rows, given = 0, set()
    asked = session.ask(lambda connection: connection)
    with (
        failures.errors("cannot read the log"),
        read.changes(config, asked, publications(config), found, decoder, start.lsn, split.end) as changed,
    ):
        for item in changed:
            rows += item.batch.num_rows
            for batch in rules.rows(item):
                given.add(batch.stream)
                yield batch
    decoder.finish()
    # Once more: a slot that was lost and made again before it was read has no log of the range, and does not say so.
    session.ask(partial(verify, session, start))
    if start.copying or start.copied or rules.note():  # a table may have to be copied again
        session.ask(lambda c: snapshots.wait_visible(c, decoder.xids, config.visible_timeout_secs))
    yield Note({"quiet": not rows, **rules.note(), **_unseen_partitions(decoder.parts, split, given)})
    for refused in rules.bad.values():
        yield Note(refused.note())


def verify(session: Session, start: LogPosition, connection: psycopg.Connection[Any]) -> Slot:
    """The slot, if it still holds the log from this position on."""
    here = server(connection)
    return session.verify_range(connection, here, start.lsn, start.system, start.timeline)


def _rules(config: PostgresCdcConfig, split: LogRange) -> Rules:
    copies = config.snapshot != "never"
    return Rules(
        {
            stream: Rule(
                split.tables[stream],
                split.catalog,
                progress,
                [each for each in split.start.copied if each.stream == stream],
                copies=copies,
            )
            for stream, progress in split.followed.items()
            if stream in split.tables
        },
        frozenset(stream for stream in split.followed if stream not in split.tables),
    )


def _unseen_partitions(parts: Mapping[int, int], split: LogRange, given: set[str]) -> Json:
    """For the note of a range: partitions that rows came from and that did not exist at the last look at the catalog."""
    own = {table.oid: stream for stream, table in split.tables.items()}
    found: dict[str, list[int]] = {}
    for part, root in parts.items():
        stream = own.get(root, "")
        tree = split.followed[stream].tree if part not in own and stream in given else None
        if tree and part not in tree.parts:
            found.setdefault(stream, []).append(part)
    return {"parts": found} if found else {}
