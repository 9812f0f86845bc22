"""Watch the partitions of captured roots, and have a root copied again after something happened to a whole partition."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Literal

import psycopg

from penstock.connectors.postgres_cdc import partitions
from penstock.connectors.postgres_cdc.catalog import Table
from penstock.connectors.postgres_cdc.config import PostgresCdcConfig
from penstock.connectors.postgres_cdc.log.slot import Server
from penstock.connectors.postgres_cdc.partitions import Log, Part, PartitionsNow, Tree
from penstock.connectors.postgres_cdc.position import LogPosition
from penstock.connectors.postgres_cdc.publications import publications, publish_truncates, truncates
from penstock.connectors.postgres_cdc.session import Session
from penstock.connectors.postgres_cdc.table_errors import TableError, table_errors
from penstock.connectors.postgres_cdc.tables import Copying, Following, Waiting

logger = logging.getLogger(__name__)

Why = Literal["", "changed", "resync"]
"""Why a table is copied: `changed` without a trace in the log, or somebody asked for it (`resync`)."""


class PartitionWatch:
    """Compares the partitions of each root with those that the position remembers."""

    def __init__(self, session: Session, config: PostgresCdcConfig) -> None:
        self._session, self._config = session, config
        self._names: dict[int, str] = {}
        self._published = False
        """The publication of truncates was completed in this run."""

    def look(self, connection: psycopg.Connection[Any], tables: Mapping[str, Table]) -> dict[str, PartitionsNow]:
        """The partitions of the tables that have some, by stream."""
        roots = {stream: table.oid for stream, table in tables.items() if table.partitioned}
        found = partitions.look(connection, truncates(self._config), list(roots.values())) if roots else {}
        self._names.update((part.oid, part.name) for each in found.values() for part in each.parts)
        return {stream: found[oid] for stream, oid in roots.items()}

    def compare(
        self, connection: psycopg.Connection[Any], start: LogPosition, end: LogPosition, here: Server, upto: int
    ) -> tuple[LogPosition, dict[str, tuple[Why, Tree]]]:
        """
        The position with the trees as they are now, and the roots that must be copied again: why, and their trees.

        Called for every range that moves over the log, after the end of the log was asked for. So the slot still holds every
        truncate that the tree of `start` does not show, and one inside this range shows by a new file or a lock.
        """
        roots = {
            stream: table
            for stream, table in self._session.tables.captured.items()
            if table.partitioned and (known := end.tables.get(stream)) and known.captured and known.oid == table.oid
        }
        if not self._published:  # the tables may be from before there was such a publication
            publish_truncates(connection, self._config, list(roots.values()))
            self._published = True
        # A range that is cut short shows its own truncates; a file that it does not explain is looked at with the next.
        cut = start.lsn < upto < here.flushed
        names = truncates(self._config), publications(self._config)
        log = Log(connection, self._config.slot, *names, start.lsn, upto if cut else None)
        again: dict[str, tuple[Why, Tree]] = {}
        for stream, now in self.look(connection, roots).items():
            progress = end.tables[stream]
            assert isinstance(progress, Waiting | Copying | Following)
            before = progress.tree
            # Before its first rows, or the rows that clear the target, nothing counts.
            if before is not None and (not isinstance(progress, Waiting) or progress.refresh):
                why, tree = self._happened(connection, roots[stream], before, now, log)
                if why is not None:
                    again[stream] = why, tree
            else:
                tree = now.tree(before, log=log)
            end = end.with_table(stream, progress.with_fields(tree=tree))
        return end, again

    def _happened(
        self, connection: psycopg.Connection[Any], root: Table, before: Tree, now: PartitionsNow, log: Log
    ) -> tuple[Why | None, Tree]:
        """Why a root must be copied again, if it must, and its tree; what happened is logged."""
        found = partitions.difference(before, now)
        known = 0 != before.published == now.published
        # A truncate that is not visible yet has its lock; one in the transaction that made the partition keeps the file.
        emptied = log.truncated(root.oid, found.moved, now.locked | found.new) if known else {*found.moved}
        unsure = {oid: file for oid, file in found.moved.items() if log.end is not None and oid not in emptied}
        removes = self._config.detached_rows == "remove"
        gone, back = (found.gone, [part.oid for part in found.back]) if removes else ([], [])
        came = found.attached if removes else [*found.attached, *found.back]
        filled = [part.oid for part in came if self._holds_rows(connection, root, part, now)]
        happened = {
            "detached or dropped": gone,
            "detached and attached again": back,
            "truncated" if known else "truncated, or rewritten": emptied,
            "attached with rows": filled,
        }
        why: Why | None = "" if gone or back or emptied else "changed" if filled else None
        if why is not None:
            never = self._config.snapshot == "never"
            done = "the target stays as it is" if never else "the table is copied again"
            if gone and not never:
                done += ' (detached_rows = "keep" leaves such rows in the target)'
            texts = [partitions.named(map(self._name, oids), what) for what, oids in happened.items() if oids]
            logger.warning("%s: %s, which does not appear in the log: %s", root.stream, "; ".join(texts), done)
        return why, now.tree(before, unsure, log)

    def _name(self, oid: int) -> str:
        return self._names.get(oid, f"with the oid {oid}")

    def _holds_rows(self, connection: psycopg.Connection[Any], root: Table, part: Part, now: PartitionsNow) -> bool:
        """True also if it cannot be seen: a copy reports what is wrong, and does not make the other tables wait for a lock."""
        if part.oid in now.locked:
            return True
        with contextlib.suppress(TableError), table_errors(root):
            row = connection.execute(f"SELECT EXISTS (SELECT FROM ONLY {part.name})").fetchone()
            return bool(row and row[0])
        return True
