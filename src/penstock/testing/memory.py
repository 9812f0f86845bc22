"""A source that follows a script and a sink that does everything a sink can promise: the kit's two reference connectors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from penstock import failpoints
from penstock.changes import Op
from penstock.changes.keys import Equality
from penstock.changes.old_key import unpack_keys
from penstock.config import Config
from penstock.durable import canonical, disk_errors, fsync, make_directory, publish_once, write_atomic
from penstock.errors import ConfigError, FatalError, StagingLost
from penstock.schema.codec import pack_schema, unpack_schema
from penstock.schema.evolution import EvolutionConfig, fit, follow, widened
from penstock.sink import (
    CommittedEpoch,
    Epoch,
    Positions,
    Receipt,
    SinkConnectorCapabilities,
    SinkContext,
    Task,
    Topic,
    TopicSink,
    WriteResult,
    is_committed,
)
from penstock.source import Position, RangeSource, ReadLimit, Schemas, SourceBatch, SourceContext


@dataclass(frozen=True)
class Crash:
    """In a script: the process that reads this item is killed with SIGKILL, the first time."""


@dataclass(frozen=True)
class Pause:
    """In a script: there is nothing more to read until `MemorySource.release()`."""


class MemorySourceConfig(Config):
    script: tuple[Any, ...] = ()
    """What the source holds, in order: a `SourceBatch`, an Arrow batch, a row, a list of rows, `Crash()` or `Pause()`."""

    path: Path
    """Directory that remembers what was acked, released and crashed, since the processes that know it die."""


class NextItem(Position):
    """The first item that was not read."""

    index: int = 0


class MemorySource(RangeSource[MemorySourceConfig, NextItem]):
    """
    Each item of the script is one split; its place in the script is the position.

    Supports exactly-once. What was acked is gone: reading it again is an error, so that an early ack cannot hide.
    """

    name = "memory"

    @classmethod
    def of(cls, path: Path, *script: Any) -> MemorySource:
        return cls(MemorySourceConfig(path=path, script=script))

    def open(self, context: SourceContext = SourceContext()) -> None:
        super().open(context)
        if not self.config.path.is_dir():
            raise ConfigError(f"{self.config.path} is not a directory", hint="make it before the source is opened")

    def schema(self) -> Schemas:
        return {item.stream: item.records.schema for item in self._items if isinstance(item, SourceBatch)}

    def latest(self, start: NextItem, limit: ReadLimit) -> NextItem:
        rows, index = 0, start.index
        for item in self._items[start.index :]:
            if isinstance(item, Pause) and not self._remembers("released", index):
                break
            size = item.num_rows if isinstance(item, SourceBatch) else 0
            if rows and limit.rows is not None and rows + size > limit.rows:
                break
            rows, index = rows + size, index + 1
        return limit.bounded(NextItem(index=index))

    def split(self, start: NextItem, end: NextItem) -> Sequence[int]:
        return range(start.index, end.index)

    def read(self, split: int) -> Iterator[SourceBatch]:
        if split < self.acked:
            raise FatalError(f"item {split} was acked and is gone", code="PEN-5011")
        item = self._items[split]
        if isinstance(item, Crash) and not self._remembers("crashed", split):
            self._remember("crashed", split)
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(item, SourceBatch):
            yield item

    def ack(self, end: NextItem) -> None:
        if end.index > self.acked:
            write_atomic(self.config.path / "acked", str(end.index).encode())

    @property
    def acked(self) -> int:
        """Up to where the source knows that everything is committed."""
        file = self.config.path / "acked"
        return int(file.read_text()) if file.exists() else 0

    def release(self) -> None:
        """Let the source go on after every pause, in all processes."""
        for index, item in enumerate(self._items):
            if isinstance(item, Pause):
                self._remember("released", index)

    @cached_property
    def _items(self) -> list[SourceBatch | Crash | Pause]:
        return [_item(each) for each in self.config.script]

    def _remembers(self, what: str, index: int) -> bool:
        return (self.config.path / f"{what}-{index}").exists()

    def _remember(self, what: str, index: int) -> None:
        (self.config.path / f"{what}-{index}").touch()


_Key: TypeAlias = tuple[str, ...]


class MemorySinkConfig(EvolutionConfig):
    path: Path
    """Directory that holds the target: for each topic its rows and a log of what was committed."""

    mode: Literal["append", "upsert"] = "append"
    """Keep every row, or the newest of each key."""

    key: tuple[str, ...] = ("id",)
    """Columns that make the key of a row, for `upsert`."""

    partition_by: tuple[str, ...] = ()
    """Columns by whose values rows are kept in files of their own."""


class MemoryReceipt(Receipt):
    files: dict[Topic, list[str]] = Field(default_factory=dict)
    """Names of the staged files."""

    def topics(self) -> Iterable[Topic]:
        return self.files


class MemorySink(TopicSink[MemorySinkConfig, MemoryReceipt]):
    """
    Tasks write Arrow files under fresh names; an epoch of a topic becomes visible when the next entry of its log is
    linked into place, which is also what records it. Entries are numbered by the log and not by the epoch: so two
    commits from one snapshot always meet in one name, whatever runs they are of.
    """

    name = "memory"
    concurrent = True

    def __init__(self, config: MemorySinkConfig) -> None:
        super().__init__(config)
        flags = SinkConnectorCapabilities().with_exactly_once().with_two_phase_commit().with_schema_evolution()
        flags = flags.with_partitioned().with_changelog()
        self.capabilities = flags.with_upsert().with_idempotent() if config.mode == "upsert" else flags
        self._stem = ""
        self._rows: dict[Topic, list[pa.RecordBatch]] = {}

    def open(self, context: SinkContext = SinkContext()) -> None:
        super().open(context)
        make_directory(self.config.path)

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        self._stem = epoch.stem(task)
        self._rows = {}

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        policy, stored, discarded = self.policy(topic), self._stored(topic), 0
        if stored is not None:
            batch, discarded = fit(topic, batch, follow(topic, stored, batch.schema, policy), policy)
        self._rows.setdefault(topic, []).append(batch)
        return WriteResult(batch.num_rows, batch.nbytes, discarded)

    def pre_commit(self, epoch: Epoch) -> MemoryReceipt:
        files: dict[Topic, list[str]] = {}
        for topic, batches in self._rows.items():
            directory = self._topic(topic) / "rows"
            make_directory(directory)
            schema = batches[0].schema
            for batch in batches:
                schema = follow(topic, schema, batch.schema)
            names: list[str] = []
            tables = [
                pa.Table.from_batches(list(alike)) for _, alike in groupby(batches, key=lambda batch: batch.schema)
            ]
            for part in (part for table in tables for part in _partitions(table, self.config.partition_by)):
                names.append(f"{self._stem}-{len(names)}.arrow")
                with disk_errors(), pa.ipc.new_file(str(directory / names[-1]), part.schema) as writer:
                    writer.write_table(part)
            fsync(*(directory / name for name in names))
            files[topic] = names
        return MemoryReceipt(files=files)

    def commit_topic(self, epoch: Epoch, topic: Topic, receipts: Sequence[MemoryReceipt], end: Positions) -> None:
        log = self._log(topic)
        if is_committed(_marker(log, epoch.pipeline), epoch):
            return
        entry = self._entry(epoch, topic, [name for receipt in receipts for name in receipt.files[topic]], end)
        failpoints.hit("commit.before")
        if not publish_once(self._topic(topic) / "log" / f"{len(log):012d}.json", canonical(entry).encode()):
            self.commit_topic(epoch, topic, receipts, end)  # another commit came first: ask again, on what it left

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        return _marker(self._log(topic), pipeline)

    def sweep(self, epoch: Epoch, keep: Sequence[MemoryReceipt]) -> None:
        kept = {name for receipt in keep for names in receipt.files.values() for name in names}
        for file in self.config.path.glob(f"*/rows/{epoch.stem()}-*"):
            if file.name not in kept:
                file.unlink(missing_ok=True)

    def is_seeded(self, topic: Topic) -> bool:
        return (self._topic(topic) / "seeded").exists()

    def mark_seeded(self, topic: Topic) -> None:
        make_directory(self._topic(topic))
        write_atomic(self._topic(topic) / "seeded", b"")

    def visible(self, topic: Topic) -> list[dict[str, Any]]:
        """The rows that a reader of the target sees, in the order they came."""
        log = self._log(topic)
        epochs = [[self._read(topic, name) for name in entry["files"]] for entry in log]
        if self.config.mode == "upsert":
            return _upserted(epochs, self.config.key)
        tables = [table for each in epochs for table in each]
        return pa.concat_tables(tables, promote_options="permissive").to_pylist() if tables else []

    def _entry(self, epoch: Epoch, topic: Topic, files: Sequence[str], end: Positions) -> dict[str, Any]:
        """The entry of the log that shows these files; there is a directory for it."""
        schema = self._stored(topic)
        for name in files:
            path = self._topic(topic) / "rows" / name
            if not path.exists():
                raise StagingLost(f"{path} is gone")
            rows = _open_rows(path).schema
            schema = follow(topic, rows if schema is None else schema, rows)
        marker = CommittedEpoch(incarnation=epoch.incarnation, number=epoch.number, end=dict(end))
        make_directory(self._topic(topic) / "log")
        return {
            "pipeline": epoch.pipeline,
            "marker": marker.model_dump(mode="json"),
            "files": list(files),
            "schema": pack_schema(schema) if schema is not None else None,
        }

    def _read(self, topic: Topic, name: str) -> pa.Table:
        """A file's rows, in the types that the target has by now."""
        rows, stored = _open_rows(self._topic(topic) / "rows" / name).read_all(), self._stored(topic)
        fields = [stored.field(each.name) if stored and each.name in stored.names else each for each in rows.schema]
        columns = [widened(values, field.type) for values, field in zip(rows.columns, fields, strict=True)]
        return pa.Table.from_arrays(columns, names=rows.column_names)

    def _topic(self, topic: Topic) -> Path:
        return self.config.path / quote(topic.removeprefix("/"), safe="")

    def _stored(self, topic: Topic) -> pa.Schema | None:
        """The columns of the target; None: it is not there."""
        log = self._log(topic)
        return unpack_schema(log[-1]["schema"]) if log else None

    def _log(self, topic: Topic) -> list[dict[str, Any]]:
        return [json.loads(file.read_bytes()) for file in sorted((self._topic(topic) / "log").glob("*.json"))]


