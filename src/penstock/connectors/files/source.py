"""Find files, plan each of them once, and cut them into splits."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

import pyarrow as pa
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from penstock import store
from penstock.config import Config, FilePath
from penstock.connectors.files import readers
from penstock.connectors.files.directory import Directory
from penstock.connectors.files.inventory import Found, Inventory, Record
from penstock.connectors.files.layout import Layout
from penstock.connectors.files.objects import PAUSE_MS, Objects
from penstock.connectors.files.splits import BadRows, FileSplit, require_planned
from penstock.connectors.files.types import merge, widened
from penstock.durable import Json
from penstock.errors import ConfigError, ConnectorError, DataError, FatalError
from penstock.schema.codec import pack_schema, unpack_schema
from penstock.schema.typenames import arrow_type
from penstock.source import (
    Finding,
    HealthStatus,
    Note,
    Position,
    RangeSource,
    ReadLimit,
    Schemas,
    SourceBatch,
    SourceContext,
    SourceRecord,
)
from penstock.store import StorageOptions
from penstock.store.options import dataset


class FilesConfig(Config):
    identity: ClassVar[frozenset[str]] = frozenset({"path", "format"})

    path: FilePath
    """
    A directory (every file in it with a known ending), a glob (`data/**/*.jsonl`) or one file; also in an object store:
    `s3://bucket/landing/*.parquet`, `gs://`, `az://`, `abfss://`.

    Files must not change once they are there: write them elsewhere, or under an ignored name, and rename.
    """

    storage_options: StorageOptions = Field(default_factory=dict)
    """How to reach an object store, with the same names as for the sinks: `region`, `endpoint`, `access_key_id`,
    `secret_access_key` and so on; secrets are references."""

    def dataset(self, name: str) -> tuple[str, str]:
        """How lineage tools call the files: the directory above the first wildcard."""
        plain = re.split(r"[*?\[]", self.path)[0]
        return dataset(plain if plain == self.path else os.path.dirname(plain))

    format: Literal["jsonl", "csv", "parquet"] | None = None
    """Format of all files; none: by ending (`.jsonl .ndjson .json .csv .tsv .parquet .pq`, text also with `.gz` or `.zst`)."""

    recursive: bool = False
    """Also read the directories inside a directory. Links to directories are not followed."""

    ignore: tuple[str, ...] = (".*", "_*", "*.tmp", "*.part")
    """Names of files and directories that are passed over."""

    settle_ms: NonNegativeInt = 1000
    """A file is complete when it has not changed for this long; 0 trusts every file at once. Objects appear whole, and are
    not waited for."""

    scan_interval_ms: NonNegativeInt | None = None
    """Least time between two looks at the directory; a look that takes long is followed by a longer pause. None: 500 on a
    disk, 10,000 in an object store, where each look is a request per thousand objects."""

    columns: Mapping[str, str] | None = None
    """
    Arrow type of each column, e.g. `{ id = "int64", at = "timestamp[us, UTC]", tags = "list<string>" }`; fields that it does
    not name are ignored. None: inferred from the first files; fields that appear later are added, and numbers widen. A list that
    is empty in all of the first files is taken for one of text, and whatever items it has later are text too, numbers and objects
    as their JSON: to have another type, name it here before the first run.
    """

    stream: str = "files"
    """Name of the stream; `{parent}` is the name of a file's directory, `{stem}` its own up to the first dot."""

    delimiter: str | None = None
    """What separates the columns of a CSV file; none: a tab in `.tsv`, else a comma."""

    header: bool = True
    """The first row of a CSV file names its columns; false: they are those of `columns`, in order."""

    max_files_per_epoch: PositiveInt = 1000
    """Upper bound on the files one epoch reads."""

    max_bytes_per_epoch: PositiveInt = 1 << 30
    """Upper bound on the bytes one epoch reads; a larger file has an epoch of its own."""

    split_bytes: PositiveInt = 64 << 20
    """Larger files are read by several tasks: JSON lines by bytes, Parquet by row groups; CSV and compressed files stay whole."""

    on_change: Literal["stop", "ignore"] = "stop"
    """What to do when a file changes after it was read: stop, or ignore the change (and say so in the source's health)."""

    inventory: Path | None = None
    """Directory for the list of files that were read; none: inside the pipeline's state directory."""

    @field_validator("path", mode="before")
    @classmethod
    def _path_as_text(cls, path: object) -> object:
        return str(path) if isinstance(path, Path) else path

    @field_validator("columns")
    @classmethod
    def _types(cls, columns: Mapping[str, str] | None) -> Mapping[str, str] | None:
        for text in (columns or {}).values():
            arrow_type(text)
        if columns is not None and not columns:
            raise ValueError("name at least one column")
        return columns

    @field_validator("stream")
    @classmethod
    def _placeholders(cls, stream: str) -> str:
        try:
            stream.format(parent="", stem="")
        except (KeyError, IndexError, ValueError):
            raise ValueError("only {parent} and {stem} can be in braces") from None
        return stream

    @model_validator(mode="after")
    def _named_columns(self) -> FilesConfig:
        if not self.header and self.columns is None:
            raise ValueError("without a header, `columns` must name the columns")
        return self


