"""What a task writes of an epoch: files that are split by partition, bounded in size, and durable before they are named."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types
from pydantic import BaseModel, ConfigDict, Field

from penstock import durable, store
from penstock.connectors.lake import lists
from penstock.connectors.lake.partitions import Directories, Layout, hive
from penstock.connectors.lake.targets import Targets
from penstock.errors import SchemaError
from penstock.schema.codec import pack_schema
from penstock.schema.evolution import Widens, follow
from penstock.sink import Epoch, Receipt, Task, Topic
from penstock.store import Place

STAGED = ".staged"
"""Suffix of staged files that a reader of the target could otherwise take for published ones."""

ROW_GROUP_ROWS = 1 << 17
SAMPLE_ROWS = 4096
"""Every fourth block of this many rows shows whether the values of a column repeat."""
BUFFER_BYTES = 32 << 20
"""Rows that a task may buffer, over all its files, so that row groups get large."""


class StagedFile(BaseModel):
    """One file of a topic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """Path of the published file, relative to the topic's target."""
    rows: int
    bytes: int
    partition: dict[str, str | None] = {}
    stats: str | None = None


class StagedTopic(BaseModel):
    """A task's files of one topic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listed: str
    """Name of the task's list of begun files, which is dropped once the topic is committed."""
    columns: str
    """The schema of the topic's rows, partition columns included, as `pack_schema` writes it."""
    files: list[StagedFile] = []
    renews: bool = False
    """The target is cleared before these rows, which may have other types than it."""


class StagedFiles(Receipt):
    staged: dict[Topic, StagedTopic] = Field(default_factory=dict)

    def topics(self) -> Iterable[Topic]:
        return self.staged

    def names(self) -> set[str]:
        """The names of all files."""
        return {os.path.basename(file.path) for staged in self.staged.values() for file in staged.files}


class Part(Protocol):
    """One file being written."""

    def write(self, table: pa.Table) -> None: ...

    def close(self) -> str | None:
        """End the file; gives statistics for the receipt."""

    def abandon(self) -> None:
        """Give the file up: in an object store it never appears."""

    @property
    def size(self) -> int:
        """Bytes of the file, once it has ended."""


