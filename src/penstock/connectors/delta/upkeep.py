"""Keep a Delta table cheap to commit to: join small files, and remove files that no reader needs any more."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake.exceptions import DeltaError

from penstock import store
from penstock.connectors.delta.apply import index_of
from penstock.connectors.delta.columns import delta_schema
from penstock.connectors.delta.config import DeltaConfig
from penstock.connectors.delta.files import Log, TableFile
from penstock.connectors.delta.purge import PART_ROWS, Purges
from penstock.connectors.delta.rewrite import Rewrite, write
from penstock.connectors.delta.table import Table
from penstock.connectors.lake import lists
from penstock.connectors.lake.staging import Stage
from penstock.connectors.lake.targets import HIDDEN
from penstock.errors import ConnectorError
from penstock.sink import Epoch, Task, Topic
from penstock.store import Place

if TYPE_CHECKING:
    from penstock.connectors.delta.commit import DeltaTarget

logger = logging.getLogger("penstock.delta")

REWRITER = Task(99_999)
"""Task number in the names of files that the driver writes."""

DRIVER_BUFFER_BYTES = 4 << 20
"""Rows that the driver buffers: it holds other things as well, and is there for as long as the pipeline."""

FAN = 8
"""Files of about one size that are joined: each row is rewritten once per eightfold growth of its file."""

JOINED_ROWS = 1_000_000
"""Most rows of a joined file, so that one run takes a few seconds at most."""

SMALL_ROWS = JOINED_ROWS // 4
"""A file with this many rows stays as it is: joining two or three of them costs more than it saves."""

RUN_SECS = 10.0
"""Longest time for one run, give or take a file; the next run goes on."""

_AT_ONCE = 500
"""Files that are removed by one request."""

FIRST_JOIN = 5
"""Small files are first joined after this many epochs of a run, since a run may be short."""


@dataclass
class Due:
    """When the table of a topic needs upkeep."""

    epochs: int = 0
    removed_at: float = field(default_factory=time.monotonic)

    def joins(self, config: DeltaConfig) -> bool:
        self.epochs += 1
        every = config.optimize_every_epochs
        return bool(every) and self.epochs % every == min(FIRST_JOIN, every - 1)

    def removes(self, config: DeltaConfig) -> bool:
        due = bool(config.vacuum_every_secs) and time.monotonic() - self.removed_at >= config.vacuum_every_secs
        if due:
            self.removed_at = time.monotonic()
        return due


class Upkeep:
    """Upkeep of one topic's table, in between its epochs, on the driver."""

    def __init__(self, target: DeltaTarget) -> None:
        self._target = target
        self._due = Due()
        self._purges = Purges(target)

    def run(self, epoch: Epoch, loaded: Table | None) -> None:
        """
        Join small files, remove dead ones and write worn ones again, when it is time.

        Whatever goes wrong, the epoch is committed. `loaded` is the table as the commit has left it.
        """
        target, config = self._target, self._target.config
        joins, removes = self._due.joins(config), self._due.removes(config)
        try:
            self._purges.run(epoch, loaded)
            if not joins and not removes:
                return
            table = target.load()
            # Where only rows are added, files with deletion vectors of somebody else stay as they are.
            if joins and table is not None and (config.upserts or not table.has_vectors()):
                self._join(epoch, table)
            if removes and table is not None:
                remove_dead_files(table)
                if config.upserts and table.has_vectors():
                    remove_dead_vectors(table)
        except (DeltaError, ConnectorError, OSError, pa.ArrowException) as error:
            logger.warning("%s: upkeep of its table is postponed: %s", target.topic, error)
            target.forget()

    def close(self) -> None:
        self._purges.close()

    def begin(self, epoch: Epoch) -> Stage:
        """A stage for files that the driver writes itself."""
        return Stage(epoch, REWRITER, self._target.sink.targets, self._target.sink.spec(), DRIVER_BUFFER_BYTES)

    def sweep(self, epoch: Epoch) -> None:
        """Remove files that the driver has written for this topic and that the table does not name."""
        live: set[str] | None = None

        def is_kept(_: Topic, place: Place) -> bool:
            nonlocal live
            live = self._target.live_files(epoch.pipeline) if live is None else live
            return place.name in live

        stem = f"{epoch.stem()}-{REWRITER.partition:05d}-"
        lists.sweep(self._target.root, epoch, is_kept, stem, only=self._target.topic)

    def _join(self, epoch: Epoch, table: Table) -> None:
        topic, schema = self._target.topic, delta_schema(self._target.topic, table.columns())
        groups = list(_groups([file for file in Log(table).files() if file.path not in self._target.known.busy]))
        if index_of(self._target.config, table) is not None:  # its files stay as they are, whatever the epochs change
            groups, large = _few(groups)
            self._purges.join(large)
        try:
            files = join_small_files(topic, table, schema, partial(self.begin, epoch), groups)
            if files.removes:
                table.replace(files.adds, files.removes)
        finally:  # files that were begun and that the table has not taken
            self.sweep(epoch)
            pa.default_memory_pool().release_unused()


