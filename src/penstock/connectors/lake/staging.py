"""What sinks that stage files share: where a topic's target is, which files a try has begun, and how they are written."""

from __future__ import annotations

import base64
import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from penstock import durable
from penstock.config import FilePath
from penstock.connectors.lake.partitions import hive, split
from penstock.errors import ConfigError, SchemaError
from penstock.schema.evolution import EvolutionConfig, Policy, Widens, fit, follow
from penstock.sink import Epoch, Receipt, SinkConnectorCapabilities, SinkContext, Task, Topic, TopicSink
from penstock.source import HealthStatus

HIDDEN = "_penstock"
"""Directory in a target (and above all targets of a sink) for what is not rows; readers pass over names with `_`."""

ROW_GROUP_ROWS = 1 << 17
SAMPLE_ROWS = 4096
BUFFER_BYTES = 64 << 20
"""What a task holds back, over all its files, to make row groups of a good size."""

_NAME_BYTES = 255
"""What file systems take as one name."""

_RESERVED = {"", ".", "..", HIDDEN, "_staging", "_delta_log"}


class StagedFile(BaseModel):
    """One file of a topic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """Below the topic's target, where the file stands once it is published."""
    rows: int
    bytes: int
    partition: dict[str, str | None] = {}
    stats: str | None = None


class StagedTopic(BaseModel):
    """A task's files of one topic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listed: str
    """The task's list of begun files, which is dropped once the topic is committed."""
    columns: str
    """The schema of the topic's rows, partition columns included, as `pack_schema` writes it."""
    files: list[StagedFile] = []
    renews: bool = False
    """The rows follow a clear and may have other types than the target."""


class StagedFiles(Receipt):
    staged: dict[Topic, StagedTopic] = Field(default_factory=dict)

    def topics(self) -> Iterable[Topic]:
        return self.staged


def pack_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def unpack_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