class Inventoried(Position):
    """How many records of which inventory have been read; without a directory for it, the records themselves."""

    inventory: str = ""
    records: NonNegativeInt = 0
    listed: tuple[Record, ...] = ()

    def describe(self) -> str:
        entries = self.records + len(self.listed)  # columns that were found are entries as well
        return f"entry {entries:,} in its list of files" if entries else "the beginning"


class Files(RangeSource[FilesConfig, Inventoried]):
    """
    A range is a run of records of an append-only inventory (`inventory.py`): files in the order in which they were found.

    Supports exactly-once: a file is planned once, under its name, with its size and time; late arrivals are simply found
    later. A planned file that changed or is gone before its epoch was prepared is a `RangeGone`: the files as they are by
    then are planned. Bad rows: `read` yields the good ones of a split and then raises one `DataError` that counts the bad
    ones and names the first few; an unreadable file counts as one.
    """

    name = "files"

    _inventory: Inventory | None = None
    _fresh = False
    _schemas: dict[str, pa.Schema] | None = None
    _learned: tuple[Sequence[Json], Mapping[str, pa.Schema]] = ((), MappingProxyType({}))
    _backlog: Sequence[Found] = ()
    _behind: int | None = None
    _problem = ""

    @cached_property
    def _directory(self) -> Directory:
        c = self.config
        pause = c.scan_interval_ms
        if store.is_object_url(c.path):
            pause = PAUSE_MS if pause is None else pause
            return Objects.under(c.path, c.storage_options, c.recursive, c.format, c.ignore, pause)
        pause = _PAUSE_MS if pause is None else pause
        path = Path(c.path.removeprefix("file://"))
        return Directory.at(path, c.recursive, c.format, c.ignore, c.settle_ms, pause)

    @property
    def _layout(self) -> Layout:
        directory = self._directory
        return Layout(self.config, directory.place if isinstance(directory, Objects) else directory.base)

    def open(self, context: SourceContext = SourceContext()) -> None:
        super().open(context)
        self.__dict__.pop("_directory", None)
        if self.config.storage_options and not store.is_object_url(self.config.path):
            raise ConfigError(
                f"`storage_options` are for object stores, and `path` is local: {self.config.path}",
                code="PEN-1003",
                hint="leave them out, or give an address such as s3://bucket/landing",
            )
        if not self._directory.exists():
            raise ConfigError(
                f"there is no directory {self._directory.base}",
                code="PEN-1016",
                hint="make it, or correct `path`; it may be empty at first",
            )

    def check(self) -> Sequence[Finding]:
        found = sum(1 for _ in self._directory.walk())
        if not found:
            return [
                Finding(False, f"no file matches {self.config.path}", "correct `path`, `format` or `ignore`, or wait")
            ]
        return [Finding(True, f"{found:,} {'file matches' if found == 1 else 'files match'} {self.config.path}")]

    def health_check(self) -> HealthStatus:
        try:
            if not self._directory.exists():
                return HealthStatus.unhealthy(f"the directory {self._directory.base} is gone")
        except ConnectorError as error:
            return HealthStatus.unhealthy(error.message)
        return HealthStatus.degraded(self._problem) if self._problem else HealthStatus.healthy()

    lag_unit = "bytes"

    def lag(self) -> int | None:
        """Bytes of files that were found and are not planned yet."""
        return self._behind

    # -- ranges --------------------------------------------------------------------------------------------------

    def latest(self, start: Inventoried, limit: ReadLimit) -> Inventoried:
        """Bounded by files and bytes, since rows are not known before they are read; without `limit.rows`, all there is."""
        inventory = self._load(start)
        everything = limit.rows is None
        files = inventory.files(start.records)
        count = len(files) if everything else _fitting(self.config, files)
        if not all(map(self._directory.is_still, files[:count])):
            # They were planned and never committed, and are not what they were: plan the files of now.
            inventory.forget(start.records)
            self._schemas = self._schemas_at(inventory, start.records)
        if not inventory.files(start.records):
            self._discover(inventory, everything)
        files = inventory.files(start.records)
        count = len(files) if everything else _fitting(self.config, files)
        behind = [*files[count:], *self._backlog, *(file for file, _ in self._directory.unsettled.values())]
        self._behind = sum(file.size for file in behind)
        end = start
        if count:
            last = inventory.end_of(start.records, count)
            listed = () if inventory.id else inventory.records(last)
            end = Inventoried(inventory=inventory.id, records=last, listed=listed)
        until = limit.until if isinstance(limit.until, Inventoried) else end
        return until if until.records < end.records and end.listed[: until.records] == until.listed else end

    def split(self, start: Inventoried, end: Inventoried) -> Sequence[FileSplit]:
        inventory = self._load(end)
        self._schemas = self._schemas_at(inventory, end.records)
        whole = [self._layout.split(file, self._schemas) for file in inventory.files(start.records, end.records)]
        for (
            each
        ) in whole:  # now, since a schema that was inferred from a file as it was may stop the epoch before a task
            require_planned(each)
        return [piece for each in whole for piece in self._layout.pieces(each)]

    def read(self, split: FileSplit) -> Iterator[SourceBatch | Note]:
        columns = self.context.columns
        if columns is not None and split.schema is not None:
            few = pa.schema([field for field in split.schema if field.name in columns], split.schema.metadata)
            split = replace(split, schema=few, explicit=True)
        bad, schema = BadRows(split.path), split.schema
        try:
            for batch in readers.read(split, bad):
                schema = batch.schema
                yield SourceBatch(batch, stream=split.stream)
        except DataError as error:
            error.count += bad.count
            raise
        if schema != split.schema:
            yield Note({"stream": split.stream, "schema": pack_schema(schema)})
        if bad.count:
            raise bad.error(split.stream)

    def next_start(self, end: Inventoried, notes: Sequence[Json]) -> Inventoried:
        """Remember columns that tasks met and planning did not; they are recorded with the next files."""
        if notes != self._learned[0]:
            learned: dict[str, pa.Schema] = {}
            for note in notes:
                stream, schema = note["stream"], unpack_schema(note["schema"])
                learned[stream] = merge(learned.get(stream), schema, widen=widened)
            self._learned = (notes, learned)
        return end

    # -- schemas -------------------------------------------------------------------------------------------------

    def schema(self) -> Schemas:
        return self._inferred({}, sorted(self._directory.walk())) if self._schemas is None else self._schemas

    def provide_schema(self) -> dict[str, pa.Schema]:
        return dict(self.schema())

    def is_authoritative(self) -> bool:
        return self.config.columns is not None

    def sample_records(self, n: int) -> Sequence[SourceRecord]:
        return self._layout.samples(sorted(self._directory.walk()), n)

    def infer_from_samples(self, samples: Sequence[SourceRecord]) -> dict[str, pa.Schema]:
        """Every sample is the head of a file, named in its attributes."""
        return self._layout.infer(samples)

    def _inferred(self, old: dict[str, pa.Schema], files: Sequence[Found]) -> dict[str, pa.Schema]:
        """The old schemas, what tasks have learned, and what the heads of some of the files tell."""
        if (columns := self._layout.explicit()) is not None:
            return self._layout.each_stream(columns, files)
        schemas = dict(old)
        for more in (self._learned[1], self.infer_from_samples(self._layout.samples(files, _SAMPLES))):
            for stream, schema in more.items():
                schemas[stream] = merge(schemas.get(stream), schema, widen=widened)
        return schemas

    def _schemas_at(self, inventory: Inventory, end: int) -> dict[str, pa.Schema]:
        if (columns := self._layout.explicit()) is not None:
            return self._layout.each_stream(columns, inventory.files(0, end))
        return inventory.schemas(end)

    # -- the inventory -------------------------------------------------------------------------------------------

    def _load(self, position: Inventoried) -> Inventory:
        """The inventory that a position counts in; the beginning has a fresh one: a reset reads the files that exist now."""
        place = self.config.inventory or self.context.state_dir
        if position.listed or place is None:
            inventory = Inventory("", position.listed)
        elif (
            self._inventory is not None
            and (position.inventory or self._fresh)
            and position.inventory in ("", self._inventory.id)
        ):
            inventory = self._inventory
        else:
            self._fresh = not position.inventory
            inventory = Inventory.fresh(place) if self._fresh else Inventory.load(place, position.inventory)
        if position.records > len(inventory):
            raise FatalError(
                f"the position counts {position.records} records, the inventory {position.inventory} has fewer",
                code="PEN-5011",
                hint="was it restored from an older backup? Restore the newest one, or start over with "
                "`penstock offsets reset FILE`",
            )
        if self._schemas is None and position.records:
            self._schemas = self._schemas_at(inventory, position.records)
        self._inventory = inventory
        return inventory

    def _discover(self, inventory: Inventory, everything: bool) -> None:
        """Add files that are complete and were never planned to the inventory, oldest first."""
        self._backlog = [file for file in self._backlog if file.file not in inventory.known]
        if everything or not self._backlog:
            self._backlog, changed = self._directory.scan(inventory.known, everything)
            self._report(changed)
        count = len(self._backlog) if everything else _fitting(self.config, self._backlog)
        chosen = [file for file in self._backlog[:count] if self._directory.is_still(file)]
        self._backlog = self._backlog[count:]
        if not chosen:
            return
        records = [file.record() for file in chosen]
        if self.config.columns is None:
            old = inventory.schemas()
            new = self._inferred(old, chosen)
            if new != old:
                records.insert(0, {"schemas": {stream: pack_schema(schema) for stream, schema in new.items()}})
        inventory.append(records)

    def _report(self, changed: Sequence[Found]) -> None:
        self._problem = ""
        if changed:
            many = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self._problem = f"{changed[0].file}{many} changed after being planned"
            if self.config.on_change == "stop":
                raise DataError(
                    self._problem,
                    code="PEN-3004",
                    hint='a file is read once: add the new rows as another file, or set `on_change = "ignore"`',
                )


_SAMPLES = 32
_PAUSE_MS = 500


def _fitting(config: FilesConfig, files: Sequence[Found]) -> int:
    """How many of the files, from the first on, one epoch may read."""
    total = 0
    for count, file in enumerate(files):
        total += file.size
        if count >= config.max_files_per_epoch or (count and total > config.max_bytes_per_epoch):
            return count
    return len(files)