def _few(groups: Iterable[list[TableFile]]) -> tuple[list[list[TableFile]], list[TableFile]]:
    """Groups of no more than `PART_ROWS` rows together; and one that has more by itself, to be joined a part at a time."""
    few: list[list[TableFile]] = []
    large: list[TableFile] = []
    room = PART_ROWS
    for group in groups:
        rows = sum(file.rows for file in group)
        if rows <= room:
            few.append(group)
            room -= rows
        elif rows > PART_ROWS and not large:
            large = group
    return few, large


def join_small_files(
    topic: Topic, table: Table, schema: pa.Schema, begin: Callable[[], Stage], groups: Iterable[Sequence[TableFile]]
) -> Rewrite:
    """Write files each of which can replace a group of small ones of the loaded version; nothing of it is visible."""
    result, deadline = Rewrite(), time.monotonic() + RUN_SECS
    stages: list[Stage] = []
    try:
        for group in groups:
            if time.monotonic() > deadline:
                break
            stages.append(begin())
            for file in sorted(
                group, key=lambda each: each.path
            ):  # names begin with the epoch: rows stay in their order
                for rows in file.read(table.path, schema):
                    write(stages[-1], topic, rows)
            stages[-1].end(topic)
            result.removes += [file.removed() for file in group]
        return result.take(stages)
    except BaseException:
        for stage in stages:
            stage.abandon()
        raise


def remove_dead_files(table: Table) -> int:
    """
    Remove files that the log has removed for longer than the table keeps them; gives how many.

    Only files that the log names are considered, and so never the files of an epoch in flight.
    """
    dead = table.delta.vacuum(dry_run=True, full=False)
    live = {os.path.basename(uri) for uri in table.delta.file_uris()} if dead else set()
    doomed = [path for path in dead if HIDDEN not in path.split("/") and os.path.basename(path) not in live]
    deadline, removed = time.monotonic() + RUN_SECS, 0
    while removed < len(doomed) and time.monotonic() < deadline:
        group = doomed[removed : removed + _AT_ONCE]
        store.delete(table.path / path for path in group)
        removed += len(group)
    return removed


def remove_dead_vectors(table: Table) -> int:
    """
    Remove files of deletion vectors that no version needs any more; gives how many.

    The log forgets in time which vectors it has removed. So every such file is looked at, and those go that are older than
    the table keeps files, that no file of the table names, and that were not removed lately.
    """
    entries, kept_secs = table.entries, retention_secs(table.delta.metadata().configuration)
    since = time.time() - kept_secs
    live = entries.vector_files() | {name for name, gone in entries.gone.items() if gone / 1000 > since}
    vectors = [name for name in store.names(table.path) if re.fullmatch(r"deletion_vector_.*\.bin", name)]
    found = store.heads([table.path / name for name in vectors if name not in live])
    dead = [entry.place for entry in found if entry is not None and entry.modified_ns / 1e9 < since]
    store.delete(dead)
    return len(dead)


def retention_secs(configuration: Mapping[str, str]) -> float:
    """How long a table keeps files that it no longer uses; a week if it does not say it as `interval 3 days`."""
    said = configuration.get("delta.deletedFileRetentionDuration", "")
    match = re.fullmatch(r"(?:interval\s+)?(\d+)\s+(second|minute|hour|day|week)s?", said.strip().lower())
    return int(match[1]) * _SECS[match[2]] if match else 7 * _SECS["day"]


_SECS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}


def _groups(files: Sequence[TableFile]) -> Iterator[list[TableFile]]:
    """Files to be joined, the smallest first: of one partition, of about one size, and not more rows than `JOINED_ROWS`."""
    alike: dict[tuple[int, str], list[TableFile]] = defaultdict(list)
    for file in files:
        if file.records is not None and file.records < SMALL_ROWS:
            size = max(file.records, 1).bit_length() // 3  # eightfold
            alike[size, repr(sorted(file.partition.items()))].append(file)
    for _, found in sorted(alike.items(), key=lambda item: item[0]):
        if len(found) < FAN:
            continue
        group: list[TableFile] = []
        for file in found:
            if sum(each.rows for each in group) + file.rows > JOINED_ROWS:
                yield from [group] if len(group) > 1 else []
                group = []
            group.append(file)
        yield from [group] if len(group) > 1 else []