@dataclass
class Targets:
    """The `path` option: one directory per topic, all below one root."""

    template: str
    _claims: dict[Path, Topic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rest = self.template.replace("{topic}", "")
        if "{" in rest or "}" in rest:
            raise ConfigError(
                f"`path` holds a placeholder that is not known: {self.template}",
                code="PEN-1003",
                hint="only {topic} is",
            )
        if "://" in self.template:
            raise ConfigError(
                f"`path` is an address, and tasks can stage files in local directories only, as yet: {self.template}",
                code="PEN-1009",
                hint="write to a local or mounted directory, which `file:///` may name as well",
            )

    @property
    def root(self) -> Path:
        """The part of the path that is the same for all topics."""
        before, found, _ = self.template.partition("{topic}")
        return Path(os.path.dirname(before) if found else before)

    def claim(self, topic: Topic) -> Path:
        """The directory of the topic; refused when another topic stands there, above it or below it."""
        parts = topic.removeprefix("/").split("/")
        long = any(len(os.fsencode(part)) > _NAME_BYTES for part in parts)
        if _RESERVED.intersection(parts) or not topic.isprintable() or long:
            raise ConfigError(
                f"the topic {topic!r} cannot be a directory", code="PEN-1010", hint="route to another name"
            )
        path = Path(self.template.replace("{topic}", "/".join(parts)))
        for claimed, other in self._claims.items():
            if other != topic and (path == claimed or path in claimed.parents or claimed in path.parents):
                raise ConfigError(
                    f"the topics {other} and {topic} meet in {min(path, claimed)}",
                    code="PEN-1011",
                    hint='give each a directory of its own: path = ".../{topic}", and no topic below another',
                )
        self._claims[path] = topic
        return path


class Part(Protocol):
    """One file being written."""

    def write(self, table: pa.Table) -> None: ...

    def close(self) -> str | None:
        """End the file; gives statistics for the receipt."""


class ParquetPart:
    """A Parquet file that is written row group by row group; columns get a dictionary if their first values repeat."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str, **options: Any) -> None:
        self.metadata: list[pq.FileMetaData] = []
        self._schema = schema
        self._options = {"compression": compression, "metadata_collector": self.metadata, **options}
        self._path = path
        self._writer: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        groups = max(1, round(table.num_rows / ROW_GROUP_ROWS))  # of like size: each of them costs something
        self._begun(table).write_table(table, row_group_size=max(1, -(-table.num_rows // groups)))

    def close(self) -> str | None:
        self._begun(self._schema.empty_table()).close()
        return None

    def _begun(self, table: pa.Table) -> pq.ParquetWriter:
        if self._writer is None:
            # A dictionary of values that hardly repeat takes twice the time, and more room than the values.
            repeating = [name for name in table.column_names if _repeats(table.column(name).slice(0, SAMPLE_ROWS))]
            self._writer = pq.ParquetWriter(self._path, self._schema, **{"use_dictionary": repeating, **self._options})
        return self._writer


def _repeats(column: pa.ChunkedArray) -> bool:
    is_flat = types.is_primitive(column.type) or types.is_decimal(column.type) or _is_text(column.type)
    return not is_flat or 2 * pc.count_distinct(column).as_py() < len(column)


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind))


@dataclass
class _Open:
    """A file that still takes rows."""

    topic: Topic
    place: Path
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


@dataclass
class Stage:
    """
    What one task writes of one epoch: files split by partition and ended at `target_file_rows`, in bounded memory.

    A batch with another schema begins another file. Every file is listed before it is begun, so that `sweep` finds it.
    """

    epoch: Epoch
    task: Task
    targets: Targets
    suffix: str
    begin: Callable[[Path, pa.Schema], Part]
    place: Callable[[Path, str], Path]
    """Where the file with a given path below a target stands while it is staged."""
    partition_by: Sequence[str] = ()
    target_file_rows: int = 5_000_000
    max_open_files: int = 64
    widens: Widens = lambda old, new: False
    """Which types of a topic's columns may grow from one batch to the next."""

    def __post_init__(self) -> None:
        self.stem = self.epoch.stem(self.task)
        self._count = 0
        self._held_bytes = 0
        self._open: OrderedDict[tuple[Topic, tuple[str | None, ...], pa.Schema], _Open] = OrderedDict()
        self._staged: dict[Topic, StagedTopic] = {}
        self._schemas: dict[Topic, pa.Schema] = {}
        self._places: list[Path] = []

    def schema(self, topic: Topic) -> pa.Schema | None:
        return self._schemas.get(topic)

    def last_schema(self, topic: Topic) -> pa.Schema | None:
        """The schema of the topic's newest open file."""
        return next((key[2] for key in reversed(self._open) if key[0] == topic), None)

    def write(self, topic: Topic, batch: pa.RecordBatch) -> None:
        if self._schemas.get(topic) != batch.schema:
            self._meet(topic, batch.schema)
        with durable.disk_errors(self.targets.claim(topic)):
            for values, rows in split(batch, self.partition_by):
                self._write(topic, values, rows)

    def flush(self) -> None:
        with durable.disk_errors(self.targets.root):
            for each in self._open.values():
                each.flush()
        self._held_bytes = 0

    def end(self, topic: Topic) -> None:
        """End the topic's files: its next rows stand in a file behind them, for sinks that read them in their order."""
        with durable.disk_errors(self.targets.root):
            for key in [key for key in self._open if key[0] == topic]:
                self._end(self._open.pop(key))

    def finish(self) -> dict[Topic, StagedTopic]:
        """End every file and make all of them durable, with every directory that leads to one."""
        with durable.disk_errors(self.targets.root):
            for each in list(self._open.values()):
                self._end(each)
        self._open.clear()
        root = self.targets.root
        directories = {d for p in self._places for d in p.parents if d == root or root in d.parents}
        durable.fsync(*self._places, *sorted(directories))
        return {
            topic: staged.model_copy(update={"columns": pack_schema(self._schemas[topic])})
            for topic, staged in self._staged.items()
        }

    def abandon(self) -> None:
        """Let go of files that were not finished; `sweep` removes them."""
        for each in self._open.values():
            # What a full disk refused has been told where it was met; pyarrow then has no metadata to hand out either.
            with contextlib.suppress(OSError, RuntimeError):
                each.part.close()
        self._open.clear()

    def _meet(self, topic: Topic, schema: pa.Schema) -> None:
        """Widen the topic's schema by that of a batch, and begin its list of files with the first one."""
        if len(set(schema.names)) < len(schema.names):
            raise SchemaError(f"two columns of {topic} have one name: {', '.join(schema.names)}", code="PEN-4002")
        self._check_partitions(topic, schema)
        self._schemas[topic] = follow(topic, self._schemas.get(topic, schema), schema, sink_widens=self.widens)
        if topic not in self._staged:
            listed = f"{self.epoch.stem()}/{self.stem}-{len(self._staged):03d}"
            path = _lists(self.targets.root, self.epoch.pipeline) / listed
            durable.make_directory(self.targets.claim(topic))
            with durable.disk_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{topic}\n")
            self._staged[topic] = StagedTopic(listed=listed, columns="")

    def _check_partitions(self, topic: Topic, schema: pa.Schema) -> None:
        """Refuse rows that `partition_by` cannot lay out."""
        missing = [name for name in self.partition_by if name not in schema.names]
        if missing or len(schema.names) == len(self.partition_by):
            raise SchemaError(
                f"{topic} has the columns {', '.join(schema.names)}, and `partition_by` wants {', '.join(self.partition_by)}"
                " and at least one more",
                code="PEN-4002",
                hint="change `partition_by`, or route this topic to another sink",
            )

    def _write(self, topic: Topic, values: tuple[str | None, ...], rows: pa.RecordBatch) -> None:
        key = (topic, values, rows.schema)
        each = self._open.get(key) or self._start(key)
        self._open.move_to_end(key)
        each.take(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= BUFFER_BYTES:
            self.flush()
        elif each.held_rows >= ROW_GROUP_ROWS:
            self._held_bytes -= each.flush()
        if each.rows >= self.target_file_rows:
            self._end(self._open.pop(key))
        elif len(self._open) > self.max_open_files:
            self._end(self._open.popitem(last=False)[1])

    def _start(self, key: tuple[Topic, tuple[str | None, ...], pa.Schema]) -> _Open:
        topic, values, schema = key
        partition = dict(zip(self.partition_by, values, strict=True))
        path = "/".join([*hive(partition), f"{self.stem}-{self._count:04d}{self.suffix}"])
        self._count += 1
        place = self.place(self.targets.claim(topic), path)
        with open(_lists(self.targets.root, self.epoch.pipeline) / self._staged[topic].listed, "a") as listed:
            listed.write(f"{place}\n")
        place.parent.mkdir(parents=True, exist_ok=True)
        self._open[key] = _Open(topic, place, self.begin(place, schema), path, partition)
        return self._open[key]

    def _end(self, each: _Open) -> None:
        self._held_bytes -= each.flush()
        stats = each.part.close()
        self._places.append(each.place)
        self._staged[each.topic].files.append(
            StagedFile(
                path=each.path,
                rows=each.rows,
                bytes=each.place.stat().st_size,
                partition=each.partition,
                stats=stats,
            )
        )


class StagingConfig(EvolutionConfig):
    path: FilePath
    """Directory of a topic, e.g. `lake/{topic}`, where `{topic}` is the topic without its leading slash."""

    partition_by: tuple[str, ...] = ()
    """Columns whose values become directories (`day=2026-01-01`) and are left out of the files."""

    target_file_rows: PositiveInt = 5_000_000
    """About how many rows a file holds at most; an epoch always begins new files."""

    max_open_files: PositiveInt = 64
    """How many partitions a task writes at once; rows of one more end the file that had none for longest."""


S = TypeVar("S", bound=StagingConfig)


class StagingSink(TopicSink[S, StagedFiles]):
    """What sinks whose tasks write files have in common; they say how a file is written and how an epoch is committed."""

    capabilities = (
        SinkConnectorCapabilities()
        .with_exactly_once()
        .with_two_phase_commit()
        .with_schema_evolution()
        .with_partitioned()
    )

    def __init__(self, config: S) -> None:
        super().__init__(config)
        path = config.path.removeprefix("file://") if config.path.startswith("file:///") else config.path
        # Here and not in `open`, since executors may stand in another directory.
        self._path = path if "://" in path else os.path.abspath(path)
        self._stage: Stage | None = None
        self._accepted: dict[tuple[Topic, pa.Schema], pa.Schema] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.config.model_copy(update={"path": self._path}),)

    def open(self, context: SinkContext = SinkContext()) -> None:
        super().open(context)
        self._targets = Targets(self._path)
        durable.make_directory(self._targets.root)

    def close(self) -> None:
        if self._stage is not None:
            self._stage.abandon()
            self._stage = None

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        self._accepted.clear()
        self._stage = self.begin_stage(epoch, task, partition_by=self.config.partition_by)

    def begin_stage(self, epoch: Epoch, task: Task, **options: Any) -> Stage:
        how: dict[str, Any] = {
            "suffix": self.suffix(),
            "begin": self.begin_file,
            "place": self.place,
            "target_file_rows": self.config.target_file_rows,
            "max_open_files": self.config.max_open_files,
            "widens": self.widens,
        }
        return Stage(epoch, task, self._targets, **{**how, **options})

    def fit(self, topic: Topic, rows: pa.RecordBatch, key: Sequence[str]) -> tuple[pa.RecordBatch, int]:
        """The rows as the target takes them by the topic's policy, and how many lost something; in a task."""
        policy, given = self.policy(topic), (topic, rows.schema)
        if given not in self._accepted:
            self._accepted[given] = self.accept(topic, rows.schema, policy)
        return fit(topic, rows, self._accepted[given], policy, key)

    def accept(self, topic: Topic, rows: pa.Schema, policy: Policy) -> pa.Schema:
        """The columns of the target once such rows are in it; refuses rows that it could not follow."""
        assert self._stage is not None
        stored, staged = self.stored(topic), self._stage.schema(topic)
        columns = stored or staged or rows
        if stored is not None and staged is not None:
            columns = follow(topic, stored, staged, sink_widens=self.widens)
        return follow(topic, columns, rows, policy, self.widens)

    def stored(self, topic: Topic) -> pa.Schema | None:
        """The columns of the target, as a task can see them; None when there is none yet."""
        return self.schema(topic)

    def widens(self, old: pa.DataType, new: pa.DataType) -> bool:
        """True when a stored column can get the wider type."""
        return False

    def flush(self) -> None:
        assert self._stage is not None
        self._stage.flush()

    def pre_commit(self, epoch: Epoch) -> StagedFiles:
        assert self._stage is not None
        staged = self._stage.finish()
        self._stage = None
        return StagedFiles(staged=staged)

    def health_check(self) -> HealthStatus:
        root = self._targets.root
        return HealthStatus.healthy() if os.access(root, os.W_OK) else HealthStatus.unhealthy(f"cannot write to {root}")

    def suffix(self) -> str:
        """How the names of files end."""
        return ".parquet"

    def place(self, target: Path, path: str) -> Path:
        """Where the file with a given path below a target stands while it is staged."""
        return target / path

    def begin_file(self, path: Path, schema: pa.Schema) -> Part:
        raise NotImplementedError


def drop_lists(root: Path, pipeline: str, staged: Iterable[StagedTopic]) -> None:
    """Forget the begun files of tasks whose files are committed: from here on no sweep touches them."""
    for each in staged:
        path = _lists(root, pipeline) / each.listed
        path.unlink(missing_ok=True)
        _remove_if_empty(path.parent)


def sweep(
    root: Path, epoch: Epoch, keep: Callable[[Topic, Path], bool], lists: str = "", only: Topic | None = None
) -> None:
    """
    Remove every file that this try began, unless `keep` says otherwise.

    Of all its lists, or those named like `lists`; of all topics, or `only` one.
    """
    directory = _lists(root, epoch.pipeline) / epoch.stem()
    for listed in sorted(directory.glob(f"{lists}*")) if directory.exists() else ():
        topic, *places = listed.read_text().splitlines() or [""]  # empty: its task died before it had begun a file
        if only is not None and topic not in ("", only):
            continue
        for place in map(Path, places):
            if place.name.startswith(epoch.stem()) and not keep(topic, place):
                place.unlink(missing_ok=True)
        listed.unlink(missing_ok=True)
    _remove_if_empty(directory)


def has_lists(root: Path, epoch: Epoch, lists: str) -> bool:
    """True if files were begun under such a name in this try."""
    return any((_lists(root, epoch.pipeline) / epoch.stem()).glob(f"{lists}*"))


def names(receipts: Iterable[StagedFiles]) -> set[str]:
    """The names of all files in the receipts."""
    return {os.path.basename(f.path) for receipt in receipts for topic in receipt.staged.values() for f in topic.files}


def is_there(path: Path, size: int) -> bool:
    """True when the file is there and whole."""
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _lists(root: Path, pipeline: str) -> Path:
    return root / HIDDEN / ".begun" / quote(pipeline, safe="")


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # not there, or a task that failed has left its list for the sweep
        directory.rmdir()