def _item(item: Any) -> SourceBatch | Crash | Pause:
    if isinstance(item, SourceBatch | Crash | Pause):
        return item
    if isinstance(item, pa.RecordBatch):
        return SourceBatch(item, stream="rows")
    return SourceBatch(pa.RecordBatch.from_pylist(item if isinstance(item, list) else [item]), stream="rows")


def _marker(log: list[dict[str, Any]], pipeline: str) -> CommittedEpoch | None:
    markers = [entry["marker"] for entry in log if entry["pipeline"] == pipeline]
    return CommittedEpoch.model_validate(markers[-1]) if markers else None


def _open_rows(path: Path) -> Any:
    return pa.ipc.open_file(pa.memory_map(str(path)))


def _partitions(table: pa.Table, columns: Sequence[str]) -> Iterator[pa.Table]:
    if not columns:
        yield table
        return
    for values in table.group_by(list(columns)).aggregate([]).to_pylist():
        mask = pa.chunked_array([pa.array([True] * table.num_rows)])
        for name, value in values.items():
            same = pc.is_null(table[name]) if value is None else pc.fill_null(pc.equal(table[name], value), False)
            mask = pc.and_(mask, same)
        yield table.filter(mask)


def _upserted(epochs: list[list[pa.Table]], key: Sequence[str]) -> list[dict[str, Any]]:
    found: dict[_Key, dict[str, Any]] = {}
    for tables in epochs:
        changes = [change for table in tables for change in _changes(table, key)]
        for row, place, old in sorted(changes, key=lambda change: change[0].get("_position") or ""):
            _upsert(found, row, place, old)
    names = dict.fromkeys(name for row in found.values() for name in row)
    return [{name: row.get(name) for name in names} for row in found.values()]


