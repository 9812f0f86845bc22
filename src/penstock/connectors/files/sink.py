"""Write topics as Parquet or JSON lines files, each epoch exactly once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import model_validator

from penstock import durable, failpoints
from penstock.connectors.lake import staging
from penstock.connectors.lake.staging import (
    HIDDEN,
    StagedFile,
    StagedFiles,
    StagingConfig,
    StagingSink,
    pack_schema,
    unpack_schema,
)
from penstock.errors import ConfigError, FatalError, RetryableError, StagingLost
from penstock.formats import jsonl
from penstock.schema import key_of
from penstock.schema.evolution import follow
from penstock.sink import CommittedEpoch, Epoch, Positions, Topic, WriteResult, is_committed

FORMAT = 1
"""Version of the ledger; a newer one is refused."""

TRIES = 20
"""Commits of other writers that one commit gives way to before it fails for a while."""


class FilesSinkConfig(StagingConfig):
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


class FilesSink(StagingSink[FilesSinkConfig]):
    """
    Tasks write files under `_staging`; the driver commits an epoch of a topic by creating the next entry of the ledger
    (`_penstock/<pipeline>/<sequence>.json`), and then moves the files it names to their places.

    Supports exactly-once: no file stands in its place before the entry that names it. A reader of the plain files sees
    those of one epoch appear one after the other; `read_published` goes by the ledger and sees whole epochs only.
    """

    name = "files"

    def __init__(self, config: FilesSinkConfig) -> None:
        super().__init__(config)
        self._ledgers: dict[tuple[str, Topic], _Ledger] = {}

    def close(self) -> None:
        super().close()
        self._ledgers.clear()

    def suffix(self) -> str:
        if self.config.format == "parquet":
            return ".parquet"
        return ".jsonl.gz" if self.config.compression == "gzip" else ".jsonl"

    def place(self, target: Path, path: str) -> Path:
        return _staged(target, path)

    def begin_file(self, path: Path, schema: pa.Schema) -> staging.Part:
        if self.config.format == "parquet":
            return staging.ParquetPart(path, schema, self.config.compression or "zstd")
        return _JsonLines(path, self.config.compression)

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._stage is not None
        rows, discarded = self.fit(topic, _plain(batch), key_of(batch.schema))
        if rows.num_rows:
            self._stage.write(topic, rows)
        return WriteResult(rows.num_rows, rows.nbytes, discarded)

    def commit_topic(self, epoch: Epoch, topic: Topic, receipts: Sequence[StagedFiles], end: Positions) -> None:
        parts = [receipt.staged[topic] for receipt in receipts]
        files = [file for part in parts for file in part.files]
        ledger = self._ledger(epoch.pipeline, topic)
        for _ in range(TRIES):
            newest = ledger.newest()
            committed = is_committed(newest, epoch)
            ledger.finish()  # the epoch that a crash interrupted: this one, or the last of a run that was taken over
            if committed:
                break
            lost = [file for file in files if not staging.is_there(_staged(ledger.target, file.path), file.bytes)]
            if lost:
                if ledger.newest() != newest:
                    continue  # a twin of this process has committed them meanwhile
                raise StagingLost(f"{_staged(ledger.target, lost[0].path)} of {epoch} is gone or has another size")
            schema = unpack_schema(newest.columns) if newest else None
            for part in parts:
                rows = unpack_schema(part.columns)
                schema = follow(topic, rows if schema is None else schema, rows, sink_widens=self.widens)
            assert schema is not None
            entry = Published(
                incarnation=epoch.incarnation,
                number=epoch.number,
                end=dict(end),
                topic=topic,
                columns=pack_schema(schema),
                files=files,
            )
            failpoints.hit("commit.before")
            if ledger.append(entry):
                ledger.finish()
                break
        else:
            raise RetryableError(
                f"{ledger.directory} was written by others {TRIES} times while {epoch} was being committed",
                code="PEN-2005",
            )
        self._record_schema(topic, ledger)
        staging.drop_lists(self._targets.root, epoch.pipeline, parts)

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        newest = self._ledger(pipeline, topic).newest()
        return newest and CommittedEpoch(incarnation=newest.incarnation, number=newest.number, end=newest.end)

    def sweep(self, epoch: Epoch, keep: Sequence[StagedFiles]) -> None:
        kept = staging.names(keep)

        def is_kept(topic: Topic, place: Path) -> bool:
            # What the ledger names is moved to its place first, so that it is not among the leftovers.
            self._ledger(epoch.pipeline, topic).finish()
            return place.name.removesuffix(_SUFFIX) in kept

        staging.sweep(self._targets.root, epoch, is_kept)

    def is_seeded(self, topic: Topic) -> bool:
        return (self._targets.claim(topic) / HIDDEN / _SEEDED).exists()

    def mark_seeded(self, topic: Topic) -> None:
        hidden = self._targets.claim(topic) / HIDDEN
        durable.make_directory(hidden)
        durable.write_atomic(hidden / _SEEDED, b"{}")

    def schema(self, topic: Topic) -> pa.Schema | None:
        """The columns that the target has; more may come."""
        with contextlib.suppress(FileNotFoundError):
            return unpack_schema((self._targets.claim(topic) / HIDDEN / _SCHEMA).read_text())
        return None

    def _record_schema(self, topic: Topic, ledger: _Ledger) -> None:
        newest = ledger.newest()
        if newest is not None and ledger.recorded != newest.columns:
            durable.write_atomic(ledger.target / HIDDEN / _SCHEMA, newest.columns.encode())
            ledger.recorded = newest.columns

    def _ledger(self, pipeline: str, topic: Topic) -> _Ledger:
        key = (pipeline, topic)
        if key not in self._ledgers:
            self._ledgers[key] = _Ledger(self._targets.claim(topic), pipeline, topic)
        return self._ledgers[key]


def read_published(target: str | os.PathLike[str]) -> pa.Table:
    """
    Exactly the committed rows of a topic's directory, with the columns of its newest epoch; whole epochs only.

    Rows come in the order of the epochs; columns that an older file lacks are null.
    """
    target = Path(target)
    entries = [
        _read_entry(path)
        for ledger in sorted(target.glob(f"{HIDDEN}/[!.]*/"))
        for path in sorted(ledger.glob("[0-9]*.json"))
    ]
    schemas = [unpack_schema(entry.columns) for entry in entries]
    if not schemas:
        return pa.table({})
    schema = pa.unify_schemas(schemas, promote_options="default")
    tables = [_read(target, file, schema) for entry in entries for file in entry.files]
    return pa.concat_tables([schema.empty_table(), *tables])


class _Ledger:
    """The epochs of one topic by one pipeline, one file each; whoever creates the next file has committed."""

    def __init__(self, target: Path, pipeline: str, topic: Topic) -> None:
        self.target = target
        self.directory = target / HIDDEN / quote(pipeline, safe="")
        self.recorded: str | None = None
        self._topic = topic
        self._last = 0
        self._newest: Published | None = None
        self._finished = 0

    def newest(self) -> Published | None:
        """The newest entry, looked for after the last one that is known."""
        if self._newest is None and self.directory.exists():
            self._last = max((int(name[:12]) for name in os.listdir(self.directory) if name[:1].isdigit()), default=0)
            self._read()
        elif self._newest is not None and not self._entry(self._last).exists():
            raise FatalError(
                f"{self._entry(self._last)} is gone: {self.target} was dropped while the pipeline ran",
                code="PEN-5010",
                hint="put it back; or stop, and `penstock offsets reset FILE` to begin anew",
            )
        while self._entry(self._last + 1).exists():
            self._last += 1
            self._read()
        return self._newest

    def append(self, entry: Published) -> bool:
        """Create the entry after the newest one that was seen; False if somebody else has."""
        durable.make_directory(self.directory)
        text = durable.canonical(entry.model_dump(mode="json"))
        return durable.publish_once(self._entry(self._last + 1), text.encode())

    def finish(self) -> None:
        """Move the files of the newest entry to their places; does what is left to do, also after a crash in here."""
        entry = self.newest()
        if entry is None or self._finished == self._last:
            return
        self._sync_entry()
        moves = [(_staged(self.target, file.path), self.target / file.path) for file in entry.files]
        moves = [(staged, place) for staged, place in moves if staged.exists()]
        with durable.disk_errors():
            for staged, place in moves:
                place.parent.mkdir(parents=True, exist_ok=True)
                # A link never replaces what is there, unlike a rename. A twin of this process may be moving it too.
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.link(staged, place)
        places = [place for _, place in moves]
        durable.fsync(*places, *{above for place in places for above in place.parents if self.target in above.parents})
        for staged, _ in moves:
            staged.unlink(missing_ok=True)
        self._finished = self._last

    def _sync_entry(self) -> None:
        """Who created the entry, or a directory on the way to it, may have died before the sync."""
        above = () if self._finished else (self.directory, self.directory.parent)
        durable.fsync(self._entry(self._last), *above)

    def _entry(self, sequence: int) -> Path:
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

    def __init__(self, path: Path, compression: str | None) -> None:
        self._file = pa.output_stream(path, compression="gzip" if compression == "gzip" else None)

    def write(self, table: pa.Table) -> None:
        for batch in table.to_batches():
            for piece in jsonl.encode(batch):
                self._file.write(piece)

    def close(self) -> str | None:
        self._file.close()
        return None


_SUFFIX = ".staged"
"""Keeps a staged file from being taken for a published one by a reader that looks into every directory."""
_SCHEMA = ".schema"
_SEEDED = ".seeded"


def _staged(target: Path, path: str) -> Path:
    return target / "_staging" / (os.path.basename(path) + _SUFFIX)


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """
    The batch as it is compared and written: dictionaries decoded, every column nullable, metadata dropped.

    Columns of type null are left out: such a column gets its type with its first value.
    """
    kept = [(f.name, c) for f, c in zip(batch.schema, batch.columns, strict=True) if not pa.types.is_null(f.type)]
    columns = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for _, c in kept]
    return pa.RecordBatch.from_arrays(columns, names=[name for name, _ in kept])


def _read_entry(path: Path) -> Published:
    try:
        stored = json.loads(path.read_bytes())
        if stored["format"] <= FORMAT:
            return Published.model_validate(stored)
    except (ValueError, KeyError, TypeError) as error:  # ValidationError is a ValueError
        raise FatalError(f"{path} is corrupt: {error}", code="PEN-5020", hint="restore the file from a copy") from error
    raise FatalError(f"{path} has format {stored['format']}, and this Penstock knows {FORMAT}", code="PEN-5006")


def _read(target: Path, file: StagedFile, schema: pa.Schema) -> pa.Table:
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
            columns.append(table.column(field.name))
        else:
            columns.append(pa.nulls(file.rows, field.type))
    return pa.table(columns, schema)


def _read_file(path: Path, file: StagedFile, schema: pa.Schema) -> pa.Table:
    if file.path.endswith(".parquet"):
        return pq.ParquetFile(path).read()
    stream = pa.input_stream(path, compression="gzip" if file.path.endswith(".gz") else None)
    return jsonl.decode(stream.read(), pa.schema([f for f in schema if f.name not in file.partition]))
