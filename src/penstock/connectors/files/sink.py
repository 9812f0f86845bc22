"""Write topics as Parquet or JSON lines files, each epoch exactly once."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import model_validator

from penstock import durable, failpoints, store
from penstock.abilities import first_of
from penstock.connectors.lake.commit import Commit, LakeTarget
from penstock.connectors.lake.partitions import Directories
from penstock.connectors.lake.sink import LakeConfig, LakeSink
from penstock.connectors.lake.staging import STAGED, FileSpec, ParquetPart, Part, Stage, StagedFile
from penstock.connectors.lake.targets import HIDDEN
from penstock.connectors.lake.task import LakeTask
from penstock.connectors.lake.types import has_all
from penstock.errors import ConfigError, FatalError
from penstock.formats import jsonl
from penstock.schema import key_of
from penstock.schema.codec import pack_schema, unpack_schema
from penstock.schema.evolution import Widens, becomes_double, follow
from penstock.sink import CommittedEpoch, Epoch, Task, Topic, WriteResult
from penstock.store import Place

FORMAT = 1
"""Version of the ledger; a newer one is refused."""


class FilesSinkConfig(LakeConfig):
    format: Literal["parquet", "jsonl"] = "parquet"
    """What the files hold."""

    compression: Literal["zstd", "snappy", "gzip", "none"] | None = None
    """Default: zstd for Parquet, none for JSON lines, which take gzip or none."""

    @model_validator(mode="after")
    def _known_compression(self) -> FilesSinkConfig:
        if self.format == "jsonl" and self.compression in ("zstd", "snappy"):
            raise ValueError('JSON lines are compressed with "gzip" or "none"')
        return self


class Published(CommittedEpoch):
    """One entry of the ledger: an epoch of the topic, and the files that hold it."""

    format: int = FORMAT
    topic: Topic
    columns: str
    """The schema of the topic as of this epoch, as `pack_schema` writes it."""
    files: list[StagedFile]


class FilesSink(LakeSink[FilesSinkConfig]):
    """
    Tasks write files under `_staging`; the driver commits an epoch of a topic by creating the next entry of the ledger
    (`_penstock/<pipeline>/<sequence>.json`), and then moves the files that the entry names to their places.

    Supports exactly-once: no file is in its place before the entry that names it. A reader of the plain files sees
    those of one epoch appear one after the other; `read_published` goes by the ledger and sees whole epochs only. Topics
    may be committed at the same time.
    """

    name = "files"

    def spec(self) -> FileSpec:
        config = self.config
        gzip = ".gz" if config.compression == "gzip" else ""
        return FileSpec(
            begin=self._begin_file,
            suffix=".parquet" if config.format == "parquet" else f".jsonl{gzip}",
            place=_staged,
            layout=Directories(config.partition_by),
            widens=self.widens,
            target_file_rows=config.target_file_rows,
            max_open_files=config.max_open_files,
        )

    def widens(self, old: pa.DataType, new: pa.DataType) -> bool:
        """Numbers in text may get fractions; of Parquet files many readers want one type for all."""
        return has_all(old, new) or (self.config.format == "jsonl" and becomes_double(old, new))

    def read_topic(self, topic: Topic) -> pa.Table | None:
        found = read_published(self.target(topic).path)
        return found if found.num_columns else None

    def first_rows(self, topic: Topic, rows: int) -> pa.Table | None:
        return first_of(_published(self.target(topic).path), rows)

    def can_be_double(self, topic: Topic, column: str) -> bool:
        return self.config.format == "jsonl" and column not in self.config.partition_by

    def task(self, epoch: Epoch, task: Task) -> LakeTask:
        return FilesTask(self, Stage(epoch, task, self.targets, self.spec()))

    def make_target(self, topic: Topic) -> LakeTarget[Any]:
        return FilesTarget(topic, self.targets.claim(topic), self.targets.root, self.widens)

    def _begin_file(self, path: Place, schema: pa.Schema) -> Part:
        if self.config.format == "parquet":
            return ParquetPart(path, schema, self.config.compression or "zstd")
        return _JsonLines(path, self.config.compression)


class FilesTask(LakeTask):
    def write(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        rows, discarded = self.fit(topic, _plain(batch), key_of(batch.schema))
        if rows.num_rows:
            self.stage.write(topic, rows)
        return WriteResult(rows.num_rows, rows.nbytes, discarded)


class FilesTarget(LakeTarget["FilesTarget"]):
    """The directory of one topic. It needs no creating, so that it is always there."""

    def __init__(self, topic: Topic, path: Place, root: Place, widens: Widens) -> None:
        super().__init__(topic, path, root)
        self._widens = widens
        self._ledgers: dict[str, _Ledger] = {}

    @property
    def name(self) -> str:
        return str(self.path)

    def load(self) -> FilesTarget:
        return self

    def ledger(self, pipeline: str) -> _Ledger:
        return self._ledgers.setdefault(pipeline, _Ledger(self.path, pipeline, self.topic))

    def marker(self, loaded: FilesTarget, pipeline: str) -> Published | None:
        return self.ledger(pipeline).newest()

    def settle(self, loaded: FilesTarget, epoch: Epoch) -> None:
        self.ledger(epoch.pipeline).finish()

    def attempt(self, commit: Commit, loaded: FilesTarget | None) -> bool:
        ledger = self.ledger(commit.epoch.pipeline)
        ledger.finish()  # a crash may have interrupted the last epoch of a run that this one takes over
        newest = ledger.newest()
        schema = unpack_schema(newest.columns) if newest else commit.schemas()[0]
        for rows in commit.schemas():
            schema = follow(self.topic, schema, rows, sink_widens=self._widens)
        marker = commit.marker().model_dump()
        entry = Published(**marker, topic=self.topic, columns=pack_schema(schema), files=commit.files)
        failpoints.hit("commit.before")
        return ledger.append(entry)

    def tidy(self, commit: Commit) -> None:
        ledger = self.ledger(commit.epoch.pipeline)
        ledger.finish()
        newest = ledger.newest()
        if newest is not None and ledger.recorded != newest.columns:
            store.put(self.path / HIDDEN / _SCHEMA, newest.columns.encode())
            ledger.recorded = newest.columns

    def place(self, commit: Commit, file: StagedFile) -> Place:
        return _staged(self.path, file.path)

    def live_files(self, pipeline: str) -> set[str]:
        self.ledger(pipeline).finish()  # files that the ledger names are moved to their places, out of a sweep's reach
        return set()

    def schema(self) -> pa.Schema | None:
        with contextlib.suppress(FileNotFoundError):
            return unpack_schema((self.path / HIDDEN / _SCHEMA).read_text())
        return None

    def is_seeded(self) -> bool:
        return (self.path / HIDDEN / _SEEDED).exists()

    def mark_seeded(self, now: pa.Schema | None) -> None:
        store.make_directory(self.path / HIDDEN)
        store.put(self.path / HIDDEN / _SEEDED, b"{}")


def read_published(target: str | os.PathLike[str] | store.ObjectPath) -> pa.Table:
    """
    Exactly the committed rows of a topic's directory, with the columns of its newest epoch; whole epochs only.

    Rows come in the order of the epochs; columns that an older file lacks are null. `target` may be a place of an object
    store, as `store.at` gives it.
    """
    place = target if isinstance(target, store.ObjectPath) else Path(target)
    tables = list(_published(place))
    return pa.concat_tables(tables) if tables else pa.table({})


def _published(place: Place) -> Iterator[pa.Table]:
    """The rows of one file after the other, with the columns of all epochs; first a table without rows."""
    found = [entry.place for entry in store.listed(place / HIDDEN)]
    entries = [_read_entry(each) for each in found if _ENTRY.fullmatch(str(each).removeprefix(f"{place / HIDDEN}/"))]
    schemas = [unpack_schema(entry.columns) for entry in entries]
    if not schemas:
        return
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    yield schema.empty_table()
    yield from (_read(place, file, schema) for entry in entries for file in entry.files)


class _Ledger:
    """The epochs of one topic by one pipeline, one file each; to create the next file is to commit."""

    def __init__(self, target: Place, pipeline: str, topic: Topic) -> None:
        self.target = target
        self.directory = target / HIDDEN / quote(pipeline, safe="")
        self.recorded: str | None = None
        self._topic = topic
        self._last = 0
        self._newest: Published | None = None
        self._finished = 0
        self._synced = 0

    def newest(self) -> Published | None:
        """The newest entry, looked for after the last one that is known."""
        if self._newest is None:
            self._last = max((int(name[:12]) for name in store.names(self.directory) if name[:1].isdigit()), default=0)
            self._read()
        elif self._newest is not None and not self._entry(self._last).exists():
            raise FatalError(
                f"{self._entry(self._last)} is gone: {self.target} was dropped while the pipeline ran",
                code="PEN-5010",
                hint="restore it; or stop, and start over with `penstock offsets reset FILE`",
            )
        while self._entry(self._last + 1).exists():
            self._last += 1
            self._read()
        return self._newest

    def append(self, entry: Published) -> bool:
        """Create the entry after the newest one that was seen; False if somebody else has."""
        store.make_directory(self.directory)
        text = durable.canonical(entry.model_dump(mode="json"))
        is_ours = store.create(self._entry(self._last + 1), text.encode())
        if is_ours and self._synced and self._synced == self._last:
            self._synced += 1
        return is_ours

    def finish(self) -> None:
        """Move the files of the newest entry to their places; does what is left to do, also after a crash in here."""
        entry = self.newest()
        if entry is None or self._finished == self._last:
            return
        self._sync_entry()
        staged = [_staged(self.target, file.path) for file in entry.files]
        moves = [
            (each, self.target / file.path)
            for each, file, found in zip(staged, entry.files, store.heads(staged), strict=True)
            if found is not None
        ]
        for each, place in moves:
            with contextlib.suppress(FileNotFoundError):  # a twin of this process may be moving it too
                store.copy(each, place)
        places = [place for _, place in moves]
        above = {each for place in places for each in place.parents if self.target in each.parents}
        store.sync([*places, *above])
        store.delete(each for each, _ in moves)
        self._finished = self._last

    def _sync_entry(self) -> None:
        """The process that created the entry, or a directory above it, may have died before its fsync."""
        if self._synced == self._last:
            return
        above = () if self._synced else (self.directory, self.directory.parent)
        store.sync([self._entry(self._last), *above])
        self._synced = self._last

    def _entry(self, sequence: int) -> Place:
        return self.directory / f"{sequence:012d}.json"

    def _read(self) -> None:
        if not self._last:
            return
        entry = _read_entry(self._entry(self._last))
        if entry.topic != self._topic:
            raise ConfigError(
                f"{self.target} holds the topic {entry.topic}, and {self._topic} is to be written there too",
                code="PEN-1011",
                hint='give each topic a directory of its own: path = ".../{topic}"',
            )
        self._newest = entry


class _JsonLines:
    """A file of JSON lines."""

    size = 0

    def __init__(self, path: Place, compression: str | None) -> None:
        self._upload = store.writer(path)
        self._file = pa.output_stream(self._upload.file, compression="gzip" if compression == "gzip" else None)

    def write(self, table: pa.Table) -> None:
        for batch in table.to_batches():
            for piece in jsonl.encode(batch):
                self._file.write(piece)

    def close(self) -> str | None:
        self._file.close()
        self.size = self._upload.finish()
        return None

    def abandon(self) -> None:
        self._upload.abandon()
        self._file.close()


_SCHEMA = ".schema"
_SEEDED = ".seeded"


_ENTRY = re.compile(r"[^./][^/]*/\d+\.json")


def _staged(target: Place, path: str) -> Place:
    return target / "_staging" / (os.path.basename(path) + STAGED)


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """
    The batch as it is compared and written: dictionaries decoded, every column nullable, metadata dropped.

    Columns of type null are left out: such a column gets its type with its first value.
    """
    kept = [(f.name, c) for f, c in zip(batch.schema, batch.columns, strict=True) if not pa.types.is_null(f.type)]
    columns = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for _, c in kept]
    return pa.RecordBatch.from_arrays(columns, names=[name for name, _ in kept])


def _read_entry(path: Place) -> Published:
    try:
        stored = json.loads(path.read_bytes())
        if stored["format"] <= FORMAT:
            return Published.model_validate(stored)
    except (ValueError, KeyError, TypeError) as error:  # ValidationError is a ValueError
        raise FatalError(f"{path} is corrupt: {error}", code="PEN-5020", hint="restore the file from a copy") from error
    raise FatalError(f"{path} has format {stored['format']}, and this Penstock knows {FORMAT}", code="PEN-5006")


def _read(target: Place, file: StagedFile, schema: pa.Schema) -> pa.Table:
    for path in (target / file.path, _staged(target, file.path), target / file.path):  # it may be moved meanwhile
        with contextlib.suppress(FileNotFoundError):
            table = _read_file(path, file, schema)
            break
    else:
        raise FatalError(f"{target / file.path} was published and is gone", code="PEN-5010")
    columns = []
    for field in schema:
        if field.name in file.partition:
            text = pa.scalar(file.partition[field.name], pa.string())
            columns.append(pa.repeat(pc.cast(text, field.type), file.rows))
        elif field.name in table.column_names:
            columns.append(table.column(field.name).cast(field.type))  # a struct may have more fields by now
        else:
            columns.append(pa.nulls(file.rows, field.type))
    return pa.table(columns, schema)


def _read_file(path: Place, file: StagedFile, schema: pa.Schema) -> pa.Table:
    if file.path.endswith(".parquet"):
        return pq.ParquetFile(store.reader(path)).read()
    stream = pa.input_stream(store.reader(path), compression="gzip" if file.path.endswith(".gz") else None)
    return jsonl.decode(stream.read(), pa.schema([f for f in schema if f.name not in file.partition]))