class ParquetPart:
    """A Parquet file, written row group by row group. Columns get a dictionary if their values repeat."""

    size = 0

    def __init__(self, path: Place, schema: pa.Schema, compression: str, **options: Any) -> None:
        self.metadata: list[pq.FileMetaData] = []
        self._schema = schema
        self._options = {"compression": compression, "metadata_collector": self.metadata, **options}
        self._path = path
        self._upload: store.Upload | None = None
        self._writer: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        groups = max(1, round(table.num_rows / ROW_GROUP_ROWS))  # of equal size: each has a cost
        self._begun(table).write_table(table, row_group_size=max(1, -(-table.num_rows // groups)))

    def close(self) -> str | None:
        self._begun(self._schema.empty_table()).close()
        assert self._upload is not None
        self.size = self._upload.finish()
        return None

    def abandon(self) -> None:
        if self._upload is not None and self._writer is not None:
            self._upload.abandon()
            self._writer.close()
            self._upload.file.close()

    def _begun(self, table: pa.Table) -> pq.ParquetWriter:
        if self._writer is None:
            # A dictionary of values that hardly repeat takes twice the time and more room than the values.
            sample = _sample(table)
            repeating = [name for name in table.column_names if _repeats(sample.column(name))]
            self._upload = store.writer(self._path)
            options = {"use_dictionary": repeating, **self._options}
            self._writer = pq.ParquetWriter(self._upload.file, self._schema, **options)
        return self._writer


def _sample(table: pa.Table) -> pa.Table:
    firsts = range(0, max(table.num_rows, 1), 4 * SAMPLE_ROWS)
    return pa.concat_tables([table.slice(first, SAMPLE_ROWS) for first in firsts])


def _repeats(column: pa.ChunkedArray) -> bool:
    is_flat = types.is_primitive(column.type) or types.is_decimal(column.type) or _is_text(column.type)
    return not is_flat or 2 * pc.count_distinct(column).as_py() < len(column)


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind))


@dataclass
class _Open:
    """A file that still takes rows."""

    topic: Topic
    place: Place
    part: Part
    path: str
    partition: dict[str, str | None]
    rows: int = 0
    held: list[pa.RecordBatch] = field(default_factory=list)
    held_rows: int = 0
    held_bytes: int = 0

    def take(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        self.held.append(batch)
        self.held_rows += batch.num_rows
        self.held_bytes += batch.nbytes

    def flush(self) -> int:
        """Write what was held back; gives its size."""
        if self.held:
            self.part.write(pa.Table.from_batches(self.held))
        freed, self.held, self.held_rows, self.held_bytes = self.held_bytes, [], 0, 0
        return freed


@dataclass(frozen=True)
class FileSpec:
    """How the files of a sink are named, laid out and written."""

    begin: Callable[[Place, pa.Schema], Part]
    """Begins the file at a path."""
    suffix: str = ".parquet"
    place: Callable[[Place, str], Place] = lambda target, path: target / path
    """From a target and a published path: where the file is while it is staged."""
    layout: Layout = field(default_factory=Directories)
    target_file_rows: int = 5_000_000
    max_open_files: int = 64
    widens: Widens = lambda old, new: False
    """Which types of a topic's columns may grow from one batch to the next."""


@dataclass
class Stage:
    """
    What one task writes of one epoch: files split by partition and ended at `target_file_rows`, in bounded memory.

    A batch with another schema begins another file. Every file is listed before it is begun, so that a sweep finds it.
    """

    epoch: Epoch
    task: Task
    targets: Targets
    spec: FileSpec
    buffer_bytes: int = BUFFER_BYTES

    def __post_init__(self) -> None:
        self.stem = self.epoch.stem(self.task)
        self._count = 0
        self._held_bytes = 0
        self._open: OrderedDict[tuple[Topic, tuple[str | None, ...], pa.Schema], _Open] = OrderedDict()
        self._staged: dict[Topic, StagedTopic] = {}
        self._schemas: dict[Topic, pa.Schema] = {}
        self._places: list[Place] = []
        self._lists: dict[Topic, lists.Begun] = {}

    def schema(self, topic: Topic) -> pa.Schema | None:
        """The columns of all rows of the topic so far."""
        return self._schemas.get(topic)

    def last_schema(self, topic: Topic) -> pa.Schema | None:
        """The schema of the topic's newest open file."""
        return next((key[2] for key in reversed(self._open) if key[0] == topic), None)

    def write(self, topic: Topic, batch: pa.RecordBatch) -> None:
        if self._schemas.get(topic) != batch.schema:
            self._meet(topic, batch.schema)
        with durable.disk_errors(str(self.targets.claim(topic))):
            for values, rows in self.spec.layout.split(topic, batch):
                self._write(topic, values, rows)

    def put(self, topic: Topic, name: str, data: bytes) -> None:
        """Write a file of another kind, whole. It is swept and made durable with the others, and not part of the receipt."""
        target = self.targets.claim(topic)
        with durable.disk_errors(str(target)):
            self._begin_list(topic)
            self._lists[topic].note(target / name)
            store.put(target / name, data)
        self._places.append(target / name)

    def flush(self) -> None:
        with durable.disk_errors(str(self.targets.root)):
            for each in self._open.values():
                each.flush()
        self._held_bytes = 0

    def end(self, topic: Topic) -> None:
        """End the topic's files: its next rows go into a later file, for sinks that read the files in their order."""
        with durable.disk_errors(str(self.targets.root)):
            for key in [key for key in self._open if key[0] == topic]:
                self._end(self._open.pop(key))

    def finish(self) -> dict[Topic, StagedTopic]:
        """End every file and make all of them durable."""
        return finish([self])[0]

    def abandon(self) -> None:
        """Close files that were not finished; `sweep` removes them."""
        for each in self._open.values():
            # A full disk was already reported where it happened; closing then fails too.
            with contextlib.suppress(OSError, RuntimeError):
                each.part.abandon()
        self._open.clear()

    def end_all(self) -> set[Place]:
        """End every file; gives the files, and every directory between one of them and the root."""
        with durable.disk_errors(str(self.targets.root)):
            for each in list(self._open.values()):
                self._end(each)
        self._open.clear()
        above = {each for place in self._places for each in _up_to(place, self.targets.root)}
        return above.union(self._places)

    def staged(self) -> dict[Topic, StagedTopic]:
        """The files of each topic that were ended, for the receipt."""
        return {
            topic: staged.model_copy(update={"columns": pack_schema(self._schemas.get(topic, pa.schema([])))})
            for topic, staged in self._staged.items()
        }

    def _meet(self, topic: Topic, schema: pa.Schema) -> None:
        """Widen the topic's schema by that of a batch; the topic's first batch begins its list of files."""
        if len(set(schema.names)) < len(schema.names):
            raise SchemaError(f"two columns of {topic} have the same name: {', '.join(schema.names)}", code="PEN-4002")
        self.spec.layout.check(topic, schema)
        self._schemas[topic] = follow(topic, self._schemas.get(topic, schema), schema, sink_widens=self.spec.widens)
        self._begin_list(topic)

    def _begin_list(self, topic: Topic) -> None:
        if topic not in self._staged:
            store.make_directory(self.targets.claim(topic))
            with durable.disk_errors(str(self.targets.root)):
                begun = self._lists[topic] = lists.begin(self.targets.lists_of(topic), self.epoch, self.stem, topic)
            self._staged[topic] = StagedTopic(listed=begun.name, columns="")

    def _write(self, topic: Topic, values: tuple[str | None, ...], rows: pa.RecordBatch) -> None:
        key = (topic, values, rows.schema)
        each = self._open.get(key) or self._start(key)
        self._open.move_to_end(key)
        each.take(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= self.buffer_bytes:
            self.flush()
        elif each.held_rows >= ROW_GROUP_ROWS:
            self._held_bytes -= each.flush()
        if each.rows >= self.spec.target_file_rows:
            self._end(self._open.pop(key))
        elif len(self._open) > self.spec.max_open_files:
            self._end(self._open.popitem(last=False)[1])

    def _start(self, key: tuple[Topic, tuple[str | None, ...], pa.Schema]) -> _Open:
        topic, values, schema = key
        partition = dict(zip(self.spec.layout.names, values, strict=True))
        path = "/".join([*hive(partition), f"{self.stem}-{self._count:04d}{self.spec.suffix}"])
        self._count += 1
        place = self.spec.place(self.targets.claim(topic), path)
        self._lists[topic].note(place)
        if isinstance(place, Path):
            place.parent.mkdir(parents=True, exist_ok=True)
        self._open[key] = _Open(topic, place, self.spec.begin(place, schema), path, partition)
        return self._open[key]

    def _end(self, each: _Open) -> None:
        self._held_bytes -= each.flush()
        stats = each.part.close()
        self._places.append(each.place)
        self._staged[each.topic].files.append(
            StagedFile(
                path=each.path,
                rows=each.rows,
                bytes=each.part.size,
                partition=each.partition,
                stats=stats,
            )
        )


def _up_to(place: Place, root: Place) -> list[Place]:
    """The directories above a place, up to the root; none if it is not below it."""
    found: list[Place] = []
    for each in place.parents:
        found.append(each)
        if each == root:
            return found
    return []


def finish(stages: Sequence[Stage]) -> list[dict[Topic, StagedTopic]]:
    """End every file of all stages and make them durable: each file and each directory is synced once."""
    places = {place for stage in stages for place in stage.end_all()}
    store.sync(sorted(places))
    return [stage.staged() for stage in stages]