def _changes(table: pa.Table, key: Sequence[str]) -> Iterator[tuple[dict[str, Any], _Key, _Key | None]]:
    """Every row, its key, and the key that it has left."""
    keys, equality = table.select(list(key)), Equality.of([table.schema], key)
    texts = table.column("_old_key") if "_old_key" in table.column_names else pa.nulls(table.num_rows, pa.string())
    left = iter(_tuples(equality.canonical(unpack_keys(texts.drop_null(), keys.schema))))
    for row, place, text in zip(table.to_pylist(), _tuples(equality.canonical(keys)), texts.to_pylist(), strict=True):
        yield row, place, next(left) if text is not None else None


def _tuples(keys: pa.Table) -> list[_Key]:
    return [tuple(map(repr, row.values())) for row in keys.to_pylist()]  # as text, since NaN does not equal itself


def _upsert(found: dict[_Key, dict[str, Any]], row: dict[str, Any], place: _Key, old: _Key | None) -> None:
    if row.get("_op") == Op.TRUNCATE:
        found.clear()
    elif row.get("_op") == Op.DELETE:
        found.pop(place, None)
    else:
        moved = found.pop(old, None) if old else None
        said = {name: value for name, value in row.items() if name not in (row.get("_unchanged") or ())}
        found[place] = {**(found.get(place) or moved or {}), **said}
